//! The keys of a meeting, which belong to one caller each.

use crate::wire::TaskId;
use tonic::Status;

/// Under which every key of a meeting is. A part with the name of the run may follow.
pub const MEETING_KEYS: &str = "tensorwire/meeting/";

/// The task that alone may change a key, in a meeting.
fn owner(key: &str) -> Option<u32> {
    let mut parts = key.strip_prefix(MEETING_KEYS)?.rsplit('/');
    match (parts.next()?, parts.next()) {
        // The cluster of all, which the first member makes.
        ("outcome", _) => Some(0),
        (task, Some("member")) => task.parse().ok(),
        _ => None,
    }
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
