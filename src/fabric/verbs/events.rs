//! The thread that watches the devices: their asynchronous events (`ibv_get_async_event(3)`), and
//! the completion channels of the ports. The thread publishes the meaning of an asynchronous event
//! on a board that pollers read, and notifies a port's sleepers of a completion.
#![allow(clippy::disallowed_types)] // tables that links and ports change when they are made or end

use super::context::DeviceContext;
use super::cq::CompletionChannel;
use super::device::Gid;
use super::failure::os;
use super::sleeper::PortWakeup;
use super::sys::*;
use crate::fabric::log_rate_limit::LogRateLimit;
use crate::fabric::{FabricError, LinkFailure, Sleep, Wakeup};
use rustix::event::Timespec;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fd::{AsFd, OwnedFd};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Instant;

/// How long a port may be down before its links are; a cable that is plugged back is found within
/// the retries.
const PORT_DOWN_TICKS: u32 = 20;
/// How long the thread waits at a time, which is also the measure of time for links that end.
const TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// The meaning of events for the link of a queue pair.
const FINE: u32 = 0;
const CQ_ERR: u32 = 1;
const QP_FATAL: u32 = 2;
const QP_REQ_ERR: u32 = 3;
const QP_ACCESS_ERR: u32 = 4;
const DEVICE_FATAL: u32 = 5;
const PORT_DOWN: u32 = 6;
const REFUSED: u32 = 7;

/// The state that the thread and the pollers share.
#[derive(Default)]
struct EventBoard {
    /// The place of the device and the word of each queue pair, by its address.
    pairs: Mutex<HashMap<usize, (usize, Arc<AtomicU32>)>>,
    /// Grows with each piece of news.
    news: AtomicU32,
    /// Tenths of a second, about.
    ticks: AtomicU32,
    ports: Mutex<Vec<WatchedPort>>,
    /// What the thread is to log for pollers, which must not block, each with the number of those
    /// that were left out before it.
    lost_rails: Mutex<Vec<(LostRail, u64)>>,
    rails_log: LogRateLimit,
    /// The thread is to end.
    is_over: AtomicBool,
}

/// A completion channel of a port, which the thread watches.
#[derive(Clone)]
struct WatchedPort {
    /// The place of the device.
    device: usize,
    channel: Arc<CompletionChannel>,
    wakeup: Arc<PortWakeup>,
}

impl WatchedPort {
    /// Takes the channel's events, and notifies the port's sleepers.
    fn take(&self) {
        let mut is_taken = false;
        while self.channel.take() {
            is_taken = true;
        }
        if is_taken {
            self.wakeup.notify();
        }
    }
}

impl EventBoard {
    fn pairs(&self) -> MutexGuard<'_, HashMap<usize, (usize, Arc<AtomicU32>)>> {
        self.pairs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lost_rails(&self) -> MutexGuard<'_, Vec<(LostRail, u64)>> {
        self.lost_rails.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn log(&self, lost: LostRail) {
        if let Some(left_out) = self.rails_log.line() {
            self.lost_rails().push((lost, left_out));
        }
    }

    fn ports(&self) -> MutexGuard<'_, Vec<WatchedPort>> {
        self.ports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the pollers that the board has news: ends every sleep on every port.
    fn announce(&self) {
        self.news.fetch_add(1, Ordering::AcqRel);
        for port in &*self.ports() {
            port.wakeup.wake(Sleep::Waiter);
            port.wakeup.wake(Sleep::Background);
        }
    }

    fn tell(&self, pair: usize, what: u32) {
        if let Some((_, word)) = self.pairs().get(&pair) {
            record(word, what);
        }
    }

    /// Tells all queue pairs of a device.
    fn tell_all(&self, device: usize, what: u32) {
        for (_, word) in self.pairs().values().filter(|(of, _)| *of == device) {
            record(word, what);
        }
    }
}

/// Records the first event of a queue pair. A later event replaces a refusal of the driver, as it
/// says the cause.
fn record(word: &AtomicU32, what: u32) {
    let is_open = |word: u32| word == FINE || word == REFUSED;
    let _ = word.fetch_update(Ordering::AcqRel, Ordering::Acquire, |word| is_open(word).then_some(what));
}

