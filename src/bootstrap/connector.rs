//! Opens connections to one peer, which prove both names before they carry a request.

use super::auth::{AuthStream, Authenticator, ProofError};
use super::blocking;
use super::http2_stream::Http2Stream;
use crate::wire::{TaskId, is_lack};
use hyper_util::rt::TokioIo;
use rustix::net::sockopt;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tonic::codegen::Service;
use tonic::codegen::http::Uri;

/// The look-ups of names that this process has under way at a time. One outlasts its caller, which
/// tries again.
static LOOK_UPS: Semaphore = Semaphore::const_new(64);

/// How long sent bytes may go without an acknowledgement before their connection ends. After a
/// longer outage of the network the next call makes a new one. The kernel would try the old one
/// again up to two minutes later (TCP_USER_TIMEOUT, tcp(7)).
const UNACKNOWLEDGED: Duration = Duration::from_secs(4);

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
    /// Connects with the first address of the name that proves to be the peer's: another program
    /// may have the port at one of them.
    pub(super) async fn connect(self) -> Result<AuthStream, ProofError> {
        let until = Instant::now() + self.limit;
        let addresses = match self.address.parse() {
            Ok(address) => vec![address],
            Err(_) => timeout(self.limit, self.look_up()).await.unwrap_or_else(|_| {
                Err(self.too_late(&format!("the name of {} was not found", self.address)))
            })?,
        };
        self.connect_first(&addresses, until).await
    }

    async fn look_up(&self) -> io::Result<Vec<SocketAddr>> {
        let address = self.address.clone();
        // Nobody closes it.
        let place = LOOK_UPS.acquire().await.ok();
        let found = blocking::start(move || {
            let _until_the_end = place;
            address.to_socket_addrs().map(Vec::from_iter)
        });
        let (_, found) = found.map_err(|error| {
            let address = &self.address;
            io::Error::other(format!(
                "this process has no thread to look up {address}: {error}; raise its limit of processes \
                 (ulimit -u)"
            ))
        })?;
        let mut addresses = found.await.unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))?;
        addresses.dedup();
        Ok(addresses)
    }

    /// The same with these addresses, which share the time. If none is the peer's, the error is the
    /// one that tells most.
    pub(super) async fn connect_first(
        &self,
        addresses: &[SocketAddr],
        until: Instant,
    ) -> Result<AuthStream, ProofError> {
        let mut failed: Option<(u8, ProofError)> = None;
        for (at, address) in addresses.iter().enumerate() {
            let left = until.saturating_duration_since(Instant::now());
            let share = left / (addresses.len() - at) as u32;
            let error = match timeout(share, self.connect_to(*address)).await {
                Ok(Ok(stream)) => return Ok(stream),
                Ok(Err(error)) => error,
                Err(_) => self.too_late(&format!("{} never answered", self.address)).into(),
            };
            let rank = rank(&error, *address);
            failed = failed.filter(|(first, _)| *first >= rank).or(Some((rank, error)));
        }
        Err(failed.map_or_else(|| io::Error::from(io::ErrorKind::NotFound).into(), |(_, error)| error))
    }

    async fn connect_to(&self, address: SocketAddr) -> Result<AuthStream, ProofError> {
        let stream = open(address).await?;
        stream.set_nodelay(true)?;
        sockopt::set_tcp_user_timeout(&stream, UNACKNOWLEDGED.as_millis() as u32).map_err(io::Error::from)?;
        self.auth.connect(stream, &self.peer).await
    }

    fn too_late(&self, what: &str) -> io::Error {
        io::Error::new(io::ErrorKind::TimedOut, format!("{what} within {:?}", self.limit))
    }
}

/// Opens a connection. Within this host another user may have all ports of 127.0.0.1 towards
/// `address`: then it comes from another loopback address.
async fn open(address: SocketAddr) -> io::Result<TcpStream> {
    match TcpStream::connect(address).await {
        Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable && is_loopback_v4(address) => {
            let socket = TcpSocket::new_v4()?;
            // An error here says less than the first one.
            socket.bind((other_loopback()?, 0).into()).map_err(|_| error)?;
            socket.connect(address).await
        }
        outcome => outcome,
    }
}

/// One of the 16 million loopback addresses. No user can hold the ports of all of them.
fn other_loopback() -> io::Result<Ipv4Addr> {
    const NETWORK: u32 = Ipv4Addr::LOCALHOST.to_bits() & 0xff00_0000;
    let drawn = getrandom::u32().map_err(|error| io::Error::other(error.to_string()))?;
    // Neither the first nor the last one, which have meanings of their own.
    Ok(Ipv4Addr::from_bits(NETWORK + 1 + drawn % 0x00ff_fffe))
}

fn is_loopback_v4(address: SocketAddr) -> bool {
    address.is_ipv4() && address.ip().is_loopback()
}

/// How much an error tells. A lack of this process is no word about the peer. That nobody listens
/// is true of the peer only if it holds everywhere. A host without IPv6 has no address for it.
fn rank(error: &ProofError, address: SocketAddr) -> u8 {
    match error {
        ProofError::Io(error) if is_lack(error) => 4,
        ProofError::Io(error) if error.kind() == io::ErrorKind::ConnectionRefused => 1,
        ProofError::Io(error) if error.kind() == io::ErrorKind::AddrNotAvailable && address.is_ipv6() => 0,
        ProofError::Io(_) => 2,
        _ => 3,
    }
}

impl Service<Uri> for Connector {
    type Response = TokioIo<Http2Stream<AuthStream>>;
    type Error = ProofError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, ProofError>> + Send>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), ProofError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _uri: Uri) -> Self::Future {
        let connector = self.clone();
        Box::pin(async move { Ok(TokioIo::new(Http2Stream::calling(connector.connect().await?))) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_loopback_address_is_one_that_a_socket_can_have() {
        for _ in 0..100 {
            let address = other_loopback().unwrap();
            assert!(address.is_loopback(), "{address}");
            std::net::TcpListener::bind((address, 0)).expect("it is this host's");
        }
    }

    #[test]
    fn that_nobody_listens_says_more_than_that_this_host_has_no_ipv6() {
        let (v4, v6) = (SocketAddr::from(([127, 0, 0, 1], 1)), "[::1]:1".parse().unwrap());
        let rank = |kind: io::ErrorKind, address| rank(&io::Error::from(kind).into(), address);
        let refused = rank(io::ErrorKind::ConnectionRefused, v4);
        assert!(rank(io::ErrorKind::AddrNotAvailable, v6) < refused);
        assert!(rank(io::ErrorKind::AddrNotAvailable, v4) > refused, "no port is free");
        assert!(rank(io::ErrorKind::HostUnreachable, v6) > refused);
    }
}
