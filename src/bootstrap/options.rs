//! Options of the bootstrap service, and its listener.

use super::BootstrapError;
use super::auth::{AuthMode, AuthSettings};
use crate::wire::shorten;
use crate::wire::{Cluster, HostPort, Incarnation, TaskId};
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::time::Duration;

/// How long making one link may take before the attempt is given up.
pub const LINK_TIMEOUT: Duration = Duration::from_secs(5);

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 1024;

/// Bytes of the longest host id.
pub(super) const MAX_HOST_ID: usize = 128;

/// Options of the bootstrap service. The settings of `config` have the defaults.
#[derive(Clone, Debug)]
pub struct BootstrapOptions {
    /// The name of this process.
    pub me: TaskId,
    /// All members, the same on each of them.
    pub cluster: Cluster,
    /// The incarnation of this process.
    pub incarnation: Incarnation,
    /// The address to listen on instead of this process's address in the cluster. Port 0 takes any
    /// free port.
    pub bind: Option<SocketAddr>,
    /// Whether each member has listened at its address before this process knew the cluster. Then
    /// one where nobody listens has ended, until it says `Hello` again.
    pub have_met: bool,
    /// How members prove who they are.
    pub auth: AuthSettings,
    /// Whether to listen on an address that other hosts reach, although `auth` does not prove who
    /// they are.
    pub allow_non_loopback: bool,
    /// Time between two heartbeats to each peer.
    pub heartbeat: Duration,
    /// Silence after which a peer counts as dead.
    pub silence: Duration,
    /// How long making one link may take before the attempt is given up. Nodes use
    /// [`LINK_TIMEOUT`].
    pub link_timeout: Duration,
    /// Equal for all members on this host, different on other hosts. At most [`MAX_HOST_ID`] bytes.
    pub host_id: String,
}

impl BootstrapOptions {
    /// Member `me` of `cluster`, with short times.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn for_tests(me: TaskId, cluster: Cluster, incarnation: Incarnation) -> Self {
        BootstrapOptions {
            me,
            cluster,
            incarnation,
            bind: None,
            have_met: false,
            auth: AuthSettings::Uid,
            allow_non_loopback: false,
            heartbeat: Duration::from_millis(100),
            silence: Duration::from_secs(3),
            link_timeout: LINK_TIMEOUT,
            host_id: "host".into(),
        }
    }

    /// Listens at the address of this process. Refuses clusters with addresses that are open to
    /// other hosts, unless the options permit them. Blocks while names are looked up.
    ///
    /// # Errors
    /// [`BootstrapError::NotAMember`], `NotLoopback`, `Resolve` or `Bind`.
    pub fn listen(&self) -> Result<TcpListener, BootstrapError> {
        let (auth, allow_non_loopback) = (self.auth.mode(), self.allow_non_loopback);
        let (me, address, bind) = (&self.me, self.my_address()?, self.bind);
        Listening { me, address, bind, auth, allow_non_loopback }.listen()
    }

    /// This process's address in the cluster.
    pub(super) fn my_address(&self) -> Result<&HostPort, BootstrapError> {
        self.cluster.address(&self.me).ok_or_else(|| BootstrapError::NotAMember {
            me: self.me.clone(),
            cluster: shorten(&self.cluster.to_string(), 500),
        })
    }
}

/// What a service listens on.
#[derive(Clone, Copy, Debug)]
pub struct Listening<'a> {
    /// The name of this process.
    pub me: &'a TaskId,
    /// Where others reach it.
    pub address: &'a HostPort,
    /// The address to listen on instead.
    pub bind: Option<SocketAddr>,
    /// How others prove who they are.
    pub auth: AuthMode,
    /// Whether to listen on an address that other hosts reach, although `auth` does not prove who
    /// they are.
    pub allow_non_loopback: bool,
}

