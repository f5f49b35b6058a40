//! The pool: allocates tensors from a region.

pub(crate) mod central;
pub(crate) mod chain;
pub(crate) mod class;
pub(crate) mod error;
pub(crate) mod gate;
pub(crate) mod header;
pub(crate) mod magazine;
pub(crate) mod refcount;
pub(crate) mod state;

use self::error::PoolError;
use self::header::TensorHeader;
use self::magazine::Purpose;
use self::state::OpenPool;
use crate::memory::foreign::HeldOwner;
use crate::memory::region::Region;
use crate::memory::region::report::RegionReport;
use crate::memory::tensor::tensor_mut::TensorMut;
use crate::memory::tensor::{Span, Tensor};
use crate::sync::register_membarrier;
use crate::wire::TensorMeta;
use std::fmt;
use std::sync::Arc;

/// Freed blocks are filled with this byte if `PoolOptions::poison` is set.
const POISON: u8 = 0xA5;

/// Settings of a pool.
#[derive(Clone, Debug)]
pub struct PoolOptions {
    /// Bytes of freed blocks that all magazines together keep for the next tensor of the same size.
    /// `None` means an eighth of the pool.
    ///
    /// A larger block is never cached: making and dropping such a tensor takes a lock. The best
    /// value is larger than what a training step drops and makes again. The magazines are emptied
    /// when they reach the bound, and before a tensor is refused.
    pub cache: Option<u64>,
    /// Blocks that the pool may consist of, free ones included: 16 to 16,777,216. Each takes 32
    /// bytes of heap.
    pub max_blocks: u32,
    /// Whether freed blocks are filled with 0xA5, so that a use of freed memory shows. On in debug
    /// builds.
    pub poison: bool,
}

impl Default for PoolOptions {
    fn default() -> Self {
        PoolOptions { cache: None, max_blocks: 1 << 17, poison: cfg!(debug_assertions) }
    }
}

/// State of a pool, in bytes but for the number of tensors. Other threads may change the pool while
/// it is read, so the figures need not add up exactly.
///
/// ```
/// # let node = tensorwire::internals::doc_node();
/// use tensorwire::DType;
/// let tensor = node.tensor(DType::F32, &[1024])?;
/// let stats = node.pool().stats();
/// assert!(stats.live_tensors >= 1 && stats.allocated >= 4096);
/// assert!(stats.peak >= stats.allocated && stats.capacity == 16 << 20);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStats {
    /// Bytes of the pool.
    pub capacity: u64,
    /// Bytes of the tensors' blocks: the tensors' sizes, rounded up.
    pub allocated: u64,
    /// Bytes that magazines keep for the next tensors.
    pub cached: u64,
    /// Bytes that are neither allocated nor cached.
    pub free: u64,
    /// Bytes that surely fit in one piece without emptying the magazines; up to an eighth more may
    /// fit.
    pub largest_free: u64,
    /// The largest sum of allocated and cached bytes so far.
    pub peak: u64,
    /// Tensors that have a handle or belong to a ring. Includes tensors without bytes, lent and
    /// foreign ones.
    pub live_tensors: usize,
}

/// Allocates tensors from a region. Clones are handles to the same pool. The memory lives until the
/// last handle *and* the last tensor are gone, in any order.
///
/// A trainer uses the pool of its [`Node`](crate::Node):
///
/// ```
/// use tensorwire::{DType, Node, Shape, Tensor, TensorMeta};
///
/// fn zeros(node: &Node) -> Result<Tensor, Box<dyn std::error::Error>> {
///     let pool = node.pool();
///     let tensor = pool.zeroed(TensorMeta::new(DType::F32, Shape::new(&[2, 3])?)?)?.freeze();
///     assert!(pool.stats().allocated >= 24);
///     Ok(tensor)
/// }
/// ```
#[derive(Clone)]
pub struct Pool {
    state: Arc<OpenPool>,
}

type DropOwner = Box<dyn Fn(HeldOwner) + Send + Sync>;

