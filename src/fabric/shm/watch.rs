//! Tells the death of a peer's process: one thread for all links of a fabric, asleep until one dies.
//!
//! It waits on the peers' pidfds. A poller only looks at a word in this process's memory, so the data path makes
//! no system call for it. (The end of a socket would be no proof: a forked child keeps sockets open.)
#![allow(clippy::disallowed_types)] // a thread of its own; pollers only load a word

use crate::fabric::{FabricError, FabricKind};
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::fd::OwnedFd;
use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// The event of the eventfd that ends the thread; processes count from 1.
const STOP: u64 = 0;

/// The watcher of one fabric. Its thread ends when the last holder lets go of it.
pub(super) struct Watcher {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// The watcher of a fabric, which the first link starts.
#[derive(Default)]
pub(super) struct OneWatcher(Mutex<Option<Arc<Watcher>>>);

struct Shared {
    epoll: OwnedFd,
    stop: OwnedFd,
    watched: Mutex<Watched>,
}

#[derive(Default)]
struct Watched {
    last: u64,
    processes: HashMap<u64, (OwnedFd, Arc<AtomicBool>)>,
}

/// One watched process; given up on drop.
pub(super) struct Watch {
    watcher: Arc<Watcher>,
    id: u64,
    dead: Arc<AtomicBool>,
}

fn os(tried: &'static str) -> impl Fn(rustix::io::Errno) -> FabricError {
    move |error| FabricError::Os {
        fabric: FabricKind::Shm,
        tried: tried.into(),
        remedy: "raise the limits of open files, threads and epoll watches",
        source: error.into(),
    }
}

impl OneWatcher {
    /// The watcher, started if there is none yet.
    pub(super) fn get(&self) -> Result<Arc<Watcher>, FabricError> {
        let mut watcher = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(watcher) = &*watcher {
            return Ok(Arc::clone(watcher));
        }
        let started = Arc::new(Watcher::start()?);
        *watcher = Some(Arc::clone(&started));
        Ok(started)
    }
}

impl Watcher {
    /// Starts the thread.
    ///
    /// # Errors
    /// If descriptors or the thread can't be had.
    pub(super) fn start() -> Result<Self, FabricError> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(os("making an epoll"))?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC).map_err(os("making an eventfd"))?;
        epoll::add(&epoll, &stop, epoll::EventData::new_u64(STOP), epoll::EventFlags::IN)
            .map_err(os("watching an eventfd"))?;
        let shared = Arc::new(Shared { epoll, stop, watched: Mutex::default() });
        let thread = std::thread::Builder::new()
            .name("tw-shm-watch".into())
            .spawn({
                let shared = Arc::clone(&shared);
                move || shared.run()
            })
            .map_err(|error| os("starting the thread tw-shm-watch")(errno(&error)))?;
        Ok(Watcher { shared, thread: Some(thread) })
    }

    /// Watches the process of a pidfd.
    ///
    /// # Errors
    /// If the kernel has no room for another watch.
    pub(super) fn watch(self: &Arc<Self>, process: OwnedFd) -> Result<Watch, FabricError> {
        let dead = Arc::new(AtomicBool::new(false));
        let mut watched = self.shared.watched();
        watched.last += 1;
        let id = watched.last;
        let data = epoll::EventData::new_u64(id);
        epoll::add(&self.shared.epoll, &process, data, epoll::EventFlags::IN)
            .map_err(os("watching the peer's process"))?;
        watched.processes.insert(id, (process, Arc::clone(&dead)));
        drop(watched);
        Ok(Watch { watcher: Arc::clone(self), id, dead })
    }
}

/// The system's number of an error, for `FabricError::Os`.
fn errno(error: &std::io::Error) -> rustix::io::Errno {
    rustix::io::Errno::from_io_error(error).unwrap_or(rustix::io::Errno::IO)
}

impl Shared {
    fn watched(&self) -> MutexGuard<'_, Watched> {
        // Nothing under this lock can leave it half done.
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut events = [MaybeUninit::uninit(); 16];
        loop {
            let (ready, _) = match epoll::wait(&self.epoll, &mut events, None) {
                Ok(ready) => ready,
                Err(rustix::io::Errno::INTR) => continue,
                // The epoll is ours and valid: there is no other error. Without it nothing can be watched.
                Err(_) => return,
            };
            for event in ready {
                match event.data.u64() {
                    STOP => return,
                    id => self.died(id),
                }
            }
        }
    }

    fn died(&self, id: u64) {
        let mut watched = self.watched();
        // It may have been given up between the event and now.
        if let Some((process, dead)) = watched.processes.remove(&id) {
            let _ = epoll::delete(&self.epoll, &process); // closing it would do as well
            dead.store(true, Ordering::Release);
        }
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        let _ = rustix::io::write(&self.shared.stop, &1u64.to_ne_bytes()); // fails only at 2^64 writes
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic there has been reported by its hook
        }
    }
}

impl Watch {
    /// Whether the process has ended: one load. What it wrote before is visible then.
    #[inline]
    pub(super) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let shared = &self.watcher.shared;
        if let Some((process, _)) = shared.watched().processes.remove(&self.id) {
            let _ = epoll::delete(&shared.epoll, &process); // closing it would do as well
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Pid, PidfdFlags, pidfd_open};
    use std::process::{Child, Command};
    use std::time::{Duration, Instant};

    fn sleeper() -> (Child, OwnedFd) {
        let child = Command::new("sleep").arg("60").spawn().expect("sleep(1)");
        let pid = Pid::from_raw(child.id() as i32).expect("a pid");
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).expect("a pidfd");
        (child, pidfd)
    }

    #[test]
    fn a_death_is_told_to_the_one_who_watches_and_to_nobody_else() {
        let watcher = Arc::new(Watcher::start().expect("started"));
        let (mut first, first_fd) = sleeper();
        let (mut second, second_fd) = sleeper();
        let first_watch = watcher.watch(first_fd).expect("watched");
        let second_watch = watcher.watch(second_fd).expect("watched");
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
        let watcher = Arc::new(Watcher::start().expect("started"));
        let shared = Arc::downgrade(&watcher.shared);
        let (mut child, pidfd) = sleeper();
        let watch = watcher.watch(pidfd).expect("watched");
        drop(watcher);
        assert!(shared.upgrade().is_some(), "a watch keeps the thread");
        drop(watch);
        assert!(shared.upgrade().is_none(), "the thread, which held it too, has ended");
        child.kill().expect("killed");
        let _ = child.wait();
    }
}
