//! The memory that both processes of `perf --local` share, as atomic words.
//!
//! It is a memfd sealed against shrinking, so no access can fault.
#![allow(unsafe_code)] // the view of the mapping as atomic words

use crate::error::CliError;
use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, SealFlags};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU64;
use tensorwire::internals::memory::grow_memfd;

/// The mapping in one process.
#[derive(Debug)]
pub struct WordMapping {
    map: MmapRaw,
}

impl WordMapping {
    /// Makes a mapping of `bytes`, all zero, and the file that the other process maps. A child
    /// inherits the file.
    pub fn create(bytes: usize) -> Result<(Self, OwnedFd), CliError> {
        let tried = "making the mapping that both processes share";
        let fd = rustix::fs::memfd_create("tensorwire-perf", MemfdFlags::ALLOW_SEALING)
            .map_err(|error| CliError::failed(tried, error))?;
        grow_memfd(&fd, bytes as u64).map_err(|error| CliError::failed(tried, error))?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)
            .map_err(|error| CliError::failed(tried, error))?;
        let file = File::from(fd);
        Ok((Self::open(&file)?, file.into()))
    }

    /// Maps the file that the other process has created.
    pub fn open(file: &File) -> Result<Self, CliError> {
        let tried = "mapping the memory that both processes share";
        let seals = rustix::fs::fcntl_get_seals(file).map_err(|error| CliError::failed(tried, error))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(CliError::failed(
                tried,
                "the file could shrink, and an access then kill this process",
            ));
        }
        let map = MmapOptions::new().map_raw(file).map_err(|error| CliError::failed(tried, error))?;
        Ok(WordMapping { map })
    }

    /// `count` words from byte `offset` on.
    ///
    /// # Panics
    /// If they do not lie in the mapping, or `offset` is not a multiple of 8.
    pub fn words(&self, offset: usize, count: usize) -> &[AtomicU64] {
        let end = count.checked_mul(8).and_then(|bytes| bytes.checked_add(offset));
        assert!(
            offset.is_multiple_of(8) && end.is_some_and(|end| end <= self.map.len()),
            "{count} words at {offset} do not lie in a mapping of {} bytes",
            self.map.len()
        );
        // SAFETY: the words lie inside the mapping (just checked) and are aligned, since a mapping
        // begins at a page. The mapping lives as long as `self`, whose borrow bounds the slice, and
        // its file can't shrink (sealed, and the seal was verified). Every access to it, in both
        // processes, goes through these atomics.
        unsafe { std::slice::from_raw_parts(self.map.as_mut_ptr().add(offset).cast::<AtomicU64>(), count) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn both_views_see_the_same_words() {
        let (ours, fd) = WordMapping::create(64).unwrap();
        let theirs = WordMapping::open(&File::from(fd)).unwrap();
        ours.words(8, 1)[0].store(7, Ordering::Relaxed);
        assert_eq!(theirs.words(0, 8)[1].load(Ordering::Relaxed), 7);
    }

    #[test]
    #[should_panic(expected = "9 words at 0 do not lie in a mapping of 64 bytes")]
    fn words_outside_the_mapping_are_refused() {
        WordMapping::create(64).unwrap().0.words(0, 9);
    }

    #[test]
    fn a_file_that_could_shrink_is_refused() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8192).unwrap();
        assert!(WordMapping::open(&file).is_err());
    }
}
