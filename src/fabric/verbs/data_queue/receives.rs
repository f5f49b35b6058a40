//! The receives of a data queue pair.

use super::super::buffers::{LinkBuffer, PLACE};
use super::super::control::next;
use super::super::sys::*;
use super::{DataQueue, QueuePhase};

/// Receives that are posted by one call.
const REFILL: usize = 32;

impl DataQueue {
    /// Grants the peer `count` more receives.
    pub fn allow_receives(&mut self, count: u32) {
        self.allowed = self.allowed.saturating_add(count);
    }

    /// Posts receives that may be posted: at once where `all` or few are left, else when there are
    /// enough for a batch. `false` if the device refuses them: see [`DataQueue::stop_posting`].
    #[inline]
    pub fn refill(&mut self, buffer: &LinkBuffer, all: bool) -> bool {
        if self.phase == QueuePhase::Stopped {
            return true;
        }
        let mut missing = (self.depth - self.posted).min(self.allowed);
        let batch = (self.depth / 4).clamp(1, REFILL as u32);
        if missing == 0 || !all && missing < batch && self.posted > self.depth / 2 {
            return true;
        }
        while missing > 0 {
            let count = missing.min(REFILL as u32);
            let is_posted = self.post_batch(buffer, count as usize);
            // The driver may have taken some of a list that it has refused.
            self.posted += count;
            self.allowed -= count;
            missing -= count;
            if !is_posted {
                self.stop_posting();
                return false;
            }
        }
        true
    }

    fn post_batch(&mut self, buffer: &LinkBuffer, count: usize) -> bool {
        let mut pieces = [ibv_sge::default(); REFILL];
        let empty = ibv_recv_wr {
            wr_id: self.name | 1,
            next: std::ptr::null_mut(),
            sg_list: std::ptr::null_mut(),
            num_sge: 1,
        };
        let mut requests = [empty; REFILL];
        for piece in &mut pieces[..count] {
            *piece = buffer.piece(self.places + self.tail as usize * PLACE, PLACE);
            self.tail = next(self.tail, self.depth);
        }
        let (first_piece, first) = (pieces.as_mut_ptr(), requests.as_mut_ptr());
        for k in 0..count {
            let next = if k + 1 < count { first.wrapping_add(k + 1) } else { std::ptr::null_mut() };
            // SAFETY: inside both arrays, which are not touched otherwise until the list is posted.
            unsafe {
                (*first.add(k)).sg_list = first_piece.add(k);
                (*first.add(k)).next = next;
            }
        }
        let Some(pair) = &mut self.pair else { return false };
        // SAFETY: a list of `count` requests in a live array. Places are used in turn and this many
        // are free, so nothing touches them before they complete.
        unsafe { pair.post_receives(&mut *first) }
    }

    /// The place of the bytes of the receive that completes next.
    #[inline]
    pub fn next_received(&self) -> Option<usize> {
        let is_posted = self.posted > 0 && self.pair.is_some();
        is_posted.then(|| self.places + self.head as usize * PLACE)
    }

    /// A receive was flushed: no message can consume it any more.
    pub fn receive_flushed(&mut self) {
        self.posted = self.posted.saturating_sub(1);
        self.allowed = self.allowed.saturating_add(1);
        self.head = next(self.head, self.depth);
    }

    /// Completes a receive. Returns the place of its bytes, and its number among the queue's
    /// receives, which are used in turn.
    #[inline]
    pub fn received(&mut self) -> Option<(usize, u32)> {
        self.posted = self.posted.checked_sub(1)?;
        let number = self.head;
        self.head = next(number, self.depth);
        self.consumed = self.consumed.wrapping_add(1);
        Some((self.places + number as usize * PLACE, number))
    }
}
