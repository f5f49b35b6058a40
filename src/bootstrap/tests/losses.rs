//! Peers leave, die, fall silent, come back, and lose single links.

use super::super::acceptor::ProvenCaller;
use super::super::generated as grpc;
use super::super::generated::bootstrap_server::Bootstrap;
use super::super::server::Server;
use super::super::shared::{BootstrapShared, ServicePhase, task};
use super::*;
use crate::bootstrap::peer_record::{LifeRefusal, PeerIdentity};
use crate::bootstrap::peer_table::{PeerEvent, PeerTable};
use std::future::poll_fn;
use std::task::Poll;

#[test]
fn a_peer_that_stops_is_lost_at_once_in_its_own_words() {
    let cluster = workers(3);
    let members = linked(&cluster, 3);
    let begin = Instant::now();
    members[1].service.stop("training is done", LONG).unwrap();
    for other in [&members[0], &members[2]] {
        let loss = other.peering.await_loss();
        assert_eq!(loss, (name("worker", 1), LossCause::Left("training is done".into())));
        assert_eq!(other.service.state(), NodeState::Started);
        let error = other.await_missing("worker/1 at");
        assert!(error.contains("it was lost (training is done)"), "{error}");
    }
    println!("told after {:?}", begin.elapsed());
    assert!(!members[1].peering.told().iter().any(|told| matches!(told, Told::Lost(..))));
}

#[test]
fn a_peer_that_dies_without_a_word_is_lost_with_the_next_heartbeat() {
    let cluster = workers(2);
    let heartbeat = Duration::from_millis(200);
    let quick = |task| BootstrapOptions { heartbeat, ..options(&cluster, task) };
    for (victim, survivor) in [(1, 0), (0, 1)] {
        let members = [Member::start(quick(0)), Member::start(quick(1))];
        members.iter().for_each(Member::join);
        let begin = Instant::now();
        members[victim].service.kill();
        let (who, cause) = members[survivor].peering.await_loss();
        let took = begin.elapsed();
        println!("heartbeats each {heartbeat:?}: lost after {took:?}: {cause}");
        assert_eq!(who, name("worker", victim as u32));
        assert!(matches!(cause, LossCause::Died(_)), "{cause}");
        assert!(took < heartbeat * 5, "{took:?}");
    }
}

#[test]
fn a_linked_peer_that_is_up_is_never_lost() {
    let cluster = workers(2);
    let quick = |task| BootstrapOptions {
        heartbeat: Duration::from_millis(20),
        silence: Duration::from_millis(1500),
        ..options(&cluster, task)
    };
    let members = [Member::start(quick(0)), Member::start(quick(1))];
    members.iter().for_each(Member::join);
    std::thread::sleep(Duration::from_millis(2000));
    for member in &members {
        assert_eq!(member.peering.told().len(), 1, "{:?}", member.peering.told());
    }
}

#[test]
fn a_peer_that_died_and_came_back_is_linked_again_as_a_new_life() {
    let cluster = workers(2);
    for victim in [0usize, 1] {
        // No heartbeat may find the address empty.
        let heartbeat = Duration::from_secs(1);
        let calm = |task| Member::start(BootstrapOptions { heartbeat, ..options(&cluster, task) });
        let mut members = vec![calm(0), calm(1)];
        members.iter().for_each(Member::join);
        members[victim].service.kill();
        let survivor = members.swap_remove(1 - victim);
        let again = Member::start(options(&cluster, victim as u32));
        // Well before the silence: the new life answers at the old one's address.
        let (who, cause) = survivor.peering.await_loss();
        assert_eq!(who, name("worker", victim as u32));
        assert_eq!(cause, LossCause::replaced(again.incarnation));
        survivor.join();
        again.join();
        again.peering.await_ready(&name("worker", 1 - victim as u32), 1);
        let link = &survivor.service.linked()[0];
        assert_eq!((link.incarnation, link.generation, link.number), (again.incarnation, 1, 2));
        survivor.stop();
        again.stop();
    }
}

