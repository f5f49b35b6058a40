//! A link with a hostile peer.

use super::*;
use crate::fabric::shm::{ShmFabric, ShmOptions, ShmPort};
use crate::fabric::{Completions, Endpoint, Event, Fabric, LinkOptions, Port, Role};
use crate::memory::{Pool, PoolOptions, Region, RegionOptions};
use crate::telemetry::{Counter, CountersWriter};
use crate::wire::message::fragment::Assembler;
use crate::wire::message::pack::{is_packed, unpack};
use crate::wire::message::{
    Follows, MAX_STATUS_TEXT, Message, MetaRef, TensorRequest, VERSION, VersionedMeta,
};
use crate::wire::{Code, DType, Grant, Immediate, ImmediateKind, Shape, Slot, TaskId};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

mod checksum;
mod loans;
mod lost_values;
mod meta_slots;
mod packing;
mod standing;
mod standing_capacity;

const DEPTH: u32 = 16;
const HERE: &str = "/job:a/replica:0/task:0/device:CPU:0";
const THERE: &str = "/job:b/replica:0/task:0/device:CPU:0";

/// The side under test, and a peer that the test plays by hand.
struct Scene {
    links: Links<ShmPort, u32>,
    link: LinkId,
    peer: ByHand,
}

struct ByHand {
    port: ShmPort,
    link: LinkId,
    pool: Pool,
    completions: Completions,
    slots: VecDeque<Vec<u8>>,
    unpacked: VecDeque<Vec<u8>>,
}

fn pool() -> Pool {
    let region = Region::create(0, &RegionOptions::new(1 << 20)).expect("1 MiB");
    Pool::new(region, PoolOptions::default()).expect("a pool")
}

fn task(job: &str) -> TaskId {
    TaskId::new(job, 0).expect("a job name")
}

fn scene() -> Scene {
    scene_with(LinkSettings {
        small_tensor_bytes: 128,
        max_requests: 4,
        max_routes: 4,
        validate: false,
        protocol: TensorProtocol::Requests,
    })
}

fn scene_with(settings: LinkSettings) -> Scene {
    let (ours, theirs) = (pool(), pool());
    let fabrics = [&ours, &theirs].map(|pool| ShmFabric::new(pool, ShmOptions::default()).expect("a fabric"));
    let options = LinkOptions { depth: DEPTH, receives: 0, generation: 0 };
    let [first, second] = [0, 1].map(|side: usize| fabrics[side].endpoint(0, &options).expect("an endpoint"));
    let (address, own) = (second.address().to_vec(), first.address().to_vec());
    let timeout = Duration::from_secs(5);
    let thread =
        std::thread::spawn(move || second.connect(Role::Acceptor, &own, timeout).expect("connected"));
    let first = first.connect(Role::Initiator, &address, timeout).expect("connected");
    let second = thread.join().expect("no panic");
    let [port, mut by_hand] = [0, 1].map(|side: usize| fabrics[side].port().expect("a port"));
    let mut links = Links::new(port, ours, CountersWriter::new(), 1);
    let identity =
        LinkIdentity { local: task("a"), local_incarnation: 1, peer: task("b"), peer_incarnation: 2 };
    let link = links.attach(first, identity, settings).expect("attached");
    let theirs_link = by_hand.attach(second).expect("attached");
    by_hand.post_receives(theirs_link, DEPTH);
    let completions = Completions::with_capacity(16);
    let mut peer = ByHand {
        port: by_hand,
        link: theirs_link,
        pool: theirs,
        completions,
        slots: VecDeque::new(),
        unpacked: VecDeque::new(),
    };
    let ping = peer.next();
    assert!(ping[0] == 1, "the first message is a ping");
    Scene { links, link, peer }
}

/// The messages in a slot, one or a pack.
fn messages_in(slot: &[u8]) -> Vec<Vec<u8>> {
    match is_packed(slot) {
        true => unpack(slot).expect("a pack").map(<[u8]>::to_vec).collect(),
        false => vec![slot.to_vec()],
    }
}

