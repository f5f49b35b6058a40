//! The connections of a poller with its peers.

use super::{
    Error, LinkTag, LostPeer, Members, PeerEnd, PeerIndex, PeerObserver, ProbeCallback, RemoteSettings,
    WaitReports,
};
use crate::fabric::{LinkFailure, LinkId, Port};
use crate::link::{LinkIdentity, LinkSettings, Links};
use crate::telemetry::{Counter, CountersWriter, FlightLog, FlightRecord};
use crate::wire::{Incarnation, LossCause, TaskId};
use foldhash::HashMap;
use std::sync::Arc;

/// The connections of a poller with its peers, and the losses of peers.
pub(super) struct Connections {
    me: TaskId,
    incarnation: u64,
    members: Members,
    link: LinkSettings,
    is_loss_fatal: bool,
    peers: Vec<PeerConnections>,
    /// The flight records of the last link with each peer that has ended. Apart from the peers,
    /// whose table each send reads.
    ended: Vec<Option<FlightLog>>,
    /// The peer of each link, of earlier incarnations too.
    by_link: HashMap<LinkId, PeerIndex>,
    observer: Arc<dyn PeerObserver>,
}

#[derive(Default)]
struct PeerConnections {
    /// The present link, or the attempt at one.
    present: Option<PeerConnection>,
    /// The end of the last link that was up, or of an incarnation without one, until another link
    /// is up.
    lost: Option<(LinkTag, LossCause)>,
    /// The incarnation of the last link that was up: what came and was not taken is of it.
    last_up: Option<Incarnation>,
}

struct PeerConnection {
    link: LinkId,
    tag: LinkTag,
    stage: ConnectionStage,
    /// The cause of the link's end, if this side knows it better than the fabric.
    close_reason: Option<LossCause>,
}

/// The stage of a link. The end of a link that was never up is not a loss: it is tried again.
enum ConnectionStage {
    Probing(ProbeCallback),
    Probed,
    Up,
}

/// A connection that has ended. Its calls fail with the error, then [`Connections::ended`] notes
/// the end.
pub(super) struct EndedConnection {
    /// The id of the link.
    pub link: LinkId,
    /// The peer of the link.
    pub peer: PeerIndex,
    /// The error of calls that need the link.
    pub error: Error,
    tag: LinkTag,
    stage: ConnectionStage,
    cause: LossCause,
}

/// The loss of a peer, to be reported by [`Connections::report`].
pub(super) struct UnreportedLoss {
    /// What is reported.
    pub lost: LostPeer,
    /// Whether the loss ends every call with every peer.
    pub is_fatal: bool,
}

impl Connections {
    pub fn new(
        me: TaskId,
        incarnation: u64,
        members: Members,
        settings: &RemoteSettings,
        observer: Arc<dyn PeerObserver>,
    ) -> Self {
        Connections {
            me,
            incarnation,
            peers: members.all().iter().map(|_| PeerConnections::default()).collect(),
            ended: vec![None; members.all().len()],
            members,
            link: settings.link.clone(),
            is_loss_fatal: settings.peer_loss_is_fatal,
            by_link: HashMap::default(),
            observer,
        }
    }

    /// The peers of the node.
    pub fn members(&self) -> &Members {
        &self.members
    }

    /// The present link with a peer, up or not.
    #[inline(always)] // on the short path
    pub fn present(&self, peer: PeerIndex) -> Option<LinkId> {
        self.peers[peer.0 as usize].present.as_ref().map(|present| present.link)
    }

    /// The peer of a present link.
    #[inline]
    pub fn peer_of(&self, link: LinkId) -> Option<PeerIndex> {
        let peer = *self.by_link.get(&link)?;
        (self.present(peer) == Some(link)).then_some(peer)
    }

