//! Calls without a command: a thread that gets the poller at once works on its handler itself.

use super::{Engine, PollMode, Poller, Unusable, WaitStrategy};
use crate::fabric::{Port, ShortTake};
use crate::link::{Handler, Links};
use crate::mutants::{Mutant, is_on};
use crate::sync::{LockGuard, LockOutcome};
use crate::wire::{AtomicTime, Time};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Looks for the result before a wait decides how it goes on.
const FIRST_LOOKS: u32 = 32;
/// Polls between two looks at the clock in inline mode.
const POLLS_PER_CLOCK: u32 = 256;
/// The same in adaptive mode, where a wait spins for some microseconds.
const POLLS_PER_SHORT_SPIN: u32 = 16;
/// Looks for the result before each poll.
const LOOKS_PER_POLL: u32 = 8;
/// A timeout below this length is measured from the begin of its wait.
const SHORT: Duration = Duration::from_millis(10);

/// A result that a thread waits for while it holds the poller.
pub trait DirectTake<P: Port, H: Handler<P>> {
    /// The result.
    type Taken;

    /// Takes the result if it is the next message and nothing else is to be done for it. The first
    /// thing that a wait tries.
    #[inline(always)] // on the short path
    fn take_next(&mut self, handler: &mut H, links: &mut Links<P>) -> Option<Self::Taken> {
        let _ = (handler, links);
        None
    }

    /// Takes the result if it has come.
    fn take(&mut self, handler: &mut H, links: &mut Links<P>) -> Option<Self::Taken>;

    /// As [`DirectTake::take`], if no message was handled since its last call. A look at the result
    /// alone, which costs less than a poll.
    fn take_short(&mut self, handler: &mut H, links: &mut Links<P>) -> ShortTake<Self::Taken>;

    /// Whether the wait must go on by a command after this result.
    fn goes_elsewhere(&self, taken: &Self::Taken) -> bool {
        let _ = taken;
        false
    }
}

/// The time at which a direct wait ends at the latest.
#[derive(Clone, Copy, Debug)]
pub enum WaitLimit {
    /// After so long. Below [`SHORT`] it begins with the wait, else with the first look at the
    /// clock, so that a short wait reads no clock.
    After(Duration),
    /// At this time.
    At(Time),
}

impl WaitLimit {
    /// Whether a wait that began at `since` is over `now`.
    fn is_over(self, since: Time, now: Time) -> bool {
        match self {
            WaitLimit::After(timeout) => now >= since + timeout,
            WaitLimit::At(deadline) => now >= deadline,
        }
    }
}

/// The outcome of [`Engine::wait_direct`].
#[derive(Debug)]
pub enum DirectWait<R> {
    /// The result that was waited for.
    Ready(R),
    /// The limit is reached.
    TimedOut,
    /// The wait must go on without the poller. The time of its first look at the clock, if there
    /// was one.
    Elsewhere(Option<Time>),
    /// The poller can't be used.
    Unusable(Unusable),
}

impl<P: Port, H: Handler<P>> Engine<P, H> {
    /// Calls `body` on the handler and its links, if this thread gets the lock at once. Returns
    /// whether it did. `body` may be called once at most, and needs no time.
    ///
    /// # Errors
    /// If the poller is poisoned or closed.
    #[inline]
    pub fn try_direct(&self, mut body: impl FnMut(&mut H, &mut Links<P>)) -> Result<bool, Unusable> {
        let ran = self.with_poller_once(|poller| {
            poller.direct(|handler, links| body(handler, links));
            if is_on(Mutant::DirectCallRepeated) && !self.submissions.is_empty() {
                poller.direct(|handler, links| body(handler, links));
            }
        })?;
        Ok(ran.is_some())
    }

