//! Attacks on the bootstrap port, over real sockets. The attackers are a process of another user, a
//! caller without a proof, a member that speaks for another, and floods.

use super::super::acceptor::{FIRST_REQUEST, PROOF_LIMIT};
use super::super::auth::{AuthMode, AuthSettings, Authenticator, Verdict};
use super::super::connector::Connector;
use super::super::generated as grpc;
use super::super::generated::bootstrap_client::BootstrapClient;
use super::super::places::{MAX_CANDIDATES, MAX_OF_OTHERS};
use super::super::shared::task;
use super::certificates::{Authority, write};
use super::protocol::Raw;
use super::*;
use hyper_util::rt::TokioIo;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::runtime::Runtime;
use tonic::codegen::Service;
use tonic::codegen::http::Uri;
use tonic::transport::Endpoint;

/// A user that is not root, and owns nothing.
const NOBODY: u32 = 65534;
/// The start of HTTP/2, an empty SETTINGS frame and a PING.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
const PING: &[u8] = b"\0\0\x08\x06\0\0\0\0\0tensors?";

/// Runs `test` again in a process of another user, with `part` to play. Returns what it printed;
/// `None` if this process may not.
fn as_other_user(test: &str, part: &str) -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can start a process of another user");
        return None;
    }
    Some(run_again(&format!("strangers::{test}"), part, Some(NOBODY)))
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// Every call of the service, under any name, over a connection without a proof. None of them
/// reaches the service: its refusals would have no source.
fn assert_no_call_without_a_proof_is_read(cluster: &Cluster, digest: u64) {
    let runtime = runtime();
    let mut said: Vec<tonic::Status> = Vec::new();
    for (me, incarnation) in [("worker/0", 1), ("worker/1", 1), ("worker/7", 1), ("worker/0", 7)] {
        let address = address(cluster, "worker", 1);
        let channel = Endpoint::from_shared(format!("http://{address}")).unwrap().timeout(LONG);
        let mut grpc = runtime.block_on(async { BootstrapClient::new(channel.connect_lazy()) });
        let caller = Some(grpc::Caller {
            version: PROTOCOL_VERSION,
            cluster_digest: digest,
            from: Some(task(&me.parse().unwrap())),
            incarnation,
            to: Some(task(&name("worker", 1))),
            to_incarnation: 0,
        });
        let member = Some(grpc::Member { incarnation, host_id: "raw".into() });
        let hello = grpc::HelloRequest { caller: caller.clone(), member, ..Default::default() };
        let offer = grpc::GetRemoteAddressRequest { caller: caller.clone(), generation: 2, offer: vec![1] };
        let ready = grpc::ReadyRequest {
            caller: caller.clone(),
            generation: 1,
            progress: grpc::Progress::Failed as i32,
            reason: "forged".into(),
            is_final: true,
        };
        let heartbeat = grpc::HeartbeatRequest { caller: caller.clone(), generation: 1 };
        let leave = grpc::LeaveRequest { caller, reason: "disk full".into(), ..Default::default() };
        runtime.block_on(async {
            said.push(grpc.hello(hello).await.map(|_| ()).unwrap_err());
            said.push(grpc.get_remote_address(offer).await.map(|_| ()).unwrap_err());
            said.push(grpc.ready(ready).await.map(|_| ()).unwrap_err());
            said.push(grpc.heartbeat(heartbeat).await.map(|_| ()).unwrap_err());
            said.push(grpc.leave(leave).await.map(|_| ()).unwrap_err());
        });
    }
    assert_eq!(said.len(), 20);
    for status in said {
        assert!(std::error::Error::source(&status).is_some(), "the service has answered: {status:?}");
    }
}

/// What the port of a member says to a caller that sends `bytes`: a greeting, and the end.
fn assert_only_greeted(address: &str, bytes: &[u8], greeter: &Authenticator, verdict: Verdict) {
    let mut stream = TcpStream::connect(address).unwrap();
    // It may be closed half way.
    drop(stream.write_all(bytes));
    let got = read_all(&mut stream, LONG);
    // A mark, the mode, a verdict and a number: no name, incarnation, address or cluster.
    let greeting = greeter.refusal(verdict);
    let before_number = &greeting.as_ref()[..10];
    assert!(got.len() == 26 && got.starts_with(before_number), "{got:?}, not {verdict:?}");
}

