//! One atomic cache line bounced between two pinned processes: the least that a message can cost.

use memmap2::{MmapOptions, MmapRaw};
use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering};

/// Two lines a prefetcher's pair apart, so that neither is fetched with the other.
const BYTES: usize = 256;

/// Which of the two processes this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Starts each round.
    First,
    /// Answers.
    Second,
}

/// The line, mapped into both processes. Each round the first side stores an odd number and the second side
/// answers with the even number after it.
pub struct CacheLine {
    map: MmapRaw,
    round: u64,
}

impl CacheLine {
    /// Maps the line from a file that both processes have: a memfd of at least [`CacheLine::len`] bytes.
    ///
    /// # Errors
    /// If the file can't be mapped.
    pub fn map(file: &File) -> std::io::Result<Self> {
        let map = MmapOptions::new().len(BYTES).map_raw(file)?;
        Ok(CacheLine { map, round: 0 })
    }

    /// Bytes that the file must have.
    pub fn len() -> u64 {
        BYTES as u64
    }

    /// One round, seen from `side`. `patience` is asked each 2^20 looks; `false` ends the wait.
    ///
    /// # Errors
    /// `None` if the other side did not answer.
    pub fn round(&mut self, side: Side, mut patience: impl FnMut() -> bool) -> Option<()> {
        let (ping, pong) = (self.round * 2 + 1, self.round * 2 + 2);
        self.round += 1;
        match side {
            Side::First => {
                self.line().store(ping, Ordering::Release);
                self.wait_for(pong, &mut patience)
            }
            Side::Second => {
                self.wait_for(ping, &mut patience)?;
                self.line().store(pong, Ordering::Release);
                Some(())
            }
        }
    }

    fn wait_for(&self, value: u64, patience: &mut impl FnMut() -> bool) -> Option<()> {
        let line = self.line();
        loop {
            for _ in 0..1 << 20 {
                if line.load(Ordering::Acquire) == value {
                    return Some(());
                }
                std::hint::spin_loop();
            }
            if !patience() {
                return None;
            }
        }
    }

    #[allow(unsafe_code)]
    fn line(&self) -> &AtomicU64 {
        // SAFETY: the mapping starts at a page, so the first eight bytes are aligned and inside it; it lives as
        // long as `self`; and both processes touch them only through atomics.
        unsafe { AtomicU64::from_ptr(self.map.as_mut_ptr().cast()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> File {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(CacheLine::len()).expect("room");
        file
    }

    #[test]
    fn both_sides_count_the_same_rounds() {
        let file = file();
        let mut first = CacheLine::map(&file).expect("mapped");
        let mut second = CacheLine::map(&file).expect("mapped");
        let thread = std::thread::spawn(move || {
            for _ in 0..100 {
                second.round(Side::Second, || true).expect("asked");
            }
        });
        for _ in 0..100 {
            first.round(Side::First, || true).expect("answered");
        }
        thread.join().expect("no panic");
    }

    #[test]
    fn a_side_that_never_answers_is_given_up() {
        let mut first = CacheLine::map(&file()).expect("mapped");
        assert_eq!(first.round(Side::First, || false), None);
    }
}
