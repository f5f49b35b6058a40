//! One round of each test, seen from either side.

use super::options::Test;
use crate::cli::CliError;
use crate::cli::reference::Side;
use std::io::{BufRead, Write};
use std::time::Duration;
use tensorwire::fabric::shm::{ShmFabric, ShmOptions, ShmPort};
use tensorwire::fabric::{
    Completions, Event, Fabric, Half, Lane, LinkId, LinkOptions, OpId, Port, PostError, Role,
};
use tensorwire::memory::{PoolOptions, Region, RegionOptions};
use tensorwire::wire::{Grant, Immediate, ImmediateKind, Slot};
use tensorwire::{
    BufferRing, DType, Edge, Node, Pool, Shape, Step, Tensor, TensorMeta, TensorMut, pin_current_thread,
};

/// What both processes are told.
pub struct Setup<'a> {
    pub side: Side,
    pub core: usize,
    pub depth: u32,
    pub pool: usize,
    /// `w=HOST:PORT,HOST:PORT`
    pub cluster: &'a str,
    /// The largest message.
    pub largest: usize,
}

/// A test between two processes, in rounds: the first side asks, the second answers.
pub trait Rounds {
    /// From now on messages have so many bytes.
    fn size(&mut self, bytes: usize) -> Result<(), CliError>;

    /// What a round needs and is not timed: a freshly written source.
    fn prepare(&mut self) -> Result<(), CliError>;

    /// Makes progress between rounds: the other side may still want what was sent.
    fn idle(&mut self) -> Result<(), CliError>;

    /// One round.
    fn round(&mut self) -> Result<(), CliError>;

    /// What the memory is made of.
    fn pages(&self) -> String;
}

/// The rounds of a test; `talk` swaps a line with the other process.
pub fn start(test: Test, setup: &Setup<'_>, talk: &mut impl Talk) -> Result<Box<dyn Rounds>, CliError> {
    Ok(match test {
        Test::WriteLat => Box::new(WriteRounds::start(setup, talk)?),
        Test::RendezvousLat => Box::new(RendezvousRounds::start(setup)?),
    })
}

/// Swaps a line with the other process.
pub trait Talk {
    fn swap(&mut self, line: &str) -> Result<String, CliError>;
}

impl<R: BufRead, W: Write> Talk for (R, W) {
    fn swap(&mut self, line: &str) -> Result<String, CliError> {
        let gone = |error: std::io::Error| CliError::Failed(format!("the other process is gone: {error}"));
        writeln!(self.1, "{line}").and_then(|()| self.1.flush()).map_err(gone)?;
        let mut answer = String::new();
        match self.0.read_line(&mut answer).map_err(gone)? {
            0 => Err(CliError::Failed("the other process has ended early".into())),
            _ => Ok(answer.trim().to_owned()),
        }
    }
}

/// The bare fabric.
struct WriteRounds {
    side: Side,
    pool: Pool,
    port: ShmPort,
    link: LinkId,
    max_inline: usize,
    target: Grant,
    source: Tensor,
    completions: Completions,
    next_op: u64,
}

const IMMEDIATE: Immediate = Immediate {
    kind: ImmediateKind::Plain,
    generation: 0,
    slot: match Slot::new(0) {
        Some(slot) => slot,
        None => unreachable!(),
    },
};

impl WriteRounds {
    fn start(setup: &Setup<'_>, talk: &mut impl Talk) -> Result<Self, CliError> {
        let region = Region::create(0, &RegionOptions::new(setup.pool as u64)).map_err(CliError::failed)?;
        let pool = Pool::new(region, PoolOptions::default()).map_err(CliError::failed)?;
        let fabric = ShmFabric::new(&pool, ShmOptions::default()).map_err(CliError::failed)?;
        let options = LinkOptions { lanes: 1, depth: setup.depth, generation: 0 };
        let half = fabric.half(&options).map_err(CliError::failed)?;
        let peer = talk.swap(&hex(half.address()))?;
        let role = if setup.side == Side::First { Role::Initiator } else { Role::Acceptor };
        let link = half.connect(role, &unhex(&peer)?, Duration::from_secs(10)).map_err(CliError::failed)?;
        let mut port = fabric.port().map_err(CliError::failed)?;
        let link = port.attach(link).map_err(CliError::failed)?;
        port.post_receives(link, Lane::CONTROL, setup.depth);
        let own = buffer(&pool, setup.largest)?;
        let grant = port.grant(link, own).map_err(|(error, _)| CliError::failed(error))?;
        let target = talk.swap(&grant_text(&grant))?;
        let target = read_grant(&target)?;
        pin_current_thread(setup.core).map_err(CliError::failed)?;
        let max_inline = port.limits(link).max_inline;
        let source = buffer(&pool, 1)?.freeze();
        let completions = Completions::with_capacity(64);
        Ok(WriteRounds {
            side: setup.side,
            pool,
            port,
            link,
            max_inline,
            target,
            source,
            completions,
            next_op: 0,
        })
    }

