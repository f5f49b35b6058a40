//! Which threads of a process sleep until something comes. A thread that completes something learns
//! here whether to wake any.

use super::atomic::{AtomicU32, AtomicU64, Ordering};

/// Counts the waiters that sleep or are about to, and knows whether the background poller sleeps.
///
/// A waiter counts itself, then checks once more whether it is done, then sleeps. A thread that
/// completes something does so first and then reads the count. Both are sequentially consistent, so
/// one of them sees the other.
///
/// A sleeper also arms the port, under a lock. It counts itself before it releases that lock. So
/// the holder of the lock sees each thread that sleeps on the armed port without any fence:
/// [`Sleepers::any`].
#[derive(Debug)]
pub(crate) struct Sleepers {
    waiters: AtomicU32,
    /// The time at which the sleep of the background poller ends at the latest, in ns. 0 if it does
    /// not sleep on the armed port.
    background_until: AtomicU64,
}

impl Sleepers {
    pub fn new() -> Self {
        Sleepers { waiters: AtomicU32::new(0), background_until: AtomicU64::new(0) }
    }

    /// Sleeps unless `done`, which arms the port. `sleep` must return at once if a wake-up has come
    /// since before this call.
    pub fn sleep_unless(&self, done: impl FnOnce() -> bool, sleep: impl FnOnce()) {
        self.waiters.fetch_add(1, Ordering::SeqCst);
        // A read-modify-write: `done` is not evaluated before other threads can see the count.
        if !done() {
            sleep();
        }
        self.waiters.fetch_sub(1, Ordering::SeqCst);
    }

    /// Calls `wake` if a waiter sleeps. Used after something was completed.
    #[inline]
    pub fn wake(&self, wake: impl FnOnce()) {
        if self.fenced_count() > 0 {
            wake();
        }
    }

    /// The count, read after this thread's earlier writes are visible to other threads.
    #[inline]
    fn fenced_count(&self) -> u32 {
        self.waiters.fetch_add(0, Ordering::SeqCst)
    }

    /// Whether a waiter or the background poller sleeps on the armed port. The caller holds the
    /// lock under which they arm it.
    #[inline]
    pub fn any(&self) -> bool {
        self.waiters.load(Ordering::Relaxed) != 0 || self.is_background_asleep()
    }

    /// The background poller sleeps until this time, in ns. It holds the lock and has armed the
    /// port.
    pub fn set_background_until(&self, time: u64) {
        self.background_until.store(time.max(1), Ordering::SeqCst);
    }

    /// Notes that the background poller does not sleep on the armed port any more. Returns whether
    /// it did until now. The background poller itself gets `false` if a call has woken it.
    pub fn end_background_sleep(&self) -> bool {
        self.background_until.swap(0, Ordering::SeqCst) != 0
    }

    /// Whether the background poller sleeps on the armed port.
    #[inline]
    pub fn is_background_asleep(&self) -> bool {
        self.background_until.load(Ordering::Relaxed) != 0
    }

    /// Whether the background poller may sleep past this time, in ns.
    pub fn background_sleeps_past(&self, time: u64) -> bool {
        self.background_until.load(Ordering::SeqCst) > time
    }
}

#[cfg(all(test, tensorwire_loom))]
mod loom_tests {
    use super::*;
    use loom::sync::atomic::{AtomicBool, fence};
    use loom::sync::{Arc, Condvar, Mutex};

    /// The key that sleepers sleep on: a lock and a condition stand for the futex.
    struct Key(Mutex<u32>, Condvar);

    impl Key {
        fn new() -> Self {
            Key(Mutex::new(0), Condvar::new())
        }

        fn seen(&self) -> u32 {
            *self.0.lock().expect("unpoisoned")
        }

        /// Sleeps until the key differs. A lost wake-up is a deadlock, which loom finds.
        fn sleep(&self, seen: u32) {
            let mut now = self.0.lock().expect("unpoisoned");
            while *now == seen {
                now = self.1.wait(now).expect("unpoisoned");
            }
        }

        fn wake(&self) {
            *self.0.lock().expect("unpoisoned") += 1;
            self.1.notify_all();
        }
    }

    /// The completion is stored with release ordering, as one-shot channels do.
    #[test]
    fn loom_a_waiter_that_goes_to_sleep_misses_no_completion() {
        loom::model(|| {
            let sleepers = Arc::new(Sleepers::new());
            let done = Arc::new(AtomicBool::new(false));
            let key = Arc::new(Key::new());
            let sender = loom::thread::spawn({
                let (sleepers, done, key) = (sleepers.clone(), done.clone(), key.clone());
                move || {
                    done.store(true, Ordering::Release);
                    sleepers.wake(|| key.wake());
                }
            });
            while !done.load(Ordering::Acquire) {
                let seen = key.seen();
                sleepers.sleep_unless(|| done.load(Ordering::Acquire), || key.sleep(seen));
            }
            sender.join().expect("no panic");
        });
    }