#[test]
fn a_peer_that_left_and_came_back_is_linked_again() {
    let cluster = workers(2);
    let members = linked(&cluster, 2);
    members[0].stop();
    assert!(matches!(members[1].peering.await_loss().1, LossCause::Left(_)));
    let again = Member::start(options(&cluster, 0));
    again.join();
    members[1].join();
    let link = &members[1].service.linked()[0];
    assert_eq!((link.incarnation, link.generation, link.number), (again.incarnation, 1, 2));
}

#[test]
fn an_old_incarnation_does_not_come_back() {
    let cluster = workers(2);
    let members = linked(&cluster, 2);
    members[1].stop();
    members[0].peering.await_loss();
    let stale = BootstrapOptions { incarnation: members[1].incarnation, ..options(&cluster, 1) };
    let stale = Member::start(stale);
    let error = stale.await_missing("is over");
    println!("{error}");
    assert!(error.contains(&members[1].incarnation.to_string()), "{error}");
    assert!(stale.peering.told().is_empty());
    assert_eq!(members[0].peering.told().len(), 2, "ready and lost, and no more");
}

#[test]
fn a_link_that_is_reported_dead_is_lost_for_the_peer_and_made_again() {
    let cluster = workers(2);
    for reporter in [0usize, 1] {
        let members = linked(&cluster, 2);
        let peer = name("worker", 1 - reporter as u32);
        assert!(members[reporter].service.report_lost(&peer, 1, "its queue is broken"));
        assert!(!members[reporter].service.report_lost(&peer, 1, "again"), "it is not up any more");
        let (who, cause) = members[1 - reporter].peering.await_loss();
        assert_eq!(who, name("worker", reporter as u32));
        assert_eq!(cause, LossCause::Closed(format!("{who} says: its queue is broken")));
        members[reporter].peering.await_ready(&peer, 2);
        members[1 - reporter].peering.await_ready(&who, 2);
        let losses = members[reporter].peering.told();
        assert!(!losses.iter().any(|told| matches!(told, Told::Lost(..))), "it knew: {losses:?}");
        assert!(!members[reporter].service.report_lost(&peer, 1, "old"), "an old generation is left alone");
        assert!(!members[reporter].service.report_lost(&name("worker", 9), 1, "nobody"));
        members.iter().for_each(Member::stop);
    }
}

#[test]
fn a_life_that_dies_before_it_is_linked_is_told_at_once_and_named_by_the_join() {
    let cluster = workers(2);
    for victim in [0usize, 1] {
        let members: Vec<Member> = (0..2).map(|task| Member::new(options(&cluster, task))).collect();
        // Both have met and neither link can come up.
        members.iter().for_each(|member| member.peering.failing.store(u32::MAX, Ordering::SeqCst));
        members.iter().for_each(|member| member.service.start().expect("it starts"));
        let survivor = &members[1 - victim];
        survivor.await_missing("the cable is cut");
        let killed = Instant::now();
        members[victim].service.kill();
        let (who, cause) = survivor.peering.await_told(|told| match told {
            Told::Gone(name, cause) => Some((name.clone(), cause.clone())),
            _ => None,
        });
        let took = killed.elapsed();
        println!("known after {took:?}: {cause}");
        assert_eq!(who, name("worker", victim as u32));
        assert!(matches!(&cause, LossCause::Died(why) if why.contains("nobody listens")), "{cause}");
        assert!(took < Duration::from_millis(500) * 5, "pauses are 500 ms at most: {took:?}");
        let error = survivor.await_missing("its process has ended");
        assert!(error.contains(&format!("worker/{victim} at")), "{error}");
        assert!(!survivor.peering.told().iter().any(|told| matches!(told, Told::Lost(..))), "no link was up");
    }
}

#[test]
fn a_life_that_dies_while_its_link_is_made_is_told_although_the_attempt_goes_on() {
    // The survivor may still connect, or wait for the other to say that it has.
    std::thread::scope(|scope| {
        for (victim, slow) in [(0, 1), (1, 0), (0, 0), (1, 1)] {
            scope.spawn(move || a_life_dies_while_its_link_is_made(victim, slow));
        }
    });
}

