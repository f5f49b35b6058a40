//! Links as they come and go.

use super::{PeerState, Remote};
use crate::fabric::{LinkFailure, LinkId, Port};
use crate::link::{LinkIdentity, Links};
use crate::mutants::{Mutant, is_on};
use crate::rendezvous::path::PeerIndex;
use crate::rendezvous::waiter::Waiter;
use crate::rendezvous::{Error, LossCause};
use crate::telemetry::Counter;

/// How often a link is looked at before it is failed: enough for whatever its queues can hold.
const LAST_POLLS: u32 = 10_000;

impl Remote {
    pub(super) fn attach<P: Port>(
        &mut self,
        links: &mut Links<P, Waiter>,
        index: PeerIndex,
        incarnation: u64,
        link: P::Link,
        done: Box<dyn FnOnce(Result<(), String>) + Send>,
    ) {
        if let Some((old, incarnation)) = self.peer(index).state.life() {
            let cause = LossCause::Closed("it has come back in a new life".into());
            let peer = self.members.task(index).clone();
            let error = Error::PeerLost { peer, incarnation, cause };
            links.give_up(old, &mut |_, waiter| {
                if let Some(waiter) = waiter.take() {
                    waiter.complete(Err(error.clone()));
                }
                false
            });
            links.fail(old, LinkFailure::Local("the peer has come back in a new life".into()));
        }
        let identity = LinkIdentity {
            local: self.me.clone(),
            local_incarnation: self.incarnation,
            peer: self.members.task(index).clone(),
            peer_incarnation: incarnation,
        };
        match links.attach(link, identity, self.settings.link.clone()) {
            Ok(link) => self.peer(index).state = PeerState::Connecting { link, incarnation, done },
            Err(error) => done(Err(error.to_string())),
        }
    }

    pub(super) fn up(&mut self, link: LinkId) {
        let Some(index) = self.peer_of(link) else { return };
        let state = std::mem::take(&mut self.peer(index).state);
        let PeerState::Connecting { link, incarnation, done } = state else {
            self.peer(index).state = state;
            return;
        };
        self.peer(index).state = PeerState::Up { link, incarnation };
        self.watch.up(index, incarnation);
        done(Ok(()));
    }

    pub(super) fn down<P: Port>(
        &mut self,
        links: &mut Links<P, Waiter>,
        link: LinkId,
        failure: LinkFailure,
        waiters: Vec<Waiter>,
    ) {
        let asking = self.outgoing.remove_waiters(|_, asking| asking.incoming.link == link);
        for (_, asking) in asking {
            self.leave(&asking);
        }
        // A link of an earlier life was emptied when the new life came.
        let Some(index) = self.peer_of(link) else { return };
        let cause = self.peer(index).verdict.take().unwrap_or_else(|| cause_of(failure));
        let state = std::mem::take(&mut self.peer(index).state);
        let incarnation = match state {
            PeerState::Connecting { incarnation, done, .. } => {
                done(Err(cause.to_string()));
                incarnation
            }
            PeerState::Up { incarnation, .. } | PeerState::Lost { incarnation, .. } => incarnation,
            PeerState::Absent => 0,
        };
        self.peer(index).state = PeerState::Lost { incarnation, cause: cause.clone() };
        links.counters().increment(Counter::PeersLost);
        let peer = self.members.task(index).clone();
        let error = Error::PeerLost { peer, incarnation, cause: cause.clone() };
        for waiter in waiters.into_iter().skip(usize::from(is_on(Mutant::LossNotTold))) {
            waiter.complete(Err(error.clone()));
        }
        if self.settings.peer_loss_is_fatal && !cause.is_clean() && self.broken.is_none() {
            self.broken = Some(error.clone());
            self.fail_waiters(links, &error);
        }
        self.watch.down(index, error);
    }

    /// Every call on every link ends with this error.
    pub(super) fn fail_waiters<P: Port>(&mut self, links: &mut Links<P, Waiter>, error: &Error) {
        for link in links.ids() {
            links.give_up(link, &mut |_, waiter| {
                if let Some(waiter) = waiter.take() {
                    waiter.complete(Err(error.clone()));
                }
                true
            });
        }
    }

    pub(super) fn lose<P: Port>(&mut self, links: &mut Links<P, Waiter>, index: PeerIndex, cause: LossCause) {
        let peer = self.peer(index);
        if let Some(link) = peer.state.link() {
            let why = LinkFailure::Local(cause.to_string());
            peer.verdict = Some(cause);
            // The news came by another way than the peer's last tensors, which may still be unread. Bounded,
            // as other peers may never be silent.
            let _silent = (0..LAST_POLLS).find(|_| links.poll() == 0);
            links.fail(link, why);
        }
    }
}

fn cause_of(failure: LinkFailure) -> LossCause {
    match failure {
        LinkFailure::PeerDied { .. } => LossCause::Died(failure.to_string()),
        LinkFailure::Closed => LossCause::Left(failure.to_string()),
        LinkFailure::Local(why) => LossCause::Closed(why),
        other => LossCause::Protocol(other.to_string()),
    }
}
