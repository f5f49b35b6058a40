//! Which device, port and GID: what the options name, else the first that can be used.

use super::context::{Context, DeviceList};
use super::failure::unavailable;
use super::library::Library;
use super::options::{VerbsOptions, mtu_bytes, mtu_code, refuse};
use super::sys::*;
use crate::fabric::FabricError;
use std::sync::Arc;

/// How a port's addresses are routed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum GidType {
    /// InfiniBand: by lid.
    InfiniBand = 0,
    /// RoCE v1: within an Ethernet network.
    RoceV1 = 1,
    /// RoCE v2: over UDP.
    RoceV2 = 2,
}

impl GidType {
    pub fn from_code(code: u8) -> Option<Self> {
        [GidType::InfiniBand, GidType::RoceV1, GidType::RoceV2].into_iter().find(|kind| *kind as u8 == code)
    }

    pub fn name(self) -> &'static str {
        match self {
            GidType::InfiniBand => "InfiniBand",
            GidType::RoceV1 => "RoCE v1",
            GidType::RoceV2 => "RoCE v2",
        }
    }
}

/// The device, port and address that a fabric uses.
pub(super) struct Chosen {
    pub context: Arc<Context>,
    pub port: u8,
    pub lid: u16,
    pub gid: ibv_gid,
    pub gid_index: u8,
    pub gid_type: GidType,
    /// Every address needs a global route header.
    pub grh_required: bool,
    /// Code of the path MTU, at most.
    pub mtu: u32,
    /// Bytes of the longest work request.
    pub max_message: u32,
}

impl Chosen {
    /// Opens what the options name.
    pub fn open(library: &'static Library, options: &VerbsOptions) -> Result<Self, FabricError> {
        let devices = DeviceList::new(library)?;
        let names = devices.names();
        if names.is_empty() {
            let why =
                "there is no RDMA device (`rdma link` lists none): load its driver, or choose another fabric";
            return Err(unavailable(why));
        }
        let mut passed_over = Vec::new();
        for (at, name) in names.iter().enumerate() {
            if options.device.as_ref().is_some_and(|wanted| wanted != name) {
                continue;
            }
            let context = match devices.open(at) {
                Ok(context) => context,
                Err(error) if options.device.is_some() => return Err(error),
                Err(error) => {
                    passed_over.push(error.to_string());
                    continue;
                }
            };
            match active_port(&context, options)? {
                Ok((port, attr)) => return Chosen::at(context, port, &attr, options),
                Err(why) => passed_over.push(why),
            }
        }
        let wanted = options.device.as_deref().unwrap_or("with an active port");
        let what = if passed_over.is_empty() { names.join(", ") } else { passed_over.join("; ") };
        Err(unavailable(format!("there is no device {wanted} that can be used; there are: {what}")))
    }

    fn at(
        context: Arc<Context>,
        port: u8,
        attr: &ibv_port_attr,
        options: &VerbsOptions,
    ) -> Result<Self, FabricError> {
        let ethernet = attr.link_layer == IBV_LINK_LAYER_ETHERNET;
        let (gid_index, gid, gid_type) = match options.gid_index {
            Some(index) => gid_at(&context, port, index, ethernet).filter(|(gid, _)| gid.raw != [0; 16]).map(
                |(gid, kind)| (index, gid, kind),
            ),
            None if ethernet => best_gid(&context, port, attr),
            None => gid_at(&context, port, 0, false).map(|(gid, kind)| (0, gid, kind)),
        }
        .ok_or_else(|| {
            let index = options.gid_index.map_or("any index".into(), |index| format!("index {index}"));
            unavailable(format!(
                "port {port} of {} has no GID at {index}: give its network interface an address, or choose another index",
                context.name
            ))
        })?;
        let mtu = match options.mtu {
            None => attr.active_mtu,
            Some(bytes) if mtu_code(bytes)? <= attr.active_mtu => mtu_code(bytes)?,
            Some(bytes) => {
                let active = mtu_bytes(attr.active_mtu);
                let why =
                    format!("the mtu {bytes} is more than the {active} of port {port} of {}", context.name);
                return Err(unavailable(why));
            }
        };
        if options.pkey_index >= attr.pkey_tbl_len.max(1) {
            return Err(refuse(
                "pkey_index",
                options.pkey_index.into(),
                "an index of the port's table (`ibv_devinfo -v`)",
            ));
        }
        Ok(Chosen {
            port,
            lid: attr.lid,
            gid,
            gid_index,
            gid_type,
            grh_required: ethernet || attr.flags & IBV_QPF_GRH_REQUIRED != 0,
            mtu,
            max_message: attr.max_msg_sz.clamp(1 << 12, 1 << 30),
            context,
        })
    }
}

