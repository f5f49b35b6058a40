//! The command line of `perf`: perftest's names where it has them.

use crate::reference::{MAX_RING_SLOTS, RING_PAYLOAD, RING_SLOTS};
use clap::{Parser, ValueEnum};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;
use tensorwire::internals::fabric::MAX_MESSAGE;
use tensorwire::internals::fabric::verbs::device::Mtu;
use tensorwire::internals::wire::message::MAX_STANDING_STEPS;

/// Turns at least beside references, and by default: fewer say nothing about the spread.
pub const MIN_TURNS: u32 = 5;
/// Payload at most, in bytes.
const MAX_BYTES: usize = 1 << 30;
/// Operations that can be outstanding at most, on any fabric.
const MAX_DEPTH: u32 = 65_536;
/// Idle links at most: a poller has room for 4096 links.
const MAX_LINKS: i64 = 4095;
/// Tensors of a batch at most.
const MAX_BATCH: i64 = 100_000;
/// Steps that standing requests ask for in advance at most, and by default.
const MAX_WINDOW: i64 = MAX_STANDING_STEPS as i64;
const WINDOW: &str = "16";
/// Where a server listens, as perftest's do.
const PORT: u16 = 18_515;
/// Bytes that a pool can be asked to have at most.
const MAX_POOL: usize = 1 << 40;

/// What `perf` is asked for.
///
/// Two processes take part: one measures, the other answers. --local starts both on this host. Without it, and
/// without HOST, this process is the server, which answers one client and ends; with HOST it is the client of the server
/// there, which measures and says for how long. Whatever is given at the server must be the same at the client.
#[derive(Parser, Debug)]
pub struct PerfArgs {
    /// What to measure
    pub test: Test,
    /// The host of the server; without it, and without --local, this process is the server
    #[arg(conflicts_with = "local")]
    pub host: Option<String>,
    /// Start both processes on this host
    #[arg(long)]
    pub local: bool,
    /// TCP port where the server listens and the two agree on what to do
    #[arg(long, short, default_value_t = PORT, conflicts_with = "local", value_parser = clap::value_parser!(u16).range(1..))]
    pub port: u16,
    /// What carries the bytes [default: shm]
    #[arg(long)]
    pub fabric: Option<FabricName>,
    /// verbs: the device, such as mlx5_0 [default: the first with an active port]
    #[arg(long, short = 'd', value_name = "NAME")]
    pub ib_dev: Option<String>,
    /// verbs: the device's port [default: its first active one]
    #[arg(long, short = 'i', value_name = "PORT", value_parser = clap::value_parser!(u8).range(1..))]
    pub ib_port: Option<u8>,
    /// verbs: index into the port's GID table [default: the best, as `tensorwire devices` shows]
    #[arg(long, short = 'x', value_name = "INDEX")]
    pub gid_index: Option<u8>,
    /// verbs: path MTU in bytes, 256 to 4096 [default: the port's]
    #[arg(long, short, value_name = "BYTES", value_parser = mtu)]
    pub mtu: Option<u32>,
    /// verbs: a work request at least of so many makes a completion; a quarter of the depth where that is less [default: 64]
    #[arg(long, short = 'Q', value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_DEPTH)))]
    pub cq_mod: Option<u32>,
    /// How write_lat's receiver learns that a write has landed [default: memory on verbs, as ib_write_lat; immediate on shm]
    #[arg(long)]
    pub notify: Option<Notify>,
    /// Payload sizes, such as 2,8,4096,64KiB,1MiB [default: depends on the test]
    #[arg(long, short, alias = "size", value_delimiter = ',', value_parser = bytes, conflicts_with = "all_sizes")]
    pub sizes: Option<Vec<usize>>,
    /// Every power of two from 2 bytes to 8 MiB that the test can carry
    #[arg(long, short, alias = "all")]
    pub all_sizes: bool,
    /// Measured round trips, or operations, of each size, over all turns [default: 100000, fewer above 10 KiB]
    #[arg(long, short = 'n', alias = "iters", conflicts_with = "duration", value_parser = clap::value_parser!(u64).range(1..))]
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
    /// Turns that the test takes, and its references, with which there are 5 at least [default: 5]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub turns: Option<u32>,
    /// Also write the report to this file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Operations that can be outstanding, a power of two [default: 256; of write_bw: 128; of ring_64: 64]
    #[arg(long, short = 't', alias = "tx-depth", value_parser = depth)]
    pub depth: Option<u32>,
    /// Bytes of each process's pool [default: 256MiB]
    #[arg(long, value_parser = pool, value_name = "SIZE")]
    pub pool: Option<usize>,
    /// Payload up to this many bytes travels inside a slot or work request [default: the fabric's most; of
    /// rendezvous_lat: 128; of write_bw: 0]
    #[arg(long, short = 'I', alias = "inline_size", value_name = "BYTES")]
    pub inline: Option<u32>,
    /// rendezvous_lat: receives borrow, and each side sends the same tensor each time. Every size is measured in turns with the
    /// smallest
    #[arg(long)]
    pub borrow: bool,
    /// Idle links between the two processes beside the one that write_lat measures; it is then also measured alone,
    /// in turns [default: 0]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=MAX_LINKS))]
    pub links: Option<u32>,
    /// Tensors that rendezvous_lat sends each way in a round trip, by one call; they are then also sent one by one, and
    /// received so once all receives are begun, in turns. Its times are those of whole batches
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=MAX_BATCH))]
    pub batch: Option<u32>,
    /// rendezvous_lat: each round trip is a step of its own, and both sides ask for the tensors of so many steps in advance
    /// [16 if no number is given]; the same is then also measured with plain requests, in turns
    #[arg(long, value_name = "WINDOW", num_args = 0..=1, default_missing_value = WINDOW, value_parser = clap::value_parser!(u32).range(1..=MAX_WINDOW))]
    pub standing: Option<u32>,
}

