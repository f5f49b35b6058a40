//! Standing requests of this side: one message sends several before their steps begin, and a
//! receive claims each later.
//!
//! A standing request is a request in the slot table without a waiter. Its claim brings the waiter.
//! A value that comes before the claim stays in the slot.

use crate::fabric::Port;
use crate::link::links::{Link, LinkContext};
use crate::link::receiving::destination::{place_value, take_back};
use crate::link::receiving::slots::Request;
use crate::link::receiving::stash::StashEntry;
use crate::link::routes::announced::RouteOutstanding;
use crate::link::{Destination, RequestError, StashedValue, TensorKey};
use crate::mutants::{Mutant, is_on};
use crate::protocol::{Receiver, ReceiverAction};
use crate::telemetry::Counter;
use crate::wire::message::{
    MAX_STANDING_STEPS, Message, RequestId, StandingRequest, StandingStep, StandingSteps, VersionedMeta,
};
use crate::wire::{Code, Grant, Status, TensorMeta};
use foldhash::HashMap;
use foldhash::fast::RandomState;

/// Unclaimed requests for which memory is allocated at the start. A hash table that is less than
/// half full never grows.
const EXPECTED_REQUESTS: usize = 256;
/// Standing requests may use one in this many of the slots, grants and routes of a link.
pub(crate) const STANDING_SHARE: u32 = 2;
/// Destinations of standing requests may use one in this many bytes of the pool.
pub(crate) const STANDING_POOL_SHARE: u64 = 4;

/// Code for "too many standing requests". No other refusal uses it.
pub(in crate::link) const STANDING_LIMIT: Code = Code::Unavailable;

/// What came for an unclaimed standing request.
#[derive(Debug)]
pub(in crate::link) enum EarlyArrival {
    /// It arrived before a receive asked for it.
    Value(StashedValue),
    /// An error of the sender.
    Failed(RequestError),
}

/// The capacity of a link for standing requests, which all its edges share.
#[derive(Clone, Copy, Debug)]
pub struct StandingCapacity {
    /// Number of requests on this link.
    pub slots: u64,
    /// Bytes of destinations, on all links of the poller.
    pub bytes: u64,
}

/// Bytes of the destinations of unclaimed standing requests, on all links of a poller.
#[derive(Debug)]
pub(in crate::link) struct StandingBytes {
    used: u64,
    most: u64,
}

impl StandingBytes {
    /// An empty account. `pollers` pollers have equal shares of a pool of `pool_bytes`.
    pub fn new(pool_bytes: u64, pollers: usize) -> Self {
        StandingBytes { used: 0, most: pool_bytes / STANDING_POOL_SHARE / pollers.max(1) as u64 }
    }

    fn has_room(&self, bytes: u64) -> bool {
        self.used.checked_add(bytes).is_some_and(|used| used <= self.most)
    }

    /// Adds the destination of an unclaimed standing request.
    fn add<C>(&mut self, request: &mut Request<C>) {
        request.standing_bytes = request.grant.map_or(0, |grant| grant.len);
        self.used += request.standing_bytes;
    }

    /// Removes the destination of a request.
    fn remove<C>(&mut self, request: &mut Request<C>) {
        self.used -= std::mem::take(&mut request.standing_bytes);
    }
}

/// The outcome of sending standing requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StandingPosted {
    /// Number of steps for which requests were sent.
    pub steps: u32,
    /// Whether the next step found no room. If `false`, the next step has a request already.
    pub no_room: bool,
}

/// An unclaimed standing request.
#[derive(Clone, Copy, Debug)]
struct Listed {
    request: RequestId,
    /// The id of the standing edge that it belongs to.
    owner: u64,
}

/// The unclaimed standing requests.
#[derive(Debug)]
pub(in crate::link) struct StandingTable {
    by_key: HashMap<TensorKey, Listed>,
    /// The most that the sender has shown to accept at a time.
    most: u32,
    /// The encoded steps of the message in preparation.
    scratch: Vec<u8>,
}

impl StandingTable {
    pub fn new() -> Self {
        let by_key = HashMap::with_capacity_and_hasher(EXPECTED_REQUESTS, RandomState::default());
        StandingTable { by_key, most: u32::MAX, scratch: Vec::new() }
    }

    pub fn len(&self) -> usize {
        self.by_key.len()
    }

    /// Whether a key has a standing request.
    pub fn has(&self, key: &TensorKey) -> bool {
        self.by_key.contains_key(key)
    }

    /// Removes and returns the standing request of a key.
    fn take(&mut self, key: &TensorKey) -> Option<RequestId> {
        if self.by_key.is_empty() { None } else { Some(self.by_key.remove(key)?.request) }
    }
}

