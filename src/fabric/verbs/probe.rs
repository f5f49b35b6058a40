//! Queries of the library about devices, as the plain values of [`device`](super::device).

use super::context::{DeviceContext, DeviceList};
use super::device::{
    Device, DevicePort, Gid, GidEntry, GidKind, Interface, Limits, LinkLayer, Mtu, NodeType, PhysicalState,
    Pkey, PortState, Speed, numa_node,
};
use super::library::Library;
use super::sys::*;
use crate::fabric::FabricError;
use std::ffi::{CStr, c_int};
use std::path::Path;
use std::sync::Arc;

/// A device that was opened, or why it could not be.
pub(super) struct Probed {
    pub name: String,
    pub opened: Result<(Device, Arc<DeviceContext>), FabricError>,
}

/// Opens and queries every device.
///
/// # Errors
/// If the devices can't be listed.
pub(super) fn probe(library: &'static Library) -> Result<Vec<Probed>, FabricError> {
    let list = DeviceList::new(library)?;
    let open = |at| {
        let context = list.open(at)?;
        Ok((model(&context, list.node_type(at))?, context))
    };
    Ok(list.names().into_iter().enumerate().map(|(at, name)| Probed { name, opened: open(at) }).collect())
}

/// Adds to devices from sysfs the values that only the library has. These are limits, and for each
/// port its MTU, its longest message and whether it needs global headers. Returns the devices that
/// could not be queried, each with the reason.
///
/// # Errors
/// If the devices can't be listed.
pub fn complete(
    library: &'static Library,
    devices: &mut [Device],
) -> Result<Vec<(String, FabricError)>, FabricError> {
    let mut silent = Vec::new();
    for Probed { name, opened } in probe(library)? {
        let told = match opened {
            Ok((told, _)) => told,
            Err(error) => {
                silent.push((name, error));
                continue;
            }
        };
        let Some(device) = devices.iter_mut().find(|device| device.name == name) else { continue };
        device.limits = told.limits;
        for port in &mut device.ports {
            let Some(told) = told.ports.iter().find(|told| told.number == port.number) else { continue };
            port.active_mtu = told.active_mtu;
            port.max_mtu = told.max_mtu;
            port.max_message = told.max_message;
            port.grh_required = told.grh_required;
        }
    }
    Ok(silent)
}

fn model(context: &DeviceContext, node_type: c_int) -> Result<Device, FabricError> {
    let attr = context.attr();
    let ports = (1..=attr.phys_port_cnt).map(|number| port(context, number)).collect::<Result<_, _>>()?;
    Ok(Device {
        name: context.name.clone(),
        node_type: match node_type {
            IBV_NODE_CA => NodeType::ChannelAdapter,
            IBV_NODE_RNIC => NodeType::Rnic,
            other => NodeType::Other(u8::try_from(other).unwrap_or(u8::MAX)),
        },
        firmware: text(&attr.fw_ver),
        uverbs: None,
        bus: None,
        numa_node: numa_node(&context.sysfs),
        ports,
        limits: Some(limits(attr)),
    })
}

