//! Every interleaving of the two ends of a link, in small cases.
//!
//! A case has programs for both ends. The exploration takes the programs' steps and the deliveries
//! of messages in every order. After each step it checks that each value is in one place, and that
//! no window overflows. When nothing is under way, no receive may wait for a value that its sender
//! has. At each end, all steps end and all edges retire: nothing may be left.

mod case;
mod cases;
mod checks;
mod remote;

use super::WindowViolation;
use super::in_edge::{Held, InState};
use super::in_edges::{InEdges, Incoming};
use super::message::{Record, StepsOver, ToReceiver, ToSender};
use super::out_edges::OutEdges;
use case::{Act, Case, Receive};
use cases::cases;
use std::collections::{HashSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};

type Key = u8;
type Value = u8;
type Waiter = u8;
type Error = u8;

const ENDED: Error = 1;
const ABORTED: Error = 2;
const REFUSED: Error = 3;
const LOST: Error = 4;
const ENDED_HERE: Error = 5;
const MISMATCH: Error = 6;

/// An edge that its sender does not serve.
const UNSERVED: Key = 9;

/// A record with its value.
fn with_value(record: Record<()>, value: Value) -> Record<Value> {
    let Record { edge, n, step, answers_need, value: () } = record;
    Record { edge, n, step, answers_need, value }
}

/// Where a value is when it is on neither end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Fate {
    NotSent,
    Moving,
    Taken,
    /// Its step ended, or a life.
    Dropped,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Call {
    NotBegun,
    Waits,
    /// Has taken a value that is on its way.
    Took(Value),
    Got(Value),
    Failed(Error),
    GaveUp,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    at: Vec<usize>,
    sender: OutEdges<Key, Value, Error>,
    receiver: InEdges<Key, Value, Waiter, Error>,
    to_receiver: VecDeque<ToReceiver<Value, Error>>,
    to_sender: VecDeque<ToSender<Key>>,
    /// Messages to the receiver that arrived and were not acknowledged to the sender.
    unacknowledged: usize,
    /// Whether each end has seen the present connection.
    sender_up: bool,
    receiver_up: bool,
    over_at_sender: Vec<(u64, Error)>,
    /// Steps that have ended at the sender, of which the receiver was not told.
    untold: Vec<StepsOver<Error>>,
    over_at_receiver: Vec<u64>,
    fates: Vec<Fate>,
    calls: Vec<Call>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Program(usize),
    ToSender,
    ToReceiver,
    Acknowledge,
    /// The sender tells which steps have ended.
    Tell,
    /// The value that a receive has taken lands.
    Land(Waiter),
}

impl World {
    fn new(case: &Case) -> Self {
        World {
            at: vec![0; case.programs.len()],
            sender: OutEdges::new(case.options),
            receiver: InEdges::new(case.options),
            to_receiver: VecDeque::new(),
            to_sender: VecDeque::new(),
            unacknowledged: 0,
            sender_up: true,
            receiver_up: true,
            over_at_sender: Vec::new(),
            untold: Vec::new(),
            over_at_receiver: Vec::new(),
            fates: vec![Fate::NotSent; case.values().len()],
            calls: vec![Call::NotBegun; case.calls().len()],
        }
    }

    fn next_act(&self, case: &Case, program: usize) -> Option<Act> {
        let act = *case.programs[program].get(self.at[program])?;
        let possible = match act {
            Act::SenderRepaired => !self.sender_up,
            Act::ReceiverRepaired => !self.receiver_up,
            Act::Break | Act::SenderReturns | Act::ReceiverReturns => self.sender_up && self.receiver_up,
            _ => true,
        };
        possible.then_some(act)
    }

    fn steps(&self, case: &Case) -> Vec<Step> {
        let mut steps: Vec<_> = (0..case.programs.len())
            .filter(|program| self.next_act(case, *program).is_some())
            .map(Step::Program)
            .collect();
        if self.sender_up && !self.to_sender.is_empty() {
            steps.push(Step::ToSender);
        }
        if self.receiver_up && !self.to_receiver.is_empty() {
            steps.push(Step::ToReceiver);
        }
        if self.sender_up && self.receiver_up && self.unacknowledged > 0 {
            steps.push(Step::Acknowledge);
        }
        if self.sender_up && !self.untold.is_empty() {
            steps.push(Step::Tell);
        }
        steps.extend(self.under_way().map(|(waiter, _)| Step::Land(waiter)));
        steps
    }

