//! How much memory this process may still take: the limits of its cgroups, and the free memory of
//! the machine.
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
    let cgroups = cgroup_dirs(read).into_iter().filter_map(|(version, dir)| version.headroom(read, &dir));
    cgroups.chain(machine(read)).min_by_key(|room| room.available)
}

fn machine(read: ReadFile<'_>) -> Option<Headroom> {
    let meminfo = read(Path::new("/proc/meminfo"))?;
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let available = line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10;
    Some(Headroom { available, limit: format!("the machine has {} left", ByteCount(available)) })
}

/// The two file layouts of the memory controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CgroupVersion {
    V1,
    V2,
}

impl CgroupVersion {
    const fn files(self) -> (&'static str, &'static str) {
        match self {
            CgroupVersion::V1 => ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            CgroupVersion::V2 => ("memory.max", "memory.current"),
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
        let number = |name: &str| read(&dir.join(name))?.trim().parse::<u64>().ok();
        let (limit_file, usage_file) = self.files();
        // No limit is "max" in version 2, and a number near 2^63 in version 1.
        let limit = number(limit_file).filter(|limit| *limit < 1 << 62)?;
        let used = number(usage_file)?.saturating_sub(self.reclaimable_bytes(read, dir));
        let text = format!(
            "the limit of cgroup {} ({limit_file}) is {}, {} used",
            dir.display(),
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

/// The mounted directories of this process's memory cgroup and its ancestors.
fn cgroup_dirs(read: ReadFile<'_>) -> Vec<(CgroupVersion, PathBuf)> {
    let groups = read(Path::new("/proc/self/cgroup")).unwrap_or_default();
    let mounts = read(Path::new("/proc/self/mountinfo")).unwrap_or_default();
    let mut dirs = Vec::new();
    for (version, path) in groups.lines().filter_map(group) {
        for mount in mounts.lines().filter_map(|line| Mount::parse(line, version)) {
            dirs.extend(mount.dirs_of(path).into_iter().map(|dir| (version, dir)));
        }
    }
    dirs
}

/// Parses a line of `/proc/self/cgroup`: `id:controllers:path`. Version 2 has no controllers.
fn group(line: &str) -> Option<(CgroupVersion, &str)> {
    let mut fields = line.splitn(3, ':').skip(1);
    let (controllers, path) = (fields.next()?, fields.next()?);
    if controllers.is_empty() {
        return Some((CgroupVersion::V2, path));
    }
    controllers.split(',').any(|name| name == "memory").then_some((CgroupVersion::V1, path))
}

/// The mount point of a cgroup file system, and the part of it that is mounted there.
struct Mount {
    root: String,
    at: PathBuf,
}

impl Mount {
    /// Parses a line of `/proc/self/mountinfo`. `None` if it is not the memory controller's file
    /// system.
    fn parse(line: &str, version: CgroupVersion) -> Option<Mount> {
        let (place, kind) = line.split_once(" - ")?;
        let mut kind = kind.split(' ');
        let (file_system, options) = (kind.next()?, kind.nth(1).unwrap_or(""));
        let fits = match version {
            CgroupVersion::V1 => {
                file_system == "cgroup" && options.split(',').any(|option| option == "memory")
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

    fn tightest_of(files: &[(&str, &str)]) -> Option<Headroom> {
        let files: HashMap<_, _> = files.iter().copied().collect();
        tightest(&|path: &Path| files.get(path.to_str()?).map(|text| (*text).to_owned()))
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
    fn version_1_is_read_through_a_containers_mount() {
        let room = tightest_of(&[
            ("/proc/self/cgroup", "5:cpu:/\n4:cpuset,memory:/docker/x/in\n0::/\n"),
            ("/proc/self/mountinfo", V1_MOUNT),
            ("/cg/memory/in/memory.limit_in_bytes", "9223372036854771712"),
            ("/cg/memory/in/memory.usage_in_bytes", "7"),
            ("/cg/memory/memory.limit_in_bytes", "1000"),
            ("/cg/memory/memory.usage_in_bytes", "900"),
            ("/cg/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 300\ntotal_active_file 100\n"),
        ])
        .expect("a limit");
        assert_eq!(room.available, 500, "file pages can be dropped");
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
