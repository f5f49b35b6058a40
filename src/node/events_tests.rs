//! What readers of events get, and what the log has.

use super::*;
use crate::memory::in_a_child;
use crate::sync::PanickingPayload;
use std::sync::mpsc::{RecvTimeoutError, Sender, TryRecvError, channel};
use std::task::Wake;

const TIMEOUT: Duration = Duration::from_secs(60);

struct Nothing;

impl Wake for Nothing {
    fn wake(self: Arc<Self>) {}
}

/// Tells of each wake.
struct WakeSender(Sender<()>);

impl Wake for WakeSender {
    fn wake(self: Arc<Self>) {
        self.0.send(()).expect("it listens");
    }
}

fn peer(number: u64) -> EventPeer {
    let peer = TaskId::new("w", 1).expect("a job name");
    let incarnation = Incarnation::new(7).expect("not 0");
    EventPeer { peer, incarnation, generation: number.into() }
}

fn reader(history: &Arc<EventHistory>) -> Events {
    Events { history: history.clone(), seen: 0, fork_guard: ForkGuard::of_this_process() }
}

#[test]
fn a_slow_reader_misses_the_oldest_events_and_is_told_how_many() {
    let history = EventHistory::new();
    let mut events = reader(&history);
    for number in 0..KEPT as u64 + 10 {
        history.up(peer(number));
    }
    let first = events.try_next().expect("kept");
    assert_eq!((first.missed, first.number, first.generation.get()), (10, 11, 10));
    let second = events.try_next().expect("kept");
    assert_eq!((second.missed, second.number), (0, 12));
    assert!(matches!(second.kind, NodeEventKind::Returned));
    history.end();
    assert_eq!(events.count(), KEPT - 2, "those that are kept come before the end");
}

#[test]
fn a_thousand_lives_of_one_member_push_out_no_loss_of_another() {
    let (history, other) = (EventHistory::new(), TaskId::new("w", 2).expect("a job name"));
    let mut events = reader(&history);
    (0..10).for_each(|number| drop(history.up(peer(number))));
    let of = EventPeer { peer: other.clone(), ..peer(1) };
    let cause = LossCause::Died("it ran out of memory".into());
    let error = Error::PeerLost { peer: other.clone(), incarnation: of.incarnation, cause };
    history.lost(of, error);
    (0..1000).for_each(|number| drop(history.up(peer(number))));
    let kept: Vec<NodeEvent> = std::iter::from_fn(|| events.try_next()).collect();
    assert_eq!(kept.len(), KEPT);
    let is_loss = matches!(kept[0].kind, NodeEventKind::Lost(_));
    assert!(is_loss && kept[0].peer == other, "the first that is kept: {}", kept[0]);
    let (numbers, missed): (Vec<u64>, Vec<u64>) =
        kept.iter().map(|event| (event.number, event.missed)).unzip();
    assert_eq!((numbers[0], missed[0]), (11, 10));
    // Of the member with many lives the last ones are kept.
    assert_eq!((numbers[1], missed[1]), (757, 745));
    assert!(numbers.ends_with(&[1010, 1011]) && missed[2..].iter().all(|missed| *missed == 0));
}

#[test]
fn a_callback_gets_earlier_and_later_events_once_each_and_a_panic_costs_one() {
    let (history, executor) = (EventHistory::new(), Executor::default());
    history.run_on(&executor);
    history.up(peer(1));
    let (told, numbers) = channel();
    reader(&history).then(move |event| {
        if event.number == 2 {
            std::panic::panic_any(PanickingPayload);
        }
        told.send(event.number).expect("it listens");
    });
    assert_eq!(numbers.recv_timeout(TIMEOUT), Ok(1));
    // The executor is busy, so that one job of it has both events.
    let (go, busy) = channel();
    executor.run(move || busy.recv().expect("the test goes on"));
    history.up(peer(2));
    history.up(peer(3));
    go.send(()).expect("it waits");
    assert_eq!(numbers.recv_timeout(TIMEOUT), Ok(3));
    history.end();
    assert_eq!(numbers.recv_timeout(TIMEOUT), Err(RecvTimeoutError::Disconnected), "it is dropped");
    executor.stop();
}

#[test]
fn a_callback_that_comes_after_the_end_is_dropped_unused() {
    let (history, executor) = (EventHistory::new(), Executor::default());
    history.run_on(&executor);
    history.up(peer(1));
    let (told, numbers) = channel();
    let late = reader(&history);
    history.end();
    late.then(move |event| told.send(event.number).expect("it listens"));
    assert_eq!(numbers.recv_timeout(TIMEOUT), Err(RecvTimeoutError::Disconnected));
    executor.stop();
}

#[test]
fn a_callback_may_use_the_history_when_it_is_dropped() {
    struct Looks(Events, Sender<bool>);
    impl Drop for Looks {
        fn drop(&mut self) {
            let Looks(events, told) = self;
            told.send(events.is_over()).expect("it listens");
        }
    }
    let (history, executor) = (EventHistory::new(), Executor::default());
    history.run_on(&executor);
    let (told, over) = channel();
    let looks = Looks(reader(&history), told);
    reader(&history).then(move |_| assert!(!looks.0.is_over()));
    history.end();
    assert_eq!(over.recv_timeout(TIMEOUT), Ok(true));
    executor.stop();
}

