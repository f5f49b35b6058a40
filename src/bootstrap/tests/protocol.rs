//! Calls of peers and their answers: repeated, out of order, invalid, or not calls at all.

use super::super::auth::{AuthSettings, Authenticator};
use super::super::connector::Connector;
use super::super::generated as grpc;
use super::super::generated::bootstrap_client::BootstrapClient;
use super::super::server::READY_WAIT;
use super::super::shared::task;
use super::super::thread::{MAX_CALLS, MAX_HEADERS};
use super::*;
use crate::bootstrap::peering::MAX_OFFER;
use crate::bootstrap::service::PROTOCOL_VERSION;
use std::io::Write;
use std::net::TcpStream;
use tonic::transport::{Channel, Endpoint};

/// A peer made of single calls, as worker/0 of two, against a real worker/1.
pub(super) struct Raw {
    pub(super) runtime: tokio::runtime::Runtime,
    pub(super) grpc: BootstrapClient<Channel>,
    pub(super) channel: Channel,
    pub(super) caller: grpc::Caller,
}

impl Raw {
    pub(super) fn new(cluster: &Cluster, life: u64) -> Self {
        Self::proving(cluster, life, name("worker", 0), name("worker", 1))
    }

    /// Its connection proves `me` to the member at the address of `to`.
    pub(super) fn proving(cluster: &Cluster, life: u64, me: TaskId, to: TaskId) -> Self {
        let address = cluster.address(&to).unwrap().to_string();
        let auth = Arc::new(Authenticator::open(&AuthSettings::Uid, &me).unwrap());
        let connector = Connector { auth, peer: to.clone(), address, limit: LONG };
        let open = async |to: Endpoint| to.connect_with_connector(connector).await.unwrap();
        Self::over(open, cluster, life, me, to)
    }

    /// Calls the member at the address of `to` as `me`, over a channel that `open` makes.
    pub(super) fn over(
        open: impl AsyncFnOnce(Endpoint) -> Channel,
        cluster: &Cluster,
        life: u64,
        me: TaskId,
        to: TaskId,
    ) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let address = cluster.address(&to).unwrap();
        let channel = runtime.block_on(open(Endpoint::from_shared(format!("http://{address}")).unwrap()));
        let grpc = BootstrapClient::new(channel.clone());
        let caller = grpc::Caller {
            version: PROTOCOL_VERSION,
            cluster_digest: cluster.digest(),
            from: Some(task(&me)),
            incarnation: life,
            to: Some(task(&to)),
            to_incarnation: 0,
        };
        Raw { runtime, grpc, channel, caller }
    }

    pub(super) fn hello(&mut self) -> Result<grpc::HelloResponse, tonic::Status> {
        let member = grpc::Member { incarnation: self.caller.incarnation, host_id: "raw".into() };
        let request = grpc::HelloRequest {
            caller: Some(self.caller.clone()),
            member: Some(member),
            cluster: "unread".into(),
            lack: String::new(),
        };
        Ok(self.runtime.block_on(self.grpc.hello(request))?.into_inner())
    }

    pub(super) fn offer(
        &mut self,
        generation: u64,
        offer: impl Into<Vec<u8>>,
    ) -> Result<String, tonic::Status> {
        let request = grpc::GetRemoteAddressRequest {
            caller: Some(self.caller.clone()),
            generation,
            offer: offer.into(),
        };
        let answer = self.runtime.block_on(self.grpc.get_remote_address(request))?.into_inner();
        Ok(String::from_utf8(answer.offer).unwrap())
    }

    pub(super) fn ready(&mut self, generation: u64) -> Result<grpc::ReadyResponse, tonic::Status> {
        let progress = grpc::Progress::Connected as i32;
        let caller = Some(self.caller.clone());
        let request =
            grpc::ReadyRequest { caller, generation, progress, reason: String::new(), is_final: false };
        Ok(self.runtime.block_on(self.grpc.ready(request))?.into_inner())
    }

    /// How long so many calls with `ready` take at once, while the other side still connects.
    pub(super) fn await_readies(&self, calls: u32) -> Duration {
        let progress = grpc::Progress::Connected as i32;
        let caller = Some(self.caller.clone());
        let request =
            grpc::ReadyRequest { caller, generation: 1, progress, reason: String::new(), is_final: false };
        let begin = Instant::now();
        let answers = self.runtime.block_on(async {
            let calls = (0..calls).map(|_| {
                let (mut grpc, request) = (self.grpc.clone(), request.clone());
                async move { grpc.ready(request).await }
            });
            calls.collect::<tokio::task::JoinSet<_>>().join_all().await
        });
        let took = begin.elapsed();
        println!("{calls} calls, {MAX_CALLS} at a time: {took:?}");
        for answer in answers {
            assert_eq!(answer.unwrap().into_inner().progress, grpc::Progress::Connecting as i32);
        }
        took
    }

    pub(super) fn heartbeat(&mut self, generation: u64) -> grpc::HeartbeatResponse {
        let request = grpc::HeartbeatRequest { caller: Some(self.caller.clone()), generation };
        self.runtime.block_on(self.grpc.heartbeat(request)).unwrap().into_inner()
    }

    pub(super) fn leave(&mut self, reason: &str) -> Result<(), tonic::Status> {
        let caller = Some(self.caller.clone());
        let request = grpc::LeaveRequest { caller, reason: reason.into(), ..Default::default() };
        self.runtime.block_on(self.grpc.leave(request)).map(drop)
    }

    /// Calls with `ready` until the other side is connected, too.
    pub(super) fn link(&mut self, generation: u64) {
        self.offer(generation, format!("generation {generation}")).unwrap();
        loop {
            let answer = self.ready(generation).unwrap();
            assert_ne!(answer.progress, grpc::Progress::Failed as i32, "{}", answer.reason);
            if answer.progress == grpc::Progress::Connected as i32 {
                return;
            }
        }
    }
}

