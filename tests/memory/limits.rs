//! Regions in processes with limits. Each test runs itself again in a limited child process.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, io};
use tensorwire::internals::memory::{LockPolicy, PagePolicy, Region, RegionOptions};
use tensorwire::{PageKind, RegionError};

const CHILD: &str = "TENSORWIRE_TEST_CHILD";

/// Runs this test again in a child process, with `value` in the environment.
fn run_child(test: &str, value: &Path) {
    let program = env::current_exe().expect("own path");
    let child = Command::new(program).args(["--exact", test, "--nocapture"]).env(CHILD, value).output();
    let child = child.expect("child");
    let output = String::from_utf8_lossy(&child.stdout);
    print!("{output}{}", String::from_utf8_lossy(&child.stderr));
    assert!(child.status.success(), "the child failed: {}", child.status);
    assert!(output.contains("1 passed"), "the child ran no test");
}

fn plain(size: u64, lock: LockPolicy) -> Result<Region, RegionError> {
    Region::create(0, &RegionOptions { pages: PagePolicy::Plain, lock, ..RegionOptions::new(size) })
}

/// Sets the memlock limit of this process, and removes CAP_IPC_LOCK from this thread.
fn limit_locking(bytes: u64) -> io::Result<()> {
    let limit = Rlimit { current: Some(bytes), maximum: Some(bytes) };
    setrlimit(Resource::Memlock, limit)?;
    let mut sets = capabilities(None)?;
    sets.effective.remove(CapabilitySet::IPC_LOCK);
    set_capabilities(None, sets)?;
    Ok(())
}

/// The kernel ends a process with a larger file by SIGXFSZ.
#[test]
fn a_limit_of_file_size_that_is_too_small_is_an_error() {
    if env::var_os(CHILD).is_none() {
        return run_child("limits::a_limit_of_file_size_that_is_too_small_is_an_error", Path::new("yes"));
    }
    let maximum = getrlimit(Resource::Fsize).maximum;
    setrlimit(Resource::Fsize, Rlimit { current: Some(64 << 10), maximum }).expect("a lower limit");
    let error = plain(128 << 10, LockPolicy::No).expect_err("refused").to_string();
    let says = "128 KiB are needed, and the limit of file size is 64 KiB: raise `ulimit -f`";
    assert!(error.contains(says), "{error}");
    assert_eq!(plain(64 << 10, LockPolicy::No).expect("as much as permitted").len(), 64 << 10);
}

#[test]
fn a_memlock_limit_that_is_too_small_is_reported_or_refused_with_both_figures() {
    if env::var_os(CHILD).is_none() {
        let test = "limits::a_memlock_limit_that_is_too_small_is_reported_or_refused_with_both_figures";
        return run_child(test, Path::new("yes"));
    }
    limit_locking(64 << 10).expect("a lower limit");
    let error = plain(256 << 10, LockPolicy::Require).expect_err("refused").to_string();
    let expected = "memlock limit is 64 KiB, of which 0 B are in use, and the region needs 256 KiB";
    assert!(error.starts_with(expected) && error.ends_with("raise `ulimit -l`"), "{error}");

    let region = plain(256 << 10, LockPolicy::BestEffort).expect("region");
    let report = region.report();
    assert_eq!((report.locked_bytes, report.lock_limit), (64 << 10, Some(64 << 10)));
    let line = report.to_string();
    assert!(line.contains("64 KiB locked (`ulimit -l` is 64 KiB)"), "{line}");

    let error = plain(8 << 10, LockPolicy::Require).expect_err("nothing left").to_string();
    assert!(error.contains("of which 64 KiB are in use"), "{error}");
    drop(region);
    let region = plain(64 << 10, LockPolicy::Require).expect("as much as permitted");
    assert_eq!((region.report().locked_bytes, region.report().lock_limit), (64 << 10, None));
    let free = plain(64 << 10, LockPolicy::No).expect("region");
    assert_eq!((free.report().locked_bytes, free.report().lock_limit), (0, None));
}

/// A new memory cgroup with this limit below the own one, if this user may make one.
struct Group(PathBuf);

impl Group {
    fn new(limit: u64) -> Result<Group, String> {
        let own = fs::read_to_string("/proc/self/cgroup").map_err(|error| error.to_string())?;
        let path = |wanted: &str| {
            own.lines().find_map(|line| {
                let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
                controllers
                    .split(',')
                    .any(|name| name == wanted)
                    .then(|| path.trim_start_matches('/').to_owned())
            })
        };
        let (dir, limit_file) = match (path("memory"), path("")) {
            (Some(path), _) => (Path::new("/sys/fs/cgroup/memory").join(path), "memory.limit_in_bytes"),
            (None, Some(path)) => (Path::new("/sys/fs/cgroup").join(path), "memory.max"),
            (None, None) => return Err("this process is in no memory cgroup".into()),
        };
        let group = Group(dir.join(format!("tensorwire-test-{}", std::process::id())));
        let failed = |error: io::Error| format!("{}: {error}", group.0.display());
        fs::create_dir(&group.0).map_err(failed)?;
        fs::write(group.0.join(limit_file), limit.to_string()).map_err(failed)?;
        Ok(group)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // The child has ended, so the cgroup is empty. If it was never made, there is nothing to
        // remove.
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn a_cgroup_that_is_too_small_is_an_error_and_not_a_kill() {
    let Some(group) = env::var_os(CHILD) else {
        match Group::new(32 << 20) {
            Ok(group) => run_child("limits::a_cgroup_that_is_too_small_is_an_error_and_not_a_kill", &group.0),
            Err(why) => println!("skipped: no memory cgroup can be made: {why}"),
        }
        return;
    };
    fs::write(Path::new(&group).join("cgroup.procs"), std::process::id().to_string())
        .expect("joins the group");
    let error = plain(64 << 20, LockPolicy::No).expect_err("refused").to_string();
    assert!(error.starts_with("a region of 64 MiB needs more than the "), "{error}");
    assert!(error.contains("tensorwire-test-") && error.contains(" is 32 MiB, "), "{error}");
    let region = plain(16 << 20, LockPolicy::No).expect("fits");
    assert_eq!(region.report().size, 16 << 20);
    println!("{}", region.report());
}

#[test]
fn a_required_kind_of_pages_that_is_not_there_is_an_error_that_says_what_to_do() {
    let free = fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
    if !free.as_ref().is_ok_and(|free| free.trim() == "0") {
        return println!("skipped: free pages of 2 MiB: {free:?}");
    }
    let options = RegionOptions { pages: PagePolicy::TwoMiB, require: true, ..RegionOptions::new(5 << 20) };
    let error = Region::create(0, &options).expect_err("none are reserved");
    let text = error.to_string();
    assert!(matches!(error, RegionError::Pages { wanted: PageKind::TwoMiB, .. }), "{text}");
    assert!(text.contains("3 pages of 2 MiB are needed, 0 of "), "{text}");
    assert!(text.contains("> /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages` as root"), "{text}");

    let region = Region::create(0, &RegionOptions { require: false, ..options }).expect("lesser pages");
    assert_eq!(region.report().attempts[0].0, PageKind::TwoMiB);
    println!("{}", region.report());
}
