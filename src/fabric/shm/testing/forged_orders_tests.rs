//! A hostile peer forges each field of each order, and each word of its segment, one at a time and
//! in pairs. A model of the rules says what the peer gets for an order. The bytes of the honest
//! pool are compared as a whole.

use super::hostile_peer::{HonestPeer, HostilePeer, HostileSetup, connect_hostile_peer};
use super::hostile_peer_tests::immediate;
use super::{tensor, tensor_mut};
use crate::fabric::forging::{ForgedField, changes, forgeries, image};
use crate::fabric::shm::memory::order::{
    ORDER_WORDS, Order, OrderLoan, OrderSource, OrderTarget, PAYLOAD_BYTES, ReadTicket,
};
use crate::fabric::shm::memory::ring::{CREDITS, TAIL};
use crate::fabric::shm::wakeup::idle::IDLE_MARK;
use crate::fabric::words::{LoadWords, StoreWords};
use crate::fabric::{Event, LinkFailure, LoanPermit, MAX_LOAN_MESSAGE, MAX_LOANS, Port};
use crate::memory::{Tensor, TensorMut};
use crate::wire::{Grant, ShortMessage};
use std::sync::atomic::Ordering::{Relaxed, Release};

type Words = [u64; ORDER_WORDS];

/// Bytes of each grant, and of the part of it that an honest order names.
const GRANTED: u64 = 64;
const PART: u64 = 32;
/// The bytes of the hostile pool, and of the tensor that the honest side exposes.
const HOSTILE: u8 = 0x77;
const EXPOSED: u8 = 0x33;
/// The place and the number of a loan that the honest side holds.
const HELD: (u64, u64) = (3, 1);
/// What freed blocks of the pool may be filled with.
const FREED: [u8; 2] = [0, 0xA5];

/// Where a field is: its word, its first bit there, and its bits.
const PLACES: [(&str, usize, u32, u32); 13] = [
    ("operation", 0, 0, 8),
    ("flags", 0, 8, 8),
    ("length", 0, 16, 16),
    ("immediate", 0, 32, 32),
    ("key", 1, 0, 32),
    ("region", 1, 32, 16),
    ("source region", 1, 48, 16),
    ("offset", 2, 0, 64),
    ("source offset", 3, 0, 64),
    ("bytes", 4, 0, 64),
    ("index", 5, 0, 48),
    ("lent region", 5, 48, 16),
    ("number", 6, 0, 64),
];

fn place(name: &str) -> (usize, u32, u32) {
    let found = PLACES.iter().find(|(other, ..)| *other == name);
    found.map(|(_, word, shift, bits)| (*word, *shift, *bits)).expect("a field")
}

fn get(words: &Words, name: &str) -> u64 {
    let (word, shift, bits) = place(name);
    words[word] >> shift & u64::MAX >> (64 - bits)
}

fn set(words: &mut Words, name: &str, value: u64) {
    let (word, shift, bits) = place(name);
    let mask = u64::MAX >> (64 - bits) << shift;
    words[word] = words[word] & !mask | value << shift & mask;
}

/// What the peer gets for an order.
#[derive(Debug)]
enum Gets {
    /// The link ends.
    Nothing,
    Message,
    /// Bytes of an exposed tensor: from here, so many.
    Answer(u64, u64),
    /// Its bytes were written from here on, so many: those of its pool at this place, or those of
    /// the order.
    Wrote(u64, u64, Option<u64>),
    /// Its bytes were borrowed: from here, so many.
    Lent(u64, u64),
    /// Its bytes have answered the read of the honest side: those from here on.
    Read(u64),
}

/// A link on which the honest side has granted, exposed, asked for and borrowed something.
struct Scene {
    honest: HonestPeer,
    hostile: HostilePeer,
    granted: Grant,
    exposed: Grant,
    /// Granted no more. The tensor lies beside the others.
    revoked: (Grant, TensorMut),
    /// A read that waits, and the place of its target.
    read: (ReadTicket, u64),
    /// A read that was answered.
    answered: ReadTicket,
    _held: Vec<Event>,
}

