//! Random programs of two ends.

use super::*;

/// Random sends, receives, ends of receives and deliveries. Each value goes to one receive of its
/// step, and the receives get the values in order. If a receive gives up while its value is on its
/// way, later receives may have later values already. Some receives get the next message without an
/// event, as those of a thread that holds the poller.
#[test]
fn in_random_order_each_receive_gets_the_next_value_of_its_step() {
    run_in_random_order(1..=100);
}

#[test]
#[ignore = "takes long: tests/nightly"]
fn in_many_random_orders_each_receive_gets_the_next_value_of_its_step() {
    run_in_random_order(101..=400);
}

fn run_in_random_order(seeds: std::ops::RangeInclusive<u64>) {
    let mut short_ends = 0;
    for seed in seeds {
        let mut random = seed;
        let mut below = move |bound: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % bound
        };
        let (offers, gives_up) = (seed % 2 == 0, seed % 4 != 0);
        let window = [1, 2, 3, 8][seed as usize / 2 % 4];
        let mut pair = if offers { Pair::offering(window) } else { Pair::new(window) };
        let (mut sent, mut taken) = ([0_u32; 4], [(); 4].map(|()| Vec::new()));
        let mut calls: Vec<(u64, Call)> = Vec::new();
        for _ in 0..120 {
            let step = 1 + below(3);
            match below(7) {
                0 | 1 => {
                    pair.send("x", step, sent[step as usize]);
                    sent[step as usize] += 1;
                }
                2 if calls.len() < MAX_WAITING as usize => calls.push((step, pair.receive("x", step))),
                3 if gives_up && !calls.is_empty() => {
                    let (_, call) = &calls[below(calls.len() as u64) as usize];
                    let cancel = Cancel { call: call.of, why: CancelReason::Cancelled };
                    let Side { matching, lanes, .. } = &mut pair.sides[RECEIVER];
                    matching.cancel(lanes, &cancel);
                }
                // The record of an offered tensor does not bring the tensor.
                4 if !offers => short_ends += u32::from(pair.end_by_next(&mut calls)),
                _ => _ = pair.deliver(below(2) as usize),
            }
            take_ended(&mut calls, &mut taken);
        }
        pair.run();
        take_ended(&mut calls, &mut taken);
        for step in 1..=3 {
            while taken[step].len() < sent[step] as usize {
                let got = taken[step].len();
                calls.push((step as u64, pair.receive("x", step as u64)));
                pair.run();
                take_ended(&mut calls, &mut taken);
                assert!(taken[step].len() > got, "seed {seed}: a value of step {step} is stuck");
            }
            if offers && gives_up {
                taken[step].sort_unstable();
            }
            assert!(taken[step].iter().copied().eq(0..sent[step]), "seed {seed}: step {step}: {taken:?}");
        }
        drop(calls);
        pair.end(1..=3);
    }
    println!("{short_ends} receives have ended without an event");
    assert!(short_ends > 0);
}

impl Pair {
    /// Ends the first receive of a step by the next message, if that is a record which needs no
    /// event. Returns whether it did.
    fn end_by_next(&mut self, calls: &mut [(u64, Call)]) -> bool {
        let next = self.sides[SENDER].lanes.to_receiver.front();
        let Some(ToReceiver::Record(Record { edge, n, step, answers_need, value })) = next else {
            return false;
        };
        let Some((_, call)) = calls.iter_mut().find(|(of, _)| of == step) else { return false };
        let Value::Tensor(tensor) = value else { return false };
        let next_is = Record { edge: *edge, n: *n, step: *step, answers_need: *answers_need, value: () };
        let landed = self.tensor(RECEIVER, number_in(tensor.bytes()), 8).freeze();
        let lanes = &mut self.sides[RECEIVER].lanes;
        (lanes.next, lanes.next_is) = (Some(landed), Some(next_is));
        let is_taken = self.end_short(call) == ShortTake::Taken(());
        let lanes = &mut self.sides[RECEIVER].lanes;
        (lanes.next, lanes.next_is) = (None, None);
        if is_taken {
            self.sides[SENDER].lanes.to_receiver.pop_front();
        }
        is_taken
    }
}

/// Removes the calls that have ended, and adds their values to those of each step.
fn take_ended(calls: &mut Vec<(u64, Call)>, taken: &mut [Vec<u32>; 4]) {
    calls.retain_mut(|(step, call)| match call.outcome() {
        None => true,
        Some(Err(Error::Cancelled { .. })) => false,
        Some(Ok(Payload::Tensor(tensor))) => {
            taken[*step as usize].push(number_in(tensor.bytes()));
            false
        }
        Some(other) => panic!("{other:?}"),
    });
}
