//! Proof of the hot path: in steady state no thread that moves data allocates, frees or enters the
//! kernel.
#![allow(unsafe_code)] // a counting global allocator, and a handler of SIGSYS

#[path = "../common/mod.rs"]
mod common;
#[path = "../fake_verbs/driver.rs"]
mod driver;
mod exchange;
#[allow(dead_code)] // the conformance suite uses all of it
#[path = "../conformance/harness.rs"]
mod harness;
mod shm;
mod tcp;
mod threads;
mod trap;
mod turns;
mod verbs;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Only one scenario runs at a time, because each has spinning threads.
fn alone_on_the_cpus() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
