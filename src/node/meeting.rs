//! How members meet that were given no cluster: through a store.
//!
//! Each member takes a free port, and publishes its address under its number. Task 0 waits for all
//! of them, checks that they fit together, and publishes the cluster, which the others wait for.
//! The last one to read it in a file removes the keys, so that another run can meet there. A store
//! that task 0 serves ends with it.

use super::error::NodeError;
use super::host;
use super::options::auth_settings;
use crate::bootstrap::{
    BootstrapError, Listening, MEETING_KEYS, RemoteStore, StoreOptions, StoreServer, resolve,
};
use crate::config::{Config, Meeting, StoreAddress};
use crate::store::{FileStore, PrefixStore, Store, StoreError};
use crate::wire::{Cluster, HostPort, TaskId, quote, shorten};
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Why members could not meet.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MeetingError {
    /// Task 0 can't serve the store.
    #[error(
        "{me} can't serve the store at which the members meet, which {origin} names: {source}. If a store of \
         another program has the port, set TENSORWIRE_STORE=tcp://HOST:PORT with another one on every member"
    )]
    Serve {
        /// The name of this process.
        me: TaskId,
        /// What says where they meet.
        origin: String,
        /// The error of the service.
        source: Box<BootstrapError>,
    },
    /// The store can't be used.
    #[error("{me} can't meet the other members at {store}, which {origin} names: {source}")]
    Store {
        /// The name of this process.
        me: TaskId,
        /// Where they meet.
        store: StoreAddress,
        /// What says where they meet.
        origin: String,
        /// What the store says.
        source: Box<StoreError>,
    },
    /// This process can't listen, or has no address for the others.
    #[error("{me} has no address at which the other members reach it: {why}")]
    Address {
        /// The name of this process.
        me: TaskId,
        /// What was tried, and what to change.
        why: String,
    },
    /// Not all members came in time.
    #[error(
        "{me} waited {waited:?} at {store} for the other members; {} of {size} have not come: {}. {}Do all \
         run, with the same store and size?",
        missing.len(), list(missing), refusals(refused)
    )]
    Missing {
        /// The name of this process.
        me: TaskId,
        /// Where they meet.
        store: StoreAddress,
        /// The time waited.
        waited: Duration,
        /// The number of members.
        size: u32,
        /// Those that have not come.
        missing: Box<[TaskId]>,
        /// The last callers that the store has refused, by address or name, with the reasons, and
        /// what the process lacks to accept callers. Task 0 knows them.
        refused: Box<[String]>,
    },
    /// Another process has the name.
    #[error(
        "the name {me} is taken at {store} by another process ({by}): two processes have the same rank; or \
         the store has what is left of an earlier run: delete the file, or name another one"
    )]
    Taken {
        /// The name of both.
        me: TaskId,
        /// Where they meet.
        store: StoreAddress,
        /// What the other one has published of itself.
        by: String,
    },
    /// Members do not agree on their number.
    #[error(
        "{me} is one of {ours} members, and another one that meets at {store} says that there are {theirs}: \
         give all the same size, and each run a store of its own"
    )]
    Size {
        /// The name of this process.
        me: TaskId,
        /// Where they meet.
        store: StoreAddress,
        /// What this process was told.
        ours: u32,
        /// What the other one was told, in quotes.
        theirs: String,
    },
    /// A member has ended before all had met.
    #[error(
        "{who} (process {pid} of this host) has ended before all members had met at {store}: see its log"
    )]
    Died {
        /// The member.
        who: TaskId,
        /// Its process.
        pid: u32,
        /// Where they meet.
        store: StoreAddress,
    },
    /// All have come, and task 0 has not told the cluster.
    #[error("{by} has come to {store}, and has not told the cluster within {waited:?}: see its log")]
    Untold {
        /// Task 0.
        by: TaskId,
        /// Where they meet.
        store: StoreAddress,
        /// The time waited.
        waited: Duration,
    },
    /// The members make no cluster.
    #[error("the members that met at {store} make no cluster: {why}")]
    Cluster {
        /// Where they meet.
        store: StoreAddress,
        /// What does not fit.
        why: String,
    },
}

/// Members that an error names.
const SHOWN: usize = 16;

fn list(missing: &[TaskId]) -> String {
    let names = missing.iter().take(SHOWN).map(TaskId::to_string).collect::<Vec<_>>().join(", ");
    match missing.len().saturating_sub(SHOWN) {
        0 => names,
        more => format!("{names} and {more} more"),
    }
}

