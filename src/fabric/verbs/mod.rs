//! RDMA NICs through libibverbs: InfiniBand and RoCE, reliable connections.
//!
//! The pool is registered once, and each tensor's bytes go straight from one process's pool to the
//! other's. Memory outside the pool is registered when it is first sent, for reading alone; nothing
//! is received there. A link has one queue pair for data or several (stripes). One more carries
//! control messages between the two fabrics: returned receives, and the disconnect of a side that
//! leaves. With several devices a link has a rail for each pair of them: large writes go over all,
//! and the rest over the first. Completions of all links of a port come by one completion queue of
//! each device, or a few, which can't overrun.
//!
//! The device checks that an access has the key of the pool and lies inside it. It cannot check
//! which part was granted, or that a grant was revoked. Peers are trusted with the pool, as they
//! are with the step that they compute. With memory windows each grant has its own key and bounds.
//!
//! libibverbs is loaded when a fabric is made. In steady state this module makes no system call,
//! takes no lock, allocates nothing and logs nothing. A device without kernel bypass, such as
//! soft-RoCE, enters the kernel with each post.
//!
//! | file | |
//! |---|---|
//! | `sys`, `library` | the library's interface |
//! | `device`, `probe`, `chosen`, `options`, `failure` | devices, settings and their check, errors |
//! | `context`, `cq`, `qp`, `buffers`, `events` | the library's objects |
//! | `registrations`, `range_cache` | memory outside the pool: registering, and the cache |
//! | `data_queue`, `post_list`, `stripes`, `arrivals`, `rails`, `control` | the queue pairs of a link |
//! | `grants`, `windows` | what the peer may write or read |
//! | `link`, `port_resources`, `sleeper`, `port` | links and ports |
//! | `address`, `endpoint`, `rail_endpoint` | how a link is made |

#![allow(unsafe_code)]

mod address;
mod arrivals;
mod buffers;
mod chosen;
mod context;
mod control;
mod cq;
mod data_queue;
pub mod device;
mod endpoint;
mod events;
mod failover;
mod failure;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod grants;
pub mod library;
mod link;
mod options;
mod port;
mod port_resources;
mod post_list;
mod probe;
mod qp;
mod rail_endpoint;
mod rails;
mod range_cache;
mod registrations;
mod sleeper;
mod stripes;
pub mod sys;
mod windows;

pub use endpoint::VerbsEndpoint;
pub(crate) use endpoint::link_completions;
pub(crate) use grants::MAX_GRANTS;
pub use options::VerbsOptions;
pub use port::{VerbsLink, VerbsPort};
pub use probe::complete;
pub(crate) use rail_endpoint::link_bytes;
pub use rails::LinkDevices;
pub use sleeper::VerbsSleeper;

use super::{Fabric, FabricError, LinkOptions, Registrar};
use crate::memory::Pool;
use chosen::Chosen;
use context::{MemoryRegion, ProtectionDomain};
use data_queue::SPARE;
use device::{Choice, Limits, Mtu};
use events::DeviceWatcher;
use failure::unavailable;
use library::Library;
use port_resources::PortTable;
use range_cache::CacheLimits;
use registrations::Registrations;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use sys::*;
use windows::MemoryWindow;

/// A process's access to its peers through a port of an RDMA device, or one of each of several.
///
/// All tensors that go through it are of one pool, which is registered as a whole. Its thread waits
/// for the devices' asynchronous events, and ends with the last port, endpoint and link.
pub struct VerbsFabric {
    shared: Arc<VerbsShared>,
}

struct VerbsShared {
    // Dropped in this order: the thread that watches the ports, the registrations, the devices.
    watcher: Arc<DeviceWatcher>,
    ports: Arc<PortTable>,
    /// Memory outside the pool.
    registrations: Arc<Registrations>,
    /// By their places.
    devices: Vec<FabricDevice>,
    region_id: u16,
    /// The pool's first byte.
    base: u64,
    /// Bytes of the longest work request on any device.
    max_message: u32,
    lost_rails: Arc<AtomicU64>,
    options: VerbsOptions,
    pool: Pool,
}

/// A device with which the pool is registered.
struct FabricDevice {
    region: MemoryRegion,
    domain: Arc<ProtectionDomain>,
    chosen: Chosen,
}

