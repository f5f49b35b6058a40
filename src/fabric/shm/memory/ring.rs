//! A ring of slots with one producer and one consumer.
//!
//! The producer's process owns the slots. The consumer's process owns the consumer line, on which
//! it publishes how many slots it has consumed. Neither writes what the other owns. A slot is 32
//! words (four cache lines):
//!
//! | word | content |
//! |---|---|
//! | 0, low half | sequence number, stored last |
//! | 0, high half | how many slots of the *other* ring of the link have been consumed |
//! | 1..4 | header |
//! | 4..32 | payload; its first four words share the header's cache line |
//!
//! The slot for position `p` is full when its sequence number is `p + 1` (modulo 2^32), so a slot
//! never has to be reset. Positions count up for ever in 64 bits here and modulo 2^32 in shared
//! memory. They start shortly *before* the 32 bits wrap, as the kernel's jiffies do, so that every
//! link goes through the wrap.

use crate::fabric::words::{LoadWords, StoreWords};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// One word has 8 bytes.
pub(crate) const SLOT_WORDS: usize = 32;
/// Words of a slot's header, not counting word 0.
pub(crate) const HEADER_WORDS: usize = 3;
/// First word of a slot's payload.
const PAYLOAD: usize = 1 + HEADER_WORDS;
/// Bytes of a slot's payload.
pub(crate) const PAYLOAD_BYTES: usize = (SLOT_WORDS - PAYLOAD) * 8;
/// Word of the consumer's line: how many slots have been consumed, modulo 2^32.
pub(crate) const TAIL: usize = 0;
/// Word of the consumer's line that carries the credits of the layer above.
pub(crate) const CREDITS: usize = 1;

/// The first position of every ring: 300 slots before the 32 bits wrap.
pub(crate) const FIRST: u64 = (1 << 32) - 300;

/// The peer says that it has consumed more slots than were sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BadAck {
    /// The number that the peer says, modulo 2^32.
    pub said: u32,
    /// The number of sent slots, modulo 2^32.
    pub sent: u32,
}

/// The sequence number of a full slot at a position.
fn sequence(position: u64) -> u32 {
    (position as u32).wrapping_add(1)
}

/// Initialises a ring and a line of this process, before the peer can see them.
///
/// # Panics
/// If the number of slots is not a power of two.
pub(crate) fn prepare(slots: &impl StoreWords, line: &impl StoreWords) {
    let depth = depth(slots);
    for position in FIRST..FIRST + depth {
        // The sequence number that a full slot of the lap before would hold.
        let empty = sequence(position.wrapping_sub(depth));
        slots.store(slot_at(position, depth - 1), u64::from(empty), Relaxed);
    }
    line.store(TAIL, u64::from(FIRST as u32), Release);
}

/// The end of a ring that fills slots.
pub(crate) struct Producer<R, L> {
    slots: R,
    /// The peer's consumer line.
    line: L,
    mask: u64,
    /// Position of the next slot to fill.
    next: u64,
    /// All slots before this position are known to be consumed.
    acked: u64,
}

impl<R: StoreWords, L: LoadWords> Producer<R, L> {
    /// The producer of a ring that [`prepare`] has initialised.
    ///
    /// # Panics
    /// If the number of slots is not a power of two.
    pub(crate) fn new(slots: R, line: L) -> Self {
        Producer { mask: depth(&slots) - 1, slots, line, next: FIRST, acked: FIRST }
    }

    /// Position of the next slot to fill.
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    /// All slots before this position have been consumed.
    pub(crate) fn acked(&self) -> u64 {
        self.acked
    }

    /// Whether a slot is free. Reads the peer's line only if none seems to be.
    #[inline]
    pub(crate) fn has_room(&mut self) -> Result<bool, BadAck> {
        if self.next - self.acked <= self.mask {
            return Ok(true);
        }
        self.refresh()?;
        Ok(self.next - self.acked <= self.mask)
    }

