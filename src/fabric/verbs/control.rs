//! The control queue pair of a link: small messages between the two fabrics themselves. They
//! consume none of the owners' receives, and they still arrive when a data queue has failed.
//!
//! A side sends at most [`WINDOW`] messages more than the other has acknowledged. Each message of
//! the other side acknowledges, and so does a pure acknowledgement after each half window.
//! Acknowledgements and the disconnect are outside of the window; the receive queue has extra room
//! for them. So a message always finds a receive, and no sender is told to retry (RNR).
//!
//! Credits are sends, although a plain write of a word would consume no receive. Such a write makes
//! no completion at the target, so it wakes no poller that sleeps for want of credits.

use super::buffers::LinkBuffer;
use super::post_list::name;
use super::qp::QueuePair;
use super::sys::*;
use crate::fabric::{LinkFailure, LinkId};
use std::collections::VecDeque;

/// Messages that are sent and not acknowledged, at most.
pub(super) const WINDOW: u32 = 32;

/// Requests that the receive queue holds: a window, the acknowledgements of one, the two messages
/// of a disconnect, and some more.
const RECEIVES: u32 = WINDOW + 17;
/// Requests that the send queue holds: a window, the ping, and a few more.
const SENDS: u32 = RECEIVES + 8;
/// Requests that the send and the receive queue hold.
pub(super) const ROOM: [u32; 2] = [SENDS, RECEIVES];

/// The control queue pair's number in a request's name. The backup of a further rail has a number
/// that is one less.
pub(super) const CONTROL: u8 = u8::MAX;
/// Bytes of a message.
pub(super) const BYTES: usize = 16;

/// Bytes of a link's buffer that it needs.
pub(super) const PLACE_BYTES: usize = (SENDS + RECEIVES) as usize * BYTES;

const CREDITS: u8 = 1;
const ACK: u8 = 2;
const DISCONNECT: u8 = 3;
const FINAL_COUNT: u8 = 4;
const STRIPE_LOST: u8 = 5;
const PARTS_WRITTEN: u8 = 6;
const TAKEN_OVER: u8 = 7;

/// Whether a count of arrived messages is exact: the device has told of all that it has
/// acknowledged.
const EXACT: u8 = 0;
const NOT_EXACT: u8 = 1;

/// Why a side takes no part any more, in a disconnect message.
const CLOSED: u8 = 0;
const NO_RECEIVE: u8 = 1;
const PROTOCOL: u8 = 2;

/// A message of the peer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ControlMessage {
    /// The newest number of receives that it has returned.
    Credits { returned: u32 },
    /// Number of consumed receives once all of the peer's sends have arrived.
    FinalCount { count: u32 },
    /// It takes no part any more.
    Disconnect(LinkFailure),
    /// It uses this stripe no more. So many parts of this side have landed there, and so many of
    /// its own are acknowledged.
    StripeLost { stripe: u8, landed: u32, done: u32 },
    /// So many parts of its own for a lost stripe have been written, there or on the main queue
    /// pair.
    PartsWritten { stripe: u8, count: u32 },
    /// Its queue pairs of the first rail are gone, and those of another one have taken over. So
    /// many messages of this side have arrived. Not exact: the device may have acknowledged more
    /// than it has told of.
    TakenOver { arrived: u32, is_exact: bool },
    /// Nothing that the link must know.
    Nothing,
}

/// The place after this one, of `places` that are used in turn.
#[inline]
pub(super) fn next(place: u32, places: u32) -> u32 {
    if place + 1 < places { place + 1 } else { 0 }
}

/// Messages within the window.
#[derive(Debug, Default)]
pub(super) struct ControlWindow {
    sent: u32,
    /// Of those, consumed by the peer.
    pub acknowledged: u32,
    /// Of the peer's, consumed here.
    consumed: u32,
    /// The number of these that the peer was told.
    told: u32,
}

impl ControlWindow {
    pub fn has_room(&self) -> bool {
        self.sent.wrapping_sub(self.acknowledged) < WINDOW
    }

