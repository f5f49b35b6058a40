//! Counters with one writer and any number of readers.

use crossbeam_utils::CachePadded;
use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::ops::AddAssign;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! figures {
    ($(#[$type_doc:meta])+ $type:ident { $($(#[doc = $doc:literal])+ $figure:ident = $name:literal,)+ }) => {
        $(#[$type_doc])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum $type {
            $($(#[doc = $doc])+ $figure,)+
        }

        impl $type {
            /// All of them, in the order of the reference.
            pub const ALL: &[$type] = &[$($type::$figure),+];

            /// The name in tables and metrics.
            pub const fn name(self) -> &'static str {
                match self {
                    $($type::$figure => $name,)+
                }
            }

            /// The meaning, as in the reference.
            fn meaning(self) -> &'static str {
                match self {
                    $($type::$figure => concat!($($doc),+),)+
                }
            }
        }
    };
}

figures! {
    /// What is counted. Each counter only grows.
    ///
    /// ```
    /// # let node = tensorwire::internals::doc_node();
    /// use tensorwire::Counter;
    /// println!("{} tensors were sent", node.counters().get(Counter::TensorsSent));
    /// ```
    Counter {
        /// Tensors given to a peer, dead ones included.
        TensorsSent = "tensors_sent",
        /// Tensors that came from a peer, dead ones included.
        TensorsReceived = "tensors_received",
        /// Bytes of the tensors given to peers.
        BytesSent = "bytes_sent",
        /// Bytes of the tensors that came from peers.
        BytesReceived = "bytes_received",
        /// Control messages posted. A message in several control slots counts once.
        MessagesSent = "messages_sent",
        /// Control messages received, counted as `messages_sent` counts them.
        MessagesReceived = "messages_received",
        /// Posted control messages that shared a control slot with others.
        MessagesPacked = "messages_packed",
        /// Control slots that carried several messages.
        PacksSent = "packs_sent",
        /// Calls with several sends or receives.
        Batches = "batches",
        /// Values that waited at the sender: their edge had no credit, or was not announced yet.
        SendsWaited = "sends_waited",
        /// Posts that waited in the send queue of their link: the peer had no room for them.
        PostsQueued = "posts_queued",
        /// Announcements of edges to their senders.
        EdgesAnnounced = "edges_announced",
        /// Numbers of idle edges given back to their senders.
        EdgesRetired = "edges_retired",
        /// Credits of edges: more values may be sent, or so many were taken. A message may hold
        /// 64.
        EdgeCreditsSent = "edge_credits_sent",
        /// Values that receives needed from senders without credit.
        NeedsSent = "needs_sent",
        /// Messages that told a peer which steps have ended. One message tells of consecutive
        /// steps.
        StepsOverSent = "steps_over_sent",
        /// Values that the end of a peer or of its link may have lost. Some had left for the peer,
        /// and their credit had not come back; up to half a window too many of each edge are
        /// counted. Others had come from the peer, and no receive took them before its next life
        /// was linked.
        ValuesLost = "values_lost",
        /// Doorbells: of a device for new requests, or of a sleeping peer for new messages.
        Doorbells = "doorbells",
        /// Repaired links: connections broke and were made again, and what was lost with them was
        /// sent again.
        LinksRepaired = "links_repaired",
        /// One-sided writes posted, and on shared memory tensors that the receiver copies.
        WritesPosted = "writes_posted",
        /// Loans: tensors that the peer may read from this process's memory and keep.
        LoansPosted = "loans_posted",
        /// Values copied instead of lent, because a limit on loans was reached.
        LoansRefused = "loans_refused",
        /// Loans that their borrower held for longer than `borrow_grace`.
        LoansOverdue = "loans_overdue",
        /// Tensors borrowed from peers that died, and copied out of the dead process's memory.
        TensorsRelocated = "tensors_relocated",
        /// Bytes of the relocated tensors.
        BytesRelocated = "bytes_relocated",
        /// Failed relocations. The process tries again.
        RelocationFailures = "relocation_failures",
        /// Immediates that arrived behind a write of the peer.
        ImmediatesReceived = "immediates_received",
        /// Messages with meta-data that are new to the link.
        MetasSent = "metas_sent",
        /// Tensors sent inside their record: those up to `small_tensor_bytes`, and over TCP those
        /// sent eagerly.
        SmallTensorsSent = "small_tensors_sent",
        /// Tensors copied through the pool, because their memory or their destination is outside of
        /// it.
        TensorsStaged = "tensors_staged",
        /// Bytes of the staged tensors.
        BytesStaged = "bytes_staged",
        /// Tensors outside the pool whose memory was already registered.
        RegistrationsFound = "registrations_found",
        /// Registrations of memory outside the pool.
        RegistrationsMade = "registrations_made",
        /// Registrations that were ended: evicted, their memory was freed or its pages replaced, or
        /// another thread had made the same one.
        RegistrationsEnded = "registrations_ended",
        /// Registrations that failed or were over a limit. Their tensors were staged.
        RegistrationsRefused = "registrations_refused",
        /// Messages or writes that returned credits to a peer.
        CreditsPublished = "credits_published",
        /// Receives that failed because the pool had no room for their tensor.
        PoolExhausted = "pool_exhausted",
        /// Errors sent to a peer. An abort is told once, not for each receive.
        ErrorsSent = "errors_sent",
        /// Errors received from a peer, counted as `errors_sent` counts them.
        ErrorsReceived = "errors_received",
        /// Values whose checksum was compared with the sender's.
        ChecksumsVerified = "checksums_verified",
        /// Values with another checksum. They are not delivered.
        ChecksumMismatches = "checksum_mismatches",
        /// Peers that were lost.
        PeersLost = "peers_lost",
        /// Rails that a link has lost and gone on without.
        RailsLost = "rails_lost",
        /// Rounds of the poll loop.
        Polls = "polls",
        /// Rounds of the poll loop without an event.
        IdlePolls = "idle_polls",
    }
}

const COUNT: usize = Counter::ALL.len();

figures! {
    /// A present amount. It grows and shrinks.
    ///
    /// ```
    /// # let node = tensorwire::internals::doc_node();
    /// use tensorwire::Gauge;
    /// println!("{} bytes are lent to peers", node.counters().gauge(Gauge::LentBytes));
    /// ```
    Gauge {
        /// Tensors lent to peers, also over links that have ended. Of each link, one may have come
        /// back since the last poll.
        LoansOut = "loans_out",
        /// Bytes lent to peers. A tensor that is lent twice counts twice.
        LentBytes = "lent_bytes",
        /// Bytes of destinations that peers may write to. Their memory stays used until the tensor
        /// has landed, the peer has released it or the link has ended.
        GrantedBytes = "granted_bytes",
        /// Bytes of memory outside the pool that are registered with the device. They are pinned.
        RegisteredBytes = "registered_bytes",
    }
}

const GAUGES: usize = Gauge::ALL.len();

/// The counters of one poller, for readers. Written only through its [`CountersWriter`].
///
/// All counters of a poller have the same writer, so they share cache lines. Padding keeps other
/// pollers' counters off these lines.
pub struct Counters {
    pub(super) values: CachePadded<[AtomicU64; COUNT]>,
    gauges: CachePadded<[AtomicU64; GAUGES]>,
}

/// The one writer of a poller's [`Counters`].
///
/// An increment is a plain load and a plain store: two concurrent writers would lose updates. So
/// there is exactly one writer (it is not `Clone`). It can move to another thread (`Send`), and two
/// threads can't share it (not `Sync`):
///
/// ```
/// fn moved<T: Send>(_: T) {}
/// moved(tensorwire::internals::telemetry::CountersWriter::new());
/// ```
/// ```compile_fail,E0277
/// fn shared<T: Sync>(_: T) {}
/// shared(tensorwire::internals::telemetry::CountersWriter::new());
/// ```
///
/// A lock that passes the poller to another thread also orders the last store of one writer before
/// the first load of the next.
pub struct CountersWriter {
    counters: Arc<Counters>,
    /// Not `Sync`: see above.
    not_shared: PhantomData<Cell<()>>,
}

impl CountersWriter {
    /// New counters, all 0.
    pub fn new() -> Self {
        CountersWriter { counters: Arc::new(Counters::new()), not_shared: PhantomData }
    }

    /// The same counters, for readers on any thread.
    pub fn counters(&self) -> Arc<Counters> {
        Arc::clone(&self.counters)
    }

    /// Counts `amount`; after 2^64-1 it starts again at 0.
    #[inline]
    pub fn add(&self, counter: Counter, amount: u64) {
        self.add_all([(counter, amount)]);
    }

    /// As [`CountersWriter::add`], for several counters.
    #[inline]
    pub fn add_all<const N: usize>(&self, amounts: [(Counter, u64); N]) {
        let values = &self.counters.values;
        for (counter, amount) in amounts {
            let value = &values[counter as usize];
            // Relaxed: a counter publishes nothing but itself. Not `fetch_add`: there is no other
            // writer, and a locked instruction costs some 20 cycles and holds back the loads behind
            // it.
            value.store(value.load(Ordering::Relaxed).wrapping_add(amount), Ordering::Relaxed);
        }
    }

    /// Adds to a gauge.
    #[inline]
    pub fn raise(&self, gauge: Gauge, amount: u64) {
        let value = &self.counters.gauges[gauge as usize];
        value.store(value.load(Ordering::Relaxed).wrapping_add(amount), Ordering::Relaxed);
    }

    /// Subtracts from a gauge.
    #[inline]
    pub fn lower(&self, gauge: Gauge, amount: u64) {
        self.raise(gauge, amount.wrapping_neg());
    }

    /// Counts one.
    #[inline]
    pub fn increment(&self, counter: Counter) {
        self.add(counter, 1);
    }
}

impl Default for CountersWriter {
    fn default() -> Self {
        CountersWriter::new()
    }
}

impl Counters {
    pub(super) fn new() -> Self {
        let values = CachePadded::new([const { AtomicU64::new(0) }; COUNT]);
        let gauges = CachePadded::new([const { AtomicU64::new(0) }; GAUGES]);
        Counters { values, gauges }
    }

    /// The value of one counter now.
    pub fn get(&self, counter: Counter) -> u64 {
        self.values[counter as usize].load(Ordering::Relaxed)
    }

    /// The present value of a gauge.
    pub fn gauge(&self, gauge: Gauge) -> u64 {
        self.gauges[gauge as usize].load(Ordering::Relaxed)
    }

    /// All values, read one after the other while the poller runs. Each value is exact, and two
    /// values may be of slightly different times.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot {
            values: std::array::from_fn(|index| self.values[index].load(Ordering::Relaxed)),
            gauges: std::array::from_fn(|index| self.gauges[index].load(Ordering::Relaxed)),
        }
    }
}