#[test]
fn a_stream_keeps_its_last_waker_alone_and_none_after_its_end() {
    let history = EventHistory::new();
    let mut stream = reader(&history).stream();
    let wakers: Vec<Waker> = (0..3).map(|_| Waker::from(Arc::new(Nothing))).collect();
    for waker in &wakers {
        assert!(Pin::new(&mut stream).poll_next(&mut Context::from_waker(waker)).is_pending());
    }
    let kept: Vec<Waker> = history.state().wakers.values().cloned().collect();
    assert!(kept.len() == 1 && kept[0].will_wake(&wakers[2]), "{kept:?}");
    drop(stream);
    assert!(history.state().wakers.is_empty());
}

#[test]
fn a_task_that_waits_for_a_stream_is_woken_once_by_events_and_once_by_the_end() {
    let (history, executor) = (EventHistory::new(), Executor::default());
    history.run_on(&executor);
    let (told, wakes) = channel();
    let waker = Waker::from(Arc::new(WakeSender(told)));
    let mut context = Context::from_waker(&waker);
    let mut stream = reader(&history).stream();
    let mut poll =
        || Pin::new(&mut stream).poll_next(&mut context).map(|event| event.map(|event| event.number));
    assert_eq!(poll(), Poll::Pending);
    history.up(peer(1));
    history.up(peer(2));
    assert_eq!(wakes.recv_timeout(TIMEOUT), Ok(()));
    assert_eq!([poll(), poll(), poll()], [Poll::Ready(Some(1)), Poll::Ready(Some(2)), Poll::Pending]);
    history.end();
    assert_eq!(wakes.recv_timeout(TIMEOUT), Ok(()));
    assert_eq!(poll(), Poll::Ready(None));
    executor.stop();
    assert_eq!(wakes.try_recv(), Err(TryRecvError::Empty), "one wake for each wait");
}

#[test]
fn a_waker_that_panics_costs_no_other_stream_its_wake_up() {
    struct Panics;
    impl Wake for Panics {
        fn wake(self: Arc<Self>) {
            panic!("on purpose");
        }
    }
    let (history, executor) = (EventHistory::new(), Executor::default());
    history.run_on(&executor);
    let (told, wakes) = channel();
    let waits = |waker: Waker| {
        let mut stream = reader(&history).stream();
        assert!(Pin::new(&mut stream).poll_next(&mut Context::from_waker(&waker)).is_pending());
        stream
    };
    // Tasks are woken in no order. So some come behind the first that panics.
    let streams: Vec<EventStream> = (0..32)
        .flat_map(|_| [waits(Arc::new(Panics).into()), waits(Arc::new(WakeSender(told.clone())).into())])
        .collect();
    history.up(peer(1));
    executor.stop();
    assert_eq!(wakes.try_iter().count(), streams.len() / 2);
}

#[test]
fn a_forked_child_waits_for_no_lock_of_the_history() {
    let history = EventHistory::new();
    let (mut stream, mut events) = (Some(reader(&history).stream()), Some(reader(&history)));
    let held = history.state();
    let good = in_a_child(|| {
        let (Some(first), Some(events)) = (stream.take(), events.take()) else { return false };
        let mut context = Context::from_waker(Waker::noop());
        let mut streams = [first, events.stream()].into_iter();
        streams.all(|mut stream| matches!(Pin::new(&mut stream).poll_next(&mut context), Poll::Ready(None)))
    });
    drop(held);
    assert!(good, "the child failed or hung");
}

#[test]
fn a_waiting_reader_is_woken_by_an_event_and_by_the_end() {
    let history = EventHistory::new();
    let mut events = reader(&history);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| (events.next().map(|event| event.number), events.next().is_none()));
        history.up(peer(1));
        history.end();
        assert_eq!(waits.join().expect("no panic"), (Some(1), true));
    });
}

#[test]
fn the_log_has_a_bounded_number_of_events_of_a_link_that_breaks_again_and_again() {
    let history = EventHistory::new();
    let logged: Vec<String> =
        (0..100).filter_map(|number| history.up(peer(number))).map(|event| event.to_string()).collect();
    assert_eq!(logged.len(), MAX_LOGGED);
    let (last, others) = logged.split_last().expect("some");
    assert!(last.contains("its next events are left out for up to 10s"), "{last}");
    assert!(others.iter().all(|line| !line.contains("left out")), "{others:?}");
    let other = EventPeer { peer: TaskId::new("w", 2).expect("a job name"), ..peer(1) };
    assert!(history.up(other).is_some(), "another member is in the log");
    let mut events = reader(&history);
    assert_eq!(std::iter::from_fn(|| events.try_next()).count(), 101, "readers get all");
}

#[test]
fn a_link_that_breaks_for_long_is_in_the_log_all_the_time() {
    let history = EventHistory::new();
    let of = peer(1);
    let mut logged = Vec::new();
    for half in 0..600 {
        let at = Duration::from_millis(450 * half);
        if history.state().log(&of.peer, at) < MAX_LOGGED {
            logged.push(at);
        }
    }
    let pauses = logged.windows(2).map(|two| two[1] - two[0]);
    assert!(pauses.max() < Some(LOG_TIME), "{logged:?}");
    assert!(logged.windows(MAX_LOGGED + 1).all(|many| many[MAX_LOGGED] - many[0] >= LOG_TIME));
}
