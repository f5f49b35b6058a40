//! Offered tensors, and what a peer may answer.

use super::*;
use crate::fabric::LinkFailure;
use crate::telemetry::Gauge;
use crate::wire::Slot;

const BYTES: u64 = 1000;

impl Scene {
    /// Offers a tensor to the peer. Returns the name of the offer.
    fn offer(&mut self) -> u32 {
        let mut tensor = self.pool.zeroed(meta(BYTES)).expect("room");
        tensor.bytes_mut().fill(9);
        let value = Value::Tensor(tensor.freeze());
        let record = Record { edge: EDGE, n: 1, step: 1, answers_need: false, value };
        self.links.window_to_receiver(self.link, ToReceiver::Record(record));
        let told = self.heard(|message| matches!(message, Message::Meta(_)));
        assert!(told, "the record comes without its meta-data");
        self.heard(|message| match message {
            Message::Record { value: RecordValue::Offer { offer, .. }, .. } => *offer,
            other => panic!("no offer: {other:?}"),
        })
    }

    /// The peer grants a destination of so many bytes.
    fn granted(&mut self, bytes: u64) -> Grant {
        let target = self.peer_pool.zeroed(meta(bytes)).expect("room");
        self.peer.grant(self.peer_link, target).expect("a grant")
    }

    /// The record of an offer that the peer makes, and the destination that this side grants.
    fn landing(&mut self) -> (Immediate, Grant) {
        self.tell_meta(BYTES);
        self.say(&record(RecordValue::Offer { meta: 1, offer: 5 }));
        let event = (0..10_000).find_map(|_| {
            self.links.poll();
            self.links.next_window()
        });
        let Some((_, WindowEvent::ToReceiver(ToReceiver::Record(record)))) = event else {
            panic!("no record: {event:?}");
        };
        let WindowArrival::Offered(offered) = record.value else { panic!("{record:?}") };
        let target = self.pool.landing(&offered.told.meta).expect("room");
        let landing = self.links.land(self.link, offered.offer, target).expect("reached");
        let (immediate, grant) = self.heard(|message| match message {
            Message::Grant { offer: 5, immediate, target } => (*immediate, *target),
            other => panic!("no grant: {other:?}"),
        });
        assert_eq!(landing, immediate);
        (immediate, grant)
    }

    /// The tensors that have left, or are lost, since the last call.
    fn sent(&mut self) -> usize {
        for _ in 0..1000 {
            self.links.poll();
            while self.links.next_event().is_some() {}
        }
        let events = std::iter::from_fn(|| self.links.next_window());
        events.filter(|(_, event)| matches!(event, WindowEvent::Sent)).count()
    }
}

#[test]
fn a_destination_beyond_the_longest_grant_is_refused() {
    for (max_grant, is_granted) in [(BYTES - 1, false), (BYTES, true)] {
        let mut scene = scene_with(SimOptions { lends: false, max_grant, ..SimOptions::default() });
        let target = scene.pool.zeroed(meta(BYTES)).expect("room");
        match scene.links.land(scene.link, 5, target) {
            Ok(_) => assert!(is_granted),
            Err((why, _)) => {
                assert!(!is_granted && why == LandingRefused::TooLong { limit: max_grant }, "{why:?}");
            }
        }
    }
}

fn plain(slot: u32, generation: u8) -> Immediate {
    let slot = Slot::new(slot).expect("20 bits");
    Immediate { generation, slot }
}

#[test]
fn an_offered_tensor_is_written_to_the_destination_that_is_granted() {
    let mut scene = scene(false);
    let (offer, target) = (scene.offer(), scene.granted(BYTES));
    let immediate = plain(3, 7);
    scene.say(&Message::Grant { offer, immediate, target });
    for _ in 0..1000 {
        scene.links.poll();
        scene.hear();
    }
    assert_eq!(scene.written, [(immediate, BYTES)]);
    let landed = scene.peer.revoke(scene.peer_link, &target).expect("granted");
    assert_eq!(landed.bytes(), [9; BYTES as usize]);
}

