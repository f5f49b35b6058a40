//! The short path: calls of the thread that holds the poller, for small tensors within the credit.
//!
//! Both halves do to an edge what the general path does, without messages, waiters and events in
//! between. Whatever takes more is left to the general path.

use super::receiving::count_received;
use super::{Lanes, Matching, PeerEdges};
use crate::fabric::ShortTake;
use crate::link::{DirectReceive, TensorKeyRef};
use crate::matching::PeerIndex;
use crate::memory::Tensor;
use crate::protocol::window::Record;
use crate::wire::EdgeSide;

/// The record that a receive waits for. Valid until the next message is handled.
#[derive(Clone, Copy, Debug)]
pub struct ExpectedRecord {
    peer: PeerIndex,
    edge: u32,
    record: Record<()>,
    /// Whether no message is due when the value has come.
    stays_settled: bool,
}

impl PeerEdges {
    /// The record that a receive waits for on an edge without a value of its step. `None` if other
    /// receives wait too, or the value comes in another way. The step is live.
    #[inline]
    pub(super) fn expected(&self, peer: PeerIndex, edge: u32, step: u64) -> Option<ExpectedRecord> {
        let record = self.incoming.next_record(edge, step)?;
        let stays_settled = self.incoming.stays_settled(edge);
        Some(ExpectedRecord { peer, edge, record, stays_settled })
    }
}

impl Matching {
    /// Sends a tensor that leaves at once. Returns whether it did. A tensor that is lent is taken.
    #[inline]
    pub fn send_short(
        &mut self,
        lanes: &mut impl Lanes,
        (peer, key): (PeerIndex, TensorKeyRef<'_>),
        tensor: &mut Option<Tensor>,
    ) -> bool {
        if !self.steps.goes_on(key.step) {
            return false;
        }
        let entry = &mut self.peers[peer.0 as usize];
        let mut index = key.edge.place(EdgeSide::Sender);
        let edge = match entry.out.at(index, |known| known.is_of(key)) {
            Some(edge) => Some(edge),
            None => {
                index = entry.outgoing_edge(key);
                entry.out.at(index, |_| true)
            }
        };
        if let Some(edge) = edge
            && let Some(record) = edge.next_record(key.step)
            && lanes.send_short(peer, record, tensor)
        {
            edge.left();
            return true;
        }
        // The edge may be new, and the value may never be sent.
        entry.out.forget(index);
        false
    }

    /// Gives the value of an expected record to its receive, if the record is the next message of
    /// the peer.
    #[inline(always)] // on the short path
    pub fn take_short(
        &mut self,
        lanes: &mut impl Lanes,
        expected: &ExpectedRecord,
        receive: &mut DirectReceive,
    ) -> ShortTake<()> {
        let ExpectedRecord { peer, edge, record, stays_settled } = *expected;
        let taken = lanes.take_short(peer, record, receive);
        if taken == ShortTake::Taken(()) {
            if let DirectReceive::Received(received, _) = receive {
                count_received(lanes, received);
            }
            let incoming = &mut self.peers[peer.0 as usize].incoming;
            incoming.took(edge, stays_settled, &mut |message| lanes.to_sender(peer, message));
        }
        taken
    }
}
