//! The TCP fabric over the loopback interface.

use crate::expect;
use crate::harness::{End, Got, Harness, TIMEOUT, connect, immediate, pattern, pool, tensor, tensor_mut};
use crate::processes::{Peer, grant_from_bytes, grant_to_bytes, tell, unhex};
use std::net::Ipv6Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use tensorwire::Pool;
use tensorwire::internals::fabric::tcp::{Notifier, TcpFabric, TcpOptions};
use tensorwire::internals::fabric::{
    Completions, Endpoint, Fabric, LinkFailure, LinkOptions, Port, Role, Sleeper,
};
use tensorwire::internals::wire::Grant;

fn fabric(pool: &Pool, options: TcpOptions) -> TcpFabric {
    TcpFabric::new(pool, options).expect("a fabric")
}

/// The defaults.
pub struct Tcp;

impl Harness for Tcp {
    type Fabric = TcpFabric;

    fn fabric(pool: &Pool) -> TcpFabric {
        fabric(pool, TcpOptions::default())
    }
}

/// Every payload goes by the bulk connection, and large ones take several polls.
pub struct TcpSmallPieces;

impl Harness for TcpSmallPieces {
    type Fabric = TcpFabric;

    fn fabric(pool: &Pool) -> TcpFabric {
        fabric(pool, TcpOptions { main_bytes: 0, poll_bytes: 64 << 10, ..TcpOptions::default() })
    }
}

/// Large payloads go by several connections, over IPv6 where there is any.
pub struct TcpStriped;

impl Harness for TcpStriped {
    type Fabric = TcpFabric;

    fn fabric(pool: &Pool) -> TcpFabric {
        let mut options = TcpOptions { streams: 4, ..TcpOptions::default() };
        if std::net::TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_ok() {
            options.bind = Ipv6Addr::LOCALHOST.into();
        }
        fabric(pool, options)
    }
}

// Between processes.

type TcpEnd = End<TcpFabric>;

const OPTIONS: LinkOptions = LinkOptions { depth: 64, receives: 0, generation: 0 };
/// Bytes of the tensors between processes: they go by the bulk connection.
const BYTES: usize = 1 << 20;
/// Bound for the report of a death: five times the expected time.
const BOUND: Duration = Duration::from_secs(5);

fn end(role: Role, meet: impl FnOnce(&[u8]) -> Vec<u8>) -> TcpEnd {
    let pool = pool(8 << 20);
    let fabric = Tcp::fabric(&pool);
    let endpoint = fabric.endpoint(0, &OPTIONS).expect("an endpoint");
    let theirs = meet(endpoint.address());
    let link = endpoint.connect(role, &theirs, TIMEOUT).expect("connected");
    let mut end = End::new(pool, fabric, link);
    end.port.post_receives(end.link, 1_000_000);
    end
}

fn connected(scenario: &str) -> (Peer, TcpEnd) {
    let mut peer = Peer::start(scenario);
    let end = end(Role::Acceptor, |address| {
        peer.say(address);
        peer.hear()
    });
    (peer, end)
}

fn child_end() -> TcpEnd {
    end(Role::Initiator, |address| {
        let mut line = String::new();
        std::io::stdin().read_line(&mut line).expect("the parent speaks");
        tell(address);
        unhex(line.trim())
    })
}

/// Grants a tensor to the other side, and swaps grants with it.
fn swap_grants(end: &mut TcpEnd) -> (Grant, Grant) {
    let target = tensor_mut(&end.pool, BYTES);
    let own = end.port.grant(end.link, target).expect("room");
    end.port.send(end.link, &grant_to_bytes(&own)).expect("room");
    (own, grant_from_bytes(&expect!(end.next_alone(), Got::Message(m) => m)))
}

/// Writes and receives writes as fast as possible, until it is told to stop or killed.
pub fn child_floods() {
    let mut end = child_end();
    let (_, theirs) = swap_grants(&mut end);
    let source = tensor(&end.pool, &pattern(BYTES, 7));
    loop {
        let _ = end.port.write(end.link, &source, BYTES as u64, &theirs, Some(immediate(1)));
        end.poll();
        for (_, got) in end.arrivals.drain(..) {
            if matches!(got, Got::Message(_) | Got::Down(_)) {
                return;
            }
        }
    }
}

/// Sends and writes, and ends at once.
pub fn child_says_last_words() {
    let mut end = child_end();
    let (_, theirs) = swap_grants(&mut end);
    let source = tensor(&end.pool, &pattern(10_000, 5));
    for k in 0..20u8 {
        end.port.send(end.link, &[k]).expect("room");
    }
    let part = theirs.part(0, 10_000).expect("inside");
    end.port.write(end.link, &source, 10_000, &part, Some(immediate(2))).expect("room");
    let me = rustix::process::getpid();
    rustix::process::kill_process(me, rustix::process::Signal::KILL).expect("killed");
}

