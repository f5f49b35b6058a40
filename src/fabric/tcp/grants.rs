//! The grants of a link: the memory that the peer may write or read, checked on each use
//! (specification 3.1a).
//!
//! The table owns what it grants, so a granted tensor can be neither freed nor used meanwhile. Keys
//! are random: a peer can't guess one that it was not given, and loses the link with the first
//! guess.

use super::frame::FrameTarget;
use super::violation::{TcpGrantViolation, TcpViolation};
use crate::fabric::PostError;
use crate::fabric::grant_keys::GrantKeys;
use crate::memory::{Span, Tensor, TensorMut};
use crate::wire::{Grant, Slot};
use std::collections::HashMap;
use std::hash::RandomState;

/// Grants that a link can have at a time.
pub(crate) const MAX_GRANTS: usize = Slot::COUNT as usize;

/// A granted tensor.
#[derive(Debug)]
pub(super) enum TcpGranted {
    /// Granted for writing.
    Write(TensorMut),
    /// Granted for reading.
    Read(Tensor),
}

struct TcpGrantEntry {
    span: Span,
    held: TcpGranted,
}

/// The grants of one link.
pub(super) struct TcpGrants {
    entries: HashMap<u32, TcpGrantEntry, foldhash::fast::RandomState>,
    keys: GrantKeys<RandomState>,
}

impl Default for TcpGrants {
    fn default() -> Self {
        TcpGrants { entries: HashMap::default(), keys: GrantKeys::new(RandomState::new()) }
    }
}

impl TcpGrants {
    /// Grants all of `held`, which lies at `span`; `None` means that it has no bytes.
    ///
    /// # Errors
    /// [`PostError::Full`], with `held`.
    pub(super) fn add(
        &mut self,
        held: TcpGranted,
        span: Option<Span>,
    ) -> Result<Grant, (PostError, TcpGranted)> {
        if self.entries.len() >= MAX_GRANTS {
            return Err((PostError::Full, held));
        }
        let span = span.unwrap_or(Span { region: 0, offset: 0, len: 0 });
        let key = loop {
            let key = self.keys.draw();
            if !self.entries.contains_key(&key) {
                break key;
            }
        };
        self.entries.insert(key, TcpGrantEntry { span, held });
        Ok(Grant { region: span.region, key, offset: span.offset, len: span.len })
    }

    /// Revokes a grant for writing.
    pub(super) fn revoke(&mut self, grant: &Grant) -> Option<TensorMut> {
        if !matches!(self.entries.get(&grant.key)?.held, TcpGranted::Write(_)) {
            return None;
        }
        match self.entries.remove(&grant.key)?.held {
            TcpGranted::Write(tensor) => Some(tensor),
            TcpGranted::Read(_) => None,
        }
    }

    /// Revokes a grant for reading.
    pub(super) fn withdraw(&mut self, grant: &Grant) {
        if self.entries.get(&grant.key).is_some_and(|entry| matches!(entry.held, TcpGranted::Read(_))) {
            self.entries.remove(&grant.key);
        }
    }

    /// The bytes that a write of `len` bytes may change.
    ///
    /// # Errors
    /// The violation, if no grant allows the write.
    #[inline]
    pub(super) fn writable(&mut self, target: FrameTarget, len: u64) -> Result<&mut [u8], TcpViolation> {
        let (held, start) = self.find(target, len)?;
        let TcpGranted::Write(tensor) = held else {
            return Err(refuse(target, len, TcpGrantViolation::ReadOnly));
        };
        // Inside the tensor, so it fits.
        let range = start..start + len as usize;
        tensor.bytes_mut().get_mut(range).ok_or_else(|| refuse(target, len, TcpGrantViolation::OutsideGrant))
    }

    /// The tensor that a read of `len` bytes is from, and where it starts in it.
    ///
    /// # Errors
    /// The violation, if no grant allows the read.
    pub(super) fn readable(
        &mut self,
        source: FrameTarget,
        len: u64,
    ) -> Result<(&Tensor, usize), TcpViolation> {
        match self.find(source, len)? {
            (TcpGranted::Read(tensor), start) => Ok((tensor, start)),
            _ => Err(refuse(source, len, TcpGrantViolation::WriteOnly)),
        }
    }

    /// The entry for a key, and the offset of the access in it.
    #[inline]
    fn find(&mut self, target: FrameTarget, len: u64) -> Result<(&mut TcpGranted, usize), TcpViolation> {
        let Some(entry) = self.entries.get_mut(&target.key) else {
            return Err(refuse(target, len, TcpGrantViolation::UnknownKey));
        };
        if entry.span.region != target.region {
            return Err(refuse(target, len, TcpGrantViolation::OtherRegion));
        }
        let end = target.offset.checked_add(len);
        let limit = entry.span.offset + entry.span.len; // no overflow: it lies in a region
        if target.offset < entry.span.offset || end.is_none_or(|end| end > limit) {
            return Err(refuse(target, len, TcpGrantViolation::OutsideGrant));
        }
        Ok((&mut entry.held, (target.offset - entry.span.offset) as usize))
    }
}

