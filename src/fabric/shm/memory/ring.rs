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

use super::slot::{FIRST, FirstWord, IN_SLOT, MAX_WORDS, RingShape, SLOT_WORDS, SlotKind, first_word};
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
    #[inline]
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
    /// Consumed orders after which the position is published.
    tell_after: u64,
}

impl<R: LoadWords, L: StoreWords> Consumer<R, L> {
    /// The consumer of a ring, on a line that [`prepare`] has initialised.
    pub(crate) fn new(slots: R, line: L, shape: RingShape) -> Self {
        let (slot, tell_after) = (shape.slot(FIRST, false), shape.tell_after());
        Consumer { slots, line, shape, position: FIRST, slot, told: FIRST, tell_after }
    }

    /// Word 0 of the next order's slot, if the order is there.
    #[inline(always)] // on the short path
    pub(crate) fn peek(&self) -> Option<FirstWord> {
        // Acquire: the words that were written before the sequence number are visible.
        let first = FirstWord(self.slots.words::<SLOT_WORDS>(first_word(self.slot))(0, Acquire));
        first.is_of(self.position).then_some(first)
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
        let (chunks, rest) = out.as_chunks_mut::<8>();
        let mut k = from;
        for chunk in chunks {
            *chunk = self.word(k).to_le_bytes();
            k += 1;
        }
        if !rest.is_empty() {
            rest.copy_from_slice(&self.word(k).to_le_bytes()[..rest.len()]);
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
        // Release: this side's reads of the slots, and of the memory that they name, come before.
        self.line.store(TAIL, u64::from(self.position as u32), Release);
    }

    /// Publishes the credits of the layer above on the line.
    pub(crate) fn publish_credits(&self, credits: u32) {
        self.line.store(CREDITS, u64::from(credits), Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::words::test::{HeapWords, LoomWords};
    use proptest::prelude::*;
    use std::collections::VecDeque;

    type Ends<W> = (Producer<W, W>, Consumer<W, W>);

    fn ring<W: StoreWords + Clone>(shape: RingShape, slots: W, line: W) -> Ends<W> {
        prepare(&slots, &line, shape);
        let producer = Producer::new(slots.clone(), line.clone(), shape);
        (producer, Consumer::new(slots, line, shape))
    }

    fn heap_ring(depth: u32) -> Ends<HeapWords> {
        let shape = RingShape::new(depth);
        ring(shape, HeapWords::new(shape.words()), HeapWords::new(2))
    }

    /// Every place of the ring holds the sequence number of the order that is awaited there
    /// first.
    fn stale_loom_ring(depth: u32, orders: u64) -> Ends<LoomWords> {
        let shape = RingShape::new(depth);
        let slots = LoomWords::new(shape.words());
        for position in (FIRST..FIRST + orders).rev() {
            for is_deep in [false, true] {
                let stale = FirstWord::new(position, !is_deep, 0);
                slots.store(first_word(shape.slot(position, is_deep)), stale.0, Relaxed);
            }
        }
        ring(shape, slots, LoomWords::new(2))
    }

    /// Takes an order of [`put`].
    fn take<W: StoreWords>(consumer: &mut Consumer<W, W>) -> Option<u64> {
        let first = consumer.peek()?;
        let word = consumer.word(0);
        assert_eq!(consumer.word(IN_SLOT - 1), word + 1, "the slot's end is of the same order");
        assert_eq!(consumer.word(IN_SLOT), word + 2, "the extension is of the same order");
        consumer.advance(first);
        Some(word)
    }

    /// Posts an order that goes on in its slot's extension.
    fn put<W: StoreWords>(producer: &mut Producer<W, W>, word: u64) -> bool {
        let room = producer.has_room().expect("an honest peer");
        if room {
            producer.post(0, &[word, 0, 0, 0, 0, 0, word + 1], &(word + 2).to_le_bytes());
        }
        room
    }

    #[test]
    fn loom_orders_arrive_whole_in_sequence_and_once_while_the_ring_goes_round() {
        // Hot slot 0, then slots of either kind, as the other thread's timing has it.
        const ORDERS: u64 = 4;
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let (mut producer, mut consumer) = stale_loom_ring(2, ORDERS);
            let sender = loom::thread::spawn(move || {
                for word in 0..ORDERS {
                    while !put(&mut producer, 10 * word) {
                        loom::thread::yield_now();
                    }
                }
            });
            for word in 0..ORDERS {
                let got = loop {
                    if let Some(got) = take(&mut consumer) {
                        break got;
                    }
                    consumer.tell();
                    loom::thread::yield_now();
                };
                assert_eq!(got, 10 * word);
            }
            assert_eq!(take(&mut consumer), None);
            sender.join().expect("the sender");
        });
    }

    /// A source is pulled on one thread. The other thread writes it again once the order that
    /// named it was consumed.
    #[allow(unsafe_code)] // loom checks accesses to plain memory only through its raw cell
    fn pull_and_reuse(reply: bool) {
        loom::model(move || {
            let (mut producer, mut consumer) = stale_loom_ring(2, 4);
            let (mut back, replies) = stale_loom_ring(2, 4);
            let source = loom::sync::Arc::new(loom::cell::UnsafeCell::new(7u64));
            let pulled = loom::sync::Arc::clone(&source);
            assert!(put(&mut producer, 1));
            let peer = loom::thread::spawn(move || {
                // SAFETY: the owner does not write before it is told; loom checks just that.
                pulled.with(|value| assert_eq!(unsafe { *value }, 7));
                assert_eq!(take(&mut consumer), Some(1));
                if reply {
                    back.post(consumer.ack(), &[0; 3], &[]);
                } else {
                    consumer.tell();
                }
            });
            while producer.acked() != producer.next() {
                match replies.peek() {
                    Some(first) if reply => producer.acknowledge(first.ack()).expect("an honest peer"),
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

    /// As if slots of the kind that is not in use had last been used 2^31 orders ago. They get the
    /// sequence numbers of the next orders that can lie there.
    fn make_unused_slots_stale<W: StoreWords>(producer: &Producer<W, W>, consumer: &Consumer<W, W>) {
        let (shape, next, is_deep) = (producer.shape, producer.next, !producer.kind.is_deep);
        let in_use: Vec<usize> =
            (consumer.position..=next).map(|position| shape.slot(position, is_deep)).collect();
        let round = if is_deep { shape.depth } else { shape.hot };
        for position in next + 1..=next + u64::from(round) {
            let slot = shape.slot(position, is_deep);
            if !in_use.contains(&slot) {
                producer.slots.store(first_word(slot), FirstWord::new(position, is_deep, 0).0, Relaxed);
            }
        }
    }

    proptest! {
        /// Any interleaving, from any start, on slots that hold anything: a ring is a bounded
        /// queue.
        #[test]
        fn a_ring_is_a_queue_of_its_depth(
            log_depth in 1u32..9,
            stale in any::<u32>(),
            steps in proptest::collection::vec((0u8..5, 1usize..40), 1..60),
        ) {
            let (depth, line) = (1 << log_depth, HeapWords::new(2));
            let shape = RingShape::new(depth);
            let slots = HeapWords::new(shape.words());
            let is_stale = |position: &u64| stale >> (position % 32) & 1 != 0;
            for position in (FIRST..FIRST + 600).rev().filter(is_stale) {
                let stale = FirstWord::new(position, stale.is_power_of_two(), stale);
                slots.store(first_word(shape.slot(position, true)), stale.0, Relaxed);
                slots.store(first_word(shape.slot(position, false)), stale.0, Relaxed);
            }
            let (mut producer, mut consumer) = ring(shape, slots, line);
            let (mut sent, mut queue) = (0, VecDeque::new());
            for (step, times) in steps {
                for _ in 0..times {
                    match step {
                        0 | 1 => {
                            let is_full = queue.len() == depth as usize;
                            let has_room = put(&mut producer, sent);
                            prop_assert!(!(is_full && has_room));
                            if has_room {
                                queue.push_back(sent);
                                sent += 10;
                            }
                        }
                        2 => prop_assert_eq!(take(&mut consumer), queue.pop_front()),
                        3 => make_unused_slots_stale(&producer, &consumer),
                        _ => {
                            consumer.tell();
                            prop_assert_eq!(producer.has_room(), Ok(queue.len() < depth as usize));
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn positions_go_through_the_wrap_of_their_32_bits() {
        let (mut producer, mut consumer) = heap_ring(64);
        for word in 0..700 {
            assert!(put(&mut producer, word));
            assert_eq!(take(&mut consumer), Some(word));
            assert_eq!(take(&mut consumer), None);
        }
        assert!(producer.next() > 1 << 32, "700 orders go through the wrap");
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
        // With 512 deep slots the first lap passes the position whose sequence number is 0.
        let (mut producer, mut consumer) = heap_ring(512);
        for _ in 0..3 {
            for word in 0..512 {
                assert!(put(&mut producer, word));
            }
            for word in 0..512 {
                assert_eq!(take(&mut consumer), Some(word));
            }
            assert_eq!(take(&mut consumer), None);
            consumer.tell();
        }
    }

    #[test]
    fn orders_in_turns_stay_in_the_hot_slots() {
        let shape = RingShape::new(256);
        let there = HeapWords::new(shape.words());
        let (mut producer, mut consumer) = ring(shape, there.clone(), HeapWords::new(2));
        let (mut back, mut replies) = heap_ring(256);
        let deep = || {
            (shape.slot(0, true)..shape.slots()).filter(|&slot| there.load(first_word(slot), Relaxed) != 0)
        };
        for word in 0..1000 {
            assert!(put(&mut producer, word));
            assert_eq!(take(&mut consumer), Some(word));
            back.post(consumer.ack(), &[], &[]);
            let reply = replies.peek().expect("a reply");
            assert_eq!(producer.acknowledge(reply.ack()), Ok(()));
            replies.advance(reply);
            back.acknowledge(replies.ack()).expect("an honest peer");
        }
        assert_eq!(deep().count(), 0);
        assert!((0..256).all(|word| put(&mut producer, word)));
        assert_eq!(deep().count(), 256 - 32);
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
        for words in [0, 1, 3, IN_SLOT, MAX_WORDS] {
            for len in 0..=(MAX_WORDS - words) * 8 {
                let bytes: Vec<u8> = (0..len).map(|k| (k * 7 + len) as u8).collect();
                assert_eq!(producer.has_room(), Ok(true));
                producer.post(0, &vec![len as u64; words], &bytes);
                let first = consumer.peek().expect("it was posted");
                let mut out = vec![0xEE; len];
                consumer.bytes(words, &mut out);
                assert_eq!(out, bytes);
                assert!((0..words).all(|k| consumer.word(k) == len as u64));
                consumer.advance(first);
                consumer.tell();
            }
        }
    }
}
