//! One side of a link that is not connected yet.

use super::TcpShared;
use super::connect::address::{TcpAddress, Token};
use super::connect::arrivals::BACKLOG;
use super::connect::deadline::ConnectDeadline;
use super::connect::handshake::LinkPlan;
use super::connect::repair::{SessionPlan, SessionWatch};
use super::failure::{LIMITS, os, peer};
use super::link::{TcpLinkInner, TcpLinkParts};
use super::options::refuse;
use super::port::TcpLink;
use super::session::TcpSession;
use crate::fabric::{Endpoint, FabricError, LinkOptions, Role};
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

/// Operations that a link can have outstanding at most.
const MAX_DEPTH: u32 = 1 << 16;

/// One side of a link that is not connected yet: a listening socket.
pub struct TcpEndpoint {
    shared: Arc<TcpShared>,
    listener: TcpListener,
    options: LinkOptions,
    own: TcpAddress,
    address: Vec<u8>,
}

impl TcpEndpoint {
    pub(super) fn new(shared: &Arc<TcpShared>, options: &LinkOptions) -> Result<Self, FabricError> {
        if !(1..=MAX_DEPTH).contains(&options.depth) {
            return Err(refuse("depth", options.depth.into(), "1 to 65536"));
        }
        let bind = shared.options.bind;
        let listener = TcpListener::bind(SocketAddr::new(bind, 0));
        let listener = listener.map_err(|error| not_listening(bind, error))?;
        // Without it, strangers could fill the queue of the kernel before they are closed.
        let _ = rustix::net::listen(&listener, BACKLOG);
        listener.set_nonblocking(true).map_err(|error| os("setting up a listener", error, LIMITS))?;
        let port = listener.local_addr().map_err(|error| os("finding its port", error, LIMITS))?.port();
        let own = TcpAddress {
            token: Token::draw()?,
            pid: std::process::id(),
            depth: options.depth,
            generation: options.generation,
            streams: shared.options.streams,
            port,
            hosts: shared.options.advertised().to_vec(),
        };
        let address = own.to_bytes();
        Ok(TcpEndpoint { shared: Arc::clone(shared), listener, options: options.clone(), own, address })
    }
}

/// Why an endpoint does not listen, with what to change.
fn not_listening(bind: IpAddr, error: io::Error) -> FabricError {
    let remedy = match error.kind() {
        ErrorKind::AddrInUse => "widen net.ipv4.ip_local_port_range: each link has a port of its own",
        ErrorKind::AddrNotAvailable => "set `bind` to an address of this host",
        _ => LIMITS,
    };
    os(format!("listening on a free port of {bind}"), error, remedy)
}

impl Endpoint for TcpEndpoint {
    type Link = TcpLink;

    fn address(&self) -> &[u8] {
        &self.address
    }

    fn connect(self, role: Role, theirs: &[u8], timeout: Duration) -> Result<TcpLink, FabricError> {
        let deadline = ConnectDeadline::after(timeout);
        let theirs = TcpAddress::from_bytes(theirs)?;
        if theirs.generation != self.own.generation {
            return Err(peer(format!(
                "it makes generation {} of the link, this side {}",
                theirs.generation, self.own.generation
            )));
        }
        let TcpEndpoint { shared, listener, options, own, .. } = self;
        let watcher = shared.watcher.get()?;
        watcher.start()?;
        // Both sides compute the same values.
        let options = LinkOptions { depth: own.depth.min(theirs.depth), ..options };
        let streams = own.streams.min(theirs.streams);
        let plan = LinkPlan { options: &shared.options, own: own.token, peer: &theirs, streams, deadline };
        let sockets = match role {
            Role::Initiator => plan.initiate(),
            Role::Acceptor => plan.accept(&listener, &shared.arriving),
        }?;
        let peer =
            sockets.main.peer_addr().map_err(|error| peer(format!("it has closed the link: {error}")))?;
        let session = SessionPlan {
            role,
            options: shared.options.clone(),
            own: own.token,
            peer: theirs,
            seen: peer,
            streams,
        };
        let pid = session.peer.pid;
        let parts = TcpLinkParts {
            sockets,
            session: TcpSession::new(
                watcher.shared(),
                SessionWatch::new(session, listener, &shared.arriving),
            ),
            pool: shared.pool.clone(),
            pid,
            peer,
            main_bytes: shared.options.main_bytes,
            poll_bytes: shared.options.poll_bytes,
        };
        Ok(TcpLink::new(Box::new(TcpLinkInner::new(&options, parts)), watcher))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    #[test]
    fn an_endpoint_that_does_not_listen_says_what_to_change() {
        for (kind, remedy) in [
            (ErrorKind::AddrInUse, "widen net.ipv4.ip_local_port_range"),
            (ErrorKind::AddrNotAvailable, "set `bind` to an address of this host"),
            (ErrorKind::OutOfMemory, "raise the limits of open files"),
        ] {
            let error = not_listening(Ipv4Addr::LOCALHOST.into(), kind.into()).to_string();
            assert!(error.contains("listening on a free port of 127.0.0.1 failed"), "{error}");
            assert!(error.contains(remedy), "{error}");
        }
    }
}
