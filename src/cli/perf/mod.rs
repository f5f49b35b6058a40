//! `tensorwire perf`: latency between two pinned processes, beside references that run in turns with it.
//!
//! The first process measures, the second one answers. Between turns they talk over a socket ([`channel`]); within
//! a turn only the workload's own path is used, and the mapping that both share says when the turn ends. Nothing
//! here knows how a workload moves its bytes ([`workload`]).

mod channel;
mod cores;
mod machine;
mod measure;
mod options;
mod recorder;
mod rendezvous_lat;
mod report;
mod second;
mod workload;
mod write_lat;

pub use channel::Channel;
pub use options::Args;
pub use workload::{Facts, Halt, Initiator, Responder, Subject, Watch};

use super::CliError;
use super::reference::{Clock, ROOM, Shared};
use channel::{ChannelError, Message};
use options::Plan;
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

/// Measures, prints, and writes the report.
pub fn run(args: Args) -> Result<(), CliError> {
    let plan = Plan::check(args, tensorwire::engine::process_cpus())?;
    let json = plan.json.as_deref().map(JsonFile::probe).transpose()?;
    let (shared, memfd) = Shared::create(ROOM)?;
    let shared = Arc::new(shared);
    let (mut second, mut channel) = Second::start(&shared, memfd)?;
    let report =
        measure(&plan, &shared, &mut channel).map_err(|error| explain(error, &mut channel, &mut second))?;
    second.finish()?;
    match json {
        Some(file) => file.write(&report.to_json()?),
        None => Ok(()),
    }
}

fn measure(plan: &Plan, shared: &Arc<Shared>, channel: &mut Channel) -> Result<Report, CliError> {
    let (test, settings) = (plan.test, plan.settings.clone());
    channel.send(&Message::Open { test, settings, core: plan.cores.responder })?;
    let workload = workload::initiator(test, &plan.settings, shared, channel)?;
    let alone = match plan.settings.without_links() {
        Some(settings) => Some(workload::initiator(test, &settings, shared, channel)?),
        None => None,
    };
    // Only now: a thread that the workload has started must not share the core that measures.
    pin(plan.cores.initiator)?;
    let clock = Clock::new();
    channel.expect(&Message::Ready)?;
    let mut report = Report::new(plan, workload.facts(), &clock);
    super::print(&report.header())?;
    let mut run = measure::Run::new(plan, clock, shared, workload, alone);
    for &bytes in &plan.sizes {
        report.add(&run.size(bytes, channel)?);
        super::print(&report.newest_row())?;
    }
    channel.send(&Message::Quit)?;
    super::print(&report.reference_table())?;
    Ok(report)
}

/// Why a run failed: what the second process said last, or how it ended, or else what this one saw.
fn explain(seen: CliError, channel: &mut Channel, second: &mut Second) -> CliError {
    if matches!(seen, CliError::Usage(_)) {
        return seen; // the other side stumbled over the same
    }
    let mut heard = channel.set_patience(Duration::from_millis(500)).and_then(|()| channel.receive());
    while heard.is_ok() {
        heard = channel.receive();
    }
    if let Err(ChannelError::Failed(why)) = heard {
        return CliError::Failed(format!("the second process failed: {why}"));
    }
    match second.epitaph() {
        Some(epitaph) => CliError::Failed(format!("{epitaph}; this one saw: {seen}")),
        None => seen,
    }
}

/// The second process: answers until the first one tells it to quit.
pub fn respond(args: ResponderArgs) -> Result<(), CliError> {
    let (shared, mut channel) = second::inherit(&args)?;
    serve(&shared, &mut channel).map_err(|error| {
        // Said first, so that it is there when the first process stops waiting.
        let told = channel.send(&Message::Failed(error.to_string()));
        shared.abort();
        if told.is_ok() { CliError::Reported } else { error }
    })
}

fn serve(shared: &Arc<Shared>, channel: &mut Channel) -> Result<(), CliError> {
    let (test, settings, core) = match channel.receive()? {
        Message::Open { test, settings, core } => (test, settings, core),
        other => return Err(CliError::Failed(format!("{other:?} came first"))),
    };
    let workload = workload::responder(test, &settings, shared, channel)?;
    let alone = match settings.without_links() {
        Some(settings) => Some(workload::responder(test, &settings, shared, channel)?),
        None => None,
    };
    pin(core)?;
    channel.send(&Message::Ready)?;
    measure::answer(channel, shared, workload, alone)
}

fn pin(core: usize) -> Result<(), CliError> {
    tensorwire::engine::pin_current_thread(core).map_err(|error| CliError::Failed(error.to_string()))
}
