//! Values that nobody took and whose link is gone: they belong to whoever asks next.
//!
//! While the link is there they are in line at their sender, with those that it has not given out (see
//! [`crate::protocol`]).

use super::Remote;
use crate::fabric::Port;
use crate::link::{HeldValue, Links, TensorKey, Want};
use crate::mutants::{Mutant, is_on};
use crate::rendezvous::waiter::Waiter;

impl Remote {
    pub(super) fn keep_unclaimed(&mut self, key: TensorKey, unclaimed: HeldValue) {
        if self.may_hold(key.step) && !is_on(Mutant::OrphansDropped) {
            self.unclaimed.entry(key).or_default().push_back(unclaimed);
        }
    }

    /// Drops the values of keys that fit, in the order of the keys: the pool gets its blocks back in the same order in
    /// every run.
    pub(super) fn drop_unclaimed(&mut self, mut fits: impl FnMut(&TensorKey) -> bool) {
        let mut dropped: Vec<_> = self.unclaimed.extract_if(|key, _| fits(key)).collect();
        dropped.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
    }

    pub(super) fn claim(&mut self, key: &TensorKey) -> Option<HeldValue> {
        let kept = self.unclaimed.get_mut(key)?;
        let first = kept.pop_front();
        if kept.is_empty() {
            self.unclaimed.remove(key);
        }
        first
    }

    pub(super) fn deliver_unclaimed<P: Port>(
        &mut self,
        links: &mut Links<P, Waiter>,
        key: TensorKey,
        want: Want,
        waiter: Waiter,
        unclaimed: HeldValue,
    ) {
        let (given, into) = match want {
            Want::Into(given) => (Some(given), true),
            Want::Fresh | Want::Borrow => (None, false),
        };
        match unclaimed.place(links.pool(), given, into) {
            Ok((received, sender)) => Self::arrived(links, waiter, received, sender),
            Err(unfit) => {
                let (left, error) = unfit.left();
                self.failed(links.counters(), waiter, &key, error);
                if let Some(value) = left {
                    self.unclaimed.entry(key).or_default().push_front(value);
                }
            }
        }
    }
}
