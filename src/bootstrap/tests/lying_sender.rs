//! What a sender that lies gets from `TensorCaller`: an error, or calls with pauses between them.

use super::super::auth::{AuthSettings, Authenticator};
use super::super::generated as grpc;
use super::super::refused::RefusedCallers;
use super::super::tensors::{MAX_ENDS, UNHEARD_ENDS};
use super::super::thread::{self, ConnectionLimits, MAX_CALLS, serve_connections};
use super::*;
use bytes::Bytes;
use grpc::tensors_server::TensorsServer;
use grpc::{RecvTensorPart, RecvTensorRequest};
use std::collections::HashSet;
use std::convert::Infallible;
use std::sync::{Mutex, mpsc};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tonic::body::Body;
use tonic::codegen::tokio_stream::{self, Iter};
use tonic::codegen::{Service, http};
use tonic::{Request, Response};

type Part = Result<RecvTensorPart, tonic::Status>;
type Parts = Box<dyn Iterator<Item = Part> + Send>;

/// Bytes of the largest tensor that the receiver takes.
const MAX_BYTES: u64 = 1 << 20;
/// Bytes of the shortest part that is not the last.
const MIN_PART: usize = 64 * 1024;

/// Answers each call as its script says for the number of the call.
struct Liar<F> {
    script: F,
    calls: Arc<AtomicU32>,
    ends: Arc<ToldEnds>,
}

/// The ends of requests that a liar was told. It says that it can't hear them now, until it is to.
#[derive(Default)]
struct ToldEnds {
    /// The requests of each call.
    calls: Mutex<Vec<Vec<u64>>>,
    are_heard: AtomicBool,
    /// The first request of each clean-up.
    clean_ups: Mutex<Vec<u64>>,
    clean_ups_are_heard: AtomicBool,
}

impl ToldEnds {
    fn calls(&self) -> Vec<Vec<u64>> {
        self.calls.lock().unwrap().clone()
    }
}

fn heard<T>(is_heard: &AtomicBool, answer: T) -> Result<Response<T>, tonic::Status> {
    match is_heard.load(Ordering::SeqCst) {
        true => Ok(Response::new(answer)),
        false => Err(tonic::Status::unavailable("not now")),
    }
}

#[tonic::async_trait]
impl<F> grpc::tensors_server::Tensors for Liar<F>
where
    F: Fn(u32) -> Vec<RecvTensorPart> + Send + Sync + 'static,
{
    type RecvTensorStream = Iter<Parts>;

    async fn recv_tensor(
        &self,
        _request: Request<RecvTensorRequest>,
    ) -> Result<Response<Self::RecvTensorStream>, tonic::Status> {
        let parts = (self.script)(self.calls.fetch_add(1, Ordering::SeqCst));
        let parts: Parts = Box::new(parts.into_iter().map(Ok));
        Ok(Response::new(tokio_stream::iter(parts)))
    }

    async fn mark_recv_finished(
        &self,
        request: Request<grpc::MarkRecvFinishedRequest>,
    ) -> Result<Response<grpc::MarkRecvFinishedResponse>, tonic::Status> {
        let request = request.into_inner();
        self.ends.calls.lock().unwrap().push([request.request_ids, request.given_up_ids].concat());
        heard(&self.ends.are_heard, grpc::MarkRecvFinishedResponse {})
    }

    async fn cleanup_all(
        &self,
        request: Request<grpc::CleanupAllRequest>,
    ) -> Result<Response<grpc::CleanupAllResponse>, tonic::Status> {
        self.ends.clean_ups.lock().unwrap().push(request.into_inner().first_request_id);
        heard(&self.ends.clean_ups_are_heard, grpc::CleanupAllResponse {})
    }
}

/// Serves worker 0 in place of worker 1, until the end is dropped.
pub(super) fn serve<S>(cluster: &Cluster, service: S) -> oneshot::Sender<()>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>,
    S: Clone + Send + 'static,
    S::Future: Send,
{
    let (me, other) = (name("worker", 1), name("worker", 0));
    let listener = TcpListener::bind(address(cluster, "worker", 1)).unwrap();
    listener.set_nonblocking(true).unwrap();
    let auth = Arc::new(Authenticator::open(&AuthSettings::Uid, &me).unwrap());
    let limits = ConnectionLimits { idle: LONG, call: LONG, calls: MAX_CALLS };
    let (end, ended) = oneshot::channel::<()>();
    std::thread::spawn(move || {
        let proofs = (auth, RefusedCallers::default());
        let serving = serve_connections(me, vec![other], proofs, vec![listener], limits, service);
        thread::runtime().unwrap().block_on(async {
            let _serving = JoinSet::from_iter([serving]);
            // Fails when the test ends.
            let _ = ended.await;
        });
    });
    end
}