impl Pool {
    internal! {
        /// A pool that uses the whole region.
        ///
        /// # Errors
        /// [`PoolError::Option`] if an option is out of range.
        fn new(region: Region, options: PoolOptions) -> Result<Pool, PoolError> {
            let max_blocks = u64::from(options.max_blocks);
            check("max_blocks", max_blocks, 16, 1 << 24, "it must be 16 to 16,777,216")?;
            let state = OpenPool::new(region, &options, register_membarrier());
            Ok(Pool { state: Arc::new(state) })
        }
    }

    /// As [`Pool::new`] on a kernel that has no `membarrier(2)`.
    #[cfg(test)]
    pub(crate) fn without_membarrier(region: Region) -> Pool {
        Pool { state: Arc::new(OpenPool::new(region, &PoolOptions::default(), false)) }
    }

    /// A tensor of this element type and shape. Its contents are unspecified: old bytes of the
    /// block.
    ///
    /// Takes no lock and no heap memory if a tensor of about this size, which this thread had made,
    /// was dropped before. Its block is the one that was dropped last.
    ///
    /// # Errors
    /// [`PoolError`] if there is no room.
    pub fn tensor(&self, meta: TensorMeta) -> Result<TensorMut, PoolError> {
        self.make(Purpose::Source, &meta)
    }

    /// As [`Pool::tensor`], if this thread's magazine has a block at hand.
    #[inline]
    pub(crate) fn cached(&self, meta: &TensorMeta) -> Option<TensorMut> {
        self.make_cached(Purpose::Source, meta)
    }

    /// As [`Pool::tensor`], for what a peer sends. Its block never held a tensor that was made to
    /// be sent: lines that a peer has read are slow to write.
    ///
    /// # Errors
    /// As [`Pool::tensor`].
    #[inline]
    pub(crate) fn landing(&self, meta: &TensorMeta) -> Result<TensorMut, PoolError> {
        self.make(Purpose::Landing, meta)
    }

    #[inline]
    fn make(&self, purpose: Purpose, meta: &TensorMeta) -> Result<TensorMut, PoolError> {
        match self.make_cached(purpose, meta) {
            Some(tensor) => Ok(tensor),
            None => self.make_new(purpose, meta),
        }
    }

    #[inline(always)]
    fn make_cached(&self, purpose: Purpose, meta: &TensorMeta) -> Option<TensorMut> {
        let mut header = self.state.cached(purpose, meta.bytes())?;
        header.meta.clone_from(meta);
        Some(TensorMut::new(header))
    }

    #[cold]
    fn make_new(&self, purpose: Purpose, meta: &TensorMeta) -> Result<TensorMut, PoolError> {
        if self.state.in_child() {
            return Err(PoolError::Forked);
        }
        let mut header = match meta.bytes() {
            0 => self.state.bare(),
            _ => self.state.allocate(purpose, meta)?,
        };
        header.meta = meta.clone();
        Ok(TensorMut::new(header))
    }

    /// As [`Pool::tensor`], with all bytes zero.
    ///
    /// # Errors
    /// As [`Pool::tensor`].
    pub fn zeroed(&self, meta: TensorMeta) -> Result<TensorMut, PoolError> {
        let mut tensor = self.tensor(meta)?;
        tensor.bytes_mut().fill(0);
        Ok(tensor)
    }

    /// A tensor without elements, as [`Tensor::empty`].
    pub fn empty(&self) -> Tensor {
        Tensor::without_elements(self.bare())
    }

    /// Whether the bytes of a tensor lie in this pool.
    #[inline]
    pub(crate) fn has(&self, tensor: &Tensor) -> bool {
        tensor.is_in_pool() && tensor.header().pool().is_some_and(|pool| std::ptr::eq(pool, &**self.state))
    }

    /// A header without bytes that returns to this pool's magazines. In a forked child it belongs
    /// to no pool.
    pub(crate) fn bare(&self) -> Box<TensorHeader> {
        if self.state.in_child() {
            return TensorHeader::empty();
        }
        self.state.bare()
    }

