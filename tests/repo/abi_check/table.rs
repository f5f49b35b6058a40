//! Everything that `src/fabric/verbs/sys` declares, with what it is called in rdma-sys and in C.

use rdma_sys as theirs;
use std::mem::offset_of;
use tensorwire::internals::fabric::verbs::sys as ours;

/// How the end of a struct may differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// Not at all.
    Whole,
    /// The library is told how long ours is, so newer headers may add to the end.
    Start,
    /// Newer headers add to the front; what counts is the distance from the end.
    End,
}

/// A struct or union.
pub struct Layout {
    pub name: &'static str,
    /// In C.
    pub c_type: &'static str,
    pub extent: Extent,
    pub ours: Size,
    pub theirs: Size,
    pub fields: Vec<Field>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    pub bytes: usize,
    pub align: usize,
}

/// A field of a struct or union.
pub struct Field {
    pub name: &'static str,
    pub ours: Place,
    pub theirs: Place,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub offset: usize,
    pub bytes: usize,
}

/// A value of an enumeration; `None` where rdma-sys leaves it out.
pub struct Constant {
    pub name: &'static str,
    pub ours: i64,
    pub theirs: Option<i64>,
}

fn size<T>() -> Size {
    Size { bytes: size_of::<T>(), align: align_of::<T>() }
}

/// The size of the field that `_field` would give, which is never called.
fn place<T, F>(offset: usize, _field: impl Fn(*const T) -> *const F) -> Place {
    Place { offset, bytes: size_of::<F>() }
}

/// A field's name in rdma-sys, if it is another one there.
macro_rules! their_name {
    ($type:ident, $ours:ident) => {
        their_name!($type, $ours, $ours)
    };
    ($type:ident, $ours:ident, $theirs:ident) => {
        // SAFETY: the closure is never called, only its type counts.
        place(offset_of!(theirs::$type, $theirs), |s: *const theirs::$type| unsafe {
            &raw const (*s).$theirs
        })
    };
}

/// Each struct as `NAME = NAME IN RDMA-SYS: TYPE IN C, EXTENT { FIELDS }`, a field as `NAME` or
/// `NAME = NAME IN RDMA-SYS`.
macro_rules! layouts {
    ($($name:ident = $theirs:ident: $c:literal, $extent:ident {
        $($field:ident $(= $their_field:ident)?),*
    })*) => {
        vec![$(Layout {
            name: stringify!($name),
            c_type: $c,
            extent: Extent::$extent,
            ours: size::<ours::$name>(),
            theirs: size::<theirs::$theirs>(),
            fields: vec![$(Field {
                name: stringify!($field),
                ours: place(
                    offset_of!(ours::$name, $field),
                    // SAFETY: the closure is never called, only its type counts.
                    |s: *const ours::$name| unsafe { &raw const (*s).$field },
                ),
                theirs: their_name!($theirs, $field $(, $their_field)?),
            }),*],
        }),*]
    };
}

