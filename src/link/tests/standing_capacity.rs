//! Standing requests without room, at either end.

use super::standing::{OWNER, roomy, warm};
use super::*;
use crate::memory::Tensor;

/// The refusal of a sender that is at its limit.
fn too_many() -> Status {
    Status::new(Code::Unavailable, "as many as it takes")
}

/// Allocates the rest of the pool.
fn fill(scene: &Scene) -> Vec<Tensor> {
    let rest = |bytes| {
        let meta = meta(DType::U8, &[bytes]).meta;
        std::iter::from_fn(move || scene.links.pool().zeroed(meta.clone()).ok())
    };
    [1 << 16, 1 << 12, 1].into_iter().flat_map(rest).map(|tensor| tensor.freeze()).collect()
}

#[test]
fn tensors_beyond_the_share_of_standing_requests_go_back_in_line() {
    let mut scene = warm();
    let seen = scene.post(5, 3);
    // A quarter of the pool of 1 MiB has room for one such tensor.
    let large = |version| VersionedMeta { version, ..meta(DType::U8, &[200_000]) };
    let says = |request| Message::Meta { request, follows: Follows::ReRequest, meta: large(2) };
    scene.peer.say(&says(seen.steps[0].0));
    assert!(scene.events().is_empty());
    assert!(matches!(Message::decode(&scene.peer.next()), Ok(Message::ReRequest { .. })));
    let request = seen.steps[1].0;
    scene.peer.say(&says(request));
    assert!(scene.events().is_empty());
    assert_eq!(Message::decode(&scene.peer.next()), Ok(Message::Cancel { request }));
    let load = scene.links.load();
    assert_eq!((load.standing, load.requests, load.unresolved), (2, 3, 1));
    assert!(scene.links.pool().stats().allocated < 300_000, "{:?}", scene.links.pool().stats());
    // A receive of that step sends a plain request, once the standing one is resolved.
    scene.links.request(scene.link, key(6), Destination::Alloc, u32::MAX, 6).expect("blocked");
    scene.peer.say(&Message::CancelAck { request });
    assert!(scene.events().is_empty());
    assert!(
        matches!(Message::decode(&scene.peer.next()), Ok(Message::Request(request)) if request.step == 6)
    );
    // A claimed request does not count.
    scene.claim(7, Destination::Alloc);
    scene.peer.say(&says(seen.steps[2].0));
    assert!(scene.events().is_empty());
    assert!(matches!(Message::decode(&scene.peer.next()), Ok(Message::ReRequest { .. })));
    scene.links.withdraw_standing(scene.link, &key(0), 100, OWNER);
    assert_eq!(scene.links.load().standing, 0);
    // The share is whole again.
    assert_eq!(scene.post_standing(50, 1), 1);
}

#[test]
fn a_claim_with_a_tensor_takes_no_other_memory() {
    let mut scene = roomy();
    assert_eq!(scene.post_standing(5, 2), 2);
    let seen = scene.peer.standing();
    let given =
        |scene: &Scene, bytes| scene.links.pool().zeroed(meta(DType::U8, &[bytes]).meta).expect("room");
    let (small, large) = (given(&scene, 100), given(&scene, 1000));
    let places = [small.as_ptr(), large.as_ptr()];
    scene.claim(5, Destination::Into(small));
    scene.claim(6, Destination::Into(large));
    let _rest = fill(&scene);
    let known = MetaRef::New(meta(DType::U8, &[100]));
    scene.peer.say(&Message::Response { request: seen.steps[0].0, meta: known, data: &[5; 100] });
    let request = seen.steps[1].0;
    let larger = VersionedMeta { version: 2, ..meta(DType::U8, &[1000]) };
    scene.peer.say(&Message::Meta { request, follows: Follows::ReRequest, meta: larger });
    let into = |event| match event {
        LinkEvent::Arrived { waiter, received: Received::Into(filled), .. } => {
            assert!(filled.bytes().iter().all(|byte| u32::from(*byte) == waiter));
            filled.as_ptr()
        }
        other => panic!("{other:?}"),
    };
    assert_eq!(into(scene.event()), places[0]);
    let grant = match Message::decode(&scene.peer.next()).expect("a message") {
        Message::ReRequest { grant, .. } => grant,
        other => panic!("{other:?}"),
    };
    scene.peer.write(request, grant, 1000, 6);
    assert_eq!(into(scene.event()), places[1]);
}

#[test]
fn a_refused_standing_request_is_sent_again_by_the_receive() {
    let mut scene = warm();
    let seen = scene.post(5, 4);
    scene.claim(5, Destination::Alloc);
    let into = scene.links.pool().zeroed(meta(DType::U8, &[1000]).meta).expect("room");
    scene.claim(6, Destination::Into(into));
    for (request, _) in &seen.steps {
        scene.peer.say(&Message::Error { request: *request, status: too_many() });
    }
    assert!(scene.events().is_empty(), "nobody is told");
    // Claimed requests are sent again under their ids. Unclaimed ones are forgotten.
    for (at, step) in [(0, 5), (1, 6)] {
        match Message::decode(&scene.peer.next()).expect("a message") {
            Message::Request(asked) => {
                assert_eq!((asked.request, asked.step, asked.meta_version), (seen.steps[at].0, step, 1));
                scene.peer.write(asked.request, asked.grant.expect("granted"), 1000, step as u8);
            }
            other => panic!("{other:?}"),
        }
    }
    let events = scene.events();
    assert!(matches!(&events[0], LinkEvent::Arrived { waiter: 5, received: Received::Tensor(_), .. }));
    assert!(matches!(&events[1], LinkEvent::Arrived { waiter: 6, received: Received::Into(_), .. }));
    assert_eq!((scene.links.load().standing, scene.links.load().requests), (0, 0));
    scene.links.request(scene.link, key(7), Destination::Alloc, u32::MAX, 7).expect("sent");
    assert!(
        matches!(Message::decode(&scene.peer.next()), Ok(Message::Request(request)) if request.step == 7)
    );
    // As many as the sender accepted.
    assert!(scene.post_standing(20, 8) < 4);
}

#[test]
fn a_refusal_meets_a_cancel_quietly() {
    let mut scene = warm();
    let request = scene.post(5, 1).steps[0].0;
    scene.links.withdraw_standing(scene.link, &key(0), 100, OWNER);
    assert_eq!(Message::decode(&scene.peer.next()), Ok(Message::Cancel { request }));
    scene.peer.say(&Message::Error { request, status: too_many() });
    scene.peer.say(&Message::CancelAck { request });
    assert!(scene.events().is_empty());
    assert_eq!((scene.links.load().requests, scene.links.load().unresolved), (0, 0));
}

#[test]
fn an_error_of_another_kind_is_for_the_claim_of_its_step() {
    let mut scene = warm();
    let seen = scene.post(5, 2);
    for (at, status) in
        [Status::new(Code::ResourceExhausted, "too long"), too_many().into_derived()].into_iter().enumerate()
    {
        scene.peer.say(&Message::Error { request: seen.steps[at].0, status });
    }
    assert!(scene.events().is_empty());
    for step in [5, 6] {
        scene.claim(step, Destination::Alloc);
        assert!(matches!(scene.event(), LinkEvent::Failed { error: RequestError::Remote(_), .. }));
    }
}
