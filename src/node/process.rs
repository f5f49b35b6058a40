//! The node itself.

use super::builder::NodeBuilder;
use super::clock::MonotonicClock;
use super::error::NodeError;
use super::host;
use super::peering::{FabricPeering, Lives, Watch};
use crate::bootstrap::{Bootstrap, BootstrapOptions, ClusterSpec, Incarnation, TaskName};
use crate::config::{BulkReceive, Config, HostPort, PeerLoss, PoolLock, PoolPages, Wait};
use crate::engine::{Executor, Inline, InlineOptions, Poller, Waiting, pin_current_thread, process_cpus};
use crate::fabric::shm::{ShmFabric, ShmOptions};
use crate::fabric::{Fabric, FabricKind, LinkOptions};
use crate::link::{LinkSettings, Links};
use crate::memory::{
    BufferRing, LockPolicy, PagePolicy, Pool, PoolError, PoolOptions, Region, RegionOptions, RegionReport,
    RingError, TensorMut,
};
use crate::rendezvous::{
    Edge, Error, LossCause, Losses, Members, Remote, RemotePath, RemoteSettings, Rendezvous,
    RendezvousSettings, Sequence, Step,
};
use crate::telemetry::{Counters, CountersWriter, Snapshot};
use crate::wire::{DType, Shape, TaskId, TensorMeta};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// One process of the cluster.
///
/// It is started with a configuration, joins the other members, and then makes tensors, sends and receives.
/// Dropping it stops it. It may be used from any thread.
pub struct Node {
    me: TaskId,
    incarnation: Incarnation,
    worker: Arc<str>,
    join_timeout: Duration,
    stop_timeout: Duration,
    pool: Pool,
    rendezvous: Rendezvous,
    path: Arc<dyn RemotePath>,
    executor: Executor,
    counters: Arc<Counters>,
    lives: Arc<Lives>,
    outstanding: Arc<AtomicUsize>,
    bootstrap: Arc<Bootstrap>,
    stopped: Mutex<bool>,
}

/// How often a stopping node looks in vain before it naps between looks.
const IDLE_DRAINS: u32 = 100;
/// How long it naps then.
const DRAIN_NAP: Duration = Duration::from_micros(200);

/// How far a node is in its life: started, connected with every member, stopping, stopped.
pub use crate::bootstrap::State as NodeState;

/// What is known of a peer.
#[derive(Clone, Debug)]
pub struct PeerReport {
    /// Which task.
    pub task: TaskId,
    /// Its present life; 0 if it was never there.
    pub incarnation: u64,
    /// How it is reached.
    pub fabric: Option<FabricKind>,
    /// Why it is reached that way.
    pub why: &'static str,
    /// Whether it is there.
    pub state: PeerState,
}

/// Whether a peer is there.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum PeerState {
    /// Not joined yet.
    Absent,
    /// Its link works in both directions.
    Connected,
    /// It was lost.
    Lost(Error),
}

impl PeerState {
    /// Why it was lost, if it was.
    pub fn error(&self) -> Option<&Error> {
        match self {
            PeerState::Lost(error) => Some(error),
            PeerState::Absent | PeerState::Connected => None,
        }
    }
}

impl Node {
    /// Collects the settings of a node.
    pub fn builder() -> NodeBuilder {
        NodeBuilder::new()
    }

