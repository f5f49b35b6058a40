//! `tensorwire perf compare`: ours and the installed peers in turns, as one table of ratios.
//!
//! Each run is a process of its own, ours too. A peer that hangs is killed, and no process of ours
//! spins while a peer runs. The bare cache line runs before and after each run.

mod job;
mod parse;
mod peers;
mod report;
mod rows;
mod svg;
#[cfg(test)]
mod tests;

use self::job::{free_port, quoted, run_pair};
use self::parse::OwnReport;
use self::peers::{Call, Conditions, Peer};
use self::report::{CompareReport, PeerOutcome};
use self::rows::{BORROWED, CALLS, Measure, OURS, TurnFigure};
use super::cores::{Cores, Here, siblings};
use super::options::{MIN_TURNS, RunOptions};
use super::report::ReportFile;
use crate::error::{CliError, print, say};
use crate::signals;
use clap::builder::PossibleValuesParser;
use clap::{Args, value_parser};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::Duration;
use tempfile::TempDir;
use tensorwire::Profile;

/// Payloads by default, in bytes.
const SIZES: [usize; 4] = [8, 4 << 10, 64 << 10, 1 << 20];
/// Bytes one way of a run by default, and the numbers of round trips between which it stays.
const VOLUME: u64 = 256 << 20;
const ITERATIONS: RangeInclusive<u64> = 100..=20_000;
/// How long a run of ours may take.
const OWN_TIMEOUT: Duration = Duration::from_secs(600);
/// Unmeasured round trips of a run by default; never more than the measured ones.
const WARMUP: u64 = 1000;

/// Options of `perf compare`.
#[derive(Args, Clone, Debug)]
pub struct CompareOptions {
    /// What is compared
    #[arg(
        long, value_enum, value_delimiter = ',',
        default_values_t = [Measure::Latency, Measure::Bandwidth]
    )]
    measures: Vec<Measure>,
    /// Which peers run
    #[arg(
        long, value_enum, value_delimiter = ',',
        default_values_t = [
            Peer::UcxPosix, Peer::Ucx, Peer::UcxPut, Peer::Iceoryx2, Peer::UcxTcp, Peer::Perftest
        ]
    )]
    peers: Vec<Peer>,
    /// UCX's ucx_perftest [default: the variable UCX_PERFTEST, else the one on PATH]
    #[arg(long, value_name = "PATH")]
    ucx: Option<PathBuf>,
    /// iceoryx2's benchmark-publish-subscribe [default: the variable ICEORYX2_BENCHMARK, else the
    /// one on PATH]
    #[arg(long, value_name = "PATH")]
    iceoryx2: Option<PathBuf>,
    /// Seconds that a run of a peer may take; then it is killed, and the peer is left out
    #[arg(
        long, value_name = "SECONDS", default_value_t = 60,
        value_parser = value_parser!(u64).range(1..=86_400)
    )]
    timeout: u64,
    /// A profile of settings for our latency
    #[arg(
        long, value_name = "NAME",
        value_parser = PossibleValuesParser::new(Profile::ALL.map(Profile::name))
    )]
    profile: Option<String>,
    /// The RDMA device for perftest and ours [default: the only active one for ours, and perftest's
    /// first]
    #[arg(long, short = 'd', value_name = "NAME")]
    ib_dev: Option<String>,
    /// Index into the device's GID table for perftest and ours
    #[arg(long, short = 'x', value_name = "INDEX")]
    gid_index: Option<u8>,
    /// Also draw the figures into this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// Compares, prints the table, and writes the files.
pub fn run(options: &CompareOptions, run: &RunOptions) -> Result<(), CliError> {
    check(run)?;
    let cores = Cores::choose(Here::Both, run.cores, tensorwire::process_cpus(), siblings)?;
    let file = |option, path: &Option<PathBuf>| {
        path.as_deref().map(|path| ReportFile::probe(option, path)).transpose()
    };
    let (json, svg) = (file("--json", &run.json)?, file("--svg", &options.svg)?);
    let program = std::env::current_exe();
    let program = program.map_err(|error| CliError::failed("looking for this program", error))?;
    let found = options.peers.iter().map(|&peer| (peer, peer.find(options.given(peer)))).collect();
    let folder = scratch()?;
    remove_at_signals(folder.path())?;
    let (failed, figures) = (Vec::new(), Vec::new());
    let tied_by = Some(program.clone());
    let mut comparison = CompareRun { options, run, cores, program, tied_by, found, folder, failed, figures };
    print(&comparison.report().header())?;
    let measured = comparison.measure();
    // A failure leaves the figures of the runs before it.
    let written = write(&comparison.report(), json, svg);
    measured.and(written)
}

