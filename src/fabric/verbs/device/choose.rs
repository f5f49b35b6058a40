//! The choice itself.

use super::choice::{Choice, Choices, DeviceReason, GidReason, PortReason};
use super::gid::{GidEntry, GidKind};
use super::model::{Device, DevicePort, LinkLayer};
use super::refusal::{self, Refusal};
use super::settings::{AUTO, DeviceSetting, DeviceSettings, MAX_RAILS};
use super::sysfs::natural;

/// Chooses devices, and for each its port and GID, and checks the other settings against their
/// limits.
///
/// The default device is the only one with an active port. The default port is the first active
/// one. The default GID is the first of the best kind: RoCE v2 with an IPv4 address, v2 with a
/// global IPv6 address, v2 link-local, v1; on InfiniBand entry 0. Unknown values of a device (see
/// [`Device`]) are not checked.
///
/// A list of devices is numbered as it is written: a device and the peer's of the same number make
/// a rail. [`AUTO`] numbers all usable devices in the order of their names, those without an active
/// port too. So two hosts with the same devices number them alike, whatever is down.
///
/// A device of several that is down is passed over, as long as another one is left.
///
/// # Errors
/// The first setting that the devices can't fulfil, or that must be set for the choice to be clear.
pub fn choose(devices: &[Device], device_settings: &DeviceSettings) -> Result<Choices, Refusal> {
    let Some(setting) = &device_settings.device else {
        let device = only_active(devices)?;
        let choice = choose_one(devices, device, DeviceReason::OnlyActive, 0, device_settings)?;
        return Ok(Choices { rails: vec![choice], passed_over: Vec::new() });
    };
    let origin = || setting.origin().to_owned();
    if setting.value == AUTO {
        let reason = || DeviceReason::OneOfActive(origin());
        let active = numbered(devices).filter(|(_, device)| device.active_ports().next().is_some());
        let chosen =
            active.map(|(rail, device)| choose_one(devices, device, reason(), rail, device_settings));
        return collect(chosen, |_| true).and_then(|found| found.ok_or_else(|| no_active(devices)));
    }
    let named: Vec<_> = setting.value.split(',').map(|name| named(devices, setting, name)).collect();
    let is_alone = named.len() == 1;
    let chosen = named.into_iter().zip(0..).map(|(named, rail)| {
        let (device, setting) = named?;
        let of_device = DeviceSettings { device: Some(setting), ..device_settings.clone() };
        choose_one(devices, device, DeviceReason::Asked(origin()), rail, &of_device)
    });
    let is_down = |why: &Refusal| matches!(why, Refusal::DeviceDown { .. } | Refusal::PortDown { .. });
    collect(chosen, |why| !is_alone && is_down(why)).and_then(|found| found.ok_or_else(|| no_active(devices)))
}

/// The choices, at most as many as a process can use; `None` if there is none. A refusal that may
/// not be passed over is the whole result, and so is one without a choice beside it.
fn collect(
    chosen: impl Iterator<Item = Result<Choice, Refusal>>,
    may_pass_over: impl Fn(&Refusal) -> bool,
) -> Result<Option<Choices>, Refusal> {
    let (mut rails, mut passed_over) = (Vec::new(), Vec::new());
    for choice in chosen {
        match choice {
            Ok(choice) if rails.len() < MAX_RAILS => rails.push(choice),
            Ok(_) => break,
            Err(refusal) if may_pass_over(&refusal) => passed_over.push(refusal),
            Err(refusal) => return Err(refusal),
        }
    }
    match (rails.is_empty(), passed_over.pop()) {
        (true, Some(refusal)) => Err(refusal),
        (true, None) => Ok(None),
        (false, last) => {
            passed_over.extend(last);
            Ok(Some(Choices { rails, passed_over }))
        }
    }
}

/// The usable devices by their names, with the numbers of their rails.
fn numbered(devices: &[Device]) -> impl Iterator<Item = (u8, &Device)> {
    let mut usable: Vec<_> = devices.iter().filter(|device| device.unusable().is_none()).collect();
    usable.sort_by_cached_key(|device| natural(&device.name));
    (0..=u8::MAX).zip(usable)
}

