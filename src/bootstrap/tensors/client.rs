//! The tensor calls that this process makes to its peers.

use super::super::auth::Authenticator;
use super::super::connector::Connector;
use super::super::generated as grpc;
use super::super::http2_stream::KEEP_ALIVE;
use super::super::peer_channel::PeerChannel;
use super::super::shared::BootstrapShared;
use super::super::thread::MAX_MESSAGE;
use super::{
    ArrivedParts, MAX_CALLS, MAX_ENDS, MAX_HEAD, MAX_TRIES, MIN_PART, PENDING_AFTER, TensorPeer,
    TensorRequest, WINDOWS,
};
use crate::wire::{Code, Incarnation, Status, TaskId, shorten};
use grpc::tensors_client::TensorsClient;
use std::error::Error;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit, TryAcquireError};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, timeout};
use tonic::transport::Endpoint;

/// Pauses between attempts of a call that was not answered: the first, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(200));
/// A peer that has no value says so after [`PENDING_AFTER`]. It is asked again at once then, and
/// after a pause if it said so earlier than this.
const SOON: Duration = PENDING_AFTER.checked_div(2).expect("not zero");
/// Without a part for this long, a call is made again. Its peer answers earlier, if it lives.
const STALLED: Duration = Duration::from_secs(10);
/// Time for a connection and its proofs.
const CONNECT_LIMIT: Duration = Duration::from_secs(2);
/// Ends of answered requests that a peer has not heard. A peer that answers hears them sooner than
/// so many come.
pub(in crate::bootstrap) const UNHEARD_ENDS: usize = 16 * 1024;
/// Bytes of a peer's words in an error.
const MAX_WORDS: usize = 1024;
/// The unit in which bytes that come are counted.
const ROOM_UNIT: u64 = 4096;

/// The clients of all peers.
pub(in crate::bootstrap) struct TensorClients {
    handle: Handle,
    clients: Vec<TensorClient>,
    /// For the last link of each peer.
    notifiers: Vec<Option<FinishedNotifier>>,
}

/// The client of one peer.
#[derive(Clone)]
struct TensorClient {
    shared: Arc<BootstrapShared>,
    peer: usize,
    grpc: TensorsClient<PeerChannel>,
    /// Calls at a time that may wait for a value.
    calls: Arc<Semaphore>,
    /// Calls at a time of tries, which do not wait for a value.
    tries: Arc<Semaphore>,
    /// Bytes of large tensors that may be on their way, in units.
    room: Arc<Semaphore>,
    max_bytes: u64,
}

/// A task that tells a peer what it may forget: the requests of earlier links, and then each one
/// of this link that has ended.
struct FinishedNotifier {
    life: Incarnation,
    ends: UnboundedSender<RequestEnd>,
    /// Places for the ends of answered requests that the peer has not heard.
    unheard: Arc<Semaphore>,
    _task: TensorCall,
}

/// What a peer is told of an ended request.
struct RequestEnd {
    id: u64,
    is_given_up: bool,
    /// One of [`UNHEARD_ENDS`], if the request was answered.
    _place: Option<OwnedSemaphorePermit>,
    /// Called when the peer has heard it.
    done: Box<dyn FnOnce() + Send + Sync>,
}

/// Why a call has no answer.
enum NoAnswer {
    /// It can be made again.
    Again(tonic::Status),
    /// It needs room for so many units first.
    NoRoom(u32),
    /// It would fail again.
    Never(Status),
}

impl TensorClients {
    /// The clients of all peers. Must be called on the bootstrap thread. `max_bytes`: bytes of the
    /// largest tensor, and of all that are on their way from one peer at a time.
    pub(in crate::bootstrap) fn new(
        shared: &Arc<BootstrapShared>,
        auth: &Arc<Authenticator>,
        max_bytes: u64,
    ) -> Result<Self, tonic::transport::Error> {
        let client = |peer| TensorClient::new(shared.clone(), auth.clone(), peer, max_bytes);
        let clients = (0..shared.peers.len()).map(client).collect::<Result<Vec<_>, _>>()?;
        let notifiers = clients.iter().map(|_| None).collect();
        Ok(TensorClients { handle: Handle::current(), clients, notifiers })
    }
}

impl FinishedNotifier {
    fn begin(handle: &Handle, client: TensorClient, life: Incarnation, first_request: u64) -> Self {
        let (ends, come) = unbounded_channel();
        let task = handle.spawn(async move {
            client.cleanup_all(life, first_request).await;
            client.tell_ends(life, come).await;
        });
        let _task = TensorCall(Some(task.abort_handle()));
        FinishedNotifier { life, ends, unheard: Arc::new(Semaphore::new(UNHEARD_ENDS)), _task }
    }

