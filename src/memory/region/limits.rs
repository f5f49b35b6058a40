//! How much memory this process may still take: the limits of its cgroups, and the free memory of
//! the machine. Also limits of cgroups as they are.
//!
//! The kernel kills a process that exceeds its cgroup's limit, without an error. Regions check
//! first.

use crate::memory::byte_count::ByteCount;
use std::path::{Path, PathBuf};

/// The memory that one limit leaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Headroom {
    /// Bytes that can still be taken.
    pub(crate) available: u64,
    /// The limit, with its numbers, for an error.
    pub(crate) limit: String,
}

/// Reads a file of `/proc` or of a cgroup file system; `None` if it is not there.
pub(crate) type ReadFile<'a> = &'a dyn Fn(&Path) -> Option<String>;

/// The headroom of the tightest visible limit; `None` if no limit is visible.
pub(crate) fn tightest(read: ReadFile<'_>) -> Option<Headroom> {
    let cgroups = CgroupLimit::MEMORY.dirs(read).into_iter();
    let cgroups = cgroups.filter_map(|(version, dir)| version.headroom(read, &dir));
    cgroups.chain(machine(read)).min_by_key(|room| room.available)
}

fn machine(read: ReadFile<'_>) -> Option<Headroom> {
    let meminfo = read(Path::new("/proc/meminfo"))?;
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let available = line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10;
    Some(Headroom { available, limit: format!("the machine has {} left", ByteCount(available)) })
}

/// A limit that cgroups have: its controller, and its file in versions 1 and 2.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CgroupLimit {
    controller: &'static str,
    files: [&'static str; 2],
}

impl CgroupLimit {
    pub(crate) const MEMORY: Self =
        CgroupLimit { controller: "memory", files: ["memory.limit_in_bytes", "memory.max"] };

    /// Of processes and threads.
    pub(crate) const PIDS: Self = CgroupLimit { controller: "pids", files: ["pids.max"; 2] };

    /// The smallest one of this process's cgroup and its ancestors, and whose it is; `None` if none
    /// is visible.
    pub(crate) fn smallest(self, read: ReadFile<'_>) -> Option<(u64, String)> {
        let dirs = self.dirs(read).into_iter();
        let limits = dirs.filter_map(|(version, dir)| Some((self.read(version, read, &dir)?, version, dir)));
        let (limit, version, dir) = limits.min_by_key(|(limit, ..)| *limit)?;
        Some((limit, format!("{} of cgroup {}", self.file(version), dir.display())))
    }

    const fn file(self, version: CgroupVersion) -> &'static str {
        self.files[version as usize]
    }

    fn read(self, version: CgroupVersion, read: ReadFile<'_>, dir: &Path) -> Option<u64> {
        let limit = number(read, &dir.join(self.file(version)))?;
        // No limit is "max", and for memory a number near 2^63 in version 1.
        Some(limit).filter(|limit| *limit < 1 << 62)
    }

    /// The mounted directories of this process's cgroup and its ancestors.
    fn dirs(self, read: ReadFile<'_>) -> Vec<(CgroupVersion, PathBuf)> {
        let groups = read(Path::new("/proc/self/cgroup")).unwrap_or_default();
        let mounts = read(Path::new("/proc/self/mountinfo")).unwrap_or_default();
        let mut dirs = Vec::new();
        for (version, path) in groups.lines().filter_map(|line| group(line, self.controller)) {
            for mount in mounts.lines().filter_map(|line| Mount::parse(line, version, self.controller)) {
                dirs.extend(mount.dirs_of(path).into_iter().map(|dir| (version, dir)));
            }
        }
        dirs
    }
}

fn number(read: ReadFile<'_>, path: &Path) -> Option<u64> {
    read(path)?.trim().parse().ok()
}

/// The two file layouts of a controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CgroupVersion {
    V1,
    V2,
}

