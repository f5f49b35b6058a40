//! The layout of a segment.
//!
//! Each process makes one segment per link, which only it can write and which the peer maps
//! read-only. The segment holds this process's ring and the number of orders that the process has
//! consumed. It also holds the loans that were given back, and the state of the process's side.
//! Parts that are written at different times are 128 bytes apart, since the hardware fetches cache
//! lines in pairs.

use super::slot::RingShape;
use crate::fabric::{FabricError, FabricKind, LinkOptions, MAX_LOANS};
use std::ops::Range;

/// Words between parts: 128 bytes.
const SPACING: usize = 16;
/// First word of the state line.
const STATE: usize = SPACING;
/// First word of the consumer line.
const LINE: usize = 2 * SPACING;
/// Places of the loan table that most links use.
const LOANS_USED: usize = 256;
/// Words of a page.
const PAGE: usize = 4096 / 8;

/// The largest number of orders that a link can have outstanding.
pub(crate) const MAX_DEPTH: u32 = 1 << 16;

/// The layout of both segments of a link: ranges of 64-bit words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentLayout {
    depth: u32,
}

impl SegmentLayout {
    /// The layout for these options.
    ///
    /// # Errors
    /// If the depth is out of range.
    pub(crate) fn new(options: &LinkOptions) -> Result<Self, FabricError> {
        let refuse = |option, value, allowed| {
            Err(FabricError::Option { fabric: FabricKind::Shm, option, value, allowed })
        };
        if !options.depth.is_power_of_two() || options.depth < 2 || options.depth > MAX_DEPTH {
            return refuse("depth", u64::from(options.depth), "a power of two from 2 to 65536 is allowed");
        }
        Ok(SegmentLayout { depth: options.depth })
    }

    /// The owner's state line: whether it still takes part, and its idle mark.
    pub(crate) fn state(&self) -> Range<usize> {
        STATE..STATE + 2
    }

    /// The owner's consumer line: the orders that it has consumed of the peer's ring.
    pub(crate) fn line(&self) -> Range<usize> {
        LINE..LINE + 2
    }

    /// The shape of both rings.
    pub(crate) fn ring_shape(&self) -> RingShape {
        RingShape::new(self.depth)
    }

    /// The owner's ring.
    pub(crate) fn ring(&self) -> Range<usize> {
        let start = (LINE + SPACING).next_multiple_of(PAGE);
        start..start + self.ring_shape().words()
    }

    /// The owner's loan table: the loans that it holds of the peer.
    pub(crate) fn loan_table(&self) -> Range<usize> {
        let start = self.ring().end.next_multiple_of(SPACING);
        start..start + MAX_LOANS
    }

    /// Bytes at the start that every link uses: all but the loan table beyond its first places.
    pub(crate) fn used_bytes(&self) -> usize {
        (self.loan_table().start + LOANS_USED).next_multiple_of(PAGE) * 8
    }

    /// Bytes of the segment: whole pages.
    pub(crate) fn bytes(&self) -> usize {
        // No overflow: a ring of 2^16 orders and 2^18 loans have less than 2^25 bytes.
        self.loan_table().end.next_multiple_of(PAGE) * 8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(depth: u32) -> LinkOptions {
        LinkOptions { depth, receives: 0, generation: 0 }
    }

    #[test]
    fn no_two_pieces_share_a_pair_of_cache_lines() {
        for depth in [2, 16, 64, MAX_DEPTH] {
            let layout = SegmentLayout::new(&options(depth)).expect("in range");
            let pieces = [layout.state(), layout.line(), layout.ring(), layout.loan_table()];
            for pair in pieces.windows(2) {
                assert!((pair[0].end - 1) / SPACING < pair[1].start / SPACING, "{pair:?}");
            }
            assert!(pieces.iter().all(|piece| piece.start.is_multiple_of(SPACING)));
            assert!(pieces.last().expect("a table").end * 8 <= layout.bytes());
            assert!(layout.bytes().is_multiple_of(4096));
        }
    }

    #[test]
    fn options_out_of_range_are_refused_by_name() {
        for depth in [0, 1, 48, MAX_DEPTH * 2] {
            let error = SegmentLayout::new(&options(depth)).expect_err("out of range").to_string();
            assert!(error.contains("depth"), "{error}");
        }
        assert!(SegmentLayout::new(&options(MAX_DEPTH)).is_ok());
    }
}
