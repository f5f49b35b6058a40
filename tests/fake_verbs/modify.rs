//! The states of a queue pair: permitted transitions, required and optional attributes, and their
//! bounds (InfiniBand specification, 11.2.5.2; `ibv_modify_qp(3)`).

use crate::c::*;
use crate::state::*;
use crate::sys::*;
use std::ffi::c_int;

const TO_INIT: c_int = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
const TO_RTR: c_int = IBV_QP_STATE
    | IBV_QP_AV
    | IBV_QP_PATH_MTU
    | IBV_QP_DEST_QPN
    | IBV_QP_RQ_PSN
    | IBV_QP_MAX_DEST_RD_ATOMIC
    | IBV_QP_MIN_RNR_TIMER;
const TO_RTS: c_int = IBV_QP_STATE
    | IBV_QP_SQ_PSN
    | IBV_QP_TIMEOUT
    | IBV_QP_RETRY_CNT
    | IBV_QP_RNR_RETRY
    | IBV_QP_MAX_QP_RD_ATOMIC;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    let mut state = state();
    let Some(number) = state.qp_number(qp as usize) else {
        state.misuse("a queue pair was changed that there is not");
        return EINVAL;
    };
    // SAFETY: the caller's struct.
    let attr = unsafe { &*attr };
    let device = state.qps[&number].device;
    let step = (state.qps[&number].state, attr.qp_state);
    let name = match attr.qp_state {
        IBV_QPS_INIT => "INIT",
        IBV_QPS_RTR => "RTR",
        IBV_QPS_RTS => "RTS",
        IBV_QPS_ERR => "ERR",
        _ => "other",
    };
    if let Some(errno) = state.fault(&format!("modify_qp:{name}"), device) {
        return errno;
    }
    let wrong = match step {
        (IBV_QPS_RESET, IBV_QPS_INIT) => exact(mask, TO_INIT).or_else(|| init(&state, number, attr)),
        (IBV_QPS_INIT, IBV_QPS_RTR) => exact(mask, TO_RTR).or_else(|| rtr(&state, number, attr)),
        (IBV_QPS_RTR, IBV_QPS_RTS) => exact(mask, TO_RTS).or_else(|| rts(&state, number, attr)),
        (_, IBV_QPS_ERR) => exact(mask, IBV_QP_STATE),
        (from, to) => Some(format!("from state {from} to {to}")),
    };
    if let Some(wrong) = wrong {
        // Not a misuse: the value may be a setting, and the caller reports the refusal.
        state.log.push(format!("refused modify_qp to={name}: {wrong}"));
        return EINVAL;
    }
    let receives = state.qps[&number].receives.len();
    state.log.push(describe(number, name, attr) + &format!(" receives={receives}"));
    if attr.qp_state == IBV_QPS_ERR {
        crate::wire::put_into_error(&mut state, number);
        return 0;
    }
    let Some(of) = state.qps.get_mut(&number) else { return EINVAL };
    of.state = attr.qp_state;
    merge(&mut of.attr, attr, mask);
    // SAFETY: the public part of what was handed out.
    unsafe { (*qp).state = attr.qp_state };
    crate::engine::run_all(&mut state);
    0
}

fn exact(mask: c_int, needed: c_int) -> Option<String> {
    (mask != needed).then(|| format!("mask {mask:#x}, where {needed:#x} is needed"))
}

fn merge(to: &mut ibv_qp_attr, from: &ibv_qp_attr, mask: c_int) {
    if mask == TO_INIT {
        (to.pkey_index, to.port_num, to.qp_access_flags) =
            (from.pkey_index, from.port_num, from.qp_access_flags);
    } else if mask == TO_RTR {
        to.ah_attr = from.ah_attr;
        (to.path_mtu, to.dest_qp_num, to.rq_psn) = (from.path_mtu, from.dest_qp_num, from.rq_psn);
        (to.max_dest_rd_atomic, to.min_rnr_timer) = (from.max_dest_rd_atomic, from.min_rnr_timer);
    } else {
        (to.sq_psn, to.timeout, to.retry_cnt) = (from.sq_psn, from.timeout, from.retry_cnt);
        (to.rnr_retry, to.max_rd_atomic) = (from.rnr_retry, from.max_rd_atomic);
    }
}

