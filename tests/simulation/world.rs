//! A cluster in one thread: processes, the network between them, and a scripted bootstrap service.

use crate::bootstrap::Bootstrap;
use crate::calls::{Open, Outcome, Wait};
use crate::model::{Model, Violation, pattern};
use crate::network::Network;
use crate::process::{Held, Process};
use crate::program::{Action, At, Form, Key, Program, ReceiveKind, STEPS, Settings};
use crate::random::Random;
use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::RangeInclusive;
use std::time::Duration;
use tensorwire::internals::wire::Time;
use tensorwire::{Code, Error, Pool, Status};

/// Rounds within which the pings of a new link must end.
const ROUNDS_TO_CONNECT: u32 = 10_000;

/// Delay after which the bootstrap service reports a death that the fabric reports too, in us.
const TOLD_LATE: u64 = 1_000_000;
/// The same for a member that has left.
const LEAVE_IS_TOLD: u64 = 50;
/// The same for the old life of a member that comes back at once.
const RETURN_IS_TOLD: u64 = 10;

pub struct World {
    pub settings: Settings,
    pub network: Network,
    pub model: Model,
    pub processes: Vec<Option<Process>>,
    lives: Vec<u64>,
    /// The pools of dead processes.
    pub dead_pools: Vec<Pool>,
    bootstrap: Bootstrap,
    /// Lost links as (process, peer, generation), whether the process knows of the loss or not.
    gone: BTreeSet<(At, At, u64)>,
    random: Random,
    digest: DefaultHasher,
}

impl World {
    /// A cluster in which all members are connected.
    pub fn new(program: &Program, trace: bool) -> Result<World, Violation> {
        let settings = program.settings.clone();
        let mut network = Network::new(program, trace);
        let processes =
            (0..settings.processes).map(|at| Some(Process::start(at, 0, &settings, &mut network))).collect();
        let mut world = World {
            model: Model::new(&settings),
            lives: vec![0; settings.processes],
            dead_pools: Vec::new(),
            settings,
            network,
            processes,
            bootstrap: Bootstrap::new(&program.settings),
            gone: BTreeSet::new(),
            random: Random::new(program.seed ^ 1),
            digest: DefaultHasher::new(),
        };
        for at in 0..world.settings.processes {
            world.bootstrap.joins(at, world.settings.processes, Time::ZERO);
        }
        for _ in 0..ROUNDS_TO_CONNECT {
            world.round()?;
            if !world.bootstrap.is_busy(&world.processes) {
                return Ok(world);
            }
        }
        Err("the links did not come up".into())
    }

    /// Carries out one action of a program.
    pub fn act(&mut self, action: &Action) -> Result<(), Violation> {
        match *action {
            Action::Begin { at, step } => self.begin(at, step)?,
            Action::Stand { key, window } => self.stand(key, window)?,
            Action::Window { nth, window } => {
                if let Some((at, place)) = self.nth_standing(nth)
                    && let Some(process) = &self.processes[at]
                {
                    match process.standing[place].set_window(window) {
                        Err(error) if !self.model.may_be_over(at) => {
                            return Err(format!("no window: {error}"));
                        }
                        _ => {}
                    }
                }
            }
            Action::Unstand { nth } => {
                if let Some((at, place)) = self.nth_standing(nth)
                    && let Some(process) = &mut self.processes[at]
                {
                    drop(process.standing.remove(place));
                }
            }
            Action::Send { key, ref form } => self.send(key, form.as_ref())?,
            Action::SendAll { ref values } => self.send_all(values)?,
            Action::ReceiveAll { ref keys, timeout } => self.receive_all(keys, timeout)?,
            Action::WaitForAll { ref keys, ref into, timeout } => self.wait_for_all(keys, into, timeout)?,
            Action::Receive { key, ref into, timeout, kind } => {
                self.receive(key, into.as_ref(), timeout, kind)?;
            }
            Action::Cancel { nth } => self.cancel(nth)?,
            Action::DropPending { nth } => self.drop_pending(nth)?,
            Action::Release { nth } => self.release(nth)?,
            Action::Abort { at, step } => self.abort(at, step)?,
            Action::AbortFrom { at, step } => self.abort_from(at, step)?,
            Action::Cleanup { at, step } => self.cleanup(at, step)?,
            Action::Flush { at } => self.flush(at)?,
            Action::Progress { at, times } => (0..times).try_for_each(|_| self.progress(at).map(drop))?,
            Action::Run { rounds } => (0..rounds).try_for_each(|_| self.round())?,
            Action::Advance { time } => {
                self.network.advance_to(self.network.now() + Duration::from_micros(time))
            }
            Action::Kill { at, told } => self.kill(at, told.unwrap_or(TOLD_LATE)),
            Action::Leave { at } => self.leave(at),
            Action::Return { at } => self.come_back(at),
            Action::Cut { a, b } => {
                self.model.cut(a, b);
                self.link_is_gone(a, b);
                self.link_is_gone(b, a);
                self.network.cut(a, b);
            }
            Action::Stall { at, time } => {
                self.network.stall(at, self.network.now() + Duration::from_micros(time))
            }
        }
        self.collect()?;
        self.loans_are_in_bounds()
    }

