//! One poller, shared by all threads of a process.

use super::submission_queue::SubmissionQueue;
use super::{Clock, EngineOptions, PollMode, Poller, WaitStrategy};
use crate::fabric::{Port, Sleep, Sleeper};
use crate::link::Handler;
use crate::sync::{CombiningLock, LockOutcome, Sleepers, catch_panic, is_waking};
use crate::telemetry::Counters;
use crate::wire::Time;
use crossbeam_utils::CachePadded;
use std::cell::UnsafeCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// A poller shared by the threads of a process. One of them holds it at a time.
///
/// In the inline and adaptive modes a calling thread takes the [combining lock](CombiningLock) with
/// one compare-and-swap. A thread that calls alone needs none. It runs its own command and all
/// submitted ones, polls, and releases the lock. A thread that finds the lock taken submits its
/// command to a queue, which the holder checks before and after the release. In the dedicated mode
/// the background poller holds the lock from start to end.
pub struct Engine<P: Port, H: Handler<P>> {
    pub(super) lock: CachePadded<CombiningLock>,
    pub(super) submissions: SubmissionQueue<H::Command>,
    poller: UnsafeCell<Option<Poller<P, H>>>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) mode: PollMode,
    pub(super) wait: WaitStrategy,
    pub(super) spin: Duration,
    pub(super) hung_after: Duration,
    pub(super) sleeper: P::Sleeper,
    pub(super) sleepers: CachePadded<Sleepers>,
    closing: AtomicBool,
    /// The poller's counters.
    pub(super) counters: Arc<Counters>,
    /// The first look at the clock of the last direct wait that spun in vain; 0 if another wait has
    /// taken it. Only a hint.
    pub(super) spun_since: AtomicU64,
}

// SAFETY: the poller inside the cell is touched only in `run_held`, by the thread that holds the
// lock. The lock orders one holder's accesses before the next one's. Everything in the poller may
// move between threads (`Port: Send`, `Handler: Send`), which is all that successive holders need.
// The other fields are `Sync`.
#[allow(unsafe_code)]
unsafe impl<P: Port, H: Handler<P>> Sync for Engine<P, H> {}

/// Why a poller can't be used any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unusable {
    /// A thread panicked while it held the poller.
    #[error("a thread panicked while it moved the poller: every call on it fails from now on")]
    Poisoned,
    /// The poller was closed.
    #[error("the poller was closed")]
    Closed,
}

impl<P: Port, H: Handler<P>> Engine<P, H> {
    /// Shares a poller. [`start`](super::start) starts the background poller of the modes that have
    /// one.
    pub fn new(poller: Poller<P, H>, clock: Arc<dyn Clock>, options: &EngineOptions) -> Self {
        Engine {
            lock: CachePadded::new(CombiningLock::new()),
            submissions: SubmissionQueue::new(options.queue),
            sleeper: poller.sleeper(),
            counters: poller.counters(),
            poller: UnsafeCell::new(Some(poller)),
            clock,
            mode: options.mode,
            wait: options.wait,
            spin: options.spin,
            hung_after: options.hung_after,
            sleepers: CachePadded::new(Sleepers::new()),
            closing: AtomicBool::new(false),
            spun_since: AtomicU64::new(0),
        }
    }

    /// The time now.
    pub fn now(&self) -> Time {
        self.clock.now()
    }

    /// The poll mode.
    #[inline]
    pub fn mode(&self) -> PollMode {
        self.mode
    }

    /// Runs a command: at once on this thread if it gets the lock, otherwise soon on the thread
    /// that holds it. The commands of one thread run in its order.
    ///
    /// # Errors
    /// If the poller is poisoned or closed.
    pub fn submit(&self, command: H::Command) -> Result<(), Unusable> {
        match self.mode {
            PollMode::Dedicated => self.submit_to_thread(command),
            PollMode::Inline | PollMode::Adaptive => self.submit_inline(command),
        }
    }

