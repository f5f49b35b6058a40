//! What a process will need of the system, computed from its settings before anything is opened.

use super::device_plan::{DeviceLimits, data_queues, device_resources, least_devices, most_devices};
use super::error::NodeError;
use super::pollers::poll_mode;
use super::rdma::verbs_options;
use super::system_limits::SystemLimits;
use super::transport::{opens_verbs, peers_beyond_shm};
use crate::config::Config;
use crate::engine::PollMode;
use crate::fabric::verbs::{self, VerbsDevice};
use crate::fabric::{FabricKind, shm, tcp};
use crate::memory::{LockPolicy, is_for_reserve};
use crate::wire::HostPort;
use std::fmt;

/// Descriptors of a node without peers: event queues, the pool, the listener. And those of one link
/// while it is made.
const FILES: u64 = 16;
/// Descriptors of each further poller over tcp.
const FILES_PER_POLLER: u64 = 2;
/// Descriptors of an RDMA device: its commands and its events. Each poller has one more for it.
const FILES_PER_DEVICE: u64 = 2;
/// Descriptors of a peer over a fabric. Each peer has a connection of the bootstrap service in each
/// direction. Shared memory has its pool, its process and the link besides. Tcp has a socket that
/// listens, a main connection, and `tcp_streams` more. Tensors by calls have a connection in each
/// direction.
const FILES_PER_PEER: [(FabricKind, u64); 4] =
    [(FabricKind::Shm, 5), (FabricKind::Verbs, 2), (FabricKind::Tcp, 4), (FabricKind::Grpc, 4)];
/// Descriptors that each link takes besides, if all are made at a time.
const FILES_PER_ATTEMPT: u64 = 3;
/// Connections of the bootstrap service whose callers have not proven a name.
const CANDIDATES: u64 = 128;
/// Mappings of a process without peers, and of a peer over shared memory.
const MAPS: (u64, u64) = (60, 6);
/// The name of the resource that depends on the places of the members.
const PORTS: &str = "ports";
/// Threads that each start makes: of the bootstrap service, and of callbacks. Each poller has one
/// more unless calls poll, and each fabric from its first link on.
const THREADS: u64 = 2;
/// Threads that come later, if at all: of owners of foreign memory, and of a store's server.
const LATER_THREADS: u64 = 2;

/// One resource that a process needs.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlannedResource {
    /// As people call it, such as `open files`.
    pub name: &'static str,
    /// How much of it this process needs, in its unit. Of ports, how many all members at its
    /// address need.
    pub need: u64,
    /// The limit of this process; `None` if there is none, or it is not known before a device is
    /// opened.
    pub limit: Option<u64>,
    /// Where the limit comes from, such as `RLIMIT_NOFILE`, or why it is not known.
    pub origin: String,
    /// What makes up the need.
    pub because: String,
    /// What to change if the limit is lower.
    pub remedy: String,
    /// Whether a node does not start if the limit is lower. Otherwise it starts, and may fail or be
    /// slower later.
    pub is_hard: bool,
    unit: Unit,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    Count,
    Bytes,
}

impl PlannedResource {
    pub(super) fn count(
        name: &'static str,
        need: u64,
        (limit, origin): (Option<u64>, &str),
        because: String,
        remedy: String,
        is_hard: bool,
    ) -> Self {
        let origin = origin.into();
        PlannedResource { name, need, limit, origin, because, remedy, is_hard, unit: Unit::Count }
    }

    /// Whether the limit is lower than the need.
    pub fn is_short(&self) -> bool {
        self.limit.is_some_and(|limit| limit < self.need)
    }
}

/// What a process needs of the system for its cluster. [`Node::start`](crate::Node::start) checks
/// it before it opens anything.
///
/// ```
/// use tensorwire::{Config, ResourcePlan};
/// let cluster: Vec<String> = (1..=256).map(|port| format!("127.0.0.1:{port}")).collect();
/// let settings = Config::builder().without_environment().member("worker", 0);
/// let config = settings.set("cluster", format!("worker={}", cluster.join(","))).build()?;
/// let plan = ResourcePlan::new(&config);
/// assert!(plan.resources().iter().any(|it| it.name == "open files" && it.need > 1024));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct ResourcePlan {
    resources: Vec<PlannedResource>,
    peers: u64,
}