impl Listening<'_> {
    /// Listens at the first address that this host has. Blocks while the name is looked up.
    ///
    /// # Errors
    /// [`BootstrapError::NotLoopback`], `Resolve` or `Bind`.
    pub fn listen(&self) -> Result<TcpListener, BootstrapError> {
        let mut listeners = self.listen_at(self.candidates()?, false)?;
        Ok(listeners.swap_remove(0))
    }

    /// Listens at each address of the name that this host has. Callers may use any of them.
    ///
    /// # Errors
    /// [`BootstrapError::NotLoopback`] or `Resolve`; `Bind` if it can listen at none.
    pub fn listen_at_each(&self) -> Result<Vec<TcpListener>, BootstrapError> {
        self.listen_at(self.candidates()?, true)
    }

    fn candidates(&self) -> Result<Vec<SocketAddr>, BootstrapError> {
        match self.bind {
            Some(address) => Ok(vec![address]),
            None => resolve(self.me, self.address),
        }
    }

    /// Listens at each of these addresses that this host has, or at the first one. The listeners
    /// are one at least.
    pub(super) fn listen_at(
        &self,
        candidates: Vec<SocketAddr>,
        each: bool,
    ) -> Result<Vec<TcpListener>, BootstrapError> {
        self.check_exposure(&candidates)?;
        let (mut listeners, mut found, mut failed) = (Vec::new(), Vec::new(), None);
        for (at, address) in candidates.iter().enumerate() {
            // A name may have one twice, in /etc/hosts.
            if candidates[..at].contains(address) {
                continue;
            }
            // The standard library sets SO_REUSEADDR, so that a restart on the same port works at
            // once.
            match TcpListener::bind(address) {
                Ok(listener) => {
                    // Without it, fewer callers may wait to be accepted.
                    let _ = rustix::net::listen(&listener, BACKLOG);
                    listeners.push(listener);
                    found.push(*address);
                    if !each {
                        break;
                    }
                }
                // `localhost` may stand for an address family that this host does not have. For
                // one listener every other failure is final: another address of the name would
                // hide that the first one is taken.
                Err(error) => {
                    let absent = error.kind() == ErrorKind::AddrNotAvailable
                        || error.raw_os_error() == Some(libc::EAFNOSUPPORT);
                    if !absent || failed.is_none() {
                        failed = Some((*address, error, absent));
                    }
                    if !absent && !each {
                        break;
                    }
                }
            }
        }
        match failed {
            Some((address, source, _)) if listeners.is_empty() => {
                return Err(self.bind_error(address, source));
            }
            Some((address, error, false)) => {
                let error = self.bind_error(address, error);
                tracing::warn!("{error}. It listens at the other addresses of {}", self.address);
            }
            None if listeners.is_empty() => {
                return Err(BootstrapError::Resolve {
                    whose: self.me.clone(),
                    address: self.address.to_string(),
                    source: ErrorKind::NotFound.into(),
                });
            }
            _ => {}
        }
        if found.iter().all(|address| self.is_unreachable(*address)) {
            tracing::warn!(
                "{}: {} leads to {}, where no other host reaches it: see /etc/hosts, or give an IP \
                 address of the network",
                self.me,
                self.address,
                found[0].ip()
            );
        }
        Ok(listeners)
    }

    /// Whether a name that others may use leads to this host alone, as many have their own name in
    /// /etc/hosts.
    fn is_unreachable(&self, found: SocketAddr) -> bool {
        let is_host = self.address.name().is_some_and(|name| name != "localhost");
        self.bind.is_none() && is_host && found.ip().is_loopback() && reaches_beyond(self.auth)
    }

    fn check_exposure(&self, candidates: &[SocketAddr]) -> Result<(), BootstrapError> {
        match candidates.iter().find(|address| !address.ip().is_loopback()) {
            Some(address) if !self.allow_non_loopback && !reaches_beyond(self.auth) => {
                let whose = if self.bind.is_some() { "the bind setting".into() } else { self.me.to_string() };
                let (address, auth) = (address.to_string(), self.auth);
                Err(BootstrapError::NotLoopback { whose, address, auth })
            }
            _ => Ok(()),
        }
    }

    fn bind_error(&self, address: SocketAddr, source: std::io::Error) -> BootstrapError {
        let remedy = match source.kind() {
            ErrorKind::AddrInUse => {
                "another process has the address: is another one running under this name, or is the port \
                 somebody else's?"
            }
            ErrorKind::AddrNotAvailable => {
                "no interface of this host has the address: is this the right host?"
            }
            ErrorKind::PermissionDenied => "ports below 1024 need privileges: choose a higher one",
            _ => "check the address in the cluster",
        };
        BootstrapError::Bind { me: self.me.clone(), address, remedy, source }
    }
}

/// Whether members of other hosts can prove who they are in this mode.
fn reaches_beyond(mode: AuthMode) -> bool {
    match mode {
        AuthMode::Tls | AuthMode::Secret => true,
        AuthMode::Uid | AuthMode::Plain => false,
    }
}

/// Every socket address of `address`. Blocks while a name is resolved.
///
/// # Errors
/// [`BootstrapError::Resolve`].
pub fn resolve(whose: &TaskId, address: &HostPort) -> Result<Vec<SocketAddr>, BootstrapError> {
    let found = match (address.ip(), address.name()) {
        (Some(ip), _) => return Ok(vec![SocketAddr::new(ip, address.port())]),
        (None, name) => (name.unwrap_or_default(), address.port()).to_socket_addrs(),
    };
    let failed =
        |source| BootstrapError::Resolve { whose: whose.clone(), address: address.to_string(), source };
    Ok(found.map_err(failed)?.collect())
}

#[cfg(test)]
mod tests {
    use super::super::tests::logged;
    use super::*;

    fn options(address: &str) -> BootstrapOptions {
        let cluster = format!("worker={address}").parse().unwrap();
        let me = TaskId::new("worker", 0).unwrap();
        BootstrapOptions::for_tests(me, cluster, Incarnation::new(1).unwrap())
    }

