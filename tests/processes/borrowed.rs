//! Borrowed tensors: the bounds of a lender, slow holders, and senders that die.

use crate::common::other::{Other, wait_to_be_told};
use crate::common::{SOON, cluster, counting, lends_nothing, member, run, until, values};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tensorwire::{Counter, DType, Gauge, Node, Shape, Tensor, TensorMeta};

/// `borrow_grace` of these tests.
const BORROW_GRACE: Duration = Duration::from_millis(200);
/// Elements of the tensors that the other process sends: 8 bytes, and a few pages.
const SIZES: [usize; 3] = [2, 100_000, 3];

fn borrower(cluster: &str) -> Node {
    let grace = format!("{}ms", BORROW_GRACE.as_millis());
    let node = member(cluster, 0).set("bulk_receive", "borrow").set("borrow_grace", grace);
    node.set("small_tensor_bytes", "0").start().expect("the node starts")
}

/// Settings of a cluster in which all members borrow, small tensors included.
fn borrowing<'a>(more: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    [&[("bulk_receive", "borrow"), ("small_tensor_bytes", "0"), ("borrow_grace", "200ms")], more].concat()
}

fn is_right(tensor: &Tensor, first: usize, len: usize) -> bool {
    values(tensor).len() == len
        && values(tensor).iter().zip(first..).all(|(value, right)| *value == right as f32)
}

/// Sends one tensor of each size, and serves until it is stopped or killed.
#[test]
#[ignore = "a role, not a test"]
fn role_lender() {
    let cluster = std::env::var("TEST_CLUSTER").expect("started by a test");
    let node = member(&cluster, 1).set("small_tensor_bytes", "0").start().expect("the node starts");
    node.join().expect("joined");
    let step = node.step(1).expect("new");
    for (number, len) in SIZES.into_iter().enumerate() {
        let edge = node.edge_to("w", 0, &format!("x/{number}")).expect("edge");
        step.send(&edge, counting(&node, number as f32, len)).expect("sent");
    }
    println!("ready");
    let orders = std::thread::spawn(wait_to_be_told);
    while !orders.is_finished() {
        let _ = node.progress();
        std::thread::yield_now();
    }
}

fn borrow_all(node: &Node) -> Vec<Tensor> {
    let step = node.step(1).expect("new");
    let borrow = |number| {
        let edge = node.edge_from("w", 1, &format!("x/{number}")).expect("edge");
        step.recv(&edge, SOON).expect("received").tensor
    };
    let held: Vec<Tensor> = (0..SIZES.len()).map(borrow).collect();
    assert!(held.iter().all(Tensor::is_lent) && all_right(&held));
    held
}

/// Starts the other process, and borrows its tensors.
fn borrow_from_another(node: &Node, cluster: &str) -> (Other, Vec<Tensor>) {
    let mut lender = Other::start("borrowed::role_lender", cluster);
    node.join().expect("joined");
    lender.wait_for("ready");
    (lender, borrow_all(node))
}

/// Kills the other process, and waits until this node has noticed the death.
fn lose(node: &Node, lender: &mut Other) {
    lender.kill();
    until(node, "the news", || node.peers()[0].state.error().is_some());
}

fn all_right(held: &[Tensor]) -> bool {
    held.iter().zip(SIZES).enumerate().all(|(number, (tensor, len))| is_right(tensor, number, len))
}

/// The mapping that holds an address: name and inode of its file, and its resident size.
fn mapping_of(address: usize) -> (String, u64, u64) {
    let smaps = std::fs::read_to_string("/proc/self/smaps").expect("procfs");
    let mut lines = smaps.lines();
    let holds = |line: &&str| {
        let Some((start, end)) = line.split_whitespace().next().and_then(|range| range.split_once('-'))
        else {
            return false;
        };
        let [start, end] = [start, end].map(|text| usize::from_str_radix(text, 16));
        matches!((start, end), (Ok(start), Ok(end)) if (start..end).contains(&address))
    };
    let line = lines.find(holds).expect("it is mapped");
    let words: Vec<&str> = line.split_whitespace().collect();
    let resident = lines.find_map(|line| line.strip_prefix("Rss:")).expect("a mapping has it");
    let resident = resident.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10;
    (words[5].to_owned(), words[4].parse().expect("a number"), resident)
}