    /// Checks this state. Returns the states that follow.
    fn next(&self, case: &Case) -> Result<Vec<(Step, World)>, WindowViolation> {
        self.check(case);
        let steps = self.steps(case);
        if steps.is_empty() {
            self.clone().check_end(case);
        }
        let follow = |step| {
            let mut next = self.clone();
            next.take(case, step)?;
            Ok((step, next))
        };
        steps.into_iter().map(follow).collect()
    }

    fn take(&mut self, case: &Case, step: Step) -> Result<(), WindowViolation> {
        match step {
            Step::Program(program) => {
                let act = case.programs[program][self.at[program]];
                self.at[program] += 1;
                // Values and receives are numbered in the order of the programs.
                let before = |is: fn(&Act) -> bool| {
                    let earlier = case.programs[..program].iter().flatten();
                    earlier
                        .chain(&case.programs[program][..self.at[program] - 1])
                        .filter(|act| is(act))
                        .count()
                };
                let value = before(|act| matches!(act, Act::Send(..)));
                let is_call = |act: &Act| {
                    matches!(
                        act,
                        Act::Receive(..)
                            | Act::ReceiveMismatch(..)
                            | Act::TryReceive(..)
                            | Act::ReceiveRemote(..)
                    )
                };
                let call = before(is_call);
                self.act(case, act, value as Value, call as Waiter);
            }
            Step::ToSender => {
                let message = self.to_sender.pop_front().expect("a message");
                let over = self.over_at_sender.clone();
                let end_of = |step| over.iter().find(|(of, _)| *of == step).map(|(_, error)| *error);
                let refusal = |key: &Key| (*key == UNSERVED).then_some(REFUSED);
                let mut posted = Vec::new();
                let dropped =
                    self.sender.receive(message, end_of, refusal, &mut |message| posted.push(message))?;
                self.post_to_receiver(posted);
                self.drop_values(&dropped);
            }
            Step::ToReceiver => {
                let message = self.to_receiver.pop_front().expect("a message");
                self.unacknowledged += usize::from(case.options.resends);
                self.arrive(case, message)?;
            }
            Step::Acknowledge => {
                self.sender.acknowledged(std::mem::take(&mut self.unacknowledged));
            }
            Step::Tell => {
                let mut posted = Vec::new();
                for over in std::mem::take(&mut self.untold) {
                    self.sender.tell_end(over, &mut |message| posted.push(message));
                }
                self.post_to_receiver(posted);
            }
            Step::Land(waiter) => self.land(case, waiter),
        }
        Ok(())
    }

