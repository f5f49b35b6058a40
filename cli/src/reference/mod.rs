//! What the hardware allows, with nothing of ours in between: the figures that ours are divided by.
//!
//! The lines and rings lie in the mapping that both processes share ([`SharedMapping`]), one set for a reference and one for
//! the same thing measured as a test, so that neither disturbs the other's count. The only room of the program
//! that touches raw memory, so the processor's own clock is here too.

mod cache_line;
mod landing;
mod memcpy;
mod ring_64;
mod shared_mapping;
mod stopwatch;

pub use cache_line::CacheLine;
pub use landing::Landing;
pub use memcpy::Memcpy;
pub use ring_64::{PAYLOAD as RING_PAYLOAD, Ring64};
pub use shared_mapping::SharedMapping;
pub use stopwatch::Stopwatch;

use super::perf::Subject;

/// Slots of a ring at most.
pub const MAX_RING_SLOTS: u32 = 1024;
/// Slots of the ring that runs as a reference.
pub const RING_SLOTS: u32 = 64;

/// Distance between two cache lines: the prefetcher pulls pairs.
const LINE_APART: usize = 256;
/// Where the rings begin.
const RINGS: usize = 4096;
/// Bytes of one ring at its largest.
const RING_BYTES: usize = MAX_RING_SLOTS as usize * 64;
/// Bytes of the shared mapping that the references need.
pub const MAPPING_BYTES: usize = RINGS + 4 * RING_BYTES;

/// Which set of lines and rings a subject uses.
fn set(subject: Subject) -> usize {
    usize::from(subject == Subject::Test)
}