impl CgroupVersion {
    const fn usage_file(self) -> &'static str {
        match self {
            CgroupVersion::V1 => "memory.usage_in_bytes",
            CgroupVersion::V2 => "memory.current",
        }
    }

    /// Counters of file pages, which the kernel drops before it refuses memory.
    const fn reclaimable(self) -> [&'static str; 2] {
        match self {
            CgroupVersion::V1 => ["total_inactive_file", "total_active_file"],
            CgroupVersion::V2 => ["inactive_file", "active_file"],
        }
    }

    fn headroom(self, read: ReadFile<'_>, dir: &Path) -> Option<Headroom> {
        let limit = CgroupLimit::MEMORY.read(self, read, dir)?;
        let used = number(read, &dir.join(self.usage_file()))?;
        let used = used.saturating_sub(self.reclaimable_bytes(read, dir));
        let text = format!(
            "the limit of cgroup {} ({}) is {}, {} used",
            dir.display(),
            CgroupLimit::MEMORY.file(self),
            ByteCount(limit),
            ByteCount(used)
        );
        Some(Headroom { available: limit.saturating_sub(used), limit: text })
    }

    fn reclaimable_bytes(self, read: ReadFile<'_>, dir: &Path) -> u64 {
        let stat = read(&dir.join("memory.stat")).unwrap_or_default();
        let counter = |line: &str| {
            let (name, value) = line.split_once(' ')?;
            if self.reclaimable().contains(&name) { value.trim().parse::<u64>().ok() } else { None }
        };
        stat.lines().filter_map(counter).sum()
    }
}

/// Parses a line of `/proc/self/cgroup`: `id:controllers:path`. Version 2 has no controllers.
fn group<'a>(line: &'a str, controller: &str) -> Option<(CgroupVersion, &'a str)> {
    let mut fields = line.splitn(3, ':').skip(1);
    let (controllers, path) = (fields.next()?, fields.next()?);
    if controllers.is_empty() {
        return Some((CgroupVersion::V2, path));
    }
    controllers.split(',').any(|name| name == controller).then_some((CgroupVersion::V1, path))
}

/// The mount point of a cgroup file system, and the part of it that is mounted there.
struct Mount {
    root: String,
    at: PathBuf,
}

impl Mount {
    /// Parses a line of `/proc/self/mountinfo`. `None` if it is not the controller's file system.
    fn parse(line: &str, version: CgroupVersion, controller: &str) -> Option<Mount> {
        let (place, kind) = line.split_once(" - ")?;
        let mut kind = kind.split(' ');
        let (file_system, options) = (kind.next()?, kind.nth(1).unwrap_or(""));
        let fits = match version {
            CgroupVersion::V1 => {
                file_system == "cgroup" && options.split(',').any(|option| option == controller)
            }
            CgroupVersion::V2 => file_system == "cgroup2",
        };
        let mut place = place.split(' ').skip(3);
        let (root, at) = (place.next()?, place.next()?);
        fits.then(|| Mount { root: root.to_owned(), at: PathBuf::from(at) })
    }

