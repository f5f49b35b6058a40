//! Pending receives as futures: on tokio, on an executor of a few lines, and by hand.

use crate::common::{SOON, counting, run, until, values};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread, ThreadId};
use std::time::{Duration, Instant};
use tensorwire::{Edge, Error, Node, Pending, Step, Tensor};

const MODES: [&str; 3] = ["inline", "adaptive", "dedicated"];

fn here(node: &Node, name: &str) -> Edge {
    node.edge_from("w", 0, name).expect("an edge")
}

fn there(node: &Node, name: &str) -> Edge {
    node.edge_to("w", 1, name).expect("an edge")
}

fn begin(step: &Step, edge: &Edge) -> Pending<Tensor> {
    step.receive(edge).within(SOON).begin().expect("begun")
}

/// The receiver lets the sender send.
fn go(node: &Node) {
    let step = node.step(1 << 20).expect("a step");
    step.send_dead(&node.edge_to("w", 0, "go").expect("an edge")).expect("sent");
}

fn wait_for_go(node: &Node) {
    let step = node.step(1 << 20).expect("a step");
    step.recv(&node.edge_from("w", 1, "go").expect("an edge"), SOON).expect("received");
}

struct Unpark(Thread, AtomicBool);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.1.store(true, Ordering::Release);
        self.0.unpark();
    }
}

/// Polls a future when it is woken, and not before.
fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let unpark = Arc::new(Unpark(thread::current(), AtomicBool::new(false)));
    let waker = Waker::from(unpark.clone());
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        let end = Instant::now() + SOON;
        while !unpark.1.swap(false, Ordering::Acquire) {
            assert!(Instant::now() < end, "nobody has woken the task");
            thread::park_timeout(Duration::from_millis(100));
        }
    }
}

fn on_tokio<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime").block_on(future)
}

fn poll_by<T>(pending: &mut Pending<T>, waker: &Waker) -> bool
where
    Pending<T>: Future,
{
    pin!(pending).poll(&mut Context::from_waker(waker)).is_ready()
}

/// Makes progress on a thread of its own in inline mode, where nobody else does, while `body` runs.
fn with_progress<R>(node: &Node, mode: &str, body: impl FnOnce() -> R) -> R {
    struct Ended<'a>(&'a AtomicBool);
    impl Drop for Ended<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Release);
        }
    }
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while mode == "inline" && !ended.load(Ordering::Acquire) {
                let _ = node.progress();
                thread::yield_now();
            }
        });
        let _ended = Ended(&ended);
        body()
    })
}

#[test]
fn a_receive_is_awaited_on_any_executor_in_each_poll_mode() {
    for mode in MODES {
        run(2, &[("poll", mode)], move |node, task| {
            for n in 0..20 {
                let step = node.step(n).expect("a step");
                if task == 0 {
                    step.recv(&node.edge_from("w", 1, "next").expect("an edge"), SOON).expect("received");
                    for size in [1, 2000] {
                        let name = format!("x{size}");
                        step.send(&there(node, &name), counting(node, n as f32, size)).expect("sent");
                    }
                    continue;
                }
                let [small, large] = ["x1", "x2000"].map(|name| begin(&step, &here(node, name)));
                let both = async {
                    step.send_dead(&node.edge_to("w", 0, "next").expect("an edge"))?;
                    // In the other order than they come.
                    Ok::<_, Error>([large.await?, small.await?].map(|got| values(&got.tensor).to_vec()))
                };
                let got = with_progress(node, mode, || match n % 2 {
                    0 => on_tokio(both),
                    _ => block_on(both),
                });
                let got = got.expect("received");
                assert_eq!(got.each_ref().map(Vec::len), [2000, 1]);
                assert_eq!(got.map(|values| values[0]), [n as f32; 2]);
            }
        });
    }
}

#[test]
fn a_receive_is_awaited_by_a_task_of_its_own() {
    run(2, &[("poll", "adaptive")], |node, task| {
        let step = node.step(1).expect("a step");
        if task == 0 {
            wait_for_go(node);
            return step.send(&there(node, "x"), counting(node, 3.0, 1)).expect("sent");
        }
        let pending = begin(&step, &here(node, "x"));
        let got = on_tokio(async {
            let waits = tokio::spawn(pending);
            tokio::task::yield_now().await;
            assert!(!waits.is_finished());
            go(node);
            waits.await.expect("no panic")
        });
        assert_eq!(values(&got.expect("received").tensor), [3.0]);
    });
}

