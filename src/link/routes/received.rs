//! The routes that the peer has announced: numbers for its edges, and the meta-data that was told
//! for each.

use crate::mutants::{Mutant, is_on};
use crate::wire::message::{Placement, VersionedMeta};
use crate::wire::{EdgeName, MetaSlot, Status, TensorMeta};
use foldhash::HashMap;
use std::sync::Arc;

/// The routes that the peer has announced.
#[derive(Debug)]
pub(in crate::link) struct InRoutes {
    by_number: HashMap<u32, InRoute>,
    max: usize,
}

/// A route that the peer has announced.
#[derive(Debug)]
pub(in crate::link) struct InRoute {
    /// The edge, or why requests for it are refused.
    pub edge: Result<Arc<EdgeName>, Status>,
    /// The newest version of the meta-data.
    version: u32,
    /// The newest meta-data, by meta-data slot.
    known: [Option<VersionedMeta>; MetaSlot::COUNT],
}

/// The version of a tensor's meta-data on a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::link) struct MetaVersion {
    /// The version number; never 0.
    pub number: u32,
    /// Whether the receiver was told this version and still remembers it.
    pub is_known: bool,
}

impl InRoute {
    /// The version of this meta-data. If it is not among those that both sides remember, it gets a
    /// new version, which the receiver must be told.
    pub fn version_of(&mut self, meta: &TensorMeta, placement: Placement) -> MetaVersion {
        let mut known = self.known.iter().flatten();
        if let Some(known) = known.find(|known| known.meta == *meta && known.placement == placement) {
            return MetaVersion { number: known.version, is_known: true };
        }
        if is_on(Mutant::MetaVersionKept) && self.version > 0 {
            return MetaVersion { number: self.version, is_known: true };
        }
        let number = self.version.checked_add(1).unwrap_or(1);
        self.version = number;
        self.known[MetaSlot::of(number).index()] =
            Some(VersionedMeta { version: number, placement, meta: meta.clone() });
        MetaVersion { number, is_known: false }
    }
}

impl InRoutes {
    pub fn new(max: u32) -> Self {
        InRoutes { by_number: HashMap::default(), max: max as usize }
    }

    /// Adds a route.
    ///
    /// # Errors
    /// A description, if the number is in use or the peer has announced too many.
    pub fn announce(&mut self, number: u32, edge: Result<Arc<EdgeName>, Status>) -> Result<(), String> {
        if self.by_number.contains_key(&number) {
            return Err(format!("route {number} was announced twice"));
        }
        if self.by_number.len() >= self.max {
            return Err(format!("more than {} routes were announced", self.max));
        }
        self.by_number.insert(number, InRoute { edge, version: 0, known: [const { None }; MetaSlot::COUNT] });
        Ok(())
    }

    /// Removes a route. Returns whether it was known.
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
    use super::super::announced::OutRoutes;
    use super::*;
    use crate::wire::{Code, DType, Shape};

    fn edge(name: &str) -> Arc<EdgeName> {
        let device = "/job:a/replica:0/task:0/device:CPU:0";
        Arc::new(EdgeName::new(device, device, name).expect("edge"))
    }

    fn meta(version: u32, dim: u64) -> VersionedMeta {
        let meta = TensorMeta::new(DType::F32, Shape::new(&[dim]).expect("shape")).expect("meta");
        VersionedMeta { version, placement: Placement::POOL, meta }
    }

    #[test]
    fn both_ends_remember_the_same_with_pinned_and_late_values() {
        let (mut receiver, mut sender) = (OutRoutes::new(1), InRoutes::new(1));
        receiver.take(&edge("a"));
        sender.announce(0, Ok(edge("a"))).expect("new");
        let (mut random, mut kept) = (1_u64, Vec::new());
        for _ in 0..2000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let [dim, late, keeps] = [33, 43, 53].map(|shift| random >> shift);
            let tensor = meta(0, dim % 7).meta;
            let route = sender.get(0).expect("known");
            let MetaVersion { number, is_known } = route.version_of(&tensor, Placement::POOL);
            let told = VersionedMeta { version: number, placement: Placement::POOL, meta: tensor };
            if !is_known || keeps % 2 == 0 {
                receiver.learn(&edge("a"), &told);
            }
            match keeps % 2 {
                0 => kept.push(told.version),
                _ => receiver.note_arrival(&edge("a"), told.version),
            }
            if late % 3 == 0 && !kept.is_empty() {
                receiver.note_arrival(&edge("a"), kept.remove(late as usize % kept.len()));
            }
            for version in 0..MetaSlot::COUNT as u32 {
                let place = MetaSlot::of(version);
                let known = &sender.get(0).expect("known").known[place.index()];
                assert_eq!(receiver.known(&edge("a"), place), *known);
            }
        }
    }

    #[test]
    fn meta_data_that_returns_has_its_version_as_long_as_both_ends_remember_it() {
        let mut routes = InRoutes::new(2);
        routes.announce(5, Ok(edge("a"))).expect("new");
        let route = routes.get(5).expect("known");
        let mut version = |dim, side| {
            let MetaVersion { number, is_known } = route.version_of(&meta(1, dim).meta, side);
            (number, is_known)
        };
        let versions = [1, 1, 2, 1].map(|dim| version(dim, Placement::POOL));
        assert_eq!(versions, [(1, false), (1, true), (2, false), (1, true)]);
        assert_eq!(version(1, Placement::HEAP), (3, false));
        assert_eq!([3, 4].map(|dim| version(dim, Placement::POOL)), [(4, false), (5, false)]);
        assert_eq!(
            [2, 1].map(|dim| version(dim, Placement::POOL)),
            [(2, true), (6, false)],
            "the fifth before it"
        );
    }

    #[test]
    fn a_peer_can_announce_no_route_twice_and_only_a_bounded_number() {
        let mut routes = InRoutes::new(1);
        let refused = || Err(Status::new(Code::NotFound, "no"));
        routes.announce(1, refused()).expect("new");
        assert!(routes.announce(1, refused()).expect_err("twice").contains("twice"));
        assert!(routes.announce(2, refused()).expect_err("too many").contains("more than 1"));
        assert!(routes.forget(1) && !routes.forget(1));
        routes.announce(2, refused()).expect("room again");
    }
}
