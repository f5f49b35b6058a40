//! The calls that are inline functions of libibverbs' header: no symbol of the library, but a jump
//! through the opened device's table into its driver. They are the whole data path.

use super::constants::IBV_MW_TYPE_2;
use super::device::{
    ibv_context, ibv_parent_domain_init_attr, ibv_port_attr, ibv_td, ibv_td_init_attr, verbs_context,
};
use super::queue::{ibv_cq, ibv_mw, ibv_pd, ibv_qp, ibv_recv_wr, ibv_send_wr, ibv_wc};
use std::ffi::c_int;
use std::mem::offset_of;

/// Posts a list of requests on the send queue (`ibv_post_send(3)`). Returns 0 or an errno; then
/// `bad` is the first request that was not posted.
///
/// # Safety
/// `qp` is a queue pair of the library that no other thread posts on meanwhile. `wr` is a list of
/// requests whose pieces of memory stay as they are until their completion. Inline pieces stay
/// until this function returns.
#[inline]
pub unsafe fn ibv_post_send(qp: *mut ibv_qp, wr: *mut ibv_send_wr, bad: &mut *mut ibv_send_wr) -> c_int {
    // SAFETY: the caller guarantees a live queue pair, whose context the library keeps alive.
    match unsafe { (*(*qp).context).ops.post_send } {
        // SAFETY: as the caller vouches.
        Some(post) => unsafe { post(qp, wr, bad) },
        None => libc::EOPNOTSUPP,
    }
}

/// Posts a list of requests on the receive queue (`ibv_post_recv(3)`). Returns 0 or an errno; then
/// `bad` is the first request that was not posted.
///
/// # Safety
/// As [`ibv_post_send`]; nobody reads or writes the pieces of memory until their completion.
#[inline]
pub unsafe fn ibv_post_recv(qp: *mut ibv_qp, wr: *mut ibv_recv_wr, bad: &mut *mut ibv_recv_wr) -> c_int {
    // SAFETY: as in `ibv_post_send`.
    match unsafe { (*(*qp).context).ops.post_recv } {
        // SAFETY: as the caller vouches.
        Some(post) => unsafe { post(qp, wr, bad) },
        None => libc::EOPNOTSUPP,
    }
}

/// Polls at most `wc.len()` completions (`ibv_poll_cq(3)`). Returns their number, or a negative
/// number.
///
/// # Safety
/// `cq` is a completion queue of the library that no other thread polls meanwhile.
#[inline]
pub unsafe fn ibv_poll_cq(cq: *mut ibv_cq, wc: &mut [ibv_wc]) -> c_int {
    let room = c_int::try_from(wc.len()).unwrap_or(c_int::MAX);
    // SAFETY: the caller guarantees a live queue, whose context the library keeps alive.
    match unsafe { (*(*cq).context).ops.poll_cq } {
        // SAFETY: the caller guarantees a live queue; `room` is at most the length of the slice.
        Some(poll) => unsafe { poll(cq, room, wc.as_mut_ptr()) },
        None => -libc::EOPNOTSUPP,
    }
}

/// Asks for an event on the queue's channel with the next completion (`ibv_req_notify_cq(3)`).
/// Returns 0 or an errno.
///
/// # Safety
/// `cq` is a completion queue of the library, made with a channel.
#[inline]
pub unsafe fn ibv_req_notify_cq(cq: *mut ibv_cq, solicited_only: bool) -> c_int {
    // SAFETY: as in `ibv_poll_cq`.
    match unsafe { (*(*cq).context).ops.req_notify_cq } {
        // SAFETY: as the caller vouches.
        Some(request) => unsafe { request(cq, c_int::from(solicited_only)) },
        None => libc::EOPNOTSUPP,
    }
}

/// Makes a memory window of type 2 (`ibv_alloc_mw(3)`). Null, with `errno`, if the device has no
/// more, or its driver has none at all.
///
/// # Safety
/// `pd` is a protection domain of the library.
pub unsafe fn ibv_alloc_mw(pd: *mut ibv_pd) -> *mut ibv_mw {
    // SAFETY: the caller vouches for the domain, whose context the library keeps alive.
    match unsafe { (*(*pd).context).ops.alloc_mw } {
        // SAFETY: as the caller vouches.
        Some(alloc) => unsafe { alloc(pd, IBV_MW_TYPE_2) },
        None => {
            // SAFETY: the place of this thread's errno.
            unsafe { *libc::__errno_location() = libc::EOPNOTSUPP };
            std::ptr::null_mut()
        }
    }
}

/// Ends a memory window (`ibv_dealloc_mw(3)`). Returns 0 or an errno.
///
/// # Safety
/// `mw` is of [`ibv_alloc_mw`], and is not used afterwards.
pub unsafe fn ibv_dealloc_mw(mw: *mut ibv_mw) -> c_int {
    // SAFETY: the caller vouches for the window, whose context the library keeps alive.
    match unsafe { (*(*mw).context).ops.dealloc_mw } {
        // SAFETY: as the caller vouches.
        Some(dealloc) => unsafe { dealloc(mw) },
        None => libc::EOPNOTSUPP,
    }
}

