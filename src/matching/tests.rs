//! Two processes whose links are two queues of messages.

mod ends;
mod flush;
mod forged_messages;
mod random;
mod reports;
mod short_ends;
mod standing;
mod transfers;
mod waits;
mod walks;

use super::*;

use crate::fabric::ShortTake;
use crate::link::windows::{ArrivedBytes, ArrivedTensor, LandingRefused, ReadyValue, ToldMeta};
use crate::link::{Received, placement_of};
use crate::matching::{Cancel, CancelReason, Outcome, Payload, StepChange};
use crate::memory::{PagePolicy, PoolError, PoolOptions, Region, RegionOptions, Tensor, TensorMut};
use crate::protocol::Record;
use crate::sync::{OneshotPool, OneshotReceiver};
use crate::telemetry::Counter;
use crate::wire::message::Placement;
use crate::wire::{Code, DType, EdgeId, EdgeName, Immediate, Shape, Status, TaskId, TensorMeta, checksum_of};
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::Duration;
use transfers::{Offers, arrival};

const SENDER: usize = 0;
const RECEIVER: usize = 1;
const TO_RECEIVER: PeerIndex = PeerIndex(RECEIVER as u32);
const TO_SENDER: PeerIndex = PeerIndex(SENDER as u32);
const DEVICES: [&str; 2] = ["/job:a/replica:0/task:0/device:CPU:0", "/job:b/replica:0/task:0/device:CPU:0"];
const SOON: Duration = Duration::from_secs(1);
const MAX_WAITING: u32 = 40;

/// The messages of one process that have not arrived.
struct TestLanes {
    pool: Pool,
    counters: CountersWriter,
    to_sender: VecDeque<ToSender<EdgeKey>>,
    to_receiver: VecDeque<ToReceiver<Value, WindowRefusal>>,
    is_down: bool,
    /// Whether a look at the next message finds none.
    is_silent: bool,
    /// Whether a tensor can leave by its record alone.
    sends_short: bool,
    /// The tensor of the expected record, if that is the next message.
    next: Option<Tensor>,
    /// The record of that tensor; `None` for whichever is expected.
    next_is: Option<Record<()>>,
    offers: Offers,
}

impl Lanes for TestLanes {
    fn keeps(&mut self, _: PeerIndex, _: &Value) -> bool {
        false
    }

    fn pool(&self) -> &Pool {
        &self.pool
    }

    fn counters(&self) -> &CountersWriter {
        &self.counters
    }

    fn most_granted(&self) -> Option<GrantedBytes> {
        let bytes = self.offers.granted_bytes();
        (bytes > 0).then(|| GrantedBytes { peer: TaskId::new("a", 0).expect("a task"), bytes })
    }

    fn begin_batch(&mut self) {}

    fn handle_polled(&mut self) -> bool {
        false
    }

    fn to_sender(&mut self, _: PeerIndex, message: ToSender<EdgeKey>) {
        if !self.is_down {
            self.to_sender.push_back(message);
        }
    }

    fn to_receiver(&mut self, _: PeerIndex, message: ToReceiver<Value, WindowRefusal>) -> bool {
        if !self.is_down {
            self.to_receiver.push_back(message);
        }
        false
    }

    fn land(
        &mut self,
        _: PeerIndex,
        offer: u32,
        target: TensorMut,
    ) -> Result<Immediate, (LandingRefused, TensorMut)> {
        self.offers.land(offer, target)
    }

    fn decline(&mut self, _: PeerIndex, offer: u32) {
        self.offers.decline(offer);
    }

    fn make_ready(&mut self, _: PeerIndex, edge: EdgeId) {
        self.offers.make_ready(edge);
    }

    fn may_get_ready(&mut self, _: PeerIndex, _: EdgeId) -> bool {
        self.offers.is_on
    }

    fn withdraw(&mut self, _: PeerIndex, edge: EdgeId) {
        self.offers.withdraw(edge);
    }

