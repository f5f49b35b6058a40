//! The watcher of peers' processes: one thread for all links of a fabric, asleep until a process
//! ends.
//!
//! The watcher waits on the peers' pidfds, one for each process, however many links lead to it. The
//! end of a socket would be no proof, because a forked child keeps sockets open. A poller only
//! reads a word of this process's memory, so the data path makes no system call for liveness. For
//! an idle link the watcher rings the port's doorbell.
//!
//! On a timer the watcher counts overdue loans, and starts a second thread that reclaims dead-peer
//! regions.
#![allow(clippy::disallowed_types)] // a thread of its own; pollers only load a word

use crate::fabric::shm::loans::reclaim::{PeerProcess, Reclaimer};
use crate::fabric::shm::wakeup::doorbells::OwnDoorbell;
use crate::fabric::{FabricError, FabricKind};
use crate::memory::ForkGuard;
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::fd::OwnedFd;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};
use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

/// Event of the eventfd that ends the thread. Processes count from 1.
const STOP: u64 = 0;
/// Event of the timer.
const TICK: u64 = u64::MAX;
/// Missed ticks that are made up for, if the thread was late.
const MAX_TICKS: u64 = 16;

/// The watcher of one fabric. Its thread ends when the last holder drops it.
pub(super) struct ProcessWatcher {
    shared: Arc<WatcherShared>,
    thread: Option<JoinHandle<()>>,
}

/// Starts the watcher of a fabric with the first link.
pub(super) struct LazyWatcher {
    watcher: Mutex<HeldWatcher>,
    period: Duration,
    reclaimer: Arc<Reclaimer>,
}

#[derive(Default)]
struct HeldWatcher {
    /// Held until a port is dropped.
    kept: Option<Arc<ProcessWatcher>>,
    /// The latest watcher, which links may hold: a second one beside it would tick the same loan
    /// limiter.
    last: Weak<ProcessWatcher>,
}

struct WatcherShared {
    /// A forked child inherits the epoll and the eventfd, and must not touch them.
    fork_guard: ForkGuard,
    epoll: OwnedFd,
    stop: OwnedFd,
    timer: OwnedFd,
    reclaimer: Arc<Reclaimer>,
    /// The thread that reclaims dead-peer regions, while there is one.
    reclaiming: Mutex<Option<JoinHandle<()>>>,
    watched: Mutex<WatchedProcesses>,
}

#[derive(Default)]
struct WatchedProcesses {
    last: u64,
    processes: HashMap<u64, WatchedProcess>,
}

/// A process that has not been seen dead.
struct WatchedProcess {
    /// Without an id in this namespace, each link has an entry of its own.
    peer: PeerProcess,
    dead: Arc<AtomicBool>,
    /// The doorbell to ring for each watch of the process.
    watches: HashMap<u64, Option<LinkDoorbell>>,
}

/// A doorbell and a place in it.
type LinkDoorbell = (Arc<OwnDoorbell>, usize);

/// A link's watch of a process. The drop ends it.
pub(super) struct ProcessWatch {
    watcher: Arc<ProcessWatcher>,
    process: u64,
    id: u64,
    dead: Arc<AtomicBool>,
    peer: PeerProcess,
}

fn os(tried: &'static str) -> impl Fn(rustix::io::Errno) -> FabricError {
    move |error| FabricError::Os {
        fabric: FabricKind::Shm,
        tried: tried.into(),
        remedy: "raise the limits of open files, threads and epoll watches",
        source: error.into(),
    }
}

impl LazyWatcher {
    /// No watcher yet. Its timer will have this period.
    pub(super) fn new(period: Duration, reclaimer: Arc<Reclaimer>) -> Self {
        LazyWatcher { watcher: Mutex::default(), period, reclaimer }
    }

    /// The watcher. Starts it if there is none.
    pub(super) fn get(&self) -> Result<Arc<ProcessWatcher>, FabricError> {
        let mut held = self.held();
        let watcher = match held.last.upgrade() {
            Some(watcher) => watcher,
            None => Arc::new(ProcessWatcher::start(self.period, Arc::clone(&self.reclaimer))?),
        };
        *held = HeldWatcher { kept: Some(Arc::clone(&watcher)), last: Arc::downgrade(&watcher) };
        Ok(watcher)
    }

    /// Drops the fabric's reference. The watcher ends with the links that hold it; a later link
    /// takes it up again, or starts another.
    pub(super) fn release(&self) {
        let kept = self.held().kept.take();
        // After the lock is released: the drop waits for the watcher's thread.
        drop(kept);
    }

