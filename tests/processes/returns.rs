//! Peers that die, stop, are paused, and come back. Each is a real process.

use crate::common::other::{Other, counts, wait_to_be_told};
use crate::common::{SOON, cluster, counting, lends_nothing, member, over_verbs, silence_or, until, values};
use std::time::{Duration, Instant};
use tensorwire::{
    Code, Counter, Error, Generation, Incarnation, LossCause, Node, NodeError, Pending, Status, Tensor,
};

/// `silence_bound` of these tests.
fn bound() -> Duration {
    silence_or(Duration::from_secs(1))
}

fn cluster_of_the_test() -> String {
    std::env::var("TEST_CLUSTER").expect("started by a test")
}

fn start(cluster: &str, task: u32) -> Node {
    let millis = |time: Duration| format!("{}ms", time.as_millis());
    let quick = member(cluster, task).set("silence_bound", millis(bound()));
    quick.set("heartbeat_interval", millis(bound() / 10)).start().expect("the node starts")
}

/// Answers each `ask` with its value, step by step, and goes on with the next life of a lost peer.
#[test]
#[ignore = "a role, not a test"]
fn role_echo() {
    let node = start(&cluster_of_the_test(), 1);
    node.join().expect("joined");
    println!("ready");
    let (ask, answer) =
        (node.edge_from("w", 0, "ask").expect("edge"), node.edge_to("w", 0, "answer").expect("edge"));
    let orders = std::thread::spawn(wait_to_be_told);
    let mut id = 0;
    while !orders.is_finished() {
        let step = node.step(id).expect("new");
        match step.receive(&ask).begin().map(|asked| wait_unless(&node, asked, || orders.is_finished())) {
            Ok(Some(Ok(got))) => {
                step.send(&answer, got).expect("sent");
                id += 1;
            }
            Ok(None) => {}
            Ok(Some(Err(error))) | Err(error) => {
                println!("a call failed: {error}");
                let lost = Instant::now();
                while node.join().is_err() {
                    assert!(lost.elapsed() < SOON, "it did not come back");
                }
            }
        }
    }
    assert_eq!(orders.join().expect("no panic"), "stop");
    node.stop().expect("stopped");
}

fn wait_unless(
    node: &Node,
    pending: Pending<Tensor>,
    over: impl Fn() -> bool,
) -> Option<Result<Tensor, Error>> {
    while !pending.is_done() {
        if over() {
            return None;
        }
        let _ = node.progress();
    }
    Some(pending.wait().map(|got| got.tensor))
}

/// Sends a value to the echo in a step, and checks the answer.
fn ask(node: &Node, id: u64) -> Tensor {
    let step = node.step(id).expect("usable");
    let (ask, answer) =
        (node.edge_to("w", 1, "ask").expect("edge"), node.edge_from("w", 1, "answer").expect("edge"));
    step.send(&ask, counting(node, id as f32, 20_000)).expect("sent");
    let got = step.recv(&answer, SOON).expect("answered").tensor;
    assert_eq!((values(&got)[0], values(&got).len()), (id as f32, 20_000));
    got
}

fn waits(node: &Node, id: u64) -> Pending<Tensor> {
    let edge = node.edge_from("w", 1, "never").expect("edge");
    node.step(id).expect("usable").receive(&edge).begin().expect("begun")
}

/// The loss that has ended a call.
fn loss(node: &Node, pending: Pending<Tensor>) -> (Option<Incarnation>, LossCause) {
    let result = wait_unless(node, pending, || false).expect("it ends");
    match result.map(|_| ()).expect_err("nothing was ever sent") {
        Error::PeerLost { peer, incarnation, cause } => {
            assert_eq!(peer.to_string(), "w/1");
            (Some(incarnation), cause)
        }
        other => panic!("expected a loss, got {other}"),
    }
}

fn join(node: &Node) {
    let began = Instant::now();
    while let Err(error) = node.join() {
        assert!(began.elapsed() < SOON, "{error}");
    }
}

#[derive(Clone, Copy, Debug)]
enum End {
    Killed,
    Stopped,
    /// Killed and started again while this side does not poll.
    Replaced,
}

