//! The keys of a meeting, which belong to one caller each.

use crate::wire::TaskId;
use tonic::Status;

/// Under which every key of a meeting is. A part with the name of the run may follow.
pub const MEETING_KEYS: &str = "tensorwire/meeting/";

/// The task that alone may change a key, in a meeting.
fn owner(key: &str) -> Option<u32> {
    let mut parts = key.strip_prefix(MEETING_KEYS)?.rsplit('/');
    match (parts.next()?, parts.next()) {
        // The cluster of all, which the first member makes, and their number.
        ("outcome" | "size", _) => Some(0),
        (task, Some("member")) => task.parse().ok(),
        _ => None,
    }
}

/// Whether a change is a claim that each member may make: the first one to come says the size.
pub(super) fn is_free_claim(key: &str, expected: Option<&[u8]>) -> bool {
    expected.is_none() && key.starts_with(MEETING_KEYS) && key.ends_with("/size")
}

/// Fails for a caller that changes a key of another one.
pub(super) fn check_owner(caller: &TaskId, key: &str) -> Result<(), Status> {
    match owner(key) {
        Some(task) if task != caller.task() => Err(Status::permission_denied(format!(
            "the key is that of {}/{task}, and {caller} has called",
            caller.job()
        ))),
        _ => Ok(()),
    }
}
