//! The whole engine: a tensor sent by step and key, received into a given buffer, and answered.
//!
//! The sender writes each tensor freshly: a short one while the other side answers, a long one
//! between the round trips, unmeasured. Where receives borrow, each side has one tensor of a size
//! and sends it each time.

use super::control_channel::ControlChannel;
use super::exchange::{filled, progress};
use super::fabric_name::FabricName;
use super::options::{FabricOptions, RendezvousOptions};
use super::peer_watch::{Abort, PeerWatch, ROUND_TIMEOUT};
use super::proofs;
use super::workload::{Facts, Initiator, KeepAlive, Responder, chunk_of_fresh};
use crate::error::CliError;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::net::TcpListener;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};
use tensorwire::{
    BootstrapError, BufferRing, Builder, Config, ConfigError, DType, Edge, Node, NodeError, PollMode, Step,
    Tensor, TensorMut,
};

/// The step of every tensor. Values under one key arrive in order.
const STEP: u64 = 1;
/// How long a join takes at most, and between two looks whether the other side has failed.
const JOIN_TIMEOUT: Duration = Duration::from_secs(20);
const JOIN_LOOK: Duration = Duration::from_secs(1);
/// Buffers for the tensors to send: one may be in flight while the next is written.
const BUFFERS: usize = 3;

/// One side: a node of a cluster of two.
pub struct RendezvousLat {
    node: Node,
    facts: Facts,
    step: Step,
    to: Edge,
    from: Edge,
    bytes: usize,
    ring: BufferRing,
    /// The tensor to send next.
    produced: Option<Tensor>,
    /// Target of the next receive; `None` after a receive failed.
    into: Option<TensorMut>,
    rounds: u64,
    /// The tensors to send by size, where receives borrow.
    sources: Option<BTreeMap<usize, Tensor>>,
}

impl RendezvousLat {
    /// Joins the other side as task `me` (0 or 1).
    pub fn open(
        me: u32,
        options: &RendezvousOptions,
        channel: &mut ControlChannel,
    ) -> Result<Self, CliError> {
        let failed = |error: &dyn std::fmt::Display| CliError::failed("joining the two processes", error);
        let (node, facts) = joined(me, options, channel)?;
        let step = node.step(STEP).map_err(|error| failed(&error))?;
        let to = node.edge_to("perf", 1 - me, "ping-pong").map_err(|error| failed(&error))?;
        let from = node.edge_from("perf", 1 - me, "ping-pong").map_err(|error| failed(&error))?;
        let ring = node.ring(DType::U8, &[1], BUFFERS).map_err(|error| failed(&error))?;
        Ok(RendezvousLat {
            node,
            facts,
            step,
            to,
            from,
            bytes: 0,
            ring,
            produced: None,
            into: None,
            rounds: 0,
            sources: options.borrow.then(BTreeMap::new),
        })
    }

    fn resize(&mut self, bytes: usize) -> Result<(), CliError> {
        if self.bytes == bytes {
            return Ok(());
        }
        let tried = || format!("buffers of {bytes} bytes");
        self.bytes = bytes;
        // The buffers of the last size return to the pool first.
        (self.produced, self.into) = (None, None);
        if let Some(sources) = &mut self.sources {
            if let Entry::Vacant(place) = sources.entry(bytes) {
                let made = self.node.tensor(DType::U8, &[bytes as u64]);
                let mut source = made.map_err(|error| CliError::failed(tried(), error))?;
                source.bytes_mut().fill(7);
                place.insert(source.freeze());
            }
            return Ok(());
        }
        let dims = [bytes as u64];
        self.ring =
            self.node.ring(DType::U8, &dims, BUFFERS).map_err(|error| CliError::failed(tried(), error))?;
        self.into =
            Some(self.node.tensor(DType::U8, &dims).map_err(|error| CliError::failed(tried(), error))?);
        Ok(())
    }

    /// Writes the tensor that is sent next.
    fn fill(&mut self, watch: &PeerWatch) -> Result<(), Abort> {
        if let Some(sources) = &self.sources {
            self.produced = sources.get(&self.bytes).cloned();
            return Ok(());
        }
        self.rounds += 1;
        self.produced = Some(filled(&self.node, &mut self.ring, watch, self.rounds as u8)?);
        if self.max_chunk() == 1 {
            // Stores become visible in order. The peer has the lines of the tensor, so its stores
            // would hold up the first one of the round trip.
            fence(Ordering::SeqCst);
        }
        Ok(())
    }

    fn send(&mut self) -> Result<(), Abort> {
        let Some(tensor) = self.produced.take() else {
            return Err(Abort::Failed("nothing was produced for this round".into()));
        };
        Ok(self.step.send(&self.to, tensor)?)
    }