#[test]
fn the_death_of_a_process_amid_transfers_ends_each_operation_once() {
    for round in 0..3 {
        let (mut peer, mut end) = connected("tcp flood");
        let (own, theirs) = swap_grants(&mut end);
        let source = tensor(&end.pool, &pattern(BYTES, 2));
        let (mut posted, mut ended, mut failed, mut arrived) = (0, 0, false, 0);
        let mut killed: Option<Instant> = None;
        let why = loop {
            if arrived >= 10 + round && killed.is_none() {
                peer.process.kill().expect("killed");
                killed = Some(Instant::now());
            }
            if end.port.write(end.link, &source, BYTES as u64, &theirs, None).is_ok() {
                posted += 1;
            }
            end.poll();
            let mut down = None;
            for (_, got) in end.arrivals.drain(..) {
                match got {
                    Got::Done => {
                        assert!(!failed, "what is done is told before what failed");
                        ended += 1;
                    }
                    Got::Failed => (failed, ended) = (true, ended + 1),
                    Got::Immediate(_, bytes) => arrived += u64::from(bytes == BYTES as u64),
                    Got::Down(why) => down = Some(why),
                    other => panic!("{other:?}"),
                }
            }
            if let Some(why) = down {
                break why;
            }
            assert!(killed.is_none_or(|at| at.elapsed() < BOUND), "the death was not told");
        };
        println!("told {:?} after the kill: {posted} writes out", killed.expect("before").elapsed());
        assert_eq!(why, LinkFailure::PeerDied { pid: peer.process.id() });
        assert_eq!(ended, posted);
        assert!(end.port.revoke(end.link, &own).is_some());
    }
}

#[test]
fn what_a_process_said_before_it_died_still_arrives() {
    let (mut peer, mut end) = connected("tcp last words");
    let (own, _) = swap_grants(&mut end);
    peer.process.wait().expect("ended");
    for k in 0..20 {
        assert_eq!(expect!(end.next_alone(), Got::Message(m) => m), [k]);
    }
    expect!(end.next_alone(), Got::Immediate(_, 10_000) => ());
    assert_eq!(end.until_down().2, LinkFailure::PeerDied { pid: peer.process.id() });
    let written = end.port.revoke(end.link, &own).expect("granted");
    assert!(written.bytes()[..10_000] == pattern(10_000, 5), "the bytes differ");
}

#[test]
fn two_processes_end_a_link_in_order() {
    let (_peer, mut end) = connected("tcp flood");
    let (own, _) = swap_grants(&mut end);
    while !matches!(end.next_alone(), Got::Immediate(..)) {}
    end.port.send(end.link, b"stop").expect("room");
    assert_eq!(end.until_down().2, LinkFailure::Closed);
    let written = end.port.revoke(end.link, &own).expect("granted");
    assert!(written.bytes() == pattern(BYTES, 7), "the bytes differ");
}

#[test]
fn a_notifier_of_the_caller_is_called_for_an_armed_port() {
    let pools = [pool(1 << 20), pool(1 << 20)];
    let [a, b] = Tcp::fabrics([&pools[0], &pools[1]]);
    let links = connect(&a, &b, &OPTIONS);
    let calls = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&calls);
    let notifier: Notifier = Arc::new(move || _ = counted.fetch_add(1, Ordering::SeqCst));
    let mut port = b.port_with_notifier(notifier).expect("a port");
    let link = port.attach(links.1).expect("room");
    port.post_receives(link, 10);
    let mut a = End::new(pools[0].clone(), a, links.0);
    let mut completions = Completions::default();
    let start = Instant::now();
    for round in 0..20 {
        while !port.arm() {
            assert_eq!(port.poll(&mut completions), 0);
        }
        let before = calls.load(Ordering::SeqCst);
        let sleeper = port.sleeper();
        let seen = sleeper.seen();
        a.port.send(a.link, b"wake").expect("room");
        while calls.load(Ordering::SeqCst) == before {
            assert!(start.elapsed() < TIMEOUT, "not called in round {round}");
            std::thread::yield_now();
        }
        assert_eq!(sleeper.seen(), seen, "the port's own sleepers are not its affair");
        while port.poll(&mut completions) == 0 {}
        completions.clear();
        port.post_receives(link, 1);
        a.poll();
    }
}