impl ResourcePlan {
    /// The plan of a process with these settings, with the limits of this one. It opens nothing, so
    /// the limits of RDMA devices are not known.
    pub fn new(config: &Config) -> Self {
        let of_devices = DeviceLimits::unknown("a device says it once it is open");
        Self::with(config, &SystemLimits::of_this_process(), &of_devices)
    }

    /// The plan of a member that has yet to meet the others. Ports depend on where those are.
    pub(super) fn before_meeting(config: &Config) -> Self {
        let mut plan = Self::new(config);
        plan.resources.retain(|resource| resource.name != PORTS);
        plan
    }

    /// The same with the limits of the RDMA devices. Those that the node would open are opened for
    /// it, and closed again.
    pub fn with_devices(config: &Config) -> Self {
        if !opens_verbs(config) {
            return Self::new(config);
        }
        // Before the device takes descriptors.
        let limits = SystemLimits::of_this_process();
        let of_devices = match VerbsDevice::open(verbs_options(config)) {
            Ok(device) => DeviceLimits::of(&device),
            Err(error) => DeviceLimits::unknown(&error.to_string()),
        };
        Self::with(config, &limits, &of_devices)
    }

    /// What the process must have of these devices, and no more.
    pub(super) fn of_device(config: &Config, device: &VerbsDevice) -> Self {
        let devices = device.limits().count() as u64;
        let resources = device_resources(config, devices, &DeviceLimits::of(device), true);
        ResourcePlan { resources: resources.into(), peers: peers(config) }
    }

