//! The members of a program, and what the model knows of them.

use super::calls::Outcome;
use super::member::ROLE;
use super::model::{CallNo, End, Model, Violation};
use super::order::{can_tell, order_is_kept};
use super::program::{Action, At, Form, Key, Program, ROOMY, ReceiveKind, STEPS};
use super::reply::{REPAIRS, REPLY, Reader, Verdict};
use super::{Faults, default_patience, direct_patience, patience, program_of};
use crate::common::other::Other;
use crate::common::{SOON, cluster};
use crate::tcp_connections::Breaker;
use std::time::{Duration, Instant};
use tensorwire::Error;
use tensorwire::internals::wire::Time;

/// Timeout of a receive for which no value need be there.
const BRIEF: Duration = Duration::from_millis(2);
/// Pause before members are asked again.
const PAUSE: Duration = Duration::from_millis(1);
/// Time from one break of a connection to the next.
const BETWEEN_BREAKS: Duration = Duration::from_millis(15);

/// What programs have done.
#[derive(Default)]
pub struct Summary {
    pub sent: usize,
    pub delivered: usize,
    pub failed: usize,
    /// Connections that were broken.
    pub breaks: usize,
    /// Links that members have repaired.
    pub repairs: u64,
}

impl Summary {
    pub fn add(&mut self, other: Summary) {
        self.sent += other.sent;
        self.delivered += other.delivered;
        self.failed += other.failed;
        self.breaks += other.breaks;
        self.repairs += other.repairs;
    }
}

/// Receives that one call has begun and that have not ended.
struct Begun {
    at: At,
    calls: Vec<CallNo>,
    is_callback: bool,
}

pub struct Cluster {
    program: Program,
    members: Vec<Other>,
    model: Model,
    reader: Reader,
    began: Instant,
    open: Vec<Begun>,
    /// Receives whose tensors are held, each with its member.
    held: Vec<(At, CallNo)>,
    /// The number of standing requests of each member.
    standing: Vec<usize>,
    /// Breaks a connection when it is due, while the program runs.
    breaker: Option<Breaker>,
    next_break: Instant,
}

impl Cluster {
    /// Starts the members of a program, and waits until they have joined.
    pub fn start(seed: u64, fabric: &str, faults: Faults) -> Cluster {
        let mut program = program_of(seed);
        program.settings.flip_per_mille = 0;
        program.settings.pool_bytes = ROOMY;
        let count = program.settings.processes;
        let addresses = cluster(count);
        let start = |at: usize| {
            let (at, seed) = (at.to_string(), seed.to_string());
            let environment = [("TEST_ME", &*at), ("TEST_SEED", &*seed), ("TEST_FABRIC", fabric)];
            Other::start_with(ROLE, &addresses, &environment)
        };
        let mut members: Vec<Other> = (0..count).map(start).collect();
        members.iter_mut().for_each(|member| drop(member.wait_for("joined")));
        Cluster {
            model: Model::new(&program.settings),
            program,
            members,
            reader: Reader::new(),
            began: Instant::now(),
            open: Vec::new(),
            held: Vec::new(),
            standing: vec![0; count],
            breaker: (faults == Faults::Connections).then(|| Breaker::new(&addresses)),
            next_break: Instant::now(),
        }
    }

    /// Carries the program out, and checks what is left.
    pub fn run(mut self) -> Result<Summary, Violation> {
        for (at, action) in self.program.actions.clone().iter().enumerate() {
            self.act(at, action).map_err(|why| format!("action {at}, {action}: {why}"))?;
        }
        self.every_call_ends()?;
        self.release_all()?;
        self.every_value_is_there()?;
        order_is_kept(&self.model)?;
        self.end_all_steps()?;
        // A link that ends while its connections are broken can't say goodbye.
        let breaks = self.breaker.take().map_or(0, |breaker| breaker.broken);
        self.nothing_is_left()?;
        self.members.iter_mut().for_each(|member| member.say("stop"));
        let mut repairs = 0;
        for (at, member) in self.members.iter_mut().enumerate() {
            let told = member.wait_for(REPAIRS);
            let number = told.rsplit('=').next().and_then(|number| number.parse::<u64>().ok());
            repairs += number.expect("a number");
            if !member.ends_well() {
                return Err(format!("member {at} did not stop well"));
            }
        }
        let ended = |fits: fn(&End) -> bool| {
            self.model.calls.iter().filter(|call| call.end.as_ref().is_some_and(fits)).count()
        };
        Ok(Summary {
            sent: self.model.channels.values().map(|channel| channel.values.len()).sum(),
            delivered: ended(|end| matches!(end, End::Got { .. })),
            failed: ended(|end| matches!(end, End::Failed { .. })),
            breaks,
            repairs,
        })
    }

