//! Runs a program, and holds what comes of it against what may.

use crate::model::{Model, Seen};
use crate::program::{Action, Key, PATIENCE, Program, Want};
use crate::world::World;
use std::time::Duration;
use tensorwire::memory::{Tensor, TensorMut};
use tensorwire::rendezvous::Load;
use tensorwire::wire::{DType, Shape, TensorMeta, Time};
use tensorwire::{CancelToken, Delivery, Error, Pending};

enum Waiting {
    Any(Pending<Tensor>),
    Into(Pending<TensorMut>),
}

enum Held {
    Any(Tensor),
    Into(TensorMut),
}

impl Held {
    fn bytes(&self) -> &[u8] {
        match self {
            Held::Any(tensor) => tensor.bytes(),
            Held::Into(tensor) => tensor.bytes(),
        }
    }
}

/// A receive of the program.
struct Call {
    number: usize,
    key: Key,
    life: u64,
    token: CancelToken,
    waiting: Option<Waiting>,
    held: Option<(Held, Vec<u8>)>,
}

struct Run {
    world: World,
    model: Model,
    calls: Vec<Option<Call>>,
    digest: u64,
}

/// Runs it. Gives a digest of everything that happened.
///
/// # Errors
/// What was not as it must be.
pub fn run(program: &Program, trace: bool) -> Result<u64, String> {
    let mut run = Run {
        world: World::new(&program.setup, trace),
        model: Model::new(&program.setup),
        calls: Vec::new(),
        digest: 0xCBF2_9CE4_8422_2325,
    };
    while !run.world.is_linked() {
        run.world.pass();
    }
    let result = run.whole(&program.actions);
    if trace {
        run.world.network.trace().iter().for_each(|line| println!("{line}"));
    }
    result?;
    Ok(run.digest ^ run.world.network.digest())
}

fn meta(bytes: usize) -> TensorMeta {
    TensorMeta::new(DType::U8, Shape::new(&[bytes as u64]).expect("a shape")).expect("meta")
}

impl Run {
    fn whole(&mut self, actions: &[Action]) -> Result<(), String> {
        for action in actions {
            self.act(action)?;
            self.harvest()?;
        }
        self.settle(PATIENCE + Duration::from_secs(2))?;
        self.every_call_has_ended()?;
        self.model.check_order()?;
        self.drain()?;
        self.end()
    }

    fn alive(&self, member: usize) -> bool {
        self.world.members[member].is_some()
    }

    fn now(&self) -> Time {
        self.world.network.now()
    }

    fn act(&mut self, action: &Action) -> Result<(), String> {
        match *action {
            Action::Send(key, bytes) => self.send(key, bytes),
            Action::Recv(key, want, timeout) => {
                let call = self.recv(key, want, timeout);
                self.calls.push(call);
            }
            Action::Cancel(call) => {
                if let Some(Some(call)) = self.calls.get(call)
                    && call.waiting.is_some()
                {
                    self.model.disturb(call.key);
                    self.model.calls[call.number].cancelled = true;
                    call.token.cancel();
                }
            }
            Action::DropCall(call) => {
                if let Some(Some(call)) = self.calls.get_mut(call)
                    && let Some(waiting) = call.waiting.take()
                {
                    self.model.disturb(call.key);
                    self.model.calls[call.number].dropped = true;
                    drop(waiting);
                }
            }
            Action::Release(call) => {
                if let Some(Some(call)) = self.calls.get_mut(call) {
                    release(call)?;
                }
            }
            Action::Abort(member, step) if self.alive(member) => {
                if let Ok(begun) = self.world.step(member, step) {
                    let status = tensorwire::Status::new(tensorwire::Code::Aborted, "by the program");
                    begun.abort(status).map_err(|error| error.to_string())?;
                }
                self.model.end_step(step);
            }
            Action::Cleanup(member, step) if self.alive(member) => {
                self.world.members[member].as_ref().expect("alive").rendezvous.cleanup(step);
                self.model.end_step(step);
            }
            Action::Kill(member) => {
                self.model.trouble(member);
                self.world.kill(member);
            }
            Action::Return(member) if !self.alive(member) => self.world.start(member),
            Action::Cut(a, b) => {
                self.model.trouble(a);
                self.model.trouble(b);
                self.world.cut(a, b);
            }
            Action::Stall(member, us) => self.world.stall(member, Duration::from_micros(us)),
            Action::Progress(member) => {
                self.world.progress(member);
            }
            Action::Pass(us) => {
                let later = self.now() + Duration::from_micros(us);
                self.world.network.advance_to(later);
            }
            Action::Abort(..) | Action::Cleanup(..) | Action::Return(_) => {}
        }
        Ok(())
    }

