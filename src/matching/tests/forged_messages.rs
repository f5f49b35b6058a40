//! A hostile peer forges each field of each message, one at a time and in pairs, on every fabric of
//! software. On TCP, where a link takes two connections, it forges one at a time. Its link ends, or
//! the message is handled as any honest one. No byte of the pool changes beside what was granted,
//! and nothing stays behind.

use super::*;
use crate::fabric::forging::{ForgedField, changes, forgeries};
use crate::fabric::shm::{ShmFabric, ShmOptions};
use crate::fabric::sim::{SimNetwork, SimOptions};
use crate::fabric::tcp::{TcpFabric, TcpOptions};
use crate::fabric::{Completions, Endpoint, Event, Fabric, LinkFailure, LinkId, LinkOptions, Port, Role};
use crate::link::windows::MAX_EDGES;
use crate::link::{Handler, LinkEvent, Links};
use crate::matching::{LostPeer, Members, PeerObserver, RemoteSettings, WindowHandler};
use crate::memory::LockPolicy;
use crate::wire::message::fragment::is_fragment;
use crate::wire::message::pack::{is_packed, unpack};
use crate::wire::message::{
    EdgeAnnouncement, EdgeCredits, Message, Placement, RecordValue, VERSION, VersionedMeta,
};
use crate::wire::{Generation, Grant, Incarnation, Slot, TaskId};
use std::borrow::Borrow;

const DEPTH: u32 = 256;
const SMALL: u64 = 8;
/// No message carries it.
const LARGE: u64 = 40_000;
/// The number of the edge on which the peer receives.
const THEIRS: EdgeId = EdgeId { number: 0, generation: 1 };
const OFFER: u32 = 5;
const GUARD: u8 = 0x55;
/// Polls after which nothing more comes.
const POLLS: u32 = 40;