/// Every struct and union.
pub fn layouts() -> Vec<Layout> {
    layouts! {
        ibv_gid = ibv_gid: "union ibv_gid", Whole { raw }
        ibv_gid_entry = ibv_gid_entry: "struct ibv_gid_entry", Whole {
            gid, gid_index, port_num, gid_type, ndev_ifindex
        }
        ibv_device = ibv_device: "struct ibv_device", Whole {
            node_type, transport_type, name, dev_name, dev_path, ibdev_path
        }
        ibv_device_attr = ibv_device_attr: "struct ibv_device_attr", Whole {
            fw_ver, node_guid, sys_image_guid, max_mr_size, page_size_cap, vendor_id, vendor_part_id,
            hw_ver, max_qp, max_qp_wr, device_cap_flags, max_sge, max_sge_rd, max_cq, max_cqe, max_mr,
            max_pd, max_qp_rd_atom, max_ee_rd_atom, max_res_rd_atom, max_qp_init_rd_atom,
            max_ee_init_rd_atom, atomic_cap, max_ee, max_rdd, max_mw, max_raw_ipv6_qp, max_raw_ethy_qp,
            max_mcast_grp, max_mcast_qp_attach, max_total_mcast_qp_attach, max_ah, max_fmr, max_map_per_fmr,
            max_srq, max_srq_wr, max_srq_sge, max_pkeys, local_ca_ack_delay, phys_port_cnt
        }
        ibv_port_attr = ibv_port_attr: "struct ibv_port_attr", Start {
            state, max_mtu, active_mtu, gid_tbl_len, port_cap_flags, max_msg_sz, bad_pkey_cntr,
            qkey_viol_cntr, pkey_tbl_len, lid, sm_lid, lmc, max_vl_num, sm_sl, subnet_timeout,
            init_type_reply, active_width, active_speed, phys_state, link_layer, flags, port_cap_flags2
        }
        ibv_async_event = ibv_async_event: "struct ibv_async_event", Whole { element, event_type }
        ibv_async_element = ibv_async_event_element_t: "__typeof__(((struct ibv_async_event \
            *)0)->element)", Whole {
            cq, qp, port_num
        }
        ibv_context_ops = ibv_context_ops: "struct ibv_context_ops", Whole {
            alloc_mw, dealloc_mw, poll_cq, req_notify_cq, post_send, post_recv
        }
        ibv_context = ibv_context: "struct ibv_context", Whole {
            device, ops, cmd_fd, async_fd, num_comp_vectors, abi_compat
        }
        ibv_td_init_attr = ibv_td_init_attr: "struct ibv_td_init_attr", Whole { comp_mask }
        ibv_td = ibv_td: "struct ibv_td", Whole { context }
        ibv_parent_domain_init_attr = ibv_parent_domain_init_attr: "struct \
            ibv_parent_domain_init_attr", Whole {
            pd, td, comp_mask, alloc, free, pd_context
        }
        verbs_context = verbs_context: "struct verbs_context", End {
            query_port, alloc_parent_domain, dealloc_td, alloc_td, sz, context
        }
        ibv_pd = ibv_pd: "struct ibv_pd", Whole { context, handle }
        ibv_mr = ibv_mr: "struct ibv_mr", Whole { context, pd, addr, length, handle, lkey, rkey }
        ibv_mw = ibv_mw: "struct ibv_mw", Whole { context, pd, rkey, handle }
        ibv_mw_bind_info = ibv_mw_bind_info: "struct ibv_mw_bind_info", Whole {
            mr, addr, length, mw_access_flags
        }
        ibv_comp_channel = ibv_comp_channel: "struct ibv_comp_channel", Whole { context, fd, refcnt }
        ibv_cq = ibv_cq: "struct ibv_cq", Whole { context, channel, cq_context, handle, cqe }
        ibv_qp = ibv_qp: "struct ibv_qp", Whole {
            context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num, state, qp_type
        }
        ibv_qp_cap = ibv_qp_cap: "struct ibv_qp_cap", Whole {
            max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data
        }
        ibv_qp_init_attr = ibv_qp_init_attr: "struct ibv_qp_init_attr", Whole {
            qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all
        }
        ibv_global_route = ibv_global_route: "struct ibv_global_route", Whole {
            dgid, flow_label, sgid_index, hop_limit, traffic_class
        }
        ibv_ah_attr = ibv_ah_attr: "struct ibv_ah_attr", Whole {
            grh, dlid, sl, src_path_bits, static_rate, is_global, port_num
        }
        ibv_qp_attr = ibv_qp_attr: "struct ibv_qp_attr", Whole {
            qp_state, cur_qp_state, path_mtu, path_mig_state, qkey, rq_psn, sq_psn, dest_qp_num,
            qp_access_flags, cap, ah_attr, alt_ah_attr, pkey_index, alt_pkey_index, en_sqd_async_notify,
            sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt,
            rnr_retry, alt_port_num, alt_timeout, rate_limit
        }
        ibv_sge = ibv_sge: "struct ibv_sge", Whole { addr, length, lkey }
        ibv_wr_rdma = rdma_t: "__typeof__(((struct ibv_send_wr *)0)->wr.rdma)", Whole { remote_addr, rkey }
        ibv_wr_target = wr_t: "__typeof__(((struct ibv_send_wr *)0)->wr)", Whole { rdma }
        ibv_wr_bind = bind_mw_t: "__typeof__(((struct ibv_send_wr *)0)->bind_mw)", Whole {
            mw, rkey, bind_info
        }
        ibv_send_wr = ibv_send_wr: "struct ibv_send_wr", Whole {
            wr_id, next, sg_list, num_sge, opcode, send_flags, imm_data = imm_data_invalidated_rkey_union,
            wr, bind_mw = bind_mw_tso_union
        }
        ibv_recv_wr = ibv_recv_wr: "struct ibv_recv_wr", Whole { wr_id, next, sg_list, num_sge }
        ibv_wc = ibv_wc: "struct ibv_wc", Whole {
            wr_id, status, opcode, vendor_err, byte_len, imm_data = imm_data_invalidated_rkey_union, qp_num,
            src_qp, wc_flags, pkey_index, slid, sl, dlid_path_bits
        }
    }
}

/// A value, whatever type rdma-sys makes of its enumeration.
trait Value {
    fn value(self) -> i64;
}

macro_rules! values {
    ($($type:ty: $value:ident => $made:expr;)*) => {
        $(impl Value for $type {
            fn value(self) -> i64 {
                let $value = self;
                i64::from($made)
            }
        })*
    };
}

values! {
    u8: v => v;
    u32: v => v;
    i32: v => v;
    theirs::ibv_access_flags: v => v.0;
    theirs::ibv_device_cap_flags: v => v.0;
    theirs::ibv_event_type: v => v as u32;
    theirs::ibv_qp_attr_mask: v => v.0;
    theirs::ibv_send_flags: v => v.0;
    theirs::ibv_wc_flags: v => v.0;
}

