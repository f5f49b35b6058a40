//! `tensorwire perf`: latency and bandwidth between two pinned processes, beside references that run in turns with it.
//!
//! The first process, or the client, measures; the second one, or the server, answers. Between turns they talk over a
//! socket ([`channel`]); within a turn only the workload's own path is used. Nothing here knows how a workload moves its
//! bytes ([`workload`]).

mod allowed;
mod bandwidth;
mod bare_link;
mod control_channel;
mod cores;
mod exchange;
mod fabrics;
mod machine;
mod measure;
mod one_sided;
mod open;
mod options;
mod peer_process;
mod plan;
mod read_lat;
mod recorder;
mod remote;
mod rendezvous_batch;
mod rendezvous_lat;
mod rendezvous_standing;
mod report;
mod send_lat;
mod workload;
mod write_bw;
mod write_lat;

pub use control_channel::ControlChannel;
pub use options::PerfArgs;
pub use workload::{Abort, Facts, Initiator, KeepAlive, PeerWatch, Responder, Subject};

use super::CliError;
use super::reference::{MAPPING_BYTES, SharedMapping, Stopwatch};
use control_channel::{ChannelError, ControlMessage};
use peer_process::PeerProcess;
use plan::{Part, Plan};
use report::{JsonFile, PerfReport};
use std::sync::Arc;
use std::time::Duration;

/// How the second process is started.
#[derive(clap::Parser, Debug)]
pub struct ResponderArgs {
    /// The file descriptor of the shared mapping, inherited
    memfd: i32,
    /// The process id of the first process
    parent: i32,
}

/// Takes the part that was asked for. Who measures prints, and writes the report.
pub fn run(args: PerfArgs) -> Result<(), CliError> {
    let plan = Plan::check(args, tensorwire::process_cpus())?;
    let json = plan.json.as_deref().map(JsonFile::probe).transpose()?;
    let report = match &plan.part {
        Part::Local => local(&plan)?,
        Part::Client(host, port) => remote::client(&plan, host, *port)?,
        Part::Server(port) => return remote::serve(&plan, *port),
    };
    match json {
        Some(file) => file.write(&report.to_json()?),
        None => Ok(()),
    }
}

fn local(plan: &Plan) -> Result<PerfReport, CliError> {
    let (shared, memfd) = SharedMapping::create(MAPPING_BYTES)?;
    let (mut second, mut channel) = PeerProcess::start(memfd)?;
    let report = measure(plan, Some(&Arc::new(shared)), &mut channel)
        .map_err(|error| explain(error, &mut channel, Some(&mut second)))?;
    second.finish()?;
    Ok(report)
}

fn measure(
    plan: &Plan,
    shared: Option<&Arc<SharedMapping>>,
    channel: &mut ControlChannel,
) -> Result<PerfReport, CliError> {
    let (test, settings) = (plan.test, plan.settings.clone());
    let (version, terms, core) = (env!("CARGO_PKG_VERSION").into(), plan.terms(), plan.cores.responder);
    channel.send(&ControlMessage::Open { test, version, terms, settings, core })?;
    if plan.part != Part::Local {
        channel.expect(&ControlMessage::Ready)?; // it agrees
    }
    let workload = open::initiator(test, &plan.settings, shared, channel)?;
    let beside = match plan.settings.beside() {
        Some((name, settings)) => Some((name, open::initiator(test, &settings, shared, channel)?)),
        None => None,
    };
    // Only now: a thread that the workload has started must not share the core that measures.
    pin(plan.cores.initiator)?;
    let clock = Stopwatch::new();
    let core = match channel.receive()? {
        ControlMessage::Opened { core } => core,
        other => return Err(CliError::Failed(format!("{other:?} came instead of the word that it is open"))),
    };
    let mut report = PerfReport::new(plan, workload.facts(), &clock, core);
    super::print(&report.header())?;
    let mut run = measure::Measurement::new(plan, clock, channel.watch()?, shared, workload, beside);
    for &bytes in &plan.sizes {
        report.add(&run.size(bytes, channel)?);
        super::print(&report.newest_row())?;
    }
    channel.send(&ControlMessage::Quit)?;
    super::print(&report.reference_table())?;
    Ok(report)
}

/// Why a run failed: what the other process said last, or how it ended, or else what this one saw.
fn explain(seen: CliError, channel: &mut ControlChannel, second: Option<&mut PeerProcess>) -> CliError {
    if matches!(seen, CliError::Usage(_)) {
        return seen; // the other side stumbled over the same
    }
    let mut heard = channel.set_patience(Duration::from_millis(500)).and_then(|()| channel.receive());
    while heard.is_ok() {
        heard = channel.receive();
    }
    let name = if second.is_some() { "second process" } else { "server" };
    if let Err(ChannelError::Failed(why)) = heard {
        return CliError::Failed(format!("the {name} failed: {why}"));
    }
    match second.and_then(PeerProcess::exit_status) {
        Some(exit_status) => CliError::Failed(format!("{exit_status}; this one saw: {seen}")),
        None => seen,
    }
}

/// The second process: answers until the first one tells it to quit.
pub fn respond(args: ResponderArgs) -> Result<(), CliError> {
    let (shared, mut channel) = peer_process::inherit(&args)?;
    let answered = match channel.receive()? {
        ControlMessage::Open { test, settings, core, .. } => {
            answer(test, &settings, core, Some(&shared), &mut channel)
        }
        other => Err(CliError::Failed(format!("{other:?} came first"))),
    };
    // Said first, so that it is there when the first process stops waiting.
    answered.map_err(|error| match channel.send(&ControlMessage::Failed(error.to_string())) {
        Ok(()) => CliError::Reported,
        Err(_) => error,
    })
}

/// The answering side, once it is known what of.
fn answer(
    test: options::Test,
    settings: &plan::Settings,
    core: usize,
    shared: Option<&Arc<SharedMapping>>,
    channel: &mut ControlChannel,
) -> Result<(), CliError> {
    let workload = open::responder(test, settings, shared, channel)?;
    let beside = match settings.beside() {
        Some((_, settings)) => Some(open::responder(test, &settings, shared, channel)?),
        None => None,
    };
    pin(core)?;
    channel.send(&ControlMessage::Opened { core })?;
    measure::answer(channel, shared, workload, beside)
}

fn pin(core: usize) -> Result<(), CliError> {
    tensorwire::pin_current_thread(core).map_err(|error| CliError::Failed(error.to_string()))
}
