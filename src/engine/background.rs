//! The thread of a poller: started, pinned, ended.
#![allow(clippy::disallowed_methods)] // starting a thread waits until it is pinned

use super::shared_poller::Engine;
use super::{Handler, PinError, PollMode, pin_current_thread};
use crate::fabric::Port;
use crate::memory::ForkGuard;
use crate::wire::Time;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::thread::JoinHandle;

/// What others must know of the thread.
#[derive(Debug, Default)]
pub(super) struct BackgroundState {
    closing: AtomicBool,
    /// Until when it sleeps at most, in ns of the engine's clock; 0 while it does not.
    asleep_until: AtomicU64,
    /// Whether it looks now and then whether calls go on.
    on_standby: AtomicBool,
    /// OneshotPool that left the port unarmed; how many of them it has seen.
    calls: AtomicU64,
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

    /// A call has left the port unarmed. Returns whether the thread must be woken to watch.
    pub fn watch(&self) -> bool {
        self.calls.fetch_add(1, Ordering::SeqCst);
        !self.on_standby.swap(true, Ordering::SeqCst)
    }

    /// For the thread: whether there were such calls since it asked last. If not, it watches no more and takes over:
    /// what the last of them left is behind it then, and the next one wakes it.
    pub fn calls_continue(&self) -> bool {
        if !self.on_standby.load(Ordering::SeqCst) {
            return false;
        }
        let calls = self.calls.load(Ordering::SeqCst);
        let go_on = self.seen_calls.swap(calls, Ordering::Relaxed) != calls;
        if !go_on {
            self.on_standby.store(false, Ordering::SeqCst);
        }
        go_on
    }

    pub fn set_asleep_until(&self, time: Time) {
        self.asleep_until.store(time.as_nanos(), Ordering::SeqCst);
    }

    pub fn set_awake(&self) {
        self.asleep_until.store(0, Ordering::SeqCst);
    }

    /// Whether it would sleep longer than this.
    pub fn sleeps_past(&self, time: Time) -> bool {
        self.asleep_until.load(Ordering::SeqCst) > time.as_nanos()
    }
}

/// The thread of an engine. Dropping it closes the engine and waits for the thread.
pub struct PollingThread {
    close: Box<dyn Fn() + Send + Sync>,
    thread: Option<JoinHandle<()>>,
    fork_guard: ForkGuard,
}

/// Why a polling thread did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// It could not be pinned.
    #[error(transparent)]
    Pin(#[from] PinError),
    /// The system gave no thread.
    #[error("starting the polling thread {name} failed: {source}; raise the limit of threads (ulimit -u)")]
    Thread {
        /// Its name.
        name: String,
        /// The system's error.
        source: std::io::Error,
    },
}

/// Starts the thread that `mode` asks for, pinned to `core` if one is given, and has the engine work in that mode from
/// now on. `number` tells the pollers of a process apart in the thread's name.
///
/// # Errors
/// If the thread can't be had or pinned; the engine is then as it was.
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
    let driven = Arc::clone(engine);
    let body = move || {
        let result = core.map_or(Ok(()), pin_current_thread);
        let failed = result.is_err();
        // The starter waits for this.
        let _ = pinned.send(result);
        if failed {
            return;
        }
        driven.set_mode(mode);
        work(&driven);
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
        fork_guard: ForkGuard::new(),
    })
}

impl Drop for PollingThread {
    fn drop(&mut self) {
        if self.fork_guard.in_child() {
            // The thread, and whatever it holds, is the parent's.
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
