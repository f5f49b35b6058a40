//! The first process: starts the second, measures, reports.

use super::options::PerfOptions;
use super::report::{Reference, Report, Sized};
use super::rounds::{Rounds, Setup, start};
use super::stats::{Samples, median};
use crate::cli::CliError;
use crate::cli::reference::{CacheLine, Copy, Side, Ticks};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::fs::File;
use std::io::{BufReader, Write};
use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

/// The largest size whose reference is a copy as well.
const BULK: usize = 64 << 10;

/// Measures and prints.
pub fn run(options: &PerfOptions) -> Result<(), CliError> {
    let cores = options.check()?;
    let mut report = Report::open(options, cores)?;
    let line = line_file()?;
    let cluster = cluster()?;
    let mut other = Other::start(options, cores[1], &cluster, &line)?;
    let measured = measure(options, cores[0], &cluster, &line, &mut other, &mut report);
    match measured {
        Ok(()) => report.finish(),
        Err(error) => Err(other.explain(error)),
    }
}

fn measure(
    options: &PerfOptions,
    core: usize,
    cluster: &str,
    line: &File,
    other: &mut Other,
    report: &mut Report,
) -> Result<(), CliError> {
    let ticks = Ticks::calibrate();
    let largest = options.pool / 8;
    let setup = Setup { side: Side::First, core, depth: options.depth, pool: options.pool, cluster, largest };
    let mut rounds = start(options.test, &setup, &mut other.talk)?;
    let mut line = CacheLine::map(line).map_err(CliError::failed)?;
    report.begin(&rounds.pages(), ticks.name());
    for bytes in &options.sizes {
        other.order(&format!("size {bytes}"))?;
        rounds.size(*bytes)?;
        let warmup = options.warmup.max(1);
        let warm = ours(other, rounds.as_mut(), warmup, &ticks)?;
        let per_turn = match options.duration {
            None => options.iterations.div_ceil(options.turns),
            Some(span) => {
                let round = (warm.quantile(0.5) * 2.0).max(1.0);
                ((span.as_nanos() as f64 / round) as u64 / options.turns).max(1)
            }
        };
        let sized = turns(options, *bytes, per_turn, other, rounds.as_mut(), &mut line, &ticks)?;
        report.add(sized);
    }
    Ok(())
}

/// Ours and the references, A B A B.
fn turns(
    options: &PerfOptions,
    bytes: usize,
    per_turn: u64,
    other: &mut Other,
    rounds: &mut dyn Rounds,
    line: &mut CacheLine,
    ticks: &Ticks,
) -> Result<Sized, CliError> {
    let mut all = Samples::new();
    let mut copy = (bytes >= BULK).then(|| Copy::new(bytes));
    let (mut lines, mut line_ratios) = (Vec::new(), Vec::new());
    let (mut copies, mut copy_ratios) = (Vec::new(), Vec::new());
    for _ in 0..options.turns {
        let turn = timed(other, rounds, per_turn, ticks, &mut all)?;
        let bare = bare_line(other, line, per_turn.clamp(1000, 100_000), ticks)?;
        lines.push(bare);
        line_ratios.push(turn / bare);
        if let Some(copy) = &mut copy {
            let bare = copy.median_ns(9);
            copies.push(bare);
            copy_ratios.push(turn / bare);
        }
    }
    let mut references = vec![reference("cache_line", bytes, &mut lines, &mut line_ratios)];
    if copy.is_some() {
        references.push(reference("memcpy", bytes, &mut copies, &mut copy_ratios));
    }
    Ok(Sized { bytes, samples: all, references: references.into_iter().flatten().collect() })
}

fn reference(name: &'static str, bytes: usize, figures: &mut [f64], ratios: &mut [f64]) -> Option<Reference> {
    let (p50_ns, ..) = median(figures)?;
    let (ratio, least, most) = median(ratios)?;
    Some(Reference { name, bytes, p50_ns, ratio, least, most })
}

