//! Damage that a hostile peer can do by writing anything into its segment.

use super::hostile_peer::{
    HonestPeer, HostilePeer, HostileSetup, OPTIONS, connect_hostile_peer, try_to_connect,
};
use super::record_reader::{EXPECTED, Read, RecordReader, change_messages};
use super::{pool, tensor, tensor_mut};
use crate::fabric::shm::loans::orphans::MAX_LINKS;
use crate::fabric::shm::memory::order::{Order, OrderLoan, OrderSource, OrderTarget, ReadTicket, send_word};
use crate::fabric::shm::memory::ring::TAIL;
use crate::fabric::shm::memory::slot::RingShape;
use crate::fabric::shm::memory::state;
use crate::fabric::shm::wakeup::idle;
use crate::fabric::words::StoreWords;
use crate::fabric::{Completions, Event, LinkFailure, LoanPermit, MAX_LOANS, NextMessage, Port, ShortTake};
use crate::wire::message::{PlainRecord, SHORT_TENSOR};
use crate::wire::{Grant, Immediate, SHORT_WORDS, ShortMessage, Slot};
use proptest::prelude::*;
use std::sync::atomic::Ordering;

fn hostile_link() -> (HonestPeer, HostilePeer) {
    connect_hostile_peer(&HostileSetup::new())
}

impl HostilePeer {
    pub(super) fn post(&mut self, order: Order) {
        self.post_words(order.to_words());
    }
}

impl HonestPeer {
    pub(super) fn granted(&mut self, len: usize) -> Grant {
        let target = tensor_mut(&self.pool, len);
        self.port.grant(self.link, target).expect("room")
    }

    /// Polls until the link is down, or 200 times. Returns the events except `Down`, and the reason
    /// of `Down`.
    pub(super) fn poll(&mut self) -> (Vec<Event>, Option<LinkFailure>) {
        let mut completions = Completions::default();
        let mut events = Vec::new();
        for _ in 0..200 {
            self.port.poll(&mut completions);
            for (completion, _) in completions.drain() {
                match completion.event {
                    Event::Down(why) => return (events, Some(why)),
                    event => events.push(event),
                }
            }
        }
        (events, None)
    }

    /// The link must go down for a violation whose text contains `text`.
    fn assert_broken(&mut self, text: &str) {
        match self.poll() {
            (events, Some(LinkFailure::Protocol(why))) => {
                assert!(why.contains(text), "{why}");
                assert!(events.iter().all(|event| matches!(event, Event::Failed)), "{events:?}");
            }
            other => panic!("not refused: {other:?}"),
        }
    }
}

pub(super) fn immediate() -> Immediate {
    Immediate { generation: 0, slot: Slot::new(1).expect("fits") }
}

fn lend(source: OrderSource, index: u64, number: u64) -> Order {
    let loan = OrderLoan { source, index, number };
    Order::Lend { loan, message: ShortMessage::from_u32(1) }
}

const SOURCE: OrderSource = OrderSource { region: 0, offset: 0, len: 8 };
const NOWHERE: OrderTarget = OrderTarget { region: 0, key: 0, offset: 0 };

#[test]
fn malformed_orders_end_the_link() {
    let op = |op: u64| [op, 0, 0, 0, 0, 0, 0, 0];
    let cases = [
        (op(0), "operation 0"),
        (op(200), "operation 200"),
        (op(1 | 225 << 16), "225 bytes of payload"),
        (op(2 | 0xFFFF << 16), "65535 bytes of payload"),
        (op(3 | 0x40 << 8), "flags 0x40"),
        (op(3 | 1 << 8 | 0xF000_0000 << 32), "highest bits that are not 0"),
        (op(4 | 29 << 16), "29 bytes of message"),
    ];
    for (words, text) in cases {
        let (mut honest, mut hostile) = hostile_link();
        hostile.post_words(words);
        honest.assert_broken(text);
    }
}

