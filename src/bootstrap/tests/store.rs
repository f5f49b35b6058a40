//! Stores over real sockets: what they do, who may call, and what callers can't do to them.

use super::super::auth::{AuthSettings, Authenticator};
use super::super::connector::Connector;
use super::super::store::{StoreGrpcClient, generated as grpc};
use super::lying_sender;
use super::*;
use crate::store::tests::SUITE;
use crate::store::{FileStore, MAX_KEY, MAX_VALUE, Store, StoreError};
use http_body_util::{BodyExt, Full};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use std::convert::Infallible;
use std::future::{Ready, ready};
use std::io::Write;
use std::task::{Context, Poll};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::transport::Endpoint;

const SHORT: Duration = Duration::from_millis(50);

fn address_of_one() -> HostPort {
    addresses(1)[0].parse().unwrap()
}

fn store_options(me: u32, address: &HostPort) -> StoreOptions {
    let mut options = StoreOptions::new(name("worker", me), name("worker", 0), address.clone());
    options.timeout = LONG;
    options
}

fn serve(address: &HostPort) -> StoreServer {
    let (options, began) = (store_options(0, address), Instant::now());
    loop {
        match StoreServer::start(&options, [0, 1, 2].map(|task| name("worker", task))) {
            // A child that another test starts has the socket of an earlier server until its exec.
            Err(BootstrapError::Bind { source, .. })
                if source.kind() == std::io::ErrorKind::AddrInUse && began.elapsed() < LONG =>
            {
                std::thread::sleep(Duration::from_millis(1));
            }
            started => return started.unwrap(),
        }
    }
}

fn connect(me: u32, address: &HostPort) -> RemoteStore {
    RemoteStore::connect(&store_options(me, address)).unwrap()
}

#[test]
fn a_remote_store_does_what_every_store_does() {
    for check in SUITE {
        let address = address_of_one();
        let server = serve(&address);
        check(&connect(1, &address), Arc::new(connect(2, &address)));
        drop(server);
        let server = serve(&address);
        check(server.store(), Arc::new(connect(1, &address)));
    }
}

#[test]
fn a_store_serves_all_addresses_of_its_name_with_the_same_entries() {
    let first = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = first.local_addr().unwrap().port();
    let second = TcpListener::bind(("127.0.0.2", port)).unwrap();
    let at = |ip: &str| format!("{ip}:{port}").parse::<HostPort>().unwrap();
    let names = [0, 1, 2].map(|task| name("worker", task));
    let options = store_options(0, &at("127.0.0.1"));
    let server = StoreServer::start_at(&options, names, vec![first, second]).unwrap();
    let [one, two] = [connect(1, &at("127.0.0.1")), connect(2, &at("127.0.0.2"))];
    std::thread::scope(|scope| {
        let waits = [scope.spawn(|| one.get("k", LONG)), scope.spawn(|| two.get("k", LONG))];
        std::thread::sleep(SHORT);
        two.set("k", b"v").unwrap();
        waits.into_iter().for_each(|wait| assert_eq!(wait.join().unwrap().unwrap(), b"v"));
    });
    assert_eq!(server.local_addr().to_string(), at("127.0.0.1").to_string());
}

#[test]
fn a_node_s_bootstrap_service_has_a_store_for_its_members() {
    let cluster = workers(2);
    let members = linked(&cluster, 2);
    let address: HostPort = address(&cluster, "worker", 0).parse().unwrap();
    let remote = connect(1, &address);
    remote.set("k", b"v").unwrap();
    assert_eq!(members[0].service.store().get("k", LONG).unwrap(), b"v");
    let stranger = store_options(7, &address);
    let error = RemoteStore::connect(&stranger).unwrap_err().to_string();
    assert!(error.contains("worker/7 is none of those who meet here"), "{error}");
    members.iter().for_each(Member::join);
}