/// Whether a file is mapped here, or open.
fn has_file(number: u64) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("procfs");
    let is_it = |line: &str| line.split_whitespace().nth(4) == Some(number.to_string().as_str());
    let open = std::fs::read_dir("/proc/self/fd").expect("procfs").flatten().any(|entry| {
        use std::os::unix::fs::MetadataExt;
        std::fs::metadata(entry.path()).is_ok_and(|file| file.ino() == number && file.len() == 8 << 20)
    });
    open || maps.lines().any(is_it)
}

/// Reads the held tensors again and again until `over`. Returns the number of rounds.
fn read_all_the_while(held: &[Tensor], over: &AtomicBool) -> u64 {
    let mut rounds = 0;
    while !over.load(Ordering::Relaxed) {
        assert!(all_right(held), "a borrowed tensor has changed");
        rounds += 1;
    }
    rounds
}

fn relocated(node: &Node) -> u64 {
    node.counters().get(Counter::TensorsRelocated)
}

#[test]
#[ignore = "a role, not a test"]
fn role_heir() {
    let cluster = std::env::var("TEST_CLUSTER").expect("started by a test");
    let node = borrower(&cluster);
    let (mut lender, held) = borrow_from_another(&node, &cluster);
    let address = held[0].as_ptr().addr();
    let (name, file, _) = mapping_of(address);
    assert!(name.contains("memfd:tensorwire") && !name.contains("relocated"), "{name}");
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| read_all_the_while(&held, &over));
        std::thread::sleep(2 * BORROW_GRACE);
        assert_eq!(relocated(&node), 0, "as long as it lives nothing is copied");
        let killed = Instant::now();
        lender.kill();
        until(&node, "the end of the dead sender's pool", || relocated(&node) > 0);
        let took = killed.elapsed();
        println!("what was borrowed was copied {took:?} after the death (grace {BORROW_GRACE:?})");
        // The end of the link, the grace period and a tick; times five for a busy machine.
        assert!(
            took >= BORROW_GRACE && took < 5 * (Duration::from_millis(100) + BORROW_GRACE + BORROW_GRACE / 4)
        );
        over.store(true, Ordering::Relaxed);
        println!("it was read {} times meanwhile", reader.join().expect("nothing has changed"));
    });
    assert_eq!(relocated(&node), 3);
    assert_eq!(node.counters().get(Counter::BytesRelocated), 4 * SIZES.iter().sum::<usize>() as u64);
    assert!(!has_file(file), "the dead process's pool is still held");
    let (name, _, resident) = mapping_of(address);
    assert!(name.contains("memfd:tensorwire-relocated"), "{name}");
    assert!(resident <= 4 * 100_000 + 4 * 4096, "{resident} bytes are in memory");
    assert!(all_right(&held));

    // A new life does not touch the tensors of the old one.
    let (mut lender, of_the_new) = borrow_from_another(&node, &cluster);
    drop(held);
    std::thread::sleep(2 * BORROW_GRACE);
    assert!(all_right(&of_the_new));
    assert_eq!((relocated(&node), node.counters().get(Counter::RelocationFailures)), (3, 0));
    lose(&node, &mut lender);
    let (_, file, _) = mapping_of(of_the_new[0].as_ptr().addr());
    drop(of_the_new);
    until(&node, "the end of its mapping", || !has_file(file));
    std::thread::sleep(2 * BORROW_GRACE);
    assert_eq!(relocated(&node), 3, "what nobody holds is not copied");
}

#[test]
fn a_grace_period_after_its_death_a_senders_memory_goes_back_but_for_what_is_borrowed() {
    if !lends_nothing() {
        Other::run_alone("borrowed::role_heir", &cluster(2), &[]);
    }
}

#[test]
#[ignore = "a role, not a test"]
fn role_poor_heir() {
    let cluster = std::env::var("TEST_CLUSTER").expect("started by a test");
    let node = borrower(&cluster);
    let (mut lender, held) = borrow_from_another(&node, &cluster);
    lose(&node, &mut lender);
    // Without a free descriptor there is no memory to copy to.
    let before = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(3), ..before }).expect("fewer are always allowed");
    until(&node, "a failure", || node.counters().get(Counter::RelocationFailures) > 0);
    assert!(all_right(&held) && relocated(&node) == 0);
    setrlimit(Resource::Nofile, before).expect("as many as before");
    until(&node, "the end of the dead sender's pool", || relocated(&node) == 3);
    assert!(all_right(&held));
    assert!(mapping_of(held[1].as_ptr().addr()).0.contains("relocated"));
}

#[test]
fn what_cannot_be_copied_out_stays_readable_and_is_tried_again() {
    if !lends_nothing() {
        Other::run_alone("borrowed::role_poor_heir", &cluster(2), &[]);
    }
}

