//! The edges on which a link sends.

use super::message::{Record, StepsOver, ToReceiver, ToSender};
use super::out_edge::OutEdge;
use super::slab::Slab;
use super::step_counts::StepCounts;
use super::{WindowOptions, WindowViolation};
use crate::mutants::{Mutant, is_on};
use crate::wire::EdgeId;
use std::collections::{BTreeMap, VecDeque};
use std::ops::RangeInclusive;

#[cfg(test)]
mod tests;

/// A message that was sent and not acknowledged.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Unacked<E> {
    /// A value of this edge.
    Value(u32),
    /// The end of steps.
    Over(StepsOver<E>),
    /// The end of a number of this edge.
    Retired(u32, EdgeId),
    /// A refusal or a flush. The peer's next announcement brings it again.
    Repeated,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct NamedOutEdge<K, V> {
    key: K,
    edge: OutEdge<V>,
    /// The place of the edge in [`OutEdges::pending`], if it is there.
    pending_at: Option<u32>,
}

impl<K, V> NamedOutEdge<K, V> {
    /// Lists the edge as a pending one, if it is not listed.
    #[inline]
    fn list(&mut self, index: u32, pending: &mut Vec<u32>) {
        if self.pending_at.is_none() {
            self.pending_at = Some(pending.len() as u32);
            pending.push(index);
        }
    }
}

/// The sending ends of all edges of a link, across the lives of the peer. The methods hand each
/// message for the peer to `post`, in order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OutEdges<K, V, E> {
    edges: Slab<NamedOutEdge<K, V>>,
    by_key: BTreeMap<K, u32>,
    /// The edge that has each of the peer's numbers; no index for a refused one.
    by_number: Vec<Option<(EdgeId, Option<u32>)>>,
    /// Edges on which values may wait or be needed. The end of a step examines no others.
    pending: Vec<u32>,
    /// The waiting values and the needs of all edges.
    counts: StepCounts,
    /// Needs of all edges.
    needs: usize,
    /// Messages that were not acknowledged, oldest first. Empty on a link that does not resend.
    unacked: VecDeque<Unacked<E>>,
    /// Whether the peer is announcing its edges again. No edge is removed meanwhile, as the counts
    /// of all edges are needed.
    is_resuming: bool,
    options: WindowOptions,
}

impl<K, V, E> OutEdges<K, V, E> {
    /// Bytes of an edge in the tables, without what it allocates.
    pub const EDGE: usize = size_of::<Option<NamedOutEdge<K, V>>>() + size_of::<(K, u32)>();
}

impl<K: Ord + Clone, V: Clone, E: Clone> OutEdges<K, V, E> {
    /// No edges.
    pub fn new(options: WindowOptions) -> Self {
        OutEdges {
            edges: Slab::default(),
            by_key: BTreeMap::new(),
            by_number: Vec::new(),
            pending: Vec::new(),
            counts: StepCounts::default(),
            needs: 0,
            unacked: VecDeque::new(),
            is_resuming: false,
            options,
        }
    }

    /// As the method `edge`, for an edge that probably has the index `hint`. `is` compares by
    /// identity, and `make` makes the key if that fails.
    #[inline]
    pub fn edge_near(&mut self, hint: u32, is: impl Fn(&K) -> bool, make: impl FnOnce() -> K) -> u32 {
        match self.edges.get(hint) {
            Some(named) if is(&named.key) => hint,
            _ => self.edge_far(make()),
        }
    }

    /// Finds an edge by its key, which the edge has from now on: the next search is short.
    #[cold]
    fn edge_far(&mut self, key: K) -> u32 {
        let index = self.edge(&key);
        if let Some(named) = self.edges.get_mut(index) {
            // Both places have the same name in memory, so that the earlier one can go.
            self.by_key.remove(&named.key);
            self.by_key.insert(key.clone(), index);
            named.key = key;
        }
        index
    }

    /// The index of an edge, which is added if it is new. The index is valid until the edge is
    /// unused.
    pub fn edge(&mut self, key: &K) -> u32 {
        if let Some(index) = self.by_key.get(key) {
            return *index;
        }
        let named = NamedOutEdge { key: key.clone(), edge: OutEdge::default(), pending_at: None };
        let index = self.edges.add(named);
        self.by_key.insert(key.clone(), index);
        index
    }

