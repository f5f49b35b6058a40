//! A ring of slots with one producer and one consumer.
//!
//! The producer's process owns the slots. The consumer's process owns the consumer line, on which
//! it publishes how many orders it has consumed. Neither writes what the other owns. An order
//! lies in one slot: see [`slot`](super::slot).
//!
//! Orders count up for ever from [`FIRST`], in 64 bits here and modulo 2^32 in shared memory. The
//! count starts shortly *before* the 32 bits wrap, as the kernel's jiffies do, so that every link
//! goes through the wrap. The order at position `p` has the sequence number `p + 1`.
//!
//! A ring of `depth` orders has a few *hot* slots and `depth` *deep* ones. Position `p` lies in
//! hot slot `p % hot` if fewer than `hot` orders are outstanding, and in deep slot `p % depth`
//! otherwise. The order before says which. The processes of a ping-pong therefore use the hot
//! slots only, which stay in their first-level caches.
//!
//! A place that was not used for long can hold the sequence number of 2^31 orders before. Before
//! the producer posts an order, it replaces such a number in the place of the next order.

use super::slot::{
    EXTENSION_WORDS, FIRST, FirstWord, IN_SLOT, MAX_WORDS, RingShape, SLOT_WORDS, SlotKind, first_word,
};
use crate::fabric::words::{LoadWords, StoreWords};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// Word of the consumer's line: how many orders have been consumed, modulo 2^32.
pub(crate) const TAIL: usize = 0;
/// Word of the consumer's line that carries the credits of the layer above.
pub(crate) const CREDITS: usize = 1;

/// The peer says that it has consumed more orders than were sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BadAck {
    /// The number that the peer says, modulo 2^32.
    pub said: u32,
    /// The number of sent orders, modulo 2^32.
    pub sent: u32,
}

/// Initialises a ring and a line of this process, before the peer can see them.
///
/// # Panics
/// If the ring does not have the words of its shape.
pub(crate) fn prepare(slots: &impl StoreWords, line: &impl StoreWords, shape: RingShape) {
    assert_eq!(slots.len(), shape.words());
    clear_if_stale(slots, shape.slot(FIRST, false), FIRST);
    line.store(TAIL, u64::from(FIRST as u32), Release);
}

/// Makes a slot empty for a consumer that waits there for the order at `position`.
///
/// A slot in use is not changed: its position is less than 2^31 away.
#[inline]
fn clear_if_stale(slots: &impl StoreWords, slot: usize, position: u64) {
    let at = first_word(slot);
    let found = FirstWord(slots.load(at, Relaxed));
    if found.is_of(position) {
        slots.store(at, !found.0, Relaxed);
    }
}

/// Orders after which a consumer writes its line in any case. The producer compares numbers modulo
/// 2^32, which must be less than 2^31 apart.
const LINE_AGE: u64 = 1 << 30;

/// The end of a ring that fills slots.
pub(crate) struct Producer<R, L> {
    slots: R,
    /// The peer's consumer line.
    line: L,
    shape: RingShape,
    /// Position of the next order.
    next: u64,
    /// Slot of the next order.
    slot: usize,
    /// The slots that are in use.
    kind: SlotKind,
    /// From this position on no slot of that kind can be stale.
    fresh_from: u64,
    /// All orders before this position are known to be consumed.
    acked: u64,
}

impl<R: StoreWords, L: LoadWords> Producer<R, L> {
    /// The producer of a ring that [`prepare`] has initialised.
    pub(crate) fn new(slots: R, line: L, shape: RingShape) -> Self {
        let slot = shape.slot(FIRST, false);
        let (kind, fresh_from) = (shape.kind(false), FIRST + u64::from(shape.hot));
        Producer { slots, line, shape, next: FIRST, slot, kind, fresh_from, acked: FIRST }
    }

    /// Position of the next order.
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    /// All orders before this position have been consumed.
    pub(crate) fn acked(&self) -> u64 {
        self.acked
    }

    /// Whether another order may be outstanding. Reads the peer's line only if none seems to be
    /// allowed.
    #[inline]
    pub(crate) fn has_room(&mut self) -> Result<bool, BadAck> {
        if self.next - self.acked < u64::from(self.shape.depth) {
            return Ok(true);
        }
        self.refresh_room()
    }

    #[cold]
    fn refresh_room(&mut self) -> Result<bool, BadAck> {
        self.refresh()?;
        Ok(self.next - self.acked < u64::from(self.shape.depth))
    }

