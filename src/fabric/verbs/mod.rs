//! RDMA NICs: InfiniBand and RoCE, reliable connections.

pub mod device;
