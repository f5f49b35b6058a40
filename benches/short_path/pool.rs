//! Tensors in the own segment: last in, first out, with landings apart from sources.

use crate::process::OwnSegment;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Smallest block in bytes. A block holds at least [`INLINE`](crate::link::INLINE) bytes.
const SMALLEST: u32 = 64;
/// Size classes: powers of two.
const CLASSES: usize = 32;
/// Values of [`Use`].
const USES: usize = 3;

/// The use of a tensor. A block that the peer has just read is shared in the peer's cache, so that
/// a write to the block is slow. Blocks of the two uses therefore never mix.
#[derive(Clone, Copy)]
pub enum Use {
    /// A value to send.
    Source = 0,
    /// Where a value is received.
    Landing = 1,
    /// A value in the sender's memory, which has no block.
    Borrowed = 2,
}

#[repr(C, align(64))]
struct Header {
    references: AtomicUsize,
    data: *mut u8,
    len: u32,
    meta: u16,
    magazine: u8,
    /// The place of a loan, plus 1.
    loan: u32,
    /// What ends the loan.
    loan_number: u64,
    next: *mut Header,
}

/// A handle of a tensor, or of a value in the sender's memory. [`Pool::release`] gives it back.
pub struct Tensor(NonNull<Header>);

impl Tensor {
    #[inline(always)]
    fn header(&self) -> &Header {
        // SAFETY: a header lives as long as its pool, which outlives the handles. The pool changes
        // the header of no tensor that has a handle.
        unsafe { self.0.as_ref() }
    }

    #[inline(always)]
    pub fn data(&self) -> *mut u8 {
        self.header().data
    }

    #[inline(always)]
    pub fn len(&self) -> u32 {
        self.header().len
    }

    /// The number of the meta-data.
    #[inline(always)]
    pub fn meta(&self) -> u16 {
        self.header().meta
    }

    /// Place and number of the loan of a borrowed value.
    #[inline(always)]
    pub fn loan(&self) -> Option<(u32, u64)> {
        let header = self.header();
        header.loan.checked_sub(1).map(|place| (place, header.loan_number))
    }

    /// The first 32 bytes of the block.
    #[inline(always)]
    pub fn first_words(&self) -> [u64; 4] {
        // SAFETY: blocks have 64 bytes at least, are aligned to 64 bytes, and are always
        // initialised, because a new segment is zeroed.
        unsafe { self.data().cast::<[u64; 4]>().read() }
    }

    /// All bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the block has this many bytes. Only the holder of the handle writes them.
        unsafe { std::slice::from_raw_parts(self.data(), self.len() as usize) }
    }

    /// All bytes, to write them.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; and the handle is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.data(), self.len() as usize) }
    }
}

/// The magazines of one thread.
pub struct Pool {
    magazines: [*mut Header; USES * CLASSES],
    /// Bytes of the segment that no block has used yet, for each use.
    unused: [(*mut u8, *mut u8); USES],
    /// All headers.
    headers: Vec<NonNull<Header>>,
}

impl Pool {
    pub fn new(own: OwnSegment) -> Pool {
        let (start, end) = own.values();
        let middle = start.wrapping_add((end as usize - start as usize) / 2);
        Pool {
            magazines: [ptr::null_mut(); USES * CLASSES],
            unused: [(start, middle), (middle, end), (ptr::null_mut(), ptr::null_mut())],
            headers: Vec::new(),
        }
    }

    #[inline(always)]
    pub fn take(&mut self, for_use: Use, len: u32, meta: u16) -> Tensor {
        let class = (u32::BITS - (len.max(SMALLEST) - 1).leading_zeros()) as usize;
        self.take_class(for_use, class, len, meta)
    }

    /// A handle of a value in the sender's memory.
    #[inline(always)]
    pub fn borrowed(&mut self, data: *const u8, len: u32, meta: u16, place: u32, number: u64) -> Tensor {
        let mut tensor = self.take_class(Use::Borrowed, 0, len, meta);
        // SAFETY: the only handle of the tensor.
        let header = unsafe { tensor.0.as_mut() };
        (header.data, header.loan, header.loan_number) = (data.cast_mut(), place + 1, number);
        tensor
    }

    #[inline(always)]
    fn take_class(&mut self, for_use: Use, class: usize, len: u32, meta: u16) -> Tensor {
        let magazine = for_use as usize * CLASSES + class;
        let free = self.magazines[magazine];
        let mut header = match NonNull::new(free) {
            Some(header) => header,
            None => self.grow(for_use, class, magazine),
        };
        // SAFETY: the header is in no magazine from now on, and no handle points to it.
        unsafe {
            self.magazines[magazine] = header.as_ref().next;
            let header = header.as_mut();
            (header.len, header.meta) = (len, meta);
            header.references.store(1, Ordering::Relaxed);
        }
        Tensor(header)
    }

    #[cold]
    #[inline(never)]
    fn grow(&mut self, for_use: Use, class: usize, magazine: usize) -> NonNull<Header> {
        let (data, end) = self.unused[for_use as usize];
        if let Use::Source | Use::Landing = for_use {
            let next = data.wrapping_add(1 << class);
            assert!(next <= end, "the segment has no block of {} bytes left", 1 << class);
            self.unused[for_use as usize].0 = next;
        }
        let references = AtomicUsize::new(0);
        let (magazine, next) = (magazine as u8, ptr::null_mut());
        let header =
            Box::new(Header { references, data, len: 0, meta: 0, magazine, loan: 0, loan_number: 0, next });
        let header = NonNull::from(Box::leak(header));
        self.headers.push(header);
        header
    }

    #[inline(always)]
    pub fn release(&mut self, tensor: Tensor) {
        // The only handle needs no locked instruction: no other thread can make a second one.
        let references = &tensor.header().references;
        if references.load(Ordering::Acquire) != 1 && references.fetch_sub(1, Ordering::Release) != 1 {
            return;
        }
        let mut header = tensor.0;
        // SAFETY: this was the last handle, so nothing else reads or writes the header.
        let header = unsafe { header.as_mut() };
        let magazine = &mut self.magazines[usize::from(header.magazine)];
        header.next = *magazine;
        *magazine = header;
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        for header in self.headers.drain(..) {
            // SAFETY: a box of `grow`. Handles are not used after their pool.
            drop(unsafe { Box::from_raw(header.as_ptr()) });
        }
    }
}
