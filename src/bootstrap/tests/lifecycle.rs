//! States; repeated start, join and stop; leftovers.

use super::*;

#[test]
fn the_states_follow_each_other_and_what_does_not_fit_is_refused_by_name() {
    let cluster = workers(2);
    let member = Member::new(options(&cluster, 0));
    assert_eq!(member.service.state(), NodeState::Created);
    assert_eq!(member.service.local_addr(), None);
    let error = member.service.join(Duration::ZERO).unwrap_err().to_string();
    assert_eq!(error, "worker/0: can't join: the bootstrap service is created");

    member.service.start().unwrap();
    assert_eq!(member.service.state(), NodeState::Started);
    assert_eq!(
        member.service.local_addr().map(|address| address.to_string()),
        Some(address(&cluster, "worker", 0))
    );
    let peer = Member::start(options(&cluster, 1));
    member.join();
    assert_eq!(member.service.state(), NodeState::Connected);

    member.stop();
    assert_eq!(member.service.state(), NodeState::Stopped);
    let error = member.service.join(LONG).unwrap_err().to_string();
    assert_eq!(error, "worker/0: can't join: the bootstrap service is stopped");
    let error = member.service.start().unwrap_err().to_string();
    assert_eq!(error, "worker/0: can't start: the bootstrap service is stopped");
    drop(peer);
}

#[test]
fn start_join_and_stop_can_be_called_again() {
    let cluster = workers(2);
    let members = linked(&cluster, 2);
    for member in &members {
        member.service.start().expect("started already");
        member.service.join(Duration::ZERO).expect("joined already, so at once");
    }
    for member in &members {
        member.stop();
        member.stop();
    }
    for member in &members {
        assert_eq!(member.peering.told().iter().filter(|told| matches!(told, Told::Ready(..))).count(), 1);
    }
}

#[test]
fn a_service_that_was_never_started_can_be_stopped() {
    let cluster = workers(1);
    let member = Member::new(options(&cluster, 0));
    member.stop();
    assert_eq!(member.service.state(), NodeState::Stopped);
}

#[test]
fn several_threads_can_join_and_a_stop_wakes_them_by_name() {
    let cluster = workers(2);
    let member = Member::start(options(&cluster, 0));
    std::thread::scope(|scope| {
        let waiting: Vec<_> = (0..3).map(|_| scope.spawn(|| member.service.join(LONG))).collect();
        std::thread::sleep(Duration::from_millis(50));
        let begin = Instant::now();
        member.stop();
        for thread in waiting {
            let error = thread.join().unwrap().expect_err("it was stopped");
            assert!(matches!(error, BootstrapError::State { tried: "join", .. }), "{error}");
        }
        assert!(begin.elapsed() < LONG / 2);
    });
}

#[test]
fn several_threads_join_at_the_same_time() {
    let cluster = workers(2);
    let member = Member::start(options(&cluster, 0));
    std::thread::scope(|scope| {
        let waiting: Vec<_> = (0..3).map(|_| scope.spawn(|| member.service.join(LONG))).collect();
        let peer = Member::start(options(&cluster, 1));
        for thread in waiting {
            thread.join().unwrap().expect("everybody is there");
        }
        drop(peer);
    });
}

#[test]
fn several_threads_stop_at_the_same_time_and_all_return_when_it_is_over() {
    let cluster = workers(2);
    let members = linked(&cluster, 2);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                members[0].stop();
                assert_eq!(members[0].service.state(), NodeState::Stopped);
            });
        }
    });
}

#[test]
fn a_stop_while_a_link_is_being_made_says_so_and_the_endpoint_is_given_up() {
    let cluster = workers(2);
    let members = [Member::new(options(&cluster, 0)), Member::new(options(&cluster, 1))];
    *members[0].peering.delay.lock().unwrap() = Duration::from_millis(600);
    for member in &members {
        member.service.start().unwrap();
    }
    while members[0].peering.connected.lock().unwrap().is_empty() {
        std::thread::sleep(Duration::from_millis(5));
    }
    let error = members[0].service.stop("no time", Duration::from_millis(100)).unwrap_err();
    println!("{error}");
    assert!(error.to_string().contains("still making links with worker/1"), "{error}");
    members[0].service.stop("again", LONG).expect("it ends by itself");
    members[1].stop();
    for member in &members {
        member.peering.assert_no_endpoint_is_left();
        let told = member.peering.told();
        assert!(told.iter().all(|told| matches!(told, Told::Abandoned(..) | Told::Gone(..))), "{told:?}");
    }
}

