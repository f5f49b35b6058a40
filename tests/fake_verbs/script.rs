//! Commands, one per line: `word name=value name=value ...`. They come from the file that
//! `FAKE_VERBS_SCRIPT` names, and from [`fake_command`]. Answers are text.

use crate::events;
use crate::state::*;
use crate::sys::*;
use std::collections::{BTreeMap, HashMap};
use std::ffi::{c_char, c_int};
use std::fmt::Write;

/// Objects of a kind that a device can have, unless the script says less.
const MANY: u64 = 1 << 17;
/// Completions of one queue.
const MANY_ENTRIES: u64 = 1 << 20;

/// The state that a process starts with.
pub fn from_environment() -> State {
    let mut state = State { next: 0x100, ..State::default() };
    if let Some(path) = std::env::var_os("FAKE_VERBS_SCRIPT") {
        let script = std::fs::read_to_string(&path).expect("FAKE_VERBS_SCRIPT names a file");
        for line in script.lines() {
            run(&mut state, line);
        }
    }
    state
}

/// Runs a command, and writes at most `room` bytes of its answer to `answer`. Returns the answer's
/// length.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_command(command: *const u8, len: usize, answer: *mut u8, room: usize) -> usize {
    // SAFETY: the caller says how long both are.
    let command = unsafe { std::slice::from_raw_parts(command, len) };
    let mut state = state();
    let said: Vec<String> =
        String::from_utf8_lossy(command).lines().map(|line| run(&mut state, line)).collect();
    let said = said.concat();
    // SAFETY: as above.
    unsafe { std::ptr::copy_nonoverlapping(said.as_ptr(), answer, said.len().min(room)) };
    said.len()
}

struct Words<'a>(HashMap<&'a str, &'a str>);

impl<'a> Words<'a> {
    fn text(&self, name: &str) -> Option<&'a str> {
        self.0.get(name).copied()
    }

    fn number(&self, name: &str) -> Option<u64> {
        let text = self.text(name)?;
        let parsed = match text.strip_prefix("0x") {
            Some(hex) => u64::from_str_radix(hex, 16),
            None => text.parse(),
        };
        Some(parsed.unwrap_or_else(|_| panic!("{name}={text} is no number")))
    }

    fn or(&self, name: &str, other: u64) -> u64 {
        self.number(name).unwrap_or(other)
    }
}

fn run(state: &mut State, line: &str) -> String {
    let mut words = line.split_whitespace();
    let Some(command) = words.next().filter(|word| !word.starts_with('#')) else { return String::new() };
    let words = Words(
        words.map(|w| w.split_once('=').unwrap_or_else(|| panic!("{line}: {w} is no name=value"))).collect(),
    );
    match command {
        "device" => device(state, &words),
        "port" => port(state, &words),
        "gid" => gid(state, &words),
        "fault" => state.faults.push(Fault {
            call: words.text("call").expect("call=").into(),
            device: words.text("device").map(Into::into),
            errno: words.or("errno", 22) as c_int,
            minus_one: words.or("minus_one", 0) != 0,
            skip: words.or("skip", 0) as u32,
            times: words.number("times").map_or(u32::MAX, |times| times as u32),
        }),
        "fail_request" => state.failing.push(Failing {
            skip: words.or("skip", 0) as u32,
            status: words.or("status", 12) as u32,
            vendor: words.or("vendor", 0) as u32,
            opcode: words.number("opcode").map(|opcode| opcode as u32),
            qp: words.number("qp").map(|qp| qp as u32),
        }),
        "event" => events::on_demand(
            state,
            words.or("kind", 0) as u32,
            words.number("qp").map(|qp| qp as u32),
            words.or("port", 1) as c_int,
            named(state, &words),
        ),
        "port_state" => {
            let (at, port) = (named(state, &words), words.or("port", 1) as usize);
            let to = words.or("state", 1) as u32;
            state.devices[at].ports[port - 1].state = to;
            let kind = if to == IBV_PORT_ACTIVE { IBV_EVENT_PORT_ACTIVE } else { IBV_EVENT_PORT_ERR };
            events::tell_contexts(state, at, kind, About::Port(port as c_int));
            crate::engine::run_all(state);
        }
        "move" => {
            let at = named(state, &words);
            move_port(&mut state.devices[at].ports[words.or("port", 1) as usize - 1], &words);
        }
        // What is not named is as without a limit.
        "limits" => {
            let at = named(state, &words);
            state.devices[at].max_qp = words.or("max_qp", MANY) as c_int;
            state.devices[at].max_cq = words.or("max_cq", MANY) as c_int;
            state.devices[at].max_cqe = words.or("max_cqe", MANY_ENTRIES) as c_int;
            state.devices[at].max_mr = words.or("max_mr", MANY) as c_int;
        }
        "remove" => {
            let at = named(state, &words);
            events::remove(state, at, words.or("silently", 0) != 0);
        }
        // Of one device: no packet gets through, though its port is up.
        "cut" if words.text("device").is_some() => {
            let at = named(state, &words);
            let is_cut = words.or("on", 1) != 0;
            state.devices[at].ports.iter_mut().for_each(|port| port.cut = is_cut);
            crate::engine::run_all(state);
        }
        "cut" => {
            state.cut = words.or("on", 1) != 0;
            crate::engine::run_all(state);
        }
        // A message of 16 bytes as from the peer, in two words.
        "forge" => {
            let bytes = [words.or("low", 0), words.or("high", 0)].map(u64::to_le_bytes).concat();
            crate::wire::forge(state, words.or("qp", 0) as u32, bytes);
        }
        "slow" => state.slow = words.or("on", 1) != 0,
        "hold" => {
            state.hold = words.or("on", 1) != 0;
            RELEASED.notify_all();
        }
        "held" => return state.held.to_string(),
        "trace" => state.trace = words.or("on", 1) != 0,
        "clear_log" => state.log.clear(),
        "log" => return state.log.iter().flat_map(|line| [line, "\n"]).collect(),
        "misuses" => return state.misuses.iter().flat_map(|line| [line, "\n"]).collect(),
        "left" => return state.left(),
        "pairs" => return pairs(state),
        _ => panic!("unknown command: {line}"),
    }
    String::new()
}

