//! Generates programs from seeds.

use super::program::{Action, Form, Key, NAMES, Program, ROOMY, ReceiveKind, STEPS, Settings, UNLIMITED};
use super::random::Random;
use tensorwire::DType;
use tensorwire::internals::fabric::MAX_MESSAGE;
use tensorwire::internals::matching::WINDOWS;
use tensorwire::internals::protocol::WindowOptions;

const DTYPES: [DType; 8] = [
    DType::U8,
    DType::F32,
    DType::F64,
    DType::Bool,
    DType::Bf16,
    DType::Complex128,
    DType::String,
    DType::Variant,
];

/// Seeds of the windows differ from those of the rest by this.
const WINDOW_SEEDS: u64 = 1 << 40;

/// The program that belongs to a seed.
pub fn program(seed: u64) -> Program {
    let mut random = Random::new(seed);
    let mut settings = settings(&mut random);
    settings.windows = windows(&mut Random::new(seed ^ WINDOW_SEEDS));
    let (deaths, busy, stands) = (random.one_in(3), random.below(3), random.one_in(2));
    let batches = random.one_in(2);
    if batches && random.one_in(3) {
        settings.max_requests = 2 + random.below(6) as u32;
    }
    let mut from = Generator { deaths, busy, stands, batches, recent: Vec::new(), settings, random };
    let length = 20 + from.random.below(120);
    let bursts = from.random.one_in(4);
    let mut actions = Vec::new();
    while actions.len() < length as usize {
        if from.stands && from.random.one_in(40) {
            actions.extend(from.training());
        }
        if from.batches && from.random.one_in(30) {
            actions.extend(from.batch_training());
        }
        let action = from.action();
        let repeats = bursts
            && from.random.one_in(12)
            && matches!(action, Action::Send { .. } | Action::Receive { .. });
        actions.extend(vec![action; if repeats { 10 + from.random.below(30) as usize } else { 1 }]);
    }
    if from.deaths && from.random.one_in(2) {
        actions.extend(from.calm_and_cut());
    }
    Program { seed, settings: from.settings, actions }
}

/// Tiny windows in every third program. The other draws are those of the seed, whatever these are.
fn windows(random: &mut Random) -> WindowOptions {
    if !random.one_in(3) {
        return WINDOWS;
    }
    let max_edges = random.pick(&[1, 2, 3, WINDOWS.max_edges, WINDOWS.max_edges, WINDOWS.max_edges]);
    WindowOptions {
        first_window: random.pick(&[0, 1, 2]),
        usual_window: random.pick(&[2, 3, 8]),
        largest_window: random.pick(&[8, 16]),
        max_cells: random.pick(&[0, 3, 8, 40]),
        max_edges,
        kept_edges: random.below(u64::from(max_edges.min(4))) as u32,
        ..WINDOWS
    }
}

fn settings(random: &mut Random) -> Settings {
    let tiny = random.one_in(3);
    let limit = |random: &mut Random, least: u64| match tiny && random.one_in(2) {
        true => (least + random.below(4)) as u32,
        false => UNLIMITED,
    };
    Settings {
        processes: 2 + random.below(4).saturating_sub(1) as usize,
        depth: random.pick(&[16, 16, 32, 64]),
        small_tensor_bytes: random.pick(&[0, 16, 100, 190]),
        max_requests: limit(random, 1),
        max_outstanding_sends: limit(random, 2),
        pool_bytes: random.pick(&[8 << 10, 20 << 10, ROOMY, ROOMY, ROOMY]),
        borrow: random.one_in(2),
        loss_is_fatal: random.one_in(6),
        lends: !random.one_in(3),
        max_lent_bytes: random.pick(&[0, 1_000, 3_000, 10_000, u64::MAX, u64::MAX]),
        recv_timeout: random.pick(&[300, 5_000, 1_000_000, 60_000_000]),
        cancel_grace: random.pick(&[200, 100_000]),
        delay: random.pick(&[0, 3, 20, 500]),
        poll_batch: random.pick(&[1, 4, 64]),
        completion_delay: random.pick(&[0, 20, 1000]),
        full_per_mille: random.pick(&[0, 0, 50, 400]),
        validating: random.pick(&[0, 0, 1, 2, 5, u32::MAX]),
        flip_per_mille: random.pick(&[0, 10, 100, 500]),
        max_message: random.pick(&[MAX_MESSAGE, 300, 2000]),
        windows: WINDOWS,
    }
}

