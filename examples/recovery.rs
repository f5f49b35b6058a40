//! Recovery: a worker process dies in the middle of training, comes back, and training goes on.
//! Run it with `cargo run --release --example recovery`.

use std::{error::Error, net::TcpListener, process::Command, time::Duration};
use tensorwire::{DType, Error as TransferError, Node};

const TIMEOUT: Duration = Duration::from_secs(30);

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [cluster, step] = &args[..] { worker(cluster, step.parse()?) } else { trainer() }
}

/// Task 0 sends the weights of each step to the worker, and kills it in step 3.
fn trainer() -> Result<(), Box<dyn Error>> {
    let free = [TcpListener::bind("127.0.0.1:0")?, TcpListener::bind("127.0.0.1:0")?];
    let cluster = format!("task={},{}", free[0].local_addr()?, free[1].local_addr()?);
    drop(free);
    let start_worker = |step: u64| Command::new("/proc/self/exe").args([&cluster, &step.to_string()]).spawn();
    let mut process = start_worker(1)?;
    let node = Node::builder().member("task", 0).set("cluster", &cluster).start()?;
    node.join()?;
    let (weights, gradient) = (node.edge_to("task", 1, "weights")?, node.edge_from("task", 1, "gradient")?);
    for number in 1..=5 {
        let step = node.step(number)?;
        if number == 3 {
            process.kill()?;
        }
        let answer = loop {
            let mut tensor = node.tensor(DType::F32, &[1])?;
            tensor.as_mut_slice::<f32>()?[0] = number as f32;
            match step.send(&weights, tensor.freeze()).and_then(|()| step.recv(&gradient, TIMEOUT)) {
                Err(TransferError::PeerLost { peer, .. }) => {
                    println!("step {number}: {peer} died, starting it")
                }
                result => break result?.tensor,
            }
            process.wait()?;
            process = start_worker(number)?;
            node.join()?; // until the new process is linked
        };
        println!("step {number}: the gradient is {}", answer.as_slice::<f32>()?[0]);
        node.cleanup(number); // frees what is left of the step
    }
    Ok(node.stop().map(drop)?)
}

/// Task 1 answers the weights of each step with a gradient.
fn worker(cluster: &str, first_step: u64) -> Result<(), Box<dyn Error>> {
    let node = Node::builder().member("task", 1).set("cluster", cluster).start()?;
    let (weights, gradient) = (node.edge_from("task", 0, "weights")?, node.edge_to("task", 0, "gradient")?);
    node.join()?;
    for number in first_step..=5 {
        let step = node.step(number)?;
        let mut tensor = node.tensor(DType::F32, &[1])?;
        tensor.as_mut_slice::<f32>()?[0] = 10.0 * step.recv(&weights, TIMEOUT)?.tensor.as_slice::<f32>()?[0];
        step.send(&gradient, tensor.freeze())?;
    }
    Ok(node.stop().map(drop)?)
}
