//! The rails of a link besides the first one, and their loss.
//!
//! A rail is a pair of devices, one of each side. The first rail has the control queue pair and all
//! that is short. A large write has a part on each rail (`stripes`). The loss of the first rail is
//! in `failover`.
//!
//! **A lost rail is not a lost link.** A side that can't use a rail any more stops its queue pairs
//! there, waits until all receives have completed, and destroys them. So nothing of the peer lands
//! there from then on, and all is counted that has. It tells the peer, for each stripe, how many
//! parts have landed, and how many of its own are acknowledged. The peer does the same. Then each
//! side knows which of its parts are missing. It writes these again on the first rail, and says so
//! when they are done. No write whose part is missing was reported to anyone. So the grant stands,
//! and the same bytes are written to it.
//!
//! A part that was acknowledged and has not landed is lost, as its source may have another owner.
//! Only a device that fails, or is late by seconds, does that: the link ends.
//!
//! A part that has landed is never written again, as its memory may have another owner by now.

use super::VerbsShared;
use super::address::RailAddress;
use super::buffers::LinkBuffer;
use super::cq::CqPlaces;
use super::data_queue::{PostedOp, RemoteAddr};
use super::device::Gid;
use super::events::LostRail;
use super::failover::{Backup, DRAIN_TICKS};
use super::link::VerbsLinkInner;
use super::stripes::{AnnouncedLength, Stripe};
use super::sys::IBV_WC_GENERAL_ERR;
use crate::fabric::{Completions, LinkFailure, PostError};
use crate::memory::Tensor;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The time, in ticks of 100 ms, that a detached link has for a lost rail. Both sides drain the
/// rail, one after the other at worst.
const LOSS_TICKS: u32 = 3 * DRAIN_TICKS;

/// What a link has of a rail besides the first one. Dropped after its queue pairs.
pub(super) struct LinkRail {
    // Dropped in this order: queue pairs, the memory that queue pairs name, their places.
    /// None if the rail is lost, or a link may have no backup.
    pub backup: Option<Backup>,
    pub local: LinkBuffer,
    pub words: LinkBuffer,
    /// The place of this side's device.
    pub device: usize,
    /// The place of the device in [`LinkDevices`].
    pub listed_at: usize,
    /// The GID of this side's port.
    pub gid: Gid,
    pub peer: RailAddress,
    pub is_lost: bool,
    pub places: CqPlaces,
}

/// The devices of this side on the rails of a link, and which are in use.
#[derive(Debug)]
pub struct LinkDevices {
    /// The first rail's, then the others'.
    names: Vec<String>,
    /// A bit for each that is lost.
    lost: AtomicU32,
}

impl LinkDevices {
    pub(super) fn new(names: Vec<String>) -> Arc<Self> {
        Arc::new(LinkDevices { names, lost: AtomicU32::new(0) })
    }

    /// The names of those in use, the first rail's first.
    pub fn in_use(&self) -> Vec<String> {
        let lost = self.lost.load(Ordering::Relaxed);
        let left = self.names.iter().enumerate().filter(|(at, _)| lost >> at & 1 == 0);
        left.map(|(_, name)| name.clone()).collect()
    }

    fn lose(&self, at: usize) {
        self.lost.fetch_or(1 << at, Ordering::Relaxed);
    }
}

/// The bytes of a part.
#[derive(Clone, Copy)]
pub(super) struct PartBounds {
    /// Bytes of the source before it.
    pub skip: u64,
    pub len: u64,
    /// Where it goes at the peer.
    pub to: u64,
}

/// The state of a stripe whose rail is lost.
pub(super) struct RailLoss {
    is_untold: bool,
    /// The peer has lost it too, so nothing lands there any more.
    is_mutual: bool,
    /// The parts that are still to be written again, oldest first.
    missing: VecDeque<(Tensor, PartBounds)>,
    /// All parts of this side for the stripe, modulo 2^32.
    total: u32,
    /// The number of parts, among all that are written again, that must be done before the peer is
    /// told.
    told_after: Option<u32>,
}

impl RailLoss {
    fn is_recovered(&self) -> bool {
        !self.is_untold && self.is_mutual && self.missing.is_empty() && self.told_after.is_none()
    }

    /// The peer has lost the stripe. So many parts of this side have landed there, of which `done`
    /// are done.
    ///
    /// # Errors
    /// The rule that the peer breaks.
    fn hear(&mut self, landed: u32, done: u32) -> Result<(), &'static str> {
        self.is_mutual = true;
        let here = usize::try_from(landed.wrapping_sub(done) as i32).unwrap_or(0);
        if here > self.missing.len() {
            return Err("it counted parts of writes that were not sent");
        }
        self.missing.drain(..here);
        Ok(())
    }
}

