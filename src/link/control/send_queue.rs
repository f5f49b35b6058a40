//! The send queue of a link: messages and writes leave in order, under the peer's credits.

use crate::fabric::{LinkFailure, LinkId, LinkLimits, LoanPermit, MAX_MESSAGE, Port, PostError};
use crate::link::control::texts::{Long, Texts};
use crate::link::windows::MAX_EDGES;
use crate::memory::Tensor;
use crate::mutants::{Mutant, is_on};
use crate::telemetry::{Counter, CountersWriter};
use crate::wire::message::pack::Pack;
use crate::wire::message::{EdgeCredits, Message, PlainRecord, fragment};
use crate::wire::{Grant, Immediate, ShortMessage, Time, UnreadMessage};
use std::collections::VecDeque;

/// Limit of the queued posts: six for each edge that can have a number.
const MAX_POSTS: usize = 6 * MAX_EDGES as usize + 4096;
/// Capacity of the encoding buffer that is kept after a long message.
const KEPT: usize = 64 * 1024;
/// Limit of the queued posts for which memory is allocated at the start: a batch can queue two for
/// each operation that the link carries.
const MAX_RESERVED: usize = 1024;
/// Limit of the bytes of queued names of edges and error texts.
const MAX_TEXTS: usize = 256 << 20;

/// A queued post. Each consumes one receive of the peer; a long message consumes one for each
/// fragment.
#[derive(Debug)]
enum QueuedPost {
    Message {
        bytes: [u8; MAX_MESSAGE],
        len: u8,
    },
    /// A message in fragments, of which those from `next` on are left.
    Long {
        long: Long,
        next: usize,
    },
    Write {
        source: Tensor,
        target: Grant,
        immediate: Immediate,
    },
    Lend {
        source: Option<Tensor>,
        permit: Option<LoanPermit>,
        message: ShortMessage,
    },
}

/// The sending half of a link.
///
/// `sent - returned` receives of the peer are in use. That never exceeds the depth that the peer
/// posted, so a message always finds a receive. Once something is queued, everything later queues
/// behind it.
///
/// In an open batch, short messages go into a pack. The pack leaves when it is full, before
/// anything that is not a message, and at the latest with a [flush](SendQueue::flush) outside a
/// batch.
#[derive(Debug)]
pub(in crate::link) struct SendQueue {
    link: LinkId,
    depth: u32,
    /// Bytes of the longest message that is not cut into fragments.
    max_message: usize,
    sent: u32,
    returned: u32,
    values: usize,
    queue: VecDeque<QueuedPost>,
    /// The texts of the long messages in the queue.
    texts: Texts,
    scratch: Vec<u8>,
    fragment: Vec<u8>,
    /// Leaves behind everything in the queue.
    pack: Pack,
    /// `sent` at the last call of [`SendQueue::stuck_since`], and when a call first found it.
    seen: Option<(u32, Time)>,
}

impl SendQueue {
    pub fn new(link: LinkId, limits: &LinkLimits) -> Self {
        let &LinkLimits { depth, max_message, .. } = limits;
        let [scratch, fragment] = [(); 2].map(|()| Vec::with_capacity(max_message));
        let queue = VecDeque::with_capacity((2 * depth as usize).min(MAX_RESERVED));
        let pack = Pack::new(MAX_MESSAGE);
        SendQueue {
            link,
            depth,
            max_message,
            sent: 0,
            returned: 0,
            values: 0,
            queue,
            texts: Texts::default(),
            scratch,
            fragment,
            pack,
            seen: None,
        }
    }

    /// Number of tensors that are queued or posted and not complete.
    #[cfg(any(test, feature = "sim"))]
    pub fn values(&self) -> usize {
        self.values
    }

    /// Notes that an operation with a tensor has completed or failed.
    pub fn finished(&mut self) {
        self.values = self.values.saturating_sub(1);
    }

    /// Number of queued posts.
    pub fn backlog(&self) -> usize {
        self.queue.len() + usize::from(!self.pack.is_empty())
    }

