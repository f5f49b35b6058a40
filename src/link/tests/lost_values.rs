//! Values that wait in the queue of a link when the link is lost.

use super::*;

#[test]
fn a_value_that_never_left_is_done_when_its_link_is_lost() {
    let mut scene = scene();
    scene.peer.route(1, 1, HERE, THERE);
    let request = scene.peer.ask(0, 1);
    let LinkEvent::Requested { peer_request, .. } = scene.event() else { panic!("not asked") };
    let tensor = scene.links.pool().zeroed(meta(DType::U8, &[1000]).meta).expect("room").freeze();
    assert!(matches!(scene.links.serve(peer_request, Value::Tensor(tensor), 7), ServeOutcome::Pinned));
    // An answer that uses up the credits, so that the value behind it waits.
    scene.peer.ask(1, 1);
    let LinkEvent::Requested { peer_request, .. } = scene.event() else { panic!("not asked") };
    scene.links.refuse(peer_request, Status::new(Code::Internal, "x".repeat(5000)));
    let grant = Grant { region: 0, key: 0, offset: 0, len: 1000 };
    scene.peer.say(&Message::ReRequest { request, grant });
    let done = |events: &[LinkEvent<u32>]| {
        events.iter().filter(|event| matches!(event, LinkEvent::SendComplete)).count()
    };
    assert_eq!(done(&scene.events()), 0, "the value waits");
    scene.peer.say_bytes(&[255; 8]);
    let events = scene.events();
    assert_eq!(done(&events), 1, "{events:?}");
    assert!(matches!(events.last(), Some(LinkEvent::Down { .. })), "{events:?}");
}

#[cfg(tensorwire_mutants)]
#[test]
fn each_bug_is_found() {
    use crate::mutants::{Mutant, assert_found};
    assert_found(Mutant::OutstandingLeak, a_value_that_never_left_is_done_when_its_link_is_lost);
}
