//! Windows grow as values come, within the cells that all edges have.

use crate::protocol::{InEdges, Incoming, Record, ToReceiver, ToSender, WindowOptions};
use crate::wire::EdgeId;

const OPTIONS: WindowOptions = WindowOptions {
    first_window: 2,
    usual_window: 16,
    largest_window: 16,
    max_cells: 64,
    max_edges: 64,
    kept_edges: 64,
    max_needs: 64,
    resends: false,
};

/// A receiver, and what its sender knows of each edge.
struct Scene {
    edges: InEdges<u8, u8, u8, u8>,
    /// Index, number, limit, and values sent.
    known: Vec<(u32, EdgeId, u64, u64)>,
}

impl Scene {
    /// A receiver that has announced so many edges.
    fn new(edges: u8) -> Self {
        let mut scene = Scene { edges: InEdges::new(OPTIONS), known: Vec::new() };
        (0..edges).for_each(|_| scene.announce());
        scene
    }

    fn announce(&mut self) {
        let index = self.edges.edge(&(self.known.len() as u8));
        let mut known = None;
        self.edges.widen(index, 0, &mut |message| match message {
            ToSender::Announce { edge, limit, .. } => known = Some((index, edge, limit, 0)),
            other => panic!("{other:?}"),
        });
        self.known.push(known.expect("announced"));
    }

    /// Sends as many values as an edge has credit for, and takes them.
    fn use_up_credit(&mut self, at: usize) {
        let (index, edge, limit, sent) = &mut self.known[at];
        while *sent < *limit {
            *sent += 1;
            let record = Record { edge: *edge, n: *sent as u16, step: 1, answers_need: false, value: 0 };
            let came =
                self.edges.receive(ToReceiver::Record(record), |_| false, &mut |_| panic!("no credit"));
            assert_eq!(came, Ok(Incoming::Nothing), "the value is held");
        }
        while self.edges.take_if(*index, 1, |_| true).is_some() {}
        self.edges.send_due(*index, &mut |message| match message {
            ToSender::Credit { limit: to, .. } => *limit = to,
            other => panic!("{other:?}"),
        });
    }

    fn windows(&self) -> Vec<u64> {
        self.edges.edges().map(|(_, _, edge)| edge.window()).collect()
    }
}

#[test]
fn the_window_of_an_edge_doubles_with_each_credit_up_to_the_usual_size() {
    let mut scene = Scene::new(2);
    for window in [4, 8, 16, 16] {
        scene.use_up_credit(1);
        assert_eq!(scene.windows(), [2, window], "the other edge is not used");
    }
}

#[test]
fn edges_that_are_used_alike_grow_alike() {
    let mut scene = Scene::new(8);
    for _ in 0..4 {
        (0..8).for_each(|at| scene.use_up_credit(at));
    }
    // Three quarters of 64 cells. The first edges get the rest that is no full step for all.
    assert_eq!(scene.windows(), [8, 8, 8, 8, 4, 4, 4, 4]);
    assert_eq!(scene.edges.cells(), 48);
}

#[test]
fn edges_that_come_later_have_their_first_window() {
    let mut scene = Scene::new(3);
    for _ in 0..3 {
        (0..3).for_each(|at| scene.use_up_credit(at));
    }
    assert_eq!(scene.windows(), [16; 3]);
    (3..5).for_each(|_| scene.announce());
    (3..5).for_each(|at| scene.use_up_credit(at));
    assert_eq!(scene.windows(), [16, 16, 16, 2, 2], "growth has used its part");
}
