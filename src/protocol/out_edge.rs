//! The sending end of an edge.

use super::WindowViolation;
use super::message::{Record, Taken};
use super::waiters::FEW;
use crate::mutants::{Mutant, is_on};
use crate::wire::EdgeId;
use std::collections::{BTreeMap, VecDeque};
use std::ops::RangeInclusive;

/// The sending end of an edge: the credit, and the values that wait for it.
///
/// Values leave in the order in which they were offered. The exception is a value of a step that
/// the receiver needs: it leaves before the values of other steps.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OutEdge<V> {
    /// The number; `None` while the edge is not announced.
    id: Option<EdgeId>,
    /// The last number, which was given back. The receiver resumes it if the link loses `RETIRED`.
    ended: Option<EdgeId>,
    /// Values that have left since the announcement.
    sent: u64,
    /// What the receiver has told of the values that came.
    taken: Taken,
    /// `sent` when the receiver was asked last to tell each value that it takes.
    asked: Option<u64>,
    /// Upper bound of `sent`: the receiver's limit plus `answers`.
    limit: u64,
    /// Values that answered a need, and so do not count towards the receiver's limit.
    answers: u64,
    /// Values without credit, with their steps, oldest first. Empty while there is credit.
    waiting: VecDeque<(u64, V)>,
    /// No step of `waiting` is larger, if they are in order. Else [`MIXED`].
    newest: u64,
    /// Steps of which the receiver needs values, with the number of values.
    needs: BTreeMap<u64, u32>,
    /// Values of all these steps.
    needed: usize,
    /// Values that left and did not arrive for certain, oldest first, with their count.
    kept: VecDeque<(u64, Record<V>)>,
}

/// Values of some step wait before others of an earlier one.
const MIXED: u64 = u64::MAX;

impl<V> Default for OutEdge<V> {
    fn default() -> Self {
        OutEdge {
            id: None,
            ended: None,
            sent: 0,
            taken: Taken::default(),
            asked: None,
            limit: 0,
            answers: 0,
            waiting: VecDeque::new(),
            newest: 0,
            needs: BTreeMap::new(),
            needed: 0,
            kept: VecDeque::new(),
        }
    }
}

impl<V: Clone> OutEdge<V> {
    /// The announced number of the edge.
    pub fn id(&self) -> Option<EdgeId> {
        self.id
    }

    /// Whether the edge can be forgotten.
    #[inline]
    pub fn is_unused(&self) -> bool {
        self.id.is_none() && self.ended.is_none() && self.waiting.is_empty() && self.kept.is_empty()
    }

    /// Values that wait for credit or for an announcement, with their steps, oldest first.
    pub fn waiting(&self) -> impl ExactSizeIterator<Item = &(u64, V)> {
        self.waiting.iter()
    }

    /// Whether just one value waits.
    #[inline]
    pub fn one_waits(&self) -> bool {
        self.waiting.len() == 1
    }

    /// Values that left and did not arrive for certain, oldest first.
    pub fn kept(&self) -> impl Iterator<Item = &Record<V>> {
        self.kept.iter().map(|(_, record)| record)
    }

    /// Values that have left since the announcement.
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// Bytes that the lists of the edge have allocated.
    pub fn heap_bytes(&self) -> usize {
        self.waiting.capacity() * size_of::<(u64, V)>()
            + self.needs.len() * size_of::<(u64, u32)>()
            + self.kept.capacity() * size_of::<(u64, Record<V>)>()
    }

    /// Values that may leave now.
    pub fn credit(&self) -> u64 {
        self.limit.saturating_sub(self.sent)
    }

    /// Values that left and that the receiver may not have taken, as far as it has told. Exact once
    /// it has answered [`OutEdge::flush`].
    pub fn untaken(&self) -> u64 {
        self.sent - self.taken.came + u64::from(self.taken.held)
    }

    /// Asks the receiver to tell which values it takes, from now until it has taken those that have
    /// left. `None` if it was asked, or has nothing to tell.
    pub fn flush(&mut self) -> Option<EdgeId> {
        let edge = self.id.filter(|_| self.untaken() > 0 && self.asked != Some(self.sent))?;
        self.asked = Some(self.sent);
        Some(edge)
    }

