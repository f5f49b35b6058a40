//! Pinning threads to CPUs. Checks what core_affinity does not: the id and the resulting mask.

use core_affinity::CoreId;
use rustix::thread::{CpuSet, sched_setaffinity};
use std::cell::RefCell;
use std::sync::OnceLock;

/// Why a thread was not pinned.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PinError {
    /// The process may not run on that CPU.
    #[error(
        "CPU {cpu} was asked for, but this process may only run on {allowed:?}: choose one of those, or \
         change its affinity mask"
    )]
    NotAllowed {
        /// The CPU that was asked for.
        cpu: usize,
        /// The CPUs that the process may use.
        allowed: Vec<usize>,
    },
    /// The kernel did not change the mask.
    #[error("pinning to CPU {cpu} had no effect: the thread may still run on {now:?}")]
    NoEffect {
        /// The CPU that was asked for.
        cpu: usize,
        /// The CPUs of the present mask.
        now: Vec<usize>,
    },
}

thread_local! {
    static BEFORE: RefCell<Option<Vec<usize>>> = const { RefCell::new(None) };
}

/// The CPUs that the process could use when this was first called.
///
/// core_affinity reports the calling thread's mask, which a pin narrows and children inherit: call
/// this before the first pin.
pub fn process_cpus() -> &'static [usize] {
    static CPUS: OnceLock<Vec<usize>> = OnceLock::new();
    CPUS.get_or_init(mask)
}

/// Pins the calling thread to one CPU, and reads the mask back.
///
/// # Errors
/// If the process may not run on that CPU, or the kernel did not change the mask. Ids past 1023,
/// which would abort in core_affinity, are refused as well.
pub fn pin_current_thread(cpu: usize) -> Result<(), PinError> {
    let allowed = process_cpus();
    if !allowed.contains(&cpu) {
        return Err(PinError::NotAllowed { cpu, allowed: allowed.to_vec() });
    }
    let before = mask();
    core_affinity::set_for_current(CoreId { id: cpu });
    match mask() {
        now if now == [cpu] => {
            BEFORE.with_borrow_mut(|was| _ = was.get_or_insert(before));
            Ok(())
        }
        now => Err(PinError::NoEffect { cpu, now }),
    }
}

/// The CPUs of the calling thread before it was pinned here, if it was.
pub(super) fn cpus_before_pin() -> Option<Vec<usize>> {
    // The variable is gone while the thread ends.
    BEFORE.try_with(|before| before.borrow().clone()).ok().flatten()
}

/// Lets the calling thread run on these CPUs, whatever pin it inherited. Has no effect if the
/// kernel refuses it.
pub(super) fn allow_current_thread(cpus: &[usize]) {
    let mut all = CpuSet::new();
    cpus.iter().filter(|cpu| **cpu < CpuSet::MAX_CPU).for_each(|cpu| all.set(*cpu));
    let _ = sched_setaffinity(None, &all);
}

/// While it lives, the calling thread may run where it could before it was pinned here. It has no
/// effect on a thread that was not.
#[derive(Debug)]
pub struct UnpinnedThread {
    pinned: Option<Vec<usize>>,
}

impl UnpinnedThread {
    /// Undoes the pin of the calling thread.
    pub fn begin() -> Self {
        let pinned = cpus_before_pin().map(|before| {
            let pinned = mask();
            allow_current_thread(&before);
            pinned
        });
        UnpinnedThread { pinned }
    }
}

impl Drop for UnpinnedThread {
    fn drop(&mut self) {
        if let Some(pinned) = self.pinned.take() {
            allow_current_thread(&pinned);
        }
    }
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
    fn an_inherited_pin_can_be_undone() {
        let cpu = process_cpus()[0];
        let pinned = move || {
            let mine = mask();
            assert_eq!(cpus_before_pin(), None);
            for _ in 0..2 {
                pin_current_thread(cpu).expect("allowed");
            }
            let before = cpus_before_pin().expect("it was pinned");
            let inherits = move || {
                assert_eq!(mask(), [cpu]);
                allow_current_thread(&before);
                mask()
            };
            assert_eq!(std::thread::spawn(inherits).join().expect("no panic"), mine);
        };
        std::thread::spawn(pinned).join().expect("no panic");
    }

    #[test]
    fn a_pinned_thread_can_start_others_that_are_not() {
        let cpu = process_cpus()[0];
        let other = || std::thread::spawn(mask).join().expect("no panic");
        let pinned = move || {
            let mine = mask();
            drop(UnpinnedThread::begin());
            assert_eq!(mask(), mine, "it was not pinned");
            pin_current_thread(cpu).expect("allowed");
            let unpinned = UnpinnedThread::begin();
            assert_eq!(other(), mine);
            drop(unpinned);
            assert_eq!(mask(), [cpu]);
        };
        std::thread::spawn(pinned).join().expect("no panic");
    }

    #[test]
    fn a_cpu_that_is_not_allowed_is_refused_by_number() {
        for cpu in [1023, 1024, 5000, usize::MAX] {
            let error = pin_current_thread(cpu).expect_err("not allowed");
            assert!(error.to_string().contains(&format!("CPU {cpu}")), "{error}");
        }
    }
}