    /// Polls until `wait` has its result or the limit is reached. Calls
    /// [`DirectTake::take_next`], then [`DirectTake::take`], also after each poll that brings
    /// something, and [`DirectTake::take_short`] in between.
    /// Leaves off if the lock is taken, or another thread submits a command, and at `leave_at`. In
    /// adaptive mode it also leaves off after the spin budget, and before the first poll if a
    /// thread sleeps.
    #[inline]
    pub fn wait_direct<R>(
        &self,
        limit: WaitLimit,
        leave_at: &AtomicTime,
        mut wait: impl DirectTake<P, H, Taken = R>,
    ) -> DirectWait<R> {
        let mut waited = DirectWait::Elsewhere(None);
        let ran = self.with_poller_once(|poller| {
            let taken = poller.direct(|handler, links| match wait.take_next(handler, links) {
                None => wait.take(handler, links),
                next => next,
            });
            waited = match taken {
                Some(result) => DirectWait::Ready(result),
                None => self.poll_for(poller, (limit, leave_at), &mut wait),
            };
            // A result that was stored counts, also if this poll fails.
            if let DirectWait::Ready(_) = waited
                && poller.count_result()
            {
                self.poll_between_results(poller);
            }
        });
        match (ran, &waited) {
            (Err(_), DirectWait::Ready(_)) | (Ok(_), _) => waited,
            (Err(why), _) => DirectWait::Unusable(why),
        }
    }

    /// Calls `body` once on the poller, after all submitted commands, if this thread gets the lock
    /// at once. `None` if not. `body` does not poll if [a thread sleeps](Self::sleeps).
    #[inline]
    pub(super) fn with_poller_once<R>(
        &self,
        body: impl FnOnce(&mut Poller<P, H>) -> R,
    ) -> Result<Option<R>, Unusable> {
        let held = match self.lock.enter() {
            Some(held) => held,
            None => match self.acquire()? {
                Some(held) => held,
                None => return Ok(None),
            },
        };
        let run = |cell: &mut Option<Poller<P, H>>| {
            let poller = cell.as_mut()?;
            if !self.submissions.is_empty() {
                self.run_submitted(poller, self.clock.now());
            }
            Some(body(poller))
        };
        // SAFETY: this thread holds the lock until `held` is given up below.
        #[allow(unsafe_code)]
        match unsafe { self.run_held(run) } {
            Some(Some(result)) => {
                held.leave(true);
                if self.sleeps() {
                    self.wake_sleepers();
                }
                if !self.submissions.is_empty() {
                    self.run_left();
                }
                Ok(Some(result))
            }
            Some(None) => {
                self.leave_at_once(held);
                Err(Unusable::Closed)
            }
            None => {
                held.poison();
                Err(self.poisoned())
            }
        }
    }

    /// Whether a thread sleeps on the armed port. Exact for the holder of the lock, except that the
    /// thread may have just woken. A thread that slept while this one held the lock still shows
    /// afterwards.
    #[inline]
    pub(super) fn sleeps(&self) -> bool {
        if self.mode == PollMode::Adaptive {
            unlikely();
            return self.sleepers.any();
        }
        false
    }

    /// Wakes the threads that a direct call concerns, and sends what the handler has put off until
    /// the next poll, which may be far. If another thread holds the lock, it does so.
    #[cold]
    fn wake_sleepers(&self) {
        let _ = self.with_poller(Poller::before_poll);
    }

    /// Polls between results. Only a poll that is timed ends the waits of other threads.
    #[cold]
    fn poll_between_results(&self, poller: &mut Poller<P, H>) {
        let is_clock_due = poller.count_result_poll();
        match self.mode {
            // What comes wakes the sleeper.
            PollMode::Adaptive if self.sleepers.any() => {}
            PollMode::Adaptive => drop(poller.step(self.now())),
            _ if is_clock_due => drop(poller.step(self.now())),
            _ => {
                poller.before_poll();
                poller.poll_direct();
            }
        }
    }

