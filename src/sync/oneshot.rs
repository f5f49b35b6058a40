//! One-shot channels: one side waits for a result, the other sends it. Neither allocates in steady
//! state.

use super::completion_group::CompletionGroup;
use super::result_cell::ResultCell;
use super::waking::wake;
use atomic_waker::AtomicWaker;
use crossbeam_queue::ArrayQueue;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::task::Waker;

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
    free: ArrayQueue<Arc<Channel<R>>>,
}

/// The result of a channel, and the task that waits for it. There are no weak references to a
/// channel: see [`OneshotPool::unused`].
struct Channel<R> {
    result: ResultCell<R>,
    task: AtomicWaker,
}

/// The side of a one-shot channel that waits.
pub struct OneshotReceiver<R> {
    channel: Option<Arc<Channel<R>>>,
    /// Whether a task was given to the channel.
    has_task: bool,
}

/// The side of a one-shot channel that sends. If it is dropped without sending, it sends
/// [`Canceled::canceled`].
pub struct OneshotSender<R: Canceled> {
    to: Option<SendTarget<R>>,
}

enum SendTarget<R> {
    Channel(Arc<Channel<R>>),
    Group(Arc<CompletionGroup<R>>, usize),
    Callback(Box<dyn FnOnce(R) + Send>),
}

/// Channels that a pool makes at the start. At least as many lie between two uses of a channel.
const INITIAL: usize = 64;
/// Used channels that are examined for one that neither side holds any more.
const LOOKS: usize = 8;

impl<R> Channel<R> {
    fn new() -> Arc<Self> {
        Arc::new(Channel { result: ResultCell::new(), task: AtomicWaker::new() })
    }
}

impl<R: Canceled> OneshotPool<R> {
    /// A pool that keeps at most `keep` unused channels.
    pub fn new(keep: usize) -> Self {
        let free = ArrayQueue::new(keep.max(1));
        for _ in 0..keep.min(INITIAL) {
            // There is room.
            let _ = free.push(Channel::new());
        }
        OneshotPool { free }
    }

    /// Both sides of a new channel. [`OneshotPool::take_back`] has the channel used again.
    pub fn channel(&self) -> (OneshotReceiver<R>, OneshotSender<R>) {
        let channel = self.unused().unwrap_or_else(Channel::new);
        let sender = OneshotSender { to: Some(SendTarget::Channel(channel.clone())) };
        (OneshotReceiver { channel: Some(channel), has_task: false }, sender)
    }

    /// Takes a channel back for its next use, if it is done. One that is not done is freed when
    /// both of its sides are dropped.
    pub fn take_back(&self, receiver: &mut OneshotReceiver<R>) {
        receiver.wake_nobody();
        if !receiver.is_done() {
            return;
        }
        // It goes back empty: a result that was not taken would live on here, with its tensor.
        drop(receiver.take());
        if let Some(channel) = receiver.channel.take() {
            // A full pool frees the channel.
            let _ = self.free.push(channel);
        }
    }

    /// Channels that wait for their next use.
    #[cfg(test)]
    pub fn unused_count(&self) -> usize {
        self.free.len()
    }

    fn unused(&self) -> Option<Arc<Channel<R>>> {
        for _ in 0..LOOKS {
            let channel = self.free.pop()?;
            // Both sides of its last use are gone. `Arc::get_mut` would take a locked instruction,
            // to find that there are no weak references.
            if Arc::strong_count(&channel) == 1 {
                // Acquire: pairs with the release of the other sides' drops.
                fence(Ordering::Acquire);
                // SAFETY: nobody else has the channel: there is one reference to it, and no weak
                // one.
                #[allow(unsafe_code)]
                unsafe {
                    channel.result.reopen();
                }
                return Some(channel);
            }
            // The sender of its last use is still there: on another thread, or for a receiver that
            // was dropped.
            let _ = self.free.push(channel);
        }
        None
    }
}

impl<R> OneshotReceiver<R> {
    /// Whether the result was sent, or the channel closed.
    pub fn is_done(&self) -> bool {
        self.channel.as_ref().is_none_or(|channel| channel.result.is_done())
    }

    /// Has the sending thread wake a task once the result was sent, instead of the task of an
    /// earlier call. A result that was sent before the call may wake nobody: look for it
    /// afterwards.
    pub fn wake_when_done(&mut self, task: &Waker) {
        if let Some(channel) = &self.channel {
            self.has_task = true;
            channel.task.register(task);
        }
    }

    /// Forgets the task that was to be woken.
    pub fn wake_nobody(&mut self) {
        if let Some(channel) = &self.channel
            && std::mem::take(&mut self.has_task)
        {
            drop(channel.task.take());
        }
    }

    /// Takes the result, if it was sent and not taken before.
    pub fn take(&mut self) -> Option<R> {
        let channel = self.channel.as_ref()?;
        // SAFETY: this is the only receiver of the channel, and it is borrowed uniquely.
        #[allow(unsafe_code)]
        unsafe {
            channel.result.take()
        }
    }
}

