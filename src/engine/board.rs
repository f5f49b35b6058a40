//! Many calls that are waited for as one: a place for each result, and a count of those that are still to come.
//!
//! The calls are dealt out to a few parts, each of which is counted by itself: who waits for one part need not hear of others.

use super::Abandoned;
use super::call::Completer;
use super::cell::Cell;
use crossbeam_queue::ArrayQueue;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The results of several calls.
pub(super) struct Board<R> {
    places: Box<[Cell<R>]>,
    /// Of each call, its part.
    parts: Arc<[u16]>,
    /// The part that all are of, if there is one.
    only_part: Option<usize>,
    /// Of each part, the calls without a result. All its results are there when it is 0.
    left: Box<[AtomicUsize]>,
    /// How many of the results are failures.
    failed: AtomicUsize,
}

/// The waiting side of several calls.
pub struct Tickets<R> {
    board: Option<Arc<Board<R>>>,
    free: Arc<ArrayQueue<Arc<Board<R>>>>,
    /// Failures that were taken.
    taken: usize,
}

/// The bringing sides of several calls, first to last. Those that are not asked for bring [`Abandoned::abandoned`] when this is
/// dropped.
pub struct Completers<R: Abandoned> {
    board: Arc<Board<R>>,
    next: usize,
}

/// Boards that are used again and again, for the same number of calls each.
pub struct Boards<R> {
    free: Arc<ArrayQueue<Arc<Board<R>>>>,
    parts: Arc<[u16]>,
    count: usize,
}

/// Boards that are kept: one is still let go by its last completer while the next is in use.
const KEPT: usize = 4;

impl<R: Abandoned> Boards<R> {
    /// For a call of each of these parts, which are numbered from 0 to before `count`.
    pub fn new(parts: Arc<[u16]>, count: usize) -> Self {
        Boards { free: Arc::new(ArrayQueue::new(KEPT)), parts, count }
    }

    /// Both sides of as many new calls.
    pub fn board(&self) -> (Tickets<R>, Completers<R>) {
        let board = self.unused().unwrap_or_else(|| Board::new(self.parts.clone(), self.count));
        let completers = Completers { board: board.clone(), next: 0 };
        (Tickets { board: Some(board), free: self.free.clone(), taken: 0 }, completers)
    }

    fn unused(&self) -> Option<Arc<Board<R>>> {
        for _ in 0..KEPT {
            let mut board = self.free.pop()?;
            // Unique: no completer of its last use is left, so it can be made as new.
            if let Some(inner) = Arc::get_mut(&mut board) {
                inner.reset();
                return Some(board);
            }
            let _ = self.free.push(board);
        }
        None
    }
}

impl<R> Board<R> {
    fn new(parts: Arc<[u16]>, count: usize) -> Arc<Self> {
        let places = parts.iter().map(|_| Cell::new()).collect();
        let left = (0..count).map(|_| AtomicUsize::new(0)).collect();
        let first = parts.first().copied();
        let only_part = first.filter(|first| parts.iter().all(|part| part == first)).map(usize::from);
        let mut board = Board { places, parts, only_part, left, failed: AtomicUsize::new(0) };
        board.reset();
        Arc::new(board)
    }

    fn reset(&mut self) {
        self.places.iter_mut().for_each(Cell::reset);
        self.left.iter_mut().for_each(|left| *left.get_mut() = 0);
        for part in self.parts.iter() {
            *self.left[usize::from(*part)].get_mut() += 1;
        }
        *self.failed.get_mut() = 0;
    }

    fn is_done(&self) -> bool {
        self.left.iter().all(|left| left.load(Ordering::Acquire) == 0)
    }
}

impl<R: Abandoned> Board<R> {
    /// Brings the result of a call.
    ///
    /// # Safety
    /// No other call of this for the same place since the board was new.
    #[allow(unsafe_code)]
    pub(super) unsafe fn bring(&self, at: usize, result: R) {
        let is_failure = result.is_failure();
        // SAFETY: as the caller says.
        unsafe {
            self.places[at].bring(result);
        }
        if is_failure {
            self.failed.fetch_add(1, Ordering::Release);
        }
        // Ordered before the look at the count that finds 0, so all results are seen with it.
        self.left[usize::from(self.parts[at])].fetch_sub(1, Ordering::AcqRel);
    }
}

impl<R: Abandoned> Iterator for Completers<R> {
    type Item = Completer<R>;

    fn next(&mut self) -> Option<Completer<R>> {
        let at = self.next;
        if at == self.board.places.len() {
            return None;
        }
        self.next += 1;
        Some(Completer::on_board(self.board.clone(), at))
    }
}

impl<R: Abandoned> Drop for Completers<R> {
    fn drop(&mut self) {
        // Each brings its word when it is dropped.
        while self.next().is_some() {}
    }
}

impl<R: Abandoned> Tickets<R> {
    /// Whether every result is there.
    #[inline]
    pub fn are_done(&self) -> bool {
        self.board.as_ref().is_none_or(|board| board.is_done())
    }

    /// Whether every result of a part is there.
    #[inline]
    pub fn is_part_done(&self, part: usize) -> bool {
        self.board.as_ref().is_none_or(|board| board.left[part].load(Ordering::Acquire) == 0)
    }

    /// Whether all calls are of this part.
    pub fn is_only_part(&self, part: usize) -> bool {
        self.board.as_ref().is_none_or(|board| board.only_part == Some(part))
    }

