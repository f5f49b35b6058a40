//! The verbs fabric over a network: two processes, lost packets, and a port that goes down and
//! comes up again.
//!
//! The tests that cut the network run alone, as root. `TENSORWIRE_TEST_CUT` and
//! `TENSORWIRE_TEST_MEND` are the shell commands for it, such as `ip link set rdma0 down`. See
//! `tests/rxe`.

use crate::expect;
use crate::harness::{
    End, Got, TIMEOUT, connect, immediate, options, pair, pattern, pool, tensor, tensor_mut,
};
use crate::processes::{Peer, grant_from_bytes, grant_to_bytes, tell, unhex};
use crate::verbs::{VerbsDevice, end, skipped};
use std::process::Command;
use std::time::{Duration, Instant};
use tensorwire::internals::fabric::verbs::VerbsFabric;
use tensorwire::internals::fabric::{Endpoint, Fabric, LinkFailure, LinkOptions, Port, PostError, Role};

const LEN: usize = 100_000;

type VerbsEnd = End<VerbsFabric>;

// Two processes.

/// Starts a peer and connects to it.
fn connected() -> (Peer, VerbsEnd) {
    let mut peer = Peer::start("verbs echo");
    let (pool, options) = (pool(8 << 20), options(64));
    let fabric = end(0, &pool);
    let endpoint = fabric.endpoint(0, &options).expect("an endpoint");
    peer.say(endpoint.address());
    let address = peer.hear();
    let link = endpoint.connect(Role::Acceptor, &address, TIMEOUT).expect("connected");
    let mut end = End::new(pool, fabric, link);
    end.port.post_receives(end.link, 64);
    (peer, end)
}

