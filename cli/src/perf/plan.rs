//! What a command line comes to, checked: what is measured, with what, for how long.

use super::allowed::{check_fabric, check_settings};
use super::cores::{Cores, siblings};
use super::options::{FabricName, Figure, MIN_TURNS, Notify, PerfArgs, Test};
use crate::CliError;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

/// Round trips of a size by default, as long as they move no more than [`DEFAULT_VOLUME`] one way.
const DEFAULT_ITERATIONS: u64 = 100_000;
/// See [`DEFAULT_ITERATIONS`].
const DEFAULT_VOLUME: u64 = 1 << 30;
/// Bytes of a pool by default.
const DEFAULT_POOL: usize = 256 << 20;
/// A payload fits if the pool holds so many: buffers being written, sent and received, and room to place them.
const POOL_SHARE: usize = 8;
/// The same where both sides borrow the one tensor that the other has.
const BORROWED_SHARE: usize = 2;
/// Bytes that a tensor of a few bytes takes of the pool.
const SMALLEST_BLOCK: usize = 64;
/// Warm-up round trips of a turn by default; never more than its measured ones.
const DEFAULT_WARMUP: u64 = 1000;

/// What both sides of a workload are opened with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// What carries the bytes.
    pub fabric: FabricName,
    /// Which device carries them: each process's own choice.
    pub device: Device,
    /// How the receiver of a write learns of it.
    pub notify: Notify,
    /// A request at least of so many makes a completion.
    pub cq_mod: Option<u32>,
    /// The path's MTU, in bytes.
    pub mtu: Option<u32>,
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
    /// Whether receives borrow.
    pub borrow: bool,
    /// Tensors of a round trip each way; 0 for one.
    pub batch: u32,
    /// They go one by one, not by one call.
    pub singly: bool,
    /// Each round trip is a step of its own, whose tensors are asked for in advance, for so many steps; 0 for one step of all.
    pub standing: u32,
    /// They are asked for plainly, in their steps.
    pub plain: bool,
}

/// Which device was asked for.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Device {
    /// Its name.
    pub name: Option<String>,
    /// Its port.
    pub port: Option<u8>,
    /// Index into the port's GID table.
    pub gid_index: Option<u8>,
}

impl Settings {
    /// What is measured beside it in turns, and what that is called: the same without idle links, with the tensors of
    /// a batch one by one, or with plain requests instead of standing ones.
    pub fn beside(&self) -> Option<(&'static str, Settings)> {
        match (self.links, self.batch, self.standing) {
            (0, 0, 0) => None,
            (0, 0, _) => Some(("plain", Settings { plain: true, ..self.clone() })),
            (0, ..) => Some(("one_by_one", Settings { singly: true, ..self.clone() })),
            _ => Some(("alone", Settings { links: 0, ..self.clone() })),
        }
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

/// What both sides must agree on: an option's name, and its value in words.
pub type Terms = BTreeMap<String, String>;

/// Which part this process takes.
#[derive(Clone, Debug, PartialEq)]
pub enum Part {
    /// Starts both processes here.
    Local,
    /// Measures, with the server of this host and port.
    Client(String, u16),
    /// Answers one client that comes to this port.
    Server(u16),
}

/// A run, checked.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Which part of it is this process's.
    pub part: Part,
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
    /// What of this run's terms was asked for by name.
    pub given: Terms,
    iterations: Option<u64>,
    duration: Option<Duration>,
    warmup: Option<u64>,
}

impl Plan {
    /// Checks what was asked for against what the test can do and the process may use.
    pub fn check(args: PerfArgs, mask: &[usize]) -> Result<Self, CliError> {
        let usage = |why: String| Err(CliError::Usage(why));
        let part = part(&args)?;
        let test = args.test;
        let sizes = sizes(&args)?;
        check_settings(&args)?;
        check_fabric(&args)?;
        let cores = Cores::choose(args.cores, mask, siblings)?;
        let depth = args.depth.or(test.default_depth()).unwrap_or(1);
        let (pool, max_bytes) =
            (args.pool.unwrap_or(DEFAULT_POOL), sizes.iter().copied().max().unwrap_or_default());
        // Each tensor of a batch, and of a window, has a block of its own.
        let at_once = match args.batch.or(args.standing) {
            Some(count) => (count as usize).saturating_mul(max_bytes.max(SMALLEST_BLOCK)),
            None => max_bytes,
        };
        let share = if args.borrow { BORROWED_SHARE } else { POOL_SHARE };
        if test.is_ours() && at_once > pool / share {
            return usage(format!(
                "--sizes: {at_once} bytes need a pool of {} at least, and it has {pool}: raise --pool",
                at_once.saturating_mul(share)
            ));
        }
        let fabric = args.fabric.unwrap_or(FabricName::Shm);
        let notify = args.notify.unwrap_or(match fabric {
            FabricName::Shm => Notify::Immediate,
            FabricName::Verbs => Notify::Memory,
        });
        let bandwidth = test.figure() == Figure::Bandwidth;
        let given: Vec<_> = given(&args).collect();
        let mut plan = Plan {
            part,
            test,
            settings: Settings {
                fabric,
                device: Device { name: args.ib_dev, port: args.ib_port, gid_index: args.gid_index },
                notify,
                cq_mod: args.cq_mod,
                mtu: args.mtu,
                depth,
                pool: pool as u64,
                inline: args.inline.or((bandwidth || args.borrow).then_some(0)),
                max_bytes,
                links: args.links.unwrap_or(0),
                borrow: args.borrow,
                batch: args.batch.unwrap_or(0),
                singly: false,
                standing: args.standing.unwrap_or(0),
                plain: false,
            },
            sizes,
            turns: args.turns.unwrap_or(MIN_TURNS),
            cores,
            json: args.json,
            given: Terms::new(),
            iterations: args.iterations,
            duration: args.duration,
            warmup: args.warmup,
        };
        if plan.has_references() && plan.turns < MIN_TURNS {
            return usage(format!(
                "--turns: {} is not in {MIN_TURNS}..=1000: fewer say nothing about the spread of the references",
                plan.turns
            ));
        }
        plan.given = plan.terms().into_iter().filter(|(name, _)| given.contains(&name.as_str())).collect();
        Ok(plan)
    }