fn pair() -> (Member, Raw) {
    let cluster = workers(2);
    let member = Member::start(options(&cluster, 1));
    let raw = Raw::new(&cluster, 7);
    (member, raw)
}

#[test]
fn a_repeated_exchange_gets_the_same_answer_and_makes_nothing_new() {
    let (member, mut raw) = pair();
    raw.hello().unwrap();
    let answer = raw.offer(1, "generation 1").unwrap();
    for _ in 0..3 {
        assert_eq!(raw.offer(1, "generation 1").unwrap(), answer);
    }
    raw.link(1);
    assert_eq!(raw.offer(1, "generation 1").unwrap(), answer, "also once it is up");
    assert_eq!(raw.ready(1).unwrap().progress, grpc::Progress::Connected as i32, "a repeated Ready, too");
    assert_eq!(member.peering.prepared.lock().unwrap().len(), 1);
    assert_eq!(member.peering.connected.lock().unwrap().len(), 1);
    assert_eq!(member.peering.told(), [Told::Ready(name("worker", 0), 1)]);
}

#[test]
fn the_link_does_not_count_before_the_other_side_has_said_ready() {
    let (member, mut raw) = pair();
    raw.hello().unwrap();
    raw.offer(1, "generation 1").unwrap();
    while member.peering.connected.lock().unwrap().is_empty() {
        std::thread::sleep(Duration::from_millis(5));
    }
    std::thread::sleep(Duration::from_millis(100));
    assert!(member.peering.told().is_empty());
    raw.ready(1).unwrap();
    member.peering.await_ready(&name("worker", 0), 1);
    assert!(raw.heartbeat(1).linked);
}

#[test]
fn a_side_that_never_says_ready_is_given_up() {
    let cluster = workers(2);
    let hasty = BootstrapOptions { link_timeout: Duration::from_secs(2), ..options(&cluster, 1) };
    let member = Member::start(hasty);
    let mut raw = Raw::new(&cluster, 7);
    raw.hello().unwrap();
    raw.offer(1, "generation 1").unwrap();
    member.peering.await_told(|told| matches!(told, Told::Abandoned(..)).then_some(()));
    let answer = raw.ready(1).unwrap();
    assert_eq!(answer.progress, grpc::Progress::Failed as i32);
    assert!(answer.reason.contains("did not say within 2s"), "{}", answer.reason);
    raw.link(2);
}

