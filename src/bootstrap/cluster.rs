//! Who belongs to the cluster, and where each member listens.

use super::BootstrapError;
use super::names::{TaskName, check_job, shorten};
use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};

/// Bytes of the longest canonical text of a cluster; it travels whole in each Hello.
pub const MAX_CLUSTER_TEXT: usize = 64 * 1024;

/// All members of a cluster: for each job, the address of each of its tasks.
///
/// The same on every member: two whose clusters differ refuse each other. It shows itself in its canonical
/// text, `job=host:port,host:port;job=host:port`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterSpec {
    jobs: BTreeMap<String, Vec<Address>>,
}

impl ClusterSpec {
    /// The cluster with these jobs; each has the addresses (`host:port`, `[v6]:port`) of its tasks in order.
    ///
    /// # Errors
    /// [`BootstrapError::Cluster`] if there is no member, a job is given twice or without a task, an address
    /// does not parse, has port 0 or is given twice, or the whole is longer than [`MAX_CLUSTER_TEXT`];
    /// [`BootstrapError::Job`] if a job is not a name.
    pub fn new<J, T, A>(jobs: J) -> Result<Self, BootstrapError>
    where
        J: IntoIterator<Item = (T, Vec<A>)>,
        T: Into<String>,
        A: AsRef<str>,
    {
        let mut cluster = ClusterSpec { jobs: BTreeMap::new() };
        let mut taken = HashSet::new();
        for (job, addresses) in jobs {
            let job = job.into();
            check_job(&job)?;
            if addresses.is_empty() {
                return Err(refused(format!("job {job} has no task: give it an address, or leave it out")));
            }
            let mut tasks = Vec::new();
            for address in addresses {
                let address = Address::parse(address.as_ref())?;
                if !taken.insert(address.clone()) {
                    return Err(refused(format!(
                        "{address} is given twice: each task needs its own address"
                    )));
                }
                tasks.push(address);
            }
            if cluster.jobs.insert(job.clone(), tasks).is_some() {
                return Err(refused(format!("job {job} is given twice: list all of its tasks in one place")));
            }
        }
        if cluster.jobs.is_empty() {
            return Err(refused("it has no job: give at least one job with one host:port".into()));
        }
        let length = cluster.to_string().len();
        if length > MAX_CLUSTER_TEXT {
            return Err(refused(format!(
                "its text has {length} bytes, at most {MAX_CLUSTER_TEXT} are allowed"
            )));
        }
        Ok(cluster)
    }

    /// All members in ascending order.
    pub fn members(&self) -> impl Iterator<Item = TaskName> + '_ {
        self.iter().map(|(name, _)| name)
    }

    /// The address at which a member listens, as it was given; `None` if there is no such member.
    pub fn address(&self, name: &TaskName) -> Option<String> {
        self.find(name).map(Address::to_string)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (TaskName, &Address)> + '_ {
        self.jobs.iter().flat_map(|(job, tasks)| {
            // A job of more than 2^32 tasks would not fit the canonical text.
            (0u32..)
                .zip(tasks)
                .filter_map(move |(task, address)| Some((TaskName::new(job, task).ok()?, address)))
        })
    }

    pub(super) fn find(&self, name: &TaskName) -> Option<&Address> {
        self.jobs.get(name.job())?.get(name.task() as usize)
    }

    /// 64-bit FNV-1a of the canonical text: tells clusters apart, proves nothing.
    pub(super) fn digest(&self) -> u64 {
        self.to_string()
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
    }
}

impl fmt::Display for ClusterSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, (job, tasks)) in self.jobs.iter().enumerate() {
            write!(f, "{}{job}=", if number == 0 { "" } else { ";" })?;
            for (number, address) in tasks.iter().enumerate() {
                write!(f, "{}{address}", if number == 0 { "" } else { "," })?;
            }
        }
        Ok(())
    }
}

fn refused(why: String) -> BootstrapError {
    BootstrapError::Cluster { why }
}

/// A host and a port; the host may be a name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Address {
    host: Host,
    port: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Host {
    Ip(IpAddr),
    /// In lower case.
    Name(String),
}

