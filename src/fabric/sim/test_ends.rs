//! Ends of links: deaths, cuts, stalls and returns, with operations outstanding.

use super::tests::{World, pool, tensor, tensor_mut, world};
use super::*;
use crate::fabric::{Completions, Event, LinkFailure, LoanPermit, Port, PostError};
use crate::wire::{Grant, ShortMessage, Time};

/// The events of a port as text, oldest first.
fn told(world: &mut World, who: usize) -> Vec<String> {
    let mut completions = Completions::default();
    while world.ports[who].poll(&mut completions) > 0 {}
    let mut words = Vec::new();
    for (completion, _) in completions.drain() {
        words.push(match completion.event {
            Event::Done => "done".into(),
            Event::ReadDone { .. } => "read".into(),
            Event::Failed => "failed".into(),
            Event::Message(_) => "message".into(),
            Event::Immediate { .. } => "immediate".into(),
            Event::Lent { .. } => "lent".into(),
            Event::Repaired => "repaired".into(),
            Event::Down(LinkFailure::PeerDied { pid }) => format!("down: died {pid}"),
            Event::Down(LinkFailure::Local(why)) => format!("down: {why}"),
            Event::Down(why) => format!("down: {why:?}"),
        });
    }
    words
}

/// Posts a write, a read and a loan from process 0 to process 1.
fn post_one_of_each(world: &mut World) -> Grant {
    let target = tensor_mut(&world.pools[1], 8);
    let target = world.ports[1].grant(world.links[1], target).expect("room");
    let exposed = tensor(&world.pools[1], &[1; 8]);
    let exposed = world.ports[1].expose(world.links[1], &exposed).expect("room");
    let source = tensor(&world.pools[0], &[7; 8]);
    let into = tensor_mut(&world.pools[0], 8);
    let link = world.links[0];
    let port = &mut world.ports[0];
    port.write(link, &source, 8, &target, None).expect("posted");
    port.read(link, into, &exposed).expect("posted");
    port.lend(
        link,
        &mut Some(source.clone()),
        &mut Some(LoanPermit::unbounded()),
        &ShortMessage::from_u32(1),
    )
    .expect("posted");
    target
}

/// Asserts that each of the three operations ends once, and the link goes down last. Returns the
/// number of failures.
fn assert_each_ends_once_before(world: &mut World, down: &str) -> usize {
    let words = told(world, 0);
    assert_eq!(words.last().map(String::as_str), Some(down), "{words:?}");
    let ended = &words[..words.len() - 1];
    assert_eq!(ended.len(), 3, "{words:?}");
    assert!(ended.iter().all(|word| ["done", "read", "failed"].contains(&word.as_str())), "{words:?}");
    let link = world.links[0];
    assert_eq!(world.ports[0].send(link, b"x"), Err(PostError::Down));
    world.rest();
    assert_eq!(told(world, 0), [""; 0]);
    words.iter().filter(|word| word.starts_with("failed")).count()
}

#[test]
fn everything_that_is_under_way_to_one_who_dies_ends_once() {
    let mut failures = [0; 4];
    for seed in 0..40 {
        let mut world = world(seed, SimOptions { poll_batch: 2, ..SimOptions::default() });
        told(&mut world, 1); // packets arrive at once from its first poll on
        post_one_of_each(&mut world);
        world.network.advance_to(Time::from_nanos(seed * 200));
        world.network.kill(world.processes[1]);
        world.rest();
        failures[assert_each_ends_once_before(&mut world, "down: died 1")] += 1;
    }
    assert!(failures[3] > 0 && failures[3] < 40, "some had come through before: {failures:?}");
}

#[test]
fn everything_that_is_under_way_over_a_link_that_is_cut_ends_once_on_both_sides() {
    for seed in 0..20 {
        let mut world = world(seed, SimOptions::default());
        told(&mut world, 1);
        post_one_of_each(&mut world);
        world.network.cut(world.processes[0], world.processes[1]);
        world.rest();
        assert_each_ends_once_before(&mut world, "down: the link was cut");
        let words = told(&mut world, 1);
        assert_eq!(words.last().map(String::as_str), Some("down: the link was cut"), "{words:?}");
        assert_eq!(words.iter().filter(|word| word.starts_with("down")).count(), 1);
    }
}

#[test]
fn nothing_that_is_posted_after_a_cut_arrives() {
    for seed in 0..40 {
        let mut world = world(seed, SimOptions::default());
        told(&mut world, 1);
        world.network.cut(world.processes[0], world.processes[1]);
        world.send_twenty(); // it was not told yet
        let link = world.links[0];
        world.ports[0].publish_credits(link, 5);
        world.rest();
        assert_eq!(told(&mut world, 1), ["down: the link was cut"], "seed {seed}");
        let link = world.links[1];
        assert_eq!(world.ports[1].peer_credits(link), 0);
    }
}

#[test]
fn the_dead_say_nothing_more_whatever_is_asked_of_them() {
    for seed in 0..20 {
        let mut world = world(seed, SimOptions::default());
        let link = world.links[0];
        world.network.kill(world.processes[0]);
        world.ports[0].fail(link, LinkFailure::Local("too late".into()));
        world.ports[0].publish_credits(link, 5);
        world.ports[0].detach(link);
        world.rest();
        assert_eq!(told(&mut world, 1), ["down: died 0"], "seed {seed}");
    }
}

