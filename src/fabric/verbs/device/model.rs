//! Devices and ports as plain values.

use super::gid::GidEntry;
use std::fmt;

/// The kind of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NodeType {
    /// A channel adapter of InfiniBand or RoCE, which reliable connections need.
    ChannelAdapter,
    /// An iWARP NIC: its connections are made by a connection manager only.
    Rnic,
    /// Something else, with the kernel's number for it.
    Other(u8),
}

impl fmt::Display for NodeType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NodeType::ChannelAdapter => f.write_str("channel adapter"),
            NodeType::Rnic => f.write_str("iWARP"),
            NodeType::Other(number) => write!(f, "node type {number}"),
        }
    }
}

/// The logical state of a port (InfiniBand Architecture Specification, chapter 14.2.5.6:
/// PortState).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PortState {
    /// No link.
    Down,
    /// Linked, but not set up by a subnet manager.
    Init,
    /// Set up, but not yet let to carry data.
    Armed,
    /// Carries data.
    Active,
    /// Was active and has lost its link for a moment.
    ActiveDefer,
    /// The kernel did not say.
    Unknown,
}

impl fmt::Display for PortState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            PortState::Down => "DOWN",
            PortState::Init => "INIT",
            PortState::Armed => "ARMED",
            PortState::Active => "ACTIVE",
            PortState::ActiveDefer => "ACTIVE_DEFER",
            PortState::Unknown => "UNKNOWN",
        })
    }
}

/// The physical state of a port (chapter 14.2.5.6: PortPhysicalState).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PhysicalState {
    /// Saves power.
    Sleep,
    /// Looks for a link.
    Polling,
    /// Switched off.
    Disabled,
    /// Agrees on width and speed.
    Training,
    /// Linked.
    LinkUp,
    /// Repairs its link.
    LinkErrorRecovery,
    /// Under test.
    Test,
    /// The kernel did not say.
    Unknown,
}

impl PhysicalState {
    /// The state with this number.
    pub fn from_code(code: u8) -> PhysicalState {
        match code {
            1 => PhysicalState::Sleep,
            2 => PhysicalState::Polling,
            3 => PhysicalState::Disabled,
            4 => PhysicalState::Training,
            5 => PhysicalState::LinkUp,
            6 => PhysicalState::LinkErrorRecovery,
            7 => PhysicalState::Test,
            _ => PhysicalState::Unknown,
        }
    }
}

impl fmt::Display for PhysicalState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PhysicalState::Sleep => "Sleep",
            PhysicalState::Polling => "Polling",
            PhysicalState::Disabled => "Disabled",
            PhysicalState::Training => "PortConfigurationTraining",
            PhysicalState::LinkUp => "LinkUp",
            PhysicalState::LinkErrorRecovery => "LinkErrorRecovery",
            PhysicalState::Test => "PhyTest",
            PhysicalState::Unknown => "Unknown",
        })
    }
}

/// The link layer of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LinkLayer {
    /// InfiniBand: a port has a lid from its subnet manager.
    InfiniBand,
    /// Ethernet: RoCE on a channel adapter.
    Ethernet,
    /// The kernel did not say.
    Unknown,
}

impl fmt::Display for LinkLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LinkLayer::InfiniBand => "InfiniBand",
            LinkLayer::Ethernet => "Ethernet",
            LinkLayer::Unknown => "unknown link layer",
        })
    }
}

/// The payload of a packet in bytes: one of five sizes (`enum ibv_mtu`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Mtu {
    /// 256 bytes.
    B256 = 1,
    /// 512 bytes.
    B512 = 2,
    /// 1024 bytes.
    B1024 = 3,
    /// 2048 bytes.
    B2048 = 4,
    /// 4096 bytes.
    B4096 = 5,
}

impl Mtu {
    /// Every size, smallest first.
    pub const ALL: [Mtu; 5] = [Mtu::B256, Mtu::B512, Mtu::B1024, Mtu::B2048, Mtu::B4096];

    /// The payload of one packet: 256 to 4096.
    pub fn bytes(self) -> u32 {
        128 << self.code()
    }

    /// Its number on the wire and in libibverbs, 1 to 5.
    pub fn code(self) -> u8 {
        self as u8
    }

    /// The size with this number.
    pub fn from_code(code: u32) -> Option<Mtu> {
        Mtu::ALL.into_iter().find(|mtu| u32::from(mtu.code()) == code)
    }

    /// The size of exactly this many bytes.
    pub fn from_bytes(bytes: u32) -> Option<Mtu> {
        Mtu::ALL.into_iter().find(|mtu| mtu.bytes() == bytes)
    }
}

impl fmt::Display for Mtu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.bytes().fmt(f)
    }
}

/// How fast a port is linked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Speed {
    /// Megabits per second, of all lanes of the link together.
    pub megabits: u32,
    /// Lanes of the link: 1, 2, 4, 8 or 12.
    pub width: u8,
    /// The name of a lane's speed, as EDR or HDR; empty if it has none.
    pub generation: String,
}

impl fmt::Display for Speed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, tenths) = (self.megabits / 1000, self.megabits % 1000 / 100);
        match tenths {
            0 => write!(f, "{whole} Gb/s ({}X", self.width)?,
            _ => write!(f, "{whole}.{tenths} Gb/s ({}X", self.width)?,
        }
        if !self.generation.is_empty() {
            write!(f, " {}", self.generation)?;
        }
        f.write_str(")")
    }
}

