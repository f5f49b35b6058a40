//! The fabrics that a test can run on. To add one: implement [`MeasuredFabric`], name it in
//! [`FabricName`](super::options::FabricName), and open it in [`open`](super::open).

use super::options::BareOptions;
use tensorwire::internals::fabric::Fabric;
use tensorwire::internals::fabric::shm::{ShmFabric, ShmOptions};
use tensorwire::internals::fabric::verbs::device::{DeviceSetting, DeviceSettings, Mtu};
use tensorwire::internals::fabric::verbs::{VerbsFabric, VerbsOptions};
use tensorwire::{FabricError, Pool};

/// A fabric with the facts that the tests need.
pub trait MeasuredFabric: Fabric + Sized {
    /// Whether writes and reads complete without the process whose memory they touch.
    const IS_ONE_SIDED: bool;

    /// Opens it.
    ///
    /// # Errors
    /// As its constructor.
    fn open(pool: &Pool, options: &BareOptions) -> Result<Self, FabricError>;

    /// The device, port and GID that carry the bytes, if there are such.
    fn device(&self) -> Option<String> {
        None
    }

    /// The port's MTU in bytes, if packets carry the bytes.
    fn mtu(&self) -> Option<u64> {
        None
    }
}

impl MeasuredFabric for ShmFabric {
    /// The target copies what is written, and answers reads.
    const IS_ONE_SIDED: bool = false;

    fn open(pool: &Pool, _options: &BareOptions) -> Result<Self, FabricError> {
        ShmFabric::new(pool, ShmOptions::default())
    }
}

impl MeasuredFabric for VerbsFabric {
    const IS_ONE_SIDED: bool = true;

    fn open(pool: &Pool, options: &BareOptions) -> Result<Self, FabricError> {
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
        VerbsFabric::new(pool, verbs)
    }

    fn device(&self) -> Option<String> {
        Some(self.choice().to_string())
    }

    fn mtu(&self) -> Option<u64> {
        self.choice().mtu.map(|mtu| mtu.bytes().into())
    }
}
