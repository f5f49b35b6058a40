//! What a process needs of its RDMA devices, beside their limits.

use super::plan::PlannedResource;
use super::rdma::verbs_options;
use super::transport::peers_beyond_shm;
use crate::config::{Config, MemoryWindows};
use crate::fabric::verbs::device::{AUTO, Limits, MAX_RAILS};
use crate::fabric::verbs::{VerbsDevice, depth_of_device, link_completions};

/// The smallest limits of the devices, each with its origin; or why there is none.
pub(super) struct DeviceLimits {
    /// How many devices there are; `None` if they are not open.
    pub count: Option<u64>,
    queue_pairs: (Option<u64>, String),
    completion_queues: (Option<u64>, String),
    regions: (Option<u64>, String),
    /// Completions of one queue, and work requests of a queue pair.
    entries: Option<u64>,
    requests: Option<u64>,
}

impl DeviceLimits {
    /// They are not known, for this reason.
    pub fn unknown(why: &str) -> Self {
        let [queue_pairs, completion_queues, regions] = [(); 3].map(|()| (None, why.into()));
        DeviceLimits { count: None, queue_pairs, completion_queues, regions, entries: None, requests: None }
    }

    pub fn of(device: &VerbsDevice) -> Self {
        let smallest = |name: &str, of: fn(&Limits) -> u32| {
            let limits = device.limits().map(|(device, limits)| (of(&limits), device));
            match limits.filter(|(limit, _)| *limit > 0).min() {
                Some((limit, device)) => (Some(limit.into()), format!("{name} of {device}")),
                None => (None, format!("the device has no {name}")),
            }
        };
        DeviceLimits {
            count: Some(device.limits().count() as u64),
            queue_pairs: smallest("max_qp", |limits| limits.max_qp),
            completion_queues: smallest("max_cq", |limits| limits.max_cq),
            regions: smallest("max_mr", |limits| limits.max_mr),
            entries: smallest("max_cqe", |limits| limits.max_cqe).0,
            requests: smallest("max_qp_wr", |limits| limits.max_qp_wr).0,
        }
    }

    /// The queue depth of links, as far as it is known.
    pub fn depth(&self, config: &Config) -> u32 {
        let most = self.requests.and_then(|most| u32::try_from(most).ok());
        depth_of_device(config.rdma_qp_queue_depth, most.unwrap_or(u32::MAX))
    }
}

/// What a process needs of each of so many devices. A lack of what links need is hard if
/// `must_have` says so.
pub(super) fn device_resources(
    config: &Config,
    devices: u64,
    limits: &DeviceLimits,
    must_have: bool,
) -> [PlannedResource; 3] {
    let peers = peers_beyond_shm(config);
    let of_each = if devices > 1 { format!(", on each of {devices} devices") } else { String::new() };
    let backup = if has_backup(config, devices) { " (one is a backup)" } else { "" };
    let (data, outside) = (u64::from(data_queues(config, devices)), u64::from(config.rdma_registrations));
    let pairs = (1 + data) * peers;
    let (limit, origin) = &limits.queue_pairs;
    let queue_pairs = PlannedResource::count(
        "queue pairs",
        pairs,
        (*limit, origin),
        format!("1 for messages and {data} for data{backup}, for each of {peers} peers{of_each}"),
        "lower rdma_qps_per_peer if it is more than 1, use fewer processes, or leave verbs out of fabric"
            .into(),
        must_have,
    );
    let of_link = link_completions(data_queues(config, devices), limits.depth(config));
    let entries = u64::from(verbs_options(config).cq_entries);
    // A queue has places for one link at least.
    let links = (limits.entries.map_or(entries, |most| most.min(entries)) / of_link).max(1);
    let pollers = config.poller_count() as u64;
    // Each poller may have a queue that is not full.
    let partial = pollers.min(peers);
    let queues = (peers - partial) / links + partial;
    let (limit, origin) = &limits.completion_queues;
    let completion_queues = PlannedResource::count(
        "completion queues",
        queues,
        (*limit, origin),
        format!("{peers} peers on {pollers} pollers, {links} links in a queue{of_each}"),
        "lower rdma_qp_queue_depth, rdma_qps_per_peer or pollers, use fewer processes, or leave verbs out of \
         fabric"
            .into(),
        must_have,
    );
    let of_links = 1 + 2 * peers;
    let (limit, origin) = &limits.regions;
    let regions = PlannedResource::count(
        "memory regions",
        of_links + outside,
        (*limit, origin),
        format!("the pool, 2 for each of {peers} peers, {outside} of memory outside the pool{of_each}"),
        "lower rdma_registrations, use fewer processes, or leave verbs out of fabric".into(),
        // Without the others, memory outside the pool is copied.
        must_have && limit.is_some_and(|limit| limit < of_links),
    );
    [queue_pairs, completion_queues, regions]
}

/// Queue pairs for data to each peer, on each of so many devices: with a backup if there are
/// several.
pub(super) fn data_queues(config: &Config, devices: u64) -> u8 {
    match config.rdma_memory_windows {
        MemoryWindows::On => 1,
        MemoryWindows::Off => config.rdma_qps_per_peer + u8::from(has_backup(config, devices)),
    }
}

fn has_backup(config: &Config, devices: u64) -> bool {
    config.rdma_memory_windows == MemoryWindows::Off && devices > 1
}

/// The RDMA devices that a process uses at most.
pub(super) fn most_devices(config: &Config) -> u64 {
    match config.rdma_device.as_deref() {
        Some(AUTO) => MAX_RAILS as u64,
        _ => least_devices(config),
    }
}

/// The RDMA devices that a process over verbs uses at least.
pub(super) fn least_devices(config: &Config) -> u64 {
    match config.rdma_device.as_deref() {
        None | Some(AUTO) => 1,
        Some(names) => names.split(',').count() as u64,
    }
}
