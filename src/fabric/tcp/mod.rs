//! TCP between hosts without RDMA: the semantics of RDMA verbs in software, over non-blocking
//! sockets that pollers read and write. No thread but the poller's moves data.
//!
//! A link has one *main* connection and some *bulk* connections. The main one carries frames:
//! messages, credits, requests, and payloads of up to [`TcpOptions::main_bytes`]. A larger payload
//! is announced there, and its bytes go by the bulk connections in stripes. They go from the source
//! tensor to the kernel, and from the kernel to the destination, with no copy in between. A frame
//! behind a payload is handled when the payload has come whole: so order holds within a link.
//!
//! Frames are numbered and acknowledged. If a connection breaks while both processes live, all of
//! the link's are made again, and what was not acknowledged is sent again. The owner only hears
//! that it was so.
//!
//! The target checks the key and the bounds of each access. A peer that breaks a rule loses the
//! link and does no damage. The bytes of a link can be read and changed by who controls the
//! network: see `docs/security.md`.
//!
//! | module | |
//! |---|---|
//! | `options`, `failure`, `violation` | settings, errors, the rules that a peer can break |
//! | `connect`, `endpoint` | how a link is made |
//! | `frame` | what the main connection carries |
//! | `io`, `byte_ring`, `send_buffer`, `bulk`, `outgoing`, `unacknowledged` | sending, and sending again |
//! | `receive_buffer`, `received_frames` | what has come |
//! | `incoming`, `grants`, `reads` | payloads, and what a peer may access |
//! | `link`, `post`, `short`, `receiving`, `ending`, `links`, `port` | links and ports |
//! | `session` | what outlives the connections of a link |
//! | `watcher`, `sleeper` | sleeping, repairs, and the end of links that were detached |
mod bulk;
mod byte_ring;
mod connect;
mod ending;
mod endpoint;
mod failure;
mod frame;
mod grants;
mod incoming;
mod io;
mod link;
mod links;
mod options;
mod outgoing;
mod port;
mod post;
mod reads;
mod receive_buffer;
mod received_frames;
mod receiving;
mod send_buffer;
mod session;
mod short;
mod sleeper;
#[cfg(any(test, feature = "fuzzing"))]
mod testing;
mod unacknowledged;
mod violation;
mod watcher;

pub(crate) use connect::arrivals::most_arriving;
pub use endpoint::TcpEndpoint;
pub(crate) use link::link_bytes;
pub use options::TcpOptions;
pub use port::{TcpLink, TcpPort};
pub use sleeper::TcpSleeper;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub use testing::fuzz;
pub use watcher::Notifier;

use super::{Fabric, FabricError, LinkOptions};
use crate::memory::Pool;
use connect::arrivals::SharedArrivals;
use link::TcpLinkInner;
use std::sync::Arc;
use watcher::{Watcher, WatcherOfPorts};

/// A process's access to its peers by TCP.
///
/// All tensors of the fabric are of one pool. Its thread, which watches sleeping ports, starts with
/// the first link, and ends with the last port and link.
pub struct TcpFabric {
    shared: Arc<TcpShared>,
}

struct TcpShared {
    watcher: WatcherOfPorts,
    options: TcpOptions,
    pool: Pool,
    /// The connections of strangers at all endpoints.
    arriving: SharedArrivals,
}

/// Ends a link that its owner has let go.
fn finish(watcher: &Watcher, mut link: Box<TcpLinkInner>) {
    if !watcher.in_child() {
        link.say_last_goodbye();
    }
    watcher.finish(link.out);
}

impl TcpFabric {
    /// A fabric for the tensors of `pool`.
    ///
    /// # Errors
    /// If an option is out of range.
    pub fn new(pool: &Pool, options: TcpOptions) -> Result<Self, FabricError> {
        options.check()?;
        let (watcher, arriving) = (WatcherOfPorts::default(), SharedArrivals::default());
        let shared = TcpShared { watcher, options, pool: pool.clone(), arriving };
        Ok(TcpFabric { shared: Arc::new(shared) })
    }

    /// As [`Fabric::port`], with a notifier of the caller's. It is called when something has come
    /// for the armed port, and the sleep of the port's own [`TcpSleeper`] goes on. For a poller
    /// with ports of several fabrics and one place to sleep.
    ///
    /// The watcher's thread calls it, and the poller's own thread: it must not block, and not call
    /// the port.
    ///
    /// # Errors
    /// If there is no descriptor for the port.
    pub fn port_with_notifier(&self, notifier: Notifier) -> Result<TcpPort, FabricError> {
        TcpPort::new(&self.shared, Some(notifier))
    }
}

impl Fabric for TcpFabric {
    type Endpoint = TcpEndpoint;
    type Link = TcpLink;
    type Port = TcpPort;

    fn port(&self) -> Result<TcpPort, FabricError> {
        TcpPort::new(&self.shared, None)
    }

    fn endpoint(&self, _port: usize, options: &LinkOptions) -> Result<TcpEndpoint, FabricError> {
        TcpEndpoint::new(&self.shared, options)
    }
}
