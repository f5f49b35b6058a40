//! Standing requests of this side: made in advance by one message, claimed later by whoever receives.
//!
//! Each is a request in the slot table like any other, but for its waiter, whom it gets when it is claimed. What comes before
//! that stays in its slot.

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

/// Unclaimed requests that find room before anything is allocated; a hash table that is less than half full never grows.
const ARMED: usize = 256;
/// Of the slots, the grants and the routes of a link, one part in so many may be for standing requests: the rest is for plain ones.
pub(in crate::link) const SHARE: u32 = 2;
/// Of the pool, one part in so many may be destinations of standing requests.
const POOL_SHARE: u64 = 4;

/// With this a sender refuses a standing request because it has as many as it takes. Of everything else that it may refuse it
/// says why in other codes, as a plain request would meet that too.
pub(in crate::link) const STANDING_LIMIT: Code = Code::Unavailable;

/// What came for a standing request that nobody had claimed.
#[derive(Debug)]
pub(in crate::link) enum EarlyArrival {
    /// A value.
    Value(StashedValue),
    /// An error of the sender's.
    Failed(RequestError),
}

/// What there is on a link for the requests that are made in advance: all edges share it.
#[derive(Clone, Copy, Debug)]
pub struct StandingCapacity {
    /// Requests of this link.
    pub slots: u64,
    /// Bytes of their destinations, on all links of the poller.
    pub bytes: u64,
}

/// Bytes of the destinations of standing requests that nobody has claimed, on all links of a poller.
#[derive(Debug)]
pub(in crate::link) struct StandingBytes {
    used: u64,
    most: u64,
}

impl StandingBytes {
    /// None yet. So many pollers have equal parts of what of a pool of `pool_bytes` is for them.
    pub fn new(pool_bytes: u64, pollers: usize) -> Self {
        StandingBytes { used: 0, most: pool_bytes / POOL_SHARE / pollers.max(1) as u64 }
    }

    fn has_room(&self, bytes: u64) -> bool {
        self.used.checked_add(bytes).is_some_and(|used| used <= self.most)
    }

    /// Counts the destination of a request, which is standing.
    fn add<C>(&mut self, request: &mut Request<C>) {
        request.standing_bytes = request.grant.map_or(0, |grant| grant.len);
        self.used += request.standing_bytes;
    }

    /// A request is not standing any more, or has no destination.
    fn remove<C>(&mut self, request: &mut Request<C>) {
        self.used -= std::mem::take(&mut request.standing_bytes);
    }
}

/// How many steps were asked for in advance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StandingPosted {
    /// So many.
    pub steps: u32,
    /// Whether there was no room for the next one. If there was, it had been asked for already.
    pub no_room: bool,
}

/// A standing request that nobody has claimed.
#[derive(Clone, Copy, Debug)]
struct Listed {
    request: RequestId,
    /// On whose behalf it was made.
    owner: u64,
}

/// The standing requests that nobody has claimed.
#[derive(Debug)]
pub(in crate::link) struct StandingTable {
    by_key: HashMap<TensorKey, Listed>,
    /// How many there may be at a time, as far as the sender has shown.
    most: u32,
    /// The steps of the message that is being made.
    scratch: Vec<u8>,
}

impl StandingTable {
    pub fn new() -> Self {
        let by_key = HashMap::with_capacity_and_hasher(ARMED, RandomState::default());
        StandingTable { by_key, most: u32::MAX, scratch: Vec::new() }
    }

    pub fn len(&self) -> usize {
        self.by_key.len()
    }

    /// Whether there is one of a key.
    pub fn has(&self, key: &TensorKey) -> bool {
        self.by_key.contains_key(key)
    }

    /// The request of a key, which is standing no more.
    fn take(&mut self, key: &TensorKey) -> Option<RequestId> {
        if self.by_key.is_empty() { None } else { Some(self.by_key.remove(key)?.request) }
    }
}

impl<C> Link<C> {
    /// Bytes of the destination of one step of an edge; `None` if it is not known yet where, or how, its tensors are to come.
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

    /// The room that all standing requests of this link share.
    pub(in crate::link) fn standing_capacity<P: Port>(
        &self,
        cx: &mut LinkContext<'_, P, C>,
    ) -> StandingCapacity {
        let slots = self.requests.max().min(cx.port.limits(self.id).grants) / SHARE;
        let slots = u64::from(slots.min(self.standing.most));
        StandingCapacity { slots, bytes: cx.standing_bytes.most }
    }

