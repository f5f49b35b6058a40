//! A sender and a receiver with a link between them, moved by the test.

use crate::fabric::shm::{ShmFabric, ShmOptions};
use crate::fabric::sim::{SimFabric, SimNetwork, SimOptions};
use crate::fabric::{Endpoint, Fabric, LinkOptions, Port, Role};
use crate::link::{Destination, Handler, LinkLoad, LinkSettings, Links, TensorKey, TensorProtocol, Value};
use crate::matching::{
    CallId, Cancel, CancelReason, Error, LinkTag, Members, Outcome, PeerIndex, PeerObserver, RemoteCommand,
    RemoteHandler, RemoteSettings, StandingChange, StepChange, Waiter,
};
use crate::memory::{LockPolicy, PagePolicy, Pool, PoolOptions, Region, RegionOptions, Tensor, TensorMut};
use crate::sync::{OneshotPool, OneshotReceiver};
use crate::telemetry::{CountersWriter, Gauge, Snapshot};
use crate::wire::{DType, EdgeName, Generation, Incarnation, Shape, TaskId, TensorMeta, Time, checksum_of};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

pub const SENDER: usize = 0;
pub const RECEIVER: usize = 1;
/// The incarnation of the sender. That of the receiver is the next number.
const LIFE: u64 = 1;

fn life(number: u64) -> Incarnation {
    Incarnation::new(number).expect("not 0")
}

/// Idle polls after which a side counts as quiet, if its port cannot tell: shared memory checks an
/// idle link only now and then.
const QUIET_ROUNDS: usize = 64;

/// How long a cancelled call waits for its peer.
pub const CANCEL_TIMEOUT: Duration = Duration::from_secs(1);

const DEVICES: [&str; 2] = ["/job:a/replica:0/task:0/device:CPU:0", "/job:b/replica:0/task:0/device:CPU:0"];

/// The tests look at calls, not at links.
struct NoObserver;

impl PeerObserver for NoObserver {
    fn up(&self, _peer: PeerIndex, _tag: LinkTag) {}
    fn down(&self, _peer: PeerIndex, _tag: LinkTag, _error: Error) {}
    fn failed_before_ready(&self, _peer: PeerIndex, _tag: LinkTag) {}
}

/// One side of the pair.
pub struct Side<P: Port> {
    pub links: Links<P, Waiter>,
    pub remote: RemoteHandler,
    pub pool: Pool,
    pub outstanding: Arc<AtomicUsize>,
    pub now: Time,
}

/// Both sides of the link.
pub struct Pair<P: Port> {
    pub sides: [Side<P>; 2],
    /// Delivers everything that is on its way.
    deliver_all: Box<dyn Fn()>,
    /// Whether a port can tell without a poll that nothing has come.
    tells_news: bool,
    /// Turns on or off the flipping of a bit in every tensor for the receiver.
    flip: Box<dyn Fn(bool)>,
    /// Whether the receiver validates.
    pub validates: bool,
    /// Whether bits are flipped once the meta-data of an edge is known.
    pub flips: bool,
    /// Idle polls of each side until it has certainly nothing to do: a side reports consumed
    /// messages with its next poll.
    awake: [u8; 2],
    calls: OneshotPool<Outcome>,
    next_call: u64,
    next_edge: u64,
}

/// A receive that has begun.
pub struct Call {
    pub id: CallId,
    pub receiver: Option<OneshotReceiver<Outcome>>,
}

pub fn meta(bytes: u64) -> TensorMeta {
    TensorMeta::new(DType::U8, Shape::new(&[bytes]).expect("a shape")).expect("meta")
}

fn pool() -> Pool {
    let options =
        RegionOptions { lock: LockPolicy::No, pages: PagePolicy::Plain, ..RegionOptions::new(1 << 20) };
    Pool::new(Region::create(0, &options).expect("a region"), PoolOptions::default()).expect("a pool")
}

/// A pair over the virtual network, with one completion per poll and no delays.
pub fn over_sim(lends: bool) -> Pair<<SimFabric as Fabric>::Port> {
    sim_pair(lends, false, LIFE)
}

