//! The receiving end of an edge.

use super::WindowViolation;
use super::message::{Record, Taken, ToSender};
use super::waiters::Waiters;
use crate::mutants::{Mutant, is_on};
use crate::wire::EdgeId;

/// How far an edge is announced to its sender.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum InState<E> {
    /// The edge has no number.
    Unannounced,
    /// The number was announced.
    Announced(EdgeId),
    /// The number was given back. Values that left earlier may still come.
    Retiring(EdgeId),
    /// The sender does not serve the edge.
    Refused(E),
}

/// A value that came and has not been taken.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Held<V> {
    /// Step id that the sender gave it.
    pub step: u64,
    /// Ascends with the values that come on the edge.
    pub order: u64,
    /// Whether the value occupies a cell of the window. A value that answered a need does not.
    pub in_window: bool,
    /// Whether a receive has taken the value, which is still on its way. Other receives get later
    /// values of the step, unless this one gives up.
    pub is_taken: bool,
    /// Matched by the next receive of its step.
    pub value: V,
}

impl<V> Held<V> {
    /// Whether a receive of this step can take the value.
    fn is_free(&self, step: u64) -> bool {
        self.step == step && !self.is_taken
    }
}

/// The outcome of [`InEdge::arrive`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Arrived<V, W> {
    /// The value is for the first waiter of its step.
    For(W, Held<V>),
    /// A cell holds the value.
    Held,
    /// The value's step is over here.
    Dropped(V),
}

/// The receiving end of an edge: the cells that hold values, and the receives that wait. `V` is a
/// value, `W` a waiter, and `E` an error.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct InEdge<V, W, E> {
    state: InState<E>,
    /// Values that came before the announcement.
    before: u64,
    /// Values that came since the announcement.
    came: u64,
    /// Values that came since the announcement and answered a need.
    answers: u64,
    /// The limit that was announced to the sender.
    granted: u64,
    /// Cells of the window.
    window: u64,
    /// Credit that goes back together: see [`credit_batch`]. 0 while the sender flushes, as each
    /// value that is taken has a message then.
    credit_batch: u64,
    /// While the sender flushes: the held values of which it was told last.
    flush: Option<usize>,
    /// Cells of the window that are occupied.
    occupied: u64,
    /// Values that came and have not been taken, oldest first.
    held: Vec<Held<V>>,
    /// Receives that wait, and needs.
    waiters: Waiters<W>,
}

/// Credit that goes back although no receive waits: half a window, and two values at least. An edge
/// for one value costs neither credit nor a larger window.
fn credit_batch(window: u64) -> u64 {
    (window / 2).max(2).min(window.max(1))
}

impl<V, W: PartialEq, E: Clone> InEdge<V, W, E> {
    /// An edge that is not announced, with a window of `window` cells.
    pub fn new(window: u64) -> Self {
        InEdge {
            state: InState::Unannounced,
            before: 0,
            came: 0,
            answers: 0,
            granted: 0,
            window,
            credit_batch: credit_batch(window),
            flush: None,
            occupied: 0,
            held: Vec::new(),
            waiters: Waiters::default(),
        }
    }

    /// How far the edge is announced.
    pub fn state(&self) -> &InState<E> {
        &self.state
    }

    /// Values that came and have not been taken, oldest first.
    pub fn held(&self) -> &[Held<V>] {
        &self.held
    }

    /// Receives that wait, with their steps, oldest first.
    pub fn waiters(&self) -> impl Iterator<Item = &(u64, W)> {
        self.waiters.iter()
    }

    /// Needs that are not answered yet.
    pub fn needs(&self) -> usize {
        self.needed().count()
    }

    /// The step of each need that is not answered yet.
    pub fn needed(&self) -> impl Iterator<Item = u64> {
        self.waiters.needed()
    }

    /// Needs of a step that are not answered yet.
    pub fn needs_of(&self, step: u64) -> u32 {
        self.waiters.needs_of(step)
    }

    /// Values that came since the announcement.
    pub fn came(&self) -> u64 {
        self.came
    }

    /// Bytes that the lists of the edge have allocated.
    pub fn heap_bytes(&self) -> usize {
        self.held.capacity() * size_of::<Held<V>>() + self.waiters.heap_bytes()
    }

    /// Values that may come now, as far as this end knows.
    pub fn credit(&self) -> u64 {
        self.granted - (self.came - self.answers)
    }

