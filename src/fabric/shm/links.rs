//! The links of a port. Each is active or idle.
//!
//! Each poll looks at the active links. A link without traffic becomes idle (see `wakeup::idle`):
//! its peer then rings the port's doorbell. Peers can't be relied on, so polls also check the idle
//! links one after the other, now and then.
//!
//! To mark links idle takes a heavy barrier. Links therefore become idle many at a time, or when
//! their poller is about to sleep. A port with a few links makes no system call on its own.

use crate::fabric::shm::link::ShmLinkInner;
use crate::fabric::shm::wakeup::barrier;
use crate::fabric::shm::wakeup::doorbell::PLACES;
use crate::fabric::shm::wakeup::doorbells::OwnDoorbell;
use crate::fabric::{Completions, FabricError, FabricKind, LinkId};
use std::collections::VecDeque;
use std::sync::Arc;

/// Polls of active links between two searches for links without traffic: some 300 us of polling.
const ROUND: usize = 1 << 16;
/// The smallest number of links that become idle at once while the poller is awake.
const MIN_IDLE_BATCH: usize = 8;
/// Polls between two checks of an idle link.
const CHECK_EVERY: u32 = 64;
/// Idle links that one poll checks while the port is armed, since polls are rare then.
const CHECKS_WHEN_ARMED: usize = 16;

/// A [`LinkId`] has the link's place in its low bits, and above them the number of earlier links of
/// the place.
const PLACE_BITS: u32 = PLACES.trailing_zeros();

#[derive(Default)]
struct LinkPlace {
    link: Option<Box<ShmLinkInner>>,
    /// Links that have had this place before.
    before: u32,
    is_active: bool,
}

pub(super) struct PortLinks {
    places: Vec<LinkPlace>,
    /// Free places, oldest first.
    free: VecDeque<u16>,
    /// Places of the active links.
    active: Vec<u16>,
    /// Active links polled since the last search for links without traffic.
    polled: usize,
    polls: u32,
    /// Place of the link that is checked next, active or not.
    next_check: usize,
    /// Every link is idle, and nothing has arrived since.
    armed: bool,
    doorbell: Arc<OwnDoorbell>,
    /// Heavy barriers so far.
    barriers: u64,
}

fn place_of(id: LinkId) -> usize {
    id.0 as usize % PLACES
}

impl PortLinks {
    /// A port without links.
    pub(super) fn new(doorbell: Arc<OwnDoorbell>) -> Self {
        PortLinks {
            places: Vec::new(),
            free: VecDeque::new(),
            active: Vec::new(),
            polled: 0,
            polls: 0,
            next_check: 0,
            armed: false,
            doorbell,
            barriers: 0,
        }
    }

    /// Adds a link, active. No other link ever has the same id.
    ///
    /// # Errors
    /// If every place is taken.
    pub(super) fn insert(&mut self, mut link: Box<ShmLinkInner>) -> Result<LinkId, FabricError> {
        let Some(place) = self.free_place() else {
            return Err(FabricError::Option {
                fabric: FabricKind::Shm,
                option: "links of a port",
                value: PLACES as u64 + 1,
                allowed: "4096 at most: spread the peers over more pollers",
            });
        };
        let id = LinkId(self.places[place].before << PLACE_BITS | place as u32);
        link.attach(id, &self.doorbell, place);
        if !link.has_barriers {
            self.doorbell.set_barriers_unsupported();
        }
        self.places[place].link = Some(link);
        self.activate(place);
        // The peer does not ring for an active link, so a sleeping poller must be woken.
        self.clear_armed(true);
        Ok(id)
    }

    fn free_place(&mut self) -> Option<usize> {
        if let Some(place) = self.free.pop_front() {
            return Some(usize::from(place));
        }
        if self.places.len() == PLACES {
            return None;
        }
        self.places.push(LinkPlace::default());
        Some(self.places.len() - 1)
    }

    pub(super) fn remove(&mut self, id: LinkId) -> Option<Box<ShmLinkInner>> {
        self.get(id)?;
        let index = place_of(id);
        let place = &mut self.places[index];
        let link = place.link.take();
        place.before += 1;
        // A place whose ids are used up stays empty.
        if place.before < 1 << (LinkId::BITS - PLACE_BITS) {
            self.free.push_back(index as u16);
        }
        if std::mem::take(&mut place.is_active) {
            self.active.retain(|&other| usize::from(other) != index);
        }
        link
    }

    /// The link with this id, if it is here.
    pub(super) fn get(&self, id: LinkId) -> Option<&ShmLinkInner> {
        self.places.get(place_of(id))?.link.as_deref().filter(|link| link.id == id)
    }

    /// The link with this id, if it is here.
    #[inline]
    pub(super) fn get_mut(&mut self, id: LinkId) -> Option<&mut ShmLinkInner> {
        self.places.get_mut(place_of(id))?.link.as_deref_mut().filter(|link| link.id == id)
    }

    /// The link with this id, if it is here and active.
    #[inline]
    pub(super) fn get_active(&mut self, id: LinkId) -> Option<&mut ShmLinkInner> {
        let LinkPlace { link, is_active, .. } = self.places.get_mut(place_of(id))?;
        link.as_deref_mut().filter(|link| *is_active && link.id == id)
    }

