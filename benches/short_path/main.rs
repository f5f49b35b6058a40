//! What the short path of a tensor can cost: a prototype in two processes, measured in turns with
//! bare references.
//!
//! `cargo bench --bench short_path -- [SECONDS] [PART OF A NAME]`. With `UCX_PERFTEST` set to the
//! program of UCX, `tag_lat` over shared memory runs in the same turns.
//!
//! The prototype has the records of 64 bytes, windows of value cells, credit, loans, step words and
//! pools of the design of edge windows. It has no general code: no names, no timeouts of its own,
//! no peers that come and go. Its figures are lower bounds for a complete implementation.
//!
//! Each row stands between two measurements of a bare cache line, because the distance of the two
//! CPUs changes on virtual machines. Rows with a line below 75 ns are `near`, above 120 ns `far`.
//! Nothing is left out: the last columns count the turns between the two, and those in which the
//! scheduler took a CPU away.

#![allow(unsafe_code, reason = "the prototype has a memory layout and a ring of its own")]

mod exchange;
mod link;
mod node;
mod pool;
mod process;
mod reference;
mod report;

use exchange::{Batches, PingPong, Receive, Timed};
use process::{Process, preemptions};
use reference::Ucx;
use report::{Run, Runs};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const KIB: u32 = 1024;
const MIB: u32 = 1024 * KIB;
/// Seconds that a run may take.
const LIMIT: u32 = 60;
/// How long to wait for a quiet machine before a turn.
const QUIET: Duration = Duration::from_secs(2);

enum Work {
    Line,
    Ring,
    Memcpy(u32),
    /// Bytes and landings.
    Pull(u32, usize),
    PingPong(PingPong),
    Batches(Batches),
    Ucx(u32),
}

struct Row {
    name: String,
    /// Bytes of a value.
    bytes: u32,
    work: Work,
}

/// Rounds of a chunk and chunks of a row, so that a row takes some milliseconds.
fn length(bytes: u32) -> (u32, u32) {
    match bytes {
        0..=32 => (100, 60),
        33..=4096 => (20, 100),
        4097..=65_536 => (5, 100),
        65_537..=1_048_576 => (1, 60),
        _ => (1, 8),
    }
}

fn ping_pong(name: &str, bytes: u32, edges: u32, receive: Receive, timed: Timed) -> Row {
    let (rounds, chunks) = length(bytes);
    let work = Work::PingPong(PingPong { bytes, edges, receive, timed, lazy_loans: false, rounds, chunks });
    Row { name: name.to_owned(), bytes, work }
}

fn lazy(mut row: Row) -> Row {
    if let Work::PingPong(ping_pong) = &mut row.work {
        ping_pong.lazy_loans = true;
    }
    row
}

fn rows() -> Vec<Row> {
    use Receive::{Borrow, Fresh, Into};
    use Timed::{Everything, Exchange};
    let mut rows = vec![Row { name: "bare ring of 32 slots".into(), bytes: 8, work: Work::Ring }];
    rows.extend([8, 4 * KIB, 64 * KIB, MIB, 16 * MIB].map(|bytes| {
        let name = format!("UCX tag_lat {bytes} B");
        Row { name, bytes, work: Work::Ucx(bytes) }
    }));
    for bytes in [4 * KIB, 64 * KIB, MIB, 16 * MIB] {
        let name = format!("memcpy {bytes} B, warm");
        rows.push(Row { name, bytes, work: Work::Memcpy(bytes) });
        let all_landings: &[usize] = if bytes > MIB { &[1] } else { &[1, 16] };
        for &landings in all_landings {
            let name = format!("bare pull {bytes} B, {landings} landings");
            rows.push(Row { name, bytes, work: Work::Pull(bytes, landings) });
        }
    }
    rows.extend([
        ping_pong("8 B fresh", 8, 1, Fresh(0), Exchange),
        ping_pong("8 B fresh, everything", 8, 1, Fresh(0), Everything),
        ping_pong("8 B fresh, 16 kept, everything", 8, 1, Fresh(16), Everything),
        ping_pong("8 B into 16", 8, 1, Into(16), Exchange),
        ping_pong("8 B into 16, everything", 8, 1, Into(16), Everything),
        ping_pong("32 B fresh, everything", 32, 1, Fresh(0), Everything),
        ping_pong("8 B, 1,000 edges, everything", 8, 1000, Fresh(0), Everything),
    ]);
    for (bytes, size) in [(4 * KIB, "4 KiB"), (64 * KIB, "64 KiB"), (MIB, "1 MiB")] {
        for (name, receive) in
            [("fresh", Fresh(0)), ("fresh, 16 kept", Fresh(16)), ("into 1", Into(1)), ("into 16", Into(16))]
        {
            rows.push(ping_pong(&format!("{size} {name}"), bytes, 1, receive, Exchange));
        }
    }
    rows.extend([
        ping_pong("16 MiB fresh", 16 * MIB, 1, Fresh(0), Exchange),
        ping_pong("64 KiB borrowed", 64 * KIB, 1, Borrow(false), Exchange),
        ping_pong("64 KiB borrowed, pages read", 64 * KIB, 1, Borrow(true), Exchange),
    ]);
    rows.extend([
        lazy(ping_pong("4 KiB fresh, lazy loans", 4 * KIB, 1, Fresh(0), Exchange)),
        lazy(ping_pong("64 KiB borrowed, lazy loans", 64 * KIB, 1, Borrow(false), Exchange)),
        lazy(ping_pong("64 KiB borrowed, pages read, lazy", 64 * KIB, 1, Borrow(true), Exchange)),
    ]);
    rows.extend([32, 256].map(|slots| {
        let work = Work::Batches(Batches { edges: 10_000, slots, chunks: 10 });
        Row { name: format!("batch of 10,000, {slots} slots"), bytes: 8, work }
    }));
    rows
}

