//! The whole engine: a tensor sent and received by step and key into a given buffer, answered by another.
//!
//! Each tensor is freshly written by its producer, between the round trips and not measured. Or receives borrow: then each side
//! has one tensor of a size, which it sends each time.

use super::control_channel::ControlChannel;
use super::exchange::{filled, halt, progress};
use super::options::FabricName;
use super::plan::Settings;
use super::workload::{Abort, Facts, Initiator, KeepAlive, PATIENCE, PeerWatch, Responder};
use crate::CliError;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::net::TcpListener;
use tensorwire::{BufferRing, DType, Edge, Node, Step, Tensor, TensorMut};

/// The step that every tensor belongs to: several values under one key go through in order.
const STEP: u64 = 1;
/// Buffers that tensors are produced into: one may still be on its way while the next is written.
const BUFFERS: usize = 3;

/// One side: a node of a cluster of two.
pub struct RendezvousLat {
    node: Node,
    fabric: &'static str,
    step: Step,
    to: Edge,
    from: Edge,
    depth: u32,
    inline: u32,
    bytes: usize,
    ring: BufferRing,
    /// The tensor to send next.
    produced: Option<Tensor>,
    /// Where the next one is received; gone if a receive failed.
    into: Option<TensorMut>,
    rounds: u64,
    /// Where receives borrow: what is sent, by size.
    sources: Option<BTreeMap<usize, Tensor>>,
}

impl RendezvousLat {
    /// Joins the other side as task `me` of two.
    pub fn open(me: u32, settings: &Settings, channel: &mut ControlChannel) -> Result<Self, CliError> {
        let failed = |error: &dyn std::fmt::Display| CliError::failed("joining the two processes", error);
        let node = joined(me, settings, channel)?;
        let inline = settings.inline.unwrap_or(SMALL);
        let step = node.step(STEP).map_err(|error| failed(&error))?;
        let to = node.edge_to("perf", 1 - me, "ping-pong").map_err(|error| failed(&error))?;
        let from = node.edge_from("perf", 1 - me, "ping-pong").map_err(|error| failed(&error))?;
        let ring = node.ring(DType::U8, &[1], BUFFERS).map_err(|error| failed(&error))?;
        let depth = settings.depth;
        Ok(RendezvousLat {
            node,
            fabric: name(settings.fabric),
            step,
            to,
            from,
            depth,
            inline,
            bytes: 0,
            ring,
            produced: None,
            into: None,
            rounds: 0,
            sources: settings.borrow.then(BTreeMap::new),
        })
    }

    fn resize(&mut self, bytes: usize) -> Result<(), CliError> {
        if self.bytes == bytes {
            return Ok(());
        }
        let tried = || format!("buffers of {bytes} bytes");
        self.bytes = bytes;
        if let Some(sources) = &mut self.sources {
            if let Entry::Vacant(place) = sources.entry(bytes) {
                let made = self.node.tensor(DType::U8, &[bytes as u64]);
                let mut source = made.map_err(|error| CliError::failed(tried(), error))?;
                source.bytes_mut().fill(7);
                place.insert(source.freeze());
            }
            return Ok(());
        }
        // The last size's go back to the pool first.
        (self.produced, self.into) = (None, None);
        let dims = [bytes as u64];
        self.ring =
            self.node.ring(DType::U8, &dims, BUFFERS).map_err(|error| CliError::failed(tried(), error))?;
        self.into =
            Some(self.node.tensor(DType::U8, &dims).map_err(|error| CliError::failed(tried(), error))?);
        Ok(())
    }

    /// Writes the tensor that is sent next, in a buffer that nobody reads any more.
    fn fill(&mut self, watch: &PeerWatch) -> Result<(), Abort> {
        if let Some(sources) = &self.sources {
            self.produced = sources.get(&self.bytes).cloned();
            return Ok(());
        }
        self.rounds += 1;
        self.produced = Some(filled(&self.node, &mut self.ring, watch, self.rounds as u8)?);
        Ok(())
    }

    fn send(&mut self) -> Result<(), Abort> {
        let Some(tensor) = self.produced.take() else {
            return Err(Abort::Failed("nothing was produced for this round".into()));
        };
        self.step.send(&self.to, tensor).map_err(halt)
    }

    fn receive(&mut self) -> Result<(), Abort> {
        if self.sources.is_some() {
            let got = self.step.recv(&self.from, PATIENCE).map_err(halt)?;
            return match got.tensor.is_lent() {
                true => Ok(()),
                false => Err(Abort::Failed("what was to be borrowed was copied".into())),
            };
        }
        let Some(into) = self.into.take() else {
            return Err(Abort::Failed("the last receive failed".into()));
        };
        let received = self
            .step
            .receive(&self.from)
            .into(into)
            .begin()
            .and_then(|pending| pending.wait_timeout(PATIENCE));
        self.into = Some(received.map_err(halt)?.tensor);
        Ok(())
    }
}

