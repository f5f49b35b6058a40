//! Several results that are waited for together: a cell for each, and a count of those that are
//! missing.
//!
//! The results form a few subsets, and each subset is counted by itself. A thread can wait for one
//! subset alone.

use super::Canceled;
use super::oneshot::OneshotSender;
use super::result_cell::ResultCell;
use crossbeam_queue::ArrayQueue;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// The results of several one-shot channels.
pub(super) struct CompletionGroup<R> {
    cells: Box<[ResultCell<R>]>,
    /// The subset of each result.
    subsets: Arc<[u16]>,
    /// The subset of all results, if they have the same one.
    only_subset: Option<usize>,
    /// For each subset, the number of missing results.
    left: Box<[AtomicUsize]>,
    /// Number of results that are failures.
    failed: AtomicUsize,
    /// The receiver was dropped before all results were sent.
    is_abandoned: AtomicBool,
    /// The job that runs at the end, if nobody waits for it.
    end: Option<EndJob>,
}

/// Runs a job once: when a group has its last result, or its first failure.
struct EndJob {
    /// Number of missing results of all subsets.
    left: AtomicUsize,
    /// The job, until it runs.
    job: ArrayQueue<Box<dyn FnOnce() + Send>>,
}

impl EndJob {
    fn note(&self, is_failure: bool) {
        // AcqRel: the thread that counts the last result sees the counts of all subsets.
        let is_last = self.left.fetch_sub(1, Ordering::AcqRel) == 1;
        if is_last || is_failure {
            self.run();
        }
    }

    fn run(&self) {
        if let Some(job) = self.job.pop() {
            job();
        }
    }
}

/// The side of a completion group that waits.
pub struct GroupReceiver<R> {
    group: Option<Arc<CompletionGroup<R>>>,
    free: Arc<ArrayQueue<Arc<CompletionGroup<R>>>>,
    /// Number of failures that were taken.
    taken: usize,
}

/// The senders of a completion group, first to last. Dropping the iterator drops the senders that
/// it has not returned: they send [`Canceled::canceled`].
pub struct GroupSenders<R: Canceled> {
    group: Arc<CompletionGroup<R>>,
    next: usize,
}

/// Completion groups of one layout that are used again and again.
pub struct GroupPool<R> {
    free: Arc<ArrayQueue<Arc<CompletionGroup<R>>>>,
    subsets: Arc<[u16]>,
    count: usize,
}

/// Groups that are kept. The last sender of a group may still hold it while the next group is in
/// use.
const KEPT: usize = 4;

impl<R: Canceled> GroupPool<R> {
    /// Groups with one result for each element of `subsets`. Subsets are numbered from 0 to `count
    /// - 1`.
    pub fn new(subsets: Arc<[u16]>, count: usize) -> Self {
        GroupPool { free: Arc::new(ArrayQueue::new(KEPT)), subsets, count }
    }

    /// Both sides of a new group.
    pub fn channels(&self) -> (GroupReceiver<R>, GroupSenders<R>) {
        let group = self.unused().unwrap_or_else(|| CompletionGroup::new(self.subsets.clone(), self.count));
        self.sides(group)
    }

    /// The senders of a new group. A sending thread calls `ended` with the receiver once: when
    /// every result was sent, or the first failure. User code must be passed on to another thread.
    pub fn senders_then(&self, ended: impl FnOnce(GroupReceiver<R>) + Send + 'static) -> GroupSenders<R> {
        let mut group = CompletionGroup::of(self.subsets.clone(), self.count);
        let left = AtomicUsize::new(group.cells.len());
        group.end = Some(EndJob { left, job: ArrayQueue::new(1) });
        let group = Arc::new(group);
        let (receiver, senders) = self.sides(group.clone());
        if let Some(end) = &group.end {
            // There is room. Until it runs, the job holds the group that holds the job. It runs, as
            // each sender that is dropped sends.
            let _ = end.job.push(Box::new(move || ended(receiver)));
            if group.cells.is_empty() {
                end.run();
            }
        }
        senders
    }

    fn sides(&self, group: Arc<CompletionGroup<R>>) -> (GroupReceiver<R>, GroupSenders<R>) {
        let senders = GroupSenders { group: group.clone(), next: 0 };
        (GroupReceiver { group: Some(group), free: self.free.clone(), taken: 0 }, senders)
    }

