//! The command line of `perf`, and the checked plan that it comes to.

use super::cores::{Cores, siblings};
use crate::cli::CliError;
use crate::cli::reference::{MAX_RING_SLOTS, RING_PAYLOAD, RING_SLOTS};
use clap::{Parser, ValueEnum};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

/// Turns at least: fewer say nothing about the spread.
const MIN_TURNS: u32 = 5;
/// Payload at most, in bytes.
const MAX_BYTES: usize = 1 << 30;
/// Round trips of a size by default, as long as they move no more than [`DEFAULT_VOLUME`] one way.
const DEFAULT_ITERATIONS: u64 = 100_000;
/// See [`DEFAULT_ITERATIONS`].
const DEFAULT_VOLUME: u64 = 1 << 30;
/// Bytes of a pool by default.
const DEFAULT_POOL: usize = 256 << 20;
/// A payload fits if the pool holds so many: buffers being written, sent and received, and room to place them.
const POOL_SHARE: usize = 8;
/// Operations that can be outstanding at most, on any fabric.
const MAX_DEPTH: u32 = 65_536;
/// Idle links at most: a poller has room for 4096 links.
const MAX_LINKS: i64 = 4095;
/// What `small_tensor_bytes` may be at most.
const MAX_SMALL: u32 = 160;
/// Warm-up round trips of a turn by default; never more than its measured ones.
const DEFAULT_WARMUP: u64 = 1000;

/// What `perf` is asked for.
#[derive(Parser, Debug)]
pub struct Args {
    /// What to measure
    pub test: Test,
    /// Start both processes on this host
    #[arg(long)]
    pub local: bool,
    /// Payload sizes, such as 2,8,4096,64KiB,1MiB [default: depends on the test]
    #[arg(long, short, value_delimiter = ',', value_parser = bytes, conflicts_with = "all_sizes")]
    pub sizes: Option<Vec<usize>>,
    /// Every power of two from 2 bytes to 8 MiB that the test can carry
    #[arg(long, short)]
    pub all_sizes: bool,
    /// Measured round trips of each size, over all turns [default: 100000, fewer above 10 KiB]
    #[arg(long, short = 'n', conflicts_with = "duration", value_parser = clap::value_parser!(u64).range(1..))]
    pub iterations: Option<u64>,
    /// Measure each size for this many seconds, over all turns, instead of counting round trips
    #[arg(long, short = 'D', value_parser = seconds)]
    pub duration: Option<Duration>,
    /// Unmeasured round trips before each turn [default: 1000, at most as many as measured ones]
    #[arg(long, value_parser = clap::value_parser!(u64).range(0..=1_000_000_000))]
    pub warmup: Option<u64>,
    /// The two cores: of the process that measures, and of the one that answers
    #[arg(long, value_parser = pair, value_name = "A,B")]
    pub cores: Option<[usize; 2]>,
    /// Turns that the test and its references take
    #[arg(long, default_value_t = MIN_TURNS, value_parser = clap::value_parser!(u32).range(i64::from(MIN_TURNS)..=1000))]
    pub turns: u32,
    /// Also write the report to this file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Operations that can be outstanding, a power of two [default: 256; of ring_64: 64]
    #[arg(long, value_parser = depth)]
    pub depth: Option<u32>,
    /// Bytes of each process's pool [default: 256MiB]
    #[arg(long, value_parser = bytes, value_name = "SIZE")]
    pub pool: Option<usize>,
    /// Payload up to this many bytes travels inside a slot [default: the fabric's most; of rendezvous_lat: 128]
    #[arg(long, value_name = "BYTES")]
    pub inline: Option<u32>,
    /// Idle links between the two processes beside the one that write_lat measures; it is then also measured alone,
    /// in turns [default: 0]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=MAX_LINKS))]
    pub links: Option<u32>,
    /// What carries the bytes [default: shm]
    #[arg(long)]
    pub fabric: Option<FabricName>,
}

/// What can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[value(rename_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub enum Test {
    /// The bare fabric: a one-sided write with immediate, answered by another
    WriteLat,
    /// The whole engine: a tensor sent and received by step and key, answered by another
    RendezvousLat,
    /// The bare cache line itself; against its own reference it shows the noise
    CacheLine,
    /// A bare ring of 64-byte slots, sequence word and payload in one line
    #[value(name = "ring_64")]
    #[serde(rename = "ring_64")]
    Ring64,
}

