//! Batches of the thread that holds the poller: it walks over the edges, without waiters.
//!
//! A walk takes the values in the order of the edges. It leaves off as soon as the next value may
//! come in another way than as a plain record, on any of the edges. The receives that are left then
//! wait in the general way, and the first failure ends them.

use super::{ExpectedRecord, Lanes, Matching};
use crate::fabric::ShortTake;
use crate::link::{Destination, DirectReceive, Received, TensorKeyRef};
use crate::matching::{Error, PeerIndex};
use crate::mutants::{Mutant, is_on};
use crate::telemetry::Counter;
use crate::wire::message::Placement;

/// The receives of a batch.
pub trait ReceivesInOrder {
    /// The edge of receive number `at`; `None` behind the last.
    fn edge(&self, at: usize) -> Option<(PeerIndex, TensorKeyRef<'_>)>;
    /// Where the next receive wants its tensor. Called once for each receive, in order, and once
    /// behind the last.
    fn destination(&mut self) -> Destination;
    /// Gets the value of the next receive, which lay at this place at the sender.
    fn deliver(&mut self, received: Received, sender: Placement);
}

/// How far a walk came.
#[derive(Debug)]
pub enum WalkEnd {
    /// Every receive has its value.
    Done,
    /// The receive behind those with a value has failed.
    Failed(Box<Error>),
    /// The receives behind those with a value must wait in the general way.
    LeftOff,
}

/// A walk over the edges of a batch.
pub struct BatchWalk<'a> {
    batch: &'a mut dyn ReceivesInOrder,
    /// Receives that have their values.
    done: usize,
    next: DirectReceive,
    /// The record that the next receive waits for.
    expected: Option<ExpectedRecord>,
    /// Number of the last edge that was examined while nothing came.
    examined: usize,
    /// [`Matching::news`] when the examination began.
    news: u64,
}

impl<'a> BatchWalk<'a> {
    /// A walk that begins with the first edge.
    pub fn new(batch: &'a mut dyn ReceivesInOrder) -> Self {
        let next = DirectReceive::Waiting(batch.destination());
        BatchWalk { batch, done: 0, next, expected: None, examined: 0, news: 0 }
    }

    /// The destination of the next receive. Of no use if that receive has failed.
    pub fn into_destination(mut self) -> Option<Destination> {
        self.next.take_destination()
    }

    /// Hands over the value that has come.
    #[inline]
    fn deliver(&mut self) {
        let next = DirectReceive::Waiting(self.batch.destination());
        if let DirectReceive::Received(received, sender) = std::mem::replace(&mut self.next, next) {
            self.batch.deliver(received, sender);
            self.done += 1;
        }
    }
}

impl Matching {
    /// Takes the values that have come. `None`: the next one has not, and its record is expected.
    pub fn walk(&mut self, lanes: &mut impl Lanes, walk: &mut BatchWalk<'_>) -> Option<WalkEnd> {
        lanes.begin_batch();
        let end = self.walk_on(lanes, walk);
        let has_news = lanes.handle_polled();
        match end {
            // The messages are handled before the next look.
            None | Some(WalkEnd::LeftOff) if has_news => {
                walk.expected = None;
                None
            }
            Some(WalkEnd::Done) => {
                lanes.counters().increment(Counter::Batches);
                Some(WalkEnd::Done)
            }
            end => end,
        }
    }

    /// A look at the next record alone. If nothing comes, examines another edge.
    #[inline]
    pub fn walk_short(&mut self, lanes: &mut impl Lanes, walk: &mut BatchWalk<'_>) -> ShortTake<WalkEnd> {
        let taken = match &walk.expected {
            Some(expected) => self.take_short(lanes, expected, &mut walk.next),
            None => ShortTake::Other,
        };
        match taken {
            ShortTake::Nothing if self.is_usual(lanes, walk) => return ShortTake::Nothing,
            ShortTake::Nothing => return ShortTake::Taken(WalkEnd::LeftOff),
            ShortTake::Taken(()) => walk.deliver(),
            ShortTake::Other => {}
        }
        match self.walk(lanes, walk) {
            Some(end) => ShortTake::Taken(end),
            // A port that takes no message without a poll comes here with each look.
            None if self.is_usual(lanes, walk) => ShortTake::Nothing,
            None => ShortTake::Taken(WalkEnd::LeftOff),
        }
    }

    fn walk_on(&mut self, lanes: &mut impl Lanes, walk: &mut BatchWalk<'_>) -> Option<WalkEnd> {
        loop {
            let BatchWalk { batch, done, next, expected, .. } = walk;
            let Some((peer, key)) = batch.edge(*done) else { return Some(WalkEnd::Done) };
            match self.receive_now(lanes, (peer, key, false), next, expected) {
                Some(Ok(())) if matches!(next, DirectReceive::Received(..)) => walk.deliver(),
                Some(Ok(())) => return Some(WalkEnd::LeftOff),
                Some(Err(error)) => return Some(WalkEnd::Failed(error)),
                None if expected.is_some() => return None,
                None => return Some(WalkEnd::LeftOff),
            }
        }
    }

    /// Examines one of the later edges. Returns whether its next value comes as a plain record.
    fn is_usual(&mut self, lanes: &mut impl Lanes, walk: &mut BatchWalk<'_>) -> bool {
        if walk.news != self.news && !is_on(Mutant::LaterEdgesIgnored) {
            (walk.examined, walk.news) = (walk.done, self.news);
        }
        let next = walk.examined.max(walk.done) + 1;
        let Some((peer, key)) = walk.batch.edge(next) else { return true };
        walk.examined = next;
        let entry = &mut self.peers[peer.0 as usize];
        let edge = entry.incoming_edge(key);
        entry.down.is_none()
            && entry.incoming.first(edge, key.step).is_none()
            && entry.incoming.next_record(edge, key.step).is_some()
            && !self.may_get_ready(lanes, peer, edge)
    }
}
