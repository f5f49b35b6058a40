//! A hostile peer for tests and fuzzing: it shakes hands like an honest one, and then writes
//! anything into its segment.

use super::pool;
use crate::fabric::shm::connect::address;
use crate::fabric::shm::connect::address::ShmAddress;
use crate::fabric::shm::connect::handshake::{self, LocalSide};
use crate::fabric::shm::connect::socket::{Deadline, listen};
use crate::fabric::shm::memory::layout::SegmentLayout;
use crate::fabric::shm::memory::order::ORDER_WORDS;
use crate::fabric::shm::memory::ring;
use crate::fabric::shm::memory::ring::{Consumer, Producer};
use crate::fabric::shm::memory::segment::{OwnSegment, OwnWords, PeerSegment, PeerWords};
use crate::fabric::shm::wakeup::doorbells::PeerDoorbells;
use crate::fabric::shm::{ShmFabric, ShmOptions, ShmPort};
use crate::fabric::{Endpoint, Fabric, FabricError, LinkId, LinkOptions, Port, Role};
use crate::memory::Pool;
use rustix::fd::AsFd;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(10);
pub(crate) const OPTIONS: LinkOptions = LinkOptions { depth: 8, receives: 0, generation: 0 };

/// The hostile side of a link.
pub(crate) struct HostilePeer {
    pub out: Producer<OwnWords, PeerWords>,
    pub inc: Consumer<PeerWords, OwnWords>,
    pub ring: OwnWords,
    pub line: OwnWords,
    pub state: OwnWords,
    pub loan_table: OwnWords,
    /// Doorbells of the honest side.
    pub doorbells: PeerDoorbells,
}

/// The honest side of a link.
pub(crate) struct HonestPeer {
    pub pool: Pool,
    pub port: ShmPort,
    pub link: LinkId,
}

/// The fabric and the pools that several links share.
pub(crate) struct HostileSetup {
    fabric: ShmFabric,
    pub pool: Pool,
    pub hostile_pool: Pool,
}

impl HostileSetup {
    pub fn new() -> Self {
        let (pool, hostile_pool) = (pool(), pool());
        let fabric = ShmFabric::new(&pool, ShmOptions::default()).expect("a fabric");
        HostileSetup { fabric, pool, hostile_pool }
    }

    /// Takes the peers of all links that have ended for dead.
    pub fn forget_peers(&self) {
        self.fabric.shared.orphans.forget();
    }
}

/// Makes a link. The hostile sides of earlier ones read nothing any more.
pub(crate) fn connect_hostile_peer(setup: &HostileSetup) -> (HonestPeer, HostilePeer) {
    setup.forget_peers();
    try_to_connect(setup).expect("accepted")
}

/// Makes a link, if the honest side does not refuse it.
pub(crate) fn try_to_connect(setup: &HostileSetup) -> Result<(HonestPeer, HostilePeer), FabricError> {
    let HostileSetup { fabric, pool, hostile_pool } = setup;
    let layout = SegmentLayout::new(&OPTIONS).expect("in range");
    let endpoint = fabric.endpoint(0, &OPTIONS).expect("an endpoint");
    let segment = OwnSegment::new(&layout).expect("a segment");
    let shape = layout.ring_shape();
    ring::prepare(&segment.words(layout.ring()), &segment.words(layout.line()), shape);
    let token = address::draw_token().expect("random bytes");
    let (host, uid) = (fabric.shared.host, fabric.shared.uid);
    let hostile = ShmAddress { host, uid, pid: std::process::id(), token };
    let _listener = listen(&hostile.socket(host).expect("a name")).expect("a socket");
    let side = LocalSide {
        options: &OPTIONS,
        layout: &layout,
        token,
        host,
        uid,
        segment: segment.file(),
        doorbells: fabric.shared.doorbells.file(),
        has_barriers: true,
        regions: vec![(0, hostile_pool.region().len(), hostile_pool.region().fd())],
    };
    let honest = ShmAddress::from_bytes(endpoint.address()).expect("an address");
    let (link, peer) = std::thread::scope(|scope| {
        let link = scope.spawn(|| endpoint.connect(Role::Acceptor, &hostile.to_bytes(), TIMEOUT));
        let peer = handshake::initiate(&side, &honest, Deadline::after(TIMEOUT));
        (link.join().expect("no panic"), peer.map_err(|e| e.to_string()).expect("reached"))
    });
    let link = link?;
    let peer = PeerSegment::map(peer.segment.as_fd(), &layout).expect("mapped");
    let mut port = fabric.port().expect("a port");
    let link = port.attach(link).expect("room");
    port.post_receives(link, 1000);
    let hostile = HostilePeer {
        out: Producer::new(segment.words(layout.ring()), peer.words(layout.line()), shape),
        inc: Consumer::new(peer.words(layout.ring()), segment.words(layout.line()), shape),
        ring: segment.words(layout.ring()),
        line: segment.words(layout.line()),
        state: segment.words(layout.state()),
        loan_table: segment.words(layout.loan_table()),
        doorbells: PeerDoorbells::map(fabric.shared.doorbells.file()).expect("mapped"),
    };
    Ok((HonestPeer { pool: pool.clone(), port, link }, hostile))
}

impl HostilePeer {
    pub fn post_words(&mut self, words: [u64; ORDER_WORDS]) {
        assert_eq!(self.out.has_room(), Ok(true));
        self.out.post(self.inc.ack(), &words, &[]);
    }
}
