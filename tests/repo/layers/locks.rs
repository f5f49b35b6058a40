//! Where a lock may be taken. No file that moves data is on the list: the hot path waits for no
//! other thread.
//!
//! Clippy denies the types (`clippy.toml`, `src/lib.rs`) except where a file allows them. These
//! checks keep the permission, and the words themselves, to the files of the list.

use super::rules::{is_under, lint_is_relaxed};
use crate::source::{Token, tokens};
use std::path::Path;

/// Files and modules that may hold locks and channels, and what for.
pub const LOCKS: &[(&str, &str)] = &[
    ("src/node", "starts, stops and joins; a poller of its own never comes here"),
    ("src/bootstrap", "a thread of its own that moves no tensor of a fabric"),
    ("cli/src/launch", "waits for the processes that it has started"),
    ("src/store", "meets processes before and beside the data path"),
    ("src/engine/executor", "the queues of the threads that run callbacks and end owners"),
    ("src/engine/background", "the start of a polling thread waits until it is pinned; standby sleeps"),
    ("src/engine/wait_strategy", "a waiter sleeps for moments while other threads need its CPU"),
    ("src/fabric/shm/wakeup/doorbells", "a port takes a doorbell when it is made"),
    (
        "src/fabric/shm/loans/reclaim",
        "what dead peers left: when a link ends, on the watcher's thread and on the one that settles",
    ),
    (
        "src/fabric/shm/connect/foreign",
        "two threads that close what others have sent; an acceptor waits 20 ms at most",
    ),
    ("src/fabric/shm/file_cache", "what links to one process share, when one is made"),
    ("src/fabric/shm/regions", "a peer's region until it is mapped; later only a pointer is loaded"),
    ("src/fabric/shm/liveness", "the watcher's thread; a poller only loads a word"),
    (
        "src/fabric/shm/loans/orphans",
        "loans that outlived their link; tried, never waited for, and only if there are any",
    ),
    (
        "src/fabric/tcp/session",
        "connections that broke were made again, or a link begins or ends; a poller only loads a word",
    ),
    (
        "src/fabric/tcp/watcher",
        "the watcher's thread, and when a port is made or a link detached; a poller only loads a word",
    ),
    ("src/fabric/verbs/events", "the thread that waits for the device's events; a poller only loads words"),
    (
        "src/fabric/verbs/cq",
        "completion events are acknowledged before their queue ends; a poller sleeps then",
    ),
    ("src/fabric/verbs/endpoint", "making a link waits for the peer's ping"),
    (
        "src/fabric/verbs/registrations",
        "memory outside the pool, looked up and registered by the threads that send it; a port takes the \
            key that comes along",
    ),
    ("src/fabric/verbs/port_resources", "completion queues are shared out when a port or a link is made"),
    ("src/fabric/sim", "a network in one process, in virtual time"),
    ("src/memory/fork", "the list of mappings: when one is made or ends, and during a fork"),
    (
        "src/memory/pool/state",
        "the central allocator, behind the caches: where a size is new or the caches are full",
    ),
    ("src/rendezvous/call_path", "the gRPC path, which is no data path of a fabric and has no poller"),
    ("src/rendezvous/losses", "the error of a lost peer; a send to a linked peer only loads a flag"),
    (
        "src/sync/biased_mutex",
        "the process's own tables: once per begin, abort and cleanup of a step, and for edges within the \
            process",
    ),
];

/// Lints that clippy denies.
const LINTS: &[&str] = &["disallowed_types", "disallowed_methods"];
/// Names of what waits for other threads.
const WAITS: &[&str] = &[
    "Mutex",
    "RwLock",
    "Condvar",
    "Barrier",
    "mpsc",
    "parking_lot",
    "ReentrantLock",
    "ShardedLock",
    "Parker",
    "park",
];

/// Each lock, and each permission to have one, in a file that is not on the list.
pub fn check(path: &Path, text: &str, is_test: bool) -> Vec<String> {
    let listed: Vec<&str> = LOCKS.iter().map(|(prefix, _why)| *prefix).collect();
    if is_test || is_under(path, &listed) {
        return Vec::new();
    }
    let code = tokens(text);
    let say = |token: &Token, what: &str| format!("{}:{}: {what}", path.display(), token.line);
    let judge = |(at, token): (usize, &Token)| match token.word()? {
        word if LINTS.contains(&word) && lint_is_relaxed(&code[..at]) => {
            Some(say(token, "locks are allowed where none may be: see tests/repo/layers/locks.rs"))
        }
        word if WAITS.contains(&word) && !token.in_test => {
            Some(say(token, &format!("{word} on the data path: see tests/repo/layers/locks.rs")))
        }
        _ => None,
    };
    code.iter().enumerate().filter_map(judge).collect()
}
