//! Which fabric a node opens, and how it reaches each peer by it.

use super::error::NodeError;
use super::rdma::verbs_options;
use crate::config::Config;
use crate::fabric::shm::{ShmFabric, ShmOptions};
use crate::fabric::verbs::VerbsFabric;
use crate::fabric::{Fabric, FabricKind, LinkOptions, Registrar};
use crate::memory::Pool;
use crate::wire::{Code, Status};
use std::sync::Arc;

/// How a peer is reached, and why so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Way {
    pub kind: FabricKind,
    pub why: &'static str,
}

impl Way {
    /// What stands before an endpoint's address: which fabric it is of.
    pub fn tag(self) -> u8 {
        match self.kind {
            FabricKind::Shm => b's',
            FabricKind::Verbs => b'v',
            FabricKind::Sim => b'm',
        }
    }
}

/// A fabric by which a node reaches peers.
pub(super) trait Reach: Fabric {
    /// How a peer is reached that is on this host, or on another one.
    ///
    /// # Errors
    /// It can't be.
    fn way(&self, same_host: bool) -> Result<Way, Status>;

    /// This side of a link that goes that way, for the poller of this number.
    ///
    /// # Errors
    /// As [`Fabric::endpoint`].
    fn endpoint_by(&self, way: Way, port: usize, options: &LinkOptions) -> Result<Self::Endpoint, Status>;
}

fn unavailable(error: crate::fabric::FabricError) -> Status {
    Status::new(Code::Unavailable, error.to_string())
}

impl Reach for ShmFabric {
    fn way(&self, same_host: bool) -> Result<Way, Status> {
        if same_host {
            return Ok(Way { kind: FabricKind::Shm, why: "same host: shared memory" });
        }
        let message = "it runs on another host, which shared memory does not reach: start all members on one host, in one \
            network namespace, or set fabric = verbs where the hosts have RDMA NICs";
        Err(Status::new(Code::FailedPrecondition, message))
    }

    fn endpoint_by(&self, _way: Way, port: usize, options: &LinkOptions) -> Result<Self::Endpoint, Status> {
        self.endpoint(port, options).map_err(unavailable)
    }
}

impl Reach for VerbsFabric {
    fn way(&self, _same_host: bool) -> Result<Way, Status> {
        Ok(Way { kind: FabricKind::Verbs, why: "fabric = verbs" })
    }

    fn endpoint_by(&self, _way: Way, port: usize, options: &LinkOptions) -> Result<Self::Endpoint, Status> {
        let depth = self.queue_depth();
        let options = LinkOptions { depth, receives: depth, ..options.clone() };
        self.endpoint(port, &options).map_err(unavailable)
    }
}

fn shm_options(config: &Config, pool: &Pool) -> ShmOptions {
    let max_lent_bytes = config.max_lent_bytes.unwrap_or(pool.region().len() / 2);
    ShmOptions { max_lent_bytes, borrow_grace: config.borrow_grace, ..ShmOptions::default() }
}

/// What a node opened.
pub(super) enum Opened {
    Shm(ShmFabric),
    Verbs(VerbsFabric),
}

impl Opened {
    /// The fabric that the configuration names, or the best that reaches everybody.
    ///
    /// # Errors
    /// If it can't be had.
    pub fn new(config: &Config, pool: &Pool) -> Result<Opened, NodeError> {
        Ok(match config.fabric {
            Some(FabricKind::Verbs) => Opened::Verbs(VerbsFabric::new(pool, verbs_options(config))?),
            _ => Opened::Shm(ShmFabric::new(pool, shm_options(config, pool))?),
        })
    }

    /// What registers memory outside the pool, if anything does.
    pub fn registrar(&self) -> Option<Arc<dyn Registrar>> {
        match self {
            Opened::Shm(fabric) => fabric.registrar(),
            Opened::Verbs(fabric) => fabric.registrar(),
        }
    }
}