fn scene(setup: &HostileSetup) -> Scene {
    let (mut honest, mut hostile) = connect_hostile_peer(setup);
    let revoked = honest.granted(GRANTED as usize);
    let tensor_back = honest.port.revoke(honest.link, &revoked).expect("granted");
    let granted = honest.granted(GRANTED as usize);
    let source = tensor(&honest.pool, &[EXPOSED; GRANTED as usize]);
    let exposed = honest.port.expose(honest.link, &source).expect("room");
    let ticket = |honest: &mut HonestPeer, hostile: &mut HostilePeer| {
        let target = tensor_mut(&honest.pool, PART as usize);
        let place = target.span().expect("in the pool").offset;
        let there = Grant { region: 0, key: 1, offset: 0, len: PART };
        honest.port.read(honest.link, target, &there).expect("posted");
        let first = hostile.inc.peek().expect("it was posted");
        let asked = Order::from_words(|k| hostile.inc.word(k));
        hostile.inc.advance(first);
        let Ok(Order::Read { ticket, .. }) = asked else { panic!("not a read: {asked:?}") };
        (ticket, place)
    };
    let (answered, _) = ticket(&mut honest, &mut hostile);
    let source = OrderSource { region: 0, offset: 0, len: PART };
    hostile.post(Order::Answer { source, ticket: answered });
    let loan = OrderLoan { source, index: HELD.0, number: HELD.1 };
    hostile.post(Order::Lend { loan, message: ShortMessage::from_u32(1) });
    let (held, down) = honest.poll();
    assert!(matches!(held[..], [Event::ReadDone { .. }, Event::Lent { .. }]) && down.is_none());
    let read = ticket(&mut honest, &mut hostile);
    Scene { honest, hostile, granted, exposed, revoked: (revoked, tensor_back), read, answered, _held: held }
}