#[test]
fn a_source_outside_the_shared_regions_ends_the_link_and_nothing_is_written() {
    let len = pool().region().len();
    let sources = [
        (OrderSource { region: 9, ..SOURCE }, "its region 9, which it has not shared"),
        (OrderSource { offset: len, ..SOURCE }, "8 bytes at"),
        (OrderSource { offset: len - 7, ..SOURCE }, "8 bytes at"),
        (OrderSource { offset: u64::MAX - 3, ..SOURCE }, "8 bytes at 18446744073709551612"),
    ];
    for (source, text) in sources {
        let (mut honest, mut hostile) = hostile_link();
        let grant = honest.granted(8);
        let target = OrderTarget::from(&grant);
        hostile.post(Order::Write { source, target, immediate: Some(immediate()) });
        honest.assert_broken(text);
        let target = honest.port.revoke(honest.link, &grant).expect("granted");
        assert_eq!(target.bytes(), [0; 8]);

        let (mut honest, mut hostile) = hostile_link();
        hostile.post(lend(source, 0, 1));
        honest.assert_broken(text);
    }
}

#[test]
fn a_length_that_overflows_the_grants_end_is_refused() {
    let (mut honest, mut hostile) = hostile_link();
    let grant = honest.granted(8);
    let source = OrderSource { len: u64::MAX, ..SOURCE };
    hostile.post(Order::Write { source, target: OrderTarget::from(&grant), immediate: None });
    honest.assert_broken("8 bytes at");
}

#[test]
fn a_loan_that_breaks_a_rule_is_left_to_a_poll() {
    let outside = OrderSource { offset: pool().region().len() - 7, ..SOURCE };
    let nothing = OrderSource { len: 0, ..SOURCE };
    let cases = [
        (lend(SOURCE, MAX_LOANS as u64, 1), "of a table of"),
        (lend(SOURCE, 0, 0), "number 0"),
        (lend(OrderSource { region: 9, ..SOURCE }, 0, 1), "its region 9"),
        (lend(outside, 0, 1), "8 bytes at"),
    ];
    let accept = |next: NextMessage<'_>| -> Option<()> { panic!("it was shown: {next:?}") };
    for (order, text) in cases {
        let (mut honest, mut hostile) = hostile_link();
        hostile.post(order);
        assert_eq!(honest.port.take_short(honest.link, accept), ShortTake::Other);
        honest.assert_broken(text);
    }
    // Not forbidden, but for a poll.
    let (mut honest, mut hostile) = hostile_link();
    hostile.post(lend(nothing, 0, 1));
    assert_eq!(honest.port.take_short(honest.link, accept), ShortTake::Other);
    assert!(matches!(honest.poll().0[..], [Event::Lent { .. }]));
    // A place that is held.
    let (mut honest, mut hostile) = hostile_link();
    hostile.post(lend(SOURCE, 3, 1));
    let keep = |next: NextMessage<'_>| match next {
        NextMessage::Lent(_, loan) => loan.keep(),
        _ => None,
    };
    let ShortTake::Taken(held) = honest.port.take_short(honest.link, keep) else { panic!("a loan") };
    hostile.post(lend(SOURCE, 3, 2));
    assert_eq!(honest.port.take_short(honest.link, accept), ShortTake::Other);
    honest.assert_broken("another loan is still held");
    drop(held);
}

#[test]
fn loans_in_occupied_places_end_the_link() {
    let lend = |index, number| lend(SOURCE, index, number);
    let places = MAX_LOANS as u64;
    let outside = format!("place {places} of a table of {places}");
    for (order, text) in
        [(lend(places, 1), outside), (lend((1 << 48) - 1, 1), format!("of a table of {places}"))]
    {
        let (mut honest, mut hostile) = hostile_link();
        hostile.post(order);
        honest.assert_broken(&text);
    }
    let (mut honest, mut hostile) = hostile_link();
    hostile.post(lend(0, 0));
    honest.assert_broken("number 0");

    let (mut honest, mut hostile) = hostile_link();
    hostile.post(lend(3, 1));
    let (held, down) = honest.poll();
    assert!(matches!(held[..], [Event::Lent { .. }]) && down.is_none());
    hostile.post(lend(3, 2));
    honest.assert_broken("another loan is still held");
    drop(held); // gives back into a segment whose link is gone
}

