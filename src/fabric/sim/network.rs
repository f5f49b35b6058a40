//! The clock, packets in flight, and their arrival.

use super::digest::Digest;
use super::load::SimPayload;
use super::loans::{ReturnedLoans, SimLoan};
use super::random::SimRandom;
use super::side::{Departure, HeldMemory, LinkSide, SimArrival};
use super::{SimFabric, SimOptions, SimProcess};
use crate::fabric::{LinkFailure, LinkOptions, LoanLimiter, PostError};
use crate::memory::{PeerRegion, Pool};
use crate::wire::{Grant, Immediate, Time};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A virtual network. Clones share it.
#[derive(Clone)]
pub struct SimNetwork {
    state: Arc<Mutex<SimState>>,
    returned: Arc<ReturnedLoans>,
}

/// A process, as the network sees it.
pub(super) struct ProcessState {
    pub is_dead: bool,
    stalled_until: Time,
    /// How often a bit of a landing tensor flips, per thousand.
    pub flip_per_mille: u32,
    pub region: Arc<PeerRegion>,
    pub limiter: Arc<LoanLimiter>,
}

impl ProcessState {
    /// Whether the process is stalled: its polls bring nothing.
    pub fn is_deaf(&self, now: Time) -> bool {
        self.is_dead || now < self.stalled_until
    }
}

/// A scheduled event.
pub(super) enum SimEvent {
    /// A packet of this side's operation arrives at its peer.
    Packet { from: usize, operation: u64, load: SimPayload },
    /// An operation of a side completes locally.
    Done { side: usize, operation: u64, read: Option<Vec<u8>> },
    /// The newest credits of a side arrive at its peer.
    Credits { from: usize, number: u64, returned: u32 },
    /// A side is told that its link is gone.
    News { side: usize, failure: LinkFailure },
    /// A give-back arrives at the lender.
    GiveBack { loan: u32 },
    /// The stall of a process ends.
    Awake { process: SimProcess },
}

/// The state of the network.
pub(super) struct SimState {
    pub now: Time,
    pub options: SimOptions,
    pub processes: Vec<ProcessState>,
    pub sides: Vec<LinkSide>,
    pub(super) random: SimRandom,
    seed: u64,
    /// Scheduled events by time, then in the order of scheduling.
    agenda: BinaryHeap<Reverse<(Time, u64)>>,
    pub events: BTreeMap<u64, SimEvent>,
    next_event_number: u64,
    pub loans: BTreeMap<u32, SimLoan>,
    pub next_loan: u32,
    pub returned: Arc<ReturnedLoans>,
    pub digest: Digest,
    trace: Vec<String>,
}

impl SimNetwork {
    /// A network without processes, at time 0.
    ///
    /// # Panics
    /// If `poll_batch` is 0 or a range of times is empty: nothing would ever come.
    pub fn new(seed: u64, options: SimOptions) -> Self {
        assert!(options.poll_batch > 0, "poll_batch is 0: no poll would ever bring anything");
        for (name, range) in [("delay", &options.delay), ("completion_delay", &options.completion_delay)] {
            assert!(!range.is_empty(), "{name} is {range:?}, which is empty");
        }
        let returned = Arc::new(ReturnedLoans::default());
        let state = SimState {
            now: Time::ZERO,
            options,
            processes: Vec::new(),
            sides: Vec::new(),
            random: SimRandom::new(seed),
            seed,
            agenda: BinaryHeap::new(),
            events: BTreeMap::new(),
            next_event_number: 0,
            loans: BTreeMap::new(),
            next_loan: 0,
            returned: Arc::clone(&returned),
            digest: Digest::new(),
            trace: Vec::new(),
        };
        SimNetwork { state: Arc::new(Mutex::new(state)), returned }
    }

