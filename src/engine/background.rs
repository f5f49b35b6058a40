//! The background poller: starts its thread, pins it and ends it.
#![allow(clippy::disallowed_methods)] // starting a thread waits until it is pinned; standby sleeps

use super::shared_poller::Engine;
use super::{PinError, PollMode, pin_current_thread};
use crate::fabric::Port;
use crate::link::Handler;
use crate::memory::ForkGuard;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::Duration;

/// Time between two checks on standby: without a poll of a call in it, the background poller takes
/// over.
const STANDBY: Duration = Duration::from_millis(1);

/// Sleeps until the next check on standby, whatever comes: calls are under way, which see it.
pub(super) fn sleep_on_standby() {
    std::thread::sleep(STANDBY);
}

/// The handle of an engine's background poller. Dropping it closes the engine and joins the thread.
pub struct PollingThread {
    close: Box<dyn Fn() + Send + Sync>,
    thread: Option<JoinHandle<()>>,
    fork_guard: ForkGuard,
}

/// Why a background poller did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The thread could not be pinned.
    #[error(transparent)]
    Pin(#[from] PinError),
    /// The system refused a thread.
    #[error("starting the polling thread {name} failed: {source}; raise the limit of threads (ulimit -u)")]
    Thread {
        /// As the kernel shows it, at most 15 bytes.
        name: String,
        /// The system's error.
        source: std::io::Error,
    },
}

/// Starts the background poller, pinned to `core` if one is given. `number` is part of the thread's
/// name and tells the pollers of a process apart.
///
/// # Errors
/// If the thread cannot be started or pinned.
///
/// # Panics
/// If the mode is inline, which has no thread.
pub fn start<P: Port, H: Handler<P>>(
    engine: &Arc<Engine<P, H>>,
    core: Option<usize>,
    number: usize,
) -> Result<PollingThread, StartError> {
    let work: fn(&Engine<P, H>) = match engine.mode() {
        PollMode::Dedicated => Engine::run_dedicated,
        PollMode::Adaptive => Engine::run_adaptive,
        PollMode::Inline => panic!("the inline mode has no thread"),
    };
    let name = format!("tw-poll-{number}");
    let (pinned, outcome) = channel();
    let polled = Arc::clone(engine);
    let body = move || {
        let result = core.map_or(Ok(()), pin_current_thread);
        let failed = result.is_err();
        // `start` waits for this.
        let _ = pinned.send(result);
        if failed {
            return;
        }
        work(&polled);
    };
    let thread = std::thread::Builder::new()
        .name(name.clone())
        .spawn(body)
        .map_err(|source| StartError::Thread { name, source })?;
    match outcome.recv() {
        Ok(result) => result?,
        Err(_) => unreachable!("the thread sends before it can panic"),
    }
    let engine = Arc::clone(engine);
    Ok(PollingThread {
        close: Box::new(move || engine.close()),
        thread: Some(thread),
        fork_guard: ForkGuard::of_this_process(),
    })
}

impl Drop for PollingThread {
    fn drop(&mut self) {
        if self.fork_guard.in_child() {
            // This process is a fork: the thread and all it holds belong to the parent.
            std::mem::forget(self.thread.take());
            return;
        }
        (self.close)();
        if let Some(thread) =
            self.thread.take().filter(|thread| thread.thread().id() != std::thread::current().id())
        {
            // Panics of the handler are caught where it runs.
            let _ = thread.join();
        }
    }
}
