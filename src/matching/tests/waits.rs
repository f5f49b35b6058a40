//! Since when calls wait, and what is told of long waits.

use super::super::waits::LongWaits;
use super::*;
use crate::matching::WaitReports;
use std::time::Instant;

const BOUND: Duration = Duration::from_secs(16);
/// A wait is reported a sixteenth of the bound late.
const REPORTED_AFTER: Duration = Duration::from_secs(17);

impl Side {
    fn watched(window: u64) -> Side {
        let mut side = side(window);
        side.matching.long_waits = LongWaits::new(BOUND);
        side
    }

    fn send_dead(&mut self, key: &TensorKey) {
        self.outstanding.fetch_add(1, Ordering::Relaxed);
        self.matching.send(&mut self.lanes, TO_RECEIVER, key.borrowed(), Value::Dead);
    }

    /// What is told at this time, at which something is due.
    fn told(&mut self, seconds: u64) -> Vec<String> {
        let now = at(seconds);
        assert_eq!(self.matching.next_deadline(), now);
        self.matching.expire(&mut self.lanes, now);
        names(self.matching.take_long_waits().unwrap_or_default())
    }
}

fn at(seconds: u64) -> Time {
    Time::ZERO + Duration::from_secs(seconds)
}

fn names(reports: WaitReports) -> Vec<String> {
    reports.waits.into_iter().map(|wait| format!("{} {:?}", wait.key.name.name(), wait.since)).collect()
}

#[test]
fn values_that_wait_for_long_are_told_once_and_from_their_first_look() {
    let mut side = Side::watched(1);
    side.send_dead(&key("x", 1));
    side.send_dead(&key("short", 2));
    assert_eq!(side.told(0), [""; 0]);
    // Its values are dropped, and the next wait there is another one.
    side.matching.step_changed(&mut side.lanes, StepChange::CleanedUp { step: 2 });
    side.matching.expire(&mut side.lanes, at(4));
    side.send_dead(&key("short", 3));
    side.send_dead(&key("x", 3));
    side.matching.expire(&mut side.lanes, at(5));
    assert_eq!(side.told(17), ["x 17s"]);
    // One report within the bound, though the other wait is due after 22 s.
    assert_eq!(side.told(33), ["x 33s", "short 28s"]);
    assert_eq!(side.matching.next_deadline(), Time::NEVER, "all were told");
    let waits = side.matching.waits(&mut side.lanes, at(40), 10);
    assert_eq!(names(waits), ["x 40s", "short 35s"]);
}

#[test]
fn a_receive_that_waits_for_long_is_told_once_before_it_is_late() {
    let mut pair = Pair::new(1);
    pair.sides[RECEIVER] = Side::watched(1);
    pair.up();
    pair.now = Time::ZERO;
    let mut long = pair.begin("long", 1, Destination::Alloc, Duration::from_secs(40));
    let mut short = pair.begin("short", 1, Destination::Alloc, Duration::from_secs(3));
    let side = &mut pair.sides[RECEIVER];
    assert_eq!(side.told(3), [""; 0]);
    assert!(matches!(short.error(), Error::DeadlineExceeded { .. }));
    assert_eq!(side.told(REPORTED_AFTER.as_secs()), ["long 17s"]);
    assert_eq!(side.told(40), [""; 0]);
    assert!(matches!(long.error(), Error::DeadlineExceeded { .. }));
    assert_eq!(side.matching.next_deadline(), Time::NEVER);
}

#[test]
fn a_look_at_new_waits_does_not_take_the_longer_the_more_edges_wait() {
    const EDGES: u64 = 20_000;
    const LOOKS: u64 = 2_000;
    let mut side = Side::watched(1);
    (0..EDGES).for_each(|edge| side.send_dead(&key(&edge.to_string(), 1)));
    let begin = Instant::now();
    for look in 1..=LOOKS {
        side.send_dead(&key(&format!("late {look}"), 1));
        let now = Time::ZERO + Duration::from_millis(look);
        side.matching.expire(&mut side.lanes, now);
    }
    println!("{:?}", begin.elapsed());
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    // The first ones and the last one, since their looks.
    let waits = side.matching.waits(&mut side.lanes, Time::ZERO + 2 * BOUND, usize::MAX).waits;
    assert_eq!(waits.len() as u64, EDGES + LOOKS);
    assert_eq!(waits[0].since, 2 * BOUND - Duration::from_millis(1));
    assert_eq!(waits.last().map(|wait| wait.since), Some(2 * BOUND - Duration::from_millis(LOOKS)));
}
