//! The parts of a node that its fabrics determine.

use super::calls::NodeCalls;
use super::error::NodeError;
use super::options::{region_options, remote_settings};
use super::peering::{FabricPeering, LinkReporter, PeerDirectory};
use super::pollers::{PollerSet, Pollers, Polling};
use super::transport::OpeningFabrics;
use crate::bootstrap::Peering;
use crate::config::Config;
use crate::fabric::{FabricKind, LinkOptions, Registrar};
use crate::matching::{Members, WindowHandler};
use crate::memory::{Pool, PoolOptions, Region};
use crate::wire::{Incarnation, TaskId};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize};

/// What a node is made of before it knows its fabrics.
pub(super) struct NodeIdentity {
    pub me: TaskId,
    pub incarnation: Incarnation,
    pub members: Members,
    pub host: String,
}

/// The part of a node that moves tensors.
pub(super) struct NodeParts {
    pub pollers: Arc<dyn PollerSet>,
    pub peering: Arc<dyn Peering>,
    pub registrar: Option<Arc<dyn Registrar>>,
    /// How many rails links over RDMA have lost.
    pub lost_rails: Arc<AtomicU64>,
    /// Makes calls, if no fabric moves the tensors.
    pub calls: Option<Arc<NodeCalls>>,
}

/// The fabrics that a node opens; `None` if its tensors travel by calls.
pub(super) struct OpeningParts(Option<OpeningFabrics>);

impl OpeningParts {
    pub fn begin(config: &Config) -> Result<Self, NodeError> {
        let by_calls = config.fabric.is_some_and(|set| set.has(FabricKind::Grpc));
        let opening = if by_calls { None } else { Some(OpeningFabrics::begin(config)?) };
        Ok(OpeningParts(opening))
    }

    /// Makes the pool, near the RDMA device if one is used.
    pub fn pool(&self, config: &Config, me: &TaskId) -> Result<Pool, NodeError> {
        let device = self.0.as_ref().and_then(OpeningFabrics::numa_node);
        let region = Region::create(0, &region_options(config, device))?;
        let pool = Pool::new(region, PoolOptions::default())?;
        tracing::info!(task = %me, pages = %pool.report(), "the pool is made");
        if let Some(shortfall) = &pool.report().numa_shortfall {
            tracing::warn!(shortfall, "the pool is not on the NUMA node of the RDMA device: see numa_node");
        }
        Ok(pool)
    }

    /// Opens the fabrics, and makes the pollers. The bootstrap service has the listener.
    pub fn open(
        self,
        config: &Config,
        NodeIdentity { me, incarnation, members, host }: NodeIdentity,
        (pool, listener): (&Pool, &TcpListener),
        (polling, outstanding): (Polling, Arc<AtomicUsize>),
        (reporter, directory): (Arc<LinkReporter>, PeerDirectory),
    ) -> Result<NodeParts, NodeError> {
        let settings = remote_settings(config);
        let Some(opening) = self.0 else {
            let calls =
                NodeCalls::new((me.clone(), incarnation), &members, settings, outstanding, pool, reporter);
            let peering = Arc::new(calls.peering(me, directory));
            let (pollers, lost_rails) = (calls.clone(), Arc::default());
            return Ok(NodeParts { pollers, peering, registrar: None, lost_rails, calls: Some(calls) });
        };
        let fabrics = opening.open(config, pool, listener)?;
        let handler = || {
            let (me, members, reporter) = (me.clone(), members.clone(), reporter.clone());
            WindowHandler::new(
                me,
                incarnation.get(),
                members,
                settings.clone(),
                outstanding.clone(),
                reporter,
            )
        };
        let (registrar, lost_rails) = (fabrics.registrar(), fabrics.lost_rails());
        let pollers = Arc::new(Pollers::new(polling, fabrics.fabric(), pool, handler)?);
        let link = LinkOptions { depth: config.queue_depth, receives: 0, generation: 0 };
        let peering = FabricPeering::new(fabrics, pollers.clone(), me.clone(), directory, host, link);
        Ok(NodeParts { pollers, peering: Arc::new(peering), registrar, lost_rails, calls: None })
    }
}
