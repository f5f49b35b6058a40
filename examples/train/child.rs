//! A started process: carries out its assignment and reports the result.

use crate::data::Digits;
use crate::engine_exchange::Engine;
use crate::error::{Result, one_line};
use crate::exchange::Traffic;
use crate::member::{Assignment, FINISH, Job, Message};
use crate::worker::Outcome;
use crate::{server, signals, worker};
use std::io::{BufRead, Write};
use std::sync::mpsc;
use std::time::Duration;

/// Pause between two rounds of progress in a process that is done.
const PAUSE: Duration = Duration::from_micros(100);
/// How long [`FINISH`] may take to come after the first peer has left.
const FINISH_TIMEOUT: Duration = Duration::from_secs(2);

/// Runs a child from its first line of input to its last line of output. Returns whether it
/// succeeded.
pub fn run(digits: &Digits) -> bool {
    let told = train(digits).and_then(|(outcome, traffic)| tell(&Message::Summary { outcome, traffic }));
    let Err(error) = told else { return true };
    // Fails if the parent has ended.
    let _ = tell(&Message::Failed { error: one_line(error.as_ref()) });
    false
}

fn train(digits: &Digits) -> Result<(Option<Outcome>, Traffic)> {
    signals::unblock()?;
    let assignment: Assignment = serde_json::from_str(&read_line()?)?;
    die_with_parent(&assignment)?;
    // A dedicated poller has the core to itself.
    if let Some(core) = assignment.core.filter(|_| assignment.poll != "dedicated") {
        tensorwire::pin_current_thread(core)?;
    }
    let engine = Engine::join(&assignment)?;
    tell(&Message::Joined)?;
    let trained = take_part(&assignment, digits, &engine);
    match trained {
        Ok(outcome) => Ok((outcome, engine.finish()?)),
        Err(error) => {
            // The errors of the others then tell why this process left.
            engine.fail(&one_line(error.as_ref()));
            Err(error)
        }
    }
}

fn take_part(assignment: &Assignment, digits: &Digits, engine: &Engine) -> Result<Option<Outcome>> {
    let Assignment { member, plan, .. } = assignment;
    let outcome = match member.job {
        Job::Server => {
            server::run(plan, member.task, &mut engine.server(plan, member.task)?)?;
            None
        }
        Job::Worker => {
            let report = |progress| tell(&Message::Progress(progress));
            Some(worker::run(plan, member.task, digits, &mut engine.worker(plan)?, report)?)
        }
    };
    wait_for_all(engine)?;
    Ok(outcome)
}

/// Asks the kernel to kill this process when its parent ends.
fn die_with_parent(assignment: &Assignment) -> Result<()> {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    // The parent may have ended before the call above.
    let parent = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get().unsigned_abs());
    // On another host it is the child of the program that has started it there.
    match parent == Some(assignment.parent) || assignment.secret_file.is_some() {
        true => Ok(()),
        false => Err("the process that started this one is gone".into()),
    }
}

/// Waits until every process is done. Peers may still receive tensors from this one.
fn wait_for_all(engine: &Engine) -> Result<()> {
    tell(&Message::Done)?;
    let (sender, line) = mpsc::channel();
    std::thread::spawn(move || sender.send(read_line()));
    let told = loop {
        match line.recv_timeout(PAUSE) {
            Ok(told) => break told,
            // A peer that was told first may have left: then FINISH comes at once.
            Err(_) => {
                if let Err(error) = engine.progress() {
                    break line.recv_timeout(FINISH_TIMEOUT).unwrap_or(Err(error));
                }
            }
        }
    };
    match told?.trim_end() {
        FINISH => Ok(()),
        other => Err(format!("`{other}` was read instead of `{FINISH}`").into()),
    }
}

fn read_line() -> Result<String> {
    let mut line = String::new();
    match std::io::stdin().lock().read_line(&mut line)? {
        0 => Err("the process that started this one has closed its end of the pipe".into()),
        _ => Ok(line),
    }
}

fn tell(message: &Message) -> Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    let mut out = std::io::stdout().lock();
    out.write_all(&line)?;
    Ok(out.flush()?)
}
