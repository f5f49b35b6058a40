//! The table of all settings. A new setting is one row here, and one row of good and bad values in
//! the tests, which fail without it.
//!
//! A row has: the meaning; the name; the type; the format; `required`, `optional`, `auto` or
//! `default(text)`; the allowed values in words; a check of them, which may round the value; and
//! further variables that set it.

use super::builder::{Builder, RawSettings};
use super::choice::{BulkReceive, MemoryWindows, PeerLoss};
use super::error::{ConfigError, Origin};
use super::format::{
    AutoOr, AutoOrFabrics, Bool, ByteSize, CpuList, DurationText, FilePath, Format, InvalidToml,
    InvalidValue, JobName, Number, OneOf, RdmaDeviceNames, SocketAddress,
};
use super::meeting::{MAX_SIZE, StoreAddress};
use super::profile::Profile;
use crate::bootstrap::AuthMode;
use crate::engine::{PollMode, WaitStrategy};
use crate::fabric::FabricSet;
use crate::memory::{LockPolicy, PagePolicy};
use crate::wire::{Cluster, TaskId};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::ops::Deref;
use std::path::PathBuf;
use std::time::Duration;
use toml::de::DeValue;

/// A key, as the readers of the sources use it.
pub(super) struct Key {
    pub name: &'static str,
    pub meaning: &'static [&'static str],
    pub kind: &'static str,
    pub default: Option<&'static str>,
    pub required: bool,
    /// Variables that set this key besides its own.
    pub also: &'static [&'static str],
    pub allowed: &'static str,
    /// Checks that the key allows the text.
    pub check: fn(&str) -> Result<(), InvalidValue>,
    /// The text form of a TOML value.
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

/// The prefix of this crate's variables.
pub(super) const PREFIX: &str = "TENSORWIRE_";

/// The environment variable that sets the key with this name.
pub(super) fn variable(key: &str) -> String {
    format!("{PREFIX}{}", key.to_ascii_uppercase())
}

/// Every environment variable that sets a key, in the order of the reference.
pub fn setting_variables() -> impl Iterator<Item = String> {
    KEYS.iter().flat_map(Key::variables)
}

/// The type that the reader of a key returns.
macro_rules! value {
    (auto $type:ty) => { Option<$type> };
    ($_flavour:ident $type:ty) => { $type };
}

macro_rules! field {
    (optional $type:ty) => { Option<$type> };
    ($flavour:ident $type:ty) => { value!($flavour $type) };
}

/// The type of a setter's argument.
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
        "Required, unless a launcher or a store supplies it."
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
        $name:ident: $type:ty, $format:ty, $flavour:ident $(($default:literal))?, $allowed:literal,
            $accept:expr $(, $also:expr)?;
    )+) => {
        /// The values of all settings, read through [`Config`].
        ///
        /// ```
        /// use tensorwire::{BulkReceive, Config, LockPolicy, PagePolicy, PeerLoss, PollMode};
        /// let settings = Config::builder().without_environment().member("worker", 0);
        /// let settings = settings.set("cluster", "worker=127.0.0.1:7000").set("poll", "adaptive");
        /// let config = settings
        ///     .bulk_receive(BulkReceive::Borrow)
        ///     .pool_lock(LockPolicy::No)
        ///     .pool_pages(PagePolicy::Plain)
        ///     .peer_loss(PeerLoss::FailAll)
        ///     .build()?;
        /// assert_eq!((config.poll, config.wait), (Some(PollMode::Adaptive), None));
        /// assert_eq!(config.bulk_receive, BulkReceive::Borrow);
        /// # Ok::<(), Box<dyn std::error::Error>>(())
        /// ```
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
            /// Every key with the text of its value, in the order in which `tensorwire config`
            /// prints them; `None` for one that is not set and has no default.
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
///
/// ```
/// use tensorwire::Config;
/// let settings = Config::builder().without_environment().member("worker", 0);
/// let settings = settings.set("cluster", "worker=127.0.0.1:7000").set("pool_size", "16MiB");
/// let config = settings.build()?;
/// assert_eq!(config.pool_size, 16 << 20);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    pub(super) values: ConfigValues,
    pub(super) task_id: TaskId,
    pub(super) origins: Origins,
}

