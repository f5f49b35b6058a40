//! Keeping a region's pages from being swapped out, as far as the process may.

use super::mapping::RegionMapping;
use super::{LockPolicy, RegionError};
use rustix::process::{Resource, getrlimit};
use std::fs;

/// The limit in bytes that kept a part of a region from being locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shortfall {
    pub(crate) limit: u64,
}

/// Locks what the policy asks for and the process may; `Some` if that is not all of it.
///
/// What is locked in part is locked in whole granules, so that no huge page is split.
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
        // As much as there is room for. If another thread took the room meanwhile the report says so.
        let _ = mapping.lock(part.min(size) as usize);
    }
    Ok(Some(Shortfall { limit }))
}

/// Bytes that this process has locked already.
fn locked_by_process() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmLck:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}
