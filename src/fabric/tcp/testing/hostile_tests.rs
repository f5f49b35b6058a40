//! A hostile peer forges fields, sends garbage, cuts connections and reads nothing. Strangers try
//! to take its place.

use super::hostile_peer::{DEPTH, Got, POLLS, TIMEOUT, TcpHostilePeer, Victim, another, meet, say_hello};
use super::hostile_program::hostile_peer;
use super::{pool, tensor, tensor_mut};
use crate::fabric::forging::{ForgedField, Forgery, changes, forgeries, image};
use crate::fabric::tcp::connect::address::{TcpAddress, Token};
use crate::fabric::tcp::connect::hello::{Hello, Speaker};
use crate::fabric::tcp::frame::{Frame, FrameTarget, GoodbyeReason, PayloadCarrier};
use crate::fabric::tcp::{TcpFabric, TcpOptions};
use crate::fabric::{
    Endpoint, Fabric, LinkFailure, LinkId, LinkOptions, Port, PostError, Role, Sleep, Sleeper,
};
use crate::memory::Pool;
use crate::wire::{Grant, Immediate, Slot};
use proptest::prelude::*;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

/// Bytes of each grant, and of the part of it that an honest access names.
const GRANTED: u64 = 64;
const PART: u64 = 32;
const HOSTILE: u8 = 0x77;

impl Victim {
    /// The next events, at least one.
    fn next(&mut self) -> Vec<Got> {
        for _ in 0..POLLS {
            let got = self.poll();
            if !got.is_empty() {
                return got;
            }
            std::thread::yield_now();
        }
        panic!("nothing came");
    }
}

fn down(got: &[Got]) -> &LinkFailure {
    match got.last() {
        Some(Got::Down(why)) => why,
        other => panic!("{other:?}"),
    }
}

fn is_protocol(got: &[Got], text: &str) {
    let why = down(got);
    assert!(matches!(why, LinkFailure::Protocol(_)) && why.to_string().contains(text), "{why}");
}

fn immediate() -> Immediate {
    Immediate { generation: 3, slot: Slot::ZERO }
}

/// What the victim has granted to this peer, and to others.
struct Scene {
    pool: Pool,
    victim: Victim,
    peer: TcpHostilePeer,
    granted: Grant,
    exposed: Grant,
    revoked: Grant,
    /// Of another link.
    other: Grant,
    _others: (LinkId, TcpHostilePeer, crate::memory::TensorMut),
}

fn scene(pool: &Pool) -> Scene {
    let (mut victim, peer) = meet(pool, TcpOptions::default());
    let (neighbour, others) = another(&victim.fabric, &mut victim.port);
    let (link, port) = (victim.link, &mut victim.port);
    let target = || tensor_mut(pool, GRANTED as usize);
    let other = port.grant(neighbour, target()).expect("room");
    let revoked = port.grant(link, target()).expect("room");
    let back = port.revoke(link, &revoked).expect("granted");
    let granted = port.grant(link, target()).expect("room");
    let exposed = port.expose(link, &tensor(pool, &[0x33; GRANTED as usize])).expect("room");
    port.post_receives(link, 1);
    Scene {
        pool: pool.clone(),
        victim,
        peer,
        granted,
        exposed,
        revoked,
        other,
        _others: (neighbour, others, back),
    }
}

fn fields(scene: &Scene, to_read: bool) -> Vec<ForgedField> {
    let grant = if to_read { scene.exposed } else { scene.granted };
    let Grant { region, key, offset, len } = grant.part(8, PART).expect("inside");
    let all = [scene.granted, scene.exposed, scene.revoked, scene.other];
    let mut offsets: Vec<u64> = all.iter().map(|grant| grant.offset).collect();
    offsets.extend([grant.offset + GRANTED - PART, grant.offset + GRANTED - PART + 1]);
    let keys = all.iter().map(|grant| grant.key.into()).collect();
    let field = |name, bits, honest, known| ForgedField { name, bits, honest, known };
    vec![
        field("region", 16, region.into(), Vec::new()),
        field("key", 32, key.into(), keys),
        field("offset", 64, offset, offsets),
        field("length", 64, len, vec![GRANTED - 8, GRANTED - 7]),
    ]
}

