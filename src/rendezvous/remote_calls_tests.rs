//! Calls on edges between processes leave the process's own tables alone.

use super::path::{Cancel, CancelAll, Members, PeerIndex, RemotePath, StandingChange, StepChange};
use super::waiter::{Delivery, Outcome, Payload, Waiter};
use super::{Batch, Edge, Error, Losses, ReceiveAll, Rendezvous, RendezvousSettings, Reused, Sending, Step};
use crate::engine::Executor;
use crate::link::{TensorKey, Value, Want};
use crate::memory::{PagePolicy, Pool, PoolOptions, Region, RegionOptions, Tensor};
use crate::wire::message::Side;
use crate::wire::{TaskId, Time};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

const SOON: Duration = Duration::from_secs(10);

/// A peer that takes everything, and has a value for every request.
struct Generous;

impl RemotePath for Generous {
    fn send(&self, _key: TensorKey, _value: Value) -> Result<(), Error> {
        Ok(())
    }

    fn receive(&self, _peer: PeerIndex, _key: TensorKey, _want: Want, waiter: Waiter) -> Result<(), Error> {
        let payload = Payload::Tensor(Tensor::empty());
        let (sender, receiver) = (Side::POOL, Side::POOL);
        waiter.complete(Ok(Delivery { tensor: payload, is_dead: false, sender, receiver }));
        Ok(())
    }

    fn send_all(&self, _values: Reused<Sending>) -> Result<(), Error> {
        Ok(())
    }

    fn receive_all(&self, mut all: ReceiveAll) -> Result<(), Error> {
        let (sender, receiver) = (Side::POOL, Side::POOL);
        for receiving in all.receives.drain(..) {
            let tensor = Payload::Tensor(Tensor::empty());
            receiving.completer.complete(Outcome(Ok(Delivery { tensor, is_dead: false, sender, receiver })));
        }
        Ok(())
    }

    fn cancel(&self, _call: Cancel) {}

    fn cancel_all(&self, _calls: CancelAll) {}

    fn step(&self, _change: StepChange) {}

    fn standing(&self, _change: StandingChange) {}

    fn progress(&self) -> Result<usize, Error> {
        Ok(0)
    }

    fn wait(&self, _deadline: Time, done: &dyn Fn() -> bool) -> Result<bool, Error> {
        Ok(done())
    }

    fn nudge(&self) {}

    fn end(&self, _error: Error) {}

    fn now(&self) -> Time {
        Time::from_nanos(1)
    }

    fn close(&self) {}
}

fn rendezvous() -> Rendezvous {
    let task = |task| TaskId { job: "w".into(), task };
    let members = Members::new(vec![task(0), task(1)]);
    let region = RegionOptions { pages: PagePolicy::Plain, ..RegionOptions::new(1 << 20) };
    let pool = Pool::new(Region::create(0, &region).expect("region"), PoolOptions::default()).expect("pool");
    let settings = RendezvousSettings {
        max_outstanding_sends: 100,
        recv_timeout: SOON,
        cancel_grace: Duration::ZERO,
        borrow: false,
    };
    let losses = Arc::new(Losses::new(&members, false));
    let executor = Executor::on_the_spot();
    Rendezvous::new(
        task(0),
        members,
        Arc::new(Generous) as Arc<dyn RemotePath>,
        pool,
        executor,
        Arc::default(),
        losses,
        settings,
    )
}

fn exchange(step: &Step, out: &Edge, back: &Edge, batch: &Batch) {
    step.send_all([(out, Tensor::empty()), (out, Tensor::empty()), (out, Tensor::empty())]).expect("sent");
    assert_eq!(step.recv_all(&[back, back], SOON).expect("received").len(), 2);
    batch.recv(step, SOON).expect("received");
    step.send(out, Tensor::empty()).expect("sent");
    step.send_dead(out).expect("sent");
    step.recv(back, SOON).expect("received");
    step.recv_pending(back).expect("begun").wait().expect("received");
}

/// Runs `work` on another thread while this one holds the tables, for `within` at most. Whether it ended without them.
fn ends_without_the_tables(
    rendezvous: &Rendezvous,
    within: Duration,
    work: impl FnOnce() + Send + 'static,
) -> bool {
    let (done, end) = channel();
    let held = rendezvous.shared.tables();
    let thread = std::thread::spawn(move || {
        work();
        // Nobody listens any more once that has been too late.
        let _ = done.send(());
    });
    let ended = end.recv_timeout(within).is_ok();
    drop(held);
    thread.join().expect("no panic");
    ended
}

#[test]
fn sending_to_and_receiving_from_peers_takes_no_lock() {
    let rendezvous = rendezvous();
    let device = |task| format!("/job:w/replica:0/task:{task}/device:CPU:0");
    let edge = |from, to| rendezvous.edge(&device(from), &device(to), "x").expect("edge");
    let (out, back, own) = (edge(0, 1), edge(1, 0), edge(0, 0));
    let batch = |edge: &Edge| rendezvous.batch([edge.clone()]).expect("usable");
    let (of_peer, of_own) = (batch(&back), batch(&own));
    let step = rendezvous.step(1, &"worker".into()).expect("new");
    let of_peers = step.clone();
    assert!(ends_without_the_tables(&rendezvous, SOON, move || exchange(&of_peers, &out, &back, &of_peer)));
    // The lock is what they would wait for: an edge within the process does.
    assert!(!ends_without_the_tables(&rendezvous, SOON / 50, move || exchange(&step, &own, &own, &of_own)));
}
