//! The clock, what is on its way, and what happens when it arrives.

use super::random::Random;
use super::side::{Arrived, Held, Operation, Side};
use super::{SimFabric, SimOptions, SimProcess};
use crate::fabric::{Lane, LinkFailure, LinkOptions, OpId, PostError};
use crate::memory::{Lease, LeaseSink, LentBytes, PeerRegion, Pool, Tensor};
use crate::wire::{Grant, Immediate, Time};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A virtual network. Clones are the same one.
#[derive(Clone)]
pub struct SimNetwork {
    state: Arc<Mutex<State>>,
    returned: Arc<Returned>,
}

/// Loans that borrowers have let go of; they may do that anywhere, also while the network is at work.
#[derive(Default)]
struct Returned(Mutex<Vec<u32>>);

impl LeaseSink for Returned {
    fn give_back(&self, loan: u32) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(loan);
    }
}

/// A process, as the network sees it.
pub(super) struct Process {
    is_dead: bool,
    stalled_until: Time,
    region: Arc<PeerRegion>,
}

impl Process {
    /// Whether its polls bring nothing now.
    pub fn is_deaf(&self, now: Time) -> bool {
        self.is_dead || now < self.stalled_until
    }
}

/// What a packet carries.
pub(super) enum Load {
    Message(Vec<u8>),
    Inline { bytes: Vec<u8>, target: Grant, immediate: Option<Immediate> },
    Write { source: Tensor, skip: u64, target: Grant, immediate: Option<Immediate> },
    Read { source: Grant },
    Loan { loan: u32, immediate: Immediate },
}

/// Something that will happen.
enum Happening {
    /// A packet of this side's operation reaches its peer.
    Packet { from: usize, lane: Lane, operation: u64, load: Load },
    /// A side's operation is done.
    Done { side: usize, operation: u64, read: Option<Vec<u8>> },
    /// The side's newest credits reach its peer.
    Credits { from: usize, lane: Lane, number: u64, returned: u32 },
    /// A side hears that its link is gone.
    News { side: usize, failure: LinkFailure },
    /// A borrower's word that it has let go reaches the lender.
    GiveBack { loan: u32 },
}

struct Loan {
    tensor: Tensor,
    /// Whose operation it is, until that has ended.
    operation: Option<(usize, u64)>,
    /// Whether the borrower has got it.
    is_out: bool,
}

/// All of the network.
pub(super) struct State {
    pub now: Time,
    pub options: SimOptions,
    pub processes: Vec<Process>,
    pub sides: Vec<Side>,
    random: Random,
    /// By time, then by the order in which they were foreseen.
    foreseen: BinaryHeap<Reverse<(Time, u64)>>,
    happenings: BTreeMap<u64, Happening>,
    next_happening: u64,
    loans: BTreeMap<u32, Loan>,
    next_loan: u32,
    returned: Arc<Returned>,
    digest: u64,
    trace: Vec<String>,
}

impl SimNetwork {
    /// A network without processes, at time 0.
    pub fn new(seed: u64, options: SimOptions) -> Self {
        let returned = Arc::new(Returned::default());
        let state = State {
            now: Time::ZERO,
            options,
            processes: Vec::new(),
            sides: Vec::new(),
            random: Random::new(seed),
            foreseen: BinaryHeap::new(),
            happenings: BTreeMap::new(),
            next_happening: 0,
            loans: BTreeMap::new(),
            next_loan: 0,
            returned: Arc::clone(&returned),
            digest: 0xCBF2_9CE4_8422_2325,
            trace: Vec::new(),
        };
        SimNetwork { state: Arc::new(Mutex::new(state)), returned }
    }

    /// A new process, whose tensors are of `pool`.
    ///
    /// # Panics
    /// If the pool's region can't be mapped a second time.
    pub fn process(&self, pool: &Pool) -> SimFabric {
        let region = pool.region();
        let file = region.fd().try_clone_to_owned().expect("a descriptor for the pool's region");
        let region =
            Arc::new(PeerRegion::map(file, region.len()).expect("a second map of the pool's region"));
        let mut state = self.lock();
        let process = SimProcess(state.processes.len() as u32);
        state.processes.push(Process { is_dead: false, stalled_until: Time::ZERO, region });
        SimFabric { network: self.clone(), process }
    }

