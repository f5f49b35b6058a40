//! Where things are in a segment.
//!
//! Each process makes one segment per link, which only it can write and which the peer maps
//! read-only. It holds what this process has to say: its rings, how far it has consumed the peer's,
//! which loans it has given back, and whether it still takes part. Pieces that are written at
//! different times are 128 bytes apart, since the hardware fetches cache lines in pairs.

use super::ring::SLOT_WORDS;
use crate::fabric::{FabricError, FabricKind, LinkOptions};
use std::ops::Range;

/// Words between pieces: 128 bytes.
const SPACING: usize = 16;
/// Word of the state line.
const STATE: usize = SPACING;
/// Where the consumer lines start.
const LINES: usize = 2 * SPACING;
/// Words of a page.
const PAGE: usize = 4096 / 8;

/// Slots of a ring, at most.
pub(crate) const MAX_DEPTH: u32 = 1 << 16;
/// Lanes of a link, at most.
pub(crate) const MAX_LANES: u8 = 64;

/// The layout of both segments of a link: ranges of 64-bit words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentLayout {
    lanes: usize,
    depth: usize,
}

impl SegmentLayout {
    /// The layout for these options.
    ///
    /// # Errors
    /// If lanes or depth are out of range.
    pub(crate) fn new(options: &LinkOptions) -> Result<Self, FabricError> {
        let refuse = |option, value, allowed| {
            Err(FabricError::Option { fabric: FabricKind::Shm, option, value, allowed })
        };
        if options.lanes == 0 || options.lanes > MAX_LANES {
            return refuse("lanes", u64::from(options.lanes), "1 to 64 are allowed");
        }
        if !options.depth.is_power_of_two() || options.depth < 2 || options.depth > MAX_DEPTH {
            return refuse("depth", u64::from(options.depth), "a power of two from 2 to 65536 is allowed");
        }
        Ok(SegmentLayout { lanes: usize::from(options.lanes), depth: options.depth as usize })
    }

    /// The line that says whether the segment's owner still takes part, and whether it wants to be
    /// rung for.
    pub(crate) fn state(&self) -> Range<usize> {
        STATE..STATE + 2
    }

    /// The line on which the owner says what it has consumed of the peer's ring of a lane.
    pub(crate) fn line(&self, lane: usize) -> Range<usize> {
        debug_assert!(lane < self.lanes);
        let start = LINES + lane * SPACING;
        start..start + 2
    }

    /// The owner's table of loans that it holds of the peer's.
    pub(crate) fn leases(&self) -> Range<usize> {
        let start = LINES + self.lanes * SPACING;
        start..start + self.lanes * self.depth
    }

    /// The owner's ring of a lane.
    pub(crate) fn ring(&self, lane: usize) -> Range<usize> {
        debug_assert!(lane < self.lanes);
        let len = self.depth * SLOT_WORDS;
        let start = self.leases().end.next_multiple_of(PAGE) + lane * len;
        start..start + len
    }

    /// Bytes of the segment: whole pages.
    pub(crate) fn bytes(&self) -> usize {
        // No overflow: 64 lanes of 2^16 slots of 256 bytes are 2^30 bytes.
        self.ring(self.lanes - 1).end.next_multiple_of(PAGE) * 8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(lanes: u8, depth: u32) -> LinkOptions {
        LinkOptions { lanes, depth, receives: 0, generation: 0 }
    }

    #[test]
    fn no_two_pieces_share_a_pair_of_cache_lines() {
        for (lanes, depth) in [(1, 2), (3, 64), (MAX_LANES, 16)] {
            let layout = SegmentLayout::new(&options(lanes, depth)).expect("in range");
            let lanes = usize::from(lanes);
            let mut pieces = vec![layout.state()];
            pieces.extend((0..lanes).map(|lane| layout.line(lane)));
            pieces.push(layout.leases());
            pieces.extend((0..lanes).map(|lane| layout.ring(lane)));
            for pair in pieces.windows(2) {
                assert!((pair[0].end - 1) / SPACING < pair[1].start / SPACING, "{pair:?}");
            }
            assert!(pieces.iter().all(|piece| piece.start.is_multiple_of(SPACING)));
            assert!(pieces.last().expect("a ring").end * 8 <= layout.bytes());
            assert!(layout.bytes().is_multiple_of(4096));
        }
    }

    #[test]
    fn options_out_of_range_are_refused_by_name() {
        for (lanes, depth, option) in [(0, 64, "lanes"), (65, 64, "lanes"), (1, 0, "depth"), (1, 48, "depth")]
        {
            let error = SegmentLayout::new(&options(lanes, depth)).expect_err("out of range").to_string();
            assert!(error.contains(option), "{error}");
        }
        assert!(SegmentLayout::new(&options(1, MAX_DEPTH * 2)).is_err());
        assert!(SegmentLayout::new(&options(MAX_LANES, MAX_DEPTH)).is_ok());
    }
}