    /// What the other side must agree with.
    pub fn terms(&self) -> Terms {
        let Settings {
            fabric, notify, cq_mod, mtu, depth, pool, inline, links, borrow, batch, standing, ..
        } = &self.settings;
        let sizes: Vec<String> = self.sizes.iter().map(usize::to_string).collect();
        let or_default = |value: Option<String>| value.unwrap_or_else(|| "the default".into());
        let terms = [
            ("--fabric", format!("{fabric:?}").to_lowercase()),
            ("--sizes", sizes.join(",")),
            ("--depth", depth.to_string()),
            ("--inline", or_default(inline.map(|bytes| bytes.to_string()))),
            ("--iterations", or_default(self.iterations.map(|count| count.to_string()))),
            ("--duration", or_default(self.duration.map(|length| format!("{} s", length.as_secs_f64())))),
            ("--warmup", or_default(self.warmup.map(|count| count.to_string()))),
            ("--turns", self.turns.to_string()),
            ("--pool", pool.to_string()),
            ("--links", links.to_string()),
            ("--borrow", borrow.to_string()),
            ("--batch", batch.to_string()),
            ("--standing", standing.to_string()),
            ("--notify", format!("{notify:?}").to_lowercase()),
            ("--cq-mod", or_default(cq_mod.map(|count| count.to_string()))),
            ("--mtu", or_default(mtu.map(|bytes| bytes.to_string()))),
        ];
        terms.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }

    /// Checks a client's terms against what this server was started with.
    ///
    /// # Errors
    /// Says each option in which they differ.
    pub fn agree(&self, test: Test, theirs: &Terms) -> Result<(), CliError> {
        if test != self.test {
            return Err(CliError::Usage(format!(
                "the server was started for {} and the client runs {}: start both with the same test",
                self.test.name(),
                test.name()
            )));
        }
        let differ: Vec<String> = self
            .given
            .iter()
            .filter_map(|(name, ours)| {
                let theirs = theirs.get(name).map_or("nothing", String::as_str);
                (ours != theirs).then(|| format!("{name} is {ours} at the server and {theirs} at the client"))
            })
            .collect();
        if differ.is_empty() {
            return Ok(());
        }
        let differ = differ.join("; ");
        Err(CliError::Usage(format!("{differ}: give both the same, or leave it out at the server")))
    }

