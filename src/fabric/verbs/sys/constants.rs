//! The values of libibverbs' enumerations that we use.
//!
//! They are plain integers and not Rust enums. The library or a device may return a newer value,
//! and a Rust enum with an unknown value is undefined behaviour. Source: `infiniband/verbs.h` of
//! rdma-core, whose values are frozen (they are part of the kernel's interface).

use std::ffi::c_int;

/// `ibv_node_type`: a channel adapter; a RoCE NIC is one too.
pub const IBV_NODE_CA: c_int = 1;
/// `ibv_node_type`: an iWARP NIC, which has no GIDs to route by.
pub const IBV_NODE_RNIC: c_int = 4;

/// `ibv_transport_type`: InfiniBand and RoCE.
pub const IBV_TRANSPORT_IB: c_int = 0;

/// `ibv_port_attr::link_layer`: not said, which old InfiniBand devices do.
pub const IBV_LINK_LAYER_UNSPECIFIED: u8 = 0;
/// `ibv_port_attr::link_layer`: InfiniBand.
pub const IBV_LINK_LAYER_INFINIBAND: u8 = 1;
/// `ibv_port_attr::link_layer`: Ethernet, so RoCE.
pub const IBV_LINK_LAYER_ETHERNET: u8 = 2;

/// `ibv_port_state`: no physical link.
pub const IBV_PORT_DOWN: u32 = 1;
/// `ibv_port_state`: physical link, no subnet manager has been here.
pub const IBV_PORT_INIT: u32 = 2;
/// `ibv_port_state`: set up by the subnet manager, not active yet.
pub const IBV_PORT_ARMED: u32 = 3;
/// `ibv_port_state`: usable.
pub const IBV_PORT_ACTIVE: u32 = 4;
/// `ibv_port_state`: usable, with a link error that has not been counted as down yet.
pub const IBV_PORT_ACTIVE_DEFER: u32 = 5;

/// `ibv_port_attr::flags` (`IBV_QPF_GRH_REQUIRED`): every address needs a global route header, also
/// on InfiniBand.
pub const IBV_QPF_GRH_REQUIRED: u8 = 1;

/// `ibv_mtu`: 256 bytes.
pub const IBV_MTU_256: u32 = 1;
/// `ibv_mtu`: 1024 bytes.
pub const IBV_MTU_1024: u32 = 3;
/// `ibv_mtu`: 4096 bytes.
pub const IBV_MTU_4096: u32 = 5;

/// `ibv_gid_entry::gid_type`: InfiniBand.
pub const IBV_GID_TYPE_IB: u32 = 0;
/// `ibv_gid_entry::gid_type`: RoCE v1, which is not routed.
pub const IBV_GID_TYPE_ROCE_V1: u32 = 1;
/// `ibv_gid_entry::gid_type`: RoCE v2, over UDP.
pub const IBV_GID_TYPE_ROCE_V2: u32 = 2;

/// `ibv_device_cap_flags`: memory windows of type 1.
pub const IBV_DEVICE_MEM_WINDOW: u32 = 1 << 17;
/// `ibv_device_cap_flags`: memory windows of type 2A.
pub const IBV_DEVICE_MEM_WINDOW_TYPE_2A: u32 = 1 << 23;
/// `ibv_device_cap_flags`: memory windows of type 2B.
pub const IBV_DEVICE_MEM_WINDOW_TYPE_2B: u32 = 1 << 24;

/// `ibv_access_flags`: this side may write (receives, reads).
pub const IBV_ACCESS_LOCAL_WRITE: c_int = 1;
/// `ibv_access_flags`: peers may write.
pub const IBV_ACCESS_REMOTE_WRITE: c_int = 1 << 1;
/// `ibv_access_flags`: peers may read.
pub const IBV_ACCESS_REMOTE_READ: c_int = 1 << 2;
/// `ibv_access_flags`: peers may do atomics.
pub const IBV_ACCESS_REMOTE_ATOMIC: c_int = 1 << 3;
/// `ibv_access_flags`: memory windows may be bound to it.
pub const IBV_ACCESS_MW_BIND: c_int = 1 << 4;
/// `ibv_access_flags`: the bus may reorder writes. The first of the optional flags, which a device
/// that does not know them ignores; needs `ibv_reg_mr_iova2`.
pub const IBV_ACCESS_RELAXED_ORDERING: c_int = 1 << 20;