fn no_active(devices: &[Device]) -> Refusal {
    if devices.is_empty() {
        return Refusal::NoDevice;
    }
    Refusal::NoActivePort { devices: refusal::devices(devices) }
}

/// The choice of port and GID on a device.
fn choose_one(
    devices: &[Device],
    device: &Device,
    device_reason: DeviceReason,
    rail: u8,
    device_settings: &DeviceSettings,
) -> Result<Choice, Refusal> {
    let (port, port_reason) = choose_port(devices, device, device_settings)?;
    let by_lid = uses_lid(port);
    let global = !by_lid || port.grh_required == Some(true) || device_settings.gid_index.is_some();
    if by_lid && port.lid == 0 && !global {
        let (device, ports) = (device.name.clone(), refusal::ports(device));
        return Err(Refusal::NoLid { device, port: port.number, ports });
    }
    let (gid, gid_reason) = match &device_settings.gid_index {
        Some(setting) => asked_gid(device, port, setting).map(|(gid, reason)| (Some(gid), reason))?,
        None if by_lid => (first_gid(device, port, global)?, GidReason::InfiniBand),
        None => best_gid(device, port).map(|(gid, reason)| (Some(gid), reason))?,
    };
    let pkey = choose_pkey(device, port, &device_settings.pkey_index)?;
    Ok(Choice {
        device: device.name.clone(),
        rail,
        is_near: device_settings.near.is_none_or(|near| device.numa_node == Some(near)),
        device_reason,
        numa_node: device.numa_node,
        port: port.number,
        port_reason,
        link: port.link,
        lid: port.lid,
        gid: gid.cloned(),
        gid_reason,
        global,
        pkey_index: device_settings.pkey_index.value,
        pkey,
        queue_depth: choose_depth(device, &device_settings.queue_depth)?,
        mtu: match (&device_settings.mtu, port.active_mtu) {
            (Some(setting), Some(active)) if setting.value > active => {
                return Err(refusal::mtu(setting, device, port, active));
            }
            (Some(setting), _) => Some(setting.value),
            (None, active) => active,
        },
    })
}

fn only_active(devices: &[Device]) -> Result<&Device, Refusal> {
    let active: Vec<_> = devices.iter().filter(|device| device.active_ports().next().is_some()).collect();
    match active[..] {
        [] => Err(no_active(devices)),
        [device] => Ok(device),
        _ => Err(Refusal::SeveralDevices { count: active.len(), devices: refusal::devices(devices) }),
    }
}

/// A device that the setting names, and the setting with this name alone.
fn named<'a>(
    devices: &'a [Device],
    setting: &DeviceSetting<String>,
    name: &str,
) -> Result<(&'a Device, DeviceSetting<String>), Refusal> {
    let one = DeviceSetting { value: name.trim().to_owned(), ..setting.clone() };
    let listed = || refusal::devices(devices);
    let Some(device) = devices.iter().find(|device| device.name == one.value) else {
        return Err(Refusal::UnknownDevice { setting: one.to_string(), devices: listed() });
    };
    if let Some(why) = device.unusable() {
        return Err(Refusal::UnusableDevice { setting: one.to_string(), why, devices: listed() });
    }
    Ok((device, one))
}

fn choose_port<'a>(
    devices: &[Device],
    device: &'a Device,
    device_settings: &DeviceSettings,
) -> Result<(&'a DevicePort, PortReason), Refusal> {
    let ports = || refusal::ports(device);
    if let Some(setting) = &device_settings.port {
        let Some(port) = device.ports.iter().find(|port| port.number == setting.value) else {
            let device = device.name.clone();
            return Err(Refusal::UnknownPort { setting: setting.to_string(), device, ports: ports() });
        };
        if !port.is_active() {
            return Err(Refusal::PortDown {
                setting: setting.to_string(),
                device: device.name.clone(),
                port: port.number,
                state: port.state.to_string(),
                ports: ports(),
            });
        }
        return Ok((port, PortReason::Asked(setting.origin().into())));
    }
    let first = device.active_ports().min_by_key(|port| port.number);
    match (first, device.active_ports().count()) {
        (Some(port), 1) => Ok((port, PortReason::OnlyActive)),
        (Some(port), _) => Ok((port, PortReason::FirstActive)),
        (None, _) => Err(Refusal::DeviceDown {
            setting: device_settings
                .device
                .as_ref()
                .map_or_else(|| device.name.clone(), DeviceSetting::to_string),
            devices: refusal::devices(devices),
        }),
    }
}

