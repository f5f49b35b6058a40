//! Links over several devices: what goes over which, and the loss of one.

use crate::driver::{Fake, Line};
use crate::harness::{Got, TIMEOUT, immediate, pattern, pool, tensor, tensor_mut};
use crate::registrations::register;
use crate::setup::*;
use crate::{expect, needs_fake};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tensorwire::internals::fabric::verbs::{VerbsFabric, VerbsOptions};
use tensorwire::internals::fabric::{Endpoint, Fabric, LinkFailure, LinkOptions, Port, PostError, Role};
use tensorwire::internals::wire::Grant;
use tensorwire::{DType, ForeignMemory, Shape, Tensor, TensorMeta};

/// Bytes of a write that has a part on each rail; not a multiple of a part.
pub const LARGE: usize = 1_000_003;
const WRITE: u64 = 0;
pub const WRITE_WITH_IMMEDIATE: u64 = 1;
pub const SEND: u64 = 2;

/// The NIC of a host with this number.
pub fn nic(host: char, at: usize, port: &str) -> String {
    let number = 16 * (host as usize - 'a' as usize) + at + 1;
    let gid = format!("gid index=1 type=2 gid=00000000000000000000ffff0a0000{number:02x}");
    format!("device name={host}_{at}\nport {port}\n{gid}\n")
}

/// Two hosts with two NICs each: `a_0` and `a_1`, `b_0` and `b_1`.
pub fn four_nics(ports: [&str; 2]) -> String {
    ['a', 'b'].iter().flat_map(|host| [0, 1].map(|at| nic(*host, at, ports[at]))).collect()
}

/// Devices that wait a second for a receive, and give up after 0.1 s of silence.
pub fn over(devices: &str) -> VerbsOptions {
    VerbsOptions { min_rnr_timer: 28, timeout: 10, retry_count: 5, ..on(devices) }
}

pub fn over_both() -> [VerbsOptions; 2] {
    [over("a_0,a_1"), over("b_0,b_1")]
}

/// Two ends with a rail between the first NICs and one between the second ones.
pub fn two_rails(script: &str) -> (Fake, Verbs, Verbs) {
    let fake = Fake::new(script);
    let (a, b) = ends(&fake, over_both(), &link(16));
    (fake, a, b)
}

pub fn slow_rails() -> (Fake, Verbs, Verbs) {
    two_rails(&format!("slow\n{}", four_nics(["", ""])))
}

/// The posted requests since the trace began, each with its device.
pub fn posted(fake: &Fake) -> Vec<(String, Line)> {
    let devices: Vec<_> =
        fake.pairs().iter().map(|pair| (pair.number("qp"), pair.text("device").to_owned())).collect();
    let device = |qp| devices.iter().find(|(number, _)| *number == qp).map_or("gone", |(_, name)| name);
    let calls = fake.calls("post_send").into_iter();
    calls.map(|line| (device(line.number("qp")).to_owned(), line)).collect()
}

/// The lengths of the requests of one kind on a device.
pub fn lengths(posted: &[(String, Line)], device: &str, opcode: u64) -> Vec<u64> {
    let of = posted.iter().filter(|(on, line)| on == device && line.number("opcode") == opcode);
    of.map(|(_, line)| line.number("len")).collect()
}

/// The first queue pair for data on a device, behind that for control.
pub fn data_pair(fake: &Fake, device: &str) -> u64 {
    pairs_of(fake, device)[1]
}

/// A source of `a`, and a grant of `b` for it.
pub fn bulk(a: &Verbs, b: &mut Verbs, seed: u64) -> (Tensor, Grant) {
    let target = tensor_mut(&b.pool, LARGE);
    let grant = b.port.grant(b.link, target).expect("room");
    (tensor(&a.pool, &pattern(LARGE, seed)), grant)
}

pub fn write(a: &mut Verbs, (source, grant): &(Tensor, Grant), slot: u32) {
    a.port.write(a.link, source, LARGE as u64, grant, Some(immediate(slot))).expect("room");
}

