//! An opened device, its protection domain and registered memory, each closed when its last user is
//! gone.

use super::failure::{memory_remedy, os};
use super::library::{Library, made, returned};
use super::sys::*;
use crate::fabric::FabricError;
use crate::fabric::log_rate_limit::LogRateLimit;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::BorrowedFd;
use std::ffi::{CStr, c_char, c_int};
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Looks whether the kernel has ended the objects of a device that is removed. The poller waits
/// meanwhile, so these are the looks for all objects.
const REMOVAL_LOOKS: u32 = 100;
/// How long a look takes.
const REMOVAL_LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };

/// All devices that there are.
pub(super) struct DeviceList {
    library: &'static Library,
    list: NonNull<*mut ibv_device>,
    count: usize,
}

impl DeviceList {
    pub fn new(library: &'static Library) -> Result<Self, FabricError> {
        let mut count: c_int = 0;
        // SAFETY: the count is written, nothing else is touched.
        let list = made(|| unsafe { (library.get_device_list)(&mut count) }).map_err(|error| {
            let remedy = "load the kernel's module ib_uverbs, and give the process access to \
             /sys/class/infiniband_verbs";
            os("listing RDMA devices", error, remedy)
        })?;
        Ok(DeviceList { library, list, count: usize::try_from(count).unwrap_or(0) })
    }

    /// The devices' names, in the library's order.
    pub fn names(&self) -> Vec<String> {
        // SAFETY: the library's list, not freed yet, has `count` devices, whose names end with a
        // zero byte.
        (0..self.count).map(|k| unsafe { text(&(**self.list.as_ptr().add(k)).name) }).collect()
    }

    /// One of `IBV_NODE_*`.
    ///
    /// # Panics
    /// If there is no such place.
    pub fn node_type(&self, at: usize) -> c_int {
        assert!(at < self.count);
        // SAFETY: inside the list, as was just checked, and a device of the library.
        unsafe { (**self.list.as_ptr().add(at)).node_type }
    }

    /// Opens the device at this place.
    ///
    /// # Panics
    /// If there is no such place.
    pub fn open(&self, at: usize) -> Result<Arc<DeviceContext>, FabricError> {
        assert!(at < self.count);
        // SAFETY: inside the list, as was just checked.
        let device = unsafe { *self.list.as_ptr().add(at) };
        // SAFETY: a device of the library, which ends both texts with a zero byte.
        let (name, sysfs) = unsafe { (text(&(*device).name), text(&(*device).ibdev_path)) };
        // SAFETY: a device of a list that is not freed yet.
        let handle = made(|| unsafe { (self.library.open_device)(device) }).map_err(|error| {
            let remedy = "give the process access to /dev/infiniband/uverbs*, in containers too";
            os(format!("opening the device {name}"), error, remedy)
        })?;
        let mut context = DeviceContext {
            library: self.library,
            handle,
            name,
            sysfs: sysfs.into(),
            attr: None,
            windows_log: LogRateLimit::default(),
            removal_looks: AtomicU32::new(REMOVAL_LOOKS),
        };
        let mut attr = std::mem::MaybeUninit::<ibv_device_attr>::zeroed();
        // SAFETY: an opened device, and a struct for the answer.
        let result = unsafe { (self.library.query_device)(context.as_ptr(), attr.as_mut_ptr()) };
        if result != 0 {
            let error = returned(result);
            return Err(os(
                format!("querying the device {}", context.name),
                error,
                "see the kernel's log (`dmesg`)",
            ));
        }
        // SAFETY: integers, for which the zeros that were there first are good too.
        context.attr = Some(unsafe { attr.assume_init() });
        Ok(Arc::new(context))
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: this list, once. Opened devices stay (`ibv_get_device_list(3)`).
        unsafe { (self.library.free_device_list)(self.list.as_ptr()) };
    }
}

/// A text of a device.
///
/// # Safety
/// A zero byte ends it.
unsafe fn text(bytes: &[c_char]) -> String {
    // SAFETY: as the caller vouches.
    unsafe { CStr::from_ptr(bytes.as_ptr()) }.to_string_lossy().into_owned()
}

/// An opened device.
pub(super) struct DeviceContext {
    pub library: &'static Library,
    handle: NonNull<ibv_context>,
    pub name: String,
    /// Its folder in sysfs; empty if the library does not say.
    pub sysfs: PathBuf,
    attr: Option<ibv_device_attr>,
    /// For the line of the log on links that get no more memory windows.
    pub windows_log: LogRateLimit,
    /// Those of [`REMOVAL_LOOKS`] that are left.
    removal_looks: AtomicU32,
}

