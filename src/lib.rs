//! Moves tensors between the processes of a trainer, at the speed of the hardware.
//!
//! A trainer is a set of processes. Where its graph is cut between two of them, one *sends* a
//! tensor on an [`Edge`] and the other *receives* it, [`Step`] by step. tensorwire allocates every
//! tensor from one large region that was registered before the tensor existed. A transfer needs no
//! registration and no staging copy. On shared memory and on NICs with kernel bypass it needs no
//! system call. A synchronous engine polls for completions on the caller's own thread. A receive
//! blocks with a timeout, goes on as a [`Pending`], which is a [`Future`] too, or runs a callback.
//!
//! # Quick start
//!
//! Two tasks of one job, here as two threads; in a real trainer each is a process of its own.
//!
//! ```
//! use std::time::Duration;
//! use tensorwire::{DType, Node};
//!
//! # fn free_ports() -> [u16; 2] {
//! #     let sockets = [0; 2].map(|_| std::net::TcpListener::bind("127.0.0.1:0").unwrap());
//! #     sockets.map(|socket| socket.local_addr().unwrap().port())
//! # }
//! fn run(task: u32, cluster: &str) -> Result<(), Box<dyn std::error::Error>> {
//!     // Join: every member has the same cluster, and says which of its tasks it is.
//!     let node = Node::builder()
//!         .member("worker", task)
//!         .set("cluster", cluster)
//!         .set("pool_size", "16MiB")
//!         .start()?;
//!     node.join()?;
//!
//!     let step = node.step(1)?;
//!     if task == 0 {
//!         // Make a tensor, fill it, freeze it, send it. Sending never blocks.
//!         let mut gradient = node.tensor(DType::F32, &[2, 3])?;
//!         gradient.as_mut_slice::<f32>()?.fill(0.5);
//!         step.send(&node.edge_to("worker", 1, "grad/w1")?, gradient.freeze())?;
//!         // Wait for the answer.
//!         let edge = node.edge_from("worker", 1, "done")?;
//!         step.recv(&edge, Duration::from_secs(10))?;
//!     } else {
//!         // Receive it.
//!         let edge = node.edge_from("worker", 0, "grad/w1")?;
//!         let gradient = step.recv(&edge, Duration::from_secs(10))?.tensor;
//!         assert_eq!(gradient.as_slice::<f32>()?, [0.5; 6]);
//!         step.send(&node.edge_to("worker", 0, "done")?, gradient)?;
//!     }
//!     // Serves what was sent and not asked for yet, then ends.
//!     node.stop()?;
//!     Ok(())
//! }
//!
//! let [first, second] = free_ports();
//! let cluster = format!("worker=127.0.0.1:{first},127.0.0.1:{second}");
//! std::thread::scope(|scope| {
//!     let cluster = &cluster;
//!     let threads = [0, 1].map(|task| scope.spawn(move || run(task, cluster).unwrap()));
//!     threads.map(|thread| thread.join().unwrap());
//! });
//! ```
//!
//! # What is where
//!
//! * [`Node`]: one process of the cluster. [`Builder`] takes its settings.
//! * [`Step`], [`Edge`]: sending and receiving. [`Step::receive`] sets a receive up, [`Pending`] is
//!   one that has begun and a future, [`CancelToken`] ends one.
//! * [`PendingSet`]: a wait for any of several receives.
//! * [`Batch`], [`Step::send_all`], [`Step::recv_all`]: many tensors by one call each.
//! * [`Standing`]: an edge whose tensors may be sent before their receives begin, for trainers that
//!   receive the same edges each step.
//! * [`TensorMut`] is written by one owner. Frozen it becomes a [`Tensor`], which nobody can write,
//!   so that a tensor that was sent can't be changed. [`BufferRing`] hands out the same buffers
//!   step after step.
//! * [`StringTensor`] and [`VariantTensor`]: values without a fixed size, made a tensor that
//!   travels like any other.
//! * [`ForeignMemory`]: tensors of another allocator, sent from where they lie or through the pool.
//! * [`Store`]: keys and values through which processes meet, such as [`FileStore`].
//!
//! # Threads and progress
//!
//! The setting `poll` chooses the thread that makes progress:
//!
//! * inline: the threads that call do, and nothing runs in the background. A process that computes
//!   for long without a call stalls the peers that read from it, unless it calls
//!   [`Node::progress`].
//! * adaptive: a background thread does while no call is under way. Threads sleep while nothing
//!   comes.
//! * dedicated: a background thread that never sleeps does.
//! * auto, the default: adaptive, or inline if `wait` is set. [`Node::mode`] returns the mode.
//!
//! Callbacks run on a thread of their own. Addresses, liveness and errors travel over gRPC on one
//! more thread, which touches no tensor, unless `fabric` is `grpc`.
//!
//! # Peers that die and come back
//!
//! A peer is lost when the kernel reports its end, when it stops, or after `silence_bound` without
//! a message. Every call that waits for the peer, and every later one, ends with
//! [`Error::PeerLost`]. The error names the task, its incarnation and the [`LossCause`]. With
//! `peer_loss` at `fail_all` every other call ends with that error too, also [`Node::join`], unless
//! the peer stopped cleanly.
//!
//! Without it the node goes on. The task may come back, as a new process or as one that had only
//! stalled. The two then link again by themselves, and [`PeerReport::generation`] grows.
//! [`Node::join`] waits for that. Calls that begin then reach the new life, in new steps or in
//! those that have begun. A tensor borrowed from a life that is over can be read for as long as it
//! is held; `borrow_grace` after the death it is copied, where it lies, so that the dead process's
//! memory goes back to the system. [`Step::send`] says what becomes of values that were sent to it.
//!
//! # fork
//!
//! A node stays in the process that started it. In a child of `fork` every call on it returns
//! [`Error::Forked`], [`NodeError::Forked`] or [`PoolError::Forked`]. Dropping handles does nothing
//! there. Tensors can be read, and show what their owner has written since. Nothing that the child
//! does reaches the parent or its peers. To use tensorwire in the child, `exec` there, or fork
//! before the node is started. A child keeps the parent's sockets open.
//!
//! # Deadlines
//!
//! Every wait has one:
//!
//! | wait | default | setting |
//! |---|---|---|
//! | [`Node::join`] for all members | 60 s | `join_timeout` |
//! | setting up one link, tried again until the join's deadline | 5 s | |
//! | a receive whose caller does not say | 60 s | `recv_timeout` |
//! | [`Step::try_recv`] of a large tensor over verbs or TCP, or over gRPC calls | 100 ms | `cancel_grace` |
//! | a borrowed tensor, until it counts as overdue; and after its sender's death, until it is copied out of the dead process's memory | 5 s | `borrow_grace` |
//! | [`Node::stop`], serving what was sent; and again for the bootstrap service | 2 s | `stop_timeout` |
//! | silence of a peer's process until it counts as dead (death that the kernel reports counts at once) | 5 s | `silence_bound` |