impl Test {
    /// The name on the command line and in the report.
    pub fn name(self) -> &'static str {
        match self {
            Test::WriteLat => "write_lat",
            Test::RendezvousLat => "rendezvous_lat",
            Test::CacheLine => "cache_line",
            Test::Ring64 => "ring_64",
        }
    }

    /// Payload that it can carry at most, in bytes.
    fn max_bytes(self) -> usize {
        match self {
            Test::WriteLat | Test::RendezvousLat => MAX_BYTES,
            Test::CacheLine => 8,
            Test::Ring64 => RING_PAYLOAD,
        }
    }

    fn default_sizes(self) -> &'static [usize] {
        match self {
            Test::WriteLat | Test::RendezvousLat => &[2, 8, 64, 4 << 10, 64 << 10, 1 << 20],
            Test::CacheLine => &[8],
            Test::Ring64 => &[8, 32, 56],
        }
    }

    /// Whether `--depth` means anything to it, and what it is by default.
    fn default_depth(self) -> Option<u32> {
        match self {
            Test::WriteLat | Test::RendezvousLat => Some(256),
            Test::CacheLine => None,
            Test::Ring64 => Some(RING_SLOTS),
        }
    }

    /// Operations that can be outstanding at most.
    fn max_depth(self) -> u32 {
        if self == Test::Ring64 { MAX_RING_SLOTS } else { MAX_DEPTH }
    }

    /// Whether it runs on a fabric, with a pool.
    fn is_ours(self) -> bool {
        matches!(self, Test::WriteLat | Test::RendezvousLat)
    }
}

/// A fabric by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FabricName {
    /// Shared memory
    Shm,
}

/// What both sides of a workload are opened with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// Operations that can be outstanding.
    pub depth: u32,
    /// Bytes of each side's pool.
    pub pool: u64,
    /// Payload that travels inside a slot, in bytes; the fabric's most if not given.
    pub inline: Option<u32>,
    /// The longest payload that will be asked for, in bytes.
    pub max_bytes: usize,
    /// Idle links beside the one that is measured.
    pub links: u32,
}

impl Settings {
    /// The same without idle links, if there are any.
    pub fn without_links(&self) -> Option<Settings> {
        (self.links > 0).then(|| Settings { links: 0, ..self.clone() })
    }
}

/// How long the turns of one size are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Length {
    /// This many measured round trips a turn; by default fewer for large payloads.
    Iterations(u64),
    /// This long a turn.
    Duration(Duration),
}

/// A run, checked.
#[derive(Clone, Debug)]
pub struct Plan {
    /// What is measured.
    pub test: Test,
    /// With what.
    pub settings: Settings,
    /// Payloads in bytes, in the order asked for.
    pub sizes: Vec<usize>,
    /// Turns of each size.
    pub turns: u32,
    /// Where the two processes run.
    pub cores: Cores,
    /// Where the JSON report goes.
    pub json: Option<PathBuf>,
    iterations: Option<u64>,
    duration: Option<Duration>,
    warmup: Option<u64>,
}

impl Plan {
    /// Checks what was asked for against what the test can do and the process may use.
    pub fn check(args: Args, mask: &[usize]) -> Result<Self, CliError> {
        let usage = |why: String| Err(CliError::Usage(why));
        if !args.local {
            return usage("perf needs --local, which starts both processes here; a server and a client on two hosts come later".into());
        }
        let test = args.test;
        let sizes = sizes(&args)?;
        check_settings(&args)?;
        let cores = Cores::choose(args.cores, mask, siblings)?;
        let depth = args.depth.or(test.default_depth()).unwrap_or(1);
        let (pool, max_bytes) =
            (args.pool.unwrap_or(DEFAULT_POOL), sizes.iter().copied().max().unwrap_or_default());
        if test.is_ours() && max_bytes > pool / POOL_SHARE {
            return usage(format!(
                "--sizes: {max_bytes} bytes need a pool of {} at least, and it has {pool}: raise --pool",
                max_bytes.saturating_mul(POOL_SHARE)
            ));
        }
        Ok(Plan {
            test,
            settings: Settings {
                depth,
                pool: pool as u64,
                inline: args.inline,
                max_bytes,
                links: args.links.unwrap_or(0),
            },
            sizes,
            turns: args.turns,
            cores,
            json: args.json,
            iterations: args.iterations,
            duration: args.duration,
            warmup: args.warmup,
        })
    }