// SAFETY: libibverbs' calls may be made from any thread (`README` of rdma-core: the library is
// thread safe). The struct itself is not changed after it is made.
unsafe impl Send for DeviceContext {}
// SAFETY: as above.
unsafe impl Sync for DeviceContext {}

impl DeviceContext {
    pub fn as_ptr(&self) -> *mut ibv_context {
        self.handle.as_ptr()
    }

    /// The limits of the device.
    pub fn attr(&self) -> &ibv_device_attr {
        match &self.attr {
            Some(attr) => attr,
            None => unreachable!("a context is handed out only with its attributes"),
        }
    }

    /// The attributes of a port.
    pub fn port(&self, port: u8) -> Result<ibv_port_attr, FabricError> {
        // SAFETY: an opened device of this library.
        unsafe { self.library.port(self.as_ptr(), port) }.map_err(|error| {
            os(format!("querying port {port} of {}", self.name), error, "see the kernel's log (`dmesg`)")
        })
    }

    /// The number of the device's completion vectors, at least 1.
    pub fn vectors(&self) -> u64 {
        // SAFETY: an opened device.
        let count = unsafe { (*self.as_ptr()).num_comp_vectors };
        u64::try_from(count).unwrap_or(0).max(1)
    }

    /// The descriptor that has asynchronous events.
    pub fn async_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: an opened device, which has the descriptor open as long.
        unsafe { BorrowedFd::borrow_raw((*self.as_ptr()).async_fd) }
    }

    /// Tells by the `result` of a call whether the call has ended an object of the device. To be
    /// asked right after the call. After a removal all such calls return EIO, unless
    /// RDMAV_ALLOW_DISASSOC_DESTROY is set (`ibv_open_device(3)`). The kernel has ended the objects
    /// then.
    ///
    /// # Errors
    /// The error of the call, if the object may still exist.
    pub fn ended(&self, result: c_int) -> std::io::Result<()> {
        if result == 0 {
            return Ok(());
        }
        let error = returned(result);
        match error.raw_os_error() {
            Some(libc::EIO) if self.is_removed() => Ok(()),
            _ => Err(error),
        }
    }

    /// Whether the device was removed, and the kernel has ended all objects of this process on it.
    #[cold]
    fn is_removed(&self) -> bool {
        // The kernel ends the object that has the events last, and calls fail before that. An event
        // that was not taken hides that end.
        let mut events = [PollFd::from_borrowed_fd(self.async_fd(), PollFlags::empty())];
        loop {
            let left = |looks: u32| looks.checked_sub(1);
            let waits = self.removal_looks.fetch_update(Ordering::Relaxed, Ordering::Relaxed, left).is_ok();
            let pause = if waits { REMOVAL_LOOK } else { Timespec::default() };
            let is_polled = poll(&mut events, Some(&pause)).is_ok();
            if is_polled && events[0].revents().intersects(PollFlags::ERR | PollFlags::HUP) {
                return true;
            }
            if !waits {
                return false;
            }
        }
    }
}

impl Drop for DeviceContext {
    fn drop(&mut self) {
        // SAFETY: all objects of the device hold it, so none is left. A failure leaves it open.
        unsafe { (self.library.close_device)(self.as_ptr()) };
    }
}

/// A protection domain of a device.
pub(super) struct ProtectionDomain {
    pub context: Arc<DeviceContext>,
    handle: NonNull<ibv_pd>,
    /// For a parent domain: its protection domain and its thread domain.
    parent: Option<(Arc<ProtectionDomain>, NonNull<ibv_td>)>,
}

// SAFETY: as for `DeviceContext`.
unsafe impl Send for ProtectionDomain {}
// SAFETY: as for `DeviceContext`.
unsafe impl Sync for ProtectionDomain {}

impl ProtectionDomain {
    pub fn new(context: &Arc<DeviceContext>) -> Result<Arc<Self>, FabricError> {
        // SAFETY: an opened device.
        let handle = made(|| unsafe { (context.library.alloc_pd)(context.as_ptr()) }).map_err(|error| {
            let remedy = memory_remedy(&error);
            os(format!("making a protection domain of {}", context.name), error, remedy)
        })?;
        Ok(Arc::new(ProtectionDomain { context: Arc::clone(context), handle, parent: None }))
    }