/// Asserts that the write arrives whole.
pub fn assert_arrives(a: &mut Verbs, b: &mut Verbs, (source, grant): (Tensor, Grant), slot: u32) {
    let got = expect!(b.next(a), Got::Immediate(imm, bytes) => (imm, bytes));
    assert_eq!(got, (immediate(slot), LARGE as u64), "the whole, once");
    let written = b.port.revoke(b.link, &grant).expect("granted").freeze();
    assert!(written.bytes() == source.bytes(), "the bytes differ");
}

#[test]
fn large_writes_go_over_both_rails_and_all_else_over_the_first() {
    needs_fake!();
    let (fake, mut a, mut b) = slow_rails();
    b.port.post_receives(b.link, 8);
    let large = bulk(&a, &mut b, 9);
    let small = bulk(&a, &mut b, 10);
    fake.run("trace");
    write(&mut a, &large, 3);
    a.port.send(a.link, b"behind").expect("room");
    a.port.write(a.link, &small.0, (2 << 16) - 1, &small.1, Some(immediate(4))).expect("room");
    assert_arrives(&mut a, &mut b, large, 3);
    assert_eq!(expect!(b.next(&mut a), Got::Message(m) => m), b"behind");
    expect!(b.next(&mut a), Got::Immediate(_, bytes) => assert_eq!(bytes, (2 << 16) - 1));
    let posted = posted(&fake);
    let [first, second] = ["a_0", "a_1"].map(|device| lengths(&posted, device, WRITE_WITH_IMMEDIATE));
    assert_eq!(second, [LARGE as u64 / 2 / 4096 * 4096], "half, to a multiple of a packet");
    assert_eq!(first, [LARGE as u64 - second[0], (2 << 16) - 1]);
    assert_eq!((lengths(&posted, "a_0", SEND).len(), lengths(&posted, "a_1", SEND).len()), (1, 0));
    drop((small, a, b));
    fake.assert_clean();
}

#[test]
fn a_slow_rail_gets_a_small_part_and_none_below_64_kib() {
    needs_fake!();
    // 100 Gb/s (EDR of four lanes), and 25 Gb/s (of one).
    let (fake, mut a, mut b) = two_rails(&four_nics(["", "width=1"]));
    b.port.post_receives(b.link, 8);
    let (large, fifth) = (bulk(&a, &mut b, 9), bulk(&a, &mut b, 10));
    fake.run("trace");
    write(&mut a, &large, 3);
    assert_arrives(&mut a, &mut b, large, 3);
    a.port.write(a.link, &fifth.0, 5 * 65_536 - 1, &fifth.1, Some(immediate(4))).expect("room");
    expect!(b.next(&mut a), Got::Immediate(_, bytes) => assert_eq!(bytes, 5 * 65_536 - 1));
    let slow = lengths(&posted(&fake), "a_1", WRITE_WITH_IMMEDIATE);
    assert_eq!(slow, [LARGE as u64 / 5 / 4096 * 4096]);
    drop((fifth, a, b));
    fake.assert_clean();
}

#[test]
fn each_rail_has_as_many_queue_pairs_as_are_set() {
    needs_fake!();
    let fake = Fake::new(&four_nics(["", ""]));
    let wide = over_both().map(|options| VerbsOptions { qps_per_peer: 2, ..options });
    let (mut a, mut b) = ends(&fake, wide, &link(16));
    assert_eq!((pairs_of(&fake, "a_0").len(), pairs_of(&fake, "a_1").len()), (3, 4), "control and backup");
    b.port.post_receives(b.link, 1);
    let large = bulk(&a, &mut b, 9);
    fake.run("trace");
    write(&mut a, &large, 3);
    assert_arrives(&mut a, &mut b, large, 3);
    let parts = |device| lengths(&posted(&fake), device, WRITE_WITH_IMMEDIATE).len();
    assert_eq!((parts("a_0"), parts("a_1")), (2, 2));
    drop((a, b));
    let many = VerbsOptions { qps_per_peer: 9, ..over("a_0,a_1") };
    assert_says(&refusal(&fake, many), &["qps_per_peer is 9: times the number of devices, at most 16"]);
    fake.assert_clean();
}

