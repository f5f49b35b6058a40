//! Large writes over several queue pairs at a time (`qps_per_peer`).
//!
//! A striped write has one part for each data queue pair of the link. Each part ends with an
//! immediate on its own queue pair. The part on the main queue pair is announced by a word. Its
//! event waits until the parts of the other queue pairs have landed. Later events of the main queue
//! pair wait behind it. So the order within the link is that of one queue pair, and the modules
//! above need not know of stripes. A message that was sent behind a write arrives behind all of it.

use super::data_queue::{DataQueue, PostedOp, RemoteAddr};
use super::link::VerbsLinkInner;
use crate::fabric::{Completions, Event, LinkId, MAX_MESSAGE, PostError};
use crate::memory::Tensor;
use crate::wire::Immediate;
use std::collections::VecDeque;

/// Queue pairs for data that a link can have besides the main one.
pub(super) const MAX_STRIPES: u8 = 15;
/// The bit of a write's announced length that says that it is striped.
pub(super) const STRIPED: u64 = 1 << 63;
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
    Striped { place: RemoteAddr, whole: u64 },
}

impl AnnouncedLength {
    /// The words that announce a write of `len` bytes in `requests` requests, and their place.
    pub fn word(&self, len: u64, chunks: u64) -> Option<(RemoteAddr, u64)> {
        match *self {
            AnnouncedLength::IfSplit(place) if chunks > 1 => Some((place, len)),
            AnnouncedLength::Striped { place, whole } => Some((place, whole | STRIPED)),
            AnnouncedLength::None | AnnouncedLength::IfSplit(_) => None,
        }
    }
}

/// The data queue pairs besides the main one, and events that wait for their parts.
#[derive(Default)]
pub(super) struct Stripes {
    pub queues: Vec<DataQueue>,
    /// Of each, the parts that have landed, modulo 2^32.
    landed: Vec<u32>,
    /// Number of striped writes whose part on the main queue pair has landed, modulo 2^32.
    begun: u32,
    held: VecDeque<HeldArrival>,
}

/// Something that came on the main queue behind a striped write that is not whole, or its own end.
struct HeldArrival {
    /// How many striped writes must be whole.
    needs: u32,
    what: StripeArrival,
}

#[allow(clippy::large_enum_variant)] // in a box, each message would allocate
enum StripeArrival {
    Immediate { immediate: Immediate, bytes: u64 },
    Message { len: usize, bytes: [u8; MAX_MESSAGE] },
}

impl Stripes {
    pub fn new(queues: Vec<DataQueue>, depth: u32) -> Self {
        // Each held event has consumed a receive, so their number is bounded.
        let held = if queues.is_empty() { VecDeque::new() } else { VecDeque::with_capacity(depth as usize) };
        Stripes { landed: vec![0; queues.len()], queues, begun: 0, held }
    }

    /// Whether a write with immediate of `len` bytes is striped.
    #[inline]
    pub fn takes(&self, len: u64) -> bool {
        let parts = self.queues.len() as u64 + 1;
        parts > 1 && len >= parts * SMALLEST
    }

    fn is_whole(&self, needs: u32) -> bool {
        self.landed.iter().all(|landed| landed.wrapping_sub(needs) as i32 >= 0)
    }

    /// Whether nothing waits for parts.
    pub fn is_complete(&self) -> bool {
        self.held.is_empty()
    }

    /// An immediate came on the main queue.
    #[inline]
    pub fn immediate(
        &mut self,
        link: LinkId,
        immediate: Immediate,
        bytes: u64,
        striped: bool,
        out: &mut Completions,
    ) {
        self.begun = self.begun.wrapping_add(u32::from(striped));
        if self.held.is_empty() && (!striped || self.is_whole(self.begun)) {
            return out.push(link, Event::Immediate { immediate, bytes });
        }
        self.held.push_back(HeldArrival {
            needs: self.begun,
            what: StripeArrival::Immediate { immediate, bytes },
        });
    }

    /// A message of at most [`MAX_MESSAGE`] bytes came on the main queue.
    #[inline]
    pub fn message(&mut self, link: LinkId, message: &[u8], out: &mut Completions) {
        if self.held.is_empty() {
            return out.push_message(link, message);
        }
        let mut bytes = [0; MAX_MESSAGE];
        bytes[..message.len()].copy_from_slice(message);
        let what = StripeArrival::Message { len: message.len(), bytes };
        self.held.push_back(HeldArrival { needs: self.begun, what });
    }