/// Reads until the end of the connection, which comes within `limit`.
fn read_all(stream: &mut TcpStream, limit: Duration) -> Vec<u8> {
    let (begin, mut all) = (Instant::now(), Vec::new());
    stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    loop {
        assert!(begin.elapsed() < limit, "still open after {limit:?}; it has sent {} bytes", all.len());
        let mut bytes = [0; 1024];
        match stream.read(&mut bytes) {
            Ok(0) => return all,
            Ok(len) => all.extend(&bytes[..len]),
            Err(error) if matches!(error.kind(), std::io::ErrorKind::WouldBlock) => {}
            Err(_) => return all,
        }
    }
}

/// Opens connections as worker/0 does, and looks neither at the greeting's mode and verdict nor at
/// the user at the other end.
struct BlindConnector(String);

impl Service<Uri> for BlindConnector {
    type Response = TokioIo<tokio::net::TcpStream>;
    type Error = std::io::Error;
    type Future = Pin<Box<dyn Future<Output = std::io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _uri: Uri) -> Self::Future {
        let address = self.0.clone();
        Box::pin(async move {
            let mut stream = tokio::net::TcpStream::connect(address).await?;
            let mut greeting = [0; 26];
            stream.read_exact(&mut greeting).await?;
            let opening = [&[26], &greeting[10..], &[0; 4], b"worker"].concat();
            stream.write_all(&opening).await?;
            // The byte that admits, before HTTP/2. It goes on without it, too.
            drop(stream.read_u8().await);
            Ok(TokioIo::new(stream))
        })
    }
}

/// Says what the linked life of worker/0 would say, to worker/1. Nothing of it is answered.
fn assert_no_word_of_an_impostor_is_read(cluster: &Cluster, life: u64) {
    let blind = BlindConnector(address(cluster, "worker", 1));
    let open = async |to: Endpoint| to.connect_with_connector_lazy(blind);
    let mut raw = Raw::over(open, cluster, life, name("worker", 0), name("worker", 1));
    let (hello, left) = (raw.hello().map(|answer| format!("{answer:?}")), raw.leave("disk full"));
    println!("Hello: {hello:?}; Leave: {left:?}");
    for outcome in [hello.map(drop), left] {
        let is_from_below = |status: &tonic::Status| std::error::Error::source(status).is_some();
        assert!(outcome.as_ref().is_err_and(is_from_below), "the service has answered: {outcome:?}");
    }
}

/// Everything that a stranger tries, knowing all but the proof: also the life of worker/0.
fn attack(cluster: &Cluster, life: u64) {
    let address = address(cluster, "worker", 1);
    assert_no_word_of_an_impostor_is_read(cluster, life);
    // Whatever it sends, it gets a greeting that refuses, and the end: also before its first byte.
    let greeter = Authenticator::open(&AuthSettings::Uid, &name("worker", 7)).unwrap();
    for bytes in [&[], PREFACE] {
        assert_only_greeted(&address, bytes, &greeter, Verdict::OtherUser);
    }
    for digest in [0, cluster.digest()] {
        assert_no_call_without_a_proof_is_read(cluster, digest);
    }
    // With the proofs of this user, in every way.
    let (runtime, me) = (runtime(), name("worker", 0));
    for settings in [AuthSettings::Uid, AuthSettings::Plain] {
        let auth = Arc::new(Authenticator::open(&settings, &me).unwrap());
        let peer = name("worker", 1);
        let connector = Connector { auth, peer, address: address.clone(), limit: LONG };
        let error = runtime.block_on(connector.connect()).unwrap_err();
        println!("{}: {error}", settings.mode());
        // Also if the member has closed the connection before the kernel was asked.
        let names_users = error.to_string().contains("runs as");
        assert!(names_users || settings.mode() != AuthMode::Uid, "{error}");
    }
}

