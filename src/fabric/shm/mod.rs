//! Shared memory between processes of one host.
//!
//! Each process makes a segment per link that only it can write and that the peer maps read-only: its rings, how
//! far it has come in the peer's, which loans it has given back, whether it still takes part. Each also
//! maps the peer's pool read-only. So nobody can write into another's memory: bulk is *pulled*. A write puts
//! a slot in the ring that names the sender's bytes; the target's `poll` checks its own grant and copies
//! once, or, for a loan, hands the bytes out where they lie.
//!
//! What a peer writes is copied before it is judged, judged before anything is done, and a peer that breaks
//! a rule costs it the link and this process nothing. In steady state there is no system call, lock,
//! allocation or log on the way of a byte.
//!
//! | file | |
//! |---|---|
//! | `words`, `segment`, `layout` | shared memory as words, and where things are in it |
//! | `ring`, `slot`, `lease`, `state` | what is said through it |
//! | `grants`, `bulk`, `borrow`, `reads` | memory: who may touch what, and for how long it is held |
//! | `lane`, `incoming`, `post`, `link`, `limbo`, `port` | what is done |
//! | `address`, `hello`, `socket`, `handshake`, `watch` | how a link is made, and how a death is told |

mod address;
mod borrow;
mod bulk;
mod grants;
mod handshake;
mod hello;
mod incoming;
mod lane;
mod layout;
mod lease;
mod limbo;
mod link;
mod port;
mod post;
mod reads;
mod ring;
mod segment;
mod slot;
mod socket;
mod state;
#[cfg(test)]
mod test_handshake;
#[cfg(test)]
mod test_rogue;
#[cfg(test)]
mod testing;
mod watch;
mod words;

pub use port::{ShmLink, ShmPort, ShmSleeper};

use super::{Fabric, FabricError, FabricKind, Half, LinkFailure, LinkOptions, Role};
use crate::memory::Pool;
use address::{Address, Host, Token};
use bulk::PeerPool;
use handshake::{Peer, Side};
use layout::Layout;
use limbo::Limbo;
use link::{Link, Parts};
use rustix::fd::{AsFd, OwnedFd};
use segment::{OwnSegment, PeerSegment};
use socket::Deadline;
use std::sync::Arc;
use std::time::Duration;
use watch::OneWatcher;

/// What a fabric is made with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShmOptions {
    /// Bytes of bulk that one poll pulls for a lane, at least 4096. A larger tensor is pulled over several polls, so
    /// that the poller's other links are not kept waiting.
    pub poll_bytes: u64,
}

impl Default for ShmOptions {
    fn default() -> Self {
        ShmOptions { poll_bytes: 4 << 20 }
    }
}

/// A process's access to its peers on the same host.
///
/// All tensors that go through it are of one pool, which the peers map read-only. Its thread, the watcher of
/// the peers' processes, starts with the first link and ends when the fabric, its links and its ports are gone.
pub struct ShmFabric {
    shared: Arc<Shared>,
}

struct Shared {
    pool: Pool,
    options: ShmOptions,
    host: Host,
    uid: u32,
    limbo: Arc<Limbo>,
    watcher: OneWatcher,
}

impl ShmFabric {
    /// A fabric for the tensors of `pool`.
    ///
    /// # Errors
    /// If an option is out of range, or `/proc` does not tell which host this is.
    pub fn new(pool: &Pool, options: ShmOptions) -> Result<Self, FabricError> {
        if options.poll_bytes < 4096 {
            return Err(FabricError::Option {
                fabric: FabricKind::Shm,
                option: "poll_bytes",
                value: options.poll_bytes,
                allowed: "at least 4096",
            });
        }
        let shared = Shared {
            pool: pool.clone(),
            options,
            host: Host::here()?,
            uid: rustix::process::geteuid().as_raw(),
            limbo: Arc::default(),
            watcher: OneWatcher::default(),
        };
        Ok(ShmFabric { shared: Arc::new(shared) })
    }

