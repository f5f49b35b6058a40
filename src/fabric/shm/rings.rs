//! The two rings of a link, and the tensors that are held until the peer has taken them.

use crate::fabric::shm::memory::order::{Order, OrderLoan, is_long, lend_words};
use crate::fabric::shm::memory::ring::{BadAck, Consumer, Producer};
use crate::fabric::shm::memory::segment::{OwnWords, PeerWords};
use crate::fabric::shm::memory::slot::IN_SLOT;
use crate::fabric::shm::reads::{PendingReads, ReadAnswers};
use crate::fabric::shm::wakeup::ringer::Ringer;
use crate::fabric::{Completions, Event, LinkId};
use crate::memory::Tensor;
use crate::wire::ShortMessage;
use std::collections::VecDeque;

/// A tensor of this side that the peer may still pull from.
struct HeldSource {
    /// Position of its order in the outgoing ring.
    position: u64,
    /// Whether it is a write, which completes; else it answers a read of the peer.
    is_write: bool,
    /// Held for its drop; `None` for a read of no bytes.
    _source: Option<Tensor>,
}

/// An order of the peer that takes several polls.
#[derive(Clone, Copy)]
pub(super) struct OrderInProgress {
    pub order: Order,
    /// Bytes pulled so far.
    pub pulled: u64,
}

/// The two rings of a link.
pub(super) struct Rings {
    pub link: LinkId,
    pub out: Producer<OwnWords, PeerWords>,
    pub inc: Consumer<PeerWords, OwnWords>,
    /// Receives that the peer may still consume.
    pub posted: u32,
    /// The order whose bytes did not fit in one poll.
    pub current: Option<OrderInProgress>,
    pub reads: PendingReads,
    pub answers: ReadAnswers,
    /// Whether something was posted since the last order arrived.
    pub replies: bool,
    pub ringer: Ringer,
    /// Whether a batch is open: the peer is rung at its end.
    in_batch: bool,
    /// Whether the batch has posted something.
    must_ring: bool,
    /// Held tensors, oldest first.
    pending: VecDeque<HeldSource>,
}

impl Rings {
    /// Unused rings.
    pub(super) fn new(
        depth: u32,
        out: Producer<OwnWords, PeerWords>,
        inc: Consumer<PeerWords, OwnWords>,
        ringer: Ringer,
    ) -> Self {
        Rings {
            link: LinkId(0), // set by the port
            out,
            inc,
            posted: 0,
            current: None,
            reads: PendingReads::new(depth),
            answers: ReadAnswers::new(depth),
            replies: false,
            ringer,
            in_batch: false,
            must_ring: false,
            pending: VecDeque::with_capacity(depth as usize),
        }
    }

    /// Rings for the peer if it does not poll the link; in a batch, [`Rings::end_batch`] does so.
    #[inline]
    pub(super) fn ring_if_idle(&mut self) {
        if self.in_batch {
            self.must_ring = true;
        } else {
            self.ringer.ring_if_idle();
        }
    }

    /// Begins a batch, which rings at most once. Returns whether none was open.
    pub(super) fn begin_batch(&mut self) -> bool {
        !std::mem::replace(&mut self.in_batch, true)
    }

    /// Ends the batch, if one is open.
    pub(super) fn end_batch(&mut self) {
        self.in_batch = false;
        if std::mem::take(&mut self.must_ring) {
            self.ringer.ring_if_idle();
        }
    }

    /// Posts an order and its payload, which is empty for most. The caller has checked that there
    /// is room.
    #[inline]
    pub(super) fn post(&mut self, order: Order, payload: &[u8]) {
        let words = order.to_words();
        if payload.is_empty()
            && order.word_count() <= IN_SLOT
            && let Some(words) = words.first_chunk::<IN_SLOT>()
        {
            return self.post_short(order.word_count(), |k| words[k]);
        }
        let ack = self.inc.ack();
        self.replies = true;
        self.out.post(ack, &words[..order.word_count()], payload);
        self.ring_if_idle();
    }

