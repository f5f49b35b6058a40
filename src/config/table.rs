//! The one table of all settings. A new setting is one row here, and one row of good and bad values in the
//! tests (they fail without it).
//!
//! A row: what it means; the name; the type in the program; how it is spelled; `required`, `optional`, `auto` or
//! `default(text)`; what is allowed, in words; a check of that, which may also round the value; and other
//! variables that set it, where operators know it by another name.

use super::builder::{Builder, RawSettings};
use super::choice::{BulkReceive, PeerLoss};
use super::error::{ConfigError, Origin};
use super::format::{
    AutoOr, Bool, ByteSize, CpuList, DurationText, Format, InvalidToml, InvalidValue, JobName, Number, OneOf,
    RdmaDeviceName, SocketAddress,
};
use crate::engine::{PollMode, WaitStrategy};
use crate::fabric::FabricKind;
use crate::memory::{LockPolicy, PagePolicy};
use crate::wire::{Cluster, TaskId};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::ops::Deref;
use std::time::Duration;
use toml::de::DeValue;

/// What the readers of the sources know of a key.
pub(super) struct Key {
    pub name: &'static str,
    pub meaning: &'static [&'static str],
    pub kind: &'static str,
    pub default: Option<&'static str>,
    pub required: bool,
    /// Variables that set this key besides its own.
    pub also: &'static [&'static str],
    pub allowed: &'static str,
    /// Whether this is a value that the key allows.
    pub check: fn(&str) -> Result<(), InvalidValue>,
    /// The text that a value of a file stands for.
    pub from_toml: fn(&DeValue<'_>) -> Result<String, InvalidToml>,
}

impl Key {
    /// The environment variable that sets this key.
    pub fn variable(&self) -> String {
        variable(self.name)
    }