/// Serves nobody.
struct Nothing;

impl TensorService for Nothing {
    fn recv_tensor(&self, _from: &TensorPeer, _request: TensorRequest, _answer: TensorAnswer) {}

    fn mark_recv_finished(&self, _from: &TensorPeer, _finished: &[u64], _given_up: &[u64]) {}

    fn cleanup_all(&self, _from: &TensorPeer, _first_request: u64) {}
}

type Answer = Result<Option<ArrivedParts>, Status>;

/// Worker 0, which receives from a liar: worker 1.
struct Victim {
    caller: TensorCaller,
    /// Calls that the liar has got.
    calls: Arc<AtomicU32>,
    ends: Arc<ToldEnds>,
    _member: Member,
    /// Ends the liar's thread.
    _end: oneshot::Sender<()>,
}

impl Victim {
    fn of(script: impl Fn(u32) -> Vec<RecvTensorPart> + Send + Sync + 'static) -> Self {
        let (cluster, calls, ends) = (workers(2), Arc::default(), Arc::default());
        let service = TensorsServer::new(Liar { script, calls: Arc::clone(&calls), ends: Arc::clone(&ends) })
            .max_encoding_message_size(thread::MAX_MESSAGE);
        let end = serve(&cluster, service);
        let member = Member::new(options(&cluster, 0));
        let caller = member.service.serve_tensors(Arc::new(Nothing), MAX_BYTES);
        member.service.start().unwrap();
        Victim { caller, calls, ends, _member: member, _end: end }
    }