#[test]
fn another_offer_for_the_same_generation_and_an_old_generation_are_refused() {
    let (member, mut raw) = pair();
    raw.hello().unwrap();
    raw.link(3);
    let error = raw.offer(3, "generation 3, but other").unwrap_err();
    assert!(error.message().contains("with another offer"), "{error}");
    for generation in [0, 2] {
        let error = raw.offer(generation, "old").unwrap_err();
        assert!(error.message().contains("is not the present one, which is 3"), "{error}");
    }
    for generation in [1 << 32, u64::MAX] {
        let error = raw.offer(generation, "wild").unwrap_err();
        assert!(error.message().contains("is too high"), "{error}");
    }
    assert_eq!(member.peering.told(), [Told::Ready(name("worker", 0), 3)]);
}

/// A life of the peer spends every generation that there is, and the next life is an honest one.
#[test]
fn a_life_that_lies_about_generations_wedges_no_later_life() {
    let (member, mut raw) = pair();
    raw.hello().unwrap();
    raw.link(u32::MAX.into());
    assert!(raw.offer(u64::from(u32::MAX) + 1, "one more").unwrap_err().message().contains("is too high"));
    raw.leave("enough").unwrap();
    raw.caller.incarnation = 8;
    raw.hello().unwrap();
    raw.link(1);
    assert!(raw.heartbeat(1).linked);
    assert_eq!(member.service.linked()[0].number, u64::from(u32::MAX) + 1);
}

#[test]
fn what_is_meant_for_an_earlier_life_of_this_process_changes_nothing() {
    let (member, mut raw) = pair();
    raw.hello().unwrap();
    raw.caller.to_incarnation = member.incarnation.get() ^ 1;
    for error in [raw.offer(1, "generation 1").unwrap_err(), raw.ready(1).map(|_| ()).unwrap_err()] {
        assert!(error.message().contains("of worker/1 is over"), "{error}");
    }
    assert!(member.peering.prepared.lock().unwrap().is_empty());
    raw.caller.to_incarnation = member.incarnation.get();
    raw.link(1);
}

#[test]
fn a_newer_generation_ends_the_older_one() {
    let (member, mut raw) = pair();
    raw.hello().unwrap();
    raw.link(1);
    raw.link(2);
    let (_, cause) = member.peering.await_loss();
    assert_eq!(cause, LossCause::Closed("it has started generation 2".into()));
    assert!(raw.heartbeat(2).linked);
    let old = raw.heartbeat(1);
    assert!(!old.linked && !old.reason.is_empty());
    member.peering.assert_no_endpoint_is_left();
}

#[test]
fn a_life_that_was_replaced_or_has_left_is_refused() {
    let (member, mut raw) = pair();
    raw.hello().unwrap();
    raw.link(1);
    raw.leave("bye\u{7}").unwrap();
    raw.leave("bye\u{7}").expect("leaving twice does no harm");
    let (_, cause) = member.peering.await_loss();
    assert_eq!(cause, LossCause::Left("bye\\u{7}".into()));
    assert!(raw.hello().unwrap_err().message().contains("is over"));
    assert!(!raw.heartbeat(1).linked);
    raw.caller.incarnation = 8;
    raw.hello().unwrap();
    raw.link(1);
    member.peering.await_ready(&name("worker", 0), 1);
    assert_eq!(member.service.linked()[0].number, 2, "this side counts on");
    raw.caller.incarnation = 9;
    let error = raw.hello().unwrap_err();
    assert!(error.message().contains("taken by another incarnation"), "{error}");
    assert!(error.message().contains("incarnation 0000000000000009"), "{error}");
}

