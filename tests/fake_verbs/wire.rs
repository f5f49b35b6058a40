//! The effect of a request on the target. The lock is held.

use crate::events::tell;
use crate::state::*;
use crate::sys::*;
use crate::windows;

/// The result of a request.
pub enum Outcome {
    Done,
    Wait(Stall),
    /// The request failed. With an event, the target's queue pair failed too.
    Failed {
        status: u32,
        vendor: u32,
        target_event: Option<u32>,
    },
}

pub fn failed(status: u32) -> Outcome {
    Outcome::Failed { status, vendor: 0x5A, target_event: None }
}

fn violation(status: u32, event: u32) -> Outcome {
    Outcome::Failed { status, vendor: 0x5A, target_event: Some(event) }
}

/// Whether packets of a queue pair reach its peer.
fn reaches(state: &State, from: &Qp, to: &Qp) -> bool {
    let [port, there] = [from, to].map(|qp| {
        let device = &state.devices[qp.device];
        let port = device.ports.get(usize::from(qp.attr.port_num).wrapping_sub(1));
        port.filter(|port| port.state == IBV_PORT_ACTIVE && !port.cut && !device.removed)
    });
    let (Some(_), Some(there)) = (port, there) else { return false };
    let address = &from.attr.ah_attr;
    let addressed = if address.is_global != 0 {
        there.gids.values().any(|(raw, _)| *raw == address.grh.dgid.raw)
    } else {
        there.lid == address.dlid
    };
    addressed && !state.cut && from.attr.sq_psn == to.attr.rq_psn && from.attr.path_mtu == to.attr.path_mtu
}

/// Carries a request out, if the target is ready.
pub fn carry_out(state: &mut State, number: u32, send: &Send) -> Outcome {
    let qp = &state.qps[&number];
    let target = qp.attr.dest_qp_num;
    let Some(to) = state.qps.get(&target).filter(|_| target != number) else {
        return Outcome::Wait(Stall::Silence);
    };
    let is_ready = matches!(to.state, IBV_QPS_RTR | IBV_QPS_RTS) && to.attr.dest_qp_num == number;
    if !is_ready || !reaches(state, qp, to) {
        return Outcome::Wait(Stall::Silence);
    }
    let is_read = send.opcode == IBV_WR_RDMA_READ;
    if send.inline.is_none() {
        let needed = if is_read { IBV_ACCESS_LOCAL_WRITE } else { 0 };
        if send.pieces.iter().any(|piece| !may(state, qp, piece, needed)) {
            return failed(IBV_WC_LOC_PROT_ERR);
        }
    }
    if is_read && qp.attr.max_rd_atomic > to.attr.max_dest_rd_atomic {
        return violation(IBV_WC_REM_INV_REQ_ERR, IBV_EVENT_QP_REQ_ERR);
    }
    let consumes = matches!(send.opcode, IBV_WR_SEND | IBV_WR_RDMA_WRITE_WITH_IMM);
    if send.opcode != IBV_WR_SEND && send.len > 0 && !leave(state, to, send, is_read) {
        return violation(IBV_WC_REM_ACCESS_ERR, IBV_EVENT_QP_ACCESS_ERR);
    }
    if consumes && to.receives.is_empty() {
        return Outcome::Wait(Stall::NotReady);
    }
    if send.opcode == IBV_WR_SEND {
        let pieces = &to.receives[0].pieces;
        if send.len > pieces.iter().map(|piece| u64::from(piece.length)).sum() {
            receive(state, target, send, IBV_WC_LOC_LEN_ERR);
            return violation(IBV_WC_REM_INV_REQ_ERR, IBV_EVENT_QP_REQ_ERR);
        }
        if pieces.iter().any(|piece| !may(state, to, piece, IBV_ACCESS_LOCAL_WRITE)) {
            receive(state, target, send, IBV_WC_LOC_PROT_ERR);
            return failed(IBV_WC_REM_OP_ERR);
        }
    }
    move_bytes(send, if send.opcode == IBV_WR_SEND { Some(&to.receives[0].pieces) } else { None });
    if consumes {
        receive(state, target, send, IBV_WC_SUCCESS);
    }
    Outcome::Done
}

