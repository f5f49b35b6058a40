//! Shared memory between processes of one host.
//!
//! Each process makes one segment per link. Only this process can write the segment; the peer maps
//! it read-only. The segment holds the process's ring and the number of orders that the process has
//! consumed. It also holds the loans that were given back, and the state of the process's side.
//! Each process also maps the peer's pool read-only. No process can therefore write into another's
//! memory, and bulk is *pulled*. A write puts an order in the ring that names the sender's bytes.
//! The target's `poll` checks its own grant and copies once. For a loan the target returns the
//! bytes in place.
//!
//! The exception is the doorbells: a few words per port that peers set when an idle link has
//! something. A hostile peer that writes there costs only time.
//!
//! A peer's bytes are copied before they are checked, and checked before they are used. A peer that
//! breaks a rule loses the link and does no damage. In steady state the path of a byte has no
//! system call, lock, allocation or log.
//!
//! | module | |
//! |---|---|
//! | `memory` | shared words, segments and their layout, slots, rings, orders, the link state |
//! | `wakeup` | idle marks, doorbells, heavy barriers, sleeping |
//! | `connect` | addresses, hellos, the handshake over a Unix socket |
//! | `grants`, `bulk`, `regions`, `reads` | memory that a peer may access, and the peer's regions |
//! | `loans` | tensors lent and borrowed, also after their link or process has ended |
//! | `rings`, `execute`, `post`, `link`, `links`, `port` | posting, executing the peer's orders, polling |
//! | `violation` | the rules that a peer can break |
//! | `liveness`, `file_cache` | the watcher of peers' processes; files that several links share |
//!
//! A connected link costs no file descriptor and two mappings. Each side has two segments, its own
//! and the peer's, of 4 KiB and 256 bytes for each hot or deep slot. A peer's process costs its
//! pidfd, and its pool's descriptor until the pool is mapped. Its doorbells take 64 KiB for all
//! links to it. During a handshake each endpoint has about eight descriptors. A port takes 4096
//! links, a fabric 64 ports.

mod bulk;
mod connect;
mod execute;
mod file_cache;
mod grants;
mod link;
mod links;
mod liveness;
mod loans;
mod memory;
mod port;
mod post;
mod reads;
mod regions;
mod rings;
mod short;
#[cfg(any(test, feature = "fuzzing"))]
mod testing;
mod violation;
mod wakeup;

pub use port::{ShmLink, ShmPort};
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub use testing::fuzz;
pub(crate) use wakeup::doorbell::PLACES as MAX_LINKS;
pub use wakeup::sleeper::ShmSleeper;

use super::{
    Endpoint, Fabric, FabricError, FabricKind, LinkFailure, LinkOptions, LoanLimiter, Role, TICKS_PER_GRACE,
};
use crate::memory::Pool;
use crate::wire::own_user;
use connect::address::{self, HostId, ShmAddress};
use connect::handshake::{self, LocalSide, ShmPeer};
use connect::socket::{self, Deadline, Listener};
use file_cache::FileCache;
use link::{LinkParts, ShmLinkInner};
use liveness::LazyWatcher;
use loans::orphans::OrphanedLoans;
use loans::reclaim::{PeerProcess, Reclaimer};
use memory::layout::SegmentLayout;
use memory::ring;
use memory::segment::{OwnSegment, PeerSegment};
use memory::state;
use regions::LazyRegion;
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use std::sync::Arc;
use std::time::Duration;
use wakeup::doorbells::{self, Doorbells, PeerDoorbells};

/// Bytes of this side's part of a link, as far as they are used. The peer has as many.
pub(crate) fn link_bytes(depth: u32) -> u64 {
    let layout = SegmentLayout::new(&LinkOptions { depth, receives: 0, generation: 0 });
    layout.map_or(0, |layout| layout.used_bytes() as u64)
}

/// Bytes of the file of this side's part of a link.
pub(crate) fn segment_bytes(depth: u32) -> u64 {
    let layout = SegmentLayout::new(&LinkOptions { depth, receives: 0, generation: 0 });
    layout.map_or(0, |layout| layout.bytes() as u64)
}

/// Settings of the fabric.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShmOptions {
    /// Bytes that one poll pulls for a link, at least 4096. A larger tensor is pulled over several
    /// polls, so that other links of the poller do not wait.
    pub poll_bytes: u64,
    /// Bytes of the pool that may be lent to peers at a time.
    pub max_lent_bytes: u64,
    /// The time after which a loan counts as overdue, and the time from a peer's death until its
    /// pool is reclaimed. 1 ms to a day.
    pub borrow_grace: Duration,
}

impl Default for ShmOptions {
    fn default() -> Self {
        ShmOptions { poll_bytes: 4 << 20, max_lent_bytes: u64::MAX, borrow_grace: Duration::from_secs(5) }
    }
}

