//! References: a bare cache line, a bare ring, a bare copy, and UCX.

use crate::process::{BARE_RING, OwnWord, PeerWord, Process, SEGMENT, Slot, WORDS, wait_until};
use crate::report::{clock_cost, median};
use std::hint::black_box;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Rounds of a chunk.
const ROUNDS: u64 = 100;
const CHUNKS: u64 = 40;

/// The median of the chunks of a round that is timed with its neighbours.
fn chunks(mut round: impl FnMut(u64)) -> f64 {
    let mut times = Vec::with_capacity(CHUNKS as usize);
    let mut number = 0;
    for chunk in 0..CHUNKS + 4 {
        let start = Instant::now();
        for _ in 0..ROUNDS {
            round(number);
            number += 1;
        }
        if chunk >= 4 {
            times.push(start.elapsed().as_nanos() as f64 / ROUNDS as f64 / 2.0);
        }
    }
    median(times)
}

/// One word that both processes write.
pub fn line(process: &Process) -> f64 {
    let line: &AtomicU64 = process.line;
    let side = process.side as u64;
    line.store(0, Ordering::Relaxed);
    // Both processes have stored 0 before one of them stores more.
    process.set_ready(0);
    process.wait_for_peer(0);
    chunks(|round| {
        if side == 0 {
            line.store(2 * round + 1, Ordering::Release);
            wait_until(|| line.load(Ordering::Acquire) == 2 * round + 2);
        } else {
            wait_until(|| line.load(Ordering::Acquire) == 2 * round + 1);
            line.store(2 * round + 2, Ordering::Release);
        }
    })
}

fn own_slot(process: &Process, round: u64) -> &'static Slot<OwnWord> {
    &process.own.words.bare_ring[round as usize % BARE_RING]
}

fn peer_slot(process: &Process, round: u64) -> &'static Slot<PeerWord> {
    &process.peer.words.bare_ring[round as usize % BARE_RING]
}

/// A sequence word and one word of payload in each slot, and no bookkeeping.
pub fn ring(process: &Process) -> f64 {
    let send = |round: u64| {
        let slot = own_slot(process, round);
        slot.0[1].store(round, Ordering::Relaxed);
        slot.0[0].store(round + 1, Ordering::Release);
    };
    let receive = |round: u64| {
        let slot = peer_slot(process, round);
        wait_until(|| slot.0[0].load(Ordering::Acquire) == round + 1);
        black_box(slot.0[1].load(Ordering::Relaxed));
    };
    chunks(|round| {
        if process.side == 0 {
            send(round);
            receive(round);
        } else {
            receive(round);
            send(round);
        }
    })
}

/// A bare ring, and one copy of a value that the peer has just written, into one of `landings`
/// blocks. Two sources are used in turns.
pub fn pull(process: &Process, bytes: usize, landings: usize, rounds: u64) -> f64 {
    let (own, _) = process.own.values();
    let landing_area = own.wrapping_add((SEGMENT - WORDS) / 2);
    let source = |round: u64| own.wrapping_add(round as usize % 2 * bytes);
    let exchange = |round: u64| {
        let landing = landing_area.wrapping_add(round as usize % landings * bytes);
        let slot = peer_slot(process, round);
        let receive = || {
            wait_until(|| slot.0[0].load(Ordering::Acquire) == round + 1);
            let place = slot.0[1].load(Ordering::Relaxed);
            let from = process.peer.value(place, bytes as u32).expect("a place in the segment");
            // SAFETY: both blocks lie in their segments, and the peer writes its other source next.
            unsafe { std::ptr::copy_nonoverlapping(from, landing, bytes) };
        };
        let send = || {
            own_slot(process, round).0[1].store(process.own.place(source(round)), Ordering::Relaxed);
            own_slot(process, round).0[0].store(round + 1, Ordering::Release);
        };
        if process.side == 0 {
            process.wait_for_peer(round);
            let start = Instant::now();
            send();
            receive();
            start.elapsed().as_nanos() as f64 - clock_cost()
        } else {
            process.set_ready(round);
            receive();
            send();
            0.0
        }
    };
    let mut times = Vec::with_capacity(rounds as usize);
    for round in 0..rounds + rounds / 10 {
        // SAFETY: a block of the own segment, which the peer has read before its last answer.
        unsafe { std::ptr::write_bytes(source(round), round as u8, bytes) };
        let time = exchange(round);
        let landing = landing_area.wrapping_add(round as usize % landings * bytes);
        // SAFETY: as above; only this process uses the landing.
        black_box(unsafe { std::slice::from_raw_parts(landing, bytes) }.iter().fold(0, |a, b| a | b));
        if round >= rounds / 10 {
            times.push(time / 2.0);
        }
    }
    median(times)
}

/// A copy on one thread, of a source that is clean and warm, to one destination.
pub fn memcpy(process: &Process, bytes: usize) -> f64 {
    if process.side == 1 {
        return 0.0;
    }
    let (source, _) = process.own.values();
    let landing = source.wrapping_add((SEGMENT - WORDS) / 2);
    let copies = ((4 << 20) / bytes.max(65_536)).max(1);
    let mut times = Vec::with_capacity(20);
    for chunk in 0..22 {
        let start = Instant::now();
        for _ in 0..copies {
            // SAFETY: both blocks lie in the own segment, which this process alone uses now.
            unsafe { std::ptr::copy_nonoverlapping(black_box(source), black_box(landing), bytes) };
        }
        if chunk >= 2 {
            times.push(start.elapsed().as_nanos() as f64 / copies as f64);
        }
    }
    median(times)
}

/// `ucx_perftest`, a program of UCX, between the CPUs of the two processes.
pub struct Ucx {
    pub program: String,
    pub cpus: [usize; 2],
}

impl Ucx {
    /// The median of `tag_lat` in nanoseconds. `None` if the program gave no figure.
    pub fn tag_lat(&self, bytes: usize) -> Option<f64> {
        let iterations = match bytes {
            0..=16_384 => 50_000,
            16_385..=131_072 => 5_000,
            131_073..=2_097_152 => 500,
            _ => 50,
        };
        let command = |cpu: usize| {
            let mut command = Command::new(&self.program);
            command.env("UCX_TLS", "posix").env("UCX_LOG_LEVEL", "error");
            command.args(["-t", "tag_lat", "-p", "13937", "-c", &cpu.to_string()]);
            command.args(["-s", &bytes.to_string(), "-n", &iterations.to_string()]);
            command.args(["-w", &(iterations / 10).to_string()]);
            command.stdout(Stdio::piped()).stderr(Stdio::null());
            command
        };
        let mut server = command(self.cpus[1]).spawn().ok()?;
        let mut figure = None;
        for _ in 0..20 {
            std::thread::sleep(Duration::from_millis(50));
            let output = command(self.cpus[0]).arg("127.0.0.1").output().ok()?;
            figure = typical(&String::from_utf8_lossy(&output.stdout));
            if figure.is_some() {
                break;
            }
        }
        if figure.is_none() {
            let _ = server.kill();
        }
        let _ = server.wait();
        figure
    }
}

/// The median of the last line, which follows the number of iterations.
fn typical(output: &str) -> Option<f64> {
    let line = output.lines().find_map(|line| line.strip_prefix("Final:"))?;
    line.split_whitespace().nth(1)?.parse::<f64>().ok().map(|microseconds| microseconds * 1000.0)
}