#[test]
#[ignore = "a role, not a test"]
fn role_survivor() {
    let cluster = cluster_of_the_test();
    let node = start(&cluster, 0);
    let (mut incarnation, mut generation) = (None, Generation::NONE);
    let mut echo = Other::start("returns::role_echo", &cluster);
    let mut settled = None;
    let lives = if over_verbs() { 5 } else { 10 };
    for life in 0..lives {
        join(&node);
        let peer = node.peers()[0].clone();
        assert!(
            peer.incarnation != incarnation && peer.generation > generation,
            "{peer:?} after {incarnation:?}"
        );
        (incarnation, generation) = (peer.incarnation, peer.generation);
        // The same ids in each life: leftovers of the old one must not interfere.
        (0..4).for_each(|id| drop(ask(&node, id)));
        (100 * life..100 * life + 4).for_each(|id| drop(node.step(id)));
        let pending = waits(&node, 0);
        let end = [End::Killed, End::Stopped, End::Replaced][life as usize % 3];
        let ended = Instant::now();
        let cause = match end {
            End::Killed => {
                echo.kill();
                let (lost, cause) = loss(&node, pending);
                println!("life {life}: known after {:?}: {cause}", ended.elapsed());
                assert!(ended.elapsed() < bound() * 5);
                assert_eq!(lost, incarnation);
                let error =
                    node.step(1).expect("usable").recv(&node.edge_from("w", 1, "x").expect("edge"), SOON);
                assert!(matches!(error, Err(Error::PeerLost { incarnation: lost, .. })
                    if Some(lost) == incarnation));
                echo = Other::start("returns::role_echo", &cluster);
                cause
            }
            End::Stopped => {
                echo.say("stop");
                let (lost, cause) = loss(&node, pending);
                println!("life {life}: known after {:?}: {cause}", ended.elapsed());
                assert_eq!(lost, incarnation);
                assert!(echo.ends_well());
                echo = Other::start("returns::role_echo", &cluster);
                cause
            }
            End::Replaced => {
                echo.kill();
                echo = Other::start("returns::role_echo", &cluster);
                // The new life has met the bootstrap service of this process, which has not polled.
                std::thread::sleep(Duration::from_millis(300));
                let (lost, cause) = loss(&node, pending);
                println!("life {life}: replaced, known after {:?}: {cause}", ended.elapsed());
                assert_eq!(lost, incarnation);
                cause
            }
        };
        match end {
            End::Killed | End::Replaced => assert!(matches!(cause, LossCause::Died(_)), "{cause:?}"),
            End::Stopped => assert!(cause.is_clean(), "{cause:?}"),
        }
        join(&node);
        echo.wait_for("ready");
        until(&node, "the old life's end", || node.pool().is_empty());
        if life == 2 {
            settled = Some(counts());
        }
    }
    let settled = settled.expect("more than three lives");
    until(&node, "the same holdings as after three lives", || counts().is_within(settled));
    println!("after {lives} lives as after 3: {:?} and {settled:?}", counts());
    echo.say("stop");
    assert!(echo.ends_well());
    node.stop().expect("stopped");
}

#[test]
fn many_returns_in_a_row_reach_new_calls_and_leave_nothing() {
    Other::run_alone("returns::role_survivor", &cluster(2), &[]);
}

#[test]
fn a_value_without_credit_waits_for_the_next_life_of_its_receiver() {
    if crate::common::calls_for_each_value() {
        return;
    }
    // Steps whose values leave on the first credit of an edge window, and are lost with the peer.
    const LOST: u64 = 2;
    let kept = 2 + LOST;
    let cluster = cluster(2);
    let mut echo = Other::start("returns::role_echo", &cluster);
    let node = start(&cluster, 0);
    join(&node);
    echo.wait_for("ready");
    let to = node.edge_to("w", 1, "ask").expect("edge");
    // The echo asks for step 0 first, so it takes none of these values.
    for id in 2..=kept {
        node.step(id).expect("new").send(&to, counting(&node, id as f32, 20_000)).expect("sent");
    }
    until(&node, "those with credit", || node.counters().get(Counter::TensorsSent) == LOST);
    echo.kill();
    until(&node, "the news", || node.peers()[0].state.error().is_some());
    assert_eq!(node.counters().get(Counter::ValuesLost), LOST);
    let late = node.step(kept + 1).expect("new").send(&to, counting(&node, 0.0, 10));
    assert!(matches!(late, Err(Error::PeerLost { .. })), "while it is gone a send says so");
    until(&node, "the end of those that left", || node.pool().stats().live_tensors == 1);
    let mut echo = Other::start("returns::role_echo", &cluster);
    join(&node);
    echo.wait_for("ready");
    (0..kept).for_each(|id| drop(ask(&node, id)));
    let answer = node.edge_from("w", 1, "answer").expect("edge");
    let got = node.step(kept).expect("usable").recv(&answer, SOON).expect("the new life was served").tensor;
    assert_eq!(values(&got)[0], kept as f32);
}