    /// Asks for a value until the call is dropped.
    fn ask(&self) -> (TensorCall, mpsc::Receiver<Answer>) {
        let begin = Instant::now();
        loop {
            let to = TensorPeer { name: name("worker", 1), incarnation: Incarnation::new(9).unwrap() };
            let request = TensorRequest {
                step: 1,
                key: "key".into(),
                id: 3,
                wants_checksum: false,
                is_try: false,
                link: 1,
            };
            let (told, answer) = mpsc::channel();
            let call = self.caller.recv_tensor(to, request, move |answer| drop(told.send(answer)));
            // The thread of the service may not have its clients yet. The call is none then.
            match answer.try_recv() {
                Err(mpsc::TryRecvError::Empty) => return (call, answer),
                Ok(early) => {
                    let (told, answer) = mpsc::channel();
                    told.send(early).unwrap();
                    return (call, answer);
                }
                Err(mpsc::TryRecvError::Disconnected) => assert!(begin.elapsed() < LONG),
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn answer(&self) -> Answer {
        let (_call, answer) = self.ask();
        answer.recv_timeout(LONG).expect("an answer")
    }
}

/// The first part of an answer of `length` bytes, with `len` of them.
fn first(length: u64, len: usize) -> RecvTensorPart {
    RecvTensorPart { head: vec![1], length, data: Bytes::from(vec![7; len]), is_pending: false }
}

fn rest(len: usize) -> RecvTensorPart {
    RecvTensorPart { data: Bytes::from(vec![7; len]), ..Default::default() }
}

/// Asserts that this answer is an error of the receive, after one call.
fn assert_refused(parts: Vec<RecvTensorPart>, code: Code, why: &str) {
    let victim = Victim::of(move |_| parts.clone());
    let status = victim.answer().expect_err("the answer is a lie");
    assert!(status.code == code && status.message.contains(why), "{why}: {status}");
    assert_eq!(victim.calls.load(Ordering::SeqCst), 1, "{why}");
}

#[test]
fn short_parts_are_refused_unless_they_end_the_answer() {
    let one_byte_each = [first(MAX_BYTES, 1)].into_iter().chain((0..1000).map(|_| rest(1))).collect();
    assert_refused(one_byte_each, Code::DataLoss, "a part of 1 bytes, with 1048575 bytes to come");
    let short_ones_later = vec![first(MAX_BYTES, MIN_PART), rest(MIN_PART - 1), rest(MIN_PART)];
    assert_refused(short_ones_later, Code::DataLoss, "at least 65536");
    let empty = vec![first(MAX_BYTES, MIN_PART), rest(0), rest(0)];
    assert_refused(empty, Code::DataLoss, "a part of 0 bytes");
    let length = 2 * MIN_PART as u64 + 1;
    let fair = vec![first(length, MIN_PART), rest(MIN_PART), rest(1)];
    let arrived = Victim::of(move |_| fair.clone()).answer().unwrap().expect("a value");
    assert_eq!(arrived.parts.iter().map(Bytes::len).collect::<Vec<_>>(), [MIN_PART, MIN_PART, 1]);
}

#[test]
fn more_bytes_than_were_announced_are_refused() {
    assert_refused(vec![first(10, 11)], Code::DataLoss, "more than the 10 bytes");
    let later = vec![first(MIN_PART as u64 + 1, MIN_PART), rest(2)];
    assert_refused(later, Code::DataLoss, "more than the 65537 bytes");
}

#[test]
fn a_tensor_or_a_head_beyond_the_bounds_is_refused_before_its_bytes() {
    let long_tensor = vec![first(MAX_BYTES + 1, MIN_PART)];
    assert_refused(long_tensor, Code::ResourceExhausted, "a tensor of 1048577 bytes with a head of 1");
    let endless = vec![first(u64::MAX, MIN_PART)];
    assert_refused(endless, Code::ResourceExhausted, "make pool_size larger");
    let long_head = vec![RecvTensorPart { head: vec![1; 4097], ..first(1, 1) }];
    assert_refused(long_head, Code::ResourceExhausted, "a head of 4097");
}

#[test]
fn a_sender_that_answers_too_early_is_not_asked_without_a_pause() {
    let pending = || vec![RecvTensorPart { is_pending: true, ..Default::default() }];
    let cut_short = || vec![first(MAX_BYTES, MIN_PART)];
    let nothing = Vec::new;
    for early in [pending as fn() -> Vec<RecvTensorPart>, cut_short, nothing] {
        let victim = Victim::of(move |_| early());
        let (call, answer) = victim.ask();
        assert!(answer.recv_timeout(Duration::from_secs(1)).is_err(), "it is asked again and again");
        let calls = victim.calls.load(Ordering::SeqCst);
        // Pauses of 5, 10, 20, 40, 80, 160 ms, then 200 ms each.
        assert!((2..=12).contains(&calls), "{calls} calls in a second");
        drop(call);
    }
}

#[test]
fn an_answer_behind_early_ones_is_taken() {
    let pending = || vec![RecvTensorPart { is_pending: true, ..Default::default() }];
    let victim = Victim::of(move |call| match call {
        0 => pending(),
        1 => vec![first(MAX_BYTES, MIN_PART)],
        _ => vec![first(1, 1)],
    });
    let arrived = victim.answer().unwrap().expect("a value");
    assert_eq!((arrived.parts.len(), &*arrived.parts[0]), (1, &[7][..]));
    assert_eq!(victim.calls.load(Ordering::SeqCst), 3);
}

/// Ends that a victim tells. Each holds `waiting` until it is heard or is not told.
struct Ends<'a> {
    victim: &'a Victim,
    waiting: Arc<()>,
}

impl Victim {
    /// A link has begun, and the liar has heard so.
    fn ends(&self) -> Ends<'_> {
        self.answer().unwrap().expect("a value");
        self.ends.clean_ups_are_heard.store(true, Ordering::SeqCst);
        self.caller.cleanup_all(peer(), 0);
        Ends { victim: self, waiting: Arc::default() }
    }
}

impl Ends<'_> {
    fn tell(&self, id: u64, is_given_up: bool) {
        let waits = self.waiting.clone();
        self.victim.caller.mark_recv_finished(peer(), id, is_given_up, move || drop(waits));
    }

    fn waiting(&self) -> usize {
        Arc::strong_count(&self.waiting) - 1
    }
}

fn peer() -> TensorPeer {
    TensorPeer { name: name("worker", 1), incarnation: Incarnation::new(9).unwrap() }
}

