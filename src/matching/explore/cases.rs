//! The explored cases, and the invariants of every run.

use super::pair::{
    CANCEL_TIMEOUT, Call, Pair, RECEIVER, SENDER, meta, over_shm, over_sim, over_sim_validating,
};
use super::{Choices, traced};
use crate::fabric::Port;
use crate::link::{Destination, TensorKey, Value};
use crate::matching::{CancelReason, Error, Outcome, Payload, StepChange};
use crate::memory::TensorMut;
use crate::wire::{Code, EdgeName, Status};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Too large for a response.
const LARGE: u64 = 1000;
/// An allocation after which the pool has no room for [`HUGE`].
const FILLER: u64 = 600_000;
const HUGE: u64 = 500_000;

const TIMEOUT: Duration = Duration::from_secs(10);
const ENDLESS: Duration = Duration::from_secs(1_000_000);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sent {
    Dead,
    Bytes(u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    Alloc,
    Borrow,
    Into(u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    Never,
    Cancel,
    Drop,
    Deadline,
    AbortHere,
    AbortThere,
    CleanupHere,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    sent: Sent,
    wanted: Wanted,
    how: How,
    /// Whether the receiver knows the meta-data from an earlier step.
    warm: bool,
    /// Whether the sender begins the step late.
    deferred: bool,
    /// Whether the receiver's pool has no room.
    full: bool,
    /// Values that are sent, and receives that begin at once.
    count: usize,
    /// Whether the values are there from the start.
    sent_early: bool,
}

const PLAIN: Case = Case {
    sent: Sent::Bytes(LARGE),
    wanted: Wanted::Alloc,
    how: How::Never,
    warm: false,
    deferred: false,
    full: false,
    count: 1,
    sent_early: false,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    Send,
    Begin,
    Poll(usize),
    Cancel(usize),
    CancelTimesOut,
    ReceiveNext,
}

#[derive(Debug)]
enum End {
    Got(usize),
    Failed(Error),
    Dropped,
}

struct Running {
    call: Call,
    cancelled: bool,
    end: Option<End>,
}

struct Run<'a, P: Port> {
    pair: &'a mut Pair<P>,
    case: Case,
    key: TensorKey,
    sent: usize,
    begun: bool,
    over: bool,
    cancel_timed_out: bool,
    calls: Vec<Running>,
    /// The receive that begins when the first ones have ended.
    next: Option<usize>,
    filler: Option<TensorMut>,
}

impl Case {
    fn bytes(&self) -> u64 {
        match self.sent {
            Sent::Dead => 0,
            Sent::Bytes(bytes) => bytes,
        }
    }

    fn ends_step(&self) -> bool {
        matches!(self.how, How::AbortHere | How::AbortThere | How::CleanupHere)
    }

    /// Values with equal bytes can only be counted.
    fn is_told_apart(&self) -> bool {
        self.bytes() > 0
    }
}

impl<P: Port> Run<'_, P> {
    fn destination(&self, wanted: Wanted) -> Destination {
        match wanted {
            Wanted::Alloc => Destination::Alloc,
            Wanted::Borrow => Destination::Borrow,
            Wanted::Into(bytes) => Destination::Into(self.pair.tensor(RECEIVER, bytes)),
        }
    }

    fn value(&self, number: usize) -> Value {
        match self.case.sent {
            Sent::Dead => Value::Dead,
            Sent::Bytes(bytes) => Value::Tensor(self.pair.value(bytes, number as u8)),
        }
    }

    fn receive(&mut self, wanted: Wanted, timeout: Duration) -> usize {
        let destination = self.destination(wanted);
        let call = self.pair.receive(&self.key, destination, timeout);
        self.calls.push(Running { call, cancelled: false, end: None });
        self.harvest();
        self.calls.len() - 1
    }

    fn send(&mut self) {
        let value = self.value(self.sent);
        self.pair.send(&self.key, value);
        self.sent += 1;
    }

    /// Takes the results that have come.
    fn harvest(&mut self) {
        for running in &mut self.calls {
            let Some(receiver) = running.call.receiver.as_mut().filter(|receiver| receiver.is_done()) else {
                continue;
            };
            let Some(Outcome(result)) = receiver.take() else { panic!("taken twice") };
            running.call.receiver = None;
            running.end = Some(match result {
                Err(error) => match self.pair.corrupted(&error, self.case.bytes()) {
                    // Counts as received.
                    Some(number) => End::Got(number.into()),
                    None => End::Failed(error),
                },
                Ok(delivery) => {
                    assert_eq!(delivery.is_dead, self.case.sent == Sent::Dead);
                    let bytes = match &delivery.tensor {
                        Payload::Tensor(tensor) => tensor.bytes(),
                        Payload::Into(given) => given.bytes(),
                    };
                    assert!(!self.pair.flips || bytes.is_empty() || delivery.is_dead, "wrong bytes came");
                    let first = if delivery.is_dead { 0 } else { bytes.first().copied().unwrap_or(0) };
                    assert!(delivery.is_dead || bytes.len() as u64 == self.case.bytes());
                    assert!(delivery.is_dead || bytes.iter().all(|byte| *byte == first), "torn bytes");
                    End::Got(first.into())
                }
            });
        }
    }

    fn acts(&mut self) -> Vec<Act> {
        let mut acts = Vec::new();
        if self.sent < self.case.count && self.begun && !self.over {
            acts.push(Act::Send);
        }
        if !self.begun {
            acts.push(Act::Begin);
        }
        for side in [SENDER, RECEIVER] {
            if self.pair.has_news(side) {
                acts.push(Act::Poll(side));
            }
        }
        let can_cancel = self.case.how != How::Never && !(self.case.ends_step() && self.over);
        for (at, call) in self.calls.iter().enumerate() {
            if can_cancel && call.end.is_none() && !call.cancelled && self.next != Some(at) {
                acts.push(Act::Cancel(at));
            }
        }
        if !self.cancel_timed_out && self.calls.iter().any(|call| call.cancelled && call.end.is_none()) {
            acts.push(Act::CancelTimesOut);
        }
        let ended = self.calls.iter().all(|call| call.end.is_some());
        if ended && self.next.is_none() && !self.over && self.got().len() < self.case.count {
            acts.push(Act::ReceiveNext);
        }
        acts
    }

    fn act(&mut self, act: Act) {
        match act {
            Act::Send => self.send(),
            Act::Begin => {
                self.begun = true;
                self.pair.begin(SENDER, self.key.step);
            }
            Act::Poll(side) => self.pair.poll(side),
            Act::Cancel(at) => self.cancel(at),
            Act::CancelTimesOut => {
                self.cancel_timed_out = true;
                self.pair.pass(RECEIVER, CANCEL_TIMEOUT);
            }
            Act::ReceiveNext => self.next = Some(self.receive(Wanted::Alloc, ENDLESS)),
        }
        self.harvest();
        self.pair.check_quarantine();
    }

    fn cancel(&mut self, at: usize) {
        self.calls[at].cancelled = true;
        let step = self.key.step;
        match self.case.how {
            How::Never => {}
            How::Cancel => {
                self.pair.cancel(self.calls[at].call.id, CancelReason::Cancelled);
                self.harvest();
                // A value that has landed and waits for its checksum has no grant any more.
                let granted = self.case.warm && !self.pair.validates && self.case.wanted == Wanted::Alloc;
                if granted && self.calls[at].end.is_none() {
                    assert!(
                        self.pair.quarantined() >= self.case.bytes(),
                        "granted bytes are not in quarantine"
                    );
                }
            }
            How::Drop => {
                self.calls[at].call.receiver = None;
                self.calls[at].end = Some(End::Dropped);
                self.pair.cancel(self.calls[at].call.id, CancelReason::Dropped);
            }
            How::Deadline => {
                self.calls.iter_mut().for_each(|call| call.cancelled = true);
                self.pair.pass(RECEIVER, TIMEOUT);
            }
            How::AbortHere | How::AbortThere => {
                self.over = true;
                let side = if self.case.how == How::AbortHere { RECEIVER } else { SENDER };
                if side == SENDER && !self.begun {
                    self.begun = true;
                    self.pair.begin(SENDER, step);
                }
                let status = Status::new(Code::Internal, "on purpose");
                self.pair.change(side, StepChange::Aborted { steps: step..=step, status });
            }
            How::CleanupHere => {
                self.over = true;
                self.pair.change(RECEIVER, StepChange::CleanedUp { step });
            }
        }
    }

    fn got(&self) -> Vec<usize> {
        let got = self.calls.iter().filter_map(|call| match call.end {
            Some(End::Got(value)) => Some(value),
            _ => None,
        });
        got.collect()
    }

    /// Whether a call may have failed like this.
    fn is_allowed(&self, call: &Running, error: &Error) -> bool {
        match error {
            Error::Cancelled { .. } => self.case.how == How::Cancel && call.cancelled,
            Error::DeadlineExceeded { .. } => self.case.how == How::Deadline && call.cancelled,
            Error::NoRoom { .. } => self.case.full,
            Error::ShapeMismatch { .. } => {
                matches!(self.case.wanted, Wanted::Into(bytes) if Sent::Bytes(bytes) != self.case.sent)
            }
            Error::Aborted { .. } => self.case.how == How::AbortHere && self.over,
            Error::StepGone { .. } => self.case.how == How::CleanupHere && self.over,
            Error::Remote { status, .. } => {
                self.case.how == How::AbortThere && self.over && status.code == Code::Internal
            }
            _ => false,
        }
    }

    /// Nothing more happens: every value is at a waiter or comes to the next receives in order, and
    /// then nothing is left.
    fn finish(&mut self) {
        self.filler = None;
        let early = self.calls.len();
        if !self.over {
            assert_eq!(self.sent, self.case.count);
            while self.got().len() < self.case.count {
                let at = self.receive(Wanted::Alloc, ENDLESS);
                self.pair.run();
                self.harvest();
                assert!(
                    matches!(self.calls[at].end, Some(End::Got(_))),
                    "a value is lost: {:?}",
                    self.ends()
                );
            }
        }
        for call in &self.calls {
            match &call.end {
                None => panic!("a call hangs: {:?}", self.ends()),
                Some(End::Failed(error)) => {
                    assert!(self.is_allowed(call, error), "{error}: {:?}", self.ends())
                }
                Some(End::Got(_) | End::Dropped) => {}
            }
        }
        let got = self.got();
        assert!(got.len() <= self.case.count, "a value came twice: {:?}", self.ends());
        if self.case.is_told_apart() {
            let mut once = got.clone();
            once.sort_unstable();
            once.dedup();
            assert_eq!(once.len(), got.len(), "a value came twice: {:?}", self.ends());
            // The values of receives that did not overlap, in their order.
            let in_turn = self.next.into_iter().chain(early..self.calls.len());
            let in_turn: Vec<usize> = in_turn
                .filter_map(|at| match self.calls[at].end {
                    Some(End::Got(value)) => Some(value),
                    _ => None,
                })
                .collect();
            assert!(in_turn.is_sorted(), "out of order: {:?}", self.ends());
        }
        self.calls.clear();
        let step = self.key.step;
        for side in [SENDER, RECEIVER] {
            self.pair.change(side, StepChange::CleanedUp { step });
        }
        self.pair.run();
        self.pair.check_empty();
    }

    fn ends(&self) -> Vec<&Option<End>> {
        self.calls.iter().map(|call| &call.end).collect()
    }
}