fn refusals(refused: &[String]) -> String {
    if refused.is_empty() { String::new() } else { format!("Callers were refused: {}. ", refused.join("; ")) }
}

/// What a member has of a meeting.
pub(super) struct Met {
    pub cluster: Cluster,
    /// Listens at the address that was published.
    pub listener: TcpListener,
    /// Serves the store, in task 0.
    pub server: Option<StoreServer>,
}

/// How the published outcome begins: the members make a cluster, or they don't.
const GOOD: &str = "ok ";
const BAD: &str = "no ";
/// How long a member waits before it looks whether others have ended.
const TURN: Duration = Duration::from_secs(1);
/// How long task 0 serves the store after a failure, for those who are between two waits.
const LAST_WORDS: Duration = Duration::from_millis(200);
/// Bytes of the words of task 0 in an error.
const MAX_WORDS: usize = 1024;

/// Meets the other members.
///
/// # Errors
/// [`MeetingError`]. [`NodeError::Bootstrap`] if this process can't listen.
pub(super) fn meet(meeting: &Meeting) -> Result<Met, NodeError> {
    let begin = Instant::now();
    let config = &meeting.config;
    let (listener, address) = listen(meeting)?;
    let (store, server) = open(meeting)?;
    let of_run = match &*meeting.run {
        "" => MEETING_KEYS.into(),
        run => format!("{MEETING_KEYS}{run}/"),
    };
    let this = MeetingMember {
        meeting,
        me: config.task_id(),
        store: PrefixStore::new(of_run, store),
        server: server.as_ref(),
    };
    this.agree_on_size()?;
    this.publish(&address)?;
    let left = config.join_timeout.saturating_sub(begin.elapsed());
    let cluster = if config.task == 0 { this.gather(left)? } else { this.read(left)? };
    this.leave()?;
    tracing::info!("{}: {} members have met at {}", this.me, meeting.size, meeting.store);
    Ok(Met { cluster, listener, server })
}

fn open(meeting: &Meeting) -> Result<(Arc<dyn Store>, Option<StoreServer>), MeetingError> {
    let Meeting { config, store, origin, size, .. } = meeting;
    let me = config.task_id().clone();
    let failed = {
        let (me, store, origin) = (me.clone(), store.clone(), origin.clone());
        |source| MeetingError::Store { me, store, origin, source: Box::new(source) }
    };
    match store {
        StoreAddress::File(path) => {
            let store = FileStore::open(path, config.join_timeout).map_err(failed)?;
            Ok((Arc::new(store), None))
        }
        StoreAddress::Tcp(address) => {
            let names: Vec<TaskId> = (0..*size).filter_map(|task| task_of(config, task)).collect();
            let first = names.first().cloned().unwrap_or_else(|| me.clone());
            let mut options = StoreOptions::new(me.clone(), first, address.clone());
            options.auth = auth_settings(config);
            options.allow_non_loopback = config.allow_non_loopback;
            options.timeout = config.join_timeout;
            if config.task != 0 {
                return Ok((Arc::new(RemoteStore::connect(&options).map_err(failed)?), None));
            }
            let origin = origin.clone();
            let server = StoreServer::start(&options, names).map_err(|source| MeetingError::Serve {
                me,
                origin,
                source: Box::new(source),
            })?;
            Ok((Arc::new(server.store().clone()), Some(server)))
        }
    }
}

fn task_of(config: &Config, task: u32) -> Option<TaskId> {
    // The configuration has checked the job.
    TaskId::new(&config.job, task).ok()
}

/// Listens at a free port. Returns the address that others reach too.
fn listen(meeting: &Meeting) -> Result<(TcpListener, HostPort), NodeError> {
    let config = &meeting.config;
    let me = config.task_id();
    let refused = |why: String| MeetingError::Address { me: me.clone(), why };
    let bind = match config.bind {
        Some(bind) => bind,
        None => SocketAddr::new(reached(me, &meeting.store, config)?, 0),
    };
    let asked = HostPort::try_from(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 1));
    let asked = asked.map_err(|error| refused(error.to_string()))?;
    let (auth, allow_non_loopback) = (config.auth_mode(), config.allow_non_loopback);
    let listening = Listening { me, address: &asked, bind: Some(bind), auth, allow_non_loopback };
    let listener = listening.listen().map_err(|error| match error {
        // The program has set no address: the store decides on it.
        BootstrapError::NotLoopback { address, auth, .. } if config.bind.is_none() => {
            let whose = format!("{me}, from which it calls {},", meeting.store);
            BootstrapError::NotLoopback { whose, address, auth }
        }
        error => error,
    })?;
    let local = listener.local_addr().map_err(|error| refused(error.to_string()))?;
    let ip = match local.ip() {
        ip if ip.is_unspecified() => reached(me, &meeting.store, config)?,
        ip => ip,
    };
    let address = HostPort::try_from(SocketAddr::new(ip, local.port()));
    Ok((listener, address.map_err(|error| refused(error.to_string()))?))
}

