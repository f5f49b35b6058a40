//! The handshake of two endpoints: they check each other, then exchange hellos and the files of
//! their memory.
//!
//! The initiator sends its hello. The acceptor answers with its own hello, or refuses. The
//! initiator sends "ready", or refuses. A mistake that an honest peer can make (depth, generation)
//! ends the handshake on both sides at once, and the error has both values. The acceptor rejects
//! any other process that connects, and waits on.

use super::address::{EndpointToken, HostId, ShmAddress, check_uid};
use super::foreign::{self, ForeignFd};
use super::hello::{HandshakeMessage, ShmHello};
use super::socket::{self, Deadline, Listener, ReceiveFailure};
use crate::fabric::shm::memory::layout::SegmentLayout;
use crate::fabric::shm::memory::segment::SharedSegment;
use crate::fabric::shm::wakeup::doorbells;
use crate::fabric::{FabricError, FabricKind, LinkOptions};
use crate::memory::{is_in_huge_pages, verify_seals};
use crate::wire::LACKS;
use rustix::event::{PollFd, PollFlags};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// Connections that an acceptor may have open at a time.
const MAX_CANDIDATES: usize = 8;

/// Connections that one look refuses. More are left to the next look.
const MAX_REFUSED: usize = 16;

/// This side, as the peer will see it.
pub(crate) struct LocalSide<'a> {
    pub options: &'a LinkOptions,
    pub layout: &'a SegmentLayout,
    pub token: EndpointToken,
    pub host: HostId,
    pub uid: u32,
    pub segment: BorrowedFd<'a>,
    pub doorbells: BorrowedFd<'a>,
    pub has_barriers: bool,
    /// Number, bytes and file of each region of the pool.
    pub regions: Vec<(u16, u64, BorrowedFd<'a>)>,
}

/// The peer, checked. Nothing is mapped yet.
pub(crate) struct ShmPeer {
    pub pid: u32,
    /// A pidfd.
    pub process: OwnedFd,
    pub segment: OwnedFd,
    pub doorbells: OwnedFd,
    pub has_barriers: bool,
    /// Number, bytes and file of each region of the peer's pool.
    pub regions: Vec<(u16, u64, OwnedFd)>,
}

/// Why a connection is rejected.
enum Rejection {
    /// The expected peer and this side differ in a setting, so no other attempt succeeds either.
    Disagreement(String),
    /// The expected peer was refused, or has refused this side.
    Final(String),
    /// The process is not proven to be the expected peer.
    Candidate(String),
    /// This process lacks a resource, and would lack it again at once.
    Local(FabricError),
}

impl From<ReceiveFailure> for Rejection {
    fn from(failure: ReceiveFailure) -> Self {
        match failure {
            ReceiveFailure::Peer(why) => Rejection::Candidate(why),
            ReceiveFailure::NoDescriptor => {
                Rejection::Local(few_files("taking the peer's files", Errno::MFILE))
            }
        }
    }
}

impl Rejection {
    fn into_error(self) -> FabricError {
        match self {
            Rejection::Disagreement(why) => FabricError::Disagreement { fabric: FabricKind::Shm, why },
            Rejection::Final(why) | Rejection::Candidate(why) => refused(why),
            Rejection::Local(error) => error,
        }
    }

    /// What the peer is told.
    fn for_peer(&self) -> String {
        match self {
            Rejection::Disagreement(why) | Rejection::Final(why) | Rejection::Candidate(why) => why.clone(),
            Rejection::Local(error) => format!("its process lacks a resource: {error}"),
        }
    }
}

/// The error of a call of this process for which it has too few descriptors or too little memory.
fn few_files(tried: &'static str, error: Errno) -> FabricError {
    os(tried, "raise the limit of open files (ulimit -n) of this process, or free memory")(error)
}

/// Whether an error says that this process lacks something, whatever the peer does.
fn is_lack(error: Errno) -> bool {
    // ETOOMANYREFS: descriptors that this user has sent and nobody has taken count as open files.
    LACKS.contains(&error) || error == Errno::TOOMANYREFS
}

/// The error of a message of the handshake that could not be sent or waited for.
fn talking(error: Errno) -> FabricError {
    const TALK: &str = "talking to the peer";
    match is_lack(error) {
        true => few_files(TALK, error),
        false => os(TALK, "if the peer's process has ended, start over")(error),
    }
}

