//! Messages of a peer that a test plays by hand.

mod eager;
mod offers;
mod ready;

use super::*;
use crate::fabric::sim::{SimNetwork, SimOptions, SimPort};
use crate::fabric::{Completions, Endpoint, Event, Fabric, LinkId, LinkOptions, Port, Role, ShortTake};
use crate::link::{DirectReceive, LinkEvent, LinkIdentity, LinkSettings, Links, Value};
use crate::memory::{ForeignMemory, PoolOptions, Region, RegionOptions};
use crate::protocol::Record;
use crate::wire::message::fragment::{Assembler, cut, is_fragment};
use crate::wire::message::pack::Pack;
use crate::wire::message::{EdgeAnnouncement, LentRecord, Message, PlainRecord, RecordValue, VersionedMeta};
use crate::wire::{EdgeId, Grant, Immediate, MAX_NAME, Shape, TaskId, TensorMeta};
use std::collections::VecDeque;
use std::time::Duration;

const EDGE: EdgeId = EdgeId { number: 0, generation: 1 };
const SLOT: usize = 224;

/// The side under test, and a peer that the test plays by hand.
struct Scene {
    network: SimNetwork,
    links: Links<SimPort>,
    link: LinkId,
    pool: Pool,
    peer: SimPort,
    peer_pool: Pool,
    peer_link: LinkId,
    /// Messages at the peer.
    heard: VecDeque<Vec<u8>>,
    /// The immediates at the peer, with the bytes of their writes.
    written: Vec<(Immediate, u64)>,
}

fn meta(bytes: u64) -> TensorMeta {
    TensorMeta::new(DType::U8, Shape::new(&[bytes]).expect("a shape")).expect("a size")
}

fn scene(lends: bool) -> Scene {
    scene_with(SimOptions { lends, ..SimOptions::default() })
}

fn scene_with(options: SimOptions) -> Scene {
    let pools = [(); 2].map(|()| {
        let region = Region::create(0, &RegionOptions::new(4 << 20)).expect("4 MiB");
        Pool::new(region, PoolOptions::default()).expect("a pool")
    });
    let options = SimOptions { poll_batch: 64, auto_advance: true, ..options };
    let network = SimNetwork::new(1, options);
    let fabrics = pools.each_ref().map(|pool| network.process(pool));
    let options = LinkOptions { depth: 1 << 13, receives: 0, generation: 0 };
    let [a, b] = fabrics.each_ref().map(|fabric| fabric.endpoint(0, &options).expect("an endpoint"));
    let addresses = [a.address().to_vec(), b.address().to_vec()];
    let a = a.connect(Role::Initiator, &addresses[1], Duration::ZERO).expect("connected");
    let b = b.connect(Role::Acceptor, &addresses[0], Duration::ZERO).expect("connected");
    let [port, mut peer] = fabrics.map(|fabric| fabric.port().expect("a port"));
    let [pool, peer_pool] = pools;
    let mut links = Links::new(port, pool.clone(), CountersWriter::new());
    let [local, other] = ["a", "b"].map(|job| TaskId::new(job, 0).expect("a task"));
    let identity = LinkIdentity { local, local_incarnation: 1, peer: other, peer_incarnation: 2 };
    let settings =
        LinkSettings { small_tensor_bytes: 128, validate: false, borrow: false, max_ready_bytes: 1 << 20 };
    let link = links.attach(a, identity, settings).expect("room");
    let peer_link = peer.attach(b).expect("room");
    peer.post_receives(peer_link, 1 << 13);
    let (heard, written) = (VecDeque::new(), Vec::new());
    Scene { network, links, link, pool, peer, peer_pool, peer_link, heard, written }
}