/// Whether a queue pair may use a range of local memory.
fn may(state: &State, qp: &Qp, piece: &ibv_sge, needed: i32) -> bool {
    let Some(mr) = state.lkeys.get(&piece.lkey).map(|at| &state.mrs[at]) else { return piece.length == 0 };
    mr.pd == state.pds[&qp.pd].root
        && mr.access & needed == needed
        && is_inside((mr.start, mr.len), piece.addr, piece.length.into())
}

/// Whether bytes are inside of `len` bytes from `start` on.
pub fn is_inside((start, len): (u64, u64), addr: u64, count: u64) -> bool {
    let skip = addr.wrapping_sub(start);
    addr >= start && skip.checked_add(count).is_some_and(|end| end <= len)
}

/// Whether the target permits access to the range that the request names.
fn leave(state: &State, to: &Qp, send: &Send, is_read: bool) -> bool {
    let needed = if is_read { IBV_ACCESS_REMOTE_READ } else { IBV_ACCESS_REMOTE_WRITE };
    let (addr, rkey) = send.remote;
    if to.attr.qp_access_flags as i32 & needed == 0 {
        return false;
    }
    let Some(mr) = state.rkeys.get(&rkey).map(|at| &state.mrs[at]) else {
        return windows::leave(state, to, rkey, needed, addr, send.len);
    };
    mr.access & needed != 0
        && mr.pd == state.pds[&to.pd].root
        && is_inside((mr.start, mr.len), addr, send.len)
}

/// Copies the bytes of a request; `receive` is the destination of a message.
fn move_bytes(send: &Send, receive: Option<&[ibv_sge]>) {
    let there = ibv_sge { addr: send.remote.0, length: send.len as u32, lkey: 0 };
    let target = receive.unwrap_or(std::slice::from_ref(&there));
    if send.opcode == IBV_WR_RDMA_READ {
        return scatter(std::iter::once((there.addr, send.len)), &send.pieces);
    }
    match &send.inline {
        Some(bytes) => scatter(std::iter::once((bytes.as_ptr() as u64, bytes.len() as u64)), target),
        None => scatter(send.pieces.iter().map(|piece| (piece.addr, piece.length.into())), target),
    }
}

fn scatter(from: impl Iterator<Item = (u64, u64)>, to: &[ibv_sge]) {
    let (mut at, mut used) = (0, 0u64);
    for (mut addr, mut len) in from {
        while len > 0 {
            let room = u64::from(to[at].length) - used;
            if room == 0 {
                (at, used) = (at + 1, 0);
                continue;
            }
            let count = room.min(len);
            copy(addr, to[at].addr + used, count as usize);
            (addr, len, used) = (addr + count, len - count, used + count);
        }
    }
}

/// Writes an aligned word at once, as devices do.
fn copy(from: u64, to: u64, len: usize) {
    if len == 8 && to.is_multiple_of(8) {
        // SAFETY: registered memory on both sides, of the right size and aligned.
        unsafe {
            let word = (from as *const u64).read_unaligned();
            std::sync::atomic::AtomicU64::from_ptr(to as *mut u64)
                .store(word, std::sync::atomic::Ordering::Release);
        }
        return;
    }
    // SAFETY: registered memory on both sides, of that size; a program may write to itself.
    unsafe { std::ptr::copy(from as *const u8, to as *mut u8, len) };
}

