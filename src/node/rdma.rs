//! The settings of an RDMA device, as the verbs fabric takes them.

use super::transport::host_of;
use crate::config::{Config, MemoryWindows, Origin};
use crate::fabric::verbs::VerbsOptions;
use crate::fabric::verbs::device::{DeviceSetting, DeviceSettings, Mtu};

/// The settings of an RDMA device, each with its origin, for
/// [`choose`](crate::fabric::verbs::device::choose).
pub fn rdma_settings(config: &Config) -> DeviceSettings {
    DeviceSettings {
        device: config.rdma_device.clone().map(|name| setting(config, "rdma_device", name)),
        near: config.numa_node.or_else(|| node_of_cores(config)),
        port: config.rdma_device_port.map(|port| setting(config, "rdma_device_port", port)),
        gid_index: config.rdma_gid_index.map(|index| setting(config, "rdma_gid_index", index)),
        pkey_index: setting(config, "rdma_qp_pkey_index", config.rdma_qp_pkey_index),
        queue_depth: setting(config, "rdma_qp_queue_depth", config.rdma_qp_queue_depth),
        // The configuration has checked the size.
        mtu: config.rdma_qp_mtu.and_then(Mtu::from_bytes).map(|mtu| setting(config, "rdma_qp_mtu", mtu)),
    }
}

/// Whether a setting of devices comes from somebody: not from a default or a profile.
pub(super) fn has_own_rdma_setting(config: &Config) -> bool {
    let mut set = config.set_keys().filter(|(_, origin)| !matches!(origin, Origin::Profile { .. }));
    set.any(|(key, _)| key.starts_with("rdma_"))
}

/// The NUMA node of the first CPU that a poller is pinned to; `None` if the kernel does not say.
fn node_of_cores(config: &Config) -> Option<u32> {
    let first = config.cores.as_ref()?.first()?;
    let entries = std::fs::read_dir(format!("/sys/devices/system/cpu/cpu{first}")).ok()?;
    let node = |entry: std::fs::DirEntry| entry.file_name().to_str()?.strip_prefix("node")?.parse().ok();
    entries.flatten().find_map(node)
}

/// The options of the verbs fabric of this process.
pub(super) fn verbs_options(config: &Config) -> VerbsOptions {
    VerbsOptions {
        device_settings: rdma_settings(config),
        service_level: config.rdma_qp_sl,
        traffic_class: config.rdma_traffic_class,
        timeout: config.rdma_qp_timeout,
        retry_count: config.rdma_qp_retry_count,
        rnr_retry: config.rdma_qp_rnr_retry,
        min_rnr_timer: config.rdma_qp_min_rnr_timer,
        relaxed_ordering: config.rdma_relaxed_ordering,
        memory_windows: config.rdma_memory_windows == MemoryWindows::On,
        qps_per_peer: config.rdma_qps_per_peer,
        registrations: config.rdma_registrations,
        registered_bytes: config.rdma_registered_bytes,
        comp_vector: comp_vector(config),
        ..VerbsOptions::default()
    }
}

/// The completion vector of the first poller: pollers of the members on one host take the vectors
/// in turn, in the order of the cluster.
fn comp_vector(config: &Config) -> u32 {
    let me = config.task_id();
    let own = config.cluster.address(me).map(host_of);
    let earlier = config.cluster.members().take_while(|(task, _)| task != me);
    let on_this_host = earlier.filter(|(_, address)| Some(host_of(address)) == own).count();
    u32::try_from(on_this_host.saturating_mul(config.poller_count())).unwrap_or(0)
}

fn setting<T>(config: &Config, key: &'static str, value: T) -> DeviceSetting<T> {
    let origin = match config.origin(key) {
        Origin::Default => None,
        set => Some(set.to_string()),
    };
    DeviceSetting { key, value, origin }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(variables: &'static [(&'static str, &'static str)]) -> Config {
        let variables = variables.iter().map(|(name, value)| (name.into(), value.into()));
        let builder = Config::builder().member("worker", 0).set("cluster", "worker=127.0.0.1:1");
        builder.rdma_qp_queue_depth(64).environment(variables).build().expect("config")
    }

    #[test]
    fn nothing_but_defaults_asks_for_nothing() {
        let config =
            Config::builder().without_environment().member("worker", 0).set("cluster", "worker=127.0.0.1:1");
        assert_eq!(rdma_settings(&config.build().expect("config")), DeviceSettings::default());
    }

    #[test]
    fn a_setting_of_devices_is_somebodys_if_neither_a_default_nor_a_profile_has_it() {
        let builder = || Config::builder().member("w", 0).set("cluster", "w=127.0.0.1:1");
        let profile = builder().without_environment().set("profile", "throughput");
        assert!(!has_own_rdma_setting(&profile.build().expect("config")));
        for variable in ["RDMA_QP_TIMEOUT", "RDMA_TRAFFIC_CLASS"] {
            let set = builder().environment([(variable.into(), "9".into())]).build().expect("config");
            assert!(has_own_rdma_setting(&set), "{variable}");
        }
    }

    #[test]
    fn the_pollers_of_a_hosts_members_take_the_completion_vectors_in_turn() {
        let cluster = "ps=a:1,b:1;worker=a:2,b:2,10.0.0.7:1,a:3";
        let of = |job, task, key, value| {
            let builder = Config::builder().without_environment().set("auth", "plain");
            let builder = builder.allow_non_loopback(true);
            let builder = builder.member(job, task).set("cluster", cluster);
            comp_vector(&builder.set("poll", "dedicated").set(key, value).build().expect("config"))
        };
        let all = [("ps", 0), ("ps", 1), ("worker", 0), ("worker", 1), ("worker", 2), ("worker", 3)];
        assert_eq!(all.map(|(job, task)| of(job, task, "pollers", "1")), [0, 0, 1, 1, 0, 2]);
        assert_eq!(all.map(|(job, task)| of(job, task, "pollers", "4")), [0, 0, 4, 4, 0, 8]);
        assert_eq!(all.map(|(job, task)| of(job, task, "cores", "0,1")), [0, 0, 2, 2, 0, 4]);
    }

    #[test]
    fn each_setting_becomes_a_device_setting_with_its_origin() {
        let device_settings = rdma_settings(&config(&[
            ("RDMA_DEVICE", "mlx5_1"),
            ("RDMA_DEVICE_PORT", "2"),
            ("RDMA_GID_INDEX", "3"),
            ("RDMA_PKEY", "4"),
            ("RDMA_MTU", "2048"),
        ]));
        assert_eq!(
            device_settings.device,
            Some(DeviceSetting::asked("rdma_device", "mlx5_1".into(), "environment variable RDMA_DEVICE"))
        );
        assert_eq!(
            device_settings.port,
            Some(DeviceSetting::asked("rdma_device_port", 2, "environment variable RDMA_DEVICE_PORT"))
        );
        assert_eq!(
            device_settings.gid_index,
            Some(DeviceSetting::asked("rdma_gid_index", 3, "environment variable RDMA_GID_INDEX"))
        );
        assert_eq!(
            device_settings.pkey_index,
            DeviceSetting::asked("rdma_qp_pkey_index", 4, "environment variable RDMA_PKEY")
        );
        assert_eq!(
            device_settings.queue_depth,
            DeviceSetting::asked("rdma_qp_queue_depth", 64, "the builder")
        );
        assert_eq!(
            device_settings.mtu,
            Some(DeviceSetting::asked("rdma_qp_mtu", Mtu::B2048, "environment variable RDMA_MTU"))
        );
    }
}