impl Scene {
    /// Every order as an honest peer posts it, with the fields that it has.
    fn orders(&self) -> Vec<(Order, Vec<&'static str>)> {
        let part = |grant: &Grant| OrderTarget { offset: grant.offset + 8, ..OrderTarget::from(grant) };
        let (target, immediate) = (part(&self.granted), Some(immediate()));
        let source = OrderSource { region: 0, offset: 128, len: PART };
        let loan = OrderLoan { source, index: 7, number: 9 };
        let head = ["operation", "flags", "length", "immediate"];
        let of = |fields: &[&'static str]| [&head[..], fields].concat();
        let (to, from) = (["key", "region", "offset"], ["source region", "source offset", "bytes"]);
        let (read, exposed) = (self.read.0, part(&self.exposed));
        vec![
            (Order::Send { len: 4, first: 1 }, of(&[])),
            (Order::WriteInline { len: PART as usize, target, immediate }, of(&to)),
            (Order::Write { source, target, immediate }, of(&[to, from].concat())),
            (
                Order::Lend { loan, message: ShortMessage::from_u32(1) },
                of(&["lent region", "source offset", "bytes", "index", "number"]),
            ),
            (
                Order::Read { exposed, len: PART, ticket: ReadTicket { index: 5, number: 5 } },
                [&head[..1], &to, &["bytes", "index", "number"]].concat(),
            ),
            (Order::Answer { source, ticket: read }, [&head[..1], &from, &["index", "number"]].concat()),
        ]
    }

    /// Values of a field that mean something elsewhere.
    fn known(&self, name: &str, pool_len: u64, other: &Grant) -> Vec<u64> {
        let (granted, exposed, revoked) = (&self.granted, &self.exposed, &self.revoked.0);
        let longest = PAYLOAD_BYTES as u64;
        match name {
            "operation" => (1..8).collect(),
            "length" => vec![MAX_LOAN_MESSAGE as u64, 29, 52, 53, longest, longest + 1],
            "key" => [granted, exposed, revoked, other].map(|grant| grant.key.into()).to_vec(),
            "offset" => {
                let end = granted.offset + GRANTED;
                vec![granted.offset, exposed.offset, revoked.offset, end - PART, end - PART + 1]
            }
            "source offset" => vec![pool_len - PART, pool_len - PART + 1],
            "bytes" => vec![GRANTED - 8, GRANTED - 7, pool_len],
            "index" => {
                let places = MAX_LOANS as u64;
                vec![HELD.0, places - 1, places, self.answered.index.into(), self.read.0.index.into()]
            }
            "number" => vec![HELD.1, self.answered.number.into(), self.read.0.number.into()],
            _ => Vec::new(),
        }
    }

    /// What the rules give for these words.
    fn gets(&self, words: &Words, pool_len: u64) -> Gets {
        let field = |name| get(words, name);
        let within = |from: u64, len: u64, start: u64, room: u64| {
            from >= start && from.checked_add(len).is_some_and(|end| end <= start + room)
        };
        let is_of = |grant: &Grant, len| {
            let (key, region) = (u64::from(grant.key), u64::from(grant.region));
            (field("key"), field("region")) == (key, region)
                && within(field("offset"), len, grant.offset, GRANTED)
        };
        let (length, bytes, from) = (field("length"), field("bytes"), field("source offset"));
        let may_be_immediate = match field("flags") {
            0 => true,
            flags => flags == 1 && field("immediate") < 1 << 28,
        };
        let shared = |region| field(region) == 0 && within(from, bytes, 0, pool_len);
        let ticket = ReadTicket { index: words[5] as u32, number: words[6] as u32 };
        let gets = match field("operation") {
            1 => (length <= PAYLOAD_BYTES as u64).then_some(Gets::Message),
            2 => (length <= PAYLOAD_BYTES as u64
                && may_be_immediate
                && (length == 0 || is_of(&self.granted, length)))
            .then(|| Gets::Wrote(field("offset"), length, None)),
            3 => (may_be_immediate && (bytes == 0 || is_of(&self.granted, bytes) && shared("source region")))
                .then(|| Gets::Wrote(field("offset"), bytes, Some(from))),
            4 => {
                let (index, number) = (field("index"), field("number"));
                let is_free = index < MAX_LOANS as u64 && index != HELD.0 && number != 0;
                let is_good = length <= MAX_LOAN_MESSAGE as u64 && (bytes == 0 || shared("lent region"));
                (is_free && is_good).then_some(Gets::Lent(from, bytes))
            }
            5 => (bytes == 0 || is_of(&self.exposed, bytes)).then(|| Gets::Answer(field("offset"), bytes)),
            6 => (ticket == self.read.0 && bytes == PART && shared("source region"))
                .then_some(Gets::Read(from)),
            _ => None,
        };
        gets.unwrap_or(Gets::Nothing)
    }

    /// Posts an order. The honest side must give what the rules say, and nothing else. Returns
    /// whether that was something.
    fn post(mut self, words: Words, theirs: &[u8]) -> bool {
        let (before, pool_len) = (image(&self.honest.pool), theirs.len() as u64);
        let gets = self.gets(&words, pool_len);
        self.hostile.post_words(words);
        let (events, down) = self.honest.poll();
        let after = image(&self.honest.pool);
        let mut expected = before;
        let range = |from: u64, len: u64| from as usize..(from + len) as usize;
        let (target, answer) = (range(self.read.1, PART), self.hostile.inc.peek());
        let flagged = matches!(gets, Gets::Wrote(..)) && get(&words, "flags") == 1;
        match gets {
            Gets::Nothing => {
                assert!(matches!(down, Some(LinkFailure::Protocol(_))), "{down:?}, {events:?}");
                assert!(matches!(events[..], [Event::Failed]), "the read has failed: {events:?}");
                // Its target is freed.
                assert!(after[target.clone()].iter().all(|byte| FREED.contains(byte)), "it was written");
                expected[target.clone()].copy_from_slice(&after[target]);
                assert!(answer.is_none(), "it was answered");
                assert!(after == expected, "bytes were written that were not granted");
                return false;
            }
            Gets::Message => assert!(matches!(events[..], [Event::Message(_)]), "{events:?}"),
            Gets::Wrote(at, len, from) => {
                if len > 0 {
                    // The bytes of a long inline write are whatever is in the ring.
                    let came = &after[range(at, len)];
                    assert!(from.is_none_or(|from| came == &theirs[range(from, len)]), "other bytes came");
                    expected[range(at, len)].copy_from_slice(came);
                }
                match (&events[..], flagged) {
                    ([Event::Immediate { bytes, .. }], true) => assert_eq!(*bytes, len),
                    ([], false) => {}
                    _ => panic!("{events:?}"),
                }
            }
            Gets::Lent(from, len) => match &events[..] {
                [Event::Lent { bytes, .. }] if len > 0 => assert!(bytes.bytes() == &theirs[range(from, len)]),
                [Event::Lent { bytes, .. }] => assert!(bytes.bytes().is_empty()),
                _ => panic!("{events:?}"),
            },
            Gets::Read(from) => {
                let [Event::ReadDone { target: got }] = &events[..] else { panic!("{events:?}") };
                assert!(got.bytes() == &theirs[range(from, PART)]);
                expected[target].copy_from_slice(got.bytes());
            }
            Gets::Answer(at, len) => {
                let Ok(Order::Answer { source, .. }) = Order::from_words(|k| self.hostile.inc.word(k)) else {
                    panic!("no answer")
                };
                let offset = if len == 0 { 0 } else { at };
                assert_eq!(source, OrderSource { region: 0, offset, len });
                assert!(answer.is_some() && events.is_empty());
            }
        }
        assert!(down.is_none(), "{down:?}");
        assert!(after == expected, "bytes were written that were not granted");
        true
    }
}

/// A hostile pool that is full of [`HOSTILE`], and what keeps it so.
fn fill(setup: &HostileSetup) -> Vec<Tensor> {
    let sizes = (9..20).rev().map(|bits| 1 << bits);
    let mut all = Vec::new();
    for size in sizes {
        let shape = crate::wire::Shape::new(&[size]).expect("a shape");
        let meta = crate::wire::TensorMeta::new(crate::wire::DType::U8, shape).expect("meta");
        if let Ok(mut tensor) = setup.hostile_pool.zeroed(meta) {
            tensor.bytes_mut().fill(HOSTILE);
            all.push(tensor.freeze());
        }
    }
    all
}

#[test]
#[ignore = "takes long: tests/nightly"]
fn a_peer_that_forges_any_field_of_any_order_gets_what_it_was_granted_and_nothing_else() {
    let setup = HostileSetup::new();
    let _full = fill(&setup);
    let theirs = image(&setup.hostile_pool);
    let pool_len = theirs.len() as u64;
    let (mut neighbour, _its_peer) = connect_hostile_peer(&setup);
    let other = neighbour.granted(GRANTED as usize);
    for kind in 0..6 {
        let names = scene(&setup).orders().swap_remove(kind).1;
        let fields = |scene: &Scene, words: &Words| -> Vec<ForgedField> {
            let field = |name: &&'static str| ForgedField {
                name,
                bits: place(name).2,
                honest: get(words, name),
                known: scene.known(name, pool_len, &other),
            };
            names.iter().map(field).collect()
        };
        let honest = |scene: &Scene| scene.orders().swap_remove(kind).0.to_words();
        let all = {
            let scene = scene(&setup);
            forgeries(&fields(&scene, &honest(&scene)))
        };
        let mut outcomes = [0, 0];
        for forgery in all {
            let scene = scene(&setup);
            let mut words = honest(&scene);
            let Some(changes) = changes(&fields(&scene, &words), &forgery) else { continue };
            changes.iter().for_each(|(name, value)| set(&mut words, name, *value));
            let run = std::panic::AssertUnwindSafe(|| scene.post(words, &theirs));
            match std::panic::catch_unwind(run) {
                Ok(gets) => outcomes[usize::from(gets)] += 1,
                Err(_) => panic!("{:?} with {changes:#x?}", Order::from_words(|k| words[k])),
            }
        }
        println!("order {kind}: {} refused, {} obeyed", outcomes[0], outcomes[1]);
        assert!(outcomes.iter().all(|count| *count > 0), "{outcomes:?} of order {kind}");
    }
}

