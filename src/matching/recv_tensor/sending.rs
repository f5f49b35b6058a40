//! The sending side.

use super::head::encode_failure;
use super::inbound::SHORT_FAILURE;
use super::report::bytes_of;
use super::{
    AnswerBytes, AnswerHead, AnswerValue, AskedRequest, FinishedRequests, RecvTensors, RequestAnswer,
};
use crate::link::windows::WindowRefusal;
use crate::link::{EdgeKey, TensorKey, Value, placement_of};
use crate::matching::ended_steps::StepEnd;
use crate::matching::untaken::LostEdge;
use crate::matching::{AskOutcome, Numbered, OfferOutcome, PeerIndex, Table};
use crate::telemetry::Counter;
use crate::wire::{Code, EdgeName, Incarnation, RendezvousKey, Status, Time, checksum_of};
use bytes::Bytes;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Requests of one peer that are not finished.
pub const MAX_PEER_REQUESTS: usize = 1 << 16;

/// Requests of one peer for one key that wait. A peer makes the next one when it knows that the one
/// before has ended.
pub(super) const MAX_KEY_REQUESTS: usize = 16;

/// Bytes of the longer failures in answers to one peer that are not sent. Others have
/// [`SHORT_FAILURE`] bytes of the text and of the details. The bound of requests bounds no
/// failures.
const MAX_LONG_FAILURES: usize = 64 << 20;

/// Bytes of the keys of one peer's requests that are not finished. A request outlives its call, so
/// the bound of calls does not bound them.
pub(super) const MAX_PEER_KEY_BYTES: usize = 16 << 20;

/// A value that waits for a request, or for the end of its request.
#[derive(Clone, Debug)]
pub(super) struct SentValue {
    pub value: Value,
    /// When it was sent.
    pub since: Time,
    /// Its checksum, once a request has asked for it: a peer can ask any number of times.
    checksum: Option<u64>,
}

impl SentValue {
    /// The answer that gives the value.
    fn answer(&mut self, wants_checksum: bool) -> AnswerValue {
        let Value::Tensor(tensor) = &self.value else {
            return AnswerValue { head: AnswerHead::Dead, bytes: AnswerBytes::Dead };
        };
        let checksum =
            wants_checksum.then(|| *self.checksum.get_or_insert_with(|| checksum_of(tensor.bytes())));
        let (meta, placement) = (tensor.meta().clone(), placement_of(tensor));
        let head = AnswerHead::Tensor { meta, placement, checksum };
        AnswerValue { head, bytes: AnswerBytes::Tensor(tensor.clone()) }
    }
}

/// What this process sends to one peer.
#[derive(Default)]
pub(super) struct Outbound {
    /// The values, and the numbers of the requests that wait for one.
    pub table: Table<SentValue, u64>,
    requests: BTreeMap<u64, PeerRequest>,
    /// Bytes of the keys of `requests`.
    key_bytes: usize,
    finished: FinishedRequests,
    /// The life of the peer whose requests these are.
    life: Option<Incarnation>,
    /// Bytes of long failures in answers that are not sent.
    long_failures: Arc<AtomicUsize>,
}

/// A failure in an answer, which counts as not sent until the drop.
struct LongFailure {
    bytes: Vec<u8>,
    all: Arc<AtomicUsize>,
}

impl AsRef<[u8]> for LongFailure {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for LongFailure {
    fn drop(&mut self) {
        self.all.fetch_sub(self.bytes.len(), Ordering::Relaxed);
    }
}

impl std::fmt::Debug for Outbound {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Outbound").field("requests", &self.requests.len()).finish_non_exhaustive()
    }
}

/// What a peer has asked for, until it says that it is done.
struct PeerRequest {
    key: TensorKey,
    wants_checksum: bool,
    state: RequestState,
    /// The step has ended here after the answer: the value does not count as outstanding.
    step_ended: bool,
}

enum RequestState {
    /// No value yet.
    Waiting(RequestAnswer),
    /// Has this value. The answer may be lost, and is given again then.
    Answered(Numbered<SentValue>),
}

impl PeerRequest {
    fn key_bytes(&self) -> usize {
        bytes_of_key(&self.key)
    }

    /// Whether the request has a value that counts as outstanding.
    fn counts(&self) -> bool {
        matches!(self.state, RequestState::Answered(_)) && !self.step_ended
    }
}

/// Bytes of a key that depend on the peer.
fn bytes_of_key(key: &TensorKey) -> usize {
    let name = &key.edge.name;
    name.source().len() + name.destination().len() + name.name().len()
}

