//! A parameter server with many small tensors, with and without standing requests:
//! `cargo bench --bench parameter_server`.
//!
//! A server and a worker are nodes of this process on shared memory. One thread drives both in
//! turns, so that no wait shows. In each step the server sends the weights, and the worker sends
//! the gradients: 1,000 tensors of 8 bytes each way. The two runs take turns, and each begins every
//! second turn. The figures are medians, in nanoseconds per tensor with its send and its receive.
//!
//! `cargo bench --bench parameter_server -- on 20` makes only 20 steps of one run, for callgrind.

use std::error::Error;
use std::net::TcpListener;
use std::time::{Duration, Instant};
use tensorwire::{Counter, DType, Edge, Node, Sequence, Standing, Step};

const TENSORS: usize = 1000;
/// Tensors that are sent before the first of them is received: fewer than a ring has slots.
const AT_ONCE: usize = 64;
/// An even number: each of two runs begins as often as the other.
const TURNS: usize = 10;
const STEPS: u64 = 200;
const WINDOW: u32 = 64;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// The tensors of one direction: their edges at the sender and at the receiver.
struct Direction {
    from: usize,
    edges: Vec<(Edge, Edge)>,
}

/// A server and a worker.
struct Members {
    nodes: [Node; 2],
    directions: [Direction; 2],
    sequence: Sequence,
    next: u64,
    standing: Vec<Standing>,
}

impl Members {
    fn start(is_standing: bool) -> Result<Members> {
        let ports = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0"));
        let [ps, worker] = ports.map(|port| port.and_then(|port| port.local_addr()));
        let cluster = format!("ps={};worker={}", ps?, worker?);
        let start = |job: &str| -> Result<Node> {
            let node = Node::builder().without_environment().member(job, 0).set("cluster", &*cluster);
            let node = node.set("poll", "inline").set("wait", "spin").set("pool_size", "64MiB").start()?;
            node.join()?;
            Ok(node)
        };
        let nodes = std::thread::scope(|scope| {
            ["ps", "worker"]
                .map(|job| (job, &start))
                .map(|(job, start)| scope.spawn(move || start(job)))
                .map(|member| member.join().expect("no panic"))
        });
        let [ps, worker] = nodes;
        let nodes = [ps?, worker?];
        let directions = [Direction::new(&nodes, 0)?, Direction::new(&nodes, 1)?];
        let sequence = nodes.each_ref().map(|node| node.sequence(0))[0];
        let mut members = Members { nodes, directions, sequence, next: 0, standing: Vec::new() };
        if is_standing {
            members.stand()?;
        }
        Ok(members)
    }

    fn stand(&mut self) -> Result<()> {
        for Direction { from, edges } in &self.directions {
            for (_, receives) in edges {
                self.standing.push(self.nodes[1 - from].standing(receives, self.sequence, WINDOW)?);
                self.nodes[*from].progress()?;
            }
        }
        Ok(())
    }

    /// Moves each tensor once each way, and ends the step before.
    fn step(&mut self) -> Result<()> {
        let id = self.sequence.step(self.next);
        let steps = [self.nodes[0].step(id)?, self.nodes[1].step(id)?];
        for direction in &self.directions {
            direction.exchange(&self.nodes, &steps)?;
        }
        if let Some(before) = self.next.checked_sub(1) {
            self.nodes.iter().for_each(|node| node.cleanup(self.sequence.step(before)));
        }
        self.next += 1;
        Ok(())
    }

    /// Nanoseconds per tensor of `steps` steps.
    fn time(&mut self, steps: u64) -> Result<f64> {
        let begin = Instant::now();
        (0..steps).try_for_each(|_| self.step())?;
        Ok(begin.elapsed().as_nanos() as f64 / (2 * TENSORS as u64 * steps) as f64)
    }

    fn credits(&self) -> u64 {
        self.nodes.iter().map(|node| node.counters().get(Counter::EdgeCreditsSent)).sum()
    }
}

impl Direction {
    fn new(nodes: &[Node; 2], from: usize) -> Result<Direction> {
        let jobs = ["ps", "worker"];
        let edge = |n: usize| -> Result<(Edge, Edge)> {
            let name = format!("tensor/{n}");
            let sends = nodes[from].edge_to(jobs[1 - from], 0, &name)?;
            Ok((sends, nodes[1 - from].edge_from(jobs[from], 0, &name)?))
        };
        Ok(Direction { from, edges: (0..TENSORS).map(edge).collect::<Result<_>>()? })
    }

    fn exchange(&self, nodes: &[Node; 2], steps: &[Step; 2]) -> Result<()> {
        let (from, to) = (self.from, 1 - self.from);
        for edges in self.edges.chunks(AT_ONCE) {
            for (sends, _) in edges {
                steps[from].send(sends, nodes[from].tensor(DType::F32, &[2])?.freeze())?;
            }
            for (_, receives) in edges {
                // The first receives announce their edges, and the sender has to hear of it.
                while steps[to].try_recv(receives)?.is_none() {
                    nodes[from].progress()?;
                    nodes[to].progress()?;
                }
            }
        }
        Ok(())
    }
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    if let Some(standing) = arguments.next() {
        let steps = arguments.next().map_or(Ok(20), |steps| steps.parse())?;
        let mut members = Members::start(standing == "on")?;
        members.time(steps)?;
        return Ok(());
    }
    let mut runs = [Members::start(true)?, Members::start(false)?];
    let mut times = [Vec::new(), Vec::new()];
    for run in &mut runs {
        run.time(STEPS)?;
    }
    let before = runs.each_ref().map(Members::credits);
    for turn in 0..TURNS {
        // The second run of a turn is some 4 % slower than the first, also if both are the same.
        for at in [turn % 2, 1 - turn % 2] {
            times[at].push(runs[at].time(STEPS)?);
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    let tensors = (2 * TENSORS * TURNS) as f64 * STEPS as f64;
    for (at, name) in ["standing requests", "without"].into_iter().enumerate() {
        let credits = (runs[at].credits() - before[at]) as f64 / tensors;
        let all: Vec<_> = times[at].iter().map(|time| format!("{time:.0}")).collect();
        let time = median(times[at].clone());
        println!("{name:<20} {time:>7.0} ns, {credits:.3} credits; turns: {}", all.join(" "));
    }
    Ok(())
}