#[test]
fn answers_without_a_read_end_the_link() {
    let (mut honest, mut hostile) = hostile_link();
    hostile.post(Order::Answer { source: SOURCE, ticket: ReadTicket { index: 0, number: 1 } });
    honest.assert_broken("not under way");

    for (len, text) in [(7, "a read of 8 bytes with 7"), (u64::MAX, "with 18446744073709551615")] {
        let (mut honest, mut hostile) = hostile_link();
        let target = tensor_mut(&honest.pool, 8);
        let grant = Grant { region: 0, key: 1, offset: 0, len: 8 };
        honest.port.read(honest.link, target, &grant).expect("posted");
        assert!(hostile.inc.peek().is_some());
        let Ok(Order::Read { ticket, .. }) = Order::from_words(|k| hostile.inc.word(k)) else {
            panic!("not a read");
        };
        hostile.post(Order::Answer { source: OrderSource { len, ..SOURCE }, ticket });
        honest.assert_broken(text);
    }
}

#[test]
fn a_flood_of_reads_is_bounded() {
    let (mut honest, mut hostile) = hostile_link();
    // The hostile peer never takes an answer: 8 fit in the ring, 8 may wait, and one is too many.
    for number in 0..17 {
        let ticket = ReadTicket { index: 0, number };
        while hostile.out.has_room() != Ok(true) {
            assert!(honest.poll().1.is_none());
        }
        hostile.post(Order::Read { exposed: NOWHERE, len: 0, ticket });
    }
    honest.assert_broken("more than 8 reads");
}

#[test]
fn an_acknowledgement_of_orders_never_sent_ends_the_link() {
    let (mut honest, mut hostile) = hostile_link();
    hostile.out.post(12345, &Order::Send { len: 0, first: 0 }.to_words(), &[]);
    honest.assert_broken("where");

    // The same on the line, which is read when something waits for it.
    let (mut honest, hostile) = hostile_link();
    let source = tensor(&honest.pool, &[1; 8]);
    let grant = Grant { region: 0, key: 1, offset: 0, len: 8 };
    honest.port.write(honest.link, &source, 8, &grant, None).expect("posted");
    hostile.line.store(TAIL, 77, Ordering::Release);
    honest.assert_broken("it says it has taken 77 orders");
    assert!(source.is_unique());
}

#[test]
fn a_wrong_consumer_line_of_a_full_ring_ends_the_link_at_the_next_post() {
    let (mut honest, hostile) = hostile_link();
    hostile.line.store(TAIL, 77, Ordering::Release);
    while honest.port.send(honest.link, b"x").is_ok() {}
    assert_eq!(honest.port.send(honest.link, b"x"), Err(crate::fabric::PostError::Down));
    honest.assert_broken("it says it has taken 77 orders");
}

#[test]
fn an_unknown_state_ends_the_link() {
    let (mut honest, hostile) = hostile_link();
    hostile.state.store(0, 0xABCD, Ordering::Release);
    honest.assert_broken("0xabcd");
}

#[test]
fn bytes_pulled_from_a_peer_that_has_left_meanwhile_are_not_delivered() {
    let (mut honest, mut hostile) = hostile_link();
    let grant = honest.granted(8);
    hostile.post(Order::Write {
        source: SOURCE,
        target: OrderTarget::from(&grant),
        immediate: Some(immediate()),
    });
    state::leave(&hostile.state, &LinkFailure::Closed);
    let (events, down) = honest.poll();
    assert!(events.is_empty(), "{events:?}");
    assert_eq!(down, Some(LinkFailure::Closed));
}