#[test]
fn a_server_that_comes_late_is_waited_for_and_one_that_never_comes_is_named() {
    let address = address_of_one();
    let late = {
        let address = address.clone();
        std::thread::spawn(move || {
            std::thread::sleep(SHORT);
            serve(&address)
        })
    };
    connect(1, &address).set("k", b"v").unwrap();
    drop(late.join().unwrap());

    let mut options = store_options(1, &address);
    // Long enough for one attempt.
    options.timeout = SHORT * 20;
    let begin = Instant::now();
    let error = RemoteStore::connect(&options).unwrap_err();
    assert!(begin.elapsed() >= options.timeout && begin.elapsed() < LONG);
    assert!(matches!(error, StoreError::Unreachable { .. }), "{error:?}");
    let error = error.to_string();
    assert!(error.contains(&format!("the store of worker/0 at {address}: counting keys: nobody")), "{error}");
}

#[test]
fn a_wait_outlives_its_server_and_ends_in_time_if_nobody_takes_its_place() {
    let address = address_of_one();
    let server = serve(&address);
    let (waiter, loser) = (connect(1, &address), connect(2, &address));
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| waiter.get("k", LONG));
        let loses = scope.spawn(|| loser.wait(&["never"], SHORT * 60));
        std::thread::sleep(SHORT);
        drop(server);
        let error = loses.join().unwrap().unwrap_err();
        assert!(matches!(error, StoreError::Unreachable { .. }), "{error}");
        let server = serve(&address);
        server.store().set("k", b"v").unwrap();
        assert_eq!(waits.join().unwrap().unwrap(), b"v");
    });
}

