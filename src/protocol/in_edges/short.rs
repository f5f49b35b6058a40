//! What the thread that holds the poller does to an edge whose next value is the next message.

use super::{InEdge, InEdges, Record, ToSender};

impl<K: Ord + Clone, V, W: PartialEq, E: Clone + PartialEq> InEdges<K, V, W, E> {
    /// The edge with this index, if `is` knows its key and nothing hinders a value of the step.
    #[inline]
    pub fn plain_at(
        &mut self,
        index: u32,
        is: impl Fn(&K) -> bool,
        step: u64,
    ) -> Option<&mut InEdge<V, W, E>> {
        let named = self.edges.get_mut(index)?;
        let is_plain = self.unnumbered.is_empty() && self.over.error(step).is_none();
        (is(&named.key) && is_plain).then_some(&mut named.edge)
    }

    /// The next record of an edge, without its value, if a receive that holds the poller takes the
    /// value when it comes. The edge holds no value of the step.
    #[inline]
    pub fn next_record(&self, index: u32, step: u64) -> Option<Record<()>> {
        let named = self.edges.get(index).filter(|_| self.over.error(step).is_none())?;
        named.edge.next_record(step)
    }

    /// The next record of an edge, without its value, if this waiter of the step gets the value. No
    /// message is due then.
    #[inline]
    pub fn record_of(&self, index: u32, step: u64, waiter: &W) -> Option<Record<()>> {
        // The end of the step at the sender has ended the waiter.
        let named = self.edges.get(index).filter(|_| self.unnumbered.is_empty())?;
        named.edge.record_of(step, waiter)
    }

    /// The value of [`InEdges::record_of`] has come, and the waiter of the step has it.
    #[inline]
    pub fn took_for(&mut self, index: u32, step: u64) {
        if let Some(edge) = self.edge_mut(index) {
            edge.took_for(step);
            self.counts.remove(step);
        }
    }

    /// Whether no message is due when the value of [`InEdges::next_record`] has come.
    #[inline]
    pub fn stays_settled(&self, index: u32) -> bool {
        self.unnumbered.is_empty() && self.edges.get(index).is_some_and(|named| named.edge.stays_settled())
    }

    /// The value of [`InEdges::next_record`] has come, and the receive has it. Sends the messages
    /// that are due then, unless the edge [stays settled](InEdges::stays_settled).
    #[inline(always)] // on the short path
    pub fn took(&mut self, index: u32, stays_settled: bool, post: &mut impl FnMut(ToSender<K>)) {
        let Some(edge) = self.edge_mut(index) else { return };
        edge.took();
        match stays_settled {
            true => {}
            // The edge has a number, and stays known.
            false if self.unnumbered.is_empty() => _ = self.next_message(index, post),
            false => self.send_all_due(index, post),
        }
    }
}
