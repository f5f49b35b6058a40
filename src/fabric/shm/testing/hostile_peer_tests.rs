//! What a peer that shook hands like an honest one can do by writing what it likes into its segment.

use super::hostile_peer::{LANE, Rogue, Siege, Victim, besiege};
use super::{pool, tensor, tensor_mut};
use crate::fabric::shm::memory::order::{Order, Source, Target, Ticket};
use crate::fabric::shm::memory::ring::TAIL;
use crate::fabric::shm::memory::words::Store;
use crate::fabric::shm::wakeup::idle;
use crate::fabric::{Allowance, Completions, Event, LinkFailure, OpId, Port};
use crate::wire::{Grant, Immediate, ImmediateKind, Slot};
use proptest::prelude::*;
use std::sync::atomic::Ordering;

fn besieged() -> (Victim, Rogue) {
    besiege(&Siege::new())
}

impl Rogue {
    fn post(&mut self, order: Order) {
        let (header, body) = order.to_words();
        self.post_words(header, body);
    }
}

impl Victim {
    fn granted(&mut self, len: usize) -> Grant {
        let target = tensor_mut(&self.pool, len);
        self.port.grant(self.link, target).expect("room")
    }

    /// Polls until the link is down, or a few times; the events but for `Down`, and why it went down.
    fn poll(&mut self) -> (Vec<Event>, Option<LinkFailure>) {
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

    /// The link must go down for a broken rule, and the reason must say `text`.
    fn assert_broken(&mut self, text: &str) {
        match self.poll() {
            (events, Some(LinkFailure::Protocol(why))) => {
                assert!(why.contains(text), "{why}");
                assert!(events.iter().all(|event| matches!(event, Event::Failed { .. })), "{events:?}");
            }
            other => panic!("not refused: {other:?}"),
        }
    }
}

fn immediate() -> Immediate {
    Immediate { kind: ImmediateKind::Plain, generation: 0, slot: Slot::new(1).expect("fits") }
}

const SOURCE: Source = Source { region: 0, offset: 0, len: 8 };
const NOWHERE: Target = Target { region: 0, key: 0, offset: 0 };

#[test]
fn slots_that_make_no_sense_end_the_link() {
    let op = |op: u64| [op, 0, 0];
    let cases = [
        (op(0), "operation 0"),
        (op(200), "operation 200"),
        (op(1 | 225 << 16), "225 bytes of payload"),
        (op(2 | 0xFFFF << 16), "65535 bytes of payload"),
        (op(3 | 0x40 << 8), "flags 0x40"),
        (op(3 | 1 << 8 | 0xF000_0000 << 32), "kind 15"),
        (op(4), "no immediate"),
    ];
    for (header, text) in cases {
        let (mut victim, mut rogue) = besieged();
        rogue.post_words(header, [0; 4]);
        victim.assert_broken(text);
    }
}

#[test]
fn bulk_that_is_not_the_peers_to_name_ends_the_link_and_nothing_is_written() {
    let len = pool().region().len();
    let sources = [
        (Source { region: 9, ..SOURCE }, "its region 9, which it has not shared"),
        (Source { offset: len, ..SOURCE }, "8 bytes at"),
        (Source { offset: len - 7, ..SOURCE }, "8 bytes at"),
        (Source { offset: u64::MAX - 3, ..SOURCE }, "8 bytes at 18446744073709551612"),
    ];
    for (source, text) in sources {
        let (mut victim, mut rogue) = besieged();
        let grant = victim.granted(8);
        let target = Target::from(&grant);
        rogue.post(Order::Write { source, target, immediate: Some(immediate()) });
        victim.assert_broken(text);
        let target = victim.port.revoke(victim.link, &grant).expect("granted");
        assert_eq!(target.bytes(), [0; 8]);

        let (mut victim, mut rogue) = besieged();
        rogue.post(Order::Lend { source, index: 0, number: 1, immediate: immediate() });
        victim.assert_broken(text.trim_start_matches("its ").trim_end_matches("at"));
    }
}

#[test]
fn a_length_that_overflows_the_grants_end_is_refused() {
    let (mut victim, mut rogue) = besieged();
    let grant = victim.granted(8);
    let source = Source { len: u64::MAX, ..SOURCE };
    rogue.post(Order::Write { source, target: Target::from(&grant), immediate: None });
    victim.assert_broken("8 bytes at");
}

#[test]
fn loans_in_places_that_are_not_free_end_the_link() {
    let lend = |index, number| Order::Lend { source: SOURCE, index, number, immediate: immediate() };
    for (order, text) in [(lend(8, 1), "place 8 of a table of 8"), (lend(u64::MAX, 1), "of a table of 8")] {
        let (mut victim, mut rogue) = besieged();
        rogue.post(order);
        victim.assert_broken(text);
    }
    let (mut victim, mut rogue) = besieged();
    rogue.post(lend(0, 0));
    victim.assert_broken("number 0");

    let (mut victim, mut rogue) = besieged();
    rogue.post(lend(3, 1));
    let (held, down) = victim.poll();
    assert!(matches!(held[..], [Event::Lent { .. }]) && down.is_none());
    rogue.post(lend(3, 2));
    victim.assert_broken("another loan is still held");
    drop(held); // gives back into a segment whose link is gone
}

#[test]
fn answers_that_nobody_asked_for_end_the_link() {
    let (mut victim, mut rogue) = besieged();
    rogue.post(Order::Answer { source: SOURCE, ticket: Ticket { index: 0, number: 1 } });
    victim.assert_broken("not under way");

    for (len, text) in [(7, "a read of 8 bytes with 7"), (u64::MAX, "with 18446744073709551615")] {
        let (mut victim, mut rogue) = besieged();
        let target = tensor_mut(&victim.pool, 8);
        let grant = Grant { region: 0, key: 1, offset: 0, len: 8 };
        victim.port.read(victim.link, LANE, OpId(1), target, &grant).expect("posted");
        assert!(rogue.inc.peek().is_some());
        let Ok(Order::Read { ticket, .. }) = Order::from_words(rogue.inc.header(), || rogue.inc.words())
        else {
            panic!("not a read");
        };
        rogue.post(Order::Answer { source: Source { len, ..SOURCE }, ticket });
        victim.assert_broken(text);
    }
}

#[test]
fn a_flood_of_reads_is_bounded() {
    let (mut victim, mut rogue) = besieged();
    // The rogue never takes an answer: 8 fit in the ring, 8 may wait, and one is too many.
    for number in 0..17 {
        let ticket = Ticket { index: 0, number };
        while rogue.out.has_room() != Ok(true) {
            assert!(victim.poll().1.is_none());
        }
        rogue.post(Order::Read { exposed: NOWHERE, len: 0, ticket });
    }
    victim.assert_broken("more than 8 reads");
}

#[test]
fn to_have_taken_what_was_never_sent_ends_the_link() {
    let (mut victim, mut rogue) = besieged();
    rogue.out.post(12345, Order::Send { len: 0 }.to_words().0, &[]);
    victim.assert_broken("where");

    // The same on the line, which is read when something waits for it.
    let (mut victim, rogue) = besieged();
    let source = tensor(&victim.pool, &[1; 8]);
    let grant = Grant { region: 0, key: 1, offset: 0, len: 8 };
    victim.port.write(victim.link, LANE, OpId(1), &source, 0, 8, &grant, None).expect("posted");
    rogue.line.store(TAIL, 77, Ordering::Release);
    victim.assert_broken("it says it has taken 77 slots");
    assert!(source.is_unique());
}

#[test]
fn a_line_that_lies_while_the_ring_is_full_ends_the_link_at_the_next_post() {
    let (mut victim, rogue) = besieged();
    rogue.line.store(TAIL, 77, Ordering::Release);
    while victim.port.send(victim.link, LANE, b"x").is_ok() {}
    assert_eq!(victim.port.send(victim.link, LANE, b"x"), Err(crate::fabric::PostError::Down));
    victim.assert_broken("it says it has taken 77 slots");
}

#[test]
fn a_state_that_means_nothing_ends_the_link() {
    let (mut victim, rogue) = besieged();
    rogue.state.store(0, 0xABCD, Ordering::Release);
    victim.assert_broken("0xabcd");
}

#[test]
fn bytes_pulled_from_a_peer_that_has_left_meanwhile_are_not_delivered() {
    let (mut victim, mut rogue) = besieged();
    let grant = victim.granted(8);
    rogue.post(Order::Write { source: SOURCE, target: Target::from(&grant), immediate: Some(immediate()) });
    crate::fabric::shm::memory::state::leave(&rogue.state, &LinkFailure::Closed);
    let (events, down) = victim.poll();
    assert!(events.is_empty(), "{events:?}");
    assert_eq!(down, Some(LinkFailure::Closed));
}

#[test]
fn a_loan_that_was_never_taken_is_free_when_the_peer_leaves() {
    let (mut victim, mut rogue) = besieged();
    let source = tensor(&victim.pool, &[1; 8]);
    victim
        .port
        .lend(victim.link, LANE, OpId(1), &source, Allowance::unbounded(), immediate())
        .expect("posted");
    victim
        .port
        .lend(victim.link, LANE, OpId(2), &source, Allowance::unbounded(), immediate())
        .expect("posted");
    victim.port.detach(victim.link);
    assert!(!source.is_unique(), "the peer may still read it");
    // It took the first.
    rogue.inc.advance();
    rogue.inc.finish();
    crate::fabric::shm::memory::state::leave(&rogue.state, &LinkFailure::Closed);
    victim.port.detach(victim.link);
    assert!(!source.is_unique(), "the first is still out");
    rogue.leases.store(0, 1, Ordering::Release);
    victim.port.detach(victim.link);
    assert!(source.is_unique(), "the first came back, and the second was never taken");
}

#[test]
fn a_mark_that_means_nothing_rings_nowhere_that_matters() {
    let (mut victim, rogue) = besieged();
    for mark in [1, u64::MAX, 1 << 63 | 77 << 16, 1 << 63 | 0xFFFF] {
        rogue.state.store(idle::MARK, mark, Ordering::Release);
        victim.port.send(victim.link, LANE, b"x").expect("room");
    }
    assert!(victim.poll().1.is_none());
}

#[test]
fn rings_without_end_and_for_links_that_are_not_there_cost_only_time() {
    let (mut victim, mut rogue) = besieged();
    // The rogue has sent the victim's own doorbells as its own; so it has them.
    for place in 0..crate::fabric::shm::wakeup::doorbell::PLACES {
        rogue.bells.ring(idle::Bellpull { bell: 0, place });
    }
    assert!(!victim.port.arm(), "somebody rang");
    assert!(victim.poll().1.is_none());
    assert!(victim.port.arm(), "nothing was there");
    rogue.post(Order::Send { len: 0 });
    let (events, down) = victim.poll();
    assert!(matches!(events[..], [Event::Message(_)]) && down.is_none());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Any slots: no panic, and no byte outside the grant changes.
    #[test]
    fn no_slot_makes_the_victim_panic_or_write_where_it_granted_nothing(
        slots in proptest::collection::vec(
            (0u64..8, any::<[u64; 3]>(), any::<[u64; 4]>(), any::<bool>(), 0u64..80),
            1..8,
        )
    ) {
        let (mut victim, mut rogue) = besieged();
        let before = tensor(&victim.pool, &[0x55; 256]);
        let grant = victim.granted(64);
        let after = tensor(&victim.pool, &[0x55; 256]);
        for (op, mut header, mut body, near, len) in slots {
            header[0] = header[0] & !0xFEFF | op;
            if near {
                // Close enough to be carried out sometimes.
                header[0] = header[0] & 0x0FFF_FFFF_0000_01FF | len << 16;
                header[1] = u64::from(grant.key) | u64::from(grant.region) << 32;
                header[2] = grant.offset.wrapping_add(header[2] % 3).wrapping_sub(1);
                body = [body[0] % 5000, len, body[2] % 9, body[3]];
            }
            rogue.post_words(header, body);
        }
        let (_, _) = victim.poll();
        prop_assert_eq!(before.bytes(), [0x55; 256]);
        prop_assert_eq!(after.bytes(), [0x55; 256]);
        prop_assert!(victim.port.revoke(victim.link, &grant).is_some());
    }
}
