//! What a process will need of the system, computed from its settings before anything is opened.

use super::device_plan::{DeviceLimits, data_queues, device_resources, devices};
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
        let devices = devices(config);
        let may_use = |kind| config.fabric.is_none_or(|set| set.has(kind));
        let names_verbs = config.fabric.is_some_and(|set| set.has(FabricKind::Verbs));
        let per_peer = FILES_PER_PEER.into_iter().filter(|(kind, _)| may_use(*kind));
        let streams = |kind| if kind == FabricKind::Tcp { u64::from(config.tcp_streams) } else { 0 };
        let per_peer = per_peer.map(|(kind, files)| files + streams(kind)).max().unwrap_or(0);
        let pollers = config.poller_count() as u64;
        let over_tcp = |count: u64| if may_use(FabricKind::Tcp) { count } else { 0 };
        // Named, or found.
        let has_verbs = names_verbs || opens_verbs(config) && limits.has_device;
        let of_devices_files = if has_verbs { devices * (FILES_PER_DEVICE + pollers) } else { 0 };
        let own = FILES + over_tcp(FILES_PER_POLLER * (pollers - 1)) + of_devices_files;
        let files = limits.open + own + per_peer * peers;
        // Such connections make way for those of peers, but not for what else needs a descriptor.
        let arriving = over_tcp(tcp::most_arriving(config.tcp_streams, peers));
        let at_most = files + FILES_PER_ATTEMPT * peers + CANDIDATES + arriving;
        let of_shm = if may_use(FabricKind::Shm) { shm::link_bytes(config.queue_depth) } else { 0 };
        let locked_links =
            verbs::link_bytes(data_queues(config, devices), of_devices.depth(config)) * devices;
        let locked_links = locked_links * peers_beyond_shm(config);
        let of_verbs = if has_verbs { locked_links } else { 0 };
        let links = (of_shm.max(over_tcp(tcp::link_bytes())) * peers).max(of_verbs);
        let reserved = is_for_reserve(config.pool_pages, config.pool_require, config.pool_size);
        let in_cgroup = if reserved { 0 } else { config.pool_size };
        // Of peers over shared memory, whose link memory is mapped too.
        let pools = if may_use(FabricKind::Shm) { peers } else { 0 };
        let theirs = if pools > 0 { ", and up to as much of each peer" } else { "" };
        let is_below = |limit: Option<u64>, least: u64| limit.is_some_and(|limit| limit < least);
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
                true,
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
                    config.pool_size + links,
                    (limits.memory, "MemAvailable of /proc/meminfo"),
                    format!("pool_size, and {} of link memory, which fills as it is used", bytes(links)),
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
                    in_cgroup + links,
                    limits.cgroup_memory.as_ref().map_or((None, ""), |(limit, of)| (Some(*limit), of)),
                    if reserved {
                        format!("{} of link memory; the pool is in reserved huge pages", bytes(links))
                    } else {
                        format!("pool_size, and {} of link memory, which fills as it is used", bytes(links))
                    },
                    "raise it (MemoryMax of the service, the memory limit of the container), lower \
                     pool_size, over shared memory also queue_depth, over RDMA also \
                     rdma_qp_queue_depth, or reserve huge pages for the pool"
                        .into(),
                    // What the start fills.
                    is_below(limits.cgroup_memory.as_ref().map(|(limit, _)| *limit), in_cgroup + of_verbs),
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
                    names_verbs || config.pool_lock == LockPolicy::Require,
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
            resources.push(count("ports", members * peers, most, because, remedy.into(), is_hard));
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
mod tests {
    use super::*;

    fn plan(processes: usize, more: &[(&str, &str)], limits: &SystemLimits) -> ResourcePlan {
        let cluster: Vec<String> = (1..=processes).map(|port| format!("127.0.0.1:{port}")).collect();
        let settings = Config::builder().without_environment().member("w", 0);
        let settings = settings.set("cluster", format!("w={}", cluster.join(",")));
        let settings = more.iter().fold(settings, |settings, (key, value)| settings.set(*key, *value));
        ResourcePlan::with(&settings.build().unwrap(), limits, &DeviceLimits::unknown("it is closed"))
    }

    const WIDE: SystemLimits = SystemLimits {
        open: 3,
        mapped: 0,
        running: 1,
        files: None,
        locked: None,
        user_threads: None,
        cgroup_threads: None,
        maps: None,
        ports: None,
        memory: None,
        address_space: None,
        cgroup_memory: None,
        has_device: false,
    };

