//! Packed messages, from the peer and to it.

use super::*;
use crate::link::windows::WindowEvent;
use crate::wire::message::pack::Pack;

const SLOT: usize = crate::fabric::MAX_MESSAGE;

fn pack(messages: &[Message<'_>]) -> Vec<u8> {
    let mut pack = Pack::new(SLOT);
    for message in messages {
        let mut bytes = Vec::new();
        message.encode(&mut bytes);
        pack.push(&bytes);
    }
    pack.bytes().to_vec()
}

fn retired(number: u32) -> Message<'static> {
    Message::Retired { edge: edge(number) }
}

/// The messages in a slot.
fn messages(slot: &[u8]) -> Vec<Message<'_>> {
    let decode = |bytes| Message::decode(bytes).expect("a message");
    match is_packed(slot) {
        true => unpack(slot).expect("a pack").map(decode).collect(),
        false => vec![decode(slot)],
    }
}

#[test]
fn a_pack_is_its_messages_in_their_order() {
    let mut scene = scene();
    scene.peer.say_bytes(&pack(&[retired(2), retired(0), retired(1)]));
    scene.events();
    let numbers: Vec<u32> = std::iter::from_fn(|| scene.links.next_window())
        .map(|(_, event)| match event {
            WindowEvent::ToReceiver(ToReceiver::Retired { edge }) => edge.number,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(numbers, [2, 0, 1]);
    assert_eq!(scene.count(Counter::MessagesReceived), 3, "each of them is one");
}

#[test]
fn a_pack_that_is_longer_than_a_message_of_all_fabrics_is_refused() {
    let mut scene = scene();
    let mut long = vec![17];
    while long.len() <= SLOT {
        long.extend([5, 12, 1, 0, 0, 0]);
    }
    let (link, mut cx) = scene.links.with(scene.link).expect("up");
    let why = link.on_packed(&mut cx, &long).expect_err("too long");
    assert!(why.contains("of at most 224"), "{why}");
}

#[test]
fn a_pack_that_breaks_its_rules_ends_the_link_and_a_bad_message_in_one_too() {
    let good = pack(&[retired(0), retired(1)]);
    let nested = [&[17, good.len() as u8][..], &good, &[1, 2]].concat();
    for (bytes, part) in [
        (&good[..good.len() - 1], "and 6 are left"),
        (&nested, "is of type 17, which is never packed"),
        (&[17, 2, 12, 1, 1, 2], "is of type 12, which is never packed"),
        (&[17, 0, 0], "is of type 0"),
        (&[17], "a pack of 0 messages"),
        (&[17, 1, 2], "a pack of 1 messages"),
        (&[17, 1, 99, 1, 99], "messages of type 99"),
    ] {
        let mut scene = scene();
        scene.peer.say_bytes(bytes);
        scene.expect_violation(part);
    }
}

#[test]
fn a_pack_between_fragments_ends_the_link() {
    let mut scene = scene();
    scene.peer.say_bytes(&[12, 1, 9, 0, 0, 0, 1]);
    scene.peer.say_bytes(&pack(&[retired(0), retired(1)]));
    scene.expect_violation("between the fragments");
}

#[test]
fn messages_of_a_batch_share_slots_and_one_alone_goes_at_once() {
    let mut scene = scene();
    scene.tell(ToReceiver::Retired { edge: edge(0) });
    assert_eq!(messages(&scene.peer.next_slot()), [retired(0)], "without waiting for more");
    scene.links.begin_batch();
    for number in 1..=60 {
        scene.links.window_to_receiver(scene.link, ToReceiver::Retired { edge: edge(number) });
    }
    assert!(scene.links.next_event().is_none());
    let (mut numbers, mut slots) = (Vec::new(), 0);
    while numbers.len() < 60 {
        let slot = scene.peer.next_slot();
        slots += 1;
        numbers.extend(messages(&slot).into_iter().map(|message| match message {
            Message::Retired { edge } => edge.number,
            other => panic!("{other:?}"),
        }));
    }
    assert_eq!(numbers, (1..=60).collect::<Vec<_>>());
    // 7 bytes for each message, and one for its length.
    assert_eq!(slots, 60usize.div_ceil((SLOT - 1) / 8));
    assert_eq!((scene.count(Counter::PacksSent), scene.count(Counter::MessagesPacked)), (3, 60));
}
