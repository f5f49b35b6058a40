//! Makes a program that fails as small as it gets.

use crate::attempt;
use crate::program::{Action, Program};

/// Runs that shrinking may take.
const RUNS: usize = 600;

/// A smaller program that fails too, and how.
pub fn shrink(program: Program, why: String) -> (Program, String) {
    let quiet = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let smaller = without_actions(program, why);
    std::panic::set_hook(quiet);
    smaller
}

/// Leaves out runs of actions, shorter and shorter ones. What is left out becomes a pass of no time, and goes last.
fn without_actions(mut program: Program, mut why: String) -> (Program, String) {
    let mut runs = 0;
    let mut chunk = program.actions.len() / 2;
    while chunk > 0 {
        let mut at = 0;
        while at < program.actions.len() && runs < RUNS {
            let mut smaller = program.clone();
            let end = (at + chunk).min(smaller.actions.len());
            let blank = |action: &mut Action| *action = Action::Pass(0);
            smaller.actions[at..end].iter_mut().for_each(blank);
            runs += 1;
            match attempt(&smaller) {
                Err(still) if smaller.actions != program.actions => (program, why) = (smaller, still),
                _ => {}
            }
            at += chunk;
        }
        chunk /= 2;
    }
    program.actions.retain(|action| *action != Action::Pass(0));
    (program, why)
}
