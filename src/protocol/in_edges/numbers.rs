//! The numbers of edges: given out, taken back, and given out again.

use super::InEdges;
use crate::mutants::{Mutant, is_on};
use crate::protocol::WindowViolation;
use crate::protocol::in_edge::InState;
use crate::protocol::message::ToSender;
use crate::wire::EdgeId;

/// Edges that [`InEdges`] examines for idle ones when it gives out a number. More than each new
/// edge needs, which is examined twice before it is retired.
const EXAMINED: u32 = 4;
/// Edges that [`InEdges`] retires at most when it gives out a number.
const RETIRED: u32 = 2;
/// Edges that [`InEdges`] retires at most when it has no number left.
const RETIRED_AT_END: u32 = 64;
/// Edges that [`InEdges`] remembers as refused.
const REFUSED: usize = 1024;

impl<K: Ord + Clone, V, W: PartialEq, E: Clone + PartialEq> InEdges<K, V, W, E> {
    /// The number of an edge that is announced, and not about to give the number back.
    pub fn announced(&self, index: u32) -> Option<EdgeId> {
        match self.edges.get(index)?.edge.state() {
            InState::Announced(edge) => Some(*edge),
            _ => None,
        }
    }

    /// Announces the edge if it has no number, and a receive waits on it or `is_wanted`.
    pub(super) fn announce(&mut self, index: u32, is_wanted: bool, post: &mut impl FnMut(ToSender<K>)) {
        let Some(named) = self.edges.get_mut(index) else { return };
        let is_wanted = is_wanted || named.edge.waiters().next().is_some();
        if !self.is_up || !is_wanted || *named.edge.state() != InState::Unannounced {
            return;
        }
        let number = match self.free.pop_front() {
            Some(number) => number,
            None if self.by_number.len() < self.options.max_edges as usize => {
                self.by_number.push((0, None));
                (self.by_number.len() - 1) as u32
            }
            None => {
                if !std::mem::replace(&mut named.is_unnumbered, true) {
                    self.unnumbered.push_back(index);
                }
                return self.retire_for_first(post);
            }
        };
        let entry = &mut self.by_number[number as usize];
        *entry = (entry.0.wrapping_add(1), Some(index));
        let edge = EdgeId { number, generation: entry.0 };
        named.seen = 0;
        post(named.edge.announce(edge, named.key.clone()));
        // Retires ahead of need, so that the next edge finds a free number.
        if self.by_number.len() - self.free.len() > self.options.kept_edges as usize {
            self.retire_idle(EXAMINED, RETIRED, post);
        }
    }

    /// Retires edges for the first edge that waits for a number. While edges wait, each edge that
    /// becomes idle is retired at once, so that the others need no search.
    #[cold]
    fn retire_for_first(&mut self, post: &mut impl FnMut(ToSender<K>)) {
        let count = match self.unnumbered.len() {
            // Twice each, as the first look at an edge may find it used.
            0 | 1 => self.edges.numbers().saturating_mul(2),
            _ => EXAMINED,
        };
        self.retire_idle(count, RETIRED_AT_END, post);
    }

    /// Examines `count` edges. Retires idle ones that received nothing since they were examined
    /// last, `most` of them. Those with a standing request are spared unless an edge waits.
    fn retire_idle(&mut self, count: u32, mut most: u32, post: &mut impl FnMut(ToSender<K>)) {
        for _ in 0..count {
            self.hand = if self.hand + 1 < self.edges.numbers() { self.hand + 1 } else { 0 };
            let Some(named) = self.edges.get_mut(self.hand) else { continue };
            let is_quiet = named.seen == named.edge.came();
            named.seen = named.edge.came();
            let may_retire = is_quiet && (!named.stands || !self.unnumbered.is_empty());
            if may_retire && self.retire(self.hand, post) {
                most -= 1;
                if most == 0 {
                    return;
                }
            }
        }
    }

    /// Remembers a refused edge, and forgets the one that was refused first beyond [`REFUSED`].
    pub(super) fn note_refused(&mut self, index: u32) {
        self.refused.push_back(index);
        if self.refused.len() > REFUSED
            && let Some(oldest) = self.refused.pop_front()
            && let Some(named) = self.edges.get_mut(oldest)
        {
            named.edge.forget_refusal();
            self.forget(oldest);
        }
    }

    pub(super) fn find(&self, edge: EdgeId) -> Result<u32, WindowViolation> {
        match self.by_number.get(edge.number as usize) {
            Some((generation, Some(index))) if *generation == edge.generation => Ok(*index),
            _ => Err(WindowViolation("a message for an edge without a number")),
        }
    }

    /// Frees a number. The edges that wait for one are announced while numbers are free.
    pub(super) fn release(&mut self, edge: EdgeId, post: &mut impl FnMut(ToSender<K>)) {
        self.by_number[edge.number as usize].1 = None;
        self.free.push_back(edge.number);
        while !self.free.is_empty()
            && let Some(index) = self.unnumbered.pop_front()
        {
            let Some(named) = self.edges.get_mut(index) else { continue };
            named.is_unnumbered = false;
            let stands = named.stands;
            if !is_on(Mutant::UnnumberedForgotten) {
                self.announce(index, stands, post);
                self.send_due(index, post);
            }
        }
    }

