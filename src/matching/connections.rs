//! The connections with peers.

use super::{
    ConnectionStage, Error, LinkTag, Outgoing, PeerConnection, PeerIndex, ProbeCallback, RemoteHandler,
    Waiter,
};
use crate::fabric::{LinkFailure, LinkId, Port};
use crate::link::{CancelDecision, LinkIdentity, Links};
use crate::mutants::{Mutant, is_on};
use crate::telemetry::Counter;
use crate::wire::{LossCause, TaskId};

/// Polls of a link before it is failed: enough for anything that its queues can hold.
const LAST_POLLS: u32 = 10_000;

impl RemoteHandler {
    /// Adds a new link in place of any earlier one with that peer.
    pub(super) fn attach<P: Port>(
        &mut self,
        links: &mut Links<P, Waiter>,
        index: PeerIndex,
        tag: LinkTag,
        link: P::Link,
        done: ProbeCallback,
    ) {
        self.replace(links, index, tag);
        let identity = LinkIdentity {
            local: self.me.clone(),
            local_incarnation: self.incarnation,
            peer: self.members.task(index).clone(),
            peer_incarnation: tag.incarnation.get(),
        };
        match links.attach(link, identity, self.settings.link.clone()) {
            Ok(link) => {
                let stage = ConnectionStage::Probing(done);
                self.peer(index).connection = Some(PeerConnection { link, tag, stage, close_reason: None });
            }
            Err(error) => done(Err(error.to_string())),
        }
    }

    /// Ends the link that a new one replaces.
    fn replace<P: Port>(&mut self, links: &mut Links<P, Waiter>, index: PeerIndex, by: LinkTag) {
        let Some(old) = self.peer(index).connection.take() else { return };
        let cause = old.close_reason.unwrap_or_else(|| match old.tag.incarnation == by.incarnation {
            true => LossCause::Closed(format!("the link was made again, as generation {}", by.generation)),
            false => LossCause::replaced(by.incarnation),
        });
        let error = self.lost_error(index, old.tag, &cause);
        let calls = &mut self.calls;
        links.cancel_requests(old.link, &mut |_, waiter| {
            if let Some(waiter) = waiter.take() {
                calls.remove(&waiter.id);
                waiter.complete(Err(error.clone()));
            }
            CancelDecision::Keep
        });
        self.fail_queued(&error, |peer, _| peer == index);
        links.fail(old.link, LinkFailure::Local(cause.to_string()));
        self.ended(links, index, old.tag, old.stage, cause);
    }

    /// Notes that a link works in both directions.
    pub(super) fn probed(&mut self, link: LinkId) {
        let Some(index) = self.peer_of(link) else { return };
        let Some(connection) = &mut self.peer(index).connection else { return };
        match std::mem::replace(&mut connection.stage, ConnectionStage::Probed) {
            ConnectionStage::Probing(done) => done(Ok(())),
            stage => connection.stage = stage,
        }
    }

    /// Notes that both sides have said that the link works.
    pub(super) fn ready<P: Port>(&mut self, links: &mut Links<P, Waiter>, index: PeerIndex, tag: LinkTag) {
        let peer = self.peer(index);
        match &mut peer.connection {
            Some(connection) if connection.tag == tag && connection.close_reason.is_none() => {
                connection.stage = ConnectionStage::Up
            }
            _ => return self.observer.failed_before_ready(index, tag),
        }
        let old_life = peer.lost.take().is_some_and(|(lost, _)| lost.incarnation != tag.incarnation);
        if old_life && !is_on(Mutant::OldLifeRemembered) {
            // Values of the old incarnation are not for its successor (specification 2.2).
            let task = self.members.task(index).clone();
            self.drop_orphans(|key| *key.edge.source_task() == task);
        }
        self.repost_standing(links, index);
        self.observer.up(index, tag);
    }

    /// Whether a link with a later incarnation of a peer has superseded this one.
    pub(super) fn is_superseded(&self, task: &TaskId, incarnation: u64) -> bool {
        let peer = self.members.index(task).map(|index| &self.peers[index.0 as usize]);
        let connection = peer.and_then(|peer| peer.connection.as_ref());
        connection.is_some_and(|connection| {
            matches!(connection.stage, ConnectionStage::Up) && connection.tag.incarnation.get() != incarnation
        })
    }

    pub(super) fn down<P: Port>(
        &mut self,
        links: &mut Links<P, Waiter>,
        link: LinkId,
        failure: LinkFailure,
        waiters: Vec<Waiter>,
    ) {
        let waiting = self.outgoing.remove_waiters(|_, waiting| waiting.peer_request.link == link);
        for (_, waiting) in waiting {
            self.leave(&waiting);
        }
        // A peer gives its stashed values to its own receives, without a message from here.
        self.outgoing
            .remove_values(|value| matches!(value, Outgoing::Stashed { link: of, .. } if *of == link));
        for waiter in &waiters {
            self.calls.remove(&waiter.id);
        }
        // A link that was replaced was emptied then.
        let Some(index) = self.peer_of(link) else { return };
        let Some(connection) = self.peer(index).connection.take() else { return };
        let cause = connection.close_reason.unwrap_or_else(|| failure.into_loss());
        let error = self.lost_error(index, connection.tag, &cause);
        self.fail_queued(&error, |peer, _| peer == index);
        for waiter in waiters.into_iter().skip(usize::from(is_on(Mutant::LossNotTold))) {
            waiter.complete(Err(error.clone()));
        }
        self.ended(links, index, connection.tag, connection.stage, cause);
    }