    /// The next record leaves in the general way.
    fn send_packed(&mut self, _: PeerIndex, _: Record<()>, _: &mut Option<Tensor>) -> bool {
        false
    }

    fn send_short(&mut self, _: PeerIndex, _: Record<()>, _: &mut Option<Tensor>) -> bool {
        self.sends_short
    }

    fn take_short(&mut self, _: PeerIndex, record: Record<()>, receive: &mut DirectReceive) -> ShortTake<()> {
        let is_expected = self.next_is.is_none_or(|next| next == record);
        if let Some(tensor) = self.next.take_if(|_| is_expected) {
            *receive = DirectReceive::Received(Received::Tensor(tensor), Placement::POOL);
            return ShortTake::Taken(());
        }
        if self.is_silent { ShortTake::Nothing } else { ShortTake::Other }
    }
}

struct Side {
    matching: Matching,
    lanes: TestLanes,
    pool: Pool,
    outstanding: Arc<AtomicUsize>,
}

struct Pair {
    sides: [Side; 2],
    calls: OneshotPool<Outcome>,
    next_call: u64,
    now: Time,
}

struct Call {
    of: CallHandle,
    result: OneshotReceiver<Outcome>,
    /// The value, if [`Matching::end_short`] has ended the receive.
    direct: Option<Payload>,
}

impl Call {
    fn outcome(&mut self) -> Option<Result<Payload, Error>> {
        let direct = self.direct.take().map(Ok);
        direct.or_else(|| self.result.take().map(|Outcome(result)| result.map(|delivery| delivery.tensor)))
    }

    /// The number in the received tensor.
    fn number(&mut self) -> u32 {
        match self.outcome() {
            Some(Ok(Payload::Tensor(tensor))) => number_in(tensor.bytes()),
            Some(Ok(Payload::Into(tensor))) => number_in(tensor.bytes()),
            other => panic!("{other:?}"),
        }
    }

    fn error(&mut self) -> Error {
        self.outcome().expect("ended").expect_err("an error")
    }

    fn waits(&self) -> bool {
        !self.result.is_done()
    }
}

fn number_in(bytes: &[u8]) -> u32 {
    u32::from_le_bytes(*bytes.first_chunk().expect("a number"))
}

fn side(window: u64) -> Side {
    let region = RegionOptions { pages: PagePolicy::Plain, ..RegionOptions::new(1 << 20) };
    let pool = Pool::new(Region::create(0, &region).expect("a region"), PoolOptions::default());
    let pool = pool.expect("a pool");
    let tasks = ["a", "b"].map(|job| TaskId::new(job, 0).expect("a task"));
    let members = Members::new(tasks.to_vec());
    let outstanding = Arc::<AtomicUsize>::default();
    let options = WindowOptions {
        first_window: window,
        usual_window: window,
        largest_window: window,
        max_cells: 1000,
        max_edges: 8,
        kept_edges: 6,
        max_needs: 64,
        resends: false,
    };
    let matching = Matching::new(&members, options, (MAX_WAITING, outstanding.clone()), Duration::MAX);
    let lanes = TestLanes {
        pool: pool.clone(),
        counters: CountersWriter::new(),
        to_sender: VecDeque::new(),
        to_receiver: VecDeque::new(),
        is_down: false,
        is_silent: false,
        sends_short: false,
        next: None,
        next_is: None,
        offers: Offers::default(),
    };
    Side { matching, lanes, pool, outstanding }
}

fn key(name: &str, step: u64) -> TensorKey {
    let edge = EdgeName::new(DEVICES[SENDER], DEVICES[RECEIVER], name).expect("an edge");
    TensorKey { edge: EdgeKey { name: Arc::new(edge), frame: 0, iteration: 0 }, step }
}

impl Pair {
    /// Two linked processes.
    fn new(window: u64) -> Pair {
        let sides = [side(window), side(window)];
        let (calls, next_call, now) = (OneshotPool::new(64), 0, Time::from_nanos(1));
        let mut pair = Pair { sides, calls, next_call, now };
        pair.up();
        pair
    }