#[cold]
fn refuse(target: FrameTarget, len: u64, why: TcpGrantViolation) -> TcpViolation {
    TcpViolation::Grant { region: target.region, offset: target.offset, len, why }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{pool, tensor, tensor_mut};
    use super::*;
    use crate::memory::Pool;

    fn why(result: Result<&mut [u8], TcpViolation>) -> TcpGrantViolation {
        match result {
            Err(TcpViolation::Grant { why, .. }) => why,
            other => panic!("{other:?}"),
        }
    }

    fn writable(grants: &mut TcpGrants, len: usize) -> Grant {
        writable_of(&pool(), grants, len)
    }

    fn writable_of(pool: &Pool, grants: &mut TcpGrants, len: usize) -> Grant {
        let held = tensor_mut(pool, len);
        let span = held.span();
        grants.add(TcpGranted::Write(held), span).expect("room")
    }

    #[test]
    fn a_grant_allows_its_own_bytes_and_no_others() {
        let mut grants = TcpGrants::default();
        let grant = writable(&mut grants, 64);
        let whole = FrameTarget::from(&grant);
        assert_eq!(grants.writable(whole, 64).expect("granted").len(), 64);
        let tail = FrameTarget { offset: grant.offset + 60, ..whole };
        assert_eq!(grants.writable(tail, 4).expect("granted").len(), 4);
        assert_eq!(why(grants.writable(whole, 65)), TcpGrantViolation::OutsideGrant);
        assert_eq!(why(grants.writable(tail, 5)), TcpGrantViolation::OutsideGrant);
        assert_eq!(why(grants.writable(tail, u64::MAX)), TcpGrantViolation::OutsideGrant);
        let far = FrameTarget { offset: u64::MAX, ..whole };
        assert_eq!(why(grants.writable(far, 2)), TcpGrantViolation::OutsideGrant);
        let before = FrameTarget { offset: grant.offset.wrapping_sub(1), ..whole };
        assert_eq!(why(grants.writable(before, 1)), TcpGrantViolation::OutsideGrant);
        let other = FrameTarget { region: grant.region + 1, ..whole };
        assert_eq!(why(grants.writable(other, 1)), TcpGrantViolation::OtherRegion);
        let unknown = FrameTarget { key: grant.key ^ 1, ..whole };
        assert_eq!(why(grants.writable(unknown, 1)), TcpGrantViolation::UnknownKey);
    }

    #[test]
    fn keys_are_not_in_a_row_and_a_revoked_one_is_invalid() {
        let (mut grants, pool) = (TcpGrants::default(), pool());
        let keys: Vec<Grant> = (0..100).map(|_| writable_of(&pool, &mut grants, 8)).collect();
        let near = keys.windows(2).filter(|pair| pair[0].key.abs_diff(pair[1].key) < 1 << 16).count();
        assert!(near < 5, "{keys:?}");
        assert!(grants.revoke(&keys[3]).is_some());
        assert!(grants.revoke(&keys[3]).is_none());
        assert_eq!(why(grants.writable(FrameTarget::from(&keys[3]), 8)), TcpGrantViolation::UnknownKey);
        assert!(grants.writable(FrameTarget::from(&keys[4]), 8).is_ok());
    }

    #[test]
    fn no_key_of_a_revoked_grant_comes_again() {
        // Keys that are drawn one by one would meet about eight times.
        const KEYS: usize = 1 << 18;
        let (mut grants, mut keys) = (TcpGrants::default(), std::collections::HashSet::new());
        let source = tensor(&pool(), &[7; 16]);
        for _ in 0..KEYS {
            let grant = grants.add(TcpGranted::Read(source.clone()), source.span()).expect("room");
            grants.withdraw(&grant);
            keys.insert(grant.key);
        }
        assert_eq!(keys.len(), KEYS);
    }

    #[test]
    fn a_grant_to_read_does_not_allow_a_write_nor_the_reverse() {
        let pool = pool();
        let mut grants = TcpGrants::default();
        let source = tensor(&pool, &[7; 16]);
        let read = grants.add(TcpGranted::Read(source.clone()), source.span()).expect("room");
        let target = FrameTarget::from(&read);
        assert_eq!(why(grants.writable(target, 1)), TcpGrantViolation::ReadOnly);
        let inside = FrameTarget { offset: read.offset + 3, ..target };
        assert_eq!(grants.readable(inside, 13).map(|(_, start)| start), Ok(3));
        assert!(grants.revoke(&read).is_none());
        let write = writable(&mut grants, 16);
        let said = grants.readable(FrameTarget::from(&write), 1).expect_err("refused");
        assert!(matches!(said, TcpViolation::Grant { why: TcpGrantViolation::WriteOnly, .. }), "{said:?}");
        grants.withdraw(&write);
        assert!(grants.revoke(&write).is_some());
        grants.withdraw(&read);
        assert!(grants.readable(target, 1).is_err());
    }

    #[test]
    fn a_full_table_returns_the_tensor() {
        let pool = pool();
        let mut grants = TcpGrants::default();
        let source = tensor(&pool, &[1; 4]);
        for _ in 0..MAX_GRANTS {
            grants.add(TcpGranted::Read(source.clone()), source.span()).expect("room");
        }
        let (error, held) = grants.add(TcpGranted::Read(source.clone()), source.span()).expect_err("full");
        assert_eq!(error, PostError::Full);
        assert!(matches!(held, TcpGranted::Read(_)));
    }
}