#![warn(missing_docs)]
// These hold for the public API. With `internals` they would also mean the modules.
// `unreachable_pub` is off: it would report each `pub` method of a private type, some 390.
#![cfg_attr(
    not(feature = "internals"),
    warn(
        missing_debug_implementations,
        unnameable_types,
        clippy::exhaustive_enums,
        clippy::exhaustive_structs
    )
)]
// Nothing waits for another thread on the data path: see tests/repo/layers/locks.rs.
#![cfg_attr(not(test), deny(clippy::disallowed_types, clippy::disallowed_methods))]
// Without `internals` the items that only the program, tests and benchmarks use are private, and
// unused.
#![cfg_attr(not(feature = "internals"), allow(dead_code, unused_imports))]
// With `internals` private items show up in hidden pages, whose links nobody follows.
#![cfg_attr(feature = "internals", allow(rustdoc::private_intra_doc_links))]

mod bootstrap;
mod config;
#[cfg(doctest)]
mod documents;
mod engine;
mod fabric;
mod link;
mod matching;
mod memory;
mod mutants;
mod node;
mod protocol;
mod rendezvous;
mod store;
mod sync;
mod telemetry;
mod wire;

pub use bootstrap::{
    AuthError, AuthMode, AuthSettings, BootstrapError, MissingPeer, RemoteStore, StoreOptions, StoreServer,
    TlsFiles,
};
pub use config::{
    Builder, BulkReceive, Config, ConfigError, ConfigValues, LaunchedRank, MemoryWindows, Origin, PeerLoss,
    Profile, StoreAddress, StoreAddressError,
};
pub use engine::{PinError, PollMode, StartError, WaitStrategy, pin_current_thread, process_cpus};
pub use fabric::{FabricError, FabricKind, FabricSet};
pub use link::Value;
pub use matching::{
    EdgeReport, EdgeReports, EdgeWait, GrantedBytes, Untaken, UntakenEdge, WaitReport, WaitReports,
};
pub use memory::{
    BufferRing, DecodeError, FlatTensor, ForeignError, ForeignMemory, LockPolicy, MAX_DEPTH, MakeMutError,
    NestedTensor, PageKind, PagePolicy, Pool, PoolError, PoolStats, RegionError, RegionReport, RingError,
    SerializeError, SetMetaError, StringTensor, Tensor, TensorMut, Variant, VariantTensor, ViewError,
};
pub use node::{
    EventStream, Events, MeetingError, Node, NodeError, NodeEvent, NodeEventKind, NodeState, PeerReport,
    PeerState, PlannedResource, ResourcePlan, TensorError,
};
pub use rendezvous::{
    Batch, CancelToken, Delivery, Edge, Error, Pending, PendingBatch, PendingSet, Receivable,
    ReceiveAllBuilder, ReceiveBuilder, SendError, Sendable, Sequence, Standing, Step,
};
pub use store::{FileStore, MemoryStore, PrefixStore, Store, StoreError};
pub use telemetry::{Counter, FlightEvent, FlightLog, FlightRecord, Gauge, Snapshot};
pub use wire::message::{Allocator, Placement};
pub use wire::{
    Cluster, ClusterError, Code, DType, DeviceNameError, EdgeNameError, EdgeSide, Element, Generation,
    HostPort, HostPortError, Incarnation, JobError, LossCause, MAX_DIM, MAX_RANK, Shape, ShapeError, Status,
    StepId, TaskId, TaskIdError, TensorMeta,
};

