//! Destinations that are granted before their tensors are sent.
//!
//! A receive that waits on an edge probably gets a tensor like the one before. If that one was
//! large, `READY` grants a destination for the next. A tensor of as many bytes is written there as
//! soon as it is sent, and its record follows the write. Any other large tensor is offered, and
//! `RELEASE` gives the destination back.

use super::landings::LandingFor;
use super::{ArrivedBytes, ArrivedTensor, MAX_EDGES, ToldMeta, WindowArrival};
use crate::fabric::{LinkId, Port};
use crate::link::links::{Link, LinkContext, Links};
use crate::memory::{Tensor, TensorMut};
use crate::mutants::{Mutant, is_on};
use crate::wire::message::{Message, RecordValue};
use crate::wire::{EdgeId, Grant, Immediate};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The tensor that the receiver of an edge expects next.
#[derive(Debug, Default)]
pub(super) struct ExpectedOfEdge {
    generation: u16,
    /// The latest tensor, if it was large.
    like: Option<Arc<ToldMeta>>,
    /// The size was another than expected, and no two tensors in a row had the same since.
    varies: bool,
    destination: Option<ReadyDestination>,
}

/// A destination that was granted for the next tensor of an edge, with its share of the pool.
#[derive(Debug)]
enum ReadyDestination {
    /// The sender may write to it.
    Granted(Immediate, ReadyShare),
    /// The receiver wants it back.
    Withdrawn(Immediate, ReadyShare),
    /// A tensor lies in it, and its record follows.
    Filled(TensorMut, ReadyShare),
}

/// Bytes that all links of a poller have in destinations that were granted ahead, and in tensors
/// that were written to them and not taken.
pub(in crate::link) type ReadyBytes = Arc<AtomicU64>;

/// A part of [`ReadyBytes`], or of the bytes of eager tensors, until it is dropped.
#[derive(Debug)]
pub struct ReadyShare {
    bytes: u64,
    all: ReadyBytes,
}

impl ReadyShare {
    /// `None` if all would be more than `limit`.
    fn take(all: &ReadyBytes, bytes: u64, limit: u64) -> Option<Self> {
        // Relaxed: only the poller's holder adds, and a limit needs no order.
        let sum = all.load(Ordering::Relaxed).checked_add(bytes)?;
        (sum <= limit).then(|| ReadyShare::of(all, bytes))
    }

    pub(super) fn of(all: &ReadyBytes, bytes: u64) -> Self {
        all.fetch_add(bytes, Ordering::Relaxed);
        ReadyShare { bytes, all: all.clone() }
    }
}

impl Drop for ReadyShare {
    fn drop(&mut self) {
        self.all.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// A destination that the receiver of an edge has granted for the next tensor.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReadyReceiver {
    generation: u16,
    immediate: Immediate,
    target: Grant,
}

impl<P: Port> Links<P> {
    /// Whether [`Links::make_ready`] would grant a destination for the next tensor of an edge.
    pub fn may_get_ready(&mut self, link: LinkId, edge: EdgeId) -> bool {
        let expected = self.links.get_mut(link).and_then(|link| link.expected(edge));
        expected.is_some_and(|expected| expected.size_known() && expected.destination.is_none())
    }

    /// Grants a destination for the next tensor of an edge, if its size is known and the edge has
    /// none.
    pub fn make_ready(&mut self, link: LinkId, edge: EdgeId) {
        if let Some((found, mut cx)) = self.with(link) {
            found.make_ready(&mut cx, edge);
            self.links.note_backlog(link);
        }
    }

    /// Asks for the destination of [`Links::make_ready`] back: no receive waits on the edge.
    pub fn withdraw(&mut self, link: LinkId, edge: EdgeId) {
        if let Some((found, mut cx)) = self.with(link) {
            found.withdraw(&mut cx, edge);
            self.links.note_backlog(link);
        }
    }
}

impl ExpectedOfEdge {
    fn size_known(&self) -> bool {
        self.like.is_some() && !self.varies
    }
}

impl Link {
    fn expected(&mut self, edge: EdgeId) -> Option<&mut ExpectedOfEdge> {
        let expected = self.windows.expected.get_mut(edge.number as usize)?;
        (expected.generation == edge.generation).then_some(expected)
    }