    fn unused(&self) -> Option<Arc<CompletionGroup<R>>> {
        for _ in 0..KEPT {
            let mut group = self.free.pop()?;
            // Unique: the senders of its last use are gone.
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
        Arc::new(Self::of(subsets, count))
    }

    fn of(subsets: Arc<[u16]>, count: usize) -> Self {
        let cells = subsets.iter().map(|_| ResultCell::new()).collect();
        let left = (0..count).map(|_| AtomicUsize::new(0)).collect();
        let first = subsets.first().copied();
        let only_subset = first.filter(|first| subsets.iter().all(|subset| subset == first)).map(usize::from);
        let failed = AtomicUsize::new(0);
        let is_abandoned = AtomicBool::new(false);
        let mut group =
            CompletionGroup { cells, subsets, only_subset, left, failed, is_abandoned, end: None };
        group.reset();
        group
    }

    fn reset(&mut self) {
        self.cells.iter_mut().for_each(ResultCell::reset);
        self.left.iter_mut().for_each(|left| *left.get_mut() = 0);
        for subset in self.subsets.iter() {
            *self.left[usize::from(*subset)].get_mut() += 1;
        }
        *self.failed.get_mut() = 0;
        *self.is_abandoned.get_mut() = false;
        self.end = None;
    }

    /// Whether the receiver was dropped before all results were sent.
    pub(super) fn is_abandoned(&self) -> bool {
        // Relaxed: what tells another thread of the drop also orders this load after the store.
        self.is_abandoned.load(Ordering::Relaxed)
    }

    fn is_done(&self) -> bool {
        self.left.iter().all(|left| left.load(Ordering::Acquire) == 0)
    }
}

impl<R: Canceled> CompletionGroup<R> {
    /// Puts one result.
    ///
    /// # Safety
    /// `put` is called at most once for each cell between two resets of the group.
    #[allow(unsafe_code)]
    pub(super) unsafe fn put(&self, at: usize, result: R) {
        let is_failure = result.is_failure();
        // SAFETY: by the contract above this is the only write to the cell.
        unsafe {
            self.cells[at].put(result);
        }
        if is_failure {
            self.failed.fetch_add(1, Ordering::Release);
        }
        // Release: a thread that loads 0 (acquire) sees all results.
        self.left[usize::from(self.subsets[at])].fetch_sub(1, Ordering::AcqRel);
        if let Some(end) = &self.end {
            end.note(is_failure);
        }
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
        Some(OneshotSender::in_group(self.group.clone(), at))
    }
}

impl<R: Canceled> Drop for GroupSenders<R> {
    fn drop(&mut self) {
        // A sender that is dropped sends `Canceled::canceled`.
        while self.next().is_some() {}
    }
}

impl<R: Canceled> GroupReceiver<R> {
    /// Whether every result was sent.
    #[inline]
    pub fn is_done(&self) -> bool {
        self.group.as_ref().is_none_or(|group| group.is_done())
    }

    /// Whether every result of a subset was sent.
    #[inline]
    pub fn is_subset_done(&self, subset: usize) -> bool {
        self.group.as_ref().is_none_or(|group| group.left[subset].load(Ordering::Acquire) == 0)
    }

    /// Whether all results are of this subset.
    pub fn is_only_subset(&self, subset: usize) -> bool {
        self.group.as_ref().is_none_or(|group| group.only_subset == Some(subset))
    }

    /// Number of results.
    pub fn len(&self) -> usize {
        self.group.as_ref().map_or(0, |group| group.cells.len())
    }

    /// Whether the group has no results.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether a result that was sent and not taken is a failure.
    #[inline]
    pub fn has_failed(&self) -> bool {
        self.group.as_ref().is_some_and(|group| group.failed.load(Ordering::Acquire) > self.taken)
    }

    /// Whether a result was sent. Stays `true` after it was taken.
    pub fn is_ready(&self, at: usize) -> bool {
        let cell = self.group.as_ref().and_then(|group| group.cells.get(at));
        cell.is_some_and(ResultCell::is_done)
    }

    /// Takes a result, if it was sent and not taken before.
    pub fn take(&mut self, at: usize) -> Option<R> {
        let result = self.take_out(at);
        self.taken += usize::from(result.as_ref().is_some_and(R::is_failure));
        result
    }