    /// A part has landed on one of the queue pairs.
    pub fn landed(&mut self, link: LinkId, at: usize, out: &mut Completions) {
        self.landed[at] = self.landed[at].wrapping_add(1);
        while self.held.front().is_some_and(|held| self.is_whole(held.needs)) {
            match self.held.pop_front().map(|held| held.what) {
                Some(StripeArrival::Immediate { immediate, bytes }) => {
                    out.push(link, Event::Immediate { immediate, bytes });
                }
                Some(StripeArrival::Message { len, bytes }) => {
                    out.push_message(link, &bytes[..len]);
                }
                None => {}
            }
        }
    }
}

impl VerbsLinkInner {
    /// Writes `bytes` (address, length, key) of `source` in parts; `op` is its operation, on the
    /// main queue. All or nothing is posted, unless a queue pair is broken, and then the link ends.
    pub fn write_striped(
        &mut self,
        source: &Tensor,
        (addr, len, lkey): (u64, u64, u32),
        remote: RemoteAddr,
        immediate: Immediate,
        longest: u32,
        op: PostedOp,
    ) -> Result<(), PostError> {
        let part = len.div_ceil(self.stripes.queues.len() as u64 + 1).next_multiple_of(ALIGN);
        // Parts are large enough that rounding up leaves bytes for the last one.
        let last = len - part * self.stripes.queues.len() as u64;
        let totals = AnnouncedLength::Striped { place: self.peer.totals(), whole: len };
        for stripe in &self.stripes.queues {
            stripe.has_room(part, longest, &AnnouncedLength::None)?;
        }
        self.main.has_room(last, longest, &totals)?;
        let from = |skip: u64| RemoteAddr { addr: remote.addr.wrapping_add(skip), rkey: remote.rkey };
        let mut skip = 0;
        for stripe in &mut self.stripes.queues {
            let bytes = (addr + skip, part, lkey);
            let op = PostedOp::Part(source.clone());
            stripe.post_write(
                &mut self.local,
                bytes,
                from(skip),
                Some(immediate),
                longest,
                AnnouncedLength::None,
                op,
            )?;
            skip += part;
        }
        let bytes = (addr + skip, last, lkey);
        self.main.post_write(&mut self.local, bytes, from(skip), Some(immediate), longest, totals, op)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Slot;

    const LINK: LinkId = LinkId(3);

    fn immediate(slot: u32) -> Immediate {
        Immediate { generation: 0, slot: Slot::new(slot).expect("fits") }
    }

    /// Slots of immediates, and lengths of messages plus 1,000.
    fn told(out: &mut Completions) -> Vec<u32> {
        let number = |event: &Event, message: &[u8]| match event {
            Event::Immediate { immediate, .. } => immediate.slot.index(),
            _ => 1000 + message.len() as u32,
        };
        let told = out.drain().map(|(completion, message)| number(&completion.event, message)).collect();
        out.clear();
        told
    }

    fn stripes(count: usize) -> Stripes {
        Stripes { landed: vec![0; count], ..Stripes::default() }
    }

    #[test]
    fn a_striped_write_is_told_once_all_its_parts_have_landed_whatever_comes_first() {
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let (mut stripes, mut out) = (stripes(2), Completions::default());
            for (at, part) in order.into_iter().enumerate() {
                match part {
                    2 => stripes.immediate(LINK, immediate(7), 5, true, &mut out),
                    part => stripes.landed(LINK, part, &mut out),
                }
                let expected = if at == 2 { vec![7] } else { vec![] };
                assert_eq!(told(&mut out), expected, "{order:?} at {at}");
            }
            assert!(stripes.is_complete());
        }
    }

    #[test]
    fn what_comes_behind_a_striped_write_stays_behind_it() {
        let (mut stripes, mut out) = (stripes(1), Completions::default());
        stripes.immediate(LINK, immediate(1), 5, false, &mut out);
        stripes.immediate(LINK, immediate(2), 5, true, &mut out);
        stripes.message(LINK, &[0; 10], &mut out);
        stripes.immediate(LINK, immediate(3), 5, true, &mut out);
        stripes.immediate(LINK, immediate(4), 5, false, &mut out);
        assert_eq!(told(&mut out), [1]);
        stripes.landed(LINK, 0, &mut out);
        assert_eq!(told(&mut out), [2, 1010]);
        stripes.message(LINK, &[0; 20], &mut out);
        stripes.landed(LINK, 0, &mut out);
        assert_eq!(told(&mut out), [3, 4, 1020]);
        assert!(stripes.is_complete());
    }

    #[test]
    fn counts_may_wrap() {
        let (mut stripes, mut out) = (stripes(1), Completions::default());
        (stripes.begun, stripes.landed[0]) = (u32::MAX, u32::MAX);
        stripes.immediate(LINK, immediate(1), 5, true, &mut out);
        assert!(!stripes.is_complete());
        stripes.landed(LINK, 0, &mut out);
        assert_eq!(told(&mut out), [1]);
    }
}
