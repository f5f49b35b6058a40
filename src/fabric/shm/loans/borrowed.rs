//! The borrower's side of loans: this process's own loan table.

use super::lent::give_back;
use crate::fabric::shm::memory::segment::OwnWords;
use crate::fabric::shm::violation::ShmViolation;
use crate::fabric::shm::wakeup::ringer::Ringer;
use crate::fabric::words::{LoadWords, StoreWords};
use crate::memory::{GiveBack, PeerRegion};
use crate::mutants::{Mutant, is_on};
use std::ptr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// A place of the table, and the bytes that are borrowed there.
#[derive(Default)]
struct BorrowPlace {
    /// Number of the loan that holds the place; 0 if it is free.
    number: AtomicU64,
    /// Address of the [`PeerRegion`] that the bytes lie in.
    region: AtomicUsize,
    offset: AtomicU64,
    len: AtomicU64,
}

/// This process's loan table: the loans that it holds of the peer. It outlives the link while a
/// loan is held.
pub(crate) struct LoanTable {
    words: OwnWords,
    held: Box<[BorrowPlace]>,
    /// All places from here on were never used.
    used: AtomicUsize,
    ringer: Ringer,
}

/// Free places. Their memory takes no room before they are used.
#[allow(unsafe_code)] // zeroed memory of the allocator
fn unused_places(count: usize) -> Box<[BorrowPlace]> {
    // SAFETY: a place consists of atomic integers, for which all zeros are a valid value.
    unsafe { Box::new_zeroed_slice(count).assume_init() }
}

impl LoanTable {
    /// An empty table on these words of the own segment.
    pub(crate) fn new(words: OwnWords, ringer: Ringer) -> Self {
        let held = unused_places(words.len());
        LoanTable { words, held, used: AtomicUsize::new(0), ringer }
    }

    /// Takes a place for a loan of `len` bytes at `offset` of a region. The peer has chosen the
    /// place and the number.
    ///
    /// # Errors
    /// The violation, if the place or the number is not allowed.
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
        // the place was cleared. The places of an honest peer are therefore clear here.
        if held.number.load(Ordering::Acquire) != 0 && !is_on(Mutant::PlaceTakenTwice) {
            return Err(ShmViolation::LoanPlaceInUse { place });
        }
        // Relaxed: one thread takes places, and `held_in` runs after its link has ended.
        if place as usize >= self.used.load(Ordering::Relaxed) {
            self.used.store(place as usize + 1, Ordering::Relaxed);
        }
        held.region.store(ptr::from_ref(region).addr(), Ordering::Relaxed);
        held.offset.store(offset, Ordering::Relaxed);
        held.len.store(len, Ordering::Relaxed);
        // Release: pairs with `held_in`, which then reads the other fields.
        held.number.store(number, Ordering::Release);
        Ok(place as u32)
    }

    /// Whether [`LoanTable::take`] takes the place for a loan with this number.
    #[inline]
    pub(crate) fn may_take(&self, place: u64, number: u64) -> bool {
        let held = usize::try_from(place).ok().and_then(|place| self.held.get(place));
        // Acquire: as in `take`.
        number != 0 && held.is_some_and(|held| held.number.load(Ordering::Acquire) == 0)
    }

    /// Fetches the word of a loan that is about to be given back. The peer has read it since the
    /// last loan in this place, and a message behind the give-back would wait for the line.
    #[inline]
    pub(crate) fn prefetch(&self, place: u64) {
        self.words.prefetch(place as usize);
    }

    /// Gives back a loan that no place was taken for, after its bytes were read.
    #[inline]
    pub(crate) fn give_back_untaken(&self, place: u64, number: u64) {
        give_back(&self.words, place as usize, number);
        self.ringer.ring_if_idle();
    }

    /// Adds the borrowed parts of a region, as offset and length. Only for a region without a link:
    /// its loans are only given back then.
    pub(crate) fn held_in(&self, region: &PeerRegion, spans: &mut Vec<(u64, u64)>) {
        for place in &self.held[..self.used.load(Ordering::Relaxed)] {
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
        // Each loan was taken once and is given back once. The drop of its guard on another thread
        // is ordered by the transfer of the guard; AcqRel also orders the place's next use.
        let number = self.held[index].number.swap(0, Ordering::AcqRel);
        give_back(&self.words, index, number);
        self.ringer.ring_if_idle();
    }
}
