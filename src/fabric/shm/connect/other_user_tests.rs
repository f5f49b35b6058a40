//! A process of another user, which knows everything that a peer knows, gets neither a link nor a
//! file.
//!
//! A thread stands for the process: the kernel records the user of the thread that connects or
//! listens. Only root can take another user's place, so the tests are skipped for other users.

use super::address::ShmAddress;
use super::foreign::{self, ForeignFd};
use super::hello::HandshakeMessage;
use super::socket::{self, Deadline};
use super::tests::{OPTIONS, SHORT_TIMEOUT, TIMEOUT, address, endpoint, good_files, hello, why};
use crate::fabric::shm::testing::pool;
use crate::fabric::{Endpoint, Role};
use rustix::event::{PollFd, PollFlags};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd};
use rustix::io::Errno;
use rustix::net::{SocketAddrUnix, sockopt};
use rustix::process::{DumpableBehavior, Uid, geteuid, set_dumpable_behavior};
use rustix::thread::set_thread_res_uid;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

/// A user that owns nothing.
const NOBODY: u32 = 65534;

fn is_root() -> bool {
    let is_root = geteuid().is_root();
    if !is_root {
        println!("skipped: only root can act as another user");
    }
    is_root
}

/// Runs `act` as another user.
fn as_nobody<T: Send>(act: impl FnOnce() -> T + Send) -> T {
    let nobody = || {
        let uid = Uid::from_raw(NOBODY);
        set_thread_res_uid(uid, uid, uid).expect("root may");
        act()
    };
    let done = std::thread::scope(|scope| scope.spawn(nobody).join().expect("no panic"));
    // The change of the user has made the whole process undumpable.
    set_dumpable_behavior(DumpableBehavior::Dumpable).expect("it was so before");
    done
}

fn assert_names_both_users(text: &str) {
    assert!(text.contains("runs as user 65534") && text.contains("this process as user 0"), "{text}");
}

#[test]
fn an_endpoint_of_another_user_is_refused_at_once() {
    if !is_root() {
        return;
    }
    let theirs = as_nobody(|| endpoint(&OPTIONS));
    for role in [Role::Initiator, Role::Acceptor] {
        assert_names_both_users(&why(endpoint(&OPTIONS).connect(role, theirs.address(), TIMEOUT)));
    }
    let ours = endpoint(&OPTIONS);
    let text = as_nobody(|| why(theirs.connect(Role::Initiator, ours.address(), TIMEOUT)));
    assert!(text.contains("runs as user 0") && text.contains("this process as user 65534"), "{text}");
}

/// It has an address that says the right user, both tokens, and good files. A hundred silent
/// connections of it wait before the peer's.
#[test]
fn another_user_that_connects_in_a_peers_place_is_told_nothing_and_keeps_nobody_out() {
    if !is_root() {
        return;
    }
    let (acceptor, initiator) = (endpoint(&OPTIONS), endpoint(&OPTIONS));
    let (to_acceptor, to_initiator) = (acceptor.address().to_vec(), initiator.address().to_vec());
    let name = address(&acceptor).socket(acceptor.own.host).expect("a name");
    let bytes = HandshakeMessage::Hello(hello(&initiator, &acceptor)).to_bytes();
    let silent = || socket::connect(&name, Deadline::after(TIMEOUT)).expect("connected");
    let _crowd: Vec<ForeignFd> = as_nobody(|| (0..100).map(|_| silent()).collect());
    let connect = || {
        let socket = silent();
        let files = good_files();
        let files: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
        socket::send_bytes(&socket, &bytes, &files).expect("sent");
        socket
    };
    let stranger = as_nobody(connect);
    let said = std::thread::scope(|scope| {
        let accepted = scope.spawn(|| acceptor.connect(Role::Acceptor, &to_initiator, TIMEOUT));
        let mut fds = [PollFd::new(&stranger, PollFlags::IN)];
        assert!(Deadline::after(TIMEOUT).wait(&mut fds).expect("polled"), "not rejected");
        let said = socket::receive(&stranger);
        initiator.connect(Role::Initiator, &to_acceptor, TIMEOUT).expect("the right peer is let in");
        accepted.join().expect("no panic").map_err(|error| error.to_string()).expect("accepted");
        said
    });
    assert!(said.is_err(), "it was told {said:?}");

    // If nobody else comes, the error says who did.
    let (acceptor, missing) = (endpoint(&OPTIONS), endpoint(&OPTIONS));
    let name = address(&acceptor).socket(acceptor.own.host).expect("a name");
    let _stranger = as_nobody(|| socket::connect(&name, Deadline::after(TIMEOUT)).expect("connected"));
    assert_names_both_users(&why(acceptor.connect(Role::Acceptor, missing.address(), SHORT_TIMEOUT)));
}