#[test]
fn a_loan_that_the_dead_had_is_the_lender_s_again_when_nobody_holds_it() {
    let mut world = world(5, SimOptions::default());
    let source = tensor(&world.pools[0], &[7; 8]);
    let link = world.links[0];
    world.ports[0]
        .lend(link, &mut Some(source.clone()), &mut Some(LoanPermit::unbounded()), &ShortMessage::from_u32(1))
        .expect("posted");
    world.rest();
    let mut borrowed = Completions::default();
    assert_eq!(world.ports[1].poll(&mut borrowed), 1);
    world.network.kill(world.processes[1]);
    borrowed.clear();
    assert!(world.network.next_event().is_some());
    world.rest();
    // The dead process has sent nothing about it.
    assert_eq!(told(&mut world, 0), ["failed", "down: died 1"]);
    assert!(source.is_unique());
}

#[test]
fn a_stall_ends_by_itself_at_its_time() {
    let mut world = world(1, SimOptions { poll_batch: 100, ..SimOptions::default() });
    told(&mut world, 1);
    world.send_twenty();
    let end = Time::ZERO + Duration::from_secs(2);
    world.network.stall(world.processes[1], end);
    world.rest();
    let seen = crate::fabric::Sleeper::seen(&world.ports[1].sleeper());
    assert!(world.ports[1].arm(), "a poll would bring nothing now");
    assert_eq!(world.network.next_event(), Some(end));
    world.network.advance_to(end);
    assert_ne!(crate::fabric::Sleeper::seen(&world.ports[1].sleeper()), seen, "it wakes");
    assert!(!world.ports[1].arm());
    assert_eq!(world.poll(1).0.len(), 20);
}

#[test]
fn time_that_passes_by_polling_passes_a_stall_too() {
    let mut world = world(1, SimOptions { auto_advance: true, ..SimOptions::default() });
    world.send_twenty();
    world.network.stall(world.processes[1], Time::ZERO + Duration::from_secs(2));
    let arrived: usize = (0..200).map(|_| world.poll(1).0.len()).sum();
    assert_eq!(arrived, 20);
}

fn endpoints(network: &SimNetwork) -> ([SimFabric; 2], [SimEndpoint; 2]) {
    let fabrics = [network.process(&pool()), network.process(&pool())];
    let options = LinkOptions { depth: 16, receives: 0, generation: 0 };
    let endpoints = [0, 1].map(|k: usize| fabrics[k].endpoint(0, &options).expect("an endpoint"));
    (fabrics, endpoints)
}

/// One side has connected. Then `end` happens to the other, which has not. Returns the failure that
/// the first is told.
fn told_when_the_other_never_connects(end: impl FnOnce(&SimNetwork, &SimFabric, SimEndpoint)) -> LinkFailure {
    let network = SimNetwork::new(1, SimOptions::default());
    let (fabrics, [a, b]) = endpoints(&network);
    let mut port = fabrics[0].port().expect("a port");
    let a = a.connect(Role::Initiator, b.address(), Duration::ZERO).expect("connected");
    let link = port.attach(a).expect("room");
    port.send(link, b"hello").expect("posted");
    end(&network, &fabrics[1], b);
    network.advance_to(Time::ZERO + Duration::from_secs(1));
    let mut completions = Completions::default();
    port.poll(&mut completions);
    match completions.drain().last().expect("told").0.event {
        Event::Down(why) => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn who_has_connected_hears_of_an_end_before_the_other_has() {
    assert_eq!(told_when_the_other_never_connects(|_, _, endpoint| drop(endpoint)), LinkFailure::Closed);
    let died = told_when_the_other_never_connects(|network, fabric, endpoint| {
        network.kill(fabric.process());
        drop(endpoint);
    });
    assert_eq!(died, LinkFailure::PeerDied { pid: 1 });
}

#[test]
fn the_dead_connect_to_nobody_and_an_endpoint_to_one_other_only() {
    let network = SimNetwork::new(1, SimOptions::default());
    let (fabrics, [a, b]) = endpoints(&network);
    let third =
        fabrics[0].endpoint(0, &LinkOptions { depth: 16, receives: 0, generation: 0 }).expect("an endpoint");
    let reached = a.connect(Role::Initiator, b.address(), Duration::ZERO);
    let why = third.connect(Role::Initiator, b.address(), Duration::ZERO).expect_err("refused");
    assert!(why.to_string().contains("somebody else"), "{why}");
    drop(reached);
    let network = SimNetwork::new(1, SimOptions::default());
    let (fabrics, [a, b]) = endpoints(&network);
    network.kill(fabrics[0].process());
    let why = a.connect(Role::Initiator, b.address(), Duration::ZERO).expect_err("refused");
    assert!(why.to_string().contains("dead"), "{why}");
}

#[test]
fn what_was_meant_for_an_earlier_life_never_comes_to_a_later_one() {
    for seed in 0..20 {
        let mut world = world(seed, SimOptions::default());
        told(&mut world, 1);
        let old = post_one_of_each(&mut world);
        world.send_twenty();
        world.network.kill(world.processes[1]);
        world.come_back(1);
        world.rest();
        assert_eq!(told(&mut world, 1), [""; 0], "seed {seed}");
        // A grant of the earlier life is invalid in the later one.
        let target = tensor_mut(&world.pools[1], 8);
        world.ports[1].grant(world.links[1], target).expect("room");
        let link = world.links[0];
        world.ports[0].write_inline(link, &[1; 8], &old, None).expect("posted");
        world.rest();
        let words = told(&mut world, 1);
        assert!(words.len() == 1 && words[0].contains("Protocol"), "{words:?}");
    }
}
