//! The watcher of a fabric: one thread, asleep until something comes for an armed port.
//!
//! The sockets of a port's links are in an epoll of the port, and the epolls of all ports in the
//! watcher's. A port that is armed is watched for one event. The watcher then calls the port's
//! notifier. It moves no data of links.
//!
//! It also finishes links that were detached: it sends what was posted before, and reads until the
//! peer has closed too. A socket that is closed with unread bytes would be reset, and the peer
//! would lose what it has not read yet.
//!
//! And it makes new connections for links whose connections broke: see `session`.
#![allow(clippy::disallowed_types)] // tables that ports and links change when they are made or end

use super::connect::repair::{SessionEvents, SessionWatch};
use super::failure::{LIMITS, os};
use super::io::{self, SocketRead};
use super::outgoing::Outgoing;
use super::session::SessionOrder;
use crate::fabric::FabricError;
use crate::memory::ForkGuard;
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::fd::{AsFd, OwnedFd};
use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What the watcher calls when something has come for an armed port.
pub type Notifier = Arc<dyn Fn() + Send + Sync>;

/// Event of the eventfd. Ports count from 1.
const CHANGED: u64 = 0;
/// Events of sessions: their numbers are above this.
const SESSIONS: u64 = 1 << 32;
/// Event of a port's own eventfd among those of its links.
pub(super) const REPAIRED: u64 = u64::MAX;
/// How long a detached link has to send what was posted, and the peer to close.
const LEAVE: Duration = Duration::from_secs(2);
/// How long links have to send what was posted when the fabric ends.
const LAST: Duration = Duration::from_millis(500);
/// Time between two looks at detached links.
const TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
/// Bytes that a look sends for a detached link, about. It reads and drops as many of all together.
const TICK_BYTES: u64 = 4 << 20;

/// The watcher. Its thread starts with the first link, and ends when the last holder drops this.
pub(super) struct Watcher {
    shared: Arc<TcpWatcherShared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// The watcher of a fabric, which its ports and links hold.
#[derive(Default)]
pub(super) struct WatcherOfPorts(Mutex<Weak<Watcher>>);

impl WatcherOfPorts {
    /// The watcher; a new one if no port or link has one.
    pub(super) fn get(&self) -> Result<Arc<Watcher>, FabricError> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(watcher) = known.upgrade() {
            return Ok(watcher);
        }
        let watcher = Arc::new(Watcher::new()?);
        *known = Arc::downgrade(&watcher);
        Ok(watcher)
    }
}

pub(super) struct TcpWatcherShared {
    epoll: OwnedFd,
    /// Readable when the thread is to look: a link was detached, or the thread is to end.
    changed: OwnedFd,
    ports: Mutex<HashMap<u64, Arc<ArmedPort>>>,
    detached: Mutex<Vec<Outgoing>>,
    orders: Mutex<Vec<SessionOrder>>,
    /// Sessions so far.
    sessions: AtomicU64,
    is_over: AtomicBool,
    /// A forked child inherits the descriptors, and must not touch them.
    fork_guard: ForkGuard,
}

struct ArmedPort {
    notify: Notifier,
    /// Whether the event that the port was armed for has come.
    has_fired: AtomicBool,
}

/// The epoll of a port.
pub(super) struct PortWatch {
    pub watcher: Arc<Watcher>,
    state: Arc<ArmedPort>,
    number: u64,
    /// Has the sockets of the port's links.
    pub epoll: OwnedFd,
    /// Readable when the repair of a link has ended. The epoll has it too.
    pub repaired: Arc<OwnedFd>,
}