fn refused(why: String) -> FabricError {
    FabricError::Peer { fabric: FabricKind::Shm, why }
}

fn os(tried: &'static str, remedy: &'static str) -> impl Fn(Errno) -> FabricError {
    move |error| FabricError::Os {
        fabric: FabricKind::Shm,
        tried: tried.into(),
        remedy,
        source: error.into(),
    }
}

fn timeout(tried: &str, deadline: Deadline) -> FabricError {
    FabricError::Timeout { fabric: FabricKind::Shm, tried: tried.into(), after: deadline.after }
}

/// Connects to the endpoint at `address`.
///
/// # Errors
/// If it is not there, the deadline passes, or either side refuses the other.
pub(crate) fn initiate(
    side: &LocalSide<'_>,
    address: &ShmAddress,
    deadline: Deadline,
) -> Result<ShmPeer, FabricError> {
    const CONNECT: &str = "connecting to the peer's socket";
    let name = address.socket(side.host).map_err(os(CONNECT, "report this: the name is always valid"))?;
    let socket = match socket::connect(&name, deadline) {
        Ok(socket) => socket,
        Err(Errno::AGAIN) => return Err(timeout(CONNECT, deadline)),
        Err(error) if is_lack(error) => return Err(few_files(CONNECT, error)),
        Err(error) => {
            return Err(os(
                CONNECT,
                "if the peer's process has ended, or has given its endpoint up, start over",
            )(error));
        }
    };
    let identified = identify_peer(socket.as_fd(), side);
    let (pid, process) = identified.map_err(Rejection::into_error)?;
    let socket = socket.trust();
    socket::send(&socket, &side.hello(address), &side.files()).map_err(talking)?;
    if !deadline.wait(&mut [PollFd::new(&socket, PollFlags::IN)]).map_err(talking)? {
        return Err(timeout("waiting for the peer's hello", deadline));
    }
    let peer = match socket::receive(&socket).map_err(Rejection::from) {
        Ok((HandshakeMessage::Hello(hello), files)) => side.check_hello(hello, files, address, pid, process),
        Ok((HandshakeMessage::Refused(why), _)) => {
            return Err(refused(format!("it refused this side: {why}")));
        }
        Ok((HandshakeMessage::Ready, _)) => Err(Rejection::Candidate("it was ready before its hello".into())),
        Err(rejection) => Err(rejection),
    };
    match peer {
        Ok(peer) => {
            socket::send(&socket, &HandshakeMessage::Ready, &[]).map_err(talking)?;
            Ok(peer)
        }
        Err(rejection) => {
            // If this fails, the peer learns of it from the end of the connection.
            let _ = socket::send(&socket, &HandshakeMessage::Refused(rejection.for_peer()), &[]);
            Err(rejection.into_error())
        }
    }
}