impl Address {
    pub(super) fn parse(text: &str) -> Result<Self, BootstrapError> {
        let bad = |why: &str| {
            let text = shorten(text, 300);
            refused(format!("address \"{text}\" {why}; it must be host:port, 1.2.3.4:port or [v6]:port"))
        };
        let (host, port) = text.rsplit_once(':').ok_or_else(|| bad("has no port"))?;
        let port: u16 = port.parse().map_err(|_| bad("has a port that is not a number from 1 to 65535"))?;
        if port == 0 {
            return Err(bad("has port 0, which no peer can reach"));
        }
        let host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
            Some(v6) => {
                Host::Ip(IpAddr::V6(v6.parse().map_err(|_| bad("has no IPv6 address in its brackets"))?))
            }
            None if host.contains(':') => return Err(bad("has an IPv6 address without brackets")),
            None => match host.parse() {
                Ok(v4) => Host::Ip(v4),
                Err(_) if is_host_name(host) => Host::Name(host.to_ascii_lowercase()),
                Err(_) => return Err(bad("has a host that is neither a name nor an IP address")),
            },
        };
        let unspecified = matches!(host, Host::Ip(ip) if ip.is_unspecified());
        if unspecified {
            return Err(bad(
                "is the unspecified address, which no peer can reach (bind to it with the bind option)",
            ));
        }
        Ok(Address { host, port })
    }

    /// Every socket address behind it. Blocks while a name is looked up.
    pub(super) fn resolve(&self) -> std::io::Result<Vec<SocketAddr>> {
        match &self.host {
            Host::Ip(ip) => Ok(vec![SocketAddr::new(*ip, self.port)]),
            Host::Name(name) => Ok((name.as_str(), self.port).to_socket_addrs()?.collect()),
        }
    }
}

/// Letters, digits, dashes and underscores in labels of 1 to 63 bytes; 253 bytes in all. A name of digits
/// and dots only would be a mistyped IPv4 address.
fn is_host_name(host: &str) -> bool {
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
    };
    host.len() <= 253
        && host.split('.').all(label)
        && !host.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.')
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Ip(ip) => write!(f, "{}", SocketAddr::new(*ip, self.port)),
            Host::Name(name) => write!(f, "{name}:{}", self.port),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn why(jobs: Vec<(&str, Vec<&str>)>) -> String {
        ClusterSpec::new(jobs).expect_err("refused").to_string()
    }

    #[test]
    fn a_cluster_shows_its_jobs_in_order_and_finds_addresses() {
        let cluster = ClusterSpec::new([
            ("worker", vec!["localhost:7001", "[::1]:7002"]),
            ("ps", vec!["127.0.0.1:7000"]),
        ])
        .unwrap();
        assert_eq!(cluster.to_string(), "ps=127.0.0.1:7000;worker=localhost:7001,[::1]:7002");
        let name = TaskName::new("worker", 1).unwrap();
        assert_eq!(cluster.address(&name).as_deref(), Some("[::1]:7002"));
        assert_eq!(cluster.members().count(), 3);
        assert_eq!(cluster.address(&TaskName::new("worker", 2).unwrap()), None);
    }

    #[test]
    fn addresses_that_cannot_work_are_refused_with_the_reason() {
        for (address, reason) in [
            ("localhost", "no port"),
            ("localhost:", "not a number"),
            ("localhost:70000", "not a number"),
            ("localhost:0", "port 0"),
            ("127.0.0.1:0", "port 0"),
            ("::1:80", "without brackets"),
            ("[::g]:80", "brackets"),
            (":80", "neither a name"),
            ("a b:80", "neither a name"),
            ("1.2.3:80", "neither a name"),
            ("http://x:80", "without brackets"),
            ("0.0.0.0:80", "unspecified"),
            ("[::]:80", "unspecified"),
        ] {
            let error = why(vec![("worker", vec![address])]);
            assert!(error.contains(reason) && error.contains(address), "{address}: {error}");
        }
    }

    #[test]
    fn duplicates_and_empty_parts_are_refused() {
        assert!(why(vec![]).contains("no job"));
        assert!(why(vec![("ps", vec![])]).contains("job ps has no task"));
        assert!(why(vec![("ps", vec!["a:1", "A:1"])]).contains("a:1 is given twice"));
        assert!(why(vec![("ps", vec!["a:1"]), ("w", vec!["a:1"])]).contains("a:1 is given twice"));
        assert!(why(vec![("ps", vec!["a:1"]), ("ps", vec!["a:2"])]).contains("job ps is given twice"));
        assert!(why(vec![("p s", vec!["a:1"])]).contains("\"p s\""));
    }

    #[test]
    fn clusters_that_differ_have_different_digests() {
        let one = ClusterSpec::new([("ps", vec!["a:1"])]).unwrap();
        let two = ClusterSpec::new([("ps", vec!["a:2"])]).unwrap();
        assert_ne!(one.digest(), two.digest());
        assert_eq!(one.digest(), one.clone().digest());
    }

    #[test]
    fn localhost_and_literals_resolve_to_loopback() {
        for text in ["localhost:80", "127.0.0.1:80", "[::1]:80"] {
            let found = Address::parse(text).unwrap().resolve().unwrap();
            assert!(!found.is_empty() && found.iter().all(|address| address.ip().is_loopback()), "{text}");
        }
    }
}