    fn notify(&self, id: u64, is_given_up: bool, done: Box<dyn FnOnce() + Send + Sync>) {
        let place = match is_given_up {
            true => None,
            false => match self.unheard.clone().try_acquire_owned() {
                Ok(place) => Some(place),
                Err(_) => return,
            },
        };
        // Fails only if the service has ended.
        let _ = self.ends.send(RequestEnd { id, is_given_up, _place: place, done });
    }
}

/// Makes tensor calls, from any thread and without blocking. Does nothing once the service is gone,
/// whose peering may refer to this.
#[derive(Clone)]
pub struct TensorCaller(Weak<BootstrapShared>);

/// A call that goes on until its answer has come. Dropping it gives it up.
#[derive(Debug)]
#[must_use = "dropping it gives the call up"]
pub struct TensorCall(Option<AbortHandle>);

impl Drop for TensorCall {
    fn drop(&mut self) {
        if let Some(task) = &self.0 {
            task.abort();
        }
    }
}

impl TensorCaller {
    pub(in crate::bootstrap) fn new(shared: &Arc<BootstrapShared>) -> Self {
        TensorCaller(Arc::downgrade(shared))
    }

    /// Does something with the clients, of which the peer has this index.
    fn with<R>(&self, peer: &TaskId, act: impl FnOnce(&mut TensorClients, usize) -> R) -> Option<R> {
        let shared = self.0.upgrade()?;
        let peer = shared.index_of(peer)?;
        Some(act(shared.tensor_clients().as_mut()?, peer))
    }

    /// Asks a peer for a value, as often as it takes. A try gets `None` if there is no value.
    ///
    /// `done` is called on the bootstrap thread, and must not block. It is not called after the
    /// call was dropped, nor after the service's end.
    pub fn recv_tensor(
        &self,
        to: TensorPeer,
        request: TensorRequest,
        done: impl FnOnce(Result<Option<ArrivedParts>, Status>) + Send + 'static,
    ) -> TensorCall {
        let task = self.with(&to.name, |TensorClients { handle, clients, .. }, peer| {
            let client = clients[peer].clone();
            handle
                .spawn(async move { done(client.recv_tensor(to.incarnation, request).await) })
                .abort_handle()
        });
        TensorCall(task)
    }

    /// Tells a peer that a request since the last [clean-up](Self::cleanup_all) has ended.
    ///
    /// `done` is called on the bootstrap thread once the peer has heard it or has refused the call,
    /// or its life is over. It must not block, and is not called after the link. The end
    /// of an answered request is not told if [`UNHEARD_ENDS`] of them wait: such a peer keeps what
    /// it has answered.
    pub fn mark_recv_finished(
        &self,
        to: TensorPeer,
        id: u64,
        is_given_up: bool,
        done: impl FnOnce() + Send + Sync + 'static,
    ) {
        self.with(&to.name, |clients, peer| {
            if let Some(notifier) =
                clients.notifiers[peer].as_ref().filter(|notifier| notifier.life == to.incarnation)
            {
                notifier.notify(id, is_given_up, Box::new(done));
            }
        });
    }

    /// Tells a peer no more ends of requests: its link has ended, and the next one begins with a
    /// [clean-up](Self::cleanup_all).
    pub fn forget_ends(&self, peer: &TaskId) {
        self.with(peer, |clients, peer| clients.notifiers[peer] = None);
    }

    /// Has a peer forget the requests of earlier lives of this process, and of this life those
    /// below `first_request`. It is not told of their ends any more. The call is repeated until the
    /// peer has heard it, its life or its link is over, or the next clean-up begins.
    pub fn cleanup_all(&self, to: TensorPeer, first_request: u64) {
        self.with(&to.name, |TensorClients { handle, clients, notifiers }, peer| {
            let client = clients[peer].clone();
            notifiers[peer] = Some(FinishedNotifier::begin(handle, client, to.incarnation, first_request));
        });
    }
}