    fn submit_inline(&self, command: H::Command) -> Result<(), Unusable> {
        let now = self.clock.now();
        let mut command = Some(command);
        let mut round = 0;
        loop {
            let outcome = self.with_poller(|poller| {
                if let Some(command) = command.take() {
                    // The queue is empty, so a returned command refers to nothing; drop it.
                    drop(poller.command(command, now));
                }
            })?;
            match (outcome, command.take()) {
                (_, None) => return Ok(()),
                (_, Some(mine)) => match self.submissions.push(mine) {
                    // The holder may have released the lock before it saw the push: then this
                    // thread runs the command.
                    Ok(()) => return self.with_poller(|_| {}).map(drop),
                    Err(mine) => command = Some(mine),
                },
            }
            self.wait.pause(round);
            round = round.saturating_add(1);
        }
    }

    /// Makes progress once, unless another thread holds the lock. Returns the number of
    /// completions.
    ///
    /// # Errors
    /// If the poller is poisoned or closed.
    pub fn progress(&self) -> Result<usize, Unusable> {
        if self.mode != PollMode::Inline {
            return self.progress_beside_thread();
        }
        let mut count = 0;
        let now = self.clock.now();
        self.with_poller(|poller| count += poller.step(now))?;
        Ok(count)
    }

    #[inline(never)]
    fn progress_beside_thread(&self) -> Result<usize, Unusable> {
        match self.mode {
            PollMode::Dedicated => self.check().map(|()| 0),
            PollMode::Inline | PollMode::Adaptive => self.progress_adaptive(),
        }
    }

    /// Makes progress, or lets the background poller make it, until `done` returns `true` or
    /// `deadline` has passed. Returns whether `done` was `true`. Only the poller may make `done`
    /// true; any other thread that does so calls [`nudge`](Engine::nudge) afterwards.
    ///
    /// # Errors
    /// If the poller is poisoned or closed.
    pub fn wait(&self, deadline: Time, done: &dyn Fn() -> bool) -> Result<bool, Unusable> {
        if done() {
            return Ok(true);
        }
        match self.mode {
            PollMode::Inline => self.wait_inline(deadline, done),
            PollMode::Adaptive => self.wait_adaptive(deadline, done),
            PollMode::Dedicated => self.wait_for_thread(deadline, done),
        }
    }

    fn wait_inline(&self, deadline: Time, done: &dyn Fn() -> bool) -> Result<bool, Unusable> {
        let mut idle = 0;
        loop {
            let now = self.clock.now();
            if self.poll_until(now, self.wait.polls(), done)? > 0 {
                idle = 0;
            }
            if done() {
                return Ok(true);
            }
            if now >= deadline {
                return Ok(false);
            }
            self.wait.pause(idle);
            idle = idle.saturating_add(1);
        }
    }

    /// Polls up to `polls` times, until `done`. Returns the number of completions.
    pub(super) fn poll_until(
        &self,
        now: Time,
        polls: u32,
        done: &dyn Fn() -> bool,
    ) -> Result<usize, Unusable> {
        let mut count = 0;
        self.with_poller(|poller| {
            for _ in 0..polls {
                self.run_submitted(poller, now);
                let more = poller.step(now);
                count += more;
                if more > 0 && done() {
                    break;
                }
            }
        })?;
        Ok(count)
    }

    /// Wakes sleeping waiters, so that they check whether they are done, after a change outside the
    /// poller.
    #[inline]
    pub fn nudge(&self) {
        self.sleepers.wake(|| self.sleeper.wake(Sleep::Waiter));
    }

    /// Ends the poller: closes its links and ends every wait. Does nothing the second time.
    pub fn close(&self) {
        self.closing.store(true, Ordering::SeqCst);
        self.sleeper.wake(Sleep::Waiter);
        self.sleeper.wake(Sleep::Background);
        let end = |cell: &mut Option<Poller<P, H>>| {
            drop(cell.take());
            while self.submissions.pop().is_some() {}
        };
        let mut round = 0;
        while let Ok(LockOutcome::Busy) = self.with_cell(end) {
            if is_waking() {
                // This thread may hold the poller, which ends with the engine then.
                return;
            }
            WaitStrategy::Yield.pause(round);
            round = round.saturating_add(1);
        }
    }

    /// Checks that the poller can still be used.
    ///
    /// # Errors
    /// If it is poisoned or closed.
    pub(super) fn check(&self) -> Result<(), Unusable> {
        match () {
            () if self.lock.is_poisoned() => Err(Unusable::Poisoned),
            () if self.is_closing() => Err(Unusable::Closed),
            () => Ok(()),
        }
    }

