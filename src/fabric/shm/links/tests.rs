//! Links that become idle and active again, sleeps that end, and messages that are taken alone.

use super::*;
use crate::fabric::shm::testing::{pool, tensor, tensor_mut};
use crate::fabric::shm::{ShmFabric, ShmLink, ShmOptions, ShmPort};
use crate::fabric::{
    Completion, Endpoint, Event, Fabric, LinkFailure, LinkOptions, LoanPermit, NextMessage, Port, Role,
    ShortTake, Sleep, Sleeper,
};
use crate::memory::Pool;
use crate::wire::{Immediate, ShortMessage, Slot};
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(10);

struct End {
    pool: Pool,
    fabric: ShmFabric,
    port: ShmPort,
    /// Receives that each new link has.
    receives: u32,
}

const RECEIVES: u32 = 1_000_000;

impl End {
    fn new() -> End {
        End::with(ShmOptions::default())
    }

    fn with(options: ShmOptions) -> End {
        let pool = pool();
        let fabric = ShmFabric::new(&pool, options).expect("a fabric");
        let port = fabric.port().expect("a port");
        End { pool, fabric, port, receives: RECEIVES }
    }

    fn attach(&mut self, link: ShmLink) -> LinkId {
        let link = self.port.attach(link).expect("room");
        self.port.post_receives(link, self.receives);
        link
    }

    fn poll(&mut self) -> Vec<Completion> {
        let mut completions = Completions::default();
        self.port.poll(&mut completions);
        completions.drain().map(|(completion, _)| completion).collect()
    }

    /// Polls until a completion arrives.
    fn next(&mut self) -> Completion {
        let start = Instant::now();
        loop {
            if let Some(first) = self.poll().into_iter().next() {
                return first;
            }
            assert!(start.elapsed() < TIMEOUT, "nothing came");
        }
    }

    /// Polls and arms until every link is idle and has nothing more.
    fn poll_until_idle(&mut self) {
        let start = Instant::now();
        while !self.port.arm() {
            assert!(start.elapsed() < TIMEOUT, "it does not become idle");
            self.poll();
        }
    }

    fn attached(&self) -> &PortLinks {
        &self.port.links
    }
}

fn connect(a: &mut End, b: &mut End, depth: u32) -> (LinkId, LinkId) {
    let options = LinkOptions { depth, receives: 0, generation: 0 };
    let (endpoint, other) = (
        a.fabric.endpoint(0, &options).expect("an endpoint"),
        b.fabric.endpoint(0, &options).expect("an endpoint"),
    );
    let (to_a, to_b) = (endpoint.address().to_vec(), other.address().to_vec());
    let (first, second) = std::thread::scope(|scope| {
        let accepted = scope.spawn(|| endpoint.connect(Role::Acceptor, &to_b, TIMEOUT).expect("accepted"));
        let reached = other.connect(Role::Initiator, &to_a, TIMEOUT).expect("reached");
        (accepted.join().expect("no panic"), reached)
    });
    (a.attach(first), b.attach(second))
}

fn pair() -> (End, LinkId, End, LinkId) {
    let (mut a, mut b) = (End::new(), End::new());
    let (to_b, to_a) = connect(&mut a, &mut b, 16);
    (a, to_b, b, to_a)
}

fn immediate() -> Immediate {
    Immediate { generation: 0, slot: Slot::new(1).expect("fits") }
}

#[test]
fn a_port_with_few_links_makes_no_barrier_however_quiet_they_are() {
    let (mut a, to_b, mut b, to_a) = pair();
    let (mut completions, mut turns) = (Completions::default(), 0);
    a.port.send(to_b, b"ball").expect("room");
    for _ in 0..200_000 {
        if b.port.poll(&mut completions) > 0 {
            b.port.send(to_a, b"ball").expect("room");
            turns += 1;
        }
        completions.clear();
        if a.port.poll(&mut completions) > 0 {
            a.port.send(to_b, b"ball").expect("room");
        }
        completions.clear();
    }
    assert!(turns > 10_000, "{turns} turns");
    // And without any traffic.
    for _ in 0..2 * ROUND {
        a.port.poll(&mut completions);
    }
    for end in [&a, &b] {
        assert_eq!((end.attached().barriers, end.attached().active.len()), (0, 1));
        assert!(
            !end.port.links.doorbell.doorbell.is_rung() && end.port.links.doorbell.doorbell.events.key() == 0,
            "never rung"
        );
    }
}

