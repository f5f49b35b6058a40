//! Threads that run the program's own code, which never runs on a poller or on the caller's stack.
//!
//! One executor runs callbacks. Another drops owners of foreign memory, so that a callback that
//! waits for the release of a buffer does not wait for itself.
#![allow(clippy::disallowed_types, clippy::disallowed_methods)] // the queue of a thread of its own

use super::pin::{allow_current_thread, cpus_before_pin};
use crate::sync::catch_panic;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, ThreadId};

type ExecutorJob = Box<dyn FnOnce() + Send>;

/// Runs jobs in order on a thread of its own. The thread starts with the first job and sleeps
/// while there are none.
///
/// Clones share the thread. The default executor is the one for callbacks.
#[derive(Clone)]
pub struct Executor {
    shared: Arc<Mutex<ExecutorState>>,
    kind: ExecutorKind,
}

/// The name of an executor's thread, and the log message for a job that panics.
#[derive(Clone, Copy)]
struct ExecutorKind {
    thread: &'static str,
    panicked: &'static str,
}

const CALLBACKS: ExecutorKind = ExecutorKind {
    thread: "tw-callbacks",
    panicked: "a callback of a receive panicked; the receive itself was complete",
};

const OWNERS: ExecutorKind = ExecutorKind {
    thread: "tw-owners",
    panicked: "the drop of an owner of memory outside the pool panicked",
};

#[derive(Default)]
struct ExecutorState {
    /// Jobs run on the stack of the thread that submits them: see [`Executor::on_the_spot`].
    #[cfg(any(test, feature = "sim"))]
    on_the_spot: bool,
    jobs: Option<Sender<ExecutorJob>>,
    thread: Option<JoinHandle<()>>,
    /// Known after the stop, too.
    id: Option<ThreadId>,
    stopped: bool,
}

impl ExecutorState {
    fn is_on_the_spot(&self) -> bool {
        #[cfg(any(test, feature = "sim"))]
        return self.on_the_spot;
        #[cfg(not(any(test, feature = "sim")))]
        false
    }
}

impl Default for Executor {
    fn default() -> Self {
        Executor::of(CALLBACKS)
    }
}

impl Executor {
    fn of(kind: ExecutorKind) -> Self {
        Executor { shared: Arc::default(), kind }
    }

    /// An executor that drops owners of foreign memory.
    pub fn of_owners() -> Self {
        Executor::of(OWNERS)
    }

    /// An executor that runs jobs at once, on the stack of the thread that submits them. Virtual
    /// time needs it, because the pace of a thread would change the run.
    #[cfg(any(test, feature = "sim"))]
    pub fn on_the_spot() -> Self {
        let executor = Executor::default();
        executor.state().on_the_spot = true;
        executor
    }

    /// Queues `job`. A panic in it affects no other job.
    ///
    /// After [`Executor::stop`] each job runs on a thread of its own, which is not joined. No job
    /// is lost, and none runs on a poller or on the caller's stack. If the system refuses a thread,
    /// the job is dropped and an error is logged.
    pub fn run(&self, job: impl FnOnce() + Send + 'static) {
        let Err((job, on_the_spot)) = self.enqueue(Box::new(job)) else { return };
        if on_the_spot {
            return self.kind.guarded(job);
        }
        let (thread, kind) = (std::thread::Builder::new().name("tw-late-call".into()), self.kind);
        if let Err(error) = thread.spawn(move || kind.guarded(job)) {
            tracing::error!("a callback was dropped, as the system gives no thread to run it on: {error}");
        }
    }

    /// A function that has this executor run `callback` with its argument.
    pub fn callback<T, F>(&self, callback: F) -> impl FnOnce(T) + Send + use<T, F>
    where
        T: Send + 'static,
        F: FnOnce(T) + Send + 'static,
    {
        let executor = self.clone();
        move |argument| executor.run(move || callback(argument))
    }

    /// As [`Executor::run`], but a job that finds no thread, as after [`Executor::stop`], runs on
    /// the caller's stack.
    pub fn run_or_here(&self, job: impl FnOnce() + Send + 'static) {
        if let Err((job, _)) = self.enqueue(Box::new(job)) {
            self.kind.guarded(job);
        }
    }

    /// Queues a job for the thread. If there is no thread, returns the job and whether it runs on
    /// the caller's stack.
    fn enqueue(&self, job: ExecutorJob) -> Result<(), (ExecutorJob, bool)> {
        let mut state = self.state();
        if state.is_on_the_spot() || state.stopped {
            return Err((job, state.is_on_the_spot()));
        }
        if state.jobs.is_none() {
            let ((sender, receiver), kind) = (channel(), self.kind);
            let thread = std::thread::Builder::new().name(kind.thread.into());
            // The first job may come from a pinned poller, whose CPU mask the new thread would
            // inherit.
            let cpus = cpus_before_pin();
            let run = move || {
                cpus.iter().for_each(|cpus| allow_current_thread(cpus));
                kind.run_all(&receiver);
            };
            match thread.spawn(run) {
                Ok(thread) => {
                    state.id = Some(thread.thread().id());
                    state.thread = Some(thread);
                }
                Err(_) => return Err((job, false)),
            }
            state.jobs = Some(sender);
        }
        match &state.jobs {
            Some(jobs) => jobs.send(job).map_err(|error| (error.0, false)),
            None => Err((job, false)),
        }
    }

