//! `fork` in a process with a node: calls in the child fail, and the parent is not disturbed.
#![allow(unsafe_code)] // fork(2), waitpid(2), alarm(2)

use crate::common::other::Other;
use crate::common::{SOON, cluster, counting, lends_nothing, member, two_members, until, values};
use std::time::{Duration, Instant};
use tensorwire::{Counter, DType, Error, Node, NodeError, NodeState, PeerState, TensorError};

/// Runs `body` in a forked child, which then exits as a program does. Returns whether it succeeded
/// in time.
fn in_a_child(body: impl FnOnce()) -> bool {
    // SAFETY: the child calls nothing that another thread of the parent may hold locked. The test
    // checks exactly this, and the alarm ends a child that hangs.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: `alarm` only arranges for a signal.
        unsafe { libc::alarm(20) };
        let verdict = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
        // Runs the exit handlers and destructors of a program.
        std::process::exit(if verdict.is_ok() { 0 } else { 1 });
    }
    let mut status = 0;
    // SAFETY: waits for the child, and writes one valid int.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
}

fn forked<T>(result: Result<T, Error>) {
    let error = result.map(|_| ()).expect_err("this is a child");
    assert!(matches!(error, Error::Forked), "{error}");
    assert!(error.to_string().contains("exec"), "{error}");
}

#[test]
#[ignore = "a role, not a test"]
fn role_forker() {
    let cluster = std::env::var("TEST_CLUSTER").expect("started by a test");
    let node = member(&cluster, 0).set("bulk_receive", "borrow").start().expect("the node starts");
    node.join().expect("joined");
    let [out, back, never] =
        [node.edge_to("w", 1, "out"), node.edge_from("w", 1, "back"), node.edge_from("w", 1, "never")]
            .map(|edge| edge.expect("an edge"));
    let exchange = |id: u64| {
        let step = node.step(id).expect("new");
        step.send(&out, counting(&node, id as f32, 20_000)).expect("sent");
        let got = step.recv(&back, SOON).expect("received").tensor;
        assert_eq!(values(&got)[..2], [id as f32, id as f32 + 1.0]);
        got
    };
    let mut lent = Some(exchange(0));
    let is_lent = lent.as_ref().is_some_and(tensorwire::Tensor::is_lent);
    assert_eq!(is_lent, !lends_nothing(), "it is borrowed from the peer");
    let step = node.step(1).expect("new");
    let mut pending = Some(step.receive(&never).begin().expect("begun"));
    let token = step.receive(&never).within(SOON).then(|_| {}).expect("begun");
    let mut frozen = Some(counting(&node, 5.0, 1000));
    let mut writable = Some(node.tensor(DType::F32, &[1000]).expect("room"));
    writable.as_mut().expect("held").as_mut_slice::<f32>().expect("f32").fill(3.0);
    let mut ring = Some(node.ring(DType::F32, &[10], 2).expect("room"));
    let mut node = Some(node);
    let forked_at = Instant::now();
    let good = in_a_child(|| {
        let (node, pending) = node.take().zip(pending.take()).expect("copied");
        forked(node.step(2));
        forked(node.progress());
        forked(node.flush(SOON));
        forked(node.edge_to("w", 1, "x"));
        forked(step.send(&out, frozen.clone().expect("copied")));
        forked(step.send_dead(&out));
        forked(step.recv(&back, SOON));
        forked(step.receive(&back).begin());
        forked(step.receive(&back).into(node_tensor(&mut writable)).begin());
        forked(step.recv_all(&[&back], SOON));
        forked(step.try_recv(&back));
        forked(step.receive(&back).within(SOON).then(|_| {}));
        forked(step.abort(tensorwire::Status::new(tensorwire::Code::Aborted, "x")));
        forked(pending.wait());
        token.cancel();
        node.cleanup(1);
        assert!(node.live_steps().is_empty() && node.address().is_none());
        assert_eq!(node.state(), NodeState::Stopped);
        assert!(matches!(&node.peers()[0].state, PeerState::Lost(Error::Forked)));
        assert!(matches!(
            node.tensor(DType::F32, &[1]),
            Err(TensorError::Pool(tensorwire::PoolError::Forked))
        ));
        assert!(ring.as_ref().is_some_and(|ring| ring.acquire().is_err()));
        for result in [node.join(), node.stop().map(drop), node.fail("in a child").map(drop)] {
            assert!(matches!(result, Err(NodeError::Forked)));
        }
        assert_eq!(
            values(frozen.as_ref().expect("copied"))[0],
            5.0,
            "reading goes on, while the parent holds it"
        );
        drop((lent.take(), frozen.take(), writable.take(), ring.take(), step.clone(), node));
    });
    assert!(good, "the child failed or hung");
    println!("the child took {:?}", forked_at.elapsed());
    assert!(
        forked_at.elapsed() < Duration::from_secs(2),
        "something in the child waited for a thread of the parent"
    );
    let node = node.expect("this is the parent");
    assert_eq!(values(frozen.as_ref().expect("held"))[0], 5.0);
    let written = writable.as_ref().expect("held").as_slice::<f32>().expect("f32");
    assert!(written.iter().all(|value| *value == 3.0), "the child has written to it");
    assert_eq!(values(lent.as_ref().expect("held"))[..2], [0.0, 1.0]);
    assert_eq!(ring.as_ref().expect("held").free(), 2);
    assert!(pending.as_ref().is_some_and(|pending| !pending.is_done()));
    let exchange = |id: u64| {
        let step = node.step(id).expect("new");
        step.send(&out, counting(&node, id as f32, 20_000)).expect("sent");
        assert_eq!(values(&step.recv(&back, SOON).expect("received").tensor)[0], id as f32);
        node.cleanup(id);
    };
    (10..60).for_each(exchange);
    // A death is still noticed, so the liveness watch has its descriptors.
    println!("kill it");
    let error = pending.take().expect("held").wait().map(|_| ()).expect_err("the peer is killed now");
    assert!(matches!(&error, Error::PeerLost { cause: tensorwire::LossCause::Died(_), .. }), "{error}");
    drop((lent, frozen, writable, ring));
    until(&node, "the end of all tensors", || node.pool().is_empty());
    node.stop().expect("stopped");
    println!("the parent is well");
}