fn main() {
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    let seconds = arguments.next().map_or(60, |seconds| seconds.parse().expect("a number of seconds"));
    let (start, limit) = (Instant::now(), Duration::from_secs(seconds));
    let part = arguments.next().unwrap_or_default();
    let rows: Vec<Row> = rows().into_iter().filter(|row| row.name.contains(&part)).collect();
    let mut process = Process::pair();
    let ucx = std::env::var("UCX_PERFTEST").ok().map(|program| Ucx { program, cpus: process.cpus });
    let mut results: Vec<Runs> =
        rows.iter().map(|row| Runs { name: row.name.clone(), bytes: row.bytes, runs: Vec::new() }).collect();
    let (mut turns, mut loaded) = (0, 0);
    while process.decide(start.elapsed() < limit) {
        turns += 1;
        if process.side == 0 {
            loaded += usize::from(!wait_for_quiet());
        }
        for (row, result) in rows.iter().zip(&mut results) {
            result.runs.push(turn(&mut process, &row.work, ucx.as_ref()));
        }
    }
    if process.side == 0 {
        println!("{turns} turns, {loaded} of them on a loaded machine");
        println!("large pages map {} of {} MiB", process::large_pages() >> 20, (2 * process::SEGMENT) >> 20);
        println!("clock: {} ns, taken off where an exchange is timed by itself", report::clock_cost());
        let of_kind = |is: fn(&Work) -> bool| {
            let pairs = rows.iter().zip(&results).filter(|(row, _)| is(&row.work));
            pairs.map(|(_, result)| result).collect::<Vec<_>>()
        };
        let references = [
            ("UCX tag_lat", of_kind(|work| matches!(work, Work::Ucx(_)))),
            ("memcpy on one thread", of_kind(|work| matches!(work, Work::Memcpy(_)))),
            ("bare pull into one landing", of_kind(|work| matches!(work, Work::Pull(_, 1)))),
        ];
        report::print(&results, &references);
    }
    process.end();
}

/// A row between two lines. `None` if it gave no figure.
fn turn(process: &mut Process, work: &Work, ucx: Option<&Ucx>) -> Option<Run> {
    let (before, _) = run(process, &Work::Line, ucx)?;
    let result = run(process, work, ucx);
    let (after, _) = run(process, &Work::Line, ucx)?;
    let (time, preemptions) = result?;
    Some(Run { time, lines: [before, after], preemptions })
}

/// The time of one run, and how often a CPU was taken away meanwhile.
fn run(process: &mut Process, work: &Work, ucx: Option<&Ucx>) -> Option<(f64, u64)> {
    process.clear();
    process.meet();
    let start = preemptions();
    process.limit(LIMIT);
    let time = match *work {
        Work::Line => Some(reference::line(process)),
        Work::Ring => Some(reference::ring(process)),
        Work::Memcpy(bytes) => Some(reference::memcpy(process, bytes as usize)),
        Work::Pull(bytes, landings) => {
            let (rounds, chunks) = length(bytes);
            let rounds = u64::from(rounds * chunks);
            Some(reference::pull(process, bytes as usize, landings, rounds))
        }
        Work::PingPong(row) => Some(row.run(process)),
        Work::Batches(row) => Some(row.run(process)),
        Work::Ucx(bytes) if process.side == 0 => ucx.and_then(|ucx| ucx.tag_lat(bytes as usize)),
        Work::Ucx(_) => Some(0.0),
    };
    process.limit(0);
    let own = preemptions() - start;
    process.own.words.preemptions.0.store(own, Ordering::Relaxed);
    process.meet();
    let peer = process.peer.words.preemptions.0.load(Ordering::Relaxed);
    process.meet();
    Some((time?, own + peer))
}

/// Waits until this process has run alone for a while. Returns whether it has.
fn wait_for_quiet() -> bool {
    let start = Instant::now();
    let mut quiet = 0;
    while start.elapsed() < QUIET {
        std::thread::sleep(Duration::from_millis(20));
        let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let running = load.split_whitespace().nth(3).and_then(|tasks| tasks.split('/').next());
        quiet = if running == Some("1") { quiet + 1 } else { 0 };
        if quiet == 5 {
            return true;
        }
    }
    false
}
