//! [`Node`]: the handle of a process that has started.

use super::back_pressure::TensorError;
use super::error::NodeError;
use super::events::EventHistory;
use super::host;
use super::meeting::{Met, meet};
use super::options::{bootstrap_options, members, rendezvous_settings};
use super::parts::{NodeIdentity, NodeParts, OpeningParts};
use super::peering::{LinkReporter, PeerDirectory};
use super::plan::ResourcePlan;
use super::pollers::{PollerSet, Polling};
use super::store::ClusterStore;
use super::transport::check_device;
use crate::bootstrap::Bootstrap;
use crate::config::{Builder, Config, PeerLoss};
use crate::engine::{Executor, PollMode, UnpinnedThread, pin_current_thread, process_cpus};
use crate::fabric::FabricKind;
use crate::matching::{EdgeReports, WaitReports};
use crate::memory::{BufferRing, ForkGuard, Pool, RegionReport, TensorMut};
use crate::rendezvous::{Batch, Context, Edge, Error, Losses, Sequence, Standing, Step};
use crate::telemetry::{Counter, FlightLog, Snapshot};
use crate::wire::{DType, Generation, Incarnation, Shape, StepId, TaskId, TensorMeta};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

/// One process of the cluster.
///
/// A node is started with a configuration, joins the other members, and then makes tensors, sends
/// and receives. It may be used from any thread.
///
/// Dropping a node stops it, which may take up to `stop_timeout`, and once more for the bootstrap
/// service. [`Node::stop`] does the same and returns errors.
///
/// ```no_run
/// use tensorwire::Node;
/// let node = Node::builder()
///     .member("worker", 0)
///     .set("cluster", "ps=10.0.0.1:4000;worker=10.0.0.2:4000")
///     .set("secret_file", "/etc/tensorwire/cluster.secret")
///     .start()?;
/// node.join()?;
/// // Steps of training.
/// node.stop()?;
/// # Ok::<(), tensorwire::NodeError>(())
/// ```
pub struct Node {
    me: TaskId,
    incarnation: Incarnation,
    worker: Arc<str>,
    join_timeout: Duration,
    pub(super) stop_timeout: Duration,
    pub(super) pool: Pool,
    pub(super) context: Arc<Context>,
    pub(super) pollers: Arc<dyn PollerSet>,
    pub(super) executor: Executor,
    /// Drops owners of memory outside the pool.
    pub(super) owners: Executor,
    pub(super) directory: PeerDirectory,
    /// How many rails the links over RDMA have lost.
    lost_rails: Arc<AtomicU64>,
    pub(super) outstanding: Arc<AtomicUsize>,
    pub(super) events: Arc<EventHistory>,
    pub(super) bootstrap: Arc<Bootstrap>,
    pub(super) store: Arc<ClusterStore>,
    pub(super) stopped: Mutex<bool>,
    /// The thread of the first stop.
    pub(super) stopping: OnceLock<ThreadId>,
    /// The error of the last join, if it has failed.
    pub(super) failed_join: Mutex<Option<String>>,
    pub(super) fork_guard: ForkGuard,
}

/// The stage of a node's life: started, connected with every member, stopping, stopped.
pub use crate::bootstrap::NodeState;

/// The link with a peer, and the life of the peer, as this node sees them.
///
/// ```
/// # let node = tensorwire::internals::doc_node();
/// for peer in node.peers() {
///     match peer.state.error() {
///         Some(error) => println!("{} was lost: {error}", peer.task),
///         None => println!("{}: {:?}, link {}", peer.task, peer.fabric, peer.generation),
///     }
/// }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PeerReport {
    /// Job and number of the peer.
    pub task: TaskId,
    /// The present life of the peer, or the one that was lost; `None` if it was never connected.
    pub incarnation: Option<Incarnation>,
    /// The number of the newest link with this peer; zero if there was none.
    pub generation: Generation,
    /// The fabric of the link; `None` if there was no link yet.
    pub fabric: Option<FabricKind>,
    /// The RDMA devices of this process that the link uses now: first the one for small tensors.
    /// Large tensors go over all. Empty on another fabric.
    pub devices: Vec<String>,
    /// Why this fabric was chosen, and why each faster one was not; empty if there was no link yet.
    pub why: Arc<str>,
    /// Whether the peer is connected, or why it was lost.
    pub state: PeerState,
}

