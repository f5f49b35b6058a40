//! Handshakes with processes that must be rejected, that are late, or that never come.

use super::address::{ShmAddress, VERSION};
use super::foreign::ForeignFd;
use super::hello::{HandshakeMessage, ShmHello};
use super::socket::{self, Deadline, ReceiveFailure, receive, send_bytes};
use crate::fabric::shm::memory::layout::SegmentLayout;
use crate::fabric::shm::testing::pool;
use crate::fabric::shm::{ShmEndpoint, ShmFabric, ShmLink, ShmOptions};
use crate::fabric::{Endpoint, Fabric, FabricError, LinkOptions, Role};
use rustix::event::{PollFd, PollFlags};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(super) const TIMEOUT: Duration = Duration::from_secs(10);
pub(super) const SHORT_TIMEOUT: Duration = Duration::from_millis(100);
pub(super) const OPTIONS: LinkOptions = LinkOptions { depth: 8, receives: 0, generation: 0 };

pub(super) fn endpoint(options: &LinkOptions) -> ShmEndpoint {
    let fabric = ShmFabric::new(&pool(), ShmOptions::default()).expect("a fabric");
    fabric.endpoint(0, options).expect("an endpoint")
}

/// An endpoint in another network namespace of this host, with the same /dev/shm.
pub(super) fn endpoint_elsewhere() -> ShmEndpoint {
    let mut fabric = ShmFabric::new(&pool(), ShmOptions::default()).expect("a fabric");
    let shared = Arc::get_mut(&mut fabric.shared).expect("nobody else has it");
    shared.host = shared.host.elsewhere();
    fabric.endpoint(0, &OPTIONS).expect("an endpoint")
}

/// The file of an endpoint's socket.
pub(super) fn socket_file(endpoint: &ShmEndpoint) -> PathBuf {
    let name = endpoint.own.socket(endpoint.own.host.elsewhere()).expect("a name");
    name.path().expect("a file").to_str().expect("text").into()
}

pub(super) fn why(result: Result<ShmLink, FabricError>) -> String {
    match result {
        Ok(_) => panic!("it was let in"),
        Err(error) => error.to_string(),
    }
}

fn memfd(bytes: u64, sealed: bool) -> OwnedFd {
    memfd_in(MemfdFlags::empty(), bytes, sealed).expect("a memfd")
}

fn memfd_in(pages: MemfdFlags, bytes: u64, sealed: bool) -> rustix::io::Result<OwnedFd> {
    let file = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | pages)?;
    ftruncate(&file, bytes)?;
    if sealed {
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
        fcntl_add_seals(&file, seals)?;
    }
    Ok(file)
}

pub(super) fn address(endpoint: &ShmEndpoint) -> ShmAddress {
    ShmAddress::from_bytes(endpoint.address()).expect("its own address")
}

pub(super) fn hello(from: &ShmEndpoint, to: &ShmEndpoint) -> ShmHello {
    let segment = SegmentLayout::new(&OPTIONS).expect("in range").bytes() as u64;
    let ShmAddress { token, .. } = address(to);
    let regions = vec![(0, 4096)];
    ShmHello {
        from: from.own.token,
        to: token,
        depth: 8,
        generation: 0,
        has_barriers: true,
        segment,
        regions,
    }
}
/// Waits until the connection has a message or is closed. Returns whether that came in time.
fn has_news(socket: &ForeignFd) -> bool {
    Deadline::after(TIMEOUT).wait(&mut [PollFd::new(socket, PollFlags::IN)]).expect("polled")
}

/// Sends a message and files to an acceptor. It must reject them with `text`, and still accept the
/// right peer.
fn assert_rejected(make: impl Fn(&ShmEndpoint, &ShmEndpoint) -> (Vec<u8>, Vec<OwnedFd>), text: &str) {
    let (acceptor, initiator) = (endpoint(&OPTIONS), endpoint(&OPTIONS));
    let (to_acceptor, to_initiator) = (acceptor.address().to_vec(), initiator.address().to_vec());
    let (bytes, files) = make(&initiator, &acceptor);
    let name = address(&acceptor).socket(acceptor.own.host).expect("a name");
    let candidate = socket::connect(&name, Deadline::after(TIMEOUT)).expect("connected");
    let files: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
    send_bytes(&candidate, &bytes, &files).expect("sent");
    std::thread::scope(|scope| {
        let accepted = scope.spawn(|| acceptor.connect(Role::Acceptor, &to_initiator, TIMEOUT));
        // The acceptor sends a reason, or closes the connection.
        assert!(has_news(&candidate), "not rejected");
        match receive(&candidate) {
            Ok((HandshakeMessage::Refused(why), _)) | Err(ReceiveFailure::Peer(why)) => {
                assert!(why.contains(text), "{why}");
            }
            other => panic!("not refused: {other:?}"),
        }
        initiator.connect(Role::Initiator, &to_acceptor, TIMEOUT).expect("connected");
        accepted.join().expect("no panic").map_err(|e| e.to_string()).expect("accepted");
    });
}

