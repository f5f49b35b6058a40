//! The simulation finds each mutant.

use crate::check::{Outcome, attempt};
use crate::generate::program;
use crate::setting;
use std::time::{Duration, Instant};
use tensorwire::internals::mutants::{Mutant, switch};

const BOUND: Duration = Duration::from_secs(60);

/// The first seed that shows a bug, and the failure.
fn find(mutant: Mutant) -> Option<(u64, String)> {
    let start = Instant::now();
    switch(Some(mutant));
    let found =
        (0..).take_while(|_| start.elapsed() < BOUND).find_map(|seed| match attempt(&program(seed)) {
            Outcome::Passes(_) => None,
            Outcome::Fails(why) => Some((seed, why)),
        });
    switch(None);
    found
}

#[test]
fn each_bug_is_found_within_a_minute() {
    // A panic counts as a finding. Its text is dropped.
    std::panic::set_hook(Box::new(|_| {}));
    let only = setting("TENSORWIRE_TEST_SIM_MUTANT").map(|nth| nth as usize);
    let mut missed = Vec::new();
    for (nth, mutant) in Mutant::OF_ENGINES.iter().copied().enumerate() {
        if only.is_some_and(|only| only != nth) {
            continue;
        }
        let start = Instant::now();
        match find(mutant) {
            Some((seed, why)) => {
                let alone = matches!(attempt(&program(seed)), Outcome::Passes(_));
                let time = start.elapsed().as_secs_f64();
                println!("{mutant:?}: found after {time:.1} s by seed {seed}: {why}");
                if !alone {
                    println!("    but that seed fails without it too");
                    missed.push(mutant);
                }
            }
            None => {
                println!("{mutant:?}: not found");
                missed.push(mutant);
            }
        }
    }
    let _ = std::panic::take_hook();
    assert!(missed.is_empty(), "not found: {missed:?}");
}
