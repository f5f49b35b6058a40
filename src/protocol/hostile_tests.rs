//! Both ends take any messages of a hostile peer: each is obeyed or refused, and none panics.

use super::{InEdges, Incoming, OutEdges, Record, StepsOver, Taken, ToReceiver, ToSender, WindowOptions};
use crate::wire::EdgeId;
use proptest::prelude::*;
use std::time::{Duration, Instant};

const OPTIONS: WindowOptions = WindowOptions {
    first_window: 2,
    usual_window: 4,
    largest_window: 4,
    max_cells: 1000,
    max_edges: 3,
    kept_edges: 2,
    max_needs: 4,
    resends: true,
};

fn edge() -> impl Strategy<Value = EdgeId> {
    (prop_oneof![0..4_u32, Just(u32::MAX)], 0..4_u16)
        .prop_map(|(number, generation)| EdgeId { number, generation })
}

/// Small numbers, which are often right, and the largest.
fn count() -> impl Strategy<Value = u64> {
    prop_oneof![8 => 0..8_u64, 1 => Just(u64::MAX), 1 => any::<u64>()]
}

fn taken() -> impl Strategy<Value = Taken> {
    (count(), prop_oneof![0..8_u32, Just(u32::MAX)]).prop_map(|(came, held)| Taken { came, held })
}

fn to_sender() -> impl Strategy<Value = ToSender<u8>> {
    prop_oneof![
        3 => (edge(), 0..4_u8, count(), proptest::option::of(count()))
            .prop_map(|(edge, key, limit, resume)| ToSender::Announce { edge, key, limit, resume }),
        3 => (edge(), count(), taken())
            .prop_map(|(edge, limit, taken)| ToSender::Credit { edge, limit, taken }),
        3 => (edge(), count()).prop_map(|(edge, step)| ToSender::Need { edge, step }),
        1 => (edge(), count()).prop_map(|(edge, step)| ToSender::Unneed { edge, step }),
        2 => (edge(), count()).prop_map(|(edge, came)| ToSender::Retire { edge, came }),
        1 => Just(ToSender::Resumed),
    ]
}

fn to_receiver() -> impl Strategy<Value = ToReceiver<u8, u8>> {
    let record = (edge(), 0..8_u16, count(), any::<bool>(), any::<u8>())
        .prop_map(|(edge, n, step, answers_need, value)| Record { edge, n, step, answers_need, value });
    prop_oneof![
        8 => record.prop_map(ToReceiver::Record),
        1 => edge().prop_map(|edge| ToReceiver::Refused { edge, error: 1 }),
        1 => edge().prop_map(|edge| ToReceiver::Retired { edge }),
        1 => edge().prop_map(|edge| ToReceiver::Flush { edge }),
        1 => (count(), count())
            .prop_map(|(first, last)| ToReceiver::StepsOver(StepsOver { first, last, error: 2 })),
    ]
}

#[test]
fn edges_whose_needs_were_not_answered_are_forgotten_when_they_retire() {
    let mut edges = OutEdges::<u8, u8, u8>::new(WindowOptions { resends: false, ..OPTIONS });
    for key in 0..100 {
        let edge = EdgeId { number: 0, generation: key.into() };
        let messages = [
            ToSender::Announce { edge, key, limit: 0, resume: None },
            ToSender::Need { edge, step: 1 },
            ToSender::Need { edge, step: 2 },
            ToSender::Retire { edge, came: 0 },
        ];
        for message in messages {
            edges.receive(message, |_| None, |_| None, &mut |_| {}).expect("allowed");
        }
        assert_eq!(edges.edges().count(), 0);
    }
    let edge = EdgeId { number: 0, generation: 0 };
    edges
        .receive(ToSender::Announce { edge, key: 0, limit: 0, resume: None }, |_| None, |_| None, &mut |_| {})
        .expect("allowed");
    for step in 0..OPTIONS.max_needs.into() {
        edges.receive(ToSender::Need { edge, step }, |_| None, |_| None, &mut |_| {}).expect("allowed");
    }
    let more = ToSender::Need { edge, step: 99 };
    assert!(edges.receive(more, |_| None, |_| None, &mut |_| {}).is_err(), "too many needs");
    drop(edges.lost());
    assert_eq!(edges.edges().count(), 0, "a lost peer needs nothing");
}

