//! The store of another process.

use super::super::auth::{Authenticator, ProofError, was_cut};
use super::super::connector::Connector;
use super::super::shared::MAX_REASON;
use super::super::thread::MAX_MESSAGE;
use super::StoreOptions;
use super::generated as grpc;
use super::generated::store_client::StoreClient;
use super::service::{LONGEST_WAIT, MAX_KEYS_OF_CALL};
use crate::store::{MAX_VALUE, Store, StoreError, check_key, check_value};
use crate::wire::shorten;
use crate::wire::{LACK_REMEDY, TaskId, is_lack, quote};
use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};
use tonic::transport::{Channel, Endpoint};
use tonic::{Response, Status};

/// Name of the thread.
const NAME: &str = "tw-store-client";
/// Time limit of a connection with its proofs, and of an answer that need not wait.
const CALL_LIMIT: Duration = Duration::from_secs(2);
/// Pauses between attempts to reach the server: the first, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(100));

/// The store that another process serves: a [`StoreServer`](super::StoreServer), or a node of the
/// same cluster (`Node::store`). [`StoreOptions`] has an example.
///
/// A call that only reads is repeated over a new connection when one is lost. A call that changes
/// something is repeated only if it was not sent, so an error may mean that it was done.
pub struct RemoteStore {
    /// As errors show it.
    name: String,
    server: TaskId,
    timeout: Duration,
    grpc: StoreClient<Channel>,
    runtime: Handle,
    /// The process that has the thread.
    home: u32,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// Why an attempt failed.
enum AttemptError {
    /// The server has answered, with an error.
    Refused(String),
    /// There is no connection. The call was not sent.
    Unsent(String),
    /// The same, as the address has ended the connection, or nothing listens there. Both follow
    /// from a server that has stopped.
    Ended(String),
    /// The call may have been done.
    Lost(String),
}

impl AttemptError {
    /// The error with why attempts before it were not sent, if it says nothing of the cause.
    fn after(self, before: &mut Option<String>) -> Self {
        match (self, &before) {
            (AttemptError::Ended(why), Some(first)) => {
                AttemptError::Ended(format!("{first}; since then: {why}"))
            }
            (AttemptError::Unsent(why), _) => {
                *before = Some(why.clone());
                AttemptError::Unsent(why)
            }
            (error, _) => error,
        }
    }
}

impl RemoteStore {
    /// Connects with the server, which may start later, within the time of the options.
    ///
    /// # Errors
    /// [`StoreError::Unreachable`] if it can't be reached in time, and why.
    /// [`StoreError::Local`] if this process can't call it, or can't prove who it is.
    /// [`StoreError::Refused`] if it is none of those whom the server serves.
    pub fn connect(options: &StoreOptions) -> Result<Self, StoreError> {
        let store = Self::unchecked(options)?;
        store.count("")?;
        Ok(store)
    }

    /// The same before the server has answered.
    pub(in crate::bootstrap) fn unchecked(options: &StoreOptions) -> Result<Self, StoreError> {
        let StoreOptions { me, server, address, timeout, .. } = options;
        let name = format!("the store of {server} at {address}");
        let local = |why: String| StoreError::Local { store: name.clone(), why };
        let auth = Authenticator::open(&options.auth, me).map_err(|why| local(why.to_string()))?;
        let connector = Connector {
            auth: Arc::new(auth),
            peer: server.clone(),
            address: address.to_string(),
            limit: CALL_LIMIT,
        };
        let endpoint = Endpoint::from_shared(format!("http://{address}"));
        let endpoint = endpoint.map_err(|error| local(error.to_string()))?;
        let runtime = super::super::thread::runtime(0).map_err(|error| local(error.to_string()))?;
        let channel = {
            let _entered = runtime.enter();
            endpoint.connect_with_connector_lazy(connector)
        };
        let grpc = StoreClient::new(channel)
            .max_decoding_message_size(MAX_MESSAGE)
            .max_encoding_message_size(MAX_MESSAGE);
        let (stop, stopped) = oneshot::channel::<()>();
        let handle = runtime.handle().clone();
        let run = move || {
            // Resolves when the store is dropped.
            let _ = runtime.block_on(stopped);
            runtime.shutdown_background();
        };
        let thread = std::thread::Builder::new().name(NAME.into()).spawn(run);
        let thread = Some(thread.map_err(|error| local(format!("starting a thread failed: {error}")))?);
        let (timeout, server) = (*timeout, server.clone());
        Ok(RemoteStore {
            name,
            server,
            timeout,
            grpc,
            runtime: handle,
            home: std::process::id(),
            stop: Some(stop),
            thread,
        })
    }

