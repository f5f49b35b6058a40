//! Checks of settings against each other.

use super::builder::RawSettings;
use super::error::ConfigError;
use super::format::{DurationText, Format};
use super::table::ConfigValues;
use crate::bootstrap::AuthMode;
use crate::engine::PollMode;
use crate::memory::PagePolicy;
use crate::wire::{HostPort, TaskId};
use std::net::IpAddr;

/// Checks all rules between settings. Returns the member that this process is.
pub(super) fn whole(config: &ConfigValues, settings: &RawSettings) -> Result<TaskId, ConfigError> {
    let refused = |(key, why)| settings.conflict(key, why);
    let task = membership(config).map_err(refused)?;
    auth(config).map_err(refused)?;
    exposure(config, &task).map_err(refused)?;
    required_pages(config).map_err(refused)?;
    polling(config).map_err(refused)?;
    rdma(config).map_err(refused)?;
    liveness(config, settings).map_err(refused)?;
    Ok(task)
}

type Conflict = (&'static str, String);

fn rdma(config: &ConfigValues) -> Result<(), Conflict> {
    if config.rdma_device_port.is_none() || config.rdma_device.is_some() {
        return Ok(());
    }
    let why =
        "a port is one of a device: name that too, with rdma_device (RDMA_DEVICE), or leave the port out";
    Err(("rdma_device_port", why.into()))
}

/// One heartbeat may be lost or late without the peer counting as dead.
fn liveness(config: &ConfigValues, settings: &RawSettings) -> Result<(), Conflict> {
    let least = config.heartbeat_interval.saturating_mul(2);
    if config.silence_bound >= least {
        return Ok(());
    }
    let (heartbeat, least) = (DurationText::write(&config.heartbeat_interval), DurationText::write(&least));
    let origin = settings.origin("heartbeat_interval");
    let why = format!(
        "it must be at least {least}, twice the heartbeat_interval, which is {heartbeat} ({origin}): raise \
         silence_bound, or lower heartbeat_interval"
    );
    Err(("silence_bound", why))
}

fn membership(config: &ConfigValues) -> Result<TaskId, Conflict> {
    let members = config.cluster.members().count();
    if config.world_size.is_some_and(|size| size as usize != members) {
        return Err(("world_size", format!("the cluster has {members} members: leave it out")));
    }
    let Some(count) = config.cluster.task_count(&config.job) else {
        let jobs: Vec<_> = config.cluster.jobs().collect();
        return Err(("job", format!("it must be a job of the cluster, which has {}", jobs.join(", "))));
    };
    if config.task as usize >= count {
        let (job, last) = (&config.job, count - 1);
        let why = match count {
            1 => format!("job {job} has one task in the cluster: it must be 0"),
            _ => format!("job {job} has {count} tasks in the cluster: it must be 0 to {last}"),
        };
        return Err(("task", why));
    }
    TaskId::new(&config.job, config.task).map_err(|error| ("job", error.to_string()))
}

/// Each mode has what it needs, and nothing that it has no use for.
/// The kernel's word on users reaches no other host. A host name is not resolved here: the
/// bootstrap service refuses it when it connects.
fn auth(config: &ConfigValues) -> Result<(), Conflict> {
    let mode = config.auth_mode();
    let tls = [
        ("tls_ca", &config.tls_ca),
        ("tls_certificate", &config.tls_certificate),
        ("tls_key", &config.tls_key),
    ];
    let (set, unset): (Vec<_>, Vec<_>) = tls.into_iter().partition(|(_, file)| file.is_some());
    if let Some((key, _)) = unset.first().filter(|_| mode == AuthMode::Tls || !set.is_empty()) {
        let why = format!("auth = tls needs tls_ca, tls_certificate and tls_key, and {key} is not set");
        return Err((set.first().map_or("auth", |(key, _)| key), why));
    }
    if let Some((key, _)) = set.first().filter(|_| mode != AuthMode::Tls) {
        return Err((key, format!("auth is {mode}, which has no use for it: leave it out, or change auth")));
    }
    match (mode, &config.secret_file) {
        (AuthMode::Secret, None) => {
            let why = "it needs secret_file, and that is not set: `tensorwire auth secret FILE` makes one";
            return Err(("auth", why.into()));
        }
        (AuthMode::Secret, Some(_)) | (_, None) => {}
        (_, Some(_)) => {
            let why = format!("auth is {mode}, which has no use for it: leave it out, or change auth");
            return Err(("secret_file", why));
        }
    }
    if mode != AuthMode::Uid || config.auth.is_some() {
        return Ok(());
    }
    let far = |ip: IpAddr| !ip.is_loopback();
    let beyond = config.cluster.members().find(|(_, address)| address.ip().is_some_and(far));
    let (whose, address) = match (beyond, config.bind.filter(|bind| far(bind.ip()))) {
        (Some((task, address)), _) => (task.to_string(), address.to_string()),
        (None, Some(bind)) => ("bind".into(), bind.to_string()),
        (None, None) => return Ok(()),
    };
    let why = format!(
        "{whose} is at {address}, beyond the loopback interface, and nothing proves who the members are: set \
         secret_file (`tensorwire auth secret FILE` makes one), or tls_ca, tls_certificate and tls_key, on \
         every member. Or set auth to plain if every process that reaches the ports of members is trusted"
    );
    Err(("auth", why))
}

/// Listening beyond the loopback interface needs `allow_non_loopback`. A host name is not resolved
/// here: the bootstrap service checks the address.
fn exposure(config: &ConfigValues, me: &TaskId) -> Result<(), Conflict> {
    let mode = config.auth_mode();
    if config.allow_non_loopback || matches!(mode, AuthMode::Tls | AuthMode::Secret) {
        return Ok(());
    }
    let (key, ip) = match config.bind {
        Some(bind) => ("bind", Some(bind.ip())),
        None => ("cluster", config.cluster.address(me).and_then(HostPort::ip)),
    };
    match ip.filter(|ip| !ip.is_loopback()) {
        Some(ip) => Err((
            key,
            format!(
                "this process would listen on {ip}, beyond the loopback interface, and auth is {mode}: use a \
                 loopback address, or set secret_file, or set allow_non_loopback to true"
            ),
        )),
        None => Ok(()),
    }
}

fn required_pages(config: &ConfigValues) -> Result<(), Conflict> {
    if config.pool_require && config.pool_pages == PagePolicy::Auto {
        let why = "pool_pages is auto, which names no pages: set pool_pages to 1g, 2m, transparent or plain";
        return Err(("pool_require", why.to_string()));
    }
    Ok(())
}

/// One CPU for each poller, one poller in the inline mode, and no `wait` in the adaptive mode,
/// whose threads sleep.
fn polling(config: &ConfigValues) -> Result<(), Conflict> {
    let pollers = config.poller_count();
    let one = matches!(config.poll, None | Some(PollMode::Inline));
    let cores = config.cores.as_ref().map(Vec::len);
    match cores {
        Some(cores) if one && cores != 1 => {
            let why = "the inline and auto modes pin one thread: name one CPU, or set poll to adaptive or \
                dedicated";
            return Err(("cores", why.to_string()));
        }
        Some(cores) if cores != pollers => {
            let why =
                format!("it names {cores} CPUs for {pollers} pollers: name as many, or leave pollers out");
            return Err(("cores", why));
        }
        _ => {}
    }
    if one && pollers != 1 {
        let why =
            "the inline and auto modes have one poller: set poll to adaptive or dedicated, or pollers to 1";
        return Err(("pollers", why.to_string()));
    }
    if config.poll == Some(PollMode::Adaptive) && config.wait.is_some() {
        let why =
            "waiting calls sleep in the adaptive mode: set wait to auto, or poll to inline or dedicated";
        return Err(("wait", why.to_string()));
    }
    Ok(())
}

impl ConfigValues {
    /// How members prove who they are, with `auto` decided.
    pub fn auth_mode(&self) -> AuthMode {
        let has_tls = [&self.tls_ca, &self.tls_certificate, &self.tls_key].iter().any(|file| file.is_some());
        match (self.auth, &self.secret_file) {
            (Some(mode), _) => mode,
            (None, _) if has_tls => AuthMode::Tls,
            (None, Some(_)) => AuthMode::Secret,
            (None, None) => AuthMode::Uid,
        }
    }

    /// The number of pollers of the process.
    pub fn poller_count(&self) -> usize {
        match (self.pollers, &self.cores) {
            (Some(pollers), _) => pollers as usize,
            (None, Some(cores)) if matches!(self.poll, Some(PollMode::Adaptive | PollMode::Dedicated)) => {
                cores.len().max(1)
            }
            (None, _) => 1,
        }
    }
}