    internal! {
        /// Calls `end` to drop an owner of foreign memory whose last user was a tensor of this
        /// pool. Without `end` the owner is dropped on the tensor's thread, which may be a poller.
        /// Only the first call has an effect.
        fn drop_owners_with(&self, end: impl Fn(HeldOwner) + Send + Sync + 'static) {
            let _ = self.state.drop_owner.set(Box::new(end));
        }
    }

    /// State of the pool. In a forked child, which has no part in the pool, everything but the
    /// capacity is 0.
    pub fn stats(&self) -> PoolStats {
        let state = &*self.state;
        let capacity = state.bytes(state.units());
        if state.in_child() {
            return PoolStats {
                capacity,
                allocated: 0,
                cached: 0,
                free: 0,
                largest_free: 0,
                peak: 0,
                live_tensors: 0,
            };
        }
        let (room, cached) = state.room();
        let taken = state.units() - room.free;
        PoolStats {
            capacity,
            allocated: state.bytes(taken.saturating_sub(cached)),
            cached: state.bytes(cached),
            free: state.bytes(room.free),
            largest_free: state.bytes(room.largest),
            peak: state.bytes(state.units() - room.least_free),
            live_tensors: state.live(),
        }
    }

    /// The pages that the region got from the kernel.
    pub fn report(&self) -> &RegionReport {
        self.region().report()
    }

    internal! {
        /// The region that holds the tensors.
        fn region(&self) -> &Region {
            self.state.region()
        }
    }

    /// The part of the region that holds a tensor's bytes. `None` for a tensor without bytes, and
    /// for one that is not in this pool's region.
    #[inline]
    pub(crate) fn span_of(&self, tensor: &Tensor) -> Option<Span> {
        self.state.owns(tensor.header()).then(|| Span::of(tensor.header())).flatten()
    }

    /// Whether the pool has no live tensor.
    pub fn is_empty(&self) -> bool {
        self.state.live() == 0
    }
}

fn check(
    option: &'static str,
    value: u64,
    least: u64,
    most: u64,
    allowed: &'static str,
) -> Result<(), PoolError> {
    if (least..=most).contains(&value) { Ok(()) } else { Err(PoolError::Option { option, value, allowed }) }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pool").field(&self.stats()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{PagePolicy, RegionOptions};
    use crate::wire::{DType, Shape};
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    #[test]
    fn a_size_that_was_seen_before_is_made_and_dropped_without_the_lock() {
        for poison in [false, true] {
            makes_and_drops_without_the_lock(PoolOptions { poison, ..PoolOptions::default() });
        }
    }

    fn makes_and_drops_without_the_lock(options: PoolOptions) {
        let region = RegionOptions { pages: PagePolicy::Plain, ..RegionOptions::new(1 << 20) };
        let region = Region::create(0, &region).expect("region");
        let pool = Pool::new(region, options).expect("pool");
        let sizes = [0, 1, 64, 1000, 5000, 40_000];
        let round = move |pool: &Pool| {
            let meta = |size| TensorMeta::new(DType::U8, Shape::new(&[size]).expect("shape")).expect("meta");
            let tensors = sizes.map(|size| pool.tensor(meta(size)).expect("room").freeze());
            let landings = sizes.map(|size| pool.landing(&meta(size)).expect("room"));
            drop((tensors.clone(), landings));
        };
        let (go, wait) = mpsc::channel();
        let (send, receive) = mpsc::channel();
        let other = pool.clone();
        let thread = thread::spawn(move || {
            round(&other);
            send.send(()).expect("main thread");
            wait.recv().expect("main thread");
            round(&other);
            send.send(()).expect("main thread");
        });
        receive.recv().expect("the first round");
        let locked = pool.state.lock_central();
        go.send(()).expect("the thread");
        let result = receive.recv_timeout(Duration::from_secs(10));
        drop(locked);
        thread.join().expect("no panic");
        result.expect("it waited for the lock");
    }
}
