//! The state of the peers, without network and clock.

use super::*;
use crate::bootstrap::peer_record::{GENERATION_PAUSE, PAST_LIVES};
use crate::wire::Code;

const SILENCE: Duration = Duration::from_secs(5);

fn table() -> PeerTable {
    PeerTable::new([TaskId::new("worker", 1).unwrap()], SILENCE, "here".into(), false)
}

fn life(number: u64) -> PeerIdentity {
    PeerIdentity { incarnation: Incarnation::new(number).unwrap(), host_id: "here".into() }
}

fn endpoint(ticket: u64) -> Result<Prepared, Status> {
    Ok(Prepared { ticket, offer: vec![7] })
}

/// Brings the only peer up in life 1 and generation 1.
fn linked(now: Instant) -> (PeerTable, PeerInfo) {
    let mut members = table();
    members.meet(0, &life(1), true, now).unwrap();
    let info = members.start(0, life(1).incarnation, now).unwrap();
    members.prepared(0, &info, endpoint(5)).0.unwrap();
    members.idle(0);
    assert_eq!(members.connecting(0, &info), Some(5));
    members.connected(0, &info, 5, Ok(())).0.unwrap();
    members.idle(0);
    assert!(members.link_if_both_ready(0, &info).is_empty(), "the peer has said nothing yet");
    let (progress, acts) = members.said_ready(0, info.incarnation, 1);
    assert_eq!((progress, acts), (HandshakeProgress::Connected, vec![PeerEvent::Ready(info.clone(), 5)]));
    assert!(members.all_linked());
    (members, info)
}

#[test]
fn a_link_is_up_whichever_side_is_ready_first() {
    let now = Instant::now();
    linked(now);
    let mut members = table();
    members.meet(0, &life(1), false, now).unwrap();
    let (OfferDecision::Start(info), acts) = members.offered(0, life(1).incarnation, 4, b"x", now) else {
        panic!()
    };
    assert!(acts.is_empty() && info.generation == 4);
    members.prepared(0, &info, endpoint(5)).0.unwrap();
    members.idle(0);
    members.connecting(0, &info).unwrap();
    assert_eq!(members.said_ready(0, info.incarnation, 4).0, HandshakeProgress::Connecting);
    members.connected(0, &info, 5, Ok(())).0.unwrap();
    assert_eq!(members.link_if_both_ready(0, &info), [PeerEvent::Ready(info.clone(), 5)]);
    assert!(members.link_if_both_ready(0, &info).is_empty(), "once");
}

#[test]
fn silence_counts_from_the_last_sign_of_life() {
    let start = Instant::now();
    let (mut members, info) = linked(start);
    members.heard(0, info.incarnation, start + SILENCE / 2).unwrap();
    assert!(members.silent(0, start + SILENCE).is_empty());
    let acts = members.silent(0, start + SILENCE / 2 + SILENCE);
    assert_eq!(acts, [PeerEvent::Lost(info.clone(), LossCause::Silent { after: SILENCE, bound: SILENCE })]);
    assert!(members.silent(0, start + SILENCE * 9).is_empty(), "lost only once");
    assert!(!members.all_linked());
}

#[test]
fn a_linked_life_whose_calls_are_not_answered_is_held_for_silent_at_the_bound_and_not_before() {
    let start = Instant::now();
    let (mut members, info) = linked(start);
    let just_before = start + SILENCE - Duration::from_nanos(1);
    for now in [start + SILENCE / 2, just_before] {
        assert!(members.unanswered(0, now).is_empty() && members.silent(0, now).is_empty());
        assert!(members.all_linked());
    }
    // A linked peer that falls silent is lost as a link, not as a peer that was never there.
    assert!(members.unanswered(0, start + SILENCE).is_empty());
    let acts = members.silent(0, start + SILENCE);
    assert_eq!(acts, [PeerEvent::Lost(info, LossCause::Silent { after: SILENCE, bound: SILENCE })]);
    assert!(members.unanswered(0, start + SILENCE * 9).is_empty(), "told only once");
}

#[test]
fn a_life_held_for_dead_may_come_back_with_a_new_generation_until_another_one_takes_its_name() {
    let start = Instant::now();
    let (mut members, info) = linked(start);
    members.silent(0, start + SILENCE);
    assert_eq!(members.heard(0, info.incarnation, start + SILENCE), Err(LifeRefusal::Unknown));
    members.meet(0, &life(1), false, start + SILENCE).unwrap();
    assert_eq!(members.start(0, info.incarnation, start + SILENCE).unwrap().generation, 2);
    members.idle(0);
    members.meet(0, &life(2), false, start + SILENCE * 2).unwrap();
    assert_eq!(members.meet(0, &life(1), false, start + SILENCE * 2), Err(LifeRefusal::Over));
    assert_eq!(members.heard(0, info.incarnation, start + SILENCE * 2), Err(LifeRefusal::Over));
}

