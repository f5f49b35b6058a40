//! The fabrics that a test can run on. To add one: implement [`MeasuredFabric`], name it in
//! [`FabricName`](super::options::FabricName), and open it in [`open`](super::open).

use super::plan::Settings;
use tensorwire::internals::fabric::Fabric;
use tensorwire::internals::fabric::shm::{ShmFabric, ShmOptions};
use tensorwire::internals::fabric::verbs::device::{Mtu, Wish, Wishes};
use tensorwire::internals::fabric::verbs::{VerbsFabric, VerbsOptions};
use tensorwire::{FabricError, Pool};

/// A fabric, and what a test must know of it.
pub trait MeasuredFabric: Fabric + Sized {
    /// Whether writes and reads are done without the process whose memory they touch.
    const IS_ONE_SIDED: bool;

    /// One with these settings.
    ///
    /// # Errors
    /// As its constructor.
    fn open(pool: &Pool, settings: &Settings) -> Result<Self, FabricError>;

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
    /// The target pulls what is written, and answers reads.
    const IS_ONE_SIDED: bool = false;

    fn open(pool: &Pool, _settings: &Settings) -> Result<Self, FabricError> {
        ShmFabric::new(pool, ShmOptions::default())
    }
}

impl MeasuredFabric for VerbsFabric {
    const IS_ONE_SIDED: bool = true;

    fn open(pool: &Pool, settings: &Settings) -> Result<Self, FabricError> {
        let device = &settings.device;
        let name = device.name.clone();
        let wishes = Wishes {
            device: name.map(|name| Wish::asked("rdma_device", name, "--ib-dev")),
            port: device.port.map(|port| Wish::asked("rdma_device_port", port, "--ib-port")),
            gid_index: device.gid_index.map(|index| Wish::asked("rdma_gid_index", index, "--gid-index")),
            mtu: settings.mtu.and_then(Mtu::from_bytes).map(|mtu| Wish::asked("rdma_qp_mtu", mtu, "--mtu")),
            ..Wishes::default()
        };
        let mut options = VerbsOptions { wishes, ..VerbsOptions::default() };
        if let Some(count) = settings.cq_mod {
            options.signal_every = count;
        }
        VerbsFabric::new(pool, options)
    }

    fn device(&self) -> Option<String> {
        Some(self.choice().to_string())
    }

    fn mtu(&self) -> Option<u64> {
        self.choice().mtu.map(|mtu| mtu.bytes().into())
    }
}
