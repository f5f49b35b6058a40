//! Which RDMA devices there are, and which device, port and GID a process uses.
//!
//! [`Device`] describes a device: its ports with state, speed and MTU, their GID and partition key
//! tables, and its limits. [`read`] fills it from sysfs, where the kernel shows nearly all of it
//! without a library. Values that only `ibv_query_device(3)` and `ibv_query_port(3)` report are
//! `None` until they are queried. `choose` takes the devices and the [`DeviceSettings`] of the
//! configuration. It returns a [`Choice`] for each device to use, each part with its reason, or a
//! [`Refusal`] that lists the choices.
//!
//! Nothing here opens a device, loads a library or holds `unsafe` code. The choice is a function of
//! plain values, so tests can write down tables that no machine at hand has.
//!
//! Sources: InfiniBand Architecture Specification volume 1, chapters 4 (GIDs), 10.9 (partition
//! keys) and 14.2.5 (PortInfo), and its annexes A16 and A17 (RoCE);
//! `Documentation/ABI/stable/sysfs-class-infiniband` of Linux.

mod choice;
mod choose;
mod gid;
mod model;
mod refusal;
mod settings;
mod sysfs;

pub use choice::{Choice, Choices, DeviceReason, GidReason, PortReason};
pub use choose::choose;
pub use gid::{Gid, GidEntry, GidKind};
pub use model::{
    Device, DevicePort, Interface, Limits, LinkLayer, Mtu, NodeType, PhysicalState, Pkey, PortState, Speed,
};
pub use refusal::Refusal;
pub use settings::{AUTO, DeviceSetting, DeviceSettings, MAX_RAILS};
pub(super) use sysfs::numa_node;
pub use sysfs::{Found, UserAccess, device_file, read, user_access};

#[cfg(test)]
mod test_choose;
#[cfg(test)]
mod test_refuse;
#[cfg(test)]
mod test_sysfs;
#[cfg(test)]
mod testing;
