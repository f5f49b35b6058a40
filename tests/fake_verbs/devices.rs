//! Devices, contexts, ports and GIDs.

use crate::c::*;
use crate::state::*;
use crate::sys::*;
use std::ffi::{c_char, c_int};

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    let mut state = state();
    if let Some(errno) = state.fault_of_any("get_device_list") {
        set_errno(errno);
        return std::ptr::null_mut();
    }
    let present = state.devices.iter().filter(|device| !device.removed);
    let mut list: Vec<*mut ibv_device> = present.map(|device| device.handle as _).collect();
    // SAFETY: null or the caller's.
    if let Some(count) = unsafe { count.as_mut() } {
        *count = list.len() as c_int;
    }
    list.push(std::ptr::null_mut());
    let length = list.len();
    let list = Box::into_raw(list.into_boxed_slice()).cast::<*mut ibv_device>();
    state.lists.insert(list as usize, length);
    list
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ibv_device) {
    let mut state = state();
    match state.lists.remove(&(list as usize)) {
        // SAFETY: a list of `ibv_get_device_list`, of that length.
        Some(length) => drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(list, length)) }),
        None => state.misuse("a device list was freed that there is not"),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_guid(device: *mut ibv_device) -> u64 {
    let state = state();
    state.devices.iter().find(|d| d.handle == device as usize).map_or(0, |d| d.guid.to_be())
}