    #[test]
    fn a_plan_grows_with_the_peers() {
        let need = |processes, name: &str| {
            let plan = plan(processes, &[], &WIDE);
            plan.resources().iter().find(|it| it.name == name).unwrap().need
        };
        assert_eq!((need(1, "open files"), need(256, "open files")), (19, 19 + 5 * 255));
        assert!(need(256, "memory") > need(1, "memory"));
        let calls = plan(256, &[("fabric", "grpc")], &WIDE);
        let files = calls.resources().iter().find(|it| it.name == "open files").unwrap();
        assert_eq!(files.need, 19 + 4 * 255);
        let tcp = |more: &[(&str, &str)]| {
            let plan = plan(3, &[&[("fabric", "tcp")], more].concat(), &WIDE);
            plan.resources().iter().find(|it| it.name == "open files").unwrap().need
        };
        assert_eq!(tcp(&[("tcp_streams", "4")]), tcp(&[]) + 2 * 3);
        for (streams, arriving) in [("1", 128 + 2 * 8), ("4", 128 + 2 * 10)] {
            let settings = [("fabric", "tcp"), ("tcp_streams", streams)];
            let most = tcp(&settings[1..]) + 2 * FILES_PER_ATTEMPT + CANDIDATES + arriving;
            assert!(plan(3, &settings, &WIDE).to_string().contains(&format!("up to {most}")));
        }
        assert_eq!(tcp(&[("poll", "dedicated"), ("pollers", "3")]), tcp(&[]) + 2 * 2);
        assert_eq!(plan(1, &[], &WIDE).check().map_err(|error| error.to_string()), Ok(()));
    }

    #[test]
    fn a_limit_that_is_too_low_is_named_with_need_and_remedy() {
        let few = SystemLimits { files: Some(1024), ..WIDE };
        assert!(plan(201, &[], &few).check().is_ok());
        let error = plan(256, &[], &few).check().unwrap_err().to_string();
        assert!(error.contains("255 peers") && error.contains("open files: 1294"), "{error}");
        assert!(error.contains("limit 1024 (RLIMIT_NOFILE): raise `ulimit -n` to 4355"), "{error}");
        let of = |fabric| plan(2, &[("fabric", fabric)], &SystemLimits { files: Some(1), ..WIDE });
        let remedy = |fabric| of(fabric).check().unwrap_err().to_string();
        assert!(remedy("shm").contains("to 155") && remedy("shm,tcp").contains("to 291"));
        let small = SystemLimits { locked: Some(64 << 10), ..WIDE };
        assert!(plan(2, &[], &small).check().is_ok(), "best effort");
        let error = plan(2, &[("pool_lock", "require")], &small).check().unwrap_err().to_string();
        assert!(
            error.contains(
                "locked memory: 256 MiB (the pool), limit 64 KiB (RLIMIT_MEMLOCK): raise `ulimit -l`"
            ),
            "{error}"
        );
        let ports = SystemLimits { ports: Some(28_232), ..WIDE };
        assert!(plan(256, &[], &ports).check().is_ok(), "shared memory needs none");
        assert!(plan(168, &[("fabric", "tcp")], &ports).check().is_ok());
        let error = plan(169, &[("fabric", "tcp")], &ports).check().unwrap_err().to_string();
        assert!(
            error.contains("ports: 28392 (169 members at this address, each with 168 links over tcp)"),
            "{error}"
        );
        // Each address has ports of its own, and a name can be that of several.
        let at = |addresses: &str, more: &[(&str, &str)]| {
            let cluster = [("cluster", addresses), ("fabric", "tcp")];
            plan(1, &[&cluster, more].concat(), &SystemLimits { ports: Some(3), ..WIDE })
        };
        assert!(at("w=127.0.0.1:1,127.0.0.2:1,127.0.0.2:2", &[]).check().is_ok());
        assert!(at("w=127.0.0.1:1,127.0.0.1:2,127.0.0.2:1", &[]).check().is_err());
        assert!(at("w=localhost:1,localhost:2,127.0.0.1:1", &[]).check().is_ok());
        assert!(at("w=127.0.0.1:1,127.0.0.1:2,127.0.0.1:3", &[("bind", "127.0.0.9:1")]).check().is_ok());
        let maps = SystemLimits { maps: Some(100), ..WIDE };
        assert!(plan(16, &[], &maps).check().unwrap_err().to_string().contains("vm.max_map_count"));
    }

