//! Memory windows of type 2 (`rdma_memory_windows`): each grant has a key of its own, for its bytes
//! and its right alone, until it is revoked.
//!
//! A window is bound by a request of the link's main queue pair. A message with the key may follow
//! at once, as a queue pair carries requests out in their order. Another request ends the key. Its
//! completion says that the device lets no access through any more, so a revocation waits for it.
//! A window belongs to its queue pair: on no other one the device takes its key. So a link has no
//! stripes.
//!
//! A queue pair must not be destroyed before its windows, nor a region. So the data queue owns
//! them.

use super::context::ProtectionDomain;
use super::data_queue::DataQueue;
use super::endpoint::random;
use super::failure::{os, setting};
use super::library::made;
use super::port::VerbsPort;
use super::post_list::{AWAITED, OPCODE_BITS, RECEIVE, name};
use super::sys::*;
use super::{Chosen, FabricDevice};
use crate::fabric::{FabricError, LinkFailure, LinkId, PostError};
use crate::memory::{Tensor, TensorMut};
use crate::wire::Grant;
use std::ffi::c_int;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

/// The longest wait for a bind or a revocation, in ticks of 100 ms, while the queue pair completes
/// no request.
const WAIT_TICKS: u32 = 50;
/// The longest wait in ticks, for a peer that acknowledges one request after the other slowly.
const LONGEST_WAIT_TICKS: u32 = 300;

/// Bytes of the longest window: the most that the driver of ConnectX devices binds.
pub(super) const LONGEST_WINDOW: u64 = 1 << 31;

const REMEDY: &str = "set rdma_memory_windows to off, or name a device that has them with rdma_device";

/// Refuses a device without windows of type 2.
pub(super) fn check(chosen: &Chosen) -> Result<(), FabricError> {
    let context = &chosen.context;
    let type_2 = IBV_DEVICE_MEM_WINDOW_TYPE_2A | IBV_DEVICE_MEM_WINDOW_TYPE_2B;
    if context.attr().device_cap_flags & type_2 != 0 {
        return Ok(());
    }
    let name = &context.name;
    Err(setting(format!("rdma_memory_windows is on, and {name} has no windows of type 2: {REMEDY}")))
}

/// A key for a part of the pool, bound or free.
pub(super) struct MemoryWindow {
    domain: Arc<ProtectionDomain>,
    handle: Option<NonNull<ibv_mw>>,
    /// Its next key.
    next: u32,
}

// SAFETY: libibverbs' calls may be made from any thread. The owner alone writes to the struct.
unsafe impl Send for MemoryWindow {}

impl MemoryWindow {
    pub fn new(domain: &Arc<ProtectionDomain>) -> Result<Self, FabricError> {
        let [start] = random::<1>()?;
        // SAFETY: a domain of the library.
        let handle = made(|| unsafe { ibv_alloc_mw(domain.as_ptr()) }).map_err(|error| {
            let tried = format!("making a memory window of type 2 on {}", domain.context.name);
            match error.kind() {
                io::ErrorKind::Unsupported => setting(format!("{tried} failed: {error}; {REMEDY}")),
                _ => os(tried, error, REMEDY),
            }
        })?;
        // SAFETY: a window of the library.
        let made = unsafe { (*handle.as_ptr()).rkey };
        // The device has chosen the upper bits; the lower eight are ours.
        let next = made & !0xFF | u32::from(start);
        Ok(MemoryWindow { domain: Arc::clone(domain), handle: Some(handle), next })
    }

    /// Ends the window. Returns whether the device lets no access through any more.
    fn end(&mut self) -> bool {
        let Some(handle) = self.handle.take() else { return true };
        // SAFETY: this window, once.
        let result = unsafe { ibv_dealloc_mw(handle.as_ptr()) };
        let Err(error) = self.domain.context.ended(result) else { return true };
        let device = &self.domain.context.name;
        tracing::error!(device, %error, "a memory window can't be ended: it and its region stay");
        std::mem::forget(Arc::clone(&self.domain));
        false
    }
}

impl Drop for MemoryWindow {
    fn drop(&mut self) {
        self.end();
    }
}

/// The windows of a queue pair.
#[derive(Default)]
pub(super) struct Windows {
    all: Vec<MemoryWindow>,
    /// Those that are not bound.
    free: Vec<usize>,
    /// That the device has no more was logged.
    is_logged: bool,
}

