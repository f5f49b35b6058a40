//! The links of a port: where each is, and which of them every poll polled at.
//!
//! A busy link is looked at in each poll. One that has been quiet is marked cold (`cold`) and
//! looked at when its peer rings, and, since peers can't be relied on, now and then in next_check.
//! Marking needs a heavy barrier, so links go cold many at a time, or when their poller is about to
//! sleep; a port with a few links never makes a system call on its own.

use crate::fabric::shm::link::ShmLinkInner;
use crate::fabric::shm::wakeup::doorbell::PLACES;
use crate::fabric::shm::wakeup::doorbells::OwnDoorbell;
use crate::fabric::shm::wakeup::fence;
use crate::fabric::{Completions, FabricError, FabricKind, LinkId};
use std::collections::VecDeque;
use std::sync::Arc;

/// Looks at busy links between two rounds in which quiet ones may go cold: some 300 us of polling.
const ROUND: usize = 1 << 16;
/// Links that go cold at once while the poller is awake, at least.
const MIN_IDLE_BATCH: usize = 8;
/// Polls between two polled at a cold link.
const CHECK_EVERY: u32 = 64;
/// Places that an idle poll polled at while the port is armed: then polls are rare.
const CHECKS_WHEN_ARMED: usize = 16;

/// A link's number: its place in the low bits, and above how many links have had the place before.
const PLACE_BITS: u32 = PLACES.trailing_zeros();

#[derive(Default)]
struct LinkPlace {
    link: Option<Box<ShmLinkInner>>,
    /// Links that have had this place before.
    before: u32,
    is_active: bool,
}

/// The links of a port.
pub(super) struct PortLinks {
    places: Vec<LinkPlace>,
    /// Places that are free again, the one that is so longest first.
    free: VecDeque<u16>,
    /// Places of the links that each poll polled at.
    active: Vec<u16>,
    /// Looks at busy links since quiet ones were last looked for.
    polled: usize,
    polls: u32,
    /// The place whose next_check it is to be looked at, active or not.
    next_check: usize,
    /// Every link was cold and without news, and nothing came since.
    armed: bool,
    bell: Arc<OwnDoorbell>,
    /// Heavy barriers made so far.
    barriers: u64,
}

fn place_of(id: LinkId) -> usize {
    id.0 as usize % PLACES
}

impl PortLinks {
    /// None yet.
    pub(super) fn new(bell: Arc<OwnDoorbell>) -> Self {
        PortLinks {
            places: Vec::new(),
            free: VecDeque::new(),
            active: Vec::new(),
            polled: 0,
            polls: 0,
            next_check: 0,
            armed: false,
            bell,
            barriers: 0,
        }
    }

    /// Takes a link in, active. Its number is never another's.
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
        link.attach(id, &self.bell, place);
        if !link.fenced {
            self.bell.set_barriers_unsupported();
        }
        self.places[place].link = Some(link);
        self.activate(place);
        // Nobody rings for what comes on it.
        self.disarm(true);
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

    /// Takes a link out.
    pub(super) fn remove(&mut self, id: LinkId) -> Option<Box<ShmLinkInner>> {
        self.get(id)?;
        let index = place_of(id);
        let place = &mut self.places[index];
        let link = place.link.take();
        place.before += 1;
        // A place whose numbers are used up is left empty for good.
        if place.before < 1 << (u32::BITS - PLACE_BITS) {
            self.free.push_back(index as u16);
        }
        if std::mem::take(&mut place.is_active) {
            self.active.retain(|&other| usize::from(other) != index);
        }
        link
    }

    /// A link.
    pub(super) fn get(&self, id: LinkId) -> Option<&ShmLinkInner> {
        self.places.get(place_of(id))?.link.as_deref().filter(|link| link.id == id)
    }

    /// A link.
    #[inline]
    pub(super) fn get_mut(&mut self, id: LinkId) -> Option<&mut ShmLinkInner> {
        self.places.get_mut(place_of(id))?.link.as_deref_mut().filter(|link| link.id == id)
    }

    /// Polls so far, modulo 2^32.
    pub(super) fn polls(&self) -> u32 {
        self.polls
    }

