//! The first word of a segment's state line: whether its owner still takes part in the link, and if
//! not, why.

use super::segment::{OwnWords, PeerWords};
use super::words::{LoadWords, StoreWords};
use crate::fabric::LinkFailure;
use std::sync::atomic::{Ordering, fence};

const CLOSED: u64 = 1;
const PROTOCOL: u64 = 2;
const NO_RECEIVE: u64 = 3;

/// Says on this process's line that it no longer takes part. What it does to its memory after this,
/// a peer that has pulled some of it in the meantime can tell.
pub(crate) fn leave(line: &OwnWords, why: &LinkFailure) {
    let word = match why {
        LinkFailure::Protocol(_) => PROTOCOL,
        LinkFailure::NoReceive => NO_RECEIVE,
        LinkFailure::Completion { .. }
        | LinkFailure::Device { .. }
        | LinkFailure::PeerDied { .. }
        | LinkFailure::Closed
        | LinkFailure::Refused(_)
        | LinkFailure::Local(_) => CLOSED,
    };
    line.store(0, word, Ordering::Release);
    // Orders the store before every later write to memory that was lent or named to the peer: one
    // that pulled such a byte and then looks at the line (`after_pulling`) sees it.
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

/// As [`of_peer`], asked after bytes were pulled out of the peer's memory: while the peer takes
/// part it keeps what it has named as it was, so the bytes were good if this is `None`.
pub(crate) fn after_pulling(line: &PeerWords) -> Option<LinkFailure> {
    // Orders the reads of the bytes before the look at the line.
    fence(Ordering::Acquire);
    of_peer(line)
}

#[cold]
fn parse(word: u64) -> LinkFailure {
    match word {
        CLOSED => LinkFailure::Closed,
        PROTOCOL => LinkFailure::Protocol("the peer says so of this side, and its error says how".into()),
        NO_RECEIVE => LinkFailure::NoReceive,
        _ => LinkFailure::Protocol(format!("its state is {word:#x}, which means nothing")),
    }
}