#[cfg(not(without_optional))]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_index(device: *mut ibv_device) -> c_int {
    state().devices.iter().position(|d| d.handle == device as usize).map_or(-1, |at| at as c_int)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    let mut state = state();
    let at = state.devices.iter().position(|d| d.handle == device as usize).expect("a device of the list");
    if let Some(errno) = state.fault("open_device", at) {
        set_errno(errno);
        return std::ptr::null_mut();
    }
    let of = &state.devices[at];
    let counter = Counter::new();
    let mut around: verbs_context = zeroed();
    around.sz = if of.old_context { 0 } else { size_of::<verbs_context>() };
    around.query_port = Some(query_port);
    if of.thread_domains {
        around.alloc_td = Some(crate::objects::alloc_td);
        around.dealloc_td = Some(crate::objects::dealloc_td);
        around.alloc_parent_domain = Some(crate::objects::alloc_parent_domain);
    }
    let context = &mut around.context;
    context.device = device;
    context.async_fd = counter.fd;
    context.cmd_fd = -1;
    context.num_comp_vectors = of.vectors;
    context.abi_compat = if of.old_context { std::ptr::null_mut() } else { usize::MAX as _ };
    context.ops.alloc_mw = Some(crate::windows::alloc_mw);
    context.ops.dealloc_mw = Some(crate::windows::dealloc_mw);
    context.ops.poll_cq = Some(crate::work::poll_cq);
    context.ops.req_notify_cq = Some(crate::work::req_notify_cq);
    context.ops.post_send = Some(crate::work::post_send);
    context.ops.post_recv = Some(crate::work::post_recv);
    let line = format!("open_device name={}", of.name);
    state.log.push(line);
    // SAFETY: inside what was just made.
    let handle = unsafe { &raw mut (*hand_out(around)).context };
    state.contexts.insert(handle as usize, Context { device: at, counter, events: Default::default() });
    crate::engine::start(&mut state);
    handle
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_close_device(context: *mut ibv_context) -> c_int {
    let mut state = state();
    let at = context as usize;
    let in_use = state.pds.values().any(|pd| pd.context == at)
        || state.channels.values().any(|channel| channel.context == at)
        || state.cqs.values().any(|cq| cq.context == at);
    if in_use {
        state.misuse("a device was closed of which something is left");
        return EBUSY;
    }
    if state.contexts.remove(&at).is_none() {
        state.misuse("a device was closed that is not open");
        return EINVAL;
    }
    let around = context.wrapping_byte_sub(std::mem::offset_of!(verbs_context, context));
    // SAFETY: handed out by `ibv_open_device`, and it was still open.
    unsafe { take_back(around.cast::<verbs_context>()) };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int {
    let mut state = state();
    let at = state.device_of(context as usize);
    if let Some(errno) = state.fault("query_device", at) {
        return errno;
    }
    let of = &state.devices[at];
    let mut told: ibv_device_attr = zeroed();
    told.node_guid = of.guid.to_be();
    told.max_mr_size = u64::MAX;
    told.max_qp = of.max_qp;
    told.max_cq = of.max_cq;
    told.max_mr = of.max_mr;
    told.max_pd = 1 << 17;
    told.max_mw = of.max_mw;
    told.max_qp_wr = of.max_qp_wr;
    told.device_cap_flags = of.caps;
    told.max_sge = of.max_sge;
    told.max_sge_rd = of.max_sge;
    told.max_cqe = of.max_cqe;
    told.max_qp_rd_atom = of.max_qp_rd_atom;
    told.max_qp_init_rd_atom = of.max_qp_init_rd_atom;
    told.max_pkeys = of.ports.iter().map(|port| port.pkeys).max().unwrap_or(1);
    told.phys_port_cnt = of.ports.len() as u8;
    // SAFETY: the caller's struct.
    unsafe { attr.write(told) };
    0
}

unsafe extern "C" fn query_port(
    context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
    len: usize,
) -> c_int {
    assert!(len <= size_of::<ibv_port_attr>());
    let mut state = state();
    let at = state.device_of(context as usize);
    if let Some(errno) = state.fault("query_port", at) {
        return errno;
    }
    let Some(of) = state.devices[at].ports.get(usize::from(port).wrapping_sub(1)) else { return EINVAL };
    let told = ibv_port_attr {
        state: of.state,
        max_mtu: IBV_MTU_4096,
        active_mtu: of.active_mtu,
        gid_tbl_len: of.gid_len as c_int,
        max_msg_sz: of.max_msg_sz,
        pkey_tbl_len: of.pkeys,
        lid: of.lid,
        active_width: of.width,
        active_speed: of.speed,
        phys_state: if of.state == IBV_PORT_ACTIVE { 5 } else { 3 },
        link_layer: of.link_layer,
        flags: of.flags,
        ..ibv_port_attr::default()
    };
    // SAFETY: the caller says how much of the struct there is, and that is not more than ours.
    unsafe { std::ptr::copy_nonoverlapping((&raw const told).cast::<u8>(), attr.cast::<u8>(), len) };
    0
}

/// The exported symbol, which fills the fields of the first version of the struct.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_port(
    context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
) -> c_int {
    // SAFETY: as the caller vouches.
    unsafe { query_port(context, port, attr, std::mem::offset_of!(ibv_port_attr, port_cap_flags2)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_gid(
    context: *mut ibv_context,
    port: u8,
    index: c_int,
    gid: *mut ibv_gid,
) -> c_int {
    let state = state();
    let of = &state.devices[state.device_of(context as usize)];
    let Some(of) = of.ports.get(usize::from(port).wrapping_sub(1)) else { return -1 };
    if index < 0 || index as u32 >= of.gid_len {
        return -1;
    }
    let raw = of.gids.get(&(index as u32)).map_or([0; 16], |(raw, _)| *raw);
    // SAFETY: the caller's struct.
    unsafe { gid.write(ibv_gid { raw }) };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_pkey(
    context: *mut ibv_context,
    port: u8,
    index: c_int,
    pkey: *mut u16,
) -> c_int {
    let state = state();
    let of = &state.devices[state.device_of(context as usize)];
    let Some(of) = of.ports.get(usize::from(port).wrapping_sub(1)) else { return -1 };
    if index < 0 || index >= c_int::from(of.pkeys) {
        return -1;
    }
    // SAFETY: the caller's integer.
    unsafe { pkey.write(0xFFFFu16.to_be()) };
    0
}

#[cfg(not(without_optional))]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _ibv_query_gid_ex(
    context: *mut ibv_context,
    port: u32,
    index: u32,
    entry: *mut ibv_gid_entry,
    flags: u32,
    size: usize,
) -> c_int {
    assert_eq!((flags, size), (0, size_of::<ibv_gid_entry>()));
    let state = state();
    let of = &state.devices[state.device_of(context as usize)];
    let Some(of) = of.ports.get((port as usize).wrapping_sub(1)) else { return EINVAL };
    if index >= of.gid_len {
        return EINVAL;
    }
    let Some((raw, gid_type)) = of.gids.get(&index) else { return ENODATA };
    let gid = ibv_gid { raw: *raw };
    // SAFETY: the caller's struct.
    unsafe {
        entry.write(ibv_gid_entry {
            gid,
            gid_index: index,
            port_num: port,
            gid_type: *gid_type,
            ndev_ifindex: 0,
        })
    };
    0
}

#[cfg(not(without_optional))]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _ibv_query_gid_table(
    context: *mut ibv_context,
    entries: *mut ibv_gid_entry,
    room: usize,
    flags: u32,
    size: usize,
) -> isize {
    assert_eq!((flags, size), (0, size_of::<ibv_gid_entry>()));
    let state = state();
    let of = &state.devices[state.device_of(context as usize)];
    let mut count = 0;
    for (port, (index, (raw, gid_type))) in
        of.ports.iter().enumerate().flat_map(|(at, port)| port.gids.iter().map(move |gid| (at + 1, gid)))
    {
        if count == room {
            return -(EINVAL as isize);
        }
        let gid = ibv_gid { raw: *raw };
        let told = ibv_gid_entry {
            gid,
            gid_index: *index,
            port_num: port as u32,
            gid_type: *gid_type,
            ndev_ifindex: 0,
        };
        // SAFETY: the caller has room for so many.
        unsafe { entries.add(count).write(told) };
        count += 1;
    }
    count as isize
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_wc_status_str(_status: u32) -> *const c_char {
    c"a status of the fake".as_ptr()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_event_type_str(_event: u32) -> *const c_char {
    c"an event of the fake".as_ptr()
}