    /// Takes the connection that a new link replaces.
    pub fn replaced(&mut self, peer: PeerIndex, by: LinkTag) -> Option<EndedConnection> {
        let old = self.peer(peer).present.take()?;
        let cause = old.close_reason.unwrap_or_else(|| match old.tag.incarnation == by.incarnation {
            true => LossCause::Closed(format!("the link was made again, as generation {}", by.generation)),
            false => LossCause::replaced(by.incarnation),
        });
        let error = self.lost_error(peer, old.tag, &cause);
        Some(EndedConnection { link: old.link, peer, error, tag: old.tag, stage: old.stage, cause })
    }

    /// Closes the link of a replaced connection.
    pub fn close<P: Port>(&self, links: &mut Links<P>, ended: &EndedConnection) {
        links.fail(ended.link, LinkFailure::Local(ended.cause.to_string()));
    }

    /// Adds a new link. The peer has no present one.
    pub fn attach<P: Port>(
        &mut self,
        links: &mut Links<P>,
        (peer, tag): (PeerIndex, LinkTag),
        link: P::Link,
        done: ProbeCallback,
    ) {
        let identity = LinkIdentity {
            local: self.me.clone(),
            local_incarnation: self.incarnation,
            peer: self.members.task(peer).clone(),
            peer_incarnation: tag.incarnation.get(),
        };
        match links.attach(link, identity, self.link.clone()) {
            Ok(link) => {
                let stage = ConnectionStage::Probing(done);
                self.peer(peer).present = Some(PeerConnection { link, tag, stage, close_reason: None });
                self.by_link.insert(link, peer);
            }
            Err(error) => done(Err(error.to_string())),
        }
    }

    /// Notes that a link works in both directions.
    pub fn probed(&mut self, link: LinkId) {
        let Some(peer) = self.peer_of(link) else { return };
        let Some(present) = &mut self.peer(peer).present else { return };
        match std::mem::replace(&mut present.stage, ConnectionStage::Probed) {
            ConnectionStage::Probing(done) => done(Ok(())),
            stage => present.stage = stage,
        }
    }

    /// Notes that both sides have said that the link works. Returns whether it is up now; `Some`
    /// says whether the last link that was up was of an earlier life of the peer.
    pub fn ready(&mut self, peer: PeerIndex, tag: LinkTag) -> Option<bool> {
        let entry = self.peer(peer);
        match &mut entry.present {
            Some(present) if present.tag == tag && present.close_reason.is_none() => {
                present.stage = ConnectionStage::Up
            }
            _ => {
                self.observer.failed_before_ready(peer, tag);
                return None;
            }
        }
        entry.lost = None;
        Some(entry.last_up.replace(tag.incarnation).is_some_and(|life| life != tag.incarnation))
    }

    /// Reports that a link is up.
    pub fn report_up(&self, peer: PeerIndex, tag: LinkTag) {
        self.observer.up(peer, tag);
    }

    /// Notes the end of a link. `None` if the link was replaced.
    pub fn down(&mut self, link: LinkId, failure: LinkFailure) -> Option<EndedConnection> {
        let peer = self.peer_of(link);
        self.by_link.remove(&link);
        let peer = peer?;
        let PeerConnection { link, tag, stage, close_reason } = self.peer(peer).present.take()?;
        let cause = match (close_reason, failure) {
            // The peer closed the link before this side did. Its reason, which it may also tell, is
            // about this process: that this one was silent, for example.
            (Some(LossCause::Silent { .. } | LossCause::Closed(_)) | None, LinkFailure::Closed) => {
                LinkFailure::Closed.into_loss()
            }
            // No end of the peer that was told hides what this side has found.
            (_, failure) if failure.is_found_here() => failure.into_loss(),
            (Some(cause), _) => cause,
            (None, failure) => failure.into_loss(),
        };
        let error = self.lost_error(peer, tag, &cause);
        Some(EndedConnection { link, peer, error, tag, stage, cause })
    }

    /// Notes the end of a connection. A failed attempt is tried again, unless the peer is gone.
    pub fn ended(&mut self, counters: &CountersWriter, ended: EndedConnection) -> Option<UnreportedLoss> {
        let EndedConnection { peer, tag, stage, cause, .. } = ended;
        let was_up = matches!(stage, ConnectionStage::Up);
        if let ConnectionStage::Probing(done) = stage {
            done(Err(cause.to_string()));
        }
        match was_up || matches!(cause, LossCause::Died(_)) {
            true => self.note_loss(counters, peer, tag, cause),
            false => None,
        }
    }

