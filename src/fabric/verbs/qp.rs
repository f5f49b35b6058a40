//! Reliable-connection queue pairs, from RESET to RTS (InfiniBand specification, 10.3;
//! `ibv_modify_qp(3)`).

use super::address::RailAddress;
use super::chosen::{Chosen, PortAddress};
use super::context::ProtectionDomain;
use super::cq::CompletionQueue;
use super::device::GidKind;
use super::events::{DeviceWatcher, WatchedPair};
use super::failure::{memory_remedy, os, unavailable};
use super::library::{made, returned};
use super::options::VerbsOptions;
use super::sys::*;
use crate::fabric::FabricError;
use std::ffi::c_int;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

/// Routers that a packet may pass (specification 4.2).
const HOP_LIMIT: u8 = 64;
/// The inline sizes that are tried, largest first.
const INLINE: [u32; 4] = [256, 128, 64, 0];

pub(super) struct QueuePair {
    handle: NonNull<ibv_qp>,
    domain: Arc<ProtectionDomain>,
    queue: Arc<CompletionQueue>,
    /// Bytes that a request carries inline.
    pub max_inline: usize,
    pub number: u32,
    /// Its news, as asynchronous events tell them.
    pub news: WatchedPair,
    is_ended: bool,
}

// SAFETY: libibverbs' calls may be made from any thread. On a domain of one thread
// (`ProtectionDomain::for_one_thread`) posting may not be concurrent. All queue pairs of such a
// domain are of one endpoint or link. That endpoint or link has one owner at a time and posts
// through `&mut`.
unsafe impl Send for QueuePair {}

impl QueuePair {
    /// Creates a queue pair in the state INIT, which accepts receives. `rights` (`IBV_ACCESS_*`)
    /// are those of the peer.
    pub fn new(
        domain: &Arc<ProtectionDomain>,
        queue: &Arc<CompletionQueue>,
        watcher: &Arc<DeviceWatcher>,
        [sends, receives]: [u32; 2],
        rights: c_int,
        chosen: &Chosen,
    ) -> Result<Self, FabricError> {
        let context = &domain.context;
        let most = u32::try_from(context.attr().max_qp_wr).unwrap_or(0);
        if sends.max(receives) > most {
            return Err(unavailable(format!(
                "a queue pair with {sends} sends and {receives} receives was asked for, and {} permits \
                 {most}: lower rdma_qp_queue_depth, or name another device",
                context.name
            )));
        }
        let mut pair = Err(io::Error::from_raw_os_error(libc::EINVAL));
        let mut granted = ibv_qp_cap::default();
        // Drivers refuse a queue pair for want of inline bytes with different errors.
        for inline in INLINE {
            let mut init = ibv_qp_init_attr {
                qp_context: std::ptr::null_mut(),
                send_cq: queue.as_ptr(),
                recv_cq: queue.as_ptr(),
                srq: std::ptr::null_mut(),
                cap: ibv_qp_cap {
                    max_send_wr: sends,
                    max_recv_wr: receives,
                    max_send_sge: 1,
                    max_recv_sge: 1,
                    max_inline_data: inline,
                },
                qp_type: IBV_QPT_RC,
                sq_sig_all: 0,
            };
            // SAFETY: a domain and a queue of the same device.
            let call = || unsafe { (context.library.create_qp)(domain.as_ptr(), &mut init) };
            match made(call) {
                Ok(handle) => {
                    (pair, granted) = (Ok(handle), init.cap);
                    break;
                }
                Err(error) => pair = Err(error),
            }
        }
        let handle = pair.map_err(|error| {
            let remedy = match error.raw_os_error() {
                Some(libc::EINVAL) => "the driver has no queue pair of that size: lower rdma_qp_queue_depth",
                _ => memory_remedy(&error),
            };
            let tried =
                format!("making a queue pair of {sends} sends and {receives} receives on {}", context.name);
            os(tried, error, remedy)
        })?;
        // SAFETY: a queue pair of the library.
        let number = unsafe { (*handle.as_ptr()).qp_num };
        let mut pair = QueuePair {
            handle,
            domain: Arc::clone(domain),
            queue: Arc::clone(queue),
            max_inline: granted.max_inline_data as usize,
            number,
            news: watcher.register(chosen.at, handle.as_ptr()),
            is_ended: false,
        };
        let mut attr = ibv_qp_attr {
            qp_state: IBV_QPS_INIT,
            pkey_index: chosen.pkey_index,
            port_num: chosen.port,
            qp_access_flags: rights as u32,
            ..ibv_qp_attr::default()
        };
        let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        pair.modify(&mut attr, mask, "INIT")?;
        Ok(pair)
    }