#[test]
fn a_peer_that_has_left_and_goes_on_posting_is_gone_all_the_same() {
    let (mut honest, mut hostile) = hostile_link();
    state::leave(&hostile.state, &LinkFailure::Closed);
    let mut completions = Completions::default();
    // The state is read now and then.
    for _ in 0..50 {
        while hostile.out.has_room() == Ok(true) {
            hostile.post(Order::Send { len: 0, first: 0 });
        }
        honest.port.poll(&mut completions);
        for (completion, _) in completions.drain() {
            if let Event::Down(why) = completion.event {
                return assert_eq!(why, LinkFailure::Closed);
            }
        }
    }
    panic!("the link is still up");
}

#[test]
fn a_loan_that_was_never_taken_is_free_when_the_peer_leaves() {
    let (mut honest, mut hostile) = hostile_link();
    let source = tensor(&honest.pool, &[1; 8]);
    honest
        .port
        .lend(
            honest.link,
            &mut Some(source.clone()),
            &mut Some(LoanPermit::unbounded()),
            &ShortMessage::from_u32(1),
        )
        .expect("posted");
    honest
        .port
        .lend(
            honest.link,
            &mut Some(source.clone()),
            &mut Some(LoanPermit::unbounded()),
            &ShortMessage::from_u32(1),
        )
        .expect("posted");
    honest.port.detach(honest.link);
    assert!(!source.is_unique(), "the peer may still read it");
    // It took the first.
    let first = hostile.inc.peek().expect("it was posted");
    hostile.inc.advance(first);
    hostile.inc.finish();
    state::leave(&hostile.state, &LinkFailure::Closed);
    honest.port.detach(honest.link);
    assert!(!source.is_unique(), "the first is still out");
    hostile.loan_table.store(0, 1, Ordering::Release);
    honest.port.detach(honest.link);
    assert!(source.is_unique(), "the first came back, and the second was never taken");
}

#[test]
fn a_process_that_keeps_what_many_links_lent_it_gets_no_other_link() {
    let setup = HostileSetup::new();
    let source = tensor(&setup.pool, &[1; 8]);
    let mut kept = Vec::new();
    for _ in 0..MAX_LINKS {
        let (mut honest, mut hostile) = try_to_connect(&setup).expect("accepted");
        let (mut lent, mut permit) = (Some(source.clone()), Some(LoanPermit::unbounded()));
        honest.port.lend(honest.link, &mut lent, &mut permit, &ShortMessage::from_u32(1)).expect("posted");
        let first = hostile.inc.peek().expect("it was posted");
        hostile.inc.advance(first);
        hostile.inc.finish();
        honest.port.detach(honest.link);
        kept.push(hostile);
    }
    let why = try_to_connect(&setup).map(drop).expect_err("one too many").to_string();
    assert!(why.contains("64 links lent to"), "{why}");
    // It gives one back.
    kept[0].loan_table.store(0, 1, Ordering::Release);
    try_to_connect(&setup).map(drop).expect("one less");
}

#[test]
fn a_malformed_idle_mark_is_harmless() {
    let (mut honest, hostile) = hostile_link();
    for mark in [1, u64::MAX, 1 << 63 | 77 << 16, 1 << 63 | 0xFFFF] {
        hostile.state.store(idle::IDLE_MARK, mark, Ordering::Release);
        honest.port.send(honest.link, b"x").expect("room");
    }
    assert!(honest.poll().1.is_none());
}

