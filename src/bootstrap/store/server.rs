//! A store server that needs no cluster: processes meet at it to make one.

use super::super::BootstrapError;
use super::super::auth::Authenticator;
use super::super::options::Listening;
use super::super::refused::RefusedCallers;
use super::super::thread::{self, ConnectionLimits, MAX_MESSAGE};
use super::{StoreOptions, service};
use crate::store::MemoryStore;
use crate::wire::TaskId;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use tokio::task::JoinSet;

/// Name of the thread.
const NAME: &str = "tw-store";
/// How long a connection may be without a valid request. A call that waits is repeated earlier.
const IDLE: Duration = Duration::from_secs(10);
/// Time limit of one call.
const CALL_LIMIT: Duration = Duration::from_secs(6);

/// Serves a [`MemoryStore`] to other processes, on a thread of its own, until it is dropped. The
/// entries end with it. [`StoreOptions`] has an example.
#[derive(Debug)]
pub struct StoreServer {
    store: MemoryStore,
    local_addr: SocketAddr,
    refused: RefusedCallers,
    /// The process that has the thread.
    home: u32,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl StoreServer {
    /// Listens at the address of the options, and serves the processes of these names. It listens
    /// at each address of a host name that this host has.
    ///
    /// # Errors
    /// [`BootstrapError::Auth`], `NotLoopback`, `Resolve`, `Bind` or `Start`.
    pub fn start(
        options: &StoreOptions,
        names: impl IntoIterator<Item = TaskId>,
    ) -> Result<Self, BootstrapError> {
        let listening = Listening {
            me: &options.me,
            address: &options.address,
            bind: None,
            auth: options.auth.mode(),
            allow_non_loopback: options.allow_non_loopback,
        };
        Self::start_at(options, names, listening.listen_at_each()?)
    }

    /// The same with these listeners, one at least.
    pub(in crate::bootstrap) fn start_at(
        options: &StoreOptions,
        names: impl IntoIterator<Item = TaskId>,
        listeners: Vec<TcpListener>,
    ) -> Result<Self, BootstrapError> {
        let auth = Authenticator::open(&options.auth, &options.me)
            .map_err(|why| BootstrapError::Auth { me: options.me.clone(), why })?;
        let store = MemoryStore::new();
        let failed = |tried| move |source| BootstrapError::Start { tried, source };
        for listener in &listeners {
            listener.set_nonblocking(true).map_err(failed("making the socket non-blocking"))?;
        }
        let local_addr = listeners[0].local_addr().map_err(failed("reading the socket's address"))?;
        let runtime = thread::runtime()?;
        let (stop, stopped) = oneshot::channel();
        let names: Vec<TaskId> = names.into_iter().collect();
        let (me, served, refused) = (options.me.clone(), store.clone(), RefusedCallers::default());
        let auth = (Arc::new(auth), refused.clone());
        let run = move |runtime: Runtime| {
            runtime.block_on(async {
                let _serving = JoinSet::from_iter([serve(me, names, auth, listeners, served)]);
                // Fails when the server is dropped.
                let _ = stopped.await;
            });
            runtime.shutdown_background();
        };
        let thread = Some(thread::start(NAME, runtime, run)?);
        let (home, stop) = (std::process::id(), Some(stop));
        Ok(StoreServer { store, local_addr, refused, home, stop, thread })
    }

    /// The entries, for this process.
    pub fn store(&self) -> &MemoryStore {
        &self.store
    }

    /// The last callers that were refused, by address or name, each with the reason. The very last
    /// text says what this process lacks to accept callers, if it does.
    pub fn refused(&self) -> Vec<String> {
        self.refused.lines()
    }

    /// Where it listens: the first address, if its name has several.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }
}

async fn serve(
    me: TaskId,
    names: Vec<TaskId>,
    (auth, refused): (Arc<Authenticator>, RefusedCallers),
    listeners: Vec<TcpListener>,
    store: MemoryStore,
) {
    let peers = names.iter().filter(|name| **name != me).cloned().collect();
    let service = service(store, names, MAX_MESSAGE, refused.clone());
    let limits = ConnectionLimits { idle: IDLE, call: CALL_LIMIT, calls: thread::MAX_CALLS };
    thread::serve_connections(me, peers, (auth, refused), listeners, limits, service).await;
}

impl Drop for StoreServer {
    fn drop(&mut self) {
        if std::process::id() != self.home {
            // The thread does not exist in a forked child.
            return std::mem::forget((self.stop.take(), self.thread.take()));
        }
        drop(self.stop.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the store server's thread panicked");
        }
    }
}
