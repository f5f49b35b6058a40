//! How members meet that were given no cluster.

use super::builder::{Builder, RawSettings, Variables};
use super::error::{ConfigError, Origin};
use super::format::{Format, InvalidValue, JobName, Number};
use super::launched::{LaunchedRank, refused, text};
use super::table::{Config, variable as key_variable};
use crate::wire::{Cluster, HostPort, TaskId, quote};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Members of the largest cluster that is met. Its text has 64 KiB at most.
pub(super) const MAX_SIZE: u32 = 2048;

/// The job of members that were given no name.
const DEFAULT_JOB: &str = "worker";

const MASTER_ADDR: &str = "MASTER_ADDR";
const MASTER_PORT: &str = "MASTER_PORT";
/// Set by torchrun in every process that it starts.
const TORCHRUN: &str = "TORCHELASTIC_RUN_ID";

/// Bytes of the longest name of a run.
const MAX_RUN: usize = 200;

/// Where a store is through which members meet.
///
/// ```
/// use tensorwire::StoreAddress;
/// let address: StoreAddress = "tcp://10.0.0.1:29500".parse()?;
/// assert_eq!(address.to_string(), "tcp://10.0.0.1:29500");
/// assert!("http://10.0.0.1".parse::<StoreAddress>().is_err());
/// # Ok::<(), tensorwire::StoreAddressError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreAddress {
    /// `tcp://HOST:PORT`: task 0 serves it there.
    Tcp(HostPort),
    /// `file:///PATH`: a file that all members have.
    File(PathBuf),
}

/// A text that is no address of a store.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{address} is no address of a store: it must be tcp://HOST:PORT or file:///PATH{why}")]
#[non_exhaustive]
pub struct StoreAddressError {
    /// The text in quotes, shortened if it is long.
    pub address: String,
    /// What is wrong with its parts, if that is known.
    pub why: String,
}

impl FromStr for StoreAddress {
    type Err = StoreAddressError;

    fn from_str(text: &str) -> Result<Self, StoreAddressError> {
        let refused = |why: String| StoreAddressError { address: quote(text), why };
        if let Some(address) = text.strip_prefix("tcp://") {
            let parsed = address.parse::<HostPort>();
            return parsed.map(StoreAddress::Tcp).map_err(|error| refused(format!("; {error}")));
        }
        match text.strip_prefix("file://") {
            Some(path) if path.starts_with('/') && path.len() > 1 && !path.contains('\0') => {
                Ok(StoreAddress::File(path.into()))
            }
            Some(_) => Err(refused("; the path must be absolute".into())),
            None => Err(refused(String::new())),
        }
    }
}

impl fmt::Display for StoreAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StoreAddress::Tcp(address) => write!(f, "tcp://{address}"),
            StoreAddress::File(path) => write!(f, "file://{}", path.display()),
        }
    }
}

impl Format for StoreAddress {
    type Value = StoreAddress;
    const KIND: &'static str = "store";

    fn read(text: &str) -> Result<StoreAddress, InvalidValue> {
        text.parse().map_err(|error: StoreAddressError| Some(error.to_string()))
    }

    fn write(value: &StoreAddress) -> String {
        value.to_string()
    }
}

/// What a member knows that has to meet the others before there is a cluster.
#[derive(Clone, Debug)]
pub struct Meeting {
    /// Where they meet.
    pub store: StoreAddress,
    /// What says so, for errors.
    pub origin: String,
    /// The number of members: the tasks of one job.
    pub size: u32,
    /// Different for runs that meet in one store.
    pub run: String,
    /// All other settings, checked. Its cluster is not the one of the members.
    pub config: Config,
}

impl Builder {
    /// How this process meets the other members; `None` if a source names the cluster, or no source
    /// says where to meet.
    ///
    /// # Errors
    /// Like [`Builder::build`]. Also if it is not known who this process is, or how many meet.
    pub(crate) fn meeting(&self) -> Result<Option<Meeting>, ConfigError> {
        let (mut settings, variables) = self.collect()?;
        if settings.has("cluster") {
            return Ok(None);
        }
        let Some((store, origin)) = place(&settings, &variables)? else { return Ok(None) };
        let who = settings.value("task", Number::<u32>::read)?;
        let (Some(size), Some(_)) = (settings.value("world_size", Number::<u32>::read)?, who) else {
            return Err(unknown(&origin, who.is_none()));
        };
        settings.put_default("job", DEFAULT_JOB.into(), &Origin::Default)?;
        let job = settings.value("job", JobName::read)?.unwrap_or_default();
        let ports = (1..=size).map(|port| format!("127.0.0.1:{port}")).collect::<Vec<_>>().join(",");
        settings.put_default("cluster", format!("{job}={ports}"), &Origin::Default)?;
        let config = settings.finish()?;
        let run = run(&variables, &store)?;
        Ok(Some(Meeting { store, origin, size, run, config }))
    }

    /// The settings of a member that has met the others.
    ///
    /// # Errors
    /// If the settings do not fit the cluster.
    pub(crate) fn with_cluster(self, me: &TaskId, cluster: &Cluster) -> Result<Config, ConfigError> {
        self.member(me.job(), me.task()).set("cluster", cluster.to_string()).build()
    }
}

