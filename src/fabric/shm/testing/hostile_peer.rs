//! A peer that shook hands like an honest one, and then can write what it likes into its segment. For tests and fuzzing.

use super::pool;
use crate::fabric::shm::connect::address;
use crate::fabric::shm::connect::address::Address;
use crate::fabric::shm::connect::handshake::{self, Side};
use crate::fabric::shm::connect::socket::{Deadline, listen};
use crate::fabric::shm::memory::layout::Layout;
use crate::fabric::shm::memory::order::BODY_WORDS;
use crate::fabric::shm::memory::ring;
use crate::fabric::shm::memory::ring::{Consumer, HEADER_WORDS, Producer};
use crate::fabric::shm::memory::segment::{OwnSegment, OwnWords, PeerSegment, PeerWords};
use crate::fabric::shm::wakeup::doorbells::PeerDoorbells;
use crate::fabric::shm::{ShmFabric, ShmOptions, ShmPort};
use crate::fabric::{Fabric, Half, Lane, LinkId, LinkOptions, Port, Role};
use crate::memory::Pool;
use rustix::fd::AsFd;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(10);
pub(crate) const OPTIONS: LinkOptions = LinkOptions { lanes: 1, depth: 8, receives: 0, generation: 0 };
pub(crate) const LANE: Lane = Lane(0);

/// The peer.
pub(crate) struct Rogue {
    pub out: Producer<OwnWords, PeerWords>,
    pub inc: Consumer<PeerWords, OwnWords>,
    pub ring: OwnWords,
    pub line: OwnWords,
    pub state: OwnWords,
    pub leases: OwnWords,
    /// The victim's doorbells.
    pub bells: PeerDoorbells,
}

/// The honest side.
pub(crate) struct Victim {
    pub pool: Pool,
    pub port: ShmPort,
    pub link: LinkId,
}

/// Who shares what, link after link.
pub(crate) struct Siege {
    fabric: ShmFabric,
    pub pool: Pool,
    rogue_pool: Pool,
}

impl Siege {
    pub fn new() -> Self {
        let (pool, rogue_pool) = (pool(), pool());
        let fabric = ShmFabric::new(&pool, ShmOptions::default()).expect("a fabric");
        Siege { fabric, pool, rogue_pool }
    }
}

/// A new link.
pub(crate) fn besiege(siege: &Siege) -> (Victim, Rogue) {
    let Siege { fabric, pool, rogue_pool } = siege;
    let layout = Layout::new(&OPTIONS).expect("in range");
    let half = fabric.half(&OPTIONS).expect("a half");
    let segment = OwnSegment::new(&layout).expect("a segment");
    ring::prepare(&segment.words(layout.ring(0)), &segment.words(layout.line(0)));
    let token = address::draw_token().expect("random bytes");
    let (host, uid) = (fabric.shared.host, fabric.shared.uid);
    let rogue = Address { host, uid, pid: std::process::id(), token };
    let _listener = listen(&rogue.socket_name().expect("a name")).expect("a socket");
    let side = Side {
        options: &OPTIONS,
        layout: &layout,
        token,
        uid,
        segment: segment.file(),
        doorbells: fabric.shared.doorbells.file(),
        fenced: true,
        regions: vec![(0, rogue_pool.region().len(), rogue_pool.region_fd())],
    };
    let victim = Address::from_bytes(half.address()).expect("an address");
    let (link, peer) = std::thread::scope(|scope| {
        let link =
            scope.spawn(|| half.connect(Role::Acceptor, &rogue.to_bytes(), PATIENCE).expect("accepted"));
        let peer = handshake::reach(&side, &victim, Deadline::after(PATIENCE));
        (link.join().expect("no panic"), peer.map_err(|e| e.to_string()).expect("reached"))
    });
    let peer = PeerSegment::map(peer.segment.as_fd(), &layout).expect("mapped");
    let mut port = fabric.port().expect("a port");
    let link = port.attach(link).expect("room");
    port.post_receives(link, LANE, 1000);
    let rogue = Rogue {
        out: Producer::new(segment.words(layout.ring(0)), peer.words(layout.line(0))),
        inc: Consumer::new(peer.words(layout.ring(0)), segment.words(layout.line(0))),
        ring: segment.words(layout.ring(0)),
        line: segment.words(layout.line(0)),
        state: segment.words(layout.state()),
        leases: segment.words(layout.leases()),
        bells: PeerDoorbells::map(fabric.shared.doorbells.file()).expect("mapped"),
    };
    (Victim { pool: pool.clone(), port, link }, rogue)
}

impl Rogue {
    pub fn post_words(&mut self, header: [u64; HEADER_WORDS], body: [u64; BODY_WORDS]) {
        assert_eq!(self.out.has_room(), Ok(true));
        let body: Vec<u8> = body.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.out.post(self.inc.ack(), header, &body);
    }
}
