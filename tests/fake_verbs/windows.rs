//! Memory windows of type 2. Like real drivers, the fake reads the present key out of the caller's
//! struct when a bind is posted. A misuse that crashes some drivers is noted.

use crate::c::*;
use crate::objects::refuse;
use crate::state::*;
use crate::sys::*;
use crate::wire::{Outcome, failed, is_inside};
use std::ffi::c_int;

const TYPE_2: u32 = IBV_DEVICE_MEM_WINDOW_TYPE_2A | IBV_DEVICE_MEM_WINDOW_TYPE_2B;

pub unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, kind: u32) -> *mut ibv_mw {
    let mut state = state();
    let Some(&Pd { context, root, .. }) = state.pds.get(&(pd as usize)) else {
        state.misuse("a window in a domain that there is not");
        return refuse(EINVAL);
    };
    if root != pd as usize || kind != IBV_MW_TYPE_2 {
        state.misuse(format!("a window of type {kind}, or in a parent domain: not every device has that"));
    }
    let device = state.device_of(context);
    if state.devices[device].caps & TYPE_2 == 0 {
        return refuse(EOPNOTSUPP);
    }
    if let Some(errno) = state.fault("alloc_mw", device) {
        return refuse(errno);
    }
    let most = state.devices[device].max_mw as usize;
    let of_device = |mw: &&Mw| mw.device == device;
    if state.mws.len() >= most && state.mws.values().filter(of_device).count() >= most {
        return refuse(ENOMEM);
    }
    let rkey = state.fresh() << 8;
    let mut mw: ibv_mw = zeroed();
    (mw.context, mw.pd, mw.rkey) = (context as _, pd, rkey);
    let handle = hand_out(mw);
    state.mws.insert(handle as usize, Mw { pd: root, device, rkey, bound: None });
    state.mw_of_key.insert(rkey >> 8, handle as usize);
    state.log.push(format!("alloc_mw rkey={rkey}"));
    handle
}

pub unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    let mut state = state();
    if let Some(errno) = state.fault_of_any("dealloc_mw") {
        return errno;
    }
    let Some(of) = state.mws.remove(&(mw as usize)) else {
        state.misuse("a window was ended that there is not");
        return EINVAL;
    };
    state.mw_of_key.remove(&(of.rkey >> 8));
    state.log.push(format!("dealloc_mw rkey={}", of.rkey));
    // SAFETY: handed out above, and it was still there.
    let context = unsafe { take_back(mw) }.context;
    state.result_of_end(context as usize)
}

/// What windows are bound to.
pub fn bound(state: &State) -> impl Iterator<Item = &BoundMw> {
    state.mws.values().filter_map(|mw| mw.bound.as_ref())
}

/// The fields of a bind.
pub unsafe fn taken(request: &ibv_wr_bind) -> Bind {
    let info = &request.bind_info;
    Bind {
        mw: request.mw as usize,
        // SAFETY: the caller's window, handed out above.
        present: unsafe { (*request.mw).rkey },
        rkey: request.rkey,
        mr: info.mr as usize,
        start: info.addr,
        len: info.length,
        access: info.mw_access_flags as c_int,
    }
}

/// Carries out a bind.
pub fn bind(state: &mut State, qp: u32, send: &Send) -> Outcome {
    let Some(bind) = &send.bind else { return failed(IBV_WC_MW_BIND_ERR) };
    if let Err(why) = may_bind(state, qp, bind) {
        state.misuse(format!("a bind of a window {why}"));
        return failed(IBV_WC_MW_BIND_ERR);
    }
    let Bind { rkey, mr, start, len, access, .. } = *bind;
    if let Some(mw) = state.mws.get_mut(&bind.mw) {
        mw.rkey = rkey;
        mw.bound = Some(BoundMw { qp, mr, start, len, access });
    }
    if state.trace {
        state.log.push(format!("bind_mw qp={qp} rkey={rkey} len={len} access={access}"));
    }
    Outcome::Done
}

fn may_bind(state: &State, qp: u32, bind: &Bind) -> Result<(), &'static str> {
    let (Some(mw), Some(mr)) = (state.mws.get(&bind.mw), state.mrs.get(&bind.mr)) else {
        return Err("that there is not, or to a region that there is not");
    };
    let root = state.pds[&state.qps[&qp].pd].root;
    let rights = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    if mw.rkey != bind.present || bind.rkey & !0xFF != mw.rkey & !0xFF {
        Err("whose key is another one")
    } else if mw.bound.is_some() {
        Err("that is bound")
    } else if mw.pd != root || mr.pd != root {
        Err("of another domain")
    } else if mr.access & IBV_ACCESS_MW_BIND == 0 || mr.access & IBV_ACCESS_LOCAL_WRITE == 0 {
        Err("to a region without MW_BIND or LOCAL_WRITE")
    } else if bind.len == 0 || !is_inside((mr.start, mr.len), bind.start, bind.len) {
        Err("to no bytes of the region")
    } else if bind.access & !rights != 0 || bind.access & rights == 0 {
        Err("with other rights than to write or read")
    } else {
        Ok(())
    }
}

/// Ends the key of a window.
pub fn invalidate(state: &mut State, send: &Send) -> Outcome {
    let key = send.imm;
    let mw = state.mw_of_key.get(&(key >> 8)).and_then(|handle| state.mws.get_mut(handle));
    let found = mw.filter(|mw| mw.rkey == key && mw.bound.is_some());
    if found.map(|mw| mw.bound = None).is_none() {
        state.misuse("a key was ended that is of no bound window: some drivers crash");
        return failed(IBV_WC_LOC_QP_OP_ERR);
    }
    if state.trace {
        state.log.push(format!("local_inv rkey={key}"));
    }
    Outcome::Done
}

/// Whether a window lets a request through that comes on a queue pair.
pub fn leave(state: &State, to: &Qp, rkey: u32, needed: c_int, addr: u64, len: u64) -> bool {
    let mw = state.mw_of_key.get(&(rkey >> 8)).and_then(|handle| state.mws.get(handle));
    let Some(mw) = mw.filter(|mw| mw.rkey == rkey) else { return false };
    mw.bound.as_ref().is_some_and(|bound| {
        state.qps.get(&bound.qp).is_some_and(|qp| qp.handle == to.handle)
            && bound.access & needed != 0
            && is_inside((bound.start, bound.len), addr, len)
    })
}