    /// Whether a poll looks at some links.
    #[inline]
    pub(super) fn has_active(&self) -> bool {
        !self.active.is_empty()
    }

    /// Polls so far, modulo 2^32.
    pub(super) fn polls(&self) -> u32 {
        self.polls
    }

    /// Polls the active links, and the idle links whose peers have rung.
    #[inline]
    pub(super) fn poll(&mut self, out: &mut Completions) {
        let before = out.len();
        for &place in &self.active {
            if let Some(link) = &mut self.places[usize::from(place)].link {
                link.poll(out);
            }
        }
        if self.doorbell.doorbell.is_rung() {
            self.drain_doorbell(out);
        }
        self.polled += self.active.len();
        self.polls = self.polls.wrapping_add(1);
        if self.polls.is_multiple_of(CHECK_EVERY) || self.polled >= ROUND || self.armed {
            self.check_idle_links(out.len() > before);
        }
    }

    /// Polls the idle links whose peers have rung. Those with traffic become active.
    #[cold]
    fn drain_doorbell(&mut self, out: &mut Completions) {
        let doorbell = Arc::clone(&self.doorbell);
        doorbell.doorbell.drain(|index| {
            let Some(place) = self.places.get_mut(index) else { return };
            let Some(link) = &mut place.link else { return };
            if place.is_active {
                return;
            }
            let posted = std::mem::take(&mut link.had_traffic);
            let before = out.len();
            if link.poll_once(out) {
                // Without a completion, the thread that armed the port would sleep although there
                // is more to do.
                self.clear_armed(out.len() == before);
                self.activate(index);
            } else if posted && !self.armed {
                // Only this side has posted. The link becomes active so that the peer need not ring
                // for each slot that it takes.
                self.activate(index);
            }
        });
    }

    /// The rare part of a poll, or each poll of an armed port. `came`: the poll has returned
    /// completions.
    #[cold]
    fn check_idle_links(&mut self, came: bool) {
        self.armed &= !came;
        if self.polled >= ROUND {
            self.polled = 0;
            self.mark_quiet_links_idle();
        }
        let turns = if self.armed { CHECKS_WHEN_ARMED } else { 1 };
        for _ in 0..turns.min(self.places.len()) {
            self.next_check = if self.next_check + 1 < self.places.len() { self.next_check + 1 } else { 0 };
            let place = &self.places[self.next_check];
            if !place.is_active && place.link.as_ref().is_some_and(|link| link.has_news()) {
                self.clear_armed(true);
                self.activate(self.next_check);
            }
        }
    }

    /// Ends the armed state. With `notify`, no completion tells the caller, so this wakes it.
    fn clear_armed(&mut self, notify: bool) {
        if std::mem::take(&mut self.armed) && notify {
            self.doorbell.doorbell.events.notify();
        }
    }

    /// Makes a link active: each poll looks at it from now on.
    fn activate(&mut self, index: usize) {
        let place = &mut self.places[index];
        if place.is_active {
            return;
        }
        if let Some(link) = &mut place.link {
            link.mark_active();
            place.is_active = true;
            self.active.push(index as u16);
        }
    }

    /// Makes a link active if it has something for a poll, and wakes its poller: something happened
    /// to the link on this side.
    #[cold]
    pub(super) fn activate_if_news(&mut self, id: LinkId) {
        if self.get(id).is_some_and(ShmLinkInner::has_news) {
            self.activate(place_of(id));
            self.clear_armed(true);
        }
    }

    /// Marks the links idle that had no traffic for a round, if they are enough for a barrier.
    fn mark_quiet_links_idle(&mut self) {
        let places = &mut self.places;
        let mut quiet = 0;
        for &place in &self.active {
            quiet +=
                usize::from(places[usize::from(place)].link.as_ref().is_some_and(|link| !link.had_traffic));
        }
        if quiet >= MIN_IDLE_BATCH {
            self.mark_idle_if(|link| !link.had_traffic);
        }
        for &place in &self.active {
            if let Some(link) = &mut self.places[usize::from(place)].link {
                link.had_traffic = false;
            }
        }
    }

    /// Marks the links idle that `which` selects, except those that have something for a poll.
    fn mark_idle_if(&mut self, which: impl Fn(&ShmLinkInner) -> bool) {
        let PortLinks { places, active, doorbell, barriers, .. } = self;
        for &index in active.iter() {
            if let Some(link) = places[usize::from(index)].link.as_deref_mut().filter(|link| which(link)) {
                link.mark_idle(doorbell.doorbell_ref(usize::from(index)));
            }
        }
        *barriers += 1;
        if !barrier::heavy() {
            doorbell.set_barriers_unsupported();
        }
        active.retain(|&index| {
            let place = &mut places[usize::from(index)];
            let Some(link) = place.link.as_deref_mut() else { return false };
            if !which(link) {
                return true;
            }
            place.is_active = link.has_news();
            if place.is_active {
                link.mark_active();
            }
            place.is_active
        });
    }

    /// See [`Port::arm`](crate::fabric::Port::arm).
    pub(super) fn arm(&mut self) -> bool {
        if !self.active.is_empty() {
            self.mark_idle_if(|_| true);
        }
        self.armed = self.active.is_empty();
        self.armed && !self.doorbell.doorbell.is_rung()
    }
}

#[cfg(test)]
mod tests;