#[test]
fn a_rail_is_of_devices_of_one_number_and_a_side_with_fewer_has_fewer_rails() {
    needs_fake!();
    for (devices, used) in [
        (["a_0,a_1", "b_0"], vec!["a_0", "b_0"]),
        (["a_1", "b_1,b_0"], vec!["a_1", "b_1"]),
        (["a_0,a_1", "b_1,b_0"], vec!["a_0", "a_1", "b_0", "b_1"]),
    ] {
        let fake = Fake::new(&four_nics(["", ""]));
        let (a, b) = ends(&fake, devices.map(over), &link(16));
        let mut found: Vec<_> = fake.pairs().iter().map(|pair| pair.text("device").to_owned()).collect();
        found.dedup();
        found.sort();
        assert_eq!(found, used, "{devices:?}");
        drop((a, b));
        fake.assert_clean();
    }
}

/// Posts until there is room. A full queue has completions to come, or waits for another rail.
pub fn until_posted(end: &mut Verbs, other: &mut Verbs, post: impl Fn(&mut Verbs) -> Result<(), PostError>) {
    let start = Instant::now();
    while let Err(error) = post(end) {
        assert!(error == PostError::Full && start.elapsed() < TIMEOUT, "{error}");
        end.poll();
        other.poll();
    }
}

/// Writes and messages in both directions, over a link whose rail `lost` is broken by `damage`
/// while they are under way: all arrive, whole and in order.
fn assert_survives((fake, mut a, mut b): (Fake, Verbs, Verbs), lost: usize, damage: impl Fn(&Fake, u32)) {
    const ROUNDS: u32 = 60;
    let [to_b, to_a] = [bulk(&a, &mut b, 9), bulk(&b, &mut a, 11)];
    for end in [&mut a, &mut b] {
        end.port.post_receives(end.link, 2 * ROUNDS);
    }
    for round in 0..ROUNDS {
        damage(&fake, round);
        for at in 0..2 {
            let (source, grant) = [&to_b, &to_a][at];
            let (end, other) = if at == 0 { (&mut a, &mut b) } else { (&mut b, &mut a) };
            let immediate = Some(immediate(round));
            until_posted(end, other, |end| end.port.write(end.link, source, LARGE as u64, grant, immediate));
            until_posted(end, other, |end| end.port.send(end.link, &round.to_le_bytes()));
        }
        let (mut got_a, mut got_b) = (Vec::new(), Vec::new());
        let start = Instant::now();
        while got_a.len() < 2 || got_b.len() < 2 {
            assert!(start.elapsed() < TIMEOUT, "round {round}: {got_a:?} {got_b:?}");
            a.poll();
            b.poll();
            for (end, got) in [(&mut a, &mut got_a), (&mut b, &mut got_b)] {
                let told = std::mem::take(&mut end.arrivals).into_iter().map(|(_, got)| got);
                got.extend(told.filter(|got| !matches!(got, Got::Done | Got::Repaired)));
            }
        }
        for got in [got_a, got_b] {
            let Ok([first, second]) = <[Got; 2]>::try_from(got) else { panic!("more than was sent") };
            let got = expect!(first, Got::Immediate(of, bytes) => (of, bytes));
            assert_eq!(got, (immediate(round), LARGE as u64));
            expect!(second, Got::Message(m) => assert_eq!(m, round.to_le_bytes()));
        }
    }
    assert_eq!([&a, &b].map(|end| end.fabric.lost_rails().load(Ordering::Relaxed)), [1, 1]);
    // The last write went over one rail. The targets have its bytes.
    for (end, (source, grant)) in [(&mut b, &to_b), (&mut a, &to_a)] {
        let written = end.port.revoke(end.link, grant).expect("granted");
        assert!(written.bytes() == source.bytes(), "the bytes differ");
    }
    let gone = ["a", "b"].map(|host| pairs_of(&fake, &format!("{host}_{lost}")).len());
    assert_eq!(gone, [0, 0], "the rail is gone");
    drop((to_b, to_a, a, b));
    fake.assert_clean();
}

