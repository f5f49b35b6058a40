//! Regions of which only parts are relocated.

use super::{bytes, region};
use crate::memory::region::peer::map_over;
use crate::memory::{PeerRegion, PeerRegionError, Pool, PoolOptions, in_a_child};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::mm::munmap;
use std::ffi::c_void;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const LEN: u64 = 4 << 20;
const PARTS: [(u64, u64); 3] = [(100, 8), (8192, 70_000), (LEN - 64, 64)];

/// A region whose bytes depend on their offset, mapped as a peer would. Its maker is gone.
fn dead_peer_region() -> PeerRegion {
    let options = PoolOptions { poison: false, ..PoolOptions::default() };
    let pool = Pool::new(region(LEN), options).expect("pool");
    let mut all = pool.tensor(bytes(LEN)).expect("room");
    all.bytes_mut().iter_mut().zip(0..).for_each(|(byte, at)| *byte = value(at));
    PeerRegion::map(rustix::io::dup(pool.region().fd()).expect("dup"), LEN).expect("maps")
}

fn value(at: u64) -> u8 {
    (at % 251) as u8
}

fn part(region: &PeerRegion, (offset, len): (u64, u64)) -> &[u8] {
    let start = region.bytes_at(offset, len).expect("inside");
    // SAFETY: inside the mapping, which lives as long as the slice; nobody writes to it.
    unsafe { std::slice::from_raw_parts(start, len as usize) }
}

fn is_right(region: &PeerRegion, (offset, len): (u64, u64)) -> bool {
    part(region, (offset, len)).iter().zip(offset..).all(|(byte, at)| *byte == value(at))
}

/// The name of the region's mapping, and its resident bytes, from `/proc/self/smaps`.
fn mapping(region: &PeerRegion) -> (String, u64) {
    let start = region.bytes_at(0, 1).expect("inside").addr();
    let smaps = std::fs::read_to_string("/proc/self/smaps").expect("smaps");
    let mut lines = smaps.lines().skip_while(|line| !line.starts_with(&format!("{start:x}-")));
    let name = lines.next().expect("it is mapped").rsplit('/').next().unwrap_or_default().to_owned();
    let rss = lines.find_map(|line| line.strip_prefix("Rss:")).expect("Rss");
    (name, rss.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10)
}

#[test]
fn relocated_parts_read_the_same_throughout_and_the_rest_takes_no_memory() {
    let region = dead_peer_region();
    let (over, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for which in PARTS {
            let (region, over, rounds) = (&region, &over, &rounds);
            scope.spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    assert!(is_right(region, which), "{which:?} has changed");
                    rounds.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        // More than one round: a relocated region can be relocated again, as after a failure.
        for attempt in 1..=20 {
            while rounds.load(Ordering::Relaxed) < attempt * 10 {
                std::thread::yield_now();
            }
            // SAFETY: its maker is gone; nothing but the parts is read.
            unsafe { region.relocate(&PARTS) }.expect("room");
        }
        over.store(true, Ordering::Relaxed);
    });
    let (name, resident) = mapping(&region);
    assert!(name.starts_with("memfd:tensorwire-relocated"), "{name}");
    let needed = PARTS.iter().map(|(_, len)| len.next_multiple_of(4096) + 4096).sum::<u64>();
    assert!(resident <= needed, "{resident} bytes are in memory for {needed}");
    assert!(PARTS.iter().all(|which| is_right(&region, *which)));
}

#[test]
fn bytes_borrowed_twice_are_relocated_once() {
    let twice =
        vec![(8192, 70_000), (100, 8), (9000, 10), (8192, 70_000), (LEN - 64, 64), (50, 0), (4000, 90)];
    let (parts, bytes) = crate::memory::merge_spans(twice.clone());
    // The third span and the last one touch a common page, with a gap between them.
    assert_eq!(parts, [(100, 3990), (8192, 70_000), (LEN - 64, 64)]);
    assert_eq!(bytes, 8 + 90 + 70_000 + 64, "each byte once, and nothing between them");
    // 100 kB suffice for each byte once: 76 KiB, and two times 8 KiB.
    let scarce = |path: &Path| {
        path.ends_with("meminfo").then(|| "MemTotal: 200 kB\nMemAvailable:        100 kB\n".to_owned())
    };
    let region = dead_peer_region();
    // SAFETY: as above.
    unsafe { region.relocate_with(&parts, &scarce, map_over) }.expect("there is room for each byte once");
    assert!(twice.iter().all(|which| is_right(&region, *which)));
    // SAFETY: as above; it must be refused.
    unsafe { region.relocate_with(&twice, &scarce, map_over) }.expect_err("not for some of them twice");
}

#[test]
fn without_memory_for_the_copy_nothing_changes() {
    let region = dead_peer_region();
    let (before, _) = mapping(&region);
    let poor = |path: &Path| {
        path.ends_with("meminfo").then(|| "MemTotal: 100 kB\nMemAvailable:        64 kB\n".to_owned())
    };
    // SAFETY: as above.
    let error = unsafe { region.relocate_with(&PARTS, &poor, map_over) }.expect_err("64 KiB");
    let text = error.to_string();
    assert!(text.starts_with("copying the borrowed parts of the peer's region of 4 MiB failed"), "{text}");
    assert!(text.contains("64 KiB"), "{text}");
    // SAFETY: as above; it must be refused.
    let error = unsafe { region.relocate(&[(LEN - 1, 2)]) }.expect_err("not inside");
    assert!(matches!(error, PeerRegionError::Os { .. }));
    assert_eq!(mapping(&region).0, before);
    assert!(is_right(&region, (0, LEN)));
}

/// No limits are visible.
fn rich(_: &Path) -> Option<String> {
    None
}

#[test]
fn a_failed_replacement_leaves_the_old_mapping() {
    let region = dead_peer_region();
    let (before, _) = mapping(&region);
    // SAFETY: as above.
    let error = unsafe { region.relocate_with(&PARTS, &rich, |_, _, _| Err(Errno::NOMEM)) };
    let text = error.expect_err("it failed").to_string();
    assert!(text.starts_with("replacing the mapping of the peer's region of 4 MiB failed"), "{text}");
    assert_eq!(mapping(&region).0, before);
    assert!(is_right(&region, (0, LEN)));
    // SAFETY: as above.
    unsafe { region.relocate(&PARTS) }.expect("room the next time");
    assert!(PARTS.iter().all(|which| is_right(&region, *which)));
}

#[test]
fn a_removed_old_mapping_is_filled_with_the_new_one() {
    unsafe fn unmap(base: *mut c_void, len: usize, _: &OwnedFd) -> Result<(), Errno> {
        // SAFETY: the region's mapping, which nobody reads before there is another.
        unsafe { munmap(base, len) }.expect("unmapped");
        Err(Errno::NOMEM)
    }
    let region = dead_peer_region();
    // In a process of one thread, where no other mapping can appear there.
    let is_filled = in_a_child(|| {
        // SAFETY: as above.
        unsafe { region.relocate_with(&PARTS, &rich, unmap) }.expect("room the second time");
        mapping(&region).0.starts_with("memfd:tensorwire-relocated")
            && PARTS.iter().all(|which| is_right(&region, *which))
    });
    assert!(is_filled && is_right(&region, (0, LEN)));
}