    fn send(&mut self, key: Key, bytes: Option<usize>) {
        if !self.alive(key.from) {
            return;
        }
        let Ok(step) = self.world.step(key.from, key.step) else { return };
        let edge = self.world.edge(key.from, key.from, key.to, key.edge);
        let sent = match bytes {
            None => step.send_dead(&edge),
            Some(bytes) => {
                let pool = &self.world.members[key.from].as_ref().expect("alive").pool;
                let Ok(mut tensor) = pool.tensor(meta(bytes)) else { return };
                tensor.bytes_mut().copy_from_slice(&self.model.next_content(key, bytes));
                step.send(&edge, tensor.freeze())
            }
        };
        self.note(&format!("send {key:?} {bytes:?} {:?}", sent.is_ok()));
        if sent.is_ok() {
            self.model.sent(key, bytes);
        }
    }

    fn recv(&mut self, key: Key, want: Want, timeout: u64) -> Option<Call> {
        if !self.alive(key.to) {
            return None;
        }
        let step = self.world.step(key.to, key.step).ok()?;
        let edge = self.world.edge(key.to, key.from, key.to, key.edge);
        let member = self.world.members[key.to].as_ref().expect("alive");
        let timeout = Duration::from_micros(timeout);
        let begun = match want {
            Want::Any => step
                .recv_pending_within(&edge, timeout)
                .map(|pending| (pending.cancel_token(), Waiting::Any(pending))),
            Want::Into(bytes) => {
                let given = member.pool.tensor(meta(bytes)).ok()?;
                step.recv_into(&edge, given).map(|pending| (pending.cancel_token(), Waiting::Into(pending)))
            }
        };
        let life = member.life;
        let (token, waiting) = begun.ok()?;
        let patience = if want == Want::Any { timeout } else { PATIENCE };
        let number = self.model.asked(key, want, self.now(), patience);
        Some(Call { number, key, life, token, waiting: Some(waiting), held: None })
    }

    /// Takes what has come.
    fn harvest(&mut self) -> Result<(), String> {
        for at in 0..self.calls.len() {
            let Some(call) = &mut self.calls[at] else { continue };
            // A call of a life that is over says nothing any more.
            if self.world.members[call.key.to].as_ref().is_none_or(|member| member.life != call.life) {
                self.model.calls[call.number].dropped = true;
                self.calls[at] = None;
                continue;
            }
            let done = match &call.waiting {
                Some(Waiting::Any(pending)) => pending.is_done(),
                Some(Waiting::Into(pending)) => pending.is_done(),
                None => false,
            };
            if !done {
                continue;
            }
            let result = match call.waiting.take() {
                Some(Waiting::Any(pending)) => {
                    pending.wait().map(|delivery| (delivery.is_dead, any(delivery)))
                }
                Some(Waiting::Into(pending)) => {
                    pending.wait().map(|delivery| (delivery.is_dead, into(delivery)))
                }
                None => unreachable!("it was done"),
            };
            let (number, now) = (call.number, self.world.network.now());
            let note = match result {
                Ok((is_dead, held)) => {
                    let seen = if is_dead { Seen::Dead } else { Seen::Bytes(held.bytes()) };
                    let value = self.model.arrived(number, &seen)?;
                    let copy = if is_dead { Vec::new() } else { held.bytes().to_vec() };
                    call.held = (!is_dead).then_some((held, copy));
                    format!("got {number} {value}")
                }
                Err(error) => {
                    self.model.failed(number, &error, now)?;
                    format!("failed {number} {:?}", error.code())
                }
            };
            self.note(&note);
        }
        Ok(())
    }

