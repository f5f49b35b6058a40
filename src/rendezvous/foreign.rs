//! Tensors that are not in the pool, made ready to be sent on the caller's thread: registered where
//! the fabric does that, else staged, which is to copy them into the pool. What was done is
//! counted.

use super::Error;
use super::context::Context;
use crate::fabric::Registrar;
use crate::link::TensorKey;
use crate::memory::Tensor;
use crate::telemetry::{Counter, Gauge, SharedCounters, Snapshot};
use std::sync::{Arc, OnceLock};

/// Bytes from which a tensor is registered: to copy fewer costs less than to register them, and not
/// more than to find out.
pub const REGISTERED_FROM: u64 = 4096;

/// How tensors outside the pool are sent.
#[derive(Default)]
pub(super) struct Foreign {
    registrar: OnceLock<Arc<dyn Registrar>>,
    counters: SharedCounters,
}

impl Foreign {
    /// Has memory registered from now on. The first one counts.
    pub fn register_by(&self, registrar: Arc<dyn Registrar>) {
        let _ = self.registrar.set(registrar);
    }

    pub fn counted(&self) -> Snapshot {
        let Some(registrar) = self.registrar.get() else { return self.counters.snapshot() };
        self.counters.add(Counter::RegistrationsEnded, registrar.take_ended());
        let mut counted = self.counters.snapshot();
        counted.raise(Gauge::RegisteredBytes, registrar.registered_bytes());
        counted
    }
}

impl Context {
    /// The tensor, where peers can be sent it from.
    pub(super) fn movable(&self, key: &TensorKey, tensor: Tensor) -> Result<Tensor, Error> {
        if tensor.meta().bytes() == 0 || self.is_ours(&tensor) {
            return Ok(tensor);
        }
        match self.registered(&tensor) {
            Some(registered) => Ok(registered),
            None => self.staged(key, &tensor),
        }
    }

    /// Whether the bytes lie in this node's pool, which alone its peers have mapped.
    fn is_ours(&self, tensor: &Tensor) -> bool {
        let region = self.pool.region();
        let start = region.base().as_ptr().addr();
        let bytes = tensor.as_ptr().addr();
        tensor.span().is_some() && (start..start + region.len() as usize).contains(&bytes)
    }

    fn registered(&self, tensor: &Tensor) -> Option<Tensor> {
        if !tensor.is_foreign() || tensor.meta().bytes() < REGISTERED_FROM {
            return None;
        }
        let done = self.foreign.registrar.get()?.register(&self.pool, tensor);
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
        let mut copy =
            copy.map_err(|error| Error::NoRoom { key: key.to_string(), source: Arc::new(error) })?;
        copy.bytes_mut().copy_from_slice(tensor.bytes());
        self.foreign.counters.add(Counter::TensorsStaged, 1);
        self.foreign.counters.add(Counter::BytesStaged, tensor.meta().bytes());
        Ok(copy.freeze())
    }
}
