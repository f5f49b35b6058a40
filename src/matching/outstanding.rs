//! The limit of values that were sent and not requested yet.

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

#[cfg(test)]
mod tests {
    use super::*;

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
