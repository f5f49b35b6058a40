//! Failures, with messages that name the remedy.

use super::sys::*;
use crate::fabric::{FabricError, FabricKind};
use std::io;

/// A failed call of the library.
pub(super) fn os(tried: impl Into<String>, source: io::Error, remedy: &'static str) -> FabricError {
    FabricError::Os { fabric: FabricKind::Verbs, tried: tried.into(), remedy, source }
}

/// The device cannot carry out the request.
pub(super) fn unavailable(why: impl Into<String>) -> FabricError {
    FabricError::Unavailable { fabric: FabricKind::Verbs, why: why.into() }
}

/// A setting asks for what the device can't do.
pub(super) fn setting(why: impl Into<String>) -> FabricError {
    FabricError::Setting { fabric: FabricKind::Verbs, why: why.into() }
}

/// The peer is refused.
pub(super) fn peer(why: impl Into<String>) -> FabricError {
    FabricError::Peer { fabric: FabricKind::Verbs, why: why.into() }
}

/// The two sides differ in what no further attempt changes.
pub(super) fn disagreement(why: impl Into<String>) -> FabricError {
    FabricError::Disagreement { fabric: FabricKind::Verbs, why: why.into() }
}

/// The usual cause if the kernel refuses a registration or a queue.
pub(super) fn memory_remedy(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::ENOMEM) => {
            "raise the memlock limit (`ulimit -l unlimited`) or make the pool and queue_depth smaller"
        }
        Some(libc::EPERM | libc::EACCES) => {
            "give the process access to /dev/infiniband, as with the group rdma"
        }
        _ => "see the kernel's log (`dmesg`)",
    }
}

/// The name and the usual cause of a failed completion (InfiniBand specification, 11.6.2).
pub(super) fn status(status: u32) -> (&'static str, &'static str) {
    match status {
        IBV_WC_LOC_LEN_ERR => ("local length error", "a message longer than the receive that it met"),
        IBV_WC_LOC_QP_OP_ERR => ("local queue pair operation error", "a request that this device can't do"),
        IBV_WC_LOC_PROT_ERR => ("local protection error", "memory that is not registered any more"),
        IBV_WC_WR_FLUSH_ERR => ("flushed", "an earlier request of this queue pair failed"),
        IBV_WC_MW_BIND_ERR => {
            ("memory window bind error", "the device refuses a memory window: set rdma_memory_windows to off")
        }
        IBV_WC_LOC_ACCESS_ERR => ("local access error", "a receive in memory that may not be written"),
        IBV_WC_BAD_RESP_ERR => ("bad response", "the network or the peer's device broke the protocol"),
        IBV_WC_REM_INV_REQ_ERR => {
            ("remote invalid request", "the peer's queue pair forbids it, or its receive is too small")
        }
        IBV_WC_REM_ACCESS_ERR => ("remote access error", "a key or bounds that the peer has not granted"),
        IBV_WC_REM_OP_ERR => {
            ("remote operation error", "the peer's device failed: see the kernel's log there")
        }
        IBV_WC_RETRY_EXC_ERR => (
            "retries exceeded",
            "the peer is gone, or nothing gets through: check that both ends have the same GID type and \
             VLAN, that the \
             MTU fits the whole path, and PFC or ECN of the switches",
        ),
        IBV_WC_RNR_RETRY_EXC_ERR => {
            ("receiver not ready", "the peer had no receive posted: an error of credits")
        }
        IBV_WC_REM_ABORT_ERR => ("remote abort", "the peer's device gave up the operation"),
        IBV_WC_FATAL_ERR => ("fatal error", "the device failed: see the kernel's log"),
        IBV_WC_RESP_TIMEOUT_ERR => ("response timeout", "the peer is gone or overloaded"),
        IBV_WC_GENERAL_ERR => ("general error", "see the vendor's code and the kernel's log"),
        _ => ("unknown status", "see the vendor's code and the kernel's log"),
    }
}

/// Whether a failed completion may be the fault of the path or a device, and not of a request or a
/// peer.
pub(super) fn is_of_path(status: u32) -> bool {
    matches!(
        status,
        IBV_WC_WR_FLUSH_ERR
            | IBV_WC_RETRY_EXC_ERR
            | IBV_WC_RESP_TIMEOUT_ERR
            | IBV_WC_LOC_QP_OP_ERR
            | IBV_WC_BAD_RESP_ERR
            | IBV_WC_REM_OP_ERR
            | IBV_WC_REM_ABORT_ERR
            | IBV_WC_FATAL_ERR
            | IBV_WC_GENERAL_ERR
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_status_that_a_reliable_connection_makes_has_a_cause() {
        for code in [1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16, 19, 20, 21] {
            let (name, cause) = status(code);
            assert!(name != "unknown status" && !cause.is_empty(), "{code}");
        }
        assert_eq!(status(99).0, "unknown status");
        assert!(memory_remedy(&io::Error::from_raw_os_error(libc::ENOMEM)).contains("ulimit -l"));
    }
}