impl Drop for VerbsShared {
    fn drop(&mut self) {
        for device in &mut self.devices {
            if !device.region.end() {
                // The device has the pool, which so stays as it is.
                std::mem::forget(self.pool.clone());
            }
        }
    }
}

impl FabricDevice {
    /// Registers the pool.
    fn new(chosen: Chosen, pool: &Pool, options: &VerbsOptions) -> Result<Self, FabricError> {
        let domain = ProtectionDomain::new(&chosen.context)?;
        let region = pool.region();
        let len = usize::try_from(region.len()).unwrap_or(usize::MAX);
        let windows = IBV_DEVICE_MEM_WINDOW | IBV_DEVICE_MEM_WINDOW_TYPE_2A | IBV_DEVICE_MEM_WINDOW_TYPE_2B;
        let mut access = IBV_ACCESS_LOCAL_WRITE;
        if options.memory_windows {
            // A driver may have fewer abilities than the device.
            MemoryWindow::new(&domain)?;
        } else {
            access |= IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
        }
        if chosen.context.attr().device_cap_flags & windows != 0 {
            access |= IBV_ACCESS_MW_BIND;
        }
        if options.relaxed_ordering {
            access |= IBV_ACCESS_RELAXED_ORDERING;
        }
        // SAFETY: the pool, which is held longer, keeps the region mapped. The owner of a tensor
        // makes references to its bytes only, and a link owns a granted tensor until the grant is
        // revoked.
        let registered = unsafe { MemoryRegion::new(&domain, region.base(), len, access) }?;
        tracing::info!(
            chosen = %chosen.choice,
            mtu = chosen.choice.mtu.map(Mtu::bytes),
            queue_depth = depth_within(&chosen),
            "the verbs fabric is open"
        );
        Ok(FabricDevice { region: registered, domain, chosen })
    }

    fn name(&self) -> &str {
        &self.chosen.context.name
    }

    /// The key by which peers reach the whole pool: 0, which is none, with memory windows.
    fn pool_key(&self, options: &VerbsOptions) -> u32 {
        if options.memory_windows { 0 } else { self.region.rkey }
    }
}

impl VerbsShared {
    /// Whether bytes lie in the pool.
    #[inline]
    fn is_ours(&self, addr: u64, len: u64) -> bool {
        let offset = addr.wrapping_sub(self.base);
        offset.checked_add(len).is_some_and(|end| end <= self.pool.region().len())
    }
}

impl VerbsFabric {
    /// A fabric for the tensors of `pool`, which is registered. Registration takes about 0.06 ms
    /// for each MiB, and the pages can't be swapped out from then on.
    ///
    /// # Errors
    /// If libibverbs or a usable device is missing, an option is out of range, or the memory can't
    /// be registered.
    pub fn new(pool: &Pool, options: VerbsOptions) -> Result<Self, FabricError> {
        VerbsDevice::open(options)?.fabric(pool)
    }

    /// As [`VerbsFabric::new`], with a library of the caller's.
    ///
    /// # Errors
    /// As [`VerbsFabric::new`].
    pub fn with_library(
        library: &'static Library,
        pool: &Pool,
        options: VerbsOptions,
    ) -> Result<Self, FabricError> {
        VerbsDevice::open_with(library, options)?.fabric(pool)
    }
}

/// The RDMA devices of a fabric, opened before there is a pool: they say on which NUMA node the
/// pool's memory should lie.
pub struct VerbsDevice {
    chosen: Vec<Chosen>,
    options: VerbsOptions,
}

impl VerbsDevice {
    /// Opens the devices that the options name, or the default one.
    ///
    /// # Errors
    /// If libibverbs or a usable device is missing, or an option is out of range.
    pub fn open(options: VerbsOptions) -> Result<Self, FabricError> {
        let library = Library::system().map_err(|error| unavailable(error.to_string()))?;
        VerbsDevice::open_with(library, options)
    }

    fn open_with(library: &'static Library, options: VerbsOptions) -> Result<Self, FabricError> {
        options.check()?;
        let chosen = Chosen::open(library, &options.device_settings)?;
        options.check_pairs(chosen.len())?;
        if options.memory_windows {
            chosen.iter().try_for_each(windows::check)?;
            if options.qps_per_peer > 1 || chosen.len() > 1 {
                tracing::warn!(
                    rdma_qps_per_peer = options.qps_per_peer,
                    devices = chosen.len(),
                    "with rdma_memory_windows a link has one queue pair for data: tensors are not striped"
                );
            }
        }
        Ok(VerbsDevice { chosen, options })
    }

