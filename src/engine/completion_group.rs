//! Many calls that are waited for as one: a cell for each result, and a count of those that are still to come.
//!
//! The calls are dealt out to a few subsets, each of which is counted by itself: who waits for one subset need not hear of others.

use super::Canceled;
use super::oneshot::OneshotSender;
use super::result_cell::ResultCell;
use crossbeam_queue::ArrayQueue;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The results of several calls.
pub(super) struct CompletionGroup<R> {
    cells: Box<[ResultCell<R>]>,
    /// Of each call, its subset.
    subsets: Arc<[u16]>,
    /// The subset that all are of, if there is one.
    only_subset: Option<usize>,
    /// Of each subset, the calls without a result. All its results are there when it is 0.
    left: Box<[AtomicUsize]>,
    /// How many of the results are failures.
    failed: AtomicUsize,
}

/// The waiting side of several calls.
pub struct GroupReceiver<R> {
    group: Option<Arc<CompletionGroup<R>>>,
    free: Arc<ArrayQueue<Arc<CompletionGroup<R>>>>,
    /// Failures that were taken.
    taken: usize,
}

/// The bringing sides of several calls, first to last. Those that are not asked for bring [`Canceled::canceled`] when this is
/// dropped.
pub struct GroupSenders<R: Canceled> {
    group: Arc<CompletionGroup<R>>,
    next: usize,
}

/// GroupPool that are used again and again, for the same number of calls each.
pub struct GroupPool<R> {
    free: Arc<ArrayQueue<Arc<CompletionGroup<R>>>>,
    subsets: Arc<[u16]>,
    count: usize,
}

/// GroupPool that are kept: one is still let go by its last sender while the next is in use.
const KEPT: usize = 4;

impl<R: Canceled> GroupPool<R> {
    /// For a call of each of these subsets, which are numbered from 0 to before `count`.
    pub fn new(subsets: Arc<[u16]>, count: usize) -> Self {
        GroupPool { free: Arc::new(ArrayQueue::new(KEPT)), subsets, count }
    }

    /// Both sides of as many new calls.
    pub fn channels(&self) -> (GroupReceiver<R>, GroupSenders<R>) {
        let group = self.unused().unwrap_or_else(|| CompletionGroup::new(self.subsets.clone(), self.count));
        let senders = GroupSenders { group: group.clone(), next: 0 };
        (GroupReceiver { group: Some(group), free: self.free.clone(), taken: 0 }, senders)
    }

    fn unused(&self) -> Option<Arc<CompletionGroup<R>>> {
        for _ in 0..KEPT {
            let mut group = self.free.pop()?;
            // Unique: no sender of its last use is left, so it can be made as new.
            if let Some(inner) = Arc::get_mut(&mut group) {
                inner.reset();
                return Some(group);
            }
            let _ = self.free.push(group);
        }
        None
    }
}

impl<R> CompletionGroup<R> {
    fn new(subsets: Arc<[u16]>, count: usize) -> Arc<Self> {
        let cells = subsets.iter().map(|_| ResultCell::new()).collect();
        let left = (0..count).map(|_| AtomicUsize::new(0)).collect();
        let first = subsets.first().copied();
        let only_subset = first.filter(|first| subsets.iter().all(|subset| subset == first)).map(usize::from);
        let mut group = CompletionGroup { cells, subsets, only_subset, left, failed: AtomicUsize::new(0) };
        group.reset();
        Arc::new(group)
    }

    fn reset(&mut self) {
        self.cells.iter_mut().for_each(ResultCell::reset);
        self.left.iter_mut().for_each(|left| *left.get_mut() = 0);
        for subset in self.subsets.iter() {
            *self.left[usize::from(*subset)].get_mut() += 1;
        }
        *self.failed.get_mut() = 0;
    }

    fn is_done(&self) -> bool {
        self.left.iter().all(|left| left.load(Ordering::Acquire) == 0)
    }
}