/// A peering that stops its own service when it hears of a link.
struct Suicide {
    service: Mutex<Option<Arc<Bootstrap>>>,
    outcome: Mutex<Option<String>>,
}

impl Peering for Suicide {
    fn prepare(&self, _: &PeerInfo, _: Option<&[u8]>) -> Result<Prepared, Status> {
        Ok(Prepared { ticket: 0, offer: b"generation 1".to_vec() })
    }

    fn connect(&self, _: &PeerInfo, _: u64, _: &[u8], _: bool, _: Duration) -> Result<(), Status> {
        Ok(())
    }

    fn abandon(&self, _: &PeerInfo, _: u64) {}

    fn ready(&self, _: &PeerInfo, _: u64) {
        if let Some(service) = self.service.lock().unwrap().take() {
            let error = service.stop("from inside", LONG).expect_err("it would wait for itself");
            *self.outcome.lock().unwrap() = Some(error.to_string());
        }
    }

    fn gone(&self, _: &PeerInfo, _: LossCause) {}

    fn lost(&self, _: &PeerInfo, _: LossCause) {}
}

#[test]
fn a_stop_inside_a_callback_is_refused_but_done() {
    let cluster = workers(2);
    let peering = Arc::new(Suicide { service: Mutex::default(), outcome: Mutex::default() });
    let service = Arc::new(Bootstrap::new(options(&cluster, 0), peering.clone()).unwrap());
    *peering.service.lock().unwrap() = Some(service.clone());
    service.start().unwrap();
    let peer = Member::start(options(&cluster, 1));
    let begin = Instant::now();
    while service.state() != NodeState::Stopped {
        assert!(begin.elapsed() < LONG);
        std::thread::sleep(Duration::from_millis(5));
    }
    service.stop("again", LONG).expect("stopped already");
    assert!(peering.outcome.lock().unwrap().as_deref().unwrap().contains("inside a callback"));
    drop(peer);
}

/// Runs a test alone in a process of its own, where threads and files can be counted.
fn alone(test: &str, body: impl FnOnce()) {
    const ALONE: &str = "TENSORWIRE_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return body();
    }
    let this = std::env::current_exe().unwrap();
    let full = format!("bootstrap::tests::lifecycle::{test}");
    let child = std::process::Command::new(this)
        .args([&full, "--exact", "--nocapture", "--test-threads=1"])
        .env(ALONE, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout).into_owned() + &String::from_utf8_lossy(&child.stderr);
    println!("{said}");
    assert!(child.status.success() && said.contains("1 passed"), "the test failed in its own process");
}

fn our_threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let name =
        |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
    tasks.flatten().map(name).filter(|name| name.starts_with("tw-")).collect()
}

/// The open files, without those of the test harness.
fn sockets_and_polls() -> Vec<String> {
    let files = std::fs::read_dir("/proc/self/fd").unwrap();
    let target = |file: std::fs::DirEntry| std::fs::read_link(file.path()).ok();
    files
        .flatten()
        .filter_map(target)
        .map(|target| target.display().to_string())
        .filter(|target| target.starts_with("socket:") || target.starts_with("anon_inode:"))
        .collect()
}

/// The kernel lists a thread for a moment after its join.
fn assert_no_thread_is_left() {
    let start = std::time::Instant::now();
    while !our_threads().is_empty() && start.elapsed() < std::time::Duration::from_secs(1) {
        std::thread::yield_now();
    }
    assert_eq!(our_threads(), Vec::<String>::new());
}

#[test]
fn stopping_and_dropping_leave_no_thread_and_no_socket() {
    alone("stopping_and_dropping_leave_no_thread_and_no_socket", || {
        let before = sockets_and_polls();
        assert!(our_threads().is_empty());
        let cluster = workers(3);
        let mut members = linked(&cluster, 3);
        println!("running: threads {:?}, {} files", our_threads(), sockets_and_polls().len());
        assert_eq!(our_threads().iter().filter(|name| name.trim() == "tw-bootstrap").count(), 3);
        assert!(sockets_and_polls().len() > before.len() + 3);
        members[0].stop();
        members[1].service.kill();
        drop(members.pop());
        assert_no_thread_is_left();
        assert_eq!(sockets_and_polls(), before);
        // The same ports work at once.
        let again = linked(&cluster, 3);
        drop(again);
        assert_no_thread_is_left();
        assert_eq!(sockets_and_polls(), before);
    });
}