/// The outcomes of all runs of a case.
#[derive(Default)]
struct Seen {
    runs: u64,
    got: u64,
    cancelled: u64,
    quarantined: u64,
}

/// Explores a case: every run, or the first `all` of them and then `random` more.
fn explore<P: Port>(pair: &mut Pair<P>, case: Case, steps: &mut u64, all: u64, random: u64) -> Seen {
    let warm_edge = case.warm.then(|| warm_up(pair, case.sent, steps));
    let mut seen = Seen::default();
    let mut choices = Choices::default();
    loop {
        if seen.runs == all && random > 0 {
            choices = Choices::random(case.count as u64);
        }
        // The route is announced by then. A dead value has no meta-data.
        let edge = warm_edge.clone().unwrap_or_else(|| warm_up(pair, Sent::Dead, steps));
        *steps += 1;
        let key = TensorKey { edge, step: *steps, frame: 0, iteration: 0 };
        pair.begin(RECEIVER, *steps);
        if !case.deferred {
            pair.begin(SENDER, *steps);
        }
        let filler = case.full.then(|| pair.sides[RECEIVER].pool.tensor(meta(FILLER)).expect("room"));
        let mut run = Run {
            pair,
            case,
            key,
            sent: 0,
            begun: !case.deferred,
            over: false,
            cancel_timed_out: false,
            calls: Vec::new(),
            next: None,
            filler,
        };
        traced(&case, |trace| {
            while case.sent_early && run.sent < case.count {
                run.send();
            }
            for _ in 0..case.count {
                run.receive(case.wanted, TIMEOUT);
            }
            loop {
                let acts = run.acts();
                if acts.is_empty() {
                    break;
                }
                let act = acts[choices.choose(acts.len())];
                trace.push(act);
                run.act(act);
                if run.pair.quarantined() > 0 {
                    seen.quarantined += 1;
                }
            }
            for call in &run.calls {
                match call.end {
                    Some(End::Got(_)) => seen.got += 1,
                    _ => seen.cancelled += 1,
                }
            }
            run.finish();
        });
        seen.runs += 1;
        if !choices.next_run() || seen.runs >= all + random {
            return seen;
        }
    }
}