    /// Lets time pass until everything that can happen has.
    fn settle(&mut self, span: Duration) -> Result<(), String> {
        let end = self.now() + span;
        for member in 0..self.world.members.len() {
            self.world.stall(member, Duration::ZERO);
        }
        let mut rounds = 0;
        while self.now() < end {
            self.world.pass();
            self.harvest()?;
            rounds += 1;
            if rounds > 100_000 {
                return Err("things go on happening for ever".into());
            }
        }
        Ok(())
    }

    fn every_call_has_ended(&self) -> Result<(), String> {
        for call in self.calls.iter().flatten() {
            if call.waiting.is_some() {
                return Err(format!("call {} for {:?} hangs", call.number, call.key));
            }
        }
        Ok(())
    }

    /// What was sent on an edge that nothing has befallen and did not come yet must come now, in its order.
    fn drain(&mut self) -> Result<(), String> {
        for call in self.calls.iter_mut().flatten() {
            release(call)?;
        }
        self.settle(Duration::from_secs(1))?;
        let keys = self.model.whole_keys();
        loop {
            let left = |run: &Run| keys.iter().map(|key| run.model.left(*key)).sum::<usize>();
            let before = left(self);
            if before == 0 {
                break;
            }
            for key in &keys {
                // A pool may be full of what others have to take first: then the next round does better.
                self.drain_key(*key)?;
            }
            match left(self) == before {
                // Pools that are full of what each other has to take: back-pressure, which was told.
                true if self.model.ended_for_want_of_room() => return Ok(()),
                true => return Err(format!("{before} values are lost")),
                false => {}
            }
        }
        keys.into_iter().try_for_each(|key| self.model.check_drained(key))
    }

    fn drain_key(&mut self, key: Key) -> Result<(), String> {
        for _ in 0..self.model.left(key) {
            let call = self.recv(key, Want::Any, PATIENCE.as_micros() as u64);
            self.calls.push(Some(call.ok_or_else(|| format!("{key:?} can't be asked for"))?));
            self.settle(PATIENCE + Duration::from_secs(1))?;
            self.every_call_has_ended()?;
            for call in self.calls.iter_mut().flatten() {
                release(call)?;
            }
        }
        Ok(())
    }

    /// Nothing is left when everybody has let go of everything.
    fn end(&mut self) -> Result<(), String> {
        self.calls.clear();
        for member in self.world.members.iter().flatten() {
            for step in member.rendezvous.live_steps() {
                member.rendezvous.cleanup(step);
            }
        }
        self.settle(Duration::from_secs(5))?;
        for (at, member) in self.world.members.iter().enumerate() {
            let Some(member) = member else { continue };
            if !member.pool.is_empty() {
                return Err(format!("the pool of member {at} is not empty: {:?}", member.pool.stats()));
            }
            let load = self.world.load(at).unwrap_or_default();
            if load != Load::default() {
                return Err(format!("the tables of member {at} are not empty: {load:?}"));
            }
            if self.world.outstanding(at) != 0 {
                return Err(format!("member {at} still counts {} values", self.world.outstanding(at)));
            }
        }
        Ok(())
    }

    fn note(&mut self, what: &str) {
        for byte in what.bytes() {
            self.digest = (self.digest ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3);
        }
    }
}

fn any(delivery: Delivery<Tensor>) -> Held {
    Held::Any(delivery.tensor)
}

fn into(delivery: Delivery<TensorMut>) -> Held {
    Held::Into(delivery.tensor)
}

/// Lets go of what a call brought, which must be as it came.
fn release(call: &mut Call) -> Result<(), String> {
    match call.held.take() {
        Some((held, copy)) if held.bytes() != copy => {
            Err(format!("what call {} brought has changed since", call.number))
        }
        _ => Ok(()),
    }
}

/// Whether an error is one that only tells of a full table.
pub fn is_limit(error: &Error) -> bool {
    matches!(error, Error::ResourceExhausted { .. } | Error::NoRoom { .. })
}
