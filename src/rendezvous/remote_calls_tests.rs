//! Calls on edges between processes, with scripted paths: they leave the process's own tables
//! alone, and wait for each path.

use super::path::{Paths, RemotePath};
use super::{Batch, Context, Edge, Losses, RendezvousSettings, Step};
use crate::engine::Executor;
use crate::link::{TensorKey, Value};
use crate::matching::{
    BatchReceive, BatchSend, Cancel, CancelAll, Delivery, EdgeReports, Error, LinkTag, Members, NewReceive,
    Outcome, Payload, PeerIndex, PeerObserver, ReceiveAll, StandingChange, StepChange, Untaken,
};
use crate::memory::{ForeignMemory, PagePolicy, Pool, PoolOptions, Region, RegionOptions, Tensor};
use crate::sync::Reused;
use crate::wire::message::Placement;
use crate::wire::{Code, DType, Generation, Incarnation, Shape, Status, TaskId, TensorMeta, Time};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(10);
const START: Time = Time::from_nanos(1);
const MAX_SENDS: usize = 100;

/// When a path brings the values of a batch.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Brings {
    AtOnce,
    /// A moment after the last wait for it has found nothing.
    AtTheDeadline,
    Never,
}

/// Runs while a path sends a value, or waits.
type Hook = Arc<Mutex<Option<Box<dyn FnMut(During) + Send>>>>;

#[derive(Clone, Copy, PartialEq, Eq)]
enum During {
    Send,
    Wait,
}

/// A path whose peers take everything, and have a value for every receive. A wait in vain lasts
/// until its deadline.
struct Scripted {
    brings: Brings,
    clock: Arc<AtomicU64>,
    held: Mutex<Vec<BatchReceive>>,
    hook: Hook,
}

impl Scripted {
    fn run_hook(&self, during: During) {
        if let Some(hook) = &mut *self.hook.lock().expect("no panic") {
            hook(during);
        }
    }

    fn bring(&self, end: impl Fn() -> Result<Delivery<Payload>, Error>) {
        let held = std::mem::take(&mut *self.held.lock().expect("no panic"));
        held.into_iter().for_each(|one| one.sender.send(Outcome(end())));
    }
}

fn value() -> Result<Delivery<Payload>, Error> {
    let (sender, receiver) = (Placement::POOL, Placement::POOL);
    Ok(Delivery { tensor: Payload::Tensor(Tensor::empty()), is_dead: false, sender, receiver })
}

/// What the calls of a path end with that are given up.
fn given_up() -> Result<Delivery<Payload>, Error> {
    Err(Error::StepGone { step: 7.into() })
}

impl RemotePath for Scripted {
    fn edges(&self, _limit: usize) -> Result<EdgeReports, Error> {
        Ok(EdgeReports::default())
    }

    fn waits(&self, _limit: usize) -> Result<crate::matching::WaitReports, Error> {
        Ok(crate::matching::WaitReports::default())
    }

    fn flight_logs(&self) -> Result<Vec<crate::telemetry::FlightLog>, Error> {
        Ok(Vec::new())
    }

    fn untaken(&self, _asks: bool, _since: Option<u64>) -> Result<(Untaken, u64), Error> {
        Ok((Untaken::default(), 0))
    }

    fn is_flushed(&self) -> Result<bool, Error> {
        Ok(true)
    }

    fn send(&self, _peer: PeerIndex, _key: TensorKey, _value: Value) -> Result<(), Error> {
        self.run_hook(During::Send);
        Ok(())
    }

    fn receive(&self, _peer: PeerIndex, new: &mut Option<NewReceive>) -> Result<Option<u32>, Error> {
        new.take().expect("a receive").waiter.complete(value());
        Ok(None)
    }

    fn send_all(&self, _values: Reused<BatchSend>) -> Result<(), Error> {
        Ok(())
    }

    fn receive_all(&self, mut all: ReceiveAll) -> Result<(), Error> {
        self.held.lock().expect("no panic").extend(all.receives.drain(..));
        if self.brings == Brings::AtOnce {
            self.bring(value);
        }
        Ok(())
    }

    fn cancel(&self, _call: Cancel) {}

    fn cancel_all(&self, _calls: CancelAll) {
        self.bring(given_up);
    }

    fn step(&self, _change: StepChange) {}

    fn clean_up(&self, _step: u64) {}

    fn standing(&self, _change: StandingChange) {}

    fn progress(&self) -> Result<usize, Error> {
        Ok(0)
    }

