//! A peer that keeps as many requests open as it may.

use super::*;
use std::time::Instant;

#[test]
fn a_try_takes_no_longer_while_many_requests_wait() {
    const TRIES: u64 = 500;
    const WAITING: u64 = 50_000;
    let mut world = World::new();
    let mut next = 0;
    let mut tries = |world: &mut World| {
        let text = text(&key("tried"), 70);
        let start = Instant::now();
        for id in next..next + TRIES {
            world.ask(&OwnRequest { is_try: true, ..request(id, text.clone()) });
        }
        next += TRIES;
        start.elapsed()
    };
    let before = tries(&mut world);
    for id in 0..WAITING {
        world.ask(&request(1_000_000 + id, text(&key(&format!("waits {id}")), 70)));
    }
    let during = tries(&mut world);
    println!("{TRIES} tries take {before:?}, and {during:?} while {WAITING} requests wait");
    assert!(during < 20 * before, "{during:?}, where it was {before:?}");
}

#[test]
fn requests_that_were_given_up_are_bounded_while_the_peer_does_not_hear_it() {
    const MAX_REQUESTS: usize = 100;
    let mut world = World::new();
    let mut begun = 0;
    let refusal = loop {
        assert!(begun <= 2 * MAX_REQUESTS, "{begun} requests have begun");
        let (id, mut result) = world.receive(&key(&format!("given up {begun}")));
        if let Some(refused) = value(&mut result) {
            break refused.expect_err("no value comes");
        }
        begun += 1;
        world.cancel(id);
        world.idle();
    };
    assert_eq!(begun, 2 * MAX_REQUESTS);
    assert!(refusal.to_string().contains("raise max_requests"), "{refusal}");
    world.deliver_all();
    world.send(&key("later"), 7);
    let (_, mut result) = world.receive(&key("later"));
    world.deliver_all();
    assert!(matches!(value(&mut result), Some(Ok(7))));
}

#[test]
fn the_end_of_a_link_with_many_requests_for_one_key_takes_no_time() {
    let mut world = World::new();
    let text = text(&key("x"), 70);
    for id in 0..MAX_PEER_REQUESTS as u64 {
        world.ask(&request(id, text.clone()));
    }
    let begin = Instant::now();
    world.sender.clean_up_peer((RECEIVER, life(RECEIVER)), u64::MAX);
    println!("{:?}", begin.elapsed());
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    world.send(&key("x"), 1);
    assert!(world.answers.lock().unwrap().is_empty(), "all are forgotten");
}
