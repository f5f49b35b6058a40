//! The first word of a segment's state line: whether its owner still takes part in the link, and if
//! not, why.

use super::segment::{OwnWords, PeerWords};
use crate::fabric::LinkFailure;
use crate::fabric::words::{LoadWords, StoreWords};
use std::sync::atomic::{Ordering, fence};

const CLOSED: u64 = 1;
const PROTOCOL: u64 = 2;
const NO_RECEIVE: u64 = 3;
const RESOURCES: u64 = 4;

/// Publishes that this process no longer takes part. It may change its memory after this; a peer
/// that pulled bytes meanwhile can detect that.
pub(crate) fn leave(line: &OwnWords, why: &LinkFailure) {
    let word = match why {
        LinkFailure::Protocol(_) => PROTOCOL,
        LinkFailure::NoReceive => NO_RECEIVE,
        LinkFailure::Resources(_) => RESOURCES,
        LinkFailure::Completion { .. }
        | LinkFailure::Device { .. }
        | LinkFailure::Connection { .. }
        | LinkFailure::PeerDied { .. }
        | LinkFailure::Closed
        | LinkFailure::PeerResources
        | LinkFailure::Refused(_)
        | LinkFailure::Local(_) => CLOSED,
    };
    line.store(0, word, Ordering::Release);
    // Orders the store before every later write to memory that was lent or named to the peer. A
    // peer that pulled such a byte and then reads the line (`after_pulling`) sees the store.
    fence(Ordering::SeqCst);
}

/// Why the peer no longer takes part; `None` if it still does.
#[inline]
pub(crate) fn of_peer(line: &PeerWords) -> Option<LinkFailure> {
    match line.load(0, Ordering::Acquire) {
        0 => None,
        word => Some(parse(word)),
    }
}

/// As [`of_peer`], called after bytes were pulled out of the peer's memory. A peer that takes part
/// does not change what it has named, so the bytes are valid if this is `None`.
pub(crate) fn after_pulling(line: &PeerWords) -> Option<LinkFailure> {
    // Orders the reads of the bytes before the read of the line.
    fence(Ordering::Acquire);
    of_peer(line)
}

#[cold]
fn parse(word: u64) -> LinkFailure {
    match word {
        CLOSED => LinkFailure::Closed,
        PROTOCOL => LinkFailure::Protocol("the peer says so of this side, and its error says how".into()),
        NO_RECEIVE => LinkFailure::NoReceive,
        RESOURCES => LinkFailure::PeerResources,
        _ => LinkFailure::Protocol(format!("its state is {word:#x}, which means nothing")),
    }
}
