//! A queue that allocates only for its second item: most keys have one value or one waiter.

use crate::mutants::{Mutant, is_on};
use std::collections::VecDeque;

/// A first-in, first-out queue. A queue in a table is never empty.
#[derive(Debug)]
pub(super) struct Fifo<T> {
    first: Option<T>,
    rest: VecDeque<T>,
}

impl<T> Fifo<T> {
    pub fn one(first: T) -> Self {
        Fifo { first: Some(first), rest: VecDeque::new() }
    }

    pub fn push(&mut self, last: T) {
        if self.first.is_none() {
            self.first = Some(last);
        } else {
            self.rest.push_back(last);
        }
    }

    /// Inserts an item before the first `later` one, or at the end.
    pub fn insert_before(&mut self, thing: T, mut later: impl FnMut(&T) -> bool) {
        if self.first.as_ref().is_none_or(&mut later) {
            if let Some(second) = self.first.replace(thing) {
                self.rest.push_front(second);
            }
            return;
        }
        let at = self.rest.iter().position(later).unwrap_or(self.rest.len());
        self.rest.insert(at, thing);
    }

    pub fn pop(&mut self) -> Option<T> {
        if is_on(Mutant::LastValueFirst) && !self.rest.is_empty() {
            return self.rest.pop_back();
        }
        let first = self.first.take();
        self.first = self.rest.pop_front();
        first
    }

    pub fn last(&self) -> Option<&T> {
        self.rest.back().or(self.first.as_ref())
    }

    pub fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    pub fn len(&self) -> usize {
        usize::from(self.first.is_some()) + self.rest.len()
    }

    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.first.iter().chain(&self.rest)
    }

    /// Removes all items that `fit`.
    pub fn remove_all(&mut self, mut fit: impl FnMut(&T) -> bool) -> Vec<T> {
        let all = self.first.take().into_iter().chain(std::mem::take(&mut self.rest));
        let (removed, kept): (Vec<T>, Vec<T>) = all.partition(|item| fit(item));
        self.rest = kept.into();
        self.first = self.rest.pop_front();
        removed
    }

    /// Removes the first item that `fits`.
    pub fn remove(&mut self, mut fits: impl FnMut(&T) -> bool) -> Option<T> {
        if self.first.as_ref().is_some_and(&mut fits) {
            return self.pop();
        }
        let at = self.rest.iter().position(fits)?;
        self.rest.remove(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn things_leave_in_the_order_in_which_they_came() {
        let mut fifo = Fifo::one(2);
        fifo.push(4);
        for thing in [1, 3, 5] {
            fifo.insert_before(thing, |other| *other > thing);
        }
        assert_eq!(fifo.remove(|thing| *thing == 5), Some(5));
        assert_eq!(fifo.iter().copied().collect::<Vec<_>>(), [1, 2, 3, 4]);
        assert_eq!(fifo.remove(|thing| *thing == 3), Some(3));
        assert_eq!(fifo.remove(|thing| *thing == 1), Some(1));
        assert_eq!((fifo.pop(), fifo.pop(), fifo.pop()), (Some(2), Some(4), None));
        assert!(fifo.is_empty());
        fifo.push(5);
        assert_eq!((fifo.last().copied(), fifo.pop(), fifo.last()), (Some(5), Some(5), None));
        (1..=6).for_each(|thing| fifo.push(thing));
        assert_eq!(fifo.remove_all(|thing| *thing % 2 == 1), [1, 3, 5]);
        assert_eq!(fifo.iter().copied().collect::<Vec<_>>(), [2, 4, 6]);
        assert_eq!(fifo.remove_all(|_| true), [2, 4, 6]);
        assert!(fifo.is_empty());
    }
}