    fn take_out(&mut self, at: usize) -> Option<R> {
        let cell = self.group.as_ref()?.cells.get(at)?;
        // SAFETY: this is the only receiver of the group, and it is borrowed uniquely.
        #[allow(unsafe_code)]
        unsafe {
            cell.take()
        }
    }
}

impl<R> Drop for GroupReceiver<R> {
    fn drop(&mut self) {
        let Some(group) = self.group.take() else { return };
        // Only a group with all results goes back to the pool. The last sender frees any other.
        if !group.is_done() {
            group.is_abandoned.store(true, Ordering::Relaxed);
            return;
        }
        for cell in &group.cells {
            // A result that was not taken must not live on in the pool, with its tensor.
            // SAFETY: this is the only receiver of the group, and it ends here.
            #[allow(unsafe_code)]
            drop(unsafe { cell.take() });
        }
        // A full pool frees the group.
        let _ = self.free.push(group);
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

        fn is_failure(&self) -> bool {
            self.0 < 0
        }
    }

    fn pool(results: usize) -> GroupPool<Answer> {
        GroupPool::new(vec![0; results].into(), 1)
    }

    #[test]
    fn the_group_is_done_with_its_last_result() {
        let (mut receiver, senders) = pool(3).channels();
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
    fn each_subset_is_counted_by_itself() {
        let (receiver, senders) = GroupPool::<Answer>::new([2, 0, 2].into(), 3).channels();
        assert!(receiver.is_subset_done(1) && !receiver.is_subset_done(0) && !receiver.is_subset_done(2));
        let mut senders: Vec<_> = senders.collect();
        senders.remove(1).send(Answer(0));
        assert!(receiver.is_subset_done(0) && !receiver.is_subset_done(2));
        drop(senders);
        assert!(receiver.is_done());
    }

    #[test]
    fn a_sender_that_is_dropped_is_a_failure_of_its_result_alone() {
        let (mut receiver, mut senders) = pool(3).channels();
        let first = senders.next().expect("three");
        drop(senders.next());
        assert!(receiver.has_failed() && !receiver.is_done());
        first.send(Answer(7));
        // The iterator has not returned the last one.
        drop(senders);
        assert!(receiver.is_done());
        assert_eq!([0, 1, 2].map(|at| receiver.take(at)), [7, -1, -1].map(|answer| Some(Answer(answer))));
    }

    #[test]
    fn a_failure_that_was_taken_is_not_counted() {
        let (mut receiver, senders) = pool(3).channels();
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
    fn a_group_whose_receiver_is_dropped_early_is_abandoned() {
        let (receiver, senders) = pool(2).channels();
        let mut senders: Vec<_> = senders.collect();
        senders.remove(0).send(Answer(1));
        assert!(!senders[0].is_abandoned());
        drop(receiver);
        assert!(senders[0].is_abandoned());
    }

    #[test]
    fn a_group_is_used_again_only_when_both_sides_are_gone() {
        let groups = pool(2);
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
        let (mut third, _senders) = groups.channels();
        assert_eq!(Arc::as_ptr(third.group.as_ref().expect("there")), cell, "used again");
        assert!(!third.is_done() && !third.has_failed() && third.take(1).is_none(), "and as new");
    }

    #[test]
    fn the_job_at_the_end_runs_once_after_the_last_result_or_the_first_failure() {
        let ends = |subsets: &[u16], answers: &[i32]| {
            let (told, ended) = std::sync::mpsc::channel();
            let groups = GroupPool::new(subsets.into(), 2);
            let senders = groups.senders_then(move |mut receiver| {
                let taken: Vec<_> = (0..receiver.len()).map(|at| receiver.take(at)).collect();
                told.send((receiver.is_done(), taken)).expect("open");
            });
            let mut ran_after = Vec::new();
            for (sender, answer) in senders.zip(answers) {
                sender.send(Answer(*answer));
                ran_after.extend(ended.try_iter());
                ran_after.iter().for_each(|(is_done, _)| assert!(*is_done || *answer < 0));
            }
            ran_after.extend(ended.try_iter());
            ran_after
        };
        assert_eq!(ends(&[0, 1], &[7, 8]), [(true, vec![Some(Answer(7)), Some(Answer(8))])]);
        assert_eq!(ends(&[0, 1, 0], &[7, -5, -6]), [(false, vec![Some(Answer(7)), Some(Answer(-5)), None])]);
        assert_eq!(ends(&[], &[]), [(true, vec![])]);
        // The second sender is dropped by the iterator.
        assert_eq!(ends(&[0, 1], &[7]), [(true, vec![Some(Answer(7)), Some(Answer(-1))])]);
    }

    #[test]
    fn a_group_without_results_is_done() {
        assert!(pool(0).channels().0.is_done());
    }

    #[test]
    fn results_cross_threads() {
        let groups = pool(64);
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
