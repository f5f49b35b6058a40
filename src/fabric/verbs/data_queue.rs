//! A data queue pair: its outstanding requests, and its receives.
//!
//! Outstanding work requests are at most the depth of the queue, plus a ping and one flush, for
//! which the send queue has extra room. So a post never fails for lack of room. Not every request
//! is signalled: the first one that holds a tensor is, then one per several requests or MiB. If
//! held tensors remain behind the last signalled request, a signalled request of no bytes follows
//! (a *flush*), so a quiet queue holds nothing.
//!
//! The requests of a batch wait, in their order, and one call posts several of them. They count
//! as posted. Requests that the device refuses then fail with the link.

mod receives;
mod takeover;

pub(super) use takeover::Translation;

use super::address::RemoteRegion;
use super::buffers::{LinkBuffer, PLACE};
use super::control::next;
use super::post_list::{AWAITED, OPCODE_SHIFT, PostList, SendRequest, name, queue_of};
use super::qp::QueuePair;
use super::stripes::AnnouncedLength;
use super::sys::*;
use super::windows::Windows;
use crate::fabric::{Completions, Event, LinkId, MAX_MESSAGE, PostError};
use crate::memory::{Tensor, TensorMut};
use crate::wire::Immediate;
use std::collections::VecDeque;

/// Requests of the send queue beside its depth: the ping, a flush, one that is waited for, and one
/// that is not used.
pub(super) const SPARE: u32 = 4;
/// Bytes of requests without a completion in a row, at most.
const BATCH_BYTES: u64 = 1 << 20;

/// The memory of an outstanding request.
pub(super) enum PostedOp {
    /// Nothing: its bytes were copied.
    Copied,
    /// The source of a write.
    Write(#[allow(dead_code)] Tensor),
    /// The source of a part of a striped write: on a stripe, or on the main queue if it is written
    /// again. The write completes with the part that ends on the main queue.
    Part(Tensor),
    /// The target of a read.
    Read(TensorMut),
}

struct OutstandingEntry {
    /// Work requests that it counts for.
    requests: u32,
    signaled: bool,
    is_flush: bool,
    op: PostedOp,
}

/// The remote memory of a request.
#[derive(Clone, Copy)]
pub(super) struct RemoteAddr {
    pub addr: u64,
    pub rkey: u32,
}

/// What a queue pair for data is used for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum QueuePhase {
    /// Requests are posted.
    Ready,
    /// It is in the error state or destroyed: nothing is posted any more.
    Stopped,
    /// It is a backup, or has taken over and its peer has not: no sends yet.
    Backup,
}

/// A queue pair for data.
pub(super) struct DataQueue {
    /// Bound on this queue pair. Empty without memory windows.
    pub windows: Windows,
    // Before the rest: once it is gone the device touches nothing of it.
    pair: Option<QueuePair>,
    phase: QueuePhase,
    /// The link has other rails, which carry what is outstanding here if this queue pair breaks.
    pub is_redundant: bool,
    /// The queue pair could not be stopped, so outstanding memory is leaked.
    pub is_lost: bool,
    depth: u32,
    max_inline: usize,
    /// One request in this many is signalled.
    signal_every: u32,
    outstanding: VecDeque<OutstandingEntry>,
    /// The requests of `outstanding`, for another queue that takes over. Kept where there are other
    /// rails.
    kept: Option<VecDeque<SendRequest>>,
    in_use: u32,
    signaled: u32,
    /// Since the last request with a completion.
    unsignaled: u32,
    unsignaled_bytes: u64,
    holds_unsignaled: bool,
    flushing: bool,
    /// Next place for bytes that are copied and can't be inline.
    copy_at: u32,
    /// The low half of a request's `wr_id`.
    name: u64,
    /// Receives that may be consumed, posted or not yet posted.
    allowed: u32,
    posted: u32,
    /// Next receive to be posted, and next to complete.
    tail: u32,
    head: u32,
    /// Receive-consuming requests of this side, modulo 2^32.
    pub consuming: u32,
    /// The peer's receive for the next of them, which is the place of a split write's length.
    receive_at: u32,
    pub consumed: u32,
    /// The number of requests that the peer will have sent, once it has said so.
    pub expected: Option<u32>,
    /// The peer's receives, as it has reported them.
    pub returned: u32,
    /// [Parts](PostedOp::Part) that are done, modulo 2^32.
    pub parts_done: u32,
    /// The last request that is done consumes a receive of the peer. Known where there are other
    /// rails.
    last_done_consumes: bool,
    /// Start of the queue's places in the link's buffer.
    places: usize,
    /// Requests that wait to be posted together.
    post_list: PostList,
}