    /// Fills the next slot. `ack` is the number of consumed slots of the link's other ring.
    ///
    /// # Panics
    /// If the payload is longer than [`PAYLOAD_BYTES`]. The caller has called
    /// [`Producer::has_room`].
    #[inline]
    pub(crate) fn post(&mut self, ack: u32, header: [u64; HEADER_WORDS], payload: &[u8]) {
        debug_assert!(self.next - self.acked <= self.mask, "posted to a full ring");
        assert!(payload.len() <= PAYLOAD_BYTES);
        let slot = slot_at(self.next, self.mask);
        for (k, word) in header.into_iter().enumerate() {
            self.slots.store(slot + 1 + k, word, Relaxed);
        }
        let (words, rest) = payload.as_chunks::<8>();
        for (k, word) in words.iter().enumerate() {
            self.slots.store(slot + PAYLOAD + k, u64::from_le_bytes(*word), Relaxed);
        }
        if !rest.is_empty() {
            let mut last = [0; 8];
            last[..rest.len()].copy_from_slice(rest);
            self.slots.store(slot + PAYLOAD + words.len(), u64::from_le_bytes(last), Relaxed);
        }
        let first = u64::from(ack) << 32 | u64::from(sequence(self.next));
        // Release: whoever sees the sequence number sees the words above.
        self.slots.store(slot, first, Release);
        self.next += 1;
    }

    /// Fetches the cache line of the next slot, which is about to be filled.
    #[inline]
    pub(crate) fn prefetch(&self) {
        self.slots.prefetch(slot_at(self.next, self.mask));
    }

    /// Records how many slots the peer has consumed. Ignores an older number.
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
    mask: u64,
    /// Position of the next slot to empty.
    position: u64,
    /// The position that was last published to the peer.
    told: u64,
}

impl<R: LoadWords, L: StoreWords> Consumer<R, L> {
    /// The consumer of a ring, on a line that [`prepare`] has initialised.
    ///
    /// # Panics
    /// If the number of slots is not a power of two.
    pub(crate) fn new(slots: R, line: L) -> Self {
        Consumer { mask: depth(&slots) - 1, slots, line, position: FIRST, told: FIRST }
    }

    /// Whether the next slot is full. Returns the number that its sender has consumed of the other
    /// ring.
    #[inline]
    pub(crate) fn peek(&self) -> Option<u32> {
        // Acquire: the words that were written before the sequence number are visible.
        let first = self.slots.load(slot_at(self.position, self.mask), Acquire);
        (first as u32 == sequence(self.position)).then_some((first >> 32) as u32)
    }

    /// The header of the slot that [`Consumer::peek`] found.
    #[inline]
    pub(crate) fn header(&self) -> [u64; HEADER_WORDS] {
        let slot = slot_at(self.position, self.mask);
        std::array::from_fn(|k| self.slots.load(slot + 1 + k, Relaxed))
    }

    /// The first words of the slot's payload.
    #[inline]
    pub(crate) fn words<const N: usize>(&self) -> [u64; N] {
        let slot = slot_at(self.position, self.mask);
        std::array::from_fn(|k| self.slots.load(slot + PAYLOAD + k, Relaxed))
    }

    /// Copies the start of the slot's payload, as many bytes as `out` has.
    ///
    /// # Panics
    /// If `out` is longer than [`PAYLOAD_BYTES`].
    #[inline]
    pub(crate) fn payload(&self, out: &mut [u8]) {
        assert!(out.len() <= PAYLOAD_BYTES);
        let slot = slot_at(self.position, self.mask) + PAYLOAD;
        let (words, rest) = out.as_chunks_mut::<8>();
        for (k, word) in words.iter_mut().enumerate() {
            *word = self.slots.load(slot + k, Relaxed).to_le_bytes();
        }
        if !rest.is_empty() {
            let last = self.slots.load(slot + words.len(), Relaxed).to_le_bytes();
            rest.copy_from_slice(&last[..rest.len()]);
        }
    }