/// Number of keys that are used at the same time.
const RECENT: usize = 4;

struct Generator {
    random: Random,
    settings: Settings,
    /// Whether processes die and links break.
    deaths: bool,
    /// How much the load exceeds the time that the engine gets.
    busy: u64,
    /// Whether there are standing requests.
    stands: bool,
    /// Whether there are batches.
    batches: bool,
    /// Recent keys and forms, so that sends and receives meet.
    recent: Vec<(Key, Option<Form>)>,
}

impl Generator {
    fn action(&mut self) -> Action {
        let processes = self.settings.processes as u64;
        let at = self.random.below(processes) as usize;
        let step = self.step();
        let nth = self.random.below(8) as usize;
        if self.stands && self.random.one_in(8) {
            return self.standing();
        }
        if self.batches && self.random.one_in(6) {
            return if self.random.one_in(2) { self.send_all() } else { self.receive_all() };
        }
        match self.random.below(100 - 10 * self.busy) {
            0..20 => self.send(),
            20..40 => self.receive(),
            40..44 => Action::Cancel { nth },
            44..47 => Action::DropPending { nth },
            47..52 => Action::Release { nth },
            52..54 => Action::Begin { at, step },
            54 if self.random.one_in(2) => Action::Abort { at, step },
            55 if self.random.one_in(2) => Action::Cleanup { at, step },
            56 if self.random.one_in(4) => {
                Action::AbortFrom { at, step: STEPS / 2 + self.random.below(STEPS / 2) }
            }
            57 | 58 if self.deaths => self.disaster(at),
            59 => Action::Stall { at, time: 1 + self.random.below(2 * self.settings.delay.max(100)) },
            65 => Action::Flush { at },
            54..66 => Action::Advance { time: self.duration() },
            66..78 => Action::Progress { at, times: 1 + self.random.below(3) as u32 },
            _ => Action::Run { rounds: 1 + self.random.below(12) as u32 },
        }
    }

    fn standing(&mut self) -> Action {
        let (nth, window) = (self.random.below(8) as usize, self.random.pick(&[0, 1, 2, 3, 4, 8]));
        match self.random.below(5) {
            0..3 => Action::Stand { key: self.key_and_form().0, window: window.max(1) },
            3 => Action::Window { nth, window },
            _ => Action::Unstand { nth },
        }
    }

    /// An edge as a trainer uses it: standing requests, and a value in each step of the sequence.
    fn training(&mut self) -> Vec<Action> {
        let edge = self.key();
        let mut actions = vec![Action::Stand { key: edge, window: 4 }];
        for step in STEPS / 2..STEPS {
            let key = Key { step, ..edge };
            actions.push(Action::Send { key, form: self.value() });
            actions.push(Action::Run { rounds: 1 + self.random.below(12) as u32 });
            if !self.random.one_in(4) {
                let kind = self.pending_or_callback();
                actions.push(Action::Receive { key, into: None, timeout: Some(self.duration()), kind });
            }
            actions.push(Action::Run { rounds: 1 + self.random.below(12) as u32 });
        }
        actions
    }

