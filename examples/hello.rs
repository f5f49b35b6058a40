//! Hello: two tasks, one tensor there, one answer back.
//!
//! ```text
//! cargo run --release --example hello
//! ```
//!
//! The two tasks are two threads here. In a trainer each task is a process of its own.

use std::error::Error;
use std::net::TcpListener;
use std::time::Duration;
use tensorwire::{DType, Node};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Each receive waits this long at most.
const TIMEOUT: Duration = Duration::from_secs(10);

fn main() -> Result<()> {
    // Every task gets the same list of all tasks: "JOB=HOST:PORT,HOST:PORT".
    let free_ports = [TcpListener::bind("127.0.0.1:0")?, TcpListener::bind("127.0.0.1:0")?];
    let cluster = format!("worker={},{}", free_ports[0].local_addr()?, free_ports[1].local_addr()?);
    drop(free_ports);

    std::thread::scope(|scope| {
        let answering = scope.spawn(|| answer(&cluster));
        ask(&cluster)?;
        answering.join().expect("the thread does not panic")
    })
}

/// Task 0 sends numbers and receives their sum.
fn ask(cluster: &str) -> Result<()> {
    let node = Node::builder().member("worker", 0).set("cluster", cluster).start()?;
    node.join()?; // until both tasks are there

    let step = node.step(1)?; // tensors of different steps never mix
    let mut numbers = node.tensor(DType::F32, &[2, 3])?;
    numbers.as_mut_slice::<f32>()?.copy_from_slice(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    // A frozen tensor can't be written any more. A send never blocks.
    step.send(&node.edge_to("worker", 1, "numbers")?, numbers.freeze())?;
    let sum = step.recv(&node.edge_from("worker", 1, "sum")?, TIMEOUT)?.tensor;
    println!("task 0 received the sum {}", sum.as_slice::<f32>()?[0]);
    node.stop()?;
    Ok(())
}

/// Task 1 receives the numbers and sends their sum back.
fn answer(cluster: &str) -> Result<()> {
    let node = Node::builder().member("worker", 1).set("cluster", cluster).start()?;
    node.join()?;
    let step = node.step(1)?;
    let numbers = step.recv(&node.edge_from("worker", 0, "numbers")?, TIMEOUT)?.tensor;
    println!("task 1 received {:?}", numbers.as_slice::<f32>()?);
    let mut sum = node.tensor(DType::F32, &[])?;
    sum.as_mut_slice::<f32>()?[0] = numbers.as_slice::<f32>()?.iter().sum();
    step.send(&node.edge_to("worker", 0, "sum")?, sum.freeze())?;
    node.stop()?; // serves the answer if it was not asked for yet, then ends
    Ok(())
}
