//! Settings with a few named values.

use crate::bootstrap::AuthMode;
use crate::engine::{PollMode, WaitStrategy};
use crate::memory::{LockPolicy, PagePolicy};

/// A setting with a few named values.
pub(super) trait NamedValues: Copy + PartialEq + 'static {
    /// Every value with its name.
    const NAMES: &'static [(&'static str, Self)];
}

/// How a bulk tensor gets from a sender on the same host to its receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BulkReceive {
    /// `copy`: copied once into the receiver's pool.
    Copy,
    /// `borrow`: the receiver reads the sender's memory.
    Borrow,
}

/// What the loss of a peer does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PeerLoss {
    /// `fail_calls`: calls that need the peer fail, others go on.
    FailCalls,
    /// `fail_all`: every call fails, pending or later, unless the peer stopped cleanly.
    FailAll,
}

/// Whether peers reach single grants of the pool, or all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemoryWindows {
    /// `off`: one key for the whole pool.
    Off,
    /// `on`: a key of its own for each grant.
    On,
}

impl NamedValues for MemoryWindows {
    const NAMES: &'static [(&'static str, Self)] = &[("off", Self::Off), ("on", Self::On)];
}

impl NamedValues for BulkReceive {
    const NAMES: &'static [(&'static str, Self)] = &[("copy", Self::Copy), ("borrow", Self::Borrow)];
}

impl NamedValues for PeerLoss {
    const NAMES: &'static [(&'static str, Self)] =
        &[("fail_calls", Self::FailCalls), ("fail_all", Self::FailAll)];
}

impl NamedValues for AuthMode {
    const NAMES: &'static [(&'static str, Self)] =
        &[("tls", Self::Tls), ("secret", Self::Secret), ("uid", Self::Uid), ("plain", Self::Plain)];
}

impl NamedValues for PagePolicy {
    const NAMES: &'static [(&'static str, Self)] = &[
        ("auto", Self::Auto),
        ("1g", Self::OneGiB),
        ("2m", Self::TwoMiB),
        ("transparent", Self::Transparent),
        ("plain", Self::Plain),
    ];
}

impl NamedValues for LockPolicy {
    const NAMES: &'static [(&'static str, Self)] =
        &[("best_effort", Self::BestEffort), ("require", Self::Require), ("no", Self::No)];
}

impl NamedValues for PollMode {
    const NAMES: &'static [(&'static str, Self)] =
        &[("inline", Self::Inline), ("adaptive", Self::Adaptive), ("dedicated", Self::Dedicated)];
}

impl NamedValues for WaitStrategy {
    const NAMES: &'static [(&'static str, Self)] = &[("spin", Self::Spin), ("yield", Self::Yield)];
}