    fn now(&self) -> Time {
        Time::ZERO + self.began.elapsed()
    }

    fn break_if_due(&mut self) {
        if let Some(breaker) = &mut self.breaker
            && Instant::now() >= self.next_break
        {
            breaker.break_next(&self.members);
            self.next_break = Instant::now() + BETWEEN_BREAKS;
        }
    }

    /// Has a member do something. Returns its verdict, and the receives that have ended there.
    fn ask(&mut self, at: At, what: &str) -> (Verdict, Vec<(CallNo, Outcome)>) {
        self.break_if_due();
        self.members[at].say(what);
        let line = self.members[at].wait_for(REPLY);
        self.reader.read(&line)
    }

    /// Passes the results of ended receives of a member to the model.
    fn hear(&mut self, at: At, ended: Vec<(CallNo, Outcome)>) -> Result<(), Violation> {
        for (call, outcome) in ended {
            let now = self.now();
            match outcome {
                Err(error) => self.model.ended_with(call, now, &error)?,
                Ok((tensor, is_dead)) => {
                    self.model.got(call, now, &tensor, is_dead)?;
                    (!is_dead).then(|| self.held.push((at, call)));
                }
            }
            self.open.iter_mut().for_each(|begun| begun.calls.retain(|open| *open != call));
        }
        self.open.retain(|begun| !begun.calls.is_empty());
        Ok(())
    }

    /// Has a member do what can't fail.
    fn tell(&mut self, at: At, what: &str) -> Result<(), Violation> {
        let (verdict, ended) = self.ask(at, what);
        self.hear(at, ended)?;
        match verdict {
            Verdict::Ok => Ok(()),
            other => Err(format!("{at} does not {what}: {other:?}")),
        }
    }

    fn look(&mut self) -> Result<(), Violation> {
        (0..self.members.len()).try_for_each(|at| self.tell(at, "look"))
    }

    /// Carries out an action of the program, which has this number.
    fn act(&mut self, number: usize, action: &Action) -> Result<(), Violation> {
        match *action {
            Action::Begin { at, step } => {
                let key = Key { from: at, to: at, name: 0, step, frame: 0 };
                match self.acts(at, number, 0, &[])? {
                    Verdict::Refused(error) => self.model.refused(key, at, &error),
                    verdict => done(verdict),
                }
            }
            Action::Stand { key, .. } => match self.acts(key.to, number, 0, &[])? {
                Verdict::Ok => {
                    self.model.stands(key);
                    self.standing[key.to] += 1;
                    Ok(())
                }
                Verdict::Refused(Error::StandingExists { .. }) if self.model.has_stood(&key) => Ok(()),
                Verdict::Refused(error) => self.model.refused(key, key.to, &error),
                verdict => done(verdict),
            },
            Action::Window { nth, window } => match self.nth_standing(nth) {
                Some((at, place)) => self.tell(at, &format!("window {place} {window}")),
                None => Ok(()),
            },
            Action::Unstand { nth } => match self.nth_standing(nth) {
                Some((at, place)) => {
                    self.standing[at] -= 1;
                    self.tell(at, &format!("unstand {place}"))
                }
                None => Ok(()),
            },
            Action::Send { key, ref form } => self.send(number, &[(key, form.clone())]),
            Action::SendAll { ref values } => self.send(number, values),
            Action::ReceiveAll { ref keys, timeout } => {
                self.receive_all(number, keys, &[], patience(timeout))
            }
            Action::WaitForAll { ref keys, ref into, timeout } => {
                self.receive_all(number, keys, into, direct_patience(timeout))
            }
            Action::Receive { key, ref into, timeout, kind } => {
                self.receive(number, key, into.as_ref(), timeout, kind)
            }
            Action::Cancel { nth } => self.cancel(nth),
            Action::DropPending { nth } => self.drop_pending(nth),
            Action::Release { nth } => match self.held.len() {
                0 => Ok(()),
                count => {
                    let (at, call) = self.held.remove(nth % count);
                    self.tell(at, &format!("release {call}"))
                }
            },
            Action::Abort { at, step } => self.end(number, at, step..step + 1, Model::aborted),
            Action::AbortFrom { at, step } => self.end(number, at, step..STEPS, Model::aborted),
            Action::Cleanup { at, step } => self.end(number, at, step..step + 1, Model::cleaned),
            Action::Flush { at } => self.acts(at, number, 0, &[]).map(drop),
            Action::Progress { at, times } => (0..times).try_for_each(|_| self.tell(at, "look")),
            Action::Run { .. } => self.look(),
            Action::Advance { time } => {
                std::thread::sleep(patience(time));
                Ok(())
            }
            Action::Kill { .. }
            | Action::Leave { .. }
            | Action::Return { .. }
            | Action::Cut { .. }
            | Action::Stall { .. } => Ok(()),
        }
    }

