//! Credit of edges.

use crate::mutants::{Mutant, is_on};
use crate::wire::EdgeId;

/// The credit of edges with consecutive numbers, for which the receiver says the same.
///
/// The edges of a batch are used alike, so that one message gives credit to many of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EdgeCredits {
    /// The first edge. The others have the next numbers, and the same generation.
    pub first: EdgeId,
    /// Values that may be sent on each edge since its announcement.
    pub limit: u64,
    /// Values that came since the announcement.
    pub came: u64,
    /// Values that no receive has taken.
    pub held: u32,
    /// The number of edges, from 1 to [`EdgeCredits::MOST`].
    pub edges: u8,
}

impl EdgeCredits {
    /// The most edges of one message. More would save little, and let a peer cause much work.
    pub const MOST: u8 = 64;

    /// Whether there is a number for each edge.
    pub fn has_numbers(&self) -> bool {
        self.first.number.checked_add(u32::from(self.edges).saturating_sub(1)).is_some()
    }

    /// The edges, by their numbers.
    pub fn edges(&self) -> impl Iterator<Item = EdgeId> {
        let EdgeId { number, generation } = self.first;
        (0..u32::from(self.edges)).map(move |at| EdgeId { number: number.wrapping_add(at), generation })
    }

    /// Adds the credit of the next edge, if it says the same. Returns whether it did.
    #[inline]
    pub fn join(&mut self, next: &EdgeCredits) -> bool {
        let mut first = EdgeId { number: self.first.number.wrapping_add(self.edges.into()), ..self.first };
        if is_on(Mutant::AnyEdgeJoins) {
            first = next.first;
        }
        let joins = *next == EdgeCredits { first, edges: 1, ..*self } && self.edges < EdgeCredits::MOST;
        self.edges += u8::from(joins);
        joins
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: EdgeCredits =
        EdgeCredits { first: EdgeId { number: 7, generation: 3 }, limit: 12, came: 8, held: 1, edges: 1 };

    fn of_edge(number: u32) -> EdgeCredits {
        EdgeCredits { first: EdgeId { number, ..ONE.first }, ..ONE }
    }

    #[test]
    fn the_next_edges_join_and_each_has_its_number() {
        let mut credits = ONE;
        assert!((8..10).all(|number| credits.join(&of_edge(number))));
        let numbers: Vec<u32> = credits.edges().map(|edge| edge.number).collect();
        assert_eq!(numbers, [7, 8, 9]);
        assert!(credits.edges().all(|edge| edge.generation == 3));
    }

    #[test]
    fn an_edge_with_another_number_generation_or_credit_does_not_join() {
        let next = of_edge(8);
        let generation = EdgeId { generation: 4, ..next.first };
        for other in [
            of_edge(7),
            of_edge(9),
            EdgeCredits { first: generation, ..next },
            EdgeCredits { limit: 13, ..next },
            EdgeCredits { came: 9, ..next },
            EdgeCredits { held: 0, ..next },
            EdgeCredits { edges: 2, ..next },
        ] {
            let mut credits = ONE;
            assert!(!credits.join(&other), "{other:?}");
            assert_eq!(credits, ONE);
        }
    }

    #[test]
    fn a_message_is_full_with_the_most_edges() {
        let mut credits = ONE;
        let joined = (8..1000).take_while(|number| credits.join(&of_edge(*number))).count();
        assert_eq!(joined + 1, usize::from(EdgeCredits::MOST));
    }

    #[test]
    fn numbers_end_with_the_largest_of_32_bits() {
        let last = EdgeId { number: u32::MAX, generation: 3 };
        assert!(EdgeCredits { first: last, ..ONE }.has_numbers());
        assert!(!EdgeCredits { first: last, edges: 2, ..ONE }.has_numbers());
    }

    #[cfg(tensorwire_mutants)]
    #[test]
    fn each_bug_is_found() {
        use crate::mutants::assert_found;
        let by = an_edge_with_another_number_generation_or_credit_does_not_join;
        assert_found(Mutant::AnyEdgeJoins, by);
    }
}
