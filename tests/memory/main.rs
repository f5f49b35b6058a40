//! Pools and regions: heap allocations (counted by a global allocator), kinds of pages, and limits.
//! What new names of edges cost.

mod alloc_free;
#[path = "../common/mod.rs"]
mod common;
mod edge_names;
mod hugepages;
mod limits;
