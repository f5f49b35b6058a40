//! The one table of all settings. A new setting is one row here, and one row of good and bad values in the
//! tests (they fail without it).
//!
//! A row: what it means; the name; the type in the program; how it is spelled; `required`, `optional` or
//! `default(text)`; what is allowed, in words; and a check of that, which may also round the value.

use super::builder::{Builder, Settings};
use super::choice::{BulkReceive, Fabric, PeerLoss, Poll, PoolLock, PoolPages, Wait};
use super::cluster::Cluster;
use super::error::ConfigError;
use super::format::{Address, Bytes, Cpus, Format, Job, Members, Number, OneOf, Refusal, Span, Switch};
use std::net::SocketAddr;
use std::time::Duration;
use toml::de::DeValue;

/// What the readers of the sources know of a key.
pub(super) struct Key {
    pub name: &'static str,
    pub meaning: &'static [&'static str],
    pub kind: &'static str,
    pub default: Option<&'static str>,
    pub required: bool,
    pub allowed: &'static str,
    /// Whether this is a value that the key allows.
    pub check: fn(&str) -> Result<(), Refusal>,
    /// The text that a value of a file stands for.
    pub from_toml: fn(&DeValue<'_>) -> Option<String>,
}

impl Key {
    /// The environment variable that sets this key.
    pub fn variable(&self) -> String {
        variable(self.name)
    }

    /// The key with this name.
    pub fn named(name: &str) -> Option<&'static Key> {
        KEYS.iter().find(|key| key.name == name)
    }
}

/// What the names of this crate's variables begin with.
pub(super) const PREFIX: &str = "TENSORWIRE_";

/// The environment variable that sets the key with this name.
pub(super) fn variable(key: &str) -> String {
    format!("{PREFIX}{}", key.to_ascii_uppercase())
}

macro_rules! field {
    (optional $type:ty) => { Option<$type> };
    ($_flavour:ident $type:ty) => { $type };
}

macro_rules! resolve {
    (optional $value:expr, $missing:expr) => {
        $value
    };
    ($_flavour:ident $value:expr, $missing:expr) => {
        match $value {
            Some(value) => value,
            None => return Err($missing),
        }
    };
}

macro_rules! written {
    (optional $format:ty, $value:expr) => {
        $value.as_ref().map(<$format as Format>::write)
    };
    ($_flavour:ident $format:ty, $value:expr) => {
        Some(<$format as Format>::write(&$value))
    };
}

macro_rules! default_text {
    () => {
        None
    };
    ($text:literal) => {
        Some($text)
    };
}

macro_rules! default_doc {
    (required) => {
        "Required."
    };
    (optional) => {
        "Default: not set."
    };
    (default $text:literal) => {
        concat!("Default: `", $text, "`.")
    };
}

