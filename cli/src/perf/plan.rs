//! A checked command line: which role this process has, what it measures, for how long.

use super::control_channel::MAX_WORDS;
use super::cores::{Cores, Here, siblings};
use super::fabric_name::FabricName;
use super::options::{FabricOptions, MIN_TURNS, Notify, PerfArgs, Test};
use crate::error::CliError;
use clap::parser::ValueSource;
use clap::{Args, FromArgMatches};
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;
use tensorwire::internals::wire::shorten;

/// Round trips of a size by default, as long as they move no more than [`DEFAULT_VOLUME`] one way.
const DEFAULT_ITERATIONS: u64 = 100_000;
/// Bytes one way: see [`DEFAULT_ITERATIONS`].
const DEFAULT_VOLUME: u64 = 1 << 30;
/// The pool must hold the payload this many times: buffers being written, sent and received, and
/// free space between them.
const POOL_SHARE: usize = 8;
/// The same where both sides borrow the other's only tensor.
const BORROWED_SHARE: usize = 2;
/// Bytes of the pool that the smallest tensor takes.
const SMALLEST_BLOCK: usize = 64;
/// Warm-up round trips of a turn by default; never more than its measured ones.
const DEFAULT_WARMUP: u64 = 1000;

/// Where a server listens by default.
const LISTEN: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// How long the turns of one size are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Length {
    /// This many measured round trips a turn.
    Iterations(u64),
    /// This long a turn.
    Duration(Duration),
}

/// The role of this process.
#[derive(Clone, Debug, PartialEq)]
pub enum Part {
    /// Starts both processes here.
    Local,
    /// Measures, with the server of this host and port.
    Client(String, u16),
    /// Answers one client that connects to this address.
    Server(SocketAddr),
}

/// A checked run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The role of this process.
    pub part: Part,
    /// The options, resolved.
    pub args: PerfArgs,
    /// The cores of the two processes.
    pub cores: Cores,
    /// Names of the options that the command line gave.
    given: BTreeSet<String>,
}

/// Names of the options that the command line gave to `perf` and to its test.
pub fn given(matches: &clap::ArgMatches) -> BTreeSet<String> {
    let mut given = BTreeSet::new();
    let mut level = Some(matches);
    while let Some(matches) = level {
        let by_user = |id: &&clap::Id| matches.value_source(id.as_str()) == Some(ValueSource::CommandLine);
        given.extend(matches.ids().filter(by_user).map(|id| id.as_str().to_owned()));
        level = matches.subcommand().map(|(_, deeper)| deeper);
    }
    if given.remove("all_sizes") {
        given.insert("sizes".into());
    }
    given
}

impl Plan {
    /// Checks the options against each other and against the CPUs in `mask`.
    pub fn check(mut args: PerfArgs, given: &BTreeSet<String>, mask: &[usize]) -> Result<Self, CliError> {
        let part = part(&args)?;
        args.resolve()?;
        check_fabric(&args.test, given)?;
        check_pool(&args)?;
        let here = match part {
            Part::Local => Here::Both,
            Part::Client(..) => Here::Initiator,
            Part::Server(_) => Here::Responder,
        };
        let cores = Cores::choose(here, args.run.cores, mask, siblings)?;
        let plan = Plan { part, args, cores, given: given.clone() };
        if plan.has_references() && plan.args.run.turns < MIN_TURNS {
            let why = format!(
                "--turns: {} is not in {MIN_TURNS}..=1000: fewer say nothing about the spread",
                plan.args.run.turns
            );
            return Err(CliError::Usage(why));
        }
        Ok(plan)
    }