/// A word that the peer owns and this side reads, and what an honest peer has there.
fn shared_words(scene: &Scene) -> Vec<ForgedField> {
    let hostile = &scene.hostile;
    let field = |name, honest, known| ForgedField { name, bits: 64, honest, known };
    let next = hostile.out.next() + 1;
    let sequences = vec![next, next & u64::from(u32::MAX), next & 0x7FFF_FFFF, next | 1 << 31];
    let taken = hostile.line.load(TAIL, Relaxed);
    vec![
        field("state", 0, (2..6).collect()),
        field("idle mark", 0, vec![1 << 63, 1 << 63 | 77 << 16, 1 << 63 | 0xFFFF]),
        field("taken orders", taken, vec![taken + 2, taken + 3]),
        field("credits", 0, vec![u64::from(u32::MAX)]),
        field("return", 0, vec![2]),
        field("slot 0", hostile.ring.load(0, Relaxed), sequences.clone()),
        field("slot 1", hostile.ring.load(8, Relaxed), sequences),
    ]
}

impl Scene {
    fn forge_word(&mut self, name: &str, value: u64) {
        let Scene { hostile, .. } = self;
        let (words, at) = match name {
            "state" => (&hostile.state, 0),
            "idle mark" => (&hostile.state, IDLE_MARK),
            "taken orders" => (&hostile.line, TAIL),
            "credits" => (&hostile.line, CREDITS),
            "return" => (&hostile.loan_table, 0),
            "slot 0" => (&hostile.ring, 0),
            _ => (&hostile.ring, 8),
        };
        words.store(at, value, Release);
    }
}