    fn write(&mut self) -> Result<(), CliError> {
        let bytes = self.source.bytes();
        let target = self.target.part(0, bytes.len() as u64);
        let target =
            target.ok_or_else(|| CliError::Failed("the peer granted less than was agreed".into()))?;
        self.next_op += 1;
        loop {
            let posted = if bytes.len() <= self.max_inline {
                self.port.write_inline(self.link, Lane::CONTROL, bytes, &target, Some(IMMEDIATE))
            } else {
                let (id, len) = (OpId(self.next_op), bytes.len() as u64);
                self.port.write(self.link, Lane::CONTROL, id, &self.source, 0, len, &target, Some(IMMEDIATE))
            };
            match posted {
                Ok(()) => return Ok(()),
                Err(PostError::Full) => {
                    self.port.poll(&mut self.completions);
                    failure(&mut self.completions)?;
                }
                Err(error) => return Err(CliError::failed(error)),
            }
        }
    }

    /// Polls until the other side's write has landed.
    fn landed(&mut self) -> Result<(), CliError> {
        loop {
            if self.port.poll(&mut self.completions) > 0 && failure(&mut self.completions)? {
                self.port.post_receives(self.link, Lane::CONTROL, 1);
                return Ok(());
            }
            std::hint::spin_loop();
        }
    }
}

/// Whether an immediate was among the completions; an error if the link is down.
fn failure(completions: &mut Completions) -> Result<bool, CliError> {
    let mut landed = false;
    for (completion, _) in completions.drain() {
        match completion.event {
            Event::Immediate { .. } => landed = true,
            Event::Down(why) => return Err(CliError::Failed(format!("the link went down: {why}"))),
            _ => {}
        }
    }
    completions.clear();
    Ok(landed)
}

impl Rounds for WriteRounds {
    fn size(&mut self, bytes: usize) -> Result<(), CliError> {
        self.source = buffer(&self.pool, bytes)?.freeze();
        Ok(())
    }

    fn prepare(&mut self) -> Result<(), CliError> {
        Ok(())
    }

    fn idle(&mut self) -> Result<(), CliError> {
        // Nothing but completions of writes comes between rounds: an immediate that is early must stay.
        Ok(())
    }

    fn round(&mut self) -> Result<(), CliError> {
        match self.side {
            Side::First => {
                self.write()?;
                self.landed()
            }
            Side::Second => {
                self.landed()?;
                self.write()
            }
        }
    }

    fn pages(&self) -> String {
        self.pool.report().to_string()
    }
}

/// The whole engine.
struct RendezvousRounds {
    side: Side,
    node: Node,
    step: Step,
    to: Edge,
    from: Edge,
    ring: BufferRing,
    next: Option<Tensor>,
    into: Option<TensorMut>,
    round: u64,
}

const PATIENCE: Duration = Duration::from_secs(10);

impl RendezvousRounds {
    fn start(setup: &Setup<'_>) -> Result<Self, CliError> {
        let me = if setup.side == Side::First { 0 } else { 1 };
        let node = Node::builder()
            .member("w", me)
            .set("cluster", setup.cluster)
            .set("pool_size", setup.pool.to_string())
            .set("queue_depth", setup.depth.to_string())
            .set("cores", setup.core.to_string())
            .set("wait", "spin")
            .set("join_timeout", "20s")
            .start()
            .map_err(CliError::failed)?;
        node.join().map_err(CliError::failed)?;
        let step = node.step(1).map_err(CliError::failed)?;
        let to = node.edge_to("w", 1 - me, "perf").map_err(CliError::failed)?;
        let from = node.edge_from("w", 1 - me, "perf").map_err(CliError::failed)?;
        let ring = node.ring(DType::U8, &[1], 1).map_err(CliError::failed)?;
        Ok(RendezvousRounds {
            side: setup.side,
            node,
            step,
            to,
            from,
            ring,
            next: None,
            into: None,
            round: 0,
        })
    }