#[test]
#[ignore = "a role, not a test"]
fn role_borrowing_survivor() {
    let cluster = cluster_of_the_test();
    let node = member(&cluster, 0).set("bulk_receive", "borrow").start().expect("the node starts");
    let mut echo = Other::start("returns::role_echo", &cluster);
    join(&node);
    let held: Vec<Tensor> = (0..3).map(|id| ask(&node, id)).collect();
    assert!(held.iter().all(Tensor::is_lent));
    let maps = counts().mappings;
    for life in 1..4 {
        echo.kill();
        until(&node, "the news", || node.peers()[0].state.error().is_some());
        echo = Other::start("returns::role_echo", &cluster);
        join(&node);
        echo.wait_for("ready");
        for (id, tensor) in held.iter().enumerate() {
            let right = values(tensor).iter().enumerate().all(|(at, value)| *value == (id + at) as f32);
            assert!(right, "after {life} deaths of its sender tensor {id} has changed");
        }
        drop(ask(&node, 0));
    }
    let with_held = counts().mappings;
    drop(held);
    until(&node, "the end of the dead sender's mapping", || counts().mappings < with_held);
    println!(
        "mappings: {maps} with the sender, {with_held} with what it left, {} without",
        counts().mappings
    );
    drop(ask(&node, 1));
}

#[test]
fn what_was_borrowed_from_a_dead_sender_stays_readable_as_long_as_it_is_held() {
    if lends_nothing() {
        return;
    }
    Other::run_alone("returns::role_borrowing_survivor", &cluster(2), &[]);
}

#[test]
fn a_process_that_is_stopped_for_too_long_is_silent_not_dead_and_both_find_each_other_again() {
    let cluster = cluster(2);
    let mut echo = Other::start("returns::role_echo", &cluster);
    let node = start(&cluster, 0);
    join(&node);
    echo.wait_for("ready");
    drop(ask(&node, 0));
    let life = node.peers()[0].incarnation;
    for round in 1..3u64 {
        let pending = waits(&node, 0);
        let stopped = Instant::now();
        echo.suspend();
        let (lost, cause) = loss(&node, pending);
        println!("silence known after {:?} (bound {:?}): {cause}", stopped.elapsed(), bound());
        assert!(stopped.elapsed() < bound() * 5);
        assert_eq!(lost, life);
        assert!(
            matches!(cause, LossCause::Silent { bound: told, after } if told == bound() && after >= told),
            "{cause:?}"
        );
        assert!(cause.to_string().contains(&format!("{:?}", bound())), "{cause}");
        let waiting = node.join_within(Duration::from_millis(300));
        assert!(waiting.contains("nothing was heard"), "{waiting}");
        let resumed = Instant::now();
        echo.signal("CONT");
        let own_error = echo.wait_for("a call failed");
        println!("its own call: {own_error}");
        assert!(own_error.contains("w/0") && own_error.contains("lost"), "{own_error}");
        let blames_itself = own_error.contains("w/0 says: nothing was heard from it");
        assert!(blames_itself || !own_error.contains("silence_bound"), "it was silent itself: {own_error}");
        join(&node);
        println!("joined again {:?} after the SIGCONT", resumed.elapsed());
        assert!(resumed.elapsed() < bound() * 5);
        let peer = &node.peers()[0];
        assert_eq!(peer.incarnation, life, "the same life");
        assert!(peer.generation.get() > round, "on a new link: {peer:?}");
        drop(ask(&node, round));
    }
}

#[test]
fn a_process_that_is_stopped_for_less_than_the_bound_loses_nothing() {
    let cluster = cluster(2);
    let mut echo = Other::start("returns::role_echo", &cluster);
    let node = start(&cluster, 0);
    join(&node);
    echo.wait_for("ready");
    for id in 0..5 {
        echo.suspend();
        let step = node.step(id).expect("new");
        step.send(&node.edge_to("w", 1, "ask").expect("edge"), counting(&node, id as f32, 20_000))
            .expect("sent");
        let answer = step.receive(&node.edge_from("w", 1, "answer").expect("edge")).begin().expect("begun");
        let until = Instant::now() + bound() / 3;
        while Instant::now() < until {
            let _ = node.progress();
        }
        assert!(!answer.is_done(), "it was answered by a stopped process: {:?}", answer.wait());
        echo.signal("CONT");
        assert_eq!(values(&answer.wait().expect("answered").tensor)[0], id as f32);
        // Long enough for a heartbeat; otherwise the pauses would add up.
        std::thread::sleep(bound() / 3);
    }
    assert_eq!(node.peers()[0].generation.get(), 1, "the first link");
}

