//! A member of a program: a process with a node, which does what it is told.

use super::calls::{Open, Outcome, Wait, ended, filled, fresh};
use super::model::{CallNo, pattern};
use super::program::{Action, Form, Key, ReceiveKind, SEQUENCE, device, edge_name, step_id};
use super::reply::{REPAIRS, Verdict, reply};
use super::{default_patience, direct_patience, patience, program_of};
use crate::common::{SOON, member};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tensorwire::{
    Batch, Code, Counter, Delivery, Edge, Error, Node, Sequence, Standing, Status, Step, Tensor, TensorMut,
    Value,
};

/// The test that is a member.
pub const ROLE: &str = "programs::member::role_member";

#[test]
#[ignore = "a role, not a test"]
fn role_member() {
    let variable = |name| std::env::var(name).expect("started by a test");
    let number = |name| variable(name).parse::<u64>().expect("a number");
    let mut member =
        Member::start(&variable("TEST_CLUSTER"), number("TEST_ME") as usize, number("TEST_SEED"));
    println!("joined");
    for line in std::io::stdin().lines() {
        let line = line.expect("the test is there");
        let (word, rest) = line.split_once(' ').unwrap_or((&line, ""));
        let numbers: Vec<u64> = rest.split_whitespace().map(|text| text.parse().expect("a number")).collect();
        if word == "stop" {
            println!("{REPAIRS}{}", member.node.counters().get(Counter::LinksRepaired));
            return drop(member.node.stop().expect("it stops"));
        }
        let verdict = member.does(word, &numbers);
        let ended = member.ended();
        println!("{}", reply(&verdict, &ended));
        member.hold(ended);
    }
}

/// What a member has of its program.
struct Member {
    at: usize,
    actions: Vec<Action>,
    node: Node,
    sequence: Sequence,
    steps: BTreeMap<u64, Step>,
    edges: BTreeMap<Key, Edge>,
    /// By their keys of step 0.
    batches: BTreeMap<Vec<Key>, Batch>,
    standing: Vec<Standing>,
    open: Vec<Open>,
    /// Those that have ended since the last reply, by a callback or within a call.
    called_back: Arc<Mutex<Vec<(CallNo, Outcome)>>>,
    /// Received tensors, with a copy of what was in them.
    held: BTreeMap<CallNo, (Tensor, Vec<u8>)>,
}

impl Member {
    fn start(cluster: &str, at: usize, seed: u64) -> Member {
        let program = program_of(seed);
        let settings = &program.settings;
        let mut builder = member(cluster, at as u32)
            .set("fabric", std::env::var("TEST_FABRIC").expect("started by a test"))
            .set("pool_size", "64MiB")
            .set("queue_depth", settings.depth.to_string())
            .set("small_tensor_bytes", settings.small_tensor_bytes.min(160).to_string())
            .set("max_requests", settings.max_requests.to_string())
            .set("max_outstanding_sends", settings.max_outstanding_sends.to_string())
            .set("bulk_receive", if settings.borrow { "borrow" } else { "copy" })
            .set("recv_timeout", format!("{}ms", default_patience(settings.recv_timeout).as_millis()))
            // The polling threads of a machine that has other things to do may come late.
            .set("cancel_grace", format!("{}s", SOON.as_secs()))
            .set("validate", settings.validates(at).to_string());
        let most_lent = if settings.lends { settings.max_lent_bytes } else { 0 };
        if most_lent < u64::MAX {
            builder = builder.set("max_lent_bytes", most_lent.to_string());
        }
        let node = builder.start().expect("the node starts");
        node.join().expect("the others come");
        Member {
            at,
            actions: program.actions,
            sequence: node.sequence(SEQUENCE),
            node,
            steps: BTreeMap::new(),
            edges: BTreeMap::new(),
            batches: BTreeMap::new(),
            standing: Vec::new(),
            open: Vec::new(),
            called_back: Arc::default(),
            held: BTreeMap::new(),
        }
    }

