//! The bytes of a proven connection.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsStream;

/// A connection whose other end has proven its name.
#[derive(Debug)]
pub(in crate::bootstrap) enum AuthStream {
    Tcp(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// Calls a method of the stream inside.
macro_rules! inner {
    ($this:ident.$method:ident($($argument:expr),*)) => {
        match $this.get_mut() {
            AuthStream::Tcp(stream) => Pin::new(stream).$method($($argument),*),
            AuthStream::Tls(stream) => Pin::new(stream).$method($($argument),*),
        }
    };
}

impl AsyncRead for AuthStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        inner!(self.poll_read(context, buffer))
    }
}

impl AsyncWrite for AuthStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        inner!(self.poll_write(context, bytes))
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        inner!(self.poll_flush(context))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        inner!(self.poll_shutdown(context))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        inner!(self.poll_write_vectored(context, slices))
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            AuthStream::Tcp(stream) => stream.is_write_vectored(),
            AuthStream::Tls(stream) => stream.is_write_vectored(),
        }
    }
}

#[cfg(test)]
impl AuthStream {
    /// The connection below, without protection.
    pub(in crate::bootstrap) fn into_tcp(self) -> TcpStream {
        match self {
            AuthStream::Tcp(stream) => stream,
            AuthStream::Tls(stream) => match *stream {
                TlsStream::Client(stream) => stream.into_inner().0,
                TlsStream::Server(stream) => stream.into_inner().0,
            },
        }
    }
}
