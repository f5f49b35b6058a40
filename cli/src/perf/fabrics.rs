//! The fabrics that a test can run on. To add one: implement [`MeasuredFabric`], name it in
//! [`FabricName`](super::fabric_name::FabricName), and open it in [`open`](super::open).

use super::options::BareOptions;
use crate::error::CliError;
use tensorwire::internals::fabric::Fabric;
use tensorwire::internals::fabric::shm::{ShmFabric, ShmOptions};
use tensorwire::internals::fabric::tcp::{TcpFabric, TcpOptions};
use tensorwire::internals::fabric::verbs::device::{DeviceSetting, DeviceSettings, Mtu};
use tensorwire::internals::fabric::verbs::{VerbsDevice, VerbsFabric, VerbsOptions};
use tensorwire::internals::memory::NumaPolicy;
use tensorwire::{FabricError, FabricKind, Pool};

/// A fabric with the facts that the tests need.
pub trait MeasuredFabric: Fabric + Sized {
    /// For the report.
    const KIND: FabricKind;
    /// Whether writes and reads complete without the process whose memory they touch.
    const IS_ONE_SIDED: bool;

    /// Opens it on a pool, which `pool` makes with its memory near the device.
    ///
    /// # Errors
    /// As its constructor, or `pool`.
    fn open(
        options: &BareOptions,
        pool: impl FnOnce(NumaPolicy) -> Result<Pool, CliError>,
    ) -> Result<(Self, Pool), CliError>;

    /// The device, port and GID that carry the bytes, if there are such.
    fn device(&self) -> Option<String> {
        None
    }

    /// The port's MTU in bytes, if packets carry the bytes.
    fn mtu(&self) -> Option<u64> {
        None
    }
}

/// The error of a step on the way to a link.
pub fn linking(error: FabricError) -> CliError {
    CliError::failed("linking the two processes", error)
}

impl MeasuredFabric for ShmFabric {
    const KIND: FabricKind = FabricKind::Shm;
    /// The target copies what is written, and answers reads.
    const IS_ONE_SIDED: bool = false;

    fn open(
        _options: &BareOptions,
        pool: impl FnOnce(NumaPolicy) -> Result<Pool, CliError>,
    ) -> Result<(Self, Pool), CliError> {
        let pool = pool(NumaPolicy::Any)?;
        Ok((ShmFabric::new(&pool, ShmOptions::default()).map_err(linking)?, pool))
    }
}

impl MeasuredFabric for VerbsFabric {
    const KIND: FabricKind = FabricKind::Verbs;
    const IS_ONE_SIDED: bool = true;

    fn open(
        options: &BareOptions,
        pool: impl FnOnce(NumaPolicy) -> Result<Pool, CliError>,
    ) -> Result<(Self, Pool), CliError> {
        let device = &options.fabric.device;
        let device_settings = DeviceSettings {
            device: device.ib_dev.clone().map(|name| DeviceSetting::asked("rdma_device", name, "--ib-dev")),
            port: device.ib_port.map(|port| DeviceSetting::asked("rdma_device_port", port, "--ib-port")),
            gid_index: device
                .gid_index
                .map(|index| DeviceSetting::asked("rdma_gid_index", index, "--gid-index")),
            mtu: options
                .fabric
                .mtu
                .and_then(Mtu::from_bytes)
                .map(|mtu| DeviceSetting::asked("rdma_qp_mtu", mtu, "--mtu")),
            ..DeviceSettings::default()
        };
        let mut verbs = VerbsOptions { device_settings, ..VerbsOptions::default() };
        if let Some(count) = options.cq_mod {
            verbs.signal_every = count;
        }
        let device = VerbsDevice::open(verbs).map_err(linking)?;
        let pool = pool(device.choice().numa_node.map_or(NumaPolicy::Any, NumaPolicy::Prefer))?;
        Ok((device.fabric(&pool).map_err(linking)?, pool))
    }

    fn device(&self) -> Option<String> {
        Some(self.choices().map(ToString::to_string).collect::<Vec<_>>().join("; "))
    }

    fn mtu(&self) -> Option<u64> {
        self.choice().mtu.map(|mtu| mtu.bytes().into())
    }
}

impl MeasuredFabric for TcpFabric {
    const KIND: FabricKind = FabricKind::Tcp;
    /// The target receives what is written, and answers reads.
    const IS_ONE_SIDED: bool = false;

    fn open(
        options: &BareOptions,
        pool: impl FnOnce(NumaPolicy) -> Result<Pool, CliError>,
    ) -> Result<(Self, Pool), CliError> {
        let pool = pool(NumaPolicy::Any)?;
        let device = &options.fabric.device;
        let usual = TcpOptions::default();
        let tcp = TcpOptions {
            bind: device.bind.unwrap_or(usual.bind),
            streams: options.fabric.streams.unwrap_or(usual.streams),
            ..usual
        };
        Ok((TcpFabric::new(&pool, tcp).map_err(linking)?, pool))
    }
}