pub(super) fn good_files() -> Vec<OwnedFd> {
    let bytes = SegmentLayout::new(&OPTIONS).expect("in range").bytes() as u64;
    vec![memfd(bytes, true), doorbells(), memfd(4096, true)]
}

fn doorbells() -> OwnedFd {
    memfd(crate::fabric::shm::wakeup::doorbells::BYTES as u64, true)
}

#[test]
fn a_message_that_is_no_hello_is_rejected() {
    assert_rejected(|_, _| (b"GET / HTTP/1.1".to_vec(), Vec::new()), "hung up");
    assert_rejected(|_, _| (HandshakeMessage::Ready.to_bytes(), Vec::new()), "hung up");
    assert_rejected(|_, _| (vec![0; 5000], Vec::new()), "hung up");
    let version = |from: &ShmEndpoint, to: &ShmEndpoint| {
        let mut bytes = HandshakeMessage::Hello(hello(from, to)).to_bytes();
        bytes[8..10].copy_from_slice(&(VERSION + 1).to_le_bytes());
        (bytes, good_files())
    };
    assert_rejected(version, "hung up");
    let cut = |from: &ShmEndpoint, to: &ShmEndpoint| {
        let mut bytes = HandshakeMessage::Hello(hello(from, to)).to_bytes();
        bytes.pop();
        (bytes, good_files())
    };
    assert_rejected(cut, "hung up");
}

#[test]
fn a_hello_for_or_from_another_endpoint_is_rejected() {
    let other = |from: &ShmEndpoint, to: &ShmEndpoint| {
        (HandshakeMessage::Hello(ShmHello { to: [0; 16], ..hello(from, to) }).to_bytes(), good_files())
    };
    assert_rejected(other, "another endpoint");
    let other = |from: &ShmEndpoint, to: &ShmEndpoint| {
        (HandshakeMessage::Hello(ShmHello { from: [0; 16], ..hello(from, to) }).to_bytes(), good_files())
    };
    assert_rejected(other, "another endpoint");
}

#[test]
fn too_few_or_too_many_files_are_rejected() {
    let with = |count: usize| {
        move |from: &ShmEndpoint, to: &ShmEndpoint| {
            let files = (0..count).map(|_| memfd(1 << 20, true)).collect();
            (HandshakeMessage::Hello(hello(from, to)).to_bytes(), files)
        }
    };
    assert_rejected(with(0), "0 files where its hello promises 3");
    assert_rejected(with(2), "2 files");
    assert_rejected(with(4), "4 files");
    assert_rejected(with(35), "35 files");
}

#[test]
fn files_without_seals_are_rejected() {
    let bytes = SegmentLayout::new(&OPTIONS).expect("in range").bytes() as u64;
    let with = |files: fn(u64) -> Vec<OwnedFd>| {
        move |from: &ShmEndpoint, to: &ShmEndpoint| {
            (HandshakeMessage::Hello(hello(from, to)).to_bytes(), files(bytes))
        }
    };
    assert_rejected(with(|bytes| vec![memfd(bytes, false), doorbells(), memfd(4096, true)]), "not sealed");
    assert_rejected(with(|bytes| vec![memfd(bytes, true), doorbells(), memfd(4096, false)]), "not sealed");
    assert_rejected(with(|bytes| vec![memfd(bytes - 1, true), doorbells(), memfd(4096, true)]), "bytes");
    assert_rejected(with(|bytes| vec![memfd(bytes, true), doorbells(), memfd(4095, true)]), "4095 bytes");
    let open = with(|bytes| {
        vec![
            memfd(bytes, true),
            memfd(crate::fabric::shm::wakeup::doorbells::BYTES as u64, false),
            memfd(4096, true),
        ]
    });
    assert_rejected(open, "doorbells are not sealed");
    assert_rejected(
        with(|bytes| vec![memfd(bytes, true), memfd(100, true), memfd(4096, true)]),
        "doorbells have 100",
    );
    let socket = |bytes| {
        let (one, _) = std::os::unix::net::UnixStream::pair().expect("sockets");
        vec![memfd(bytes, true), doorbells(), one.into()]
    };
    assert_rejected(with(socket), "not sealed");
}