    /// Consumes the slot: its words, and the memory that it names, are not read again. Publishes
    /// the position now and then; returns whether it did.
    #[inline]
    pub(crate) fn advance(&mut self) -> bool {
        self.position += 1;
        self.position - self.told > self.mask / 4 && self.tell()
    }

    /// The number of consumed slots, for the next slot of the other ring. Counts as published.
    #[inline]
    pub(crate) fn ack(&mut self) -> u32 {
        self.told = self.position;
        self.position as u32
    }

    /// Publishes the number of consumed slots on the line, unless the peer knows it. Returns
    /// whether it did.
    #[inline]
    pub(crate) fn tell(&mut self) -> bool {
        if self.told == self.position {
            return false;
        }
        self.finish();
        true
    }

    /// Publishes the number of consumed slots on the line in any case.
    pub(crate) fn finish(&mut self) {
        self.told = self.position;
        // Release: this side's reads of the slots, and of the memory that they name, come before.
        self.line.store(TAIL, u64::from(self.position as u32), Release);
    }

    /// Publishes the credits of the layer above on the line.
    pub(crate) fn publish_credits(&self, credits: u32) {
        self.line.store(CREDITS, u64::from(credits), Release);
    }
}

/// Number of slots.
fn depth(slots: &impl LoadWords) -> u64 {
    let depth = slots.len() / SLOT_WORDS;
    assert!(depth.is_power_of_two() && slots.len().is_multiple_of(SLOT_WORDS));
    depth as u64
}