    fn unacknowledged(&self) -> usize {
        self.sent.wrapping_sub(self.acknowledged) as usize
    }

    /// A message within the window was sent.
    pub fn sent(&mut self) {
        self.sent = self.sent.wrapping_add(1);
    }

    /// Reads a message of the peer.
    ///
    /// # Errors
    /// The rule that the message breaks.
    pub fn receive(&mut self, bytes: [u8; BYTES]) -> Result<ControlMessage, &'static str> {
        let [kind, code, _, _, rest @ ..] = bytes;
        let word = |at: usize| u32::from_le_bytes([rest[at], rest[at + 1], rest[at + 2], rest[at + 3]]);
        let (value, acknowledged, second) = (word(0), word(4), word(8));
        if acknowledged.wrapping_sub(self.acknowledged) > self.sent.wrapping_sub(self.acknowledged) {
            return Err("it acknowledged control messages that were not sent");
        }
        self.acknowledged = acknowledged;
        match kind {
            ACK => Ok(ControlMessage::Nothing),
            FINAL_COUNT => Ok(ControlMessage::FinalCount { count: value }),
            TAKEN_OVER => Ok(ControlMessage::TakenOver { arrived: value, is_exact: code == EXACT }),
            DISCONNECT => Ok(ControlMessage::Disconnect(match code {
                NO_RECEIVE => LinkFailure::NoReceive,
                PROTOCOL => LinkFailure::Protocol(
                    "an operation of its was refused, or it refuses one of this side's".into(),
                ),
                _ => LinkFailure::Closed,
            })),
            CREDITS | STRIPE_LOST | PARTS_WRITTEN => {
                self.consumed = self.consumed.wrapping_add(1);
                Ok(match kind {
                    STRIPE_LOST => ControlMessage::StripeLost { stripe: code, landed: value, done: second },
                    PARTS_WRITTEN => ControlMessage::PartsWritten { stripe: code, count: value },
                    _ => ControlMessage::Credits { returned: value },
                })
            }
            _ => Err("it sent a control message of an unknown kind"),
        }
    }

    /// Whether an acknowledgement is due.
    fn must_acknowledge(&self) -> bool {
        self.consumed.wrapping_sub(self.told) >= WINDOW / 2
    }
}

/// A side's end of the control queue pair.
pub(super) struct ControlQueue {
    pair: Option<QueuePair>,
    link: LinkId,
    number: u8,
    places: usize,
    max_inline: usize,
    /// Requests posted and not known to be done.
    in_use: u32,
    send_at: u32,
    window: ControlWindow,
    /// The messages of the window that are not acknowledged, for a queue pair that takes over.
    kept: VecDeque<([u8; 4], [u32; 2])>,
    /// Receives that are posted.
    posted: u32,
    head: u32,
    /// It is in the error state, or its peer has not taken over: no messages within the window.
    is_waiting: bool,
    /// A disconnect was posted, and is not known to have arrived.
    pub is_disconnecting: bool,
    pub has_disconnected: bool,
    /// The queue pair carries nothing any more. It is kept for the asynchronous event that may tell
    /// why.
    flushed: bool,
}

impl ControlQueue {
    pub fn new(pair: QueuePair, link: LinkId, number: u8, places: usize) -> Self {
        ControlQueue {
            max_inline: pair.max_inline,
            pair: Some(pair),
            link,
            number,
            places,
            in_use: 0,
            send_at: 0,
            window: ControlWindow::default(),
            kept: VecDeque::with_capacity(WINDOW as usize),
            posted: 0,
            head: 0,
            is_waiting: false,
            is_disconnecting: false,
            has_disconnected: false,
            flushed: false,
        }
    }

    /// Its number, as in the names of its requests.
    #[inline]
    pub fn number(&self) -> u8 {
        self.number
    }

    pub fn failure(&self, device: &str) -> Option<LinkFailure> {
        self.pair.as_ref()?.news.failure(device)
    }

    pub fn destroy(&mut self) {
        self.pair = None;
        self.is_disconnecting = false;
    }

