//! Floods of connections that prove nothing.

use super::certificates::Authority;
use super::proofs::{GOOD, OTHER, folder, runtime, secret, told_to_an_impostor, with};
use super::*;
use crate::bootstrap::auth::{AuthSettings, Authenticator};
use crate::bootstrap::connector::Connector;
use crate::bootstrap::places::MAX_CANDIDATES;
use std::io::{Read, Write};
use std::net::TcpStream;
use tokio::task::JoinSet;

/// Opens connections from `source` as fast as it can until `over`, and proves nothing. Returns how
/// many.
pub(super) fn flood(source: &str, address: &str, over: &AtomicBool) -> usize {
    let source = std::net::SocketAddr::new(source.parse().unwrap(), 0);
    let address = address.parse().unwrap();
    runtime().block_on(async {
        let (mut open, mut count) = (std::collections::VecDeque::new(), 0);
        while !over.load(Ordering::SeqCst) {
            let socket = tokio::net::TcpSocket::new_v4().unwrap();
            socket.bind(source).unwrap();
            let opened = tokio::time::timeout(Duration::from_millis(50), socket.connect(address));
            if let Ok(Ok(stream)) = opened.await {
                open.push_back(stream);
                count += 1;
            }
            if open.len() > 100 {
                open.pop_front();
            }
        }
        count
    })
}

#[test]
#[ignore = "takes long: tests/nightly"]
fn members_join_during_a_flood_and_links_go_on() {
    for source in ["127.77.0.1", "127.0.0.1"] {
        let (cluster, folder) = (workers(2), folder());
        let auth = secret(&folder, "secret", GOOD);
        let silence = Duration::from_secs(3);
        let quick = |task| BootstrapOptions { silence, ..with(&auth, &cluster, task) };
        let flooded = Member::start(quick(1));
        let over = AtomicBool::new(false);
        let address = address(&cluster, "worker", 1);
        std::thread::scope(|scope| {
            let floods = [0, 1].map(|_| scope.spawn(|| flood(source, &address, &over)));
            std::thread::sleep(Duration::from_millis(300));
            let begin = Instant::now();
            let other = Member::start(quick(0));
            let joined = other.service.join(LONG).and_then(|()| flooded.service.join(LONG));
            let took = begin.elapsed();
            // Longer than the silence: heartbeats pass, too.
            std::thread::sleep(silence + Duration::from_secs(1));
            over.store(true, Ordering::SeqCst);
            let count: usize = floods.into_iter().map(|flood| flood.join().unwrap()).sum();
            println!("{count} connections from {source}; joined after {took:?}");
            joined.expect("they join");
            for member in [&flooded, &other] {
                assert!(!member.peering.told().iter().any(|told| matches!(told, Told::Lost(..))));
            }
        });
    }
}

/// Starts a second member, and waits until both are linked. Returns how long that took.
fn time_to_join(first: &Member, second: BootstrapOptions) -> Duration {
    let begin = Instant::now();
    let second = Member::start(second);
    second.join();
    first.join();
    begin.elapsed()
}

/// Strangers who know the protocol but not the secret, half as many again as there are places, over
/// and over. Two of three say nothing after the greeting. If proofs waited for each other, each of
/// those would hold up all.
#[test]
fn failed_proofs_keep_no_member_out() {
    let (cluster, folder) = (workers(2), folder());
    let good = secret(&folder, "good", GOOD);
    let bad = secret(&folder, "bad", OTHER);
    let first = Member::start(with(&good, &cluster, 0));
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let flood = scope.spawn(|| {
            let auth = Arc::new(Authenticator::open(&bad, &name("worker", 1)).unwrap());
            let (peer, address) = (name("worker", 0), address(&cluster, "worker", 0));
            let connector = Connector { auth, peer, address, limit: LONG };
            let failed = AtomicU32::new(0);
            runtime().block_on(async {
                let mut waiting = Vec::new();
                while !over.load(Ordering::SeqCst) {
                    waiting.clear();
                    for _ in 0..MAX_CANDIDATES {
                        waiting.push(tokio::net::TcpStream::connect(&connector.address).await);
                    }
                    let tries = (0..MAX_CANDIDATES / 2).map(|_| connector.clone().connect());
                    for outcome in tries.collect::<JoinSet<_>>().join_all().await {
                        outcome.expect_err("a wrong secret");
                        failed.fetch_add(1, Ordering::SeqCst);
                    }
                }
            });
            failed.into_inner()
        });
        std::thread::sleep(Duration::from_millis(300));
        let took = time_to_join(&first, with(&good, &cluster, 1));
        over.store(true, Ordering::SeqCst);
        let failed = flood.join().unwrap();
        println!("joined after {took:?}, beside {failed} failed proofs");
        assert!(failed >= MAX_CANDIDATES as u32 / 2, "{failed}");
        assert!(took < Duration::from_secs(5), "{took:?}");
    });
}

/// Each stranger repeats what a member has said on another connection: its opening, and the first
/// message of TLS. It holds its place then. Each such handshake delays later ones of strangers.
#[test]
fn a_flood_of_openings_keeps_no_member_out() {
    let (authority, folders) = (Authority::new(), [folder(), folder()]);
    let secret = secret(&folders[0], "secret", GOOD);
    let tls = [0, 1].map(|task| AuthSettings::Tls(authority.worker(folders[task as usize].path(), task)));
    for auth in [[secret.clone(), secret], tls] {
        let cluster = workers(2);
        let said = told_to_an_impostor(&auth[1]);
        let first = Member::start(with(&auth[0], &cluster, 0));
        let to = address(&cluster, "worker", 0);
        let (over, openings) = (AtomicBool::new(false), AtomicU32::new(0));
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| repeat_openings(&said, &to, &over, &openings));
            }
            let (began, flood) = (Instant::now(), 2 * MAX_CANDIDATES as u32);
            while openings.load(Ordering::SeqCst) <= flood && began.elapsed() < LONG {
                std::thread::sleep(Duration::from_millis(1));
            }
            let took = time_to_join(&first, with(&auth[1], &cluster, 1));
            over.store(true, Ordering::SeqCst);
            let openings = openings.load(Ordering::SeqCst);
            println!("{}: joined after {took:?}, amid {openings} openings", auth[0].mode());
            assert!(openings > flood, "{openings}");
            assert!(took < Duration::from_secs(5), "{took:?}");
        });
    }
}

/// Says this on connection after connection until `over`, each time with the number of the new
/// greeting, and holds the newest ones.
fn repeat_openings(said: &[u8], to: &str, over: &AtomicBool, openings: &AtomicU32) {
    const HELD: usize = 400;
    let open = || -> std::io::Result<TcpStream> {
        let mut stream = TcpStream::connect(to)?;
        stream.set_read_timeout(Some(LONG))?;
        let (mut greeting, mut said) = ([0; 26], said.to_vec());
        stream.read_exact(&mut greeting)?;
        said[1..17].copy_from_slice(&greeting[10..]);
        stream.write_all(&said)?;
        openings.fetch_add(1, Ordering::SeqCst);
        Ok(stream)
    };
    let mut held = std::collections::VecDeque::new();
    while !over.load(Ordering::SeqCst) {
        // The listener closes some at once, for lack of a place.
        held.extend(open());
        held.drain(..held.len().saturating_sub(HELD));
    }
}