fn a_life_dies_while_its_link_is_made(victim: usize, slow: usize) {
    let cluster = workers(2);
    let members: Vec<Member> = (0..2).map(|task| Member::new(options(&cluster, task))).collect();
    let survivor = &members[1 - victim];
    *members[slow].peering.delay.lock().unwrap() = Duration::from_secs(4);
    members.iter().for_each(|member| member.service.start().expect("it starts"));
    let begin = Instant::now();
    while survivor.peering.connected.lock().unwrap().is_empty() {
        assert!(begin.elapsed() < LONG);
        std::thread::yield_now();
    }
    let killed = Instant::now();
    members[victim].service.kill();
    let cause = survivor.peering.await_told(|told| match told {
        Told::Gone(_, cause) => Some(cause.clone()),
        _ => None,
    });
    let took = killed.elapsed();
    println!("worker/{victim} died, worker/{slow} connects: known after {took:?}: {cause}");
    assert!(matches!(cause, LossCause::Died(_)), "{cause}");
    assert!(took < Duration::from_millis(500) * 5, "looks are 500 ms apart: {took:?}");
    let again = Member::start(options(&cluster, victim as u32));
    survivor.join();
    again.join();
    survivor.stop();
    survivor.peering.assert_no_endpoint_is_left();
}

#[test]
fn a_life_that_falls_silent_before_it_is_linked_is_told_after_the_bound() {
    let now = Instant::now();
    let mut members = PeerTable::new([name("worker", 1)], Duration::from_secs(5), "here".into(), false);
    let who = PeerIdentity { incarnation: Incarnation::new(1).unwrap(), host_id: "here".into() };
    assert!(members.unattended(0, "nobody", now).is_empty(), "nobody was ever there");
    members.meet(0, &who, false, now).unwrap();
    assert!(members.unattended(0, "nobody", now).is_empty(), "it has only called: its address may be wrong");
    assert!(members.unanswered(0, now + Duration::from_secs(4)).is_empty());
    let acts = members.unanswered(0, now + Duration::from_secs(5));
    let after = Duration::from_secs(5);
    assert!(
        matches!(&acts[..], [PeerEvent::Gone(_, LossCause::Silent { after: told, .. })] if *told == after)
    );
    assert!(members.unanswered(0, now + Duration::from_secs(9)).is_empty(), "once");
    members.meet(0, &who, true, now + Duration::from_secs(10)).unwrap();
    assert!(members.start(0, who.incarnation, now + Duration::from_secs(10)).is_some(), "it may come back");
    let acts = members.unattended(0, "nobody", now);
    members.idle(0);
    assert!(matches!(&acts[..], [PeerEvent::Gone(_, LossCause::Died(_))]), "{acts:?}");
    assert_eq!(members.meet(0, &who, true, now), Err(LifeRefusal::Over), "the dead stay dead");
}

#[test]
fn a_refusal_from_another_host_ends_no_life_for_good() {
    let now = Instant::now();
    for have_met in [false, true] {
        let mut members =
            PeerTable::new([name("worker", 1)], Duration::from_secs(5), "here".into(), have_met);
        let who = PeerIdentity { incarnation: Incarnation::new(1).unwrap(), host_id: "there".into() };
        members.meet(0, &who, true, now).unwrap();
        let acts = members.unattended(0, "refused", now);
        assert!(matches!(&acts[..], [PeerEvent::Gone(_, LossCause::Died(_))]), "{acts:?}");
        assert!(members.unattended(0, "refused", now).is_empty(), "once");
        assert_eq!(members.ended().count(), usize::from(have_met), "a join need not wait for it");
        // It still calls, so a link that it makes does not end because calls to it are refused.
        members.meet(0, &who, false, now).unwrap();
        assert!(members.is_met(0));
        assert_eq!(members.ended().count(), 0);
        assert!(members.unattended(0, "refused", now).is_empty());
        // The firewall lets calls through again, such as heartbeats.
        members.answered(0, who.incarnation, now).unwrap();
        assert_eq!(members.unattended(0, "refused", now).len(), 1);
    }
}