/// An entry of a port's partition key table that is not empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pkey {
    /// Its place in the table.
    pub index: u16,
    /// The key; its highest bit is full membership.
    pub key: u16,
}

impl fmt::Display for Pkey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({:#06x})", self.index, self.key)
    }
}

/// A network interface that a port's GIDs belong to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// As in `ip link`, such as `eth0`.
    pub name: String,
    /// Bytes that a frame of it carries, headers of RDMA included.
    pub mtu: Option<u32>,
}

/// The state, addresses and limits of one port, from sysfs and the library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DevicePort {
    /// Its number, from 1.
    pub number: u8,
    /// Whether it carries data.
    pub state: PortState,
    /// Whether it has a link.
    pub physical: PhysicalState,
    /// Its link layer.
    pub link: LinkLayer,
    /// How fast; `None` if the kernel did not say.
    pub speed: Option<Speed>,
    /// Its address within an InfiniBand subnet; 0 for none, as on Ethernet.
    pub lid: u16,
    /// The largest packets that it carries now; only libibverbs tells.
    pub active_mtu: Option<Mtu>,
    /// The largest packets that it could carry; only libibverbs tells.
    pub max_mtu: Option<Mtu>,
    /// Bytes of the longest message of one work request; only libibverbs tells.
    pub max_message: Option<u32>,
    /// Whether an InfiniBand port asks for a global header in every packet; only libibverbs tells.
    pub grh_required: Option<bool>,
    /// Number of entries of the GID table.
    pub gid_table: u32,
    /// The non-empty entries, by index.
    pub gids: Vec<GidEntry>,
    /// Number of entries of the partition key table.
    pub pkey_table: u32,
    /// The non-empty entries, by index.
    pub pkeys: Vec<Pkey>,
    /// The network interfaces of its GIDs.
    pub interfaces: Vec<Interface>,
}

impl DevicePort {
    /// Whether it carries data.
    pub fn is_active(&self) -> bool {
        self.state == PortState::Active
    }
}

/// The limits of a device that matter here (`ibv_query_device(3)`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Queue pairs.
    pub max_qp: u32,
    /// Work requests of one queue.
    pub max_qp_wr: u32,
    /// Scatter/gather elements of one work request.
    pub max_sge: u32,
    /// Completion queues.
    pub max_cq: u32,
    /// Completions of one queue.
    pub max_cqe: u32,
    /// Memory regions.
    pub max_mr: u32,
    /// Bytes of one memory region.
    pub max_mr_size: u64,
    /// Protection domains.
    pub max_pd: u32,
    /// Reads of a peer that a queue pair serves at a time.
    pub max_qp_rd_atom: u32,
    /// Reads that a queue pair may have under way.
    pub max_qp_init_rd_atom: u32,
}

/// An RDMA device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// As in sysfs, such as `mlx5_0`.
    pub name: String,
    /// Its kind.
    pub node_type: NodeType,
    /// The version of its firmware; empty if it has none.
    pub firmware: String,
    /// The number in `/dev/infiniband/uverbsN`, through which programs use it; `None` if they
    /// can't.
    pub uverbs: Option<u32>,
    /// Its PCI address; `None` for a software device.
    pub bus: Option<String>,
    /// The NUMA node that it is next to.
    pub numa_node: Option<u32>,
    /// Its ports, by number.
    pub ports: Vec<DevicePort>,
    /// Its limits, which only libibverbs reports.
    pub limits: Option<Limits>,
}

impl Device {
    /// The reason why the device has no reliable connections; `None` if it has.
    pub fn unusable(&self) -> Option<&'static str> {
        match self.node_type {
            NodeType::ChannelAdapter => None,
            NodeType::Rnic => Some("an iWARP NIC, whose connections need a connection manager"),
            NodeType::Other(_) => Some("no channel adapter of InfiniBand or RoCE"),
        }
    }

    /// Its ports that carry data, by number; none if it is unusable.
    pub fn active_ports(&self) -> impl Iterator<Item = &DevicePort> {
        self.ports.iter().filter(|port| self.unusable().is_none() && port.is_active())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_mtu_is_its_code_and_its_bytes() {
        let bytes: Vec<_> = Mtu::ALL.iter().map(|mtu| mtu.bytes()).collect();
        assert_eq!(bytes, [256, 512, 1024, 2048, 4096]);
        for mtu in Mtu::ALL {
            assert_eq!(Mtu::from_code(mtu.code().into()), Some(mtu));
            assert_eq!(Mtu::from_bytes(mtu.bytes()), Some(mtu));
        }
        assert_eq!((Mtu::from_code(0), Mtu::from_code(6), Mtu::from_bytes(1500)), (None, None, None));
    }

    #[test]
    fn a_speed_says_rate_and_width() {
        let speed = |megabits, width, generation: &str| {
            Speed { megabits, width, generation: generation.into() }.to_string()
        };
        assert_eq!(speed(100_000, 4, "EDR"), "100 Gb/s (4X EDR)");
        assert_eq!(speed(2_500, 1, "SDR"), "2.5 Gb/s (1X SDR)");
        assert_eq!(speed(0, 1, ""), "0 Gb/s (1X)");
    }
}
