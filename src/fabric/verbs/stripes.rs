//! Large writes over several queue pairs at a time: of one device (`qps_per_peer`), and of several
//! (`rails`).
//!
//! A striped write has a part on the main queue pair and parts on others, the stripes. Each part
//! ends with an immediate on its own queue pair. The part on the main queue pair is announced by a
//! word, which names the queue pairs that have parts. `arrivals` is the peer's side.

use super::arrivals::PartSet;
use super::data_queue::{DataQueue, PostedOp, RemoteAddr};
use super::link::VerbsLinkInner;
use super::rails::{PartBounds, RailLoss, buffer_of};
use crate::fabric::PostError;
use crate::memory::Tensor;
use crate::wire::Immediate;
use std::collections::VecDeque;

/// Queue pairs for data that a link can have besides the main one.
pub(super) const MAX_STRIPES: u8 = 15;
/// Bytes of a part, at least: below, a second queue pair costs more than it saves.
const SMALLEST: u64 = 64 << 10;
/// Parts begin on multiples of this, which is one of every MTU.
const ALIGN: u64 = 4096;

/// The announcement of a write's length, before its immediate arrives.
#[derive(Clone, Copy)]
pub(super) enum AnnouncedLength {
    /// Nothing.
    None,
    /// The length, if the write takes more than one request: the first of the words.
    IfSplit(RemoteAddr),
    /// The length of the whole of which the write is the last part.
    Striped { place: RemoteAddr, whole: u64, parts: PartSet },
}

impl AnnouncedLength {
    /// The words that announce a write of `len` bytes in `requests` requests, and their place.
    pub fn word(&self, len: u64, chunks: u64) -> Option<(RemoteAddr, u64)> {
        match *self {
            AnnouncedLength::IfSplit(place) if chunks > 1 => Some((place, len)),
            AnnouncedLength::Striped { place, whole, parts } => Some((place, parts.announce(whole))),
            AnnouncedLength::None | AnnouncedLength::IfSplit(_) => None,
        }
    }
}

/// A data queue pair besides the main one.
pub(super) struct Stripe {
    pub queue: DataQueue,
    /// The place of its rail among those of the link; `None` on the first rail.
    pub rail: Option<usize>,
    /// Its share of the bytes of a write, beside those of the others.
    pub weight: u64,
    /// The outstanding parts, oldest first. A link with one rail keeps none.
    pub parts: VecDeque<PartBounds>,
    /// The tick in which its queue pair was stopped, as its rail is lost.
    pub stopped_at: Option<u32>,
    /// The peer's counts at its loss of the rail: its parts of this side that have landed, and its
    /// own that are done.
    pub heard: Option<(u32, u32)>,
    /// Its rail is lost, and its queue pair is destroyed.
    pub loss: Option<RailLoss>,
}

impl Stripe {
    /// At most `kept` parts are outstanding; 0 if none are kept.
    pub fn new(queue: DataQueue, rail: Option<usize>, weight: u64, kept: u32) -> Self {
        let parts = VecDeque::with_capacity(kept as usize);
        Stripe { queue, rail, weight, parts, stopped_at: None, heard: None, loss: None }
    }

    /// Whether writes have parts on it.
    fn is_in_use(&self) -> bool {
        self.stopped_at.is_none()
    }

    /// Forgets the parts that are done.
    pub fn forget_done(&mut self, before: u32) {
        let done = self.queue.parts_done.wrapping_sub(before) as usize;
        self.parts.drain(..done.min(self.parts.len()));
    }
}

/// The data queue pairs besides the main one.
#[derive(Default)]
pub(super) struct Stripes {
    pub queues: Vec<Stripe>,
    /// Bytes from which a write is striped.
    threshold: u64,
    /// The weights of the main queue pair and of all others that are not lost.
    weights: u64,
    /// Something of a lost rail is left to do, now or once the peer has answered.
    pub is_recovering: bool,
    /// Since the last service of the link there may be more to do.
    pub is_changed: bool,
    /// Parts that were written again, modulo 2^32.
    pub again: u32,
}

impl Stripes {
    /// `weight`: of the main queue pair.
    pub fn new(queues: Vec<Stripe>, weight: u64) -> Self {
        let mut stripes = Stripes { queues, ..Stripes::default() };
        stripes.weigh(weight);
        stripes
    }

