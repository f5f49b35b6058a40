//! Batches beyond the limits of outstanding receives and sends.

use super::*;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use tensorwire::Error;

#[test]
fn sends_beyond_the_limit_are_refused_as_a_whole_with_the_numbers() {
    let are_sent = AtomicBool::new(false);
    run(2, &[("max_outstanding_sends", "10")], move |node, task| {
        let step = begin(node, 1);
        if task == 0 {
            let edges = edges_to(node, 1, 11);
            step.send_all(edges[..4].iter().zip(tensors(node, 1, 4))).expect("four");
            let error = step.send_all(edges[4..].iter().zip(tensors(node, 9, 7))).expect_err("seven more");
            let numbers = Error::BatchTooLarge { values: 7, waiting: 4, limit: 10 }.to_string();
            assert_eq!(error.to_string(), numbers);
            let rest = edges.iter().zip(tensors(node, 1, 10)).skip(4).take(6);
            step.send_all(rest).expect("six more");
            are_sent.store(true, Ordering::SeqCst);
        } else {
            // Values leave as soon as their edges are announced, and are not outstanding then.
            until(node, "the sends", || are_sent.load(Ordering::SeqCst));
            let edges = edges_from(node, 0, 10);
            check(&step.recv_all(&borrowed(&edges), SOON).expect("received"), 1);
        }
    });
}

/// Runs steps with `count` edges, beyond one of the limits.
fn with_little_room(settings: &[(&str, &str)], count: usize, steps: u64) {
    run(2, settings, move |node, task| {
        let (to, from) = (edges_to(node, 1 - task, count), edges_from(node, 1 - task, count));
        let (out, back) = (node.batch(to).expect("usable"), node.batch(from).expect("usable"));
        for n in 0..steps {
            let step = begin(node, n);
            let pending = back.receive(&step).within(SOON).begin().expect("begun");
            out.send(&step, tensors(node, n, count)).expect("sent");
            check(&pending.wait().expect("received"), n);
        }
    });
}

#[test]
fn receives_of_a_batch_may_be_more_than_max_requests() {
    with_little_room(&[("max_requests", "3")], 50, 5);
}

/// Over verbs each of these tensors has a destination that is granted at the same time.
#[test]
fn many_large_tensors_of_a_batch_are_on_their_way_at_once() {
    if crate::common::calls_for_each_value() {
        return;
    }
    let settings = [("max_requests", "32768"), ("small_tensor_bytes", "0"), ("pool_size", "32MiB")];
    with_little_room(&settings, 16_500, 2);
}

#[test]
fn more_than_a_queue_holds_goes_on_as_the_peer_takes_it() {
    run(2, &[("queue_depth", "16")], move |node, task| {
        let (to, from) = (edges_to(node, 1 - task, 2000), edges_from(node, 1 - task, 2000));
        let (out, back) = (node.batch(to).expect("usable"), node.batch(from).expect("usable"));
        for n in 0..5 {
            let step = begin(node, n);
            out.send(&step, tensors(node, n, 2000)).expect("sent");
            check(&back.recv(&step, SOON).expect("received"), n);
        }
    });
}

#[test]
fn the_deadline_holds_for_receives_that_wait_for_room_too() {
    run(2, &[("max_requests", "2")], |node, task| {
        if task == 0 {
            return;
        }
        let step = begin(node, 1);
        let edges = edges_from(node, 0, 30);
        let timeout = Duration::from_millis(100);
        let start = Instant::now();
        let pending = step.receive_all(&borrowed(&edges)).within(timeout).begin().expect("begun");
        let ends = pending.wait_each();
        assert!(start.elapsed() >= timeout && start.elapsed() < SOON, "{:?}", start.elapsed());
        for (at, end) in ends.into_iter().enumerate() {
            let error = end.expect_err("nobody has sent");
            let named = format!("'g/{at}'");
            assert!(matches!(&error, Error::DeadlineExceeded { key, .. } if key.contains(&named)), "{error}");
        }
        let pending = step.receive_all(&borrowed(&edges)).within(SOON).begin().expect("begun");
        pending.cancel();
        let cancelled = |end: &Result<_, Error>| matches!(end, Err(Error::Cancelled { .. }));
        assert!(pending.wait_each().iter().all(cancelled));
    });
}

#[test]
fn a_later_receive_of_a_key_that_waits_for_room_gets_a_later_value() {
    run(2, &[("max_requests", "2")], |node, task| {
        let step = begin(node, 1);
        let name = |name| match task {
            0 => node.edge_to("w", 1, name).expect("an edge"),
            _ => node.edge_from("w", 0, name).expect("an edge"),
        };
        let (first, second, third) = (name("a"), name("b"), name("c"));
        let go = |from: &str| match task {
            0 => node.edge_from("w", 1, from).expect("an edge"),
            _ => node.edge_to("w", 0, from).expect("an edge"),
        };
        if task == 1 {
            let pending = step.receive_all(&[&first, &second, &third]).within(SOON).begin().expect("begun");
            let later = step.receive(&third).begin().expect("behind it");
            step.send(&go("go"), Tensor::empty()).expect("sent");
            let received = pending.wait().expect("received");
            assert_eq!(values(&received[2].tensor)[0], 3.0);
            assert_eq!(values(&later.wait().expect("received").tensor)[0], 4.0);
        } else {
            step.recv(&go("go"), SOON).expect("received");
            let all = [(&first, 1.0), (&second, 2.0), (&third, 3.0), (&third, 4.0)];
            step.send_all(all.map(|(edge, value)| (edge, counting(node, value, 1)))).expect("sent");
        }
    });
}