    fn held(&self) -> MutexGuard<'_, HeldWatcher> {
        self.watcher.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ProcessWatcher {
    /// Starts the thread.
    ///
    /// # Errors
    /// If a descriptor or the thread can't be made.
    pub(super) fn start(period: Duration, reclaimer: Arc<Reclaimer>) -> Result<Self, FabricError> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(os("making an epoll"))?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC).map_err(os("making an eventfd"))?;
        epoll::add(&epoll, &stop, epoll::EventData::new_u64(STOP), epoll::EventFlags::IN)
            .map_err(os("watching an eventfd"))?;
        let timer = timer(period).map_err(os("making a timer"))?;
        epoll::add(&epoll, &timer, epoll::EventData::new_u64(TICK), epoll::EventFlags::IN)
            .map_err(os("watching a timer"))?;
        let (fork_guard, watched) = (ForkGuard::of_this_process(), Mutex::default());
        let reclaiming = Mutex::default();
        let shared =
            Arc::new(WatcherShared { fork_guard, epoll, stop, timer, reclaimer, reclaiming, watched });
        let thread = std::thread::Builder::new()
            .name("tw-shm-watch".into())
            .spawn({
                let shared = Arc::clone(&shared);
                move || shared.run()
            })
            .map_err(|error| os("starting the thread tw-shm-watch")(errno(&error)))?;
        Ok(ProcessWatcher { shared, thread: Some(thread) })
    }

    /// Watches a process.
    ///
    /// # Errors
    /// If the kernel refuses another watch.
    pub(super) fn watch(self: &Arc<Self>, peer: PeerProcess) -> Result<ProcessWatch, FabricError> {
        let mut watched = self.shared.watched();
        watched.last += 1;
        let id = watched.last;
        let process = match watched.living(peer.pid) {
            Some(process) => process,
            None => {
                let data = epoll::EventData::new_u64(id);
                epoll::add(&self.shared.epoll, &peer.pidfd, data, epoll::EventFlags::IN)
                    .map_err(os("watching the peer's process"))?;
                let (dead, watches) = (Arc::default(), HashMap::new());
                watched.processes.insert(id, WatchedProcess { peer, dead, watches });
                id
            }
        };
        let entry = watched.processes.get_mut(&process).map(|process| {
            process.watches.insert(id, None);
            (Arc::clone(&process.dead), process.peer.clone())
        });
        drop(watched);
        let (dead, peer) = entry.unwrap_or_else(|| unreachable!("found or inserted under the same lock"));
        Ok(ProcessWatch { watcher: Arc::clone(self), process, id, dead, peer })
    }
}

impl WatchedProcesses {
    /// The entry of a living process with this id. While it lives, no other process has its id, so
    /// an earlier pidfd for the id is for the same process.
    fn living(&self, pid: u32) -> Option<u64> {
        let (number, process) =
            self.processes.iter().find(|(_, process)| process.peer.pid == pid && pid != 0)?;
        (!process.peer.has_ended()).then_some(*number)
    }
}

/// A timer that fires again and again.
fn timer(period: Duration) -> rustix::io::Result<OwnedFd> {
    let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
    let period = Timespec::try_from(period).map_err(|_| rustix::io::Errno::INVAL)?;
    let times = Itimerspec { it_interval: period, it_value: period };
    timerfd_settime(&timer, TimerfdTimerFlags::empty(), &times)?;
    Ok(timer)
}

/// The error number, for `FabricError::Os`.
fn errno(error: &std::io::Error) -> rustix::io::Errno {
    rustix::io::Errno::from_io_error(error).unwrap_or(rustix::io::Errno::IO)
}

