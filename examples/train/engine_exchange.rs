//! The training with tensorwire: weights and gradients are tensors on edges, step by step.

use crate::error::Result;
use crate::exchange::{ServerExchange, Traffic, WorkerExchange};
use crate::latency::Latencies;
use crate::member::{Assignment, Job};
use crate::model::Parameter;
use crate::plan::Plan;
use std::cell::RefCell;
use std::ops::{Deref, DerefMut};
use std::time::{Duration, Instant};
use tensorwire::{BufferRing, Counter, DType, Edge, FabricKind, Node, Sequence, Standing, Step, TensorMut};

/// Buffers of an edge: one to write while the other is read.
const BUFFERS: usize = 2;
/// How long a buffer that was sent may be in use.
const BUFFER_TIMEOUT: Duration = Duration::from_secs(60);

/// Steps in a window of standing requests over verbs. More would cost memory for destinations and
/// gain little.
const WINDOW: u32 = 16;
/// Steps in a window on shared memory, where a window costs no destinations.
const SHM_WINDOW: u32 = 64;

/// This process's node.
pub struct Engine {
    node: Node,
    /// The steps of the training, if edges have standing requests.
    sequence: Option<Sequence>,
    /// Whether standing requests have destinations of their own, as over verbs and tcp.
    has_destinations: bool,
    receives: RefCell<Latencies>,
}

impl Engine {
    /// Starts the engine and waits until all processes of the run are connected.
    pub fn join(assignment: &Assignment) -> Result<Engine> {
        let node = Node::builder()
            .member(assignment.member.job.name(), assignment.member.task as u32)
            .set("cluster", assignment.cluster())
            .set("pool_size", assignment.pool_bytes.to_string())
            // No process can go on without the others: a lost peer ends all calls with an error
            // that names it.
            .set("peer_loss", "fail_all")
            .set("poll", assignment.poll.as_str())
            .set("fabric", assignment.fabric.as_str());
        let node = match &assignment.device {
            Some(device) => node.set("rdma_device", device.as_str()),
            None => node,
        };
        let node = match &assignment.secret_file {
            Some(file) => node.set("secret_file", file.to_string_lossy()),
            None => node,
        };
        let node = match assignment.core {
            Some(core) => node.set("cores", core.to_string()),
            None => node,
        };
        let node = node.start()?;
        node.join()?;
        let sequence = assignment.standing.then(|| node.sequence(0));
        let mut engine = Engine { node, sequence, has_destinations: false, receives: RefCell::default() };
        engine.has_destinations = sequence.is_some() && engine.writes();
        Ok(engine)
    }