impl Outbound {
    /// The values that answer requests which are not finished. Those of steps that have ended here
    /// are not among them.
    pub fn answered(&self) -> impl Iterator<Item = &TensorKey> {
        self.requests.values().filter(|request| request.counts()).map(|request| &request.key)
    }

    /// Whether the peer may not have got a value that was given to it.
    pub fn has_answered(&self) -> bool {
        self.requests.values().any(|request| matches!(request.state, RequestState::Answered(_)))
    }

    /// Marks the answered requests for steps that end here. Returns their number.
    fn end_answered(&mut self, mut fits: impl FnMut(u64) -> bool) -> usize {
        let ended = |request: &&mut PeerRequest| request.counts() && fits(request.key.step);
        self.requests.values_mut().filter(ended).map(|request| request.step_ended = true).count()
    }

    /// Forgets the first request, if `fits` its number. Returns it.
    fn forget_first(&mut self, fits: impl FnOnce(u64) -> bool) -> Option<PeerRequest> {
        let first = self.requests.first_entry().filter(|first| fits(*first.key()))?;
        let (id, request) = first.remove_entry();
        self.key_bytes -= request.key_bytes();
        if let RequestState::Waiting(_) = request.state {
            self.table.remove_waiter(&request.key, |waiter| *waiter == id);
        }
        Some(request)
    }

    /// Forgets the first requests, as long as `fits` their numbers. Returns the keys of those whose
    /// values counted.
    fn forget(&mut self, fits: impl Fn(u64) -> bool) -> Vec<TensorKey> {
        let gone = std::iter::from_fn(|| self.forget_first(&fits));
        gone.filter(PeerRequest::counts).map(|request| request.key).collect()
    }

    /// Why no request for this key can be added, if a bound is reached.
    fn full(&self, key: &TensorKey) -> Option<Status> {
        let (held, more) = (self.key_bytes, bytes_of_key(key));
        let what = if self.table.waiting(key) >= MAX_KEY_REQUESTS {
            format!("{MAX_KEY_REQUESTS} requests for {key} wait here: a peer makes one at a time")
        } else if self.requests.len() >= MAX_PEER_REQUESTS {
            format!("{MAX_PEER_REQUESTS} requests wait here, which is the limit of a peer")
        } else if held + more > MAX_PEER_KEY_BYTES {
            format!(
                "the keys of this peer's unfinished requests have {held} bytes, and the next one {more}: \
                 the limit is {MAX_PEER_KEY_BYTES}; receive fewer tensors at a time, or shorten \
                 the names of edges"
            )
        } else {
            return None;
        };
        Some(Status::new(Code::ResourceExhausted, what))
    }

    /// The bytes of an answer with a failure.
    fn failure(&self, status: Status) -> Bytes {
        if status.message.len() + status.details.len() <= SHORT_FAILURE {
            return encode_failure(status).into();
        }
        // Relaxed: a bound needs no order, and other threads only take away.
        if self.long_failures.load(Ordering::Relaxed) >= MAX_LONG_FAILURES {
            return encode_failure(status.cut(SHORT_FAILURE)).into();
        }
        let bytes = encode_failure(status);
        self.long_failures.fetch_add(bytes.len(), Ordering::Relaxed);
        Bytes::from_owner(LongFailure { bytes, all: self.long_failures.clone() })
    }

    fn add(&mut self, id: u64, request: PeerRequest) {
        self.key_bytes += request.key_bytes();
        self.requests.insert(id, request);
    }

    fn remove(&mut self, id: u64) -> Option<PeerRequest> {
        let request = self.requests.remove(&id)?;
        self.key_bytes -= request.key_bytes();
        Some(request)
    }
}

impl RecvTensors {
    /// Sends a value that counts as outstanding. A value of a step that has ended is dropped.
    pub fn send(&mut self, peer: PeerIndex, key: &TensorKey, value: Value, now: Time) {
        if !self.steps.goes_on(key.step) {
            return self.left(1);
        }
        match self.peer(peer).out.table.offer(key, SentValue { value, since: now, checksum: None }) {
            OfferOutcome::Matched(id, value) => self.answer(peer, id, value),
            OfferOutcome::Queued => self.counters.increment(Counter::SendsWaited),
        }
    }

    /// Answers a waiting request.
    fn answer(&mut self, peer: PeerIndex, id: u64, mut value: Numbered<SentValue>) {
        let Some(request) = self.peer(peer).out.requests.get(&id) else { return };
        let answered = value.value.answer(request.wants_checksum);
        self.counters.increment(Counter::TensorsSent);
        self.counters.add(Counter::BytesSent, bytes_of(&value.value.value));
        let Some(request) = self.peer(peer).out.requests.get_mut(&id) else { return };
        if let RequestState::Waiting(answer) =
            std::mem::replace(&mut request.state, RequestState::Answered(value))
        {
            answer(answered);
        }
    }

