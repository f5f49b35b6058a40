//! Orphaned values: they were not taken, and their link is gone. The next receive of the key gets
//! them.
//!
//! As long as the link exists, such values are in line at their sender (see [`crate::protocol`]).

use super::{RemoteHandler, Waiter};
use crate::fabric::Port;
use crate::link::{Destination, Links, StashedValue, TensorKey};
use crate::mutants::{Mutant, is_on};

impl RemoteHandler {
    pub(super) fn store_orphan(&mut self, key: TensorKey, orphan: StashedValue) {
        if self.may_hold(key.step) && !is_on(Mutant::OrphansDropped) {
            self.orphans.entry(key).or_default().push_back(orphan);
        }
    }

    /// Drops the values of keys that fit, in the order of the keys. The pool then gets its blocks
    /// back in the same order in every run.
    pub(super) fn drop_orphans(&mut self, mut fits: impl FnMut(&TensorKey) -> bool) {
        let mut dropped: Vec<_> = self.orphans.extract_if(|key, _| fits(key)).collect();
        dropped.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
    }

    pub(super) fn take_orphan(&mut self, key: &TensorKey) -> Option<StashedValue> {
        let kept = self.orphans.get_mut(key)?;
        let first = kept.pop_front();
        if kept.is_empty() {
            self.orphans.remove(key);
        }
        first
    }

    pub(super) fn deliver_orphan<P: Port>(
        &mut self,
        links: &mut Links<P, Waiter>,
        key: TensorKey,
        destination: Destination,
        waiter: Waiter,
        orphan: StashedValue,
    ) {
        let (given, into) = match destination {
            Destination::Into(given) => (Some(given), true),
            Destination::Alloc | Destination::Borrow => (None, false),
        };
        match orphan.place(links.pool(), given, into) {
            Ok((received, sender)) => Self::arrived(links, waiter, received, sender),
            Err(rejected) => {
                let (remaining, error) = rejected.into_remaining();
                self.failed(links.counters(), waiter, &key, error);
                if let Some(value) = remaining {
                    self.orphans.entry(key).or_default().push_front(value);
                }
            }
        }
    }
}
