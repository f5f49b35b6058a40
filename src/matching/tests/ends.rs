//! Steps whose ends the peers are told later.

use super::*;

impl Pair {
    /// Cleans a step up at a side that does not poll.
    fn clean_up(&mut self, side: usize, step: u64) {
        let Side { matching, lanes, .. } = &mut self.sides[side];
        matching.clean_up(lanes, step);
    }

    fn before_poll(&mut self, side: usize) {
        let Side { matching, lanes, .. } = &mut self.sides[side];
        matching.tell_ends(lanes);
    }

    /// The ranges of steps that the sender has told and that have not arrived.
    fn told(&self) -> Vec<(u64, u64)> {
        let ranges = self.sides[SENDER].lanes.to_receiver.iter().map(|message| match message {
            ToReceiver::StepsOver(over) => (over.first, over.last),
            other => panic!("{other:?}"),
        });
        ranges.collect()
    }
}

#[test]
fn ends_that_were_put_off_are_told_with_the_next_poll() {
    let mut pair = Pair::new(2);
    let mut call = pair.receive("x", 2);
    pair.run();
    (1..=3).for_each(|step| pair.clean_up(SENDER, step));
    pair.run();
    assert!(call.waits() && pair.told().is_empty());
    pair.before_poll(SENDER);
    assert_eq!(pair.told(), [(1, 3)]);
    pair.run();
    assert!(matches!(call.error(), Error::Remote { status, .. } if status.code == Code::NotFound));
    assert!(matches!(pair.receive("x", 3).error(), Error::Remote { .. }), "a late one fails at once");
    pair.before_poll(SENDER);
    assert!(pair.told().is_empty(), "once is enough");
    pair.end(4..=4);
}

#[test]
fn a_side_that_never_polls_tells_many_ends_too() {
    let mut pair = Pair::new(2);
    let call = pair.receive("x", 1000);
    pair.run();
    (0..63).for_each(|step| pair.clean_up(SENDER, step));
    assert!(pair.told().is_empty());
    pair.clean_up(SENDER, 63);
    assert_eq!(pair.told(), [(0, 63)]);
    (0..8).for_each(|n| pair.clean_up(SENDER, 100 + 10 * n));
    assert_eq!(pair.told().len(), 9);
    pair.run();
    assert!(call.waits());
    drop(call);
    pair.end(1000..=1000);
}

#[test]
fn a_value_of_a_step_that_was_cleaned_up_never_leaves() {
    let mut pair = Pair::new(1);
    let call = pair.receive("x", 9);
    pair.run();
    (1..=3).for_each(|number| pair.send("x", 1, number));
    pair.clean_up(SENDER, 1);
    pair.send("x", 1, 4);
    assert_eq!(pair.outstanding(), 0, "those that waited are dropped");
    pair.run();
    // The first one had left. It is taken, or dropped with the end of its step.
    assert_eq!(pair.receive("x", 1).number(), 1);
    let mut late = pair.receive("x", 1);
    pair.run();
    assert!(late.waits() || matches!(late.error(), Error::Remote { .. }));
    pair.before_poll(SENDER);
    pair.run();
    assert!(matches!(pair.receive("x", 1).error(), Error::Remote { .. }));
    pair.send("x", 9, 5);
    pair.run();
    drop((call, late));
    pair.end(9..=9);
}

#[test]
fn a_life_that_comes_before_the_ends_are_told_hears_of_them() {
    let mut pair = Pair::new(2);
    let _ = pair.receive("x", 1);
    pair.run();
    pair.clean_up(SENDER, 1);
    pair.lose();
    pair.up();
    let mut call = pair.receive("x", 1);
    pair.run();
    assert!(matches!(call.error(), Error::Remote { .. }));
    pair.before_poll(SENDER);
    pair.run();
    pair.end(2..=2);
}