/// The name of a field, its first byte in a message, and its bytes.
type Place = (&'static str, usize, usize);

pub(super) struct Nobody;

impl PeerObserver for Nobody {
    fn up(&self, _: PeerIndex, _: LinkTag) {}
    fn down(&self, _: &LostPeer) {}
    fn failed_before_ready(&self, _: PeerIndex, _: LinkTag) {}
}

/// A process with one link, and its peer, which a test plays.
struct Scene<F: Fabric> {
    links: Links<F::Port>,
    handler: WindowHandler,
    failure: Option<LinkFailure>,
    peer: F::Port,
    peer_link: LinkId,
    completions: Completions,
    /// Messages at the peer that were not read.
    heard: VecDeque<Vec<u8>>,
    lends: bool,
    peer_pool: Pool,
    /// The edge on which this process receives.
    ours: EdgeId,
    /// The nonce of its ping.
    nonce: u64,
    /// What it has offered, and what it has granted for [`OFFER`].
    offered: Option<u32>,
    granted: Option<(Immediate, Grant)>,
    /// What the peer has granted for the offered tensor.
    target: Option<Grant>,
    guards: Vec<Tensor>,
    results: Vec<OneshotReceiver<Outcome>>,
}

fn meta(bytes: u64) -> TensorMeta {
    TensorMeta::new(DType::U8, Shape::new(&[bytes]).expect("a shape")).expect("a size")
}

fn pool() -> Pool {
    let options =
        RegionOptions { lock: LockPolicy::No, pages: PagePolicy::Plain, ..RegionOptions::new(1 << 19) };
    Pool::new(Region::create(0, &options).expect("512 KiB"), PoolOptions::default()).expect("a pool")
}

fn filled(pool: &Pool, bytes: u64, with: u8) -> Tensor {
    let mut tensor = pool.zeroed(meta(bytes)).expect("room");
    tensor.bytes_mut().fill(with);
    tensor.freeze()
}

fn key_of(from: usize, to: usize, step: u64) -> TensorKey {
    let edge = EdgeName::new(DEVICES[from], DEVICES[to], "x").expect("an edge");
    TensorKey { edge: EdgeKey { name: Arc::new(edge), frame: 0, iteration: 0 }, step }
}

fn plain_immediate() -> Immediate {
    Immediate { generation: 3, slot: Slot::new(3).expect("20 bits") }
}

impl<F: Fabric> Scene<F> {
    /// Process `a` has a value for each direction under way.
    fn new(fabrics: &[F; 2], pools: &[Pool; 2]) -> Self {
        let options = LinkOptions { depth: DEPTH, receives: 0, generation: 1 };
        let [a, b] = fabrics.each_ref().map(|fabric| fabric.endpoint(0, &options).expect("an endpoint"));
        let (to_a, to_b) = (a.address().to_vec(), b.address().to_vec());
        let (a, b) = std::thread::scope(|scope| {
            let b = scope.spawn(move || b.connect(Role::Acceptor, &to_a, SOON).expect("connected"));
            (a.connect(Role::Initiator, &to_b, SOON).expect("connected"), b.join().expect("no panic"))
        });
        let [port, mut peer] = fabrics.each_ref().map(|fabric| fabric.port().expect("a port"));
        let peer_link = peer.attach(b).expect("room");
        peer.post_receives(peer_link, DEPTH);
        let members = Members::new(["a", "b"].map(|job| TaskId::new(job, 0).expect("a task")).to_vec());
        let link =
            LinkSettings { small_tensor_bytes: 128, validate: false, borrow: true, max_ready_bytes: 1 << 16 };
        let settings = RemoteSettings::new(link, 8);
        let me = members.all()[SENDER].clone();
        let observer = Arc::new(Nobody);
        let handler = WindowHandler::new(me, 1, members, settings, Arc::default(), observer);
        let lends = peer.limits(peer_link).lends;
        let links = Links::new(port, pools[0].clone(), CountersWriter::new());
        let (completions, peer_pool) = (Completions::with_capacity(64), pools[1].clone());
        let (heard, guards, results) = (VecDeque::new(), Vec::new(), Vec::new());
        let (offered, granted, target) = (None, None, None);
        let (failure, ours, nonce) = (None, THEIRS, 0);
        let mut scene = Scene {
            links,
            handler,
            failure,
            peer,
            peer_link,
            completions,
            heard,
            lends,
            peer_pool,
            ours,
            nonce,
            offered,
            granted,
            target,
            guards,
            results,
        };
        scene.link_up(a);
        scene.begin_values(&pools[0]);
        scene
    }

    fn link_up(&mut self, link: F::Link) {
        let tag =
            LinkTag { incarnation: Incarnation::new(2).expect("not 0"), generation: Generation::from(1) };
        let done = Box::new(|result: Result<(), String>| result.expect("it works"));
        self.command(RemoteCommand::Attach { peer: TO_RECEIVER, tag, link, done });
        self.nonce = self.hear(|message| match message {
            Message::Ping { nonce, .. } => Some(*nonce),
            _ => None,
        });
        self.say(&Message::Pong { nonce: self.nonce });
        self.say(&Message::Ping { version: VERSION, nonce: 77 });
        self.hear(|message| matches!(message, Message::Pong { nonce: 77 }).then_some(()));
        self.command(RemoteCommand::Ready { peer: TO_RECEIVER, tag });
    }

    fn begin_values(&mut self, pool: &Pool) {
        // Guards lie between the places of everything that comes later.
        let mut blocks: Vec<Tensor> =
            [64, 256, 1024].repeat(8).into_iter().map(|len| filled(pool, len, GUARD)).collect();
        let mut nth = 0;
        blocks.retain(|_| {
            nth += 1;
            nth % 2 == 0
        });
        self.guards = blocks;
        let calls = OneshotPool::new(4);
        for step in [1, 2] {
            let (result, sender) = calls.channel();
            let (begun, timeout) = (Time::from_nanos(1), SOON);
            let (permit, cancel_reason, is_logged) = (None, None, false);
            let waiter = Waiter {
                permit,
                id: CallId(step),
                sender,
                begun,
                deadline: Time::NEVER,
                timeout,
                cancel_reason,
                is_logged,
            };
            let (key, destination) = (key_of(RECEIVER, SENDER, step), Destination::Borrow);
            self.command(RemoteCommand::Receive {
                peer: TO_RECEIVER,
                receive: NewReceive { key, destination, waiter },
            });
            self.results.push(result);
        }
        self.ours = self.hear(|message| match message {
            Message::Announce { edge, .. } => Some(*edge),
            _ => None,
        });
        self.say(&self.announcement(THEIRS));
        for (version, bytes) in [(1, SMALL), (2, LARGE)] {
            self.say(&Message::Meta(VersionedMeta {
                version,
                placement: Placement::POOL,
                meta: meta(bytes),
            }));
        }
        self.poll();
        let value = Value::Tensor(filled(pool, LARGE, 9));
        self.command(RemoteCommand::Send { peer: TO_RECEIVER, key: key_of(SENDER, RECEIVER, 1), value });
        if self.lends {
            return self.poll();
        }
        self.offered = Some(self.hear(|message| match message {
            Message::Record { value: RecordValue::Offer { offer, .. }, .. } => Some(*offer),
            _ => None,
        }));
        self.say(&self.record(1, RecordValue::Offer { meta: 2, offer: OFFER }));
        self.granted = Some(self.hear(|message| match message {
            Message::Grant { offer: OFFER, immediate, target } => Some((*immediate, *target)),
            _ => None,
        }));
        let target = self.peer_pool.zeroed(meta(LARGE)).expect("room");
        self.target = self.peer.grant(self.peer_link, target).ok();
    }

    fn announcement(&self, edge: EdgeId) -> Message<'static> {
        let [source, destination] = DEVICES;
        let (incarnation, borrow, validate) = (1, true, false);
        let name = EdgeAnnouncement {
            incarnation,
            frame: 0,
            iteration: 0,
            source,
            destination,
            name: "x",
            borrow,
            validate,
        };
        let name = EdgeAnnouncement { name: if edge == THEIRS { "x" } else { "y" }, ..name };
        Message::Announce { edge, limit: 4, resume: None, name }
    }

    fn record<'a>(&self, n: u16, value: RecordValue<'a>) -> Message<'a> {
        let (edge, step) = (self.ours, u64::from(n));
        Message::Record { edge, n, step, answers_need: false, checksum: None, value }
    }

    fn command(&mut self, command: RemoteCommand<F::Link>) {
        let returned = self.handler.command(&mut self.links, command, Time::from_nanos(1));
        assert!(returned.is_none(), "it refers to nothing that is queued");
        self.events();
    }

    fn events(&mut self) {
        let now = Time::from_nanos(1);
        loop {
            while let Some(event) = self.links.next_event() {
                if let LinkEvent::Down { failure, .. } = &event {
                    self.failure = Some(failure.clone());
                }
                self.handler.event(&mut self.links, event, now);
            }
            self.handler.after_events(&mut self.links, now);
            if !self.links.has_events() {
                return;
            }
        }
    }

    /// Polls both sides until nothing more comes.
    fn poll(&mut self) {
        for _ in 0..POLLS {
            self.handler.before_poll(&mut self.links);
            self.links.poll();
            self.events();
            self.peer.poll(&mut self.completions);
            for (completion, bytes) in self.completions.drain() {
                if let Event::Message(_) = completion.event {
                    assert!(!is_fragment(bytes));
                    match is_packed(bytes) {
                        true => self.heard.extend(unpack(bytes).expect("a pack").map(<[u8]>::to_vec)),
                        false => self.heard.push_back(bytes.to_vec()),
                    }
                }
            }
        }
    }

    /// What the next message is for which `read` has a value.
    fn hear<R>(&mut self, read: impl Fn(&Message<'_>) -> Option<R>) -> R {
        for _ in 0..100 {
            self.poll();
            while let Some(bytes) = self.heard.pop_front() {
                if let Some(found) = read(&Message::decode(&bytes).expect("a message")) {
                    return found;
                }
            }
        }
        panic!("it did not come; the link: {:?}", self.failure);
    }

    fn say(&mut self, message: &Message<'_>) {
        let mut bytes = Vec::new();
        message.encode(&mut bytes);
        self.peer.send(self.peer_link, &bytes).expect("room");
    }

    /// Every message that fits now, with the places of its fields. Records and announcements have
    /// their shortest form.
    fn messages(&self) -> Vec<(Message<'static>, Vec<Place>)> {
        let (ours, step) = (self.ours, 2);
        let edge: [Place; 2] = [("edge", 1, 4), ("generation", 5, 2)];
        let of_edge = |more: &[Place]| [&edge[..], more].concat();
        let record = [
            ("flags", 1, 1),
            ("n", 2, 2),
            ("edge", 4, 4),
            ("generation", 8, 2),
            ("meta", 10, 2),
            ("step", 12, 8),
        ];
        let grant = |at: usize| {
            [
                ("immediate", at, 4),
                ("region", at + 4, 2),
                ("key", at + 6, 4),
                ("offset", at + 10, 8),
                ("length", at + 18, 8),
            ]
        };
        let target = self.target.unwrap_or(Grant { region: 0, key: 7, offset: 64, len: LARGE });
        let immediate = plain_immediate();
        let known = VersionedMeta { version: 3, placement: Placement::POOL, meta: meta(SMALL) };
        let status = Status::new(Code::Internal, "no");
        let offered = self.offered.unwrap_or(1);
        let n = if self.lends { 1 } else { 2 };
        vec![
            (Message::Ping { version: VERSION, nonce: 1 }, vec![("version", 1, 2), ("nonce", 3, 8)]),
            (Message::Pong { nonce: self.nonce }, vec![("nonce", 1, 8)]),
            (
                self.announcement(EdgeId { number: 1, generation: 1 }),
                vec![
                    ("flags", 1, 1),
                    ("edge", 2, 4),
                    ("generation", 6, 2),
                    ("limit", 8, 8),
                    ("incarnation", 16, 8),
                    ("frame", 24, 8),
                    ("iteration", 32, 8),
                    ("source", 40, 2),
                ],
            ),
            (
                Message::Credit(EdgeCredits { first: THEIRS, limit: 5, came: 1, held: 0, edges: 1 }),
                of_edge(&[("limit", 7, 8), ("came", 15, 8), ("held", 23, 4), ("edges", 27, 1)]),
            ),
            (Message::Need { edge: THEIRS, step }, of_edge(&[("step", 7, 8)])),
            (Message::Unneed { edge: THEIRS, step }, of_edge(&[("step", 7, 8)])),
            (Message::Retire { edge: THEIRS, came: 1 }, of_edge(&[("came", 7, 8)])),
            (Message::Retired { edge: ours }, of_edge(&[])),
            (Message::Flush { edge: ours }, of_edge(&[])),
            (Message::Resumed, vec![("kind", 0, 1)]),
            (
                Message::Meta(known),
                vec![
                    ("version", 1, 4),
                    ("placement", 5, 1),
                    ("dtype", 6, 1),
                    ("rank", 7, 1),
                    ("dimension", 8, 8),
                ],
            ),
            (self.record(n, RecordValue::Bytes { meta: 1, data: &[6; SMALL as usize] }), record.to_vec()),
            (self.record(n, RecordValue::Dead), record.to_vec()),
            (self.record(n, RecordValue::Written { meta: 2 }), record.to_vec()),
            (
                self.record(n, RecordValue::Offer { meta: 2, offer: OFFER + 1 }),
                [&record[..], &[("offer", 20, 4)]].concat(),
            ),
            (
                Message::Refused { edge: ours, status },
                vec![("flags", 1, 1), ("edge", 2, 4), ("generation", 6, 2), ("code", 8, 1), ("text", 9, 4)],
            ),
            (
                Message::StepsOver { first: 2, last: 2, status: None },
                vec![("flags", 1, 1), ("first", 2, 8), ("last", 10, 8)],
            ),
            (
                Message::Grant { offer: offered, immediate, target },
                [&[("offer", 1, 4)][..], &grant(5)].concat(),
            ),
            (Message::Decline { offer: offered }, vec![("offer", 1, 4)]),
            (Message::Ready { edge: THEIRS, immediate, target }, of_edge(&grant(7))),
            (Message::Withdraw { edge: THEIRS }, of_edge(&[])),
            (Message::Release { edge: ours }, of_edge(&[])),
            (Message::EagerCredit { returned: 0 }, vec![("returned", 1, 8)]),
        ]
    }

    fn fields(&self, bytes: &[u8], places: &[Place]) -> Vec<ForgedField> {
        let field = |&(name, at, len): &Place| {
            let mut honest = [0; 8];
            honest[..len].copy_from_slice(&bytes[at..at + len]);
            let known = match name {
                "edge" => vec![self.ours.number.into(), MAX_EDGES.into(), u64::from(MAX_EDGES) - 1],
                "limit" | "came" => vec![5, 1 << 20],
                "key" => self.granted.iter().map(|(_, grant)| grant.key.into()).collect(),
                _ => Vec::new(),
            };
            ForgedField { name, bits: 8 * len as u32, honest: u64::from_le_bytes(honest), known }
        };
        places.iter().map(field).collect()
    }

    /// Sends the bytes of a message. Returns whether the link lives.
    fn forge(mut self, bytes: &[u8], pool: &Pool) -> bool {
        self.peer.send(self.peer_link, bytes).expect("room");
        self.poll();
        match &self.failure {
            // The port of the peer has refused a write, as a port of another process would.
            None | Some(LinkFailure::Protocol(_) | LinkFailure::Closed) => {}
            Some(other) => panic!("the wrong one is blamed: {other:?}"),
        }
        // The log of a node has this text.
        let text = self.failure.as_ref().map(|failure| format!("{failure} {failure:?}")).unwrap_or_default();
        let grants = self.granted.iter().map(|(_, grant)| grant).chain(&self.target);
        grants.for_each(|grant| grant.assert_key_hidden_in(&text));
        let value = Value::Dead;
        self.command(RemoteCommand::Send { peer: TO_RECEIVER, key: key_of(SENDER, RECEIVER, 3), value });
        let is_alive = self.failure.is_none();
        self.results.clear();
        let guards = std::mem::take(&mut self.guards);
        drop(self);
        assert!(guards.iter().all(|guard| guard.bytes().iter().all(|byte| *byte == GUARD)), "a byte changed");
        // On TCP a detached link still sends what was posted before.
        let begin = std::time::Instant::now();
        while pool.stats().live_tensors > guards.len() && begin.elapsed() < SOON {
            std::thread::yield_now();
        }
        assert_eq!(pool.stats().live_tensors, guards.len(), "tensors were left behind");
        is_alive
    }
}

