//! The reason why no device, port or GID was chosen. Each message has one line and lists the
//! choices.

use super::gid::GidEntry;
use super::model::{Device, DevicePort, Mtu, Pkey};
use super::settings::DeviceSetting;
use std::fmt::{Display, Write};

/// Why no device, port or GID could be chosen.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// There is no device at all.
    #[error(
        "there is no RDMA device: load the driver of the NIC (or of soft-RoCE: rdma_rxe), and see that \
         the container, if this \
         is one, shows it"
    )]
    NoDevice,
    /// None can be used now.
    #[error("no RDMA device has an active port: bring one up, or name another fabric; there is {devices}")]
    NoActivePort {
        /// Every device with its ports.
        devices: String,
    },
    /// Several could be meant.
    #[error(
        "{count} RDMA devices have an active port: name one of them with rdma_device (RDMA_DEVICE), or \
         set it to auto for all; there is {devices}"
    )]
    SeveralDevices {
        /// How many have an active port.
        count: usize,
        /// Every device with its ports.
        devices: String,
    },
    /// The device that was asked for is not there.
    #[error("{setting}: there is no such RDMA device; there is {devices}")]
    UnknownDevice {
        /// Key, value and origin.
        setting: String,
        /// Every device with its ports.
        devices: String,
    },
    /// The device that was asked for has no reliable connections that this fabric could make.
    #[error("{setting}: it is {why}; there is {devices}")]
    UnusableDevice {
        /// Key, value and origin.
        setting: String,
        /// Its kind.
        why: &'static str,
        /// Every device with its ports.
        devices: String,
    },
    /// The device that was asked for has no port that carries data.
    #[error(
        "{setting}: none of its ports is active: bring one up (cable, switch, `ip link set ... up`; on \
         InfiniBand a subnet \
         manager), or name another device; there is {devices}"
    )]
    DeviceDown {
        /// Key, value and origin.
        setting: String,
        /// Every device with its ports.
        devices: String,
    },
    /// The port that was asked for is not there.
    #[error("{setting}: {device} has no such port; it has {ports}")]
    UnknownPort {
        /// Key, value and origin.
        setting: String,
        /// The device's name.
        device: String,
        /// Number and state of each port.
        ports: String,
    },
    /// The port that was asked for carries no data.
    #[error(
        "{setting}: port {port} of {device} is {state}: bring it up (cable, switch, `ip link set ... up`; \
         on InfiniBand a \
         subnet manager), or name another; {device} has {ports}"
    )]
    PortDown {
        /// Key, value and origin.
        setting: String,
        /// The device's name.
        device: String,
        /// The port's number.
        port: u8,
        /// As in sysfs, such as `DOWN`.
        state: String,
        /// The device's ports.
        ports: String,
    },
    /// An InfiniBand port without an address.
    #[error(
        "port {port} of {device} is an InfiniBand port without a lid: is a subnet manager running? \
         {device} has {ports}"
    )]
    NoLid {
        /// The device's name.
        device: String,
        /// The port's number.
        port: u8,
        /// The device's ports.
        ports: String,
    },
    /// The port's GID table has nothing to choose.
    #[error(
        "port {port} of {device} has no GID of RoCE v1 or v2 at 0 to 255 to choose: give its network \
         interface an address and bring it \
         up, or name an entry with rdma_gid_index (RDMA_GID_INDEX); there is {gids}"
    )]
    NoGid {
        /// The device's name.
        device: String,
        /// The port's number.
        port: u8,
        /// The entries of the table.
        gids: String,
    },
    /// The InfiniBand port asks for a global header, and its GID table has nothing at its first
    /// place.
    #[error(
        "port {port} of {device} asks for a global header, and entry 0 of its GID table is empty: name \
         one with \
         rdma_gid_index (RDMA_GID_INDEX); there is {gids}"
    )]
    NoFirstGid {
        /// The device's name.
        device: String,
        /// The port's number.
        port: u8,
        /// The entries of the table.
        gids: String,
    },
    /// A setting that this port or device can't do.
    #[error("{setting}: it must be {allowed}; {offers}")]
    Setting {
        /// Key, value and origin.
        setting: String,
        /// The allowed values.
        allowed: String,
        /// The offer of the device.
        offers: String,
    },
}

