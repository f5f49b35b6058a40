//! The rows of the prototype: ping-pongs of tensors.

use crate::node::{Destination, META, Node, Slow};
use crate::pool::{Tensor, Use};
use crate::process::Process;
use crate::report::{clock_cost, median};
use std::collections::VecDeque;
use std::hint::black_box;
use std::time::Instant;

/// Bytes of a page, of which a reader of a borrowed value reads one word.
const PAGE: usize = 4096;

/// What the receivers of a row do with their values.
#[derive(Clone, Copy)]
pub enum Receive {
    /// Each value is a new tensor, of which the receiver keeps this many.
    Fresh(usize),
    /// The values go in turns to this many given tensors.
    Into(usize),
    /// The values stay in the memory of their sender. With `true` the time includes the reading of
    /// one word per page.
    Borrow(bool),
}

/// What a round is timed with.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Timed {
    /// The begin of the step, making and filling the value, send, receive, reading and dropping the
    /// result, and the end of the step.
    Everything,
    /// From the call of send until the result is there. Sources are written before, and results
    /// are read afterwards.
    Exchange,
}

/// A ping-pong.
#[derive(Clone, Copy)]
pub struct PingPong {
    pub bytes: u32,
    pub edges: u32,
    pub receive: Receive,
    pub timed: Timed,
    /// Whether loans are answered after the next record.
    pub lazy_loans: bool,
    /// Rounds of a chunk.
    pub rounds: u32,
    pub chunks: u32,
}

/// Batches in both directions, one value of 8 bytes on each edge.
#[derive(Clone, Copy)]
pub struct Batches {
    pub edges: u32,
    /// Slots of the rings.
    pub slots: usize,
    pub chunks: u32,
}

/// Slots of the rings of a ping-pong.
const SLOTS: usize = 32;

struct Side<'a> {
    node: Node,
    process: &'a Process,
    row: PingPong,
    /// The edges in the order in which they are used.
    order: Vec<u32>,
    given: VecDeque<Tensor>,
    results: VecDeque<Tensor>,
}

impl PingPong {
    /// Runs one side. The median of the chunks in nanoseconds, one way.
    pub fn run(self, process: &Process) -> f64 {
        let may_borrow = matches!(self.receive, Receive::Borrow(_));
        let mut node = Node::new(process, self.edges, SLOTS, may_borrow, self.lazy_loans);
        let given = match self.receive {
            Receive::Into(count) => count,
            _ => 0,
        };
        let given = (0..given).map(|_| node.pool.take(Use::Landing, self.bytes, META)).collect();
        let order = shuffled(self.edges);
        let mut side = Side { node, process, row: self, order, given, results: VecDeque::new() };
        side.chunks().unwrap_or_else(|slow| panic!("the short path ended: {slow:?}"))
    }
}

