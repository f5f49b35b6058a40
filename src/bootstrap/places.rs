//! The places for connections: a bounded number for candidates, whose name is not proven yet, and
//! some for each member. A stranger never takes a member's place.
//!
//! Plain state: no I/O, no clock, no threads.

use crate::wire::{TaskId, source_of};
use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;

/// Candidates at a time.
pub(super) const MAX_CANDIDATES: usize = 128;
/// Candidates that keep their places because they have the secret. A member that makes more of them
/// leaves the other places to candidates without.
const MAX_WITH_SECRET: usize = MAX_CANDIDATES / 2;
/// Connections of one member. A node has one for calls of the bootstrap service, one for tensor
/// calls and one for the store. It has a further one while it replaces one of them.
pub(super) const MAX_OF_MEMBER: usize = 4;
/// Connections of all proven callers that the cluster does not have.
pub(super) const MAX_OF_OTHERS: usize = 8;

/// The places, with a value of type `C` for each candidate and `M` for each connection.
pub(super) struct Places<C, M> {
    next: u64,
    candidates: Vec<CandidatePlace<C>>,
    /// By name; `None` for callers that are no members. The oldest first.
    connections: BTreeMap<Option<TaskId>, VecDeque<(u64, M)>>,
}

struct CandidatePlace<C> {
    number: u64,
    source: IpAddr,
    has_opened: bool,
    /// It has the secret, and keeps its place.
    stays: bool,
    value: C,
}

impl<C, M> Places<C, M> {
    pub(super) fn new() -> Self {
        Places { next: 0, candidates: Vec::new(), connections: BTreeMap::new() }
    }

    /// A place for a candidate. If there is none, one of the addresses with the most candidates
    /// gives up its place. `draw` picks one of those that have sent an opening, or of those that
    /// have not, whichever are more. So a flood from one host does not keep out the members of
    /// others. One from a member's own host, or from as many hosts as there are places, keeps it
    /// out by chance only.
    ///
    /// The first [`MAX_WITH_SECRET`] candidates that have the cluster's secret give up no place.
    pub(super) fn admit(&mut self, from: IpAddr, value: C, draw: u64) -> (u64, Option<C>) {
        let evicted = (self.candidates.len() >= MAX_CANDIDATES).then(|| self.evict(draw));
        let number = self.number();
        let (source, has_opened, stays) = (source_of(from), false, false);
        self.candidates.push(CandidatePlace { number, source, has_opened, stays, value });
        (number, evicted)
    }

    fn evict(&mut self, draw: u64) -> C {
        let mut counts: BTreeMap<IpAddr, usize> = BTreeMap::new();
        for candidate in &self.candidates {
            *counts.entry(candidate.source).or_default() += 1;
        }
        // Less than all stay, so that one can go.
        let may_go = || self.candidates.iter().enumerate().filter(|(_, candidate)| !candidate.stays);
        let most = may_go().filter_map(|(_, candidate)| counts.get(&candidate.source)).max();
        let busiest = may_go().filter(|(_, candidate)| counts.get(&candidate.source) == most);
        let (opened, silent): (Vec<_>, Vec<_>) = busiest.partition(|(_, candidate)| candidate.has_opened);
        let drawn_from = if opened.len() > silent.len() { opened } else { silent };
        let (at, _) = drawn_from[(draw % drawn_from.len() as u64) as usize];
        self.candidates.swap_remove(at).value
    }

    /// The candidate has sent its opening, which shows the secret or not.
    pub(super) fn opened(&mut self, number: u64, has_secret: bool) {
        let stays = has_secret && self.candidates.iter().filter(|it| it.stays).count() < MAX_WITH_SECRET;
        if let Some(candidate) = self.candidates.iter_mut().find(|known| known.number == number) {
            (candidate.has_opened, candidate.stays) = (true, stays);
        }
    }

    /// The candidate has proven its name, or was refused.
    pub(super) fn dismiss(&mut self, number: u64) {
        self.candidates.retain(|known| known.number != number);
    }

    /// A place for a connection of that member, or of a caller that is no member. The oldest
    /// connection gives up its place if there is none: it has been replaced.
    pub(super) fn admit_proven(&mut self, name: Option<TaskId>, connection: M) -> (u64, Option<M>) {
        let number = self.number();
        let most = if name.is_some() { MAX_OF_MEMBER } else { MAX_OF_OTHERS };
        let places = self.connections.entry(name).or_default();
        let evicted = if places.len() >= most { places.pop_front() } else { None };
        places.push_back((number, connection));
        (number, evicted.map(|(_, connection)| connection))
    }