/// Pages that are missing would come out of this process's own reserve, or kill it.
#[test]
fn a_segment_in_reserved_huge_pages_and_a_region_without_its_pages_are_rejected() {
    if let Err(error) = memfd_in(MemfdFlags::HUGETLB, 1 << 30, true) {
        return println!("skipped: no memfd in huge pages: {error}");
    }
    let huge = || memfd_in(MemfdFlags::HUGETLB, 1 << 30, true).expect("a memfd");
    let bytes = SegmentLayout::new(&OPTIONS).expect("in range").bytes() as u64;
    let with = |files: fn(u64, OwnedFd) -> Vec<OwnedFd>| {
        move |from: &ShmEndpoint, to: &ShmEndpoint| {
            (HandshakeMessage::Hello(hello(from, to)).to_bytes(), files(bytes, huge()))
        }
    };
    let segment = with(|_, huge| vec![huge, doorbells(), memfd(4096, true)]);
    assert_rejected(segment, "in reserved huge pages: it must have all of them");
    let region = with(|bytes, huge| vec![memfd(bytes, true), doorbells(), huge]);
    assert_rejected(region, "in reserved huge pages: it must have all of them");
}

#[test]
fn doorbells_in_reserved_huge_pages_are_rejected() {
    // Such a file needs no page of the reserve before it is mapped.
    if let Err(error) = memfd_in(MemfdFlags::HUGETLB, 1 << 30, true) {
        return println!("skipped: no memfd in huge pages: {error}");
    }
    assert_rejected(
        |from, to| {
            let segment = SegmentLayout::new(&OPTIONS).expect("in range").bytes() as u64;
            let doorbells = memfd_in(MemfdFlags::HUGETLB, 1 << 30, true).expect("a memfd");
            let files = vec![memfd(segment, true), doorbells, memfd(4096, true)];
            (HandshakeMessage::Hello(hello(from, to)).to_bytes(), files)
        },
        "doorbells are in reserved huge pages",
    );
}

#[test]
fn a_silent_connection_does_not_keep_the_peer_out() {
    let (acceptor, initiator) = (endpoint(&OPTIONS), endpoint(&OPTIONS));
    let (to_acceptor, to_initiator) = (acceptor.address().to_vec(), initiator.address().to_vec());
    let name = address(&acceptor).socket(acceptor.own.host).expect("a name");
    let _silent: Vec<ForeignFd> =
        (0..4).map(|_| socket::connect(&name, Deadline::after(TIMEOUT)).expect("connected")).collect();
    std::thread::scope(|scope| {
        let accepted = scope.spawn(|| acceptor.connect(Role::Acceptor, &to_initiator, TIMEOUT));
        initiator.connect(Role::Initiator, &to_acceptor, TIMEOUT).expect("connected");
        assert!(accepted.join().expect("no panic").is_ok());
    });
}

/// Processes that connect and say nothing, as many as the acceptor takes, do not end a handshake
/// that has begun.
#[test]
fn a_flood_of_silent_connections_does_not_end_a_handshake_that_has_begun() {
    let (acceptor, initiator) = (endpoint(&OPTIONS), endpoint(&OPTIONS));
    let (to_acceptor, to_initiator) = (address(&acceptor), initiator.address().to_vec());
    let name = to_acceptor.socket(to_acceptor.host).expect("a name");
    let (message, files) = (HandshakeMessage::Hello(hello(&initiator, &acceptor)), good_files());
    let connect = || socket::connect(&name, Deadline::after(TIMEOUT)).expect("connected");
    std::thread::scope(|scope| {
        let accepted = scope.spawn(|| acceptor.connect(Role::Acceptor, &to_initiator, TIMEOUT));
        let peer = connect();
        let files: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
        socket::send(&peer, &message, &files).expect("sent");
        assert!(has_news(&peer), "no answer");
        assert!(matches!(receive(&peer), Ok((HandshakeMessage::Hello(_), _))));
        let flood: Vec<ForeignFd> = (0..64).map(|_| connect()).collect();
        assert!(has_news(&flood[40]), "it was not closed");
        socket::send(&peer, &HandshakeMessage::Ready, &[]).expect("the connection is there");
        // It took the peer in, and found that the made-up files can't be mapped.
        let why = why(accepted.join().expect("no panic"));
        assert!(why.contains("mapping the peer's"), "{why}");
    });
}

