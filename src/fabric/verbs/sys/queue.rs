//! Protection domains, memory regions, completion queues, queue pairs and work requests as
//! libibverbs lays them out.

use super::device::{ibv_context, ibv_gid};
use std::ffi::{c_int, c_uint, c_void};

/// A protection domain. Made by the library alone.
#[repr(C)]
pub struct ibv_pd {
    /// The device.
    pub context: *mut ibv_context,
    /// The kernel's name of it.
    pub handle: u32,
}

/// A registered piece of memory. Made by the library alone.
#[repr(C)]
pub struct ibv_mr {
    /// The device.
    pub context: *mut ibv_context,
    /// Its protection domain.
    pub pd: *mut ibv_pd,
    /// Its first byte.
    pub addr: *mut c_void,
    /// How many bytes.
    pub length: usize,
    /// The kernel's name of it.
    pub handle: u32,
    /// The lkey: names the region in work requests of this process.
    pub lkey: u32,
    /// The rkey: names the region in work requests of peers.
    pub rkey: u32,
}

/// A memory window: a key of its own for a part of a region. Made by the library alone.
#[repr(C)]
pub struct ibv_mw {
    /// The device.
    pub context: *mut ibv_context,
    /// Its protection domain.
    pub pd: *mut ibv_pd,
    /// The key of its latest bind, which its owner sets after each bind of type 2.
    pub rkey: u32,
    /// The kernel's name of it.
    pub handle: u32,
    /// One of `IBV_MW_TYPE_*`.
    _type: u32,
}

/// The bytes and the rights of a memory window.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_mw_bind_info {
    /// The region that the bytes lie in.
    pub mr: *mut ibv_mr,
    /// The first byte.
    pub addr: u64,
    /// How many bytes.
    pub length: u64,
    /// `IBV_ACCESS_*`.
    pub mw_access_flags: c_uint,
}

/// A completion channel. Only the library makes it.
#[repr(C)]
pub struct ibv_comp_channel {
    /// The device.
    pub context: *mut ibv_context,
    /// Readable when there is an event.
    pub fd: c_int,
    /// How many completion queues use it.
    pub refcnt: c_int,
}

/// A completion queue. Made by the library alone; its last fields are the library's own.
#[repr(C)]
pub struct ibv_cq {
    /// The device.
    pub context: *mut ibv_context,
    /// Its channel, or null.
    pub channel: *mut ibv_comp_channel,
    /// The context value that its creator passed.
    pub cq_context: *mut c_void,
    /// The kernel's name of it.
    pub handle: u32,
    /// Number of completions that it holds; at least the requested number.
    pub cqe: c_int,
    mutex: libc::pthread_mutex_t,
    cond: libc::pthread_cond_t,
    comp_events_completed: u32,
    async_events_completed: u32,
}

/// A queue pair. Made by the library alone; its last fields are the library's own.
#[repr(C)]
pub struct ibv_qp {
    /// The device.
    pub context: *mut ibv_context,
    /// The context value that its creator passed.
    pub qp_context: *mut c_void,
    /// Its protection domain.
    pub pd: *mut ibv_pd,
    /// Where its sends complete.
    pub send_cq: *mut ibv_cq,
    /// Where its receives complete.
    pub recv_cq: *mut ibv_cq,
    /// Its shared receive queue, or null.
    pub srq: *mut c_void,
    /// The kernel's name of it.
    pub handle: u32,
    /// The queue pair number, 24 bits.
    pub qp_num: u32,
    /// One of `IBV_QPS_*`, as of the last call that changed it.
    pub state: u32,
    /// One of `IBV_QPT_*`.
    pub qp_type: u32,
    mutex: libc::pthread_mutex_t,
    cond: libc::pthread_cond_t,
    events_completed: u32,
}

/// How much a queue pair holds.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ibv_qp_cap {
    /// Work requests of the send queue.
    pub max_send_wr: u32,
    /// Work requests of the receive queue.
    pub max_recv_wr: u32,
    /// Pieces of memory of a request of the send queue.
    pub max_send_sge: u32,
    /// Pieces of memory of a request of the receive queue.
    pub max_recv_sge: u32,
    /// Bytes that `IBV_SEND_INLINE` carries.
    pub max_inline_data: u32,
}

/// The input of `ibv_create_qp(3)`; `cap` returns the granted limits.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_qp_init_attr {
    /// Comes back in [`ibv_qp::qp_context`].
    pub qp_context: *mut c_void,
    /// Where its sends complete.
    pub send_cq: *mut ibv_cq,
    /// Where its receives complete.
    pub recv_cq: *mut ibv_cq,
    /// A shared receive queue, or null.
    pub srq: *mut c_void,
    /// How much it is to hold.
    pub cap: ibv_qp_cap,
    /// One of `IBV_QPT_*`.
    pub qp_type: u32,
    /// Not 0: every request of the send queue makes a completion.
    pub sq_sig_all: c_int,
}

/// The global part of an address.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ibv_global_route {
    /// The target's.
    pub dgid: ibv_gid,
    /// 20 bits.
    pub flow_label: u32,
    /// Which of the port's own GIDs is the source.
    pub sgid_index: u8,
    /// Routers that may be passed.
    pub hop_limit: u8,
    /// Of which the network makes priorities.
    pub traffic_class: u8,
}

