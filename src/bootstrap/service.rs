//! The handle of the bootstrap service.

use super::BootstrapError;
use super::auth::Authenticator;
use super::error::MissingPeer;
use super::options::BootstrapOptions;
use super::peer_table::{LOOK_ROUND, PeerTable};
#[cfg(test)]
use super::peering::PeerInfo;
use super::peering::Peering;
use super::shared::{BootstrapShared, MAX_REASON, ServicePhase};
use super::tensors::{TensorCaller, TensorService};
use super::thread::{self, StopOrder};
use crate::store::MemoryStore;
use crate::wire::TaskId;
use crate::wire::shorten;
use std::fmt;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Time that the thread has to see the stop order. On a busy host it waits for a CPU.
const NOTICE: Duration = Duration::from_secs(1);

/// Version of the protocol in `proto/`. Members with different versions refuse each other.
pub(super) const PROTOCOL_VERSION: u32 = 3;

/// How far the node is between its start and its end.
///
/// ```
/// # let node = tensorwire::internals::doc_node();
/// use tensorwire::NodeState;
/// assert_eq!(node.state(), NodeState::Connected);
/// node.stop()?;
/// assert_eq!(node.state(), NodeState::Stopped);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NodeState {
    /// Made, not started. There is no thread and no socket yet.
    Created,
    /// Listens, and connects with its peers.
    Started,
    /// Linked with every peer. The loss of a peer leads back to `Started`.
    Connected,
    /// Tells its peers that it leaves, and ends its threads.
    Stopping,
    /// Stopped. It cannot be started again.
    Stopped,
}

impl fmt::Display for NodeState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            NodeState::Created => "created",
            NodeState::Started => "started",
            NodeState::Connected => "connected",
            NodeState::Stopping => "stopping",
            NodeState::Stopped => "stopped",
        })
    }
}

/// One process's part in the bootstrap of its cluster. Dropping it stops it.
///
/// All methods may be called from any thread, also concurrently.
pub struct Bootstrap {
    shared: Arc<BootstrapShared>,
    running: Mutex<Running>,
}

/// The parts of a running service.
#[derive(Default)]
struct Running {
    local_addr: Option<SocketAddr>,
    stop: Option<oneshot::Sender<StopOrder>>,
    thread: Option<JoinHandle<()>>,
}

impl Bootstrap {
    /// A service that is not started yet.
    ///
    /// # Errors
    /// [`BootstrapError::NotAMember`].
    pub fn new(options: BootstrapOptions, peering: Arc<dyn Peering>) -> Result<Self, BootstrapError> {
        Self::speaking(PROTOCOL_VERSION, options, peering)
    }

    /// The same with another version of the protocol.
    pub(super) fn speaking(
        version: u32,
        options: BootstrapOptions,
        peering: Arc<dyn Peering>,
    ) -> Result<Self, BootstrapError> {
        options.my_address()?;
        let shared = Arc::new(BootstrapShared::new(options, version, peering));
        Ok(Bootstrap { shared, running: Mutex::default() })
    }

    /// Serves the tensor calls of peers from the start on, and allows this process such calls. A
    /// tensor has at most `max_bytes`. Must be called before the start.
    pub fn serve_tensors(&self, service: Arc<dyn TensorService>, max_bytes: u64) -> TensorCaller {
        let _ = self.shared.tensors.set((service, max_bytes));
        TensorCaller::new(&self.shared)
    }

    fn running(&self) -> MutexGuard<'_, Running> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Listens, and begins to call the peers. Does nothing if the service is started already.
    /// Blocks while names are resolved.
    ///
    /// # Errors
    /// [`BootstrapError::Auth`], `NotLoopback`, `Resolve`, `Bind` or `Start`; it can be tried again
    /// then.
    /// [`BootstrapError::State`] if the service was stopped.
    pub fn start(&self) -> Result<(), BootstrapError> {
        self.start_with(BootstrapOptions::listen)
    }