/// `fabrics` makes two processes. At most `at_a_time` fields are forged in one message. So many
/// messages are obeyed as they are; the others don't fit now.
fn forge_all<F: Fabric, S: Borrow<[F; 2]>>(
    pools: &[Pool; 2],
    (at_a_time, honest_kinds): (usize, usize),
    fabrics: impl Fn() -> S,
) {
    let kinds = Scene::new(fabrics().borrow(), pools).messages().len();
    let (mut ended, mut obeyed, mut as_it_is) = (0, 0, 0);
    for kind in 0..kinds {
        let honest = |scene: &Scene<F>| {
            let (message, places) = scene.messages().swap_remove(kind);
            let mut bytes = Vec::new();
            message.encode(&mut bytes);
            let fields = scene.fields(&bytes, &places);
            (message, bytes, places, fields)
        };
        let all = forgeries(&honest(&Scene::new(fabrics().borrow(), pools)).3);
        for forgery in all.into_iter().filter(|forgery| forgery.len() <= at_a_time) {
            let scene = Scene::new(fabrics().borrow(), pools);
            let (message, mut bytes, places, fields) = honest(&scene);
            let Some(changes) = changes(&fields, &forgery) else { continue };
            for (name, value) in &changes {
                let (_, at, len) = places.iter().find(|(other, ..)| other == name).expect("a field");
                bytes[*at..at + len].copy_from_slice(&value.to_le_bytes()[..*len]);
            }
            let run = std::panic::AssertUnwindSafe(|| scene.forge(&bytes, &pools[0]));
            match std::panic::catch_unwind(run) {
                Ok(true) => {
                    obeyed += 1;
                    as_it_is += usize::from(changes.is_empty());
                }
                Ok(false) => ended += 1,
                Err(_) => panic!("{message:?} with {changes:#x?}"),
            }
        }
    }
    println!("{ended} links were ended, and {obeyed} messages obeyed");
    // `Resumed` is none of them: links are not repaired, so no receiver announces its edges again.
    assert_eq!(as_it_is, honest_kinds, "a scene without its state proves nothing");
}