impl TensorClient {
    fn new(
        shared: Arc<BootstrapShared>,
        auth: Arc<Authenticator>,
        peer: usize,
        max_bytes: u64,
    ) -> Result<Self, tonic::transport::Error> {
        let address = shared.address(peer);
        let name = shared.peers[peer].clone();
        let connector = Connector { auth, peer: name, address: address.clone(), limit: CONNECT_LIMIT };
        // A connection of its own: heartbeats do not wait behind tensors.
        let endpoint = Endpoint::from_shared(format!("http://{address}"))?
            .initial_stream_window_size(WINDOWS.0)
            .initial_connection_window_size(WINDOWS.1)
            // It is given up if no sign of life comes for twice that.
            .http2_keep_alive_interval(KEEP_ALIVE)
            .keep_alive_timeout(KEEP_ALIVE)
            // Parts of answers that were given up still come.
            .http2_max_concurrent_reset_streams(MAX_CALLS as usize)
            .http2_max_local_error_reset_streams(None);
        let grpc = TensorsClient::new(PeerChannel::new(&endpoint, connector))
            .max_decoding_message_size(MAX_MESSAGE)
            .max_encoding_message_size(MAX_MESSAGE);
        let units = usize::try_from(max_bytes / ROOM_UNIT + 1).unwrap_or(usize::MAX);
        let room = units.min(u32::MAX as usize).min(Semaphore::MAX_PERMITS);
        let [calls, tries, room] = [(MAX_CALLS - MAX_TRIES) as usize, MAX_TRIES as usize, room]
            .map(|permits| Arc::new(Semaphore::new(permits)));
        Ok(TensorClient { shared, peer, grpc, calls, tries, room, max_bytes })
    }

    async fn recv_tensor(
        self,
        life: Incarnation,
        request: TensorRequest,
    ) -> Result<Option<ArrivedParts>, Status> {
        let mut pause = PAUSES.0;
        let calls = if request.is_try { &self.tries } else { &self.calls };
        loop {
            // The service has ended if there is no permit to come.
            let Ok(permit) = calls.acquire().await else { return Err(stopping()) };
            let asked = Instant::now();
            let mut answer = self.try_recv(life, &request, None).await;
            if let Err(NoAnswer::NoRoom(units)) = answer {
                // No answer is open meanwhile. Unread ones would use up the window of their
                // connection, so that the answers that have room could not come either.
                let Ok(room) = self.room.acquire_many(units).await else { return Err(stopping()) };
                answer = self.try_recv(life, &request, Some(room)).await;
            }
            drop(permit);
            match answer {
                Ok(None) if !request.is_try && asked.elapsed() < SOON => {
                    let status = tonic::Status::unavailable("no value yet, said before its time");
                    pause = self.rest(pause, &status).await;
                }
                Ok(None) if !request.is_try => pause = PAUSES.0,
                Ok(answer) => return Ok(answer),
                // The value is another one than before.
                Err(NoAnswer::NoRoom(_)) => {}
                Err(NoAnswer::Never(status)) => return Err(status),
                Err(NoAnswer::Again(status)) => pause = self.rest(pause, &status).await,
            }
        }
    }

    /// One call, with `room` for its answer or without. `None` if the peer has no value yet.
    async fn try_recv(
        &self,
        life: Incarnation,
        request: &TensorRequest,
        room: Option<SemaphorePermit<'_>>,
    ) -> Result<Option<ArrivedParts>, NoAnswer> {
        let request = grpc::RecvTensorRequest {
            caller: self.shared.caller(self.peer, Some(life)),
            step_id: request.step,
            key: request.key.clone().into_bytes(),
            request_id: request.id,
            wants_checksum: request.wants_checksum,
            is_try: request.is_try,
            link: request.link,
        };
        let mut grpc = self.grpc.clone();
        let mut parts = in_time(grpc.recv_tensor(request)).await?.into_inner();
        let Some(first) = in_time(parts.message()).await? else { return Err(cut_short()) };
        if first.is_pending {
            return Ok(None);
        }
        if first.head.len() > MAX_HEAD || first.length > self.max_bytes {
            let (head, length, max) = (first.head.len(), first.length, self.max_bytes);
            return Err(NoAnswer::Never(Status::new(
                Code::ResourceExhausted,
                format!(
                    "a tensor of {length} bytes with a head of {head}: at most {max} and {MAX_HEAD} are \
                     received; make pool_size larger"
                ),
            )));
        }
        let units = u32::try_from(first.length / ROOM_UNIT).unwrap_or(u32::MAX);
        let _room = match room.filter(|room| room.num_permits() >= units as usize) {
            Some(room) => room,
            None => self.room.try_acquire_many(units).map_err(|error| match error {
                TryAcquireError::NoPermits => NoAnswer::NoRoom(units),
                TryAcquireError::Closed => NoAnswer::Never(stopping()),
            })?,
        };
        let (mut left, mut arrived) = (first.length, ArrivedParts { head: first.head, parts: Vec::new() });
        let mut data = first.data;
        loop {
            let len = data.len();
            left = left.checked_sub(len as u64).ok_or_else(|| {
                broken(format!("more than the {} bytes that the sender has announced", first.length))
            })?;
            if left > 0 && len < MIN_PART {
                return Err(broken(format!(
                    "a part of {len} bytes, with {left} bytes to come: a part that is not the last has at \
                     least {MIN_PART}"
                )));
            }
            if len > 0 {
                arrived.parts.push(data);
            }
            if left == 0 {
                return Ok(Some(arrived));
            }
            let Some(next) = in_time(parts.message()).await? else { return Err(cut_short()) };
            data = next.data;
        }
    }