    /// A direct call completes what a waiter waits for. It looks for sleepers without a fence, when
    /// it has got the lock under which the waiter arms the port.
    #[test]
    fn loom_a_direct_call_misses_no_waiter() {
        loom::model(|| {
            let sleepers = Arc::new(Sleepers::new());
            let lock = Arc::new(Mutex::new(()));
            let done = Arc::new(AtomicBool::new(false));
            let key = Arc::new(Key::new());
            let caller = loom::thread::spawn({
                let (sleepers, lock) = (sleepers.clone(), lock.clone());
                let (done, key) = (done.clone(), key.clone());
                move || {
                    let held = lock.lock().expect("unpoisoned");
                    let sleeps = sleepers.any();
                    done.store(true, Ordering::Release);
                    if sleeps {
                        key.wake();
                    }
                    drop(held);
                }
            });
            while !done.load(Ordering::Acquire) {
                let seen = key.seen();
                let arm = || drop(lock.lock().expect("unpoisoned"));
                let armed_and_done = || {
                    arm();
                    done.load(Ordering::Acquire)
                };
                sleepers.sleep_unless(armed_and_done, || key.sleep(seen));
            }
            caller.join().expect("no panic");
        });
    }

    /// A port with one message of a peer, its lock, and the key that its sleepers sleep on.
    struct Port {
        sleepers: Sleepers,
        key: AtomicU32,
        /// Whether the port is armed. The holder of the lock polls.
        lock: Mutex<bool>,
        /// Whether the peer rings, as the port is armed.
        is_idle: AtomicBool,
        message: AtomicBool,
    }

    impl Port {
        fn wake(&self) {
            self.key.fetch_add(1, Ordering::SeqCst);
        }

        /// Arms the port. Returns whether nothing has come.
        fn arm(&self) -> bool {
            self.is_idle.store(true, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            !self.message.load(Ordering::Relaxed)
        }

        fn send(&self) {
            self.message.store(true, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            if self.is_idle.load(Ordering::Relaxed) {
                self.wake();
            }
        }

        /// The background poller takes over. Returns the key that it sleeps at, or `None` if it
        /// stays awake and polls again.
        fn take_over(&self) -> Option<u32> {
            let seen = self.key.load(Ordering::SeqCst);
            let mut armed = self.lock.lock().expect("unpoisoned");
            let came = self.message.swap(false, Ordering::SeqCst);
            *armed = !came && self.arm();
            if *armed {
                self.sleepers.set_background_until(u64::MAX);
            }
            armed.then_some(seen)
        }

        /// A poll that brings something else than the message leaves the port unarmed.
        fn poll(&self, armed: &mut bool) {
            self.is_idle.store(false, Ordering::Relaxed);
            *armed = false;
        }

        /// A call of an active waiter, which polls whether a thread sleeps or not.
        fn wait(&self) {
            self.poll(&mut self.lock.lock().expect("unpoisoned"));
            // The end of the wait.
            fence(Ordering::SeqCst);
            if !self.sleepers.is_background_asleep() {
                return;
            }
            let armed = self.lock.lock().expect("unpoisoned");
            let is_handled = *armed && self.arm();
            drop(armed);
            if !is_handled && self.sleepers.end_background_sleep() {
                self.wake();
            }
        }

        /// A direct call polls only if no thread sleeps.
        fn wait_direct(&self) {
            let mut armed = self.lock.lock().expect("unpoisoned");
            if !self.sleepers.any() {
                self.poll(&mut armed);
            }
        }
    }

    /// The background poller takes over beside a call, and a message comes meanwhile. Then no call
    /// is under way. The background poller must be awake, or be woken, unless it has got the
    /// message.
    fn no_message_is_slept_past(call: fn(&Port)) {
        loom::model(move || {
            let port = Arc::new(Port {
                sleepers: Sleepers::new(),
                key: AtomicU32::new(0),
                lock: Mutex::new(false),
                is_idle: AtomicBool::new(false),
                message: AtomicBool::new(false),
            });
            let background = {
                let port = port.clone();
                loom::thread::spawn(move || port.take_over())
            };
            let caller = {
                let port = port.clone();
                loom::thread::spawn(move || call(&port))
            };
            port.send();
            caller.join().expect("no panic");
            let slept_at = background.join().expect("no panic");
            let is_woken = slept_at.is_none_or(|seen| port.key.load(Ordering::SeqCst) != seen);
            let is_handled = !port.message.load(Ordering::SeqCst);
            assert!(is_handled || is_woken, "slept past");
        });
    }

    #[test]
    fn loom_the_background_poller_sees_what_a_call_leaves() {
        no_message_is_slept_past(Port::wait);
    }

    #[test]
    fn loom_the_background_poller_sees_what_a_direct_call_leaves() {
        no_message_is_slept_past(Port::wait_direct);
    }

    /// A direct call that does not look for sleepers must fail, or the model proves nothing.
    #[test]
    #[should_panic(expected = "slept past")]
    fn loom_a_direct_call_must_look_for_sleepers() {
        no_message_is_slept_past(|port| port.poll(&mut port.lock.lock().expect("unpoisoned")));
    }
}
