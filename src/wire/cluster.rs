//! The members of a cluster: jobs, tasks and the addresses of their bootstrap services.

use super::text::quote;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

/// Bytes of the longest job name.
pub const MAX_JOB: usize = 64;

/// Bytes of the longest cluster, as text. Each Hello message carries that text.
pub const MAX_CLUSTER_TEXT: usize = 64 * 1024;

/// A job name that breaks the rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("job {0} must be 1 to {MAX_JOB} letters, digits, '_' and '-', a letter or digit first")]
pub struct JobError(String);

/// The one rule for job names: 1 to [`MAX_JOB`] ASCII letters, digits, `_` and `-`; a letter or
/// digit first.
pub(crate) fn check_job(job: &str) -> Result<(), JobError> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
    let fits = job.len() <= MAX_JOB && job.bytes().all(allowed);
    if fits && job.starts_with(|first: char| first.is_ascii_alphanumeric()) {
        return Ok(());
    }
    Err(JobError(quote(job)))
}

/// A task of the cluster: the name of its job and its number there. Sorts by job, then by number.
///
/// ```
/// use tensorwire::TaskId;
/// let task = TaskId::new("worker", 3)?;
/// assert_eq!((task.job(), task.task()), ("worker", 3));
/// assert_eq!(task.to_string(), "worker/3");
/// assert_eq!("worker/3".parse(), Ok(task));
/// # Ok::<(), tensorwire::JobError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TaskId {
    job: String,
    task: u32,
}

impl TaskId {
    /// Task `task` of `job`.
    ///
    /// # Errors
    /// If the job's name breaks the rule.
    pub fn new(job: impl Into<String>, task: u32) -> Result<Self, JobError> {
        let job = job.into();
        check_job(&job)?;
        Ok(TaskId { job, task })
    }

    /// The job, for example `worker`.
    pub fn job(&self) -> &str {
        &self.job
    }

    /// The number of the task in its job, from 0 on.
    pub fn task(&self) -> u32 {
        self.task
    }
}

impl fmt::Display for TaskId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.job, self.task)
    }
}

impl fmt::Debug for TaskId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A text that is no task.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("task {task} {why}: it must be JOB/NUMBER, such as worker/3")]
#[non_exhaustive]
pub struct TaskIdError {
    /// The text in quotes, escaped, and shortened if it is long.
    pub task: String,
    /// The violated rule.
    pub why: &'static str,
}

/// Reads the one spelling that `Display` writes.
impl FromStr for TaskId {
    type Err = TaskIdError;

    fn from_str(text: &str) -> Result<Self, TaskIdError> {
        let refused = |why| TaskIdError { task: quote(text), why };
        let (job, number) = text.split_once('/').ok_or_else(|| refused("has no '/'"))?;
        let task = number.parse::<u32>().ok().filter(|task| task.to_string() == number);
        let task = task.ok_or_else(|| refused("has no number from 0 to 4294967295 behind its '/'"))?;
        TaskId::new(job, task).map_err(|_| {
            refused("has a job that is not 1 to 64 letters, digits, '_' and '-', a letter or digit first")
        })
    }
}

/// A host and a port, at which a task's bootstrap service listens. Nothing here resolves the name.
///
/// ```
/// use tensorwire::{Cluster, HostPort, TaskId};
/// let address: HostPort = "ps-0.example.org:4000".parse()?;
/// assert_eq!((address.name(), address.port()), (Some("ps-0.example.org"), 4000));
/// let cluster = Cluster::new([("ps".to_string(), vec![address.clone()])])?;
/// assert_eq!(cluster.address(&TaskId::new("ps", 0)?), Some(&address));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostPort {
    host: Host,
    port: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Host {
    Ip(IpAddr),
    /// In lower case.
    Name(String),
}

/// A text that is no address of a task.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("address {address} {why}: it must be HOST:PORT, 1.2.3.4:PORT or [IPV6]:PORT, the port 1 to 65535")]
#[non_exhaustive]
pub struct HostPortError {
    /// The text in quotes, escaped, and shortened if it is long.
    pub address: String,
    /// The violated rule.
    pub why: &'static str,
}

impl HostPort {
    /// The name of the host; `None` if the host is given as an IP address.
    pub fn name(&self) -> Option<&str> {
        match &self.host {
            Host::Ip(_) => None,
            Host::Name(name) => Some(name),
        }
    }

    /// The IP address of the host; `None` if the host is given by name.
    pub fn ip(&self) -> Option<IpAddr> {
        match self.host {
            Host::Ip(ip) => Some(ip),
            Host::Name(_) => None,
        }
    }

    /// The port, 1 to 65,535.
    pub fn port(&self) -> u16 {
        self.port
    }
}

impl FromStr for HostPort {
    type Err = HostPortError;

    fn from_str(text: &str) -> Result<Self, HostPortError> {
        parse_host_port(text).map_err(|why| HostPortError { address: quote(text), why })
    }
}

impl TryFrom<SocketAddr> for HostPort {
    type Error = HostPortError;

    fn try_from(address: SocketAddr) -> Result<Self, HostPortError> {
        address.to_string().parse()
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Ip(ip) => write!(f, "{}", SocketAddr::new(*ip, self.port)),
            Host::Name(name) => write!(f, "{name}:{}", self.port),
        }
    }
}

fn parse_host_port(text: &str) -> Result<HostPort, &'static str> {
    let (host, port) = text.rsplit_once(':').ok_or("has no port")?;
    let digits = port.bytes().all(|byte| byte.is_ascii_digit());
    let port = if digits { port.parse().ok() } else { None };
    let port = port.ok_or("has a port that is not a number from 1 to 65535")?;
    if port == 0 {
        return Err("has port 0, which no peer can reach");
    }
    let host = parse_host(host)?;
    if matches!(host, Host::Ip(ip) if ip.is_unspecified()) {
        return Err(
            "is the unspecified address, which no peer can reach (to listen on it, use the bind setting)",
        );
    }
    Ok(HostPort { host, port })
}