/// Three members of which none looks at another for a long time.
fn three_that_look_seldom() -> [Member; 3] {
    let cluster = workers(3);
    let seldom = |task| BootstrapOptions { heartbeat: LONG, silence: 3 * LONG, ..options(&cluster, task) };
    let members = [0, 1, 2].map(|task| Member::start(seldom(task)));
    members.iter().for_each(Member::join);
    members
}

#[test]
fn who_leaves_because_of_a_death_is_told_after_the_dead() {
    let [first, second, dead] = three_that_look_seldom();
    dead.service.kill();
    let lost = Some(name("worker", 2));
    first.service.stop_after_loss("it stopped, as peer worker/2 was lost", lost, LONG).unwrap();
    let is_loss = |told: &Told| match told {
        Told::Lost(name, cause) => Some((name.clone(), cause.clone())),
        _ => None,
    };
    second.peering.await_told(|told| is_loss(told).filter(|(peer, _)| *peer == name("worker", 0)));
    let losses: Vec<_> = second.peering.told().iter().filter_map(is_loss).collect();
    let [(one, died), (other, left)] = &losses[..] else { panic!("{losses:?}") };
    assert_eq!((one, other), (&name("worker", 2), &name("worker", 0)));
    assert!(matches!(died, LossCause::Died(_)) && matches!(left, LossCause::Left(_)), "{losses:?}");
}

#[test]
fn who_leaves_because_of_a_death_that_is_none_ends_its_own_link_alone() {
    let [first, second, third] = three_that_look_seldom();
    let (begin, lost) = (Instant::now(), Some(name("worker", 2)));
    first.service.stop_after_loss("it stopped, as peer worker/2 was lost", lost, LONG).unwrap();
    assert_eq!(second.peering.await_loss().0, name("worker", 0));
    assert!(begin.elapsed() < LONG / 4, "{:?}", begin.elapsed());
    let names: Vec<TaskId> = second.service.linked().into_iter().map(|peer| peer.name).collect();
    assert_eq!(names, [name("worker", 2)]);
    assert_eq!(third.peering.await_loss().0, name("worker", 0));
}

/// Each call waits for the end of the member that it names, who lives.
#[test]
fn however_often_a_member_leaves_and_hangs_up_one_task_looks_for_its_cause() {
    let (cluster, life) = (workers(3), Incarnation::new(7).unwrap());
    let options = options(&cluster, 1);
    let (me, incarnation) = (options.me.clone(), options.incarnation);
    let shared = BootstrapShared::new(options, PROTOCOL_VERSION, Arc::new(Pretender::default()));
    let shared = Arc::new(shared);
    shared.advance(&[ServicePhase::Created], ServicePhase::Started);
    let met = PeerIdentity { incarnation: life, host_id: "host".into() };
    shared.step(|members| {
        let mut meet = |peer| members.meet(peer, &met, false, Instant::now()).expect("a new life");
        ((), [meet(0), meet(1)].into_iter().flatten().collect())
    });
    let server = Server::new(shared.clone());
    let leave = || {
        let mut request = tonic::Request::new(grpc::LeaveRequest {
            caller: Some(grpc::Caller {
                version: PROTOCOL_VERSION,
                cluster_digest: cluster.digest(),
                from: Some(task(&name("worker", 0))),
                incarnation: life.get(),
                to: Some(task(&me)),
                to_incarnation: incarnation.get(),
            }),
            reason: "it was lost".into(),
            because_of: Some(task(&name("worker", 2))),
        });
        request.extensions_mut().insert(Arc::new(ProvenCaller::new(name("worker", 0), LONG)));
        server.leave(request)
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        for _ in 0..50 {
            let mut call = leave();
            let waits = poll_fn(|context| Poll::Ready(call.as_mut().poll(context).is_pending())).await;
            assert!(waits, "the end of its cause is waited for");
            drop(call);
            tokio::task::yield_now().await;
        }
        assert_eq!(runtime.metrics().num_alive_tasks(), 1);
        // It ends, and so does the life.
        leave().await.expect("heard");
        assert!(!shared.see(|members| members.is_met(0)) && shared.see(|members| members.is_met(1)));
        tokio::task::yield_now().await;
        assert_eq!(runtime.metrics().num_alive_tasks(), 0);
    });
}
