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
    /// The values of each edge that wait in the send queue.
    pub queued: HashMap<u32, usize>,
    /// Memory in bytes of meta-data and of tables of numbers.
    pub bytes: u64,
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
                    unpack(message).into_iter().flatten().for_each(|message| figures.count(edge_of(message)))
                }
                false => figures.count(edge_of(message)),
            }
        }
        for message in link.out.waiting_loans() {
            figures.count(LentRecord::from_message(message).map(|record| record.edge));
        }
        figures
    }
}

impl LinkFigures {
    fn count(&mut self, edge: Option<EdgeId>) {
        if let Some(edge) = edge {
            *self.queued.entry(edge.number).or_default() += 1;
        }
    }
}

/// The edge of a record.
fn edge_of(message: &[u8]) -> Option<EdgeId> {
    if let Some(plain) = PlainRecord::decode(message) {
        return Some(plain.edge);
    }
    match Message::decode(message) {
        Ok(Message::Record { edge, .. }) => Some(edge),
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