pub fn assert_survives_each_loss_of(rail: usize) {
    let slow = format!("slow\n{}", four_nics(["", ""]));
    let fast = four_nics(["", ""]);
    let at = |when: u32, command: &str| {
        let command = command.replace('#', &rail.to_string());
        move |fake: &Fake, round: u32| {
            if round == when {
                fake.run(&command);
            }
        }
    };
    for script in [&slow, &fast] {
        // Nothing gets through, until the retries are used up.
        assert_survives(two_rails(script), rail, at(20, "cut device=a_#"));
        // The peer's port goes down, and comes back: its links are told after two seconds.
        assert_survives(two_rails(script), rail, at(20, "port_state device=b_# state=1"));
        assert_survives(two_rails(script), rail, at(20, "remove device=a_#"));
    }
    let fails = |status: u32, skip: u32| {
        move |fake: &Fake, round: u32| {
            if round == 20 {
                let pair = data_pair(fake, &format!("a_{rail}"));
                fake.run(&format!("fail_request status={status} qp={pair} skip={skip}"));
            }
        }
    };
    for (status, skip) in [(12, 0), (12, 3), (19, 1), (21, 0), (5, 2)] {
        assert_survives(two_rails(&slow), rail, fails(status, skip));
        assert_survives(two_rails(&fast), rail, fails(status, skip));
        // With three queue pairs on each device.
        let wide = over_both().map(|options| VerbsOptions { qps_per_peer: 3, ..options });
        let fake = Fake::new(&slow);
        let (a, b) = ends(&fake, wide, &link(16));
        assert_survives((fake, a, b), rail, fails(status, skip));
    }
}

#[test]
fn a_rail_that_fails_in_the_middle_of_large_writes_costs_nothing_but_time() {
    needs_fake!();
    assert_survives_each_loss_of(1);
    for script in [format!("slow\n{}", four_nics(["", ""])), four_nics(["", ""])] {
        assert_survives(two_rails(&script), 1, |fake, round| {
            if round == 20 {
                fake.run("remove device=b_1 silently=1");
            }
        });
    }
}

#[test]
fn a_part_that_the_driver_refuses_goes_over_the_other_rail() {
    needs_fake!();
    for (rail, skip) in [(0, 0), (0, 1), (0, 2), (0, 5), (1, 0), (1, 5)] {
        let refuses = move |fake: &Fake, round: u32| {
            if round == 20 {
                fake.run(&format!("fault call=post_send device=a_{rail} errno=12 skip={skip} times=1"));
            }
        };
        assert_survives(two_rails(&four_nics(["", ""])), rail, refuses);
        // With three queue pairs on each device.
        let wide = over_both().map(|options| VerbsOptions { qps_per_peer: 3, ..options });
        let fake = Fake::new(&four_nics(["", ""]));
        let (a, b) = ends(&fake, wide, &link(16));
        assert_survives((fake, a, b), rail, refuses);
    }
}

/// Polls both until neither has a queue pair on the second rail.
fn until_rail_is_gone(fake: &Fake, a: &mut Verbs, b: &mut Verbs) {
    let start = Instant::now();
    while pairs_of(fake, "a_1").len() + pairs_of(fake, "b_1").len() > 0 {
        assert!(start.elapsed() < TIMEOUT, "the rail is still there");
        a.poll();
        b.poll();
    }
}

#[test]
fn a_rail_that_fails_while_nothing_goes_on_is_lost_alone() {
    needs_fake!();
    for event in ["event kind=1 qp=", "remove device=b_1", "port_state device=a_1 state=1"] {
        let (fake, mut a, mut b) = slow_rails();
        let pair = data_pair(&fake, "a_1");
        fake.run(&if event.ends_with('=') { format!("{event}{pair}") } else { event.to_owned() });
        until_rail_is_gone(&fake, &mut a, &mut b);
        assert!(a.arrivals.is_empty() && b.arrivals.is_empty(), "{event}: {:?} {:?}", a.arrivals, b.arrivals);
        b.port.post_receives(b.link, 2);
        let large = bulk(&a, &mut b, 9);
        fake.run("trace");
        write(&mut a, &large, 3);
        assert_arrives(&mut a, &mut b, large, 3);
        assert_eq!(lengths(&posted(&fake), "a_0", WRITE_WITH_IMMEDIATE), [LARGE as u64], "{event}");
        drop((a, b));
        fake.assert_clean();
    }
}

