//! Settings with a few named values.

/// A setting with a few named values.
pub(super) trait Choice: Copy + PartialEq + 'static {
    /// Every value with its name.
    const NAMES: &'static [(&'static str, Self)];
    /// Names that are planned but not in this build.
    const PLANNED: &'static [&'static str];
}

macro_rules! choices {
    ($(
        $(#[$doc:meta])* $type:ident { $($(#[$value_doc:meta])* $value:ident = $name:literal),+ $(,)? }
        planned [$($planned:literal),*]
    )+) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum $type {
            $(#[doc = concat!("`", $name, "`: ")] $(#[$value_doc])* $value,)+
        }

        impl Choice for $type {
            const NAMES: &'static [(&'static str, Self)] = &[$(($name, $type::$value)),+];
            const PLANNED: &'static [&'static str] = &[$($planned),*];
        }
    )+};
}

choices! {
    /// The pages that the pool is made of.
    PoolPages {
        /// the largest kind that the machine gives.
        Auto = "auto",
        /// hugetlb pages of 1 GiB.
        Huge1G = "1g",
        /// hugetlb pages of 2 MiB.
        Huge2M = "2m",
        /// transparent huge pages.
        Transparent = "transparent",
        /// pages of the machine's base size.
        Plain = "plain",
    } planned []

    /// Whether the pool is locked in memory.
    PoolLock {
        /// as far as the memlock limit lets it.
        BestEffort = "best_effort",
        /// wholly, or the start fails.
        Require = "require",
        /// not at all.
        No = "no",
    } planned []

    /// The fabric that reaches the peers.
    Fabric {
        /// the best that this build has for each peer.
        Auto = "auto",
        /// shared memory between processes of one host.
        Shm = "shm",
        /// RDMA NICs through libibverbs, between processes of one host too.
        Verbs = "verbs",
    } planned ["tcp"]

    /// Who drives progress.
    Poll {
        /// inline where all members of this host together have no more spinning threads than it has CPUs, else adaptive.
        Auto = "auto",
        /// the calls themselves; there is no polling thread.
        Inline = "inline",
        /// the calls themselves, and a thread while there are none; whoever finds nothing to do sleeps.
        Adaptive = "adaptive",
        /// a thread that never sleeps.
        Dedicated = "dedicated",
    } planned []

    /// What a waiting call does with its CPU.
    Wait {
        /// spin where every member has a CPU of its own, yield elsewhere.
        Auto = "auto",
        /// spin: lowest latency, one busy CPU.
        Spin = "spin",
        /// give the CPU to others between polls.
        Yield = "yield",
    } planned []

    /// How a bulk tensor gets from a sender on the same host to its receiver.
    BulkReceive {
        /// copied once into the receiver's pool.
        Copy = "copy",
        /// not copied: the receiver reads it where the sender made it.
        Borrow = "borrow",
    } planned []

    /// What the loss of a peer does.
    PeerLoss {
        /// calls that need that peer fail; others go on.
        FailCalls = "fail_calls",
        /// every pending call fails.
        FailAll = "fail_all",
    } planned []
}