    fn up(&mut self) {
        for (side, peer) in [(SENDER, TO_RECEIVER), (RECEIVER, TO_SENDER)] {
            let Side { matching, lanes, .. } = &mut self.sides[side];
            lanes.is_down = false;
            matching.up(peer);
        }
        self.run();
    }

    fn lose(&mut self) {
        for (side, peer) in [(SENDER, TO_RECEIVER), (RECEIVER, TO_SENDER)] {
            let Side { matching, lanes, .. } = &mut self.sides[side];
            lanes.is_down = true;
            lanes.to_sender.clear();
            lanes.to_receiver.clear();
            lanes.offers.clear();
            matching.lost(peer, &Error::Stopped);
        }
    }

    /// Delivers one message, if there is any.
    fn deliver(&mut self, side: usize) -> bool {
        let peer = PeerIndex(side as u32);
        let [sender, receiver] = &mut self.sides;
        let (from, to) = if side == SENDER { (sender, receiver) } else { (receiver, sender) };
        if let Some(message) = from.lanes.to_sender.pop_front() {
            to.matching.handle_receiver(&mut to.lanes, peer, message, None).expect("honest");
            return true;
        }
        if let Some(message) = from.lanes.to_receiver.pop_front() {
            let message = arrival(message, &mut to.lanes.offers);
            to.matching.handle_sender(&mut to.lanes, peer, message).expect("honest");
            return true;
        }
        let Some((landing, tensor)) = to.lanes.offers.write() else { return false };
        to.matching.landed(&mut to.lanes, peer, landing, tensor);
        true
    }

    fn run(&mut self) {
        while [SENDER, RECEIVER].map(|side| self.deliver(side)) != [false; 2] {}
    }

    fn try_tensor(&self, side: usize, len: usize) -> Result<TensorMut, PoolError> {
        let shape = Shape::new(&[len as u64]).expect("a shape");
        let meta = TensorMeta::new(DType::U8, shape).expect("meta-data");
        self.sides[side].pool.zeroed(meta)
    }

    fn tensor(&self, side: usize, number: u32, len: usize) -> TensorMut {
        let mut tensor = self.try_tensor(side, len).expect("room");
        tensor.bytes_mut()[..4].copy_from_slice(&number.to_le_bytes());
        tensor
    }

    fn send(&mut self, name: &str, step: u64, number: u32) {
        let value = Value::Tensor(self.tensor(SENDER, number, 8).freeze());
        self.sides[SENDER].outstanding.fetch_add(1, Ordering::Relaxed);
        let Side { matching, lanes, .. } = &mut self.sides[SENDER];
        let left = matching.send(lanes, TO_RECEIVER, key(name, step).borrowed(), value);
        matching.left(left);
    }

    fn begin(&mut self, name: &str, step: u64, destination: Destination, timeout: Duration) -> Call {
        self.begin_as(name, step, destination, timeout, true)
    }

    /// Begins a receive of step 1.
    fn begin_one(&mut self, name: &str, is_bounded: bool) -> Call {
        self.begin_as(name, 1, Destination::Alloc, SOON, is_bounded)
    }

    fn begin_as(
        &mut self,
        name: &str,
        step: u64,
        destination: Destination,
        timeout: Duration,
        is_bounded: bool,
    ) -> Call {
        self.next_call += 1;
        let id = CallId(self.next_call);
        let (result, sender) = self.calls.channel();
        let (permit, cancel_reason, is_logged) = (None, None, false);
        let (begun, deadline) = (self.now, self.now + timeout);
        let waiter = Waiter { permit, id, sender, begun, deadline, timeout, cancel_reason, is_logged };
        let Side { matching, lanes, .. } = &mut self.sides[RECEIVER];
        let mut new = Some(NewReceive { key: key(name, step), destination, waiter });
        let waiter = matching.receive(lanes, TO_SENDER, &mut new, is_bounded);
        Call { of: CallHandle { id, waiter }, result, direct: None }
    }

    fn receive(&mut self, name: &str, step: u64) -> Call {
        self.begin(name, step, Destination::Alloc, SOON)
    }

