//! The calls of a port.

use super::SimLink;
use super::load::{Bytes, SimPayload};
use super::network::SimNetwork;
use super::side::{HeldMemory, MAX_GRANTS, SimArrival};
use crate::fabric::{
    Accept, Completions, Event, FabricError, LinkFailure, LinkId, LinkLimits, LoanPermit, MAX_LOAN_MESSAGE,
    NextLoan, NextMessage, Port, PostError, ShortTake, Sleep, Sleeper,
};
use crate::memory::{Pool, Tensor, TensorMut};
use crate::wire::{Grant, Immediate, ShortMessage};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Largest number of bytes of an inline write.
const MAX_INLINE: usize = 128;

struct SimAttached {
    id: LinkId,
    side: usize,
    limits: LinkLimits,
}

/// The links that one poller owns. See [`Port`].
pub struct SimPort {
    network: SimNetwork,
    pool: Pool,
    links: Vec<SimAttached>,
    next: u32,
    /// The link with which the next poll begins.
    turn: usize,
    /// In a batch: operations leave at its end, as late as the contract permits.
    in_batch: bool,
    sleeper: SimSleeper,
}

impl SimPort {
    pub(super) fn new(network: SimNetwork, pool: Pool) -> Self {
        let sleeper = SimSleeper { network: network.clone(), ring: Arc::default() };
        SimPort { network, pool, links: Vec::new(), next: 0, turn: 0, in_batch: false, sleeper }
    }

    fn find(&self, link: LinkId) -> Option<&SimAttached> {
        self.links.iter().find(|attached| attached.id == link)
    }

    fn side(&self, link: LinkId) -> Option<usize> {
        Some(self.find(link)?.side)
    }

    /// The side of a link, for a post.
    fn post(&self, link: LinkId) -> Result<usize, PostError> {
        self.side(link).ok_or(PostError::Down)
    }

    /// Refuses memory that peers cannot reach: only the pool is registered.
    fn check_source(&self, source: &Tensor) -> Result<(), PostError> {
        if source.bytes().is_empty() {
            return Ok(());
        }
        let Some(span) = source.span() else {
            return Err(PostError::Refused(
                "the source has no memory of its own here: copy a lent tensor first",
            ));
        };
        // Compared by address, since two pools can have regions with the same number.
        let region = self.pool.region();
        let offset = (source.as_ptr() as usize).wrapping_sub(region.base().as_ptr() as usize);
        if (span.region, span.offset) != (region.id(), offset as u64) {
            return Err(PostError::Refused("the source is not in the pool that this fabric shares"));
        }
        Ok(())
    }
}

impl Port for SimPort {
    type Link = SimLink;
    type Sleeper = SimSleeper;

    // Messages are bytes here. With `true` the simulation covers short messages as words, too.
    fn has_slots(&self, _link: LinkId) -> bool {
        true
    }

    fn sleeper(&self) -> SimSleeper {
        self.sleeper.clone()
    }

    fn arm(&mut self) -> bool {
        self.network.with(|state| {
            self.links.iter().all(|link| {
                let side = &state.sides[link.side];
                // A stalled process finds nothing; the end of the stall ends its sleep.
                !side.has_news() || state.processes[side.process.0 as usize].is_deaf(state.now)
            })
        })
    }

    fn attach(&mut self, mut link: SimLink) -> Result<LinkId, FabricError> {
        let Some(side) = link.side.take() else { unreachable!("only this takes it") };
        let id = LinkId(self.next);
        self.next += 1;
        let ring = self.sleeper.ring.clone();
        let limits = self.network.with(|state| {
            state.sides[side].rung_by(ring);
            state.sides[side].in_batch = self.in_batch;
            LinkLimits {
                depth: state.sides[side].options.depth,
                receives: 0,
                max_message: state.options.max_message,
                max_inline: MAX_INLINE,
                max_write: state.options.max_write,
                lends: state.options.lends,
                registers: false,
                grants: MAX_GRANTS as u32,
                max_grant: state.options.max_grant,
            }
        });
        self.links.push(SimAttached { id, side, limits });
        Ok(id)
    }

    fn detach(&mut self, link: LinkId) {
        if let Some(at) = self.links.iter().position(|attached| attached.id == link) {
            let side = self.links.remove(at).side;
            self.network.with(|state| state.end_side_batch(side));
            self.network.close(side);
        }
    }

    fn fail(&mut self, link: LinkId, why: LinkFailure) {
        if let Some(side) = self.side(link) {
            self.network.with(|state| state.fail(side, why));
        }
    }

    fn limits(&self, link: LinkId) -> &LinkLimits {
        self.find(link).map_or(&LinkLimits::NONE, |attached| &attached.limits)
    }

