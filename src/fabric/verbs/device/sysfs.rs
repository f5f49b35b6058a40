//! Devices as the kernel shows them under `/sys`.

use super::gid::{Gid, GidEntry, GidKind};
use super::model::{
    Device, DevicePort, Interface, LinkLayer, NodeType, PhysicalState, Pkey, PortState, Speed,
};
use rustix::fs::{Access, access};
use std::collections::BTreeMap;
use std::io;
use std::net::Ipv6Addr;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The devices of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Whether the kernel has the RDMA subsystem at all.
    pub subsystem: bool,
    /// Every device, by name.
    pub devices: Vec<Device>,
}

/// Reads every device under `sysfs`, which is `/sys` but in tests.
///
/// A device or port that goes away meanwhile is left out. The value of a file that can't be read or
/// understood counts as not known.
///
/// # Errors
/// The folder of devices is there and can't be read.
pub fn read(sysfs: &Path) -> io::Result<Found> {
    let class = sysfs.join("class/infiniband");
    let names = match names_in(&class) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Ok(Found { subsystem: false, devices: Vec::new() });
        }
        names => names?,
    };
    let uverbs = uverbs(sysfs);
    let mut devices: Vec<_> =
        names.into_iter().filter_map(|name| device(sysfs, &class.join(&name), name, &uverbs)).collect();
    devices.sort_by_key(|device| natural(&device.name));
    Ok(Found { subsystem: true, devices })
}

/// Whether this process may use a device.
#[derive(Debug)]
#[non_exhaustive]
pub enum UserAccess {
    /// It may.
    Allowed,
    /// The kernel offers the device to no program: `ib_uverbs` is not loaded.
    NoDriver,
    /// The device's file can't be opened for reading and writing.
    Refused {
        /// A path such as `/dev/infiniband/uverbs0`.
        file: String,
        /// Why not.
        why: io::Error,
    },
}

/// Looks whether this process may use `device`, by its file under `dev`, which is `/dev` but in
/// tests. Opens nothing.
pub fn user_access(dev: &Path, device: &Device) -> UserAccess {
    let Some(path) = device_file(dev, device) else { return UserAccess::NoDriver };
    match access(&path, Access::READ_OK | Access::WRITE_OK) {
        Ok(()) => UserAccess::Allowed,
        Err(why) => UserAccess::Refused { file: path.display().to_string(), why: why.into() },
    }
}

/// The file of `device` under `dev`, through which programs use it; `None` if `ib_uverbs` offers
/// none.
pub fn device_file(dev: &Path, device: &Device) -> Option<PathBuf> {
    device.uverbs.map(|number| dev.join(format!("infiniband/uverbs{number}")))
}

fn names_in(folder: &Path) -> io::Result<Vec<String>> {
    let entries = std::fs::read_dir(folder)?;
    // Names of the kernel's own are ASCII.
    Ok(entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect())
}

/// The names in a folder that are numbers, in their order. A folder that is not there is empty.
fn numbers_in<T: FromStr + Ord>(folder: &Path) -> Vec<T> {
    let mut numbers: Vec<T> =
        names_in(folder).unwrap_or_default().iter().filter_map(|name| name.parse().ok()).collect();
    numbers.sort();
    numbers
}

fn text(file: &Path) -> Option<String> {
    std::fs::read_to_string(file).ok().map(|text| text.trim().to_string())
}

/// The number that a file with `4: ACTIVE` begins with.
fn code(file: &Path) -> Option<u8> {
    text(file)?.split(':').next()?.trim().parse().ok()
}

fn hex(file: &Path) -> Option<u16> {
    u16::from_str_radix(text(file)?.strip_prefix("0x")?, 16).ok()
}

/// A name split into text and numbers, so that `mlx5_10` sorts behind `mlx5_9`.
pub(super) fn natural(name: &str) -> Vec<(String, u64)> {
    let mut parts: Vec<(String, u64)> = vec![(String::new(), 0)];
    let mut in_number = false;
    for c in name.chars() {
        match c.to_digit(10) {
            Some(digit) => {
                in_number = true;
                let last = parts.len() - 1;
                parts[last].1 = parts[last].1.saturating_mul(10).saturating_add(digit.into());
            }
            None if in_number => {
                in_number = false;
                parts.push((c.to_string(), 0));
            }
            None => {
                let last = parts.len() - 1;
                parts[last].0.push(c);
            }
        }
    }
    parts
}

/// The number of each device's file in `/dev/infiniband`.
fn uverbs(sysfs: &Path) -> BTreeMap<String, u32> {
    let class = sysfs.join("class/infiniband_verbs");
    let number = |name: &String| name.strip_prefix("uverbs")?.parse().ok();
    let names = names_in(&class).unwrap_or_default();
    names.iter().filter_map(|name| Some((text(&class.join(name).join("ibdev"))?, number(name)?))).collect()
}

fn device(sysfs: &Path, folder: &Path, name: String, uverbs: &BTreeMap<String, u32>) -> Option<Device> {
    let node_type = match code(&folder.join("node_type"))? {
        1 => NodeType::ChannelAdapter,
        4 => NodeType::Rnic,
        other => NodeType::Other(other),
    };
    let bus = std::fs::read_link(folder.join("device")).ok();
    Some(Device {
        node_type,
        firmware: text(&folder.join("fw_ver")).unwrap_or_default(),
        uverbs: uverbs.get(&name).copied(),
        bus: bus.and_then(|path| Some(path.file_name()?.to_str()?.to_string())),
        numa_node: numa_node(folder),
        ports: numbers_in(&folder.join("ports"))
            .into_iter()
            .filter_map(|number| port(sysfs, &folder.join(format!("ports/{number}")), number))
            .collect(),
        limits: None,
        name,
    })
}