    /// Tells the peer of the ends that `come`, all that wait by one call.
    async fn tell_ends(&self, life: Incarnation, mut come: UnboundedReceiver<RequestEnd>) {
        let mut ends = Vec::new();
        while come.recv_many(&mut ends, MAX_ENDS).await > 0 {
            self.mark_recv_finished(life, &ends).await;
            ends.drain(..).for_each(|end| (end.done)());
        }
    }

    async fn mark_recv_finished(&self, life: Incarnation, ends: &[RequestEnd]) {
        let ids = |is_given_up| {
            ends.iter().filter(|end| end.is_given_up == is_given_up).map(|end| end.id).collect::<Vec<_>>()
        };
        self.until_heard(|client| {
            let request = grpc::MarkRecvFinishedRequest {
                caller: client.shared.caller(client.peer, Some(life)),
                request_ids: ids(false),
                given_up_ids: ids(true),
            };
            let mut grpc = client.grpc.clone();
            async move { grpc.mark_recv_finished(request).await.map(drop) }
        })
        .await;
    }

    async fn cleanup_all(&self, life: Incarnation, first_request_id: u64) {
        self.until_heard(|client| {
            let caller = client.shared.caller(client.peer, Some(life));
            let request = grpc::CleanupAllRequest { caller, first_request_id };
            let mut grpc = client.grpc.clone();
            async move { grpc.cleanup_all(request).await.map(drop) }
        })
        .await;
    }

    /// Repeats a call until the peer has heard it, or says that it never will.
    async fn until_heard<F>(&self, call: impl Fn(Self) -> F)
    where
        F: Future<Output = Result<(), tonic::Status>>,
    {
        let mut pause = PAUSES.0;
        loop {
            let Err(NoAnswer::Again(status)) = in_time(call(self.clone())).await else { return };
            // The life that was meant is over.
            if status.code() == tonic::Code::Aborted {
                return;
            }
            pause = self.rest(pause, &status).await;
        }
    }

    /// Waits before the next attempt. Returns the pause after that.
    async fn rest(&self, pause: Duration, status: &tonic::Status) -> Duration {
        tracing::debug!("{}: {}: {status}", self.shared.options.me, self.shared.peers[self.peer]);
        if status.source().is_some() {
            // The next heartbeat tells whether the peer still lives.
            self.shared.nudges[self.peer].notify_one();
        }
        sleep(pause).await;
        PAUSES.1.min(pause * 2)
    }
}

/// Waits for a part of an answer.
async fn in_time<T>(part: impl Future<Output = Result<T, tonic::Status>>) -> Result<T, NoAnswer> {
    use tonic::Code as Grpc;
    let late = |_| NoAnswer::Again(tonic::Status::deadline_exceeded(format!("no part within {STALLED:?}")));
    timeout(STALLED, part).await.map_err(late)?.map_err(|status| match status.code() {
        Grpc::InvalidArgument | Grpc::Unimplemented | Grpc::PermissionDenied | Grpc::OutOfRange => {
            let code = Code::from_number(status.code() as i32 as u8).unwrap_or(Code::Unknown);
            NoAnswer::Never(Status::new(code, shorten(status.message(), MAX_WORDS)))
        }
        _ => NoAnswer::Again(status),
    })
}

/// The answer breaks the rules of its parts.
fn broken(what: String) -> NoAnswer {
    NoAnswer::Never(Status::new(Code::DataLoss, what))
}

fn cut_short() -> NoAnswer {
    NoAnswer::Again(tonic::Status::data_loss("the answer ends early"))
}

fn stopping() -> Status {
    Status::new(Code::Unavailable, "this process stops")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_words_of_a_refusal_are_cut_and_control_no_terminal() {
        let words = format!("\x1b[2J{}", "no".repeat(MAX_WORDS));
        let refused = in_time(async { Err::<(), _>(tonic::Status::invalid_argument(words)) }).await;
        let Err(NoAnswer::Never(status)) = refused else { panic!("it would be asked again") };
        assert!(
            status.message.starts_with("\\u{1b}[2Jno") && status.message.len() < MAX_WORDS + 10,
            "{status}"
        );
    }
}
