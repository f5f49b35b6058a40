//! The state that the handle, the bootstrap thread and the threads that make links share.

use super::BootstrapError;
use super::blocking;
use super::generated as grpc;
use super::options::BootstrapOptions;
use super::peer_table::{PeerEvent, PeerTable};
use super::peering::{PeerInfo, Peering, Prepared};
use super::refused::RefusedCallers;
use super::service::NodeState;
use super::tensors::{TensorClients, TensorService};
use crate::store::MemoryStore;
use crate::wire::shorten;
use crate::wire::{Code, HostPort, Incarnation, Status, TaskId};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::{Notify, watch};

/// Bytes of the longest reason that travels. A peer's reason is cut to it.
pub const MAX_REASON: usize = 1024;

/// Bytes of a cluster's text that an error shows.
const SHOWN_CLUSTER: usize = 500;

pub(super) struct BootstrapShared {
    pub(super) options: BootstrapOptions,
    /// The version of the protocol that this process speaks.
    pub(super) version: u32,
    pub(super) digest: u64,
    /// The cluster's text, which each Hello has.
    pub(super) cluster_text: String,
    /// The peers in ascending order. A peer's index is its position here.
    pub(super) peers: Vec<TaskId>,
    peering: Arc<dyn Peering>,
    /// The store that this process serves.
    pub(super) store: MemoryStore,
    inner: Mutex<Inner>,
    /// Notified of every change of `inner`.
    turned: Condvar,
    /// The same for the tasks on the bootstrap thread.
    changed: watch::Sender<()>,
    /// For each peer: wakes its task.
    pub(super) nudges: Vec<Notify>,
    /// The threads of attempts that may still run.
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Serves the tensor calls of peers, with the bytes of the largest tensor. Set before the
    /// start, if at all.
    pub(super) tensors: OnceLock<(Arc<dyn TensorService>, u64)>,
    /// The clients for tensor calls, while the bootstrap thread runs: they refer to this.
    pub(super) tensor_clients: Mutex<Option<TensorClients>>,
    /// The callers that the listening side has refused.
    pub(super) refused: RefusedCallers,
}

struct Inner {
    members: PeerTable,
    phase: ServicePhase,
    /// For each peer: the last link that this process has reported dead, until the peer is told.
    reports: Vec<Option<LossReport>>,
}

/// A link that this process has reported dead.
#[derive(Debug)]
pub(super) struct LossReport {
    pub(super) link: PeerInfo,
    pub(super) why: String,
}

/// The phase of the service itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ServicePhase {
    Created,
    Started,
    Stopping,
    Stopped,
}

impl BootstrapShared {
    pub(super) fn new(options: BootstrapOptions, version: u32, peering: Arc<dyn Peering>) -> Self {
        let members = options.cluster.members().map(|(task, _)| task);
        let peers: Vec<TaskId> = members.filter(|task| *task != options.me).collect();
        let members =
            PeerTable::new(peers.iter().cloned(), options.silence, options.host_id.clone(), options.have_met);
        let reports = peers.iter().map(|_| None).collect();
        BootstrapShared {
            digest: options.cluster.digest(),
            cluster_text: options.cluster.to_string(),
            nudges: peers.iter().map(|_| Notify::new()).collect(),
            peers,
            options,
            version,
            peering,
            store: MemoryStore::new(),
            inner: Mutex::new(Inner { members, phase: ServicePhase::Created, reports }),
            turned: Condvar::new(),
            changed: watch::Sender::new(()),
            threads: Mutex::default(),
            tensors: OnceLock::new(),
            tensor_clients: Mutex::default(),
            refused: RefusedCallers::default(),
        }
    }