    /// What is expected on an edge, from now on. `None` for a number that no edge has.
    fn expect_on(&mut self, edge: EdgeId) -> Option<&mut ExpectedOfEdge> {
        let place = edge.number as usize;
        let all = &mut self.windows.expected;
        if all.len() <= place {
            let len = if edge.number < MAX_EDGES { place + 1 } else { return None };
            all.resize_with(len, ExpectedOfEdge::default);
        }
        let expected = &mut all[place];
        if expected.generation != edge.generation {
            *expected = ExpectedOfEdge { generation: edge.generation, ..ExpectedOfEdge::default() };
        }
        Some(expected)
    }

    /// A large tensor of an edge has come.
    pub(super) fn expect_like(&mut self, edge: EdgeId, told: &Arc<ToldMeta>) {
        // The window machine ends the link of a sender that names no edge.
        let Some(expected) = self.expect_on(edge) else { return };
        let before = expected.like.replace(told.clone());
        expected.varies &= before.is_none_or(|before| before.meta.bytes() != told.meta.bytes());
    }

    /// A small tensor of an edge has come.
    #[inline]
    pub(super) fn expect_small(&mut self, edge: EdgeId) {
        if !self.windows.expected.is_empty()
            && let Some(expected) = self.expected(edge)
        {
            expected.like = None;
        }
    }

    fn make_ready<P: Port>(&mut self, cx: &mut LinkContext<'_, P>, edge: EdgeId) {
        let most = self.settings.max_ready_bytes;
        let Some(expected) = self.expected(edge) else { return };
        if !expected.size_known() || expected.destination.is_some() {
            return;
        }
        let Some(like) = expected.like.clone() else { return };
        // Without a destination the tensor is offered.
        let Ok(target) = cx.pool.landing(&like.meta) else { return };
        let Some(share) = ReadyShare::take(cx.ready_bytes, target.capacity(), most) else { return };
        let Ok((immediate, target)) = self.grant(cx, target, LandingFor::Edge(edge)) else { return };
        if let Some(expected) = self.expected(edge) {
            expected.destination = Some(ReadyDestination::Granted(immediate, share));
        }
        self.send(cx, &Message::Ready { edge, immediate, target });
    }

    fn withdraw<P: Port>(&mut self, cx: &mut LinkContext<'_, P>, edge: EdgeId) {
        let Some(expected) = self.expected(edge) else { return };
        let Some(granted) = expected.destination.take() else { return };
        if let ReadyDestination::Granted(at, share) = granted {
            expected.destination = Some(ReadyDestination::Withdrawn(at, share));
            self.send(cx, &Message::Withdraw { edge });
        } else {
            expected.destination = Some(granted);
        }
    }

    /// The next tensor of an edge lies in its destination.
    pub(super) fn fill(&mut self, edge: EdgeId, tensor: TensorMut) {
        let Some(expected) = self.expected(edge) else { return };
        if let Some(ReadyDestination::Granted(_, share) | ReadyDestination::Withdrawn(_, share)) =
            expected.destination.take()
        {
            expected.destination = Some(ReadyDestination::Filled(tensor, share));
        }
    }