    /// The directories of a cgroup and its ancestors, innermost first.
    fn dirs_of(&self, path: &str) -> Vec<PathBuf> {
        // A container may see only its own part of the tree, mounted as the root.
        let inside = Path::new(path).strip_prefix(&self.root).unwrap_or(Path::new(""));
        let inside = if path.contains("..") { Path::new("") } else { inside };
        let innermost = self.at.join(inside);
        innermost.ancestors().take_while(|dir| dir.starts_with(&self.at)).map(Path::to_path_buf).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn with_files<T>(files: &[(&str, &str)], look: impl FnOnce(ReadFile<'_>) -> T) -> T {
        let files: HashMap<_, _> = files.iter().copied().collect();
        look(&|path: &Path| files.get(path.to_str()?).map(|text| (*text).to_owned()))
    }

    fn tightest_of(files: &[(&str, &str)]) -> Option<Headroom> {
        with_files(files, tightest)
    }

    fn memory_max(files: &[(&str, &str)]) -> Option<(u64, String)> {
        with_files(files, |read| CgroupLimit::MEMORY.smallest(read))
    }

    const V2_MOUNT: &str = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n";
    const V1_MOUNT: &str = "31 24 0:27 / /cg/cpu rw - cgroup cgroup rw,cpu\n\
                            32 24 0:28 /docker/x /cg/memory rw - cgroup cgroup rw,memory\n";

    #[test]
    fn the_limit_of_an_ancestor_counts_in_version_2() {
        let room = tightest_of(&[
            ("/proc/self/cgroup", "0::/a/b\n"),
            ("/proc/self/mountinfo", V2_MOUNT),
            ("/proc/meminfo", "MemTotal: 9 kB\nMemAvailable:    4096 kB\n"),
            ("/sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("/sys/fs/cgroup/a/b/memory.current", "100\n"),
            ("/sys/fs/cgroup/a/memory.max", "2097152\n"),
            ("/sys/fs/cgroup/a/memory.current", "1572864\n"),
        ])
        .expect("a limit");
        assert_eq!(room.available, 512 << 10);
        assert!(
            room.limit.contains("/sys/fs/cgroup/a (memory.max) is 2 MiB, 1.5 MiB used"),
            "{}",
            room.limit
        );
    }

    #[test]
    fn the_smallest_limit_up_to_the_root_counts_whatever_is_used() {
        let of = |own: &str, parent: &str| {
            memory_max(&[
                ("/proc/self/cgroup", "0::/a/b\n"),
                ("/proc/self/mountinfo", V2_MOUNT),
                ("/proc/meminfo", "MemAvailable: 1 kB\n"),
                ("/sys/fs/cgroup/a/b/memory.max", own),
                ("/sys/fs/cgroup/a/memory.max", parent),
            ])
        };
        let of_a = |limit| Some((limit, "memory.max of cgroup /sys/fs/cgroup/a".to_owned()));
        assert_eq!(of("max\n", "2097152\n"), of_a(2 << 20));
        assert_eq!(of("4194304\n", "2097152\n"), of_a(2 << 20));
        assert_eq!(of("4096\n", "2097152\n").map(|(limit, _)| limit), Some(4096));
        assert_eq!(of("max\n", "max\n"), None);
        assert_eq!(memory_max(&[]), None);
    }

    #[test]
    fn version_1_is_read_through_a_containers_mount() {
        let files = [
            ("/proc/self/cgroup", "5:cpu:/\n4:cpuset,memory:/docker/x/in\n0::/\n"),
            ("/proc/self/mountinfo", V1_MOUNT),
            ("/cg/memory/in/memory.limit_in_bytes", "9223372036854771712"),
            ("/cg/memory/in/memory.usage_in_bytes", "7"),
            ("/cg/memory/memory.limit_in_bytes", "1000"),
            ("/cg/memory/memory.usage_in_bytes", "900"),
            ("/cg/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 300\ntotal_active_file 100\n"),
        ];
        let room = tightest_of(&files).expect("a limit");
        assert_eq!(room.available, 500, "file pages can be dropped");
        let limit = Some((1000, "memory.limit_in_bytes of cgroup /cg/memory".to_owned()));
        assert_eq!(memory_max(&files), limit);
    }

    #[test]
    fn each_controller_of_version_1_has_its_own_cgroup() {
        let files = [
            ("/proc/self/cgroup", "5:pids:/a\n4:memory:/b\n0::/\n"),
            (
                "/proc/self/mountinfo",
                "31 24 0:27 / /cg/pids rw - cgroup cgroup rw,pids\n\
                 32 24 0:28 / /cg/memory rw - cgroup cgroup rw,memory\n",
            ),
            ("/cg/pids/a/pids.max", "100\n"),
            ("/cg/pids/b/pids.max", "7\n"),
            ("/cg/memory/a/pids.max", "8\n"),
        ];
        let limit = with_files(&files, |read| CgroupLimit::PIDS.smallest(read));
        assert_eq!(limit, Some((100, "pids.max of cgroup /cg/pids/a".to_owned())));
    }

    #[test]
    fn without_cgroups_the_machine_is_the_limit() {
        let room = tightest_of(&[("/proc/meminfo", "MemAvailable: 1024 kB\n")]).expect("a limit");
        assert_eq!(room, Headroom { available: 1 << 20, limit: "the machine has 1 MiB left".into() });
        assert_eq!(tightest_of(&[]), None);
    }

    #[test]
    fn malformed_limit_files_are_no_limit() {
        let files = [
            ("/proc/self/cgroup", "::\nx\n0::/../.."),
            ("/proc/self/mountinfo", "- -\n"),
            ("/proc/meminfo", "\n"),
        ];
        assert_eq!(tightest_of(&files), None);
    }
}
