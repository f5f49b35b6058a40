//! Numbers for edges, so that a request need not carry their names.

use crate::mutants::{Mutant, is_on};
use crate::wire::message::{Side, VersionedMeta};
use crate::wire::{EdgeName, Status, TensorMeta};
use foldhash::HashMap;
use std::sync::Arc;

/// The routes that this side has announced.
#[derive(Debug)]
pub(super) struct OutRoutes {
    by_edge: HashMap<Arc<EdgeName>, OutRoute>,
    by_number: HashMap<u32, Arc<EdgeName>>,
    next_number: u32,
    uses: u64,
    max: usize,
    /// Routes with standing requests that nobody has claimed.
    armed: usize,
}

/// A route that this side has announced.
#[derive(Debug)]
pub(super) struct OutRoute {
    /// Its number.
    pub number: u32,
    /// The newest meta-data that its sender told us.
    pub meta: Option<VersionedMeta>,
    in_flight: u32,
    /// Those of them that are standing and not claimed.
    armed: u32,
    /// The last step that a request of it was made for, if any was.
    last_asked: u64,
    last_used: u64,
}

/// What to tell the peer before a route can be used.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Announce {
    /// It is known.
    Nothing,
    /// Announce it.
    Route,
    /// Drop another first: the table was full.
    DropThenRoute(u32),
}

impl OutRoutes {
    pub fn new(max: u32) -> Self {
        let max = max as usize;
        let (by_edge, by_number) = (HashMap::default(), HashMap::default());
        OutRoutes { by_edge, by_number, next_number: 0, uses: 0, max, armed: 0 }
    }

    /// The route of an edge for one more request; `None` if the table is full of routes in use.
    pub fn take(&mut self, edge: &Arc<EdgeName>) -> Option<(&OutRoute, Announce)> {
        self.uses += 1;
        let announce = match self.by_edge.contains_key(edge) {
            true => Announce::Nothing,
            false => self.make(edge)?,
        };
        let route = self.by_edge.get_mut(edge)?;
        route.in_flight += 1;
        route.last_used = self.uses;
        Some((route, announce))
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
        let route =
            OutRoute { number, meta: None, in_flight: 0, armed: 0, last_asked: 0, last_used: self.uses };
        self.by_edge.insert(edge.clone(), route);
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

    /// Whether there may be standing requests for an edge: it has some, or less than half of all routes have, as none of
    /// these can make room for another.
    pub fn may_arm(&self, edge: &Arc<EdgeName>) -> bool {
        self.armed < self.max / 2 || self.by_edge.get(edge).is_some_and(|route| route.armed > 0)
    }

    /// A request for a step is made on a route.
    pub fn ask(&mut self, edge: &Arc<EdgeName>, step: u64) {
        if let Some(route) = self.by_edge.get_mut(edge) {
            route.last_asked = route.last_asked.max(step);
        }
    }

    /// Whether a request may have been made for a step, or for one behind it, and not have ended yet.
    pub fn may_be_asked(&self, edge: &Arc<EdgeName>, step: u64) -> bool {
        self.by_edge.get(edge).is_some_and(|route| route.in_flight > 0 && step <= route.last_asked)
    }

    /// One more request on a route, a standing one.
    pub fn arm(&mut self, edge: &Arc<EdgeName>) {
        if let Some(route) = self.by_edge.get_mut(edge) {
            route.in_flight += 1;
            route.armed += 1;
            self.armed += usize::from(route.armed == 1);
        }
    }

    /// A standing request is claimed, or given up.
    pub fn disarm(&mut self, edge: &Arc<EdgeName>) {
        if let Some(route) = self.by_edge.get_mut(edge) {
            route.armed -= 1;
            self.armed -= usize::from(route.armed == 0);
        }
    }

    /// A request on a route has ended.
    pub fn release(&mut self, edge: &Arc<EdgeName>) {
        if let Some(route) = self.by_edge.get_mut(edge) {
            route.in_flight = route.in_flight.saturating_sub(1);
        }
    }

    /// The newest meta-data of an edge that has a route.
    pub fn cached(&self, edge: &Arc<EdgeName>) -> Option<VersionedMeta> {
        self.by_edge.get(edge)?.meta.clone()
    }

    /// Routes with a request in flight.
    pub fn busy(&self) -> usize {
        self.by_edge.values().filter(|route| route.in_flight > 0).count()
    }

    /// The sender told its meta-data: kept unless a newer one is known.
    pub fn learn(&mut self, edge: &Arc<EdgeName>, meta: &VersionedMeta) {
        let Some(route) = self.by_edge.get_mut(edge) else { return };
        let newer = route.meta.as_ref().is_none_or(|known| {
            let ahead = meta.version.wrapping_sub(known.version);
            ahead != 0 && ahead < u32::MAX / 2
        });
        if newer {
            route.meta = Some(meta.clone());
        }
    }
}

/// The routes that the peer has announced.
#[derive(Debug)]
pub(super) struct InRoutes {
    by_number: HashMap<u32, InRoute>,
    max: usize,
}

/// A route that the peer has announced.
#[derive(Debug)]
pub(super) struct InRoute {
    /// The edge, or why requests for it are refused.
    pub edge: Result<Arc<EdgeName>, Status>,
    version: u32,
    meta: Option<(TensorMeta, Side)>,
}

impl InRoute {
    /// The version of this meta-data: a new one if it differs from the last tensor's.
    pub fn version_of(&mut self, meta: &TensorMeta, side: Side) -> u32 {
        if self.meta.as_ref().is_some_and(|(known, known_side)| known == meta && *known_side == side) {
            return self.version;
        }
        self.meta = Some((meta.clone(), side));
        if is_on(Mutant::MetaVersionKept) && self.version > 0 {
            return self.version;
        }
        self.version = self.version.checked_add(1).unwrap_or(1);
        self.version
    }
}

impl InRoutes {
    pub fn new(max: u32) -> Self {
        InRoutes { by_number: HashMap::default(), max: max as usize }
    }

