use super::region;
use crate::memory::region::peer::SEALS;
use crate::memory::{
    LockPolicy, NumaPolicy, PageKind, PagePolicy, PeerRegion, PeerRegionError, Region, RegionError,
    RegionOptions, verify_seals,
};
use rustix::fd::AsFd;
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap};
use std::path::Path;
use std::ptr::null_mut;

#[test]
fn a_region_is_rounded_up_to_whole_pages() {
    let region = region(5000);
    assert_eq!((region.len(), region.id(), region.report().size), (8192, 7, 8192));
    assert_eq!(region.report().page_size, 4096);
}

#[test]
fn a_peer_can_neither_map_it_for_writing_nor_write_to_it_nor_change_its_size() {
    let region = region(8192);
    let map = |protection| {
        // SAFETY: a new mapping at an address that the kernel chooses.
        unsafe { mmap(null_mut(), 8192, protection, MapFlags::SHARED, region.fd(), 0) }
    };
    assert_eq!(map(ProtFlags::READ | ProtFlags::WRITE).expect_err("sealed"), Errno::PERM);
    assert_eq!(rustix::io::pwrite(region.fd(), b"x", 0).expect_err("sealed"), Errno::PERM);
    assert_eq!(ftruncate(region.fd(), 4096).expect_err("sealed"), Errno::PERM);
    assert_eq!(ftruncate(region.fd(), 1 << 20).expect_err("sealed"), Errno::PERM);
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    assert_eq!(fallocate(region.fd(), hole, 0, 4096).expect_err("sealed"), Errno::PERM);
    let readable = map(ProtFlags::READ).expect("readable");
    // SAFETY: the mapping that was just made; nothing refers to it.
    let upgraded = unsafe { rustix::mm::mprotect(readable, 8192, rustix::mm::MprotectFlags::WRITE) };
    assert_eq!(upgraded.expect_err("sealed"), Errno::ACCESS);
    // SAFETY: as above.
    unsafe { rustix::mm::munmap(readable, 8192) }.expect("unmap");
}

#[test]
fn a_receiver_checks_seals_and_size_before_it_maps() {
    let region = region(8192);
    assert_eq!(verify_seals(region.fd(), 8192).expect("sealed"), 8192);
    let error = verify_seals(region.fd(), 8193).expect_err("too short");
    assert!(matches!(error, PeerRegionError::TooShort { size: 8192, claimed: 8193 }));
    let open = memfd_create("open", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).expect("memfd");
    ftruncate(&open, 8192).expect("size");
    assert!(matches!(verify_seals(&open, 1), Err(PeerRegionError::Seals { have: 0 })));
    assert!(matches!(PeerRegion::map(open, 8192), Err(PeerRegionError::Seals { .. })));
    let sparse = memfd_create("sparse", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).expect("memfd");
    ftruncate(&sparse, 1 << 50).expect("size");
    fcntl_add_seals(&sparse, SEALS).expect("sealed");
    let error = PeerRegion::map(sparse, 1 << 50).expect_err("beyond the address space");
    assert!(matches!(error, PeerRegionError::TooLarge { size, .. } if size == 1 << 50), "{error}");
    let (pipe, _) = rustix::pipe::pipe().expect("pipe");
    assert!(matches!(verify_seals(pipe.as_fd(), 1), Err(PeerRegionError::Seals { have: 0 })));
}

#[test]
fn a_peer_sees_what_is_written_here() {
    let region = region(4096);
    let peer = PeerRegion::map(rustix::io::dup(region.fd()).expect("dup"), 4096).expect("maps");
    // SAFETY: inside the region, which nobody else uses.
    unsafe { region.base().add(9).write_volatile(42) };
    let at = peer.bytes_at(9, 1).expect("inside");
    // SAFETY: inside the peer's mapping, which is alive.
    assert_eq!(unsafe { at.read_volatile() }, 42);
    assert_eq!((peer.bytes_at(4096, 1), peer.len()), (None, 4096));
}

#[test]
fn the_report_agrees_with_smaps() {
    let options = RegionOptions { pages: PagePolicy::Transparent, ..RegionOptions::new(4 << 20) };
    let region = Region::create(1, &options).expect("region");
    let report = region.report();
    let head = format!("{:x}-", region.base().as_ptr() as usize);
    let smaps = std::fs::read_to_string("/proc/self/smaps").expect("smaps");
    let own = smaps.lines().skip_while(|line| !line.starts_with(&head));
    let field = |name: &str| {
        let line = own.clone().skip(1).find_map(|line| line.strip_prefix(name)).expect("field");
        line.trim().trim_end_matches(" kB").parse::<u64>().expect("number") << 10
    };
    assert_eq!(report.size, field("Size:"));
    assert_eq!(report.page_size, field("KernelPageSize:"));
    assert_eq!(report.huge_bytes, field("ShmemPmdMapped:"));
    match report.pages {
        PageKind::Transparent => assert!(report.huge_bytes > 0 && report.attempts.is_empty()),
        PageKind::Plain => assert!(report.huge_bytes == 0 && report.attempts.len() == 1),
        other => panic!("{other} pages were not asked for"),
    }
}