impl Watcher {
    /// A watcher without its thread.
    pub(super) fn new() -> Result<Watcher, FabricError> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(|error| os("making an epoll", error, LIMITS))?;
        let changed = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| os("making an eventfd", error, LIMITS))?;
        epoll::add(&epoll, &changed, epoll::EventData::new_u64(CHANGED), epoll::EventFlags::IN)
            .map_err(|error| os("watching an eventfd", error, LIMITS))?;
        let shared = Arc::new(TcpWatcherShared {
            epoll,
            changed,
            ports: Mutex::default(),
            detached: Mutex::default(),
            orders: Mutex::default(),
            sessions: AtomicU64::new(0),
            is_over: AtomicBool::new(false),
            fork_guard: ForkGuard::of_this_process(),
        });
        Ok(Watcher { shared, thread: Mutex::default() })
    }

    /// Starts the thread, unless it runs.
    pub(super) fn start(&self) -> Result<(), FabricError> {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if thread.is_none() {
            let of_thread = Arc::clone(&self.shared);
            let started = std::thread::Builder::new().name("tw-tcp-watch".into());
            let started = started.spawn(move || of_thread.run());
            *thread = Some(started.map_err(|error| os("starting the watcher's thread", error, LIMITS))?);
        }
        Ok(())
    }

    /// Watches a new port, whose events are told to `notify`.
    pub(super) fn watch(self: &Arc<Self>, notify: Notifier) -> Result<PortWatch, FabricError> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(|error| os("making the epoll of a port", error, LIMITS))?;
        let repaired = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| os("making the eventfd of a port", error, LIMITS))?;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&epoll, &repaired, epoll::EventData::new_u64(REPAIRED), flags)
            .map_err(|error| os("watching the eventfd of a port", error, LIMITS))?;
        let state = Arc::new(ArmedPort { notify, has_fired: AtomicBool::new(false) });
        let mut ports = self.shared.ports();
        let number = (1..).find(|number| !ports.contains_key(number)).unwrap_or(u64::MAX);
        ports.insert(number, Arc::clone(&state));
        drop(ports);
        let port =
            PortWatch { watcher: Arc::clone(self), state, number, epoll, repaired: Arc::new(repaired) };
        // Without a flag: not before it is armed.
        let flags = epoll::EventFlags::ONESHOT;
        epoll::add(&self.shared.epoll, &port.epoll, epoll::EventData::new_u64(number), flags)
            .map_err(|error| os("watching the epoll of a port", error, LIMITS))?;
        Ok(port)
    }

    /// What sessions know of the watcher.
    pub(super) fn shared(&self) -> &Arc<TcpWatcherShared> {
        &self.shared
    }

    /// Finishes a detached link. In a forked child the link is only forgotten: it is the parent's.
    pub(super) fn finish(&self, link: Outgoing) {
        if !self.shared.fork_guard.in_child() {
            self.shared.detached().push(link);
            self.shared.look();
        }
    }

    /// Whether this process is a forked child, which has no part in its parent's links.
    pub(super) fn in_child(&self) -> bool {
        self.shared.fork_guard.in_child()
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if self.shared.fork_guard.in_child() {
            // It has no such thread.
            std::mem::forget(thread);
            return;
        }
        self.shared.is_over.store(true, Ordering::Release);
        self.shared.look();
        if let Some(thread) = thread.filter(|t| t.thread().id() != std::thread::current().id()) {
            let _ = thread.join();
        }
    }
}

impl PortWatch {
    /// The next event of the port's epoll is told to its notifier.
    pub(super) fn arm(&self) {
        self.state.has_fired.store(false, Ordering::Relaxed);
        let (data, flags) = (epoll::EventData::new_u64(self.number), epoll::EventFlags::ONESHOT);
        // Both descriptors are open, and the one is in the other.
        let _ = epoll::modify(&self.watcher.shared.epoll, &self.epoll, data, flags | epoll::EventFlags::IN);
    }

    /// Whether the event has come that the port was armed for.
    #[inline]
    pub(super) fn has_fired(&self) -> bool {
        self.state.has_fired.load(Ordering::Acquire)
    }

    /// Ends the sleep of those who wait for the port.
    pub(super) fn notify(&self) {
        (self.state.notify)();
    }
}

