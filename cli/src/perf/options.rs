//! The options of `perf`: one subcommand for each test, with perftest's names where it has them.
//!
//! The same structs are the command line, the settings of a workload, and what the two processes
//! agree on. An option that means nothing to a test is no option of its subcommand.

use super::fabric_name::FabricName;
use super::layout::{MAX_RING_SLOTS, RING_PAYLOAD};
use crate::error::CliError;
use clap::builder::PossibleValuesParser;
use clap::{Args, Subcommand, ValueEnum, value_parser};
use serde::{Deserialize, Serialize};
use std::net::IpAddr;
use std::path::PathBuf;
use tensorwire::Profile;
use tensorwire::internals::fabric::MAX_MESSAGE;
use tensorwire::internals::fabric::verbs::device::Mtu;
use tensorwire::internals::matching::WINDOWS;

/// Turns at least beside references, and by default: fewer say nothing about the spread.
pub const MIN_TURNS: u32 = 5;
/// Payload at most, in bytes.
const MAX_BYTES: usize = 1 << 30;
/// Operations that can be outstanding at most, on any fabric.
const MAX_DEPTH: u32 = 65_536;
/// Idle links at most: a poller serves at most 4096 links.
const MAX_LINKS: i64 = 4095;
/// Tensors of a batch at most.
const MAX_BATCH: i64 = 100_000;
/// Tensors of the window of a standing edge at most.
const MAX_WINDOW: i64 = WINDOWS.largest_window as i64;
/// Tensors of such a window by default.
const WINDOW: &str = "16";
/// The port of a server, as perftest's.
const PORT: u16 = 18_515;
/// Bytes of a pool by default.
const POOL: &str = "256MiB";
/// Bytes of a pool at most.
const MAX_POOL: usize = 1 << 40;
/// `small_tensor_bytes` by default.
const SMALL: u32 = 128;
/// `small_tensor_bytes` at most.
const MAX_SMALL: i64 = 160;

/// A test with all options. The two processes agree on it.
#[derive(Args, Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PerfArgs {
    /// The test with its own options.
    #[command(subcommand)]
    #[serde(flatten)]
    pub test: Test,
    /// Options of every test.
    #[command(flatten)]
    #[serde(flatten)]
    pub run: RunOptions,
}

/// Options of every test. They are global, so they may stand behind the test.
#[derive(Args, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[command(next_help_heading = "Options of every test")]
pub struct RunOptions {
    /// Start both processes on this host
    #[arg(long, global = true)]
    #[serde(skip)]
    pub local: bool,
    /// Payload sizes, such as 2,8,4096,64KiB,1MiB [default: depends on the test]
    #[arg(
        long, short, global = true, alias = "size", value_delimiter = ',', value_parser = bytes,
        conflicts_with = "all_sizes"
    )]
    pub sizes: Option<Vec<usize>>,
    /// Every power of two from 2 bytes to 8 MiB that the test can carry
    #[arg(long, short, global = true, alias = "all")]
    #[serde(skip)]
    pub all_sizes: bool,
    /// Measured round trips, or operations, of each size, over all turns [default: 100000, fewer
    /// above 10 KiB]
    #[arg(
        long, short = 'n', global = true, alias = "iters", conflicts_with = "duration",
        value_parser = value_parser!(u64).range(1..)
    )]
    pub iterations: Option<u64>,
    /// Seconds to measure each size, over all turns, instead of a number of round trips
    #[arg(long, short = 'D', global = true, value_name = "SECONDS", value_parser = seconds)]
    pub duration: Option<f64>,
    /// Unmeasured round trips before each turn [default: 1000, at most as many as measured ones]
    #[arg(long, global = true, value_name = "N", value_parser = value_parser!(u64).range(0..=1_000_000_000))]
    pub warmup: Option<u64>,
    /// Turns of the test and of its references; at least 5 beside references
    #[arg(
        long, global = true, value_name = "N", default_value_t = MIN_TURNS,
        value_parser = value_parser!(u32).range(1..=1000)
    )]
    pub turns: u32,
    /// The two cores: of the process that measures, and of the one that answers
    #[arg(long, global = true, value_parser = pair, value_name = "A,B")]
    #[serde(skip)]
    pub cores: Option<[usize; 2]>,
    /// Pin neither process, and leave both to the scheduler
    #[arg(long, global = true, conflicts_with = "cores")]
    pub unpinned: bool,
    /// Also write the report to this file
    #[arg(long, global = true, value_name = "FILE")]
    #[serde(skip)]
    pub json: Option<PathBuf>,
}

