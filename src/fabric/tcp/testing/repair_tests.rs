//! Connections that break between two sides that live: under traffic, and with a peer that breaks
//! the rules of a repair.

use super::hostile_peer::{DEPTH, Got, POLLS, TIMEOUT, TcpHostilePeer, Victim, link_options, meet, meet_at};
use super::{pool, pool_of, tensor, tensor_mut};
use crate::fabric::tcp::connect::address::{TcpAddress, Token};
use crate::fabric::tcp::connect::hello::{Hello, Speaker};
use crate::fabric::tcp::frame::{DecodedFrame, Frame, FrameTarget, PayloadCarrier};
use crate::fabric::tcp::link::TcpLinkPhase;
use crate::fabric::tcp::{TcpFabric, TcpOptions};
use crate::fabric::{Endpoint, Fabric, LinkFailure, Port, PostError, Role, Sleep, Sleeper};
use crate::memory::Pool;
use crate::wire::{Grant, Immediate, Slot};
use rustix::net::connect_unspec;
use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Bytes of a destination.
const PLACE: usize = 200_000;
/// Destinations of checked writes. One more is for those that are not.
const PLACES: usize = 8;
/// Writes under way at most. None of two in a row of so many has the place of the other.
const WRITES: usize = PLACES / 2;
/// Lengths of values that are written.
const LENGTHS: [usize; 6] = [10, 1000, 5000, 60_000, 100_000, PLACE];

/// Pseudo-random numbers (splitmix64), the same in each run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        (mixed ^ mixed >> 31) % end
    }
}

/// Breaks a connection, unless it is broken already.
fn break_connection(socket: &TcpStream, how: u64) {
    match how {
        // What is under way still comes.
        0 => _ = socket.shutdown(Shutdown::Both),
        1 => _ = socket.shutdown(Shutdown::Write),
        // A reset: what is under way is lost, on this side too.
        _ => _ = connect_unspec(socket),
    }
}

/// The bytes of a value: they depend on its number alone.
fn value(number: u32, len: usize) -> &'static [u8] {
    static BYTES: LazyLock<Vec<u8>> =
        LazyLock::new(|| (0..2 * PLACE as u32).map(|k| (k.wrapping_mul(0x9E37_79B9) >> 24) as u8).collect());
    &BYTES[number as usize % PLACE..][..len]
}

fn len_of(number: u32) -> usize {
    LENGTHS[number as usize / 2 % LENGTHS.len()]
}

fn immediate(number: u32) -> Immediate {
    Immediate { generation: 1, slot: Slot::new(number % 1000).expect("20 bits") }
}

/// One side of a link under traffic in both directions. Values with odd numbers are messages. Those
/// with even ones are written.
struct Side {
    victim: Victim,
    pool: Pool,
    places: Vec<Grant>,
    readable: Grant,
    /// What this side may write and read of the other's.
    theirs: Option<(Vec<Grant>, Grant)>,
    sent: u32,
    received: u32,
    writes: usize,
    /// Lengths of the reads under way.
    reads: VecDeque<usize>,
    repairs: u32,
}

impl Side {
    fn new(pool: &Pool, mut victim: Victim) -> Self {
        let (port, link) = (&mut victim.port, victim.link);
        port.post_receives(link, u32::MAX);
        let places = (0..=PLACES).map(|_| port.grant(link, tensor_mut(pool, PLACE)).expect("room")).collect();
        let readable = port.expose(link, &tensor(pool, value(7, PLACE))).expect("room");
        let (theirs, pool) = (None, pool.clone());
        let (sent, received, writes, reads, repairs) = (0, 0, 0, VecDeque::new(), 0);
        Side { victim, pool, places, readable, theirs, sent, received, writes, reads, repairs }
    }

    fn read(&mut self, numbers: &mut Numbers) {
        let Some((_, readable)) = &self.theirs else { return };
        let len = LENGTHS[numbers.below(6) as usize];
        let from = readable.part(0, len as u64).expect("inside");
        if self.reads.len() < 2 {
            match self.victim.port.read(self.victim.link, tensor_mut(&self.pool, len), &from) {
                Ok(()) => self.reads.push_back(len),
                Err((error, _)) => assert_eq!(error, PostError::Full),
            }
        }
    }