/// The same with a validating receiver. `flips`: a bit is flipped in every tensor.
pub fn over_sim_validating(flips: bool) -> Pair<<SimFabric as Fabric>::Port> {
    Pair { flips, ..sim_pair(true, true, LIFE) }
}

/// The same with a receiver that expects an earlier incarnation of the sender, 99.
pub fn over_sim_stale() -> Pair<<SimFabric as Fabric>::Port> {
    sim_pair(true, false, 99)
}

fn sim_pair(lends: bool, validate: bool, meant: u64) -> Pair<<SimFabric as Fabric>::Port> {
    let options = SimOptions {
        delay: Duration::ZERO..=Duration::ZERO,
        completion_delay: Duration::ZERO..=Duration::ZERO,
        poll_batch: 1,
        lends,
        ..SimOptions::default()
    };
    let network = SimNetwork::new(1, options);
    let pools = [pool(), pool()];
    let fabrics = [0, 1].map(|side: usize| network.process(&pools[side]));
    let (flipping, receiver) = (network.clone(), fabrics[RECEIVER].process());
    let flip = move |on: bool| flipping.flip_bits(receiver, if on { 1000 } else { 0 });
    let deliver_all = move || {
        while let Some(next) = network.next_event() {
            network.advance_to(next);
        }
    };
    // The depth is so large that no credits are returned.
    let pair = pair(fabrics, pools, Box::new(deliver_all), 1 << 24, true, validate, meant);
    Pair { flip: Box::new(flip), ..pair }
}

/// A pair over shared memory.
pub fn over_shm() -> Pair<<ShmFabric as Fabric>::Port> {
    let pools = [pool(), pool()];
    let fabrics =
        [0, 1].map(|side: usize| ShmFabric::new(&pools[side], ShmOptions::default()).expect("a fabric"));
    pair(fabrics, pools, Box::new(|| ()), 64, false, false, LIFE)
}

fn pair<F: Fabric>(
    fabrics: [F; 2],
    pools: [Pool; 2],
    deliver_all: Box<dyn Fn()>,
    depth: u32,
    tells_news: bool,
    validate: bool,
    meant: u64,
) -> Pair<F::Port> {
    let options = LinkOptions { depth, receives: 0, generation: 0 };
    let [first, second] = [0, 1].map(|side: usize| fabrics[side].endpoint(0, &options).expect("an endpoint"));
    let (address, own) = (second.address().to_vec(), first.address().to_vec());
    let timeout = Duration::from_secs(5);
    let thread =
        std::thread::spawn(move || second.connect(Role::Acceptor, &own, timeout).expect("connected"));
    let first = first.connect(Role::Initiator, &address, timeout).expect("connected");
    let second = thread.join().expect("no panic");
    let tasks = Members::new(["a", "b"].map(|job| TaskId::new(job, 0).expect("a job name")).to_vec());
    let mut both = fabrics.iter().zip(pools).enumerate().map(|(side, (fabric, pool))| {
        let outstanding = Arc::new(AtomicUsize::new(0));
        let validate = validate && side == RECEIVER;
        let settings = RemoteSettings {
            link: LinkSettings {
                small_tensor_bytes: 128,
                max_requests: 16,
                max_routes: 16,
                validate,
                protocol: TensorProtocol::Requests,
            },
            max_deferred: 16,
            cancel_grace: CANCEL_TIMEOUT,
            peer_loss_is_fatal: false,
        };
        let me = tasks.task(PeerIndex(side as u32)).clone();
        let watch = Arc::new(NoObserver);
        let remote =
            RemoteHandler::new(me, LIFE + side as u64, tasks.clone(), settings, outstanding.clone(), watch);
        let links = Links::new(fabric.port().expect("a port"), pool.clone(), CountersWriter::new(), 1);
        Side { links, remote, pool, outstanding, now: Time::ZERO }
    });
    let sides = [both.next().expect("two"), both.next().expect("two")];
    let mut pair = Pair {
        sides,
        deliver_all,
        tells_news,
        flip: Box::new(|_| ()),
        validates: validate,
        flips: false,
        awake: [2; 2],
        calls: OneshotPool::new(16),
        next_call: 0,
        next_edge: 0,
    };
    for (side, link) in [first, second].into_iter().enumerate() {
        let peer = PeerIndex(1 - side as u32);
        let tag = LinkTag {
            incarnation: life(if side == RECEIVER { meant } else { LIFE + 1 }),
            generation: Generation::NONE,
        };
        let Side { links, remote, now, .. } = &mut pair.sides[side];
        // Nothing is sent before both sides are attached.
        let done = Box::new(|tried: Result<(), String>| tried.expect("it works"));
        remote.command(links, RemoteCommand::Attach { peer, tag, link, done }, *now);
    }
    pair.run();
    for side in [SENDER, RECEIVER] {
        let tag = LinkTag {
            incarnation: life(if side == RECEIVER { meant } else { LIFE + 1 }),
            generation: Generation::NONE,
        };
        pair.command(side, RemoteCommand::Ready { peer: PeerIndex(1 - side as u32), tag });
    }
    pair
}

