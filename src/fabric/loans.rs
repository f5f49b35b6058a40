//! Loans of one process to its peers, over all links and ports of a fabric: bounded and counted.
//!
//! Each loan needs a [`LoanPermit`]. The permit lives as long as the lender holds the tensor. The
//! link holds it, and after the link's end an entry that lives until the borrower gives the tensor
//! back. So the counts hold however a loan ends. A link may keep one permit for its next loan,
//! which counts as lent until the link's next poll.

use crate::mutants::{Mutant, is_on};
use std::array;
use std::sync::Arc;

#[cfg(tensorwire_loom)]
use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(tensorwire_loom))]
use std::sync::atomic::{AtomicU64, Ordering};

/// Ticks in a grace period.
pub const TICKS_PER_GRACE: u64 = 4;

/// Ticks that are told apart: a loan that is not overdue began in one of the last five. The other
/// counters are ready for the next ticks.
const TICKS: usize = 8;

/// Bounds the bytes that a process lends and counts its loans. No call locks, allocates or enters
/// the kernel.
#[derive(Debug)]
pub struct LoanLimiter {
    max_bytes: u64,
    bytes: AtomicU64,
    out: AtomicU64,
    tick: AtomicU64,
    /// For each of the last ticks, its number (upper half) and the number of loans that began in it
    /// and are out (lower half). Both share a word, so that the end of a loan is counted in its own
    /// tick or not at all.
    begun: [AtomicU64; TICKS],
    overdue: AtomicU64,
    relocated_tensors: AtomicU64,
    relocated_bytes: AtomicU64,
    relocation_failures: AtomicU64,
}

/// The figures of a [`LoanLimiter`] at some time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoanFigures {
    /// Loans that are out.
    pub out: u64,
    /// Bytes of the tensors that are lent. A tensor that is lent twice counts twice.
    pub bytes: u64,
    /// Loans that were held for longer than the grace period, so far.
    pub overdue: u64,
    /// Tensors borrowed from dead peers that were copied out of the dead process's memory, so far.
    pub relocated_tensors: u64,
    /// Bytes of those tensors. A tensor that is borrowed several times counts once.
    pub relocated_bytes: u64,
    /// Failed attempts to copy such tensors. Each is tried again.
    pub relocation_failures: u64,
}

/// The right to lend one tensor. Its drop ends the loan in the counts.
#[derive(Debug)]
pub struct LoanPermit {
    limiter: Arc<LoanLimiter>,
    bytes: u64,
    /// The tick in which the loan began.
    tick: u64,
}

impl LoanLimiter {
    /// A limiter that lets at most `max_bytes` be lent at a time.
    pub fn new(max_bytes: u64) -> Self {
        LoanLimiter {
            max_bytes,
            bytes: AtomicU64::new(0),
            out: AtomicU64::new(0),
            tick: AtomicU64::new(0),
            begun: array::from_fn(|tick| AtomicU64::new(tick_word(tick as u64))),
            overdue: AtomicU64::new(0),
            relocated_tensors: AtomicU64::new(0),
            relocated_bytes: AtomicU64::new(0),
            relocation_failures: AtomicU64::new(0),
        }
    }

