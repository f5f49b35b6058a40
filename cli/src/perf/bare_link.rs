//! One side of a test of the bare fabric: a port with one measured link, idle links, and the memory
//! that the peer may access.

use super::control_channel::ControlChannel;
use super::fabrics::{MeasuredFabric, linking};
use super::options::BareOptions;
use super::peer_watch::{Abort, PeerWatch, Wait};
use super::workload::Facts;
use crate::error::CliError;
use crate::reference::landing::Landing;
use std::time::{Duration, Instant};
use tensorwire::internals::fabric::{
    Completions, Endpoint, Event, LinkId, LinkOptions, Port, PostError, Role,
};
use tensorwire::internals::memory::{PoolOptions, Region, RegionOptions};
use tensorwire::internals::wire::{Grant, Immediate, Slot};
use tensorwire::{DType, Pool, Shape, Tensor, TensorMeta, TensorMut};

/// How long the two sides may take to connect a link.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// Operations that can be outstanding on an idle link.
const IDLE_DEPTH: u32 = 16;
/// How long a link that is down may take to report the reason.
const DISCONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Polls after which idle links count as idle.
const IDLE_POLLS: u32 = 1000;

/// One side of the test.
pub struct BareLink<F: MeasuredFabric> {
    // Declared, and so dropped, before the fabric and the pool.
    pub port: F::Port,
    pub link: LinkId,
    /// Payload up to this many bytes is copied when it is posted.
    pub inline: usize,
    completions: Completions,
    depth: u32,
    fabric: F,
    pool: Pool,
}

/// Completions that polls have found, of the kinds that the tests wait for.
#[derive(Debug, Default)]
pub struct PolledCompletions {
    /// Immediates and messages.
    pub arrived: u32,
    /// Completed writes.
    pub done: u64,
    /// The target of a completed read.
    pub read: Option<TensorMut>,
}

impl<F: MeasuredFabric> BareLink<F> {
    /// Links with the other side, which calls this in the other role.
    pub fn open(
        role: Role,
        options: &BareOptions,
        inline: Option<u32>,
        idle_links: u32,
        channel: &mut ControlChannel,
    ) -> Result<Self, CliError> {
        let (fabric, pool) = F::open(options, |numa| {
            let region = RegionOptions { numa, ..RegionOptions::new(options.fabric.pool as u64) };
            let region = Region::create(0, &region).map_err(|error| CliError::failed("the pool", error))?;
            Pool::new(region, PoolOptions::default()).map_err(|error| CliError::failed("the pool", error))
        })?;
        let mut port = fabric.port().map_err(linking)?;
        let mut link = |depth| {
            let limits = LinkOptions { depth, receives: depth, generation: 0 };
            let endpoint = fabric.endpoint(0, &limits).map_err(linking)?;
            let theirs = channel.swap(endpoint.address())?;
            let link = endpoint.connect(role, &theirs, CONNECT_TIMEOUT).map_err(linking)?;
            port.attach(link).map_err(linking)
        };
        for _ in 0..idle_links {
            link(IDLE_DEPTH)?;
        }
        let link = link(options.fabric.depth())?;
        let limits = port.limits(link);
        let (depth, posted, most) = (limits.depth, limits.receives, limits.max_inline);
        port.post_receives(link, depth - posted);
        let inline = inline.map_or(most, |inline| inline as usize);
        if inline > most {
            return Err(CliError::Usage(format!(
                "--inline: this fabric carries {most} bytes inline, not {inline}"
            )));
        }
        let mut completions = Completions::with_capacity(64);
        for _ in 0..IDLE_POLLS {
            port.poll(&mut completions);
        }
        Ok(BareLink { port, link, inline, completions, depth, fabric, pool })
    }

    /// A tensor of `bytes` zeros.
    pub fn buffer(&self, bytes: usize) -> Result<TensorMut, CliError> {
        let tried = || format!("a buffer of {bytes} bytes");
        let shape = Shape::new(&[bytes as u64]).map_err(|error| CliError::failed(tried(), error))?;
        let meta = TensorMeta::new(DType::U8, shape).map_err(|error| CliError::failed(tried(), error))?;
        self.pool.zeroed(meta).map_err(|error| CliError::failed(tried(), error))
    }

    /// Exchanges grants: each side may write `bytes` to the other. The own memory can be polled.
    pub fn swap_targets(
        &mut self,
        bytes: usize,
        channel: &mut ControlChannel,
    ) -> Result<(Grant, Landing), CliError> {
        let target = self.buffer(bytes)?;
        let (own, landing) = Landing::grant(&mut self.port, self.link, target, &self.pool)
            .map_err(|error| CliError::failed("granting the destination", error))?;
        Ok((decode(&channel.swap(&encode(&own))?)?, landing))
    }

    /// Exchanges grants: each side may read the other's source.
    pub fn swap_sources(&mut self, source: &Tensor, channel: &mut ControlChannel) -> Result<Grant, CliError> {
        let own = self
            .port
            .expose(self.link, source)
            .map_err(|error| CliError::failed("exposing the source", error))?;
        decode(&channel.swap(&encode(&own))?)
    }

    /// The first `bytes` of the grant.
    pub fn part(granted: &Grant, bytes: usize) -> Result<Grant, CliError> {
        let part = granted.part(0, bytes as u64);
        part.ok_or_else(|| CliError::failed("an operation", format!("{bytes} bytes were not granted")))
    }