/// An edge on which one value has travelled.
fn warm_up<P: Port>(pair: &mut Pair<P>, sent: Sent, steps: &mut u64) -> Arc<EdgeName> {
    *steps += 1;
    let edge = pair.edge();
    let key = TensorKey { edge: edge.clone(), step: *steps, frame: 0, iteration: 0 };
    pair.set_flipping(false);
    for side in [SENDER, RECEIVER] {
        pair.begin(side, *steps);
    }
    let value = match sent {
        Sent::Dead => Value::Dead,
        Sent::Bytes(bytes) => Value::Tensor(pair.value(bytes, 0)),
    };
    pair.send(&key, value);
    let mut call = pair.receive(&key, Destination::Alloc, ENDLESS);
    pair.run();
    let outcome = call.receiver.as_mut().and_then(|receiver| receiver.take());
    assert!(outcome.is_some_and(|Outcome(result)| result.is_ok()));
    for side in [SENDER, RECEIVER] {
        pair.change(side, StepChange::CleanedUp { step: *steps });
    }
    pair.set_flipping(true);
    edge
}

const ENDINGS: [How; 6] =
    [How::Cancel, How::Drop, How::Deadline, How::AbortHere, How::AbortThere, How::CleanupHere];

/// Each kind of exchange, with the name under which it is counted.
fn exchanges() -> Vec<(&'static str, Case)> {
    let bytes = |bytes| Case { sent: Sent::Bytes(bytes), ..PLAIN };
    let into = |given, case| Case { wanted: Wanted::Into(given), ..case };
    vec![
        ("first request, meta-data, write", PLAIN),
        ("known meta-data, one write", Case { warm: true, ..PLAIN }),
        ("small response", bytes(8)),
        ("dead", Case { sent: Sent::Dead, ..PLAIN }),
        ("no bytes", bytes(0)),
        ("loan, meta-data first", Case { wanted: Wanted::Borrow, ..PLAIN }),
        ("loan", Case { wanted: Wanted::Borrow, warm: true, ..PLAIN }),
        ("into memory that fits", into(LARGE, PLAIN)),
        ("into memory that fits, known", into(LARGE, Case { warm: true, ..PLAIN })),
        ("small, into memory that fits", into(8, bytes(8))),
        ("into memory that does not fit", into(LARGE + 1, PLAIN)),
        ("into memory that does not fit, known", into(LARGE + 1, Case { warm: true, ..PLAIN })),
        ("small, into memory that does not fit", into(9, bytes(8))),
        ("dead, into memory", into(LARGE, Case { sent: Sent::Dead, ..PLAIN })),
        ("no room", Case { full: true, ..bytes(HUGE) }),
        ("step begins late", Case { deferred: true, ..PLAIN }),
        ("step begins late, small", Case { deferred: true, ..bytes(8) }),
    ]
}