#[test]
fn a_call_to_a_server_that_is_stopped_ends_in_its_time_and_names_it() {
    if let Ok(address) = std::env::var(PART) {
        let _server = serve(&address.parse().unwrap());
        std::thread::sleep(LONG * 2);
        return;
    }
    let address = address_of_one();
    let mut child = Command::new(std::env::current_exe().unwrap());
    let test = "bootstrap::tests::store::a_call_to_a_server_that_is_stopped_ends_in_its_time_and_names_it";
    child.args([test, "--exact", "--test-threads=1"]).env(PART, address.to_string());
    let mut child = child.stdout(std::process::Stdio::null()).spawn().unwrap();
    let process = Pid::from_child(&child);
    let signal = |signal| kill_process(process, signal).unwrap();
    let timeout = SHORT * 10;
    connect(1, &address).set("k", b"v").unwrap();
    let mut options = store_options(1, &address);
    options.timeout = timeout;
    let store = RemoteStore::connect(&options).unwrap();
    signal(Signal::STOP);
    let stopped = WaitIdOptions::STOPPED | WaitIdOptions::NOWAIT;
    waitid(WaitId::Pid(process), stopped).unwrap();
    type Call<'a> = &'a dyn Fn() -> Result<(), StoreError>;
    let calls: [Call; 5] = [
        &|| store.get("k", timeout).map(drop),
        &|| store.wait(&["k"], timeout),
        &|| store.set("k", b"w"),
        &|| store.count("").map(drop),
        &|| RemoteStore::connect(&options).map(drop),
    ];
    for call in calls {
        let begin = Instant::now();
        let error = call().unwrap_err();
        assert!(begin.elapsed() >= timeout && begin.elapsed() < timeout * 3, "{:?}", begin.elapsed());
        assert!(matches!(error, StoreError::Unreachable { .. }), "{error}");
        assert!(error.to_string().contains("no answer within the timeout of 500ms"), "{error}");
    }
    assert!(store.set("k", b"w").unwrap_err().to_string().contains("the call may have been done"));
    signal(Signal::CONT);
    store.wait(&["k"], LONG).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_change_whose_answer_was_lost_is_not_made_again() {
    // It greets and admits, and then ends each connection.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address: HostPort = listener.local_addr().unwrap().try_into().unwrap();
    let mut options = store_options(1, &address);
    options.auth = AuthSettings::Plain;
    let (server, accepted) = (name("worker", 0), Arc::new([const { AtomicU32::new(0) }; 3]));
    let count = accepted.clone();
    std::thread::spawn(move || {
        runtime().block_on(async {
            let auth = Authenticator::open(&AuthSettings::Plain, &server).unwrap();
            listener.set_nonblocking(true).unwrap();
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            while let Ok((stream, _)) = listener.accept().await {
                if let Ok(admitted) = auth.accept(stream).await {
                    count[admitted.name.task() as usize].fetch_add(1, Ordering::SeqCst);
                    tokio::time::sleep(Duration::from_millis(5)).await;
                    drop(admitted);
                }
            }
        });
    });
    options.timeout = SHORT * 20;
    assert!(matches!(RemoteStore::connect(&options), Err(StoreError::Unreachable { .. })));
    assert!(accepted[1].load(Ordering::SeqCst) > 1, "what only reads is repeated");
    // Another caller: the last connection of the first one may be accepted later.
    options.me = name("worker", 2);
    let store = RemoteStore::unchecked(&options).unwrap();
    let error = store.add("n", 1).unwrap_err().to_string();
    assert!(error.contains("adding 1 to \"n\"") && error.contains("the call may have been done"), "{error}");
    assert_eq!(accepted[2].load(Ordering::SeqCst), 1);
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// The bare calls of a caller that has proven its name, to one that answers as `worker/0`.
fn bare(me: u32, address: &HostPort) -> StoreGrpcClient {
    let auth = Authenticator::open(&AuthSettings::Uid, &name("worker", me)).unwrap();
    let (auth, peer, address) = (Arc::new(auth), name("worker", 0), address.to_string());
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    StoreGrpcClient::new(endpoint.connect_with_connector_lazy(Connector { auth, peer, address, limit: LONG }))
}

#[test]
fn a_member_can_t_break_the_limits_of_the_store() {
    let address = address_of_one();
    let server = serve(&address);
    runtime().block_on(async {
        let mut grpc = bare(1, &address);
        let long = "k".repeat(MAX_KEY + 1);
        let set = |key: &str, bytes| grpc::SetRequest { key: key.into(), value: vec![0; bytes] };
        for request in [set("", 0), set(&long, 0), set("k", MAX_VALUE + 1)] {
            let refused = grpc.set(request).await.unwrap_err();
            assert_eq!(refused.code(), tonic::Code::InvalidArgument, "{refused}");
        }
        assert!(grpc.set(set("k", 1 << 20)).await.is_err(), "beyond the longest message");
        let refused = grpc.get(grpc::GetRequest { key: long.clone(), wait_ms: 0 }).await.err().unwrap();
        assert_eq!(refused.code(), tonic::Code::InvalidArgument);
        let many = grpc::WaitRequest { keys: vec!["k".into(); 4097], wait_ms: 0 };
        let refused = grpc.wait(many).await.unwrap_err();
        assert!(refused.message().contains("4097 keys in one call"), "{refused}");
        let compare = grpc::CompareAndSetRequest { key: long, expected: None, desired: vec![] };
        assert!(grpc.compare_and_set(compare).await.is_err());
        grpc.set(set("text", 1)).await.unwrap();
        let refused = grpc.add(grpc::AddRequest { key: "text".into(), amount: 1 }).await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::FailedPrecondition);
    });
    assert_eq!(server.store().count("").unwrap(), 1);
}

#[test]
fn a_member_changes_its_own_key_of_a_meeting_alone() {
    let address = address_of_one();
    let server = serve(&address);
    let [first, one, two] = [0, 1, 2].map(|me| connect(me, &address));
    for run in ["tensorwire/meeting/", "tensorwire/meeting/job/7/"] {
        let key = |key: &str| format!("{run}{key}");
        let (own, outcome) = (key("member/1"), key("outcome"));
        assert_eq!(one.compare_and_set(&own, None, b"1").unwrap(), Some(b"1".to_vec()));
        first.set(&outcome, b"2").unwrap();
        for (caller, key) in [(&two, &own), (&first, &own), (&one, &outcome)] {
            let refused = [
                caller.set(key, b"3").err(),
                caller.add(key, 1).err(),
                caller.compare_and_set(key, Some(b"1"), b"3").err(),
                caller.delete(key).err(),
            ];
            for error in refused {
                let error = error.expect("refused").to_string();
                assert!(
                    error.contains("the key is that of worker/") && error.contains("has called"),
                    "{error}"
                );
            }
        }
        assert_eq!(
            (two.get(&own, LONG).unwrap(), two.get(&outcome, LONG).unwrap()),
            (b"1".into(), b"2".into())
        );
        // The first one to come says the size, and nobody but task 0 changes it then.
        let size = key("size");
        assert_eq!(two.compare_and_set(&size, None, b"3").unwrap(), Some(b"3".to_vec()));
        assert_eq!(one.compare_and_set(&size, None, b"9").unwrap(), Some(b"3".to_vec()));
        let refused = [
            two.set(&size, b"9").err(),
            two.add(&size, 1).err(),
            two.compare_and_set(&size, Some(b"3"), b"9").err(),
            two.delete(&size).err(),
        ];
        for error in refused {
            let error = error.expect("refused").to_string();
            assert!(error.contains("the key is that of worker/0"), "{error}");
        }
        first.set(&size, b"3").unwrap();
        assert!(one.delete(&own).unwrap() && first.delete(&outcome).unwrap());
    }
    // Keys of programs belong to nobody.
    two.set("member/1", b"").unwrap();
    one.set("outcome", b"").unwrap();
    drop(server);
}

#[test]
fn a_caller_s_waiting_calls_are_bounded_and_stop_nobody_else() {
    let address = address_of_one();
    let server = serve(&address);
    runtime().block_on(async {
        let grpc = bare(1, &address);
        let mut calls = JoinSet::new();
        // A wait of hours counts as two seconds.
        for _ in 0..20 {
            let mut grpc = grpc.clone();
            calls.spawn(async move {
                let begin = Instant::now();
                let got = grpc.get(grpc::GetRequest { key: "never".into(), wait_ms: u32::MAX }).await;
                assert_eq!(got.unwrap().into_inner().value, None);
                begin.elapsed()
            });
        }
        let begin = Instant::now();
        let mut own = grpc.clone();
        own.set(grpc::SetRequest { key: "own".into(), value: vec![] }).await.unwrap();
        let mut other = bare(2, &address);
        other.set(grpc::SetRequest { key: "k".into(), value: vec![] }).await.unwrap();
        let get = grpc::GetRequest { key: "k".into(), wait_ms: 1000 };
        assert!(other.get(get).await.unwrap().into_inner().value.is_some());
        assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
        let took = calls.join_all().await;
        let waited = took.iter().filter(|took| **took >= Duration::from_secs(2)).count();
        assert_eq!(waited, 16, "the others are answered at once: {took:?}");
        // The places are free again.
        let begin = Instant::now();
        let get = grpc::GetRequest { key: "never".into(), wait_ms: 50 };
        assert!(own.get(get).await.unwrap().into_inner().value.is_none());
        assert!(begin.elapsed() >= Duration::from_millis(50), "{:?}", begin.elapsed());
    });
    drop(server);
}

#[test]
fn more_threads_than_a_caller_has_places_wait_within_their_deadlines() {
    const THREADS: usize = 40;
    let address = address_of_one();
    let server = serve(&address);
    let store = connect(1, &address);
    std::thread::scope(|scope| {
        let waits = || store.get("later", LONG).unwrap();
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(waits)).collect();
        let error = store.get("never", Duration::from_secs(1)).unwrap_err();
        assert!(matches!(error, StoreError::Timeout { .. }), "{error}");
        server.store().set("later", b"v").unwrap();
        for thread in threads {
            assert_eq!(thread.join().unwrap(), b"v");
        }
    });
}

