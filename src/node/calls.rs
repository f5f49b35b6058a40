//! A node whose tensors travel by calls over gRPC: `fabric = grpc`.

use super::call_peering::CallPeering;
use super::clock::MonotonicClock;
use super::error::NodeError;
use super::peering::PeerDirectory;
use super::pollers::PollerSet;
use crate::bootstrap::{
    ArrivedParts, Bootstrap, SentAnswer, TensorAnswer, TensorCaller, TensorPeer, TensorRequest, TensorService,
};
use crate::engine::{PollMode, StartError};
use crate::matching::recv_tensor::{
    AnswerBytes, AnswerValue, AskedRequest, OpenRequest, OwnRequest, RecvTensors, RequestChannel,
};
use crate::matching::{Members, PeerIndex, PeerObserver, RemoteSettings};
use crate::memory::{Pool, Tensor};
use crate::rendezvous::{CallPath, Paths};
use crate::telemetry::{Counters, Snapshot};
use crate::wire::{Incarnation, Status, TaskId};
use bytes::Bytes;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;

/// Name of the thread that ends late receives.
const DEADLINES: &str = "tw-deadlines";

/// The path of a node without a fabric, in the place of its pollers.
pub(super) struct NodeCalls {
    path: Arc<CallPath>,
    caller: Arc<OnceLock<TensorCaller>>,
    members: Members,
    max_bytes: u64,
    counters: Arc<Counters>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl NodeCalls {
    /// The path, which has no links yet.
    pub fn new(
        me: (TaskId, Incarnation),
        members: &Members,
        settings: RemoteSettings,
        outstanding: Arc<AtomicUsize>,
        pool: &Pool,
        observer: Arc<dyn PeerObserver>,
    ) -> Arc<Self> {
        let caller: Arc<OnceLock<TensorCaller>> = Arc::default();
        let path = Arc::new_cyclic(|path: &Weak<CallPath>| {
            let calls = Calls { path: path.clone(), caller: caller.clone(), members: members.clone() };
            let (pool, calls) = (pool.clone(), Box::new(calls));
            let state = RecvTensors::new(me, members.clone(), settings, outstanding, pool, calls);
            CallPath::new(state, members.clone(), Arc::new(MonotonicClock::start()), observer)
        });
        Arc::new(NodeCalls {
            counters: path.counters(),
            path,
            caller,
            members: members.clone(),
            max_bytes: pool.region().len(),
            thread: Mutex::default(),
        })
    }

    /// Makes and answers calls by this service, which has not started yet.
    pub fn call_by(&self, bootstrap: &Bootstrap) {
        let served = Served { path: Arc::downgrade(&self.path), members: self.members.clone() };
        let _ = self.caller.set(bootstrap.serve_tensors(Arc::new(served), self.max_bytes));
    }

    /// What the bootstrap service tells of peers goes to this path.
    pub fn peering(&self, me: TaskId, directory: PeerDirectory) -> CallPeering {
        CallPeering::new(self.path.clone(), me, directory)
    }
}

impl PollerSet for NodeCalls {
    fn start(&self) -> Result<(), NodeError> {
        let path = self.path.clone();
        let thread = std::thread::Builder::new().name(DEADLINES.into()).spawn(move || path.keep_deadlines());
        let thread = thread.map_err(|source| StartError::Thread { name: DEADLINES.into(), source })?;
        *self.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok(())
    }

    /// Calls sleep while they wait, and the thread of the bootstrap service makes the progress.
    fn mode(&self) -> PollMode {
        PollMode::Adaptive
    }

    fn paths(&self) -> Paths {
        Paths::new(vec![Box::new(self.path.clone())])
    }

    fn counted(&self) -> Snapshot {
        self.counters.snapshot()
    }