#[test]
#[ignore = "a role, not a test"]
fn role_late_heir() {
    let cluster = std::env::var("TEST_CLUSTER").expect("started by a test");
    let node = member(&cluster, 0).set("bulk_receive", "borrow").set("small_tensor_bytes", "0");
    let node = node.set("borrow_grace", "1h").start().expect("the node starts");
    let (mut lender, held) = borrow_from_another(&node, &cluster);
    let (_, file, _) = mapping_of(held[0].as_ptr().addr());
    lose(&node, &mut lender);
    assert!(has_file(file), "its time has not come");
    drop(node);
    assert!(!has_file(file) && all_right(&held));
}

#[test]
fn a_node_that_stops_settles_what_dead_senders_have_left_at_once() {
    if !lends_nothing() {
        Other::run_alone("borrowed::role_late_heir", &cluster(2), &[]);
    }
}

/// Lends tensors and stops while a peer holds them. Then uses the pool for some time, and drops it.
#[test]
#[ignore = "a role, not a test"]
fn role_leaver() {
    let cluster = std::env::var("TEST_CLUSTER").expect("started by a test");
    let node = member(&cluster, 1).set("small_tensor_bytes", "0").start().expect("the node starts");
    node.join().expect("joined");
    let step = node.step(1).expect("new");
    let send = |(number, len): (usize, usize)| {
        let edge = node.edge_to("w", 0, &format!("x/{number}")).expect("edge");
        let tensor = counting(&node, number as f32, len);
        step.send(&edge, tensor.clone()).expect("sent");
        tensor
    };
    let mut mine: Vec<Tensor> = SIZES.into_iter().enumerate().map(send).collect();
    let (_, file, _) = mapping_of(mine[0].as_ptr().addr());
    println!("ready");
    let orders = std::thread::spawn(wait_to_be_told);
    while !orders.is_finished() {
        let _ = node.progress();
        std::thread::yield_now();
    }
    let pool = node.pool().clone();
    drop((step, node));
    // One tensor is held here too. All other blocks of the pool are overwritten.
    mine.truncate(1);
    let mine = mine.remove(0).try_into_mut().expect_err("it is read elsewhere");
    let meta = |n| TensorMeta::new(DType::U8, Shape::new(&[n]).expect("shape")).expect("meta");
    let mut all = Vec::new();
    for size in [1 << 20, 1 << 12, 64] {
        while let Ok(mut tensor) = pool.tensor(meta(size)) {
            tensor.bytes_mut().fill(0xff);
            all.push(tensor);
        }
    }
    drop(all);
    println!("all else is written over");
    wait_to_be_told();
    assert!(has_file(file));
    drop((mine, pool));
    println!("gone {}", !has_file(file));
    wait_to_be_told();
}

#[test]
fn a_sender_that_stops_keeps_no_pool_for_those_who_hold_its_tensors_and_changes_none() {
    if lends_nothing() {
        return;
    }
    let cluster = cluster(2);
    let node = borrower(&cluster);
    let mut leaver = Other::start("borrowed::role_leaver", &cluster);
    node.join().expect("joined");
    leaver.wait_for("ready");
    let held = borrow_all(&node);
    leaver.say("stop");
    until(&node, "the news", || node.peers()[0].state.error().is_some());
    leaver.wait_for("written over");
    assert!(all_right(&held));
    leaver.say("let go of the pool");
    assert!(leaver.wait_for("gone").contains("true"), "the pool of a node that is no more is still mapped");
    assert!(all_right(&held));
    leaver.say("end");
    assert!(leaver.ends_well() && all_right(&held));
}

/// The number of loans that a lender has out, and their bytes.
fn lent(node: &Node) -> (u64, u64) {
    let counters = node.counters();
    (counters.gauge(Gauge::LoansOut), counters.gauge(Gauge::LentBytes))
}

/// Sends tensors of `elements` elements under these numbers.
fn send_some(node: &Node, numbers: std::ops::Range<usize>, len: usize) {
    let step = node.step(1).expect("new");
    for number in numbers {
        let edge = node.edge_to("w", 1, &format!("x/{number}")).expect("edge");
        step.send(&edge, counting(node, number as f32, len)).expect("a send never waits");
    }
}

