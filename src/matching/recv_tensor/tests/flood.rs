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

/// The request that was made last.
fn last_request(world: &World) -> OwnRequest {
    let said = world.channel.0.lock().unwrap();
    let asked = said.iter().rev().find_map(|said| match said {
        Said::Ask(request, _) => Some(request.clone()),
        Said::Finish(..) | Said::CleanUp(_) => None,
    });
    asked.expect("a request")
}

/// The answer to the request that was made last is lost.
fn lose_answer(world: &mut World) {
    let lost = Status::new(Code::Unavailable, "the connection broke");
    world.receiver.answered((SENDER, last_request(world).id), Err(lost));
    world.tell();
}

#[test]
fn requests_that_end_without_an_answer_are_bounded_while_the_peer_does_not_hear_it() {
    for fails in [false, true] {
        let mut world = World::new();
        for n in 0..MAX_PEER_REQUESTS {
            let (id, mut result) = world.receive(&key(&format!("given up {n}")));
            assert!(value(&mut result).is_none(), "{n}");
            match fails {
                true => lose_answer(&mut world),
                false => world.cancel(id),
            }
        }
        world.idle();
        let (_, mut result) = world.receive(&key("one more"));
        let refusal = value(&mut result).expect("refused").expect_err("no value comes").to_string();
        assert!(
            refusal.contains("that ended early") && refusal.contains("until the peer answers calls"),
            "{refusal}"
        );
        world.deliver_all();
        world.send(&key("later"), 7);
        let (_, mut result) = world.receive(&key("later"));
        world.deliver_all();
        assert!(matches!(value(&mut result), Some(Ok(7))));
    }
}

#[test]
fn a_value_whose_answer_was_lost_is_the_next_one_of_its_key() {
    let mut world = World::new();
    let key = key("x");
    [1, 2].into_iter().for_each(|value| world.send(&key, value));
    let (_, mut lost) = world.receive(&key);
    let (_, mut unasked) = world.receive(&key);
    let request = last_request(&world);
    world.ask(&request);
    world.answers.lock().unwrap().clear();
    lose_answer(&mut world);
    for result in [&mut lost, &mut unasked] {
        assert!(matches!(value(result), Some(Err(Error::Remote { .. }))));
    }
    let (_, mut next) = world.receive(&key);
    world.deliver_all();
    assert_eq!(value(&mut next).expect("done").expect("received"), 1);
}

#[test]
fn no_more_requests_of_a_peer_wait_for_one_key_than_it_makes() {
    let mut world = World::new();
    for id in 0..MAX_KEY_REQUESTS as u64 {
        world.ask(&request(id, text(&key("x"), 70)));
    }
    assert!(world.answers.lock().unwrap().is_empty());
    world.ask(&request(99, text(&key("x"), 70)));
    let status = failure(&world);
    assert_eq!(status.code, Code::ResourceExhausted);
    assert!(status.message.contains("a peer makes one at a time"), "{status}");
    world.ask(&request(99, text(&key("y"), 70)));
    assert!(world.answers.lock().unwrap().is_empty());
}

#[test]
fn the_requests_of_earlier_links_are_forgotten_at_the_cost_of_those_that_end() {
    let mut world = World::new();
    for id in 0..MAX_PEER_REQUESTS as u64 {
        world.ask(&request(id, text_in_turn(&key("x"), 70, id)));
    }
    let begin = Instant::now();
    let from = (RECEIVER, life(RECEIVER));
    for below in (0..20_000).chain([u64::MAX]) {
        world.sender.clean_up_peer(from, below);
    }
    println!("{:?}", begin.elapsed());
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    world.send(&key("x"), 1);
    assert!(world.answers.lock().unwrap().is_empty(), "all are forgotten");
}

/// Makes requests with the numbers from `first` on until one is refused. Returns its number.
fn ask_until_full(world: &mut World, first: u64, step: u64, key: &TensorKey) -> u64 {
    for id in first.. {
        world.ask(&OwnRequest { step, ..request(id, text_in_turn(key, 70, id)) });
        if !world.answers.lock().unwrap().is_empty() {
            let status = failure(world);
            assert_eq!(status.code, Code::ResourceExhausted);
            assert!(status.message.contains("the limit is 16777216; receive fewer"), "{status}");
            return id;
        }
    }
    unreachable!("a bound was reached")
}

#[test]
#[ignore = "takes long: tests/nightly"]
fn the_keys_of_requests_take_bounded_memory_which_is_free_again_once_they_have_ended() {
    let mut world = World::new();
    let key = key(&"x".repeat(2048));
    let name = &key.edge.name;
    let bytes = name.source().len() + name.destination().len() + name.name().len();
    let most = (MAX_PEER_KEY_BYTES / bytes) as u64;
    let from = (RECEIVER, life(RECEIVER));
    for id in 0..2 * most {
        world.ask(&OwnRequest { is_try: true, ..request(id, text(&key, 70)) });
    }
    world.answers.lock().unwrap().clear();
    let first = 2 * most;
    let full = ask_until_full(&mut world, first, STEP, &key);
    assert_eq!(full - first, most);
    world.ask(&request(first, text_in_turn(&key, 70, first)));
    assert!(world.answers.lock().unwrap().is_empty(), "a request that is made again counts once");
    world.sender.finished(from, first, true);
    let next = ask_until_full(&mut world, full, STEP, &key);
    assert_eq!(next - full, 1, "one is finished");
    world.sender.clean_up_peer(from, next);
    let full = ask_until_full(&mut world, next, STEP, &key);
    assert_eq!(full - next, most, "all are forgotten");
    world.sender.step_changed(StepChange::CleanedUp { step: STEP });
    world.answers.lock().unwrap().clear();
    let next = ask_until_full(&mut world, full, STEP + 1, &key);
    assert_eq!(next - full, most, "their step has ended");
}
