//! Devices, contexts, ports and GIDs as libibverbs lays them out.

use super::queue::{ibv_cq, ibv_mw, ibv_pd, ibv_qp, ibv_recv_wr, ibv_send_wr, ibv_wc};
use std::ffi::{c_char, c_int, c_uint, c_void};

/// A 128-bit address: subnet prefix and interface id, both in network order.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ibv_gid {
    /// The bytes as they travel.
    pub raw: [u8; 16],
}

/// One entry of a port's GID table, as `ibv_query_gid_ex(3)` tells it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ibv_gid_entry {
    /// The address.
    pub gid: ibv_gid,
    /// Its place in the table.
    pub gid_index: u32,
    /// From 1.
    pub port_num: u32,
    /// One of `IBV_GID_TYPE_*`.
    pub gid_type: u32,
    /// Index of the network interface behind it, 0 if there is none.
    pub ndev_ifindex: u32,
}

/// A device, not opened. Made by the library alone.
#[repr(C)]
pub struct ibv_device {
    _ops: [*mut c_void; 2],
    /// One of `IBV_NODE_*`.
    pub node_type: c_int,
    /// One of `IBV_TRANSPORT_*`.
    pub transport_type: c_int,
    /// The kernel's name of the device, as `mlx5_0`.
    pub name: [c_char; 64],
    /// Name of the character device, as `uverbs0`.
    pub dev_name: [c_char; 64],
    /// Path of that in sysfs.
    pub dev_path: [c_char; 256],
    /// Path of the device in sysfs.
    pub ibdev_path: [c_char; 256],
}

/// The result of `ibv_query_device(3)`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)] // the names are those of the manual page
pub struct ibv_device_attr {
    pub fw_ver: [c_char; 64],
    /// Network order.
    pub node_guid: u64,
    /// Network order.
    pub sys_image_guid: u64,
    pub max_mr_size: u64,
    pub page_size_cap: u64,
    pub vendor_id: u32,
    pub vendor_part_id: u32,
    pub hw_ver: u32,
    pub max_qp: c_int,
    pub max_qp_wr: c_int,
    /// `IBV_DEVICE_*`.
    pub device_cap_flags: c_uint,
    pub max_sge: c_int,
    pub max_sge_rd: c_int,
    pub max_cq: c_int,
    pub max_cqe: c_int,
    pub max_mr: c_int,
    pub max_pd: c_int,
    pub max_qp_rd_atom: c_int,
    pub max_ee_rd_atom: c_int,
    pub max_res_rd_atom: c_int,
    pub max_qp_init_rd_atom: c_int,
    pub max_ee_init_rd_atom: c_int,
    pub atomic_cap: c_uint,
    pub max_ee: c_int,
    pub max_rdd: c_int,
    pub max_mw: c_int,
    pub max_raw_ipv6_qp: c_int,
    pub max_raw_ethy_qp: c_int,
    pub max_mcast_grp: c_int,
    pub max_mcast_qp_attach: c_int,
    pub max_total_mcast_qp_attach: c_int,
    pub max_ah: c_int,
    pub max_fmr: c_int,
    pub max_map_per_fmr: c_int,
    pub max_srq: c_int,
    pub max_srq_wr: c_int,
    pub max_srq_sge: c_int,
    pub max_pkeys: u16,
    pub local_ca_ack_delay: u8,
    pub phys_port_cnt: u8,
}

/// The result of `ibv_query_port(3)`. The call passes its size: newer libraries know more fields,
/// and fields that an older one does not know stay 0.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)] // the names are those of the manual page
pub struct ibv_port_attr {
    /// One of `IBV_PORT_*`.
    pub state: u32,
    /// One of `IBV_MTU_*`.
    pub max_mtu: u32,
    /// One of `IBV_MTU_*`.
    pub active_mtu: u32,
    pub gid_tbl_len: c_int,
    pub port_cap_flags: u32,
    pub max_msg_sz: u32,
    pub bad_pkey_cntr: u32,
    pub qkey_viol_cntr: u32,
    pub pkey_tbl_len: u16,
    pub lid: u16,
    pub sm_lid: u16,
    pub lmc: u8,
    pub max_vl_num: u8,
    pub sm_sl: u8,
    pub subnet_timeout: u8,
    pub init_type_reply: u8,
    pub active_width: u8,
    pub active_speed: u8,
    pub phys_state: u8,
    /// One of `IBV_LINK_LAYER_*`.
    pub link_layer: u8,
    /// `IBV_QPF_*`.
    pub flags: u8,
    pub port_cap_flags2: u16,
}