    /// Makes the pool, opens the fabric, and starts to listen for the other members.
    ///
    /// # Errors
    /// If what the configuration asks for can't be had.
    pub fn start(config: &Config) -> Result<Node, NodeError> {
        let core = polling_core(config)?;
        let me = TaskId { job: config.job.clone(), task: config.task };
        let incarnation = Incarnation::random()?;
        let members = members(config);
        let pool = Pool::new(Region::create(0, &region_options(config))?, PoolOptions::default())?;
        tracing::info!(task = %me, pages = %pool.report(), "the pool is made");
        let fabric = ShmFabric::new(&pool, ShmOptions::default())?;
        let writer = CountersWriter::new();
        let counters = writer.counters();
        let losses = Arc::new(Losses::new(&members, config.peer_loss == PeerLoss::FailAll));
        let outstanding = Arc::new(AtomicUsize::new(0));
        let lives = Arc::new(Lives::new(members.clone()));
        let watch = Arc::new(Watch::new(losses.clone(), lives.clone()));
        let remote = Remote::new(
            me.clone(),
            incarnation.get(),
            members.clone(),
            remote_settings(config),
            outstanding.clone(),
            watch.clone(),
        );
        let links = Links::new(fabric.port()?, pool.clone(), writer);
        let waiting = waiting(config, members.all().len());
        let options = InlineOptions { waiting, queue: 4096 };
        let engine =
            Arc::new(Inline::new(Poller::new(links, remote), Arc::new(MonotonicClock::start()), &options));
        let path: Arc<dyn RemotePath> = engine.clone();
        let executor = Executor::default();
        let rendezvous = Rendezvous::new(
            me.clone(),
            members.clone(),
            path.clone(),
            pool.clone(),
            executor.clone(),
            outstanding.clone(),
            losses,
            rendezvous_settings(config),
        );
        let link = LinkOptions { lanes: config.lanes, depth: config.queue_depth, generation: 0 };
        let peering = FabricPeering::new(fabric, engine, lives.clone(), host::identity(), link);
        let options = bootstrap_options(config, incarnation)?;
        let bootstrap = Arc::new(Bootstrap::new(options, Arc::new(peering))?);
        watch.report_to(&bootstrap);
        bootstrap.start()?;
        // Last, so that no other thread inherits the pin; the callback thread would start only later.
        executor.run(|| {});
        if let Some(core) = core {
            pin_current_thread(core)?;
        }
        let worker = me.to_string().into();
        let (join_timeout, stop_timeout) = (config.join_timeout, config.stop_timeout);
        Ok(Node {
            me,
            incarnation,
            worker,
            join_timeout,
            stop_timeout,
            pool,
            rendezvous,
            path,
            executor,
            counters,
            lives,
            outstanding,
            bootstrap,
            stopped: Mutex::default(),
        })
    }

    /// Waits until every member of the cluster is connected, for the configured time at most. A second call
    /// returns at once.
    ///
    /// # Errors
    /// Names the members that are missing, and what was last heard of each.
    pub fn join(&self) -> Result<(), NodeError> {
        Ok(self.bootstrap.join(self.join_timeout)?)
    }

    /// How far the node is in its life.
    pub fn state(&self) -> NodeState {
        self.bootstrap.state()
    }

    /// Where its bootstrap service listens; `None` once it has stopped.
    pub fn address(&self) -> Option<SocketAddr> {
        self.bootstrap.local_addr()
    }

    /// This task.
    pub fn task(&self) -> &TaskId {
        &self.me
    }

    /// This life of the task.
    pub fn incarnation(&self) -> u64 {
        self.incarnation.get()
    }

    /// The name of this task's CPU device.
    pub fn device(&self) -> String {
        device_of(&self.me.job, self.me.task)
    }

    /// The pool that tensors are made in.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Which pages the pool got, as the kernel says.
    pub fn pool_report(&self) -> &RegionReport {
        self.pool.report()
    }

    /// A writable tensor with unspecified contents.
    ///
    /// # Errors
    /// If the shape is none, or the pool has no room.
    pub fn tensor(&self, dtype: DType, dims: &[u64]) -> Result<TensorMut, TensorError> {
        Ok(self.pool.tensor(TensorMeta::new(dtype, Shape::new(dims)?)?)?)
    }

    /// A ring of buffers of one type and shape, for an edge that is used each step.
    ///
    /// # Errors
    /// If the shape is none, or the pool has no room.
    pub fn ring(&self, dtype: DType, dims: &[u64], buffers: usize) -> Result<BufferRing, TensorError> {
        Ok(BufferRing::new(&self.pool, TensorMeta::new(dtype, Shape::new(dims)?)?, buffers)?)
    }

    /// An edge between two devices, such as `/job:ps/replica:0/task:0/device:CPU:0`.
    ///
    /// # Errors
    /// If a name is not well-formed, or names a task that the cluster does not have.
    pub fn edge(&self, source: &str, destination: &str, name: &str) -> Result<Edge, Error> {
        self.rendezvous.edge(source, destination, name)
    }