    /// Posts an order: `words`, and behind them `payload`. `ack` is the number of consumed
    /// orders of the link's other ring.
    ///
    /// # Panics
    /// If both together are longer than [`MAX_WORDS`]. The caller has called
    /// [`Producer::has_room`].
    #[inline]
    pub(crate) fn post(&mut self, ack: u32, words: &[u64], payload: &[u8]) {
        debug_assert!(self.next - self.acked < u64::from(self.shape.depth), "posted to a full ring");
        assert!(words.len() + payload.len().div_ceil(8) <= MAX_WORDS);
        let (shape, slot, position) = (self.shape, self.slot, self.next);
        let next_is_deep = self.choose_next();
        let store = |k, word| self.slots.store(shape.word(slot, k), word, Relaxed);
        for (k, word) in words.iter().enumerate() {
            store(k, *word);
        }
        let (chunks, rest) = payload.as_chunks::<8>();
        for (k, chunk) in chunks.iter().enumerate() {
            store(words.len() + k, u64::from_le_bytes(*chunk));
        }
        if !rest.is_empty() {
            let mut last = [0; 8];
            last[..rest.len()].copy_from_slice(rest);
            store(words.len() + chunks.len(), u64::from_le_bytes(last));
        }
        // Release: a consumer that sees the sequence number sees the words above, and that the next
        // order's slot is empty.
        self.slots.store(first_word(slot), FirstWord::new(position, next_is_deep, ack).0, Release);
    }

    /// As [`Producer::post`], for an order of `count` words that its slot holds.
    #[inline(always)] // on the short path
    pub(crate) fn post_short(&mut self, ack: u32, count: usize, word: impl Fn(usize) -> u64) {
        debug_assert!(self.next - self.acked < u64::from(self.shape.depth), "posted to a full ring");
        let (at, position) = (first_word(self.slot), self.next);
        let next_is_deep = self.choose_next();
        let write = self.slots.writer::<{ 1 + IN_SLOT }>(at);
        // Of known length, so that each word is known to `word`.
        for k in 0..IN_SLOT {
            if k == count {
                break;
            }
            write(1 + k, word(k), Relaxed);
        }
        // Its release is as in `post`.
        write(0, FirstWord::new(position, next_is_deep, ack).0, Release);
    }

    /// Goes to the next position, and makes its slot empty for the consumer. Returns whether it is
    /// a deep slot.
    #[inline(always)] // on the short path
    fn choose_next(&mut self) -> bool {
        self.next += 1;
        let is_deep = self.next - self.acked >= u64::from(self.shape.hot);
        if is_deep != self.kind.is_deep {
            self.change_kind(is_deep);
        }
        self.slot = self.kind.slot(self.next);
        // A slot that was used one round ago is not stale. To read it would cost up to 10 ns.
        if self.next < self.fresh_from {
            clear_if_stale(&self.slots, self.slot, self.next);
        }
        is_deep
    }

    #[cold]
    fn change_kind(&mut self, is_deep: bool) {
        self.kind = self.shape.kind(is_deep);
        self.fresh_from = self.next + self.kind.count();
    }

    /// Fetches the cache line of the next slot, which is about to be filled.
    #[inline]
    pub(crate) fn prefetch(&self) {
        self.slots.prefetch(first_word(self.slot));
    }

    /// Records how many orders the peer has consumed. Ignores an older number.
    #[inline]
    pub(crate) fn acknowledge(&mut self, ack: u32) -> Result<(), BadAck> {
        let step = ack.wrapping_sub(self.acked as u32);
        if step == 0 || step > u32::MAX / 2 {
            return Ok(());
        }
        if u64::from(step) > self.next - self.acked {
            return Err(BadAck { said: ack, sent: self.next as u32 });
        }
        self.acked += u64::from(step);
        Ok(())
    }

    /// Reads the peer's line: a cache miss if it has changed.
    pub(crate) fn refresh(&mut self) -> Result<(), BadAck> {
        // Acquire: the peer's last reads of a slot, and of the memory that it names, come before
        // the slot and that memory are written again.
        let tail = self.line.load(TAIL, Acquire);
        self.acknowledge(tail as u32)
    }

    /// Whether the peer's line has a newer number than is known.
    pub(crate) fn has_news(&self) -> bool {
        let step = (self.line.load(TAIL, Acquire) as u32).wrapping_sub(self.acked as u32);
        step != 0 && step <= u32::MAX / 2
    }

    /// The peer's line.
    pub(crate) fn line(&self) -> &L {
        &self.line
    }

    /// The newest credits on the peer's line.
    pub(crate) fn credits(&self) -> u32 {
        self.line.load(CREDITS, Acquire) as u32
    }
}

/// The end of a ring that empties slots.
///
/// The slots are the peer's memory and can change while they are read. Each word is therefore read
/// once, into memory of this process, and checked there.
pub(crate) struct Consumer<R, L> {
    slots: R,
    /// This process's consumer line.
    line: L,
    shape: RingShape,
    /// Position of the next order.
    position: u64,
    /// Slot of the next order.
    slot: usize,
    /// The position that was last published to the peer.
    told: u64,
    /// The position that is on the line.
    on_line: u64,
    /// Consumed orders after which the position is published.
    tell_after: u64,
}

