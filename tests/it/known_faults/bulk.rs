//! Tensors whose lengths do not fit in 32 bits.

use crate::common::{SOON, cluster, lends_nothing, member};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;
use tensorwire::DType;

const GIB: u64 = 1 << 30;

/// Whether twice as much memory is available.
fn has_memory(needed: u64) -> bool {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib: u64 = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse().ok()).unwrap_or(0);
    let available = kib << 10;
    if available < 2 * needed {
        println!("skipped: {} GiB should be available and {} are", 2 * needed / GIB, available / GIB);
    }
    available >= 2 * needed
}

/// Moves one tensor whose length does not fit in 32 bits. Only a few of its bytes are compared.
fn moves_more_than_4_gib(bulk: &'static str, receiver_pool: u64) {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    const BYTES: u64 = 4 * GIB + 4097;
    const POOL: u64 = 4 * GIB + (64 << 20);
    if !has_memory(POOL + receiver_pool) {
        return;
    }
    let marks = [0, 1 << 20, 4 * GIB - 1, 4 * GIB, 4 * GIB + 1, BYTES - 1];
    let cluster = cluster(2);
    let ended = Arc::new(AtomicBool::new(false));
    let start = move |task, pool: u64| {
        let builder = member(&cluster, task).set("pool_size", pool.to_string()).set("bulk_receive", bulk);
        let builder = builder.set("max_lent_bytes", pool.to_string());
        let node = builder.set("join_timeout", "60s").set("recv_timeout", "60s").start();
        let node = node.expect("the node starts");
        node.join().expect("the other one comes");
        node
    };
    let of_sender = start.clone();
    let served = ended.clone();
    let sender = std::thread::spawn(move || {
        let node = of_sender(0, POOL);
        let mut tensor = node.tensor(DType::U8, &[BYTES]).expect("room");
        for (at, mark) in marks.iter().enumerate() {
            tensor.bytes_mut()[*mark as usize] = at as u8 + 1;
        }
        let edge = node.edge_to("w", 1, "x").expect("edge");
        node.step(1).expect("new").send(&edge, tensor.freeze()).expect("sent");
        let end = Instant::now() + 3 * SOON;
        while !served.load(Ordering::SeqCst) {
            assert!(Instant::now() < end, "it was not received");
            let _ = node.progress();
        }
    });
    let node = start(1, receiver_pool);
    let edge = node.edge_from("w", 0, "x").expect("edge");
    let got = node.step(1).expect("new").recv(&edge, 3 * SOON).expect("received").tensor;
    assert_eq!((got.bytes().len() as u64, got.is_lent()), (BYTES, bulk == "borrow"));
    for (at, mark) in marks.iter().enumerate() {
        assert_eq!(got.bytes()[*mark as usize], at as u8 + 1, "byte {mark}");
    }
    drop(got);
    ended.store(true, Ordering::SeqCst);
    sender.join().expect("no panic");
}

#[ignore = "takes long: tests/nightly"]
#[test]
fn a_tensor_of_more_than_4_gib_is_borrowed_whole() {
    if !lends_nothing() {
        moves_more_than_4_gib("borrow", 8 << 20);
    }
}

#[test]
#[ignore = "takes long: tests/nightly"]
fn a_tensor_of_more_than_4_gib_is_copied_whole() {
    if crate::common::calls_for_each_value() {
        return;
    }
    moves_more_than_4_gib("copy", 4 * GIB + (64 << 20));
}
