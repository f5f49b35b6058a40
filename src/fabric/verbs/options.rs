//! Options of the fabric.

use super::device::DeviceSettings;
use super::stripes::MAX_STRIPES;
use crate::fabric::{FabricError, FabricKind};

/// Options of a verbs fabric: the device, and the attributes of queue pairs (specification 4.3).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerbsOptions {
    /// Which devices, port, GID, partition key and MTU.
    pub device_settings: DeviceSettings,
    /// Service level, 0 to 7.
    pub service_level: u8,
    /// The traffic class, from which the network derives priorities, on routed addresses.
    pub traffic_class: u8,
    /// How long an acknowledgement is waited for: 4.096 us times two to the power of this, 0 to 31,
    /// 0 for ever.
    pub timeout: u8,
    /// How often a request without acknowledgement is sent again, 0 to 7. On soft-RoCE 7 means for
    /// ever.
    pub retry_count: u8,
    /// How often a request that found no receive is sent again, 0 to 7. 7 means for ever, and hides
    /// errors of credits.
    pub rnr_retry: u8,
    /// How long a peer waits before it does that, as a code of 0 to 31 (InfiniBand specification,
    /// 9.7.5.2.8); 22 is 20.48 ms. It counts only between the making of a link and the first look
    /// at it, and for errors of credits.
    pub min_rnr_timer: u8,
    /// Whether the bus may reorder bulk writes. It speeds up large tensors on some hosts. Devices
    /// and libraries that do not know it ignore it. Links detect arrivals by completions, so it is
    /// safe unless a program reads granted memory itself.
    pub relaxed_ordering: bool,
    /// Whether each grant gets a key of its own, by a memory window of type 2. A link then has one
    /// data queue pair.
    pub memory_windows: bool,
    /// Queue pairs to each peer, on each device, that large writes are striped over: 1 to 16, and
    /// 16 with all devices together. Between two ends the smaller number counts. One queue pair is
    /// enough for most NICs. Several help where one can't fill the network, as over several paths
    /// of a fabric.
    pub qps_per_peer: u8,
    /// Completions that each completion queue holds, at most what the device permits. A port
    /// creates another queue when its links need more, so that no queue can overrun.
    pub cq_entries: u32,
    /// The completion vector of the first port. Each further port has the next one, modulo the
    /// number of the device's vectors. The device signals events of a vector by an interrupt of
    /// its own, so only ports that sleep notice.
    pub comp_vector: u32,
    /// One request in this many is signalled; at most a quarter of the link's depth.
    pub signal_every: u32,
    /// Ranges of memory outside the pool that are kept registered; 0 for none: such memory is then
    /// copied through the pool.
    pub registrations: u32,
    /// Bytes of all of them together.
    pub registered_bytes: u64,
}

impl Default for VerbsOptions {
    fn default() -> Self {
        VerbsOptions {
            device_settings: DeviceSettings::default(),
            service_level: 0,
            traffic_class: 0,
            timeout: 14,
            retry_count: 7,
            rnr_retry: 6,
            min_rnr_timer: 22,
            relaxed_ordering: false,
            memory_windows: false,
            qps_per_peer: 1,
            cq_entries: 16_384,
            comp_vector: 0,
            signal_every: 64,
            registrations: 1024,
            registered_bytes: 1 << 30,
        }
    }
}

/// An option that is out of range.
pub(super) fn refuse(option: &'static str, value: u64, allowed: &'static str) -> FabricError {
    FabricError::Option { fabric: FabricKind::Verbs, option, value, allowed }
}

impl VerbsOptions {
    /// Refuses values that no device permits.
    pub(super) fn check(&self) -> Result<(), FabricError> {
        let at_most = |option, value: u8, most: u8, allowed| {
            if value <= most { Ok(()) } else { Err(refuse(option, u64::from(value), allowed)) }
        };
        at_most("service_level", self.service_level, 7, "0 to 7")?;
        at_most("timeout", self.timeout, 31, "0 to 31")?;
        at_most("retry_count", self.retry_count, 7, "0 to 7")?;
        at_most("rnr_retry", self.rnr_retry, 7, "0 to 7")?;
        at_most("min_rnr_timer", self.min_rnr_timer, 31, "0 to 31")?;
        if !(1..=MAX_STRIPES + 1).contains(&self.qps_per_peer) {
            return Err(refuse("qps_per_peer", self.qps_per_peer.into(), "1 to 16"));
        }
        if self.cq_entries == 0 {
            return Err(refuse("cq_entries", 0, "at least 1"));
        }
        if self.signal_every == 0 {
            return Err(refuse("signal_every", 0, "at least 1"));
        }
        Ok(())
    }

    /// Refuses more queue pairs for data than a link can have with this many devices.
    pub(super) fn check_pairs(&self, devices: usize) -> Result<(), FabricError> {
        if self.memory_windows || usize::from(self.qps_per_peer) * devices <= usize::from(MAX_STRIPES) + 1 {
            return Ok(());
        }
        Err(refuse("qps_per_peer", self.qps_per_peer.into(), "times the number of devices, at most 16"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_option_out_of_range_is_refused_by_name() {
        assert!(VerbsOptions::default().check().is_ok());
        let said = |change: fn(&mut VerbsOptions)| {
            let mut options = VerbsOptions::default();
            change(&mut options);
            options.check().expect_err("refused").to_string()
        };
        assert_eq!(said(|o| o.timeout = 32), "verbs: timeout is 32: 0 to 31");
        assert!(said(|o| o.service_level = 8).contains("service_level is 8"));
        assert_eq!(said(|o| o.qps_per_peer = 17), "verbs: qps_per_peer is 17: 1 to 16");
        assert!(said(|o| o.qps_per_peer = 0).contains("qps_per_peer is 0"));
        assert!(said(|o| o.cq_entries = 0).contains("cq_entries"));
        assert!(said(|o| o.signal_every = 0).contains("signal_every"));
    }
}