    /// Has a member carry out its part of an action.
    fn acts(&mut self, at: At, number: usize, call: CallNo, values: &[usize]) -> Result<Verdict, Violation> {
        let values: String = values.iter().map(|value| format!(" {value}")).collect();
        let (verdict, ended) = self.ask(at, &format!("act {number} {call}{values}"));
        self.hear(at, ended)?;
        Ok(verdict)
    }

    /// The `nth` standing request, modulo their number: its member, and its index there.
    fn nth_standing(&self, nth: usize) -> Option<(At, usize)> {
        let counts = self.standing.iter().enumerate();
        let all: Vec<_> = counts.flat_map(|(at, count)| (0..*count).map(move |place| (at, place))).collect();
        (!all.is_empty()).then(|| all[nth % all.len()])
    }

    /// Sends all values, which belong to one member and step, or none.
    fn send(&mut self, number: usize, values: &[(Key, Option<Form>)]) -> Result<(), Violation> {
        let Some((Key { from: at, .. }, _)) = values.first().cloned() else { return Ok(()) };
        // The model is told first, because a receive may get the value within the call.
        let tell = |(key, form): &(Key, Option<Form>)| {
            let value = self.model.next_value(*key);
            self.model.sent(*key, form.clone());
            value
        };
        let numbers: Vec<usize> = values.iter().map(tell).collect();
        let verdict = self.acts(at, number, 0, &numbers)?;
        if matches!(verdict, Verdict::Ok) {
            return Ok(());
        }
        values.iter().rev().for_each(|(key, _)| self.model.unsent(*key));
        let keys: Vec<Key> = values.iter().map(|(key, _)| *key).collect();
        self.not_done(verdict, &keys, at)
    }

    /// The verdict on a call that was refused. It must be right for at least one of its keys.
    fn not_done(&self, verdict: Verdict, keys: &[Key], at: At) -> Result<(), Violation> {
        match verdict {
            Verdict::Refused(error) => {
                let verdicts = keys.iter().map(|key| self.model.refused(*key, at, &error));
                verdicts.reduce(Result::or).unwrap_or(Ok(()))
            }
            verdict => done(verdict),
        }
    }

    /// The numbers of receives that begin now.
    fn begin(&mut self, keys: &[Key], into: &[Form], timeout: Duration, is_callback: bool) -> Vec<CallNo> {
        let (now, mut into) = (self.now(), into.iter().cloned());
        let begin = |key: &Key| self.model.received(*key, into.next(), 0..=0, now, now + timeout);
        let calls: Vec<CallNo> = keys.iter().map(begin).collect();
        self.open.push(Begun { at: keys[0].to, calls: calls.clone(), is_callback });
        calls
    }