fn ours(other: &mut Other, rounds: &mut dyn Rounds, count: u64, ticks: &Ticks) -> Result<Samples, CliError> {
    let mut samples = Samples::new();
    timed(other, rounds, count, ticks, &mut samples)?;
    Ok(samples)
}

/// Does `count` rounds, adds each one-way time, and returns the median of this turn.
fn timed(
    other: &mut Other,
    rounds: &mut dyn Rounds,
    count: u64,
    ticks: &Ticks,
    all: &mut Samples,
) -> Result<f64, CliError> {
    other.order(&format!("rounds {count}"))?;
    let mut turn = Samples::new();
    for _ in 0..count {
        rounds.prepare()?;
        let from = ticks.now();
        rounds.round()?;
        let one_way = ticks.ns(from, ticks.now()) / 2.0;
        turn.add(one_way);
        all.add(one_way);
    }
    Ok(turn.quantile(0.5))
}

fn bare_line(other: &mut Other, line: &mut CacheLine, count: u64, ticks: &Ticks) -> Result<f64, CliError> {
    other.order(&format!("line {count}"))?;
    let mut samples = Samples::new();
    for _ in 0..count {
        let from = ticks.now();
        if line.round(Side::First, || other.is_alive()).is_none() {
            return Err(CliError::Failed("the second process is gone".into()));
        }
        samples.add(ticks.ns(from, ticks.now()) / 2.0);
    }
    Ok(samples.quantile(0.5))
}

/// A file of anonymous memory for the reference's cache line.
fn line_file() -> Result<File, CliError> {
    let file = memfd_create("tensorwire-perf", MemfdFlags::CLOEXEC).map_err(CliError::failed)?;
    ftruncate(&file, CacheLine::len()).map_err(CliError::failed)?;
    Ok(file.into())
}

/// Two free ports of the loopback interface.
fn cluster() -> Result<String, CliError> {
    let listen = || TcpListener::bind("127.0.0.1:0").and_then(|socket| Ok((socket.local_addr()?, socket)));
    let ((first, _held), (second, _also)) =
        (listen().map_err(CliError::failed)?, listen().map_err(CliError::failed)?);
    Ok(format!("w={first},{second}"))
}

/// The second process; ended when this is dropped.
struct Other {
    child: Child,
    talk: (BufReader<ChildStdout>, ChildStdin),
    began: Instant,
}

impl Other {
    fn start(options: &PerfOptions, core: usize, cluster: &str, line: &File) -> Result<Self, CliError> {
        let program = std::env::current_exe().map_err(CliError::failed)?;
        let path = format!("/proc/{}/fd/{}", std::process::id(), line.as_raw_fd());
        let mut child = Command::new(program)
            .args(["perf-peer", options.test.name(), "--core", &core.to_string()])
            .args(["--depth", &options.depth.to_string(), "--pool", &options.pool.to_string()])
            .args(["--cluster", cluster, "--line", &path])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| CliError::Failed(format!("the second process can't be started: {error}")))?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(CliError::Failed("the second process has no pipes".into()));
        };
        Ok(Other { child, talk: (BufReader::new(stdout), stdin), began: Instant::now() })
    }

    fn order(&mut self, order: &str) -> Result<(), CliError> {
        let sent = writeln!(self.talk.1, "{order}").and_then(|()| self.talk.1.flush());
        sent.map_err(|_| CliError::Failed("the second process does not listen any more".into()))
    }

    fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// The error, with what became of the second process.
    fn explain(&mut self, error: CliError) -> CliError {
        // A process that has just failed needs a moment to end.
        let end = Instant::now() + std::time::Duration::from_millis(500);
        while self.is_alive() && Instant::now() < end {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        match (error, self.child.try_wait()) {
            (CliError::Failed(why), Ok(Some(status))) if !status.success() => CliError::Failed(format!(
                "{why}; the second process ended after {:.1?} with {status}",
                self.began.elapsed()
            )),
            (error, _) => error,
        }
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // It may have ended by itself; either way it is reaped.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
