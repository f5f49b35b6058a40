//! Shrinks a failing program as far as it still fails.

use crate::check::{Outcome, attempt};
use crate::program::{Action, At, Form, Program, ROOMY, UNLIMITED};
use tensorwire::internals::matching::WINDOWS;

/// Largest number of programs that are tried.
const TRIES: usize = 3_000;

/// The smallest failing program that was found, and its failure.
pub fn shrink(program: Program, why: String) -> (Program, String) {
    let mut shrinker = Shrinker { best: program, why, tries: 0 };
    loop {
        let before = (shrinker.best.actions.len(), weight(&shrinker.best));
        shrinker.delete_actions();
        shrinker.fewer_processes();
        shrinker.plainer_settings();
        shrinker.smaller_actions();
        if (shrinker.best.actions.len(), weight(&shrinker.best)) == before || shrinker.tries >= TRIES {
            return (shrinker.best, shrinker.why);
        }
    }
}

struct Shrinker {
    best: Program,
    why: String,
    tries: usize,
}

impl Shrinker {
    /// Keeps a smaller program if it fails too.
    fn offer(&mut self, smaller: Program) -> bool {
        if self.tries >= TRIES {
            return false;
        }
        self.tries += 1;
        match attempt(&smaller) {
            Outcome::Fails(why) => {
                (self.best, self.why) = (smaller, why);
                true
            }
            Outcome::Passes(_) => false,
        }
    }

    fn delete_actions(&mut self) {
        let mut size = self.best.actions.len().div_ceil(2).max(1);
        loop {
            let mut at = 0;
            while at < self.best.actions.len() {
                let mut smaller = self.best.clone();
                let end = (at + size).min(smaller.actions.len());
                smaller.actions.drain(at..end);
                if !self.offer(smaller) {
                    at += size;
                }
            }
            if size == 1 {
                return;
            }
            size /= 2;
        }
    }

    fn fewer_processes(&mut self) {
        let mut gone = 0;
        while self.best.settings.processes > 2 && gone < self.best.settings.processes {
            let mut smaller = self.best.clone();
            smaller.settings.processes -= 1;
            smaller.actions = smaller.actions.iter().filter_map(|action| without(action, gone)).collect();
            if !self.offer(smaller) {
                gone += 1;
            }
        }
    }

    fn plainer_settings(&mut self) {
        let plainer: &[fn(&mut Program)] = &[
            |program| program.settings.pool_bytes = ROOMY,
            |program| program.settings.full_per_mille = 0,
            |program| program.settings.poll_batch = 64,
            |program| program.settings.max_requests = UNLIMITED,
            |program| program.settings.max_outstanding_sends = UNLIMITED,
            |program| program.settings.borrow = false,
            |program| program.settings.max_lent_bytes = u64::MAX,
            |program| program.settings.loss_is_fatal = false,
            |program| program.settings.delay = 0,
            |program| program.settings.completion_delay = 0,
            |program| program.settings.flip_per_mille = 0,
            |program| program.settings.windows = WINDOWS,
            |program| program.settings.validating = 0,
        ];
        for change in plainer {
            let mut smaller = self.best.clone();
            change(&mut smaller);
            if weight(&smaller) < weight(&self.best) {
                self.offer(smaller);
            }
        }
    }

    fn smaller_actions(&mut self) {
        for at in 0..self.best.actions.len() {
            for action in halves(&self.best.actions[at]) {
                let mut smaller = self.best.clone();
                smaller.actions[at] = action;
                self.offer(smaller);
            }
        }
    }
}

/// Reductions that keep the number of actions.
fn weight(program: &Program) -> u64 {
    let settings = &program.settings;
    let limits = [settings.max_requests, settings.max_outstanding_sends];
    let set = limits.iter().filter(|limit| **limit < UNLIMITED).count() as u64
        + u64::from(settings.pool_bytes < ROOMY)
        + u64::from(settings.full_per_mille > 0)
        + u64::from(settings.poll_batch < 64)
        + u64::from(settings.borrow)
        + u64::from(settings.max_lent_bytes < u64::MAX)
        + u64::from(settings.loss_is_fatal)
        + u64::from(settings.delay > 0)
        + u64::from(settings.completion_delay > 0)
        + u64::from(settings.flip_per_mille > 0)
        + u64::from(settings.windows != WINDOWS)
        + u64::from(settings.validating.count_ones());
    let sizes: u64 = program.actions.iter().map(size).sum();
    1_000 * settings.processes as u64 + set + sizes
}