#[test]
fn a_process_of_another_user_learns_nothing_and_ends_nothing() {
    if let Ok(part) = std::env::var(PART) {
        let (life, cluster) = part.split_once(' ').unwrap();
        return attack(&cluster.parse().unwrap(), life.parse().unwrap());
    }
    let cluster = workers(2);
    let members = linked(&cluster, 2);
    // Silent connections of this user have all the places. A stranger that took one would displace
    // one of them.
    let (begin, address) = (Instant::now(), address(&cluster, "worker", 1));
    let mut own: Vec<_> = (0..MAX_CANDIDATES).map(|_| TcpStream::connect(&address).unwrap()).collect();
    let test = "a_process_of_another_user_learns_nothing_and_ends_nothing";
    let part = format!("{} {cluster}", members[0].incarnation.get());
    if as_other_user(test, &part).is_none() {
        return;
    }
    own.retain_mut(|stream| still_open(stream, &mut Vec::new()));
    let (ended, took) = (MAX_CANDIDATES - own.len(), begin.elapsed());
    println!("{ended} connections have ended after {took:?}");
    // After that time they end in any case.
    assert!(ended == 0 || took >= PROOF_LIMIT, "{ended} were displaced");
    for member in &members {
        assert_eq!(member.service.state(), NodeState::Connected);
        assert_eq!(member.peering.told().len(), 1, "{:?}", member.peering.told());
    }
}

/// A process of another user listens where the peer should, and knows the protocol.
#[test]
fn a_process_of_another_user_at_a_members_address_is_told_nothing() {
    if let Ok(address) = std::env::var(PART) {
        let listener = TcpListener::bind(address).unwrap();
        let auth = Authenticator::open(&AuthSettings::Uid, &name("worker", 0)).unwrap();
        let greeting = auth.refusal(Verdict::Welcome);
        let mut got = Vec::new();
        // It goes on for a while, so that the member's last error is about this process.
        for _ in 0..8 {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(greeting.as_ref()).unwrap();
            got.extend(read_all(&mut stream, LONG));
        }
        println!("got {got:?}");
        return;
    }
    let cluster = workers(2);
    let member = Member::start(options(&cluster, 1));
    let test = "a_process_of_another_user_at_a_members_address_is_told_nothing";
    let squatted = address(&cluster, "worker", 0);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| as_other_user(test, &squatted));
        if rustix::process::geteuid().is_root() {
            let error = member.await_missing("runs as user 65534");
            assert!(error.contains("not proven to be worker/0"), "{error}");
        }
        if let Some(said) = other.join().unwrap() {
            assert!(said.contains("got []"), "{said}");
        }
    });
}

/// It also begins as a member does, and goes on without the proof.
fn assert_a_caller_without_a_proof_learns_nothing(auth: [AuthSettings; 2]) {
    let cluster = workers(2);
    let members = [0, 1].map(|task| {
        let auth = auth[task as usize].clone();
        Member::start(BootstrapOptions { auth, ..options(&cluster, task) })
    });
    members.iter().for_each(Member::join);
    for digest in [0, cluster.digest()] {
        assert_no_call_without_a_proof_is_read(&cluster, digest);
    }
    let greeter = Authenticator::open(&auth[0], &name("worker", 0)).unwrap();
    for bytes in [PREFACE, &[0], &[255; 300]] {
        // It may go on to a proof, which none of these bytes begins.
        assert_only_greeted(&address(&cluster, "worker", 0), bytes, &greeter, Verdict::Welcome);
    }
    // With uid the member knows that the caller is of this user.
    if auth[0].mode() != AuthMode::Uid {
        assert_no_word_of_an_impostor_is_read(&cluster, members[0].incarnation.get());
    }
    for member in &members {
        assert_eq!(member.service.state(), NodeState::Connected);
        assert_eq!(member.peering.told().len(), 1, "{:?}", member.peering.told());
    }
}