#[test]
fn many_quiet_links_become_idle_at_once_and_a_message_activates_each() {
    const LINKS: usize = 200;
    let (mut a, mut b) = (End::new(), End::new());
    let links: Vec<_> = (0..LINKS).map(|_| connect(&mut a, &mut b, 2)).collect();
    let (active, _) = links[0];
    let start = Instant::now();
    while b.attached().active.len() > 1 {
        let _ = a.port.send(active, b"one of many");
        b.poll();
        a.poll();
        assert!(start.elapsed() < TIMEOUT, "{} are active", b.attached().active.len());
    }
    let barriers = b.attached().barriers;
    assert!(barriers <= 2, "{barriers} barriers");
    for _ in 0..2 * ROUND {
        let _ = a.port.send(active, b"one of many");
        b.poll();
        a.poll();
    }
    assert_eq!((b.attached().barriers, b.attached().active.len()), (barriers, 1), "steady");
    while !b.poll().is_empty() {}
    for &(to_b, to_a) in &links[1..] {
        a.port.send(to_b, b"wake up").expect("room");
        assert_eq!(b.next().link, to_a);
    }
    assert_eq!(b.attached().active.len(), LINKS);
}

/// Checks that `act` on `link` rings for the peer, after both sides were armed and had nothing to
/// say.
fn assert_rung_for(
    what: &str,
    prepare: impl Fn(&mut End, LinkId, &mut End, LinkId),
    act: impl Fn(&mut End, LinkId),
) {
    let (mut a, to_b, mut b, to_a) = pair();
    prepare(&mut a, to_b, &mut b, to_a);
    a.poll_until_idle();
    b.poll_until_idle();
    b.poll();
    assert!(b.port.arm(), "{what}: something is there before it was done");
    let sleeper = b.port.sleeper();
    let seen = sleeper.seen();
    act(&mut a, to_b);
    assert!(b.attached().doorbell.doorbell.is_rung() && sleeper.seen() != seen, "{what}: nobody rang");
    assert!(!b.port.arm(), "{what}: armed, with something there");
}

#[test]
fn every_change_that_a_poll_must_see_is_rung_for() {
    let nothing = |_: &mut End, _: LinkId, _: &mut End, _: LinkId| {};
    assert_rung_for("a message", nothing, |a, link| a.port.send(link, b"x").expect("room"));
    assert_rung_for("credits", nothing, |a, link| a.port.publish_credits(link, 7));
    assert_rung_for("a closed link", nothing, |a, link| a.port.detach(link));
    assert_rung_for("a failed link", nothing, |a, link| {
        a.port.fail(link, LinkFailure::Local("enough".into()));
    });
    assert_rung_for("a port that ends", nothing, |a, _| a.port = a.fabric.port().expect("room"));
    let write = |a: &mut End, to_b: LinkId, b: &mut End, to_a: LinkId| {
        let grant = a.port.grant(to_b, tensor_mut(&a.pool, 8)).expect("room");
        b.poll_until_idle();
        a.poll_until_idle();
        let source = tensor(&b.pool, &[1; 8]);
        b.port.write(to_a, &source, 8, &grant, None).expect("room");
    };
    let (mut a, to_b, mut b, to_a) = pair();
    write(&mut a, to_b, &mut b, to_a);
    assert!(b.port.arm() && !a.port.arm());
    a.poll();
    a.poll_until_idle(); // publishes how many slots it has consumed
    assert!(b.attached().doorbell.doorbell.is_rung(), "a write that was taken");
    assert!(matches!(b.next().event, Event::Done));
}