fn parse_host(host: &str) -> Result<Host, &'static str> {
    if let Some(v6) = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        let v6: Ipv6Addr = v6.parse().map_err(|_| "has no IPv6 address in its brackets")?;
        return Ok(Host::Ip(v6.into()));
    }
    if host.contains(':') {
        return Err("has an IPv6 address without brackets");
    }
    match host.parse() {
        Ok(v4) => Ok(Host::Ip(v4)),
        Err(_) if is_host_name(host) => Ok(Host::Name(host.to_ascii_lowercase())),
        Err(_) => Err("has a host that is neither a name nor an IP address"),
    }
}

/// Letters, digits, dashes and underscores in labels of 1 to 63 bytes; 253 bytes in all. A name of
/// digits and dots only is a mistyped IPv4 address.
fn is_host_name(host: &str) -> bool {
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
    };
    host.len() <= 253
        && host.split('.').all(label)
        && !host.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.')
}

/// All members of a cluster: for each job the addresses of its tasks, in the order of their
/// numbers.
///
/// The same on every member: members with different clusters refuse each other. The text form is
/// `job=host:port,host:port;job=host:port`. `Display` writes it with the jobs in ascending order.
///
/// ```
/// use tensorwire::Cluster;
///
/// let cluster: Cluster = "worker=10.0.0.1:4000,10.0.0.2:4000;ps=10.0.0.3:4000".parse()?;
/// assert_eq!(cluster.to_string(), "ps=10.0.0.3:4000;worker=10.0.0.1:4000,10.0.0.2:4000");
/// # Ok::<(), tensorwire::ClusterError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cluster {
    jobs: BTreeMap<String, Vec<HostPort>>,
}

/// Why jobs and addresses are no cluster.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ClusterError(String);

impl Cluster {
    /// The cluster with these jobs, each with the addresses of its tasks in order.
    ///
    /// # Errors
    /// If there is no job, a job's name breaks the rule, or a job is listed twice or has no task.
    /// If an address is used twice, or the text form is longer than 64 KiB.
    pub fn new(jobs: impl IntoIterator<Item = (String, Vec<HostPort>)>) -> Result<Self, ClusterError> {
        let refused = |why: String| Err(ClusterError(why));
        let mut cluster = Cluster { jobs: BTreeMap::new() };
        for (job, tasks) in jobs {
            check_job(&job).map_err(|error| ClusterError(error.to_string()))?;
            if tasks.is_empty() {
                return refused(format!("job {job} has no task: give it an address, or leave it out"));
            }
            if cluster.jobs.contains_key(&job) {
                return refused(format!("job {job} is listed twice: put all its tasks in one list"));
            }
            cluster.jobs.insert(job, tasks);
        }
        if cluster.jobs.is_empty() {
            return refused("it has no job: give at least one, JOB=HOST:PORT".into());
        }
        let mut members = HashMap::new();
        for (member, address) in cluster.members() {
            if let Some(other) = members.insert(address, member.clone()) {
                return refused(format!(
                    "{other} and {member} have the same address {address}: give each its own"
                ));
            }
        }
        let length = cluster.to_string().len();
        if length > MAX_CLUSTER_TEXT {
            return refused(format!("its text has {length} bytes: at most {MAX_CLUSTER_TEXT} are allowed"));
        }
        Ok(cluster)
    }

    /// All members with their addresses, in ascending order.
    pub fn members(&self) -> impl Iterator<Item = (TaskId, &HostPort)> + '_ {
        self.jobs.iter().flat_map(|(job, tasks)| {
            let numbered = (0u32..).zip(tasks);
            numbered.map(move |(task, address)| (TaskId { job: job.clone(), task }, address))
        })
    }

    /// The address of a member; `None` if the cluster has no such member.
    pub fn address(&self, member: &TaskId) -> Option<&HostPort> {
        self.jobs.get(member.job())?.get(member.task() as usize)
    }

    /// The names of the jobs, in ascending order.
    pub fn jobs(&self) -> impl Iterator<Item = &str> {
        self.jobs.keys().map(String::as_str)
    }

    /// The number of tasks of a job; `None` if the cluster has no such job.
    pub fn task_count(&self, job: &str) -> Option<usize> {
        self.jobs.get(job).map(Vec::len)
    }

    /// 64-bit FNV-1a of the text form: tells clusters apart, proves nothing.
    pub(crate) fn digest(&self) -> u64 {
        self.to_string()
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
    }
}

impl FromStr for Cluster {
    type Err = ClusterError;

    fn from_str(text: &str) -> Result<Self, ClusterError> {
        let jobs: Result<Vec<_>, _> = text.split(';').map(|job| parse_job(job.trim())).collect();
        Cluster::new(jobs?)
    }
}

fn parse_job(text: &str) -> Result<(String, Vec<HostPort>), ClusterError> {
    let Some((job, tasks)) = text.split_once('=') else {
        return Err(ClusterError(format!("{} must be JOB=HOST:PORT,HOST:PORT", quote(text))));
    };
    check_job(job).map_err(|error| ClusterError(error.to_string()))?;
    let tasks: Result<Vec<HostPort>, _> = tasks.split(',').map(|task| task.trim().parse()).collect();
    let tasks = tasks.map_err(|error| ClusterError(format!("job {job}: {error}")))?;
    Ok((job.into(), tasks))
}

impl fmt::Display for Cluster {
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

#[cfg(test)]
#[path = "cluster_tests.rs"]
mod tests;