fn every_exchange<P: Port>(pair: &mut Pair<P>, over: &str, all: u64, random: u64) {
    let (mut steps, mut total, mut quarantined) = (0, 0, 0);
    for (name, case) in exchanges() {
        let mut counts = BTreeMap::new();
        for how in ENDINGS {
            let seen = explore(pair, Case { how, ..case }, &mut steps, all, random);
            assert!(seen.got > 0 || case.full || matches!(case.wanted, Wanted::Into(_)), "{name}, {how:?}");
            assert!(seen.cancelled > 0, "{name}, {how:?}: no receive was cancelled");
            counts.insert(format!("{how:?}"), seen.runs);
            total += seen.runs;
            quarantined += seen.quarantined;
        }
        println!("{over}: {name}: {counts:?}");
    }
    println!("{over}: {total} interleavings, {quarantined} of their states with bytes in quarantine");
    assert!(quarantined > 0);
}

#[test]
fn on_sim_every_interleaving_of_every_exchange_keeps_the_value_and_frees_everything() {
    every_exchange(&mut over_sim(true), "sim", 100_000, 0);
}

#[test]
fn with_validation_every_exchange_keeps_the_value_or_its_corruption() {
    every_exchange(&mut over_sim_validating(false), "sim, validating", 60, 60);
    every_exchange(&mut over_sim_validating(true), "sim, with flipped bits", 60, 60);
}

