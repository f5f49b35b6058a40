//! Locks a region's pages in memory, as far as the process may.

use super::mapping::RegionMapping;
use super::{LockPolicy, RegionError};
use rustix::process::{Resource, getrlimit};
use std::fs;

/// The limit in bytes that left a part of a region unlocked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shortfall {
    pub(crate) limit: u64,
}

/// Locks the pages as `policy` says. Returns the shortfall if the limit is less than the region.
///
/// A part is locked in whole granules, so that no huge page is split.
pub(crate) fn lock(
    mapping: &RegionMapping,
    policy: LockPolicy,
    granule: u64,
) -> Result<Option<Shortfall>, RegionError> {
    if policy == LockPolicy::No {
        return Ok(None);
    }
    let Err(source) = mapping.lock(mapping.len()) else { return Ok(None) };
    let size = mapping.len() as u64;
    let limit = getrlimit(Resource::Memlock).current.unwrap_or(u64::MAX);
    let locked = locked_by_process();
    if policy == LockPolicy::Require {
        return Err(RegionError::Lock { size, limit, locked, source: source.into() });
    }
    let part = limit.saturating_sub(locked) / granule * granule;
    if part > 0 {
        // Best effort: if another thread used the limit up meanwhile, the report says so.
        let _ = mapping.lock(part.min(size) as usize);
    }
    Ok(Some(Shortfall { limit }))
}

/// Bytes that this process has locked so far.
fn locked_by_process() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmLck:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}
