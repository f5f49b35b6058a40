//! A link with a hostile peer.

use super::*;
use crate::fabric::shm::{ShmFabric, ShmOptions, ShmPort};
use crate::fabric::{Completions, Endpoint, Event, Fabric, LinkOptions, Port, Role};
use crate::link::windows::WindowRefusal;
use crate::memory::{Pool, PoolOptions, Region, RegionOptions};
use crate::protocol::ToReceiver;
use crate::telemetry::{Counter, CountersWriter};
use crate::wire::message::fragment::Assembler;
use crate::wire::message::pack::{is_packed, unpack};
use crate::wire::message::{MAX_STATUS_TEXT, Message, VERSION};
use crate::wire::{Code, EdgeId, TaskId, Time};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

mod packing;

const DEPTH: u32 = 16;

/// The side under test, and a peer that the test plays by hand.
struct Scene {
    links: Links<ShmPort>,
    link: LinkId,
    peer: ByHand,
}

struct ByHand {
    port: ShmPort,
    link: LinkId,
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
    let mut links = Links::new(port, ours, CountersWriter::new());
    let identity =
        LinkIdentity { local: task("a"), local_incarnation: 1, peer: task("b"), peer_incarnation: 2 };
    let settings =
        LinkSettings { small_tensor_bytes: 128, validate: false, borrow: false, max_ready_bytes: 1 << 20 };
    let link = links.attach(first, identity, settings).expect("attached");
    let theirs_link = by_hand.attach(second).expect("attached");
    by_hand.post_receives(theirs_link, DEPTH);
    let completions = Completions::with_capacity(16);
    let mut peer = ByHand {
        port: by_hand,
        link: theirs_link,
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
}

impl Scene {
    fn events(&mut self) -> Vec<LinkEvent> {
        while self.links.poll() > 0 {}
        std::iter::from_fn(|| self.links.next_event()).collect()
    }

    /// Tells the peer about an edge.
    fn tell(&mut self, message: ToReceiver<Value, WindowRefusal>) {
        self.links.window_to_receiver(self.link, message);
        // Ends the batch that a poll may have begun.
        self.links.next_event();
    }

