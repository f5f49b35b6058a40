//! The names of requests, and requests of one queue pair that are posted by one call: the device is
//! told once of all of them.

use super::data_queue::RemoteAddr;
use super::qp::QueuePair;
use super::sys::*;
use crate::fabric::LinkId;
use crate::wire::Immediate;
use std::mem::MaybeUninit;

/// Requests that one call posts at most.
pub(super) const LONGEST: usize = 32;
/// Where a request's opcode is in its name.
pub(super) const OPCODE_SHIFT: u32 = 16;

/// All bits of a name that can say which opcode it is.
pub(super) const OPCODE_BITS: u64 = 0xFF << OPCODE_SHIFT;
/// The bit of a request whose completion the port waits for.
pub(super) const AWAITED: u64 = 1 << 1;
/// The bit of a receive.
pub(super) const RECEIVE: u64 = 1;

/// Names a request: link, opcode, number of the queue pair, and whether it is a receive.
pub(super) fn name(link: LinkId, queue: u8, receive: bool) -> u64 {
    u64::from(link.0) << 32 | u64::from(queue) << 8 | u64::from(receive)
}

/// The number of the queue pair in a request's name.
#[inline]
pub(super) fn queue_of(name: u64) -> u8 {
    (name >> 8) as u8
}

/// The text for a request with this name, for messages.
pub(super) fn operation(name: u64) -> &'static str {
    match (name & 1, (name >> OPCODE_SHIFT) as u8 as u32) {
        (1, _) => "receive",
        (_, IBV_WR_SEND) => "message",
        (_, IBV_WR_RDMA_READ) => "read",
        (_, IBV_WR_BIND_MW) => "grant",
        (_, IBV_WR_LOCAL_INV) => "revocation",
        _ => "write",
    }
}

/// A request, before it is posted.
#[derive(Clone, Copy)]
pub(super) struct SendRequest {
    pub name: u64,
    pub opcode: u32,
    pub piece: ibv_sge,
    pub remote: Option<RemoteAddr>,
    pub immediate: Option<Immediate>,
    pub flags: u32,
}

impl SendRequest {
    /// As the library takes it, but for its piece of memory.
    #[inline]
    pub fn without_piece(&self) -> ibv_send_wr {
        let mut request = ibv_send_wr::zeroed();
        request.wr_id = self.name;
        request.opcode = self.opcode;
        request.send_flags = self.flags;
        if let Some(immediate) = self.immediate {
            request.imm_data = immediate.to_bits().to_be();
        }
        if let Some(RemoteAddr { addr, rkey }) = self.remote {
            request.wr.rdma = ibv_wr_rdma { remote_addr: addr, rkey };
        }
        request
    }
}

/// Requests that wait to be posted together.
#[derive(Default)]
pub(super) struct PostList {
    requests: Vec<SendRequest>,
    is_open: bool,
}

impl PostList {
    /// An empty one. Allocates nothing more.
    pub fn new() -> Self {
        PostList { requests: Vec::with_capacity(LONGEST), is_open: false }
    }

    /// Whether requests wait here.
    #[inline]
    pub fn is_open(&self) -> bool {
        self.is_open
    }

    pub fn open(&mut self) {
        self.is_open = true;
    }

    pub fn close(&mut self) {
        self.is_open = false;
    }

    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    pub fn is_full(&self) -> bool {
        self.requests.len() == LONGEST
    }

    /// Adds a request. There is room.
    pub fn push(&mut self, request: SendRequest) {
        debug_assert!(!self.is_full());
        self.requests.push(request);
    }

    /// Drops the waiting requests.
    pub fn clear(&mut self) {
        self.requests.clear();
    }

    /// Posts the waiting requests, in order. `false` if the device refuses one.
    ///
    /// # Safety
    /// The requests' pieces of memory stay as they are until the requests are complete or the queue
    /// pair is destroyed; inline, until this returns.
    pub unsafe fn post(&mut self, pair: &mut QueuePair) -> bool {
        let count = self.requests.len();
        if count == 0 {
            return true;
        }
        // Filled as far as there are requests: one alone costs no more than by itself.
        let mut pieces = [const { MaybeUninit::<ibv_sge>::uninit() }; LONGEST];
        let mut list = [const { MaybeUninit::<ibv_send_wr>::uninit() }; LONGEST];
        let (first_piece, first) =
            (pieces.as_mut_ptr().cast::<ibv_sge>(), list.as_mut_ptr().cast::<ibv_send_wr>());
        for (at, request) in self.requests.drain(..).enumerate() {
            let mut posted = request.without_piece();
            if at + 1 < count {
                posted.next = first.wrapping_add(at + 1);
            }
            // SAFETY: `at` is below `count`, which is at most `LONGEST`: inside both arrays, which
            // are not touched otherwise until the list is posted.
            unsafe {
                if request.piece.length > 0 {
                    first_piece.add(at).write(request.piece);
                    posted.sg_list = first_piece.add(at);
                    posted.num_sge = 1;
                }
                first.add(at).write(posted);
            }
        }
        // SAFETY: a list of `count` requests, each initialised above, in a live array. The caller
        // guarantees their memory.
        unsafe { pair.post_send(&mut *first) }
    }
}