    /// The order of the last value that came.
    fn last(&self) -> u64 {
        self.before + self.came
    }

    /// Cells of the window.
    pub fn window(&self) -> u64 {
        self.window
    }

    /// Cells of the window that are occupied.
    pub fn occupied(&self) -> u64 {
        self.occupied
    }

    /// Whether the edge holds nothing and waits for nothing.
    pub fn is_idle(&self) -> bool {
        let held = self.held.is_empty() || is_on(Mutant::RetiredWhileHeld);
        held && self.waiters.is_empty() && !self.waiters.has_needs()
    }

    /// Announces the edge under a new number. Values of an earlier announcement still occupy their
    /// cells, so the limit is lower by them.
    pub fn announce<K>(&mut self, edge: EdgeId, key: K) -> ToSender<K> {
        self.state = InState::Announced(edge);
        self.make_room();
        self.before += self.came;
        (self.came, self.answers) = (0, 0);
        self.waiters.clear_needs();
        self.set_flush(None);
        self.granted = self.grantable();
        ToSender::Announce { edge, key, limit: self.granted, resume: None }
    }

    /// Announces the edge again after a repair of the link. [`InEdge::next_message`] then repeats
    /// the needs.
    pub fn resume<K>(&mut self, key: K) -> Option<ToSender<K>> {
        let (InState::Announced(edge) | InState::Retiring(edge)) = self.state else { return None };
        self.state = InState::Announced(edge);
        if !is_on(Mutant::NeedNotRepeated) {
            self.waiters.clear_needs();
        }
        // The sender flushes again.
        self.set_flush(None);
        self.granted = self.grantable();
        Some(ToSender::Announce { edge, key, limit: self.granted, resume: Some(self.came) })
    }

    /// Gives the number back, if the edge is idle.
    pub fn retire<K>(&mut self) -> Option<ToSender<K>> {
        let InState::Announced(edge) = self.state else { return None };
        if !self.is_idle() {
            return None;
        }
        self.state = InState::Retiring(edge);
        Some(ToSender::Retire { edge, came: self.came })
    }

    /// The number is free.
    ///
    /// # Errors
    /// If it was not given back.
    pub fn retired(&mut self) -> Result<(), WindowViolation> {
        let InState::Retiring(_) = self.state else {
            return Err(WindowViolation("the end of an edge that was not retired"));
        };
        self.state = InState::Unannounced;
        Ok(())
    }

    /// The sender does not serve the edge. Returns the waiters, which fail.
    ///
    /// # Errors
    /// If the edge is not announced.
    pub fn refused(&mut self, error: E) -> Result<Vec<W>, WindowViolation> {
        let (InState::Announced(_) | InState::Retiring(_)) = self.state else {
            return Err(WindowViolation("the refusal of an edge that was not announced"));
        };
        if self.came > 0 {
            return Err(WindowViolation("the refusal of an edge that was served"));
        }
        self.state = InState::Refused(error);
        Ok(self.waiters.end_all())
    }

    /// Forgets that the sender does not serve the edge. The next receive asks it again.
    pub fn forget_refusal(&mut self) {
        if matches!(self.state, InState::Refused(_)) {
            self.state = InState::Unannounced;
        }
    }

    /// The first value of a step.
    pub fn first(&self, step: u64) -> Option<&V> {
        self.held.iter().find(|held| held.is_free(step)).map(|held| &held.value)
    }

    /// Takes the first value of a step, if it `fits`.
    #[inline(always)] // else the value is copied
    pub fn take_if(&mut self, step: u64, fits: impl Fn(&V) -> bool) -> Option<Held<V>> {
        let at = self.held.iter().position(|held| held.is_free(step))?;
        if !fits(&self.held[at].value) {
            return None;
        }
        let held = match at + 1 == self.held.len() {
            // It is usually alone, and `remove` would call a function to move nothing.
            true => self.held.pop()?,
            false => self.held.remove(at),
        };
        self.occupied -= u64::from(held.in_window);
        Some(held)
    }

    /// The sender waits until its values are taken.
    pub fn flush(&mut self) {
        if matches!(self.state, InState::Announced(_)) {
            self.set_flush(Some(usize::MAX));
        }
    }

    /// Lets the edge hold `window` values, or more if it does already.
    pub fn widen(&mut self, window: u64) {
        self.set_window(self.window.max(window));
        self.make_room();
    }

