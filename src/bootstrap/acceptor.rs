//! The connections that peers open: bounded in number, and closed when they are idle for too long.
//!
//! Each connection takes a file descriptor and memory before its client is known. These bounds end
//! connections of clients that send nothing or garbage.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, Sleep, sleep};
use tonic::codegen::tokio_stream::Stream;
use tonic::transport::server::Connected;

/// Pause of the acceptor after a failure, which is mostly a lack of file descriptors.
const PAUSE: Duration = Duration::from_millis(50);

/// Accepts connections.
pub(super) struct Acceptor {
    listener: TcpListener,
    /// Connections that are open now.
    open: Arc<AtomicUsize>,
    max_open: usize,
    idle: Duration,
    pause: Option<Pin<Box<Sleep>>>,
}

impl Acceptor {
    /// Keeps at most `max_open` connections at a time, and closes a connection that is silent for
    /// `idle`.
    pub(super) fn new(listener: TcpListener, max_open: usize, idle: Duration) -> Self {
        Acceptor { listener, open: Arc::new(AtomicUsize::new(0)), max_open, idle, pause: None }
    }

    /// Accepts a connection, unless `max_open` are open.
    fn admit(&self, stream: TcpStream, from: SocketAddr) -> Option<AcceptedConnection> {
        // Relaxed: only the bootstrap thread counts.
        if self.open.load(Ordering::Relaxed) >= self.max_open {
            tracing::warn!("a connection from {from} is refused: {} are open already", self.max_open);
            return None;
        }
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!("TCP_NODELAY for {from}: {error}");
        }
        self.open.fetch_add(1, Ordering::Relaxed);
        let silence = Box::pin(sleep(self.idle));
        Some(AcceptedConnection { stream, idle: self.idle, silence, open: self.open.clone() })
    }
}

impl Stream for Acceptor {
    type Item = io::Result<AcceptedConnection>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(pause) = &mut self.pause {
                std::task::ready!(pause.as_mut().poll(context));
                self.pause = None;
            }
            match std::task::ready!(self.listener.poll_accept(context)) {
                Ok((stream, from)) => {
                    if let Some(connection) = self.admit(stream, from) {
                        return Poll::Ready(Some(Ok(connection)));
                    }
                }
                Err(error) => {
                    tracing::warn!("accepting a connection failed: {error}");
                    self.pause = Some(Box::pin(sleep(PAUSE)));
                }
            }
        }
    }
}

/// A connection that a peer has opened.
pub(super) struct AcceptedConnection {
    stream: TcpStream,
    idle: Duration,
    /// Ends when no byte has come for `idle`.
    silence: Pin<Box<Sleep>>,
    open: Arc<AtomicUsize>,
}

impl Drop for AcceptedConnection {
    fn drop(&mut self) {
        self.open.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Connected for AcceptedConnection {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for AcceptedConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Poll::Ready(result) = Pin::new(&mut self.stream).poll_read(context, buffer) {
            let end = Instant::now() + self.idle;
            self.silence.as_mut().reset(end);
            return Poll::Ready(result);
        }
        std::task::ready!(self.silence.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncWrite for AcceptedConnection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tonic::codegen::tokio_stream::StreamExt;

    #[test]
    fn a_connection_on_which_nothing_comes_is_closed_and_makes_room() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let mut incoming = Acceptor::new(listener, 1, Duration::from_millis(30));
            let _silent = TcpStream::connect(address).await.unwrap();
            let mut first = incoming.next().await.unwrap().unwrap();
            let mut buffer = [0; 8];
            let read = std::future::poll_fn(|context| {
                Pin::new(&mut first).poll_read(context, &mut ReadBuf::new(&mut buffer))
            });
            assert_eq!(read.await.unwrap_err().kind(), io::ErrorKind::TimedOut);

            let _refused = TcpStream::connect(address).await.unwrap();
            let next = tokio::time::timeout(Duration::from_millis(50), incoming.next()).await;
            assert!(next.is_err(), "there is room for one only");
            drop(first);
            let _third = TcpStream::connect(address).await.unwrap();
            assert!(incoming.next().await.unwrap().is_ok());
        });
    }
}
