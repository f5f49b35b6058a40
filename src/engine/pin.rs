//! Pinning threads to CPUs, with core_affinity's faults mended.

use core_affinity::CoreId;
use rustix::thread::{CpuSet, sched_setaffinity};
use std::sync::OnceLock;

/// Why a thread was not pinned.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PinError {
    /// The process may not run there.
    #[error(
        "CPU {cpu} was asked for, but this process may only run on {allowed:?}: choose one of those, or change its affinity mask"
    )]
    NotAllowed {
        /// The CPU that was asked for.
        cpu: usize,
        /// Those that the process may use.
        allowed: Vec<usize>,
    },
    /// The kernel did not do it.
    #[error("pinning to CPU {cpu} had no effect: the thread may still run on {now:?}")]
    NoEffect {
        /// The CPU that was asked for.
        cpu: usize,
        /// The mask as it is.
        now: Vec<usize>,
    },
}

/// The CPUs that the process may use, as they were when this was first called.
///
/// core_affinity reports the calling thread's mask, which a pin narrows and children inherit: call this
/// before the first pin.
pub fn process_cpus() -> &'static [usize] {
    static CPUS: OnceLock<Vec<usize>> = OnceLock::new();
    CPUS.get_or_init(mask)
}

/// Pins the calling thread to one CPU, and reads the mask back.
///
/// # Errors
/// If the process may not run there (ids that would abort in core_affinity are among those), or the kernel
/// did not do it.
pub fn pin_current_thread(cpu: usize) -> Result<(), PinError> {
    let allowed = process_cpus();
    if !allowed.contains(&cpu) {
        return Err(PinError::NotAllowed { cpu, allowed: allowed.to_vec() });
    }
    core_affinity::set_for_current(CoreId { id: cpu });
    match mask() {
        now if now == [cpu] => Ok(()),
        now => Err(PinError::NoEffect { cpu, now }),
    }
}

/// Lets the calling thread run on every CPU that the process may use, whatever pin it was started with. Without effect where the
/// kernel refuses it.
pub fn unpin_current_thread() {
    let mut all = CpuSet::new();
    process_cpus().iter().filter(|cpu| **cpu < CpuSet::MAX_CPU).for_each(|cpu| all.set(*cpu));
    let _ = sched_setaffinity(None, &all);
}

fn mask() -> Vec<usize> {
    core_affinity::get_core_ids().unwrap_or_default().into_iter().map(|core| core.id).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pin_is_read_back_and_does_not_narrow_the_process() {
        let before = process_cpus().to_vec();
        let cpu = before[before.len() - 1];
        std::thread::spawn(move || pin_current_thread(cpu).expect("allowed")).join().expect("no panic");
        assert_eq!(process_cpus(), before);
    }

    #[test]
    fn a_pin_that_was_inherited_can_be_shaken_off() {
        let cpu = process_cpus()[0];
        let child = move || {
            pin_current_thread(cpu).expect("allowed");
            let inherits = move || {
                assert_eq!(mask(), [cpu]);
                unpin_current_thread();
                mask()
            };
            std::thread::spawn(inherits).join().expect("no panic")
        };
        assert_eq!(std::thread::spawn(child).join().expect("no panic"), process_cpus());
    }

    #[test]
    fn a_cpu_that_is_not_ours_is_refused_by_name() {
        for cpu in [1023, 1024, 5000, usize::MAX] {
            let error = pin_current_thread(cpu).expect_err("not ours");
            assert!(error.to_string().contains(&format!("CPU {cpu}")), "{error}");
        }
    }
}