    /// A batch as a trainer uses it: in each step its values are sent, and one call waits for all.
    fn batch_training(&mut self) -> Vec<Action> {
        let first = self.key();
        let edges: Vec<(Key, Option<Form>)> = (0..1 + self.random.below(5))
            .map(|_| {
                let name = self.random.below(NAMES);
                (Key { name, frame: self.random.below(2), ..first }, self.value())
            })
            .collect();
        let mut actions = Vec::new();
        for step in 0..STEPS {
            let of_step = |key: &Key| Key { step, ..*key };
            let sent = edges.iter().filter(|_| !self.random.one_in(30));
            let mut values: Vec<_> = sent.map(|(key, form)| (of_step(key), form.clone())).collect();
            if self.random.one_in(4) {
                values.reverse();
            }
            actions.push(Action::SendAll { values });
            let rounds = 1 + self.random.below(12) as u32;
            if !self.random.one_in(3) {
                actions.push(Action::Run { rounds });
            }
            let keys: Vec<Key> = edges.iter().map(|(key, _)| of_step(key)).collect();
            if self.random.one_in(6) {
                // The wait for the batch comes behind another receive of an edge.
                let key = keys[self.random.below(keys.len() as u64) as usize];
                let (timeout, kind) = (Some(self.duration()), self.pending_or_callback());
                actions.push(Action::Receive { key, into: None, timeout, kind });
                let form = self.value();
                actions.push(Action::Send { key, form });
            }
            let into = if self.random.one_in(3) { self.given(&edges) } else { Vec::new() };
            actions.push(Action::WaitForAll { keys, into, timeout: self.wait() });
            actions.push(Action::Release { nth: self.random.below(8) as usize });
        }
        actions
    }

    /// Tensors for the values of these keys, most of which fit.
    fn given(&mut self, values: &[(Key, Option<Form>)]) -> Vec<Form> {
        let forms = values.iter().map(|(_, form)| match form {
            Some(form) if !self.random.one_in(20) => form.clone(),
            _ => self.form(),
        });
        forms.collect()
    }

    fn disaster(&mut self, at: usize) -> Action {
        let told = self.random.one_in(2).then(|| self.random.below(2_000));
        match self.random.below(6) {
            0 => Action::Kill { at, told },
            1 => Action::Leave { at },
            2..5 => Action::Return { at },
            _ => {
                let other = 1 + self.random.below(self.settings.processes as u64 - 1) as usize;
                Action::Cut { a: at, b: (at + other) % self.settings.processes }
            }
        }
    }

    /// Every receive ends and is resolved. Then a link is lost; no value may be lost with it.
    fn calm_and_cut(&mut self) -> [Action; 7] {
        let a = self.random.below(self.settings.processes as u64) as usize;
        let b = (a + 1) % self.settings.processes;
        let run = || Action::Run { rounds: 12 };
        let longest = self.settings.recv_timeout.max(2_000_000);
        let grace = Action::Advance { time: self.settings.cancel_grace };
        [Action::Advance { time: longest }, run(), grace, run(), run(), Action::Cut { a, b }, run()]
    }

    /// Mostly the first step, or the first of the sequence, so that a key gets several values and
    /// receives.
    fn step(&mut self) -> u64 {
        match (self.random.one_in(3), self.stands) {
            (true, _) => self.random.below(STEPS),
            (false, false) => 0,
            (false, true) => STEPS / 2,
        }
    }

    fn key(&mut self) -> Key {
        let processes = self.settings.processes as u64;
        let (name, frame) = match self.random.one_in(2) {
            true => (0, 0),
            false => (self.random.below(NAMES), self.random.below(2)),
        };
        let from = self.random.below(processes) as usize;
        let to = match self.random.one_in(8) {
            true => from,
            false => (from + 1 + self.random.below(processes - 1) as usize) % processes as usize,
        };
        Key { from, to, name, step: self.step(), frame }
    }

    /// Often a recent one.
    fn key_and_form(&mut self) -> (Key, Option<Form>) {
        if !self.recent.is_empty() && !self.random.one_in(3) {
            let nth = self.random.below(self.recent.len() as u64) as usize;
            return self.recent[nth].clone();
        }
        let fresh = (self.key(), self.value());
        if self.recent.len() == RECENT {
            self.recent.remove(0);
        }
        self.recent.push(fresh.clone());
        fresh
    }

    fn send(&mut self) -> Action {
        let (key, form) = self.key_and_form();
        let form = if self.random.one_in(3) { self.value() } else { form };
        Action::Send { key, form: form.map(|form| self.renewed(form)) }
    }

