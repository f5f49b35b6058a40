//! SIGKILL of either side in each phase of an exchange, and while a member joins, between real
//! processes.
//!
//! In the inline mode a process advances only in its calls. So a victim goes exactly to a phase,
//! which its counters show, reports it, and is killed there. Joining runs on threads; there the
//! time of the kill is random, and the phase is derived from the state of the survivor.
//!
//! `TENSORWIRE_TEST_KILLS` sets the least number of kills. The default is 60, and `tests/nightly`
//! uses 500.

mod joining;
mod survivor;
mod victim;

use crate::common::other::Other;
use crate::common::{cluster, lends_nothing};
use std::time::Duration;

/// Bound for the report of a death. On one host the kernel reports it at once, elsewhere the next
/// heartbeat.
pub(crate) const NEWS: Duration = Duration::from_secs(1);

/// Bytes of a large tensor.
pub(crate) const BULK: usize = 6 << 20;

/// The phase of an exchange in which the victim is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The announcement was sent, and there is no value yet.
    Announce,
    /// The bytes were written or lent, and the receiver has not taken them.
    Bulk,
    /// The receiver holds the value, or its offer, and no receive waits for it.
    Held,
    /// The receiver holds a borrowed tensor.
    Borrow,
    /// One side stops, and waits until its sent values are taken.
    Stop,
}

pub(crate) const PHASES: [Phase; 5] = [Phase::Announce, Phase::Bulk, Phase::Held, Phase::Borrow, Phase::Stop];

/// The phases of this fabric.
pub(crate) fn phases() -> impl Iterator<Item = Phase> + Clone {
    let lends = !lends_nothing();
    PHASES.into_iter().filter(move |phase| lends || *phase != Phase::Borrow)
}

/// The side that is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Killed {
    Sender,
    Receiver,
}

/// One cell of the matrix.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) kills: u32,
    /// Kills in which the victim was certainly in the phase.
    pub(crate) hits: u32,
    /// The longest time from a kill to the end of the survivor's call.
    pub(crate) longest: Duration,
}

impl Row {
    pub(crate) fn new(name: impl Into<String>) -> Self {
        Row { name: name.into(), kills: 0, hits: 0, longest: Duration::ZERO }
    }

    pub(crate) fn add(&mut self, hit: bool, news: Duration) {
        self.kills += 1;
        self.hits += u32::from(hit);
        self.longest = self.longest.max(news);
    }

    pub(crate) fn print(&self) {
        println!(
            "{:<42} {:>5} kills {:>5} hits   {:>8.1} ms at most",
            self.name,
            self.kills,
            self.hits,
            self.longest.as_secs_f64() * 1e3
        );
        assert!(self.hits > 0, "{} was never hit", self.name);
        assert!(self.longest < NEWS * 5, "{}: the bound is {NEWS:?}", self.name);
    }
}

/// Messages that a member receives while it joins: the two of the link's probe.
pub(crate) const PROBE: u64 = 2;

/// Kills per cell of the matrix.
pub(crate) fn rounds() -> u32 {
    let kills: u32 =
        std::env::var("TENSORWIRE_TEST_KILLS").map_or(60, |text| text.parse().expect("a number"));
    // At least 8 cells of an exchange, and 5 of a join for each of two sides.
    kills.div_ceil(18).max(1)
}

#[test]
fn a_kill_in_any_phase_ends_the_calls_that_need_the_peer_and_leaves_nothing() {
    Other::run_alone("kill_matrix::survivor::role_exchange_survivor", &cluster(2), &[]);
}

#[test]
fn a_kill_at_any_point_of_the_join_is_told_and_leaves_nothing() {
    for (survivor, victim) in [("0", "1"), ("1", "0")] {
        Other::run_alone(
            "kill_matrix::joining::role_join_survivor",
            &cluster(2),
            &[("TEST_ME", survivor), ("TEST_VICTIM", victim)],
        );
    }
}

#[test]
fn where_a_loss_is_fatal_a_death_before_the_link_is_up_ends_the_join_at_once() {
    for (survivor, victim) in [(0, "1"), (1, "0")] {
        let done = (0..20).any(|_| joining::join_with_the_doomed(survivor, victim));
        assert!(done, "each time the link was up before the kill");
    }
}