impl Config {
    /// The origin of a key's value. [`Origin::Default`] also for a key that is not set, and for a
    /// name that is no key.
    pub fn origin(&self, key: &str) -> Origin {
        self.origins.0.get(key).cloned().unwrap_or(Origin::Default)
    }

    /// The keys that a source has set, each with the source.
    pub(crate) fn set_keys(&self) -> impl Iterator<Item = (&'static str, &Origin)> {
        let all = self.origins.0.iter().map(|(key, origin)| (*key, origin));
        all.filter(|(_, origin)| **origin != Origin::Default)
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

/// The origins of a [`Config`]'s values. Configurations with equal values are equal, whatever their
/// origins.
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
    /// All members of the cluster: each job with the addresses of its tasks' bootstrap services.
    cluster: Cluster, Cluster, required,
        "JOB=HOST:PORT,HOST:PORT;JOB=..., in a file also a table of arrays", Some;
    /// Where members meet that have no `cluster`: at a store, which task 0 serves at that address,
    /// or in a file that all have. Each publishes its address there. All are tasks of one job.
    /// Without it MASTER_ADDR and MASTER_PORT say where. Under torchrun, whose own store has that
    /// port, it is the next higher one.
    store: StoreAddress, StoreAddress, optional, "tcp://HOST:PORT or file:///PATH", Some;
    /// The number of members, which meet at `store`. Without it the launcher's variables say it.
    world_size: u32, Number<u32>, optional, "1 to 2048, with `cluster` the number of its members",
        |size| (1..=MAX_SIZE).contains(&size).then_some(size);
    /// The address on which this process's bootstrap service listens, instead of its address in
    /// `cluster`. Members that meet at `store` publish it; port 0 is any free port.
    bind: SocketAddr, SocketAddress, optional, "IP:PORT, with an IPv6 address in brackets", Some;
    /// How members prove who they are, the same on all of them. Tls: by certificates. Secret: by a
    /// shared secret. Uid: all run on this host as one user, and the kernel says whose a connection
    /// is. Plain: nothing is proven, and whoever reaches the port can be any member. Auto is tls if
    /// `tls_ca` is set, secret if `secret_file` is set, else uid.
    auth: AuthMode, AutoOr<AuthMode>, auto("auto"), "auto, tls, secret, uid or plain", Some;
    /// The file of the cluster's secret, of which only its owner may read it. `tensorwire auth
    /// secret` makes one.
    secret_file: PathBuf, FilePath, optional, "a path; the file has 32 bytes at least", Some;
    /// The file of the authorities that sign the members' certificates, in PEM form. They are for
    /// one cluster only. `tensorwire auth certificates` makes one.
    tls_ca: PathBuf, FilePath, optional, "a path, with `tls_certificate` and `tls_key`", Some;
    /// The file of this member's certificate, in PEM form. Its alternative name is
    /// `URI:tensorwire:JOB/INDEX`. At most four others may follow, of authorities in between.
    /// Changed files are read again within a second.
    tls_certificate: PathBuf, FilePath, optional, "a path, with `tls_ca` and `tls_key`", Some;
    /// The file of the certificate's private key, in PEM form, which only its owner may read.
    tls_key: PathBuf, FilePath, optional, "a path, with `tls_ca` and `tls_certificate`", Some;
    /// Whether this process may listen beyond the loopback interface although `auth` is uid or
    /// plain. With plain, every process that reaches the port can then join, read and write
    /// tensors.
    allow_non_loopback: bool, Bool, default("false"), "true or false", Some;
    /// How long `Node::join` waits for the other members.
    join_timeout: Duration, DurationText, default("60s"), "1ms to 24h", up_to_a_day;
    /// Time between two heartbeats to each peer.
    heartbeat_interval: Duration, DurationText, default("1s"), "1ms to 24h, at most half of \
        `silence_bound`", up_to_a_day;
    /// Silence after which a peer counts as dead.
    silence_bound: Duration, DurationText, default("5s"), "1ms to 24h, at least twice \
        `heartbeat_interval`", up_to_a_day;

    /// The profile: settings for a kind of host, below those of every other source. `tensorwire
    /// config --profile NAME` prints one.
    profile: Profile, OneOf<Profile>, optional, "low-latency, throughput, shared-host or few-cores", Some;

    /// Size of the pool from which tensors are allocated. It is rounded up to whole pages of the
    /// kind that the pool gets: 4 KiB, 2 MiB or 1 GiB.
    pool_size: u64, ByteSize, default("256MiB"),
        "1MiB to 16TiB: a number of bytes, or one with KiB, MiB, GiB or TiB",
        |bytes| (1 << 20..=16 << 40).contains(&bytes).then(|| bytes.next_multiple_of(PAGE));
    /// The kind of pages of the pool.
    pool_pages: PagePolicy, OneOf<PagePolicy>, default("auto"), "auto, 1g, 2m, transparent or plain", Some;
    /// Whether the start fails without the pages that `pool_pages` names. Then `pool_pages` may not
    /// be auto.
    pool_require: bool, Bool, default("false"), "true or false", Some;
    /// Whether the pool is locked in memory, so that it is not swapped out.
    pool_lock: LockPolicy, OneOf<LockPolicy>, default("best_effort"), "best_effort, require or no", Some;
    /// The NUMA node of the pool's memory. Without it, over verbs, the RDMA device's node is
    /// preferred; else the system chooses.
    numa_node: u32, Number<u32>, optional, "0 to 1023", |node| (node <= 1023).then_some(node);

    /// The fabrics that may reach the peers: shared memory on one host, RDMA verbs, TCP. Each peer
    /// is reached by the fastest that both sides can use. Auto may use all of them. A fabric that
    /// is named must work: without it the start fails, and a peer that it does not reach is an
    /// error. `grpc` stands for no fabric: each tensor is asked for by a call over gRPC, which is
    /// slow. All members must name it, and it is never chosen otherwise.
    fabric: FabricSet, AutoOrFabrics, auto("auto"),
        "auto, or shm, verbs, tcp or several of them: shm,tcp; or grpc", Some;
    /// The threads that poll. Inline: the calling threads. Adaptive: the calling threads and a
    /// background thread, which sleep while idle. Dedicated: a background thread that never sleeps.
    /// Auto is adaptive.
    poll: PollMode, AutoOr<PollMode>, auto("auto"), "auto, inline, adaptive or dedicated", Some;
    /// The number of pollers, which share the peers. Without it there are as many as `cores` names,
    /// else one. More than one needs the adaptive or the dedicated mode.
    pollers: u32, Number<u32>, optional, "1 to 64", |count| (1..=64).contains(&count).then_some(count);
    /// How a waiting call uses its CPU between two polls. Spin polls again at once and makes no
    /// system call. Yield first gives the CPU to other threads. Auto is spin if the host has a CPU
    /// for each member, else yield. With `cores` auto is yield, as another member may be pinned to
    /// the same CPU: set spin where each member has its own. Spin or yield turns `poll` = auto into
    /// inline. In the adaptive mode it must be auto, and a call spins for `spin_budget` at most.
    wait: WaitStrategy, AutoOr<WaitStrategy>, auto("auto"), "auto, spin or yield", Some;
    /// How long a thread polls before it sleeps, in the adaptive mode.
    spin_budget: Duration, DurationText, default("20us"), "0s to 1s",
        |span| (span <= Duration::from_secs(1)).then_some(span);
    /// The CPUs to which polling threads are pinned, one for each. Without it they are not pinned.
    /// In the inline and auto modes it is one CPU, for the thread that starts the node and for the
    /// background thread.
    cores: Vec<usize>, CpuList, optional,
        "CPU numbers from 0 to 1023, each once, and ranges of them: 0,2-3", Some;

    /// Operations that can be outstanding on each link over shared memory. On verbs
    /// `rdma_qp_queue_depth` sets it.
    queue_depth: u32, Number<u32>, default("256"), "a power of two from 16 to 65536",
        |depth| ((16..=65536).contains(&depth) && depth.is_power_of_two()).then_some(depth);
    /// The largest tensor that is sent inside its message. The bytes of a larger one are written,
    /// or on shared memory lent to the receiver. Over TCP, tensors of up to 32 KiB go inside their
    /// message in any case, as long as few of them wait for their receives.
    small_tensor_bytes: u32, Number<u32>, default("128"), "0 to 160", |bytes| (bytes <= 160).then_some(bytes);
    /// How a large tensor comes from a sender on the same host to a receive without destination.
    /// Copy copies it into this process's pool. Borrow reads the sender's memory, at a cost that
    /// does not depend on the size. A copied tensor does not depend on the sender's life, and keeps
    /// no buffer of the sender. Borrow suits tensors that are large, read once and dropped soon. A
    /// receive into a given tensor always copies.
    bulk_receive: BulkReceive, OneOf<BulkReceive>, default("copy"), "copy or borrow", Some;
    /// Data validation: whether the checksum of each received tensor is compared with the sender's.
    /// A difference is an error. It costs both sides one pass over the bytes. The peer need not set
    /// it.
    validate: bool, Bool, default("false"), "true or false", Some;
    /// Bytes of the pool that peers can borrow at a time. Tensors beyond the limit are copied.
    /// Without it the limit is half of the pool, so that the other half stays available to this
    /// process.
    max_lent_bytes: u64, ByteSize, optional,
        "0 to 16TiB: a number of bytes, or one with KiB, MiB, GiB or \
         TiB", |bytes| (bytes <= 16 << 40).then_some(bytes);
    /// How long a peer may hold a loan before it counts as overdue (`loans_overdue`). After a
    /// peer's death, tensors borrowed from it are copied out of its memory after this time. The
    /// rest of that memory goes back to the system.
    borrow_grace: Duration, DurationText, default("5s"), "1ms to 24h", up_to_a_day;
    /// Receives that can be outstanding with each peer. One more fails when it begins. Receives of
    /// a batch do not count.
    max_requests: u32, Number<u32>, default("4096"), "1 to 1048575",
        |count| (1..1 << 20).contains(&count).then_some(count);
    /// Sent tensors that can wait here: for credit of their receiver, or, over verbs and TCP, until
    /// they are written. One more send fails at once; `Step::send_within` waits for room.
    max_outstanding_sends: u32, Number<u32>, default("1048576"), "1 to 16777216",
        |count| (1..=1 << 24).contains(&count).then_some(count);
    /// How long a receive waits if its caller gives no timeout.
    recv_timeout: Duration, DurationText, default("60s"), "1ms to 24h", up_to_a_day;
    /// A call that waits for longer is logged, once, with the peer that it waits for and why. Not
    /// looked for are receives on edges within the process: `Node::waits` has them.
    hung_after: Duration, DurationText, default("30s"), "1ms to 24h", up_to_a_day;
    /// Whether each link that comes up is told on standard error too: the peer, the fabric, and why
    /// it is this one. The log has the same line. `tensorwire launch --paths` sets it.
    print_paths: bool, Bool, default("false"), "true or false", Some;
    /// How long `Step::try_recv` waits for a tensor that its sender offers over verbs or TCP, and
    /// writes then. Over gRPC calls, how long it waits for the answer.
    cancel_grace: Duration, DurationText, default("100ms"), "0s to 24h", |span| (span <= DAY).then_some(span);
    /// How long a stop serves pending sends before it aborts them.
    stop_timeout: Duration, DurationText, default("2s"), "0s to 24h", |span| (span <= DAY).then_some(span);
    /// The effect of a peer's loss on calls that do not need the peer: none, or they fail too. A
    /// peer that stopped cleanly never makes them fail.
    peer_loss: PeerLoss, OneOf<PeerLoss>, default("fail_calls"), "fail_calls or fail_all", Some;

    /// Connections to each peer over TCP for tensors of more than 64 KiB, over which they are
    /// striped. One more carries everything else. Two members use the smaller number.
    tcp_streams: u8, Number<u8>, default("1"), "1 to 15", |count| (1..=15).contains(&count).then_some(count);
    /// The `SO_BUSY_POLL` of the sockets; 0s for none. With any other value Linux looks at the NIC
    /// once in each read of an empty socket, as reads do not block. Without CAP_NET_ADMIN it may be
    /// `net.core.busy_read` at most, or it is left out. The log warns of that once, unless it is
    /// the default.
    tcp_busy_poll: Duration, DurationText, default("50us"), "0s to 1s",
        |span| (span <= Duration::from_secs(1)).then_some(span);
    /// How long a network outage may last before a link over TCP ends. Half of it is for the
    /// connections to notice, and half for new ones.
    tcp_user_timeout: Duration, DurationText, default("10s"), "1s to 1h",
        |span| (Duration::from_secs(1)..=Duration::from_secs(3600)).contains(&span).then_some(span);

    /// The RDMA device, or several: `auto` stands for all with an active port, at most four. A link
    /// has a rail for each pair of devices that both members have. Those at the same place of both
    /// lists make a pair. With `auto` the place is that among all devices. Large tensors are
    /// striped over all rails. The rest goes over the one whose devices are near to the CPUs in
    /// `cores`, or on `numa_node`. Without it the only device with an active port.
    rdma_device: String, RdmaDeviceNames, optional,
        "the name of a device, as `tensorwire devices` lists them, 2 to 4 names with commas between them, \
         or auto", Some, ["RDMA_DEVICE"];
    /// The port of each device in `rdma_device`. Without it the first active port.
    rdma_device_port: u8, Number<u8>, optional, "1 to 255, only with `rdma_device`",
        |port| (port >= 1).then_some(port), ["RDMA_DEVICE_PORT"];
    /// The entry of the port's GID table that is this process's address. Without it the first entry
    /// of RoCE v2 with an IPv4 address, else v2 with a global IPv6 address. Entries of v2 with a
    /// link-local address, then of v1, come last. On InfiniBand 0.
    rdma_gid_index: u8, Number<u8>, optional, "0 to 255, an entry of the port's GID table that is not empty",
        Some, ["RDMA_GID_INDEX"];
    /// The entry of the port's P_Key table for queue pairs.
    rdma_qp_pkey_index: u16, Number<u16>, default("0"), "0 to 65535, an entry of the port's P_Key table \
        that is not empty",
        Some, ["RDMA_QP_PKEY_INDEX", "RDMA_PKEY"];
    /// Operations that can be outstanding on each queue pair. Send queues hold four more requests,
    /// so at the device's limit it is four less. The default is lowered to the device's limit.
    /// Two members use the smaller number.
    rdma_qp_queue_depth: u32, Number<u32>, default("1024"), "1 to 2147483647, at most the device's max_qp_wr",
        |depth| (1..=i32::MAX as u32).contains(&depth).then_some(depth),
        ["RDMA_QP_QUEUE_DEPTH", "RDMA_QUEUE_DEPTH"];
    /// How long a queue pair waits for an acknowledgement before it sends again: 4.096 us x 2^n. 0
    /// waits for ever.
    rdma_qp_timeout: u8, Number<u8>, default("14"), "0 to 31", |n| (n <= 31).then_some(n),
        ["RDMA_QP_TIMEOUT", "RDMA_TIMEOUT"];
    /// How often a queue pair sends again without an acknowledgement before it fails. On soft-RoCE
    /// 7 is for ever.
    rdma_qp_retry_count: u8, Number<u8>, default("7"), "0 to 7", |count| (count <= 7).then_some(count),
        ["RDMA_QP_RETRY_COUNT", "RDMA_RETRY_CNT"];
    /// How often a queue pair tries again if the peer has posted no receive. 7 is for ever.
    rdma_qp_rnr_retry: u8, Number<u8>, default("6"), "0 to 7", |count| (count <= 7).then_some(count),
        ["RDMA_QP_RNR_RETRY"];
    /// The wait that a receiver without posted receive asks of the sender, as a code. 0 is 655.36
    /// ms, 1 to 31 are 0.01 ms to 491.52 ms, and 22 is 20.48 ms. InfiniBand Architecture
    /// Specification, chapter 9.7.5.2.8, has the codes.
    rdma_qp_min_rnr_timer: u8, Number<u8>, default("22"), "0 to 31", |code| (code <= 31).then_some(code),
        ["RDMA_QP_MIN_RNR_TIMER"];
    /// Queue pairs to each peer on each device, over which large tensors are striped. Two members
    /// use the smaller number, and one if `rdma_memory_windows` is on. All devices together have 16
    /// at most.
    rdma_qps_per_peer: u8, Number<u8>, default("1"), "1 to \
        16", |count| (1..=16).contains(&count).then_some(count),
        ["RDMA_QPS_PER_PEER"];
    /// Whether the bus may reorder peers' writes to the pool. It is faster for large tensors on
    /// some hosts. Devices and libraries without support ignore it.
    rdma_relaxed_ordering: bool, Bool, default("false"), "true or false", Some, ["RDMA_RELAXED_ORDERING"];
    /// Whether a memory window of type 2 gives each grant a key of its own. A peer then reaches
    /// only the bytes that it was granted, until the grant is revoked. Each grant and each
    /// revocation is one more request of the link's queue pair, and a revocation waits for what was
    /// sent before it. A link has one queue pair for data, whatever `rdma_qps_per_peer` and
    /// `rdma_device` say. A device without such windows is refused. Each member protects its own
    /// pool: the others may have another value.
    rdma_memory_windows: MemoryWindows, OneOf<MemoryWindows>, default("off"), "off or on", Some;
    /// Ranges of memory outside the pool that stay registered, so that their tensors are sent
    /// without a copy. With 0 they are copied through the pool.
    rdma_registrations: u32, Number<u32>, default("1024"), "0 to \
        65536", |count| (count <= 1 << 16).then_some(count);
    /// Bytes of all ranges in `rdma_registrations` together.
    rdma_registered_bytes: u64, ByteSize, default("1GiB"),
        "0 to 16TiB: a number of bytes, or one with KiB, MiB, GiB or \
         TiB", |bytes| (bytes <= 16 << 40).then_some(bytes);
    /// The service level of queue pairs.
    rdma_qp_sl: u8, Number<u8>, default("0"), "0 to 7", |level| (level <= 7).then_some(level),
        ["RDMA_QP_SL", "RDMA_SL"];
    /// The largest packet's payload in bytes. Without it the port's active MTU. Two members use the
    /// smaller one.
    rdma_qp_mtu: u32, Number<u32>, optional, "256, 512, 1024, 2048 or 4096, at most the port's active MTU",
        |bytes| [256, 512, 1024, 2048, 4096].contains(&bytes).then_some(bytes), ["RDMA_QP_MTU", "RDMA_MTU"];
    /// The traffic class of packets with a global header, which all RoCE packets have. The upper
    /// six bits are the DSCP.
    rdma_traffic_class: u8, Number<u8>, default("0"), "0 to 255", Some, ["RDMA_TRAFFIC_CLASS"];
}
