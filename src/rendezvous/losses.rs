//! Which peers are linked and which are lost.
#![allow(clippy::disallowed_types)] // the error of a lost peer

use super::Error;
use super::path::{LinkTag, Members, PeerIndex};
use super::remote::PeerObserver;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

/// Which peers are there and which are lost, for calls that never reach the poller.
pub struct Losses {
    peers: Vec<Loss>,
    fatal: bool,
    pub(super) broken: OnceLock<Error>,
    pub(super) swept: AtomicBool,
}

#[derive(Default)]
struct Loss {
    /// So that a send to a peer that is there takes no lock.
    is_up: AtomicBool,
    status: Mutex<PeerStatus>,
}

/// How it stands with a peer.
#[derive(Clone, Debug, Default)]
pub enum PeerStatus {
    /// It was never linked.
    #[default]
    Absent,
    /// This link with it is up.
    Up(LinkTag),
    /// It was lost with this link, or before it, and has not come back.
    Lost(LinkTag, Error),
}

impl Losses {
    /// Nobody is lost yet. `fatal`: the loss of one, other than by its clean stop, ends everything.
    pub fn new(members: &Members, fatal: bool) -> Self {
        let peers = members.all().iter().map(|_| Loss::default()).collect();
        Losses { peers, fatal, broken: OnceLock::new(), swept: AtomicBool::new(false) }
    }

    /// Whether a peer is linked. Takes no lock.
    pub(super) fn is_up(&self, peer: PeerIndex) -> bool {
        self.peers[peer.0 as usize].is_up.load(Ordering::Acquire)
    }

    /// How it stands with a peer.
    pub fn status(&self, peer: PeerIndex) -> PeerStatus {
        self.peers[peer.0 as usize].status.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_status(&self, peer: PeerIndex, status: PeerStatus) {
        let loss = &self.peers[peer.0 as usize];
        let is_up = matches!(status, PeerStatus::Up(_));
        let mut present = loss.status.lock().unwrap_or_else(PoisonError::into_inner);
        *present = status;
        // Under the lock, so that both change in the same order.
        loss.is_up.store(is_up, Ordering::Release);
    }

    /// What ended everything, if something has.
    pub fn ended(&self) -> Option<Error> {
        self.broken.get().cloned()
    }

    /// Ends everything with this error, unless something else has.
    pub fn end(&self, error: Error) {
        let _ = self.broken.set(error);
    }
}

impl PeerObserver for Losses {
    fn up(&self, peer: PeerIndex, tag: LinkTag) {
        self.set_status(peer, PeerStatus::Up(tag));
    }

    fn failed_before_ready(&self, _peer: PeerIndex, _tag: LinkTag) {}

    fn down(&self, peer: PeerIndex, tag: LinkTag, error: Error) {
        self.set_status(peer, PeerStatus::Lost(tag, error.clone()));
        let clean = matches!(&error, Error::PeerLost { cause, .. } if cause.is_clean());
        if self.fatal && !clean {
            self.end(error);
        }
    }
}