fn receive_some(node: &Node, numbers: std::ops::Range<usize>, len: usize) -> Vec<Tensor> {
    let step = node.step(1).expect("new");
    let receive = |number| {
        let edge = node.edge_from("w", 0, &format!("x/{number}")).expect("edge");
        let got = step.recv(&edge, SOON).expect("received").tensor;
        assert!(is_right(&got, number, len), "value {number}");
        got
    };
    numbers.map(receive).collect()
}

fn say(node: &Node, to: u32, name: &str) {
    let step = node.step(1).expect("new");
    step.send(&node.edge_to("w", to, name).expect("edge"), counting(node, 0.0, 1)).expect("sent");
}

fn hear(node: &Node, from: u32, name: &str) {
    let step = node.step(1).expect("new");
    let mut word = node.tensor(tensorwire::DType::F32, &[1]).expect("room");
    word.bytes_mut().fill(1);
    let edge = node.edge_from("w", from, name).expect("edge");
    step.receive(&edge).into(word).begin().expect("begun").wait().expect("the word");
}

fn count_lent(tensors: &[Tensor]) -> usize {
    tensors.iter().filter(|tensor| tensor.is_lent()).count()
}

#[test]
fn a_slow_holder_gets_copies_past_the_bound_and_what_it_returns_can_be_lent_again() {
    if lends_nothing() {
        return;
    }
    run(2, &borrowing(&[("max_lent_bytes", "100000")]), |node, task| {
        if task == 0 {
            send_some(node, 0..10, 10_000);
            hear(node, 1, "held");
            assert_eq!(lent(node), (2, 80_000));
            let counters = node.counters();
            assert_eq!((counters.get(Counter::LoansPosted), counters.get(Counter::LoansRefused)), (2, 8));
            say(node, 1, "drop");
            until(node, "the give-back", || lent(node) == (0, 0));
            let before = node.counters();
            send_some(node, 10..11, 10_000);
            hear(node, 1, "end");
            assert_eq!(node.counters().since(&before).get(Counter::LoansPosted), 1);
        } else {
            let held = receive_some(node, 0..10, 10_000);
            assert_eq!(count_lent(&held), 2);
            assert!(held[0].is_lent() && held[1].is_lent(), "the first ones");
            say(node, 0, "held");
            hear(node, 0, "drop");
            drop(held);
            assert!(receive_some(node, 10..11, 10_000)[0].is_lent());
            say(node, 0, "end");
        }
    });
}

#[test]
fn by_default_half_of_the_pool_is_lent_at_most() {
    if lends_nothing() {
        return;
    }
    run(2, &borrowing(&[]), |node, task| {
        // Tensors of 1 MiB in a pool of 8 MiB. The sender always has room for one more.
        for number in 0..12 {
            if task == 0 {
                send_some(node, number..number + 1, 1 << 18);
                hear(node, 1, "next");
            } else {
                let held = receive_some(node, number..number + 1, 1 << 18);
                if number < 4 {
                    assert!(held[0].is_lent());
                    std::mem::forget(held);
                } else {
                    assert!(!held[0].is_lent());
                }
                say(node, 0, "next");
            }
        }
        assert!(task == 1 || lent(node) == (4, 4 << 20));
    });
}

#[test]
fn nothing_is_lent_where_nothing_may_be() {
    run(2, &borrowing(&[("max_lent_bytes", "0")]), |node, task| {
        if task == 0 {
            send_some(node, 0..3, 5000);
            hear(node, 1, "end");
            assert_eq!((lent(node), node.counters().get(Counter::LoansPosted)), ((0, 0), 0));
        } else {
            assert_eq!(count_lent(&receive_some(node, 0..3, 5000)), 0);
            say(node, 0, "end");
        }
    });
}

#[test]
fn a_loan_that_is_held_for_longer_than_the_grace_period_is_counted_once() {
    if lends_nothing() {
        return;
    }
    // No loan may be overdue before all four have come.
    const LONG_GRACE: Duration = Duration::from_secs(1);
    run(2, &borrowing(&[("borrow_grace", "1s")]), |node, task| {
        let overdue = || node.counters().get(Counter::LoansOverdue);
        if task == 0 {
            send_some(node, 0..4, 1000);
            hear(node, 1, "held");
            assert_eq!((lent(node).0, overdue()), (3, 0));
            until(node, "the end of the grace period", || overdue() > 0);
            std::thread::sleep(3 * LONG_GRACE);
            assert_eq!((lent(node), overdue()), ((3, 12_000), 3));
            say(node, 1, "drop");
            until(node, "the give-back", || lent(node) == (0, 0));
            assert_eq!((overdue(), node.counters().get(Counter::TensorsRelocated)), (3, 0));
        } else {
            let mut held = receive_some(node, 0..4, 1000);
            held.pop();
            say(node, 0, "held");
            hear(node, 0, "drop");
        }
    });
}