    /// The edges, with their keys.
    pub fn edges(&self) -> impl Iterator<Item = (&K, &OutEdge<V>)> {
        self.edges.iter().map(|(_, named)| (&named.key, &named.edge))
    }

    /// Asks the receiver of each edge to tell which values it takes: see [`OutEdge::flush`].
    pub fn flush(&mut self, post: &mut impl FnMut(ToReceiver<V, E>)) {
        for index in 0..self.edges.numbers() {
            if let Some(edge) = self.edge_mut(index).and_then(OutEdge::flush) {
                self.post(Unacked::Repeated, ToReceiver::Flush { edge }, post);
            }
        }
    }

    /// The edge that a message of the peer is about, if it can make values leave.
    pub fn index_of(&self, message: &ToSender<K>) -> Option<u32> {
        match message {
            ToSender::Announce { key, .. } => self.by_key.get(key).copied(),
            ToSender::Credit { edge, .. } | ToSender::Need { edge, .. } => {
                let (known, index) = (*self.by_number.get(edge.number as usize)?)?;
                index.filter(|_| known == *edge)
            }
            _ => None,
        }
    }

    /// The edges, with their indices and keys.
    pub fn indexed_edges(&self) -> impl Iterator<Item = (u32, &K, &OutEdge<V>)> {
        self.edges.iter().map(|(index, named)| (index, &named.key, &named.edge))
    }

    /// The edge with this index.
    pub fn edge_at(&self, index: u32) -> Option<&OutEdge<V>> {
        self.edges.get(index).map(|named| &named.edge)
    }

    /// Whether a value of a step that is offered now leaves at once.
    #[inline]
    pub fn can_leave(&self, index: u32, step: u64) -> bool {
        self.edges.get(index).is_some_and(|named| named.edge.can_leave(step))
    }

    /// The edge with this index, if `is` knows its key and values of this end are not kept.
    #[inline]
    pub fn at(&mut self, index: u32, is: impl Fn(&K) -> bool) -> Option<&mut OutEdge<V>> {
        let named = self.edges.get_mut(index)?;
        (is(&named.key) && !self.options.resends).then_some(&mut named.edge)
    }

    /// The record of a value that leaves at once if it is offered now, without the value. `None`
    /// for a value that takes more than its record.
    #[inline]
    pub fn next_record(&self, index: u32, step: u64) -> Option<Record<()>> {
        let named = self.edges.get(index).filter(|_| !self.options.resends)?;
        named.edge.next_record(step)
    }

    /// The value of [`OutEdges::next_record`] has left.
    #[inline]
    pub fn left(&mut self, index: u32) {
        self.edge_mut(index).into_iter().for_each(OutEdge::left);
    }

    /// Offers a value on an edge. Returns whether it waits, and none waited there before.
    #[inline(always)] // else the value is copied
    pub fn offer(
        &mut self,
        index: u32,
        step: u64,
        value: V,
        post: &mut impl FnMut(ToReceiver<V, E>),
    ) -> bool {
        let resends = self.options.resends;
        let Some(edge) = self.edge_mut(index) else { return false };
        let record = match edge.offer(step, value, resends) {
            Ok(record) => record,
            Err(value) => return self.wait(index, step, value),
        };
        if record.answers_need {
            self.end_needs(step, 1);
        }
        self.post_record(index, record, post);
        false
    }

    /// A value waits that can't leave now, as [`OutEdges::can_leave`] tells. Returns whether none
    /// waited on the edge before.
    #[inline(always)] // else the value is copied
    pub fn wait(&mut self, index: u32, step: u64, value: V) -> bool {
        let Some(named) = self.edges.get_mut(index) else { return false };
        named.edge.wait(step, value);
        self.counts.add(step);
        named.list(index, &mut self.pending);
        named.edge.one_waits()
    }

    /// Values of a step are not needed any more.
    #[cold]
    fn end_needs(&mut self, step: u64, count: usize) {
        self.needs -= count;
        self.counts.remove_many(step, count);
    }