impl RawSettings {
    /// Takes from launchers what no source says: who this process is, and how many there are.
    ///
    /// # Errors
    /// If the launchers contradict each other or the settings.
    pub(super) fn put_launched(&mut self, variables: &Variables) -> Result<(), ConfigError> {
        let cluster = self.value("cluster", Cluster::read)?;
        if cluster.is_some() && self.has("task") {
            return Ok(());
        }
        let Some(found) = LaunchedRank::find(variables)? else { return Ok(()) };
        let may_differ = found.may_be_of_a_parent();
        let LaunchedRank { rank, size, variable, .. } = found;
        let origin = Origin::Variable { name: variable.into() };
        let Some(cluster) = cluster else {
            if !may_differ {
                self.agree("task", rank, variable)?;
                self.agree("world_size", size, variable)?;
            }
            self.put_default("job", DEFAULT_JOB.into(), &origin)?;
            self.put_default("task", rank.to_string(), &origin)?;
            return self.put_default("world_size", size.to_string(), &origin);
        };
        if self.has("job") {
            return self.put_default("task", rank.to_string(), &origin);
        }
        let members = cluster.members().count();
        let (Some((me, _)), true) = (cluster.members().nth(rank as usize), members == size as usize) else {
            let why = format!(
                "it has {members} members, and the launcher that has set {variable} has started {size} \
                 processes: give each an address, or set {} and {}",
                key_variable("job"),
                key_variable("task")
            );
            return Err(self.conflict("cluster", why));
        };
        self.put_default("job", me.job().into(), &origin)?;
        self.put_default("task", me.task().to_string(), &origin)
    }

    /// Fails if a variable of this crate says another number than the launcher. What the program
    /// says wins.
    fn agree(&self, key: &'static str, number: u32, launcher: &str) -> Result<(), ConfigError> {
        let said = self.value(key, Number::<u32>::read)?;
        match said.filter(|said| *said != number) {
            Some(_) if matches!(self.origin(key), Origin::Variable { .. }) => {
                let why = format!("the launcher that has set {launcher} says {number}: unset one of them");
                Err(self.conflict(key, why))
            }
            _ => Ok(()),
        }
    }
}

/// Where members meet, and what says so.
fn place(
    settings: &RawSettings,
    variables: &Variables,
) -> Result<Option<(StoreAddress, String)>, ConfigError> {
    if let Some(store) = settings.value("store", StoreAddress::read)? {
        return Ok(Some((store, format!("store ({})", settings.origin("store")))));
    }
    let Some(host) = text(variables, MASTER_ADDR)? else { return Ok(None) };
    let Some(port) = text(variables, MASTER_PORT)? else {
        let why = format!(
            "{MASTER_PORT} is not set: set both, or {} to tcp://HOST:PORT or file:///PATH",
            key_variable("store")
        );
        return Err(refused(MASTER_ADDR, &host, why));
    };
    let wrong = |why: String| refused(MASTER_PORT, &port, why);
    let number: u16 = port.parse().map_err(|_| wrong("it must be a port, 1 to 65535".into()))?;
    // The agent of torchrun has its own store at that port.
    let number = match text(variables, TORCHRUN)? {
        Some(_) if number == u16::MAX => number - 1,
        Some(_) => number + 1,
        None => number,
    };
    let is_v6 = host.parse::<std::net::Ipv6Addr>().is_ok();
    let address = if is_v6 { format!("[{host}]:{number}") } else { format!("{host}:{number}") };
    let address: HostPort = address.parse().map_err(|error| wrong(format!("{error}")))?;
    Ok(Some((StoreAddress::Tcp(address), format!("{MASTER_ADDR} and {MASTER_PORT}"))))
}

/// What tells this run from an earlier one that has met in the same store. It is the same in all
/// members: so a store that task 0 serves anew has no count of restarts. Agents of torchrun count
/// only their own (torch/distributed/elastic/__init__.py).
fn run(variables: &Variables, store: &StoreAddress) -> Result<String, ConfigError> {
    let torchrun: &[&str] = match store {
        StoreAddress::Tcp(_) => &[TORCHRUN],
        StoreAddress::File(_) => &[TORCHRUN, "TORCHELASTIC_RESTART_COUNT"],
    };
    for names in [torchrun, &["PMIX_NAMESPACE"], &["SLURM_JOB_ID", "SLURM_STEP_ID"]] {
        let parts = names.iter().map(|name| text(variables, name)).collect::<Result<Vec<_>, _>>()?;
        if parts[0].is_some() {
            let mut run = parts.into_iter().flatten().collect::<Vec<_>>().join(".");
            run.truncate(run.floor_char_boundary(MAX_RUN));
            return Ok(run);
        }
    }
    Ok(String::new())
}

/// The error for members that know where to meet, and not who or how many they are.
fn unknown(origin: &str, who: bool) -> ConfigError {
    let (key, what) = match who {
        true => ("task", "which of them this process is"),
        false => ("world_size", "how many they are"),
    };
    let remedy = format!(
        "{origin} says where the members meet, and nothing says {what}: set RANK and WORLD_SIZE, as \
         launchers do, or {} and {}; or set {}",
        key_variable("task"),
        key_variable("world_size"),
        key_variable("cluster")
    );
    ConfigError::Missing { key, remedy }
}
