//! Members that meet, as threads of one process.

use super::*;
use crate::config::Builder;
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

fn variables(pairs: &[(&str, &str)]) -> Vec<(OsString, OsString)> {
    pairs.iter().map(|(name, value)| (OsString::from(name), OsString::from(value))).collect()
}

/// A member as a launcher starts it.
fn member(rank: u32, size: u32, more: &[(&str, &str)], timeout: &str) -> Builder {
    let (rank, size) = (rank.to_string(), size.to_string());
    let own = [("RANK", &*rank), ("WORLD_SIZE", &*size), ("TENSORWIRE_POOL_SIZE", "4MiB")];
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
    let named = [&master[..], &[("TENSORWIRE_JOB", "peer")]].concat();
    let builders: Vec<_> = (0..2).rev().map(|rank| member(rank, 2, &named, LONG)).collect();
    assert_eq!(join_all(builders).into_iter().rev().collect::<Vec<_>>(), good("peer", 2));
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
fn a_cluster_of_one_meets_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let store = format!("file://{}/store", folder.path().display());
    assert_eq!(join_all(vec![member(0, 1, &[("TENSORWIRE_STORE", &store)], LONG)]), good("worker", 1));
}

#[test]
fn whoever_has_not_come_is_named_by_all() {
    let port = free_port().to_string();
    let master = [("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &*port)];
    let folder = tempfile::tempdir().unwrap();
    let file = format!("file://{}/store", folder.path().display());
    let file = [("TENSORWIRE_STORE", &*file)];
    for place in [&master[..], &file] {
        // The master stays a little longer than the others.
        let builders = vec![member(0, 5, place, "800ms"), member(2, 5, place, "300ms")];
        for outcome in join_all(builders) {
            let error = outcome.unwrap_err();
            assert!(error.contains("3 of 5 have not come: worker/1, worker/3, worker/4"), "{error}");
        }
    }
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
    let error = member(1, 2, &master, "200ms").start().unwrap_err();
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
    let builders = vec![member(1, 3, &place, "300ms"), member(1, 3, &place, "300ms")];
    let errors: Vec<String> = join_all(builders).into_iter().map(Result::unwrap_err).collect();
    let taken = errors.iter().filter(|error| error.contains("the name worker/1 is taken at file://"));
    assert_eq!(taken.count(), 1, "{errors:?}");
    let left = member(1, 3, &place, "300ms").start().unwrap_err().to_string();
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
    let error = member(0, 2, &place, "10ms").start().unwrap_err().to_string();
    assert!(error.contains("1 of 2 have not come: worker/1"), "{error}");
    let error = member(1, 3, &place, "10ms").start().unwrap_err().to_string();
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
    let entry =
        |address: &str, host: &str| PublishedMember { address: address.parse().unwrap(), host: host.into() };
    let two = |first: &str, second: &str| this.cluster(vec![entry(first, "a"), entry(second, "b")]);
    let error = two("10.0.0.1:1", "127.0.0.1:2").unwrap_err();
    assert!(error.contains("worker/1 is at 127.0.0.1:2") && error.contains("TENSORWIRE_BIND"), "{error}");
    assert_eq!(two("10.0.0.1:1", "10.0.0.2:2").unwrap().to_string(), "worker=10.0.0.1:1,10.0.0.2:2");
    assert!(two("10.0.0.1:1", "10.0.0.1:1").unwrap_err().contains("same address"));
}

#[test]
fn nonsense_in_the_store_is_refused() {
    for nonsense in ["", "here", "127.0.0.1:1", "127.0.0.1:1\nhost\nme", "127.0.0.1:0\nhost\n1"] {
        assert!(PublishedMember::read(nonsense.as_bytes()).is_none(), "{nonsense}");
    }
    assert!(PublishedMember::read(&[0xff, 0xfe]).is_none());
    assert!(PublishedMember::read(b"127.0.0.1:1\nhost\n17").is_some());
}