    fn begin(&mut self, at: At, step: u64) -> Result<(), Violation> {
        let Some(process) = &mut self.processes[at] else { return Ok(()) };
        match process.step(step) {
            Ok(_) => Ok(()),
            Err(error) => {
                let key = Key { from: at, to: at, name: 0, step, frame: 0 };
                self.model.refused(key, at, &error)
            }
        }
    }

    fn stand(&mut self, key: Key, window: u32) -> Result<(), Violation> {
        let Some(process) = &mut self.processes[key.to] else { return Ok(()) };
        match process.stand(key, window) {
            Ok(()) => {
                self.model.stands(key);
                Ok(())
            }
            Err(Error::StandingExists { .. }) if self.model.has_stood(&key) => Ok(()),
            Err(error) => self.model.refused(key, key.to, &error),
        }
    }

    /// The `nth` standing request, modulo their number: its process, and its index there.
    fn nth_standing(&self, nth: usize) -> Option<(At, usize)> {
        let living = self.processes.iter().flatten();
        let all: Vec<_> =
            living.flat_map(|process| (0..process.standing.len()).map(|place| (process.at, place))).collect();
        (!all.is_empty()).then(|| all[nth % all.len()])
    }

    fn send(&mut self, key: Key, form: Option<&Form>) -> Result<(), Violation> {
        let Some(process) = &self.processes[key.from] else { return Ok(()) };
        let number = self.model.next_value(key);
        let tensor = match form {
            None => None,
            Some(form) => match process.tensor(form) {
                Some(mut tensor) => {
                    let words = tensor.bytes_mut().chunks_mut(8).zip(pattern(key, number, form.dtype));
                    words.for_each(|(bytes, word)| bytes.copy_from_slice(&word[..bytes.len()]));
                    Some(tensor.freeze())
                }
                None if self.settings.is_roomy() => return Err("a roomy pool has no room".into()),
                None => return Ok(()),
            },
        };
        // The model is told first, because a receive may get the value within the call.
        self.model.sent(key, form.cloned());
        let in_vain = self.is_link_gone(&key);
        let Some(process) = &mut self.processes[key.from] else { return Ok(()) };
        match process.send(key, tensor) {
            Ok(()) => {
                if in_vain {
                    self.model.sent_in_vain(key);
                }
                Ok(())
            }
            Err(error) => {
                self.model.unsent(key);
                self.model.refused(key, key.from, &error)
            }
        }
    }

