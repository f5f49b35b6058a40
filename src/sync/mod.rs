//! How threads pass results on, take turns and sleep: each primitive once, and its race under loom.
//!
//! | type | purpose |
//! |---|---|
//! | [`OneshotPool`] | one result, from one thread to another |
//! | [`GroupPool`] | several results that are waited for together |
//! | [`Lists`] | lists that travel to another thread and come back |
//! | [`CombiningLock`] | one thread works at a time, also for the others |
//! | [`BiasedMutex`] | a value of one thread at a time, cheap for a thread alone |
//! | [`thread_index`] | a small number for each running thread |
//! | [`Sleepers`] | whether a thread must be woken |
//! | [`catch_panic`] | where panics of other code end |
//! | [`EventCount`](event_count::EventCount) | threads sleep until an event, also in memory of several processes |
//!
//! Code in this module may not know what it carries. Except for [`BiasedMutex`], it may not hold a
//! lock that another thread waits for. The only user code that it may run is the waker of a task,
//! and the drop of what a panic carries.

mod asymmetric_fence;
mod atomic;
mod biased_mutex;
mod combining_lock;
mod completion_group;
pub(crate) mod event_count;
mod oneshot;
mod process_words;
mod result_cell;
mod reuse;
mod sleepers;
mod thread_index;
mod unwinding;
mod waking;
pub(crate) mod words;

pub(crate) use asymmetric_fence::{heavy_fence, light_fence, register_membarrier};
pub(crate) use atomic::UnsafeCell;
pub(crate) use biased_mutex::BiasedMutex;
pub(crate) use combining_lock::{CombiningLock, LockGuard, LockOutcome};
pub use completion_group::{GroupPool, GroupReceiver, GroupSenders};
pub use event_count::Sleep;
pub use oneshot::{Canceled, OneshotPool, OneshotReceiver, OneshotSender};
pub(crate) use process_words::ProcessWords;
pub(crate) use reuse::Lists;
pub use reuse::Reused;
pub(crate) use sleepers::Sleepers;
pub(crate) use thread_index::{MAX_THREADS, known_thread_index, thread_index};
pub(crate) use unwinding::catch_panic;
#[cfg(test)]
pub(crate) use unwinding::tests::PanickingPayload;
pub(crate) use waking::is_waking;
