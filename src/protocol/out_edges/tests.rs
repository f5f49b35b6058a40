//! What the ends of steps find, and how long they take.

use super::*;
use std::time::{Duration, Instant};

const OPTIONS: WindowOptions = WindowOptions {
    first_window: 2,
    usual_window: 8,
    largest_window: 8,
    max_cells: 1 << 20,
    max_edges: 1 << 16,
    kept_edges: 1 << 16,
    max_needs: 64,
    resends: false,
};

/// Edges on which values wait: one value for each key and step.
fn waiting(values: impl IntoIterator<Item = (u32, u64)>) -> OutEdges<u32, u64, u8> {
    let mut edges = OutEdges::new(OPTIONS);
    for (key, step) in values {
        let index = edges.edge(&key);
        edges.offer(index, step, step, &mut |_| panic!("no edge is announced"));
    }
    edges
}

/// The steps of the values that the end of steps drops.
fn dropped(edges: &mut OutEdges<u32, u64, u8>, steps: RangeInclusive<u64>) -> Vec<u64> {
    let mut dropped: Vec<_> = edges.drop_steps(&steps).into_iter().map(|(_, value)| value).collect();
    edges.check_counts();
    dropped.sort_unstable();
    dropped
}

#[test]
fn the_values_of_ended_steps_are_found_in_any_order() {
    let orders: [&[u64]; 4] = [&[1, 2, 2, 3, 9], &[9, 3, 2, 2, 1], &[2, 9, 1, 2, 3], &[3, 2, 9, 2, 1]];
    for order in orders {
        let mut edges = waiting(order.iter().flat_map(|step| [(0, *step), (1, *step)]));
        assert_eq!(dropped(&mut edges, 4..=8), [0; 0]);
        assert_eq!(dropped(&mut edges, 2..=3), [2, 2, 2, 2, 3, 3], "{order:?}");
        for (_, edge) in edges.edges() {
            let left = order.iter().filter(|step| ![2, 3].contains(*step));
            assert!(edge.waiting().map(|(step, _)| step).eq(left), "the others of {order:?} wait as before");
        }
        assert_eq!(dropped(&mut edges, 0..=u64::MAX), [1, 1, 9, 9]);
        assert_eq!(edges.edges().count(), 0);
    }
}

#[test]
fn the_end_of_a_step_does_not_take_the_longer_the_more_values_of_others_wait() {
    const COUNT: u64 = 20_000;
    let begin = Instant::now();
    // One step has values on all edges, and the others that end have none.
    let mut edges = waiting((0..COUNT as u32).map(|key| (key, 1)));
    (2..COUNT).for_each(|step| assert_eq!(edges.drop_steps(&(step..=step)), []));
    // Each step that ends has a value on the edge on which one waited first.
    let first = (1..COUNT).map(|step| (0, step));
    let mut edges = waiting(first.chain((1..COUNT as u32).map(|key| (key, COUNT))));
    (1..COUNT).for_each(|step| assert_eq!(edges.drop_steps(&(step..=step)).len(), 1));
    // Each step has one value, on the same two edges.
    let mut edges = waiting((0..2 * COUNT).map(|step| (step as u32 % 2, step)));
    let ends = (0..COUNT).chain((COUNT..2 * COUNT).rev());
    ends.for_each(|step| assert_eq!(edges.drop_steps(&(step..=step)).len(), 1));
    println!("{:?}", begin.elapsed());
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
}
