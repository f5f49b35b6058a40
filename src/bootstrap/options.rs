//! What the bootstrap service is started with, and where it may listen.

use super::BootstrapError;
use super::cluster::{Address, ClusterSpec};
use super::names::{Incarnation, TaskName, shorten};
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

/// Bytes of the longest host id.
pub const MAX_HOST_ID: usize = 128;

/// What the bootstrap service is started with.
#[derive(Clone, Debug)]
pub struct BootstrapOptions {
    /// The name of this process.
    pub me: TaskName,
    /// All members, the same on each of them.
    pub cluster: ClusterSpec,
    /// The number of this process's life.
    pub incarnation: Incarnation,
    /// Where to listen, if not at this process's address in the cluster. Port 0 takes any free port.
    pub bind: Option<SocketAddr>,
    /// Whether addresses that other hosts can reach are accepted, although members are not authenticated.
    pub allow_non_loopback: bool,
    /// Time between two heartbeats to each peer. Default 1 s.
    pub heartbeat: Duration,
    /// After how long without a sign of life a peer counts as dead; at least twice `heartbeat`. Default 5 s.
    pub silence: Duration,
    /// How long making one link may take before it is given up and tried again. Default 5 s.
    pub link_timeout: Duration,
    /// The same for all members on this host, different on different hosts. At most [`MAX_HOST_ID`] bytes.
    pub host_id: String,
    /// Threads of this process that never sleep; the peers on this host count them together. Default 0.
    pub spinners: u32,
}

impl BootstrapOptions {
    /// The defaults, for this member of this cluster in this life, on the host `host_id`.
    pub fn new(
        me: TaskName,
        cluster: ClusterSpec,
        incarnation: Incarnation,
        host_id: impl Into<String>,
    ) -> Self {
        BootstrapOptions {
            me,
            cluster,
            incarnation,
            bind: None,
            allow_non_loopback: false,
            heartbeat: Duration::from_secs(1),
            silence: Duration::from_secs(5),
            link_timeout: Duration::from_secs(5),
            host_id: host_id.into(),
            spinners: 0,
        }
    }

    /// Refuses what can't work, without touching the network.
    pub(super) fn check(&self) -> Result<(), BootstrapError> {
        self.my_address()?;
        let refuse = |option, value: String, allowed| Err(BootstrapError::Option { option, value, allowed });
        if self.heartbeat < Duration::from_millis(1) {
            return refuse("heartbeat", format!("{:?}", self.heartbeat), "at least 1 ms is allowed");
        }
        if self.silence < self.heartbeat.saturating_mul(2) {
            return refuse(
                "silence",
                format!("{:?}", self.silence),
                "at least twice the heartbeat is allowed",
            );
        }
        if self.silence > Duration::from_secs(86_400) {
            return refuse("silence", format!("{:?}", self.silence), "at most a day is allowed");
        }
        let link = Duration::from_millis(10)..=Duration::from_secs(3_600);
        if !link.contains(&self.link_timeout) {
            return refuse("link_timeout", format!("{:?}", self.link_timeout), "10 ms to an hour is allowed");
        }
        if self.host_id.is_empty() || self.host_id.len() > MAX_HOST_ID {
            let value = format!("\"{}\"", shorten(&self.host_id, MAX_HOST_ID));
            return refuse("host_id", value, "1 to 128 bytes are allowed");
        }
        Ok(())
    }

    /// Listens where this process should, unless an address of the cluster is open to other hosts and
    /// nobody has said that this is wanted. Blocks while names are looked up.
    pub(super) fn listen(&self) -> Result<TcpListener, BootstrapError> {
        if !self.allow_non_loopback {
            self.insist_on_loopback()?;
        }
        let candidates = match self.bind {
            Some(address) => vec![address],
            None => resolve(&self.me, self.my_address()?)?,
        };
        let mut outcome = None;
        for address in candidates {
            // The standard library sets SO_REUSEADDR, so that a restart on the same port works at once.
            match TcpListener::bind(address) {
                Ok(listener) => return Ok(listener),
                // `localhost` may stand for an address family that this host does not have. Every other
                // failure is final: on another of its addresses a taken name would go unnoticed.
                Err(error) => {
                    let absent = error.kind() == ErrorKind::AddrNotAvailable
                        || error.raw_os_error() == Some(libc::EAFNOSUPPORT);
                    outcome = Some((address, error));
                    if !absent {
                        break;
                    }
                }
            }
        }
        Err(match outcome {
            Some((address, source)) => self.bind_error(address, source),
            None => BootstrapError::Resolve {
                whose: self.me.clone(),
                address: self.my_address()?.to_string(),
                source: ErrorKind::NotFound.into(),
            },
        })
    }

