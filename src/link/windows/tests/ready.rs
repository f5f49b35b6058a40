//! Destinations that are granted before their tensors are sent.

use super::*;
use crate::fabric::LinkFailure;
use crate::telemetry::Gauge;
use crate::wire::Slot;
use std::sync::atomic::Ordering;

const BYTES: u64 = 1000;
const OTHER: EdgeId = EdgeId { number: 0, generation: 2 };

fn immediate() -> Immediate {
    Immediate { generation: 7, slot: Slot::new(3).expect("20 bits") }
}

impl Scene {
    /// The peer grants a destination of so many bytes for the next tensor of an edge.
    fn peer_is_ready(&mut self, edge: EdgeId, bytes: u64) -> Grant {
        let target = self.peer_pool.zeroed(meta(bytes)).expect("room");
        let target = self.peer.grant(self.peer_link, target).expect("a grant");
        self.say(&Message::Ready { edge, immediate: immediate(), target });
        self.run();
        target
    }

    fn run(&mut self) {
        for _ in 0..1000 {
            self.links.poll();
            while self.links.next_event().is_some() {}
        }
    }

    fn send_tensor(&mut self, n: u16) {
        let mut tensor = self.pool.zeroed(meta(BYTES)).expect("room");
        tensor.bytes_mut().fill(9);
        let value = Value::Tensor(tensor.freeze());
        let record = Record { edge: EDGE, n, step: 1, answers_need: false, value };
        assert!(self.links.window_to_receiver(self.link, ToReceiver::Record(record)), "it stays");
    }

    /// What the peer hears, but for meta-data.
    fn heard_names(&mut self) -> Vec<&'static str> {
        self.run();
        self.hear();
        let heard = std::mem::take(&mut self.heard);
        let name = |message: &Vec<u8>| match Message::decode(message).expect("a message") {
            Message::Record { value: RecordValue::Written { .. }, .. } => Some("written"),
            Message::Record { value: RecordValue::Offer { .. }, .. } => Some("offered"),
            Message::Ready { .. } => Some("ready"),
            Message::Release { edge: EDGE } => Some("released"),
            Message::Withdraw { edge: EDGE } => Some("withdrawn"),
            Message::Retired { .. } => Some("retired"),
            Message::Meta(_) => None,
            other => panic!("{other:?}"),
        };
        heard.iter().filter_map(name).collect()
    }

    /// A tensor of so many bytes was offered on the edge.
    fn offered(&mut self, bytes: u64) {
        self.tell_meta(bytes);
        self.say(&record(RecordValue::Offer { meta: 1, offer: 5 }));
        let offered = self.next_window();
        assert!(offered.contains("Offered"), "{offered}");
    }

    /// The destination that this side grants for the next tensor.
    fn destination(&mut self) -> (Immediate, Grant) {
        self.links.make_ready(self.link, EDGE);
        self.heard(|message| match message {
            Message::Ready { edge: EDGE, immediate, target } => (*immediate, *target),
            other => panic!("not ready: {other:?}"),
        })
    }

    fn next_window(&mut self) -> String {
        let event = (0..10_000).find_map(|_| {
            self.links.poll();
            self.links.next_window()
        });
        format!("{:?}", event.expect("a message of the windows").1)
    }

    fn granted_bytes(&self) -> u64 {
        self.links.counters().counters().gauge(Gauge::GrantedBytes)
    }
}

#[test]
fn a_tensor_is_written_ahead_of_its_record_if_a_destination_waits() {
    let mut scene = scene(false);
    let target = scene.peer_is_ready(EDGE, BYTES);
    scene.send_tensor(1);
    assert_eq!(scene.heard_names(), ["written"]);
    assert_eq!(scene.written, [(immediate(), BYTES)]);
    let landed = scene.peer.revoke(scene.peer_link, &target).expect("granted");
    assert_eq!(landed.bytes(), [9; BYTES as usize]);
    scene.send_tensor(2);
    assert_eq!(scene.heard_names(), ["offered"], "a destination is for one tensor");
}

/// The table of the links holds every type of this module.
#[test]
fn neither_a_link_nor_its_events_show_the_key_of_a_grant() {
    let mut scene = scene(false);
    let theirs = scene.peer_is_ready(EDGE, BYTES);
    scene.offered(BYTES);
    let (_, ours) = scene.destination();
    let link = scene.links.links.get_mut(scene.link).expect("it is up");
    let text = format!("{link:?} {link:#?}");
    assert!(text.contains("ReadyReceiver") && text.contains("Landings"), "{text}");
    for grant in [theirs, ours] {
        grant.assert_key_hidden_in(&text);
    }
    // A write to a grant that ends the link: it is too long.
    let whole = Grant { len: ours.len + 1, ..ours };
    scene.write(BYTES + 1, &whole, immediate());
    ours.assert_key_hidden_in(&scene.ended());
}