/// What can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[value(rename_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub enum Test {
    /// The bare fabric: a one-sided write, answered by another. Its receiver looks at the last byte as ib_write_lat's does, or takes
    /// an immediate (--notify)
    WriteLat,
    /// The bare fabric: one-sided writes, as many outstanding as the depth, as ib_write_bw
    WriteBw,
    /// The bare fabric: a message of up to 224 bytes, answered by another, as ib_send_lat
    SendLat,
    /// The bare fabric: a one-sided read, the whole round trip, as ib_read_lat
    ReadLat,
    /// The whole engine: a tensor sent and received by step and key, answered by another
    RendezvousLat,
    /// The bare cache line itself; against its own reference it shows the noise
    CacheLine,
    /// A bare ring of 64-byte slots, sequence word and payload in one line
    #[value(name = "ring_64")]
    #[serde(rename = "ring_64")]
    Ring64,
}

/// What a test's figures are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Figure {
    /// Half of a ping-pong.
    OneWay,
    /// The whole time of an operation.
    RoundTrip,
    /// Bytes a second.
    Bandwidth,
}

impl Test {
    /// The name on the command line and in the report.
    pub fn name(self) -> &'static str {
        match self {
            Test::WriteLat => "write_lat",
            Test::WriteBw => "write_bw",
            Test::SendLat => "send_lat",
            Test::ReadLat => "read_lat",
            Test::RendezvousLat => "rendezvous_lat",
            Test::CacheLine => "cache_line",
            Test::Ring64 => "ring_64",
        }
    }

    /// What its figures are.
    pub fn figure(self) -> Figure {
        match self {
            Test::WriteBw => Figure::Bandwidth,
            Test::ReadLat => Figure::RoundTrip,
            _ => Figure::OneWay,
        }
    }

    /// Payload that it can carry at most, in bytes.
    pub fn max_bytes(self) -> usize {
        match self {
            Test::WriteLat | Test::WriteBw | Test::ReadLat | Test::RendezvousLat => MAX_BYTES,
            Test::SendLat => MAX_MESSAGE,
            Test::CacheLine => 8,
            Test::Ring64 => RING_PAYLOAD,
        }
    }

    /// Payloads that are measured if none are asked for.
    pub fn default_sizes(self) -> &'static [usize] {
        match self {
            Test::WriteLat | Test::ReadLat | Test::RendezvousLat => &[2, 8, 64, 4 << 10, 64 << 10, 1 << 20],
            Test::WriteBw => &[64 << 10],
            Test::SendLat => &[2, 8, 64],
            Test::CacheLine => &[8],
            Test::Ring64 => &[8, 32, 56],
        }
    }

    /// Whether `--depth` means anything to it, and what it is by default.
    pub fn default_depth(self) -> Option<u32> {
        match self {
            Test::WriteLat | Test::SendLat | Test::ReadLat | Test::RendezvousLat => Some(256),
            Test::WriteBw => Some(128),
            Test::CacheLine => None,
            Test::Ring64 => Some(RING_SLOTS),
        }
    }

    /// Operations that can be outstanding at most.
    pub fn max_depth(self) -> u32 {
        if self == Test::Ring64 { MAX_RING_SLOTS } else { MAX_DEPTH }
    }

    /// Whether it runs on a fabric, with a pool.
    pub fn is_ours(self) -> bool {
        !matches!(self, Test::CacheLine | Test::Ring64)
    }
}

/// A fabric by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
pub enum FabricName {
    /// Shared memory
    Shm,
    /// RDMA devices through libibverbs
    Verbs,
}

/// How the receiver of a write learns of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
pub enum Notify {
    /// By the immediate that comes with it, as the engine does
    Immediate,
    /// By looking at its last byte, which relies on the device writing bytes in order
    Memory,
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

/// A number of bytes; `None` for one that is none or too large to count.
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