#[test]
fn another_user_that_listens_in_a_peers_place_is_told_nothing() {
    if !is_root() {
        return;
    }
    let initiator = endpoint(&OPTIONS);
    let listening = ShmAddress { token: [7; 16], ..address(&initiator) };
    let name = listening.socket(listening.host).expect("a name");
    let listener = as_nobody(|| socket::listen(&name).expect("a socket"));
    let text = why(initiator.connect(Role::Initiator, &listening.to_bytes(), TIMEOUT));
    assert_names_both_users(&text);
    let came = socket::accept(&listener).expect("it has connected");
    let said = socket::receive(&came);
    assert!(said.is_err(), "it was told {said:?}");
}

#[test]
fn another_user_does_not_reach_a_socket_that_is_a_file() {
    if !is_root() {
        return;
    }
    let own = address(&endpoint(&OPTIONS));
    let name = own.socket(own.host.elsewhere()).expect("a name");
    let _listener = socket::listen(&name).expect("a socket");
    let refused = as_nobody(|| socket::connect(&name, Deadline::after(TIMEOUT)).map(drop));
    assert_eq!(refused, Err(Errno::ACCESS));
    socket::connect(&name, Deadline::after(TIMEOUT)).map(drop).expect("its own user does");
}

/// A TCP socket whose last `close` waits for a minute, as its peer reads nothing. Returns the peer
/// too.
fn lingering_socket() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let mut socket = TcpStream::connect(listener.local_addr().expect("its own")).expect("connected");
    let (peer, _) = listener.accept().expect("it has connected");
    socket.set_nonblocking(true).expect("it is valid");
    while socket.write(&[0; 1 << 16]).is_ok() {}
    sockopt::set_socket_linger(&socket, Some(Duration::from_secs(60))).expect("it is valid");
    (socket, peer)
}

/// Another user connects to three endpoints. Its files are closed with a refused connection, with a
/// listener that accepts nobody, and with an endpoint that is given up.
#[test]
fn another_user_that_sends_files_whose_close_waits_holds_nobody_up() {
    if !is_root() {
        return;
    }
    let send_to = |name: &SocketAddrUnix| {
        let (file, peer) = lingering_socket();
        let socket = socket::connect(name, Deadline::after(TIMEOUT)).expect("connected");
        socket::send_bytes(&socket, b"close it", &[file.as_fd()]).expect("sent");
        peer
    };
    let (acceptor, initiator) = (endpoint(&OPTIONS), endpoint(&OPTIONS));
    let given_up = endpoint(&OPTIONS);
    let (to_acceptor, to_initiator) = (acceptor.address().to_vec(), initiator.address().to_vec());
    let names =
        [&acceptor, &initiator, &given_up].map(|one| address(one).socket(one.own.host).expect("a name"));
    let _peers = as_nobody(|| names.each_ref().map(send_to));
    let began = Instant::now();
    drop(given_up);
    std::thread::scope(|scope| {
        let accepted = scope.spawn(|| acceptor.connect(Role::Acceptor, &to_initiator, TIMEOUT));
        initiator.connect(Role::Initiator, &to_acceptor, TIMEOUT).expect("connected");
        assert!(accepted.join().expect("no panic").is_ok());
    });
    // Neither does a thread that nobody waits for.
    while closers() > 0 {
        assert!(began.elapsed() < TIMEOUT, "{} threads still close files", closers());
        std::thread::sleep(Duration::from_millis(1));
    }
    println!("{:?}", began.elapsed());
}

/// Threads of this process that close the files of others.
fn closers() -> usize {
    let threads = std::fs::read_dir("/proc/self/task").expect("procfs").flatten();
    let name = |thread: std::fs::DirEntry| std::fs::read_to_string(thread.path().join("comm"));
    threads.filter_map(|thread| name(thread).ok()).filter(|name| name.trim() == foreign::NAME).count()
}

/// The memory of a pool has no name but in `/proc`.
#[test]
fn another_user_does_not_open_the_memory_of_a_process() {
    if !is_root() {
        return;
    }
    let pool = pool();
    let file = format!("/proc/{}/fd/{}", std::process::id(), pool.region().fd().as_raw_fd());
    let read = |user: u32| {
        let mut head = Command::new("head");
        head.args(["-c1", &file]).uid(user).gid(user).current_dir("/");
        let output = head.output().expect("head(1)");
        (output.status.success(), output.stdout.len())
    };
    assert_eq!(read(0), (true, 1));
    assert_eq!(read(NOBODY), (false, 0));
}