#[test]
fn an_offered_tensor_is_sent_once_it_is_written_declined_or_lost() {
    let grant = |scene: &mut Scene, offer| {
        let target = scene.granted(BYTES);
        scene.say(&Message::Grant { offer, immediate: plain(0, 1), target });
    };
    let decline = |scene: &mut Scene, offer| scene.say(&Message::Decline { offer });
    let lose = |scene: &mut Scene, _| scene.links.fail(scene.link, LinkFailure::Closed);
    let lose_granted = move |scene: &mut Scene, offer| {
        grant(scene, offer);
        lose(scene, offer);
    };
    type End<'a> = &'a dyn Fn(&mut Scene, u32);
    let ends: [End<'_>; 4] = [&grant, &decline, &lose, &lose_granted];
    for (nth, end) in ends.into_iter().enumerate() {
        let mut scene = scene(false);
        let offer = scene.offer();
        assert_eq!(scene.sent(), 0, "it is only offered");
        end(&mut scene, offer);
        assert_eq!(scene.sent(), 1, "end {nth}");
    }
}

#[test]
fn a_tensor_that_must_be_lent_or_sent_is_not_offered() {
    for (lends, bytes) in [(true, BYTES), (false, 0)] {
        let mut scene = scene(lends);
        scene.tell_meta(bytes);
        scene.say(&record(RecordValue::Offer { meta: 1, offer: 5 }));
        assert!(scene.ended().contains("which it must lend or send"));
    }
}

#[test]
fn a_declined_tensor_is_freed() {
    let mut scene = scene(false);
    let offer = scene.offer();
    assert!(!scene.pool.is_empty());
    scene.say(&Message::Decline { offer });
    (0..1000).for_each(|_| _ = scene.links.poll());
    assert!(scene.pool.is_empty(), "the tensor is kept");
}

#[test]
fn an_answer_that_fits_no_offer_ends_the_link() {
    let mut scene = scene(false);
    scene.say(&Message::Decline { offer: 3 });
    assert!(scene.ended().contains("offer 3, which was not made or is answered"));

    let mut scene = self::scene(false);
    let (offer, target) = (scene.offer(), scene.granted(BYTES));
    for _ in 0..2 {
        scene.say(&Message::Grant { offer, immediate: plain(0, 1), target });
    }
    assert!(scene.ended().contains(&format!("offer {offer}, which was not made or is answered")));

    for bytes in [BYTES - 1, BYTES + 1] {
        let mut scene = self::scene(false);
        let (offer, target) = (scene.offer(), scene.granted(bytes));
        scene.say(&Message::Grant { offer, immediate: plain(0, 1), target });
        assert!(
            scene.ended().contains(&format!("a destination of {bytes} bytes came for a tensor of {BYTES}"))
        );
    }
}

#[test]
fn a_tensor_lands_in_its_destination() {
    let mut scene = scene(false);
    let (immediate, grant) = scene.landing();
    scene.write(BYTES, &grant, immediate);
    let event = (0..10_000).find_map(|_| {
        scene.links.poll();
        scene.links.next_window()
    });
    let Some((_, WindowEvent::Landed(landed, tensor))) = event else { panic!("{event:?}") };
    assert_eq!((landed, tensor.bytes()), (immediate, &[7; BYTES as usize][..]));
}

#[test]
fn granted_bytes_are_counted_until_they_are_written_or_the_link_ends() {
    let write = |scene: &mut Scene, immediate, grant: &Grant| scene.write(BYTES, grant, immediate);
    let lose = |scene: &mut Scene, _, _: &Grant| scene.links.fail(scene.link, LinkFailure::Closed);
    type End<'a> = &'a dyn Fn(&mut Scene, Immediate, &Grant);
    let ends: [End<'_>; 2] = [&write, &lose];
    for end in ends {
        let mut scene = scene(false);
        let (immediate, grant) = scene.landing();
        let counters = scene.links.counters().counters();
        assert_eq!(counters.gauge(Gauge::GrantedBytes), BYTES);
        assert_eq!(scene.links.most_granted().map(|(_, bytes)| bytes), Some(BYTES));
        end(&mut scene, immediate, &grant);
        scene.sent();
        assert_eq!(counters.gauge(Gauge::GrantedBytes), 0);
        assert_eq!(scene.links.most_granted(), None);
    }
}

#[test]
fn a_write_of_another_length_ends_the_link() {
    let mut scene = scene(false);
    let (immediate, grant) = scene.landing();
    scene.write(BYTES - 1, &grant, immediate);
    assert!(scene.ended().contains("a write of 999 bytes came for a tensor of 1000"));
}

#[test]
fn an_immediate_without_a_destination_ends_the_link() {
    type Change = fn(Immediate) -> Immediate;
    let others: [(Change, &str); 2] = [
        (|own| Immediate { generation: own.generation + 1, ..own }, "which is not granted"),
        (
            |own| Immediate { slot: Slot::new(own.slot.index() + 1).expect("few"), ..own },
            "which is not granted",
        ),
    ];
    for (change, why) in others {
        let mut scene = scene(false);
        let (immediate, grant) = scene.landing();
        scene.write(BYTES, &grant, change(immediate));
        let ended = scene.ended();
        assert!(ended.contains(why), "{ended}");
    }
}

#[cfg(tensorwire_mutants)]
#[test]
fn each_bug_is_found() {
    use crate::mutants::assert_found;
    assert_found(Mutant::PartLanded, a_write_of_another_length_ends_the_link);
    assert_found(Mutant::OutstandingLeak, an_offered_tensor_is_sent_once_it_is_written_declined_or_lost);
}