macro_rules! settings {
    ($(
        $(#[doc = $meaning:literal])+
        $name:ident: $type:ty, $format:ty, $flavour:ident $(($default:literal))?, $allowed:literal, $accept:expr;
    )+) => {
        /// All settings of one process, checked. Made by [`Config::builder`].
        #[derive(Clone, Debug, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Config {
            $(
                $(#[doc = $meaning])+
                #[doc = ""]
                #[doc = default_doc!($flavour $($default)?)]
                #[doc = concat!("Allowed: ", $allowed, ".")]
                pub $name: field!($flavour $type),
            )+
        }

        impl Config {
            /// Every key with the text of its value, in the order of [`reference()`](super::reference());
            /// `None` for one that is not set and has no default.
            pub fn entries(&self) -> Vec<(&'static str, Option<String>)> {
                vec![$((stringify!($name), written!($flavour $format, self.$name))),+]
            }

            pub(super) fn resolve(settings: &Settings) -> Result<Config, ConfigError> {
                Ok(Config {$(
                    $name: resolve!($flavour settings.value(stringify!($name), readers::$name)?,
                                    settings.missing(stringify!($name))),
                )+})
            }
        }

        mod readers {
            use super::*;
            $(pub fn $name(text: &str) -> Result<$type, Refusal> {
                let accept: fn($type) -> Option<$type> = $accept;
                accept(<$format as Format>::read(text)?).ok_or(None)
            })+
        }

        impl Builder {
            $(
                $(#[doc = $meaning])+
                #[doc = ""]
                #[doc = default_doc!($flavour $($default)?)]
                #[doc = concat!("Allowed: ", $allowed, ".")]
                pub fn $name(self, value: $type) -> Self {
                    self.set(stringify!($name), <$format as Format>::write(&value))
                }
            )+
        }

        /// Every key, in the order of the reference.
        pub(super) const KEYS: &[Key] = &[$(Key {
            name: stringify!($name),
            meaning: &[$($meaning),+],
            kind: <$format as Format>::KIND,
            default: default_text!($($default)?),
            required: matches!(stringify!($flavour).as_bytes(), b"required"),
            allowed: $allowed,
            check: |text| readers::$name(text).map(|_| ()),
            from_toml: <$format as Format>::from_toml,
        }),+];
    };
}

const MILLISECOND: Duration = Duration::from_millis(1);
const DAY: Duration = Duration::from_secs(24 * 3600);
const PAGE: u64 = 4096;

fn up_to_a_day(span: Duration) -> Option<Duration> {
    (MILLISECOND..=DAY).contains(&span).then_some(span)
}

settings! {
    /// The job that this process belongs to.
    job: String, Job, required, "letters, digits, `_` and `-`, a letter or digit first", Some;
    /// The number of this process within its job.
    task: u32, Number<u32>, required, "0 to 4294967295, and a task of the job in `cluster`", Some;
    /// Every process of the cluster: jobs with the addresses of their tasks' bootstrap services.
    cluster: Cluster, Members, required,
        "JOB=HOST:PORT,HOST:PORT;JOB=..., in a file also a table of arrays", Some;
    /// Where this process's bootstrap service listens, if not at its own address in `cluster`.
    bind: SocketAddr, Address, optional, "IP:PORT, with an IPv6 address in brackets", Some;
    /// Leave to listen beyond the loopback interface. Members are not authenticated: anyone who
    /// reaches the port can join.
    allow_non_loopback: bool, Switch, default("false"), "true or false", Some;
    /// How long a process waits for the others when it starts.
    join_timeout: Duration, Span, default("60s"), "1ms to 24h", up_to_a_day;
    /// How often a process tells each peer that it lives.
    heartbeat_interval: Duration, Span, default("1s"), "1ms to 24h, less than `silence_bound`", up_to_a_day;
    /// How long a peer may be silent before it counts as dead.
    silence_bound: Duration, Span, default("5s"), "1ms to 24h, more than `heartbeat_interval`", up_to_a_day;

    /// Bytes of the pool that tensors are allocated from; rounded up to a multiple of 4 KiB.
    pool_size: u64, Bytes, default("256MiB"),
        "1MiB to 16TiB: a number of bytes, or one with KiB, MiB, GiB or TiB",
        |bytes| (1 << 20..=16 << 40).contains(&bytes).then(|| bytes.next_multiple_of(PAGE));
    /// The pages that the pool is made of.
    pool_pages: PoolPages, OneOf<PoolPages>, default("auto"), "auto, 1g, 2m, transparent or plain", Some;
    /// Whether it is an error not to get the pages that `pool_pages` names, which then may not be auto.
    pool_require: bool, Switch, default("false"), "true or false", Some;
    /// Whether the pool is locked in memory.
    pool_lock: PoolLock, OneOf<PoolLock>, default("best_effort"), "best_effort, require or no", Some;
    /// The NUMA node whose memory the pool is made of; without it the system chooses.
    numa_node: u32, Number<u32>, optional, "0 to 1023", |node| (node <= 1023).then_some(node);

    /// The fabric that reaches the peers.
    fabric: Fabric, OneOf<Fabric>, default("auto"), "auto or shm", Some;
    /// Who drives progress: the calls themselves (inline), the calls and a thread, both of which sleep while nothing
    /// comes (adaptive), or a thread that never sleeps (dedicated).
    poll: Poll, OneOf<Poll>, default("auto"), "auto, inline, adaptive or dedicated", Some;
    /// Pollers of this process, among which its peers are dealt out; without it as many as `cores`. More than one
    /// needs the adaptive or the dedicated mode.
    pollers: u32, Number<u32>, optional, "1 to 64", |count| (1..=64).contains(&count).then_some(count);
    /// What a waiting call does with its CPU in the inline and dedicated modes, and a dedicated poller between two
    /// polls. With `cores`, auto means yield, as another member may be pinned to the same CPU: say spin where each
    /// has its own. With `poll` = auto, spin or yield means inline; in the adaptive mode it must be auto. Spin alone
    /// never enters the kernel in steady state: to yield is a system call.
    wait: Wait, OneOf<Wait>, default("auto"), "auto, spin or yield", Some;
    /// How long who may sleep looks for something before it does, in the adaptive mode.
    spin_budget: Duration, Span, default("20us"), "0s to 1s",
        |span| (span <= Duration::from_secs(1)).then_some(span);
    /// The CPUs that polling threads are pinned to, one each; without it they are not pinned. In the inline and auto
    /// modes there is one: the thread that starts the node.
    cores: Vec<usize>, Cpus, optional,
        "CPU numbers from 0 to 1023, each once, and ranges of them: 0,2-3", Some;

    /// Operations that can be outstanding on each lane of a link.
    queue_depth: u32, Number<u32>, default("256"), "a power of two from 16 to 65536",
        |depth| ((16..=65536).contains(&depth) && depth.is_power_of_two()).then_some(depth);
    /// Lanes of each link: queue pairs on verbs, rings on shared memory, where all data takes the first one.
    lanes: u8, Number<u8>, default("1"), "1 to 8", |lanes| (1..=8).contains(&lanes).then_some(lanes);
    /// Bytes up to which a tensor rides in the response instead of being written on its own.
    small_tensor_bytes: u32, Number<u32>, default("128"), "0 to 160", |bytes| (bytes <= 160).then_some(bytes);
    /// How a bulk tensor gets from a sender on the same host to its receiver.
    bulk_receive: BulkReceive, OneOf<BulkReceive>, default("copy"), "copy or borrow", Some;
    /// Receives that can be outstanding on each link.
    max_requests: u32, Number<u32>, default("4096"), "1 to 1048575",
        |count| (1..1 << 20).contains(&count).then_some(count);
    /// Routes (edges that a peer has asked for) that are remembered for each link.
    max_routes: u32, Number<u32>, default("65536"), "1 to 1048576",
        |count| (1..=1 << 20).contains(&count).then_some(count);
    /// Requests that are kept for each peer while their step has not started here.
    max_deferred: u32, Number<u32>, default("1024"), "1 to 1048576",
        |count| (1..=1 << 20).contains(&count).then_some(count);
    /// Tensors that can wait to be received; one more send fails at once.
    max_outstanding_sends: u32, Number<u32>, default("1048576"), "1 to 16777216",
        |count| (1..=1 << 24).contains(&count).then_some(count);
    /// How long a receive waits if its caller does not say.
    recv_timeout: Duration, Span, default("60s"), "1ms to 24h", up_to_a_day;
    /// How long a cancelled receive waits for the sender's acknowledgement before it returns; its
    /// destination stays in quarantine for as long as it takes.
    cancel_grace: Duration, Span, default("100ms"), "0s to 24h", |span| (span <= DAY).then_some(span);
    /// How long a stop may take before what is still pending is aborted.
    stop_timeout: Duration, Span, default("2s"), "0s to 24h", |span| (span <= DAY).then_some(span);
    /// What the loss of a peer does to calls that do not need it.
    peer_loss: PeerLoss, OneOf<PeerLoss>, default("fail_calls"), "fail_calls or fail_all", Some;
}
