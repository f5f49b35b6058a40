//! The links of a port: where each is, and which of them every poll looks at.
//!
//! A busy link is looked at in each poll. One that has been quiet is marked cold (`cold`) and looked at when its
//! peer rings, and, since peers can't be relied on, now and then in turn. Marking needs a heavy barrier, so
//! links go cold many at a time, or when their poller is about to sleep; a port with a few links never
//! makes a system call on its own.

use crate::fabric::shm::link::Link;
use crate::fabric::shm::wakeup::doorbell::PLACES;
use crate::fabric::shm::wakeup::doorbells::OwnDoorbell;
use crate::fabric::shm::wakeup::fence;
use crate::fabric::{Completions, FabricError, FabricKind, LinkId};
use std::collections::VecDeque;
use std::sync::Arc;

/// Looks at busy links between two rounds in which quiet ones may go cold: some 300 us of polling.
const ROUND: usize = 1 << 16;
/// Links that go cold at once while the poller is awake, at least.
const BATCH: usize = 8;
/// Polls between two looks at a cold link.
const TURN_EVERY: u32 = 64;
/// Places that an idle poll looks at while the port is armed: then polls are rare.
const TURNS_ARMED: usize = 16;

/// A link's number: its place in the low bits, and above how many links have had the place before.
const PLACE_BITS: u32 = PLACES.trailing_zeros();

#[derive(Default)]
struct Place {
    link: Option<Box<Link>>,
    /// Links that have had this place before.
    before: u32,
    is_busy: bool,
}

/// The links of a port.
pub(super) struct Attached {
    places: Vec<Place>,
    /// Places that are free again, the one that is so longest first.
    free: VecDeque<u16>,
    /// Places of the links that each poll looks at.
    busy: Vec<u16>,
    /// Looks at busy links since quiet ones were last looked for.
    looks: usize,
    polls: u32,
    /// The place whose turn it is to be looked at, busy or not.
    turn: usize,
    /// Every link was cold and without news, and nothing came since.
    armed: bool,
    bell: Arc<OwnDoorbell>,
    /// Heavy barriers made so far.
    barriers: u64,
}

fn place_of(id: LinkId) -> usize {
    id.0 as usize % PLACES
}

impl Attached {
    /// None yet.
    pub(super) fn new(bell: Arc<OwnDoorbell>) -> Self {
        Attached {
            places: Vec::new(),
            free: VecDeque::new(),
            busy: Vec::new(),
            looks: 0,
            polls: 0,
            turn: 0,
            armed: false,
            bell,
            barriers: 0,
        }
    }