    /// Sends or writes the next value. At most one write is under way to each place.
    fn send(&mut self) {
        let Some((places, _)) = &self.theirs else { return };
        let (port, link, number) = (&mut self.victim.port, self.victim.link, self.sent);
        let posted = match (number % 2, len_of(number)) {
            (1, _) => port.send(link, &number.to_le_bytes()),
            (_, len @ ..=224) => {
                port.write_inline(link, value(number, len), &places[PLACES], Some(immediate(number)))
            }
            (_, len) if self.writes < WRITES => {
                let source = tensor(&self.pool, value(number, len));
                let place = &places[number as usize / 2 % PLACES];
                let posted = port.write(link, &source, len as u64, place, Some(immediate(number)));
                self.writes += usize::from(posted.is_ok());
                posted
            }
            _ => return,
        };
        match posted {
            Ok(()) => self.sent += 1,
            Err(error) => assert_eq!(error, PostError::Full),
        }
    }

    fn poll(&mut self) {
        for got in self.victim.poll() {
            match got {
                Got::Message(bytes) => {
                    assert_eq!(bytes, self.received.to_le_bytes(), "a message comes once, in its order");
                    self.received += 1;
                }
                Got::Immediate(came, bytes) => {
                    let number = self.received;
                    assert_eq!((came, bytes), (immediate(number), len_of(number) as u64));
                    self.check(number);
                    self.received += 1;
                }
                Got::Done => self.writes -= 1,
                Got::Read(bytes) => {
                    let len = self.reads.pop_front().expect("one was posted");
                    assert!(bytes == value(7, len), "other bytes were read");
                }
                Got::Repaired => self.repairs += 1,
                other => panic!("{other:?}"),
            }
        }
    }

    /// Looks at what was written. The writer uses the place again when it knows of the end.
    fn check(&mut self, number: u32) {
        let len = len_of(number);
        if len <= 224 {
            return;
        }
        let target = FrameTarget::from(&self.places[number as usize / 2 % PLACES]);
        let link = self.victim.port.link_mut(self.victim.link);
        let written = link.grants.writable(target, len as u64).expect("granted");
        assert!(written == value(number, len), "other bytes were written");
    }

    fn break_one(&mut self, numbers: &mut Numbers) {
        let link = self.victim.port.link_mut(self.victim.link);
        let sockets: Vec<&TcpStream> = link.out.sockets.all().collect();
        break_connection(sockets[numbers.below(sockets.len() as u64) as usize], numbers.below(3));
    }
}

/// Two sides of a link. The first one is the acceptor.
fn two_sides(pool: &Pool, options: &TcpOptions) -> ([Side; 2], [TcpAddress; 2]) {
    let fabrics = [(); 2].map(|()| TcpFabric::new(pool, options.clone()).expect("a fabric"));
    let [a, b] = fabrics.each_ref().map(|fabric| fabric.endpoint(0, &link_options()).expect("an endpoint"));
    let (to_a, to_b) = (a.address().to_vec(), b.address().to_vec());
    let (a, b) = std::thread::scope(|scope| {
        let a = scope.spawn(|| a.connect(Role::Acceptor, &to_b, TIMEOUT).expect("accepted"));
        let b = b.connect(Role::Initiator, &to_a, TIMEOUT).expect("connected");
        (a.join().expect("no panic"), b)
    });
    let [for_a, for_b] = fabrics;
    let mut sides = [(for_a, a), (for_b, b)].map(|(fabric, link)| {
        let mut port = fabric.port().expect("a port");
        let link = port.attach(link).expect("room");
        Side::new(pool, Victim { fabric, port, link })
    });
    let [a, b] = &mut sides;
    a.theirs = Some((b.places.clone(), b.readable));
    b.theirs = Some((a.places.clone(), a.readable));
    let address = |bytes: &[u8]| TcpAddress::from_bytes(bytes).expect("an address");
    (sides, [address(&to_a), address(&to_b)])
}