    /// The peer announced a route.
    ///
    /// # Errors
    /// In words, if the number is in use or the peer has announced too many.
    pub fn announce(&mut self, number: u32, edge: Result<Arc<EdgeName>, Status>) -> Result<(), String> {
        if self.by_number.contains_key(&number) {
            return Err(format!("route {number} was announced twice"));
        }
        if self.by_number.len() >= self.max {
            return Err(format!("more than {} routes were announced", self.max));
        }
        self.by_number.insert(number, InRoute { edge, version: 0, meta: None });
        Ok(())
    }

    /// The peer took a route back. Whether it was known.
    pub fn forget(&mut self, number: u32) -> bool {
        self.by_number.remove(&number).is_some()
    }

    /// A route that the peer announced.
    pub fn get(&mut self, number: u32) -> Option<&mut InRoute> {
        self.by_number.get_mut(&number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Code, DType, Shape};

    fn edge(name: &str) -> Arc<EdgeName> {
        let device = "/job:a/replica:0/task:0/device:CPU:0";
        Arc::new(EdgeName::new(device, device, name).expect("edge"))
    }

    fn meta(version: u32, dim: u64) -> VersionedMeta {
        let meta = TensorMeta::new(DType::F32, Shape::new(&[dim]).expect("shape")).expect("meta");
        VersionedMeta { version, side: Side::POOL, meta }
    }

    #[test]
    fn an_edge_is_announced_once() {
        let mut routes = OutRoutes::new(10);
        assert_eq!(routes.take(&edge("a")).expect("room").1, Announce::Route);
        assert_eq!(routes.take(&edge("a")).expect("room").1, Announce::Nothing);
        assert_eq!(routes.take(&edge("b")).expect("room").1, Announce::Route);
    }

    #[test]
    fn a_full_table_drops_the_route_that_rested_longest_and_none_in_use() {
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
        assert!(routes.may_arm(&a));
        routes.arm(&a);
        routes.arm(&a);
        assert!(routes.may_arm(&a) && !routes.may_arm(&b));
        routes.disarm(&a);
        assert!(!routes.may_arm(&b), "one is left");
        routes.disarm(&a);
        assert!(routes.may_arm(&b) && routes.busy() == 1, "claimed, and in flight");
        assert!(!OutRoutes::new(1).may_arm(&a));
    }

    #[test]
    fn only_steps_before_the_last_one_that_was_asked_for_may_be_asked_for() {
        let mut routes = OutRoutes::new(2);
        let a = edge("a");
        assert!(!routes.may_be_asked(&a, 0), "no route");
        routes.take(&a).expect("room");
        for step in [7, 5] {
            routes.ask(&a, step);
        }
        assert!(routes.may_be_asked(&a, 0) && routes.may_be_asked(&a, 7) && !routes.may_be_asked(&a, 8));
        routes.ask(&a, u64::MAX);
        assert!(routes.may_be_asked(&a, u64::MAX));
        routes.release(&a);
        assert!(!routes.may_be_asked(&a, 0), "all have ended");
    }

    #[test]
    fn only_newer_meta_data_is_learned() {
        let mut routes = OutRoutes::new(2);
        routes.take(&edge("a"));
        routes.learn(&edge("a"), &meta(2, 20));
        routes.learn(&edge("a"), &meta(1, 10));
        assert_eq!(routes.take(&edge("a")).expect("room").0.meta, Some(meta(2, 20)));
    }

    #[test]
    fn a_version_changes_with_the_meta_data_only() {
        let mut routes = InRoutes::new(2);
        routes.announce(5, Ok(edge("a"))).expect("new");
        let route = routes.get(5).expect("known");
        let (one, two) = (meta(1, 1).meta, meta(1, 2).meta);
        let versions = [&one, &one, &two, &one].map(|meta| route.version_of(meta, Side::POOL));
        assert_eq!(versions, [1, 1, 2, 3]);
        assert_eq!(route.version_of(&one, Side::HEAP), 4);
    }

    #[test]
    fn a_peer_can_announce_neither_twice_nor_without_end() {
        let mut routes = InRoutes::new(1);
        let refused = || Err(Status::new(Code::NotFound, "no"));
        routes.announce(1, refused()).expect("new");
        assert!(routes.announce(1, refused()).expect_err("twice").contains("twice"));
        assert!(routes.announce(2, refused()).expect_err("too many").contains("more than 1"));
        assert!(routes.forget(1) && !routes.forget(1));
        routes.announce(2, refused()).expect("room again");
    }
}
