//! Repairs that end without new connections, and why.

use super::hostile_peer::{Got, TIMEOUT, Victim, link_options, meet, meet_at};
use super::{pool, tensor_mut};
use crate::fabric::tcp::connect::address::TcpAddress;
use crate::fabric::tcp::connect::hello::{BYTES, Hello, Speaker};
use crate::fabric::tcp::frame::{Frame, FrameTarget, PayloadCarrier};
use crate::fabric::tcp::link::MainEnd;
use crate::fabric::tcp::session::RepairOutcome;
use crate::fabric::tcp::{TcpFabric, TcpOptions};
use crate::fabric::{Completions, Endpoint, Fabric, LinkFailure, Port, Role};
use rustix::io::Errno;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
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

/// A hostile acceptor: it asks for connections, and resumes nothing.
struct HostileAcceptor {
    listener: TcpListener,
    /// Where the victim listens, with the token of both sides.
    to: TcpAddress,
}

impl HostileAcceptor {
    /// Accepts all connections of a link and answers their hellos. Returns their number with them;
    /// `None` if none come soon.
    fn accept(&self) -> Option<(u32, Vec<TcpStream>)> {
        let (start, mut sockets, mut number) = (Instant::now(), Vec::new(), 0);
        while sockets.len() <= usize::from(self.to.streams) {
            match self.listener.accept() {
                Ok((socket, _)) => sockets.push(socket),
                Err(_) if start.elapsed() > Duration::from_millis(500) => return None,
                Err(_) => std::thread::yield_now(),
            }
        }
        for mut socket in &sockets {
            let mut said = [0; BYTES];
            socket.set_nonblocking(false).expect("set");
            socket.read_exact(&mut said).ok()?;
            let hello = Hello::from_bytes(&said).expect("a hello");
            number = hello.number;
            socket.write_all(&Hello { speaker: Speaker::Acceptor, ..hello }.to_bytes()).ok()?;
        }
        Some((number, sockets))
    }

    /// Asks for other connections than those with this number. `None` if nobody listens.
    fn ask(&self, number: u32) -> Option<TcpStream> {
        let mut socket = TcpStream::connect((self.to.hosts[0], self.to.port)).ok()?;
        let hello = Hello { speaker: Speaker::Acceptor, stream: 0, number, token: self.to.token };
        socket.write_all(&hello.to_bytes()).ok()?;
        Some(socket)
    }
}

#[test]
fn an_acceptor_that_asks_and_resumes_nothing_gets_no_more_time() {
    let pool = pool();
    let options = TcpOptions { user_timeout: Duration::from_secs(2), ..TcpOptions::default() };
    let fabric = TcpFabric::new(&pool, options).expect("a fabric");
    let mut port = fabric.port().expect("a port");
    let endpoint = fabric.endpoint(0, &link_options()).expect("an endpoint");
    let to = TcpAddress::from_bytes(endpoint.address()).expect("an address");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.set_nonblocking(true).expect("set");
    let theirs = TcpAddress { port: listener.local_addr().expect("bound").port(), ..to.clone() };
    let acceptor = HostileAcceptor { listener, to };
    std::thread::scope(|scope| {
        let hostile = scope.spawn(|| {
            let start = Instant::now();
            let mut present = acceptor.accept();
            let mut rounds = 0;
            // Before it ends the present ones, so that the victim has not seen their end.
            while let Some((number, _sockets)) = present.take_if(|_| start.elapsed() < TIMEOUT) {
                let Some(_asks) = acceptor.ask(number) else { break };
                present = acceptor.accept();
                rounds += 1;
            }
            (rounds, start.elapsed())
        });
        let link = endpoint.connect(Role::Initiator, &theirs.to_bytes(), TIMEOUT).expect("connected");
        let link = port.attach(link).expect("room");
        let mut victim = Victim { fabric, port, link };
        let got = victim.until_down();
        let (rounds, elapsed) = hostile.join().expect("no panic");
        println!("{rounds} rounds, {elapsed:?}: {got:?}");
        assert!(rounds > 1 && elapsed < TIMEOUT / 2, "{rounds} rounds, {elapsed:?}");
    });
}