#[test]
fn a_part_that_has_landed_is_not_written_again() {
    needs_fake!();
    let (fake, mut a, mut b) = slow_rails();
    b.port.post_receives(b.link, 4);
    let pair = data_pair(&fake, "a_1");
    // The first write is whole before the rail fails with the second.
    let writes = [bulk(&a, &mut b, 9), bulk(&a, &mut b, 10)];
    fake.run(&format!("fail_request status=12 opcode={WRITE_WITH_IMMEDIATE} qp={pair} skip=1"));
    fake.run("trace");
    write(&mut a, &writes[0], 0);
    write(&mut a, &writes[1], 1);
    for (slot, write) in writes.into_iter().enumerate() {
        assert_arrives(&mut a, &mut b, write, slot as u32);
    }
    let part = LARGE as u64 / 2 / 4096 * 4096;
    let again: Vec<_> =
        lengths(&posted(&fake), "a_0", WRITE).into_iter().filter(|len| *len == part).collect();
    assert_eq!(again.len(), 1, "the part of the second write alone");
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn a_side_that_has_lost_a_rail_leaves_as_soon_as_others_if_nobody_hears_it() {
    needs_fake!();
    let fake = Fake::new(&format!("slow\n{}", four_nics(["", ""])));
    // It goes on sending for longer than it has.
    let patient = over_both().map(|options| VerbsOptions { timeout: 20, ..options });
    let (mut a, mut b) = ends(&fake, patient, &link(16));
    fake.run(&format!("event kind=1 qp={}", data_pair(&fake, "a_1")));
    until_rail_is_gone(&fake, &mut a, &mut b);
    // Until both have told each other of it.
    let start = Instant::now();
    while !(a.port.is_flushed(a.link) && b.port.is_flushed(b.link)) {
        assert!(start.elapsed() < TIMEOUT, "the loss is not told");
        a.poll();
        b.poll();
    }
    fake.run("cut device=a_0");
    let start = Instant::now();
    drop(a);
    println!("it took {:?}", start.elapsed());
    // It has a second to say goodbye.
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    drop(b);
    fake.assert_clean();
}

/// The peer's device completes nothing any more, so the peer gives its end up after two seconds.
#[test]
fn a_side_that_leaves_waits_until_the_peer_has_given_its_end_of_a_rail_up() {
    needs_fake!();
    for drops_port in [false, true] {
        let (fake, mut a, mut b) = slow_rails();
        b.port.post_receives(b.link, 4);
        let large = bulk(&a, &mut b, 9);
        fake.run("remove device=b_1 silently=1");
        write(&mut a, &large, 3);
        let start = Instant::now();
        while a.fabric.lost_rails().load(Ordering::Relaxed) == 0 {
            assert!(start.elapsed() < TIMEOUT);
            a.poll();
        }
        a.port.detach(a.link);
        let is_down = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !drops_port && !is_down.load(Ordering::Relaxed) {
                    a.poll();
                }
                drop(a);
            });
            let got = expect!(b.next_alone(), Got::Immediate(imm, bytes) => (imm, bytes));
            assert_eq!(got, (immediate(3), LARGE as u64));
            expect!(b.next_alone(), Got::Down(LinkFailure::Closed) => ());
            is_down.store(true, Ordering::Relaxed);
        });
        println!("it took {:?}", start.elapsed());
        let written = b.port.revoke(b.link, &large.1).expect("granted").freeze();
        assert!(written.bytes() == large.0.bytes(), "the bytes differ");
        drop((large, written, b));
        fake.assert_clean();
    }
}