/// Whether a peer is connected.
///
/// ```
/// use tensorwire::{Node, PeerState};
///
/// /// The number of peers that can be sent to now.
/// fn connected(node: &Node) -> usize {
///     node.peers().iter().filter(|peer| matches!(peer.state, PeerState::Connected)).count()
/// }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum PeerState {
    /// The peer has not joined yet.
    Absent,
    /// The link works in both directions.
    Connected,
    /// The peer was lost, for this reason.
    Lost(Error),
}

impl PeerState {
    /// The reason of the loss; `None` for a peer that was not lost.
    pub fn error(&self) -> Option<&Error> {
        match self {
            PeerState::Lost(error) => Some(error),
            PeerState::Absent | PeerState::Connected => None,
        }
    }
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node").field("task", &self.me).finish_non_exhaustive()
    }
}

impl Builder {
    /// Checks the settings, makes the pool, and starts to listen for the other members. If no
    /// source names the cluster, and `store` or a launcher says where the members meet, it meets
    /// them first, for `join_timeout` at most.
    ///
    /// # Errors
    /// If a setting is wrong, or the pool, the fabric or the address can't be had. If the members
    /// can't meet.
    pub fn start(self) -> Result<Node, NodeError> {
        match self.meeting()? {
            None => Node::start(&self.build()?),
            Some(meeting) => {
                // Before a store and listeners are opened. Its cluster has as many members.
                ResourcePlan::before_meeting(&meeting.config).check()?;
                check_device(&meeting.config)?;
                let met = {
                    // The thread of the store must not inherit the pin of an earlier node.
                    let _unpinned = UnpinnedThread::begin();
                    meet(&meeting)?
                };
                let config = self.with_cluster(meeting.config.task_id(), &met.cluster)?;
                Node::start_at(&config, Some(met))
            }
        }
    }
}

impl Node {
    /// Collects the settings of a node, from the program and from `TENSORWIRE_*` variables.
    pub fn builder() -> Builder {
        Config::builder()
    }

    /// Makes the pool, opens the fabric, and starts to listen for the other members.
    ///
    /// # Errors
    /// If the pool, the fabric or the address can't be had.
    pub fn start(config: &Config) -> Result<Node, NodeError> {
        Self::start_at(config, None)
    }

