//! What a link keeps for edges, for the reports.

use super::{AskedOfEdge, ExpectedOfEdge, ReadyReceiver, WindowLink};
use crate::fabric::{LinkId, Port};
use crate::link::Links;
use crate::wire::EdgeId;
use crate::wire::message::pack::{is_packed, unpack};
use crate::wire::message::{LentRecord, Message, PlainRecord};
use foldhash::HashMap;

/// What a link keeps for the edges that use it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LinkFigures {
    /// The values of each edge, by its number, that wait in the send queue.
    pub queued: HashMap<u32, QueuedValues>,
    /// Memory in bytes of meta-data and of tables of numbers.
    pub bytes: u64,
}

/// The values of one edge that wait in the send queue of a link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueuedValues {
    /// Their number.
    pub count: usize,
    /// The first of their steps.
    pub step: u64,
}

impl<P: Port> Links<P> {
    /// What a link keeps for edges. Reads all messages that wait.
    pub fn window_figures(&self, link: LinkId) -> LinkFigures {
        let mut figures = LinkFigures::default();
        let Some(link) = self.links.iter().find(|known| known.id == link) else { return figures };
        figures.bytes = link.windows.heap_bytes();
        for message in link.out.waiting_messages() {
            match is_packed(message) {
                true => {
                    unpack(message).into_iter().flatten().for_each(|message| figures.count(value_in(message)))
                }
                false => figures.count(value_in(message)),
            }
        }
        for message in link.out.waiting_loans() {
            figures
                .count(LentRecord::from_message(message).map(|LentRecord { edge, step, .. }| (edge, step)));
        }
        figures
    }
}

impl LinkFigures {
    fn count(&mut self, value: Option<(EdgeId, u64)>) {
        if let Some((edge, step)) = value {
            let queued = self.queued.entry(edge.number).or_insert(QueuedValues { count: 0, step });
            *queued = QueuedValues { count: queued.count + 1, step: queued.step.min(step) };
        }
    }
}

/// The edge and the step of a record.
fn value_in(message: &[u8]) -> Option<(EdgeId, u64)> {
    if let Some(PlainRecord { edge, step, .. }) = PlainRecord::decode(message) {
        return Some((edge, step));
    }
    match Message::decode(message) {
        Ok(Message::Record { edge, step, .. }) => Some((edge, step)),
        _ => None,
    }
}

impl WindowLink {
    fn heap_bytes(&self) -> u64 {
        let asked = self.asked.capacity() * size_of::<AskedOfEdge>();
        let expected = self.expected.capacity() * size_of::<ExpectedOfEdge>();
        let ready = self.ready.capacity() * size_of::<Option<ReadyReceiver>>();
        (self.told.heap_bytes() + self.known.heap_bytes() + asked + expected + ready) as u64
    }
}