    /// Asks for a value of a step for a receive that does not wait. Returns the message for the
    /// sender, if the value does not come by itself.
    pub fn ask<K>(&mut self, step: u64) -> Option<ToSender<K>> {
        let InState::Announced(edge) = self.state else { return None };
        if self.credit() > 0 || self.needs_of(step) > 0 {
            return None;
        }
        self.waiters.need(step);
        Some(ToSender::Need { edge, step })
    }

    /// A receive waits for a value of a step. The edge holds none of that step.
    pub fn wait(&mut self, step: u64, waiter: W) {
        self.waiters.push(step, waiter);
    }

    /// A receive gives up. Returns whether it was waiting. A value that it needed still comes, for
    /// the next receive of the step.
    pub fn give_up(&mut self, step: u64, waiter: &W) -> bool {
        self.waiters.give_up(step, waiter)
    }

    /// The next record of the edge, without its value, if a receive takes the value when it comes.
    /// The edge holds no value of the step.
    #[inline]
    pub fn next_record(&self, step: u64) -> Option<Record<()>> {
        let InState::Announced(edge) = self.state else { return None };
        let is_alone = self.waiters.is_empty() && self.credit() > 0;
        let n = (self.came + 1) as u16;
        is_alone.then_some(Record { edge, n, step, answers_need: false, value: () })
    }

    /// As [`InEdge::next_record`], if the edge holds no value and no message is due when the value
    /// has come.
    #[inline]
    pub fn next_short(&self, step: u64) -> Option<Record<()>> {
        (self.held.is_empty() && self.stays_settled()).then(|| self.next_record(step))?
    }

    /// The next record of the edge, without its value, if this waiter gets the value when it comes,
    /// and no message is due then.
    #[inline]
    pub fn record_of(&self, step: u64, waiter: &W) -> Option<Record<()>> {
        let InState::Announced(edge) = self.state else { return None };
        let is_settled = self.has_spare_credit() || is_on(Mutant::ShortEndKeepsCredit);
        let is_plain = self.waiters.is_next(step, waiter) && is_settled;
        let n = (self.came + 1) as u16;
        is_plain.then_some(Record { edge, n, step, answers_need: false, value: () })
    }

    /// The value of [`InEdge::record_of`] has come, and the waiter of the step has it.
    #[inline]
    pub fn took_for(&mut self, step: u64) {
        self.took();
        self.waiters.take(step);
    }

    /// The value of [`InEdge::next_record`] has come, and the receive has it. Does what
    /// [`InEdge::arrive`] and [`InEdge::take`] do.
    #[inline]
    pub fn took(&mut self) {
        self.came += 1;
    }

    /// Whether the next value of the edge has this number, and answers a need of the step.
    pub fn is_answer(&self, edge: EdgeId, n: u16, step: u64) -> bool {
        let is_next = matches!(self.state, InState::Announced(own) if own == edge);
        is_next && n == (self.came + 1) as u16 && self.needs_of(step) > 0
    }

    /// A value has come.
    ///
    /// # Errors
    /// If the value is not the next one of the edge, has no credit, or was not needed.
    pub fn arrive(&mut self, record: Record<V>, is_over: bool) -> Result<Arrived<V, W>, WindowViolation> {
        let (InState::Announced(edge) | InState::Retiring(edge)) = self.state else {
            return Err(WindowViolation("a value of an edge without a number"));
        };
        let Record { n, step, answers_need, value, .. } = record;
        if record.edge != edge {
            return Err(WindowViolation("a value of another generation of its edge"));
        }
        let came = self.came + 1;
        if n != came as u16 {
            return Err(WindowViolation("a value that is not the next of its edge"));
        }
        if answers_need {
            if !self.waiters.answered(step) && !is_over {
                return Err(WindowViolation("a value that was not needed"));
            }
            self.answers += 1;
        } else if came - self.answers > self.granted {
            return Err(WindowViolation("a value without credit"));
        }
        self.came = came;
        if matches!(self.state, InState::Retiring(_)) && !is_on(Mutant::RetirementNotVoid) {
            // The sender sees in the retirement that this value was under way.
            self.state = InState::Announced(edge);
        }
        if is_over {
            self.occupied += u64::from(is_on(Mutant::DroppedValueOccupies) && !answers_need);
            return Ok(Arrived::Dropped(value));
        }
        let held = Held { step, order: self.last(), in_window: !answers_need, is_taken: false, value };
        if let Some(waiter) = self.waiters.take(step) {
            return Ok(Arrived::For(waiter, held));
        }
        self.occupied += u64::from(held.in_window);
        self.held.push(held);
        Ok(Arrived::Held)
    }

