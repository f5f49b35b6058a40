//! The command line of `perf`.

use crate::cli::CliError;
use clap::{Args, ValueEnum};
use std::path::PathBuf;
use std::time::Duration;
use tensorwire::process_cpus;

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Test {
    /// The bare fabric: a one-sided write with immediate, answered by another
    #[value(name = "write_lat")]
    WriteLat,
    /// The whole engine: a tensor sent and received by step and key, answered by another
    #[value(name = "rendezvous_lat")]
    RendezvousLat,
}

impl Test {
    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Test::WriteLat => "write_lat",
            Test::RendezvousLat => "rendezvous_lat",
        }
    }
}

/// Options of `perf`.
#[derive(Args, Clone, Debug)]
pub struct PerfOptions {
    /// What to measure
    #[arg(value_enum)]
    pub test: Test,
    /// Start both processes on this host
    #[arg(long)]
    pub local: bool,
    /// Bytes of the messages, separated by commas; KiB and MiB are understood
    #[arg(short, long, value_delimiter = ',', default_value = "8,64,1KiB,4KiB,64KiB,1MiB", value_parser = bytes)]
    pub sizes: Vec<usize>,
    /// Round trips of each size, all turns together
    #[arg(short = 'n', long, default_value_t = 20_000, value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    pub iterations: u64,
    /// Measure each size for so many seconds instead
    #[arg(short = 'D', long, value_name = "SECONDS", value_parser = seconds, conflicts_with = "iterations")]
    pub duration: Option<Duration>,
    /// Round trips before each size that are not counted
    #[arg(short, long, default_value_t = 1000)]
    pub warmup: u64,
    /// How often ours and the references take turns
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(5..=1000))]
    pub turns: u64,
    /// The CPUs of the two processes
    #[arg(long, value_delimiter = ',', value_name = "A,B")]
    pub cores: Vec<usize>,
    /// Operations that can be outstanding
    #[arg(long, default_value_t = 256)]
    pub depth: u32,
    /// Bytes of each process's pool
    #[arg(long, default_value = "256MiB", value_parser = bytes)]
    pub pool: usize,
    /// Also write the figures to this file, as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// Options of the second process, which the first one sets.
#[derive(Args, Clone, Debug)]
pub struct PeerOptions {
    /// What is measured
    #[arg(value_enum)]
    pub test: Test,
    /// The CPU to run on
    #[arg(long)]
    pub core: usize,
    /// Operations that can be outstanding
    #[arg(long)]
    pub depth: u32,
    /// Bytes of the pool
    #[arg(long)]
    pub pool: usize,
    /// The cluster of the two
    #[arg(long)]
    pub cluster: String,
    /// The file with the reference's cache line
    #[arg(long)]
    pub line: PathBuf,
}

impl PerfOptions {
    /// Checks what no option can say alone; returns the CPUs of the two processes.
    pub fn check(&self) -> Result<[usize; 2], CliError> {
        if !self.local {
            let why = "perf between hosts is not available yet: add --local to measure between two processes of this host";
            return Err(CliError::Usage(why.into()));
        }
        if let Some(size) = self.sizes.iter().find(|size| **size == 0 || **size * 8 > self.pool) {
            let why = format!(
                "--sizes has {size}: allowed are 1 byte to an eighth of the pool ({} bytes)",
                self.pool
            );
            return Err(CliError::Usage(why));
        }
        let allowed = process_cpus();
        let cores = match (self.cores.as_slice(), allowed) {
            ([], [first, second, ..]) => [*first, *second],
            ([], _) => {
                let why =
                    format!("two polling processes need two CPUs, and this one may only use {allowed:?}");
                return Err(CliError::Usage(why));
            }
            ([first, second], _) if first == second => {
                let why = format!("--cores names CPU {first} twice: two polling processes need two");
                return Err(CliError::Usage(why));
            }
            ([first, second], _) => [*first, *second],
            (other, _) => {
                return Err(CliError::Usage(format!(
                    "--cores names {} CPUs: exactly two are needed",
                    other.len()
                )));
            }
        };
        match cores.iter().find(|core| !allowed.contains(core)) {
            None => Ok(cores),
            Some(core) => Err(CliError::Usage(format!(
                "--cores names CPU {core}, but this process may only use {allowed:?}"
            ))),
        }
    }
}

fn bytes(text: &str) -> Result<usize, String> {
    let units = [("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)];
    let found = units.iter().find_map(|(unit, factor)| Some((text.strip_suffix(unit)?, *factor)));
    let (number, factor) = found.unwrap_or((text, 1));
    let bytes = number.trim().parse::<usize>().ok().and_then(|number| number.checked_mul(factor));
    bytes.ok_or_else(|| "give a number of bytes, or one with KiB, MiB or GiB".to_owned())
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| *seconds > 0.0 && *seconds <= 86_400.0);
    seconds
        .map(Duration::from_secs_f64)
        .ok_or_else(|| "give seconds, more than 0 and at most 86400".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: PerfOptions,
    }

    fn check(line: &str) -> Result<[usize; 2], String> {
        let line = Line::try_parse_from(["perf"].into_iter().chain(line.split_whitespace()));
        line.map_err(|error| error.to_string())?.options.check().map_err(|error| error.to_string())
    }

    #[test]
    fn sizes_understand_units() {
        assert_eq!(bytes("8"), Ok(8));
        assert_eq!(bytes("4KiB"), Ok(4096));
        assert_eq!(bytes("2 MiB"), Ok(2 << 20));
        for bad in ["", "KiB", "-1", "1.5KiB", "99999999999GiB", "8 bytes"] {
            assert!(bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn each_wrong_option_is_named() {
        for (line, part) in [
            ("write_lat", "--local"),
            ("nonsense --local", "nonsense"),
            ("write_lat --local --sizes 0", "--sizes has 0"),
            ("write_lat --local --sizes 64MiB", "an eighth of the pool"),
            ("write_lat --local --sizes x", "number of bytes"),
            ("write_lat --local --turns 4", "5..=1000"),
            ("write_lat --local --iterations 0", "1..="),
            ("write_lat --local --duration 0", "more than 0"),
            ("write_lat --local --cores 0", "exactly two"),
            ("write_lat --local --cores 0,0", "CPU 0 twice"),
            ("write_lat --local --cores 0,70000", "CPU 70000"),
        ] {
            let error = check(line).expect_err(line);
            assert!(error.contains(part), "{line}: {error}");
        }
    }
}
