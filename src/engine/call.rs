//! Calls: one side waits for a result, the other brings it, and neither allocates in steady state.

use super::board::Board;
use super::cell::Cell;
use super::executor::Executor;
use crossbeam_queue::ArrayQueue;
use std::sync::Arc;

/// A result that can stand for "nobody will bring one".
pub trait Abandoned: Send + 'static {
    /// What the waiter gets when the bringing side goes away without a result.
    fn abandoned() -> Self;

    /// Whether who waits for several results need not wait for the others any more.
    fn is_failure(&self) -> bool {
        false
    }
}

/// A store of calls that are used again and again.
pub struct Calls<R> {
    free: Arc<ArrayQueue<Arc<Cell<R>>>>,
}

/// The waiting side of a call.
pub struct Ticket<R> {
    cell: Option<Arc<Cell<R>>>,
    free: Arc<ArrayQueue<Arc<Cell<R>>>>,
}

/// The bringing side of a call. Dropped without a result, it brings [`Abandoned::abandoned`].
pub struct Completer<R: Abandoned> {
    to: Option<To<R>>,
}

enum To<R> {
    Cell(Arc<Cell<R>>),
    Board(Arc<Board<R>>, usize),
    Callback(Box<dyn FnOnce(R) + Send>, Executor),
}

/// Calls that are there from the start: so many must follow each other before one is used again.
const MADE: usize = 64;
/// How many of those that were used are looked at for one that neither side holds any more.
const LOOKS: usize = 8;

impl<R: Abandoned> Calls<R> {
    /// Room for `keep` calls to be used again.
    pub fn new(keep: usize) -> Self {
        let free = ArrayQueue::new(keep.max(1));
        for _ in 0..keep.min(MADE) {
            // There is room.
            let _ = free.push(Arc::new(Cell::new()));
        }
        Calls { free: Arc::new(free) }
    }

    /// Both sides of a new call.
    pub fn call(&self) -> (Ticket<R>, Completer<R>) {
        let cell = self.unused().unwrap_or_else(|| Arc::new(Cell::new()));
        let completer = Completer { to: Some(To::Cell(cell.clone())) };
        (Ticket { cell: Some(cell), free: self.free.clone() }, completer)
    }

    /// A call whose result goes to `callback`, which the executor runs.
    pub fn callback(executor: &Executor, callback: impl FnOnce(R) + Send + 'static) -> Completer<R> {
        Completer { to: Some(To::Callback(Box::new(callback), executor.clone())) }
    }

    fn unused(&self) -> Option<Arc<Cell<R>>> {
        for _ in 0..LOOKS {
            let mut cell = self.free.pop()?;
            // Unique: neither side of its last use is left, so it can be made as new.
            if let Some(inner) = Arc::get_mut(&mut cell) {
                inner.reset();
                return Some(cell);
            }
            // Its completer is still at it, on another thread or for a waiter that has left: its turn comes again.
            let _ = self.free.push(cell);
        }
        None
    }
}

impl<R> Ticket<R> {
    /// Whether the result is there.
    pub fn is_done(&self) -> bool {
        self.cell.as_ref().is_none_or(|cell| cell.is_done())
    }

    /// The result, if it is there and was not taken before.
    pub fn take(&mut self) -> Option<R> {
        let cell = self.cell.as_ref()?;
        // SAFETY: this is the only ticket of the cell and it is borrowed uniquely.
        #[allow(unsafe_code)]
        unsafe {
            cell.take()
        }
    }
}

impl<R> Drop for Ticket<R> {
    fn drop(&mut self) {
        // Only an empty cell is kept: a result that nobody took would live on in the store, with its tensor. One
        // that is still to come goes with its completer, and takes the cell along.
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

impl<R: Abandoned> Completer<R> {
    /// Of one of the calls of a board.
    pub(super) fn on_board(board: Arc<Board<R>>, at: usize) -> Self {
        Completer { to: Some(To::Board(board, at)) }
    }

    /// Brings the result.
    pub fn complete(mut self, result: R) {
        self.bring(result);
    }

    fn bring(&mut self, result: R) {
        match self.to.take() {
            Some(To::Cell(cell)) => {
                // SAFETY: this is the only completer of the cell and `to` is empty from now on.
                #[allow(unsafe_code)]
                unsafe {
                    cell.bring(result);
                }
            }
            Some(To::Board(board, at)) => {
                // SAFETY: `Completers` makes one completer of each place, and `to` is empty from now on.
                #[allow(unsafe_code)]
                unsafe {
                    board.bring(at, result);
                }
            }
            Some(To::Callback(callback, executor)) => executor.run(move || callback(result)),
            None => {}
        }
    }
}

impl<R: Abandoned> Drop for Completer<R> {
    fn drop(&mut self) {
        if self.to.is_some() {
            self.bring(R::abandoned());
        }
    }
}

impl<R: Abandoned> std::fmt::Debug for Completer<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Completer")
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
    }

    #[test]
    fn a_result_is_taken_once() {
        let (mut ticket, completer) = Calls::new(1).call();
        assert!(!ticket.is_done() && ticket.take().is_none());
        completer.complete(Answer(5));
        assert!(ticket.is_done());
        assert_eq!(ticket.take(), Some(Answer(5)));
        assert_eq!(ticket.take(), None);
    }

    #[test]
    fn a_completer_that_is_dropped_says_so() {
        let (mut ticket, completer) = Calls::<Answer>::new(1).call();
        drop(completer);
        assert_eq!(ticket.take(), Some(Answer(-1)));
    }

    #[test]
    fn a_cell_is_used_again_only_when_both_sides_are_gone() {
        let calls = Calls::<Answer>::new(4);
        let (ticket, completer) = calls.call();
        drop(ticket);
        let (mut second, other) = calls.call();
        completer.complete(Answer(1));
        assert!(!second.is_done(), "the first call's result is not the second's");
        other.complete(Answer(2));
        assert_eq!(second.take(), Some(Answer(2)));
    }

    #[test]
    fn a_result_that_nobody_takes_is_dropped() {
        struct Held(Arc<()>);
        impl Abandoned for Held {
            fn abandoned() -> Self {
                Held(Arc::new(()))
            }
        }
        let (calls, counted) = (Calls::new(4), Arc::new(()));
        for taken_before in [true, false] {
            let (ticket, completer) = calls.call();
            let result = Held(counted.clone());
            match taken_before {
                true => {
                    drop(ticket);
                    completer.complete(result);
                }
                false => {
                    completer.complete(result);
                    drop(ticket);
                }
            }
            assert_eq!(Arc::strong_count(&counted), 1);
        }
        drop(Held::abandoned().0);
    }

    #[test]
    fn results_cross_threads() {
        let calls = Calls::<Answer>::new(4);
        for round in 0..1000 {
            let (mut ticket, completer) = calls.call();
            let thread = std::thread::spawn(move || completer.complete(Answer(round)));
            while !ticket.is_done() {
                std::thread::yield_now();
            }
            assert_eq!(ticket.take(), Some(Answer(round)));
            drop(ticket);
            thread.join().expect("no panic");
            if round > 50 {
                break;
            }
        }
    }
}
