//! The links of a poller, as matching uses them.

use super::Lanes;
use super::connections::Connections;
use crate::fabric::{Port, ShortTake};
use crate::link::windows::{LandingRefused, QueuedValues, WindowRefusal};
use crate::link::{DirectReceive, EdgeKey, Links, Value};
use crate::matching::{GrantedBytes, PeerIndex};
use crate::memory::{Pool, Tensor, TensorMut};
use crate::protocol::{Record, ToReceiver, ToSender};
use crate::telemetry::{CountersWriter, FlightEvent};
use crate::wire::{EdgeId, Immediate, Time};
use foldhash::HashMap;

/// The links of a poller, as the lanes of its matching.
pub(crate) struct LinkLanes<'a, P: Port> {
    pub(super) links: &'a mut Links<P>,
    pub(super) connections: &'a Connections,
}

impl<P: Port> Lanes for LinkLanes<'_, P> {
    fn keeps(&mut self, peer: PeerIndex, value: &Value) -> bool {
        self.connections.present(peer).is_some_and(|link| self.links.offers(link, value))
    }

    fn pool(&self) -> &Pool {
        self.links.pool()
    }

    fn counters(&self) -> &CountersWriter {
        self.links.counters()
    }

    #[cold]
    fn most_granted(&self) -> Option<GrantedBytes> {
        self.links.most_granted().map(|(peer, bytes)| GrantedBytes { peer: peer.clone(), bytes })
    }

    fn begin_batch(&mut self) {
        self.links.begin_batch();
    }

    fn record(&mut self, peer: PeerIndex, event: FlightEvent) {
        if let Some(link) = self.connections.present(peer) {
            self.links.record(link, event);
        }
    }

    fn queued(&self, peer: PeerIndex) -> HashMap<u32, QueuedValues> {
        let link = self.connections.present(peer);
        link.map_or_else(HashMap::default, |link| self.links.window_figures(link).queued)
    }

    fn stuck_since(&mut self, peer: PeerIndex, now: Time) -> Option<Time> {
        self.links.stuck_since(self.connections.present(peer)?, now)
    }

    fn handle_polled(&mut self) -> bool {
        self.links.handle_polled()
    }

    #[inline]
    fn to_sender(&mut self, peer: PeerIndex, message: ToSender<EdgeKey>) {
        if let Some(link) = self.connections.present(peer) {
            self.links.window_to_sender(link, message);
        }
    }

    #[inline]
    fn to_receiver(&mut self, peer: PeerIndex, message: ToReceiver<Value, WindowRefusal>) -> bool {
        let link = self.connections.present(peer);
        link.is_some_and(|link| self.links.window_to_receiver(link, message))
    }

    #[inline(always)] // on the short path
    fn send_short(&mut self, peer: PeerIndex, record: Record<()>, tensor: &mut Option<Tensor>) -> bool {
        let Record { edge, n, step, .. } = record;
        match self.connections.present(peer) {
            Some(link) => self.links.send_short(link, edge, n, step, tensor),
            None => false,
        }
    }

    fn land(
        &mut self,
        peer: PeerIndex,
        offer: u32,
        target: TensorMut,
    ) -> Result<Immediate, (LandingRefused, TensorMut)> {
        match self.connections.present(peer) {
            Some(link) => self.links.land(link, offer, target),
            None => Err((LandingRefused::Down, target)),
        }
    }

    fn decline(&mut self, peer: PeerIndex, offer: u32) {
        if let Some(link) = self.connections.present(peer) {
            self.links.decline(link, offer);
        }
    }

    fn make_ready(&mut self, peer: PeerIndex, edge: EdgeId) {
        if let Some(link) = self.connections.present(peer) {
            self.links.make_ready(link, edge);
        }
    }

    fn may_get_ready(&mut self, peer: PeerIndex, edge: EdgeId) -> bool {
        self.connections.present(peer).is_some_and(|link| self.links.may_get_ready(link, edge))
    }

    fn withdraw(&mut self, peer: PeerIndex, edge: EdgeId) {
        if let Some(link) = self.connections.present(peer) {
            self.links.withdraw(link, edge);
        }
    }

    fn send_packed(&mut self, peer: PeerIndex, record: Record<()>, tensor: &mut Option<Tensor>) -> bool {
        self.connections.present(peer).is_some_and(|link| self.links.send_packed(link, record, tensor))
    }

    #[inline(always)] // on the short path
    fn take_short(
        &mut self,
        peer: PeerIndex,
        record: Record<()>,
        receive: &mut DirectReceive,
    ) -> ShortTake<()> {
        let Record { edge, n, step, .. } = record;
        match self.connections.present(peer) {
            Some(link) => self.links.take_short(link, edge, n, step, receive),
            None => ShortTake::Other,
        }
    }
}