    /// How long a turn with this payload is.
    pub fn length(&self, bytes: usize) -> Length {
        if let Some(duration) = self.duration {
            return Length::Duration(duration / self.turns);
        }
        let batch = u64::from(self.settings.batch.max(1));
        // What is borrowed is not moved.
        let moved = if self.settings.borrow { 1 } else { bytes.max(1) };
        let most = (DEFAULT_ITERATIONS / batch).max(100);
        let fitting = (DEFAULT_VOLUME / batch / moved as u64).clamp(100, most);
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

    /// The size that every larger one is compared with, where that is the question.
    pub fn smallest(&self, bytes: usize) -> Option<usize> {
        let smallest = self.sizes.iter().copied().min()?;
        (self.settings.borrow && smallest < bytes).then_some(smallest)
    }

    /// Whether bare memory that both processes share is measured beside the test.
    pub fn has_references(&self) -> bool {
        self.part == Part::Local && self.settings.fabric == FabricName::Shm
    }
}

fn part(args: &PerfArgs) -> Result<Part, CliError> {
    if args.local {
        return Ok(Part::Local);
    }
    if !args.test.is_ours() {
        return Err(CliError::Usage(format!(
            "{} needs --local: it bounces memory that two processes of one host share",
            args.test.name()
        )));
    }
    match &args.host {
        Some(host) => Ok(Part::Client(host.clone(), args.port)),
        None if args.json.is_some() => Err(CliError::Usage(
            "--json: this is the server, as no HOST is given; the client measures and writes the report"
                .into(),
        )),
        None => Ok(Part::Server(args.port)),
    }
}

/// Names of those terms that were asked for.
fn given(args: &PerfArgs) -> impl Iterator<Item = &'static str> {
    [
        ("--fabric", args.fabric.is_some()),
        ("--sizes", args.sizes.is_some() || args.all_sizes),
        ("--depth", args.depth.is_some()),
        ("--inline", args.inline.is_some()),
        ("--iterations", args.iterations.is_some()),
        ("--duration", args.duration.is_some()),
        ("--warmup", args.warmup.is_some()),
        ("--turns", args.turns.is_some()),
        ("--pool", args.pool.is_some()),
        ("--links", args.links.is_some()),
        ("--borrow", args.borrow),
        ("--batch", args.batch.is_some()),
        ("--standing", args.standing.is_some()),
        ("--notify", args.notify.is_some()),
        ("--cq-mod", args.cq_mod.is_some()),
        ("--mtu", args.mtu.is_some()),
    ]
    .into_iter()
    .filter_map(|(name, given)| given.then_some(name))
}

fn sizes(args: &PerfArgs) -> Result<Vec<usize>, CliError> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    fn plan(options: &str) -> Result<Plan, String> {
        let args = PerfArgs::try_parse_from(std::iter::once("perf").chain(options.split_whitespace()))
            .map_err(|error| error.to_string())?;
        Plan::check(args, &[0, 1]).map_err(|error| error.to_string())
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
    fn what_is_borrowed_takes_as_many_round_trips_at_every_size_and_is_compared_with_the_smallest() {
        let plan = plan("rendezvous_lat --local --borrow -s 1GiB,8 --pool 2GiB").unwrap();
        assert_eq!(
            (plan.length(8), plan.length(1 << 30)),
            (Length::Iterations(20_000), Length::Iterations(20_000))
        );
        assert_eq!((plan.smallest(8), plan.smallest(1 << 30)), (None, Some(8)));
        assert_eq!(plan.settings.inline, Some(0));
    }

    #[test]
    fn what_is_measured_in_a_new_way_is_measured_in_the_old_one_beside_it() {
        let beside = |options| plan(options).unwrap().settings.beside();
        assert_eq!(beside("rendezvous_lat --local"), None);
        let (name, settings) = beside("rendezvous_lat --local --batch 5").unwrap();
        assert_eq!((name, settings.singly, settings.batch), ("one_by_one", true, 5));
        let (name, settings) = beside("rendezvous_lat --local --standing").unwrap();
        assert_eq!((name, settings.plain, settings.standing), ("plain", true, 16));
        assert_eq!(plan("rendezvous_lat --standing 4 --local").unwrap().settings.standing, 4);
        let (name, settings) = beside("write_lat --local --links 5").unwrap();
        assert_eq!((name, settings.links), ("alone", 0));
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
            ("write_lat --local --fabric tcp", "invalid value 'tcp'"),
            ("write_lat --local -F", "unexpected argument '-F'"),
            ("write_lat host --local", "cannot be used with"),
            ("write_lat --local --port 5", "cannot be used with"),
            ("write_lat --json here", "the client measures"),
            ("write_lat --local -d rxe0", "--ib-dev: shm has no device"),
            ("write_lat --local -i 1", "--ib-port: shm has no device"),
            ("write_lat --local -x 1", "--gid-index: shm has no GIDs"),
            ("write_lat --local -m 1024", "--mtu: shm has no packets"),
            ("write_lat --local -Q 8", "--cq-mod: shm has no completion queue"),
            ("write_lat --local --notify memory", "lands when its receiver polls"),
            ("send_lat --local --notify immediate", "--notify: only write_lat takes it"),
            ("send_lat --local -s 225", "carries 224 bytes at most, not 225"),
            ("read_lat --local -I 64", "can't travel in the request"),
            ("rendezvous_lat --local --fabric verbs -Q 8", "leaves that to the engine"),
            ("write_lat --local --sizes 64MiB", "need a pool of 536870912"),
            ("rendezvous_lat --local --inline 161", "160 at most"),
            ("rendezvous_lat --local --links 5", "only write_lat takes it"),
            ("write_lat --local --borrow", "only rendezvous_lat on shm borrows"),
            ("rendezvous_lat --local --fabric verbs --borrow", "only rendezvous_lat on shm borrows"),
            ("rendezvous_lat --local --borrow -I 8", "is not borrowed"),
            ("rendezvous_lat --local --borrow -s 200MiB", "need a pool of 419430400"),
            ("rendezvous_lat --local --borrow --batch 5", "--batch: not with --borrow"),
            ("write_lat --local --batch 5", "--batch: only rendezvous_lat takes it"),
            ("write_lat --local --standing", "--standing: only rendezvous_lat takes it"),
            ("rendezvous_lat --local --standing --batch 5", "--standing: not with --batch"),
            ("rendezvous_lat --local --standing 4 --borrow", "--standing: not with --borrow"),
            ("rendezvous_lat --local --standing 0", "0 is not in 1..=256"),
            ("rendezvous_lat --local --standing 257", "257 is not in 1..=256"),
            ("rendezvous_lat --local --standing 64 -s 1MiB", "need a pool of 536870912"),
            ("rendezvous_lat --local --batch 0", "0 is not in 1..=100000"),
            ("rendezvous_lat --local --batch 100000 -s 64KiB", "need a pool of"),
            ("write_lat --local --links 4096", "4096 is not in 1..=4095"),
        ] {
            let refusal = plan(options).unwrap_err();
            assert!(refusal.contains(reason), "{options}: {refusal}");
        }
    }