#[test]
fn a_destination_that_is_not_used_is_released() {
    for bytes in [BYTES - 1, BYTES + 1] {
        let mut scene = scene(false);
        scene.peer_is_ready(EDGE, bytes);
        scene.send_tensor(1);
        assert_eq!(scene.heard_names(), ["released", "offered"]);
    }
    let mut scene = scene(false);
    scene.peer_is_ready(EDGE, BYTES);
    for answer in [&["released"][..], &[]] {
        scene.say(&Message::Withdraw { edge: EDGE });
        assert_eq!(scene.heard_names(), answer);
    }
    scene.peer_is_ready(EDGE, BYTES);
    scene.links.window_to_receiver(scene.link, ToReceiver::Retired { edge: EDGE });
    assert_eq!(scene.heard_names(), ["released", "retired"]);
}

#[test]
fn a_destination_of_an_earlier_use_of_a_number_is_not_written() {
    let mut scene = scene(false);
    scene.peer_is_ready(OTHER, BYTES);
    scene.send_tensor(1);
    assert_eq!(scene.heard_names(), ["offered"]);
}

#[test]
fn a_tensor_that_was_written_ahead_comes_with_its_record() {
    let mut scene = scene(false);
    scene.offered(BYTES);
    for round in 0..3 {
        let destination = scene.destination();
        assert_eq!(scene.granted_bytes(), BYTES);
        scene.write(BYTES, &destination.1, destination.0);
        scene.say(&record(RecordValue::Written { meta: 1 }));
        let arrived = scene.next_window();
        assert!(arrived.contains("Written"), "round {round}: {arrived}");
        assert_eq!(scene.granted_bytes(), 0);
    }
}

#[test]
fn a_written_tensor_has_the_meta_data_of_its_record() {
    let mut scene = scene(false);
    scene.offered(BYTES);
    let destination = scene.destination();
    scene.write(BYTES, &destination.1, destination.0);
    let shape = Shape::new(&[BYTES / 4, 1]).expect("a shape");
    let meta = TensorMeta::new(DType::F32, shape).expect("a size");
    scene.say(&Message::Meta(VersionedMeta { version: 2, placement: Placement::POOL, meta: meta.clone() }));
    scene.say(&record(RecordValue::Written { meta: 2 }));
    let event = (0..10_000).find_map(|_| {
        scene.links.poll();
        scene.links.next_window()
    });
    let Some((_, WindowEvent::ToReceiver(ToReceiver::Record(record)))) = event else { panic!("{event:?}") };
    let WindowArrival::Ready(ReadyValue::Tensor(tensor)) = record.value else { panic!("{record:?}") };
    let ArrivedBytes::Written { tensor: landed, .. } = tensor.bytes else { panic!("not written") };
    assert_eq!((landed.meta(), landed.bytes()), (&meta, &[7; BYTES as usize][..]));
}

#[test]
fn a_destination_is_granted_once_and_only_for_a_known_size_within_the_limit() {
    let mut scene = scene(false);
    scene.links.make_ready(scene.link, EDGE);
    assert_eq!(scene.heard_names(), [""; 0], "nothing is known of the edge");
    scene.offered(BYTES);
    scene.links.make_ready(scene.link, OTHER);
    assert_eq!(scene.heard_names(), [""; 0], "the number had another use");
    scene.links.make_ready(scene.link, EDGE);
    scene.links.make_ready(scene.link, EDGE);
    assert_eq!(scene.heard_names(), ["ready"]);

    let mut scene = self::scene(false);
    scene.offered((1 << 20) + 1);
    scene.links.make_ready(scene.link, EDGE);
    assert_eq!(scene.heard_names(), [""; 0], "it is beyond the limit");
}

#[test]
fn after_another_size_two_tensors_of_one_size_make_it_known_again() {
    let mut scene = scene(false);
    scene.offered(BYTES);
    scene.destination();
    scene.say(&Message::Release { edge: EDGE });
    let is_known = |scene: &mut Scene| scene.links.may_get_ready(scene.link, EDGE);
    for (bytes, known) in [(500, false), (BYTES, false), (BYTES, true)] {
        scene.offered(bytes);
        assert_eq!(is_known(&mut scene), known, "{bytes} bytes");
    }
    scene.tell_meta(8);
    scene.say(&record(RecordValue::Bytes { meta: 1, data: &[0; 8] }));
    scene.next_window();
    assert!(!is_known(&mut scene), "the last tensor was small");
}

#[test]
fn the_limit_is_for_all_edges_together() {
    let mut scene = scene(false);
    // The limit is 1 MiB.
    let bytes = 400_000;
    let mut granted = 0;
    scene.tell_meta(bytes);
    for number in 0..4 {
        let edge = EdgeId { number, ..EDGE };
        let value = RecordValue::Offer { meta: 1, offer: number };
        scene.say(&Message::Record { edge, n: 1, step: 1, answers_need: false, checksum: None, value });
        scene.next_window();
        scene.links.make_ready(scene.link, edge);
        granted += scene.heard_names().len();
    }
    assert_eq!(granted, 2);
}

