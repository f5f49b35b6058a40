//! Tensors in records that are longer than a control slot.

use super::*;
use crate::link::windows::eager::EAGER_TENSORS;

/// Bytes of the longest message of these links, and of a tensor that goes eagerly.
const MAX_MESSAGE: usize = 1000;
const BYTES: u64 = 900;

/// Bytes of eager tensors that no receive has taken, at most.
const BOUND: u64 = EAGER_TENSORS * (MAX_MESSAGE as u64 - 28);

fn scene() -> Scene {
    scene_with(SimOptions { lends: false, max_message: MAX_MESSAGE, ..SimOptions::default() })
}

impl Scene {
    /// Sends a tensor and returns how it arrives, behind messages about meta-data.
    fn sends(&mut self, bytes: u64) -> &'static str {
        let value = Value::Tensor(self.pool.zeroed(meta(bytes)).expect("room").freeze());
        let record = Record { edge: EDGE, n: 1, step: 1, answers_need: false, value };
        self.links.window_to_receiver(self.link, ToReceiver::Record(record));
        loop {
            let kind = self.heard(|message| match message {
                Message::Meta(_) => None,
                Message::Record { value: RecordValue::Bytes { data, .. }, .. } => {
                    assert_eq!(data.len() as u64, bytes);
                    Some("bytes")
                }
                Message::Record { value: RecordValue::Offer { .. }, .. } => Some("offer"),
                other => panic!("{other:?}"),
            });
            if let Some(kind) = kind {
                return kind;
            }
        }
    }

    /// The peer says a record with a tensor of so many bytes, whole.
    fn says_record(&mut self, bytes: usize) {
        let plain = PlainRecord { edge: EDGE, n: 1, step: 1, meta: 1, data: &vec![3; bytes] };
        let mut encoded = Vec::new();
        plain.encode(&mut encoded);
        self.peer.send(self.peer_link, &encoded).expect("room");
    }

    /// The tensor of the next record.
    fn arrival(&mut self) -> ArrivedTensor {
        for _ in 0..1000 {
            self.links.poll();
            let Some((_, event)) = self.links.next_window() else { continue };
            let WindowEvent::ToReceiver(ToReceiver::Record(Record { value, .. })) = event else {
                panic!("{event:?}")
            };
            let WindowArrival::Ready(ReadyValue::Tensor(tensor)) = value else { panic!("{value:?}") };
            return tensor;
        }
        panic!("no record came");
    }

    fn hear_for_long(&mut self) {
        (0..1000).for_each(|_| self.hear());
    }

    /// What the peer hears until nothing more comes.
    fn records_and_credits(&mut self) -> Vec<String> {
        self.hear_for_long();
        let kind = |message: Vec<u8>| match Message::decode(&message).expect("a message") {
            Message::EagerCredit { returned } => format!("credit for {returned}"),
            Message::Record { .. } => "record".into(),
            other => panic!("{other:?}"),
        };
        self.heard.drain(..).map(kind).collect()
    }

    /// The credit that the peer hears next.
    fn credit(&mut self) -> u64 {
        self.heard(|message| match message {
            Message::EagerCredit { returned } => *returned,
            other => panic!("{other:?}"),
        })
    }
}

#[test]
fn tensors_are_sent_in_their_records_within_the_bound_and_offered_beyond_it() {
    let mut scene = scene();
    for k in 0..BOUND / BYTES {
        assert_eq!(scene.sends(BYTES), "bytes", "tensor {k}");
    }
    assert_eq!(scene.sends(BYTES), "offer");
    assert_eq!(scene.sends(100), "bytes", "a small one needs no room");
    scene.say(&Message::EagerCredit { returned: 2 * BYTES });
    (0..1000).for_each(|_| _ = scene.links.poll());
    assert_eq!([BYTES, BYTES, BYTES].map(|bytes| scene.sends(bytes)), ["bytes", "bytes", "offer"]);
    assert_eq!(scene.sends(MAX_MESSAGE as u64), "offer", "no message is so long");
}

#[test]
fn the_short_path_sends_eagerly_within_the_bound() {
    let mut scene = scene();
    let [a, b] = ["a", "b"].map(|job| format!("/job:{job}/replica:0/task:0/device:CPU:0"));
    scene.say(&Message::Announce { edge: EDGE, limit: 100, resume: None, name: announcement(&a, &b) });
    (0..1000).for_each(|_| _ = scene.links.poll());
    // The first tensor tells the meta-data.
    assert_eq!(scene.sends(BYTES), "bytes");
    let tensor = scene.pool.zeroed(meta(BYTES)).expect("room").freeze();
    let sent =
        (0..100).take_while(|n| scene.links.send_short(scene.link, EDGE, *n, 1, &mut Some(tensor.clone())));
    assert_eq!(sent.count() as u64, BOUND / BYTES - 1);
}

#[test]
fn credit_for_tensors_that_were_not_sent_ends_the_link() {
    for (first, then, why) in [(0, BYTES + 1, "after 0 of 900"), (BYTES, BYTES - 1, "after 900 of 900")] {
        let mut scene = scene();
        assert_eq!(scene.sends(BYTES), "bytes");
        for returned in [first, then] {
            scene.say(&Message::EagerCredit { returned });
        }
        let failure = scene.ended();
        assert!(failure.contains(&format!("it returns {then} eager bytes, {why}")), "{failure}");
    }
}