/// Waits for the endpoint at `address` to connect to `listener`.
///
/// # Errors
/// If the deadline passes, or either side refuses the other.
pub(crate) fn accept(
    side: &LocalSide<'_>,
    listener: &Listener,
    address: &ShmAddress,
    deadline: Deadline,
) -> Result<ShmPeer, FabricError> {
    let mut candidates: Vec<Candidate> = Vec::new();
    let mut last_rejection = None;
    let process = process_of(address, side.host)?;
    loop {
        let mut fds = vec![PollFd::new(listener, PollFlags::IN)];
        fds.extend(candidates.iter().map(|candidate| PollFd::new(&candidate.socket, PollFlags::IN)));
        fds.extend(process.iter().map(|process| PollFd::new(process, PollFlags::IN)));
        let wait = os("waiting for the peer", "report this: the sockets are valid");
        if !deadline.wait(&mut fds).map_err(wait)? {
            return Err(no_peer_came(last_rejection, deadline));
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        let has_died = process.is_some() && ready.last() == Some(&true);
        // Backwards, so that candidates that are still to be checked keep their places.
        for k in (0..candidates.len()).rev().filter(|k| ready[k + 1]) {
            match candidates.swap_remove(k).receive_message(side, address) {
                Ok(CandidateProgress::Waits(candidate)) => candidates.push(candidate),
                Ok(CandidateProgress::Ready(peer)) => return Ok(peer),
                Err(Rejection::Candidate(why)) => last_rejection = Some(why),
                Err(rejection) => return Err(rejection.into_error()),
            }
        }
        // In a flood some socket is readable all the time.
        if deadline.has_passed() {
            return Err(no_peer_came(last_rejection, deadline));
        }
        if ready[0] {
            let mut refused = Vec::new();
            while refused.len() < MAX_REFUSED {
                let Some(socket) = accept_one(listener).map_err(Rejection::into_error)? else { break };
                match identify_peer(socket.as_fd(), side) {
                    Ok((pid, process)) => {
                        let (socket, state) = (socket.trust(), CandidateState::New { pid, process });
                        candidates.push(Candidate { socket, state });
                        // Its hello may be there already. It is read before others take its place.
                        break;
                    }
                    // Another user, for example. It takes no place of a candidate.
                    Err(Rejection::Candidate(why)) => {
                        last_rejection = Some(why);
                        refused.push(socket);
                    }
                    Err(rejection) => return Err(rejection.into_error()),
                }
            }
            foreign::close_all(refused);
            if candidates.len() > MAX_CANDIDATES {
                // A flood says nothing. Whoever has said hello was told the address.
                let silent =
                    candidates.iter().position(|one| matches!(one.state, CandidateState::New { .. }));
                candidates.remove(silent.unwrap_or(0));
            }
        } else if has_died {
            return Err(has_ended(address));
        }
    }
}

/// The expected peer's process, if it is visible from this PID namespace.
///
/// # Errors
/// If the process has ended.
fn process_of(address: &ShmAddress, here: HostId) -> Result<Option<OwnedFd>, FabricError> {
    let pid = i32::try_from(address.pid).ok().and_then(Pid::from_raw);
    let Some(pid) = pid.filter(|_| address.host.has_pids_of(here)) else { return Ok(None) };
    match pidfd_open(pid, PidfdFlags::empty()) {
        Err(Errno::SRCH) => Err(has_ended(address)),
        opened => Ok(opened.ok()),
    }
}

fn has_ended(address: &ShmAddress) -> FabricError {
    refused(format!("its process {} has ended", address.pid))
}

fn no_peer_came(last_rejection: Option<String>, deadline: Deadline) -> FabricError {
    const WAIT: &str = "waiting for the peer to connect";
    match last_rejection {
        None => timeout(WAIT, deadline),
        Some(why) => timeout(&format!("{WAIT}, while others came; the last was refused: {why}"), deadline),
    }
}

/// A process that has connected.
struct Candidate {
    socket: OwnedFd,
    state: CandidateState,
}

enum CandidateState {
    /// No hello has arrived yet.
    New { pid: u32, process: OwnedFd },
    /// Its hello was accepted, and ours was sent.
    Known(ShmPeer),
}

enum CandidateProgress {
    Waits(Candidate),
    Ready(ShmPeer),
}

fn accept_one(listener: &Listener) -> Result<Option<ForeignFd>, Rejection> {
    match socket::accept(listener) {
        Ok(socket) => Ok(Some(socket)),
        // The connection is gone already, or a signal arrived: there is nothing to accept now.
        Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
        Err(error) => Err(Rejection::Local(few_files("accepting the peer's connection", error))),
    }
}

impl Candidate {
    fn receive_message(
        self,
        side: &LocalSide<'_>,
        address: &ShmAddress,
    ) -> Result<CandidateProgress, Rejection> {
        let received = socket::receive(&self.socket).map_err(Rejection::from);
        let (message, files) = received.inspect_err(|rejection| {
            if let Rejection::Local(_) = rejection {
                // If this fails, the peer learns of it from the end of the connection.
                let _ = socket::send(&self.socket, &HandshakeMessage::Refused(rejection.for_peer()), &[]);
            }
        })?;
        match (self.state, message) {
            (CandidateState::New { pid, process }, HandshakeMessage::Hello(hello)) => {
                let peer = side.check_hello(hello, files, address, pid, process);
                let answer = match &peer {
                    Ok(_) => socket::send(&self.socket, &side.hello(address), &side.files()),
                    Err(rejection) => {
                        socket::send(&self.socket, &HandshakeMessage::Refused(rejection.for_peer()), &[])
                    }
                };
                let peer = peer?;
                answer.map_err(|error| match is_lack(error) {
                    true => Rejection::Local(talking(error)),
                    false => Rejection::Candidate(format!("it can't be answered: {error}")),
                })?;
                Ok(CandidateProgress::Waits(Candidate {
                    socket: self.socket,
                    state: CandidateState::Known(peer),
                }))
            }
            (CandidateState::Known(peer), HandshakeMessage::Ready) => Ok(CandidateProgress::Ready(peer)),
            (CandidateState::Known(_), HandshakeMessage::Refused(why)) => {
                Err(Rejection::Final(format!("it refused this side: {why}")))
            }
            _ => Err(Rejection::Candidate("it sent a message out of turn".into())),
        }
    }
}

/// Identifies the process at the other end, by an id that is 0 if the process is in another PID
/// namespace. Refuses a process of another user.
fn identify_peer(socket: BorrowedFd<'_>, side: &LocalSide<'_>) -> Result<(u32, OwnedFd), Rejection> {
    let who = socket::credentials(socket)
        .map_err(|error| Rejection::Candidate(format!("the kernel does not say who it is: {error}")))?;
    check_uid(who.uid, side.uid).map_err(Rejection::Candidate)?;
    let process = socket::process(socket, who.pid).map_err(|error| match is_lack(error) {
        true => Rejection::Local(few_files("watching the peer's process", error)),
        false => Rejection::Candidate(format!("its process {} can't be watched: {error}", who.pid)),
    })?;
    Ok((who.pid, process))
}

impl LocalSide<'_> {
    fn hello(&self, to: &ShmAddress) -> HandshakeMessage {
        HandshakeMessage::Hello(ShmHello {
            from: self.token,
            to: to.token,
            depth: self.options.depth,
            generation: self.options.generation,
            has_barriers: self.has_barriers,
            segment: self.layout.bytes() as u64,
            regions: self.regions.iter().map(|(id, len, _)| (*id, *len)).collect(),
        })
    }

    fn files(&self) -> Vec<BorrowedFd<'_>> {
        let regions = self.regions.iter().map(|(_, _, file)| *file);
        [self.segment, self.doorbells].into_iter().chain(regions).collect()
    }

    /// Checks a hello and its files.
    fn check_hello(
        &self,
        hello: ShmHello,
        files: Vec<ForeignFd>,
        address: &ShmAddress,
        pid: u32,
        process: OwnedFd,
    ) -> Result<ShmPeer, Rejection> {
        if hello.to != self.token || hello.from != address.token {
            return Err(Rejection::Candidate("its hello is for or from another endpoint".into()));
        }
        hello.check_settings(self.options, self.layout).map_err(Rejection::Disagreement)?;
        hello.check(self.options).map_err(Rejection::Final)?;
        if files.len() != hello.regions.len() + 2 {
            let (have, want) = (files.len(), hello.regions.len() + 2);
            return Err(Rejection::Candidate(format!(
                "it sent {have} files where its hello promises {want}"
            )));
        }
        let mut files = files.into_iter();
        let mut next = || files.next().ok_or_else(|| Rejection::Candidate("a file is missing".into()));
        // What is sealed is memory, so its close waits for nobody.
        let sealed = |file: ForeignFd, len: u64| match verify_seals(&file, len) {
            Ok(_) => Ok(file.trust()),
            Err(error) => Err(Rejection::Candidate(error.to_string())),
        };
        let segment = sealed(next()?, hello.segment)?;
        // `munmap` of its bytes would fail: its pages are larger.
        if is_in_huge_pages(&segment).unwrap_or(true) {
            return Err(Rejection::Candidate("its segment is in reserved huge pages".into()));
        }
        let doorbells = next()?;
        SharedSegment::check(&doorbells, doorbells::BYTES).map_err(Rejection::Candidate)?;
        let doorbells = doorbells.trust();
        let mut regions = Vec::with_capacity(hello.regions.len());
        for (id, len) in hello.regions {
            regions.push((id, len, sealed(next()?, len)?));
        }
        Ok(ShmPeer { pid, process, segment, doorbells, has_barriers: hello.has_barriers, regions })
    }
}