    /// The time.
    pub fn now(&self) -> Time {
        self.lock().now
    }

    /// When the next thing happens by itself.
    pub fn next_event(&self) -> Option<Time> {
        self.with(|state| state.next_event())
    }

    /// Lets the time pass; everything that is due until then happens. Does nothing if it is later already.
    pub fn advance_to(&self, time: Time) {
        self.with(|state| state.advance_to(time));
    }

    /// The process dies: nothing more leaves it. What was on its way arrives, or does not; its peers hear of it.
    pub fn kill(&self, process: SimProcess) {
        self.with(|state| state.kill(process));
    }

    /// Every link between the two fails, and both hear of it.
    pub fn cut(&self, a: SimProcess, b: SimProcess) {
        self.with(|state| state.cut(a, b));
    }

    /// The process does not read what comes until then.
    pub fn stall(&self, process: SimProcess, until: Time) {
        self.with(|state| {
            state.note("stall", process.0 as usize, until.as_nanos());
            state.processes[process.0 as usize].stalled_until = until;
        });
    }

    /// A number that stands for everything that has happened, in its order.
    pub fn digest(&self) -> u64 {
        self.with(|state| state.digest)
    }

    /// What has happened, a line each, if [`SimOptions::trace`] is set.
    pub fn trace(&self) -> Vec<String> {
        self.lock().trace.clone()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn with<R>(&self, body: impl FnOnce(&mut State) -> R) -> R {
        let returned = std::mem::take(&mut *self.returned.0.lock().unwrap_or_else(PoisonError::into_inner));
        let mut state = self.lock();
        for loan in returned {
            state.give_back(loan);
        }
        body(&mut state)
    }

    /// Does what a poll does; if that brought nothing and time passes by polling, lets it pass and does it again.
    pub(super) fn polled(&self, mut body: impl FnMut(&mut State) -> usize) -> usize {
        self.with(|state| match body(state) {
            0 if state.options.auto_advance => match state.next_event() {
                Some(next) => {
                    state.advance_to(next);
                    body(state)
                }
                None => 0,
            },
            count => count,
        })
    }

    pub(super) fn open(&self, process: SimProcess, options: &LinkOptions) -> usize {
        let mut state = self.lock();
        state.sides.push(Side::new(process, options.clone()));
        state.sides.len() - 1
    }

    pub(super) fn connect(&self, side: usize, peer: usize) -> Result<(), String> {
        self.with(|state| {
            let other = state.sides.get(peer).filter(|_| peer != side).ok_or("there is no such half")?;
            if !other.is_up || state.processes[other.process.0 as usize].is_dead {
                return Err("the other half is gone".into());
            }
            if other.peer.is_some_and(|its| its != side) {
                return Err("the other half is connected to somebody else".into());
            }
            let (ours, theirs) = (&state.sides[side].options, &other.options);
            if (ours.lanes, ours.depth, ours.generation) != (theirs.lanes, theirs.depth, theirs.generation) {
                return Err(format!("this half has {ours:?}, the other {theirs:?}"));
            }
            state.note("connect", side, peer as u64);
            state.sides[side].peer = Some(peer);
            Ok(())
        })
    }

    /// The side is given up: what it holds is released without a word to it, and its peer hears of that.
    pub(super) fn close(&self, side: usize) {
        let garbage = self.with(|state| state.close(side));
        // Outside the lock.
        drop(garbage);
    }
}

impl State {
    fn note(&mut self, what: &'static str, side: usize, number: u64) {
        for word in [self.now.as_nanos(), side as u64, number] {
            self.digest = (self.digest ^ word).wrapping_mul(0x100_0000_01B3);
        }
        for byte in what.bytes() {
            self.digest = (self.digest ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3);
        }
        if self.options.trace {
            self.trace.push(format!("{:>12} ns  {what} {side} {number}", self.now.as_nanos()));
        }
    }

    fn next_event(&self) -> Option<Time> {
        self.foreseen.peek().map(|Reverse((time, _))| *time)
    }

    fn foresee(&mut self, time: Time, happening: Happening) {
        let number = self.next_happening;
        self.next_happening += 1;
        self.foreseen.push(Reverse((time, number)));
        self.happenings.insert(number, happening);
    }

