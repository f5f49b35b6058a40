//! One life of one process: pool, fabric, engine, rendezvous, and the tensors and calls that its
//! user holds.

use crate::bootstrap::{Ends, Watch};
use crate::calls::{Open, Outcome, Wait, ended, filled, fresh};
use crate::model::CallNo;
use crate::network::{Network, Port, VirtualClock};
use crate::program::{At, Form, Key, ReceiveKind, SEQUENCE, Settings, device, edge_name, step_id};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::RangeInclusive;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tensorwire::internals::engine::{Engine, EngineOptions, Executor, PollMode, Poller, WaitStrategy};
use tensorwire::internals::fabric::sim::SimFabric;
use tensorwire::internals::fabric::{Fabric, LoanFigures};
use tensorwire::internals::link::{LinkSettings, Links};
use tensorwire::internals::matching::{
    Members, PeerIndex, RemoteCommand, RemoteLoad, RemoteSettings, WindowHandler,
};
use tensorwire::internals::memory::{LockPolicy, PagePolicy, PoolOptions, Region, RegionOptions};
use tensorwire::internals::rendezvous::{Context, Losses, Paths, PeerStatus, RendezvousSettings};
use tensorwire::internals::telemetry::{Counters, CountersWriter};
use tensorwire::{
    Batch, Delivery, Edge, Error, Incarnation, Pool, Sequence, Standing, Status, Step, TaskId, Tensor,
    TensorMut, Untaken, Value,
};

type SimEngine = Engine<Port, WindowHandler>;

pub struct Process {
    pub at: At,
    pub incarnation: Incarnation,
    pub pool: Pool,
    pub fabric: SimFabric,
    pub engine: Arc<SimEngine>,
    pub ends: Ends,
    pub outstanding: Arc<AtomicUsize>,
    pub counters: Arc<Counters>,
    pub open: Vec<Open>,
    pub held: Vec<Held>,
    pub standing: Vec<Standing>,
    sequence: Sequence,
    rendezvous: Arc<Context>,
    steps: BTreeMap<u64, Step>,
    edges: BTreeMap<(At, At, u64), Edge>,
    /// By their keys of step 0.
    batches: BTreeMap<Vec<Key>, Batch>,
    called_back: Arc<Mutex<Vec<(CallNo, Outcome)>>>,
    clock: Arc<VirtualClock>,
}

/// A received tensor that is still held.
pub struct Held {
    pub key: Key,
    pub value: usize,
    pub tensor: Tensor,
}

pub fn members(processes: usize) -> Members {
    Members::new((0..processes).map(task).collect())
}

fn task(at: At) -> TaskId {
    TaskId::new("w", at as u32).expect("a job name")
}

fn incarnation(at: At, life: u64) -> Incarnation {
    Incarnation::new((at as u64 + 1) << 32 | life).expect("not 0")
}

fn life_of(incarnation: Incarnation) -> u64 {
    incarnation.get() & u64::from(u32::MAX)
}

impl Process {
    pub fn start(at: At, life: u64, settings: &Settings, network: &mut Network) -> Process {
        let members = members(settings.processes);
        let region = RegionOptions {
            pages: PagePolicy::Plain,
            lock: LockPolicy::No,
            ..RegionOptions::new(settings.pool_bytes)
        };
        let options = PoolOptions { poison: true, max_blocks: 1 << 12, ..PoolOptions::default() };
        let pool = Pool::new(Region::create(0, &region).expect("memory"), options).expect("a pool");
        let fabric = network.fabric(at, &pool);
        let incarnation = incarnation(at, life);
        let losses = Arc::new(Losses::new(&members, settings.loss_is_fatal));
        let outstanding = Arc::new(AtomicUsize::new(0));
        let ends = Ends::default();
        let watch = Arc::new(Watch { losses: losses.clone(), ends: ends.clone() });
        let (me, grace) = (task(at), Duration::from_micros(settings.cancel_grace));
        let link = LinkSettings {
            validate: settings.validates(at),
            small_tensor_bytes: settings.small_tensor_bytes,
            borrow: settings.borrow,
            max_ready_bytes: 1 << 16,
        };
        let remote_settings = RemoteSettings {
            windows: settings.windows,
            peer_loss_is_fatal: settings.loss_is_fatal,
            ..RemoteSettings::new(link, settings.max_requests)
        };
        let writer = CountersWriter::new();
        let counters = writer.counters();
        let options = EngineOptions {
            mode: PollMode::Inline,
            wait: WaitStrategy::Spin,
            spin: Duration::ZERO,
            hung_after: Duration::MAX,
            queue: 64,
        };
        let (life, clock) = (incarnation.get(), network.clock());
        let (me_too, members_too, values) = (me.clone(), members.clone(), outstanding.clone());
        let links = Links::new(fabric.port().expect("a port"), pool.clone(), writer);
        let handler = WindowHandler::new(me_too, life, members_too, remote_settings, values, watch);
        let engine = Arc::new(Engine::new(Poller::new(links, handler), clock.clone(), &options));
        let executor = Executor::on_the_spot();
        let rendezvous_settings = RendezvousSettings {
            max_requests: settings.max_requests,
            max_outstanding_sends: settings.max_outstanding_sends,
            recv_timeout: Duration::from_micros(settings.recv_timeout),
            cancel_grace: grace,
            borrow: settings.borrow,
        };
        let rendezvous = Context::new(
            me,
            members,
            Paths::new(vec![Box::new(engine.clone())]),
            pool.clone(),
            executor,
            outstanding.clone(),
            losses,
            rendezvous_settings,
        );
        let sequence = rendezvous.sequence(SEQUENCE);
        Process {
            at,
            incarnation,
            pool,
            fabric,
            engine,
            ends,
            outstanding,
            counters,
            open: Vec::new(),
            held: Vec::new(),
            standing: Vec::new(),
            sequence,
            rendezvous,
            steps: BTreeMap::new(),
            edges: BTreeMap::new(),
            batches: BTreeMap::new(),
            called_back: Arc::default(),
            clock,
        }
    }

