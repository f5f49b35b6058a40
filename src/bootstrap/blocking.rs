//! Calls that may block, each on a thread of its own.
//!
//! They are not on the runtime's threads for such calls: tokio panics if the system has none.

use super::thread::BLOCKING_NAME;
use std::io;
use std::thread::{Builder, JoinHandle};
use tokio::sync::oneshot;

/// Starts `work`. The receiver gets its result, or an error if it panics.
///
/// # Errors
/// If the system has no thread.
pub(super) fn start<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<(JoinHandle<()>, oneshot::Receiver<T>)> {
    let (done, outcome) = oneshot::channel();
    // The receiver may be gone: nobody waits any more.
    let thread = Builder::new().name(BLOCKING_NAME.into()).spawn(move || drop(done.send(work())))?;
    Ok((thread, outcome))
}