impl<P: Port> Pair<P> {
    fn command(&mut self, side: usize, op: RemoteCommand<P::Link>) {
        let Side { links, remote, now, .. } = &mut self.sides[side];
        remote.command(links, op, *now);
        self.events(side);
        self.awake = [2; 2];
    }

    fn events(&mut self, side: usize) {
        let Side { links, remote, now, .. } = &mut self.sides[side];
        while let Some(event) = links.next_event() {
            remote.event(links, event, *now);
        }
        (self.deliver_all)();
    }

    /// Whether a poll of that side may return something.
    pub fn has_news(&mut self, side: usize) -> bool {
        self.awake[side] > 0 && !(self.tells_news && self.sides[side].links.arm())
    }

    pub fn poll(&mut self, side: usize) {
        let came = self.sides[side].links.poll();
        self.events(side);
        if came > 0 {
            self.awake = [2; 2];
            return;
        }
        if self.awake[side] == 2 {
            self.awake[1 - side] = self.awake[1 - side].max(1);
        }
        self.awake[side] -= 1;
    }

    /// Polls both sides until nothing comes any more.
    pub fn run(&mut self) {
        for _ in 0..QUIET_ROUNDS {
            self.run_awake();
            if self.tells_news {
                return;
            }
            self.awake = [2; 2];
        }
        self.run_awake();
    }

    fn run_awake(&mut self) {
        let mut rounds = 0;
        loop {
            (self.deliver_all)();
            let news = [SENDER, RECEIVER].map(|side| self.has_news(side));
            if news == [false; 2] {
                return;
            }
            for side in [SENDER, RECEIVER].into_iter().filter(|side| news[*side]) {
                self.poll(side);
            }
            rounds += 1;
            assert!(rounds < 10_000, "things go on happening for ever");
        }
    }

    /// Lets time pass on one side.
    pub fn pass(&mut self, side: usize, span: Duration) {
        let Side { links, remote, now, .. } = &mut self.sides[side];
        *now = *now + span;
        if *now >= remote.next_deadline {
            remote.expire(links, *now);
        }
        self.events(side);
        self.awake = [2; 2];
    }

    /// Turns on the flipping of bits, if the pair is to flip.
    pub fn set_flipping(&self, warm: bool) {
        (self.flip)(warm && self.flips);
    }

    /// The number of the value that an error names as corrupted, if it has this size and corruption
    /// is possible.
    pub fn corrupted(&self, error: &Error, bytes: u64) -> Option<u8> {
        let Error::Corrupted { bytes: of, sent, actual, .. } = error else { return None };
        let is_its = |number: &u8| checksum_of(&vec![*number; bytes as usize]) == *sent;
        (self.flips && *of == bytes && sent != actual).then(|| (0..=19).find(is_its)).flatten()
    }

