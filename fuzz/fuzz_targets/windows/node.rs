//! A real process: pool, fabric, engine and rendezvous.

use crate::peer::Peer;
use crate::{DEPTH, DEVICES, HONEST, HOSTILE, NODE, Scene};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tensorwire::internals::engine::{Clock, Engine, EngineOptions, Executor, PollMode, Poller, WaitStrategy};
use tensorwire::internals::fabric::sim::{SimFabric, SimLink, SimNetwork, SimPort};
use tensorwire::internals::fabric::{Endpoint, Fabric, LinkOptions, Role};
use tensorwire::internals::link::{LinkSettings, Links};
use tensorwire::internals::matching::WindowHandler;
use tensorwire::internals::matching::{
    LinkTag, Members, PeerIndex, RemoteCommand, RemoteLoad, RemoteSettings,
};
use tensorwire::internals::rendezvous::{Context, Losses, Paths, RendezvousSettings};
use tensorwire::internals::telemetry::CountersWriter;
use tensorwire::internals::wire::Time;
use tensorwire::{Edge, Error, Incarnation, Pending, Pool, Step, TaskId, Tensor};

/// Receives that can wait for a peer.
pub const MAX_REQUESTS: u32 = 12;
/// Values that a node keeps for its peers.
const MAX_SENDS: u32 = 20;
/// Cells of all windows of a direction, with those that answers to needs may take.
const MAX_HELD: usize = 1 << 16;

pub struct Node {
    at: usize,
    pool: Pool,
    fabric: SimFabric,
    engine: Arc<Engine<SimPort, WindowHandler>>,
    context: Arc<Context>,
    outstanding: Arc<AtomicUsize>,
    clock: Arc<TickingClock>,
}

/// A clock that goes on by a microsecond with each look.
#[derive(Default)]
pub struct TickingClock(AtomicU64);

impl TickingClock {
    pub fn advance(&self, by: Duration) {
        self.0.fetch_add(by.as_nanos() as u64, Ordering::Relaxed);
    }
}

impl Clock for TickingClock {
    fn now(&self) -> Time {
        Time::from_nanos(self.0.fetch_add(1000, Ordering::Relaxed))
    }
}

/// A link that is to become ready.
pub struct NewLink {
    peer: PeerIndex,
    tag: LinkTag,
    works: Arc<Mutex<Option<bool>>>,
}

fn task(at: usize) -> TaskId {
    TaskId::new(["a", "b", "c"][at], 0).expect("a job name")
}

fn life(number: u64) -> Incarnation {
    Incarnation::new(number).expect("not 0")
}

impl Node {
    pub fn new(at: usize, network: &SimNetwork, pool: &Pool, (borrow, validate): (bool, bool)) -> Self {
        let members = Members::new([NODE, HONEST, HOSTILE].map(task).to_vec());
        let fabric = network.process(pool);
        let losses = Arc::new(Losses::new(&members, false));
        let outstanding = Arc::<AtomicUsize>::default();
        let link = LinkSettings { small_tensor_bytes: 128, validate, borrow, max_ready_bytes: 1 << 16 };
        let cancel_grace = Duration::from_micros(100);
        let settings = RemoteSettings::new(link, MAX_REQUESTS);
        let links = Links::new(fabric.port().expect("a port"), pool.clone(), CountersWriter::new());
        let (values, watch) = (outstanding.clone(), losses.clone());
        let handler = WindowHandler::new(task(at), 1, members.clone(), settings, values, watch);
        let clock = Arc::<TickingClock>::default();
        let options = EngineOptions {
            mode: PollMode::Inline,
            wait: WaitStrategy::Spin,
            spin: Duration::ZERO,
            hung_after: Duration::MAX,
            queue: 64,
        };
        let engine = Arc::new(Engine::new(Poller::new(links, handler), clock.clone(), &options));
        let settings = RendezvousSettings {
            max_outstanding_sends: MAX_SENDS,
            max_requests: MAX_REQUESTS,
            recv_timeout: Duration::from_secs(1),
            cancel_grace,
            borrow,
        };
        let (paths, executor) = (Paths::new(vec![Box::new(engine.clone())]), Executor::on_the_spot());
        let values = outstanding.clone();
        let context =
            Context::new(task(at), members, paths, pool.clone(), executor, values, losses, settings);
        Node { at, pool: pool.clone(), fabric, engine, context, outstanding, clock }
    }

    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    pub fn clock(&self) -> &TickingClock {
        &self.clock
    }