/// Polls both sides until all has come.
fn drain([a, b]: &mut [Side; 2]) {
    let start = Instant::now();
    let is_open = |side: &Side| side.writes > 0 || !side.reads.is_empty();
    while (a.received, b.received) != (b.sent, a.sent) || is_open(a) || is_open(b) {
        assert!(
            start.elapsed() < TIMEOUT,
            "{} of {} and {} of {} came; {} and {} writes, {} and {} reads are open",
            a.received,
            b.sent,
            b.received,
            a.sent,
            a.writes,
            b.writes,
            a.reads.len(),
            b.reads.len()
        );
        a.poll();
        b.poll();
    }
}

#[test]
fn what_connections_lose_is_sent_again_once_and_in_order() {
    let all_bulk = TcpOptions { main_bytes: 0, streams: 3, poll_bytes: 64 << 10, ..TcpOptions::default() };
    let batched = [false, true];
    for (options, in_batches) in [TcpOptions::default(), all_bulk].into_iter().zip(batched) {
        let pool = pool_of(64 << 20);
        let (mut sides, _) = two_sides(&pool, &options);
        let mut numbers = Numbers(1);
        let (start, mut breaks) = (Instant::now(), 0);
        while sides.iter().any(|side| side.repairs < 50) {
            let side = &mut sides[numbers.below(2) as usize];
            if in_batches {
                side.victim.port.begin_batch();
            }
            (0..numbers.below(8)).for_each(|_| side.send());
            if numbers.below(8) == 0 {
                side.read(&mut numbers);
            }
            side.victim.port.end_batch();
            sides.iter_mut().for_each(Side::poll);
            if numbers.below(100) == 0 {
                breaks += 1;
                sides[numbers.below(2) as usize].break_one(&mut numbers);
            }
            assert!(start.elapsed() < 6 * TIMEOUT, "{breaks} breaks made no 50 repairs");
        }
        drain(&mut sides);
        let [a, b] = &sides;
        println!(
            "{breaks} breaks, {} and {} repairs, {} and {} values, after {:?}",
            a.repairs,
            b.repairs,
            a.received,
            b.received,
            start.elapsed()
        );
        assert!(a.received.min(b.received) > 1000);
    }
}

/// Sleeps and polls as a poller does, until both sides have seen so many repairs. Each counts
/// itself in `repaired`, and polls on for the other one.
fn sleep_until_repaired(side: &mut Side, repairs: u32, repaired: &AtomicU32) {
    let sleeper = side.victim.port.sleeper();
    let (start, mut longest) = (Instant::now(), TIMEOUT);
    loop {
        if side.repairs >= repairs && longest == TIMEOUT {
            repaired.fetch_add(1, Ordering::Relaxed);
            longest = Duration::from_millis(5);
        }
        if repaired.load(Ordering::Relaxed) == 2 {
            return;
        }
        assert!(start.elapsed() < TIMEOUT, "not repaired: {} of {repairs}", side.repairs);
        let seen = sleeper.seen();
        if side.victim.port.arm() {
            sleeper.sleep(Sleep::Waiter, seen, longest);
        }
        side.poll();
    }
}

#[test]
fn an_idle_link_is_repaired_while_both_sides_sleep() {
    let pool = pool_of(16 << 20);
    for broken in [0, 1] {
        let (mut sides, _) = two_sides(&pool, &TcpOptions::default());
        let mut least = TIMEOUT;
        for round in 1..=5 {
            let link = sides[broken].victim.port.link_mut(sides[broken].victim.link);
            break_connection(&link.out.sockets.main, 2);
            let (start, repaired) = (Instant::now(), AtomicU32::new(0));
            std::thread::scope(|scope| {
                for side in &mut sides {
                    scope.spawn(|| sleep_until_repaired(side, round, &repaired));
                }
            });
            least = least.min(start.elapsed());
            sides.iter_mut().for_each(Side::send);
            drain(&mut sides);
        }
        println!("repaired after {least:?}");
        // A sleep that nobody ends takes 100 ms.
        assert!(least < Duration::from_millis(50));
    }
}

