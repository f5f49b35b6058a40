//! Two processes whose calls are lost, repeated and late.

mod failures;
mod flood;
mod held;

use super::sending::{MAX_KEY_REQUESTS, MAX_PEER_KEY_BYTES};
use super::*;
use crate::link::{EdgeKey, LinkSettings, Value};
use crate::matching::{Cancel, CancelReason, NewReceive, Payload, StepChange};
use crate::memory::{PoolOptions, Region, RegionOptions};
use crate::sync::{OneshotPool, OneshotReceiver};
use crate::wire::{Code, DType, EdgeName, LossCause, Shape, Status, TensorMeta};
use bytes::Bytes;
use proptest::prelude::*;
use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

const SENDER: PeerIndex = PeerIndex(0);
const RECEIVER: PeerIndex = PeerIndex(1);
const STEP: u64 = 5;

/// What the receiver has said and the sender has not heard.
#[derive(Clone)]
enum Said {
    Ask(OwnRequest, Arc<AtomicBool>),
    Finish(u64, bool),
    CleanUp(u64),
}

type Answers = Arc<Mutex<VecDeque<(u64, Vec<u8>, Bytes)>>>;

#[derive(Clone, Default)]
struct Channel(Arc<Mutex<VecDeque<Said>>>);

/// A request whose answer is not wanted once this is dropped.
struct Wanted(Arc<AtomicBool>);

impl Drop for Wanted {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

impl RequestChannel for Channel {
    fn ask(&mut self, request: OwnRequest) -> OpenRequest {
        let wanted = Arc::new(AtomicBool::new(true));
        self.0.lock().unwrap().push_back(Said::Ask(request, wanted.clone()));
        Box::new(Wanted(wanted))
    }

    fn finish(&mut self, _peer: PeerIndex, _life: Incarnation, id: u64, is_given_up: bool) {
        self.0.lock().unwrap().push_back(Said::Finish(id, is_given_up));
    }

    fn clean_up(&mut self, _peer: PeerIndex, _life: Incarnation, id: u64) {
        self.0.lock().unwrap().push_back(Said::CleanUp(id));
    }

    fn lost(&mut self, _peer: PeerIndex) {
        self.0.lock().unwrap().retain(|said| !matches!(said, Said::Finish(..)));
    }
}

/// Tells a try that there is no value if its answer is dropped: an answer without a head.
struct NoValue(Option<(u64, Answers)>);

impl Drop for NoValue {
    fn drop(&mut self) {
        if let Some((id, answers)) = self.0.take() {
            answers.lock().unwrap().push_back((id, Vec::new(), Bytes::new()));
        }
    }
}

struct World {
    pool: Pool,
    sender: RecvTensors,
    receiver: RecvTensors,
    channel: Channel,
    answers: Answers,
    calls: OneshotPool<Outcome>,
    next_call: u64,
    outstanding: Arc<AtomicUsize>,
}

fn life(of: PeerIndex) -> Incarnation {
    Incarnation::new(u64::from(of.0) + 70).unwrap()
}

fn linked(of: PeerIndex, generation: u64) -> CallLink {
    let tag = LinkTag { incarnation: life(of), generation: generation.into() };
    CallLink { tag, generation }
}

fn task(of: PeerIndex) -> TaskId {
    TaskId::new("w", of.0).unwrap()
}

fn key(name: &str) -> TensorKey {
    let device = |of| format!("/job:w/replica:0/task:{of}/device:CPU:0");
    let name = Arc::new(EdgeName::new(&device(0), &device(1), name).unwrap());
    TensorKey { edge: EdgeKey { name, frame: 0, iteration: 0 }, step: STEP }
}

fn text(key: &TensorKey, incarnation: u64) -> String {
    text_in_turn(key, incarnation, 0)
}

/// The text of one of many keys.
fn text_in_turn(key: &TensorKey, incarnation: u64, turn: u64) -> String {
    let name = &key.edge.name;
    format!("{};{incarnation:016x};{};{};0:{turn}", name.source(), name.destination(), name.name())
}

impl World {
    fn new() -> Self {
        let pool =
            Pool::new(Region::create(0, &RegionOptions::new(1 << 20)).unwrap(), PoolOptions::default());
        let pool = pool.unwrap();
        let members = Members::new(vec![task(SENDER), task(RECEIVER)]);
        let link = LinkSettings {
            small_tensor_bytes: 128,
            validate: false,
            borrow: false,
            max_ready_bytes: 1 << 20,
        };
        let hung_after = Duration::from_secs(60);
        let settings = RemoteSettings { hung_after, ..RemoteSettings::new(link, 100) };
        let (channel, outstanding) = (Channel::default(), Arc::new(AtomicUsize::new(0)));
        let process = |me: PeerIndex, channel: &Channel| {
            let (settings, pool) = (settings.clone(), pool.clone());
            let (of, channel) = ((task(me), life(me)), Box::new(channel.clone()));
            RecvTensors::new(of, members.clone(), settings, outstanding.clone(), pool, channel)
        };
        let mut sender = process(SENDER, &Channel::default());
        let mut receiver = process(RECEIVER, &channel);
        sender.up(RECEIVER, linked(RECEIVER, 1));
        receiver.up(SENDER, linked(SENDER, 1));
        let (answers, calls) = (Answers::default(), OneshotPool::new(16));
        World { pool, sender, receiver, channel, answers, calls, next_call: 0, outstanding }
    }

