//! One-shot channels: one side waits for a result, the other sends it. Neither allocates in steady
//! state.

use super::completion_group::CompletionGroup;
use super::result_cell::ResultCell;
use crossbeam_queue::ArrayQueue;
use std::sync::Arc;

/// A result type with a value that says that the sender is gone.
pub trait Canceled: Send + 'static {
    /// The result that the receiver gets if the sender is dropped without sending.
    fn canceled() -> Self;

    /// Whether the result ends the wait for a whole [`GroupReceiver`](super::GroupReceiver).
    fn is_failure(&self) -> bool {
        false
    }
}

/// Channels that are used again and again.
pub struct OneshotPool<R> {
    free: Arc<ArrayQueue<Arc<ResultCell<R>>>>,
}

/// The side of a one-shot channel that waits.
pub struct OneshotReceiver<R> {
    cell: Option<Arc<ResultCell<R>>>,
    free: Arc<ArrayQueue<Arc<ResultCell<R>>>>,
}

/// The side of a one-shot channel that sends. If it is dropped without sending, it sends
/// [`Canceled::canceled`].
pub struct OneshotSender<R: Canceled> {
    to: Option<SendTarget<R>>,
}

enum SendTarget<R> {
    Cell(Arc<ResultCell<R>>),
    Group(Arc<CompletionGroup<R>>, usize),
    Callback(Box<dyn FnOnce(R) + Send>),
}

/// Cells that a pool makes at the start. At least as many channels lie between two uses of a cell.
const INITIAL: usize = 64;
/// Used cells that are examined for one that neither side holds any more.
const LOOKS: usize = 8;

impl<R: Canceled> OneshotPool<R> {
    /// A pool that keeps at most `keep` cells for later channels.
    pub fn new(keep: usize) -> Self {
        let free = ArrayQueue::new(keep.max(1));
        for _ in 0..keep.min(INITIAL) {
            // There is room.
            let _ = free.push(Arc::new(ResultCell::new()));
        }
        OneshotPool { free: Arc::new(free) }
    }

    /// Both sides of a new channel.
    pub fn channel(&self) -> (OneshotReceiver<R>, OneshotSender<R>) {
        let cell = self.unused().unwrap_or_else(|| Arc::new(ResultCell::new()));
        let sender = OneshotSender { to: Some(SendTarget::Cell(cell.clone())) };
        (OneshotReceiver { cell: Some(cell), free: self.free.clone() }, sender)
    }

    fn unused(&self) -> Option<Arc<ResultCell<R>>> {
        for _ in 0..LOOKS {
            let mut cell = self.free.pop()?;
            // Unique: both sides of its last use are gone.
            if let Some(inner) = Arc::get_mut(&mut cell) {
                inner.reset();
                return Some(cell);
            }
            // The sender of its last use is still there: on another thread, or for a receiver that
            // was dropped.
            let _ = self.free.push(cell);
        }
        None
    }
}

impl<R> OneshotReceiver<R> {
    /// Whether the result was sent.
    pub fn is_done(&self) -> bool {
        self.cell.as_ref().is_none_or(|cell| cell.is_done())
    }

    /// Takes the result, if it was sent and not taken before.
    pub fn take(&mut self) -> Option<R> {
        let cell = self.cell.as_ref()?;
        // SAFETY: this is the only receiver of the cell, and it is borrowed uniquely.
        #[allow(unsafe_code)]
        unsafe {
            cell.take()
        }
    }
}

impl<R> Drop for OneshotReceiver<R> {
    fn drop(&mut self) {
        // Only a cell whose result was sent goes back to the pool, and it goes back empty. A result
        // that was not taken would live on in the pool, with its tensor. A cell without a result is
        // freed by its sender.
        if !self.is_done() {
            return;
        }
        drop(self.take());
        if let Some(cell) = self.cell.take() {
            // A full pool frees the cell.
            let _ = self.free.push(cell);
        }
    }
}

impl<R: Canceled> OneshotSender<R> {
    /// A sender whose result goes to `callback`. The sending thread calls it: user code must be
    /// passed on to another thread.
    pub fn callback(callback: impl FnOnce(R) + Send + 'static) -> Self {
        OneshotSender { to: Some(SendTarget::Callback(Box::new(callback))) }
    }

    /// The sender of one result of a group.
    pub(super) fn in_group(group: Arc<CompletionGroup<R>>, at: usize) -> Self {
        OneshotSender { to: Some(SendTarget::Group(group, at)) }
    }

    /// Sends the result.
    pub fn send(mut self, result: R) {
        self.send_to_target(result);
    }

    fn send_to_target(&mut self, result: R) {
        match self.to.take() {
            Some(SendTarget::Cell(cell)) => {
                // SAFETY: this is the only sender of the cell, and `to` is empty from now on.
                #[allow(unsafe_code)]
                unsafe {
                    cell.put(result);
                }
            }
            Some(SendTarget::Group(group, at)) => {
                // SAFETY: `GroupSenders` makes one sender for each cell, and `to` is empty from now
                // on.
                #[allow(unsafe_code)]
                unsafe {
                    group.put(at, result);
                }
            }
            Some(SendTarget::Callback(callback)) => callback(result),
            None => {}
        }
    }
}

impl<R: Canceled> Drop for OneshotSender<R> {
    fn drop(&mut self) {
        if self.to.is_some() {
            self.send_to_target(R::canceled());
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
        fn canceled() -> Self {
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
    fn a_sender_that_is_dropped_sends_canceled() {
        let (mut receiver, sender) = OneshotPool::<Answer>::new(1).channel();
        drop(sender);
        assert_eq!(receiver.take(), Some(Answer(-1)));
    }

    #[test]
    fn a_cell_is_used_again_only_when_both_sides_are_gone() {
        let pool = OneshotPool::<Answer>::new(4);
        let (receiver, sender) = pool.channel();
        drop(receiver);
        let (mut second, other) = pool.channel();
        sender.send(Answer(1));
        assert!(!second.is_done(), "the first channel's result is not the second's");
        other.send(Answer(2));
        assert_eq!(second.take(), Some(Answer(2)));
    }

    #[test]
    fn a_result_that_is_not_taken_is_dropped() {
        struct Counted(Arc<()>);
        impl Canceled for Counted {
            fn canceled() -> Self {
                Counted(Arc::new(()))
            }
        }
        let (pool, counted) = (OneshotPool::new(4), Arc::new(()));
        for taken_before in [true, false] {
            let (receiver, sender) = pool.channel();
            let result = Counted(counted.clone());
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
        drop(Counted::canceled().0);
    }

    #[test]
    fn results_cross_threads() {
        let pool = OneshotPool::<Answer>::new(4);
        for round in 0..1000 {
            let (mut receiver, sender) = pool.channel();
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