impl ByHand {
    fn say(&mut self, message: &Message<'_>) {
        let mut bytes = Vec::new();
        message.encode(&mut bytes);
        self.say_bytes(&bytes);
    }

    fn say_bytes(&mut self, bytes: &[u8]) {
        self.port.send(self.link, bytes).expect("room");
    }

    /// The next message, alone or from a pack.
    fn next(&mut self) -> Vec<u8> {
        if self.unpacked.is_empty() {
            let slot = self.next_slot();
            self.unpacked.extend(messages_in(&slot));
        }
        self.unpacked.pop_front().expect("a slot has one at least")
    }

    /// The contents of the next slot.
    fn next_slot(&mut self) -> Vec<u8> {
        let end = Instant::now() + Duration::from_secs(5);
        loop {
            if let Some(message) = self.slots.pop_front() {
                self.port.post_receives(self.link, 1);
                return message;
            }
            assert!(Instant::now() < end, "no message came");
            self.port.poll(&mut self.completions);
            let come = self.completions.drain();
            let messages = come.filter(|(completion, _)| matches!(completion.event, Event::Message(_)));
            self.slots.extend(messages.map(|(_, bytes)| bytes.to_vec()));
            self.completions.clear();
        }
    }

    fn route(&mut self, number: u32, incarnation: u64, source: &str, destination: &str) {
        self.say(&Message::Route { number, incarnation, source, destination, edge: "x" });
    }

    fn ask(&mut self, slot: u32, route: u32) -> RequestId {
        let request = RequestId { slot: Slot::new(slot).expect("20 bits"), generation: 0 };
        self.say(&Message::Request(TensorRequest {
            request,
            route,
            step: 1,
            frame: 0,
            iteration: 0,
            meta_version: 0,
            timeout_ms: u32::MAX,
            borrow: false,
            validate: false,
            grant: None,
        }));
        request
    }

    fn immediate(&mut self, kind: ImmediateKind, request: RequestId) {
        let nowhere = Grant { region: 0, key: 0, offset: 0, len: 0 };
        let immediate = Immediate { kind, generation: request.generation, slot: request.slot };
        self.port.write_inline(self.link, &[], &nowhere, Some(immediate)).expect("room");
    }
}

impl Scene {
    fn events(&mut self) -> Vec<LinkEvent<u32>> {
        while self.links.poll() > 0 {}
        std::iter::from_fn(|| self.links.next_event()).collect()
    }

    /// Waits for the only event.
    fn event(&mut self) -> LinkEvent<u32> {
        let mut events = self.events();
        assert_eq!(events.len(), 1, "{events:?}");
        events.remove(0)
    }

    /// Requests a tensor and lets the peer see the request.
    fn request(&mut self) -> RequestId {
        self.request_as(Destination::Alloc)
    }

    /// Requests a tensor with this destination and lets the peer see the request.
    fn request_as(&mut self, destination: Destination) -> RequestId {
        self.links.request(self.link, key(1), destination, u32::MAX, 77).expect("sent");
        loop {
            if let Message::Request(request) = Message::decode(&self.peer.next()).expect("a message") {
                return request.request;
            }
        }
    }

    /// Checks that the link went down for a reason that contains `part`, and that the waiter got
    /// it.
    fn expect_told(&mut self, part: &str) {
        let events = self.events();
        let LinkEvent::Down { failure: LinkFailure::Protocol(why), waiters, .. } = &events[0] else {
            panic!("{part}: {events:?}")
        };
        assert!(why.contains(part), "{why}");
        assert_eq!(waiters.as_slice(), [77]);
        drop(events);
        assert!(self.links.pool().is_empty(), "{part}: nothing leaked");
    }