    fn advance_to(&mut self, time: Time) {
        while let Some(Reverse((due, number))) = self.foreseen.peek().copied().filter(|due| due.0.0 <= time) {
            self.foreseen.pop();
            self.now = self.now.max(due);
            if let Some(happening) = self.happenings.remove(&number) {
                self.happen(happening);
            }
        }
        self.now = self.now.max(time);
    }

    /// When a packet that leaves now arrives.
    fn arrival(&mut self, side: usize, lane: Lane) -> Time {
        let arrival = self.now + self.random.within(&self.options.delay);
        let lane = &mut self.sides[side].lanes[usize::from(lane.0)];
        lane.last_arrival = arrival.max(lane.last_arrival);
        lane.last_arrival
    }

    /// Posts an operation. What is held for it comes back if it can't be posted.
    pub fn post(
        &mut self,
        side: usize,
        lane: Lane,
        id: Option<OpId>,
        held: Held,
        load: Load,
    ) -> Result<(), (PostError, Held)> {
        if let Err(error) = self.has_room(side, lane) {
            return Err((error, held));
        }
        let operation = self.sides[side].post(Operation { id, lane, held });
        let arrival = self.arrival(side, lane);
        self.note("post", side, operation);
        self.foresee(arrival, Happening::Packet { from: side, lane, operation, load });
        Ok(())
    }

    fn has_room(&mut self, side: usize, lane: Lane) -> Result<(), PostError> {
        let this = &self.sides[side];
        if !this.is_up || self.processes[this.process.0 as usize].is_dead {
            return Err(PostError::Down);
        }
        let depth = this.options.depth;
        if this.lanes[usize::from(lane.0)].outstanding >= depth
            || self.random.chance(self.options.full_per_mille)
        {
            return Err(PostError::Full);
        }
        Ok(())
    }

    pub fn lend(
        &mut self,
        side: usize,
        lane: Lane,
        id: OpId,
        source: &Tensor,
        immediate: Immediate,
    ) -> Result<(), PostError> {
        if !self.options.lends {
            return Err(PostError::Refused("this network does not lend"));
        }
        self.has_room(side, lane)?;
        let loan = self.next_loan;
        self.next_loan += 1;
        let operation = self.sides[side].post(Operation { id: Some(id), lane, held: Held::Loan(loan) });
        let tensor = source.clone();
        self.loans.insert(loan, Loan { tensor, operation: Some((side, operation)), is_out: false });
        let arrival = self.arrival(side, lane);
        self.note("lend", side, operation);
        let load = Load::Loan { loan, immediate };
        self.foresee(arrival, Happening::Packet { from: side, lane, operation, load });
        Ok(())
    }

    pub fn publish(&mut self, side: usize, lane: Lane, returned: u32) {
        if !self.sides[side].is_up || self.processes[self.sides[side].process.0 as usize].is_dead {
            return;
        }
        let state = &mut self.sides[side].lanes[usize::from(lane.0)];
        state.published += 1;
        let number = state.published;
        // It may overtake and be overtaken: only the newest counts.
        let arrival = self.now + self.random.within(&self.options.delay);
        self.foresee(arrival, Happening::Credits { from: side, lane, number, returned });
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Packet { from, lane, operation, load } => self.arrive(from, lane, operation, load),
            Happening::Done { side, operation, read } => self.done(side, operation, read),
            Happening::Credits { from, lane, number, returned } => {
                let Some(to) = self.sides[from].peer else { return };
                let side = &mut self.sides[to];
                let credits = &mut side.lanes[usize::from(lane.0)].credits;
                if number > credits.0 {
                    *credits = (number, returned);
                    side.credits_came = true;
                    side.ring();
                }
            }
            Happening::News { side, failure } => self.go_down(side, failure),
            Happening::GiveBack { loan } => self.loan_ended(loan),
        }
    }

