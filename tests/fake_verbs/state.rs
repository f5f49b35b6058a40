//! The state of the library: the scripted devices, and all objects.

use crate::c::Counter;
use crate::sys::*;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::ffi::c_int;
use std::sync::atomic::AtomicBool;
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard};
use std::time::Instant;

/// A port of the script.
pub struct PortConfig {
    pub state: u32,
    pub active_mtu: u32,
    pub gid_len: u32,
    /// Address and type by index; missing entries are empty.
    pub gids: BTreeMap<u32, ([u8; 16], u32)>,
    pub lid: u16,
    pub link_layer: u8,
    pub flags: u8,
    pub max_msg_sz: u32,
    pub pkeys: u16,
    /// Codes of `ibv_query_port(3)`.
    pub speed: u8,
    pub width: u8,
    /// No packet gets through.
    pub cut: bool,
}

/// A device of the script.
pub struct Device {
    pub handle: usize,
    pub name: String,
    pub guid: u64,
    pub caps: u32,
    /// Queue pairs at a time.
    pub max_qp: c_int,
    /// Completion queues at a time.
    pub max_cq: c_int,
    /// Memory regions at a time.
    pub max_mr: c_int,
    pub max_qp_wr: c_int,
    pub max_cqe: c_int,
    pub max_sge: c_int,
    pub max_qp_rd_atom: c_int,
    pub vectors: c_int,
    pub max_qp_init_rd_atom: c_int,
    /// Inline bytes of a queue pair. A request for more is refused.
    pub max_inline: u32,
    /// Like `bnxt_re`: that refusal has no errno.
    pub refuses_silently: bool,
    /// Memory windows at a time.
    pub max_mw: c_int,
    pub thread_domains: bool,
    /// Like an old library: the context has no extension.
    pub old_context: bool,
    pub removed: bool,
    /// The device was removed silently.
    pub silent: bool,
    pub ports: Vec<PortConfig>,
}

pub struct Context {
    pub device: usize,
    pub counter: Counter,
    pub events: VecDeque<(u32, About)>,
}

/// The object of an asynchronous event.
#[derive(Clone, Copy, PartialEq)]
pub enum About {
    Device,
    Port(c_int),
    Qp(usize),
    Cq(usize),
}

pub struct Pd {
    pub context: usize,
    /// The domain behind a parent domain; otherwise the domain itself.
    pub root: usize,
    /// The thread domain, or 0.
    pub td: usize,
}

pub struct Mr {
    pub pd: usize,
    pub start: u64,
    pub len: u64,
    pub access: c_int,
    pub lkey: u32,
    pub rkey: u32,
}

/// A memory window of type 2.
pub struct Mw {
    /// The domain behind the one that it was made in.
    pub pd: usize,
    pub device: usize,
    pub rkey: u32,
    /// `None` while it is free.
    pub bound: Option<BoundMw>,
}

/// What a memory window lets through: requests that come on one queue pair.
pub struct BoundMw {
    pub qp: u32,
    pub mr: usize,
    pub start: u64,
    pub len: u64,
    pub access: c_int,
}

pub struct Channel {
    pub context: usize,
    pub counter: Counter,
    pub events: VecDeque<usize>,
}

pub struct Cq {
    pub context: usize,
    pub channel: usize,
    pub cqe: usize,
    pub entries: VecDeque<Cqe>,
    pub armed: bool,
    pub overrun: bool,
    pub taken: u32,
    pub acknowledged: u32,
}

/// A completion, and the places that it frees when it is polled.
pub struct Cqe {
    pub wc: ibv_wc,
    pub frees_sends: u32,
    pub frees_receives: u32,
}

#[derive(Clone)]
pub struct Send {
    pub wr_id: u64,
    pub opcode: u32,
    pub flags: u32,
    pub imm: u32,
    pub pieces: Vec<ibv_sge>,
    pub inline: Option<Vec<u8>>,
    pub len: u64,
    pub remote: (u64, u32),
    pub bind: Option<Bind>,
}