#[test]
fn who_is_not_the_peer_or_says_an_old_number_takes_no_connection_over() {
    let pool = pool_of(16 << 20);
    let (mut sides, addresses) = two_sides(&pool, &TcpOptions::default());
    // A repair, so that there is an old number.
    let link = sides[1].victim.port.link_mut(sides[1].victim.link);
    break_connection(&link.out.sockets.main, 0);
    let start = Instant::now();
    while sides.iter().any(|side| side.repairs == 0) {
        sides.iter_mut().for_each(Side::poll);
        assert!(start.elapsed() < TIMEOUT);
    }
    let wrong = Token::draw().expect("random");
    let mut strangers = Vec::new();
    for (own, speaker) in addresses.iter().zip([Speaker::Initiator, Speaker::Acceptor]) {
        let other = if speaker == Speaker::Initiator { Speaker::Acceptor } else { Speaker::Initiator };
        let newest = if speaker == Speaker::Initiator { 1 } else { 0 };
        for (speaker, number, token) in [
            (speaker, 9, wrong),
            (speaker, newest, own.token),
            (speaker, 0, own.token),
            (other, 9, own.token),
        ] {
            for stream in [0, 1] {
                let mut socket = TcpStream::connect((own.hosts[0], own.port)).expect("it listens");
                socket.write_all(&Hello { speaker, stream, number, token }.to_bytes()).expect("sent");
                strangers.push(socket);
            }
        }
        let mut garbage = TcpStream::connect((own.hosts[0], own.port)).expect("it listens");
        garbage.write_all(&[0xFF; 100]).expect("sent");
        strangers.push(garbage);
        strangers.extend((0..40).map(|_| TcpStream::connect((own.hosts[0], own.port)).expect("it listens")));
    }
    // The silent ones are closed after a second.
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(1500) {
        sides.iter_mut().for_each(Side::send);
        sides.iter_mut().for_each(Side::poll);
    }
    drain(&mut sides);
    assert!(sides.iter().all(|side| side.repairs == 1), "a stranger broke the link");
    for mut stranger in strangers {
        stranger.set_read_timeout(Some(TIMEOUT)).expect("set");
        let read = stranger.read(&mut [0; 64]);
        assert!(!matches!(read, Ok(1..)), "a stranger got an answer");
    }
    // And the peer still gets in.
    let link = sides[0].victim.port.link_mut(sides[0].victim.link);
    break_connection(&link.out.sockets.main, 2);
    let start = Instant::now();
    while sides.iter().any(|side| side.repairs == 1) {
        sides.iter_mut().for_each(Side::poll);
        assert!(start.elapsed() < TIMEOUT);
    }
}

/// The next frame that the victim sent, without payload.
fn next_frame(victim: &mut Victim, socket: &mut TcpStream) -> DecodedFrame {
    socket.set_read_timeout(Some(Duration::from_millis(1))).expect("set");
    let mut bytes = [0; 32];
    let (mut len, start) = (0, Instant::now());
    loop {
        assert!(start.elapsed() < TIMEOUT, "no frame came");
        victim.poll();
        if let Ok(count @ 1..) = socket.read(&mut bytes[len..][..8]) {
            len += count;
        }
        if let Some(frame) = Frame::decode(&bytes[..len]).expect("a frame") {
            assert_eq!(frame.header, len);
            return frame;
        }
    }
}

fn message() -> Frame {
    Frame::Send { len: 0 }
}

impl TcpHostilePeer {
    /// Sends a header that acknowledges so many frames.
    fn send_with(&mut self, frame: Frame, acknowledged: u32) {
        self.send_raw(&frame.header(acknowledged));
    }
}

