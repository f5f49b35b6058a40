//! The grants of a link: the memory that the peer may write or read, checked on each use
//! (specification 3.1a).
//!
//! The table owns what it grants, so a granted tensor can be neither freed nor used meanwhile. A
//! key is an index of the table and a generation, which grows with each use of the entry. A revoked
//! key stays invalid until its entry has been used 2^18 times more.

use crate::fabric::PostError;
use crate::fabric::shm::memory::order::OrderTarget;
use crate::fabric::shm::violation::{GrantViolation, ShmViolation};
use crate::memory::{Span, Tensor, TensorMut};
use crate::wire::Grant;

/// Grants that a link can have at a time.
pub(super) const MAX_GRANTS: usize = 1 << 14;
const INDEX_BITS: u32 = MAX_GRANTS.trailing_zeros();

/// A granted tensor.
#[derive(Debug)]
pub(super) enum ShmGranted {
    /// Granted for writing.
    Write(TensorMut),
    /// Granted for reading.
    Read(Tensor),
}

struct ShmGrantEntry {
    generation: u32,
    span: Span,
    held: Option<ShmGranted>,
}

/// The grants of one link.
#[derive(Default)]
pub(super) struct ShmGrants {
    entries: Vec<ShmGrantEntry>,
    free: Vec<u32>,
}

impl ShmGrants {
    /// Grants all of `held`, which lies at `span`; `None` means that it has no bytes.
    ///
    /// # Errors
    /// [`PostError::Full`], with `held`.
    pub(super) fn add(
        &mut self,
        held: ShmGranted,
        span: Option<Span>,
    ) -> Result<Grant, (PostError, ShmGranted)> {
        let span = span.unwrap_or(Span { region: 0, offset: 0, len: 0 });
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.entries.len() == MAX_GRANTS => return Err((PostError::Full, held)),
            None => {
                self.entries.push(ShmGrantEntry { generation: 0, span, held: None });
                self.entries.len() as u32 - 1
            }
        };
        let entry = &mut self.entries[index as usize];
        entry.generation = (entry.generation + 1) % (1 << (32 - INDEX_BITS));
        entry.span = span;
        entry.held = Some(held);
        let key = entry.generation << INDEX_BITS | index;
        Ok(Grant { region: span.region, key, offset: span.offset, len: span.len })
    }

    /// Revokes a grant for writing.
    pub(super) fn revoke(&mut self, grant: &Grant) -> Option<TensorMut> {
        match self.take(grant.key, |held| matches!(held, ShmGranted::Write(_)))? {
            ShmGranted::Write(tensor) => Some(tensor),
            ShmGranted::Read(_) => None,
        }
    }

    /// Revokes a grant for reading.
    pub(super) fn withdraw(&mut self, grant: &Grant) {
        self.take(grant.key, |held| matches!(held, ShmGranted::Read(_)));
    }

    fn take(&mut self, key: u32, kind: impl FnOnce(&ShmGranted) -> bool) -> Option<ShmGranted> {
        let index = key % MAX_GRANTS as u32;
        let entry = self.entries.get_mut(index as usize)?;
        if entry.generation != key >> INDEX_BITS || !entry.held.as_ref().is_some_and(kind) {
            return None;
        }
        let held = entry.held.take();
        self.free.push(index);
        held
    }

    /// The bytes that a write of `len` bytes may change.
    ///
    /// # Errors
    /// The violation, if the grant does not allow the write.
    #[inline]
    pub(super) fn writable(&mut self, target: OrderTarget, len: u64) -> Result<&mut [u8], ShmViolation> {
        match self.find(target, len)? {
            (Some(ShmGranted::Write(tensor)), start) => {
                let end = start + len as usize; // inside the tensor, so it fits
                let (offset, granted) = (target.offset, len);
                let outside = || refuse(target, len, GrantViolation::OutsideGrant { offset, len: granted });
                tensor.bytes_mut().get_mut(start..end).ok_or_else(outside)
            }
            _ => Err(refuse(target, len, GrantViolation::ReadOnly)),
        }
    }

    /// The tensor that a read of `len` bytes is from.
    ///
    /// # Errors
    /// The violation, if the grant does not allow the read.
    pub(super) fn readable(&mut self, exposed: OrderTarget, len: u64) -> Result<&Tensor, ShmViolation> {
        match self.find(exposed, len)? {
            (Some(ShmGranted::Read(tensor)), _) => Ok(tensor),
            _ => Err(refuse(exposed, len, GrantViolation::WriteOnly)),
        }
    }

    /// The entry for a key, and the offset of the access in it.
    #[inline]
    fn find(
        &mut self,
        target: OrderTarget,
        len: u64,
    ) -> Result<(Option<&mut ShmGranted>, usize), ShmViolation> {
        let entry = self.entries.get_mut(target.key as usize % MAX_GRANTS);
        let Some(entry) = entry.filter(|entry| entry.held.is_some()) else {
            return Err(refuse(target, len, GrantViolation::UnknownKey));
        };
        if entry.generation != target.key >> INDEX_BITS {
            return Err(refuse(target, len, GrantViolation::Revoked));
        }
        if entry.span.region != target.region {
            return Err(refuse(target, len, GrantViolation::OtherRegion));
        }
        let end = target.offset.checked_add(len);
        let limit = entry.span.offset + entry.span.len; // no overflow: it lies in a region
        if target.offset < entry.span.offset || end.is_none_or(|end| end > limit) {
            let Span { offset, len: granted, .. } = entry.span;
            let why = GrantViolation::OutsideGrant { offset, len: granted };
            return Err(refuse(target, len, why));
        }
        Ok((entry.held.as_mut(), (target.offset - entry.span.offset) as usize))
    }
}