#[test]
fn a_withdrawn_destination_that_a_write_has_used_keeps_its_tensor() {
    let mut scene = scene(false);
    scene.offered(BYTES);
    let destination = scene.destination();
    scene.links.withdraw(scene.link, EDGE);
    scene.write(BYTES, &destination.1, destination.0);
    scene.say(&record(RecordValue::Written { meta: 1 }));
    assert!(scene.next_window().contains("Written"));
}

#[test]
fn what_was_written_counts_until_it_is_taken() {
    let mut scene = scene(false);
    let counted = |scene: &Scene| scene.links.ready_bytes.load(Ordering::Relaxed) >= BYTES;
    scene.offered(BYTES);
    let destination = scene.destination();
    assert!(counted(&scene));
    scene.write(BYTES, &destination.1, destination.0);
    scene.say(&record(RecordValue::Written { meta: 1 }));
    let arrived = (0..10_000).find_map(|_| {
        scene.links.poll();
        scene.links.next_window()
    });
    assert!(counted(&scene));
    drop(arrived);
    assert!(!counted(&scene));
    scene.destination();
    scene.links.fail(scene.link, LinkFailure::Closed);
    scene.run();
    assert!(!counted(&scene), "the link has ended");
}

#[test]
fn a_released_destination_is_free_and_a_withdrawn_one_is_granted_again() {
    let mut scene = scene(false);
    scene.offered(BYTES);
    scene.destination();
    scene.links.withdraw(scene.link, EDGE);
    scene.links.withdraw(scene.link, EDGE);
    assert_eq!(scene.heard_names(), ["withdrawn"]);
    assert_eq!(scene.granted_bytes(), BYTES, "the peer may still write to it");
    scene.say(&Message::Release { edge: EDGE });
    scene.run();
    assert_eq!(scene.granted_bytes(), 0);
    scene.destination();
    // The sender has a tensor of another size.
    scene.say(&Message::Release { edge: EDGE });
    scene.run();
    scene.links.make_ready(scene.link, EDGE);
    assert_eq!(scene.heard_names(), [""; 0], "the next size is not known");
}

#[test]
fn a_sender_that_breaks_the_rules_of_destinations_ends_its_link() {
    type Act<'a> = &'a dyn Fn(&mut Scene, (Immediate, Grant));
    let record_alone: Act<'_> = &|scene, _| scene.say(&record(RecordValue::Written { meta: 1 }));
    let other_size: Act<'_> = &|scene, destination| {
        scene.write(BYTES, &destination.1, destination.0);
        let told = VersionedMeta { version: 2, placement: Placement::POOL, meta: meta(BYTES - 1) };
        scene.say(&Message::Meta(told));
        scene.say(&record(RecordValue::Written { meta: 2 }));
    };
    let release_of_written: Act<'_> = &|scene, destination| {
        scene.write(BYTES, &destination.1, destination.0);
        scene.say(&Message::Release { edge: EDGE });
    };
    let release_of_another: Act<'_> = &|scene, _| scene.say(&Message::Release { edge: OTHER });
    let write_twice: Act<'_> = &|scene, destination| {
        scene.write(BYTES, &destination.1, destination.0);
        scene.run();
        // The destination may be granted to nobody any more, and the immediate still comes.
        scene.peer.write_inline(scene.peer_link, &[], &destination.1, Some(destination.0)).expect("posted");
    };
    let retired: Act<'_> = &|scene, _| scene.say(&Message::Retired { edge: EDGE });
    for (act, why) in [
        (retired, "it retires edge 0 and keeps a destination"),
        (record_alone, "no write came before the record"),
        (other_size, "1000 bytes were written for"),
        (release_of_written, "it releases a destination of edge 0, which has none"),
        (release_of_another, "it releases a destination of edge 0, which has none"),
        (write_twice, "which is not granted"),
    ] {
        let mut scene = scene(false);
        scene.offered(BYTES);
        let destination = scene.destination();
        act(&mut scene, destination);
        let ended = scene.ended();
        assert!(ended.contains(why), "{ended}");
    }
}

#[test]
fn a_receiver_that_grants_too_much_ends_its_link() {
    let mut scene = scene(false);
    scene.peer_is_ready(EDGE, BYTES);
    let target = Grant { region: 0, key: 0, offset: 0, len: BYTES };
    scene.say(&Message::Ready { edge: EDGE, immediate: immediate(), target });
    assert!(scene.ended().contains("edge 0 got a second destination"));

    let mut scene = self::scene(false);
    let edge = EdgeId { number: MAX_EDGES, generation: 0 };
    scene.say(&Message::Ready { edge, immediate: immediate(), target });
    assert!(scene.ended().contains("edge 32768 got a destination, of at most 32768 edges"));
}

#[cfg(tensorwire_mutants)]
#[test]
fn each_bug_is_found() {
    use crate::mutants::assert_found;
    assert_found(Mutant::DestinationNotReleased, a_destination_that_is_not_used_is_released);
}
