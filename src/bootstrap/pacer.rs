//! The time that failed handshakes take of the thread that listens.
//!
//! A handshake of TLS is some hundred microseconds of arithmetic, for a stranger as for a member.
//! Without a pause a flood of them keeps busy a CPU that links may need too.

use rustix::time::{ClockId, clock_gettime};
use std::pin::pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// After a failed handshake new ones wait for so many times the CPU time that it took.
const PENALTY: u32 = 9;
/// The longest wait of a handshake. It is shorter than the fixed time limits of a caller.
const MAX_DELAY: Duration = Duration::from_millis(100);

/// Has handshakes wait, so that failed ones take a tenth of a thread's time. They take more if
/// those under way at a time take more than a ninth of [`MAX_DELAY`].
///
/// Callers that have the cluster's secret wait for each other alone: strangers delay none of them.
#[derive(Default)]
pub(super) struct HandshakePacer {
    /// That of strangers, and that of callers with the secret.
    delayed_until: [Mutex<Option<Instant>>; 2],
}

impl HandshakePacer {
    /// Runs a handshake of a caller that has the secret or not, after the delay that earlier ones
    /// have caused. One that is dropped has failed.
    pub(super) async fn run<T, E>(
        &self,
        has_secret: bool,
        handshake: impl Future<Output = Result<T, E>>,
    ) -> Result<T, E> {
        self.delay(has_secret).await;
        let took = Duration::ZERO;
        let mut paced = PacedHandshake { pacer: self, has_secret, took, has_failed: true };
        let mut handshake = pin!(handshake);
        let outcome = std::future::poll_fn(|context| {
            let before = cpu_time();
            let polled = handshake.as_mut().poll(context);
            paced.took += cpu_time().saturating_sub(before);
            polled
        });
        let outcome = outcome.await;
        paced.has_failed = outcome.is_err();
        outcome
    }

    async fn delay(&self, has_secret: bool) {
        let latest = Instant::now() + MAX_DELAY;
        // Others that fail meanwhile make the delay longer.
        loop {
            let until = self.delayed_until(has_secret).map(|until| until.min(latest));
            match until {
                Some(until) if until > Instant::now() => sleep_until(until).await,
                _ => return,
            }
        }
    }

    pub(super) fn delayed_until(&self, has_secret: bool) -> MutexGuard<'_, Option<Instant>> {
        self.delayed_until[usize::from(has_secret)].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A handshake that has begun.
struct PacedHandshake<'a> {
    pacer: &'a HandshakePacer,
    has_secret: bool,
    took: Duration,
    has_failed: bool,
}

impl Drop for PacedHandshake<'_> {
    fn drop(&mut self) {
        if self.has_failed {
            let mut delayed_until = self.pacer.delayed_until(self.has_secret);
            *delayed_until = Some(extended(*delayed_until, Instant::now(), self.took));
        }
    }
}

/// When the delay ends that a failed handshake makes longer.
fn extended(until: Option<Instant>, now: Instant, took: Duration) -> Instant {
    let begin = until.map_or(now, |until| until.max(now));
    (begin + took * PENALTY).min(now + MAX_DELAY)
}

/// The CPU time of this thread. Time in which others had the CPU does not count.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::{pending, ready};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
    use tokio::task::JoinSet;
    use tokio::time::timeout;

    const WORK: Duration = Duration::from_millis(5);

    #[test]
    fn failures_add_up_and_no_wait_is_longer_than_the_bound() {
        let now = Instant::now();
        let ms = Duration::from_millis;
        assert_eq!(extended(None, now, ms(2)), now + ms(18));
        assert_eq!(extended(Some(now + ms(18)), now, ms(1)), now + ms(27));
        assert_eq!(extended(Some(now), now + ms(4), ms(1)), now + ms(13), "the earlier delay is over");
        assert_eq!(extended(Some(now + ms(99)), now, ms(1)), now + MAX_DELAY);
        assert_eq!(extended(None, now, Duration::from_secs(9)), now + MAX_DELAY);
    }

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
    }

    /// Takes the CPU for a time.
    async fn work(time: Duration, outcome: Result<(), ()>) -> Result<(), ()> {
        let begin = cpu_time();
        while cpu_time() - begin < time {}
        outcome
    }

    #[test]
    fn a_handshake_waits_after_one_that_failed() {
        let pacer = HandshakePacer::default();
        runtime().block_on(async {
            let begin = Instant::now();
            pacer.run(false, work(WORK, Err(()))).await.unwrap_err();
            pacer.run(false, ready(Ok::<_, ()>(()))).await.unwrap();
            assert!(begin.elapsed() >= WORK * (PENALTY + 1), "{:?}", begin.elapsed());
        });
    }

    #[test]
    fn a_member_that_proves_its_name_has_nobody_wait() {
        let pacer = HandshakePacer::default();
        runtime().block_on(async { pacer.run(false, work(WORK, Ok(()))).await.unwrap() });
        assert_eq!(*pacer.delayed_until(false), None);
    }

    #[test]
    fn a_caller_with_the_secret_waits_for_no_stranger() {
        let pacer = HandshakePacer::default();
        runtime().block_on(async {
            pacer.run(false, work(WORK, Err(()))).await.unwrap_err();
            // The first poll ends what waits for nothing.
            let at_once = |has_secret| timeout(Duration::ZERO, pacer.run(has_secret, ready(Ok::<_, ()>(()))));
            at_once(true).await.expect("it waits for nothing").unwrap();
            pacer.run(true, work(WORK, Err(()))).await.unwrap_err();
            at_once(true).await.expect_err("one that has failed delays the others");
        });
    }

    #[test]
    fn a_handshake_that_is_given_up_has_others_wait() {
        let pacer = HandshakePacer::default();
        let stalled = async {
            work(WORK, Ok(())).await?;
            pending::<Result<(), ()>>().await
        };
        let begin = Instant::now();
        runtime().block_on(async {
            let limited = timeout(WORK, pacer.run(false, stalled));
            limited.await.expect_err("it never ends");
        });
        let until = pacer.delayed_until(false).expect("it took some time");
        assert!(until >= begin + WORK * (PENALTY + 1), "{:?}", until - begin);
    }

    #[test]
    fn many_that_fail_at_a_time_take_a_tenth_of_the_time() {
        const AT_A_TIME: u32 = 8;
        const SHORT: Duration = Duration::from_millis(1);
        let (begin, cpu, runs) = (Instant::now(), cpu_time(), Arc::new(AtomicU32::new(0)));
        runtime().block_on(async {
            let pacer = Arc::new(HandshakePacer::default());
            let callers = (0..AT_A_TIME).map(|_| {
                let (pacer, runs) = (pacer.clone(), runs.clone());
                async move {
                    while begin.elapsed() < MAX_DELAY * 5 {
                        pacer.run(false, work(SHORT, Err(()))).await.unwrap_err();
                        runs.fetch_add(1, Relaxed);
                    }
                }
            });
            callers.collect::<JoinSet<()>>().join_all().await;
        });
        let (cpu, elapsed, runs) = (cpu_time() - cpu, begin.elapsed(), runs.load(Relaxed));
        println!("{runs} handshakes of {SHORT:?}, {cpu:?} of {elapsed:?}");
        // The first ones begin at once, and nobody waits after the last ones.
        assert!(SHORT * runs <= elapsed / (PENALTY + 1) + SHORT * AT_A_TIME * 3, "{runs} in {elapsed:?}");
        // With what the waits take.
        assert!(cpu <= elapsed / 2, "{cpu:?} of {elapsed:?}");
    }
}
