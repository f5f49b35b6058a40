//! The loss of a link's first rail: another rail becomes the first one. Calls go on, unless bytes
//! were acknowledged of which nobody can tell any more, or a read is outstanding.
//!
//! Each further rail has a *backup*: a control queue pair, and a queue pair for data that becomes
//! the main one. A side that can't use the first rail any more goes through these steps.
//!
//! 1. **Drain.** It moves its queue pairs there to the error state, and waits until all receives
//!    have completed: with messages that have arrived, or as flushed. From then on nothing of the
//!    peer lands over the first rail, and the number of messages that have arrived is exact. A
//!    device that completes nothing any more has its queue pairs destroyed after a while. Then the
//!    number is that of the messages that it has told of.
//! 2. **Take over.** The first rail that is not lost becomes the first one. Its control queue pair
//!    tells the peer, with the number.
//! 3. **Resume.** The peer does the same, at the latest when it is told. With its number this side
//!    knows what has not landed, and posts that again, in order.
//!
//! The old first rail is then a lost one: see `rails` for the parts that were under way there.

use super::control::{BYTES, ControlQueue};
use super::data_queue::{DataQueue, Translation};
use super::link::VerbsLinkInner;
use super::sys::ibv_wc;
use crate::fabric::{Completions, Event, LinkFailure};

/// The time, in ticks of 100 ms, that the queue pairs of a lost rail have to complete their
/// receives. A device that does not do that says nothing any more, and the queue pairs are
/// destroyed.
pub(super) const DRAIN_TICKS: u32 = 20;

/// The queue pairs of a further rail that take over from those of the first one.
pub(super) struct Backup {
    pub main: DataQueue,
    pub control: ControlQueue,
    /// Messages that the peer, which has taken over already, has sent on the control queue pair.
    pub control_messages: u32,
}

impl Backup {
    /// Whether asynchronous events have reported a queue pair of it.
    pub fn failure(&self, device: &str) -> Option<LinkFailure> {
        self.main.failure(device).or_else(|| self.control.failure(device))
    }
}

/// A first rail is lost, and the peer has not taken over yet.
pub(super) struct Failover {
    why: LinkFailure,
    /// The tick of its begin.
    since: u32,
    /// The rail that takes over. The first one is in its place afterwards.
    to: usize,
    has_taken_over: bool,
}

impl VerbsLinkInner {
    /// Goes on over another rail, or ends the link if there is none.
    #[cold]
    pub fn lose_first_rail(&mut self, why: LinkFailure) {
        match &self.failover {
            Some(failover) if !failover.has_taken_over => return,
            // What has taken over fails before the peer has followed.
            Some(Failover { why, .. }) => return self.fail(why.clone()),
            None => {}
        }
        let Some(to) = self.next_rail().filter(|_| self.is_up()) else { return self.fail(why) };
        let since = self.shared.watcher.ticks();
        self.failover = Some(Failover { why: why.clone(), since, to, has_taken_over: false });
        if !self.main.can_be_taken_over() {
            return self.fail(why);
        }
        self.main.stop();
        self.control.stop();
        self.stop_stripes(None);
        self.suspect = None;
    }

    /// The rail that takes over if the first one is lost.
    fn next_rail(&self) -> Option<usize> {
        self.rails.iter().position(|rail| !rail.is_lost && rail.backup.is_some())
    }

    /// Whether the first rail is lost, and its queue pairs are still there.
    pub fn is_draining(&self) -> bool {
        self.failover.as_ref().is_some_and(|failover| !failover.has_taken_over)
    }

    /// Tells the peer of the end of the link over the rail that would have taken over.
    pub fn disconnect_backup(&mut self, why: &LinkFailure) {
        let Some(rail) = self.failover.as_ref().and_then(|it| self.rails.get_mut(it.to)) else { return };
        if let Some(backup) = &mut rail.backup {
            backup.control.disconnect(&mut rail.local, why, None);
        }
    }

    /// Whether the peer is still to be told of the end over such a rail.
    pub fn is_disconnecting_backup(&self) -> bool {
        let mut backups = self.rails.iter().filter_map(|rail| rail.backup.as_ref());
        backups.any(|backup| backup.control.is_disconnecting)
    }

    /// Continues a failover. `emptied`: the completion queues are empty.
    pub fn go_on_over_another_rail(&mut self, emptied: bool, out: &mut Completions) {
        let Some(Failover { why, since, to, has_taken_over: false }) = &self.failover else { return };
        if !self.is_up() {
            self.failover = None;
            return;
        }
        let is_late = self.shared.watcher.ticks().wrapping_sub(*since) > DRAIN_TICKS;
        let to = if self.rails[*to].is_lost { self.next_rail() } else { Some(*to) };
        let is_drained = self.main.is_drained() && self.control.is_drained();
        match to {
            Some(to) if is_drained || is_late && emptied => self.take_over(to, is_drained, out),
            Some(_) => {}
            None => self.fail(why.clone()),
        }
    }

    /// The rail at this place becomes the first one, and the first one is lost.
    fn take_over(&mut self, to: usize, is_exact: bool, out: &mut Completions) {
        self.main.destroy();
        if self.main.is_lost {
            return self.fail(self.not_stopped(self.device));
        }
        let Some(Backup { mut main, mut control, control_messages }) = self.rails[to].backup.take() else {
            unreachable!("a rail takes over that has a backup");
        };
        main.take_over(&mut self.main);
        self.main = main;
        self.swap_first_rail(to);
        let is_told = self.main.refill(&self.local, true)
            && control.take_over(&mut self.control, &mut self.local, (self.main.consumed, is_exact));
        self.control = control;
        if let Some(failover) = &mut self.failover {
            (failover.to, failover.has_taken_over) = (to, true);
            if !is_told {
                let why = failover.why.clone();
                return self.fail(why);
            }
        }
        for _ in 0..control_messages {
            self.control_received(BYTES as u32, out);
        }
    }