impl Scene {
    /// The next message at the peer but for the probe, as `read` reads it.
    fn heard<R>(&mut self, read: impl Fn(&Message<'_>) -> R) -> R {
        for _ in 0..10_000 {
            if let Some(message) = self.heard.pop_front() {
                return read(&Message::decode(&message).expect("a message"));
            }
            self.links.poll();
            // Sends what waits for other messages.
            while self.links.next_event().is_some() {}
            self.hear();
        }
        panic!("no message came");
    }

    /// Polls the peer.
    fn hear(&mut self) {
        let (mut completions, mut assembler) = (Completions::default(), Assembler::default());
        self.peer.poll(&mut completions);
        for (completion, bytes) in completions.drain() {
            match completion.event {
                Event::Message(_) if is_fragment(bytes) => {
                    let whole = assembler.push(bytes).expect("in order");
                    self.heard.extend(whole.map(<[u8]>::to_vec));
                }
                Event::Message(_) if !matches!(Message::decode(bytes), Ok(Message::Ping { .. })) => {
                    self.heard.push_back(bytes.to_vec());
                }
                Event::Immediate { immediate, bytes } => self.written.push((immediate, bytes)),
                _ => {}
            }
        }
    }

    fn say(&mut self, message: &Message<'_>) {
        let mut bytes = Vec::new();
        message.encode(&mut bytes);
        cut(&bytes, SLOT, |part| self.peer.send(self.peer_link, part).expect("room"));
    }

    /// The reason for which the link has ended.
    fn ended(&mut self) -> String {
        for _ in 0..10_000 {
            self.links.poll();
            while let Some(event) = self.links.next_event() {
                if let LinkEvent::Down { failure, .. } = event {
                    return format!("{failure:?}");
                }
            }
        }
        panic!("the link lives at {:?}", self.network.now());
    }

    /// The peer writes so many bytes to a grant.
    fn write(&mut self, bytes: u64, grant: &Grant, immediate: Immediate) {
        let mut source = self.peer_pool.zeroed(meta(bytes)).expect("room");
        source.bytes_mut().fill(7);
        let source = source.freeze();
        self.peer.write(self.peer_link, &source, bytes, grant, Some(immediate)).expect("posted");
    }

    fn tell_meta(&mut self, bytes: u64) {
        let told = VersionedMeta { version: 1, placement: Placement::POOL, meta: meta(bytes) };
        self.say(&Message::Meta(told));
    }
}

fn record(value: RecordValue<'_>) -> Message<'_> {
    Message::Record { edge: EDGE, n: 1, step: 1, answers_need: false, checksum: None, value }
}

#[test]
fn a_tensor_that_no_message_carries_is_an_error_at_its_receiver() {
    for bytes in [1001, 1 << 20] {
        let mut scene = scene_with(SimOptions { lends: false, max_write: 1000, ..SimOptions::default() });
        let value = Value::Tensor(scene.pool.zeroed(meta(bytes)).expect("room").freeze());
        let record = Record { edge: EDGE, n: 1, step: 1, answers_need: false, value };
        scene.links.window_to_receiver(scene.link, ToReceiver::Record(record));
        let status = scene.heard(|message| match message {
            Message::Record { value: RecordValue::Error(status), n: 1, .. } => status.clone(),
            other => panic!("not the error: {other:?}"),
        });
        assert_eq!(status.code, Code::ResourceExhausted);
        assert!(status.message.contains(&format!("{bytes}")), "{}", status.message);
        assert!(status.message.len() <= incoming::MAX_RECORD_TEXT, "{}", status.message);
    }
}

/// A tensor that was registered for one fabric can leave over another, once that one has failed.
#[test]
fn a_tensor_outside_the_pool_is_copied_where_the_link_does_not_register() {
    const BYTES: u64 = 100_000;
    for lends in [true, false] {
        let mut scene = scene(lends);
        let memory = ForeignMemory::from_owner(vec![7_u8; BYTES as usize]);
        let tensor = memory.tensor(&scene.pool, meta(BYTES), 0).expect("inside");
        let record = || {
            let value = Value::Tensor(tensor.clone());
            Record { edge: EDGE, n: 1, step: 1, answers_need: false, value }
        };
        assert_eq!(scene.links.offers(scene.link, &record().value), !lends);
        let stays = scene.links.window_to_receiver(scene.link, ToReceiver::Record(record()));
        assert_eq!(stays, !lends, "it is offered, or lent");
        let counters = scene.links.counters().counters();
        let counted = [Counter::TensorsStaged, Counter::BytesStaged].map(|counter| counters.get(counter));
        assert_eq!(counted, [1, BYTES]);

        let pool = scene.pool.clone();
        let full: Vec<_> = std::iter::from_fn(|| pool.tensor(meta(BYTES / 2)).ok()).collect();
        assert!(!scene.links.window_to_receiver(scene.link, ToReceiver::Record(record())));
        let error = |message: &Message<'_>| match message {
            Message::Record { value: RecordValue::Error(status), .. } => Some(status.clone()),
            _ => None,
        };
        let status = std::iter::repeat_with(|| scene.heard(error)).flatten().next().expect("the error");
        assert_eq!(status.code, Code::ResourceExhausted);
        assert!(status.message.contains("the pool is exhausted"), "{}", status.message);
        drop(full);
    }
}

/// The announcement of an edge, as the peer of a scene makes it.
fn announcement<'a>(source: &'a str, destination: &'a str) -> EdgeAnnouncement<'a> {
    let (frame, iteration, borrow, validate) = (0, 0, false, false);
    EdgeAnnouncement { incarnation: 1, frame, iteration, source, destination, name: "x", borrow, validate }
}

#[test]
fn tensors_of_the_pool_and_those_without_bytes_take_the_short_path() {
    let mut scene = scene(true);
    let [a, b] = ["a", "b"].map(|job| format!("/job:{job}/replica:0/task:0/device:CPU:0"));
    let name = announcement(&a, &b);
    scene.say(&Message::Announce { edge: EDGE, limit: 2, resume: None, name });
    (0..1000).for_each(|_| _ = scene.links.poll());
    let other = |meta: &TensorMeta| {
        let other = Region::create(1, &RegionOptions::new(4 << 20)).expect("4 MiB");
        let pool = Pool::new(other, PoolOptions::default()).expect("a pool");
        pool.zeroed(meta.clone()).expect("room").freeze()
    };
    let foreign = ForeignMemory::from_owner(vec![0_u8; 8]);
    let cases = [
        ("of the pool", scene.pool.zeroed(meta(8)).expect("room").freeze(), true),
        ("of another pool", other(&meta(8)), true),
        ("without bytes", scene.pool.zeroed(meta(0)).expect("room").freeze(), true),
        ("of other memory", foreign.tensor(&scene.pool, meta(8), 0).expect("8 bytes"), false),
    ];
    for (what, tensor, is_short) in cases {
        // The first tensor tells the meta-data.
        let value = Value::Tensor(tensor.clone());
        let record = Record { edge: EDGE, n: 1, step: 1, answers_need: false, value };
        scene.links.window_to_receiver(scene.link, ToReceiver::Record(record));
        (0..1000).for_each(|_| _ = scene.links.poll());
        let Record { edge, step, .. } = expected(0);
        let has_left = scene.links.send_short(scene.link, edge, 2, step, &mut Some(tensor));
        assert_eq!(has_left, is_short, "a tensor {what}");
    }
}

#[test]
fn an_edge_of_another_life_or_another_task_is_refused_by_name() {
    let [a, b, c] = ["a", "b", "c"].map(|job| format!("/job:{job}/replica:0/task:0/device:CPU:0"));
    let cases = [
        (1, &a, &b, None),
        (1, &c, &b, Some((Code::InvalidArgument, "does not start at"))),
        (1, &a, &c, Some((Code::PermissionDenied, "does not end at"))),
        (7, &a, &b, Some((Code::FailedPrecondition, "incarnation 0000000000000007 of a/0, which"))),
    ];
    for (incarnation, source, destination, refused) in cases {
        let mut scene = scene(true);
        let name = EdgeAnnouncement { incarnation, ..announcement(source, destination) };
        scene.say(&Message::Announce { edge: EDGE, limit: 2, resume: None, name });
        let event = (0..10_000).find_map(|_| {
            scene.links.poll();
            scene.links.next_window()
        });
        let Some((_, WindowEvent::ToSender(ToSender::Announce { .. }, refusal))) = event else {
            panic!("{event:?}")
        };
        match refused {
            None => assert_eq!(refusal, None),
            Some((code, part)) => {
                let status = refusal.expect("refused");
                assert!(status.code == code && status.message.contains(part), "{status:?}");
            }
        }
    }
}

#[test]
fn an_edge_with_a_number_or_a_name_beyond_the_limits_ends_the_link() {
    let [a, b] = ["a", "b"].map(|job| format!("/job:{job}/replica:0/task:0/device:CPU:0"));
    let long = "n".repeat(MAX_NAME + 1);
    let cases = [
        (MAX_EDGES, "x", "edge 32768 was announced, of at most 32768"),
        (0, &*long, "a name of 2049 bytes: 1 to 2048 are allowed"),
    ];
    for (number, name, why) in cases {
        let mut scene = scene(true);
        let (edge, name) =
            (EdgeId { number, generation: 1 }, EdgeAnnouncement { name, ..announcement(&a, &b) });
        scene.say(&Message::Announce { edge, limit: 2, resume: None, name });
        let ended = scene.ended();
        assert!(ended.contains(why), "{ended}");
    }
}

#[test]
fn a_record_has_few_bytes() {
    let data = vec![7; 1000];
    for lends in [false, true] {
        let mut scene = scene(lends);
        scene.tell_meta(1000);
        scene.say(&record(RecordValue::Bytes { meta: 1, data: &data }));
        assert!(scene.ended().contains("a record of 1000 bytes came"));
    }
}

#[test]
fn a_record_has_a_short_error() {
    let mut scene = scene(true);
    let status = Status::new(Code::Internal, "e".repeat(513));
    scene.say(&record(RecordValue::Error(status)));
    assert!(scene.ended().contains("an error of 513 bytes, of at most 512"));
}

/// Receives that begin later get the errors of ended steps too, so they stay.
#[test]
fn long_errors_of_ended_steps_are_cut_once_they_take_much_memory() {
    const TEXT: usize = 64 << 10;
    let mut scene = scene(true);
    let text = "e".repeat(TEXT);
    let mut lens = Vec::new();
    for step in 0..300 {
        let status = Some(Status::new(Code::Internal, text.clone()));
        scene.say(&Message::StepsOver { first: step, last: step, status });
        let mut told = None;
        while told.is_none() {
            scene.links.poll();
            told = scene.links.next_window();
        }
        let Some((_, WindowEvent::ToReceiver(ToReceiver::StepsOver(over)))) = told else {
            panic!("{told:?}")
        };
        let WindowRefusal::Because(status) = over.error else { panic!("{:?}", over.error) };
        lens.push(status.message.len());
        scene.peer.post_receives(scene.peer_link, 64);
    }
    assert!(lens[..256].iter().all(|len| *len == TEXT), "16 MiB");
    assert!(lens[256..].iter().all(|len| *len <= 4096), "{:?}", &lens[256..]);
}

/// The record of edge `number` that is expected.
fn expected(number: u32) -> Record<()> {
    let edge = EdgeId { number, generation: 1 };
    Record { edge, n: 1, step: 1, answers_need: false, value: () }
}

/// A side that has polled for a pack with a tensor of each of two edges, in an open batch.
fn with_a_pack() -> Scene {
    let mut scene = scene(true);
    scene.tell_meta(8);
    for _ in 0..1000 {
        scene.links.poll();
    }
    let mut pack = Pack::new(SLOT);
    for number in 0..2 {
        let Record { edge, n, step, .. } = expected(number);
        let mut bytes = Vec::new();
        PlainRecord { edge, n, step, meta: 1, data: &[number as u8; 8] }.encode(&mut bytes);
        pack.push(&bytes);
    }
    scene.peer.send(scene.peer_link, pack.bytes()).expect("room");
    scene.links.begin_batch();
    scene
}

impl Scene {
    /// The bytes of a tensor that is taken from the pack, if its edge is the next.
    fn take(&mut self, number: u32) -> Option<Vec<u8>> {
        let mut receive = DirectReceive::Waiting(Destination::Alloc);
        let Record { edge, n, step, .. } = expected(number);
        let mut look = || self.links.take_short(self.link, edge, n, step, &mut receive);
        if !(0..1000).any(|_| look() == ShortTake::Taken(())) {
            return None;
        }
        match receive {
            DirectReceive::Received(Received::Tensor(tensor), _) => Some(tensor.bytes().to_vec()),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn tensors_of_a_pack_are_taken_one_by_one_by_their_edges() {
    let mut scene = with_a_pack();
    assert_eq!(scene.take(1), None, "the other edge is first");
    assert_eq!(scene.take(0), Some(vec![0; 8]));
    assert_eq!(scene.take(1), Some(vec![1; 8]));
    assert!(!scene.links.handle_polled() && scene.links.next_window().is_none());
}

#[test]
fn the_rest_of_a_pack_comes_by_the_poll() {
    let mut scene = with_a_pack();
    assert_eq!(scene.take(0), Some(vec![0; 8]));
    assert!(scene.links.handle_polled());
    let Some((_, WindowEvent::ToReceiver(ToReceiver::Record(record)))) = scene.links.next_window() else {
        panic!("no record came");
    };
    assert_eq!(record.edge.number, 1);
    assert!(scene.links.next_window().is_none() && !scene.links.handle_polled());
}

#[test]
fn a_loan_for_another_receive_is_left_to_a_poll() {
    let record = expected(0);
    let Record { edge, n, step, .. } = record;
    let lent = LentRecord { edge, n, step, meta: 1, may_borrow: false, answers_need: false, checksum: None };
    let other_edge = EdgeId { number: edge.number + 1, ..edge };
    let others = [
        LentRecord { edge: other_edge, ..lent },
        LentRecord { n: n + 1, ..lent },
        LentRecord { step: step + 1, ..lent },
        LentRecord { answers_need: true, ..lent },
        LentRecord { checksum: Some(7), ..lent },
        LentRecord { meta: 9, ..lent },
    ];
    for (sent, is_taken) in others.map(|other| (other, false)).into_iter().chain([(lent, true)]) {
        let mut scene = scene(true);
        scene.tell_meta(1000);
        for _ in 0..1000 {
            scene.links.poll();
        }
        let mut source = scene.peer_pool.zeroed(meta(1000)).expect("room");
        source.bytes_mut().fill(5);
        scene
            .peer
            .lend(scene.peer_link, &mut Some(source.freeze()), &mut None, &sent.to_message())
            .expect("room");
        // Lets the time pass, in which the loan arrives.
        (0..1000).for_each(|_| _ = scene.peer.poll(&mut Completions::default()));
        assert_eq!(scene.take(0).is_some_and(|bytes| bytes == [5; 1000]), is_taken, "{sent:?}");
    }
}

impl Scene {
    /// The tensor of the next record, which comes by a poll.
    fn arrived(&mut self) -> ArrivedTensor {
        for _ in 0..1000 {
            self.links.poll();
            if let Some((_, event)) = self.links.next_window() {
                let WindowEvent::ToReceiver(ToReceiver::Record(record)) = event else { panic!("no record") };
                let WindowArrival::Ready(ReadyValue::Tensor(tensor)) = record.value else {
                    panic!("no tensor")
                };
                return tensor;
            }
        }
        panic!("no record came");
    }
}

#[test]
fn a_checksum_that_nobody_asked_for_is_not_compared() {
    let mut scene = scene(true);
    scene.tell_meta(8);
    let Record { edge, n, step, .. } = expected(0);
    let value = RecordValue::Bytes { meta: 1, data: &[5; 8] };
    scene.say(&Message::Record { edge, n, step, answers_need: false, checksum: Some(7), value });
    assert_eq!(scene.arrived().checksum, None);
    let checksum = Some(7);
    let lent = LentRecord { edge, n, step, meta: 1, may_borrow: true, answers_need: false, checksum };
    let source = scene.peer_pool.zeroed(meta(8)).expect("room").freeze();
    scene.peer.lend(scene.peer_link, &mut Some(source), &mut None, &lent.to_message()).expect("room");
    assert_eq!(scene.arrived().checksum, None);
}

#[test]
fn a_tensor_is_compared_with_its_checksum_once_it_has_a_place() {
    let mut scene = scene(true);
    scene.tell_meta(8);
    scene.say(&record(RecordValue::Bytes { meta: 1, data: &[5; 8] }));
    let tensor = ArrivedTensor { checksum: Some(7), ..scene.arrived() };
    let counters = CountersWriter::new();
    let given = Destination::Into(scene.pool.zeroed(meta(16)).expect("room"));
    let rejected = tensor.place(&scene.pool, &counters, given).expect_err("another shape");
    assert!(matches!(rejected.error, ReceiveError::ShapeMismatch { .. }));
    let tensor = rejected.tensor.expect("for another receive");
    let rejected = tensor.place(&scene.pool, &counters, Destination::Alloc).expect_err("other bytes");
    assert!(matches!(rejected.error, ReceiveError::Corrupted(Corruption { sent: 7, bytes: 8, .. })));
    assert!(rejected.tensor.is_none());
}

#[cfg(tensorwire_mutants)]
#[test]
fn each_bug_is_found() {
    use crate::mutants::assert_found;
    assert_found(Mutant::FirstOfPackSkipped, tensors_of_a_pack_are_taken_one_by_one_by_their_edges);
    assert_found(Mutant::LentRecordNotCompared, a_loan_for_another_receive_is_left_to_a_poll);
}