    /// The same with a socket that listens already at the address of this process.
    ///
    /// # Errors
    /// As [`Bootstrap::start`].
    pub fn start_on(&self, listener: TcpListener) -> Result<(), BootstrapError> {
        self.start_with(|_| Ok(listener))
    }

    fn start_with(
        &self,
        listen: impl FnOnce(&BootstrapOptions) -> Result<TcpListener, BootstrapError>,
    ) -> Result<(), BootstrapError> {
        let mut running = self.running();
        match self.shared.phase() {
            ServicePhase::Created => {}
            ServicePhase::Started => return Ok(()),
            ServicePhase::Stopping | ServicePhase::Stopped => return Err(self.shared.state_error("start")),
        }
        let failed = |tried| move |source| BootstrapError::Start { tried, source };
        let options = &self.shared.options;
        let auth = Authenticator::open(&options.auth, &options.me)
            .map_err(|why| BootstrapError::Auth { me: options.me.clone(), why })?;
        let listener = listen(options)?;
        listener.set_nonblocking(true).map_err(failed("making the socket non-blocking"))?;
        let local_addr = listener.local_addr().map_err(failed("reading the socket's address"))?;
        let runtime = thread::runtime()?;
        let (stop, stopped) = oneshot::channel();
        let shared = self.shared.clone();
        // Before the thread starts: it answers its first callers by this phase.
        self.shared.advance(&[ServicePhase::Created], ServicePhase::Started);
        let run = move |runtime| thread::run(runtime, shared, Arc::new(auth), listener, stopped);
        let thread = thread::start(thread::NAME, runtime, run).inspect_err(|_| {
            self.shared.advance(&[ServicePhase::Started], ServicePhase::Created);
        })?;
        *running = Running { local_addr: Some(local_addr), stop: Some(stop), thread: Some(thread) };
        Ok(())
    }

    /// Waits until this process is linked with every peer. After a time-out it can be called again:
    /// the service goes on trying.
    ///
    /// # Errors
    /// [`BootstrapError::Missing`] names who is missing after `timeout`, and why.
    /// [`BootstrapError::Disagreement`] and `Ended` come at once.
    /// [`BootstrapError::State`] if the service is not started, or was stopped.
    pub fn join(&self, timeout: Duration) -> Result<(), BootstrapError> {
        let begin = Instant::now();
        loop {
            let left = timeout.saturating_sub(begin.elapsed());
            match self.joined_within(left.min(LOOK_ROUND))? {
                true => return Ok(()),
                false if left.is_zero() => return self.missing(begin.elapsed()),
                false => {}
            }
        }
    }

    /// The same for a caller that looks again and again. Returns whether all are linked, and does
    /// not say who is missing.
    ///
    /// # Errors
    /// [`BootstrapError::Disagreement`], `Ended` or `State`.
    pub fn joined_within(&self, timeout: Duration) -> Result<bool, BootstrapError> {
        let over = self.shared.wait(timeout, |members, phase| {
            let is_final = members.disagreement().is_some() || members.has_ended(Instant::now());
            phase != ServicePhase::Started || members.all_linked() || is_final
        });
        if self.shared.phase() != ServicePhase::Started {
            return Err(self.shared.state_error("join"));
        }
        match self.shared.see(|members| self.obstacle(members)) {
            Some(error) => Err(error),
            None => Ok(over),
        }
    }

    /// What no further attempt mends.
    fn obstacle(&self, members: &PeerTable) -> Option<BootstrapError> {
        let me = self.shared.options.me.clone();
        let peer = |index: usize| (self.shared.peers[index].clone(), self.shared.address(index));
        if let Some((index, why)) = members.disagreement() {
            let ((peer, address), why) = (peer(index), why.to_owned());
            return Some(BootstrapError::Disagreement { me, peer, address, why });
        }
        if !members.has_ended(Instant::now()) {
            return None;
        }
        let mut missing = self.absent(members);
        let ended = members.ended().map(|(index, why)| {
            let (name, address) = peer(index);
            missing.retain(|absent| absent.name != name);
            MissingPeer { name, address, last_error: why.to_owned() }
        });
        Some(BootstrapError::Ended { me, ended: ended.collect(), missing })
    }

