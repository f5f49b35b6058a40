//! Where the lines and rings of the references lie in the mapping that both processes share.
//!
//! There are two sets: one for a reference, one for the same thing measured as a test. Neither
//! disturbs the other's count.

/// Slots of a ring at most.
pub const MAX_RING_SLOTS: u32 = 1024;
/// Slots of the ring that runs as a reference.
pub const RING_SLOTS: u32 = 64;
/// Bytes that a slot of a ring carries beside its sequence word.
pub const RING_PAYLOAD: usize = 56;

/// Distance between two cache lines: the prefetcher pulls pairs.
const LINE_DISTANCE: usize = 256;
/// Where the rings begin.
const RINGS: usize = 4096;
/// Bytes of one ring at its largest.
const RING_BYTES: usize = MAX_RING_SLOTS as usize * 64;
/// Bytes of the shared mapping.
pub const MAPPING_BYTES: usize = RINGS + 4 * RING_BYTES;

/// A set of one line and two rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Set {
    /// Runs beside the test that was asked for.
    Reference,
    /// Is the test that was asked for.
    Test,
}

/// Where the set's cache line begins in the mapping, in bytes.
pub fn line(set: Set) -> usize {
    set as usize * LINE_DISTANCE
}

/// Where the ring of this set and side (0 or 1) begins in the mapping, in bytes.
pub fn ring(set: Set, side: usize) -> usize {
    RINGS + (2 * set as usize + side) * RING_BYTES
}
