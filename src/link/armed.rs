//! Standing requests of this side: made in advance by one message, claimed later by whoever receives.
//!
//! Each is a request in the slot table like any other, but for its waiter, whom it gets when it is claimed. What comes before
//! that stays in its slot.

use super::destination::place_value;
use super::held::Held;
use super::links::{Context, Link};
use super::requests::Request;
use super::{HeldValue, RequestError, TensorKey, Want};
use crate::fabric::Port;
use crate::mutants::{Mutant, is_on};
use crate::protocol::{Receiver, ReceiverAction};
use crate::telemetry::Counter;
use crate::wire::Grant;
use crate::wire::message::{Arm, ArmedStep, ArmedSteps, MAX_ARMED, Message, RequestId, VersionedMeta};
use foldhash::HashMap;
use foldhash::fast::RandomState;

/// Unclaimed requests that find room before anything is allocated; a hash table that is less than half full never grows.
const ARMED: usize = 256;
/// Of the slots and of the grants of a link, and of its routes, one part in so many may be for armed requests: the rest is for plain ones.
const SHARE: u32 = 2;
/// Of the pool, one part in so many may be destinations of the armed requests of one poller.
const POOL_SHARE: u64 = 4;

/// What came for a standing request that nobody had claimed.
#[derive(Debug)]
pub(super) enum Parked {
    /// A value.
    Value(HeldValue),
    /// An error of the sender's.
    Failed(RequestError),
}

/// The standing requests that nobody has claimed.
#[derive(Debug)]
pub(super) struct ArmedTable {
    by_key: HashMap<TensorKey, RequestId>,
    /// The steps of the message that is being made.
    scratch: Vec<u8>,
}

impl ArmedTable {
    pub fn new() -> Self {
        let by_key = HashMap::with_capacity_and_hasher(ARMED, RandomState::default());
        ArmedTable { by_key, scratch: Vec::new() }
    }

    pub fn len(&self) -> usize {
        self.by_key.len()
    }

    /// The request of a key, which is armed no more.
    fn take(&mut self, key: &TensorKey) -> Option<RequestId> {
        if self.by_key.is_empty() { None } else { self.by_key.remove(key) }
    }
}

impl<C> Link<C> {
    /// Whether the peer can be told where, or how, its tensors are to come.
    pub(super) fn foresees<P: Port>(
        &self,
        cx: &mut Context<'_, P, C>,
        first: &TensorKey,
        borrow: bool,
    ) -> bool {
        borrow && cx.port.limits(self.id).lends || self.routes_out.cached(&first.edge).is_some()
    }

    /// Requests the tensors of `count` steps from that of `first` on, or of as many as there is room for. Returns of how many.
    pub(super) fn arm<P: Port>(
        &mut self,
        cx: &mut Context<'_, P, C>,
        first: &TensorKey,
        count: u32,
        borrow: bool,
    ) -> u32 {
        let most = self.requests.max().min(cx.port.limits(self.id).grants) / SHARE;
        let slots = most.saturating_sub(self.armed.len() as u32);
        let count = self.unasked(first, count.min(MAX_ARMED as u32).min(slots));
        if count == 0 || !self.routes_out.may_arm(&first.edge) {
            return 0;
        }
        let Some((route, announce)) = self.routes_out.take(&first.edge) else { return 0 };
        let (number, cached) = (route.number, route.meta.clone());
        self.announce(cx, announce, number, first);
        let borrow = borrow && cx.port.limits(self.id).lends;
        let in_response =
            |meta: &VersionedMeta| meta.meta.bytes() <= u64::from(self.settings.small_tensor_bytes);
        let landing = cached.as_ref().filter(|meta| !borrow && !in_response(meta)).cloned();
        let mut steps = std::mem::take(&mut self.armed.scratch);
        steps.clear();
        let (mut armed, mut room) = (0, None);
        while armed < count {
            let key = TensorKey { step: first.step + u64::from(armed), ..first.clone() };
            let Some(mut request) = self.armed_request(cx, key, number, cached.as_ref(), landing.as_ref())
            else {
                break;
            };
            request.borrow = borrow;
            let grant = request.grant;
            room = grant.map(|grant| (grant.region, grant.len));
            let Some(request) = self.list(cx, request) else { break };
            let (key, offset) = grant.map_or((0, 0), |grant| (grant.key, grant.offset));
            ArmedStep { request, key, offset }.put(&mut steps, grant.is_some());
            armed += 1;
        }
        self.routes_out.release(&first.edge);
        if armed > 0 {
            cx.counters.increment(Counter::WindowsArmed);
            cx.counters.add(Counter::RequestsArmed, armed.into());
            self.send(
                cx,
                &Message::Arm(Arm {
                    route: number,
                    first_step: first.step,
                    frame: first.frame,
                    iteration: first.iteration,
                    meta_version: cached.map_or(0, |meta| meta.version),
                    borrow,
                    room,
                    steps: ArmedSteps::new(&steps, room.is_some()),
                }),
            );
        }
        self.armed.scratch = steps;
        armed
    }