    /// Whether the receiver was asked by [`OutEdge::flush`], and no value has left since.
    #[cfg(test)]
    pub fn is_flushed(&self) -> bool {
        self.asked == Some(self.sent)
    }

    /// Whether a value of a step that is offered now leaves at once.
    #[inline]
    pub fn can_leave(&self, step: u64) -> bool {
        self.id.is_some() && (self.sent < self.limit || (self.needed > 0 && self.is_needed(step)))
    }

    /// Offers a value. Returns its record if the value leaves at once. With `keep` the value is
    /// kept until [`OutEdge::arrived`].
    ///
    /// # Errors
    /// The value, if it must wait.
    #[inline]
    pub fn offer(&mut self, step: u64, value: V, keep: bool) -> Result<Record<V>, V> {
        let Some(edge) = self.id else { return Err(value) };
        if self.needed > 0 && self.take_need(step) {
            return Ok(self.leave(edge, step, value, true, keep));
        }
        if self.sent < self.limit {
            return Ok(self.leave(edge, step, value, false, keep));
        }
        Err(value)
    }

    /// A value waits, behind all others.
    #[inline]
    pub fn wait(&mut self, step: u64, value: V) {
        self.newest = if step < self.newest { MIXED } else { step };
        self.waiting.push_back((step, value));
    }

    /// If no value waits, the next one may be of any step.
    fn note_emptied(&mut self) {
        if self.waiting.is_empty() {
            self.newest = 0;
        }
    }

    /// A value waits, before all others.
    fn wait_first(&mut self, step: u64, value: V) {
        match self.waiting.front() {
            Some((of, _)) if *of < step => self.newest = MIXED,
            Some(_) => {}
            None => self.newest = step,
        }
        self.waiting.push_front((step, value));
    }

    /// The record of a value that leaves within the credit if it is offered now, without the value.
    /// [`OutEdge::offer`] returns the same record then, unless the receiver needs a value.
    #[inline]
    pub fn next_record(&self, step: u64) -> Option<Record<()>> {
        let edge = self.id.filter(|_| self.sent < self.limit && self.needs.is_empty())?;
        Some(Record { edge, n: (self.sent + 1) as u16, step, answers_need: false, value: () })
    }

    /// The value of [`OutEdge::next_record`] has left. The edge is not asked to keep it.
    #[inline]
    pub fn left(&mut self) {
        self.sent += 1;
    }

    /// The next waiting value that has credit. The caller repeats this until `None` after
    /// [`OutEdge::announced`] and [`OutEdge::credited`].
    pub fn next(&mut self, keep: bool) -> Option<Record<V>> {
        let edge = self.id?;
        self.note_emptied();
        if self.sent == self.limit {
            return None;
        }
        let (step, value) = match is_on(Mutant::NewestFirst) {
            true => self.waiting.pop_back()?,
            false => self.waiting.pop_front()?,
        };
        Some(self.leave(edge, step, value, false, keep))
    }

