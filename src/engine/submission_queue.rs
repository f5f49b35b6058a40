//! Commands on their way to the thread that owns the poller.
//!
//! All threads share one bounded queue. A thread that submits much gets a lane: a ring with one
//! producer and one consumer, so that its submissions touch no contended cache line. The commands
//! of one thread keep their order.

use crate::sync::catch_panic;
use crossbeam_queue::ArrayQueue;
use rtrb::{Consumer, Producer, PushError, RingBuffer};
use std::any::Any;
use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};

/// Commands that a thread submits through the shared queue before it gets a lane.
const BUSY: u32 = 64;
/// Threads that can have a lane. Further threads use the shared queue.
const LANES: usize = 16;
/// Capacity of a lane, in commands.
const LANE_DEPTH: usize = 1024;

/// The producers' end, usable by any thread.
pub(super) struct SubmissionQueue<T> {
    id: u64,
    shared: ArrayQueue<T>,
    /// Lanes that the consumer has not seen yet.
    new_lanes: ArrayQueue<Consumer<T>>,
    /// Lanes that are in use by a thread or not yet given up by the consumer.
    lanes: AtomicUsize,
    /// The consumer has ended.
    closed: AtomicBool,
    /// After the close: one thread is dropping the commands that are left.
    dropping: AtomicBool,
}

/// The consumer's end, owned by one thread.
pub(super) struct SubmissionConsumer<T> {
    lanes: Vec<Consumer<T>>,
}

/// What a thread keeps for one [`SubmissionQueue`].
struct ThreadProducer {
    /// The id of the queue.
    queue: u64,
    submitted: u32,
    lane: Option<Box<dyn Any>>,
}

thread_local! {
    static PRODUCERS: RefCell<Vec<ThreadProducer>> = const { RefCell::new(Vec::new()) };
}