/// The key with the next value of the eight bits that are the owner's (`ibv_inc_rkey(3)`).
pub fn ibv_inc_rkey(rkey: u32) -> u32 {
    rkey & !0xFF | rkey.wrapping_add(1) & 0xFF
}

/// The extended struct around a context, if the library has the call at offset `from_start` of our
/// [`verbs_context`].
///
/// # Safety
/// `context` is an opened device of the library.
unsafe fn extension(context: *mut ibv_context, from_start: usize) -> Option<*mut verbs_context> {
    // SAFETY: the caller vouches for the context.
    if unsafe { (*context).abi_compat } as usize != usize::MAX {
        return None;
    }
    // A pointer to the part that we know: our struct ends where the library's does.
    let around = context.wrapping_byte_sub(offset_of!(verbs_context, context)).cast::<verbs_context>();
    // SAFETY: with all ones in `abi_compat` the library states that the context is the last field
    // of its `verbs_context`. `sz` is the field before it in each version.
    let size = unsafe { (&raw const (*around).sz).read() };
    (size >= size_of::<verbs_context>() - from_start).then_some(around)
}

/// Queries a port (`ibv_query_port(3)`). Returns 0 or an errno, or `None` if an old library has
/// only the symbol of that name.
///
/// # Safety
/// `context` is an opened device of the library.
pub unsafe fn ibv_query_port(context: *mut ibv_context, port: u8, attr: &mut ibv_port_attr) -> Option<c_int> {
    // SAFETY: the caller vouches for the context.
    let around = unsafe { extension(context, offset_of!(verbs_context, query_port)) }?;
    // SAFETY: `extension` has found the library's struct to be long enough for this field.
    let query = unsafe { (&raw const (*around).query_port).read() }?;
    // SAFETY: the length says how much of the attributes there is.
    Some(unsafe { query(context, port, attr, size_of::<ibv_port_attr>()) })
}

/// Makes a thread domain (`ibv_alloc_td(3)`); `None` if the device has none.
///
/// # Safety
/// `context` is an opened device of the library.
pub unsafe fn ibv_alloc_td(context: *mut ibv_context) -> Option<*mut ibv_td> {
    // SAFETY: the caller vouches for the context.
    let around = unsafe { extension(context, offset_of!(verbs_context, alloc_td)) }?;
    // SAFETY: `extension` has found the library's struct to be long enough for this field.
    let alloc = unsafe { (&raw const (*around).alloc_td).read() }?;
    let mut attr = ibv_td_init_attr::default();
    // SAFETY: an attribute struct without extensions, which the call only reads.
    let domain = unsafe { alloc(context, &mut attr) };
    (!domain.is_null()).then_some(domain)
}

/// Ends a thread domain (`ibv_dealloc_td(3)`). Returns 0 or an errno.
///
/// # Safety
/// `domain` is of [`ibv_alloc_td`], and the parent domains made with it are gone.
pub unsafe fn ibv_dealloc_td(domain: *mut ibv_td) -> c_int {
    // SAFETY: the caller vouches for the domain, which names its device.
    let context = unsafe { (*domain).context };
    // SAFETY: a domain's device is open as long as the domain is there.
    let Some(around) = (unsafe { extension(context, offset_of!(verbs_context, dealloc_td)) }) else {
        return libc::EOPNOTSUPP;
    };
    // SAFETY: `extension` has found the library's struct to be long enough for this field.
    match unsafe { (&raw const (*around).dealloc_td).read() } {
        // SAFETY: as the caller vouches.
        Some(dealloc) => unsafe { dealloc(domain) },
        None => libc::EOPNOTSUPP,
    }
}

/// Makes a parent domain: a stand-in for a protection domain, in which a thread domain spares the
/// driver its locks (`ibv_alloc_parent_domain(3)`); `None` if the device has none. It ends by
/// `ibv_dealloc_pd`.
///
/// # Safety
/// Both domains are of this device, and outlive what is made.
pub unsafe fn ibv_alloc_parent_domain(
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    td: *mut ibv_td,
) -> Option<*mut ibv_pd> {
    // SAFETY: the caller vouches for the context.
    let around = unsafe { extension(context, offset_of!(verbs_context, alloc_parent_domain)) }?;
    // SAFETY: `extension` has found the library's struct to be long enough for this field.
    let alloc = unsafe { (&raw const (*around).alloc_parent_domain).read() }?;
    let mut attr = ibv_parent_domain_init_attr {
        pd,
        td,
        comp_mask: 0,
        alloc: None,
        free: None,
        pd_context: std::ptr::null_mut(),
    };
    // SAFETY: an attribute struct without extensions, with domains that the caller vouches for.
    let domain = unsafe { alloc(context, &mut attr) };
    (!domain.is_null()).then_some(domain)
}