#[test]
fn endless_rings_and_rings_for_missing_links_cost_only_time() {
    let (mut honest, mut hostile) = hostile_link();
    // The hostile peer's hello had the honest side's own doorbells, so it can ring them.
    for place in 0..crate::fabric::shm::wakeup::doorbell::PLACES {
        hostile.doorbells.ring(idle::DoorbellRef { doorbell: 0, place });
    }
    assert!(!honest.port.arm(), "somebody rang");
    assert!(honest.poll().1.is_none());
    assert!(honest.port.arm(), "nothing was there");
    hostile.post(Order::Send { len: 0, first: 0 });
    let (events, down) = honest.poll();
    assert!(matches!(events[..], [Event::Message(_)]) && down.is_none());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The reader compares what it takes with the words as it has read them.
    #[test]
    fn a_record_that_changes_while_it_is_read_is_taken_as_it_was_read(
        data in proptest::collection::vec(any::<u8>(), 0..=SHORT_TENSOR),
        changes in proptest::collection::vec(proptest::option::of(any::<u64>()), SHORT_WORDS),
    ) {
        let (mut honest, mut hostile) = hostile_link();
        let record = PlainRecord { data: &data, ..EXPECTED };
        let message = record.to_short().expect("it is short").read();
        let ShortMessage { len, first, words: [a, b, c, d, e, f] } = message;
        hostile.post_words([send_word(len, first), a, b, c, d, e, f, 0]);
        let shape = RingShape::new(OPTIONS.depth);
        let before = |k: usize| {
            if let Some(value) = changes[k] {
                change_messages(&hostile.ring, shape, k, value);
            }
        };
        let HonestPeer { pool, port, link } = &mut honest;
        let taken = port.take_short(*link, RecordReader { pool, before: &before, keeps: false });
        let is_it = changes[0].is_none() && changes[1].is_none();
        match taken {
            ShortTake::Taken(Read::Copied(tensor)) => {
                let changed = changes[2..].iter().zip(tensor.bytes().chunks(8)).zip(data.chunks(8));
                for ((change, got), sent) in changed {
                    let expected = change.map_or(sent.to_vec(), |word| word.to_le_bytes().to_vec());
                    prop_assert_eq!(got, &expected[..sent.len()]);
                }
                prop_assert_eq!(tensor.bytes().len(), data.len());
            }
            ShortTake::Other => prop_assert!(!is_it),
            other => prop_assert!(false, "{:?}", other),
        }
        prop_assert!(honest.poll().1.is_none());
    }

    /// Any orders: no panic, and no byte outside the grant changes.
    #[test]
    fn no_order_makes_the_honest_side_panic_or_write_outside_a_grant(
        orders in proptest::collection::vec(
            (0u64..8, any::<[u64; 8]>(), any::<bool>(), 0u64..80),
            1..8,
        )
    ) {
        let (mut honest, mut hostile) = hostile_link();
        let before = tensor(&honest.pool, &[0x55; 256]);
        let grant = honest.granted(64);
        let after = tensor(&honest.pool, &[0x55; 256]);
        for (op, mut words, near, len) in orders {
            words[0] = words[0] & !0xFEFF | op;
            if near {
                // Near enough to be executed sometimes.
                words[0] = words[0] & 0x0FFF_FFFF_0000_01FF | len << 16;
                words[1] = u64::from(grant.key) | u64::from(grant.region) << 32;
                words[2] = grant.offset.wrapping_add(words[2] % 3).wrapping_sub(1);
                (words[3], words[4], words[5]) = (words[3] % 5000, len, words[5] % 9);
            }
            hostile.post_words(words);
            // Every other message is taken without a poll, if it is one.
            let HonestPeer { pool, port, link } = &mut honest;
            let reader = RecordReader { pool, before: &|_| {}, keeps: false };
            let _ = match len % 4 {
                0 => port.take_short(*link, |_: NextMessage<'_>| Some(())),
                2 => port.take_short(*link, reader).map(drop),
                _ => port.take_short(*link, |_: NextMessage<'_>| None),
            };
        }
        let (_, _) = honest.poll();
        prop_assert_eq!(before.bytes(), [0x55; 256]);
        prop_assert_eq!(after.bytes(), [0x55; 256]);
        prop_assert!(honest.port.revoke(honest.link, &grant).is_some());
    }
}

#[cfg(tensorwire_mutants)]
#[test]
fn each_bug_is_found() {
    use crate::mutants::{Mutant, assert_found};
    assert_found(Mutant::PlaceTakenTwice, loans_in_occupied_places_end_the_link);
}