    fn step(&mut self, side: usize, change: StepChange) {
        let Side { matching, lanes, .. } = &mut self.sides[side];
        matching.step_changed(lanes, change);
    }

    fn outstanding(&self) -> usize {
        self.sides[SENDER].outstanding.load(Ordering::Relaxed)
    }

    /// Ends the steps. Nothing may be left then.
    fn end(mut self, steps: std::ops::RangeInclusive<u64>) {
        for step in steps {
            self.step(RECEIVER, StepChange::CleanedUp { step });
            self.step(SENDER, StepChange::CleanedUp { step });
        }
        self.run();
        assert_eq!(self.outstanding(), 0, "values are outstanding");
        for side in &self.sides {
            assert_eq!(side.matching.calls.len(), 0, "a call is left");
            assert!(side.matching.waiting.iter().next().is_none(), "a receive is left");
            assert!(side.lanes.offers.is_empty(), "an offered tensor is left");
            assert!(side.matching.peers.iter().all(|peer| peer.transfers.is_empty()), "a transfer is left");
        }
        let pools = self.sides.each_ref().map(|side| side.pool.clone());
        drop(self);
        assert!(pools.iter().all(Pool::is_empty), "a tensor is left");
    }
}

#[test]
fn values_and_receives_meet_whichever_comes_first() {
    let mut pair = Pair::new(2);
    pair.send("x", 1, 10);
    let mut first = pair.receive("x", 1);
    pair.run();
    assert_eq!(first.number(), 10);
    let mut second = pair.receive("x", 2);
    pair.run();
    assert!(second.waits());
    pair.send("x", 2, 20);
    pair.run();
    assert_eq!(second.number(), 20);
    assert_eq!(pair.outstanding(), 0);
    pair.end(1..=2);
}

#[test]
fn an_older_step_s_values_do_not_block_the_step_that_is_wanted() {
    let mut pair = Pair::new(1);
    (1..=5).for_each(|step| pair.send("x", step, step as u32));
    for step in [5, 3, 1, 2, 4] {
        let mut call = pair.receive("x", step);
        pair.run();
        assert_eq!(u64::from(call.number()), step);
    }
    pair.end(1..=5);
}

#[test]
fn a_receive_that_does_not_wait_gets_the_value_of_a_later_call() {
    let mut pair = Pair::new(1);
    pair.send("x", 2, 7);
    pair.send("x", 1, 8);
    let mut missed = pair.begin("x", 1, Destination::Alloc, Duration::ZERO);
    assert!(matches!(missed.error(), Error::DeadlineExceeded { .. }));
    pair.run();
    // The edge's only cell has the value of step 2, so the value of step 1 is needed.
    let mut missed = pair.begin("x", 1, Destination::Alloc, Duration::ZERO);
    assert!(matches!(missed.error(), Error::DeadlineExceeded { .. }));
    pair.run();
    assert_eq!(pair.begin("x", 1, Destination::Alloc, Duration::ZERO).number(), 8);
    assert_eq!(pair.begin("x", 2, Destination::Alloc, Duration::ZERO).number(), 7);
    pair.end(1..=2);
}

#[test]
fn a_receive_that_gives_up_leaves_its_value_to_the_next() {
    let mut pair = Pair::new(1);
    let [mut cancelled, mut late, mut dropped] = [(); 3].map(|()| pair.receive("x", 1));
    let of = |call: &Call, why| Cancel { call: call.of, why };
    let Side { matching, lanes, .. } = &mut pair.sides[RECEIVER];
    assert!(matching.cancel(lanes, &of(&cancelled, CancelReason::Cancelled)));
    assert!(matching.cancel(lanes, &of(&dropped, CancelReason::Dropped)));
    assert!(!matching.cancel(lanes, &of(&dropped, CancelReason::Dropped)), "it has ended");
    assert_eq!(matching.next_deadline(), pair.now + SOON);
    matching.expire(lanes, pair.now + SOON);
    assert_eq!(matching.next_deadline(), Time::NEVER);
    assert!(matches!(cancelled.error(), Error::Cancelled { .. }));
    assert!(matches!(dropped.error(), Error::Cancelled { .. }));
    assert!(matches!(late.error(), Error::DeadlineExceeded { after: SOON, .. }));
    pair.send("x", 1, 5);
    pair.run();
    assert_eq!(pair.receive("x", 1).number(), 5);
    pair.end(1..=1);
}

