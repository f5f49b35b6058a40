//! The borrower's side of loans: this process's own loan table.

use super::lent::give_back;
use crate::fabric::shm::memory::segment::OwnWords;
use crate::fabric::shm::violation::ShmViolation;
use crate::fabric::shm::wakeup::ringer::Ringer;
use crate::fabric::words::{LoadWords, StoreWords};
use crate::memory::{GiveBack, LenderPart, LentBytes, PeerRegion};
use crate::mutants::{Mutant, is_on};
use std::ptr;
use std::sync::OnceLock;
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

/// Places that are allocated together, when the first of them is used.
const CHUNK: usize = 4096;

/// This process's loan table: the loans that it holds of the peer. It outlives the link while a
/// loan is held.
pub(crate) struct LoanTable {
    words: OwnWords,
    chunks: Box<[OnceLock<Box<[BorrowPlace]>>]>,
    ringer: Ringer,
}

/// A free place of the table, for the loan with this number.
pub(crate) struct FreePlace<'a> {
    held: &'a BorrowPlace,
    place: u32,
    number: u64,
}

impl FreePlace<'_> {
    /// Takes the place and the loan of these bytes.
    #[inline]
    pub(crate) fn take(self, part: LenderPart<'_>) -> LentBytes {
        let FreePlace { held, place, number } = self;
        held.region.store(ptr::from_ref(part.region()).addr(), Ordering::Relaxed);
        held.offset.store(part.offset(), Ordering::Relaxed);
        held.len.store(part.bytes().len() as u64, Ordering::Relaxed);
        // Release: pairs with `held_in`, which then reads the other fields.
        held.number.store(number, Ordering::Release);
        part.take(place)
    }
}

fn unused_chunk() -> Box<[BorrowPlace]> {
    (0..CHUNK).map(|_| BorrowPlace::default()).collect()
}

impl LoanTable {
    /// An empty table on these words of the own segment.
    pub(crate) fn new(words: OwnWords, ringer: Ringer) -> Self {
        let chunks: Box<[_]> = (0..words.len().div_ceil(CHUNK)).map(|_| OnceLock::new()).collect();
        // Now, so that the first loan allocates nothing.
        let _ = chunks.first().map(|chunk| chunk.get_or_init(unused_chunk));
        LoanTable { words, chunks, ringer }
    }

    /// A place; `None` if there is none, or none of its chunk was used.
    #[inline]
    fn place(&self, at: usize) -> Option<&BorrowPlace> {
        self.chunks.get(at / CHUNK)?.get()?.get(at % CHUNK)
    }

    /// A free place for a loan. The peer has chosen the place and the number.
    ///
    /// # Errors
    /// The violation, if the place or the number is not allowed.
    #[inline]
    pub(crate) fn free_place(&self, place: u64, number: u64) -> Result<FreePlace<'_>, ShmViolation> {
        let places = self.words.len();
        let Some(at) = usize::try_from(place).ok().filter(|at| *at < places) else {
            return Err(ShmViolation::LoanPlace { place, places });
        };
        let held = &self.chunks[at / CHUNK].get_or_init(unused_chunk)[at % CHUNK];
        if number == 0 {
            return Err(ShmViolation::LoanNumber);
        }
        // Acquire: the peer uses a place again only after it saw the give-back, which came after
        // the place was cleared. The places of an honest peer are therefore clear here.
        if held.number.load(Ordering::Acquire) != 0 && !is_on(Mutant::PlaceTakenTwice) {
            return Err(ShmViolation::LoanPlaceInUse { place });
        }
        Ok(FreePlace { held, place: place as u32, number })
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
        for place in self.chunks.iter().filter_map(OnceLock::get).flatten() {
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
        // Each loan was taken once and is given back once. No other thread writes to its place
        // meanwhile, and the transfer of the loan orders its drop on another thread.
        let Some(place) = self.place(index) else { unreachable!("its loan was taken") };
        let number = place.number.load(Ordering::Relaxed);
        // Release: pairs with the acquire in `free_place`, before the place's next use.
        place.number.store(0, Ordering::Release);
        give_back(&self.words, index, number);
        self.ringer.ring_if_idle();
    }
}
