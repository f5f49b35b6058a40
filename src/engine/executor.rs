//! Threads that run the program's own code: never a poller, never the caller. One runs callbacks; one ends owners of memory outside
//! the pool, so that a callback that waits for a buffer to be released does not wait for itself.
#![allow(clippy::disallowed_types, clippy::disallowed_methods)] // the queue of a thread of its own

use super::pin::{allow_current_thread, cpus_before_pin};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

type Job = Box<dyn FnOnce() + Send>;

/// Runs jobs in their order on a thread of its own, which starts with the first one and is parked while there are
/// none. Clones share the thread. The default one is for callbacks.
#[derive(Clone)]
pub struct Executor {
    shared: Arc<Mutex<State>>,
    work: Work,
}

/// What an executor runs, for its thread's name and for the log.
#[derive(Clone, Copy)]
struct Work {
    thread: &'static str,
    panicked: &'static str,
}

const CALLBACKS: Work = Work {
    thread: "tw-callbacks",
    panicked: "a callback of a receive panicked; the receive itself was complete",
};

const OWNERS: Work =
    Work { thread: "tw-owners", panicked: "the drop of an owner of memory outside the pool panicked" };

#[derive(Default)]
struct State {
    /// Whether jobs run where they are handed in.
    on_the_spot: bool,
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    stopped: bool,
}

impl Default for Executor {
    fn default() -> Self {
        Executor::of(CALLBACKS)
    }
}

impl Executor {
    fn of(work: Work) -> Self {
        Executor { shared: Arc::default(), work }
    }

    /// One that ends owners of memory outside the pool.
    pub fn of_owners() -> Self {
        Executor::of(OWNERS)
    }

    /// One that runs jobs at once, on the stack of whoever hands them in: for virtual time, where a thread's pace would
    /// change the run.
    pub fn on_the_spot() -> Self {
        let executor = Executor::default();
        executor.state().on_the_spot = true;
        executor
    }

    /// Has `job` run. A panic in it ends that job alone. After [`Executor::stop`] each job has a thread of its own,
    /// which nobody waits for, so that none is lost and none runs on a poller or on the caller's stack. If the system
    /// gives no thread for it, the job is dropped, and an error is logged.
    pub fn run(&self, job: impl FnOnce() + Send + 'static) {
        let Err((job, on_the_spot)) = self.enqueue(Box::new(job)) else { return };
        if on_the_spot {
            return self.work.guarded(job);
        }
        let (thread, work) = (std::thread::Builder::new().name("tw-late-call".into()), self.work);
        if let Err(error) = thread.spawn(move || work.guarded(job)) {
            tracing::error!("a callback was dropped, as the system gives no thread to run it on: {error}");
        }
    }

    /// As [`Executor::run`], for a job that may run on the caller's stack where there is no thread: after [`Executor::stop`].
    pub fn run_or_here(&self, job: impl FnOnce() + Send + 'static) {
        if let Err((job, _)) = self.enqueue(Box::new(job)) {
            self.work.guarded(job);
        }
    }

    /// Queues a job for the thread. If there is none, it comes back, with whether it may run here.
    fn enqueue(&self, job: Job) -> Result<(), (Job, bool)> {
        let mut state = self.state();
        if state.on_the_spot || state.stopped {
            return Err((job, state.on_the_spot));
        }
        if state.jobs.is_none() {
            let ((sender, receiver), work) = (channel(), self.work);
            let thread = std::thread::Builder::new().name(work.thread.into());
            // The first job may come from a poller, which has a CPU to itself.
            let cpus = cpus_before_pin();
            let run = move || {
                cpus.iter().for_each(|cpus| allow_current_thread(cpus));
                work.on(&receiver);
            };
            match thread.spawn(run) {
                Ok(thread) => state.thread = Some(thread),
                Err(_) => return Err((job, false)),
            }
            state.jobs = Some(sender);
        }
        match &state.jobs {
            Some(jobs) => jobs.send(job).map_err(|error| (error.0, false)),
            None => Err((job, false)),
        }
    }

    /// Runs what is queued, then ends the thread. Does nothing the second time, nor waits for itself when a
    /// callback calls it.
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

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Work {
    /// Runs jobs until there will be no more.
    fn on(self, jobs: &Receiver<Job>) {
        while let Ok(job) = jobs.recv() {
            self.guarded(job);
        }
    }

    fn guarded(self, job: Job) {
        if catch_unwind(AssertUnwindSafe(job)).is_err() {
            tracing::error!("{}", self.panicked);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
        executor.run(move || sender.send(1).expect("open"));
        executor.stop();
        assert_eq!(receiver.try_iter().collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn stopping_twice_or_from_a_job_does_not_hang() {
        let executor = Executor::default();
        let inner = executor.clone();
        executor.run(move || inner.stop());
        executor.stop();
        executor.stop();
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
    fn what_ends_owners_has_a_thread_of_its_own_by_name() {
        let (callbacks, owners) = (Executor::default(), Executor::of_owners());
        let (sender, receiver) = mpsc::channel();
        let (go, gone) = mpsc::channel();
        // A callback that waits for what an owner's end will say.
        callbacks.run(move || gone.recv_timeout(std::time::Duration::from_secs(20)).expect("an owner's end"));
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
    fn what_may_run_here_does_so_after_the_stop_alone() {
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
