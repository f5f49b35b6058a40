//! LentLoans: what a process has lent its peer, and how it learns that a loan has come back.
//!
//! Each process owns a table with one word for each loan that it can hold *of the peer's*. Giving
//! back is one store, of the loan's number, into that table: it can't fail or wait, so it can be
//! done by a drop. The lender looks at the words of its outstanding loans. Numbers grow for ever in
//! 64 bits, so a word says by itself for which loan it was stored.

use crate::fabric::shm::memory::words::{LoadWords, StoreWords};
use std::sync::atomic::Ordering::{Acquire, Release};

/// Gives loan `number` in place `index` of the borrower's own table back.
pub(crate) fn give_back(table: &impl StoreWords, index: usize, number: u64) {
    // Release: the borrower's last look at the memory comes before.
    table.store(index, number, Release);
}

/// A loan that is out.
struct LentLoan<T> {
    index: u32,
    number: u64,
    held: T,
}

/// The loans that this process has given, and whatever it holds for each.
pub(crate) struct LentLoans<W, T> {
    /// The peer's table.
    table: W,
    free: Vec<u32>,
    out: Vec<LentLoan<T>>,
    last: u64,
    cursor: usize,
}

impl<W: LoadWords, T> LentLoans<W, T> {
    /// No loans yet; as many can be out as the peer's table has words.
    pub(crate) fn new(table: W) -> Self {
        let places = table.len() as u32;
        LentLoans {
            free: (0..places).rev().collect(),
            out: Vec::with_capacity(places as usize),
            table,
            last: 0,
            cursor: 0,
        }
    }

    /// Takes down a loan: its place in the peer's table and its number. `None` if the table is
    /// full.
    pub(crate) fn lend(&mut self, held: T) -> Option<(u32, u64)> {
        let index = self.free.pop()?;
        self.last += 1;
        self.out.push(LentLoan { index, number: self.last, held });
        Some((index, self.last))
    }

    /// Whether one more loan can be taken down.
    pub(crate) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// Whether no loan is out.
    pub(crate) fn is_empty(&self) -> bool {
        self.out.is_empty()
    }

    /// Looks at up to `count` loans, each in its turn, and hands out what was held for those that
    /// are back.
    pub(crate) fn returned(&mut self, count: usize, mut done: impl FnMut(T)) {
        for _ in 0..count.min(self.out.len()) {
            if self.out.is_empty() {
                return;
            }
            if self.cursor >= self.out.len() {
                self.cursor = 0;
            }
            let loan = &self.out[self.cursor];
            // Acquire: pairs with the release in `give_back`.
            if self.table.load(loan.index as usize, Acquire) != loan.number {
                self.cursor += 1;
                continue;
            }
            let loan = self.out.swap_remove(self.cursor);
            self.free.push(loan.index);
            done(loan.held);
        }
    }

    /// Whether one that is out has come back.
    pub(crate) fn has_news(&self) -> bool {
        self.out.iter().any(|loan| self.table.load(loan.index as usize, Acquire) == loan.number)
    }

    /// Gives up every loan that is out for which `keep` is false, whether it is back or not.
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

    /// Takes the loans that are out elsewhere, to be waited for there. No more can be given here.
    pub(crate) fn take_out(&mut self) -> Self
    where
        W: Clone,
    {
        LentLoans {
            table: self.table.clone(),
            free: std::mem::take(&mut self.free),
            out: std::mem::take(&mut self.out),
            last: self.last,
            cursor: 0,
        }
    }

    /// Takes out what is held for every loan that is out.
    pub(crate) fn take_all(&mut self) -> impl Iterator<Item = T> {
        self.out.drain(..).map(|loan| loan.held)
    }

    /// Every loan that is out, as what was held for it.
    pub(crate) fn held(&self) -> impl Iterator<Item = &T> {
        self.out.iter().map(|loan| &loan.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::shm::memory::words::test::{HeapWords, LoomWords};
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;

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
            let (index, number) = loans.lend(()).expect("room");
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
        let (_, first) = loans.lend("first").expect("room");
        let (place, second) = loans.lend("second").expect("room");
        assert_eq!(loans.lend("third"), None);
        assert_eq!(second, first + 1);
        give_back(&table, place as usize, second);
        assert_eq!(returned(&mut loans, 2), ["second"]);
        assert_eq!(loans.lend("third"), Some((place, second + 1)));
        assert_eq!(returned(&mut loans, 2), [""; 0], "the old number is not the new loan's");
    }

    #[test]
    fn a_few_looks_at_a_time_come_round_to_every_loan() {
        let table = HeapWords::new(3);
        let mut loans = LentLoans::new(table.clone());
        let places = ["a", "b", "c"].map(|name| loans.lend(name).expect("room"));
        give_back(&table, places[2].0 as usize, places[2].1);
        assert_eq!(returned(&mut loans, 1), [""; 0]);
        assert_eq!(returned(&mut loans, 1), [""; 0]);
        assert_eq!(returned(&mut loans, 1), ["c"]);
    }
}