/// Values by where rdma-sys has them; `nowhere` for those of enumerations without a name, which it
/// leaves out.
macro_rules! constants {
    ($($place:tt { $($name:ident),* })*) => {
        vec![$($(Constant {
            name: stringify!($name),
            ours: ours::$name.value(),
            theirs: constants!(@their $name, $place),
        },)*)*]
    };
    (@their $name:ident, (nowhere)) => { None };
    (@their $name:ident, ($($place:ident)::+)) => { Some($($place)::+::$name.value()) };
}

/// Every constant.
pub fn constants() -> Vec<Constant> {
    constants! {
        (theirs::ibv_node_type) { IBV_NODE_CA, IBV_NODE_RNIC }
        (theirs::ibv_transport_type) { IBV_TRANSPORT_IB }
        (nowhere) {
            IBV_LINK_LAYER_UNSPECIFIED, IBV_LINK_LAYER_INFINIBAND, IBV_LINK_LAYER_ETHERNET,
            IBV_QPF_GRH_REQUIRED
        }
        (theirs::ibv_port_state) {
            IBV_PORT_DOWN, IBV_PORT_INIT, IBV_PORT_ARMED, IBV_PORT_ACTIVE,
            IBV_PORT_ACTIVE_DEFER
        }
        (theirs::ibv_mtu) { IBV_MTU_256, IBV_MTU_1024, IBV_MTU_4096 }
        (theirs) { IBV_GID_TYPE_IB, IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2 }
        (theirs::ibv_device_cap_flags) {
            IBV_DEVICE_MEM_WINDOW, IBV_DEVICE_MEM_WINDOW_TYPE_2A, IBV_DEVICE_MEM_WINDOW_TYPE_2B
        }
        (theirs::ibv_access_flags) {
            IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_WRITE, IBV_ACCESS_REMOTE_READ,
            IBV_ACCESS_REMOTE_ATOMIC, IBV_ACCESS_MW_BIND, IBV_ACCESS_RELAXED_ORDERING
        }
        (theirs::ibv_mw_type) { IBV_MW_TYPE_2 }
        (theirs::ibv_qp_type) { IBV_QPT_RC }
        (theirs::ibv_qp_state) { IBV_QPS_RESET, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_ERR }
        (theirs::ibv_qp_attr_mask) {
            IBV_QP_STATE, IBV_QP_ACCESS_FLAGS, IBV_QP_PKEY_INDEX, IBV_QP_PORT, IBV_QP_AV, IBV_QP_PATH_MTU,
            IBV_QP_TIMEOUT, IBV_QP_RETRY_CNT, IBV_QP_RNR_RETRY, IBV_QP_RQ_PSN, IBV_QP_MAX_QP_RD_ATOMIC,
            IBV_QP_MIN_RNR_TIMER, IBV_QP_SQ_PSN, IBV_QP_MAX_DEST_RD_ATOMIC, IBV_QP_DEST_QPN
        }
        (theirs::ibv_wr_opcode) {
            IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND, IBV_WR_SEND_WITH_IMM,
            IBV_WR_RDMA_READ, IBV_WR_LOCAL_INV, IBV_WR_BIND_MW
        }
        (theirs::ibv_send_flags) { IBV_SEND_SIGNALED, IBV_SEND_INLINE }
        (theirs::ibv_wc_opcode) {
            IBV_WC_SEND, IBV_WC_RDMA_WRITE, IBV_WC_RDMA_READ, IBV_WC_BIND_MW, IBV_WC_LOCAL_INV,
            IBV_WC_RECV, IBV_WC_RECV_RDMA_WITH_IMM
        }
        (theirs::ibv_wc_flags) { IBV_WC_WITH_IMM }
        (theirs::ibv_wc_status) {
            IBV_WC_SUCCESS, IBV_WC_LOC_LEN_ERR, IBV_WC_LOC_QP_OP_ERR, IBV_WC_LOC_PROT_ERR,
            IBV_WC_WR_FLUSH_ERR, IBV_WC_MW_BIND_ERR, IBV_WC_BAD_RESP_ERR, IBV_WC_LOC_ACCESS_ERR,
            IBV_WC_REM_INV_REQ_ERR, IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_OP_ERR, IBV_WC_RETRY_EXC_ERR,
            IBV_WC_RNR_RETRY_EXC_ERR, IBV_WC_REM_ABORT_ERR, IBV_WC_FATAL_ERR, IBV_WC_RESP_TIMEOUT_ERR,
            IBV_WC_GENERAL_ERR
        }
        (theirs::ibv_event_type) {
            IBV_EVENT_CQ_ERR, IBV_EVENT_QP_FATAL, IBV_EVENT_QP_REQ_ERR, IBV_EVENT_QP_ACCESS_ERR,
            IBV_EVENT_COMM_EST, IBV_EVENT_SQ_DRAINED, IBV_EVENT_PATH_MIG, IBV_EVENT_PATH_MIG_ERR,
            IBV_EVENT_DEVICE_FATAL, IBV_EVENT_PORT_ACTIVE, IBV_EVENT_PORT_ERR,
            IBV_EVENT_QP_LAST_WQE_REACHED, IBV_EVENT_GID_CHANGE
        }
    }
}
