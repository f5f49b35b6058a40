//! What a process has lent its peers, over all links and ports of a fabric: bounded, counted, and watched for loans that
//! are held for long.
//!
//! A loan needs an [`Allowance`], which lives as long as the lender holds the tensor for it: on the link, or after the link's
//! end for as long as the borrower still reads. So what is counted here is what is really out, however it ends.

use crate::mutants::{Mutant, is_on};
use std::array;
use std::sync::Arc;

#[cfg(tensorwire_loom)]
use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(tensorwire_loom))]
use std::sync::atomic::{AtomicU64, Ordering};

/// Ticks that a grace period is divided into.
pub const TICKS_PER_GRACE: u64 = 4;

/// Ticks that are told apart: those in which a loan that is not overdue can have begun, and some to prepare the next.
const TICKS: usize = 8;

/// The books of one process. No call locks, allocates or enters the kernel.
#[derive(Debug)]
pub struct LoanBooks {
    max_bytes: u64,
    bytes: AtomicU64,
    out: AtomicU64,
    tick: AtomicU64,
    /// For each of the last ticks its number (upper half) and how many of the loans that began in it are out (lower half).
    /// One word, so that a loan's end is counted there or, once the tick is over and done with, nowhere.
    begun: [AtomicU64; TICKS],
    overdue: AtomicU64,
    relocated_tensors: AtomicU64,
    relocated_bytes: AtomicU64,
    relocation_failures: AtomicU64,
}

/// The figures of [`LoanBooks`] at some time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoanFigures {
    /// Loans that are out.
    pub out: u64,
    /// Bytes of the tensors that are lent; one that is lent twice counts twice.
    pub bytes: u64,
    /// Loans that were held for longer than the grace period, so far.
    pub overdue: u64,
    /// Tensors borrowed from peers that have died, which were copied out of the dead process's memory so far.
    pub relocated_tensors: u64,
    /// Their bytes, each counted once however often it is borrowed.
    pub relocated_bytes: u64,
    /// Times that this failed; it is tried again.
    pub relocation_failures: u64,
}

/// Leave to lend a tensor, until this is dropped.
#[derive(Debug)]
pub struct Allowance {
    books: Arc<LoanBooks>,
    bytes: u64,
    tick: u64,
}

fn word(tick: u64, count: u64) -> u64 {
    tick << 32 | count
}

fn is_of(word: u64, tick: u64) -> bool {
    word >> 32 == tick & u64::from(u32::MAX)
}

fn place(tick: u64) -> usize {
    tick as usize % TICKS
}

impl LoanBooks {
    /// Nothing is lent; at most `max_bytes` ever are at a time.
    pub fn new(max_bytes: u64) -> Self {
        LoanBooks {
            max_bytes,
            bytes: AtomicU64::new(0),
            out: AtomicU64::new(0),
            tick: AtomicU64::new(0),
            begun: array::from_fn(|tick| AtomicU64::new(word(tick as u64, 0))),
            overdue: AtomicU64::new(0),
            relocated_tensors: AtomicU64::new(0),
            relocated_bytes: AtomicU64::new(0),
            relocation_failures: AtomicU64::new(0),
        }
    }

    /// Leave to lend so many bytes; `None` if more than the bound would be lent then.
    pub fn allow(self: &Arc<Self>, bytes: u64) -> Option<Allowance> {
        let fits = |lent: u64| {
            let sum = lent.checked_add(bytes)?;
            (sum <= self.max_bytes || is_on(Mutant::LentPastBound)).then_some(sum)
        };
        // Relaxed, here and below: numbers that publish nothing else.
        self.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).ok()?;
        self.out.fetch_add(1, Ordering::Relaxed);
        Some(Allowance { books: Arc::clone(self), bytes, tick: self.begin() })
    }

    /// Counts a loan among those of the present tick.
    fn begin(&self) -> u64 {
        loop {
            // Acquire: the tick's word is ready.
            let tick = self.tick.load(Ordering::Acquire);
            let one_more = |word: u64| is_of(word, tick).then_some(word + 1);
            let begun = &self.begun[place(tick)];
            // It fails only if several ticks have passed since the load. Acquire: then the next load sees a later one.
            if begun.fetch_update(Ordering::Relaxed, Ordering::Acquire, one_more).is_ok() {
                return tick;
            }
        }
    }

    /// A part of a grace period has passed: see [`TICKS_PER_GRACE`]. Called by one thread only.
    pub fn tick(&self) {
        let next = self.tick.load(Ordering::Relaxed) + 1;
        // Those that began in that tick have been out for a whole grace period, and for less than one tick more.
        if let Some(over) = next.checked_sub(TICKS_PER_GRACE + 1) {
            // Release: whoever sees this sees a tick after that one.
            let begun = self.begun[place(over)].swap(word(over + TICKS as u64, 0), Ordering::Release);
            self.overdue.fetch_add(begun & u64::from(u32::MAX), Ordering::Relaxed);
        }
        self.tick.store(next, Ordering::Release);
    }

    /// Tensors of a dead peer were copied out of its memory.
    pub fn relocated(&self, tensors: u64, bytes: u64) {
        self.relocated_tensors.fetch_add(tensors, Ordering::Relaxed);
        self.relocated_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// That failed.
    pub fn relocation_failed(&self) {
        self.relocation_failures.fetch_add(1, Ordering::Relaxed);
    }

    /// The figures now. Each alone is exact.
    pub fn figures(&self) -> LoanFigures {
        let get = |figure: &AtomicU64| figure.load(Ordering::Relaxed);
        LoanFigures {
            out: get(&self.out),
            bytes: get(&self.bytes),
            overdue: get(&self.overdue),
            relocated_tensors: get(&self.relocated_tensors),
            relocated_bytes: get(&self.relocated_bytes),
            relocation_failures: get(&self.relocation_failures),
        }
    }
}