fn named(state: &State, words: &Words<'_>) -> usize {
    let name = words.text("device");
    let found = state.devices.iter().position(|device| name.is_none_or(|name| device.name == name));
    found.unwrap_or_else(|| panic!("no device {name:?}"))
}

fn device(state: &mut State, words: &Words<'_>) {
    let name = words.text("name").expect("name=");
    let mut handle: ibv_device = zeroed();
    let put = |to: &mut [c_char], text: &str| {
        assert!(text.len() < to.len(), "{text} is too long");
        to.iter_mut().zip(text.bytes()).for_each(|(to, from)| *to = from as _);
    };
    put(&mut handle.name, name);
    put(&mut handle.ibdev_path, words.text("sysfs").unwrap_or_default());
    handle.node_type = words.or("node_type", IBV_NODE_CA as u64) as c_int;
    handle.transport_type = words.or("transport", IBV_TRANSPORT_IB as u64) as c_int;
    let number = |name: &str, other: u64| words.or(name, other);
    state.devices.push(Device {
        name: name.into(),
        guid: 0x0200_0000_0000_0000 | state.devices.len() as u64,
        handle: hand_out(handle) as usize,
        caps: number("caps", 0) as u32,
        max_qp: number("max_qp", MANY) as c_int,
        max_cq: number("max_cq", MANY) as c_int,
        max_mr: number("max_mr", MANY) as c_int,
        max_qp_wr: number("max_qp_wr", 8192) as c_int,
        max_cqe: number("max_cqe", MANY_ENTRIES) as c_int,
        max_sge: number("max_sge", 16) as c_int,
        max_qp_rd_atom: number("max_qp_rd_atom", 16) as c_int,
        max_qp_init_rd_atom: number("max_qp_init_rd_atom", 16) as c_int,
        max_inline: number("max_inline", 256) as u32,
        refuses_silently: number("refuses_silently", 0) != 0,
        max_mw: number("max_mw", 1 << 16) as c_int,
        vectors: number("vectors", 1) as c_int,
        thread_domains: number("thread_domains", 0) != 0,
        old_context: number("old_context", 0) != 0,
        removed: false,
        silent: false,
        ports: Vec::new(),
    });
}

/// A port of the newest device.
fn port(state: &mut State, words: &Words<'_>) {
    let number = |name: &str, other: u64| words.or(name, other);
    state.devices.last_mut().expect("a device").ports.push(PortConfig {
        state: number("state", IBV_PORT_ACTIVE.into()) as u32,
        active_mtu: number("mtu", IBV_MTU_4096.into()) as u32,
        gid_len: number("gid_len", 16) as u32,
        gids: BTreeMap::new(),
        lid: number("lid", 0) as u16,
        link_layer: number("layer", IBV_LINK_LAYER_ETHERNET.into()) as u8,
        flags: number("flags", 0) as u8,
        max_msg_sz: number("max_msg_sz", 1 << 30) as u32,
        pkeys: number("pkeys", 1) as u16,
        speed: number("speed", 32) as u8,
        width: number("width", 2) as u8,
        cut: false,
    });
}

/// A GID of the newest port: `gid=` has the 16 bytes in hexadecimal digits.
fn gid(state: &mut State, words: &Words<'_>) {
    let text = words.text("gid").expect("gid=");
    let value = u128::from_str_radix(text, 16).expect("hexadecimal digits");
    let (index, kind) = (words.or("index", 0) as u32, words.or("type", IBV_GID_TYPE_ROCE_V2.into()) as u32);
    let port = state.devices.last_mut().and_then(|device| device.ports.last_mut()).expect("a port");
    assert!(index < port.gid_len, "the table has {} places", port.gid_len);
    port.gids.insert(index, (value.to_be_bytes(), kind));
}

/// Changes the LID or MTU of a port, or moves a GID to another index (removes it without `gid_to`).
fn move_port(port: &mut PortConfig, words: &Words<'_>) {
    port.lid = words.or("lid", port.lid.into()) as u16;
    port.active_mtu = words.or("mtu", port.active_mtu.into()) as u32;
    if let Some(entry) = words.number("gid_from").and_then(|from| port.gids.remove(&(from as u32)))
        && let Some(to) = words.number("gid_to")
    {
        port.gids.insert(to as u32, entry);
    }
}

fn pairs(state: &State) -> String {
    let mut text = String::new();
    let mut pairs: Vec<_> = state.qps.iter().collect();
    pairs.sort_unstable_by_key(|(number, _)| **number);
    for (number, qp) in pairs {
        let Counts { send_calls, sends, signaled, inline, recv_calls, recvs, most_used } = qp.counts;
        writeln!(
            text,
            "pair qp={number} device={} peer={} state={} send_calls={send_calls} sends={sends} \
                signaled={signaled} inline={inline} \
             recv_calls={recv_calls} recvs={recvs} most_used={most_used} posted={}",
            state.devices[qp.device].name,
            qp.attr.dest_qp_num,
            qp.state,
            qp.receives.len()
        )
        .expect("a string takes all");
    }
    text
}