#[test]
fn an_executor_makes_progress_in_a_loop_of_its_own() {
    run(2, &[("poll", "inline")], |node, task| {
        let step = node.step(1).expect("a step");
        if task == 0 {
            wait_for_go(node);
            return step.send(&there(node, "x"), counting(node, 3.0, 1)).expect("sent");
        }
        let pending = begin(&step, &here(node, "x"));
        go(node);
        let got = on_tokio(async {
            let mut pending = pin!(pending);
            loop {
                node.progress()?;
                let turn = tokio::time::timeout(Duration::from_micros(50), pending.as_mut());
                if let Ok(received) = turn.await {
                    return received;
                }
            }
        });
        assert_eq!(values(&got.expect("received").tensor), [3.0]);
    });
}

/// Notes the thread that wakes the task.
#[derive(Default)]
struct WokenBy(Mutex<Vec<ThreadId>>);

impl Wake for WokenBy {
    fn wake(self: Arc<Self>) {
        self.0.lock().expect("no panic").push(thread::current().id());
    }
}

#[test]
fn the_thread_that_makes_progress_wakes_the_task_once() {
    if crate::common::calls_for_each_value() {
        return;
    }
    run(2, &[("poll", "inline")], |node, task| {
        let step = node.step(1).expect("a step");
        if task == 0 {
            wait_for_go(node);
            return step.send(&there(node, "x"), counting(node, 3.0, 1)).expect("sent");
        }
        let (mut pending, woken) = (begin(&step, &here(node, "x")), Arc::new(WokenBy::default()));
        let waker = Waker::from(woken.clone());
        for _ in 0..3 {
            assert!(!poll_by(&mut pending, &waker));
        }
        let is_woken = || !woken.0.lock().expect("no panic").is_empty();
        let other = thread::scope(|scope| {
            let other = scope.spawn(|| {
                go(node);
                until(node, "the task is woken", is_woken);
                thread::current().id()
            });
            other.join().expect("no panic")
        });
        assert_eq!(*woken.0.lock().expect("no panic"), [other]);
        assert_eq!(values(&pending.wait().expect("it is done").tensor), [3.0], "a future can be waited for");
    });
}

#[test]
fn a_thread_that_waits_for_another_edge_wakes_the_task() {
    if crate::common::calls_for_each_value() {
        return;
    }
    run(2, &[("poll", "inline")], |node, task| {
        for n in 0..50 {
            let step = node.step(n).expect("a step");
            if task == 0 {
                step.recv(&node.edge_from("w", 1, "next").expect("an edge"), SOON).expect("received");
                step.send(&there(node, "x"), counting(node, n as f32, 1)).expect("sent");
                step.send(&there(node, "y"), counting(node, 0.0, 1)).expect("sent");
                continue;
            }
            let (mut pending, woken) = (begin(&step, &here(node, "x")), Arc::new(WokenBy::default()));
            assert!(!poll_by(&mut pending, &woken.clone().into()));
            step.send_dead(&node.edge_to("w", 0, "next").expect("an edge")).expect("sent");
            step.recv(&here(node, "y"), SOON).expect("received");
            assert_eq!(*woken.0.lock().expect("no panic"), [thread::current().id()], "step {n}");
            assert_eq!(values(&block_on(pending).expect("received").tensor), [n as f32]);
        }
    });
}

#[test]
fn the_value_of_a_future_that_is_dropped_is_for_the_next_receive() {
    run(2, &[], |node, task| {
        let step = node.step(1).expect("a step");
        if task == 0 {
            wait_for_go(node);
            return step.send(&there(node, "x"), counting(node, 3.0, 1)).expect("sent");
        }
        let mut pending = begin(&step, &here(node, "x"));
        let woken = Arc::new(WokenBy::default());
        assert!(!poll_by(&mut pending, &woken.clone().into()));
        drop(pending);
        let timed_out = on_tokio(async {
            tokio::time::timeout(Duration::from_millis(20), begin(&step, &here(node, "x"))).await.is_err()
        });
        assert!(timed_out, "nothing was sent");
        go(node);
        let next = step.recv(&here(node, "x"), SOON).expect("received");
        assert_eq!(values(&next.tensor), [3.0]);
        assert!(woken.0.lock().expect("no panic").is_empty(), "a future that is dropped wakes nobody");
    });
}

