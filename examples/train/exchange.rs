//! The transport of the training as traits. Only their implementations know how tensors move.

use crate::error::Result;
use crate::latency::Latencies;
use serde::{Deserialize, Serialize};
use std::ops::DerefMut;

/// The worker's side.
pub trait WorkerExchange {
    /// The memory of one tensor.
    type Buffer: DerefMut<Target = [f32]>;

    /// One buffer for each tensor, to receive weights in. Called once.
    fn weight_buffers(&mut self) -> Result<Vec<Self::Buffer>>;

    /// Waits until every tensor of `weights` holds what its server published in `step`.
    fn pull(&mut self, step: u64, weights: &mut Vec<Self::Buffer>) -> Result<()>;

    /// One buffer for each tensor, to write the gradients of a step in; their contents are
    /// unspecified.
    fn gradient_buffers(&mut self, gradients: &mut Vec<Self::Buffer>) -> Result<()>;

    /// Sends every gradient to the server that owns the tensor; leaves `gradients` empty.
    fn push(&mut self, step: u64, gradients: &mut Vec<Self::Buffer>) -> Result<()>;
}

/// The server's side. Its tensors are those that it owns, in order.
pub trait ServerExchange {
    /// The memory of one tensor.
    type Buffer: DerefMut<Target = [f32]>;

    /// One buffer for each tensor, to write the weights of a step in; their contents are
    /// unspecified.
    fn weight_buffers(&mut self, weights: &mut Vec<Self::Buffer>) -> Result<()>;

    /// Sends the weights to every worker; leaves `weights` empty.
    fn publish(&mut self, step: u64, weights: &mut Vec<Self::Buffer>) -> Result<()>;

    /// One buffer for each worker and tensor, worker by worker, to receive gradients in. Called
    /// once.
    fn gradient_buffers(&mut self) -> Result<Vec<Self::Buffer>>;

    /// Waits until all of `gradients` hold what the workers pushed in `step`.
    fn collect(&mut self, step: u64, gradients: &mut Vec<Self::Buffer>) -> Result<()>;
}

/// The traffic of one process, as its transport counts it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Traffic {
    /// Tensors received from other processes.
    pub tensors_received: u64,
    /// Bytes of these tensors.
    pub bytes_received: u64,
    /// Operations given to the fabric.
    pub fabric_ops: u64,
    /// The fabric that carried them.
    pub fabric: String,
    /// The pages that the tensors lie in.
    pub pages: String,
    /// How long receives took.
    pub receives: Latencies,
}