/// The device has completed the receive, and the link has not read that yet.
#[test]
fn a_part_that_has_landed_unread_is_counted_when_its_rail_is_lost() {
    needs_fake!();
    for device in ["a_1", "b_1"] {
        let (fake, mut a, mut b) = slow_rails();
        b.port.post_receives(b.link, 4);
        let large = bulk(&a, &mut b, 9);
        fake.run("trace");
        write(&mut a, &large, 3);
        let start = Instant::now();
        // All parts are acknowledged. Nobody has polled for `b`.
        while a.arrivals.is_empty() {
            assert!(start.elapsed() < TIMEOUT);
            a.poll();
        }
        fake.run(&format!("event kind=1 qp={}", data_pair(&fake, device)));
        // The peer tells of its loss, before the part is read.
        while device == "a_1" && !pairs_of(&fake, device).is_empty() {
            assert!(start.elapsed() < TIMEOUT);
            a.poll();
        }
        assert_arrives(&mut a, &mut b, large, 3);
        expect!(a.next(&mut b), Got::Done => ());
        until_rail_is_gone(&fake, &mut a, &mut b);
        let part = LARGE as u64 / 2 / 4096 * 4096;
        assert!(!lengths(&posted(&fake), "a_0", WRITE).contains(&part), "it was written again");
        // The link goes on.
        let large = bulk(&a, &mut b, 10);
        write(&mut a, &large, 4);
        assert_arrives(&mut a, &mut b, large, 4);
        drop((a, b));
        fake.assert_clean();
    }
}

#[test]
#[ignore = "takes long: tests/nightly"]
fn a_link_is_made_over_what_works_though_every_port_says_that_it_is_up() {
    needs_fake!();
    for (cut, first, second) in [("a_0", "a_1", "a_0"), ("b_1", "a_0", "a_1")] {
        let fake = Fake::new(&format!("slow\n{}", four_nics(["", ""])));
        fake.run(&format!("cut device={cut}"));
        let start = Instant::now();
        let (mut a, mut b) = ends(&fake, over_both(), &link(16));
        assert!(start.elapsed() < TIMEOUT / 2, "{:?}", start.elapsed());
        let links = (a.link, b.link);
        assert_works(&mut a, &mut b, links);
        let start = Instant::now();
        while !pairs_of(&fake, second).is_empty() {
            assert!(start.elapsed() < TIMEOUT, "{second} is still there");
            a.poll();
            b.poll();
        }
        assert_eq!(pairs_of(&fake, first).len(), 2, "control and data");
        b.port.post_receives(b.link, 2);
        let large = bulk(&a, &mut b, 9);
        write(&mut a, &large, 3);
        assert_arrives(&mut a, &mut b, large, 3);
        drop((a, b));
        fake.assert_clean();
    }
}

#[test]
fn a_link_over_no_rail_that_works_fails_in_time_and_says_why() {
    needs_fake!();
    let fake = Fake::new(&four_nics(["", ""]));
    fake.run("cut");
    let [a, b] = over_both().map(|options| fabric(&fake, options).expect("a fabric"));
    let endpoints =
        [a.endpoint(0, &link(16)).expect("an endpoint"), b.endpoint(0, &link(16)).expect("an endpoint")];
    let [to_b, to_a] = endpoints;
    let timeout = Duration::from_millis(300);
    let said = match to_b.connect(Role::Acceptor, to_a.address(), timeout) {
        Ok(_) => panic!("nothing gets through"),
        Err(error) => error.to_string(),
    };
    assert_says(&said, &["ping on 1 of 1 queue pairs of a_0 port 1", "300ms"]);
    drop((to_a, a, b));
    fake.assert_clean();
}

