//! The routes that this side has announced: numbers for its edges, and the meta-data that their
//! senders told.

use crate::link::receiving::standing::STANDING_SHARE;
use crate::wire::message::VersionedMeta;
use crate::wire::{EdgeName, MetaSlot, TensorMeta};
use foldhash::HashMap;
use std::sync::Arc;

/// Meta-data that none of the last 1024 arrivals had no longer counts for the size of a
/// destination. One large tensor must not keep the destinations of small ones large for ever.
pub(crate) const RECENT_ARRIVALS: u64 = 1024;
/// After a refused loan, the next 256 arrivals are requested with a destination: a missing
/// destination costs two messages.
pub(crate) const UNLENT_ARRIVALS: u64 = 256;

/// The routes that this side has announced.
#[derive(Debug)]
pub(in crate::link) struct OutRoutes {
    by_edge: HashMap<Arc<EdgeName>, OutRoute>,
    by_number: HashMap<u32, Arc<EdgeName>>,
    next_number: u32,
    uses: u64,
    max: usize,
    /// Number of routes with requests.
    in_use: usize,
    /// Number of routes with unclaimed standing requests.
    standing: usize,
}

/// A route that this side has announced.
#[derive(Debug)]
pub(in crate::link) struct OutRoute {
    /// The number that the peer knows it by.
    pub number: u32,
    /// The newest meta-data that the sender told, by meta-data slot, each with the arrival that had
    /// it last.
    known: [Option<(VersionedMeta, u64)>; MetaSlot::COUNT],
    /// The meta-data slot of the last arrival.
    last: usize,
    /// Number of arrivals so far.
    arrivals: u64,
    /// The arrival of the last tensor that could have been borrowed and was not lent.
    unlent: Option<u64>,
    in_flight: u32,
    /// Number of unclaimed standing requests among `in_flight`.
    standing: u32,
    /// The last step with an unclaimed standing request, since there was none.
    last_standing: Option<u64>,
    /// The last step with another request: a plain, a claimed or a cancelled one.
    last_other: Option<u64>,
    last_used: u64,
}

/// The requests that may be outstanding for a step or a later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::link) enum RouteOutstanding {
    /// No request.
    None,
    /// Only standing requests that no receive has claimed.
    StandingOnly,
    /// Any request.
    Any,
}

impl OutRoute {
    fn new(number: u32, last_used: u64) -> Self {
        let (known, last) = ([const { None }; MetaSlot::COUNT], 0);
        OutRoute {
            number,
            known,
            last,
            arrivals: 0,
            unlent: None,
            in_flight: 0,
            standing: 0,
            last_standing: None,
            last_other: None,
            last_used,
        }
    }

    /// The meta-data of the last arrival.
    pub fn cached(&self) -> Option<&VersionedMeta> {
        self.known[self.last].as_ref().map(|(meta, _)| meta)
    }

    /// The meta-data of the largest recent tensor.
    pub fn largest(&self) -> Option<&TensorMeta> {
        let of_late = self.known.iter().flatten().filter(|(_, at)| self.arrivals - at < RECENT_ARRIVALS);
        of_late.map(|(meta, _)| &meta.meta).max_by_key(|meta| meta.bytes())
    }

    /// Whether a loan is expected: no recent loan was refused.
    pub fn is_lent(&self) -> bool {
        self.unlent.is_none_or(|at| self.arrivals - at >= UNLENT_ARRIVALS)
    }

    /// Returns whether this was the last request on the route.
    fn release(&mut self) -> bool {
        let was_last = self.in_flight == 1;
        self.in_flight = self.in_flight.saturating_sub(1);
        if self.in_flight == self.standing {
            self.last_other = None;
        }
        was_last
    }

    fn learn(&mut self, meta: &VersionedMeta) {
        let place = &mut self.known[MetaSlot::of(meta.version).index()];
        if place.as_ref().is_none_or(|(known, _)| known.version != meta.version) {
            *place = Some((meta.clone(), 0));
        }
        self.note_arrival(meta.version);
    }

    fn note_arrival(&mut self, version: u32) {
        self.arrivals += 1;
        let place = MetaSlot::of(version).index();
        if let Some((_, at)) = self.known[place].as_mut().filter(|(known, _)| known.version == version) {
            (*at, self.last) = (self.arrivals, place);
        }
    }
}

