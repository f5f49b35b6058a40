//! The ends of calls, steps and lives.

use super::ended_steps::StepEnd;
use super::{Lanes, Matching, WaitingReceive};
use crate::link::TensorKey;
use crate::link::windows::WindowRefusal;
use crate::matching::untaken::LostEdge;
use crate::matching::{Cancel, CancelReason, Error, PeerIndex, StepChange};
use crate::mutants::{Mutant, is_on};
use crate::protocol::{REMEMBERED_RANGES, StepsOver};
use crate::wire::{Status, Time};
use std::ops::RangeInclusive;

impl Matching {
    /// Cancels a call. Returns whether it was waiting.
    pub fn cancel(&mut self, lanes: &mut impl Lanes, cancel: &Cancel) -> bool {
        let Some(waiter) = self.waiter_of(cancel.call) else { return false };
        self.give_up(lanes, waiter, cancel.why.clone());
        true
    }

    /// Ends the waits whose deadline is `now` or earlier, and looks for long ones.
    pub fn expire(&mut self, lanes: &mut impl Lanes, now: Time) {
        let is_any_long = self.next_deadline <= now && self.end_late(lanes, now);
        self.watch_long_waits(lanes, now, is_any_long);
    }

    /// Ends the receives whose deadline is `now` or earlier. Returns whether the wait of another
    /// one is to be reported.
    fn end_late(&mut self, lanes: &mut impl Lanes, now: Time) -> bool {
        let (mut late, mut next, mut report) = (Vec::new(), Time::NEVER, Time::NEVER);
        for (number, WaitingReceive { waiter, .. }) in self.waiting.iter() {
            if waiter.deadline <= now {
                late.push(number);
                continue;
            }
            next = next.min(waiter.deadline);
            report = report.min(self.long_waits.report_of(waiter));
        }
        if is_on(Mutant::LaterDeadlinesForgotten) {
            next = Time::NEVER;
        }
        self.next_deadline = next.min(report);
        late.into_iter().for_each(|waiter| self.give_up(lanes, waiter, CancelReason::Deadline(None)));
        report <= now
    }

    /// Ends a wait. A value that comes later is for the next receive.
    fn give_up(&mut self, lanes: &mut impl Lanes, waiter: u32, why: CancelReason) {
        let Some(mut receive) = self.take_waiting(waiter) else { return };
        if let Some(landing) = receive.landing {
            self.leave_transfer(receive.peer, landing);
        } else if !is_on(Mutant::GivenUpStaysListed) {
            let incoming = &mut self.peers[receive.peer.0 as usize].incoming;
            incoming.give_up(receive.edge, receive.key.step, &waiter);
        }
        // First: an edge that gives its number back takes no destination along.
        self.update_ready(lanes, receive.peer, receive.edge);
        self.send_due(lanes, receive.peer, receive.edge);
        receive.waiter.cancel_reason = Some(why);
        receive.waiter.fail_cancelled(&receive.key);
    }

    /// Notes the change of a step, and tells the peers.
    pub fn step_changed(&mut self, lanes: &mut impl Lanes, change: StepChange) {
        match change {
            StepChange::Sequence { base } => self.steps.sequence(base),
            StepChange::Aborted { steps, status } => self.abort(lanes, &steps, &status),
            StepChange::CleanedUp { step } => self.clean_up(lanes, step),
        }
        self.tell_ends(lanes);
    }

    fn abort(&mut self, lanes: &mut impl Lanes, steps: &RangeInclusive<u64>, status: &Status) {
        if !self.steps.abort(steps, status) {
            return;
        }
        let error = WindowRefusal::from(status.clone().into_derived());
        let over = StepsOver { first: *steps.start(), last: *steps.end(), error };
        self.end_steps(lanes, steps, StepEnd::Aborted(status));
        for peer in self.peer_indices() {
            self.tell_end(lanes, peer, over.clone());
        }
    }

    /// Ends a step for good. [`Matching::tell_ends`] tells the peers.
    #[inline]
    pub fn clean_up(&mut self, lanes: &mut impl Lanes, step: u64) {
        if !self.steps.cleanup(step) {
            return;
        }
        if self.peers.iter_mut().any(|peer| !peer.out.is_quiet(step) || !peer.incoming.is_quiet(step)) {
            self.end_steps(lanes, &(step..=step), StepEnd::CleanedUp);
        }
        if self.untold.add(step) {
            self.tell_ends(lanes);
        }
    }

