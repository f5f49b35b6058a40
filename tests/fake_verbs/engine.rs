//! Execution of requests: at the post or, on a slow device, one after the other by a thread, as on
//! real devices. A request for which the target is not ready waits as long as the queue pair
//! permits.

use crate::events::tell;
use crate::state::*;
use crate::sys::*;
use crate::windows;
use crate::wire::*;
use std::time::{Duration, Instant};

/// Pause between two steps of a slow device.
const PACE: Duration = Duration::from_micros(20);

/// Carries out all ready requests, unless the device is slow.
pub fn run_all(state: &mut State) {
    for number in waiting(state) {
        run(state, number);
    }
}

fn waiting(state: &State) -> Vec<u32> {
    state.qps.iter().filter(|(_, qp)| !qp.sends.is_empty()).map(|(number, _)| *number).collect()
}

/// Carries out the ready requests of one queue pair, unless the device is slow.
pub fn run(state: &mut State, number: u32) {
    while !state.slow && step(state, number) {}
}

/// Starts the thread of slow devices, if needed. It ends when no device is open.
pub fn start(state: &mut State) {
    if !state.slow || std::mem::replace(&mut state.working, true) {
        return;
    }
    std::thread::spawn(|| {
        loop {
            std::thread::sleep(PACE);
            let mut state = crate::state::state();
            if state.contexts.is_empty() {
                state.working = false;
                return;
            }
            for number in waiting(&state) {
                step(&mut state, number);
            }
        }
    });
}

/// Carries out the first request of a queue pair. Returns whether another one may follow.
fn step(state: &mut State, number: u32) -> bool {
    let Some(qp) = state.qps.get(&number) else { return false };
    if state.devices[qp.device].silent {
        return false;
    }
    if qp.state == IBV_QPS_ERR {
        put_into_error(state, number);
        return false;
    }
    let Some(send) = qp.sends.front().cloned() else { return false };
    let outcome = match fails(state, number, &send) {
        Some(outcome) => outcome,
        None if send.opcode == IBV_WR_BIND_MW => windows::bind(state, number, &send),
        None if send.opcode == IBV_WR_LOCAL_INV => windows::invalidate(state, &send),
        None => carry_out(state, number, &send),
    };
    match outcome {
        Outcome::Wait(why) => wait(state, number, why),
        Outcome::Done => done(state, number, &send),
        Outcome::Failed { status, vendor, target_event } => {
            let target = state.qps[&number].attr.dest_qp_num;
            fail(state, number, status, vendor);
            if let (Some(event), Some(of)) = (target_event, state.qps.get(&target)) {
                let (context, handle) = (of.context, of.handle);
                put_into_error(state, target);
                tell(state, context, event, About::Qp(handle));
            }
            false
        }
    }
}

fn wait(state: &mut State, number: u32, why: Stall) -> bool {
    let Some(qp) = state.qps.get_mut(&number) else { return false };
    let since = match qp.stalled {
        Some((what, since)) if what == why => since,
        _ => Instant::now(),
    };
    qp.stalled = Some((why, since));
    if let Some((limit, status)) = stall_limit(&qp.attr, why)
        && since.elapsed() >= limit
    {
        fail(state, number, status, 0x81);
    }
    false
}

fn done(state: &mut State, number: u32, send: &Send) -> bool {
    let Some(qp) = state.qps.get_mut(&number) else { return false };
    qp.stalled = None;
    qp.sends.pop_front();
    qp.silent += 1;
    if send.flags & IBV_SEND_SIGNALED != 0 {
        let frees_sends = std::mem::take(&mut qp.silent);
        let opcode = match send.opcode {
            IBV_WR_SEND => IBV_WC_SEND,
            IBV_WR_RDMA_READ => IBV_WC_RDMA_READ,
            IBV_WR_BIND_MW => IBV_WC_BIND_MW,
            IBV_WR_LOCAL_INV => IBV_WC_LOCAL_INV,
            _ => IBV_WC_RDMA_WRITE,
        };
        let wc = ibv_wc { wr_id: send.wr_id, qp_num: number, opcode, ..ibv_wc::default() };
        let cq = qp.cqs[0];
        complete(state, cq, Cqe { wc, frees_sends, frees_receives: 0 });
    }
    true
}

/// The duration of a stall, and the status after it. Each try takes 4.096 us x 2^timeout, times
/// four as the specification permits, or the time that the target asks for.
fn stall_limit(attr: &ibv_qp_attr, why: Stall) -> Option<(Duration, u32)> {
    match why {
        Stall::Silence if attr.timeout == 0 => None,
        Stall::Silence => {
            let each = Duration::from_nanos((4 * 4096) << attr.timeout);
            Some((each * (u32::from(attr.retry_cnt) + 1), IBV_WC_RETRY_EXC_ERR))
        }
        Stall::NotReady if attr.rnr_retry == 7 => None,
        // The target's RNR timer, which both sides set alike. Code 22 is 20.48 ms; two codes more
        // double the time.
        Stall::NotReady => {
            let doubled = u32::from(attr.min_rnr_timer) / 2;
            let each = Duration::from_micros((20_480 << doubled) >> 11);
            Some((each * u32::from(attr.rnr_retry), IBV_WC_RNR_RETRY_EXC_ERR))
        }
    }
}

/// The fault that the script has for this request.
fn fails(state: &mut State, number: u32, send: &Send) -> Option<Outcome> {
    // Counted once for each request, not for each try.
    if state.qps[&number].stalled.is_some() {
        return None;
    }
    let at = state.failing.iter().position(|failing| {
        failing.opcode.is_none_or(|opcode| opcode == send.opcode) && failing.qp.is_none_or(|qp| qp == number)
    })?;
    if state.failing[at].skip > 0 {
        state.failing[at].skip -= 1;
        return None;
    }
    let Failing { status, vendor, .. } = state.failing.remove(at);
    Some(Outcome::Failed { status, vendor, target_event: None })
}