#[test]
fn an_abort_is_told_at_once_and_its_cleanup_not_again() {
    let mut pair = Pair::new(2);
    let mut call = pair.receive("x", 5);
    pair.run();
    pair.clean_up(SENDER, 4);
    pair.step(SENDER, StepChange::Aborted { steps: 5..=5, status: Status::new(Code::Internal, "no") });
    pair.run();
    assert!(matches!(call.error(), Error::Remote { status, .. } if status.code == Code::Internal));
    pair.clean_up(SENDER, 5);
    pair.clean_up(SENDER, 6);
    pair.before_poll(SENDER);
    assert_eq!(pair.told(), [(6, 6)]);
    pair.run();
    let error = pair.receive("x", 5).error();
    assert!(matches!(error, Error::Remote { status, .. } if status.code == Code::Internal));
    pair.end(7..=7);
}

/// The peer decides how long the text is, and this process how many receives wait.
#[test]
fn a_long_error_that_ends_many_receives_is_whole_in_the_first_of_them() {
    const TEXT: usize = 16 << 20;
    let mut pair = Pair::new(2);
    let mut calls = ["x", "x", "y", "y", "z"].map(|name| pair.receive(name, 5));
    pair.run();
    let status = Status::new(Code::Internal, "e".repeat(TEXT)).with_details(vec![7; TEXT]);
    pair.step(SENDER, StepChange::Aborted { steps: 5..=5, status });
    pair.run();
    let mut lens = calls.each_mut().map(|call| match call.error() {
        Error::Remote { status, .. } => {
            assert!(status.message.len() == TEXT || status.message.ends_with("[cut from 16777216 bytes]"));
            (status.message.len(), status.details.len())
        }
        error => panic!("{error}"),
    });
    lens.sort_unstable();
    assert_eq!(lens, [(1024, 0), (1024, 0), (1024, 0), (TEXT, TEXT), (TEXT, TEXT)]);
}

#[test]
fn a_long_error_is_cut_in_many_receives_that_begin_after_it_came() {
    const TEXT: usize = 16 << 20;
    let mut pair = Pair::new(2);
    let mut waits = pair.receive("x", 5);
    pair.run();
    let status = Status::new(Code::Internal, "e".repeat(TEXT)).with_details(vec![7; 4000]);
    pair.step(SENDER, StepChange::Aborted { steps: 5..=5, status });
    pair.run();
    let mut late: Vec<Call> = (0..6).map(|_| pair.receive("x", 5)).collect();
    pair.run();
    let len = |call: &mut Call| match call.error() {
        Error::Remote { status, .. } => (status.message.len(), status.details.len()),
        error => panic!("{error}"),
    };
    assert_eq!(len(&mut waits), (TEXT, 4000));
    let lens: Vec<_> = late.iter_mut().map(len).collect();
    assert_eq!(lens, [vec![(TEXT, 4000); 4], vec![(4096, 4000); 2]].concat());
}

#[test]
fn an_aborted_range_is_told_as_one_and_a_peer_that_returns_hears_of_it() {
    let mut pair = Pair::new(1);
    pair.step(SENDER, StepChange::Sequence { base: 10 });
    let status = Status::new(Code::DataLoss, "the loss is NaN");
    let is_aborted = |error: Error| match error {
        Error::Remote { status: told, .. } => told == status.clone().into_derived(),
        _ => false,
    };
    let mut first = pair.receive("x", 9);
    let mut calls = [10, 11, 30].map(|step| pair.receive("x", step));
    pair.run();
    (0..3).for_each(|n| pair.send("x", 100 + n, 1));
    pair.send("y", 12, 2);
    assert_eq!(pair.outstanding(), 3, "two have no credit, one has no announcement");
    pair.run();
    pair.step(SENDER, StepChange::Aborted { steps: 10..=20, status: status.clone() });
    assert_eq!((pair.told(), pair.outstanding()), (vec![(10, 20)], 2), "it dropped the value of step 12");
    pair.run();
    let [last, aborted @ ..] = {
        let [a, b, c] = &mut calls;
        [c, a, b]
    };
    assert!(first.waits() && last.waits());
    aborted.into_iter().for_each(|call| assert!(is_aborted(call.error())));
    pair.send("x", 15, 3);
    assert_eq!(pair.outstanding(), 2, "a value of an aborted step is dropped");
    (10..=19).for_each(|step| pair.clean_up(SENDER, step));
    pair.before_poll(SENDER);
    assert!(pair.told().is_empty(), "the peer has heard of them");
    assert!(is_aborted(pair.receive("x", 19).error()));
    pair.lose();
    pair.up();
    for call in [&mut first, &mut calls[2]] {
        assert!(matches!(call.error(), Error::Stopped));
    }
    let mut calls = [19, 20].map(|step| pair.receive("z", step));
    let mut later = pair.receive("z", 21);
    pair.run();
    assert!(matches!(calls[0].error(), Error::Remote { status, .. } if status.code == Code::NotFound));
    assert!(is_aborted(calls[1].error()) && later.waits());
    pair.step(SENDER, StepChange::Aborted { steps: 21..=u64::MAX, status: status.clone() });
    pair.run();
    assert!(is_aborted(later.error()));
    assert_eq!(pair.outstanding(), 0);
    pair.end(100..=102);
}

