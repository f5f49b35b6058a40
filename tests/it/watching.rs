//! What a program and its log see of failures: events, waits, and flight records.

use crate::common::other::Other;
use crate::common::{SOON, cluster, counting, member, over_grpc, run, two_members, until};
use crate::log;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use tensorwire::{EdgeSide, EdgeWait, Events, FlightEvent, LossCause, Node, NodeEventKind};

/// The kinds of the next events about a task, until `count` have come.
fn kinds(events: &mut Events, count: usize) -> Vec<&'static str> {
    let next = || events.wait(SOON).expect("it comes soon");
    let kind = |kind: NodeEventKind| match kind {
        NodeEventKind::Joined => "joined",
        NodeEventKind::Returned => "returned",
        NodeEventKind::Lost(_) => "lost",
        _ => "unknown",
    };
    std::iter::repeat_with(next).take(count).map(|event| kind(event.kind)).collect()
}

#[test]
fn joins_losses_and_returns_come_as_iterator_callback_and_stream() {
    use futures_core::Stream;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};
    let cluster = cluster(2);
    let start = |task| member(&cluster, task).start().expect("the node starts");
    let (node, other) = (start(0), start(1));
    let (told, called) = channel();
    node.events().then(move |event| told.send(event).expect("it listens"));
    std::thread::scope(|scope| {
        scope.spawn(|| other.join().expect("joined"));
        node.join().expect("joined");
    });
    let mut events = node.events();
    assert_eq!(kinds(&mut events, 1), ["joined"]);
    let life = node.peers()[0].incarnation;
    other.fail("the disk is full").expect("in time");
    let lost = loop {
        node.progress().expect("usable");
        if let Some(event) = events.wait(Duration::from_millis(10)) {
            break event;
        }
    };
    assert!(
        lost.to_string().contains("w/1 was lost") && lost.to_string().contains("the disk is full"),
        "{lost}"
    );
    assert!(Some(lost.incarnation) == life && !lost.advice().is_empty() && lost.number == 2, "{lost:?}");
    let again = start(1);
    std::thread::scope(|scope| {
        scope.spawn(|| again.join().expect("joined"));
        node.join().expect("joined");
    });
    assert_eq!(kinds(&mut events, 1), ["returned"]);
    assert!(events.wait(Duration::from_millis(1)).is_none() && !events.is_over());
    // The callback and a late reader get the same ones.
    let numbers: Vec<u64> = (0..3).map(|_| called.recv_timeout(SOON).expect("called").number).collect();
    assert_eq!(numbers, [1, 2, 3]);
    let mut stream = pin!(node.events().stream());
    let mut context = Context::from_waker(Waker::noop());
    for number in 1..=3 {
        let Poll::Ready(Some(event)) = stream.as_mut().poll_next(&mut context) else {
            panic!("event {number}")
        };
        assert_eq!((event.number, event.missed), (number, 0));
    }
    assert!(stream.as_mut().poll_next(&mut context).is_pending());
    node.stop().expect("in time");
    assert!(matches!(stream.as_mut().poll_next(&mut context), Poll::Ready(None)));
    assert!(events.next().is_none() && events.is_over());
}