    pub(super) fn peer_indices(&self) -> impl Iterator<Item = PeerIndex> + use<> {
        (0..self.peers.len() as u32).map(PeerIndex)
    }

    /// Drops the values of steps, and fails their receives.
    #[cold]
    fn end_steps(&mut self, lanes: &mut impl Lanes, steps: &RangeInclusive<u64>, end: StepEnd<'_>) {
        for peer in self.peer_indices() {
            self.end_steps_of_peer(lanes, peer, steps, end);
        }
    }

    fn end_steps_of_peer(
        &mut self,
        lanes: &mut impl Lanes,
        peer: PeerIndex,
        steps: &RangeInclusive<u64>,
        end: StepEnd<'_>,
    ) {
        let entry = &mut self.peers[peer.0 as usize];
        let dropped = entry.out.drop_steps(steps);
        let (waiters, values) =
            entry.incoming.end_steps(steps, &mut |message| lanes.to_sender(peer, message));
        if !is_on(Mutant::EndedValuesOutstanding) {
            self.left(dropped.len());
        }
        if self.long_waits.has_sends() {
            dropped.iter().for_each(|(edge, _)| _ = self.forget_ended_wait(peer, *edge));
        }
        for value in values {
            let receive = self.discard(lanes, peer, value);
            self.fail(receive, |key| end.error(key.step));
        }
        self.update_ready_for(lanes, &waiters);
        self.fail(waiters, |key| end.error(key.step));
    }

    /// Whether steps were cleaned up since the peers were told last.
    #[inline]
    pub fn has_untold_ends(&self) -> bool {
        !self.untold.is_empty()
    }

    /// Tells the peers which steps were cleaned up since they were told last.
    #[inline]
    pub fn tell_ends(&mut self, lanes: &mut impl Lanes) {
        if self.has_untold_ends() {
            self.tell_untold(lanes);
        }
    }

    #[cold]
    fn tell_untold(&mut self, lanes: &mut impl Lanes) {
        let untold = std::mem::take(&mut self.untold);
        for (first, last) in untold.ranges().filter(|_| !is_on(Mutant::EndsNotTold)) {
            for peer in self.peer_indices() {
                self.tell_end(lanes, peer, StepsOver { first, last, error: WindowRefusal::CleanedUp });
            }
        }
    }

    /// Tells a peer of steps that have ended, if it has announced edges.
    fn tell_end(&mut self, lanes: &mut impl Lanes, peer: PeerIndex, over: StepsOver<WindowRefusal>) {
        let entry = &mut self.peers[peer.0 as usize];
        if entry.has_announced {
            entry.out.tell_end(over, &mut |message| _ = lanes.to_receiver(peer, message));
        }
    }

    /// A link to a peer is up.
    pub fn up(&mut self, peer: PeerIndex) {
        let entry = &mut self.peers[peer.0 as usize];
        entry.down = None;
        entry.incoming.returned();
        self.late_texts.remove(&peer);
    }

    /// A peer announces an edge. With its first one the peer hears which steps have ended here.
    pub(super) fn note_announcement(&mut self, lanes: &mut impl Lanes, peer: PeerIndex) {
        let Matching { peers, steps, .. } = self;
        let entry = &mut peers[peer.0 as usize];
        if std::mem::replace(&mut entry.has_announced, true) {
            return;
        }
        let mut post = |message| _ = lanes.to_receiver(peer, message);
        let retired = steps.retired();
        // The peer remembers no more, and the largest ids are most likely the latest.
        let forgotten = retired.len().saturating_sub(REMEMBERED_RANGES);
        for (first, last) in retired.into_iter().skip(forgotten) {
            entry.out.tell_end(StepsOver { first, last, error: WindowRefusal::CleanedUp }, &mut post);
        }
        for (steps, status) in steps.aborted().filter(|_| !is_on(Mutant::EarlierAbortsNotTold)) {
            let error = WindowRefusal::from(status.clone().into_derived());
            entry.out.tell_end(StepsOver { first: *steps.start(), last: *steps.end(), error }, &mut post);
        }
    }

