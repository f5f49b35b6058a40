//! What holds in every state, when nothing is under way, and in the end.

use super::case::{Act, Case};
use super::{Call, Error, Fate, Held, InState, Key, Step, ToReceiver, UNSERVED, Value, World};

impl World {
    pub(super) fn moving_values(&self) -> impl Iterator<Item = Value> {
        self.to_receiver.iter().filter_map(|message| match message {
            ToReceiver::Record(record) => Some(record.value),
            _ => None,
        })
    }

    pub(super) fn sender_values(&self) -> impl Iterator<Item = Value> {
        self.sender.edges().flat_map(|(_, edge)| edge.waiting().map(|(_, value)| *value))
    }

    fn kept_values(&self) -> impl Iterator<Item = Value> {
        self.sender.edges().flat_map(|(_, edge)| edge.kept().map(|record| record.value))
    }

    pub(super) fn receiver_values(&self) -> impl Iterator<Item = Value> {
        self.receiver.edges().flat_map(|(_, _, edge)| edge.held().iter().map(|held| held.value))
    }

    /// What holds in every state.
    pub(super) fn check(&self, case: &Case) {
        for (value, fate) in self.fates.iter().enumerate() {
            let is = |of: &Value| usize::from(*of) == value;
            let places = self.moving_values().filter(is).count()
                + self.sender_values().filter(is).count()
                + self.receiver_values().filter(is).count();
            let kept = self.kept_values().filter(is).count();
            match fate {
                Fate::Moving if case.options.resends => {
                    assert!(places == 1 || (places == 0 && kept == 1), "value {value} is in {places} places");
                }
                Fate::Moving => assert_eq!(places, 1, "places of value {value}"),
                _ => assert_eq!(places, 0, "places of value {value}, which is {fate:?}"),
            }
        }
        let under_way = self.to_receiver.len().max(self.to_sender.len());
        assert!(under_way < 32, "{under_way} messages are under way");
        let windows: u64 = self.receiver.edges().map(|(_, _, edge)| edge.window()).sum();
        assert_eq!(self.receiver.cells(), windows, "cells of all windows");
        assert!(windows <= case.options.max_cells, "{windows} cells are given out");
        let needs: usize = self.receiver.edges().map(|(_, _, edge)| edge.needs()).sum();
        assert_eq!(self.receiver.needs(), needs, "needs of all edges");
        for (_, key, edge) in self.receiver.edges() {
            let coming = self.to_receiver.iter().filter(|message| {
                let InState::Announced(id) = edge.state() else { return false };
                matches!(message, ToReceiver::Record(record) if record.edge == *id && !record.answers_need)
            });
            let cells = coming.count() as u64 + edge.occupied();
            let occupied = edge.held().iter().filter(|held| held.in_window).count() as u64;
            assert_eq!(edge.occupied(), occupied, "occupied cells of edge {key}");
            let in_order = |pair: &[Held<Value>]| pair[0].value < pair[1].value;
            let mut held = edge.held().to_vec();
            held.sort_by_key(|held| held.step);
            let of_a_step = held.chunk_by(|one, next| one.step == next.step);
            let mut pairs = of_a_step.flat_map(|held| held.windows(2));
            assert!(pairs.all(in_order), "the values of edge {key} are not in their order: {held:?}");
            assert!(cells <= case.options.largest_window, "{cells} cells of edge {key} are in use");
        }
        self.check_counts(case);
        self.check_untaken(case);
        let nothing_moves = self.to_receiver.is_empty() && self.to_sender.is_empty();
        if nothing_moves && self.untold.is_empty() && self.sender_up && self.receiver_up {
            self.check_quiet(case);
        }
    }

    /// A sender knows of each value that may not have been taken.
    fn check_untaken(&self, case: &Case) {
        // Values of an earlier life of the sender may be held.
        let has_earlier_life = case.programs.iter().flatten().any(|act| *act == Act::SenderReturns);
        for (_, key, edge) in self.receiver.edges().filter(|_| !has_earlier_life) {
            let (InState::Announced(id) | InState::Retiring(id)) = edge.state() else {
                assert!(edge.held().is_empty(), "edge {key} holds values without a number");
                continue;
            };
            let moving = self
                .to_receiver
                .iter()
                .filter(|message| matches!(message, ToReceiver::Record(record) if record.edge == *id));
            let out = self.sender.edges().find(|(of, _)| *of == key).map(|(_, edge)| edge);
            let known = out.map_or(0, |out| out.untaken());
            let untaken = (moving.count() + edge.held().len()) as u64;
            assert!(known >= untaken, "{known} of {untaken} values of edge {key} are known");
        }
    }