    /// The receiver has announced the edge. After a repair, kept values that did not come wait
    /// again. Returns those of them whose steps are over here.
    ///
    /// # Errors
    /// If the edge has a number already, or if other values came than were sent. If the limit is
    /// not within `window` of the values that came.
    pub fn announced(
        &mut self,
        edge: EdgeId,
        (limit, resume): (u64, Option<u64>),
        window: u64,
        is_over: impl Fn(u64) -> bool,
    ) -> Result<Vec<V>, WindowViolation> {
        if self.id.is_some() {
            return Err(WindowViolation("an edge that has a number was announced"));
        }
        let mut dropped = Vec::new();
        match resume {
            Some(came) if self.ended == Some(edge) => {
                let came = if is_on(Mutant::ResentFromStart) { 0 } else { came };
                self.check_came(edge, came)?;
                for (n, record) in std::mem::take(&mut self.kept).into_iter().rev() {
                    if record.edge != edge || n <= came {
                        continue;
                    }
                    self.answers -= u64::from(record.answers_need);
                    match is_over(record.step) && !is_on(Mutant::EndedStepResent) {
                        true => dropped.push(record.value),
                        false if is_on(Mutant::ResentLast) => self.wait(record.step, record.value),
                        false => self.wait_first(record.step, record.value),
                    }
                }
                self.sent = came;
                // Values that came since may be held.
                let since = came.checked_sub(self.taken.came);
                let since = since.ok_or(WindowViolation("an announcement that forgets values"))?;
                let held = u64::from(self.taken.held).saturating_add(since);
                self.taken = Taken { came, held: held.try_into().unwrap_or(u32::MAX) };
            }
            // After a repair, the receiver has forgotten the numbers before: all their values came.
            Some(0) => {
                self.kept.clear();
                self.forget_sent();
            }
            None => self.forget_sent(),
            Some(_) => return Err(WindowViolation("values of a number that was not announced")),
        }
        (self.id, self.ended) = (Some(edge), None);
        self.waiting.reserve(FEW);
        self.forget_needs();
        self.asked = None;
        self.limit = limit.checked_add(self.answers).ok_or(WindowViolation("a limit of 2^64"))?;
        if self.limit < self.sent || self.limit - self.sent > window {
            return Err(WindowViolation("an announcement with a limit outside the window"));
        }
        Ok(dropped)
    }

    /// The receiver has raised its limit, or answers a flush.
    ///
    /// # Errors
    /// If the limit shrinks, or exceeds the values that were sent by more than `window`. If other
    /// values came than were sent.
    pub fn credited(&mut self, limit: u64, taken: Taken, window: u64) -> Result<(), WindowViolation> {
        let limit = limit.checked_add(self.answers).ok_or(WindowViolation("a limit of 2^64"))?;
        if limit < self.limit {
            return Err(WindowViolation("credit that shrinks"));
        }
        if !(self.taken.came..=self.sent).contains(&taken.came) {
            return Err(WindowViolation("credit that counts other values than were sent"));
        }
        if limit - self.sent > window {
            return Err(WindowViolation("credit beyond the largest window"));
        }
        (self.limit, self.taken) = (limit, taken);
        Ok(())
    }

    /// The receiver, which holds no value, gives the number back. Returns whether no value is under
    /// way: then the number is free.
    ///
    /// # Errors
    /// If other values came than were sent.
    pub fn may_retire(&mut self, came: u64) -> Result<bool, WindowViolation> {
        if !(self.taken.came..=self.sent).contains(&came) {
            return Err(WindowViolation("a retirement that counts other values than were sent"));
        }
        self.taken = Taken { came, held: 0 };
        Ok(came == self.sent || is_on(Mutant::RetirementNotVoid))
    }

    /// The receiver needs a value of a step. Returns the record of the oldest one. If none waits,
    /// the next value of the step leaves when it is offered.
    pub fn needed(&mut self, step: u64, keep: bool) -> Option<Record<V>> {
        let edge = self.id?;
        if let Some(at) = self.waiting.iter().position(|(of, _)| *of == step) {
            let (_, value) = self.waiting.remove(at)?;
            return Some(self.leave(edge, step, value, true, keep));
        }
        if is_on(Mutant::NeedForgotten) {
            return None;
        }
        *self.needs.entry(step).or_default() += 1;
        self.needed += 1;
        None
    }

    /// The receiver takes back its needs of a step. Returns their number.
    pub fn unneeded(&mut self, step: u64) -> usize {
        let count = self.needs.remove(&step).unwrap_or_default() as usize;
        self.needed -= count;
        count
    }

    /// The steps of which the receiver needs values, with the number of values.
    pub fn needed_steps(&self) -> impl Iterator<Item = (u64, usize)> {
        self.needs.iter().map(|(step, count)| (*step, *count as usize))
    }

    /// Values that the receiver needs.
    pub fn needs(&self) -> usize {
        self.needed
    }