impl Side<'_> {
    fn chunks(&mut self) -> Result<f64, Slow> {
        let PingPong { rounds, chunks, timed, .. } = self.row;
        let warm_up = (chunks / 10).max(1);
        let mut times = Vec::with_capacity(chunks as usize);
        let mut round = 0;
        for chunk in 0..chunks + warm_up {
            let start = Instant::now();
            let mut exchanges = 0.0;
            for _ in 0..rounds {
                exchanges += self.round(round)?;
                round += 1;
            }
            let total = match timed {
                Timed::Everything => start.elapsed().as_nanos() as f64,
                Timed::Exchange => exchanges - clock_cost() * f64::from(rounds),
            };
            if chunk >= warm_up {
                times.push(total / f64::from(rounds) / 2.0);
            }
        }
        Ok(median(times))
    }

    /// One value in each direction. The time of the exchange, where it is timed by itself.
    #[inline(always)]
    fn round(&mut self, round: u64) -> Result<f64, Slow> {
        let edge = self.order[round as usize % self.order.len()];
        self.node.begin_step(round);
        let value = self.source(round);
        let destination = match self.row.receive {
            Receive::Fresh(_) => Destination::Fresh,
            Receive::Into(_) => self.given.pop_front().map_or(Destination::Fresh, Destination::Into),
            Receive::Borrow(_) => Destination::Borrow,
        };
        let is_timed = self.row.timed == Timed::Exchange;
        let mut time = 0.0;
        let received = if self.process.side == 0 {
            let start = is_timed.then(|| {
                self.process.wait_for_peer(round);
                Instant::now()
            });
            self.node.send(edge, round, value)?;
            let received = self.node.recv(edge, round, destination)?;
            self.read_pages(&received);
            time = start.map_or(0.0, |start| start.elapsed().as_nanos() as f64);
            received
        } else {
            if is_timed {
                self.process.set_ready(round);
            }
            let received = self.node.recv(edge, round, destination)?;
            self.read_pages(&received);
            self.node.send(edge, round, value)?;
            received
        };
        self.finish(round, received)?;
        Ok(time)
    }

    /// A value whose bytes are all written.
    #[inline(always)]
    fn source(&mut self, round: u64) -> Tensor {
        let mut value = self.node.pool.take(Use::Source, self.row.bytes, META);
        value.bytes_mut().fill(round as u8);
        value
    }

    #[inline(always)]
    fn read_pages(&self, received: &Tensor) {
        if let Receive::Borrow(true) = self.row.receive {
            received.bytes().iter().step_by(PAGE).for_each(|byte| _ = black_box(*byte));
        }
    }

    /// Reads the result, drops it, and ends the step.
    #[inline(always)]
    fn finish(&mut self, round: u64, received: Tensor) -> Result<(), Slow> {
        let bytes = received.bytes();
        match self.row.receive {
            Receive::Borrow(_) => {
                assert_eq!((bytes[0], bytes[bytes.len() - 1]), (round as u8, round as u8));
            }
            _ => check(bytes, round),
        }
        match self.row.receive {
            Receive::Into(_) => self.given.push_back(received),
            Receive::Fresh(0) | Receive::Borrow(_) => self.node.release(received),
            Receive::Fresh(count) => {
                self.results.push_back(received);
                if self.results.len() > count
                    && let Some(oldest) = self.results.pop_front()
                {
                    self.node.release(oldest);
                }
            }
        }
        self.node.end_step(round)
    }
}

impl Batches {
    /// Runs one side. The median of the chunks in nanoseconds per tensor.
    pub fn run(self, process: &Process) -> f64 {
        self.chunks(process).unwrap_or_else(|slow| panic!("the short path ended: {slow:?}"))
    }

    fn chunks(self, process: &Process) -> Result<f64, Slow> {
        let mut node = Node::new(process, self.edges, self.slots, false, false);
        let mut times = Vec::with_capacity(self.chunks as usize);
        let mut values = Vec::with_capacity(self.edges as usize);
        let mut results = Vec::with_capacity(self.edges as usize);
        for step in 0..u64::from(self.chunks) + 2 {
            node.begin_step(step);
            values.extend((0..self.edges).map(|_| {
                let mut value = node.pool.take(Use::Source, 8, META);
                value.bytes_mut().fill(step as u8);
                value
            }));
            if process.side == 0 {
                process.wait_for_peer(step);
                let start = Instant::now();
                node.send_batch(step, &mut values)?;
                node.recv_batch(step, &mut results)?;
                let time = start.elapsed().as_nanos() as f64;
                // The first values of edges take the long way.
                if step >= 2 {
                    times.push(time / f64::from(self.edges) / 2.0);
                }
            } else {
                process.set_ready(step);
                node.recv_batch(step, &mut results)?;
                node.send_batch(step, &mut values)?;
            }
            for result in results.drain(..) {
                check(result.bytes(), step);
                node.release(result);
            }
            node.end_step(step)?;
        }
        Ok(median(times))
    }
}

/// Reads all bytes of a result.
#[inline(always)]
fn check(bytes: &[u8], round: u64) {
    if let Ok(word) = bytes.try_into().map(u64::from_ne_bytes) {
        assert_eq!(word, u64::from(round as u8) * 0x0101_0101_0101_0101);
    } else {
        assert_eq!(bytes[0], round as u8);
        black_box(bytes.iter().fold(0u8, |all, byte| all | byte));
    }
}

/// The edges in random order, the same in both processes.
fn shuffled(edges: u32) -> Vec<u32> {
    let mut order: Vec<u32> = (0..edges).collect();
    let mut random = 0x9e37_79b9_7f4a_7c15u64;
    for at in (1..order.len()).rev() {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        order.swap(at, (random % (at as u64 + 1)) as usize);
    }
    order
}
