//! Nodes in processes of their own, with two RDMA devices each, of which one loses its cable.
//!
//! These tests run alone, as root. `tests/rxe` sets the variables, each a shell command:
//! `TENSORWIRE_TEST_CUT_FIRST` and `TENSORWIRE_TEST_MEND_FIRST` for the cable of the first devices,
//! and the same with `SECOND`. `TENSORWIRE_TEST_INTERFACES` are the network interfaces of the two
//! devices of w/0.

use crate::common::other::Other;
use crate::outages::{Asked, BACK, BOUND, FOR_EVER, ask_for, end, first_step, join, link, shell, started};
use std::time::{Duration, Instant};
use tensorwire::{Counter, Error, LossCause, Node};

/// Elements (`f32`) of a tensor that has a part on each rail.
const BULK: usize = 100_000;

/// How long traffic goes on after a cable is pulled: longer than a port may be down.
const AFTER: Duration = Duration::from_secs(6);

/// A retry count that fails within a second, and not while a slow machine makes a link.
const FEW: &str = "6";

/// w/0, and w/1 in a process of its own, with a link that has both rails.
fn linked(retries: &str) -> (Node, Vec<Other>) {
    // A rail on which a ping was late is lost from the start, which happens on a busy machine.
    for _ in 0..5 {
        let (node, echos) = started(1, retries);
        if devices(&node).len() == 2 {
            return (node, echos);
        }
        println!("a rail was lost while the link was made");
        end(node, echos);
    }
    panic!("no link has both rails");
}

/// Bytes that the interfaces of both devices have sent.
fn sent() -> [u64; 2] {
    let names = std::env::var("TENSORWIRE_TEST_INTERFACES").expect("two names of interfaces");
    let (first, second) = names.split_once(',').expect("two");
    [first, second].map(|name| {
        let text = std::fs::read_to_string(format!("/sys/class/net/{name}/statistics/tx_bytes"));
        text.expect("an interface").trim().parse().expect("a number")
    })
}

fn exchange(node: &Node, id: u64) -> Result<(), Error> {
    ask_for(node, 1, id, BULK).and_then(Asked::result)
}

/// The devices of the link with w/1.
fn devices(node: &Node) -> Vec<String> {
    node.peers().remove(0).devices
}

/// Exchanges with w/1, during which the rail at this place is cut by `cut`: no call fails.
fn lose_a_rail(place: usize, retries: &str, cut: &str, mend: &str) {
    let (node, echos) = linked(retries);
    let (mut id, before) = (first_step(&node, 1), link(&node, 1));
    let mut left = devices(&node);
    left.remove(place);
    let start = sent();
    for _ in 0..10 {
        exchange(&node, id).expect("both rails work");
        id += 1;
    }
    let moved: Vec<_> = sent().iter().zip(start).map(|(after, before)| after - before).collect();
    println!("sent on each interface by 10 exchanges: {moved:?} bytes");
    let third = 10 * BULK as u64 * 4 / 3;
    assert!(moved.iter().all(|bytes| *bytes > third), "about half goes over each: {moved:?}");

    // A tensor is on its way when the cable is pulled.
    let asked = ask_for(&node, 1, id, BULK).expect("begun");
    shell(cut);
    let cut_at = Instant::now();
    asked.result().unwrap_or_else(|error| panic!("after {:?}: {error}", cut_at.elapsed()));
    println!("the tensor that was on its way is back after {:?}", cut_at.elapsed());
    let mut count = 0;
    while cut_at.elapsed() < AFTER || count < 10 {
        id += 1;
        count += 1;
        exchange(&node, id).unwrap_or_else(|error| panic!("after {:?}: {error}", cut_at.elapsed()));
    }
    println!("{count} more exchanges until {:?} after the cut", cut_at.elapsed());
    assert_eq!(link(&node, 1), before, "the same link");
    assert_eq!((devices(&node), node.counters().get(Counter::RailsLost)), (left, 1), "one rail is lost");
    assert_eq!(node.counters().get(Counter::PeersLost), 0);

    // The link goes on as it is when the cable is back.
    shell(mend);
    for _ in 0..10 {
        id += 1;
        exchange(&node, id).expect("the link that is left");
    }
    assert_eq!(link(&node, 1), before, "the same link");
    end(node, echos);
}

#[test]
#[ignore = "cuts the network"]
fn a_second_rail_without_a_cable_fails_no_call() {
    lose_a_rail(1, FOR_EVER, "TENSORWIRE_TEST_CUT_SECOND", "TENSORWIRE_TEST_MEND_SECOND");
}

#[test]
#[ignore = "cuts the network"]
fn a_second_rail_that_loses_everything_fails_no_call() {
    lose_a_rail(1, FEW, "TENSORWIRE_TEST_DROP_SECOND", "TENSORWIRE_TEST_DROP_NOT_SECOND");
}

#[test]
#[ignore = "cuts the network"]
fn a_first_rail_without_a_cable_fails_no_call() {
    lose_a_rail(0, FOR_EVER, "TENSORWIRE_TEST_CUT_FIRST", "TENSORWIRE_TEST_MEND_FIRST");
}

#[test]
#[ignore = "cuts the network"]
fn a_first_rail_that_loses_everything_fails_no_call() {
    lose_a_rail(0, FEW, "TENSORWIRE_TEST_DROP_FIRST", "TENSORWIRE_TEST_DROP_NOT_FIRST");
}

/// The first rail of the link with w/1 is lost, then its cable is back and the other one is cut.
/// The calls of the link fail, and the next link is over the first rail.
#[test]
#[ignore = "cuts the network"]
fn a_link_without_rails_ends_and_the_next_one_is_over_those_that_work() {
    let (node, echos) = linked(FOR_EVER);
    let (both, before) = (devices(&node), link(&node, 1));
    let mut id = first_step(&node, 1);
    shell("TENSORWIRE_TEST_CUT_FIRST");
    let cut_at = Instant::now();
    while devices(&node).len() == 2 {
        assert!(cut_at.elapsed() < BOUND, "no rail is lost");
        exchange(&node, id).unwrap_or_else(|error| panic!("after {:?}: {error}", cut_at.elapsed()));
        id += 1;
    }
    shell("TENSORWIRE_TEST_MEND_FIRST");
    exchange(&node, id).expect("the other rail works");
    shell("TENSORWIRE_TEST_CUT_SECOND");
    let cut_at = Instant::now();
    let lost = loop {
        assert!(cut_at.elapsed() < BOUND, "no call has failed");
        id += 1;
        if let Err(error) = exchange(&node, id) {
            break error;
        }
    };
    println!("after {:?}: {lost}", cut_at.elapsed());
    assert!(
        matches!(&lost, Error::PeerLost { cause: LossCause::Network(_) | LossCause::Closed(_), .. }),
        "{lost:?}"
    );
    node.live_steps().into_iter().for_each(|id| node.cleanup(id));
    join(&node);
    println!("linked again {:?} after the cut, over {:?}", cut_at.elapsed(), devices(&node));
    assert!(cut_at.elapsed() < BACK);
    assert_eq!(devices(&node), both[..1]);
    let now = link(&node, 1);
    assert!(now.0 > before.0 && now.1 == before.1, "a new link, the same life: {now:?} after {before:?}");
    let first = first_step(&node, 1);
    (first..first + 10).for_each(|id| exchange(&node, id).expect("the first rail works"));
    shell("TENSORWIRE_TEST_MEND_SECOND");
    end(node, echos);
}
