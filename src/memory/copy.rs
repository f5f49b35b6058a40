//! Copies that no alignment makes slow.
//!
//! Where the CPU calls `rep movsb` fast, memcpy of glibc before 2.40 copies from 2,113 bytes to
//! about half the second-level cache with it. On Zen 3 and Zen 4 that can take twenty times as
//! long ([bug 30994]). It does if the destination lies 1 to 31 bytes behind the source, modulo
//! 4,096. Long arrays of malloc begin 16 bytes behind a page, and long tensors of a pool may
//! begin with one.
//!
//! [bug 30994]: https://sourceware.org/bugzilla/show_bug.cgi?id=30994

use std::hint::black_box;

/// Bytes that memcpy copies without `rep movsb`.
const PIECE: usize = 2 << 10;
/// Distances are compared modulo this.
const PAGE: usize = 4 << 10;
/// Distances from 1 to this one are slow.
const SLOW_DISTANCE: usize = 31;

/// Copies `from` to `to`.
///
/// # Panics
/// If they are not of one length.
#[inline]
pub(crate) fn copy(to: &mut [u8], from: &[u8]) {
    assert!(to.len() == from.len(), "{} bytes are copied to {} bytes", from.len(), to.len());
    // SAFETY: `from` has as many bytes as `to`.
    unsafe { copy_from(to, from.as_ptr()) }
}

/// Fills `to` with the bytes from `from` on.
///
/// # Safety
/// `to.len()` bytes from `from` on can be read, and lie outside `to`.
#[inline]
pub(crate) unsafe fn copy_from(to: &mut [u8], from: *const u8) {
    // SAFETY: as of this function. The slice can be written.
    unsafe { copy_bytes(to.as_mut_ptr(), from, to.len()) }
}

/// Appends `from` to `to`.
#[inline]
pub(crate) fn append(to: &mut Vec<u8>, from: &[u8]) {
    let at = to.len();
    to.reserve(from.len());
    // SAFETY: `reserve` has made room for the bytes behind the first `at`. `copy_bytes` writes them
    // all, and nobody else has them.
    unsafe {
        copy_bytes(to.as_mut_ptr().add(at), from.as_ptr(), from.len());
        to.set_len(at + from.len());
    }
}

/// # Safety
/// `len` bytes from `from` on can be read. As many from `to` on can be written, and lie outside
/// those.
#[inline]
unsafe fn copy_bytes(to: *mut u8, from: *const u8, len: usize) {
    if is_slow(to, from, len) {
        // SAFETY: as of this function.
        return unsafe { copy_in_pieces(to, from, len) };
    }
    // SAFETY: as of this function.
    unsafe { from.copy_to_nonoverlapping(to, len) }
}

#[inline]
fn is_slow(to: *const u8, from: *const u8, len: usize) -> bool {
    let distance = (to as usize).wrapping_sub(from as usize) % PAGE;
    cfg!(target_arch = "x86_64") && len > PIECE && (1..=SLOW_DISTANCE).contains(&distance)
}

/// # Safety
/// As of [`copy_bytes`].
#[cold]
unsafe fn copy_in_pieces(to: *mut u8, from: *const u8, len: usize) {
    // The compiler would make one copy of all pieces if it knew their length.
    let piece = black_box(PIECE);
    for at in (0..len).step_by(piece) {
        // SAFETY: as of `copy_bytes`, for a part of the bytes.
        unsafe { from.add(at).copy_to_nonoverlapping(to.add(at), piece.min(len - at)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes at an address that lies `distance` bytes behind a page.
    fn at_distance(memory: &mut [u8], distance: usize, len: usize) -> &mut [u8] {
        let page = memory.as_ptr().align_offset(PAGE);
        &mut memory[page + distance..][..len]
    }

    #[test]
    fn any_length_is_copied_at_any_distance_and_nothing_beside_it_is_written() {
        let mut source = vec![0; 5 * PAGE];
        source.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at % 251 + 1) as u8);
        let mut memory = vec![0; 6 * PAGE];
        for len in [0, 1, PIECE, PIECE + 1, 2 * PIECE, 3 * PIECE + 7] {
            for distance in [0, 1, 16, SLOW_DISTANCE, SLOW_DISTANCE + 1, PAGE - 1] {
                let source = &*at_distance(&mut source, 0, len);
                memory.fill(0);
                let room = at_distance(&mut memory, distance, len + 1);
                copy(&mut room[..len], source);
                assert_eq!((&room[..len], room[len]), (source, 0), "{len} bytes at {distance}");
                assert_eq!(memory.iter().filter(|byte| **byte != 0).count(), len, "at {distance}");
                let mut bytes = vec![7];
                append(&mut bytes, source);
                assert_eq!((bytes[0], &bytes[1..]), (7, source));
            }
        }
    }

    #[test]
    fn only_long_copies_to_just_behind_the_source_go_in_pieces() {
        let is_slow_at =
            |distance: usize, len| is_slow((3 * PAGE + distance) as *const u8, PAGE as *const u8, len);
        assert!(!is_slow_at(16, PIECE), "memcpy does not use `rep movsb` for them");
        assert!(![0, 32, 64, PAGE - 16].into_iter().any(|distance| is_slow_at(distance, PIECE + 1)));
        assert_eq!(is_slow_at(1, PIECE + 1) && is_slow_at(31, PIECE + 1), cfg!(target_arch = "x86_64"));
    }

    #[test]
    #[should_panic(expected = "4 bytes are copied to 3 bytes")]
    fn lengths_that_differ_are_a_panic() {
        copy(&mut [0; 3], &[0; 4]);
    }
}
