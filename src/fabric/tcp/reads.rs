//! Reads of this side that the peer has still to answer, and reads of the peer that this side has.

use super::violation::TcpViolation;
use crate::memory::{Tensor, TensorMut};
use std::collections::VecDeque;

/// A read of this side.
#[derive(Debug)]
pub(super) struct TcpPendingRead {
    pub target: TensorMut,
    pub len: u64,
}

/// The reads of this side. They are answered in their order.
#[derive(Debug)]
pub(super) struct TcpPendingReads {
    reads: VecDeque<TcpPendingRead>,
    /// Ticket of the first one.
    first: u32,
}

impl TcpPendingReads {
    pub(super) fn new(depth: u32) -> Self {
        TcpPendingReads { reads: VecDeque::with_capacity(depth as usize), first: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.reads.len()
    }

    /// Modulo 2^32.
    pub(super) fn next_ticket(&self) -> u32 {
        self.first.wrapping_add(self.reads.len() as u32)
    }

    pub(super) fn add(&mut self, read: TcpPendingRead) {
        self.reads.push_back(read);
    }

    /// The bytes that an answer of `len` bytes is for.
    ///
    /// # Errors
    /// If no such answer is awaited.
    pub(super) fn room(&mut self, ticket: u32, len: u64) -> Result<&mut [u8], TcpViolation> {
        let Some(read) = self.reads.front_mut() else { return Err(TcpViolation::UnknownRead(ticket)) };
        if ticket != self.first {
            return Err(TcpViolation::OtherRead { asked: self.first, answered: ticket });
        }
        if len != read.len {
            return Err(TcpViolation::ReadLength { asked: read.len, answered: len });
        }
        // The post has checked that the target is as long.
        Ok(&mut read.target.bytes_mut()[..len as usize])
    }

    /// Takes the read that was answered.
    pub(super) fn take(&mut self) -> Option<TensorMut> {
        let read = self.reads.pop_front()?;
        self.first = self.first.wrapping_add(1);
        Some(read.target)
    }

    /// Drops all reads. Returns how many there were.
    pub(super) fn fail_all(&mut self) -> usize {
        std::mem::take(&mut self.reads).len()
    }
}

/// An answer that is to be posted.
#[derive(Debug)]
pub(super) struct TcpReadAnswer {
    pub ticket: u32,
    pub len: u64,
    /// The tensor, and where the bytes start in it; `None` for no bytes.
    pub source: Option<(Tensor, usize)>,
}

/// Reads of the peer that this side has to answer, as many as the peer may have under way.
#[derive(Debug)]
pub(super) struct Answers {
    waiting: VecDeque<TcpReadAnswer>,
    most: usize,
}

impl Answers {
    pub(super) fn new(depth: u32) -> Self {
        Answers { waiting: VecDeque::with_capacity(depth as usize), most: depth as usize }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Adds one. `posted`: answers that are posted and not acknowledged.
    ///
    /// # Errors
    /// If the peer has more reads under way than it may.
    pub(super) fn add(&mut self, answer: TcpReadAnswer, posted: usize) -> Result<(), TcpViolation> {
        if self.waiting.len() + posted >= self.most {
            return Err(TcpViolation::TooManyReads(self.most));
        }
        self.waiting.push_back(answer);
        Ok(())
    }

    pub(super) fn front(&self) -> Option<&TcpReadAnswer> {
        self.waiting.front()
    }

    pub(super) fn pop(&mut self) {
        self.waiting.pop_front();
    }

    pub(super) fn clear(&mut self) {
        self.waiting.clear();
    }
}