/// Consumes the target's first receive.
fn receive(state: &mut State, target: u32, send: &Send, status: u32) {
    let Some(to) = state.qps.get_mut(&target) else { return };
    let Some(receive) = to.receives.pop_front() else { return };
    let is_send = send.opcode == IBV_WR_SEND;
    let wc = ibv_wc {
        wr_id: receive.wr_id,
        status,
        opcode: if is_send { IBV_WC_RECV } else { IBV_WC_RECV_RDMA_WITH_IMM },
        byte_len: send.len as u32,
        imm_data: if is_send { 0 } else { send.imm },
        wc_flags: if is_send { 0 } else { IBV_WC_WITH_IMM },
        qp_num: target,
        ..ibv_wc::default()
    };
    let cq = to.cqs[1];
    complete(state, cq, Cqe { wc, frees_sends: 0, frees_receives: 1 });
}

pub fn complete(state: &mut State, at: usize, cqe: Cqe) {
    let Some(cq) = state.cqs.get_mut(&at) else { return };
    if cq.entries.len() == cq.cqe {
        cq.overrun = true;
        let (context, cqe) = (cq.context, cq.cqe);
        state.misuse(format!("a completion queue of {cqe} overran"));
        return tell(state, context, IBV_EVENT_CQ_ERR, About::Cq(at));
    }
    cq.entries.push_back(cqe);
    if std::mem::take(&mut cq.armed)
        && let Some(channel) = state.channels.get_mut(&cq.channel)
    {
        channel.events.push_back(at);
        channel.counter.add();
    }
}

/// Fails the first request, and with it the queue pair.
pub fn fail(state: &mut State, number: u32, status: u32, vendor_err: u32) {
    let Some(qp) = state.qps.get_mut(&number) else { return };
    if let Some(send) = qp.sends.pop_front() {
        let frees_sends = std::mem::take(&mut qp.silent) + 1;
        // Other fields of a failed completion are not valid.
        let opcode = 0xBAD;
        let wc =
            ibv_wc { wr_id: send.wr_id, status, vendor_err, qp_num: number, opcode, ..ibv_wc::default() };
        let cq = qp.cqs[0];
        complete(state, cq, Cqe { wc, frees_sends, frees_receives: 0 });
    }
    put_into_error(state, number);
}

/// Flushes all outstanding requests.
pub fn put_into_error(state: &mut State, number: u32) {
    let Some(qp) = state.qps.get_mut(&number) else { return };
    qp.state = IBV_QPS_ERR;
    qp.stalled = None;
    let sends = std::mem::take(&mut qp.sends);
    let receives = std::mem::take(&mut qp.receives);
    let mut silent = std::mem::take(&mut qp.silent);
    let [to_sends, to_receives] = qp.cqs;
    let wc = |wr_id| ibv_wc {
        wr_id,
        status: IBV_WC_WR_FLUSH_ERR,
        qp_num: number,
        opcode: 0xBAD,
        ..ibv_wc::default()
    };
    for send in sends {
        let frees_sends = std::mem::take(&mut silent) + 1;
        complete(state, to_sends, Cqe { wc: wc(send.wr_id), frees_sends, frees_receives: 0 });
    }
    if let Some(qp) = state.qps.get_mut(&number) {
        qp.silent += silent;
    }
    for receive in receives {
        complete(state, to_receives, Cqe { wc: wc(receive.wr_id), frees_sends: 0, frees_receives: 1 });
    }
}

/// Lets a message arrive at a queue pair that nobody has sent.
pub fn forge(state: &mut State, target: u32, bytes: Vec<u8>) {
    let Some(to) = state.qps.get(&target).filter(|to| !to.receives.is_empty()) else {
        panic!("queue pair {target} has no receive for a forged message");
    };
    let send = Send {
        wr_id: 0,
        opcode: IBV_WR_SEND,
        flags: 0,
        imm: 0,
        pieces: Vec::new(),
        len: bytes.len() as u64,
        inline: Some(bytes),
        remote: (0, 0),
        bind: None,
    };
    move_bytes(&send, Some(&to.receives[0].pieces));
    receive(state, target, &send, IBV_WC_SUCCESS);
}
