//! The messages of a link about its edges. `K` is a key without its step, `V` a value, and `E` an
//! error.

use crate::wire::EdgeId;

/// A message from the receiver of edges to their sender.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ToSender<K> {
    /// The edge has a number from now on.
    Announce {
        /// The number.
        edge: EdgeId,
        /// The name of the edge.
        key: K,
        /// Values that may be sent: see [`ToSender::Credit`].
        limit: u64,
        /// After a repair of the link: the values that came before. The sender continues there.
        resume: Option<u64>,
    },
    /// More values may be sent.
    Credit {
        /// Number and generation, as the receiver has announced them.
        edge: EdgeId,
        /// Values that may be sent since the announcement, without those that answer a need.
        /// Cumulative.
        limit: u64,
        /// What came, and what of it no receive has taken.
        taken: Taken,
    },
    /// A receive waits for a value of this step, and the edge has no credit left. The sender may
    /// send one value of the step outside the credit.
    Need {
        /// Number and generation, as the receiver has announced them.
        edge: EdgeId,
        /// Step id.
        step: u64,
    },
    /// The step has ended at the receiver, which takes back its needs.
    Unneed {
        /// Number and generation, as the receiver has announced them.
        edge: EdgeId,
        /// Step id.
        step: u64,
    },
    /// The receiver, which holds no value, gives the number back. Void if a value is under way: the
    /// edge keeps its number.
    Retire {
        /// Number and generation, as the receiver has announced them.
        edge: EdgeId,
        /// Values that came since the announcement.
        came: u64,
    },
    /// After a repair of the link: each edge that has a number was announced again.
    Resumed,
}

/// A message from the sender of edges to their receiver.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ToReceiver<V, E> {
    /// A value.
    Record(Record<V>),
    /// The sender does not serve the edge. The number is free.
    Refused {
        /// Number and generation, as the receiver has announced them.
        edge: EdgeId,
        /// The reason.
        error: E,
    },
    /// The answer to [`ToSender::Retire`]: the number is free.
    Retired {
        /// Number and generation, as the receiver has announced them.
        edge: EdgeId,
    },
    /// Steps have ended at the sender. None of their values follows on any edge.
    StepsOver(StepsOver<E>),
    /// The sender waits until the values that it has sent are taken. The receiver sends
    /// [`ToSender::Credit`] at once, and with each value that is taken until it holds none.
    Flush {
        /// Number and generation, as the receiver has announced them.
        edge: EdgeId,
    },
}

/// A value on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Record<V> {
    /// Number and generation, as the receiver has announced them.
    pub edge: EdgeId,
    /// The lowest bits of the count of values that have left since the announcement, with this one.
    pub n: u16,
    /// Step id.
    pub step: u64,
    /// Whether the value answers a [`ToSender::Need`]. Such a value uses no credit.
    pub answers_need: bool,
    /// A tensor, a dead value, or an error of the sender.
    pub value: V,
}

/// The values of an edge that its receiver has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Taken {
    /// Values that came since the announcement. Cumulative.
    pub came: u64,
    /// Values that no receive has taken, and that no end of their steps has dropped.
    pub held: u32,
}

/// Consecutive steps that have ended at the sender.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct StepsOver<E> {
    /// Id of the earliest ended step.
    pub first: u64,
    /// Id of the latest ended step, itself included.
    pub last: u64,
    /// The error of receives that ask for values of these steps.
    pub error: E,
}

impl<E> StepsOver<E> {
    /// Whether these steps include `step`.
    pub fn includes(&self, step: u64) -> bool {
        (self.first..=self.last).contains(&step)
    }
}