    fn wait(&self, deadline: Time, done: &dyn Fn() -> bool) -> Result<bool, Error> {
        if done() {
            return Ok(true);
        }
        self.run_hook(During::Wait);
        self.clock.fetch_max(deadline.as_nanos(), Ordering::Relaxed);
        if self.brings == Brings::AtTheDeadline && deadline >= START + SOON {
            self.bring(value);
        }
        Ok(false)
    }

    fn nudge(&self) {}

    fn end(&self, _error: Error) {}

    fn now(&self) -> Time {
        Time::from_nanos(self.clock.load(Ordering::Relaxed))
    }
}

/// The context of task 0 of 3. Task n is behind the n-th of two paths, and task 2 behind the
/// first.
fn context(paths: [Brings; 2]) -> Arc<Context> {
    context_with(paths, &Hook::default())
}

/// As [`context`], with a hook of both paths.
fn context_with(paths: [Brings; 2], hook: &Hook) -> Arc<Context> {
    let task = |task| TaskId::new("w", task).expect("a job name");
    let members = Members::new(vec![task(0), task(1), task(2)]);
    let clock = Arc::new(AtomicU64::new(START.as_nanos()));
    let path = |brings| Scripted { brings, clock: clock.clone(), held: Mutex::default(), hook: hook.clone() };
    let paths = paths.map(|brings| Box::new(path(brings)) as Box<dyn RemotePath>);
    let region = RegionOptions { pages: PagePolicy::Plain, ..RegionOptions::new(1 << 20) };
    let pool = Pool::new(Region::create(0, &region).expect("region"), PoolOptions::default()).expect("pool");
    let settings = RendezvousSettings {
        max_requests: 16,
        max_outstanding_sends: MAX_SENDS as u32,
        recv_timeout: SOON,
        cancel_grace: Duration::ZERO,
        borrow: false,
    };
    let losses = Arc::new(Losses::new(&members, false));
    for peer in [1, 2].map(PeerIndex) {
        losses.up(
            peer,
            LinkTag { incarnation: Incarnation::new(1).expect("not 0"), generation: Generation::NONE },
        );
    }
    let executor = Executor::on_the_spot();
    Context::new(task(0), members, Paths::new(paths.into()), pool, executor, Arc::default(), losses, settings)
}

fn edge(context: &Arc<Context>, from: u32, to: u32) -> Edge {
    let device = |task| format!("/job:w/replica:0/task:{task}/device:CPU:0");
    context.edge(&device(from), &device(to), "x").expect("edge")
}

fn exchange(step: &Step, out: &Edge, back: &Edge, batch: &Batch) {
    step.send_all([(out, Tensor::empty()), (out, Tensor::empty()), (out, Tensor::empty())]).expect("sent");
    assert_eq!(step.recv_all(&[back, back], SOON).expect("received").len(), 2);
    batch.recv(step, SOON).expect("received");
    step.send(out, Tensor::empty()).expect("sent");
    step.send_dead(out).expect("sent");
    step.recv(back, SOON).expect("received");
    step.receive(back).begin().expect("begun").wait().expect("received");
}

/// Runs `work` on another thread while this one holds the tables, for `within` at most. Whether it
/// ended without them.
fn ends_without_the_tables(
    context: &Arc<Context>,
    within: Duration,
    work: impl FnOnce() + Send + 'static,
) -> bool {
    let (done, end) = channel();
    let (thread, ended) = context.with_tables(|_| {
        let thread = std::thread::spawn(move || {
            work();
            // Nobody listens any more once that has been too late.
            let _ = done.send(());
        });
        (thread, end.recv_timeout(within).is_ok())
    });
    thread.join().expect("no panic");
    ended
}

#[test]
fn a_receive_gives_its_channel_back_when_it_has_ended() {
    let context = context([Brings::AtOnce; 2]);
    let step = context.step(1, &"w".into()).expect("a step");
    let (from_peer, local) = (edge(&context, 1, 0), edge(&context, 0, 0));
    let unused = context.calls.unused_count();
    drop(step.receive(&local).begin().expect("begun"));
    assert_eq!(context.calls.unused_count(), unused, "the drop has cancelled it");
    drop(step.receive(&from_peer).begin().expect("begun"));
    step.receive(&from_peer).begin().expect("begun").wait().expect("received");
    assert_eq!(context.calls.unused_count(), unused);
}

