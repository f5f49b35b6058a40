//! A queue that takes over from another one, whose rail is lost.
//!
//! The peer says how many of this side's messages have arrived. A queue pair carries requests out
//! in their order, so all requests before the last of these have landed. The others are posted
//! again, in their order.

use super::super::buffers::{LinkBuffer, PLACE};
use super::super::post_list::SendRequest;
use super::super::sys::*;
use super::{DataQueue, OutstandingEntry, PostedOp, QueuePhase, RemoteAddr};
use crate::fabric::{Completions, LinkId, PostError};
use crate::memory::Tensor;
use std::collections::VecDeque;

/// How requests of the earlier queue are posted on this one: other keys, and another buffer.
pub(in crate::fabric::verbs) struct Translation<'a, K> {
    /// The buffer of the earlier queue.
    pub buffer: &'a LinkBuffer,
    /// The peer's words for lengths, by the keys of both rails.
    pub words: [RemoteAddr; 2],
    /// The keys of the peer's pool for both rails.
    pub pool: [u32; 2],
    /// The key of a source on the device of this queue.
    pub key_of: K,
}

impl SendRequest {
    /// Whether it consumes a receive of the peer.
    pub(super) fn consumes(&self) -> bool {
        matches!(self.opcode, IBV_WR_SEND | IBV_WR_RDMA_WRITE_WITH_IMM)
    }
}

impl DataQueue {
    /// Keeps requests for a queue that may take over.
    pub fn keep_requests(&mut self) {
        self.kept = Some(VecDeque::with_capacity(self.depth as usize + 1));
    }

    /// Makes a queue that is connected a backup.
    pub fn be_backup(&mut self) {
        self.phase = QueuePhase::Backup;
    }

    /// A request was refused though there is room, so the queue pair is broken. A redundant one
    /// keeps what is outstanding, with this request, until another rail carries it. Otherwise the
    /// driver, which may have taken the request all the same, must read nothing any more once its
    /// source is let go.
    #[cold]
    pub(super) fn break_off(&mut self) -> Result<(), PostError> {
        if self.is_redundant && self.pair.is_some() {
            self.stop_posting();
            return Ok(());
        }
        self.destroy();
        Err(PostError::Down)
    }

    /// The driver has refused a request. Nothing is posted any more, as the rings of both sides
    /// would not agree. The link learns of it as of an asynchronous event.
    #[cold]
    pub(super) fn stop_posting(&mut self) {
        self.phase = QueuePhase::Stopped;
        self.post_list.clear();
        if let Some(pair) = &self.pair {
            pair.news.tell_refused();
        }
    }

    /// Whether nothing is posted any more.
    pub fn is_stopped(&self) -> bool {
        self.phase == QueuePhase::Stopped
    }

    /// Whether another queue can take over. None can if a read is outstanding: it may have happened
    /// in part, and later requests may have landed.
    pub fn can_be_taken_over(&self) -> bool {
        let is_read = |entry: &OutstandingEntry| matches!(entry.op, PostedOp::Read(_));
        self.pair.is_some() && self.kept.is_some() && !self.outstanding.iter().any(is_read)
    }

    /// Moves the queue pair to the error state, in which all receives complete: with messages that
    /// have arrived, then as flushed. A driver that refuses has a broken device, which may have
    /// done so by itself.
    pub fn stop(&mut self) {
        self.phase = QueuePhase::Stopped;
        // What was not posted is posted by the queue that takes over.
        self.post_list.clear();
        if let Some(pair) = &mut self.pair {
            let _ = pair.stop();
        }
    }

    /// Whether all receives have completed, so that it is known what has arrived.
    pub fn is_drained(&self) -> bool {
        self.posted == 0
    }

    /// Takes over from a queue that is destroyed. From now on the peer's messages arrive here.
    pub fn take_over(&mut self, from: &mut DataQueue) {
        debug_assert!(from.pair.is_none() && !from.is_lost);
        std::mem::swap(&mut self.outstanding, &mut from.outstanding);
        std::mem::swap(&mut self.kept, &mut from.kept);
        self.in_use = from.in_use;
        (self.consuming, self.consumed, self.expected) = (from.consuming, from.consumed, from.expected);
        (self.returned, self.parts_done) = (from.returned, from.parts_done);
        self.last_done_consumes = from.last_done_consumes;
        // Those that have not completed are posted here.
        self.allowed = from.allowed + from.posted;
        if from.post_list.is_open() {
            self.post_list.open();
        }
    }