    fn my_address(&self) -> Result<&Address, BootstrapError> {
        self.cluster.find(&self.me).ok_or_else(|| BootstrapError::NotAMember {
            me: self.me.clone(),
            cluster: shorten(&self.cluster.to_string(), 500),
        })
    }

    fn insist_on_loopback(&self) -> Result<(), BootstrapError> {
        let open = |whose: String, address: String| Err(BootstrapError::NotLoopback { whose, address });
        if let Some(bind) = self.bind.filter(|bind| !bind.ip().is_loopback()) {
            return open("the bind option".into(), bind.to_string());
        }
        for (name, address) in self.cluster.iter() {
            if resolve(&name, address)?.iter().any(|found| !found.ip().is_loopback()) {
                return open(name.to_string(), address.to_string());
            }
        }
        Ok(())
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

fn resolve(whose: &TaskName, address: &Address) -> Result<Vec<SocketAddr>, BootstrapError> {
    address.resolve().map_err(|source| BootstrapError::Resolve {
        whose: whose.clone(),
        address: address.to_string(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(address: &str) -> BootstrapOptions {
        let cluster = ClusterSpec::new([("worker", vec![address])]).unwrap();
        let me = TaskName::new("worker", 0).unwrap();
        BootstrapOptions::new(me, cluster, Incarnation::new(1).unwrap(), "here")
    }

    #[test]
    fn an_address_that_others_can_reach_is_refused_unless_allowed() {
        let mut open = options("192.0.2.7:4000");
        let error = open.listen().unwrap_err().to_string();
        assert!(error.contains("192.0.2.7:4000 of worker/0 is not loopback"), "{error}");
        assert!(error.contains("not authenticated") && error.contains("allow_non_loopback"), "{error}");
        open.allow_non_loopback = true;
        // 192.0.2.0/24 is for documentation: no host has it, so the bind is what fails now.
        assert!(matches!(open.listen(), Err(BootstrapError::Bind { .. })));
    }

    #[test]
    fn binding_to_every_interface_is_refused_unless_allowed() {
        let mut open = options("127.0.0.1:4000");
        open.bind = Some("0.0.0.0:0".parse().unwrap());
        let error = open.listen().unwrap_err().to_string();
        assert!(error.contains("0.0.0.0:0 of the bind option is not loopback"), "{error}");
        open.allow_non_loopback = true;
        assert!(open.listen().is_ok());
    }

    #[test]
    fn a_name_that_is_not_in_the_cluster_is_refused() {
        let mut stranger = options("127.0.0.1:4000");
        stranger.me = TaskName::new("worker", 3).unwrap();
        let error = stranger.check().unwrap_err().to_string();
        assert!(error.contains("worker/3 is not in the cluster \"worker=127.0.0.1:4000\""), "{error}");
    }

    #[test]
    fn options_out_of_range_are_refused_with_the_value() {
        let good = options("127.0.0.1:4000");
        assert!(good.check().is_ok());
        for (bad, part) in [
            (BootstrapOptions { heartbeat: Duration::ZERO, ..good.clone() }, "heartbeat is 0ns"),
            (BootstrapOptions { silence: Duration::from_millis(1999), ..good.clone() }, "silence is 1.999s"),
            (BootstrapOptions { link_timeout: Duration::ZERO, ..good.clone() }, "link_timeout is 0ns"),
            (BootstrapOptions { host_id: String::new(), ..good.clone() }, "host_id is \"\""),
        ] {
            let error = bad.check().unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
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
