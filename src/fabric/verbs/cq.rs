//! Completion queues that can't overrun.
//!
//! Before it is created, a queue pair reserves a place of the completion queue for each work
//! request of both its queues. A work request holds its place until its completion has been polled;
//! only then is another one posted. So a completion queue cannot overrun. Completions of a
//! destroyed queue pair hold their places until the queue has been found empty.

#![allow(clippy::disallowed_types)] // events of sleeping pollers, and queues that end

use super::context::DeviceContext;
use super::failure::{memory_remedy, os, unavailable};
use super::library::made;
use super::sys::*;
use crate::fabric::FabricError;
use rustix::fd::BorrowedFd;
use std::ffi::c_int;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The completion channel of completion queues.
pub(super) struct CompletionChannel {
    context: Arc<DeviceContext>,
    handle: NonNull<ibv_comp_channel>,
    /// Held from an event's taking to its acknowledgement, and while a queue is destroyed.
    unacknowledged: Mutex<()>,
}

// SAFETY: libibverbs' calls may be made from any thread; the struct is not changed after it is
// made.
unsafe impl Send for CompletionChannel {}
// SAFETY: as above.
unsafe impl Sync for CompletionChannel {}

impl CompletionChannel {
    pub fn new(context: &Arc<DeviceContext>) -> Result<Arc<Self>, FabricError> {
        // SAFETY: an opened device.
        let call = || unsafe { (context.library.create_comp_channel)(context.as_ptr()) };
        let handle = made(call).map_err(|error| {
            let remedy = "raise the limit of open files (ulimit -n)";
            os(format!("making a completion channel of {}", context.name), error, remedy)
        })?;
        let channel =
            CompletionChannel { context: Arc::clone(context), handle, unacknowledged: Mutex::default() };
        rustix::io::ioctl_fionbio(channel.fd(), true).map_err(|error| {
            os("making a completion channel non-blocking", error.into(), "see the kernel's log (`dmesg`)")
        })?;
        Ok(Arc::new(channel))
    }

    /// The device.
    pub fn context(&self) -> &DeviceContext {
        &self.context
    }

    /// Readable when a queue that was armed has something.
    pub fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel's descriptor is open as long as the channel is there.
        unsafe { BorrowedFd::borrow_raw((*self.handle.as_ptr()).fd) }
    }

    /// Takes and acknowledges an event; `false` if there is none.
    pub fn take(&self) -> bool {
        let (mut cq, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
        let _unacknowledged = self.unacknowledged.lock().unwrap_or_else(PoisonError::into_inner);
        let library = self.context.library;
        // SAFETY: a channel of the library; both pointers are written.
        if unsafe { (library.get_cq_event)(self.handle.as_ptr(), &mut cq, &mut context) } != 0 {
            return false;
        }
        // SAFETY: the queue of the event just taken; it is not destroyed before its events are
        // acknowledged.
        unsafe { (library.ack_cq_events)(cq, 1) };
        true
    }
}

impl Drop for CompletionChannel {
    fn drop(&mut self) {
        // SAFETY: its queues hold it, so none is left.
        unsafe { (self.context.library.destroy_comp_channel)(self.handle.as_ptr()) };
    }
}

pub(super) struct CompletionQueue {
    channel: Arc<CompletionChannel>,
    handle: NonNull<ibv_cq>,
    places: u32,
    used: AtomicU32,
    /// Places of destroyed queue pairs, whose completions may still be queued.
    stale: AtomicU32,
    /// Calls that posted on its queue pairs, so far.
    posts: AtomicU64,
}

// SAFETY: the calls of libibverbs are thread-safe, and fields that change are atomic.
unsafe impl Send for CompletionQueue {}
// SAFETY: as above.
unsafe impl Sync for CompletionQueue {}

impl CompletionQueue {
    /// Counts a call that posts on one of its queue pairs. Only the port's owner does: no locked
    /// instruction is needed.
    #[inline]
    pub fn count_post(&self) {
        self.posts.store(self.posts() + 1, Ordering::Relaxed);
    }