#[test]
fn a_loan_that_comes_back_is_rung_for_from_any_thread() {
    let (mut a, to_b, mut b, _) = pair();
    let source = tensor(&a.pool, &[3; 64]);
    for _ in 0..10 {
        a.port
            .lend(
                to_b,
                &mut Some(source.clone()),
                &mut Some(LoanPermit::unbounded()),
                &ShortMessage::from_u32(1),
            )
            .expect("room");
    }
    let mut lent = Vec::new();
    while lent.len() < 10 {
        lent.extend(b.poll());
    }
    b.poll_until_idle();
    a.poll_until_idle();
    let last = lent.pop();
    std::thread::scope(|scope| scope.spawn(|| drop(last)).join().expect("no panic"));
    assert!(a.attached().doorbell.doorbell.is_rung());
    assert!(matches!(a.poll()[..], [Completion { event: Event::Done, .. }]), "at the first look");
}

#[test]
fn a_link_that_fails_on_this_side_ends_the_sleep() {
    let (mut a, to_b, _b, _) = pair();
    a.poll_until_idle();
    let seen = a.port.sleeper().seen();
    a.port.fail(to_b, LinkFailure::Local("enough".into()));
    assert_ne!(a.port.sleeper().seen(), seen);
    assert!(!a.port.arm());
    assert!(matches!(a.poll()[..], [Completion { event: Event::Down(_), .. }]));
    assert!(a.port.arm(), "there is nothing more");
}

#[test]
fn a_link_that_is_attached_to_an_armed_port_ends_the_sleep() {
    let (mut a, _, mut b, _) = pair();
    a.poll_until_idle();
    let seen = a.port.sleeper().seen();
    let (to_b, to_a) = connect(&mut a, &mut b, 16);
    assert_ne!(a.port.sleeper().seen(), seen);
    b.port.send(to_a, b"first").expect("room");
    assert!(!a.port.arm());
    assert_eq!(a.next().link, to_b);
}

#[test]
fn bulk_that_takes_several_polls_keeps_its_receiver_awake() {
    let pools = (pool(), pool());
    let options = ShmOptions { poll_bytes: 4096, ..ShmOptions::default() };
    let [mut a, mut b] = [pools.0, pools.1].map(|pool| {
        let fabric = ShmFabric::new(&pool, options.clone()).expect("a fabric");
        let port = fabric.port().expect("a port");
        End { pool, fabric, port, receives: RECEIVES }
    });
    let (to_b, to_a) = connect(&mut a, &mut b, 16);
    let grant = b.port.grant(to_a, tensor_mut(&b.pool, 20_000)).expect("room");
    b.poll_until_idle();
    let source = tensor(&a.pool, &[9; 20_000]);
    a.port.write(to_b, &source, 20_000, &grant, Some(immediate())).expect("room");
    let sleeper = b.port.sleeper();
    let seen = sleeper.seen();
    assert!(b.poll().is_empty(), "a part of it");
    let start = Instant::now();
    sleeper.sleep(Sleep::Waiter, seen, TIMEOUT);
    assert!(sleeper.seen() != seen && start.elapsed() < TIMEOUT / 2);
    assert!(matches!(b.next().event, Event::Immediate { bytes: 20_000, .. }));
}

#[test]
fn a_peer_that_clears_its_ring_only_delays() {
    let (mut a, to_b, mut b, to_a) = pair();
    b.poll_until_idle();
    a.port.send(to_b, b"x").expect("room");
    // As a hostile peer could: no bit, and no sleeper.
    b.attached().doorbell.doorbell.reset();
    let (sleeper, start, mut longest) = (b.port.sleeper(), Instant::now(), Duration::ZERO);
    let found = loop {
        let seen = sleeper.seen();
        let came = b.poll();
        if let Some(first) = came.into_iter().next() {
            break first;
        }
        if b.port.arm() {
            let asleep = Instant::now();
            sleeper.sleep(Sleep::Waiter, seen, TIMEOUT);
            longest = longest.max(asleep.elapsed());
        }
        assert!(start.elapsed() < TIMEOUT, "it hangs");
    };
    assert_eq!(found.link, to_a);
    println!("the longest sleep took {longest:?}");
    assert!(longest < 5 * Duration::from_millis(100), "{longest:?}");
}