    /// What holds when nothing is under way.
    fn check_quiet(&self, case: &Case) {
        let has_number = |state: &InState<Error>| matches!(state, InState::Announced(_));
        let numbers = self.receiver.edges().filter(|(_, _, edge)| has_number(edge.state())).count() as u32;
        let out = |key: Key| self.sender.edges().find(|(of, _)| **of == key).map(|(_, edge)| edge);
        let is_full = self.receiver.needs() >= case.options.max_needs as usize;
        for (_, key, edge) in self.receiver.edges() {
            let id = out(*key).and_then(|out| out.id());
            match edge.state() {
                InState::Announced(announced) => assert_eq!(id, Some(*announced), "edge {key}"),
                InState::Unannounced => assert_eq!(id, None, "edge {key}"),
                InState::Retiring(_) => panic!("the end of edge {key} was not told"),
                InState::Refused(_) => {}
            }
            if id.is_some() {
                assert_eq!(out(*key).map(|out| out.credit()), Some(edge.credit()), "credit of edge {key}");
            }
            if let Some(out) = out(*key).filter(|out| out.is_flushed()) {
                assert_eq!(out.untaken(), edge.held().len() as u64, "untaken values of edge {key}");
            }
            let needs = out(*key).map_or(0, |out| out.needs());
            assert_eq!(needs, edge.needs(), "needs of edge {key}");
            for (step, waiter) in edge.waiters() {
                assert!(edge.first(*step).is_none(), "{waiter} waits for a value that is here");
                let waiting = out(*key).is_some_and(|out| out.waiting().any(|(of, _)| of == step));
                let numberless = *edge.state() == InState::Unannounced && numbers == case.options.max_edges;
                assert!(!waiting || numberless || is_full, "{waiter} waits for a value that its sender has");
            }
        }
    }

    /// Each end knows of each step whether any edge has something of it.
    fn check_counts(&self, case: &Case) {
        self.sender.check_counts();
        let (values, calls) = (case.values(), case.calls());
        let steps = values.iter().map(|(_, step)| *step);
        for step in steps.chain(calls.iter().map(|call| call.step)) {
            let has_none = self.receiver.edges().all(|(_, _, edge)| {
                let mut steps = edge.held().iter().map(|held| held.step).chain(edge.needed());
                !steps.any(|of| of == step) && edge.waiters().all(|(of, _)| *of != step)
            });
            assert_eq!(self.receiver.is_quiet(step), has_none, "whether step {step} has nothing");
        }
    }

    /// The state after every step has ended on both sides and every edge was retired.
    pub(super) fn check_end(mut self, case: &Case) {
        let mut steps: Vec<_> = case.values().iter().map(|(_, step)| *step).collect();
        steps.extend(case.calls().iter().map(|call| call.step));
        steps.sort_unstable();
        steps.dedup();
        for step in steps {
            if !self.over_at_receiver.contains(&step) {
                self.act(case, Act::EndHere(step), 0, 0);
            }
            self.act(case, Act::End(step), 0, 0);
        }
        self.deliver_all(case);
        let is_open = |call: &&Call| matches!(call, Call::Waits | Call::Took(_));
        let calls: Vec<_> = self.calls.iter().filter(is_open).collect();
        assert!(calls.is_empty(), "a receive hangs: {:?}", self.calls);
        for _ in 0..2 {
            let keys: Vec<_> = self.receiver.edges().map(|(_, key, _)| *key).collect();
            keys.into_iter().for_each(|key| self.act(case, Act::Retire(key), 0, 0));
            self.deliver_all(case);
        }
        let left = self.receiver.edges().filter(|(_, key, _)| **key != UNSERVED).count();
        assert_eq!((left, self.sender.edges().count()), (0, 0), "edges are left: {self:?}");
    }

    /// Delivers everything that is under way.
    fn deliver_all(&mut self, case: &Case) {
        for _ in 0..1000 {
            let is_network = |step: &Step| !matches!(step, Step::Program(_));
            let Some(step) = self.steps(case).into_iter().find(is_network) else { return };
            self.take(case, step).unwrap_or_else(|violation| panic!("{violation}"));
        }
        panic!("the link is never quiet: {self:?}");
    }
}
