//! How the settings fit together.

use super::builder::Settings;
use super::choice::{Poll, PoolPages, Wait};
use super::error::ConfigError;
use super::format::{Format, Span};
use super::table::Config;
use std::collections::BTreeMap;

/// Checks what no value can say alone.
pub(super) fn whole(config: &Config, settings: &Settings) -> Result<(), ConfigError> {
    membership(config)
        .and_then(|()| unique_addresses(config))
        .map_err(|(key, why)| settings.conflict(key, why))?;
    exposure(config).map_err(|(key, why)| settings.conflict(key, why))?;
    required_pages(config).map_err(|(key, why)| settings.conflict(key, why))?;
    polling(config).map_err(|(key, why)| settings.conflict(key, why))?;
    rdma(config).map_err(|(key, why)| settings.conflict(key, why))?;
    if config.silence_bound > config.heartbeat_interval {
        return Ok(());
    }
    let heartbeat = Span::write(&config.heartbeat_interval);
    let origin = settings.origin("heartbeat_interval");
    let why = format!("it must be more than heartbeat_interval, which is {heartbeat} ({origin})");
    Err(settings.conflict("silence_bound", why))
}

type Conflict = (&'static str, String);

fn rdma(config: &Config) -> Result<(), Conflict> {
    if config.rdma_device_port.is_none() || config.rdma_device.is_some() {
        return Ok(());
    }
    let why =
        "a port is one of a device: name that too, with rdma_device (RDMA_DEVICE), or leave the port out";
    Err(("rdma_device_port", why.into()))
}

fn membership(config: &Config) -> Result<(), Conflict> {
    let Some(tasks) = config.cluster.get(&config.job) else {
        let jobs: Vec<_> = config.cluster.keys().map(String::as_str).collect();
        return Err(("job", format!("it must be a job of the cluster, which has {}", jobs.join(", "))));
    };
    if (config.task as usize) < tasks.len() {
        return Ok(());
    }
    let (job, last) = (&config.job, tasks.len() - 1);
    Err(("task", format!("job {job} has {} task(s) in the cluster: it must be 0 to {last}", tasks.len())))
}

fn unique_addresses(config: &Config) -> Result<(), Conflict> {
    let mut seen = BTreeMap::new();
    for (job, tasks) in &config.cluster {
        for (task, address) in tasks.iter().enumerate() {
            if let Some((other_job, other)) = seen.insert(address, (job, task)) {
                let both = format!("{other_job} task {other} and {job} task {task}");
                return Err((
                    "cluster",
                    format!("{both} have the same address {address}: give each its own"),
                ));
            }
        }
    }
    Ok(())
}

/// Listening beyond the loopback interface needs leave in so many words. A host *name* is not resolved
/// here: the bootstrap service judges the address that it gets.
fn exposure(config: &Config) -> Result<(), Conflict> {
    if config.allow_non_loopback {
        return Ok(());
    }
    let (key, ip) = match config.bind {
        Some(bind) => ("bind", Some(bind.ip())),
        None => ("cluster", config.me().and_then(|me| me.ip())),
    };
    match ip.filter(|ip| !ip.is_loopback()) {
        Some(ip) => Err((
            key,
            format!(
                "this process would listen on {ip}, beyond the loopback interface, and members are not \
                 authenticated: use a loopback address, or set allow_non_loopback to true"
            ),
        )),
        None => Ok(()),
    }
}

fn required_pages(config: &Config) -> Result<(), Conflict> {
    if config.pool_require && config.pool_pages == PoolPages::Auto {
        let why = "pool_pages is auto, which names no pages: set pool_pages to 1g, 2m, transparent or plain";
        return Err(("pool_require", why.to_string()));
    }
    Ok(())
}

/// As many CPUs as pollers, as many pollers as the mode can have, and no way of waiting for who sleeps.
fn polling(config: &Config) -> Result<(), Conflict> {
    let pollers = config.poller_count();
    let one = matches!(config.poll, Poll::Auto | Poll::Inline);
    let cores = config.cores.as_ref().map(Vec::len);
    match cores {
        Some(cores) if one && cores != 1 => {
            let why = "the inline and auto modes pin one thread: name one CPU, or set poll to adaptive or dedicated";
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
    if config.poll == Poll::Adaptive && config.wait != Wait::Auto {
        let why =
            "waiting calls sleep in the adaptive mode: set wait to auto, or poll to inline or dedicated";
        return Err(("wait", why.to_string()));
    }
    Ok(())
}

impl Config {
    /// How many pollers the process has.
    pub fn poller_count(&self) -> usize {
        match (self.pollers, &self.cores) {
            (Some(pollers), _) => pollers as usize,
            (None, Some(cores)) if matches!(self.poll, Poll::Adaptive | Poll::Dedicated) => {
                cores.len().max(1)
            }
            (None, _) => 1,
        }
    }
}
