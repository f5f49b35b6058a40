//! A parameter server: owns some of the tensors, hands out their weights and applies the gradients.

use crate::error::Result;
use crate::exchange::ServerExchange;
use crate::model::Parameter;
use crate::plan::Plan;
use std::ops::Deref;

/// The rate of the first step. It falls linearly to 0 at the end.
const LEARNING_RATE: f32 = 0.2;
/// Batches of fewer images are noisier, so the rate is lower in proportion.
const FULL_BATCH: usize = 48;
/// The share of the last step's update that is kept.
const MOMENTUM: f32 = 0.9;

/// The tensors of one server.
#[derive(Debug)]
pub struct Shard {
    plan: Plan,
    tensors: Vec<Owned>,
}

#[derive(Debug)]
struct Owned {
    weights: Vec<f32>,
    velocity: Vec<f32>,
    /// Where the gradients of the workers are summed.
    sum: Vec<f32>,
}

impl Shard {
    /// The tensors of this server before the first step.
    pub fn new(plan: &Plan, server: usize) -> Shard {
        let owned = |parameter: Parameter| Owned {
            weights: parameter.initial(plan.seed),
            velocity: vec![0.0; parameter.len()],
            sum: vec![0.0; parameter.len()],
        };
        Shard { plan: plan.clone(), tensors: plan.owned(server).into_iter().map(owned).collect() }
    }

    /// The current weights, in the order of [`Plan::owned`].
    pub fn weights(&self) -> impl Iterator<Item = &[f32]> {
        self.tensors.iter().map(|owned| &owned.weights[..])
    }

    /// Sums the gradients of all workers, given worker by worker, and updates the weights.
    ///
    /// The sum always starts with worker 0: adding in the order of arrival would give other bits.
    pub fn update<G: Deref<Target = [f32]>>(&mut self, step: u64, gradients: &[G]) {
        let left = (self.plan.steps - step) as f32 / self.plan.steps as f32;
        let size = self.plan.batch.min(FULL_BATCH) as f32 / FULL_BATCH as f32;
        let rate = LEARNING_RATE * size * left;
        let stride = self.tensors.len();
        for (index, owned) in self.tensors.iter_mut().enumerate() {
            owned.sum.fill(0.0);
            for worker in 0..self.plan.workers {
                let gradient = &gradients[worker * stride + index];
                owned.sum.iter_mut().zip(gradient.iter()).for_each(|(sum, g)| *sum += g);
            }
            for ((weight, velocity), gradient) in
                owned.weights.iter_mut().zip(&mut owned.velocity).zip(&owned.sum)
            {
                *velocity = MOMENTUM * *velocity - rate * gradient;
                *weight += *velocity;
            }
        }
    }
}

/// Serves all steps of the plan, and then the final weights.
pub fn run<E: ServerExchange>(plan: &Plan, server: usize, exchange: &mut E) -> Result<()> {
    let mut shard = Shard::new(plan, server);
    let mut weights = Vec::new();
    let mut gradients = exchange.gradient_buffers()?;
    for step in 0..=plan.steps {
        exchange.weight_buffers(&mut weights)?;
        for (buffer, tensor) in weights.iter_mut().zip(shard.weights()) {
            buffer.copy_from_slice(tensor);
        }
        exchange.publish(step, &mut weights)?;
        if step < plan.steps {
            exchange.collect(step, &mut gradients)?;
            shard.update(step, &gradients);
        }
    }
    Ok(())
}