    #[inline]
    pub(super) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Relaxed)
    }

    /// Runs `body` under the lock, after all submitted commands.
    #[inline]
    pub(super) fn with_poller(
        &self,
        mut body: impl FnMut(&mut Poller<P, H>),
    ) -> Result<LockOutcome, Unusable> {
        let mut closed = false;
        let outcome = self.with_cell(|cell| match cell {
            Some(poller) => {
                if !self.submissions.is_empty() {
                    self.run_submitted(poller, self.clock.now());
                }
                body(poller);
                if self.mode == PollMode::Adaptive {
                    self.before_unlock(poller);
                }
            }
            None => {
                // Dropping a command ends its call.
                while self.submissions.pop().is_some() {}
                closed = true;
            }
        })?;
        if closed { Err(Unusable::Closed) } else { Ok(outcome) }
    }

    pub(super) fn with_cell(
        &self,
        mut body: impl FnMut(&mut Option<Poller<P, H>>),
    ) -> Result<LockOutcome, Unusable> {
        let run = || {
            // SAFETY: `CombiningLock::try_run` calls this only while this thread holds the lock.
            #[allow(unsafe_code)]
            let ran = unsafe { self.run_held(&mut body) };
            ran.is_some()
        };
        let may_bias = self.mode == PollMode::Inline;
        match self.lock.try_run(run, || !self.submissions.is_empty(), may_bias) {
            LockOutcome::Poisoned => Err(self.poisoned()),
            outcome => Ok(outcome),
        }
    }

    /// Calls `body` on the cell of the poller. `None` if it panicked: the poller is dropped then,
    /// and the caller poisons the lock.
    ///
    /// # Safety
    /// This thread holds the lock.
    #[allow(unsafe_code)]
    #[inline]
    pub(super) unsafe fn run_held<R>(&self, body: impl FnOnce(&mut Option<Poller<P, H>>) -> R) -> Option<R> {
        // SAFETY: this thread holds the lock, so there is no other reference to the poller. `body`
        // can't come back here with this reference alive, as it finds the lock taken.
        let cell = unsafe { &mut *self.poller.get() };
        let ran = catch_panic(|| body(cell));
        if ran.is_none() {
            drop_quietly(cell.take());
        }
        ran
    }

    /// Ends what waits for a poller that a thread has poisoned.
    #[cold]
    pub(super) fn poisoned(&self) -> Unusable {
        while let Some(command) = self.submissions.pop() {
            drop_quietly(command);
        }
        self.sleeper.wake(Sleep::Waiter);
        Unusable::Poisoned
    }

    #[inline(never)] // keeps direct calls short
    pub(super) fn run_submitted(&self, poller: &mut Poller<P, H>, now: Time) {
        if self.submissions.is_empty() {
            return;
        }
        for _ in 0..self.submissions.capacity() {
            let Some(command) = self.submissions.pop() else { return };
            drop(poller.command(command, now));
        }
    }
}