    /// The same with the address at which it met the others.
    fn start_at(config: &Config, met: Option<Met>) -> Result<Node, NodeError> {
        ResourcePlan::new(config).check()?;
        // Read before any thread is pinned.
        let cpus = process_cpus().len();
        // An earlier node may have pinned this thread: what this one starts must not inherit that.
        let unpinned = UnpinnedThread::begin();
        let me = config.task_id().clone();
        let incarnation = Incarnation::random()?;
        let members = members(config);
        let opening = OpeningParts::begin(config)?;
        let pool = opening.pool(config, &me)?;
        let host = host::identity()?;
        let options = bootstrap_options(config, incarnation, host.clone(), met.is_some());
        let (listener, server) = match met {
            Some(met) => (met.listener, met.server),
            None => (options.listen()?, None),
        };
        let losses = Arc::new(Losses::new(&members, config.peer_loss == PeerLoss::FailAll));
        let outstanding = Arc::new(AtomicUsize::new(0));
        let directory = PeerDirectory::new(members.clone());
        let events = EventHistory::new();
        let who = (me.clone(), config.print_paths);
        let reporter = Arc::new(LinkReporter::new(who, losses.clone(), directory.clone(), events.clone()));
        let polling = Polling::new(config, members.all().len(), cpus);
        let identity = NodeIdentity { me: me.clone(), incarnation, members: members.clone(), host };
        let NodeParts { pollers, peering, registrar, lost_rails, calls } = opening.open(
            config,
            identity,
            (&pool, &listener),
            (polling.clone(), outstanding.clone()),
            (reporter.clone(), directory.clone()),
        )?;
        let executor = Executor::default();
        let context = Context::new(
            me.clone(),
            members.clone(),
            pollers.paths(),
            pool.clone(),
            executor.clone(),
            outstanding.clone(),
            losses,
            rendezvous_settings(config),
        );
        if let Some(registrar) = registrar {
            let directory = directory.clone();
            context.register_by(registrar, move |peer| directory.is_over_verbs(peer));
        }
        let owners = Executor::of_owners();
        pool.drop_owners_with({
            let owners = owners.clone();
            move |owner| owners.run_or_here(move || drop(owner))
        });
        let bootstrap = Arc::new(Bootstrap::new(options, peering)?);
        if let Some(calls) = calls {
            calls.call_by(&bootstrap);
        }
        reporter.report_to(&bootstrap, &context, &executor);
        events.run_on(&executor);
        pollers.start()?;
        bootstrap.start_on(listener)?;
        // The callback thread starts with its first job. It starts now, and the pin comes last, so
        // that no other thread inherits the pin.
        executor.run(|| {});
        drop(unpinned);
        if let Some(core) = polling.caller_core() {
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
            context,
            pollers,
            executor,
            owners,
            directory,
            lost_rails,
            outstanding,
            events,
            bootstrap,
            store: ClusterStore::new(config, server),
            stopped: Mutex::default(),
            stopping: OnceLock::new(),
            failed_join: Mutex::default(),
            fork_guard: ForkGuard::of_this_process(),
        })
    }

    /// Waits until every member of the cluster is connected, for `join_timeout` at most, and makes
    /// progress meanwhile. It takes up to a second more if the last link is up and the poller has
    /// not processed that yet. A second call returns at once if all members are still connected.
    ///
    /// # Errors
    /// Names the missing members, and the last event of each. If a loss is fatal (`peer_loss`), the
    /// death of a member ends the wait at once with [`NodeError::Lost`], linked or not.
    pub fn join(&self) -> Result<(), NodeError> {
        self.check_home()?;
        let joined = self.try_join();
        let failure = joined.as_ref().err().map(|error| error.to_string());
        *self.failed_join.lock().unwrap_or_else(PoisonError::into_inner) = failure;
        joined
    }

    fn try_join(&self) -> Result<(), NodeError> {
        let end = Instant::now() + self.join_timeout;
        // Many processes of a host that poll often take the time of those that make links.
        let peers = u32::try_from(self.peers().len()).unwrap_or(u32::MAX);
        let poll = (JOIN_POLL * peers.div_ceil(8)).clamp(JOIN_POLL, LONGEST_JOIN_POLL);
        loop {
            if self.context.progress().is_err() {
                return self.unjoined();
            }
            let left = end.saturating_duration_since(Instant::now());
            match self.bootstrap.joined_within(left.min(poll)) {
                Ok(true) if self.peers().iter().all(|peer| matches!(peer.state, PeerState::Connected)) => {
                    return Ok(());
                }
                // The poller has not processed yet that both sides are ready.
                Ok(true) if !left.is_zero() => std::thread::sleep(READY_POLL),
                Ok(true) if Instant::now() < end + READY && self.peers().iter().all(is_not_lost) => {
                    std::thread::sleep(READY_POLL);
                }
                Ok(true) => return self.unready(),
                Ok(false) if !left.is_zero() => {}
                Ok(false) => return Ok(self.bootstrap.missing(self.join_timeout)?),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The error of a join whose links are up, and not usable yet.
    fn unready(&self) -> Result<(), NodeError> {
        let peers = self.peers();
        if let Some(error) = peers.iter().find_map(|peer| peer.state.error()) {
            return Err(self.lost(error.clone()));
        }
        let waits = peers.iter().filter(|peer| !matches!(peer.state, PeerState::Connected));
        let waits: Vec<_> = waits.map(|peer| peer.task.clone()).collect();
        Ok(self.bootstrap.unready(self.join_timeout + READY, &waits)?)
    }

    /// The error of a join that can't succeed any more.
    fn unjoined(&self) -> Result<(), NodeError> {
        match self.context.progress() {
            Err(error @ Error::PeerLost { .. }) => Err(self.lost(error)),
            Err(Error::Forked) => Err(NodeError::Forked),
            // The bootstrap service reports that the node was stopped.
            _ => Ok(self.bootstrap.join(Duration::ZERO)?),
        }
    }

    /// The error of a join that a loss has ended.
    fn lost(&self, error: Error) -> NodeError {
        let is_lost = |task: &TaskId| matches!(&error, Error::PeerLost { peer, .. } if peer == task);
        let peers = self.peers().into_iter().filter(|peer| !matches!(peer.state, PeerState::Connected));
        let missing = peers.map(|peer| peer.task).filter(|task| !is_lost(task)).collect();
        NodeError::Lost { error: Box::new(error), missing }
    }

    /// The stage of the node's life, from started to stopped.
    pub fn state(&self) -> NodeState {
        if self.fork_guard.in_child() {
            return NodeState::Stopped;
        }
        self.bootstrap.state()
    }

    /// The address that the bootstrap service listens on; `None` once the node has stopped.
    pub fn address(&self) -> Option<SocketAddr> {
        if self.fork_guard.in_child() {
            return None;
        }
        self.bootstrap.local_addr()
    }

    /// The job and number of this task.
    pub fn task(&self) -> &TaskId {
        &self.me
    }

    /// The random number of this life of the task.
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// The name of this task's CPU device, such as `/job:ps/replica:0/task:0/device:CPU:0`.
    pub fn device(&self) -> String {
        device_of(self.me.job(), self.me.task())
    }

    /// The registered memory in which tensors are allocated.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// The pages and locks that the kernel reports for the pool.
    pub fn pool_report(&self) -> &RegionReport {
        self.pool.report()
    }

    /// A writable tensor with unspecified contents. If the pool is full, the call makes progress
    /// for up to a millisecond: peers may have returned memory.
    ///
    /// # Errors
    /// If `dims` is not a valid shape, or the pool is full.
    pub fn tensor(&self, dtype: DType, dims: &[u64]) -> Result<TensorMut, TensorError> {
        match TensorMeta::inline(dtype, dims).and_then(|meta| self.pool.cached(&meta)) {
            Some(tensor) => Ok(tensor),
            None => self.new_tensor(dtype, dims),
        }
    }

    /// A ring of buffers of one type and shape, for an edge that is used each step.
    ///
    /// # Errors
    /// If `dims` is not a valid shape, `buffers` is 0, or the pool is full.
    pub fn ring(&self, dtype: DType, dims: &[u64], buffers: usize) -> Result<BufferRing, TensorError> {
        Ok(BufferRing::new(&self.pool, TensorMeta::new(dtype, Shape::new(dims)?)?, buffers)?)
    }

    /// An edge between two devices, such as `/job:ps/replica:0/task:0/device:CPU:0`, in frame 0 and
    /// iteration 0.
    ///
    /// # Errors
    /// If a name is not well-formed (specification 2.2), or names a task that the cluster does not
    /// have.
    pub fn edge(&self, source: &str, destination: &str, name: &str) -> Result<Edge, Error> {
        self.context.edge(source, destination, name)
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

    /// Begins a step, or returns it if it has begun.
    ///
    /// # Errors
    /// If it was cleaned up, or the node has stopped.
    pub fn step(&self, id: impl Into<StepId>) -> Result<Step, Error> {
        self.context.step(id.into().get(), &self.worker)
    }

    /// Begins a step for a named worker. Several workers of one process keep their steps apart.
    ///
    /// # Errors
    /// If the step belongs to another worker, was cleaned up, or the node has stopped.
    pub fn step_of(&self, id: impl Into<StepId>, worker: &str) -> Result<Step, Error> {
        self.context.step(id.into().get(), &worker.into())
    }

    /// Declares the steps base, base + 1, and so on, up to the base of the next sequence. The node
    /// remembers without limit that a step of a sequence was cleaned up.
    ///
    /// Step ids that are drawn at random must lie below every base; base 0 leaves no such ids. The
    /// node remembers the cleanup of at least the last 4,096 of them (specification 2.5). A random
    /// id in a sequence works, but takes memory for as long as the node lives. Below the first step
    /// of the sequence that is not cleaned up, a random id is gone.
    pub fn sequence(&self, base: impl Into<StepId>) -> Sequence {
        self.context.sequence(base.into().get())
    }

    /// A set of edges whose tensors one call sends, or receives, in each step.
    ///
    /// # Errors
    /// If the node has stopped.
    pub fn batch(&self, edges: impl IntoIterator<Item = Edge>) -> Result<Batch, Error> {
        self.context.batch(edges)
    }

    /// Lets the sender of an edge send before the receives begin, until the handle is dropped. The
    /// window is 0 to 256 coming steps of the sequence; with 0 the handle changes nothing until
    /// [`Standing::set_window`]. Receives stay as they are.
    ///
    /// # Errors
    /// If the edge does not end here, the window is too long, or the edge has a [`Standing`] for
    /// this sequence already.
    pub fn standing(&self, edge: &Edge, sequence: Sequence, window: u32) -> Result<Standing, Error> {
        self.context.standing(edge, sequence, window)
    }

    /// Ends a step for good: pending calls fail, and the step id can't be used again. Values that
    /// no receive has taken are dropped, here and at peers to which this node has sent them.
    ///
    /// Call it when every member is done with the step. A synchronous trainer knows that step n is
    /// done everywhere once a tensor of step n + 1 has come from every member. In dedicated mode
    /// the polling thread drops the values, soon after this call has returned. In the other modes
    /// peers hear of it when this node makes progress or stops, at the latest with the 64th such
    /// step. The node logs a warning when 1,024 steps were not cleaned up, and at each doubling.
    pub fn cleanup(&self, step: impl Into<StepId>) {
        self.context.cleanup(step.into().get());
    }

    /// The steps that have begun and were not cleaned up, in no order.
    pub fn live_steps(&self) -> Vec<StepId> {
        self.context.live_steps()
    }

    /// Makes progress once: serves peers and completes receives. In inline mode a process that
    /// computes for long stalls its peers unless it calls this now and then. Returns the number of
    /// completions.
    ///
    /// # Errors
    /// If the node has stopped, or the loss of a peer has ended every call.
    pub fn progress(&self) -> Result<usize, Error> {
        self.context.progress()
    }

    /// The poll mode: the setting `poll`, or the mode that `auto` means.
    pub fn mode(&self) -> PollMode {
        self.pollers.mode()
    }

    /// Counters of this process, over all its pollers and calls.
    pub fn counters(&self) -> Snapshot {
        let mut counted = self.pollers.counted();
        counted += &self.context.counted();
        counted.add(Counter::RailsLost, self.lost_rails.load(Ordering::Relaxed));
        counted
    }

    /// The edges with other processes, `limit` of them at most, those that wait first: their
    /// credit, why values or receives wait, and their memory. Edges within the process are not
    /// among them.
    ///
    /// The poller looks at each edge, and makes no progress meanwhile: some 0.1 us for each.
    ///
    /// # Errors
    /// If the node has stopped.
    pub fn edges(&self, limit: usize) -> Result<EdgeReports, Error> {
        self.context.edges(limit)
    }

    /// The receives and the sent values that wait, `limit` of them at most, the longest wait first.
    /// Each names the edge, the step, the peer that is waited for, why, and since when. Ask for it
    /// when a step hangs.
    ///
    /// The log has it by itself after `hung_after`, but for receives on edges within the process,
    /// and sent values over gRPC calls. They are only here.
    ///
    /// The call makes progress for a millisecond, so that it sees receives of all threads.
    ///
    /// # Errors
    /// If the node has stopped.
    pub fn waits(&self, limit: usize) -> Result<WaitReports, Error> {
        self.context.waits(limit)
    }

    /// The flight records of the link with each member, and of the last one that has ended. They
    /// are the last events that are no values, with their times. Ask for them when something hangs.
    /// After a loss the log has the last ones.
    ///
    /// # Errors
    /// If the node has stopped.
    pub fn flight_logs(&self) -> Result<Vec<FlightLog>, Error> {
        self.context.flight_logs()
    }

    /// The links and lives of the other members, in the order of their names.
    pub fn peers(&self) -> Vec<PeerReport> {
        self.directory.reports(&self.me, &self.context)
    }

    /// Cuts the links of this generation with everybody, as if the fabric had lost them.
    #[cfg(test)]
    pub(super) fn cut(&self, generation: u64) {
        for peer in self.peers() {
            assert!(self.bootstrap.report_lost(&peer.task, generation, "cut by a test"), "it was not up");
        }
    }

    pub(super) fn check_home(&self) -> Result<(), NodeError> {
        if self.fork_guard.in_child() { Err(NodeError::Forked) } else { Ok(()) }
    }
}

fn is_not_lost(peer: &PeerReport) -> bool {
    peer.state.error().is_none()
}

/// How much longer a join waits for the poller to process that the last peer is ready.
const READY: Duration = Duration::from_secs(1);
/// How long it sleeps between two looks at that. The poller may need the CPU.
const READY_POLL: Duration = Duration::from_micros(50);
/// How long a join waits between two polls of the links, for each eight peers.
const JOIN_POLL: Duration = Duration::from_millis(2);
/// How long it waits at most.
const LONGEST_JOIN_POLL: Duration = Duration::from_millis(50);

/// The name of a task's CPU device.
fn device_of(job: &str, task: u32) -> String {
    format!("/job:{job}/replica:0/task:{task}/device:CPU:0")
}
