//! The lender's side of loans: what this process has lent to a peer, and how it learns of the
//! give-back.
//!
//! Each process owns a loan table with one word for each loan that it can hold *of the peer*. A
//! give-back is one store of the loan's number into that table. It can't fail or wait, so a drop
//! can do it. The lender reads the words of its outstanding loans. Numbers grow for ever in 64
//! bits, so a word identifies the loan for which it was stored.

use crate::fabric::words::{LoadWords, StoreWords};
use crate::mutants::{Mutant, is_on};
use std::sync::atomic::Ordering::{Acquire, Release};

/// Gives back loan `number` in place `index` of the borrower's own table.
pub(crate) fn give_back(table: &impl StoreWords, index: usize, number: u64) {
    // Release: the borrower's last read of the memory comes before.
    table.store(index, number, Release);
}

/// Loans for which memory is allocated at the start.
const RESERVED: usize = 2048;

/// An outstanding loan.
struct LentLoan<T> {
    index: u32,
    number: u64,
    held: T,
}

/// The outstanding loans of a link, and what the lender holds for each.
pub(crate) struct LentLoans<W, T> {
    /// The peer's loan table.
    table: W,
    /// Places that were used and are free.
    free: Vec<u32>,
    /// The first place that was never used.
    unused: u32,
    out: Vec<LentLoan<T>>,
    last: u64,
    cursor: usize,
}

impl<W: LoadWords, T> LentLoans<W, T> {
    /// No loans. As many can be outstanding as the peer's table has words.
    pub(crate) fn new(table: W) -> Self {
        let (free, out) = (Vec::with_capacity(RESERVED), Vec::with_capacity(RESERVED));
        LentLoans { table, free, unused: 0, out, last: 0, cursor: 0 }
    }

    /// The next loan, as its place in the peer's table and its number; `None` if the table is full.
    /// [`LentLoans::add`] must follow.
    #[inline]
    pub(crate) fn next_loan(&mut self) -> Option<(u32, u64)> {
        let index = self.free.pop().or_else(|| self.unused_place())?;
        self.last += 1;
        Some((index, self.last))
    }

    /// Adds a loan that [`LentLoans::next_loan`] has returned, with what is held for it.
    #[inline]
    pub(crate) fn add(&mut self, (index, number): (u32, u64), held: T) {
        self.out.push(LentLoan { index, number, held });
    }

    fn unused_place(&mut self) -> Option<u32> {
        let place = self.unused;
        let exists = (place as usize) < self.table.len();
        exists.then(|| {
            self.unused += 1;
            place
        })
    }

    /// Whether no loan is outstanding.
    pub(crate) fn is_empty(&self) -> bool {
        self.out.is_empty()
    }

    /// Checks loans in turn, and passes what was held for returned ones to `done`, until `count`
    /// loans were found that are out.
    pub(crate) fn returned(&mut self, count: usize, mut done: impl FnMut(T)) {
        let mut out = 0;
        while out < count.min(self.out.len()) {
            if self.cursor >= self.out.len() {
                self.cursor = 0;
            }
            let loan = &self.out[self.cursor];
            // Acquire: pairs with the release in `give_back`.
            let word = self.table.load(loan.index as usize, Acquire);
            if word != loan.number && !(is_on(Mutant::AnyNumberReturns) && word != 0) {
                self.cursor += 1;
                out += 1;
                continue;
            }
            let loan = self.out.swap_remove(self.cursor);
            self.free.push(loan.index);
            done(loan.held);
        }
    }

    /// Fetches the word of the loan that [`LentLoans::returned`] checks next.
    #[inline]
    pub(crate) fn prefetch(&self) {
        if let Some(loan) = self.out.get(self.cursor).or(self.out.first()) {
            self.table.prefetch_load(loan.index as usize);
        }
    }

    /// Whether an outstanding loan has been returned.
    pub(crate) fn has_news(&self) -> bool {
        self.out.iter().any(|loan| self.table.load(loan.index as usize, Acquire) == loan.number)
    }