    fn with(config: &Config, limits: &SystemLimits, of_devices: &DeviceLimits) -> Self {
        let peers = peers(config);
        let devices = of_devices.count.unwrap_or_else(|| most_devices(config));
        let least_devices = of_devices.count.unwrap_or_else(|| least_devices(config));
        let may_use = |kind| config.fabric.is_none_or(|set| set.has(kind));
        let names_verbs = config.fabric.is_some_and(|set| set.has(FabricKind::Verbs));
        let per_peer = FILES_PER_PEER.into_iter().filter(|(kind, _)| may_use(*kind));
        let streams = |kind| if kind == FabricKind::Tcp { u64::from(config.tcp_streams) } else { 0 };
        let per_peer = per_peer.map(|(kind, files)| files + streams(kind)).max().unwrap_or(0);
        let is_below = |limit: Option<u64>, least: u64| limit.is_some_and(|limit| limit < least);
        let pollers = config.poller_count() as u64;
        let over_tcp = |count: u64| if may_use(FabricKind::Tcp) { count } else { 0 };
        // Named, or found.
        let has_verbs = names_verbs || opens_verbs(config) && limits.has_device;
        let files_of = |devices| devices * (FILES_PER_DEVICE + pollers);
        let of_devices_files = if has_verbs { files_of(devices) } else { 0 };
        let least_of_devices_files = if names_verbs { files_of(least_devices) } else { 0 };
        let own = FILES + over_tcp(FILES_PER_POLLER * (pollers - 1)) + of_devices_files;
        let files = limits.open + own + per_peer * peers;
        // Such connections make way for those of peers, but not for what else needs a descriptor.
        let arriving = over_tcp(tcp::most_arriving(config.tcp_streams, peers));
        let at_most = files + FILES_PER_ATTEMPT * peers + CANDIDATES + arriving;
        let of_shm = if may_use(FabricKind::Shm) { shm::link_bytes(config.queue_depth) } else { 0 };
        let links_of = |devices| {
            let of_each = verbs::link_bytes(data_queues(config, devices), of_devices.depth(config));
            of_each * devices * peers_beyond_shm(config)
        };
        let locked_links = links_of(devices);
        let of_verbs = if has_verbs { locked_links } else { 0 };
        let least_of_verbs = if names_verbs { links_of(least_devices) } else { 0 };
        let links = (of_shm.max(over_tcp(tcp::link_bytes())) * peers).max(of_verbs);
        let reserved = is_for_reserve(config.pool_pages, config.pool_require, config.pool_size);
        // Pages that are reserved are neither available memory nor memory of the cgroup.
        let of_pool = if reserved { 0 } else { config.pool_size };
        let memory_of = if reserved {
            format!("{} of link memory; the pool is in reserved huge pages", bytes(links))
        } else {
            format!("pool_size, and {} of link memory, which fills as it is used", bytes(links))
        };
        // Of peers over shared memory, whose link memory is mapped too.
        let pools = if may_use(FabricKind::Shm) { peers } else { 0 };
        let theirs = if pools > 0 { ", and up to as much of each peer" } else { "" };
        // None of those beyond shared memory.
        let has_shm_links = pools > 0 && peers > peers_beyond_shm(config);
        let segment = if has_shm_links { shm::segment_bytes(config.queue_depth) } else { 0 };
        let cgroup_memory = limits.cgroup_memory.as_ref().map(|(limit, _)| *limit);
        let fabrics = config.fabric.map_or(FabricKind::FASTEST_FIRST.len(), |set| set.kinds().count());
        let by_calls = config.fabric.is_some_and(|set| set.has(FabricKind::Grpc));
        let polling = if by_calls || poll_mode(config) == PollMode::Inline { 0 } else { pollers };
        let at_start = THREADS + polling;
        let own_threads = at_start + fabrics as u64 + LATER_THREADS;
        let (threads, threads_of, remedy) = match (limits.user_threads, &limits.cgroup_threads) {
            (user, Some((most, of))) if user.is_none_or(|user| *most < user) => {
                (Some(*most), &**of, "raise it (TasksMax of the service, the pids limit of the container)")
            }
            (user, _) => {
                let remedy = "raise `ulimit -u`, which counts the threads of all processes of the user";
                (user, "RLIMIT_NPROC", remedy)
            }
        };
        let count = PlannedResource::count;
        let mut resources = vec![
            count(
                "open files",
                files,
                (limits.files, "RLIMIT_NOFILE"),
                format!(
                    "{} are open, {own}, and {per_peer} per peer; while all join up to \
                     {at_most}",
                    limits.open
                ),
                format!("raise `ulimit -n` to {at_most}, or LimitNOFILE of the service"),
                is_below(limits.files, files - of_devices_files + least_of_devices_files),
            ),
            count(
                "threads",
                limits.running + own_threads + 2 * peers,
                (threads, threads_of),
                format!("{} run, {own_threads}, and while all join up to 2 per peer", limits.running),
                remedy.into(),
                is_below(threads, limits.running + at_start),
            ),
            PlannedResource {
                unit: Unit::Bytes,
                ..count(
                    "memory",
                    of_pool + links,
                    (limits.memory, "MemAvailable of /proc/meminfo"),
                    memory_of.clone(),
                    "lower pool_size, over shared memory also queue_depth, over RDMA also \
                     rdma_qp_queue_depth, or use fewer processes per host"
                        .into(),
                    false,
                )
            },
            PlannedResource {
                unit: Unit::Bytes,
                ..count(
                    "memory of the cgroup",
                    of_pool + links,
                    limits.cgroup_memory.as_ref().map_or((None, ""), |(limit, of)| (Some(*limit), of)),
                    memory_of,
                    "raise it (MemoryMax of the service, the memory limit of the container), lower \
                     pool_size, over shared memory also queue_depth, over RDMA also \
                     rdma_qp_queue_depth, or reserve huge pages for the pool"
                        .into(),
                    // What the start fills.
                    is_below(cgroup_memory, of_pool + least_of_verbs),
                )
            },
            PlannedResource {
                unit: Unit::Bytes,
                ..count(
                    "address space",
                    limits.mapped + config.pool_size * (1 + pools) + links * (1 + pools.min(1)),
                    (limits.address_space, "RLIMIT_AS"),
                    format!("{} are mapped, pool_size, link memory{theirs}", bytes(limits.mapped)),
                    "raise `ulimit -v`, or LimitAS of the service; or lower pool_size".into(),
                    is_below(limits.address_space, limits.mapped + config.pool_size),
                )
            },
            PlannedResource {
                unit: Unit::Bytes,
                ..count(
                    "file size",
                    config.pool_size.max(segment),
                    (limits.file_size, "RLIMIT_FSIZE"),
                    "the pool, or the memory of a link: files in memory".into(),
                    "raise `ulimit -f`, or LimitFSIZE of the service; or lower pool_size and queue_depth"
                        .into(),
                    true,
                )
            },
            PlannedResource {
                unit: Unit::Bytes,
                ..count(
                    "locked memory",
                    match (has_verbs, config.pool_lock) {
                        // The kernel counts what each device locks.
                        (true, _) => config.pool_size * devices + locked_links,
                        (false, LockPolicy::No) => 0,
                        (false, _) => config.pool_size,
                    },
                    (limits.locked, "RLIMIT_MEMLOCK"),
                    match (has_verbs, devices) {
                        (true, 1) => format!("the pool, and {} for links", bytes(locked_links)),
                        (true, _) => {
                            let links = bytes(locked_links);
                            format!("the pool by each of {devices} devices, and {links} for links")
                        }
                        (false, _) => "the pool".into(),
                    },
                    "raise `ulimit -l`, or LimitMEMLOCK of the service; without RDMA pool_lock = no also does"
                        .into(),
                    names_verbs && is_below(limits.locked, config.pool_size * least_devices + least_of_verbs)
                        || config.pool_lock == LockPolicy::Require,
                )
            },
        ];
        if has_verbs {
            resources.extend(device_resources(config, devices, of_devices, names_verbs));
        }
        if may_use(FabricKind::Shm) {
            let because = format!("{}, and {} per peer", MAPS.0, MAPS.1);
            let remedy = "raise vm.max_map_count (sysctl)".into();
            let most = (limits.maps, "vm.max_map_count");
            resources.push(count("mappings", MAPS.0 + MAPS.1 * peers, most, because, remedy, true));
            let each = peers.div_ceil(pollers);
            let because = format!("all peers, divided by the number of pollers, {pollers}");
            let remedy = "raise pollers (poll = adaptive or dedicated)".into();
            let most = (Some(shm::MAX_LINKS as u64), "of shared memory");
            resources.push(count("links of a poller", each, most, because, remedy, true));
        }
        if may_use(FabricKind::Tcp) {
            let (members, peers) = (members_at_address(config), peers_beyond_shm(config));
            let because = format!("{members} members at this address, each with {peers} links over tcp");
            let remedy = "widen net.ipv4.ip_local_port_range (sysctl), or give members other addresses, such \
                          as 127.0.0.2";
            let most = (limits.ports, "net.ipv4.ip_local_port_range");
            // Members of one name may bind different addresses.
            let own = config.cluster.address(config.task_id());
            let is_known = config.bind.is_none() && own.is_some_and(|own| own.ip().is_some());
            let is_hard = is_known && config.fabric.is_some_and(|set| set.kinds().eq([FabricKind::Tcp]));
            resources.push(count(PORTS, members * peers, most, because, remedy.into(), is_hard));
        }
        ResourcePlan { resources, peers }
    }

