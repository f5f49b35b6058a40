//! The random programs of `tests/simulation` between real processes: each member of a program is a
//! process with a node. The same generator makes them, and the same model says what each receive
//! may get.
//!
//! The test has the members act one after the other, as the program says, while their tensors
//! travel. So the values of an edge are in a known order, and what a call may get does not depend
//! on how fast anything is. At the end every value must be where the model says, and nothing may be
//! left.
//!
//! Time is real here. Deadlines are fifty times shorter than in the simulation, and a call may fail
//! late, but not before its deadline. Calls that wait have ten times as long. Deaths, returns, cut
//! links, stalls and flipped bits are left out, as are the delays and tiny queues of the simulated
//! network. `kill_matrix`, `returns` and `outages` have deaths and faults. In one test connections
//! over TCP break while a program runs, which no call may notice. Pools have room for every
//! program. A dropped call may take a value with it, which comes amid the drop. Verbs needs a
//! device, which `tests/rxe` has.
//!
//! `TENSORWIRE_TEST_PROGRAMS` is the number of programs over each fabric, and
//! `TENSORWIRE_TEST_PROGRAM_SEED` the seed of the first.

mod cluster;
mod member;
mod reply;

#[path = "../simulation/calls.rs"]
mod calls;
#[path = "../simulation/generate.rs"]
mod generate;
#[path = "../simulation/model.rs"]
#[allow(dead_code, reason = "no member dies here")]
mod model;
#[path = "../simulation/order.rs"]
mod order;
#[path = "../simulation/program.rs"]
#[allow(dead_code, reason = "some settings are of the simulated network")]
mod program;
#[path = "../simulation/random.rs"]
#[allow(dead_code, reason = "the network of the simulation uses all of it")]
mod random;

use crate::common::over_verbs;
use cluster::{Cluster, Summary};
use program::{Action, Form, Program};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

/// Programs over each fabric in the gate.
const FEW: u64 = 6;

/// How many times as large the tensors of a program are that has larger ones.
const LARGER: u64 = 60;

/// A number from an environment variable.
fn setting(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is '{text}': give a whole number")))
}

/// The program of a seed. Every second one has larger tensors, many of which are written to their
/// destinations: those of the simulation are small.
fn program_of(seed: u64) -> Program {
    let mut program = generate::program(seed);
    if seed % 2 == 1 {
        program.actions.iter_mut().for_each(enlarge);
    }
    program
}

fn enlarge(action: &mut Action) {
    let larger = |form: &mut Form| {
        // A serialised tensor has a length of its own.
        let times = if form.dtype.size().is_some() { LARGER } else { 1 };
        form.dims.iter_mut().take(1).for_each(|dim| *dim *= times);
    };
    match action {
        Action::Send { form, .. } | Action::Receive { into: form, .. } => form.iter_mut().for_each(larger),
        Action::SendAll { values } => {
            values.iter_mut().filter_map(|(_, form)| form.as_mut()).for_each(larger)
        }
        Action::WaitForAll { into, .. } => into.iter_mut().for_each(larger),
        _ => {}
    }
}

/// The real time for a time of the program, in us.
fn patience(micros: u64) -> Duration {
    Duration::from_micros(micros / 50)
}

/// The real time of a call that waits while no other member acts.
fn direct_patience(micros: u64) -> Duration {
    Duration::from_micros(micros * 10)
}

/// The real time of a receive without a timeout of its own. A node has a millisecond at least.
fn default_patience(micros: u64) -> Duration {
    patience(micros).max(Duration::from_millis(1))
}

/// What goes on while a program runs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Faults {
    None,
    /// Connections over TCP break.
    Connections,
}

fn run_programs(test: &str, fabric: &str, faults: Faults) {
    if std::env::var("TENSORWIRE_TEST_POLL").is_ok_and(|mode| mode == "inline") {
        return println!("skipped: in inline mode nothing moves while a member waits to be told");
    }
    let first = setting("TENSORWIRE_TEST_PROGRAM_SEED").unwrap_or(0);
    let count = setting("TENSORWIRE_TEST_PROGRAMS").unwrap_or(FEW);
    let (began, mut sum) = (Instant::now(), Summary::default());
    for seed in first..first + count {
        let again = format!(
            "again: TENSORWIRE_TEST_PROGRAM_SEED={seed} TENSORWIRE_TEST_PROGRAMS=1 \
             cargo test --test processes -- {test} --nocapture"
        );
        let run = || Cluster::start(seed, fabric, faults).run();
        match catch_unwind(AssertUnwindSafe(run)) {
            Ok(Ok(summary)) => sum.add(summary),
            Ok(Err(why)) => panic!("{}\nseed {seed} fails: {why}\n{again}", program_of(seed)),
            Err(panic) => {
                println!("seed {seed} fails\n{again}");
                resume_unwind(panic);
            }
        }
    }
    let Summary { sent, delivered, failed, breaks, repairs } = sum;
    println!("seeds {first} to {} over {fabric} in {:?}", first + count - 1, began.elapsed());
    println!("{sent} values were sent; {delivered} receives got a value, {failed} an error");
    assert!(delivered > 0 && (failed > 0 || count == 1), "the programs do nothing");
    if faults == Faults::Connections {
        println!("{breaks} connections were broken; members counted {repairs} repaired links");
        assert!(repairs > 0, "nothing was to be repaired");
    }
}

#[test]
fn random_programs_do_what_the_model_says_over_tcp() {
    let test = "programs::random_programs_do_what_the_model_says_over_tcp";
    run_programs(test, "tcp", Faults::None);
}

#[test]
fn random_programs_do_what_the_model_says_over_connections_that_break() {
    let test = "programs::random_programs_do_what_the_model_says_over_connections_that_break";
    run_programs(test, "tcp", Faults::Connections);
}

#[test]
fn random_programs_do_what_the_model_says_over_shared_memory() {
    let test = "programs::random_programs_do_what_the_model_says_over_shared_memory";
    run_programs(test, "shm", Faults::None);
}

#[test]
fn random_programs_do_what_the_model_says_over_grpc_calls() {
    let test = "programs::random_programs_do_what_the_model_says_over_grpc_calls";
    run_programs(test, "grpc", Faults::None);
}

/// `tests/rxe` has a device for it.
#[test]
fn random_programs_do_what_the_model_says_over_verbs() {
    if !over_verbs() {
        return println!("skipped: TENSORWIRE_TEST_FABRIC is not verbs");
    }
    run_programs("programs::random_programs_do_what_the_model_says_over_verbs", "verbs", Faults::None);
}