    fn threads(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the thread of an attempt until it is waited for.
    fn keep(&self, thread: JoinHandle<()>) {
        let mut threads = self.threads();
        threads.retain(|thread| !thread.is_finished());
        threads.push(thread);
    }

    /// Waits for the threads of attempts, when no peer is busy any more.
    pub(super) fn await_threads(&self) {
        let threads = std::mem::take(&mut *self.threads());
        // A panic of the peering is an error of the attempt.
        threads.into_iter().for_each(|thread| drop(thread.join()));
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // No callback runs under the lock, so the state behind a poisoned lock is consistent.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the table of peers.
    pub(super) fn see<R>(&self, look: impl FnOnce(&PeerTable) -> R) -> R {
        look(&self.lock().members)
    }

    /// Changes the table of peers, then passes events to the peering, then wakes all waiters.
    ///
    /// Only the bootstrap thread produces `Ready` and `Lost`, which keeps them in order.
    pub(super) fn change<R>(&self, change: impl FnOnce(&mut PeerTable) -> (R, Vec<PeerEvent>)) -> R {
        let result = self.step(change);
        self.wake();
        result
    }

    /// The same for frequent changes: wakes waiters only if there was an event.
    pub(super) fn step<R>(&self, change: impl FnOnce(&mut PeerTable) -> (R, Vec<PeerEvent>)) -> R {
        let (result, events) = change(&mut self.lock().members);
        let loud = !events.is_empty();
        for act in events {
            self.tell(act);
        }
        if loud {
            self.wake();
        }
        result
    }

    fn wake(&self) {
        self.turned.notify_all();
        self.changed.send_replace(());
    }

    fn tell(&self, act: PeerEvent) {
        let told = match &act {
            PeerEvent::Ready(peer, ticket) => {
                tracing::debug!("{}: linked with {} ({})", self.options.me, peer.name, peer.incarnation);
                guarded("ready", || self.peering.ready(peer, *ticket))
            }
            PeerEvent::Lost(peer, cause) => {
                tracing::debug!("{}: lost {} ({}): {cause}", self.options.me, peer.name, peer.incarnation);
                guarded("lost", || self.peering.lost(peer, cause.clone()))
            }
            PeerEvent::Gone(peer, cause) => {
                tracing::debug!("{}: {} ({}) is gone: {cause}", self.options.me, peer.name, peer.incarnation);
                guarded("gone", || self.peering.gone(peer, cause.clone()))
            }
            PeerEvent::Abandon(peer, ticket) => guarded("abandon", || self.peering.abandon(peer, *ticket)),
        };
        if let Err(status) = told {
            tracing::error!("{}: {status}", self.options.me);
        }
    }

    /// Logs that an attempt to link with a peer has failed, once for each cause. A disagreement is
    /// the cause of all that follows.
    pub(super) fn log_attempt(&self, peer: usize, why: &str) {
        let (me, name, disagreement) = (&self.options.me, &self.peers[peer], self.disagreement_with(peer));
        let now = Instant::now();
        let is_news = match &disagreement {
            Some(_) => self.step(|members| (members.is_new_disagreement(peer, now), Vec::new())),
            None => self.step(|members| (members.is_news(peer, why, now), Vec::new())),
        };
        if is_news {
            let next =
                if disagreement.is_some() { "no other attempt mends that" } else { "it is tried again" };
            let cause = disagreement.as_deref().unwrap_or(why);
            tracing::warn!("{me}: the link with {name} failed, and {next}: {cause}");
        }
    }

    /// How a peer disagrees with this process for good.
    pub(super) fn disagreement_with(&self, peer: usize) -> Option<String> {
        self.see(|members| members.disagreement_with(peer).map(str::to_owned))
    }

    /// A receiver of changes from now on.
    pub(super) fn watch(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    pub(super) fn phase(&self) -> ServicePhase {
        self.lock().phase
    }

    /// Moves on to `to` if the phase is `from`; returns the phase before.
    pub(super) fn advance(&self, from: &[ServicePhase], to: ServicePhase) -> ServicePhase {
        let mut inner = self.lock();
        let before = inner.phase;
        if from.contains(&before) {
            inner.phase = to;
        }
        drop(inner);
        self.wake();
        before
    }

    pub(super) fn state(&self) -> NodeState {
        let inner = self.lock();
        match inner.phase {
            ServicePhase::Created => NodeState::Created,
            ServicePhase::Started if inner.members.all_linked() => NodeState::Connected,
            ServicePhase::Started => NodeState::Started,
            ServicePhase::Stopping => NodeState::Stopping,
            ServicePhase::Stopped => NodeState::Stopped,
        }
    }

    /// Blocks until `until` returns true, or `timeout` is over. Returns whether `until` did.
    pub(super) fn wait(
        &self,
        timeout: Duration,
        mut until: impl FnMut(&PeerTable, ServicePhase) -> bool,
    ) -> bool {
        let start = Instant::now();
        let mut inner = self.lock();
        while !until(&inner.members, inner.phase) {
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                return false;
            }
            inner = self.turned.wait_timeout(inner, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// This process reports a link as dead. The peer will be told.
    pub(super) fn report(&self, peer: usize, number: u64, why: &str) -> bool {
        let why = shorten(why, MAX_REASON);
        let mut inner = self.lock();
        let Some(link) = inner.members.report(peer, number, &why) else { return false };
        // An earlier one is of no use: the peer knows that a newer link has taken that one's place.
        inner.reports[peer] = Some(LossReport { link, why });
        drop(inner);
        self.wake();
        self.nudges[peer].notify_one();
        true
    }

    pub(super) fn take_report(&self, peer: usize) -> Option<LossReport> {
        self.lock().reports[peer].take()
    }

    pub(super) fn index_of(&self, name: &TaskId) -> Option<usize> {
        self.peers.binary_search(name).ok()
    }

    /// The clients for tensor calls.
    pub(super) fn tensor_clients(&self) -> MutexGuard<'_, Option<TensorClients>> {
        self.tensor_clients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The address of that peer, as the cluster says it.
    pub(super) fn address(&self, peer: usize) -> String {
        self.options.cluster.address(&self.peers[peer]).map(HostPort::to_string).unwrap_or_default()
    }

    /// Whether this process starts the links with that peer.
    pub(super) fn starts(&self, peer: usize) -> bool {
        self.options.me < self.peers[peer]
    }

    /// The identity of this process in a request to that peer, or to one life of it only.
    pub(super) fn caller(&self, peer: usize, life: Option<Incarnation>) -> Option<grpc::Caller> {
        Some(grpc::Caller {
            version: self.version,
            cluster_digest: self.digest,
            from: Some(task(&self.options.me)),
            incarnation: self.options.incarnation.get(),
            to: Some(task(&self.peers[peer])),
            to_incarnation: life.map_or(0, Incarnation::get),
        })
    }

    /// The introduction of this process.
    pub(super) fn member(&self) -> Option<grpc::Member> {
        Some(grpc::Member {
            incarnation: self.options.incarnation.get(),
            host_id: self.options.host_id.clone(),
        })
    }

    /// The error for doing `tried` in the present state.
    pub(super) fn state_error(&self, tried: &'static str) -> BootstrapError {
        BootstrapError::State { me: self.options.me.clone(), tried, state: self.state() }
    }

    /// This process's cluster, in an error message.
    pub(super) fn shown_cluster(&self) -> String {
        shorten(&self.cluster_text, SHOWN_CLUSTER)
    }
}

/// A cluster that a peer has sent, in an error message.
pub(super) fn shown_cluster(text: &str) -> String {
    shorten(text, SHOWN_CLUSTER)
}

pub(super) fn task(name: &TaskId) -> grpc::Task {
    grpc::Task { job: name.job().to_owned(), index: name.task() }
}

/// Calls the peering. A panic becomes an error.
fn guarded<R>(what: &str, call: impl FnOnce() -> R) -> Result<R, Status> {
    // A panic can leave only the peering's own state unfinished; no lock is held and no state is
    // shared with it.
    catch_unwind(AssertUnwindSafe(call)).map_err(|panic| {
        let text = panic.downcast_ref::<&str>().copied().map(str::to_owned);
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        Status::new(Code::Internal, format!("the peering panicked in {what}: {}", shorten(&text, MAX_REASON)))
    })
}

/// Work for one attempt on a thread that may block. The peer counts as busy while it exists.
struct AttemptWork {
    shared: Arc<BootstrapShared>,
    peer: usize,
    info: PeerInfo,
    /// The endpoint that this thread owns now.
    ticket: Option<u64>,
}

impl Drop for AttemptWork {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            self.shared.tell(PeerEvent::Abandon(self.info.clone(), ticket));
        }
        self.shared.change(|members| (members.idle(self.peer), Vec::new()));
    }
}

const STOPPING: &str = "this process stops";

/// Makes this side's endpoint of a generation that the peer table has begun. `theirs` is the peer's
/// offer, if the peer has started. Returns this side's offer, or why there is none.
pub(super) async fn prepare(
    shared: &Arc<BootstrapShared>,
    peer: usize,
    info: &PeerInfo,
    theirs: Option<Vec<u8>>,
) -> Result<Vec<u8>, String> {
    let work = AttemptWork { shared: shared.clone(), peer, info: info.clone(), ticket: None };
    let done = on_own_thread(shared, move || {
        let made = guarded("prepare", || work.shared.peering.prepare(&work.info, theirs.as_deref()));
        let made: Result<Prepared, Status> = made.and_then(|made| made);
        work.shared.change(|members| members.prepared(work.peer, &work.info, made))
    });
    match done.await {
        Ok(made) => made,
        Err(lack) => shared.change(|members| members.prepared(peer, info, Err(lack))),
    }
}

/// Connects this side's endpoint of a generation with the endpoint behind the peer's offer.
pub(super) async fn connect(
    shared: &Arc<BootstrapShared>,
    peer: usize,
    info: &PeerInfo,
    offer: Vec<u8>,
) -> Result<(), String> {
    let Some(ticket) = shared.change(|members| (members.connecting(peer, info), Vec::new())) else {
        return Err("it was given up on the way".into());
    };
    let mut work = AttemptWork { shared: shared.clone(), peer, info: info.clone(), ticket: Some(ticket) };
    let done = on_own_thread(shared, move || {
        work.ticket = None;
        let (shared, info) = (&work.shared, &work.info);
        let (initiator, timeout) = (shared.starts(peer), shared.options.link_timeout);
        let made = guarded("connect", || shared.peering.connect(info, ticket, &offer, initiator, timeout));
        let made: Result<(), Status> = made.and_then(|made| made);
        shared.change(|members| members.connected(peer, info, ticket, made))
    });
    match done.await {
        Ok(made) => made,
        Err(lack) => shared.change(|members| members.connected(peer, info, ticket, Err(lack))),
    }
}

/// Runs `work` on a thread of its own, as it may block. The end of the service waits for it. Fails
/// if the system has no thread.
async fn on_own_thread<T: Send + 'static>(
    shared: &BootstrapShared,
    work: impl FnOnce() -> Result<T, String> + Send + 'static,
) -> Result<Result<T, String>, Status> {
    let (thread, outcome) = blocking::start(work).map_err(|error| {
        let what = format!(
            "this process has no thread for the link: {error}; raise its limit of address space (ulimit \
             -v) or of processes (ulimit -u)"
        );
        Status::new(Code::ResourceExhausted, what)
    })?;
    shared.keep(thread);
    Ok(outcome.await.unwrap_or_else(|_| Err(STOPPING.into())))
}

/// The incarnation that a peer has sent.
pub(super) fn incarnation(number: u64) -> Result<Incarnation, &'static str> {
    Incarnation::new(number).ok_or("incarnation 0 is nobody's")
}

#[cfg(test)]
mod tests {
    use super::super::peer_record::{GENERATION_PAUSE, OfferDecision, PeerIdentity};
    use super::super::service::PROTOCOL_VERSION;
    use super::super::tests::{Pretender, options, workers};
    use super::*;