#[test]
fn whoever_answers_at_the_address_owns_the_name_and_whoever_only_calls_does_not() {
    let now = Instant::now();
    let (mut members, info) = linked(now);
    assert_eq!(members.meet(0, &life(2), false, now), Err(LifeRefusal::Taken { alive: info.incarnation }));
    assert_eq!(
        members.heard(0, life(2).incarnation, now),
        Err(LifeRefusal::Taken { alive: info.incarnation })
    );
    let acts = members.meet(0, &life(2), true, now).unwrap();
    assert_eq!(acts, [PeerEvent::Lost(info, LossCause::replaced(life(2).incarnation))]);
}

#[test]
fn a_late_answer_of_a_life_does_not_end_one_that_was_met_after_the_call_began() {
    let now = Instant::now();
    let (old, new) = (life(1), life(2));
    for before in [None, Some(life(3))] {
        let mut members = table();
        if let Some(before) = &before {
            members.meet(0, before, true, now).unwrap();
        }
        let (known, later) = (members.present(0), now + SILENCE);
        members.meet(0, &new, false, later).unwrap();
        assert_eq!(members.meet_by_answer(0, &old, known, later), Err(LifeRefusal::Late));
        assert_eq!(members.present(0), Some(new.incarnation));
        members.meet_by_answer(0, &new, known, later).unwrap();
        // An answer to a later call decides.
        members.meet_by_answer(0, &old, members.present(0), later).unwrap();
        assert_eq!(members.present(0), Some(old.incarnation));
    }
}

#[test]
fn a_disagreement_ends_all_attempts_with_that_life_and_the_first_cause_is_kept() {
    let now = Instant::now();
    let mut members = table();
    members.meet(0, &life(1), true, now).unwrap();
    // The peer's attempt failed before it made an offer.
    members.give_up(0, life(1).incarnation, 1, "it has no descriptors");
    assert!(members.why_missing(0).contains("it has no descriptors"));
    let info = members.start(0, life(1).incarnation, now).unwrap();
    let refusal = Status::new(Code::FailedPrecondition, "queue_depth is 64 and 128");
    assert!(members.prepared(0, &info, Err(refusal)).0.is_err());
    members.idle(0);
    members.give_up(0, life(1).incarnation, info.generation, "a later word of the peer");
    assert_eq!(members.disagreement(), Some((0, "queue_depth is 64 and 128")));
    assert!(members.why_missing(0).contains("queue_depth is 64 and 128"), "{}", members.why_missing(0));
    assert_eq!(members.start(0, life(1).incarnation, now + GENERATION_PAUSE), None, "nothing mends it");
    members.over(0, life(1).incarnation, &LossCause::Left("it gave up its join".into()));
    assert!(members.disagreement().is_some(), "a join that has not looked yet still sees it");
    members.meet(0, &life(2), true, now).unwrap();
    assert!(
        members.disagreement().is_none()
            && members.start(0, life(2).incarnation, now + GENERATION_PAUSE).is_some()
    );
}

#[test]
fn a_process_that_disagrees_does_not_hide_a_life_that_is_alive() {
    let now = Instant::now();
    let (mut members, info) = linked(now);
    let other = Some(life(2).incarnation);
    members.disagree_unmet(0, other, "version 3", now);
    members.disagree_unmet(0, None, "version 3", now);
    assert_eq!(members.disagreement(), None, "the peer is linked");
    members.give_up(0, info.incarnation, info.generation, "cut");
    members.disagree_unmet(0, other, "version 3", now + SILENCE / 2);
    assert_eq!(members.disagreement(), None, "the life that had the link is alive");
    // It falls silent, another process has its name, and then it is there again.
    members.disagree_unmet(0, other, "version 3", now + SILENCE);
    members.disagree_unmet(0, None, "a later word", now + SILENCE);
    assert_eq!(members.disagreement(), Some((0, "version 3")));
    members.meet(0, &life(1), false, now + SILENCE).unwrap();
    assert_eq!(members.disagreement(), None);
    assert!(members.start(0, life(1).incarnation, now + SILENCE).is_some());
}

#[test]
fn nothing_new_starts_while_a_thread_still_works_for_the_old() {
    let now = Instant::now();
    let mut members = table();
    members.meet(0, &life(1), false, now).unwrap();
    let (OfferDecision::Start(info), _) = members.offered(0, life(1).incarnation, 1, b"x", now) else {
        panic!()
    };
    assert_eq!(members.offered(0, info.incarnation, 1, b"x", now).0, OfferDecision::Wait);
    // Not refused: a refusal would hide why the first one failed.
    assert_eq!(members.offered(0, info.incarnation, 2, b"x", now).0, OfferDecision::Wait);
    assert!(members.give_up(0, info.incarnation, 1, "changed my mind").is_empty(), "no ticket yet");
    assert_eq!(members.start(0, info.incarnation, now + GENERATION_PAUSE), None);
    let (late, acts) = members.prepared(0, &info, endpoint(5));
    assert!(late.unwrap_err().contains("changed my mind"));
    assert_eq!(acts, [PeerEvent::Abandon(info.clone(), 5)], "the late endpoint is given up");
    members.idle(0);
    assert_eq!(members.start(0, info.incarnation, now + GENERATION_PAUSE).unwrap().generation, 2);
}

