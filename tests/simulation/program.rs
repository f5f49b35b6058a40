//! Random programs: what the members of a small cluster do, one action after the other.

use std::time::Duration;

/// SplitMix64.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }
}

/// The cluster and the network of a program.
#[derive(Clone, Debug)]
pub struct Setup {
    pub seed: u64,
    pub members: usize,
    pub lanes: u8,
    pub pool: u64,
    pub borrow: bool,
    pub small_tensor_bytes: u32,
    pub max_requests: u32,
    pub max_routes: u32,
    pub max_deferred: u32,
    pub max_outstanding: u32,
    pub slowest_us: u64,
    pub late_us: u64,
    pub poll_batch: usize,
    pub full_per_mille: u32,
    pub lends: bool,
}

/// Where a tensor goes: from one member to another (or itself), on an edge, in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    pub from: usize,
    pub to: usize,
    pub edge: usize,
    pub step: u64,
}

/// What a receive wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    Any,
    /// Into a tensor of so many bytes.
    Into(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Bytes; `None` is a dead value.
    Send(Key, Option<usize>),
    /// The timeout in us of virtual time.
    Recv(Key, Want, u64),
    /// Cancels a call by its token, or drops it.
    Cancel(usize),
    DropCall(usize),
    /// Lets go of a tensor that a call brought.
    Release(usize),
    Abort(usize, u64),
    Cleanup(usize, u64),
    Kill(usize),
    Return(usize),
    Cut(usize, usize),
    Stall(usize, u64),
    Progress(usize),
    /// Time passes: us.
    Pass(u64),
}

#[derive(Clone, Debug)]
pub struct Program {
    pub setup: Setup,
    pub actions: Vec<Action>,
}

/// How long who has time waits.
pub const PATIENCE: Duration = Duration::from_secs(10);

const EDGES: usize = 3;
const STEPS: u64 = 3;

impl Program {
    /// The program of a seed.
    pub fn random(seed: u64) -> Program {
        let mut random = Random(seed);
        let setup = Setup {
            seed,
            members: random.one_of(&[2, 2, 2, 3]),
            lanes: random.one_of(&[1, 1, 2]),
            pool: random.one_of(&[96 << 10, 1 << 20, 1 << 20]),
            borrow: random.chance(30),
            small_tensor_bytes: random.one_of(&[0, 64, 128]),
            max_requests: random.one_of(&[3, 64, 64]),
            max_routes: random.one_of(&[2, 64]),
            max_deferred: random.one_of(&[2, 64]),
            max_outstanding: random.one_of(&[4, 1000, 1000]),
            slowest_us: random.one_of(&[1, 20, 500]),
            late_us: random.one_of(&[0, 50]),
            poll_batch: random.one_of(&[1, 4, 32]),
            full_per_mille: random.one_of(&[0, 0, 200]),
            lends: random.chance(80),
        };
        let mortal = random.chance(30);
        let fragile = random.chance(20);
        let ending = random.chance(40);
        let count = 10 + random.below(70);
        let mut program = Program { setup, actions: Vec::new() };
        let mut calls = 0;
        for _ in 0..count {
            let action = program.action(&mut random, &mut calls, mortal, fragile, ending);
            program.actions.push(action);
            // Sometimes nobody looks for a while.
            for _ in 0..random.below(4) {
                let member = random.below(program.setup.members);
                program.actions.push(Action::Progress(member));
            }
        }
        program
    }

    fn key(&self, random: &mut Random) -> Key {
        let members = self.setup.members;
        let from = random.below(members);
        // A few are local.
        let to = if random.chance(8) { from } else { (from + 1 + random.below(members - 1)) % members };
        Key { from, to, edge: random.below(EDGES), step: 1 + random.next() % STEPS }
    }

    fn action(
        &self,
        random: &mut Random,
        calls: &mut usize,
        mortal: bool,
        fragile: bool,
        ending: bool,
    ) -> Action {
        let members = self.setup.members;
        let sizes = [0, 8, 100, 300, 5000, 30_000];
        match random.below(100) {
            0..32 => Action::Send(
                self.key(random),
                if random.chance(8) { None } else { Some(random.one_of(&sizes)) },
            ),
            32..64 => {
                *calls += 1;
                let want = if random.chance(20) { Want::Into(random.one_of(&sizes)) } else { Want::Any };
                let timeout = if random.chance(12) {
                    random.one_of(&[0, 3, 50, 700])
                } else {
                    PATIENCE.as_micros() as u64
                };
                Action::Recv(self.key(random), want, timeout)
            }
            64..70 if *calls > 0 => Action::Cancel(random.below(*calls)),
            70..74 if *calls > 0 => Action::DropCall(random.below(*calls)),
            74..80 if *calls > 0 => Action::Release(random.below(*calls)),
            80..82 if ending => Action::Abort(random.below(members), 1 + random.next() % STEPS),
            82..85 if ending => Action::Cleanup(random.below(members), 1 + random.next() % STEPS),
            85..87 if mortal => Action::Kill(random.below(members)),
            87..89 if mortal => Action::Return(random.below(members)),
            89 if fragile => {
                let one = random.below(members);
                Action::Cut(one, (one + 1) % members)
            }
            90 => Action::Stall(random.below(members), random.one_of(&[10, 1000, 50_000])),
            _ => Action::Pass(random.one_of(&[1, 10, 100, 2000])),
        }
    }
}