    fn act(&mut self, case: &Case, act: Act, value: Value, call: Waiter) {
        let mut to_receiver = Vec::new();
        let mut to_sender = Vec::new();
        match act {
            Act::Send(key, step) => {
                if self.over_at_sender.iter().any(|(of, _)| *of == step) {
                    self.fates[value as usize] = Fate::Dropped;
                    return;
                }
                self.fates[value as usize] = Fate::Moving;
                let index = self.sender.edge(&key);
                let short = self.sender.next_record(index, step).map(|record| {
                    let mut sender = self.sender.clone();
                    sender.left(index);
                    (sender, with_value(record, value))
                });
                self.sender.offer(index, step, value, &mut |message| to_receiver.push(message));
                if let Some((sender, record)) = short {
                    assert_eq!(to_receiver, [ToReceiver::Record(record)], "the short path sends the same");
                    assert!(sender == self.sender, "the short path leaves the same edges");
                }
            }
            Act::End(step) | Act::Abort(step) => {
                if self.over_at_sender.iter().any(|(of, _)| *of == step) {
                    return;
                }
                let error = if matches!(act, Act::End(_)) { ENDED } else { ABORTED };
                self.over_at_sender.push((step, error));
                let dropped = self.sender.drop_steps(&(step..=step));
                self.untold.push(StepsOver { first: step, last: step, error });
                dropped.iter().for_each(|(_, value)| self.drop_values(&[*value]));
            }
            Act::Flush => self.sender.flush(&mut |message| to_receiver.push(message)),
            Act::Receive(..) | Act::ReceiveMismatch(..) | Act::TryReceive(..) | Act::ReceiveRemote(..) => {
                self.receive(case, call, &mut to_sender);
            }
            Act::Widen(key) => {
                let index = self.receiver.edge(&key);
                self.receiver.widen(index, 2, &mut |message| to_sender.push(message));
            }
            Act::GiveUp(waiter) => {
                let Receive { key, step, .. } = case.calls()[waiter as usize];
                if self.calls[waiter as usize] == Call::Waits {
                    let index = self.receiver.edge(&key);
                    assert!(self.receiver.give_up(index, step, &waiter), "{waiter} waits");
                    self.receiver.send_due(index, &mut |message| to_sender.push(message));
                    self.calls[waiter as usize] = Call::GaveUp;
                }
                self.leave(case, waiter);
            }
            Act::EndHere(step) => {
                self.over_at_receiver.push(step);
                let (waiters, values) =
                    self.receiver.end_steps(&(step..=step), &mut |message| to_sender.push(message));
                self.fail(&waiters, ENDED_HERE);
                self.fail_taken(&values, ENDED_HERE);
                self.drop_values(&values);
            }
            Act::Retire(key) => {
                let index = self.receiver.edges().find(|(_, of, _)| **of == key).map(|(index, _, _)| index);
                if let Some(index) = index {
                    self.receiver.retire(index, &mut |message| to_sender.push(message));
                }
            }
            Act::Break => {
                self.clear_lanes();
                (self.sender_up, self.receiver_up) = (false, false);
            }
            Act::SenderRepaired => {
                self.sender_up = true;
                self.sender.repaired(&mut |message| to_receiver.push(message));
            }
            Act::ReceiverRepaired => {
                self.receiver_up = true;
                self.receiver.repaired(&mut |message| to_sender.push(message));
            }
            Act::SenderReturns => {
                let gone: Vec<_> = self.sender_values().chain(self.moving_values()).collect();
                self.clear_lanes();
                self.drop_values(&gone);
                self.sender = OutEdges::new(case.options);
                self.over_at_sender.clear();
                self.untold.clear();
                let waiters = self.receiver.lost();
                self.fail(&waiters, LOST);
                self.receiver.returned();
            }
            Act::ReceiverReturns => {
                let mut gone: Vec<_> = self.receiver_values().chain(self.moving_values()).collect();
                self.clear_lanes();
                gone.extend(self.sender.lost());
                gone.sort_unstable();
                gone.dedup();
                // A value that was taken may not have been acknowledged.
                gone.retain(|value| self.fates[*value as usize] == Fate::Moving);
                self.drop_values(&gone);
                let waiting = self.calls.iter().enumerate().filter(|(_, call)| **call == Call::Waits);
                let waiting: Vec<_> = waiting.map(|(waiter, _)| waiter as Waiter).collect();
                self.fail(&waiting, LOST);
                self.receiver = InEdges::new(case.options);
                self.over_at_receiver.clear();
            }
        }
        self.post_to_receiver(to_receiver);
        self.post_to_sender(to_sender);
    }

    fn receive(&mut self, case: &Case, waiter: Waiter, posted: &mut Vec<ToSender<Key>>) {
        let Receive { key, step, fits, waits, is_remote } = case.calls()[waiter as usize];
        if self.over_at_receiver.contains(&step) {
            self.calls[waiter as usize] = Call::Failed(ENDED_HERE);
            return;
        }
        let index = self.receiver.edge(&key);
        let mut post = |message| posted.push(message);
        if self.receiver.first(index, step).is_some() {
            if !fits {
                let held = self.receiver.take_if(index, step, |_| true).expect("a value");
                self.calls[waiter as usize] = Call::Failed(MISMATCH);
                assert_eq!(self.receiver.put_back(index, held), None, "a receive waits beside a value");
            } else if is_remote {
                let value = self.receiver.take_in_place(index, step).expect("a value");
                self.calls[waiter as usize] = Call::Took(*value);
            } else {
                let held = self.receiver.take_if(index, step, |_| true).expect("a value");
                self.got(case, waiter, held.value);
            }
            self.receiver.send_due(index, &mut post);
        } else if let Some(error) = self.receiver.refusal(index, step) {
            self.calls[waiter as usize] = Call::Failed(*error);
            self.receiver.send_due(index, &mut post);
        } else if waits {
            self.calls[waiter as usize] = Call::Waits;
            self.receiver.wait(index, step, waiter, &mut post);
        } else {
            self.calls[waiter as usize] = Call::GaveUp;
            self.receiver.ask(index, step, &mut post);
        }
    }