    /// The nearest of the devices, with port and GID, and why.
    pub fn choice(&self) -> &Choice {
        nearest_of(self.chosen.iter().map(|chosen| &chosen.choice))
    }

    /// The names of the devices, with their limits.
    pub(crate) fn limits(&self) -> impl Iterator<Item = (&str, Limits)> {
        self.chosen.iter().map(|chosen| (&*chosen.context.name, probe::limits(chosen.context.attr())))
    }

    /// A fabric for the tensors of `pool`: see [`VerbsFabric::new`].
    ///
    /// # Errors
    /// If the memory can't be registered, or a device has no more resources.
    pub fn fabric(self, pool: &Pool) -> Result<VerbsFabric, FabricError> {
        let VerbsDevice { chosen, options } = self;
        let devices = chosen.into_iter().map(|chosen| FabricDevice::new(chosen, pool, &options));
        let devices = devices.collect::<Result<Vec<_>, _>>()?;
        let limits = CacheLimits {
            count: options.registrations as usize,
            bytes: usize::try_from(options.registered_bytes).unwrap_or(usize::MAX),
        };
        let domains: Vec<_> = devices.iter().map(|device| Arc::clone(&device.domain)).collect();
        let watched = devices.iter().map(|device| (Arc::clone(&device.chosen.context), device.chosen.port));
        let shared = VerbsShared {
            watcher: DeviceWatcher::start(watched.collect())?,
            ports: Arc::new(PortTable::new(domains.clone(), options.cq_entries, options.comp_vector)),
            registrations: Registrations::new(domains, limits),
            region_id: pool.region().id(),
            base: pool.region().base().as_ptr() as u64,
            max_message: devices.iter().map(|device| device.chosen.max_message).min().unwrap_or(0),
            devices,
            lost_rails: Arc::default(),
            options,
            pool: pool.clone(),
        };
        Ok(VerbsFabric { shared: Arc::new(shared) })
    }
}

fn nearest_of<'a>(choices: impl Iterator<Item = &'a Choice> + Clone) -> &'a Choice {
    match Choice::nearest(choices) {
        Some(choice) => choice,
        None => unreachable!("a fabric has a device"),
    }
}

fn depth_within(chosen: &Chosen) -> u32 {
    let max_qp_wr = u32::try_from(chosen.context.attr().max_qp_wr).unwrap_or(u32::MAX);
    depth_of_device(chosen.choice.queue_depth, max_qp_wr)
}

/// The queue depth of links on a device with this limit, of which `wanted` is the setting.
pub(crate) fn depth_of_device(wanted: u32, max_qp_wr: u32) -> u32 {
    wanted.min(max_qp_wr.saturating_sub(SPARE)).max(1)
}

impl VerbsFabric {
    /// The nearest of the devices that it uses, with port and GID, and why.
    pub fn choice(&self) -> &Choice {
        nearest_of(self.choices())
    }

    /// The devices that it uses.
    pub fn choices(&self) -> impl Iterator<Item = &Choice> + Clone {
        self.shared.devices.iter().map(|device| &device.chosen.choice)
    }

    /// Operations that a link can have outstanding: the set length of queues. Four requests of a
    /// send queue are the fabric's own, so it is at most the device's limit less four.
    pub fn queue_depth(&self) -> u32 {
        let depths = self.shared.devices.iter().map(|device| depth_within(&device.chosen));
        depths.min().unwrap_or(1)
    }

    /// How many rails links have lost so far, without going down.
    pub fn lost_rails(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.shared.lost_rails)
    }
}

impl Fabric for VerbsFabric {
    type Endpoint = VerbsEndpoint;
    type Link = VerbsLink;
    type Port = VerbsPort;

    fn registrar(&self) -> Option<Arc<dyn Registrar>> {
        let registrations = &self.shared.registrations;
        registrations.is_wanted().then(|| Arc::clone(registrations) as _)
    }

    fn port(&self) -> Result<VerbsPort, FabricError> {
        VerbsPort::new(Arc::clone(&self.shared))
    }

    fn endpoint(&self, port: usize, options: &LinkOptions) -> Result<VerbsEndpoint, FabricError> {
        VerbsEndpoint::new(&self.shared, port, options)
    }
}
