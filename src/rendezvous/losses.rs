//! The peers that are linked, and those that are lost.
#![allow(clippy::disallowed_types)] // the error of a lost peer

use super::context::Context;
use super::pending::Receivable;
use crate::matching::{Delivery, Error, LinkTag, LostPeer, Members, Outcome, PeerIndex, PeerObserver};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

/// The status of each peer, for calls that fail before they reach a poller.
pub struct Losses {
    /// Whether each peer is linked: a copy of its status, so that a send takes no lock.
    is_up: Box<[AtomicBool]>,
    statuses: Box<[Mutex<PeerStatus>]>,
    fatal: bool,
    members: Members,
    /// See [`Losses::call_failed`].
    failure: Mutex<Option<Error>>,
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
        let all = members.all();
        Losses {
            is_up: all.iter().map(|_| AtomicBool::new(false)).collect(),
            statuses: all.iter().map(|_| Mutex::default()).collect(),
            fatal,
            members: members.clone(),
            failure: Mutex::default(),
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

    /// Notes the error of a call. The first one is kept that is a loss with something wrong, as
    /// long as the lost peer is not back.
    pub(super) fn call_failed(&self, error: &Error) {
        let Error::PeerLost { cause, .. } = error else { return };
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        if !cause.is_clean() && failure.as_ref().is_none_or(|earlier| self.is_back(earlier)) {
            *failure = Some(error.clone());
        }
    }

    /// The result of a receive, for its caller.
    #[inline]
    pub(super) fn delivered<T: Receivable>(&self, Outcome(result): Outcome) -> Result<Delivery<T>, Error> {
        result.map_err(|error| self.failed(error))?.cast()
    }

    /// Notes the error of a call, which is returned to its caller.
    #[cold]
    pub(super) fn failed(&self, error: Error) -> Error {
        self.call_failed(&error);
        error
    }

    /// The loss that calls have failed with, if its peer is not back.
    pub fn failure(&self) -> Option<Error> {
        let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.clone().filter(|error| !self.is_back(error))
    }

    fn is_back(&self, error: &Error) -> bool {
        let Error::PeerLost { peer, .. } = error else { return false };
        self.members.index(peer).is_some_and(|peer| self.is_up(peer))
    }

    /// Ends every call with this error. The first error wins. Returns whether this is the first.
    pub fn end(&self, error: Error) -> bool {
        self.broken.set(error).is_ok()
    }

    /// Notes a loss. Returns whether it ends every call, as the first fatal one does.
    pub fn note(&self, lost: &LostPeer) -> bool {
        let LostPeer { peer, tag, error, .. } = lost;
        self.set_status(*peer, PeerStatus::Lost(Some(*tag), error.clone()));
        self.end_by(error)
    }

    /// Ends every call if the error is a fatal loss. Returns whether it is the first one.
    pub fn end_by(&self, error: &Error) -> bool {
        let clean = matches!(error, Error::PeerLost { cause, .. } if cause.is_clean());
        self.fatal && !clean && self.end(error.clone())
    }
}

impl PeerObserver for Losses {
    fn up(&self, peer: PeerIndex, tag: LinkTag) {
        self.set_status(peer, PeerStatus::Up(tag));
    }

    fn failed_before_ready(&self, _peer: PeerIndex, _tag: LinkTag) {}

    fn down(&self, lost: &LostPeer) {
        self.note(lost);
    }
}

impl Context {
    /// The loss for which a stop of this node is a consequence. It has ended every call, or calls
    /// have failed with it and its peer is not back.
    pub(crate) fn failure(&self) -> Option<Error> {
        match self.broken() {
            Some(error @ Error::PeerLost { .. }) => Some(error),
            Some(_) => None,
            None => self.losses.failure(),
        }
    }

    #[cold]
    pub(super) fn check_lost_peer(&self, peer: PeerIndex) -> Result<(), Error> {
        match self.losses.status(peer) {
            PeerStatus::Up(_) => Ok(()),
            PeerStatus::Lost(_, error) => Err(self.losses.failed(error)),
            PeerStatus::Absent => Err(Error::NotConnected { peer: self.members.task(peer).clone() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Incarnation, LossCause, TaskId};

    #[test]
    fn the_first_loss_with_something_wrong_is_the_one_that_ends_every_call() {
        let task = |number| TaskId::new("w", number).expect("a job name");
        let losses = Losses::new(&Members::new((0..3).map(task).collect()), true);
        let lost = |number: u32, cause: LossCause| {
            let incarnation = Incarnation::new(7).expect("not 0");
            let error = Error::PeerLost { peer: task(number), incarnation, cause };
            let tag = LinkTag { incarnation, generation: 1.into() };
            losses.note(&LostPeer { peer: PeerIndex(number), tag, error, values: 0, flight: None })
        };
        assert!(!lost(0, LossCause::Left(LossCause::STOPPED.into())) && losses.ended().is_none());
        assert!(lost(1, LossCause::Died("it was killed".into())));
        assert!(!lost(2, LossCause::Died("it was killed too".into())), "every call had failed before");
        assert!(matches!(losses.ended(), Some(Error::PeerLost { peer, .. }) if peer == task(1)));
    }

    #[test]
    fn a_failure_is_forgotten_once_its_peer_is_back() {
        let task = |number| TaskId::new("w", number).expect("a job name");
        let losses = Losses::new(&Members::new((0..3).map(task).collect()), false);
        let incarnation = Incarnation::new(7).expect("not 0");
        let lost = |number, cause| Error::PeerLost { peer: task(number), incarnation, cause };
        let blamed = || losses.failure().map(|error| error.to_string());
        losses.call_failed(&lost(0, LossCause::Left(LossCause::STOPPED.into())));
        assert_eq!(blamed(), None, "a clean stop");
        let [first, second] = [1, 2].map(|number| lost(number, LossCause::Died("it was killed".into())));
        losses.call_failed(&first);
        losses.call_failed(&second);
        assert_eq!(blamed(), Some(first.to_string()));
        losses.up(PeerIndex(1), LinkTag { incarnation, generation: 2.into() });
        assert_eq!(blamed(), None);
        losses.call_failed(&second);
        assert_eq!(blamed(), Some(second.to_string()));
    }
}