/// A test, with the options that are its own.
#[derive(Subcommand, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[command(rename_all = "snake_case")]
#[serde(tag = "test", rename_all = "snake_case")]
pub enum Test {
    /// The bare fabric: a one-sided write, answered by another, as ib_write_lat
    ///
    /// The receiver polls the last byte, as ib_write_lat does, or takes an immediate (--notify).
    WriteLat(WriteLatOptions),
    /// The bare fabric: one-sided writes, as many outstanding as the depth, as ib_write_bw
    WriteBw(InlineOptions),
    /// The bare fabric: a message of up to 224 bytes, answered by another, as ib_send_lat
    SendLat(BareOptions),
    /// The bare fabric: a one-sided read, the whole round trip, as ib_read_lat
    ReadLat(BareOptions),
    /// The whole engine: a tensor sent and received by step and key, answered by another
    RendezvousLat(RendezvousOptions),
    /// A bare cache line; against its own reference it shows the noise
    CacheLine,
    /// A bare ring of 64-byte slots, sequence word and payload in one line
    #[command(name = "ring_64")]
    #[serde(rename = "ring_64")]
    Ring64 {
        /// Slots of the ring, a power of two
        #[arg(long, short = 't', alias = "tx-depth", default_value_t = 64, value_parser = ring_slots)]
        depth: u32,
    },
}

/// Options of the tests that run on a fabric.
#[derive(Args, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FabricOptions {
    /// The host of the server; without it, and without --local, this process is the server
    #[arg(conflicts_with = "local")]
    #[serde(skip)]
    pub host: Option<String>,
    /// TCP port of the server
    #[arg(
        long, short, default_value_t = PORT, conflicts_with = "local",
        value_parser = value_parser!(u16).range(1..)
    )]
    #[serde(skip)]
    pub port: u16,
    /// The server's address, 0.0.0.0 for all: see TENSORWIRE_SECRET_FILE [default: 127.0.0.1]
    #[arg(long, conflicts_with_all = ["local", "host"], value_name = "ADDRESS")]
    #[serde(skip)]
    pub listen: Option<IpAddr>,
    /// What carries the bytes
    #[arg(long, value_enum, default_value_t)]
    pub fabric: FabricName,
    /// Which device carries them: each process's own choice.
    #[command(flatten)]
    #[serde(skip)]
    pub device: DeviceOptions,
    /// verbs: path MTU in bytes, 256 to 4096 [default: the port's]
    #[arg(long, short, value_name = "BYTES", value_parser = mtu)]
    pub mtu: Option<u32>,
    /// tcp: connections for large payloads, 1 to 15 [default: 1]
    #[arg(long, value_name = "N", value_parser = value_parser!(u8).range(1..=15))]
    pub streams: Option<u8>,
    /// Operations that can be outstanding, a power of two [default: 256; of write_bw: 128]
    #[arg(long, short = 't', alias = "tx-depth", value_parser = depth)]
    depth: Option<u32>,
    /// Bytes of each process's pool
    #[arg(long, default_value = POOL, value_parser = pool, value_name = "SIZE")]
    pub pool: usize,
}

/// The device of a process.
#[derive(Args, Clone, Debug, Default, PartialEq)]
pub struct DeviceOptions {
    /// verbs: the device, such as mlx5_0 [default: the only one with an active port]
    #[arg(long, short = 'd', value_name = "NAME")]
    pub ib_dev: Option<String>,
    /// verbs: the device's port [default: its first active one]
    #[arg(long, short = 'i', value_name = "PORT", value_parser = value_parser!(u8).range(1..))]
    pub ib_port: Option<u8>,
    /// verbs: index into the port's GID table [default: the best, as `tensorwire devices` shows]
    #[arg(long, short = 'x', value_name = "INDEX")]
    pub gid_index: Option<u8>,
    /// tcp: the address of this host that the other process reaches [default: 127.0.0.1]
    #[arg(long, value_name = "ADDRESS")]
    pub bind: Option<IpAddr>,
}

/// Options of the tests of the bare fabric.
#[derive(Args, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BareOptions {
    #[command(flatten)]
    #[serde(flatten)]
    pub fabric: FabricOptions,
    /// verbs: work requests per completion; at most a quarter of the depth [default: 64]
    #[arg(
        long, short = 'Q', value_name = "N",
        value_parser = value_parser!(u32).range(1..=i64::from(MAX_DEPTH))
    )]
    pub cq_mod: Option<u32>,
}