#[test]
fn auto_reports_why_better_pages_are_not_available() {
    let region = Region::create(1, &RegionOptions::new(4096)).expect("region");
    let line = region.report().to_string();
    assert!(line.starts_with("4 KiB on plain pages, 0 B huge, "), "{line}");
    assert!(line.contains("; not on 2 MiB hugetlb pages: 4 KiB is less than one page"), "{line}");
    assert!(!line.contains('\n'));
    assert_eq!(region.report().attempts.len(), 3);
}

#[test]
fn sizes_out_of_range_are_refused() {
    for size in [0, u64::MAX, (1 << 46) + 1] {
        let error = Region::create(0, &RegionOptions::new(size)).expect_err("refused");
        assert!(matches!(error, RegionError::Size { .. }));
    }
}

#[test]
fn a_region_larger_than_the_machine_is_refused_with_the_numbers() {
    let options = RegionOptions { pages: PagePolicy::Plain, ..RegionOptions::new(1 << 45) };
    let error = Region::create(0, &options).expect_err("32 TiB");
    let text = error.to_string();
    assert!(matches!(error, RegionError::Memory { .. }), "{text}");
    assert!(text.starts_with("a region of 32 TiB needs more than the "), "{text}");
}

#[test]
fn a_too_small_cgroup_is_an_error_with_numbers_instead_of_a_kill() {
    let read = |path: &Path| {
        let text = match path.to_str()? {
            "/proc/self/cgroup" => "0::/job",
            "/proc/self/mountinfo" => "30 23 0:26 / /cg rw - cgroup2 cgroup2 rw",
            "/cg/job/memory.max" => "1048576",
            "/cg/job/memory.current" => "524288",
            _ => return None,
        };
        Some(text.to_owned())
    };
    let error = Region::create_with(0, &RegionOptions::new(1 << 20), &read).expect_err("512 KiB are left");
    assert_eq!(
        error.to_string(),
        "a region of 1 MiB needs more than the 512 KiB that are left: the limit of cgroup /cg/job \
         (memory.max) is 1 MiB, 512 KiB used; make the pool smaller or raise the limit"
    );
    Region::create_with(0, &RegionOptions::new(512 << 10), &read).expect("just enough");
}

#[test]
fn a_missing_numa_node_is_refused_by_number() {
    let options = RegionOptions { numa: NumaPolicy::Bind(999), ..RegionOptions::new(4096) };
    let error = Region::create(0, &options).expect_err("no such node");
    assert!(error.to_string().starts_with("binding a region to NUMA node 999 failed"), "{error}");
}

/// The memory policy of a region's pages and the nodes that they are on, as the kernel shows them.
fn numa_line(region: &Region) -> Option<String> {
    let start = format!("{:x} ", region.base().as_ptr() as usize);
    let maps = std::fs::read_to_string("/proc/self/numa_maps").ok()?;
    maps.lines().find(|line| line.starts_with(&start)).map(str::to_owned)
}

fn preferring(node: u32) -> Region {
    let lock = LockPolicy::No;
    let options = RegionOptions { numa: NumaPolicy::Prefer(node), lock, ..RegionOptions::new(8192) };
    Region::create(0, &options).expect("a preference is no condition")
}

#[test]
fn a_node_that_is_preferred_supplies_the_pages() {
    let region = preferring(0);
    match &region.report().numa_shortfall {
        Some(why) => println!("skipped: {why}"),
        None => {
            assert_eq!(region.report().numa_node, Some(0));
            if let Some(line) = numa_line(&region) {
                assert!(line.contains(" prefer:0 "), "{line}");
            }
        }
    }
}

#[test]
fn a_node_that_is_preferred_and_missing_is_reported() {
    let region = preferring(999);
    let why = region.report().numa_shortfall.clone().expect("no such node");
    assert!(why.starts_with("NUMA node 999: mbind failed: "), "{why}");
    assert!(region.report().to_string().contains(&format!("; not on {why}")), "{}", region.report());
}

#[test]
fn a_memory_policy_of_the_process_is_stronger_than_a_preference() {
    // The policy of a thread ends with it.
    let test = || {
        let node_0 = [1 as libc::c_ulong];
        // SAFETY: a mask of 64 bits, which lives until the call returns.
        let set = unsafe { libc::syscall(libc::SYS_set_mempolicy, libc::MPOL_BIND, node_0.as_ptr(), 64) };
        if set != 0 {
            return println!("skipped: set_mempolicy: {}", std::io::Error::last_os_error());
        }
        let region = preferring(999);
        let why = region.report().numa_shortfall.clone().expect("not preferred");
        assert!(why.contains("the memory policy of this process"), "{why}");
        assert_eq!(preferring(0).report().numa_shortfall, None, "its pages are there all the same");
    };
    std::thread::spawn(test).join().expect("no panic");
}

#[test]
fn a_region_is_on_the_node_that_was_asked_for() {
    let options =
        RegionOptions { numa: NumaPolicy::Bind(0), lock: LockPolicy::No, ..RegionOptions::new(8192) };
    match Region::create(0, &options) {
        Ok(region) => assert_eq!(region.report().numa_node, Some(0)),
        Err(error) => println!("skipped: {error}"),
    }
}
