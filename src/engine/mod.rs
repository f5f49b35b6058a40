//! Pollers: who drains the completions, who may do it, how one waits.
//!
//! A [`Poller`] owns a port's links and a [`Handler`], the layer above, and moves both on by
//! [`step`](Poller::step). It is handed the time and never asks for it. [`Inline`] shares one poller between
//! the threads of a process without a thread of its own: whoever calls makes progress, one at a time.
//!
//! What may not be done here: look at what a message means, hold a lock, run user code outside the
//! [`Executor`].

mod call;
mod clock;
mod executor;
mod inline;
mod pin;
mod poller;
mod sync;
mod token;
mod wait;

pub use call::{Abandoned, Calls, Completer, Ticket};
pub use clock::Clock;
pub use executor::Executor;
pub use inline::{Inline, InlineOptions, Unusable};
pub use pin::{PinError, pin_current_thread, process_cpus};
pub use poller::{Handler, Poller};
pub use wait::Waiting;