    /// Notes that a peer is lost. Returns what is to be reported.
    pub fn note_loss(
        &mut self,
        counters: &CountersWriter,
        peer: PeerIndex,
        tag: LinkTag,
        cause: LossCause,
    ) -> Option<UnreportedLoss> {
        // One loss is reported for each incarnation. Older losses are ignored.
        if let Some((lost, _)) = &self.peer(peer).lost
            && (lost.incarnation == tag.incarnation || lost.generation > tag.generation)
        {
            return None;
        }
        counters.increment(Counter::PeersLost);
        let error = self.lost_error(peer, tag, &cause);
        let is_fatal = self.is_loss_fatal && !cause.is_clean();
        self.peer(peer).lost = Some((tag, cause));
        let flight = self.ended[peer.0 as usize].clone().filter(|log| log.generation == tag.generation);
        Some(UnreportedLoss { lost: LostPeer { peer, tag, error, values: 0, flight }, is_fatal })
    }

    /// Keeps the flight records of a connection that has ended, in place of earlier ones.
    pub fn keep_records(&mut self, of: &EndedConnection, records: (Vec<FlightRecord>, u64)) {
        let log = self.flight_log(of.peer, of.tag, records);
        self.ended[of.peer.0 as usize] = Some(log);
    }

    fn flight_log(
        &self,
        peer: PeerIndex,
        tag: LinkTag,
        (records, dropped): (Vec<FlightRecord>, u64),
    ) -> FlightLog {
        let LinkTag { incarnation, generation } = tag;
        FlightLog { peer: self.members.task(peer).clone(), incarnation, generation, records, dropped }
    }

    /// The flight records of each peer's present link and of its last one.
    pub fn flight_logs<P: Port>(&self, links: &Links<P>) -> Vec<FlightLog> {
        let of = |(index, (entry, ended)): (u32, (&PeerConnections, &Option<FlightLog>))| {
            let present = entry.present.as_ref().map(|present| {
                self.flight_log(PeerIndex(index), present.tag, links.flight_records(present.link))
            });
            ended.clone().into_iter().chain(present)
        };
        (0..).zip(self.peers.iter().zip(&self.ended)).flat_map(of).collect()
    }

    /// Reports calls that have waited for too long.
    pub fn report_hung(&self, waits: &WaitReports) {
        self.observer.hung(waits);
    }

    /// See [`PeerObserver::first_cause`].
    pub fn first_cause(&self, of: &LostPeer) -> Option<Error> {
        self.observer.first_cause(of)
    }

    /// Reports a loss.
    pub fn report(&self, loss: &UnreportedLoss) {
        self.observer.down(&loss.lost);
    }

    fn lost_error(&self, peer: PeerIndex, tag: LinkTag, cause: &LossCause) -> Error {
        let (peer, cause) = (self.members.task(peer).clone(), cause.clone());
        Error::PeerLost { peer, incarnation: tag.incarnation, cause }
    }

    /// Notes why a link is to be closed. Returns it with its failure; `None` after a command about
    /// an earlier link.
    pub fn closing(
        &mut self,
        peer: PeerIndex,
        tag: LinkTag,
        cause: LossCause,
    ) -> Option<(LinkId, LinkFailure)> {
        let present = self.peer(peer).present.as_mut().filter(|present| present.tag == tag)?;
        let why = LinkFailure::Local(cause.to_string());
        // The first cause is kept.
        present.close_reason.get_or_insert(cause);
        Some((present.link, why))
    }