    fn arrive(&mut self, from: usize, lane: Lane, operation: u64, load: Load) {
        let to = self.sides[from].peer.filter(|to| self.sides[*to].is_up);
        // A link of which the other side is gone swallows what comes; its sender hears of that.
        let Some(to) = to.filter(|to| !self.processes[self.sides[*to].process.0 as usize].is_dead) else {
            return;
        };
        self.note("arrive", to, operation);
        match self.land(to, lane, load) {
            Ok(Landed::Done(read)) => {
                // The answer to a read takes as long as the question.
                let back = match &read {
                    Some(_) => self.random.within(&self.options.delay),
                    None => std::time::Duration::ZERO,
                };
                let done = self.now + back + self.random.within(&self.options.completion_delay);
                self.foresee(done, Happening::Done { side: from, operation, read });
            }
            Ok(Landed::Lent) => {}
            Err(failure) => self.fail(to, failure),
        }
    }

    fn land(&mut self, to: usize, lane: Lane, load: Load) -> Result<Landed, LinkFailure> {
        match load {
            Load::Message(bytes) => {
                self.consume(to, lane)?;
                self.sides[to].bring(lane, Arrived::Message(bytes));
            }
            Load::Inline { bytes, target, immediate } => self.write(to, lane, &bytes, &target, immediate)?,
            Load::Write { source, skip, target, immediate } => {
                let bytes = &source.bytes()[skip as usize..][..target.len as usize];
                self.write(to, lane, bytes, &target, immediate)?;
            }
            Load::Read { source } => {
                let bytes = match source.len {
                    0 => Vec::new(),
                    _ => self.sides[to].readable(&source).map_err(LinkFailure::Protocol)?.to_vec(),
                };
                return Ok(Landed::Done(Some(bytes)));
            }
            Load::Loan { loan, immediate } => {
                self.consume(to, lane)?;
                return self.lent(to, lane, loan, immediate);
            }
        }
        Ok(Landed::Done(None))
    }

    fn consume(&mut self, to: usize, lane: Lane) -> Result<(), LinkFailure> {
        let receives = &mut self.sides[to].lanes[usize::from(lane.0)].receives;
        *receives = receives.checked_sub(1).ok_or(LinkFailure::NoReceive { lane: lane.0 })?;
        Ok(())
    }

    fn write(
        &mut self,
        to: usize,
        lane: Lane,
        bytes: &[u8],
        target: &Grant,
        immediate: Option<Immediate>,
    ) -> Result<(), LinkFailure> {
        if !bytes.is_empty() {
            // Checked before the receive is consumed and written after, as a NIC does.
            self.sides[to].writable(target).map_err(LinkFailure::Protocol)?;
        }
        if immediate.is_some() {
            self.consume(to, lane)?;
        }
        if !bytes.is_empty() {
            self.sides[to].writable(target).map_err(LinkFailure::Protocol)?.copy_from_slice(bytes);
        }
        if let Some(immediate) = immediate {
            let event = Arrived::Immediate(immediate, bytes.len() as u64);
            self.sides[to].bring(lane, event);
        }
        Ok(())
    }

    fn lent(
        &mut self,
        to: usize,
        lane: Lane,
        loan: u32,
        immediate: Immediate,
    ) -> Result<Landed, LinkFailure> {
        // The lender has given up meanwhile: nothing was lent.
        let Some(entry) = self.loans.get_mut(&loan) else { return Ok(Landed::Lent) };
        let Some((from, _)) = entry.operation else { return Ok(Landed::Lent) };
        let (offset, len) = entry
            .tensor
            .span()
            .map_or((0, 0), |span| (span.offset, entry.tensor.meta().bytes().min(span.len)));
        let region = self.processes[self.sides[from].process.0 as usize].region.clone();
        let lease = Lease::new(self.returned.clone(), loan);
        let bytes = LentBytes::new(region, offset, len, lease)
            .ok_or_else(|| LinkFailure::Protocol("it lent what is not in its pool".into()))?;
        entry.is_out = true;
        self.sides[to].bring(lane, Arrived::Lent(immediate, bytes));
        Ok(Landed::Lent)
    }

    /// A borrower has let go.
    fn give_back(&mut self, loan: u32) {
        let word = self.now + self.random.within(&self.options.delay);
        self.foresee(word, Happening::GiveBack { loan });
    }

    fn loan_ended(&mut self, loan: u32) {
        if let Some(Loan { operation: Some((side, operation)), .. }) = self.loans.remove(&loan) {
            self.done(side, operation, None);
        }
    }