    fn send(&mut self, key: &TensorKey, value: u8) {
        let mut tensor =
            self.pool.tensor(TensorMeta::new(DType::U8, Shape::new(&[1]).unwrap()).unwrap()).unwrap();
        tensor.bytes_mut()[0] = value;
        self.outstanding.fetch_add(1, Ordering::Relaxed);
        self.sender.send(RECEIVER, key, Value::Tensor(tensor.freeze()), Time::from_nanos(0));
    }

    fn receive(&mut self, key: &TensorKey) -> (CallId, OneshotReceiver<Outcome>) {
        self.receive_within(key, Duration::from_secs(1))
    }

    fn attempt(&mut self, key: &TensorKey) -> (CallId, OneshotReceiver<Outcome>) {
        self.receive_within(key, Duration::ZERO)
    }

    fn receive_within(&mut self, key: &TensorKey, timeout: Duration) -> (CallId, OneshotReceiver<Outcome>) {
        self.receive_to(key, timeout, Destination::Alloc)
    }

    fn receive_to(
        &mut self,
        key: &TensorKey,
        timeout: Duration,
        destination: Destination,
    ) -> (CallId, OneshotReceiver<Outcome>) {
        self.next_call += 1;
        let (result, sender) = self.calls.channel();
        let id = CallId(self.next_call);
        let (begun, deadline) = (Time::from_nanos(0), Time::from_nanos(0) + Duration::from_secs(1));
        let (permit, cancel_reason, is_logged) = (None, None, false);
        let waiter = Waiter { permit, id, sender, begun, deadline, timeout, cancel_reason, is_logged };
        self.receiver.receive(SENDER, NewReceive { key: key.clone(), destination, waiter }, true);
        self.tell();
        (id, result)
    }

    fn cancel(&mut self, id: CallId) {
        self.receiver.cancel(&Cancel { call: id.into(), why: CancelReason::Cancelled });
        self.tell();
    }

    /// Gives up the requests for which no receive waits.
    fn idle(&mut self) {
        let now = Time::from_nanos(0);
        assert!(self.receiver.expire(now) >= now + IDLE_GRACE);
        self.receiver.expire(now + IDLE_GRACE);
        self.tell();
    }

    /// Gives outcomes to their callers.
    fn tell(&mut self) {
        self.receiver.take_ended().into_iter().for_each(EndedReceive::send);
    }

    fn ask(&mut self, request: &OwnRequest) {
        let (answers, id) = (self.answers.clone(), request.id);
        let nothing = NoValue(request.is_try.then(|| (id, answers.clone())));
        let answer = Box::new(move |AnswerValue { head, bytes }: AnswerValue| {
            let mut nothing = nothing;
            nothing.0 = None;
            let bytes = match bytes {
                AnswerBytes::Dead => Bytes::new(),
                AnswerBytes::Tensor(tensor) => Bytes::copy_from_slice(tensor.bytes()),
                AnswerBytes::Failure(text) => text,
            };
            answers.lock().unwrap().push_back((id, head.encode(), bytes));
        });
        let OwnRequest { id, step, ref key, wants_checksum, is_try, link, .. } = *request;
        let asked = AskedRequest { id, step, key, wants_checksum, is_try, link };
        self.sender.asked((RECEIVER, life(RECEIVER)), asked, answer);
    }