/// The address of this host that the other members reach: the one from which it calls the host of
/// the store. In a file nothing says where the others are.
fn reached(me: &TaskId, store: &StoreAddress, config: &Config) -> Result<IpAddr, NodeError> {
    let StoreAddress::Tcp(address) = store else {
        return match config.bind {
            None => Ok(Ipv4Addr::LOCALHOST.into()),
            Some(bind) => {
                let why = format!("bind is {bind}, and in a file it must be an address of this host");
                Err(MeetingError::Address { me: me.clone(), why }.into())
            }
        };
    };
    let targets = resolve(me, address)?;
    let local = |target: &SocketAddr| {
        let any: IpAddr =
            if target.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        // Nothing is sent: the kernel only chooses the route.
        let socket = UdpSocket::bind((any, 0))?;
        socket.connect(target)?;
        socket.local_addr()
    };
    let found: Vec<_> = targets.iter().map(local).collect();
    let failed = found.iter().find_map(|found| found.as_ref().err().map(ToString::to_string));
    let ip = found.into_iter().flatten().map(|found| found.ip()).find(|ip| !ip.is_unspecified());
    ip.ok_or_else(|| {
        let why = failed.unwrap_or_else(|| "the name has no address".into());
        let why = format!("no route to {address}: {why}; set bind to an address of this host, IP:0");
        MeetingError::Address { me: me.clone(), why }.into()
    })
}

/// One member at the store.
struct MeetingMember<'a> {
    meeting: &'a Meeting,
    me: &'a TaskId,
    store: PrefixStore,
    /// In task 0, if it serves the store.
    server: Option<&'a StoreServer>,
}

/// What a member publishes: where it listens, on which host, as which process.
struct PublishedMember {
    address: HostPort,
    host: String,
    pid: u32,
    /// The namespace of its process ids.
    pids: String,
}

impl PublishedMember {
    fn read(value: &[u8]) -> Option<PublishedMember> {
        let mut lines = str::from_utf8(value).ok()?.lines();
        let mut line = || lines.next();
        let (address, host) = (line()?.parse().ok()?, line()?.into());
        Some(PublishedMember { address, host, pid: line()?.parse().ok()?, pids: line()?.into() })
    }

    /// Whether it was a process of this host that is gone. `false` if this process can't tell.
    fn has_ended(&self) -> bool {
        let is_here = || host::identity().is_ok_and(|here| here == self.host) && pids() == self.pids;
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        pid.is_some_and(|pid| is_here() && test_kill_process(pid) == Err(Errno::SRCH))
    }
}

/// The namespace of process ids of this process; empty if `/proc` does not tell.
fn pids() -> String {
    std::fs::read_link("/proc/self/ns/pid").map_or_else(|_| String::new(), |it| it.display().to_string())
}

/// Sets a key that is not set, by the call `set`, and returns its value. If its answer is lost
/// before the end of the time, `look` tells whether the call was done. A store that does not answer
/// a look either for `silence` has ended.
fn claim(
    set: impl Fn() -> Result<Option<Vec<u8>>, StoreError>,
    look: impl Fn() -> Result<Vec<u8>, StoreError>,
    (silence, within): (Duration, Duration),
) -> Result<Option<Vec<u8>>, StoreError> {
    let begin = Instant::now();
    loop {
        let error = match set() {
            Err(error @ StoreError::Unreachable { waited, .. }) if waited < within => error,
            said => return said,
        };
        let lost = Instant::now();
        loop {
            let may_wait = lost.elapsed() < silence && begin.elapsed() < within;
            match look() {
                Ok(value) => return Ok(Some(value)),
                // It was not done.
                Err(StoreError::Timeout { .. }) if may_wait => break,
                Err(StoreError::Unreachable { .. }) if may_wait => {}
                Err(_) => return Err(error),
            }
        }
    }
}

