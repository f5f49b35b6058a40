//! The edges on which a link receives.

mod ends;
#[cfg(test)]
mod growth_tests;
mod numbers;
mod short;
mod standing;

use super::in_edge::{Arrived, Held, InEdge, InState};
use super::message::{Record, ToReceiver, ToSender};
use super::over_steps::OverSteps;
use super::slab::Slab;
use super::step_counts::StepCounts;
use super::{WindowOptions, WindowViolation};
use crate::mutants::{Mutant, is_on};
use crate::wire::EdgeId;
use std::collections::{BTreeMap, VecDeque};

/// The content of a message, for the layer above.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Incoming<V, W, E> {
    /// The message concerns the windows alone.
    Nothing,
    /// A value for the first waiter of its step on this edge.
    Value(u32, W, Held<V>),
    /// A value whose step is over here.
    Dropped(V),
    /// Waiters that fail, and values of steps that have ended.
    Ended(Vec<W>, Vec<V>, E),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct NamedInEdge<K, V, W, E> {
    key: K,
    edge: InEdge<V, W, E>,
    /// Values that had come when [`InEdges::retire_idle`] examined the edge last.
    seen: u64,
    /// Whether the edge is in [`InEdges::unnumbered`].
    is_unnumbered: bool,
    /// Whether the edge is in [`InEdges::busy`].
    is_busy: bool,
    /// Whether the edge is in [`InEdges::unasked`].
    is_unasked: bool,
    /// Whether the edge has a standing request. It keeps its number then, while others are free.
    stands: bool,
    /// Whether a tensor of a standing request may land before its receive begins.
    lands_ahead: bool,
}

/// The receiving ends of all edges of a link, across the lives of the peer. The methods hand each
/// message for the peer to `post`, in order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct InEdges<K, V, W, E> {
    edges: Slab<NamedInEdge<K, V, W, E>>,
    by_key: BTreeMap<K, u32>,
    /// Each number's generation, and the edge that has the number.
    by_number: Vec<(u16, Option<u32>)>,
    /// Numbers without an edge. The next edge gets the one that was freed first. Edges that are
    /// announced in a row then have numbers in a row, and their credits share messages.
    free: VecDeque<u32>,
    /// Edges that wait for a number, oldest first.
    unnumbered: VecDeque<u32>,
    /// Needs of all edges.
    needs: usize,
    /// Edges whose receives wait until fewer values are needed, oldest first.
    unasked: VecDeque<u32>,
    /// Edges that may have a value, a waiter or a need. The end of a step examines no others.
    busy: Vec<u32>,
    /// The values, waiters and needs of each step. The end of a step without any examines no edge.
    counts: StepCounts,
    /// Refused edges, oldest first. Some may be gone.
    refused: VecDeque<u32>,
    /// Cells of all windows.
    cells: u64,
    /// The edge that [`InEdges::retire_idle`] examined last.
    hand: u32,
    /// Steps that have ended at the peer.
    over: OverSteps<E>,
    is_up: bool,
    options: WindowOptions,
}

impl<K, V, W, E> InEdges<K, V, W, E> {
    /// Bytes of an edge in the tables, without what it allocates.
    pub const EDGE: usize = size_of::<Option<NamedInEdge<K, V, W, E>>>() + size_of::<(K, u32)>();
}

impl<K: Ord + Clone, V, W: PartialEq, E: Clone + PartialEq> InEdges<K, V, W, E> {
    /// No edges.
    pub fn new(options: WindowOptions) -> Self {
        InEdges {
            edges: Slab::default(),
            by_key: BTreeMap::new(),
            by_number: Vec::new(),
            free: VecDeque::new(),
            unnumbered: VecDeque::new(),
            needs: 0,
            unasked: VecDeque::new(),
            busy: Vec::new(),
            counts: StepCounts::default(),
            refused: VecDeque::new(),
            cells: 0,
            hand: 0,
            over: OverSteps::default(),
            is_up: true,
            options,
        }
    }

