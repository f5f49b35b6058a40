//! Opens connections to one peer, which prove both names before they carry a request.

use super::auth::{AuthStream, Authenticator, ProofError};
use crate::wire::TaskId;
use hyper_util::rt::TokioIo;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tonic::codegen::Service;
use tonic::codegen::http::Uri;

/// Connects with one peer.
#[derive(Clone)]
pub(super) struct Connector {
    pub(super) auth: Arc<Authenticator>,
    pub(super) peer: TaskId,
    /// The peer's address in the cluster.
    pub(super) address: String,
    /// Time for the connection and the proofs.
    pub(super) limit: Duration,
}

impl Connector {
    pub(super) async fn connect(self) -> Result<AuthStream, ProofError> {
        let connected = timeout(self.limit, async {
            let stream = TcpStream::connect(&self.address).await?;
            stream.set_nodelay(true)?;
            self.auth.connect(stream, &self.peer).await
        });
        connected.await.unwrap_or_else(|_| {
            let what = format!("{} never answered within {:?}", self.address, self.limit);
            Err(io::Error::new(io::ErrorKind::TimedOut, what).into())
        })
    }
}

impl Service<Uri> for Connector {
    type Response = TokioIo<AuthStream>;
    type Error = ProofError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, ProofError>> + Send>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), ProofError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _uri: Uri) -> Self::Future {
        let connector = self.clone();
        Box::pin(async move { connector.connect().await.map(TokioIo::new) })
    }
}