    fn modify(&mut self, attr: &mut ibv_qp_attr, mask: c_int, state: &str) -> Result<(), FabricError> {
        // SAFETY: a live queue pair, and attributes whose valid fields the mask names.
        let result = unsafe { (self.domain.context.library.modify_qp)(self.handle.as_ptr(), attr, mask) };
        if result == 0 {
            return Ok(());
        }
        let error = returned(result);
        let remedy = match error.raw_os_error() {
            Some(libc::ETIMEDOUT | libc::ENETUNREACH | libc::EHOSTUNREACH) => {
                "the peer's GID can't be reached from this port: check the addresses and VLANs of both \
                 interfaces, or choose \
                 another GID index"
            }
            Some(libc::EINVAL) => {
                "the device refuses a setting: see gid_index, pkey_index, mtu and service_level"
            }
            _ => "see the kernel's log (`dmesg`)",
        };
        Err(os(
            format!("moving queue pair {} of {} to {state}", self.number, self.domain.context.name),
            error,
            remedy,
        ))
    }

    /// Connects a queue pair, whose port has the address `place`, to the peer's: RTR, then RTS.
    pub fn connect(
        &mut self,
        chosen: &Chosen,
        place: &PortAddress,
        options: &VerbsOptions,
        own_psn: u32,
        peer: &RailAddress,
        (peer_number, peer_psn): (u32, u32),
    ) -> Result<(), FabricError> {
        let context = Arc::clone(&self.domain.context);
        let attr = context.attr();
        let clamp = |count: c_int| u8::try_from(count.clamp(1, 255)).unwrap_or(1);
        let elsewhere = is_elsewhere(chosen, place, peer);
        let global = chosen.global || peer.global || elsewhere;
        let mut ready_to_receive = ibv_qp_attr {
            qp_state: IBV_QPS_RTR,
            path_mtu: place.mtu.min(peer.mtu),
            dest_qp_num: peer_number,
            rq_psn: peer_psn,
            max_dest_rd_atomic: clamp(attr.max_qp_rd_atom),
            min_rnr_timer: options.min_rnr_timer,
            ah_attr: ibv_ah_attr {
                grh: ibv_global_route {
                    dgid: peer.gid,
                    flow_label: 0,
                    sgid_index: place.gid_index,
                    hop_limit: HOP_LIMIT,
                    traffic_class: options.traffic_class,
                },
                dlid: if elsewhere { routed_lid(peer) } else { peer.lid },
                sl: options.service_level,
                is_global: u8::from(global),
                port_num: chosen.port,
                ..ibv_ah_attr::default()
            },
            ..ibv_qp_attr::default()
        };
        let mask = IBV_QP_STATE
            | IBV_QP_AV
            | IBV_QP_PATH_MTU
            | IBV_QP_DEST_QPN
            | IBV_QP_RQ_PSN
            | IBV_QP_MAX_DEST_RD_ATOMIC
            | IBV_QP_MIN_RNR_TIMER;
        self.modify(&mut ready_to_receive, mask, "RTR")?;
        let mut ready_to_send = ibv_qp_attr {
            qp_state: IBV_QPS_RTS,
            sq_psn: own_psn,
            timeout: options.timeout,
            retry_cnt: options.retry_count,
            rnr_retry: options.rnr_retry,
            max_rd_atomic: clamp(attr.max_qp_init_rd_atom).min(peer.reads),
            ..ibv_qp_attr::default()
        };
        let mask = IBV_QP_STATE
            | IBV_QP_SQ_PSN
            | IBV_QP_TIMEOUT
            | IBV_QP_RETRY_CNT
            | IBV_QP_RNR_RETRY
            | IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify(&mut ready_to_send, mask, "RTS")
    }