/// Each message of a peer at its limits is handled as fast as any.
#[test]
fn no_message_of_a_peer_that_fills_its_limits_takes_long() {
    let options = WindowOptions {
        max_edges: 1 << 15,
        kept_edges: 1 << 12,
        max_needs: 1 << 17,
        resends: false,
        ..OPTIONS
    };
    let mut edges = OutEdges::<u32, u8, u8>::new(options);
    let begin = Instant::now();
    let mut say = |message| edges.receive(message, |_| None, |_| None, &mut |_| {}).map(drop);
    let edge = |number| EdgeId { number, generation: 0 };
    for key in 0..options.max_edges {
        say(ToSender::Announce { edge: edge(key), key, limit: 0, resume: None }).expect("allowed");
        say(ToSender::Need { edge: edge(key), step: 1 }).expect("allowed");
    }
    for step in u64::from(options.max_edges)..u64::from(options.max_needs) {
        say(ToSender::Need { edge: edge(0), step }).expect("allowed");
    }
    for step in 0..u64::from(options.max_needs) {
        say(ToSender::Unneed { edge: edge(0), step: u64::MAX - step }).expect("allowed");
    }
    for number in 0..options.max_edges {
        say(ToSender::Credit { edge: edge(number), limit: 0, taken: Taken::default() }).expect("allowed");
    }
    for number in 0..options.max_edges {
        say(ToSender::Retire { edge: edge(number), came: 0 }).expect("allowed");
    }
    say(ToSender::Resumed).expect_err("no link was repaired");
    assert_eq!(edges.edges().count(), 0);
    println!("{:?}", begin.elapsed());
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
}

/// The end of a step without values costs the same whatever the edges hold or need.
#[test]
fn no_end_of_a_step_at_a_peer_takes_long() {
    let options = WindowOptions {
        max_cells: 1 << 13,
        max_edges: 1 << 15,
        max_needs: 1 << 17,
        first_window: 1,
        ..OPTIONS
    };
    let mut edges = InEdges::<u32, u8, u32, u8>::new(options);
    let begin = Instant::now();
    let (mut announced, mut needs) = (0, 0);
    for key in 0..options.max_edges {
        let index = edges.edge(&key);
        edges.wait(index, 1, key, &mut |message| match message {
            ToSender::Announce { .. } => announced += 1,
            ToSender::Need { .. } => needs += 1,
            other => panic!("{other:?}"),
        });
    }
    assert_eq!((announced, needs), (1 << 15, 3 << 13), "edges without a cell need their values");
    for step in 2..100_000 {
        let over = StepsOver { first: step, last: step, error: 2 };
        let end = edges.receive(ToReceiver::StepsOver(over), |_| false, &mut |_| {}).expect("allowed");
        assert_eq!(end, Incoming::Ended(Vec::new(), Vec::new(), 2));
    }
    let over = StepsOver { first: 0, last: 1, error: 2 };
    let end = edges.receive(ToReceiver::StepsOver(over), |_| false, &mut |_| {}).expect("allowed");
    assert!(matches!(end, Incoming::Ended(waiters, ..) if waiters.len() == announced));
    println!("{:?}", begin.elapsed());
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
}

/// The peer fills a window with values of a step for which no receive waits. The receives of all
/// other steps then need theirs.
#[test]
fn a_window_that_is_full_does_not_hold_up_many_waiters() {
    const WAITERS: u32 = 1 << 10;
    let options = WindowOptions { max_needs: WAITERS, ..OPTIONS };
    let mut edges = InEdges::<u32, u8, u32, u8>::new(options);
    let (begin, index) = (Instant::now(), edges.edge(&0));
    let mut announced = None;
    for waiter in 0..WAITERS {
        edges.wait(index, 1 + u64::from(waiter), waiter, &mut |message| match message {
            ToSender::Announce { edge, limit, .. } => announced = Some((edge, limit)),
            other => panic!("{other:?}"),
        });
    }
    let (edge, limit) = announced.expect("an edge with waiters is announced");
    let mut needed = Vec::new();
    for n in 1..=limit as u16 {
        let record = Record { edge, n, step: 0, answers_need: false, value: 0 };
        let mut post = |message| match message {
            ToSender::Need { step, .. } => needed.push(step),
            other => panic!("{other:?}"),
        };
        edges.receive(ToReceiver::Record(record), |_| false, &mut post).expect("allowed");
    }
    println!("{:?}", begin.elapsed());
    assert!(needed.into_iter().eq(1..=u64::from(WAITERS)));
    // A later need searches no more for the ends of steps before it.
    for step in (1..u64::from(WAITERS)).rev() {
        let over = StepsOver { first: step, last: step, error: 2 };
        edges.receive(ToReceiver::StepsOver(over), |_| false, &mut |_| {}).expect("allowed");
        let mut needs = 0;
        edges.wait(index, u64::MAX - step, 0, &mut |_| needs += 1);
        assert_eq!(needs, 1);
    }
    println!("{:?}", begin.elapsed());
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
}