impl WatcherShared {
    fn watched(&self) -> MutexGuard<'_, WatchedProcesses> {
        // No panic under this lock can leave the state half changed.
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut events = [MaybeUninit::uninit(); 16];
        loop {
            let (ready, _) = match epoll::wait(&self.epoll, &mut events, None) {
                Ok(ready) => ready,
                Err(rustix::io::Errno::INTR) => continue,
                // No other error is possible: the epoll is valid and belongs to this watcher.
                // Without it nothing can be watched.
                Err(_) => return,
            };
            for event in ready {
                match event.data.u64() {
                    STOP => return,
                    TICK => self.tick(),
                    id => self.died(id),
                }
            }
        }
    }

    fn tick(&self) {
        let mut count = [0; 8];
        // A timer that has not fired has nothing to read.
        if rustix::io::read(&self.timer, &mut count) == Ok(count.len()) {
            let ticks = u64::from_ne_bytes(count).min(MAX_TICKS);
            if (0..ticks).fold(false, |is_due, _| self.reclaimer.tick() || is_due) {
                self.reclaim();
            }
        }
    }

    /// Starts a thread that reclaims dead-peer regions: that may take long, and the next death must
    /// be reported at once.
    fn reclaim(&self) {
        let mut reclaiming = self.reclaiming();
        if reclaiming.as_ref().is_none_or(JoinHandle::is_finished) {
            let reclaimer = Arc::clone(&self.reclaimer);
            let thread = std::thread::Builder::new().name("tw-shm-reclaim".into());
            // If no thread can be started, the next tick tries again.
            *reclaiming = thread.spawn(move || reclaimer.reclaim()).ok();
        }
    }

    fn reclaiming(&self) -> MutexGuard<'_, Option<JoinHandle<()>>> {
        self.reclaiming.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn died(&self, id: u64) {
        let mut watched = self.watched();
        // The watch may have ended between the event and now.
        if let Some(process) = watched.processes.remove(&id) {
            let _ = epoll::delete(&self.epoll, &process.peer.pidfd); // closing it would do as well
            process.dead.store(true, Ordering::Release);
            for (doorbell, place) in process.watches.into_values().flatten() {
                doorbell.doorbell.ring(place);
            }
        }
    }
}

impl Drop for ProcessWatcher {
    fn drop(&mut self) {
        if self.shared.fork_guard.in_child() {
            return std::mem::forget(self.thread.take()); // the thread belongs to the parent
        }
        let _ = rustix::io::write(&self.shared.stop, &1u64.to_ne_bytes()); // fails only after 2^64 writes
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic there has been reported by its hook
        }
        let reclaiming = self.shared.reclaiming().take();
        if let Some(reclaiming) = reclaiming {
            let _ = reclaiming.join();
        }
    }
}

impl ProcessWatch {
    /// Whether the process has ended. One load; everything that the process wrote before is visible
    /// then.
    #[inline]
    pub(super) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    /// The process. It can be asked for its end without the watcher's thread.
    pub(super) fn process(&self) -> &PeerProcess {
        &self.peer
    }

    /// Lets a doorbell ring when the process ends.
    pub(super) fn ring(&self, doorbell: Arc<OwnDoorbell>, place: usize) {
        let mut watched = self.watcher.shared.watched();
        match watched.processes.get_mut(&self.process) {
            Some(process) => {
                process.watches.insert(self.id, Some((doorbell, place)));
            }
            None => doorbell.doorbell.ring(place), // the process has ended already
        }
    }
}

