//! The doorbells of a process: one file with room for all its ports, which each peer maps.
//!
//! It goes along with each handshake, before it is known which port will take the link; the mark of
//! a cold link (`cold`) says which of the doorbells it is.
#![allow(clippy::disallowed_types)] // making and giving back a port

use super::doorbell::{Doorbell, PLACES, WORDS};
use super::idle::DoorbellRef;
use crate::fabric::shm::memory::segment::{SharedSegment, SharedWords};
use crate::fabric::{FabricError, FabricKind};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Ports that a fabric has at a time, at most.
pub(crate) const PORTS: usize = 64;
/// Bytes of the file.
pub(crate) const BYTES: usize = PORTS * WORDS * 8;

fn words(bell: usize) -> Range<usize> {
    bell * WORDS..(bell + 1) * WORDS
}

/// This process's doorbells.
pub(crate) struct Doorbells {
    segment: SharedSegment,
    file: OwnedFd,
    /// One bit for each that is in use.
    taken: Mutex<u64>,
}

impl Doorbells {
    /// Doorbells for [`PORTS`] ports: 64 KiB.
    ///
    /// # Errors
    /// If the memory can't be had.
    pub(crate) fn new() -> Result<Self, FabricError> {
        let (segment, file) = SharedSegment::new(BYTES).map_err(|error| FabricError::Os {
            fabric: FabricKind::Shm,
            tried: format!("making doorbells of {BYTES} bytes"),
            remedy: "free memory or raise the limit of open files",
            source: error.into(),
        })?;
        Ok(Doorbells { segment, file, taken: Mutex::default() })
    }

    /// The file, for peers to map.
    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// A doorbell for a new port.
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
        let bell = Doorbell::new(self.segment.words(words(number)));
        bell.reset();
        Ok(Arc::new(OwnDoorbell {
            bell,
            number,
            barriers_supported: AtomicBool::new(true),
            rang: AtomicU64::new(0),
            all: Arc::clone(self),
        }))
    }
}

/// The doorbell of one port.
pub(crate) struct OwnDoorbell {
    pub bell: Doorbell<SharedWords>,
    number: usize,
    /// Every peer takes part in heavy barriers.
    barriers_supported: AtomicBool,
    /// How often its port has rung those of peers.
    rang: AtomicU64,
    all: Arc<Doorbells>,
}

impl OwnDoorbell {
    /// Where to ring for a link of the port.
    pub(crate) fn doorbell_ref(&self, place: usize) -> DoorbellRef {
        debug_assert!(place < PLACES);
        DoorbellRef { bell: self.number, place }
    }

    /// Whether a ring comes for certain: every barrier was made.
    pub(crate) fn barriers_supported(&self) -> bool {
        self.barriers_supported.load(Ordering::Relaxed)
    }

    /// Its port has rung a peer's.
    pub(crate) fn count_ring(&self) {
        self.rang.fetch_add(1, Ordering::Relaxed);
    }

    /// How often its port has.
    pub(crate) fn rings(&self) -> u64 {
        self.rang.load(Ordering::Relaxed)
    }

    /// A barrier was not made, or a peer does not take part in them.
    pub(crate) fn set_barriers_unsupported(&self) {
        self.barriers_supported.store(false, Ordering::Relaxed);
    }
}

impl Drop for OwnDoorbell {
    fn drop(&mut self) {
        *self.all.taken.lock().unwrap_or_else(PoisonError::into_inner) &= !(1 << self.number);
    }
}

/// A peer's doorbells.
pub(crate) struct PeerDoorbells {
    bells: Vec<Doorbell<SharedWords>>,
}

impl PeerDoorbells {
    /// Maps what a peer has sent.
    ///
    /// # Errors
    /// If it can't be mapped. The caller has checked it.
    pub(crate) fn map(file: BorrowedFd<'_>) -> Result<Self, FabricError> {
        let segment = SharedSegment::map(file, BYTES).map_err(|error| FabricError::Os {
            fabric: FabricKind::Shm,
            tried: format!("mapping the peer's doorbells of {BYTES} bytes"),
            remedy: "free memory or address space",
            source: error.into(),
        })?;
        Ok(PeerDoorbells {
            bells: (0..PORTS).map(|bell| Doorbell::new(segment.words(words(bell)))).collect(),
        })
    }

    /// Rings where the peer has said; a doorbell that it does not have is silent.
    pub(crate) fn ring(&self, pull: DoorbellRef) {
        if let Some(bell) = self.bells.get(pull.bell) {
            bell.ring(pull.place);
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
    fn a_peer_rings_the_doorbell_that_it_was_told_of() {
        let all = Arc::new(Doorbells::new().expect("64 KiB"));
        let peer = PeerDoorbells::map(all.file.as_fd()).expect("mapped");
        let (first, second) = (all.take().expect("room"), all.take().expect("room"));
        peer.ring(second.doorbell_ref(99));
        peer.ring(DoorbellRef { bell: PORTS, place: 0 });
        assert!(!first.bell.is_rung());
        let mut places = Vec::new();
        second.bell.drain(|place| places.push(place));
        assert_eq!(places, [99]);
    }
}