    /// A parent domain of `domain` whose queue pairs one thread at a time uses, so that the driver
    /// needs no locks; `domain` itself if the driver has no thread domains.
    pub fn for_one_thread(domain: &Arc<ProtectionDomain>) -> Arc<ProtectionDomain> {
        let context = &domain.context;
        // SAFETY: an opened device.
        let Some(thread) = (unsafe { ibv_alloc_td(context.as_ptr()) }).and_then(NonNull::new) else {
            return Arc::clone(domain);
        };
        // SAFETY: both domains are of this device, and the stand-in holds them.
        let made = unsafe { ibv_alloc_parent_domain(context.as_ptr(), domain.as_ptr(), thread.as_ptr()) };
        match made.and_then(NonNull::new) {
            Some(handle) => Arc::new(ProtectionDomain {
                context: Arc::clone(context),
                handle,
                parent: Some((Arc::clone(domain), thread)),
            }),
            None => {
                // SAFETY: nothing was made with it.
                unsafe { ibv_dealloc_td(thread.as_ptr()) };
                Arc::clone(domain)
            }
        }
    }

    pub fn as_ptr(&self) -> *mut ibv_pd {
        self.handle.as_ptr()
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        // SAFETY: all objects of the domain hold it, so none is left.
        unsafe { (self.context.library.dealloc_pd)(self.as_ptr()) };
        if let Some((_domain, thread)) = &self.parent {
            // SAFETY: its parent domain is gone.
            unsafe { ibv_dealloc_td(thread.as_ptr()) };
        }
    }
}

/// Registered memory.
pub(super) struct MemoryRegion {
    domain: Arc<ProtectionDomain>,
    handle: Option<NonNull<ibv_mr>>,
    pub lkey: u32,
    pub rkey: u32,
}

// SAFETY: as for `DeviceContext`.
unsafe impl Send for MemoryRegion {}
// SAFETY: as for `DeviceContext`.
unsafe impl Sync for MemoryRegion {}

impl MemoryRegion {
    /// Registers memory with these rights (`IBV_ACCESS_*`).
    ///
    /// # Safety
    /// The memory stays mapped as long as the rights or a posted request permit an access by this
    /// registration. These accesses are no data race. No reference exists to bytes that a peer or
    /// the device may write.
    pub unsafe fn new(
        domain: &Arc<ProtectionDomain>,
        base: NonNull<u8>,
        len: usize,
        access: c_int,
    ) -> Result<Self, FabricError> {
        let library = domain.context.library;
        let (pd, start) = (domain.as_ptr(), base.as_ptr().cast());
        let call = || match library.reg_mr_iova2 {
            // SAFETY: as the caller vouches.
            Some(register) if access & IBV_ACCESS_RELAXED_ORDERING != 0 => unsafe {
                register(pd, start, len, base.as_ptr() as u64, access as u32)
            },
            // SAFETY: as the caller vouches.
            _ => unsafe { (library.reg_mr)(pd, start, len, access & !IBV_ACCESS_RELAXED_ORDERING) },
        };
        let handle = made(call).map_err(|error| {
            let remedy = memory_remedy(&error);
            os(format!("registering {len} bytes with {}", domain.context.name), error, remedy)
        })?;
        // SAFETY: a registration of the library.
        let (lkey, rkey) = unsafe { ((*handle.as_ptr()).lkey, (*handle.as_ptr()).rkey) };
        Ok(MemoryRegion { domain: Arc::clone(domain), handle: Some(handle), lkey, rkey })
    }

    /// The registration, as long as this side has not ended it.
    pub fn as_ptr(&self) -> Option<*mut ibv_mr> {
        self.handle.map(NonNull::as_ptr)
    }

    /// Leaves the memory registered for ever.
    pub fn keep(&mut self) {
        self.handle = None;
        std::mem::forget(Arc::clone(&self.domain));
    }

    /// Ends the registration. Returns whether the device touches the memory no more: else it must
    /// stay mapped for ever.
    pub fn end(&mut self) -> bool {
        let Some(handle) = self.handle.take() else { return true };
        let context = &self.domain.context;
        // SAFETY: this registration, once.
        let result = unsafe { (context.library.dereg_mr)(handle.as_ptr()) };
        let Err(error) = context.ended(result) else { return true };
        tracing::error!(device = %context.name, %error, "a registration of memory can't be ended: both \
         stay");
        self.keep();
        false
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        self.end();
    }
}
