//! A cluster on the virtual network: whole engines, with a scripted bootstrap service.

use crate::program::Setup;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tensorwire::Error;
use tensorwire::engine::{Clock, Engine, EngineOptions, Executor, Mode, Poller, Waiting};
use tensorwire::fabric::sim::{SimFabric, SimNetwork, SimOptions};
use tensorwire::fabric::{Fabric, Half, LinkOptions, Role};
use tensorwire::link::{LinkSettings, Links};
use tensorwire::memory::{LockPolicy, PagePolicy, Pool, PoolOptions, Region, RegionOptions};
use tensorwire::rendezvous::{
    Edge, LinkTag, Load, Losses, Members, PeerIndex, PeerWatch, Remote, RemoteOp, RemotePath, RemoteSettings,
    Rendezvous, RendezvousSettings, Step,
};
use tensorwire::telemetry::CountersWriter;
use tensorwire::wire::{TaskId, Time};

type SimEngine = Engine<<SimFabric as Fabric>::Port, Remote>;

/// How long the bootstrap service takes to make a link again.
const RELINK: Duration = Duration::from_millis(1);

/// How far the time passes at once where nothing happens.
const WHILE: Duration = Duration::from_millis(100);

struct VirtualClock(SimNetwork);

impl Clock for VirtualClock {
    fn now(&self) -> Time {
        self.0.now()
    }
}

/// Passes news on, and keeps those that the bootstrap service acts on.
struct Watch {
    losses: Arc<Losses>,
    ended: Arc<Mutex<Vec<(PeerIndex, LinkTag)>>>,
}

impl PeerWatch for Watch {
    fn up(&self, peer: PeerIndex, tag: LinkTag) {
        self.losses.up(peer, tag);
    }

    fn down(&self, peer: PeerIndex, tag: LinkTag, error: Error) {
        self.losses.down(peer, tag, error);
        self.ended.lock().expect("unpoisoned").push((peer, tag));
    }

    fn stillborn(&self, peer: PeerIndex, tag: LinkTag) {
        self.losses.stillborn(peer, tag);
        self.ended.lock().expect("unpoisoned").push((peer, tag));
    }
}

/// One life of a member.
pub struct Member {
    pub pool: Pool,
    pub rendezvous: Rendezvous,
    pub outstanding: Arc<AtomicUsize>,
    pub life: u64,
    engine: Arc<SimEngine>,
    fabric: SimFabric,
    ended: Arc<Mutex<Vec<(PeerIndex, LinkTag)>>>,
}

impl Drop for Member {
    fn drop(&mut self) {
        self.engine.close();
    }
}

type Outcome = Arc<Mutex<Option<Result<(), String>>>>;

/// What the bootstrap service knows of two members.
enum Pair {
    /// To be linked from then on.
    Apart(Time),
    /// Both sides try a link.
    Trying([Outcome; 2]),
    Linked,
}

/// The cluster.
pub struct World {
    pub network: SimNetwork,
    pub members: Vec<Option<Member>>,
    setup: Setup,
    tasks: Members,
    lives: u64,
    pairs: BTreeMap<(usize, usize), (u64, Pair)>,
}

fn task(member: usize) -> TaskId {
    TaskId { job: "w".into(), task: member as u32 }
}

pub fn device(member: usize) -> String {
    format!("/job:w/replica:0/task:{member}/device:CPU:0")
}

impl World {
    pub fn new(setup: &Setup, trace: bool) -> World {
        let micros = Duration::from_micros;
        let options = SimOptions {
            delay: Duration::from_nanos(200)..=micros(setup.slowest_us),
            completion_delay: Duration::ZERO..=micros(setup.late_us),
            poll_batch: setup.poll_batch,
            full_per_mille: setup.full_per_mille,
            lends: setup.lends,
            auto_advance: false,
            trace,
        };
        let network = SimNetwork::new(setup.seed, options);
        let tasks = Members::new((0..setup.members).map(task).collect());
        let mut world = World {
            network,
            members: Vec::new(),
            setup: setup.clone(),
            tasks,
            lives: 0,
            pairs: BTreeMap::new(),
        };
        for member in 0..setup.members {
            world.members.push(None);
            world.start(member);
        }
        world
    }