    /// Makes standing requests for these edges. They end when the returned handles are dropped.
    fn standing<'e>(&self, edges: impl Iterator<Item = &'e Edge>) -> Result<Vec<Standing>> {
        let Some(steps) = self.sequence else { return Ok(Vec::new()) };
        let window = if self.writes() { WINDOW } else { SHM_WINDOW };
        let standing = edges.map(|edge| self.node.standing(edge, steps, window));
        Ok(standing.collect::<std::result::Result<_, _>>()?)
    }

    /// Whether tensors are written to destinations of a peer.
    fn writes(&self) -> bool {
        let writing = [Some(FabricKind::Verbs), Some(FabricKind::Tcp)];
        self.node.peers().iter().any(|peer| writing.contains(&peer.fabric))
    }

    /// The exchange of a server.
    pub fn server(&self, plan: &Plan, task: usize) -> Result<EngineServer<'_>> {
        let owned = plan.owned(task);
        let mut exchange = EngineServer {
            engine: self,
            weights: vec![],
            publish: vec![],
            collect: vec![],
            _standing: vec![],
        };
        for parameter in &owned {
            exchange.weights.push(self.ring(*parameter)?);
        }
        for worker in 0..plan.workers as u32 {
            let publish = |p: &Parameter| self.node.edge_to(Job::Worker.name(), worker, &weights_edge(*p));
            let collect = |p: &Parameter| self.node.edge_from(Job::Worker.name(), worker, &gradient_edge(*p));
            exchange.publish.push(owned.iter().map(publish).collect::<std::result::Result<_, _>>()?);
            for parameter in &owned {
                exchange.collect.push((*parameter, collect(parameter)?));
            }
        }
        exchange._standing = self.standing(exchange.collect.iter().map(|(_, edge)| edge))?;
        Ok(exchange)
    }

    /// The exchange of a worker.
    pub fn worker(&self, plan: &Plan) -> Result<EngineWorker<'_>> {
        let mut exchange =
            EngineWorker { engine: self, gradients: vec![], pull: vec![], push: vec![], _standing: vec![] };
        for parameter in Parameter::all() {
            let (job, server) = (Job::Server.name(), plan.owner(parameter) as u32);
            exchange.gradients.push(self.ring(parameter)?);
            exchange.pull.push(self.node.edge_from(job, server, &weights_edge(parameter))?);
            exchange.push.push(self.node.edge_to(job, server, &gradient_edge(parameter))?);
        }
        exchange._standing = self.standing(exchange.pull.iter())?;
        Ok(exchange)
    }

    /// Serves the other processes once.
    pub fn progress(&self) -> Result<()> {
        self.node.progress()?;
        Ok(())
    }

    /// Leaves the cluster, and returns the counted traffic.
    pub fn finish(self) -> Result<Traffic> {
        let counted = self.node.counters();
        let operations = [Counter::MessagesSent, Counter::WritesPosted, Counter::LoansPosted];
        let peers = self.node.peers();
        let mut fabrics: Vec<String> =
            peers.iter().filter_map(|peer| peer.fabric.map(|fabric| fabric.to_string())).collect();
        fabrics.sort();
        fabrics.dedup();
        let traffic = Traffic {
            tensors_received: counted.get(Counter::TensorsReceived),
            bytes_received: counted.get(Counter::BytesReceived),
            fabric_ops: operations.into_iter().map(|operation| counted.get(operation)).sum(),
            fabric: fabrics.join(", "),
            pages: self.node.pool_report().pages.to_string(),
            receives: self.receives.take(),
        };
        self.node.stop()?;
        Ok(traffic)
    }

    /// Leaves the cluster because of an error.
    pub fn fail(&self, reason: &str) {
        // The error that led here matters more than an error of leaving.
        let _ = self.node.fail(reason);
    }

    fn ring(&self, parameter: Parameter) -> Result<BufferRing> {
        Ok(self.node.ring(DType::F32, &dims(parameter), BUFFERS)?)
    }

    fn buffer(&self, parameter: Parameter) -> Result<Buffer> {
        Ok(Buffer(self.node.tensor(DType::F32, &dims(parameter))?))
    }

    /// The next free buffer of each ring. Waits while slow readers use all buffers.
    fn acquire_buffers(&self, rings: &[BufferRing], buffers: &mut Vec<Buffer>) -> Result<()> {
        for ring in rings {
            buffers.push(Buffer(self.node.acquire_within(ring, BUFFER_TIMEOUT)?));
        }
        Ok(())
    }

    /// Begins a receive on every edge, then waits for each. The receives fill the buffers. Standing
    /// requests with destinations of their own replace them.
    fn receive<'e>(
        &self,
        step: &Step,
        edges: impl Iterator<Item = &'e Edge>,
        buffers: &mut Vec<Buffer>,
    ) -> Result<()> {
        let start = Instant::now();
        if self.has_destinations {
            buffers.clear();
            let begun: std::result::Result<Vec<_>, _> =
                edges.map(|edge| step.receive(edge).begin()).collect();
            for pending in begun? {
                let tensor = pending.wait()?.tensor;
                self.receives.borrow_mut().record(start.elapsed());
                buffers.push(Buffer(tensor.make_mut(self.node.pool())?));
            }
            return Ok(());
        }
        let begun: std::result::Result<Vec<_>, _> = edges
            .zip(buffers.drain(..))
            .map(|(edge, Buffer(into))| step.receive(edge).into(into).begin())
            .collect();
        for pending in begun? {
            buffers.push(Buffer(pending.wait()?.tensor));
            self.receives.borrow_mut().record(start.elapsed());
        }
        Ok(())
    }

    /// Cleans up the step before this one. Every peer has finished it.
    fn forget_before(&self, step: u64) {
        if let Some(before) = step.checked_sub(1) {
            self.node.cleanup(before);
        }
    }
}