#[test]
fn an_endpoint_is_given_up_exactly_once_wherever_its_generation_ends() {
    let now = Instant::now();
    for end in 0..4 {
        let mut members = table();
        members.meet(0, &life(1), false, now).unwrap();
        let info = members.start(0, life(1).incarnation, now).unwrap();
        let abandon = vec![PeerEvent::Abandon(info.clone(), 5)];
        if end == 0 {
            assert!(members.close().is_empty());
            assert_eq!(members.prepared(0, &info, endpoint(5)).1, abandon);
            continue;
        }
        members.prepared(0, &info, endpoint(5)).0.unwrap();
        if end == 1 {
            assert_eq!(members.close(), abandon);
            assert_eq!(members.connecting(0, &info), None);
            continue;
        }
        members.connecting(0, &info).unwrap();
        if end == 2 {
            assert!(members.close().is_empty());
            assert_eq!(members.connected(0, &info, 5, Ok(())).1, abandon);
            continue;
        }
        members.connected(0, &info, 5, Ok(())).0.unwrap();
        let left = LossCause::Left("bye".into());
        let gone = [PeerEvent::Abandon(info.clone(), 5), PeerEvent::Gone(info.clone(), left.clone())];
        assert_eq!(members.over(0, info.incarnation, &left), gone);
        assert!(members.close().is_empty());
    }
}

/// What an ended link leaves behind takes seconds to go.
#[test]
fn a_peer_that_starts_generations_without_a_pause_waits() {
    let begin = Instant::now();
    let mut members = table();
    members.meet(0, &life(1), false, begin).unwrap();
    let mut started = 0;
    for millis in 0..1000_u64 {
        let now = begin + Duration::from_millis(millis);
        match members.offered(0, life(1).incarnation, started + 1, b"x", now).0 {
            OfferDecision::Start(_) => started += 1,
            decision => assert_eq!(decision, OfferDecision::Wait),
        }
        members.idle(0);
    }
    assert_eq!(started, 20);
}

/// The peer makes each link, and ends it at once.
#[test]
fn a_peer_that_ends_each_link_has_few_made_by_this_side() {
    let begin = Instant::now();
    let mut members = table();
    members.meet(0, &life(1), true, begin).unwrap();
    let mut started = 0;
    for millis in 0..1000_u64 {
        let now = begin + Duration::from_millis(millis);
        if let Some(info) = members.start(0, life(1).incarnation, now) {
            started += 1;
            assert_eq!(info.generation, started);
            members.give_up(0, info.incarnation, info.generation, "enough");
        }
        members.idle(0);
    }
    assert_eq!(started, 20);
}

#[test]
fn a_failed_endpoint_is_remembered_for_whoever_asks_about_its_generation() {
    let now = Instant::now();
    let mut members = table();
    members.meet(0, &life(1), false, now).unwrap();
    let (OfferDecision::Start(info), _) = members.offered(0, life(1).incarnation, 1, b"x", now) else {
        panic!()
    };
    members.prepared(0, &info, Err(Status::new(Code::ResourceExhausted, "no memory"))).0.unwrap_err();
    members.idle(0);
    let (OfferDecision::Refused(why), _) = members.offered(0, info.incarnation, 1, b"x", now) else {
        panic!()
    };
    assert!(why.contains("no memory"), "{why}");
    assert!(members.why_missing(0).contains("no memory"));
}

#[test]
fn an_address_where_nothing_listens_any_more_does_not_hide_the_cause_before() {
    let mut members = table();
    members.note(0, Some("it is not proven to be worker/1".into()), false);
    for _ in 0..2 {
        members.note_end(0, "nobody listens there".into());
        let why = members.why_missing(0);
        assert_eq!(why, "it is not proven to be worker/1; since then: nobody listens there");
    }
    members.note(0, Some("it never answered".into()), false);
    assert_eq!(members.why_missing(0), "it never answered");
    members.note(0, None, true);
    members.note_end(0, "nobody listens there".into());
    assert_eq!(members.why_missing(0), "nobody listens there");
}

