//! Each of the bugs that can be switched on is found.

use crate::program::Program;
use crate::{attempt, variable};
use std::time::{Duration, Instant};
use tensorwire::mutants::{Mutant, switch};

/// How long a bug may go unseen.
const BOUND: Duration = Duration::from_secs(60);

/// The first seed that shows a bug, and how.
fn find(mutant: Mutant) -> Option<(u64, String)> {
    let start = Instant::now();
    switch(Some(mutant));
    let mut seeds = (0..).take_while(|_| start.elapsed() < BOUND);
    let found = seeds.find_map(|seed| Some((seed, attempt(&Program::random(seed)).err()?)));
    switch(None);
    found
}

#[test]
fn each_bug_is_found_within_a_minute() {
    // A bug may show as a panic, which counts; its text is not of interest.
    std::panic::set_hook(Box::new(|_| {}));
    let only = variable("TENSORWIRE_TEST_SIM_MUTANT").map(|nth| nth as usize);
    let mut missed = Vec::new();
    for (nth, mutant) in Mutant::ALL.iter().copied().enumerate() {
        if only.is_some_and(|only| only != nth) {
            continue;
        }
        let start = Instant::now();
        let found = find(mutant);
        let time = start.elapsed().as_secs_f64();
        match &found {
            Some((seed, why)) => println!("{nth} {mutant:?}: found after {time:.1} s by seed {seed}: {why}"),
            None => println!("{nth} {mutant:?}: not found in {time:.1} s"),
        }
        let passes_without = found.is_some_and(|(seed, _)| attempt(&Program::random(seed)).is_ok());
        if !passes_without {
            missed.push(mutant);
        }
    }
    let _ = std::panic::take_hook();
    assert!(missed.is_empty(), "not found, or found where there was another failure: {missed:?}");
}