    /// Exchanges what belongs to the first rail and to another one.
    fn swap_first_rail(&mut self, with: usize) {
        let rail = &mut self.rails[with];
        std::mem::swap(&mut self.local, &mut rail.local);
        std::mem::swap(&mut self.words, &mut rail.words);
        std::mem::swap(&mut self.peer, &mut rail.peer);
        std::mem::swap(&mut self.device, &mut rail.device);
        std::mem::swap(&mut self.gid, &mut rail.gid);
        std::mem::swap(&mut self.listed_at, &mut rail.listed_at);
        std::mem::swap(&mut self.places, &mut rail.places);
        self.former_keys.push(rail.peer.region.rkey);
        for stripe in &mut self.stripes.queues {
            stripe.rail = match stripe.rail {
                None => Some(with),
                Some(at) if at == with => None,
                other => other,
            };
        }
        // The queue pairs of the rail share its speed, and the main one is one more.
        let of_rail = self.stripes.queues.iter_mut().filter(|stripe| stripe.rail.is_none());
        let (mut count, mut speed) = (1, 0);
        for stripe in of_rail {
            (count, speed) = (count + 1, speed + stripe.weight);
        }
        self.weight = (speed / count).max(1);
        let of_rail = self.stripes.queues.iter_mut().filter(|stripe| stripe.rail.is_none());
        of_rail.for_each(|stripe| stripe.weight = self.weight);
        self.stripes.weigh(self.weight);
        let why = self.failover.as_ref().map(|failover| failover.why.to_string());
        self.tell_of_lost_rail(with, why.unwrap_or_default());
    }

    /// The peer has taken over. So many messages of this side have arrived there: see
    /// [`TakenOver`](super::control::ControlMessage::TakenOver).
    pub fn taken_over(&mut self, arrived: u32, is_exact: bool, out: &mut Completions) {
        let Some(Failover { to, .. }) = self.failover.take_if(|failover| failover.has_taken_over) else {
            let why = "it goes on over another rail, though no rail is lost";
            return self.fail(LinkFailure::Protocol(why.into()));
        };
        if self.main.has_lost(arrived, is_exact) {
            return self.fail(self.lost_acknowledged(to));
        }
        let former = &self.rails[to];
        let (shared, device) = (&self.shared, self.device);
        let translation = Translation {
            buffer: &former.local,
            words: [former.peer.totals(), self.peer.totals()],
            pool: [former.peer.region.rkey, self.peer.region.rkey],
            key_of: |source: &_| shared.local_key(source, device),
        };
        if let Err(why) = self.main.complete_arrived(arrived, self.id, out) {
            return self.fail(LinkFailure::Protocol(why.into()));
        }
        let is_resumed = self.main.resume(&mut self.local, &translation).is_ok();
        if !is_resumed || !self.control.resume(&mut self.local) {
            return self.fail(self.refusal_of(self.main.number()));
        }
        out.push(self.id, Event::Repaired);
        // Parts that were under way on the lost rail.
        (self.stripes.is_recovering, self.stripes.is_changed) = (true, true);
    }

    /// The failure of a link whose rail has acknowledged requests that may not have landed.
    pub fn lost_acknowledged(&self, rail: usize) -> LinkFailure {
        let device = self.shared.devices[self.rails[rail].device].name().to_owned();
        let event = "the rail acknowledged what did not arrive";
        LinkFailure::Device { device, event, cause: "one of its two devices failed: see the logs of both" }
    }

    /// The rail of which this queue pair is a backup.
    pub fn backup_at(&self, number: u8) -> Option<usize> {
        let has = |backup: &Backup| [backup.main.number(), backup.control.number()].contains(&number);
        self.rails.iter().position(|rail| rail.backup.as_ref().is_some_and(has))
    }

    /// Something came on a backup queue pair.
    #[cold]
    pub fn backup_completed(&mut self, number: u8, is_receive: bool, wc: &ibv_wc) {
        let Some(at) = self.backup_at(number) else { return };
        let Some(backup) = &mut self.rails[at].backup else { return };
        if !is_receive {
            return backup.control.done();
        }
        if number != backup.control.number() || wc.byte_len as usize != BYTES {
            let why = "it sent something else than a control message to a backup queue pair";
            return self.fail(LinkFailure::Protocol(why.into()));
        }
        backup.control_messages += 1;
        if !self.is_up() {
            return;
        }
        let device = self.device_name().to_owned();
        let cause = "the peer has lost its end: see its log";
        self.lose_first_rail(LinkFailure::Device { device, event: "the first rail is lost", cause });
        match &mut self.failover {
            // The peer may have lost more rails.
            Some(failover) if !failover.has_taken_over => failover.to = at,
            Some(Failover { why, .. }) => {
                let why = why.clone();
                self.fail(why);
            }
            None => {}
        }
    }

    /// The key that opens the peer's pool on the present first rail, for a key of an earlier one.
    #[cold]
    pub fn current_key(&self, granted: u32) -> u32 {
        if self.former_keys.contains(&granted) { self.peer.region.rkey } else { granted }
    }
}
