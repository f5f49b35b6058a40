//! Pollers: they drain the completions of a port and move the layer above on.
//!
//! A [`Poller`] owns the links of a port and a [`Handler`](crate::link::Handler), which is the
//! layer above. [`Poller::step`] moves both on. The caller hands it the time: a poller never reads
//! a clock. An [`Engine`] shares one poller between the threads of a process, in one of three
//! modes:
//!
//! | mode | progress is made by | while nothing comes |
//! |---|---|---|
//! | [`Inline`](PollMode::Inline) | the calls, one at a time | calls spin or yield |
//! | [`Adaptive`](PollMode::Adaptive) | the calls; a background poller while there are none | all of them spin for a moment, then sleep |
//! | [`Dedicated`](PollMode::Dedicated) | a background poller; calls submit commands to it | the background poller spins |
//!
//! Code in this module may not look at what a message means. It may not hold a lock while it runs
//! user code, and runs user code only on the [`Executor`].

mod adaptive;
mod background;
mod clock;
mod dedicated;
mod direct;
mod executor;
mod pin;
mod poll_mode;
mod poller;
mod shared_poller;
mod submission_queue;
mod wait_strategy;

pub use background::{PollingThread, StartError, start};
pub use clock::Clock;
pub use direct::{DirectTake, DirectWait, WaitLimit};
pub use executor::Executor;
pub use pin::{PinError, UnpinnedThread, pin_current_thread, process_cpus};
pub use poll_mode::{EngineOptions, PollMode};
pub use poller::Poller;
pub use shared_poller::{Engine, Unusable};
pub use wait_strategy::WaitStrategy;