/// A rail that a link has lost, for the log.
pub(super) struct LostRail {
    pub device: String,
    /// The GIDs of both ends.
    pub between: [Gid; 2],
    pub why: String,
    /// The devices that are left.
    pub left: String,
}

impl LostRail {
    fn log(&self, left_out: u64) {
        let LostRail { device, between: [own, peer], why, left } = self;
        tracing::warn!(
            %device, %own, %peer, %why, %left, left_out,
            "a link goes on without one of its rails, until it is made again"
        );
    }
}

/// The thread that watches the devices.
pub(super) struct DeviceWatcher {
    board: Arc<EventBoard>,
    /// Readable when the thread is to look at the board: there is another port, or it is to end.
    changed: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

/// One queue pair's place on the board.
pub(super) struct WatchedPair {
    board: Weak<EventBoard>,
    pair: usize,
    word: Arc<AtomicU32>,
}

impl DeviceWatcher {
    /// Starts the thread for these devices, and the port of each.
    pub fn start(devices: Vec<(Arc<DeviceContext>, u8)>) -> Result<Arc<Self>, FabricError> {
        let remedy = "raise the limits of open files and threads";
        for (context, _) in &devices {
            rustix::io::ioctl_fionbio(context.async_fd(), true)
                .map_err(|error| os("making asynchronous events non-blocking", error.into(), remedy))?;
        }
        let changed = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| os("making an eventfd", error.into(), remedy))?;
        let own = changed.try_clone().map_err(|error| os("copying an eventfd", error, remedy))?;
        let board = Arc::<EventBoard>::default();
        let shared = Arc::clone(&board);
        let thread = std::thread::Builder::new()
            .name("tensorwire-ibv".into())
            .spawn(move || watch(&devices, &shared, &own))
            .map_err(|error| os("starting the thread for asynchronous events", error, remedy))?;
        Ok(Arc::new(DeviceWatcher { board, changed, thread: Some(thread) }))
    }

    /// A number that grows with each piece of news.
    #[inline]
    pub fn news(&self) -> u32 {
        self.board.news.load(Ordering::Acquire)
    }

    /// Tenths of a second since the start, about.
    pub fn ticks(&self) -> u32 {
        self.board.ticks.load(Ordering::Relaxed)
    }

    /// The thread notifies `wakeup` of completions on the channels of a port, one of each device by
    /// its place, from now on.
    pub fn watch_port(&self, channels: &[Arc<CompletionChannel>], wakeup: &Arc<PortWakeup>) {
        let watched = channels.iter().enumerate().map(|(device, channel)| WatchedPort {
            device,
            channel: Arc::clone(channel),
            wakeup: Arc::clone(wakeup),
        });
        self.board.ports().extend(watched);
        self.look();
    }

    /// The thread logs a lost rail.
    pub fn log(&self, lost: LostRail) {
        self.board.log(lost);
        self.look();
    }

    fn look(&self) {
        // It fails only where the count is full, and then the thread looks anyway.
        let _ = rustix::io::write(&self.changed, &1u64.to_ne_bytes());
    }

    /// A place on the board for a new queue pair of the device at this place.
    pub fn register(&self, device: usize, pair: *mut ibv_qp) -> WatchedPair {
        let word = Arc::new(AtomicU32::new(FINE));
        self.board.pairs().insert(pair as usize, (device, Arc::clone(&word)));
        WatchedPair { board: Arc::downgrade(&self.board), pair: pair as usize, word }
    }
}