fn node_tensor(writable: &mut Option<tensorwire::TensorMut>) -> tensorwire::TensorMut {
    let mut tensor = writable.take().expect("copied");
    // Writes to the child's private copy.
    tensor.as_mut_slice::<f32>().expect("f32").fill(99.0);
    tensor
}

#[test]
#[ignore = "a role, not a test"]
fn role_mirror() {
    let cluster = std::env::var("TEST_CLUSTER").expect("started by a test");
    let node: Node = member(&cluster, 1).start().expect("the node starts");
    node.join().expect("joined");
    let (out, back) =
        (node.edge_from("w", 0, "out").expect("edge"), node.edge_to("w", 0, "back").expect("edge"));
    for id in std::iter::once(0).chain(10..60) {
        let step = node.step(id).expect("new");
        let got = step.recv(&out, SOON).expect("received").tensor;
        step.send(&back, got).expect("sent");
    }
    println!("served");
    loop {
        let _ = node.progress();
    }
}

/// Both nodes are of this process, and nothing but its calls polls their links.
#[test]
#[ignore = "a role, not a test"]
fn role_forks_with_tensors_in_flight() {
    const STEPS: u64 = 8;
    for fabric in ["tcp", "shm"] {
        let [to, from] = two_members(&[("fabric", fabric)]);
        let edges = (from.edge_to("w", 0, "x"), to.edge_from("w", 1, "x"));
        let (out, back) = (edges.0.expect("an edge"), edges.1.expect("an edge"));
        let steps: Vec<_> = (0..STEPS).map(|id| to.step(id).expect("new")).collect();
        let pending = steps[0].receive(&back).begin().expect("begun");
        for id in 0..STEPS {
            let step = from.step(id).expect("new");
            step.send(&out, counting(&from, id as f32, 20_000)).expect("sent");
            // The receiver takes one tensor, and makes the edge known with that.
            while id == 0 && !pending.is_done() {
                from.progress().expect("progress");
                to.progress().expect("progress");
            }
        }
        until(&from, "what the window holds to leave", || from.counters().get(Counter::TensorsSent) > 1);
        let good = in_a_child(|| (0..1000).for_each(|_| forked(steps[1].try_recv(&back))));
        assert!(good, "the child failed or hung");
        assert!(values(&pending.wait().expect("received").tensor)[0] == 0.0);
        let began = Instant::now();
        for (id, step) in steps.iter().enumerate().skip(1) {
            let got = loop {
                assert!(began.elapsed() < SOON, "the tensor of step {id} does not come");
                from.progress().expect("progress");
                if let Some(got) = step.try_recv(&back).expect("usable") {
                    break got.tensor;
                }
            };
            assert!(values(&got).iter().zip(0..).all(|(value, at)| *value == (id + at) as f32), "step {id}");
        }
    }
}

#[test]
fn a_child_that_looks_for_a_tensor_takes_nothing_of_its_parents() {
    Other::run_alone("fork::role_forks_with_tensors_in_flight", &cluster(2), &[]);
}

#[test]
fn a_fork_is_caught_in_the_child_and_does_not_disturb_the_parent() {
    let cluster = cluster(2);
    let mut mirror = Other::start("fork::role_mirror", &cluster);
    let mut forker = Other::start("fork::role_forker", &cluster);
    forker.wait_for("kill it");
    mirror.kill();
    forker.wait_for("the parent is well");
    assert!(forker.ends_well());
}