impl<R: Canceled> CompletionGroup<R> {
    /// Brings the result of a call.
    ///
    /// # Safety
    /// No other call of this for the same cell since the group was new.
    #[allow(unsafe_code)]
    pub(super) unsafe fn put(&self, at: usize, result: R) {
        let is_failure = result.is_failure();
        // SAFETY: as the caller says.
        unsafe {
            self.cells[at].put(result);
        }
        if is_failure {
            self.failed.fetch_add(1, Ordering::Release);
        }
        // Ordered before the look at the count that finds 0, so all results are seen with it.
        self.left[usize::from(self.subsets[at])].fetch_sub(1, Ordering::AcqRel);
    }
}

impl<R: Canceled> Iterator for GroupSenders<R> {
    type Item = OneshotSender<R>;

    fn next(&mut self) -> Option<OneshotSender<R>> {
        let at = self.next;
        if at == self.group.cells.len() {
            return None;
        }
        self.next += 1;
        Some(OneshotSender::on_board(self.group.clone(), at))
    }
}

impl<R: Canceled> Drop for GroupSenders<R> {
    fn drop(&mut self) {
        // Each brings its word when it is dropped.
        while self.next().is_some() {}
    }
}

impl<R: Canceled> GroupReceiver<R> {
    /// Whether every result is there.
    #[inline]
    pub fn is_done(&self) -> bool {
        self.group.as_ref().is_none_or(|group| group.is_done())
    }

    /// Whether every result of a subset is there.
    #[inline]
    pub fn is_subset_done(&self, subset: usize) -> bool {
        self.group.as_ref().is_none_or(|group| group.left[subset].load(Ordering::Acquire) == 0)
    }

    /// Whether all calls are of this subset.
    pub fn is_only_subset(&self, subset: usize) -> bool {
        self.group.as_ref().is_none_or(|group| group.only_subset == Some(subset))
    }

    /// How many calls there are.
    pub fn len(&self) -> usize {
        self.group.as_ref().map_or(0, |group| group.cells.len())
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether one of the results that are there, and were not taken, is a failure.
    #[inline]
    pub fn has_failed(&self) -> bool {
        self.group.as_ref().is_some_and(|group| group.failed.load(Ordering::Acquire) > self.taken)
    }

    /// Whether a result is there, or was taken.
    pub fn is_ready(&self, at: usize) -> bool {
        let cell = self.group.as_ref().and_then(|group| group.cells.get(at));
        cell.is_some_and(ResultCell::is_done)
    }

    /// A result, if it is there and was not taken before.
    pub fn take(&mut self, at: usize) -> Option<R> {
        let result = self.take_out(at);
        self.taken += usize::from(result.as_ref().is_some_and(R::is_failure));
        result
    }

    fn take_out(&mut self, at: usize) -> Option<R> {
        let cell = self.group.as_ref()?.cells.get(at)?;
        // SAFETY: these are the only receiver of the group and they are borrowed uniquely.
        #[allow(unsafe_code)]
        unsafe {
            cell.take()
        }
    }
}

impl<R> Drop for GroupReceiver<R> {
    fn drop(&mut self) {
        let Some(group) = self.group.take() else { return };
        // Only one that gets no more results is kept. One with results to come goes with its senders.
        if !group.is_done() {
            return;
        }
        for cell in &group.cells {
            // A result that nobody took must not live on in the store, with its tensor.
            // SAFETY: these are the only receiver of the group, and they end here.
            #[allow(unsafe_code)]
            drop(unsafe { cell.take() });
        }
        // If the store is full the group is simply freed.
        let _ = self.free.push(group);
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

        fn is_failure(&self) -> bool {
            self.0 < 0
        }
    }

    fn groups(calls: usize) -> GroupPool<Answer> {
        GroupPool::new(vec![0; calls].into(), 1)
    }

