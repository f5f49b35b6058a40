//! The options of the lower modules, from the configuration of a node.

use crate::bootstrap::{AuthMode, AuthSettings, BootstrapOptions, LINK_TIMEOUT, TlsFiles};
use crate::config::{BulkReceive, Config, PeerLoss};
use crate::link::LinkSettings;
use crate::matching::{Members, RemoteSettings};
use crate::memory::{NumaPolicy, RegionOptions};
use crate::rendezvous::RendezvousSettings;
use crate::wire::Incarnation;
use std::path::PathBuf;

/// The part of the pool that holds destinations of tensors that were not sent yet, at most.
const READY_SHARE: u64 = 4;

pub(super) fn members(config: &Config) -> Members {
    Members::new(config.cluster.members().map(|(task, _)| task).collect())
}

/// The options of the pool's region. `device_node`: the NUMA node of the RDMA device, if one is
/// used.
pub(super) fn region_options(config: &Config, device_node: Option<u32>) -> RegionOptions {
    RegionOptions {
        size: config.pool_size,
        pages: config.pool_pages,
        require: config.pool_require,
        lock: config.pool_lock,
        numa: match (config.numa_node, device_node) {
            (Some(node), _) => NumaPolicy::Bind(node),
            (None, Some(node)) => NumaPolicy::Prefer(node),
            (None, None) => NumaPolicy::Any,
        },
    }
}

pub(super) fn remote_settings(config: &Config) -> RemoteSettings {
    let link = LinkSettings {
        small_tensor_bytes: config.small_tensor_bytes,
        validate: config.validate,
        borrow: config.bulk_receive == BulkReceive::Borrow,
        max_ready_bytes: config.pool_size / READY_SHARE / config.poller_count() as u64,
    };
    RemoteSettings {
        hung_after: config.hung_after,
        peer_loss_is_fatal: config.peer_loss == PeerLoss::FailAll,
        ..RemoteSettings::new(link, config.max_requests)
    }
}

pub(super) fn rendezvous_settings(config: &Config) -> RendezvousSettings {
    RendezvousSettings {
        max_requests: config.max_requests,
        max_outstanding_sends: config.max_outstanding_sends,
        recv_timeout: config.recv_timeout,
        cancel_grace: config.cancel_grace,
        borrow: config.bulk_receive == BulkReceive::Borrow,
    }
}

/// How this node proves who it is. The configuration has checked that the mode has what it needs.
pub fn auth_settings(config: &Config) -> AuthSettings {
    let file = |path: &Option<PathBuf>| path.clone().unwrap_or_default();
    match config.auth_mode() {
        AuthMode::Tls => AuthSettings::Tls(TlsFiles {
            ca: file(&config.tls_ca),
            certificate: file(&config.tls_certificate),
            key: file(&config.tls_key),
        }),
        AuthMode::Secret => AuthSettings::Secret(file(&config.secret_file)),
        AuthMode::Uid => AuthSettings::Uid,
        AuthMode::Plain => AuthSettings::Plain,
    }
}

pub(super) fn bootstrap_options(
    config: &Config,
    incarnation: Incarnation,
    host_id: String,
    have_met: bool,
) -> BootstrapOptions {
    BootstrapOptions {
        me: config.task_id().clone(),
        cluster: config.cluster.clone(),
        incarnation,
        bind: config.bind,
        have_met,
        auth: auth_settings(config),
        allow_non_loopback: config.allow_non_loopback,
        heartbeat: config.heartbeat_interval,
        silence: config.silence_bound,
        link_timeout: LINK_TIMEOUT,
        host_id,
    }
}
