//! Edges with a standing request.

use super::InEdges;
use crate::protocol::WindowOptions;
use crate::protocol::message::ToSender;

impl<K: Ord + Clone, V, W: PartialEq, E: Clone + PartialEq> InEdges<K, V, W, E> {
    /// Announces an edge before a receive needs it, with a window of `window` cells if there are as
    /// many.
    pub fn widen(&mut self, index: u32, window: u64, post: &mut impl FnMut(ToSender<K>)) {
        let WindowOptions { usual_window, largest_window, max_cells, .. } = self.options;
        let (for_large, for_usual) = (self.spare(max_cells / 8), self.spare(max_cells * 3 / 4));
        let grown = self.edge_mut(index).map_or(0, |edge| {
            let before = edge.window();
            let window = window.min(largest_window);
            edge.widen(window.min(before + for_large).max(window.min(usual_window).min(before + for_usual)));
            edge.window() - before
        });
        self.cells += grown;
        self.announce(index, true, post);
        self.next_message(index, post);
    }

    /// Notes whether an edge has a standing request. Its tensors may land ahead of receives then.
    pub fn set_standing(&mut self, index: u32, stands: bool) {
        if let Some(named) = self.edges.get_mut(index) {
            (named.stands, named.lands_ahead) = (stands, stands);
        }
    }

    /// Receives of an edge give their tensors, so that nothing lands ahead of them.
    pub fn land_in_given(&mut self, index: u32) {
        if let Some(named) = self.edges.get_mut(index) {
            named.lands_ahead = false;
        }
    }

    /// Whether a tensor of an edge may land before its receive begins.
    pub fn lands_ahead(&self, index: u32) -> bool {
        self.edges.get(index).is_some_and(|named| named.lands_ahead)
    }
}