    #[test]
    fn queue_pairs_are_those_for_messages_and_for_data() {
        let of = |more: &[(&str, &str)]| {
            let plan = plan(5, &[&[("fabric", "verbs")], more].concat(), &WIDE);
            plan.resources().iter().find(|it| it.name == "queue pairs").unwrap().need
        };
        assert_eq!((of(&[]), of(&[("rdma_qps_per_peer", "4")])), (8, 20));
        assert_eq!(of(&[("rdma_qps_per_peer", "4"), ("rdma_memory_windows", "on")]), 8);
    }

    #[test]
    fn what_verbs_needs_is_counted_wherever_it_is_named() {
        let small = SystemLimits { locked: Some(64 << 10), ..WIDE };
        for fabric in ["verbs", "tcp,verbs", "shm,verbs"] {
            let plan = plan(5, &[("fabric", fabric)], &small);
            assert!(plan.resources().iter().any(|it| it.name == "queue pairs"), "{fabric}");
            assert!(plan.check().unwrap_err().to_string().contains("locked memory"), "{fabric}");
        }
        let without = plan(5, &[("fabric", "shm,tcp")], &small);
        assert!(without.resources().iter().all(|it| it.name != "queue pairs") && without.check().is_ok());
    }

    #[test]
    fn a_device_that_is_found_counts_as_one_that_is_named_but_its_lack_is_not_hard() {
        let small = SystemLimits { locked: Some(64 << 10), has_device: true, ..WIDE };
        let of = |fabric: &[(&str, &str)], limits: &SystemLimits| {
            let hosts = [("cluster", "w=a:1,a:2,b:1"), ("auth", "plain"), ("allow_non_loopback", "true")];
            plan(3, &[&hosts, fabric].concat(), limits)
        };
        let need = |plan: &ResourcePlan, name: &str| {
            plan.resources().iter().find(|it| it.name == name).map(|it| it.need)
        };
        let (auto, named) = (of(&[], &small), of(&[("fabric", "shm,verbs,tcp")], &small));
        for name in ["locked memory", "open files", "queue pairs"] {
            assert!(need(&auto, name).is_some() && need(&auto, name) == need(&named, name), "{name}");
        }
        let without = of(&[], &SystemLimits { has_device: false, ..small });
        assert_eq!(need(&without, "open files"), need(&auto, "open files").map(|files| files - 3));
        assert_eq!((need(&without, "locked memory"), need(&without, "queue pairs")), (Some(256 << 20), None));
        assert!(auto.check().is_ok() && named.check().is_err());
    }

    #[test]
    fn peers_on_the_same_host_need_no_queue_pairs_if_shared_memory_may_be_used() {
        let of = |fabric: &str| {
            let cluster = ("cluster", "w=a:1,a:2,b:1,c:1");
            let settings = [("fabric", fabric), cluster, ("auth", "plain"), ("allow_non_loopback", "true")];
            let plan = plan(4, &settings, &WIDE);
            let need = |name| plan.resources().iter().find(|it| it.name == name).unwrap().need;
            (need("queue pairs"), need("memory regions") - 1024)
        };
        assert_eq!((of("verbs"), of("tcp,verbs"), of("shm,verbs")), ((6, 7), (6, 7), (4, 5)));
    }

    #[test]
    fn what_each_device_takes_is_counted_for_each() {
        let of = |device: &str, name: &str| {
            let settings = [("fabric", "verbs"), ("rdma_device", device), ("rdma_registrations", "10")];
            let plan = plan(5, &settings, &WIDE);
            plan.resources().iter().find(|it| it.name == name).unwrap().clone()
        };
        assert_eq!((of("a", "queue pairs").need, of("a,b", "queue pairs").need), (2 * 4, 3 * 4));
        let because = of("a,b", "queue pairs").because;
        assert!(because.contains("2 for data (one is a backup)") && because.contains("on each of 2 devices"));
        assert_eq!(of("a,b", "memory regions").need, 1 + 2 * 4 + 10);
        let locked = |device| of(device, "locked memory").need;
        // Of 4 peers: 256 bytes for each of 2 * 1024 places of a queue pair for data, and the
        // words, both in whole pages.
        let with = |queues: u64| (256 << 20) + 4 * (queues * (512 << 10) + 4096 + 3 * 4096);
        assert_eq!(locked("a"), with(1));
        assert_eq!((locked("a,b"), locked("auto")), (2 * with(2), 4 * with(2)));
        assert_eq!(of("a,b", "locked memory").because, "the pool by each of 2 devices, and 8 MiB for links");
        assert!(of("a", "memory").because.starts_with("pool_size, and 2 MiB of link memory"));
    }

