//! The second process: does as many rounds of what it is told.

use super::options::PeerOptions;
use super::rounds::{Rounds, Setup, start};
use crate::cli::CliError;
use crate::cli::reference::{CacheLine, Side};
use std::fs::OpenOptions;
use std::io::{BufRead, BufReader};
use std::os::unix::process::parent_id;
use std::sync::mpsc::{Receiver, TryRecvError, channel};

/// Obeys the first process until it has no more to say.
pub fn run_peer(options: &PeerOptions) -> Result<(), CliError> {
    let parent = parent_id();
    let file = OpenOptions::new().read(true).write(true).open(&options.line).map_err(CliError::failed)?;
    let mut line = CacheLine::map(&file).map_err(CliError::failed)?;
    let mut talk = (BufReader::new(std::io::stdin()), std::io::stdout());
    let largest = options.pool / 8;
    let setup = Setup {
        side: Side::Second,
        core: options.core,
        depth: options.depth,
        pool: options.pool,
        cluster: &options.cluster,
        largest,
    };
    let mut rounds = start(options.test, &setup, &mut talk)?;
    let orders = orders(talk.0);
    loop {
        match orders.try_recv() {
            Ok(order) => obey(&order, rounds.as_mut(), &mut line, parent)?,
            Err(TryRecvError::Empty) => rounds.idle()?,
            Err(TryRecvError::Disconnected) => return Ok(()),
        }
    }
}

/// Reads orders on a thread of their own, so that this one can make progress while there are none.
fn orders(input: impl BufRead + Send + 'static) -> Receiver<String> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        // Ends with the input, or when nobody listens any more.
        let _ = input.lines().map_while(Result::ok).try_for_each(|order| sender.send(order));
    });
    receiver
}

fn obey(order: &str, rounds: &mut dyn Rounds, line: &mut CacheLine, parent: u32) -> Result<(), CliError> {
    let number = |text: &str| text.parse::<u64>().map_err(CliError::failed);
    match order.split_once(' ') {
        Some(("size", bytes)) => rounds.size(number(bytes)? as usize),
        Some(("rounds", count)) => (0..number(count)?).try_for_each(|_| {
            rounds.prepare()?;
            rounds.round()
        }),
        Some(("line", count)) => (0..number(count)?).try_for_each(|_| {
            // A dead first process is replaced as the parent.
            let asked = line.round(Side::Second, || parent_id() == parent);
            asked.ok_or_else(|| CliError::Failed("the first process is gone".into()))
        }),
        _ => Err(CliError::Failed(format!("'{order}' is no order"))),
    }
}
