//! The transport of a node: the fabric that it opens, and the choice of it for each peer.

use super::error::NodeError;
use super::rdma::verbs_options;
use crate::config::Config;
use crate::fabric::shm::{ShmFabric, ShmOptions};
use crate::fabric::verbs::{VerbsDevice, VerbsFabric};
use crate::fabric::{Fabric, FabricKind, LinkOptions, Registrar};
use crate::memory::Pool;
use crate::wire::{Code, Status};
use std::sync::Arc;

/// The fabric to a peer, and the reason of the choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PeerTransport {
    pub kind: FabricKind,
    pub why: &'static str,
}

impl PeerTransport {
    /// The byte before an endpoint's address that names its fabric.
    pub fn tag(self) -> u8 {
        match self.kind {
            FabricKind::Shm => b's',
            FabricKind::Verbs => b'v',
            FabricKind::Tcp => b't',
            #[cfg(any(test, feature = "sim"))]
            FabricKind::Sim => b'm',
        }
    }
}

/// A fabric that a node can use as its transport.
pub(super) trait TransportFabric: Fabric {
    /// The transport to a peer on this host, or on another one.
    ///
    /// # Errors
    /// If this fabric can't reach the peer.
    fn transport(&self, same_host: bool) -> Result<PeerTransport, Status>;

    /// The queue depth that both sides of a link must have; `None` if they may differ.
    fn common_depth(&self, options: &LinkOptions) -> Option<u32>;

    /// This side of a link, for the poller with number `port`.
    ///
    /// # Errors
    /// Like [`Fabric::endpoint`].
    fn node_endpoint(&self, port: usize, options: &LinkOptions) -> Result<Self::Endpoint, Status>;
}

fn unavailable(error: crate::fabric::FabricError) -> Status {
    Status::new(Code::Unavailable, error.to_string())
}

impl TransportFabric for ShmFabric {
    fn transport(&self, same_host: bool) -> Result<PeerTransport, Status> {
        if same_host {
            return Ok(PeerTransport { kind: FabricKind::Shm, why: "same host: shared memory" });
        }
        let message = "it runs on another host, which shared memory does not reach: start all members on one \
            host, in one network namespace, or set fabric = verbs where the hosts have RDMA NICs";
        Err(Status::new(Code::FailedPrecondition, message))
    }

    fn common_depth(&self, options: &LinkOptions) -> Option<u32> {
        Some(options.depth)
    }

    fn node_endpoint(&self, port: usize, options: &LinkOptions) -> Result<Self::Endpoint, Status> {
        self.endpoint(port, options).map_err(unavailable)
    }
}

impl TransportFabric for VerbsFabric {
    fn transport(&self, _same_host: bool) -> Result<PeerTransport, Status> {
        Ok(PeerTransport { kind: FabricKind::Verbs, why: "fabric = verbs" })
    }

    fn common_depth(&self, _options: &LinkOptions) -> Option<u32> {
        None
    }

    fn node_endpoint(&self, port: usize, options: &LinkOptions) -> Result<Self::Endpoint, Status> {
        let depth = self.queue_depth();
        let options = LinkOptions { depth, receives: depth, ..options.clone() };
        self.endpoint(port, &options).map_err(unavailable)
    }
}

fn shm_options(config: &Config, pool: &Pool) -> ShmOptions {
    let max_lent_bytes = config.max_lent_bytes.unwrap_or(pool.region().len() / 2);
    ShmOptions { max_lent_bytes, borrow_grace: config.borrow_grace, ..ShmOptions::default() }
}

/// The fabric that a node has opened.
pub(super) enum Transport {
    Shm(ShmFabric),
    Verbs(VerbsFabric),
}

impl Transport {
    /// Opens the RDMA device, if the configuration asks for verbs. It comes before the pool, whose
    /// memory should be near the device.
    ///
    /// # Errors
    /// If the device can't be opened.
    pub fn device(config: &Config) -> Result<Option<VerbsDevice>, NodeError> {
        Ok(match config.fabric {
            Some(FabricKind::Verbs) => Some(VerbsDevice::open(verbs_options(config))?),
            _ => None,
        })
    }

    /// Opens the fabric: verbs on this device, or shared memory without one.
    ///
    /// # Errors
    /// If the fabric can't be opened.
    pub fn new(config: &Config, device: Option<VerbsDevice>, pool: &Pool) -> Result<Transport, NodeError> {
        Ok(match device {
            Some(device) => Transport::Verbs(device.fabric(pool)?),
            None => Transport::Shm(ShmFabric::new(pool, shm_options(config, pool))?),
        })
    }

    /// Registers memory outside the pool, if the fabric can.
    pub fn registrar(&self) -> Option<Arc<dyn Registrar>> {
        match self {
            Transport::Shm(fabric) => fabric.registrar(),
            Transport::Verbs(fabric) => fabric.registrar(),
        }
    }
}