#[test]
fn a_report_has_each_wait_with_its_peer_its_reason_and_its_age() {
    let [sender, receiver] = two_members(&[]);
    let (out, here) =
        (sender.edge_to("w", 1, "x").expect("an edge"), receiver.edge_from("w", 0, "x").expect("an edge"));
    let (sending, receiving) = (sender.step(5).expect("new"), receiver.step(6).expect("new"));
    sending.send(&out, counting(&sender, 0.0, 10)).expect("sent");
    let began = Instant::now();
    // A look at the clock notes since when the value waits.
    let earlier = loop {
        std::thread::sleep(Duration::from_millis(20));
        let waits = sender.waits(10).expect("usable");
        if began.elapsed() >= SOON || waits.waits.iter().any(|wait| wait.since > Duration::ZERO) {
            break waits.waits.first().map(|wait| wait.since);
        }
    };
    std::thread::sleep(Duration::from_millis(20));
    let waits = sender.waits(10).expect("usable");
    let [wait] = &waits.waits[..] else { panic!("{waits}") };
    assert!(earlier.is_some_and(|since| wait.since > since), "{earlier:?}, {wait}");
    assert_eq!((wait.side, wait.wait, wait.calls), (EdgeSide::Sender, EdgeWait::NotAnnounced, 1), "{wait}");
    assert_eq!((wait.peer().task(), wait.name(), wait.step), (1, "x", 5.into()), "{wait}");
    assert!(wait.since >= Duration::from_millis(20) && wait.since < SOON, "{wait}");
    // A receive of another step, and a later one within the process.
    let began = Instant::now();
    let first = receiving.receive(&here).begin().expect("begun");
    std::thread::sleep(Duration::from_millis(5));
    let local = receiver.edge_to("w", 1, "own").expect("an edge");
    let second = receiving.receive(&local).begin().expect("begun");
    let waits = receiver.waits(10).expect("usable");
    println!("{waits}");
    let [older, newer] = &waits.waits[..] else { panic!("{waits}") };
    assert_eq!((older.name(), older.wait, older.peer().task()), ("x", EdgeWait::NoValue, 0), "{waits}");
    assert!(older.since > newer.since && newer.name() == "own", "{waits}");
    assert!(older.since <= began.elapsed(), "{older}");
    let text = format!("receive of 'x' 0:0, step 6, from w/0: {:.1} s, ", older.since.as_secs_f64());
    assert!(older.to_string().contains(&text), "{older}");
    let one = receiver.waits(1).expect("usable");
    assert_eq!((one.waits.len(), one.left_out), (1, 1), "{one}");
    drop((first, second));
    sending.cleanup();
    assert!(sender.waits(10).expect("usable").waits.is_empty());
    sender.stop().expect("in time");
    assert!(sender.waits(10).is_err(), "the node has stopped");
}

#[test]
fn a_thread_that_holds_the_poller_and_waits_is_in_the_report() {
    let [sender, receiver] = two_members(&[]);
    let here = receiver.edge_from("w", 0, "x").expect("an edge");
    let (step, out) = (receiver.step(1).expect("new"), sender.edge_to("w", 1, "x").expect("an edge"));
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| step.recv(&here, SOON).map(drop));
        std::thread::sleep(Duration::from_millis(30));
        let began = Instant::now();
        let report = loop {
            let report = receiver.waits(10).expect("usable");
            if !report.waits.is_empty() {
                break report;
            }
            assert!(began.elapsed() < SOON, "it waits");
        };
        assert_eq!(report.waits[0].name(), "x");
        let sending = sender.step(1).expect("new");
        sending.send(&out, counting(&sender, 0.0, 1)).expect("sent");
        while !waits.is_finished() {
            sender.progress().expect("usable");
        }
        waits.join().expect("no panic").expect("received");
    });
}

/// The events of the only link of a node.
fn flight(node: &Node) -> Vec<FlightEvent> {
    let logs = node.flight_logs().expect("usable");
    let last = logs.last().expect("a link");
    assert!(last.records.is_sorted_by_key(|record| record.at), "{last}");
    last.records.iter().map(|record| record.event).collect()
}

/// The receiver ends, and the sender keeps the records of the link.
fn assert_records_stay(sender: &Node, receiver: &Node) {
    receiver.fail("on purpose").expect("in time");
    until(sender, "the loss", || sender.peers()[0].state.error().is_some());
    let ended = flight(sender);
    assert_eq!(ended.last(), Some(&FlightEvent::Down), "{}", sender.flight_logs().expect("usable")[0]);
}