    /// A new life of a member.
    pub fn start(&mut self, member: usize) {
        self.lives += 1;
        let life = self.lives;
        let region = RegionOptions {
            pages: PagePolicy::Plain,
            lock: LockPolicy::No,
            ..RegionOptions::new(self.setup.pool)
        };
        let pool = Pool::new(Region::create(0, &region).expect("a region"), PoolOptions::default());
        let pool = pool.expect("a pool");
        let fabric = self.network.process(&pool);
        let losses = Arc::new(Losses::new(&self.tasks, false));
        let ended = Arc::new(Mutex::new(Vec::new()));
        let outstanding = Arc::new(AtomicUsize::new(0));
        let watch = Arc::new(Watch { losses: losses.clone(), ended: ended.clone() });
        let settings = RemoteSettings {
            link: LinkSettings {
                small_tensor_bytes: self.setup.small_tensor_bytes,
                max_requests: self.setup.max_requests,
                max_routes: self.setup.max_routes,
            },
            max_deferred: self.setup.max_deferred,
            cancel_grace: Duration::from_millis(100),
            peer_loss_is_fatal: false,
        };
        let remote =
            Remote::new(task(member), life, self.tasks.clone(), settings, outstanding.clone(), watch);
        let links = Links::new(fabric.port().expect("a port"), pool.clone(), CountersWriter::new());
        let clock = Arc::new(VirtualClock(self.network.clone()));
        let options =
            EngineOptions { mode: Mode::Inline, waiting: Waiting::Spin, spin: Duration::ZERO, queue: 64 };
        let engine = Arc::new(Engine::new(Poller::new(links, remote), clock, &options));
        let rendezvous = Rendezvous::new(
            task(member),
            self.tasks.clone(),
            engine.clone() as Arc<dyn RemotePath>,
            pool.clone(),
            Executor::default(),
            outstanding.clone(),
            losses,
            RendezvousSettings {
                max_outstanding_sends: self.setup.max_outstanding,
                recv_timeout: crate::program::PATIENCE,
                cancel_grace: Duration::from_millis(100),
                borrow: self.setup.borrow,
            },
        );
        self.members[member] = Some(Member { pool, rendezvous, outstanding, life, engine, fabric, ended });
        let others: Vec<usize> = (0..self.members.len()).filter(|other| *other != member).collect();
        for other in others {
            let pair = (member.min(other), member.max(other));
            let generation = self.pairs.get(&pair).map_or(0, |(generation, _)| *generation);
            self.pairs.insert(pair, (generation, Pair::Apart(self.network.now())));
        }
        self.bootstrap();
    }

    /// A member dies.
    pub fn kill(&mut self, member: usize) {
        let Some(dead) = self.members[member].take() else { return };
        self.network.kill(dead.fabric.process());
    }

    pub fn cut(&mut self, a: usize, b: usize) {
        if let (Some(a), Some(b)) = (&self.members[a], &self.members[b]) {
            self.network.cut(a.fabric.process(), b.fabric.process());
        }
    }

    pub fn stall(&mut self, member: usize, span: Duration) {
        if let Some(member) = &self.members[member] {
            self.network.stall(member.fabric.process(), self.network.now() + span);
        }
    }

    /// Makes progress on one member. Returns how much there was.
    pub fn progress(&mut self, member: usize) -> usize {
        let count = match &self.members[member] {
            Some(member) => member.rendezvous.progress().expect("nothing ends everything"),
            None => 0,
        };
        self.bootstrap();
        count
    }

    /// Lets the time pass to the next thing that happens, or for a while, and everybody look.
    pub fn pass(&mut self) {
        let later = self.network.now() + WHILE;
        self.network.advance_to(self.network.next_event().map_or(later, |next| next.min(later)));
        for member in 0..self.members.len() {
            for _ in 0..1000 {
                if self.progress(member) == 0 {
                    break;
                }
            }
        }
    }

    /// Whether all members are linked with each other.
    pub fn is_linked(&self) -> bool {
        self.pairs.values().all(|(_, pair)| matches!(pair, Pair::Linked))
    }

    pub fn edge(&self, at: usize, from: usize, to: usize, edge: usize) -> Edge {
        let rendezvous = &self.members[at].as_ref().expect("alive").rendezvous;
        rendezvous.edge(&device(from), &device(to), &format!("e{edge}")).expect("an edge")
    }