/// Forges an access, and asserts that the victim gives what the rules say. Returns whether it gave
/// something.
fn forge(mut scene: Scene, changed: &[(&'static str, u64)], to_read: bool) -> bool {
    let grant = if to_read { scene.exposed } else { scene.granted };
    let mut named = grant.part(8, PART).expect("inside");
    for (field, value) in changed {
        match *field {
            "region" => named.region = *value as u16,
            "key" => named.key = *value as u32,
            "offset" => named.offset = *value,
            _ => named.len = *value,
        }
    }
    let end = named.offset.checked_add(named.len);
    let is_inside = named.offset >= grant.offset && end.is_some_and(|end| end <= grant.offset + GRANTED);
    let is_allowed = named.len == 0 || ((named.key, named.region) == (grant.key, grant.region) && is_inside);
    let mut expected = image(&scene.pool);
    let len = named.len;
    if to_read {
        scene.peer.send(Frame::Read { source: FrameTarget::from(&named), len, ticket: 0 }, &[]);
        // The answer to a read makes no event: the message behind it does.
        scene.peer.send(Frame::Send { len: 0 }, &[]);
    } else {
        let payload = vec![HOSTILE; len.min(200) as usize];
        let (target, immediate, by) = (FrameTarget::from(&named), Some(immediate()), PayloadCarrier::Main);
        scene.peer.send(Frame::Write { target, len, immediate, by }, &payload);
        if is_allowed && len > 0 {
            let from = named.offset as usize;
            expected[from..from + len as usize].fill(HOSTILE);
        }
    }
    let got = scene.victim.next();
    assert!(image(&scene.pool) == expected, "other bytes changed by {changed:?}");
    if !is_allowed {
        is_protocol(&got, "it used a key");
    } else if to_read {
        assert_eq!(got, [Got::Message(Vec::new())]);
        let mut answer = vec![0; 32 + len as usize];
        scene.peer.main.read_exact(&mut answer).expect("an answer");
        assert!(answer[32..].iter().all(|byte| *byte == 0x33), "other bytes were read");
    } else {
        assert_eq!(got, [Got::Immediate(immediate(), len)]);
    }
    is_allowed
}

#[test]
fn forged_fields_get_only_what_the_rules_allow() {
    let pool = pool();
    for to_read in [false, true] {
        let (mut given, mut refused) = (0, 0);
        let table = fields(&scene(&pool), to_read);
        for forgery in forgeries(&table) {
            let scene = scene(&pool);
            let Some(changed) = changes(&fields(&scene, to_read), &forgery) else { continue };
            match forge(scene, &changed, to_read) {
                true => given += 1,
                false => refused += 1,
            }
        }
        println!("to read {to_read}: {given} were allowed, {refused} refused");
        assert!(given > 3 && refused > 100);
    }
}

fn header_of(frame: Frame) -> Vec<u8> {
    let header = frame.header(0);
    let bytes: &[u8] = header.as_ref();
    bytes.to_vec()
}

/// Every kind of frame as an honest peer may send it in a scene, by the main connection or by bulk.
fn honest_frames(scene: &Scene) -> Vec<Frame> {
    let granted = scene.granted.part(8, PART).expect("inside");
    let (target, source) = (FrameTarget::from(&granted), FrameTarget::from(&scene.exposed));
    let carriers = [PayloadCarrier::Main, PayloadCarrier::Bulk];
    let write = |by| Frame::Write { target, len: PART, immediate: Some(immediate()), by };
    let answer = |by| Frame::Answer { ticket: 0, len: PART, by };
    let mut frames: Vec<Frame> = carriers.map(write).into();
    frames.extend(carriers.map(answer));
    frames.extend([
        Frame::Read { source, len: PART, ticket: 0 },
        Frame::Send { len: 3 },
        Frame::Credits { returned: 1 },
        Frame::Goodbye { reason: GoodbyeReason::Closed },
        Frame::Acknowledge,
        Frame::Resume,
    ]);
    frames
}

/// The fields of a header: names, first bytes and bits.
fn header_fields(scene: &Scene, header: &[u8]) -> Vec<ForgedField> {
    let grants = [scene.granted, scene.exposed, scene.revoked, scene.other];
    let places: &[(&'static str, usize, usize)] = if header.len() > 8 {
        &[
            ("kind", 0, 1),
            ("flags", 1, 1),
            ("region", 2, 2),
            ("key", 4, 4),
            ("offset", 8, 8),
            ("length", 16, 8),
            ("ticket", 24, 4),
            ("acknowledgement", 28, 4),
        ]
    } else {
        &[("kind", 0, 1), ("flags", 1, 1), ("own", 2, 2), ("acknowledgement", 4, 4)]
    };
    let field = |(name, at, len): &(&'static str, usize, usize)| {
        let mut honest = [0; 8];
        honest[..*len].copy_from_slice(&header[*at..at + len]);
        let known = match *name {
            "kind" => (0..=9).collect(),
            "flags" => (0..=3).collect(),
            "key" => grants.iter().map(|grant| grant.key.into()).collect(),
            "offset" => grants.iter().map(|grant| grant.offset).collect(),
            "length" => vec![8, GRANTED - 8, GRANTED - 7, GRANTED, 225, 1 << 20],
            "ticket" => vec![2, 1 << 24, 1 << 28],
            _ => vec![2, 3, 224, 225, 4, 5],
        };
        ForgedField { name, bits: 8 * *len as u32, honest: u64::from_le_bytes(honest), known }
    };
    places.iter().map(field).collect()
}

fn place_of(name: &str) -> usize {
    match name {
        "kind" => 0,
        "flags" => 1,
        "own" | "region" => 2,
        "key" => 4,
        "offset" => 8,
        "length" => 16,
        "ticket" => 24,
        _ => 28,
    }
}

/// Sends a header with payload bytes behind it and on the bulk connection, and ends the
/// connections. Asserts that the link ends, and that no byte changed which was not granted.
fn send_forged(mut scene: Scene, header: &[u8], reads: bool, what: &str) {
    const SECRET: u8 = 0x66;
    let secret = tensor(&scene.pool, &[SECRET; 64]);
    if reads {
        let (nowhere, target) =
            (Grant { region: 0, key: 0, offset: 0, len: PART }, tensor_mut(&scene.pool, PART as usize));
        scene.victim.port.read(scene.victim.link, target, &nowhere).expect("posted");
    }
    let mut expected = image(&scene.pool);
    let payload = [HOSTILE; 200];
    scene.peer.send_raw(&[header, &payload].concat());
    let _ = scene.peer.bulk[0].write_all(&payload);
    // The victim may have closed them.
    let sockets = [&scene.peer.main, &scene.peer.bulk[0]];
    sockets.into_iter().for_each(|socket| _ = socket.shutdown(Shutdown::Write));
    let why = scene.victim.until_down().pop();
    let (from, to) = (scene.granted.offset as usize, (scene.granted.offset + GRANTED) as usize);
    let after = image(&scene.pool);
    expected[from..to].copy_from_slice(&after[from..to]);
    // The target of the read has gone back to the pool, which writes its links there.
    let is_same = reads || expected == after;
    assert!(is_same && secret.bytes() == [SECRET; 64], "{what}: other bytes changed ({why:?})");
    let mut told = Vec::new();
    scene.peer.main.set_nonblocking(true).expect("set");
    let _ = scene.peer.main.read_to_end(&mut told);
    assert!(!told.windows(8).any(|bytes| bytes == [SECRET; 8]), "{what}: other bytes were read");
}

#[test]
#[ignore = "takes long: tests/nightly"]
fn forged_headers_get_only_what_the_rules_allow() {
    let pool = pool();
    let mut count = 0;
    for nth in 0..honest_frames(&scene(&pool)).len() {
        let table = {
            let scene = scene(&pool);
            header_fields(&scene, &header_of(honest_frames(&scene).swap_remove(nth)))
        };
        // Of writes each kind and each flag with each other field. The test above has the others.
        let is_one = |forgery: &Forgery| forgery.len() < 2 || (nth < 2 && forgery[0].0 < 2);
        for forgery in forgeries(&table).into_iter().filter(is_one) {
            let scene = scene(&pool);
            let frame = honest_frames(&scene).swap_remove(nth);
            let mut header = header_of(frame);
            let Some(changed) = changes(&header_fields(&scene, &header), &forgery) else { continue };
            let is_short = header.len() == 8;
            for (name, value) in &changed {
                let (at, field) = match *name {
                    "acknowledgement" if is_short => (4, 4),
                    name => {
                        (place_of(name), table.iter().find(|it| it.name == name).map_or(0, |it| it.bits / 8))
                    }
                };
                let len = field as usize;
                header[at..at + len].copy_from_slice(&value.to_le_bytes()[..len]);
            }
            let reads = matches!(frame, Frame::Answer { .. });
            send_forged(scene, &header, reads, &format!("{frame:?} with {changed:x?}"));
            count += 1;
        }
    }
    println!("{count} forged headers");
    assert!(count > 500);
}

#[test]
fn garbage_ends_the_link_and_so_do_answers_that_nobody_asked_for() {
    let pool = pool();
    for bytes in [
        &[0u8; 40][..],
        &[0xFF; 40],
        b"GET / HTTP/1.1\r\nHost: tensorwire\r\n\r\n",
        &[1, 0, 0xFF, 0xFF, 0, 0, 0, 0],
    ] {
        let (mut victim, mut peer) = meet(&pool, TcpOptions::default());
        peer.send_raw(bytes);
        peer.main.shutdown(Shutdown::Write).expect("open");
        is_protocol(&victim.until_down(), "it sent");
    }
    for by in [PayloadCarrier::Main, PayloadCarrier::Bulk] {
        let (mut victim, mut peer) = meet(&pool, TcpOptions::default());
        peer.send(Frame::Answer { ticket: 0, len: 8, by }, &[0; 8]);
        is_protocol(&victim.until_down(), "none is under way");
    }
    let nowhere = Grant { region: 0, key: 0, offset: 0, len: 8 };
    for (ticket, len, text) in [(1, 8, "read 0 was next"), (0, u64::MAX, "a read of 8 bytes")] {
        let (mut victim, mut peer) = meet(&pool, TcpOptions::default());
        victim.port.read(victim.link, tensor_mut(&pool, 8), &nowhere).expect("posted");
        peer.send(Frame::Answer { ticket, len, by: PayloadCarrier::Main }, &[0; 8]);
        let got = victim.until_down();
        assert_eq!(got[0], Got::Failed);
        is_protocol(&got, text);
        assert!(pool.is_empty(), "a failed read holds its target");
    }
}

#[test]
fn frames_that_come_byte_by_byte_are_handled_and_a_cut_one_is_not() {
    let pool = pool();
    let (mut victim, mut peer) = meet(&pool, TcpOptions::default());
    peer.main.set_nodelay(true).expect("set");
    let target = victim.port.grant(victim.link, tensor_mut(&pool, 8)).expect("room");
    victim.port.post_receives(victim.link, 10);
    let write = Frame::Write {
        target: FrameTarget::from(&target),
        len: 8,
        immediate: Some(immediate()),
        by: PayloadCarrier::Main,
    };
    let stream = [&Frame::Send { len: 3 }.header(0)[..], b"abc", &write.header(0), &[7; 8]].concat();
    let mut got = Vec::new();
    for byte in &stream {
        peer.send_raw(&[*byte]);
        got.extend(victim.poll());
    }
    while got.len() < 2 {
        got.extend(victim.next());
    }
    assert_eq!(got, [Got::Message(b"abc".to_vec()), Got::Immediate(immediate(), 8)]);
    peer.send_raw(&Frame::Send { len: 100 }.header(0));
    peer.send_raw(&[1; 99]);
    peer.main.shutdown(Shutdown::Write).expect("open");
    let got = victim.until_down();
    assert_eq!(got, [Got::Down(LinkFailure::PeerDied { pid: std::process::id() })]);
    assert_eq!(victim.port.revoke(victim.link, &target).expect("granted").bytes(), [7; 8]);
}

#[test]
fn a_port_sleeps_while_a_peer_holds_back_an_acknowledgement_and_the_rest_of_a_frame() {
    let pool = pool();
    let message = [&Frame::Send { len: 3 }.header(0)[..], b"abc"].concat();
    for come in [1, message.len() - 1] {
        let (mut victim, mut peer) = meet(&pool, TcpOptions::default());
        victim.port.post_receives(victim.link, 1);
        let granted = Grant { region: 0, key: 1, offset: 0, len: 8 };
        victim.port.write(victim.link, &tensor(&pool, &[1; 8]), 8, &granted, None).expect("room");
        peer.send_raw(&message[..come]);
        let (start, sleeper) = (Instant::now(), victim.port.sleeper());
        let mut slept = 0;
        while slept < 10 {
            assert!(start.elapsed() < TIMEOUT, "it polls for ever: {come} bytes");
            assert_eq!(victim.poll(), []);
            let seen = sleeper.seen();
            if victim.port.arm() {
                sleeper.sleep(Sleep::Waiter, seen, Duration::from_millis(5));
                slept += 1;
            }
        }
        peer.send_raw(&message[come..]);
        assert_eq!(victim.next(), [Got::Message(b"abc".to_vec())]);
    }
}

#[test]
fn a_peer_that_asks_and_never_reads_costs_a_bounded_amount_of_memory() {
    let pool = pool();
    let (mut victim, mut peer) = meet(&pool, TcpOptions::default());
    let source = tensor(&pool, &vec![1; 200_000]);
    let exposed = victim.port.expose(victim.link, &source).expect("room");
    peer.main.set_nonblocking(true).expect("set");
    let header = Frame::Read { source: FrameTarget::from(&exposed), len: 200_000, ticket: 0 }.header(0);
    let start = Instant::now();
    loop {
        let _ = peer.main.write(&header);
        let got = victim.poll();
        if !got.is_empty() {
            is_protocol(&got, &format!("more than {DEPTH} reads"));
            break;
        }
        assert!(start.elapsed() < TIMEOUT, "it answers for ever");
    }
}

#[test]
fn a_peer_that_never_reads_makes_the_queue_full_and_no_more() {
    let pool = pool();
    let (mut victim, peer) = meet(&pool, TcpOptions::default());
    let granted = Grant { region: 0, key: 1, offset: 0, len: 60_000 };
    let source = tensor(&pool, &vec![1; 60_000]);
    let (start, mut full, mut sent) = (Instant::now(), 0, 0);
    while full < 1000 {
        match victim.port.write(victim.link, &source, 60_000, &granted, None) {
            Ok(()) => (sent, full) = (sent + 1, 0),
            Err(error) => {
                assert_eq!(error, PostError::Full);
                full += 1;
            }
        }
        victim.poll();
        assert!(start.elapsed() < 3 * TIMEOUT, "no end of room after {sent} writes");
    }
    println!("{sent} writes of 60,000 bytes until the queue stayed full");
    drop(peer);
    let got = victim.until_down();
    assert!(matches!(down(&got), LinkFailure::PeerDied { .. }), "{got:?}");
}

#[test]
fn after_its_goodbye_a_peer_says_nothing() {
    let pool = pool();
    for (reason, why) in [
        (GoodbyeReason::Closed, LinkFailure::Closed),
        (GoodbyeReason::Resources, LinkFailure::PeerResources),
        (GoodbyeReason::NoReceive, LinkFailure::NoReceive),
    ] {
        let (mut victim, mut peer) = meet(&pool, TcpOptions::default());
        peer.send(Frame::Goodbye { reason }, &[]);
        assert_eq!(victim.until_down(), [Got::Down(why)]);
    }
    let (mut victim, mut peer) = meet(&pool, TcpOptions::default());
    peer.send(Frame::Goodbye { reason: GoodbyeReason::Closed }, &[0; 9]);
    is_protocol(&victim.until_down(), "after its goodbye");
}

#[test]
fn bulk_that_is_cut_ends_the_link_with_the_reason_of_the_main_connection() {
    let pool = pool();
    for says_goodbye in [true, false] {
        let (mut victim, mut peer) = meet(&pool, TcpOptions { main_bytes: 0, ..TcpOptions::default() });
        let target = victim.port.grant(victim.link, tensor_mut(&pool, 64)).expect("room");
        victim.port.post_receives(victim.link, 5);
        let (target, by) = (FrameTarget::from(&target), PayloadCarrier::Bulk);
        peer.send(Frame::Write { target, len: 64, immediate: Some(immediate()), by }, &[]);
        peer.bulk[0].write_all(&[7; 63]).expect("sent");
        peer.send(Frame::Send { len: 4 }, b"late");
        for _ in 0..100 {
            assert_eq!(victim.poll(), [], "what is behind a write waits for it");
        }
        peer.bulk[0].shutdown(Shutdown::Write).expect("open");
        let expected = if says_goodbye {
            peer.send(Frame::Goodbye { reason: GoodbyeReason::Closed }, &[]);
            LinkFailure::Closed
        } else {
            peer.main.shutdown(Shutdown::Write).expect("open");
            LinkFailure::PeerDied { pid: std::process::id() }
        };
        assert_eq!(victim.until_down(), [Got::Down(expected)]);
    }
}

fn endpoint(pool: &Pool) -> (TcpFabric, super::super::TcpEndpoint, TcpAddress) {
    let fabric = TcpFabric::new(pool, TcpOptions::default()).expect("a fabric");
    let endpoint =
        fabric.endpoint(0, &LinkOptions { depth: DEPTH, receives: 0, generation: 0 }).expect("an endpoint");
    let address = TcpAddress::from_bytes(endpoint.address()).expect("an address");
    (fabric, endpoint, address)
}

#[test]
fn strangers_neither_get_a_link_nor_keep_the_peer_from_it() {
    let pool = pool();
    let (_fabrics, acceptor, to) = endpoint(&pool);
    let (_fabric, initiator, _) = endpoint(&pool);
    let wrong = Token::draw().expect("random").0;
    // Says nothing, says the wrong token, says garbage, says its hello twice.
    let mut strangers: Vec<TcpStream> =
        (0..40).map(|_| TcpStream::connect((to.hosts[0], to.port)).expect("it listens")).collect();
    strangers.extend([0, 1, 7].map(|stream| say_hello(&to, stream, wrong)));
    strangers.push(say_hello(&to, 200, to.token.0));
    // The peer's token, in a hello of the other side or of a later connection.
    for (speaker, number) in [(Speaker::Acceptor, 0), (Speaker::Initiator, 1)] {
        let mut socket = TcpStream::connect((to.hosts[0], to.port)).expect("it listens");
        let hello = Hello { speaker, stream: 0, number, token: to.token };
        socket.write_all(&hello.to_bytes()).expect("said");
        strangers.push(socket);
    }
    let _ = strangers[0].write_all(&[0xFF; 100]);
    let (to_acceptor, to_initiator) = (acceptor.address().to_vec(), initiator.address().to_vec());
    let start = Instant::now();
    std::thread::scope(|scope| {
        let accepted = scope.spawn(|| acceptor.connect(Role::Acceptor, &to_initiator, TIMEOUT));
        let initiated = initiator.connect(Role::Initiator, &to_acceptor, TIMEOUT);
        assert!(initiated.is_ok() && accepted.join().expect("no panic").is_ok());
    });
    println!("the peer was let in {:?} after {} strangers", start.elapsed(), strangers.len());
    assert!(start.elapsed() < Duration::from_secs(5));
    for mut stranger in strangers {
        stranger.set_read_timeout(Some(TIMEOUT)).expect("set");
        assert!(!matches!(stranger.read(&mut [0; 64]), Ok(1..)), "a stranger got an answer");
    }
}

#[test]
fn an_initiator_that_meets_another_listener_says_so() {
    let pool = pool();
    let right = |token| Hello { speaker: Speaker::Acceptor, stream: 0, number: 0, token };
    let answers: [fn(Hello) -> Hello; 4] = [
        |right| Hello { token: Token([9; 16]), ..right },
        |right| Hello { speaker: Speaker::Initiator, ..right },
        |right| Hello { number: 1, ..right },
        |right| Hello { stream: 1, ..right },
    ];
    for answer in answers {
        let (_fabric, initiator, own) = endpoint(&pool);
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let answer = answer(right(own.token));
        let there = TcpAddress { port: listener.local_addr().expect("bound").port(), ..own };
        let thread = std::thread::spawn(move || {
            let connections: Vec<_> = (0..2).map(|_| listener.accept().expect("the initiator").0).collect();
            for mut socket in &connections {
                let _ = socket.write_all(&answer.to_bytes());
            }
            connections
        });
        let error = initiator.connect(Role::Initiator, &there.to_bytes(), TIMEOUT).expect_err("refused");
        assert!(error.to_string().contains("another process has the port"), "{answer:?}: {error}");
        drop(thread.join().expect("no panic"));
    }
    let (_fabric, initiator, own) = endpoint(&pool);
    let nobody = TcpAddress { port: 1, ..own };
    let error = initiator.connect(Role::Initiator, &nobody.to_bytes(), TIMEOUT).expect_err("refused");
    assert!(error.to_string().contains("takes a connection (127.0.0.1:1"), "{error}");
}

#[test]
fn who_waits_for_a_peer_that_never_comes_is_told_for_how_long() {
    let pool = pool();
    let (_fabric, acceptor, own) = endpoint(&pool);
    let error = acceptor
        .connect(Role::Acceptor, &own.to_bytes(), Duration::from_millis(50))
        .expect_err("nobody comes");
    assert_eq!(
        error.to_string(),
        "tcp: waiting for 2 of 2 connections of the peer took longer than 50ms; is the peer running and \
         reachable?"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn no_program_of_a_peer_does_damage(program in proptest::collection::vec(any::<u8>(), 0..400)) {
        hostile_peer(&program);
    }
}