#[test]
fn a_caller_without_a_proof_learns_nothing_and_ends_nothing() {
    assert_a_caller_without_a_proof_learns_nothing([AuthSettings::Uid, AuthSettings::Uid]);
}

#[test]
fn a_caller_without_the_secret_learns_nothing_and_ends_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let secret = folder.path().join("secret");
    write(&secret, &[b'x'; 64]);
    assert_a_caller_without_a_proof_learns_nothing([(); 2].map(|()| AuthSettings::Secret(secret.clone())));
}

#[test]
fn a_caller_without_a_certificate_learns_nothing_and_ends_nothing() {
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let authority = Authority::new();
    let worker = |task: usize| AuthSettings::Tls(authority.worker(folders[task].path(), task as u32));
    assert_a_caller_without_a_proof_learns_nothing([worker(0), worker(1)]);
}

/// Its connection has proven worker/2, and its requests are worker/0's.
#[test]
fn a_member_does_not_speak_for_another() {
    let cluster = workers(3);
    let silence = Duration::from_millis(1500);
    let quick = BootstrapOptions { silence, ..options(&cluster, 1) };
    let victim = Member::start(quick);
    let mut first = Raw::new(&cluster, 7);
    first.hello().unwrap();
    first.link(1);
    let mut other = Raw::proving(&cluster, 9, name("worker", 2), name("worker", 1));
    other.hello().unwrap();
    other.caller = first.caller.clone();
    let begin = Instant::now();
    let mut refusals = vec![other.hello().unwrap_err(), other.offer(2, "generation 2").unwrap_err()];
    refusals.push(other.ready(1).unwrap_err());
    refusals.push(other.leave("disk full").unwrap_err());
    let caller = Some(other.caller.clone());
    for refusal in refusals {
        assert!(refusal.message().contains("this connection speaks for worker/2"), "{refusal}");
    }
    assert_eq!(victim.peering.told(), [Told::Ready(name("worker", 0), 1)]);
    // Forged heartbeats do not hide that worker/0 has stopped.
    while victim.peering.told().len() == 1 {
        let beat = grpc::HeartbeatRequest { caller: caller.clone(), generation: 1 };
        other.runtime.block_on(other.grpc.heartbeat(beat)).expect_err("forged");
        assert!(begin.elapsed() < LONG, "hidden");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(matches!(victim.peering.await_loss().1, LossCause::Silent { .. }));
}

/// It has a good proof, of a name that the cluster does not have.
#[test]
fn a_proven_caller_that_is_no_member_learns_nothing_of_the_cluster() {
    let cluster = workers(2);
    let members = linked(&cluster, 2);
    let mut stranger = Raw::proving(&cluster, 7, name("worker", 7), name("worker", 1));
    let good = stranger.caller.clone();
    for bad in [
        good.clone(),
        grpc::Caller { cluster_digest: 1, ..good.clone() },
        grpc::Caller { version: 9, ..good.clone() },
        grpc::Caller { to: None, incarnation: 0, ..good },
    ] {
        stranger.caller = bad;
        let left = stranger.leave("bye").unwrap_err();
        let refusals = [stranger.hello().unwrap_err(), stranger.offer(2, "x").unwrap_err(), left];
        for refusal in refusals.iter().chain([&stranger.ready(1).unwrap_err()]) {
            let said = "worker/7 is not in the cluster of worker/1: give all members the same cluster";
            assert_eq!(refusal.message(), said);
        }
    }
    for member in &members {
        assert_eq!(member.peering.told().len(), 1, "{:?}", member.peering.told());
    }
}

/// A member in another life than the one that is known.
#[test]
fn another_life_of_a_member_ends_nothing() {
    let cluster = workers(2);
    let victim = Member::start(options(&cluster, 1));
    let mut first = Raw::new(&cluster, 7);
    first.hello().unwrap();
    first.link(1);
    let mut second = Raw::new(&cluster, 8);
    let mut told = vec![second.hello().unwrap_err().message().to_owned()];
    assert!(told[0].contains("is taken by another incarnation"), "{told:?}");
    told.push(second.offer(2, "generation 2").unwrap_err().message().to_owned());
    told.push(second.ready(1).unwrap_err().message().to_owned());
    drop(second.leave("disk full"));
    let heard = second.heartbeat(1);
    assert!(!heard.linked);
    told.push(heard.reason);
    // It is not told whom to pose as.
    assert!(told.iter().all(|text| !text.contains("0000000000000007")), "{told:?}");
    assert!(first.heartbeat(1).linked);
    assert_eq!(victim.peering.told(), [Told::Ready(name("worker", 0), 1)]);
}

/// Opens `count` connections, and sends `bytes` on each again and again. Returns when the last one
/// has ended, and what it got.
fn busy(
    count: usize,
    opened: impl Fn() -> Option<TcpStream>,
    bytes: &[u8],
    pause: Duration,
) -> (Duration, Vec<u8>) {
    let begin = Instant::now();
    let mut open: Vec<_> = (0..count).filter_map(|_| opened().map(|stream| (stream, Vec::new()))).collect();
    println!("{} connections are open", open.len());
    let mut last = (Duration::ZERO, Vec::new());
    while !open.is_empty() {
        open.retain_mut(|(stream, got)| {
            let still = stream.write_all(bytes).is_ok() && still_open(stream, got);
            if !still {
                last = (begin.elapsed(), std::mem::take(got));
            }
            still
        });
        assert!(begin.elapsed() < LONG, "{} are still open", open.len());
        std::thread::sleep(pause);
    }
    last
}

fn still_open(stream: &mut TcpStream, got: &mut Vec<u8>) -> bool {
    stream.set_nonblocking(true).unwrap();
    let mut bytes = [0; 4096];
    loop {
        match stream.read(&mut bytes) {
            Ok(0) => return false,
            Ok(len) => got.extend(&bytes[..len]),
            Err(error) => return error.kind() == std::io::ErrorKind::WouldBlock,
        }
    }
}

/// An opening of 84 bytes whose bytes come so slowly that it is never complete.
#[test]
fn openings_that_come_byte_by_byte_end_in_seconds_and_keep_no_member_out() {
    let cluster = workers(2);
    let first = Member::start(options(&cluster, 0));
    let address = address(&cluster, "worker", 0);
    std::thread::scope(|scope| {
        let flood = scope.spawn(|| {
            let unproven = || TcpStream::connect(&address).ok();
            busy(2 * MAX_CANDIDATES, unproven, &[84], Duration::from_millis(200))
        });
        std::thread::sleep(Duration::from_millis(100));
        let begin = Instant::now();
        let second = Member::start(options(&cluster, 1));
        first.join();
        second.join();
        println!("joined after {:?}", begin.elapsed());
        assert!(begin.elapsed() < Duration::from_secs(5));
        let (open, got) = flood.join().unwrap();
        println!("the last connection without a proof was open for {open:?}");
        // The last ones were not displaced: their time was over.
        assert!((PROOF_LIMIT..PROOF_LIMIT * 5).contains(&open), "{open:?}");
        assert_eq!(got.len(), 26, "a greeting");
    });
}

/// The old attack of 66 connections, by a caller that has a proof: it has no member's place.
#[test]
fn proven_connections_without_a_valid_request_end_in_seconds_too() {
    let cluster = workers(2);
    let first = Member::start(options(&cluster, 0));
    let address = address(&cluster, "worker", 0);
    let runtime = runtime();
    let auth = Arc::new(Authenticator::open(&AuthSettings::Uid, &name("worker", 7)).unwrap());
    let proven = || {
        let (auth, peer, address) = (auth.clone(), name("worker", 0), address.clone());
        let connector = Connector { auth, peer, address, limit: LONG };
        let stream = runtime.block_on(connector.connect()).ok()?.into_tcp();
        let mut stream = stream.into_std().ok()?;
        stream.write_all(PREFACE).ok()?;
        Some(stream)
    };
    std::thread::scope(|scope| {
        let second = scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(200));
            let second = Member::start(options(&cluster, 1));
            first.join();
            second.join();
            second
        });
        let _ = runtime.enter();
        let (open, got) = busy(66, proven, PING, Duration::from_millis(20));
        println!("the last of 66 was open for {open:?}; places: {MAX_OF_OTHERS}");
        assert!((FIRST_REQUEST..FIRST_REQUEST * 5).contains(&open), "{open:?}");
        let pongs = got.windows(8).filter(|part| *part == b"tensors?").count();
        assert!(pongs > 10, "it was HTTP/2: {pongs} pings were answered");
        drop(second.join().unwrap());
    });
}