impl Drop for DeviceWatcher {
    fn drop(&mut self) {
        self.board.is_over.store(true, Ordering::Release);
        self.look();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl WatchedPair {
    /// Why the queue pair can't be used any more, if an event has told.
    pub fn failure(&self, device: &str) -> Option<LinkFailure> {
        let (event, cause) = match self.word.load(Ordering::Acquire) {
            FINE => return None,
            QP_REQ_ERR => return Some(LinkFailure::Protocol("the peer sent an invalid request".into())),
            QP_ACCESS_ERR => {
                return Some(LinkFailure::Protocol(
                    "the peer used a key or bounds that were not granted".into(),
                ));
            }
            CQ_ERR => ("a completion queue overran", "an error of this program: please report it"),
            QP_FATAL => ("a queue pair failed", "the driver or the device: see the kernel's log (`dmesg`)"),
            PORT_DOWN => ("the port is down", "check the cable, the switch and `ip link`"),
            REFUSED => {
                ("the driver refused a request", "the driver or the device: see the kernel's log (`dmesg`)")
            }
            _ => ("the device failed or was removed", "see the kernel's log (`dmesg`)"),
        };
        Some(LinkFailure::Device { device: device.into(), event, cause })
    }

    /// The driver has refused a request of the queue pair. The poller learns of it as of an event.
    #[cold]
    pub fn tell_refused(&self) {
        if let Some(board) = self.board.upgrade() {
            let _ = self.word.compare_exchange(FINE, REFUSED, Ordering::AcqRel, Ordering::Acquire);
            board.announce();
        }
    }

    /// Takes the queue pair off the board, before it is destroyed.
    pub fn forget(&self) {
        if let Some(board) = self.board.upgrade() {
            board.pairs().remove(&self.pair);
        }
    }
}

/// The thread's view of a device.
struct DeviceState<'a> {
    /// Its place.
    at: usize,
    context: &'a DeviceContext,
    port: u8,
    board: &'a EventBoard,
    start: Instant,
    /// The tick in which the port went down.
    down_since: Option<u32>,
    /// The descriptors of a device that is gone are always ready.
    is_gone: bool,
}

fn watch(devices: &[(Arc<DeviceContext>, u8)], board: &EventBoard, changed: &OwnedFd) {
    let start = Instant::now();
    let devices = devices.iter().enumerate();
    let mut devices: Vec<_> = devices
        .map(|(at, (context, port))| DeviceState {
            at,
            context,
            port: *port,
            board,
            start,
            down_since: None,
            is_gone: false,
        })
        .collect();
    loop {
        let ports = board.ports().clone();
        watch_ports(&mut devices, &ports, changed);
        // Pollers do not wait for the log.
        let lost = std::mem::take(&mut *board.lost_rails());
        lost.into_iter().for_each(|(lost, left_out)| lost.log(left_out));
        if board.is_over.load(Ordering::Acquire) {
            return;
        }
    }
}

/// Watches the devices and the channels of these ports until the board has changed.
fn watch_ports(devices: &mut [DeviceState<'_>], ports: &[WatchedPort], changed: &OwnedFd) {
    loop {
        // Those of a device that is gone are left out.
        let ports: Vec<_> = ports.iter().filter(|port| !devices[port.device].is_gone).collect();
        let present: Vec<_> = (0..devices.len()).filter(|at| !devices[*at].is_gone).collect();
        let descriptors = std::iter::once(changed.as_fd())
            .chain(present.iter().map(|at| devices[*at].context.async_fd()))
            .chain(ports.iter().map(|port| port.channel.fd()));
        let mut fds: Vec<_> = descriptors.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        let gone = devices.iter().filter(|device| device.is_gone).count();
        while devices.iter().filter(|device| device.is_gone).count() == gone {
            if poll(&mut fds, Some(&TICK)).is_err() {
                continue; // a signal
            }
            let ready = |at: usize| fds[at].revents();
            for (at, port) in ports.iter().enumerate().map(|(at, port)| (1 + present.len() + at, port)) {
                match ready(at) {
                    flags if flags.is_empty() => {}
                    flags if flags.contains(PollFlags::IN) => port.take(),
                    _ => devices[port.device].is_gone_now(),
                }
            }
            for (at, device) in devices.iter_mut().enumerate() {
                let place = present.iter().position(|present| *present == at);
                device.look(place.map_or(PollFlags::empty(), |place| ready(1 + place)));
            }
            if !ready(0).is_empty() {
                // Before the board is looked at: a later change makes it readable again.
                let _ = rustix::io::read(changed, &mut [0; 8]);
                return;
            }
        }
    }
}

impl DeviceState<'_> {
    /// The device is gone: its links fail.
    fn is_gone_now(&mut self) {
        self.is_gone = true;
        self.board.tell_all(self.at, DEVICE_FATAL);
        self.board.announce();
    }

    /// Publishes asynchronous events on the board. `ready` is the result of `poll` for their
    /// descriptor.
    fn look(&mut self, ready: PollFlags) {
        let board = self.board;
        let ticks = (self.start.elapsed().as_millis() / 100) as u32;
        board.ticks.store(ticks, Ordering::Relaxed);
        let mut told = false;
        if !self.is_gone && ready.intersects(PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL) {
            self.is_gone = true;
            board.tell_all(self.at, DEVICE_FATAL);
            told = true;
        }
        while let Some(event) = AsyncEvent::next(self.context) {
            told |= event.tell(self, ticks);
        }
        if self.down_since.is_some_and(|since| ticks.wrapping_sub(since) > PORT_DOWN_TICKS) {
            self.down_since = None;
            board.tell_all(self.at, PORT_DOWN);
            told = true;
        }
        if told {
            board.announce();
        }
    }
}

/// An event that was taken; acknowledged when it is dropped.
struct AsyncEvent<'a> {
    context: &'a DeviceContext,
    event: ibv_async_event,
}