#[test]
fn a_tensor_that_comes_eagerly_is_returned_when_it_was_taken() {
    let mut scene = scene();
    scene.tell_meta(BYTES);
    let mut held = Vec::new();
    for _ in 0..BOUND / BYTES {
        scene.says_record(BYTES as usize);
        let tensor = scene.arrival();
        assert!(matches!(tensor.bytes, ArrivedBytes::Eager { .. }), "{tensor:?}");
        held.push(tensor);
    }
    scene.links.poll();
    scene.hear();
    assert!(scene.heard.is_empty(), "none was taken");
    let counters = CountersWriter::new();
    for tensor in held.drain(..) {
        let placed = tensor.place(&scene.pool, &counters, Destination::Alloc).expect("room");
        assert!(matches!(placed.0, Received::Tensor(tensor) if tensor.bytes() == [3; BYTES as usize]));
    }
    // The next message tells it.
    scene.say(&Message::Flush { edge: EDGE });
    assert_eq!(scene.credit(), BOUND / BYTES * BYTES);
    scene.says_record(BYTES as usize);
}

#[test]
fn a_tensor_that_its_receive_takes_at_once_is_returned_too() {
    let mut scene = scene();
    scene.tell_meta(BYTES);
    (0..1000).for_each(|_| _ = scene.links.poll());
    for k in 1..=2 * BOUND / BYTES {
        scene.says_record(BYTES as usize);
        // Lets the time pass in which the message arrives.
        (0..1000).for_each(|_| _ = scene.peer.poll(&mut Completions::default()));
        assert!(scene.take(0).is_some_and(|bytes| bytes == [3; BYTES as usize]), "tensor {k}");
    }
}

#[test]
fn credit_follows_a_tensor_of_a_side_that_sends_too_until_it_is_urgent() {
    let mut scene = scene();
    let [a, b] = ["a", "b"].map(|job| format!("/job:{job}/replica:0/task:0/device:CPU:0"));
    scene.say(&Message::Announce { edge: EDGE, limit: 100, resume: None, name: announcement(&a, &b) });
    scene.tell_meta(BYTES);
    (0..1000).for_each(|_| _ = scene.links.poll());
    assert_eq!(scene.sends(BYTES), "bytes");
    let tensor = scene.pool.zeroed(meta(BYTES)).expect("room").freeze();
    let mut sent = 0;
    let mut send = |scene: &mut Scene| {
        sent += 1;
        assert!(scene.links.send_short(scene.link, EDGE, sent, 1, &mut Some(tensor.clone())));
    };
    let take = |scene: &mut Scene, count: u64| {
        for _ in 0..count {
            scene.says_record(BYTES as usize);
            // Lets the time pass in which the message arrives.
            scene.hear_for_long();
            assert!(scene.take(0).is_some());
        }
    };
    send(&mut scene);
    assert_eq!(scene.records_and_credits(), ["record"]);
    take(&mut scene, 3);
    assert_eq!(scene.records_and_credits(), [""; 0], "credit for 3 of 4 is due, and waits");
    send(&mut scene);
    assert_eq!(scene.records_and_credits(), ["record", "credit for 2700"]);
    take(&mut scene, 4);
    assert_eq!(scene.records_and_credits(), ["credit for 6300"], "it is urgent");
    take(&mut scene, 3);
    assert_eq!(scene.records_and_credits(), ["credit for 9000"], "none was sent since");
}

#[test]
fn tensors_beyond_the_bound_or_too_long_end_the_link() {
    let mut scene = scene();
    scene.tell_meta(BYTES);
    (0..=BOUND / BYTES).for_each(|_| scene.says_record(BYTES as usize));
    let failure = scene.ended();
    assert!(failure.contains("that were not returned, of at most 3888"), "{failure}");

    for (bytes, of, max_message) in [(973, 972, MAX_MESSAGE), (197, 196, SLOT)] {
        let options = SimOptions { lends: false, max_message, ..SimOptions::default() };
        let mut scene = scene_with(options);
        scene.tell_meta(bytes);
        let data = vec![0; bytes as usize];
        scene.say(&record(RecordValue::Bytes { meta: 1, data: &data }));
        let failure = scene.ended();
        assert!(failure.contains(&format!("a record of {bytes} bytes came, of at most {of}")), "{failure}");
    }
}

#[test]
fn a_tensor_waits_in_the_heap_if_the_pool_has_no_room() {
    let mut scene = scene();
    scene.tell_meta(BYTES);
    let blocks: Vec<_> = std::iter::from_fn(|| scene.pool.zeroed(meta(BYTES)).ok()).collect();
    scene.says_record(BYTES as usize);
    let tensor = scene.arrival();
    assert!(matches!(tensor.bytes, ArrivedBytes::Kept { share: Some(_), .. }), "{tensor:?}");
    drop(blocks);
    let placed = tensor.place(&scene.pool, &CountersWriter::new(), Destination::Alloc).expect("room");
    assert!(matches!(placed.0, Received::Tensor(tensor) if tensor.bytes() == [3; BYTES as usize]));
}

#[cfg(tensorwire_mutants)]
#[test]
fn each_bug_is_found() {
    use crate::mutants::assert_found;
    assert_found(
        Mutant::EagerBeyondBound,
        tensors_are_sent_in_their_records_within_the_bound_and_offered_beyond_it,
    );
}
