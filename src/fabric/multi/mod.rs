//! Several fabrics of a process as one, so that one poller drives links on all of them.
//!
//! A [`MultiFabric`] has a part for each kind of fabric that the process has opened. Each port has
//! a port of every part. A link belongs to one part, and its [`LinkId`] says to which. All threads
//! of a poller sleep on one sleeper: that of the first part, which the other parts wake.
//!
//! The fastest part is polled each time, and the others less often: see [`MultiPort`].

mod port;
mod sleeper;
mod turns;

pub use port::MultiPort;
pub use sleeper::MultiSleeper;

use super::shm::{ShmEndpoint, ShmFabric, ShmLink};
use super::tcp::{TcpEndpoint, TcpFabric, TcpLink};
use super::verbs::{LinkDevices, VerbsEndpoint, VerbsFabric, VerbsLink};
use super::{Endpoint, Fabric, FabricError, FabricKind, LinkId, LinkOptions, LoanLimiter, Registrar, Role};
use std::sync::Arc;
use std::time::Duration;

/// The fabrics that a process has opened.
#[derive(Default)]
pub struct FabricParts {
    /// Shared memory.
    pub shm: Option<ShmFabric>,
    /// RDMA verbs.
    pub verbs: Option<VerbsFabric>,
    /// Connections between hosts without RDMA.
    pub tcp: Option<TcpFabric>,
}

/// A process's access to its peers through one or several fabrics.
pub struct MultiFabric {
    parts: FabricParts,
}

impl MultiFabric {
    /// A fabric of these parts; `None` without any.
    pub fn new(parts: FabricParts) -> Option<Self> {
        let FabricParts { shm, verbs, tcp } = &parts;
        let is_empty = shm.is_none() && verbs.is_none() && tcp.is_none();
        (!is_empty).then_some(MultiFabric { parts })
    }

    /// The fabrics that it consists of.
    pub fn parts(&self) -> &FabricParts {
        &self.parts
    }

    /// The fabrics that are open, the fastest first.
    pub fn kinds(&self) -> impl Iterator<Item = FabricKind> {
        let FabricParts { shm, verbs, tcp } = &self.parts;
        let shm = shm.as_ref().map(|_| FabricKind::Shm);
        let verbs = verbs.as_ref().map(|_| FabricKind::Verbs);
        let tcp = tcp.as_ref().map(|_| FabricKind::Tcp);
        [shm, verbs, tcp].into_iter().flatten()
    }

    /// As [`Fabric::endpoint`], on the part of this kind.
    ///
    /// # Errors
    /// Like [`Fabric::endpoint`], or if there is no such part.
    pub fn endpoint_on(
        &self,
        kind: FabricKind,
        port: usize,
        options: &LinkOptions,
    ) -> Result<MultiEndpoint, FabricError> {
        let FabricParts { shm, verbs, tcp } = &self.parts;
        match (kind, shm, verbs, tcp) {
            (FabricKind::Shm, Some(shm), ..) => Ok(MultiEndpoint::Shm(shm.endpoint(port, options)?)),
            (FabricKind::Verbs, _, Some(verbs), _) => {
                Ok(MultiEndpoint::Verbs(verbs.endpoint(port, options)?))
            }
            (FabricKind::Tcp, .., Some(tcp)) => Ok(MultiEndpoint::Tcp(tcp.endpoint(port, options)?)),
            _ => Err(FabricError::Unavailable { fabric: kind, why: "it is not open".into() }),
        }
    }
}

impl Fabric for MultiFabric {
    type Endpoint = MultiEndpoint;
    type Link = MultiLink;
    type Port = MultiPort;

    fn registrar(&self) -> Option<Arc<dyn Registrar>> {
        self.parts.verbs.as_ref().and_then(VerbsFabric::registrar)
    }

    /// Ports of all parts get the same number, so one thread at a time makes them.
    fn port(&self) -> Result<MultiPort, FabricError> {
        MultiPort::new(&self.parts)
    }

    /// On the fastest part.
    fn endpoint(&self, port: usize, options: &LinkOptions) -> Result<MultiEndpoint, FabricError> {
        let fastest = self.kinds().next().unwrap_or(FabricKind::Shm);
        self.endpoint_on(fastest, port, options)
    }

    fn loan_limiter(&self) -> Option<Arc<LoanLimiter>> {
        self.parts.shm.as_ref().and_then(ShmFabric::loan_limiter)
    }
}

/// One side of a link that is not connected yet, on one of the parts.
#[allow(clippy::large_enum_variant)] // it lives for the moments of a join
pub enum MultiEndpoint {
    /// On shared memory.
    Shm(ShmEndpoint),
    /// On RDMA verbs.
    Verbs(VerbsEndpoint),
    /// On TCP.
    Tcp(TcpEndpoint),
}

impl MultiEndpoint {
    /// Prepares to accept the peer behind an address. This may change the endpoint's own address.
    ///
    /// # Errors
    /// If this side can't accept it.
    pub fn listen_for(&mut self, peer: &[u8]) -> Result<(), FabricError> {
        match self {
            MultiEndpoint::Shm(endpoint) => endpoint.listen_for(peer),
            MultiEndpoint::Verbs(_) | MultiEndpoint::Tcp(_) => Ok(()),
        }
    }
}

impl Endpoint for MultiEndpoint {
    type Link = MultiLink;

    fn address(&self) -> &[u8] {
        match self {
            MultiEndpoint::Shm(endpoint) => endpoint.address(),
            MultiEndpoint::Verbs(endpoint) => endpoint.address(),
            MultiEndpoint::Tcp(endpoint) => endpoint.address(),
        }
    }

    fn connect(self, role: Role, peer: &[u8], timeout: Duration) -> Result<MultiLink, FabricError> {
        Ok(match self {
            MultiEndpoint::Shm(endpoint) => MultiLink::Shm(endpoint.connect(role, peer, timeout)?),
            MultiEndpoint::Verbs(endpoint) => MultiLink::Verbs(endpoint.connect(role, peer, timeout)?),
            MultiEndpoint::Tcp(endpoint) => MultiLink::Tcp(endpoint.connect(role, peer, timeout)?),
        })
    }
}

/// A connected link that no port has yet, on one of the parts.
pub enum MultiLink {
    /// On shared memory.
    Shm(ShmLink),
    /// On RDMA verbs.
    Verbs(VerbsLink),
    /// On TCP.
    Tcp(TcpLink),
}

impl MultiLink {
    /// This side's RDMA devices on the rails of the link; `None` if it is on another part.
    pub fn devices(&self) -> Option<Arc<LinkDevices>> {
        match self {
            MultiLink::Verbs(link) => Some(link.devices()),
            MultiLink::Shm(_) | MultiLink::Tcp(_) => None,
        }
    }
}

/// The numbers of the parts in the high bits of a [`LinkId`]. Shared memory has 0, so that its
/// links keep their ids.
const SHM: u32 = 0;
const VERBS: u32 = 1;
const TCP: u32 = 2;

/// The part of a link.
#[inline(always)] // on the short path
fn part_of(id: LinkId) -> u32 {
    id.0 >> LinkId::BITS
}

/// The id by which its part knows a link.
#[inline(always)] // on the short path
fn within_part(id: LinkId) -> LinkId {
    LinkId(id.0 & ((1 << LinkId::BITS) - 1))
}

/// The id of a part's link.
#[inline]
fn of_part(part: u32, id: LinkId) -> LinkId {
    LinkId(part << LinkId::BITS | id.0)
}
