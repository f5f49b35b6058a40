//! The doorbells of a process: one file with room for all its ports, which each peer maps.
//!
//! The file is sent in each handshake, before a port takes the link. The idle mark of a link
//! (`idle`) names the doorbell in it.
#![allow(clippy::disallowed_types)] // making and dropping a port

use super::doorbell::{Doorbell, PLACES, WORDS};
use super::idle::DoorbellRef;
use crate::fabric::shm::memory::segment::{SharedSegment, SharedWords};
use crate::fabric::{FabricError, FabricKind};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Ports that a fabric can have at a time.
pub(crate) const PORTS: usize = 64;
/// Bytes of the file.
pub(crate) const BYTES: usize = PORTS * WORDS * 8;

fn words(number: usize) -> Range<usize> {
    number * WORDS..(number + 1) * WORDS
}

/// This process's doorbells.
pub(crate) struct Doorbells {
    segment: SharedSegment,
    file: OwnedFd,
    /// One bit for each doorbell in use.
    taken: Mutex<u64>,
}

impl Doorbells {
    /// Makes doorbells for [`PORTS`] ports: 64 KiB.
    ///
    /// # Errors
    /// If the memory can't be had.
    pub(crate) fn new() -> Result<Self, FabricError> {
        let (segment, file) = SharedSegment::new(BYTES).map_err(|error| FabricError::Os {
            fabric: FabricKind::Shm,
            tried: format!("making doorbells of {BYTES} bytes"),
            remedy: "free memory or raise the limit of open files (ulimit -n)",
            source: error,
        })?;
        Ok(Doorbells { segment, file, taken: Mutex::default() })
    }

    /// The file, for peers to map.
    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Takes a doorbell for a new port.
    ///
    /// # Errors
    /// If all are taken.
    pub(crate) fn take(self: &Arc<Self>) -> Result<Arc<OwnDoorbell>, FabricError> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let number = taken.trailing_ones() as usize;
        if number == PORTS {
            return Err(FabricError::Option {
                fabric: FabricKind::Shm,
                option: "ports",
                value: PORTS as u64 + 1,
                allowed: "a fabric has 64 ports at most: drop one, or give each fabric fewer pollers",
            });
        }
        *taken |= 1 << number;
        drop(taken);
        let doorbell = Doorbell::new(self.segment.words(words(number)));
        doorbell.reset();
        Ok(Arc::new(OwnDoorbell {
            doorbell,
            number,
            barriers_supported: AtomicBool::new(true),
            rings: AtomicU64::new(0),
            all: Arc::clone(self),
        }))
    }
}

/// The doorbell of one port.
pub(crate) struct OwnDoorbell {
    pub doorbell: Doorbell<SharedWords>,
    number: usize,
    /// Whether every peer takes part in heavy barriers, and all of them were made.
    barriers_supported: AtomicBool,
    /// How often the port has rung doorbells of peers.
    rings: AtomicU64,
    all: Arc<Doorbells>,
}

impl OwnDoorbell {
    /// The reference that a peer needs to ring for a link of the port.
    pub(crate) fn doorbell_ref(&self, place: usize) -> DoorbellRef {
        debug_assert!(place < PLACES);
        DoorbellRef { doorbell: self.number, place }
    }

    /// Whether no ring can be missed: every heavy barrier was made, in every peer.
    pub(crate) fn barriers_supported(&self) -> bool {
        self.barriers_supported.load(Ordering::Relaxed)
    }

    /// Counts that the port has rung a peer's doorbell.
    pub(crate) fn count_ring(&self) {
        self.rings.fetch_add(1, Ordering::Relaxed);
    }

    /// How often the port has rung doorbells of peers.
    pub(crate) fn rings(&self) -> u64 {
        self.rings.load(Ordering::Relaxed)
    }

    /// Records that a barrier was not made, or that a peer does not take part in barriers.
    pub(crate) fn set_barriers_unsupported(&self) {
        self.barriers_supported.store(false, Ordering::Relaxed);
    }
}

impl Drop for OwnDoorbell {
    fn drop(&mut self) {
        *self.all.taken.lock().unwrap_or_else(PoisonError::into_inner) &= !(1 << self.number);
    }
}

/// The pages that the peer has shared, mapped here for writing.
pub(crate) struct PeerDoorbells {
    doorbells: Vec<Doorbell<SharedWords>>,
}

impl PeerDoorbells {
    /// Maps the doorbells that a peer has sent. The caller has checked the file.
    ///
    /// # Errors
    /// If it can't be mapped.
    pub(crate) fn map(file: BorrowedFd<'_>) -> Result<Self, FabricError> {
        let segment = SharedSegment::map(file, BYTES).map_err(|error| FabricError::Os {
            fabric: FabricKind::Shm,
            tried: format!("mapping the peer's doorbells of {BYTES} bytes"),
            remedy: "free memory or address space",
            source: error.into(),
        })?;
        Ok(PeerDoorbells {
            doorbells: (0..PORTS).map(|number| Doorbell::new(segment.words(words(number)))).collect(),
        })
    }

    /// Rings the doorbell that a peer's idle mark names. Ignores a number that is out of range.
    pub(crate) fn ring(&self, to: DoorbellRef) {
        if let Some(doorbell) = self.doorbells.get(to.doorbell) {
            doorbell.ring(to.place);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_too_many_is_refused_and_one_that_ends_makes_room() {
        let all = Arc::new(Doorbells::new().expect("64 KiB"));
        let mut taken: Vec<_> = (0..PORTS).map(|_| all.take().expect("room")).collect();
        let error = all.take().err().expect("refused").to_string();
        assert!(error.contains("64 ports at most"), "{error}");
        let number = taken.remove(5).number;
        assert_eq!(all.take().expect("room").number, number);
    }

    #[test]
    fn a_peer_rings_the_doorbell_of_its_reference() {
        let all = Arc::new(Doorbells::new().expect("64 KiB"));
        let peer = PeerDoorbells::map(all.file.as_fd()).expect("mapped");
        let (first, second) = (all.take().expect("room"), all.take().expect("room"));
        peer.ring(second.doorbell_ref(99));
        peer.ring(DoorbellRef { doorbell: PORTS, place: 0 });
        assert!(!first.doorbell.is_rung());
        let mut places = Vec::new();
        second.doorbell.drain(|place| places.push(place));
        assert_eq!(places, [99]);
    }
}
