//! A stopwatch on the processor's time stamp counter if it is reliable, else on the monotonic
//! clock.
#![allow(unsafe_code)] // the two instructions that read the counter

use std::fmt;
use std::time::{Duration, Instant};

/// The file with the kernel's clock source.
#[cfg(target_arch = "x86_64")]
const CLOCK_SOURCE: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
/// How long the counter is compared with the monotonic clock.
const CALIBRATION: Duration = Duration::from_millis(50);

/// A stopwatch. Only stamps of the same stopwatch can be compared.
#[derive(Clone, Debug)]
pub struct Stopwatch {
    source: TimeSource,
}

#[derive(Clone, Debug)]
enum TimeSource {
    /// The counter, with the nanoseconds of one tick.
    #[cfg(target_arch = "x86_64")]
    Tsc { nanos_per_tick: f64 },
    /// The system's monotonic clock, as nanoseconds since this origin.
    System { origin: Instant },
}

/// A point in time, in the clock's own unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stamp(u64);

impl Stopwatch {
    /// The best clock of this machine. Calibrating the counter takes 50 ms.
    pub fn new() -> Self {
        #[cfg(target_arch = "x86_64")]
        if counter_is_invariant(&read("/proc/cpuinfo")) || kernel_trusts_counter(&read(CLOCK_SOURCE)) {
            return Stopwatch { source: calibrate() };
        }
        Stopwatch { source: TimeSource::System { origin: Instant::now() } }
    }

    /// The time now. All earlier loads of the program are complete.
    #[inline(always)]
    pub fn now(&self) -> Stamp {
        match &self.source {
            #[cfg(target_arch = "x86_64")]
            TimeSource::Tsc { .. } => Stamp(read_counter()),
            TimeSource::System { origin } => Stamp(origin.elapsed().as_nanos() as u64),
        }
    }

    /// Nanoseconds from `start` to `end`, rounded; 0 if `end` is not later.
    #[inline(always)]
    pub fn nanos(&self, start: Stamp, end: Stamp) -> u64 {
        let ticks = end.0.saturating_sub(start.0);
        match &self.source {
            #[cfg(target_arch = "x86_64")]
            TimeSource::Tsc { nanos_per_tick } => (ticks as f64 * nanos_per_tick).round() as u64,
            TimeSource::System { .. } => ticks,
        }
    }
}

impl fmt::Display for Stopwatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.source {
            #[cfg(target_arch = "x86_64")]
            TimeSource::Tsc { nanos_per_tick } => write!(f, "TSC at {:.1} MHz", 1e3 / nanos_per_tick),
            TimeSource::System { .. } => f.write_str("CLOCK_MONOTONIC (the TSC is not to be trusted here)"),
        }
    }
}

/// Whether `/proc/cpuinfo` promises a counter of constant rate that no sleep state stops.
#[cfg(target_arch = "x86_64")]
fn counter_is_invariant(cpuinfo: &str) -> bool {
    let flags = cpuinfo.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    ["constant_tsc", "nonstop_tsc"].iter().all(|wanted| flags.split_whitespace().any(|flag| flag == *wanted))
}

/// Whether the counter is the kernel's clock source. The kernel drops an unreliable counter.
#[cfg(target_arch = "x86_64")]
fn kernel_trusts_counter(source: &str) -> bool {
    source.trim_end() == "tsc"
}

#[cfg(target_arch = "x86_64")]
fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

#[cfg(target_arch = "x86_64")]
fn calibrate() -> TimeSource {
    let (first_time, first_ticks) = paired_reading();
    std::thread::sleep(CALIBRATION);
    let (last_time, last_ticks) = paired_reading();
    let nanos = last_time.duration_since(first_time).as_nanos() as f64;
    match last_ticks.checked_sub(first_ticks) {
        Some(ticks) if ticks > 0 => TimeSource::Tsc { nanos_per_tick: nanos / ticks as f64 },
        // A counter that stands still or runs backwards is unusable.
        _ => TimeSource::System { origin: Instant::now() },
    }
}

/// Readings of both clocks at nearly the same time: the closest of several pairs.
#[cfg(target_arch = "x86_64")]
fn paired_reading() -> (Instant, u64) {
    let mut best = (u64::MAX, Instant::now(), 0);
    for _ in 0..32 {
        let before = read_counter();
        let time = Instant::now();
        let width = read_counter().wrapping_sub(before);
        if width < best.0 {
            best = (width, time, before + width / 2);
        }
    }
    (best.1, best.2)
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn read_counter() -> u64 {
    use std::arch::x86_64::{_mm_lfence, _rdtsc};
    // SAFETY: both instructions belong to the base set of x86_64 (SSE2), touch no memory and have
    // no preconditions. The fence keeps the counter from being read before earlier loads are done.
    unsafe {
        _mm_lfence();
        _rdtsc()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_agrees_with_the_system_within_two_percent() {
        let clock = Stopwatch::new();
        let (system, start) = (Instant::now(), clock.now());
        std::thread::sleep(Duration::from_millis(40));
        let (end, expected) = (clock.now(), system.elapsed().as_nanos() as f64);
        let measured = clock.nanos(start, end) as f64;
        assert!(
            (measured / expected - 1.0).abs() < 0.02,
            "{clock}: {measured} ns, the system says {expected}"
        );
        assert_eq!(clock.nanos(end, start), 0, "time never runs backwards");
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn the_counter_is_good_where_the_kernel_keeps_the_time_by_it() {
        assert!(kernel_trusts_counter("tsc\n"));
        assert!(
            !kernel_trusts_counter("hpet\n")
                && !kernel_trusts_counter("tsc-early\n")
                && !kernel_trusts_counter("")
        );
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn both_flags_are_needed_for_the_counter() {
        assert!(counter_is_invariant("model: 1\nflags\t: fpu constant_tsc nonstop_tsc sse2\n"));
        assert!(!counter_is_invariant("flags\t: fpu constant_tsc sse2\n"));
        assert!(!counter_is_invariant("flags\t: fpu nonstop_tsc xconstant_tsc\n"));
        assert!(!counter_is_invariant(""));
    }
}