    /// A connection has ended.
    pub(super) fn leave(&mut self, name: &Option<TaskId>, number: u64) {
        if let Some(places) = self.connections.get_mut(name) {
            places.retain(|(known, _)| *known != number);
        }
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    const MEMBER: [u8; 4] = [10, 0, 0, 1];
    const STRANGER: [u8; 4] = [10, 0, 0, 2];

    #[test]
    fn a_flood_from_one_address_leaves_the_candidates_of_others_alone() {
        let mut places: Places<&str, ()> = Places::new();
        places.admit(MEMBER.into(), "member", 0);
        for draw in 0..10 * MAX_CANDIDATES as u64 {
            let (_, evicted) = places.admit(STRANGER.into(), "stranger", draw.wrapping_mul(0x9e37));
            assert_ne!(evicted, Some("member"));
        }
        assert_eq!(places.candidates.len(), MAX_CANDIDATES);
        assert!(places.candidates.iter().any(|candidate| candidate.value == "member"));
    }

    #[test]
    fn candidates_of_one_address_give_up_their_places_by_chance() {
        let mut places: Places<usize, ()> = Places::new();
        for number in 0..MAX_CANDIDATES {
            places.admit(STRANGER.into(), number, 0);
        }
        assert_eq!(places.admit(STRANGER.into(), 900, 5).1, Some(5));
    }

    #[test]
    fn silent_candidates_of_an_address_take_no_place_of_one_that_has_sent_its_opening() {
        let mut places: Places<&str, ()> = Places::new();
        let (member, _) = places.admit(STRANGER.into(), "member", 0);
        places.opened(member, false);
        for draw in 1..10 * MAX_CANDIDATES as u64 {
            assert_ne!(places.admit(STRANGER.into(), "silent", draw).1, Some("member"));
        }
    }

    #[test]
    fn candidates_with_an_opening_take_no_place_of_one_that_has_not_sent_its_own_yet() {
        let mut places: Places<&str, ()> = Places::new();
        places.admit(STRANGER.into(), "member", 0);
        for draw in 1..10 * MAX_CANDIDATES as u64 {
            let (number, evicted) = places.admit(STRANGER.into(), "opened", draw);
            assert_ne!(evicted, Some("member"));
            places.opened(number, false);
        }
    }

    #[test]
    fn an_opening_saves_no_place_of_the_busiest_address() {
        let mut places: Places<&str, ()> = Places::new();
        places.admit(MEMBER.into(), "member", 0);
        for draw in 1..2 * MAX_CANDIDATES as u64 {
            let (number, evicted) = places.admit(STRANGER.into(), "stranger", draw);
            assert_ne!(evicted, Some("member"));
            places.opened(number, false);
        }
    }

    #[test]
    fn no_flood_takes_the_place_of_a_candidate_that_has_the_secret() {
        for addresses in [1, MAX_CANDIDATES as u32] {
            let mut places: Places<&str, ()> = Places::new();
            let (member, _) = places.admit(STRANGER.into(), "member", 0);
            places.opened(member, true);
            for draw in 0..10 * MAX_CANDIDATES as u64 {
                let from = Ipv4Addr::from_bits(0x0a00_0002 + draw as u32 % addresses);
                let (number, evicted) = places.admit(from.into(), "stranger", draw.wrapping_mul(0x9e37));
                assert_ne!(evicted, Some("member"));
                if draw % 3 > 0 {
                    places.opened(number, false);
                }
            }
            assert_eq!(places.candidates.len(), MAX_CANDIDATES);
        }
    }

    #[test]
    fn a_member_that_fills_the_places_keeps_out_no_candidate_of_another_address() {
        let mut places: Places<&str, ()> = Places::new();
        for _ in 0..MAX_CANDIDATES - 1 {
            let (number, _) = places.admit(STRANGER.into(), "hostile", 0);
            places.opened(number, true);
        }
        assert_eq!(places.candidates.iter().filter(|it| it.stays).count(), MAX_WITH_SECRET);
        places.admit(MEMBER.into(), "member", 0);
        for draw in 0..10 * MAX_CANDIDATES as u64 {
            let (number, evicted) = places.admit(STRANGER.into(), "hostile", draw.wrapping_mul(0x9e37));
            assert_eq!(evicted, Some("hostile"));
            if draw % 2 > 0 {
                places.opened(number, true);
            }
        }
    }

    /// One candidate from each of as many addresses as there are places: a flood from many hosts.
    #[test]
    fn each_candidate_of_equally_busy_addresses_can_be_the_one_that_gives_up_its_place() {
        for per_address in [1, 2] {
            let addresses = (MAX_CANDIDATES / per_address) as u32;
            let mut evicted: Vec<usize> = (0..MAX_CANDIDATES as u64)
                .map(|draw| {
                    let mut places: Places<usize, ()> = Places::new();
                    for number in 0..MAX_CANDIDATES {
                        let address = Ipv4Addr::from_bits(0x0a00_0000 + number as u32 % addresses);
                        places.admit(address.into(), number, 0);
                    }
                    places.admit(STRANGER.into(), 900, draw).1.expect("no place is left")
                })
                .collect();
            evicted.sort_unstable();
            assert_eq!(evicted, (0..MAX_CANDIDATES).collect::<Vec<_>>(), "each by one draw");
        }
    }

    #[test]
    fn a_dismissed_candidate_makes_room() {
        let mut places: Places<usize, ()> = Places::new();
        let first = places.admit(MEMBER.into(), 0, 0).0;
        for number in 1..MAX_CANDIDATES {
            places.admit(STRANGER.into(), number, 0);
        }
        places.dismiss(first);
        assert_eq!(places.admit(STRANGER.into(), 500, 0).1, None);
    }

    #[test]
    fn members_have_places_of_their_own_and_the_newest_connection_counts() {
        let mut places: Places<(), u32> = Places::new();
        let name = |task| Some(TaskId::new("worker", task).unwrap());
        for number in 0..MAX_OF_OTHERS as u32 {
            assert_eq!(places.admit_proven(None, number).1, None);
        }
        assert_eq!(places.admit_proven(None, 100).1, Some(0));
        let mut numbers = Vec::new();
        for number in 0..MAX_OF_MEMBER as u32 {
            let (of, evicted) = places.admit_proven(name(1), number);
            assert_eq!(evicted, None);
            numbers.push(of);
        }
        assert_eq!(places.admit_proven(name(2), 7).1, None, "another member's place");
        places.leave(&name(1), numbers[0]);
        assert_eq!(places.admit_proven(name(1), 8).1, None, "it has left one");
        assert_eq!(places.admit_proven(name(1), 9).1, Some(1), "the oldest");
    }
}