    /// Checks that the link went down for a reason that contains `part`.
    fn expect_violation(&mut self, part: &str) {
        let events = self.events();
        let down = events.iter().find_map(|event| match event {
            LinkEvent::Down { failure: LinkFailure::Protocol(why), .. } => Some(why.clone()),
            _ => None,
        });
        let why = down.unwrap_or_else(|| panic!("the link is not down: {events:?}"));
        assert!(why.contains(part), "{why}");
        assert!(self.links.pool().is_empty(), "nothing leaked");
    }

    fn count(&self, counter: Counter) -> u64 {
        self.links.counters().counters().get(counter)
    }
}

fn key(step: u64) -> TensorKey {
    let edge = Arc::new(EdgeName::new(THERE, HERE, "y").expect("edge"));
    TensorKey { edge, step, frame: 0, iteration: 0 }
}

fn meta(dtype: DType, dims: &[u64]) -> VersionedMeta {
    let shape = Shape::new(dims).expect("shape");
    VersionedMeta {
        version: 1,
        placement: Placement::POOL,
        meta: TensorMeta::new(dtype, shape).expect("meta"),
    }
}

#[test]
fn a_ping_of_another_version_ends_the_link_with_both_versions() {
    let mut scene = scene();
    scene.peer.say(&Message::Ping { version: VERSION + 1, nonce: 0 });
    let other = VERSION + 1;
    scene.expect_violation(&format!("speaks version {other} of the protocol, this side version {VERSION}"));
}

#[test]
fn an_answer_to_a_ping_that_was_not_sent_ends_the_link() {
    let mut scene = scene();
    scene.peer.say(&Message::Pong { nonce: 12345 });
    scene.expect_violation("a ping that was not sent");
}

#[test]
fn bytes_that_are_no_message_end_the_link() {
    for (bytes, part) in [
        (&[][..], "ends after 0 bytes"),
        (&[99], "messages of type 99"),
        (&[9, 0, 0], "ends after 3 bytes"),
        (&[9, 0, 0, 0, 0, 1], "1 bytes too many"),
        (&[9, 0, 0, 0, 255], "as its request"),
        (&[12, 1, 0, 0], "has no data"),
        (&[12, 1, 255, 255, 255, 255, 0], "at most 524352"),
        (&[12, 0, 9, 0, 0, 0, 0], "out of order"),
    ] {
        let mut scene = scene();
        scene.peer.say_bytes(bytes);
        scene.expect_violation(part);
    }
}

#[test]
fn messages_behind_a_violation_are_ignored() {
    let mut scene = scene();
    scene.peer.route(0, 1, HERE, THERE);
    scene.peer.say_bytes(&[99]);
    scene.peer.ask(0, 0);
    let events = scene.events();
    assert!(matches!(events[..], [LinkEvent::Down { .. }]), "{events:?}");
}

#[test]
fn a_message_between_fragments_of_another_ends_the_link() {
    let mut scene = scene();
    scene.peer.say_bytes(&[12, 1, 9, 0, 0, 0, 1]);
    scene.peer.say(&Message::RouteDrop { number: 1 });
    scene.expect_violation("between the fragments");
}

#[test]
fn a_request_on_a_route_that_was_not_announced_ends_the_link() {
    let mut scene = scene();
    scene.peer.ask(0, 5);
    scene.expect_violation("names route 5");
}

#[test]
fn a_route_announced_twice_or_dropped_unknown_ends_the_link() {
    let mut twice = scene();
    twice.peer.route(1, 1, HERE, THERE);
    twice.peer.route(1, 1, HERE, THERE);
    twice.expect_violation("announced twice");
    let mut unknown = scene();
    unknown.peer.say(&Message::RouteDrop { number: 3 });
    unknown.expect_violation("never announced");
}

#[test]
fn too_many_routes_end_the_link() {
    let mut scene = scene();
    for number in 0..5 {
        scene.peer.route(number, 1, HERE, THERE);
    }
    scene.expect_violation("more than 4 routes");
}

