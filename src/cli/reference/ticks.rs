//! Time stamps of a few nanoseconds' cost.

use std::time::Instant;

/// A clock that counts in ticks: the time stamp counter where it is invariant, else the monotonic clock.
#[derive(Clone, Copy, Debug)]
pub struct Ticks {
    origin: Instant,
    per_ns: Option<f64>,
}

impl Ticks {
    /// Finds the clock and, where it is the counter, how fast it ticks; takes 50 ms.
    pub fn calibrate() -> Self {
        let origin = Instant::now();
        let clock = Ticks { origin, per_ns: None };
        if !is_invariant() {
            return clock;
        }
        let (first, start) = (counter(), Instant::now());
        while start.elapsed().as_millis() < 50 {
            std::hint::spin_loop();
        }
        let (last, nanos) = (counter(), start.elapsed().as_nanos() as f64);
        Ticks { origin, per_ns: Some(last.wrapping_sub(first) as f64 / nanos) }
    }

    /// A time stamp.
    #[inline]
    pub fn now(&self) -> u64 {
        match self.per_ns {
            Some(_) => counter(),
            None => self.origin.elapsed().as_nanos() as u64,
        }
    }

    /// Nanoseconds between two time stamps.
    #[inline]
    pub fn ns(&self, from: u64, to: u64) -> f64 {
        to.wrapping_sub(from) as f64 / self.per_ns.unwrap_or(1.0)
    }

    /// What the clock is.
    pub fn name(&self) -> &'static str {
        if self.per_ns.is_some() { "time stamp counter" } else { "monotonic clock" }
    }
}

#[cfg(target_arch = "x86_64")]
fn is_invariant() -> bool {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    cpu.contains("constant_tsc") && cpu.contains("nonstop_tsc")
}

#[cfg(not(target_arch = "x86_64"))]
fn is_invariant() -> bool {
    false
}

#[cfg(target_arch = "x86_64")]
#[inline]
#[allow(unsafe_code)]
fn counter() -> u64 {
    // SAFETY: every x86-64 processor has the instruction, and Linux does not forbid it to programs.
    unsafe { std::arch::x86_64::_rdtsc() }
}

#[cfg(not(target_arch = "x86_64"))]
fn counter() -> u64 {
    0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn ticks_agree_with_the_monotonic_clock() {
        let clock = Ticks::calibrate();
        let (from, start) = (clock.now(), Instant::now());
        std::thread::sleep(Duration::from_millis(30));
        let (to, real) = (clock.now(), start.elapsed().as_nanos() as f64);
        let ratio = clock.ns(from, to) / real;
        assert!((0.9..1.1).contains(&ratio), "{} is off by {ratio}", clock.name());
    }
}
