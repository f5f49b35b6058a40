//! The borrower's side of loans: places in this process's own lease table.

use super::announcer::Announcer;
use super::lease::give_back;
use super::segment::OwnWords;
use super::words::Load;
use crate::memory::LeaseSink;
use std::sync::atomic::{AtomicU64, Ordering};

/// This process's table of loans that it holds of the peer's. It outlives the link while one is held.
pub(super) struct LeaseTable {
    words: OwnWords,
    /// For each place the number of the loan that holds it; 0 if none does.
    held: Box<[AtomicU64]>,
    announcer: Announcer,
}

impl LeaseTable {
    /// An empty table on these words of the own segment.
    pub(super) fn new(words: OwnWords, announcer: Announcer) -> Self {
        let held = (0..words.len()).map(|_| AtomicU64::new(0)).collect();
        LeaseTable { words, held, announcer }
    }

    /// Takes a place for a loan of the peer's, as the peer has numbered both.
    ///
    /// # Errors
    /// What is wrong with them.
    pub(super) fn take(&self, place: u64, number: u64) -> Result<u32, String> {
        let held = usize::try_from(place).ok().and_then(|place| self.held.get(place));
        let Some(held) = held else {
            return Err(format!("it lent into place {place} of a table of {}", self.held.len()));
        };
        if number == 0 {
            return Err("it gave a loan the number 0".into());
        }
        // Acquire: the peer uses a place again only after it saw the give-back, which came after the place
        // was cleared; so an honest peer's places are clear here.
        if held.load(Ordering::Acquire) != 0 {
            return Err(format!("it lent into place {place}, where another loan is still held"));
        }
        held.store(number, Ordering::Relaxed);
        Ok(place as u32)
    }
}

impl LeaseSink for LeaseTable {
    fn give_back(&self, index: u32) {
        let index = index as usize;
        // Each lease was taken and is given back once. Relaxed: whoever hands a lease to another thread
        // synchronises with it.
        let number = self.held[index].swap(0, Ordering::AcqRel);
        give_back(&self.words, index, number);
        self.announcer.announce();
    }
}
