//! Both sides of a run, once the channel between them is open.

use super::busy_loops::BusyLoops;
use super::channel_message::ChannelMessage;
use super::control_channel::{ChannelError, ControlChannel};
use super::measure::{self, Measurement};
use super::open;
use super::options::PerfArgs;
use super::plan::{Part, Plan};
use super::report::PerfReport;
use super::responder_process::ResponderProcess;
use crate::error::{CliError, print};
use crate::reference::stopwatch::Stopwatch;
use crate::reference::word_mapping::WordMapping;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The initiator: measures every size, and prints the results as they come.
pub fn measure(
    plan: &Plan,
    mapping: Option<&Arc<WordMapping>>,
    channel: &mut ControlChannel,
) -> Result<PerfReport, CliError> {
    let (version, core) = (env!("CARGO_PKG_VERSION").into(), plan.cores.responder);
    channel.send(&ChannelMessage::Open { version, args: plan.args.clone(), core })?;
    if plan.part != Part::Local {
        channel.expect(&ChannelMessage::Ready)?; // the server agrees
    }
    let (test, max_bytes) = (&plan.args.test, plan.args.max_bytes());
    let workload = open::initiator(test, max_bytes, mapping, channel)?;
    let baseline = match test.baseline() {
        Some((name, test)) => Some((name, open::initiator(&test, max_bytes, mapping, channel)?)),
        None => None,
    };
    let _busy = BusyLoops::start(test.busy_loops());
    // Pinned last: threads that the workload has started must not share the core that measures.
    pin(&plan.args, plan.cores.initiator)?;
    let clock = Stopwatch::new();
    let core = match channel.receive()? {
        ChannelMessage::Opened { core } => core,
        other => return Err(CliError::Failed(format!("{other:?} came instead of Opened"))),
    };
    let mut report = PerfReport::new(plan, workload.facts(), &clock, core);
    print(&report.header())?;
    let mut run = Measurement::new(plan, clock, channel.watch()?, mapping, workload, baseline);
    for &bytes in plan.args.sizes() {
        report.add(&run.size(bytes, channel)?);
        print(&report.newest_row())?;
    }
    channel.send(&ChannelMessage::Quit)?;
    print(&report.reference_table())?;
    Ok(report)
}

/// The responder: opens the test, and answers turns until it is told to quit.
pub fn answer(
    args: &PerfArgs,
    core: usize,
    mapping: Option<&Arc<WordMapping>>,
    channel: &mut ControlChannel,
) -> Result<(), CliError> {
    let (test, max_bytes) = (&args.test, args.max_bytes());
    let workload = open::responder(test, max_bytes, mapping, channel)?;
    let baseline = match test.baseline() {
        Some((_, test)) => Some(open::responder(&test, max_bytes, mapping, channel)?),
        None => None,
    };
    pin(args, core)?;
    channel.send(&ChannelMessage::Opened { core })?;
    measure::answer(channel, max_bytes, mapping, workload, baseline)
}

/// How long the last message of the other process is waited for.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Why a run failed: the last message of the other process, or its exit status, or `seen`.
pub fn explain(
    seen: CliError,
    channel: &mut ControlChannel,
    second: Option<&mut ResponderProcess>,
) -> CliError {
    if matches!(seen, CliError::Usage(_)) {
        return seen; // the other side failed for the same reason
    }
    let end = Instant::now() + LAST_WORDS;
    let mut received = channel.set_timeout(LAST_WORDS).and_then(|()| channel.receive());
    while received.is_ok() && Instant::now() < end {
        received = channel.receive();
    }
    let name = if second.is_some() { "second process" } else { "server" };
    if let Err(ChannelError::Failed(why)) = received {
        return CliError::Failed(format!("the {name} failed: {why}"));
    }
    match second.and_then(ResponderProcess::exit_status) {
        Some(status) => CliError::Failed(format!("{status}; this one saw: {seen}")),
        None => seen,
    }
}

fn pin(args: &PerfArgs, core: usize) -> Result<(), CliError> {
    if args.run.unpinned {
        return Ok(());
    }
    tensorwire::pin_current_thread(core).map_err(|error| CliError::Failed(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn the_last_words_of_a_process_that_goes_on_talking_are_not_waited_for() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let channel = |stream| ControlChannel::new(stream, Duration::from_secs(5)).unwrap();
        let (mut ours, mut theirs) = (channel(ours), channel(theirs));
        // Until this side hangs up.
        let talking = std::thread::spawn(move || while theirs.send(&ChannelMessage::Ready).is_ok() {});
        let begin = Instant::now();
        let error = explain(CliError::Failed("it is odd".into()), &mut ours, None);
        assert!(error.to_string().contains("it is odd"), "{error}");
        assert!(begin.elapsed() < 10 * LAST_WORDS, "{:?}", begin.elapsed());
        drop(ours);
        talking.join().unwrap();
    }
}