    /// The step. It begins at its first use.
    pub fn step(&mut self, step: u64) -> Result<Step, Error> {
        if let Some(step) = self.steps.get(&step) {
            return Ok(step.clone());
        }
        let begun = self.rendezvous.step(step_id(step), &"worker".into())?;
        self.steps.insert(step, begun.clone());
        Ok(begun)
    }

    /// Aborts a step of the sequence and all later ones.
    pub fn abort_from(&self, step: &Step, status: Status) -> Result<(), Error> {
        self.sequence.abort_from(step, status)
    }

    /// Cleans a step up. Its handles stay.
    pub fn cleanup(&mut self, step: u64) {
        self.rendezvous.cleanup(step_id(step));
    }

    pub fn send(&mut self, key: Key, tensor: Option<Tensor>) -> Result<(), Error> {
        let (edge, step) = (self.edge(key)?, self.step(key.step)?);
        match tensor {
            Some(tensor) if key.name.is_multiple_of(2) => step.send(&edge, tensor),
            Some(tensor) => Ok(step.send_within(&edge, tensor, Duration::ZERO)?),
            None => step.send_dead(&edge),
        }
    }

    /// Sends several values of a step by one call.
    pub fn send_all(&mut self, step: u64, values: Vec<(Key, Option<Tensor>)>) -> Result<(), Error> {
        let step = self.step(step)?;
        let mut given = Vec::new();
        for (key, tensor) in values {
            given.push((self.edge(key)?, tensor.map_or(Value::Dead, Value::Tensor)));
        }
        step.send_all(given.iter().map(|(edge, value)| (edge, value.clone())))
    }

    /// Begins several receives of a step by one call. `calls` are their numbers.
    pub fn receive_all(
        &mut self,
        step: u64,
        keys: &[Key],
        calls: &[CallNo],
        timeout: Duration,
    ) -> Result<(), Error> {
        let step = self.step(step)?;
        let edges = keys.iter().map(|key| self.edge(*key)).collect::<Result<Vec<_>, _>>()?;
        let edges: Vec<&Edge> = edges.iter().collect();
        let wait = Wait::Batch(step.receive_all(&edges).within(timeout).begin()?);
        self.open.push(Open::batch(calls, wait));
        Ok(())
    }

    /// Waits for values of a step by one call. The outer error says why the wait can't begin, the
    /// inner one why it has failed.
    pub fn wait_for_all(
        &mut self,
        step: u64,
        keys: &[Key],
        calls: &[CallNo],
        into: Vec<TensorMut>,
        timeout: Duration,
    ) -> Result<Result<(), Error>, Error> {
        let (step, clock) = (self.step(step)?, self.clock.clone());
        let batch = self.batch(keys)?;
        let received: Result<Vec<_>, _> = clock.while_it_goes_on(|| match into.is_empty() {
            true => batch.recv(&step, timeout).map(|got| got.into_iter().map(fresh).collect()),
            false => {
                let receive = batch.receive(&step).within(timeout).into(into);
                receive.wait().map(|got| got.into_iter().map(filled).collect())
            }
        });
        Ok(received.map(|values| {
            assert_eq!(values.len(), calls.len(), "each edge has one value");
            let ended = calls.iter().copied().zip(values.into_iter().map(Ok));
            self.called_back.lock().expect("no panic").extend(ended);
        }))
    }