    /// No edges, and no link until [`InEdges::returned`].
    pub fn without_link(options: WindowOptions) -> Self {
        InEdges { is_up: false, ..InEdges::new(options) }
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

    /// The index of an edge, which is added if it is new. The index is valid until the edge is idle
    /// and has no number.
    pub fn edge(&mut self, key: &K) -> u32 {
        if let Some(index) = self.by_key.get(key) {
            return *index;
        }
        let window = self.options.first_window.min(self.options.max_cells - self.cells);
        self.cells += window;
        let edge = InEdge::new(window);
        let named = NamedInEdge {
            key: key.clone(),
            edge,
            seen: 0,
            is_unnumbered: false,
            is_busy: false,
            is_unasked: false,
            stands: false,
            lands_ahead: false,
        };
        let index = self.edges.add(named);
        self.by_key.insert(key.clone(), index);
        index
    }

    /// The edges, with their indices and keys.
    pub fn edges(&self) -> impl Iterator<Item = (u32, &K, &InEdge<V, W, E>)> {
        self.edges.iter().map(|(index, named)| (index, &named.key, &named.edge))
    }

    /// The edge with this index.
    pub fn edge_at(&self, index: u32) -> Option<&InEdge<V, W, E>> {
        self.edges.get(index).map(|named| &named.edge)
    }

    /// Needs of all edges.
    #[cfg(test)]
    pub fn needs(&self) -> usize {
        self.needs
    }

    /// Cells of all windows.
    #[cfg(test)]
    pub fn cells(&self) -> u64 {
        self.cells
    }

    /// The error of a receive on this edge and step, if no value of the step can come any more.
    pub fn refusal(&self, index: u32, step: u64) -> Option<&E> {
        if let Some(InState::Refused(error)) = self.edges.get(index).map(|named| named.edge.state()) {
            return Some(error);
        }
        self.over.error(step)
    }

    /// The first value of a step.
    pub fn first(&self, index: u32, step: u64) -> Option<&V> {
        self.edges.get(index)?.edge.first(step)
    }

    /// Takes the first value of a step, if it `fits`. After it has delivered or put back the value,
    /// the caller calls [`InEdges::send_due`].
    #[inline(always)] // else the value is copied
    pub fn take_if(&mut self, index: u32, step: u64, fits: impl Fn(&V) -> bool) -> Option<Held<V>> {
        let held = self.edge_mut(index)?.take_if(step, fits)?;
        self.counts.remove(step);
        Some(held)
    }

    /// Asks for a value of a step for a receive that does not wait. The edge holds none of that
    /// step.
    #[inline]
    pub fn ask(&mut self, index: u32, step: u64, post: &mut impl FnMut(ToSender<K>)) {
        if !self.is_settled(index) {
            self.ask_sender(index, step, post);
        }
    }

    fn ask_sender(&mut self, index: u32, step: u64, post: &mut impl FnMut(ToSender<K>)) {
        self.announce(index, true, post);
        let credit = self.next_message(index, post);
        if !credit
            && self.may_need()
            && let Some(message) = self.edge_mut(index).and_then(|edge| edge.ask(step))
        {
            self.note_need(index, step);
            post(message);
        }
    }

    /// Whether the sender remembers another need.
    fn may_need(&self) -> bool {
        self.needs < self.options.max_needs as usize || is_on(Mutant::NeedsBeyondLimit)
    }

    /// Asks for values of receives that had to wait until fewer were needed.
    #[inline]
    fn send_unasked(&mut self, post: &mut impl FnMut(ToSender<K>)) {
        while !self.unasked.is_empty() && self.may_need() {
            self.send_first_unasked(post);
        }
    }

    #[cold]
    fn send_first_unasked(&mut self, post: &mut impl FnMut(ToSender<K>)) {
        let Some(index) = self.unasked.pop_front() else { return };
        if let Some(named) = self.edges.get_mut(index) {
            named.is_unasked = false;
            if !is_on(Mutant::UnaskedForgotten) {
                self.next_message(index, post);
            }
        }
    }

    /// Receives of an edge wait until fewer values are needed.
    #[cold]
    fn note_unasked(&mut self, index: u32) {
        if let Some(named) = self.edges.get_mut(index)
            && !named.is_unasked
            && named.edge.has_unasked()
        {
            named.is_unasked = true;
            self.unasked.push_back(index);
        }
    }

    /// A receive waits for a value of a step. The edge holds none of that step. An edge without a
    /// number is announced.
    pub fn wait(&mut self, index: u32, step: u64, waiter: W, post: &mut impl FnMut(ToSender<K>)) {
        if let Some(named) = self.edges.get_mut(index) {
            named.edge.wait(step, waiter);
            self.counts.add(step);
            if !named.is_busy {
                self.list(index);
            }
        }
        self.send_due(index, post);
    }

    /// Whether an edge holds any value.
    #[inline]
    pub fn holds_any(&self, index: u32) -> bool {
        self.edges.get(index).is_some_and(|named| !named.edge.held().is_empty())
    }

    /// A receive gives up. Returns whether it was waiting. The caller calls [`InEdges::send_due`]
    /// afterwards, unless every receive ends: the number of an idle edge may be wanted.
    pub fn give_up(&mut self, index: u32, step: u64, waiter: &W) -> bool {
        let waited = self.edge_mut(index).is_some_and(|edge| edge.give_up(step, waiter));
        if waited {
            self.counts.remove(step);
        }
        self.forget(index);
        waited
    }

    /// A value did not fit its receive, and is in its place again. Returns the next waiter to try,
    /// with the value.
    pub fn put_back(&mut self, index: u32, held: Held<V>) -> Option<(W, Held<V>)> {
        let step = held.step;
        let next = self.edge_mut(index)?.put_back(held);
        match next {
            Some(_) => self.counts.remove(step),
            None => self.note_busy(index, step),
        }
        next
    }

    /// Sends the messages that are due on an edge. The caller calls this after it has delivered or
    /// put back the value that [`InEdges::receive`] returned.
    #[inline]
    pub fn send_due(&mut self, index: u32, post: &mut impl FnMut(ToSender<K>)) {
        if !self.is_settled(index) || !self.unnumbered.is_empty() {
            self.send_all_due(index, post);
        }
    }

    /// Whether an edge has nothing to send: the usual case.
    #[inline]
    fn is_settled(&self, index: u32) -> bool {
        self.edges.get(index).is_some_and(|named| named.edge.is_settled())
    }

    fn send_all_due(&mut self, index: u32, post: &mut impl FnMut(ToSender<K>)) {
        self.announce(index, false, post);
        self.next_message(index, post);
        if !self.unnumbered.is_empty() {
            self.retire(index, post);
        }
        self.forget(index);
    }

    /// Cells that windows may still grow by if they have `limit` together. Large windows have an
    /// eighth of all cells, so that they take none from the usual windows of other edges. Growth
    /// leaves a quarter to the first windows of new edges.
    fn spare(&self, limit: u64) -> u64 {
        let taken = if is_on(Mutant::GrowthBeyondCells) { 0 } else { self.cells };
        limit.saturating_sub(taken)
    }

    /// Sends the credit and the needs of an edge. Returns whether there were any.
    fn next_message(&mut self, index: u32, post: &mut impl FnMut(ToSender<K>)) -> bool {
        let spare = self.spare(self.options.max_cells * 3 / 4);
        let (usual, mut sent) = (self.options.usual_window, false);
        // The usual edge has one message, and computes no second one.
        loop {
            let may_need = self.may_need();
            let Some(edge) = self.edge_mut(index).filter(|edge| !edge.is_settled()) else { break };
            let before = edge.window();
            let Some(message) = edge.next_message(usual.min(before + before.min(spare)), may_need) else {
                if !may_need {
                    self.note_unasked(index);
                }
                break;
            };
            let grown = edge.window() - before;
            self.cells += grown;
            if let ToSender::Need { step, .. } = message {
                self.note_need(index, step);
            }
            post(message);
            sent = true;
        }
        sent
    }

    /// Handles a message of the peer. `is_over` says whether a step is over here. After
    /// [`Incoming::Value`] the caller calls [`InEdges::send_due`].
    ///
    /// # Errors
    /// If the peer breaks the protocol.
    #[inline(always)] // else the message and its value are copied
    pub fn receive(
        &mut self,
        message: ToReceiver<V, E>,
        is_over: impl Fn(u64) -> bool,
        post: &mut impl FnMut(ToSender<K>),
    ) -> Result<Incoming<V, W, E>, WindowViolation> {
        match message {
            ToReceiver::Record(record) => self.arrive(record, is_over, post),
            ToReceiver::Refused { edge, error } => {
                let index = self.find(edge)?;
                let Some(refused) = self.edge_mut(index) else { return Ok(Incoming::Nothing) };
                let steps = refused.waiters().map(|(step, _)| *step).chain(refused.needed());
                let (steps, needs) = (steps.collect::<Vec<u64>>(), refused.needs());
                let waiters = refused.refused(error.clone())?;
                self.needs -= needs;
                steps.into_iter().for_each(|step| self.counts.remove(step));
                self.release(edge, post);
                self.send_unasked(post);
                self.note_refused(index);
                Ok(Incoming::Ended(waiters, Vec::new(), error))
            }
            ToReceiver::Retired { edge } => {
                let index = self.find(edge)?;
                self.edge_mut(index).map_or(Ok(()), InEdge::retired)?;
                self.release(edge, post);
                // A standing edge that gave its number to another one gets a free one back.
                let is_free = !self.free.is_empty() && self.unnumbered.is_empty();
                if is_free && self.edges.get(index).is_some_and(|named| named.stands) {
                    self.announce(index, true, post);
                }
                self.send_due(index, post);
                Ok(Incoming::Nothing)
            }
            ToReceiver::Flush { edge } => {
                let index = self.find(edge)?;
                self.edge_mut(index).into_iter().for_each(InEdge::flush);
                self.send_due(index, post);
                Ok(Incoming::Nothing)
            }
            ToReceiver::StepsOver(over) => Ok(self.end_at_sender(over, post)),
        }
    }

    fn arrive(
        &mut self,
        record: Record<V>,
        is_over: impl Fn(u64) -> bool,
        post: &mut impl FnMut(ToSender<K>),
    ) -> Result<Incoming<V, W, E>, WindowViolation> {
        let (index, step) = (self.find(record.edge)?, record.step);
        if self.over.error(step).is_some() {
            return Err(WindowViolation("a value of a step that it had ended"));
        }
        if record.answers_need {
            self.note_answer(index, record.edge, record.n, step);
        }
        let Some(edge) = self.edge_mut(index) else { return Ok(Incoming::Nothing) };
        let arrived = edge.arrive(record, is_over(step))?;
        self.send_unasked(post);
        let delivery = match arrived {
            Arrived::For(waiter, held) => {
                self.counts.remove(step);
                return Ok(Incoming::Value(index, waiter, held));
            }
            Arrived::Held => {
                self.note_busy(index, step);
                Incoming::Nothing
            }
            Arrived::Dropped(value) => Incoming::Dropped(value),
        };
        self.send_due(index, post);
        Ok(delivery)
    }

    /// Gives the number of an edge back, if the edge is idle. Returns whether it is.
    pub fn retire(&mut self, index: u32, post: &mut impl FnMut(ToSender<K>)) -> bool {
        let Some(message) = self.edge_mut(index).and_then(InEdge::retire) else { return false };
        post(message);
        true
    }

    /// The link was repaired. Each edge with a number is announced again.
    pub fn repaired(&mut self, post: &mut impl FnMut(ToSender<K>)) {
        for index in 0..self.edges.numbers() {
            if let Some(named) = self.edges.get_mut(index)
                && let Some(message) = named.edge.resume(named.key.clone())
            {
                post(message);
            }
        }
        post(ToSender::Resumed);
        self.recount();
        (0..self.edges.numbers()).for_each(|index| self.send_due(index, post));
    }

    /// The peer's life has ended. Returns the waiters, which fail. The held values stay.
    pub fn lost(&mut self) -> Vec<W> {
        (self.is_up, self.by_number, self.free) = (false, Vec::new(), VecDeque::new());
        self.over.clear();
        for index in self.unnumbered.drain(..).chain(self.unasked.drain(..)) {
            if let Some(named) = self.edges.get_mut(index) {
                (named.is_unnumbered, named.is_unasked) = (false, false);
            }
        }
        let mut waiters = Vec::new();
        for index in 0..self.edges.numbers() {
            if let Some(named) = self.edges.get_mut(index) {
                waiters.extend(named.edge.lost());
            }
            self.forget(index);
        }
        self.recount();
        waiters
    }

    /// As [`InEdge::take_in_place`].
    pub fn take_in_place(&mut self, index: u32, step: u64) -> Option<&mut V> {
        self.edge_mut(index)?.take_in_place(step)
    }

    /// As [`InEdge::hold_taken`].
    pub fn hold_taken(&mut self, index: u32, step: u64, value: V) {
        if let Some(edge) = self.edge_mut(index) {
            edge.hold_taken(step, value);
            self.note_busy(index, step);
        }
    }

    /// As [`InEdge::leave_taken`].
    pub fn leave_taken(&mut self, index: u32, step: u64, is_it: impl Fn(&V) -> bool) -> Option<W> {
        let waiter = self.edge_mut(index)?.leave_taken(is_it)?;
        self.counts.remove(step);
        Some(waiter)
    }

    /// As [`InEdge::remove_taken`]. The caller then calls [`InEdges::send_due`].
    pub fn remove_taken(&mut self, index: u32, is_it: impl Fn(&V) -> bool) {
        if let Some(held) = self.edge_mut(index).and_then(|edge| edge.remove_taken(is_it)) {
            self.counts.remove(held.step);
        }
    }

    /// As [`InEdge::replace_held`].
    pub fn replace_held(&mut self, index: u32, is_it: impl Fn(&V) -> bool, value: V) {
        if let Some(edge) = self.edge_mut(index) {
            edge.replace_held(is_it, value);
        }
    }

    /// The next life of the peer is linked.
    pub fn returned(&mut self) {
        self.is_up = true;
    }

    /// Notes a value, a waiter or a need of a step on an edge.
    fn note_busy(&mut self, index: u32, step: u64) {
        self.counts.add(step);
        self.list(index);
    }

    /// Keeps needs, which are rare, out of the usual path.
    #[cold]
    fn note_need(&mut self, index: u32, step: u64) {
        self.needs += 1;
        self.note_busy(index, step);
    }

    /// Notes that a value comes for a need, if it does.
    #[cold]
    fn note_answer(&mut self, index: u32, edge: EdgeId, n: u16, step: u64) {
        if self.edges.get(index).is_some_and(|named| named.edge.is_answer(edge, n, step)) {
            self.needs -= 1;
            self.counts.remove(step);
        }
    }

    /// Whether an edge stays in the list of busy ones, in which it is once.
    fn is_still_busy(&mut self, index: u32) -> bool {
        let Some(named) = self.edges.get_mut(index).filter(|named| !named.is_busy) else { return false };
        named.is_busy = !named.edge.is_idle();
        named.is_busy
    }

    fn unlist(&mut self, index: u32) {
        if let Some(named) = self.edges.get_mut(index) {
            named.is_busy = false;
        }
    }

    fn list(&mut self, index: u32) {
        let Some(named) = self.edges.get_mut(index).filter(|named| !named.is_busy) else { return };
        named.is_busy = true;
        if self.busy.len() == self.busy.capacity() {
            self.prune_busy();
        }
        self.busy.push(index);
    }

    /// Leaves each busy edge once in the list, which also has indices of edges that are gone.
    #[cold]
    fn prune_busy(&mut self) {
        let mut busy = std::mem::take(&mut self.busy);
        busy.sort_unstable();
        busy.dedup();
        busy.iter().for_each(|index| self.unlist(*index));
        busy.retain(|index| self.is_still_busy(*index));
        // So that the next search is as far away as this one took.
        busy.reserve(busy.len().max(64));
        self.busy = busy;
    }

    fn edge_mut(&mut self, index: u32) -> Option<&mut InEdge<V, W, E>> {
        self.edges.get_mut(index).map(|named| &mut named.edge)
    }
}
