//! The entry points: `perf`, and the second process of `perf --local`.

use super::channel_message::ChannelMessage;
use super::command::{PerfCommand, PerfSubcommand};
use super::compare;
use super::layout::MAPPING_BYTES;
use super::options::PerfArgs;
use super::plan::{Part, Plan};
use super::remote;
use super::report::{PerfReport, ReportFile};
use super::responder_process::{self, ResponderArgs, ResponderProcess};
use super::session::{answer, explain, measure};
use crate::error::CliError;
use crate::reference::word_mapping::WordMapping;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Runs a test, or compares. `given` has the names of the options on the command line.
pub fn run(command: PerfCommand, given: &BTreeSet<String>) -> Result<(), CliError> {
    match command.subcommand {
        PerfSubcommand::Test(test) => run_test(PerfArgs { test, run: command.run }, given),
        PerfSubcommand::Compare(options) => compare::run(&options, &command.run),
    }
}

/// Takes the role that was asked for. The initiator prints the results and writes the report.
fn run_test(args: PerfArgs, given: &BTreeSet<String>) -> Result<(), CliError> {
    let plan = Plan::check(args, given, tensorwire::process_cpus())?;
    let json = plan.args.run.json.as_deref().map(|path| ReportFile::probe("--json", path)).transpose()?;
    let report = match &plan.part {
        Part::Local => local(&plan)?,
        Part::Client(host, port) => remote::client(&plan, host, *port)?,
        Part::Server(at) => return remote::serve(&plan, *at),
    };
    match json {
        Some(file) => file.write(&report.to_json()?),
        None => Ok(()),
    }
}

fn local(plan: &Plan) -> Result<PerfReport, CliError> {
    let (mapping, memfd) = WordMapping::create(MAPPING_BYTES)?;
    let (mut second, mut channel) = ResponderProcess::start(memfd)?;
    let report = measure(plan, Some(&Arc::new(mapping)), &mut channel)
        .map_err(|error| explain(error, &mut channel, Some(&mut second)))?;
    second.finish()?;
    Ok(report)
}

/// The second process: answers until the first one tells it to quit.
pub fn respond(args: ResponderArgs) -> Result<(), CliError> {
    let (mapping, mut channel) = responder_process::inherit(&args)?;
    let answered = match channel.receive()? {
        ChannelMessage::Open { args, core, .. } => answer(&args, core, Some(&mapping), &mut channel),
        other => Err(CliError::Failed(format!("{other:?} came first"))),
    };
    // Sent before the exit, so that the first process finds it when it stops waiting.
    answered.map_err(|error| match channel.send(&ChannelMessage::Failed(error.to_string())) {
        Ok(()) => CliError::Reported,
        Err(_) => error,
    })
}