impl<R> Drop for OneshotReceiver<R> {
    fn drop(&mut self) {
        self.wake_nobody();
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

    /// Whether the receiver was dropped before a result was sent. A thread that learns of the drop
    /// from the thread that dropped, also by way of other processes, gets `true`.
    #[inline]
    pub fn is_abandoned(&self) -> bool {
        match &self.to {
            // The receiver has the other reference until it is dropped.
            Some(SendTarget::Channel(channel)) => Arc::strong_count(channel) == 1,
            Some(SendTarget::Group(group, _)) => group.is_abandoned(),
            Some(SendTarget::Callback(_)) | None => false,
        }
    }

    /// Sends the result.
    pub fn send(mut self, result: R) {
        self.send_to_target(result);
    }

    /// Ends a channel without a result, as its receiver got the result in another way. The receiver
    /// finds the channel done and empty, and no task is woken. Has no effect on other senders.
    pub fn close(&mut self) {
        if let Some(SendTarget::Channel(channel)) = &self.to {
            channel.result.close();
            self.to = None;
        }
    }

    fn send_to_target(&mut self, result: R) {
        match self.to.take() {
            Some(SendTarget::Channel(channel)) => {
                // SAFETY: this is the only sender of the channel, which it has not closed, and `to`
                // is empty from now on.
                #[allow(unsafe_code)]
                unsafe {
                    channel.result.put(result);
                }
                if let Some(task) = channel.task.take() {
                    wake(task);
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
    use std::sync::atomic::AtomicU32;
    use std::task::Wake;

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
    fn a_sender_whose_receiver_is_dropped_early_is_abandoned() {
        let pool = OneshotPool::<Answer>::new(1);
        for _ in 0..2 {
            let (receiver, sender) = pool.channel();
            assert!(!sender.is_abandoned());
            drop(receiver);
            assert!(sender.is_abandoned());
        }
        assert!(!OneshotSender::<Answer>::callback(drop).is_abandoned());
    }

    #[test]
    fn a_sender_that_is_dropped_sends_canceled() {
        let (mut receiver, sender) = OneshotPool::<Answer>::new(1).channel();
        drop(sender);
        assert_eq!(receiver.take(), Some(Answer(-1)));
    }

    /// Counts how often it is woken.
    struct Task(AtomicU32);

    impl Wake for Task {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_channel_that_is_closed_has_no_result_and_is_used_again() {
        let (pool, task) = (OneshotPool::<Answer>::new(1), Arc::new(Task(AtomicU32::new(0))));
        let (mut receiver, mut sender) = pool.channel();
        receiver.wake_when_done(&task.clone().into());
        sender.close();
        drop(sender);
        assert!(receiver.is_done());
        assert_eq!(receiver.take(), None);
        pool.take_back(&mut receiver);
        assert_eq!((task.0.load(Ordering::Relaxed), Arc::strong_count(&task)), (0, 1));
        assert_eq!(pool.unused_count(), 1);
        let (mut receiver, sender) = pool.channel();
        sender.send(Answer(5));
        assert_eq!(receiver.take(), Some(Answer(5)));
    }

    #[test]
    fn the_result_wakes_the_last_task_once() {
        let pool = OneshotPool::<Answer>::new(1);
        let tasks = [0, 1].map(|_| Arc::new(Task(AtomicU32::new(0))));
        let woken = || tasks.each_ref().map(|task| task.0.load(Ordering::Relaxed));
        for round in 1..=3 {
            let (mut receiver, sender) = pool.channel();
            tasks.iter().for_each(|task| receiver.wake_when_done(&task.clone().into()));
            sender.send(Answer(5));
            assert_eq!((receiver.take(), woken()), (Some(Answer(5)), [0, round]));
            receiver.wake_when_done(&tasks[0].clone().into());
            pool.take_back(&mut receiver);
        }
        assert_eq!(tasks.each_ref().map(Arc::strong_count), [1, 1], "the pool keeps no task");
    }

    #[test]
    fn a_receiver_that_is_dropped_wakes_nobody() {
        let (mut receiver, sender) = OneshotPool::<Answer>::new(1).channel();
        let task = Arc::new(Task(AtomicU32::new(0)));
        receiver.wake_when_done(&task.clone().into());
        drop(receiver);
        assert_eq!(Arc::strong_count(&task), 1);
        sender.send(Answer(5));
        assert_eq!(task.0.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_task_that_looks_after_it_has_asked_misses_no_result() {
        let pool = OneshotPool::<Answer>::new(4);
        for round in 0..500 {
            let (mut receiver, sender) = pool.channel();
            let (task, start) = (Arc::new(Task(AtomicU32::new(0))), Arc::new(AtomicU32::new(0)));
            let go = start.clone();
            let thread = std::thread::spawn(move || {
                while go.load(Ordering::Acquire) == 0 {}
                sender.send(Answer(round));
            });
            start.store(1, Ordering::Release);
            receiver.wake_when_done(&task.clone().into());
            if !receiver.is_done() {
                while task.0.load(Ordering::Acquire) == 0 {
                    std::thread::yield_now();
                }
            }
            assert_eq!(receiver.take(), Some(Answer(round)));
            thread.join().expect("no panic");
        }
    }

    #[test]
    fn a_channel_is_used_again_only_when_both_sides_are_gone() {
        let pool = OneshotPool::<Answer>::new(1);
        let (mut receiver, sender) = pool.channel();
        pool.take_back(&mut receiver);
        assert_eq!(pool.unused_count(), 0, "its sender may still send");
        drop((receiver, sender));
        let (mut receiver, sender) = pool.channel();
        let held = receiver.channel.clone();
        sender.send(Answer(1));
        pool.take_back(&mut receiver);
        assert_eq!(pool.unused_count(), 1);
        let (receiver, _sender) = pool.channel();
        assert!(!receiver.is_done(), "another one, as the sender is on its way out of the first");
        drop(held);
        let (receiver, _sender) = pool.channel();
        assert!(!receiver.is_done() && pool.unused_count() == 0);
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
        for dropped_before in [true, false] {
            let (mut receiver, sender) = pool.channel();
            let result = Counted(counted.clone());
            match dropped_before {
                true => {
                    drop(receiver);
                    sender.send(result);
                }
                false => {
                    sender.send(result);
                    pool.take_back(&mut receiver);
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
            pool.take_back(&mut receiver);
            thread.join().expect("no panic");
            if round > 50 {
                break;
            }
        }
    }
}
