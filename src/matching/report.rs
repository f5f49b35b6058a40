//! Reports of the edges.

use super::{Lanes, Matching, WaitingReceive};
use crate::link::windows::{ArrivedBytes, LinkFigures, ReadyValue, WindowArrival};
use crate::link::{EdgeKey, Value};
use crate::matching::edge_report::{EdgeReport, EdgeReports, EdgeWait};
use crate::matching::untaken::LostEdge;
use crate::matching::{PeerIndex, Untaken, UntakenEdge};
use crate::protocol::{InEdges, InState, OutEdges};
use crate::wire::{EdgeId, EdgeSide};

impl Matching {
    /// Adds the reports of the edges of a peer.
    pub fn report(&self, peer: PeerIndex, link: &LinkFigures, limit: usize, reports: &mut EdgeReports) {
        let entry = &self.peers[peer.0 as usize];
        for (key, edge) in entry.out.edges() {
            let number = edge.id().map(|EdgeId { number, .. }| number);
            let queued = number.and_then(|number| link.queued.get(&number)).map_or(0, |queued| queued.count);
            let waiting = edge.waiting().count();
            let report = EdgeReport {
                key: key.clone(),
                side: EdgeSide::Sender,
                number,
                credit: edge.credit(),
                window: None,
                values: edge.sent(),
                waiting,
                queued,
                held: 0,
                needed: edge.needs(),
                wait: why_values_wait(waiting, queued, number, entry.down.is_some()),
                bytes: edge_bytes(key, edge.heap_bytes() + OutEdges::<EdgeKey, Value, ()>::EDGE),
                tensor_bytes: edge.waiting().map(|(_, value)| bytes_of(value)).sum(),
            };
            reports.add(report, limit);
        }
        for (_, key, edge) in entry.incoming.edges() {
            let number = match edge.state() {
                InState::Announced(edge) | InState::Retiring(edge) => Some(edge.number),
                InState::Unannounced | InState::Refused(_) => None,
            };
            let waiting = edge.waiters().count();
            let own =
                InEdges::<EdgeKey, WindowArrival, u32, ()>::EDGE + waiting * size_of::<WaitingReceive>();
            let report = EdgeReport {
                key: key.clone(),
                side: EdgeSide::Receiver,
                number,
                credit: edge.credit(),
                window: Some(edge.window()),
                values: edge.came(),
                waiting,
                queued: 0,
                held: edge.held().len(),
                needed: edge.needs(),
                wait: why_receives_wait(waiting, edge.state(), entry.down.is_some()),
                bytes: edge_bytes(key, edge.heap_bytes() + own),
                tensor_bytes: edge.held().iter().map(|held| bytes_here(&held.value)).sum(),
            };
            reports.add(report, limit);
        }
        reports.link_bytes += link.bytes;
    }

    /// Why a receive waits on an edge from a peer.
    pub(super) fn receive_wait(&self, peer: PeerIndex, edge: u32) -> Option<EdgeWait> {
        let entry = &self.peers[peer.0 as usize];
        why_receives_wait(1, entry.incoming.edge_at(edge)?.state(), entry.down.is_some())
    }

    /// Why values wait on an edge to a peer, if any do.
    pub(super) fn send_wait(
        &self,
        peer: PeerIndex,
        waiting: usize,
        queued: usize,
        number: Option<u32>,
    ) -> Option<EdgeWait> {
        why_values_wait(waiting, queued, number, self.peers[peer.0 as usize].down.is_some())
    }

    /// Asks the peers to tell which values they take, from now until they have taken those that
    /// have left.
    pub fn flush(&mut self, lanes: &mut impl Lanes) {
        for (entry, peer) in self.peers.iter_mut().zip((0..).map(PeerIndex)) {
            entry.out.flush(&mut |message| _ = lanes.to_receiver(peer, message));
        }
    }

    /// The values that no receive is known to have taken, and those that were lost after the first
    /// `since` losses.
    pub fn untaken(&self, since: Option<u64>) -> Untaken {
        let mut untaken = Untaken::default();
        for entry in &self.peers {
            for (key, edge) in entry.out.edges() {
                let (waiting, left) = (edge.waiting().len() as u64, edge.untaken());
                if waiting + left > 0 {
                    let edge = UntakenEdge::new(key.clone(), entry.down.is_none());
                    untaken.edges.push(UntakenEdge { waiting, left, ..edge });
                }
            }
        }
        for LostEdge { peer, key, values } in since.into_iter().flat_map(|since| self.lost.since(since)) {
            let is_linked = self.peers[peer.0 as usize].down.is_none();
            untaken.edges.push(UntakenEdge { lost: *values, ..UntakenEdge::new(key.clone(), is_linked) });
        }
        untaken
    }

    /// The number of losses so far.
    pub fn losses(&self) -> u64 {
        self.lost.count()
    }
}

fn why_values_wait(waiting: usize, queued: usize, number: Option<u32>, is_down: bool) -> Option<EdgeWait> {
    match number {
        _ if waiting + queued == 0 => None,
        _ if is_down => Some(EdgeWait::NoLink),
        _ if waiting == 0 => Some(EdgeWait::NoRoom),
        None => Some(EdgeWait::NotAnnounced),
        Some(_) => Some(EdgeWait::NoCredit),
    }
}

fn why_receives_wait<E>(waiting: usize, state: &InState<E>, is_down: bool) -> Option<EdgeWait> {
    match state {
        _ if waiting == 0 => None,
        _ if is_down => Some(EdgeWait::NoLink),
        InState::Unannounced | InState::Retiring(_) => Some(EdgeWait::NoNumber),
        InState::Announced(_) | InState::Refused(_) => Some(EdgeWait::NoValue),
    }
}

/// The memory of an edge with its name, which may be shared with the handle of the program.
fn edge_bytes(key: &EdgeKey, own: usize) -> u64 {
    (own + key.name.memory()) as u64
}

fn bytes_of(value: &Value) -> u64 {
    match value {
        Value::Tensor(tensor) => tensor.meta().bytes(),
        Value::Dead => 0,
    }
}

/// The bytes of a value that lie in this process.
fn bytes_here(value: &WindowArrival) -> u64 {
    let WindowArrival::Ready(ReadyValue::Tensor(tensor)) = value else { return 0 };
    match &tensor.bytes {
        ArrivedBytes::Landed(tensor)
        | ArrivedBytes::Written { tensor, .. }
        | ArrivedBytes::Eager { tensor, .. } => tensor.meta().bytes(),
        ArrivedBytes::Kept { bytes, .. } => bytes.len() as u64,
        ArrivedBytes::Lent { .. } => 0,
    }
}
