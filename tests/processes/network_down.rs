//! A network that is down between members: who is blamed, and for what.
//!
//! The tests run members in a network namespace of their own, which only root may make.

use crate::common::other::Other;
use crate::common::{SOON, member};
use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};
use tensorwire::{Error, LossCause, Node};

/// The silence bound of a cluster whose network is cut.
const SILENCE: Duration = Duration::from_secs(3);

fn ip(arguments: &str) {
    let status = Command::new("ip").args(arguments.split(' ')).status();
    assert!(status.is_ok_and(|status| status.success()), "ip {arguments}");
}

/// Runs a role in a new network namespace whose loopback is up. Without the right to make one, says
/// that the test is skipped.
fn in_new_network(role: &str) {
    let may = Command::new("unshare").args(["--net", "ip", "link", "set", "lo", "up"]).status();
    if !may.is_ok_and(|status| status.success()) {
        return println!("skipped: only root makes network namespaces, with unshare(1) and ip(8)");
    }
    Other::run_alone_by(&["unshare", "--net"], &format!("network_down::{role}"), "", &[]);
}

/// The addresses of two members beyond loopback, which are on the loopback interface.
const ADDRESSES: [&str; 2] = ["10.9.0.1", "10.9.0.2"];

fn cluster() -> String {
    format!("w={}:4000,{}:4000", ADDRESSES[0], ADDRESSES[1])
}

fn start(task: u32) -> Node {
    let silence = format!("{}s", SILENCE.as_secs());
    let node = member(&cluster(), task).set("auth", "plain").set("allow_non_loopback", "true");
    node.set("silence_bound", silence).set("join_timeout", "2s").start().expect("the node starts")
}

/// A stranger has connections from all ports of 127.0.0.1 with those of both members.
#[test]
fn members_join_although_a_stranger_has_all_ports_towards_them() {
    in_new_network("role_without_ports");
}

#[test]
#[ignore = "a role, not a test"]
fn role_without_ports() {
    ip("link set lo up");
    std::fs::write("/proc/sys/net/ipv4/ip_local_port_range", "40000 40007").expect("root may");
    let mut held = Vec::new();
    let mut hold_all_towards = |address: &str| {
        let listener = TcpListener::bind(address).expect("nobody listens there");
        let error = loop {
            match TcpStream::connect(address) {
                Ok(stream) => held.push((stream, listener.accept().expect("it has connected"))),
                Err(error) => break error,
            }
        };
        assert_eq!((error.kind(), held.len() % 8), (ErrorKind::AddrNotAvailable, 0), "{error}");
    };
    let addresses = ["127.0.0.1:4000", "127.0.0.1:4001"];
    addresses.iter().for_each(|address| hold_all_towards(address));
    let cluster = format!("w={}", addresses.join(","));
    let start = |task| member(&cluster, task).set("fabric", "shm").start().expect("the node starts");
    let nodes = [0, 1].map(start);
    std::thread::scope(|scope| {
        for node in &nodes {
            scope.spawn(|| node.join().expect("it calls from another address"));
        }
    });
}

#[test]
#[ignore = "takes long: tests/nightly"]
fn a_join_says_why_a_member_can_t_be_reached() {
    in_new_network("role_unreachable");
}

#[test]
#[ignore = "a role, not a test"]
fn role_unreachable() {
    ip("link set lo up");
    ip(&format!("addr add {}/32 dev lo", ADDRESSES[0]));
    let node = start(0);
    // The error of a call that began before a change can come after it.
    let expect = |what: &str, says: &str| {
        let began = Instant::now();
        loop {
            let error = node.join().expect_err("w/1 can't be reached").to_string();
            assert!(error.contains(&format!("w/1 at {}:4000", ADDRESSES[1])), "{error}");
            if error.contains(says) {
                return println!("{what}: {error}");
            }
            assert!(began.elapsed() < SOON, "{what} is not \"{says}\": {error}");
        }
    };
    expect("no route", "could not be reached: Network is unreachable");
    ip(&format!("route add unreachable {}", ADDRESSES[1]));
    expect("a route that leads nowhere", "could not be reached: No route to host");
    ip(&format!("route del unreachable {}", ADDRESSES[1]));
    // Packets leave, and nobody answers.
    ip("link add name gone arp off type ifb");
    ip("link set gone up");
    ip(&format!("route add {} dev gone", ADDRESSES[1]));
    expect("packets are lost", "never answered within");
    ip(&format!("route del {} dev gone", ADDRESSES[1]));
    ip(&format!("addr add {}/32 dev lo", ADDRESSES[1]));
    expect("nobody listens", "(connection refused): is the process running, or does a firewall refuse?");
}

#[test]
#[ignore = "takes long: tests/nightly"]
fn a_cut_network_is_not_called_a_death() {
    in_new_network("role_cut");
}

#[test]
#[ignore = "a role, not a test"]
fn role_cut() {
    ip("link set lo up");
    ADDRESSES.iter().for_each(|address| ip(&format!("addr add {address}/32 dev lo")));
    let nodes = [0, 1].map(start);
    std::thread::scope(|scope| {
        nodes.iter().for_each(|node| drop(scope.spawn(|| node.join().expect("both are there"))));
    });
    let cut = Instant::now();
    ip("link set lo down");
    let lost = |node: &Node| node.peers()[0].state.error().cloned();
    while !nodes.iter().all(|node| lost(node).is_some()) {
        assert!(cut.elapsed() < SILENCE * 5, "no loss after {:?}", cut.elapsed());
        nodes.iter().for_each(|node| drop(node.progress()));
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut silent = Vec::new();
    for (task, node) in nodes.iter().enumerate() {
        let error = lost(node).expect("seen");
        println!("w/{task}, after {:?}: {error}", cut.elapsed());
        let Error::PeerLost { peer, cause, .. } = &error else { panic!("{error}") };
        assert_eq!(peer.task() as usize, 1 - task);
        // The second one to lose the link learns over shared memory that the first has closed it.
        assert!(matches!(cause, LossCause::Silent { .. } | LossCause::Closed(_)), "it lives: {error}");
        if error.to_string().contains("the network to it may be down") {
            silent.push(task);
        }
    }
    assert!(!silent.is_empty(), "nobody names the network");
    for (task, node) in nodes.iter().enumerate() {
        let error = node.join().expect_err("it can't be reached").to_string();
        println!("{error}");
        let heard_nothing = error.contains("was lost (nothing was heard from it");
        assert!(error.contains(&format!("w/{}", 1 - task)), "{error}");
        assert!(heard_nothing || !silent.contains(&task), "{error}");
        assert!(!error.contains("its process has ended"), "{error}");
    }
    ip("link set lo up");
    for node in &nodes {
        while let Err(error) = node.join() {
            assert!(cut.elapsed() < SILENCE * 10, "{error}");
        }
    }
    println!("linked again {:?} after the cut", cut.elapsed());
}
