//! A small number for each running thread.
//!
//! Two threads that run at the same time have different indices. The next thread that asks gets
//! the index of a thread that has ended, and with it that thread's place in each table.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

/// Threads that can have an index at the same time.
pub(crate) const MAX_THREADS: usize = 64 * WORDS;
const WORDS: usize = 16;

/// This thread has not asked yet, or all indices were taken when it did.
const NONE: u32 = u32::MAX;
/// The thread is ending, and has given its index back.
const ENDED: u32 = u32::MAX - 1;

/// One bit per index: whether a thread has it. Without a lock, so a forked child can go on with it.
static TAKEN: [AtomicU64; WORDS] = [const { AtomicU64::new(0) }; WORDS];

thread_local! {
    static INDEX: Cell<u32> = const { Cell::new(NONE) };
    static AT_END: IndexReturn = const { IndexReturn };
}

/// Gives the thread's index back when the thread ends. Apart from `INDEX`, which has no destructor
/// and can therefore be read until the thread's very end.
struct IndexReturn;

impl Drop for IndexReturn {
    fn drop(&mut self) {
        let index = INDEX.replace(ENDED) as usize;
        if index < MAX_THREADS {
            // Release: the next owner sees everything that this thread did in its places.
            TAKEN[index / 64].fetch_and(!(1 << (index % 64)), Ordering::Release);
        }
    }
}

/// The index of the calling thread, if it has asked before. A number from [`MAX_THREADS`] on
/// otherwise.
#[inline]
pub(crate) fn known_thread_index() -> usize {
    INDEX.get() as usize
}

/// The index of the calling thread, below [`MAX_THREADS`]. `None` if as many threads have one, or
/// if the thread is ending.
#[inline]
pub(crate) fn thread_index() -> Option<usize> {
    let index = known_thread_index();
    if index < MAX_THREADS { Some(index) } else { first_index() }
}

#[cold]
fn first_index() -> Option<usize> {
    if INDEX.get() == ENDED {
        return None;
    }
    // The first use registers the destructor. An error means that it has run.
    AT_END.try_with(|_| ()).ok()?;
    let index = TAKEN.iter().enumerate().find_map(|(at, word)| Some(64 * at + take_bit(word)?))?;
    INDEX.set(index as u32);
    Some(index)
}

/// Sets the lowest bit of a word that is 0, and returns its number.
fn take_bit(word: &AtomicU64) -> Option<usize> {
    let lowest = |bits: u64| (bits != u64::MAX).then(|| bits | (bits + 1));
    // Acquire: pairs with the release of the index' former owner.
    let before = word.fetch_update(Ordering::Acquire, Ordering::Relaxed, lowest).ok()?;
    Some(before.trailing_ones() as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::sync::Barrier;
    use std::thread;

    #[test]
    fn threads_that_run_at_once_have_indices_of_their_own() {
        let barrier = Barrier::new(20);
        let indices: Vec<usize> = thread::scope(|scope| {
            let index = || {
                let index = thread_index().expect("few threads");
                barrier.wait();
                assert_eq!(thread_index(), Some(index));
                index
            };
            let threads: Vec<_> = (0..20).map(|_| scope.spawn(index)).collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
        });
        assert_eq!(indices.iter().collect::<HashSet<_>>().len(), 20);
    }

    #[test]
    fn the_bits_of_a_word_are_taken_from_below_until_none_is_left() {
        let word = AtomicU64::new(0b1011);
        assert_eq!((take_bit(&word), take_bit(&word)), (Some(2), Some(4)));
        word.store(u64::MAX >> 1, Ordering::Relaxed);
        assert_eq!((take_bit(&word), take_bit(&word)), (Some(63), None));
    }

    #[test]
    fn a_thread_that_is_ending_has_no_index() {
        struct AtEnd(std::sync::mpsc::Sender<Option<usize>>);
        impl Drop for AtEnd {
            fn drop(&mut self) {
                self.0.send(thread_index()).expect("the test waits");
            }
        }
        thread_local! {
            static AT_END: Cell<Option<AtEnd>> = const { Cell::new(None) };
        }
        let (send, receive) = std::sync::mpsc::channel();
        let ending = thread::spawn(move || {
            // Registered first, so dropped last.
            AT_END.set(Some(AtEnd(send)));
            assert!(thread_index().is_some());
        });
        ending.join().expect("no panic");
        assert_eq!(receive.recv(), Ok(None));
    }
}
