//! Two steps of a standing edge, in the interleavings of the events that may happen to them.

use super::pair::{CANCEL_TIMEOUT, Call, Pair, RECEIVER, SENDER, over_shm, over_sim, over_sim_validating};
use super::{Choices, traced};
use crate::fabric::Port;
use crate::link::{Destination, TensorKey, Value};
use crate::matching::{CancelReason, Error, Outcome, Payload, PeerIndex, StandingChange, StepChange};
use crate::telemetry::Counter;
use crate::wire::{Code, EdgeName, Status};
use std::sync::Arc;
use std::time::Duration;

const ENDLESS: Duration = Duration::from_secs(1_000_000);
/// The sequence of all runs. Each run takes its next two steps.
const BASE: u64 = 1 << 40;

/// An event that may happen once, at any time, beside sends and receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mishap {
    None,
    /// The standing edge ends.
    Ended,
    /// The window becomes 1.
    Shrinks,
    /// The receive of the first step is cancelled.
    Cancelled,
    Dropped,
    /// The first step ends, on one of the two sides.
    AbortHere,
    AbortThere,
    CleanupHere,
    CleanupThere,
}

const MISHAPS: [Mishap; 9] = [
    Mishap::None,
    Mishap::Ended,
    Mishap::Shrinks,
    Mishap::Cancelled,
    Mishap::Dropped,
    Mishap::AbortHere,
    Mishap::AbortThere,
    Mishap::CleanupHere,
    Mishap::CleanupThere,
];

#[derive(Clone, Copy, Debug)]
struct Case {
    /// Bytes of the tensor of an earlier step, if there was one.
    known: Option<u64>,
    /// Bytes of the tensors of the two steps; `None` for dead ones.
    sent: [Option<u64>; 2],
    borrow: bool,
    /// Whether the first step has two values and two receives.
    twice: bool,
    mishap: Mishap,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    Begin(usize),
    Send(usize),
    Receive(usize),
    Poll(usize),
    Mishap,
    CancelTimesOut,
}

/// A receive of a step.
struct Receive {
    step: usize,
    call: Call,
    cancelled: bool,
    end: Option<Result<u8, Error>>,
}

struct Run<'a, P: Port> {
    pair: &'a mut Pair<P>,
    case: Case,
    edge: Arc<EdgeName>,
    first: u64,
    begun: [bool; 2],
    sent: [usize; 2],
    receives: Vec<Receive>,
    mishap: bool,
    timed_out: bool,
}