    /// The life of a peer has ended, and its link. Its receives fail with `error`. Values that left
    /// are lost; the others are for its next life. Returns the number of lost values at most.
    pub fn lost(&mut self, peer: PeerIndex, error: &Error) -> u64 {
        let entry = &mut self.peers[peer.0 as usize];
        entry.down.get_or_insert_with(|| Box::new(error.clone()));
        // Not in `up`: the peer may announce an edge before this side knows that both are ready.
        entry.has_announced = false;
        entry.offers = false;
        let mut lost = 0;
        for (key, edge) in entry.out.edges().filter(|(_, edge)| edge.untaken() > 0) {
            lost += edge.untaken();
            self.lost.add(LostEdge { peer, key: key.clone(), values: edge.untaken() });
        }
        drop(entry.out.lost());
        let waiters = entry.incoming.lost();
        let unheard = usize::from(is_on(Mutant::LossNotToldToWindow));
        let transfers = self.lose_transfers(peer);
        self.fail(waiters.into_iter().skip(unheard).chain(transfers), |_| error.clone());
        lost
    }

    /// Ends every present and future receive with this error, unless an earlier error has.
    pub fn end(&mut self, error: &Error) {
        if self.broken.is_some() {
            return;
        }
        self.broken = Some(error.clone());
        let waiters: Vec<_> = self.waiting.iter().map(|(waiter, _)| waiter).collect();
        for waiter in waiters {
            let Some(receive) = self.take_waiting(waiter) else { continue };
            let incoming = &mut self.peers[receive.peer.0 as usize].incoming;
            match receive.landing {
                Some(landing) => self.leave_transfer(receive.peer, landing),
                None => drop(incoming.give_up(receive.edge, receive.key.step, &waiter)),
            }
            receive.waiter.complete(Err(error.clone()));
        }
    }

    /// Announces an edge before its receives, with a window of at least `window` values.
    pub fn widen(&mut self, lanes: &mut impl Lanes, peer: PeerIndex, key: &TensorKey, window: u32) {
        let incoming = &mut self.peers[peer.0 as usize].incoming;
        let edge = incoming.edge(&key.edge);
        incoming.widen(edge, window.into(), &mut |message| lanes.to_sender(peer, message));
        incoming.set_standing(edge, true);
        self.update_ready(lanes, peer, edge);
    }

    /// An edge has no standing request any more.
    pub fn end_standing(&mut self, lanes: &mut impl Lanes, peer: PeerIndex, key: &TensorKey) {
        let incoming = &mut self.peers[peer.0 as usize].incoming;
        let edge = incoming.edge(&key.edge);
        incoming.set_standing(edge, false);
        self.update_ready(lanes, peer, edge);
        // The edge may be unknown, and is not needed then.
        self.send_due(lanes, peer, edge);
    }

    /// Calls that need a peer without a link fail with this error.
    pub fn set_down(&mut self, peer: PeerIndex, error: &Error) {
        self.peers[peer.0 as usize].down = Some(Box::new(error.clone()));
    }

    /// Drops what came from an earlier life of a peer and was not received: it is not for the
    /// successor of that life (specification 2.2). Returns the number of values.
    pub fn drop_held(&mut self, peer: PeerIndex) -> u64 {
        self.peers[peer.0 as usize].incoming.drop_held().len() as u64
    }

    /// How much there is to do.
    #[cfg(any(test, feature = "sim"))]
    pub fn load(&self, links: crate::link::LinkLoad) -> crate::matching::RemoteLoad {
        let edges = || self.peers.iter().flat_map(|peer| peer.out.edges());
        let held = self.peers.iter().flat_map(|peer| peer.incoming.edges());
        crate::matching::RemoteLoad {
            links,
            waiting: self.waiting.iter().count(),
            values: edges().map(|(_, edge)| edge.waiting().count()).sum(),
            needs: edges().map(|(_, edge)| edge.needs()).sum(),
            held: held.map(|(_, _, edge)| edge.held().len()).sum(),
        }
    }

    fn fail(&mut self, waiters: impl IntoIterator<Item = u32>, error: impl Fn(&TensorKey) -> Error) {
        for waiter in waiters {
            if let Some(receive) = self.take_waiting(waiter) {
                receive.waiter.complete(Err(error(&receive.key)));
            }
        }
    }
}