    /// Whether the half with this address can be reached from this process: same host, same network
    /// namespace, same user.
    ///
    /// # Errors
    /// [`FabricError::Peer`] with the reason why not.
    pub fn check_reachable(&self, peer: &[u8]) -> Result<(), FabricError> {
        Address::from_bytes(peer)?.check_reachable(self.shared.host, self.shared.uid)
    }
}

impl Fabric for ShmFabric {
    type Half = ShmHalf;
    type Link = ShmLink;
    type Port = ShmPort;
    const KIND: FabricKind = FabricKind::Shm;

    fn port(&self) -> Result<ShmPort, FabricError> {
        Ok(ShmPort::new(Arc::clone(&self.shared)))
    }

    fn half(&self, options: &LinkOptions) -> Result<ShmHalf, FabricError> {
        self.shared.limbo.sweep();
        ShmHalf::new(&self.shared, options)
    }
}

/// One side of a link that is not connected yet: a segment, and a socket that listens.
pub struct ShmHalf {
    shared: Arc<Shared>,
    options: LinkOptions,
    layout: Layout,
    segment: OwnSegment,
    listener: OwnedFd,
    token: Token,
    address: Vec<u8>,
}

impl ShmHalf {
    fn new(shared: &Arc<Shared>, options: &LinkOptions) -> Result<Self, FabricError> {
        let layout = Layout::new(options)?;
        let token = address::draw_token()?;
        let address = Address { host: shared.host, uid: shared.uid, pid: std::process::id(), token };
        let listener = address.socket_name().and_then(|name| socket::listen(&name)).map_err(|error| {
            FabricError::Os {
                fabric: FabricKind::Shm,
                tried: "listening on an abstract Unix socket".into(),
                remedy: "raise the limit of open files, or let the process use Unix sockets",
                source: error.into(),
            }
        })?;
        let segment = OwnSegment::new(&layout)?;
        for lane in 0..usize::from(options.lanes) {
            ring::prepare(&segment.words(layout.ring(lane)), &segment.words(layout.line(lane)));
        }
        Ok(ShmHalf {
            shared: Arc::clone(shared),
            options: options.clone(),
            layout,
            segment,
            listener,
            token,
            address: address.to_bytes(),
        })
    }

    /// Shakes hands with the peer.
    fn meet(&self, role: Role, peer: &[u8], timeout: Duration) -> Result<Peer, FabricError> {
        let deadline = Deadline::after(timeout);
        let address = Address::from_bytes(peer)?;
        address.check_reachable(self.shared.host, self.shared.uid)?;
        let region = self.shared.pool.region();
        let side = Side {
            options: &self.options,
            layout: &self.layout,
            token: self.token,
            uid: self.shared.uid,
            segment: self.segment.file(),
            regions: vec![(region.id(), region.len(), region.fd())],
        };
        match role {
            Role::Initiator => handshake::reach(&side, &address, deadline),
            Role::Acceptor => handshake::accept(&side, &self.listener, &address, deadline),
        }
    }

    fn link(self, peer: Peer) -> Result<ShmLink, FabricError> {
        let parts = Parts {
            pool: self.shared.pool.clone(),
            peer: PeerSegment::map(peer.segment.as_fd(), &self.layout)?,
            own: self.segment,
            memory: PeerPool::new(peer.regions),
            watch: self.shared.watcher.get()?.watch(peer.process)?,
            pid: peer.pid,
            limbo: Arc::clone(&self.shared.limbo),
            poll_bytes: self.shared.options.poll_bytes,
        };
        Ok(ShmLink(Box::new(Link::new(&self.options, &self.layout, parts))))
    }
}

impl Half for ShmHalf {
    type Link = ShmLink;

    fn address(&self) -> &[u8] {
        &self.address
    }

    fn connect(self, role: Role, peer: &[u8], timeout: Duration) -> Result<ShmLink, FabricError> {
        let peer = self.meet(role, peer, timeout)?;
        let state = self.segment.words(self.layout.state());
        // The peer may think that the link is up: if it is not, it must learn.
        self.link(peer).inspect_err(|_| state::leave(&state, &LinkFailure::Closed))
    }
}
