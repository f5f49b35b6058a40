//! The watcher's part of a session: it listens as long as the link is up, and replaces connections
//! that broke. No step waits.
//!
//! Connections are made again all together, under a number that grows. A side takes them only from
//! who knows its token, and with a number that it has not had. The initiator opens them. The
//! acceptor opens one to the initiator's endpoint and asks for them, so that it too learns whether
//! the peer's process has ended.

use super::super::io::Sockets;
use super::super::options::TcpOptions;
use super::super::session::{RepairMailbox, RepairOutcome};
use super::address::{TcpAddress, Token};
use super::arrivals::{ArrivingConnections, HELLO_TIME, LeftWaiting, QUIET, SharedArrivals};
use super::deadline::ConnectDeadline;
use super::dial::{DialError, DialledConnection};
use super::hello::{Hello, Speaker};
use super::set_up::into_link;
use crate::fabric::Role;
use rustix::event::epoll;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Time between two attempts of which the first has failed.
const RETRY: Duration = Duration::from_millis(20);
/// Attempts without an answer that the time of a repair is enough for, at each address.
const ATTEMPTS: u32 = 4;
/// The kernel repeats what is lost later and later. So a new attempt notices sooner that the
/// network works again.
const LONGEST_ATTEMPT: Duration = Duration::from_secs(5);

/// What both sides know of a link, and what this side was told to do about it.
pub(in super::super) struct SessionPlan {
    pub role: Role,
    pub options: TcpOptions,
    pub own: Token,
    pub peer: TcpAddress,
    /// The peer's end of the first main connection.
    pub seen: SocketAddr,
    /// Connections for bulk.
    pub streams: u8,
}

impl SessionPlan {
    /// Where the peer listens, as far as is known. One address if a connection with it was made.
    fn candidates(&self) -> Vec<SocketAddr> {
        let is_known = self.role == Role::Initiator || self.peer.hosts.contains(&self.seen.ip());
        let at = |host| SocketAddr::new(host, self.peer.port);
        if is_known { vec![at(self.seen.ip())] } else { self.peer.hosts.iter().copied().map(at).collect() }
    }

    /// How long an attempt at one of so many addresses may take. It takes two round trips, and the
    /// network may be slow.
    fn time_of_attempt(&self, addresses: usize) -> Duration {
        let part = self.options.time_to_repair() / (ATTEMPTS * addresses as u32);
        part.clamp(HELLO_TIME, LONGEST_ATTEMPT)
    }
}

/// Connections of the peer with one number, until all have come.
struct ArrivingSet {
    number: u32,
    sockets: Vec<Option<TcpStream>>,
    until: Instant,
}

/// An attempt to reach the peer.
struct RepairAttempt {
    connections: Vec<DialledConnection>,
    number: u32,
    until: Instant,
}

/// A repair that is under way.
struct Repair {
    until: Instant,
    /// When the next attempt begins.
    next: Instant,
    attempt: Option<RepairAttempt>,
    /// The address of the next attempt among the candidates, and how many refused in a row.
    candidate: usize,
    refused: usize,
    /// What this process lacked for the last attempt.
    lack: Option<Errno>,
}

/// The watcher's part of a session.
pub(in super::super) struct SessionWatch {
    plan: SessionPlan,
    listener: TcpListener,
    pub mailbox: Arc<RepairMailbox>,
    /// Number of the newest connections that were made, and of the newest attempt.
    number: u32,
    attempts: u32,
    arriving: ArrivingConnections,
    /// Whether more may wait: there was no place or no descriptor for them.
    has_more: bool,
    /// What this process lacked for them in the last look.
    lack: Option<Errno>,
    set: Option<ArrivingSet>,
    /// The connection by which the peer has asked, which tells it that this process lives.
    asker: Option<TcpStream>,
    repair: Option<Repair>,
    /// The end of the last repair, and when it made the present connections.
    last_until: Option<Instant>,
    made: Option<Instant>,
    /// When the peer must have ended connections of which one was cut.
    cut_until: Option<Instant>,
    /// When a repair is logged again for all to see.
    quiet: Option<ConnectDeadline>,
    shared: SharedArrivals,
}

/// The watcher's epoll, and what it calls the session.
#[derive(Clone, Copy)]
pub(in super::super) struct SessionEvents<'a> {
    pub epoll: &'a OwnedFd,
    pub data: epoll::EventData,
}

impl SessionEvents<'_> {
    fn add(self, socket: &impl rustix::fd::AsFd) {
        let flags =
            epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        // Without it the next tick finds what comes.
        let _ = epoll::add(self.epoll, socket, self.data, flags);
    }

    fn delete(self, sockets: &Sockets) {
        sockets.all().for_each(|socket| _ = epoll::delete(self.epoll, socket));
    }
}

impl SessionWatch {
    pub(in super::super) fn new(plan: SessionPlan, listener: TcpListener, shared: &SharedArrivals) -> Self {
        let arriving = ArrivingConnections::new(shared.clone(), plan.streams);
        SessionWatch {
            plan,
            listener,
            mailbox: Arc::default(),
            number: 0,
            attempts: 0,
            arriving,
            has_more: false,
            lack: None,
            set: None,
            asker: None,
            repair: None,
            last_until: None,
            made: None,
            cut_until: None,
            quiet: None,
            shared: shared.clone(),
        }
    }