    /// Each resource.
    pub fn resources(&self) -> &[PlannedResource] {
        &self.resources
    }

    /// Fails if a limit is too low for the node to work.
    ///
    /// # Errors
    /// [`NodeError::Limit`] with the first such resource.
    pub(super) fn check(&self) -> Result<(), NodeError> {
        match self.resources.iter().find(|resource| resource.is_hard && resource.is_short()) {
            Some(short) => Err(NodeError::Limit { peers: self.peers, resource: Box::new(short.clone()) }),
            None => Ok(()),
        }
    }
}

/// The members that the cluster has at the address of this one, which counts too.
fn members_at_address(config: &Config) -> u64 {
    let of = |address: &HostPort| (address.ip(), address.name().map(str::to_owned));
    let own = config.cluster.address(config.task_id()).map(of);
    config.cluster.members().filter(|(_, address)| Some(of(address)) == own).count() as u64
}

fn peers(config: &Config) -> u64 {
    config.cluster.members().count() as u64 - 1
}

fn bytes(count: u64) -> String {
    if count < 1 << 20 { format!("{} KiB", count >> 10) } else { format!("{} MiB", count >> 20) }
}

impl Unit {
    fn text(self, count: u64) -> String {
        match self {
            Unit::Count => count.to_string(),
            Unit::Bytes => bytes(count),
        }
    }
}

impl fmt::Display for PlannedResource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} ({})", self.name, self.unit.text(self.need), self.because)?;
        match self.limit {
            Some(limit) => write!(f, ", limit {} ({})", self.unit.text(limit), self.origin)?,
            None if self.origin.is_empty() => f.write_str(", no limit known")?,
            None => write!(f, ", no limit known ({})", self.origin)?,
        }
        if self.is_short() { write!(f, ": {}", self.remedy) } else { Ok(()) }
    }
}

/// The number of peers, and one line for each resource.
impl fmt::Display for ResourcePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "peers: {}", self.peers)?;
        for resource in &self.resources {
            writeln!(f, "{resource}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
