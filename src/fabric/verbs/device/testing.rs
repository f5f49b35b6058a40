//! Devices for tests, written down in few words.

use super::{
    Device, DevicePort, Gid, GidEntry, GidKind, Limits, LinkLayer, NodeType, PhysicalState, Pkey, PortState,
};
use std::net::Ipv6Addr;

pub fn gid(text: &str) -> Gid {
    text.parse::<Ipv6Addr>().expect("an address").into()
}

/// An entry on Ethernet.
pub fn entry(index: u32, address: &str, kind: GidKind) -> GidEntry {
    GidEntry { index, gid: gid(address), kind, interface: Some("eth0".into()) }
}

/// A port that is up, of a NIC with a table of 16 GIDs and one partition key.
fn port(number: u8, link: LinkLayer) -> DevicePort {
    DevicePort {
        number,
        state: PortState::Active,
        physical: PhysicalState::LinkUp,
        link,
        speed: None,
        lid: 0,
        active_mtu: None,
        max_mtu: None,
        max_message: None,
        grh_required: None,
        gid_table: 16,
        gids: Vec::new(),
        pkey_table: 1,
        pkeys: vec![Pkey { index: 0, key: 0xffff }],
        interfaces: Vec::new(),
    }
}

/// An Ethernet port with these entries.
pub fn ethernet(number: u8, gids: Vec<GidEntry>) -> DevicePort {
    DevicePort { gids, ..port(number, LinkLayer::Ethernet) }
}

/// An Ethernet port as most are: v1 and v2 of a link-local and of an IPv4 address.
pub fn roce(number: u8) -> DevicePort {
    let gids = vec![
        entry(0, "fe80::1", GidKind::RoceV1),
        entry(1, "fe80::1", GidKind::RoceV2),
        entry(2, "::ffff:10.0.0.1", GidKind::RoceV1),
        entry(3, "::ffff:10.0.0.1", GidKind::RoceV2),
    ];
    ethernet(number, gids)
}

/// An InfiniBand port.
pub fn infiniband(number: u8, lid: u16) -> DevicePort {
    let gid = GidEntry { interface: None, ..entry(0, "fe80::2:c903:0:1", GidKind::InfiniBand) };
    DevicePort { lid, gids: vec![gid], ..port(number, LinkLayer::InfiniBand) }
}

/// The same port without a link.
pub fn down(port: DevicePort) -> DevicePort {
    DevicePort { state: PortState::Down, physical: PhysicalState::Disabled, ..port }
}

pub fn device(name: &str, ports: Vec<DevicePort>) -> Device {
    Device {
        name: name.into(),
        node_type: NodeType::ChannelAdapter,
        firmware: String::new(),
        uverbs: Some(0),
        bus: None,
        numa_node: None,
        ports,
        limits: None,
    }
}

/// Limits of a device whose queues hold `max_qp_wr` work requests.
pub fn limits(max_qp_wr: u32) -> Limits {
    Limits {
        max_qp: 1 << 17,
        max_qp_wr,
        max_sge: 30,
        max_cq: 1 << 16,
        max_cqe: (1 << 22) - 1,
        max_mr: 1 << 24,
        max_mr_size: u64::MAX,
        max_pd: 1 << 24,
        max_qp_rd_atom: 16,
        max_qp_init_rd_atom: 16,
    }
}