    /// Moves the queue pair to the error state: whatever is outstanding completes as flushed, and
    /// the peer reaches nothing any more.
    pub fn stop(&mut self) -> Result<(), FabricError> {
        let mut attr = ibv_qp_attr { qp_state: IBV_QPS_ERR, ..ibv_qp_attr::default() };
        self.modify(&mut attr, IBV_QP_STATE, "ERR")
    }

    /// Counts a call that posts, for the port that owns the queue pair.
    #[inline]
    pub fn count_post(&self) {
        self.queue.count_post();
    }

    /// Posts a request, or a list of them, on the send queue. `false` if the device refuses any.
    ///
    /// # Safety
    /// Their pieces of memory stay as they are until the requests are complete or the queue pair
    /// destroyed; inline, until this returns.
    #[inline]
    pub unsafe fn post_send(&mut self, request: &mut ibv_send_wr) -> bool {
        let mut bad = std::ptr::null_mut();
        // SAFETY: a queue pair of the library, to which `&mut self` is the only way; the rest as
        // the caller vouches.
        unsafe { ibv_post_send(self.handle.as_ptr(), request, &mut bad) == 0 }
    }

    /// Posts a list of receives. `false` if the device refuses any.
    ///
    /// # Safety
    /// Nobody else touches their pieces of memory until they are complete or the queue pair is
    /// destroyed.
    #[inline]
    pub unsafe fn post_receives(&mut self, list: &mut ibv_recv_wr) -> bool {
        let mut bad = std::ptr::null_mut();
        // SAFETY: as in `post_send`.
        unsafe { ibv_post_recv(self.handle.as_ptr(), list, &mut bad) == 0 }
    }
}

/// Whether an InfiniBand peer is in another subnet, which packets reach by routers only.
fn is_elsewhere(chosen: &Chosen, place: &PortAddress, peer: &RailAddress) -> bool {
    let (ours, theirs) = (&place.gid.raw, &peer.gid.raw);
    chosen.gid_kind == GidKind::InfiniBand
        && *ours != [0; 16]
        && *theirs != [0; 16]
        && ours[..8] != theirs[..8]
}

/// The LID by which routers forward packets to a peer in another subnet. Where routers have one, it
/// is in the subnet prefix of each GID, in front of the number of the subnet, as NCCL reads it.
fn routed_lid(peer: &RailAddress) -> u16 {
    match u16::from_be_bytes([peer.gid.raw[4], peer.gid.raw[5]]) {
        0 => peer.lid,
        forwarded => forwarded,
    }
}

impl QueuePair {
    /// Destroys the queue pair. Returns whether the device will not touch memory for it any more.
    /// If the driver cannot even stop the queue pair, its memory must never be used again.
    pub fn end(mut self) -> bool {
        self.destroy()
    }

    fn destroy(&mut self) -> bool {
        self.is_ended = true;
        self.news.forget();
        // SAFETY: this queue pair, once; its asynchronous events are acknowledged as they are
        // taken.
        let result = unsafe { (self.domain.context.library.destroy_qp)(self.handle.as_ptr()) };
        let Err(error) = self.domain.context.ended(result) else { return true };
        // The queue pair still exists, and so must its resources.
        std::mem::forget((Arc::clone(&self.queue), Arc::clone(&self.domain)));
        let (device, pair) = (self.domain.context.name.clone(), self.number);
        match self.stop() {
            Ok(()) => {
                tracing::warn!(device, pair, %error, "a queue pair can't be destroyed: it stays, in \
                 state ERR")
            }
            Err(also) => {
                tracing::error!(device, pair, %error, %also, "a queue pair can't be destroyed: what it \
                 was given is lost");
                return false;
            }
        }
        true
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        if !self.is_ended {
            self.destroy();
        }
    }
}
