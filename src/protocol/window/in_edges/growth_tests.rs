//! Windows grow as values come, within the cells that all edges have.

use crate::protocol::window::{InEdges, Incoming, Record, ToReceiver, ToSender, WindowOptions};
use std::cell::Cell;

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

type Edges = InEdges<u8, u8, u8, u8>;

/// Takes a window of values of each of these edges, as often as `rounds` says.
fn use_up_credit(edges: &mut Edges, keys: std::ops::Range<u8>, rounds: u64) {
    for key in keys {
        let (index, told, mut sent) = (edges.edge(&key), Cell::new(None), 0);
        let mut see = |message| match message {
            ToSender::Announce { edge, limit, .. } | ToSender::Credit { edge, limit } => {
                told.set(Some((edge, limit)));
            }
            other => panic!("{other:?}"),
        };
        edges.widen(index, 0, &mut see);
        for _ in 0..rounds {
            let (edge, limit) = told.get().expect("announced");
            while sent < limit {
                sent += 1;
                let record = Record { edge, n: sent as u16, step: 1, answers_need: false, value: key };
                let came = edges.receive(ToReceiver::Record(record), |_| false, &mut see);
                assert_eq!(came, Ok(Incoming::Nothing), "the value is held");
            }
            while edges.take(index, 1).is_some() {}
            edges.send_due(index, &mut see);
        }
    }
}

fn windows(edges: &Edges) -> Vec<u64> {
    edges.edges().map(|(_, _, edge)| edge.window()).collect()
}

#[test]
fn the_window_of_an_edge_grows_to_the_usual_size_once_it_is_used() {
    let mut edges = Edges::new(OPTIONS);
    use_up_credit(&mut edges, 0..1, 0);
    use_up_credit(&mut edges, 1..2, 1);
    assert_eq!(windows(&edges), [2, 16]);
}

#[test]
fn many_edges_grow_to_equal_shares() {
    let mut edges = Edges::new(OPTIONS);
    (0..8).for_each(|key| _ = edges.edge(&key));
    use_up_credit(&mut edges, 0..8, 3);
    // Three quarters of 64 cells.
    assert_eq!(windows(&edges), [6; 8]);
    assert_eq!(edges.cells(), 48);
}

#[test]
fn edges_that_come_later_take_what_is_left() {
    let mut edges = Edges::new(OPTIONS);
    use_up_credit(&mut edges, 0..3, 1);
    assert_eq!(windows(&edges), [16; 3]);
    use_up_credit(&mut edges, 3..5, 1);
    assert_eq!(windows(&edges), [16, 16, 16, 2, 2], "growth has used its part");
}
