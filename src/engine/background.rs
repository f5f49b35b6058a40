//! The background poller: starts its thread, pins it and ends it.
#![allow(clippy::disallowed_methods)] // starting a thread waits until it is pinned

use super::shared_poller::Engine;
use super::{PinError, PollMode, pin_current_thread};
use crate::fabric::Port;
use crate::link::Handler;
use crate::memory::ForkGuard;
use crate::wire::Time;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::thread::JoinHandle;

/// The state of the background poller that calls read and change.
#[derive(Debug, Default)]
pub(super) struct BackgroundState {
    closing: AtomicBool,
    /// The time at which its sleep ends at the latest, in ns of the engine's clock. 0 while it is
    /// awake.
    asleep_until: AtomicU64,
    /// Whether it only checks now and then whether calls continue.
    on_standby: AtomicBool,
    /// Number of calls that have left the port unarmed.
    calls: AtomicU64,
    /// The value of `calls` at the last check.
    seen_calls: AtomicU64,
}

impl BackgroundState {
    pub fn close(&self) {
        self.closing.store(true, Ordering::SeqCst);
    }

    #[inline]
    pub fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Relaxed)
    }

    /// Notes that a call has left the port unarmed. Returns whether the background poller must be
    /// woken for standby.
    pub fn enter_standby(&self) -> bool {
        self.calls.fetch_add(1, Ordering::SeqCst);
        !self.on_standby.swap(true, Ordering::SeqCst)
    }

    /// Whether a call has left the port unarmed since the last check. If not, standby ends and the
    /// background poller takes over. It then sees what the last such call left, and the next such
    /// call wakes it. Called by the background poller.
    pub fn calls_continue(&self) -> bool {
        if !self.on_standby.load(Ordering::SeqCst) {
            return false;
        }
        let calls = self.calls.load(Ordering::SeqCst);
        let continued = self.seen_calls.swap(calls, Ordering::Relaxed) != calls;
        if !continued {
            self.on_standby.store(false, Ordering::SeqCst);
        }
        continued
    }

    pub fn set_asleep_until(&self, time: Time) {
        self.asleep_until.store(time.as_nanos(), Ordering::SeqCst);
    }

    pub fn set_awake(&self) {
        self.asleep_until.store(0, Ordering::SeqCst);
    }

    /// Whether its sleep may last longer than until `time`.
    pub fn sleeps_past(&self, time: Time) -> bool {
        self.asleep_until.load(Ordering::SeqCst) > time.as_nanos()
    }
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

/// Starts the background poller of `mode`, pinned to `core` if one is given, and switches the
/// engine to that mode. `number` is part of the thread's name and tells the pollers of a process
/// apart.
///
/// # Errors
/// If the thread cannot be started or pinned. The engine then keeps its mode.
///
/// # Panics
/// If the mode is inline, which has no thread.
pub fn start<P: Port, H: Handler<P>>(
    engine: &Arc<Engine<P, H>>,
    mode: PollMode,
    core: Option<usize>,
    number: usize,
) -> Result<PollingThread, StartError> {
    let work: fn(&Engine<P, H>) = match mode {
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
        polled.set_mode(mode);
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
    engine.set_mode(mode);
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