    fn does(&mut self, word: &str, numbers: &[u64]) -> Verdict {
        let first = numbers.first().copied().unwrap_or_default();
        let second = numbers.get(1).copied().unwrap_or_default();
        let done = match word {
            "act" => {
                let action = self.actions[first as usize].clone();
                self.acts(&action, second as CallNo, &numbers[2..])
            }
            "cancel" => self.nth_open(first).map_or(Ok(Verdict::Ok), |open| {
                self.open[open].wait.cancel();
                Ok(Verdict::Ok)
            }),
            "drop" => Ok(self.drop_open(first)),
            "release" => Ok(self.release(first as CallNo)),
            "window" => self.standing[first as usize].set_window(second as u32).map(|()| Verdict::Ok),
            "unstand" => {
                drop(self.standing.remove(first as usize));
                Ok(Verdict::Ok)
            }
            "receive" => {
                let [_, millis, from, name, step, frame] = *numbers else { panic!("what is {numbers:?}?") };
                let key = Key { from: from as usize, to: self.at, name, step, frame };
                self.receive(
                    key,
                    first as CallNo,
                    None,
                    Some(Duration::from_millis(millis)),
                    ReceiveKind::Pending,
                )
            }
            "cleanup" => {
                self.node.cleanup(step_id(first));
                Ok(Verdict::Ok)
            }
            "look" => {
                self.node.progress().expect("usable");
                Ok(Verdict::Ok)
            }
            "stands_no_more" => {
                self.standing.clear();
                self.batches.clear();
                Ok(Verdict::Ok)
            }
            "rest" => Ok(self.rest()),
            _ => panic!("what is {word}?"),
        };
        done.unwrap_or_else(Verdict::Refused)
    }

    /// Carries out its part of an action.
    fn acts(&mut self, action: &Action, call: CallNo, numbers: &[u64]) -> Result<Verdict, Error> {
        match action {
            Action::Begin { step, .. } => self.step(*step).map(|_| Verdict::Ok),
            Action::Stand { key, window } => {
                let edge = self.edge(*key)?;
                self.standing.push(self.node.standing(&edge, self.sequence, *window)?);
                Ok(Verdict::Ok)
            }
            Action::Send { key, form } => {
                let Some(tensor) = self.value(*key, numbers[0], form.as_ref()) else {
                    return Ok(Verdict::NoRoom);
                };
                let (edge, step) = (self.edge(*key)?, self.step(key.step)?);
                match tensor {
                    Some(tensor) if key.name.is_multiple_of(2) => step.send(&edge, tensor)?,
                    Some(tensor) => step.send_within(&edge, tensor, Duration::ZERO)?,
                    None => step.send_dead(&edge)?,
                }
                Ok(Verdict::Ok)
            }
            Action::SendAll { values } => {
                let all = values.iter().zip(numbers);
                let given: Option<Vec<_>> =
                    all.map(|((key, form), number)| self.value(*key, *number, form.as_ref())).collect();
                let Some(given) = given else { return Ok(Verdict::NoRoom) };
                let step = self.step(values[0].0.step)?;
                let edges: Result<Vec<_>, _> = values.iter().map(|(key, _)| self.edge(*key)).collect();
                let given = given.into_iter().map(|tensor| tensor.map_or(Value::Dead, Value::Tensor));
                let values: Vec<_> = edges?.into_iter().zip(given).collect();
                step.send_all(values.iter().map(|(edge, value)| (edge, value.clone())))?;
                Ok(Verdict::Ok)
            }
            Action::ReceiveAll { keys, timeout } => {
                let edges: Result<Vec<_>, _> = keys.iter().map(|key| self.edge(*key)).collect();
                let (edges, step) = (edges?, self.step(keys[0].step)?);
                let edges: Vec<&Edge> = edges.iter().collect();
                let pending = step.receive_all(&edges).within(patience(*timeout)).begin()?;
                let calls: Vec<CallNo> = (call..call + keys.len()).collect();
                self.open.push(Open::batch(&calls, Wait::Batch(pending)));
                Ok(Verdict::Ok)
            }
            Action::WaitForAll { keys, into, timeout } => self.wait_for_all(keys, call, into, *timeout),
            Action::Receive { key, into, timeout, kind } => {
                let given = match into {
                    None => None,
                    Some(form) => match self.node.pool().tensor(form.meta()) {
                        Ok(tensor) => Some(tensor),
                        Err(_) => return Ok(Verdict::NoRoom),
                    },
                };
                let timeout = timeout.map(|timeout| match kind {
                    ReceiveKind::Direct => direct_patience(timeout),
                    _ => patience(timeout),
                });
                self.receive(*key, call, given, timeout, *kind)
            }
            Action::Abort { step, .. } => {
                let status = Status::new(Code::Internal, format!("the program aborts step {step}"));
                self.step(*step)?.abort(status).map(|()| Verdict::Ok)
            }
            Action::AbortFrom { step, .. } => {
                let status = Status::new(Code::Internal, format!("the program aborts from step {step} on"));
                let step = self.step(*step)?;
                self.sequence.abort_from(&step, status).map(|()| Verdict::Ok)
            }
            Action::Cleanup { step, .. } => {
                self.node.cleanup(step_id(*step));
                Ok(Verdict::Ok)
            }
            Action::Flush { .. } => self.node.flush(Duration::ZERO).map(|_| Verdict::Ok),
            _ => panic!("no member does {action}"),
        }
    }