/// The peer fills the windows of all edges with values, each of a step of its own, and ends the
/// steps one by one.
#[test]
fn no_end_of_a_step_with_a_value_at_a_peer_takes_long() {
    const EDGES: u32 = 1 << 7;
    const EACH: u64 = 1 << 5;
    let options = WindowOptions {
        first_window: EACH,
        usual_window: EACH,
        largest_window: EACH,
        max_cells: u64::from(EDGES) * EACH,
        max_edges: EDGES,
        ..OPTIONS
    };
    let mut edges = InEdges::<u32, u64, u32, u8>::new(options);
    let begin = Instant::now();
    let mut announced = Vec::new();
    for key in 0..EDGES {
        let index = edges.edge(&key);
        edges.wait(index, u64::MAX, key, &mut |message| match message {
            ToSender::Announce { edge, limit, .. } => announced.push((edge, limit)),
            other => panic!("{other:?}"),
        });
    }
    let step = |number, nth| nth * 1_000_003 + u64::from(number) * 17;
    let mut steps = Vec::new();
    for (edge, limit) in announced {
        assert_eq!(limit, EACH);
        for nth in 0..limit {
            let step = step(edge.number, nth);
            steps.push(step);
            let record = Record { edge, n: nth as u16 + 1, step, answers_need: false, value: step };
            edges.receive(ToReceiver::Record(record), |_| false, &mut |_| {}).expect("allowed");
        }
    }
    println!("{} values in {:?}", steps.len(), begin.elapsed());
    let mut slowest = Duration::ZERO;
    for step in steps {
        let over = StepsOver { first: step, last: step, error: 2 };
        let message = Instant::now();
        let end = edges.receive(ToReceiver::StepsOver(over), |_| false, &mut |_| {}).expect("allowed");
        assert_eq!(end, Incoming::Ended(Vec::new(), vec![step], 2));
        slowest = slowest.max(message.elapsed());
    }
    assert_eq!(edges.lost().len(), EDGES as usize);
    println!("{:?}, at most {slowest:?} for one message", begin.elapsed());
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn a_sender_obeys_or_refuses_any_message(
        sent in prop::collection::vec((0..4_u8, 0..4_u64), 0..8),
        messages in prop::collection::vec(to_sender(), 0..40),
        repair in 0..40_usize,
    ) {
        let mut edges = OutEdges::<u8, u8, u8>::new(OPTIONS);
        let (mut records, mut left) = (0, 0);
        let mut post = |message| records += usize::from(matches!(message, ToReceiver::Record(_)));
        for (value, (key, step)) in sent.iter().enumerate() {
            let index = edges.edge(key);
            edges.offer(index, *step, value as u8, &mut post);
        }
        let (mut repaired, mut violated) = (false, false);
        for (nth, message) in messages.into_iter().enumerate() {
            if nth == repair {
                edges.repaired(&mut post);
                repaired = true;
            }
            let end_of = |step| (step == 3).then_some(3);
            let refusal = |key: &u8| (*key == 3).then_some(4);
            match edges.receive(message, end_of, refusal, &mut post) {
                Ok(dropped) => left += dropped.len(),
                // The link of such a peer ends. Messages that are polled already are still handled.
                Err(_) => violated = true,
            }
            let needs: usize = edges.edges().map(|(_, edge)| edge.needs()).sum();
            prop_assert!(violated || needs <= OPTIONS.max_needs as usize, "{needs} needs are remembered");
            edges.flush(&mut post);
            edges.check_counts();
        }
        prop_assert!(repaired || records + left <= sent.len(), "a value left twice");
        // Steps may end before that of the link is handled.
        edges.check_counts();
        let dropped = edges.drop_steps(&(0..=1)).len();
        edges.check_counts();
        prop_assert!(dropped + edges.lost().len() <= sent.len());
        edges.check_counts();
    }

    #[test]
    fn a_receiver_obeys_or_refuses_any_message(
        begun in prop::collection::vec((0..4_u8, 0..4_u64), 0..8),
        messages in prop::collection::vec(to_receiver(), 0..40),
        repair in 0..40_usize,
    ) {
        let mut edges = InEdges::<u8, u8, usize, u8>::new(OPTIONS);
        for (waiter, (key, step)) in begun.iter().enumerate() {
            let index = edges.edge(key);
            edges.wait(index, *step, waiter, &mut |_| {});
        }
        for (nth, message) in messages.into_iter().enumerate() {
            if nth == repair {
                edges.repaired(&mut |_| {});
            }
            if edges.receive(message, |step| step == 2, &mut |_| {}).is_err() {
                break;
            }
            let held: usize = edges.edges().map(|(_, _, edge)| edge.held().len()).sum();
            let cells = (OPTIONS.max_edges as u64 * OPTIONS.largest_window) as usize + begun.len();
            prop_assert!(held <= cells, "{held} values are held");
        }
        prop_assert!(edges.lost().len() <= begun.len());
    }
}
