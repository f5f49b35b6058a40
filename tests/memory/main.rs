//! Pools and regions: what they allocate (counted by a global allocator), on which pages they lie, and what
//! they do where memory is limited.

mod alloc_free;
mod hugepages;
mod limits;