/// The values of all counters and gauges at one time. `+=` adds the values of several pollers.
///
/// ```
/// # let node = tensorwire::internals::doc_node();
/// use tensorwire::Counter;
/// let before = node.counters();
/// node.progress()?;
/// let spent = node.counters().since(&before);
/// assert!(spent.iter().any(|(name, _)| name == Counter::ALL[0].name()));
/// # Ok::<(), tensorwire::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Snapshot {
    values: [u64; COUNT],
    gauges: [u64; GAUGES],
}

impl Snapshot {
    /// All 0, the start of a sum over pollers.
    pub const ZERO: Snapshot = Snapshot { values: [0; COUNT], gauges: [0; GAUGES] };

    /// The value of one counter.
    pub fn get(&self, counter: Counter) -> u64 {
        self.values[counter as usize]
    }

    /// The value of one gauge.
    pub fn gauge(&self, gauge: Gauge) -> u64 {
        self.gauges[gauge as usize]
    }

    /// Each name with its value: first all counters, then all gauges, in the order of
    /// [`Counter::ALL`] and [`Gauge::ALL`].
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        let counters = Counter::ALL.iter().map(|counter| (counter.name(), self.get(*counter)));
        counters.chain(Gauge::ALL.iter().map(|gauge| (gauge.name(), self.gauge(*gauge))))
    }

    /// Adds `amount` to a counter.
    pub(crate) fn add(&mut self, counter: Counter, amount: u64) {
        let value = &mut self.values[counter as usize];
        *value = value.wrapping_add(amount);
    }

    /// Adds `amount` to a gauge.
    pub(crate) fn raise(&mut self, gauge: Gauge, amount: u64) {
        let value = &mut self.gauges[gauge as usize];
        *value = value.wrapping_add(amount);
    }

    /// The difference to `earlier`, an earlier snapshot of the same counters. Gauges keep their
    /// values.
    #[must_use]
    pub fn since(&self, earlier: &Snapshot) -> Snapshot {
        let values = std::array::from_fn(|i| self.values[i].wrapping_sub(earlier.values[i]));
        Snapshot { values, gauges: self.gauges }
    }
}