impl Drop for PortWatch {
    fn drop(&mut self) {
        self.watcher.shared.ports().remove(&self.number);
        if !self.watcher.in_child() {
            let _ = epoll::delete(&self.watcher.shared.epoll, &self.epoll);
        }
    }
}

impl TcpWatcherShared {
    fn ports(&self) -> MutexGuard<'_, HashMap<u64, Arc<ArmedPort>>> {
        self.ports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn detached(&self) -> MutexGuard<'_, Vec<Outgoing>> {
        self.detached.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A number for a new session.
    pub(super) fn next_session(&self) -> u64 {
        self.sessions.fetch_add(1, Ordering::Relaxed)
    }

    /// Tells the thread what to do for a session. A forked child has no part in sessions.
    pub(super) fn order(&self, order: SessionOrder) {
        if !self.fork_guard.in_child() {
            self.orders.lock().unwrap_or_else(PoisonError::into_inner).push(order);
            self.look();
        }
    }

    /// Wakes the thread.
    fn look(&self) {
        // It fails only where the count is full, and then the thread looks anyway.
        let _ = rustix::io::write(&self.changed, &1u64.to_ne_bytes());
    }

    fn run(&self) {
        let mut events = [const { MaybeUninit::<epoll::Event>::uninit() }; 16];
        let mut links: Vec<LeavingLink> = Vec::new();
        let mut sessions = Sessions::default();
        loop {
            let tick = (!links.is_empty() || !sessions.due.is_empty()).then_some(&TICK);
            let ready = match epoll::wait(self.epoll.as_fd(), &mut events, tick) {
                Ok((ready, _)) => &*ready,
                Err(_) => continue, // a signal
            };
            for event in ready {
                let event = *event;
                match event.data.u64() {
                    CHANGED => {
                        // Read first: an end that is told between the two makes it readable again.
                        let _ = rustix::io::read(&self.changed, &mut [0; 8]);
                    }
                    number if number >= SESSIONS => sessions.due.push(number - SESSIONS),
                    number => self.fire(number),
                }
            }
            links.extend(self.detached().drain(..).map(LeavingLink::new));
            if self.is_over.load(Ordering::Acquire) {
                return finish(links);
            }
            step_all(&mut links, TICK_BYTES, |_| false);
            let orders = std::mem::take(&mut *self.orders.lock().unwrap_or_else(PoisonError::into_inner));
            sessions.step(orders, &self.epoll, Instant::now());
        }
    }

    fn fire(&self, number: u64) {
        let port = self.ports().get(&number).cloned();
        if let Some(port) = port {
            port.has_fired.store(true, Ordering::Release);
            (port.notify)();
        }
    }
}

/// The sessions of the links.
#[derive(Default)]
struct Sessions {
    all: HashMap<u64, SessionWatch>,
    /// Those to be looked at, soon or with the next tick.
    due: Vec<u64>,
}

impl Sessions {
    fn step(&mut self, orders: Vec<SessionOrder>, epoll: &OwnedFd, now: Instant) {
        for order in orders {
            match order {
                SessionOrder::Watch(id, session) => {
                    session.start(events(epoll, id));
                    self.all.insert(id, *session);
                }
                SessionOrder::Repair { session: id, broken, has_progress, was_silent } => {
                    if let Some(session) = self.all.get_mut(&id) {
                        session.broken(broken, has_progress, was_silent, now);
                        self.due.push(id);
                    }
                }
                SessionOrder::Cut { session: id, number } => {
                    if let Some(session) = self.all.get_mut(&id) {
                        session.cut(number, now);
                        self.due.push(id);
                    }
                }
                SessionOrder::Forget(id) => _ = self.all.remove(&id),
            }
        }
        self.due.sort_unstable();
        self.due.dedup();
        let all = &mut self.all;
        self.due.retain(|id| all.get_mut(id).is_some_and(|session| session.step(events(epoll, *id), now)));
    }
}