    /// A permit for a tensor of `bytes` bytes; `None` if the bound would be exceeded.
    pub fn permit(self: &Arc<Self>, bytes: u64) -> Option<LoanPermit> {
        let fits = |lent: u64| {
            let sum = lent.checked_add(bytes)?;
            (sum <= self.max_bytes || is_on(Mutant::LentPastBound)).then_some(sum)
        };
        // Relaxed, here and below: counts that publish nothing else.
        self.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).ok()?;
        self.out.fetch_add(1, Ordering::Relaxed);
        Some(LoanPermit { limiter: Arc::clone(self), bytes, tick: self.begin() })
    }

    /// As [`LoanLimiter::permit`], where a loan of this limiter has just ended. Its permit is
    /// passed on if it counts as much as the new one.
    #[inline]
    pub fn permit_after(self: &Arc<Self>, ended: Option<LoanPermit>, bytes: u64) -> Option<LoanPermit> {
        // Acquire: as in `begin`.
        let tick = self.tick.load(Ordering::Acquire);
        if ended.as_ref().is_some_and(|ended| ended.bytes == bytes && ended.tick == tick) {
            return ended;
        }
        drop(ended);
        self.permit(bytes)
    }

    /// Counts a loan among those of the present tick.
    fn begin(&self) -> u64 {
        loop {
            // Acquire: the word of this tick is ready.
            let tick = self.tick.load(Ordering::Acquire);
            let one_more = |word: u64| is_of(word, tick).then_some(word + 1);
            // The update fails only if several ticks have passed since the load. Acquire: the next
            // load then sees a later tick.
            let begun = self.begun_in(tick).fetch_update(Ordering::Relaxed, Ordering::Acquire, one_more);
            if begun.is_ok() {
                return tick;
            }
        }
    }

    fn begun_in(&self, tick: u64) -> &AtomicU64 {
        &self.begun[tick as usize % TICKS]
    }

    /// One tick has passed: the grace period divided by [`TICKS_PER_GRACE`]. Called by one thread
    /// only.
    pub fn tick(&self) {
        let next = self.tick.load(Ordering::Relaxed) + 1;
        // These loans have been out for a whole grace period, and for less than one tick more.
        if let Some(over) = next.checked_sub(TICKS_PER_GRACE + 1) {
            // Release: a thread that sees this word sees a tick after `over`.
            let begun = self.begun_in(over).swap(tick_word(over + TICKS as u64), Ordering::Release);
            self.overdue.fetch_add(begun & u64::from(u32::MAX), Ordering::Relaxed);
        }
        self.tick.store(next, Ordering::Release);
    }

    /// Counts tensors of a dead peer that were copied out of its memory.
    pub fn relocated(&self, tensors: u64, bytes: u64) {
        self.relocated_tensors.fetch_add(tensors, Ordering::Relaxed);
        self.relocated_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts a failed attempt to do so.
    pub fn relocation_failed(&self) {
        self.relocation_failures.fetch_add(1, Ordering::Relaxed);
    }

    /// The figures now. Each alone is exact.
    pub fn figures(&self) -> LoanFigures {
        let get = |figure: &AtomicU64| figure.load(Ordering::Relaxed);
        LoanFigures {
            out: get(&self.out),
            bytes: get(&self.bytes),
            overdue: get(&self.overdue),
            relocated_tensors: get(&self.relocated_tensors),
            relocated_bytes: get(&self.relocated_bytes),
            relocation_failures: get(&self.relocation_failures),
        }
    }
}

#[cfg(any(test, feature = "internals"))]
impl LoanPermit {
    /// A permit of a limiter of its own, for tests that use a port alone.
    pub fn unbounded() -> LoanPermit {
        match Arc::new(LoanLimiter::new(u64::MAX)).permit(0) {
            Some(permit) => permit,
            None => unreachable!("0 bytes are within every bound"),
        }
    }
}

impl Drop for LoanPermit {
    fn drop(&mut self) {
        if is_on(Mutant::LoanNeverCountedBack) {
            return;
        }
        let times = if is_on(Mutant::LoanCountedBackTwice) { 2 } else { 1 };
        let (limiter, tick) = (&self.limiter, self.tick);
        limiter.bytes.fetch_sub(self.bytes * times, Ordering::Relaxed);
        limiter.out.fetch_sub(times, Ordering::Relaxed);
        let one_less = |word: u64| is_of(word, tick).then(|| word - 1);
        // The update fails if the loan was counted as overdue.
        let _ = limiter.begun_in(tick).fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less);
    }
}

/// The word of a tick in which no loan has begun.
fn tick_word(tick: u64) -> u64 {
    tick << 32
}

/// Whether a word counts the loans of this tick.
fn is_of(word: u64, tick: u64) -> bool {
    word >> 32 == tick & u64::from(u32::MAX)
}

#[cfg(all(test, not(tensorwire_loom)))]
mod tests {
    use super::*;

    fn figures(out: u64, bytes: u64, overdue: u64) -> LoanFigures {
        LoanFigures { out, bytes, overdue, ..LoanFigures::default() }
    }