    /// The peers that are not linked.
    fn absent(&self, members: &PeerTable) -> Vec<MissingPeer> {
        let absent = (0..self.shared.peers.len()).filter(|peer| members.link(*peer).is_none());
        let lack = self.shared.refused.lack();
        let last_error = |peer: usize| match &lack {
            Some(lack) => format!("{lack}; {}", members.why_missing(peer)),
            None => members.why_missing(peer),
        };
        let missing = |peer: usize| MissingPeer {
            name: self.shared.peers[peer].clone(),
            address: self.shared.address(peer),
            last_error: last_error(peer),
        };
        absent.map(missing).collect()
    }

    /// The error of a [`Bootstrap::join`] that has waited for `waited`, with the peers that are
    /// missing now.
    ///
    /// # Errors
    /// [`BootstrapError::Missing`], unless nobody is.
    pub fn missing(&self, waited: Duration) -> Result<(), BootstrapError> {
        self.join_result(waited, self.shared.see(|members| self.absent(members)))
    }

    /// The error of a join that has waited for `waited`, whose links with these peers are up and
    /// not usable yet.
    ///
    /// # Errors
    /// [`BootstrapError::Missing`], unless there are none.
    pub fn unready(&self, waited: Duration, peers: &[TaskId]) -> Result<(), BootstrapError> {
        let all = self.shared.peers.iter().enumerate();
        let missing = all.filter(|(_, name)| peers.contains(name)).map(|(peer, name)| MissingPeer {
            name: name.clone(),
            address: self.shared.address(peer),
            last_error: "its link is up, and no poll has processed that: this host lacks CPU time".into(),
        });
        self.join_result(waited, missing.collect())
    }

    /// How a join ends that has waited for `waited`, and still lacks these peers.
    fn join_result(&self, waited: Duration, missing: Vec<MissingPeer>) -> Result<(), BootstrapError> {
        let options = &self.shared.options;
        if missing.is_empty() {
            return Ok(());
        }
        Err(BootstrapError::Missing {
            me: options.me.clone(),
            incarnation: options.incarnation,
            waited,
            peers: self.shared.peers.len(),
            missing,
        })
    }

    /// The state of a node.
    pub fn state(&self) -> NodeState {
        self.shared.state()
    }