    /// Takes the lock for a thread without the bias, if the lock is free.
    #[cold]
    fn acquire(&self) -> Result<Option<LockGuard<'_>>, Unusable> {
        if self.mode == PollMode::Dedicated {
            return Ok(None);
        }
        match self.lock.acquire(|| !self.submissions.is_empty()) {
            Ok(held) => Ok(Some(held)),
            Err(LockOutcome::Poisoned) => Err(self.poisoned()),
            Err(_) => Ok(None),
        }
    }

    #[cold]
    fn leave_at_once(&self, held: LockGuard<'_>) {
        held.leave(false);
        self.run_left();
    }

    /// Runs the commands that others left during a call. The result of the call counts also if this
    /// fails.
    #[cold]
    fn run_left(&self) {
        let _ = self.with_poller(|_| {});
    }

    /// Polls for a result that has not come yet.
    #[inline(never)] // keeps the path of a message that is there short
    fn poll_for<R>(
        &self,
        poller: &mut Poller<P, H>,
        (limit, leave_at): (WaitLimit, &AtomicTime),
        wait: &mut impl DirectTake<P, H, Taken = R>,
    ) -> DirectWait<R> {
        if self.sleeps() {
            // A poll would leave the port unarmed, so that nothing ends the sleep.
            return DirectWait::Elsewhere(None);
        }
        let is_short = matches!(limit, WaitLimit::After(timeout) if timeout < SHORT);
        let mut since = is_short.then(|| self.now());
        // A result that comes during a poll is found later than by a look. Other links need polls.
        let first_looks = if poller.has_several_links() { LOOKS_PER_POLL } else { FIRST_LOOKS };
        let (mut polls, mut looks) = (FIRST_LOOKS / first_looks, first_looks);
        let mut is_first = true;
        loop {
            for _ in 0..polls {
                for _ in 0..looks {
                    if !self.submissions.is_empty() && !is_on(Mutant::CommandsIgnored) {
                        return DirectWait::Elsewhere(since);
                    }
                    match poller.direct(|handler, links| wait.take_short(handler, links)) {
                        ShortTake::Taken(result) => return ended(wait, result, since),
                        ShortTake::Nothing => {}
                        ShortTake::Other => break,
                    }
                }
                looks = LOOKS_PER_POLL;
                if poller.poll_direct() > 0
                    && let Some(result) = poller.direct(|handler, links| wait.take(handler, links))
                {
                    return ended(wait, result, since);
                }
            }
            match self.after_polls(std::mem::take(&mut is_first), (limit, leave_at), since) {
                AfterPolls::Poll => polls = self.polls_per_clock() - FIRST_LOOKS / LOOKS_PER_POLL,
                AfterPolls::Step(now) => {
                    since = since.or(Some(now));
                    polls = self.polls_per_clock();
                    // Ends the waits of other threads whose deadlines have passed.
                    poller.step(now);
                    if let Some(result) = poller.direct(|handler, links| wait.take(handler, links)) {
                        return ended(wait, result, since);
                    }
                }
                AfterPolls::Leave(since) => return DirectWait::Elsewhere(Some(since)),
                AfterPolls::TimedOut(now) => {
                    // Ends late waits of other threads here, too: a program may call nothing but
                    // receives that time out.
                    poller.step(now);
                    return match poller.direct(|handler, links| wait.take(handler, links)) {
                        Some(result) => ended(wait, result, since),
                        None => DirectWait::TimedOut,
                    };
                }
            }
        }
    }

    /// How a direct wait goes on after polls in vain, which `is_first` says to be its first.
    #[cold]
    fn after_polls(
        &self,
        is_first: bool,
        (limit, leave_at): (WaitLimit, &AtomicTime),
        since: Option<Time>,
    ) -> AfterPolls {
        if is_first && self.wait == WaitStrategy::Spin {
            return AfterPolls::Poll;
        }
        let now = self.now();
        let since = since.unwrap_or(now);
        // First: the caller does what is due then, and it does nothing after a timeout.
        if now >= leave_at.get() {
            return AfterPolls::Leave(since);
        }
        if limit.is_over(since, now) {
            return AfterPolls::TimedOut(now);
        }
        let waited = now.since(since);
        let may_spin = (self.mode == PollMode::Inline || waited < self.spin) && waited < self.hung_after;
        // With the other strategy, other threads need the CPU.
        if may_spin && self.wait == WaitStrategy::Spin && self.check().is_ok() {
            return AfterPolls::Step(now);
        }
        self.spun_since.store(since.as_nanos(), Ordering::Relaxed);
        AfterPolls::Leave(since)
    }

    fn polls_per_clock(&self) -> u32 {
        match self.mode {
            PollMode::Inline => POLLS_PER_CLOCK,
            // A wait spins for some microseconds.
            PollMode::Adaptive | PollMode::Dedicated => POLLS_PER_SHORT_SPIN,
        }
    }
}

/// Makes the compiler put the rest of its block behind the other code: inline mode has no detour.
#[inline]
#[cold]
fn unlikely() {}

/// How a direct wait goes on.
enum AfterPolls {
    /// With polls.
    Poll,
    /// With a step at this time, and polls.
    Step(Time),
    /// By a command. The time of the first look at the clock.
    Leave(Time),
    /// With a last step at this time.
    TimedOut(Time),
}