#[test]
fn a_flight_recorder_has_what_is_rare_and_stays_after_the_loss() {
    if crate::common::calls_for_each_value() {
        return;
    }
    let [sender, receiver] = two_members(&[]);
    let (out, here) =
        (sender.edge_to("w", 1, "x").expect("an edge"), receiver.edge_from("w", 0, "x").expect("an edge"));
    let [sending, receiving] = [&sender, &receiver].map(|node| node.step(1).expect("new"));
    // A value that waits for a while. A shorter wait leaves no record.
    sending.send(&out, counting(&sender, 0.0, 1)).expect("sent");
    std::thread::sleep(Duration::from_millis(20));
    sender.progress().expect("usable");
    let pending = receiving.receive(&here).begin().expect("begun");
    until(&receiver, "the value", || sender.progress().is_ok() && pending.is_done());
    drop(pending.wait().expect("received"));
    let exchange = || {
        sending.send(&out, counting(&sender, 0.0, 1)).expect("sent");
        let pending = receiving.receive(&here).begin().expect("begun");
        until(&receiver, "the value", || sender.progress().is_ok() && pending.is_done());
        drop(pending.wait().expect("received"));
    };
    let begin = flight(&sender);
    assert_eq!(begin[..2], [FlightEvent::Attached, FlightEvent::Up], "{begin:?}");
    let has = |of: &[FlightEvent], is: fn(&FlightEvent) -> bool| of.iter().any(is);
    assert!(has(&begin, |event| matches!(event, FlightEvent::WaitBegan { edge: None, .. })), "{begin:?}");
    assert!(has(&begin, |event| matches!(event, FlightEvent::AnnouncementCame { .. })), "{begin:?}");
    assert!(has(&begin, |event| matches!(event, FlightEvent::WaitEnded { values: 1 })), "{begin:?}");
    let announced = flight(&receiver);
    assert!(has(&announced, |event| matches!(event, FlightEvent::Announced { .. })), "{announced:?}");
    // Values and their credit leave no record.
    (0..100).for_each(|_| exchange());
    assert_eq!((flight(&sender).len(), flight(&receiver).len()), (begin.len(), announced.len()));
    sending.abort(tensorwire::Status::new(tensorwire::Code::Aborted, "enough")).expect("an error");
    until(&receiver, "the abort", || {
        sender.progress().is_ok()
            && has(&flight(&receiver), |event| matches!(event, FlightEvent::AbortCame { .. }))
    });
    assert_records_stay(&sender, &receiver);
}

#[test]
fn a_flight_recorder_of_calls_has_what_is_rare_and_stays_after_the_loss() {
    if !over_grpc() {
        return;
    }
    let [sender, receiver] = two_members(&[]);
    let here = receiver.edge_from("w", 0, "x").expect("an edge");
    let [sending, receiving] = [&sender, &receiver].map(|node| node.step(1).expect("new"));
    assert_eq!((flight(&sender), flight(&receiver)), (vec![FlightEvent::Up], vec![FlightEvent::Up]));
    receiving.recv(&here, Duration::from_millis(10)).expect_err("nothing was sent");
    let has = |of: &Node, is: fn(&FlightEvent) -> bool| flight(of).iter().any(is);
    until(&sender, "the end of the request", || {
        has(&receiver, |event| matches!(event, FlightEvent::GaveUp { .. }))
            && has(&sender, |event| matches!(event, FlightEvent::GiveUpCame { .. }))
    });
    // Values leave no record.
    let before = (flight(&sender).len(), flight(&receiver).len());
    let out = sender.edge_to("w", 1, "x").expect("an edge");
    for _ in 0..10 {
        sending.send(&out, counting(&sender, 0.0, 1)).expect("sent");
        drop(receiving.recv(&here, SOON).expect("received"));
    }
    assert_eq!((flight(&sender).len(), flight(&receiver).len()), before);
    sending.abort(tensorwire::Status::new(tensorwire::Code::Aborted, "enough")).expect("an error");
    assert!(has(&sender, |event| matches!(event, FlightEvent::Aborted { .. })));
    assert_records_stay(&sender, &receiver);
}

#[test]
fn each_event_has_one_line_in_the_log_that_says_what_to_do() {
    // The process has one subscriber, which records every event.
    Other::run_alone("watching::role_logs_each_event_once", "", &[]);
}

#[test]
fn settings_of_pollers_are_told_once_where_there_are_none() {
    Other::run_alone("watching::role_has_settings_without_effect", "", &[]);
}