    /// A request was flushed: something has failed before it.
    pub fn flush(&mut self, is_receive: bool) {
        if is_receive {
            self.posted = self.posted.saturating_sub(1);
        }
        self.flushed = true;
        self.is_disconnecting = false;
    }

    pub fn pair(&mut self) -> Option<&mut QueuePair> {
        self.pair.as_mut()
    }

    /// Posts all receives, before the peer can reach the queue pair. `false` if the device refuses
    /// them.
    pub fn post_receives(&mut self, buffer: &LinkBuffer) -> bool {
        (0..RECEIVES).all(|place| self.post_receive(buffer, place))
    }

    /// As [`DataQueue::stop`](super::data_queue::DataQueue::stop).
    pub fn stop(&mut self) {
        (self.flushed, self.is_waiting) = (true, true);
        if let Some(pair) = &mut self.pair {
            let _ = pair.stop();
        }
    }

    /// Whether all receives have completed.
    pub fn is_drained(&self) -> bool {
        self.posted == 0
    }

    /// Takes over from a queue pair, and tells the peer, with the number of its messages that have
    /// arrived: see [`ControlMessage::TakenOver`]. `false` if the driver refuses.
    pub fn take_over(
        &mut self,
        from: &mut ControlQueue,
        buffer: &mut LinkBuffer,
        (arrived, is_exact): (u32, bool),
    ) -> bool {
        from.destroy();
        self.window = std::mem::take(&mut from.window);
        std::mem::swap(&mut self.kept, &mut from.kept);
        self.is_waiting = true;
        let code = if is_exact { EXACT } else { NOT_EXACT };
        self.send(buffer, [TAKEN_OVER, code, 0, 0], [arrived, 0])
    }

    /// The peer has taken over as well: sends what it has not received again. `false` if the driver
    /// refuses.
    pub fn resume(&mut self, buffer: &mut LinkBuffer) -> bool {
        self.is_waiting = false;
        (0..self.kept.len()).all(|at| self.send(buffer, self.kept[at].0, self.kept[at].1))
    }

    fn post_receive(&mut self, buffer: &LinkBuffer, place: u32) -> bool {
        let mut piece = buffer.piece(self.places + place as usize * BYTES, BYTES);
        let mut request = ibv_recv_wr {
            wr_id: name(self.link, self.number, true),
            next: std::ptr::null_mut(),
            sg_list: &mut piece,
            num_sge: 1,
        };
        let Some(pair) = &mut self.pair else { return false };
        // SAFETY: the place is this receive's alone until it is complete.
        let is_posted = unsafe { pair.post_receives(&mut request) };
        if !is_posted {
            pair.news.tell_refused();
        }
        self.posted += u32::from(is_posted);
        is_posted
    }

    /// Whether a message within the window can be sent now.
    #[inline]
    pub fn has_room(&self) -> bool {
        self.window.has_room() && self.in_use < WINDOW && !self.is_waiting
    }

    /// Tells the peer of receives that were returned. `false` if there is no room now.
    pub fn send_credits(&mut self, buffer: &mut LinkBuffer, returned: u32) -> bool {
        self.send_within_window(buffer, [CREDITS, 0, 0, 0], [returned, 0])
    }

    /// Tells the peer of a lost stripe: see [`ControlMessage::StripeLost`]. `false` if there is no
    /// room now.
    pub fn send_stripe_lost(&mut self, buffer: &mut LinkBuffer, stripe: u8, landed: u32, done: u32) -> bool {
        self.send_within_window(buffer, [STRIPE_LOST, stripe, 0, 0], [landed, done])
    }

    /// Tells the peer of parts that have been written: see [`ControlMessage::PartsWritten`].
    /// `false` if there is no room now.
    pub fn send_parts_written(&mut self, buffer: &mut LinkBuffer, stripe: u8, count: u32) -> bool {
        self.send_within_window(buffer, [PARTS_WRITTEN, stripe, 0, 0], [count, 0])
    }

    fn send_within_window(&mut self, buffer: &mut LinkBuffer, head: [u8; 4], values: [u32; 2]) -> bool {
        if !self.has_room() || !self.send(buffer, head, values) {
            return false;
        }
        self.window.sent();
        self.kept.push_back((head, values));
        true
    }

