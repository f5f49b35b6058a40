//! New names of edges in every step cost no lasting memory, and no more time than the first ones.

use crate::alloc_free::held;
use crate::common::{two_members, until};
use std::time::{Duration, Instant};
use tensorwire::{Counter, DType, Node};

/// Names that are used in one step.
const NAMES: u64 = 100;
const QUARTERS: usize = 4;

/// The names of a run: `usual`, or as many as `TENSORWIRE_TEST_NAMES` says.
fn names(usual: u64) -> u64 {
    let given = std::env::var("TENSORWIRE_TEST_NAMES");
    given
        .map_or(usual, |names| names.parse().unwrap_or_else(|_| panic!("TENSORWIRE_TEST_NAMES is {names:?}")))
}

/// Moves a tensor under each of the names of a step.
fn exchange([sender, receiver]: &[Node; 2], step: u64) {
    let [sends, receives] = [sender, receiver].map(|node| node.step(step).expect("new"));
    let name = |n: u64| format!("while/gradients/layer_{step}/tensor_{n}");
    let begun: Vec<_> = (0..NAMES)
        .map(|n| receiver.edge_from("w", 0, &name(n)).expect("an edge"))
        .map(|edge| receives.receive(&edge).begin().expect("begun"))
        .collect();
    sender.progress().expect("usable");
    for n in 0..NAMES {
        let edge = sender.edge_to("w", 1, &name(n)).expect("an edge");
        sends.send(&edge, sender.tensor(DType::F32, &[2]).expect("room").freeze()).expect("sent");
    }
    for pending in begun {
        until(receiver, "the value", || sender.progress().is_ok() && pending.is_done());
        assert!(!pending.wait().expect("the value comes").is_dead);
    }
    sends.cleanup();
    receives.cleanup();
}

/// What each quarter of the names costs: the bytes that are held after it, and the time for a name.
fn quarters(members: &[Node; 2], names: u64) -> [(i64, Duration); QUARTERS] {
    let steps = names / NAMES / QUARTERS as u64;
    let before = held();
    std::array::from_fn(|quarter| {
        let begin = Instant::now();
        (0..steps).for_each(|step| exchange(members, quarter as u64 * steps + step));
        let time = begin.elapsed() / (steps * NAMES) as u32;
        println!("{} names: {} bytes are held, {time:?} for a name", names, held() - before);
        (held() - before, time)
    })
}

#[test]
fn new_names_in_every_step_cost_no_lasting_memory_and_no_more_time() {
    let members = two_members(&[]);
    let _ = members.each_ref().map(|node| node.sequence(0));
    let all = quarters(&members, names(80_000));
    let [(_, early), (level, _), _, (end, late)] = all;
    assert!(end <= level + level / 20, "{all:?}: memory grows");
    assert!(late <= 5 * early, "{all:?}: a name gets slower");
    let retired = members[1].counters().get(Counter::EdgesRetired);
    let [sending, receiving] = members.each_ref().map(|node| node.edges(1).expect("usable"));
    println!("{retired} edges were retired\n{sending}\n{receiving}");
}