    /// Makes a call, again and again if it may be repeated, until `within` is over.
    fn call<T, F>(
        &self,
        tried: String,
        within: Duration,
        waits: Duration,
        is_read: bool,
        call: impl Fn(StoreClient<Channel>) -> F + Send + 'static,
    ) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: Future<Output = Result<Response<T>, Status>> + Send,
    {
        if std::process::id() != self.home {
            let why = "this process was forked from the one that has connected".into();
            return Err(StoreError::Refused { store: self.name.clone(), tried, why });
        }
        let begin = Instant::now();
        let (grpc, server) = (self.grpc.clone(), self.server.clone());
        let (done, outcome) = mpsc::channel();
        self.runtime.spawn(async move {
            let (mut pause, mut before) = (PAUSES.0, None);
            let outcome = loop {
                let error = match attempt(&server, waits, call(grpc.clone())).await {
                    Ok(answer) => break Ok(answer),
                    Err(error) => error.after(&mut before),
                };
                let again = match &error {
                    AttemptError::Refused(_) => false,
                    AttemptError::Unsent(_) | AttemptError::Ended(_) => true,
                    AttemptError::Lost(_) => is_read,
                };
                let left = within.saturating_sub(begin.elapsed());
                if !again || left.is_zero() {
                    break Err(error);
                }
                sleep(pause.min(left)).await;
                pause = PAUSES.1.min(pause * 2);
            };
            // The receiver waits for it.
            drop(done.send(outcome));
        });
        // Each attempt has a limit, and so has their number.
        let outcome = outcome.recv().unwrap_or_else(|_| Err(AttemptError::Lost("it was closed".into())));
        outcome.map_err(|error| {
            let (store, waited) = (self.name.clone(), begin.elapsed());
            match error {
                AttemptError::Refused(why) => StoreError::Refused { store, tried, why },
                AttemptError::Unsent(why) | AttemptError::Ended(why) => {
                    StoreError::Unreachable { store, tried, why, waited }
                }
                AttemptError::Lost(why) => {
                    let why = if is_read { why } else { format!("{why}; the call may have been done") };
                    StoreError::Unreachable { store, tried, why, waited }
                }
            }
        })
    }

    /// Makes a call that need not wait.
    fn change<T, F>(
        &self,
        tried: String,
        call: impl Fn(StoreClient<Channel>) -> F + Send + 'static,
    ) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: Future<Output = Result<Response<T>, Status>> + Send,
    {
        self.call(tried, self.timeout, Duration::ZERO, false, call)
    }

    /// Waits for some keys, which one call takes. Returns those that are missing at the end.
    fn wait_for(&self, keys: &[&str], end: Instant) -> Result<Vec<String>, StoreError> {
        let mut keys: Vec<String> = keys.iter().map(|key| (*key).to_owned()).collect();
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let wait = left.min(LONGEST_WAIT);
            let asked = keys.clone();
            let tried = format!("waiting for {} keys", keys.len());
            let answer = self.call(tried, left, wait, true, move |mut grpc| {
                let request = grpc::WaitRequest { keys: asked.clone(), wait_ms: wait.as_millis() as u32 };
                async move { grpc.wait(request).await }
            })?;
            let missing = answer.missing.iter().filter_map(|at| keys.get(*at as usize).cloned());
            keys = missing.collect();
            if keys.is_empty() || left.is_zero() {
                return Ok(keys);
            }
        }
    }
}

/// One attempt of a call that waits for so long at the server.
async fn attempt<T>(
    server: &TaskId,
    waits: Duration,
    call: impl Future<Output = Result<Response<T>, Status>>,
) -> Result<T, AttemptError> {
    // A connection takes its own time.
    let limit = waits + 2 * CALL_LIMIT;
    match timeout(limit, call).await {
        Ok(Ok(answer)) => Ok(answer.into_inner()),
        Ok(Err(status)) if status.source().is_none() && status.code() != tonic::Code::Cancelled => {
            Err(AttemptError::Refused(shorten(status.message(), 2 * MAX_REASON)))
        }
        Ok(Err(status)) => Err(unanswered(server, &status)),
        Err(_) => Err(AttemptError::Lost(format!("no answer within {limit:?}"))),
    }
}

fn unanswered(server: &TaskId, status: &Status) -> AttemptError {
    let mut innermost: &dyn Error = status;
    while let Some(source) = innermost.source() {
        innermost = source;
        // Every error of the connector is one: the connection was not made.
        if let Some(why) = innermost.downcast_ref::<ProofError>() {
            return match why {
                ProofError::Io(error) | ProofError::Unknown(error) if is_lack(error) => {
                    AttemptError::Unsent(format!("this process can't call it: {error}; {LACK_REMEDY}"))
                }
                ProofError::Io(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
                    let why = "nobody listens there (connection refused): is the process running?";
                    AttemptError::Ended(why.into())
                }
                ProofError::Io(error) if was_cut(error) => {
                    AttemptError::Ended(format!("it has ended the connection: {error}"))
                }
                ProofError::Cut(_) => AttemptError::Ended(why.to_string()),
                ProofError::Io(error) => AttemptError::Unsent(format!("it could not be reached: {error}")),
                why => {
                    AttemptError::Unsent(format!("what listens there is not proven to be {server}: {why}"))
                }
            };
        }
    }
    AttemptError::Lost(format!("the connection was lost: {innermost}"))
}