    /// Takes a link in, busy. Its number is never another's.
    ///
    /// # Errors
    /// If every place is taken.
    pub(super) fn insert(&mut self, mut link: Box<Link>) -> Result<LinkId, FabricError> {
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
            self.bell.doubt();
        }
        self.places[place].link = Some(link);
        self.heat(place);
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
        self.places.push(Place::default());
        Some(self.places.len() - 1)
    }

    /// Takes a link out.
    pub(super) fn remove(&mut self, id: LinkId) -> Option<Box<Link>> {
        self.get(id)?;
        let index = place_of(id);
        let place = &mut self.places[index];
        let link = place.link.take();
        place.before += 1;
        // A place whose numbers are used up is left empty for good.
        if place.before < 1 << (u32::BITS - PLACE_BITS) {
            self.free.push_back(index as u16);
        }
        if std::mem::take(&mut place.is_busy) {
            self.busy.retain(|&other| usize::from(other) != index);
        }
        link
    }

    /// A link.
    pub(super) fn get(&self, id: LinkId) -> Option<&Link> {
        self.places.get(place_of(id))?.link.as_deref().filter(|link| link.id == id)
    }

    /// A link.
    #[inline]
    pub(super) fn get_mut(&mut self, id: LinkId) -> Option<&mut Link> {
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
        for &place in &self.busy {
            if let Some(link) = &mut self.places[usize::from(place)].link {
                link.poll(out);
            }
        }
        if self.bell.bell.is_rung() {
            self.answer(out);
        }
        self.looks += self.busy.len();
        self.polls = self.polls.wrapping_add(1);
        if self.polls.is_multiple_of(TURN_EVERY) || self.looks >= ROUND || self.armed {
            self.look_beyond(out.len() > before);
        }
    }

    /// Looks at links that have rung; those that have something are busy from now on.
    #[cold]
    fn answer(&mut self, out: &mut Completions) {
        let bell = Arc::clone(&self.bell);
        bell.bell.answer(|index| {
            let Some(place) = self.places.get_mut(index) else { return };
            let Some(link) = &mut place.link else { return };
            if place.is_busy {
                return;
            }
            let posted = std::mem::take(&mut link.stirred);
            let before = out.len();
            if link.poll_once(out) {
                // Whoever armed the port and hears of no completion would sleep, though there is more to do.
                self.disarm(out.len() == before);
                self.heat(index);
            } else if posted && !self.armed {
                // Traffic of this side alone: its peer should not have to ring each time that it took something.
                self.heat(index);
            }
        });
    }

    /// What a poll does now and then, or while the port is armed. `came`: the poll has brought something.
    #[cold]
    fn look_beyond(&mut self, came: bool) {
        self.armed &= !came;
        if self.looks >= ROUND {
            self.looks = 0;
            self.let_quiet_ones_cool();
        }
        let turns = if self.armed { TURNS_ARMED } else { 1 };
        for _ in 0..turns.min(self.places.len()) {
            self.turn = if self.turn + 1 < self.places.len() { self.turn + 1 } else { 0 };
            let place = &self.places[self.turn];
            if !place.is_busy && place.link.as_ref().is_some_and(|link| link.has_news()) {
                self.disarm(true);
                self.heat(self.turn);
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
    fn heat(&mut self, index: usize) {
        let place = &mut self.places[index];
        if place.is_busy {
            return;
        }
        if let Some(link) = &mut place.link {
            link.unmark();
            place.is_busy = true;
            self.busy.push(index as u16);
        }
    }

    /// Has the next poll look at a link, and ends the sleep of whoever would make it: something happened to
    /// the link on this side.
    #[cold]
    pub(super) fn stir(&mut self, id: LinkId) {
        if self.get(id).is_some_and(Link::has_news) {
            self.heat(place_of(id));
            self.disarm(true);
        }
    }

    /// Lets the links go cold that were quiet for a round, if that is worth a barrier.
    fn let_quiet_ones_cool(&mut self) {
        let places = &mut self.places;
        let mut quiet = 0;
        for &place in &self.busy {
            quiet += usize::from(places[usize::from(place)].link.as_ref().is_some_and(|link| !link.stirred));
        }
        if quiet >= BATCH {
            self.cool(|link| !link.stirred);
        }
        for &place in &self.busy {
            if let Some(link) = &mut self.places[usize::from(place)].link {
                link.stirred = false;
            }
        }
    }

    /// Lets links go cold, but for those that have news.
    fn cool(&mut self, which: impl Fn(&Link) -> bool) {
        let Attached { places, busy, bell, barriers, .. } = self;
        for &index in busy.iter() {
            if let Some(link) = places[usize::from(index)].link.as_deref_mut().filter(|link| which(link)) {
                link.mark(bell.pull(usize::from(index)));
            }
        }
        *barriers += 1;
        if !fence::heavy() {
            bell.doubt();
        }
        busy.retain(|&index| {
            let place = &mut places[usize::from(index)];
            let Some(link) = place.link.as_deref_mut() else { return false };
            if !which(link) {
                return true;
            }
            place.is_busy = link.has_news();
            if place.is_busy {
                link.unmark();
            }
            place.is_busy
        });
    }

    /// See [`Port::arm`](crate::fabric::Port::arm).
    pub(super) fn arm(&mut self) -> bool {
        if !self.busy.is_empty() {
            self.cool(|_| true);
        }
        self.armed = self.busy.is_empty();
        self.armed && !self.bell.bell.is_rung()
    }
}

#[cfg(test)]
mod tests;
