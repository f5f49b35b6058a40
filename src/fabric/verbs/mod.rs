//! RDMA NICs through libibverbs: InfiniBand and RoCE, reliable connections.

#![allow(unsafe_code)]

pub mod library;
pub mod sys;