/// Index of the first word of a position's slot.
fn slot_at(position: u64, mask: u64) -> usize {
    (position & mask) as usize * SLOT_WORDS
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::words::test::{HeapWords, LoomWords};

    fn ring<W: StoreWords + Clone>(slots: W, line: W) -> (Producer<W, W>, Consumer<W, W>) {
        prepare(&slots, &line);
        let producer = Producer::new(slots.clone(), line.clone());
        (producer, Consumer::new(slots, line))
    }

    fn heap_ring(depth: usize) -> (Producer<HeapWords, HeapWords>, Consumer<HeapWords, HeapWords>) {
        ring(HeapWords::new(depth * SLOT_WORDS), HeapWords::new(2))
    }

    fn take<W: StoreWords>(consumer: &mut Consumer<W, W>) -> Option<u64> {
        consumer.peek()?;
        let [word] = consumer.words::<1>();
        assert_eq!(consumer.header(), [word, word + 1, word + 2], "the header is of the same slot");
        consumer.advance();
        Some(word)
    }

    fn put<W: StoreWords>(producer: &mut Producer<W, W>, word: u64) -> bool {
        let room = producer.has_room().expect("an honest peer");
        if room {
            producer.post(0, [word, word + 1, word + 2], &word.to_le_bytes());
        }
        room
    }

    #[test]
    fn loom_slots_arrive_whole_in_order_and_once_while_the_ring_goes_round() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let (mut producer, mut consumer) = ring(LoomWords::new(2 * SLOT_WORDS), LoomWords::new(2));
            let sender = loom::thread::spawn(move || {
                for word in 10..14 {
                    while !put(&mut producer, word) {
                        loom::thread::yield_now();
                    }
                }
            });
            for word in 10..14 {
                let got = loop {
                    if let Some(got) = take(&mut consumer) {
                        break got;
                    }
                    consumer.tell();
                    loom::thread::yield_now();
                };
                assert_eq!(got, word);
            }
            assert_eq!(take(&mut consumer), None);
            sender.join().expect("the sender");
        });
    }

    /// A source is pulled on one thread. The other thread writes it again once the slot that named
    /// it was consumed.
    #[allow(unsafe_code)] // loom checks accesses to plain memory only through its raw cell
    fn pull_and_reuse(reply: bool) {
        loom::model(move || {
            let words = || (LoomWords::new(2 * SLOT_WORDS), LoomWords::new(2));
            let ((slots, line), (back_slots, back_line)) = (words(), words());
            let (mut producer, mut consumer) = ring(slots, line);
            let (mut back, replies) = ring(back_slots, back_line);
            let source = loom::sync::Arc::new(loom::cell::UnsafeCell::new(7u64));
            let pulled = loom::sync::Arc::clone(&source);
            assert!(put(&mut producer, 1));
            let peer = loom::thread::spawn(move || {
                // SAFETY: the owner does not write before it is told; loom checks just that.
                pulled.with(|value| assert_eq!(unsafe { *value }, 7));
                assert_eq!(take(&mut consumer), Some(1));
                if reply {
                    back.post(consumer.ack(), [0; 3], &[]);
                } else {
                    consumer.tell();
                }
            });
            while producer.acked() != producer.next() {
                match replies.peek() {
                    Some(ack) if reply => producer.acknowledge(ack).expect("an honest peer"),
                    _ => producer.refresh().expect("an honest peer"),
                }
                loom::thread::yield_now();
            }
            // SAFETY: as above, from the other side.
            source.with_mut(|value| unsafe { *value = 8 });
            peer.join().expect("the peer");
        });
    }

    #[test]
    fn loom_a_source_is_written_again_only_after_it_was_pulled() {
        pull_and_reuse(false);
        pull_and_reuse(true);
    }

    #[test]
    fn positions_go_through_the_wrap_of_their_32_bits() {
        let (mut producer, mut consumer) = heap_ring(64);
        for word in 0..700 {
            assert!(put(&mut producer, word));
            assert_eq!(take(&mut consumer), Some(word));
            assert_eq!(take(&mut consumer), None);
        }
        assert!(producer.next() > 1 << 32, "700 slots go through the wrap");
    }

    #[test]
    fn a_full_ring_has_no_room_until_the_consumer_has_published() {
        let (mut producer, mut consumer) = heap_ring(4);
        assert!((0..4).all(|word| put(&mut producer, word)));
        assert!(!put(&mut producer, 4));
        assert_eq!(take(&mut consumer), Some(0));
        consumer.tell();
        assert!(put(&mut producer, 4));
    }

    #[test]
    fn a_ring_is_empty_before_anything_was_sent_even_where_the_sequence_wraps() {
        // With 512 slots the first lap passes the position whose sequence number is 0.
        let (mut producer, mut consumer) = heap_ring(512);
        for word in 0..512 {
            assert_eq!(take(&mut consumer), None);
            assert!(put(&mut producer, word));
            assert_eq!(take(&mut consumer), Some(word));
        }
    }

    #[test]
    fn an_ack_of_more_than_was_sent_is_refused_and_an_old_one_ignored() {
        let (mut producer, _consumer) = heap_ring(4);
        assert!(put(&mut producer, 1));
        let next = producer.next() as u32;
        let bad = BadAck { said: next + 1, sent: next };
        assert_eq!(producer.acknowledge(next + 1), Err(bad));
        assert_eq!(producer.acknowledge(next), Ok(()));
        assert_eq!(producer.acknowledge(next - 1), Ok(()));
        assert_eq!(producer.acked(), producer.next());
    }

    #[test]
    fn payloads_of_every_length_come_back() {
        let (mut producer, mut consumer) = heap_ring(2);
        for len in 0..=PAYLOAD_BYTES {
            let bytes: Vec<u8> = (0..len).map(|k| (k * 7 + len) as u8).collect();
            assert_eq!(producer.has_room(), Ok(true));
            producer.post(0, [0; 3], &bytes);
            assert!(consumer.peek().is_some());
            let mut out = vec![0xEE; len];
            consumer.payload(&mut out);
            assert_eq!(out, bytes);
            consumer.advance();
        }
    }
}