#[test]
fn a_future_within_the_process_and_one_into_a_tensor_end_as_others_do() {
    run(1, &[("poll", "adaptive")], |node, _| {
        let (step, edge) = (node.step(1).expect("a step"), node.edge_to("w", 0, "x").expect("an edge"));
        let mut pending = begin(&step, &edge);
        let woken = Arc::new(WokenBy::default());
        assert!(!poll_by(&mut pending, &woken.clone().into()));
        step.send(&edge, counting(node, 1.0, 2)).expect("sent");
        assert_eq!(*woken.0.lock().expect("no panic"), [thread::current().id()]);
        assert_eq!(values(&block_on(pending).expect("received").tensor), [1.0, 2.0]);

        let given = node.tensor(tensorwire::DType::F32, &[2]).expect("room");
        let pending = step.receive(&edge).within(SOON).into(given).begin().expect("begun");
        step.send(&edge, counting(node, 4.0, 2)).expect("sent");
        assert_eq!(values(&block_on(pending).expect("received").tensor.freeze()), [4.0, 5.0]);
    });
}

/// Ends a receive, and tells whether its error is the right one.
type End<'a> = (&'a dyn Fn(&Pending<Tensor>), fn(&Error) -> bool);

#[test]
fn errors_end_the_future_and_wake_its_task() {
    for mode in MODES {
        run(2, &[("poll", mode)], move |node, task| {
            if task == 0 {
                return;
            }
            let step = node.step(1).expect("a step");
            let edge = here(node, "x");
            let brief = Duration::from_millis(30);
            let late = with_progress(node, mode, || {
                block_on(step.receive(&edge).within(brief).begin().expect("begun"))
            });
            assert!(matches!(late, Err(Error::DeadlineExceeded { .. })), "{late:?}");
            let ends: [End<'_>; 3] = [
                (&|pending| pending.cancel_token().cancel(), |error| {
                    matches!(error, Error::Cancelled { .. })
                }),
                (&|_| step.cleanup(), |error| matches!(error, Error::StepGone { .. })),
                (&|_| drop(node.stop().expect("stopped")), |error| matches!(error, Error::Stopped)),
            ];
            let mut steps = [node.step(1), node.step(1), node.step(2)].into_iter();
            for (end, is_right) in ends {
                let step = steps.next().expect("three").expect("a step");
                let mut pending = begin(&step, &edge);
                let woken = Arc::new(WokenBy::default());
                assert!(!poll_by(&mut pending, &woken.clone().into()));
                end(&pending);
                let begun = Instant::now();
                while woken.0.lock().expect("no panic").is_empty() {
                    assert!(begun.elapsed() < SOON, "nobody has woken the task");
                    let _ = node.progress();
                }
                let error = block_on(pending).expect_err("it has ended");
                assert!(is_right(&error), "{error}");
            }
        });
    }
}

/// A task whose waker ends another task with its receive, as a dead executor does.
struct DropsOther(Mutex<Option<Pending<Tensor>>>);

impl Wake for DropsOther {
    fn wake(self: Arc<Self>) {
        drop(self.0.lock().expect("no panic").take());
    }
}

#[test]
fn a_waker_may_drop_other_receives() {
    for mode in MODES {
        run(2, &[("poll", mode)], move |node, task| {
            let step = node.step(1).expect("a step");
            if task == 0 {
                wait_for_go(node);
                step.send(&there(node, "x"), counting(node, 1.0, 1)).expect("sent");
                let dropped = node.edge_from("w", 1, "dropped").expect("an edge");
                step.recv(&dropped, SOON).expect("received");
                return step.send(&there(node, "y"), counting(node, 2.0, 1)).expect("sent");
            }
            let (mut pending, other) = (begin(&step, &here(node, "x")), begin(&step, &here(node, "y")));
            let task = Arc::new(DropsOther(Mutex::new(Some(other))));
            assert!(!poll_by(&mut pending, &task.clone().into()));
            go(node);
            until(node, "the waker runs", || task.0.lock().expect("no panic").is_none());
            assert_eq!(values(&block_on(pending).expect("received").tensor), [1.0]);
            // The callback thread cancels.
            let (told, heard) = std::sync::mpsc::channel();
            let own = node.edge_to("w", 1, "own").expect("an edge");
            step.receive(&own).then(move |_| told.send(()).expect("open")).expect("begun");
            step.send_dead(&own).expect("sent");
            heard.recv_timeout(SOON).expect("the callback thread runs");
            step.send_dead(&node.edge_to("w", 0, "dropped").expect("an edge")).expect("sent");
            assert_eq!(values(&step.recv(&here(node, "y"), SOON).expect("received").tensor), [2.0]);
        });
    }
}