impl<P: Port> Run<'_, P> {
    fn key(&self, step: usize) -> TensorKey {
        TensorKey { edge: self.edge.clone(), step: self.first + step as u64, frame: 0, iteration: 0 }
    }

    fn times(&self, step: usize) -> usize {
        if self.case.twice && step == 0 { 2 } else { 1 }
    }

    fn is_over(&self, step: usize) -> bool {
        let ends = [Mishap::AbortHere, Mishap::AbortThere, Mishap::CleanupHere, Mishap::CleanupThere];
        step == 0 && self.mishap && ends.contains(&self.case.mishap)
    }

    fn received(&self, step: usize) -> usize {
        self.receives.iter().filter(|receive| receive.step == step).count()
    }

    fn acts(&mut self) -> Vec<Act> {
        let mut acts = Vec::new();
        for step in [0, 1] {
            if !self.begun[step] && !self.is_over(step) {
                acts.push(Act::Begin(step));
            }
            if self.begun[step] && self.sent[step] < self.times(step) && !self.is_over(step) {
                acts.push(Act::Send(step));
            }
            if self.received(step) < self.times(step) && !self.is_over(step) {
                acts.push(Act::Receive(step));
            }
        }
        for side in [SENDER, RECEIVER] {
            if self.pair.has_news(side) {
                acts.push(Act::Poll(side));
            }
        }
        let needs_receive = matches!(self.case.mishap, Mishap::Cancelled | Mishap::Dropped);
        let can = !needs_receive || self.receives.iter().any(|it| it.step == 0 && it.end.is_none());
        if !self.mishap && self.case.mishap != Mishap::None && can {
            acts.push(Act::Mishap);
        }
        if !self.timed_out && self.receives.iter().any(|receive| receive.cancelled && receive.end.is_none()) {
            acts.push(Act::CancelTimesOut);
        }
        acts
    }

    fn act(&mut self, act: Act) {
        match act {
            Act::Begin(step) => {
                self.begun[step] = true;
                self.pair.begin(SENDER, self.first + step as u64);
            }
            Act::Send(step) => {
                let value = match self.case.sent[step] {
                    None => Value::Dead,
                    Some(bytes) => {
                        Value::Tensor(self.pair.value(bytes, 10 * step as u8 + self.sent[step] as u8))
                    }
                };
                self.sent[step] += 1;
                let key = self.key(step);
                self.pair.send(&key, value);
            }
            Act::Receive(step) => self.receive(step),
            Act::Poll(side) => self.pair.poll(side),
            Act::Mishap => self.go_wrong(),
            Act::CancelTimesOut => {
                self.timed_out = true;
                self.pair.pass(RECEIVER, CANCEL_TIMEOUT);
            }
        }
        self.harvest();
        self.pair.check_quarantine();
    }

    fn receive(&mut self, step: usize) {
        let key = self.key(step);
        if self.received(step) == 0 {
            self.pair.begin(RECEIVER, key.step);
        }
        let destination = if self.case.borrow { Destination::Borrow } else { Destination::Alloc };
        let call = self.pair.receive(&key, destination, ENDLESS);
        self.receives.push(Receive { step, call, cancelled: false, end: None });
    }

    fn go_wrong(&mut self) {
        self.mishap = true;
        let (step, id) = (self.first, self.first);
        let status = Status::new(Code::Internal, "on purpose");
        match self.case.mishap {
            Mishap::None => {}
            Mishap::Ended => self.pair.standing(StandingChange::Ended { id }),
            Mishap::Shrinks => self.pair.standing(StandingChange::Window { id, window: 1 }),
            Mishap::Cancelled | Mishap::Dropped => {
                let drops = self.case.mishap == Mishap::Dropped;
                let Some(receive) = self.receives.iter_mut().find(|it| it.step == 0 && it.end.is_none())
                else {
                    panic!("there is one")
                };
                receive.cancelled = true;
                if drops {
                    receive.call.receiver = None;
                    receive.end = Some(Err(Error::Stopped));
                }
                let why = if drops { CancelReason::Dropped } else { CancelReason::Cancelled };
                self.pair.cancel(receive.call.id, why);
            }
            Mishap::AbortHere => {
                self.pair.change(RECEIVER, StepChange::Aborted { steps: step..=step, status })
            }
            Mishap::AbortThere => {
                self.pair.change(SENDER, StepChange::Aborted { steps: step..=step, status })
            }
            Mishap::CleanupHere => self.pair.change(RECEIVER, StepChange::CleanedUp { step }),
            Mishap::CleanupThere => self.pair.change(SENDER, StepChange::CleanedUp { step }),
        }
    }

    fn harvest(&mut self) {
        for receive in &mut self.receives {
            let Some(receiver) = receive.call.receiver.as_mut().filter(|receiver| receiver.is_done()) else {
                continue;
            };
            let Some(Outcome(result)) = receiver.take() else { panic!("taken twice") };
            receive.call.receiver = None;
            let sent = self.case.sent[receive.step];
            let corrupted =
                |error: &Error| self.pair.corrupted(error, sent.unwrap_or(0)).filter(|_| sent.is_some());
            if let Some(fill) = result.as_ref().err().and_then(corrupted) {
                // Counts as received.
                receive.end = Some(Ok(fill));
                continue;
            }
            receive.end = Some(result.map(|delivery| {
                assert_eq!(delivery.is_dead, sent.is_none());
                let Payload::Tensor(tensor) = &delivery.tensor else { panic!("nothing was given") };
                let bytes = tensor.bytes();
                let fill = bytes.first().copied().unwrap_or(10 * receive.step as u8);
                assert_eq!(bytes.len() as u64, sent.unwrap_or(0));
                assert!(bytes.iter().all(|byte| *byte == fill), "torn bytes");
                assert!(!self.pair.flips || bytes.is_empty(), "wrong bytes came");
                fill
            }));
        }
    }

    /// Nothing more happens: every value has come or comes to the next receive, unless its step is
    /// over.
    fn finish(&mut self) {
        for step in [0, 1] {
            if self.is_over(step) {
                continue;
            }
            assert_eq!(self.sent[step], self.times(step));
            let got = |run: &Self| {
                run.receives.iter().filter(|it| it.step == step && matches!(it.end, Some(Ok(_)))).count()
            };
            for _ in got(self)..self.times(step) {
                self.receive(step);
                self.pair.run();
                self.harvest();
            }
            assert_eq!(got(self), self.times(step), "a value of step {step} is lost: {:?}", self.ends());
            let mut fills: Vec<_> = self
                .receives
                .iter()
                .filter(|it| it.step == step)
                .filter_map(|it| it.end.as_ref()?.as_ref().ok())
                .collect();
            fills.sort_unstable();
            fills.dedup();
            let is_told_apart = self.case.sent[step].is_some_and(|bytes| bytes > 0);
            assert!(
                !is_told_apart || fills.len() == self.times(step),
                "a value came twice: {:?}",
                self.ends()
            );
        }
        for receive in &self.receives {
            match &receive.end {
                None => panic!("a receive of step {} hangs: {:?}", receive.step, self.ends()),
                Some(Err(error)) => {
                    assert!(self.is_over(receive.step) || receive.cancelled, "{error}: {:?}", self.ends());
                }
                Some(Ok(fill)) => assert_eq!(usize::from(*fill / 10), receive.step, "of another step"),
            }
        }
        self.receives.clear();
        self.pair.standing(StandingChange::Ended { id: self.first });
        for step in [self.first, self.first + 1] {
            for side in [SENDER, RECEIVER] {
                self.pair.change(side, StepChange::CleanedUp { step });
            }
        }
        self.pair.run();
        self.pair.check_empty();
    }

    fn ends(&self) -> Vec<(usize, &Option<Result<u8, Error>>)> {
        self.receives.iter().map(|receive| (receive.step, &receive.end)).collect()
    }
}