    /// Notes why the peer of a link that is closed has ended, if this node was told. A peer tells
    /// its end before it closes its links, but the command about it may still be queued. Returns
    /// the links of peers whose ends were told earlier: one of them may be the cause.
    #[cold]
    pub fn ended_before(&mut self, closed: LinkId) -> Vec<(LinkId, LinkFailure)> {
        let mut earlier = Vec::new();
        for PeerEnd { peer, tag, cause } in self.observer.told_ends() {
            let Some(present) = self.peer(peer).present.as_mut() else { continue };
            // A peer that was given up may have come back.
            if present.tag.incarnation != tag.incarnation || present.tag.generation > tag.generation {
                continue;
            }
            if present.link == closed {
                // The end that was told says more than the close of the link.
                present.close_reason = Some(cause);
                break;
            }
            earlier.push((present.link, LinkFailure::Local(cause.to_string())));
            present.close_reason.get_or_insert(cause);
        }
        earlier
    }

    /// The link with the incarnation of this tag, or the tag, and whether that link is up; `None`
    /// if another incarnation has one.
    pub fn of_life(&self, peer: PeerIndex, tag: LinkTag) -> Option<(LinkTag, bool)> {
        match &self.peers[peer.0 as usize].present {
            None => Some((tag, false)),
            Some(present) if present.tag.incarnation != tag.incarnation => None,
            Some(present) => Some((present.tag, matches!(present.stage, ConnectionStage::Up))),
        }
    }

    fn peer(&mut self, peer: PeerIndex) -> &mut PeerConnections {
        &mut self.peers[peer.0 as usize]
    }
}

/// Counts the values that had left for a peer whose link has ended, and returns their number. A
/// peer that stopped cleanly has lost none.
pub fn count_lost_values(counters: &CountersWriter, error: &Error, values: u64) -> u64 {
    match error {
        Error::PeerLost { cause, .. } if !cause.is_clean() => {
            counters.add(Counter::ValuesLost, values);
            values
        }
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Generation;

    struct Nobody;

    impl PeerObserver for Nobody {
        fn up(&self, _: PeerIndex, _: LinkTag) {}
        fn down(&self, _: &LostPeer) {}
        fn failed_before_ready(&self, _: PeerIndex, _: LinkTag) {}
    }

    const PEER: PeerIndex = PeerIndex(1);

    fn connections() -> Connections {
        let members = Members::new([0, 1].map(|task| TaskId::new("w", task).expect("a task")).to_vec());
        let link =
            LinkSettings { small_tensor_bytes: 128, validate: false, borrow: true, max_ready_bytes: 1 << 16 };
        let settings = RemoteSettings::new(link, 8);
        Connections::new(members.task(PeerIndex(0)).clone(), 1, members, &settings, Arc::new(Nobody))
    }

    fn tag(life: u64, generation: u64) -> LinkTag {
        let incarnation = Incarnation::new(life).expect("not 0");
        LinkTag { incarnation, generation: Generation::from(generation) }
    }

    /// Says whether a link that is up now follows one with an earlier life.
    fn is_up_after_earlier_life(connections: &mut Connections, tag: LinkTag) -> bool {
        let (stage, close_reason) = (ConnectionStage::Probed, None);
        connections.peer(PEER).present = Some(PeerConnection { link: LinkId(1), tag, stage, close_reason });
        connections.ready(PEER, tag).expect("it is up")
    }

    #[test]
    fn a_life_that_counted_as_dead_before_its_link_is_not_the_one_before() {
        let (mut connections, counters) = (connections(), CountersWriter::new());
        let lose = |connections: &mut Connections, tag| {
            connections.peer(PEER).present = None;
            let cause = LossCause::Died("a test".to_owned());
            connections.note_loss(&counters, PEER, tag, cause).is_some()
        };
        assert!(!is_up_after_earlier_life(&mut connections, tag(7, 1)), "the first life");
        assert!(lose(&mut connections, tag(7, 1)));
        assert!(lose(&mut connections, tag(8, 1)), "it has no link yet, and is heard again");
        assert!(is_up_after_earlier_life(&mut connections, tag(8, 2)));
        assert!(lose(&mut connections, tag(8, 2)));
        assert!(!is_up_after_earlier_life(&mut connections, tag(8, 3)), "the same life");
    }
}
