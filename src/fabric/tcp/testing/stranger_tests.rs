//! Strangers at the port of a link that is made, or made again.

use super::hostile_peer::{TIMEOUT, Victim, link_options, say_hello};
use super::pool;
use crate::fabric::tcp::connect::address::TcpAddress;
use crate::fabric::tcp::connect::arrivals::HALF_OPEN;
use crate::fabric::tcp::{TcpEndpoint, TcpFabric, TcpLink, TcpOptions};
use crate::fabric::{Endpoint, Fabric, FabricError, Port, Role};
use crate::memory::Pool;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Strangers at a time.
const STRANGERS: usize = 300;
/// Within what the peer is let in.
const SOON: Duration = Duration::from_secs(1);

fn endpoint(pool: &Pool) -> (TcpFabric, TcpEndpoint, TcpAddress) {
    let fabric = TcpFabric::new(pool, TcpOptions::default()).expect("a fabric");
    let endpoint = fabric.endpoint(0, &link_options()).expect("an endpoint");
    let address = TcpAddress::from_bytes(endpoint.address()).expect("an address");
    (fabric, endpoint, address)
}

/// Keeps silent connections at a port, and replaces each that is closed. Returns how many there
/// were.
fn flood(to: SocketAddr, filled: &AtomicBool, is_over: &AtomicBool) -> usize {
    let mut count = 0;
    let mut open: Vec<TcpStream> = Vec::new();
    while !is_over.load(Ordering::Relaxed) {
        open.retain(|socket| {
            socket.peek(&mut [0]).is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
        });
        while open.len() < STRANGERS && !is_over.load(Ordering::Relaxed) {
            let Ok(socket) = TcpStream::connect_timeout(&to, Duration::from_millis(100)) else { break };
            socket.set_nonblocking(true).expect("set");
            open.push(socket);
            count += 1;
        }
        filled.store(true, Ordering::Relaxed);
        std::thread::yield_now();
    }
    count
}

/// Ends a flood, also where a test fails.
struct FloodEnd<'a>(&'a AtomicBool);

impl Drop for FloodEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Floods a port as long as `during` runs.
fn flooded<R>(to: &TcpAddress, during: impl FnOnce() -> R) -> R {
    let (to, filled, is_over) =
        ((to.hosts[0], to.port).into(), AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let flooding = scope.spawn(|| flood(to, &filled, &is_over));
        let end = FloodEnd(&is_over);
        while !filled.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
        let result = during();
        drop(end);
        let count = flooding.join().expect("no panic");
        println!("{count} strangers came");
        assert!(count >= STRANGERS, "{count}");
        result
    })
}

/// Links two endpoints.
fn link(
    acceptor: TcpEndpoint,
    initiator: TcpEndpoint,
    timeout: Duration,
) -> (Result<TcpLink, FabricError>, Result<TcpLink, FabricError>) {
    let (to_acceptor, to_initiator) = (acceptor.address().to_vec(), initiator.address().to_vec());
    std::thread::scope(|scope| {
        let accepted = scope.spawn(move || acceptor.connect(Role::Acceptor, &to_initiator, timeout));
        let initiated = initiator.connect(Role::Initiator, &to_acceptor, timeout);
        (accepted.join().expect("no panic"), initiated)
    })
}

#[test]
fn strangers_that_come_again_for_the_whole_attempt_keep_no_peer_out() {
    let pool = pool();
    for _ in 0..3 {
        let (_fabrics, acceptor, to) = endpoint(&pool);
        let (_fabric, initiator, _) = endpoint(&pool);
        let _links = flooded(&to, || {
            let start = Instant::now();
            let (accepted, initiated) = link(acceptor, initiator, TIMEOUT);
            println!("the peer was let in after {:?}", start.elapsed());
            assert!(accepted.is_ok() && initiated.is_ok());
            assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
            // Its ports stay its own until the flood is over.
            (accepted, initiated)
        });
    }
}

#[test]
fn strangers_keep_no_peer_from_making_its_connections_again() {
    let pool = pool();
    let ((first, acceptor, to), (second, initiator, _)) = (endpoint(&pool), endpoint(&pool));
    let (accepted, initiated) = link(acceptor, initiator, TIMEOUT);
    let mut sides = [(first, accepted), (second, initiated)].map(|(fabric, link)| {
        let mut port = fabric.port().expect("a port");
        let link = port.attach(link.expect("made")).expect("room");
        Victim { fabric, port, link }
    });
    flooded(&to, || {
        for round in 0..3 {
            let link = sides[1].port.link_mut(sides[1].link);
            link.out.sockets.main.shutdown(Shutdown::Both).expect("open");
            let (start, repaired) = (Instant::now(), AtomicUsize::new(0));
            while repaired.load(Ordering::Relaxed) < sides.len() {
                for side in &mut sides {
                    let got = side.poll();
                    assert!(got.iter().all(|got| *got == super::hostile_peer::Got::Repaired), "{got:?}");
                    repaired.fetch_add(got.len(), Ordering::Relaxed);
                }
                assert!(start.elapsed() < SOON, "round {round}: {:?}", start.elapsed());
            }
            println!("made again after {:?}", start.elapsed());
        }
    });
}

#[test]
fn who_waits_among_strangers_says_how_many_came() {
    let pool = pool();
    let (_fabric, acceptor, own) = endpoint(&pool);
    let silent: Vec<TcpStream> = (0..HALF_OPEN + 7)
        .map(|_| TcpStream::connect((own.hosts[0], own.port)).expect("it listens"))
        .collect();
    let error = acceptor.connect(Role::Acceptor, &own.to_bytes(), Duration::from_millis(300));
    let error = error.expect_err("nobody comes").to_string();
    assert!(error.contains("waiting for 2 of 2 connections of the peer, while 7 came that are"), "{error}");
    drop(silent);
}

#[test]
fn an_acceptor_notices_at_once_that_the_peer_gives_up() {
    let pool = pool();
    for (sends, why) in [(&[][..], "has closed a connection"), (&[1], "has sent more than its hello")] {
        let (_fabric, acceptor, own) = endpoint(&pool);
        // The first of two connections.
        let mut first = say_hello(&own, 0, own.token.0);
        std::io::Write::write_all(&mut first, sends).expect("sent");
        let ended = sends.is_empty().then(|| first.shutdown(Shutdown::Write));
        let start = Instant::now();
        let error = acceptor.connect(Role::Acceptor, &own.to_bytes(), TIMEOUT).expect_err("it gave up");
        assert!(error.to_string().contains(why), "{error}");
        assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
        drop((first, ended));
    }
}