    #[test]
    fn no_more_is_lent_than_the_bound_says_and_what_comes_back_makes_room() {
        let limiter = Arc::new(LoanLimiter::new(100));
        let first = limiter.permit(60).expect("room");
        assert!(limiter.permit(41).is_none());
        let second = limiter.permit(40).expect("the bound itself may be reached");
        assert!(limiter.permit(1).is_none() && limiter.permit(u64::MAX).is_none());
        assert_eq!(limiter.figures(), figures(2, 100, 0));
        drop(first);
        assert_eq!(limiter.figures(), figures(1, 40, 0));
        drop((limiter.permit(60).expect("room again"), second));
        assert_eq!(limiter.figures(), figures(0, 0, 0));
    }

    #[test]
    fn a_permit_is_passed_on_only_if_it_counts_the_same() {
        let limiter = Arc::new(LoanLimiter::new(100));
        let mut permit = limiter.permit_after(None, 60);
        for (bytes, out) in [(60, 1), (61, 1), (101, 0), (100, 1)] {
            permit = limiter.permit_after(permit, bytes);
            assert_eq!(limiter.figures(), figures(out, out * bytes, 0));
        }
        // A loan is as old as its permit, so this one is new.
        limiter.tick();
        permit = limiter.permit_after(permit, 100);
        (0..TICKS_PER_GRACE).for_each(|_| limiter.tick());
        assert_eq!(limiter.figures(), figures(1, 100, 0));
        limiter.tick();
        assert_eq!(limiter.figures(), figures(1, 100, 1));
        drop(permit);
        assert_eq!(limiter.figures(), figures(0, 0, 1));
    }

    #[test]
    fn a_loan_is_overdue_once_after_a_grace_period_and_at_most_one_tick_more() {
        let limiter = Arc::new(LoanLimiter::new(100));
        (0..1000).for_each(|_| limiter.tick());
        let [long, short] = [1, 2].map(|bytes| limiter.permit(bytes).expect("room"));
        (0..TICKS_PER_GRACE).for_each(|_| limiter.tick());
        assert_eq!(limiter.figures().overdue, 0, "it may have begun at the end of its tick");
        drop(short);
        limiter.tick();
        assert_eq!(limiter.figures(), figures(1, 1, 1));
        (0..100).for_each(|_| limiter.tick());
        assert_eq!(limiter.figures().overdue, 1, "counted once");
        drop(long);
        let again = limiter.permit(1).expect("room");
        (0..=TICKS_PER_GRACE).for_each(|_| limiter.tick());
        drop(again);
        assert_eq!(limiter.figures(), figures(0, 0, 2));
    }

    #[test]
    fn loans_that_come_and_go_on_many_threads_are_all_counted() {
        let limiter = Arc::new(LoanLimiter::new(50));
        let done = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        let loans = [limiter.permit(20), limiter.permit(20)];
                        assert!(limiter.figures().bytes <= 50);
                        drop(loans);
                    }
                    done.fetch_add(1, Ordering::SeqCst);
                });
            }
            while done.load(Ordering::SeqCst) < 4 {
                limiter.tick();
                std::thread::yield_now();
            }
        });
        let LoanFigures { out, bytes, overdue, .. } = limiter.figures();
        assert_eq!((out, bytes), (0, 0));
        (0..10).for_each(|_| limiter.tick());
        assert_eq!(limiter.figures().overdue, overdue, "what is back is not overdue");
    }
}

/// Every interleaving, under loom: `tests/nightly` builds the crate with `--cfg tensorwire_loom`
/// for it.
#[cfg(all(test, tensorwire_loom))]
mod loom_tests {
    use super::*;

    #[test]
    fn a_loan_that_ends_while_the_time_passes_is_overdue_once_or_never_and_leaves_nothing_behind() {
        loom::model(|| {
            let limiter = Arc::new(LoanLimiter::new(10));
            let loan = limiter.permit(10).expect("room");
            let borrower = {
                let limiter = Arc::clone(&limiter);
                loom::thread::spawn(move || {
                    drop(loan);
                    drop(limiter.permit(10).expect("room again"));
                })
            };
            (0..=TICKS_PER_GRACE).for_each(|_| limiter.tick());
            borrower.join().expect("no panic");
            let LoanFigures { out, bytes, overdue, .. } = limiter.figures();
            assert!((out, bytes) == (0, 0) && overdue <= 2);
            (0..TICKS as u64).for_each(|_| limiter.tick());
            assert_eq!(limiter.figures().overdue, overdue, "what is back is not overdue");
        });
    }
}
