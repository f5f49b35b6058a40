//! The tensors that the peer may write or read, held until they are revoked.
//!
//! The device checks that an access is inside the pool and has the pool's key. It can't check the
//! part of the pool that a grant names, or whether the grant was revoked. So a peer is trusted with
//! the pool as a whole. A grant is used again only when the caller knows that no write to it is
//! under way. With memory windows (`windows`) each grant has a key of its own, by which it is found
//! here.

use crate::fabric::PostError;
use crate::memory::{Tensor, TensorMut};
use crate::wire::{Grant, Slot};
use std::collections::HashMap;

/// Grants of a link at a time: as many as an immediate can name.
pub(crate) const MAX_GRANTS: usize = Slot::COUNT as usize;

/// The grants of one link, by their place in the pool.
#[derive(Default)]
pub(super) struct VerbsGrants {
    writes: HashMap<u64, TensorMut, foldhash::fast::RandomState>,
    /// One tensor can be exposed more than once.
    reads: HashMap<u64, (Tensor, u32), foldhash::fast::RandomState>,
    /// Grants without bytes have no place.
    empty: Vec<TensorMut>,
    /// Those by memory windows, by their keys.
    windows: HashMap<u32, WindowGrant, foldhash::fast::RandomState>,
}

/// What the peer may do by a memory window.
struct WindowGrant {
    grant: Grant,
    /// The window, among those of its queue pair.
    at: usize,
    memory: WindowMemory,
}

enum WindowMemory {
    Written(TensorMut),
    Read(Tensor),
}

impl VerbsGrants {
    pub fn has_room(&self) -> bool {
        self.writes.len() + self.reads.len() + self.empty.len() + self.windows.len() < MAX_GRANTS
    }

    /// Adds a grant for writing by a window.
    pub fn add_write(&mut self, grant: Grant, at: usize, target: TensorMut) -> Grant {
        self.windows.insert(grant.key, WindowGrant { grant, at, memory: WindowMemory::Written(target) });
        grant
    }

    /// Adds a grant for reading by a window.
    pub fn add_read(&mut self, grant: Grant, at: usize, source: Tensor) -> Grant {
        self.windows.insert(grant.key, WindowGrant { grant, at, memory: WindowMemory::Read(source) });
        grant
    }

    /// The window of a grant for writing or reading; `None` if it has none.
    pub fn window_of(&self, grant: &Grant, to_write: bool) -> Option<usize> {
        let found = self.windows.get(&grant.key).filter(|found| found.grant == *grant)?;
        (matches!(found.memory, WindowMemory::Written(_)) == to_write).then_some(found.at)
    }

    /// Takes a grant for writing by a window back.
    pub fn end_write(&mut self, grant: &Grant) -> Option<TensorMut> {
        match self.windows.remove(&grant.key)?.memory {
            WindowMemory::Written(target) => Some(target),
            WindowMemory::Read(_) => None,
        }
    }

    /// Takes a grant for reading by a window back.
    pub fn end_read(&mut self, grant: &Grant) -> Option<Tensor> {
        match self.windows.remove(&grant.key)?.memory {
            WindowMemory::Read(source) => Some(source),
            WindowMemory::Written(_) => None,
        }
    }

    /// Grants a tensor of the pool for writing.
    ///
    /// # Errors
    /// [`PostError::Full`] with the tensor.
    pub fn add(&mut self, target: TensorMut, region: u16, key: u32) -> Result<Grant, (PostError, TensorMut)> {
        if !self.has_room() {
            return Err((PostError::Full, target));
        }
        match target.span().filter(|_| !target.bytes().is_empty()) {
            Some(span) => {
                let len = target.bytes().len() as u64;
                self.writes.insert(span.offset, target);
                Ok(Grant { region, key, offset: span.offset, len })
            }
            None => {
                self.empty.push(target);
                Ok(Grant { region, key, offset: 0, len: 0 })
            }
        }
    }

    /// Takes a grant for writing back.
    pub fn revoke(&mut self, grant: &Grant) -> Option<TensorMut> {
        if grant.len == 0 { self.empty.pop() } else { self.writes.remove(&grant.offset) }
    }

    /// Grants a tensor of the pool for reading.
    ///
    /// # Errors
    /// [`PostError::Full`].
    pub fn expose(&mut self, source: &Tensor, region: u16, key: u32) -> Result<Grant, PostError> {
        if !self.has_room() {
            return Err(PostError::Full);
        }
        let Some(span) = source.span().filter(|_| !source.bytes().is_empty()) else {
            return Ok(Grant { region, key, offset: 0, len: 0 });
        };
        self.reads.entry(span.offset).or_insert_with(|| (source.clone(), 0)).1 += 1;
        Ok(Grant { region, key, offset: span.offset, len: source.bytes().len() as u64 })
    }

    /// Takes a grant for reading back.
    pub fn withdraw(&mut self, grant: &Grant) {
        if grant.len == 0 {
            return;
        }
        if let Some((_, count)) = self.reads.get_mut(&grant.offset) {
            *count -= 1;
            if *count == 0 {
                self.reads.remove(&grant.offset);
            }
        }
    }
}
