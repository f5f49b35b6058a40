//! The receive calls beside `recv`: `try_recv`, and the builders.

use crate::common::{SOON, cluster, counting, member, run, two_members, until, values, writes_bulk};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use tensorwire::{Code, DType, Edge, Error, Gauge, Node, Status, Step, TensorMut};

/// Where a peer writes large tensors, `try_recv` waits so long for the write. On a busy machine
/// each sender may be slow.
const LONG_CANCEL_GRACE: (&str, &str) = ("cancel_grace", "20s");

fn here(node: &Node) -> Edge {
    node.edge_from("w", 0, "x").expect("an edge")
}

fn there(node: &Node) -> Edge {
    node.edge_to("w", 1, "x").expect("an edge")
}

/// Sends a signal to the other member, in a step of its own.
fn tell(node: &Node, to: u32, word: u64) {
    let step = node.step(1 << 20).expect("a step");
    let edge = node.edge_to("w", to, &format!("word {word}")).expect("an edge");
    step.send_dead(&edge).expect("sent");
}

fn hear(node: &Node, from: u32, word: u64) {
    let step = node.step(1 << 20).expect("a step");
    let edge = node.edge_from("w", from, &format!("word {word}")).expect("an edge");
    step.recv(&edge, SOON).expect("the word");
}

/// The value of a `try_recv` that must succeed.
fn tried(step: &Step, edge: &Edge) -> Vec<f32> {
    let got = step.try_recv(edge).expect("usable").expect("a value");
    values(&got.tensor).to_vec()
}

#[test]
fn a_try_within_the_process_finds_what_is_there_and_loses_nothing() {
    run(1, &[], |node, _| {
        let (step, edge) = (node.step(1).expect("a step"), node.edge_to("w", 0, "x").expect("an edge"));
        assert!(step.try_recv(&edge).expect("usable").is_none());
        step.send(&edge, counting(node, 1.0, 3)).expect("sent");
        step.send_dead(&edge).expect("sent");
        assert_eq!(tried(&step, &edge), [1.0, 2.0, 3.0]);
        assert!(step.try_recv(&edge).expect("usable").expect("the dead value").is_dead);
        assert!(step.try_recv(&edge).expect("usable").is_none());
        let waits = step.receive(&edge).begin().expect("begun");
        assert!(step.try_recv(&edge).expect("usable").is_none(), "the earlier receive is not disturbed");
        step.send(&edge, counting(node, 5.0, 1)).expect("sent");
        assert_eq!(values(&waits.wait().expect("received").tensor), [5.0]);
    });
}

#[test]
fn a_try_at_a_peer_finds_values_of_any_size_and_of_new_shapes() {
    // In a record, and by loans or writes with new shapes.
    const SIZES: [usize; 5] = [1, 2000, 300_000, 2001, 7];
    for bulk in ["borrow", "copy"] {
        run(2, &[LONG_CANCEL_GRACE, ("bulk_receive", bulk)], |node, task| {
            let step = node.step(1).expect("a step");
            for (round, size) in (0..).zip(SIZES) {
                if task == 0 {
                    hear(node, 1, round);
                    step.send(&there(node), counting(node, size as f32, size)).expect("sent");
                    tell(node, 1, round);
                    continue;
                }
                assert!(step.try_recv(&here(node)).expect("usable").is_none(), "nothing was sent yet");
                tell(node, 0, round);
                hear(node, 0, round);
                let got = tried(&step, &here(node));
                assert_eq!((got.len(), got[0]), (size, size as f32));
            }
            if task == 1 {
                assert!(step.try_recv(&here(node)).expect("usable").is_none(), "nothing comes twice");
            }
        });
    }
}