/// The port that is named, or the first that is active; the inner error says why there is none.
fn active_port(
    context: &Context,
    options: &VerbsOptions,
) -> Result<Result<(u8, ibv_port_attr), String>, FabricError> {
    let count = context.attr().phys_port_cnt;
    let ports = options.port.map_or(1..=count, |port| port..=port);
    if let Some(port) = options.port.filter(|port| !(1..=count).contains(port)) {
        return Ok(Err(format!("{} (ports 1 to {count}, no port {port})", context.name)));
    }
    let mut states = Vec::new();
    for port in ports {
        let attr = context.port(port)?;
        if attr.state == IBV_PORT_ACTIVE || attr.state == IBV_PORT_ACTIVE_DEFER {
            return Ok(Ok((port, attr)));
        }
        states.push(format!("port {port} is {}", state_name(attr.state)));
    }
    Ok(Err(format!("{} ({})", context.name, states.join(", "))))
}

fn state_name(state: u32) -> &'static str {
    match state {
        IBV_PORT_DOWN => "down",
        IBV_PORT_INIT => "initialising: does a subnet manager run?",
        IBV_PORT_ARMED => "armed",
        _ => "in no usable state",
    }
}

/// The GID at an index and its type; `None` if there is none.
fn gid_at(context: &Context, port: u8, index: u8, ethernet: bool) -> Option<(ibv_gid, GidType)> {
    if let Some(query) = context.library.query_gid_ex {
        let mut entry = ibv_gid_entry::default();
        let (port, index) = (u32::from(port), u32::from(index));
        // SAFETY: an opened device, and a struct of the size that is given for the answer.
        let result =
            unsafe { query(context.as_ptr(), port, index, &mut entry, 0, size_of::<ibv_gid_entry>()) };
        if result == 0 {
            let kind = GidType::from_code(u8::try_from(entry.gid_type).ok()?)?;
            return Some((entry.gid, kind));
        }
        if result.abs() == libc::ENODATA {
            return None; // an empty entry of a sparse table
        }
    }
    let mut gid = ibv_gid::default();
    // SAFETY: an opened device, and a GID for the answer.
    let result = unsafe { (context.library.query_gid)(context.as_ptr(), port, index.into(), &mut gid) };
    if result != 0 || gid.raw == [0; 16] {
        return None;
    }
    let kind = if !ethernet {
        GidType::InfiniBand
    } else {
        let path = format!("/sys/class/infiniband/{}/ports/{port}/gid_attrs/types/{index}", context.name);
        match std::fs::read_to_string(path) {
            Ok(text) if text.contains("v2") => GidType::RoceV2,
            _ => GidType::RoceV1,
        }
    };
    Some((gid, kind))
}

/// How good a GID is for RoCE; the smaller the better (SPEC 4.3).
fn rank(gid: &ibv_gid, kind: GidType) -> u32 {
    let is_ipv4 = gid.raw[..10] == [0; 10] && gid.raw[10..12] == [0xFF; 2];
    let is_link_local = gid.raw[0] == 0xFE && gid.raw[1] & 0xC0 == 0x80;
    match kind {
        GidType::RoceV2 if is_ipv4 => 0,
        GidType::RoceV2 if !is_link_local => 1,
        GidType::RoceV2 => 2,
        GidType::RoceV1 | GidType::InfiniBand => 3,
    }
}

/// The best GID of an Ethernet port, whose table may have holes.
fn best_gid(context: &Context, port: u8, attr: &ibv_port_attr) -> Option<(u8, ibv_gid, GidType)> {
    let last = u8::try_from(attr.gid_tbl_len.clamp(1, 256) - 1).unwrap_or(u8::MAX);
    (0..=last)
        .filter_map(|index| gid_at(context, port, index, true).map(|(gid, kind)| (index, gid, kind)))
        .filter(|(_, gid, _)| gid.raw != [0; 16])
        .min_by_key(|(_, gid, kind)| rank(gid, *kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roce_v2_over_ipv4_is_the_best_gid_and_v1_the_last() {
        let gid = |start: &[u8], end: &[u8]| {
            let mut raw = [0; 16];
            raw[..start.len()].copy_from_slice(start);
            raw[16 - end.len()..].copy_from_slice(end);
            ibv_gid { raw }
        };
        let ipv4 = gid(&[], &[0xFF, 0xFF, 10, 99, 0, 1]);
        let global = gid(&[0x20, 0x01], &[1]);
        let local = gid(&[0xFE, 0x80], &[1]);
        let ranks = [
            rank(&ipv4, GidType::RoceV2),
            rank(&global, GidType::RoceV2),
            rank(&local, GidType::RoceV2),
            rank(&ipv4, GidType::RoceV1),
        ];
        assert_eq!(ranks, [0, 1, 2, 3]);
    }
}