#[test]
fn options_that_differ_end_both_sides_at_once_with_both_values() {
    let other = [
        (LinkOptions { depth: 64, ..OPTIONS }, "depth 64", "depth 8"),
        (LinkOptions { generation: 9, ..OPTIONS }, "generation 9", "generation 0"),
    ];
    for (options, theirs, ours) in other {
        let (acceptor, initiator) = (endpoint(&OPTIONS), endpoint(&options));
        let (to_acceptor, to_initiator) = (acceptor.address().to_vec(), initiator.address().to_vec());
        let start = Instant::now();
        std::thread::scope(|scope| {
            let accepted = scope.spawn(|| acceptor.connect(Role::Acceptor, &to_initiator, TIMEOUT));
            let initiator = why(initiator.connect(Role::Initiator, &to_acceptor, TIMEOUT));
            let acceptor = why(accepted.join().expect("no panic"));
            for text in [initiator, acceptor] {
                let value = ours.rsplit(' ').next().expect("a value");
                assert!(text.contains(theirs) && text.contains(&format!("this side {value}")), "{text}");
            }
        });
        assert!(start.elapsed() < TIMEOUT / 2);
    }
}

#[test]
fn peers_of_two_network_namespaces_meet_at_a_file_that_goes_with_the_endpoint() {
    let (mut acceptor, initiator) = (endpoint(&OPTIONS), endpoint_elsewhere());
    acceptor.listen_for(initiator.address()).expect("/dev/shm takes sockets");
    let (to_acceptor, to_initiator) = (acceptor.address().to_vec(), initiator.address().to_vec());
    let file = socket_file(&acceptor);
    let mode = std::fs::metadata(&file).expect("it is there").permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "only its user may connect");
    std::thread::scope(|scope| {
        let accepted = scope.spawn(|| acceptor.connect(Role::Acceptor, &to_initiator, TIMEOUT));
        initiator.connect(Role::Initiator, &to_acceptor, TIMEOUT).expect("connected");
        accepted.join().expect("no panic").map_err(|error| error.to_string()).expect("accepted");
    });
    assert!(!file.exists(), "it is left");
}

/// The kernel lists abstract names to every user, who could take the same name for a file.
#[test]
fn the_file_has_another_name_than_the_abstract_socket_before() {
    let mut acceptor = endpoint(&OPTIONS);
    let before = address(&acceptor).token;
    acceptor.listen_for(endpoint(&OPTIONS).address()).expect("nothing is to be done");
    assert_eq!(address(&acceptor).token, before);
    acceptor.listen_for(endpoint_elsewhere().address()).expect("/dev/shm takes sockets");
    assert_ne!(address(&acceptor).token, before);
    assert_eq!(acceptor.own, address(&acceptor));
}

#[test]
fn an_endpoint_without_a_file_is_refused_at_once_from_another_network_namespace() {
    let acceptor = endpoint(&OPTIONS);
    let start = Instant::now();
    let text = why(endpoint_elsewhere().connect(Role::Initiator, acceptor.address(), TIMEOUT));
    assert!(text.contains("connecting to the peer's socket"), "{text}");
    assert!(start.elapsed() < TIMEOUT / 2, "{:?}", start.elapsed());
}

#[test]
fn a_file_that_can_not_be_made_is_an_error_that_says_where() {
    let own = ShmAddress { token: [5; 16], ..address(&endpoint(&OPTIONS)) };
    let elsewhere = own.host.elsewhere();
    let _first = super::super::listen(&own, elsewhere).expect("a socket");
    let error = super::super::listen(&own, elsewhere).err().expect("it is there already").to_string();
    assert!(error.contains("listening on a Unix socket in /dev/shm"), "{error}");
    assert!(error.contains("let the process write there"), "{error}");
}