#[test]
fn on_shm_a_thousand_interleavings_of_every_exchange_keep_the_value_and_free_everything() {
    every_exchange(&mut over_shm(), "shm", 0, 1_000);
}

/// Several values of a key and as many receives. Any receive may be cancelled at any time.
fn order<P: Port>(pair: &mut Pair<P>, over: &str, (count, steps): (usize, &mut u64), all: u64, random: u64) {
    let cases = [
        ("first request", PLAIN),
        ("known", Case { warm: true, ..PLAIN }),
        ("small", Case { sent: Sent::Bytes(8), ..PLAIN }),
    ];
    for (name, case) in cases {
        for how in [How::Cancel, How::Drop] {
            let case = Case { how, count, sent_early: true, ..case };
            let seen = explore(pair, case, steps, all, random);
            let of = match (seen.runs < all, all) {
                (true, _) => "all of them",
                (false, 0) => "at random",
                (false, _) => "the first ones, and others at random",
            };
            println!("{over}: {count} values, {name}, {how:?}: {} interleavings, {of}", seen.runs);
            assert!(seen.got > 0 && seen.cancelled > 0);
        }
    }
}

#[test]
fn on_sim_values_keep_their_order_with_any_cancels() {
    let mut pair = over_sim(true);
    let mut steps = 0;
    order(&mut pair, "sim", (2, &mut steps), 2_000, 2_000);
    order(&mut pair, "sim", (3, &mut steps), 500, 2_000);
}

#[test]
fn with_validation_values_keep_their_order_right_or_not() {
    for flips in [false, true] {
        order(&mut over_sim_validating(flips), "sim, validating", (2, &mut 0), 300, 500);
    }
}

#[test]
fn on_shm_values_keep_their_order_with_any_cancels() {
    let mut pair = over_shm();
    let mut steps = 0;
    order(&mut pair, "shm", (2, &mut steps), 0, 1_500);
    order(&mut pair, "shm", (3, &mut steps), 0, 1_500);
}
