//! The channel of all calls to other processes.

use super::connector::Connector;
use http_body_util::BodyExt;
use std::task::{Context, Poll};
use tonic::body::Body;
use tonic::codegen::http::{HeaderMap, Request, Response};
use tonic::codegen::{BoxFuture, Service};
use tonic::transport::{Channel, Endpoint, Error};

/// The header of a status that has more to say. Nobody here reads it.
const DETAILS: &str = "grpc-status-details-bin";
/// The words of a status, in percent-encoding.
const MESSAGE: &str = "grpc-message";

/// Calls one process. tonic 0.14 panics if the details of a status are not in base64, and writes a
/// warning if its words are not UTF-8. An answer comes without such.
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
        Box::pin(async move { answer.await.map(sane) })
    }
}

fn sane(answer: Response<Body>) -> Response<Body> {
    let (mut head, body) = answer.into_parts();
    sane_status(&mut head.headers);
    let body = body.map_frame(|mut frame| {
        if let Some(trailers) = frame.trailers_mut() {
            sane_status(trailers);
        }
        frame
    });
    Response::from_parts(head, Body::new(body))
}

fn sane_status(headers: &mut HeaderMap) {
    headers.remove(DETAILS);
    if headers.get(MESSAGE).is_some_and(|words| !is_text(words.as_bytes())) {
        headers.remove(MESSAGE);
    }
}

/// Whether bytes in percent-encoding are UTF-8.
fn is_text(encoded: &[u8]) -> bool {
    let mut bytes = Vec::with_capacity(encoded.len());
    let mut rest = encoded;
    while let [first, more @ ..] = rest {
        let digit = |at: usize| more.get(at).and_then(|byte| char::from(*byte).to_digit(16));
        let (byte, left) = match (first, digit(0), digit(1)) {
            (b'%', Some(high), Some(low)) => ((high * 16 + low) as u8, &more[2..]),
            _ => (*first, more),
        };
        bytes.push(byte);
        rest = left;
    }
    std::str::from_utf8(&bytes).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_that_are_no_text_are_found_in_their_encoding() {
        for text in ["", "plain", "100%", "%4", "%zz%", "%e2%82%ac", "a%20b"] {
            assert!(is_text(text.as_bytes()), "{text}");
        }
        for other in ["%ff", "%e2%82", "a%C3"] {
            assert!(!is_text(other.as_bytes()), "{other}");
        }
        assert!(!is_text(b"\xff"));
    }

    #[test]
    fn a_status_has_no_details_and_no_words_that_are_no_text() {
        let left = |words: &'static str| {
            let status = [(MESSAGE, words), (DETAILS, "%%%"), ("grpc-status", "9")];
            let status = status.map(|(name, value)| {
                (name.parse().expect("a name"), value.parse().expect("visible characters"))
            });
            let mut headers = HeaderMap::from_iter(status);
            sane_status(&mut headers);
            (headers.len(), headers.get(MESSAGE).is_some())
        };
        assert_eq!(left("it%20lies"), (2, true));
        assert_eq!(left("%ff"), (1, false));
    }
}
