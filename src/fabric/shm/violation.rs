//! The rules that a peer can break on a link. A broken rule ends the link.

use crate::fabric::shm::memory::order::{OrderSource, OrderTarget, PAYLOAD_BYTES, ReadTicket};
use crate::fabric::shm::memory::ring::BadAck;
use crate::fabric::{LinkFailure, MAX_LOAN_MESSAGE};
use crate::wire::ImmediateError;

/// A rule that the peer broke, with the values that it sent. The texts say "it" for the peer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ShmViolation {
    #[error("an order has the unknown operation {0}")]
    Operation(u8),
    #[error("an order has the unknown flags {0:#04x}")]
    Flags(u8),
    #[error("an order claims {0} bytes of payload: {PAYLOAD_BYTES} is the most")]
    Payload(usize),
    #[error(transparent)]
    Immediate(#[from] ImmediateError),
    #[error("a loan claims {0} bytes of message: {MAX_LOAN_MESSAGE} is the most")]
    LoanMessage(usize),
    #[error("it gave a loan the number 0")]
    LoanNumber,
    #[error("it lent into place {place} of a table of {places}")]
    LoanPlace { place: u64, places: usize },
    #[error("it lent into place {place}, where another loan is still held")]
    LoanPlaceInUse { place: u64 },
    #[error("it named its region {region}, which it has not shared")]
    RegionNotShared { region: u16 },
    #[error("its region {region}: {why}")]
    RegionRefused { region: u16, why: String },
    /// No rule of the peer's: a system call of this process failed.
    #[error(
        "{0}; raise the limits of address space and of locked memory (ulimit -v, ulimit -l), free memory, \
         or use smaller pools"
    )]
    RegionNotMapped(String),
    #[error(
        "it named {} bytes at {} of its region {}, which has {region_len}",
        .named.len, .named.offset, .named.region
    )]
    OutsideRegion { named: OrderSource, region_len: u64 },
    #[error(
        "it used a key for {len} bytes at {} of region {}, {why}",
        .target.offset, .target.region
    )]
    Grant { target: OrderTarget, len: u64, why: GrantViolation },
    #[error("it has more than {0} reads under way")]
    TooManyReads(usize),
    #[error("it answered read {} in place {}, which is not under way", .0.number, .0.index)]
    UnknownRead(ReadTicket),
    #[error("it answered a read of {asked} bytes with {answered}")]
    ReadLength { asked: u64, answered: u64 },
}

/// Why a grant does not allow an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum GrantViolation {
    #[error("but there is no grant with that key, or none any more")]
    UnknownKey,
    #[error("but that key is for another region")]
    OtherRegion,
    #[error("but {len} bytes at {offset} are granted")]
    OutsideGrant { offset: u64, len: u64 },
    #[error("which may only be read")]
    ReadOnly,
    #[error("which may only be written")]
    WriteOnly,
}

impl From<ShmViolation> for LinkFailure {
    #[cold]
    fn from(violation: ShmViolation) -> Self {
        match violation {
            ShmViolation::RegionNotMapped(_) => LinkFailure::Resources(violation.to_string()),
            violation => LinkFailure::Protocol(violation.to_string()),
        }
    }
}

impl From<BadAck> for LinkFailure {
    #[cold]
    fn from(BadAck { said, sent }: BadAck) -> Self {
        let why = format!("it says it has taken {said} orders, where {sent} were sent (both modulo 2^32)");
        LinkFailure::Protocol(why)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::shm::memory::order::Order;
    use crate::wire::Grant;

    #[test]
    fn no_order_and_no_violation_shows_a_key() {
        use GrantViolation::{OtherRegion, OutsideGrant, ReadOnly, UnknownKey, WriteOnly};
        let grant = Grant { region: 3, key: 0xDEAD_BEEF, offset: 4096, len: 64 };
        let target = OrderTarget::from(&grant);
        let source = OrderSource { region: 1, offset: 2, len: 3 };
        for order in [
            Order::WriteInline { len: 8, target, immediate: None },
            Order::Write { source, target, immediate: None },
            Order::Read { exposed: target, len: 8, ticket: ReadTicket { index: 1, number: 2 } },
        ] {
            grant.assert_key_hidden_in(&format!("{order:?} {order:#?}"));
        }
        let outside = OutsideGrant { offset: 4096, len: 64 };
        for why in [UnknownKey, OtherRegion, outside, ReadOnly, WriteOnly] {
            let violation = ShmViolation::Grant { target, len: 65, why };
            let text = format!("{violation} {violation:?} {:?}", LinkFailure::from(violation.clone()));
            assert!(text.contains("65 bytes at 4096 of region 3"), "{text}");
            grant.assert_key_hidden_in(&text);
        }
    }
}
