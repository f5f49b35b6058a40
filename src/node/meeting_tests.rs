//! Members that meet, as threads of one process.

use super::*;
use crate::config::Builder;
use crate::store::MemoryStore;
use std::ffi::OsString;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, Ordering};

const LONG: &str = "20s";

/// A free port below those that the kernel chooses, of which other tests take many.
pub(in crate::node) fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let port = 10_000 + (std::process::id() * 131 + NEXT.fetch_add(1, Ordering::Relaxed)) % 20_000;
        if TcpListener::bind(("127.0.0.1", port as u16)).is_ok() {
            return port as u16;
        }
    }
}

/// Waits until a port is free, a second at most. A child that another test starts has the sockets
/// of this process until its exec.
fn await_free(port: &str) {
    let began = Instant::now();
    while TcpListener::bind(format!("127.0.0.1:{port}")).is_err() && began.elapsed().as_secs() < 1 {
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn variables(pairs: &[(&str, &str)]) -> Vec<(OsString, OsString)> {
    pairs.iter().map(|(name, value)| (OsString::from(name), OsString::from(value))).collect()
}

/// A member as torchrun starts it.
fn member(rank: u32, size: u32, more: &[(&str, &str)], timeout: &str) -> Builder {
    member_of(("RANK", "WORLD_SIZE"), (rank, size), more, timeout)
}

/// A member as the launcher starts it that sets these variables to the rank and the size.
fn member_of(names: (&str, &str), (rank, size): (u32, u32), more: &[(&str, &str)], timeout: &str) -> Builder {
    let (rank, size) = (rank.to_string(), size.to_string());
    let own = [(names.0, &*rank), (names.1, &*size), ("TENSORWIRE_POOL_SIZE", "4MiB")];
    let own = [&own[..], &[("TENSORWIRE_JOIN_TIMEOUT", timeout)], more].concat();
    Builder::default().environment(variables(&own))
}

fn join_all(builders: Vec<Builder>) -> Vec<Result<String, String>> {
    // Nobody leaves before all have joined.
    let joined = Arc::new(Barrier::new(builders.len()));
    let run = |builder: Builder| {
        let joined = joined.clone();
        std::thread::spawn(move || {
            let node = builder.start().map_err(|error| error.to_string())?;
            node.join().map_err(|error| error.to_string())?;
            joined.wait();
            let seen = format!("{} of {}", node.task(), node.peers().len() + 1);
            node.stop().map_err(|error| error.to_string())?;
            Ok(seen)
        })
    };
    builders.into_iter().map(run).collect::<Vec<_>>().into_iter().map(|it| it.join().unwrap()).collect()
}

fn good(job: &str, size: u32) -> Vec<Result<String, String>> {
    (0..size).map(|task| Ok(format!("{job}/{task} of {size}"))).collect()
}

#[test]
fn members_meet_at_the_master_in_any_order() {
    let port = free_port().to_string();
    let master = [("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &*port)];
    let builders: Vec<_> = (0..3).map(|rank| member(rank, 3, &master, LONG)).collect();
    assert_eq!(join_all(builders), good("worker", 3));
    // At once again: the store is gone with the members.
    await_free(&port);
    let named = [&master[..], &[("TENSORWIRE_JOB", "peer")]].concat();
    let builders: Vec<_> = (0..2).rev().map(|rank| member(rank, 2, &named, LONG)).collect();
    assert_eq!(join_all(builders).into_iter().rev().collect::<Vec<_>>(), good("peer", 2));
}

#[test]
fn a_master_that_has_stopped_leaves_its_port_to_the_next_run() {
    let port = free_port().to_string();
    let master = [("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &*port)];
    let [first, second] = [(); 2].map(|()| member(0, 1, &master, LONG));
    let node = first.start().expect("it starts");
    node.stop().expect("it stops");
    await_free(&port);
    second.start().expect("the port is free, though the first handle lives");
    drop(node);
}

#[test]
fn members_of_each_launcher_meet_at_the_master() {
    let launchers = [
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ];
    for names in launchers {
        let port = free_port().to_string();
        let master = [("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &*port)];
        let builders = (0..2).map(|rank| member_of(names, (rank, 2), &master, LONG)).collect();
        assert_eq!(join_all(builders), good("worker", 2), "{names:?}");
    }
}

#[test]
fn members_without_a_common_fabric_hear_at_once_what_each_names() {
    for fabrics in [["grpc", "tcp"], ["shm", "tcp"]] {
        let port = free_port().to_string();
        let of = |rank: usize| {
            let master = [("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &*port)];
            let more = [&master[..], &[("TENSORWIRE_FABRIC", fabrics[rank])]].concat();
            member(rank as u32, 2, &more, "60s")
        };
        let began = Instant::now();
        for joined in join_all((0..2).map(of).collect()) {
            let why = joined.expect_err("no fabric is common");
            for part in ["no fabric in common", "Set fabric to the same value on all members"] {
                assert!(why.contains(part), "{part}: {why}");
            }
            assert!(why.contains(&format!("fabric is {}", fabrics[0])), "{why}");
        }
        assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    }
}

#[test]
fn members_meet_in_a_file_run_after_run() {
    let folder = tempfile::tempdir().unwrap();
    let store = format!("file://{}/store", folder.path().display());
    for _ in 0..2 {
        let more = [("TENSORWIRE_STORE", &*store), ("TENSORWIRE_JOB", "peer")];
        let builders: Vec<_> = (0..3).map(|rank| member(rank, 3, &more, LONG)).collect();
        assert_eq!(join_all(builders), good("peer", 3));
    }
    let left = FileStore::open(folder.path().join("store"), Duration::from_secs(5)).unwrap();
    assert_eq!(left.count("").unwrap(), 0);
}

#[test]
fn nothing_listens_where_a_member_met_the_others_once_it_has_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let store = format!("file://{}/store", folder.path().display());
    let node = member(0, 1, &[("TENSORWIRE_STORE", &store)], LONG).start().unwrap();
    let address = node.address().unwrap();
    assert!(std::net::TcpStream::connect(address).is_ok());
    node.stop().unwrap();
    let error = std::net::TcpStream::connect(address).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused);
}

#[test]
fn a_member_that_ends_after_the_meeting_ends_the_joins_of_the_others_at_once() {
    let port = free_port().to_string();
    for more in [&[][..], &[("TENSORWIRE_PEER_LOSS", "fail_all")]] {
        let master = [&[("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &*port)], more].concat();
        let victim = {
            let builder = member(2, 3, &master, LONG);
            std::thread::spawn(move || {
                let meeting = builder.meeting().unwrap().unwrap();
                // It has published its address, and ends before it has called anybody.
                drop(meet(&meeting).unwrap());
            })
        };
        let joined = |rank| {
            let builder = member(rank, 3, &master, "60s");
            std::thread::spawn(move || {
                let node = builder.start().unwrap();
                let begin = Instant::now();
                let error = node.join().unwrap_err().to_string();
                (error, begin.elapsed())
            })
        };
        let joins = [0, 1].map(joined);
        victim.join().unwrap();
        for join in joins {
            let (error, took) = join.join().unwrap();
            assert!(took < Duration::from_secs(3), "{took:?}: {error}");
            // Another one may have left because of it.
            assert!(error.contains("since the members met") && error.contains("worker/2 at"), "{error}");
        }
    }
}

#[test]
fn the_error_tells_who_has_ended_after_the_meeting_from_who_is_missing() {
    let port = free_port().to_string();
    let master = [("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &*port)];
    let meets = |rank| {
        let builder = member(rank, 3, &master, LONG);
        std::thread::spawn(move || meet(&builder.meeting().unwrap().unwrap()).unwrap())
    };
    let [idle, victim] = [1, 2].map(meets);
    let node = member(0, 3, &master, "60s").start().unwrap();
    // It listens, and never answers.
    let idle = idle.join().unwrap();
    drop(victim.join().unwrap());
    let error = node.join().unwrap_err().to_string();
    assert!(error.contains("1 of them ended: worker/2 at"), "{error}");
    assert!(error.contains("; missing too: worker/1 at"), "{error}");
    drop(idle);
}

#[test]
fn a_cluster_of_one_meets_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let store = format!("file://{}/store", folder.path().display());
    assert_eq!(join_all(vec![member(0, 1, &[("TENSORWIRE_STORE", &store)], LONG)]), good("worker", 1));
}

#[test]
fn whoever_has_not_come_is_named_by_all() {
    let meet_in_vain = |place: &[(&str, &str)], timeouts: [&str; 2], at: u64| {
        let begin = Instant::now();
        let builders = vec![member(0, 5, place, timeouts[0]), member(2, 5, place, timeouts[1])];
        for outcome in join_all(builders) {
            let error = outcome.unwrap_err();
            assert!(error.contains("3 of 5 have not come: worker/1, worker/3, worker/4"), "{error}");
        }
        let took = begin.elapsed();
        assert!(took < 5 * Duration::from_secs(at), "{timeouts:?}: {took:?}");
    };
    let meet_in_vain = &meet_in_vain;
    std::thread::scope(|scope| {
        // One waits longer than task 0, one as long, and one less.
        for (timeouts, at) in [(["2s", "30s"], 2), (["2s", "2s"], 2), (["4s", "1s"], 4)] {
            scope.spawn(move || {
                let port = free_port().to_string();
                let master = [("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &*port)];
                meet_in_vain(&master, timeouts, at);
            });
            scope.spawn(move || {
                let folder = tempfile::tempdir().unwrap();
                let file = format!("file://{}/store", folder.path().display());
                meet_in_vain(&[("TENSORWIRE_STORE", &*file)], timeouts, at);
            });
        }
    });
}

#[test]
fn whoever_was_refused_at_the_store_is_in_the_error_of_task_0_with_the_reason() {
    let port = free_port().to_string();
    let folder = tempfile::tempdir().unwrap();
    let secret = |text: &str| {
        let path = folder.path().join(text);
        std::fs::write(&path, text.repeat(40)).unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        path.display().to_string()
    };
    let (right, wrong) = (secret("right"), secret("wrong"));
    let with =
        |secret| [("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &*port), ("TENSORWIRE_SECRET_FILE", secret)];
    // One has another secret, and one another size.
    let builders = vec![
        member(0, 2, &with(&*right), "4s"),
        member(1, 2, &with(&*wrong), "2s"),
        member(2, 3, &with(&*right), "2s"),
    ];
    let errors: Vec<String> = join_all(builders).into_iter().map(Result::unwrap_err).collect();
    let [first, one, two] = &errors[..] else { panic!("{errors:?}") };
    for part in [
        "1 of 2 have not come: worker/1. Callers were refused: ",
        "127.0.0.1: ",
        "worker/2: it is none of those who meet here",
    ] {
        assert!(first.contains(part), "{part}: {first}");
    }
    assert!(one.contains("what listens there is not proven to be worker/0"), "{one}");
    assert!(two.contains("worker/2 is none of those who meet here"), "{two}");
}

#[test]
fn a_master_that_never_comes_is_named_with_its_address() {
    let port = free_port().to_string();
    let master = [("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &*port)];
    let error = member(1, 2, &master, "2s").start().unwrap_err();
    let NodeError::Meeting(inner) = &error else { panic!("{error}") };
    assert!(matches!(**inner, MeetingError::Store { .. }), "{error:?}");
    let error = error.to_string();
    let place = format!("worker/1 can't meet the other members at tcp://127.0.0.1:{port}");
    assert!(error.contains(&place) && error.contains("MASTER_ADDR and MASTER_PORT names"), "{error}");
    assert!(error.contains("the store of worker/0") && error.contains("nobody listens there"), "{error}");
}

#[test]
fn two_members_of_one_rank_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let file = format!("file://{}/store", folder.path().display());
    let place = [("TENSORWIRE_STORE", &*file)];
    let builders = vec![member(1, 3, &place, "2s"), member(1, 3, &place, "2s")];
    let errors: Vec<String> = join_all(builders).into_iter().map(Result::unwrap_err).collect();
    let taken = errors.iter().filter(|error| error.contains("the name worker/1 is taken at file://"));
    assert_eq!(taken.count(), 1, "{errors:?}");
    let left = member(1, 3, &place, "2s").start().unwrap_err().to_string();
    assert!(left.contains("127.0.0.1:") && left.contains("delete the file"), "{left}");
    // Another run has other keys.
    let next = [place[0], ("SLURM_JOB_ID", "7")];
    assert_eq!(join_all((0..2).map(|rank| member(rank, 2, &next, LONG)).collect()), good("worker", 2));
}

#[test]
fn members_that_disagree_on_their_number_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = format!("file://{}/store", folder.path().display());
    let place = [("TENSORWIRE_STORE", &*file)];
    let error = member(0, 2, &place, "1s").start().unwrap_err().to_string();
    assert!(error.contains("1 of 2 have not come: worker/1"), "{error}");
    let error = member(1, 3, &place, "1s").start().unwrap_err().to_string();
    assert!(
        error.contains("worker/1 is one of 3 members") && error.contains("says that there are \"2\""),
        "{error}"
    );
}

#[test]
fn a_master_whose_port_is_taken_says_what_to_do() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let master = [("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &*port)];
    let error = member(0, 2, &master, LONG).start().unwrap_err().to_string();
    assert!(
        error.contains("worker/0 can't serve the store") && error.contains("TENSORWIRE_STORE="),
        "{error}"
    );
}

#[test]
fn members_of_different_hosts_do_not_meet_at_loopback_addresses() {
    let builder = member(0, 2, &[("TENSORWIRE_STORE", "file:///nowhere/store")], LONG);
    let meeting = builder.meeting().unwrap().unwrap();
    let me = meeting.config.task_id();
    let store = PrefixStore::new("", Arc::new(crate::store::MemoryStore::new()));
    let this = MeetingMember { meeting: &meeting, me, store, server: None };
    let entry = |address: &str, host: &str| PublishedMember {
        address: address.parse().unwrap(),
        host: host.into(),
        pid: 1,
        pids: pids(),
    };
    let two = |first: &str, second: &str| this.cluster(vec![entry(first, "a"), entry(second, "b")]);
    let error = two("10.0.0.1:1", "127.0.0.1:2").unwrap_err();
    assert!(error.contains("worker/1 is at 127.0.0.1:2") && error.contains("TENSORWIRE_BIND"), "{error}");
    assert_eq!(two("10.0.0.1:1", "10.0.0.2:2").unwrap().to_string(), "worker=10.0.0.1:1,10.0.0.2:2");
    assert!(two("10.0.0.1:1", "10.0.0.1:1").unwrap_err().contains("same address"));
}

#[test]
fn nonsense_in_the_store_is_refused() {
    for nonsense in ["", "here", "127.0.0.1:1", "127.0.0.1:1\nhost\nme", "127.0.0.1:0\nhost\n1\npid"] {
        assert!(PublishedMember::read(nonsense.as_bytes()).is_none(), "{nonsense}");
    }
    assert!(PublishedMember::read(&[0xff, 0xfe]).is_none());
    assert!(PublishedMember::read(b"127.0.0.1:1\nhost\n17").is_none(), "of an earlier release");
    assert!(PublishedMember::read(b"127.0.0.1:1\nhost\n17\npid").is_some());
}

/// The error of worker/1, which meets in a file that has these keys already.
fn error_in_a_file_with(keys: &[(&str, String)], timeout: &str) -> (String, Duration) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let store = FileStore::open(&path, Duration::from_secs(20)).unwrap();
    for (key, value) in keys {
        store.set(&format!("{MEETING_KEYS}{key}"), value.as_bytes()).unwrap();
    }
    let begin = Instant::now();
    let file = format!("file://{}", path.display());
    let error = member(1, 2, &[("TENSORWIRE_STORE", &*file)], timeout).start().unwrap_err().to_string();
    (error, begin.elapsed())
}

/// What task 0 publishes, as a process of this host.
fn published(pid: u32) -> String {
    format!("127.0.0.1:9\n{}\n{pid}\n{}", host::identity().unwrap(), pids())
}

#[test]
fn the_outcome_that_task_0_tells_is_cut_and_controls_no_terminal() {
    let outcome = format!("{BAD}\x1b[2J{}", "no".repeat(MAX_WORDS));
    let (error, _) = error_in_a_file_with(&[("outcome", outcome)], LONG);
    assert!(error.contains("\\u{1b}[2Jno") && error.contains("...") && !error.contains('\x1b'), "{error}");
    assert!(error.len() < 2 * MAX_WORDS, "{} bytes", error.len());
}

#[test]
fn a_task_0_that_has_come_and_ended_is_named_at_once() {
    let mut ended = std::process::Command::new("true").spawn().unwrap();
    ended.wait().unwrap();
    let (error, took) = error_in_a_file_with(&[("member/0", published(ended.id()))], LONG);
    println!("after {took:?}: {error}");
    assert!(error.contains(&format!("worker/0 (process {} of this host) has ended", ended.id())), "{error}");
    assert!(took < 5 * TURN, "{took:?}");
}

#[test]
fn a_task_0_that_lives_and_tells_nothing_is_named() {
    let (error, _) = error_in_a_file_with(&[("member/0", published(std::process::id()))], "200ms");
    assert!(error.contains("worker/0 has come") && error.contains("has not told the cluster"), "{error}");
    // One of another host, or of another namespace of process ids, may live.
    let far = published(u32::MAX / 4).replace("pid:", "other:");
    let (error, _) = error_in_a_file_with(&[("member/0", far)], "1500ms");
    assert!(error.contains("has not told the cluster"), "{error}");
}

#[test]
fn a_member_that_has_come_and_ended_ends_the_meeting_of_all() {
    let mut ended = std::process::Command::new("true").spawn().unwrap();
    ended.wait().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let store = FileStore::open(&path, Duration::from_secs(20)).unwrap();
    store.set(&format!("{MEETING_KEYS}member/2"), published(ended.id()).as_bytes()).unwrap();
    let file = format!("file://{}", path.display());
    let place = [("TENSORWIRE_STORE", &*file)];
    let begin = Instant::now();
    let errors = join_all(vec![member(0, 4, &place, LONG), member(1, 4, &place, LONG)]);
    for error in errors.into_iter().map(Result::unwrap_err) {
        assert!(error.contains("worker/2 (process ") && error.contains("has ended"), "{error}");
    }
    assert!(begin.elapsed() < 5 * TURN, "{:?}", begin.elapsed());
}

#[test]
fn a_store_that_ends_with_task_0_ends_the_meeting() {
    let port = free_port();
    let address: HostPort = format!("127.0.0.1:{port}").parse().unwrap();
    let name = |task| TaskId::new("worker", task).unwrap();
    let server = StoreOptions::new(name(0), name(0), address.clone());
    let server = StoreServer::start(&server, [0, 1].map(name)).unwrap();
    let place = format!("tcp://{address}");
    let waits = std::thread::spawn(move || {
        let more = [("TENSORWIRE_STORE", &*place), ("TENSORWIRE_SILENCE_BOUND", "2s")];
        member(1, 2, &more, LONG).start().unwrap_err().to_string()
    });
    let published = format!("{MEETING_KEYS}member/1");
    server.store().get(&published, Duration::from_secs(20)).unwrap();
    drop(server);
    let begin = Instant::now();
    let error = waits.join().unwrap();
    assert!(error.contains("the store of worker/0") && error.contains("nobody listens there"), "{error}");
    let took = begin.elapsed();
    assert!(took > Duration::from_secs(1) && took < Duration::from_secs(10), "{took:?}: {error}");
}

#[test]
fn a_store_that_is_gone_for_a_moment_ends_no_meeting() {
    let port = free_port();
    let address: HostPort = format!("127.0.0.1:{port}").parse().unwrap();
    let name = |task| TaskId::new("worker", task).unwrap();
    let options = StoreOptions::new(name(0), name(0), address.clone());
    let server = StoreServer::start(&options, [0, 1].map(name)).unwrap();
    let place = format!("tcp://{address}");
    let waits = std::thread::spawn(move || {
        member(1, 2, &[("TENSORWIRE_STORE", &*place)], LONG).start().unwrap_err().to_string()
    });
    let published = format!("{MEETING_KEYS}member/1");
    server.store().get(&published, Duration::from_secs(20)).unwrap();
    drop(server);
    std::thread::sleep(2 * TURN);
    let server = StoreServer::start(&options, [0, 1].map(name)).unwrap();
    let outcome = format!("{BAD}it is back");
    server.store().set(&format!("{MEETING_KEYS}outcome"), outcome.as_bytes()).unwrap();
    let error = waits.join().unwrap();
    assert!(error.contains("make no cluster: it is back"), "{error}");
}

#[test]
fn an_address_that_the_store_leads_to_is_refused_with_its_cause() {
    // An address for documentation (RFC 5737): only the route to it counts.
    let store = [("TENSORWIRE_STORE", "tcp://192.0.2.1:5000")];
    let error = member(1, 2, &store, "1s").start().unwrap_err().to_string();
    if error.contains("no route to") {
        return println!("skipped: this host has no network: {error}");
    }
    assert!(error.contains("from which it calls tcp://192.0.2.1:5000, is not loopback"), "{error}");
}

#[test]
fn a_member_whose_answer_was_lost_finds_its_own_value_or_sets_it() {
    let (within, soon) = (Duration::from_secs(1), Duration::from_millis(1));
    let lost = |waited| {
        let (store, tried, why) = ("a store".into(), "setting".into(), "it was closed".into());
        Err(StoreError::Unreachable { store, tried, why, waited })
    };
    for is_done in [true, false] {
        let (store, calls) = (MemoryStore::new(), AtomicU32::new(0));
        let set = || match calls.fetch_add(1, Ordering::Relaxed) {
            0 if is_done => store.compare_and_set("size", None, b"2").and_then(|_| lost(soon)),
            0 => lost(soon),
            _ => store.compare_and_set("size", None, b"2"),
        };
        let said = claim(set, || store.get("size", soon), (within, within));
        assert_eq!(said.expect("found or set"), Some(b"2".to_vec()));
        assert_eq!(calls.load(Ordering::Relaxed), if is_done { 1 } else { 2 });
    }
    let no_time = claim(|| lost(within), || panic!("no time is left"), (soon, within));
    assert!(matches!(no_time, Err(StoreError::Unreachable { .. })), "{no_time:?}");
    let looks = AtomicU32::new(0);
    let silent = || {
        looks.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(soon);
        lost(soon).map(|_: Option<Vec<u8>>| Vec::new())
    };
    let (begin, silence) = (Instant::now(), 20 * soon);
    let lost_again = claim(|| lost(soon), silent, (silence, within));
    assert!(matches!(lost_again, Err(StoreError::Unreachable { .. })), "{lost_again:?}");
    assert!(begin.elapsed() >= silence && looks.load(Ordering::Relaxed) > 1, "{looks:?}");
    // A store that was slow for a while, and one that loses answers again and again.
    let slow = || match looks.fetch_sub(1, Ordering::Relaxed) {
        0 => Ok(b"2".to_vec()),
        _ => lost(soon).map(|_: Option<Vec<u8>>| Vec::new()),
    };
    looks.store(3, Ordering::Relaxed);
    assert_eq!(claim(|| lost(soon), slow, (within, within)).expect("found"), Some(b"2".to_vec()));
    let (begin, store) = (Instant::now(), MemoryStore::new());
    let never = claim(|| lost(soon), || store.get("size", soon), (within, 20 * soon));
    assert!(matches!(never, Err(StoreError::Unreachable { .. })), "{never:?}");
    assert!(begin.elapsed() >= 20 * soon, "{:?}", begin.elapsed());
}