/// A request to bind a window, as the driver takes it when it is posted.
#[derive(Clone)]
pub struct Bind {
    pub mw: usize,
    /// The key that the caller's struct had.
    pub present: u32,
    pub rkey: u32,
    pub mr: usize,
    pub start: u64,
    pub len: u64,
    pub access: c_int,
}

pub struct Recv {
    pub wr_id: u64,
    pub pieces: Vec<ibv_sge>,
}

#[derive(Default)]
pub struct Counts {
    pub send_calls: u64,
    pub sends: u64,
    pub signaled: u64,
    pub inline: u64,
    pub recv_calls: u64,
    pub recvs: u64,
    pub most_used: u32,
}

pub struct Qp {
    pub handle: usize,
    pub context: usize,
    pub device: usize,
    pub pd: usize,
    pub cqs: [usize; 2],
    pub cap: ibv_qp_cap,
    pub state: u32,
    pub attr: ibv_qp_attr,
    pub sends: VecDeque<Send>,
    pub receives: VecDeque<Recv>,
    /// Places in use, until a completion that frees them is polled.
    pub sends_used: u32,
    pub receives_used: u32,
    /// Completed requests without a completion of their own.
    pub silent: u32,
    /// The reason and the begin of a stall of the first request.
    pub stalled: Option<(Stall, Instant)>,
    pub unacknowledged: u32,
    pub counts: Counts,
}

#[derive(Clone, Copy, PartialEq)]
pub enum Stall {
    /// There is no answer from the target.
    Silence,
    /// The target has no posted receive.
    NotReady,
}

/// A queue pair as the caller sees it: the public struct comes first.
#[repr(C)]
pub struct QpHandle {
    pub qp: ibv_qp,
    /// Its thread domain, or null.
    pub td: *const TdHandle,
}

/// A thread domain as the caller sees it: the public struct comes first.
#[repr(C)]
pub struct TdHandle {
    pub td: ibv_td,
    /// A thread is posting on one of its queue pairs, without a lock of the driver.
    pub busy: AtomicBool,
}

pub struct Fault {
    pub call: String,
    pub device: Option<String>,
    pub errno: c_int,
    /// Like some drivers: the call returns -1 and sets `errno`.
    pub minus_one: bool,
    pub skip: u32,
    /// Number of failures; `u32::MAX` for ever.
    pub times: u32,
}

/// A scripted failure of a request.
pub struct Failing {
    pub skip: u32,
    pub status: u32,
    pub vendor: u32,
    pub opcode: Option<u32>,
    pub qp: Option<u32>,
}

#[derive(Default)]
pub struct State {
    pub devices: Vec<Device>,
    pub lists: HashMap<usize, usize>,
    pub contexts: HashMap<usize, Context>,
    pub pds: HashMap<usize, Pd>,
    pub tds: HashSet<usize>,
    pub mrs: HashMap<usize, Mr>,
    pub mws: HashMap<usize, Mw>,
    /// The window of each key without its low byte, which alone changes.
    pub mw_of_key: HashMap<u32, usize>,
    pub lkeys: HashMap<u32, usize>,
    pub rkeys: HashMap<u32, usize>,
    pub channels: HashMap<usize, Channel>,
    pub cqs: HashMap<usize, Cq>,
    pub qps: HashMap<u32, Qp>,
    pub next: u32,
    pub faults: Vec<Fault>,
    pub failing: Vec<Failing>,
    /// The network is cut.
    pub cut: bool,
    /// A thread carries requests out, one after the other.
    pub slow: bool,
    /// Whether that thread runs.
    pub working: bool,
    /// Holds posting threads where a driver writes to the device.
    pub hold: bool,
    /// The number of held threads.
    pub held: u32,
    /// Logs every posted request.
    pub trace: bool,
    pub log: Vec<String>,
    pub misuses: Vec<String>,
}

static STATE: LazyLock<Mutex<State>> = LazyLock::new(|| Mutex::new(crate::script::from_environment()));

