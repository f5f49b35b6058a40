//! Members meet, in any order and at any time.

use super::*;
use crate::bootstrap::peering::MAX_OFFER;

#[test]
fn two_members_meet_and_both_sides_are_ready_once() {
    let cluster = workers(2);
    let members = linked(&cluster, 2);
    assert_eq!(members[0].peering.told(), [Told::Ready(name("worker", 1), 1)]);
    assert_eq!(members[1].peering.told(), [Told::Ready(name("worker", 0), 1)]);
    for member in &members {
        assert_eq!(member.service.state(), NodeState::Connected);
        member.peering.assert_no_endpoint_is_left();
    }
}

#[test]
fn each_side_learns_the_peers_name_life_and_host_before_it_makes_its_endpoint() {
    let cluster = workers(2);
    let first = options(&cluster, 0);
    let second = BootstrapOptions { host_id: "elsewhere".into(), ..options(&cluster, 1) };
    let (life_of_first, life_of_second) = (first.incarnation, second.incarnation);
    let (first, second) = (Member::start(first), Member::start(second));
    first.join();
    second.join();
    let seen_by_first = first.peering.prepared.lock().unwrap()[0].clone();
    assert_eq!(seen_by_first.name, name("worker", 1));
    assert_eq!(seen_by_first.incarnation, life_of_second);
    assert_eq!(seen_by_first.host_id, "elsewhere");
    let seen_by_second = second.peering.prepared.lock().unwrap()[0].clone();
    assert_eq!(seen_by_second.incarnation, life_of_first);
    assert_eq!(seen_by_second.host_id, "host");
    assert_eq!(first.service.linked(), [seen_by_first]);
}

#[test]
fn the_member_whose_name_sorts_first_starts_and_each_connects_to_the_others_offer() {
    let list = addresses(3);
    let cluster = cluster(&[("ps", &list[..1]), ("worker", &list[1..])]);
    let mut members = Vec::new();
    for (me, _) in cluster.members() {
        let mut options = options(&cluster, 0);
        options.me = me;
        members.push(Member::start(options));
    }
    members.iter().for_each(Member::join);
    let roles = |member: &Member| {
        let mut roles: Vec<_> = member.peering.connected.lock().unwrap().clone();
        roles.sort_by(|a, b| a.0.name.cmp(&b.0.name));
        roles
            .into_iter()
            .map(|(peer, offer, first)| (peer.name.to_string(), offer, first))
            .collect::<Vec<_>>()
    };
    let entry = |peer: &str, me: &str, first| (peer.to_owned(), format!("for {me} generation 1"), first);
    assert_eq!(roles(&members[0]), [entry("worker/0", "ps/0", true), entry("worker/1", "ps/0", true)]);
    assert_eq!(roles(&members[1]), [entry("ps/0", "worker/0", false), entry("worker/1", "worker/0", true)]);
    assert_eq!(roles(&members[2]), [entry("ps/0", "worker/1", false), entry("worker/0", "worker/1", false)]);
}

#[test]
fn a_cluster_of_one_is_connected_at_once() {
    let cluster = workers(1);
    let member = Member::start(options(&cluster, 0));
    assert_eq!(member.service.state(), NodeState::Connected);
    member.service.join(Duration::ZERO).expect("nobody to wait for");
}

#[test]
fn six_members_that_start_at_once_all_meet() {
    let cluster = workers(6);
    let begin = Instant::now();
    let members: Vec<Member> = std::thread::scope(|scope| {
        let cluster = &cluster;
        let start = |task| {
            scope.spawn(move || {
                let member = Member::start(options(cluster, task));
                member.join();
                member
            })
        };
        let threads: Vec<_> = (0..6).map(start).collect();
        threads.into_iter().map(|thread| thread.join().expect("it joins")).collect()
    });
    println!("six members met in {:?}", begin.elapsed());
    for member in &members {
        assert_eq!(member.service.linked().len(), 5);
        member.peering.assert_no_endpoint_is_left();
    }
}

#[test]
fn members_that_start_late_and_in_reverse_order_meet() {
    let cluster = workers(3);
    let mut members = Vec::new();
    for task in [2, 1, 0] {
        members.push(Member::start(options(&cluster, task)));
        std::thread::sleep(Duration::from_millis(150));
    }
    members.iter().for_each(Member::join);
}

#[test]
fn members_meet_over_host_names_and_ipv6() {
    let free =
        |host: &str| TcpListener::bind((host, 0)).map(|listener| listener.local_addr().unwrap().port());
    let Ok(six) = free("::1") else {
        println!("skipped: this host has no IPv6 loopback");
        return;
    };
    let four = free("localhost").unwrap();
    let list = vec![format!("localhost:{four}"), format!("[::1]:{six}")];
    let cluster = cluster(&[("worker", &list)]);
    linked(&cluster, 2);
}

#[test]
fn a_link_that_fails_is_made_again_with_a_new_generation() {
    let cluster = workers(2);
    for failing in [0, 1] {
        let members = [Member::new(options(&cluster, 0)), Member::new(options(&cluster, 1))];
        members[failing].peering.failing.store(2, Ordering::SeqCst);
        for member in &members {
            member.service.start().unwrap();
        }
        members.iter().for_each(Member::join);
        for (member, peer) in members.iter().zip([1, 0]) {
            member.peering.await_ready(&name("worker", peer), 3);
            member.peering.assert_no_endpoint_is_left();
        }
        members.iter().for_each(Member::stop);
    }
}

#[test]
fn a_peering_that_panics_is_a_failure_and_not_the_end() {
    let cluster = workers(2);
    let members = [Member::new(options(&cluster, 0)), Member::new(options(&cluster, 1))];
    for member in &members {
        member.peering.panicking.store(true, Ordering::SeqCst);
        member.service.start().unwrap();
    }
    members.iter().for_each(Member::join);
}

#[test]
fn an_offer_that_is_too_long_fails_by_name_and_the_longest_allowed_one_passes() {
    let cluster = workers(2);
    let members = [Member::new(options(&cluster, 0)), Member::new(options(&cluster, 1))];
    members[1].peering.offer_len.store(MAX_OFFER as u64 + 1, Ordering::SeqCst);
    members[0].peering.offer_len.store(MAX_OFFER as u64, Ordering::SeqCst);
    for member in &members {
        member.service.start().unwrap();
    }
    members[0].await_missing("65537 bytes, at most 65536");
    members[1].await_missing("65537 bytes, at most 65536");
    members[1].peering.offer_len.store(MAX_OFFER as u64, Ordering::SeqCst);
    members.iter().for_each(Member::join);
    for member in &members {
        member.peering.assert_no_endpoint_is_left();
    }
}

#[test]
fn links_of_different_peers_are_made_side_by_side() {
    let cluster = workers(4);
    let members: Vec<Member> = (0..4).map(|task| Member::new(options(&cluster, task))).collect();
    let delay = Duration::from_secs(1);
    let begin = Instant::now();
    for member in &members {
        *member.peering.delay.lock().unwrap() = delay;
        member.service.start().unwrap();
    }
    members.iter().for_each(Member::join);
    println!("four members, {delay:?} for each link: {:?}", begin.elapsed());
    assert!(begin.elapsed() < delay * 3, "each has three links, made one after the other");
}