impl Stripe {
    /// Whether its queue pair may still tell of what has landed.
    pub fn is_draining(&self) -> bool {
        self.stopped_at.is_some() && self.loss.is_none()
    }

    /// Whether something of its loss is left to do.
    fn is_recovering(&self) -> bool {
        self.is_draining() || self.loss.as_ref().is_some_and(|loss| !loss.is_recovered())
    }

    /// Its queue pair is destroyed.
    fn lose(&mut self) {
        let missing: VecDeque<_> = self.queue.take_parts().zip(self.parts.drain(..)).collect();
        let total = self.queue.parts_done.wrapping_add(missing.len() as u32);
        self.loss = Some(RailLoss { is_untold: true, is_mutual: false, missing, total, told_after: None });
    }
}

/// The buffer of the queue pairs of a rail.
pub(super) fn buffer_of<'a>(
    rail: Option<usize>,
    first: &'a mut LinkBuffer,
    rails: &'a mut [LinkRail],
) -> &'a mut LinkBuffer {
    match rail {
        None => first,
        Some(at) => &mut rails[at].local,
    }
}

impl VerbsShared {
    /// The key of a source for a device of this side.
    ///
    /// # Errors
    /// If the source is neither in the pool nor registered.
    pub fn local_key(&self, source: &Tensor, device: usize) -> Result<u32, PostError> {
        let bytes = source.bytes();
        if self.is_ours(bytes.as_ptr() as u64, bytes.len() as u64) {
            return Ok(self.devices[device].region.lkey);
        }
        self.registrations.key_of(source, device).ok_or(PostError::Refused(
            "the source is not in the pool that this fabric shares, nor registered",
        ))
    }
}

impl VerbsLinkInner {
    /// A post lacks room: asks for completions of finished requests.
    pub fn make_room(&mut self) {
        self.main.flush(&self.peer.region, true);
        for stripe in &mut self.stripes.queues {
            let peer = stripe.rail.map_or(&self.peer, |rail| &self.rails[rail].peer);
            stripe.queue.flush(&peer.region, true);
        }
    }

    /// Whether the peer's devices have acknowledged every post, or never will.
    pub fn is_flushed(&mut self) -> bool {
        if !self.is_up() {
            return true;
        }
        // What a lost rail has left is posted again, and the peer is told of its end.
        let is_losing = self.stripes.is_recovering || self.failover.is_some();
        if is_losing || self.rails.iter().any(|rail| rail.is_lost) && !self.control.is_idle() {
            return false;
        }
        self.make_room();
        self.queues().all(|queue| queue.is_idle())
    }

    /// The place of the stripe with this number.
    #[inline]
    pub fn stripe_at(&self, number: u8) -> Option<usize> {
        self.stripes.queues.iter().position(|stripe| stripe.queue.number() == number)
    }

    /// The rail of the stripe with this number; `None` for a queue pair of the first rail.
    pub fn rail_of(&self, number: u8) -> Option<usize> {
        self.stripe_at(number).and_then(|at| self.stripes.queues[at].rail)
    }

    /// The failure of a queue pair that has refused a request though there was room.
    pub fn refusal_of(&self, number: u8) -> LinkFailure {
        self.completion(number, "request", IBV_WC_GENERAL_ERR, 0)
    }

    /// Whether something of a lost rail is left to do, and a detached link has time for it.
    pub fn is_losing_in_time(&self) -> bool {
        let is_losing = self.stripes.is_recovering || self.failover.is_some();
        is_losing && self.detached_at.is_some_and(|since| self.ticks_since(since) <= LOSS_TICKS)
    }

    /// Whether a detached link has time to leave: so many ticks, after what it does for lost rails.
    pub fn has_time(&self, ticks: u32) -> bool {
        let since = self.recovered_at.or(self.detached_at);
        self.is_losing_in_time() || since.is_some_and(|since| self.ticks_since(since) <= ticks)
    }

    fn ticks_since(&self, tick: u32) -> u32 {
        self.shared.watcher.ticks().wrapping_sub(tick)
    }