    /// The value did not fit its receive, and is in its place again. Returns the next waiter to
    /// try, with the value.
    pub fn put_back(&mut self, held: Held<V>) -> Option<(W, Held<V>)> {
        if let Some(waiter) = self.waiters.take(held.step) {
            return Some((waiter, held));
        }
        let is_earlier =
            |other: &Held<V>| other.order < held.order || (is_on(Mutant::PutBackLast) && other.is_taken);
        let at = self.held.partition_point(is_earlier);
        self.occupied += u64::from(held.in_window);
        self.held.insert(at, held);
        None
    }

    /// The next message for the sender: credit, or a need if it `may_need` a value. The caller
    /// repeats this until `None` after each change. When credit goes back, the window grows to
    /// `window` cells.
    pub fn next_message<K>(&mut self, window: u64, may_need: bool) -> Option<ToSender<K>> {
        let InState::Announced(edge) = self.state else { return None };
        let back = self.grantable() - self.granted;
        let is_short = self.credit() == 0 && !self.waiters.is_empty();
        // The usual edge is not flushed, and computes nothing.
        let is_batch =
            back >= self.credit_batch && (self.flush.is_none() || back >= credit_batch(self.window));
        let is_due = is_batch || (is_short && back > 0);
        let is_flushed = self.flush.is_some_and(|told| self.held.len() < told);
        if is_due || is_flushed {
            if is_on(Mutant::CreditNotReturned) {
                return None;
            }
            if is_due {
                self.set_window(self.window.max(window));
                self.make_room();
            }
            self.granted = self.grantable() + u64::from(is_on(Mutant::CreditPastWindow));
            let held = self.held.len();
            self.set_flush(self.flush.map(|_| held).filter(|held| *held > 0 && !is_on(Mutant::FlushedOnce)));
            // At most a window of values, and those that receives have taken and that are on their
            // way.
            let taken = Taken { came: self.came, held: held as u32 };
            return Some(ToSender::Credit { edge, limit: self.granted, taken });
        }
        if !is_short || !may_need {
            return None;
        }
        let step = self.waiters.first_unasked()?;
        self.waiters.need(step);
        Some(ToSender::Need { edge, step })
    }

    /// Whether a receive waits whose value has to be asked for.
    pub fn has_unasked(&mut self) -> bool {
        let is_short = matches!(self.state, InState::Announced(_)) && self.credit() == 0;
        is_short && self.waiters.first_unasked().is_some()
    }

    /// Whether the edge has a number, credit at the sender, and no message to send.
    #[inline]
    pub fn is_settled(&self) -> bool {
        matches!(self.state, InState::Announced(_))
            && self.grantable() - self.granted < self.credit_batch
            && self.credit() > 0
    }

    /// Whether the edge [is settled](InEdge::is_settled) when the value of [`InEdge::next_record`]
    /// has come.
    #[inline]
    pub fn stays_settled(&self) -> bool {
        matches!(self.state, InState::Announced(_)) && self.waiters.is_empty() && self.has_spare_credit()
    }

    /// Whether neither credit nor a need is due when a receive has taken the next value.
    #[inline]
    fn has_spare_credit(&self) -> bool {
        let credit = self.credit();
        self.free() + 1 - credit < self.credit_batch && credit > 1
    }

    /// Steps have ended at the sender. Returns their waiters, which fail, and their held values. A
    /// value that a receive has taken stays.
    pub fn sender_ended(&mut self, is_over: impl Fn(u64) -> bool) -> (Vec<W>, Vec<V>) {
        self.waiters.end_needs(&is_over, |_| {});
        self.end(is_over, is_on(Mutant::TakenEndsWithSender))
    }

