//! Cancellations of batches with edges within the process.

use super::*;
use rustix::time::{ClockId, clock_gettime};

const BATCHES: u64 = 500;
const WAITING: u64 = 20_000;

/// The time on the CPU in which batches of one edge begin and are dropped, or are cancelled.
fn cancels(step: &Step, edge: &Edge) -> Duration {
    let on_cpu = || {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    };
    let before = on_cpu();
    for at in 0..BATCHES {
        let edges = [edge.at(1, at)];
        drop(step.receive_all(&edges).begin().expect("begun"));
        step.receive_all(&edges).then(|_| {}).expect("begun").cancel();
    }
    on_cpu() - before
}

#[test]
fn a_batch_is_cancelled_at_the_same_cost_beside_many_receives_within_the_process() {
    run(1, &[], |node, _| {
        let (step, edge) = (begin(node, 1), node.edge_from("w", 0, "x").expect("an edge"));
        let before = cancels(&step, &edge);
        let receive = |at| step.receive(&edge.at(0, at)).begin().expect("begun");
        let waiting: Vec<_> = (0..WAITING).map(receive).collect();
        let beside = (0..3).map(|_| cancels(&step, &edge)).min().expect("three");
        println!("{BATCHES} batches of each kind take {before:?}, and {beside:?} beside {WAITING} receives");
        assert!(beside < 8 * before, "{beside:?}, where it was {before:?}");
        assert!(waiting.iter().all(|pending| !pending.is_done()), "others are cancelled");
    });
}

#[test]
fn a_cancelled_batch_leaves_the_receives_of_others_on_its_edges() {
    run(1, &[], |node, _| {
        let (step, edges) = (begin(node, 1), edges_from(node, 0, 3));
        let twice = [&edges[0], &edges[1], &edges[0]];
        let [first, second, third] = [0; 3].map(|_| step.receive_all(&twice).begin().expect("begun"));
        let single = step.receive(&edges[1]).begin().expect("begun");
        second.cancel();
        for end in second.wait_each() {
            assert!(matches!(end, Err(Error::Cancelled { .. })), "{end:?}");
        }
        drop(third);
        step.send_all(twice.into_iter().zip(tensors(node, 1, 3))).expect("sent");
        check(&first.wait().expect("received"), 1);
        step.send(&edges[1], counting(node, 7.0, 2)).expect("sent");
        assert_eq!(values(&single.wait().expect("received").tensor), [7.0, 8.0]);
    });
}