#[test]
#[ignore = "a role, not a test"]
fn role_has_settings_without_effect() {
    log::log();
    let builder = member(&cluster(1), 0).set("fabric", "grpc").set("poll", "inline");
    let node = builder.start().expect("it is no error");
    let told = log::logged_with("have no effect");
    println!("{told:#?}");
    assert_eq!(told.len(), 1);
    assert!(told[0].starts_with("WARN") && told[0].contains("poll is inline (the builder)"));
    node.stop().expect("it stops");
}

/// The lines of level INFO and above of a task, without those of its start.
fn lines(task: &str) -> Vec<String> {
    let logged = log::logged_with(&format!("message={task}: ")).into_iter();
    logged.filter(|line| !line.starts_with("DEBUG") && !line.starts_with("TRACE")).collect()
}

#[test]
#[ignore = "a role, not a test"]
fn role_logs_each_event_once() {
    log::log();
    let cluster = cluster(2);
    let start = |task| {
        let builder = member(&cluster, task).set("hung_after", "200ms");
        builder.start().expect("the node starts")
    };
    let both = |one: &Node, other: &Node| {
        std::thread::scope(|scope| {
            scope.spawn(|| other.join().expect("joined"));
            one.join().expect("joined");
        });
    };
    let (node, other) = (start(0), start(1));
    both(&node, &other);
    let mut seen = 0;
    let mut next = |count: usize| {
        let began = Instant::now();
        while lines("w/0").len() < seen + count && began.elapsed() < SOON {
            let _ = node.progress();
        }
        // Further lines would come now.
        std::thread::sleep(Duration::from_millis(100));
        let all = lines("w/0");
        let new = all[seen..].to_vec();
        println!("{new:#?}");
        assert_eq!(new.len(), count, "{new:#?}");
        // A thread that holds a poller does not write to the log.
        assert!(new.iter().all(|line| line.ends_with("[tw-callbacks]")), "{new:#?}");
        seen = all.len();
        new
    };
    let joined = next(1);
    assert!(joined[0].starts_with("INFO") && joined[0].contains("w/1 joined"), "{joined:?}");
    // A value that is lost with the peer is part of the line of the loss.
    let step = node.step(1).expect("new");
    let receiving = other.step(1).expect("new");
    let here = other.edge_from("w", 0, "x").expect("an edge");
    assert!(receiving.try_recv(&here).expect("usable").is_none(), "the edge is announced");
    if !over_grpc() {
        until(&node, "the announcement", || node.flight_logs().expect("usable")[0].records.len() > 2);
    }
    step.send(&node.edge_to("w", 1, "x").expect("an edge"), counting(&node, 0.0, 1)).expect("sent");
    other.fail("the disk is full").expect("in time");
    let lost = next(2);
    // Over gRPC no value leaves before it is asked for.
    let values = if over_grpc() { "" } else { "at most 1 values" };
    for part in ["s after the start: w/1 was lost", "the disk is full", values, "What to do: "] {
        assert!(lost[0].starts_with("WARN") && lost[0].contains(part), "{part}: {lost:?}");
    }
    assert!(lost[1].starts_with("WARN") && lost[1].contains("the link has ended"), "{lost:?}");
    let again = start(1);
    both(&node, &again);
    assert!(next(1)[0].contains("w/1 came back"));
    // Two receives that wait for too long are one line, and each is told once.
    let [a, b] = ["a", "b"].map(|name| {
        let edge = node.edge_from("w", 1, name).expect("an edge");
        node.step(2).expect("new").receive(&edge).begin().expect("begun")
    });
    std::thread::sleep(Duration::from_millis(250));
    let hung = next(1);
    for part in
        ["longer than hung_after", "'a' 0:0, step 2, from w/1", "'b'", "has not sent a value", "What to do: "]
    {
        assert!(hung[0].starts_with("WARN") && hung[0].contains(part), "{part}: {hung:?}");
    }
    std::thread::sleep(Duration::from_millis(500));
    next(0);
    drop((a, b));
    again.stop().expect("in time");
    let left = next(1);
    assert!(left[0].starts_with("INFO") && left[0].contains("it stopped"), "{left:?}");
    assert!(!left[0].contains("What to do"), "nothing is wrong: {left:?}");
    assert!(matches!(
        node.peers()[0].state.error(),
        Some(tensorwire::Error::PeerLost { cause: LossCause::Left(_), .. })
    ));
}

