//! Both sides of a link in one process: its sockets and their options, credits that find no
//! room, and payloads of a side that sleeps.

use super::hostile_peer::{TIMEOUT, Victim, link_options, meet};
use super::{pool, pool_of, tensor};
use crate::fabric::tcp::connect::address::TcpAddress;
use crate::fabric::tcp::connect::hello::{BYTES, Hello, Speaker};
use crate::fabric::tcp::frame::MAX_SEND;
use crate::fabric::tcp::{TcpFabric, TcpOptions};
use crate::fabric::{Completions, Endpoint, Fabric, Port, Role, Sleep, Sleeper};
use crate::memory::Pool;
use crate::wire::Grant;
use rustix::net::sockopt;
use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

const BUSY_POLL: Duration = Duration::from_micros(70);

/// Whether the kernel lets this process set the option on a socket of its own.
fn takes_busy_poll() -> bool {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let socket = TcpStream::connect(listener.local_addr().expect("bound")).expect("it listens");
    match socket2::SockRef::from(&socket).set_busy_poll(BUSY_POLL.as_micros() as u32) {
        Ok(()) => true,
        Err(error) => {
            println!("skipped: busy polling of the sockets, which takes CAP_NET_ADMIN: {error}");
            false
        }
    }
}

/// What sockets have if nobody sets it.
fn usual_busy_poll() -> Duration {
    let told = std::fs::read_to_string("/proc/sys/net/core/busy_read").ok();
    Duration::from_micros(told.and_then(|micros| micros.trim().parse().ok()).unwrap_or_default())
}

/// Each side of a link, the acceptor first.
fn both_sides(pool: &Pool, options: &TcpOptions) -> [Victim; 2] {
    let fabrics = [(); 2].map(|()| TcpFabric::new(pool, options.clone()).expect("a fabric"));
    let [a, b] = fabrics.each_ref().map(|fabric| fabric.endpoint(0, &link_options()).expect("an endpoint"));
    let (to_a, to_b) = (a.address().to_vec(), b.address().to_vec());
    let links = std::thread::scope(|scope| {
        let a = scope.spawn(|| a.connect(Role::Acceptor, &to_b, TIMEOUT).expect("accepted"));
        let b = b.connect(Role::Initiator, &to_a, TIMEOUT).expect("connected");
        [a.join().expect("no panic"), b]
    });
    let mut links = links.into_iter();
    fabrics.map(|fabric| {
        let mut port = fabric.port().expect("a port");
        let link = port.attach(links.next().expect("one for each")).expect("room");
        Victim { fabric, port, link }
    })
}

/// Checks each socket of a link, whose number it returns.
fn check_sockets(side: &mut Victim, busy_poll: Duration) -> usize {
    let sockets = side.port.link_mut(side.link).out.sockets.all();
    let checked = sockets.map(|socket| {
        assert!(socket.nodelay().expect("told"), "a short message waits for an acknowledgement");
        assert!(sockopt::socket_keepalive(socket).expect("told"), "a silent end is not found");
        let micros = socket2::SockRef::from(socket).busy_poll().expect("told");
        assert_eq!(u128::from(micros), busy_poll.as_micros());
    });
    checked.count()
}

#[test]
fn the_sockets_of_a_link_send_at_once_and_poll_busily_where_the_kernel_takes_it() {
    let usual = usual_busy_poll();
    let taken = if takes_busy_poll() { BUSY_POLL } else { usual };
    for (busy_poll, wanted) in [(BUSY_POLL, taken), (Duration::ZERO, usual)] {
        let options = TcpOptions { busy_poll, streams: 3, ..TcpOptions::default() };
        let pool = pool();
        for mut side in both_sides(&pool, &options) {
            assert_eq!(check_sockets(&mut side, wanted), 4, "the main one and three for bulk");
        }
    }
}