/// `ibv_mw_type`: bound and revoked by requests of a queue pair.
pub const IBV_MW_TYPE_2: u32 = 2;

/// `ibv_qp_type`: reliable connection.
pub const IBV_QPT_RC: u32 = 2;

/// `ibv_qp_state`.
pub const IBV_QPS_RESET: u32 = 0;
/// `ibv_qp_state`.
pub const IBV_QPS_INIT: u32 = 1;
/// `ibv_qp_state`: ready to receive.
pub const IBV_QPS_RTR: u32 = 2;
/// `ibv_qp_state`: ready to send.
pub const IBV_QPS_RTS: u32 = 3;
/// `ibv_qp_state`: every work request is flushed.
pub const IBV_QPS_ERR: u32 = 6;

/// `ibv_qp_attr_mask`.
pub const IBV_QP_STATE: c_int = 1;
/// `ibv_qp_attr_mask`.
pub const IBV_QP_ACCESS_FLAGS: c_int = 1 << 3;
/// `ibv_qp_attr_mask`.
pub const IBV_QP_PKEY_INDEX: c_int = 1 << 4;
/// `ibv_qp_attr_mask`.
pub const IBV_QP_PORT: c_int = 1 << 5;
/// `ibv_qp_attr_mask`: the address vector.
pub const IBV_QP_AV: c_int = 1 << 7;
/// `ibv_qp_attr_mask`.
pub const IBV_QP_PATH_MTU: c_int = 1 << 8;
/// `ibv_qp_attr_mask`.
pub const IBV_QP_TIMEOUT: c_int = 1 << 9;
/// `ibv_qp_attr_mask`.
pub const IBV_QP_RETRY_CNT: c_int = 1 << 10;
/// `ibv_qp_attr_mask`.
pub const IBV_QP_RNR_RETRY: c_int = 1 << 11;
/// `ibv_qp_attr_mask`.
pub const IBV_QP_RQ_PSN: c_int = 1 << 12;
/// `ibv_qp_attr_mask`: reads outstanding as the initiator.
pub const IBV_QP_MAX_QP_RD_ATOMIC: c_int = 1 << 13;
/// `ibv_qp_attr_mask`.
pub const IBV_QP_MIN_RNR_TIMER: c_int = 1 << 15;
/// `ibv_qp_attr_mask`.
pub const IBV_QP_SQ_PSN: c_int = 1 << 16;
/// `ibv_qp_attr_mask`: reads outstanding as the target.
pub const IBV_QP_MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
/// `ibv_qp_attr_mask`.
pub const IBV_QP_DEST_QPN: c_int = 1 << 20;

/// `ibv_wr_opcode`.
pub const IBV_WR_RDMA_WRITE: u32 = 0;
/// `ibv_wr_opcode`.
pub const IBV_WR_RDMA_WRITE_WITH_IMM: u32 = 1;
/// `ibv_wr_opcode`.
pub const IBV_WR_SEND: u32 = 2;
/// `ibv_wr_opcode`.
pub const IBV_WR_SEND_WITH_IMM: u32 = 3;
/// `ibv_wr_opcode`.
pub const IBV_WR_RDMA_READ: u32 = 4;
/// `ibv_wr_opcode`: a memory window's key ends.
pub const IBV_WR_LOCAL_INV: u32 = 7;
/// `ibv_wr_opcode`: a memory window gets bytes and a key.
pub const IBV_WR_BIND_MW: u32 = 8;

/// `ibv_send_flags`: make a completion.
pub const IBV_SEND_SIGNALED: u32 = 1 << 1;
/// `ibv_send_flags`: the bytes are copied while posting.
pub const IBV_SEND_INLINE: u32 = 1 << 3;

/// `ibv_wc_opcode`.
pub const IBV_WC_SEND: u32 = 0;
/// `ibv_wc_opcode`.
pub const IBV_WC_RDMA_WRITE: u32 = 1;
/// `ibv_wc_opcode`.
pub const IBV_WC_RDMA_READ: u32 = 2;
/// `ibv_wc_opcode`.
pub const IBV_WC_BIND_MW: u32 = 5;
/// `ibv_wc_opcode`.
pub const IBV_WC_LOCAL_INV: u32 = 6;
/// `ibv_wc_opcode`: a message has come.
pub const IBV_WC_RECV: u32 = 1 << 7;
/// `ibv_wc_opcode`: a write with immediate has come.
pub const IBV_WC_RECV_RDMA_WITH_IMM: u32 = IBV_WC_RECV + 1;

