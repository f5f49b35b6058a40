//! Posting and polling.

use crate::c::*;
use crate::engine;
use crate::state::*;
use crate::sys::*;
use crate::wire;
use std::ffi::c_int;
use std::sync::MutexGuard;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Hooks at entry and exit of the data path, so that a test can separate the library's calls from
/// ours.
static WATCH: [AtomicPtr<()>; 2] = [const { AtomicPtr::new(null_mut()) }; 2];

/// Has `entered` and `left` called, on the calling thread, around each call that posts, polls or
/// arms.
#[unsafe(no_mangle)]
pub extern "C" fn fake_watch(entered: extern "C" fn(), left: extern "C" fn()) {
    WATCH[0].store(entered as *mut (), Ordering::Release);
    WATCH[1].store(left as *mut (), Ordering::Release);
}

fn tell(at: usize) {
    let watch = WATCH[at].load(Ordering::Acquire);
    if !watch.is_null() {
        // SAFETY: a function of this type, as `fake_watch` has got it.
        unsafe { std::mem::transmute::<*mut (), extern "C" fn()>(watch)() };
    }
}

/// A guard of a call: created first and so dropped last.
pub struct Inside;

impl Inside {
    pub fn enter() -> Self {
        tell(0);
        Inside
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        tell(1);
    }
}

/// A guard that marks a thread domain as in use: one thread at a time may use its queue pairs.
/// Other queue pairs have locks of the driver; see `ibv_alloc_td(3)`.
struct Turn(Option<*const TdHandle>);

impl Turn {
    /// The guard for the thread domain of a queue pair.
    fn take(qp: *mut ibv_qp) -> (Self, MutexGuard<'static, State>) {
        // SAFETY: a queue pair that was handed out.
        let td = unsafe { (*qp.cast::<QpHandle>()).td };
        let turn = Turn((!td.is_null()).then_some(td));
        // SAFETY: a domain is there as long as its queue pairs are.
        let was_busy = turn.0.is_some_and(|td| unsafe { (*td).busy.swap(true, Ordering::AcqRel) });
        let mut state = state();
        if was_busy {
            state.misuse("two threads post at once on queue pairs of one thread domain");
        }
        if state.hold {
            state.held += 1;
            state = RELEASED.wait_while(state, |state| state.hold).expect("a panic ends the process");
            state.held -= 1;
        }
        (turn, state)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(td) = self.0 {
            // SAFETY: as above; the queue pair is in use.
            unsafe { (*td).busy.store(false, Ordering::Release) };
        }
    }
}

/// The scatter-gather list of a request.
unsafe fn pieces(list: *mut ibv_sge, count: c_int) -> Vec<ibv_sge> {
    // SAFETY: the caller's array of so many.
    (0..count.max(0) as usize).map(|k| unsafe { *list.add(k) }).collect()
}

pub unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    mut request: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    let _inside = Inside::enter();
    let (_turn, mut state) = Turn::take(qp);
    // SAFETY: a queue pair that was handed out.
    let number = unsafe { (*qp).qp_num };
    if let Some(of) = state.qps.get_mut(&number) {
        of.counts.send_calls += 1;
    }
    // SAFETY: a list of the caller's, that ends with null.
    while let Some(wr) = unsafe { request.as_ref() } {
        let device = state.qps.get(&number).map(|of| of.device);
        let fault = state.fault_on("post_send", device);
        // SAFETY: the request's array; inline bytes are there until this returns.
        let errno = fault.unwrap_or_else(|| unsafe { post_one(&mut state, number, wr) });
        if errno != 0 {
            // SAFETY: the caller's place.
            unsafe { bad.write(request) };
            return errno;
        }
        request = wr.next;
    }
    engine::run(&mut state, number);
    0
}

/// The requests that a queue pair takes.
const OPCODES: [u32; 6] = [
    IBV_WR_RDMA_WRITE,
    IBV_WR_RDMA_WRITE_WITH_IMM,
    IBV_WR_SEND,
    IBV_WR_RDMA_READ,
    IBV_WR_LOCAL_INV,
    IBV_WR_BIND_MW,
];

/// Whether a request sends nothing.
fn is_local(opcode: u32) -> bool {
    matches!(opcode, IBV_WR_LOCAL_INV | IBV_WR_BIND_MW)
}