    /// Of how many steps from that of `first` on, `count` at most, nothing was asked for yet. What is asked for twice could
    /// come in another order than it was sent in, if the first receiver gives up.
    fn unasked(&self, first: &TensorKey, count: u32) -> u32 {
        if !self.routes_out.may_be_asked(&first.edge, first.step) {
            return count;
        }
        let same = |key: &TensorKey| {
            key.step >= first.step
                && (&key.edge, key.frame, key.iteration) == (&first.edge, first.frame, first.iteration)
        };
        let asked = self.requests.iter().filter(|request| same(&request.key));
        let next = asked.map(|request| request.key.step - first.step).min().unwrap_or(u64::MAX);
        next.min(count.into()) as u32
    }

    /// A request of a step, with its destination if there is to be one; `None` if it can't be made now.
    fn armed_request<P: Port>(
        &self,
        cx: &mut Context<'_, P, C>,
        key: TensorKey,
        route: u32,
        cached: Option<&VersionedMeta>,
        landing: Option<&VersionedMeta>,
    ) -> Option<Request<C>> {
        if !self.requests.has_room() {
            return None;
        }
        let grant = match landing {
            None => None,
            Some(meta) => Some(self.armed_grant(cx, meta)?),
        };
        Some(Request {
            machine: Receiver::armed(grant.map(|grant| grant.len)),
            meta: cached.cloned(),
            grant,
            ..Request::without_waiter(key, route, self.asked + 1, u32::MAX)
        })
    }

    /// Room for one tensor, as long as armed requests don't have more than their share.
    fn armed_grant<P: Port>(&self, cx: &mut Context<'_, P, C>, meta: &VersionedMeta) -> Option<Grant> {
        let bytes = cx.armed_bytes.checked_add(meta.meta.bytes())?;
        if bytes > cx.pool.region().len() / POOL_SHARE {
            return None;
        }
        let target = cx.pool.tensor(meta.meta.clone()).ok()?;
        self.grant(cx, target).ok()
    }

    /// Puts an armed request into its tables.
    fn list<P: Port>(&mut self, cx: &mut Context<'_, P, C>, mut request: Request<C>) -> Option<RequestId> {
        let (key, bytes) = (request.key.clone(), request.grant.map_or(0, |grant| grant.len));
        request.armed_bytes = bytes;
        *cx.armed_bytes += bytes;
        let id = self.requests.insert(request)?;
        self.asked += 1;
        self.routes_out.arm(&key.edge);
        self.routes_out.ask(&key.edge, key.step);
        self.armed.by_key.insert(key, id);
        Some(id)
    }

    /// A request is not an armed one any more, if it was: it is given up or over.
    pub(super) fn unlist<P: Port>(&mut self, cx: &mut Context<'_, P, C>, id: RequestId) {
        let Some(request) = self.requests.get(id) else { return };
        if request.machine.is_unclaimed() && self.armed.by_key.get(&request.key) == Some(&id) {
            *cx.armed_bytes -= std::mem::take(&mut request.armed_bytes);
            self.armed.by_key.remove(&request.key);
            self.routes_out.disarm(&request.key.edge);
        }
    }

