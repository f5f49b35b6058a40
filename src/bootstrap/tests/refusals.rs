//! Callers that are refused, and the errors on both sides.

use super::*;

const SHORT: Duration = Duration::from_millis(300);

#[test]
fn a_peer_whose_link_no_poll_has_processed_is_missing_with_that_reason() {
    let cluster = workers(3);
    let member = Member::new(options(&cluster, 0));
    member.service.unready(LONG, &[]).expect("nobody is missing");
    let error = member.service.unready(LONG, &[name("worker", 2)]).expect_err("one is");
    let BootstrapError::Missing { missing, .. } = &error else { panic!("{error}") };
    assert_eq!(missing.iter().map(|peer| &peer.name).collect::<Vec<_>>(), [&name("worker", 2)]);
    let error = error.to_string();
    assert!(error.contains("1 of 2 peers missing") && error.contains("no poll has processed"), "{error}");
}

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

/// The members join, and each join ends at once with a disagreement. Returns the errors.
fn all_disagree(members: &[Member]) -> Vec<String> {
    let since = Instant::now();
    let join = |member: &Member| {
        member.service.start().unwrap();
        let error = member.service.join(LONG).expect_err("they disagree");
        println!("after {:?}: {error}", since.elapsed());
        assert!(matches!(error, BootstrapError::Disagreement { .. }), "{error}");
        error.to_string()
    };
    let errors = std::thread::scope(|scope| {
        let joins: Vec<_> = members.iter().map(|member| scope.spawn(|| join(member))).collect();
        joins.into_iter().map(|join| join.join().unwrap()).collect()
    });
    assert!(since.elapsed() < LONG / 4, "{:?}", since.elapsed());
    assert!(members.iter().all(|member| member.peering.told().is_empty()));
    errors
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
    for newer in [0, 1] {
        let version = |task| PROTOCOL_VERSION + u32::from(task == newer);
        let members = [0, 1].map(|task| Member::speaking(version(task), options(&cluster, task)));
        for (task, error) in all_disagree(&members).iter().enumerate() {
            assert!(error.contains(&format!("can't link with worker/{}", 1 - task)), "{error}");
            for version in [PROTOCOL_VERSION, PROTOCOL_VERSION + 1] {
                assert!(error.contains(&format!("speaks version {version}")), "{error}");
            }
        }
    }
}

#[test]
fn another_cluster_is_refused_and_both_clusters_are_shown_on_both_sides() {
    let list = addresses(3);
    let one = cluster(&[("worker", &list[..2])]);
    let two = cluster(&[("worker", &list)]);
    for (first, second) in [(&one, &two), (&two, &one)] {
        let members = [Member::new(options(first, 0)), Member::new(options(second, 1))];
        for (task, error) in all_disagree(&members).iter().enumerate() {
            assert!(error.contains(&format!("can't link with worker/{}", 1 - task)), "{error}");
            assert!(error.contains("has another cluster"), "{error}");
            assert!(
                error.contains(&format!("\"{one}\"")) && error.contains(&format!("\"{two}\"")),
                "{error}"
            );
        }
    }
}

#[test]
fn a_process_that_no_cluster_but_its_own_has_is_told_so_at_once_and_no_other_join_ends() {
    let list = addresses(3);
    let (one, two) = (cluster(&[("worker", &list[..2])]), cluster(&[("worker", &list)]));
    let stranger = [Member::new(options(&two, 2))];
    let members = [Member::start(options(&one, 0)), Member::start(options(&one, 1))];
    let errors = all_disagree(&stranger);
    assert!(errors[0].contains("worker/2 is not in the cluster of worker/"), "{}", errors[0]);
    members.iter().for_each(Member::join);
}