#[test]
fn a_peer_that_stood_still_is_lost_and_is_linked_again_in_the_same_life_when_it_goes_on() {
    let cluster = workers(2);
    let silence = Duration::from_millis(300);
    let quick = BootstrapOptions { heartbeat: Duration::from_millis(50), silence, ..options(&cluster, 1) };
    let member = Member::start(quick);
    let mut raw = Raw::new(&cluster, 7);
    raw.hello().unwrap();
    raw.link(1);
    let (_, cause) = member.peering.await_loss();
    assert!(matches!(cause, LossCause::Silent { after, .. } if after >= silence), "{cause}");
    let answer = raw.heartbeat(1);
    assert!(!answer.linked && answer.reason.contains("nothing was heard"), "{}", answer.reason);
    raw.hello().unwrap();
    raw.link(2);
    member.peering.await_ready(&name("worker", 0), 2);
}

/// Its kernel accepts connections that nothing answers. That is not a refusal, which would mean a
/// dead process.
#[test]
fn a_linked_peer_that_hangs_is_held_for_silent_after_the_bound() {
    let cluster = workers(2);
    let hanging = TcpListener::bind(address(&cluster, "worker", 0)).unwrap();
    let options = options(&cluster, 1);
    // Longer than a call may take: the first was made before there was a link to watch over.
    let silence = options.silence;
    let member = Member::start(options);
    let mut raw = Raw::new(&cluster, 7);
    raw.hello().unwrap();
    raw.link(1);
    let linked = Instant::now();
    member.peering.await_ready(&name("worker", 0), 1);
    let (who, cause) = member.peering.await_loss();
    let took = linked.elapsed();
    println!("{cause}; known {took:?} after it was linked");
    assert_eq!(who, name("worker", 0));
    assert!(matches!(cause, LossCause::Silent { after, .. } if after >= silence), "{cause}");
    assert!(took < 3 * silence, "the call that nobody answers has no bound: {took:?}");
    let called = hanging.set_nonblocking(true).and_then(|()| hanging.accept());
    assert!(called.is_ok(), "it was called, and not refused: {called:?}");
    // A refusal would have told more.
    assert!(!member.peering.told().iter().any(|told| matches!(told, Told::Gone(..))));
}

#[test]
fn saying_goodbye_to_a_peer_that_does_not_answer_is_bounded() {
    let cluster = workers(2);
    let mute = TcpListener::bind(address(&cluster, "worker", 0)).unwrap();
    let member = Member::start(options(&cluster, 1));
    let mut raw = Raw::new(&cluster, 7);
    raw.hello().unwrap();
    raw.link(1);
    let begin = Instant::now();
    member.stop();
    println!("stopped after {:?}", begin.elapsed());
    assert!(begin.elapsed() < Duration::from_millis(2500), "{:?}", begin.elapsed());
    drop(mute);
}