    /// Gives the standing request of a key to a waiter, if there is one: what comes for it, or has come, is the waiter's.
    pub(super) fn claim<P: Port>(
        &mut self,
        cx: &mut Context<'_, P, C>,
        key: &TensorKey,
        want: Want,
        timeout_ms: u32,
        waiter: C,
    ) -> Result<RequestId, (Want, C)> {
        let Some(id) = self.armed.take(key) else { return Err((want, waiter)) };
        let Some(request) = self.requests.get(id) else { return Err((want, waiter)) };
        *cx.armed_bytes -= std::mem::take(&mut request.armed_bytes);
        self.routes_out.disarm(&key.edge);
        cx.counters.increment(Counter::RequestsClaimed);
        request.waiter = Some(waiter);
        request.timeout_ms = timeout_ms;
        request.copy_to = match want {
            Want::Into(given) => Some(given),
            Want::Fresh | Want::Borrow => None,
        };
        let action = request.machine.claim();
        match request.parked.take() {
            Some(Parked::Value(value)) => self.place_parked(cx, id, action, value),
            Some(Parked::Failed(RequestError::Remote(status))) => self.sender_failed(cx, id, action, status),
            Some(Parked::Failed(error)) => self.end(cx, id, action, error),
            None => {}
        }
        Ok(id)
    }

    /// Keeps what came for a request that nobody has claimed.
    pub(super) fn set_aside(&mut self, id: RequestId, parked: Parked) {
        if let Some(request) = self.requests.get(id)
            && !is_on(Mutant::ParkedDropped)
        {
            request.parked = Some(parked);
        }
    }

    fn place_parked<P: Port>(
        &mut self,
        cx: &mut Context<'_, P, C>,
        id: RequestId,
        action: ReceiverAction,
        value: HeldValue,
    ) {
        let Some(request) = self.requests.get(id) else { return };
        let given = request.copy_to.take();
        let into = given.is_some();
        match place_value(cx, value, given, into) {
            Ok((received, sender)) => self.deliver(cx, id, action, received, sender),
            Err(unfit) => self.unwanted(cx, id, action, unfit.value, unfit.error),
        }
    }

    /// Gives up the unclaimed requests whose keys fit. What has come for them is in line again, at their sender.
    pub(super) fn disarm<P: Port>(
        &mut self,
        cx: &mut Context<'_, P, C>,
        fits: &mut dyn FnMut(&TensorKey) -> bool,
    ) {
        for slot in 0..self.requests.slots() {
            let Some((id, request)) = self.requests.in_slot(slot) else { continue };
            if request.machine.is_unclaimed() && fits(&request.key) {
                self.disarm_one(cx, id);
            }
        }
    }

    fn disarm_one<P: Port>(&mut self, cx: &mut Context<'_, P, C>, id: RequestId) {
        if !is_on(Mutant::ArmedStaysListed) {
            self.unlist(cx, id);
        }
        let Some(request) = self.requests.get(id) else { return };
        match request.parked.take() {
            Some(Parked::Value(value)) if !is_on(Mutant::DisarmedValueDropped) => self.hold(cx, id, value),
            Some(_) => {}
            None => {
                request.is_unsettled = true;
                self.unsettled.add(&request.key);
            }
        }
        self.give_up_now(cx, id);
    }

    /// The link is gone: what came for requests that nobody claimed is held with the rest.
    pub(super) fn unlist_all<P: Port>(&mut self, cx: &mut Context<'_, P, C>) {
        for slot in 0..self.requests.slots() {
            let Some((_, request)) = self.requests.in_slot(slot) else { continue };
            *cx.armed_bytes -= std::mem::take(&mut request.armed_bytes);
            if let Some(Parked::Value(value)) = request.parked.take()
                && !is_on(Mutant::ParkedNotOrphaned)
            {
                self.held.keep(Held { key: request.key.clone(), value, asked: request.asked });
            }
        }
    }
}