/// Every counter and gauge with its meaning, as a Markdown page.
pub fn reference() -> String {
    let mut page = String::from(
        "# Counters\n\nGenerated from the code. `Node::counters()` returns all of them as a `Snapshot`. \
         A counter only grows.\nA gauge shows what there is now.\n",
    );
    let counters = Counter::ALL.iter().map(|counter| (counter.name(), counter.meaning()));
    table(&mut page, "counter", counters);
    table(&mut page, "gauge", Gauge::ALL.iter().map(|gauge| (gauge.name(), gauge.meaning())));
    page
}

fn table<'a>(page: &mut String, kind: &str, rows: impl Iterator<Item = (&'a str, &'a str)>) {
    *page += &format!("\n| {kind} | meaning |\n|---|---|\n");
    rows.for_each(|(name, meaning)| *page += &format!("| `{name}` | {} |\n", meaning.trim()));
}

impl AddAssign<&Snapshot> for Snapshot {
    fn add_assign(&mut self, other: &Snapshot) {
        for (value, other) in self.values.iter_mut().zip(other.values) {
            *value = value.wrapping_add(other);
        }
        for (value, other) in self.gauges.iter_mut().zip(other.gauges) {
            *value = value.wrapping_add(other);
        }
    }
}

impl fmt::Debug for Counters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.snapshot(), f)
    }
}