#[test]
fn nobody_without_a_proof_reaches_a_store() {
    let address = address_of_one();
    let server = serve(&address);
    server.store().set("k", b"v").unwrap();
    let text = address.to_string();
    runtime().block_on(async {
        let endpoint = Endpoint::from_shared(format!("http://{text}")).unwrap().timeout(LONG);
        let mut grpc = StoreGrpcClient::new(endpoint.connect_lazy());
        let key = || "k".to_string();
        let mut said = vec![grpc.set(grpc::SetRequest { key: key(), value: vec![] }).await.map(drop)];
        said.push(grpc.get(grpc::GetRequest { key: key(), wait_ms: 0 }).await.map(drop));
        said.push(grpc.wait(grpc::WaitRequest { keys: vec![key()], wait_ms: 0 }).await.map(drop));
        said.push(grpc.add(grpc::AddRequest { key: key(), amount: 1 }).await.map(drop));
        let compare = grpc::CompareAndSetRequest { key: key(), expected: None, desired: vec![] };
        said.push(grpc.compare_and_set(compare).await.map(drop));
        said.push(grpc.delete(grpc::DeleteRequest { key: key() }).await.map(drop));
        said.push(grpc.count(grpc::CountRequest { prefix: String::new() }).await.map(drop));
        for status in said.into_iter().map(Result::unwrap_err) {
            assert!(std::error::Error::source(&status).is_some(), "the store has answered: {status:?}");
        }
    });
    let mut raw = std::net::TcpStream::connect(&text).unwrap();
    raw.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    assert_eq!(
        (server.store().get("k", SHORT).unwrap(), server.store().count("").unwrap()),
        (b"v".to_vec(), 1)
    );
    connect(1, &address).set("k", b"w").unwrap();
}