    /// These receives were not begun.
    fn not_begun(&mut self, calls: &[CallNo]) {
        calls.iter().for_each(|call| self.model.unreceived(*call));
        self.open.retain(|begun| begun.calls != calls);
    }

    fn receive(
        &mut self,
        number: usize,
        key: Key,
        into: Option<&Form>,
        timeout: Option<u64>,
        kind: ReceiveKind,
    ) -> Result<(), Violation> {
        let timeout = match (timeout, kind) {
            (Some(timeout), ReceiveKind::Direct) => direct_patience(timeout),
            (Some(timeout), _) => patience(timeout),
            (None, _) => default_patience(self.program.settings.recv_timeout),
        };
        let into: Vec<Form> = into.cloned().into_iter().collect();
        let calls = self.begin(&[key], &into, timeout, kind == ReceiveKind::Callback);
        match self.acts(key.to, number, calls[0], &[])? {
            Verdict::Ok => Ok(()),
            Verdict::Refused(error) => {
                self.not_begun(&calls);
                self.model.refused_receive(key, &error)
            }
            verdict => {
                self.not_begun(&calls);
                self.not_done(verdict, &[key], key.to)
            }
        }
    }

    fn receive_all(
        &mut self,
        number: usize,
        keys: &[Key],
        into: &[Form],
        timeout: Duration,
    ) -> Result<(), Violation> {
        let Some(Key { to: at, .. }) = keys.first().copied() else { return Ok(()) };
        let calls = self.begin(keys, into, timeout, false);
        match self.acts(at, number, calls[0], &[])? {
            Verdict::Ok => Ok(()),
            Verdict::Failed(error) => {
                self.open.retain(|begun| begun.calls != calls);
                self.model.batch_failed(&calls, self.now(), &error)
            }
            verdict => {
                self.not_begun(&calls);
                self.not_done(verdict, keys, at)
            }
        }
    }

    fn cancel(&mut self, nth: usize) -> Result<(), Violation> {
        let Some(begun) = self.nth_open(nth, |_| true) else { return Ok(()) };
        let (at, calls) = (self.open[begun].at, self.open[begun].calls.clone());
        let now = self.now();
        // One that has ended meanwhile keeps its result.
        calls.iter().for_each(|call| self.model.cancelled(*call, now));
        self.tell(at, &format!("cancel {}", calls[0]))
    }

    fn drop_pending(&mut self, nth: usize) -> Result<(), Violation> {
        let Some(begun) = self.nth_open(nth, |begun| !begun.is_callback) else { return Ok(()) };
        let (at, first) = (self.open[begun].at, self.open[begun].calls[0]);
        let (verdict, ended) = self.ask(at, &format!("drop {first}"));
        self.hear(at, ended)?;
        if matches!(verdict, Verdict::Not(_)) {
            return Ok(());
        }
        let now = self.now();
        for begun in self.open.extract_if(.., |begun| begun.calls.contains(&first)) {
            for call in begun.calls {
                self.model.dropped(call, now);
                // A value that comes amid the drop may go with it.
                self.model.calls[call].end = Some(End::Unheard);
            }
        }
        Ok(())
    }

    /// The `nth` open call that fits, modulo their number.
    fn nth_open(&self, nth: usize, fits: fn(&Begun) -> bool) -> Option<usize> {
        let open: Vec<usize> = (0..self.open.len()).filter(|at| fits(&self.open[*at])).collect();
        (!open.is_empty()).then(|| open[nth % open.len()])
    }

    /// A member ends these steps, which ends their receives there.
    fn end(
        &mut self,
        number: usize,
        at: At,
        steps: std::ops::Range<u64>,
        ended: fn(&mut Model, At, u64),
    ) -> Result<(), Violation> {
        let (verdict, outcomes) = self.ask(at, &format!("act {number} 0"));
        if matches!(verdict, Verdict::Ok) {
            steps.clone().for_each(|step| ended(&mut self.model, at, step));
        }
        self.hear(at, outcomes)?;
        match verdict {
            Verdict::Ok => {}
            // The step has ended before.
            Verdict::Refused(error) => {
                let key = Key { from: at, to: at, name: 0, step: steps.start, frame: 0 };
                return self.model.refused(key, at, &error);
            }
            verdict => return done(verdict),
        }
        let began = Instant::now();
        loop {
            let key = |call: &CallNo| self.model.calls[*call].key;
            let mut open = self.open.iter().flat_map(|begun| &begun.calls).map(key);
            let Some(key) = open.find(|key| key.to == at && steps.contains(&key.step)) else {
                return Ok(());
            };
            if began.elapsed() > SOON {
                return Err(format!("a receive of {key} outlives its step"));
            }
            self.tell(at, "look")?;
        }
    }