impl<T: Send + 'static> SubmissionQueue<T> {
    /// An empty queue. `capacity` bounds the shared queue, in commands.
    pub fn new(capacity: usize) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        SubmissionQueue {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            shared: ArrayQueue::new(capacity.max(1)),
            new_lanes: ArrayQueue::new(LANES),
            lanes: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
            dropping: AtomicBool::new(false),
        }
    }

    /// Ends the consumer. Commands that it has not taken are dropped, and so is every later one.
    pub fn close(&self, consumer: SubmissionConsumer<T>) {
        // Before the lanes are emptied: a thread that submits later sees it, and empties them
        // again.
        self.closed.store(true, Ordering::SeqCst);
        for lane in consumer.lanes {
            // There is room: `new_lanes` holds as many lanes as can exist.
            let _ = self.new_lanes.push(lane);
        }
        self.drop_all();
    }

    /// Drops the command that this thread has just submitted, if the consumer has ended.
    #[inline]
    pub fn drop_if_closed(&self) {
        // The push comes before this load; `close` stores the flag before it drains. So one of the
        // two sees the other.
        fence(Ordering::SeqCst);
        if self.closed.load(Ordering::Relaxed) {
            self.drop_all();
        }
    }

    /// Drops every command. A panic in the drop of one command affects no other.
    #[cold]
    fn drop_all(&self) {
        let drop_one = |command: T| catch_panic(|| drop(command));
        while let Some(command) = self.shared.pop() {
            drop_one(command);
        }
        // One thread at a time: a lane that another thread has popped here would keep a command
        // pushed just now.
        while self.dropping.swap(true, Ordering::Acquire) {
            std::thread::yield_now();
        }
        for _ in 0..self.new_lanes.len() {
            let Some(mut lane) = self.new_lanes.pop() else { break };
            while let Ok(command) = lane.pop() {
                drop_one(command);
            }
            let _ = self.new_lanes.push(lane);
        }
        self.dropping.store(false, Ordering::Release);
    }

    /// Puts a command into the shared queue.
    ///
    /// # Errors
    /// Returns the command if the queue is full.
    pub fn push(&self, command: T) -> Result<(), T> {
        self.shared.push(command)
    }

    /// Whether the shared queue is empty.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.shared.is_empty()
    }

    /// Capacity of the shared queue, in commands.
    pub fn capacity(&self) -> usize {
        self.shared.capacity()
    }

    /// Takes the oldest command of the shared queue.
    pub fn pop(&self) -> Option<T> {
        self.shared.pop()
    }

    /// Puts a command into this thread's lane, or into the shared queue if the thread has no lane.
    ///
    /// # Errors
    /// Returns the command if there is no room.
    pub fn submit(&self, command: T) -> Result<(), T> {
        if PRODUCERS.try_with(|_| ()).is_err() {
            // The thread ends, and drops what it had in other thread-local variables.
            return self.shared.push(command);
        }
        PRODUCERS.with_borrow_mut(|producers| {
            let at = match producers.iter().position(|producer| producer.queue == self.id) {
                Some(at) => at,
                None => {
                    // A lane without a consumer belongs to an engine that has ended.
                    producers.retain(|producer| {
                        producer.lane.as_ref().is_none_or(|lane| !is_abandoned::<T>(&**lane))
                    });
                    producers.push(ThreadProducer { queue: self.id, submitted: 0, lane: None });
                    producers.len() - 1
                }
            };
            let producer = &mut producers[at];
            if producer.lane.is_none() {
                // A move to a lane keeps the order only if the shared queue was seen empty after
                // this thread's last push. The consumer then has that command, and runs it before
                // it looks at lanes again.
                if producer.submitted < BUSY || !self.shared.is_empty() {
                    self.shared.push(command)?;
                    producer.submitted = producer.submitted.saturating_add(1);
                    return Ok(());
                }
                producer.lane = self.open_lane();
                // Without a free lane the thread asks again after as many commands.
                producer.submitted = 0;
            }
            let lane = producer.lane.as_mut().and_then(|lane| lane.downcast_mut::<Producer<T>>());
            match lane {
                Some(lane) => lane.push(command).map_err(|PushError::Full(command)| command),
                None => self.shared.push(command),
            }
        })
    }

    fn open_lane(&self) -> Option<Box<dyn Any>> {
        let one_more = |lanes| (lanes < LANES).then_some(lanes + 1);
        self.lanes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).ok()?;
        let (producer, consumer) = RingBuffer::new(LANE_DEPTH);
        // There is room: `new_lanes` holds as many lanes as can exist.
        self.new_lanes.push(consumer).ok()?;
        Some(Box::new(producer))
    }
}

fn is_abandoned<T: 'static>(lane: &dyn Any) -> bool {
    lane.downcast_ref::<Producer<T>>().is_some_and(Producer::is_abandoned)
}

