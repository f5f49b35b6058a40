//! Bytes that a peer has lent to this process.

use crate::memory::region::peer::PeerRegion;
use crate::memory::sync::{AtomicU64, Ordering, fence};
use crate::wire::DType;
use std::cell::Cell;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

/// Ends loans.
pub trait GiveBack: Send + Sync {
    /// Gives back the loan with this index. Called once per loan, on the thread that drops its
    /// [`LentBytes`]. It must not block, allocate, fail or panic.
    fn give_back(&self, index: u32);
}

/// A peer's region, of which loans are taken. The region stays mapped until the lender and the last
/// of its loans are gone.
pub struct Lender {
    shared: NonNull<LenderShared>,
    /// Loans so far.
    taken: Cell<u64>,
}

/// A part of a lender's region.
#[derive(Clone, Copy, Debug)]
pub struct LenderPart<'a> {
    lender: &'a Lender,
    /// From the start of the region, in bytes.
    offset: u64,
    data: NonNull<u8>,
    len: usize,
}

/// A leaked box. The last of its users turns it back into a box.
struct LenderShared {
    region: Arc<PeerRegion>,
    loans: Arc<dyn GiveBack>,
    users: LenderUsers,
}

/// Counts a [`Lender`] and its loans. The same protocol as `std::sync::Arc`, but a new loan writes
/// nothing here: the lender owns [`LenderUsers::OF_LENDER`] users, and gives one to each loan.
#[derive(Debug)]
struct LenderUsers(AtomicU64);

impl LenderUsers {
    /// More than there can ever be loans.
    const OF_LENDER: u64 = 1 << 62;

    /// The users of a lender without loans.
    fn of_lender() -> Self {
        LenderUsers(AtomicU64::new(LenderUsers::OF_LENDER))
    }

    /// Takes off so many users. Returns whether they were the last. Everything that the others did
    /// happened before then.
    #[inline]
    fn remove(&self, users: u64) -> bool {
        // Release: the uses come before the count goes down.
        if self.0.fetch_sub(users, Ordering::Release) != users {
            return false;
        }
        // Acquire: pairs with the release of every other user.
        fence(Ordering::Acquire);
        true
    }
}

impl LenderShared {
    /// Takes off so many users, and frees the box with the last.
    ///
    /// # Safety
    /// `this` comes from [`Lender::new`]. The caller owns these users, and uses `this` no more.
    #[inline]
    unsafe fn remove(this: NonNull<LenderShared>, users: u64) {
        // SAFETY: the box is not freed before the caller's users are taken off.
        if unsafe { this.as_ref() }.users.remove(users) {
            // SAFETY: a leaked box (`Lender::new`) without users.
            drop(unsafe { Box::from_raw(this.as_ptr()) });
        }
    }
}

// SAFETY: the lender owns users of a `LenderShared`, which is Send and Sync.
unsafe impl Send for Lender {}
const _: () = {
    const fn is_send_and_sync<T: Send + Sync>() {}
    is_send_and_sync::<LenderShared>();
};

impl Lender {
    /// A lender of a region, whose loans end in `loans`.
    pub fn new(region: Arc<PeerRegion>, loans: Arc<dyn GiveBack>) -> Lender {
        let shared = Box::new(LenderShared { region, loans, users: LenderUsers::of_lender() });
        Lender { shared: NonNull::from(Box::leak(shared)), taken: Cell::new(0) }
    }

    #[inline]
    fn shared(&self) -> &LenderShared {
        // SAFETY: the lender has users until its drop.
        unsafe { self.shared.as_ref() }
    }

    /// The mapping, for all of the peer's bytes.
    #[inline]
    pub fn region(&self) -> &PeerRegion {
        &self.shared().region
    }

    /// The `len` bytes at `offset` of the region; `None` if some are outside.
    #[inline]
    pub fn part(&self, offset: u64, len: u64) -> Option<LenderPart<'_>> {
        let data = NonNull::new(self.region().bytes_at(offset, len)?.cast_mut())?;
        Some(LenderPart { lender: self, offset, data, len: usize::try_from(len).ok()? })
    }
}

impl Drop for Lender {
    fn drop(&mut self) {
        // SAFETY: each loan was given one user. The others are the lender's, which ends here.
        unsafe { LenderShared::remove(self.shared, LenderUsers::OF_LENDER - self.taken.get()) };
    }
}

impl fmt::Debug for Lender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lender").field("region", self.region()).finish_non_exhaustive()
    }
}