    /// A new process with `pool`.
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
        let limiter = Arc::new(LoanLimiter::new(state.options.max_lent_bytes));
        state.processes.push(ProcessState {
            is_dead: false,
            stalled_until: Time::ZERO,
            flip_per_mille: 0,
            region,
            limiter: Arc::clone(&limiter),
        });
        SimFabric { network: self.clone(), process, pool: pool.clone(), limiter }
    }

    /// The virtual time.
    pub fn now(&self) -> Time {
        self.lock().now
    }

    /// The time of the next scheduled event.
    pub fn next_event(&self) -> Option<Time> {
        self.with(|state| state.next_event())
    }

    /// Advances the time, and carries out all events until then. Does nothing if the time is
    /// already later.
    pub fn advance_to(&self, time: Time) {
        self.with(|state| state.advance_to(time));
    }

    /// Kills a process: nothing more leaves it. The seed decides which packets in flight arrive.
    /// Its peers are told.
    pub fn kill(&self, process: SimProcess) {
        self.with(|state| state.kill(process));
    }

    /// Cuts every link between two processes. Both are told.
    pub fn cut(&self, a: SimProcess, b: SimProcess) {
        self.with(|state| state.cut(a, b));
    }

    /// Stalls a process until `until`: its polls bring nothing. Writes to its memory still land.
    pub fn stall(&self, process: SimProcess, until: Time) {
        self.with(|state| {
            state.note("stall", process.0 as usize, until.as_nanos());
            state.processes[process.0 as usize].stalled_until = until;
            if until > state.now && until != Time::NEVER {
                state.schedule(until, SimEvent::Awake { process });
            }
        });
    }

    /// Flips one bit in `per_mille` of a thousand tensors that land at a process from now on, by a
    /// write, a loan or a record.
    pub fn flip_bits(&self, process: SimProcess, per_mille: u32) {
        self.with(|state| state.processes[process.0 as usize].flip_per_mille = per_mille);
    }

    /// A digest of all events so far, in order.
    pub fn digest(&self) -> u64 {
        self.with(|state| state.digest.value())
    }

    /// The events so far, one line each, if [`SimOptions::trace`] is set.
    pub fn trace(&self) -> Vec<String> {
        self.lock().trace.clone()
    }

    fn lock(&self) -> MutexGuard<'_, SimState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn with<R>(&self, body: impl FnOnce(&mut SimState) -> R) -> R {
        let mut state = self.lock();
        for loan in self.returned.take() {
            state.give_back(loan);
        }
        body(&mut state)
    }

    /// Runs `poll`. If it brought nothing and polls advance the time, advances the time and runs it
    /// again.
    pub(super) fn polled(&self, mut body: impl FnMut(&mut SimState) -> usize) -> usize {
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
        let number = state.sides.len();
        // Each side has keys of its own, so that a grant of one link is invalid on another.
        let keys = SimRandom::new(state.seed ^ number as u64).next();
        state.sides.push(LinkSide::new(process, options.clone(), keys));
        number
    }

    pub(super) fn connect(&self, side: usize, peer: usize) -> Result<(), String> {
        self.with(|state| {
            let other = state.sides.get(peer).filter(|_| peer != side).ok_or("there is no such endpoint")?;
            if state.is_dead(side) {
                return Err("this process is dead".into());
            }
            if !other.is_up || state.is_dead(peer) {
                return Err("the other endpoint is gone".into());
            }
            if other.peer().is_some_and(|its| its != side) {
                return Err("the other endpoint is connected to somebody else".into());
            }
            if state.sides[side].peer().is_some_and(|its| its != peer) {
                return Err("somebody else has connected to this endpoint".into());
            }
            let (ours, theirs) = (&state.sides[side].options, &other.options);
            if (ours.depth, ours.generation) != (theirs.depth, theirs.generation) {
                return Err(format!("this endpoint has {ours:?}, the other {theirs:?}"));
            }
            state.note("connect", side, peer as u64);
            state.sides[side].connected_to = Some(peer);
            state.sides[peer].reached_by = Some(side);
            Ok(())
        })
    }

    /// The owner has dropped the side. Its memory is released without events, and its peer is told.
    pub(super) fn close(&self, side: usize) {
        let garbage = self.with(|state| state.close(side));
        // Drops happen outside the lock.
        drop(garbage);
    }
}

impl SimState {
    pub fn note(&mut self, what: &'static str, side: usize, number: u64) {
        [self.now.as_nanos(), side as u64, number].into_iter().for_each(|word| self.digest.word(word));
        self.digest.bytes(what.as_bytes());
        if self.options.trace {
            self.trace.push(format!("{:>12} ns  {what} {side} {number}", self.now.as_nanos()));
        }
    }

    fn next_event(&self) -> Option<Time> {
        self.agenda.peek().map(|Reverse((time, _))| *time)
    }

    pub fn schedule(&mut self, time: Time, event: SimEvent) {
        let number = self.next_event_number;
        self.next_event_number += 1;
        self.agenda.push(Reverse((time, number)));
        self.events.insert(number, event);
    }