#[test]
fn a_value_that_does_not_fit_is_for_the_next_receive() {
    let mut pair = Pair::new(2);
    let longer = Destination::Into(pair.tensor(RECEIVER, 0, 9));
    let mut mismatch = pair.begin("x", 1, longer, SOON);
    let given = Destination::Into(pair.tensor(RECEIVER, 0, 8));
    let mut fitting = pair.begin("x", 1, given, SOON);
    pair.send("x", 1, 3);
    pair.run();
    assert!(matches!(mismatch.error(), Error::ShapeMismatch { .. }));
    assert_eq!(fitting.number(), 3);
    pair.send("x", 1, 4);
    pair.run();
    let longer = Destination::Into(pair.tensor(RECEIVER, 0, 9));
    assert!(matches!(pair.begin("x", 1, longer, SOON).error(), Error::ShapeMismatch { .. }));
    assert_eq!(pair.receive("x", 1).number(), 4);
    pair.end(1..=1);
}

#[test]
fn an_abort_at_the_sender_ends_receives_before_and_after_it() {
    let mut pair = Pair::new(2);
    pair.send("x", 1, 1);
    pair.send("x", 1, 2);
    pair.send("x", 1, 3);
    assert_eq!(
        {
            let mut call = pair.receive("x", 1);
            pair.run();
            call.number()
        },
        1
    );
    let mut other = pair.receive("x", 2);
    pair.step(SENDER, StepChange::Aborted { steps: 1..=1, status: Status::new(Code::Internal, "no") });
    pair.run();
    let mut late = pair.receive("x", 1);
    let Error::Remote { status, .. } = late.error() else { panic!("not the sender's error") };
    assert_eq!((status.code, status.derived), (Code::Internal, true));
    assert!(other.waits(), "it is of another step");
    pair.send("x", 2, 9);
    pair.run();
    assert_eq!(other.number(), 9);
    pair.end(1..=2);
}

#[test]
fn a_step_that_its_sender_has_cleaned_up_is_gone_also_for_a_later_life() {
    let mut pair = Pair::new(2);
    pair.send("x", 1, 1);
    pair.step(SENDER, StepChange::CleanedUp { step: 1 });
    pair.run();
    let is_gone = |call: &mut Call| {
        let error = call.error();
        matches!(&error, Error::Remote { status, .. } if status.code == Code::NotFound)
    };
    let mut first = pair.receive("x", 1);
    pair.run();
    assert!(is_gone(&mut first), "the first edge is announced");
    assert!(is_gone(&mut pair.receive("x", 1)));
    pair.lose();
    pair.up();
    let mut first = pair.receive("y", 1);
    pair.run();
    assert!(is_gone(&mut first), "the new link is told");
    pair.end(2..=2);
}

#[test]
fn nothing_takes_the_short_path_before_the_link_is_up_here() {
    let mut pair = Pair::new(2);
    pair.lose();
    pair.sides[RECEIVER].lanes.is_down = false;
    pair.sides[RECEIVER].matching.up(TO_SENDER);
    let _call = pair.receive("x", 1);
    pair.sides[SENDER].lanes.is_down = false;
    pair.run();
    let mut tensor = Some(pair.tensor(SENDER, 1, 8).freeze());
    let (of, side) = (key("x", 1), &mut pair.sides[SENDER]);
    side.lanes.sends_short = true;
    let mut send = |side: &mut Side| {
        side.matching.send_short(&mut side.lanes, (TO_RECEIVER, of.borrowed()), &mut tensor)
    };
    assert!(!send(side));
    side.matching.up(TO_RECEIVER);
    assert!(send(side));
}