    /// Begins to watch.
    pub(in super::super) fn start(&self, events: SessionEvents<'_>) {
        events.add(&self.listener);
    }

    /// The connections with this number are broken. `was_silent`: they had been for long before.
    pub(in super::super) fn broken(
        &mut self,
        number: u32,
        has_progress: bool,
        was_silent: bool,
        now: Instant,
    ) {
        // The owner may not have taken the newest ones yet.
        self.cut_until = None;
        let has_newer = number < self.number && self.mailbox.has_outcome();
        if !has_newer && self.repair.is_none() {
            let silence = if was_silent { self.plan.options.longest_silence() } else { Duration::ZERO };
            self.begin(has_progress, silence, now);
        }
    }

    /// One of the connections with this number was cut.
    pub(in super::super) fn cut(&mut self, number: u32, now: Instant) {
        if number == self.number {
            self.cut_until = Some(now + self.plan.options.time_to_repair());
        }
    }

    /// Begins a repair. Repairs without progress in between share their time, unless the
    /// connections in between have lived for as long: an idle link makes no progress. At the end
    /// they may have been of no use for as long as `silence`.
    fn begin(&mut self, has_progress: bool, silence: Duration, now: Instant) {
        let time = self.plan.options.time_to_repair();
        let have_lived = self.made.is_some_and(|made| now.saturating_duration_since(made) >= time + silence);
        let until = self.last_until.filter(|_| !has_progress && !have_lived);
        let until = until.unwrap_or_else(|| now + time);
        self.last_until = Some(until);
        let next = if has_progress { now } else { now + RETRY };
        self.repair = Some(Repair { until, next, attempt: None, candidate: 0, refused: 0, lack: None });
    }

    /// Goes on with what is under way. Returns whether to call this again within a tick.
    pub(in super::super) fn step(&mut self, events: SessionEvents<'_>, now: Instant) -> bool {
        self.accept(events, now);
        self.set = self.set.take().filter(|set| set.until > now);
        self.dial(events, now);
        // Until the owner has acted: an outcome that it has not looked at gives way to a newer one.
        if self.cut_until.is_some_and(|until| until <= now) {
            self.mailbox.deliver(RepairOutcome::Overdue);
        }
        self.cut_until.is_some()
            || self.has_more
            || !self.arriving.is_empty()
            || self.set.is_some()
            || self.repair.is_some()
    }

    /// Takes the connections that have come, and those of the peer among them.
    fn accept(&mut self, events: SessionEvents<'_>, now: Instant) {
        let (own, listener, mut of_peer) = (self.plan.own, &self.listener, Vec::new());
        let left = self.arriving.take(
            || listener.accept(),
            |socket| events.add(socket),
            |hello, socket| {
                // The token first, whatever else is wrong.
                let is_peer = hello.token.is(&own);
                if is_peer {
                    of_peer.push((hello, socket));
                }
                is_peer
            },
        );
        (self.has_more, self.lack) = match left {
            LeftWaiting::Nothing => (false, None),
            LeftWaiting::More => (true, None),
            LeftWaiting::Lack(error) => (true, Some(error)),
        };
        for (hello, socket) in of_peer {
            self.admit(hello, socket, events, now);
        }
    }

    /// Takes a connection of the peer, if it is newer than the present ones. Closes any other.
    fn admit(&mut self, hello: Hello, socket: TcpStream, events: SessionEvents<'_>, now: Instant) {
        match (hello.speaker, self.plan.role) {
            (Speaker::Initiator, Role::Acceptor) if hello.number > self.number => {
                self.place(hello, socket, events, now);
            }
            (Speaker::Acceptor, Role::Initiator) if hello.number >= self.number => {
                self.attempts = self.attempts.max(hello.number);
                self.asker = Some(socket);
                if self.repair.is_none() {
                    // One who asks again and again gets no more time than one who does not.
                    let has_resumed = self.mailbox.has_resumed.load(Ordering::Relaxed);
                    self.begin(has_resumed || self.number == 0, Duration::ZERO, now);
                }
            }
            _ => tracing::debug!(
                number = hello.number,
                "a connection to a link was closed: its hello is old, or out of place"
            ),
        }
    }

    fn place(&mut self, hello: Hello, socket: TcpStream, events: SessionEvents<'_>, now: Instant) {
        let number = hello.number;
        if self.set.as_ref().is_none_or(|set| set.number < number) {
            let sockets = (0..=self.plan.streams).map(|_| None).collect();
            self.set = Some(ArrivingSet { number, sockets, until: now + self.plan.time_of_attempt(1) });
        }
        let Some(set) = self.set.as_mut().filter(|set| set.number == number) else { return };
        match set.sockets.get_mut(usize::from(hello.stream)) {
            Some(place @ None) => *place = Some(socket),
            _ => return,
        }
        if set.sockets.iter().any(Option::is_none) {
            return;
        }
        let sockets: Vec<TcpStream> =
            self.set.take().into_iter().flat_map(|set| set.sockets).flatten().collect();
        let answers = (0..).zip(&sockets).try_for_each(|(stream, mut socket)| {
            let hello = Hello { speaker: Speaker::Acceptor, stream, number, token: self.plan.peer.token };
            // The socket's buffer is empty, so that the hello fits.
            socket.write_all(&hello.to_bytes())
        });
        if answers.is_ok() {
            self.connected(sockets, number, events, now);
        }
    }