    /// Where it listens; `None` before it is started.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.running().local_addr
    }

    /// The store that this process serves to the members of its cluster.
    pub fn store(&self) -> &MemoryStore {
        &self.shared.store
    }

    /// The callers that were refused.
    #[cfg(test)]
    pub(super) fn refused(&self) -> &super::refused::RefusedCallers {
        &self.shared.refused
    }

    /// The peers with which this process is linked now, in ascending order.
    #[cfg(test)]
    pub fn linked(&self) -> Vec<PeerInfo> {
        let link = |peer| self.shared.see(|members| members.link(peer).map(|(info, _)| info));
        (0..self.shared.peers.len()).filter_map(link).collect()
    }

    /// Reports that the link with that [`PeerInfo::number`] is dead, which was ready. The service
    /// tells the peer, and makes a new generation if the peer lives. No `lost` follows. Returns
    /// whether that link was up.
    ///
    /// [`PeerInfo::number`]: super::PeerInfo::number
    pub fn report_lost(&self, peer: &TaskId, number: u64, why: &str) -> bool {
        let Some(peer) = self.shared.index_of(peer) else { return false };
        self.shared.report(peer, number, why)
    }

    /// Tells all peers that this process leaves, best effort, and ends every thread and socket. A
    /// second call waits for the first. The caller ends the links that are up.
    ///
    /// # Errors
    /// [`BootstrapError::StopTimeout`] if a thread is still inside [`Peering::prepare`] or
    /// [`Peering::connect`] after `timeout`; it ends by itself. [`BootstrapError::StopInCallback`].
    pub fn stop(&self, reason: &str, timeout: Duration) -> Result<(), BootstrapError> {
        self.stop_after_loss(reason, None, timeout)
    }

    /// Like [`Bootstrap::stop`]. Peers look at the peer whose loss is the reason before they hold
    /// this process for lost.
    ///
    /// # Errors
    /// Like [`Bootstrap::stop`].
    pub fn stop_after_loss(
        &self,
        reason: &str,
        lost: Option<TaskId>,
        timeout: Duration,
    ) -> Result<(), BootstrapError> {
        self.end(Some(shorten(reason, MAX_REASON)), lost, timeout)
    }

    fn end(
        &self,
        reason: Option<String>,
        because_of: Option<TaskId>,
        timeout: Duration,
    ) -> Result<(), BootstrapError> {
        let me = || self.shared.options.me.clone();
        let until = Instant::now() + timeout.min(Duration::from_secs(86_400));
        let (order, own_thread) = {
            let mut running = self.running();
            if self.shared.advance(&[ServicePhase::Created], ServicePhase::Stopped) == ServicePhase::Created {
                return Ok(());
            }
            self.shared.advance(&[ServicePhase::Started], ServicePhase::Stopping);
            let thread = running.thread.as_ref().map(|thread| thread.thread().id());
            (running.stop.take(), thread == Some(std::thread::current().id()))
        };
        if let Some(order) = order {
            // The receiver is gone only if the thread has ended.
            drop(order.send(StopOrder { reason, because_of, until }));
        }
        if own_thread {
            return Err(BootstrapError::StopInCallback { me: me() });
        }
        let ended = |within| {
            self.shared.wait(within, |members, phase| {
                phase == ServicePhase::Stopped && self.busy(members).next().is_none()
            })
        };
        let busy = || self.shared.see(|members| self.busy(members).collect::<Vec<_>>().join(", "));
        let in_time = ended(until.saturating_duration_since(Instant::now()));
        if !in_time && (!busy().is_empty() || !ended(NOTICE)) {
            let busy = busy();
            let why = match busy.is_empty() {
                true => "its thread got no time on a CPU; it ends by itself".to_owned(),
                false => format!("still making links with {busy}; they end when the fabric gives up"),
            };
            return Err(BootstrapError::StopTimeout { me: me(), waited: timeout, why });
        }
        // Under the lock: a second caller must not return before the thread is gone.
        let mut running = self.running();
        if let Some(thread) = running.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("{}: the bootstrap thread panicked", self.shared.options.me);
        }
        self.shared.await_threads();
        Ok(())
    }

    fn busy<'a>(&'a self, members: &'a super::peer_table::PeerTable) -> impl Iterator<Item = String> + 'a {
        let busy = members.names().enumerate().filter(|(peer, _)| members.is_busy(*peer));
        busy.map(|(_, name)| name.to_string())
    }

    /// Ends the service as a crash does: peers are not told, and attempts are not waited for.
    #[cfg(test)]
    pub(super) fn kill(&self) {
        let is_over = self.end(None, None, Duration::ZERO).is_ok();
        assert!(
            is_over || self.shared.wait(Duration::from_secs(5), |_, phase| phase == ServicePhase::Stopped)
        );
    }
}

impl fmt::Debug for Bootstrap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (me, state) = (&self.shared.options.me, self.state());
        f.debug_struct("Bootstrap").field("me", me).field("state", &state).finish_non_exhaustive()
    }
}

impl Drop for Bootstrap {
    fn drop(&mut self) {
        let grace = self.shared.options.link_timeout + Duration::from_secs(1);
        if let Err(error) = self.stop("the process drops its bootstrap service", grace) {
            tracing::warn!("{error}");
        }
    }
}