    fn receive(&mut self) -> Result<(), Abort> {
        if self.sources.is_some() {
            let got = self.step.recv(&self.from, ROUND_TIMEOUT)?;
            return match got.tensor.is_lent() {
                true => Ok(()),
                false => Err(Abort::Failed("the receive copied the tensor instead of borrowing it".into())),
            };
        }
        let Some(into) = self.into.take() else {
            return Err(Abort::Failed("the last receive failed".into()));
        };
        let received = self.step.receive(&self.from).into(into).within(ROUND_TIMEOUT).wait();
        self.into = Some(received?.tensor);
        Ok(())
    }
}

impl Initiator for RendezvousLat {
    fn prepare(&mut self, bytes: usize, _channel: &mut ControlChannel) -> Result<(), CliError> {
        self.resize(bytes)
    }

    fn produce(&mut self, watch: &PeerWatch) -> Result<(), Abort> {
        if self.produced.is_none() { self.fill(watch) } else { Ok(()) }
    }

    fn max_chunk(&self) -> u64 {
        // A source that is borrowed is not written again.
        chunk_of_fresh(if self.sources.is_some() { 0 } else { self.bytes })
    }

    fn round_trip(&mut self, watch: &PeerWatch) -> Result<(), Abort> {
        self.send()?;
        if self.max_chunk() > 1 {
            self.fill(watch)?;
        }
        self.receive()
    }

    fn facts(&self) -> Facts {
        self.facts.clone()
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

    /// The last tensor is served when this side makes progress.
    fn keep_alive(&mut self) -> Result<KeepAlive, Abort> {
        progress(&self.node).map(|()| KeepAlive::Poll)
    }
}

/// A node that has joined the other side as task `me` (0 or 1), and its settings.
pub fn joined(
    me: u32,
    options: &RendezvousOptions,
    channel: &mut ControlChannel,
) -> Result<(Node, Facts), CliError> {
    let failed = |error: &dyn std::fmt::Display| CliError::failed("joining the two processes", error);
    let builder = Node::builder()
        .environment(proofs::variables(channel.local_ip()?)?)
        .member("perf", me)
        .set("cluster", cluster(me, channel)?)
        .join_timeout(JOIN_LOOK);
    let config = config(builder, options).map_err(|error| failed(&error))?;
    let node = Node::start(&config).map_err(|error| failed(&error))?;
    join(&node, channel, JOIN_TIMEOUT)?;
    let facts = facts(&node, &config, options);
    Ok((node, facts))
}

/// The settings of a node, with those that the options stand for.
fn config(builder: Builder, options: &RendezvousOptions) -> Result<Config, ConfigError> {
    let mut builder = builder
        .set("pool_size", options.fabric.pool.to_string())
        .set("fabric", options.fabric.fabric.to_string());
    let small = options.inline().map(|bytes| bytes.to_string());
    let streams = options.fabric.streams.map(|count| count.to_string());
    let depth = options.fabric.given_depth().map(|depth| depth.to_string());
    // Calls over gRPC have no pollers that could spin.
    let has_pollers = options.fabric.fabric != FabricName::Grpc;
    let spins = has_pollers && options.profile.is_none() && options.poll.is_none();
    let wait = spins.then(|| "spin".to_string());
    let (profile, poll) = (options.profile.clone(), options.poll.clone());
    let given = [
        ("profile", profile),
        ("poll", poll),
        ("wait", wait),
        ("queue_depth", depth),
        ("tcp_streams", streams),
        ("small_tensor_bytes", small),
    ];
    for (key, value) in given.into_iter().filter_map(|(key, value)| Some((key, value?))) {
        builder = builder.set(key, value);
    }
    for (key, value) in device(&options.fabric) {
        builder = builder.set(key, value);
    }
    if options.borrow {
        builder = builder.set("bulk_receive", "borrow");
        builder = builder.set("max_lent_bytes", options.fabric.pool.to_string());
    }
    if options.is_baseline && options.batch() > 0 {
        // Beyond this limit a single receive is refused. Those of a batch do not count.
        builder = builder.set("max_requests", options.batch().max(4096).to_string());
    }
    builder.build()
}

/// Waits for the other side, as long as that does not say that it has failed.
fn join(node: &Node, channel: &mut ControlChannel, timeout: Duration) -> Result<(), CliError> {
    let (since, mut is_told) = (Instant::now(), false);
    let failed = |mut error: NodeError| {
        // Of all looks, and not of the last one.
        if let NodeError::Bootstrap(BootstrapError::Missing { waited, .. }) = &mut error {
            *waited = Duration::from_secs(since.elapsed().as_secs());
        }
        CliError::failed("joining the two processes", error)
    };
    loop {
        let began = Instant::now();
        let Err(error) = node.join() else { return Ok(()) };
        // An end before its time is final.
        if began.elapsed() < JOIN_LOOK || since.elapsed() >= timeout {
            return Err(failed(error));
        }
        // A side that has joined says so, too, and this one follows.
        if std::mem::replace(&mut is_told, channel.is_ready()) && is_told {
            channel.receive()?;
            return Err(failed(error));
        }
    }
}

fn facts(node: &Node, config: &Config, options: &RendezvousOptions) -> Facts {
    let mode = match (node.mode(), config.wait) {
        (PollMode::Adaptive, _) => "adaptive".into(),
        (mode, wait) => {
            let wait = wait.map_or_else(|| "auto".into(), |wait| format!("{wait:?}"));
            format!("{mode:?}, {wait}").to_lowercase()
        }
    };
    let mode = if options.poll.as_deref() == Some("auto") { format!("auto ({mode})") } else { mode };
    let profile = options.profile.as_ref().map_or_else(String::new, |name| format!(", profile {name}"));
    // Calls have no queue.
    let has_queue = options.fabric.fabric != FabricName::Grpc;
    let of_queue = |figure: u32| if has_queue { u64::from(figure) } else { 0 };
    let peer = node.peers().into_iter().next();
    let chosen = peer.and_then(|peer| Some((peer.fabric?.to_string(), peer.why.to_string())));
    let (fabric, fabric_reason) = match chosen {
        Some((fabric, why)) => (fabric, Some(why)),
        None => (options.fabric.fabric.to_string(), None),
    };
    Facts {
        fabric,
        fabric_reason,
        device: None,
        pages: node.pool_report().pages.to_string(),
        poll_mode: mode + &profile,
        inline_bytes: of_queue(config.small_tensor_bytes),
        depth: of_queue(config.queue_depth),
        mtu: None,
    }
}

/// The settings for the device options that were given.
fn device(options: &FabricOptions) -> impl Iterator<Item = (&'static str, String)> {
    let device = &options.device;
    [
        ("rdma_device", device.ib_dev.clone()),
        ("rdma_device_port", device.ib_port.map(|port| port.to_string())),
        ("rdma_gid_index", device.gid_index.map(|index| index.to_string())),
        ("rdma_qp_mtu", options.mtu.map(|bytes| bytes.to_string())),
    ]
    .into_iter()
    .filter_map(|(key, value)| Some((key, value?)))
}

/// The `cluster` setting of the two: each finds a free port and tells the other.
fn cluster(me: u32, channel: &mut ControlChannel) -> Result<String, CliError> {
    let failed = |error| CliError::failed("looking for a free port", error);
    // Held until the peer has one of its own: two processes of one host must not find the same.
    let held = TcpListener::bind((channel.local_ip()?, 0)).map_err(failed)?;
    let own = held.local_addr().map_err(failed)?.to_string();
    let theirs = String::from_utf8_lossy(&channel.swap(own.as_bytes())?).into_owned();
    let (first, second) = if me == 0 { (own, theirs) } else { (theirs, own) };
    Ok(format!("perf={first},{second}"))
}

#[cfg(test)]
mod tests {
    use super::super::control_channel::CHANNEL_TIMEOUT;
    use super::*;
    use std::os::unix::net::UnixStream;
    use tensorwire::BulkReceive;