#[test]
fn a_life_that_agrees_joins_after_one_that_did_not() {
    let cluster = workers(2);
    for fixed in [0, 1] {
        let first = [PROTOCOL_VERSION, PROTOCOL_VERSION + 1];
        let [stays, wrong] =
            [0, 1].map(|k| Member::speaking(first[k], options(&cluster, fixed ^ k as u32 ^ 1)));
        let both = [stays, wrong];
        all_disagree(&both);
        let [stays, wrong] = both;
        wrong.stop();
        let right = Member::start(options(&cluster, fixed));
        right.join();
        let since = Instant::now();
        while stays.service.join(LONG).is_err() {
            assert!(since.elapsed() < LONG, "the earlier disagreement stays");
        }
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
    second.listen();
}

#[test]
fn a_second_process_under_a_taken_name_is_refused_and_is_told_its_own_incarnation_alone() {
    let cluster = workers(3);
    let members = linked(&cluster, 3);
    for task in [0, 1, 2] {
        let mut again = options(&cluster, task);
        again.bind = Some("127.0.0.1:0".parse().unwrap());
        let (first, second) = (members[task as usize].incarnation, again.incarnation);
        let pretender = Member::start(again);
        let error = pretender.await_missing("is taken by");
        println!("{error}");
        let what = format!("the name worker/{task} is taken by another incarnation, which is alive");
        assert!(error.contains(&what) && error.contains(&second.to_string()), "{error}");
        assert!(!error.contains(&first.to_string()), "who knows an incarnation can end it: {error}");
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
    let alone = [Member::new(BootstrapOptions { bind: mixed, ..options(&cluster, 0) })];
    // worker/0 listens where worker/1 should, so it reaches itself there.
    let errors = all_disagree(&alone);
    let said = "worker/0 has reached itself at the address of worker/1";
    assert!(errors[0].contains(said), "{}", errors[0]);
}

#[test]
fn two_that_listen_at_each_others_addresses_are_both_told_at_once() {
    let list = addresses(3);
    let cluster = cluster(&[("worker", &list)]);
    let bound = |task: u32, at: usize| {
        let bind = Some(list[at].parse().unwrap());
        Member::new(BootstrapOptions { bind, ..options(&cluster, task) })
    };
    // worker/1 has the address of worker/2, whom worker/0 and worker/1 look for there.
    let members = [bound(0, 0), bound(1, 2)];
    let errors = all_disagree(&members);
    assert!(errors[0].contains("worker/0 meant to call worker/2 and has reached worker/1"), "{}", errors[0]);
    assert!(errors[1].contains("worker/2"), "{}", errors[1]);
}

#[test]
fn an_address_with_a_name_that_leads_elsewhere_is_tried_again() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let addresses = [free.to_string(), format!("localhost:{}", free.port())];
    let cluster = cluster(&[("worker", &addresses)]);
    let member = Member::start(options(&cluster, 0));
    let error = member.await_missing("worker/0 has reached itself at the address of worker/1");
    println!("{error}");
}

#[test]
fn a_peer_whose_calls_get_no_answer_says_why() {
    let list = addresses(3);
    let cluster = cluster(&[("worker", &list[..2])]);
    let elsewhere = Some(list[2].parse().unwrap());
    let reached = Member::start(options(&cluster, 0));
    let unreached = Member::start(BootstrapOptions { bind: elsewhere, ..options(&cluster, 1) });
    let why = format!("nobody listens at {}", list[1]);
    let said = format!("it is up, and calls between it and this process get no answer; worker/0 says: {why}");
    unreached.await_missing(&said);
    reached.await_missing(&why);
}

#[test]
fn a_peer_that_accepts_no_connections_says_why_in_its_calls() {
    let list = addresses(3);
    let cluster = cluster(&[("worker", &list[..2])]);
    let elsewhere = Some(list[2].parse().unwrap());
    let reached = Member::start(options(&cluster, 0));
    let unreached = Member::start(BootstrapOptions { bind: elsewhere, ..options(&cluster, 1) });
    unreached.service.refused().set_lack(Some("Too many open files".into()));
    let says = "worker/1 says: this process can't accept connections: Too many open files";
    let error = reached.await_missing(says);
    assert!(error.contains(&format!("nobody listens at {}", list[1])), "{error}");
    unreached.service.refused().set_lack(None);
    reached.await_missing_without(says);
}

#[test]
fn the_error_of_a_join_says_why_this_process_accepts_no_connection() {
    let cluster = workers(2);
    let first = Member::start(options(&cluster, 0));
    first.await_missing("nobody listens");
    first.service.refused().set_lack(Some("Too many open files".into()));
    let error = first.missing(Duration::from_millis(20));
    let says = "worker/1 at";
    assert!(error.contains(says), "{error}");
    assert!(error.contains("this process can't accept connections: Too many open files; nobody"), "{error}");
}