#[test]
fn a_peer_that_forges_any_word_of_its_segment_ends_its_own_link_at_most() {
    let setup = HostileSetup::new();
    let begin = || {
        let mut scene = scene(&setup);
        let HonestPeer { pool, port, link } = &mut scene.honest;
        let source = tensor(pool, &[5; PART as usize]);
        let there = Grant { region: 0, key: 1, offset: 0, len: PART };
        port.write(*link, &source, PART, &there, None).expect("posted");
        let permit = &mut Some(LoanPermit::unbounded());
        port.lend(*link, &mut Some(source.clone()), permit, &ShortMessage::from_u32(1)).expect("posted");
        (scene, source)
    };
    let all = forgeries(&shared_words(&begin().0));
    for forgery in all {
        let (mut scene, source) = begin();
        let Some(changes) = changes(&shared_words(&scene), &forgery) else { continue };
        let mut expected = image(&scene.honest.pool);
        changes.iter().for_each(|(name, value)| scene.forge_word(name, *value));
        let (events, down) = scene.honest.poll();
        let ended = events
            .iter()
            .filter(|event| matches!(event, Event::Done | Event::Failed | Event::ReadDone { .. }));
        // A write, a read and a loan.
        let ended = ended.count();
        let after = image(&scene.honest.pool);
        match &down {
            None => assert!(ended < 3, "{events:?} with {changes:#x?}"),
            Some(why) => {
                use LinkFailure::{Closed, NoReceive, PeerResources, Protocol};
                let is_the_peers = matches!(why, Protocol(_) | Closed | NoReceive | PeerResources);
                assert!(is_the_peers && ended == 3, "{why:?}, {events:?} with {changes:#x?}");
                let target = scene.read.1 as usize..(scene.read.1 + PART) as usize;
                assert!(after[target.clone()].iter().all(|byte| FREED.contains(byte)), "{changes:#x?}");
                expected[target.clone()].copy_from_slice(&after[target]);
            }
        }
        assert!(after == expected && source.bytes() == [5; PART as usize], "written: {changes:#x?}");
        let HonestPeer { port, link, .. } = &mut scene.honest;
        assert_eq!(port.send(*link, b"x").is_ok(), down.is_none(), "{changes:#x?}");
    }
}