#[test]
#[ignore = "takes long: tests/nightly"]
fn a_peer_that_forges_any_field_of_any_message_ends_its_own_link_at_most_in_simulation() {
    let pools = [pool(), pool()];
    let zero = Duration::ZERO..=Duration::ZERO;
    forge_all(&pools, (2, 18), || {
        let options = SimOptions {
            delay: zero.clone(),
            completion_delay: zero.clone(),
            lends: false,
            auto_advance: true,
            poll_batch: 64,
            ..SimOptions::default()
        };
        let network = SimNetwork::new(1, options);
        pools.each_ref().map(|pool| network.process(pool))
    });
}

#[test]
#[ignore = "takes long: tests/nightly"]
fn a_peer_that_forges_any_field_of_any_message_ends_its_own_link_at_most_on_shared_memory() {
    let pools = [pool(), pool()];
    let fabrics = pools.each_ref().map(|pool| ShmFabric::new(pool, ShmOptions::default()).expect("a fabric"));
    forge_all(&pools, (2, 15), || &fabrics);
}

#[test]
#[ignore = "takes long: tests/nightly"]
fn a_peer_that_forges_any_field_of_any_message_ends_its_own_link_at_most_on_tcp() {
    let pools = [pool(), pool()];
    let fabrics = pools.each_ref().map(|pool| TcpFabric::new(pool, TcpOptions::default()).expect("a fabric"));
    forge_all(&pools, (1, 18), || &fabrics);
}