    fn close(&self) {
        self.path.close();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread
            && thread.join().is_err()
        {
            tracing::error!("the thread of the deadlines panicked");
        }
    }
}

/// Ends the thread of the deadlines, also when a later part of the node's start fails.
impl Drop for NodeCalls {
    fn drop(&mut self) {
        self.close();
    }
}

/// Carries requests by the calls of the bootstrap service.
struct Calls {
    path: Weak<CallPath>,
    caller: Arc<OnceLock<TensorCaller>>,
    members: Members,
}

impl Calls {
    fn to(&self, peer: PeerIndex, incarnation: Incarnation) -> TensorPeer {
        TensorPeer { name: self.members.task(peer).clone(), incarnation }
    }
}

impl RequestChannel for Calls {
    fn ask(&mut self, request: OwnRequest) -> OpenRequest {
        let OwnRequest { peer, life, id, step, key, wants_checksum, is_try, link } = request;
        let Some(caller) = self.caller.get() else { return Box::new(()) };
        let path = self.path.clone();
        let done = move |answer: Result<Option<ArrivedParts>, Status>| {
            let Some(path) = path.upgrade() else { return };
            match answer {
                Ok(Some(ArrivedParts { head, parts })) => path.answered((peer, id), Ok((head, parts))),
                Ok(None) => path.tried(peer, id),
                Err(status) => path.answered((peer, id), Err(status)),
            }
        };
        let request = TensorRequest { step, key, id, wants_checksum, is_try, link };
        Box::new(caller.recv_tensor(self.to(peer, life), request, done))
    }

    fn finish(&mut self, peer: PeerIndex, life: Incarnation, id: u64, is_given_up: bool) {
        let Some(caller) = self.caller.get() else { return };
        let path = self.path.clone();
        caller.mark_recv_finished(self.to(peer, life), id, is_given_up, move || {
            if let Some(path) = path.upgrade().filter(|_| is_given_up) {
                path.withdrawn(peer, id);
            }
        });
    }

    fn clean_up(&mut self, peer: PeerIndex, life: Incarnation, id: u64) {
        if let Some(caller) = self.caller.get() {
            caller.cleanup_all(self.to(peer, life), id);
        }
    }

    fn lost(&mut self, peer: PeerIndex) {
        if let Some(caller) = self.caller.get() {
            caller.forget_ends(self.members.task(peer));
        }
    }
}

/// Answers the calls of peers.
struct Served {
    path: Weak<CallPath>,
    members: Members,
}

impl Served {
    fn with(&self, from: &TensorPeer, call: impl FnOnce(&CallPath, (PeerIndex, Incarnation))) -> bool {
        match (self.path.upgrade(), self.members.index(&from.name)) {
            (Some(path), Some(peer)) => {
                call(&path, (peer, from.incarnation));
                true
            }
            _ => false,
        }
    }
}

/// The bytes of a tensor, which stays as long as they are sent.
struct SentBytes(Tensor);

impl AsRef<[u8]> for SentBytes {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes()
    }
}

fn bytes_of(AnswerValue { head, bytes }: AnswerValue) -> SentAnswer {
    let bytes = match bytes {
        AnswerBytes::Dead => Bytes::new(),
        AnswerBytes::Tensor(tensor) => Bytes::from_owner(SentBytes(tensor)),
        AnswerBytes::Failure(text) => text,
    };
    SentAnswer { head: head.encode(), bytes }
}

impl TensorService for Served {
    fn recv_tensor(&self, from: &TensorPeer, request: TensorRequest, answer: TensorAnswer) {
        let TensorRequest { step, key, id, wants_checksum, is_try, link } = request;
        let answer = Box::new(move |value| answer.send(bytes_of(value)));
        // An answer that is dropped tells the peer to ask again.
        let asked = AskedRequest { id, step, key: &key, wants_checksum, is_try, link };
        self.with(from, |path, from| path.asked(from, asked, answer));
    }

    fn mark_recv_finished(&self, from: &TensorPeer, finished: &[u64], given_up: &[u64]) {
        self.with(from, |path, from| path.finished(from, finished, given_up));
    }

    fn cleanup_all(&self, from: &TensorPeer, first_request: u64) {
        self.with(from, |path, from| path.clean_up_peer(from, first_request));
    }
}
