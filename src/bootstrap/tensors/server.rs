//! The tensor calls that peers make to this process.

use super::super::acceptor::ProvenCaller;
use super::super::generated as grpc;
use super::super::server::{Server, open};
use super::super::thread::MAX_MESSAGE;
use super::{
    MAX_ENDS, MAX_KEY, MAX_REQUEST, PART, PENDING_AFTER, SentAnswer, TensorAnswer, TensorPeer, TensorRequest,
    TensorService,
};
use crate::wire::{Incarnation, TaskId};
use bytes::Bytes;
use grpc::tensors_server::{self, TensorsServer};
use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::timeout;
use tonic::codegen::tokio_stream::Stream;
use tonic::{Request, Response, Status};

/// The name of the service in the paths of its calls.
pub(in crate::bootstrap) const SERVICE_NAME: &str = tensors_server::SERVICE_NAME;

/// The HTTP/2 side of the service.
pub(in crate::bootstrap) type TensorsGrpc = TensorsServer<TensorServer>;

/// Answers of one peer with a tensor that are under way at a time. Each has a part of it in memory,
/// also if the peer reads nothing.
const MAX_ANSWERS: usize = 256;

/// Has `service` answer these peers, which `server` knows.
pub(in crate::bootstrap) fn service(
    server: Arc<Server>,
    peers: &[TaskId],
    service: Arc<dyn TensorService>,
) -> TensorsGrpc {
    let places = |peer: &TaskId| (peer.clone(), Arc::new(Semaphore::new(MAX_ANSWERS)));
    TensorsServer::new(TensorServer { server, service, places: peers.iter().map(places).collect() })
        .max_decoding_message_size(MAX_REQUEST)
        .max_encoding_message_size(MAX_MESSAGE)
}

/// Serves the tensor calls of peers.
pub(in crate::bootstrap) struct TensorServer {
    server: Arc<Server>,
    service: Arc<dyn TensorService>,
    /// The places of each peer's answers.
    places: HashMap<TaskId, Arc<Semaphore>>,
}

impl TensorServer {
    /// Checks who calls. The calls of an earlier life are refused.
    fn check(&self, proven: &ProvenCaller, caller: Option<grpc::Caller>) -> Result<TensorPeer, Status> {
        let meant = caller.as_ref().map_or(0, |caller| caller.to_incarnation);
        if Incarnation::new(meant).is_none() {
            return Err(Status::invalid_argument("a tensor call names no life of the process that it calls"));
        }
        let (name, incarnation) = self.server.check_introduced(proven, caller)?;
        Ok(TensorPeer { name, incarnation })
    }

    /// A place for an answer, once there is one.
    async fn place(&self, peer: &TaskId) -> Option<OwnedSemaphorePermit> {
        // Nobody closes it.
        self.places.get(peer)?.clone().acquire_owned().await.ok()
    }
}

#[tonic::async_trait]
impl grpc::tensors_server::Tensors for TensorServer {
    type RecvTensorStream = Parts;

    async fn recv_tensor(
        &self,
        request: Request<grpc::RecvTensorRequest>,
    ) -> Result<Response<Parts>, Status> {
        let (proven, request) = open(request)?;
        let from = self.check(&proven, request.caller)?;
        if request.key.len() > MAX_KEY {
            let len = request.key.len();
            return Err(Status::invalid_argument(format!("a key of {len} bytes; at most {MAX_KEY} travel")));
        }
        let key = String::from_utf8(request.key)
            .map_err(|error| Status::invalid_argument(format!("a key that is not UTF-8: {error}")))?;
        let (answer, answered) = oneshot::channel();
        let request = TensorRequest {
            step: request.step_id,
            key,
            id: request.request_id,
            wants_checksum: request.wants_checksum,
            is_try: request.is_try,
            link: request.link,
        };
        let is_try = request.is_try;
        self.service.recv_tensor(&from, request, TensorAnswer(answer));
        match timeout(PENDING_AFTER, answered).await {
            Ok(Ok(value)) => {
                let place = self.place(&from.name).await;
                Ok(Response::new(Parts::of_value(proven, place, value)))
            }
            Ok(Err(_)) if !is_try => {
                Err(Status::unavailable("another link, or a newer call of the same request"))
            }
            Ok(Err(_)) | Err(_) => Ok(Response::new(Parts::pending(proven))),
        }
    }

    async fn mark_recv_finished(
        &self,
        request: Request<grpc::MarkRecvFinishedRequest>,
    ) -> Result<Response<grpc::MarkRecvFinishedResponse>, Status> {
        let (proven, request) = open(request)?;
        let from = self.check(&proven, request.caller)?;
        let ends = request.request_ids.len() + request.given_up_ids.len();
        if ends > MAX_ENDS {
            let message = format!("the ends of {ends} requests; a call tells at most {MAX_ENDS}");
            return Err(Status::invalid_argument(message));
        }
        self.service.mark_recv_finished(&from, &request.request_ids, &request.given_up_ids);
        Ok(Response::new(grpc::MarkRecvFinishedResponse {}))
    }

    async fn cleanup_all(
        &self,
        request: Request<grpc::CleanupAllRequest>,
    ) -> Result<Response<grpc::CleanupAllResponse>, Status> {
        let (proven, request) = open(request)?;
        let from = self.check(&proven, request.caller)?;
        self.service.cleanup_all(&from, request.first_request_id);
        Ok(Response::new(grpc::CleanupAllResponse {}))
    }
}

/// The parts of an answer. Each is made when the connection has room for it.
pub(in crate::bootstrap) struct Parts {
    /// Its connection is of use as long as parts leave.
    caller: Arc<ProvenCaller>,
    /// Among the answers of the peer. `None` if there is nothing yet.
    _place: Option<OwnedSemaphorePermit>,
    first: Option<grpc::RecvTensorPart>,
    rest: Bytes,
}

impl Parts {
    fn of_value(caller: Arc<ProvenCaller>, place: Option<OwnedSemaphorePermit>, value: SentAnswer) -> Self {
        let SentAnswer { head, bytes: mut rest } = value;
        let length = rest.len() as u64;
        let data = rest.split_to(rest.len().min(PART));
        let first = grpc::RecvTensorPart { head, length, data, ..Default::default() };
        Parts { caller, _place: place, first: Some(first), rest }
    }

    fn pending(caller: Arc<ProvenCaller>) -> Self {
        let first = grpc::RecvTensorPart { is_pending: true, ..Default::default() };
        Parts { caller, _place: None, first: Some(first), rest: Bytes::new() }
    }
}

impl Stream for Parts {
    type Item = Result<grpc::RecvTensorPart, Status>;

    fn poll_next(mut self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(first)));
        }
        if self.rest.is_empty() {
            return Poll::Ready(None);
        }
        self.caller.extend();
        let len = self.rest.len().min(PART);
        let data = self.rest.split_to(len);
        Poll::Ready(Some(Ok(grpc::RecvTensorPart { data, ..Default::default() })))
    }
}