    pub fn step(&self, member: usize, step: u64) -> Result<Step, Error> {
        self.members[member].as_ref().expect("alive").rendezvous.step(step, &"sim".into())
    }

    /// What the bootstrap service does: links those that are apart, and says when both sides are ready.
    fn bootstrap(&mut self) {
        self.hear_of_ends();
        let pairs: Vec<(usize, usize)> = self.pairs.keys().copied().collect();
        for pair in pairs {
            let (generation, state) = &self.pairs[&pair];
            let (Some(a), Some(b)) = (&self.members[pair.0], &self.members[pair.1]) else { continue };
            match state {
                Pair::Apart(when) if *when <= self.network.now() => {
                    let generation = generation + 1;
                    let outcomes = connect([a, b], [pair.0, pair.1], self.setup.lanes, generation);
                    self.pairs.insert(pair, (generation, Pair::Trying(outcomes)));
                }
                Pair::Trying(outcomes) => {
                    let outcomes = [0, 1].map(|k: usize| outcomes[k].lock().expect("unpoisoned").clone());
                    match outcomes {
                        [Some(Ok(())), Some(Ok(()))] => {
                            let generation = *generation;
                            for (me, (other, peer)) in [(a, (b, pair.1)), (b, (a, pair.0))] {
                                let tag = LinkTag { incarnation: other.life, generation };
                                let ready = RemoteOp::Ready { peer: PeerIndex(peer as u32), tag };
                                me.engine.submit(ready).expect("usable");
                            }
                            self.pairs.insert(pair, (generation, Pair::Linked));
                        }
                        outcomes if outcomes.iter().flatten().any(Result::is_err) => {
                            let again = self.network.now() + RELINK;
                            self.pairs.insert(pair, (*generation, Pair::Apart(again)));
                        }
                        _ => {}
                    }
                }
                Pair::Apart(_) | Pair::Linked => {}
            }
        }
    }

    fn hear_of_ends(&mut self) {
        for (at, member) in self.members.iter().enumerate() {
            let Some(member) = member else { continue };
            for (peer, tag) in std::mem::take(&mut *member.ended.lock().expect("unpoisoned")) {
                let other = peer.0 as usize;
                let pair = (at.min(other), at.max(other));
                let again = self.network.now() + RELINK;
                if let Some((generation, state)) = self.pairs.get_mut(&pair)
                    && *generation == tag.generation
                {
                    *state = Pair::Apart(again);
                }
            }
        }
    }

    /// What the tables of a member hold.
    pub fn load(&self, member: usize) -> Option<Load> {
        let told = Arc::new(Mutex::new(None));
        let tell = told.clone();
        let done = Box::new(move |load| *tell.lock().expect("unpoisoned") = Some(load));
        self.members[member].as_ref()?.engine.submit(RemoteOp::Load(done)).expect("usable");
        told.lock().expect("unpoisoned").take()
    }

    /// Values that wait to be asked for at a member.
    pub fn outstanding(&self, member: usize) -> usize {
        self.members[member].as_ref().map_or(0, |member| member.outstanding.load(Ordering::Relaxed))
    }
}

fn connect(sides: [&Member; 2], names: [usize; 2], lanes: u8, generation: u64) -> [Outcome; 2] {
    let options = LinkOptions { lanes, depth: 16, generation: generation as u8 };
    let halves = sides.map(|side| side.fabric.half(&options).expect("a half"));
    let addresses = [0, 1].map(|k: usize| halves[k].address().to_vec());
    let mut outcomes = Vec::new();
    for (k, half) in halves.into_iter().enumerate() {
        let outcome = Outcome::default();
        let role = if k == 0 { Role::Initiator } else { Role::Acceptor };
        let link = half.connect(role, &addresses[1 - k], Duration::ZERO).expect("connected");
        let told = outcome.clone();
        let attach = RemoteOp::Attach {
            peer: PeerIndex(names[1 - k] as u32),
            tag: LinkTag { incarnation: sides[1 - k].life, generation },
            link,
            done: Box::new(move |result| *told.lock().expect("unpoisoned") = Some(result)),
        };
        sides[k].engine.submit(attach).expect("usable");
        outcomes.push(outcome);
    }
    let [a, b] = <[Outcome; 2]>::try_from(outcomes).expect("two");
    [a, b]
}