fn init(state: &State, number: u32, attr: &ibv_qp_attr) -> Option<String> {
    let ports = &state.devices[state.qps[&number].device].ports;
    let Some(port) = ports.get(usize::from(attr.port_num).wrapping_sub(1)) else {
        return Some(format!("no port {}", attr.port_num));
    };
    (attr.pkey_index >= port.pkeys).then(|| format!("no partition key {}", attr.pkey_index))
}

fn rtr(state: &State, number: u32, attr: &ibv_qp_attr) -> Option<String> {
    let qp = &state.qps[&number];
    let device = &state.devices[qp.device];
    let address = &attr.ah_attr;
    if address.port_num != qp.attr.port_num {
        return Some(format!("an address of port {}", address.port_num));
    }
    let port = &device.ports[usize::from(address.port_num) - 1];
    let is_ethernet = port.link_layer == IBV_LINK_LAYER_ETHERNET;
    if is_ethernet && address.is_global == 0 {
        return Some("an address without a GID on Ethernet".into());
    }
    if address.is_global != 0 && !port.gids.contains_key(&address.grh.sgid_index.into()) {
        return Some(format!("no GID {}", address.grh.sgid_index));
    }
    if !is_ethernet && address.dlid == 0 {
        return Some("lid 0 on InfiniBand".into());
    }
    if attr.path_mtu > port.active_mtu || attr.path_mtu == 0 {
        return Some(format!("path MTU {}", attr.path_mtu));
    }
    if c_int::from(attr.max_dest_rd_atomic) > device.max_qp_rd_atom {
        return Some(format!("{} reads as their target", attr.max_dest_rd_atomic));
    }
    let in_range =
        attr.rq_psn < 1 << 24 && attr.dest_qp_num < 1 << 24 && attr.min_rnr_timer < 32 && address.sl < 16;
    (!in_range).then(|| "a number out of range".into())
}

fn rts(state: &State, number: u32, attr: &ibv_qp_attr) -> Option<String> {
    let device = &state.devices[state.qps[&number].device];
    if c_int::from(attr.max_rd_atomic) > device.max_qp_init_rd_atom {
        return Some(format!("{} reads", attr.max_rd_atomic));
    }
    let in_range = attr.sq_psn < 1 << 24 && attr.timeout < 32 && attr.retry_cnt < 8 && attr.rnr_retry < 8;
    (!in_range).then(|| "a number out of range".into())
}

fn describe(number: u32, state: &str, attr: &ibv_qp_attr) -> String {
    let grh = &attr.ah_attr.grh;
    match attr.qp_state {
        IBV_QPS_INIT => format!(
            "modify_qp qp={number} to={state} port={} pkey_index={} access={}",
            attr.port_num, attr.pkey_index, attr.qp_access_flags
        ),
        IBV_QPS_RTR => format!(
            "modify_qp qp={number} to={state} path_mtu={} dest={} psn={} dest_reads={} rnr_timer={} \
                is_global={} dlid={} sl={} \
             port={} sgid_index={} hop_limit={} traffic_class={} flow_label={} dgid={:032x}",
            attr.path_mtu,
            attr.dest_qp_num,
            attr.rq_psn,
            attr.max_dest_rd_atomic,
            attr.min_rnr_timer,
            attr.ah_attr.is_global,
            attr.ah_attr.dlid,
            attr.ah_attr.sl,
            attr.ah_attr.port_num,
            grh.sgid_index,
            grh.hop_limit,
            grh.traffic_class,
            grh.flow_label,
            u128::from_be_bytes(grh.dgid.raw)
        ),
        _ => format!(
            "modify_qp qp={number} to={state} psn={} timeout={} retry_count={} rnr_retry={} reads={}",
            attr.sq_psn, attr.timeout, attr.retry_cnt, attr.rnr_retry, attr.max_rd_atomic
        ),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    _mask: c_int,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    let state = state();
    let Some(number) = state.qp_number(qp as usize) else { return EINVAL };
    let of = &state.qps[&number];
    let mut told_init: ibv_qp_init_attr = zeroed();
    told_init.cap = of.cap;
    told_init.qp_type = IBV_QPT_RC;
    // SAFETY: the caller's structs.
    unsafe {
        attr.write(ibv_qp_attr { qp_state: of.state, cur_qp_state: of.state, cap: of.cap, ..of.attr });
        init.write(told_init);
    }
    0
}