#[test]
fn tries_that_race_with_their_sender_bring_every_value_once_and_in_order() {
    const VALUES: usize = 300;
    run(2, &[], |node, task| {
        let step = node.step(1).expect("a step");
        if task == 0 {
            for n in 0..VALUES {
                let size = [3, 1500, 1600][n % 3];
                step.send(&there(node), counting(node, n as f32, size)).expect("sent");
                let _ = node.progress();
            }
            return;
        }
        let (mut got, end) = (0, Instant::now() + SOON);
        while got < VALUES {
            assert!(Instant::now() < end, "{got} of {VALUES} came");
            let brought = match got % 4 {
                // A value that `try_recv` has left is for later receives.
                3 => Some(step.recv(&here(node), SOON).expect("received")),
                _ => step.try_recv(&here(node)).expect("usable"),
            };
            let Some(delivery) = brought else { continue };
            assert_eq!(values(&delivery.tensor)[0], got as f32);
            got += 1;
        }
    });
}

#[test]
fn a_try_takes_what_has_landed_for_a_standing_request_and_leaves_what_comes_later() {
    if crate::common::calls_for_each_value() {
        return;
    }
    run(2, &[LONG_CANCEL_GRACE], |node, task| {
        let sequence = node.sequence(1 << 40);
        let _standing = (task == 1).then(|| node.standing(&here(node), sequence, 8).expect("stands"));
        for n in 0..40 {
            let step = node.step(sequence.step(n)).expect("a step");
            if task == 0 {
                hear(node, 1, n);
                step.send(&there(node), counting(node, n as f32, 2000)).expect("sent");
                tell(node, 1, n);
                continue;
            }
            if n % 3 == 0 {
                assert!(step.try_recv(&here(node)).expect("usable").is_none(), "step {n} was not sent yet");
            }
            tell(node, 0, n);
            hear(node, 0, n);
            let got = match n % 2 {
                0 => tried(&step, &here(node)),
                _ => values(&step.recv(&here(node), SOON).expect("received").tensor).to_vec(),
            };
            assert_eq!((got.len(), got[0]), (2000, n as f32));
        }
    });
}

#[test]
fn a_try_fails_as_a_receive_does() {
    run(3, &[], |node, task| {
        let step = node.step(1).expect("a step");
        if task == 0 {
            return drop(node.fail("out of coffee").expect("stopped"));
        }
        let edge = here(node);
        until(node, "the loss", || node.peers()[0].state.error().is_some());
        let error = step.try_recv(&edge).expect_err("its peer is lost");
        assert!(matches!(&error, Error::PeerLost { peer, .. } if peer.to_string() == "w/0"), "{error}");
        let away = node.edge_to("w", 3 - task, "x").expect("an edge");
        let wrong_end = step.try_recv(&away).expect_err("it ends elsewhere");
        assert!(matches!(wrong_end, Error::WrongEnd { .. }));
        assert!(
            wrong_end.to_string().ends_with("receive on an edge that Node::edge_from made"),
            "{wrong_end}"
        );
        step.abort(Status::new(Code::Aborted, "enough")).expect("aborted");
        assert!(matches!(step.try_recv(&edge), Err(Error::Aborted { .. })));
    });
}

#[test]
fn a_try_at_a_peer_that_makes_no_progress_ends_all_the_same() {
    let settings = [("poll", "inline"), ("cancel_grace", "50ms")];
    run(2, &settings, |node, task| {
        let step = node.step(1).expect("a step");
        if task == 0 {
            hear(node, 1, 0);
            step.send(&there(node), counting(node, 4.0, 2000)).expect("sent");
            tell(node, 1, 0);
            // Where the tensor is offered, the write waits for this member.
            std::thread::sleep(Duration::from_millis(800));
            return hear(node, 1, 1);
        }
        assert!(step.try_recv(&here(node)).expect("usable").is_none(), "nothing was sent yet");
        tell(node, 0, 0);
        hear(node, 0, 0);
        let begun = Instant::now();
        let first = step.try_recv(&here(node)).expect("usable");
        assert!(begun.elapsed() < Duration::from_millis(700), "it took {:?}", begun.elapsed());
        tell(node, 0, 1);
        let got = first.unwrap_or_else(|| step.recv(&here(node), SOON).expect("received"));
        assert_eq!(values(&got.tensor)[0], 4.0, "the value was not lost");
    });
}

