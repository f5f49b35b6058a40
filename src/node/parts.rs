//! The parts of a node that its fabrics determine.

use super::calls::NodeCalls;
use super::error::NodeError;
use super::options::{region_options, remote_settings};
use super::peering::{FabricPeering, LinkReporter, PeerDirectory};
use super::pollers::{PollerSet, Pollers, Polling};
use super::transport::OpeningFabrics;
use crate::bootstrap::Peering;
use crate::config::{Config, Origin};
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
        if by_calls {
            let unused = without_effect(config);
            if !unused.is_empty() {
                tracing::warn!(
                    "{}: fabric is grpc, which has no pollers, so these settings have no effect: {unused}. \
                     Leave them out, or name another fabric",
                    config.task_id()
                );
            }
            return Ok(OpeningParts(None));
        }
        Ok(OpeningParts(Some(OpeningFabrics::begin(config)?)))
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

/// The settings of pollers that somebody has set, with their values and origins. A profile is for
/// every fabric, and `auto` asks for nothing.
fn without_effect(config: &Config) -> String {
    let mut unused = Vec::new();
    for (key, value) in config.entries() {
        let value = value.filter(|value| value != "auto");
        let is_of_pollers = ["poll", "pollers", "wait", "spin_budget"].contains(&key);
        let (Some(value), true) = (value, is_of_pollers) else { continue };
        match config.origin(key) {
            Origin::Default | Origin::Profile { .. } => {}
            origin => unused.push(format!("{key} is {value} ({origin})")),
        }
    }
    unused.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_pollers_that_somebody_has_set_are_told_and_no_others() {
        let unused = |settings: &[(&str, &str)]| {
            let base = Config::builder().without_environment().member("w", 0).set("cluster", "w=127.0.0.1:1");
            let set =
                |builder: crate::config::Builder, (key, value): &(&str, &str)| builder.set(*key, *value);
            without_effect(&settings.iter().fold(base, set).build().expect("good"))
        };
        assert_eq!(unused(&[("fabric", "grpc"), ("poll", "auto"), ("profile", "low-latency")]), "");
        assert_eq!(
            unused(&[("poll", "dedicated"), ("pollers", "3"), ("wait", "spin"), ("spin_budget", "20us")]),
            "poll is dedicated (the builder), pollers is 3 (the builder), wait is spin (the builder), \
             spin_budget is 20us (the builder)"
        );
    }
}
