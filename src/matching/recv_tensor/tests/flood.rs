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