/// Lets both handle all messages.
fn progress_of(nodes: [&Node; 2]) {
    for _ in 0..1000 {
        nodes.iter().for_each(|node| _ = node.progress().expect("alive"));
    }
}

/// After the first tensor its size is known. Over verbs the sender then writes the next at once.
#[test]
fn a_tensor_of_a_known_size_comes_without_further_progress_of_its_sender() {
    let [sender, receiver] = two_members(&[]);
    let run_both = || progress_of([&sender, &receiver]);
    for n in 1..=5 {
        let steps = [&sender, &receiver].map(|node| node.step(n).expect("a step"));
        let pending = steps[1].receive(&here(&receiver)).begin().expect("begun");
        run_both();
        steps[0].send(&there(&sender), counting(&sender, n as f32, 2000)).expect("sent");
        if n == 1 {
            run_both();
        }
        let got = pending.wait().expect("without the sender");
        assert_eq!(values(&got.tensor)[0], n as f32);
        [&sender, &receiver].iter().for_each(|node| node.cleanup(n));
    }
    run_both();
    assert_eq!(receiver.counters().gauge(Gauge::GrantedBytes), 0);
}

/// Over verbs a standing edge has a destination for the next tensor before a receive waits.
#[test]
fn a_tensor_of_a_standing_edge_comes_without_further_progress_of_its_sender() {
    let [sender, receiver] = two_members(&[]);
    let run_both = || progress_of([&sender, &receiver]);
    let sequence = receiver.sequence(1 << 40);
    let standing = receiver.standing(&here(&receiver), sequence, 4).expect("new");
    for n in 0..5 {
        let steps = [&sender, &receiver].map(|node| node.step(sequence.step(n)).expect("a step"));
        run_both();
        steps[0].send(&there(&sender), counting(&sender, n as f32, 2000)).expect("sent");
        let pending = steps[1].receive(&here(&receiver)).begin().expect("begun");
        if n == 0 {
            run_both();
        }
        assert_eq!(values(&pending.wait().expect("without the sender").tensor)[0], n as f32);
        [&sender, &receiver].iter().for_each(|node| node.cleanup(sequence.step(n)));
    }
    drop(standing);
    run_both();
    assert_eq!(receiver.counters().gauge(Gauge::GrantedBytes), 0);
}

/// Over verbs and TCP a peer writes to memory of this process.
#[test]
fn memory_that_a_peer_may_write_to_is_kept_when_its_receive_gives_up() {
    if !writes_bulk() {
        return;
    }
    let [sender, receiver] = two_members(&[]);
    let steps = [&sender, &receiver].map(|node| node.step(1).expect("a step"));
    let granted = || receiver.counters().gauge(Gauge::GrantedBytes);
    let before = receiver.pool().stats().allocated;
    let pending = steps[1].receive(&here(&receiver)).begin().expect("begun");
    steps[0].send(&there(&sender), counting(&sender, 4.0, 16_000)).expect("sent");
    until(&receiver, "the destination is granted", || {
        if granted() == 0 {
            sender.progress().expect("alive");
        }
        granted() > 0
    });
    drop(pending);
    receiver.progress().expect("alive");
    assert_eq!(granted(), 64_000);
    assert!(receiver.pool().stats().allocated > before, "the peer may still write to it");
    until(&sender, "the tensor lands", || {
        receiver.progress().expect("alive");
        granted() == 0
    });
    let next = tried(&steps[1], &here(&receiver));
    assert_eq!((next.len(), next[0]), (16_000, 4.0));
}

