//! Tensors outside the pool, made ready to be sent on the thread of the caller. They are registered
//! where the fabric can, else staged: copied into the pool. Both are counted.

use super::context::Context;
use crate::fabric::Registrar;
use crate::link::{TensorKey, Value};
use crate::matching::{Error, PeerIndex};
use crate::memory::{self, Tensor};
use crate::telemetry::{Counter, Gauge, SharedCounters, Snapshot};
use std::sync::{Arc, OnceLock};

/// The smallest tensor that is registered, in bytes. A copy of fewer bytes costs less than a
/// registration, and no more than a lookup.
pub(crate) const REGISTERED_FROM: u64 = 4096;

/// Whether the fabric to a peer sends what the registrar has registered.
type SendsRegistered = Box<dyn Fn(PeerIndex) -> bool + Send + Sync>;

/// The registrar of memory outside the pool, and the counters.
#[derive(Default)]
pub(super) struct Foreign {
    registrar: OnceLock<(Arc<dyn Registrar>, SendsRegistered)>,
    counters: SharedCounters,
}

impl Foreign {
    /// Registers memory with `registrar` from now on, for the peers of `sends_registered`. The
    /// first registrar counts.
    pub fn register_by(&self, registrar: Arc<dyn Registrar>, sends_registered: SendsRegistered) {
        let _ = self.registrar.set((registrar, sends_registered));
    }

    pub fn counted(&self) -> Snapshot {
        let Some((registrar, _)) = self.registrar.get() else { return self.counters.snapshot() };
        self.counters.add(Counter::RegistrationsEnded, registrar.take_ended());
        let mut counted = self.counters.snapshot();
        counted.raise(Gauge::RegisteredBytes, registrar.registered_bytes());
        counted
    }
}

impl Context {
    /// The tensor in memory that can be sent to this peer.
    pub(super) fn movable(&self, key: &TensorKey, peer: PeerIndex, tensor: Tensor) -> Result<Tensor, Error> {
        if self.is_ours(&tensor) {
            return Ok(tensor);
        }
        match self.registered(peer, &tensor) {
            Some(registered) => Ok(registered),
            None => self.staged(key, &tensor),
        }
    }

    /// Whether a value can be sent to peers as it is.
    #[inline]
    pub(super) fn is_movable(&self, value: &Value) -> bool {
        match value {
            Value::Tensor(tensor) => self.is_ours(tensor),
            Value::Dead => true,
        }
    }

    /// Whether the bytes lie in the pool of this node, the only memory that its peers have mapped,
    /// or there are none.
    #[inline]
    pub(super) fn is_ours(&self, tensor: &Tensor) -> bool {
        self.pool.has(tensor) || tensor.meta().bytes() == 0
    }

    fn registered(&self, peer: PeerIndex, tensor: &Tensor) -> Option<Tensor> {
        let (registrar, _) = self.foreign.registrar.get().filter(|(_, sends)| sends(peer))?;
        if !tensor.is_foreign() || tensor.meta().bytes() < REGISTERED_FROM {
            return None;
        }
        let done = registrar.register(&self.pool, tensor);
        let how = match (&done.tensor, done.is_known) {
            (Some(_), true) => Counter::RegistrationsFound,
            (Some(_), false) => Counter::RegistrationsMade,
            (None, _) => Counter::RegistrationsRefused,
        };
        self.foreign.counters.add(how, 1);
        self.foreign.counters.add(Counter::RegistrationsEnded, done.ended);
        done.tensor
    }

    fn staged(&self, key: &TensorKey, tensor: &Tensor) -> Result<Tensor, Error> {
        let copy = self.pool.tensor(tensor.meta().clone());
        let no_room = |error| Error::NoRoom { key: key.to_string(), source: Arc::new(error), granted: None };
        let mut copy = copy.map_err(no_room)?;
        memory::copy(copy.bytes_mut(), tensor.bytes());
        self.foreign.counters.add(Counter::TensorsStaged, 1);
        self.foreign.counters.add(Counter::BytesStaged, tensor.meta().bytes());
        Ok(copy.freeze())
    }
}