impl Drop for ProcessWatch {
    fn drop(&mut self) {
        let shared = &self.watcher.shared;
        if shared.fork_guard.in_child() {
            return;
        }
        let mut watched = shared.watched();
        let Some(process) = watched.processes.get_mut(&self.process) else { return };
        process.watches.remove(&self.id);
        if process.watches.is_empty() {
            let _ = epoll::delete(&shared.epoll, &process.peer.pidfd); // closing it would do as well
            watched.processes.remove(&self.process);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::LoanLimiter;
    use crate::fabric::Sleep;
    use crate::fabric::shm::wakeup::doorbells::Doorbells;
    use rustix::process::{Pid, PidfdFlags, pidfd_open};
    use std::process::{Child, Command};
    use std::time::Instant;

    fn watcher() -> Arc<ProcessWatcher> {
        let reclaimer = Arc::new(Reclaimer::new(Arc::new(LoanLimiter::new(0))));
        Arc::new(ProcessWatcher::start(Duration::from_secs(1), reclaimer).expect("started"))
    }

    fn sleeper() -> (Child, PeerProcess) {
        let child = Command::new("sleep").arg("60").spawn().expect("sleep(1)");
        let pid = Pid::from_raw(child.id() as i32).expect("a pid");
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).expect("a pidfd");
        let process = PeerProcess { pidfd: Arc::new(pidfd), pid: child.id() };
        (child, process)
    }

    #[test]
    fn a_death_is_reported_to_its_own_watch_and_no_other() {
        dies_alone(|process| process);
    }

    #[test]
    fn processes_of_other_pid_namespaces_are_told_apart() {
        dies_alone(|process| PeerProcess { pid: 0, ..process });
    }

    #[test]
    fn a_process_is_itself_alone_whatever_its_id_is() {
        let [(mut first, a), (mut second, b)] = [sleeper(), sleeper()];
        let opened_again = Pid::from_raw(a.pid as i32).expect("a child");
        let again = pidfd_open(opened_again, PidfdFlags::empty()).expect("it lives");
        let unknown = |pidfd: &Arc<OwnedFd>| PeerProcess { pid: 0, pidfd: Arc::clone(pidfd) };
        let again = unknown(&Arc::new(again));
        assert!(unknown(&a.pidfd).is(&again) && !a.is(&b) && !a.is(&again));
        let inode = |process: &PeerProcess| rustix::fs::fstat(&process.pidfd).expect("open").st_ino;
        match inode(&a) == inode(&b) {
            true => println!("skipped: before Linux 6.9 pidfds have one inode"),
            false => assert!(!unknown(&a.pidfd).is(&unknown(&b.pidfd))),
        }
        for child in [&mut first, &mut second] {
            child.kill().expect("killed");
            child.wait().expect("reaped");
        }
    }

    fn dies_alone(known_as: fn(PeerProcess) -> PeerProcess) {
        let watcher = watcher();
        let (mut first, first_process) = sleeper();
        let (mut second, second_process) = sleeper();
        let (first_process, second_process) = (known_as(first_process), known_as(second_process));
        let first_watch = watcher.watch(first_process).expect("watched");
        let second_watch = watcher.watch(second_process).expect("watched");
        assert!(!first_watch.is_dead());
        first.kill().expect("killed");
        let deadline = Instant::now() + Duration::from_secs(5);
        while !first_watch.is_dead() {
            assert!(Instant::now() < deadline, "the death was not told within 5 s");
            std::thread::yield_now();
        }
        assert!(!second_watch.is_dead());
        second.kill().expect("killed");
        let _ = (first.wait(), second.wait());
    }

    #[test]
    fn the_thread_ends_with_its_last_holder() {
        let watcher = watcher();
        let shared = Arc::downgrade(&watcher.shared);
        let (mut child, process) = sleeper();
        let watch = watcher.watch(process).expect("watched");
        drop(watcher);
        assert!(shared.upgrade().is_some(), "a watch keeps the thread");
        drop(watch);
        assert!(shared.upgrade().is_none(), "the thread, which held it too, has ended");
        child.kill().expect("killed");
        let _ = child.wait();
    }

    #[test]
    fn a_fabric_has_one_watcher_as_long_as_a_link_keeps_it() {
        let reclaimer = Arc::new(Reclaimer::new(Arc::new(LoanLimiter::new(0))));
        let one = LazyWatcher::new(Duration::from_secs(1), reclaimer);
        let (mut child, process) = sleeper();
        let first = one.get().expect("started");
        let watch = first.watch(process).expect("watched");
        let shared = Arc::downgrade(&first.shared);
        drop(first);
        one.release();
        let again = one.get().expect("there is one");
        assert!(Arc::ptr_eq(&again, &watch.watcher), "a second watcher beside the first");
        drop((watch, again));
        assert!(shared.upgrade().is_some(), "the fabric keeps it again");
        one.release();
        assert!(shared.upgrade().is_none(), "nobody needs it");
        child.kill().expect("killed");
        let _ = child.wait();
    }

    #[test]
    fn links_to_one_process_share_its_descriptor_and_each_has_its_doorbell_rung() {
        let watcher = watcher();
        let (mut child, process) = sleeper();
        let pidfd = Arc::new(process.pidfd.try_clone().expect("room"));
        let again = PeerProcess { pidfd, ..process };
        let watches = [process, again].map(|process| watcher.watch(process).expect("watched"));
        assert_eq!(watcher.shared.watched().processes.len(), 1);
        let doorbell = Arc::new(Doorbells::new().expect("room")).take().expect("room");
        for (place, watch) in watches.iter().enumerate() {
            watch.ring(Arc::clone(&doorbell), 40 + place);
        }
        let seen = doorbell.doorbell.events.key();
        child.kill().expect("killed");
        doorbell.doorbell.events.sleep(Sleep::Waiter, seen, Duration::from_secs(5));
        let mut places = Vec::new();
        let deadline = Instant::now() + Duration::from_secs(5);
        while places.len() < 2 {
            assert!(Instant::now() < deadline, "no ring within 5 s");
            doorbell.doorbell.drain(|place| places.push(place));
        }
        places.sort_unstable();
        assert!(watches.iter().all(ProcessWatch::is_dead));
        // Too late for the thread to ring.
        watches[0].ring(Arc::clone(&doorbell), 7);
        doorbell.doorbell.drain(|place| places.push(place));
        assert_eq!(places, [40, 41, 7]);
        let _ = child.wait();
        let (mut other, process) = sleeper();
        drop(watcher.watch(process).expect("watched"));
        assert!(watcher.shared.watched().processes.is_empty());
        other.kill().expect("killed");
        let _ = other.wait();
    }
}
