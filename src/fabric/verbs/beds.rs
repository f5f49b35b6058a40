//! Who sleeps on a port, and who is woken: what of a bell loom checks.
//!
//! All sleepers of a kind block on one descriptor, which stays readable from a *kick* until somebody reads it. So nobody may
//! read what another sleeps on: of each kind it is counted who sleeps since before the latest wake-up, and to whom one is *owed*
//! therefore. The last of them reads the descriptor, and who finds it readable though nothing is owed to anybody.
//!
//! A completion event is read off the channel by one thread, though others slept on it: that one wakes the waiters. A keeper
//! leaves it alone while a waiter attends.

use crate::fabric::Sleep;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A word that threads share: loom's in its tests.
pub(super) trait Word: Default {
    fn load(&self) -> u64;

    /// Adds to it, modulo 2^64. Returns what it was.
    fn add(&self, value: u64) -> u64;

    /// Puts what `next` makes of it in its place, if that is something. Returns what it was.
    fn update(&self, next: impl Fn(u64) -> Option<u64>) -> Result<u64, u64>;
}

macro_rules! word {
    ($atomic:ty) => {
        impl Word for $atomic {
            fn load(&self) -> u64 {
                self.load(Ordering::Acquire)
            }

            fn add(&self, value: u64) -> u64 {
                self.fetch_add(value, Ordering::AcqRel)
            }

            fn update(&self, next: impl Fn(u64) -> Option<u64>) -> Result<u64, u64> {
                self.fetch_update(Ordering::AcqRel, Ordering::Acquire, next)
            }
        }
    };
}

word!(AtomicU64);

/// What sleepers block on.
pub(super) trait Descriptors {
    type Word: Word;

    /// Makes the descriptor of that kind readable.
    fn kick(&self, who: Sleep);

    /// Makes it unreadable.
    fn unkick(&self, who: Sleep);

    /// Blocks until the descriptor of that kind is readable, or the channel if it is heeded, or for `timeout`. May return
    /// early.
    fn block(&self, who: Sleep, heeds: bool, timeout: Duration) -> Roused;

    /// Takes an event off the channel; `false` if there is none.
    fn take(&self) -> bool;
}

/// Why somebody does not block any more.
#[derive(Clone, Copy, Default)]
pub(super) struct Roused {
    pub kicked: bool,
    /// The channel has something.
    pub came: bool,
}

/// The sleepers of a kind: the number of wake-ups, how many sleep since the latest, and how many since before that.
#[derive(Default)]
struct Bed<W>(W);

/// Fewer than 2^16 threads sleep.
const CURRENT: u64 = 1 << 32;
const OWED: u64 = 1 << 48;

fn ring_of(word: u64) -> u32 {
    word as u32
}

fn is_owed(word: u64) -> bool {
    word >= OWED
}

impl<W: Word> Bed<W> {
    fn ring(&self) -> u32 {
        ring_of(self.0.load())
    }

    /// One more sleeps. Returns the number of wake-ups, none of which it has missed.
    fn enter(&self) -> u32 {
        ring_of(self.0.add(CURRENT))
    }

    /// Moves the ring. Returns whether anybody sleeps.
    fn turn(&self) -> bool {
        let next = |word: u64| {
            let (ring, current, owed) = (ring_of(word), (word / CURRENT) & 0xFFFF, word & !(OWED - 1));
            owed + current * OWED + u64::from(ring.wrapping_add(1))
        };
        self.0.update(|word| Some(next(word))).is_ok_and(|before| is_owed(next(before)))
    }

    /// One who entered when the ring was `ring` sleeps no more. Returns whether the descriptor is to be read, if it is
    /// readable: nothing is owed to anybody any more.
    fn leave(&self, ring: u32, kicked: bool) -> bool {
        let next = |word: u64| if ring_of(word) == ring { word - CURRENT } else { word - OWED };
        let (Ok(before) | Err(before)) = self.0.update(|word| Some(next(word)));
        (kicked || is_owed(before)) && !is_owed(next(before))
    }

    fn is_owed(&self) -> bool {
        is_owed(self.0.load())
    }
}

/// Who sleeps on a port.
pub(super) struct Beds<D: Descriptors> {
    pub descriptors: D,
    waiters: Bed<D::Word>,
    keepers: Bed<D::Word>,
    /// How many attend; and, from [`DEAF`] on, how many keepers don't heed the channel for that.
    attending: D::Word,
}

const DEAF: u64 = 1 << 32;

impl<D: Descriptors> Beds<D> {
    pub fn new(descriptors: D) -> Self {
        let (waiters, keepers, attending) = Default::default();
        Beds { descriptors, waiters, keepers, attending }
    }

    /// Of that kind, and of the other.
    fn of(&self, who: Sleep) -> (&Bed<D::Word>, &Bed<D::Word>) {
        match who {
            Sleep::Waiter => (&self.waiters, &self.keepers),
            Sleep::Background => (&self.keepers, &self.waiters),
        }
    }