impl fmt::Debug for CountersWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.counters, f)
    }
}

/// Each name with its value.
impl fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut fields = f.debug_struct("Snapshot");
        for (name, value) in self.iter() {
            fields.field(name, &value);
        }
        fields.finish()
    }
}

/// A table with one counter in each line, values aligned to the right.
impl fmt::Display for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        let digits = |value: u64| value.checked_ilog10().map_or(1, |log| log as usize + 1);
        let values = self.iter().map(|(_, value)| digits(value)).max().unwrap_or(0);
        for (line, (name, value)) in self.iter().enumerate() {
            if line > 0 {
                f.write_str("\n")?;
            }
            write!(f, "{name:names$}  {value:>values$}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// A snapshot in which every counter has another value.
    fn distinct() -> (CountersWriter, Snapshot) {
        let writer = CountersWriter::new();
        for (n, counter) in Counter::ALL.iter().enumerate() {
            writer.add(*counter, n as u64 + 1);
        }
        let snapshot = writer.counters().snapshot();
        (writer, snapshot)
    }

    #[test]
    fn every_counter_counts_by_itself() {
        let (writer, snapshot) = distinct();
        for (n, counter) in Counter::ALL.iter().enumerate() {
            assert_eq!(*counter as usize, n, "the place in ALL is the place in the array");
            assert_eq!(snapshot.get(*counter), n as u64 + 1);
            writer.increment(*counter);
            assert_eq!(writer.counters().get(*counter), n as u64 + 2);
        }
    }

    #[test]
    fn names_are_unique_and_in_the_order_of_the_table() {
        let (_, snapshot) = distinct();
        let names: Vec<_> = snapshot.iter().map(|(name, _)| name).collect();
        assert_eq!(names.len(), Counter::ALL.len() + Gauge::ALL.len());
        assert_eq!((names[0], names[COUNT - 1], names[COUNT]), ("tensors_sent", "idle_polls", "loans_out"));
        assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len());
        assert!(snapshot.iter().map(|(_, value)| value).eq((1..=COUNT as u64).chain([0; GAUGES])));
    }

    #[test]
    fn snapshots_are_added_and_subtracted() {
        let (writer, before) = distinct();
        writer.add(Counter::BytesSent, 1 << 40);
        let after = writer.counters().snapshot();
        let between = after.since(&before);
        assert_eq!(between.get(Counter::BytesSent), 1 << 40);
        assert_eq!(between.iter().filter(|(_, value)| *value != 0).count(), 1);
        let mut sum = Snapshot::ZERO;
        sum += &before;
        sum += &between;
        assert_eq!(sum, after);
    }

    #[test]
    fn what_others_count_is_added() {
        let mut sum = Snapshot::ZERO;
        sum.add(Counter::LoansOverdue, 2);
        sum.add(Counter::LoansOverdue, 3);
        sum.raise(Gauge::LentBytes, 7);
        assert_eq!((sum.get(Counter::LoansOverdue), sum.gauge(Gauge::LentBytes)), (5, 7));
        assert_eq!(sum.iter().filter(|(_, value)| *value != 0).count(), 2);
    }

    #[test]
    fn a_counter_that_overflows_starts_again_at_zero() {
        let writer = CountersWriter::new();
        writer.add(Counter::Polls, u64::MAX);
        let before = writer.counters().snapshot();
        writer.add(Counter::Polls, 3);
        assert_eq!(writer.counters().get(Counter::Polls), 2);
        assert_eq!(writer.counters().snapshot().since(&before).get(Counter::Polls), 3);
    }

    #[test]
    fn a_gauge_shows_what_there_is_now() {
        let writer = CountersWriter::new();
        writer.raise(Gauge::LentBytes, 100);
        let before = writer.counters().snapshot();
        writer.raise(Gauge::LentBytes, 20);
        writer.lower(Gauge::LentBytes, 100);
        let after = writer.counters().snapshot();
        assert_eq!((before.gauge(Gauge::LentBytes), after.gauge(Gauge::LentBytes)), (100, 20));
        assert_eq!(after.since(&before).gauge(Gauge::LentBytes), 20, "not a difference");
        writer.lower(Gauge::LentBytes, 20);
        assert_eq!(writer.counters().gauge(Gauge::LentBytes), 0);
    }

    #[test]
    fn a_snapshot_in_debug_output_names_its_counters() {
        let (_writer, snapshot) = distinct();
        let shown = format!("{snapshot:?}");
        assert!(shown.starts_with("Snapshot { tensors_sent: 1, tensors_received: 2, "), "{shown}");
        assert!(snapshot.iter().all(|(name, value)| shown.contains(&format!("{name}: {value}"))), "{shown}");
    }

    #[test]
    fn a_snapshot_is_shown_as_a_table() {
        let writer = CountersWriter::new();
        writer.add(Counter::TensorsSent, 7);
        writer.add(Counter::BytesReceived, 1234);
        let table = writer.counters().snapshot().to_string();
        let lines: Vec<_> = table.lines().collect();
        assert_eq!(lines.len(), COUNT + GAUGES);
        for (name, value) in [("tensors_sent", 7), ("bytes_received", 1234), ("polls", 0)] {
            assert!(lines.contains(&format!("{name:21}  {value:>4}").as_str()), "{table}");
        }
    }

    #[test]
    fn a_reader_on_another_thread_sees_values_that_only_grow_up_to_the_last() {
        const LAST: u64 = 100_000;
        let writer = CountersWriter::new();
        let counters = writer.counters();
        let reader = std::thread::spawn(move || {
            let mut seen = 0;
            while seen < LAST {
                let now = counters.get(Counter::Polls);
                assert!(now >= seen && now <= LAST, "{seen} then {now}");
                seen = now;
                std::thread::yield_now();
            }
        });
        // The writer moves to a thread of its own: it is `Send`.
        let writing = std::thread::spawn(move || (0..LAST).for_each(|_| writer.increment(Counter::Polls)));
        writing.join().expect("writer");
        reader.join().expect("reader");
    }

    #[test]
    fn counters_of_two_pollers_share_no_cache_line() {
        assert!(align_of::<Counters>() >= 64);
        assert_eq!(size_of::<Counters>() % align_of::<Counters>(), 0);
    }
}
