//! Lives that end before this side has reached them at their address.

use super::protocol::Raw;
use super::*;
use crate::bootstrap::peer_record::{LifeRefusal, PeerIdentity};
use crate::bootstrap::peer_table::{LOOK_ROUND, MUTE, PeerEvent, PeerTable};

/// The pauses between two attempts to reach a peer are at most half a second.
const KNOWN: Duration = Duration::from_millis(2500);

#[test]
fn a_life_that_dies_after_its_hello_is_told_before_it_was_ever_reached() {
    // The survivor starts the link, or waits for the other to start it.
    for (survivor, victim) in [(0, 1), (1, 0)] {
        let cluster = workers(2);
        let member = Member::start(options(&cluster, survivor));
        let mut raw = Raw::proving(&cluster, 7, name("worker", victim), name("worker", survivor));
        raw.hello().unwrap();
        let died = Instant::now();
        drop(raw);
        let cause = member.peering.await_told(|told| match told {
            Told::Gone(_, cause) => Some(cause.clone()),
            _ => None,
        });
        let took = died.elapsed();
        println!("worker/{victim} died: known after {took:?}: {cause}");
        assert!(matches!(&cause, LossCause::Died(why) if why.contains("nobody listens")), "{cause}");
        assert!(took < KNOWN * 5, "{took:?}");
        let error = member.missing(Duration::from_millis(20));
        assert!(error.contains(&format!("worker/{victim} at")), "{error}");
        assert!(error.contains("it was lost (its process has ended"), "{error}");
    }
}

#[test]
fn a_life_that_dies_while_it_starts_a_link_is_told_before_it_was_ever_reached() {
    let cluster = workers(2);
    let member = Member::start(options(&cluster, 1));
    let mut raw = Raw::new(&cluster, 7);
    raw.hello().unwrap();
    raw.offer(1, "generation 1").unwrap();
    let died = Instant::now();
    drop(raw);
    member.peering.await_told(|told| matches!(told, Told::Gone(_, LossCause::Died(_))).then_some(()));
    println!("known after {:?}", died.elapsed());
    assert!(died.elapsed() < KNOWN * 5);
    member.peering.assert_no_endpoint_is_left();
}

#[test]
fn a_life_that_calls_lives_although_nobody_listens_at_its_address() {
    let now = Instant::now();
    let after = |time: Duration| now + time;
    let mut members = PeerTable::new([name("worker", 1)], Duration::from_secs(60), "host".into(), false);
    let who = PeerIdentity { incarnation: Incarnation::new(1).unwrap(), host_id: "host".into() };
    assert!(members.unattended(0, "nobody", now).is_empty(), "nobody has called");
    members.meet(0, &who, false, now).unwrap();
    let almost = MUTE - Duration::from_nanos(1);
    assert!(members.unattended(0, "nobody", after(almost)).is_empty());
    members.meet(0, &who, false, after(almost)).unwrap();
    assert!(members.unattended(0, "nobody", after(MUTE)).is_empty(), "it has called again");
    let events = members.unattended(0, "nobody", after(almost + MUTE));
    assert!(matches!(&events[..], [PeerEvent::Gone(_, LossCause::Died(_))]), "{events:?}");
    assert!(members.unattended(0, "nobody", after(2 * MUTE)).is_empty(), "once");
    assert_eq!(members.meet(0, &who, false, after(2 * MUTE)), Err(LifeRefusal::Over));
}

#[test]
fn a_peer_that_has_listened_before_and_refuses_calls_has_ended() {
    for have_met in [false, true] {
        let (mut members, now) = (
            PeerTable::new([name("worker", 1)], Duration::from_secs(60), "host".into(), have_met),
            Instant::now(),
        );
        // It has called, and not answered.
        let who = PeerIdentity { incarnation: Incarnation::new(7).unwrap(), host_id: "host".into() };
        members.meet(0, &who, false, now).unwrap();
        let told = members.unattended(0, "refused", now);
        assert_eq!(told.len(), usize::from(have_met), "{told:?}");
        assert!(members.ended().next().is_none(), "its end is told");
        let mut members =
            PeerTable::new([name("worker", 1)], Duration::from_secs(60), "host".into(), have_met);
        assert!(members.unattended(0, "refused", now).is_empty());
        assert_eq!(members.ended().collect::<Vec<_>>(), Vec::from_iter(have_met.then_some((0, "refused"))));
        assert_eq!([now, now + LOOK_ROUND].map(|now| members.has_ended(now)), [false, have_met]);
    }
}