#[test]
fn a_hello_is_said_however_slowly_the_other_connections_open() {
    let (pool, options) = (pool(), TcpOptions { streams: 7, ..TcpOptions::default() });
    let fabric = TcpFabric::new(&pool, options).expect("a fabric");
    let initiator = fabric.endpoint(0, &link_options()).expect("an endpoint");
    let own = TcpAddress::from_bytes(initiator.address()).expect("an address");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    // Two connections may wait. The kernel drops the others, which are tried again after a second.
    rustix::net::listen(&listener, 1).expect("set");
    let there = TcpAddress { port: listener.local_addr().expect("bound").port(), ..own };
    std::thread::scope(|scope| {
        let connecting = scope.spawn(|| initiator.connect(Role::Initiator, &there.to_bytes(), TIMEOUT));
        let (mut socket, _) = listener.accept().expect("the initiator");
        let mut said = [0; BYTES];
        let read = socket.read_exact(&mut said);
        drop((socket, listener));
        connecting.join().expect("no panic").expect_err("the others are never open");
        read.expect("a hello");
        let hello = Hello::from_bytes(&said).expect("a hello");
        assert!(hello.speaker == Speaker::Initiator && hello.token.is(&there.token));
    });
}

/// The newest number of credits counts, so the peer would lack those of the newer one.
#[test]
fn credits_that_found_no_room_never_follow_newer_ones() {
    let pool = pool();
    let [mut a, mut b] = both_sides(&pool, &TcpOptions::default());
    b.port.post_receives(b.link, 10_000);
    // The peer acknowledges nothing, and the send buffer fills.
    let bytes = vec![0; MAX_SEND];
    let mut len = MAX_SEND;
    while len > 0 {
        a.port.poll(&mut Completions::default());
        if a.port.send(a.link, &bytes[..len]).is_err() {
            len /= 2;
        }
    }
    let waits = |a: &mut Victim| a.port.link_mut(a.link).unsent_credits.is_some();
    let older = (1..100).find(|returned| {
        a.port.publish_credits(a.link, *returned);
        waits(&mut a)
    });
    assert!(older.is_some());
    // The acknowledgement comes, and the next post frees what it acknowledges.
    let began = Instant::now();
    while a.port.send(a.link, &[1]).is_err() {
        assert!(began.elapsed() < TIMEOUT);
        b.port.poll(&mut Completions::default());
        // Reads without a poll.
        a.port.link_mut(a.link).receive(&mut Completions::default()).map_err(drop).expect("it is up");
    }
    assert!(waits(&mut a));
    a.port.publish_credits(a.link, 1000);
    let mut more = 100;
    while more > 0 {
        assert!(began.elapsed() < TIMEOUT, "{}", b.port.peer_credits(b.link));
        a.port.poll(&mut Completions::default());
        b.port.poll(&mut Completions::default());
        more -= u32::from(b.port.peer_credits(b.link) == 1000);
    }
    assert_eq!(b.port.peer_credits(b.link), 1000);
}

#[test]
fn a_side_that_sleeps_sends_a_long_payload_as_fast_as_it_is_read() {
    const LEN: usize = 32 << 20;
    const SLEEP: Duration = Duration::from_millis(100);
    let pool = pool_of(64 << 20);
    let options = TcpOptions { poll_bytes: 64 << 10, ..TcpOptions::default() };
    let (mut victim, mut peer) = meet(&pool, options);
    let granted = Grant { region: 0, key: 1, offset: 0, len: LEN as u64 };
    let source = tensor(&pool, &vec![1; LEN]);
    victim.port.write(victim.link, &source, LEN as u64, &granted, None).expect("room");
    let sleeper = victim.port.sleeper();
    let (start, mut whole_sleeps) = (Instant::now(), 0);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| peer.bulk[0].read_exact(&mut vec![0; LEN]).expect("it comes"));
        while !reader.is_finished() {
            assert!(start.elapsed() < TIMEOUT, "it is not sent");
            victim.poll();
            let seen = sleeper.seen();
            if victim.port.arm() {
                let before = Instant::now();
                sleeper.sleep(Sleep::Waiter, seen, SLEEP);
                whole_sleeps += u32::from(before.elapsed() >= SLEEP);
            }
        }
    });
    println!("{LEN} bytes took {:?}, with {whole_sleeps} sleeps that nothing ended", start.elapsed());
    // The last one waits for the reader, which does not acknowledge.
    assert!(whole_sleeps <= 5);
}