    /// Handles the end of a link. A failed attempt is tried again, unless the peer is gone.
    fn ended<P: Port>(
        &mut self,
        links: &mut Links<P, Waiter>,
        index: PeerIndex,
        tag: LinkTag,
        stage: ConnectionStage,
        cause: LossCause,
    ) {
        let was_up = matches!(stage, ConnectionStage::Up);
        if let ConnectionStage::Probing(done) = stage {
            done(Err(cause.to_string()));
        }
        if was_up || matches!(cause, LossCause::Died(_)) {
            self.note_loss(links, index, tag, cause);
        }
    }

    fn note_loss<P: Port>(
        &mut self,
        links: &mut Links<P, Waiter>,
        index: PeerIndex,
        tag: LinkTag,
        cause: LossCause,
    ) {
        // One loss is reported for each incarnation. Older losses are ignored.
        if let Some((lost, _)) = &self.peer(index).lost
            && (lost.incarnation == tag.incarnation || lost.generation > tag.generation)
        {
            return;
        }
        links.counters().increment(Counter::PeersLost);
        let error = self.lost_error(index, tag, &cause);
        let is_fatal = self.settings.peer_loss_is_fatal && !cause.is_clean();
        self.peer(index).lost = Some((tag, cause));
        if is_fatal {
            self.end(links, &error);
        }
        self.observer.down(index, tag, error);
    }

    fn lost_error(&self, index: PeerIndex, tag: LinkTag, cause: &LossCause) -> Error {
        let (peer, cause) = (self.members.task(index).clone(), cause.clone());
        Error::PeerLost { peer, incarnation: tag.incarnation, cause }
    }

    /// The error of calls that need a link with this peer.
    pub(super) fn why_unusable(&self, index: PeerIndex) -> Error {
        match &self.peers[index.0 as usize].lost {
            Some((tag, cause)) => self.lost_error(index, *tag, cause),
            None => Error::NotConnected { peer: self.members.task(index).clone() },
        }
    }

    /// Ends every present and future call with this error, unless an earlier error has.
    pub(super) fn end<P: Port>(&mut self, links: &mut Links<P, Waiter>, error: &Error) {
        if self.broken.is_none() {
            self.broken = Some(error.clone());
            self.fail_waiters(links, error);
        }
    }

    /// Ends every call on every link with this error.
    pub(super) fn fail_waiters<P: Port>(&mut self, links: &mut Links<P, Waiter>, error: &Error) {
        self.fail_queued(error, |_, _| true);
        let calls = &mut self.calls;
        for link in links.ids() {
            links.cancel_requests(link, &mut |_, waiter| {
                if let Some(waiter) = waiter.take() {
                    calls.remove(&waiter.id);
                    waiter.complete(Err(error.clone()));
                }
                CancelDecision::Abandon
            });
        }
    }

    /// Closes one link. A command about an earlier link changes nothing.
    pub(super) fn lose<P: Port>(
        &mut self,
        links: &mut Links<P, Waiter>,
        index: PeerIndex,
        tag: LinkTag,
        cause: LossCause,
    ) {
        let Some(connection) =
            self.peer(index).connection.as_mut().filter(|connection| connection.tag == tag)
        else {
            return;
        };
        let (link, why) = (connection.link, LinkFailure::Local(cause.to_string()));
        // The first cause is kept.
        connection.close_reason.get_or_insert(cause);
        // This command may arrive before the peer's last tensors were read. A poll that copies a
        // part of a large tensor returns 0 and leaves something to come. The loop is bounded, as
        // other peers may never be silent.
        let _silent = (0..LAST_POLLS).find(|_| links.poll() == 0 && links.arm());
        links.fail(link, why);
    }

    /// Handles the end of an incarnation of a peer.
    pub(super) fn gone<P: Port>(
        &mut self,
        links: &mut Links<P, Waiter>,
        index: PeerIndex,
        tag: LinkTag,
        cause: LossCause,
    ) {
        let peer = self.peer(index);
        let Some(connection) = &peer.connection else { return self.note_loss(links, index, tag, cause) };
        if connection.tag.incarnation != tag.incarnation {
            return;
        }
        let (present, was_up) = (connection.tag, matches!(connection.stage, ConnectionStage::Up));
        self.lose(links, index, present, cause.clone());
        if !was_up {
            self.note_loss(links, index, present, cause);
        }
    }
}