/// Options of the tests of the bare fabric that can write inline.
#[derive(Args, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct InlineOptions {
    /// The bare fabric.
    #[command(flatten)]
    #[serde(flatten)]
    pub bare: BareOptions,
    /// Payload up to this many bytes travels inside a slot or work request [default: the fabric's
    /// most; of write_bw: 0]
    #[arg(long, short = 'I', alias = "inline_size", value_name = "BYTES")]
    pub inline: Option<u32>,
}

/// Options of the test of writes with immediate.
#[derive(Args, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WriteLatOptions {
    /// The bare fabric.
    #[command(flatten)]
    #[serde(flatten)]
    pub posting: InlineOptions,
    /// How the receiver learns of a write [default: memory on verbs, as ib_write_lat; immediate on
    /// shm and tcp]
    #[arg(long)]
    notify: Option<Notify>,
    /// Idle links between the two processes, beside the measured one; it is then also measured
    /// alone, in turns
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=MAX_LINKS))]
    links: Option<u32>,
}

/// Options of `rendezvous_lat`.
#[derive(Args, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RendezvousOptions {
    #[command(flatten)]
    #[serde(flatten)]
    pub fabric: FabricOptions,
    /// Tensors up to this many bytes travel inside a message (small_tensor_bytes) [default: 128;
    /// with --borrow: 0]
    #[arg(
        long, short = 'I', alias = "inline_size", value_name = "BYTES",
        value_parser = value_parser!(u32).range(0..=MAX_SMALL)
    )]
    inline: Option<u32>,
    /// A profile of settings, for both processes. Options of the command line win over it
    /// [default: no profile, and calls that spin]
    #[arg(
        long, value_name = "NAME",
        value_parser = PossibleValuesParser::new(Profile::ALL.map(Profile::name))
    )]
    pub profile: Option<String>,
    /// The poll mode of both processes, and their usual way to wait [default: inline, and calls
    /// that spin]
    #[arg(
        long, value_name = "MODE", conflicts_with = "profile",
        value_parser = ["auto", "inline", "adaptive", "dedicated"]
    )]
    pub poll: Option<String>,
    /// Threads that compute all the time, and share the CPUs with the two processes
    #[arg(
        long, value_name = "N", default_value_t = 0,
        value_parser = value_parser!(u32).range(..=1024)
    )]
    pub busy: u32,
    /// shm: receive by borrowing, and send the same tensor each time; every size is measured in
    /// turns with the smallest
    #[arg(long, conflicts_with_all = ["batch", "standing"])]
    pub borrow: bool,
    /// Tensors each way in a round trip, sent and received by one call; they are then also sent
    /// and received one by one, in turns. The times are those of whole batches
    #[arg(
        long, value_name = "N", conflicts_with = "standing",
        value_parser = value_parser!(u32).range(1..=MAX_BATCH)
    )]
    batch: Option<u32>,
    /// Each round trip is a step of its own, and both sides have standing requests for WINDOW steps
    /// [16 if no number is given]. The report also has plain receives, measured in turns
    #[arg(
        long, value_name = "WINDOW", num_args = 0..=1, default_missing_value = WINDOW,
        value_parser = value_parser!(u32).range(1..=MAX_WINDOW)
    )]
    standing: Option<u32>,
    /// The tensors of --batch travel one by one, those of --standing are requested in their steps:
    /// see [`Test::baseline`].
    #[arg(skip)]
    pub is_baseline: bool,
}

/// How the receiver learns of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Notify {
    /// By the immediate of the write, as the engine does
    Immediate,
    /// By polling the last byte, which relies on the device writing bytes in order
    Memory,
}

/// The unit of a test's figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Figure {
    /// Half of a ping-pong.
    OneWay,
    /// The whole time of an operation.
    RoundTrip,
    /// Bytes a second.
    Bandwidth,
}

impl PerfArgs {
    /// Fills in the defaults that depend on the test and the fabric.
    ///
    /// # Errors
    /// If a size is more than the test can carry.
    pub fn resolve(&mut self) -> Result<(), CliError> {
        let (name, most) = (self.test.name(), self.test.max_bytes());
        let sizes = match self.run.sizes.take() {
            Some(sizes) => sizes,
            None if self.run.all_sizes => {
                (1..=23).map(|power| 1 << power).filter(|&size| size <= most).collect()
            }
            None => self.test.default_sizes().to_vec(),
        };
        if let Some(size) = sizes.iter().find(|&&size| size > most) {
            let why = format!("--sizes: {name} carries {most} bytes at most, not {size}");
            return Err(CliError::Usage(why));
        }
        self.run.sizes = Some(sizes);
        self.test.resolve();
        Ok(())
    }