    /// Goes on without a rail.
    #[cold]
    pub fn lose_rail(&mut self, at: usize, why: &dyn std::fmt::Display) {
        if !self.phase.is_up() || self.rails[at].is_lost {
            return;
        }
        if let Some(mut backup) = self.rails[at].backup.take() {
            backup.main.destroy();
            if backup.main.is_lost {
                self.rails[at].backup = Some(backup);
                return self.fail(self.not_stopped(self.rails[at].device));
            }
        }
        self.stop_stripes(Some(at));
        self.tell_of_lost_rail(at, why.to_string());
    }

    /// Stops the stripes of a rail; `None` is the first one. Each is lost once it is drained.
    pub fn stop_stripes(&mut self, rail: Option<usize>) {
        let now = self.shared.watcher.ticks();
        for stripe in self.stripes.queues.iter_mut().filter(|it| it.rail == rail && it.stopped_at.is_none()) {
            stripe.queue.stop();
            stripe.stopped_at = Some(now);
        }
        self.stripes.weigh(self.weight);
        (self.stripes.is_recovering, self.stripes.is_changed) = (true, true);
    }

    /// Loses a stripe that is drained, or whose device completes nothing any more.
    fn end_drain(&mut self, at: usize, emptied: bool) {
        let stripe = &mut self.stripes.queues[at];
        let ticks = stripe.stopped_at.map_or(0, |since| self.shared.watcher.ticks().wrapping_sub(since));
        // Others may fill the completion queues without an end.
        let is_late = ticks > DRAIN_TICKS && emptied || ticks > 2 * DRAIN_TICKS;
        if !stripe.queue.is_drained() && !is_late {
            return;
        }
        stripe.queue.destroy();
        if stripe.queue.is_lost {
            let device = stripe.rail.map_or(self.device, |rail| self.rails[rail].device);
            return self.fail(self.not_stopped(device));
        }
        stripe.lose();
        self.stripes.is_changed = true;
        self.compare_counts(at);
    }

    /// The failure of a device that can't stop a queue pair.
    pub fn not_stopped(&self, device: usize) -> LinkFailure {
        let device = self.shared.devices[device].name().to_owned();
        let cause = "the driver or the device: see the kernel's log (`dmesg`)";
        LinkFailure::Device { device, event: "a queue pair can't be stopped", cause }
    }

    /// Marks a rail as lost, and has the thread for device events log it.
    pub fn tell_of_lost_rail(&mut self, at: usize, why: String) {
        let rail = &mut self.rails[at];
        rail.is_lost = true;
        self.devices.lose(rail.listed_at);
        self.shared.lost_rails.fetch_add(1, Ordering::Relaxed);
        self.shared.watcher.log(LostRail {
            device: self.shared.devices[rail.device].name().to_owned(),
            between: [rail.gid, Gid(rail.peer.gid.raw)],
            why,
            left: self.devices.in_use().join(", "),
        });
    }

    /// The peer has lost a stripe. So many parts of this side have landed there, and so many of the
    /// peer's own are done.
    pub fn stripe_lost(&mut self, number: u8, landed: u32, done: u32) {
        let at = self.stripe_at(number);
        let Some((at, rail)) = at.and_then(|at| Some((at, self.stripes.queues[at].rail?))) else {
            return self.fail(LinkFailure::Protocol("it lost a stripe that the link does not have".into()));
        };
        self.lose_rail(rail, &"the peer has lost its end");
        if self.stripes.queues[at].heard.replace((landed, done)).is_some() {
            return self.fail(LinkFailure::Protocol("it lost a stripe twice".into()));
        }
        self.compare_counts(at);
    }

    /// Both sides have lost a stripe: finds what is missing.
    fn compare_counts(&mut self, at: usize) {
        let stripe = &mut self.stripes.queues[at];
        let (Some(rail), Some(loss), Some((landed, done))) = (stripe.rail, &mut stripe.loss, stripe.heard)
        else {
            return;
        };
        if let Err(why) = loss.hear(landed, stripe.queue.parts_done) {
            return self.fail(LinkFailure::Protocol(why.into()));
        }
        if done.wrapping_sub(self.arrivals.parts[at].count) as i32 > 0 {
            return self.fail(self.lost_acknowledged(rail));
        }
        (self.stripes.is_recovering, self.stripes.is_changed) = (true, true);
    }

    /// The peer has written parts of a lost stripe.
    pub fn parts_written(&mut self, number: u8, count: u32, out: &mut Completions) {
        match self.stripe_at(number).filter(|at| self.stripes.queues[*at].loss.is_some()) {
            Some(at) => self.arrivals.landed_so_far(self.id, at, count, out),
            None => self.fail(LinkFailure::Protocol("it wrote parts of a stripe that is not lost".into())),
        }
    }

