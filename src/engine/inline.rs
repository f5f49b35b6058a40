//! The inline mode: no thread of its own; progress happens inside calls.

use super::token::{Owned, OwnerToken};
use super::{Clock, Handler, Poller, Waiting};
use crate::fabric::Port;
use crate::wire::Time;
use crossbeam_queue::ArrayQueue;
use crossbeam_utils::CachePadded;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// How an inline poller is shared.
#[derive(Clone, Debug)]
pub struct InlineOptions {
    /// What waiters do between two looks.
    pub waiting: Waiting,
    /// How many wishes can wait for the owner at once.
    pub queue: usize,
}

/// A poller shared by the threads of a process. One of them owns it at a time: it takes the token with one
/// compare-and-swap, does its own wish and everybody's, polls, and lets go. A thread that finds the token taken
/// leaves its wish in a queue, which the owner looks at before and after it lets go.
pub struct Inline<P: Port, H: Handler<P>> {
    token: CachePadded<OwnerToken>,
    wishes: ArrayQueue<H::Op>,
    poller: UnsafeCell<Option<Poller<P, H>>>,
    clock: Arc<dyn Clock>,
    waiting: Waiting,
}

// SAFETY: the poller inside the cell is touched only in `own`, by the thread that holds the token; the token
// orders one owner's accesses before the next one's. Everything in the poller may move between threads
// (`Port: Send`, `Handler: Send`), which is all that owners in turn need.
#[allow(unsafe_code)]
unsafe impl<P: Port, H: Handler<P>> Sync for Inline<P, H> {}

/// A poller that can't be used any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unusable {
    /// An owner panicked.
    #[error("a thread panicked while it moved the poller: every call on it fails from now on")]
    Poisoned,
    /// It was closed.
    #[error("the poller was closed")]
    Closed,
}

impl<P: Port, H: Handler<P>> Inline<P, H> {
    /// Shares a poller.
    pub fn new(poller: Poller<P, H>, clock: Arc<dyn Clock>, options: &InlineOptions) -> Self {
        Inline {
            token: CachePadded::new(OwnerToken::new()),
            wishes: ArrayQueue::new(options.queue.max(1)),
            poller: UnsafeCell::new(Some(poller)),
            clock,
            waiting: options.waiting,
        }
    }

    /// The time now.
    pub fn now(&self) -> Time {
        self.clock.now()
    }

    /// Has a wish done: at once by this thread if nobody else owns the poller, else soon by the owner. Wishes
    /// of one thread are done in its order.
    ///
    /// # Errors
    /// If the poller is poisoned or closed.
    pub fn submit(&self, op: H::Op) -> Result<(), Unusable> {
        let now = self.clock.now();
        let mut op = Some(op);
        let mut round = 0;
        loop {
            let owned = self.own(|poller| {
                if let Some(op) = op.take() {
                    poller.op(op, now);
                }
            })?;
            match (owned, op.take()) {
                (_, None) => return Ok(()),
                (_, Some(mine)) => match self.wishes.push(mine) {
                    // The owner may have let go before it saw the push: then this thread is the next owner.
                    Ok(()) => return self.own(|_| {}).map(drop),
                    Err(mine) => op = Some(mine),
                },
            }
            self.waiting.pause(round);
            round = round.saturating_add(1);
        }
    }

    /// Makes progress once, unless another thread is at it. Returns how many completions there were.
    ///
    /// # Errors
    /// If the poller is poisoned or closed.
    pub fn progress(&self) -> Result<usize, Unusable> {
        let now = self.clock.now();
        let mut count = 0;
        self.own(|poller| count += poller.step(now))?;
        Ok(count)
    }

    /// Makes progress until `done`, or until `deadline` has passed. Returns whether it is done.
    ///
    /// # Errors
    /// If the poller is poisoned or closed.
    pub fn wait(&self, deadline: Time, done: impl Fn() -> bool) -> Result<bool, Unusable> {
        let mut idle = 0;
        loop {
            if done() {
                return Ok(true);
            }
            let now = self.clock.now();
            self.own(|poller| {
                for _ in 0..self.waiting.looks() {
                    self.do_wishes(poller, now);
                    if poller.step(now) > 0 {
                        idle = 0;
                        if done() {
                            break;
                        }
                    }
                }
            })?;
            if done() {
                return Ok(true);
            }
            if now >= deadline {
                return Ok(false);
            }
            self.waiting.pause(idle);
            idle = idle.saturating_add(1);
        }
    }

    /// Ends the poller: its links are closed and everybody who waits is told. Does nothing the second time.
    pub fn close(&self) {
        let end = |slot: &mut Option<Poller<P, H>>| {
            drop(slot.take());
            while self.wishes.pop().is_some() {}
        };
        let mut round = 0;
        while let Ok(Owned::Busy) = self.own_slot(end) {
            self.waiting.pause(round);
            round = round.saturating_add(1);
        }
    }

