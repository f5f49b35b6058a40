//! What a port reports: arrivals, local completions, failures.

use super::LinkId;
use crate::memory::{LentBytes, TensorMut};
use crate::wire::{Immediate, LossCause};

/// Something that happened on a link.
#[derive(Debug)]
pub struct Completion {
    /// On which link.
    pub link: LinkId,
    /// What happened.
    pub event: Event,
}

/// What happened.
#[derive(Debug)]
pub enum Event {
    /// A write or a loan of ours is done: its source may be reused.
    Done,
    /// A read of ours is done.
    ReadDone {
        /// The bytes that were asked for.
        target: TensorMut,
    },
    /// A write, loan or read of ours failed; its memory has been released, or, for a loan that a living peer
    /// still reads, is as soon as the peer has let go of it.
    Failed,
    /// A message has come; its bytes are [`Completions::message`].
    Message(MessageRange),
    /// A write with immediate has landed.
    Immediate {
        /// Its immediate data.
        immediate: Immediate,
        /// Bytes that it wrote.
        bytes: u64,
    },
    /// The peer lends memory.
    Lent {
        /// Its immediate data.
        immediate: Immediate,
        /// The memory. Dropping it gives it back.
        bytes: LentBytes,
    },
    /// The link is down: nothing comes on it any more.
    Down(LinkFailure),
}

/// Why a link went down.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LinkFailure {
    /// The peer's process is gone, as the kernel reports it.
    #[error("the peer's process (pid {pid}) has ended")]
    PeerDied {
        /// Its process id.
        pid: u32,
    },
    /// The peer has closed the link.
    #[error("the peer closed the link")]
    Closed,
    /// What is to leave can't, now or later: an error of this library.
    #[error("what waits to be sent can't be posted: {0}")]
    Refused(&'static str),
    /// This side has closed the link.
    #[error("the link was closed: {0}")]
    Local(String),
    /// The peer sent what it may not: a bad region, key, bound, slot or message.
    #[error("the peer broke the protocol: {0}")]
    Protocol(String),
    /// A work request failed.
    #[error(
        "a {operation} on queue pair {queue_pair} failed: {status} (error {code}, vendor's {vendor:#x}): usually {cause}"
    )]
    Completion {
        /// What was asked for.
        operation: &'static str,
        /// The link's queue pair: 0 carries messages, and those from 1 on parts of large writes.
        queue_pair: u8,
        /// Name of its status.
        status: &'static str,
        /// Number of its status, `ibv_wc_status` on verbs.
        code: u32,
        /// What the device says besides.
        vendor: u32,
        /// What usually causes it and what to check.
        cause: &'static str,
    },
    /// The device, its port or a queue of it failed, as an asynchronous event told.
    #[error("{event} on {device}: {cause}")]
    Device {
        /// Which device.
        device: String,
        /// What happened.
        event: &'static str,
        /// What usually causes it and what to check.
        cause: &'static str,
    },
    /// A message or an immediate found no posted receive.
    #[error("a message found no posted receive: the sender overran its credits")]
    NoReceive,
}

impl From<LinkFailure> for LossCause {
    fn from(failure: LinkFailure) -> Self {
        let text = failure.to_string();
        match failure {
            LinkFailure::PeerDied { .. } => LossCause::Died(text),
            LinkFailure::Closed => LossCause::Left(text),
            LinkFailure::Local(why) => LossCause::Closed(why),
            LinkFailure::Refused(_) => LossCause::Closed(text),
            LinkFailure::Completion { .. } | LinkFailure::Device { .. } => LossCause::Network(text),
            LinkFailure::Protocol(_) | LinkFailure::NoReceive => LossCause::Protocol(text),
        }
    }
}

/// Where in a [`Completions`] a message's bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageRange {
    start: u32,
    len: u32,
}

/// What one poll brought: completions, and the bytes of the messages among them.
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

    /// Adds a message, whose bytes are copied.
    #[inline]
    pub fn push_message(&mut self, link: LinkId, bytes: &[u8]) {
        let range = MessageRange { start: self.bytes.len() as u32, len: bytes.len() as u32 };
        self.bytes.extend_from_slice(bytes);
        self.push(link, Event::Message(range));
    }

    /// The bytes of a message of this poll.
    ///
    /// # Panics
    /// If the range is not of this poll.
    pub fn message(&self, range: MessageRange) -> &[u8] {
        &self.bytes[range.start as usize..][..range.len as usize]
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

    /// Takes the completions out one by one, oldest first, each with the means to look at its message. The
    /// messages stay readable until [`Completions::clear`].
    pub fn drain(&mut self) -> impl Iterator<Item = (Completion, &[u8])> {
        let bytes = &self.bytes;
        self.entries.drain(..).map(move |completion| {
            let message = match completion.event {
                Event::Message(range) => &bytes[range.start as usize..][..range.len as usize],
                _ => &[],
            };
            (completion, message)
        })
    }

    /// Forgets everything, and keeps the room.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.bytes.clear();
    }
}
