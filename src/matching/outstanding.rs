//! The limits of values that were sent and have not left, and of receives that wait.

use super::{Error, PeerIndex};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Adds `count` to the outstanding values. Beyond `limit` it adds nothing, not even for a moment:
/// a concurrent send must not fail because of a batch that is refused.
///
/// # Errors
/// The number of outstanding values, if `count` more are beyond the limit.
pub(crate) fn reserve(outstanding: &AtomicUsize, count: usize, limit: usize) -> Result<(), usize> {
    let more = |waiting: usize| waiting.checked_add(count).filter(|all| *all <= limit);
    outstanding.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).map(|_| ())
}

/// Limits the receives that are outstanding with each peer, without those of batches.
#[derive(Debug)]
pub(crate) struct ReceiveLimit {
    outstanding: Arc<[AtomicUsize]>,
    max: u32,
}

/// The right of one receive to be outstanding. Its drop gives the right back.
#[derive(Debug)]
pub(crate) struct ReceivePermit {
    outstanding: Arc<[AtomicUsize]>,
    peer: PeerIndex,
}

impl ReceiveLimit {
    /// At most `max` receives from each of `peers` peers.
    pub fn new(peers: usize, max: u32) -> Self {
        ReceiveLimit { outstanding: (0..peers).map(|_| AtomicUsize::new(0)).collect(), max }
    }

    /// Admits one more receive.
    ///
    /// # Errors
    /// If as many receives from this peer are outstanding as may.
    pub fn admit(&self, peer: PeerIndex) -> Result<ReceivePermit, Error> {
        reserve(&self.outstanding[peer.0 as usize], 1, self.max as usize)
            .map_err(|_| Error::too_many_receives(self.max))?;
        Ok(ReceivePermit { outstanding: self.outstanding.clone(), peer })
    }
}

impl Drop for ReceivePermit {
    fn drop(&mut self) {
        self.outstanding[self.peer.0 as usize].fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_peer_has_a_limit_of_its_own_and_a_permit_comes_back() {
        let limit = ReceiveLimit::new(2, 2);
        let [first, second] = [0, 1].map(PeerIndex);
        let held = [first, first, second].map(|peer| limit.admit(peer).expect("below the limit"));
        let refused = limit.admit(first).expect_err("one too many");
        assert!(matches!(refused, Error::ResourceExhausted { limit: 2, .. }), "{refused}");
        drop(limit.admit(second).expect("below the limit"));
        drop(held);
        drop(limit.admit(first).expect("the permits are back"));
    }

    const LIMIT: usize = 10;

    #[test]
    fn as_many_as_the_limit_and_no_more() {
        let outstanding = AtomicUsize::new(0);
        assert_eq!(reserve(&outstanding, LIMIT + 1, LIMIT), Err(0));
        assert_eq!(reserve(&outstanding, LIMIT - 1, LIMIT), Ok(()));
        assert_eq!(reserve(&outstanding, 2, LIMIT), Err(LIMIT - 1));
        assert_eq!(reserve(&outstanding, usize::MAX, LIMIT), Err(LIMIT - 1));
        assert_eq!(reserve(&outstanding, 1, LIMIT), Ok(()));
        assert_eq!(outstanding.into_inner(), LIMIT);
    }
}