impl<R: LoadWords, L: StoreWords> Consumer<R, L> {
    /// The consumer of a ring, on a line that [`prepare`] has initialised.
    pub(crate) fn new(slots: R, line: L, shape: RingShape) -> Self {
        let (slot, tell_after) = (shape.slot(FIRST, false), shape.tell_after());
        let (told, on_line) = (FIRST, FIRST);
        Consumer { slots, line, shape, position: FIRST, slot, told, on_line, tell_after }
    }

    /// Word 0 of the next order's slot, if the order is there.
    #[inline(always)] // on the short path
    pub(crate) fn peek(&self) -> Option<FirstWord> {
        // Acquire: the words that were written before the sequence number are visible.
        let first = FirstWord(self.slots.words::<SLOT_WORDS>(first_word(self.slot))(0, Acquire));
        first.is_of(self.position).then_some(first)
    }

    /// Position of the next order.
    pub(crate) fn position(&self) -> u64 {
        self.position
    }

    /// Word `k` of the order that [`Consumer::peek`] found.
    ///
    /// # Panics
    /// If `k` is not below [`MAX_WORDS`].
    #[inline]
    pub(crate) fn word(&self, k: usize) -> u64 {
        assert!(k < MAX_WORDS);
        self.slots.load(self.shape.word(self.slot, k), Relaxed)
    }

    /// A function that reads the words of the order that its slot holds, the first [`IN_SLOT`].
    #[inline(always)] // on the short path
    pub(crate) fn short(&self) -> impl Fn(usize) -> u64 {
        let words = self.slots.words::<SLOT_WORDS>(first_word(self.slot));
        move |k| words(1 + k, Relaxed)
    }

    /// Copies bytes of the order, from word `from` on, as many as `out` has.
    ///
    /// # Panics
    /// If they end behind the longest order.
    #[inline]
    pub(crate) fn bytes(&self, from: usize, out: &mut [u8]) {
        let in_slot = (8 * IN_SLOT.saturating_sub(from)).min(out.len());
        let (near, far) = out.split_at_mut(in_slot);
        let word = self.short();
        copy_words(near, |k| word(from + k));
        if !far.is_empty() {
            let place = self.shape.word(self.slot, IN_SLOT);
            let (words, from) = (self.slots.words::<EXTENSION_WORDS>(place), from.saturating_sub(IN_SLOT));
            copy_words(far, |k| words(from + k, Relaxed));
        }
    }

    /// Consumes the order of which [`Consumer::peek`] has returned `first`: its words, and the
    /// memory that it names, are not read again. Publishes the position now and then; returns
    /// whether it did.
    #[inline(always)] // on the short path
    pub(crate) fn advance(&mut self, first: FirstWord) -> bool {
        self.position += 1;
        self.slot = self.shape.slot(self.position, first.next_is_deep());
        self.position - self.told >= self.tell_after && self.tell()
    }

    /// The number of consumed orders, for the next slot of the other ring. Counts as published.
    #[inline]
    pub(crate) fn ack(&mut self) -> u32 {
        self.told = self.position;
        self.position as u32
    }

    /// Publishes the number of consumed orders on the line, unless the peer knows it. Returns
    /// whether it did.
    #[inline]
    pub(crate) fn tell(&mut self) -> bool {
        if self.told == self.position {
            return false;
        }
        self.finish();
        true
    }

    /// Publishes the number of consumed orders on the line in any case.
    pub(crate) fn finish(&mut self) {
        self.told = self.position;
        self.write_line();
    }

    fn write_line(&mut self) {
        self.on_line = self.position;
        // Release: this side's reads of the slots, and of the memory that they name, come before.
        self.line.store(TAIL, u64::from(self.position as u32), Release);
    }

    /// Publishes the number on the line if the one there is old. Slots may have carried all newer
    /// ones.
    pub(crate) fn keep_line_near(&mut self) {
        if self.position - self.on_line >= LINE_AGE {
            // `told` stays, so that the next `tell` rings for the peer.
            self.write_line();
        }
    }

    /// Publishes the credits of the layer above on the line.
    pub(crate) fn publish_credits(&self, credits: u32) {
        self.line.store(CREDITS, u64::from(credits), Release);
    }
}

/// Fills `out` with the bytes of words, from word 0 on.
#[inline]
fn copy_words(out: &mut [u8], word: impl Fn(usize) -> u64) {
    let (chunks, rest) = out.as_chunks_mut::<8>();
    for (k, chunk) in chunks.iter_mut().enumerate() {
        *chunk = word(k).to_le_bytes();
    }
    if !rest.is_empty() {
        rest.copy_from_slice(&word(chunks.len()).to_le_bytes()[..rest.len()]);
    }
}

#[cfg(test)]
#[path = "ring_tests.rs"]
mod tests;
