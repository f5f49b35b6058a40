//! Creation and destruction of domains, regions, channels, queues and queue pairs.

use crate::c::*;
use crate::state::*;
use crate::sys::*;
use std::ffi::{c_int, c_void};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// Refuses a call that creates an object.
pub fn refuse<T>(errno: c_int) -> *mut T {
    set_errno(errno);
    std::ptr::null_mut()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    let mut state = state();
    let device = state.device_of(context as usize);
    if let Some(errno) = state.fault("alloc_pd", device) {
        return refuse(errno);
    }
    let handle = hand_out(ibv_pd { context, handle: 0 });
    let (context, root) = (context as usize, handle as usize);
    state.pds.insert(root, Pd { context, root, td: 0 });
    handle
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    let mut state = state();
    let at = pd as usize;
    let in_use = state.mrs.values().any(|mr| mr.pd == at)
        || state.qps.values().any(|qp| qp.pd == at)
        || state.mws.values().any(|mw| mw.pd == at)
        || state.pds.iter().any(|(other, of)| *other != at && of.root == at);
    if in_use {
        state.misuse("a protection domain was ended that is in use");
        return EBUSY;
    }
    if state.pds.remove(&at).is_none() {
        state.misuse("a protection domain was ended that there is not");
        return EINVAL;
    }
    // SAFETY: handed out above, and it was still there.
    let context = unsafe { take_back(pd) }.context;
    state.result_of_end(context as usize)
}

pub unsafe extern "C" fn alloc_td(context: *mut ibv_context, attr: *mut ibv_td_init_attr) -> *mut ibv_td {
    let mut state = state();
    // SAFETY: the caller's struct.
    if unsafe { (*attr).comp_mask } != 0 {
        state.misuse("a thread domain with extensions");
    }
    let device = state.device_of(context as usize);
    if let Some(errno) = state.fault("alloc_td", device) {
        return refuse(errno);
    }
    let handle = hand_out(TdHandle { td: ibv_td { context }, busy: AtomicBool::new(false) });
    state.tds.insert(handle as usize);
    handle.cast()
}

pub unsafe extern "C" fn dealloc_td(td: *mut ibv_td) -> c_int {
    let mut state = state();
    if state.pds.values().any(|pd| pd.td == td as usize) {
        state.misuse("a thread domain was ended that is in use");
        return EBUSY;
    }
    if !state.tds.remove(&(td as usize)) {
        state.misuse("a thread domain was ended that there is not");
        return EINVAL;
    }
    // SAFETY: handed out above, and it was still there.
    unsafe { take_back(td.cast::<TdHandle>()) };
    0
}

pub unsafe extern "C" fn alloc_parent_domain(
    context: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    let mut state = state();
    // SAFETY: the caller's struct.
    let (root, td, extensions) = unsafe { ((*attr).pd as usize, (*attr).td as usize, (*attr).comp_mask) };
    if extensions != 0 || !state.pds.contains_key(&root) || !state.tds.contains(&td) {
        state.misuse("a parent domain of what there is not");
        return refuse(EINVAL);
    }
    let device = state.device_of(context as usize);
    if let Some(errno) = state.fault("alloc_parent_domain", device) {
        return refuse(errno);
    }
    let handle = hand_out(ibv_pd { context, handle: 0 });
    state.pds.insert(handle as usize, Pd { context: context as usize, root, td });
    state.log.push("alloc_parent_domain".into());
    handle
}

fn register(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    len: usize,
    iova: u64,
    access: c_int,
    call: &str,
) -> *mut ibv_mr {
    let mut state = state();
    let Some(&Pd { context, root, .. }) = state.pds.get(&(pd as usize)) else {
        state.misuse("a region in a domain that there is not");
        return refuse(EINVAL);
    };
    if root != pd as usize {
        state.misuse("a region in a parent domain: not every device has that");
    }
    if iova != addr as u64 {
        state.misuse("a region whose address is not its own");
    }
    const OPTIONAL: c_int = 0x3FF0_0000;
    if call == "reg_mr" && access & OPTIONAL != 0 {
        state.misuse("optional access flags without ibv_reg_mr_iova2: the kernel refuses them");
        return refuse(EINVAL);
    }
    if access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC) != 0
        && access & IBV_ACCESS_LOCAL_WRITE == 0
    {
        state.misuse("a region that peers may write to and this side may not");
        return refuse(EINVAL);
    }
    let device = state.device_of(context);
    let windows = IBV_DEVICE_MEM_WINDOW | IBV_DEVICE_MEM_WINDOW_TYPE_2A | IBV_DEVICE_MEM_WINDOW_TYPE_2B;
    if access & IBV_ACCESS_MW_BIND != 0 && state.devices[device].caps & windows == 0 {
        state.misuse("a region with MW_BIND on a device without memory windows");
        return refuse(EINVAL);
    }
    if let Some(errno) = state.fault("reg_mr", device) {
        return refuse(errno);
    }
    let is_here = |mr: &&Mr| state.pds.get(&mr.pd).is_some_and(|pd| state.device_of(pd.context) == device);
    if state.mrs.values().filter(is_here).count() >= state.devices[device].max_mr as usize {
        return refuse(ENOMEM);
    }
    // lkey and rkey differ, so that a mix-up shows.
    let (lkey, rkey) = (state.fresh() << 8, state.fresh() << 8 | 1);
    let handle = hand_out(ibv_mr { context: context as _, pd, addr, length: len, handle: 0, lkey, rkey });
    let (start, len) = (addr as u64, len as u64);
    state.log.push(format!("{call} len={len} access={access} start={start} rkey={rkey}"));
    state.mrs.insert(handle as usize, Mr { pd: pd as usize, start, len, access, lkey, rkey });
    state.lkeys.insert(lkey, handle as usize);
    state.rkeys.insert(rkey, handle as usize);
    handle
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    len: usize,
    access: c_int,
) -> *mut ibv_mr {
    register(pd, addr, len, addr as u64, access, "reg_mr")
}