    /// Requests the tensors of `count` steps from that of `first` on, or of as many as there is room for, on behalf of `owner`.
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

    /// Returns for how many steps there was room.
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
        // What its sender does not lend is written, and lent again once it can be.
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

    /// Of how many steps from that of `first` on, `count` at most, nothing was asked for yet. What is asked for twice could
    /// come in another order than it was sent in, if the first receiver gives up.
    fn unasked(&self, first: &TensorKey, count: u32) -> u32 {
        match self.routes_out.outstanding(&first.edge, first.step) {
            RouteOutstanding::None => count,
            RouteOutstanding::StandingOnly => {
                let mut key = first.clone();
                let is_armed = |nth: &u32| {
                    key.step = first.step + u64::from(*nth);
                    self.standing.by_key.contains_key(&key)
                };
                (0..count).find(is_armed).unwrap_or(count)
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

    /// A request of a step, with its destination if there is to be one; `None` if it can't be made now.
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

    /// The sender has more than there is room for, and nobody waits yet. Asks again if the share of standing requests has that
    /// room; otherwise the value goes back in line, for a receive that asks by itself.
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

    /// Whether the sender says of a standing request, or of one that was, that it has room for no more of them.
    pub(in crate::link) fn is_standing_limit(&mut self, id: RequestId, status: &Status) -> bool {
        let is_refusal = status.code == STANDING_LIMIT && !status.derived;
        is_refusal && self.requests.get(id).is_some_and(|request| request.machine.is_standing())
    }

    /// The sender has not taken a standing request. If somebody waits for it, it is made like any other; if not, whoever
    /// receives asks. From now on no more are made than the sender took.
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

    /// Room for one tensor, as long as standing requests don't have more than their share.
    fn standing_grant<P: Port>(&self, cx: &mut LinkContext<'_, P, C>, meta: &TensorMeta) -> Option<Grant> {
        if !cx.standing_bytes.has_room(meta.bytes()) {
            return None;
        }
        let target = cx.pool.tensor(meta.clone()).ok()?;
        self.grant(cx, target).ok()
    }

    /// Puts a standing request into its tables.
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

    /// A request is not a standing one any more, if it was: it is given up or over.
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

    /// Gives the standing request of a key to a waiter, if there is one: what comes for it, or has come, is the waiter's.
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

    /// Keeps what came for a request that nobody has claimed.
    pub(in crate::link) fn store_early(&mut self, id: RequestId, early: EarlyArrival) {
        if let Some(request) = self.requests.get(id)
            && !is_on(Mutant::ParkedDropped)
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

    /// Gives up the unclaimed requests of an owner, which are for steps from that of `first` to before `until`. What has come
    /// for them is in line again, at their sender.
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
        // Steps that were skipped lie between: there are fewer requests than steps.
        let all = self.standing.by_key.iter().filter(|(_, listed)| is_owned(listed));
        let mut all: Vec<_> = all.map(|(key, listed)| (key.step, listed.request)).collect();
        all.sort_unstable_by_key(|(step, _)| *step);
        all.into_iter().for_each(|(_, request)| self.withdraw_one(cx, request));
    }

    fn withdraw_one<P: Port>(&mut self, cx: &mut LinkContext<'_, P, C>, id: RequestId) {
        if !is_on(Mutant::ArmedStaysListed) {
            self.unlist(cx, id);
        }
        let Some(request) = self.requests.get(id) else { return };
        match request.early.take() {
            Some(EarlyArrival::Value(value)) if !is_on(Mutant::DisarmedValueDropped) => {
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

    /// The link is gone: what came for requests that nobody claimed is held with the rest.
    pub(in crate::link) fn unlist_all<P: Port>(&mut self, cx: &mut LinkContext<'_, P, C>) {
        for slot in 0..self.requests.slots() {
            let Some((_, request)) = self.requests.in_slot(slot) else { continue };
            cx.standing_bytes.remove(request);
            if let Some(EarlyArrival::Value(value)) = request.early.take()
                && !is_on(Mutant::ParkedNotOrphaned)
            {
                self.stash.keep(StashEntry { key: request.key.clone(), value, asked: request.asked });
            }
        }
    }
}
