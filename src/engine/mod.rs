//! Pollers: who drains the completions, who may do it, how one waits.
//!
//! A [`Poller`] owns a port's links and a [`Handler`], the layer above, and moves both on by
//! [`step`](Poller::step). It is handed the time and never asks for it. An [`Engine`] shares one poller between
//! the threads of a process, in one of three modes:
//!
//! | mode | who makes progress | while nothing comes |
//! |---|---|---|
//! | [`Inline`](Mode::Inline) | the calls, one at a time | they spin or yield |
//! | [`Adaptive`](Mode::Adaptive) | the calls; a thread while there are none | they spin for a moment, then sleep |
//! | [`Dedicated`](Mode::Dedicated) | a thread that owns the poller; calls hand over to it | it spins |
//!
//! What may not be done here: look at what a message means, hold a lock, run user code outside the
//! [`Executor`].

mod adaptive;
mod board;
mod call;
mod cell;
mod clock;
mod dedicated;
mod executor;
mod handover;
mod keeper;
mod mode;
mod pin;
mod poller;
mod shared;
mod sleepers;
mod sync;
mod token;
mod wait;

pub use board::{Boards, Completers, Tickets};
pub use call::{Abandoned, Calls, Completer, Ticket};
pub use clock::Clock;
pub use executor::Executor;
pub use keeper::{PollingThread, StartError, start};
pub use mode::{EngineOptions, Mode, choose_mode};
pub use pin::{PinError, pin_current_thread, process_cpus};
pub use poller::{Handler, Poller};
pub use shared::{Engine, Unusable};
pub use wait::Waiting;