#[test]
fn a_builder_begins_waits_or_calls_back_with_and_without_a_tensor() {
    run(1, &[], |node, _| {
        let (step, edge) = (node.step(1).expect("a step"), node.edge_to("w", 0, "x").expect("an edge"));
        let mine = || node.tensor(DType::F32, &[2]).expect("room");
        let (done, called) = channel();
        let late = Duration::from_millis(20);
        assert!(matches!(
            step.receive(&edge).within(late).wait(),
            Err(Error::DeadlineExceeded { after, .. }) if after == late
        ));
        for n in 0..4 {
            step.send(&edge, counting(node, n as f32, 2)).expect("sent");
            let brought: TensorMut = match n {
                0 => step.receive(&edge).into(mine()).wait().expect("received").tensor,
                1 => {
                    step.receive(&edge)
                        .into(mine())
                        .within(SOON)
                        .begin()
                        .expect("begun")
                        .wait()
                        .expect("it")
                        .tensor
                }
                2 => {
                    let done = done.clone();
                    let then = move |got: Result<tensorwire::Delivery<TensorMut>, Error>| {
                        done.send(got.expect("received").tensor).expect("open");
                    };
                    let _token = step.receive(&edge).into(mine()).then(then).expect("begun");
                    called.recv_timeout(SOON).expect("called back")
                }
                _ => {
                    let all = step.receive_all(std::slice::from_ref(&edge)).wait().expect("received");
                    assert_eq!(values(&all[0].tensor), [3.0, 4.0]);
                    continue;
                }
            };
            assert_eq!(brought.as_slice::<f32>().expect("f32"), [n as f32, n as f32 + 1.0]);
        }
        let token = step
            .receive(&edge)
            .then(|got| assert!(matches!(got, Err(Error::Cancelled { .. }))))
            .expect("begun");
        token.cancel();
    });
}

#[test]
fn before_the_join_a_send_and_a_receive_fail_alike() {
    let cluster = cluster(2);
    let node = member(&cluster, 0).start().expect("it starts");
    let step = node.step(1).expect("a step");
    let (to, from) = (there(&node), node.edge_from("w", 1, "x").expect("an edge"));
    let sent = step.send(&to, counting(&node, 0.0, 1)).expect_err("it is not joined");
    let all = step.send_all([(&to, counting(&node, 0.0, 1))]).expect_err("it is not joined");
    let received = step.recv(&from, SOON).expect_err("it is not joined");
    for error in [sent, all, received] {
        assert!(matches!(&error, Error::NotConnected { peer } if peer.to_string() == "w/1"), "{error}");
        assert!(error.to_string().contains("call join first"), "{error}");
    }
    node.stop().expect("it stops");
}

#[test]
fn the_text_of_an_abort_does_not_grow_from_task_to_task() {
    const CAUSE: &str = "the loss is not a number";
    run(3, &[], |node, task| {
        let step = node.step(1).expect("a step");
        if task == 0 {
            return step.abort(Status::new(Code::Internal, CAUSE)).expect("aborted");
        }
        let error =
            step.recv(&node.edge_from("w", task - 1, "x").expect("an edge"), SOON).expect_err("aborted");
        let text = error.to_string();
        assert_eq!(error.code(), Code::Internal);
        assert!(error.is_derived() && text.starts_with(&format!("w/{} could not send", task - 1)), "{text}");
        assert!(matches!(&error, Error::Remote { peer, .. } if peer.task() == task - 1), "{text}");
        assert!(text.contains(&format!("the step was aborted there: Internal: {CAUSE}")), "{text}");
        assert_eq!(
            [CAUSE, "could not send", "derived"].map(|part| text.matches(part).count()),
            [1; 3],
            "{text}"
        );
        step.abort(error.to_status()).expect("aborted");
    });
}

#[test]
fn the_error_of_make_mut_goes_on_by_a_question_mark() {
    fn doubled(
        node: &Node,
        tensor: tensorwire::Tensor,
    ) -> Result<f32, Box<dyn std::error::Error + Send + Sync>> {
        let mut tensor = tensor.make_mut(node.pool())?;
        let value = &mut tensor.as_mut_slice::<f32>()?[0];
        *value *= 2.0;
        Ok(*value)
    }
    run(1, &[], |node, _| assert_eq!(doubled(node, counting(node, 4.0, 1)).expect("room"), 8.0));
}