    /// The payloads of a resolved run, in bytes, in the order asked for.
    pub fn sizes(&self) -> &[usize] {
        self.run.sizes.as_deref().unwrap_or_default()
    }

    /// The largest payload.
    pub fn max_bytes(&self) -> usize {
        self.sizes().iter().copied().max().unwrap_or_default()
    }
}

impl Test {
    /// The name on the command line and in the report.
    pub fn name(&self) -> &'static str {
        match self {
            Test::WriteLat(_) => "write_lat",
            Test::WriteBw(_) => "write_bw",
            Test::SendLat(_) => "send_lat",
            Test::ReadLat(_) => "read_lat",
            Test::RendezvousLat(_) => "rendezvous_lat",
            Test::CacheLine => "cache_line",
            Test::Ring64 { .. } => "ring_64",
        }
    }

    /// The unit of its figures.
    pub fn figure(&self) -> Figure {
        match self {
            Test::WriteBw(_) => Figure::Bandwidth,
            Test::ReadLat(_) => Figure::RoundTrip,
            _ => Figure::OneWay,
        }
    }

    /// Payload that it can carry at most, in bytes.
    pub fn max_bytes(&self) -> usize {
        match self {
            Test::WriteLat(_) | Test::WriteBw(_) | Test::ReadLat(_) | Test::RendezvousLat(_) => MAX_BYTES,
            Test::SendLat(_) => MAX_MESSAGE,
            Test::CacheLine => 8,
            Test::Ring64 { .. } => RING_PAYLOAD,
        }
    }

    /// Payloads that are measured by default, in bytes.
    fn default_sizes(&self) -> &'static [usize] {
        match self {
            Test::WriteLat(_) | Test::ReadLat(_) | Test::RendezvousLat(_) => {
                &[2, 8, 64, 4 << 10, 64 << 10, 1 << 20]
            }
            Test::WriteBw(_) => &[64 << 10],
            Test::SendLat(_) => &[2, 8, 64],
            Test::CacheLine => &[8],
            Test::Ring64 { .. } => &[8, 32, 56],
        }
    }

    fn resolve(&mut self) {
        let depth = if self.figure() == Figure::Bandwidth { 128 } else { 256 };
        // A profile may set them otherwise.
        let has_profile = matches!(self, Test::RendezvousLat(options) if options.profile.is_some());
        if let Some(fabric) = self.fabric_mut().filter(|_| !has_profile) {
            fabric.depth.get_or_insert(depth);
        }
        match self {
            Test::WriteLat(options) => {
                options.notify.get_or_insert(match options.posting.bare.fabric.fabric {
                    FabricName::Verbs => Notify::Memory,
                    _ => Notify::Immediate,
                });
            }
            Test::WriteBw(options) => drop(options.inline.get_or_insert(0)),
            Test::RendezvousLat(options) if options.borrow => drop(options.inline.get_or_insert(0)),
            Test::RendezvousLat(options) if !has_profile => drop(options.inline.get_or_insert(SMALL)),
            _ => {}
        }
    }

    /// The options of its fabric; `None` of the references.
    pub fn fabric(&self) -> Option<&FabricOptions> {
        match self {
            Test::WriteLat(options) => Some(&options.posting.bare.fabric),
            Test::WriteBw(options) => Some(&options.bare.fabric),
            Test::SendLat(options) | Test::ReadLat(options) => Some(&options.fabric),
            Test::RendezvousLat(options) => Some(&options.fabric),
            Test::CacheLine | Test::Ring64 { .. } => None,
        }
    }

    /// The same, to be changed.
    pub fn fabric_mut(&mut self) -> Option<&mut FabricOptions> {
        match self {
            Test::WriteLat(options) => Some(&mut options.posting.bare.fabric),
            Test::WriteBw(options) => Some(&mut options.bare.fabric),
            Test::SendLat(options) | Test::ReadLat(options) => Some(&mut options.fabric),
            Test::RendezvousLat(options) => Some(&mut options.fabric),
            Test::CacheLine | Test::Ring64 { .. } => None,
        }
    }

    /// The test that runs in turns with this one, and its name in the report. It is the same
    /// without idle links, with the tensors of a batch one by one, or with plain receives.
    pub fn baseline(&self) -> Option<(&'static str, Test)> {
        match self {
            Test::WriteLat(options) if options.links() > 0 => {
                Some(("alone", Test::WriteLat(WriteLatOptions { links: None, ..options.clone() })))
            }
            Test::RendezvousLat(options) if options.batch() > 0 || options.standing() > 0 => {
                let name = if options.batch() > 0 { "one_by_one" } else { "plain" };
                let options = RendezvousOptions { is_baseline: true, ..options.clone() };
                Some((name, Test::RendezvousLat(options)))
            }
            _ => None,
        }
    }

    /// Whether receives borrow.
    pub fn borrows(&self) -> bool {
        matches!(self, Test::RendezvousLat(options) if options.borrow)
    }

    /// Idle links beside the measured one.
    pub fn idle_links(&self) -> u32 {
        if let Test::WriteLat(options) = self { options.links() } else { 0 }
    }

    /// Threads that compute beside the two processes.
    pub fn busy_loops(&self) -> u32 {
        if let Test::RendezvousLat(options) = self { options.busy } else { 0 }
    }

    /// Tensors that one round trip moves each way.
    pub fn batch(&self) -> u32 {
        if let Test::RendezvousLat(options) = self { options.batch().max(1) } else { 1 }
    }
}

