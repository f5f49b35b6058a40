//! The rules of `Port::arm` and of `Sleeper`.

use crate::expect;
use crate::harness::{End, Got, Harness, TIMEOUT, granted, pair, tensor};
use std::time::{Duration, Instant};
use tensorwire::internals::fabric::{Fabric, LinkFailure, Port, PostError, Sleep, Sleeper};

/// The timeout of one sleep. Sleeps are repeated, and the assertion afterwards finds a wake-up that
/// is missing.
const SHORT_SLEEP: Duration = Duration::from_millis(20);

/// Polls both ends until `end` can be armed, when nothing is outstanding.
fn armed<F: Fabric>(end: &mut End<F>, other: &mut End<F>) {
    let start = Instant::now();
    loop {
        other.poll();
        end.poll();
        if end.port.arm() {
            return;
        }
        assert!(start.elapsed() < TIMEOUT, "it can't be armed within {TIMEOUT:?}");
    }
}

/// Asserts that `act` ends the sleep of `end`, and that `end` cannot be armed before it has polled.
fn assert_ends_sleep<F: Fabric>(end: &mut End<F>, other: &mut End<F>, act: impl FnOnce(&mut End<F>)) {
    let sleeper = end.port.sleeper();
    armed(end, other);
    let seen = sleeper.seen();
    act(other);
    let start = Instant::now();
    while sleeper.seen() == seen {
        sleeper.sleep(Sleep::Waiter, seen, SHORT_SLEEP);
        other.poll();
        assert!(start.elapsed() < TIMEOUT, "nothing ended the sleep within {TIMEOUT:?}");
    }
    assert!(!end.port.arm(), "armed, though something is there");
}

pub fn what_comes_on_an_armed_port_ends_the_sleep<H: Harness>() {
    let (mut a, mut b) = pair::<H>(16);
    b.port.post_receives(b.link, 100);
    for k in 0..20u8 {
        assert_ends_sleep(&mut b, &mut a, |a| a.port.send(a.link, &[k]).expect("room"));
        assert_eq!(expect!(b.next(&mut a), Got::Message(m) => m), [k]);
    }
    assert_ends_sleep(&mut b, &mut a, |a| {
        a.port.fail(a.link, LinkFailure::Local("enough".into()));
    });
    expect!(b.next(&mut a), Got::Down(_) => ());
}

/// A batch notifies the peer at its end at the latest.
pub fn a_batch_ends_the_sleep_of_who_waits_for_it<H: Harness>() {
    let (mut a, mut b) = pair::<H>(16);
    b.port.post_receives(b.link, 100);
    for k in 0..20u8 {
        assert_ends_sleep(&mut b, &mut a, |a| {
            a.port.begin_batch();
            a.port.send(a.link, &[k]).expect("room");
            a.port.end_batch();
        });
        assert_eq!(expect!(b.next(&mut a), Got::Message(m) => m), [k]);
    }
}

pub fn a_local_completion_ends_the_sleep<H: Harness>() {
    let (mut a, mut b) = pair::<H>(16);
    let grant = granted(&mut b, 64);
    let source = tensor(&a.pool, &[5; 64]);
    let sleeper = a.port.sleeper();
    armed(&mut a, &mut b);
    let seen = sleeper.seen();
    a.port.write(a.link, &source, 64, &grant, None).expect("room");
    let start = Instant::now();
    while sleeper.seen() == seen {
        // The target handles the write, and sleeps too.
        b.poll();
        b.port.arm();
        sleeper.sleep(Sleep::Background, seen, SHORT_SLEEP);
        assert!(start.elapsed() < TIMEOUT, "nothing ended the sleep within {TIMEOUT:?}");
    }
    expect!(a.next(&mut b), Got::Done => ());
}

pub fn credits_end_the_sleep_of_one_who_waits_for_them<H: Harness>() {
    let (mut a, mut b) = pair::<H>(16);
    let sleeper = a.port.sleeper();
    armed(&mut a, &mut b);
    let seen = sleeper.seen();
    b.port.publish_credits(b.link, 7);
    let start = Instant::now();
    while sleeper.seen() == seen {
        b.poll();
        sleeper.sleep(Sleep::Waiter, seen, SHORT_SLEEP);
        assert!(start.elapsed() < TIMEOUT, "nothing ended the sleep within {TIMEOUT:?}");
    }
    while a.port.peer_credits(a.link) != 7 {
        a.poll();
        b.poll();
        assert!(start.elapsed() < TIMEOUT, "the credits did not come within {TIMEOUT:?}");
    }
}

pub fn credits_that_have_come_keep_nobody_awake<H: Harness>() {
    let (mut a, mut b) = pair::<H>(16);
    let start = Instant::now();
    b.port.publish_credits(b.link, 7);
    while a.port.peer_credits(a.link) != 7 {
        a.poll();
        b.poll();
        assert!(start.elapsed() < TIMEOUT, "the credits did not come within {TIMEOUT:?}");
    }
    armed(&mut a, &mut b);
}

pub fn room_ends_the_sleep_of_one_who_found_the_queue_full<H: Harness>() {
    let (mut a, mut b) = pair::<H>(8);
    b.port.post_receives(b.link, 100);
    armed(&mut a, &mut b);
    while a.port.send(a.link, b"x").is_ok() {}
    let sleeper = a.port.sleeper();
    let seen = sleeper.seen();
    if a.port.arm() {
        let start = Instant::now();
        while sleeper.seen() == seen {
            b.poll();
            sleeper.sleep(Sleep::Waiter, seen, SHORT_SLEEP);
            assert!(start.elapsed() < TIMEOUT, "nothing ended the sleep within {TIMEOUT:?}");
        }
    }
    let start = Instant::now();
    while a.port.send(a.link, b"again") == Err(PostError::Full) {
        a.poll();
        assert!(start.elapsed() < TIMEOUT, "there was no room within {TIMEOUT:?}");
    }
}

pub fn arming_while_something_comes_loses_nothing<H: Harness>() {
    let (mut a, mut b) = pair::<H>(16);
    b.port.post_receives(b.link, 100);
    for round in 0..50u8 {
        let start = Instant::now();
        while let Err(full) = a.port.send(a.link, &[round]) {
            assert_eq!(full, PostError::Full);
            assert!(start.elapsed() < TIMEOUT, "earlier messages do not complete");
            a.poll();
        }
        armed(&mut b, &mut a);
        while b.arrivals.is_empty() {
            a.poll();
            b.poll();
            assert!(start.elapsed() < TIMEOUT, "nothing came within {TIMEOUT:?}");
        }
        assert_eq!(expect!(b.next_alone(), Got::Message(m) => m), [round]);
    }
}

pub fn a_thread_wakes_the_sleepers_of_its_process<H: Harness>() {
    let (a, _b) = pair::<H>(16);
    for who in [Sleep::Waiter, Sleep::Background] {
        let sleeper = a.port.sleeper();
        let (seen, same) = (sleeper.seen(), sleeper.clone());
        let thread = std::thread::spawn(move || {
            let start = Instant::now();
            while same.seen() == seen {
                same.sleep(who, seen, TIMEOUT);
            }
            start.elapsed()
        });
        std::thread::sleep(SHORT_SLEEP);
        sleeper.wake(who);
        assert!(thread.join().expect("no panic") < TIMEOUT / 2, "it was not woken");
    }
}