    /// The sender hears what was said next. Returns false if nothing was.
    fn hear(&mut self) -> bool {
        let Some(said) = self.channel.0.lock().unwrap().pop_front() else { return false };
        let from = (RECEIVER, life(RECEIVER));
        match said {
            Said::Ask(request, wanted) if wanted.load(Ordering::Relaxed) => self.ask(&request),
            Said::Ask(..) => {}
            Said::Finish(id, is_given_up) => {
                self.sender.finished(from, id, is_given_up);
                if is_given_up {
                    self.receiver.withdrawn(SENDER, id);
                }
            }
            Said::CleanUp(id) => self.sender.clean_up_peer(from, id),
        }
        true
    }

    /// The receiver gets the next answer.
    fn answer(&mut self) -> bool {
        let Some((id, head, bytes)) = self.answers.lock().unwrap().pop_front() else { return false };
        match head.is_empty() {
            true => self.receiver.tried(SENDER, id),
            false => self.receiver.answered((SENDER, id), Ok((head, vec![bytes]))),
        }
        self.tell();
        true
    }

    fn deliver_all(&mut self) {
        while self.hear() || self.answer() {}
    }
}

fn value(result: &mut OneshotReceiver<Outcome>) -> Option<Result<u8, Error>> {
    let Outcome(result) = result.take()?;
    Some(result.map(|delivery| match delivery.tensor {
        Payload::Tensor(tensor) => tensor.bytes()[0],
        Payload::Into(tensor) => tensor.bytes()[0],
    }))
}

/// The failure in the next answer.
fn failure(world: &World) -> Status {
    let (_, head, bytes) = world.answers.lock().unwrap().pop_front().expect("an answer");
    assert_eq!(AnswerHead::decode(&head), Ok(AnswerHead::Failed));
    head::decode_failure(&bytes).expect("valid")
}

fn request(id: u64, key: String) -> OwnRequest {
    let (peer, life, step, link) = (SENDER, life(SENDER), STEP, 1);
    OwnRequest { peer, life, id, step, key, wants_checksum: false, is_try: false, link }
}

#[test]
fn a_repeated_request_gets_the_same_value_until_it_is_finished() {
    let mut world = World::new();
    let key = key("x");
    [1, 2].into_iter().for_each(|value| world.send(&key, value));
    let own = request(7, text(&key, 70));
    for _ in 0..3 {
        world.ask(&own);
        let (id, _, bytes) = world.answers.lock().unwrap().pop_front().expect("answered");
        assert_eq!((id, bytes[0]), (7, 1));
    }
    let (untaken, _) = world.sender.untaken(None);
    assert_eq!((untaken.waiting(), untaken.left()), (1, 1));
    let from = (RECEIVER, life(RECEIVER));
    (0..2).for_each(|_| world.sender.finished(from, 7, false));
    world.ask(&own);
    assert_eq!(failure(&world).code, Code::FailedPrecondition, "a late copy takes no value");
    world.ask(&request(8, text(&key, 70)));
    assert_eq!(world.answers.lock().unwrap().pop_front().expect("answered").2[0], 2);
    world.ask(&request(8, text(&super::tests::key("y"), 70)));
    assert_eq!(failure(&world).code, Code::InvalidArgument, "the number is another key's");
    assert_eq!(world.outstanding.load(Ordering::Relaxed), 1);
}

#[test]
fn a_value_that_was_given_up_goes_back_to_its_place_in_the_line() {
    let mut world = World::new();
    let key = key("x");
    let (id, mut first) = world.receive(&key);
    world.deliver_all();
    [1, 2].into_iter().for_each(|value| world.send(&key, value));
    world.cancel(id);
    assert!(matches!(value(&mut first), Some(Err(Error::Cancelled { .. }))));
    world.idle();
    let (untaken, _) = world.sender.untaken(None);
    assert_eq!((untaken.waiting(), untaken.left()), (1, 1));
    // The answer is on its way, and nobody takes it.
    world.deliver_all();
    let (untaken, _) = world.sender.untaken(None);
    assert_eq!((untaken.waiting(), untaken.left()), (2, 0));
    let (_, mut next) = world.receive(&key);
    world.deliver_all();
    assert_eq!(value(&mut next).expect("done").expect("received"), 1);
    let (_, mut last) = world.receive(&key);
    world.deliver_all();
    assert_eq!(value(&mut last).expect("done").expect("received"), 2);
    assert_eq!(world.outstanding.load(Ordering::Relaxed), 0);
    assert!(world.sender.untaken(None).0.is_empty());
}

#[test]
fn a_value_of_a_step_that_has_ended_here_counts_no_more_and_can_be_asked_for_again() {
    let mut world = World::new();
    let key = key("x");
    let own = request(7, text(&key, 70));
    world.send(&key, 1);
    world.ask(&own);
    assert_eq!(world.sender.untaken(None).0.left(), 1);
    world.sender.step_changed(StepChange::CleanedUp { step: STEP });
    assert!(world.sender.untaken(None).0.is_empty(), "nobody waits until it is taken");
    assert!(!world.sender.is_flushed(), "the answer may be on its way");
    assert_eq!(world.outstanding.load(Ordering::Relaxed), 0);
    // The answer was lost on its way.
    world.ask(&own);
    let answers = std::mem::take(&mut *world.answers.lock().unwrap());
    assert_eq!(answers.iter().map(|(id, _, bytes)| (*id, bytes[0])).collect::<Vec<_>>(), [(7, 1); 2]);
    world.sender.finished((RECEIVER, life(RECEIVER)), 7, true);
    world.sender.clean_up_peer((RECEIVER, life(RECEIVER)), 9);
    assert!(world.sender.is_flushed());
    assert_eq!(world.outstanding.load(Ordering::Relaxed), 0, "it was counted once");
    world.ask(&request(9, text(&key, 70)));
    assert_ne!(failure(&world).code, Code::Ok, "its step has ended");
}

#[test]
fn a_try_gets_what_was_sent_before_it_and_waits_for_nothing_else() {
    let mut world = World::new();
    let key = key("x");
    let (id, mut given_up) = world.receive(&key);
    world.deliver_all();
    world.cancel(id);
    assert!(matches!(value(&mut given_up), Some(Err(Error::Cancelled { .. }))));
    let (_, mut nothing) = world.attempt(&key);
    world.deliver_all();
    assert!(matches!(value(&mut nothing), Some(Err(Error::DeadlineExceeded { .. }))));
    // The answer to the first of two is on its way while a value is sent.
    let (_, mut before) = world.attempt(&key);
    while world.hear() {}
    world.send(&key, 1);
    let (_, mut behind) = world.attempt(&key);
    world.deliver_all();
    assert!(matches!(value(&mut before), Some(Err(Error::DeadlineExceeded { .. }))));
    assert_eq!(value(&mut behind).expect("done").expect("received"), 1);
    let (_, mut waits) = world.receive(&key);
    let (_, mut late) = world.attempt(&key);
    assert!(matches!(value(&mut late), Some(Err(Error::DeadlineExceeded { .. }))), "others are first");
    world.send(&key, 2);
    world.deliver_all();
    assert_eq!(value(&mut waits).expect("done").expect("received"), 2);
}

#[test]
fn a_request_for_what_is_not_the_peers_is_refused_by_name() {
    let mut world = World::new();
    let good = text(&key("x"), 70);
    let to_me = good.replace("task:1", "task:0");
    let not_mine = good.replacen("task:0", "task:1", 1);
    let old_life = text(&key("x"), 71);
    let cases = [
        ("nonsense".to_owned(), Code::InvalidArgument, "bad rendezvous key"),
        (to_me, Code::InvalidArgument, "ends at w/0, and w/1 asks"),
        (not_mine, Code::InvalidArgument, "starts at w/1, and w/0 was asked"),
        (old_life, Code::FailedPrecondition, "incarnation 0000000000000047 of w/0"),
    ];
    for (id, (key, code, why)) in (1..).zip(cases) {
        world.ask(&request(id, key));
        let status = failure(&world);
        assert!(status.code == code && status.message.contains(why), "{status}");
    }
    for id in 10..10 + MAX_PEER_REQUESTS as u64 {
        world.ask(&request(id, text_in_turn(&key("x"), 70, id)));
    }
    assert!(world.answers.lock().unwrap().is_empty());
    world.ask(&request(9, good));
    assert_eq!(failure(&world).code, Code::ResourceExhausted);
}

#[test]
fn the_end_of_a_step_answers_who_waits_and_who_comes_later() {
    for cleans_up in [false, true] {
        let mut world = World::new();
        let (_, mut waits) = world.receive(&key("x"));
        world.deliver_all();
        let status = Status::new(Code::Internal, "no");
        world.sender.step_changed(match cleans_up {
            true => StepChange::CleanedUp { step: STEP },
            false => StepChange::Aborted { steps: STEP..=STEP, status: status.clone() },
        });
        let (_, mut comes) = world.receive(&key("y"));
        world.deliver_all();
        for result in [&mut waits, &mut comes] {
            let Some(Err(Error::Remote { status: told, .. })) = value(result) else { panic!("no error") };
            match cleans_up {
                true => assert_eq!(told.code, Code::NotFound),
                false => assert_eq!(told, status.clone().into_derived()),
            }
        }
    }
}

#[test]
fn what_a_dead_client_left_is_dropped_and_the_rest_is_for_its_next_life() {
    let mut world = World::new();
    let key = key("x");
    [1, 2].into_iter().for_each(|value| world.send(&key, value));
    world.ask(&request(1, text(&key, 70)));
    let error = Error::PeerLost {
        peer: task(RECEIVER),
        incarnation: life(RECEIVER),
        cause: LossCause::Died("x".into()),
    };
    assert_eq!(world.sender.lost(RECEIVER, &error), 1);
    let (untaken, losses) = world.sender.untaken(Some(0));
    assert_eq!((untaken.waiting(), untaken.left(), untaken.lost(), losses), (1, 0, 1, 1));
    let next = Incarnation::new(99).unwrap();
    let tag = LinkTag { incarnation: next, generation: 2.into() };
    world.sender.up(RECEIVER, CallLink { tag, generation: 1 });
    world.sender.clean_up_peer((RECEIVER, next), 1);
    world.answers.lock().unwrap().clear();
    let answers = world.answers.clone();
    let answer = Box::new(move |value: AnswerValue| {
        let AnswerBytes::Tensor(tensor) = value.bytes else { panic!("no tensor") };
        answers.lock().unwrap().push_back((1, Vec::new(), Bytes::copy_from_slice(tensor.bytes())));
    });
    let text = text(&key, 70);
    let asked = AskedRequest { id: 1, step: STEP, key: &text, wants_checksum: false, is_try: false, link: 1 };
    world.sender.asked((RECEIVER, next), asked, answer);
    assert_eq!(world.answers.lock().unwrap()[0].2[0], 2, "the number is new in a new life");
}

#[test]
fn a_request_of_an_earlier_or_a_later_link_takes_no_value() {
    let mut world = World::new();
    let key = key("x");
    let cause = LossCause::Closed("x".into());
    let error = Error::PeerLost { peer: task(RECEIVER), incarnation: life(RECEIVER), cause };
    let of = |link| OwnRequest { link, ..request(7, text(&key, 70)) };
    world.ask(&of(1));
    assert_eq!(world.sender.lost(RECEIVER, &error), 0);
    world.ask(&of(1));
    world.ask(&of(2));
    world.sender.up(RECEIVER, linked(RECEIVER, 2));
    // The receiver has not heard yet that its link has ended.
    world.ask(&of(1));
    world.send(&key, 1);
    assert!(world.answers.lock().unwrap().is_empty());
    assert!(world.sender.is_over(RECEIVER, linked(RECEIVER, 1).tag), "its end is no news");
    assert!(!world.sender.is_over(RECEIVER, linked(RECEIVER, 2).tag));
    world.sender.clean_up_peer((RECEIVER, life(RECEIVER)), 8);
    world.ask(&OwnRequest { link: 2, ..request(8, text(&key, 70)) });
    assert_eq!(world.answers.lock().unwrap().pop_front().expect("answered").2[0], 1);
}

#[test]
fn a_forged_answer_is_an_error_of_its_receive_and_of_no_other() {
    let mut world = World::new();
    let (_, mut bad) = world.receive(&key("bad"));
    let (_, mut good) = world.receive(&key("good"));
    world.send(&key("good"), 3);
    let dead = AnswerHead::Dead.encode();
    for (head, bytes) in [(vec![77], Bytes::new()), (dead, Bytes::from_static(b"x")), (vec![4], Bytes::new())]
    {
        world.receiver.answered((SENDER, 1), Ok((head, vec![bytes])));
        world.tell();
        if let Some(result) = value(&mut bad) {
            assert!(matches!(result, Err(Error::Remote { status, .. }) if status.code == Code::DataLoss));
        }
    }
    world.receiver.answered((SENDER, 999), Ok((Vec::new(), Vec::new())));
    world.deliver_all();
    assert_eq!(value(&mut good).expect("done").expect("received"), 3);
}

#[derive(Clone, Copy, Debug)]
enum Event {
    Send,
    Receive,
    /// A receive that does not wait for a value.
    Try,
    /// One of the receives that wait.
    Cancel(usize),
    /// No receive has waited for some requests for long.
    Idle,
    Hear,
    Answer,
    /// The next answer is lost, and its call is made again.
    LoseAnswer,
    /// The next words are heard twice.
    HearTwice,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        3 => Just(Event::Send),
        3 => Just(Event::Receive),
        2 => Just(Event::Try),
        2 => (0..4_usize).prop_map(Event::Cancel),
        1 => Just(Event::Idle),
        6 => Just(Event::Hear),
        6 => Just(Event::Answer),
        1 => Just(Event::LoseAnswer),
        2 => Just(Event::HearTwice),
    ]
}