/// The outcome of a wait with this result, whose first look at the clock was at `since`.
fn ended<P: Port, H: Handler<P>, R>(
    wait: &impl DirectTake<P, H, Taken = R>,
    result: R,
    since: Option<Time>,
) -> DirectWait<R> {
    match wait.goes_elsewhere(&result) {
        true => DirectWait::Elsewhere(since),
        false => DirectWait::Ready(result),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::shared_poller::tests::{TestCommand, TestHandler, engine_and_counters, engine_with};
    use crate::engine::{Clock, Executor};
    use crate::fabric::shm::ShmPort;
    use crate::sync::OneshotSender;
    use crate::telemetry::Counter;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// A clock that goes on by a second with each look.
    #[derive(Default)]
    struct Ticking(AtomicU64);

    impl Clock for Ticking {
        fn now(&self) -> Time {
            Time::from_nanos(1_000_000_000 * self.0.fetch_add(1, Ordering::Relaxed))
        }
    }

    type TestEngine = Engine<ShmPort, TestHandler>;

    fn engine() -> (TestEngine, Arc<Ticking>) {
        let clock = Arc::new(Ticking::default());
        (engine_with(clock.clone(), PollMode::Inline), clock)
    }

    /// Calls itself for each take.
    struct TakeFn<F>(F);

    impl<R, F: FnMut() -> Option<R>> DirectTake<ShmPort, TestHandler> for TakeFn<F> {
        type Taken = R;

        fn take(&mut self, _: &mut TestHandler, _: &mut Links<ShmPort>) -> Option<R> {
            self.0()
        }

        fn take_short(&mut self, _: &mut TestHandler, _: &mut Links<ShmPort>) -> ShortTake<R> {
            ShortTake::Other
        }
    }

    fn wait(engine: &TestEngine, timeout: Duration, found_at: u32) -> DirectWait<u32> {
        let mut looks = 0;
        let take = || {
            looks += 1;
            (looks == found_at).then_some(looks)
        };
        engine.wait_direct(WaitLimit::After(timeout), &FOR_EVER, TakeFn(take))
    }

    static FOR_EVER: AtomicTime = AtomicTime::new(Time::NEVER);

    #[test]
    fn a_result_that_is_there_costs_no_look_at_the_clock() {
        let (engine, clock) = engine();
        assert!(matches!(wait(&engine, Duration::from_secs(1), 1), DirectWait::Ready(1)));
        assert_eq!(clock.0.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn waits_that_find_their_results_at_once_poll_now_and_then() {
        let (engine, counters) = engine_and_counters();
        for waits in 1..=64 {
            let found =
                engine.wait_direct(WaitLimit::After(Duration::from_secs(1)), &FOR_EVER, TakeFn(|| Some(())));
            assert!(matches!(found, DirectWait::Ready(())));
            assert_eq!(counters.snapshot().get(Counter::Polls), waits / 16);
        }
    }

    #[test]
    fn a_wait_ends_after_its_timeout_and_not_before() {
        for (timeout, looks) in [(Duration::from_millis(1), 2), (Duration::from_secs(3), 4)] {
            let (engine, clock) = engine();
            assert!(matches!(wait(&engine, timeout, u32::MAX), DirectWait::TimedOut));
            assert_eq!(clock.0.load(Ordering::Relaxed), looks, "{timeout:?}");
        }
    }

    #[test]
    fn a_wait_until_a_time_ends_then_and_not_before() {
        for (deadline, looks) in [(0, 1), (3_000_000_000, 4)] {
            let (engine, clock) = engine();
            let limit = WaitLimit::At(Time::from_nanos(deadline));
            let waited = engine.wait_direct(limit, &FOR_EVER, TakeFn(|| None::<()>));
            assert!(matches!(waited, DirectWait::TimedOut));
            assert_eq!(clock.0.load(Ordering::Relaxed), looks, "{deadline}");
        }
    }

    #[test]
    fn a_wait_leaves_off_when_something_else_is_due_also_if_that_is_known_later() {
        let (engine, clock) = engine();
        let leave_at = AtomicTime::new(Time::NEVER);
        let take = || {
            leave_at.set(Time::from_nanos(3_000_000_000));
            None::<()>
        };
        let waited = engine.wait_direct(WaitLimit::After(Duration::from_secs(100)), &leave_at, TakeFn(take));
        assert!(matches!(waited, DirectWait::Elsewhere(Some(Time::ZERO))));
        assert_eq!(clock.0.load(Ordering::Relaxed), 4);
        let waited = engine.wait_direct(WaitLimit::After(Duration::ZERO), &leave_at, TakeFn(|| None::<()>));
        assert!(matches!(waited, DirectWait::Elsewhere(_)), "both are due");
    }

    #[test]
    fn a_result_that_comes_late_is_found() {
        let (engine, _) = engine();
        assert!(matches!(wait(&engine, Duration::from_secs(100), 3), DirectWait::Ready(3)));
    }

    #[test]
    fn a_command_of_another_thread_ends_a_direct_wait() {
        let (engine, _) = engine();
        let executor = Executor::on_the_spot();
        let command = TestCommand::Keep(OneshotSender::callback(executor.callback(|_| {})));
        let mut command = Some(command);
        let take = || {
            if let Some(command) = command.take() {
                // As another thread does while this one holds the poller.
                assert!(engine.submissions.push(command).is_ok(), "there is room");
            }
            None::<()>
        };
        let waited = engine.wait_direct(WaitLimit::After(Duration::from_secs(100)), &FOR_EVER, TakeFn(take));
        assert!(matches!(waited, DirectWait::Elsewhere(None)));
    }

    /// Notes the number of polls before each look, and submits a command at the last one.
    struct Looks<'a> {
        engine: &'a TestEngine,
        last: usize,
        polls: Vec<u64>,
    }

    impl DirectTake<ShmPort, TestHandler> for &mut Looks<'_> {
        type Taken = ();

        fn take(&mut self, _: &mut TestHandler, _: &mut Links<ShmPort>) -> Option<()> {
            None
        }

        fn take_short(&mut self, _: &mut TestHandler, links: &mut Links<ShmPort>) -> ShortTake<()> {
            self.polls.push(links.counters().counters().get(Counter::Polls));
            if self.polls.len() == self.last {
                let executor = Executor::on_the_spot();
                let command = TestCommand::Keep(OneshotSender::callback(executor.callback(|_| {})));
                assert!(self.engine.submissions.push(command).is_ok(), "there is room");
            }
            ShortTake::Nothing
        }
    }

    /// The number of polls before each of `last` looks of a direct wait, which a command ends.
    fn polls_before_looks(last: usize) -> Vec<u64> {
        let (engine, _) = engine();
        let mut looks = Looks { engine: &engine, last, polls: Vec::new() };
        let waited = engine.wait_direct(WaitLimit::After(Duration::from_secs(100)), &FOR_EVER, &mut looks);
        assert!(matches!(waited, DirectWait::Elsewhere(None)), "{waited:?}");
        looks.polls
    }

    #[test]
    fn a_command_ends_a_direct_wait_between_two_looks() {
        assert_eq!(polls_before_looks(3), [0; 3]);
    }

    #[test]
    fn a_direct_wait_polls_after_many_looks_and_then_after_fewer() {
        let polls = polls_before_looks(50);
        let polled: Vec<_> = (1..polls.len()).filter(|&at| polls[at] > polls[at - 1]).collect();
        assert_eq!(polled, [32, 40, 48], "looks before each poll");
    }

    #[test]
    fn a_direct_call_runs_once_and_not_within_another() {
        let (engine, _) = engine();
        let (mut outer, mut inner) = (0, 0);
        let mut left = Some(TestCommand::Keep(OneshotSender::callback(|_| {})));
        let ran = engine.try_direct(|_, _| {
            outer += 1;
            // As another thread does meanwhile. The lock's holder then runs the command.
            if let Some(command) = left.take() {
                assert!(engine.submissions.push(command).is_ok(), "there is room");
            }
            let nested = engine.try_direct(|_, _| inner += 1).expect("usable");
            assert!(!nested, "the poller is taken");
        });
        assert!(ran.expect("usable"));
        assert_eq!((outer, inner), (1, 0));
        let dedicated = engine_with(Arc::new(Ticking::default()), PollMode::Dedicated);
        assert!(!dedicated.try_direct(|_, _| {}).expect("usable"), "the poller has a thread of its own");
    }

    #[cfg(tensorwire_mutants)]
    #[test]
    fn each_bug_is_found() {
        use crate::mutants::assert_found;
        assert_found(Mutant::CommandsIgnored, a_command_of_another_thread_ends_a_direct_wait);
        assert_found(Mutant::DirectCallRepeated, a_direct_call_runs_once_and_not_within_another);
    }
}