    /// Runs the queued jobs, then ends the thread. Does nothing the second time. A job that calls
    /// it does not wait for its own thread.
    pub fn stop(&self) {
        let thread = {
            let mut state = self.state();
            state.stopped = true;
            state.jobs = None;
            state.thread.take()
        };
        if let Some(thread) = thread.filter(|thread| thread.thread().id() != std::thread::current().id()) {
            // The thread catches every panic, so joining can't fail.
            let _ = thread.join();
        }
    }

    /// Whether the caller is a job on the executor's thread.
    pub fn is_current(&self) -> bool {
        self.state().id == Some(std::thread::current().id())
    }

    fn state(&self) -> MutexGuard<'_, ExecutorState> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ExecutorKind {
    /// Runs jobs until the executor stops.
    fn run_all(self, jobs: &Receiver<ExecutorJob>) {
        while let Ok(job) = jobs.recv() {
            self.guarded(job);
        }
    }

    fn guarded(self, job: ExecutorJob) {
        if catch_panic(job).is_none() {
            tracing::error!("{}", self.panicked);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::PanickingPayload;
    use std::sync::mpsc;

    #[test]
    fn jobs_run_in_order_on_another_thread() {
        let executor = Executor::default();
        let (sender, receiver) = mpsc::channel();
        for number in 0..10 {
            let sender = sender.clone();
            executor.run(move || sender.send((number, std::thread::current().id())).expect("open"));
        }
        executor.stop();
        let got: Vec<_> = receiver.try_iter().collect();
        assert_eq!(got.iter().map(|(number, _)| *number).collect::<Vec<_>>(), (0..10).collect::<Vec<_>>());
        assert!(got.iter().all(|(_, id)| *id != std::thread::current().id()));
    }

    #[test]
    fn a_panic_ends_one_job_alone() {
        let executor = Executor::default();
        let (sender, receiver) = mpsc::channel();
        executor.run(|| panic!("on purpose"));
        executor.run(|| std::panic::panic_any(PanickingPayload));
        executor.run(move || sender.send(1).expect("open"));
        executor.stop();
        assert_eq!(receiver.try_iter().collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn stopping_twice_or_from_a_job_does_not_hang() {
        let executor = Executor::default();
        let (inner, (sender, receiver)) = (executor.clone(), mpsc::channel());
        executor.run(move || {
            inner.stop();
            sender.send(inner.is_current()).expect("open");
        });
        executor.stop();
        executor.stop();
        assert_eq!((receiver.recv(), executor.is_current()), (Ok(true), false));
    }

    #[test]
    fn a_job_after_the_stop_still_runs_and_not_on_the_callers_stack() {
        let executor = Executor::default();
        executor.stop();
        let (sender, receiver) = mpsc::channel();
        executor.run(move || sender.send(std::thread::current().id()).expect("open"));
        let ran_on = receiver.recv_timeout(std::time::Duration::from_secs(20)).expect("it ran");
        assert_ne!(ran_on, std::thread::current().id());
    }

    #[test]
    fn owners_are_dropped_on_a_named_thread_of_their_own() {
        let (callbacks, owners) = (Executor::default(), Executor::of_owners());
        let (sender, receiver) = mpsc::channel();
        let (go, gone) = mpsc::channel();
        // A callback that waits for a message from the drop of an owner.
        callbacks.run(move || {
            gone.recv_timeout(std::time::Duration::from_secs(20)).expect("the drop of an owner")
        });
        owners.run_or_here(|| panic!("on purpose"));
        owners.run_or_here(move || {
            go.send(()).expect("open");
            sender.send(std::thread::current().name().map(str::to_owned)).expect("open");
        });
        callbacks.stop();
        assert_eq!(receiver.recv(), Ok(Some("tw-owners".to_owned())));
        owners.stop();
    }

    #[test]
    fn run_or_here_uses_the_callers_stack_only_after_the_stop() {
        let executor = Executor::default();
        let (sender, receiver) = mpsc::channel();
        for _ in 0..2 {
            let sender = sender.clone();
            executor.run_or_here(move || sender.send(std::thread::current().id()).expect("open"));
            executor.stop();
        }
        let here: Vec<_> = receiver.try_iter().map(|id| id == std::thread::current().id()).collect();
        assert_eq!(here, [false, true]);
    }
}