    fn settings_with(profile: Option<&str>, borrow: bool) -> Config {
        let mut options = RendezvousOptions::default();
        (options.fabric.pool, options.borrow) = (64 << 20, borrow);
        options.profile = profile.map(str::to_owned);
        let cluster = "perf=127.0.0.1:1,127.0.0.1:2";
        let builder = Node::builder().environment([]).member("perf", 0).set("cluster", cluster);
        config(builder, &options).expect("a configuration")
    }

    #[test]
    fn a_join_that_fails_says_how_long_it_took() {
        // Bound at the same time: else both may get the same port.
        let ports = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let [own, other] = ports.map(|port| port.local_addr().unwrap());
        let builder =
            Node::builder().environment([]).member("perf", 0).set("cluster", format!("perf={own},{other}"));
        let node = builder.set("pool_size", "1MiB").join_timeout(JOIN_LOOK).start().unwrap();
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let mut channel = ControlChannel::new(ours, CHANNEL_TIMEOUT).unwrap();
        let error = join(&node, &mut channel, JOIN_LOOK + JOIN_LOOK / 2).unwrap_err().to_string();
        let waited = error.split_once(" waited ").and_then(|(_, rest)| rest.split_once("s for its cluster"));
        let waited: u64 = waited.expect("it says how long").0.parse().expect("whole seconds");
        assert!(waited >= 2, "{error}");
    }

    #[test]
    fn all_lines_of_a_profile_hold_unless_options_say_otherwise() {
        assert_eq!(settings_with(Some("throughput"), false).bulk_receive, BulkReceive::Borrow);
        assert_eq!(settings_with(None, false).bulk_receive, BulkReceive::Copy);
        assert_eq!(settings_with(None, true).bulk_receive, BulkReceive::Borrow);
    }
}
