//! Waits for any of a set of receives.

use crate::common::{SOON, cluster, counting, member, run, values};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};
use tensorwire::{Delivery, Edge, Error, Node, Pending, PendingSet, Step, Tensor};

fn here(node: &Node, from: u32, at: usize) -> Edge {
    node.edge_from("w", from, &format!("x/{at}")).expect("an edge")
}

fn there(node: &Node, to: u32, at: usize) -> Edge {
    node.edge_to("w", to, &format!("x/{at}")).expect("an edge")
}

fn begin(step: &Step, edge: &Edge) -> Pending<Tensor> {
    step.receive(edge).within(SOON).begin().expect("begun")
}

/// Has task 0 send number `at` next.
fn ask(node: &Node, step: &Step, at: usize) {
    step.send(&node.edge_to("w", 0, "next").expect("an edge"), counting(node, at as f32, 1)).expect("sent");
}

/// Sends the numbers that task 1 asks for, until it asks for `count` or more.
fn serve(node: &Node, step: &Step, count: usize) {
    let next = node.edge_from("w", 1, "next").expect("an edge");
    loop {
        let at = values(&step.recv(&next, SOON).expect("received").tensor)[0] as usize;
        if at >= count {
            return;
        }
        step.send(&there(node, 1, at), counting(node, at as f32, 1)).expect("sent");
    }
}

fn number(ended: Option<(usize, Result<Delivery<Tensor>, Error>)>) -> (usize, f32) {
    let (index, received) = ended.expect("in time");
    (index, values(&received.expect("received").tensor)[0])
}

#[test]
fn the_receive_that_ends_first_is_returned_and_the_others_go_on() {
    const COUNT: usize = 40;
    for mode in ["inline", "adaptive", "dedicated"] {
        run(2, &[("poll", mode)], |node, task| {
            let step = node.step(1).expect("a step");
            if task == 0 {
                return serve(node, &step, COUNT);
            }
            let mut set = PendingSet::new();
            assert!(set.is_empty() && set.wait_any(SOON).is_none(), "an empty set waits for nothing");
            for at in 0..COUNT {
                assert_eq!(set.insert(begin(&step, &here(node, 0, at))), at);
            }
            let brief = Instant::now();
            assert!(set.wait_any(Duration::from_millis(20)).is_none(), "nothing was sent");
            assert!(brief.elapsed() >= Duration::from_millis(20));
            // In an order that jumps over the set.
            let order: Vec<usize> = (0..COUNT).map(|n| n * 17 % COUNT).collect();
            for (done, at) in order.iter().enumerate() {
                ask(node, &step, *at);
                assert_eq!(number(set.wait_any(SOON)), (*at, *at as f32));
                assert_eq!(set.len(), COUNT - done - 1);
            }
            assert!(set.wait_any(SOON).is_none());
            ask(node, &step, COUNT);
        });
    }
}

#[test]
fn receives_that_have_ended_come_in_the_order_of_their_ends_and_none_starves() {
    run(1, &[], |node, _| {
        let step = node.step(1).expect("a step");
        let edges: Vec<Edge> = (0..4).map(|at| there(node, 0, at)).collect();
        let send = |at: usize| step.send(&edges[at], counting(node, at as f32, 1)).expect("sent");
        let mut set = PendingSet::new();
        edges.iter().for_each(|edge| _ = set.insert(begin(&step, edge)));
        [2, 0, 3].into_iter().for_each(send);
        // Of the first edge there is always one more value.
        for (round, expected) in [2, 0, 3, 0, 0].into_iter().enumerate() {
            let (index, value) = number(set.wait_any(Duration::ZERO));
            assert_eq!((index, value), (expected, expected as f32), "round {round}");
            if expected == 0 {
                send(0);
                assert_eq!(set.insert(begin(&step, &edges[0])), 0, "the index is used again");
            }
        }
        assert_eq!(number(set.wait_any(Duration::ZERO)).0, 0);
        send(1);
        assert_eq!(number(set.wait_any(Duration::ZERO)).0, 1);
        assert!(set.is_empty());
    });
}