    /// How long a turn with this payload is.
    pub fn length(&self, bytes: usize) -> Length {
        if let Some(duration) = self.duration {
            return Length::Duration(duration / self.turns);
        }
        let fitting = (DEFAULT_VOLUME / bytes.max(1) as u64).clamp(100, DEFAULT_ITERATIONS);
        Length::Iterations(self.iterations.unwrap_or(fitting).div_ceil(u64::from(self.turns)))
    }

    /// Unmeasured round trips before each turn.
    pub fn warmup(&self, bytes: usize) -> u64 {
        let most = match self.length(bytes) {
            Length::Iterations(count) => count,
            Length::Duration(_) => DEFAULT_WARMUP,
        };
        self.warmup.unwrap_or(DEFAULT_WARMUP.min(most))
    }

    /// How the run is long, in words.
    pub fn mode(&self) -> String {
        match self.duration {
            Some(duration) => format!("{} s a size, {} turns", duration.as_secs_f64(), self.turns),
            None => format!("iterations, {} turns", self.turns),
        }
    }
}

/// Refuses an option that means nothing to the test, rather than ignoring it.
fn check_settings(args: &Args) -> Result<(), CliError> {
    let test = args.test;
    let usage = |why: String| Err(CliError::Usage(why));
    if args.depth.is_some() && test.default_depth().is_none() {
        return usage(format!("--depth: {} has no queue; leave it out", test.name()));
    }
    if args.depth.is_some_and(|depth| depth > test.max_depth()) {
        return usage(format!("--depth: {} takes {} at most", test.name(), test.max_depth()));
    }
    if args.links.is_some() && test != Test::WriteLat {
        return usage(format!("--links: only write_lat takes it, not {}; leave it out", test.name()));
    }
    let given = [
        ("--pool", args.pool.is_some()),
        ("--inline", args.inline.is_some()),
        ("--fabric", args.fabric.is_some()),
    ];
    match given.into_iter().find(|(_, given)| *given && !test.is_ours()) {
        Some((option, _)) => usage(format!("{option}: {} runs on no fabric; leave it out", test.name())),
        None if test == Test::RendezvousLat && args.inline.is_some_and(|inline| inline > MAX_SMALL) => {
            usage(format!("--inline: rendezvous_lat takes {MAX_SMALL} at most"))
        }
        None => Ok(()),
    }
}

fn sizes(args: &Args) -> Result<Vec<usize>, CliError> {
    let (name, most) = (args.test.name(), args.test.max_bytes());
    if args.all_sizes {
        return Ok((1..=23).map(|power| 1 << power).filter(|&size| size <= most).collect());
    }
    let Some(sizes) = &args.sizes else { return Ok(args.test.default_sizes().to_vec()) };
    match sizes.iter().find(|&&size| size > most) {
        Some(size) => {
            Err(CliError::Usage(format!("--sizes: {name} carries {most} bytes at most, not {size}")))
        }
        None => Ok(sizes.clone()),
    }
}

fn bytes(text: &str) -> Result<usize, String> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let unit = match &text[digits..] {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        unit => return Err(format!("'{unit}' is no unit; there are B, KiB, MiB and GiB")),
    };
    let size = text[..digits].parse::<usize>().ok().and_then(|count| count.checked_mul(unit));
    match size {
        Some(size @ 1..=MAX_BYTES) => Ok(size),
        _ => Err("a size is 1 to 1GiB, such as 8, 4KiB or 1MiB".into()),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let duration = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    let allowed = Duration::from_millis(1)..=Duration::from_secs(86_400);
    duration.filter(|duration| allowed.contains(duration)).ok_or_else(|| "seconds are 0.001 to 86400".into())
}

fn pair(text: &str) -> Result<[usize; 2], String> {
    let cores = text.split_once(',').and_then(|(a, b)| Some([a.parse().ok()?, b.parse().ok()?]));
    cores.ok_or_else(|| "two cores are two numbers with a comma, such as 0,1".into())
}