/// Whether the error is that of a receive beyond a limit of four.
fn is_beyond<T: std::fmt::Debug>(result: Result<T, Error>) -> bool {
    match result {
        Err(Error::ResourceExhausted { limit: 4, remedy, .. }) => remedy.contains("max_requests"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_receive_beyond_the_limit_fails_when_it_begins() {
    for mode in ["inline", "adaptive", "dedicated"] {
        run(2, &[("max_requests", "4"), ("poll", mode)], |node, task| {
            let step = node.step(1).expect("a step");
            if task == 0 {
                for n in 0..17 {
                    hear(node, 1, n);
                    step.send(&there(node), counting(node, n as f32, 1)).expect("sent");
                }
                return;
            }
            let edge = here(node);
            let begin = || step.receive(&edge).within(SOON).begin();
            let mut pending: Vec<_> = (0..4).map(|_| begin().expect("begun")).collect();
            assert!(
                is_beyond(begin()) && is_beyond(step.try_recv(&edge)) && is_beyond(step.recv(&edge, SOON))
            );
            let live = node.pool().stats().live_tensors;
            let given = || node.tensor(DType::F32, &[1]).expect("room");
            assert!(is_beyond(step.receive(&edge).into(given()).begin()));
            assert_eq!(node.pool().stats().live_tensors, live, "the given tensor is dropped");
            let (called, calls) = channel();
            let refused = step.receive(&edge).then(move |_| called.send(()).expect("open"));
            assert!(is_beyond(refused.map(drop)));
            assert!(calls.recv().is_err(), "the callback is dropped and not called");
            // Neither batches nor edges within the process count.
            let batch = step.receive_all(&[&edge; 10]).within(SOON).begin().expect("begun");
            let own = node.edge_to("w", 1, "own").expect("an edge");
            let within: Vec<_> = (0..5).map(|_| step.receive(&own).begin().expect("begun")).collect();
            for n in 0..4 {
                tell(node, 0, n);
                // The result comes with the permit.
                let got = pending.remove(0).wait().expect("received");
                assert_eq!(values(&got.tensor), [n as f32]);
                pending.push(begin().expect("one has ended"));
            }
            assert!(is_beyond(begin()));
            (4..14).for_each(|n| tell(node, 0, n));
            let received = batch.wait().expect("received");
            let numbers: Vec<_> = received.iter().map(|got| values(&got.tensor)[0]).collect();
            assert_eq!(numbers, (4..14).map(|n| n as f32).collect::<Vec<_>>());
            drop(pending.pop());
            until(node, "the receive that was dropped has ended", || begin().is_ok());
            for n in 14..17 {
                tell(node, 0, n);
                assert_eq!(values(&pending.remove(0).wait().expect("received").tensor), [n as f32]);
            }
            drop(within);
        });
    }
}

#[test]
fn a_standing_request_takes_nothing_of_the_limit_of_receives() {
    run(2, &[("max_requests", "4")], |node, task| {
        const BASE: u64 = 1 << 40;
        let sequence = node.sequence(BASE);
        let step = |n| node.step(sequence.step(n)).expect("a step");
        let names = ["a", "b", "c", "d"];
        if task == 0 {
            step(0).send(&there(node), counting(node, 0.0, 1)).expect("sent");
            hear(node, 1, 0);
            for (name, n) in names.iter().zip(0..) {
                let edge = node.edge_to("w", 1, name).expect("an edge");
                step(0).send(&edge, counting(node, n as f32, 1)).expect("sent");
            }
            return;
        }
        let _standing = node.standing(&here(node), sequence, 8).expect("new");
        step(0).recv(&here(node), SOON).expect("received");
        let edges = names.map(|name| node.edge_from("w", 0, name).expect("an edge"));
        let step = step(0);
        let pending = edges.each_ref().map(|edge| step.receive(edge).within(SOON).begin().expect("begun"));
        tell(node, 0, 0);
        for (n, pending) in (0..).zip(pending) {
            assert_eq!(values(&pending.wait().expect("received").tensor), [n as f32]);
        }
    });
}