    fn receive(
        &mut self,
        key: Key,
        into: Option<&Form>,
        timeout: Option<u64>,
        kind: ReceiveKind,
    ) -> Result<(), Violation> {
        let Some(process) = &self.processes[key.to] else { return Ok(()) };
        let given = match into {
            None => None,
            Some(form) => match process.tensor(form) {
                Some(tensor) => Some(tensor),
                None if self.settings.is_roomy() => return Err("a roomy pool has no room".into()),
                None => return Ok(()),
            },
        };
        let now = self.network.now();
        let timeout = Duration::from_micros(timeout.unwrap_or(self.settings.recv_timeout));
        let Some(source_lives) = self.source_lives(&key) else { return Ok(()) };
        let call = self.model.received(key, into.cloned(), source_lives, now, now + timeout);
        let Some(process) = &mut self.processes[key.to] else { return Ok(()) };
        match process.receive(key, call, given, timeout, kind) {
            Ok(()) => Ok(()),
            Err(error) => {
                self.model.unreceived(call);
                self.model.refused_receive(key, &error)
            }
        }
    }

    /// Whether the link of a sender with a receiver is lost, and the sender does not know.
    pub fn is_link_gone(&self, key: &Key) -> bool {
        let link = self.processes[key.from].as_ref().and_then(|process| process.link_with(key.to));
        link.is_some_and(|link| self.gone.contains(&(key.from, key.to, link)))
    }

    /// The lives of the sender whose values a receive that begins now may get; `None` if the
    /// receiver is dead.
    pub fn source_lives(&self, key: &Key) -> Option<RangeInclusive<u64>> {
        let process = self.processes[key.to].as_ref()?;
        let own = self.lives[key.from];
        Some(if key.is_local() { own..=own } else { process.source_lives(key.from) })
    }

    /// The `nth` open call that fits, modulo their number: its process, and its index there.
    fn nth_open(&self, nth: usize, fits: fn(&Wait) -> bool) -> Option<(At, usize)> {
        let living = self.processes.iter().flatten();
        let open: Vec<_> = living
            .flat_map(|process| {
                let open = process.open.iter().enumerate();
                open.filter(|(_, open)| fits(&open.wait)).map(|(place, _)| (process.at, place))
            })
            .collect();
        (!open.is_empty()).then(|| open[nth % open.len()])
    }

    fn cancel(&mut self, nth: usize) -> Result<(), Violation> {
        // Calls that are done cannot be cancelled.
        self.collect()?;
        let Some((at, place)) = self.nth_open(nth, |_| true) else { return Ok(()) };
        let Some(process) = &self.processes[at] else { return Ok(()) };
        let open = &process.open[place];
        open.calls().for_each(|call| self.model.cancelled(call, self.network.now()));
        open.wait.cancel();
        Ok(())
    }

    fn drop_pending(&mut self, nth: usize) -> Result<(), Violation> {
        // The results of calls that are done count.
        self.collect()?;
        let fits = |wait: &Wait| !matches!(wait, Wait::CalledBack(_));
        let Some((at, place)) = self.nth_open(nth, fits) else { return Ok(()) };
        let Some(process) = &mut self.processes[at] else { return Ok(()) };
        let open = process.open.remove(place);
        open.calls().for_each(|call| self.model.dropped(call, self.network.now()));
        drop(open);
        Ok(())
    }

    fn release(&mut self, nth: usize) -> Result<(), Violation> {
        let count: usize = self.processes.iter().flatten().map(|process| process.held.len()).sum();
        if count == 0 {
            return Ok(());
        }
        let mut nth = nth % count;
        for process in self.processes.iter_mut().flatten() {
            if nth < process.held.len() {
                return process.held.remove(nth).check();
            }
            nth -= process.held.len();
        }
        Ok(())
    }

    /// No process lends more than its bound, or counts less than others hold of its tensors.
    fn loans_are_in_bounds(&self) -> Result<(), Violation> {
        for lender in self.processes.iter().flatten() {
            let (at, bound) = (lender.at, self.settings.max_lent_bytes);
            let counted = lender.loans().bytes;
            let is_loan = |held: &&Held| {
                let of = (held.key.from, self.model.life_of_value(&held.key, held.value));
                held.tensor.is_lent() && of == (at, self.lives[at])
            };
            let held = self.processes.iter().flatten().flat_map(|process| &process.held).filter(is_loan);
            let held: u64 = held.map(|held| held.tensor.bytes().len() as u64).sum();
            if counted > bound || held > counted {
                return Err(format!(
                    "{at} counts {counted} bytes that it has lent, {bound} at most, and others hold {held}"
                ));
            }
        }
        Ok(())
    }