impl FabricOptions {
    /// Operations that can be outstanding.
    pub fn depth(&self) -> u32 {
        self.depth.unwrap_or(256)
    }

    /// The same; `None` if a profile may set it.
    pub fn given_depth(&self) -> Option<u32> {
        self.depth
    }
}

impl WriteLatOptions {
    /// How the receiver learns of a write.
    pub fn notify(&self) -> Notify {
        self.notify.unwrap_or(Notify::Immediate)
    }

    /// Idle links beside the measured one.
    pub fn links(&self) -> u32 {
        self.links.unwrap_or(0)
    }
}

impl RendezvousOptions {
    /// Bytes up to which a tensor travels inside a message; `None` if a profile may set it.
    pub fn inline(&self) -> Option<u32> {
        self.inline
    }

    /// Tensors of a batch; 0 without batches.
    pub fn batch(&self) -> u32 {
        self.batch.unwrap_or(0)
    }

    /// Steps of a window of standing requests; 0 without them.
    pub fn standing(&self) -> u32 {
        self.standing.unwrap_or(0)
    }
}

fn bytes(text: &str) -> Result<usize, String> {
    match size(text)? {
        Some(size @ 1..=MAX_BYTES) => Ok(size),
        _ => Err("a size is 1 to 1GiB, such as 8, 4KiB or 1MiB".into()),
    }
}

fn pool(text: &str) -> Result<usize, String> {
    match size(text)? {
        Some(size @ 1..=MAX_POOL) => Ok(size),
        _ => Err("a pool has 1 byte to 1024GiB, such as 256MiB".into()),
    }
}

/// A number of bytes; `None` if it is no number or overflows.
fn size(text: &str) -> Result<Option<usize>, String> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let unit = match &text[digits..] {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        unit => return Err(format!("'{unit}' is no unit; there are B, KiB, MiB and GiB")),
    };
    Ok(text[..digits].parse::<usize>().ok().and_then(|count| count.checked_mul(unit)))
}

fn seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.001..=86_400.0).contains(seconds));
    seconds.ok_or_else(|| "seconds are 0.001 to 86400".into())
}

fn pair(text: &str) -> Result<[usize; 2], String> {
    let cores = text.split_once(',').and_then(|(a, b)| Some([a.parse().ok()?, b.parse().ok()?]));
    cores.ok_or_else(|| "two cores are two numbers with a comma, such as 0,1".into())
}

fn depth(text: &str) -> Result<u32, String> {
    power_of_two(text, MAX_DEPTH)
}

fn ring_slots(text: &str) -> Result<u32, String> {
    power_of_two(text, MAX_RING_SLOTS)
}

fn power_of_two(text: &str, most: u32) -> Result<u32, String> {
    let number = text.parse().ok().filter(|number: &u32| number.is_power_of_two());
    let number = number.filter(|number| (16..=most).contains(number));
    number.ok_or_else(|| format!("a depth is a power of two from 16 to {most}"))
}

fn mtu(text: &str) -> Result<u32, String> {
    let mtu = text.parse().ok().filter(|bytes| Mtu::from_bytes(*bytes).is_some());
    mtu.ok_or_else(|| "an MTU is 256, 512, 1024, 2048 or 4096".into())
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