    fn arrive(&mut self, case: &Case, message: ToReceiver<Value, Error>) -> Result<(), WindowViolation> {
        let over = self.over_at_receiver.clone();
        if let ToReceiver::Record(record) = &message
            && !over.contains(&record.step)
        {
            self.compare_short_path(record);
            self.compare_short_end(record);
        }
        let mut posted = Vec::new();
        let mut post = |message| posted.push(message);
        match self.receiver.receive(message, |step| over.contains(&step), &mut post)? {
            Incoming::Nothing => {}
            Incoming::Value(index, waiter, held) => {
                let mut next = Some((waiter, held));
                while let Some((waiter, held)) = next {
                    next = None;
                    if case.calls()[waiter as usize].is_remote {
                        self.receiver.hold_taken(index, held.step, held.value);
                        self.calls[waiter as usize] = Call::Took(held.value);
                    } else if case.calls()[waiter as usize].fits {
                        let Held { value, .. } = held;
                        self.got(case, waiter, value);
                    } else {
                        self.calls[waiter as usize] = Call::Failed(MISMATCH);
                        next = self.receiver.put_back(index, held);
                    }
                }
                self.receiver.send_due(index, &mut post);
            }
            Incoming::Dropped(value) => self.drop_values(&[value]),
            Incoming::Ended(waiters, values, error) => {
                self.fail(&waiters, error);
                self.drop_values(&values);
            }
        }
        self.post_to_sender(posted);
        Ok(())
    }

    /// Checks that a receive on the short path does to its edge what a value does that comes, is
    /// held and is taken.
    fn compare_short_path(&self, record: &Record<Value>) {
        let step = record.step;
        let is_expected = |index: &u32| {
            self.receiver.first(*index, step).is_none()
                && self.receiver.next_record(*index, step).map(|next| with_value(next, record.value))
                    == Some(*record)
        };
        let mut indices = self.receiver.edges().map(|(index, ..)| index);
        let Some(index) = indices.find(is_expected) else { return };
        let (mut general, mut short) = (self.receiver.clone(), self.receiver.clone());
        let (mut sent, mut sent_short) = (Vec::new(), Vec::new());
        let came = general.receive(ToReceiver::Record(*record), |_| false, &mut |message| sent.push(message));
        assert_eq!(came, Ok(Incoming::Nothing), "the value is held");
        assert!(general.take_if(index, step, |_| true).is_some());
        general.send_due(index, &mut |message| sent.push(message));
        let stays_settled = short.stays_settled(index);
        short.took(index, stays_settled, &mut |message| sent_short.push(message));
        assert_eq!(sent, sent_short, "the short path sends the same");
        assert!(general.edges().eq(short.edges()), "the short path leaves the same edges");
        let mut silent = self.receiver.clone();
        if let Some(edge) = silent.plain_at(index, |_| true, step)
            && let Some(next) = edge.next_short(step)
        {
            assert_eq!(with_value(next, record.value), *record);
            edge.took();
            assert_eq!(sent, [], "a path without messages has none to send");
            assert!(general.edges().eq(silent.edges()), "and leaves the same edges");
        }
    }

    /// Checks that the short end of a receive that waits does to its edge what a value does that
    /// comes.
    fn compare_short_end(&self, record: &Record<Value>) {
        let step = record.step;
        let is_expected = |(index, waiter): &(u32, Waiter)| {
            let next = self.receiver.record_of(*index, step, waiter);
            next.map(|next| with_value(next, record.value)) == Some(*record)
        };
        let waiters = self.receiver.edges().flat_map(|(index, _, edge)| {
            edge.waiters().filter(|(of, _)| *of == step).map(move |(_, waiter)| (index, *waiter))
        });
        let Some((index, waiter)) = waiters.collect::<Vec<_>>().into_iter().find(is_expected) else { return };
        let (mut general, mut short, mut sent) = (self.receiver.clone(), self.receiver.clone(), Vec::new());
        let came = general.receive(ToReceiver::Record(*record), |_| false, &mut |message| sent.push(message));
        let Ok(Incoming::Value(of, to, held)) = came else { panic!("{came:?} for the waiter {waiter}") };
        assert_eq!((of, to, held.value), (index, waiter, record.value));
        general.send_due(index, &mut |message| sent.push(message));
        short.took_for(index, step);
        assert_eq!(sent, [], "a path without messages has none to send");
        assert!(general == short, "the short end leaves the same edges");
    }