    /// Attaches a link with the hostile peer.
    pub fn link(&self, peer: &mut Peer, (of, number): (u64, u64), options: &LinkOptions) -> NewLink {
        let ours = self.fabric.endpoint(0, options).expect("an endpoint");
        let theirs = peer.fabric().endpoint(0, options).expect("an endpoint");
        let addresses = [ours.address().to_vec(), theirs.address().to_vec()];
        let ours = ours.connect(Role::Initiator, &addresses[1], Duration::ZERO).expect("connected");
        let theirs = theirs.connect(Role::Acceptor, &addresses[0], Duration::ZERO).expect("connected");
        peer.attach(theirs);
        self.attach(HOSTILE, (of, number), ours)
    }

    fn attach(&self, peer: usize, (of, number): (u64, u64), link: SimLink) -> NewLink {
        let works = Arc::<Mutex<Option<bool>>>::default();
        let (peer, tag) =
            (PeerIndex(peer as u32), LinkTag { incarnation: life(of), generation: number.into() });
        let told = works.clone();
        let done = Box::new(move |result: Result<(), String>| {
            let before = told.lock().expect("no panic").replace(result.is_ok());
            assert_eq!(before, None, "a probe ends once");
        });
        self.engine.submit(RemoteCommand::Attach { peer, tag, link, done }).expect("usable");
        NewLink { peer, tag, works }
    }

    pub fn progress(&self) -> usize {
        self.context.progress().expect("usable")
    }

    pub fn edge(&self, to: usize, from: usize, name: &str) -> Edge {
        self.context.edge(DEVICES[from], DEVICES[to], name).expect("an edge")
    }

    pub fn step(&self, id: u64) -> Result<Step, Error> {
        self.context.step(id, &"w".into())
    }

    pub fn begin_receive(&self, from: &Node, step: u64) -> Pending<Tensor> {
        let (edge, step) = (self.edge(self.at, from.at, "honest"), self.step(step).expect("a new step"));
        step.receive(&edge).within(Duration::from_secs(1)).begin().expect("the peer is there")
    }

    /// Sends a dead value, which needs no room in a pool that the hostile peer may have filled.
    pub fn send_one(&self, to: &Node, step: u64) {
        let (edge, step) = (self.edge(to.at, self.at, "honest"), self.step(step).expect("a new step"));
        step.send_dead(&edge).expect("the peer is there");
    }

    fn load(&self) -> RemoteLoad {
        let load = Arc::new(Mutex::new(None));
        let told = load.clone();
        let tell = RemoteCommand::Load(Box::new(move |load| *told.lock().expect("no panic") = Some(load)));
        self.engine.submit(tell).expect("usable");
        load.lock().expect("no panic").take().expect("told on the spot")
    }

    /// What peers cause is bounded.
    pub fn check_load(&self) {
        let load = self.load();
        assert!(load.values <= MAX_SENDS as usize && load.held <= MAX_HELD, "{load:?}");
    }

    /// Nothing waits and nothing is kept once all steps have ended.
    pub fn check_end(&self) {
        let load = self.load();
        assert_eq!((load.values, load.needs, load.held), (0, 0, 0), "{load:?}");
        assert_eq!((load.waiting, load.links.landings, load.links.leaving), (0, 0, 0), "{load:?}");
        assert_eq!(self.outstanding.load(Ordering::Relaxed), 0, "values are outstanding");
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.engine.close();
    }
}

impl NewLink {
    /// Tells the node that both sides have probed the link, if it works.
    pub fn tell(self, node: &Node) {
        if *self.works.lock().expect("no panic") == Some(true) {
            let ready = RemoteCommand::Ready { peer: self.peer, tag: self.tag };
            node.engine.submit(ready).expect("usable");
        }
    }
}

/// Links the honest processes.
pub fn link_honest(scene: &mut Scene) {
    let sides = [&scene.node, &scene.honest];
    let options = LinkOptions { depth: DEPTH, receives: 0, generation: 1 };
    let [a, b] = sides.map(|side| side.fabric.endpoint(0, &options).expect("an endpoint"));
    let addresses = [a.address().to_vec(), b.address().to_vec()];
    let a = a.connect(Role::Initiator, &addresses[1], Duration::ZERO).expect("connected");
    let b = b.connect(Role::Acceptor, &addresses[0], Duration::ZERO).expect("connected");
    let links = [sides[0].attach(HONEST, (1, 1), a), sides[1].attach(NODE, (1, 1), b)];
    for _ in 0..100 {
        while let Some(next) = scene.network.next_event() {
            scene.network.advance_to(next);
        }
        sides.iter().for_each(|side| _ = side.progress());
    }
    for (link, side) in links.into_iter().zip(sides) {
        assert_eq!(*link.works.lock().expect("no panic"), Some(true), "the honest link works");
        link.tell(side);
    }
}
