//! The ends of steps, and of all values of a life of the peer.

use super::{InEdge, InEdges, Incoming, ToSender};
use crate::protocol::StepsOver;
use std::ops::RangeInclusive;

impl<K: Ord + Clone, V, W: PartialEq, E: Clone + PartialEq> InEdges<K, V, W, E> {
    /// Steps have ended here. Returns their waiters, which fail, and their held values.
    pub fn end_steps(
        &mut self,
        steps: &RangeInclusive<u64>,
        post: &mut impl FnMut(ToSender<K>),
    ) -> (Vec<W>, Vec<V>) {
        if !self.counts.has_any(steps, |_| true) {
            return (Vec::new(), Vec::new());
        }
        let ends = |step| steps.contains(&step);
        self.end(ends, |edge, post| edge.end_steps(ends, post), post)
    }

    /// Steps have ended at the peer.
    pub(super) fn end_at_sender(
        &mut self,
        over: StepsOver<E>,
        post: &mut impl FnMut(ToSender<K>),
    ) -> Incoming<V, W, E> {
        let (error, mut ended) = (over.error.clone(), (Vec::new(), Vec::new()));
        // A step that was over before has values at most that receives have taken.
        if self.counts.has_any(&(over.first..=over.last), |step| self.over.error(step).is_none()) {
            let ends = |step| over.includes(step);
            ended = self.end(ends, |edge, _| edge.sender_ended(ends), post);
        }
        self.over.add(over);
        Incoming::Ended(ended.0, ended.1, error)
    }

    /// Whether no edge has a value, a waiter or a need of a step.
    #[inline]
    pub fn is_quiet(&self, step: u64) -> bool {
        self.counts.is_empty(step)
    }

    /// Ends steps on each busy edge that has something of them.
    fn end<P: FnMut(ToSender<K>)>(
        &mut self,
        ends: impl Fn(u64) -> bool,
        end: impl Fn(&mut InEdge<V, W, E>, &mut P) -> (Vec<W>, Vec<V>),
        post: &mut P,
    ) -> (Vec<W>, Vec<V>) {
        let mut all = (Vec::new(), Vec::new());
        let mut busy = std::mem::take(&mut self.busy);
        busy.sort_unstable();
        busy.dedup();
        for index in &busy {
            let Some(named) = self.edges.get_mut(*index) else { continue };
            named.is_busy = false;
            let mut has_any = false;
            for step in steps_of(&named.edge).filter(|step| ends(*step)) {
                self.counts.remove(step);
                has_any = true;
            }
            if !has_any {
                continue;
            }
            let needs = named.edge.needs();
            let (waiters, values) = end(&mut named.edge, post);
            self.needs -= needs - named.edge.needs();
            steps_of(&named.edge).filter(|step| ends(*step)).for_each(|step| self.counts.add(step));
            all.0.extend(waiters);
            all.1.extend(values);
            self.send_due(*index, post);
        }
        // The lists take turns, so that none is allocated again.
        let noted = std::mem::take(&mut self.busy);
        noted.iter().for_each(|index| self.unlist(*index));
        busy.extend(noted);
        busy.retain(|index| self.is_still_busy(*index));
        self.busy = busy;
        self.send_unasked(post);
        all
    }

    /// Drops the held values, which are of a life that ended. No receive waits.
    pub fn drop_held(&mut self) -> Vec<V> {
        self.end(|_| true, |edge, _| edge.end_all(), &mut |_| {}).1
    }

    /// Drops the held values that `is_lost`. The peer's life has ended, and no receive waits.
    pub fn drop_held_if(&mut self, is_lost: impl Fn(&V) -> bool) -> Vec<V> {
        self.end(|_| true, |edge, _| (Vec::new(), edge.drop_held_if(&is_lost)), &mut |_| {}).1
    }

    /// Counts anew, after several waiters or values have left.
    pub(super) fn recount(&mut self) {
        let InEdges { edges, busy, counts, needs, .. } = self;
        counts.clear();
        *needs = 0;
        // It may have an edge twice, whose index was free meanwhile.
        busy.sort_unstable();
        busy.dedup();
        for index in busy.iter() {
            let Some(named) = edges.get(*index) else { continue };
            steps_of(&named.edge).for_each(|step| counts.add(step));
            *needs += named.edge.needs();
        }
    }
}

/// The step of each waiter, value and need of an edge.
fn steps_of<V, W: PartialEq, E: Clone>(edge: &InEdge<V, W, E>) -> impl Iterator<Item = u64> {
    let waiters = edge.waiters().map(|(step, _)| *step);
    waiters.chain(edge.held().iter().map(|held| held.step)).chain(edge.needed())
}
