//! Stops by code that the first stop of its node waits for, and by other threads.

use crate::common::{SOON, cluster, member};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;
use tensorwire::{DType, Edge, ForeignMemory, Node, Shape, TensorMeta};

/// A node on its own, and an edge to itself.
fn alone() -> (Arc<Node>, Edge) {
    let node = member(&cluster(1), 0).start().expect("starts");
    let edge = node.edge_to("w", 0, "x").expect("edge");
    (Arc::new(node), edge)
}

/// Stops a node whose receive has a callback. The callback runs in the stop, and has `at_end` run.
fn stop_beside(node: &Arc<Node>, edge: &Edge, at_end: impl FnOnce() + Send + 'static) {
    let (called, calls) = channel();
    let callback = move |received: Result<_, _>| {
        received.map(drop).expect_err("nothing was sent");
        at_end();
        called.send(()).expect("open");
    };
    node.step(1).expect("new").receive(edge).within(SOON).then(callback).expect("begun");
    let (tell, told) = channel();
    let node = node.clone();
    thread::spawn(move || tell.send(node.stop().is_ok()).expect("open"));
    assert_eq!(told.recv_timeout(SOON), Ok(true), "the stop does not end");
    assert_eq!(calls.try_recv(), Ok(()), "it ends after the callback");
}

#[test]
fn a_callback_stops_its_node_in_a_stop() {
    let (node, edge) = alone();
    let mine = node.clone();
    stop_beside(&node, &edge, move || assert!(mine.stop().expect("stopped").is_empty()));
}

#[test]
fn a_callback_fails_its_node_in_a_stop() {
    let (node, edge) = alone();
    let mine = node.clone();
    stop_beside(&node, &edge, move || assert!(mine.fail("no value").expect("stopped").is_empty()));
}

#[test]
fn an_owner_of_foreign_memory_stops_its_node_in_a_stop() {
    struct Owner(Arc<Node>);
    impl AsRef<[u8]> for Owner {
        fn as_ref(&self) -> &[u8] {
            &[7; 64]
        }
    }
    impl Drop for Owner {
        fn drop(&mut self) {
            assert!(self.0.stop().expect("stopped").is_empty());
        }
    }
    let (node, edge) = alone();
    let meta = TensorMeta::new(DType::U8, Shape::new(&[64]).expect("shape")).expect("meta");
    let held = ForeignMemory::from_owner(Owner(node.clone())).tensor(node.pool(), meta, 0).expect("inside");
    stop_beside(&node, &edge, move || drop(held));
}

#[test]
fn a_second_stop_by_another_thread_ends_after_the_first() {
    let (node, edge) = alone();
    let (is_over, over) = (Arc::new(AtomicBool::new(false)), channel());
    let (second, ended, told) = (node.clone(), is_over.clone(), over.0);
    stop_beside(&node, &edge, move || {
        let (begins, begun) = channel();
        let ended_before = ended.clone();
        thread::spawn(move || {
            begins.send(()).expect("open");
            second.stop().expect("stopped");
            told.send(ended_before.load(Ordering::SeqCst)).expect("open");
        });
        begun.recv().expect("it begins");
        // It has the time to end too early.
        thread::sleep(Duration::from_millis(20));
        ended.store(true, Ordering::SeqCst);
    });
    assert_eq!(over.1.recv_timeout(SOON), Ok(true), "it ended before the callback");
}