/// Bytes of a link's buffer that a data queue needs: places to receive, and places to copy to.
pub(super) fn bytes_of_places(depth: u32) -> usize {
    2 * depth as usize * PLACE
}

/// Number of requests for an operation of `len` bytes, if one carries `longest`.
#[inline]
fn requests_for(len: u64, longest: u32) -> u64 {
    // Without the division, which costs more than all the rest of posting a short write.
    if len <= u64::from(longest) { 1 } else { len.div_ceil(u64::from(longest)) }
}

impl DataQueue {
    /// The data queue of this number: 0 is the main one, and the stripes follow. `places` is where
    /// its places in the link's buffer begin.
    pub fn new(
        pair: QueuePair,
        link: LinkId,
        number: u8,
        depth: u32,
        places: usize,
        signal_every: u32,
    ) -> Self {
        DataQueue {
            name: name(link, number, false),
            max_inline: pair.max_inline,
            windows: Windows::default(),
            pair: Some(pair),
            phase: QueuePhase::Ready,
            is_redundant: false,
            is_lost: false,
            depth,
            signal_every: signal_every.min(depth / 4).max(1),
            outstanding: VecDeque::with_capacity(depth as usize + 1),
            kept: None,
            in_use: 0,
            signaled: 0,
            unsignaled: 0,
            unsignaled_bytes: 0,
            holds_unsignaled: false,
            flushing: false,
            copy_at: 0,
            allowed: 0,
            posted: 0,
            tail: 0,
            head: 0,
            consuming: 0,
            receive_at: 0,
            consumed: 0,
            expected: None,
            returned: 0,
            parts_done: 0,
            last_done_consumes: true,
            places,
            post_list: PostList::new(),
        }
    }

    pub fn pair(&mut self) -> Option<&mut QueuePair> {
        self.pair.as_mut()
    }

    /// Whether asynchronous events have reported the queue pair.
    pub fn failure(&self, device: &str) -> Option<crate::fabric::LinkFailure> {
        self.pair.as_ref()?.news.failure(device)
    }

    /// Ends the queue pair: from now on the device touches no memory for it, unless it [is
    /// lost](DataQueue::is_lost).
    pub fn destroy(&mut self) {
        self.phase = QueuePhase::Stopped;
        self.post_list.clear();
        self.windows.end_all();
        self.is_lost |= self.pair.take().is_some_and(|pair| !pair.end());
    }

    /// Its number, as in the names of its requests.
    pub fn number(&self) -> u8 {
        queue_of(self.name)
    }

    /// Whether a completion of this name is one of its receives.
    #[inline]
    pub fn has_received(&self, name: u64) -> bool {
        name == self.name | 1
    }

    /// Whether everything has come that the peer will have sent.
    pub fn has_all(&self) -> bool {
        self.expected.is_none_or(|count| count.wrapping_sub(self.consumed) as i32 <= 0)
    }

    /// Whether nothing is outstanding.
    pub fn is_idle(&self) -> bool {
        self.outstanding.is_empty()
    }

    /// Counts a request that consumes a receive of the peer.
    #[inline]
    fn consume(&mut self) {
        self.consuming = self.consuming.wrapping_add(1);
        self.receive_at = next(self.receive_at, self.depth);
    }

    #[inline]
    pub fn room(&self, requests: u32) -> Result<(), PostError> {
        if self.phase != QueuePhase::Ready {
            // A queue pair that is there is about to be taken over.
            return Err(if self.pair.is_some() { PostError::Full } else { PostError::Down });
        }
        if requests > self.depth {
            return Err(PostError::Refused(
                "more bytes than a link carries in one operation: deepen its queue or send less at a time",
            ));
        }
        if self.in_use + requests > self.depth { Err(PostError::Full) } else { Ok(()) }
    }

    /// Whether a request of `len` bytes must be signalled.
    #[inline]
    fn must_signal(&self, holds: bool, bytes: u64) -> bool {
        holds && self.signaled == 0
            || self.unsignaled + 1 >= self.signal_every
            || self.unsignaled_bytes + bytes >= BATCH_BYTES
    }