/// The address of an endpoint, changed at a place behind its head.
fn connect_to_changed(fake: &Fake, change: impl Fn(&mut Vec<u8>)) -> String {
    let [a, b] = over_both().map(|options| fabric(fake, options).expect("a fabric"));
    let (to_b, to_a) = (a.endpoint(0, &link(16)).expect("one"), b.endpoint(0, &link(16)).expect("one"));
    let mut address = to_a.address().to_vec();
    change(&mut address);
    match to_b.connect(Role::Initiator, &address, Duration::from_millis(300)) {
        Ok(_) => panic!("they were connected"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn a_peer_that_states_rails_that_can_t_be_is_refused() {
    needs_fake!();
    let fake = Fake::new(&four_nics(["", ""]));
    // The number of rails comes behind the head of 16 bytes, then each rail with its number.
    for (at, value, said) in [
        (16, 0, "0 rails, 1 to 4 are allowed"),
        (16, 5, "5 rails, 1 to 4 are allowed"),
        (16, 3, "a value that can't be"),
        (16, 1, "bytes behind its end"),
        (17, 1, "rails whose numbers do not grow"),
        (17 + 28, 200, "200 stripes, 15 is the most"),
    ] {
        let refused = connect_to_changed(&fake, |address| address[at] = value);
        assert_says(&refused, &[said]);
    }
    fake.assert_clean();
}

#[test]
fn memory_outside_the_pool_goes_over_both_rails() {
    needs_fake!();
    let (fake, mut a, mut b) = slow_rails();
    b.port.post_receives(b.link, 1);
    let memory = ForeignMemory::from_owner(pattern(LARGE, 5));
    let shape = Shape::new(&[LARGE as u64]).expect("a shape");
    let meta = TensorMeta::new(DType::U8, shape).expect("meta");
    let outside = memory.tensor(&a.pool, meta, 0).expect("inside");
    let source = register(&a.fabric, &outside, &a.pool).tensor.expect("registered");
    let target = tensor_mut(&b.pool, LARGE);
    let grant = b.port.grant(b.link, target).expect("room");
    write(&mut a, &(source.clone(), grant), 3);
    assert_arrives(&mut a, &mut b, (source, grant), 3);
    drop((outside, memory));
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn a_link_with_windows_has_one_rail_and_the_other_stands_by() {
    needs_fake!();
    let script = four_nics(["", ""]).replace("device ", "device caps=0x1000000 ");
    let fake = Fake::new(&script);
    let windows = over_both().map(|options| VerbsOptions { memory_windows: true, ..options });
    let (mut a, mut b) = ends(&fake, windows, &link(16));
    assert!(pairs_of(&fake, "a_1").is_empty());
    fake.run("port_state device=b_0 state=1");
    expect!(b.next(&mut a), Got::Down(_) => ());
    let links = another(&mut a, &mut b, &link(16));
    assert_works(&mut a, &mut b, links);
    assert_eq!(pairs_of(&fake, "a_1").len(), 2);
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn a_side_that_leaves_sends_what_a_lost_rail_has_left() {
    needs_fake!();
    let (fake, mut a, mut b) = slow_rails();
    b.port.post_receives(b.link, 1);
    let large = bulk(&a, &mut b, 9);
    let pair = data_pair(&fake, "a_1");
    fake.run(&format!("fail_request status=12 qp={pair}"));
    write(&mut a, &large, 3);
    // The loss is known, and not settled: the peer has not been polled.
    let start = Instant::now();
    while pairs_of(&fake, "a_1").contains(&pair) {
        assert!(start.elapsed() < TIMEOUT);
        a.poll();
    }
    a.port.detach(a.link);
    assert_arrives(&mut a, &mut b, large, 3);
    expect!(b.next(&mut a), Got::Down(LinkFailure::Closed) => ());
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn a_device_that_is_down_at_the_start_is_passed_over() {
    needs_fake!();
    let fake = Fake::new(&four_nics(["", "state=1"]));
    let made = VerbsFabric::with_library(fake.library, &pool(1 << 20), over("a_0,a_1")).expect("a fabric");
    assert_eq!(made.choices().map(|choice| choice.device.clone()).collect::<Vec<_>>(), ["a_0"]);
    let none = LinkOptions { receives: 0, ..link(4) };
    drop((made.endpoint(0, &none).expect("an endpoint"), made));
    fake.assert_clean();
}