impl<P: Port> Pair<P> {
    fn standing(&mut self, change: StandingChange) {
        self.change_standing(RECEIVER, change);
    }
}

/// Explores a case: the first `all` runs, and then `random` more. Returns how many there were.
fn explore<P: Port>(pair: &mut Pair<P>, case: Case, first: &mut u64, all: u64, random: u64) -> u64 {
    let (mut runs, mut choices) = (0, Choices::default());
    let mut warm = None;
    loop {
        if runs == all && random > 0 {
            choices = Choices::random(7);
        }
        // Each run has an edge with the same known meta-data.
        let edge = match (case.known, warm.take()) {
            (Some(bytes), Some(edge)) if case.sent == [Some(bytes); 2] => edge,
            (known, _) => warm_up(pair, known, first),
        };
        let key = TensorKey { edge: edge.clone(), step: BASE, frame: 0, iteration: 0 };
        let peer = PeerIndex(SENDER as u32);
        let begun = StandingChange::Begun { id: *first, peer, key, window: 2, borrow: case.borrow };
        pair.standing(begun);
        let mut run = Run {
            pair,
            case,
            edge: edge.clone(),
            first: *first,
            begun: [false; 2],
            sent: [0; 2],
            receives: Vec::new(),
            mishap: false,
            timed_out: false,
        };
        traced(&case, |trace| {
            loop {
                let acts = run.acts();
                if acts.is_empty() {
                    break;
                }
                let act = acts[choices.choose(acts.len())];
                trace.push(act);
                run.act(act);
            }
            run.finish();
        });
        warm = Some(edge);
        *first += 2;
        runs += 1;
        if !choices.next_run() || runs >= all + random {
            return runs;
        }
    }
}

/// An edge on which one tensor of this size, or a dead value, has travelled.
fn warm_up<P: Port>(pair: &mut Pair<P>, bytes: Option<u64>, first: &mut u64) -> Arc<EdgeName> {
    pair.set_flipping(false);
    let edge = pair.edge();
    let key = TensorKey { edge: edge.clone(), step: *first, frame: 0, iteration: 0 };
    for side in [SENDER, RECEIVER] {
        pair.begin(side, key.step);
    }
    let value = bytes.map_or(Value::Dead, |bytes| Value::Tensor(pair.value(bytes, 0)));
    pair.send(&key, value);
    let mut call = pair.receive(&key, Destination::Alloc, ENDLESS);
    pair.run();
    let outcome = call.receiver.as_mut().and_then(|receiver| receiver.take());
    assert!(outcome.is_some_and(|Outcome(result)| result.is_ok()));
    for side in [SENDER, RECEIVER] {
        pair.change(side, StepChange::CleanedUp { step: key.step });
    }
    *first += 1;
    pair.set_flipping(true);
    edge
}