    /// Whether requests were acknowledged that the peer can't know to have landed: it has received
    /// `count` of this side's messages, modulo 2^32. `is_exact`: its device has told it of all that
    /// it has acknowledged. Otherwise an acknowledgement says nothing of the peer's memory, and
    /// only a later message does.
    pub fn has_lost(&self, count: u32, is_exact: bool) -> bool {
        let Some(kept) = &self.kept else { return false };
        let beyond = count.wrapping_sub(self.consuming_before(kept)) as i32;
        beyond < 0 || beyond == 0 && !is_exact && !self.last_done_consumes
    }

    /// The messages of this side before those that are kept, modulo 2^32.
    fn consuming_before(&self, kept: &VecDeque<SendRequest>) -> u32 {
        self.consuming.wrapping_sub(kept.iter().filter(|request| request.consumes()).count() as u32)
    }

    /// Completes what has landed: so many of this side's messages, modulo 2^32, have arrived.
    ///
    /// # Errors
    /// The rule that the peer breaks by its count.
    pub fn complete_arrived(
        &mut self,
        count: u32,
        link: LinkId,
        out: &mut Completions,
    ) -> Result<(), &'static str> {
        let Some(mut kept) = self.kept.take() else { return Ok(()) };
        let before = self.consuming_before(&kept);
        let mut landed = count.wrapping_sub(before);
        if landed > self.consuming.wrapping_sub(before) {
            return Err("it counted messages that were not sent");
        }
        self.consuming = count;
        while landed > 0
            && let Some(entry) = self.outstanding.pop_front()
        {
            landed -= kept.drain(..entry.requests as usize).filter(SendRequest::consumes).count() as u32;
            self.op_done(entry.op, link, out);
        }
        self.kept = Some(kept);
        Ok(())
    }

    /// Begins to send: posts again what has not landed.
    ///
    /// # Errors
    /// If a request can't be posted. What is outstanding then fails with the link.
    pub fn resume<K: Fn(&Tensor) -> Result<u32, PostError>>(
        &mut self,
        buffer: &mut LinkBuffer,
        translation: &Translation<K>,
    ) -> Result<(), PostError> {
        let places = self.depth as usize + 1;
        let mut outstanding = std::mem::replace(&mut self.outstanding, VecDeque::with_capacity(places));
        let mut kept = self.kept.replace(VecDeque::with_capacity(places)).unwrap_or_default();
        self.phase = QueuePhase::Ready;
        (self.in_use, self.receive_at) = (0, 0);
        while let Some(entry) = outstanding.pop_front() {
            if entry.is_flush {
                continue;
            }
            let requests = kept.drain(..entry.requests as usize);
            let posted = self.post_again(buffer, translation, requests, &entry.op);
            if posted.is_err() {
                self.outstanding.push_back(entry);
                self.outstanding.append(&mut outstanding);
                return posted;
            }
            self.note(entry.requests, true, 0, entry.op);
        }
        Ok(())
    }

    fn post_again<K: Fn(&Tensor) -> Result<u32, PostError>>(
        &mut self,
        buffer: &mut LinkBuffer,
        translation: &Translation<K>,
        requests: impl ExactSizeIterator<Item = SendRequest>,
        op: &PostedOp,
    ) -> Result<(), PostError> {
        let count = requests.len();
        for (at, request) in requests.enumerate() {
            let signal = if at + 1 == count { IBV_SEND_SIGNALED } else { 0 };
            // SAFETY: a request to send names places of the buffer that are for sends alone.
            let copied = unsafe { translation.buffer.copy_of::<PLACE>(&request.piece) };
            let (piece, flags) = match (copied, op) {
                (Some(bytes), _) => self.copy(buffer, &bytes[..request.piece.length as usize]),
                (None, PostedOp::Write(source) | PostedOp::Part(source)) if request.piece.length > 0 => {
                    (ibv_sge { lkey: (translation.key_of)(source)?, ..request.piece }, 0)
                }
                (None, _) => (request.piece, 0),
            };
            let place = translation.words[1].addr.wrapping_add(u64::from(self.receive_at) * 8);
            let remote = request.remote.map(|remote| match remote.rkey {
                key if key == translation.pool[0] => RemoteAddr { rkey: translation.pool[1], ..remote },
                key if key == translation.words[0].rkey => {
                    RemoteAddr { addr: place, rkey: translation.words[1].rkey }
                }
                _ => remote,
            });
            self.post(request.opcode, piece, remote, request.immediate, flags | signal)?;
            if request.consumes() {
                self.consume();
            }
        }
        Ok(())
    }
}
