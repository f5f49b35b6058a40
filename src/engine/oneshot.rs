//! OneshotPool: one side waits for a result, the other brings it, and neither allocates in steady state.

use super::completion_group::CompletionGroup;
use super::executor::Executor;
use super::result_cell::ResultCell;
use crossbeam_queue::ArrayQueue;
use std::sync::Arc;

/// A result that can stand for "nobody will bring one".
pub trait Canceled: Send + 'static {
    /// What the waiter gets when the bringing side goes away without a result.
    fn abandoned() -> Self;

    /// Whether who waits for several results need not wait for the others any more.
    fn is_failure(&self) -> bool {
        false
    }
}

/// A store of calls that are used again and again.
pub struct OneshotPool<R> {
    free: Arc<ArrayQueue<Arc<ResultCell<R>>>>,
}

/// The waiting side of a call.
pub struct OneshotReceiver<R> {
    cell: Option<Arc<ResultCell<R>>>,
    free: Arc<ArrayQueue<Arc<ResultCell<R>>>>,
}

/// The bringing side of a call. Dropped without a result, it brings [`Canceled::canceled`].
pub struct OneshotSender<R: Canceled> {
    to: Option<To<R>>,
}

enum To<R> {
    ResultCell(Arc<ResultCell<R>>),
    CompletionGroup(Arc<CompletionGroup<R>>, usize),
    Callback(Box<dyn FnOnce(R) + Send>, Executor),
}

/// OneshotPool that are there from the start: so many must follow each other before one is used again.
const MADE: usize = 64;
/// How many of those that were used are looked at for one that neither side holds any more.
const LOOKS: usize = 8;

impl<R: Canceled> OneshotPool<R> {
    /// Room for `keep` calls to be used again.
    pub fn new(keep: usize) -> Self {
        let free = ArrayQueue::new(keep.max(1));
        for _ in 0..keep.min(MADE) {
            // There is room.
            let _ = free.push(Arc::new(ResultCell::new()));
        }
        OneshotPool { free: Arc::new(free) }
    }

    /// Both sides of a new call.
    pub fn channel(&self) -> (OneshotReceiver<R>, OneshotSender<R>) {
        let cell = self.unused().unwrap_or_else(|| Arc::new(ResultCell::new()));
        let sender = OneshotSender { to: Some(To::ResultCell(cell.clone())) };
        (OneshotReceiver { cell: Some(cell), free: self.free.clone() }, sender)
    }

    fn unused(&self) -> Option<Arc<ResultCell<R>>> {
        for _ in 0..LOOKS {
            let mut cell = self.free.pop()?;
            // Unique: neither side of its last use is left, so it can be made as new.
            if let Some(inner) = Arc::get_mut(&mut cell) {
                inner.reset();
                return Some(cell);
            }
            // Its sender is still at it, on another thread or for a waiter that has left: its turn comes again.
            let _ = self.free.push(cell);
        }
        None
    }
}

impl<R> OneshotReceiver<R> {
    /// Whether the result is there.
    pub fn is_done(&self) -> bool {
        self.cell.as_ref().is_none_or(|cell| cell.is_done())
    }

    /// The result, if it is there and was not taken before.
    pub fn take(&mut self) -> Option<R> {
        let cell = self.cell.as_ref()?;
        // SAFETY: this is the only receiver of the cell and it is borrowed uniquely.
        #[allow(unsafe_code)]
        unsafe {
            cell.take()
        }
    }
}

impl<R> Drop for OneshotReceiver<R> {
    fn drop(&mut self) {
        // Only an empty cell is kept: a result that nobody took would live on in the store, with its tensor. One
        // that is still to come goes with its sender, and takes the cell along.
        if !self.is_done() {
            return;
        }
        drop(self.take());
        if let Some(cell) = self.cell.take() {
            // If the store is full the cell is simply freed.
            let _ = self.free.push(cell);
        }
    }
}