impl<T: Send + 'static> SubmissionConsumer<T> {
    /// A consumer without lanes.
    pub fn new() -> Self {
        SubmissionConsumer { lanes: Vec::with_capacity(LANES) }
    }

    /// Takes a bounded number of commands: those of each thread oldest first.
    pub fn take(&mut self, from: &SubmissionQueue<T>, mut each: impl FnMut(T)) {
        if !from.shared.is_empty() {
            for _ in 0..from.shared.capacity() {
                let Some(command) = from.shared.pop() else { break };
                each(command);
            }
        }
        while !from.new_lanes.is_empty() {
            self.lanes.extend(from.new_lanes.pop());
        }
        let mut ended = false;
        for lane in &mut self.lanes {
            // Read before the slots: the lane of a thread that has ended gets no further command.
            let abandoned = lane.is_abandoned();
            for _ in 0..lane.slots() {
                let Ok(command) = lane.pop() else { break };
                each(command);
            }
            ended |= abandoned;
        }
        if ended {
            let before = self.lanes.len();
            self.lanes.retain(|lane| !(lane.is_abandoned() && lane.is_empty()));
            from.lanes.fetch_sub(before - self.lanes.len(), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    /// Submits a command when it is dropped.
    struct SubmitsAtEnd(Arc<SubmissionQueue<u32>>);

    impl Drop for SubmitsAtEnd {
        fn drop(&mut self) {
            self.0.submit(2).expect("room");
        }
    }

    thread_local! {
        static AT_END: RefCell<Option<SubmitsAtEnd>> = const { RefCell::new(None) };
    }

    #[test]
    fn a_thread_may_submit_while_its_variables_are_dropped() {
        let queue = Arc::new(SubmissionQueue::new(4));
        let of_thread = queue.clone();
        let thread = std::thread::spawn(move || {
            // Dropped last, as it is used first.
            AT_END.set(Some(SubmitsAtEnd(of_thread.clone())));
            of_thread.submit(1).expect("room");
        });
        thread.join().expect("no panic");
        assert_eq!([queue.pop(), queue.pop()], [Some(1), Some(2)]);
    }

    #[test]
    fn commands_of_each_thread_keep_their_order_while_it_moves_to_a_lane() {
        const EACH: u32 = 20_000;
        let queue = Arc::new(SubmissionQueue::new(64));
        let threads: Vec<_> = (0..3u32)
            .map(|thread| {
                let queue = queue.clone();
                std::thread::spawn(move || {
                    for number in 0..EACH {
                        let mut command = (thread, number);
                        while let Err(back) = queue.submit(command) {
                            command = back;
                            std::thread::yield_now();
                        }
                    }
                })
            })
            .collect();
        let mut next = [0; 3];
        let mut consumer = SubmissionConsumer::new();
        let mut most_lanes = 0;
        while next != [EACH; 3] {
            consumer.take(&queue, |(thread, number)| {
                assert_eq!(number, next[thread as usize], "thread {thread}");
                next[thread as usize] += 1;
            });
            most_lanes = most_lanes.max(consumer.lanes.len());
            std::thread::yield_now();
        }
        threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
        assert!(most_lanes > 0, "no thread got a lane");
        consumer.take(&queue, |_| unreachable!());
        assert!(consumer.lanes.is_empty(), "lanes of threads that have ended are submitted back");
    }

    #[test]
    fn more_threads_than_lanes_share_the_queue() {
        let queue = Arc::new(SubmissionQueue::new(4096));
        let stop = Arc::new(AtomicBool::new(false));
        let threads: Vec<_> = (0..LANES + 4)
            .map(|_| {
                let (queue, stop) = (queue.clone(), stop.clone());
                std::thread::spawn(move || {
                    let mut submitted = 0u64;
                    while !stop.load(Ordering::Relaxed) {
                        submitted += u64::from(queue.submit(1u64).is_ok());
                        std::thread::yield_now();
                    }
                    submitted
                })
            })
            .collect();
        let (mut taken, mut consumer) = (0, SubmissionConsumer::new());
        for _ in 0..20_000 {
            consumer.take(&queue, |command| taken += command);
        }
        stop.store(true, Ordering::Relaxed);
        let submitted: u64 = threads.into_iter().map(|thread| thread.join().expect("no panic")).sum();
        for _ in 0..4 {
            consumer.take(&queue, |command| taken += command);
        }
        assert_eq!(taken, submitted);
        assert!(consumer.lanes.len() <= LANES);
    }

    #[test]
    fn a_full_lane_returns_the_command() {
        let queue = SubmissionQueue::new(BUSY as usize);
        let mut submitted = 0;
        let mut consumer = SubmissionConsumer::new();
        for _ in 0..BUSY {
            queue.submit(0).expect("room");
        }
        consumer.take(&queue, |_| {});
        while queue.submit(submitted).is_ok() {
            submitted += 1;
        }
        assert_eq!(submitted, LANE_DEPTH);
        consumer.take(&queue, |_| {});
        assert_eq!(queue.submit(1), Ok(()));
    }
}