impl<'a> AsyncEvent<'a> {
    fn next(context: &'a DeviceContext) -> Option<Self> {
        let mut event =
            ibv_async_event { element: ibv_async_element { cq: std::ptr::null_mut() }, event_type: u32::MAX };
        // SAFETY: an open device whose event descriptor does not block, and a struct for the
        // answer.
        let result = unsafe { (context.library.get_async_event)(context.as_ptr(), &mut event) };
        (result == 0).then_some(AsyncEvent { context, event })
    }

    /// Publishes the meaning of an event. Returns whether it is new.
    fn tell(&self, device: &mut DeviceState<'_>, ticks: u32) -> bool {
        let (board, port, name) = (device.board, device.port, &device.context.name);
        // SAFETY: the pointer is of this event type; it is compared, not followed.
        let pair = || unsafe { self.event.element.qp } as usize;
        // SAFETY: the number is of this event type.
        let ours = || unsafe { self.event.element.port_num } == i32::from(port);
        match self.event.event_type {
            IBV_EVENT_QP_FATAL => board.tell(pair(), QP_FATAL),
            IBV_EVENT_QP_REQ_ERR => board.tell(pair(), QP_REQ_ERR),
            IBV_EVENT_QP_ACCESS_ERR => board.tell(pair(), QP_ACCESS_ERR),
            // Which links it hits can't be told: a queue is shared.
            IBV_EVENT_CQ_ERR => board.tell_all(device.at, CQ_ERR),
            IBV_EVENT_DEVICE_FATAL => board.tell_all(device.at, DEVICE_FATAL),
            IBV_EVENT_PORT_ERR if ours() => {
                tracing::warn!(device = %name, port, "the port went down");
                device.down_since = Some(ticks);
                return false;
            }
            IBV_EVENT_PORT_ACTIVE if ours() => {
                tracing::info!(device = %name, port, "the port is up again");
                device.down_since = None;
                return false;
            }
            _ => return false,
        }
        true
    }
}

impl Drop for AsyncEvent<'_> {
    fn drop(&mut self) {
        // SAFETY: the event that was taken, once.
        unsafe { (self.context.library.ack_async_event)(&mut self.event) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_that_lose_rails_again_and_again_have_sixteen_lines() {
        let board = EventBoard::default();
        for number in 0..100 {
            let between = [Gid([0; 16]); 2];
            board.log(LostRail { device: "a".into(), between, why: number.to_string(), left: "b".into() });
        }
        let lines: Vec<String> = board.lost_rails().iter().map(|(lost, _)| lost.why.clone()).collect();
        assert_eq!(lines, (0..16).map(|number: u32| number.to_string()).collect::<Vec<_>>());
    }
}