    /// As [`Rings::post`], for an order of `count` words that its slot holds.
    #[inline(always)] // on the short path
    pub(super) fn post_short(&mut self, count: usize, word: impl Fn(usize) -> u64) {
        let ack = self.inc.ack();
        self.replies = true;
        self.out.post_short(ack, count, word);
        self.ring_if_idle();
    }

    /// Posts a loan, as [`Rings::post`].
    #[inline]
    pub(super) fn post_lend(&mut self, loan: OrderLoan, message: &ShortMessage) {
        if is_long(message.len) {
            return self.post(Order::Lend { loan, message: *message }, &[]);
        }
        let words = lend_words(loan, message);
        self.post_short(IN_SLOT, |k| words[k]);
    }

    /// Whether no order is half executed, nothing is held for the peer, and no answer waits.
    #[inline]
    pub(super) fn is_quiet(&self) -> bool {
        self.current.is_none() && self.pending.is_empty() && self.answers.is_empty()
    }

    /// Fetches the cache line of the next slot if the peer takes turns, and so expects a reply.
    #[inline]
    pub(super) fn prefetch_reply(&mut self) {
        if std::mem::take(&mut self.replies) {
            self.out.prefetch();
        }
    }

    /// As [`Rings::post`], and holds the source until the peer has taken it. A write is done then.
    pub(super) fn post_held(&mut self, order: Order, is_write: bool, source: Option<Tensor>) {
        self.pending.push_back(HeldSource { position: self.out.next(), is_write, _source: source });
        self.post(order, &[]);
    }

    /// Records how many orders the peer has taken from the outgoing ring.
    #[inline]
    pub(super) fn acknowledge(&mut self, ack: u32, out: &mut Completions) -> Result<(), BadAck> {
        self.out.acknowledge(ack)?;
        self.complete(out);
        Ok(())
    }

    /// Publishes the number of consumed orders, unless the peer knows it.
    #[inline]
    pub(super) fn tell(&mut self) {
        if self.inc.tell() {
            self.ring_if_idle();
        }
    }

    /// Whether a poll would find something.
    pub(super) fn has_news(&self) -> bool {
        // A post may have read that the peer has taken a write.
        let is_done = || self.pending.front().is_some_and(|write| write.position < self.out.acked());
        self.inc.peek().is_some() || (self.waits_for_peer() && (self.out.has_news() || is_done()))
    }

    /// Whether something waits for the peer's consumer line.
    pub(super) fn waits_for_peer(&self) -> bool {
        !self.pending.is_empty() || !self.answers.is_empty()
    }

    /// Reads the peer's consumer line.
    pub(super) fn refresh(&mut self, out: &mut Completions) -> Result<(), BadAck> {
        self.out.refresh()?;
        self.complete(out);
        Ok(())
    }

    /// Completes the writes that the peer has taken.
    #[inline]
    fn complete(&mut self, out: &mut Completions) {
        if !self.pending.is_empty() {
            self.complete_pending(out);
        }
    }

    #[inline(never)] // keeps the path of small orders short
    fn complete_pending(&mut self, out: &mut Completions) {
        let acked = self.out.acked();
        while let Some(pending) = self.pending.pop_front_if(|pending| pending.position < acked) {
            if pending.is_write {
                out.push(self.link, Event::Done);
            }
        }
    }

    /// Posts answers that waited for room.
    #[inline]
    pub(super) fn post_answers(&mut self) -> Result<(), BadAck> {
        if self.answers.is_empty() { Ok(()) } else { self.post_waiting_answers() }
    }

    #[inline(never)] // as above
    fn post_waiting_answers(&mut self) -> Result<(), BadAck> {
        while !self.answers.is_empty() && self.out.has_room()? {
            if let Some(answer) = self.answers.pop() {
                let order = Order::Answer { source: answer.source, ticket: answer.ticket };
                self.post_held(order, false, answer.tensor);
            }
        }
        Ok(())
    }

    /// Drops everything that is held. Its operations fail.
    pub(super) fn fail_all(&mut self, out: &mut Completions) {
        for pending in self.pending.drain(..) {
            if pending.is_write {
                out.push(self.link, Event::Failed);
            }
        }
        for _ in self.reads.take_all() {
            out.push(self.link, Event::Failed);
        }
        self.answers.clear();
        self.current = None;
    }
}