/// What to send to the peer before a route can be used.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::link) enum Announce {
    /// Nothing: the peer knows the route.
    Nothing,
    /// `ROUTE`.
    Route,
    /// `ROUTE_DROP` for another route, then `ROUTE`: the table was full.
    DropThenRoute(u32),
}

impl OutRoutes {
    pub fn new(max: u32) -> Self {
        let max = max as usize;
        let (by_edge, by_number) = (HashMap::default(), HashMap::default());
        OutRoutes { by_edge, by_number, next_number: 0, uses: 0, max, in_use: 0, standing: 0 }
    }

    /// Takes the route of an edge for one more request; `None` if all routes are in use.
    pub fn take(&mut self, edge: &Arc<EdgeName>) -> Option<(&OutRoute, Announce)> {
        self.uses += 1;
        let announce = match self.by_edge.contains_key(edge) {
            true => Announce::Nothing,
            false => self.make(edge)?,
        };
        let route = self.by_edge.get_mut(edge)?;
        self.in_use += usize::from(route.in_flight == 0);
        route.in_flight += 1;
        route.last_used = self.uses;
        Some((route, announce))
    }

    /// Whether one more request of an edge finds a route.
    pub fn has_room(&self, edge: &Arc<EdgeName>) -> bool {
        self.in_use < self.max || self.by_edge.contains_key(edge)
    }

    fn make(&mut self, edge: &Arc<EdgeName>) -> Option<Announce> {
        let mut announce = Announce::Route;
        if self.by_edge.len() >= self.max {
            let idle = self.by_edge.iter().filter(|(_, route)| route.in_flight == 0);
            let (oldest, number) = idle
                .min_by_key(|(_, route)| route.last_used)
                .map(|(edge, route)| (edge.clone(), route.number))?;
            self.by_edge.remove(&oldest);
            self.by_number.remove(&number);
            announce = Announce::DropThenRoute(number);
        }
        let number = self.free_number();
        self.by_number.insert(number, edge.clone());
        self.by_edge.insert(edge.clone(), OutRoute::new(number, self.uses));
        Some(announce)
    }

    fn free_number(&mut self) -> u32 {
        loop {
            let number = self.next_number;
            self.next_number = number.wrapping_add(1);
            if !self.by_number.contains_key(&number) {
                return number;
            }
        }
    }

    /// Whether an edge may have standing requests: it has some, or less than half of all routes
    /// have some. Such routes cannot make room for another.
    pub fn may_post_standing(&self, edge: &Arc<EdgeName>) -> bool {
        self.standing < self.max / STANDING_SHARE as usize
            || self.by_edge.get(edge).is_some_and(|route| route.standing > 0)
    }

    /// Notes a plain request for a step.
    pub fn ask(&mut self, edge: &Arc<EdgeName>, step: u64) {
        if let Some(route) = self.by_edge.get_mut(edge) {
            route.last_other = route.last_other.max(Some(step));
        }
    }

    /// The requests that may be outstanding on a route for this step or a later one.
    pub fn outstanding(&self, edge: &Arc<EdgeName>, step: u64) -> RouteOutstanding {
        match self.by_edge.get(edge) {
            Some(route) if Some(step) <= route.last_other => RouteOutstanding::Any,
            Some(route) if Some(step) <= route.last_standing => RouteOutstanding::StandingOnly,
            _ => RouteOutstanding::None,
        }
    }

    /// Notes a standing request for a step.
    pub fn note_standing(&mut self, edge: &Arc<EdgeName>, step: u64) {
        if let Some(route) = self.by_edge.get_mut(edge) {
            self.in_use += usize::from(route.in_flight == 0);
            route.in_flight += 1;
            route.standing += 1;
            route.last_standing = route.last_standing.max(Some(step));
            self.standing += usize::from(route.standing == 1);
        }
    }

    /// Notes that a standing request was claimed or cancelled.
    pub fn note_claimed(&mut self, edge: &Arc<EdgeName>, step: u64) {
        if let Some(route) = self.by_edge.get_mut(edge) {
            route.standing -= 1;
            route.last_other = route.last_other.max(Some(step));
            if route.standing == 0 {
                route.last_standing = None;
                self.standing -= 1;
            }
        }
    }