/// The NUMA node that a device is next to, from its folder in sysfs. `None` for a software device,
/// which is on no bus, and if the machine does not say (-1).
pub(in crate::fabric::verbs) fn numa_node(folder: &Path) -> Option<u32> {
    text(&folder.join("device/numa_node"))?.parse().ok()
}

fn port(sysfs: &Path, folder: &Path, number: u8) -> Option<DevicePort> {
    let file = |name: &str| folder.join(name);
    let state = match code(&file("state"))? {
        1 => PortState::Down,
        2 => PortState::Init,
        3 => PortState::Armed,
        4 => PortState::Active,
        5 => PortState::ActiveDefer,
        _ => PortState::Unknown,
    };
    let physical = PhysicalState::from_code(code(&file("phys_state")).unwrap_or(0));
    let link = match text(&file("link_layer")).as_deref() {
        Some("InfiniBand") => LinkLayer::InfiniBand,
        Some("Ethernet") => LinkLayer::Ethernet,
        _ => LinkLayer::Unknown,
    };
    let places: Vec<u32> = numbers_in(&file("gids"));
    let gids: Vec<_> = places.iter().filter_map(|index| gid(folder, *index, link)).collect();
    let pkeys: Vec<u16> = numbers_in(&file("pkeys"));
    Some(DevicePort {
        number,
        state,
        physical,
        link,
        speed: text(&file("rate")).and_then(|rate| speed(&rate)),
        lid: hex(&file("lid")).unwrap_or(0),
        active_mtu: None,
        max_mtu: None,
        max_message: None,
        grh_required: None,
        gid_table: places.last().map_or(0, |last| last.saturating_add(1)),
        interfaces: interfaces(sysfs, &gids),
        gids,
        pkey_table: pkeys.last().map_or(0, |last| u32::from(*last) + 1),
        pkeys: pkeys.iter().filter_map(|index| pkey(folder, *index)).collect(),
    })
}

/// An entry of the GID table; `None` for an empty one. Its type and interface are files of their
/// own, which an entry that has none refuses to be read.
fn gid(port: &Path, index: u32, link: LinkLayer) -> Option<GidEntry> {
    let gid = Gid::from(text(&port.join(format!("gids/{index}")))?.parse::<Ipv6Addr>().ok()?);
    if gid.is_empty() {
        return None;
    }
    let kind = match text(&port.join(format!("gid_attrs/types/{index}"))).as_deref() {
        Some("RoCE v2") => GidKind::RoceV2,
        // The kernel has one name for both.
        Some("IB/RoCE v1") if link == LinkLayer::Ethernet => GidKind::RoceV1,
        _ if link == LinkLayer::InfiniBand => GidKind::InfiniBand,
        _ => GidKind::Unknown,
    };
    let interface =
        text(&port.join(format!("gid_attrs/ndevs/{index}"))).filter(|interface| !interface.is_empty());
    Some(GidEntry { index, gid, kind, interface })
}

/// An entry of the partition key table; `None` for one without a key: 0 in the bits below
/// membership.
fn pkey(port: &Path, index: u16) -> Option<Pkey> {
    let key = hex(&port.join(format!("pkeys/{index}")))?;
    (key & 0x7fff != 0).then_some(Pkey { index, key })
}

fn interfaces(sysfs: &Path, gids: &[GidEntry]) -> Vec<Interface> {
    let mut interfaces: Vec<Interface> = Vec::new();
    for name in gids.iter().filter_map(|entry| entry.interface.as_ref()) {
        if interfaces.iter().all(|interface| interface.name != *name) {
            let mtu = text(&sysfs.join("class/net").join(name).join("mtu"));
            let mtu = mtu.and_then(|mtu| mtu.parse().ok());
            interfaces.push(Interface { name: name.clone(), mtu });
        }
    }
    interfaces
}

/// Reads `2.5 Gb/sec (1X SDR)`; the speed's name may be missing.
fn speed(rate: &str) -> Option<Speed> {
    let (number, rest) = rate.split_once(" Gb/sec (")?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let tenths: u32 = fraction.get(..1)?.parse().ok()?;
    let megabits = whole.parse::<u32>().ok()?.checked_mul(1000)?.checked_add(tenths * 100)?;
    let (width, generation) = rest.strip_suffix(')')?.split_once('X')?;
    Some(Speed { megabits, width: width.parse().ok()?, generation: generation.trim().into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_read_as_the_kernel_writes_it() {
        let shown = |rate: &str| speed(rate).map(|speed| (speed.megabits, speed.to_string()));
        assert_eq!(shown("100 Gb/sec (4X EDR)"), Some((100_000, "100 Gb/s (4X EDR)".into())));
        assert_eq!(shown("2.5 Gb/sec (1X SDR)"), Some((2_500, "2.5 Gb/s (1X SDR)".into())));
        assert_eq!(shown("40 Gb/sec (4X)"), Some((40_000, "40 Gb/s (4X)".into())));
        for odd in ["", "fast", "100 Gb/sec", "x Gb/sec (4X EDR)", "1. Gb/sec (1X)", "5000000 Gb/sec (4X)"] {
            assert_eq!(speed(odd), None, "{odd}");
        }
    }

    #[test]
    fn names_are_in_the_order_of_their_numbers() {
        let mut names =
            ["mlx5_10", "mlx5_9", "bnxt_re0", "mlx5_1", "rocep59s0f1", "rocep59s0f0", "mlx5_bond_0"];
        names.sort_by_key(|name| natural(name));
        assert_eq!(
            names,
            ["bnxt_re0", "mlx5_1", "mlx5_9", "mlx5_10", "mlx5_bond_0", "rocep59s0f0", "rocep59s0f1"]
        );
    }
}