#[test]
fn a_request_for_another_life_or_another_task_is_refused_by_name() {
    for (incarnation, source, destination, code, part) in [
        (9, HERE, THERE, Code::FailedPrecondition, "incarnation 0000000000000009 of a/0, which is gone"),
        (1, THERE, THERE, Code::InvalidArgument, "does not start at a/0"),
        (1, HERE, HERE, Code::PermissionDenied, "does not end at b/0"),
        (1, "nonsense", THERE, Code::InvalidArgument, "nonsense"),
    ] {
        let mut scene = scene();
        scene.peer.route(1, incarnation, source, destination);
        let request = scene.peer.ask(0, 1);
        assert!(scene.events().is_empty(), "the layer above is not bothered");
        let answer = scene.peer.next();
        match Message::decode(&answer).expect("a message") {
            Message::Error { request: refused, status } => {
                assert_eq!((refused, status.code), (request, code));
                assert!(status.message.contains(part), "{}", status.message);
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_request_in_a_slot_that_is_in_use_is_not_served_twice() {
    let mut scene = scene();
    scene.peer.route(1, 1, HERE, THERE);
    scene.peer.ask(2, 1);
    assert!(matches!(scene.event(), LinkEvent::Requested { .. }));
    scene.peer.ask(2, 1);
    scene.expect_violation("request slot 2 (generation 0) is in use");
}

#[test]
fn more_requests_than_the_limit_are_refused_and_the_rest_go_on() {
    let mut scene = scene();
    scene.peer.route(1, 1, HERE, THERE);
    for slot in 0..5 {
        scene.peer.ask(slot, 1);
    }
    assert_eq!(scene.events().len(), 4);
    match Message::decode(&scene.peer.next()).expect("a message") {
        Message::Error { request, status } => {
            assert_eq!((request.slot.index(), status.code), (4, Code::ResourceExhausted));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_re_request_must_follow_meta_data_and_grant_its_length() {
    let grant = Grant { region: 0, key: 0, offset: 0, len: 999 };
    let request = RequestId { slot: Slot::new(0).expect("20 bits"), generation: 0 };
    let mut nothing = scene();
    nothing.peer.say(&Message::ReRequest { request, grant });
    nothing.expect_violation("slot 0, which is free");
    let mut early = scene();
    early.peer.route(1, 1, HERE, THERE);
    early.peer.ask(0, 1);
    early.peer.say(&Message::ReRequest { request, grant });
    early.expect_violation("has no meta-data yet");
    let mut short = scene();
    short.peer.route(1, 1, HERE, THERE);
    short.peer.ask(0, 1);
    let LinkEvent::Requested { peer_request, .. } = short.event() else { panic!("not asked") };
    let tensor = short.links.pool().zeroed(meta(DType::U8, &[1000]).meta).expect("room").freeze();
    assert!(matches!(short.links.serve(peer_request, Value::Tensor(tensor), 7), ServeOutcome::Pinned));
    short.peer.say(&Message::ReRequest { request, grant });
    let events = short.events();
    assert!(matches!(&events[0], LinkEvent::PutBack { .. }), "the value is not lost: {events:?}");
    assert!(matches!(&events[1], LinkEvent::Down { failure: LinkFailure::Protocol(_), .. }), "{events:?}");
}

#[test]
fn a_cancel_of_anything_is_acknowledged() {
    let mut scene = scene();
    let request = RequestId { slot: Slot::new(9).expect("20 bits"), generation: 200 };
    scene.peer.say(&Message::Cancel { request });
    assert!(scene.events().is_empty());
    assert_eq!(Message::decode(&scene.peer.next()), Ok(Message::CancelAck { request }));
}

#[test]
fn a_cancel_withdraws_a_waiting_request_and_puts_a_pinned_value_back() {
    let mut scene = scene();
    scene.peer.route(1, 1, HERE, THERE);
    let request = scene.peer.ask(0, 1);
    assert!(matches!(scene.event(), LinkEvent::Requested { .. }));
    scene.peer.say(&Message::Cancel { request });
    assert!(
        matches!(scene.event(), LinkEvent::Withdrawn { peer_request, .. } if peer_request.request == request)
    );
    let request = scene.peer.ask(1, 1);
    let LinkEvent::Requested { peer_request, .. } = scene.event() else { panic!("not asked") };
    let tensor = scene.links.pool().zeroed(meta(DType::U8, &[1000]).meta).expect("room").freeze();
    scene.links.serve(peer_request, Value::Tensor(tensor), 7);
    scene.peer.say(&Message::Cancel { request });
    assert!(matches!(scene.event(), LinkEvent::PutBack { value: Value::Tensor(_), number: 7, .. }));
}

#[test]
fn answers_for_an_earlier_use_of_a_slot_are_dropped_and_counted() {
    let mut scene = scene();
    let request = scene.request();
    let stale = RequestId { generation: request.generation.wrapping_sub(1), ..request };
    let beyond = RequestId { slot: Slot::new(1_000_000).expect("20 bits"), ..request };
    for id in [stale, beyond] {
        scene.peer.immediate(ImmediateKind::Plain, id);
        scene.peer.immediate(ImmediateKind::Dead, id);
        scene.peer.say(&Message::Response { request: id, meta: MetaRef::Cached(1), data: &[] });
        scene.peer.say(&Message::Meta {
            request: id,
            follows: Follows::ReRequest,
            meta: meta(DType::U8, &[1]),
        });
        scene.peer.say(&Message::CancelAck { request: id });
        assert!(scene.events().is_empty());
    }
    assert_eq!(scene.count(Counter::StaleGenerations), 10);
    scene.peer.immediate(ImmediateKind::Dead, request);
    assert!(matches!(scene.event(), LinkEvent::Arrived { waiter: 77, received: Received::Dead(None), .. }));
}

#[test]
fn a_write_that_was_not_granted_ends_the_link() {
    let mut scene = scene();
    let request = scene.request();
    scene.peer.immediate(ImmediateKind::Plain, request);
    scene.expect_violation("another length than was granted");
}

#[test]
fn an_invalid_answer_ends_the_link_and_the_waiter() {
    type Say = fn(&mut ByHand, RequestId);
    let cases: [(Say, &str); 6] = [
        (|peer, request| peer.say(&Message::CancelAck { request }), "an acknowledgement of a cancel"),
        (|peer, request| peer.immediate(ImmediateKind::Stripe, request), "not striped"),
        (|peer, request| peer.immediate(ImmediateKind::Lend, request), "without a loan"),
        (
            |peer, request| peer.say(&Message::Response { request, meta: MetaRef::Cached(7), data: &[] }),
            "meta-data 7",
        ),
        (
            |peer, request| {
                let meta = MetaRef::New(meta(DType::F32, &[3]));
                peer.say(&Message::Response { request, meta, data: &[0; 11] });
            },
            "a response has 11 bytes for f32[3]",
        ),
        (
            |peer, request| {
                let shape = Shape::new(&[3]).expect("shape");
                let meta = TensorMeta::serialized(DType::String, shape, 12).expect("meta");
                let meta = MetaRef::New(VersionedMeta { version: 1, placement: Placement::POOL, meta });
                peer.say(&Message::Response { request, meta, data: &[0; 11] });
            },
            "a response has 11 bytes for string[3] (12 bytes serialised)",
        ),
    ];
    for (say, part) in cases {
        let mut scene = scene();
        let request = scene.request();
        say(&mut scene.peer, request);
        scene.expect_told(part);
    }
}

#[test]
fn a_peer_that_requests_without_end_and_takes_nothing_loses_the_link() {
    let mut scene = scene();
    let mut bytes = Vec::new();
    Message::Ping { version: VERSION, nonce: 0 }.encode(&mut bytes);
    for _ in 0..100_000 {
        if scene.peer.port.send(scene.peer.link, &bytes).is_err() {
            scene.peer.port.poll(&mut scene.peer.completions);
            scene.peer.completions.clear();
        }
        scene.links.poll();
        if let Some(LinkEvent::Down { failure: LinkFailure::Protocol(why), .. }) = scene.links.next_event() {
            assert!(why.contains("takes nothing"), "{why}");
            return;
        }
    }
    panic!("the link is still up");
}

/// A peer that takes no message requests again and again, and each request is refused with half a
/// MiB of the letter that `text` gives. Returns the number of requests until the link went down, or
/// `times`, and the reason.
fn refused_with(text: impl Fn(usize) -> u8, times: usize) -> (usize, Option<String>) {
    let mut scene = scene();
    scene.peer.route(0, 1, HERE, THERE);
    for time in 0..times {
        scene.peer.port.poll(&mut scene.peer.completions);
        scene.peer.completions.clear();
        scene.peer.ask(0, 0);
        for event in scene.events() {
            match event {
                LinkEvent::Requested { peer_request, .. } => {
                    let message = char::from(text(time)).to_string().repeat(MAX_STATUS_TEXT);
                    let details = message.clone().into_bytes();
                    let status = Status { details, ..Status::new(Code::Internal, message) };
                    scene.links.refuse(peer_request, status);
                }
                LinkEvent::Down { failure: LinkFailure::Protocol(why), .. } => return (time, Some(why)),
                _ => {}
            }
        }
    }
    (times, None)
}

#[test]
fn long_answers_that_are_not_taken_end_the_link_before_they_take_much_memory() {
    let (times, why) = refused_with(|time| b'a' + (time % 2) as u8, 1000);
    let why = why.expect("the link is still up");
    assert!(why.contains("takes nothing") && why.contains("bytes of long texts"), "{why}");
    assert!((100..200).contains(&times), "it went down after {times}: {why}");
}

#[test]
fn equal_long_answers_take_little_memory() {
    assert_eq!(refused_with(|_| b'a', 400), (400, None));
}

#[test]
fn long_answers_that_waited_come_each_with_its_request() {
    let mut scene = scene();
    scene.peer.route(0, 1, HERE, THERE);
    let status = Status::new(Code::Internal, "x".repeat(5000));
    let asked: Vec<_> = (0..3)
        .map(|slot| {
            let request = scene.peer.ask(slot, 0);
            let LinkEvent::Requested { peer_request, .. } = scene.event() else {
                panic!("a request was sent")
            };
            scene.links.refuse(peer_request, status.clone());
            request
        })
        .collect();
    assert!(scene.links.load().backlog > 1, "they wait");
    let (mut assembler, mut taken) = (Assembler::default(), 0);
    for request in asked {
        let answer = loop {
            scene.links.poll();
            let slot = scene.peer.next_slot();
            taken += 1;
            scene.peer.port.publish_credits(scene.peer.link, taken);
            if let Some(whole) = assembler.push(&slot).expect("a fragment") {
                break whole.to_vec();
            }
        };
        let expected = Message::Error { request, status: status.clone() };
        assert_eq!(Message::decode(&answer).expect("a message"), expected);
    }
    assert_eq!(scene.links.load().backlog, 0);
}

#[test]
fn credits_that_came_before_the_port_is_armed_are_used_before_any_sleep() {
    let mut scene = scene();
    scene.peer.route(0, 1, HERE, THERE);
    let mut waiting = 0;
    // The peer takes no message until an answer is queued.
    while scene.links.load().backlog == 0 {
        scene.peer.ask(0, 0);
        let LinkEvent::Requested { peer_request, .. } = scene.event() else { panic!("a request was sent") };
        scene.links.refuse(peer_request, Status::new(Code::NotFound, "no"));
        waiting += 1;
        assert!(waiting < 10 * DEPTH, "answers always leave");
    }
    (1..waiting).for_each(|_| drop(scene.peer.next()));
    while scene.links.poll() > 0 {}
    // As if between the last poll and the arming of the port.
    scene.peer.port.publish_credits(scene.peer.link, waiting);
    assert!(!scene.links.arm(), "an answer can leave");
    assert_eq!(scene.links.load().backlog, 0);
    scene.peer.next();
}