    /// Handles a message of the peer. `end_of` returns the error of a step that is over here, and
    /// `refusal` that of an edge that is not served. Returns values that will not be sent.
    ///
    /// # Errors
    /// If the peer breaks the protocol.
    pub fn receive(
        &mut self,
        message: ToSender<K>,
        end_of: impl Fn(u64) -> Option<E>,
        refusal: impl Fn(&K) -> Option<E>,
        post: &mut impl FnMut(ToReceiver<V, E>),
    ) -> Result<Vec<V>, WindowViolation> {
        match message {
            ToSender::Announce { edge, key, limit, resume } => {
                self.check_number(edge)?;
                if let Some(error) = refusal(&key) {
                    self.by_number[edge.number as usize] = Some((edge, None));
                    self.post(Unacked::Repeated, ToReceiver::Refused { edge, error }, post);
                    return Ok(Vec::new());
                }
                return self.announced(edge, &key, (limit, resume), |step| end_of(step).is_some(), post);
            }
            ToSender::Credit { edge, limit, taken } => {
                let Some(index) = self.find(edge)? else { return Ok(Vec::new()) };
                let window = self.options.largest_window;
                self.edge_mut(index).map_or(Ok(()), |edge| edge.credited(limit, taken, window))?;
                self.drain(index, post);
            }
            ToSender::Need { edge, step } => {
                let Some(index) = self.find(edge)? else { return Ok(Vec::new()) };
                match end_of(step) {
                    Some(error) => self.tell_end(StepsOver { first: step, last: step, error }, post),
                    None => self.needed(index, step, post)?,
                }
            }
            ToSender::Unneed { edge, step } => {
                let Some(index) = self.find(edge)? else { return Ok(Vec::new()) };
                let ended = self.edge_mut(index).map_or(0, |edge| edge.unneeded(step));
                self.end_needs(step, ended);
            }
            ToSender::Retire { edge, came } => {
                let Some(index) = self.find(edge)? else { return Ok(Vec::new()) };
                if !self.edge_mut(index).map_or(Ok(true), |edge| edge.may_retire(came))? {
                    return Ok(Vec::new());
                }
                let resends = self.options.resends;
                self.by_number[edge.number as usize] = None;
                if let Some(named) = self.edges.get_mut(index) {
                    self.needs -= named.edge.needs();
                    named.edge.needed_steps().for_each(|(step, count)| self.counts.remove_many(step, count));
                    named.edge.retired(resends);
                }
                self.unlist(index);
                self.post(Unacked::Retired(index, edge), ToReceiver::Retired { edge }, post);
                self.forget(index);
            }
            ToSender::Resumed => {
                // To look at all edges takes long.
                if !std::mem::take(&mut self.is_resuming) {
                    return Err(WindowViolation("the end of announcements that were not repeated"));
                }
                self.forget_all(|edge| {
                    if edge.id().is_none() {
                        edge.all_came()
                    }
                });
            }
        }
        Ok(Vec::new())
    }

    fn announced(
        &mut self,
        edge: EdgeId,
        key: &K,
        limit: (u64, Option<u64>),
        is_over: impl Fn(u64) -> bool,
        post: &mut impl FnMut(ToReceiver<V, E>),
    ) -> Result<Vec<V>, WindowViolation> {
        let (index, window) = (self.edge(key), self.options.largest_window);
        let Some(named) = self.edges.get_mut(index) else { return Ok(Vec::new()) };
        let waited = named.edge.waiting().len();
        let announced = named.edge.announced(edge, limit, window, is_over);
        // Values that wait again, also after an error: they left before the others.
        let again = named.edge.waiting().len() - waited;
        let before = if is_on(Mutant::ResentLast) { waited } else { 0 };
        named.edge.waiting().skip(before).take(again).for_each(|(step, _)| self.counts.add(*step));
        if again > 0 {
            named.list(index, &mut self.pending);
        }
        let dropped = announced?;
        self.by_number[edge.number as usize] = Some((edge, Some(index)));
        self.drain(index, post);
        Ok(dropped)
    }

    fn needed(
        &mut self,
        index: u32,
        step: u64,
        post: &mut impl FnMut(ToReceiver<V, E>),
    ) -> Result<(), WindowViolation> {
        let resends = self.options.resends;
        let is_full = self.needs >= self.options.max_needs as usize;
        let Some(named) = self.edges.get_mut(index) else { return Ok(()) };
        match named.edge.needed(step, resends) {
            Some(record) => {
                self.counts.remove(step);
                self.post_record(index, record, post);
            }
            None => {
                // Counted also beyond the limit: the edge has it until the link has ended.
                self.needs += 1;
                self.counts.add(step);
                named.list(index, &mut self.pending);
                if is_full {
                    return Err(WindowViolation("more needs than receives can wait"));
                }
            }
        }
        Ok(())
    }