    /// Shares the bytes of later writes among the queue pairs that are not lost.
    pub fn weigh(&mut self, weight_of_main: u64) {
        let left = self.queues.iter().filter(|stripe| stripe.is_in_use());
        let count = left.clone().count() as u64;
        self.weights = weight_of_main + left.map(|stripe| stripe.weight).sum::<u64>();
        self.threshold = if count == 0 { u64::MAX } else { (count + 1) * SMALLEST };
    }

    /// Whether a write with immediate of `len` bytes is striped.
    #[inline]
    pub fn takes(&self, len: u64) -> bool {
        len >= self.threshold
    }

    /// The length of each stripe's part of a write; 0 if it gets none. The main queue pair gets the
    /// rest.
    fn shares(&self, len: u64) -> [u64; MAX_STRIPES as usize] {
        let mut shares = [0; MAX_STRIPES as usize];
        for (share, stripe) in shares.iter_mut().zip(&self.queues).filter(|(_, it)| it.is_in_use()) {
            let exact = u128::from(len) * u128::from(stripe.weight) / u128::from(self.weights);
            // Not more than `len`, as no weight is more than all together.
            let aligned = exact as u64 / ALIGN * ALIGN;
            *share = if aligned >= SMALLEST { aligned } else { 0 };
        }
        shares
    }
}

impl VerbsLinkInner {
    /// Writes `len` bytes of `source` (by `lkey` on the first rail) in parts. `op` is its
    /// operation, on the main queue. All or nothing is posted, unless a queue pair of a link with
    /// one rail is broken, and then the link ends.
    pub fn write_striped(
        &mut self,
        source: &Tensor,
        (addr, len, lkey): (u64, u64, u32),
        remote: RemoteAddr,
        immediate: Immediate,
        op: PostedOp,
    ) -> Result<(), PostError> {
        let longest = self.shared.max_message;
        let shares = self.stripes.shares(len);
        let last = len - shares.iter().sum::<u64>();
        let mut parts = PartSet::of(self.main_part);
        for (stripe, share) in self.stripes.queues.iter().zip(shares).filter(|(_, share)| *share > 0) {
            stripe.queue.has_room(share, longest, &AnnouncedLength::None)?;
            if let Some(rail) = stripe.rail {
                self.shared.local_key(source, self.rails[rail].device)?;
            }
            parts = parts.with(stripe.queue.number());
        }
        let totals = AnnouncedLength::Striped { place: self.peer.totals(), whole: len, parts };
        self.main.has_room(last, longest, &totals)?;
        let mut skip = 0;
        for (at, share) in shares.into_iter().enumerate().filter(|(_, share)| *share > 0) {
            let bounds = PartBounds { skip, len: share, to: remote.addr.wrapping_add(skip) };
            self.write_part(at, source, bounds, (addr, lkey), remote.rkey, immediate)?;
            skip += share;
        }
        let (bytes, to) = ((addr + skip, last, lkey), remote.addr.wrapping_add(skip));
        let to = RemoteAddr { addr: to, rkey: remote.rkey };
        self.main.post_write(&mut self.local, bytes, to, Some(immediate), longest, totals, op)
    }

    /// Writes a part on the stripe at this place. There is room.
    fn write_part(
        &mut self,
        at: usize,
        source: &Tensor,
        bounds: PartBounds,
        (addr, lkey): (u64, u32),
        rkey: u32,
        immediate: Immediate,
    ) -> Result<(), PostError> {
        let stripe = &mut self.stripes.queues[at];
        let keys = match stripe.rail {
            None => (lkey, rkey),
            Some(rail) => {
                let rail = &self.rails[rail];
                (self.shared.local_key(source, rail.device)?, rail.peer.region.rkey)
            }
        };
        let PartBounds { skip, len, to } = bounds;
        stripe.queue.post_write(
            buffer_of(stripe.rail, &mut self.local, &mut self.rails),
            (addr + skip, len, keys.0),
            RemoteAddr { addr: to, rkey: keys.1 },
            Some(immediate),
            self.shared.max_message,
            AnnouncedLength::None,
            PostedOp::Part(source.clone()),
        )?;
        if !self.rails.is_empty() {
            stripe.parts.push_back(bounds);
        }
        Ok(())
    }
}
