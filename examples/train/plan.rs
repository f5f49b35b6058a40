//! The division of work: the tensors of each server, the images of each worker, and the traffic.

use crate::model::{LAYERS, Parameter, TENSORS};
use crate::random::Random;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// A training run. Every process has the same plan and derives its own part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// Parameter servers.
    pub servers: usize,
    /// Workers.
    pub workers: usize,
    /// Updates of the weights.
    pub steps: u64,
    /// Images per step, over all workers.
    pub batch: usize,
    /// Decides the first weights and the order of the images.
    pub seed: u64,
}

impl Plan {
    /// The server that owns a tensor. Tensors are assigned in turn, so that each server gets
    /// weights of some layers.
    pub fn owner(&self, parameter: Parameter) -> usize {
        parameter.index() % self.servers
    }

    /// The tensors of a server, in order.
    pub fn owned(&self, server: usize) -> Vec<Parameter> {
        Parameter::all().filter(|parameter| self.owner(*parameter) == server).collect()
    }

    /// The part of each batch that a worker takes. Parts differ by one image at most.
    pub fn part(&self, worker: usize) -> Range<usize> {
        self.batch * worker / self.workers..self.batch * (worker + 1) / self.workers
    }

    /// Tensors that go from one process to another in the whole run. In each step every worker
    /// receives all weights and sends all gradients. At the end every worker receives the final
    /// weights.
    pub fn tensors_moved(&self) -> u64 {
        self.moves() * TENSORS as u64
    }

    /// Bytes of these tensors.
    pub fn bytes_moved(&self) -> u64 {
        self.moves() * model_bytes()
    }

    /// How often the whole model, as weights or as gradients, goes from one process to another.
    fn moves(&self) -> u64 {
        (2 * self.steps + 1) * self.workers as u64
    }

    /// The formula of [`Plan::tensors_moved`], with its numbers.
    pub fn tensors_formula(&self) -> String {
        format!(
            "(2 x {} steps + 1) x {} workers x {LAYERS} layers x 2 tensors = {}",
            self.steps,
            self.workers,
            self.tensors_moved()
        )
    }

    /// The formula of [`Plan::bytes_moved`], with its numbers.
    pub fn bytes_formula(&self) -> String {
        format!(
            "(2 x {} steps + 1) x {} workers x {} bytes of all layers = {}",
            self.steps,
            self.workers,
            model_bytes(),
            self.bytes_moved()
        )
    }

    /// The order of the training images.
    pub fn sampler(&self, images: usize) -> Sampler {
        Sampler { random: Random::new(self.seed, SHUFFLE), order: (0..images).collect(), at: images }
    }
}

/// The stream of random numbers that shuffles images; tensors have the streams below [`TENSORS`].
const SHUFFLE: u64 = 1 << 32;

fn model_bytes() -> u64 {
    let numbers: usize = Parameter::all().map(Parameter::len).sum();
    (numbers * size_of::<f32>()) as u64
}

/// Yields the images in random order, each once before any repeats.
#[derive(Debug)]
pub struct Sampler {
    random: Random,
    order: Vec<usize>,
    at: usize,
}

impl Sampler {
    /// The numbers of the next `batch` images, into `images`.
    pub fn next(&mut self, batch: usize, images: &mut Vec<usize>) {
        images.clear();
        for _ in 0..batch {
            if self.at == self.order.len() {
                self.random.shuffle(&mut self.order);
                self.at = 0;
            }
            images.push(self.order[self.at]);
            self.at += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(servers: usize, workers: usize) -> Plan {
        Plan { servers, workers, steps: 10, batch: 64, seed: 1 }
    }

    #[test]
    fn every_tensor_has_one_owner_and_every_server_has_weights() {
        for servers in 1..=3 {
            let plan = plan(servers, 1);
            let owned: Vec<_> = (0..servers).map(|server| plan.owned(server)).collect();
            assert_eq!(owned.iter().map(Vec::len).sum::<usize>(), TENSORS);
            assert!(owned.iter().all(|o| o.iter().any(|p| p.name().starts_with('w'))), "{owned:?}");
        }
    }

    #[test]
    fn the_parts_of_the_workers_cover_the_batch_without_overlap() {
        for workers in 1..=7 {
            let plan = plan(1, workers);
            let covered: Vec<usize> = (0..workers).flat_map(|worker| plan.part(worker)).collect();
            assert_eq!(covered, (0..64).collect::<Vec<_>>());
        }
    }

    #[test]
    fn the_formula_counts_weights_gradients_and_the_final_weights() {
        let plan = plan(2, 3);
        assert_eq!(plan.tensors_moved(), 21 * 3 * 6);
        assert_eq!(plan.bytes_moved(), 21 * 3 * 4 * (64 * 128 + 128 + 128 * 64 + 64 + 64 * 10 + 10));
        assert!(plan.tensors_formula().ends_with("= 378"), "{}", plan.tensors_formula());
        assert!(plan.bytes_formula().contains("68904 bytes"), "{}", plan.bytes_formula());
    }

    #[test]
    fn every_image_comes_once_before_any_comes_again() {
        let mut sampler = plan(1, 1).sampler(10);
        let mut images = Vec::new();
        let mut seen = Vec::new();
        for _ in 0..5 {
            sampler.next(4, &mut images);
            seen.extend_from_slice(&images);
        }
        for round in seen.chunks(10) {
            let mut round = round.to_vec();
            round.sort_unstable();
            assert_eq!(round, (0..10).collect::<Vec<_>>());
        }
        assert_ne!(seen[..10], seen[10..]);
    }
}
