//! `tensorwire perf`: latency and bandwidth between two pinned processes, beside references that run in turns with it.
//!
//! The first process, or the client, measures; the second one, or the server, answers. Between turns they talk over a
//! socket ([`channel`]); within a turn only the workload's own path is used. Nothing here knows how a workload moves its
//! bytes ([`workload`]).

mod allowed;
mod bandwidth;
mod channel;
mod cores;
mod exchange;
mod fabrics;
mod machine;
mod measure;
mod one_sided;
mod open;
mod options;
mod plan;
mod read_lat;
mod recorder;
mod remote;
mod rendezvous_batch;
mod rendezvous_lat;
mod rendezvous_standing;
mod report;
mod second;
mod send_lat;
mod side;
mod workload;
mod write_bw;
mod write_lat;

pub use channel::Channel;
pub use options::Args;
pub use workload::{Facts, Halt, Initiator, Linger, Responder, Subject, Watch};

use super::CliError;
use super::reference::{Clock, ROOM, Shared};
use channel::{ChannelError, Message};
use plan::{Part, Plan};
use report::{JsonFile, Report};
use second::Second;
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
pub fn run(args: Args) -> Result<(), CliError> {
    let plan = Plan::check(args, tensorwire::engine::process_cpus())?;
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

fn local(plan: &Plan) -> Result<Report, CliError> {
    let (shared, memfd) = Shared::create(ROOM)?;
    let (mut second, mut channel) = Second::start(memfd)?;
    let report = measure(plan, Some(&Arc::new(shared)), &mut channel)
        .map_err(|error| explain(error, &mut channel, Some(&mut second)))?;
    second.finish()?;
    Ok(report)
}

fn measure(plan: &Plan, shared: Option<&Arc<Shared>>, channel: &mut Channel) -> Result<Report, CliError> {
    let (test, settings) = (plan.test, plan.settings.clone());
    let (version, terms, core) = (env!("CARGO_PKG_VERSION").into(), plan.terms(), plan.cores.responder);
    channel.send(&Message::Open { test, version, terms, settings, core })?;
    if plan.part != Part::Local {
        channel.expect(&Message::Ready)?; // it agrees
    }
    let workload = open::initiator(test, &plan.settings, shared, channel)?;
    let beside = match plan.settings.beside() {
        Some((name, settings)) => Some((name, open::initiator(test, &settings, shared, channel)?)),
        None => None,
    };
    // Only now: a thread that the workload has started must not share the core that measures.
    pin(plan.cores.initiator)?;
    let clock = Clock::new();
    let core = match channel.receive()? {
        Message::Opened { core } => core,
        other => return Err(CliError::Failed(format!("{other:?} came instead of the word that it is open"))),
    };
    let mut report = Report::new(plan, workload.facts(), &clock, core);
    super::print(&report.header())?;
    let mut run = measure::Run::new(plan, clock, channel.watch()?, shared, workload, beside);
    for &bytes in &plan.sizes {
        report.add(&run.size(bytes, channel)?);
        super::print(&report.newest_row())?;
    }
    channel.send(&Message::Quit)?;
    super::print(&report.reference_table())?;
    Ok(report)
}

/// Why a run failed: what the other process said last, or how it ended, or else what this one saw.
fn explain(seen: CliError, channel: &mut Channel, second: Option<&mut Second>) -> CliError {
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
    match second.and_then(Second::epitaph) {
        Some(epitaph) => CliError::Failed(format!("{epitaph}; this one saw: {seen}")),
        None => seen,
    }
}

/// The second process: answers until the first one tells it to quit.
pub fn respond(args: ResponderArgs) -> Result<(), CliError> {
    let (shared, mut channel) = second::inherit(&args)?;
    let answered = match channel.receive()? {
        Message::Open { test, settings, core, .. } => {
            answer(test, &settings, core, Some(&shared), &mut channel)
        }
        other => Err(CliError::Failed(format!("{other:?} came first"))),
    };
    // Said first, so that it is there when the first process stops waiting.
    answered.map_err(|error| match channel.send(&Message::Failed(error.to_string())) {
        Ok(()) => CliError::Reported,
        Err(_) => error,
    })
}

/// The answering side, once it is known what of.
fn answer(
    test: options::Test,
    settings: &plan::Settings,
    core: usize,
    shared: Option<&Arc<Shared>>,
    channel: &mut Channel,
) -> Result<(), CliError> {
    let workload = open::responder(test, settings, shared, channel)?;
    let beside = match settings.beside() {
        Some((_, settings)) => Some(open::responder(test, &settings, shared, channel)?),
        None => None,
    };
    pin(core)?;
    channel.send(&Message::Opened { core })?;
    measure::answer(channel, shared, workload, beside)
}

fn pin(core: usize) -> Result<(), CliError> {
    tensorwire::engine::pin_current_thread(core).map_err(|error| CliError::Failed(error.to_string()))
}
