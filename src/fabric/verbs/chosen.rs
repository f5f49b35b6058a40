//! The devices, ports and addresses that a fabric uses: opened as [`choose`] says.

use super::buffers::PLACE;
use super::context::DeviceContext;
use super::device::{Choice, Choices, DeviceSettings, GidEntry, GidKind, LinkLayer, Refusal, choose};
use super::failure::{setting, unavailable};
use super::library::Library;
use super::probe::{Probed, gid, gids, probe, speed};
use super::sys::*;
use crate::fabric::FabricError;
use std::sync::Arc;

/// The present address of a port.
pub(super) struct PortAddress {
    pub lid: u16,
    pub gid: ibv_gid,
    pub gid_index: u8,
    /// Code of the path MTU, at most.
    pub mtu: u32,
    /// Whether the port carries data.
    pub is_active: bool,
    /// Megabits per second; 0 if the device does not say.
    pub megabits: u32,
}

/// A device and port that a fabric uses.
pub(super) struct Chosen {
    /// The place among the fabric's devices.
    pub at: usize,
    pub context: Arc<DeviceContext>,
    pub port: u8,
    pub gid_kind: GidKind,
    /// Every packet has a global header.
    pub global: bool,
    pub pkey_index: u16,
    /// Bytes of the longest work request.
    pub max_message: u32,
    /// All of it for people, with the reasons.
    pub choice: Choice,
}

impl Chosen {
    /// Opens the named devices, or the default one.
    ///
    /// # Errors
    /// If no device fits the settings, or none can be opened.
    pub fn open(
        library: &'static Library,
        device_settings: &DeviceSettings,
    ) -> Result<Vec<Self>, FabricError> {
        let is_named = |name: &str| {
            let setting = device_settings.device.as_ref();
            setting.is_some_and(|setting| setting.value.split(',').any(|named| named.trim() == name))
        };
        let (mut devices, mut contexts, mut closed) = (Vec::new(), Vec::new(), Vec::new());
        for Probed { name, opened } in probe(library)? {
            match opened {
                Ok((device, context)) => {
                    devices.push(device);
                    contexts.push(context);
                }
                Err(error) if is_named(&name) => return Err(error),
                Err(error) => closed.push(error),
            }
        }
        let Choices { rails, passed_over } = match choose(&devices, device_settings) {
            Ok(choices) => choices,
            // All devices failed to open, so the error names that cause.
            Err(Refusal::NoDevice) if !closed.is_empty() => return Err(closed.swap_remove(0)),
            Err(refusal @ Refusal::Setting { .. }) => return Err(setting(refusal.to_string())),
            Err(refusal) => {
                let closed = closed.iter().map(|error| format!("; {error}")).collect::<String>();
                return Err(unavailable(format!("{refusal}{closed}")));
            }
        };
        for why in passed_over {
            tracing::warn!(%why, "an RDMA device is not used until the process starts again");
        }
        let opened = rails.into_iter().enumerate().map(|(at, choice)| {
            let Some(context) = contexts.iter().find(|context| context.name == choice.device) else {
                unreachable!("the choice is one of the devices")
            };
            Chosen::of(at, Arc::clone(context), choice)
        });
        opened.collect()
    }

    /// The port's address as it is now: a port that was down may have another lid, and its GIDs at
    /// other places.
    ///
    /// # Errors
    /// If the GID that was chosen is gone.
    pub fn address(&self) -> Result<PortAddress, FabricError> {
        let attr = self.context.port(self.port)?;
        let chosen = self.choice.mtu.map_or(attr.active_mtu, |mtu| mtu.code().into());
        let (mtu, lid) = (chosen.min(attr.active_mtu), if self.is_ethernet() { 0 } else { attr.lid });
        let is_active = attr.state == IBV_PORT_ACTIVE;
        let megabits = speed(attr.active_speed, attr.active_width).map_or(0, |speed| speed.megabits);
        let Some(entry) = &self.choice.gid else {
            let gid = ibv_gid { raw: [0; 16] };
            return Ok(PortAddress { lid, gid, gid_index: 0, mtu, is_active, megabits });
        };
        let is_same = |other: &GidEntry| other.gid == entry.gid && other.kind == entry.kind;
        let table = u32::try_from(attr.gid_tbl_len).unwrap_or(0);
        let at_its_place = gid(&self.context, self.port, entry.index, self.choice.link).filter(is_same);
        let found = at_its_place
            .or_else(|| gids(&self.context, self.port, table, self.choice.link).into_iter().find(is_same));
        let Some(GidEntry { index, gid, .. }) = found else {
            return Err(unavailable(format!(
                "the GID {} ({}) is gone from port {} of {}, where it was at index {}: give its \
                 interface the address back, \
                 or start anew with another rdma_gid_index",
                entry.gid, entry.kind, self.port, self.context.name, entry.index
            )));
        };
        // A chosen index is at most 255, see `GidEntry::is_usable`.
        let (gid, gid_index) = (ibv_gid { raw: gid.0 }, index as u8);
        Ok(PortAddress { lid, gid, gid_index, mtu, is_active, megabits })
    }

    fn is_ethernet(&self) -> bool {
        self.choice.link == LinkLayer::Ethernet
    }

    fn of(at: usize, context: Arc<DeviceContext>, choice: Choice) -> Result<Self, FabricError> {
        let attr = context.port(choice.port)?;
        if (attr.max_msg_sz as usize) < PLACE {
            return Err(unavailable(format!(
                "port {} of {} carries messages of {} bytes at most, and {PLACE} are needed: name \
                 another port or device",
                choice.port, context.name, attr.max_msg_sz
            )));
        }
        let kind = choice.gid.as_ref().map_or(GidKind::InfiniBand, |entry| entry.kind);
        Ok(Chosen {
            at,
            port: choice.port,
            gid_kind: if choice.link == LinkLayer::InfiniBand { GidKind::InfiniBand } else { kind },
            global: choice.global,
            pkey_index: choice.pkey_index,
            max_message: attr.max_msg_sz.min(1 << 30),
            context,
            choice,
        })
    }
}
