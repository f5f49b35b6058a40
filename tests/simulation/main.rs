//! Simulation of the whole engine: random programs in virtual time, against a model of what should come out.

mod check;
mod generate;
mod model;
mod network;
mod process;
mod program;
mod random;
mod world;

use check::run;
use generate::program;

#[test]
fn random_programs() {
    let from: u64 = std::env::var("TENSORWIRE_SIM_SEED").map_or(0, |seed| seed.parse().expect("a seed"));
    for seed in from..from + 200 {
        if let Err(why) = run(&program(seed)) {
            panic!("seed {seed}: {why}\n{}", program(seed));
        }
    }
}