    /// Posts a write, and polls while the queue is full. Writes inline if the bytes fit and no
    /// completion is `wanted`, otherwise from the source's memory.
    #[inline(always)]
    pub fn write(
        &mut self,
        source: &Tensor,
        target: &Grant,
        immediate: Option<Immediate>,
        wanted: bool,
        (watch, received): (&PeerWatch, &mut PolledCompletions),
    ) -> Result<(), Abort> {
        let (link, bytes, mut wait) = (self.link, source.bytes(), watch.wait());
        let inline = bytes.len() <= self.inline && !wanted;
        loop {
            let posted = if inline {
                self.port.write_inline(link, bytes, target, immediate)
            } else {
                let len = bytes.len() as u64;
                self.port.write(link, source, len, target, immediate)
            };
            match posted {
                Ok(()) => return Ok(()),
                Err(PostError::Full) => drop(self.poll(&mut wait, received)?),
                Err(error) => return Err(self.refused(error)),
            }
        }
    }

    /// Posts a message, and polls while the queue is full.
    #[inline(always)]
    pub fn send(
        &mut self,
        bytes: &[u8],
        (watch, received): (&PeerWatch, &mut PolledCompletions),
    ) -> Result<(), Abort> {
        let mut wait = watch.wait();
        loop {
            match self.port.send(self.link, bytes) {
                Ok(()) => return Ok(()),
                Err(PostError::Full) => drop(self.poll(&mut wait, received)?),
                Err(error) => return Err(self.refused(error)),
            }
        }
    }

    /// Polls until an immediate or a message has come, and posts a receive for the next one.
    #[inline(always)]
    pub fn arrived(&mut self, watch: &PeerWatch) -> Result<(), Abort> {
        let (mut wait, mut received) = (watch.wait(), PolledCompletions::default());
        while received.arrived == 0 {
            self.poll(&mut wait, &mut received)?;
        }
        self.port.post_receives(self.link, received.arrived);
        Ok(())
    }

    /// Polls once and adds the completions to `received`. Returns whether there were any.
    #[inline(always)]
    pub fn poll(&mut self, wait: &mut Wait<'_>, received: &mut PolledCompletions) -> Result<bool, Abort> {
        if self.port.poll(&mut self.completions) == 0 {
            wait.again()?;
            return Ok(false);
        }
        let mut failed = None;
        for (completion, _) in self.completions.drain() {
            match completion.event {
                Event::Immediate { .. } | Event::Message(_) => received.arrived += 1,
                Event::Done => received.done += 1,
                Event::ReadDone { target } => received.read = Some(target),
                Event::Failed => failed = failed.or(Some("an operation failed".into())),
                Event::Down(why) => failed = Some(format!("the link went down: {why}")),
                Event::Lent { .. } | Event::Repaired => {}
            }
        }
        self.completions.clear();
        match failed {
            None => Ok(true),
            Some(why) => Err(Abort::Failed(why)),
        }
    }

    /// Why an operation was not posted: the link's own reason, if it went down.
    #[cold]
    pub fn refused(&mut self, error: PostError) -> Abort {
        let since = Instant::now();
        while error == PostError::Down && since.elapsed() < DISCONNECT_TIMEOUT {
            self.port.poll(&mut self.completions);
            let down = self.completions.drain().find_map(|(completion, _)| match completion.event {
                Event::Down(why) => Some(format!("the link went down: {why}")),
                _ => None,
            });
            self.completions.clear();
            if let Some(why) = down {
                return Abort::Failed(why);
            }
        }
        Abort::Failed(error.to_string())
    }

    /// Facts for the report.
    pub fn facts(&self) -> Facts {
        Facts {
            fabric: F::KIND.to_string(),
            fabric_reason: None,
            device: self.fabric.device(),
            pages: self.pool.report().pages.to_string(),
            poll_mode: "spin".into(),
            inline_bytes: self.inline as u64,
            depth: u64::from(self.depth),
            mtu: self.fabric.mtu(),
        }
    }
}

/// The immediate of a write.
pub fn immediate() -> Result<Immediate, CliError> {
    let slot = Slot::new(0).ok_or_else(|| CliError::failed("the immediate", "slot 0 is not allowed"))?;
    Ok(Immediate { generation: 0, slot })
}

fn encode(grant: &Grant) -> Vec<u8> {
    let Grant { region, key, offset, len } = *grant;
    [&region.to_le_bytes()[..], &key.to_le_bytes(), &offset.to_le_bytes(), &len.to_le_bytes()].concat()
}

fn decode(bytes: &[u8]) -> Result<Grant, CliError> {
    let grant = || {
        let (region, rest) = bytes.split_first_chunk()?;
        let (key, rest) = rest.split_first_chunk()?;
        let (offset, rest) = rest.split_first_chunk()?;
        let len = rest.try_into().ok()?;
        Some(Grant {
            region: u16::from_le_bytes(*region),
            key: u32::from_le_bytes(*key),
            offset: u64::from_le_bytes(*offset),
            len: u64::from_le_bytes(len),
        })
    };
    grant().ok_or_else(|| {
        CliError::failed("reading the peer's grant", format!("{} bytes are none", bytes.len()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grant_survives_the_channel() {
        let grant = Grant { region: 1, key: u32::MAX, offset: 1 << 40, len: 5 };
        assert_eq!(decode(&encode(&grant)).unwrap(), grant);
        assert!(decode(&encode(&grant)[1..]).is_err() && decode(&[]).is_err());
    }
}