#[cfg(not(without_optional))]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    len: usize,
    iova: u64,
    access: u32,
) -> *mut ibv_mr {
    register(pd, addr, len, iova, access as c_int, "reg_mr_iova2")
}

/// The answer to a query about fork: no effect, unless the script has another answer.
#[cfg(not(without_optional))]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_is_fork_initialized() -> c_int {
    state().fault_of_any("is_fork_initialized").unwrap_or(2)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    let mut state = state();
    if let Some(errno) = state.fault_of_any("dereg_mr") {
        return errno;
    }
    if crate::windows::bound(&state).any(|bound| bound.mr == mr as usize) {
        state.misuse("a region was ended to which windows are bound");
        return EINVAL;
    }
    let Some(of) = state.mrs.remove(&(mr as usize)) else {
        state.misuse("a region was ended that there is not");
        return EINVAL;
    };
    state.lkeys.remove(&of.lkey);
    state.rkeys.remove(&of.rkey);
    state.log.push(format!("dereg_mr len={} rkey={}", of.len, of.rkey));
    let names = |pieces: &[ibv_sge]| pieces.iter().any(|piece| piece.lkey == of.lkey);
    let outstanding = state.qps.values().any(|qp| {
        qp.receives.iter().any(|receive| names(&receive.pieces))
            || qp.sends.iter().any(|send| send.inline.is_none() && names(&send.pieces))
    });
    if outstanding {
        state.misuse("a region was ended that outstanding requests name");
    }
    // SAFETY: handed out above, and it was still there.
    let context = unsafe { take_back(mr) }.context;
    state.result_of_end(context as usize)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    let mut state = state();
    let device = state.device_of(context as usize);
    if let Some(errno) = state.fault("create_comp_channel", device) {
        return refuse(errno);
    }
    let counter = Counter::new();
    let handle = hand_out(ibv_comp_channel { context, fd: counter.fd, refcnt: 0 });
    let context = context as usize;
    state.channels.insert(handle as usize, Channel { context, counter, events: Default::default() });
    handle
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    let mut state = state();
    if state.cqs.values().any(|cq| cq.channel == channel as usize) {
        state.misuse("a completion channel was ended that is in use");
        return EBUSY;
    }
    if state.channels.remove(&(channel as usize)).is_none() {
        state.misuse("a completion channel was ended that there is not");
        return EINVAL;
    }
    // SAFETY: handed out above, and it was still there.
    unsafe { take_back(channel) };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_cq(
    context: *mut ibv_context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    vector: c_int,
) -> *mut ibv_cq {
    let mut state = state();
    let device = state.device_of(context as usize);
    if let Some(errno) = state.fault("create_cq", device) {
        return refuse(errno);
    }
    let here = state.cqs.values().filter(|cq| state.device_of(cq.context) == device).count();
    if here >= state.devices[device].max_cq as usize {
        return refuse(ENOMEM);
    }
    let of = &state.devices[device];
    if !(1..=of.max_cqe).contains(&cqe) || !(0..of.vectors).contains(&vector) {
        return refuse(EINVAL);
    }
    let mut cq: ibv_cq = zeroed();
    (cq.context, cq.channel, cq.cq_context, cq.cqe) = (context, channel, cq_context, cqe);
    let handle = hand_out(cq);
    state.log.push(format!("create_cq cqe={cqe} vector={vector}"));
    let made = Cq {
        context: context as usize,
        channel: channel as usize,
        cqe: cqe as usize,
        entries: Default::default(),
        armed: false,
        overrun: false,
        taken: 0,
        acknowledged: 0,
    };
    state.cqs.insert(handle as usize, made);
    handle
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int {
    let mut state = state();
    let at = cq as usize;
    if state.qps.values().any(|qp| qp.cqs.contains(&at)) {
        state.misuse("a completion queue was ended that is in use");
        return EBUSY;
    }
    let Some(of) = state.cqs.remove(&at) else {
        state.misuse("a completion queue was ended that there is not");
        return EINVAL;
    };
    if of.taken != of.acknowledged {
        state.misuse("a completion queue was ended whose events are not acknowledged: that waits for ever");
    }
    if let Some(channel) = state.channels.get_mut(&of.channel) {
        channel.events.retain(|event| *event != at);
    }
    // SAFETY: handed out above, and it was still there.
    let context = unsafe { take_back(cq) }.context;
    state.result_of_end(context as usize)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    let mut state = state();
    // SAFETY: the caller's struct.
    let init = unsafe { &mut *init };
    let Some(&Pd { context, td, .. }) = state.pds.get(&(pd as usize)) else {
        state.misuse("a queue pair in a domain that there is not");
        return refuse(EINVAL);
    };
    let device = state.device_of(context);
    if let Some(errno) = state.fault("create_qp", device) {
        return refuse(errno);
    }
    if state.qps.values().filter(|qp| qp.device == device).count() >= state.devices[device].max_qp as usize {
        return refuse(ENOMEM);
    }
    let (of, cap) = (&state.devices[device], &mut init.cap);
    let fits = |asked: u32, most: c_int| asked <= most as u32;
    if !fits(cap.max_send_wr, of.max_qp_wr)
        || !fits(cap.max_recv_wr, of.max_qp_wr)
        || !fits(cap.max_send_sge, of.max_sge)
        || !fits(cap.max_recv_sge, of.max_sge)
    {
        return refuse(EINVAL);
    }
    if cap.max_inline_data > of.max_inline {
        return if of.refuses_silently { std::ptr::null_mut() } else { refuse(EINVAL) };
    }
    let cap = *cap;
    if init.qp_type != IBV_QPT_RC || init.sq_sig_all != 0 || !init.srq.is_null() {
        state.misuse("a queue pair of a kind that the fabric does not use");
    }
    let cqs = [init.send_cq as usize, init.recv_cq as usize];
    if cqs.iter().any(|cq| state.cqs.get(cq).is_none_or(|cq| cq.context != context)) {
        state.misuse("a queue pair on completion queues that there are not");
        return refuse(EINVAL);
    }
    let number = state.fresh();
    let mut qp: ibv_qp = zeroed();
    qp.context = context as _;
    (qp.qp_context, qp.pd, qp.send_cq, qp.recv_cq) = (init.qp_context, pd, init.send_cq, init.recv_cq);
    (qp.qp_num, qp.state, qp.qp_type) = (number, IBV_QPS_RESET, init.qp_type);
    let handle = hand_out(QpHandle { qp, td: td as *const TdHandle });
    let made = Qp {
        handle: handle as usize,
        context,
        device,
        pd: pd as usize,
        cqs,
        cap,
        state: IBV_QPS_RESET,
        attr: ibv_qp_attr::default(),
        sends: Default::default(),
        receives: Default::default(),
        sends_used: 0,
        receives_used: 0,
        silent: 0,
        stalled: None,
        unacknowledged: 0,
        counts: Counts::default(),
    };
    state.qps.insert(number, made);
    state.log.push(format!(
        "create_qp qp={number} sends={} receives={} inline={} thread_domain={}",
        cap.max_send_wr,
        cap.max_recv_wr,
        cap.max_inline_data,
        u8::from(td != 0)
    ));
    check_room(&mut state, cqs);
    handle.cast()
}

/// Whether the queue pairs of a completion queue could overrun it.
fn check_room(state: &mut State, cqs: [usize; 2]) {
    let others = if cqs[0] == cqs[1] { &cqs[..1] } else { &cqs[..] };
    for &cq in others {
        let sends = state.qps.values().filter(|qp| qp.cqs[0] == cq).map(|qp| qp.cap.max_send_wr);
        let receives = state.qps.values().filter(|qp| qp.cqs[1] == cq).map(|qp| qp.cap.max_recv_wr);
        let most = sends.chain(receives).sum::<u32>() as usize;
        let has = state.cqs[&cq].cqe;
        if most > has {
            state.misuse(format!("a completion queue of {has} can get {most} completions"));
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int {
    let mut state = state();
    let Some(number) = state.qp_number(qp as usize) else {
        state.misuse("a queue pair was ended that there is not");
        return EINVAL;
    };
    if crate::windows::bound(&state).any(|bound| bound.qp == number) {
        state.misuse("a queue pair was ended to which windows are bound");
    }
    if let Some(errno) = state.fault_of_any("destroy_qp") {
        return errno;
    }
    // Events that were not read are dropped.
    let context = state.qps[&number].context;
    if let Some(context) = state.contexts.get_mut(&context) {
        context.events.retain(|(_, about)| *about != About::Qp(qp as usize));
    }
    let timeout = Duration::from_secs(5);
    let outstanding = |state: &mut State| state.qps[&number].unacknowledged > 0;
    let (mut state, waited) =
        ACKNOWLEDGED.wait_timeout_while(state, timeout, outstanding).expect("a panic ends the process");
    if waited.timed_out() {
        state.misuse("a queue pair was ended whose events are not acknowledged: that waits for ever");
    }
    let result = state.qps.remove(&number).map_or(0, |qp| state.result_of_end(qp.context));
    state.log.push(format!("destroy_qp qp={number}"));
    // SAFETY: handed out above, and it was still there.
    unsafe { take_back(qp.cast::<QpHandle>()) };
    result
}