    /// Whether no value of a step waits or is needed on any edge. May take an edge off the list of
    /// pending ones.
    #[inline]
    pub fn is_quiet(&mut self, step: u64) -> bool {
        self.pending.is_empty() || self.is_quiet_beside_others(step)
    }

    #[inline(never)] // keeps the usual path short
    fn is_quiet_beside_others(&mut self, step: u64) -> bool {
        // An edge at the end that has nothing more leaves the list. Once the list is empty, the
        // usual path is taken.
        if let Some(last) = self.pending.last() {
            self.unlist(*last);
        }
        self.counts.is_empty(step)
    }

    /// These steps have ended here. Returns their waiting values, which are not sent, with the
    /// indices of their edges. Such an edge is forgotten already if it is unused now.
    /// [`OutEdges::tell_end`] tells the peer, now or later.
    pub fn drop_steps(&mut self, steps: &RangeInclusive<u64>) -> Vec<(u32, V)> {
        let (mut left, mut dropped) = (self.counts.take(steps), Vec::new());
        // Backwards: the edge that gets the place of another one was looked at.
        for at in (0..self.pending.len()).rev() {
            if left == 0 {
                break;
            }
            let index = self.pending[at];
            let Some(named) = self.edges.get_mut(index) else { continue };
            let (needs, before) = (named.edge.needs(), dropped.len());
            dropped.extend(named.edge.end_steps(steps).into_iter().map(|value| (index, value)));
            let ended = needs - named.edge.needs();
            self.needs -= ended;
            let found = ended + dropped.len() - before;
            left -= found;
            self.unlist(index);
            if found > 0 {
                self.list_last(index);
            }
            self.forget(index);
        }
        dropped
    }

    /// The peer has acknowledged `count` more messages.
    pub fn acknowledged(&mut self, count: usize) {
        for _ in 0..count {
            let (index, retired) = match self.unacked.pop_front() {
                Some(Unacked::Value(index)) => (index, None),
                Some(Unacked::Retired(index, edge)) => (index, Some(edge)),
                Some(Unacked::Over(_) | Unacked::Repeated) | None => continue,
            };
            let Some(edge) = self.edge_mut(index) else { continue };
            match retired {
                Some(id) => edge.retirement_arrived(id),
                None => edge.arrived(),
            }
            self.forget(index);
        }
    }

    /// The link was repaired. Messages that were not acknowledged may be lost. The ends of steps
    /// are sent again; the values follow when the peer announces its edges again.
    pub fn repaired(&mut self, post: &mut impl FnMut(ToReceiver<V, E>)) {
        self.is_resuming = true;
        self.by_number.clear();
        self.needs = 0;
        self.edges.iter_mut().for_each(|(_, named)| named.edge.retired(true));
        self.recount();
        for unacked in std::mem::take(&mut self.unacked) {
            if let Unacked::Over(over) = unacked {
                self.tell_end(over, post);
            }
        }
    }

    /// The peer's life has ended. Returns the values that left and did not arrive for certain.
    pub fn lost(&mut self) -> Vec<V> {
        self.is_resuming = false;
        self.by_number.clear();
        self.unacked.clear();
        self.needs = 0;
        let mut lost = Vec::new();
        self.edges.iter_mut().for_each(|(_, named)| lost.extend(named.edge.lost()));
        self.recount();
        self.forget_all(|_| {});
        lost
    }

    /// Lists and counts anew what waits on all edges, of which none has needs.
    fn recount(&mut self) {
        self.pending.clear();
        self.counts.clear();
        for (index, named) in self.edges.iter_mut() {
            named.edge.waiting().for_each(|(step, _)| self.counts.add(*step));
            named.pending_at = None;
            if named.edge.has_pending() {
                named.list(index, &mut self.pending);
            }
        }
    }

    /// Sends the waiting values that have credit.
    fn drain(&mut self, index: u32, post: &mut impl FnMut(ToReceiver<V, E>)) {
        let resends = self.options.resends;
        while let Some(record) = self.edge_mut(index).and_then(|edge| edge.next(resends)) {
            self.counts.remove(record.step);
            self.post_record(index, record, post);
        }
    }

    fn post_record(&mut self, index: u32, record: Record<V>, post: &mut impl FnMut(ToReceiver<V, E>)) {
        self.post(Unacked::Value(index), ToReceiver::Record(record), post);
    }

