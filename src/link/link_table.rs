//! The links of one poller, by id, and lists of those that have something to do.
//!
//! The cost of a poll depends on the arrivals, not on the number of links. A poll visits only links
//! with a backlog or with arrivals.

use super::links::Link;
use crate::fabric::LinkId;
use foldhash::HashMap;

/// The links of one poller.
#[derive(Debug)]
pub(super) struct LinkTable {
    links: Vec<Link>,
    places: HashMap<LinkId, usize>,
    /// The link that was found last, and its place.
    latest: usize,
    /// Links with a backlog, each once.
    backlogged: Vec<LinkId>,
    /// Links with arrivals since the last [`LinkTable::for_each_used`], each once.
    used: Vec<LinkId>,
}

impl LinkTable {
    /// An empty table.
    pub fn new() -> Self {
        LinkTable {
            links: Vec::new(),
            places: HashMap::default(),
            latest: 0,
            backlogged: Vec::new(),
            used: Vec::new(),
        }
    }

    /// Adds a link. Its id is unused.
    pub fn insert(&mut self, link: Link) {
        self.places.insert(link.id, self.links.len());
        self.links.push(link);
        // Now, so that the first backlog of a link allocates nothing.
        self.backlogged.reserve(self.links.len());
        self.used.reserve(self.links.len());
    }

    /// `None` if the id is of a link that is gone.
    pub fn remove(&mut self, id: LinkId) -> Option<Link> {
        let place = self.places.remove(&id)?;
        let link = self.links.swap_remove(place);
        if let Some(moved) = self.links.get(place) {
            self.places.insert(moved.id, place);
        }
        // The lists may still name it. Their visitors skip unknown ids.
        Some(link)
    }

    /// `None` if the id is of a link that is gone.
    #[inline(always)] // on the short path
    pub fn get_mut(&mut self, id: LinkId) -> Option<&mut Link> {
        let place = self.place(id)?;
        self.links.get_mut(place)
    }

    #[inline(always)] // on the short path
    fn place(&mut self, id: LinkId) -> Option<usize> {
        if self.links.get(self.latest).is_some_and(|link| link.id == id) {
            return Some(self.latest);
        }
        self.search(id)
    }

    #[cold]
    fn search(&mut self, id: LinkId) -> Option<usize> {
        self.latest = *self.places.get(&id)?;
        Some(self.latest)
    }

    /// The links, in no order.
    pub fn iter(&self) -> impl Iterator<Item = &Link> {
        self.links.iter()
    }

    /// Whether a link may have a backlog.
    #[inline]
    pub fn has_backlog(&self) -> bool {
        !self.backlogged.is_empty()
    }

    /// Updates the backlog list, after anything was sent on a link.
    #[inline]
    pub fn note_backlog(&mut self, id: LinkId) {
        let Some(link) = self.get_mut(id) else { return };
        if link.out.backlog() > 0 && !link.is_backlogged {
            link.is_backlogged = true;
            self.backlogged.push(id);
        }
    }

    /// Notes an arrival on a link.
    #[inline]
    pub fn note_use(&mut self, id: LinkId) {
        let Some(link) = self.get_mut(id) else { return };
        if !link.is_used {
            link.is_used = true;
            self.used.push(id);
        }
    }

    /// Visits the links with a backlog. A link without one afterwards leaves the list.
    pub fn for_each_backlogged(&mut self, mut visit: impl FnMut(&mut Link)) {
        let LinkTable { links, places, backlogged, .. } = self;
        backlogged.retain(|id| {
            let Some(link) = places.get(id).and_then(|&place| links.get_mut(place)) else { return false };
            visit(link);
            link.is_backlogged = link.out.backlog() > 0;
            link.is_backlog_told &= link.is_backlogged;
            link.is_backlogged
        });
    }

    /// Visits the links with arrivals, each once.
    pub fn for_each_used(&mut self, mut visit: impl FnMut(&mut Link)) {
        let LinkTable { links, places, used, .. } = self;
        for id in used.drain(..) {
            let Some(link) = places.get(&id).and_then(|&place| links.get_mut(place)) else { continue };
            link.is_used = false;
            visit(link);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::LinkLimits;
    use crate::link::links::{LinkIdentity, LinkSettings};
    use crate::telemetry::FlightRecorder;
    use crate::wire::{TaskId, Time};

    fn link(id: u32) -> Link {
        let task = |job: &str| TaskId::new(job, 0).expect("a job name");
        let identity =
            LinkIdentity { local: task("a"), local_incarnation: 1, peer: task("b"), peer_incarnation: 2 };
        let settings = LinkSettings {
            small_tensor_bytes: 128,
            validate: false,
            borrow: false,
            max_ready_bytes: 1 << 20,
        };
        let recorder = Box::new(FlightRecorder::new(std::sync::Arc::new(|| Time::ZERO)));
        let limits = LinkLimits { depth: 16, ..LinkLimits::NONE };
        Link::new(LinkId(id), identity, settings, &limits, recorder)
    }

    fn used(table: &mut LinkTable) -> Vec<u32> {
        let mut used = Vec::new();
        table.for_each_used(|link| used.push(link.id.0));
        used
    }

    #[test]
    fn links_are_found_by_their_ids_as_others_come_and_go() {
        let mut table = LinkTable::new();
        for id in [7, 1 << 20, 3] {
            table.insert(link(id));
        }
        assert!(table.remove(LinkId(7)).is_some() && table.remove(LinkId(7)).is_none());
        table.insert(link(4));
        for id in [1 << 20, 3, 4].map(LinkId) {
            assert_eq!(table.get_mut(id).map(|link| link.id), Some(id));
        }
        assert!(table.get_mut(LinkId(7)).is_none());
        let mut ids: Vec<_> = table.iter().map(|link| link.id.0).collect();
        ids.sort_unstable();
        assert_eq!(ids, [3, 4, 1 << 20]);
    }

    #[test]
    fn only_links_with_arrivals_are_visited_each_once() {
        let mut table = LinkTable::new();
        for id in 0..100 {
            table.insert(link(id));
        }
        for id in [5, 9, 5, 60] {
            table.note_use(LinkId(id));
        }
        table.remove(LinkId(9));
        assert_eq!(used(&mut table), [5, 60]);
        assert!(used(&mut table).is_empty());
        table.note_backlog(LinkId(5));
        table.for_each_backlogged(|_| panic!("it has none"));
    }
}