/// The result of `ibv_get_async_event(3)`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_async_event {
    /// The object of the event.
    pub element: ibv_async_element,
    /// One of `IBV_EVENT_*`; says which field of `element` is there.
    pub event_type: u32,
}

/// The object of an asynchronous event.
#[repr(C)]
#[derive(Clone, Copy)]
pub union ibv_async_element {
    /// Of `IBV_EVENT_CQ_ERR`.
    pub cq: *mut ibv_cq,
    /// Of `IBV_EVENT_QP_*` and their like.
    pub qp: *mut ibv_qp,
    /// Of `IBV_EVENT_PORT_*`, `IBV_EVENT_GID_CHANGE` and their like.
    pub port_num: c_int,
}

/// An entry of `ibv_context_ops` that this crate does not call.
type Unused = *mut c_void;

/// The functions of an opened device that the header's inline functions call. The order is the ABI.
#[repr(C)]
#[allow(missing_docs)] // the names are those of the calls; of the others only the places count
pub struct ibv_context_ops {
    _compat_0_6: [Unused; 7],
    pub alloc_mw: Option<unsafe extern "C" fn(*mut ibv_pd, u32) -> *mut ibv_mw>,
    _bind_mw: Unused,
    pub dealloc_mw: Option<unsafe extern "C" fn(*mut ibv_mw) -> c_int>,
    _compat_create_cq: Unused,
    pub poll_cq: Option<unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int>,
    pub req_notify_cq: Option<unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int>,
    _compat_13_19: [Unused; 7],
    _post_srq_recv: Unused,
    _compat_21_24: [Unused; 4],
    pub post_send:
        Option<unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int>,
    pub post_recv:
        Option<unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int>,
    _compat_27_31: [Unused; 5],
}

/// An opened device. Made by the library alone.
#[repr(C)]
pub struct ibv_context {
    /// The device that the context was opened on.
    pub device: *mut ibv_device,
    /// The functions that the inline functions of the header call.
    pub ops: ibv_context_ops,
    /// The character device.
    pub cmd_fd: c_int,
    /// The descriptor that `ibv_get_async_event(3)` reads.
    pub async_fd: c_int,
    /// How many completion vectors there are.
    pub num_comp_vectors: c_int,
    mutex: libc::pthread_mutex_t,
    /// All ones if the context lies in a [`verbs_context`].
    pub abi_compat: *mut c_void,
}

/// The input of `ibv_alloc_td(3)`; no extension is defined.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ibv_td_init_attr {
    /// 0.
    pub comp_mask: u32,
}

/// A thread domain: a promise that one thread at a time uses its objects.
#[repr(C)]
pub struct ibv_td {
    /// The device.
    pub context: *mut ibv_context,
}

/// The input of `ibv_alloc_parent_domain(3)`.
#[repr(C)]
pub struct ibv_parent_domain_init_attr {
    /// The protection domain that it stands for.
    pub pd: *mut ibv_pd,
    /// The thread domain of its objects, or null.
    pub td: *mut ibv_td,
    /// 0: none of the fields below.
    pub comp_mask: u32,
    /// An allocator of ours, unused.
    pub alloc: Option<unsafe extern "C" fn()>,
    /// An allocator of ours, unused.
    pub free: Option<unsafe extern "C" fn()>,
    /// Unused.
    pub pd_context: *mut c_void,
}

/// The struct around an [`ibv_context`] whose `abi_compat` is all ones: later calls, each found by
/// its distance from the *end*. New calls are added in front, so this begins with the first one
/// that we use; `sz` says how large the library's struct is.
#[repr(C)]
#[allow(missing_docs)] // the names are those of the calls; of the others only the places count
pub struct verbs_context {
    pub query_port: Option<unsafe extern "C" fn(*mut ibv_context, u8, *mut ibv_port_attr, usize) -> c_int>,
    _advise_mr_to_modify_qp_rate_limit: [Unused; 13],
    pub alloc_parent_domain:
        Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_parent_domain_init_attr) -> *mut ibv_pd>,
    pub dealloc_td: Option<unsafe extern "C" fn(*mut ibv_td) -> c_int>,
    pub alloc_td: Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_td_init_attr) -> *mut ibv_td>,
    _modify_cq_to_create_cq_ex: [Unused; 9],
    _priv: *mut c_void,
    _query_device_ex_to_close_xrcd: [Unused; 11],
    _abi_placeholder3: u64,
    /// Bytes of the library's own `verbs_context`.
    pub sz: usize,
    /// The context that it lies around.
    pub context: ibv_context,
}