    /// A new edge.
    pub fn edge(&mut self) -> Arc<EdgeName> {
        self.next_edge += 1;
        let name = format!("e{}", self.next_edge);
        Arc::new(EdgeName::new(DEVICES[SENDER], DEVICES[RECEIVER], &name).expect("an edge"))
    }

    pub fn begin(&mut self, side: usize, step: u64) {
        self.command(side, RemoteCommand::Step(StepChange::Begun { step, worker: "w".into() }));
    }

    pub fn change(&mut self, side: usize, change: StepChange) {
        self.command(side, RemoteCommand::Step(change));
    }

    pub fn change_standing(&mut self, side: usize, change: StandingChange) {
        self.command(side, RemoteCommand::Standing(change));
    }

    pub fn counters(&self, side: usize) -> Snapshot {
        self.sides[side].links.counters().counters().snapshot()
    }

    pub fn send(&mut self, key: &TensorKey, value: Value) {
        self.sides[SENDER].outstanding.fetch_add(1, Ordering::Relaxed);
        self.command(
            SENDER,
            RemoteCommand::Send { peer: PeerIndex(RECEIVER as u32), key: key.clone(), value },
        );
    }

    pub fn tensor(&self, side: usize, bytes: u64) -> TensorMut {
        self.sides[side].pool.zeroed(meta(bytes)).expect("room")
    }

    pub fn value(&self, bytes: u64, fill: u8) -> Tensor {
        let mut tensor = self.tensor(SENDER, bytes);
        tensor.bytes_mut().fill(fill);
        tensor.freeze()
    }

    pub fn receive(&mut self, key: &TensorKey, destination: Destination, timeout: Duration) -> Call {
        let deadline = self.sides[RECEIVER].now + timeout;
        self.receive_until(key, destination, (timeout, deadline))
    }

    /// A receive that reaches the poller at any time before or after its deadline.
    pub fn receive_until(
        &mut self,
        key: &TensorKey,
        destination: Destination,
        (timeout, deadline): (Duration, Time),
    ) -> Call {
        self.next_call += 1;
        let (receiver, sender) = self.calls.channel();
        let id = CallId(self.next_call);
        let waiter = Waiter { permit: None, id, sender, deadline, timeout, cancel_reason: None };
        let peer = PeerIndex(SENDER as u32);
        self.command(RECEIVER, RemoteCommand::Receive { peer, key: key.clone(), destination, waiter });
        Call { id, receiver: Some(receiver) }
    }

    pub fn cancel(&mut self, id: CallId, why: CancelReason) {
        self.command(RECEIVER, RemoteCommand::Cancel(Cancel { id, why }));
    }

    /// Memory in quarantine is allocated.
    pub fn check_quarantine(&self) {
        for side in &self.sides {
            let (quarantined, allocated) = (self.quarantined_on(side), side.pool.stats().allocated);
            assert!(quarantined <= allocated, "{quarantined} bytes in quarantine, {allocated} allocated");
        }
    }

    fn quarantined_on(&self, side: &Side<P>) -> u64 {
        side.links.counters().counters().gauge(Gauge::QuarantinedBytes)
    }

    pub fn quarantined(&self) -> u64 {
        self.quarantined_on(&self.sides[RECEIVER])
    }

    /// Checks that nothing is left anywhere.
    pub fn check_empty(&self) {
        for (name, side) in ["sender", "receiver"].into_iter().zip(&self.sides) {
            assert!(side.remote.outgoing.is_empty(), "something is in line at the {name}");
            assert!(side.remote.calls.is_empty(), "a call is left at the {name}");
            assert!(side.remote.orphans.is_empty(), "a value is left at the {name}");
            assert_eq!(side.links.load(), LinkLoad::default(), "something is left on the {name}'s link");
            assert_eq!(side.outstanding.load(Ordering::Relaxed), 0, "values are outstanding at the {name}");
            assert_eq!(self.quarantined_on(side), 0, "bytes are in quarantine at the {name}");
            assert!(side.pool.is_empty(), "a tensor of the {name}'s pool is left");
        }
    }
}