    fn abort(&mut self, at: At, step: u64) -> Result<(), Violation> {
        let Some(process) = &mut self.processes[at] else { return Ok(()) };
        let Ok(handle) = process.step(step) else { return Ok(()) };
        self.model.aborted(at, step);
        let status = Status::new(Code::Internal, format!("the program aborts step {step}"));
        handle.abort(status).expect("not OK");
        self.no_call_is_left(at, step)
    }

    fn abort_from(&mut self, at: At, step: u64) -> Result<(), Violation> {
        let Some(process) = &mut self.processes[at] else { return Ok(()) };
        let Ok(handle) = process.step(step) else { return Ok(()) };
        (step..STEPS).for_each(|step| self.model.aborted(at, step));
        let status = Status::new(Code::Internal, format!("the program aborts from step {step} on"));
        process.abort_from(&handle, status).expect("a step of the sequence");
        (step..STEPS).try_for_each(|step| self.no_call_is_left(at, step))
    }

    fn cleanup(&mut self, at: At, step: u64) -> Result<(), Violation> {
        let Some(process) = &mut self.processes[at] else { return Ok(()) };
        self.model.cleaned(at, step);
        process.cleanup(step);
        self.no_call_is_left(at, step)
    }

    /// A sender knows of each value that may not have been taken.
    fn flush(&mut self, at: At) -> Result<(), Violation> {
        let Some(process) = &self.processes[at] else { return Ok(()) };
        let (untaken, model) = (process.untaken(), &self.model);
        let counts = |key: &&Key| {
            key.from == at && !key.is_local() && !model.is_closed(key) && !model.is_disturbed(key)
        };
        let left = |key: &Key| model.left(key).len().saturating_sub(model.may_be_missing(key)) as u64;
        let left: u64 = model.channels.keys().filter(counts).map(left).sum();
        let known = untaken.waiting() + untaken.left();
        if known < left && !model.may_be_over(at) {
            return Err(format!("{at} knows of {known} values, and {left} were not taken: {untaken}"));
        }
        Ok(())
    }

    /// The end of a step ends its receives at once.
    fn no_call_is_left(&mut self, at: At, step: u64) -> Result<(), Violation> {
        self.collect()?;
        let key = |call: usize| self.model.calls[call].key;
        let open = self.processes[at].iter().flat_map(|process| &process.open);
        match open.flat_map(Open::calls).find(|call| key(*call).step == step) {
            Some(call) => Err(format!("a receive of {} outlives its step", key(call))),
            None => Ok(()),
        }
    }

    /// One process polls once.
    pub fn progress(&mut self, at: At) -> Result<usize, Violation> {
        self.bootstrap.work(&self.processes, &self.network);
        let Some(process) = &mut self.processes[at] else { return Ok(0) };
        let count = match process.progress() {
            Ok(count) => count,
            Err(_) if self.model.may_be_over(at) => return self.everything_has_ended(at).map(|()| 0),
            Err(error) => return Err(format!("{at} can't make progress: {error}")),
        };
        (at, count).hash(&mut self.digest);
        self.collect()?;
        Ok(count)
    }

    /// The loss of a peer has ended all calls of a process, so its program leaves.
    fn everything_has_ended(&mut self, at: At) -> Result<(), Violation> {
        self.collect()?;
        let open = self.processes[at].iter().flat_map(|process| &process.open);
        let open: Vec<_> = open.flat_map(Open::calls).collect();
        if let Some(&call) = open.first() {
            let key = self.model.calls[call].key;
            return Err(format!("a receive of {key} outlives the end of everything"));
        }
        self.leave(at);
        Ok(())
    }