    fn poll(&mut self, completions: &mut Completions) -> usize {
        // Runs without links too, because a loan may come back.
        self.turn = (self.turn + 1) % self.links.len().max(1);
        let (turn, count) = (self.turn, self.links.len());
        let links = &self.links;
        let order = || (0..count).map(|k| &links[(turn + k) % count]);
        self.network.polled(|state| {
            let mut room = state.options.poll_batch;
            for link in order() {
                state.listen(link.side);
                let side = &mut state.sides[link.side];
                if state.processes[side.process.0 as usize].is_deaf(state.now) {
                    continue;
                }
                side.has_changed = false;
                let before = room;
                while room > 0
                    && let Some(arrived) = side.arrivals.pop_front()
                {
                    room -= 1;
                    complete(completions, link.id, arrived);
                }
                if room < before {
                    state.note("poll", link.side, (before - room) as u64);
                }
            }
            state.options.poll_batch - room
        })
    }

    fn take_short<R>(&mut self, link: LinkId, accept: impl Accept<R>) -> ShortTake<R> {
        let Some(side) = self.side(link) else { return ShortTake::Other };
        let taken = self.network.with(|state| {
            state.listen(side);
            let side = &mut state.sides[side];
            if state.processes[side.process.0 as usize].is_deaf(state.now) {
                return None;
            }
            match side.arrivals.pop_front()? {
                SimArrival::Message(bytes) => {
                    let accepted = match ShortMessage::from_bytes(&bytes) {
                        Some(short) => accept.accept_short(short.unread()),
                        None => accept.accept(NextMessage::Bytes(&bytes)),
                    };
                    if accepted.is_none() {
                        side.arrivals.push_front(SimArrival::Message(bytes));
                    }
                    accepted
                }
                SimArrival::Lent(message, lent) => {
                    let (bytes, lent) = (lent.bytes().to_vec(), Cell::new(Some(lent)));
                    let loan = NextLoan { bytes: &bytes, keep: &|| lent.take() };
                    let accepted = accept.accept(NextMessage::Lent(&message, loan));
                    if let Some(lent) = lent.take().filter(|_| accepted.is_none()) {
                        side.arrivals.push_front(SimArrival::Lent(message, lent));
                    }
                    accepted
                }
                other => {
                    side.arrivals.push_front(other);
                    None
                }
            }
        });
        taken.into()
    }

    fn post_receives(&mut self, link: LinkId, count: u32) {
        if let Ok(side) = self.post(link) {
            self.network.with(|state| state.sides[side].receives += u64::from(count));
        }
    }

    fn publish_credits(&mut self, link: LinkId, returned: u32) {
        if let Ok(side) = self.post(link) {
            self.network.with(|state| state.publish(side, returned));
        }
    }

    fn peer_credits(&mut self, link: LinkId) -> u32 {
        let Ok(side) = self.post(link) else { return 0 };
        self.network.with(|state| state.sides[side].credits.1)
    }

    fn begin_batch(&mut self) {
        self.in_batch = true;
        self.network.with(|state| {
            self.links.iter().for_each(|link| state.sides[link.side].in_batch = true);
        });
    }

    fn end_batch(&mut self) {
        if std::mem::take(&mut self.in_batch) {
            self.network.with(|state| self.links.iter().for_each(|link| state.end_side_batch(link.side)));
        }
    }

    fn send(&mut self, link: LinkId, bytes: &[u8]) -> Result<(), PostError> {
        let side = self.post(link)?;
        if bytes.len() > self.limits(link).max_message {
            return Err(PostError::Refused("a message is longer than the link carries"));
        }
        let load = SimPayload::Message(bytes.to_vec());
        self.network.with(|state| state.post(side, HeldMemory::Nothing, load)).map_err(|(error, _)| error)
    }

    fn write_inline(
        &mut self,
        link: LinkId,
        bytes: &[u8],
        target: &Grant,
        immediate: Option<Immediate>,
    ) -> Result<(), PostError> {
        let side = self.post(link)?;
        if bytes.len() > MAX_INLINE {
            return Err(PostError::Refused("more bytes than an inline write carries"));
        }
        let target =
            target.part(0, bytes.len() as u64).ok_or(PostError::Refused("longer than its target"))?;
        let load = SimPayload::Write { from: Bytes::Copied(bytes.to_vec()), target, immediate };
        self.network.with(|state| state.post(side, HeldMemory::Nothing, load)).map_err(|(error, _)| error)
    }