    /// Looks at the busy links, and at those for which the doorbell was rung.
    #[inline]
    pub(super) fn poll(&mut self, out: &mut Completions) {
        let before = out.len();
        for &place in &self.active {
            if let Some(link) = &mut self.places[usize::from(place)].link {
                link.poll(out);
            }
        }
        if self.bell.bell.is_rung() {
            self.drain_doorbell(out);
        }
        self.polled += self.active.len();
        self.polls = self.polls.wrapping_add(1);
        if self.polls.is_multiple_of(CHECK_EVERY) || self.polled >= ROUND || self.armed {
            self.check_idle_links(out.len() > before);
        }
    }

    /// Looks at links that have rung; those that have something are active from now on.
    #[cold]
    fn drain_doorbell(&mut self, out: &mut Completions) {
        let bell = Arc::clone(&self.bell);
        bell.bell.drain(|index| {
            let Some(place) = self.places.get_mut(index) else { return };
            let Some(link) = &mut place.link else { return };
            if place.is_active {
                return;
            }
            let posted = std::mem::take(&mut link.had_traffic);
            let before = out.len();
            if link.poll_once(out) {
                // Whoever armed the port and hears of no completion would sleep, though there is
                // more to do.
                self.disarm(out.len() == before);
                self.activate(index);
            } else if posted && !self.armed {
                // Traffic of this side alone: its peer should not have to ring each time that it
                // took something.
                self.activate(index);
            }
        });
    }

    /// What a poll does now and then, or while the port is armed. `came`: the poll has brought
    /// something.
    #[cold]
    fn check_idle_links(&mut self, came: bool) {
        self.armed &= !came;
        if self.polled >= ROUND {
            self.polled = 0;
            self.idle_quiet_links();
        }
        let turns = if self.armed { CHECKS_WHEN_ARMED } else { 1 };
        for _ in 0..turns.min(self.places.len()) {
            self.next_check = if self.next_check + 1 < self.places.len() { self.next_check + 1 } else { 0 };
            let place = &self.places[self.next_check];
            if !place.is_active && place.link.as_ref().is_some_and(|link| link.has_news()) {
                self.disarm(true);
                self.activate(self.next_check);
            }
        }
    }

    /// The port is not armed any more. `unheard`: and nobody would notice.
    fn disarm(&mut self, unheard: bool) {
        if std::mem::take(&mut self.armed) && unheard {
            self.bell.bell.rouse();
        }
    }

    /// Has each poll look at a link from now on.
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

    /// Has the next poll look at a link, and ends the sleep of whoever would make it: something
    /// happened to the link on this side.
    #[cold]
    pub(super) fn activate_if_news(&mut self, id: LinkId) {
        if self.get(id).is_some_and(ShmLinkInner::has_news) {
            self.activate(place_of(id));
            self.disarm(true);
        }
    }

    /// Lets the links go cold that were quiet for a round, if that is worth a barrier.
    fn idle_quiet_links(&mut self) {
        let places = &mut self.places;
        let mut quiet = 0;
        for &place in &self.active {
            quiet +=
                usize::from(places[usize::from(place)].link.as_ref().is_some_and(|link| !link.had_traffic));
        }
        if quiet >= MIN_IDLE_BATCH {
            self.idle_links_if(|link| !link.had_traffic);
        }
        for &place in &self.active {
            if let Some(link) = &mut self.places[usize::from(place)].link {
                link.had_traffic = false;
            }
        }
    }

    /// Lets links go cold, but for those that have news.
    fn idle_links_if(&mut self, which: impl Fn(&ShmLinkInner) -> bool) {
        let PortLinks { places, active, bell, barriers, .. } = self;
        for &index in active.iter() {
            if let Some(link) = places[usize::from(index)].link.as_deref_mut().filter(|link| which(link)) {
                link.mark_idle(bell.doorbell_ref(usize::from(index)));
            }
        }
        *barriers += 1;
        if !fence::heavy() {
            bell.set_barriers_unsupported();
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
            self.idle_links_if(|_| true);
        }
        self.armed = self.active.is_empty();
        self.armed && !self.bell.bell.is_rung()
    }
}

#[cfg(test)]
mod tests;
