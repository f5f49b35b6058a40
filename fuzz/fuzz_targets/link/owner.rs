//! The side under test, and its invariants.

use crate::input::Input;
use crate::requests::request;
use crate::{OWNER, PEER};
use std::collections::BTreeSet;
use std::sync::Arc;
use tensorwire::internals::fabric::sim::{SimLink, SimPort};
use tensorwire::internals::fabric::{LinkFailure, LinkId};
use tensorwire::internals::link::{
    CancelDecision, Destination, LinkEvent, LinkIdentity, LinkSettings, Links, PeerRequestId, Received,
    ServeOutcome, StashedValue, TensorKey, TensorProtocol,
};
use tensorwire::internals::telemetry::CountersWriter;
use tensorwire::internals::wire::EdgeName;
use tensorwire::internals::wire::message::RequestId;
use tensorwire::{Code, DType, Pool, Shape, Status, TaskId, Tensor, TensorMeta, TensorMut, Value};

/// Unanswered requests of the peer that are remembered.
const MAX_ASKED: usize = 64;
const SETTINGS: LinkSettings = LinkSettings {
    small_tensor_bytes: 128,
    max_requests: 6,
    max_routes: 3,
    validate: false,
    protocol: TensorProtocol::Requests,
};

/// A link, its owner's view of it, and a reference for its events.
pub struct Owner {
    links: Links<SimPort, u32>,
    link: LinkId,
    pool: Pool,
    is_down: bool,
    next_waiter: u32,
    /// The name of a waiter.
    waiting: BTreeSet<u32>,
    requests: Vec<RequestId>,
    asked: Vec<PeerRequestId>,
    returned: Vec<(u32, u64)>,
    /// Values on their way to the peer, and pinned until it asks again.
    posted: usize,
    pinned: usize,
    /// A delivered tensor, with a copy of its bytes at delivery.
    delivered: Vec<(Tensor, Vec<u8>)>,
}

fn task(job: &str) -> TaskId {
    TaskId::new(job, 0).expect("a job name")
}

fn meta(input: &mut Input<'_>) -> TensorMeta {
    let dtype = [DType::U8, DType::F32, DType::Bool, DType::Complex128][input.below(4)];
    let dims = [u64::from(input.u8() % 4), u64::from(input.u8())];
    TensorMeta::new(dtype, Shape::new(&dims).expect("a shape")).expect("small")
}

fn key(input: &mut Input<'_>) -> TensorKey {
    let name = ["x", "y", "z", "a longer name that does not fit the message's first slot"][input.below(4)];
    let edge = Arc::new(EdgeName::new(PEER, OWNER, name).expect("an edge"));
    TensorKey { edge, step: input.number() % 3, frame: 0, iteration: 0 }
}

impl Owner {
    pub fn new(port: SimPort, link: SimLink, pool: Pool, validate: bool) -> Self {
        let mut links = Links::new(port, pool.clone(), CountersWriter::new(), 1);
        let identity =
            LinkIdentity { local: task("a"), local_incarnation: 1, peer: task("b"), peer_incarnation: 2 };
        let settings = LinkSettings { validate, ..SETTINGS };
        let link = links.attach(link, identity, settings).expect("room");
        Owner {
            links,
            link,
            pool,
            is_down: false,
            next_waiter: 0,
            waiting: BTreeSet::new(),
            requests: Vec::new(),
            asked: Vec::new(),
            returned: Vec::new(),
            posted: 0,
            pinned: 0,
            delivered: Vec::new(),
        }
    }

    pub fn is_down(&self) -> bool {
        self.is_down
    }

    pub fn act(&mut self, command: u8, input: &mut Input<'_>) {
        match command {
            0 | 1 => self.request(input),
            2 => self.cancel_request(input),
            3 => self.cancel_requests(input),
            4 | 5 => self.answer(input),
            6 => {
                let step = input.number();
                self.links.drop_stashed(&(step..=step));
            }
            7 => self.make_standing_request(input),
            8 => self.links.withdraw_standing(self.link, &key(input), input.number() % 4, input.number() % 2),
            _ => self.delivered.truncate(input.below(8)),
        }
    }

    fn tensor(&self, input: &mut Input<'_>) -> Option<TensorMut> {
        let mut tensor = self.pool.zeroed(meta(input)).ok()?;
        tensor.bytes_mut().fill(1);
        Some(tensor)
    }

    fn request(&mut self, input: &mut Input<'_>) {
        let key = key(input);
        let want = match input.below(3) {
            0 => Destination::Alloc,
            1 => Destination::Borrow,
            _ => self.tensor(input).map_or(Destination::Alloc, Destination::Into),
        };
        let waiter = self.next_waiter;
        self.next_waiter += 1;
        match self.links.request(self.link, key, want, 1000, waiter) {
            Ok(request) => {
                assert!(self.waiting.insert(waiter));
                self.requests.push(request);
            }
            Err((_, came_back)) => assert_eq!(came_back, waiter),
        }
    }

    fn make_standing_request(&mut self, input: &mut Input<'_>) {
        let (first, count) = (key(input), input.u8().into());
        let posted = self.links.post_standing(self.link, &first, count, input.flag(), input.number() % 2);
        assert!(posted.steps <= count.min(SETTINGS.max_requests / 2));
    }

    fn cancel_request(&mut self, input: &mut Input<'_>) {
        let request = request(input, &self.requests);
        let (take, decision) = (input.flag(), decision(input));
        let waiting = &mut self.waiting;
        self.links
            .cancel_request(self.link, request, &mut |_, waiter| decide(waiting, waiter, take, decision));
    }