impl Allowance {
    /// Leave that no books know of, for who uses a port alone.
    pub fn unbounded() -> Allowance {
        match Arc::new(LoanBooks::new(u64::MAX)).allow(0) {
            Some(allowance) => allowance,
            None => unreachable!("0 bytes are within every bound"),
        }
    }
}

impl Drop for Allowance {
    fn drop(&mut self) {
        if is_on(Mutant::LoanNeverCountedBack) {
            return;
        }
        let times = if is_on(Mutant::LoanCountedBackTwice) { 2 } else { 1 };
        let books = &self.books;
        books.bytes.fetch_sub(self.bytes * times, Ordering::Relaxed);
        books.out.fetch_sub(times, Ordering::Relaxed);
        let tick = self.tick;
        let one_less = |word: u64| is_of(word, tick).then(|| word - 1);
        // It fails if the loan has been counted as overdue.
        let _ = books.begun[place(tick)].fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less);
    }
}

#[cfg(all(test, not(tensorwire_loom)))]
mod tests {
    use super::*;

    fn figures(out: u64, bytes: u64, overdue: u64) -> LoanFigures {
        LoanFigures { out, bytes, overdue, ..LoanFigures::default() }
    }

    #[test]
    fn no_more_is_lent_than_the_bound_says_and_what_comes_back_makes_room() {
        let books = Arc::new(LoanBooks::new(100));
        let first = books.allow(60).expect("room");
        assert!(books.allow(41).is_none());
        let second = books.allow(40).expect("the bound itself may be reached");
        assert!(books.allow(1).is_none() && books.allow(u64::MAX).is_none());
        assert_eq!(books.figures(), figures(2, 100, 0));
        drop(first);
        assert_eq!(books.figures(), figures(1, 40, 0));
        drop((books.allow(60).expect("room again"), second));
        assert_eq!(books.figures(), figures(0, 0, 0));
    }

    #[test]
    fn a_loan_is_overdue_once_after_a_grace_period_and_at_most_one_tick_more() {
        let books = Arc::new(LoanBooks::new(100));
        (0..1000).for_each(|_| books.tick());
        let [long, short] = [1, 2].map(|bytes| books.allow(bytes).expect("room"));
        (0..TICKS_PER_GRACE).for_each(|_| books.tick());
        assert_eq!(books.figures().overdue, 0, "it may have begun at the end of its tick");
        drop(short);
        books.tick();
        assert_eq!(books.figures(), figures(1, 1, 1));
        (0..100).for_each(|_| books.tick());
        assert_eq!(books.figures().overdue, 1, "counted once");
        drop(long);
        let again = books.allow(1).expect("room");
        (0..=TICKS_PER_GRACE).for_each(|_| books.tick());
        drop(again);
        assert_eq!(books.figures(), figures(0, 0, 2));
    }

    #[test]
    fn loans_that_come_and_go_on_many_threads_are_all_counted() {
        let books = Arc::new(LoanBooks::new(50));
        let done = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        let loans = [books.allow(20), books.allow(20)];
                        assert!(books.figures().bytes <= 50);
                        drop(loans);
                    }
                    done.fetch_add(1, Ordering::SeqCst);
                });
            }
            while done.load(Ordering::SeqCst) < 4 {
                books.tick();
                std::thread::yield_now();
            }
        });
        let LoanFigures { out, bytes, overdue, .. } = books.figures();
        assert_eq!((out, bytes), (0, 0));
        (0..10).for_each(|_| books.tick());
        assert_eq!(books.figures().overdue, overdue, "what is back is not overdue");
    }
}

/// Every interleaving, under loom: `tests/all` builds the crate with `--cfg tensorwire_loom` for it.
#[cfg(all(test, tensorwire_loom))]
mod loom_tests {
    use super::*;

    #[test]
    fn a_loan_that_ends_while_the_time_passes_is_overdue_once_or_never_and_leaves_nothing_behind() {
        loom::model(|| {
            let books = Arc::new(LoanBooks::new(10));
            let loan = books.allow(10).expect("room");
            let borrower = {
                let books = Arc::clone(&books);
                loom::thread::spawn(move || {
                    drop(loan);
                    drop(books.allow(10).expect("room again"));
                })
            };
            (0..=TICKS_PER_GRACE).for_each(|_| books.tick());
            borrower.join().expect("no panic");
            let LoanFigures { out, bytes, overdue, .. } = books.figures();
            assert!((out, bytes) == (0, 0) && overdue <= 2);
            (0..TICKS as u64).for_each(|_| books.tick());
            assert_eq!(books.figures().overdue, overdue, "what is back is not overdue");
        });
    }
}
