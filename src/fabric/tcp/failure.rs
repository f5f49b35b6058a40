//! Errors of this fabric, with messages that name the remedy.

use crate::fabric::{FabricError, FabricKind};
use std::io;

/// What to change if the kernel has no descriptor or thread.
pub(super) const LIMITS: &str = "raise the limits of open files (ulimit -n) and threads (ulimit -u)";

/// A failed system call.
pub(super) fn os(
    tried: impl Into<String>,
    source: impl Into<io::Error>,
    remedy: &'static str,
) -> FabricError {
    FabricError::Os { fabric: FabricKind::Tcp, tried: tried.into(), remedy, source: source.into() }
}

/// The two sides do not fit.
pub(super) fn differs(why: impl Into<String>) -> FabricError {
    FabricError::Disagreement { fabric: FabricKind::Tcp, why: why.into() }
}

/// The peer is refused.
pub(super) fn peer(why: impl Into<String>) -> FabricError {
    FabricError::Peer { fabric: FabricKind::Tcp, why: why.into() }
}