impl MeetingMember<'_> {
    fn failed(&self, source: StoreError) -> MeetingError {
        let Meeting { store, origin, .. } = self.meeting;
        MeetingError::Store {
            me: self.me.clone(),
            store: store.clone(),
            origin: origin.clone(),
            source: Box::new(source),
        }
    }

    /// Sets a key that is not set, and returns its value.
    fn claim(&self, key: &str, value: &[u8]) -> Result<Option<Vec<u8>>, MeetingError> {
        let set = || self.store.compare_and_set(key, None, value);
        let look = || self.store.get(key, TURN);
        let config = &self.meeting.config;
        claim(set, look, (config.silence_bound, config.join_timeout)).map_err(|error| self.failed(error))
    }

    fn agree_on_size(&self) -> Result<(), MeetingError> {
        let ours = self.meeting.size;
        let text = ours.to_string();
        match self.claim("size", text.as_bytes())? {
            Some(said) if said != text.as_bytes() => Err(MeetingError::Size {
                me: self.me.clone(),
                store: self.meeting.store.clone(),
                ours,
                theirs: quote(&String::from_utf8_lossy(&said)),
            }),
            _ => Ok(()),
        }
    }

    fn publish(&self, address: &HostPort) -> Result<(), NodeError> {
        let entry = format!("{address}\n{}\n{}\n{}", host::identity()?, std::process::id(), pids());
        match self.claim(&key(self.me.task()), entry.as_bytes())? {
            Some(said) if said != entry.as_bytes() => {
                let by = String::from_utf8_lossy(&said).replace('\n', ", ");
                let (me, store) = (self.me.clone(), self.meeting.store.clone());
                Err(MeetingError::Taken { me, store, by: quote(&by) }.into())
            }
            _ => Ok(()),
        }
    }

    /// Waits for all, and publishes the cluster.
    fn gather(&self, left: Duration) -> Result<Cluster, MeetingError> {
        let end = Instant::now() + left;
        let keys: Vec<String> = (0..self.meeting.size).map(key).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        self.in_turns(left, 0..self.meeting.size, |turn| self.store.wait(&keys, turn))
            .inspect_err(|error| self.tell_failure(error))?;
        let mut entries = Vec::new();
        for key in keys {
            let left = end.saturating_duration_since(Instant::now());
            let value = self.store.get(key, left).map_err(|error| self.failed(error))?;
            entries
                .push(PublishedMember::read(&value).ok_or_else(|| format!("{key} has published nonsense")));
        }
        let cluster = entries.into_iter().collect::<Result<Vec<_>, _>>().and_then(|all| self.cluster(all));
        let outcome = match &cluster {
            Ok(cluster) => format!("{GOOD}{cluster}"),
            Err(why) => format!("{BAD}{why}"),
        };
        self.store.set("outcome", outcome.as_bytes()).map_err(|error| self.failed(error))?;
        cluster.map_err(|why| self.no_cluster(why))
    }

    /// The cluster of the entries, in the order of the members.
    fn cluster(&self, entries: Vec<PublishedMember>) -> Result<Cluster, String> {
        let name = |task: usize| format!("{}/{task}", self.me.job());
        let far = entries.iter().position(|entry| entry.host != entries[0].host);
        let near = entries.iter().position(|entry| entry.address.ip().is_some_and(|ip| ip.is_loopback()));
        if let (Some(far), Some(near)) = (far, near) {
            return Err(format!(
                "{} and {} are on different hosts, and {} is at {}, which no other host reaches: set bind to \
                 an address of the host, IP:0, on each (TENSORWIRE_BIND), or meet at a tcp:// store that is \
                 not on the loopback interface",
                name(0),
                name(far),
                name(near),
                entries[near].address
            ));
        }
        let addresses = entries.into_iter().map(|entry| entry.address).collect();
        Cluster::new([(self.me.job().to_owned(), addresses)]).map_err(|error| error.to_string())
    }

    /// Waits for the cluster that task 0 publishes.
    fn read(&self, left: Duration) -> Result<Cluster, MeetingError> {
        let outcome = self.in_turns(left, 0..1, |turn| self.store.get("outcome", turn))?;
        let outcome = String::from_utf8_lossy(&outcome).into_owned();
        match outcome.strip_prefix(GOOD) {
            Some(cluster) => cluster.parse().map_err(|error| self.no_cluster(format!("{error}"))),
            None => Err(self.no_cluster(shorten(outcome.strip_prefix(BAD).unwrap_or(&outcome), MAX_WORDS))),
        }
    }

    /// Waits a while at a time, and looks in between whether one of these members has ended. A
    /// store that gives no answer for `silence_bound` counts as ended, as a member does.
    fn in_turns<T>(
        &self,
        left: Duration,
        needed: Range<u32>,
        wait: impl Fn(Duration) -> Result<T, StoreError>,
    ) -> Result<T, MeetingError> {
        let silence = self.meeting.config.silence_bound;
        let (end, mut answered, mut turn) = (Instant::now() + left, Instant::now(), TURN);
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match wait(left.min(turn)) {
                Ok(value) => return Ok(value),
                Err(StoreError::Timeout { .. }) if left > turn => {
                    (answered, turn) = (Instant::now(), TURN);
                    self.look_for_deaths(needed.clone())?;
                }
                Err(StoreError::Timeout { .. }) => return Err(self.missing()),
                // A slow server gets more time for its answer.
                Err(StoreError::Unreachable { .. }) if left > turn && answered.elapsed() < silence => {
                    turn = TURN.max((turn * 2).min(silence.saturating_sub(answered.elapsed())));
                }
                Err(error) => return Err(self.failed(error)),
            }
        }
    }

    /// Fails if one of these members has come and ended.
    fn look_for_deaths(&self, members: Range<u32>) -> Result<(), MeetingError> {
        for task in members {
            let entry = match self.store.get(&key(task), Duration::ZERO) {
                Ok(entry) => entry,
                Err(StoreError::Timeout { .. }) => continue,
                // The next wait tells it. Each look would take its time.
                Err(_) => return Ok(()),
            };
            let entry = PublishedMember::read(&entry).filter(PublishedMember::has_ended);
            if let (Some(entry), Some(who)) = (entry, task_of(&self.meeting.config, task)) {
                let store = self.meeting.store.clone();
                return Err(MeetingError::Died { who, pid: entry.pid, store });
            }
        }
        Ok(())
    }

    /// Tells the others that one has ended or has not come, so that they do not wait either.
    fn tell_failure(&self, error: &MeetingError) {
        if !matches!(error, MeetingError::Died { .. } | MeetingError::Missing { .. }) {
            return;
        }
        if let Err(error) = self.store.set("outcome", format!("{BAD}{error}").as_bytes()) {
            tracing::debug!("{}: {error}", self.me);
        }
        if self.server.is_some() {
            std::thread::sleep(LAST_WORDS);
        }
    }

    fn no_cluster(&self, why: String) -> MeetingError {
        MeetingError::Cluster { store: self.meeting.store.clone(), why }
    }

    /// The error of a wait that is over: who has not come, or has not told the cluster.
    fn missing(&self) -> MeetingError {
        let (me, store, size) = (self.me.clone(), self.meeting.store.clone(), self.meeting.size);
        let waited = self.meeting.config.join_timeout;
        let keys: Vec<String> = (0..size).map(key).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let missing = match self.store.wait(&keys, Duration::ZERO) {
            Ok(()) => Vec::new(),
            Err(StoreError::Timeout { missing, .. }) => missing,
            Err(error) => return self.failed(error),
        };
        let is_missing =
            |task: u32| missing.iter().any(|missing| missing.rsplit('/').next() == Some(&task.to_string()));
        let all = (0..size).filter(|task| is_missing(*task));
        let missing: Box<[TaskId]> = all.filter_map(|task| task_of(&self.meeting.config, task)).collect();
        if let (true, Some(by)) = (missing.is_empty(), task_of(&self.meeting.config, 0)) {
            return MeetingError::Untold { by, store, waited };
        }
        let refused = self.server.map(StoreServer::refused).unwrap_or_default().into();
        MeetingError::Missing { me, store, waited, size, missing, refused }
    }

    /// The last one to read the cluster removes the keys from a file.
    fn leave(&self) -> Result<(), MeetingError> {
        if matches!(self.meeting.store, StoreAddress::Tcp(_)) {
            return Ok(());
        }
        let gone = self.store.add("gone", 1).map_err(|error| self.failed(error))?;
        if gone != i64::from(self.meeting.size) {
            return Ok(());
        }
        let keys = (0..self.meeting.size).map(key);
        let keys = keys.chain(["size", "outcome", "gone"].map(str::to_owned));
        for key in keys {
            self.store.delete(&key).map_err(|error| self.failed(error))?;
        }
        Ok(())
    }
}

/// The key under which a member publishes itself.
fn key(task: u32) -> String {
    format!("member/{task}")
}

#[cfg(test)]
#[path = "meeting_tests.rs"]
pub(super) mod tests;