    /// A peer asks for a value. A request whose number is known gets the same value again.
    pub fn asked(
        &mut self,
        (peer, life): (PeerIndex, Incarnation),
        AskedRequest { id, step, key, wants_checksum, is_try, link }: AskedRequest<'_>,
        answer: RequestAnswer,
    ) {
        // A request of an earlier link would take a value of this one for nobody. One of a later
        // link comes before the news of that link.
        let present = self.peer(peer).present();
        if present.is_none_or(|present| (present.tag.incarnation, present.generation) != (life, link)) {
            return;
        }
        self.meet(peer, life);
        let key = match self.key_of_request(peer, step, key) {
            Ok(key) => key,
            Err(status) => return self.refuse(peer, answer, status),
        };
        let out = &mut self.peer(peer).out;
        if let Some(known) = out.requests.get_mut(&id) {
            if known.key != key {
                let what = format!("request {id} was for {}, and is for {key} now", known.key);
                return self.refuse(peer, answer, Status::new(Code::InvalidArgument, what));
            }
            match &mut known.state {
                RequestState::Waiting(before) => *before = answer,
                RequestState::Answered(value) => answer(value.value.answer(known.wants_checksum)),
            }
            return;
        }
        if out.finished.contains(id) {
            let what = format!("request {id} is finished, and can't be made again");
            return self.refuse(peer, answer, Status::new(Code::FailedPrecondition, what));
        }
        if let Some(status) = out.full(&key) {
            return self.refuse(peer, answer, status);
        }
        if let Some(status) = self.end_of(&key) {
            return self.refuse(peer, answer, status);
        }
        let out = &mut self.peer(peer).out;
        let state = RequestState::Waiting(answer);
        out.add(id, PeerRequest { key: key.clone(), wants_checksum, state, step_ended: false });
        match out.table.ask(&key, id) {
            AskOutcome::Matched(id, value) => self.answer(peer, id, value),
            AskOutcome::Queued if is_try => {
                out.table.remove_waiter(&key, |waiter| *waiter == id);
                out.remove(id);
            }
            AskOutcome::Queued => {}
        }
    }

    fn refuse(&mut self, peer: PeerIndex, answer: RequestAnswer, status: Status) {
        self.counters.increment(Counter::ErrorsSent);
        let bytes = AnswerBytes::Failure(self.peer(peer).out.failure(status));
        answer(AnswerValue { head: AnswerHead::Failed, bytes });
    }

    /// Why a key gets no value any more, if its step has ended here.
    fn end_of(&self, key: &TensorKey) -> Option<Status> {
        Some(match self.steps.end_of(key.step)? {
            StepEnd::Aborted(status) => status.clone().into_derived(),
            StepEnd::CleanedUp => WindowRefusal::CleanedUp.status(key.borrowed(), usize::MAX),
        })
    }

    /// The key of a request, if this process is its source and the peer its destination.
    fn key_of_request(&self, peer: PeerIndex, step: u64, key: &str) -> Result<TensorKey, Status> {
        let invalid = |what: String| Status::new(Code::InvalidArgument, what);
        let parsed = RendezvousKey::parse(key).map_err(|error| invalid(error.to_string()))?;
        let (source, destination) = (parsed.source.to_string(), parsed.destination.to_string());
        let name = EdgeName::new(&source, &destination, parsed.edge);
        let name = name.map_err(|error| invalid(error.to_string()))?;
        let (me, asks) = (&self.me, self.members.task(peer));
        if name.source_task() != me {
            return Err(invalid(format!("{name} starts at {}, and {me} was asked", name.source_task())));
        }
        if name.destination_task() != asks {
            return Err(invalid(format!("{name} ends at {}, and {asks} asks", name.destination_task())));
        }
        if parsed.source_incarnation != self.incarnation.get() {
            let (theirs, ours) = (parsed.source_incarnation, self.incarnation);
            let what = format!("{name} was asked of incarnation {theirs:016x} of {me}, which is {ours} now");
            return Err(Status::new(Code::FailedPrecondition, what));
        }
        let (frame, iteration) = (parsed.frame, parsed.iteration);
        Ok(TensorKey { edge: EdgeKey { name: Arc::new(name), frame, iteration }, step })
    }

