//! The time that failed proofs take of the bootstrap thread, which is bounded.
//!
//! A handshake of TLS is some hundred microseconds of arithmetic, for a stranger's proof as for a
//! member's. Without a bound a flood of them keeps busy a CPU that links may need too.

use rustix::time::{ClockId, clock_gettime};
use std::pin::pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// After a failed proof new ones wait for so many times the CPU time that it took.
const REST: u32 = 3;
/// The longest wait. A member keeps most of its [`PROOF_LIMIT`](super::acceptor::PROOF_LIMIT).
const MAX_REST: Duration = Duration::from_millis(300);

/// Has proofs wait, so that failed ones take at most a quarter of a thread's time.
#[derive(Default)]
pub(super) struct ProofPacer {
    rests_until: Mutex<Option<Instant>>,
}

impl ProofPacer {
    /// Runs a proof, after the rest that earlier ones have caused. One that is dropped has failed.
    pub(super) async fn run<T, E>(&self, proof: impl Future<Output = Result<T, E>>) -> Result<T, E> {
        let rest = *self.rests_until();
        if let Some(end) = rest {
            sleep_until(end).await;
        }
        let mut paced = PacedProof { pacer: self, took: Duration::ZERO, has_failed: true };
        let mut proof = pin!(proof);
        let outcome = std::future::poll_fn(|context| {
            let before = cpu_time();
            let polled = proof.as_mut().poll(context);
            paced.took += cpu_time().saturating_sub(before);
            polled
        });
        let outcome = outcome.await;
        paced.has_failed = outcome.is_err();
        outcome
    }

    fn rests_until(&self) -> MutexGuard<'_, Option<Instant>> {
        self.rests_until.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A proof that has begun.
struct PacedProof<'a> {
    pacer: &'a ProofPacer,
    took: Duration,
    has_failed: bool,
}

impl Drop for PacedProof<'_> {
    fn drop(&mut self) {
        if self.has_failed {
            let mut rests_until = self.pacer.rests_until();
            *rests_until = Some(rest(*rests_until, Instant::now(), self.took));
        }
    }
}

/// When the rest ends that a failed proof makes longer.
fn rest(until: Option<Instant>, now: Instant, took: Duration) -> Instant {
    let begin = until.map_or(now, |until| until.max(now));
    (begin + took * REST).min(now + MAX_REST)
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

    const WORK: Duration = Duration::from_millis(5);

    #[test]
    fn failures_add_up_and_no_wait_is_longer_than_the_bound() {
        let now = Instant::now();
        let ms = Duration::from_millis;
        assert_eq!(rest(None, now, ms(2)), now + ms(6));
        assert_eq!(rest(Some(now + ms(6)), now, ms(1)), now + ms(9));
        assert_eq!(rest(Some(now), now + ms(4), ms(1)), now + ms(7), "the earlier rest is over");
        assert_eq!(rest(Some(now + ms(299)), now, ms(1)), now + MAX_REST);
        assert_eq!(rest(None, now, Duration::from_secs(9)), now + MAX_REST);
    }

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
    }

    /// Takes the CPU for [`WORK`].
    async fn work(outcome: Result<(), ()>) -> Result<(), ()> {
        let begin = cpu_time();
        while cpu_time() - begin < WORK {}
        outcome
    }

    #[test]
    fn a_proof_waits_after_one_that_failed() {
        let pacer = ProofPacer::default();
        runtime().block_on(async {
            let begin = Instant::now();
            pacer.run(work(Err(()))).await.unwrap_err();
            pacer.run(ready(Ok::<_, ()>(()))).await.unwrap();
            assert!(begin.elapsed() >= WORK * (REST + 1), "{:?}", begin.elapsed());
        });
    }

    #[test]
    fn a_member_that_proves_its_name_has_nobody_wait() {
        let pacer = ProofPacer::default();
        runtime().block_on(async { pacer.run(work(Ok(()))).await.unwrap() });
        assert_eq!(*pacer.rests_until(), None);
    }

    #[test]
    fn a_proof_that_is_given_up_has_others_wait() {
        let pacer = ProofPacer::default();
        let stalled = async {
            work(Ok(())).await?;
            pending::<Result<(), ()>>().await
        };
        let begin = Instant::now();
        runtime().block_on(async {
            let limited = tokio::time::timeout(WORK, pacer.run(stalled));
            limited.await.expect_err("it never ends");
        });
        let until = pacer.rests_until().expect("it took some time");
        assert!(until >= begin + WORK * (REST + 1), "{:?}", until - begin);
    }
}