    /// Notes the end of a request on a route.
    pub fn release(&mut self, edge: &Arc<EdgeName>) {
        if let Some(route) = self.by_edge.get_mut(edge) {
            self.in_use -= usize::from(route.release());
        }
    }

    /// The meta-data of the largest recent tensor of an edge, if one is known.
    pub fn largest(&self, edge: &Arc<EdgeName>) -> Option<&TensorMeta> {
        self.by_edge.get(edge)?.largest()
    }

    /// The meta-data of the last arrival of an edge that has a route.
    pub fn cached(&self, edge: &Arc<EdgeName>) -> Option<VersionedMeta> {
        self.by_edge.get(edge)?.cached().cloned()
    }

    /// The meta-data of an edge in a meta-data slot.
    pub fn known(&self, edge: &Arc<EdgeName>, place: MetaSlot) -> Option<VersionedMeta> {
        self.by_edge.get(edge)?.known[place.index()].as_ref().map(|(meta, _)| meta.clone())
    }

    /// Number of routes with a request in flight.
    #[cfg(any(test, feature = "sim"))]
    pub fn busy(&self) -> usize {
        self.in_use
    }

    /// Notes meta-data that the sender has told. Both sides store it in the same meta-data slot,
    /// and the next tensor is expected to have it.
    pub fn learn(&mut self, edge: &Arc<EdgeName>, meta: &VersionedMeta) {
        if let Some(route) = self.by_edge.get_mut(edge) {
            route.learn(meta);
        }
    }

    /// Notes an arrival with this version of the meta-data, which the next tensor is expected to
    /// have. The slot may hold a newer version if the sender had pinned the value; the newer one
    /// stays.
    pub fn note_arrival(&mut self, edge: &Arc<EdgeName>, version: u32) {
        if let Some(route) = self.by_edge.get_mut(edge) {
            route.note_arrival(version);
        }
    }

    /// Notes that the last arrival could have been borrowed and was not lent.
    pub fn note_unlent(&mut self, edge: &Arc<EdgeName>) {
        if let Some(route) = self.by_edge.get_mut(edge) {
            route.unlent = Some(route.arrivals);
        }
    }