#[test]
fn the_peer_takes_over_connections_that_live_and_says_what_it_lacks() {
    let pool = pool();
    let (mut victim, mut peer) = meet(&pool, TcpOptions::default());
    victim.port.post_receives(victim.link, 10);
    for _ in 0..3 {
        victim.port.send(victim.link, b"").expect("room");
    }
    peer.send_with(message(), 2);
    assert_eq!(victim.until(1), [Got::Message(Vec::new())]);
    let old = peer.dial_again(1);
    assert_eq!(next_frame(&mut victim, &mut peer.main).frame, Frame::Resume);
    // Of three it has got two, so the third comes again.
    peer.send_with(Frame::Resume, 2);
    assert_eq!(victim.until(1), [Got::Repaired]);
    let again = next_frame(&mut victim, &mut peer.main);
    assert_eq!((again.frame, again.acknowledged), (message(), Some(1)));
    // The old connection is of no use.
    let _ = (&old[0]).write_all(&message().header(2));
    peer.send_with(Frame::Send { len: 2 }, 3);
    peer.send_raw(b"ok");
    assert_eq!(victim.until(1), [Got::Message(b"ok".to_vec())]);
}

#[test]
fn a_wrong_number_or_a_resume_out_of_place_ends_the_link() {
    let pool = pool();
    let check = |text: &str, act: &dyn Fn(&mut Victim, &mut TcpHostilePeer)| {
        let (mut victim, mut peer) = meet(&pool, TcpOptions::default());
        victim.port.post_receives(victim.link, 10);
        for _ in 0..3 {
            victim.port.send(victim.link, b"").expect("room");
        }
        peer.send_with(message(), 2);
        assert_eq!(victim.until(1), [Got::Message(Vec::new())]);
        act(&mut victim, &mut peer);
        let got = victim.until_down();
        let Some(Got::Down(LinkFailure::Protocol(why))) = got.last() else { panic!("{got:?}") };
        assert!(why.contains(text), "{why}");
    };
    let number = "frames, where 2 to 3 can be";
    for wrong in [1, 4, 0, u32::MAX] {
        check(number, &|_, peer| peer.send_with(message(), wrong));
        check(number, &|_, peer| peer.send_with(Frame::Acknowledge, wrong));
        check(number, &|victim, peer| {
            peer.dial_again(1);
            next_frame(victim, &mut peer.main);
            peer.send_with(Frame::Resume, wrong);
        });
    }
    check("resumed", &|_, peer| peer.send_with(Frame::Resume, 2));
    check("resume", &|victim, peer| {
        peer.dial_again(1);
        next_frame(victim, &mut peer.main);
        peer.send_with(message(), 2);
    });
    check("resumed", &|victim, peer| {
        peer.dial_again(1);
        next_frame(victim, &mut peer.main);
        peer.send_with(Frame::Resume, 2);
        peer.send_with(Frame::Resume, 2);
    });
}

#[test]
fn what_was_not_sent_can_t_be_acknowledged() {
    let pool = pool();
    let (mut victim, mut peer) = meet(&pool, TcpOptions { main_bytes: 0, ..TcpOptions::default() });
    // More than the sockets take, by the connection that nobody reads.
    let source = tensor(&pool, &vec![1; 900_000]);
    let anywhere = Grant { region: 0, key: 1, offset: 0, len: 900_000 };
    for _ in 0..DEPTH {
        victim.port.write(victim.link, &source, 900_000, &anywhere, None).expect("room");
    }
    peer.send_with(Frame::Acknowledge, DEPTH);
    let got = victim.until_down();
    assert!(matches!(got.last(), Some(Got::Down(LinkFailure::Protocol(_)))), "{got:?}");
    assert!(source.is_unique(), "held after the link's end");
}

#[test]
fn a_payload_that_comes_again_needs_its_grant_again() {
    let pool = pool();
    for is_revoked in [false, true] {
        let (mut victim, mut peer) = meet(&pool, TcpOptions::default());
        victim.port.post_receives(victim.link, 10);
        let granted = victim.port.grant(victim.link, tensor_mut(&pool, 64)).expect("room");
        let write = Frame::Write {
            target: FrameTarget::from(&granted),
            len: 64,
            immediate: Some(immediate(1)),
            by: PayloadCarrier::Main,
        };
        peer.send_with(write, 0);
        peer.send_raw(&[5; 63]);
        (0..100).for_each(|_| assert_eq!(victim.poll(), []));
        peer.dial_again(1);
        next_frame(&mut victim, &mut peer.main);
        if is_revoked {
            victim.port.revoke(victim.link, &granted).expect("granted");
        }
        peer.send_with(Frame::Resume, 0);
        peer.send_with(write, 0);
        peer.send_raw(&[6; 64]);
        if is_revoked {
            let got = victim.until_down();
            assert!(matches!(got.last(), Some(Got::Down(LinkFailure::Protocol(_)))), "{got:?}");
        } else {
            assert_eq!(victim.until(2), [Got::Repaired, Got::Immediate(immediate(1), 64)]);
            assert_eq!(victim.port.revoke(victim.link, &granted).expect("granted").bytes(), [6; 64]);
        }
    }
}

