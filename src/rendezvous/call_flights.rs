//! The flight recorders of the links whose tensors travel by calls.

use crate::matching::{LinkTag, Members, PeerIndex};
use crate::telemetry::{FlightClock, FlightEvent, FlightLog, FlightRecorder};

/// The recorders of all peers.
pub(super) struct CallFlights {
    members: Members,
    clock: FlightClock,
    peers: Vec<CallFlight>,
}

/// The records of the present link with a peer, and of the last one that has ended.
#[derive(Default)]
struct CallFlight {
    present: Option<(LinkTag, FlightRecorder)>,
    ended: Option<FlightLog>,
}

impl CallFlights {
    /// No records yet. The clock says the time of each.
    pub fn new(members: Members, clock: FlightClock) -> Self {
        let peers = members.all().iter().map(|_| CallFlight::default()).collect();
        CallFlights { members, clock, peers }
    }

    /// A link with a peer is up.
    pub fn up(&mut self, peer: PeerIndex, tag: LinkTag) {
        self.end(peer);
        let mut recorder = FlightRecorder::new(self.clock.clone());
        recorder.record(FlightEvent::Up);
        self.peers[peer.0 as usize].present = Some((tag, recorder));
    }

    /// Records an event of the present link with a peer, if there is one.
    pub fn record(&mut self, peer: PeerIndex, event: FlightEvent) {
        if let Some((_, recorder)) = &mut self.peers[peer.0 as usize].present {
            recorder.record(event);
        }
    }

    /// Records an event of all present links.
    pub fn record_all(&mut self, event: FlightEvent) {
        let present = self.peers.iter_mut().filter_map(|peer| peer.present.as_mut());
        present.for_each(|(_, recorder)| recorder.record(event));
    }

    /// The link with a peer has ended, if there is one. Returns its records.
    pub fn end(&mut self, peer: PeerIndex) -> Option<FlightLog> {
        let (tag, mut recorder) = self.peers[peer.0 as usize].present.take()?;
        recorder.record(FlightEvent::Down);
        let log = self.log(peer, tag, &recorder);
        self.peers[peer.0 as usize].ended = Some(log.clone());
        Some(log)
    }

    /// The records of each peer's last link that has ended, and of its present one.
    pub fn logs(&self) -> Vec<FlightLog> {
        let of = |(index, flight): (u32, &CallFlight)| {
            let present = flight.present.as_ref();
            let present = present.map(|(tag, recorder)| self.log(PeerIndex(index), *tag, recorder));
            flight.ended.clone().into_iter().chain(present)
        };
        (0..).zip(&self.peers).flat_map(of).collect()
    }

    fn log(&self, peer: PeerIndex, tag: LinkTag, recorder: &FlightRecorder) -> FlightLog {
        let LinkTag { incarnation, generation } = tag;
        let (records, dropped) = recorder.records();
        FlightLog { peer: self.members.task(peer).clone(), incarnation, generation, records, dropped }
    }
}