fn wait_until(what: impl Fn() -> bool) {
    let begin = Instant::now();
    while !what() {
        assert!(begin.elapsed() < LONG, "it does not come");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_sender_that_hears_of_no_end_costs_bounded_memory_and_few_calls() {
    let victim = Victim::of(|_| vec![first(1, 1)]);
    let begin = Instant::now();
    let ends = victim.ends();
    for id in 0..UNHEARD_ENDS as u64 + 1000 {
        ends.tell(id, false);
    }
    assert_eq!(ends.waiting(), UNHEARD_ENDS);
    // A request that was given up is told in any case: the next one of its key waits for that.
    ends.tell(1 << 32, true);
    assert_eq!(ends.waiting(), 1 + UNHEARD_ENDS);
    wait_until(|| victim.ends.calls().len() >= 4);
    let refused = victim.ends.calls();
    // Pauses of 5, 10, 20, 40, 80, 160 ms, then 200 ms each.
    let most = 8 + begin.elapsed().as_millis() as usize / 200;
    assert!(refused.len() <= most, "{} calls", refused.len());
    assert!(refused[0].len() <= MAX_ENDS && refused.iter().all(|call| *call == refused[0]), "{refused:?}");
    victim.ends.are_heard.store(true, Ordering::SeqCst);
    wait_until(|| ends.waiting() == 0);
    let told = victim.ends.calls();
    let (calls, all) = (told.len() - refused.len(), told.concat().into_iter().collect::<HashSet<_>>());
    println!("{} ends in {calls} calls", all.len());
    assert!(all.len() == UNHEARD_ENDS + 1 && all.contains(&(1 << 32)), "{} ends", all.len());
    // The first call may have had one end alone, and may have been refused a few times more.
    assert!(calls <= UNHEARD_ENDS / MAX_ENDS + 8, "{calls} calls");
    assert!(told.iter().all(|call| call.len() <= MAX_ENDS));
}

#[test]
fn the_end_of_an_answered_request_is_told_beside_many_that_were_given_up() {
    let victim = Victim::of(|_| vec![first(1, 1)]);
    let ends = victim.ends();
    (0..2 * UNHEARD_ENDS as u64).for_each(|id| ends.tell(id, true));
    ends.tell(1 << 32, false);
    victim.ends.are_heard.store(true, Ordering::SeqCst);
    wait_until(|| ends.waiting() == 0);
    assert!(victim.ends.calls().concat().contains(&(1 << 32)), "not told");
}

#[test]
fn a_sender_whose_link_has_ended_is_told_nothing_more() {
    let victim = Victim::of(|_| vec![first(1, 1)]);
    let ends = victim.ends();
    ends.tell(1, true);
    wait_until(|| victim.ends.calls().len() >= 2);
    victim.caller.forget_ends(&peer().name);
    wait_until(|| ends.waiting() == 0);
    let told = victim.ends.calls().len();
    std::thread::sleep(Duration::from_millis(700));
    // One call may have been on its way.
    assert!(victim.ends.calls().len() <= told + 1, "{:?}", victim.ends.calls());
}

#[test]
fn a_sender_that_hears_of_no_clean_up_gets_few_calls_for_all_its_links() {
    let victim = Victim::of(|_| vec![first(1, 1)]);
    victim.answer().unwrap().expect("a value");
    let ends = Ends { victim: &victim, waiting: Arc::default() };
    let begin = Instant::now();
    for link in 1..=1000 {
        victim.caller.cleanup_all(peer(), link);
        ends.tell(link, true);
    }
    // The requests of earlier links are covered.
    wait_until(|| ends.waiting() == 1);
    let clean_ups = || victim.ends.clean_ups.lock().unwrap().clone();
    std::thread::sleep(Duration::from_millis(700));
    // Calls for earlier links may have been on their way.
    let calls = clean_ups().iter().filter(|first| **first == 1000).count();
    // Pauses of 5, 10, 20, 40, 80, 160 ms, then 200 ms each.
    let most = 8 + begin.elapsed().as_millis() as usize / 200;
    assert!(calls <= most, "{calls} calls");
    let earlier = clean_ups().len();
    wait_until(|| clean_ups().len() > earlier);
    assert!(clean_ups()[earlier..].iter().all(|first| *first == 1000), "an earlier link is told of");
    assert!(victim.ends.calls().is_empty(), "ends of a link are told after its clean-up");
    victim.ends.are_heard.store(true, Ordering::SeqCst);
    victim.ends.clean_ups_are_heard.store(true, Ordering::SeqCst);
    wait_until(|| ends.waiting() == 0);
    assert_eq!(victim.ends.calls(), [[1000]]);
}