#[test]
fn a_link_id_is_never_used_twice_and_a_full_port_refuses() {
    let (mut a, to_b, mut b, _) = pair();
    a.port.detach(to_b);
    let (again, _) = connect(&mut a, &mut b, 2);
    assert!(again != to_b && place_of(again) == place_of(to_b));
    assert!(a.attached().get(to_b).is_none() && a.attached().get(again).is_some());
    // The last id of the place, which then stays empty.
    a.port.links.places[place_of(again)].before = (1 << (LinkId::BITS - PLACE_BITS)) - 1;
    a.port.detach(again);
    let (other, _) = connect(&mut a, &mut b, 2);
    assert!(a.attached().get(other).is_none() || place_of(other) != place_of(again));
    a.port.links.places.resize_with(PLACES, LinkPlace::default);
    let options = LinkOptions { depth: 2, receives: 0, generation: 0 };
    let (endpoint, own) = (
        a.fabric.endpoint(0, &options).expect("an endpoint"),
        b.fabric.endpoint(0, &options).expect("an endpoint"),
    );
    let (to_a, to_b) = (endpoint.address().to_vec(), own.address().to_vec());
    let error = std::thread::scope(|scope| {
        let link = scope.spawn(|| endpoint.connect(Role::Acceptor, &to_b, TIMEOUT).expect("accepted"));
        let _peer = own.connect(Role::Initiator, &to_a, TIMEOUT).expect("reached");
        a.port.attach(link.join().expect("no panic")).expect_err("full").to_string()
    });
    assert!(error.contains("4096 at most"), "{error}");
}

#[test]
fn a_tensor_that_is_still_borrowed_does_not_keep_the_watcher_of_processes() {
    let (mut a, to_b, mut b, _) = pair();
    let lent = tensor(&a.pool, &[1; 5000]);
    a.port
        .lend(to_b, &mut Some(lent.clone()), &mut Some(LoanPermit::unbounded()), &ShortMessage::from_u32(1))
        .expect("room");
    drop(lent);
    let Event::Lent { bytes, .. } = b.next().event else { panic!("not the loan") };
    let watcher = std::sync::Arc::downgrade(&a.fabric.shared.watcher.get().expect("the link's"));
    a.port.fail(to_b, LinkFailure::Closed);
    while !a.poll().iter().any(|completion| matches!(completion.event, Event::Down(_))) {}
    a.port.detach(to_b);
    let End { pool, fabric, port, .. } = a;
    drop(port);
    assert!(watcher.upgrade().is_none(), "the thread has outlived its port");
    assert!(bytes.bytes() == [1; 5000] && !pool.is_empty(), "the loan is out");
    drop(fabric);
    assert!(bytes.bytes() == [1; 5000]);
}

