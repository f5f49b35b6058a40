//! The links of a port. Each poll reads the connections of the active ones. The others are quiet:
//! the port's epoll tells when something comes for them.
//!
//! The epoll reports changes (edge-triggered). A link becomes quiet only after a read has found
//! nothing, and active with each event, so no change is lost.

use super::link::TcpLinkInner;
use super::options::refuse;
use super::watcher::{PortWatch, REPAIRED};
use crate::fabric::{Completions, FabricError, LinkId};
use rustix::event::{Timespec, epoll};
use std::collections::VecDeque;
use std::mem::MaybeUninit;

/// Links that a port has at most.
const PLACES: usize = 1 << PLACE_BITS;
/// A [`LinkId`] has the link's place in its low bits, and above them the number of earlier links of
/// the place.
const PLACE_BITS: u32 = 14;
/// Polls in a row that find nothing before a link becomes quiet.
const QUIET_POLLS: u32 = 256;
/// While there are active links, one poll in this many looks for events of the quiet ones.
const LOOK_EVERY: u32 = 16;
/// Events of one look.
const EVENTS: usize = 64;
const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

#[derive(Default)]
struct TcpLinkPlace {
    link: Option<Box<TcpLinkInner>>,
    /// Links that have had this place before.
    before: u32,
}

#[derive(Default)]
pub(super) struct TcpPortLinks {
    places: Vec<TcpLinkPlace>,
    /// Free places, oldest first.
    free: VecDeque<u16>,
    /// Places of the active links.
    active: Vec<u16>,
    count: usize,
    polls: u32,
}

fn place_of(id: LinkId) -> usize {
    id.0 as usize % PLACES
}

impl TcpPortLinks {
    /// Adds a link, active. No other link ever has the same id.
    ///
    /// # Errors
    /// If every place is taken, with the link.
    pub(super) fn insert(
        &mut self,
        mut link: Box<TcpLinkInner>,
    ) -> Result<LinkId, (FabricError, Box<TcpLinkInner>)> {
        let place = match self.free.pop_front() {
            Some(place) => usize::from(place),
            None if self.places.len() == PLACES => {
                let allowed = "16384 at most: spread the peers over more pollers";
                return Err((refuse("links of a port", PLACES as u64 + 1, allowed), link));
            }
            None => {
                self.places.push(TcpLinkPlace::default());
                self.places.len() - 1
            }
        };
        let id = LinkId(self.places[place].before << PLACE_BITS | place as u32);
        link.id = id;
        self.places[place].link = Some(link);
        self.count += 1;
        self.activate(id);
        Ok(id)
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Takes a link out, and its connections out of the port's epoll.
    pub(super) fn remove(&mut self, id: LinkId, watched: &PortWatch) -> Option<Box<TcpLinkInner>> {
        self.get(id)?;
        let index = place_of(id);
        let place = &mut self.places[index];
        let link = place.link.take()?;
        place.before += 1;
        // A place whose ids are used up stays empty.
        if place.before < 1 << (LinkId::BITS - PLACE_BITS) {
            self.free.push_back(index as u16);
        }
        self.count -= 1;
        self.active.retain(|&other| usize::from(other) != index);
        if link.is_registered {
            // It was added, and is open.
            link.out.sockets.all().for_each(|socket| _ = epoll::delete(&watched.epoll, socket));
        }
        Some(link)
    }

    /// Takes all links out. The port's epoll ends with the port.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = Box<TcpLinkInner>> {
        self.places.iter_mut().filter_map(|place| place.link.take())
    }

    /// The link with this id, if it is here.
    pub(super) fn get(&self, id: LinkId) -> Option<&TcpLinkInner> {
        self.places.get(place_of(id))?.link.as_deref().filter(|link| link.id == id)
    }

    /// The link with this id, if it is here.
    #[inline]
    pub(super) fn get_mut(&mut self, id: LinkId) -> Option<&mut TcpLinkInner> {
        self.places.get_mut(place_of(id))?.link.as_deref_mut().filter(|link| link.id == id)
    }