    /// Posts one request. The bytes of `piece` stay until it is done, as the caller sees to.
    #[inline]
    fn post(
        &mut self,
        opcode: u32,
        piece: ibv_sge,
        remote: Option<RemoteAddr>,
        immediate: Option<Immediate>,
        flags: u32,
    ) -> Result<(), PostError> {
        let name = self.name | u64::from(opcode) << OPCODE_SHIFT;
        let request = SendRequest { name, opcode, piece, remote, immediate, flags };
        if let Some(kept) = &mut self.kept {
            kept.push_back(request);
        }
        if self.post_list.is_open() && self.post_list.is_full() {
            self.post_list_now()?;
        }
        if self.phase == QueuePhase::Stopped {
            // An earlier request of the operation was refused: another rail carries both.
            return Ok(());
        }
        if self.post_list.is_open() {
            self.post_list.push(request);
            return Ok(());
        }
        let Some(pair) = &self.pair else { return Err(PostError::Down) };
        pair.count_post();
        self.post_now(&request)
    }

    #[inline]
    fn post_now(&mut self, request: &SendRequest) -> Result<(), PostError> {
        let mut piece = request.piece;
        let mut request = request.without_piece();
        if piece.length > 0 {
            request.sg_list = &mut piece;
            request.num_sge = 1;
        }
        let Some(pair) = &mut self.pair else { return Err(PostError::Down) };
        // SAFETY: a piece of the pool or of the link's buffer stays registered for longer than the
        // queue pair exists. Another piece belongs to a tensor, which holds a registration and the
        // owner of its memory. The caller's entry holds that tensor until the operation is done.
        // Inline bytes are copied in the call.
        if unsafe { pair.post_send(&mut request) } { Ok(()) } else { self.break_off() }
    }

    /// Later requests wait for [`DataQueue::end_batch`].
    pub fn begin_batch(&mut self) {
        self.post_list.open();
    }

    /// Posts the requests of the batch.
    ///
    /// # Errors
    /// If the queue pair is broken.
    pub fn end_batch(&mut self) -> Result<(), PostError> {
        self.post_list.close();
        self.post_list_now()
    }

    fn post_list_now(&mut self) -> Result<(), PostError> {
        if self.post_list.is_empty() {
            return Ok(());
        }
        let Some(pair) = &mut self.pair else { return Err(PostError::Down) };
        pair.count_post();
        // SAFETY: as for one request; and the bytes that would be inline lie in the link's buffer,
        // see `copy`.
        if unsafe { self.post_list.post(pair) } { Ok(()) } else { self.break_off() }
    }

    /// Posts a request without memory at once, behind all earlier ones. One that is awaited takes
    /// none of the places of the queue: there is one at a time.
    pub fn post_alone(&mut self, request: &mut ibv_send_wr, is_awaited: bool) -> Result<(), PostError> {
        self.post_list_now()?;
        let (mark, places) = if is_awaited { (AWAITED, 0) } else { (0, 1) };
        let signaled = is_awaited || self.must_signal(false, 0);
        request.wr_id = self.name | u64::from(request.opcode) << OPCODE_SHIFT | mark;
        request.send_flags = if signaled { IBV_SEND_SIGNALED } else { 0 };
        let Some(pair) = &mut self.pair else { return Err(PostError::Down) };
        pair.count_post();
        // SAFETY: the request has no pieces of memory.
        if !unsafe { pair.post_send(request) } {
            return self.break_off();
        }
        self.note(places, signaled, 0, PostedOp::Copied);
        Ok(())
    }

    /// Posts an unsignalled write.
    pub fn post_ping(&mut self, piece: ibv_sge, remote: RemoteAddr) -> Result<(), PostError> {
        let name = self.name | u64::from(IBV_WR_RDMA_WRITE) << OPCODE_SHIFT;
        let (opcode, remote) = (IBV_WR_RDMA_WRITE, Some(remote));
        // Not by the thread that owns the port, which alone counts.
        self.post_now(&SendRequest { name, opcode, piece, remote, immediate: None, flags: 0 })
    }

    /// Records a posted request.
    #[inline]
    fn note(&mut self, requests: u32, signaled: bool, bytes: u64, op: PostedOp) {
        if signaled {
            self.signaled += 1;
            (self.unsignaled, self.unsignaled_bytes, self.holds_unsignaled) = (0, 0, false);
        } else {
            self.unsignaled += 1;
            self.unsignaled_bytes += bytes;
            self.holds_unsignaled |= !matches!(op, PostedOp::Copied);
        }
        self.in_use += requests;
        self.outstanding.push_back(OutstandingEntry { requests, signaled, is_flush: false, op });
    }