    /// The time since which nothing has left the queue; `None` if nothing waits. A call compares
    /// the number of posts with that of the last call, so the time is that of a call.
    pub fn stuck_since(&mut self, now: Time) -> Option<Time> {
        if self.backlog() == 0 {
            self.seen = None;
            return None;
        }
        let known = self.seen.filter(|(sent, _)| *sent == self.sent);
        let (_, since) = *self.seen.insert(known.unwrap_or((self.sent, now)));
        Some(since)
    }

    /// The short messages and packs that wait, oldest first.
    pub fn waiting_messages(&self) -> impl Iterator<Item = &[u8]> {
        let queued = self.queue.iter().filter_map(|post| match post {
            QueuedPost::Message { bytes, len } => bytes.get(..usize::from(*len)),
            _ => None,
        });
        queued.chain((!self.pack.is_empty()).then(|| self.pack.bytes()))
    }

    /// The messages of the loans that wait.
    pub fn waiting_loans(&self) -> impl Iterator<Item = &ShortMessage> {
        self.queue.iter().filter_map(|post| match post {
            QueuedPost::Lend { message, .. } => Some(message),
            _ => None,
        })
    }

    /// Why the link must end, if more is queued than a correct peer can cause. A correct peer gives
    /// credit for values, and this side announces edges and gives credit. Tensors that wait to be
    /// written are this side's own.
    pub fn overflow(&self) -> Option<String> {
        let (count, bytes) = (self.backlog().saturating_sub(self.values), self.texts.bytes());
        if count <= MAX_POSTS && bytes <= MAX_TEXTS {
            return None;
        }
        Some(format!(
            "it takes nothing and asks for more: {count} answers wait, with {bytes} bytes of long texts"
        ))
    }

    /// Sends a message, in fragments if it is longer than the link carries. With `in_batch` it may
    /// wait and share a slot.
    pub fn message<P: Port>(
        &mut self,
        port: &mut P,
        counters: &CountersWriter,
        message: &Message<'_>,
        in_batch: bool,
    ) {
        self.encoded(port, counters, in_batch, |bytes| message.encode(bytes));
    }

    /// Sends the credit of an edge. In a batch it may join that of the edges before. Returns
    /// whether it is a message of its own.
    #[inline]
    pub fn credit<P: Port>(
        &mut self,
        port: &mut P,
        counters: &CountersWriter,
        credit: EdgeCredits,
        in_batch: bool,
    ) -> bool {
        if in_batch && self.pack.join_credits(&credit) {
            return false;
        }
        self.message(port, counters, &Message::Credit(credit), in_batch);
        if in_batch && !self.pack.is_empty() {
            self.pack.note_credits(credit);
        }
        true
    }

    /// Sends the message that `encode` appends, as [`SendQueue::message`].
    #[inline]
    pub fn encoded<P: Port>(
        &mut self,
        port: &mut P,
        counters: &CountersWriter,
        in_batch: bool,
        encode: impl FnOnce(&mut Vec<u8>),
    ) {
        let mut bytes = std::mem::take(&mut self.scratch);
        bytes.clear();
        encode(&mut bytes);
        if in_batch && self.pack.could_hold(bytes.len()) {
            if !self.pack.has_room(bytes.len()) {
                self.flush_pack(port, counters);
            }
            self.pack.push(&bytes);
            self.scratch = bytes;
            return;
        }
        self.flush_pack(port, counters);
        if bytes.len() <= MAX_MESSAGE {
            self.slot(port, counters, &bytes);
        } else if is_on(Mutant::FragmentsSwapped) {
            let mut parts = Vec::new();
            fragment::cut(&bytes, MAX_MESSAGE, |part| parts.push(part.to_vec()));
            parts.swap(0, 1);
            parts.iter().for_each(|part| self.slot(port, counters, part));
        } else {
            self.long(port, counters, &bytes);
            bytes.shrink_to(KEPT);
        }
        self.scratch = bytes;
    }

