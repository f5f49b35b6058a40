//! The reports of a port: arrivals, local completions, failures.

use super::LinkId;
use crate::memory::{LentBytes, TensorMut, append};
use crate::wire::{Immediate, LossCause};
use std::net::SocketAddr;

/// An event on a link.
#[derive(Debug)]
pub struct Completion {
    /// The link that the port reported it for.
    pub link: LinkId,
    /// An arrival, a finished operation or a failure.
    pub event: Event,
}

/// The kinds of events.
#[derive(Debug)]
pub enum Event {
    /// A write or a loan of this side is done: its source may be reused.
    Done,
    /// A read of this side is done.
    ReadDone {
        /// The target, with the bytes that were read at its start.
        target: TensorMut,
    },
    /// A write, loan or read of this side failed. Its memory has been released. The memory of a
    /// loan that a living peer still reads is released when the peer gives it back.
    Failed,
    /// A message has arrived. [`Completions::message`] returns its bytes.
    Message(MessageRange),
    /// A write with immediate has landed.
    Immediate {
        /// The immediate data.
        immediate: Immediate,
        /// Bytes that were written.
        bytes: u64,
    },
    /// The peer lends memory.
    Lent {
        /// The message that came with it. [`Completions::message`] returns its bytes.
        message: MessageRange,
        /// The memory. Its drop gives it back.
        bytes: LentBytes,
    },
    /// Connections of the link broke and were made again. What was lost with them is sent again.
    Repaired,
    /// The link is down. No event of this link follows.
    Down(LinkFailure),
}

fn pid_text(pid: u32) -> String {
    if pid == 0 { "of another PID namespace".into() } else { format!("pid {pid}") }
}

/// Why a link went down.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LinkFailure {
    /// The peer's process is gone, as the kernel reports it.
    #[error("the peer's process ({}) has ended", pid_text(*.pid))]
    PeerDied {
        /// The peer's process id; 0 if it was in another PID namespace.
        pid: u32,
    },
    /// The peer has closed the link.
    #[error("the peer closed the link")]
    Closed,
    /// An operation can't be posted, now or later: an error of this library.
    #[error("an operation can't be posted: {0}")]
    Refused(&'static str),
    /// This side has closed the link.
    #[error("the link was closed: {0}")]
    Local(String),
    /// This process lacks memory, descriptors or another resource that the link needs.
    #[error("{0}")]
    Resources(String),
    /// The peer has closed the link, as it lacks such a resource.
    #[error(
        "the peer closed the link, as its process lacks memory, file descriptors or another resource: \
         its own error says which"
    )]
    PeerResources,
    /// The peer broke the protocol: a bad region, key, bound, slot or message.
    #[error("the peer broke the protocol: {0}")]
    Protocol(String),
    /// A work request failed.
    #[error(
        "a {operation} on queue pair {queue_pair} failed: {status} (error {code}, vendor's {vendor:#x}): \
         usually {cause}"
    )]
    Completion {
        /// The kind of operation.
        operation: &'static str,
        /// Number of the link's queue pair: 0 for the main one, from 1 on for stripes.
        queue_pair: u8,
        /// Name of the work request's status.
        status: &'static str,
        /// Number of the status: `ibv_wc_status`.
        code: u32,
        /// The vendor's error code.
        vendor: u32,
        /// The usual cause and what to check.
        cause: &'static str,
    },
    /// The device, its port or one of its queues failed.
    #[error("{event} on {device}: {cause}")]
    Device {
        /// The device's name.
        device: String,
        /// The asynchronous event.
        event: &'static str,
        /// The usual cause and what to check.
        cause: &'static str,
    },
    /// A connection broke.
    #[error("the connection to {peer} broke: {error}: usually {cause}")]
    Connection {
        /// The peer's end of it.
        peer: SocketAddr,
        /// The system's error.
        error: String,
        /// The usual cause and what to check.
        cause: &'static str,
    },
    /// A message or an immediate found no posted receive.
    #[error("a message found no posted receive: the sender overran its credits")]
    NoReceive,
}

impl LinkFailure {
    /// Whether this side has found what is wrong, here or in what the peer has sent.
    pub fn is_found_here(&self) -> bool {
        use LinkFailure::{NoReceive, Protocol, Refused, Resources};
        matches!(self, Resources(_) | Protocol(_) | NoReceive | Refused(_))
    }

    /// Whether the cause lies at the peer or between both sides, so that the bootstrap service may
    /// know more about it.
    pub fn is_remote(&self) -> bool {
        use LinkFailure::{Closed, Completion, Connection, PeerDied, PeerResources};
        matches!(self, PeerDied { .. } | Closed | PeerResources | Completion { .. } | Connection { .. })
    }