#[test]
fn values_that_only_the_queue_of_a_link_holds_up_are_in_the_log_and_in_each_report() {
    if crate::common::calls_for_each_value() {
        return;
    }
    // As above.
    Other::run_alone("watching::role_only_sends", "", &[]);
}

#[test]
#[ignore = "a role, not a test"]
fn role_only_sends() {
    log::log();
    let bound = Duration::from_millis(200);
    let [sender, receiver] =
        two_members(&[("hung_after", "200ms"), ("queue_depth", "16"), ("rdma_qp_queue_depth", "16")]);
    let sequence = receiver.sequence(1 << 40);
    let here = receiver.edge_from("w", 0, "x").expect("an edge");
    let _standing = receiver.standing(&here, sequence, 64).expect("new");
    sender.progress().expect("usable");
    let (step, out) = (sender.step(7).expect("new"), sender.edge_to("w", 1, "x").expect("an edge"));
    // The receiver makes no progress.
    (0..64).for_each(|n| step.send(&out, counting(&sender, n as f32, 2)).expect("sent"));
    let hung = || lines("w/0").into_iter().find(|line| line.contains("longer than hung_after"));
    until(&sender, "the line", || hung().is_some());
    let line = hung().expect("seen");
    for part in ["values of 'x' 0:0, step 7 first, to w/1: ", "the peer has no room"] {
        assert!(line.contains(part), "{part}: {line}");
    }
    // Later waits do not hide it.
    let receives: Vec<_> = (0..10)
        .map(|n| sender.edge_from("w", 1, &n.to_string()).expect("an edge"))
        .map(|edge| step.receive(&edge).begin().expect("begun"))
        .collect();
    let report = sender.waits(1).expect("usable");
    let [wait] = &report.waits[..] else { panic!("{report}") };
    assert_eq!((wait.wait, wait.step, report.left_out), (EdgeWait::NoRoom, 7.into(), 10), "{report}");
    assert!(wait.since >= bound && wait.since < SOON, "{report}");
    drop(receives);
}

#[test]
fn a_disagreement_has_one_line_in_the_log_of_each_side() {
    Other::run_alone("watching::role_disagrees", "", &[]);
}

#[test]
#[ignore = "a role, not a test"]
fn role_disagrees() {
    log::log();
    let cluster = cluster(2);
    let other = format!("{cluster};x=127.0.0.1:9");
    let nodes = [member(&cluster, 0), member(&other, 1)].map(|it| it.start().expect("the node starts"));
    std::thread::scope(|scope| {
        let joins = nodes.each_ref().map(|node| scope.spawn(|| node.join().expect_err("two clusters")));
        joins.into_iter().for_each(|join| println!("{}", join.join().expect("no panic")));
    });
    // Both say Hello again and again.
    std::thread::sleep(Duration::from_secs(2));
    for task in ["w/0", "w/1"] {
        let warnings: Vec<_> = lines(task).into_iter().filter(|line| line.starts_with("WARN")).collect();
        println!("{warnings:#?}");
        assert!(warnings.len() == 1 && warnings[0].contains("cluster"), "{warnings:#?}");
    }
}

#[test]
fn a_call_that_waits_longer_than_hung_after_is_not_ended_by_it() {
    run(2, &[("hung_after", "20ms")], |node, task| {
        let step = node.step(1).expect("new");
        if task == 0 {
            std::thread::sleep(Duration::from_millis(200));
            step.send(&node.edge_to("w", 1, "x").expect("an edge"), counting(node, 3.0, 1)).expect("sent");
            return;
        }
        let edge = node.edge_from("w", 0, "x").expect("an edge");
        drop(step.recv(&edge, SOON).expect("it comes late, and it comes"));
    });
}