unsafe fn post_one(state: &mut State, number: u32, wr: &ibv_send_wr) -> c_int {
    // SAFETY: as the caller vouches.
    let pieces = unsafe { pieces(wr.sg_list, wr.num_sge) };
    let len: u64 = pieces.iter().map(|piece| u64::from(piece.length)).sum();
    let is_inline = wr.send_flags & IBV_SEND_INLINE != 0;
    let Some(qp) = state.qps.get(&number) else { return EINVAL };
    let port = &state.devices[qp.device].ports[usize::from(qp.attr.port_num).saturating_sub(1)];
    let wrong = if !matches!(qp.state, IBV_QPS_RTS | IBV_QPS_ERR) {
        Some((format!("a request was posted in state {}", qp.state), EINVAL))
    } else if qp.sends_used >= qp.cap.max_send_wr {
        Some((format!("more than the {} requests that the send queue holds", qp.cap.max_send_wr), ENOMEM))
    } else if pieces.len() > qp.cap.max_send_sge as usize {
        Some((format!("{} pieces of memory in one request", pieces.len()), EINVAL))
    } else if is_inline && len > u64::from(qp.cap.max_inline_data) {
        Some((format!("{len} bytes inline, where {} were granted", qp.cap.max_inline_data), EINVAL))
    } else if is_inline && wr.opcode == IBV_WR_RDMA_READ {
        Some(("a read into inline bytes".into(), EINVAL))
    } else if !OPCODES.contains(&wr.opcode) {
        Some((format!("opcode {}", wr.opcode), EINVAL))
    } else if is_local(wr.opcode) && (!pieces.is_empty() || is_inline) {
        Some(("a request for a window with memory of its own".into(), EINVAL))
    } else if wr.opcode == IBV_WR_BIND_MW && wr.imm_data != 0 {
        Some(("a bind with an immediate".into(), EINVAL))
    } else if len > u64::from(port.max_msg_sz) {
        Some((format!("a request of {len} bytes, where the port carries {}", port.max_msg_sz), EINVAL))
    } else {
        None
    };
    if let Some((what, errno)) = wrong {
        state.misuse(what);
        return errno;
    }
    // SAFETY: the bytes are there until the call returns.
    let inline =
        is_inline.then(|| pieces.iter().flat_map(|piece| unsafe { bytes(piece) }.to_vec()).collect());
    if state.trace {
        state.log.push(format!(
            "post_send qp={number} opcode={} len={len} signaled={} inline={}",
            wr.opcode,
            u8::from(wr.send_flags & IBV_SEND_SIGNALED != 0),
            u8::from(is_inline)
        ));
    }
    // SAFETY: every bit pattern is good for both integers.
    let rdma = unsafe { wr.wr.rdma };
    // SAFETY: the caller's window of that request.
    let bind = (wr.opcode == IBV_WR_BIND_MW).then(|| unsafe { crate::windows::taken(&wr.bind_mw) });
    let Some(qp) = state.qps.get_mut(&number) else { return EINVAL };
    qp.sends_used += 1;
    qp.counts.sends += 1;
    qp.counts.signaled += u64::from(wr.send_flags & IBV_SEND_SIGNALED != 0);
    qp.counts.inline += u64::from(is_inline);
    qp.counts.most_used = qp.counts.most_used.max(qp.sends_used);
    qp.sends.push_back(Send {
        wr_id: wr.wr_id,
        opcode: wr.opcode,
        flags: wr.send_flags,
        imm: wr.imm_data,
        pieces,
        inline,
        len,
        remote: (rdma.remote_addr, rdma.rkey),
        bind,
    });
    0
}

/// The bytes of a scatter-gather entry.
pub unsafe fn bytes(piece: &ibv_sge) -> &[u8] {
    if piece.length == 0 {
        return &[];
    }
    // SAFETY: as the caller vouches.
    unsafe { std::slice::from_raw_parts(piece.addr as *const u8, piece.length as usize) }
}

pub unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    mut request: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    let _inside = Inside::enter();
    let (_turn, mut state) = Turn::take(qp);
    // SAFETY: a queue pair that was handed out.
    let number = unsafe { (*qp).qp_num };
    let Some(of) = state.qps.get_mut(&number) else { return EINVAL };
    of.counts.recv_calls += 1;
    // SAFETY: a list of the caller's, that ends with null.
    while let Some(wr) = unsafe { request.as_ref() } {
        // SAFETY: the request's array.
        let pieces = unsafe { pieces(wr.sg_list, wr.num_sge) };
        let device = state.qps.get(&number).map(|of| of.device);
        if let Some(errno) = state.fault_on("post_recv", device) {
            // SAFETY: the caller's place.
            unsafe { bad.write(request) };
            return errno;
        }
        let Some(of) = state.qps.get_mut(&number) else { return EINVAL };
        let wrong = if of.state == IBV_QPS_RESET {
            Some(("a receive was posted in RESET".into(), EINVAL))
        } else if of.receives_used >= of.cap.max_recv_wr {
            Some((format!("more than the {} receives that the queue holds", of.cap.max_recv_wr), ENOMEM))
        } else if pieces.len() > of.cap.max_recv_sge as usize {
            Some((format!("{} pieces of memory in one receive", pieces.len()), EINVAL))
        } else {
            None
        };
        if let Some((what, errno)) = wrong {
            state.misuse(what);
            // SAFETY: the caller's place.
            unsafe { bad.write(request) };
            return errno;
        }
        of.receives_used += 1;
        of.counts.recvs += 1;
        of.receives.push_back(Recv { wr_id: wr.wr_id, pieces });
        request = wr.next;
    }
    if state.qps[&number].state == IBV_QPS_ERR {
        wire::put_into_error(&mut state, number);
    }
    engine::run_all(&mut state);
    0
}

pub unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, room: c_int, to: *mut ibv_wc) -> c_int {
    let _inside = Inside::enter();
    let mut state = state();
    engine::run_all(&mut state);
    let Some(of) = state.cqs.get_mut(&(cq as usize)) else { return -EINVAL };
    if of.overrun {
        return -EIO;
    }
    let count = of.entries.len().min(room.max(0) as usize);
    let taken: Vec<Cqe> = of.entries.drain(..count).collect();
    for (k, cqe) in taken.into_iter().enumerate() {
        if let Some(qp) = state.qps.get_mut(&cqe.wc.qp_num) {
            qp.sends_used -= cqe.frees_sends;
            qp.receives_used -= cqe.frees_receives;
        }
        // SAFETY: the caller has room for so many.
        unsafe { to.add(k).write(cqe.wc) };
    }
    count as c_int
}

pub unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, _solicited_only: c_int) -> c_int {
    let _inside = Inside::enter();
    let mut state = state();
    let Some(of) = state.cqs.get_mut(&(cq as usize)) else { return EINVAL };
    if of.channel == 0 {
        state.misuse("an event was asked for of a completion queue without a channel");
        return EINVAL;
    }
    of.armed = true;
    0
}