#[test]
fn receives_of_batches_wait_beyond_the_limit_and_count_for_no_other() {
    let mut pair = Pair::new(1);
    let batch: Vec<_> = (0..2 * MAX_WAITING).map(|_| pair.begin_one("x", false)).collect();
    let single: Vec<_> = (0..MAX_WAITING).map(|_| pair.begin_one("x", true)).collect();
    assert!(matches!(pair.begin_one("x", true).error(), Error::ResourceExhausted { limit: 40, .. }));
    let all = batch.len() + single.len();
    (0..all as u32).for_each(|number| pair.send("x", 1, number));
    pair.run();
    let numbers: Vec<_> = batch.into_iter().chain(single).map(|mut call| call.number()).collect();
    assert_eq!(numbers, (0..all as u32).collect::<Vec<_>>());
    pair.end(1..=1);
}

#[test]
fn what_came_outlives_its_sender_and_what_waited_its_receiver() {
    let mut pair = Pair::new(1);
    (1..=3).for_each(|step| pair.send("x", step, step as u32));
    let mut call = pair.receive("x", 1);
    pair.run();
    assert_eq!(call.number(), 1);
    pair.run();
    let mut waits = pair.receive("y", 1);
    pair.lose();
    assert!(matches!(waits.error(), Error::Stopped), "its peer is lost");
    assert_eq!(pair.receive("x", 2).number(), 2, "it had come");
    assert!(matches!(pair.receive("x", 3).error(), Error::Stopped));
    pair.up();
    let mut call = pair.receive("x", 3);
    pair.run();
    assert_eq!(call.number(), 3, "it had waited");
    pair.end(1..=3);
}

#[test]
fn more_receives_than_may_wait_are_refused() {
    let mut pair = Pair::new(1);
    let mut waiting: Vec<_> = (0..MAX_WAITING).map(|_| pair.receive("x", 1)).collect();
    assert!(matches!(pair.receive("x", 1).error(), Error::ResourceExhausted { limit: 40, .. }));
    (0..MAX_WAITING).for_each(|number| pair.send("x", 1, number));
    pair.run();
    let numbers: Vec<_> = waiting.iter_mut().map(Call::number).collect();
    assert_eq!(numbers, (0..MAX_WAITING).collect::<Vec<_>>());
    pair.end(1..=1);
}

#[test]
fn a_corrupted_value_is_the_error_of_one_receive() {
    let mut pair = Pair::new(2);
    let mut corrupted = pair.receive("x", 1);
    let mut next = pair.receive("x", 1);
    pair.run();
    pair.send("x", 1, 1);
    pair.send("x", 1, 2);
    let message = pair.sides[SENDER].lanes.to_receiver.pop_front().expect("a record");
    let mut message = arrival(message, &mut Offers::default());
    if let ToReceiver::Record(Record { value: WindowArrival::Ready(ReadyValue::Tensor(tensor)), .. }) =
        &mut message
    {
        tensor.checksum = Some(0);
    }
    let Side { matching, lanes, .. } = &mut pair.sides[RECEIVER];
    matching.handle_sender(lanes, TO_SENDER, message).expect("honest");
    assert!(matches!(corrupted.error(), Error::Corrupted { sent: 0, bytes: 8, .. }));
    pair.run();
    assert_eq!(next.number(), 2);
    pair.end(1..=1);
}

#[test]
fn an_edge_that_is_announced_early_has_its_values_before_the_receive() {
    let mut pair = Pair::new(4);
    let Side { matching, lanes, .. } = &mut pair.sides[RECEIVER];
    matching.widen(lanes, TO_SENDER, &key("x", 1), 4);
    pair.run();
    (1..=4).for_each(|step| pair.send("x", step, step as u32));
    assert_eq!(pair.outstanding(), 0, "all have left");
    pair.run();
    for step in 1..=4 {
        assert_eq!(u64::from(pair.receive("x", step).number()), step);
    }
    pair.end(1..=4);
}
