//! Completion events and asynchronous events.

use crate::c::*;
use crate::state::*;
use crate::sys::*;
use std::ffi::{c_int, c_void};

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    // SAFETY: a channel that was handed out.
    let fd = unsafe { (*channel).fd };
    // Outside the lock, because the read may wait.
    while take(fd) {
        let mut state = state();
        let Some(of) = state.channels.get_mut(&(channel as usize)) else { return -1 };
        // The event of a destroyed queue is dropped.
        let Some(at) = of.events.pop_front() else { continue };
        if let Some(of) = state.cqs.get_mut(&at) {
            of.taken += 1;
        }
        let found = at as *mut ibv_cq;
        // SAFETY: the queue is there, and both places are the caller's.
        unsafe {
            cq.write(found);
            cq_context.write((*found).cq_context);
        }
        return 0;
    }
    -1
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_ack_cq_events(cq: *mut ibv_cq, count: u32) {
    let mut state = state();
    match state.cqs.get_mut(&(cq as usize)) {
        Some(of) if of.acknowledged + count <= of.taken => of.acknowledged += count,
        _ => state.misuse("completion events were acknowledged that were not taken"),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_async_event(
    context: *mut ibv_context,
    event: *mut ibv_async_event,
) -> c_int {
    // SAFETY: an opened device.
    let fd = unsafe { (*context).async_fd };
    // Outside the lock, because the read may wait.
    while take(fd) {
        let mut state = state();
        let Some(of) = state.contexts.get_mut(&(context as usize)) else { return -1 };
        // The event of a destroyed queue pair is dropped.
        let Some((event_type, about)) = of.events.pop_front() else { continue };
        let element = match about {
            About::Device => ibv_async_element { port_num: 0 },
            About::Port(port_num) => ibv_async_element { port_num },
            About::Cq(cq) => ibv_async_element { cq: cq as _ },
            About::Qp(qp) => {
                let number = state.qp_number(qp);
                if let Some(qp) = number.and_then(|number| state.qps.get_mut(&number)) {
                    qp.unacknowledged += 1;
                }
                ibv_async_element { qp: qp as _ }
            }
        };
        // SAFETY: the caller's struct.
        unsafe { event.write(ibv_async_event { element, event_type }) };
        return 0;
    }
    -1
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_ack_async_event(event: *mut ibv_async_event) {
    let mut state = state();
    // SAFETY: the caller's struct.
    let event = unsafe { &*event };
    if !is_of_pair(event.event_type) {
        return;
    }
    // SAFETY: the field of these types.
    let number = state.qp_number(unsafe { event.element.qp } as usize);
    match number.and_then(|number| state.qps.get_mut(&number)) {
        Some(qp) if qp.unacknowledged > 0 => qp.unacknowledged -= 1,
        _ => state.misuse("an asynchronous event was acknowledged that was not taken"),
    }
    ACKNOWLEDGED.notify_all();
}

fn is_of_pair(event_type: u32) -> bool {
    matches!(
        event_type,
        IBV_EVENT_QP_FATAL
            | IBV_EVENT_QP_REQ_ERR
            | IBV_EVENT_QP_ACCESS_ERR
            | IBV_EVENT_COMM_EST
            | IBV_EVENT_SQ_DRAINED
            | IBV_EVENT_PATH_MIG
            | IBV_EVENT_PATH_MIG_ERR
            | IBV_EVENT_QP_LAST_WQE_REACHED
    )
}

/// Queues an event for one context of the device.
pub fn tell(state: &mut State, context: usize, event_type: u32, about: About) {
    if let Some(context) = state.contexts.get_mut(&context) {
        context.events.push_back((event_type, about));
        context.counter.add();
    }
}

/// Queues an event for all contexts of the device.
pub fn tell_contexts(state: &mut State, device: usize, event_type: u32, about: About) {
    let contexts: Vec<usize> =
        state.contexts.iter().filter(|(_, of)| of.device == device).map(|(at, _)| *at).collect();
    for context in contexts {
        tell(state, context, event_type, about);
    }
}

/// Makes an event of the script. A fatal event of a queue pair moves it to the error state first.
pub fn on_demand(state: &mut State, event_type: u32, qp: Option<u32>, port: c_int, device: usize) {
    match qp {
        Some(number) => {
            let (context, handle) = (state.qps[&number].context, state.qps[&number].handle);
            if matches!(event_type, IBV_EVENT_QP_FATAL | IBV_EVENT_QP_REQ_ERR | IBV_EVENT_QP_ACCESS_ERR) {
                crate::wire::put_into_error(state, number);
            }
            if event_type == IBV_EVENT_CQ_ERR {
                let cq = state.qps[&number].cqs[0];
                tell(state, context, event_type, About::Cq(cq));
            } else {
                tell(state, context, event_type, About::Qp(handle));
            }
        }
        None => tell_contexts(state, device, event_type, About::Port(port)),
    }
}

/// Removes the device: its calls fail, and its descriptors hang up. Posted requests are flushed and
/// an event reports it, unless the device ends `silently`: then neither happens, and later posts
/// never complete.
pub fn remove(state: &mut State, device: usize, silently: bool) {
    let of = &mut state.devices[device];
    (of.removed, of.silent) = (true, silently);
    if !silently {
        let pairs: Vec<u32> =
            state.qps.iter().filter(|(_, qp)| qp.device == device).map(|(n, _)| *n).collect();
        for number in pairs {
            crate::wire::put_into_error(state, number);
        }
        tell_contexts(state, device, IBV_EVENT_DEVICE_FATAL, About::Device);
    }
    let contexts: Vec<usize> =
        state.contexts.iter().filter(|(_, of)| of.device == device).map(|(at, _)| *at).collect();
    for at in contexts {
        if let Some(context) = state.contexts.get_mut(&at) {
            context.counter.hang_up();
        }
        state.channels.values_mut().filter(|of| of.context == at).for_each(|of| of.counter.hang_up());
    }
}