    /// Steps have ended here. Returns their waiting values, which are not sent.
    pub fn end_steps(&mut self, steps: &RangeInclusive<u64>) -> Vec<V> {
        if steps.is_empty() {
            return Vec::new();
        }
        while let Some((step, _)) = self.needs.range(steps.clone()).next() {
            self.unneeded(*step);
        }
        if self.newest != MIXED {
            let first = self.waiting.partition_point(|(step, _)| step < steps.start());
            let end = self.waiting.partition_point(|(step, _)| step <= steps.end());
            let dropped = self.waiting.drain(first..end).map(|(_, value)| value).collect();
            self.note_emptied();
            return dropped;
        }
        self.newest = 0;
        let mut dropped = Vec::new();
        for _ in 0..self.waiting.len() {
            let Some((step, value)) = self.waiting.pop_front() else { break };
            match steps.contains(&step) {
                true => dropped.push(value),
                false => self.wait(step, value),
            }
        }
        dropped
    }

    /// The edge has no number any more: the receiver has given it back, or the link was repaired.
    /// With `keep` the edge is remembered until [`OutEdge::retirement_arrived`] or
    /// [`OutEdge::all_came`].
    pub fn retired(&mut self, keep: bool) {
        self.ended = self.id.or(self.ended).filter(|_| keep);
        (self.id, self.limit) = (None, 0);
        self.forget_needs();
    }

    /// The receiver knows that the number is free.
    pub fn retirement_arrived(&mut self, edge: EdgeId) {
        self.ended = self.ended.filter(|ended| *ended != edge);
    }

    /// Whether values wait or are needed.
    pub fn has_pending(&self) -> bool {
        !self.waiting.is_empty() || !self.needs.is_empty()
    }

    /// Every value that left has arrived.
    pub fn all_came(&mut self) {
        self.ended = None;
        self.kept.clear();
    }

    /// The oldest kept value has arrived.
    pub fn arrived(&mut self) {
        self.kept.pop_front();
    }

    /// The receiver's life has ended. Returns the values that left and did not arrive for certain.
    /// The waiting values stay, for the receiver's next life.
    pub fn lost(&mut self) -> Vec<V> {
        self.retired(false);
        self.forget_sent();
        let lost = std::mem::take(&mut self.kept).into_iter().map(|(_, record)| record);
        if is_on(Mutant::LostValuesWait) {
            let again: Vec<_> = lost.map(|record| (record.step, record.value)).collect();
            again.into_iter().rev().for_each(|(step, value)| self.wait_first(step, value));
            return Vec::new();
        }
        lost.map(|record| record.value).collect()
    }

    /// Checks that every value that did not come is kept.
    fn check_came(&self, edge: EdgeId, came: u64) -> Result<(), WindowViolation> {
        let missing = self.kept.iter().filter(|(n, record)| record.edge == edge && *n > came).count();
        match came.checked_add(missing as u64) == Some(self.sent) {
            true => Ok(()),
            false => Err(WindowViolation("an announcement that counts other values than were sent")),
        }
    }

    #[inline]
    fn leave(&mut self, edge: EdgeId, step: u64, value: V, answers_need: bool, keep: bool) -> Record<V> {
        self.sent += 1;
        if answers_need && !is_on(Mutant::NeedAnswerUsesCredit) {
            self.limit += 1;
            self.answers += 1;
        }
        let record = Record { edge, n: self.sent as u16, step, answers_need, value };
        if keep {
            self.kept.push_back((self.sent, record.clone()));
        }
        record
    }

    /// Counts the values of another announcement from now on.
    fn forget_sent(&mut self) {
        (self.sent, self.answers, self.taken) = (0, 0, Taken::default());
    }

    fn forget_needs(&mut self) {
        self.needs.clear();
        self.needed = 0;
    }

    // The search of a map would lengthen the path of values without a need.
    #[inline(never)]
    fn is_needed(&self, step: u64) -> bool {
        self.needs.contains_key(&step)
    }

    #[inline(never)]
    fn take_need(&mut self, step: u64) -> bool {
        let Some(count) = self.needs.get_mut(&step) else { return false };
        *count -= 1;
        if *count == 0 {
            self.needs.remove(&step);
        }
        self.needed -= 1;
        true
    }
}
