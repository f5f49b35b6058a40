//! The meta-data that both ends of a route remember, by meta-data slot.

use super::standing::{OWNER, roomy, warm};
use super::*;
use crate::wire::MetaSlot;

/// Meta-data with these dimensions and this version.
fn version(version: u32, dims: &[u64]) -> VersionedMeta {
    VersionedMeta { version, ..meta(DType::U8, dims) }
}

impl Scene {
    /// The peer sends the meta-data of a value that it keeps pinned. Returns the grant of the
    /// re-request.
    fn keep(&mut self, request: RequestId, meta: VersionedMeta) -> Grant {
        self.peer.say(&Message::Meta { request, follows: Follows::ReRequest, meta });
        self.nothing_came();
        match Message::decode(&self.peer.next()).expect("a message") {
            Message::ReRequest { grant, request: again } if again == request => grant,
            other => panic!("{other:?}"),
        }
    }

    fn nothing_came(&mut self) {
        let events = self.events();
        assert!(events.is_empty(), "{events:?}");
    }

    /// The peer writes a value of 300 bytes for a standing request and names a meta-data slot.
    /// Returns the dimensions of the tensor.
    fn dims_at(&mut self, place: u32, (request, grant): (RequestId, Option<Grant>), step: u64) -> Vec<u64> {
        let kind = ImmediateKind::PlainAs(MetaSlot::of(place));
        self.peer.write_as(kind, request, grant.expect("granted"), 300, 1);
        self.claim(step, Destination::Alloc);
        match self.event() {
            LinkEvent::Arrived { received: Received::Tensor(tensor), .. } => tensor.shape().dims().to_vec(),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_value_that_was_pinned_does_not_bring_its_old_meta_data_back() {
    let mut scene = warm();
    let seen = scene.post(5, 6);
    let kept = scene.keep(seen.steps[0].0, version(2, &[2000]));
    for (newer, at) in (3..=6).zip(1..) {
        let (request, grant) = seen.steps[at];
        let meta = version(newer, &[300 / u64::from(newer), u64::from(newer)]);
        let bytes = meta.meta.bytes();
        scene.peer.say(&Message::Meta { request, follows: Follows::Write, meta });
        scene.peer.write(request, grant.expect("granted"), bytes, 1);
    }
    scene.peer.write(seen.steps[0].0, kept, 2000, 2);
    scene.nothing_came();
    assert_eq!(scene.dims_at(6, seen.steps[5], 10), [50, 6], "the newest at its place");
    scene.claim(5, Destination::Alloc);
    match scene.event() {
        LinkEvent::Arrived { received: Received::Tensor(tensor), .. } => {
            assert_eq!(tensor.shape().dims(), [2000], "the kept one is what its sender said");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(scene.post(20, 1).meta_version, 6);
}

#[test]
fn meta_data_for_a_cancelled_request_are_remembered() {
    for follows in [Follows::ReRequest, Follows::Write] {
        let mut scene = warm();
        let seen = scene.post(5, 2);
        let request = seen.steps[0].0;
        scene.links.withdraw_standing(scene.link, &key(5), 6, OWNER);
        assert_eq!(Message::decode(&scene.peer.next()), Ok(Message::Cancel { request }));
        scene.peer.say(&Message::Meta { request, follows, meta: version(2, &[60, 5]) });
        scene.peer.say(&Message::CancelAck { request });
        scene.nothing_came();
        assert_eq!(scene.dims_at(2, seen.steps[1], 6), [60, 5], "{follows:?}");
    }
}

#[test]
fn meta_data_of_a_tensor_for_which_there_is_no_room_are_remembered() {
    let mut scene = warm();
    let seen = scene.post(5, 2);
    let request = seen.steps[0].0;
    // A quarter of the pool is less than this, and all of it less than the next.
    for (request, newer, bytes) in [(request, 2, 500_000), (scene.request(), 3, 2_000_000)] {
        scene.peer.say(&Message::Meta {
            request,
            follows: Follows::ReRequest,
            meta: version(newer, &[bytes]),
        });
        scene.nothing_came();
        assert_eq!(Message::decode(&scene.peer.next()), Ok(Message::Cancel { request }));
    }
    let (request, grant) = seen.steps[1];
    let kind = ImmediateKind::PlainAs(MetaSlot::of(3));
    scene.peer.write_as(kind, request, grant.expect("granted"), 1000, 1);
    scene.expect_violation("before a write that was not granted");
}

#[test]
fn meta_data_count_as_told_only_once_they_were_told() {
    let mut scene = roomy();
    scene.peer.route(1, 1, HERE, THERE);
    let grant = {
        let target = scene.peer.pool.tensor(meta(DType::U8, &[1000]).meta).expect("room");
        scene.peer.port.grant(scene.peer.link, target).expect("room")
    };
    let serve = |scene: &mut Scene, peer_request, bytes| {
        let tensor = scene.links.pool().zeroed(meta(DType::U8, &[bytes]).meta).expect("room");
        scene.links.serve(peer_request, Value::Tensor(tensor.freeze()), 1)
    };
    let asked = |scene: &mut Scene| match scene.events().into_iter().find_map(|event| match event {
        LinkEvent::Requested { peer_request, .. } => Some(peer_request),
        _ => None,
    }) {
        Some(peer_request) => peer_request,
        None => panic!("not asked"),
    };
    // Another tensor has the first version.
    scene.peer.ask(5, 1);
    let other = asked(&mut scene);
    assert!(matches!(serve(&mut scene, other, 9), ServeOutcome::Copied));
    assert_eq!(scene.peer.next()[0], 8, "a response");
    // Its value comes after the request has ended. The meta-data was not told, so it counts as
    // unknown.
    let request = scene.peer.ask(0, 1);
    let gone = asked(&mut scene);
    scene.peer.say(&Message::Cancel { request });
    scene.events();
    assert_eq!(Message::decode(&scene.peer.next()), Ok(Message::CancelAck { request }));
    assert!(matches!(serve(&mut scene, gone, 900), ServeOutcome::Gone(_)));
    // Told with the first value, and by its slot from then on.
    for (slot, told) in [(1, true), (2, false)] {
        scene.peer.post(1, 40, &[slot], Some(grant));
        let peer_request = asked(&mut scene);
        assert!(matches!(serve(&mut scene, peer_request, 900), ServeOutcome::Posted));
        let (mut metas, mut kinds) = (0, Vec::new());
        let end = Instant::now() + Duration::from_secs(5);
        while kinds.is_empty() {
            assert!(Instant::now() < end, "nothing was written");
            scene.peer.port.poll(&mut scene.peer.completions);
            for (completion, bytes) in scene.peer.completions.drain() {
                match completion.event {
                    Event::Message(_) => metas += usize::from(messages_in(bytes)[0][0] == 6),
                    Event::Immediate { immediate, .. } => kinds.push(immediate.kind),
                    _ => {}
                }
            }
            scene.peer.completions.clear();
        }
        let kind = if told { ImmediateKind::Plain } else { ImmediateKind::PlainAs(MetaSlot::of(2)) };
        assert_eq!((metas, kinds), (usize::from(told), vec![kind]));
    }
}