    fn cancel_requests(&mut self, input: &mut Input<'_>) {
        let (take, decision) = (input.flag(), decision(input));
        let waiting = &mut self.waiting;
        self.links.cancel_requests(self.link, &mut |_, waiter| decide(waiting, waiter, take, decision));
    }

    fn answer(&mut self, input: &mut Input<'_>) {
        if self.asked.is_empty() {
            return;
        }
        let peer_request = self.asked.swap_remove(input.below(self.asked.len()));
        let number = u64::from(self.next_waiter);
        match input.below(8) {
            0 => self
                .links
                .refuse(peer_request, Status::new(Code::Internal, "x".repeat(input.bytes().len() * 64))),
            1 => {
                if let Some((stash_id, number)) = self.returned.pop() {
                    self.links.serve_stashed(peer_request, stash_id, number);
                }
            }
            2 => self.serve(peer_request, Value::Dead, number),
            _ => {
                if let Some(tensor) = self.tensor(input) {
                    self.serve(peer_request, Value::Tensor(tensor.freeze()), number);
                }
            }
        }
    }

    fn serve(&mut self, peer_request: PeerRequestId, value: Value, number: u64) {
        match self.links.serve(peer_request, value, number) {
            ServeOutcome::Posted => self.posted += 1,
            ServeOutcome::Pinned => self.pinned += 1,
            ServeOutcome::Copied | ServeOutcome::Refused | ServeOutcome::Gone(_) => {}
        }
    }

    /// Polls until nothing more comes. Returns how many completions there were.
    pub fn poll(&mut self) -> usize {
        let mut count = self.links.poll();
        while let Some(event) = self.links.next_event() {
            count += 1;
            self.take(event);
        }
        let load = self.links.load();
        assert!(
            load.requests <= SETTINGS.max_requests as usize
                && load.peer_requests <= SETTINGS.max_requests as usize
        );
        assert!(load.leaving <= self.posted, "{load:?}");
        count
    }

    fn take(&mut self, event: LinkEvent<u32>) {
        match event {
            LinkEvent::Up { link } => assert!(link == self.link && !self.is_down),
            LinkEvent::Down { waiters, .. } => {
                assert!(!std::mem::replace(&mut self.is_down, true), "down twice");
                waiters.into_iter().for_each(|waiter| self.told(waiter));
            }
            LinkEvent::Requested { peer_request, key, .. } => {
                assert!(key.edge.source_task() == &task("a") && key.edge.destination_task() == &task("b"));
                if self.asked.len() < MAX_ASKED {
                    self.asked.push(peer_request);
                }
            }
            LinkEvent::Withdrawn { peer_request, .. } => self.asked.retain(|asked| *asked != peer_request),
            LinkEvent::Resumed { .. } => {
                self.pinned = self.pinned.checked_sub(1).expect("a value was pinned");
                self.posted += 1;
            }
            LinkEvent::SendComplete => {
                self.posted = self.posted.checked_sub(1).expect("a value was on its way")
            }
            LinkEvent::PutBack { .. } => {
                self.pinned = self.pinned.checked_sub(1).expect("a value was pinned")
            }
            LinkEvent::Returned { stash_id, number, .. } => self.returned.push((stash_id, number)),
            LinkEvent::Orphaned { value, incarnation, .. } => {
                assert_eq!(incarnation, 2);
                if let StashedValue::Tensor { tensor, .. } = value {
                    self.keep(tensor);
                }
            }
            LinkEvent::Arrived { waiter, received, .. } => {
                self.told(waiter);
                match received {
                    Received::Tensor(tensor) => self.keep(tensor),
                    Received::Into(tensor) => self.keep(tensor.freeze()),
                    Received::Dead(_) => {}
                }
            }
            LinkEvent::Failed { waiter, .. } => self.told(waiter),
        }
    }

    fn told(&mut self, waiter: u32) {
        assert!(self.waiting.remove(&waiter), "waiter {waiter} was told twice");
    }

    /// A tensor belongs to the owner now: the peer may not write it any more.
    fn keep(&mut self, tensor: Tensor) {
        assert_eq!(tensor.bytes().len() as u64, tensor.meta().bytes());
        let bytes = tensor.bytes().to_vec();
        self.delivered.push((tensor, bytes));
    }

    pub fn stop(&mut self) {
        self.links.fail(self.link, LinkFailure::Closed);
    }

    /// Invariants after the end of the link.
    pub fn check_end(&self) {
        assert!(self.is_down, "the link never went down");
        assert!(self.waiting.is_empty(), "{:?} were never told", self.waiting);
        assert_eq!((self.posted, self.pinned), (0, 0), "values on their way, and pinned");
        for (tensor, bytes) in &self.delivered {
            assert_eq!(tensor.bytes(), bytes, "a tensor that was delivered has changed");
        }
    }
}

fn decision(input: &mut Input<'_>) -> CancelDecision {
    [CancelDecision::Keep, CancelDecision::Cancel, CancelDecision::Abandon][input.below(3)]
}

/// A waiter that is taken away counts as told.
fn decide(
    waiting: &mut BTreeSet<u32>,
    waiter: &mut Option<u32>,
    take: bool,
    decision: CancelDecision,
) -> CancelDecision {
    let is_over = decision != CancelDecision::Keep;
    if let Some(taken) = waiter.take_if(|_| is_over && (take || decision == CancelDecision::Abandon)) {
        assert!(waiting.remove(&taken), "waiter {taken} was told twice");
    }
    decision
}
