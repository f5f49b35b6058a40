//! The channel of all calls to other processes.

use super::connector::Connector;
use http_body_util::BodyExt;
use std::task::{Context, Poll};
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::codegen::{BoxFuture, Service};
use tonic::transport::{Channel, Endpoint, Error};

/// The header of a status that has more to say. Nobody here reads it.
const DETAILS: &str = "grpc-status-details-bin";

/// Calls one process. tonic 0.14 panics if the details of a status are not in base64, and a peer
/// may send any: an answer comes without them.
#[derive(Clone)]
pub(super) struct PeerChannel(Channel);

impl PeerChannel {
    /// Must be called in a runtime. The first call connects.
    pub(super) fn new(to: &Endpoint, connector: Connector) -> Self {
        PeerChannel(to.connect_with_connector_lazy(connector))
    }
}

impl Service<Request<Body>> for PeerChannel {
    type Response = Response<Body>;
    type Error = Error;
    type Future = BoxFuture<Response<Body>, Error>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let answer = self.0.call(request);
        Box::pin(async move { answer.await.map(without_details) })
    }
}

fn without_details(answer: Response<Body>) -> Response<Body> {
    let (mut head, body) = answer.into_parts();
    head.headers.remove(DETAILS);
    let body = body.map_frame(|mut frame| {
        if let Some(trailers) = frame.trailers_mut() {
            trailers.remove(DETAILS);
        }
        frame
    });
    Response::from_parts(head, Body::new(body))
}
