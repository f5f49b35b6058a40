//! Simulation of the whole engine: random programs in virtual time, compared with a model.
//!
//! The default is a few seconds of programs from seed 0 on. `TENSORWIRE_TEST_SIM_SECONDS` sets the
//! duration and `TENSORWIRE_TEST_SIM_SEED` the first seed. `replay` runs that one seed, and prints
//! the program and the trace of the network.

mod batches;
mod bootstrap;
mod calls;
mod check;
mod generate;
mod model;
#[cfg(tensorwire_mutants)]
mod mutants;
mod network;
mod order;
mod process;
mod program;
mod random;
mod shrink;
mod world;

use check::{Outcome, attempt};
use generate::program;
use std::time::{Duration, Instant};
use tensorwire::Counter;

/// A number from an environment variable.
fn setting(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is '{text}': give a whole number")))
}

/// Prints the shrunk program of a failing seed, and the command that repeats it.
fn fail(seed: u64, why: &str) -> ! {
    // First, because shrinking may take long.
    eprintln!("seed {seed} fails: {why}");
    let (small, small_why) = shrink::shrink(program(seed), why.to_owned());
    panic!(
        "seed {seed} fails: {why}\n\nthe smallest program that does: {small_why}\n{small}\n\
         again: TENSORWIRE_TEST_SIM_SEED={seed} cargo test --test simulation replay -- --nocapture\n"
    );
}

#[test]
fn random_programs_do_what_the_model_says() {
    let time = Duration::from_secs(setting("TENSORWIRE_TEST_SIM_SECONDS").unwrap_or(3));
    let first = setting("TENSORWIRE_TEST_SIM_SEED").unwrap_or(0);
    let start = Instant::now();
    let (mut seed, mut delivered, mut failed) = (first, 0, 0);
    while start.elapsed() < time {
        match attempt(&program(seed)) {
            Outcome::Passes(report) => {
                delivered += report.delivered;
                failed += report.failed;
            }
            Outcome::Fails(why) => fail(seed, &why),
        }
        seed += 1;
    }
    let rate = (seed - first) as f64 / start.elapsed().as_secs_f64();
    println!("seeds {first} to {}: {rate:.0} programs a second", seed - 1);
    println!("{delivered} receives got a value, {failed} an error");
    assert!(delivered > 0 && failed > 0, "the programs do nothing");
}

/// The digests of a few programs.
fn digests(seeds: std::ops::Range<u64>) -> Vec<u64> {
    seeds
        .map(|seed| match attempt(&program(seed)) {
            Outcome::Passes(report) => report.digest,
            Outcome::Fails(why) => fail(seed, &why),
        })
        .collect()
}

const REPEATED: std::ops::Range<u64> = 0..40;

#[test]
fn the_same_seed_has_the_same_history() {
    let (once, again) = (digests(REPEATED), digests(REPEATED));
    assert_eq!(once, again);
    assert!(once.windows(2).all(|pair| pair[0] != pair[1]), "other seeds have other histories");
    // Hash keys differ in each process.
    let output = std::process::Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "histories_of_a_child", "--nocapture"])
        .env("TENSORWIRE_TEST_SIM_CHILD", "1")
        .output()
        .expect("it runs");
    let text = String::from_utf8_lossy(&output.stdout);
    let told = text.lines().find_map(|line| line.split_once("digests ")).map(|(_, digests)| digests);
    assert_eq!(told, Some(format!("{once:?}").as_str()), "{text}{}", String::from_utf8_lossy(&output.stderr));
}

/// Counters that stay at 0 if the programs exercise nothing.
const REACHED: &[Counter] = &[
    Counter::WritesPosted,
    Counter::LoansPosted,
    Counter::LoansRefused,
    Counter::SmallTensorsSent,
    Counter::MetasSent,
    Counter::PacksSent,
    Counter::Batches,
    Counter::CreditsPublished,
    Counter::PoolExhausted,
    Counter::ErrorsReceived,
    Counter::PeersLost,
    Counter::TensorsReceived,
    Counter::ChecksumsVerified,
    Counter::ChecksumMismatches,
    Counter::IdlePolls,
];

#[test]
fn the_programs_lead_everywhere() {
    let mut sums = vec![0; Counter::ALL.len()];
    for seed in 0..60 {
        match attempt(&program(seed)) {
            Outcome::Passes(report) => {
                sums.iter_mut().zip(report.counts).for_each(|(sum, count)| *sum += count)
            }
            Outcome::Fails(why) => fail(seed, &why),
        }
    }
    let reached: Vec<Counter> =
        Counter::ALL.iter().zip(sums).filter(|(_, sum)| *sum > 0).map(|(counter, _)| *counter).collect();
    let missed: Vec<_> = REACHED.iter().filter(|counter| !reached.contains(counter)).collect();
    assert!(missed.is_empty(), "no program gets as far as {missed:?}");
}

#[test]
fn histories_of_a_child() {
    if setting("TENSORWIRE_TEST_SIM_CHILD").is_some() {
        println!("digests {:?}", digests(REPEATED));
    }
}

#[test]
fn replay() {
    let Some(seed) = setting("TENSORWIRE_TEST_SIM_SEED") else {
        return println!("skipped: TENSORWIRE_TEST_SIM_SEED names no seed to replay");
    };
    println!("{}", program(seed));
    match check::show(&program(seed)) {
        Ok(report) => println!("{report:?}"),
        Err(why) => fail(seed, &why),
    }
}
