//! Registered memory and the tensors in it.
//!
//! A [`Region`] is one large piece of shared memory on the best pages of the machine. A [`Pool`]
//! carves tensors out of it. A [`TensorMut`] has one owner, who may write it. [`TensorMut::freeze`]
//! makes it a [`Tensor`], which is read-only. A [`PeerRegion`] is the region of another process,
//! mapped read-only. [`LentBytes`] are a part of a peer's region that this process may read until
//! it gives them back. [`StringTensor`] and [`VariantTensor`] are tensors in a serialised form.
//! [`ForeignMemory`] belongs to another allocator.
//!
//! This module knows no peers, links or keys. It may use `wire` and nothing else of this crate. A
//! peer can map a region only for reading, and nobody can shorten a region: see [`verify_seals`].
//!
//! ```
//! use tensorwire::internals::memory::{Pool, PoolOptions, Region, RegionOptions};
//! use tensorwire::{DType, Shape, TensorMeta};
//!
//! let region = Region::create(0, &RegionOptions::new(1 << 20))?;
//! let pool = Pool::new(region, PoolOptions::default())?;
//! let mut gradient = pool.tensor(TensorMeta::new(DType::F32, Shape::new(&[2, 3])?)?)?;
//! gradient.as_mut_slice::<f32>()?.fill(1.0);
//! let gradient = gradient.freeze();
//! let for_a_peer = gradient.clone();
//! assert_eq!(for_a_peer.as_slice::<f32>()?, [1.0; 6]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![allow(unsafe_code)]

/// A function of the crate, which the feature `internals` makes public.
macro_rules! internal {
    ($(#[$attribute:meta])* fn $($rest:tt)*) => {
        #[cfg(feature = "internals")]
        $(#[$attribute])*
        pub fn $($rest)*

        #[cfg(not(feature = "internals"))]
        $(#[$attribute])*
        pub(crate) fn $($rest)*
    };
}

mod byte_count;
mod copy;
mod foreign;
mod fork;
mod loan;
mod pool;
mod region;
mod serialized;
mod sync;
mod tensor;
#[cfg(test)]
pub(crate) mod tests;

pub(crate) use copy::{append, copy, copy_from};
pub use foreign::observers::{ForeignMemoryObserver, WeakOwner, observe_foreign_memory};
pub use foreign::{ForeignError, ForeignLocation, ForeignMemory, ForeignRegistration, HeldOwner, Owner};
#[cfg(test)]
pub(crate) use fork::tests::in_a_child;
pub use fork::{ForkGuard, SharedMapping};
pub use loan::{GiveBack, Lender, LenderPart, LentBytes, LentError};
pub use pool::error::PoolError;
pub use pool::{Pool, PoolOptions, PoolStats};
pub(crate) use region::limits::{CgroupLimit, ReadFile};
pub use region::memfd::grow_memfd;
pub(crate) use region::pages::is_for_reserve;
pub use region::pages::{PageKind, PagePolicy};
pub(crate) use region::peer::is_in_huge_pages;
pub(crate) use region::peer::merge_spans;
pub use region::peer::{PeerRegion, PeerRegionError, verify_seals};
pub use region::report::RegionReport;
pub use region::{LockPolicy, NumaPolicy, Region, RegionError, RegionOptions};
pub use serialized::{
    DecodeError, FlatTensor, MAX_DEPTH, NestedTensor, SerializeError, StringTensor, Variant, VariantTensor,
};
pub use tensor::ring::{BufferRing, RingError};
pub use tensor::tensor_mut::{SetMetaError, TensorMut};
pub use tensor::view::ViewError;
pub use tensor::{MakeMutError, Span, Tensor};