impl Windows {
    /// A window that is not bound; `None` if the device has no more.
    fn take(&mut self, domain: &Arc<ProtectionDomain>) -> Option<usize> {
        if let Some(at) = self.free.pop() {
            return Some(at);
        }
        match MemoryWindow::new(domain) {
            Ok(window) => self.all.push(window),
            Err(error) => {
                if !std::mem::replace(&mut self.is_logged, true)
                    && let Some(left_out) = domain.context.windows_log.line()
                {
                    let windows = self.all.len();
                    tracing::warn!(%error, windows, left_out, "a link gets no more memory windows");
                }
                return None;
            }
        }
        Some(self.all.len() - 1)
    }

    /// Ends all windows, before their queue pair.
    pub fn end_all(&mut self) {
        self.free.clear();
        self.all.clear();
    }
}

/// A window that was bound.
struct Bound {
    at: usize,
    key: u32,
    /// The bind must be waited for.
    is_awaited: bool,
}

impl DataQueue {
    /// Binds a window to bytes of the pool. If the queue is full, the request takes the place that
    /// is kept for those that are waited for.
    fn bind(
        &mut self,
        device: &FabricDevice,
        addr: u64,
        len: u64,
        rights: c_int,
    ) -> Result<Bound, PostError> {
        let is_awaited = match self.room(1) {
            Ok(()) => false,
            Err(PostError::Full) => true,
            Err(error) => return Err(error),
        };
        let at = self.windows.take(&device.domain).ok_or(PostError::Full)?;
        let window = &self.windows.all[at];
        let (Some(handle), Some(mr)) = (window.handle, device.region.as_ptr()) else {
            return Err(PostError::Down);
        };
        let key = window.next;
        let mut request = ibv_send_wr::zeroed();
        request.opcode = IBV_WR_BIND_MW;
        request.bind_mw = ibv_wr_bind {
            mw: handle.as_ptr(),
            rkey: key,
            bind_info: ibv_mw_bind_info { mr, addr, length: len, mw_access_flags: rights as u32 },
        };
        // The driver reads the window's present key. A refused request has ended all windows.
        self.post_alone(&mut request, is_awaited)?;
        // SAFETY: a window of the library, which nobody else uses. Its owner sets the key after a
        // bind of type 2.
        unsafe { (*handle.as_ptr()).rkey = key };
        self.windows.all[at].next = ibv_inc_rkey(key);
        Ok(Bound { at, key, is_awaited })
    }

    /// Ends the key of a bound window. The request is waited for.
    fn invalidate(&mut self, at: usize) -> Result<(), PostError> {
        let Some(handle) = self.windows.all.get(at).and_then(|window| window.handle) else {
            return Err(PostError::Down);
        };
        let mut request = ibv_send_wr::zeroed();
        request.opcode = IBV_WR_LOCAL_INV;
        // SAFETY: a window of the library.
        request.imm_data = unsafe { (*handle.as_ptr()).rkey };
        self.post_alone(&mut request, true)
    }
}

impl VerbsPort {
    /// Grants a part of the pool to the peer, by a window. Without bytes there is no access, and no
    /// window.
    fn bind(&mut self, id: LinkId, addr: u64, len: u64, rights: c_int) -> Result<Bound, PostError> {
        if len > LONGEST_WINDOW {
            return Err(PostError::Refused("a memory window has at most 2 GiB"));
        }
        let shared = Arc::clone(&self.shared);
        let link = self.usable(id)?;
        if !link.grants.has_room() {
            return Err(PostError::Full);
        }
        let bound = link.main.bind(&shared.devices[link.device], addr, len, rights);
        let bound = bound.inspect_err(|error| self.note_refusal(id, *error))?;
        if bound.is_awaited && !self.await_request(id) {
            self.end_window(id, bound.at);
            return Err(PostError::Down);
        }
        Ok(bound)
    }

    /// [`Port::grant`](crate::fabric::Port::grant) of a tensor with bytes.
    pub(super) fn grant_window(
        &mut self,
        id: LinkId,
        target: TensorMut,
    ) -> Result<Grant, (PostError, TensorMut)> {
        let (addr, len) = (target.as_ptr() as u64, target.bytes().len() as u64);
        let bound = match self.bind(id, addr, len, IBV_ACCESS_REMOTE_WRITE) {
            Ok(bound) => bound,
            Err(error) => return Err((error, target)),
        };
        let (region, offset) = (self.shared.region_id, addr - self.shared.base);
        let grant = Grant { region, key: bound.key, offset, len };
        match self.link(id) {
            Some(link) => Ok(link.grants.add_write(grant, bound.at, target)),
            None => unreachable!("a window was bound on the link just now"),
        }
    }

