//! Bits that flip on their way. No fabric reports them; data validation finds them.

use super::network::SimState;
use crate::memory::{LockPolicy, PagePolicy, PeerRegion, Pool, PoolOptions, Region, RegionOptions};
use crate::wire::message::{Message, RecordValue};
use crate::wire::{DType, Shape, TensorMeta};
use std::sync::Arc;

/// The smallest size of a region.
const PAGE: u64 = 4096;

impl SimState {
    /// Flips one bit of bytes that have reached a side, with the configured probability.
    pub fn flip(&mut self, to: usize, bytes: &mut [u8]) -> bool {
        let per_mille = self.processes[self.sides[to].process.0 as usize].flip_per_mille;
        if bytes.is_empty() || !self.random.chance(per_mille) {
            return false;
        }
        let bit = self.random.next() % (8 * bytes.len() as u64);
        bytes[(bit / 8) as usize] ^= 1 << (bit % 8);
        self.note("flip", to, bit);
        true
    }

    /// Flips a bit of the tensor in a record. Other messages stay as they are.
    pub(super) fn flip_record(&mut self, to: usize, message: &mut [u8]) {
        let Ok(Message::Record { value: RecordValue::Bytes { data, .. }, .. }) = Message::decode(message)
        else {
            return;
        };
        let start = message.len() - data.len();
        self.flip(to, &mut message[start..]);
    }

    /// Flips a bit of a loan: the borrower then sees a changed copy, at this place.
    pub(super) fn flip_loan(&mut self, to: usize, lent: &[u8]) -> Option<(Arc<PeerRegion>, u64)> {
        let mut bytes = lent.to_vec();
        self.flip(to, &mut bytes).then(|| elsewhere(&bytes))
    }
}

/// A region with a copy of these bytes, and their offset in it.
fn elsewhere(bytes: &[u8]) -> (Arc<PeerRegion>, u64) {
    let len = (bytes.len() as u64 + PAGE).next_multiple_of(PAGE).max(4 * PAGE);
    let options = RegionOptions { pages: PagePolicy::Plain, lock: LockPolicy::No, ..RegionOptions::new(len) };
    let region = Region::create(0, &options).expect("memory for a flipped loan");
    let file = region.fd().try_clone_to_owned().expect("a descriptor");
    let options = PoolOptions { poison: false, max_blocks: 16, ..PoolOptions::default() };
    let pool = Pool::new(region, options).expect("a pool");
    let shape = Shape::new(&[bytes.len() as u64]).expect("a shape");
    let mut tensor = pool.tensor(TensorMeta::new(DType::U8, shape).expect("a size")).expect("room");
    tensor.bytes_mut().copy_from_slice(bytes);
    let offset = tensor.span().map_or(0, |span| span.offset);
    (Arc::new(PeerRegion::map(file, len).expect("a second map")), offset)
}