    /// Where a request finds bytes that need not stay after this call, and its flag. Inline bytes
    /// are read in the call. Others are copied.
    #[inline]
    fn copy(&mut self, buffer: &mut LinkBuffer, bytes: &[u8]) -> (ibv_sge, u32) {
        let is_inline = bytes.len() <= self.max_inline;
        if is_inline && !self.post_list.is_open() && self.kept.is_none() {
            return (
                ibv_sge { addr: bytes.as_ptr() as u64, length: bytes.len() as u32, lkey: 0 },
                IBV_SEND_INLINE,
            );
        }
        // There is a place for each outstanding request, used in turn, so this one is free.
        let at = self.places + (self.depth + self.copy_at) as usize * PLACE;
        buffer.write(at, bytes);
        self.copy_at = next(self.copy_at, self.depth);
        (buffer.piece(at, bytes.len()), if is_inline { IBV_SEND_INLINE } else { 0 })
    }

    /// A send or a write whose bytes are copied before this returns.
    #[inline]
    pub fn post_copied(
        &mut self,
        buffer: &mut LinkBuffer,
        bytes: &[u8],
        remote: Option<RemoteAddr>,
        immediate: Option<Immediate>,
    ) -> Result<(), PostError> {
        debug_assert!(bytes.len() <= MAX_MESSAGE);
        self.room(1)?;
        let opcode = match (remote, immediate) {
            (None, _) => IBV_WR_SEND,
            (Some(_), None) => IBV_WR_RDMA_WRITE,
            (Some(_), Some(_)) => IBV_WR_RDMA_WRITE_WITH_IMM,
        };
        let signaled = self.must_signal(false, 0);
        let (piece, flags) = self.copy(buffer, bytes);
        let flags = flags | if signaled { IBV_SEND_SIGNALED } else { 0 };
        self.post(opcode, piece, remote, immediate, flags)?;
        if opcode != IBV_WR_RDMA_WRITE {
            self.consume();
        }
        self.note(1, signaled, 0, PostedOp::Copied);
        Ok(())
    }

    /// Whether the queue has room for a write with immediate of `len` bytes.
    ///
    /// # Errors
    /// If not, why.
    pub fn has_room(&self, len: u64, longest: u32, total: &AnnouncedLength) -> Result<(), PostError> {
        let chunks = requests_for(len, longest);
        let requests = chunks + u64::from(total.word(len, chunks).is_some());
        self.room(u32::try_from(requests).unwrap_or(u32::MAX))
    }

    /// A write of bytes that `op` holds. One request carries at most `longest` bytes.
    #[allow(clippy::too_many_arguments)] // the verb has these operands
    pub fn post_write(
        &mut self,
        buffer: &mut LinkBuffer,
        (addr, len, lkey): (u64, u64, u32),
        remote: RemoteAddr,
        immediate: Option<Immediate>,
        longest: u32,
        total: AnnouncedLength,
        op: PostedOp,
    ) -> Result<(), PostError> {
        let chunks = requests_for(len, longest);
        let word = total.word(len, chunks).filter(|_| immediate.is_some());
        let requests = chunks + u64::from(word.is_some());
        let requests = u32::try_from(requests).unwrap_or(u32::MAX);
        self.room(requests)?;
        let signaled = self.must_signal(true, len);
        if let Some((words, word)) = word {
            let place = words.addr.wrapping_add(u64::from(self.receive_at) * 8);
            // Named, as inline bytes are read when the request is posted.
            let bytes = word.to_le_bytes();
            let (piece, flags) = self.copy(buffer, &bytes);
            let there = RemoteAddr { addr: place, rkey: words.rkey };
            self.post(IBV_WR_RDMA_WRITE, piece, Some(there), None, flags)?;
        }
        for chunk in 0..chunks {
            let skip = chunk * u64::from(longest);
            let length = (len - skip).min(u64::from(longest)) as u32;
            let is_last = chunk + 1 == chunks;
            let immediate = immediate.filter(|_| is_last);
            let opcode = if immediate.is_some() { IBV_WR_RDMA_WRITE_WITH_IMM } else { IBV_WR_RDMA_WRITE };
            let flags = if is_last && signaled { IBV_SEND_SIGNALED } else { 0 };
            let piece = ibv_sge { addr: addr + skip, length, lkey };
            let there = RemoteAddr { addr: remote.addr.wrapping_add(skip), rkey: remote.rkey };
            if let Err(error) = self.post(opcode, piece, Some(there), immediate, flags) {
                self.release(op);
                return Err(error);
            }
        }
        if immediate.is_some() {
            self.consume();
        }
        self.note(requests, signaled, len, op);
        Ok(())
    }

    /// Drops the memory of a request that was not posted, unless the device may still have it.
    fn release(&self, op: PostedOp) {
        if self.is_lost {
            std::mem::forget(op);
        }
    }

