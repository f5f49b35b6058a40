//! Runs a program. Then checks that every call has ended, every value is accounted for, and nothing
//! is left.

use crate::calls::Open;
use crate::model::{Call, End, Model, Violation};
use crate::order::{can_tell, order_is_kept};
use crate::program::{Action, Form, Key, Program, ReceiveKind};
use crate::world::World;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::time::Duration;
use tensorwire::Counter;
use tensorwire::internals::fabric::LoanFigures;
use tensorwire::internals::matching::RemoteLoad;

/// Figures of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// A digest of everything that happened.
    pub digest: u64,
    pub delivered: usize,
    pub failed: usize,
    /// The sums of the survivors for each of [`Counter::ALL`].
    pub counts: Vec<u64>,
}

/// Timeout of a receive whose value must be there.
const DRAIN: Duration = Duration::from_secs(1);
/// Rounds after which the network must be quiet.
const MANY: u32 = 20_000;

/// How a run went.
#[derive(Debug)]
pub enum Outcome {
    Passes(Report),
    Fails(Violation),
}

/// Runs a program. A panic counts as a failure.
pub fn attempt(program: &Program) -> Outcome {
    match catch_unwind(AssertUnwindSafe(|| run(program))) {
        Ok(Ok(report)) => Outcome::Passes(report),
        Ok(Err(why)) => Outcome::Fails(why),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            Outcome::Fails(format!("a panic: {}", text.unwrap_or_default()))
        }
    }
}

/// Runs a program, and prints the trace of the network.
pub fn show(program: &Program) -> Result<Report, Violation> {
    let mut world = World::new(program, true)?;
    let result = run_in(&mut world, program);
    world.network.trace().iter().for_each(|line| println!("{line}"));
    result
}

fn run(program: &Program) -> Result<Report, Violation> {
    run_in(&mut World::new(program, false)?, program)
}

fn run_in(world: &mut World, program: &Program) -> Result<Report, Violation> {
    for (at, action) in program.actions.iter().enumerate() {
        world.act(action).map_err(|why| format!("action {at}, {action}: {why}"))?;
    }
    settle(world).map_err(|why| format!("after the program: {why}"))?;
    no_receive_waits_in_vain(world)?;
    every_call_ends(world)?;
    world.processes.iter().flatten().flat_map(|process| &process.held).try_for_each(|held| held.check())?;
    world.processes.iter_mut().flatten().for_each(|process| process.held.clear());
    settle(world)?;
    every_value_is_there(world)?;
    order_is_kept(&world.model)?;
    nothing_is_left(world, program.seed.is_multiple_of(2))?;
    let ended = |fits: fn(&End) -> bool| {
        world.model.calls.iter().filter(|call| call.end.as_ref().is_some_and(fits)).count()
    };
    Ok(Report {
        digest: world.digest(),
        delivered: ended(|end| matches!(end, End::Got { .. })),
        failed: ended(|end| matches!(end, End::Failed { .. })),
        counts: Counter::ALL.iter().map(|counter| count(world, *counter)).collect(),
    })
}

fn count(world: &World, counter: Counter) -> u64 {
    world.processes.iter().flatten().map(|process| process.counters.get(counter)).sum()
}

/// All processes poll until nothing arrives any more.
fn settle(world: &mut World) -> Result<(), Violation> {
    let mut idle = 0;
    world.network.wake();
    for _ in 0..MANY {
        let mut busy = false;
        for at in 0..world.settings.processes {
            busy |= world.progress(at)? > 0;
        }
        busy |= world.network.next_event().is_some() || world.has_backlog() || world.is_linking();
        idle = if busy { 0 } else { idle + 1 };
        if idle == 3 {
            return Ok(());
        }
        world.pass();
    }
    Err(format!("it is not quiet after {MANY} rounds"))
}

/// In a quiet network no receive waits for a value that cannot come, or beside a value that is
/// there.
fn no_receive_waits_in_vain(world: &World) -> Result<(), Violation> {
    let (model, now) = (&world.model, world.network.now());
    for (key, channel) in &model.channels {
        let open = |call: &&usize| {
            let Call { end, cancelled, deadline, .. } = &model.calls[**call];
            end.is_none() && cancelled.is_none() && *deadline > now
        };
        let waiting = channel.calls.iter().filter(open).count();
        if waiting == 0 {
            continue;
        }
        let who = format!("{waiting} receivers of {key} wait");
        if !world.is_connected(key) {
            return Err(format!("{who}, and the peer is lost"));
        }
        if model.is_closed(key) {
            return Err(format!("{who}, and the step is over"));
        }
        let values = model.left(key).len().saturating_sub(model.may_be_missing(key));
        if values > 0 && world.settings.numbers_all_edges() {
            return Err(format!("{who}, and {values} values wait too"));
        }
    }
    Ok(())
}

