//! The allocator behind the magazines. It knows which parts of the region are free.
//!
//! `offset-allocator` keeps all its state outside the region, which peers can read and the NIC can
//! write. [`Central`] wraps it for three reasons:
//!
//! * It knows neither bytes nor alignment: [`Central`] counts in units.
//! * It accepts a stale handle: a [`Block`] can't be copied, and [`Central::free`] consumes it.
//! * It finds a free range only if the *rounded* size fits. A pool could then not hold one tensor
//!   of its own size: see [`Central::allocate_exact`].

use super::class::SizeClass;
use offset_allocator::{Allocation, Allocator};

/// A part of the region. The holder owns it.
#[derive(Debug)]
pub(crate) struct Block {
    offset: u32,
    units: u32,
    first: PieceHandle,
    /// The pieces that follow the first one without a gap, if one piece could not hold the block.
    rest: Box<[PieceHandle]>,
}

impl Block {
    /// Offset from the start of the region, in units.
    pub(crate) fn offset(&self) -> u32 {
        self.offset
    }

    /// Length in units.
    pub(crate) fn units(&self) -> u32 {
        self.units
    }
}

struct PieceHandle(Allocation<u32>);

impl std::fmt::Debug for PieceHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PieceHandle({})", self.0.offset)
    }
}

/// State of the allocator, in units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CentralStats {
    pub(crate) free: u32,
    /// The largest size that surely fits in one piece; up to an eighth more may fit.
    pub(crate) largest: u32,
    /// The smallest number of free units so far.
    pub(crate) least_free: u32,
    /// Whether the table of blocks is full.
    pub(crate) table_full: bool,
}

/// The free parts of a region.
pub(crate) struct Central {
    allocator: Allocator<u32>,
    free: u32,
    least_free: u32,
}

impl Central {
    /// An allocator of `units` free units that holds at most `blocks` blocks, free ones included.
    pub(crate) fn new(units: u32, blocks: u32) -> Central {
        Central { allocator: Allocator::with_max_allocs(units, blocks), free: units, least_free: units }
    }

    /// Allocates a block of the size of a class.
    pub(crate) fn allocate_class(&mut self, class: SizeClass) -> Option<Block> {
        self.in_one_piece(class.units())
    }

    /// Allocates a block of exactly this many units.
    ///
    /// The allocator rounds a request up to the next class, so it does not see that a free range of
    /// 100 units holds 100. In this case the block is put together from pieces whose sizes are
    /// classes. That succeeds whenever the range that the allocator finds first is large enough, so
    /// always in an empty pool.
    pub(crate) fn allocate_exact(&mut self, units: u32) -> Option<Block> {
        self.in_one_piece(units).or_else(|| self.in_pieces(units))
    }

    fn in_one_piece(&mut self, units: u32) -> Option<Block> {
        let first = self.allocator.allocate(units)?;
        self.take(units);
        Some(Block { offset: first.offset, units, first: PieceHandle(first), rest: Box::default() })
    }

    fn in_pieces(&mut self, units: u32) -> Option<Block> {
        if units > self.free {
            return None;
        }
        let mut pieces: Vec<PieceHandle> = Vec::new();
        let mut end = None;
        let mut missing = units;
        while missing > 0 {
            let part = SizeClass::within(missing.into()).units();
            let piece = self.allocator.allocate(part);
            let fits = piece.filter(|piece| end.is_none_or(|end| end == piece.offset));
            // Undo everything if the piece does not continue the block.
            let Some(piece) = fits else {
                pieces.extend(piece.map(PieceHandle));
                pieces.into_iter().for_each(|piece| self.allocator.free(piece.0));
                return None;
            };
            end = Some(piece.offset + part);
            missing -= part;
            pieces.push(PieceHandle(piece));
        }
        self.take(units);
        let mut pieces = pieces.into_iter();
        let first = pieces.next()?;
        Some(Block { offset: first.0.offset, units, first, rest: pieces.collect() })
    }

    fn take(&mut self, units: u32) {
        self.free -= units;
        self.least_free = self.least_free.min(self.free);
    }

    /// Frees a block.
    pub(crate) fn free(&mut self, block: Block) {
        self.free += block.units;
        self.allocator.free(block.first.0);
        for piece in block.rest {
            self.allocator.free(piece.0);
        }
    }

    pub(crate) fn room(&self) -> CentralStats {
        let report = self.allocator.storage_report();
        let table_full = report.total_free_space == 0 && self.free > 0;
        CentralStats {
            free: self.free,
            largest: report.largest_free_region,
            least_free: self.least_free,
            table_full,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_empty_pool_holds_a_block_of_any_size_up_to_its_own() {
        for units in [1, 17, 1000, 1_638_400] {
            let mut central = Central::new(units, 64);
            for asked in [units, units - units / 30, units / 2 + 1] {
                let block = central.allocate_exact(asked).expect("an empty pool");
                assert_eq!((block.offset(), block.units()), (0, asked));
                central.free(block);
                assert_eq!(central.room().free, units);
            }
        }
    }

    #[test]
    fn a_full_table_of_blocks_is_distinguished_from_a_full_pool() {
        let mut central = Central::new(1000, 16);
        let blocks: Vec<_> = std::iter::from_fn(|| central.allocate_exact(1)).collect();
        assert!(central.room().table_full);
        assert!(blocks.len() > 8);
        blocks.into_iter().for_each(|block| central.free(block));
        assert!(!central.room().table_full);
    }

    proptest! {
        #[test]
        fn blocks_never_overlap_and_all_come_back(
            units in 16u32..5000,
            steps in prop::collection::vec((any::<bool>(), 1u32..700, any::<prop::sample::Index>()), 1..200),
        ) {
            let mut central = Central::new(units, 1024);
            let mut live: Vec<Block> = Vec::new();
            for (give_back, asked, which) in steps {
                if give_back && !live.is_empty() {
                    central.free(live.swap_remove(which.index(live.len())));
                } else if let Some(block) = central.allocate_exact(asked) {
                    prop_assert_eq!(block.units(), asked);
                    prop_assert!(block.offset() + asked <= units);
                    let end = |block: &Block| block.offset + block.units;
                    let apart =
                        |other: &Block| end(other) <= block.offset || end(&block) <= other.offset;
                    prop_assert!(live.iter().all(apart));
                    live.push(block);
                }
                let used: u32 = live.iter().map(Block::units).sum();
                prop_assert_eq!(central.room().free, units - used);
            }
            live.into_iter().for_each(|block| central.free(block));
            let block = central.allocate_exact(units);
            prop_assert!(block.is_some(), "all free parts have been joined again");
        }
    }
}