    /// Hands new connections to the link's owner.
    fn connected(&mut self, sockets: Vec<TcpStream>, number: u32, events: SessionEvents<'_>, now: Instant) {
        let Ok(sockets) = into_link(sockets, &self.plan.options) else { return };
        events.delete(&sockets);
        self.log(number);
        self.number = number;
        (self.made, self.cut_until) = (Some(now), None);
        self.mailbox.has_resumed.store(false, Ordering::Relaxed);
        (self.repair, self.asker) = (None, None);
        self.mailbox.deliver(RepairOutcome::Connected(sockets, number));
    }

    /// Logs a repair, for all to see once in a while.
    fn log(&mut self, number: u32) {
        const DONE: &str = "the connections to a peer were made again";
        if self.quiet.is_none_or(ConnectDeadline::is_over) && self.shared.may_log_repair() {
            self.quiet = Some(ConnectDeadline::after(QUIET));
            tracing::info!(peer = %self.plan.seen, number, "{DONE}");
        } else {
            tracing::debug!(peer = %self.plan.seen, number, "{DONE}");
        }
    }

    fn end(&mut self, outcome: RepairOutcome) {
        (self.repair, self.asker) = (None, None);
        self.mailbox.deliver(outcome);
    }

    /// Goes on with the repair.
    fn dial(&mut self, events: SessionEvents<'_>, now: Instant) {
        let Some(repair) = &mut self.repair else { return };
        if now >= repair.until {
            let lack = repair.lack.or(self.lack);
            return self.end(RepairOutcome::GivenUp(lack));
        }
        let step = match &mut repair.attempt {
            Some(attempt) if now < attempt.until => attempt.step(&self.plan),
            Some(_) => Err(DialError::Failed),
            None if now < repair.next => return,
            None => {
                let candidates = self.plan.candidates();
                // A peer that uses the numbers up gets no more connections.
                self.attempts = self.attempts.max(self.number).saturating_add(1);
                let to = candidates[repair.candidate % candidates.len()];
                let asks = self.number;
                let begun = RepairAttempt::begin(&self.plan, to, asks, self.attempts, now);
                begun.and_then(|mut attempt| {
                    attempt.connections.iter().for_each(|connection| events.add(&connection.socket));
                    let step = attempt.step(&self.plan);
                    repair.attempt = Some(attempt);
                    step
                })
            }
        };
        match step {
            Ok(false) => {}
            Ok(true) => {
                let Some(attempt) = repair.attempt.take() else { return };
                let sockets = attempt.connections.into_iter().map(|connection| connection.socket).collect();
                repair.next = now + RETRY;
                self.connected(sockets, attempt.number, events, now);
            }
            Err(DialError::OtherListener) => self.end(RepairOutcome::Gone),
            Err(error) => {
                repair.lack = if let DialError::Lack(error) = error { Some(error) } else { None };
                repair.attempt = None;
                repair.candidate += 1;
                repair.refused = if error == DialError::Refused { repair.refused + 1 } else { 0 };
                if repair.refused >= self.plan.candidates().len() {
                    return self.end(RepairOutcome::Gone);
                }
                repair.next = now + RETRY;
            }
        }
    }
}

impl RepairAttempt {
    /// Begins to open the connections with this number, or the one that asks for others than those
    /// with the number `asks`.
    fn begin(
        plan: &SessionPlan,
        to: SocketAddr,
        asks: u32,
        number: u32,
        now: Instant,
    ) -> Result<Self, DialError> {
        let (speaker, streams, number) = match plan.role {
            Role::Initiator => (Speaker::Initiator, plan.streams, number),
            Role::Acceptor => (Speaker::Acceptor, 0, asks),
        };
        let hello = |stream| Hello { speaker, stream, number, token: plan.peer.token };
        let open = |stream| DialledConnection::new(to, hello(stream));
        let connections = (0..=streams).map(open).collect::<Result<_, _>>()?;
        let until = now + plan.time_of_attempt(plan.candidates().len());
        Ok(RepairAttempt { connections, number, until })
    }

    /// Goes on. Returns whether all connections are made.
    fn step(&mut self, plan: &SessionPlan) -> Result<bool, DialError> {
        let mut all = true;
        for (stream, connection) in (0..).zip(&mut self.connections) {
            match connection.step()? {
                None => all = false,
                Some(answer) => {
                    let is_peer = answer.token.is(&plan.own);
                    let is_answer = (answer.speaker, answer.stream, answer.number)
                        == (Speaker::Acceptor, stream, self.number);
                    if !is_peer || !is_answer || plan.role == Role::Acceptor {
                        return Err(DialError::OtherListener);
                    }
                }
            }
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests;