    /// Removes the edge if it is idle and has no number.
    pub(super) fn forget(&mut self, index: u32) {
        if let Some(named) = self.edges.get(index)
            && *named.edge.state() == InState::Unannounced
            && named.edge.is_idle()
            && !named.is_unnumbered
            && !named.stands
        {
            self.by_key.remove(&named.key);
            self.cells -= if is_on(Mutant::CellsNotFreed) { 0 } else { named.edge.window() };
            self.edges.remove(index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{Record, ToReceiver, WindowOptions};
    use std::collections::VecDeque;

    type TestEdges = InEdges<u32, (), (), ()>;

    const OPTIONS: WindowOptions = WindowOptions {
        first_window: 2,
        usual_window: 4,
        largest_window: 4,
        max_cells: 1 << 20,
        max_edges: 4,
        kept_edges: 4,
        max_needs: 4,
        resends: false,
    };

    fn edges(options: WindowOptions) -> TestEdges {
        let mut edges = InEdges::without_link(options);
        edges.returned();
        edges
    }

    /// A receive waits on an edge. Returns the messages of this.
    fn wait(edges: &mut TestEdges, key: u32) -> Vec<ToSender<u32>> {
        let (index, mut sent) = (edges.edge(&key), Vec::new());
        edges.wait(index, 1, (), &mut |message| sent.push(message));
        sent
    }

    fn announced(messages: &[ToSender<u32>]) -> Option<EdgeId> {
        messages.iter().find_map(|message| match message {
            ToSender::Announce { edge, .. } => Some(*edge),
            _ => None,
        })
    }

    fn come(edges: &mut TestEdges, message: ToReceiver<(), ()>) -> Vec<ToSender<u32>> {
        let mut sent = Vec::new();
        let number = match &message {
            ToReceiver::Record(Record { edge, .. }) => edges.find(*edge).ok(),
            _ => None,
        };
        edges.receive(message, |_| false, &mut |message| sent.push(message)).expect("honest");
        number.into_iter().for_each(|index| edges.send_due(index, &mut |message| sent.push(message)));
        sent
    }

    /// A receive takes the one value of an edge. Returns the edge's number.
    fn use_once(edges: &mut TestEdges, key: u32) -> EdgeId {
        let edge = announced(&wait(edges, key)).expect("a number is free");
        let record = Record { edge, n: 1, step: 1, answers_need: false, value: () };
        assert_eq!(come(edges, ToReceiver::Record(record)), [], "one value costs no credit");
        edge
    }

    #[test]
    fn edges_that_were_all_used_since_the_last_look_still_give_a_number_back() {
        let mut edges = edges(OPTIONS);
        (0..4).for_each(|key| _ = use_once(&mut edges, key));
        let sent = wait(&mut edges, 4);
        let retired = sent.iter().filter_map(|message| match message {
            ToSender::Retire { edge, .. } => Some(*edge),
            _ => None,
        });
        let retired: Vec<_> = retired.collect();
        assert!(!retired.is_empty() && announced(&sent).is_none(), "{sent:?}");
        let sent = come(&mut edges, ToReceiver::Retired { edge: retired[0] });
        assert!(announced(&sent).is_some(), "{sent:?}");
    }

    #[test]
    fn new_edges_leave_neither_numbers_nor_lists_behind() {
        let mut edges = edges(WindowOptions { max_edges: 64, kept_edges: 16, ..OPTIONS });
        for key in 0..10_000 {
            let sent = wait(&mut edges, key);
            let edge = announced(&sent).expect("a number is free");
            let record = Record { edge, n: 1, step: 1, answers_need: false, value: () };
            assert_eq!(come(&mut edges, ToReceiver::Record(record)), []);
            for message in sent {
                if let ToSender::Retire { edge, .. } = message {
                    come(&mut edges, ToReceiver::Retired { edge });
                }
            }
            edges.end_steps(&(1..=1), &mut |message| panic!("{message:?}"));
        }
        assert!(edges.edges.numbers() <= 64 && edges.by_key.len() <= 64, "{}", edges.edges.numbers());
        assert!(edges.busy.capacity() <= 512, "{}", edges.busy.capacity());
    }

    /// A standing request on an edge. Returns its messages.
    fn stand(edges: &mut TestEdges, key: u32) -> Vec<ToSender<u32>> {
        let (index, mut sent) = (edges.edge(&key), Vec::new());
        edges.widen(index, 4, &mut |message| sent.push(message));
        edges.set_standing(index, true);
        sent
    }

    #[test]
    fn an_edge_with_a_standing_request_keeps_its_number_beside_new_edges() {
        let mut edges = edges(WindowOptions { max_edges: 64, kept_edges: 16, ..OPTIONS });
        let standing = announced(&stand(&mut edges, 1000)).expect("a number is free");
        for key in 0..500 {
            let sent = wait(&mut edges, key);
            let edge = announced(&sent).expect("a number is free");
            let record = Record { edge, n: 1, step: 1, answers_need: false, value: () };
            come(&mut edges, ToReceiver::Record(record));
            for message in sent {
                if let ToSender::Retire { edge, .. } = message {
                    assert_ne!(edge, standing);
                    come(&mut edges, ToReceiver::Retired { edge });
                }
            }
        }
        let index = edges.edge(&1000);
        assert_eq!(edges.announced(index), Some(standing));
        edges.set_standing(index, false);
        assert!(edges.retire(index, &mut |_| {}));
        come(&mut edges, ToReceiver::Retired { edge: standing });
        assert!(!edges.by_key.contains_key(&1000), "it is forgotten");
    }

    #[test]
    fn an_edge_with_a_standing_request_is_announced_once_a_number_is_free() {
        let mut edges = edges(OPTIONS);
        (0..4).for_each(|key| _ = use_once(&mut edges, key));
        let sent = stand(&mut edges, 4);
        let [ToSender::Retire { edge, .. }, ..] = sent[..] else { panic!("{sent:?}") };
        assert!(announced(&come(&mut edges, ToReceiver::Retired { edge })).is_some());
    }

    #[test]
    fn edges_with_standing_requests_do_not_take_numbers_from_each_other_in_the_end() {
        let mut edges = edges(OPTIONS);
        (0..4).for_each(|key| _ = use_once(&mut edges, key));
        let mut under_way: VecDeque<_> = (10..13).flat_map(|key| stand(&mut edges, key)).collect();
        let mut turns = 0;
        while let Some(message) = under_way.pop_front() {
            if let ToSender::Retire { edge, .. } = message {
                under_way.extend(come(&mut edges, ToReceiver::Retired { edge }));
            }
            turns += 1;
            assert!(turns < 100, "they take turns for ever");
        }
        for key in 10..13 {
            let index = edges.edge(&key);
            assert!(edges.announced(index).is_some(), "{key}");
        }
    }

    #[test]
    fn a_receive_that_gives_up_leaves_its_number_to_an_edge_that_waits() {
        let mut edges = edges(OPTIONS);
        (0..4).for_each(|key| assert!(announced(&wait(&mut edges, key)).is_some()));
        assert_eq!(wait(&mut edges, 4), [], "no edge is idle");
        let (index, mut sent) = (edges.edge(&0), Vec::new());
        assert!(edges.give_up(index, 1, &()));
        edges.send_due(index, &mut |message| sent.push(message));
        let [ToSender::Retire { edge, .. }] = sent[..] else { panic!("{sent:?}") };
        assert!(announced(&come(&mut edges, ToReceiver::Retired { edge })).is_some());
    }

    #[test]
    fn edges_that_are_announced_in_a_row_get_numbers_in_a_row_again() {
        let options = WindowOptions { max_edges: 8, kept_edges: 8, ..OPTIONS };
        let mut edges = edges(options);
        let numbers = |edges: &mut TestEdges, keys: std::ops::Range<u32>| {
            keys.map(|key| use_once(edges, key).number).collect::<Vec<_>>()
        };
        assert_eq!(numbers(&mut edges, 0..8), [0, 1, 2, 3, 4, 5, 6, 7]);
        for key in 0..8 {
            let (index, mut sent) = (edges.edge(&key), Vec::new());
            assert!(edges.retire(index, &mut |message| sent.push(message)));
            let [ToSender::Retire { edge, .. }] = sent[..] else { panic!("{sent:?}") };
            come(&mut edges, ToReceiver::Retired { edge });
        }
        assert_eq!(numbers(&mut edges, 10..18), [0, 1, 2, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn many_large_windows_leave_the_usual_ones_to_others() {
        let options = WindowOptions { usual_window: 64, largest_window: 256, max_edges: 2000, ..OPTIONS };
        let mut edges = edges(WindowOptions { max_cells: 1 << 17, ..options });
        for key in 0..1000 {
            let index = edges.edge(&key);
            edges.widen(index, 128, &mut |_| {});
        }
        let windows: Vec<_> = edges.edges().map(|(_, _, edge)| edge.window()).collect();
        assert_eq!((windows[0], windows.iter().filter(|window| **window == 128).count()), (128, 128));
        assert!(windows.iter().all(|window| *window >= 64), "{windows:?}");
    }

    #[test]
    fn only_the_last_refused_edges_are_remembered() {
        let mut edges = edges(OPTIONS);
        let refused = |edges: &mut TestEdges, key| {
            let index = edges.edge(&key);
            edges.refusal(index, 1).is_some()
        };
        for key in 0..=REFUSED as u32 {
            let edge = announced(&wait(&mut edges, key)).expect("a number is free");
            come(&mut edges, ToReceiver::Refused { edge, error: () });
            assert!(refused(&mut edges, key), "{key}");
        }
        assert_eq!(edges.by_key.len(), REFUSED);
        assert_eq!(edges.cells, 2 * REFUSED as u64, "their cells are free again");
        assert!(!refused(&mut edges, 0) && refused(&mut edges, 1));
        assert!(announced(&wait(&mut edges, 0)).is_some(), "it is asked for again");
    }
}