/// The look at the next message, once it has come.
fn take<R>(end: &mut End, link: LinkId, mut accept: impl FnMut(NextMessage<'_>) -> Option<R>) -> Option<R> {
    let start = Instant::now();
    loop {
        match end.port.take_short(link, &mut accept) {
            ShortTake::Taken(taken) => return Some(taken),
            ShortTake::Other => return None,
            ShortTake::Nothing => assert!(start.elapsed() < TIMEOUT, "nothing came"),
        }
    }
}

#[test]
fn a_loan_that_is_taken_alone_comes_back_at_once_unless_it_is_kept() {
    let (mut a, to_b, mut b, to_a) = pair();
    let source = tensor(&a.pool, &[3; 5000]);
    let lend = |a: &mut End| {
        let mut permit = Some(LoanPermit::unbounded());
        a.port.lend(to_b, &mut Some(source.clone()), &mut permit, &ShortMessage::from_u32(1)).expect("room");
    };
    lend(&mut a);
    let read = take(&mut b, to_a, |next| match next {
        NextMessage::Lent(_, loan) => Some(loan.bytes == [3; 5000]),
        _ => None,
    });
    assert_eq!(read, Some(true));
    assert!(matches!(a.poll()[..], [Completion { event: Event::Done, .. }]), "it is back");
    lend(&mut a);
    let kept = take(&mut b, to_a, |next| match next {
        NextMessage::Lent(_, loan) => loan.keep(),
        _ => None,
    });
    assert!((0..100).all(|_| a.poll().is_empty()), "it is kept");
    drop(kept.expect("a loan"));
    assert!(matches!(a.poll()[..], [Completion { event: Event::Done, .. }]), "it is back");
}

#[test]
fn a_loan_that_has_come_back_is_released_by_the_next_loan_without_a_poll() {
    let (mut a, to_b, mut b, to_a) = pair();
    let sources = [1, 2].map(|byte| tensor(&a.pool, &[byte; 5000]));
    for source in &sources {
        a.port.lend(to_b, &mut Some(source.clone()), &mut None, &ShortMessage::from_u32(1)).expect("room");
        assert!(take(&mut b, to_a, |next| matches!(next, NextMessage::Lent(..)).then_some(())).is_some());
    }
    assert!(sources[0].is_unique() && !sources[1].is_unique());
    assert!(!a.port.arm(), "a poll finds it");
    assert!(matches!(
        a.poll()[..],
        [Completion { event: Event::Done, .. }, Completion { event: Event::Done, .. }]
    ));
    assert!(sources[1].is_unique());
}

/// Lends 5,000 bytes, which the peer reads and gives back.
fn lend_and_read((a, to_b): (&mut End, LinkId), (b, to_a): (&mut End, LinkId)) {
    let mut permit = a.port.permit_loan(to_b, 5000);
    assert!(permit.is_some());
    let mut source = Some(tensor(&a.pool, &[1; 5000]));
    a.port.lend(to_b, &mut source, &mut permit, &ShortMessage::from_u32(1)).expect("room");
    assert!(take(b, to_a, |next| matches!(next, NextMessage::Lent(..)).then_some(())).is_some());
}

#[test]
fn a_link_that_lends_keeps_one_permit_of_its_loans_that_have_come_back_until_a_poll() {
    let (mut a, to_b, mut b, to_a) = pair();
    let limiter = a.fabric.loan_limiter().expect("the fabric lends");
    // The last loan, and the permit of the one before.
    for out in [1, 2, 2, 2] {
        lend_and_read((&mut a, to_b), (&mut b, to_a));
        assert_eq!(limiter.figures().out, out);
    }
    assert_eq!(a.poll().len(), 4);
    assert_eq!(limiter.figures().out, 0);
}

#[test]
fn a_loan_without_a_permit_leaves_none_of_earlier_loans() {
    let (mut a, to_b, mut b, to_a) = pair();
    let limiter = a.fabric.loan_limiter().expect("the fabric lends");
    lend_and_read((&mut a, to_b), (&mut b, to_a));
    lend_and_read((&mut a, to_b), (&mut b, to_a));
    let mut source = Some(tensor(&a.pool, &[1; 5000]));
    a.port.lend(to_b, &mut source, &mut None, &ShortMessage::from_u32(1)).expect("room");
    assert_eq!(limiter.figures().out, 0);
}

#[test]
fn loans_that_have_come_back_make_room_at_the_bound_without_a_poll() {
    let end = || End::with(ShmOptions { max_lent_bytes: 5000, ..ShmOptions::default() });
    let (mut a, mut b) = (end(), end());
    let (to_b, to_a) = connect(&mut a, &mut b, 16);
    for _ in 0..4 {
        lend_and_read((&mut a, to_b), (&mut b, to_a));
        assert_eq!(a.fabric.loan_limiter().expect("the fabric lends").figures().out, 1);
    }
}

#[test]
fn a_message_that_is_taken_alone_consumes_a_receive() {
    let (mut a, mut b) = (End::new(), End { receives: 100, ..End::new() });
    let (to_b, to_a) = connect(&mut a, &mut b, 16);
    for _ in 0..100 {
        a.port.send(to_b, b"ball").expect("room");
        assert_eq!(take(&mut b, to_a, |_| Some(())), Some(()));
    }
    a.port.send(to_b, b"one too many").expect("room");
    assert_eq!(take(&mut b, to_a, |_| Some(())), None);
    assert!(matches!(b.next().event, Event::Down(LinkFailure::NoReceive)));
}

#[cfg(tensorwire_mutants)]
#[test]
fn each_bug_is_found() {
    use crate::mutants::{Mutant, assert_found};
    let by = a_loan_that_is_taken_alone_comes_back_at_once_unless_it_is_kept;
    assert_found(Mutant::ReadLoanKept, by);
    assert_found(Mutant::KeptLoanGivenBack, by);
    assert_found(Mutant::TakenWithoutReceive, a_message_that_is_taken_alone_consumes_a_receive);
}
