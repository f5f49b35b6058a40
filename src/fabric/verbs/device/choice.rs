//! The choice of device, port and GID, and its reasons.

use super::gid::GidEntry;
use super::model::{LinkLayer, Mtu};
use super::refusal::Refusal;
use std::fmt;

/// Why this device.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceReason {
    /// The configuration names it, there.
    Asked(String),
    /// It is the only one with an active port.
    OnlyActive,
    /// It has an active port, and the configuration asks for all such devices, there.
    OneOfActive(String),
}

/// Why this port.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PortReason {
    /// The configuration names it, there.
    Asked(String),
    /// No other port of the device is active.
    OnlyActive,
    /// It is the first of several active ones.
    FirstActive,
}

/// Why this entry of the GID table.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GidReason {
    /// The configuration names it, there.
    Asked(String),
    /// The first entry of an InfiniBand port, which is the port's own address.
    InfiniBand,
    /// The first RoCE v2 one with an IPv4 address.
    RoceV2Ipv4,
    /// The first RoCE v2 one with a global IPv6 address; there is none with IPv4.
    RoceV2Global,
    /// The first RoCE v2 one with a link-local address; there is no other of v2.
    RoceV2LinkLocal,
    /// The first RoCE v1 one; there is none of v2.
    RoceV1,
}

fn asked(f: &mut fmt::Formatter<'_>, origin: &str) -> fmt::Result {
    write!(f, "asked for by {origin}")
}

impl fmt::Display for DeviceReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceReason::Asked(origin) => asked(f, origin),
            DeviceReason::OnlyActive => f.write_str("the only one with an active port"),
            DeviceReason::OneOfActive(origin) => {
                write!(f, "one of those with an active port, which {origin} asks for")
            }
        }
    }
}

impl fmt::Display for PortReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PortReason::Asked(origin) => asked(f, origin),
            PortReason::OnlyActive => f.write_str("the only active one"),
            PortReason::FirstActive => f.write_str("the first active one"),
        }
    }
}

impl fmt::Display for GidReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            GidReason::Asked(origin) => return asked(f, origin),
            GidReason::InfiniBand => "the port's own, on InfiniBand",
            GidReason::RoceV2Ipv4 => "the first of RoCE v2 with an IPv4 address",
            GidReason::RoceV2Global => "the first of RoCE v2 with a global IPv6 address, and none has IPv4",
            GidReason::RoceV2LinkLocal => "the first of RoCE v2, link-local, and none is global",
            GidReason::RoceV1 => "the first of RoCE v1, and none is of v2",
        })
    }
}

/// A device of a process, its port and GID, and the attributes of its queue pairs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The device's name.
    pub device: String,
    /// The number of the rail: devices of two processes with the same number make one.
    pub rail: u8,
    /// Whether it is on the NUMA node that the settings prefer, or they prefer none.
    pub is_near: bool,
    /// Why it.
    pub device_reason: DeviceReason,
    /// The NUMA node that the device is next to; `None` if the machine does not say.
    pub numa_node: Option<u32>,
    /// The port's number.
    pub port: u8,
    /// Why it.
    pub port_reason: PortReason,
    /// The link layer of the port.
    pub link: LinkLayer,
    /// The port's address in an InfiniBand subnet; 0 on Ethernet.
    pub lid: u16,
    /// The entry of the port's GID table; `None` on an InfiniBand port that needs none and whose
    /// first entry is empty.
    pub gid: Option<GidEntry>,
    /// Why it.
    pub gid_reason: GidReason,
    /// Whether packets carry a global header: on Ethernet always; on InfiniBand where the port asks
    /// for it, or the configuration for a GID. (A peer of another subnet needs one too.)
    pub global: bool,
    /// The place in the port's partition key table.
    pub pkey_index: u16,
    /// The GID in that entry; `None` if the table could not be read.
    pub pkey: Option<u16>,
    /// Work requests of each queue of a queue pair.
    pub queue_depth: u32,
    /// The path MTU; `None` without a setting if the port's active MTU is unknown.
    pub mtu: Option<Mtu>,
}

/// The devices of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choices {
    /// At least one, by the numbers of their rails.
    pub rails: Vec<Choice>,
    /// Why other devices that the configuration asks for are not used now.
    pub passed_over: Vec<Refusal>,
}

impl Choice {
    /// The choice of which the NUMA node counts: the first near one, else the first.
    pub fn nearest<'a>(mut choices: impl Iterator<Item = &'a Choice> + Clone) -> Option<&'a Choice> {
        choices.clone().find(|choice| choice.is_near).or_else(|| choices.next())
    }
}

impl fmt::Display for Choice {
    /// One line: each part with its reason.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {} ({})", self.device, self.device_reason)?;
        write!(f, ", port {} ({})", self.port, self.port_reason)?;
        if self.lid != 0 {
            write!(f, ", lid {:#x}", self.lid)?;
        }
        match &self.gid {
            Some(gid) => write!(f, ", GID {gid}: {}", self.gid_reason),
            None => f.write_str(", no GID, and none is needed"),
        }
    }
}