    /// The link with this id, if it is here and active.
    #[inline]
    pub(super) fn get_active(&mut self, id: LinkId) -> Option<&mut TcpLinkInner> {
        self.get_mut(id).filter(|link| link.is_active)
    }

    /// Makes a link active: each poll looks at it from now on.
    #[inline]
    pub(super) fn activate(&mut self, id: LinkId) {
        let Some(link) = self.get_mut(id) else { return };
        link.quiet_polls = 0;
        if !std::mem::replace(&mut link.is_active, true) {
            self.active.push(place_of(id) as u16);
        }
    }

    /// Adds all connections to the port's epoll.
    pub(super) fn register(&mut self, watched: &PortWatch) {
        let flags =
            epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        let links = self.places.iter_mut().filter_map(|place| place.link.as_deref_mut());
        for link in links.filter(|link| !link.is_registered) {
            link.is_registered = true;
            let data = epoll::EventData::new_u64(link.id.0.into());
            let added = link.out.sockets.all().try_for_each(|it| epoll::add(&watched.epoll, it, data, flags));
            if let Err(error) = added {
                let what =
                    format!("its connections can't be watched: {error}; see fs.epoll.max_user_watches");
                link.fail(crate::fabric::LinkFailure::Resources(what));
            }
        }
    }

    /// Takes the events of the port's epoll. Their links become active.
    pub(super) fn look(&mut self, watched: &PortWatch) {
        loop {
            let mut events = [const { MaybeUninit::<epoll::Event>::uninit() }; EVENTS];
            // An error is a signal.
            let Ok((found, _)) = epoll::wait(&watched.epoll, &mut events, Some(&NOW)) else { return };
            for event in &*found {
                let data = { event.data }.u64();
                if data == REPAIRED {
                    self.look_at_repairs(watched);
                    continue;
                }
                let id = LinkId(data as u32);
                if let Some(link) = self.get_mut(id) {
                    link.may_read = true;
                    self.activate(id);
                }
            }
            if found.len() < EVENTS {
                return;
            }
        }
    }

    /// Makes the links active whose repairs have ended.
    #[cold]
    fn look_at_repairs(&mut self, watched: &PortWatch) {
        // Read first: a repair that ends between the two makes it readable again.
        let _ = rustix::io::read(&watched.repaired, &mut [0; 8]);
        let links = self.places.iter().filter_map(|place| place.link.as_deref());
        let ended: Vec<LinkId> =
            links.filter(|link| link.session.has_outcome()).map(|link| link.id).collect();
        ended.into_iter().for_each(|id| self.activate(id));
    }

    /// Whether a poll would find something.
    pub(super) fn has_news(&mut self) -> bool {
        let places = &mut self.places;
        let mut active = self.active.iter();
        active.any(|&at| places[usize::from(at)].link.as_mut().is_some_and(|link| link.has_news()))
    }

    /// Polls the active links, and looks for events of the others now and then.
    #[inline]
    pub(super) fn poll(&mut self, watched: &PortWatch, out: &mut Completions) {
        self.polls = self.polls.wrapping_add(1);
        if self.count > self.active.len() && (self.active.is_empty() || self.polls.is_multiple_of(LOOK_EVERY))
        {
            self.look(watched);
        }
        let (mut at, mut has_new) = (0, false);
        while let Some(&place) = self.active.get(at) {
            let Some(link) = &mut self.places[usize::from(place)].link else { unreachable!("it is active") };
            if link.poll(out) {
                link.quiet_polls = 0;
            } else {
                link.quiet_polls = link.quiet_polls.saturating_add(1);
            }
            has_new |= !link.is_registered;
            if link.quiet_polls >= QUIET_POLLS && link.is_registered && link.is_idle() {
                link.is_active = false;
                self.active.swap_remove(at);
            } else {
                at += 1;
            }
        }
        if has_new && self.count > 1 {
            self.register(watched);
        }
    }
}