    /// A number that changes with every wake-up.
    pub fn seen(&self) -> u32 {
        self.waiters.ring().wrapping_add(self.keepers.ring())
    }

    pub fn wake(&self, who: Sleep) {
        if self.of(who).0.turn() {
            self.descriptors.kick(who);
        }
    }

    pub fn enter_wait(&self) {
        self.attending.add(1);
    }

    pub fn exit_wait(&self) {
        let before = self.attending.add(1u64.wrapping_neg());
        if before as u32 == 1 && before >= DEAF {
            // So that it heeds the channel from now on.
            self.wake(Sleep::Background);
        }
    }

    pub fn sleep(&self, who: Sleep, seen: u32, timeout: Duration) {
        let (own, other) = self.of(who);
        let ring = own.enter();
        let roused = match ring.wrapping_add(other.ring()) == seen {
            true => self.block(who, timeout),
            false => Roused::default(),
        };
        if own.leave(ring, roused.kicked) {
            self.descriptors.unkick(who);
            // That may have been a kick for one who sleeps since it was seen that nobody does.
            if own.is_owed() {
                self.descriptors.kick(who);
            }
        }
        if roused.came {
            self.take();
        }
    }

    fn block(&self, who: Sleep, timeout: Duration) -> Roused {
        if who == Sleep::Waiter {
            return self.descriptors.block(who, true, timeout);
        }
        let is_attended = |word: u64| word as u32 > 0;
        if self.attending.update(|word| is_attended(word).then_some(word + DEAF)).is_ok() {
            let roused = self.descriptors.block(who, false, timeout);
            self.attending.add(DEAF.wrapping_neg());
            return roused;
        }
        let Roused { kicked, came } = self.descriptors.block(who, true, timeout);
        // What came is for those who attend since then, and is left to them.
        Roused { kicked, came: came && !is_attended(self.attending.load()) }
    }