impl Store for RemoteStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        check_key(key)?;
        check_value(key, value)?;
        let request = grpc::SetRequest { key: key.to_owned(), value: value.to_vec() };
        self.change(format!("setting {}", quote(key)), move |mut grpc| {
            let request = request.clone();
            async move { grpc.set(request).await }
        })?;
        Ok(())
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, StoreError> {
        check_key(key)?;
        let end = end_of(timeout);
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let wait = left.min(LONGEST_WAIT);
            let request = grpc::GetRequest { key: key.to_owned(), wait_ms: wait.as_millis() as u32 };
            let answer =
                self.call(format!("getting {}", quote(key)), left, wait, true, move |mut grpc| {
                    let request = request.clone();
                    async move { grpc.get(request).await }
                })?;
            match answer.value {
                Some(value) => return Ok(value),
                None if left.is_zero() => {
                    let (store, missing) = (self.name.clone(), vec![key.to_owned()]);
                    return Err(StoreError::Timeout { store, missing, waited: timeout });
                }
                None => {}
            }
        }
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<(), StoreError> {
        keys.iter().try_for_each(|key| check_key(key))?;
        let end = end_of(timeout);
        let mut missing = Vec::new();
        let mut rest = keys;
        while !rest.is_empty() {
            let (some, others) = rest.split_at(fitting(rest));
            missing.extend(self.wait_for(some, end)?);
            rest = others;
        }
        if missing.is_empty() {
            return Ok(());
        }
        Err(StoreError::Timeout { store: self.name.clone(), missing, waited: timeout })
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64, StoreError> {
        check_key(key)?;
        let request = grpc::AddRequest { key: key.to_owned(), amount };
        let answer = self.change(format!("adding {amount} to {}", quote(key)), move |mut grpc| {
            let request = request.clone();
            async move { grpc.add(request).await }
        })?;
        Ok(answer.sum)
    }

    fn compare_and_set(
        &self,
        key: &str,
        expected: Option<&[u8]>,
        desired: &[u8],
    ) -> Result<Option<Vec<u8>>, StoreError> {
        check_key(key)?;
        check_value(key, desired)?;
        // No value is as long, so another one is there or none. It travels cut.
        let expected = expected.map(|value| value[..value.len().min(MAX_VALUE + 1)].to_vec());
        let request = grpc::CompareAndSetRequest { key: key.to_owned(), expected, desired: desired.to_vec() };
        let answer = self.change(format!("comparing and setting {}", quote(key)), move |mut grpc| {
            let request = request.clone();
            async move { grpc.compare_and_set(request).await }
        })?;
        Ok(answer.value)
    }

    fn delete(&self, key: &str) -> Result<bool, StoreError> {
        check_key(key)?;
        let request = grpc::DeleteRequest { key: key.to_owned() };
        let answer = self.change(format!("deleting {}", quote(key)), move |mut grpc| {
            let request = request.clone();
            async move { grpc.delete(request).await }
        })?;
        Ok(answer.existed)
    }

    fn count(&self, prefix: &str) -> Result<u64, StoreError> {
        let request = grpc::CountRequest { prefix: prefix.to_owned() };
        let answer =
            self.call("counting keys".into(), self.timeout, Duration::ZERO, true, move |mut grpc| {
                let request = request.clone();
                async move { grpc.count(request).await }
            })?;
        Ok(answer.keys)
    }
}

/// When a wait ends. A clock can't say all times.
fn end_of(timeout: Duration) -> Instant {
    Instant::now() + timeout.min(Duration::from_secs(u32::MAX.into()))
}

/// The number of keys at the front that one call takes. At least one.
fn fitting(keys: &[&str]) -> usize {
    let mut bytes = 0;
    let fits = keys.iter().take(MAX_KEYS_OF_CALL).take_while(|key| {
        // A key of a message has a few bytes in front.
        bytes += key.len() + 8;
        bytes <= MAX_MESSAGE / 2
    });
    fits.count().max(1)
}

impl fmt::Debug for RemoteStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteStore").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Drop for RemoteStore {
    fn drop(&mut self) {
        if std::process::id() != self.home {
            // The thread does not exist in a forked child, and the descriptors are the parent's.
            return std::mem::forget((self.runtime.clone(), self.stop.take(), self.thread.take()));
        }
        drop(self.stop.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of {} panicked", self.name);
        }
    }
}