    /// An edge from this task's CPU to another task's.
    ///
    /// # Errors
    /// Like [`Node::edge`].
    pub fn edge_to(&self, job: &str, task: u32, name: &str) -> Result<Edge, Error> {
        self.edge(&self.device(), &device_of(job, task), name)
    }

    /// An edge from another task's CPU to this one's.
    ///
    /// # Errors
    /// Like [`Node::edge`].
    pub fn edge_from(&self, job: &str, task: u32, name: &str) -> Result<Edge, Error> {
        self.edge(&device_of(job, task), &self.device(), name)
    }

    /// Begins a step, or finds it.
    ///
    /// # Errors
    /// If it was cleaned up, or the node has stopped.
    pub fn step(&self, id: u64) -> Result<Step, Error> {
        self.rendezvous.step(id, &self.worker)
    }

    /// Begins a step for a named worker, where several in this process keep their steps apart.
    ///
    /// # Errors
    /// If it belongs to another worker, was cleaned up, or the node has stopped.
    pub fn step_of(&self, id: u64, worker: &str) -> Result<Step, Error> {
        self.rendezvous.step(id, &worker.into())
    }

    /// Declares a run of steps base, base + 1, ... whose ends are remembered without limit. It goes on until the next
    /// declared base: choose bases above all step ids that belong to none.
    pub fn sequence(&self, base: u64) -> Sequence {
        self.rendezvous.sequence(base)
    }

    /// Ends a step for good: values that nobody asked for are dropped, pending calls fail, and it does not
    /// come back. For when every member is done with the step: a synchronous trainer knows that step n is done
    /// everywhere when something of step n + 1 has come from everybody.
    pub fn cleanup(&self, step: u64) {
        self.rendezvous.cleanup(step);
    }

    /// The steps that have begun and were not cleaned up, in no order.
    pub fn live_steps(&self) -> Vec<u64> {
        self.rendezvous.live_steps()
    }

    /// Makes progress once: serves peers, brings what has come. In inline mode a process that computes for
    /// long stalls its readers unless it calls this now and then. Returns how much there was to do.
    ///
    /// # Errors
    /// If the node has stopped, or everything was ended by a lost peer.
    pub fn progress(&self) -> Result<usize, Error> {
        self.rendezvous.progress()
    }

    /// Counters of this process.
    pub fn counters(&self) -> Snapshot {
        self.counters.snapshot()
    }

    /// What is known of the other members, in the order of their names.
    pub fn peers(&self) -> Vec<PeerReport> {
        self.lives.reports(&self.me, &self.rendezvous)
    }

    /// Stops: what was sent is served to peers that are connected until nothing is left or the configured time is
    /// over, pending calls fail, the peers are told, every thread ends and every link is closed. Memory lives
    /// on as long as tensors in it are held. A second call does nothing.
    ///
    /// # Errors
    /// If the bootstrap service could not be ended in time.
    pub fn stop(&self) -> Result<(), NodeError> {
        self.drain();
        self.stop_because(LossCause::STOPPED)
    }

    /// Serves what was sent and not asked for yet.
    fn drain(&self) {
        let connected = |peer: &PeerReport| matches!(peer.state, PeerState::Connected);
        let end = Instant::now() + self.stop_timeout;
        let mut idle = 0;
        while self.outstanding.load(Ordering::Relaxed) > 0
            && Instant::now() < end
            && self.peers().iter().any(connected)
        {
            match self.rendezvous.progress() {
                Ok(0) => idle += 1,
                Ok(_) => idle = 0,
                Err(_) => return,
            }
            // Perhaps nobody will ever ask: what remains is no reason to keep a CPU busy.
            match idle {
                ..IDLE_DRAINS => std::thread::yield_now(),
                _ => std::thread::sleep(DRAIN_NAP),
            }
        }
    }

    /// Stops because something is wrong: peers are told the reason, and their calls fail with it.
    ///
    /// # Errors
    /// If the bootstrap service could not be ended in time.
    pub fn fail(&self, reason: &str) -> Result<(), NodeError> {
        self.stop_because(reason)
    }