    /// [`Port::expose`](crate::fabric::Port::expose) of a tensor with bytes.
    pub(super) fn expose_window(&mut self, id: LinkId, source: &Tensor) -> Result<Grant, PostError> {
        let (addr, len) = (source.bytes().as_ptr() as u64, source.bytes().len() as u64);
        let bound = self.bind(id, addr, len, IBV_ACCESS_REMOTE_READ)?;
        let (region, offset) = (self.shared.region_id, addr - self.shared.base);
        let grant = Grant { region, key: bound.key, offset, len };
        match self.link(id) {
            Some(link) => Ok(link.grants.add_read(grant, bound.at, source.clone())),
            None => unreachable!("a window was bound on the link just now"),
        }
    }

    /// Ends the access by a window. Returns whether the device lets none through any more.
    pub(super) fn close_window(&mut self, id: LinkId, at: usize) -> bool {
        let Some(link) = self.link(id) else { return false };
        if link.is_up() {
            match link.main.invalidate(at) {
                Ok(()) if self.await_request(id) => {
                    if let Some(link) = self.link(id) {
                        link.main.windows.free.push(at);
                    }
                    return true;
                }
                Ok(()) => {}
                Err(error) => self.note_refusal(id, error),
            }
        }
        self.end_window(id, at)
    }

    /// As [`VerbsPort::close_window`], on a queue pair that may carry out no more requests.
    fn end_window(&mut self, id: LinkId, at: usize) -> bool {
        let Some(link) = self.link(id) else { return false };
        if link.main.pair().is_some() {
            if link.main.windows.all.get_mut(at).is_none_or(MemoryWindow::end) {
                return true;
            }
            self.fail_window(id, "a memory window can't be ended");
        }
        // Without the queue pair nothing uses the window, unless not even the queue pair has ended.
        self.link(id).is_some_and(|link| !link.main.is_lost)
    }

    #[cold]
    fn fail_window(&mut self, id: LinkId, event: &'static str) {
        let cause = "the peer takes nothing in, or the device failed: see the kernel's log (`dmesg`)";
        if let Some(link) = self.link(id) {
            link.fail(LinkFailure::Device { device: link.device_name().to_owned(), event, cause });
        }
        self.needs_service = true;
    }

    /// Waits for the request of a link that is waited for. Other completions of the port are kept
    /// for the next poll, in their order. Returns whether the request was carried out: otherwise
    /// the link is about to go down.
    fn await_request(&mut self, id: LinkId) -> bool {
        let begun = self.shared.watcher.ticks();
        let mut since = begun;
        let shared = Arc::clone(&self.shared);
        loop {
            let Some(link) = self.link(id) else { return false };
            if link.main.pair().is_none() || link.main.failure(link.device_name()).is_some() {
                return false;
            }
            let queue = Arc::clone(&link.places.queue);
            let Ok(count) = queue.poll(&mut self.batch) else {
                self.broken(&queue);
                return false;
            };
            self.pending.extend_from_slice(&self.batch[..count]);
            // Requests and receives of the main queue pair.
            let of_main = |wc: &&ibv_wc| wc.wr_id & !(OPCODE_BITS | 0xFF) == name(id, 0, false);
            let mut came = self.batch[..count].iter().filter(of_main);
            let ticks = shared.watcher.ticks();
            // Not a receive: the peer decides when a message comes.
            if came.clone().any(|wc| wc.wr_id & RECEIVE == 0) {
                since = ticks;
            }
            let ending = came.find(|wc| wc.status != IBV_WC_SUCCESS || wc.wr_id & AWAITED != 0);
            if let Some(wc) = ending {
                return wc.status == IBV_WC_SUCCESS;
            }
            if ticks.wrapping_sub(since) > WAIT_TICKS {
                self.fail_window(id, "a memory window was not bound or revoked in 5 s");
                return false;
            }
            if ticks.wrapping_sub(begun) > LONGEST_WAIT_TICKS {
                self.fail_window(id, "a memory window was not bound or revoked in 30 s");
                return false;
            }
            if count == 0 {
                std::thread::yield_now();
            }
        }
    }
}