#[test]
fn a_peer_that_does_not_connect_again_is_given_up_in_time() {
    let pool = pool();
    let options = TcpOptions { user_timeout: Duration::from_secs(2), ..TcpOptions::default() };
    // Somebody listens at the peer's address, and says nothing.
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let (mut victim, peer) = meet_at(&pool, options, silent.local_addr().expect("bound").port());
    victim.port.send(victim.link, b"kept").expect("room");
    drop(peer);
    let start = Instant::now();
    let got = victim.until_down();
    println!("given up after {:?}: {got:?}", start.elapsed());
    assert!(matches!(got.last(), Some(Got::Down(LinkFailure::Connection { .. }))), "{got:?}");
    assert!((Duration::from_millis(900)..Duration::from_secs(3)).contains(&start.elapsed()));
    // Nobody listens any more: its process has ended.
    let (mut victim, peer) = meet(&pool, TcpOptions::default());
    drop(peer);
    let start = Instant::now();
    assert_eq!(victim.until_down(), [Got::Down(LinkFailure::PeerDied { pid: std::process::id() })]);
    println!("dead after {:?}", start.elapsed());
    assert!(start.elapsed() < Duration::from_millis(500));
}

#[test]
fn repairs_that_bring_nothing_share_their_time() {
    let pool = pool_of(16 << 20);
    let options = TcpOptions { user_timeout: Duration::from_secs(2), ..TcpOptions::default() };
    let (mut sides, _) = two_sides(&pool, &options);
    let (start, mut breaks) = (Instant::now(), 0);
    let why = loop {
        // A network that ends each new connection before it was of use.
        for side in &mut sides {
            let link = side.victim.port.link_mut(side.victim.link);
            if breaks == 0 || matches!(link.phase, TcpLinkPhase::Resuming) {
                break_connection(&link.out.sockets.main, 2);
                breaks += 1;
            }
        }
        let got: Vec<Got> = sides.iter_mut().flat_map(|side| side.victim.poll()).collect();
        if let Some(Got::Down(why)) = got.into_iter().next() {
            break why;
        }
        assert!(start.elapsed() < TIMEOUT, "no end after {breaks} breaks");
    };
    println!("{breaks} breaks, {:?}: {why}", start.elapsed());
    assert!(breaks > 4 && matches!(why, LinkFailure::Connection { .. }), "{breaks}, {why}");
}

#[test]
fn an_idle_link_that_breaks_again_much_later_has_the_whole_time_for_its_repair() {
    let pool = pool_of(16 << 20);
    let options = TcpOptions { user_timeout: Duration::from_secs(1), ..TcpOptions::default() };
    let (mut sides, _) = two_sides(&pool, &options);
    for _ in 0..2 {
        let link = sides[0].victim.port.link_mut(sides[0].victim.link);
        break_connection(&link.out.sockets.main, 2);
        let (start, mut repaired) = (Instant::now(), 0);
        // Longer than a repair may take.
        while repaired < 2 || start.elapsed() < options.user_timeout * 2 {
            for got in sides.iter_mut().flat_map(|side| side.victim.poll()) {
                assert_eq!(got, Got::Repaired);
                repaired += 1;
            }
            assert!(start.elapsed() < TIMEOUT, "{repaired} sides have new connections");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Victim {
    /// The first events, so many.
    fn until(&mut self, count: usize) -> Vec<Got> {
        let mut all = Vec::new();
        for _ in 0..POLLS {
            all.extend(self.poll());
            if all.len() >= count {
                return all;
            }
            std::thread::yield_now();
        }
        panic!("only {all:?} came");
    }
}