proptest! {
    /// Whatever is lost, repeated or given up: each value is taken once, in its order.
    #[test]
    fn no_value_is_lost_or_taken_twice(events in proptest::collection::vec(event(), 0..120)) {
        let mut world = World::new();
        let key = key("x");
        let (mut sent, mut taken, mut waiting) = (0_u8, Vec::new(), Vec::new());
        let mut asked: Vec<OwnRequest> = Vec::new();
        for event in events {
            if let Some(Said::Ask(request, _)) = world.channel.0.lock().unwrap().front() {
                asked.push(request.clone());
            }
            match event {
                Event::Send => {
                    world.send(&key, sent);
                    sent += 1;
                }
                Event::Receive => waiting.push(world.receive(&key)),
                Event::Try => waiting.push(world.attempt(&key)),
                Event::Cancel(at) => {
                    if let Some((id, _)) = waiting.get(at) {
                        let id = *id;
                        world.cancel(id);
                    }
                }
                Event::Idle => world.idle(),
                Event::Hear => _ = world.hear(),
                Event::Answer => _ = world.answer(),
                Event::LoseAnswer => {
                    let lost = world.answers.lock().unwrap().pop_front();
                    let again = lost.and_then(|(id, ..)| asked.iter().find(|of| of.id == id).cloned());
                    if let Some(request) = again {
                        world.ask(&request);
                    }
                }
                Event::HearTwice => {
                    let said = world.channel.0.lock().unwrap().front().cloned();
                    world.hear();
                    if let Some(said) = said {
                        world.channel.0.lock().unwrap().push_front(said);
                        world.hear();
                    }
                }
            }
            waiting.retain_mut(|(_, result)| match value(result) {
                Some(Ok(value)) => { taken.push(value); false }
                Some(Err(_)) => false,
                None => true,
            });
        }
        world.deliver_all();
        for (_, mut result) in waiting {
            taken.extend(value(&mut result).and_then(Result::ok));
        }
        while taken.len() < usize::from(sent) {
            let (_, mut result) = world.receive(&key);
            world.deliver_all();
            taken.push(value(&mut result).expect("a value is left").expect("received"));
        }
        prop_assert_eq!(taken, (0..sent).collect::<Vec<_>>());
        prop_assert_eq!(world.outstanding.load(Ordering::Relaxed), 0);
    }
}