    /// Sends a record in an open batch: the record shares a slot with others. Returns whether it
    /// did: a record may be too long for that.
    #[inline]
    pub fn packed<P: Port>(
        &mut self,
        port: &mut P,
        counters: &CountersWriter,
        record: &PlainRecord<'_>,
    ) -> bool {
        let len = record.encoded_len();
        if !self.pack.has_room(len) {
            if !self.pack.could_hold(len) {
                return false;
            }
            self.flush_pack(port, counters);
        }
        self.pack.push_encoded(len, |bytes| record.encode(bytes));
        true
    }

    /// Whether a post need not wait for others or for a receive of the peer.
    #[inline(always)] // on the short path
    pub fn leaves_now<P: Port>(&mut self, port: &mut P) -> bool {
        self.queue.is_empty() && self.pack.is_empty() && self.has_credit(port)
    }

    /// Whether the link takes short messages.
    #[inline]
    pub fn has_slots<P: Port>(&self, port: &P) -> bool {
        port.has_slots(self.link)
    }

    /// Posts a short message, unless something waits or the post is refused. Returns whether it
    /// did.
    #[inline(always)] // on the short path
    pub fn short<P: Port>(&mut self, port: &mut P, message: &UnreadMessage<impl Fn(usize) -> u64>) -> bool {
        let is_posted = self.leaves_now(port) && port.send_short(self.link, message).is_ok();
        self.sent = self.sent.wrapping_add(is_posted.into());
        is_posted
    }

    /// As [`SendQueue::short`], for a message that the link carries whole.
    #[inline]
    pub fn unqueued<P: Port>(&mut self, port: &mut P, encode: impl FnOnce(&mut Vec<u8>)) -> bool {
        if !self.leaves_now(port) {
            return false;
        }
        self.scratch.clear();
        encode(&mut self.scratch);
        let is_posted = port.send(self.link, &self.scratch).is_ok();
        self.sent = self.sent.wrapping_add(is_posted.into());
        is_posted
    }

    /// As [`SendQueue::unqueued`], of a message that lies in two places.
    pub fn unqueued_parts<P: Port>(&mut self, port: &mut P, parts: [&[u8]; 2]) -> bool {
        let is_posted = self.leaves_now(port) && port.send_parts(self.link, parts).is_ok();
        self.sent = self.sent.wrapping_add(is_posted.into());
        is_posted
    }

    /// Lends and takes a tensor and its permit, unless the loan is refused. Returns whether it did.
    /// The caller has checked that it [leaves now](SendQueue::leaves_now).
    #[inline]
    pub fn lend_now<P: Port>(
        &mut self,
        port: &mut P,
        source: &mut Option<Tensor>,
        permit: &mut Option<LoanPermit>,
        message: &ShortMessage,
    ) -> bool {
        let is_posted = port.lend(self.link, source, permit, message).is_ok();
        self.sent = self.sent.wrapping_add(is_posted.into());
        self.values += usize::from(is_posted);
        is_posted
    }

    /// Writes a tensor to a grant, with an immediate.
    pub fn write<P: Port>(
        &mut self,
        port: &mut P,
        counters: &CountersWriter,
        source: Tensor,
        target: Grant,
        immediate: Immediate,
    ) {
        self.values += 1;
        self.push(port, counters, QueuedPost::Write { source, target, immediate });
    }

    /// Lends a tensor, with a message of at most
    /// [`MAX_LOAN_MESSAGE`](crate::fabric::MAX_LOAN_MESSAGE) bytes.
    pub fn lend<P: Port>(
        &mut self,
        port: &mut P,
        counters: &CountersWriter,
        source: Tensor,
        permit: Option<LoanPermit>,
        message: ShortMessage,
    ) {
        self.values += 1;
        self.push(port, counters, QueuedPost::Lend { source: Some(source), permit, message });
    }

    /// Posts what is queued, as far as credits and room allow. In a batch the pack stays. If the
    /// link is down, its port reports that, and nothing queued can leave.
    pub fn flush<P: Port>(&mut self, port: &mut P, counters: &CountersWriter, in_batch: bool) {
        self.flush_queue(port);
        if !in_batch {
            self.flush_pack(port, counters);
        }
    }