/// Prints the table, and writes the files.
fn write(report: &CompareReport, json: Option<ReportFile>, svg: Option<ReportFile>) -> Result<(), CliError> {
    print(&report.table())?;
    if let Some(file) = json {
        file.write(&report.to_json()?)?;
    }
    if let Some(file) = svg {
        file.write(&report.to_svg())?;
    }
    Ok(())
}

fn check(run: &RunOptions) -> Result<(), CliError> {
    if run.duration.is_some() {
        let why = "--duration: the peers count round trips; use --iterations instead";
        return Err(CliError::Usage(why.into()));
    }
    if run.unpinned {
        let why = "--unpinned: a comparison is of two pinned cores; --cores names them";
        return Err(CliError::Usage(why.into()));
    }
    if run.turns < MIN_TURNS {
        let why = format!(
            "--turns: {} is not in {MIN_TURNS}..=1000: fewer say nothing about the spread",
            run.turns
        );
        return Err(CliError::Usage(why));
    }
    Ok(())
}

impl CompareOptions {
    /// The program of the peer that the command line names.
    fn given(&self, peer: Peer) -> Option<&Path> {
        match peer {
            Peer::UcxPosix | Peer::Ucx | Peer::UcxPut | Peer::UcxTcp => self.ucx.as_deref(),
            Peer::Iceoryx2 => self.iceoryx2.as_deref(),
            Peer::Perftest => None,
        }
    }
}

/// A folder for the output of the runs.
fn scratch() -> Result<TempDir, CliError> {
    let folder = tempfile::Builder::new().prefix("tensorwire-compare-").tempdir();
    let place = std::env::temp_dir();
    folder.map_err(|error| CliError::failed(format!("making a folder in {}", place.display()), error))
}

/// Removes the folder before a signal ends this process. Its jobs end with it.
fn remove_at_signals(folder: &Path) -> Result<(), CliError> {
    let failed = |error: io::Error| CliError::failed("waiting for signals", error);
    let handled = signals::not_ignored(&[SIGHUP, SIGINT, SIGQUIT, SIGTERM]);
    let mut signals = Signals::new(handled).map_err(failed)?;
    let folder = folder.to_owned();
    let wait = move || {
        for signal in signals.forever() {
            // A job may make a file meanwhile.
            let _ = (0..3).any(|_| std::fs::remove_dir_all(&folder).is_ok());
            let _ = signal_hook::low_level::emulate_default_handler(signal);
        }
    };
    // It ends with this process.
    let _: JoinHandle<()> = std::thread::Builder::new().spawn(wait).map_err(failed)?;
    Ok(())
}

/// What is measured in a turn.
#[derive(Clone, Copy)]
struct TurnSubject {
    measure: Measure,
    fabric: &'static str,
    bytes: usize,
    turn: u32,
}

impl TurnSubject {
    fn figure(self, name: &str, value: f64, line_ns: [f64; 2]) -> TurnFigure {
        let TurnSubject { measure, fabric, bytes, turn } = self;
        TurnFigure { measure, fabric, name: name.to_owned(), bytes, turn, value, line_ns }
    }
}

/// A comparison under way.
struct CompareRun<'a> {
    options: &'a CompareOptions,
    run: &'a RunOptions,
    cores: Cores,
    /// The path of `tensorwire` itself.
    program: PathBuf,
    /// What starts the jobs, so that they end with this process: `tensorwire` itself.
    tied_by: Option<PathBuf>,
    /// Each peer with its program, or with the reason why it is left out.
    found: Vec<(Peer, Result<PathBuf, String>)>,
    folder: TempDir,
    /// Fabrics on which a run of ours has failed.
    failed: Vec<&'static str>,
    figures: Vec<TurnFigure>,
}