/// Largest number of entries of a list in a message.
const LISTED: usize = 24;

fn list<T>(items: &[T], none: &str, show: impl Fn(&T) -> String) -> String {
    if items.is_empty() {
        return none.to_string();
    }
    let mut text = items.iter().take(LISTED).map(show).collect::<Vec<_>>().join(", ");
    if items.len() > LISTED {
        // Writing to a String does not fail.
        let _ = write!(text, " and {} more (`tensorwire devices` lists them)", items.len() - LISTED);
    }
    text
}

/// `mlx5_0 (port 1 ACTIVE InfiniBand 100 Gb/s, port 2 DOWN InfiniBand)`, and so on.
pub(super) fn devices(devices: &[Device]) -> String {
    list(devices, "none", |device| match device.unusable() {
        Some(why) => format!("{} ({why})", device.name),
        None => format!("{} ({})", device.name, ports(device)),
    })
}

/// `port 1 ACTIVE InfiniBand 100 Gb/s, port 2 DOWN InfiniBand`
pub(super) fn ports(device: &Device) -> String {
    list(&device.ports, "no port", |port| format!("port {} {} {}", port.number, port.state, port.link))
}

/// `0 (fe80::1, RoCE v1, eth0), 5 (10.0.0.1, RoCE v2, eth0)`
pub(super) fn gids(port: &DevicePort) -> String {
    list(&port.gids, "none", GidEntry::to_string)
}

fn refused_setting<T: Display>(setting: &DeviceSetting<T>, allowed: String, offers: String) -> Refusal {
    Refusal::Setting { setting: setting.to_string(), allowed, offers }
}

/// The place in the GID table is past its end, or empty.
pub(super) fn gid_index(setting: &DeviceSetting<u8>, device: &Device, port: &DevicePort) -> Refusal {
    let last = port.gid_table.saturating_sub(1).min(GidEntry::LAST_USABLE);
    let allowed = format!("0 to {last}, an entry that is not empty");
    let what = if u32::from(setting.value) < port.gid_table {
        "that entry is empty"
    } else {
        "that is past the table's end"
    };
    let offers =
        format!("{what}; the GID table of port {} of {} has {}", port.number, device.name, gids(port));
    refused_setting(setting, allowed, offers)
}

/// The place in the partition key table is past its end, or empty.
pub(super) fn pkey_index(setting: &DeviceSetting<u16>, device: &Device, port: &DevicePort) -> Refusal {
    let allowed = format!("0 to {}, an entry that is not empty", port.pkey_table.saturating_sub(1));
    let there = list(&port.pkeys, "none", Pkey::to_string);
    refused_setting(
        setting,
        allowed,
        format!("the P_Key table of port {} of {} has {there}", port.number, device.name),
    )
}

/// Queues can't be as long.
pub(super) fn queue_depth(setting: &DeviceSetting<u32>, device: &Device, most: u32) -> Refusal {
    let offers = format!("{} holds at most {most} work requests in a queue (max_qp_wr)", device.name);
    refused_setting(setting, format!("1 to {most}"), offers)
}

/// Packets can't be as large.
pub(super) fn mtu(setting: &DeviceSetting<Mtu>, device: &Device, port: &DevicePort, active: Mtu) -> Refusal {
    let fit: Vec<_> = Mtu::ALL.into_iter().filter(|mtu| *mtu <= active).collect();
    let offers = format!("the active MTU of port {} of {} is {active}", port.number, device.name);
    refused_setting(setting, list(&fit, "none", Mtu::to_string), offers)
}