    /// Continues what lost rails have left to do.
    pub fn recover_losses(&mut self, emptied: bool) {
        // What lacks room goes on with a completion, which makes it.
        self.stripes.is_changed = false;
        for at in 0..self.stripes.queues.len() {
            if !self.is_up() {
                self.stripes.is_recovering = false;
                return;
            }
            if self.stripes.queues[at].is_draining() {
                self.end_drain(at, emptied);
                continue;
            }
            self.tell_of_loss(at);
            self.write_missing(at);
            self.tell_of_written(at);
        }
        self.stripes.is_recovering = self.stripes.queues.iter().any(Stripe::is_recovering);
    }

    fn tell_of_loss(&mut self, at: usize) {
        let stripe = &mut self.stripes.queues[at];
        let (number, done) = (stripe.queue.number(), stripe.queue.parts_done);
        let Some(loss) = stripe.loss.as_mut().filter(|loss| loss.is_untold) else { return };
        let landed = self.arrivals.parts[at].count;
        loss.is_untold = !self.control.send_stripe_lost(&mut self.local, number, landed, done);
    }

    fn write_missing(&mut self, at: usize) {
        loop {
            let Some(loss) = self.stripes.queues[at].loss.as_mut().filter(|loss| loss.is_mutual) else {
                return;
            };
            let Some((source, bounds)) = loss.missing.front() else { return };
            let (source, PartBounds { skip, len, to }) = (source.clone(), *bounds);
            let rkey = self.peer.region.rkey;
            let posted = self.shared.local_key(&source, self.device).and_then(|lkey| {
                self.main.post_write(
                    &mut self.local,
                    (source.bytes().as_ptr() as u64 + skip, len, lkey),
                    RemoteAddr { addr: to, rkey },
                    None,
                    self.shared.max_message,
                    AnnouncedLength::None,
                    PostedOp::Part(source),
                )
            });
            match posted {
                Ok(()) => {}
                Err(PostError::Full) => return self.make_room(),
                Err(PostError::Down) => return self.refused(self.main.number()),
                Err(PostError::Refused(why)) => return self.fail(LinkFailure::Refused(why)),
            }
            self.stripes.again = self.stripes.again.wrapping_add(1);
            if let Some(loss) = &mut self.stripes.queues[at].loss {
                loss.missing.pop_front();
                loss.told_after = Some(self.stripes.again);
            }
        }
    }

    fn tell_of_written(&mut self, at: usize) {
        let stripe = &mut self.stripes.queues[at];
        let number = stripe.queue.number();
        let Some(loss) = stripe.loss.as_mut().filter(|loss| loss.missing.is_empty()) else { return };
        let Some(after) = loss.told_after else { return };
        if self.main.parts_done.wrapping_sub(after) as i32 >= 0
            && self.control.send_parts_written(&mut self.local, number, loss.total)
        {
            loss.told_after = None;
        }
    }

    /// Looks whether asynchronous events have reported queue pairs of the rails.
    pub fn look_at_rails(&mut self) {
        for at in 0..self.rails.len() {
            let device = self.shared.devices[self.rails[at].device].name();
            let of_rail = self.stripes.queues.iter().filter(|stripe| stripe.rail == Some(at));
            let of_data = of_rail.map(|stripe| &stripe.queue).find_map(|queue| queue.failure(device));
            let backup = self.rails[at].backup.as_ref();
            let of_backup = || backup.and_then(|backup| backup.failure(device));
            match of_data.or_else(of_backup) {
                // The peer has used a key or bounds that were not granted: no failure of the rail.
                Some(why @ LinkFailure::Protocol(_)) => return self.fail(why),
                Some(why) => self.lose_rail(at, &why),
                None => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loss() -> RailLoss {
        let missing = VecDeque::new();
        RailLoss { is_untold: false, is_mutual: false, missing, total: 0, told_after: None }
    }

    #[test]
    fn a_peer_that_counts_what_was_not_sent_is_refused() {
        assert!(loss().hear(6, 5).is_err());
        assert!(loss().hear(5, 5).is_ok() && loss().hear(3, 5).is_ok());
        assert!(loss().hear(0, u32::MAX).is_err(), "counts wrap");
    }

    #[test]
    fn the_devices_of_a_link_are_those_that_are_left() {
        let devices = LinkDevices::new(["a", "b", "c"].map(String::from).into());
        devices.lose(1);
        assert_eq!(devices.in_use(), ["a", "c"]);
    }
}
