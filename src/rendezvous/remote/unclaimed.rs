//! Values that came when nobody waited for them any more: they belong to whoever asks next.

use super::Remote;
use crate::fabric::Port;
use crate::link::{Links, TensorKey, Want};
use crate::memory::{Tensor, TensorMut};
use crate::mutants::{Mutant, is_on};
use crate::rendezvous::Error;
use crate::rendezvous::waiter::{Payload, Waiter};
use crate::wire::TensorMeta;
use crate::wire::message::Side;
use std::sync::Arc;

/// A value that nobody waits for.
#[derive(Debug)]
pub(super) enum Unclaimed {
    Tensor { tensor: Tensor, sender: Side },
    Dead,
    Bytes { meta: TensorMeta, bytes: Box<[u8]>, sender: Side },
}

impl Remote {
    pub(super) fn keep_unclaimed(&mut self, key: TensorKey, unclaimed: Unclaimed) {
        if self.steps.is_live(key.step) && !is_on(Mutant::UnclaimedDropped) {
            self.unclaimed.entry(key).or_default().push_back(unclaimed);
        }
    }

    /// Drops the values of keys that fit, in the order of the keys: the pool gets its blocks back in the same order in
    /// every run.
    pub(super) fn drop_unclaimed(&mut self, mut fits: impl FnMut(&TensorKey) -> bool) {
        let mut dropped: Vec<_> = self.unclaimed.extract_if(|key, _| fits(key)).collect();
        dropped.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
    }

    pub(super) fn claim(&mut self, key: &TensorKey) -> Option<Unclaimed> {
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
        unclaimed: Unclaimed,
    ) {
        let (tensor, sender) = match unclaimed {
            Unclaimed::Dead => {
                let payload = match want {
                    Want::Into(given) => Payload::Into(given),
                    Want::Fresh | Want::Borrow => Payload::Tensor(links.pool().empty()),
                };
                return Self::deliver(links.counters(), waiter, payload, true, Side::HEAP);
            }
            Unclaimed::Tensor { tensor, sender } => (tensor, sender),
            Unclaimed::Bytes { meta, bytes, sender } => match links.pool().tensor(meta.clone()) {
                Ok(mut tensor) => {
                    tensor.bytes_mut().copy_from_slice(&bytes);
                    (tensor.freeze(), sender)
                }
                Err(error) => {
                    waiter.complete(Err(Error::NoRoom { key: key.to_string(), source: Arc::new(error) }));
                    self.unclaimed.entry(key).or_default().push_front(Unclaimed::Bytes {
                        meta,
                        bytes,
                        sender,
                    });
                    return;
                }
            },
        };
        match want {
            Want::Fresh | Want::Borrow => {
                Self::deliver(links.counters(), waiter, Payload::Tensor(tensor), false, sender)
            }
            Want::Into(given) => match fill(given, &tensor) {
                Ok(given) => Self::deliver(links.counters(), waiter, Payload::Into(given), false, sender),
                Err(given) => {
                    let (sent, given) = (Box::new(tensor.meta().clone()), Box::new(given.meta().clone()));
                    waiter.complete(Err(Error::Misfit { key: key.to_string(), sent, given }));
                    let kept = Unclaimed::Tensor { tensor, sender };
                    self.unclaimed.entry(key).or_default().push_front(kept);
                }
            },
        }
    }
}

fn fill(mut given: TensorMut, from: &Tensor) -> Result<TensorMut, TensorMut> {
    if given.meta() != from.meta() {
        return Err(given);
    }
    given.bytes_mut().copy_from_slice(from.bytes());
    Ok(given)
}