    /// Takes what the channel has, and wakes those who wait for it.
    fn take(&self) {
        let mut is_taken = false;
        while self.descriptors.take() {
            is_taken = true;
        }
        if is_taken {
            self.wake(Sleep::Waiter);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use loom::sync::{Arc, Condvar, Mutex};

    const FOREVER: Duration = Duration::MAX;

    word!(loom::sync::atomic::AtomicU64);

    /// The kernel and a device: a sleep ends only by what is said here, so that a wake-up that is lost ends in a deadlock,
    /// which loom reports.
    #[derive(Default)]
    struct Kernel {
        kicked: [bool; 2],
        /// Events of the channel.
        events: u32,
        is_armed: bool,
        /// What the device completes.
        completions: u32,
    }

    #[derive(Default)]
    struct Model(Mutex<Kernel>, Condvar);

    impl Model {
        fn change<T>(&self, act: impl FnOnce(&mut Kernel) -> T) -> T {
            let done = act(&mut self.0.lock().expect("not poisoned"));
            self.1.notify_all();
            done
        }

        /// Says that the next completion makes an event. Returns how many there are.
        fn arm(&self) -> u32 {
            self.change(|kernel| {
                kernel.is_armed = true;
                kernel.completions
            })
        }

        fn complete(&self) {
            self.change(|kernel| {
                kernel.completions += 1;
                kernel.events += u32::from(std::mem::take(&mut kernel.is_armed));
            });
        }
    }

    impl Descriptors for Model {
        type Word = loom::sync::atomic::AtomicU64;

        fn kick(&self, who: Sleep) {
            self.change(|kernel| kernel.kicked[who as usize] = true);
        }

        fn unkick(&self, who: Sleep) {
            self.change(|kernel| kernel.kicked[who as usize] = false);
        }

        fn block(&self, who: Sleep, heeds: bool, _timeout: Duration) -> Roused {
            let mut kernel = self.0.lock().expect("not poisoned");
            loop {
                let roused = Roused { kicked: kernel.kicked[who as usize], came: heeds && kernel.events > 0 };
                if roused.kicked || roused.came {
                    return roused;
                }
                kernel = self.1.wait(kernel).expect("not poisoned");
            }
        }

        fn take(&self) -> bool {
            self.change(|kernel| {
                let has = kernel.events > 0;
                kernel.events -= u32::from(has);
                has
            })
        }
    }

    fn model(check: impl Fn(Arc<Beds<Model>>) + Send + Sync + 'static) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.check(move || check(Arc::new(Beds::new(Model::default()))));
    }

    /// Sleeps until there was a wake-up since `seen` was drawn.
    fn sleep(beds: &Beds<Model>, who: Sleep, seen: u32) {
        while beds.seen() == seen {
            beds.sleep(who, seen, FOREVER);
            loom::thread::yield_now();
        }
    }

    #[test]
    fn loom_a_wake_up_is_not_slept_through() {
        for who in [Sleep::Waiter, Sleep::Background] {
            model(move |beds| {
                let seen = beds.seen();
                let same = Arc::clone(&beds);
                let waker = loom::thread::spawn(move || same.wake(who));
                sleep(&beds, who, seen);
                waker.join().expect("the waker");
            });
        }
    }

    /// A kick that is left over from earlier is taken away by one of two, while another comes that is for both.
    #[test]
    fn loom_nobody_takes_a_kick_that_another_sleeps_on() {
        model(|beds| {
            beds.descriptors.kick(Sleep::Waiter);
            let seen = beds.seen();
            let [other, same] = [Arc::clone(&beds), Arc::clone(&beds)];
            let other = loom::thread::spawn(move || sleep(&other, Sleep::Waiter, seen));
            let waker = loom::thread::spawn(move || same.wake(Sleep::Waiter));
            sleep(&beds, Sleep::Waiter, seen);
            waker.join().expect("the waker");
            other.join().expect("the other wakes");
        });
    }

    /// One has heard of a wake-up and waits for the next; another sleeps since before the first.
    #[test]
    fn loom_who_waits_for_the_next_wake_up_does_not_take_the_kick_of_this_one() {
        model(|beds| {
            let seen = beds.seen();
            let [other, same] = [Arc::clone(&beds), Arc::clone(&beds)];
            let other = loom::thread::spawn(move || sleep(&other, Sleep::Waiter, seen));
            let waker = loom::thread::spawn(move || {
                same.wake(Sleep::Waiter);
                other.join().expect("the other wakes");
                same.wake(Sleep::Waiter);
            });
            // It may find the first kick, which the other has not seen yet.
            loom::thread::yield_now();
            let last = beds.seen();
            if last != seen.wrapping_add(2) {
                sleep(&beds, Sleep::Waiter, last);
            }
            waker.join().expect("the waker");
        });
    }

    /// What a keeper that slept before takes off the channel is told to the waiter that has come since.
    #[test]
    fn loom_a_keeper_takes_no_event_from_a_waiter() {
        model(|beds| {
            beds.descriptors.arm();
            let seen = beds.seen();
            let [same, device] = [Arc::clone(&beds), Arc::clone(&beds)];
            let keeper = loom::thread::spawn(move || same.sleep(Sleep::Background, seen, FOREVER));
            let device = loom::thread::spawn(move || device.descriptors.complete());
            beds.enter_wait();
            loop {
                let seen = beds.seen();
                if beds.descriptors.arm() > 0 {
                    break;
                }
                beds.sleep(Sleep::Waiter, seen, FOREVER);
                loom::thread::yield_now();
            }
            beds.exit_wait();
            beds.wake(Sleep::Background);
            device.join().expect("the device");
            keeper.join().expect("the keeper wakes");
        });
    }

    /// Two wait for what one event tells.
    #[test]
    fn loom_an_event_that_one_waiter_takes_is_told_to_the_other() {
        fn wait(beds: &Beds<Model>) {
            loop {
                let seen = beds.seen();
                if beds.descriptors.arm() > 0 {
                    return;
                }
                beds.sleep(Sleep::Waiter, seen, FOREVER);
                loom::thread::yield_now();
            }
        }
        model(|beds| {
            let [other, device] = [Arc::clone(&beds), Arc::clone(&beds)];
            let other = loom::thread::spawn(move || wait(&other));
            let device = loom::thread::spawn(move || device.descriptors.complete());
            wait(&beds);
            device.join().expect("the device");
            other.join().expect("the other wakes");
        });
    }

    /// What comes after the last waiter has left wakes the keeper, which did not heed it before.
    #[test]
    fn loom_a_keeper_heeds_the_channel_again_when_nobody_attends() {
        model(|beds| {
            beds.enter_wait();
            let seen = beds.seen();
            let same = Arc::clone(&beds);
            let keeper = loom::thread::spawn(move || same.sleep(Sleep::Background, seen, FOREVER));
            beds.exit_wait();
            beds.descriptors.arm();
            beds.descriptors.complete();
            keeper.join().expect("the keeper wakes");
        });
    }

    /// While a waiter attends, a keeper takes nothing off the channel.
    #[test]
    fn loom_a_keeper_leaves_to_waiters_what_comes() {
        model(|beds| {
            beds.descriptors.arm();
            let seen = beds.seen();
            let same = Arc::clone(&beds);
            let keeper = loom::thread::spawn(move || same.sleep(Sleep::Background, seen, FOREVER));
            // It may sleep already, and heed the channel.
            beds.enter_wait();
            beds.descriptors.complete();
            assert!(beds.descriptors.take(), "it is still there");
            beds.wake(Sleep::Background);
            keeper.join().expect("the keeper wakes");
        });
    }
}
