//! Reads: those of this side that wait for an answer, and those of the peer that wait for one.

use crate::fabric::shm::memory::order::{OrderSource, ReadTicket};
use crate::fabric::shm::violation::ShmViolation;
use crate::memory::{Tensor, TensorMut};
use std::collections::VecDeque;

/// A read that waits for its answer.
pub(super) struct PendingRead {
    pub target: TensorMut,
    pub len: u64,
}

/// The reads of a link that wait for their answers. The table is as large as the link is deep.
pub(super) struct PendingReads {
    places: Vec<Option<(u32, PendingRead)>>,
    free: Vec<u32>,
    last: u32,
}

impl PendingReads {
    /// An empty table.
    pub(super) fn new(depth: u32) -> Self {
        PendingReads { places: (0..depth).map(|_| None).collect(), free: (0..depth).rev().collect(), last: 0 }
    }

    /// Whether the table has room for another read.
    pub(super) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// Adds a read; `None`, with the read dropped, if the table is full: see
    /// [`PendingReads::has_room`].
    pub(super) fn add(&mut self, read: PendingRead) -> Option<ReadTicket> {
        let index = self.free.pop()?;
        self.last = self.last.wrapping_add(1);
        self.places[index as usize] = Some((self.last, read));
        Some(ReadTicket { index, number: self.last })
    }

    /// The read that a peer's ticket stands for.
    pub(super) fn get(&mut self, ticket: ReadTicket) -> Option<&mut PendingRead> {
        match self.places.get_mut(ticket.index as usize)? {
            Some((number, read)) if *number == ticket.number => Some(read),
            _ => None,
        }
    }

    /// Removes the read that a peer's ticket stands for.
    pub(super) fn take(&mut self, ticket: ReadTicket) -> Option<PendingRead> {
        self.get(ticket)?;
        self.free.push(ticket.index);
        self.places[ticket.index as usize].take().map(|(_, read)| read)
    }

    /// Removes all reads.
    pub(super) fn take_all(&mut self) -> impl Iterator<Item = PendingRead> {
        let PendingReads { places, free, .. } = self;
        places.iter_mut().enumerate().filter_map(|(index, place)| {
            let (_, read) = place.take()?;
            free.push(index as u32);
            Some(read)
        })
    }
}

/// An answer that waits for room in the ring.
pub(super) struct ReadAnswer {
    pub source: OrderSource,
    pub ticket: ReadTicket,
    /// Held until the peer has pulled it; `None` for a read of no bytes.
    pub tensor: Option<Tensor>,
}

/// The answers of a link that wait for room in its ring. A peer has at most as many reads under way
/// as the link is deep. Neither side must therefore stop taking slots in order to answer.
pub(super) struct ReadAnswers {
    waiting: VecDeque<ReadAnswer>,
    depth: usize,
}

impl ReadAnswers {
    /// No answers.
    pub(super) fn new(depth: u32) -> Self {
        ReadAnswers { waiting: VecDeque::with_capacity(depth as usize), depth: depth as usize }
    }

    /// Adds an answer.
    ///
    /// # Errors
    /// The violation, if the peer has asked for more than it may.
    pub(super) fn add(&mut self, answer: ReadAnswer) -> Result<(), ShmViolation> {
        if self.waiting.len() == self.depth {
            return Err(ShmViolation::TooManyReads(self.depth));
        }
        self.waiting.push_back(answer);
        Ok(())
    }

    /// Whether no answer waits.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Removes the oldest answer.
    pub(super) fn pop(&mut self) -> Option<ReadAnswer> {
        self.waiting.pop_front()
    }

    /// Drops all answers.
    pub(super) fn clear(&mut self) {
        self.waiting.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::shm::testing::{pool, tensor_mut};

    #[test]
    fn a_ticket_is_valid_for_one_read_only() {
        let pool = pool();
        let mut reads = PendingReads::new(2);
        let add =
            |reads: &mut PendingReads, len| reads.add(PendingRead { target: tensor_mut(&pool, 4), len });
        let first = add(&mut reads, 1).expect("room");
        let second = add(&mut reads, 2).expect("room");
        assert!(!reads.has_room());
        assert!(add(&mut reads, 3).is_none());
        assert_eq!(reads.take(first).expect("waits").len, 1);
        assert!(reads.take(first).is_none());
        let third = add(&mut reads, 3).expect("room");
        assert_eq!(third.index, first.index);
        assert!(reads.get(first).is_none(), "the old number is not the new read's");
        assert!(reads.get(ReadTicket { index: 2, number: 1 }).is_none());
        let mut rest: Vec<_> = reads.take_all().map(|read| read.len).collect();
        rest.sort_unstable();
        assert_eq!(rest, [2, 3]);
        assert!(reads.get(second).is_none());
    }
}
