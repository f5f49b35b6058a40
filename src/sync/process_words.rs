//! Words of this process alone, with its private futexes.
#![allow(unsafe_code)] // the kernel's view of half a word

use super::event_count::WORDS;
use super::words::{LoadWords, ShareWords};
use rustix::thread::futex;
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Words of this process alone, as many as an [event count](super::event_count) has.
#[derive(Debug)]
pub(crate) struct ProcessWords(Box<[AtomicU64; WORDS]>);

impl Default for ProcessWords {
    fn default() -> Self {
        ProcessWords(Box::new([const { AtomicU64::new(0) }; WORDS]))
    }
}

impl ProcessWords {
    /// The low half of a word, for the kernel.
    fn low_half(&self, index: usize) -> &AtomicU32 {
        let halves = ptr::from_ref(&self.0[index]).cast::<AtomicU32>();
        // SAFETY: half of a word that lives as long as `self`, and aligned. Only the kernel looks
        // at it.
        unsafe { &*halves.add(usize::from(cfg!(target_endian = "big"))) }
    }
}

impl LoadWords for ProcessWords {
    fn len(&self) -> usize {
        WORDS
    }

    fn load(&self, index: usize, order: Ordering) -> u64 {
        self.0[index].load(order)
    }
}

impl ShareWords for ProcessWords {
    fn fetch_add(&self, index: usize, value: u64) -> u64 {
        self.0[index].fetch_add(value, Ordering::SeqCst)
    }

    fn fetch_or(&self, index: usize, bits: u64) -> u64 {
        self.0[index].fetch_or(bits, Ordering::SeqCst)
    }

    fn swap(&self, index: usize, value: u64) -> u64 {
        self.0[index].swap(value, Ordering::SeqCst)
    }

    fn fence(&self) {
        std::sync::atomic::fence(Ordering::SeqCst);
    }

    fn wait(&self, index: usize, seen: u32, timeout: Duration) {
        // An error is a changed word, a signal, or the end of the time.
        let timeout = futex::Timespec::try_from(timeout).ok();
        let _ = futex::wait(self.low_half(index), futex::Flags::PRIVATE, seen, timeout.as_ref());
    }

    fn wake(&self, index: usize) {
        // The word is ours and aligned, so there is no error.
        let _ = futex::wake(self.low_half(index), futex::Flags::PRIVATE, i32::MAX as u32);
    }
}
