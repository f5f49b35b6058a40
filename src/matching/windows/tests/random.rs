//! Random programs of two ends.

use super::*;

/// Random sends, receives, ends of receives and deliveries. Each receive that ends with a value has
/// the next one of its step.
#[test]
fn in_random_order_each_receive_gets_the_next_value_of_its_step() {
    for seed in 1..=200_u64 {
        let mut random = seed;
        let mut below = move |bound: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % bound
        };
        let mut pair = Pair::new(1 + seed % 3);
        pair.begin_steps(1..=3);
        let (mut sent, mut next) = ([0_u32; 4], [0_u32; 4]);
        let mut calls: Vec<(u64, Call)> = Vec::new();
        for _ in 0..120 {
            let step = 1 + below(3);
            match below(6) {
                0 | 1 => {
                    pair.send("x", step, sent[step as usize]);
                    sent[step as usize] += 1;
                }
                2 if calls.len() < MAX_WAITING as usize => calls.push((step, pair.receive("x", step))),
                3 if !calls.is_empty() => {
                    let (_, call) = &calls[below(calls.len() as u64) as usize];
                    let cancel = Cancel { id: call.id, why: CancelReason::Cancelled };
                    pair.sides[RECEIVER].matching.cancel(&cancel);
                }
                _ => _ = pair.deliver(below(2) as usize),
            }
            take_ended(&mut calls, &mut next);
        }
        pair.run();
        take_ended(&mut calls, &mut next);
        for step in 1..=3 {
            while next[step as usize] < sent[step as usize] {
                let got = next[step as usize];
                calls.push((step, pair.receive("x", step)));
                pair.run();
                take_ended(&mut calls, &mut next);
                assert!(next[step as usize] > got, "seed {seed}: a value of step {step} is stuck");
            }
        }
        assert_eq!(next, sent, "seed {seed}");
        drop(calls);
        pair.end(1..=3);
    }
}

/// Removes the calls that have ended, and checks their values against the next ones of each step.
fn take_ended(calls: &mut Vec<(u64, Call)>, next: &mut [u32; 4]) {
    calls.retain_mut(|(step, call)| match call.outcome() {
        None => true,
        Some(Err(Error::Cancelled { .. })) => false,
        Some(Ok(Payload::Tensor(tensor))) => {
            assert_eq!(number_in(tensor.bytes()), next[*step as usize], "of step {step}");
            next[*step as usize] += 1;
            false
        }
        Some(other) => panic!("{other:?}"),
    });
}
