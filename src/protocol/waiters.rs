//! The receives that wait at an edge, and the needs by which their values are asked for.

use crate::mutants::{Mutant, is_on};
use std::collections::VecDeque;

/// Waiters and needs of an edge for which memory is allocated at the start.
pub(super) const FEW: usize = 4;

/// Receives that wait, and the needs of their steps.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Waiters<W> {
    /// Receives that wait, with their steps, oldest first.
    waiters: VecDeque<(u64, W)>,
    /// So many of the oldest waiters have a need each. Later ones may have one too.
    asked: usize,
    /// Steps with needs, with the number of values that are still to come for them.
    needs: Vec<(u64, u32)>,
}

impl<W> Default for Waiters<W> {
    fn default() -> Self {
        Waiters { waiters: VecDeque::new(), asked: 0, needs: Vec::new() }
    }
}

impl<W: PartialEq> Waiters<W> {
    /// Whether no receive waits.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.waiters.is_empty()
    }

    /// Whether this is the oldest waiter, and no value was asked for.
    #[inline]
    pub fn is_next(&self, step: u64, waiter: &W) -> bool {
        let oldest = match is_on(Mutant::ShortEndOutOfOrder) {
            false => self.waiters.front(),
            true => self.waiters.back(),
        };
        oldest.is_some_and(|(of, it)| *of == step && it == waiter) && self.needs.is_empty()
    }

    /// Receives that wait, with their steps, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = &(u64, W)> {
        self.waiters.iter()
    }

    /// A receive waits for a value of a step.
    pub fn push(&mut self, step: u64, waiter: W) {
        self.waiters.push_back((step, waiter));
    }

    /// Removes the oldest waiter of a step.
    #[inline]
    pub fn take(&mut self, step: u64) -> Option<W> {
        // The usual case. A search and a removal from any place are longer.
        if self.waiters.front().is_some_and(|(of, _)| *of == step)
            && let Some((_, waiter)) = self.waiters.pop_front()
        {
            self.asked = self.asked.saturating_sub(1);
            return Some(waiter);
        }
        let at = self.waiters.iter().position(|(of, _)| *of == step)?;
        self.remove(at)
    }

    /// Removes this waiter. Returns whether it was waiting.
    pub fn give_up(&mut self, step: u64, waiter: &W) -> bool {
        let is_it = |(of, it): &(u64, W)| *of == step && it == waiter;
        // Many that give up at once often do so in the order in which they began, or in reverse.
        let newest = self.waiters.back().filter(|newest| is_it(newest)).map(|_| self.waiters.len() - 1);
        let at = newest.or_else(|| self.waiters.iter().position(is_it));
        at.and_then(|at| self.remove(at)).is_some()
    }

    fn remove(&mut self, at: usize) -> Option<W> {
        self.asked -= usize::from(at < self.asked);
        self.waiters.remove(at).map(|(_, waiter)| waiter)
    }

    /// Removes the waiters of the steps that are over.
    pub fn end(&mut self, is_over: impl Fn(u64) -> bool) -> Vec<W> {
        let mut ended = Vec::new();
        let asked = std::mem::take(&mut self.asked);
        for (at, (step, waiter)) in std::mem::take(&mut self.waiters).into_iter().enumerate() {
            if is_over(step) {
                ended.push(waiter);
                continue;
            }
            self.asked += usize::from(at < asked);
            self.waiters.push_back((step, waiter));
        }
        ended
    }

    /// Removes all waiters and needs.
    pub fn end_all(&mut self) -> Vec<W> {
        self.clear_needs();
        self.waiters.drain(..).map(|(_, waiter)| waiter).collect()
    }

    /// Whether any need is not answered yet.
    pub fn has_needs(&self) -> bool {
        !self.needs.is_empty()
    }

    /// The step of each need that is not answered yet.
    pub fn needed(&self) -> impl Iterator<Item = u64> {
        self.needs.iter().flat_map(|(step, count)| std::iter::repeat_n(*step, *count as usize))
    }

    /// Needs of a step that are not answered yet.
    pub fn needs_of(&self, step: u64) -> u32 {
        self.needs.iter().find(|(of, _)| *of == step).map_or(0, |(_, count)| *count)
    }

    /// The step of the oldest waiter that has no need. Others of its step may have some.
    pub fn first_unasked(&mut self) -> Option<u64> {
        while let Some(&(step, _)) = self.waiters.get(self.asked) {
            let waiting = self.waiters.range(..=self.asked).filter(|(of, _)| *of == step).count();
            if waiting > self.needs_of(step) as usize {
                return Some(step);
            }
            self.asked += 1;
        }
        None
    }

    /// The sender is asked for a value of a step.
    pub fn need(&mut self, step: u64) {
        match self.needs.iter_mut().find(|(of, _)| *of == step) {
            Some((_, count)) => *count += 1,
            None => self.needs.push((step, 1)),
        }
    }

    /// Counts the answer to a need. Returns whether the step had a need.
    pub fn answered(&mut self, step: u64) -> bool {
        let Some(at) = self.needs.iter().position(|(of, _)| *of == step) else { return false };
        self.needs[at].1 -= 1;
        if self.needs[at].1 == 0 {
            self.needs.swap_remove(at);
        }
        true
    }

    /// Removes the needs of the steps that are over, and hands each such step to `ended`. Their
    /// waiters end too: see [`Waiters::end`].
    pub fn end_needs(&mut self, is_over: impl Fn(u64) -> bool, mut ended: impl FnMut(u64)) {
        self.needs.retain(|(step, _)| {
            let is_over = is_over(*step);
            if is_over {
                ended(*step);
            }
            !is_over
        });
    }

    /// Removes all needs.
    pub fn clear_needs(&mut self) {
        self.needs.clear();
        self.asked = 0;
    }

    /// Allocates memory for a few, so that the first ones later cost none.
    pub fn make_room(&mut self) {
        self.waiters.reserve(FEW);
        self.needs.reserve(FEW);
    }

    /// Bytes that the lists have allocated.
    pub fn heap_bytes(&self) -> usize {
        self.waiters.capacity() * size_of::<(u64, W)>() + self.needs.capacity() * size_of::<(u64, u32)>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    thread_local! {
        static COMPARED: Cell<usize> = const { Cell::new(0) };
    }

    #[derive(Debug)]
    struct Counted(u32);

    impl PartialEq for Counted {
        fn eq(&self, other: &Self) -> bool {
            COMPARED.set(COMPARED.get() + 1);
            self.0 == other.0
        }
    }

    #[test]
    fn many_that_give_up_in_either_order_are_found_at_once() {
        const COUNT: u32 = 1000;
        let mut waiters = Waiters::default();
        (0..COUNT).for_each(|waiter| waiters.push(1, Counted(waiter)));
        let newest_first = (COUNT / 2..COUNT).rev();
        for waiter in newest_first.chain(0..COUNT / 2) {
            assert!(waiters.give_up(1, &Counted(waiter)));
        }
        assert!(waiters.is_empty() && !waiters.give_up(1, &Counted(0)));
        assert!(COMPARED.get() <= 2 * COUNT as usize, "{} comparisons", COMPARED.get());
    }
}