#[test]
fn a_receive_into_a_given_tensor_is_a_copy_where_others_borrow() {
    run(2, &borrowing(&[]), |node, task| {
        if task == 0 {
            send_some(node, 0..1, 5000);
            hear(node, 1, "end");
            until(node, "the give-back", || lent(node) == (0, 0));
        } else {
            let step = node.step(1).expect("new");
            let into = node.tensor(tensorwire::DType::F32, &[5000]).expect("room");
            let at = into.as_ptr();
            let edge = node.edge_from("w", 0, "x/0").expect("edge");
            let got = step.receive(&edge).into(into).begin().expect("begun").wait().expect("received").tensor;
            assert_eq!(got.as_ptr(), at);
            assert!(is_right(&got.freeze(), 0, 5000));
            say(node, 0, "end");
        }
    });
}

#[test]
fn what_is_borrowed_when_the_link_ends_counts_until_it_is_returned() {
    if lends_nothing() {
        return;
    }
    let cluster = cluster(2);
    let start = |task| {
        let node = member(&cluster, task).set("bulk_receive", "borrow").set("small_tensor_bytes", "0");
        node.set("max_lent_bytes", "100000").start().expect("the node starts")
    };
    let lender = start(0);
    let meet = |borrower: &Node| {
        std::thread::scope(|scope| {
            let other = scope.spawn(|| borrower.join().expect("joined"));
            lender.join().expect("joined");
            other.join().expect("no panic");
        });
    };
    let get = |borrower: &Node, numbers: std::ops::Range<usize>| {
        send_some(&lender, numbers.clone(), 10_000);
        std::thread::scope(|scope| {
            let got = scope.spawn(|| receive_some(borrower, numbers, 10_000));
            until(&lender, "the receives", || got.is_finished());
            got.join().expect("no panic")
        })
    };
    let first = start(1);
    meet(&first);
    let held = get(&first, 0..2);
    assert_eq!((count_lent(&held), lent(&lender)), (2, (2, 80_000)));
    drop(first);
    until(&lender, "the news", || lender.peers()[0].state.error().is_some());
    // The borrower's process lives on and reads.
    assert_eq!(lent(&lender), (2, 80_000));
    let second = start(1);
    meet(&second);
    let copies = get(&second, 2..4);
    assert_eq!(count_lent(&copies), 0, "the bound is reached by what nobody has a link for any more");
    assert!(is_right(&held[0], 0, 10_000) && is_right(&held[1], 1, 10_000));
    drop(held);
    until(&lender, "the give-back", || lent(&lender) == (0, 0));
    assert_eq!(count_lent(&get(&second, 4..6)), 2);
}

#[test]
fn standing_requests_borrow_as_far_as_the_bound_goes() {
    if lends_nothing() {
        return;
    }
    const STEPS: u64 = 40;
    run(2, &borrowing(&[("max_lent_bytes", "100000")]), |node, task| {
        let sequence = node.sequence(1 << 40);
        if task == 0 {
            let edge = node.edge_to("w", 1, "x").expect("edge");
            for n in 0..STEPS {
                let step = node.step((1 << 40) + n).expect("new");
                step.send(&edge, counting(node, n as f32, 10_000)).expect("sent");
                hear(node, 1, "next");
                assert!(lent(node).1 <= 100_000);
            }
            let counters = node.counters();
            let (loans, refused) = (counters.get(Counter::LoansPosted), counters.get(Counter::LoansRefused));
            println!("of {STEPS} steps {loans} were borrowed and {refused} copied");
            assert_eq!(loans + refused, STEPS);
            assert!(loans >= 4 && refused >= 20, "{loans} {refused}");
        } else {
            let edge = node.edge_from("w", 0, "x").expect("edge");
            let _standing = node.standing(&edge, sequence, 4).expect("stands");
            let mut held = Vec::new();
            for n in 0..STEPS {
                let step = node.step((1 << 40) + n).expect("new");
                held.push(step.recv(&edge, SOON).expect("received").tensor);
                assert!(is_right(&held[held.len() - 1], n as usize, 10_000));
                // The held bytes are now above, now below the bound.
                if n % 10 == 9 {
                    held.clear();
                    std::thread::sleep(Duration::from_millis(20));
                }
                say(node, 0, "next");
            }
        }
    });
}