    #[test]
    fn the_memory_limit_of_the_cgroup_must_hold_what_the_start_fills() {
        let of = |limit: u64, more: &[(&str, &str)]| {
            let cgroup_memory = Some((limit, "memory.max of cgroup /cg/job".to_owned()));
            let limits = SystemLimits { cgroup_memory, ..WIDE };
            plan(5, &[&[("pool_size", "64MiB"), ("pool_pages", "plain")], more].concat(), &limits)
        };
        let error = of((64 << 20) - 1, &[]).check().unwrap_err().to_string();
        let says =
            ["memory of the cgroup: ", "limit 63 MiB (memory.max of cgroup /cg/job)", "lower pool_size"];
        assert!(says.iter().all(|part| error.contains(part)), "{error}");
        // The rings of links may stay empty. Those of verbs are registered.
        let narrow = of(64 << 20, &[]);
        let memory = narrow.resources().iter().find(|it| it.name == "memory of the cgroup").unwrap();
        assert!(memory.is_short() && narrow.check().is_ok(), "{memory}");
        assert!(of(64 << 20, &[("fabric", "verbs")]).check().is_err());
        let roomy = of(memory.need, &[]);
        assert!(roomy.resources().iter().all(|it| !it.is_short()), "{roomy}");
        // The hugetlb controller has the limit of reserved pages.
        let reserved = of(32 << 20, &[("pool_pages", "2m"), ("pool_require", "true")]);
        assert!(reserved.check().is_ok(), "{reserved}");
    }

    #[test]
    fn the_address_space_must_hold_the_pool_beside_what_is_mapped() {
        let of = |limit| {
            let limits = SystemLimits { mapped: 1 << 20, address_space: Some(limit), ..WIDE };
            plan(2, &[("pool_size", "64MiB")], &limits)
        };
        let error = of((65 << 20) - 1).check().unwrap_err().to_string();
        let says = ["address space: ", "1 MiB are mapped", "limit 64 MiB (RLIMIT_AS): raise `ulimit -v`"];
        assert!(says.iter().all(|part| error.contains(part)), "{error}");
        assert!(of(65 << 20).check().is_ok());
    }

    #[test]
    fn the_limits_of_threads_must_hold_those_of_the_start() {
        let of = |limits: &SystemLimits, more: &[(&str, &str)]| {
            let plan = plan(3, more, limits);
            let threads = plan.resources().iter().find(|it| it.name == "threads").unwrap().clone();
            (threads, plan.check().map_err(|error| error.to_string()))
        };
        let need = |more: &[(&str, &str)]| of(&SystemLimits { running: 5, ..WIDE }, more).0.need;
        // Bootstrap, callbacks, owners, a store, 2 attempts for each peer, and one of each fabric.
        assert_eq!(need(&[("fabric", "shm")]), 5 + 4 + 2 * 2 + 1 + 1);
        assert_eq!(need(&[("fabric", "shm,tcp"), ("poll", "inline")]), 5 + 4 + 2 * 2 + 2);
        assert_eq!(need(&[("fabric", "grpc")]), 5 + 4 + 2 * 2 + 1);
        let many = [("fabric", "tcp"), ("poll", "dedicated"), ("pollers", "6")];
        assert_eq!(need(&many), 5 + 4 + 2 * 2 + 1 + 6);

        let cgroup = |most| Some((most, "pids.max of cgroup /cg/job".to_owned()));
        let error = of(&SystemLimits { cgroup_threads: cgroup(8), ..WIDE }, &many).1.unwrap_err();
        assert!(error.contains("threads: 16 (1 run, 11, and while all join up to 2 per peer)"), "{error}");
        assert!(error.contains("limit 8 (pids.max of cgroup /cg/job): raise it (TasksMax"), "{error}");
        // Joins take fewer threads at a time.
        let (threads, checked) = of(&SystemLimits { cgroup_threads: cgroup(9), ..WIDE }, &many);
        assert!(threads.is_short() && checked.is_ok(), "{threads}");
        let error = of(&SystemLimits { user_threads: Some(8), ..WIDE }, &many).1.unwrap_err();
        assert!(error.contains("limit 8 (RLIMIT_NPROC): raise `ulimit -u`"), "{error}");
        // The smaller one is named.
        let both = |user, most| {
            of(&SystemLimits { user_threads: Some(user), cgroup_threads: cgroup(most), ..WIDE }, &many).0
        };
        assert_eq!((both(70, 60).limit, both(60, 70).limit), (Some(60), Some(60)));
        assert!(both(70, 60).origin.starts_with("pids.max") && both(60, 70).origin == "RLIMIT_NPROC");
    }
}