    /// Tells the peer, once, that this side takes no part any more. A message before that carries
    /// `last`: the receives that all posted operations consume together.
    pub fn disconnect(&mut self, buffer: &mut LinkBuffer, why: &LinkFailure, last: Option<u32>) {
        if self.is_disconnecting || self.has_disconnected {
            return;
        }
        if let Some(count) = last {
            self.send(buffer, [FINAL_COUNT, 0, 0, 0], [count, 0]);
        }
        let code = match why {
            LinkFailure::Completion { code, .. } if *code == IBV_WC_RNR_RETRY_EXC_ERR => NO_RECEIVE,
            LinkFailure::Completion { code, .. }
                if [IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_INV_REQ_ERR].contains(code) =>
            {
                PROTOCOL
            }
            LinkFailure::Protocol(_) => PROTOCOL,
            _ => CLOSED,
        };
        self.is_disconnecting = self.send(buffer, [DISCONNECT, code, 0, 0], [0; 2]);
    }

    fn send(&mut self, buffer: &mut LinkBuffer, head: [u8; 4], [first, second]: [u32; 2]) -> bool {
        if self.flushed || self.in_use >= SENDS - 2 {
            return false;
        }
        let Some(pair) = &mut self.pair else { return false };
        let mut bytes = [0; BYTES];
        bytes[..4].copy_from_slice(&head);
        bytes[4..8].copy_from_slice(&first.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.window.consumed.to_le_bytes());
        bytes[12..16].copy_from_slice(&second.to_le_bytes());
        let mut request = ibv_send_wr::zeroed();
        request.wr_id = name(self.link, self.number, false);
        request.opcode = IBV_WR_SEND;
        request.send_flags = IBV_SEND_SIGNALED;
        // Places are used in turn, one for each request that the queue holds, so this one is free.
        let at = self.places + (RECEIVES + self.send_at) as usize * BYTES;
        buffer.write(at, &bytes);
        let mut piece = buffer.piece(at, BYTES);
        if self.max_inline >= BYTES {
            request.send_flags |= IBV_SEND_INLINE;
        }
        request.sg_list = &mut piece;
        request.num_sge = 1;
        // SAFETY: the place stays as it is until the request is done, see above.
        if !unsafe { pair.post_send(&mut request) } {
            pair.news.tell_refused();
            return false;
        }
        self.send_at = next(self.send_at, SENDS);
        self.in_use += 1;
        self.window.told = self.window.consumed;
        true
    }

    /// Whether the peer's device has acknowledged every message.
    pub fn is_idle(&self) -> bool {
        self.in_use == 0
    }

    /// A request of ours is done.
    pub fn done(&mut self) {
        self.in_use = self.in_use.saturating_sub(1);
        // Requests are done in order, and nothing is sent after the disconnect.
        if self.is_disconnecting && self.in_use == 0 {
            self.is_disconnecting = false;
            self.has_disconnected = true;
        }
    }

    /// A message has come.
    ///
    /// # Errors
    /// The rule that the message breaks.
    pub fn received(&mut self, buffer: &mut LinkBuffer, len: u32) -> Result<ControlMessage, &'static str> {
        let place = self.head;
        self.head = next(self.head, RECEIVES);
        self.posted = self.posted.saturating_sub(1);
        if len as usize != BYTES {
            return Err("it sent a control message of another length");
        }
        let mut bytes = [0; BYTES];
        // SAFETY: this receive is complete, and is posted again below at the earliest.
        bytes.copy_from_slice(unsafe { buffer.bytes(self.places + place as usize * BYTES, BYTES) });
        if !self.flushed {
            // A broken queue pair is reported by its outstanding requests.
            self.post_receive(buffer, place);
        }
        let said = self.window.receive(bytes)?;
        self.kept.drain(..self.kept.len().saturating_sub(self.window.unacknowledged()));
        if self.window.must_acknowledge() {
            self.send(buffer, [ACK, 0, 0, 0], [0; 2]);
        }
        Ok(said)
    }
}