#[test]
fn where_a_loss_is_fatal_a_death_ends_the_join_at_once() {
    let cluster = cluster(3);
    let mut echo = Other::start("returns::role_lonely", &cluster);
    let fatal = member(&cluster, 0).set("peer_loss", "fail_all").start().expect("the node starts");
    until(&fatal, "the link with w/1", || fatal.peers()[0].generation.get() == 1);
    let (killed, error) = std::thread::scope(|scope| {
        let joining = scope.spawn(|| (fatal.join(), Instant::now()));
        std::thread::sleep(Duration::from_millis(50));
        assert!(!joining.is_finished(), "w/2 is not there");
        let killed = Instant::now();
        echo.kill();
        let (result, ended) = joining.join().expect("no panic");
        (ended - killed, result.expect_err("w/1 was killed"))
    });
    println!("the join ended {killed:?} after the kill: {error}");
    assert!(killed < bound(), "its timeout is 20 s");
    let NodeError::Lost { error: lost, missing } = &error else { panic!("{error}") };
    let Error::PeerLost { peer, cause: LossCause::Died(_), .. } = &**lost else { panic!("{error}") };
    assert_eq!(peer.to_string(), "w/1");
    // The third member was never there.
    assert!(
        missing.iter().any(|task| task.to_string() == "w/2") && error.to_string().contains("w/2"),
        "{error}"
    );
}

/// A process whose join never ends.
#[test]
#[ignore = "a role, not a test"]
fn role_lonely() {
    let node = start(&cluster_of_the_test(), 1);
    let _ = node.join();
}

trait JoinWithin {
    fn join_within(&self, time: Duration) -> String;
}

impl JoinWithin for Node {
    /// The reports about the peer while it cannot be joined.
    fn join_within(&self, time: Duration) -> String {
        let end = Instant::now() + time;
        while Instant::now() < end {
            let _ = self.progress();
        }
        self.peers()[0].state.error().map(ToString::to_string).unwrap_or_default()
    }
}

/// Sends the number of its life, small enough for the record.
#[test]
#[ignore = "a role, not a test"]
fn role_teller() {
    let node = start(&cluster_of_the_test(), 1);
    node.join().expect("joined");
    let life: f32 = std::env::var("TEST_LIFE").expect("started by a test").parse().expect("a number");
    let edge = node.edge_to("w", 0, "life").expect("edge");
    node.step(0).expect("new").send(&edge, counting(&node, life, 4)).expect("sent");
    println!("ready");
    loop {
        let _ = node.progress();
    }
}

/// Receives of steps that its peer has aborted, and of one that it has not.
#[test]
#[ignore = "a role, not a test"]
fn role_asker_of_aborted_steps() {
    let node = start(&cluster_of_the_test(), 1);
    node.join().expect("joined");
    for id in [7, ABORTED_FROM, ABORTED_FROM + 5] {
        let edge = node.edge_from("w", 0, &format!("of {id}")).expect("edge");
        let error = node.step(id).expect("it goes on here").recv(&edge, SOON).expect_err("aborted there");
        assert!(error.is_derived() && error.code() == Code::DataLoss, "{error}");
    }
    let edge = node.edge_from("w", 0, "live").expect("edge");
    node.step(ABORTED_FROM - 1).expect("new").recv(&edge, SOON).expect("it is before the range");
    println!("heard");
    wait_to_be_told();
}

const ABORTED_FROM: u64 = (1 << 40) + 3;