/// The modules, for the program, tests and benchmarks. They may change with every version.
#[cfg(feature = "internals")]
#[doc(hidden)]
pub mod internals {
    /// A cluster of one process, for the examples of the documentation.
    pub fn doc_node() -> crate::Node {
        let free = std::net::TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr());
        let cluster = format!("worker={}", free.expect("a free port"));
        let settings = crate::Node::builder().without_environment().member("worker", 0);
        let node = settings.set("cluster", cluster).set("pool_size", "16MiB").start().expect("a node");
        node.join().expect("it has no peers");
        node
    }

    pub mod bootstrap {
        pub use crate::bootstrap::*;
    }
    pub mod config {
        pub use crate::config::*;
    }
    pub mod engine {
        pub use crate::engine::*;
    }
    pub mod fabric {
        pub use crate::fabric::*;
    }
    pub mod link {
        pub use crate::link::*;
    }
    pub mod matching {
        pub use crate::matching::*;
    }
    pub mod memory {
        pub use crate::memory::*;
    }
    #[cfg(tensorwire_mutants)]
    pub mod mutants {
        pub use crate::mutants::*;
    }
    pub mod node {
        pub use crate::node::*;
    }
    pub mod protocol {
        pub use crate::protocol::*;
    }
    pub mod rendezvous {
        pub use crate::rendezvous::*;
    }
    pub mod store {
        pub use crate::store::*;
    }
    pub mod sync {
        pub use crate::sync::*;
    }
    pub mod telemetry {
        pub use crate::telemetry::*;
    }
    pub mod wire {
        pub use crate::wire::*;
    }
}
