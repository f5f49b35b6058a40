//! Tensors that are sent eagerly: in their record, although they are too large for a control slot.
//! Links whose messages may be longer have them.
//!
//! The receiver keeps such a tensor until a receive takes it, so the bytes of all are bounded.
//! `EAGER_CREDIT` tells the sender how many bytes were taken. A tensor beyond the bound is offered.
//!
//! A side that sends eager tensors, too, sends its credit behind the next one. In front of an
//! answer, credit would delay the answer, and the receive that waits for it.

use super::outgoing::{MAX_IN_RECORD, RECORD_HEAD};
use super::ready::{ReadyBytes, ReadyShare};
use crate::fabric::{LinkLimits, MAX_MESSAGE};
use crate::mutants::{Mutant, is_on};
use std::sync::atomic::Ordering;

/// How many tensors of the largest eager size a direction of a link can have that no receive has
/// taken.
pub(super) const EAGER_TENSORS: u64 = 4;

/// The bounds of the eager tensors of one direction of a link.
#[derive(Clone, Copy, Debug)]
struct EagerLimits {
    /// Bytes of the largest one. 0 if the link has none.
    max_len: usize,
    /// Bytes of all that no receive has taken.
    all: u64,
}

impl EagerLimits {
    fn new(limits: &LinkLimits) -> Self {
        let is_longer = limits.max_message > MAX_MESSAGE;
        let max_len = if is_longer { limits.max_message - RECORD_HEAD } else { 0 };
        EagerLimits { max_len, all: EAGER_TENSORS * max_len as u64 }
    }
}

/// Whether a tensor of a record counts as eager.
#[inline]
pub(super) fn is_eager(len: usize) -> bool {
    len > MAX_IN_RECORD
}

/// The eager tensors to the peer.
#[derive(Debug)]
pub(super) struct EagerSender {
    limits: EagerLimits,
    sent: u64,
    returned: u64,
}

impl EagerSender {
    pub fn new(limits: &LinkLimits) -> Self {
        EagerSender { limits: EagerLimits::new(limits), sent: 0, returned: 0 }
    }

    /// Whether a tensor of `len` bytes may be sent eagerly now.
    pub fn has_room(&self, len: usize) -> bool {
        let EagerLimits { max_len, all } = self.limits;
        let all = if is_on(Mutant::EagerBeyondBound) { u64::MAX } else { all };
        len <= max_len && self.sent - self.returned + len as u64 <= all
    }

    /// Notes a tensor that is sent in its record.
    pub fn sent(&mut self, len: usize) {
        if is_eager(len) {
            self.sent += len as u64;
        }
    }

    /// The peer says how many bytes were taken.
    ///
    /// # Errors
    /// If it has said more before, or has not got so many.
    pub fn returned(&mut self, returned: u64) -> Result<(), String> {
        if !(self.returned..=self.sent).contains(&returned) {
            let EagerSender { returned: before, sent, .. } = self;
            return Err(format!("it returns {returned} eager bytes, after {before} of {sent}"));
        }
        self.returned = returned;
        Ok(())
    }
}

/// The eager tensors of the peer.
#[derive(Debug)]
pub(super) struct EagerReceiver {
    limits: EagerLimits,
    came: u64,
    /// As the peer was told last.
    returned: u64,
    /// This side has sent an eager tensor by the short path since credit went alone.
    sends_too: bool,
    /// Bytes that no receive has taken.
    held: ReadyBytes,
}

impl EagerReceiver {
    pub fn new(limits: &LinkLimits) -> Self {
        let limits = EagerLimits::new(limits);
        EagerReceiver { limits, came: 0, returned: 0, sends_too: false, held: ReadyBytes::default() }
    }

    /// Notes a tensor that comes in its record.
    ///
    /// # Errors
    /// If the sender may not send it now.
    pub fn add(&mut self, len: usize) -> Result<(), String> {
        if !is_eager(len) {
            return Ok(());
        }
        let EagerLimits { max_len, all } = self.limits;
        if len > max_len {
            let most = MAX_IN_RECORD.max(max_len);
            return Err(format!("a record of {len} bytes came, of at most {most}"));
        }
        let came = self.came + len as u64;
        if came - self.returned > all {
            let out = came - self.returned;
            return Err(format!(
                "{out} bytes of eager tensors came that were not returned, of at most {all}"
            ));
        }
        self.came = came;
        Ok(())
    }

    /// Takes a tensor back that was added: it was not handled.
    pub fn remove(&mut self, len: usize) {
        if is_eager(len) {
            self.came -= len as u64;
        }
    }

    /// The part of a tensor that waits for a receive. `None` for one that is not eager.
    pub fn share(&self, len: usize) -> Option<ReadyShare> {
        is_eager(len).then(|| ReadyShare::of(&self.held, len as u64))
    }

    /// Whether half of the bound came since the peer was told.
    #[inline]
    pub fn is_due(&self) -> bool {
        // Never without eager tensors.
        self.came - self.returned > self.limits.all / 2
    }

    /// Notes that this side sends an eager tensor by the short path.
    pub fn note_send(&mut self) {
        self.sends_too = true;
    }

    /// Whether credit that is due goes alone. It follows the next eager tensor of a side that sends
    /// some, unless three quarters of the bound come before.
    pub fn goes_alone(&mut self) -> bool {
        let is_urgent = self.came - self.returned > self.limits.all / 4 * 3;
        if self.sends_too && !is_urgent {
            return false;
        }
        self.sends_too = false;
        true
    }

    /// What the peer is to be told now, if half of the bound was taken.
    pub fn due(&self) -> Option<u64> {
        // Relaxed: a share that was dropped just now is returned later.
        let returned = self.came - self.held.load(Ordering::Relaxed);
        (returned - self.returned > self.limits.all / 2).then_some(returned)
    }

    /// Notes what the peer is told.
    pub fn told(&mut self, returned: u64) {
        self.returned = returned;
    }
}