/// `ibv_wc_flags`: there is immediate data.
pub const IBV_WC_WITH_IMM: u32 = 1 << 1;

/// `ibv_wc_status`.
pub const IBV_WC_SUCCESS: u32 = 0;
/// `ibv_wc_status`: local length error.
pub const IBV_WC_LOC_LEN_ERR: u32 = 1;
/// `ibv_wc_status`: local queue pair operation error.
pub const IBV_WC_LOC_QP_OP_ERR: u32 = 2;
/// `ibv_wc_status`: local protection error.
pub const IBV_WC_LOC_PROT_ERR: u32 = 4;
/// `ibv_wc_status`: flushed, as the queue pair was in error already.
pub const IBV_WC_WR_FLUSH_ERR: u32 = 5;
/// `ibv_wc_status`: bad response.
pub const IBV_WC_BAD_RESP_ERR: u32 = 7;
/// `ibv_wc_status`: a memory window could not be bound.
pub const IBV_WC_MW_BIND_ERR: u32 = 6;
/// `ibv_wc_status`: local access error.
pub const IBV_WC_LOC_ACCESS_ERR: u32 = 8;
/// `ibv_wc_status`: the target found the request invalid.
pub const IBV_WC_REM_INV_REQ_ERR: u32 = 9;
/// `ibv_wc_status`: the target found key, bounds or rights wrong.
pub const IBV_WC_REM_ACCESS_ERR: u32 = 10;
/// `ibv_wc_status`: the target failed.
pub const IBV_WC_REM_OP_ERR: u32 = 11;
/// `ibv_wc_status`: no acknowledgement after all retries.
pub const IBV_WC_RETRY_EXC_ERR: u32 = 12;
/// `ibv_wc_status`: no receive was posted there after all retries.
pub const IBV_WC_RNR_RETRY_EXC_ERR: u32 = 13;
/// `ibv_wc_status`: the target aborted.
pub const IBV_WC_REM_ABORT_ERR: u32 = 16;
/// `ibv_wc_status`: the device failed.
pub const IBV_WC_FATAL_ERR: u32 = 19;
/// `ibv_wc_status`: the response took too long.
pub const IBV_WC_RESP_TIMEOUT_ERR: u32 = 20;
/// `ibv_wc_status`: anything else.
pub const IBV_WC_GENERAL_ERR: u32 = 21;

/// `ibv_event_type`: a completion queue overran.
pub const IBV_EVENT_CQ_ERR: u32 = 0;
/// `ibv_event_type`: a queue pair failed and can't report it by a completion.
pub const IBV_EVENT_QP_FATAL: u32 = 1;
/// `ibv_event_type`: a request that came was invalid.
pub const IBV_EVENT_QP_REQ_ERR: u32 = 2;
/// `ibv_event_type`: an arriving request had no right to the memory that it names.
pub const IBV_EVENT_QP_ACCESS_ERR: u32 = 3;
/// `ibv_event_type`: the first packet came before the queue pair was ready to send. Harmless.
pub const IBV_EVENT_COMM_EST: u32 = 4;
/// `ibv_event_type`.
pub const IBV_EVENT_SQ_DRAINED: u32 = 5;
/// `ibv_event_type`: the path has migrated to the alternate one.
pub const IBV_EVENT_PATH_MIG: u32 = 6;
/// `ibv_event_type`.
pub const IBV_EVENT_PATH_MIG_ERR: u32 = 7;
/// `ibv_event_type`: the device failed or was removed.
pub const IBV_EVENT_DEVICE_FATAL: u32 = 8;
/// `ibv_event_type`: a port came up.
pub const IBV_EVENT_PORT_ACTIVE: u32 = 9;
/// `ibv_event_type`: a port went down.
pub const IBV_EVENT_PORT_ERR: u32 = 10;
/// `ibv_event_type`.
pub const IBV_EVENT_QP_LAST_WQE_REACHED: u32 = 16;
/// `ibv_event_type`: a port's GID table changed.
pub const IBV_EVENT_GID_CHANGE: u32 = 18;