#[test]
fn errors_come_with_the_index_of_their_receive() {
    run(2, &[], |node, task| {
        if task == 0 {
            return serve(node, &node.step(1).expect("a step"), 3);
        }
        let [step, other] = [1, 2].map(|n| node.step(n).expect("a step"));
        let mut set = PendingSet::new();
        for at in 0..3 {
            set.insert(begin(&step, &here(node, 0, at)));
        }
        let edge = here(node, 0, 3);
        let brief = step.receive(&edge).within(Duration::from_millis(20));
        let late = set.insert(brief.begin().expect("begun"));
        let own = node.edge_to("w", 1, "own").expect("an edge");
        let brief = step.receive(&own).within(Duration::from_millis(200));
        let late_here = set.insert(brief.begin().expect("begun"));
        for expected in [late, late_here] {
            let (index, error) = set.wait_any(SOON).expect("the deadline");
            assert!(index == expected && matches!(error, Err(Error::DeadlineExceeded { .. })), "{error:?}");
        }
        let pending = begin(&other, &here(node, 0, 4));
        let token = pending.cancel_token();
        let cancelled = set.insert(pending);
        assert_eq!(cancelled, late_here);
        std::thread::scope(|scope| {
            scope.spawn(|| token.cancel());
            let (index, error) = set.wait_any(SOON).expect("the cancellation");
            assert!(index == cancelled && matches!(error, Err(Error::Cancelled { .. })), "{error:?}");
        });
        let gone = set.insert(begin(&other, &here(node, 0, 4)));
        other.cleanup();
        let (index, error) = set.wait_any(SOON).expect("the cleanup");
        assert!(index == gone && matches!(error, Err(Error::StepGone { .. })), "{error:?}");
        ask(node, &step, 1);
        assert_eq!(number(set.wait_any(SOON)), (1, 1.0), "the others have gone on");
        ask(node, &step, 3);
        node.stop().expect("stopped");
        let left: BTreeSet<usize> = std::iter::from_fn(|| set.wait_any(SOON))
            .map(|(index, error)| {
                assert!(matches!(error, Err(Error::Stopped)), "{error:?}");
                index
            })
            .collect();
        assert!(set.is_empty() && left == [0, 2].into());
    });
}

#[test]
fn a_set_has_receives_of_several_pollers_and_of_the_process_itself() {
    for mode in ["adaptive", "dedicated"] {
        run(3, &[("poll", mode), ("pollers", "2")], |node, task| {
            let step = node.step(1).expect("a step");
            let mut set = PendingSet::new();
            for from in 0..3 {
                set.insert(begin(&step, &here(node, from, 0)));
            }
            for to in [2, 0, 1] {
                step.send(&there(node, to, 0), counting(node, task as f32, 1)).expect("sent");
            }
            let got: BTreeSet<usize> = (0..3)
                .map(|_| {
                    let (index, value) = number(set.wait_any(SOON));
                    assert_eq!(value, index as f32);
                    index
                })
                .collect();
            assert_eq!(got.len(), 3);
            assert!(set.wait_any(SOON).is_none());
        });
    }
}

#[test]
fn dropping_the_set_leaves_the_values_to_the_next_receives() {
    run(2, &[], |node, task| {
        let step = node.step(1).expect("a step");
        if task == 0 {
            return serve(node, &step, 4);
        }
        let mut set = PendingSet::new();
        (0..4).for_each(|at| _ = set.insert(begin(&step, &here(node, 0, at))));
        drop(set);
        for at in 0..4 {
            ask(node, &step, at);
            let got = step.recv(&here(node, 0, at), SOON).expect("received");
            assert_eq!(values(&got.tensor), [at as f32]);
        }
        ask(node, &step, 4);
    });
}

#[test]
fn tensors_of_the_caller_come_back_filled() {
    run(1, &[], |node, _| {
        let (step, edge) = (node.step(1).expect("a step"), there(node, 0, 0));
        let given = node.tensor(tensorwire::DType::F32, &[3]).expect("room");
        let mut set = PendingSet::new();
        set.insert(step.receive(&edge).into(given).begin().expect("begun"));
        step.send(&edge, counting(node, 5.0, 3)).expect("sent");
        let (_, filled) = set.wait_any(SOON).expect("in time");
        assert_eq!(values(&filled.expect("received").tensor.freeze()), [5.0, 6.0, 7.0]);
    });
}

/// Nodes have clocks of their own, which begin with them.
#[test]
fn a_set_with_receives_of_two_nodes_keeps_its_timeout() {
    const SHORT: Duration = Duration::from_millis(200);
    let begin = |node: &Node| {
        let edge = node.edge_to("w", 0, "self").expect("an edge");
        begin(&node.step(1).expect("a step"), &edge)
    };
    let start = || member(&cluster(1), 0).start().expect("a node");
    let early = start();
    std::thread::sleep(SHORT * 10);
    let late = start();
    for nodes in [[&early, &late], [&late, &early]] {
        let mut set = PendingSet::new();
        nodes.into_iter().for_each(|node| _ = set.insert(begin(node)));
        let began = Instant::now();
        assert!(set.wait_any(SHORT).is_none(), "nothing was sent");
        println!("a timeout of {SHORT:?} was kept after {:?}", began.elapsed());
        assert!((SHORT..SHORT * 5).contains(&began.elapsed()));
    }
}