    /// Runs `body` as the owner, after everything that others wished before. Says whether it ran.
    fn own(&self, mut body: impl FnMut(&mut Poller<P, H>)) -> Result<Owned, Unusable> {
        let mut closed = false;
        let owned = self.own_slot(|slot| match slot {
            Some(poller) => {
                if !self.wishes.is_empty() {
                    self.do_wishes(poller, self.clock.now());
                }
                body(poller);
            }
            None => {
                // Whoever made these wishes is told by their end.
                while self.wishes.pop().is_some() {}
                closed = true;
            }
        })?;
        if closed { Err(Unusable::Closed) } else { Ok(owned) }
    }

    fn own_slot(&self, mut body: impl FnMut(&mut Option<Poller<P, H>>)) -> Result<Owned, Unusable> {
        let run = || {
            // SAFETY: `OwnerToken::run` calls this only while this thread holds the token, so there is no
            // other reference to the poller; `body` can't come back here with this reference alive, as it
            // finds the token taken.
            #[allow(unsafe_code)]
            let slot = unsafe { &mut *self.poller.get() };
            let ran = catch_unwind(AssertUnwindSafe(|| body(slot))).is_ok();
            if !ran {
                // What the panic has left half done is never used again, only taken apart: links are closed, and
                // whoever waits is told by the end of its call.
                let _ = catch_unwind(AssertUnwindSafe(|| drop(slot.take())));
            }
            ran
        };
        match self.token.run(run, || !self.wishes.is_empty()) {
            Owned::Poisoned => {
                while let Some(op) = self.wishes.pop() {
                    let _ = catch_unwind(AssertUnwindSafe(|| drop(op)));
                }
                Err(Unusable::Poisoned)
            }
            owned => Ok(owned),
        }
    }

    fn do_wishes(&self, poller: &mut Poller<P, H>, now: Time) {
        if self.wishes.is_empty() {
            return;
        }
        for _ in 0..self.wishes.capacity() {
            let Some(op) = self.wishes.pop() else { return };
            poller.op(op, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Abandoned, Calls, Completer, Executor};
    use crate::fabric::Fabric;
    use crate::fabric::shm::{ShmFabric, ShmOptions, ShmPort};
    use crate::link::{LinkEvent, Links};
    use crate::memory::{PagePolicy, Pool, PoolOptions, Region, RegionOptions};
    use crate::telemetry::CountersWriter;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    #[derive(Debug)]
    struct Ended;

    impl Abandoned for Ended {
        fn abandoned() -> Self {
            Ended
        }
    }

    /// Keeps whoever waits, and panics when told to.
    struct Keeper(Vec<Completer<Ended>>);

    enum Wish {
        Keep(Completer<Ended>),
        Panic,
    }

    impl Handler<ShmPort> for Keeper {
        type Waiter = ();
        type Op = Wish;

        fn op(&mut self, _: &mut Links<ShmPort, ()>, op: Wish, _: Time) {
            match op {
                Wish::Keep(waiter) => self.0.push(waiter),
                Wish::Panic => panic!("on purpose"),
            }
        }

        fn event(&mut self, _: &mut Links<ShmPort, ()>, _: LinkEvent<()>, _: Time) {}

        fn next_deadline(&self) -> Time {
            Time::NEVER
        }

        fn expire(&mut self, _: &mut Links<ShmPort, ()>, _: Time) {}
    }

    struct Still;

    impl Clock for Still {
        fn now(&self) -> Time {
            Time::from_nanos(0)
        }
    }

    #[test]
    fn a_panic_ends_every_call_at_once_and_the_poller_with_it() {
        let region = RegionOptions { pages: PagePolicy::Plain, ..RegionOptions::new(1 << 16) };
        let region = Region::create(0, &region).expect("a region");
        let pool = Pool::new(region, PoolOptions::default()).expect("a pool");
        let fabric = ShmFabric::new(&pool, ShmOptions::default()).expect("a fabric");
        let writer = CountersWriter::new();
        let counters = writer.counters();
        let links = Links::new(fabric.port().expect("a port"), pool, writer);
        let options = InlineOptions { waiting: Waiting::Yield, queue: 4 };
        let engine = Inline::new(Poller::new(links, Keeper(Vec::new())), Arc::new(Still), &options);
        let executor = Executor::default();
        let (told, ended) = channel();
        let waiter = Calls::callback(&executor, move |Ended| told.send(()).expect("open"));
        engine.submit(Wish::Keep(waiter)).expect("usable");
        assert_eq!(engine.submit(Wish::Panic), Err(Unusable::Poisoned));
        ended
            .recv_timeout(Duration::from_secs(10))
            .expect("the callback is called though the engine is held");
        assert_eq!(Arc::strong_count(&counters), 1, "the poller's own half is gone");
        assert_eq!(engine.progress(), Err(Unusable::Poisoned));
        engine.close();
        executor.stop();
    }
}