    /// Posts or queues the pack.
    fn flush_pack<P: Port>(&mut self, port: &mut P, counters: &CountersWriter) {
        let count = self.pack.len();
        if count == 0 {
            return;
        }
        if count > 1 {
            counters.increment(Counter::PacksSent);
            counters.add(Counter::MessagesPacked, count as u64);
        }
        let mut pack = std::mem::take(&mut self.pack);
        self.slot(port, counters, pack.bytes());
        pack.clear();
        self.pack = pack;
    }

    fn flush_queue<P: Port>(&mut self, port: &mut P) {
        while !self.queue.is_empty() && self.has_credit(port) {
            if matches!(self.queue.front(), Some(QueuedPost::Long { .. })) {
                let Some(QueuedPost::Long { long, mut next }) = self.queue.pop_front() else { return };
                match self.fragments(port, long.parts(), &mut next) {
                    Ok(()) => {
                        self.texts.remove(long);
                        continue;
                    }
                    Err(PostError::Full) => return self.queue.push_front(QueuedPost::Long { long, next }),
                    Err(PostError::Down) => return self.clear(),
                    Err(PostError::Refused(why)) => return self.end(port, why),
                }
            }
            let Some(item) = self.queue.front_mut() else { return };
            match post(port, self.link, item) {
                Ok(()) => self.sent = self.sent.wrapping_add(1 + u32::from(is_on(Mutant::LostCredit))),
                Err(PostError::Full) => return,
                Err(PostError::Down) => return self.clear(),
                Err(PostError::Refused(why)) => return self.end(port, why),
            }
            self.queue.pop_front();
        }
    }

    /// Sends a message that is longer than a control slot, whole or in fragments. What cannot leave
    /// at once is queued as one post.
    fn long<P: Port>(&mut self, port: &mut P, counters: &CountersWriter, bytes: &[u8]) {
        let mut next = 0;
        let posted = match self.queue.is_empty() {
            true => self.fragments(port, [bytes, &[]], &mut next),
            false => Err(PostError::Full),
        };
        match posted {
            Ok(()) | Err(PostError::Down) => {}
            Err(PostError::Full) => {
                let long = self.texts.add(bytes);
                self.enqueue(counters, QueuedPost::Long { long, next });
            }
            Err(PostError::Refused(why)) => self.end(port, why),
        }
    }

    /// Posts a message whole, or its fragments from `next` on, and advances `next`. Returns `Full`
    /// if some of it is left.
    fn fragments<P: Port>(
        &mut self,
        port: &mut P,
        message: [&[u8]; 2],
        next: &mut usize,
    ) -> Result<(), PostError> {
        let [head, tail] = message;
        if head.len() + tail.len() <= self.max_message {
            if !self.has_credit(port) {
                return Err(PostError::Full);
            }
            if tail.is_empty() {
                port.send(self.link, head)?;
            } else {
                self.fragment.clear();
                self.fragment.extend([head, tail].into_iter().flatten());
                port.send(self.link, &self.fragment)?;
            }
            self.sent = self.sent.wrapping_add(1);
            return Ok(());
        }
        while fragment::part(message, self.max_message, *next, &mut self.fragment) {
            if !self.has_credit(port) {
                return Err(PostError::Full);
            }
            port.send(self.link, &self.fragment)?;
            self.sent = self.sent.wrapping_add(1);
            *next += 1;
        }
        Ok(())
    }

    /// Ends the link: a post that was refused can never leave, and nothing may be lost. The port
    /// reports the end.
    #[cold]
    fn end<P: Port>(&mut self, port: &mut P, why: &'static str) {
        self.clear();
        port.fail(self.link, LinkFailure::Refused(why));
    }

    fn clear(&mut self) {
        self.queue.clear();
        self.texts.clear();
    }

    /// The fast path of a message: from the encoding buffer to the port.
    fn slot<P: Port>(&mut self, port: &mut P, counters: &CountersWriter, bytes: &[u8]) {
        if (self.queue.is_empty() || is_on(Mutant::MessageOvertakesQueue)) && self.has_credit(port) {
            match port.send(self.link, bytes) {
                Ok(()) => {
                    self.sent = self.sent.wrapping_add(1);
                    return;
                }
                Err(PostError::Full) => {}
                Err(PostError::Down) => return,
                Err(PostError::Refused(why)) => return self.end(port, why),
            }
        }
        let mut item = [0; MAX_MESSAGE];
        item[..bytes.len()].copy_from_slice(bytes);
        self.enqueue(counters, QueuedPost::Message { bytes: item, len: bytes.len() as u8 });
    }

