//! The `tensorwire` program: benchmarks and diagnostics.

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::run()
}
