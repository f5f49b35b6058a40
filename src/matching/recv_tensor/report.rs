//! Reports of edges, of waits, and of values that were not taken.

use super::RecvTensors;
use super::inbound::HeldValue;
use crate::link::{EdgeKey, TensorKey, Value};
use crate::matching::untaken::LostEdge;
use crate::matching::{
    EdgeReport, EdgeReports, EdgeWait, Error, PeerIndex, Untaken, UntakenEdge, WaitReport, WaitReports,
};
use crate::wire::{EdgeSide, Time};
use std::collections::BTreeMap;

/// Waits that the log has of one report, at most.
pub(super) const LOGGED: usize = 8;

/// Why a receive waits.
pub(super) fn receive_wait(down: &Option<Error>) -> EdgeWait {
    if down.is_some() { EdgeWait::NoLink } else { EdgeWait::NoValue }
}

pub(super) fn of_receive(key: &TensorKey, begun: Time, now: Time, wait: EdgeWait) -> WaitReport {
    WaitReport::of_receive(key, begun, now, wait)
}

/// Why a value waits.
fn send_wait(down: &Option<Error>) -> EdgeWait {
    if down.is_some() { EdgeWait::NoLink } else { EdgeWait::NotAnnounced }
}

impl RecvTensors {
    /// The edges on which something waits or is held, `limit` at most.
    pub fn edges(&self, limit: usize) -> EdgeReports {
        let mut reports = EdgeReports::default();
        for peer in &self.peers {
            let mut edges: BTreeMap<(&EdgeKey, bool), EdgeReport> = BTreeMap::new();
            for (key, sent) in peer.out.table.values() {
                let report = edges.entry((&key.edge, true)).or_insert_with(|| empty(&key.edge, true));
                report.waiting += 1;
                report.wait = Some(send_wait(&peer.down));
                report.tensor_bytes += bytes_of(&sent.value);
            }
            for key in peer.out.answered() {
                edges.entry((&key.edge, true)).or_insert_with(|| empty(&key.edge, true)).values += 1;
            }
            for (key, _) in peer.out.table.waiters() {
                edges.entry((&key.edge, true)).or_insert_with(|| empty(&key.edge, true)).needed += 1;
            }
            for (key, queue) in &peer.incoming.keys {
                let report = edges.entry((&key.edge, false)).or_insert_with(|| empty(&key.edge, false));
                report.waiting += queue.waiting.len();
                report.held += usize::from(queue.held.is_some());
                report.tensor_bytes += queue.held.as_ref().map_or(0, HeldValue::bytes);
                if !queue.waiting.is_empty() {
                    report.wait = Some(receive_wait(&peer.down));
                }
            }
            edges.into_values().for_each(|report| reports.add(report, limit));
        }
        reports.cut(limit);
        reports
    }

    /// What waits, `limit` waits at most.
    pub fn waits(&self, now: Time, limit: usize) -> WaitReports {
        let mut reports = WaitReports::default();
        for peer in &self.peers {
            let wait = receive_wait(&peer.down);
            for (key, queue) in &peer.incoming.keys {
                let receives = queue.waiting.iter();
                let of = |begun| of_receive(key, begun, now, wait);
                reports.waits.extend(receives.map(|receive| of(receive.waiter.begun)));
            }
            let mut sends: BTreeMap<&EdgeKey, WaitReport> = BTreeMap::new();
            for (key, sent) in peer.out.table.values() {
                let since = now.since(sent.since);
                let report = sends.entry(&key.edge).or_insert_with(|| WaitReport {
                    key: key.edge.clone(),
                    side: EdgeSide::Sender,
                    step: key.step.into(),
                    calls: 0,
                    since,
                    wait: send_wait(&peer.down),
                });
                report.calls += 1;
                if report.since < since {
                    (report.since, report.step) = (since, key.step.into());
                }
            }
            reports.waits.extend(sends.into_values());
        }
        reports.cut(limit);
        reports
    }

    /// The values that no receive has taken, with the number of losses so far. Those that were lost
    /// after the first `since` losses are among them.
    pub fn untaken(&self, since: Option<u64>) -> (Untaken, u64) {
        let mut untaken = Untaken::default();
        for peer in &self.peers {
            let mut edges: BTreeMap<&EdgeKey, (u64, u64)> = BTreeMap::new();
            peer.out.table.values().for_each(|(key, _)| edges.entry(&key.edge).or_default().0 += 1);
            peer.out.answered().for_each(|key| edges.entry(&key.edge).or_default().1 += 1);
            for (key, (waiting, left)) in edges {
                let edge = UntakenEdge::new(key.clone(), peer.down.is_none());
                untaken.edges.push(UntakenEdge { waiting, left, ..edge });
            }
        }
        for LostEdge { peer, key, values } in since.into_iter().flat_map(|since| self.lost.since(since)) {
            let is_linked = self.is_linked(*peer);
            untaken.edges.push(UntakenEdge { lost: *values, ..UntakenEdge::new(key.clone(), is_linked) });
        }
        (untaken, self.lost.count())
    }

    /// Whether each peer has got the values that were given to it, also those of ended steps.
    pub fn is_flushed(&self) -> bool {
        !self.peers.iter().any(|peer| peer.out.has_answered())
    }

    fn is_linked(&self, peer: PeerIndex) -> bool {
        self.peers[peer.0 as usize].down.is_none()
    }
}

fn empty(key: &EdgeKey, sends: bool) -> EdgeReport {
    EdgeReport {
        key: key.clone(),
        side: if sends { EdgeSide::Sender } else { EdgeSide::Receiver },
        number: None,
        credit: 0,
        window: if sends { None } else { Some(0) },
        values: 0,
        waiting: 0,
        queued: 0,
        held: 0,
        needed: 0,
        wait: None,
        bytes: key.name.memory() as u64,
        tensor_bytes: 0,
    }
}

/// Bytes of a value.
pub(super) fn bytes_of(value: &Value) -> u64 {
    match value {
        Value::Tensor(tensor) => tensor.meta().bytes(),
        Value::Dead => 0,
    }
}