impl<C> Link<C> {
    /// Bytes that one step of an edge needs at its destination; `None` if placement or size is not
    /// known yet.
    pub(in crate::link) fn expected_bytes<P: Port>(
        &self,
        cx: &mut LinkContext<'_, P, C>,
        first: &TensorKey,
        borrow: bool,
    ) -> Option<u64> {
        if borrow && cx.port.limits(self.id).lends && self.routes_out.is_lent(&first.edge) {
            return Some(0);
        }
        let bytes = self.routes_out.largest(&first.edge)?.bytes();
        Some(if bytes <= u64::from(self.settings.small_tensor_bytes) { 0 } else { bytes })
    }

    /// The capacity that all standing requests of this link share.
    pub(in crate::link) fn standing_capacity<P: Port>(
        &self,
        cx: &mut LinkContext<'_, P, C>,
    ) -> StandingCapacity {
        let slots = self.requests.max().min(cx.port.limits(self.id).grants) / STANDING_SHARE;
        let slots = u64::from(slots.min(self.standing.most));
        StandingCapacity { slots, bytes: cx.standing_bytes.most }
    }

    /// Sends standing requests for `count` steps beginning with that of `first`, or for as many as
    /// have room, on behalf of `owner`.
    pub(in crate::link) fn post_standing<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        first: &TensorKey,
        count: u32,
        borrow: bool,
        owner: u64,
    ) -> StandingPosted {
        let wanted = self.unasked(first, count.min(MAX_STANDING_STEPS as u32));
        if wanted == 0 {
            return StandingPosted { steps: 0, no_room: false };
        }
        let slots = self.standing_capacity(cx).slots.saturating_sub(self.standing.len() as u64);
        let count = u64::from(wanted).min(slots) as u32;
        if count == 0 || !self.routes_out.may_post_standing(&first.edge) {
            return StandingPosted { steps: 0, no_room: true };
        }
        let steps = self.post_some(cx, first, count, borrow, owner);
        StandingPosted { steps, no_room: steps < wanted }
    }

    /// Returns the number of steps that had room.
    fn post_some<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        first: &TensorKey,
        count: u32,
        borrow: bool,
        owner: u64,
    ) -> u32 {
        let Some((route, announce)) = self.routes_out.take(&first.edge) else { return 0 };
        let (number, cached) = (route.number, route.cached().cloned());
        let (largest, is_lent) = (route.largest().cloned(), route.is_lent());
        self.announce(cx, announce, number, first);
        let borrow = borrow && cx.port.limits(self.id).lends;
        let in_response = |meta: &TensorMeta| meta.bytes() <= u64::from(self.settings.small_tensor_bytes);
        // A tensor that the sender does not lend is written. Later ones may be lent again.
        let landing = largest.filter(|meta| !(borrow && is_lent || in_response(meta)));
        let mut steps = std::mem::take(&mut self.standing.scratch);
        steps.clear();
        let (mut standing, mut room) = (0, None);
        while standing < count {
            let key = TensorKey { step: first.step + u64::from(standing), ..first.clone() };
            let Some(mut request) = self.standing_request(cx, key, number, cached.as_ref(), landing.as_ref())
            else {
                break;
            };
            request.borrow = borrow;
            let grant = request.grant;
            room = grant.map(|grant| (grant.region, grant.len));
            let Some(request) = self.list(cx, request, owner) else { break };
            let (key, offset) = grant.map_or((0, 0), |grant| (grant.key, grant.offset));
            StandingStep { request, key, offset }.put(&mut steps, grant.is_some());
            standing += 1;
        }
        self.routes_out.release(&first.edge);
        if standing > 0 {
            cx.counters.increment(Counter::StandingMessages);
            cx.counters.add(Counter::StandingRequests, standing.into());
            self.send(
                cx,
                &Message::StandingRequest(StandingRequest {
                    route: number,
                    first_step: first.step,
                    frame: first.frame,
                    iteration: first.iteration,
                    meta_version: cached.map_or(0, |meta| meta.version),
                    borrow,
                    validate: self.settings.validate,
                    room,
                    steps: StandingSteps::new(&steps, room.is_some()),
                }),
            );
        }
        self.standing.scratch = steps;
        standing
    }

    /// Number of steps, `count` at most, beginning with that of `first`, for which no request is
    /// outstanding. Two requests for one step could change the order of its values, if the first
    /// receiver cancels.
    fn unasked(&self, first: &TensorKey, count: u32) -> u32 {
        match self.routes_out.outstanding(&first.edge, first.step) {
            RouteOutstanding::None => count,
            RouteOutstanding::StandingOnly => {
                let mut key = first.clone();
                let is_standing = |nth: &u32| {
                    key.step = first.step + u64::from(*nth);
                    self.standing.by_key.contains_key(&key)
                };
                (0..count).find(is_standing).unwrap_or(count)
            }
            RouteOutstanding::Any => {
                let same = |key: &TensorKey| {
                    key.step >= first.step
                        && (&key.edge, key.frame, key.iteration)
                            == (&first.edge, first.frame, first.iteration)
                };
                let asked = self.requests.iter().filter(|request| same(&request.key));
                let next = asked.map(|request| request.key.step - first.step).min().unwrap_or(u64::MAX);
                next.min(count.into()) as u32
            }
        }
    }

    /// A standing request of a step, with its destination if it needs one; `None` if there is no
    /// room.
    fn standing_request<P: Port>(
        &self,
        cx: &mut LinkContext<'_, P, C>,
        key: TensorKey,
        route: u32,
        cached: Option<&VersionedMeta>,
        landing: Option<&TensorMeta>,
    ) -> Option<Request<C>> {
        if !self.requests.has_room() {
            return None;
        }
        let grant = match landing {
            None => None,
            Some(meta) => Some(self.standing_grant(cx, meta)?),
        };
        let machine = Receiver::standing(grant.map(|grant| grant.len)).validated(self.settings.validate);
        Some(Request {
            machine: cached.map_or(machine.clone(), |cached| machine.expecting(cached.meta.bytes())),
            meta: cached.cloned(),
            grant,
            ..Request::without_waiter(key, route, self.asked + 1, u32::MAX)
        })
    }

    /// Handles a value that is larger than its destination, for an unclaimed request. Sends a
    /// re-request if the share of standing requests has room. Otherwise the value goes back in line
    /// for a plain receive.
    pub(in crate::link) fn allocate_early<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        id: RequestId,
        meta: &VersionedMeta,
    ) {
        let Some(request) = self.requests.get(id) else { return };
        cx.standing_bytes.remove(request);
        let Some(grant) = self.standing_grant(cx, &meta.meta) else { return self.withdraw_one(cx, id) };
        let Some(request) = self.requests.get(id) else { return };
        request.grant = Some(grant);
        cx.standing_bytes.add(request);
        request.machine.allocated(grant.len);
        self.send(cx, &Message::ReRequest { request: id, grant });
    }

    /// Whether an error refuses a standing request because of the sender's limit.
    pub(in crate::link) fn is_standing_limit(&mut self, id: RequestId, status: &Status) -> bool {
        let is_refusal = status.code == STANDING_LIMIT && !status.derived;
        is_refusal && self.requests.get(id).is_some_and(|request| request.machine.is_standing())
    }

    /// Handles a standing request that the sender refused. A claimed one is sent again as a plain
    /// request. An unclaimed one ends, and a later receive sends a plain request. From now on no
    /// more are sent than the sender accepted.
    pub(in crate::link) fn standing_refused<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        id: RequestId,
        action: ReceiverAction,
    ) {
        let others = self.requests.len() as u32 - 1;
        self.standing.most = self.standing.most.min(others.max(1));
        let unsent = self.unsent_machine();
        let Some(request) = self.requests.get(id) else { return };
        if action != ReceiverAction::Deliver || request.waiter.is_none() {
            return self.drop_refused(cx, id, action);
        }
        drop(take_back(request, cx.port, cx.counters, self.id));
        request.machine = unsent;
        request.destination = Some(match (request.copy_to.take(), request.borrow) {
            (Some(given), _) => Destination::Into(given),
            (None, true) => Destination::Borrow,
            (None, false) => Destination::Alloc,
        });
        let key = request.key.clone();
        match self.unresolved.is_blocked(&key) {
            true => self.unresolved.block(&key, id),
            false => self.release(cx, id),
        }
    }

    /// A grant for one tensor, if the share of standing requests has room.
    fn standing_grant<P: Port>(&self, cx: &mut LinkContext<'_, P, C>, meta: &TensorMeta) -> Option<Grant> {
        if !cx.standing_bytes.has_room(meta.bytes()) {
            return None;
        }
        let target = cx.pool.landing(meta).ok()?;
        self.grant(cx, target).ok()
    }

    /// Adds a standing request to all tables.
    fn list<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        mut request: Request<C>,
        owner: u64,
    ) -> Option<RequestId> {
        let key = request.key.clone();
        cx.standing_bytes.add(&mut request);
        let id = self.requests.insert(request)?;
        self.asked += 1;
        self.routes_out.note_standing(&key.edge, key.step);
        self.standing.by_key.insert(key, Listed { request: id, owner });
        Some(id)
    }

    /// Removes an unclaimed standing request from the tables of standing requests: it was cancelled
    /// or has ended.
    pub(in crate::link) fn unlist<P: Port>(&mut self, cx: &mut LinkContext<'_, P, C>, id: RequestId) {
        let Some(request) = self.requests.get(id).filter(|request| request.machine.is_unclaimed()) else {
            return;
        };
        if self.standing.by_key.get(&request.key).is_some_and(|listed| listed.request == id) {
            cx.standing_bytes.remove(request);
            self.standing.by_key.remove(&request.key);
            self.routes_out.note_claimed(&request.key.edge, request.key.step);
        }
    }

    /// Gives the standing request of a key to a waiter, if there is one, with what has come for it.
    pub(in crate::link) fn claim<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        key: &TensorKey,
        destination: Destination,
        timeout_ms: u32,
        waiter: C,
    ) -> Result<RequestId, (Destination, C)> {
        let Some(id) = self.standing.take(key) else { return Err((destination, waiter)) };
        let Some(request) = self.requests.get(id) else { return Err((destination, waiter)) };
        cx.standing_bytes.remove(request);
        self.routes_out.note_claimed(&key.edge, key.step);
        cx.counters.increment(Counter::StandingClaimed);
        request.waiter = Some(waiter);
        request.timeout_ms = timeout_ms;
        request.copy_to = match destination {
            Destination::Into(given) => Some(given),
            Destination::Alloc | Destination::Borrow => None,
        };
        let action = request.machine.claim();
        match request.early.take() {
            Some(EarlyArrival::Value(value)) => self.place_early(cx, id, action, value),
            Some(EarlyArrival::Failed(RequestError::Remote(status))) => {
                self.sender_failed(cx, id, action, status)
            }
            Some(EarlyArrival::Failed(error)) => self.end(cx, id, action, error),
            None => {}
        }
        Ok(id)
    }

    /// Keeps what came for an unclaimed standing request.
    pub(in crate::link) fn store_early(&mut self, id: RequestId, early: EarlyArrival) {
        if let Some(request) = self.requests.get(id)
            && !is_on(Mutant::EarlyArrivalDropped)
        {
            request.early = Some(early);
        }
    }

    fn place_early<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        id: RequestId,
        action: ReceiverAction,
        value: StashedValue,
    ) {
        let Some(request) = self.requests.get(id) else { return };
        let given = request.copy_to.take();
        let into = given.is_some();
        match place_value(cx, value, given, into) {
            Ok((received, sender)) => self.deliver(cx, id, action, received, sender),
            Err(rejected) => self.unwanted(cx, id, action, *rejected),
        }
    }

    /// Withdraws the unclaimed requests of `owner` for the steps from that of `first` up to, but
    /// not including, `until`. Values that have come for them are in line again at their sender.
    pub(in crate::link) fn withdraw_standing<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        first: &TensorKey,
        until: u64,
        owner: u64,
    ) {
        let is_owned = |listed: &Listed| listed.owner == owner;
        if until.saturating_sub(first.step) <= self.standing.len() as u64 {
            let mut key = first.clone();
            for step in first.step..until {
                key.step = step;
                if let Some(listed) = self.standing.by_key.get(&key).copied().filter(is_owned) {
                    self.withdraw_one(cx, listed.request);
                }
            }
            return;
        }
        // The range has skipped steps: there are fewer requests than steps.
        let all = self.standing.by_key.iter().filter(|(_, listed)| is_owned(listed));
        let mut all: Vec<_> = all.map(|(key, listed)| (key.step, listed.request)).collect();
        all.sort_unstable_by_key(|(step, _)| *step);
        all.into_iter().for_each(|(_, request)| self.withdraw_one(cx, request));
    }

    fn withdraw_one<P: Port>(&mut self, cx: &mut LinkContext<'_, P, C>, id: RequestId) {
        if !is_on(Mutant::WithdrawnStaysListed) {
            self.unlist(cx, id);
        }
        let Some(request) = self.requests.get(id) else { return };
        match request.early.take() {
            Some(EarlyArrival::Value(value)) if !is_on(Mutant::WithdrawnValueDropped) => {
                self.hold(cx, id, value)
            }
            Some(_) => {}
            None => {
                request.is_unresolved = true;
                self.unresolved.add(&request.key);
            }
        }
        self.cancel_now(cx, id);
    }

    /// The link is gone: stashes what came for unclaimed requests.
    pub(in crate::link) fn unlist_all<P: Port>(&mut self, cx: &mut LinkContext<'_, P, C>) {
        for slot in 0..self.requests.slots() {
            let Some((_, request)) = self.requests.in_slot(slot) else { continue };
            cx.standing_bytes.remove(request);
            if let Some(EarlyArrival::Value(value)) = request.early.take()
                && !is_on(Mutant::EarlyArrivalNotOrphaned)
            {
                self.stash.keep(StashEntry { key: request.key.clone(), value, asked: request.asked });
            }
        }
    }
}