fn every_call_ends(world: &mut World) -> Result<(), Violation> {
    for _ in 0..8 {
        let open = world.processes.iter().flatten().flat_map(|process| &process.open);
        let calls = &world.model.calls;
        let deadlines = open.flat_map(Open::calls).map(|call| calls[call].deadline);
        let Some(last) = deadlines.max() else { return Ok(()) };
        let now = world.network.now();
        let grace = Duration::from_micros(2 * world.settings.cancel_grace);
        world.network.advance_to(last.max(now) + grace);
        settle(world)?;
    }
    let mut open = world.processes.iter().flatten().flat_map(|process| &process.open).flat_map(Open::calls);
    match open.next() {
        Some(call) => {
            let Call { key, began, deadline, .. } = &world.model.calls[call];
            let (began, deadline) = (began.as_nanos(), deadline.as_nanos());
            Err(format!("a receive of {key}, begun at {began} ns until {deadline} ns, never ended"))
        }
        None => Ok(()),
    }
}

/// Receives each value that must still be there, and tries one more of each key.
fn every_value_is_there(world: &mut World) -> Result<(), Violation> {
    let keys: Vec<Key> = world.model.channels.keys().copied().collect();
    for key in keys {
        let mut last: Option<usize> = None;
        while !world.model.is_closed(&key) && world.is_connected(&key) {
            let left = world.model.left(&key);
            let lost = world.model.may_be_missing(&key);
            match receive_now(world, key)? {
                Some(End::Got { value, .. }) => {
                    let first = left.first().copied().unwrap_or(value);
                    // A value that arrived for a receive that gave up, before the link was lost,
                    // comes first afterwards.
                    let excused = world.model.is_disturbed(&key) && gave_up(&world.model, &key);
                    let in_order = last < Some(value) && (value == first || lost > 0);
                    if !excused && !in_order && can_tell(&world.model, key, &[value, first]) {
                        return Err(format!("value {value} of {key} came before value {first}"));
                    }
                    last = if can_tell(&world.model, key, &[value]) { Some(value) } else { last };
                }
                _ if left.len() > lost && world.settings.is_roomy() && world.settings.numbers_all_edges() => {
                    return Err(format!("values {left:?} of {key} are lost ({lost} may be)"));
                }
                _ => break,
            }
        }
    }
    Ok(())
}

/// Receives once. Returns how the receive ended, or `None` if it was refused.
fn receive_now(world: &mut World, key: Key) -> Result<Option<End>, Violation> {
    let call = world.model.calls.len();
    let into: Option<Form> = None;
    let timeout = DRAIN.as_micros() as u64;
    world.act(&Action::Receive { key, into, timeout: Some(timeout), kind: ReceiveKind::Callback })?;
    settle(world)?;
    if world.model.calls[call].end.is_none() {
        every_call_ends(world)?;
    }
    world.processes.iter_mut().flatten().for_each(|process| process.held.clear());
    settle(world)?;
    Ok(world.model.calls[call].end)
}

fn failed(call: &Call) -> bool {
    call.cancelled.is_some() || matches!(call.end, Some(End::Failed { .. } | End::Dropped | End::Unheard))
}

fn gave_up(model: &Model, key: &Key) -> bool {
    model.channels[key].calls.iter().any(|call| failed(&model.calls[*call]))
}

/// `early` says whether standing requests end before the steps do.
fn nothing_is_left(world: &mut World, early: bool) -> Result<(), Violation> {
    let stop =
        |world: &mut World| world.processes.iter_mut().flatten().for_each(|process| process.standing.clear());
    if early {
        stop(world);
    }
    for at in 0..world.settings.processes {
        for step in 0..crate::program::STEPS {
            world.act(&Action::Cleanup { at, step })?;
        }
    }
    settle(world)?;
    stop(world);
    settle(world)?;
    for process in world.processes.iter().flatten() {
        // Asks the peers, whose answers come before the network is quiet again.
        drop(process.untaken());
    }
    settle(world)?;
    for process in world.processes.iter().flatten() {
        let untaken = process.untaken();
        if !untaken.is_empty() {
            return Err(format!("{} takes values for untaken: {untaken}", process.at));
        }
        let outstanding = process.outstanding.load(Ordering::Relaxed);
        if outstanding != 0 {
            return Err(format!("{} still counts {outstanding} values that wait", process.at));
        }
        if process.load() != RemoteLoad::default() {
            return Err(format!("{} still has something to do: {:?}", process.at, process.load()));
        }
        if process.loans() != LoanFigures::default() {
            return Err(format!("{} still counts loans: {:?}", process.at, process.loans()));
        }
        if !process.pool.is_empty() {
            return Err(format!("{} still has tensors: {:?}", process.at, process.pool.stats()));
        }
    }
    match world.dead_pools.iter().find(|pool| !pool.is_empty()) {
        Some(pool) => Err(format!("a dead member's pool still has tensors: {:?}", pool.stats())),
        None => Ok(()),
    }
}