    /// The batch of the edges of these keys, made at its first use.
    fn batch(&mut self, keys: &[Key]) -> Result<&Batch, Error> {
        let edges = keys.iter().map(|key| self.edge(*key)).collect::<Result<Vec<_>, _>>()?;
        let of = keys.iter().map(|key| Key { step: 0, ..*key }).collect();
        Ok(match self.batches.entry(of) {
            Entry::Occupied(batch) => batch.into_mut(),
            Entry::Vacant(place) => place.insert(self.rendezvous.batch(edges)?),
        })
    }

    /// Begins the receive with the number `call`.
    pub fn receive(
        &mut self,
        key: Key,
        call: CallNo,
        into: Option<TensorMut>,
        timeout: Duration,
        kind: ReceiveKind,
    ) -> Result<(), Error> {
        let (edge, step) = (self.edge(key)?, self.step(key.step)?);
        let wait = match (into, kind) {
            (into, ReceiveKind::Direct) => {
                let outcome = self.clock.while_it_goes_on(|| match into {
                    Some(into) => step.receive(&edge).within(timeout).into(into).wait().map(filled),
                    None => step.recv(&edge, timeout).map(fresh),
                });
                if let Err(error @ Error::ResourceExhausted { .. }) = outcome {
                    return Err(error);
                }
                self.called_back.lock().expect("no panic").push((call, outcome));
                return Ok(());
            }
            (Some(into), _) => Wait::Into(step.receive(&edge).into(into).begin()?),
            (None, ReceiveKind::Pending) => Wait::Fresh(step.receive(&edge).within(timeout).begin()?),
            (None, ReceiveKind::Callback) => {
                let called_back = self.called_back.clone();
                let done = move |result: Result<Delivery<Tensor>, Error>| {
                    called_back.lock().expect("no panic").push((call, result.map(fresh)));
                };
                Wait::CalledBack(step.receive(&edge).within(timeout).then(done)?)
            }
        };
        self.open.push(Open::one(call, wait));
        Ok(())
    }

    /// Makes a standing request for an edge.
    pub fn stand(&mut self, key: Key, window: u32) -> Result<(), Error> {
        let edge = self.edge(key)?;
        self.standing.push(self.rendezvous.standing(&edge, self.sequence, window)?);
        Ok(())
    }

    pub fn tensor(&self, form: &Form) -> Option<TensorMut> {
        self.pool.tensor(form.meta()).ok()
    }

    /// Whether the peer is connected.
    pub fn is_up(&self, peer: At) -> bool {
        matches!(self.rendezvous.peer_status(PeerIndex(peer as u32)), PeerStatus::Up(_))
    }

    /// The generation of the link that this process takes for the present one.
    pub fn link_with(&self, peer: At) -> Option<u64> {
        match self.rendezvous.peer_status(PeerIndex(peer as u32)) {
            PeerStatus::Up(tag) => Some(tag.generation.get()),
            PeerStatus::Lost(..) | PeerStatus::Absent => None,
        }
    }

    /// The lives of a peer whose values a receive that begins now may get.
    pub fn source_lives(&self, peer: At) -> RangeInclusive<u64> {
        match self.rendezvous.peer_status(PeerIndex(peer as u32)) {
            PeerStatus::Up(tag) => life_of(tag.incarnation)..=life_of(tag.incarnation),
            PeerStatus::Lost(tag, _) => 0..=tag.map_or(0, |tag| life_of(tag.incarnation)),
            PeerStatus::Absent => 0..=u64::MAX,
        }
    }

    pub fn progress(&mut self) -> Result<usize, Error> {
        self.rendezvous.progress()
    }

    /// The figures of the loan limiter.
    pub fn loans(&self) -> LoanFigures {
        self.fabric.loan_limiter().expect("this fabric lends").figures()
    }

    /// The load of the poller.
    pub fn load(&self) -> RemoteLoad {
        let load = Arc::new(Mutex::new(RemoteLoad::default()));
        let told = load.clone();
        let tell = RemoteCommand::Load(Box::new(move |load| *told.lock().expect("no panic") = load));
        self.engine.submit(tell).expect("usable");
        *load.lock().expect("no panic")
    }

    /// The values that no receive is known to have taken. Asks the receivers.
    pub fn untaken(&self) -> Untaken {
        // Every call of a process fails that a fatal loss has ended.
        self.rendezvous.flush(Duration::ZERO).unwrap_or_default()
    }

    /// The receives that have ended since the last call, with their results.
    pub fn ended(&mut self) -> Vec<(CallNo, Outcome)> {
        ended(&mut self.open, &self.called_back)
    }

    fn edge(&mut self, key: Key) -> Result<Edge, Error> {
        if let Some(edge) = self.edges.get(&(key.from, key.to, key.name)) {
            return Ok(edge.at(key.frame, 0));
        }
        let edge = self.rendezvous.edge(&device(key.from), &device(key.to), &edge_name(key.name))?;
        self.edges.insert((key.from, key.to, key.name), edge.clone());
        Ok(edge.at(key.frame, 0))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.engine.close();
    }
}