/// A member that meets others makes a connection, a few calls, and waits.
#[test]
#[ignore = "takes long: tests/nightly"]
fn members_meet_at_a_store_during_a_flood() {
    for source in ["127.77.0.1", "127.0.0.1"] {
        let address = address_of_one();
        let server = serve(&address);
        let over = AtomicBool::new(false);
        let text = address.to_string();
        std::thread::scope(|scope| {
            let floods = [0, 1].map(|_| scope.spawn(|| proof_floods::flood(source, &text, &over)));
            std::thread::sleep(Duration::from_millis(300));
            let begin = Instant::now();
            for round in 0..20 {
                let [one, two] = [1, 2].map(|me| connect(me, &address));
                let (own, its) = (format!("member/1/{round}"), format!("member/2/{round}"));
                let meet = |store: &RemoteStore, own: &str, its: &str| {
                    store.compare_and_set(own, None, b"address").unwrap();
                    store.wait(&[own, its], LONG).unwrap();
                };
                let meets = scope.spawn(move || meet(&two, &its, &own));
                meet(&one, &format!("member/1/{round}"), &format!("member/2/{round}"));
                meets.join().unwrap();
            }
            let took = begin.elapsed();
            over.store(true, Ordering::SeqCst);
            let count: usize = floods.into_iter().map(|flood| flood.join().unwrap()).sum();
            println!("{count} connections from {source}; 20 meetings took {took:?}");
            assert!(count >= 1000 && took < Duration::from_secs(20), "{count} {took:?}");
        });
        drop(server);
    }
}