/// A process's access to its peers on the same host.
///
/// All tensors of the fabric are of one pool, which the peers map read-only. The thread that
/// watches the peers' processes starts with the first link, and ends with the port and its links.
pub struct ShmFabric {
    shared: Arc<ShmContext>,
}

struct ShmContext {
    pool: Pool,
    options: ShmOptions,
    host: HostId,
    uid: u32,
    orphans: Arc<OrphanedLoans>,
    limiter: Arc<LoanLimiter>,
    reclaimer: Arc<Reclaimer>,
    watcher: LazyWatcher,
    doorbells: Arc<Doorbells>,
    /// Whether this process takes part in heavy barriers.
    has_barriers: bool,
    peer_doorbells: FileCache<PeerDoorbells>,
    peer_regions: FileCache<LazyRegion>,
}

impl ShmContext {
    /// The address of a new endpoint.
    fn draw_address(&self) -> Result<ShmAddress, FabricError> {
        let token = address::draw_token()?;
        Ok(ShmAddress { host: self.host, uid: self.uid, pid: std::process::id(), token })
    }
}

/// Listens at the address `own` for a peer on the host `from`.
fn listen(own: &ShmAddress, from: HostId) -> Result<Listener, FabricError> {
    let (tried, remedy) = match own.host.has_network_of(from) {
        true => ("listening on an abstract Unix socket", "let the process use Unix sockets"),
        false => ("listening on a Unix socket in /dev/shm", "make room, and let the process write there"),
    };
    own.socket(from).and_then(|name| socket::listen(&name)).map_err(|error| FabricError::Os {
        fabric: FabricKind::Shm,
        tried: tried.into(),
        remedy: match error {
            Errno::MFILE | Errno::NFILE => "raise the limit of open files (ulimit -n)",
            _ => remedy,
        },
        source: error.into(),
    })
}

impl ShmFabric {
    /// A fabric for the tensors of `pool`.
    ///
    /// # Errors
    /// If an option is out of range, `/proc` does not identify the host, or there is no memory or
    /// descriptor for the doorbells.
    pub fn new(pool: &Pool, options: ShmOptions) -> Result<Self, FabricError> {
        if options.poll_bytes < 4096 {
            return Err(FabricError::Option {
                fabric: FabricKind::Shm,
                option: "poll_bytes",
                value: options.poll_bytes,
                allowed: "at least 4096",
            });
        }
        let grace = u64::try_from(options.borrow_grace.as_millis()).unwrap_or(u64::MAX);
        if !(1..=24 * 3_600_000).contains(&grace) {
            return Err(FabricError::Option {
                fabric: FabricKind::Shm,
                option: "borrow_grace",
                value: grace,
                allowed: "1 to 86,400,000 ms",
            });
        }
        let limiter = Arc::new(LoanLimiter::new(options.max_lent_bytes));
        let reclaimer = Arc::new(Reclaimer::new(Arc::clone(&limiter)));
        let shared = ShmContext {
            watcher: LazyWatcher::new(options.borrow_grace / TICKS_PER_GRACE as u32, Arc::clone(&reclaimer)),
            limiter,
            reclaimer,
            pool: pool.clone(),
            options,
            host: HostId::here()?,
            uid: own_user().map_err(|shared| FabricError::Os {
                fabric: FabricKind::Shm,
                tried: "finding a user whom no other process has".into(),
                remedy: "use another fabric there",
                source: std::io::Error::other(shared),
            })?,
            orphans: Arc::default(),
            doorbells: Arc::new(Doorbells::new()?),
            has_barriers: wakeup::barrier::join(),
            peer_doorbells: FileCache::default(),
            peer_regions: FileCache::default(),
        };
        Ok(ShmFabric { shared: Arc::new(shared) })
    }
}

impl ShmFabric {
    /// Checks whether the endpoint behind an address can be linked with. What can be told from the
    /// address is checked: the rest is seen when the link is made.
    ///
    /// # Errors
    /// If it is on another host, is another user's, or can't be reached or watched.
    pub fn check_peer(&self, address: &[u8]) -> Result<(), FabricError> {
        let (here, address) = (self.shared.host, ShmAddress::from_bytes(address)?);
        address.check_same_host(here, self.shared.uid)?;
        address.check_process(here, socket::has_peer_pidfd)
    }
}

impl Fabric for ShmFabric {
    type Endpoint = ShmEndpoint;
    type Link = ShmLink;
    type Port = ShmPort;

    fn port(&self) -> Result<ShmPort, FabricError> {
        ShmPort::new(Arc::clone(&self.shared))
    }

    fn loan_limiter(&self) -> Option<Arc<LoanLimiter>> {
        Some(Arc::clone(&self.shared.limiter))
    }

