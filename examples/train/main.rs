//! Trains a small neural network on handwritten digits. Parameter servers and workers are processes
//! of their own and move every tensor through tensorwire.
//!
//! ```text
//! cargo run --release --example train
//! cargo run --release --example train -- --servers 2 --workers 6
//! cargo run --release --example train -- --help
//! ```
//!
//! In each step every worker pulls all weights from the servers, computes the gradient of its part
//! of the batch, and pushes the gradient (`worker.rs`). Each server sums the gradients, worker 0
//! first, and updates its weights (`server.rs`). `exchange.rs` has the traits of the transport.
//! `engine_exchange.rs` implements them with tensorwire: read that file first. `--single` does the
//! same arithmetic in one process (`single.rs`) and ends with the same bits.

mod child;
mod data;
mod engine_exchange;
mod error;
mod exchange;
mod hosts;
mod latency;
mod launch;
mod member;
mod model;
mod options;
mod plan;
mod progress;
mod random;
mod report;
mod server;
mod signals;
mod single;
#[cfg(test)]
mod threads;
mod worker;

use crate::data::Digits;
use crate::error::{Result, one_line};
use crate::launch::Failure;
use crate::options::{Options, Stop};
use crate::progress::Display;
use crate::report::Report;
use std::io::Write;
use std::process::ExitCode;

/// The exit status after Ctrl-C, as in shells.
const INTERRUPTED: u8 = 130;

fn main() -> ExitCode {
    let digits = match Digits::load() {
        Ok(digits) => digits,
        Err(error) => return fail(&error.to_string()),
    };
    if std::env::args_os().nth(1).is_some_and(|first| first == launch::ASSIGNED) {
        return if child::run(&digits) { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    match options::read(std::env::args_os(), &digits, tensorwire::process_cpus()) {
        Ok(options) => train(&options, &digits),
        Err(Stop { text, status: 0 }) => {
            print(&text).map_or_else(|e| fail(&e.to_string()), |()| ExitCode::SUCCESS)
        }
        Err(Stop { text, status }) => {
            eprintln!("{text}");
            ExitCode::from(status)
        }
    }
}

fn train(options: &Options, digits: &Digits) -> ExitCode {
    let mut display = Display::new(&options.plan());
    let run = match options.single {
        true => single_run(options, digits, &mut display).map_err(Failure::from),
        false => distributed_run(options, &mut display),
    };
    display.end();
    let report = match run {
        Ok(report) => report,
        Err(Failure::Interrupted(signal)) => return interrupted(signal),
        Err(Failure::Failed(lines)) => {
            lines.iter().for_each(|line| eprintln!("train: {line}"));
            return ExitCode::FAILURE;
        }
    };
    match finish(options, &report) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&one_line(error.as_ref())),
    }
}

fn single_run(options: &Options, digits: &Digits, display: &mut Display) -> Result<Report> {
    signals::on_ending(|signal| {
        eprintln!();
        interrupted(signal);
        std::process::exit(INTERRUPTED.into());
    })?;
    if let Some(core) = &options.cores {
        tensorwire::pin_current_thread(core.of(0))?;
    }
    if options.pool.is_some() {
        eprintln!("train: --pool has no meaning with --single: no memory is registered");
    }
    let plan = options.plan();
    let outcome = single::run(&plan, digits, |progress| display.update(progress));
    Ok(Report::single(plan, outcome))
}

fn distributed_run(options: &Options, display: &mut Display) -> std::result::Result<Report, Failure> {
    let results = launch::run(options, |progress| display.update(progress))?;
    Ok(Report::distributed(options.plan(), &results.outcomes, &results.traffic)?)
}

fn finish(options: &Options, report: &Report) -> Result<()> {
    print(&report.to_string())?;
    if let Some(file) = &options.json {
        report.write_json(file)?;
    }
    report.check_traffic()
}

/// Writes to standard output. Unlike `println!`, this does not panic after the reader has closed
/// it.
fn print(text: &str) -> Result<()> {
    Ok(writeln!(std::io::stdout(), "{text}")?)
}

fn interrupted(signal: &str) -> ExitCode {
    eprintln!("train: ended by {signal}");
    ExitCode::from(INTERRUPTED)
}

fn fail(line: &str) -> ExitCode {
    eprintln!("train: {line}");
    ExitCode::FAILURE
}