    /// A request of a peer has ended. A value that it has not taken goes back in line.
    pub fn finished(&mut self, (peer, life): (PeerIndex, Incarnation), id: u64, is_given_up: bool) {
        self.meet(peer, life);
        let out = &mut self.peer(peer).out;
        out.finished.insert(id);
        let Some(request) = out.remove(id) else { return };
        let (counts, PeerRequest { key, state, .. }) = (request.counts(), request);
        match state {
            RequestState::Waiting(_) => drop(out.table.remove_waiter(&key, |waiter| *waiter == id)),
            // A step that has ended may be forgotten, and seem to go on.
            RequestState::Answered(value) if is_given_up && counts && self.steps.goes_on(key.step) => {
                if let OfferOutcome::Matched(next, value) = self.peer(peer).out.table.put_back(&key, value) {
                    self.answer(peer, next, value);
                }
            }
            RequestState::Answered(_) => self.left(counts.into()),
        }
    }

    /// A peer forgets the requests of its earlier lives and links: those below `id`.
    pub fn clean_up_peer(&mut self, (peer, life): (PeerIndex, Incarnation), id: u64) {
        self.meet(peer, life);
        let out = &mut self.peer(peer).out;
        let lost = out.forget(|request| request < id);
        out.finished.insert_below(id);
        self.lose_values(peer, lost);
    }

    /// A life of a peer calls. The requests of another one are void.
    fn meet(&mut self, peer: PeerIndex, life: Incarnation) {
        let out = &mut self.peer(peer).out;
        if out.life.replace(life) == Some(life) {
            return;
        }
        out.finished = FinishedRequests::default();
        let lost = out.forget(|_| true);
        self.lose_values(peer, lost);
    }

    /// Forgets the requests of a peer whose link has ended. Returns how many of their values
    /// counted.
    pub(super) fn drop_requests(&mut self, peer: PeerIndex) -> u64 {
        let lost = self.peer(peer).out.forget(|_| true);
        let count = lost.len() as u64;
        self.lose_values(peer, lost);
        count
    }

    fn lose_values(&mut self, peer: PeerIndex, keys: Vec<TensorKey>) {
        self.left(keys.len());
        for key in keys {
            self.lost.add(LostEdge { peer, key: key.edge, values: 1 });
        }
    }

    /// Drops the values of ended steps, and refuses the requests for them.
    pub(super) fn end_sends(&mut self, mut fits: impl FnMut(u64) -> bool) {
        for peer in (0..self.peers.len() as u32).map(PeerIndex) {
            let out = &mut self.peer(peer).out;
            let answered = out.end_answered(&mut fits);
            let (values, requests) = out.table.remove_steps(&mut fits);
            let requests: Vec<_> =
                requests.into_iter().filter_map(|(key, id)| Some((key, out.remove(id)?))).collect();
            self.left(answered + values.len());
            for (key, PeerRequest { state, .. }) in requests {
                if let (RequestState::Waiting(answer), Some(status)) = (state, self.end_of(&key)) {
                    self.refuse(peer, answer, status);
                }
            }
        }
    }

    /// Values do not count as outstanding any more.
    fn left(&self, count: usize) {
        if count > 0 {
            self.outstanding.fetch_sub(count, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{PagePolicy, Pool, PoolOptions, Region, RegionOptions};
    use crate::wire::{DType, Shape, TensorMeta};

    #[test]
    fn a_value_is_hashed_once_however_often_it_is_asked_for() {
        let region = RegionOptions { pages: PagePolicy::Plain, ..RegionOptions::new(1 << 20) };
        let region = Region::create(0, &region).expect("1 MiB");
        let pool = Pool::new(region, PoolOptions::default()).expect("a pool");
        let meta = TensorMeta::new(DType::U8, Shape::new(&[8]).expect("a shape")).expect("meta-data");
        let tensor = pool.zeroed(meta).expect("room").freeze();
        let right = checksum_of(tensor.bytes());
        let mut sent = SentValue { value: Value::Tensor(tensor), since: Time::ZERO, checksum: None };
        let checksum = |sent: &mut SentValue, wants| match sent.answer(wants).head {
            AnswerHead::Tensor { checksum, .. } => checksum,
            other => panic!("{other:?}"),
        };
        assert_eq!((checksum(&mut sent, false), sent.checksum), (None, None), "nobody wants it");
        assert_eq!((checksum(&mut sent, true), sent.checksum), (Some(right), Some(right)));
        sent.checksum = Some(7);
        assert_eq!(checksum(&mut sent, true), Some(7), "it was not computed again");
    }
}