    /// Removes each outstanding loan for which `keep` is false, returned or not.
    pub(crate) fn retain(&mut self, keep: impl Fn(&T) -> bool) {
        let free = &mut self.free;
        self.out.retain(|loan| {
            let kept = keep(&loan.held);
            if !kept {
                free.push(loan.index);
            }
            kept
        });
    }

    /// Moves the outstanding loans into a new value. No more can be added here.
    pub(crate) fn take_out(&mut self) -> Self
    where
        W: Clone,
    {
        LentLoans {
            table: self.table.clone(),
            free: std::mem::take(&mut self.free),
            unused: std::mem::replace(&mut self.unused, self.table.len() as u32),
            out: std::mem::take(&mut self.out),
            last: self.last,
            cursor: 0,
        }
    }

    /// Removes all outstanding loans, and returns what was held for them.
    pub(crate) fn take_all(&mut self) -> impl Iterator<Item = T> {
        self.out.drain(..).map(|loan| loan.held)
    }

    /// What is held for each outstanding loan.
    pub(crate) fn held(&self) -> impl Iterator<Item = &T> {
        self.out.iter().map(|loan| &loan.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::words::test::{HeapWords, LoomWords};
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;

    fn lend<W: LoadWords, T>(loans: &mut LentLoans<W, T>, held: T) -> Option<(u32, u64)> {
        let loan = loans.next_loan()?;
        loans.add(loan, held);
        Some(loan)
    }

    fn returned(loans: &mut LentLoans<HeapWords, &'static str>, count: usize) -> Vec<&'static str> {
        let mut back = Vec::new();
        loans.returned(count, |held| back.push(held));
        back
    }

    #[test]
    #[allow(unsafe_code)] // loom checks accesses to plain memory only through its raw cell
    fn loom_memory_is_written_again_only_after_its_last_reader_gave_it_back() {
        loom::model(|| {
            let table = LoomWords::new(1);
            let memory = Arc::new(UnsafeCell::new(7u64));
            let mut loans = LentLoans::new(table.clone());
            let (index, number) = lend(&mut loans, ()).expect("room");
            let borrowed = Arc::clone(&memory);
            let borrower = loom::thread::spawn(move || {
                // SAFETY: the lender does not write before the loan is back; loom checks just that.
                borrowed.with(|value| assert_eq!(unsafe { *value }, 7));
                give_back(&table, index as usize, number);
            });
            while !loans.is_empty() {
                loans.returned(1, |()| {});
                loom::thread::yield_now();
            }
            // SAFETY: as above, from the other side.
            memory.with_mut(|value| unsafe { *value = 8 });
            borrower.join().expect("the borrower");
        });
    }

    #[test]
    fn loans_come_back_in_any_order_and_free_their_places() {
        let table = HeapWords::new(2);
        let mut loans = LentLoans::new(table.clone());
        let (_, first) = lend(&mut loans, "first").expect("room");
        let (place, second) = lend(&mut loans, "second").expect("room");
        assert_eq!(lend(&mut loans, "third"), None);
        assert_eq!(second, first + 1);
        give_back(&table, place as usize, second);
        assert_eq!(returned(&mut loans, 2), ["second"]);
        assert_eq!(lend(&mut loans, "third"), Some((place, second + 1)));
        assert_eq!(returned(&mut loans, 2), [""; 0], "the old number is not the new loan's");
    }

    #[test]
    fn a_few_checks_at_a_time_reach_every_loan() {
        let table = HeapWords::new(3);
        let mut loans = LentLoans::new(table.clone());
        let places = ["a", "b", "c"].map(|name| lend(&mut loans, name).expect("room"));
        give_back(&table, places[2].0 as usize, places[2].1);
        assert_eq!(returned(&mut loans, 1), [""; 0]);
        assert_eq!(returned(&mut loans, 1), [""; 0]);
        assert_eq!(returned(&mut loans, 1), ["c"]);
    }

    #[cfg(tensorwire_mutants)]
    #[test]
    fn each_bug_is_found() {
        let by = loans_come_back_in_any_order_and_free_their_places;
        crate::mutants::assert_found(Mutant::AnyNumberReturns, by);
    }
}
