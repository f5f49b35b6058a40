//! Packed messages, from the peer and to it.

use super::*;
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

fn request(slot: u32) -> Message<'static> {
    let request = RequestId { slot: Slot::new(slot).expect("20 bits"), generation: 0 };
    Message::Request(TensorRequest {
        request,
        route: 0,
        step: 1,
        frame: 0,
        iteration: 0,
        meta_version: 0,
        timeout_ms: u32::MAX,
        borrow: false,
        validate: false,
        grant: None,
    })
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
    scene.peer.route(0, 1, HERE, THERE);
    scene.peer.say_bytes(&pack(&[request(2), request(0), request(1)]));
    let slots: Vec<u32> = scene
        .events()
        .into_iter()
        .map(|event| match event {
            LinkEvent::Requested { peer_request, .. } => peer_request.request.slot.index(),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(slots, [2, 0, 1]);
    assert_eq!(scene.count(Counter::MessagesReceived), 4, "each of them is one");
}

#[test]
fn a_pack_that_breaks_its_rules_ends_the_link_and_a_bad_message_in_one_too() {
    let good = pack(&[request(0), request(1)]);
    let nested = [&[17, good.len() as u8][..], &good, &[1, 2]].concat();
    for (bytes, part) in [
        (&good[..good.len() - 1], "and 41 are left"),
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
    scene.peer.say_bytes(&pack(&[request(0), request(1)]));
    scene.expect_violation("between the fragments");
}

#[test]
fn requests_of_a_batch_share_slots_and_one_alone_goes_at_once() {
    let mut scene = scene_with(LinkSettings {
        small_tensor_bytes: 128,
        max_requests: 64,
        max_routes: 4,
        validate: false,
        protocol: TensorProtocol::Requests,
    });
    scene.links.request(scene.link, key(0), Destination::Alloc, u32::MAX, 0).expect("sent");
    let route = scene.peer.next_slot();
    assert!(matches!(messages(&route)[..], [Message::Route { .. }]));
    assert!(
        matches!(messages(&scene.peer.next_slot())[..], [Message::Request(_)]),
        "without waiting for more"
    );
    scene.links.begin_batch();
    for step in 1..=12 {
        scene.links.request(scene.link, key(step), Destination::Alloc, u32::MAX, step as u32).expect("sent");
    }
    assert!(scene.links.next_event().is_none());
    let mut steps = Vec::new();
    let mut slots = 0;
    while steps.len() < 12 {
        let slot = scene.peer.next_slot();
        slots += 1;
        steps.extend(messages(&slot).into_iter().map(|message| match message {
            Message::Request(request) => request.step,
            other => panic!("{other:?}"),
        }));
    }
    assert_eq!(steps, (1..=12).collect::<Vec<_>>());
    // 42 bytes for each message, and one for its length.
    assert_eq!(slots, 12usize.div_ceil((SLOT - 1) / 43));
    assert_eq!((scene.count(Counter::PacksSent), scene.count(Counter::MessagesPacked)), (3, 12));
}

#[test]
fn answers_to_what_came_in_one_poll_share_slots_and_stay_in_order_with_writes() {
    let mut scene = scene();
    scene.peer.route(0, 1, HERE, THERE);
    scene.peer.say_bytes(&pack(&[request(0), request(1), request(2), request(3)]));
    while scene.links.poll() > 0 {}
    // Answered event by event, as the layer above does.
    let mut asked = Vec::new();
    while let Some(event) = scene.links.next_event() {
        let LinkEvent::Requested { peer_request, .. } = event else { panic!("{event:?}") };
        match asked.len() {
            2 => assert!(matches!(scene.links.serve(peer_request, Value::Dead, 2), ServeOutcome::Copied)),
            _ => scene.links.refuse(peer_request, Status::new(Code::NotFound, "no")),
        }
        asked.push(peer_request);
    }
    let first = scene.peer.next_slot();
    assert!(is_packed(&first) && messages(&first).len() == 2, "those before the immediate");
    let last = scene.peer.next_slot();
    assert!(matches!(messages(&last)[..], [Message::Error { .. }]), "what is alone behind it is no pack");
}