/// How long a member keeps the connection of a caller that has proven its name, and then sends
/// this.
fn kept_after(frames: &[u8]) -> Duration {
    let cluster = workers(2);
    let _first = Member::start(options(&cluster, 0));
    let auth = Arc::new(Authenticator::open(&AuthSettings::Uid, &name("worker", 1)).unwrap());
    let (peer, address) = (name("worker", 0), address(&cluster, "worker", 0));
    let connector = Connector { auth, peer, address, limit: LONG };
    let begin = Instant::now();
    let stream = runtime().block_on(connector.connect()).unwrap().into_tcp();
    let mut stream = stream.into_std().unwrap();
    stream.write_all(PREFACE).unwrap();
    stream.write_all(frames).unwrap();
    read_all(&mut stream, LONG);
    begin.elapsed()
}

#[test]
fn a_proven_connection_that_acknowledges_a_ping_ends_at_once() {
    let kept = kept_after(b"\0\0\x08\x06\x01\0\0\0\0tensors?");
    assert!(kept < FIRST_REQUEST, "{kept:?}");
}

/// Each frame is an error of a stream of its own, which depends on itself.
#[test]
fn a_proven_connection_with_many_errors_in_its_streams_ends_at_once() {
    let priority = |stream: u32| {
        let number = (2 * stream + 1).to_be_bytes();
        [b"\0\0\x05\x02\0", &number[..], &number[..], b"\x10"].concat()
    };
    let errors = |count: u32| (0..count).flat_map(priority).collect::<Vec<u8>>();
    let kept = kept_after(&errors(1000));
    assert!(kept < FIRST_REQUEST, "{kept:?}");
    let kept = kept_after(&errors(8));
    assert!(kept >= FIRST_REQUEST, "a few end a connection after {kept:?}");
}