    fn done(&mut self, side: usize, operation: u64, read: Option<Vec<u8>>) {
        let side_number = side;
        let side = &mut self.sides[side];
        let Some(Operation { id, lane, held }) = side.end(operation) else { return };
        let Some(id) = id else { return };
        let event = match (held, read) {
            (Held::Target(mut target), Some(bytes)) => {
                target.bytes_mut()[..bytes.len()].copy_from_slice(&bytes);
                Arrived::ReadDone(id, target)
            }
            _ => Arrived::Done(id),
        };
        side.bring(lane, event);
        self.note("done", side_number, operation);
    }

    /// The side ends the link by itself.
    pub fn fail(&mut self, side: usize, why: LinkFailure) {
        if self.sides[side].is_up {
            self.go_down(side, why);
            self.tell_peer(side, LinkFailure::Closed);
        }
    }

    /// The peer hears of the link's end behind everything that was sent before.
    fn tell_peer(&mut self, side: usize, failure: LinkFailure) {
        let Some(peer) = self.sides[side].peer else { return };
        let sent = self.sides[side].lanes.iter().map(|lane| lane.last_arrival).max().unwrap_or_default();
        let news = (self.now + self.random.within(&self.options.delay)).max(sent);
        self.foresee(news, Happening::News { side: peer, failure });
    }

    fn go_down(&mut self, side: usize, failure: LinkFailure) {
        if !std::mem::replace(&mut self.sides[side].is_up, false) {
            return;
        }
        self.note("down", side, 0);
        let operations = std::mem::take(&mut self.sides[side].operations);
        for (_, Operation { id, lane, held }) in operations {
            self.release(&held);
            if let Some(id) = id {
                self.sides[side].bring(lane, Arrived::Failed(id));
            }
        }
        self.sides[side].bring(Lane::CONTROL, Arrived::Down(failure));
    }

    /// A loan that is out stays until it comes back; anything else goes with its operation.
    fn release(&mut self, held: &Held) {
        let Held::Loan(loan) = held else { return };
        match self.loans.get_mut(loan) {
            Some(entry) if entry.is_out => entry.operation = None,
            _ => drop(self.loans.remove(loan)),
        }
    }

    fn close(&mut self, side: usize) -> Option<Side> {
        let was_up = std::mem::replace(&mut self.sides[side].is_up, false);
        self.note("close", side, 0);
        for operation in std::mem::take(&mut self.sides[side].operations).into_values() {
            self.release(&operation.held);
        }
        let is_dead = self.processes[self.sides[side].process.0 as usize].is_dead;
        if was_up && !is_dead {
            self.tell_peer(side, LinkFailure::Closed);
        }
        // Its number stays taken, so that late packets find nobody.
        let (process, options, peer) =
            (self.sides[side].process, self.sides[side].options.clone(), self.sides[side].peer);
        let mut empty = Side::new(process, options);
        (empty.is_up, empty.peer) = (false, peer);
        Some(std::mem::replace(&mut self.sides[side], empty))
    }

    fn kill(&mut self, process: SimProcess) {
        self.note("kill", process.0 as usize, 0);
        self.processes[process.0 as usize].is_dead = true;
        for side in 0..self.sides.len() {
            let this = &self.sides[side];
            let (Some(peer), true) = (this.peer, this.process == process && this.is_up) else { continue };
            // Not behind what is on its way: the seed says how much of that still arrives.
            let news = self.now + self.random.within(&self.options.delay);
            let failure = LinkFailure::PeerDied { pid: process.0 };
            self.foresee(news, Happening::News { side: peer, failure });
        }
    }

    fn cut(&mut self, a: SimProcess, b: SimProcess) {
        self.note("cut", a.0 as usize, b.0.into());
        for side in 0..self.sides.len() {
            let Some(peer) = self.sides[side].peer else { continue };
            let ends = (self.sides[side].process, self.sides[peer].process);
            if ends == (a, b) || ends == (b, a) {
                let news = self.now + self.random.within(&self.options.delay);
                let failure = LinkFailure::Local("the link was cut".into());
                self.foresee(news, Happening::News { side, failure });
            }
        }
    }
}

/// What became of a packet.
enum Landed {
    /// Its operation is done, with what was read.
    Done(Option<Vec<u8>>),
    /// It was lent: done when it comes back.
    Lent,
}