    /// Every receive ends by its deadline, or soon after.
    fn every_call_ends(&mut self) -> Result<(), Violation> {
        let began = Instant::now();
        while let Some(begun) = self.open.first() {
            if began.elapsed() > 2 * SOON {
                return Err(format!("a receive of {} never ended", self.model.calls[begun.calls[0]].key));
            }
            self.look()?;
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    fn release_all(&mut self) -> Result<(), Violation> {
        let mut held = std::mem::take(&mut self.held).into_iter();
        held.try_for_each(|(at, call)| self.tell(at, &format!("release {call}")))
    }

    /// Receives each value that must still be there, and tries one more of each key.
    fn every_value_is_there(&mut self) -> Result<(), Violation> {
        let keys: Vec<Key> = self.model.channels.keys().copied().collect();
        for key in keys {
            let mut last: Option<usize> = None;
            while !self.model.is_closed(&key) {
                let (left, lost) = (self.model.left(&key), self.model.may_be_missing(&key));
                match self.receive_now(key, left.len() > lost)? {
                    Some(End::Got { value, .. }) => {
                        let first = left.first().copied().unwrap_or(value);
                        let in_order = last < Some(value) && (value == first || lost > 0);
                        if !in_order && can_tell(&self.model, key, &[value, first]) {
                            return Err(format!("value {value} of {key} came before value {first}"));
                        }
                        last = if can_tell(&self.model, key, &[value]) { Some(value) } else { last };
                    }
                    _ if left.len() > lost => {
                        return Err(format!("values {left:?} of {key} are lost ({lost} may be)"));
                    }
                    _ => break,
                }
            }
        }
        Ok(())
    }

    /// Receives once. Returns how the receive ended, or `None` if it was refused.
    fn receive_now(&mut self, key: Key, must_come: bool) -> Result<Option<End>, Violation> {
        let timeout = if must_come { SOON } else { BRIEF };
        let Key { from, to, name, step, frame } = key;
        let calls = self.begin(&[key], &[], timeout, false);
        let what = format!("receive {} {} {from} {name} {step} {frame}", calls[0], timeout.as_millis());
        let (verdict, ended) = self.ask(to, &what);
        self.hear(to, ended)?;
        match verdict {
            Verdict::Refused(error) => {
                self.not_begun(&calls);
                self.model.refused_receive(key, &error)?;
                return Ok(None);
            }
            verdict => done(verdict)?,
        }
        self.every_call_ends()?;
        self.release_all()?;
        Ok(self.model.calls[calls[0]].end)
    }

    fn end_all_steps(&mut self) -> Result<(), Violation> {
        let members = 0..self.members.len();
        // In half of the programs the standing requests end before the steps do.
        if self.program.seed.is_multiple_of(2) {
            members.clone().try_for_each(|at| self.tell(at, "stands_no_more"))?;
        }
        for at in members.clone() {
            (0..STEPS).try_for_each(|step| self.tell(at, &format!("cleanup {step}")))?;
        }
        members.clone().try_for_each(|at| self.tell(at, "stands_no_more"))
    }

    /// Once every step has ended, nothing is under way, and no pool has a tensor.
    fn nothing_is_left(&mut self) -> Result<(), Violation> {
        (0..self.members.len()).try_for_each(|at| self.tell(at, "rest"))
    }
}

fn done(verdict: Verdict) -> Result<(), Violation> {
    match verdict {
        Verdict::Ok => Ok(()),
        verdict => Err(format!("a member said {verdict:?}")),
    }
}