#[test]
fn sending_to_and_receiving_from_peers_takes_no_lock() {
    let context = context([Brings::AtOnce; 2]);
    let (out, back, own) = (edge(&context, 0, 1), edge(&context, 1, 0), edge(&context, 0, 0));
    let batch = |edge: &Edge| context.batch([edge.clone()]).expect("usable");
    let (of_peer, of_own) = (batch(&back), batch(&own));
    let step = context.step(1, &"worker".into()).expect("new");
    let of_peers = step.clone();
    assert!(ends_without_the_tables(&context, SOON, move || exchange(&of_peers, &out, &back, &of_peer)));
    // The lock is what they would wait for: an edge within the process does.
    assert!(!ends_without_the_tables(&context, SOON / 50, move || exchange(&step, &own, &own, &of_own)));
}

#[test]
fn a_batch_waits_for_every_path_and_tells_of_each_receive_how_it_ended() {
    use Brings::{AtOnce, AtTheDeadline, Never};
    for paths in [[AtOnce; 2], [AtOnce, AtTheDeadline], [AtTheDeadline, Never], [Never, AtOnce]] {
        let context = context(paths);
        let step = context.step(1, &"worker".into()).expect("new");
        let edges = [edge(&context, 2, 0), edge(&context, 1, 0)];
        let batch = context.batch(edges).expect("usable");
        let ends = batch.receive(&step).within(SOON).begin().expect("begun").wait_each();
        assert_eq!(ends.len(), 2);
        for (brings, end) in paths.into_iter().zip(ends) {
            match brings {
                Never => assert!(matches!(end, Err(Error::StepGone { step }) if step.get() == 7), "{end:?}"),
                AtOnce | AtTheDeadline => assert!(end.is_ok(), "{end:?}"),
            }
        }
    }
}

/// An abort drops the values that wait. A send that waits finds room then, and takes the step for
/// live if the abort comes between that look and the poller's.
#[test]
fn a_send_that_has_waited_for_room_fails_if_its_step_has_ended() {
    for is_aborted in [true, false] {
        let hook = Hook::default();
        let context = context_with([Brings::AtOnce; 2], &hook);
        let step = context.step(1, &"worker".into()).expect("new");
        context.outstanding.store(MAX_SENDS, Ordering::Relaxed);
        let (outstanding, aborted) = (context.outstanding.clone(), step.clone());
        *hook.lock().expect("no panic") = Some(Box::new(move |during| match during {
            During::Wait => outstanding.store(0, Ordering::Relaxed),
            During::Send if is_aborted => {
                aborted.abort(Status::new(Code::Internal, "enough")).expect("an error");
            }
            During::Send => {}
        }));
        let sent = step.send_within(&edge(&context, 0, 1), Value::Dead, SOON);
        match is_aborted {
            true => {
                let failed = sent.expect_err("its step has ended");
                assert!(matches!(failed.error, Error::Aborted { .. }), "{failed}");
                assert!(matches!(failed.value, Value::Dead), "it comes back");
            }
            false => sent.expect("sent"),
        }
        *hook.lock().expect("no panic") = None;
    }
}

/// Tells when it is dropped whether another thread gets the tables then.
struct AsksForTables(Arc<Context>, Sender<bool>);

impl Drop for AsksForTables {
    fn drop(&mut self) {
        let AsksForTables(context, told) = self;
        let (context, (done, end)) = (context.clone(), channel());
        std::thread::spawn(move || {
            context.live_steps();
            // Nobody listens any more once that has been too late.
            let _ = done.send(());
        });
        told.send(end.recv_timeout(SOON).is_ok()).expect("it listens");
    }
}

impl AsRef<[u8]> for AsksForTables {
    fn as_ref(&self) -> &[u8] {
        &[0]
    }
}

/// The step ends between the look of a call at its flag and that at the tables.
#[test]
fn what_comes_too_late_for_a_step_is_dropped_without_the_tables() {
    let context = context([Brings::AtOnce; 2]);
    let (own, step) = (edge(&context, 0, 0), context.step(1, &"worker".into()).expect("new"));
    let (told, is_free) = channel();
    let asks = || AsksForTables(context.clone(), told.clone());
    let one = TensorMeta::new(DType::U8, Shape::new(&[1]).expect("a shape")).expect("meta");
    let value = ForeignMemory::from_owner(asks()).tensor(&context.pool, one, 0).expect("inside");
    let of_callback = asks();
    step.cleanup();
    context.flags.set(step.number);
    let sent = step.send(&own, value);
    let received = step.receive(&own).then(move |_| drop(of_callback)).map(drop);
    for ended in [sent, received] {
        assert!(matches!(ended, Err(Error::StepGone { .. })), "{ended:?}");
    }
    assert_eq!(is_free.try_iter().collect::<Vec<_>>(), [true, true], "of the value and the callback");
}