    /// Whether loans are expected on an edge.
    pub fn is_lent(&self, edge: &Arc<EdgeName>) -> bool {
        self.by_edge.get(edge).is_none_or(OutRoute::is_lent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::message::Placement;
    use crate::wire::{DType, Shape};

    fn edge(name: &str) -> Arc<EdgeName> {
        let device = "/job:a/replica:0/task:0/device:CPU:0";
        Arc::new(EdgeName::new(device, device, name).expect("edge"))
    }

    fn meta(version: u32, dim: u64) -> VersionedMeta {
        let meta = TensorMeta::new(DType::F32, Shape::new(&[dim]).expect("shape")).expect("meta");
        VersionedMeta { version, placement: Placement::POOL, meta }
    }

    #[test]
    fn a_loan_is_expected_again_after_many_arrivals() {
        let mut routes = OutRoutes::new(4);
        let a = edge("a");
        routes.take(&a);
        assert!(routes.is_lent(&a) && routes.is_lent(&edge("b")));
        for _ in 0..2 {
            routes.note_arrival(&a, 1);
            routes.note_unlent(&a);
            for lent in 0..UNLENT_ARRIVALS {
                assert!(!routes.is_lent(&a), "after {lent}");
                routes.note_arrival(&a, 1);
            }
            assert!(routes.is_lent(&a));
        }
    }

    #[test]
    fn an_edge_is_announced_once() {
        let mut routes = OutRoutes::new(10);
        assert_eq!(routes.take(&edge("a")).expect("room").1, Announce::Route);
        assert_eq!(routes.take(&edge("a")).expect("room").1, Announce::Nothing);
        assert_eq!(routes.take(&edge("b")).expect("room").1, Announce::Route);
    }

    #[test]
    fn a_full_table_drops_the_route_that_was_idle_longest() {
        let mut routes = OutRoutes::new(2);
        let first = routes.take(&edge("a")).expect("room").0.number;
        routes.take(&edge("b")).expect("room");
        assert!(routes.take(&edge("c")).is_none(), "both are in use");
        routes.release(&edge("a"));
        routes.release(&edge("b"));
        assert_eq!(routes.take(&edge("c")).expect("room").1, Announce::DropThenRoute(first));
    }

    #[test]
    fn standing_requests_leave_half_of_the_routes_to_others() {
        let mut routes = OutRoutes::new(3);
        let [a, b] = ["a", "b"].map(edge);
        for edge in [&a, &b] {
            routes.take(edge).expect("room");
            routes.release(edge);
        }
        assert!(routes.may_post_standing(&a));
        routes.note_standing(&a, 1);
        routes.note_standing(&a, 2);
        assert!(routes.may_post_standing(&a) && !routes.may_post_standing(&b));
        routes.note_claimed(&a, 1);
        assert!(!routes.may_post_standing(&b), "one is left");
        routes.note_claimed(&a, 2);
        assert!(routes.may_post_standing(&b) && routes.busy() == 1, "claimed, and in flight");
        assert!(!OutRoutes::new(1).may_post_standing(&a));
    }

    #[test]
    fn outstanding_requests_are_forgotten_with_the_last_one() {
        let mut routes = OutRoutes::new(2);
        let a = edge("a");
        assert_eq!(routes.outstanding(&a, 0), RouteOutstanding::None, "no route");
        routes.take(&a).expect("room");
        for step in [7, 5] {
            routes.ask(&a, step);
        }
        routes.note_standing(&a, 20);
        let of = |routes: &OutRoutes| [0, 7, 8, 20, 21].map(|step| routes.outstanding(&a, step));
        use RouteOutstanding::{Any, None, StandingOnly};
        assert_eq!(of(&routes), [Any, Any, StandingOnly, StandingOnly, None]);
        routes.release(&a);
        assert_eq!(
            of(&routes),
            [StandingOnly, StandingOnly, StandingOnly, StandingOnly, None],
            "the plain one has ended"
        );
        routes.note_claimed(&a, 20);
        assert_eq!(of(&routes), [Any, Any, Any, Any, None], "claimed");
        routes.release(&a);
        assert_eq!(of(&routes), [None; 5]);
        routes.ask(&a, u64::MAX);
        assert_eq!(routes.outstanding(&a, u64::MAX), Any);
    }

    #[test]
    fn the_last_meta_data_is_expected_next_and_the_largest_sizes_the_destination() {
        let mut routes = OutRoutes::new(2);
        routes.take(&edge("a"));
        for known in [meta(1, 10), meta(2, 20), meta(1, 10)] {
            routes.learn(&edge("a"), &known);
        }
        let place = MetaSlot::of;
        assert_eq!(routes.cached(&edge("a")), Some(meta(1, 10)));
        assert_eq!(routes.known(&edge("a"), place(2)), Some(meta(2, 20)));
        assert_eq!(routes.known(&edge("a"), place(3)), None);
        let largest = |routes: &mut OutRoutes| routes.take(&edge("a")).expect("room").0.largest().cloned();
        assert_eq!(largest(&mut routes), Some(meta(2, 20).meta));
        for version in 3..6 {
            routes.learn(&edge("a"), &meta(version, u64::from(version)));
        }
        assert_eq!(routes.known(&edge("a"), place(1)), Some(meta(5, 5)), "four are remembered");
        assert_eq!(largest(&mut routes), Some(meta(2, 20).meta));
        for _ in 0..RECENT_ARRIVALS {
            routes.learn(&edge("a"), &meta(5, 5));
        }
        assert_eq!(largest(&mut routes), Some(meta(5, 5).meta), "it has not come for long");
    }

    #[test]
    fn a_value_that_was_pinned_for_long_keeps_newer_meta_data_in_its_slot() {
        let mut routes = OutRoutes::new(2);
        routes.take(&edge("a"));
        for version in 2..=6 {
            routes.learn(&edge("a"), &meta(version, u64::from(version)));
        }
        routes.note_arrival(&edge("a"), 2);
        assert_eq!(routes.known(&edge("a"), MetaSlot::of(2)), Some(meta(6, 6)));
        assert_eq!(routes.cached(&edge("a")), Some(meta(6, 6)));
        routes.note_arrival(&edge("a"), 4);
        assert_eq!(routes.cached(&edge("a")), Some(meta(4, 4)), "it is there still");
    }
}
