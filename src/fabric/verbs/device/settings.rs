//! The device settings of the configuration.

use super::model::Mtu;
use std::fmt;

/// Devices of a process, and rails of a link, at most.
pub const MAX_RAILS: usize = 4;

/// The name that stands for all devices with an active port, at most [`MAX_RAILS`].
pub const AUTO: &str = "auto";

/// The value of a setting and its origin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceSetting<T> {
    /// As in the file, such as `rdma_gid_index`.
    pub key: &'static str,
    /// From the origin, or the default.
    pub value: T,
    /// The origin as text, such as `environment variable RDMA_GID_INDEX`. `None` for a default.
    pub origin: Option<String>,
}

impl<T> DeviceSetting<T> {
    /// A default value.
    pub fn default_of(key: &'static str, value: T) -> Self {
        DeviceSetting { key, value, origin: None }
    }

    /// A value that was set at `origin`.
    pub fn asked(key: &'static str, value: T, origin: impl Into<String>) -> Self {
        DeviceSetting { key, value, origin: Some(origin.into()) }
    }

    /// Where it was set.
    pub fn origin(&self) -> &str {
        self.origin.as_deref().unwrap_or("the default")
    }
}

impl<T: fmt::Display> fmt::Display for DeviceSetting<T> {
    /// `rdma_gid_index is "7" (environment variable RDMA_GID_INDEX)`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is {:?} ({})", self.key, self.value.to_string(), self.origin())
    }
}

/// The settings of the configuration that depend on the devices of this machine and their limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceSettings {
    /// The device's name, several names with commas between them, or [`AUTO`]; otherwise the only
    /// one with an active port.
    pub device: Option<DeviceSetting<String>>,
    /// The NUMA node near which the process works.
    pub near: Option<u32>,
    /// The port's number; otherwise the first active one.
    pub port: Option<DeviceSetting<u8>>,
    /// The place in the port's GID table; otherwise the best.
    pub gid_index: Option<DeviceSetting<u8>>,
    /// The place in the port's partition key table.
    pub pkey_index: DeviceSetting<u16>,
    /// Work requests of each queue of a queue pair.
    pub queue_depth: DeviceSetting<u32>,
    /// The largest packets; otherwise the port's active MTU.
    pub mtu: Option<DeviceSetting<Mtu>>,
}

impl Default for DeviceSettings {
    fn default() -> Self {
        DeviceSettings {
            device: None,
            near: None,
            port: None,
            gid_index: None,
            pkey_index: DeviceSetting::default_of("rdma_qp_pkey_index", 0),
            queue_depth: DeviceSetting::default_of("rdma_qp_queue_depth", 1024),
            mtu: None,
        }
    }
}