    fn send(&mut self) -> Result<(), CliError> {
        match self.next.take() {
            Some(next) => self.step.send(&self.to, next).map_err(CliError::failed),
            None => Err(CliError::Failed("a round was not prepared".into())),
        }
    }

    fn receive(&mut self) -> Result<(), CliError> {
        let Some(into) = self.into.take() else {
            return Err(CliError::Failed("the last receive failed".into()));
        };
        let pending = self.step.recv_into(&self.from, into).map_err(CliError::failed)?;
        self.into = Some(pending.wait_timeout(PATIENCE).map_err(CliError::failed)?.tensor);
        Ok(())
    }
}

impl Rounds for RendezvousRounds {
    fn size(&mut self, bytes: usize) -> Result<(), CliError> {
        // What is in flight of the last size goes back to the pool first.
        (self.next, self.into) = (None, None);
        self.ring = self.node.ring(DType::U8, &[bytes as u64], 3).map_err(CliError::failed)?;
        self.into = Some(self.node.tensor(DType::U8, &[bytes as u64]).map_err(CliError::failed)?);
        Ok(())
    }

    fn prepare(&mut self) -> Result<(), CliError> {
        self.round += 1;
        loop {
            if let Ok(mut next) = self.ring.next() {
                next.bytes_mut().fill(self.round as u8);
                self.next = Some(next.freeze());
                return Ok(());
            }
            self.node.progress().map_err(CliError::failed)?;
        }
    }

    fn round(&mut self) -> Result<(), CliError> {
        match self.side {
            Side::First => {
                self.send()?;
                self.receive()
            }
            Side::Second => {
                self.receive()?;
                self.send()
            }
        }
    }

    fn idle(&mut self) -> Result<(), CliError> {
        self.node.progress().map(drop).map_err(CliError::failed)
    }

    fn pages(&self) -> String {
        self.node.pool_report().to_string()
    }
}

fn buffer(pool: &Pool, bytes: usize) -> Result<TensorMut, CliError> {
    let shape = Shape::new(&[bytes as u64]).map_err(CliError::failed)?;
    let meta = TensorMeta::new(DType::U8, shape).map_err(CliError::failed)?;
    pool.zeroed(meta).map_err(CliError::failed)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Result<Vec<u8>, CliError> {
    let pair = |at: usize| text.get(at..at + 2).and_then(|pair| u8::from_str_radix(pair, 16).ok());
    let bytes: Option<Vec<u8>> = (0..text.len()).step_by(2).map(pair).collect();
    bytes.ok_or_else(|| CliError::Failed(format!("the other process said '{text}' instead of its address")))
}

fn grant_text(grant: &Grant) -> String {
    format!("{} {} {} {}", grant.region, grant.key, grant.offset, grant.len)
}

fn read_grant(text: &str) -> Result<Grant, CliError> {
    let numbers: Option<Vec<u64>> = text.split(' ').map(|number| number.parse().ok()).collect();
    match numbers.as_deref() {
        Some(&[region, key, offset, len]) => {
            Ok(Grant { region: region as u16, key: key as u32, offset, len })
        }
        _ => Err(CliError::Failed(format!("the other process said '{text}' instead of its grant"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_grants_survive_the_pipe() {
        assert_eq!(unhex(&hex(&[0, 7, 255])).expect("hex"), [0, 7, 255]);
        assert!(unhex("0").is_err() && unhex("zz").is_err());
        let grant = Grant { region: 1, key: u32::MAX, offset: 1 << 40, len: 5 };
        assert_eq!(read_grant(&grant_text(&grant)).expect("grant"), grant);
        assert!(read_grant("1 2 3").is_err());
    }
}