fn text(bytes: &[std::ffi::c_char]) -> String {
    let bytes: Vec<u8> = bytes.iter().map(|byte| *byte as u8).take_while(|byte| *byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The limits of a device.
pub(super) fn limits(attr: &ibv_device_attr) -> Limits {
    let count = |count: c_int| u32::try_from(count).unwrap_or(0);
    Limits {
        max_qp: count(attr.max_qp),
        max_qp_wr: count(attr.max_qp_wr),
        max_sge: count(attr.max_sge),
        max_cq: count(attr.max_cq),
        max_cqe: count(attr.max_cqe),
        max_mr: count(attr.max_mr),
        max_mr_size: attr.max_mr_size,
        max_pd: count(attr.max_pd),
        max_qp_rd_atom: count(attr.max_qp_rd_atom),
        max_qp_init_rd_atom: count(attr.max_qp_init_rd_atom),
    }
}

fn port(context: &DeviceContext, number: u8) -> Result<DevicePort, FabricError> {
    let attr = context.port(number)?;
    let link = match attr.link_layer {
        IBV_LINK_LAYER_ETHERNET => LinkLayer::Ethernet,
        // Drivers from before there was Ethernet leave it unsaid.
        _ => LinkLayer::InfiniBand,
    };
    let gid_table = u32::try_from(attr.gid_tbl_len).unwrap_or(0);
    let gids = gids(context, number, gid_table, link);
    Ok(DevicePort {
        number,
        state: match attr.state {
            IBV_PORT_DOWN => PortState::Down,
            IBV_PORT_INIT => PortState::Init,
            IBV_PORT_ARMED => PortState::Armed,
            IBV_PORT_ACTIVE => PortState::Active,
            IBV_PORT_ACTIVE_DEFER => PortState::ActiveDefer,
            _ => PortState::Unknown,
        },
        physical: PhysicalState::from_code(attr.phys_state),
        link,
        speed: speed(attr.active_speed, attr.active_width),
        lid: if link == LinkLayer::Ethernet { 0 } else { attr.lid },
        active_mtu: Mtu::from_code(attr.active_mtu),
        max_mtu: Mtu::from_code(attr.max_mtu),
        max_message: Some(attr.max_msg_sz),
        grh_required: Some(attr.flags & IBV_QPF_GRH_REQUIRED != 0),
        gid_table,
        interfaces: interfaces(&gids),
        gids,
        pkey_table: attr.pkey_tbl_len.into(),
        pkeys: (0..attr.pkey_tbl_len).filter_map(|index| pkey(context, number, index)).collect(),
    })
}

/// The speed of a port by the codes of libibverbs (`ibv_query_port(3)`); `None` for unknown ones.
pub(super) fn speed(lane: u8, width: u8) -> Option<Speed> {
    let (tenths, generation) = match lane {
        1 => (25, "SDR"),
        2 => (50, "DDR"),
        4 => (100, "QDR"),
        8 => (100, "FDR10"),
        16 => (140, "FDR"),
        32 => (250, "EDR"),
        64 => (500, "HDR"),
        128 => (1000, "NDR"),
        _ => return None,
    };
    let width = match width {
        1 => 1,
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => return None,
    };
    Some(Speed { megabits: tenths * 100 * u32::from(width), width, generation: generation.into() })
}

fn interfaces(gids: &[GidEntry]) -> Vec<Interface> {
    let mut interfaces: Vec<Interface> = Vec::new();
    for name in gids.iter().filter_map(|entry| entry.interface.clone()) {
        if interfaces.iter().all(|interface| interface.name != name) {
            interfaces.push(Interface { name, mtu: None });
        }
    }
    interfaces
}

/// The entries of a port's GID table that hold something.
pub(super) fn gids(context: &DeviceContext, port: u8, table: u32, link: LinkLayer) -> Vec<GidEntry> {
    let last = table.min(GidEntry::LAST_USABLE + 1);
    (0..last)
        .filter_map(|index| gid(context, port, index, link))
        .filter(|entry| !entry.gid.is_empty())
        .collect()
}

/// An entry of the GID table; `None` for an empty one, of which sparse tables are full.
pub(super) fn gid(context: &DeviceContext, port: u8, index: u32, link: LinkLayer) -> Option<GidEntry> {
    let Some(query) = context.library.query_gid_ex else { return old_gid(context, port, index, link) };
    let mut entry = ibv_gid_entry::default();
    let size = size_of::<ibv_gid_entry>();
    // SAFETY: an opened device, and a struct of the size that is given for the answer.
    match unsafe { query(context.as_ptr(), port.into(), index, &mut entry, 0, size) }.abs() {
        0 => Some(GidEntry {
            index,
            gid: Gid(entry.gid.raw),
            kind: match entry.gid_type {
                IBV_GID_TYPE_IB => GidKind::InfiniBand,
                IBV_GID_TYPE_ROCE_V1 => GidKind::RoceV1,
                IBV_GID_TYPE_ROCE_V2 => GidKind::RoceV2,
                _ => GidKind::Unknown,
            },
            interface: interface(entry.ndev_ifindex),
        }),
        libc::EOPNOTSUPP => old_gid(context, port, index, link),
        _ => None,
    }
}

/// The same by a library or a kernel that does not tell the type; sysfs does.
fn old_gid(context: &DeviceContext, port: u8, index: u32, link: LinkLayer) -> Option<GidEntry> {
    let mut gid = ibv_gid::default();
    let place = c_int::try_from(index).ok()?;
    // SAFETY: an opened device, and a GID for the answer.
    if unsafe { (context.library.query_gid)(context.as_ptr(), port, place, &mut gid) } != 0 {
        return None;
    }
    let attrs =
        Path::new("/sys/class/infiniband").join(&context.name).join(format!("ports/{port}/gid_attrs"));
    let read = |what: &str| std::fs::read_to_string(attrs.join(what).join(index.to_string())).ok();
    let kind = match read("types").as_deref().map(str::trim) {
        _ if link == LinkLayer::InfiniBand => GidKind::InfiniBand,
        Some("RoCE v2") => GidKind::RoceV2,
        Some("IB/RoCE v1") => GidKind::RoceV1,
        _ => GidKind::Unknown,
    };
    let interface = read("ndevs").map(|name| name.trim().to_string()).filter(|name| !name.is_empty());
    Some(GidEntry { index, gid: Gid(gid.raw), kind, interface })
}

/// The name of a network interface; 0 is none.
fn interface(index: u32) -> Option<String> {
    let mut name = [0; libc::IF_NAMESIZE];
    // SAFETY: the buffer holds the longest name and its zero byte.
    let found = unsafe { libc::if_indextoname(index, name.as_mut_ptr()) };
    if found.is_null() {
        return None;
    }
    // SAFETY: the name was written, with a zero byte at its end.
    Some(unsafe { CStr::from_ptr(found) }.to_string_lossy().into_owned())
}

/// An entry of the partition key table; `None` for one without a key.
fn pkey(context: &DeviceContext, port: u8, index: u16) -> Option<Pkey> {
    let mut key = 0u16;
    // SAFETY: an open device, and a buffer for the answer, which is in network order.
    let result = unsafe { (context.library.query_pkey)(context.as_ptr(), port, index.into(), &mut key) };
    let key = u16::from_be(key);
    (result == 0 && key & 0x7fff != 0).then_some(Pkey { index, key })
}
