//! Tests of a ring: in one thread, and with loom.

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
    let deep =
        || (shape.slot(0, true)..shape.slots()).filter(|&slot| there.load(first_word(slot), Relaxed) != 0);
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

#[test]
fn the_line_is_written_before_its_number_is_ambiguous_though_slots_carry_all_numbers() {
    let (mut producer, mut consumer) = heap_ring(16);
    for _ in 0..6 {
        // As many orders have gone by, and the slots of the other ring have told of each.
        consumer.position += LINE_AGE;
        producer.next = consumer.position;
        producer.acknowledge(consumer.ack()).expect("an honest peer");
        assert!(!consumer.tell(), "the peer knows it");
        consumer.keep_line_near();
        producer.refresh().expect("an honest peer");
        assert_eq!((producer.acked(), producer.has_news()), (consumer.position(), false));
    }
}
