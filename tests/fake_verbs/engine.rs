//! When requests are carried out: at once when they are posted, or on a slow device one after the other, by a thread of its
//! own, as real devices do. One that the other side is not ready for waits, as long as the queue pair's settings say.

use crate::events::tell;
use crate::state::*;
use crate::sys::*;
use crate::wire::*;
use std::time::{Duration, Instant};

/// Between two steps of a slow device.
const PACE: Duration = Duration::from_micros(20);

/// Carries out what can be, but on a slow device.
pub fn run_all(state: &mut State) {
    for number in waiting(state) {
        run(state, number);
    }
}

fn waiting(state: &State) -> Vec<u32> {
    state.qps.iter().filter(|(_, qp)| !qp.sends.is_empty()).map(|(number, _)| *number).collect()
}

/// Carries out what can be of one queue pair, but on a slow device.
pub fn run(state: &mut State, number: u32) {
    while !state.slow && step(state, number) {}
}

/// Starts the thread of slow devices, if there is none. It ends when no device is open.
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

/// Carries out the first request of a queue pair. Returns whether it did, and another may follow.
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
    if let Some((limit, status)) = patience(&qp.attr, why)
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
            _ => IBV_WC_RDMA_WRITE,
        };
        let wc = ibv_wc { wr_id: send.wr_id, qp_num: number, opcode, ..ibv_wc::default() };
        let cq = qp.cqs[0];
        complete(state, cq, Cqe { wc, frees_sends, frees_receives: 0 });
    }
    true
}

/// How long a stall is borne, and the status after that. 4.096 us x 2^timeout for each try, as long as the specification
/// permits (four times that); and the time that the target asks for.
fn patience(attr: &ibv_qp_attr, why: Stall) -> Option<(Duration, u32)> {
    match why {
        Stall::Silence if attr.timeout == 0 => None,
        Stall::Silence => {
            let each = Duration::from_nanos((4 * 4096) << attr.timeout);
            Some((each * (u32::from(attr.retry_cnt) + 1), IBV_WC_RETRY_EXC_ERR))
        }
        Stall::NotReady if attr.rnr_retry == 7 => None,
        // The target's timer, which is set on both sides to the same. 22 is 20.48 ms; each two codes are twice as long.
        Stall::NotReady => {
            let doubled = u32::from(attr.min_rnr_timer) / 2;
            let each = Duration::from_micros((20_480 << doubled) >> 11);
            Some((each * u32::from(attr.rnr_retry), IBV_WC_RNR_RETRY_EXC_ERR))
        }
    }
}

/// What the script has for this request.
fn fails(state: &mut State, number: u32, send: &Send) -> Option<Outcome> {
    // Once for each request, not for each try.
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