#[test]
fn another_secret_reaches_no_store() {
    let address = address_of_one();
    let folder = tempfile::tempdir().unwrap();
    let with = |me: u32, secret: &str| {
        let path = folder.path().join(secret);
        std::fs::write(&path, secret.repeat(40)).unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        let mut options = store_options(me, &address);
        options.auth = AuthSettings::Secret(path);
        options
    };
    let server = StoreServer::start(&with(0, "right"), [0, 1].map(|task| name("worker", task))).unwrap();
    RemoteStore::connect(&with(1, "right")).unwrap().set("k", b"v").unwrap();
    for mut options in [with(1, "wrong"), store_options(1, &address)] {
        options.timeout = 20 * SHORT;
        let error = RemoteStore::connect(&options).unwrap_err().to_string();
        assert!(error.contains("what listens there is not proven to be worker/0"), "{error}");
    }
    // The end of the server does not hide it.
    let mut options = with(1, "wrong");
    options.timeout = 20 * SHORT;
    let refused = server.refused();
    let error = std::thread::scope(|scope| {
        let caller = scope.spawn(|| RemoteStore::connect(&options).unwrap_err().to_string());
        while server.refused() == refused {
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(server);
        caller.join().unwrap()
    });
    let first = error.find("what listens there is not proven to be worker/0");
    let then = error.find("; since then: nobody listens there");
    assert!(first.is_some() && first < then, "{error}");
}

#[test]
fn a_store_beyond_loopback_needs_a_proof_that_reaches_there() {
    let options = store_options(0, &"192.0.2.7:4000".parse().unwrap());
    let error = StoreServer::start(&options, []).unwrap_err().to_string();
    assert!(error.contains("192.0.2.7:4000 of worker/0 is not loopback, and auth is uid"), "{error}");
}

/// Many processes write one file, and some of them are killed while they do.
#[test]
fn a_store_file_survives_the_death_of_writers() {
    let Ok(path) = std::env::var(PART) else {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store");
        let this = std::env::current_exe().unwrap();
        let test = "bootstrap::tests::store::a_store_file_survives_the_death_of_writers";
        let start = || {
            let mut child = Command::new(&this);
            child.args([test, "--exact", "--nocapture", "--test-threads=1"]).env(PART, &path);
            child.stdout(std::process::Stdio::null()).spawn().unwrap()
        };
        let store = FileStore::open(&path, LONG).unwrap();
        let mut before = 0;
        for round in 0..10u64 {
            let mut writers = [start(), start()];
            // Each has written since this round began.
            store
                .wait(&[&format!("begun/{}", writers[0].id()), &format!("begun/{}", writers[1].id())], LONG)
                .unwrap();
            std::thread::sleep(Duration::from_micros(700 * round));
            for writer in &mut writers {
                writer.kill().unwrap();
                writer.wait().unwrap();
            }
            let sum = store.add("sum", 0).unwrap();
            assert!(sum > before, "{sum} after {before}");
            before = sum;
        }
        let done: i64 = FileStore::open(&path, LONG).unwrap().add("sum", 0).unwrap();
        assert_eq!(done, before);
        return;
    };
    let store = FileStore::open(path, LONG).unwrap();
    store.add("sum", 1).unwrap();
    store.set(&format!("begun/{}", std::process::id()), b"").unwrap();
    for number in 0u64.. {
        store.add("sum", 1).unwrap();
        store.set("filler", &vec![number as u8; (number % 5000) as usize]).unwrap();
    }
}

/// A server that answers each call at once: the key is missing.
#[derive(Clone, Default)]
struct NeverWaits(Arc<AtomicU32>);

impl Service<http::Request<Body>> for NeverWaits {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<http::Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        self.0.fetch_add(1, Ordering::SeqCst);
        // `missing: [0]`, or no value.
        let message: &[u8] = if request.uri().path().ends_with("/Wait") { &[10, 1, 0] } else { &[] };
        let bytes = [&[0, 0, 0, 0, message.len() as u8], message].concat();
        let status = ("grpc-status".parse().unwrap(), "0".parse().unwrap());
        let status: http::HeaderMap = [status].into_iter().collect();
        let body = Full::new(bytes::Bytes::from(bytes)).with_trailers(ready(Some(Ok(status))));
        let mut answer = http::Response::new(Body::new(body));
        answer.headers_mut().insert("content-type", "application/grpc".parse().unwrap());
        ready(Ok(answer))
    }
}

#[test]
fn a_server_that_does_not_wait_is_not_asked_without_a_pause() {
    let (cluster, server) = (workers(2), NeverWaits::default());
    let _end = lying_sender::serve(&cluster, server.clone());
    let address = address(&cluster, "worker", 1).parse().unwrap();
    let options = StoreOptions::new(name("worker", 0), name("worker", 1), address);
    let store = RemoteStore::unchecked(&options).unwrap();
    let time = Duration::from_millis(500);
    for missing in [store.wait(&["k"], time).unwrap_err(), store.get("k", time).unwrap_err()] {
        assert!(matches!(missing, StoreError::Timeout { .. }), "{missing}");
    }
    let calls = server.0.load(Ordering::SeqCst);
    assert!((4..50).contains(&calls), "{calls} calls");
}