    #[cold]
    fn enqueue(&mut self, counters: &CountersWriter, item: QueuedPost) {
        counters.increment(Counter::PostsQueued);
        self.queue.push_back(item);
    }

    fn push<P: Port>(&mut self, port: &mut P, counters: &CountersWriter, mut item: QueuedPost) {
        if !is_on(Mutant::WriteOvertakesPack) {
            self.flush_pack(port, counters);
        }
        if self.queue.is_empty() && self.has_credit(port) {
            match post(port, self.link, &mut item) {
                Ok(()) => {
                    self.sent = self.sent.wrapping_add(1);
                    return;
                }
                Err(PostError::Full) => {}
                Err(PostError::Down) => return,
                Err(PostError::Refused(why)) => return self.end(port, why),
            }
        }
        self.enqueue(counters, item);
    }

    /// Reads the peer's count only when the known credits are used up.
    #[inline]
    fn has_credit<P: Port>(&mut self, port: &mut P) -> bool {
        self.sent.wrapping_sub(self.returned) < self.depth || self.looks_for_credit(port)
    }

    #[cold]
    fn looks_for_credit<P: Port>(&mut self, port: &mut P) -> bool {
        self.returned = port.peer_credits(self.link);
        // A peer that returns more credits than were used makes the difference huge, which gives no
        // credit at all.
        self.sent.wrapping_sub(self.returned) < self.depth
    }
}

fn post<P: Port>(port: &mut P, link: LinkId, item: &mut QueuedPost) -> Result<(), PostError> {
    match item {
        QueuedPost::Message { bytes, len } => port.send(link, &bytes[..usize::from(*len)]),
        // Not reached: fragments are posted one by one.
        QueuedPost::Long { .. } => Err(PostError::Refused("a long message was posted as a whole")),
        QueuedPost::Write { source, target, immediate } => {
            let len = source.meta().bytes();
            port.write(link, source, len, target, Some(*immediate))
        }
        QueuedPost::Lend { source, permit, message } => port.lend(link, source, permit, message),
    }
}

/// The receiving half of a link: counts consumed receives, posts them again and returns credits.
#[derive(Debug)]
pub(in crate::link) struct ReceiveCredits {
    consumed: u32,
    posted: u32,
    published: u32,
    /// Credits that are returned together.
    batch: u32,
}

impl ReceiveCredits {
    /// Of a link with so many receives. A quarter of them is returned together.
    pub fn new(depth: u32) -> Self {
        ReceiveCredits { consumed: 0, posted: 0, published: 0, batch: depth.div_ceil(4) }
    }

    /// Notes a consumed receive.
    pub fn consumed(&mut self) {
        self.consumed = self.consumed.wrapping_add(1);
    }

    /// Notes a receive that was consumed outside a poll. Posts consumed receives again and returns
    /// credits, a batch at a time. Returns whether it did so.
    #[inline]
    pub fn consumed_alone<P: Port>(&mut self, port: &mut P, link: LinkId) -> bool {
        self.consumed();
        self.consumed.wrapping_sub(self.published) >= self.batch && self.replenish(port, link)
    }

    /// Posts consumed receives again. Returns credits to the peer a batch at a time, and whether it
    /// did so.
    pub fn replenish<P: Port>(&mut self, port: &mut P, link: LinkId) -> bool {
        let used = self.consumed.wrapping_sub(self.posted);
        if used > 0 {
            port.post_receives(link, used);
            self.posted = self.consumed;
        }
        if self.posted.wrapping_sub(self.published) < self.batch {
            return false;
        }
        self.published = self.posted;
        let promised = self.published.wrapping_add(u32::from(is_on(Mutant::CreditTooMany)));
        port.publish_credits(link, promised);
        true
    }
}