fn events(epoll: &OwnedFd, session: u64) -> SessionEvents<'_> {
    SessionEvents { epoll, data: epoll::EventData::new_u64(SESSIONS + session) }
}

/// Gives the links a moment to send what was posted.
fn finish(mut links: Vec<LeavingLink>) {
    let start = Instant::now();
    loop {
        step_all(&mut links, TICK_BYTES, |link| link.is_shut);
        if links.is_empty() || start.elapsed() >= LAST {
            return;
        }
        std::thread::yield_now();
    }
}

/// Goes on with detached links, and reads `left` bytes about. Those that are finished, or done, go.
fn step_all(links: &mut Vec<LeavingLink>, mut left: u64, is_done: impl Fn(&LeavingLink) -> bool) {
    links.retain_mut(|link| !link.step(&mut left) && !is_done(link));
    if !links.is_empty() {
        // Each look begins with another link: a peer may send as much as a look reads, without end.
        links.rotate_left(1);
    }
}

/// A link that its owner has detached.
struct LeavingLink {
    out: Outgoing,
    since: Instant,
    /// Whether all is sent.
    is_shut: bool,
}

impl LeavingLink {
    fn new(out: Outgoing) -> Self {
        LeavingLink { out, since: Instant::now(), is_shut: false }
    }

    /// Sends, and reads `left` bytes about. Returns whether the link is finished.
    fn step(&mut self, left: &mut u64) -> bool {
        self.out.pump(TICK_BYTES);
        if self.out.is_done() && !self.is_shut {
            self.is_shut = true;
            self.out.sockets.shut_down();
        }
        let ended = self.out.sockets.all().filter(|socket| has_ended(socket, left)).count();
        ended == 1 + self.out.sockets.bulk.len() || self.since.elapsed() >= LEAVE
    }
}

/// Drops what has come on a connection, `left` bytes about. Returns whether the peer has closed it.
fn has_ended(socket: &std::net::TcpStream, left: &mut u64) -> bool {
    let mut dropped = [0; 16 << 10];
    loop {
        match io::receive(socket, &mut dropped) {
            Ok(SocketRead::Bytes(bytes)) => *left = left.saturating_sub(bytes as u64),
            Ok(SocketRead::Nothing) => return false,
            Ok(SocketRead::End) | Err(_) => return true,
        }
        if *left == 0 {
            return false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::io::Sockets;
    use super::*;
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    /// A link whose owner has detached it, and its peer's end.
    fn leaving() -> (LeavingLink, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let main = listener.accept().unwrap().0;
        [&main, &peer].into_iter().for_each(|socket| socket.set_nonblocking(true).unwrap());
        (LeavingLink::new(Outgoing::new(Sockets { main, bulk: Vec::new() }, 4, 1 << 16)), peer)
    }

    #[test]
    fn links_that_leave_are_read_in_turn() {
        const LOOKS: u64 = 200;
        const LOOK_BYTES: u64 = 1 << 20;
        let (mut links, mut peers): (Vec<_>, Vec<_>) = (0..3).map(|_| leaving()).unzip();
        let mut sent = [0; 3];
        let chunk = vec![1; 64 << 10];
        for _ in 0..LOOKS {
            for (peer, sent) in peers.iter_mut().zip(&mut sent) {
                while let Ok(bytes) = peer.write(&chunk) {
                    *sent += bytes as u64;
                }
            }
            step_all(&mut links, LOOK_BYTES, |_| false);
        }
        println!("{sent:?} bytes");
        assert!(sent.iter().all(|one| sent.iter().all(|other| other / 2 < *one)), "{sent:?}");
        drop(peers);
        let begin = Instant::now();
        while !links.is_empty() {
            assert!(begin.elapsed() < 5 * LEAVE, "a link stays");
            step_all(&mut links, LOOK_BYTES, |_| false);
        }
    }
}
