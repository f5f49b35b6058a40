//! Callers that are refused, and the errors on both sides.

use super::*;

const SHORT: Duration = Duration::from_millis(300);

#[test]
fn a_join_that_times_out_names_who_is_missing_and_that_nobody_listens() {
    let cluster = workers(4);
    let members = [Member::start(options(&cluster, 1)), Member::start(options(&cluster, 2))];
    members[0].service.join(SHORT).expect_err("two are missing");
    let error = members[0].missing(SHORT);
    println!("{error}");
    assert!(error.contains("worker/1 (incarnation "), "{error}");
    assert!(error.contains("2 of 3 peers missing"), "{error}");
    for task in [0, 3] {
        let peer = name("worker", task);
        let address = address(&cluster, "worker", task);
        assert!(error.contains(&format!("{peer} at {address}: nobody listens at {address}")), "{error}");
    }
    assert!(!error.contains("worker/2"), "{error}");
}

#[test]
fn a_join_can_be_repeated_after_it_timed_out() {
    let cluster = workers(2);
    let first = Member::start(options(&cluster, 0));
    first.missing(Duration::from_millis(50));
    let second = Member::start(options(&cluster, 1));
    first.join();
    second.join();
}

#[test]
fn a_peer_that_accepts_and_never_answers_is_told_apart() {
    let cluster = workers(2);
    let mute = TcpListener::bind(address(&cluster, "worker", 1)).unwrap();
    let member = Member::start(options(&cluster, 0));
    let error = member.await_missing("never answered within");
    println!("{error}");
    drop(mute);
}

#[test]
fn a_peer_whose_link_fails_is_missing_with_the_fabrics_words_on_both_sides() {
    let cluster = workers(2);
    let members = [Member::new(options(&cluster, 0)), Member::new(options(&cluster, 1))];
    members[0].peering.failing.store(u32::MAX, Ordering::SeqCst);
    for member in &members {
        member.service.start().unwrap();
    }
    for member in &members {
        let error = member.await_missing("its link failed: ");
        println!("{error}");
        assert!(error.contains("the cable is cut"), "{error}");
    }
}

/// The members join. The one that sees the disagreement stops at once, if it is told to.
fn both_disagree(sees: usize, stops: bool) {
    let cluster = workers(2);
    let members = [Member::new(options(&cluster, 0)), Member::new(options(&cluster, 1))];
    members[sees].peering.disagrees.store(true, Ordering::SeqCst);
    let since = Instant::now();
    std::thread::scope(|scope| {
        for (number, member) in members.iter().enumerate() {
            scope.spawn(move || {
                member.service.start().unwrap();
                let error = member.service.join(LONG).expect_err("they disagree");
                println!("{error}");
                assert!(matches!(error, BootstrapError::Disagreement { .. }), "{error}");
                assert!(error.to_string().contains("queue_depth is 64 and 128"), "{error}");
                if stops && number == sees {
                    member.stop();
                }
            });
        }
    });
    assert!(since.elapsed() < Duration::from_secs(5), "{:?}", since.elapsed());
    members.iter().for_each(Member::stop);
    members.iter().for_each(|member| member.peering.assert_no_endpoint_is_left());
}

#[test]
fn a_disagreement_that_one_side_sees_ends_the_joins_of_both() {
    for sees in [0, 1] {
        for stops in [false, true] {
            both_disagree(sees, stops);
        }
    }
}

#[test]
fn another_version_of_the_protocol_is_refused_with_both_versions_on_both_sides() {
    let cluster = workers(2);
    let newer = Member::speaking(PROTOCOL_VERSION + 1, options(&cluster, 1));
    newer.service.start().unwrap();
    let older = Member::start(options(&cluster, 0));
    for member in [&older, &newer] {
        let error = member.await_missing(&format!("speaks version {PROTOCOL_VERSION}"));
        println!("{error}");
        assert!(error.contains(&format!("speaks version {}", PROTOCOL_VERSION + 1)), "{error}");
        assert!(member.peering.told().is_empty());
    }
}

#[test]
fn another_cluster_is_refused_and_both_clusters_are_shown_on_both_sides() {
    let list = addresses(3);
    let one = cluster(&[("worker", &list[..2])]);
    let two = cluster(&[("worker", &list)]);
    let members = [Member::start(options(&one, 0)), Member::start(options(&two, 1))];
    for member in &members {
        let error = member.await_missing("has another cluster");
        println!("{error}");
        assert!(error.contains(&format!("\"{one}\"")) && error.contains(&format!("\"{two}\"")), "{error}");
        assert!(member.peering.told().is_empty());
    }
}

#[test]
fn a_second_process_at_the_same_address_cannot_start() {
    let cluster = workers(2);
    let first = Member::start(options(&cluster, 0));
    let second = Member::new(options(&cluster, 0));
    let error = second.service.start().expect_err("taken").to_string();
    println!("{error}");
    let address = address(&cluster, "worker", 0);
    assert!(error.contains(&format!("worker/0 can't listen on {address}")), "{error}");
    assert!(error.contains("is another one running under this name"), "{error}");
    assert_eq!(second.service.state(), NodeState::Created);
    drop(first);
    second.service.start().expect("the address is free at once");
}

#[test]
fn a_second_process_under_a_taken_name_is_refused_with_both_incarnations() {
    let cluster = workers(3);
    let members = linked(&cluster, 3);
    for task in [0, 1, 2] {
        let mut again = options(&cluster, task);
        again.bind = Some("127.0.0.1:0".parse().unwrap());
        let (first, second) = (members[task as usize].incarnation, again.incarnation);
        let pretender = Member::start(again);
        let error = pretender.await_missing("is taken by");
        println!("{error}");
        let what = format!("the name worker/{task} is taken by incarnation {first}");
        assert!(error.contains(&what) && error.contains(&second.to_string()), "{error}");
        assert!(pretender.peering.told().is_empty());
        pretender.stop();
    }
    for member in &members {
        assert_eq!(member.service.state(), NodeState::Connected, "the first ones are left alone");
        assert_eq!(member.peering.told().len(), 2);
    }
}

#[test]
fn addresses_that_were_mixed_up_are_named() {
    let list = addresses(2);
    let cluster = cluster(&[("worker", &list)]);
    let mixed = Some(list[1].parse().unwrap());
    let alone = Member::start(BootstrapOptions { bind: mixed, ..options(&cluster, 0) });
    // worker/0 listens where worker/1 should, so it reaches itself there.
    let error = alone.await_missing("worker/0 has reached itself at the address of worker/1");
    println!("{error}");
}