#[test]
fn the_wait_for_a_missing_peer_ends_at_the_deadline() {
    let (acceptor, other) = (endpoint(&OPTIONS), endpoint(&OPTIONS));
    let start = Instant::now();
    let text = why(acceptor.connect(Role::Acceptor, other.address(), SHORT_TIMEOUT));
    assert!(text.contains("100ms"), "{text}");
    assert!(start.elapsed() >= SHORT_TIMEOUT && start.elapsed() < TIMEOUT);
    // The other way round: the peer exists, but does not answer.
    let initiator = endpoint(&OPTIONS);
    let text = why(initiator.connect(Role::Initiator, other.address(), SHORT_TIMEOUT));
    assert!(text.contains("100ms"), "{text}");
}

#[test]
fn a_flood_that_does_not_end_does_not_outlast_the_deadline() {
    let (acceptor, missing) = (endpoint(&OPTIONS), endpoint(&OPTIONS));
    let name = address(&acceptor).socket(acceptor.own.host).expect("a name");
    let start = Instant::now();
    std::thread::scope(|scope| {
        // Until the acceptor closes its socket.
        scope.spawn(|| {
            while start.elapsed() < TIMEOUT && socket::connect(&name, Deadline::after(TIMEOUT)).is_ok() {}
        });
        let why = why(acceptor.connect(Role::Acceptor, missing.address(), SHORT_TIMEOUT));
        assert!(why.contains("waiting for the peer to connect"), "{why}");
        assert!(start.elapsed() < TIMEOUT / 2, "{:?}", start.elapsed());
    });
}

#[test]
fn the_timeout_error_names_the_last_rejection() {
    let (acceptor, initiator) = (endpoint(&OPTIONS), endpoint(&OPTIONS));
    let name = address(&acceptor).socket(acceptor.own.host).expect("a name");
    let candidate = socket::connect(&name, Deadline::after(TIMEOUT)).expect("connected");
    send_bytes(&candidate, b"rubbish", &[]).expect("sent");
    let text = why(acceptor.connect(Role::Acceptor, initiator.address(), SHORT_TIMEOUT));
    assert!(
        text.contains("while others came; the last was refused: 7 bytes that are no message")
            && text.contains("100ms"),
        "{text}"
    );
}

#[test]
fn a_dropped_endpoint_refuses_at_once() {
    let (gone, initiator) = (endpoint(&OPTIONS), endpoint(&OPTIONS));
    let to_gone = gone.address().to_vec();
    drop(gone);
    let start = Instant::now();
    let text = why(initiator.connect(Role::Initiator, &to_gone, TIMEOUT));
    assert!(text.contains("has ended"), "{text}");
    assert!(start.elapsed() < TIMEOUT / 2);
}

#[test]
fn a_malformed_address_is_refused_at_once() {
    assert!(why(endpoint(&OPTIONS).connect(Role::Initiator, b"nonsense", TIMEOUT)).contains("address"));
    let mut foreign = endpoint(&OPTIONS).address().to_vec();
    foreign[12] ^= 1; // the boot id
    assert!(why(endpoint(&OPTIONS).connect(Role::Acceptor, &foreign, TIMEOUT)).contains("another host"));
}

#[test]
fn an_acceptor_whose_peer_dies_on_the_way_does_not_wait_for_it() {
    let acceptor = endpoint(&OPTIONS);
    let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("sleep(1)");
    let peer = ShmAddress { pid: child.id(), token: [7; 16], ..address(&acceptor) }.to_bytes();
    std::thread::scope(|scope| {
        let began = Instant::now();
        let accepted = scope.spawn(|| acceptor.connect(Role::Acceptor, &peer, TIMEOUT));
        std::thread::sleep(SHORT_TIMEOUT);
        assert!(!accepted.is_finished(), "it may still come");
        child.kill().expect("killed");
        let why = why(accepted.join().expect("no panic"));
        assert!(why.contains(&format!("process {} has ended", child.id())), "{why}");
        assert!(began.elapsed() < TIMEOUT / 2);
    });
    child.wait().expect("reaped");
}

#[test]
fn an_acceptor_whose_peer_has_ended_and_was_reaped_does_not_wait_for_it() {
    let acceptor = endpoint(&OPTIONS);
    let mut child = std::process::Command::new("true").spawn().expect("true(1)");
    child.wait().expect("reaped");
    let peer = ShmAddress { pid: child.id(), token: [7; 16], ..address(&acceptor) }.to_bytes();
    let began = Instant::now();
    let why = why(acceptor.connect(Role::Acceptor, &peer, TIMEOUT));
    assert!(why.contains(&format!("process {} has ended", child.id())), "{why}");
    assert!(began.elapsed() < TIMEOUT / 2);
}
