//! Pools and regions: heap allocations (counted by a global allocator), kinds of pages, and limits.

mod alloc_free;
mod hugepages;
mod limits;