    fn endpoint(&self, _port: usize, options: &LinkOptions) -> Result<ShmEndpoint, FabricError> {
        self.shared.orphans.sweep();
        ShmEndpoint::new(&self.shared, options)
    }
}

/// One side of a link that is not connected yet: a segment and a listening socket.
pub struct ShmEndpoint {
    shared: Arc<ShmContext>,
    options: LinkOptions,
    layout: SegmentLayout,
    segment: OwnSegment,
    listener: Listener,
    own: ShmAddress,
    address: Vec<u8>,
}

impl ShmEndpoint {
    fn new(shared: &Arc<ShmContext>, options: &LinkOptions) -> Result<Self, FabricError> {
        let layout = SegmentLayout::new(options)?;
        let own = shared.draw_address()?;
        let listener = listen(&own, own.host)?;
        let segment = OwnSegment::new(&layout)?;
        ring::prepare(&segment.words(layout.ring()), &segment.words(layout.line()), layout.ring_shape());
        Ok(ShmEndpoint {
            shared: Arc::clone(shared),
            options: options.clone(),
            layout,
            segment,
            listener,
            own,
            address: own.to_bytes(),
        })
    }

    /// Prepares to accept the peer behind an address. A peer in another network namespace reaches
    /// no abstract socket, so this side gets another address, whose socket is a file.
    ///
    /// # Errors
    /// If the peer's address is not valid, or a socket can't be made.
    pub fn listen_for(&mut self, peer: &[u8]) -> Result<(), FabricError> {
        let peer = ShmAddress::from_bytes(peer)?;
        if peer.host.has_network_of(self.own.host) {
            return Ok(());
        }
        // The kernel has listed the old name to every user, and nobody else may take the file's.
        let own = self.shared.draw_address()?;
        self.listener = listen(&own, peer.host)?;
        (self.own, self.address) = (own, own.to_bytes());
        Ok(())
    }

    /// Shakes hands with the peer.
    fn shake_hands(&self, role: Role, peer: &[u8], timeout: Duration) -> Result<ShmPeer, FabricError> {
        let deadline = Deadline::after(timeout);
        let address = ShmAddress::from_bytes(peer)?;
        address.check_same_host(self.shared.host, self.shared.uid)?;
        let region = self.shared.pool.region();
        let side = LocalSide {
            options: &self.options,
            layout: &self.layout,
            token: self.own.token,
            host: self.shared.host,
            uid: self.shared.uid,
            segment: self.segment.file(),
            doorbells: self.shared.doorbells.file(),
            has_barriers: self.shared.has_barriers,
            regions: vec![(region.id(), region.len(), region.fd())],
        };
        match role {
            Role::Initiator => handshake::initiate(&side, &address, deadline),
            Role::Acceptor => handshake::accept(&side, &self.listener, &address, deadline),
        }
    }

    fn link(self, peer: ShmPeer) -> Result<ShmLink, FabricError> {
        let shared = &self.shared;
        let process = PeerProcess { pidfd: Arc::new(peer.process), pid: peer.pid };
        shared.orphans.check(&process)?;
        let mut regions = Vec::with_capacity(peer.regions.len());
        for (id, len, file) in peer.regions {
            let make = |file| Ok(LazyRegion::new(file, len, process.clone(), Arc::clone(&shared.reclaimer)));
            let region = shared.peer_regions.get(peer.pid, file, len, make)?;
            regions.push((id, region));
        }
        let map = |file: OwnedFd| PeerDoorbells::map(file.as_fd());
        let parts = LinkParts {
            pool: shared.pool.clone(),
            peer: PeerSegment::map(peer.segment.as_fd(), &self.layout)?,
            own: self.segment,
            memory: regions,
            watch: shared.watcher.get()?.watch(process)?,
            orphans: Arc::clone(&shared.orphans),
            poll_bytes: shared.options.poll_bytes,
            doorbells: shared.peer_doorbells.get(peer.pid, peer.doorbells, doorbells::BYTES as u64, map)?,
            has_barriers: shared.has_barriers && peer.has_barriers,
        };
        Ok(ShmLink(Box::new(ShmLinkInner::new(&self.options, &self.layout, parts))))
    }
}

impl Endpoint for ShmEndpoint {
    type Link = ShmLink;

    fn address(&self) -> &[u8] {
        &self.address
    }

    fn connect(self, role: Role, peer: &[u8], timeout: Duration) -> Result<ShmLink, FabricError> {
        let peer = self.shake_hands(role, peer, timeout)?;
        let state = self.segment.words(self.layout.state());
        // The peer may think that the link is up, and must learn that it is not.
        self.link(peer).inspect_err(|_| state::leave(&state, &LinkFailure::Closed))
    }
}