    fn receive(&mut self) -> Action {
        let (key, form) = self.key_and_form();
        let into = match self.random.below(10) {
            0..3 => form,
            3 => Some(self.form()),
            _ => None,
        };
        let is_plain = into.is_none();
        let timeout = (is_plain && self.random.one_in(2)).then(|| self.duration());
        if self.random.one_in(6) {
            return Action::Receive { key, into, timeout: Some(self.wait()), kind: ReceiveKind::Direct };
        }
        let kind = match is_plain && timeout.is_some() {
            true => self.pending_or_callback(),
            false => ReceiveKind::Pending,
        };
        Action::Receive { key, into, timeout, kind }
    }

    fn pending_or_callback(&mut self) -> ReceiveKind {
        self.random.pick(&[ReceiveKind::Callback, ReceiveKind::Pending])
    }

    /// The size of a batch: mostly small, sometimes beyond the limits.
    fn batch_len(&mut self) -> u64 {
        if self.random.one_in(6) { 10 + self.random.below(50) } else { 1 + self.random.below(6) }
    }

    /// A batch of sends from the process and step of a recent key.
    fn send_all(&mut self) -> Action {
        let (first, form) = self.key_and_form();
        let mut values = vec![(first, form)];
        for _ in 1..self.batch_len() {
            let (key, form) = self.key_and_form();
            let to = if self.random.one_in(2) { first.to } else { key.to };
            let form = if self.random.one_in(2) { self.value() } else { form };
            values.push((Key { from: first.from, step: first.step, to, ..key }, form));
        }
        Action::SendAll { values }
    }

    fn receive_all(&mut self) -> Action {
        let (first, form) = self.key_and_form();
        let mut values = vec![(first, form)];
        for _ in 1..self.batch_len() {
            let (key, form) = self.key_and_form();
            let from = if self.random.one_in(2) { first.from } else { key.from };
            values.push((Key { to: first.to, step: first.step, from, ..key }, form));
        }
        let keys = values.iter().map(|(key, _)| *key).collect();
        if self.random.one_in(2) {
            let into = if self.random.one_in(3) { self.given(&values) } else { Vec::new() };
            return Action::WaitForAll { keys, into, timeout: self.wait() };
        }
        Action::ReceiveAll { keys, timeout: self.duration() }
    }

    fn value(&mut self) -> Option<Form> {
        (!self.random.one_in(10)).then(|| self.form())
    }

    /// Gives a serialised tensor another length, most of the time.
    fn renewed(&mut self, form: Form) -> Form {
        let keeps = form.dtype.size().is_some() || self.random.one_in(3);
        let serialized = if keeps { form.serialized } else { self.serialized() };
        Form { serialized, ..form }
    }

    fn serialized(&mut self) -> u64 {
        match self.random.below(4) {
            0 => self.random.below(200),
            1 => 400,
            _ => 1 + self.random.below(2_000),
        }
    }

    /// One of few forms, so that given tensors often fit.
    fn form(&mut self) -> Form {
        let dtype = match self.random.one_in(3) {
            true => self.random.pick(&DTYPES),
            false => DType::U8,
        };
        let dims = match self.random.below(12) {
            // A form that fits a small pool only a few times.
            0..7 if !self.settings.is_roomy() => vec![1_500 + 500 * self.random.below(4)],
            0 => vec![],
            1 => vec![0],
            2 => vec![3, 0, 2],
            3 => vec![16],
            4 | 5 => vec![100],
            6 => vec![2, 2, 2, 2, 2],
            7 => vec![1; 20],
            8 | 9 => vec![40, 10],
            10 => vec![1 + self.random.below(1000)],
            _ => vec![1000],
        };
        let serialized = if dtype.size().is_none() { self.serialized() } else { 0 };
        Form { dtype, dims, serialized }
    }

    /// The timeout of a call that waits, while no other process polls.
    fn wait(&mut self) -> u64 {
        match self.random.below(3) {
            0 => 0,
            1 => self.random.below(30),
            _ => self.random.below(1_000),
        }
    }

    fn duration(&mut self) -> u64 {
        match self.random.below(4) {
            0 => self.random.below(3),
            1 => self.random.below(100),
            2 => self.random.below(5_000),
            _ => self.random.below(2_000_000),
        }
    }
}
