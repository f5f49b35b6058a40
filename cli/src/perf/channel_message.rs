//! Messages between the two processes, outside of the measured turns.

use super::options::PerfArgs;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A message on the [`ControlChannel`](super::control_channel::ControlChannel).
///
/// The *initiator* measures and the *responder* answers.
#[derive(PartialEq, Serialize, Deserialize)]
#[allow(clippy::large_enum_variant)] // One of these travels per test.
pub enum ChannelMessage {
    /// First message of the initiator: open this test.
    Open {
        /// The program's version: both must be the same.
        version: String,
        /// The initiator's options. Both sides must agree on them.
        args: PerfArgs,
        /// The core of the responder, where the initiator has started it.
        core: usize,
    },
    /// From the responder: the test is open.
    Opened {
        /// The core that it runs on.
        core: usize,
    },
    /// From the initiator: prepare, and answer [`ChannelMessage::Ready`].
    Turn {
        /// What is measured.
        subject: Subject,
        /// Payload in bytes.
        bytes: usize,
    },
    /// From the initiator: send [`ChannelMessage::Ready`], answer this many round trips, and send
    /// [`ChannelMessage::Done`].
    Rounds(u64),
    /// From the responder: it is prepared.
    Ready,
    /// From the responder: it has answered.
    Done,
    /// From the initiator: the run is over.
    Quit,
    /// From either side, for the workload: opaque bytes, such as an address.
    Bytes(Vec<u8>),
    /// From the responder: it gives up, and why.
    Failed(String),
}

impl fmt::Debug for ChannelMessage {
    /// The kind of the message, as its content can be as long as a peer likes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ChannelMessage::Open { .. } => "Open",
            ChannelMessage::Opened { .. } => "Opened",
            ChannelMessage::Turn { .. } => "Turn",
            ChannelMessage::Rounds(_) => "Rounds",
            ChannelMessage::Ready => "Ready",
            ChannelMessage::Done => "Done",
            ChannelMessage::Quit => "Quit",
            ChannelMessage::Bytes(_) => "Bytes",
            ChannelMessage::Failed(_) => "Failed",
        })
    }
}

/// What is measured in a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Subject {
    /// The test that was asked for.
    Test,
    /// The same test without an option: see [`Test::baseline`](super::options::Test::baseline).
    Baseline,
    /// The bare cache line.
    CacheLine,
    /// The bare ring.
    Ring64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_message_of_a_peer_is_not_in_an_error() {
        for long in [ChannelMessage::Bytes(vec![7; 1 << 20]), ChannelMessage::Failed("x".repeat(1 << 20))] {
            assert!(format!("{long:?}").len() < 10);
        }
    }
}
