//! The part of libibverbs' public interface that the fabric calls: structs, constants and the
//! inline functions of its header. `infiniband/verbs.h` of rdma-core fixes the binary interface.
//! Nothing here has behaviour of its own, and nothing links the library: `super::library` loads it.
//!
//! The names are the C names, so that the manual pages can be read beside the code.

#![allow(non_camel_case_types)] // the C names

mod constants;
mod device;
mod ops;
mod queue;

pub use constants::*;
pub use device::*;
pub use ops::*;
pub use queue::*;

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};

    /// Sizes and places that a C compiler gives for rdma-core's header on 64-bit Linux.
    #[test]
    fn the_layout_is_that_of_the_header() {
        assert_eq!(size_of::<ibv_gid_entry>(), 32);
        assert_eq!(size_of::<ibv_device>(), 664);
        assert_eq!(size_of::<ibv_device_attr>(), 232);
        assert_eq!(size_of::<ibv_port_attr>(), 52);
        assert_eq!(size_of::<ibv_async_event>(), 16);
        assert_eq!(size_of::<ibv_context_ops>(), 32 * 8);
        assert_eq!(offset_of!(ibv_context_ops, alloc_mw), 7 * 8);
        assert_eq!(offset_of!(ibv_context_ops, dealloc_mw), 9 * 8);
        assert_eq!(offset_of!(ibv_context_ops, poll_cq), 11 * 8);
        assert_eq!(offset_of!(ibv_context_ops, req_notify_cq), 12 * 8);
        assert_eq!(offset_of!(ibv_context_ops, post_send), 25 * 8);
        assert_eq!(offset_of!(ibv_context_ops, post_recv), 26 * 8);
        assert_eq!(size_of::<ibv_context>(), 328);
        assert_eq!(offset_of!(ibv_context, abi_compat), 320);
        assert_eq!(size_of::<ibv_mr>(), 48);
        assert_eq!(size_of::<ibv_mw>(), 32);
        assert_eq!(size_of::<ibv_mw_bind_info>(), 32);
        assert_eq!(size_of::<ibv_cq>(), 128);
        assert_eq!(size_of::<ibv_qp>(), 160);
        assert_eq!(size_of::<ibv_qp_init_attr>(), 64);
        assert_eq!(size_of::<ibv_ah_attr>(), 32);
        assert_eq!(size_of::<ibv_qp_attr>(), 144);
        assert_eq!(size_of::<ibv_send_wr>(), 128);
        assert_eq!(offset_of!(ibv_send_wr, wr), 40);
        assert_eq!(offset_of!(ibv_send_wr, bind_mw), 80);
        assert_eq!(offset_of!(ibv_wr_bind, bind_info), 16);
        assert_eq!(size_of::<ibv_recv_wr>(), 32);
        assert_eq!(size_of::<ibv_wc>(), 48);
        let end = size_of::<verbs_context>();
        assert_eq!(end - offset_of!(verbs_context, query_port), 648);
        assert_eq!(end - offset_of!(verbs_context, alloc_parent_domain), 536);
        assert_eq!(end - offset_of!(verbs_context, dealloc_td), 528);
        assert_eq!(end - offset_of!(verbs_context, alloc_td), 520);
        assert_eq!(end - offset_of!(verbs_context, context), 328);
        assert_eq!(size_of::<ibv_parent_domain_init_attr>(), 48);
        assert_eq!(offset_of!(verbs_context, context) - offset_of!(verbs_context, sz), 8);
    }
}
