//! What the ends of links and the losses of peers mean for requests.

use super::connections::{EndedConnection, UnreportedLoss};
use super::{Error, LinkTag, Outgoing, PeerIndex, RemoteHandler, Waiter};
use crate::fabric::{LinkFailure, LinkId, Port};
use crate::link::{CancelDecision, Links};
use crate::mutants::{Mutant, is_on};

impl RemoteHandler {
    /// Ends the link that a new one replaces.
    pub(super) fn replaced<P: Port>(&mut self, links: &mut Links<P, Waiter>, old: EndedConnection) {
        let calls = &mut self.calls;
        links.cancel_requests(old.link, &mut |_, waiter| {
            if let Some(waiter) = waiter.take() {
                calls.remove(&waiter.id);
                waiter.complete(Err(old.error.clone()));
            }
            CancelDecision::Keep
        });
        self.fail_queued(|_| old.error.clone(), |peer, _| peer == old.peer);
        self.connections.close(links, &old);
        let loss = self.connections.ended(links.counters(), old);
        self.lost(links, loss);
    }

    /// Notes that both sides have said that the link works.
    pub(super) fn ready<P: Port>(&mut self, links: &mut Links<P, Waiter>, peer: PeerIndex, tag: LinkTag) {
        let Some(old_life) = self.connections.ready(peer, tag) else { return };
        if old_life && !is_on(Mutant::OldLifeRemembered) {
            // Values of the old incarnation are not for its successor (specification 2.2).
            let task = self.connections.members().task(peer).clone();
            self.drop_orphans(|key| *key.edge.source_task() == task);
        }
        self.repost_standing(links, peer);
        self.connections.report_up(peer, tag);
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
        let Some(ended) = self.connections.down(link, failure) else { return };
        self.fail_queued(|_| ended.error.clone(), |peer, _| peer == ended.peer);
        for waiter in waiters.into_iter().skip(usize::from(is_on(Mutant::LossNotTold))) {
            waiter.complete(Err(ended.error.clone()));
        }
        let loss = self.connections.ended(links.counters(), ended);
        self.lost(links, loss);
    }

    /// Reports a loss. A fatal one ends every call first.
    pub(super) fn lost<P: Port>(&mut self, links: &mut Links<P, Waiter>, loss: Option<UnreportedLoss>) {
        let Some(loss) = loss else { return };
        if loss.is_fatal {
            self.end(links, &loss.error);
        }
        self.connections.report(loss);
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
        self.fail_queued(|_| error.clone(), |_, _| true);
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
}
