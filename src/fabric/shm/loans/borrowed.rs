//! The borrower's side of loans: places in this process's own lease table.

use super::lent::give_back;
use crate::fabric::shm::memory::segment::OwnWords;
use crate::fabric::shm::memory::words::LoadWords;
use crate::fabric::shm::violation::ShmViolation;
use crate::fabric::shm::wakeup::ringer::Ringer;
use crate::memory::{GiveBack, PeerRegion};
use std::ptr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// A place for a loan, and what is borrowed there.
#[derive(Default)]
struct BorrowPlace {
    /// The number of the loan that holds it; 0 if none does.
    number: AtomicU64,
    /// Which region of the peer's: the address of its mapping's owner.
    region: AtomicUsize,
    offset: AtomicU64,
    len: AtomicU64,
}

/// This process's table of loans that it holds of the peer's. It outlives the link while one is
/// held.
pub(crate) struct LoanTable {
    words: OwnWords,
    held: Box<[BorrowPlace]>,
    ringer: Ringer,
}

impl LoanTable {
    /// An empty table on these words of the own segment.
    pub(crate) fn new(words: OwnWords, ringer: Ringer) -> Self {
        let held = (0..words.len()).map(|_| BorrowPlace::default()).collect();
        LoanTable { words, held, ringer }
    }

    /// Takes a place for a loan of the peer's, as the peer has numbered both: `len` bytes at
    /// `offset` of a region.
    ///
    /// # Errors
    /// What is wrong with them.
    pub(crate) fn take(
        &self,
        place: u64,
        number: u64,
        (region, offset, len): (&PeerRegion, u64, u64),
    ) -> Result<u32, ShmViolation> {
        let held = usize::try_from(place).ok().and_then(|place| self.held.get(place));
        let Some(held) = held else {
            return Err(ShmViolation::LoanPlace { place, places: self.held.len() });
        };
        if number == 0 {
            return Err(ShmViolation::LoanNumber);
        }
        // Acquire: the peer uses a place again only after it saw the give-back, which came after
        // the place was cleared; so an honest peer's places are clear here.
        if held.number.load(Ordering::Acquire) != 0 {
            return Err(ShmViolation::LoanPlaceInUse { place });
        }
        held.region.store(ptr::from_ref(region).addr(), Ordering::Relaxed);
        held.offset.store(offset, Ordering::Relaxed);
        held.len.store(len, Ordering::Relaxed);
        // Release: pairs with `held_in`, which looks at the rest then.
        held.number.store(number, Ordering::Release);
        Ok(place as u32)
    }

    /// Adds what is borrowed of a region, as offset and length. No link may lead to the region any
    /// more: then places are only given back.
    pub(crate) fn held_in(&self, region: &PeerRegion, spans: &mut Vec<(u64, u64)>) {
        for place in &self.held {
            let is_held = place.number.load(Ordering::Acquire) != 0;
            if is_held && place.region.load(Ordering::Relaxed) == ptr::from_ref(region).addr() {
                spans.push((place.offset.load(Ordering::Relaxed), place.len.load(Ordering::Relaxed)));
            }
        }
    }
}

impl GiveBack for LoanTable {
    fn give_back(&self, index: u32) {
        let index = index as usize;
        // Each lease was taken and is given back once. Relaxed: whoever hands a lease to another
        // thread synchronises with it.
        let number = self.held[index].number.swap(0, Ordering::AcqRel);
        give_back(&self.words, index, number);
        self.ringer.ring_if_idle();
    }
}
