//! The bare fabric: a one-sided write with immediate, answered by another.

use super::channel::Channel;
use super::options::Settings;
use super::workload::{Facts, Halt, Initiator, Responder, Wait, Watch};
use crate::cli::CliError;
use std::time::Duration;
use tensorwire::fabric::shm::{ShmFabric, ShmOptions, ShmPort};
use tensorwire::fabric::{
    Completions, Event, Fabric, Half, Lane, LinkId, LinkOptions, OpId, Port, PostError, Role,
};
use tensorwire::memory::{Pool, PoolOptions, Region, RegionOptions, Tensor, TensorMut};
use tensorwire::wire::{DType, Grant, Immediate, ImmediateKind, Shape, Slot, TensorMeta};

/// How long the two sides may take to meet.
const MEETING: Duration = Duration::from_secs(20);
/// Operations that can be outstanding on an idle link.
const IDLE_DEPTH: u32 = 16;
/// Polls until idle links have gone cold.
const SETTLING: u32 = 1000;

/// One side: a port with one link, and the peer's leave to write into its memory.
pub struct WriteLat {
    pool: Pool,
    port: ShmPort,
    link: LinkId,
    depth: u32,
    inline: usize,
    immediate: Immediate,
    granted: Grant,
    /// Where the next write goes: as many bytes of `granted` as the source has.
    target: Grant,
    source: Tensor,
    completions: Completions,
    next: OpId,
}

impl WriteLat {
    /// Links with the other side, which does the same in the other role.
    pub fn open(role: Role, settings: &Settings, channel: &mut Channel) -> Result<Self, CliError> {
        let region = Region::create(0, &RegionOptions::new(settings.pool))
            .map_err(|error| CliError::failed("the pool", error))?;
        let pool =
            Pool::new(region, PoolOptions::default()).map_err(|error| CliError::failed("the pool", error))?;
        let linking = |error| CliError::failed("linking the two processes", error);
        let fabric = ShmFabric::new(&pool, ShmOptions::default()).map_err(linking)?;
        let mut port = fabric.port().map_err(linking)?;
        let mut link = |depth| {
            let options = LinkOptions { lanes: 1, depth, generation: 0 };
            let half = fabric.half(&options).map_err(linking)?;
            let theirs = channel.swap(half.address())?;
            let link = half.connect(role, &theirs, MEETING).map_err(linking)?;
            port.attach(link).map_err(linking)
        };
        for _ in 0..settings.links {
            link(IDLE_DEPTH)?;
        }
        let link = link(settings.depth)?;
        port.post_receives(link, Lane::CONTROL, settings.depth);
        let own = port
            .grant(link, buffer(&pool, settings.max_bytes)?)
            .map_err(|(error, _)| CliError::failed("granting the destination", error))?;
        let granted = decode(&channel.swap(&encode(&own))?)?;
        let most = port.limits(link).max_inline;
        let inline = settings.inline.map_or(most, |inline| inline as usize);
        if inline > most {
            return Err(CliError::Usage(format!(
                "--inline: this fabric carries {most} bytes inline, not {inline}"
            )));
        }
        let slot = Slot::new(0).ok_or_else(|| CliError::failed("the immediate", "slot 0 is not allowed"))?;
        let mut completions = Completions::with_capacity(64);
        for _ in 0..SETTLING {
            port.poll(&mut completions);
        }
        Ok(WriteLat {
            source: buffer(&pool, 1)?.freeze(),
            pool,
            port,
            link,
            depth: settings.depth,
            inline,
            immediate: Immediate { kind: ImmediateKind::Plain, generation: 0, slot },
            granted,
            target: granted,
            completions,
            next: OpId(0),
        })
    }

    fn resize(&mut self, bytes: usize) -> Result<(), CliError> {
        if self.source.bytes().len() != bytes {
            self.source = buffer(&self.pool, bytes)?.freeze();
        }
        let part = self.granted.part(0, bytes as u64);
        self.target =
            part.ok_or_else(|| CliError::failed("a write", format!("{bytes} bytes were not granted")))?;
        Ok(())
    }

    fn write(&mut self, watch: &Watch) -> Result<(), Halt> {
        let mut wait = watch.wait();
        self.next.0 += 1;
        while let Err(error) = self.post() {
            match error {
                PostError::Full => self.poll_once(&mut wait)?,
                error => return Err(Halt::Failed(error.to_string())),
            };
        }
        Ok(())
    }

    #[inline(always)]
    fn post(&mut self) -> Result<(), PostError> {
        let (link, target, immediate) = (self.link, &self.target, Some(self.immediate));
        let bytes = self.source.bytes();
        if bytes.len() <= self.inline {
            return self.port.write_inline(link, Lane::CONTROL, bytes, target, immediate);
        }
        let len = bytes.len() as u64;
        self.port.write(link, Lane::CONTROL, self.next, &self.source, 0, len, target, immediate)
    }

    /// Polls until the other side's write has landed.
    fn landed(&mut self, watch: &Watch) -> Result<(), Halt> {
        let mut wait = watch.wait();
        while !self.poll_once(&mut wait)? {}
        self.port.post_receives(self.link, Lane::CONTROL, 1);
        Ok(())
    }

    /// Whether a write has landed. In a ping-pong at most one does.
    #[inline(always)]
    fn poll_once(&mut self, wait: &mut Wait<'_>) -> Result<bool, Halt> {
        if self.port.poll(&mut self.completions) == 0 {
            wait.again()?;
            return Ok(false);
        }
        let mut landed = false;
        for (completion, _) in self.completions.drain() {
            match completion.event {
                Event::Immediate { .. } => landed = true,
                Event::Failed { .. } => return Err(Halt::Failed("a write failed".into())),
                Event::Down(why) => return Err(Halt::Failed(format!("the link went down: {why}"))),
                _ => {}
            }
        }
        self.completions.clear();
        Ok(landed)
    }
}

impl Initiator for WriteLat {
    fn prepare(&mut self, bytes: usize, _channel: &mut Channel) -> Result<(), CliError> {
        self.resize(bytes)
    }

    fn round_trip(&mut self, watch: &Watch) -> Result<(), Halt> {
        self.write(watch)?;
        self.landed(watch)
    }

    fn facts(&self) -> Facts {
        Facts {
            fabric: ShmFabric::KIND.to_string(),
            device: None,
            pages: self.pool.report().pages.to_string(),
            poll_mode: "spin".into(),
            inline_bytes: self.inline as u64,
            depth: u64::from(self.depth),
            mtu: None,
        }
    }
}

impl Responder for WriteLat {
    fn prepare(&mut self, bytes: usize, _channel: &mut Channel) -> Result<(), CliError> {
        self.resize(bytes)
    }

    fn answer(&mut self, watch: &Watch) -> Result<(), Halt> {
        self.landed(watch)?;
        self.write(watch)
    }

    /// The other side pulls what was written last when it polls; nothing is needed from this one.
    fn linger(&mut self) -> Result<(), Halt> {
        Ok(())
    }
}

fn buffer(pool: &Pool, bytes: usize) -> Result<TensorMut, CliError> {
    let tried = || format!("a buffer of {bytes} bytes");
    let shape = Shape::new(&[bytes as u64]).map_err(|error| CliError::failed(tried(), error))?;
    let meta = TensorMeta::new(DType::U8, shape).map_err(|error| CliError::failed(tried(), error))?;
    pool.zeroed(meta).map_err(|error| CliError::failed(tried(), error))
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