    /// Every environment variable that sets this key, its own first.
    pub fn variables(&self) -> impl Iterator<Item = String> {
        std::iter::once(self.variable()).chain(self.also.iter().map(|name| (*name).to_string()))
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

/// What one reading of a value gives.
macro_rules! value {
    (auto $type:ty) => { Option<$type> };
    ($_flavour:ident $type:ty) => { $type };
}

macro_rules! field {
    (optional $type:ty) => { Option<$type> };
    ($flavour:ident $type:ty) => { value!($flavour $type) };
}

/// What a setter takes.
macro_rules! argument {
    (auto $type:ty) => { impl Into<Option<$type>> };
    ($_flavour:ident $type:ty) => { $type };
}

macro_rules! argument_text {
    (auto $format:ty, $value:expr) => {
        <$format as Format>::write(&$value.into())
    };
    ($_flavour:ident $format:ty, $value:expr) => {
        <$format as Format>::write(&$value)
    };
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

macro_rules! also_names {
    () => {
        &[]
    };
    ($names:expr) => {
        &$names
    };
}

macro_rules! default_doc {
    (required) => {
        "Required."
    };
    (optional) => {
        "Default: not set."
    };
    ($_flavour:ident $text:literal) => {
        concat!("Default: `", $text, "`.")
    };
}

macro_rules! settings {
    ($(
        $(#[doc = $meaning:literal])+
        $name:ident: $type:ty, $format:ty, $flavour:ident $(($default:literal))?, $allowed:literal, $accept:expr
            $(, $also:expr)?;
    )+) => {
        /// The values of all settings, read through [`Config`].
        #[derive(Clone, Debug, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct ConfigValues {
            $(
                $(#[doc = $meaning])+
                #[doc = ""]
                #[doc = default_doc!($flavour $($default)?)]
                #[doc = concat!("Allowed: ", $allowed, ".")]
                pub $name: field!($flavour $type),
            )+
        }

        impl Config {
            /// Every key with the text of its value, in the order in which `tensorwire config` prints them;
            /// `None` for one that is not set and has no default.
            pub fn entries(&self) -> Vec<(&'static str, Option<String>)> {
                vec![$((stringify!($name), written!($flavour $format, self.$name))),+]
            }

        }

        impl ConfigValues {
            pub(super) fn resolve(settings: &RawSettings) -> Result<Self, ConfigError> {
                Ok(ConfigValues {$(
                    $name: resolve!($flavour settings.value(stringify!($name), readers::$name)?,
                                    settings.missing(stringify!($name))),
                )+})
            }
        }

        mod readers {
            use super::*;
            $(pub fn $name(text: &str) -> Result<value!($flavour $type), InvalidValue> {
                let accept: fn(value!($flavour $type)) -> Option<value!($flavour $type)> = $accept;
                accept(<$format as Format>::read(text)?).ok_or(None)
            })+
        }

        impl Builder {
            $(
                $(#[doc = $meaning])+
                #[doc = ""]
                #[doc = default_doc!($flavour $($default)?)]
                #[doc = concat!("Allowed: ", $allowed, ".")]
                pub fn $name(self, value: argument!($flavour $type)) -> Self {
                    self.set(stringify!($name), argument_text!($flavour $format, value))
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
            also: also_names!($($also)?),
            allowed: $allowed,
            check: |text| readers::$name(text).map(|_| ()),
            from_toml: <$format as Format>::from_toml,
        }),+];
    };
}

/// All settings of one process, checked. Made by [`Config::builder`]; the values are its fields:
/// `config.pool_size` ([`ConfigValues`] lists them).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    pub(super) values: ConfigValues,
    pub(super) task_id: TaskId,
    pub(super) origins: Origins,
}

impl Config {
    /// The origin of a key's value. [`Origin::Default`] also for a key that is not set, and for a name that is no key.
    pub fn origin(&self, key: &str) -> Origin {
        self.origins.0.get(key).cloned().unwrap_or(Origin::Default)
    }

    /// The member of the cluster that this process is.
    pub fn task_id(&self) -> &TaskId {
        &self.task_id
    }
}

impl Deref for Config {
    type Target = ConfigValues;

    fn deref(&self) -> &ConfigValues {
        &self.values
    }
}

/// Where the values of a [`Config`] came from. Two that say the same are equal wherever they have it from.
#[derive(Clone, Default, Debug)]
pub(super) struct Origins(pub BTreeMap<&'static str, Origin>);

impl PartialEq for Origins {
    fn eq(&self, _other: &Self) -> bool {
        true
    }
}

impl Eq for Origins {}

const MILLISECOND: Duration = Duration::from_millis(1);
const DAY: Duration = Duration::from_secs(24 * 3600);
const PAGE: u64 = 4096;

fn up_to_a_day(span: Duration) -> Option<Duration> {
    (MILLISECOND..=DAY).contains(&span).then_some(span)
}

settings! {
    /// The job that this process belongs to.
    job: String, JobName, required, "1 to 64 letters, digits, `_` and `-`, a letter or digit first", Some;
    /// The number of this process within its job.
    task: u32, Number<u32>, required, "0 to 4294967295, and a task of the job in `cluster`", Some;
    /// Every process of the cluster: jobs with the addresses of their tasks' bootstrap services.
    cluster: Cluster, Cluster, required,
        "JOB=HOST:PORT,HOST:PORT;JOB=..., in a file also a table of arrays", Some;
    /// Where this process's bootstrap service listens, if not at its own address in `cluster`.
    bind: SocketAddr, SocketAddress, optional, "IP:PORT, with an IPv6 address in brackets", Some;
    /// Leave to listen beyond the loopback interface. Members are not authenticated: anyone who
    /// reaches the port can join.
    allow_non_loopback: bool, Bool, default("false"), "true or false", Some;
    /// How long a process waits for the others when it starts.
    join_timeout: Duration, DurationText, default("60s"), "1ms to 24h", up_to_a_day;
    /// How often a process tells each peer that it lives.
    heartbeat_interval: Duration, DurationText, default("1s"), "1ms to 24h, at most half of `silence_bound`", up_to_a_day;
    /// How long a peer may be silent before it counts as dead.
    silence_bound: Duration, DurationText, default("5s"), "1ms to 24h, at least twice `heartbeat_interval`", up_to_a_day;

    /// Bytes of the pool that tensors are allocated from; rounded up to a multiple of 4 KiB.
    pool_size: u64, ByteSize, default("256MiB"),
        "1MiB to 16TiB: a number of bytes, or one with KiB, MiB, GiB or TiB",
        |bytes| (1 << 20..=16 << 40).contains(&bytes).then(|| bytes.next_multiple_of(PAGE));
    /// The pages that the pool is made of.
    pool_pages: PagePolicy, OneOf<PagePolicy>, default("auto"), "auto, 1g, 2m, transparent or plain", Some;
    /// Whether it is an error not to get the pages that `pool_pages` names, which then may not be auto.
    pool_require: bool, Bool, default("false"), "true or false", Some;
    /// Whether the pool is locked in memory.
    pool_lock: LockPolicy, OneOf<LockPolicy>, default("best_effort"), "best_effort, require or no", Some;
    /// The NUMA node whose memory the pool is made of; without it the system chooses.
    numa_node: u32, Number<u32>, optional, "0 to 1023", |node| (node <= 1023).then_some(node);

    /// The fabric that reaches the peers.
    fabric: FabricKind, AutoOr<FabricKind>, auto("auto"), "auto, shm or verbs", Some;
    /// Who drives progress: the calls themselves (inline), the calls and a thread, both of which sleep while nothing
    /// comes (adaptive), or a thread that never sleeps (dedicated).
    poll: PollMode, AutoOr<PollMode>, auto("auto"), "auto, inline, adaptive or dedicated", Some;
    /// Pollers of this process, among which its peers are dealt out; without it as many as `cores`. More than one
    /// needs the adaptive or the dedicated mode.
    pollers: u32, Number<u32>, optional, "1 to 64", |count| (1..=64).contains(&count).then_some(count);
    /// What a waiting call does with its CPU in the inline and dedicated modes, and a dedicated poller between two
    /// polls. With `cores`, auto means yield, as another member may be pinned to the same CPU: say spin where each
    /// has its own. With `poll` = auto, spin or yield means inline; in the adaptive mode it must be auto. Spin alone
    /// never enters the kernel in steady state: to yield is a system call.
    wait: WaitStrategy, AutoOr<WaitStrategy>, auto("auto"), "auto, spin or yield", Some;
    /// How long who may sleep looks for something before it does, in the adaptive mode.
    spin_budget: Duration, DurationText, default("20us"), "0s to 1s",
        |span| (span <= Duration::from_secs(1)).then_some(span);
    /// The CPUs that polling threads are pinned to, one each; without it they are not pinned. In the inline and auto
    /// modes there is one: the thread that starts the node.
    cores: Vec<usize>, CpuList, optional,
        "CPU numbers from 0 to 1023, each once, and ranges of them: 0,2-3", Some;

    /// Operations that can be outstanding on each link; on verbs `rdma_qp_queue_depth` says that.
    queue_depth: u32, Number<u32>, default("256"), "a power of two from 16 to 65536",
        |depth| ((16..=65536).contains(&depth) && depth.is_power_of_two()).then_some(depth);
    /// Bytes up to which a tensor rides in the response instead of being written on its own.
    small_tensor_bytes: u32, Number<u32>, default("128"), "0 to 160", |bytes| (bytes <= 160).then_some(bytes);
    /// How a bulk tensor gets from a sender on the same host to a receive that names no destination: copied into this process's
    /// pool, or borrowed where it lies, which costs the same at any size. Copy is the default, as what was received is then one's
    /// own: it can be held for any time without keeping a sender's buffer, and it does not depend on the sender's life. Borrow
    /// where tensors are large, read once and dropped soon. Receives into a given tensor always copy.
    bulk_receive: BulkReceive, OneOf<BulkReceive>, default("copy"), "copy or borrow", Some;
    /// Data validation mode: whether each tensor that comes from a peer is compared with the sum of what its sender sent, and an
    /// error if it differs. It costs both sides one pass over the bytes, and a message for each tensor; the peer need
    /// not have it on.
    validate: bool, Bool, default("false"), "true or false", Some;
    /// Bytes of the pool that peers can borrow at a time; what is sent beyond that is copied. Without it half of the pool:
    /// however long borrowers hold what they have, the other half is left for this process to go on with.
    max_lent_bytes: u64, ByteSize, optional,
        "0 to 16TiB: a number of bytes, or one with KiB, MiB, GiB or TiB", |bytes| (bytes <= 16 << 40).then_some(bytes);
    /// How long a peer may hold what it has borrowed before that is counted as overdue (`loans_overdue`), and how long after a
    /// peer's death what is still borrowed of it is copied out of its memory, of which the rest goes back to the system.
    borrow_grace: Duration, DurationText, default("5s"), "1ms to 24h", up_to_a_day;
    /// Receives that can be outstanding on each link. One more fails at once; those of a batch wait until there is room.
    max_requests: u32, Number<u32>, default("4096"), "1 to 1048575",
        |count| (1..1 << 20).contains(&count).then_some(count);
    /// Routes (edges that a peer has asked for) that are remembered for each link.
    max_routes: u32, Number<u32>, default("65536"), "1 to 1048576",
        |count| (1..=1 << 20).contains(&count).then_some(count);
    /// Requests that are kept for each peer while their step has not started here: by default as many as a peer with the default
    /// `max_requests` can have. Standing requests, which come before
    /// their step by their nature, count among `max_requests` alone, and take half of it at most.
    max_deferred: u32, Number<u32>, default("4096"), "1 to 1048576",
        |count| (1..=1 << 20).contains(&count).then_some(count);
    /// Tensors that can wait to be received; one more send fails at once.
    max_outstanding_sends: u32, Number<u32>, default("1048576"), "1 to 16777216",
        |count| (1..=1 << 24).contains(&count).then_some(count);
    /// How long a receive waits if its caller does not say.
    recv_timeout: Duration, DurationText, default("60s"), "1ms to 24h", up_to_a_day;
    /// How long a cancelled receive waits for the sender's acknowledgement before it returns; its
    /// destination stays in quarantine for as long as it takes.
    cancel_grace: Duration, DurationText, default("100ms"), "0s to 24h", |span| (span <= DAY).then_some(span);
    /// How long a stop may take before what is still pending is aborted.
    stop_timeout: Duration, DurationText, default("2s"), "0s to 24h", |span| (span <= DAY).then_some(span);
    /// What the loss of a peer does to calls that do not need it.
    peer_loss: PeerLoss, OneOf<PeerLoss>, default("fail_calls"), "fail_calls or fail_all", Some;

    /// The RDMA device; without it the only one with an active port.
    rdma_device: String, RdmaDeviceName, optional,
        "the name of a device, as `tensorwire devices` lists them", Some, ["RDMA_DEVICE"];
    /// The port of `rdma_device`; without it the first active one.
    rdma_device_port: u8, Number<u8>, optional, "1 to 255, only with `rdma_device`",
        |port| (port >= 1).then_some(port), ["RDMA_DEVICE_PORT"];
    /// The entry of the port's GID table that is this process's address. Without it the best: the first of RoCE v2 with
    /// an IPv4 address, else v2 with a global IPv6 address, else v2 with a link-local one, else v1; on InfiniBand 0.
    rdma_gid_index: u8, Number<u8>, optional, "0 to 255, an entry of the port's GID table that is not empty",
        Some, ["RDMA_GID_INDEX"];
    /// The entry of the port's partition key table that queue pairs are in.
    rdma_qp_pkey_index: u16, Number<u16>, default("0"), "0 to 65535, an entry of the port's P_Key table that is not empty",
        Some, ["RDMA_QP_PKEY_INDEX", "RDMA_PKEY"];
    /// Work requests that each queue of a queue pair has room for, of which a power of two is used, at least 2. The default gives
    /// way to a device that has less.
    rdma_qp_queue_depth: u32, Number<u32>, default("1024"), "1 to 2147483647, at most the device's max_qp_wr",
        |depth| (1..=i32::MAX as u32).contains(&depth).then_some(depth), ["RDMA_QP_QUEUE_DEPTH", "RDMA_QUEUE_DEPTH"];
    /// How long a queue pair waits for an acknowledgement before it sends again: 4.096 us x 2^n; 0 is for ever.
    rdma_qp_timeout: u8, Number<u8>, default("14"), "0 to 31", |n| (n <= 31).then_some(n),
        ["RDMA_QP_TIMEOUT", "RDMA_TIMEOUT"];
    /// How often a queue pair sends again without an acknowledgement before it fails; on soft-RoCE 7 is for ever.
    rdma_qp_retry_count: u8, Number<u8>, default("7"), "0 to 7", |count| (count <= 7).then_some(count),
        ["RDMA_QP_RETRY_COUNT", "RDMA_RETRY_CNT"];
    /// How often a queue pair tries again where the peer has posted no receive; 7 is for ever.
    rdma_qp_rnr_retry: u8, Number<u8>, default("6"), "0 to 7", |count| (count <= 7).then_some(count),
        ["RDMA_QP_RNR_RETRY"];
    /// How long a peer that has posted no receive has this side wait, as a code: 0 is 655.36 ms, 1 to 31 are 0.01 ms to 491.52 ms
    /// (InfiniBand Architecture Specification, chapter 9.7.5.2.8); 22 is 20.48 ms.
    rdma_qp_min_rnr_timer: u8, Number<u8>, default("22"), "0 to 31", |code| (code <= 31).then_some(code),
        ["RDMA_QP_MIN_RNR_TIMER"];
    /// Queue pairs to each peer that large tensors are striped over. Between two members the smaller number counts.
    rdma_qps_per_peer: u8, Number<u8>, default("1"), "1 to 16", |count| (1..=16).contains(&count).then_some(count),
        ["RDMA_QPS_PER_PEER"];
    /// Whether the bus may reorder what peers write to the pool, which is faster for large tensors on some hosts. Devices
    /// and libraries that don't know it ignore it.
    rdma_relaxed_ordering: bool, Bool, default("false"), "true or false", Some, ["RDMA_RELAXED_ORDERING"];
    /// Ranges of memory outside the pool that are kept registered, so that tensors there are sent from where they lie; with 0
    /// they are copied through the pool.
    rdma_registrations: u32, Number<u32>, default("1024"), "0 to 65536", |count| (count <= 1 << 16).then_some(count);
    /// Bytes of all of these ranges together.
    rdma_registered_bytes: u64, ByteSize, default("1GiB"),
        "0 to 16TiB: a number of bytes, or one with KiB, MiB, GiB or TiB", |bytes| (bytes <= 16 << 40).then_some(bytes);
    /// The service level of queue pairs.
    rdma_qp_sl: u8, Number<u8>, default("0"), "0 to 7", |level| (level <= 7).then_some(level),
        ["RDMA_QP_SL", "RDMA_SL"];
    /// The largest packet's payload in bytes; without it the port's active MTU. Between two members it is the smaller one's.
    rdma_qp_mtu: u32, Number<u32>, optional, "256, 512, 1024, 2048 or 4096, at most the port's active MTU",
        |bytes| [256, 512, 1024, 2048, 4096].contains(&bytes).then_some(bytes), ["RDMA_QP_MTU", "RDMA_MTU"];
    /// The traffic class of packets with a global header, as all of RoCE have: its upper six bits are the DSCP.
    rdma_traffic_class: u8, Number<u8>, default("0"), "0 to 255", Some, ["RDMA_TRAFFIC_CLASS"];
}
