//! A ring of ranks, each a process: every rank learns the sum of all gradients.
//!
//! ```text
//! cargo run --release --example ring
//! tensorwire launch -n 8 -- target/release/examples/ring
//! ```

use std::error::Error;
use std::net::TcpListener;
use std::process::{Child, Command};
use std::time::Duration;
use tensorwire::{DType, LaunchedRank, Node, Tensor};

const TIMEOUT: Duration = Duration::from_secs(30);

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match (LaunchedRank::from_environment()?, args.as_slice()) {
        (Some(launched), []) => run(launched.rank, launched.size),
        (None, []) => start(4),
        (None, [ranks]) => start(ranks.parse()?),
        _ => Err("usage: ring [RANKS], or without RANKS under a launcher".into()),
    }
}

/// Starts this program once for each rank, as a launcher does, and waits for all of them.
fn start(ranks: u32) -> Result<(), Box<dyn Error>> {
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
    let spawn = |rank: u32| {
        let mut child = Command::new(std::env::current_exe()?);
        child.env("RANK", rank.to_string()).env("WORLD_SIZE", ranks.to_string());
        child.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port).spawn()
    };
    let mut children = (0..ranks).map(spawn).collect::<Result<Vec<Child>, _>>()?;
    let ended = children.iter_mut().map(Child::wait).collect::<Result<Vec<_>, _>>()?;
    if ended.iter().all(|status| status.success()) { Ok(()) } else { Err("a rank has failed".into()) }
}

/// One rank: passes tensors to the next rank, and adds what comes from the rank before. Its name
/// and the addresses of all are in the environment.
fn run(rank: u32, ranks: u32) -> Result<(), Box<dyn Error>> {
    let node = Node::builder().start()?;
    node.join()?;
    let job = node.task().job();
    let next = node.edge_to(job, (rank + 1) % ranks, "gradient")?;
    let previous = node.edge_from(job, (rank + ranks - 1) % ranks, "gradient")?;
    let mut own = node.tensor(DType::F32, &[1000])?;
    own.as_mut_slice::<f32>()?.fill((rank + 1) as f32); // in a trainer: the gradient
    let mut passing: Tensor = own.freeze();
    let mut sum = passing.as_slice::<f32>()?.to_vec();
    for round in 1..ranks {
        let step = node.step(u64::from(round))?;
        step.send(&next, passing)?; // never blocks, so the ring can't lock up
        passing = step.recv(&previous, TIMEOUT)?.tensor; // and is sent on in the next round
        sum.iter_mut().zip(passing.as_slice::<f32>()?).for_each(|(sum, value)| *sum += value);
    }
    println!("rank {rank} of {ranks}: the sum is {}", sum[0]);
    node.stop()?;
    Ok(())
}
