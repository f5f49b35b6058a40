//! For tests: workers and servers as threads of this process, with channels between them.

use crate::data::Digits;
use crate::error::Result;
use crate::exchange::{ServerExchange, WorkerExchange};
use crate::model::{Parameter, TENSORS};
use crate::plan::Plan;
use crate::worker::Outcome;
use crate::{server, single, worker};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

/// A tensor in flight, with its step.
type Sent = (u64, Vec<f32>);

/// The channel ends of one side: one for each tensor, at a server also for each worker.
struct Side<'a> {
    tensors: Vec<Parameter>,
    peers: usize,
    to: Vec<Sender<Sent>>,
    from: Vec<Receiver<Sent>>,
    moved: &'a AtomicU64,
}

impl Side<'_> {
    fn buffers(&self, copies: usize) -> Vec<Vec<f32>> {
        let one = || self.tensors.iter().map(|parameter| vec![f32::NAN; parameter.len()]);
        (0..copies).flat_map(|_| one()).collect()
    }

    fn send(&self, step: u64, tensors: &mut Vec<Vec<f32>>) -> Result<()> {
        for peer in 0..self.peers {
            for (index, tensor) in tensors.iter().enumerate() {
                self.to[peer * tensors.len() + index].send((step, tensor.clone()))?;
            }
        }
        tensors.clear();
        Ok(())
    }

    fn receive(&self, step: u64, into: &mut [Vec<f32>]) -> Result<()> {
        for (from, into) in self.from.iter().zip(into) {
            let (sent_step, tensor) = from.recv()?;
            assert_eq!(sent_step, step);
            *into = tensor;
            self.moved.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }
}

impl WorkerExchange for Side<'_> {
    type Buffer = Vec<f32>;

    fn weight_buffers(&mut self) -> Result<Vec<Vec<f32>>> {
        Ok(self.buffers(1))
    }

    fn pull(&mut self, step: u64, weights: &mut Vec<Vec<f32>>) -> Result<()> {
        self.receive(step, weights)
    }

    fn gradient_buffers(&mut self, gradients: &mut Vec<Vec<f32>>) -> Result<()> {
        gradients.extend(self.buffers(1));
        Ok(())
    }

    fn push(&mut self, step: u64, gradients: &mut Vec<Vec<f32>>) -> Result<()> {
        self.send(step, gradients)
    }
}

impl ServerExchange for Side<'_> {
    type Buffer = Vec<f32>;

    fn weight_buffers(&mut self, weights: &mut Vec<Vec<f32>>) -> Result<()> {
        weights.extend(self.buffers(1));
        Ok(())
    }

    fn publish(&mut self, step: u64, weights: &mut Vec<Vec<f32>>) -> Result<()> {
        self.send(step, weights)
    }

    fn gradient_buffers(&mut self) -> Result<Vec<Vec<f32>>> {
        Ok(self.buffers(self.peers))
    }

    fn collect(&mut self, step: u64, gradients: &mut Vec<Vec<f32>>) -> Result<()> {
        self.receive(step, gradients)
    }
}

/// All sides of a plan: servers first, with the workers' ends in the order of the traits.
fn sides<'a>(plan: &Plan, moved: &'a AtomicU64) -> Vec<Side<'a>> {
    let mut sides: Vec<Side> = Vec::new();
    for server in 0..plan.servers {
        let tensors = plan.owned(server);
        sides.push(Side { tensors, peers: plan.workers, to: vec![], from: vec![], moved });
    }
    for worker in 0..plan.workers {
        let mut side =
            Side { tensors: Parameter::all().collect(), peers: 1, to: vec![], from: vec![], moved };
        for parameter in Parameter::all() {
            let server = &mut sides[plan.owner(parameter)];
            let (weights, pulled) = channel();
            let (gradient, collected) = channel();
            server.to.push(weights);
            server.from.push(collected);
            side.to.push(gradient);
            side.from.push(pulled);
        }
        assert_eq!((side.to.len(), worker + plan.servers), (TENSORS, sides.len()));
        sides.push(side);
    }
    sides
}

fn train(plan: &Plan, digits: &Digits) -> (Vec<Outcome>, u64) {
    let moved = AtomicU64::new(0);
    let mut workers = sides(plan, &moved);
    let servers: Vec<Side> = workers.drain(..plan.servers).collect();
    let outcomes = std::thread::scope(|scope| {
        for (server, mut side) in servers.into_iter().enumerate() {
            scope.spawn(move || server::run(plan, server, &mut side).expect("server"));
        }
        let run = |(worker, mut side)| {
            scope.spawn(move || worker::run(plan, worker, digits, &mut side, |_| Ok(())).expect("worker"))
        };
        let threads: Vec<_> = workers.into_iter().enumerate().map(run).collect();
        threads.into_iter().map(|thread| thread.join().expect("join")).collect()
    });
    (outcomes, moved.into_inner())
}

#[test]
fn servers_and_workers_end_with_the_bits_of_a_single_run_and_move_what_the_formula_says() {
    let digits = Digits::load().expect("digits");
    for (servers, workers) in [(1, 1), (1, 2), (2, 3), (2, 6), (6, 2)] {
        let plan = Plan { servers, workers, steps: 12, batch: 31, seed: 5 };
        let alone = single::run(&plan, &digits, |_| ());
        let (outcomes, moved) = train(&plan, &digits);
        assert_eq!(outcomes.len(), workers);
        assert!(outcomes.iter().all(|outcome| outcome.digest == alone.digest), "{plan:?}");
        assert_eq!((outcomes[0].right, outcomes[0].loss), (alone.right, alone.loss));
        assert_eq!(moved, plan.tensors_moved());
    }
}

#[test]
fn worker_0_tells_how_far_the_run_is_and_the_others_do_not() {
    let digits = Digits::load().expect("digits");
    let plan = Plan { servers: 1, workers: 2, steps: 3, batch: 8, seed: 5 };
    let moved = AtomicU64::new(0);
    let mut sides = sides(&plan, &moved).into_iter();
    let told: Vec<Vec<u64>> = std::thread::scope(|scope| {
        let (plan, digits) = (&plan, &digits);
        let mut server = sides.next().expect("server");
        scope.spawn(move || server::run(plan, 0, &mut server).expect("server"));
        let threads: Vec<_> = sides
            .enumerate()
            .map(|(worker, mut side)| {
                scope.spawn(move || {
                    let mut told = Vec::new();
                    let tell = |progress: worker::Progress| {
                        told.push(progress.step);
                        Ok(())
                    };
                    worker::run(plan, worker, digits, &mut side, tell).expect("worker");
                    told
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("join")).collect()
    });
    assert_eq!(told, [vec![1, 2, 3], vec![]]);
}