    /// The peer starts link after link, and answers no call that tells it of an end.
    #[test]
    fn a_peer_that_is_not_told_of_its_lost_links_has_one_report_alone() {
        let peering = Arc::new(Pretender::default());
        let shared = BootstrapShared::new(options(&workers(2), 1), PROTOCOL_VERSION, peering);
        let who = PeerIdentity { incarnation: Incarnation::new(7).unwrap(), host_id: "there".into() };
        let mut now = Instant::now();
        for generation in 1..=100 {
            now += GENERATION_PAUSE;
            // The peering is told nothing.
            shared.step(|members| {
                members.meet(0, &who, false, now).unwrap();
                let (offered, _) = members.offered(0, who.incarnation, generation, b"x", now);
                let OfferDecision::Start(info) = offered else { panic!("it waits or is refused") };
                let endpoint = Prepared { ticket: generation, offer: Vec::new() };
                members.prepared(0, &info, Ok(endpoint)).0.unwrap();
                members.connecting(0, &info).unwrap();
                members.connected(0, &info, generation, Ok(())).0.unwrap();
                members.idle(0);
                members.said_ready(0, who.incarnation, generation);
                ((), Vec::new())
            });
            assert!(shared.report(0, generation, "its queue is broken"), "link {generation} is up");
        }
        let report = shared.take_report(0).expect("of the last link");
        assert_eq!(report.link.generation, 100);
        assert!(shared.take_report(0).is_none(), "earlier ones are gone");
    }
}
