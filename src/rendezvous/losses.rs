//! The peers that are linked, and those that are lost.
#![allow(clippy::disallowed_types)] // the error of a lost peer

use crate::matching::{Error, LinkTag, LostPeer, Members, PeerIndex, PeerObserver};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

/// The status of each peer, for calls that fail before they reach a poller.
pub struct Losses {
    /// Whether each peer is linked: a copy of its status, so that a send takes no lock.
    is_up: Box<[AtomicBool]>,
    statuses: Box<[Mutex<PeerStatus>]>,
    fatal: bool,
    pub(super) broken: OnceLock<Error>,
    pub(super) swept: AtomicBool,
}

/// Whether a peer is linked or lost.
#[derive(Clone, Debug, Default)]
pub enum PeerStatus {
    /// The peer was never linked.
    #[default]
    Absent,
    /// This link with the peer is up.
    Up(LinkTag),
    /// The peer was lost with this link, or before the link was ready, and has not come back.
    Lost(Option<LinkTag>, Error),
}

impl Losses {
    /// No peer is lost yet. If `fatal`, the loss of a peer ends every call, unless the peer stopped
    /// cleanly.
    pub fn new(members: &Members, fatal: bool) -> Self {
        let members = members.all();
        Losses {
            is_up: members.iter().map(|_| AtomicBool::new(false)).collect(),
            statuses: members.iter().map(|_| Mutex::default()).collect(),
            fatal,
            broken: OnceLock::new(),
            swept: AtomicBool::new(false),
        }
    }

    /// Whether a peer is linked. Takes no lock.
    #[inline]
    pub(super) fn is_up(&self, peer: PeerIndex) -> bool {
        self.is_up[peer.0 as usize].load(Ordering::Acquire)
    }

    /// The status of a peer.
    pub fn status(&self, peer: PeerIndex) -> PeerStatus {
        self.statuses[peer.0 as usize].lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_status(&self, peer: PeerIndex, status: PeerStatus) {
        let is_up = matches!(status, PeerStatus::Up(_));
        let peer = peer.0 as usize;
        let mut present = self.statuses[peer].lock().unwrap_or_else(PoisonError::into_inner);
        *present = status;
        // Under the lock, so that both change in the same order.
        self.is_up[peer].store(is_up, Ordering::Release);
    }

    /// The error that has ended every call.
    pub fn ended(&self) -> Option<Error> {
        self.broken.get().cloned()
    }

    /// Ends every call with this error. The first error wins.
    pub fn end(&self, error: Error) {
        let _ = self.broken.set(error);
    }
}

impl PeerObserver for Losses {
    fn up(&self, peer: PeerIndex, tag: LinkTag) {
        self.set_status(peer, PeerStatus::Up(tag));
    }

    fn failed_before_ready(&self, _peer: PeerIndex, _tag: LinkTag) {}

    fn down(&self, lost: &LostPeer) {
        let LostPeer { peer, tag, error, .. } = lost;
        self.set_status(*peer, PeerStatus::Lost(Some(*tag), error.clone()));
        let clean = matches!(error, Error::PeerLost { cause, .. } if cause.is_clean());
        if self.fatal && !clean {
            self.end(error.clone());
        }
    }
}