/// Drops a poller, whose state is unknown after a panic, or a command. This closes the links of the
/// poller, and ends the calls.
#[cold]
fn drop_quietly<T>(value: T) {
    catch_panic(|| drop(value));
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::engine::{Executor, start};
    use crate::fabric::Fabric;
    use crate::fabric::shm::{ShmFabric, ShmOptions, ShmPort};
    use crate::link::{LinkEvent, Links};
    use crate::memory::{PagePolicy, Pool, PoolOptions, Region, RegionOptions};
    use crate::sync::{Canceled, OneshotSender, PanickingPayload};
    use crate::telemetry::CountersWriter;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    #[derive(Debug)]
    pub struct Ended;

    impl Canceled for Ended {
        fn canceled() -> Self {
            Ended
        }
    }

    /// Keeps senders, and panics on command.
    pub struct TestHandler(Vec<OneshotSender<Ended>>);

    pub enum TestCommand {
        Keep(OneshotSender<Ended>),
        Panic,
    }

    impl Handler<ShmPort> for TestHandler {
        type Command = TestCommand;

        fn command(&mut self, _: &mut Links<ShmPort>, command: TestCommand, _: Time) -> Option<TestCommand> {
            match command {
                TestCommand::Keep(waiter) => {
                    self.0.push(waiter);
                    None
                }
                TestCommand::Panic => std::panic::panic_any(PanickingPayload),
            }
        }

        fn event(&mut self, _: &mut Links<ShmPort>, _: LinkEvent, _: Time) {}

        fn next_deadline(&self) -> Time {
            Time::NEVER
        }

        fn expire(&mut self, _: &mut Links<ShmPort>, _: Time) {}
    }

    struct Still;

    impl Clock for Still {
        fn now(&self) -> Time {
            Time::from_nanos(0)
        }
    }

    fn engine() -> (Engine<ShmPort, TestHandler>, Arc<crate::telemetry::Counters>) {
        let writer = CountersWriter::new();
        let counters = writer.counters();
        (engine_of(writer, Arc::new(Still), PollMode::Inline, WaitStrategy::Yield), counters)
    }

    /// An inline engine without links, and its counters.
    pub fn engine_and_counters() -> (Engine<ShmPort, TestHandler>, Arc<crate::telemetry::Counters>) {
        engine()
    }

    /// An engine without links, whose waits spin.
    pub fn engine_with(clock: Arc<dyn Clock>, mode: PollMode) -> Engine<ShmPort, TestHandler> {
        engine_of(CountersWriter::new(), clock, mode, WaitStrategy::Spin)
    }

    fn engine_of(
        writer: CountersWriter,
        clock: Arc<dyn Clock>,
        mode: PollMode,
        wait: WaitStrategy,
    ) -> Engine<ShmPort, TestHandler> {
        let region = RegionOptions { pages: PagePolicy::Plain, ..RegionOptions::new(1 << 16) };
        let region = Region::create(0, &region).expect("a region");
        let pool = Pool::new(region, PoolOptions::default()).expect("a pool");
        let fabric = ShmFabric::new(&pool, ShmOptions::default()).expect("a fabric");
        let links = Links::new(fabric.port().expect("a port"), pool, writer);
        let options =
            EngineOptions { mode, wait, spin: Duration::ZERO, hung_after: Duration::MAX, queue: 64 };
        Engine::new(Poller::new(links, TestHandler(Vec::new())), clock, &options)
    }

    #[test]
    fn a_panic_ends_every_call_at_once_and_the_poller_with_it() {
        let (engine, counters) = engine();
        let executor = Executor::default();
        let (told, ended) = channel();
        let waiter = OneshotSender::callback(executor.callback(move |Ended| told.send(()).expect("open")));
        engine.submit(TestCommand::Keep(waiter)).expect("usable");
        assert_eq!(engine.submit(TestCommand::Panic), Err(Unusable::Poisoned));
        ended
            .recv_timeout(Duration::from_secs(10))
            .expect("the callback is called though the engine still exists");
        // This reader and the engine's.
        assert_eq!(Arc::strong_count(&counters), 2, "the poller's own half is gone");
        assert_eq!(engine.progress(), Err(Unusable::Poisoned));
        engine.close();
        executor.stop();
    }

    /// A dedicated poller ends by `end` while a thread with a lane submits to it.
    fn every_call_ends(end: fn(&Engine<ShmPort, TestHandler>)) {
        const CALLS: usize = 2000;
        let engine = Arc::new(engine_with(Arc::new(Still), PollMode::Dedicated));
        let thread = start(&engine, None, 0).expect("a thread");
        let executor = Executor::default();
        let (told, ended) = channel();
        let mut submitted = 0;
        for number in 0..CALLS {
            if number == CALLS / 2 {
                end(&engine);
            }
            let told = told.clone();
            let waiter =
                OneshotSender::callback(executor.callback(move |Ended| told.send(()).expect("open")));
            // A command that is refused is dropped, which ends its call too.
            submitted += 1;
            let _ = engine.submit(TestCommand::Keep(waiter));
            if number % 64 == 0 {
                // The queue empties, and the thread gets a lane.
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        for nth in 0..submitted {
            ended
                .recv_timeout(Duration::from_secs(10))
                .unwrap_or_else(|_| panic!("{nth} of {submitted} ended"));
        }
        drop(thread);
        executor.stop();
    }

    #[test]
    fn a_panic_of_a_dedicated_poller_ends_the_calls_in_the_lanes_too() {
        every_call_ends(|engine| engine.submit(TestCommand::Panic).expect("it is submitted"));
    }

    #[test]
    fn closing_a_dedicated_poller_ends_the_calls_in_the_lanes_too() {
        every_call_ends(Engine::close);
    }
}