    /// Checks a client's options against the options that this server was started with.
    ///
    /// # Errors
    /// Names each option in which they differ.
    pub fn agree(&self, theirs: &PerfArgs) -> Result<(), CliError> {
        let (ours, theirs) = (terms(&self.args)?, terms(theirs)?);
        let [our_test, their_test] = [&ours, &theirs].map(|terms| in_words(terms.get("test")));
        if our_test != their_test {
            return Err(CliError::Usage(format!(
                "the server was started for {our_test} and the client runs {}: start both with the same test",
                shorten(&their_test, MAX_WORDS)
            )));
        }
        let given = self.given.iter().filter_map(|name| Some((name, ours.get(name)?)));
        let differ: Vec<String> = given
            .filter(|(name, ours)| theirs.get(*name) != Some(ours))
            .map(|(name, ours)| {
                let option = name.replace('_', "-");
                let (ours, theirs) = (in_words(Some(ours)), shorten(&in_words(theirs.get(name)), MAX_WORDS));
                format!("--{option} is {ours} at the server and {theirs} at the client")
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
        let run = &self.args.run;
        if let Some(seconds) = run.duration {
            return Length::Duration(Duration::from_secs_f64(seconds) / run.turns);
        }
        let batch = u64::from(self.args.test.batch());
        // A borrowed tensor is not moved.
        let moved = if self.args.test.borrows() { 1 } else { bytes.max(1) };
        let most = (DEFAULT_ITERATIONS / batch).max(100);
        let fitting = (DEFAULT_VOLUME / batch / moved as u64).clamp(100, most);
        Length::Iterations(run.iterations.unwrap_or(fitting).div_ceil(u64::from(run.turns)))
    }

    /// Unmeasured round trips before each turn.
    pub fn warmup(&self, bytes: usize) -> u64 {
        let most = match self.length(bytes) {
            Length::Iterations(count) => count,
            Length::Duration(_) => DEFAULT_WARMUP,
        };
        self.args.run.warmup.unwrap_or(DEFAULT_WARMUP.min(most))
    }

    /// How long the run is, in words.
    pub fn mode(&self) -> String {
        let turns = self.args.run.turns;
        match self.args.run.duration {
            Some(seconds) => format!("{seconds} s a size, {turns} turns"),
            None => format!("iterations, {turns} turns"),
        }
    }

    /// The size that `bytes` is compared with, where receives borrow: the smallest, if it is
    /// smaller.
    pub fn smallest(&self, bytes: usize) -> Option<usize> {
        let smallest = self.args.sizes().iter().copied().min()?;
        (self.args.test.borrows() && smallest < bytes).then_some(smallest)
    }

    /// Whether bare memory that both processes share is measured beside the test.
    pub fn has_references(&self) -> bool {
        let in_memory = self.args.test.fabric().is_none_or(|options| options.fabric == FabricName::Shm);
        self.part == Part::Local && in_memory
    }
}

/// Checks that the command line takes the options of a client. A client may send any others.
///
/// # Errors
/// What the command line says of them.
pub fn check_client_options(args: &PerfArgs) -> Result<(), CliError> {
    let terms = terms(args)?;
    let mut line = vec!["perf".to_owned(), args.test.name().to_owned()];
    let options = terms.iter().filter(|(name, _)| !["test", "is_baseline"].contains(&name.as_str()));
    line.extend(options.filter_map(|(name, value)| {
        let option = format!("--{}", name.replace('_', "-"));
        match value {
            Value::Null | Value::Bool(false) => None,
            Value::Bool(true) => Some(option),
            value => Some(format!("{option}={}", in_words(Some(value)))),
        }
    }));
    let refused = |error: clap::Error| {
        let why = error.to_string();
        let why = why.lines().next().unwrap_or_default();
        let why = shorten(why.strip_prefix("error: ").unwrap_or(why), MAX_WORDS);
        CliError::Usage(format!("the client's options: {why:?}"))
    };
    let command = PerfArgs::augment_args(clap::Command::new("perf"));
    let matches = command.try_get_matches_from(line).map_err(refused)?;
    let mut again = PerfArgs::from_arg_matches(&matches).map_err(refused)?;
    again.resolve()?;
    // What the client's command line gave is not known, and it has checked that.
    check_fabric(&again.test, &BTreeSet::new())?;
    check_pool(&again)
}

/// The options by name, as JSON.
fn terms(args: &PerfArgs) -> Result<Map<String, Value>, CliError> {
    match serde_json::to_value(args) {
        Ok(Value::Object(terms)) => Ok(terms),
        Ok(other) => Err(CliError::Failed(format!("the options became {other}, which is no JSON object"))),
        Err(error) => Err(CliError::failed("writing the options as JSON", error)),
    }
}

/// An option's value, as on the command line.
fn in_words(value: Option<&Value>) -> String {
    match value {
        None => "nothing".into(),
        Some(Value::Null) => "the default".into(),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(list)) => list.iter().map(Value::to_string).collect::<Vec<_>>().join(","),
        Some(other) => other.to_string(),
    }
}

fn part(args: &PerfArgs) -> Result<Part, CliError> {
    if args.run.local {
        return Ok(Part::Local);
    }
    let Some(fabric) = args.test.fabric() else {
        return Err(CliError::Usage(format!(
            "{} needs --local: it bounces memory that two processes of one host share",
            args.test.name()
        )));
    };
    match &fabric.host {
        Some(host) => Ok(Part::Client(host.clone(), fabric.port)),
        None if args.run.json.is_some() => Err(CliError::Usage(
            "--json: this is the server, as no HOST is given; the client measures and writes the report"
                .into(),
        )),
        None => Ok(Part::Server(SocketAddr::new(fabric.listen.unwrap_or(LISTEN), fabric.port))),
    }
}

/// Refuses options that the fabric can't carry out.
fn check_fabric(test: &Test, given: &BTreeSet<String>) -> Result<(), CliError> {
    let usage = |why: &str| Err(CliError::Usage(why.into()));
    let Some(options) = test.fabric() else { return Ok(()) };
    let name = options.fabric;
    if test.borrows() && name != FabricName::Shm {
        return usage("--borrow: only shm lends tensors; leave it out");
    }
    let is_engine = matches!(test, Test::RendezvousLat(_));
    if !is_engine && name == FabricName::Grpc {
        return usage("--fabric grpc: only rendezvous_lat runs over gRPC calls, which are no fabric");
    }
    if !is_engine && name == FabricName::Auto {
        return usage("--fabric auto: only the nodes of rendezvous_lat choose a fabric; name one");
    }
    if is_engine && given.contains("bind") {
        return usage("--bind: the nodes of rendezvous_lat choose it; leave it out");
    }
    let of_pollers = ["poll", "profile", "inline", "depth", "standing"];
    if name == FabricName::Grpc
        && let Some(option) = of_pollers.into_iter().find(|option| given.contains(*option))
    {
        return usage(&format!("--{option}: calls over gRPC have no poller and no queue; leave it out"));
    }
    if matches!(test, Test::RendezvousLat(options) if options.borrow && options.inline() > Some(0)) {
        return usage("--inline: a tensor inside a message is not borrowed; leave it out");
    }
    if matches!(test, Test::WriteLat(options) if options.notify() == Notify::Memory)
        && name != FabricName::Verbs
    {
        return usage(&format!(
            "--notify memory: on {name} a write lands when its receiver polls, so memory does not show it \
             earlier; it is for --fabric verbs"
        ));
    }
    static OF_VERBS: [(&str, &str); 5] = [
        ("ib_dev", "has no device"),
        ("ib_port", "has no device"),
        ("gid_index", "has no GIDs"),
        ("mtu", "leaves packets to the kernel"),
        ("cq_mod", "has no completion queue"),
    ];
    static OF_TCP: [(&str, &str); 2] = [("bind", "has no addresses"), ("streams", "has no connections")];
    let on =
        |fabric, options: &'static [(&str, &str)]| options.iter().map(move |(o, why)| (fabric, *o, *why));
    let mut others = on(FabricName::Verbs, &OF_VERBS).chain(on(FabricName::Tcp, &OF_TCP));
    match others.find(|(fabric, option, _)| *fabric != name && given.contains(*option)) {
        Some((fabric, option, why)) => {
            let why = if name == FabricName::Auto { "takes what the nodes find" } else { why };
            usage(&format!("--{}: {name} {why}; it is for --fabric {fabric}", option.replace('_', "-")))
        }
        None => Ok(()),
    }
}

/// Refuses payloads that the pool can't hold.
fn check_pool(args: &PerfArgs) -> Result<(), CliError> {
    let Some(&FabricOptions { pool, .. }) = args.test.fabric() else { return Ok(()) };
    let most = args.max_bytes();
    // Each tensor of a batch has a block of its own.
    let at_once = match &args.test {
        Test::RendezvousLat(options) if options.batch() > 0 => {
            (options.batch() as usize).saturating_mul(most.max(SMALLEST_BLOCK))
        }
        _ => most,
    };
    let share = if args.test.borrows() { BORROWED_SHARE } else { POOL_SHARE };
    if at_once <= pool / share {
        return Ok(());
    }
    Err(CliError::Usage(format!(
        "--sizes: {at_once} bytes need a pool of {} at least, and it has {pool}: raise --pool",
        at_once.saturating_mul(share)
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::options::RendezvousOptions;
    use clap::CommandFactory;

    /// As the program does it.
    #[derive(clap::Parser)]
    struct Cli {
        #[command(flatten)]
        args: PerfArgs,
    }

    fn plan(options: &str) -> Result<Plan, String> {
        let line = std::iter::once("perf").chain(options.split_whitespace());
        let matches = Cli::command().try_get_matches_from(line).map_err(|error| error.to_string())?;
        let args = PerfArgs::from_arg_matches(&matches).map_err(|error| error.to_string())?;
        Plan::check(args, &given(&matches), &[0, 1]).map_err(|error| error.to_string())
    }

    #[test]
    fn options_of_a_client_are_such_as_the_command_line_takes() {
        for options in [
            "write_lat --fabric verbs -s 2,64KiB --notify memory --links 3 -I 64 -Q 4",
            "write_bw --fabric tcp --streams 3 -D 0.5",
            "send_lat -n 100 --warmup 0 -t 512 --unpinned",
            "read_lat --fabric verbs --mtu 1024",
            "rendezvous_lat --standing --pool 1GiB",
            "rendezvous_lat --borrow --all-sizes",
            "rendezvous_lat --profile low-latency --busy 2 --batch 100 -s 8,64",
        ] {
            let mut args = plan(options).unwrap().args;
            check_client_options(&args).unwrap_or_else(|error| panic!("{options}: {error}"));
            args.run.turns = 1001;
            assert!(
                check_client_options(&args).unwrap_err().to_string().contains("1001 is not in"),
                "{options}"
            );
        }
        let mut args = plan("rendezvous_lat").unwrap().args;
        if let Test::RendezvousLat(options) = &mut args.test {
            options.poll = Some("\r\u{1b}[31mx".repeat(100_000));
        }
        let error = check_client_options(&args).unwrap_err().to_string();
        assert!(error.len() < 2000 && !error.contains(['\r', '\u{1b}']), "{error}");
        let mut args = plan("write_lat --fabric verbs --notify memory").unwrap().args;
        args.test.fabric_mut().unwrap().fabric = FabricName::Tcp;
        assert!(check_client_options(&args).unwrap_err().to_string().contains("--notify memory"));
        let mut args = plan("send_lat -s 8").unwrap().args;
        for (bytes, why) in [(0, "a size is 1 to"), (225, "carries 224 bytes"), (1 << 63, "a size is 1 to")] {
            args.run.sizes = Some(vec![bytes]);
            let error = check_client_options(&args).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        let mut args = plan("write_lat -s 64KiB").unwrap().args;
        args.test.fabric_mut().unwrap().pool = 4096;
        assert!(check_client_options(&args).unwrap_err().to_string().contains("raise --pool"));
    }

    fn rendezvous(options: &str) -> RendezvousOptions {
        match plan(options).unwrap().args.test {
            Test::RendezvousLat(options) => options,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn iterations_are_shared_by_the_turns() {
        let plan = plan("ring_64 --local -n 12 --turns 5 -s 8,56").unwrap();
        assert_eq!(plan.length(8), Length::Iterations(3));
        assert_eq!((plan.warmup(8), plan.args.max_bytes()), (3, 56));
        assert_eq!(plan.args.test, Test::Ring64 { depth: 64 });
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
        assert_eq!(rendezvous("rendezvous_lat --local --borrow").inline(), Some(0));
    }

    #[test]
    fn what_is_measured_in_a_new_way_is_measured_in_the_old_one_beside_it() {
        let baseline = |options: &str| plan(options).unwrap().args.test.baseline();
        assert_eq!(baseline("rendezvous_lat --local"), None);
        for (options, expected) in [("--batch 5", "one_by_one"), ("--standing", "plain")] {
            let (name, test) = baseline(&format!("rendezvous_lat --local {options}")).unwrap();
            assert_eq!(name, expected);
            assert!(matches!(test, Test::RendezvousLat(options) if options.is_baseline), "{options}");
        }
        assert_eq!(rendezvous("rendezvous_lat --local --batch 5").batch(), 5);
        assert_eq!(rendezvous("rendezvous_lat --local --standing").standing(), 16);
        assert_eq!(rendezvous("rendezvous_lat --standing 4 --local").standing(), 4);
        let (name, test) = baseline("write_lat --local --links 5").unwrap();
        assert!(matches!(test, Test::WriteLat(options) if options.links() == 0) && name == "alone");
    }

    #[test]
    fn all_sizes_are_those_that_the_test_carries() {
        assert_eq!(plan("ring_64 --local --all-sizes").unwrap().args.sizes(), [2, 4, 8, 16, 32]);
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
            ("cache_line --local --depth 64", "unexpected argument '--depth'"),
            ("ring_64 --local --depth 48", "power of two"),
            ("ring_64 --local --depth 2048", "from 16 to 1024"),
            ("ring_64 --local --pool 1MiB", "unexpected argument '--pool'"),
            ("cache_line --local --inline 8", "unexpected argument '--inline'"),
            ("cache_line --local --fabric shm", "unexpected argument '--fabric'"),
            ("write_lat --local --fabric udp", "invalid value 'udp'"),
            ("rendezvous_lat --local --fabric shm --streams 2", "--streams: shm has no connections"),
            ("rendezvous_lat --local --fabric grpc --poll auto", "--poll: calls over gRPC have no poller"),
            ("write_lat --local --fabric auto", "only the nodes of rendezvous_lat choose a fabric"),
            ("rendezvous_lat --local --fabric auto -d rxe0", "--ib-dev: auto takes what the nodes find"),
            ("write_lat --local --fabric grpc", "only rendezvous_lat runs over gRPC calls"),
            ("write_lat --local --fabric tcp -d rxe0", "--ib-dev: tcp has no device"),
            ("write_lat --local --fabric tcp -m 1024", "--mtu: tcp leaves packets to the kernel"),
            ("write_lat --local --fabric tcp --notify memory", "on tcp a write lands when"),
            ("write_bw --local --fabric tcp --streams 16", "16 is not in 1..=15"),
            ("write_bw --local --streams 2", "--streams: shm has no connections; it is for --fabric tcp"),
            ("write_bw --local --fabric verbs --bind ::1", "--bind: verbs has no addresses"),
            ("write_lat --local -F", "unexpected argument '-F'"),
            ("write_lat host --local", "cannot be used with"),
            ("write_lat --local --port 5", "cannot be used with"),
            ("write_lat --json here", "the client measures"),
            ("write_lat --local -d rxe0", "--ib-dev: shm has no device"),
            ("write_lat --local -i 1", "--ib-port: shm has no device"),
            ("write_lat --local -x 1", "--gid-index: shm has no GIDs"),
            ("write_lat --local -m 1024", "--mtu: shm leaves packets to the kernel"),
            ("write_lat --local -Q 8", "--cq-mod: shm has no completion queue"),
            ("write_lat --local --notify memory", "lands when its receiver polls"),
            ("send_lat --local --notify immediate", "unexpected argument '--notify'"),
            ("send_lat --local -s 225", "carries 224 bytes at most, not 225"),
            ("read_lat --local -I 64", "unexpected argument '-I'"),
            ("rendezvous_lat --local --fabric verbs -Q 8", "unexpected argument '-Q'"),
            ("write_lat --local --sizes 64MiB", "need a pool of 536870912"),
            ("rendezvous_lat --local --inline 161", "161 is not in 0..=160"),
            ("rendezvous_lat --local --profile fast", "low-latency, throughput, shared-host, few-cores"),
            ("write_lat --local --profile throughput", "unexpected argument '--profile'"),
            ("rendezvous_lat --local --links 5", "unexpected argument '--links'"),
            ("write_lat --local --borrow", "unexpected argument '--borrow'"),
            ("rendezvous_lat --local --fabric verbs --borrow", "only shm lends tensors"),
            ("rendezvous_lat --local --borrow -I 8", "is not borrowed"),
            ("rendezvous_lat --local --borrow -s 200MiB", "need a pool of 419430400"),
            ("rendezvous_lat --local --borrow --batch 5", "cannot be used with"),
            ("write_lat --local --batch 5", "unexpected argument '--batch'"),
            ("write_lat --local --standing", "unexpected argument '--standing'"),
            ("rendezvous_lat --local --standing --batch 5", "cannot be used with"),
            ("rendezvous_lat --local --standing 4 --borrow", "cannot be used with"),
            ("rendezvous_lat --local --standing 0", "0 is not in 1..=256"),
            ("rendezvous_lat --local --standing 257", "257 is not in 1..=256"),
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
        assert_eq!(server.part, Part::Server(([127, 0, 0, 1], 18_515).into()));
        assert!(server.given.iter().all(|name| name == "test"), "{:?}", server.given);
        let client = plan("write_lat there -p 7 -s 64 -t 32 -I 8 --fabric verbs -x 1").unwrap();
        assert_eq!(client.part, Part::Client("there".into(), 7));
        assert!(server.agree(&client.args).is_ok());
    }

    #[test]
    fn what_a_server_was_given_must_be_the_clients_too() {
        let server = plan("write_lat -s 64 -n 100 --tx-depth 64").unwrap();
        let refusal = |client: &str| {
            let client = plan(client).unwrap();
            server.agree(&client.args).map_err(|error| error.to_string())
        };
        assert_eq!(refusal("write_lat there --size 64 --iters 100 -t 64 --warmup 3"), Ok(()));
        let why = refusal("write_lat there -s 8 -n 100").unwrap_err();
        assert!(why.contains("--sizes is 64 at the server and 8 at the client"), "{why}");
        assert!(why.contains("--depth is 64 at the server and 256 at the client"), "{why}");
        let why = refusal("read_lat there -s 64").unwrap_err();
        assert!(why.contains("started for write_lat and the client runs read_lat"), "{why}");
    }

    #[test]
    fn a_clients_words_are_escaped_and_cut_off() {
        let server = plan("rendezvous_lat --profile throughput").unwrap();
        let mut theirs = plan("rendezvous_lat there").unwrap().args;
        if let Test::RendezvousLat(options) = &mut theirs.test {
            options.profile = Some(format!("\x1b[2J{}", "x".repeat(2 * MAX_WORDS)));
        }
        let why = server.agree(&theirs).unwrap_err().to_string();
        assert!(why.contains("--profile is throughput at the server and \\u{1b}[2Jxx"), "{why}");
        assert!(why.len() < MAX_WORDS + 200, "{why}");
    }

    #[test]
    fn a_write_is_seen_as_perftest_sees_it_where_the_fabric_can() {
        let notify = |options| match plan(options).unwrap().args.test {
            Test::WriteLat(options) => options.notify(),
            other => panic!("{other:?}"),
        };
        assert_eq!(notify("write_lat --local"), Notify::Immediate);
        assert_eq!(notify("write_lat --local --fabric verbs"), Notify::Memory);
    }
}