impl CompareRun<'_> {
    /// Measures everything. A fabric on which a run of ours fails is left out from then on, except
    /// shared memory, which every host has.
    fn measure(&mut self) -> Result<(), CliError> {
        for bytes in self.sizes() {
            for &measure in &self.options.measures {
                for fabric in ["shm", "tcp", "verbs"] {
                    let conditions = self.conditions(bytes);
                    if !self.is_measured(fabric, measure) {
                        continue;
                    }
                    match self.turns(fabric, measure, &conditions) {
                        Err(error) if fabric != "shm" => self.leave_out_fabric(fabric, &error),
                        measured => measured?,
                    }
                }
            }
        }
        Ok(())
    }

    /// Latency over TCP does not need its peer: our gRPC calls are compared with it, too.
    fn is_measured(&self, fabric: &str, measure: Measure) -> bool {
        match (fabric, measure) {
            ("shm", _) => true,
            _ if self.failed.contains(&fabric) => false,
            ("tcp", Measure::Latency) => self.options.peers.contains(&Peer::UcxTcp),
            _ => !self.peers_on(fabric, measure).is_empty(),
        }
    }

    fn turns(
        &mut self,
        fabric: &'static str,
        measure: Measure,
        conditions: &Conditions,
    ) -> Result<(), CliError> {
        let names: Vec<_> = self.peers_on(fabric, measure).iter().map(|(peer, _)| peer.name()).collect();
        let (bytes, turns) = (conditions.bytes, self.run.turns);
        say(format_args!(
            "{measure} of {bytes} bytes on {fabric}: {turns} turns of {OURS} {}",
            names.join(" ")
        ));
        for turn in 1..=turns {
            let subject = TurnSubject { measure, fabric, bytes, turn };
            let mut before = self.line_ns(conditions)?;
            self.own_figures(subject, conditions, &mut before)?;
            for (peer, program) in self.peers_on(fabric, measure) {
                let value = self.peer(peer, &program, measure, conditions);
                let line_ns = self.around(&mut before, conditions)?;
                match value {
                    Ok(value) => self.figures.push(subject.figure(peer.name(), value, line_ns)),
                    Err(why) => self.leave_out(peer, why),
                }
            }
        }
        Ok(())
    }

    /// Runs ours once, with its references. Latency on shared memory also with borrowed receives,
    /// and latency over TCP also with gRPC calls.
    fn own_figures(
        &mut self,
        subject: TurnSubject,
        conditions: &Conditions,
        before: &mut f64,
    ) -> Result<(), CliError> {
        let TurnSubject { measure, fabric, bytes, .. } = subject;
        let value = |report: &OwnReport| match measure {
            Measure::Latency => report.latency_ns().map_err(CliError::Failed),
            Measure::Bandwidth => report.gb_s().map_err(CliError::Failed),
        };
        let mut job = peers::ours(&self.program, fabric, measure, conditions, &self.json());
        let report = self.own(&job)?;
        let line_ns = self.around(before, conditions)?;
        self.figures.push(subject.figure(OURS, value(&report)?, line_ns));
        for reference in report.references() {
            let value = match measure {
                Measure::Latency => reference.p50_ns,
                Measure::Bandwidth => bytes as f64 / reference.p50_ns,
            };
            self.figures.push(subject.figure(&reference.name, value, line_ns));
        }
        let variant = match (fabric, measure) {
            ("shm", Measure::Latency) => {
                job.arguments.push("--borrow".into());
                Some((BORROWED, job))
            }
            ("tcp", Measure::Latency) => Some((CALLS, peers::calls(&self.program, conditions, &self.json()))),
            _ => None,
        };
        if let Some((name, job)) = variant {
            let value = value(&self.own(&job)?)?;
            let line_ns = self.around(before, conditions)?;
            self.figures.push(subject.figure(name, value, line_ns));
        }
        Ok(())
    }

    /// Runs the cache line after a run. Returns its times before and after the run.
    fn around(&self, before: &mut f64, conditions: &Conditions) -> Result<[f64; 2], CliError> {
        let after = self.line_ns(conditions)?;
        Ok([std::mem::replace(before, after), after])
    }

    fn tied(&self, job: job::Job) -> job::Job {
        job::Job { tied_by: self.tied_by.clone(), ..job }
    }

    /// Runs a peer once, and returns its figure.
    fn peer(
        &self,
        peer: Peer,
        program: &Path,
        measure: Measure,
        conditions: &Conditions,
    ) -> Result<f64, String> {
        let port = free_port()?;
        let Call { server, client } = peer.call(program, measure, conditions, port);
        let (server, client) = (server.map(|server| self.tied(server)), self.tied(client));
        let timeout = Duration::from_secs(self.options.timeout);
        let printed = match server {
            Some(server) => run_pair(&server, &client, port, self.folder.path(), timeout)?,
            None => job::run(&client, self.folder.path(), timeout)?,
        };
        let figure = peer.figure(measure, &printed);
        figure.map_err(|why| format!("`{client}` printed no figure: {why}; {}", quoted(&printed)))
    }

    /// The report of a run of this program.
    fn own(&self, job: &job::Job) -> Result<OwnReport, CliError> {
        job::run(&self.tied(job.clone()), self.folder.path(), OWN_TIMEOUT).map_err(CliError::Failed)?;
        let text = std::fs::read_to_string(self.json());
        let text = text.map_err(|error| CliError::failed(format!("reading the report of `{job}`"), error))?;
        OwnReport::read(&text).map_err(|error| CliError::failed(format!("`{job}`"), error))
    }

    fn line_ns(&self, conditions: &Conditions) -> Result<f64, CliError> {
        let report = self.own(&peers::cache_line(&self.program, conditions, &self.json()))?;
        report.latency_ns().map_err(CliError::Failed)
    }

    /// The file of our own reports.
    fn json(&self) -> PathBuf {
        self.folder.path().join("report.json")
    }

    /// The peers that measure this and have not failed, with their programs.
    fn peers_on(&self, fabric: &str, measure: Measure) -> Vec<(Peer, PathBuf)> {
        let found = self.found.iter().filter_map(|(peer, found)| Some((*peer, found.clone().ok()?)));
        found.filter(|(peer, _)| peer.fabric() == fabric && peer.has(measure)).collect()
    }

    fn leave_out(&mut self, failed: Peer, why: String) {
        say(format_args!("{} is left out from here on: {why}", failed.name()));
        for (peer, found) in &mut self.found {
            if *peer == failed {
                *found = Err(why.clone());
            }
        }
    }

    /// Leaves out a fabric. Its peers have nothing to be compared with.
    fn leave_out_fabric(&mut self, fabric: &'static str, error: &CliError) {
        self.failed.push(fabric);
        say(format_args!("{fabric} is left out from here on: {error}"));
        for (_, found) in self.found.iter_mut().filter(|(peer, _)| peer.fabric() == fabric) {
            // One that is not installed is told of by that.
            if found.is_ok() {
                *found = Err(format!("{OURS} failed over {fabric}: {error}"));
            }
        }
    }

    fn sizes(&self) -> Vec<usize> {
        match &self.run.sizes {
            Some(sizes) => sizes.clone(),
            None if self.run.all_sizes => (1..=23).map(|power| 1 << power).collect(),
            None => SIZES.to_vec(),
        }
    }

    fn conditions(&self, bytes: usize) -> Conditions {
        let fitting = (VOLUME / bytes.max(1) as u64).clamp(*ITERATIONS.start(), *ITERATIONS.end());
        let iterations = self.run.iterations.unwrap_or(fitting);
        Conditions {
            bytes,
            iterations,
            warmup: self.run.warmup.unwrap_or(WARMUP.min(iterations)),
            cores: self.cores,
            profile: self.options.profile.clone(),
            ib_dev: self.options.ib_dev.clone(),
            gid_index: self.options.gid_index,
        }
    }

    fn report(&self) -> CompareReport {
        let peers = self.found.iter().map(|(peer, found)| PeerOutcome {
            name: peer.name(),
            program: found.as_ref().ok().map(|path| path.display().to_string()),
            left_out: found.as_ref().err().cloned(),
        });
        let profile = self.options.profile.clone();
        CompareReport::new(self.cores, self.run.turns, profile, peers.collect(), &self.figures)
    }
}
