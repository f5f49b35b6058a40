//! What a member that lies gets from the one that calls it: an error with its words, cut.

use super::super::generated as grpc;
use super::super::peering::MAX_OFFER;
use super::super::shared::MAX_REASON;
use super::lying_sender::serve;
use super::protocol::Raw;
use super::*;
use grpc::bootstrap_server::{Bootstrap, BootstrapServer};
use http_body_util::{BodyExt, Empty};
use std::convert::Infallible;
use std::future::{Ready, ready};
use std::task::{Context, Poll};
use tokio::sync::Notify;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::{Request, Response, Status};

/// Worker 1. Each field is one of its answers.
#[derive(Clone, Default)]
struct Liar {
    refusal: Option<String>,
    /// Counts the answers, which come from two lives in turn.
    lives: Option<Arc<AtomicU64>>,
    /// The first life answers once, and not before this says so. Then the second one answers.
    late: Option<Arc<Notify>>,
    offer_len: usize,
    reason: String,
}

type Answer<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl Bootstrap for Liar {
    async fn hello(&self, _request: Request<grpc::HelloRequest>) -> Answer<grpc::HelloResponse> {
        let answers = self.lives.as_ref().map_or(0, |lives| lives.fetch_add(1, Ordering::Relaxed));
        let incarnation = 9 + if self.late.is_some() { answers.min(1) } else { answers % 2 };
        if let Some(late) = self.late.as_ref().filter(|_| answers == 0) {
            late.notified().await;
        }
        match &self.refusal {
            Some(refusal) => Err(Status::permission_denied(refusal.clone())),
            None => Ok(Response::new(grpc::HelloResponse {
                member: Some(grpc::Member { incarnation, host_id: "there".into() }),
                unanswered: String::new(),
            })),
        }
    }

    async fn get_remote_address(
        &self,
        request: Request<grpc::GetRemoteAddressRequest>,
    ) -> Answer<grpc::GetRemoteAddressResponse> {
        let mut offer = format!("generation {}", request.get_ref().generation).into_bytes();
        offer.resize(self.offer_len.max(offer.len()), b'.');
        Ok(Response::new(grpc::GetRemoteAddressResponse { offer }))
    }

    async fn ready(&self, _request: Request<grpc::ReadyRequest>) -> Answer<grpc::ReadyResponse> {
        let (progress, reason) = (grpc::Progress::Failed as i32, self.reason.clone());
        Ok(Response::new(grpc::ReadyResponse { progress, reason, is_final: false }))
    }

    async fn heartbeat(&self, _request: Request<grpc::HeartbeatRequest>) -> Answer<grpc::HeartbeatResponse> {
        Err(Status::unimplemented("it has no link"))
    }

    async fn leave(&self, _request: Request<grpc::LeaveRequest>) -> Answer<grpc::LeaveResponse> {
        Ok(Response::new(grpc::LeaveResponse {}))
    }
}

/// The error of worker 0's join with this liar, which contains `part`.
fn error_with(liar: &Liar, part: &str) -> String {
    let cluster = workers(2);
    let _end = serve(&cluster, BootstrapServer::new(liar.clone()));
    Member::start(options(&cluster, 0)).await_missing(part)
}

#[test]
fn the_words_of_a_refusal_are_cut_and_control_no_terminal() {
    let refusal = format!("\x1b[2J{}", "no".repeat(2 * MAX_REASON));
    let error = error_with(&Liar { refusal: Some(refusal), ..Liar::default() }, "refused this process");
    assert!(error.contains("\\u{1b}[2Jno") && error.contains("...") && !error.contains('\x1b'), "{error}");
    assert!(error.len() < 3 * MAX_REASON, "{} bytes", error.len());
}

#[test]
fn an_answer_of_a_life_that_was_replaced_is_refused_with_the_reason() {
    let liar = Liar { lives: Some(Arc::default()), ..Liar::default() };
    let error = error_with(&liar, "the answer of worker/1 is refused");
    let why = "incarnation 0000000000000009 of worker/1 is over: it has left, or another one has taken its";
    assert!(error.contains(why), "{error}");
}

/// The answer of a life that has ended comes after the next life has called.
#[test]
fn a_late_answer_does_not_shut_the_next_life_out() {
    let (lives, late) = (Arc::<AtomicU64>::default(), Arc::<Notify>::default());
    let liar = Liar { lives: Some(lives.clone()), late: Some(late.clone()), ..Liar::default() };
    let cluster = workers(2);
    let _end = serve(&cluster, BootstrapServer::new(liar));
    let (begin, _member) = (Instant::now(), Member::start(options(&cluster, 0)));
    let await_calls = |calls| {
        while lives.load(Ordering::Relaxed) < calls {
            assert!(begin.elapsed() < LONG, "fewer than {calls} calls");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    await_calls(1);
    let mut next = Raw::proving(&cluster, 10, name("worker", 1), name("worker", 0));
    next.hello().unwrap();
    late.notify_one();
    await_calls(3);
    next.hello().expect("it is the life that answers now");
}

#[test]
fn an_offer_beyond_the_bound_is_not_taken() {
    let liar = Liar { offer_len: MAX_OFFER + 1, ..Liar::default() };
    let error = error_with(&liar, "its link failed");
    assert!(error.contains(&format!("an offer of {} bytes; at most {MAX_OFFER}", MAX_OFFER + 1)), "{error}");
    // The longest one is taken, and what follows fails.
    let liar = Liar { offer_len: MAX_OFFER, reason: "it is a lie".into(), ..Liar::default() };
    error_with(&liar, "worker/1 says: it is a lie");
}

#[test]
fn the_reason_of_a_failed_attempt_is_cut_and_controls_no_terminal() {
    let liar = Liar { reason: format!("\x1b[2J{}", "no".repeat(MAX_REASON)), ..Liar::default() };
    let error = error_with(&liar, "nono");
    assert!(error.contains("\\u{1b}[2Jno") && error.contains("...") && !error.contains('\x1b'), "{error}");
    assert!(error.len() < 2 * MAX_REASON, "{} bytes", error.len());
}

/// Answers each call with a status whose details are in no base64.
#[derive(Clone, Default)]
struct NoBase64 {
    /// In the trailers of the answer. Otherwise the answer has headers alone.
    in_trailers: bool,
    calls: Arc<AtomicU64>,
}

impl Service<http::Request<Body>> for NoBase64 {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<http::Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _request: http::Request<Body>) -> Self::Future {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let status =
            [("grpc-status", "13"), ("grpc-message", "it%20lies"), ("grpc-status-details-bin", "%%%")];
        let status: http::HeaderMap =
            status.map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).into_iter().collect();
        let mut answer = http::Response::default();
        answer.headers_mut().insert("content-type", "application/grpc".parse().unwrap());
        match self.in_trailers {
            true => *answer.body_mut() = Body::new(Empty::new().with_trailers(ready(Some(Ok(status))))),
            false => answer.headers_mut().extend(status),
        }
        ready(Ok(answer))
    }
}

/// tonic panics on such a status, and the thread that calls the peer would end with it.
#[test]
fn a_status_with_details_in_no_base64_is_an_error_like_any_other() {
    for in_trailers in [false, true] {
        let liar = NoBase64 { in_trailers, ..NoBase64::default() };
        let cluster = workers(2);
        let _end = serve(&cluster, liar.clone());
        let (begin, member) = (Instant::now(), Member::start(options(&cluster, 0)));
        member.await_missing("it lies");
        // It calls again, and stops in time.
        while liar.calls.load(Ordering::Relaxed) < 3 {
            assert!(begin.elapsed() < LONG, "no other call");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