    #[test]
    fn a_server_without_options_agrees_with_every_client_of_its_test() {
        let server = plan("write_lat").unwrap();
        assert_eq!((server.part.clone(), server.given.len()), (Part::Server(18_515), 0));
        let client = plan("write_lat there -p 7 -s 64 -t 32 -I 8 --fabric verbs -x 1").unwrap();
        assert_eq!(client.part, Part::Client("there".into(), 7));
        assert!(server.agree(client.test, &client.terms()).is_ok());
    }

    #[test]
    fn what_a_server_was_given_must_be_the_clients_too() {
        let server = plan("write_lat -s 64 -n 100 --tx-depth 64").unwrap();
        let refusal = |client: &str| {
            let client = plan(client).unwrap();
            server.agree(client.test, &client.terms()).map_err(|error| error.to_string())
        };
        assert_eq!(refusal("write_lat there --size 64 --iters 100 -t 64 --warmup 3"), Ok(()));
        let why = refusal("write_lat there -s 8 -n 100").unwrap_err();
        assert!(why.contains("--sizes is 64 at the server and 8 at the client"), "{why}");
        assert!(why.contains("--depth is 64 at the server and 256 at the client"), "{why}");
        let why = refusal("read_lat there -s 64").unwrap_err();
        assert!(why.contains("started for write_lat and the client runs read_lat"), "{why}");
    }

    #[test]
    fn a_write_is_seen_as_perftest_sees_it_where_the_fabric_can() {
        assert_eq!(plan("write_lat --local").unwrap().settings.notify, Notify::Immediate);
        assert_eq!(plan("write_lat --local --fabric verbs").unwrap().settings.notify, Notify::Memory);
    }
}