/// Code of the peer: it exposes and grants a tensor. It answers each message, which has a number
/// and a grant, with a write full of the number, until it is stopped.
pub fn child_echoes() {
    let (pool, options) = (pool(8 << 20), options(64));
    let fabric = end(1, &pool);
    let endpoint = fabric.endpoint(0, &options).expect("an endpoint");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("the parent speaks");
    tell(endpoint.address());
    let link = endpoint.connect(Role::Initiator, &unhex(line.trim()), TIMEOUT).expect("connected");
    let mut end = End::new(pool, fabric, link);
    end.port.post_receives(end.link, 64);
    let source = tensor(&end.pool, &pattern(LEN, 1));
    let exposed = end.port.expose(end.link, &source).expect("room");
    end.port.send(end.link, &grant_to_bytes(&exposed)).expect("posted");
    loop {
        match end.next_alone() {
            Got::Message(m) if m == b"stop" => return,
            Got::Message(m) => {
                end.port.post_receives(end.link, 1);
                let (number, target) = m.split_at(8);
                let (source, target) = (tensor(&end.pool, &number.repeat(LEN / 8)), grant_from_bytes(target));
                let len = LEN as u64;
                end.port.write(end.link, &source, len, &target, Some(immediate(1))).expect("room");
            }
            Got::Done => {}
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn two_processes_write_read_and_send_to_each_other() {
    if let Some(why) = skipped() {
        println!("skipped: {why}");
        return;
    }
    let (_peer, mut end) = connected();
    let exposed = grant_from_bytes(&expect!(end.next_alone(), Got::Message(m) => m));
    let target = tensor_mut(&end.pool, LEN);
    end.port.read(end.link, target, &exposed).expect("posted");
    let read = expect!(end.next_alone(), Got::ReadDone(target) => target);
    assert!(read.bytes() == pattern(LEN, 1), "the bytes differ");

    let mut target = tensor_mut(&end.pool, LEN);
    for round in 0..50u64 {
        let grant = end.port.grant(end.link, target).expect("room");
        let message = [&round.to_le_bytes()[..], &grant_to_bytes(&grant)].concat();
        end.port.send(end.link, &message).expect("room");
        let got = expect!(end.next_alone(), Got::Immediate(imm, bytes) => (imm, bytes));
        assert_eq!(got, (immediate(1), LEN as u64));
        end.port.post_receives(end.link, 1);
        target = end.port.revoke(end.link, &grant).expect("granted");
        assert!(target.bytes() == round.to_le_bytes().repeat(LEN / 8), "the bytes of round {round} differ");
    }
    end.port.send(end.link, b"stop").expect("room");
    expect!(end.next_alone(), Got::Down(LinkFailure::Closed) => ());
}

// A network that is cut.

/// Runs the shell command of an environment variable.
fn shell(variable: &str) {
    let command = std::env::var(variable).unwrap_or_else(|_| panic!("{variable} holds a shell command"));
    let status = Command::new("sh").args(["-ec", &command]).status();
    assert!(status.is_ok_and(|status| status.success()), "{variable}: {command}");
}

fn cut() {
    shell("TENSORWIRE_TEST_CUT");
}

fn mend() {
    shell("TENSORWIRE_TEST_MEND");
}

/// One message from `a` to `b`.
fn exchange(a: &mut VerbsEnd, b: &mut VerbsEnd, message: &[u8]) {
    b.port.post_receives(b.link, 1);
    a.port.send(a.link, message).expect("room");
    assert_eq!(expect!(b.next(a), Got::Message(m) => m), message);
}

#[test]
#[ignore = "cuts the network"]
fn a_short_outage_is_survived() {
    let (mut a, mut b) = pair::<VerbsDevice>(16);
    exchange(&mut a, &mut b, b"before");
    let grant = b.port.grant(b.link, tensor_mut(&b.pool, LEN)).expect("room");
    let source = tensor(&a.pool, &pattern(LEN, 5));
    b.port.post_receives(b.link, 1);

    cut();
    a.port.write(a.link, &source, LEN as u64, &grant, Some(immediate(4))).expect("room");
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(300) {
        a.poll();
        b.poll();
    }
    assert!(a.arrivals.is_empty() && b.arrivals.is_empty(), "{:?} {:?}", a.arrivals, b.arrivals);
    mend();

    expect!(b.next(&mut a), Got::Immediate(_, _) => ());
    expect!(a.next(&mut b), Got::Done => ());
    let written = b.port.revoke(b.link, &grant).expect("granted");
    assert!(written.bytes() == source.bytes(), "the bytes differ");
    exchange(&mut b, &mut a, b"after");
}

#[test]
#[ignore = "cuts the network"]
fn a_long_outage_ends_the_link_by_name_and_a_new_one_comes_after_it() {
    let (mut a, mut b) = pair::<VerbsDevice>(16);
    exchange(&mut a, &mut b, b"before");
    let grant = b.port.grant(b.link, tensor_mut(&b.pool, LEN)).expect("room");
    let source = tensor(&a.pool, &pattern(LEN, 5));

    cut();
    a.port.write(a.link, &source, LEN as u64, &grant, None).expect("room");
    expect!(a.next(&mut b), Got::Failed => ());
    let why = expect!(a.next(&mut b), Got::Down(why) => why);
    println!("{why}");
    assert!(matches!(why, LinkFailure::Device { event: "the port is down", .. }), "{why:?}");
    expect!(b.next(&mut a), Got::Down(_) => ());
    assert_eq!(a.port.send(a.link, b"x"), Err(PostError::Down));
    assert!(source.is_unique(), "nobody reads it any more");
    a.port.detach(a.link);
    b.port.detach(b.link);
    mend();

    let again = LinkOptions { generation: 2, ..options(16) };
    let links = connect(&a.fabric, &b.fabric, &again);
    let old = (a.link, b.link);
    a.link = a.port.attach(links.0).expect("room");
    b.link = b.port.attach(links.1).expect("room");
    assert!(a.link != old.0 && b.link != old.1, "a link of its own");
    for round in 0..20u8 {
        exchange(&mut a, &mut b, &[round; 100]);
        exchange(&mut b, &mut a, &[round; 100]);
    }
}