#[test]
fn silent_connections_beyond_the_places_are_closed_and_members_go_on() {
    let cluster = workers(2);
    let members = linked(&cluster, 2);
    let address = address(&cluster, "worker", 0);
    let begin = Instant::now();
    let mut flood: Vec<TcpStream> =
        (0..2 * MAX_CANDIDATES).map(|_| TcpStream::connect(&address).unwrap()).collect();
    // As many as there are places stay, and the others make room at once.
    let mut open = flood.len();
    while open > MAX_CANDIDATES {
        assert!(begin.elapsed() < PROOF_LIMIT, "{open} are open after {:?}", begin.elapsed());
        open = flood.iter_mut().map(|stream| usize::from(still_open(stream, &mut Vec::new()))).sum();
    }
    println!("{open} are open after {:?}", begin.elapsed());
    assert!(open == MAX_CANDIDATES || begin.elapsed() >= PROOF_LIMIT, "{open}");
    let ended: Vec<Duration> = flood
        .into_iter()
        .map(|mut stream| {
            stream.set_nonblocking(false).unwrap();
            let got = read_all(&mut stream, LONG);
            assert!(got.len() <= 26, "more than a greeting: {got:?}");
            begin.elapsed()
        })
        .collect();
    let last = ended.iter().max().unwrap();
    println!("the last of {} ended after {last:?}", ended.len());
    assert!(*last < PROOF_LIMIT * 2, "{last:?}");
    for member in &members {
        assert_eq!(member.service.state(), NodeState::Connected);
    }
}