    fn got(&mut self, case: &Case, waiter: Waiter, value: Value) {
        let values = case.values();
        let Receive { key, step, .. } = case.calls()[waiter as usize];
        assert_eq!(values[value as usize], (key, step), "a value of another key");
        assert_eq!(self.fates[value as usize], Fate::Moving, "value {value} was taken twice");
        let is_taken = |value| self.under_way().any(|(_, taken)| taken == value);
        let earlier = (0..value).filter(|value| values[*value as usize] == (key, step) && !is_taken(*value));
        let passed = earlier.filter(|value| self.fates[*value as usize] == Fate::Moving).count();
        assert!(passed == 0 || case.may_leave(), "value {value} came before {passed} others");
        self.fates[value as usize] = Fate::Taken;
        self.calls[waiter as usize] = Call::Got(value);
    }

    fn fail(&mut self, waiters: &[Waiter], error: Error) {
        for waiter in waiters {
            assert_eq!(self.calls[*waiter as usize], Call::Waits, "{waiter} fails");
            self.calls[*waiter as usize] = Call::Failed(error);
        }
    }

    fn drop_values(&mut self, values: &[Value]) {
        for value in values {
            assert_eq!(self.fates[*value as usize], Fate::Moving, "value {value} is dropped");
            self.fates[*value as usize] = Fate::Dropped;
        }
    }

    fn post_to_receiver(&mut self, messages: Vec<ToReceiver<Value, Error>>) {
        if self.sender_up {
            self.to_receiver.extend(messages);
        }
    }

    fn post_to_sender(&mut self, messages: Vec<ToSender<Key>>) {
        if self.receiver_up {
            self.to_sender.extend(messages);
        }
    }

    fn clear_lanes(&mut self) {
        self.to_receiver.clear();
        self.to_sender.clear();
        self.unacknowledged = 0;
    }
}

/// Explores every state that a case can reach. Returns the number of states and of ends, or the
/// steps to a state that must not be.
fn explore(case: &Case) -> Result<(usize, usize), String> {
    let (mut states, mut ends) = (HashSet::new(), HashSet::new());
    let mut open = vec![(World::new(case), Vec::new())];
    while let Some((world, path)) = open.pop() {
        let mut hasher = DefaultHasher::new();
        world.hash(&mut hasher);
        if !states.insert(hasher.finish()) {
            continue;
        }
        // A step may break an assertion of the machines or of the world.
        let next = std::panic::catch_unwind(|| world.next(case))
            .map_err(|_| format!("{} fails after {path:?}", case.name))?
            .map_err(|why| format!("{}: {why}, after {path:?} in {world:?}", case.name))?;
        if next.is_empty() {
            ends.insert(world.calls.clone());
        }
        for (step, world) in next {
            let mut path = path.clone();
            path.push(step);
            open.push((world, path));
        }
    }
    Ok((states.len(), ends.len()))
}

#[test]
fn in_every_interleaving_each_value_is_in_one_place_and_nothing_is_left() {
    let mut all = 0;
    for case in cases() {
        let (states, ends) = explore(&case).unwrap_or_else(|why| panic!("{why}"));
        println!("{}, window {}: {states} states, {ends} ends", case.name, case.options.first_window);
        all += states;
    }
    println!("{all} states");
    assert!(all > 30_000, "the cases are too small to show anything");
}

/// Each mutant of the machines is found by one of the cases.
#[cfg(tensorwire_mutants)]
#[test]
fn each_bug_is_found() {
    use crate::mutants::{Mutant, switch};
    // A panic counts as a finding. Its text is dropped.
    std::panic::set_hook(Box::new(|_| {}));
    let find = |mutant: &Mutant| {
        switch(Some(*mutant));
        let found = cases().into_iter().find(|case| explore(case).is_err());
        switch(None);
        println!("{mutant:?}: {}", found.as_ref().map_or("not found", |case| case.name));
        found.is_none()
    };
    let missed: Vec<_> = Mutant::OF_WINDOWS.iter().filter(|mutant| find(mutant)).collect();
    let _ = std::panic::take_hook();
    assert!(missed.is_empty(), "not found: {missed:?}");
}