#[test]
fn an_aborted_range_takes_back_each_need_of_its_steps() {
    let mut pair = Pair::new(1);
    let mut full = pair.receive("x", 1);
    pair.run();
    [1, 50].iter().for_each(|step| pair.send("x", *step, 7));
    pair.run();
    assert_eq!(full.number(), 7);
    let mut calls = [2, 3, 4, 2].map(|step| pair.receive("x", step));
    pair.run();
    let status = Status::new(Code::Internal, "no");
    pair.step(RECEIVER, StepChange::Sequence { base: 3 });
    pair.step(RECEIVER, StepChange::Aborted { steps: 3..=u64::MAX, status });
    let steps: Vec<u64> = [3, 4].to_vec();
    let unneeded = pair.sides[RECEIVER].lanes.to_sender.iter().filter_map(|message| match message {
        ToSender::Unneed { step, .. } => Some(*step),
        _ => None,
    });
    let mut unneeded: Vec<u64> = unneeded.collect();
    unneeded.sort_unstable();
    assert_eq!(unneeded, steps);
    let [a, b, c, d] = &mut calls;
    assert!(a.waits() && d.waits());
    for (call, id) in [(b, 3), (c, 4)] {
        assert!(matches!(call.error(), Error::Aborted { step, .. } if step.get() == id));
    }
    pair.run();
    [5, 6].iter().for_each(|number| pair.send("x", 2, *number));
    pair.run();
    assert_eq!((a.number(), d.number()), (5, 6));
    assert!(matches!(pair.receive("x", 50).error(), Error::Aborted { .. }), "its value is dropped");
    pair.end(1..=2);
}

#[cfg(tensorwire_mutants)]
#[test]
fn each_bug_is_found() {
    crate::mutants::assert_found(
        crate::mutants::Mutant::EndsNotTold,
        ends_that_were_put_off_are_told_with_the_next_poll,
    );
}

#[test]
fn a_peer_that_announces_an_edge_before_the_link_is_up_here_hears_of_each_step() {
    let mut pair = Pair::new(2);
    pair.lose();
    pair.sides[RECEIVER].lanes.is_down = false;
    pair.sides[RECEIVER].matching.up(TO_SENDER);
    let mut call = pair.receive("x", 1);
    pair.sides[SENDER].lanes.is_down = false;
    pair.run();
    pair.sides[SENDER].matching.up(TO_RECEIVER);
    pair.step(SENDER, StepChange::CleanedUp { step: 1 });
    pair.run();
    assert!(matches!(call.error(), Error::Remote { .. }));
    pair.end(2..=2);
}

#[test]
fn a_peer_that_announces_no_edge_hears_of_no_step() {
    let mut pair = Pair::new(2);
    for side in [SENDER, RECEIVER] {
        pair.step(side, StepChange::CleanedUp { step: 1 });
        assert!(pair.sides[side].lanes.to_receiver.is_empty());
    }
    let mut call = pair.receive("x", 2);
    pair.send("x", 2, 7);
    pair.run();
    assert_eq!(call.number(), 7);
    pair.step(RECEIVER, StepChange::CleanedUp { step: 2 });
    assert!(pair.sides[RECEIVER].lanes.to_receiver.is_empty(), "it sends nothing to its peer");
    pair.step(SENDER, StepChange::CleanedUp { step: 2 });
    assert_eq!(pair.sides[SENDER].lanes.to_receiver.len(), 1);
    pair.end(2..=2);
}