#[cold]
fn refuse(target: OrderTarget, len: u64, why: GrantViolation) -> ShmViolation {
    ShmViolation::Grant { target, len, why }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::shm::testing::{pool, tensor, tensor_mut};

    #[test]
    fn a_grant_allows_its_own_bytes_and_no_others() {
        let pool = pool();
        let mut grants = ShmGrants::default();
        let grant = grants.add(ShmGranted::Write(tensor_mut(&pool, 64)), None).expect("room");
        assert_eq!(grant.len, 0);
        let held = tensor_mut(&pool, 64);
        let span = held.span();
        let grant = grants.add(ShmGranted::Write(held), span).expect("room");
        let whole = OrderTarget::from(&grant);
        assert_eq!(grants.writable(whole, 64).expect("granted").len(), 64);
        let tail = OrderTarget { offset: grant.offset + 60, ..whole };
        assert_eq!(grants.writable(tail, 4).expect("granted").len(), 4);
        let refused = |grants: &mut ShmGrants, target, len, text: &str| {
            let why = grants.writable(target, len).expect_err("refused").to_string();
            assert!(why.contains(text), "{why}");
        };
        refused(&mut grants, whole, 65, "64 bytes");
        refused(&mut grants, tail, 5, "are granted");
        refused(&mut grants, tail, u64::MAX, "are granted");
        refused(&mut grants, OrderTarget { offset: u64::MAX, ..whole }, 2, "are granted");
        refused(&mut grants, OrderTarget { offset: grant.offset - 1, ..whole }, 1, "are granted");
        refused(&mut grants, OrderTarget { region: grant.region + 1, ..whole }, 1, "another region");
        refused(&mut grants, OrderTarget { key: grant.key + 1, ..whole }, 1, "no grant");
        refused(&mut grants, OrderTarget { key: grant.key + (1 << INDEX_BITS), ..whole }, 1, "taken back");
    }

    #[test]
    fn a_revoked_key_is_invalid_even_when_its_entry_is_used_again() {
        let pool = pool();
        let mut grants = ShmGrants::default();
        let add = |grants: &mut ShmGrants| {
            let held = tensor_mut(&pool, 8);
            let span = held.span();
            grants.add(ShmGranted::Write(held), span).expect("room")
        };
        let old = add(&mut grants);
        assert!(grants.revoke(&old).is_some());
        assert!(grants.revoke(&old).is_none());
        assert!(grants.writable(OrderTarget::from(&old), 8).is_err());
        let new = add(&mut grants);
        assert_ne!(old.key, new.key);
        assert!(
            grants
                .writable(OrderTarget::from(&old), 8)
                .expect_err("stale")
                .to_string()
                .contains("taken back")
        );
        assert!(grants.revoke(&old).is_none());
        assert!(grants.writable(OrderTarget::from(&new), 8).is_ok());
    }

    #[test]
    fn a_grant_to_read_does_not_allow_a_write_nor_the_reverse() {
        let pool = pool();
        let mut grants = ShmGrants::default();
        let source = tensor(&pool, &[7; 16]);
        let read = grants.add(ShmGranted::Read(source.clone()), source.span()).expect("room");
        let target = OrderTarget::from(&read);
        assert_eq!(grants.writable(target, 1).err(), Some(refuse(target, 1, GrantViolation::ReadOnly)));
        assert_eq!(grants.readable(OrderTarget::from(&read), 16).expect("exposed").bytes(), [7; 16]);
        assert!(grants.revoke(&read).is_none());
        let held = tensor_mut(&pool, 16);
        let span = held.span();
        let write = grants.add(ShmGranted::Write(held), span).expect("room");
        let target = OrderTarget::from(&write);
        assert_eq!(grants.readable(target, 1).err(), Some(refuse(target, 1, GrantViolation::WriteOnly)));
        grants.withdraw(&write);
        assert!(grants.revoke(&write).is_some());
        grants.withdraw(&read);
        assert!(grants.readable(OrderTarget::from(&read), 1).is_err());
    }

    #[test]
    fn a_full_table_returns_the_tensor() {
        let pool = pool();
        let mut grants = ShmGrants::default();
        let source = tensor(&pool, &[1; 4]);
        for _ in 0..MAX_GRANTS {
            grants.add(ShmGranted::Read(source.clone()), source.span()).expect("room");
        }
        let (error, held) = grants.add(ShmGranted::Read(source.clone()), source.span()).expect_err("full");
        assert_eq!(error, PostError::Full);
        assert!(matches!(held, ShmGranted::Read(_)));
    }
}