impl Initiator for RendezvousLat {
    fn prepare(&mut self, bytes: usize, _channel: &mut ControlChannel) -> Result<(), CliError> {
        self.resize(bytes)
    }

    fn produce(&mut self, watch: &PeerWatch) -> Result<(), Abort> {
        self.fill(watch)
    }

    fn round_trip(&mut self, _watch: &PeerWatch) -> Result<(), Abort> {
        self.send()?;
        self.receive()
    }

    fn facts(&self) -> Facts {
        Facts {
            fabric: self.fabric.into(),
            device: None,
            pages: self.node.pool_report().pages.to_string(),
            poll_mode: "inline, spin".into(),
            inline_bytes: u64::from(self.inline),
            depth: u64::from(self.depth),
            mtu: None,
        }
    }
}

impl Responder for RendezvousLat {
    fn prepare(&mut self, bytes: usize, _channel: &mut ControlChannel) -> Result<(), CliError> {
        self.resize(bytes)
    }

    fn answer(&mut self, watch: &PeerWatch) -> Result<(), Abort> {
        self.fill(watch)?;
        self.receive()?;
        self.send()
    }

    /// What was sent last is served when this side makes progress.
    fn keep_alive(&mut self) -> Result<KeepAlive, Abort> {
        progress(&self.node).map(|()| KeepAlive::Again)
    }
}

/// `small_tensor_bytes` by default.
pub const SMALL: u32 = 128;

/// A node that has joined the other side, as task `me` of two.
pub fn joined(me: u32, settings: &Settings, channel: &mut ControlChannel) -> Result<Node, CliError> {
    let failed = |error: &dyn std::fmt::Display| CliError::failed("joining the two processes", error);
    let mut builder = Node::builder()
        .without_environment()
        .member("perf", me)
        .set("cluster", cluster(me, channel)?)
        .set("pool_size", settings.pool.to_string())
        .set("queue_depth", settings.depth.to_string())
        .set("fabric", name(settings.fabric))
        .set("wait", "spin")
        .set("join_timeout", "20s");
    // Who runs a server here and a client there has asked for it.
    builder = builder.set("allow_non_loopback", (!channel.local_ip()?.is_loopback()).to_string());
    for (key, value) in device(settings) {
        builder = builder.set(key, value);
    }
    if settings.borrow {
        builder = builder.set("bulk_receive", "borrow").set("max_lent_bytes", settings.pool.to_string());
    }
    if settings.singly {
        // Beyond these limits a receive by itself is refused, where a batch waits for room.
        for (key, usual) in [("max_requests", 4096), ("max_routes", 65_536), ("max_deferred", 4096)] {
            builder = builder.set(key, settings.batch.max(usual).to_string());
        }
    }
    builder = builder.set("small_tensor_bytes", settings.inline.unwrap_or(SMALL).to_string());
    let node = builder.start().map_err(|error| failed(&error))?;
    node.join().map_err(|error| failed(&error))?;
    Ok(node)
}

/// The setting's name of a fabric.
pub fn name(fabric: FabricName) -> &'static str {
    match fabric {
        FabricName::Shm => "shm",
        FabricName::Verbs => "verbs",
    }
}

/// The settings that name a device, as far as they were asked for.
fn device(settings: &Settings) -> impl Iterator<Item = (&'static str, String)> {
    let device = &settings.device;
    [
        ("rdma_device", device.name.clone()),
        ("rdma_device_port", device.port.map(|port| port.to_string())),
        ("rdma_gid_index", device.gid_index.map(|index| index.to_string())),
        ("rdma_qp_mtu", settings.mtu.map(|bytes| bytes.to_string())),
    ]
    .into_iter()
    .filter_map(|(key, value)| Some((key, value?)))
}

/// The cluster of the two: each finds a free port of its own and tells the other.
fn cluster(me: u32, channel: &mut ControlChannel) -> Result<String, CliError> {
    let ip = channel.local_ip()?;
    let free = TcpListener::bind((ip, 0)).and_then(|socket| socket.local_addr());
    let own = free.map_err(|error| CliError::failed("looking for a free port", error))?.to_string();
    let theirs = String::from_utf8_lossy(&channel.swap(own.as_bytes())?).into_owned();
    let (first, second) = if me == 0 { (own, theirs) } else { (theirs, own) };
    Ok(format!("perf={first},{second}"))
}