    fn advance_to(&mut self, time: Time) {
        while let Some(Reverse((due, number))) = self.agenda.peek().copied().filter(|due| due.0.0 <= time) {
            self.agenda.pop();
            self.now = self.now.max(due);
            let Some(event) = self.events.remove(&number) else { continue };
            match self.waits_for(&event) {
                Some(side) => {
                    self.events.insert(number, event);
                    self.sides[side].early.push((due, number));
                    self.sides[side].ring();
                }
                None => self.run_event(event),
            }
        }
        self.now = self.now.max(time);
    }

    /// The side whose first poll an event waits for: before it, the owner cannot have posted a
    /// receive.
    fn waits_for(&self, event: &SimEvent) -> Option<usize> {
        let side = match event {
            SimEvent::Packet { from, .. } => self.sides[*from].connected_to?,
            SimEvent::News { side, .. } => *side,
            _ => return None,
        };
        let waits = self.sides[side].is_up && !self.sides[side].listens && !self.is_dead(side);
        waits.then_some(side)
    }

    /// The first poll of a side: earlier arrivals happen now.
    pub fn listen(&mut self, side: usize) {
        if !std::mem::replace(&mut self.sides[side].listens, true) {
            self.agenda.extend(self.sides[side].early.drain(..).map(Reverse));
            self.advance_to(self.now);
        }
    }

    /// Drops arrivals that wait for the first poll of a side that will not poll.
    pub fn forget_early(&mut self, side: usize) {
        for (_, number) in std::mem::take(&mut self.sides[side].early) {
            self.events.remove(&number);
        }
    }

    pub fn after_a_delay(&mut self) -> Time {
        self.now + self.random.within(&self.options.delay)
    }

    /// Sends an operation, or delays it to the end of the batch.
    pub fn depart(&mut self, side: usize, operation: u64, load: SimPayload) {
        if self.sides[side].in_batch {
            self.sides[side].batched.push(Departure::Packet { operation, load });
            return;
        }
        self.note("post", side, operation);
        self.digest.load(&load);
        let arrival = self.after_a_delay();
        if self.sides[side].is_cut {
            return;
        }
        let arrival = arrival.max(self.sides[side].last_arrival);
        self.sides[side].last_arrival = arrival;
        self.schedule(arrival, SimEvent::Packet { from: side, operation, load });
    }

    /// Posts an operation. Returns the held memory if it cannot be posted.
    pub fn post(
        &mut self,
        side: usize,
        held: HeldMemory,
        load: SimPayload,
    ) -> Result<(), (PostError, HeldMemory)> {
        if let Err(error) = self.has_room(side) {
            return Err((error, held));
        }
        let operation = self.sides[side].post(held);
        self.depart(side, operation, load);
        Ok(())
    }

    /// Ends the batch of a side: delayed operations leave, unless the process is dead.
    pub fn end_side_batch(&mut self, side: usize) {
        self.sides[side].in_batch = false;
        let waiting = std::mem::take(&mut self.sides[side].batched);
        if self.is_dead(side) {
            return;
        }
        for departure in waiting {
            match departure {
                Departure::Packet { operation, load } => self.depart(side, operation, load),
                Departure::Credits { returned } => self.publish(side, returned),
            }
        }
    }

    pub fn has_room(&mut self, side: usize) -> Result<(), PostError> {
        if !self.sides[side].is_up || self.is_dead(side) {
            return Err(PostError::Down);
        }
        let by_chance = self.random.chance(self.options.full_per_mille);
        let side = &mut self.sides[side];
        let is_full = side.queued_operations() >= side.options.depth as usize;
        side.wants_room |= is_full;
        if is_full || by_chance {
            // A queue that was refused by chance has room again at once.
            side.has_changed |= !is_full;
            return Err(PostError::Full);
        }
        Ok(())
    }

    pub fn publish(&mut self, side: usize, returned: u32) {
        if !self.sides[side].is_up || self.is_dead(side) || self.sides[side].is_cut {
            return;
        }
        if self.sides[side].in_batch {
            self.sides[side].batched.push(Departure::Credits { returned });
            return;
        }
        self.note("publish", side, returned.into());
        self.sides[side].published += 1;
        let number = self.sides[side].published;
        // Credits may overtake each other: only the newest count is valid.
        let arrival = self.after_a_delay();
        self.schedule(arrival, SimEvent::Credits { from: side, number, returned });
    }

