//! Threads that compute beside a measurement.

use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// Threads that take all the CPU time that they get. They end when this is dropped.
pub struct BusyLoops {
    ended: Arc<AtomicBool>,
}

impl BusyLoops {
    /// Starts `count` threads, which no CPU is chosen for.
    pub fn start(count: u32) -> Self {
        let ended = Arc::new(AtomicBool::new(false));
        for _ in 0..count {
            let ended = Arc::clone(&ended);
            thread::spawn(move || {
                while !ended.load(Ordering::Relaxed) {
                    spin_loop();
                }
            });
        }
        BusyLoops { ended }
    }
}

impl Drop for BusyLoops {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
    }
}