    /// Steps have ended here. Returns their waiters, which fail, and their held values, taken or
    /// not. Hands the messages for the sender to `post`.
    pub fn end_steps<K>(
        &mut self,
        is_over: impl Fn(u64) -> bool,
        post: &mut impl FnMut(ToSender<K>),
    ) -> (Vec<W>, Vec<V>) {
        if let InState::Announced(edge) = self.state {
            self.waiters.end_needs(&is_over, |step| {
                if !is_on(Mutant::UnneedNotSent) {
                    post(ToSender::Unneed { edge, step });
                }
            });
        }
        self.end(is_over, true)
    }

    /// The sender's life has ended. Returns the waiters, which fail. The held values stay.
    pub fn lost(&mut self) -> Vec<W> {
        self.state = InState::Unannounced;
        self.set_flush(None);
        if is_on(Mutant::OccupiedCellsIgnored) {
            self.occupied = 0;
        }
        self.waiters.end_all()
    }

    /// Every step ends, on an edge without a number. Returns as [`InEdge::end_steps`].
    pub fn end_all(&mut self) -> (Vec<W>, Vec<V>) {
        self.end(|_| true, true)
    }

    /// A receive takes the first value of a step, which is still on its way. The value stays in the
    /// edge, in its place.
    pub fn take_in_place(&mut self, step: u64) -> Option<&mut V> {
        let held = self.held.iter_mut().find(|held| held.is_free(step))?;
        self.occupied -= u64::from(std::mem::take(&mut held.in_window));
        held.is_taken = true;
        Some(&mut held.value)
    }

    /// Holds the last value that came, which a receive has taken and which is still on its way.
    pub fn hold_taken(&mut self, step: u64, value: V) {
        self.held.push(Held { step, order: self.last(), in_window: false, is_taken: true, value });
    }

    /// The receive that has taken a value gives up. Returns the next waiter, which has taken the
    /// value now.
    pub fn leave_taken(&mut self, is_it: impl Fn(&V) -> bool) -> Option<W> {
        let at = self.held.iter().position(|held| held.is_taken && is_it(&held.value))?;
        let is_passed_on = !is_on(Mutant::LeftValueNotPassedOn);
        let next = is_passed_on.then(|| self.waiters.take(self.held[at].step)).flatten();
        self.held[at].is_taken = next.is_some();
        next
    }

    /// Removes a value that a receive has taken and got.
    pub fn remove_taken(&mut self, is_it: impl Fn(&V) -> bool) -> Option<Held<V>> {
        let at = self.held.iter().position(|held| held.is_taken && is_it(&held.value))?;
        Some(self.held.remove(at))
    }

    /// Replaces a held value.
    pub fn replace_held(&mut self, is_it: impl Fn(&V) -> bool, value: V) {
        if let Some(held) = self.held.iter_mut().find(|held| is_it(&held.value)) {
            held.value = value;
        }
    }

    /// Drops the held values that `is_lost`.
    pub fn drop_held_if(&mut self, is_lost: impl Fn(&V) -> bool) -> Vec<V> {
        let dropped: Vec<_> = self.held.extract_if(.., |held| is_lost(&held.value)).collect();
        self.occupied -= dropped.iter().filter(|held| held.in_window).count() as u64;
        dropped.into_iter().map(|held| held.value).collect()
    }

    /// Reserves the memory of the window, so that a value later costs none.
    fn make_room(&mut self) {
        self.held.reserve((self.window as usize).saturating_sub(self.held.len()));
        self.waiters.make_room();
    }

    /// The limit that can be announced now.
    fn grantable(&self) -> u64 {
        self.came - self.answers + self.free()
    }

    /// Free cells.
    fn free(&self) -> u64 {
        self.window.saturating_sub(self.occupied)
    }

    fn set_window(&mut self, window: u64) {
        self.window = window;
        self.set_flush(self.flush);
    }

    fn set_flush(&mut self, flush: Option<usize>) {
        self.flush = flush;
        self.credit_batch = if flush.is_some() { 0 } else { credit_batch(self.window) };
    }

    fn end(&mut self, is_over: impl Fn(u64) -> bool, with_taken: bool) -> (Vec<W>, Vec<V>) {
        let waiters = self.waiters.end(|step| is_over(step) && !is_on(Mutant::StepsOverMissesWaiter));
        let mut values = Vec::new();
        let is_ended = |held: &mut Held<V>| is_over(held.step) && (with_taken || !held.is_taken);
        for held in self.held.extract_if(.., is_ended) {
            self.occupied -= u64::from(held.in_window);
            values.push(held.value);
        }
        (waiters, values)
    }
}