    /// A read into `target`. If the queue pair is gone afterwards, it fails with the link.
    pub fn post_read(
        &mut self,
        mut target: TensorMut,
        (len, lkey): (u64, u32),
        remote: RemoteAddr,
        max_request: u32,
    ) -> Result<(), (PostError, TensorMut)> {
        let chunks = requests_for(len, max_request);
        let requests = u32::try_from(chunks).unwrap_or(u32::MAX);
        if let Err(error) = self.room(requests) {
            return Err((error, target));
        }
        let addr = target.as_mut_ptr() as u64;
        let signaled = self.must_signal(true, len);
        for chunk in 0..chunks {
            let skip = chunk * u64::from(max_request);
            let length = (len - skip).min(u64::from(max_request)) as u32;
            let flags = if chunk + 1 == chunks && signaled { IBV_SEND_SIGNALED } else { 0 };
            let piece = ibv_sge { addr: addr + skip, length, lkey };
            let there = RemoteAddr { addr: remote.addr.wrapping_add(skip), rkey: remote.rkey };
            if let Err(error) = self.post(IBV_WR_RDMA_READ, piece, Some(there), None, flags) {
                if !self.is_lost {
                    return Err((error, target));
                }
                // The device may still write there, so the read is treated as outstanding.
                break;
            }
        }
        self.note(requests, signaled, len, PostedOp::Read(target));
        Ok(())
    }

    /// Posts a flush, unless one is outstanding. `all`: even behind requests without a tensor.
    pub fn flush(&mut self, region: &RemoteRegion, all: bool) {
        let left = self.holds_unsignaled || all && self.unsignaled > 0;
        if !left || self.signaled > 0 || self.flushing || self.phase != QueuePhase::Ready {
            return;
        }
        let remote = RemoteAddr { addr: region.base, rkey: region.rkey };
        if self.post(IBV_WR_RDMA_WRITE, ibv_sge::default(), Some(remote), None, IBV_SEND_SIGNALED).is_ok() {
            self.flushing = true;
            self.note(0, true, 0, PostedOp::Copied);
            // It counts for no request.
            self.kept.as_mut().and_then(VecDeque::pop_back);
            if let Some(entry) = self.outstanding.back_mut() {
                entry.is_flush = true;
            }
        }
    }

    /// A signalled request is done, and so are all earlier ones.
    #[inline]
    pub fn done(&mut self, link: LinkId, out: &mut Completions) {
        while let Some(entry) = self.outstanding.pop_front() {
            self.in_use -= entry.requests;
            if let Some(kept) = &mut self.kept {
                let mut done = kept.drain(..(entry.requests as usize).min(kept.len()));
                self.last_done_consumes =
                    done.next_back().map_or(self.last_done_consumes, |last| last.consumes());
            }
            self.op_done(entry.op, link, out);
            if entry.signaled {
                self.signaled -= 1;
                self.flushing &= !entry.is_flush;
                break;
            }
        }
    }

    #[inline]
    fn op_done(&mut self, op: PostedOp, link: LinkId, out: &mut Completions) {
        match op {
            PostedOp::Copied => {}
            PostedOp::Part(_) => self.parts_done = self.parts_done.wrapping_add(1),
            PostedOp::Write(source) => {
                drop(source);
                out.push(link, Event::Done);
            }
            PostedOp::Read(target) => out.push(link, Event::ReadDone { target }),
        }
    }

    /// The sources of the parts that are outstanding, oldest first. The queue pair is destroyed
    /// already.
    pub fn take_parts(&mut self) -> impl Iterator<Item = Tensor> {
        debug_assert!(self.pair.is_none() && !self.is_lost);
        (self.in_use, self.signaled) = (0, 0);
        self.outstanding.drain(..).filter_map(|entry| match entry.op {
            PostedOp::Part(source) => Some(source),
            _ => None,
        })
    }

    /// Fails all outstanding requests. The queue pair is destroyed already.
    pub fn fail_all(&mut self, link: LinkId, out: &mut Completions) {
        debug_assert!(self.pair.is_none());
        for entry in self.outstanding.drain(..) {
            if let PostedOp::Write(_) | PostedOp::Read(_) = entry.op {
                out.push(link, Event::Failed);
            }
            if self.is_lost {
                std::mem::forget(entry.op);
            }
        }
        self.in_use = 0;
    }
}

impl Drop for DataQueue {
    fn drop(&mut self) {
        self.destroy();
        if self.is_lost {
            std::mem::forget(std::mem::take(&mut self.outstanding));
        }
    }
}