    /// How many calls there are.
    pub fn len(&self) -> usize {
        self.board.as_ref().map_or(0, |board| board.places.len())
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether one of the results that are there, and were not taken, is a failure.
    #[inline]
    pub fn have_failed(&self) -> bool {
        self.board.as_ref().is_some_and(|board| board.failed.load(Ordering::Acquire) > self.taken)
    }

    /// Whether a result is there, or was taken.
    pub fn has_come(&self, at: usize) -> bool {
        let place = self.board.as_ref().and_then(|board| board.places.get(at));
        place.is_some_and(Cell::is_done)
    }

    /// A result, if it is there and was not taken before.
    pub fn take(&mut self, at: usize) -> Option<R> {
        let result = self.take_out(at);
        self.taken += usize::from(result.as_ref().is_some_and(R::is_failure));
        result
    }

    fn take_out(&mut self, at: usize) -> Option<R> {
        let place = self.board.as_ref()?.places.get(at)?;
        // SAFETY: these are the only tickets of the board and they are borrowed uniquely.
        #[allow(unsafe_code)]
        unsafe {
            place.take()
        }
    }
}

impl<R> Drop for Tickets<R> {
    fn drop(&mut self) {
        let Some(board) = self.board.take() else { return };
        // Only one that gets no more results is kept. One with results to come goes with its completers.
        if !board.is_done() {
            return;
        }
        for place in &board.places {
            // A result that nobody took must not live on in the store, with its tensor.
            // SAFETY: these are the only tickets of the board, and they end here.
            #[allow(unsafe_code)]
            drop(unsafe { place.take() });
        }
        // If the store is full the board is simply freed.
        let _ = self.free.push(board);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq)]
    struct Answer(i32);

    impl Abandoned for Answer {
        fn abandoned() -> Self {
            Answer(-1)
        }

        fn is_failure(&self) -> bool {
            self.0 < 0
        }
    }

    fn boards(calls: usize) -> Boards<Answer> {
        Boards::new(vec![0; calls].into(), 1)
    }

    #[test]
    fn all_results_are_there_when_the_last_is() {
        let (mut tickets, completers) = boards(3).board();
        let completers: Vec<_> = completers.collect();
        for (at, completer) in completers.into_iter().enumerate().rev() {
            assert!(!tickets.are_done() && tickets.take(at).is_none());
            completer.complete(Answer(at as i32));
            assert_eq!(tickets.are_done(), at == 0);
        }
        assert!(!tickets.have_failed());
        for at in 0..3 {
            assert_eq!((tickets.take(at), tickets.take(at)), (Some(Answer(at as i32)), None));
        }
    }

    #[test]
    fn each_part_is_counted_by_itself() {
        let (tickets, completers) = Boards::<Answer>::new([2, 0, 2].into(), 3).board();
        assert!(tickets.is_part_done(1) && !tickets.is_part_done(0) && !tickets.is_part_done(2));
        let mut completers: Vec<_> = completers.collect();
        completers.remove(1).complete(Answer(0));
        assert!(tickets.is_part_done(0) && !tickets.is_part_done(2));
        drop(completers);
        assert!(tickets.are_done());
    }

    #[test]
    fn a_completer_that_is_dropped_is_a_failure_of_its_call_alone() {
        let (mut tickets, mut completers) = boards(3).board();
        let first = completers.next().expect("three");
        drop(completers.next());
        assert!(tickets.have_failed() && !tickets.are_done());
        first.complete(Answer(7));
        // One was never asked for.
        drop(completers);
        assert!(tickets.are_done());
        assert_eq!([0, 1, 2].map(|at| tickets.take(at)), [7, -1, -1].map(|answer| Some(Answer(answer))));
    }

    #[test]
    fn a_failure_that_was_taken_is_none_of_the_others() {
        let (mut tickets, completers) = boards(3).board();
        let Ok([first, second, third]) = <[_; 3]>::try_from(completers.collect::<Vec<_>>()) else {
            panic!("there are three");
        };
        first.complete(Answer(-5));
        assert!(tickets.have_failed() && tickets.has_come(0) && !tickets.has_come(1));
        assert_eq!(tickets.take(0), Some(Answer(-5)));
        assert!(!tickets.have_failed() && tickets.has_come(0) && tickets.take(0).is_none());
        second.complete(Answer(1));
        assert!(!tickets.have_failed());
        third.complete(Answer(-7));
        assert!(tickets.have_failed() && tickets.are_done());
    }

    #[test]
    fn a_board_is_used_again_only_when_both_sides_are_gone() {
        let boards = boards(2);
        let (first, mut completers) = boards.board();
        let late = completers.next().expect("two");
        drop(completers);
        drop(first);
        let (mut second, completers) = boards.board();
        late.complete(Answer(2));
        assert!(!second.are_done() && !second.have_failed() && second.take(0).is_none());
        completers.for_each(|completer| completer.complete(Answer(-5)));
        let place = Arc::as_ptr(second.board.as_ref().expect("there"));
        drop(second);
        let (mut third, _completers) = boards.board();
        assert_eq!(Arc::as_ptr(third.board.as_ref().expect("there")), place, "used again");
        assert!(!third.are_done() && !third.have_failed() && third.take(1).is_none(), "and as new");
    }

    #[test]
    fn nothing_is_waited_for_without_calls() {
        assert!(boards(0).board().0.are_done());
    }

    #[test]
    fn results_cross_threads() {
        let boards = boards(64);
        for round in 0..50 {
            let (mut tickets, completers) = boards.board();
            let thread = std::thread::spawn(move || {
                completers.enumerate().for_each(|(at, it)| it.complete(Answer(at as i32 + round)));
            });
            while !tickets.are_done() {
                std::thread::yield_now();
            }
            for at in 0..64 {
                assert_eq!(tickets.take(at), Some(Answer(at as i32 + round)));
            }
            drop(tickets);
            thread.join().expect("no panic");
        }
    }
}