    /// Tells the peer of steps that have ended here.
    pub fn tell_end(&mut self, over: StepsOver<E>, post: &mut impl FnMut(ToReceiver<V, E>)) {
        self.post(Unacked::Over(over.clone()), ToReceiver::StepsOver(over), post);
    }

    fn post(
        &mut self,
        unacked: Unacked<E>,
        message: ToReceiver<V, E>,
        post: &mut impl FnMut(ToReceiver<V, E>),
    ) {
        if self.options.resends {
            self.unacked.push_back(unacked);
        }
        post(message);
    }

    fn edge_mut(&mut self, index: u32) -> Option<&mut OutEdge<V>> {
        self.edges.get_mut(index).map(|named| &mut named.edge)
    }

    /// Checks that the peer may give an edge this number.
    fn check_number(&mut self, edge: EdgeId) -> Result<(), WindowViolation> {
        if edge.number >= self.options.max_edges {
            return Err(WindowViolation("a number beyond the largest"));
        }
        let numbers = edge.number as usize + 1;
        if self.by_number.len() < numbers {
            self.by_number.resize(numbers, None);
        }
        match self.by_number[edge.number as usize] {
            None | Some((_, None)) => Ok(()),
            Some((_, Some(_))) => Err(WindowViolation("a number that another edge has")),
        }
    }

    /// The edge with this number. `None` if it was refused, as the peer may not know yet.
    fn find(&self, edge: EdgeId) -> Result<Option<u32>, WindowViolation> {
        match self.by_number.get(edge.number as usize) {
            Some(Some((id, index))) if *id == edge => Ok(*index),
            _ => Err(WindowViolation("a message for an edge that was not announced")),
        }
    }

    /// Checks that all pending edges are listed, and that the counts say what the edges have.
    #[cfg(test)]
    pub fn check_counts(&self) {
        let mut counts = self.counts.clone();
        for (index, named) in self.edges.iter() {
            let at = self.pending.iter().position(|pending| *pending == index);
            assert_eq!(named.pending_at, at.map(|at| at as u32), "the place of edge {index}");
            assert!(at.is_some() || !named.edge.has_pending(), "edge {index} is not listed");
            let waiting = named.edge.waiting().map(|(step, _)| (*step, 1));
            for (step, count) in waiting.chain(named.edge.needed_steps()) {
                (0..count).for_each(|_| {
                    assert!(!counts.is_empty(step), "edge {index} has more of step {step} than is counted");
                    counts.remove(step);
                });
            }
        }
        assert_eq!(counts.take(&(0..=u64::MAX)), 0, "more is counted than the edges have");
    }

    /// Takes an edge out of the list of pending ones, if nothing waits or is needed there.
    fn unlist(&mut self, index: u32) {
        let Some(named) = self.edges.get_mut(index).filter(|named| !named.edge.has_pending()) else { return };
        let Some(at) = named.pending_at.take() else { return };
        self.pending.swap_remove(at as usize);
        if let Some(moved) = self.pending.get(at as usize) {
            self.edges.get_mut(*moved).into_iter().for_each(|moved| moved.pending_at = Some(at));
        }
    }

    /// Makes an edge the last one of the list, if it is listed: it is likely to have values of the
    /// next step that ends.
    fn list_last(&mut self, index: u32) {
        let Some(at) = self.edges.get(index).and_then(|named| named.pending_at) else { return };
        let last = self.pending.len() - 1;
        self.pending.swap(at as usize, last);
        for place in [at as usize, last] {
            let moved = self.edges.get_mut(self.pending[place]);
            moved.into_iter().for_each(|moved| moved.pending_at = Some(place as u32));
        }
    }

    /// Removes the edge if it is unused.
    #[inline(never)] // keeps the path of records short
    pub fn forget(&mut self, index: u32) {
        if self.edges.get(index).is_some_and(|named| named.edge.is_unused()) {
            self.forget_unused(index);
        }
    }

    #[cold]
    fn forget_unused(&mut self, index: u32) {
        self.unlist(index);
        let Some(named) = self.edges.get(index).filter(|_| !self.is_resuming) else { return };
        if named.pending_at.is_none() {
            self.by_key.remove(&named.key);
            self.edges.remove(index);
        }
    }

    fn forget_all(&mut self, mut change: impl FnMut(&mut OutEdge<V>)) {
        for index in 0..self.edges.numbers() {
            self.edge_mut(index).into_iter().for_each(&mut change);
            self.forget(index);
        }
    }
}