#[test]
fn what_a_life_says_of_its_calls_is_shown_until_they_get_an_answer_and_ends_with_it() {
    let (mut members, now) = (table(), Instant::now());
    let (says, waits) = ("says: no descriptors", "still being made");
    members.meet(0, &life(1), true, now).unwrap();
    members.note_says(0, life(2).incarnation, "another life".into());
    assert!(members.why_missing(0).contains(waits));
    members.note_says(0, life(1).incarnation, "no descriptors".into());
    assert!(members.why_missing(0).contains(says));
    members.note_says(0, life(1).incarnation, String::new());
    assert!(members.why_missing(0).contains(waits));
    members.note_says(0, life(1).incarnation, "no descriptors".into());
    members.note(0, Some("it never answered".into()), false);
    assert_eq!(members.why_missing(0), "it never answered; worker/1 says: no descriptors");
    members.note(0, None, true);
    members.meet(0, &life(2), true, now).unwrap();
    assert!(members.why_missing(0).contains(waits));
}

#[test]
fn a_peer_that_is_refused_again_and_again_is_logged_once_in_a_while() {
    let (mut members, begin) = (table(), Instant::now());
    let at = |seconds| begin + Duration::from_secs(seconds);
    assert!(members.note_refusal(0, "version 7".into(), false, at(0)));
    assert!(!members.note_refusal(0, "version 7".into(), false, at(1)));
    assert!(!members.note_refusal(0, "version 8".into(), false, at(9)), "a new reason each time");
    assert!(members.why_missing(0).contains("version 8"));
    assert!(members.note_refusal(0, "version 9".into(), false, at(10)));
    // A disagreement is one line, whichever side finds it, and in whichever words.
    assert!(members.note_refusal(0, "another cluster".into(), true, at(11)));
    assert!(!members.note_refusal(0, "another cluster, which is this".into(), true, at(60)));
    assert!(!members.is_new_disagreement(0, at(60)));
    assert!(members.is_news(0, "the cable is cut", at(61)) && members.is_new_disagreement(0, at(61)));
}

#[test]
fn attempts_that_fail_in_other_words_each_time_are_logged_a_few_times_in_a_while() {
    let (mut members, begin) = (table(), Instant::now());
    let mut logged = 0;
    for tenth in 0..1000_u64 {
        let (why, now) = (format!("word {tenth}"), begin + Duration::from_millis(100 * tenth));
        logged += usize::from(members.is_news(0, &why, now));
        assert!(!members.is_news(0, &why, now), "each at most once");
    }
    assert_eq!(logged, 4 * 10, "four in ten seconds");
    let end = begin + Duration::from_secs(100);
    assert!(members.is_new_disagreement(0, end), "it is not hidden by others");
    assert!(!members.is_news(0, "another word", end));
    let (later, same) = (begin + Duration::from_secs(200), "word 963");
    assert!(members.is_news(0, "the cable is cut", later) && members.is_news(0, same, later));
}

#[test]
fn only_the_last_lives_are_remembered_so_that_memory_is_bounded() {
    let now = Instant::now();
    let mut members = table();
    for number in 1..=PAST_LIVES as u64 + 2 {
        members.meet(0, &life(number), true, now).unwrap();
    }
    assert_eq!(members.peers[0].past.len(), PAST_LIVES);
    assert_eq!(members.meet(0, &life(2), false, now), Err(LifeRefusal::Over));
}

/// A life of the peer spends the last generation, and the next life links as if it was the first.
#[test]
fn generations_are_counted_for_each_pair_of_lives() {
    let now = Instant::now();
    let mut members = table();
    members.meet(0, &life(1), false, now).unwrap();
    let mut later = now;
    let mut offered = |members: &mut PeerTable, number, generation| {
        later += GENERATION_PAUSE;
        members.offered(0, life(number).incarnation, generation, b"x", later).0
    };
    let OfferDecision::Refused(why) = offered(&mut members, 1, MAX_GENERATION + 1) else { panic!() };
    assert!(why.contains("too high"), "{why}");
    // An offer may come after others that this side has not seen.
    assert!(matches!(offered(&mut members, 1, 1000), OfferDecision::Start(_)));
    members.idle(0);
    assert!(matches!(offered(&mut members, 1, MAX_GENERATION), OfferDecision::Start(_)));
    members.idle(0);
    members.give_up(0, life(1).incarnation, MAX_GENERATION, "enough");
    assert_eq!(members.start(0, life(1).incarnation, now + SILENCE), None, "that life has none left");
    members.meet(0, &life(2), true, now).unwrap();
    let OfferDecision::Start(info) = offered(&mut members, 2, 1) else { panic!() };
    assert_eq!((info.generation, info.number), (1, MAX_GENERATION + 1), "a link's number grows for ever");
    members.idle(0);
    members.meet(0, &life(3), true, now).unwrap();
    let info = members.start(0, life(3).incarnation, now + SILENCE).unwrap();
    assert_eq!((info.generation, info.number), (1, MAX_GENERATION + 2));
    assert_eq!(members.report(0, info.number, "it is not up"), None);
}
