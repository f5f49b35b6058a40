//! Tensors over gRPC (specification 9): `RecvTensor`, `MarkRecvFinished` and `CleanupAll`.
//!
//! A node that names the path gives the service a [`TensorService`], and calls peers by a
//! [`TensorCaller`]. Steps, keys and heads are opaque here, and so are the bytes. Which value
//! answers which request is decided in [`crate::matching`].
//!
//! | file | content |
//! |---|---|
//! | `client` | calls, repeated until they are answered or dropped |
//! | `server` | the peers' calls, and answers in parts |

mod client;
mod server;

pub(super) use client::TensorClients;
#[cfg(test)]
pub(super) use client::UNHEARD_ENDS;
pub use client::{TensorCall, TensorCaller};
pub(super) use server::{SERVICE_NAME, TensorsGrpc, service};

use crate::wire::{Incarnation, TaskId};
use bytes::Bytes;
use std::fmt;
use std::time::Duration;
use tokio::sync::oneshot;

/// Bytes of a tensor in one part of an answer. The bound of messages has room for the rest.
const PART: usize = 128 * 1024;

/// Bytes of the shortest part that is not the last. Each part holds its frame, which has at most
/// 160 KiB, so many short ones would take much more memory than their bytes.
const MIN_PART: usize = PART / 2;

/// Bytes of the longest head.
const MAX_HEAD: usize = 4 * 1024;

/// Bytes of the longest key: two device names, an edge name, and numbers.
const MAX_KEY: usize = 8 * 1024;

/// Requests of one peer that may wait or be answered at a time.
pub(super) const MAX_CALLS: u32 = 1024;
/// Calls among [`MAX_CALLS`] that are kept for tries, which do not wait behind other calls.
const MAX_TRIES: u32 = 64;

/// Ends of requests that one call tells: more than requests are answered meanwhile.
pub(super) const MAX_ENDS: usize = 2 * MAX_CALLS as usize;

/// Bytes of the longest request: [`MAX_ENDS`] numbers of ten bytes, and who calls. Each of
/// [`MAX_CALLS`] that have begun takes as much memory.
const MAX_REQUEST: usize = 24 * 1024;

/// How long a call waits for its value before the sender answers that there is none yet. Then
/// another call gets its place.
const PENDING_AFTER: Duration = Duration::from_secs(1);

/// Bytes of one answer, and of all answers of one peer, that may come before they are read.
const WINDOWS: (u32, u32) = (4 << 20, 16 << 20);

/// A peer in one of its lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorPeer {
    /// Job and number.
    pub name: TaskId,
    /// The number of its life.
    pub incarnation: Incarnation,
}

/// A request of a receiver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorRequest {
    /// The id of the step.
    pub step: u64,
    /// The rendezvous key as text (specification 2.2).
    pub key: String,
    /// The number that the receiver gave the request. Unique in the receiver's life.
    pub id: u64,
    /// Whether the head of the answer has a checksum.
    pub wants_checksum: bool,
    /// Whether the request asks for a value that is there already, and does not wait for one.
    pub is_try: bool,
    /// The generation of the link that it was made on.
    pub link: u64,
}

/// The answer of a sender: a value, or why there is none.
#[derive(Clone)]
pub struct SentAnswer {
    /// What is known before the bytes; at most 4 KiB.
    pub head: Vec<u8>,
    /// The bytes, by reference.
    pub bytes: Bytes,
}

/// A value that has arrived.
#[derive(Clone, Default)]
pub struct ArrivedParts {
    /// What is known before the bytes.
    pub head: Vec<u8>,
    /// The bytes of the tensor, in order.
    pub parts: Vec<Bytes>,
}

impl fmt::Debug for SentAnswer {
    /// Without the bytes, which are a tensor's.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SentAnswer({} and {} bytes)", self.head.len(), self.bytes.len())
    }
}

impl fmt::Debug for ArrivedParts {
    /// Without the bytes, which are a tensor's.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes: usize = self.parts.iter().map(Bytes::len).sum();
        write!(f, "ArrivedParts({} and {bytes} bytes)", self.head.len())
    }
}

/// Takes the answer to a call of a peer.
#[derive(Debug)]
pub struct TensorAnswer(oneshot::Sender<SentAnswer>);

impl TensorAnswer {
    /// Answers the call. Does nothing if the peer has hung up.
    pub fn send(self, answer: SentAnswer) {
        drop(self.0.send(answer));
    }
}

/// Serves the calls of peers. No method may block: they run on the bootstrap thread.
pub trait TensorService: Send + Sync + 'static {
    /// Answers a request, now or later. A request whose id is known gets the same value again. Its
    /// earlier call has ended. The answer is dropped for a try without a value, and for a request
    /// of another link than the present one.
    fn recv_tensor(&self, from: &TensorPeer, request: TensorRequest, answer: TensorAnswer);

    /// Forgets requests. A value that was meant for one that was given up goes back in line.
    fn mark_recv_finished(&self, from: &TensorPeer, finished: &[u64], given_up: &[u64]);

    /// Forgets the requests of earlier lives of the peer, and of this life those below
    /// `first_request`.
    fn cleanup_all(&self, from: &TensorPeer, first_request: u64);
}