/// An address to send to.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ibv_ah_attr {
    /// Counts if `is_global` is not 0.
    pub grh: ibv_global_route,
    /// The target's lid on InfiniBand.
    pub dlid: u16,
    /// Service level.
    pub sl: u8,
    /// Low bits of the source's lid.
    pub src_path_bits: u8,
    /// 0: as fast as the port is.
    pub static_rate: u8,
    /// Whether `grh` is sent.
    pub is_global: u8,
    /// The port of this side.
    pub port_num: u8,
}

/// The attributes of `ibv_modify_qp(3)`. A mask says which fields are valid.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)] // the names are those of the manual page
pub struct ibv_qp_attr {
    /// One of `IBV_QPS_*`.
    pub qp_state: u32,
    pub cur_qp_state: u32,
    /// One of `IBV_MTU_*`.
    pub path_mtu: u32,
    pub path_mig_state: u32,
    pub qkey: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub dest_qp_num: u32,
    /// `IBV_ACCESS_*`.
    pub qp_access_flags: c_uint,
    pub cap: ibv_qp_cap,
    pub ah_attr: ibv_ah_attr,
    pub alt_ah_attr: ibv_ah_attr,
    pub pkey_index: u16,
    pub alt_pkey_index: u16,
    pub en_sqd_async_notify: u8,
    pub sq_draining: u8,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    /// How long a peer that found no receive waits: the code of the InfiniBand specification,
    /// 9.7.5.2.8.
    pub min_rnr_timer: u8,
    pub port_num: u8,
    /// 4.096 us times two to the power of this; 0 for ever.
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub alt_port_num: u8,
    pub alt_timeout: u8,
    pub rate_limit: u32,
}

/// A piece of memory of a work request.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ibv_sge {
    /// Its first byte.
    pub addr: u64,
    /// How many bytes.
    pub length: u32,
    /// Of the region that it lies in; unused with `IBV_SEND_INLINE`.
    pub lkey: u32,
}

/// The remote memory of a write or read.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ibv_wr_rdma {
    /// Address, in the target's process.
    pub remote_addr: u64,
    /// Key of the region that it lies in.
    pub rkey: u32,
}

/// Padding to the size of the atomic variant, the largest of the union. Only [`ibv_wr_rdma`] is
/// used.
#[repr(C)]
#[derive(Clone, Copy)]
pub union ibv_wr_target {
    /// Of writes and reads.
    pub rdma: ibv_wr_rdma,
    _atomic: [u64; 4],
}

/// The window of a bind.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_wr_bind {
    /// The window, with the key of its latest bind.
    pub mw: *mut ibv_mw,
    /// Its key from now on.
    pub rkey: u32,
    /// What it is bound to.
    pub bind_info: ibv_mw_bind_info,
}

/// A request of the send queue.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_send_wr {
    /// Comes back in the completion.
    pub wr_id: u64,
    /// The next of a list, or null.
    pub next: *mut ibv_send_wr,
    /// Pieces of memory.
    pub sg_list: *mut ibv_sge,
    /// Entries in `sg_list`.
    pub num_sge: c_int,
    /// One of `IBV_WR_*`.
    pub opcode: u32,
    /// `IBV_SEND_*`.
    pub send_flags: c_uint,
    /// Immediate data, in network order; of `IBV_WR_LOCAL_INV` the key, as it is.
    pub imm_data: u32,
    /// The remote memory.
    pub wr: ibv_wr_target,
    _qp_type: u32,
    /// The window of `IBV_WR_BIND_MW`: the larger variant of a union.
    pub bind_mw: ibv_wr_bind,
}

impl ibv_send_wr {
    /// A request with every field zero or null.
    pub const fn zeroed() -> Self {
        ibv_send_wr {
            wr_id: 0,
            next: std::ptr::null_mut(),
            sg_list: std::ptr::null_mut(),
            num_sge: 0,
            opcode: 0,
            send_flags: 0,
            imm_data: 0,
            wr: ibv_wr_target { _atomic: [0; 4] },
            _qp_type: 0,
            bind_mw: ibv_wr_bind {
                mw: std::ptr::null_mut(),
                rkey: 0,
                bind_info: ibv_mw_bind_info {
                    mr: std::ptr::null_mut(),
                    addr: 0,
                    length: 0,
                    mw_access_flags: 0,
                },
            },
        }
    }
}

/// A request of the receive queue.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_recv_wr {
    /// Comes back in the completion.
    pub wr_id: u64,
    /// The next of a list, or null.
    pub next: *mut ibv_recv_wr,
    /// Pieces of memory.
    pub sg_list: *mut ibv_sge,
    /// Entries in `sg_list`.
    pub num_sge: c_int,
}

/// A work completion. In a failed one only `wr_id`, `status`, `qp_num` and `vendor_err` are valid
/// (`ibv_poll_cq(3)`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)] // the names are those of the manual page
pub struct ibv_wc {
    pub wr_id: u64,
    /// One of `IBV_WC_*`.
    pub status: u32,
    /// One of `IBV_WC_*`.
    pub opcode: u32,
    pub vendor_err: u32,
    pub byte_len: u32,
    /// In network order.
    pub imm_data: u32,
    pub qp_num: u32,
    pub src_qp: u32,
    /// `IBV_WC_WITH_IMM` and others.
    pub wc_flags: c_uint,
    pub pkey_index: u16,
    pub slid: u16,
    pub sl: u8,
    pub dlid_path_bits: u8,
}
