//! A ring of bytes. A position counts the bytes that were ever written before it.

use crate::memory::copy;

/// Bytes from a position on, oldest first. A power of two of them at most.
#[derive(Debug)]
pub(super) struct ByteRing {
    bytes: Box<[u8]>,
    start: u64,
    end: u64,
}

impl ByteRing {
    /// An empty one. `capacity` is a power of two.
    pub(super) fn new(capacity: usize) -> Self {
        debug_assert!(capacity.is_power_of_two());
        ByteRing { bytes: vec![0; capacity].into_boxed_slice(), start: 0, end: 0 }
    }

    /// Position of the oldest byte.
    #[inline]
    pub(super) fn start(&self) -> u64 {
        self.start
    }

    /// Position behind the newest byte.
    #[inline]
    pub(super) fn end(&self) -> u64 {
        self.end
    }

    /// Bytes that can be written.
    #[inline]
    pub(super) fn room(&self) -> usize {
        self.bytes.len() - (self.end - self.start) as usize
    }

    fn index(&self, position: u64) -> usize {
        position as usize & (self.bytes.len() - 1)
    }

    /// Writes bytes behind the newest. The caller has checked that there is room.
    #[inline]
    pub(super) fn push(&mut self, bytes: &[u8]) {
        debug_assert!(bytes.len() <= self.room());
        let at = self.end;
        self.end += bytes.len() as u64;
        self.replace(at, bytes);
    }

    /// Writes over bytes that are there.
    #[inline]
    pub(super) fn replace(&mut self, position: u64, bytes: &[u8]) {
        let at = self.index(position);
        let first = bytes.len().min(self.bytes.len() - at);
        copy(&mut self.bytes[at..at + first], &bytes[..first]);
        copy(&mut self.bytes[..bytes.len() - first], &bytes[first..]);
    }

    /// The bytes between two positions, in two parts. The second part is usually empty.
    #[inline]
    pub(super) fn parts(&self, from: u64, to: u64) -> [&[u8]; 2] {
        let (at, len) = (self.index(from), (to - from) as usize);
        let first = len.min(self.bytes.len() - at);
        [&self.bytes[at..at + first], &self.bytes[..len - first]]
    }

    /// The first `N` bytes from a position on. Zeros behind the newest.
    #[inline]
    pub(super) fn peek<const N: usize>(&self, position: u64) -> [u8; N] {
        let [first, second] = self.parts(position, self.end.min(position + N as u64));
        let mut bytes = [0; N];
        bytes[..first.len()].copy_from_slice(first);
        bytes[first.len()..first.len() + second.len()].copy_from_slice(second);
        bytes
    }

    /// Forgets the bytes before a position.
    #[inline]
    pub(super) fn release(&mut self, to: u64) {
        debug_assert!((self.start..=self.end).contains(&to));
        self.start = to;
    }

    /// Forgets all bytes.
    pub(super) fn clear(&mut self) {
        self.start = self.end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn bytes_come_back_at_their_positions(
            steps in proptest::collection::vec((0usize..40, 0usize..40), 0..60),
        ) {
            let (mut ring, mut all) = (ByteRing::new(64), Vec::new());
            for (pushed, released) in steps {
                let new: Vec<u8> = (0..pushed.min(ring.room())).map(|k| (all.len() + k) as u8).collect();
                ring.push(&new);
                all.extend(new);
                let held = &all[ring.start() as usize..];
                let parts = ring.parts(ring.start(), ring.end());
                prop_assert_eq!(parts.concat(), held);
                let start = ring.peek::<8>(ring.start());
                let known = held.len().min(8);
                prop_assert_eq!(&start[..known], &held[..known]);
                prop_assert!(start[known..].iter().all(|byte| *byte == 0));
                ring.release(ring.start() + released.min(held.len()) as u64);
            }
            prop_assert_eq!(ring.end(), all.len() as u64);
        }
    }
}
