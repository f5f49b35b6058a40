//! The ring of a link: records of one cache line.
//!
//! Word 0 of a record holds its sequence number and an acknowledgement. Word 1 holds kind, flags,
//! meta-data and edge. Word 2 holds the step, and word 3 generation, n and length. Words 4 to 7 are
//! the payload, or the place of the value.

use crate::process::{OwnSegment, OwnWord, PeerSegment, PeerWord, Slot, prefetch_for_write};
use std::sync::atomic::{Ordering, compiler_fence};

/// Bytes of a value that travel in the record itself.
pub const INLINE: u32 = 32;

/// Kind of a record: a value of an edge.
pub const VALUE: u8 = 1;
/// Kind of a record: the limit of an edge.
pub const CREDIT: u8 = 2;
/// Kind of a record: the limit of the batch.
pub const BATCH_CREDIT: u8 = 3;

/// Flag of a record: the sender lends the value, and the receiver reads it in place.
pub const LENT: u8 = 1;
/// Flag of a record: the receiver may keep the loan.
pub const MAY_BORROW: u8 = 2;

/// Word 1.
#[inline(always)]
pub fn head(kind: u8, flags: u8, meta: u16, edge: u32) -> u64 {
    u64::from(kind) | u64::from(flags) << 8 | u64::from(meta) << 16 | u64::from(edge) << 32
}

/// Word 3. `n` counts the values of the edge.
#[inline(always)]
pub fn order(generation: u16, n: u64, len: u32) -> u64 {
    u64::from(generation) | (n & 0xffff) << 16 | u64::from(len) << 32
}

/// A record that came. Each of its words is read once.
#[derive(Clone, Copy)]
pub struct Arrived {
    slot: &'static Slot<PeerWord>,
    first: u64,
}

impl Arrived {
    /// Words 1 to 3.
    #[inline(always)]
    pub fn head(self) -> [u64; 3] {
        let word = |at: usize| self.slot.0[at].load(Ordering::Relaxed);
        [word(1), word(2), word(3)]
    }

    /// Whether words 1 to 3 are these. Words that stay in registers are compared faster than
    /// arrays.
    #[inline(always)]
    pub fn has_head(self, [first, step, order]: [u64; 3]) -> bool {
        let [own_first, own_step, own_order] = self.head();
        own_first == first && own_step == step && own_order == order
    }

    /// A word of the payload.
    #[inline(always)]
    pub fn payload(self, word: usize) -> u64 {
        self.slot.0[4 + word].load(Ordering::Relaxed)
    }
}

/// Both directions of a link. The numbers of records count from 0; the sequence number of record k
/// is k + 1, because 0 marks an unused slot.
pub struct Link {
    own: OwnSegment,
    peer: PeerSegment,
    mask: usize,
    /// Records posted.
    pub sent: u64,
    /// Records of the peer that were consumed.
    pub received: u64,
    /// Own records that the peer has consumed, as far as known.
    pub acknowledged: u64,
    /// The last value of `received` that the peer was told.
    told: u64,
}

impl Link {
    /// A link with rings of `slots` slots.
    pub fn new(own: OwnSegment, peer: PeerSegment, slots: usize) -> Link {
        assert!(slots.is_power_of_two() && slots <= own.words.ring.len());
        Link { own, peer, mask: slots - 1, sent: 0, received: 0, acknowledged: 0, told: 0 }
    }

    #[inline(always)]
    fn out_slot(&self) -> &'static Slot<OwnWord> {
        &self.own.words.ring[self.sent as usize & self.mask]
    }

    #[inline(always)]
    pub fn has_room(&self) -> bool {
        self.sent - self.acknowledged <= self.mask as u64
    }

    /// Posts a record, for which there is room. Returns whether the peer sleeps.
    #[inline(always)]
    pub fn post(&mut self, head: [u64; 3], payload: [u64; 4]) -> bool {
        let slot = self.out_slot();
        for (word, value) in head.into_iter().chain(payload).enumerate() {
            slot.0[1 + word].store(value, Ordering::Relaxed);
        }
        self.sent += 1;
        let first = u64::from(self.sent as u32) | self.received << 32;
        slot.0[0].store(first, Ordering::Release);
        self.told = self.received;
        // The peer pays for the barrier between the record and the mark: it calls `membarrier`
        // before it sleeps.
        compiler_fence(Ordering::SeqCst);
        self.peer.words.idle.0.load(Ordering::Relaxed) != 0
    }

    /// The next record, if it has come. Fetches the slot of the answer.
    #[inline(always)]
    pub fn look(&self) -> Option<Arrived> {
        let slot = &self.peer.words.ring[self.received as usize & self.mask];
        let first = slot.0[0].load(Ordering::Acquire);
        if first as u32 != (self.received + 1) as u32 {
            return None;
        }
        prefetch_for_write(self.out_slot());
        Some(Arrived { slot, first })
    }

    /// Frees the slot of the record, which was read. Returns `false` for an acknowledgement of
    /// records that were never sent.
    #[inline(always)]
    pub fn consume(&mut self, record: Arrived) -> bool {
        self.received += 1;
        let news = (record.first >> 32) as u32;
        let more = u64::from(news.wrapping_sub(self.acknowledged as u32));
        if more > self.sent - self.acknowledged {
            return false;
        }
        self.acknowledged += more;
        // Records of this side carry the acknowledgement. A side that only receives stores it.
        if self.received - self.told > self.mask as u64 / 2 {
            self.own.words.received.0.store(self.received, Ordering::Release);
            self.told = self.received;
        }
        true
    }

    /// Looks at the acknowledgement that the peer stores.
    #[inline(always)]
    pub fn look_for_room(&mut self) -> bool {
        let received = self.peer.words.received.0.load(Ordering::Acquire);
        if (self.acknowledged..=self.sent).contains(&received) {
            self.acknowledged = received;
        }
        self.has_room()
    }
}