    fn run_event(&mut self, event: SimEvent) {
        match event {
            SimEvent::Packet { from, operation, load } => self.arrive(from, operation, load),
            SimEvent::Done { side, operation, read } => self.done(side, operation, read),
            SimEvent::Credits { from, number, returned } => {
                let Some(to) = self.sides[from].connected_to else { return };
                self.note("credits", to, number);
                let side = &mut self.sides[to];
                if number > side.credits.0 {
                    side.credits = (number, returned);
                    side.change();
                }
            }
            SimEvent::News { side, failure } => self.go_down(side, failure),
            SimEvent::GiveBack { loan } => self.loan_ended(loan),
            SimEvent::Awake { process } => {
                self.sides.iter().filter(|side| side.process == process).for_each(LinkSide::ring);
            }
        }
    }

    fn arrive(&mut self, from: usize, operation: u64, load: SimPayload) {
        let to = self.sides[from].connected_to.filter(|to| self.sides[*to].is_up && !self.is_dead(*to));
        // A link without its other side drops packets; the sender is told of the end.
        let Some(to) = to else { return };
        self.note("arrive", to, operation);
        match self.land(to, load) {
            Err(failure) => self.fail(to, failure),
            Ok(_) if self.sides[from].is_cut => {} // the completion does not come back
            Ok(Landed::Lent) => {}
            Ok(Landed::Done(read)) => {
                // The answer to a read has the delay of a packet, too.
                let back = if read.is_some() { self.after_a_delay() } else { self.now };
                let done = back + self.random.within(&self.options.completion_delay);
                self.schedule(done, SimEvent::Done { side: from, operation, read });
            }
        }
    }

    fn land(&mut self, to: usize, load: SimPayload) -> Result<Landed, LinkFailure> {
        match load {
            SimPayload::Message(mut bytes) => {
                self.consume(to)?;
                self.flip_record(to, &mut bytes);
                self.sides[to].bring(SimArrival::Message(bytes));
            }
            SimPayload::Write { target, immediate, .. } => {
                self.write(to, load.bytes(), &target, immediate)?
            }
            SimPayload::Read { source } => {
                let bytes = match source.len {
                    0 => Vec::new(),
                    _ => self.sides[to].readable(&source).map_err(LinkFailure::Protocol)?.to_vec(),
                };
                return Ok(Landed::Done(Some(bytes)));
            }
            SimPayload::Loan { loan, message } => {
                self.consume(to)?;
                self.borrow(to, loan, message)?;
                return Ok(Landed::Lent);
            }
        }
        Ok(Landed::Done(None))
    }

    fn consume(&mut self, to: usize) -> Result<(), LinkFailure> {
        let receives = &mut self.sides[to].receives;
        *receives = receives.checked_sub(1).ok_or(LinkFailure::NoReceive)?;
        Ok(())
    }

    fn write(
        &mut self,
        to: usize,
        bytes: &[u8],
        target: &Grant,
        immediate: Option<Immediate>,
    ) -> Result<(), LinkFailure> {
        if !bytes.is_empty() {
            // Checked before the receive is consumed, and written after it, as a NIC does.
            self.sides[to].writable(target).map_err(LinkFailure::Protocol)?;
        }
        if immediate.is_some() {
            self.consume(to)?;
        }
        if !bytes.is_empty() {
            let mut landed = bytes.to_vec();
            self.flip(to, &mut landed);
            self.sides[to].writable(target).map_err(LinkFailure::Protocol)?.copy_from_slice(&landed);
        }
        if let Some(immediate) = immediate {
            let event = SimArrival::Immediate(immediate, bytes.len() as u64);
            self.sides[to].bring(event);
        }
        Ok(())
    }

    pub fn done(&mut self, number: usize, operation: u64, read: Option<Vec<u8>>) {
        let side = &mut self.sides[number];
        let Some(held) = side.end(operation) else { return };
        self.note("done", number, operation);
        let side = &mut self.sides[number];
        let event = match (held, read) {
            (HeldMemory::Nothing, _) => return,
            (HeldMemory::Target(mut target), Some(bytes)) => {
                target.bytes_mut()[..bytes.len()].copy_from_slice(&bytes);
                SimArrival::ReadDone(target)
            }
            _ => SimArrival::Done,
        };
        side.bring(event);
    }
}

/// The result of a packet.
enum Landed {
    /// Its operation is done, with the bytes of a read.
    Done(Option<Vec<u8>>),
    /// A loan: its operation is done when it is given back.
    Lent,
}