/// Each kind of tensor that may come for a standing request.
fn kinds() -> Vec<(&'static str, Case)> {
    let plain =
        Case { known: Some(1000), sent: [Some(1000); 2], borrow: false, twice: false, mishap: Mishap::None };
    vec![
        ("as known", plain),
        ("smaller", Case { sent: [Some(700), Some(1000)], ..plain }),
        ("larger", Case { sent: [Some(1000), Some(1001)], ..plain }),
        ("not known", Case { known: None, ..plain }),
        ("small", Case { known: Some(8), sent: [Some(8); 2], ..plain }),
        ("small after large", Case { sent: [Some(8), Some(1000)], ..plain }),
        ("dead and empty", Case { sent: [None, Some(0)], ..plain }),
        ("lent", Case { borrow: true, ..plain }),
        ("lent, not known", Case { borrow: true, known: None, ..plain }),
        ("two receives of a step", Case { twice: true, ..plain }),
    ]
}

fn every_kind<P: Port>(pair: &mut Pair<P>, over: &str, all: u64, random: u64) {
    let (mut first, mut total) = (BASE, 0);
    for side in [SENDER, RECEIVER] {
        pair.change(side, StepChange::Sequence { base: BASE });
    }
    for (name, kind) in kinds() {
        let runs: Vec<_> = MISHAPS
            .map(|mishap| explore(pair, Case { mishap, ..kind }, &mut first, all, random))
            .into_iter()
            .collect();
        total += runs.iter().sum::<u64>();
        println!("{over}: {name}: {runs:?}");
    }
    let counters = pair.counters(RECEIVER);
    assert!(counters.get(Counter::StandingClaimed) > total / 2, "few were claimed: {counters}");
    println!(
        "{over}: {total} interleavings, {} of their receives claimed",
        counters.get(Counter::StandingClaimed)
    );
}

#[test]
fn on_sim_interleavings_of_standing_requests_keep_every_value_and_free_everything() {
    every_kind(&mut over_sim(true), "sim", 300, 400);
}

#[test]
fn with_validation_interleavings_of_standing_requests_keep_every_value_right_or_not() {
    for flips in [false, true] {
        every_kind(&mut over_sim_validating(flips), "sim, validating", 50, 60);
    }
}

#[test]
fn on_shm_interleavings_of_standing_requests_keep_every_value_and_free_everything() {
    every_kind(&mut over_shm(), "shm", 0, 300);
}

/// Steps with known meta-data, one after the other.
fn count<P: Port>(pair: &mut Pair<P>, over: &str) {
    const WINDOW: u32 = 8;
    const STEPS: u64 = 80;
    let mut first = BASE;
    let edge = warm_up(pair, Some(1000), &mut first);
    let key = |step| TensorKey { edge: edge.clone(), step, frame: 0, iteration: 0 };
    let peer = PeerIndex(SENDER as u32);
    pair.standing(StandingChange::Begun { id: 1, peer, key: key(first), window: WINDOW, borrow: false });
    let mut before = [SENDER, RECEIVER].map(|side| pair.counters(side));
    for n in 0..2 * STEPS {
        if n == STEPS {
            before = [SENDER, RECEIVER].map(|side| pair.counters(side));
        }
        let step = first + n;
        [RECEIVER, SENDER].into_iter().for_each(|side| pair.begin(side, step));
        let value = Value::Tensor(pair.value(1000, n as u8));
        pair.send(&key(step), value);
        let mut call = pair.receive(&key(step), Destination::Alloc, ENDLESS);
        pair.run();
        let got = call.receiver.as_mut().and_then(|receiver| receiver.take());
        assert!(got.is_some_and(|Outcome(result)| result.is_ok()), "step {n}");
        [RECEIVER, SENDER].into_iter().for_each(|side| pair.change(side, StepChange::CleanedUp { step }));
    }
    let sum = |counter| {
        [SENDER, RECEIVER]
            .map(|side| pair.counters(side).since(&before[side]).get(counter))
            .iter()
            .sum::<u64>()
    };
    let (data, control) = (sum(Counter::WritesPosted), sum(Counter::MessagesSent));
    println!(
        "{over}: {STEPS} steps with a window of {WINDOW}: {data} data operations, {control} control messages"
    );
    assert_eq!(data, STEPS);
    let checksums = if pair.validates { STEPS } else { 0 };
    assert!(control <= checksums + 2 * STEPS / u64::from(WINDOW));
    assert_eq!(sum(Counter::ChecksumsVerified), checksums);
}

#[test]
fn a_step_is_one_write_and_a_window_two_messages_on_every_fabric() {
    count(&mut over_sim(true), "sim");
    count(&mut over_shm(), "shm");
    count(&mut over_sim_validating(false), "sim, with a checksum for each");
}