    /// Begins a receive, or waits for it. Without a timeout it has that of the node.
    fn receive(
        &mut self,
        key: Key,
        call: CallNo,
        into: Option<TensorMut>,
        timeout: Option<Duration>,
        kind: ReceiveKind,
    ) -> Result<Verdict, Error> {
        let (edge, step) = (self.edge(key)?, self.step(key.step)?);
        let receive = step.receive(&edge);
        let receive = match timeout {
            Some(timeout) => receive.within(timeout),
            None => receive,
        };
        let wait = match (into, kind) {
            (into, ReceiveKind::Direct) => {
                let outcome = match into {
                    Some(into) => receive.into(into).wait().map(filled),
                    None => receive.wait().map(fresh),
                };
                if let Err(error @ Error::ResourceExhausted { .. }) = outcome {
                    return Err(error);
                }
                self.called_back.lock().expect("no panic").push((call, outcome));
                return Ok(Verdict::Ok);
            }
            (Some(into), _) => Wait::Into(receive.into(into).begin()?),
            (None, ReceiveKind::Pending) => Wait::Fresh(receive.begin()?),
            (None, ReceiveKind::Callback) => {
                let called_back = self.called_back.clone();
                Wait::CalledBack(receive.then(move |result: Result<Delivery<Tensor>, Error>| {
                    called_back.lock().expect("no panic").push((call, result.map(fresh)));
                })?)
            }
        };
        self.open.push(Open::one(call, wait));
        Ok(Verdict::Ok)
    }

    fn wait_for_all(
        &mut self,
        keys: &[Key],
        call: CallNo,
        into: &[Form],
        timeout: u64,
    ) -> Result<Verdict, Error> {
        let given = into.iter().map(|form| self.node.pool().tensor(form.meta()).ok()).collect();
        let Some(given): Option<Vec<TensorMut>> = given else { return Ok(Verdict::NoRoom) };
        let (step, timeout) = (self.step(keys[0].step)?, direct_patience(timeout));
        let edges = keys.iter().map(|key| self.edge(*key)).collect::<Result<Vec<_>, _>>()?;
        let of: Vec<Key> = keys.iter().map(|key| Key { step: 0, ..*key }).collect();
        if !self.batches.contains_key(&of) {
            self.batches.insert(of.clone(), self.node.batch(edges)?);
        }
        let batch = &self.batches[&of];
        let received: Result<Vec<_>, _> = match given.is_empty() {
            true => batch.recv(&step, timeout).map(|got| got.into_iter().map(fresh).collect()),
            false => {
                let receive = batch.receive(&step).within(timeout).into(given);
                receive.wait().map(|got| got.into_iter().map(filled).collect())
            }
        };
        Ok(match received {
            Err(error) => Verdict::Failed(error),
            Ok(values) => {
                assert_eq!(values.len(), keys.len(), "each edge has one value");
                let values = (call..).zip(values).map(|(call, value)| (call, Ok(value)));
                self.called_back.lock().expect("no panic").extend(values);
                Verdict::Ok
            }
        })
    }