fn size(action: &Action) -> u64 {
    let bytes = |form: &Option<Form>| form.as_ref().map_or(0, |form| form.meta().bytes());
    match action {
        Action::Send { form, .. } => bytes(form),
        Action::SendAll { values } => values.iter().map(|(_, form)| 10 + bytes(form)).sum(),
        Action::ReceiveAll { keys, timeout } => 10 * keys.len() as u64 + timeout,
        Action::WaitForAll { keys, into, timeout } => {
            10 * keys.len() as u64 + timeout + into.iter().map(|form| form.meta().bytes()).sum::<u64>()
        }
        Action::Receive { into, timeout, .. } => bytes(into) + timeout.unwrap_or(0),
        Action::Progress { times, .. } => u64::from(*times),
        Action::Run { rounds } => u64::from(*rounds),
        Action::Advance { time } | Action::Stall { time, .. } => *time,
        Action::Stand { window, .. } | Action::Window { window, .. } => u64::from(*window),
        _ => 0,
    }
}

fn halves(action: &Action) -> Vec<Action> {
    let half = |form: &Form| {
        let mut smaller = form.clone();
        smaller.dims.iter_mut().for_each(|dim| *dim = dim.div_ceil(2));
        smaller.serialized /= 2;
        smaller
    };
    let halved: Vec<Action> = match action {
        Action::Send { key, form: Some(form) } => {
            vec![Action::Send { key: *key, form: Some(half(form)) }]
        }
        Action::Receive { key, into, timeout, kind } => vec![
            Action::Receive { key: *key, into: None, timeout: *timeout, kind: *kind },
            Action::Receive {
                key: *key,
                into: into.as_ref().map(half),
                timeout: timeout.map(|t| t / 2),
                kind: *kind,
            },
        ],
        Action::SendAll { values } => {
            (0..values.len()).map(|at| Action::SendAll { values: without_one(values, at) }).collect()
        }
        Action::ReceiveAll { keys, timeout } => {
            let fewer = |at| Action::ReceiveAll { keys: without_one(keys, at), timeout: *timeout };
            let sooner = Action::ReceiveAll { keys: keys.clone(), timeout: timeout / 2 };
            (0..keys.len()).map(fewer).chain([sooner]).collect()
        }
        Action::WaitForAll { keys, into, timeout } => {
            let of = |keys, into, timeout| Action::WaitForAll { keys, into, timeout };
            let fewer = |at| {
                let into = if into.is_empty() { Vec::new() } else { without_one(into, at) };
                of(without_one(keys, at), into, *timeout)
            };
            let others =
                [of(keys.clone(), Vec::new(), *timeout), of(keys.clone(), into.clone(), timeout / 2)];
            (0..keys.len()).map(fewer).chain(others).collect()
        }
        Action::Progress { at, times } => vec![Action::Progress { at: *at, times: times / 2 }],
        Action::Run { rounds } => {
            vec![Action::Run { rounds: rounds / 2 }, Action::Run { rounds: rounds.saturating_sub(1) }]
        }
        Action::Advance { time } => vec![Action::Advance { time: time / 2 }],
        Action::Stand { key, window } => vec![Action::Stand { key: *key, window: window / 2 }],
        Action::Window { nth, window } => vec![Action::Window { nth: *nth, window: window / 2 }],
        Action::Stall { at, time } => vec![Action::Stall { at: *at, time: time / 2 }],
        _ => Vec::new(),
    };
    halved.into_iter().filter(|smaller| size(smaller) < size(action)).collect()
}

fn without_one<T: Clone>(all: &[T], at: usize) -> Vec<T> {
    [&all[..at], &all[at + 1..]].concat()
}

/// The same action without one process. The numbers of the processes after it decrease by one.
fn without(action: &Action, gone: At) -> Option<Action> {
    let mut action = action.clone();
    let named: Vec<&mut At> = match &mut action {
        Action::Send { key, .. } | Action::Receive { key, .. } | Action::Stand { key, .. } => {
            vec![&mut key.from, &mut key.to]
        }
        Action::SendAll { values } => {
            values.iter_mut().flat_map(|(key, _)| [&mut key.from, &mut key.to]).collect()
        }
        Action::ReceiveAll { keys, .. } | Action::WaitForAll { keys, .. } => {
            keys.iter_mut().flat_map(|key| [&mut key.from, &mut key.to]).collect()
        }
        Action::Cut { a, b } => vec![a, b],
        Action::Begin { at, .. }
        | Action::Abort { at, .. }
        | Action::AbortFrom { at, .. }
        | Action::Cleanup { at, .. }
        | Action::Progress { at, .. }
        | Action::Kill { at, .. }
        | Action::Flush { at }
        | Action::Leave { at }
        | Action::Return { at }
        | Action::Stall { at, .. } => vec![at],
        Action::Cancel { .. }
        | Action::DropPending { .. }
        | Action::Release { .. }
        | Action::Window { .. }
        | Action::Unstand { .. }
        | Action::Run { .. }
        | Action::Advance { .. } => Vec::new(),
    };
    for at in named {
        if *at == gone {
            return None;
        }
        *at -= usize::from(*at > gone);
    }
    Some(action)
}
