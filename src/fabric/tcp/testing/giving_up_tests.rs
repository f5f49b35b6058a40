//! Repairs that end without new connections, and why.

use super::hostile_peer::{Got, TIMEOUT, meet, meet_at};
use super::{pool, tensor_mut};
use crate::fabric::tcp::TcpOptions;
use crate::fabric::tcp::frame::{Frame, FrameTarget, PayloadCarrier};
use crate::fabric::tcp::link::{MainEnd, TcpLinkPhase};
use crate::fabric::tcp::session::RepairOutcome;
use crate::fabric::{Completions, LinkFailure, Port};
use rustix::io::Errno;
use std::io::Write;
use std::net::{Shutdown, TcpListener};
use std::time::{Duration, Instant};

#[test]
fn what_this_process_lacks_for_a_repair_is_not_the_network_s_fault() {
    let pool = pool();
    // Who listens there says nothing.
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    for (lack, remedy) in [
        (Errno::MFILE, "ulimit -n"),
        (Errno::NFILE, "fs.file-max"),
        (Errno::NOBUFS, "tcp_mem"),
        (Errno::NOMEM, "free memory"),
    ] {
        let port = silent.local_addr().expect("bound").port();
        let (mut victim, _peer) = meet_at(&pool, TcpOptions::default(), port);
        let link = victim.port.link_mut(victim.link);
        link.break_off(MainEnd::Broken(Errno::TIMEDOUT), &mut Completions::default());
        link.session.mailbox().deliver(RepairOutcome::GivenUp(Some(lack)));
        let got = victim.until_down();
        let [Got::Down(LinkFailure::Resources(why))] = &got[..] else { panic!("{got:?}") };
        assert!(why.contains(&lack.to_string()) && why.contains(remedy), "{why}");
        assert!(why.contains(&Errno::TIMEDOUT.to_string()), "{why}");
    }
}

#[test]
fn a_peer_that_cuts_a_payload_and_keeps_the_main_connection_loses_the_link_in_time() {
    let pool = pool();
    let (user_timeout, main_bytes) = (Duration::from_secs(2), 0);
    let options = TcpOptions { main_bytes, user_timeout, ..TcpOptions::default() };
    let (mut victim, mut peer) = meet(&pool, options);
    let target = victim.port.grant(victim.link, tensor_mut(&pool, 64)).expect("room");
    let (target, by) = (FrameTarget::from(&target), PayloadCarrier::Bulk);
    peer.send(Frame::Write { target, len: 64, immediate: None, by }, &[]);
    peer.bulk[0].write_all(&[7; 63]).expect("sent");
    peer.bulk[0].shutdown(Shutdown::Write).expect("open");
    let start = Instant::now();
    let got = victim.until_down();
    let [Got::Down(why @ LinkFailure::Connection { .. })] = &got[..] else { panic!("{got:?}") };
    assert!(why.to_string().contains(&Errno::TIMEDOUT.to_string()), "{why}");
    assert!((Duration::from_millis(900)..Duration::from_secs(4)).contains(&start.elapsed()), "{got:?}");
}

#[test]
fn a_peer_that_refuses_has_died_only_if_its_host_ended_the_connections() {
    let pool = pool();
    for (end, has_died) in [
        (MainEnd::Closed, true),
        (MainEnd::Broken(Errno::CONNRESET), true),
        (MainEnd::Broken(Errno::PIPE), true),
        (MainEnd::Broken(Errno::TIMEDOUT), false),
        (MainEnd::Broken(Errno::HOSTUNREACH), false),
    ] {
        // Nobody listens at the peer's address, and the peer lives.
        let (mut victim, _peer) = meet(&pool, TcpOptions::default());
        victim.port.link_mut(victim.link).break_off(end, &mut Completions::default());
        let got = victim.until_down();
        let [Got::Down(why)] = &got[..] else { panic!("{got:?}") };
        let said = why.to_string();
        if has_died {
            assert_eq!(*why, LinkFailure::PeerDied { pid: std::process::id() });
        } else {
            let MainEnd::Broken(error) = end else { unreachable!("the network's") };
            assert!(matches!(why, LinkFailure::Connection { .. }), "{said}");
            assert!(said.contains(&error.to_string()), "{said}");
            assert!(said.contains("its host refuses new connections: usually its process has ended, or"));
        }
    }
}

#[test]
fn a_peer_that_ends_new_connections_before_it_has_resumed_is_not_reported_as_dead() {
    let pool = pool();
    for resumes in [false, true] {
        let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = silent.local_addr().expect("bound").port();
        let (mut victim, mut peer) = meet_at(&pool, TcpOptions::default(), port);
        let link = victim.port.link_mut(victim.link);
        link.break_off(MainEnd::Broken(Errno::TIMEDOUT), &mut Completions::default());
        peer.dial_again(1);
        if resumes {
            peer.send(Frame::Resume, &[]);
        }
        let start = Instant::now();
        let is_reached = |phase: &TcpLinkPhase| match phase {
            TcpLinkPhase::Resuming => !resumes,
            phase => resumes && matches!(phase, TcpLinkPhase::Up),
        };
        while !is_reached(&victim.port.link_mut(victim.link).phase) {
            victim.poll();
            assert!(start.elapsed() < TIMEOUT, "no new connections");
        }
        // It gives the link up, and listens no more.
        drop((silent, peer));
        let got = victim.until_down();
        let [Got::Down(why)] = &got[..] else { panic!("{got:?}") };
        if resumes {
            assert_eq!(*why, LinkFailure::PeerDied { pid: std::process::id() });
        } else {
            assert!(matches!(why, LinkFailure::Connection { .. }), "{why}");
            assert!(why.to_string().contains(&Errno::TIMEDOUT.to_string()), "{why}");
        }
    }
}