#[test]
fn a_caller_that_says_nonsense_is_refused_with_the_reason() {
    let cluster = workers(2);
    let member = Member::start(options(&cluster, 1));
    let mut raw = Raw::new(&cluster, 7);
    let good = raw.caller.clone();
    let worker = |index| Some(grpc::Task { job: "worker".into(), index });
    for (bad, reason) in [
        (grpc::Caller { version: 9, ..good.clone() }, "speaks version 9"),
        (grpc::Caller { cluster_digest: 1, ..good.clone() }, "another cluster"),
        (grpc::Caller { incarnation: 0, ..good.clone() }, "incarnation 0"),
        (grpc::Caller { from: None, ..good.clone() }, "lacks a task's name"),
        (
            grpc::Caller { from: worker(5), ..good.clone() },
            "speaks for worker/0, and the request is worker/5's",
        ),
        (grpc::Caller { from: worker(1), ..good.clone() }, "speaks for worker/0"),
        (grpc::Caller { to: worker(0), ..good.clone() }, "meant to call worker/0 and has reached worker/1"),
        (
            grpc::Caller { from: Some(grpc::Task { job: "x".repeat(100_000), index: 0 }), ..good.clone() },
            "must be 1 to 64 letters",
        ),
        (
            grpc::Caller { from: Some(grpc::Task { job: "a\nb".into(), index: 0 }), ..good.clone() },
            "job \"a\\nb\" must be 1 to 64 letters",
        ),
    ] {
        raw.caller = bad;
        let error = raw.hello().unwrap_err();
        assert!(error.message().contains(reason), "{reason}: {error}");
    }
    for (other, reason) in
        [(5, "worker/5 is not in the cluster of worker/1"), (1, "the name worker/1 is taken")]
    {
        let mut raw = Raw::proving(&cluster, 7, name("worker", other), name("worker", 1));
        let error = raw.hello().unwrap_err();
        assert!(error.message().contains(reason), "{reason}: {error}");
    }
    raw.caller = good;
    let error = raw.offer(1, "before Hello").unwrap_err();
    assert!(error.message().contains("say Hello first"), "{error}");
    raw.hello().unwrap();
    let error = raw.offer(1, vec![0; MAX_OFFER + 1]).unwrap_err();
    assert!(error.message().contains("65537 bytes"), "{error}");
    let error = raw.offer(1, vec![0; 10 * MAX_OFFER]).unwrap_err();
    assert!(error.message().contains("too large"), "{error}");
    let answer = raw.ready(99).unwrap();
    assert_eq!(answer.progress, grpc::Progress::Failed as i32);
    raw.link(1);
    assert_eq!(member.peering.told(), [Told::Ready(name("worker", 0), 1)]);
}

/// Each call takes the time for which `Ready` waits for the other side.
#[test]
fn no_more_calls_of_a_connection_are_served_at_a_time_than_the_bound() {
    let (member, mut raw) = pair();
    *member.peering.delay.lock().unwrap() = Duration::from_secs(4);
    raw.hello().unwrap();
    raw.offer(1, "generation 1").unwrap();
    let took = raw.await_readies(2 * MAX_CALLS);
    assert!(took >= 2 * READY_WAIT, "all at a time: {took:?}");
}

#[test]
fn headers_beyond_the_bound_are_refused() {
    let (_member, mut raw) = pair();
    raw.hello().unwrap();
    let mut beat = |len: u32| {
        let caller = Some(raw.caller.clone());
        let mut request = tonic::Request::new(grpc::HeartbeatRequest { caller, generation: 1 });
        request.metadata_mut().insert("x-long", "x".repeat(len as usize).parse().unwrap());
        raw.runtime.block_on(raw.grpc.heartbeat(request))
    };
    beat(MAX_HEADERS / 2).expect("below the bound");
    beat(MAX_HEADERS).expect_err("beyond the bound, with the other headers");
    beat(MAX_HEADERS / 2).expect("the connection goes on");
}

#[test]
fn the_side_that_sorts_last_may_not_start() {
    let cluster = workers(2);
    let _first = Member::start(options(&cluster, 0));
    let mut raw = Raw::proving(&cluster, 7, name("worker", 1), name("worker", 0));
    raw.hello().unwrap();
    let error = raw.offer(1, "generation 1").unwrap_err();
    assert!(error.message().contains("worker/0 sorts before worker/1"), "{error}");
}

#[test]
fn garbage_on_the_port_does_not_hurt() {
    let cluster = workers(2);
    let first = Member::start(options(&cluster, 0));
    let address = address(&cluster, "worker", 0);
    let mut open = Vec::new();
    let noise: Vec<u8> =
        (0..100_000u32).map(|number| (number.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    let after_preface = [preface.as_slice(), &noise].concat();
    for bytes in [b"".as_slice(), b"GET / HTTP/1.1\r\n\r\n", &noise, preface, &after_preface] {
        for _ in 0..8 {
            let mut stream = TcpStream::connect(&address).unwrap();
            // It may be closed half way, which is fine.
            drop(stream.write_all(bytes));
            open.push(stream);
        }
    }
    let second = Member::start(options(&cluster, 1));
    first.join();
    second.join();
    assert_eq!(first.service.state(), NodeState::Connected);
    drop(open);
}