    #[test]
    fn all_results_are_there_when_the_last_is() {
        let (mut receiver, senders) = groups(3).channels();
        let senders: Vec<_> = senders.collect();
        for (at, sender) in senders.into_iter().enumerate().rev() {
            assert!(!receiver.is_done() && receiver.take(at).is_none());
            sender.send(Answer(at as i32));
            assert_eq!(receiver.is_done(), at == 0);
        }
        assert!(!receiver.has_failed());
        for at in 0..3 {
            assert_eq!((receiver.take(at), receiver.take(at)), (Some(Answer(at as i32)), None));
        }
    }

    #[test]
    fn each_part_is_counted_by_itself() {
        let (receiver, senders) = GroupPool::<Answer>::new([2, 0, 2].into(), 3).channels();
        assert!(receiver.is_subset_done(1) && !receiver.is_subset_done(0) && !receiver.is_subset_done(2));
        let mut senders: Vec<_> = senders.collect();
        senders.remove(1).send(Answer(0));
        assert!(receiver.is_subset_done(0) && !receiver.is_subset_done(2));
        drop(senders);
        assert!(receiver.is_done());
    }

    #[test]
    fn a_completer_that_is_dropped_is_a_failure_of_its_call_alone() {
        let (mut receiver, mut senders) = groups(3).channels();
        let first = senders.next().expect("three");
        drop(senders.next());
        assert!(receiver.has_failed() && !receiver.is_done());
        first.send(Answer(7));
        // One was never asked for.
        drop(senders);
        assert!(receiver.is_done());
        assert_eq!([0, 1, 2].map(|at| receiver.take(at)), [7, -1, -1].map(|answer| Some(Answer(answer))));
    }

    #[test]
    fn a_failure_that_was_taken_is_none_of_the_others() {
        let (mut receiver, senders) = groups(3).channels();
        let Ok([first, second, third]) = <[_; 3]>::try_from(senders.collect::<Vec<_>>()) else {
            panic!("there are three");
        };
        first.send(Answer(-5));
        assert!(receiver.has_failed() && receiver.is_ready(0) && !receiver.is_ready(1));
        assert_eq!(receiver.take(0), Some(Answer(-5)));
        assert!(!receiver.has_failed() && receiver.is_ready(0) && receiver.take(0).is_none());
        second.send(Answer(1));
        assert!(!receiver.has_failed());
        third.send(Answer(-7));
        assert!(receiver.has_failed() && receiver.is_done());
    }

    #[test]
    fn a_board_is_used_again_only_when_both_sides_are_gone() {
        let groups = groups(2);
        let (first, mut senders) = groups.channels();
        let late = senders.next().expect("two");
        drop(senders);
        drop(first);
        let (mut second, senders) = groups.channels();
        late.send(Answer(2));
        assert!(!second.is_done() && !second.has_failed() && second.take(0).is_none());
        senders.for_each(|sender| sender.send(Answer(-5)));
        let cell = Arc::as_ptr(second.group.as_ref().expect("there"));
        drop(second);
        let (mut third, _completers) = groups.channels();
        assert_eq!(Arc::as_ptr(third.group.as_ref().expect("there")), cell, "used again");
        assert!(!third.is_done() && !third.has_failed() && third.take(1).is_none(), "and as new");
    }

    #[test]
    fn nothing_is_waited_for_without_calls() {
        assert!(groups(0).channels().0.is_done());
    }

    #[test]
    fn results_cross_threads() {
        let groups = groups(64);
        for round in 0..50 {
            let (mut receiver, senders) = groups.channels();
            let thread = std::thread::spawn(move || {
                senders.enumerate().for_each(|(at, it)| it.send(Answer(at as i32 + round)));
            });
            while !receiver.is_done() {
                std::thread::yield_now();
            }
            for at in 0..64 {
                assert_eq!(receiver.take(at), Some(Answer(at as i32 + round)));
            }
            drop(receiver);
            thread.join().expect("no panic");
        }
    }
}