    fn write(
        &mut self,
        link: LinkId,
        source: &Tensor,
        len: u64,
        target: &Grant,
        immediate: Option<Immediate>,
    ) -> Result<(), PostError> {
        let side = self.post(link)?;
        if len > source.bytes().len() as u64 {
            return Err(PostError::Refused("the source has not so many bytes"));
        }
        let target = target.part(0, len).ok_or(PostError::Refused("longer than its target"))?;
        if len > 0 {
            self.check_source(source)?;
        }
        let from = Bytes::Source(source.clone());
        let load = SimPayload::Write { from, target, immediate };
        let held = HeldMemory::Source(source.clone());
        self.network.with(|state| state.post(side, held, load)).map_err(|(error, _)| error)
    }

    fn read(
        &mut self,
        link: LinkId,
        target: TensorMut,
        source: &Grant,
    ) -> Result<(), (PostError, TensorMut)> {
        let side = match self.post(link) {
            Ok(side) => side,
            Err(error) => return Err((error, target)),
        };
        if source.len > target.bytes().len() as u64 {
            return Err((PostError::Refused("the target is shorter than the source"), target));
        }
        let load = SimPayload::Read { source: *source };
        let posted = self.network.with(|state| state.post(side, HeldMemory::Target(target), load));
        posted.map_err(|(error, held)| match held {
            HeldMemory::Target(target) => (error, target),
            _ => unreachable!("it comes back as it was given"),
        })
    }

    fn permit_loan(&mut self, link: LinkId, bytes: u64) -> Option<LoanPermit> {
        let side = self.side(link)?;
        self.network.with(|state| state.permit_loan(side, bytes))
    }

    fn lend(
        &mut self,
        link: LinkId,
        source: &mut Option<Tensor>,
        permit: &mut Option<LoanPermit>,
        message: &ShortMessage,
    ) -> Result<(), PostError> {
        if message.len > MAX_LOAN_MESSAGE {
            return Err(PostError::Refused("the message of a loan is too long"));
        }
        let side = self.post(link)?;
        self.check_source(source.as_ref().ok_or(PostError::Refused(crate::fabric::NO_SOURCE))?)?;
        self.network.with(|state| state.lend(side, source, permit, message))
    }

    fn grant(&mut self, link: LinkId, target: TensorMut) -> Result<Grant, (PostError, TensorMut)> {
        let Some(side) = self.side(link) else { return Err((PostError::Down, target)) };
        self.network.with(|state| {
            let side = &mut state.sides[side];
            if !side.is_up {
                return Err((PostError::Down, target));
            }
            side.grant(target).map_err(|target| (PostError::Full, target))
        })
    }

    fn revoke(&mut self, link: LinkId, grant: &Grant) -> Option<TensorMut> {
        let side = self.side(link)?;
        self.network.with(|state| state.sides[side].revoke(grant))
    }

    fn expose(&mut self, link: LinkId, source: &Tensor) -> Result<Grant, PostError> {
        let side = self.side(link).ok_or(PostError::Down)?;
        self.network.with(|state| {
            let side = &mut state.sides[side];
            if !side.is_up {
                return Err(PostError::Down);
            }
            self.check_source(source)?;
            side.expose(source).ok_or(PostError::Full)
        })
    }

    fn withdraw(&mut self, link: LinkId, grant: &Grant) {
        if let Some(side) = self.side(link) {
            self.network.with(|state| state.sides[side].withdraw(grant));
        }
    }
}

impl Drop for SimPort {
    fn drop(&mut self) {
        for link in self.links.drain(..) {
            self.network.close(link.side);
        }
    }
}

fn complete(completions: &mut Completions, link: LinkId, arrived: SimArrival) {
    let event = match arrived {
        SimArrival::Message(bytes) => return completions.push_message(link, &bytes),
        SimArrival::Done => Event::Done,
        SimArrival::ReadDone(target) => Event::ReadDone { target },
        SimArrival::Failed => Event::Failed,
        SimArrival::Immediate(immediate, bytes) => Event::Immediate { immediate, bytes },
        SimArrival::Lent(message, bytes) => {
            return completions.push_lent(link, &message.to_bytes()[..message.len], bytes);
        }
        SimArrival::Down(failure) => Event::Down(failure),
    };
    completions.push(link, event);
}

/// A sleeper in virtual time: it returns at once. If polls advance the time, a sleep does too.
#[derive(Clone)]
pub struct SimSleeper {
    network: SimNetwork,
    ring: Arc<AtomicU32>,
}

impl Sleeper for SimSleeper {
    fn seen(&self) -> u32 {
        self.ring.load(Ordering::SeqCst)
    }

    fn sleep(&self, _who: Sleep, _seen: u32, _timeout: Duration) {
        self.network.polled(|_| 0);
    }

    fn wake(&self, _who: Sleep) {
        self.ring.fetch_add(1, Ordering::SeqCst);
    }

    fn enter_wait(&self) {}

    fn exit_wait(&self) {}
}