/// Notified when an asynchronous event was acknowledged.
pub static ACKNOWLEDGED: Condvar = Condvar::new();

/// Notified when the hold ends.
pub static RELEASED: Condvar = Condvar::new();

pub fn state() -> MutexGuard<'static, State> {
    STATE.lock().expect("a panic ends the process")
}

impl State {
    pub fn misuse(&mut self, what: impl Into<String>) {
        let what = what.into();
        self.log.push(format!("misuse {what}"));
        self.misuses.push(what);
    }

    /// A fresh number.
    pub fn fresh(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    pub fn device_of(&self, context: usize) -> usize {
        self.contexts[&context].device
    }

    /// What a call returns that ends an object of a context. As in libibverbs, the kernel has ended
    /// the objects of a device that is removed, and such calls fail.
    pub fn result_of_end(&self, context: usize) -> c_int {
        if self.devices[self.device_of(context)].removed { crate::c::EIO } else { 0 }
    }

    /// The scripted errno of this call on a device, if any.
    pub fn fault(&mut self, call: &str, device: usize) -> Option<c_int> {
        if self.devices[device].removed {
            return Some(crate::c::EIO);
        }
        let name = &self.devices[device].name;
        due(&mut self.faults, |fault| fault.call == call && fault.device.as_ref().is_none_or(|d| d == name))
    }

    /// The scripted errno of this call, on any device or on this one, if any.
    pub fn fault_on(&mut self, call: &str, device: Option<usize>) -> Option<c_int> {
        let name = device.map(|device| &self.devices[device].name);
        due(&mut self.faults, |fault| {
            fault.call == call && fault.device.as_ref().is_none_or(|d| Some(d) == name)
        })
    }

    /// The scripted errno of a call without a device, if any.
    pub fn fault_of_any(&mut self, call: &str) -> Option<c_int> {
        due(&mut self.faults, |fault| fault.call == call)
    }

    pub fn qp_number(&self, handle: usize) -> Option<u32> {
        self.qps.iter().find(|(_, qp)| qp.handle == handle).map(|(number, _)| *number)
    }

    /// The remaining objects, by kind.
    pub fn left(&self) -> String {
        let counts = [
            ("lists", self.lists.len()),
            ("contexts", self.contexts.len()),
            ("domains", self.pds.len()),
            ("thread_domains", self.tds.len()),
            ("regions", self.mrs.len()),
            ("windows", self.mws.len()),
            ("channels", self.channels.len()),
            ("queues", self.cqs.len()),
            ("pairs", self.qps.len()),
        ];
        let left = counts.iter().filter(|(_, count)| *count > 0);
        left.map(|(kind, count)| format!("{kind}={count}")).collect::<Vec<_>>().join(" ")
    }
}

/// The return value of the first fault that fits, if its turn has come.
fn due(faults: &mut [Fault], fits: impl Fn(&Fault) -> bool) -> Option<c_int> {
    let fault = faults.iter_mut().find(|fault| fault.times > 0 && fits(fault))?;
    if fault.skip > 0 {
        fault.skip -= 1;
        return None;
    }
    fault.times = if fault.times == u32::MAX { u32::MAX } else { fault.times - 1 };
    if fault.minus_one {
        crate::c::set_errno(fault.errno);
        return Some(-1);
    }
    Some(fault.errno)
}

/// A zeroed struct of the bindings.
pub fn zeroed<T>() -> T {
    // SAFETY: all structs that this is used for are integers, pointers and optional functions.
    unsafe { std::mem::MaybeUninit::zeroed().assume_init() }
}

/// Hands a struct to the caller.
pub fn hand_out<T>(value: T) -> *mut T {
    Box::into_raw(Box::new(value))
}

/// Takes a struct back.
///
/// # Safety
/// The pointer came from [`hand_out`], and the caller has no other copy in use.
pub unsafe fn take_back<T>(pointer: *mut T) -> Box<T> {
    // SAFETY: as the caller vouches.
    unsafe { Box::from_raw(pointer) }
}
