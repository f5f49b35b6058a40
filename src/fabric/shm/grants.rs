//! The grants of a link: the memory that the peer may write or read, checked on each use
//! (specification 3.1a).
//!
//! The table owns what it grants, so a granted tensor can be neither freed nor used meanwhile. The
//! keys are random: nobody can tell one who was not told it. A revoked key is not used again before
//! 2^32 others were. The lowest bits of a key are its place in the table.

use crate::fabric::PostError;
use crate::fabric::grant_keys::GrantKeys;
use crate::fabric::shm::memory::order::OrderTarget;
use crate::fabric::shm::violation::{GrantViolation, ShmViolation};
use crate::memory::{Span, Tensor, TensorMut};
use crate::wire::Grant;
use std::hash::RandomState;

/// Grants that a link can have at a time.
pub(super) const MAX_GRANTS: usize = 1 << 14;
/// Places of a table with a grant.
const MIN_PLACES: usize = 16;

/// A granted tensor.
#[derive(Debug)]
pub(super) enum ShmGranted {
    /// Granted for writing.
    Write(TensorMut),
    /// Granted for reading.
    Read(Tensor),
}

struct ShmGrantEntry {
    key: u32,
    span: Span,
    /// `None` in a free place.
    held: Option<ShmGranted>,
}

const FREE: ShmGrantEntry = ShmGrantEntry { key: 0, span: NO_BYTES, held: None };
const NO_BYTES: Span = Span { region: 0, offset: 0, len: 0 };

/// The grants of one link.
pub(super) struct ShmGrants {
    /// The places, a power of two of them. At most half are in use, so a free one is found soon.
    entries: Vec<ShmGrantEntry>,
    used: usize,
    keys: GrantKeys<RandomState>,
}

impl ShmGrants {
    /// No grants, and keys that the kernel's random numbers decide.
    pub(super) fn new() -> Self {
        ShmGrants { entries: Vec::new(), used: 0, keys: GrantKeys::new(RandomState::new()) }
    }

    /// Grants all of `held`, which lies at `span`; `None` means that it has no bytes.
    ///
    /// # Errors
    /// [`PostError::Full`], with `held`.
    pub(super) fn add(
        &mut self,
        held: ShmGranted,
        span: Option<Span>,
    ) -> Result<Grant, (PostError, ShmGranted)> {
        if self.used == MAX_GRANTS {
            return Err((PostError::Full, held));
        }
        if 2 * self.used >= self.entries.len() {
            self.grow();
        }
        let span = span.unwrap_or(NO_BYTES);
        // Half of the draws find a free place, or more.
        loop {
            let key = self.keys.draw();
            let place = self.place(key);
            if self.entries[place].held.is_none() {
                self.entries[place] = ShmGrantEntry { key, span, held: Some(held) };
                self.used += 1;
                return Ok(Grant { region: span.region, key, offset: span.offset, len: span.len });
            }
        }
    }

    /// Doubles the places. Two grants that had different ones have different ones again.
    fn grow(&mut self) {
        let places = MIN_PLACES.max(2 * self.entries.len());
        let entries = std::mem::replace(&mut self.entries, (0..places).map(|_| FREE).collect());
        for entry in entries.into_iter().filter(|entry| entry.held.is_some()) {
            let place = self.place(entry.key);
            self.entries[place] = entry;
        }
    }

    /// The place of a key, which is beyond a table without places.
    #[inline]
    fn place(&self, key: u32) -> usize {
        key as usize & self.entries.len().wrapping_sub(1)
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
        let place = self.place(key);
        let entry = self.entries.get_mut(place)?;
        if entry.key != key || !entry.held.as_ref().is_some_and(kind) {
            return None;
        }
        self.used -= 1;
        entry.held.take()
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
        let place = self.place(target.key);
        let entry = self.entries.get_mut(place);
        let Some(entry) = entry.filter(|entry| entry.held.is_some() && entry.key == target.key) else {
            return Err(refuse(target, len, GrantViolation::UnknownKey));
        };
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
        let mut grants = ShmGrants::new();
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
        for bit in 0..32 {
            refused(&mut grants, OrderTarget { key: grant.key ^ 1 << bit, ..whole }, 1, "no grant");
        }
    }

    #[test]
    fn a_key_is_random_and_invalid_before_and_after_its_grant() {
        let pool = pool();
        let mut tables = [ShmGrants::new(), ShmGrants::new()];
        let unknown = |grants: &mut ShmGrants, grant: &Grant| {
            let why = grants.writable(OrderTarget::from(grant), 8).expect_err("no grant");
            matches!(why, ShmViolation::Grant { why: GrantViolation::UnknownKey, .. })
        };
        let mut earlier: Vec<Grant> = Vec::new();
        for _ in 0..200 {
            let [grant, other] = [0, 1].map(|k: usize| {
                let held = tensor_mut(&pool, 8);
                let span = held.span();
                tables[k].add(ShmGranted::Write(held), span).expect("room")
            });
            // What tells the next key if keys count, or are the places of a table.
            let told = earlier.iter().chain([&other]).flat_map(|grant| {
                let counts = [1, 2, 1 << 14, 1 << 18].map(|step| grant.key.wrapping_add(step));
                counts.into_iter().chain([grant.key])
            });
            assert!(!told.into_iter().any(|key| key == grant.key), "{:#x}", grant.key);
            assert!(unknown(&mut tables[0], &other), "a grant of another link");
            assert!(earlier.iter().all(|grant| unknown(&mut tables[0], grant)), "revoked");
            for (table, grant) in tables.iter_mut().zip([&grant, &other]) {
                assert!(table.revoke(grant).is_some());
            }
            earlier.push(grant);
        }
    }

    #[test]
    fn grants_stay_as_the_table_grows() {
        let pool = pool();
        let mut grants = ShmGrants::new();
        let source = tensor(&pool, &[5; 4]);
        let add = |grants: &mut ShmGrants| {
            grants.add(ShmGranted::Read(source.clone()), source.span()).expect("room")
        };
        let all: Vec<Grant> = (0..MAX_GRANTS).map(|_| add(&mut grants)).collect();
        assert_eq!(grants.entries.len(), 2 * MAX_GRANTS);
        for (k, grant) in all.iter().enumerate() {
            assert!(grants.readable(OrderTarget::from(grant), 4).is_ok(), "grant {k}");
            grants.withdraw(grant);
        }
        for _ in 0..3 * MAX_GRANTS {
            let grant = add(&mut grants);
            grants.withdraw(&grant);
        }
        assert_eq!((grants.used, grants.entries.len()), (0, 2 * MAX_GRANTS), "no more than it ever had");
    }

    #[test]
    fn a_revoked_key_is_invalid_even_when_its_entry_is_used_again() {
        let pool = pool();
        let mut grants = ShmGrants::new();
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
                .contains("no grant with that key")
        );
        assert!(grants.revoke(&old).is_none());
        assert!(grants.writable(OrderTarget::from(&new), 8).is_ok());
    }

    #[test]
    fn a_grant_to_read_does_not_allow_a_write_nor_the_reverse() {
        let pool = pool();
        let mut grants = ShmGrants::new();
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
        let mut grants = ShmGrants::new();
        let source = tensor(&pool, &[1; 4]);
        for _ in 0..MAX_GRANTS {
            grants.add(ShmGranted::Read(source.clone()), source.span()).expect("room");
        }
        let (error, held) = grants.add(ShmGranted::Read(source.clone()), source.span()).expect_err("full");
        assert_eq!(error, PostError::Full);
        assert!(matches!(held, ShmGranted::Read(_)));
    }
}