fn dims(parameter: Parameter) -> Vec<u64> {
    parameter.dims().into_iter().map(|dim| dim as u64).collect()
}

fn weights_edge(parameter: Parameter) -> String {
    format!("weights/{}", parameter.name())
}

fn gradient_edge(parameter: Parameter) -> String {
    format!("grad/{}", parameter.name())
}

/// A tensor of f32 that this process may write.
pub struct Buffer(TensorMut);

impl Deref for Buffer {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        self.0.as_slice().expect("it was made as f32, and a receive never changes that")
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        self.0.as_mut_slice().expect("it was made as f32, and a receive never changes that")
    }
}

/// A worker's edges, and the buffers of its gradients.
pub struct EngineWorker<'a> {
    engine: &'a Engine,
    gradients: Vec<BufferRing>,
    pull: Vec<Edge>,
    push: Vec<Edge>,
    /// Held for the standing requests of the weights.
    _standing: Vec<Standing>,
}

impl WorkerExchange for EngineWorker<'_> {
    type Buffer = Buffer;

    fn weight_buffers(&mut self) -> Result<Vec<Buffer>> {
        Parameter::all().map(|parameter| self.engine.buffer(parameter)).collect()
    }

    fn pull(&mut self, step: u64, weights: &mut Vec<Buffer>) -> Result<()> {
        self.engine.receive(&self.engine.node.step(step)?, self.pull.iter(), weights)?;
        // The server has published these weights after it had all gradients of the step before.
        self.engine.forget_before(step);
        Ok(())
    }

    fn gradient_buffers(&mut self, gradients: &mut Vec<Buffer>) -> Result<()> {
        self.engine.acquire_buffers(&self.gradients, gradients)
    }

    fn push(&mut self, step: u64, gradients: &mut Vec<Buffer>) -> Result<()> {
        let step = self.engine.node.step(step)?;
        for (edge, Buffer(gradient)) in self.push.iter().zip(gradients.drain(..)) {
            step.send(edge, gradient.freeze())?;
        }
        Ok(())
    }
}

/// A server's edges, and the buffers of its weights.
pub struct EngineServer<'a> {
    engine: &'a Engine,
    weights: Vec<BufferRing>,
    /// For each worker, the edges of all tensors.
    publish: Vec<Vec<Edge>>,
    /// Worker by worker, all tensors.
    collect: Vec<(Parameter, Edge)>,
    /// Held for the standing requests of the gradients.
    _standing: Vec<Standing>,
}

impl ServerExchange for EngineServer<'_> {
    type Buffer = Buffer;

    fn weight_buffers(&mut self, weights: &mut Vec<Buffer>) -> Result<()> {
        self.engine.acquire_buffers(&self.weights, weights)
    }

    fn publish(&mut self, step: u64, weights: &mut Vec<Buffer>) -> Result<()> {
        let step = self.engine.node.step(step)?;
        for (index, Buffer(tensor)) in weights.drain(..).enumerate() {
            // One tensor for all workers: a clone is another handle to the same memory.
            let tensor = tensor.freeze();
            for edges in &self.publish {
                step.send(&edges[index], tensor.clone())?;
            }
        }
        Ok(())
    }

    fn gradient_buffers(&mut self) -> Result<Vec<Buffer>> {
        self.collect.iter().map(|(parameter, _)| self.engine.buffer(*parameter)).collect()
    }

    fn collect(&mut self, step: u64, gradients: &mut Vec<Buffer>) -> Result<()> {
        let edges = self.collect.iter().map(|(_, edge)| edge);
        self.engine.receive(&self.engine.node.step(step)?, edges, gradients)?;
        // A worker pushes only after it has pulled, so no worker needs an earlier step.
        self.engine.forget_before(step);
        Ok(())
    }
}
