//! Random programs on whole engines in virtual time, against a simple reference.
//!
//! A program is drawn from a seed, and so is everything that the network does; a seed that fails is shrunk and printed,
//! and runs the same again:
//!
//! ```text
//! TENSORWIRE_TEST_SIM_SEED=1234 cargo test --test simulation -- a_seed --nocapture
//! ```
//!
//! `TENSORWIRE_TEST_SIM_SECONDS` says how long new programs are tried, `TENSORWIRE_TEST_SIM_FIRST` with which seed that begins.

mod model;
#[cfg(tensorwire_mutants)]
mod mutants;
mod program;
mod run;
mod shrink;
mod world;

use program::Program;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

fn variable(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text:?} is no number")))
}

/// Runs a program; a panic in it is a failure like any other.
fn attempt(program: &Program) -> Result<u64, String> {
    let run = catch_unwind(AssertUnwindSafe(|| run::run(program, false)));
    run.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Err(format!("panicked: {}", text.unwrap_or_default()))
    })
}

/// Runs the program of a seed.
///
/// # Panics
/// If it fails, with the program, shrunk.
fn try_seed(seed: u64) -> u64 {
    let program = Program::random(seed);
    match attempt(&program) {
        Ok(digest) => digest,
        Err(why) => {
            let (program, shrunk_why) = shrink::shrink(program, why.clone());
            panic!(
                "seed {seed}: {why}\nshrunk: {shrunk_why}\n{:#?}\n{}\nagain: TENSORWIRE_TEST_SIM_SEED={seed} cargo test \
                 --test simulation -- a_seed --nocapture",
                program.setup,
                program.actions.iter().map(|action| format!("    {action:?}\n")).collect::<String>(),
            );
        }
    }
}

#[test]
fn random_programs_do_what_the_reference_allows() {
    let span = Duration::from_secs(variable("TENSORWIRE_TEST_SIM_SECONDS").unwrap_or(5));
    let first = variable("TENSORWIRE_TEST_SIM_FIRST").unwrap_or(0);
    let start = Instant::now();
    let mut seed = first;
    while start.elapsed() < span {
        try_seed(seed);
        seed += 1;
    }
    println!("{} programs, seeds {first} to {}, in {:?}", seed - first, seed - 1, start.elapsed());
}

#[test]
fn the_same_seed_has_the_same_history() {
    let digests = |seeds: std::ops::Range<u64>| seeds.map(try_seed).collect::<Vec<_>>();
    let (once, again) = (digests(0..40), digests(0..40));
    assert_eq!(once, again);
    assert!(once.windows(2).all(|pair| pair[0] != pair[1]), "other seeds have other histories");
}

#[test]
fn a_seed() {
    let Some(seed) = variable("TENSORWIRE_TEST_SIM_SEED") else {
        println!("skipped: TENSORWIRE_TEST_SIM_SEED names no seed");
        return;
    };
    let program = Program::random(seed);
    println!("{:#?}", program.setup);
    println!("{:?}", run::run(&program, true));
    try_seed(seed);
}