    #[test]
    fn an_address_that_others_can_reach_is_refused_unless_allowed() {
        let mut open = options("192.0.2.7:4000");
        let error = open.listen().unwrap_err().to_string();
        assert!(error.contains("192.0.2.7:4000 of worker/0 is not loopback"), "{error}");
        assert!(error.contains("auth is uid") && error.contains("allow_non_loopback"), "{error}");
        open.allow_non_loopback = true;
        // 192.0.2.0/24 is reserved for documentation: no host has it, so the bind fails.
        assert!(matches!(open.listen(), Err(BootstrapError::Bind { .. })));
    }

    #[test]
    fn a_host_name_that_leads_to_loopback_reaches_no_other_host() {
        let me = TaskId::new("worker", 0).unwrap();
        let is = |address: &str, found: &str, auth| {
            let address = address.parse().unwrap();
            let listening =
                Listening { me: &me, address: &address, bind: None, auth, allow_non_loopback: true };
            listening.is_unreachable(found.parse().unwrap())
        };
        assert!(is("node-a:4000", "127.0.1.1:4000", AuthMode::Secret));
        assert!(!is("node-a:4000", "10.0.0.7:4000", AuthMode::Secret));
        assert!(!is("node-a:4000", "127.0.1.1:4000", AuthMode::Uid), "all are of this host");
        assert!(!is("localhost:4000", "127.0.0.1:4000", AuthMode::Secret));
        assert!(!is("127.0.0.1:4000", "127.0.0.1:4000", AuthMode::Secret));
    }

    #[test]
    fn a_store_listens_at_each_address_of_its_name_that_this_host_has() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let at = |ips: &[&str]| {
            let ips = ips.iter().map(|ip| SocketAddr::new(ip.parse().unwrap(), port));
            ips.collect::<Vec<_>>()
        };
        let (me, address) = (TaskId::new("worker", 0).unwrap(), "node-a:4000".parse().unwrap());
        let (auth, allow_non_loopback) = (AuthMode::Secret, false);
        let listening = Listening { me: &me, address: &address, bind: None, auth, allow_non_loopback };
        // Nobody has 192.0.2.7, and one address is another program's. A name may say one twice.
        let candidates = at(&["192.0.2.7", "127.0.0.2", "127.0.0.1", "127.0.0.3", "127.0.0.2"]);
        let mut found = Vec::new();
        let log = logged(|| {
            let listeners = listening.listen_at(candidates, true).unwrap();
            found = listeners.iter().map(|listener| listener.local_addr().unwrap()).collect();
        });
        assert_eq!(found, at(&["127.0.0.2", "127.0.0.3"]));
        assert!(log.contains(&format!("127.0.0.1:{port}")) && log.contains("node-a:4000 leads to"), "{log}");
        for none in [at(&["192.0.2.7", "127.0.0.1"]), at(&["127.0.0.1", "192.0.2.7"])] {
            let error = listening.listen_at(none, true).unwrap_err().to_string();
            assert!(error.contains("another process has the address"), "{error}");
        }
        // A member has one address: that which it tells the others.
        let error = listening.listen_at(at(&["127.0.0.1", "127.0.0.2"]), false).unwrap_err().to_string();
        assert!(error.contains("another process has the address"), "{error}");
        assert!(matches!(listening.listen_at(vec![], true), Err(BootstrapError::Resolve { .. })));
    }

    #[test]
    fn binding_to_every_interface_is_refused_unless_allowed() {
        let mut open = options("127.0.0.1:4000");
        open.bind = Some("0.0.0.0:0".parse().unwrap());
        let error = open.listen().unwrap_err().to_string();
        assert!(error.contains("0.0.0.0:0 of the bind setting is not loopback"), "{error}");
        open.allow_non_loopback = true;
        assert!(open.listen().is_ok());
    }

    #[test]
    fn a_name_that_is_not_in_the_cluster_is_refused() {
        let mut stranger = options("127.0.0.1:4000");
        stranger.me = TaskId::new("worker", 3).unwrap();
        let error = stranger.my_address().unwrap_err().to_string();
        assert!(error.contains("worker/3 is not in the cluster \"worker=127.0.0.1:4000\""), "{error}");
    }

    #[test]
    fn localhost_and_literals_resolve_to_loopback() {
        for text in ["localhost:80", "127.0.0.1:80", "[::1]:80"] {
            let found = resolve(&options(text).me, &text.parse().unwrap()).unwrap();
            assert!(!found.is_empty() && found.iter().all(|address| address.ip().is_loopback()), "{text}");
        }
    }

    #[test]
    fn an_ipv6_address_can_be_listened_on() {
        let free = TcpListener::bind("[::1]:0");
        let Ok(free) = free else {
            println!("skipped: this host has no IPv6 loopback");
            return;
        };
        let address = free.local_addr().unwrap();
        drop(free);
        let listener = options(&address.to_string()).listen().unwrap();
        assert_eq!(listener.local_addr().unwrap(), address);
    }
}