    /// How many there were.
    pub fn posts(&self) -> u64 {
        self.posts.load(Ordering::Relaxed)
    }

    /// A queue of at least `places`, whose events come by a completion vector of the device.
    pub fn new(
        channel: &Arc<CompletionChannel>,
        places: u32,
        vector: c_int,
    ) -> Result<Arc<Self>, FabricError> {
        let context = &channel.context;
        let most = u32::try_from(context.attr().max_cqe).unwrap_or(0);
        if places > most {
            return Err(unavailable(format!(
                "a link needs {places} places of a completion queue, and {} has queues of {most} at \
                 most: lower rdma_qp_queue_depth \
                 or rdma_qps_per_peer",
                context.name
            )));
        }
        let entries = c_int::try_from(places).unwrap_or(c_int::MAX);
        // SAFETY: a device and a channel of it.
        let call = || unsafe {
            let null = std::ptr::null_mut();
            (context.library.create_cq)(context.as_ptr(), entries, null, channel.handle.as_ptr(), vector)
        };
        let handle = made(call).map_err(|error| {
            let remedy = memory_remedy(&error);
            let tried = format!(
                "making a completion queue of {places} on completion vector {vector} of {}",
                context.name
            );
            os(tried, error, remedy)
        })?;
        let channel = Arc::clone(channel);
        Ok(Arc::new(CompletionQueue {
            channel,
            handle,
            places,
            used: AtomicU32::new(0),
            stale: AtomicU32::new(0),
            posts: AtomicU64::new(0),
        }))
    }

    pub fn as_ptr(&self) -> *mut ibv_cq {
        self.handle.as_ptr()
    }

    /// The channel by which its events come.
    pub fn channel(&self) -> &Arc<CompletionChannel> {
        &self.channel
    }

    /// Reserves `count` places, if they are free.
    pub fn reserve(self: &Arc<Self>, places: u32) -> Option<CqPlaces> {
        let more = |used: u32| used.checked_add(places).filter(|sum| *sum <= self.places);
        self.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).ok()?;
        Some(CqPlaces { queue: Arc::clone(self), places })
    }

    /// Whether all its places are of queue pairs that are destroyed.
    pub fn is_deserted(&self) -> bool {
        self.used.load(Ordering::Acquire) == self.stale.load(Ordering::Acquire)
    }

    /// Polls completions. Only one caller polls the queue.
    ///
    /// # Errors
    /// If the device is broken.
    #[inline]
    pub fn poll(&self, room: &mut [ibv_wc]) -> Result<usize, ()> {
        let stale = self.stale.load(Ordering::Acquire);
        // SAFETY: a completion queue of the library, polled by the owner of its port alone.
        let came = usize::try_from(unsafe { ibv_poll_cq(self.as_ptr(), room) }).map_err(|_| ())?;
        if stale != 0 && came < room.len() {
            // Empty, after those queue pairs were destroyed.
            self.stale.fetch_sub(stale, Ordering::AcqRel);
            self.used.fetch_sub(stale, Ordering::AcqRel);
        }
        Ok(came)
    }

    /// Asks for an event with the next completion.
    pub fn arm(&self) {
        // SAFETY: a completion queue of the library, made with a channel. The call fails on broken
        // devices alone, of which an asynchronous event tells.
        unsafe { ibv_req_notify_cq(self.as_ptr(), false) };
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        let _none = self.channel.unacknowledged.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: its queue pairs hold it, so none is left, and no event of it is unacknowledged.
        unsafe { (self.channel.context.library.destroy_cq)(self.as_ptr()) };
    }
}

/// Places of a completion queue that a link has taken. Dropped after the queue pairs of the link.
pub(super) struct CqPlaces {
    pub queue: Arc<CompletionQueue>,
    places: u32,
}

impl Drop for CqPlaces {
    fn drop(&mut self) {
        self.queue.stale.fetch_add(self.places, Ordering::AcqRel);
    }
}
