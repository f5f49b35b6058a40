//! The hot path, proven: in steady state no thread that moves data allocates, frees or enters the kernel.
#![allow(unsafe_code)] // a global allocator that counts, and a handler of SIGSYS

#[path = "../common/mod.rs"]
mod common;
#[path = "../fake_verbs/driver.rs"]
mod driver;
mod exchange;
#[allow(dead_code)] // the rules of the conformance suite use all of it
#[path = "../conformance/harness.rs"]
mod harness;
mod shm;
mod threads;
mod trap;
mod turns;
mod verbs;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// One scenario at a time: each has threads that spin.
fn alone_on_the_cpus() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