/// Whether the port's address is a lid. A port of unknown kind that has one is of InfiniBand, as
/// Ethernet gives none.
fn uses_lid(port: &DevicePort) -> bool {
    match port.link {
        LinkLayer::InfiniBand => true,
        LinkLayer::Ethernet => false,
        LinkLayer::Unknown => port.lid != 0,
    }
}

fn entry(port: &DevicePort, index: u8) -> Option<&GidEntry> {
    port.gids.iter().find(|entry| entry.index == u32::from(index) && entry.is_usable())
}

fn asked_gid<'a>(
    device: &Device,
    port: &'a DevicePort,
    setting: &DeviceSetting<u8>,
) -> Result<(&'a GidEntry, GidReason), Refusal> {
    let entry = entry(port, setting.value).ok_or_else(|| refusal::gid_index(setting, device, port))?;
    Ok((entry, GidReason::Asked(setting.origin().into())))
}

fn first_gid<'a>(
    device: &Device,
    port: &'a DevicePort,
    needed: bool,
) -> Result<Option<&'a GidEntry>, Refusal> {
    let first = entry(port, 0);
    if needed && first.is_none() {
        let (device, gids) = (device.name.clone(), refusal::gids(port));
        return Err(Refusal::NoFirstGid { device, port: port.number, gids });
    }
    Ok(first)
}

/// The rank of an entry on Ethernet: less is better. `None` for an entry that is used only if it is
/// named.
fn rank(entry: &GidEntry) -> Option<(u8, GidReason)> {
    match entry.kind {
        _ if !entry.is_usable() => None,
        GidKind::RoceV2 if entry.gid.ipv4().is_some() => Some((0, GidReason::RoceV2Ipv4)),
        GidKind::RoceV2 if !entry.gid.is_link_local() => Some((1, GidReason::RoceV2Global)),
        GidKind::RoceV2 => Some((2, GidReason::RoceV2LinkLocal)),
        GidKind::RoceV1 => Some((3, GidReason::RoceV1)),
        GidKind::InfiniBand | GidKind::Unknown => None,
    }
}

fn best_gid<'a>(device: &Device, port: &'a DevicePort) -> Result<(&'a GidEntry, GidReason), Refusal> {
    let ranked = port.gids.iter().filter_map(|entry| rank(entry).map(|(rank, reason)| (rank, entry, reason)));
    let best = ranked.min_by_key(|(rank, entry, _)| (*rank, entry.index));
    best.map(|(_, entry, reason)| (entry, reason)).ok_or_else(|| Refusal::NoGid {
        device: device.name.clone(),
        port: port.number,
        gids: refusal::gids(port),
    })
}

fn choose_pkey(
    device: &Device,
    port: &DevicePort,
    setting: &DeviceSetting<u16>,
) -> Result<Option<u16>, Refusal> {
    if port.pkey_table == 0 {
        return Ok(None); // not seen: the device will say
    }
    match port.pkeys.iter().find(|pkey| pkey.index == setting.value) {
        Some(pkey) => Ok(Some(pkey.key)),
        None => Err(refusal::pkey_index(setting, device, port)),
    }
}

fn choose_depth(device: &Device, setting: &DeviceSetting<u32>) -> Result<u32, Refusal> {
    match &device.limits {
        Some(limits) if setting.value > limits.max_qp_wr => match setting.origin {
            Some(_) => Err(refusal::queue_depth(setting, device, limits.max_qp_wr)),
            None => Ok(limits.max_qp_wr),
        },
        _ => Ok(setting.value),
    }
}