    /// Some processes poll, in random order. Then the time advances to the next event.
    pub fn round(&mut self) -> Result<(), Violation> {
        for _ in 0..self.settings.processes {
            let at = self.random.below(self.settings.processes as u64) as usize;
            self.progress(at)?;
        }
        self.pass();
        Ok(())
    }

    /// Advances the time to the next event, or by a microsecond if there is none.
    pub fn pass(&self) {
        let now = self.network.now();
        let next = [self.network.next_event(), self.bootstrap.next_event(now)].into_iter().flatten().min();
        self.network.advance_to(next.unwrap_or(now + Duration::from_micros(1)));
    }

    /// Passes the results of ended receives to the model.
    fn collect(&mut self) -> Result<(), Violation> {
        let now = self.network.now();
        for process in self.processes.iter_mut().flatten() {
            for (call, outcome) in process.ended() {
                (call, now.as_nanos(), brief(&outcome)).hash(&mut self.digest);
                match outcome {
                    Err(error) => self.model.ended_with(call, now, &error)?,
                    Ok((tensor, is_dead)) => {
                        let value = self.model.got(call, now, &tensor, is_dead)?;
                        let key = self.model.calls[call].key;
                        if !is_dead {
                            process.held.push(Held { key, value, tensor });
                        }
                    }
                }
            }
        }
        Ok(())
    }

    fn kill(&mut self, at: At, told: u64) {
        self.network.kill(at);
        self.end(at, told);
    }

    fn leave(&mut self, at: At) {
        if let Some(process) = &self.processes[at] {
            process.engine.close();
        }
        self.end(at, LEAVE_IS_TOLD);
    }

    fn link_is_gone(&mut self, at: At, with: At) {
        let link = self.processes[at].as_ref().and_then(|process| process.link_with(with));
        self.gone.extend(link.map(|link| (at, with, link)));
    }

    fn end(&mut self, at: At, told: u64) {
        (0..self.settings.processes).for_each(|other| self.link_is_gone(other, at));
        let Some(process) = self.processes[at].take() else { return };
        self.model.died(at);
        self.lives[at] += 1;
        let told = Duration::from_micros(told);
        self.dead_pools.push(process.pool.clone());
        self.bootstrap.dies(&process, &self.processes, self.network.now(), told);
    }

    fn come_back(&mut self, at: At) {
        self.kill(at, RETURN_IS_TOLD);
        let process = Process::start(at, self.lives[at], &self.settings, &mut self.network);
        self.processes[at] = Some(process);
        self.bootstrap.joins(at, self.settings.processes, self.network.now());
    }

    /// Whether the bootstrap service has something to do.
    pub fn is_linking(&self) -> bool {
        self.bootstrap.is_busy(&self.processes)
    }

    /// Whether both ends of a key are alive and have a link that works.
    pub fn is_connected(&self, key: &Key) -> bool {
        let view = |own: At, peer: At| self.processes[own].as_ref().is_some_and(|own| own.is_up(peer));
        match key.is_local() {
            true => self.processes[key.from].is_some(),
            false => {
                view(key.from, key.to) && view(key.to, key.from) && self.bootstrap.is_linked(key.from, key.to)
            }
        }
    }

    /// Whether a process has messages that wait for credits or room.
    pub fn has_backlog(&self) -> bool {
        self.processes.iter().flatten().any(|process| process.load().links.backlog > 0)
    }

    /// A digest of everything that happened.
    pub fn digest(&self) -> u64 {
        let mut digest = self.digest.clone();
        self.network.digest().hash(&mut digest);
        digest.finish()
    }
}

fn brief(outcome: &Outcome) -> String {
    match outcome {
        Ok((tensor, is_dead)) => format!("{} {is_dead}", tensor.meta()),
        Err(error) => error.to_string(),
    }
}

impl Held {
    /// Checks that a held tensor has not changed.
    pub fn check(&self) -> Result<(), Violation> {
        let Held { key, value, tensor } = self;
        match crate::model::is_pattern(tensor, *key, *value) {
            true => Ok(()),
            false => Err(format!("value {value} of {key} changed while it was held")),
        }
    }
}