fn depth(text: &str) -> Result<u32, String> {
    let depth =
        text.parse().ok().filter(|depth: &u32| depth.is_power_of_two() && (16..=MAX_DEPTH).contains(depth));
    depth.ok_or_else(|| format!("a depth is a power of two from 16 to {MAX_DEPTH}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(options: &str) -> Result<Plan, String> {
        let args = Args::try_parse_from(std::iter::once("perf").chain(options.split_whitespace()))
            .map_err(|error| error.to_string())?;
        Plan::check(args, &[0, 1]).map_err(|error| error.to_string())
    }

    #[test]
    fn sizes_have_binary_units() {
        assert_eq!(bytes("2"), Ok(2));
        assert_eq!(bytes("64B"), Ok(64));
        assert_eq!(bytes("4KiB"), Ok(4096));
        assert_eq!(bytes("1GiB"), Ok(1 << 30));
        for wrong in ["", "0", "-1", "KiB", "1kb", "1.5KiB", "2GiB", "99999999999999999999", "1MiB "] {
            assert!(bytes(wrong).is_err(), "{wrong:?} passed");
        }
    }

    #[test]
    fn iterations_are_shared_by_the_turns() {
        let plan = plan("ring_64 --local -n 12 --turns 5 -s 8,56").unwrap();
        assert_eq!(plan.length(8), Length::Iterations(3));
        assert_eq!((plan.warmup(8), plan.settings.max_bytes, plan.settings.depth), (3, 56, 64));
    }

    #[test]
    fn a_duration_is_shared_by_the_turns() {
        let plan = plan("cache_line --local -D 0.5 --warmup 7").unwrap();
        assert_eq!(plan.length(8), Length::Duration(Duration::from_millis(100)));
        assert_eq!(plan.warmup(8), 7);
    }

    #[test]
    fn large_payloads_get_fewer_round_trips_unless_told() {
        let plan = plan("cache_line --local").unwrap();
        assert_eq!(plan.length(8), Length::Iterations(20_000));
        assert_eq!(plan.length(1 << 20), Length::Iterations(205));
        assert_eq!(plan.length(1 << 30), Length::Iterations(20));
    }

    #[test]
    fn all_sizes_are_those_that_the_test_carries() {
        assert_eq!(plan("ring_64 --local --all-sizes").unwrap().sizes, [2, 4, 8, 16, 32]);
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_the_reason() {
        for (options, reason) in [
            ("cache_line", "--local"),
            ("nonsense --local", "nonsense"),
            ("cache_line --local --turns 4", "4 is not in 5..=1000"),
            ("cache_line --local --sizes 9", "carries 8 bytes at most, not 9"),
            ("cache_line --local --sizes 8,x", "no unit"),
            ("cache_line --local --sizes 8 --all-sizes", "cannot be used with"),
            ("cache_line --local --iterations 0", "0 is not in"),
            ("cache_line --local --iterations 5 --duration 1", "cannot be used with"),
            ("cache_line --local --duration 0", "0.001 to 86400"),
            ("cache_line --local --duration nan", "0.001 to 86400"),
            ("cache_line --local --cores 0", "two numbers"),
            ("cache_line --local --cores 1,1", "named twice"),
            ("cache_line --local --cores 0,77", "core 77"),
            ("cache_line --local --depth 64", "no queue"),
            ("ring_64 --local --depth 48", "power of two"),
            ("ring_64 --local --depth 2048", "takes 1024 at most"),
            ("ring_64 --local --pool 1MiB", "runs on no fabric"),
            ("cache_line --local --inline 8", "runs on no fabric"),
            ("cache_line --local --fabric shm", "runs on no fabric"),
            ("write_lat --local --fabric verbs", "invalid value 'verbs'"),
            ("write_lat --local --sizes 64MiB", "need a pool of 536870912"),
            ("rendezvous_lat --local --inline 161", "160 at most"),
            ("rendezvous_lat --local --links 5", "only write_lat takes it"),
            ("write_lat --local --links 4096", "4096 is not in 1..=4095"),
        ] {
            let refusal = plan(options).unwrap_err();
            assert!(refusal.contains(reason), "{options}: {refusal}");
        }
    }
}