    /// A value of this form; `None` if the pool is full.
    fn value(&self, key: Key, number: u64, form: Option<&Form>) -> Option<Option<Tensor>> {
        let Some(form) = form else { return Some(None) };
        let mut tensor = self.node.pool().tensor(form.meta()).ok()?;
        let words = tensor.bytes_mut().chunks_mut(8).zip(pattern(key, number as usize, form.dtype));
        words.for_each(|(bytes, word)| bytes.copy_from_slice(&word[..bytes.len()]));
        Some(Some(tensor.freeze()))
    }

    fn nth_open(&self, call: u64) -> Option<usize> {
        self.open.iter().position(|open| open.calls().any(|own| own == call as CallNo))
    }

    /// Drops an open call that has not ended.
    fn drop_open(&mut self, call: u64) -> Verdict {
        let ended = self.ended();
        self.called_back.lock().expect("no panic").extend(ended);
        match self.nth_open(call) {
            Some(open) => {
                drop(self.open.remove(open));
                Verdict::Ok
            }
            None => Verdict::Not("it has ended".into()),
        }
    }

    fn release(&mut self, call: CallNo) -> Verdict {
        let (tensor, was) = self.held.remove(&call).expect("held");
        match tensor.bytes() == was {
            true => Verdict::Ok,
            false => Verdict::Not(format!("a tensor changed while it was held, {}", tensor.meta())),
        }
    }

    fn ended(&mut self) -> Vec<(CallNo, Outcome)> {
        ended(&mut self.open, &self.called_back)
    }

    fn hold(&mut self, ended: Vec<(CallNo, Outcome)>) {
        for (call, outcome) in ended {
            if let Ok((tensor, false)) = outcome {
                let was = tensor.bytes().to_vec();
                self.held.insert(call, (tensor, was));
            }
        }
    }

    /// Once all steps have ended everywhere: nothing is under way, and the pool is empty.
    fn rest(&mut self) -> Verdict {
        let untaken = self.node.flush(SOON).expect("usable");
        if !untaken.is_empty() {
            return Verdict::Not(format!("it takes values for untaken: {untaken}"));
        }
        let began = Instant::now();
        while !self.node.pool().is_empty() {
            if began.elapsed() > SOON {
                return Verdict::Not(format!("its pool has tensors: {:?}", self.node.pool().stats()));
            }
            self.node.progress().expect("usable");
            std::thread::yield_now();
        }
        Verdict::Ok
    }

    /// The step. It begins at its first use.
    fn step(&mut self, step: u64) -> Result<Step, Error> {
        if let Some(step) = self.steps.get(&step) {
            return Ok(step.clone());
        }
        let begun = self.node.step(step_id(step))?;
        self.steps.insert(step, begun.clone());
        Ok(begun)
    }

    fn edge(&mut self, key: Key) -> Result<Edge, Error> {
        let of = Key { step: 0, frame: 0, ..key };
        if !self.edges.contains_key(&of) {
            let edge = self.node.edge(&device(key.from), &device(key.to), &edge_name(key.name))?;
            self.edges.insert(of, edge);
        }
        Ok(self.edges[&of].at(key.frame, 0))
    }
}