#[test]
fn each_life_of_a_peer_hears_of_earlier_aborts() {
    let cluster = cluster(2);
    let mut asker = Other::start("returns::role_asker_of_aborted_steps", &cluster);
    let node = start(&cluster, 0);
    join(&node);
    let sequence = node.sequence(1 << 40);
    let live = node.edge_to("w", 1, "live").expect("edge");
    let status = Status::new(Code::DataLoss, "on purpose");
    node.step(7).expect("new").abort(status.clone()).expect("aborted");
    let step = node.step(ABORTED_FROM).expect("new");
    sequence.abort_from(&step, status).expect("aborted");
    let before = node.step(ABORTED_FROM - 1).expect("new");
    let serve_until_heard = |asker: &mut Other| {
        std::thread::scope(|scope| {
            let heard = scope.spawn(|| asker.wait_for("heard"));
            until(&node, "the errors and the value", || heard.is_finished());
        });
    };
    for _ in 0..2 {
        before.send(&live, counting(&node, 0.0, 10)).expect("sent");
        serve_until_heard(&mut asker);
        asker.kill();
        until(&node, "the news", || node.peers()[0].state.error().is_some());
        asker = Other::start("returns::role_asker_of_aborted_steps", &cluster);
        join(&node);
    }
    before.send(&live, counting(&node, 0.0, 10)).expect("sent");
    serve_until_heard(&mut asker);
    asker.say("stop");
    assert!(asker.ends_well());
    node.stop().expect("stopped");
}

#[test]
fn what_an_old_life_had_sent_is_not_taken_for_the_new_ones() {
    let cluster = cluster(2);
    let mut teller = Other::start_with("returns::role_teller", &cluster, &[("TEST_LIFE", "1")]);
    let node = start(&cluster, 0);
    join(&node);
    let step = node.step(0).expect("new");
    let edge = node.edge_from("w", 1, "life").expect("edge");
    let given = node.tensor(tensorwire::DType::F32, &[5]).expect("room");
    let mismatch = step.receive(&edge).into(given).begin().expect("begun").wait().map(|_| ());
    assert!(
        matches!(mismatch, Err(Error::ShapeMismatch { .. })),
        "the value is kept for the next receive: {mismatch:?}"
    );
    teller.kill();
    until(&node, "the news", || node.peers()[0].state.error().is_some());
    let _teller = Other::start_with("returns::role_teller", &cluster, &[("TEST_LIFE", "2")]);
    join(&node);
    let got = step.recv(&edge, SOON).expect("the new life sends").tensor;
    assert_eq!(values(&got)[0], 2.0, "of the life that the call was bound to");
    assert_eq!(node.counters().get(Counter::ValuesLost), 1, "of the first life");
    drop(got);
    node.cleanup(0);
    assert!(node.pool().is_empty());
}

#[test]
fn a_death_ends_every_kind_of_call_that_waits_for_the_peer() {
    let cluster = cluster(2);
    let mut echo = Other::start("returns::role_echo", &cluster);
    let node = start(&cluster, 0);
    join(&node);
    echo.wait_for("ready");
    let step = node.step(0).expect("new");
    let never = node.edge_from("w", 1, "never").expect("edge");
    let given = node.tensor(tensorwire::DType::F32, &[5]).expect("room");
    let into = step.receive(&never).into(given).begin().expect("begun");
    let (told, called_back) = std::sync::mpsc::channel();
    let _token = step
        .receive(&never)
        .within(SOON)
        .then(move |result| told.send(result.map(|_| ())).expect("open"))
        .expect("begun");
    let pending = step.receive(&never).begin().expect("begun");
    std::thread::scope(|scope| {
        let received = scope.spawn(|| step.recv(&never, SOON).map(|_| ()));
        let all = scope.spawn(|| step.recv_all(&[&never, &never], SOON).map(|_| ()));
        std::thread::sleep(Duration::from_millis(50));
        let killed = Instant::now();
        echo.kill();
        let results = [
            pending.wait().map(|_| ()),
            into.wait().map(|_| ()),
            received.join().expect("no panic"),
            all.join().expect("no panic"),
            called_back.recv_timeout(SOON).expect("called back"),
            step.recv(&never, SOON).map(|_| ()),
            step.send(&node.edge_to("w", 1, "x").expect("edge"), counting(&node, 0.0, 1)),
            step.send_dead(&node.edge_to("w", 1, "x").expect("edge")),
        ];
        println!("{} calls had ended {:?} after the kill", results.len(), killed.elapsed());
        assert!(killed.elapsed() < bound() * 5);
        for (at, result) in results.into_iter().enumerate() {
            let died = matches!(&result, Err(Error::PeerLost { cause: LossCause::Died(_), .. }));
            assert!(died, "call {at}: {result:?}");
        }
    });
    assert!(node.pool().is_empty());
}