    fn stop_because(&self, reason: &str) -> Result<(), NodeError> {
        let mut stopped = self.stopped.lock().unwrap_or_else(PoisonError::into_inner);
        if std::mem::replace(&mut *stopped, true) {
            return Ok(());
        }
        self.rendezvous.end(Error::Stopped);
        let ended = self.bootstrap.stop(reason, self.stop_timeout);
        self.path.close();
        self.executor.stop();
        Ok(ended?)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let ended = match std::thread::panicking() {
            true => self.fail("a thread of it panicked"),
            false => self.stop(),
        };
        if let Err(error) = ended {
            tracing::warn!(%error, "the node did not stop cleanly");
        }
    }
}

/// Why a tensor or a ring could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TensorError {
    /// The shape is none.
    #[error(transparent)]
    Shape(#[from] crate::wire::ShapeError),
    /// The pool has no room.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The ring could not be made.
    #[error(transparent)]
    Ring(#[from] RingError),
}

/// The name of a task's CPU device.
fn device_of(job: &str, task: u32) -> String {
    format!("/job:{job}/replica:0/task:{task}/device:CPU:0")
}

/// The CPU for the polling thread. Also reads the process's CPUs before anything is pinned.
fn polling_core(config: &Config) -> Result<Option<usize>, NodeError> {
    process_cpus();
    match config.cores.as_deref() {
        None => Ok(None),
        Some([core]) => Ok(Some(*core)),
        Some(cores) => Err(NodeError::Cores { given: cores.len(), cores: cores.to_vec() }),
    }
}

fn members(config: &Config) -> Members {
    let tasks = config.cluster.iter().flat_map(|(job, addresses)| {
        (0..addresses.len() as u32).map(|task| TaskId { job: job.clone(), task })
    });
    Members::new(tasks.collect())
}

fn region_options(config: &Config) -> RegionOptions {
    RegionOptions {
        size: config.pool_size,
        pages: match config.pool_pages {
            PoolPages::Auto => PagePolicy::Auto,
            PoolPages::Huge1G => PagePolicy::OneGiB,
            PoolPages::Huge2M => PagePolicy::TwoMiB,
            PoolPages::Transparent => PagePolicy::Transparent,
            PoolPages::Plain => PagePolicy::Plain,
        },
        require: config.pool_require,
        lock: match config.pool_lock {
            PoolLock::BestEffort => LockPolicy::BestEffort,
            PoolLock::Require => LockPolicy::Require,
            PoolLock::No => LockPolicy::No,
        },
        numa_node: config.numa_node,
    }
}

fn waiting(config: &Config, members: usize) -> Waiting {
    match config.wait {
        Wait::Spin => Waiting::Spin,
        Wait::Yield => Waiting::Yield,
        // Who is pinned does not know whether another member is pinned to the same CPU.
        Wait::Auto if config.cores.is_some() && members > 1 => Waiting::Yield,
        // Every member is on this host: shared memory is the only fabric of this version.
        Wait::Auto => Waiting::choose(members, process_cpus().len()),
    }
}

fn remote_settings(config: &Config) -> RemoteSettings {
    RemoteSettings {
        link: LinkSettings {
            small_tensor_bytes: config.small_tensor_bytes,
            max_requests: config.max_requests,
            max_routes: config.max_routes,
        },
        max_deferred: config.max_deferred,
        cancel_grace: config.cancel_grace,
        peer_loss_is_fatal: config.peer_loss == PeerLoss::FailAll,
    }
}

fn rendezvous_settings(config: &Config) -> RendezvousSettings {
    RendezvousSettings {
        max_outstanding_sends: config.max_outstanding_sends,
        recv_timeout: config.recv_timeout,
        cancel_grace: config.cancel_grace,
        borrow: config.bulk_receive == BulkReceive::Borrow,
    }
}

fn bootstrap_options(config: &Config, incarnation: Incarnation) -> Result<BootstrapOptions, NodeError> {
    let me = TaskName::new(&config.job, config.task)?;
    let addresses = |list: &[HostPort]| list.iter().map(HostPort::to_string).collect::<Vec<_>>();
    let cluster = ClusterSpec::new(config.cluster.iter().map(|(job, list)| (job.as_str(), addresses(list))))?;
    Ok(BootstrapOptions {
        bind: config.bind,
        allow_non_loopback: config.allow_non_loopback,
        heartbeat: config.heartbeat_interval,
        silence: config.silence_bound,
        ..BootstrapOptions::new(me, cluster, incarnation, host::identity())
    })
}