impl<R: Canceled> OneshotSender<R> {
    /// A call whose result goes to `callback`, which the executor runs.
    pub fn callback(executor: &Executor, callback: impl FnOnce(R) + Send + 'static) -> Self {
        OneshotSender { to: Some(To::Callback(Box::new(callback), executor.clone())) }
    }

    /// Of one of the calls of a group.
    pub(super) fn on_board(group: Arc<CompletionGroup<R>>, at: usize) -> Self {
        OneshotSender { to: Some(To::CompletionGroup(group, at)) }
    }

    /// Brings the result.
    pub fn send(mut self, result: R) {
        self.put(result);
    }

    fn put(&mut self, result: R) {
        match self.to.take() {
            Some(To::ResultCell(cell)) => {
                // SAFETY: this is the only sender of the cell and `to` is empty from now on.
                #[allow(unsafe_code)]
                unsafe {
                    cell.put(result);
                }
            }
            Some(To::CompletionGroup(group, at)) => {
                // SAFETY: `GroupSenders` makes one sender of each cell, and `to` is empty from now on.
                #[allow(unsafe_code)]
                unsafe {
                    group.put(at, result);
                }
            }
            Some(To::Callback(callback, executor)) => executor.run(move || callback(result)),
            None => {}
        }
    }
}

impl<R: Canceled> Drop for OneshotSender<R> {
    fn drop(&mut self) {
        if self.to.is_some() {
            self.put(R::abandoned());
        }
    }
}

impl<R: Canceled> std::fmt::Debug for OneshotSender<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("OneshotSender")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq)]
    struct Answer(i32);

    impl Canceled for Answer {
        fn abandoned() -> Self {
            Answer(-1)
        }
    }

    #[test]
    fn a_result_is_taken_once() {
        let (mut receiver, sender) = OneshotPool::new(1).channel();
        assert!(!receiver.is_done() && receiver.take().is_none());
        sender.send(Answer(5));
        assert!(receiver.is_done());
        assert_eq!(receiver.take(), Some(Answer(5)));
        assert_eq!(receiver.take(), None);
    }

    #[test]
    fn a_completer_that_is_dropped_says_so() {
        let (mut receiver, sender) = OneshotPool::<Answer>::new(1).channel();
        drop(sender);
        assert_eq!(receiver.take(), Some(Answer(-1)));
    }

    #[test]
    fn a_cell_is_used_again_only_when_both_sides_are_gone() {
        let calls = OneshotPool::<Answer>::new(4);
        let (receiver, sender) = calls.channel();
        drop(receiver);
        let (mut second, other) = calls.channel();
        sender.send(Answer(1));
        assert!(!second.is_done(), "the first call's result is not the second's");
        other.send(Answer(2));
        assert_eq!(second.take(), Some(Answer(2)));
    }

    #[test]
    fn a_result_that_nobody_takes_is_dropped() {
        struct Held(Arc<()>);
        impl Canceled for Held {
            fn abandoned() -> Self {
                Held(Arc::new(()))
            }
        }
        let (calls, counted) = (OneshotPool::new(4), Arc::new(()));
        for taken_before in [true, false] {
            let (receiver, sender) = calls.channel();
            let result = Held(counted.clone());
            match taken_before {
                true => {
                    drop(receiver);
                    sender.send(result);
                }
                false => {
                    sender.send(result);
                    drop(receiver);
                }
            }
            assert_eq!(Arc::strong_count(&counted), 1);
        }
        drop(Held::abandoned().0);
    }

    #[test]
    fn results_cross_threads() {
        let calls = OneshotPool::<Answer>::new(4);
        for round in 0..1000 {
            let (mut receiver, sender) = calls.channel();
            let thread = std::thread::spawn(move || sender.send(Answer(round)));
            while !receiver.is_done() {
                std::thread::yield_now();
            }
            assert_eq!(receiver.take(), Some(Answer(round)));
            drop(receiver);
            thread.join().expect("no panic");
            if round > 50 {
                break;
            }
        }
    }
}
