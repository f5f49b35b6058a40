//! What this process receives from one peer: the receives that wait, requests, and values.

use super::{MAX_PEER_REQUESTS, OpenRequest};
use crate::link::windows::ArrivedTensor;
use crate::link::{Destination, TensorKey};
use crate::matching::{CallId, Error, Waiter};
use crate::wire::{Status, Time};
use foldhash::HashMap;
use std::collections::VecDeque;

/// A peer's values that no receive has taken have at most the bytes of the pool divided by this.
pub(super) const HELD_PART: u64 = 4;

/// Bytes of a failure of a peer that its receives get whole. Of longer ones those of a link have
/// [`FAILURES`] together.
pub(super) const SHORT_FAILURE: usize = 4096;
const FAILURES: usize = 64 << 20;
/// Bytes of a failure's text and of its details in each receive of a key but the first.
pub(super) const CUT_FAILURE: usize = 1024;

/// A receive that waits.
#[derive(Debug)]
pub(super) struct QueuedReceive {
    pub destination: Destination,
    pub waiter: Waiter,
    /// Whether the receive counts towards the limit of receives that wait.
    pub is_bounded: bool,
}

impl QueuedReceive {
    /// Whether the receive takes a value that is there, and does not wait for one.
    pub fn is_try(&self) -> bool {
        self.waiter.timeout.is_zero()
    }
}

/// What this process receives from one peer.
#[derive(Debug, Default)]
pub(super) struct Inbound {
    pub keys: HashMap<TensorKey, ReceiveQueue>,
    /// The keys of the requests that wait for an answer.
    pub requests: HashMap<u64, TensorKey>,
    /// The keys of the requests that were given up, until the peer has heard so.
    pub given_up: HashMap<u64, TensorKey>,
    pub next_request: u64,
    /// Receives that wait, without those of batches.
    pub waiting: u32,
    /// Bytes of the values that are held.
    pub held_bytes: u64,
    /// Bytes of the long failures of the link that receives got whole.
    failures: usize,
}

impl Inbound {
    /// Why no receive can begin now. `is_bounded` as for
    /// [`RecvTensors::receive`](super::RecvTensors::receive).
    pub fn full(&self, max_requests: u32, is_bounded: bool) -> Option<Error> {
        if is_bounded && self.waiting >= max_requests {
            return Some(Error::too_many_receives(max_requests));
        }
        // A batch that ends early gives up all its requests at once, and others may follow.
        let most = MAX_PEER_REQUESTS.max(2 * max_requests as usize);
        (self.given_up.len() >= most).then(|| Error::too_many_given_up(most))
    }

    /// What the receives of a failure get of it.
    pub fn kept(&mut self, failure: Status) -> Status {
        let len = failure.message.len() + failure.details.len();
        if len <= SHORT_FAILURE {
            return failure;
        }
        let all = self.failures.saturating_add(len);
        if all > FAILURES {
            return failure.cut(SHORT_FAILURE);
        }
        self.failures = all;
        failure
    }

    /// The link has ended, and with it all requests.
    pub fn lose_link(&mut self) {
        (self.requests, self.given_up) = (HashMap::default(), HashMap::default());
        self.failures = 0;
    }

    /// Keeps a value for the next receive of a key.
    pub fn hold(&mut self, key: &TensorKey, held: HeldValue) {
        let Some(queue) = self.keys.get_mut(key) else { return };
        self.held_bytes += held.bytes();
        queue.held = Some(held);
    }

    pub fn take_held(&mut self, key: &TensorKey) -> Option<HeldValue> {
        let held = self.keys.get_mut(key)?.held.take()?;
        self.held_bytes -= held.bytes();
        Some(held)
    }
}

/// The receives of a key.
#[derive(Debug, Default)]
pub(super) struct ReceiveQueue {
    pub waiting: VecDeque<QueuedReceive>,
    /// A value that no receive could take. No request is made meanwhile.
    pub held: Option<HeldValue>,
    pub request: Option<Request>,
}

pub(super) struct Request {
    pub id: u64,
    /// `None` for a request that was given up, until the peer has heard so.
    pub open: Option<OpenRequest>,
    /// The last receive of a try. `None` if the request waits for a value.
    pub last_try: Option<CallId>,
    /// Since when no receive has waited for it, as far as
    /// [`RecvTensors::expire`](super::RecvTensors::expire) has seen.
    pub idle_since: Option<Time>,
}

impl std::fmt::Debug for Request {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Request").field("id", &self.id).field("is_open", &self.open.is_some()).finish()
    }
}

/// A value that has come.
#[derive(Debug)]
pub(super) struct HeldValue {
    /// The request that it has answered, which ends when a receive has taken it.
    pub request: u64,
    pub value: ArrivedValue,
}

#[derive(Debug)]
pub(super) enum ArrivedValue {
    Dead,
    Tensor(ArrivedTensor),
}

impl HeldValue {
    pub fn bytes(&self) -> u64 {
        match &self.value {
            ArrivedValue::Dead => 0,
            ArrivedValue::Tensor(tensor) => tensor.told.meta.bytes(),
        }
    }
}

impl ReceiveQueue {
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.held.is_none() && self.request.is_none()
    }
}
