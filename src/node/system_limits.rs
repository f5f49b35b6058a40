//! The limits of this process, as the system has them.

use crate::memory::{CgroupLimit, ReadFile};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use std::path::Path;

/// The capability that lifts the limit of locked memory (CAP_IPC_LOCK).
const IPC_LOCK: u32 = 14;
/// Those that lift the limit of the user's threads (CAP_SYS_ADMIN, CAP_SYS_RESOURCE).
const MANY_THREADS: [u32; 2] = [21, 24];

/// Where the kernel lists RDMA devices.
const DEVICES: &str = "/sys/class/infiniband";

/// The limits of a process, and what it takes already.
#[derive(Clone, Debug)]
pub(super) struct SystemLimits {
    /// Descriptors that are open.
    pub open: u64,
    /// Bytes of address space that are mapped.
    pub mapped: u64,
    /// Threads of this process that run.
    pub running: u64,
    pub files: Option<u64>,
    pub locked: Option<u64>,
    /// Threads of all processes of the user.
    pub user_threads: Option<u64>,
    /// Threads of all processes of the cgroup: the smallest limit, and where it is.
    pub cgroup_threads: Option<(u64, String)>,
    pub maps: Option<u64>,
    /// Ports that the kernel gives to sockets which name none.
    pub ports: Option<u64>,
    /// Memory of the host that is available.
    pub memory: Option<u64>,
    pub address_space: Option<u64>,
    /// Bytes of a file, also of one in memory.
    pub file_size: Option<u64>,
    /// The smallest one of the cgroups, and where it is.
    pub cgroup_memory: Option<(u64, String)>,
    /// Whether the kernel lists an RDMA device.
    pub has_device: bool,
}

/// Whether the kernel lists an RDMA device.
pub(super) fn has_rdma_device() -> bool {
    std::fs::read_dir(DEVICES).is_ok_and(|mut devices| devices.next().is_some())
}

impl SystemLimits {
    pub fn of_this_process() -> Self {
        let of_files = Self::of_files(&|path| std::fs::read_to_string(path).ok());
        let open = match std::fs::read_dir("/proc/self/fd") {
            // Less the one of the folder that is read.
            Ok(open) => open.count().saturating_sub(1) as u64,
            // Each number below the limit is taken.
            Err(error) if Errno::from_io_error(&error) == Some(Errno::MFILE) => of_files.files.unwrap_or(0),
            Err(_) => 0,
        };
        SystemLimits { open, has_device: has_rdma_device(), ..of_files }
    }

    /// The same without the open descriptors and devices; `read` reads the files of the system.
    fn of_files(read: ReadFile<'_>) -> Self {
        let text = |path: &str| read(Path::new(path)).unwrap_or_default();
        let status = text("/proc/self/status");
        let capabilities = field(&status, "CapEff:");
        let capabilities = capabilities.and_then(|text| u64::from_str_radix(text, 16).ok()).unwrap_or(0);
        let has = |capability: u32| capabilities >> capability & 1 == 1;
        // The kernel does not bind the user root either.
        let is_root = field(&status, "Uid:").is_some_and(|ids| ids.split_whitespace().next() == Some("0"));
        let is_unbound = is_root || MANY_THREADS.into_iter().any(has);
        SystemLimits {
            open: 0,
            mapped: kib(&status, "VmSize:").unwrap_or(0),
            running: field(&status, "Threads:").and_then(|count| count.parse().ok()).unwrap_or(1),
            files: getrlimit(Resource::Nofile).current,
            locked: getrlimit(Resource::Memlock).current.filter(|_| !has(IPC_LOCK)),
            user_threads: getrlimit(Resource::Nproc).current.filter(|_| !is_unbound),
            cgroup_threads: CgroupLimit::PIDS.smallest(read),
            maps: text("/proc/sys/vm/max_map_count").trim().parse().ok(),
            ports: range(&text("/proc/sys/net/ipv4/ip_local_port_range")),
            memory: kib(&text("/proc/meminfo"), "MemAvailable:"),
            address_space: getrlimit(Resource::As).current,
            file_size: getrlimit(Resource::Fsize).current,
            cgroup_memory: CgroupLimit::MEMORY.smallest(read),
            has_device: false,
        }
    }
}

/// A field of a file of `/proc`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

/// The size of a range of which a file has the first and the last number.
fn range(text: &str) -> Option<u64> {
    let mut ends = text.split_whitespace().map(|end| end.parse::<u64>().ok());
    let (first, last) = (ends.next()??, ends.next()??);
    (last.checked_sub(first)?).checked_add(1)
}

/// A field that is in KiB, in bytes.
fn kib(text: &str, name: &str) -> Option<u64> {
    field(text, name)?.strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read_from_the_files_of_the_system() {
        let root = std::env::temp_dir().join(format!("tensorwire-limits-{}", std::process::id()));
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("proc/self/status", "Name:\tx\nVmSize:\t    2048 kB\nThreads:\t3\nCapEff:\t0000000000004000\n");
        write("proc/meminfo", "MemTotal: 9 kB\nMemAvailable:   1024 kB\n");
        write("proc/sys/vm/max_map_count", "65530\n");
        write("proc/sys/net/ipv4/ip_local_port_range", "32768\t60999\n");
        write("proc/self/cgroup", "0::/job/member\n");
        write("proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
        write("sys/fs/cgroup/job/memory.max", "1048576\n");
        write("sys/fs/cgroup/job/member/memory.max", "max\n");
        write("sys/fs/cgroup/job/member/pids.max", "512\n");
        let under_root = |path: &Path| std::fs::read_to_string(root.join(path.strip_prefix("/").ok()?)).ok();
        let limits = SystemLimits::of_files(&under_root);
        assert_eq!((limits.mapped, limits.memory, limits.maps), (2 << 20, Some(1 << 20), Some(65_530)));
        assert_eq!(limits.ports, Some(28_232));
        assert_eq!((limits.locked, limits.running), (None, 3), "CAP_IPC_LOCK");
        let limit = "memory.max of cgroup /sys/fs/cgroup/job".to_owned();
        assert_eq!(limits.cgroup_memory, Some((1 << 20, limit)));
        let limit = "pids.max of cgroup /sys/fs/cgroup/job/member".to_owned();
        assert_eq!(limits.cgroup_threads, Some((512, limit)));
        write("sys/fs/cgroup/job/memory.max", "max\n");
        assert_eq!(SystemLimits::of_files(&under_root).cgroup_memory, None);
        std::fs::remove_dir_all(&root).unwrap();
        let limits = SystemLimits::of_files(&under_root);
        assert_eq!((limits.cgroup_memory, limits.memory, limits.mapped), (None, None, 0));
    }

    #[test]
    fn the_limit_of_the_users_threads_does_not_bind_the_privileged() {
        let of = |uid: &str, capabilities: &str| {
            let status = format!("Uid:\t{uid}\t7\t7\t7\nCapEff:\t{capabilities}\n");
            let read = |path: &Path| (path == Path::new("/proc/self/status")).then(|| status.clone());
            SystemLimits::of_files(&read).user_threads
        };
        let limit = getrlimit(Resource::Nproc).current;
        assert_eq!(of("1000", "0000000000004000"), limit);
        for (uid, capabilities) in [("0", "0"), ("1000", "0000000001000000"), ("1000", "0000000000200000")] {
            assert_eq!(of(uid, capabilities), None, "{uid} {capabilities}");
        }
    }
}