impl<'a> LenderPart<'a> {
    /// The mapping that these bytes lie in.
    #[inline]
    pub fn region(self) -> &'a PeerRegion {
        self.lender.region()
    }

    /// Offset in the region, in bytes.
    #[inline]
    pub fn offset(self) -> u64 {
        self.offset
    }

    /// The bytes. The peer lends them until the loan is given back: see "Trust" at [`LentBytes`].
    #[inline]
    pub fn bytes(self) -> &'a [u8] {
        // SAFETY: `Lender::part` has checked that the bytes lie in the mapping, which the lender
        // keeps alive. They can't fault, since the file can't shrink.
        unsafe { std::slice::from_raw_parts(self.data.as_ptr(), self.len) }
    }

    /// Takes the loan of these bytes that has this index.
    #[inline]
    pub fn take(self, index: u32) -> LentBytes {
        let LenderPart { lender, data, len, .. } = self;
        lender.taken.set(lender.taken.get() + 1);
        LentBytes { data, len, index, lender: lender.shared }
    }
}

/// Bytes of a peer's tensor, read in place. The drop gives them back.
///
/// **Trust.** The mapping is read-only here and its size is sealed, so reading can't fault. The
/// peer could still change the bytes while they are read. The peer runs this library, which keeps a
/// lent tensor frozen until it is given back. The peer is also a process of the same user, which
/// could stop or change this process with a debugger anyway. Users that don't trust each other must
/// not lend to each other.
pub struct LentBytes {
    data: NonNull<u8>,
    len: usize,
    index: u32,
    /// The bytes own one of its users.
    lender: NonNull<LenderShared>,
}

// SAFETY: `data` points into the mapping that `lender` keeps alive; it belongs to no thread and is
// only read. `lender` is Send and Sync.
unsafe impl Send for LentBytes {}
// SAFETY: as above.
unsafe impl Sync for LentBytes {}

impl LentBytes {
    /// Address of the first byte.
    #[inline]
    pub(super) fn data(&self) -> NonNull<u8> {
        self.data
    }

    /// As they lie at the lender.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `Lender::part` has checked that the bytes lie in the mapping, which `lender`
        // keeps alive. A peer that lends them does not write to them: see "Trust" above.
        unsafe { std::slice::from_raw_parts(self.data.as_ptr(), self.len) }
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for LentBytes {
    fn drop(&mut self) {
        // SAFETY: the bytes own a user of the lender until the line below. The loan ends while its
        // memory is still mapped.
        unsafe { self.lender.as_ref() }.loans.give_back(self.index);
        // SAFETY: as above.
        unsafe { LenderShared::remove(self.lender, 1) };
    }
}

impl fmt::Debug for LentBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LentBytes({} bytes of loan {})", self.len, self.index)
    }
}

/// Why lent bytes cannot become a tensor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LentError {
    /// The tensor has another number of bytes.
    #[error("the peer lends {lent} bytes for a tensor of {needed}")]
    Length {
        /// Bytes that are lent.
        lent: u64,
        /// Bytes that the tensor has.
        needed: u64,
    },
    /// The element type can't be lent.
    #[error("a tensor of {dtype} can't be lent: {why}; the peer must send it")]
    DType {
        /// The element type.
        dtype: DType,
        /// Reason.
        why: &'static str,
    },
}

/// Every interleaving, under loom: `tests/nightly` builds the crate with `--cfg tensorwire_loom`
/// for it.
#[cfg(all(test, tensorwire_loom))]
mod loom_tests {
    use super::*;
    use loom::cell::UnsafeCell;

    /// Loom's cell panics if the last user is not ordered after every other.
    struct Shared {
        users: LenderUsers,
        mapping: UnsafeCell<u32>,
    }

    impl Shared {
        /// Reads, and takes users off. The last unmaps. Returns whether these were the last.
        fn end(&self, users: u64) -> bool {
            // SAFETY: the caller's users are not off yet; loom checks that nobody unmaps.
            self.mapping.with(|mapping| assert_eq!(unsafe { *mapping }, 7));
            let is_last = self.users.remove(users);
            if is_last {
                // SAFETY: the last user; loom checks that nobody reads.
                self.mapping.with_mut(|mapping| unsafe { *mapping = 0 });
            }
            is_last
        }
    }

    #[test]
    fn loom_the_last_of_a_lender_and_its_loans_ends_it_once() {
        loom::model(|| {
            let shared = Shared { users: LenderUsers::of_lender(), mapping: UnsafeCell::new(7) };
            let lender = loom::sync::Arc::new(shared);
            let loans = [(); 2].map(|()| {
                let lender = loom::sync::Arc::clone(&lender);
                loom::thread::spawn(move || lender.end(1))
            });
            let mut last = usize::from(lender.end(LenderUsers::OF_LENDER - 2));
            for loan in loans {
                last += usize::from(loan.join().expect("a borrower"));
            }
            assert_eq!(last, 1);
        });
    }
}