    /// The tensor of a record that follows its write.
    pub(super) fn written(
        &mut self,
        edge: EdgeId,
        meta: u16,
        checksum: Option<u64>,
    ) -> Result<WindowArrival, String> {
        let told = self.windows.known.get(meta)?.clone();
        let filled = self.expected(edge).and_then(|expected| expected.destination.take());
        let Some(ReadyDestination::Filled(mut tensor, share)) = filled else {
            return Err(format!("no write came before the record of {} on edge {}", told.meta, edge.number));
        };
        let bytes = tensor.meta().bytes();
        if bytes != told.meta.bytes() || tensor.set_meta(told.meta.clone()).is_err() {
            return Err(format!("{bytes} bytes were written for {}", told.meta));
        }
        self.expect_like(edge, &told);
        let bytes = ArrivedBytes::Written { tensor: tensor.freeze(), share };
        Ok(WindowArrival::of_tensor(ArrivedTensor { told, checksum, bytes }))
    }

    /// The sender does not use a destination.
    pub(super) fn on_release<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P>,
        edge: EdgeId,
    ) -> Result<(), String> {
        let released = self.expected(edge).and_then(|expected| {
            let destination = expected.destination.take()?;
            expected.varies |= matches!(destination, ReadyDestination::Granted(..));
            Some(destination)
        });
        match released {
            Some(ReadyDestination::Granted(at, _share) | ReadyDestination::Withdrawn(at, _share)) => {
                self.revoke(cx, at).map(drop)
            }
            Some(ReadyDestination::Filled(..)) | None => {
                Err(format!("it releases a destination of edge {}, which has none", edge.number))
            }
        }
    }

    /// The number of an edge is free. Its sender has released the destination before.
    pub(super) fn on_retired(&mut self, edge: EdgeId) -> Result<(), String> {
        let expected = self.expected(edge).map(std::mem::take);
        match expected.and_then(|expected| expected.destination) {
            None => Ok(()),
            Some(_) => Err(format!("it retires edge {} and keeps a destination", edge.number)),
        }
    }

    /// The receiver of an edge has granted a destination for the next tensor.
    pub(super) fn on_ready<P: Port>(
        &mut self,
        cx: &LinkContext<'_, P>,
        edge: EdgeId,
        immediate: Immediate,
        target: Grant,
    ) -> Result<(), String> {
        let EdgeId { number, generation } = edge;
        if cx.port.limits(self.id).lends {
            return Err(format!("edge {number} got a destination for a tensor that is lent"));
        }
        if number >= MAX_EDGES {
            return Err(format!("edge {number} got a destination, of at most {MAX_EDGES} edges"));
        }
        let all = &mut self.windows.ready;
        if all.len() <= number as usize {
            all.resize(number as usize + 1, None);
        }
        match all[number as usize].replace(ReadyReceiver { generation, immediate, target }) {
            Some(before) if before.generation == generation => {
                Err(format!("edge {number} got a second destination for its next tensor"))
            }
            Some(_) | None => Ok(()),
        }
    }

    /// Gives the destination of an edge back, if there is one.
    pub(super) fn release<P: Port>(&mut self, cx: &mut LinkContext<'_, P>, edge: EdgeId) {
        if self.take_ready(edge).is_some() {
            self.send(cx, &Message::Release { edge });
        }
    }

    fn take_ready(&mut self, edge: EdgeId) -> Option<ReadyReceiver> {
        let ready = self.windows.ready.get_mut(edge.number as usize)?;
        ready.take_if(|ready| ready.generation == edge.generation)
    }

    /// Writes a tensor to the destination that waits for it, if it has as many bytes. Returns what
    /// its record says.
    pub(super) fn write_or_offer<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P>,
        edge: EdgeId,
        meta: u16,
        tensor: Tensor,
    ) -> RecordValue<'static> {
        let bytes = tensor.bytes().len() as u64;
        match self.take_ready(edge) {
            Some(ready) if ready.target.len == bytes => {
                self.write_tensor(cx, tensor, ready.target, ready.immediate);
                return RecordValue::Written { meta };
            }
            Some(_) if !is_on(Mutant::DestinationNotReleased) => self.send(cx, &Message::Release { edge }),
            Some(_) | None => {}
        }
        RecordValue::Offer { meta, offer: self.offer(tensor) }
    }
}