    fn refuse(&mut self, number: u32, status: &Status) {
        self.tell(ToReceiver::Refused { edge: edge(number), error: status.clone().into() });
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

fn edge(number: u32) -> EdgeId {
    EdgeId { number, generation: 1 }
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
        (&[45, 0, 0], "ends after 3 bytes"),
        (&[45, 0, 0, 0, 0, 1], "1 bytes too many"),
        (&[42, 255], "as its flags"),
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
    scene.peer.say_bytes(&[99]);
    scene.peer.say(&Message::Resumed);
    let events = scene.events();
    assert!(matches!(events[..], [LinkEvent::Down { .. }]), "{events:?}");
    assert!(scene.links.next_window().is_none());
}

#[test]
fn a_message_between_fragments_of_another_ends_the_link() {
    let mut scene = scene();
    scene.peer.say_bytes(&[12, 1, 9, 0, 0, 0, 1]);
    scene.peer.say(&Message::Resumed);
    scene.expect_violation("between the fragments");
}

#[test]
fn a_peer_that_asks_without_end_and_takes_nothing_loses_the_link() {
    let mut scene = scene();
    let mut bytes = Vec::new();
    Message::Ping { version: VERSION, nonce: 0 }.encode(&mut bytes);
    for _ in 0..300_000 {
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

/// A peer takes no message, and each is half a MiB of the letter that `text` gives. Returns the
/// number of messages until the link went down, or `times`, and the reason.
fn refused_with(text: impl Fn(usize) -> u8, times: usize) -> (usize, Option<String>) {
    let mut scene = scene();
    for time in 0..times {
        let message = char::from(text(time)).to_string().repeat(MAX_STATUS_TEXT);
        let details = message.clone().into_bytes();
        scene.refuse(0, &Status { details, ..Status::new(Code::Internal, message) });
        for event in scene.events() {
            if let LinkEvent::Down { failure: LinkFailure::Protocol(why), .. } = event {
                return (time, Some(why));
            }
        }
    }
    (times, None)
}

#[test]
fn long_messages_that_are_not_taken_end_the_link_before_they_take_much_memory() {
    let (times, why) = refused_with(|time| b'a' + (time % 2) as u8, 1000);
    let why = why.expect("the link is still up");
    assert!(why.contains("takes nothing") && why.contains("bytes of long texts"), "{why}");
    assert!((400..600).contains(&times), "it went down after {times}: {why}");
}

#[test]
fn equal_long_messages_take_little_memory() {
    assert_eq!(refused_with(|_| b'a', 800), (800, None));
}

#[test]
fn long_messages_that_waited_come_in_their_order() {
    let mut scene = scene();
    let status = Status::new(Code::Internal, "x".repeat(5000));
    (0..3).for_each(|number| scene.refuse(number, &status));
    assert!(scene.links.load().backlog > 1, "they wait");
    let (mut assembler, mut taken) = (Assembler::default(), 0);
    for number in 0..3 {
        let message = loop {
            scene.links.poll();
            let slot = scene.peer.next_slot();
            taken += 1;
            scene.peer.port.publish_credits(scene.peer.link, taken);
            if let Some(whole) = assembler.push(&slot).expect("a fragment") {
                break whole.to_vec();
            }
        };
        let expected = Message::Refused { edge: edge(number), status: status.clone() };
        assert_eq!(Message::decode(&message).expect("a message"), expected);
    }
    assert_eq!(scene.links.load().backlog, 0);
}

#[test]
fn credits_that_came_before_the_port_is_armed_are_used_before_any_sleep() {
    let mut scene = scene();
    let mut waiting = 0;
    // The peer takes no message until one is queued.
    while scene.links.load().backlog == 0 {
        scene.tell(ToReceiver::Retired { edge: edge(waiting) });
        waiting += 1;
        assert!(waiting < 10 * DEPTH, "messages always leave");
    }
    (1..waiting).for_each(|_| drop(scene.peer.next()));
    while scene.links.poll() > 0 {}
    // As if between the last poll and the arming of the port.
    scene.peer.port.publish_credits(scene.peer.link, waiting);
    assert!(!scene.links.arm(), "a message can leave");
    assert_eq!(scene.links.load().backlog, 0);
    scene.peer.next();
}

#[test]
fn each_backlog_is_told_once_also_after_one_that_left_before_a_sleep() {
    let (mut scene, mut sent) = (scene(), 0);
    let mut fill = |scene: &mut Scene| {
        while scene.links.load().backlog == 0 {
            scene.tell(ToReceiver::Retired { edge: edge(sent) });
            sent += 1;
            assert!(sent < 10 * DEPTH, "messages always leave");
        }
        let mut told = 0;
        for _ in 0..3 {
            scene.links.poll();
            while let Some(event) = scene.links.next_event() {
                told += u32::from(matches!(event, LinkEvent::Backlogged));
            }
        }
        assert_eq!(told, 1);
        sent
    };
    let waiting = fill(&mut scene);
    (1..waiting).for_each(|_| drop(scene.peer.next()));
    scene.peer.port.publish_credits(scene.peer.link, waiting);
    assert!(!scene.links.arm(), "a message can leave");
    assert_eq!(scene.links.load().backlog, 0);
    fill(&mut scene);
}

#[test]
fn a_queue_is_stuck_since_the_first_look_after_which_nothing_has_left() {
    let mut scene = scene();
    let mut sent = 0;
    while scene.links.load().backlog < 2 {
        scene.tell(ToReceiver::Retired { edge: edge(sent) });
        sent += 1;
        assert!(sent < 10 * DEPTH, "messages always leave");
    }
    let looks = |scene: &mut Scene, times: [u64; 2]| {
        times.map(|nanos| scene.links.stuck_since(scene.link, Time::from_nanos(nanos)).map(Time::as_nanos))
    };
    assert_eq!(looks(&mut scene, [5, 9]), [Some(5); 2]);
    for (taken, times, since) in [(1, [12, 20], Some(12)), (2, [30, 31], None)] {
        scene.peer.next();
        scene.peer.port.publish_credits(scene.peer.link, taken);
        scene.links.poll();
        assert_eq!(looks(&mut scene, times), [since; 2]);
    }
}

/// The peer says one more thing each time that this side asks the time.
#[test]
fn the_last_polls_of_a_peer_that_is_never_silent_end_in_time_also_if_they_are_many() {
    let Scene { links, link, peer } = scene();
    let calls = Arc::new(AtomicU64::new(0));
    let (asked, peer) = (calls.clone(), Mutex::new(peer));
    let mut links = links.timed_by(Arc::new(move || {
        let mut peer = peer.lock().expect("no panic");
        peer.say(&Message::Withdraw { edge: EdgeId { number: 7, generation: 1 } });
        Time::ZERO + asked.fetch_add(1, Ordering::Relaxed) as u32 * Duration::from_millis(200)
    }));
    let mut calls_of_last_polls = || {
        let before = calls.load(Ordering::Relaxed);
        let mut last = links.last_polls();
        while links.poll_last(&mut last) {}
        calls.load(Ordering::Relaxed) - before
    };
    assert_eq!(calls_of_last_polls(), 6, "one second, from the first call on");
    assert_eq!([(); 9].map(|()| calls_of_last_polls()), [3; 9], "one poll, as the poller has not rested");
    calls.fetch_add(30 * 5, Ordering::Relaxed);
    assert_eq!(calls_of_last_polls(), 6, "30 seconds have passed");
    calls.fetch_add(30 * 5, Ordering::Relaxed);
    let mut last = links.last_polls();
    assert!(links.poll_last(&mut last));
    calls.fetch_add(4, Ordering::Relaxed);
    assert!(!links.poll_last(&mut last), "what came has taken the rest of the time");
    assert_eq!(links.take_down(link).map(drop), None);
}

/// The same, while no time passes.
#[test]
fn the_last_polls_of_a_peer_that_is_never_silent_take_bounded_bytes() {
    const MOST: usize = 400;
    let Scene { links, link, peer } = scene();
    let calls = Arc::new(AtomicU64::new(0));
    let (asked, peer) = (calls.clone(), Mutex::new(peer));
    let mut links = links.timed_by(Arc::new(move || {
        let said = Message::Withdraw { edge: EdgeId { number: 7, generation: 1 } };
        peer.lock().expect("no panic").say(&said);
        asked.fetch_add(1, Ordering::Relaxed);
        Time::ZERO
    }));
    let mut last = links.last_polls();
    last.bytes = MOST;
    while links.poll_last(&mut last) {}
    // Each has at least a byte. One is said before the first poll, and one after the last.
    let calls = calls.load(Ordering::Relaxed) as usize;
    assert!((2..=MOST + 2).contains(&calls), "{calls} messages in {MOST} bytes");
    assert_eq!(links.take_down(link).map(drop), None);
}