    /// The loss of the peer that this end of a link means.
    pub fn into_loss(self) -> LossCause {
        let text = self.to_string();
        match self {
            LinkFailure::PeerDied { .. } => LossCause::Died(text),
            LinkFailure::Local(why) => LossCause::Closed(why),
            LinkFailure::Resources(why) => LossCause::Local(why),
            LinkFailure::Closed | LinkFailure::Refused(_) | LinkFailure::PeerResources => {
                LossCause::Closed(text)
            }
            LinkFailure::Completion { .. } | LinkFailure::Device { .. } | LinkFailure::Connection { .. } => {
                LossCause::Network(text)
            }
            LinkFailure::Protocol(_) | LinkFailure::NoReceive => LossCause::Protocol(text),
        }
    }
}

/// The place of a message's bytes in a [`Completions`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageRange {
    start: u32,
    len: u32,
}

/// The result of a poll: completions, and the bytes of the messages among them.
///
/// Reused from poll to poll, so that steady state does not allocate.
#[derive(Debug, Default)]
pub struct Completions {
    entries: Vec<Completion>,
    bytes: Vec<u8>,
}

impl Completions {
    /// Room for `entries` completions before anything is allocated.
    pub fn with_capacity(entries: usize) -> Self {
        Completions {
            entries: Vec::with_capacity(entries),
            bytes: Vec::with_capacity(entries * super::MAX_MESSAGE),
        }
    }

    /// Adds a completion.
    #[inline]
    pub fn push(&mut self, link: LinkId, event: Event) {
        self.entries.push(Completion { link, event });
    }

    /// Adds a message. Copies its bytes.
    #[inline]
    pub fn push_message(&mut self, link: LinkId, bytes: &[u8]) {
        let range = self.add(bytes);
        self.push(link, Event::Message(range));
    }

    /// Adds a loan and its message, whose bytes are copied.
    pub fn push_lent(&mut self, link: LinkId, message: &[u8], bytes: LentBytes) {
        let message = self.add(message);
        self.push(link, Event::Lent { message, bytes });
    }

    #[inline]
    fn add(&mut self, bytes: &[u8]) -> MessageRange {
        let range = MessageRange { start: self.bytes.len() as u32, len: bytes.len() as u32 };
        append(&mut self.bytes, bytes);
        range
    }

    /// The bytes of a message of this poll.
    ///
    /// # Panics
    /// If the range is not of this poll.
    pub fn message(&self, range: MessageRange) -> &[u8] {
        &self.bytes[range.start as usize..][..range.len as usize]
    }

    /// Changes the links of the completions behind the first `kept`.
    pub(super) fn relabel(&mut self, kept: usize, change: impl Fn(LinkId) -> LinkId) {
        for completion in &mut self.entries[kept..] {
            completion.link = change(completion.link);
        }
    }

    /// How many completions there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The completions, oldest first.
    pub fn entries(&self) -> &[Completion] {
        &self.entries
    }

    /// Takes the completions out one by one, oldest first, each with the bytes of its message. The
    /// bytes of events without a message are empty.
    pub fn drain(&mut self) -> impl Iterator<Item = (Completion, &[u8])> {
        let bytes = &self.bytes;
        self.entries.drain(..).map(move |completion| {
            let message = match completion.event {
                Event::Message(range) | Event::Lent { message: range, .. } => {
                    &bytes[range.start as usize..][..range.len as usize]
                }
                _ => &[],
            };
            (completion, message)
        })
    }

    /// Bytes of all messages.
    pub fn message_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Removes everything. Keeps the allocations.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.bytes.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_lies_here_or_elsewhere_and_never_at_both() {
        let connection = LinkFailure::Connection {
            peer: ([127, 0, 0, 1], 4000).into(),
            error: "Connection reset by peer".into(),
            cause: "the peer's process has ended",
        };
        let completion = LinkFailure::Completion {
            operation: "RDMA write",
            queue_pair: 0,
            status: "IBV_WC_RETRY_EXC_ERR",
            code: 12,
            vendor: 0x81,
            cause: "the peer does not answer",
        };
        let device = LinkFailure::Device {
            device: "rxe0".into(),
            event: "port down",
            cause: "the cable is unplugged",
        };
        let remote = [
            LinkFailure::PeerDied { pid: 1 },
            LinkFailure::Closed,
            LinkFailure::PeerResources,
            connection,
            completion,
        ];
        for failure in remote {
            assert!(failure.is_remote() && !failure.is_found_here(), "{failure}");
        }
        let found_here = [
            LinkFailure::Resources("ulimit -n".into()),
            LinkFailure::Protocol("a bad slot".into()),
            LinkFailure::NoReceive,
            LinkFailure::Refused("too long"),
        ];
        for failure in found_here {
            assert!(failure.is_found_here() && !failure.is_remote(), "{failure}");
        }
        // Neither found in what the peer did, nor known better by the bootstrap service.
        for failure in [LinkFailure::Local("it is silent".into()), device] {
            assert!(!failure.is_found_here() && !failure.is_remote(), "{failure}");
        }
    }
}
