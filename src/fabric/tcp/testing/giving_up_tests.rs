//! Repairs that end without new connections, and why.

use super::hostile_peer::{Got, meet_at};
use super::pool;
use crate::fabric::tcp::TcpOptions;
use crate::fabric::tcp::link::MainEnd;
use crate::fabric::tcp::session::RepairOutcome;
use crate::fabric::{Completions, LinkFailure};
use rustix::io::Errno;
use std::net::TcpListener;

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
