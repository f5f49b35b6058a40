//! A worker: pulls the weights, computes the gradient of its part of the batch, and pushes it.

use crate::data::{Digits, Image};
use crate::error::Result;
use crate::exchange::WorkerExchange;
use crate::model::{self, Score, Scratch};
use crate::plan::{Plan, Sampler};
use serde::{Deserialize, Serialize};
use std::ops::{Deref, DerefMut};
use std::time::{Duration, Instant};

/// Progress reports of a short run.
const REPORTS: u64 = 50;
/// Steps between two progress reports of a long run.
const REPORT_INTERVAL: u64 = 100;

/// The state of one worker.
#[derive(Debug)]
pub struct Replica<'a> {
    plan: &'a Plan,
    worker: usize,
    digits: &'a Digits,
    sampler: Sampler,
    batch: Vec<usize>,
    scratch: Scratch,
}

impl<'a> Replica<'a> {
    /// The state before the first step.
    pub fn new(plan: &'a Plan, worker: usize, digits: &'a Digits) -> Replica<'a> {
        let sampler = plan.sampler(digits.training.len());
        Replica { plan, worker, digits, sampler, batch: Vec::new(), scratch: Scratch::new() }
    }

    /// Computes the gradient of this worker's part of the next batch. Returns the mean loss of the
    /// part.
    pub fn gradient<W, G>(&mut self, weights: &[W], gradient: &mut [G]) -> f32
    where
        W: Deref<Target = [f32]>,
        G: DerefMut<Target = [f32]>,
    {
        self.sampler.next(self.plan.batch, &mut self.batch);
        let mine = &self.batch[self.plan.part(self.worker)];
        let images = mine.iter().map(|image| &self.digits.training[*image]);
        let loss = model::gradient(&mut self.scratch, weights, images, self.plan.batch, gradient);
        loss / mine.len() as f32
    }

    /// How good the weights are on these images.
    pub fn score<W: Deref<Target = [f32]>>(&mut self, weights: &[W], images: &[Image]) -> Score {
        model::score(&mut self.scratch, weights, images)
    }
}

/// Progress of a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Completed steps.
    pub step: u64,
    /// The mean loss of the reporting worker's last images.
    pub loss: f32,
    /// The share of held-out images that are classified correctly.
    pub accuracy: f64,
    /// The share of the time spent in communication.
    pub comm_share: f64,
}

/// Whether a run reports its progress after this step.
pub fn is_report(plan: &Plan, steps_done: u64) -> bool {
    let every = plan.steps.div_ceil(REPORTS).min(REPORT_INTERVAL);
    steps_done.is_multiple_of(every) || steps_done == plan.steps
}

/// The results of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// [`model::digest`] of the final weights.
    pub digest: u64,
    /// Held-out images that are classified correctly.
    pub right: usize,
    /// Held-out images.
    pub held_out: usize,
    /// The mean loss of all training images.
    pub loss: f64,
    /// Seconds from the first pull to the last.
    pub seconds: f64,
    /// Seconds in communication, of `seconds`.
    pub comm_seconds: f64,
}

/// The quality of the final weights.
pub fn outcome<W: Deref<Target = [f32]>>(replica: &mut Replica, weights: &[W], clock: &Clock) -> Outcome {
    let held_out = replica.score(weights, &replica.digits.held_out);
    let training = replica.score(weights, &replica.digits.training);
    Outcome {
        digest: model::digest(weights),
        right: held_out.right,
        held_out: held_out.images,
        loss: training.loss,
        seconds: clock.total.as_secs_f64(),
        comm_seconds: clock.comm.as_secs_f64(),
    }
}

/// Where the time goes. Progress reports are not counted.
#[derive(Debug)]
pub struct Clock {
    since: Instant,
    total: Duration,
    comm: Duration,
}

impl Clock {
    /// Starts now.
    pub fn start() -> Clock {
        Clock { since: Instant::now(), total: Duration::ZERO, comm: Duration::ZERO }
    }

    /// Ends a stretch of computation.
    pub fn computed(&mut self) {
        let now = Instant::now();
        self.total += now - self.since;
        self.since = now;
    }

    /// Ends a stretch of communication.
    pub fn communicated(&mut self) {
        let before = self.total;
        self.computed();
        self.comm += self.total - before;
    }

    /// Ends a stretch that is not counted.
    pub fn skip(&mut self) {
        self.since = Instant::now();
    }

    /// The share of communication in all that was counted, from 0 to 1.
    pub fn comm_share(&self) -> f64 {
        self.comm.as_secs_f64() / self.total.as_secs_f64().max(f64::MIN_POSITIVE)
    }
}

/// Runs all steps of the plan, and pulls the final weights. Worker 0 reports the progress.
pub fn run<E: WorkerExchange>(
    plan: &Plan,
    worker: usize,
    digits: &Digits,
    exchange: &mut E,
    mut tell: impl FnMut(Progress) -> Result<()>,
) -> Result<Outcome> {
    let mut replica = Replica::new(plan, worker, digits);
    let mut weights = exchange.weight_buffers()?;
    let mut gradients = Vec::new();
    let mut clock = Clock::start();
    for step in 0..plan.steps {
        exchange.pull(step, &mut weights)?;
        exchange.gradient_buffers(&mut gradients)?;
        clock.communicated();
        let loss = replica.gradient(&weights, &mut gradients);
        clock.computed();
        exchange.push(step, &mut gradients)?;
        clock.communicated();
        if worker == 0 && is_report(plan, step + 1) {
            // The accuracy before this step's update: the new weights are not pulled yet.
            let accuracy = replica.score(&weights, &digits.held_out).accuracy();
            tell(Progress { step: step + 1, loss, accuracy, comm_share: clock.comm_share() })?;
            clock.skip();
        }
    }
    exchange.pull(plan.steps, &mut weights)?;
    clock.communicated();
    Ok(outcome(&mut replica, &weights, &clock))
}
