//! The store of another process.

use super::super::auth::{Authenticator, ProofError, was_cut};
use super::super::connector::Connector;
use super::super::peer_channel::PeerChannel;
use super::super::shared::MAX_REASON;
use super::super::thread::{self, MAX_CALLS, MAX_MESSAGE};
use super::StoreOptions;
use super::generated as grpc;
use super::generated::store_client::StoreClient;
use super::service::{LONGEST_WAIT, MAX_KEYS_OF_CALL};
use crate::store::{LOOK, MAX_VALUE, Store, StoreError, check_key, check_value};
use crate::wire::shorten;
use crate::wire::{LACK_REMEDY, TaskId, is_lack, quote};
use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::runtime::{Handle, Runtime};
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};
use tonic::transport::Endpoint;
use tonic::{Response, Status};

/// Name of the thread.
const NAME: &str = "tw-store-client";
/// Time limit of a connection with its proofs, and of an answer that need not wait.
const CALL_LIMIT: Duration = Duration::from_secs(2);
/// How long a connection is surely kept after an answer. A server ends one that has been idle for
/// twice as long.
const QUIET: Duration = Duration::from_secs(5);
/// Pauses between attempts to reach the server: the first, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(100));

/// The store that another process serves: a [`StoreServer`](super::StoreServer), or a node of the
/// same cluster (`Node::store`). [`StoreOptions`] has an example.
///
/// A call ends within its timeout, also if the server is stopped or cut off. A call that only reads
/// is repeated over a new connection when one is lost. A call that changes
/// something is repeated only if it was not sent, so an error may mean that it was done.
///
/// A server keeps four connections of a name, and each `RemoteStore` has one. A further one ends
/// the oldest. So the threads of a process share one store.
pub struct RemoteStore {
    /// As errors show it.
    name: String,
    server: TaskId,
    timeout: Duration,
    grpc: StoreClient<PeerChannel>,
    runtime: Handle,
    /// The process that has the thread.
    home: u32,
    /// When the server answered last.
    answered: Mutex<Instant>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// When a call ends.
#[derive(Clone, Copy)]
struct CallDeadline {
    begin: Instant,
    /// As the caller said it. With zero the server looks once.
    timeout: Duration,
}

impl CallDeadline {
    fn new(timeout: Duration) -> Self {
        CallDeadline { begin: Instant::now(), timeout }
    }

    fn limit(&self) -> Duration {
        if self.timeout.is_zero() { LOOK } else { self.timeout }
    }

    fn left(&self) -> Duration {
        self.limit().saturating_sub(self.begin.elapsed())
    }

    /// How long the server may wait for keys. Its answer needs time, too. `is_last`: the server has
    /// said a short time ago that keys are missing, so this answer need not come.
    fn wait(&self, is_last: bool) -> Duration {
        let left = if self.timeout.is_zero() { Duration::ZERO } else { self.left() };
        let answer = if is_last { Duration::ZERO } else { CALL_LIMIT.min(left / 2) };
        (left - answer).min(LONGEST_WAIT)
    }

    fn is_over(&self) -> bool {
        self.timeout.is_zero() || self.left().is_zero()
    }
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
    fn why(self) -> String {
        match self {
            AttemptError::Refused(why)
            | AttemptError::Unsent(why)
            | AttemptError::Ended(why)
            | AttemptError::Lost(why) => why,
        }
    }

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
        Self::connect_within(options, options.timeout)
    }

    /// As [`RemoteStore::connect`], within `timeout`. Later calls have the time of the options.
    pub(crate) fn connect_within(options: &StoreOptions, timeout: Duration) -> Result<Self, StoreError> {
        let store = Self::unchecked(options)?;
        store.count_within("counting keys".into(), "", CallDeadline::new(timeout))?;
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
        // The server serves no more at a time. Others would hold the connection's window meanwhile.
        let endpoint =
            endpoint.map_err(|error| local(error.to_string()))?.concurrency_limit(MAX_CALLS as usize);
        let runtime = thread::runtime().map_err(|error| local(error.to_string()))?;
        let channel = {
            let _entered = runtime.enter();
            PeerChannel::new(&endpoint, connector)
        };
        let grpc = StoreClient::new(channel)
            .max_decoding_message_size(MAX_MESSAGE)
            .max_encoding_message_size(MAX_MESSAGE);
        let (stop, stopped) = oneshot::channel::<()>();
        let handle = runtime.handle().clone();
        let run = move |runtime: Runtime| {
            // Resolves when the store is dropped.
            let _ = runtime.block_on(stopped);
            runtime.shutdown_background();
        };
        let thread = thread::start(NAME, runtime, run).map_err(|error| local(error.to_string()))?;
        let (timeout, server) = (*timeout, server.clone());
        Ok(RemoteStore {
            name,
            server,
            timeout,
            grpc,
            runtime: handle,
            home: std::process::id(),
            answered: Mutex::new(Instant::now()),
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    /// Makes a call, again and again if it may be repeated, until the deadline.
    fn call<T, F>(
        &self,
        tried: String,
        deadline: CallDeadline,
        waits: Duration,
        is_read: bool,
        call: impl Fn(StoreClient<PeerChannel>) -> F + Send + Sync + 'static,
    ) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: Future<Output = Result<Response<T>, Status>> + Send,
    {
        self.check_home(&tried)?;
        let begin = Instant::now();
        let (grpc, server) = (self.grpc.clone(), self.server.clone());
        let (done, outcome) = mpsc::channel();
        self.runtime.spawn(async move {
            let (mut pause, mut before, mut last, mut runs) = (PAUSES.0, None, None, false);
            let attempts = async {
                loop {
                    runs = true;
                    let error = match attempt(&server, waits, call(grpc.clone())).await {
                        Ok(answer) => return Some(answer),
                        Err(error) => error.after(&mut before),
                    };
                    runs = false;
                    let again = match &error {
                        AttemptError::Refused(_) => false,
                        AttemptError::Unsent(_) | AttemptError::Ended(_) => true,
                        AttemptError::Lost(_) => is_read,
                    };
                    last = Some(error);
                    if !again {
                        return None;
                    }
                    sleep(pause.min(deadline.left())).await;
                    if deadline.left().is_zero() {
                        return None;
                    }
                    pause = PAUSES.1.min(pause * 2);
                }
            };
            let answer = timeout(deadline.left(), attempts).await.ok().flatten();
            let outcome = answer.ok_or_else(|| match last {
                Some(error) if !runs => error,
                last => {
                    let before = last.map_or_else(String::new, |last| format!("{}; then ", last.why()));
                    let limit = deadline.limit();
                    AttemptError::Lost(format!("{before}no answer within the timeout of {limit:?}"))
                }
            });
            // The receiver waits for it.
            drop(done.send(outcome));
        });
        // It comes at the deadline at the latest.
        let outcome = outcome.recv().unwrap_or_else(|_| Err(AttemptError::Lost("it was closed".into())));
        if outcome.is_ok() {
            *self.answered.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        }
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

    fn check_home(&self, tried: &str) -> Result<(), StoreError> {
        if std::process::id() == self.home {
            return Ok(());
        }
        let why = "this process was forked from the one that has connected".into();
        Err(StoreError::Refused { store: self.name.clone(), tried: tried.into(), why })
    }

    /// Makes a call that need not wait. After a pause a read goes first: the server may be ending
    /// the connection, and a read can be repeated.
    fn change<T, F>(
        &self,
        tried: String,
        key: &str,
        call: impl Fn(StoreClient<PeerChannel>) -> F + Send + Sync + 'static,
    ) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: Future<Output = Result<Response<T>, Status>> + Send,
    {
        self.check_home(&tried)?;
        let deadline = CallDeadline::new(self.timeout);
        let answered = *self.answered.lock().unwrap_or_else(PoisonError::into_inner);
        if answered.elapsed() >= QUIET {
            self.count_within(tried.clone(), key, deadline)?;
        }
        self.call(tried, deadline, Duration::ZERO, false, call)
    }

    fn count_within(&self, tried: String, prefix: &str, deadline: CallDeadline) -> Result<u64, StoreError> {
        let request = grpc::CountRequest { prefix: prefix.to_owned() };
        let answer = self.call(tried, deadline, Duration::ZERO, true, move |mut grpc| {
            let request = request.clone();
            async move { grpc.count(request).await }
        })?;
        Ok(answer.keys)
    }

    /// Waits for some keys, which one call takes, or only looks. Returns those that are missing at
    /// the end.
    fn wait_for(
        &self,
        mut keys: Vec<String>,
        deadline: CallDeadline,
        looks: bool,
    ) -> Result<Vec<String>, StoreError> {
        let mut answered = false;
        loop {
            let is_last = answered && deadline.left() <= CALL_LIMIT;
            let wait = if looks { Duration::ZERO } else { deadline.wait(is_last) };
            let (asked, asked_at) = (keys.clone(), Instant::now());
            let tried = format!("waiting for {} keys", keys.len());
            let answer = self.call(tried.clone(), deadline, wait, true, move |mut grpc| {
                let request = grpc::WaitRequest { keys: asked.clone(), wait_ms: millis(wait) };
                async move { grpc.wait(request).await }
            });
            match answer {
                Ok(answer) => {
                    let missing = missing_of(&keys, &answer.missing);
                    let store = &self.name;
                    keys = missing.map_err(|why| StoreError::Refused { store: store.clone(), tried, why })?;
                    answered = true;
                }
                Err(StoreError::Unreachable { .. }) if is_last => {}
                Err(error) => return Err(error),
            }
            if keys.is_empty() || looks || deadline.is_over() {
                return Ok(keys);
            }
            rest(asked_at, wait, deadline);
        }
    }

    /// The same for any number of keys.
    fn wait_for_all(
        &self,
        mut keys: Vec<String>,
        deadline: CallDeadline,
        looks: bool,
    ) -> Result<Vec<String>, StoreError> {
        let mut missing = Vec::new();
        while !keys.is_empty() {
            let others = keys.split_off(fitting(&keys));
            missing.extend(self.wait_for(keys, deadline, looks)?);
            keys = others;
            if !looks && !deadline.timeout.is_zero() && deadline.left().is_zero() {
                // They were missing at the look.
                missing.append(&mut keys);
            }
        }
        Ok(missing)
    }
}

/// Rests before a server is asked again that has not waited. An honest one waits for what is
/// missing.
fn rest(asked_at: Instant, wait: Duration, deadline: CallDeadline) {
    if asked_at.elapsed() < wait / 2 {
        std::thread::sleep(PAUSES.1.min(deadline.left()));
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
        self.change(format!("setting {}", quote(key)), key, move |mut grpc| {
            let request = request.clone();
            async move { grpc.set(request).await }
        })?;
        Ok(())
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, StoreError> {
        check_key(key)?;
        let (deadline, mut answered) = (CallDeadline::new(timeout), false);
        loop {
            let is_last = answered && deadline.left() <= CALL_LIMIT;
            let wait = deadline.wait(is_last);
            let request = grpc::GetRequest { key: key.to_owned(), wait_ms: millis(wait) };
            let (tried, asked_at) = (format!("getting {}", quote(key)), Instant::now());
            let answer = self.call(tried, deadline, wait, true, move |mut grpc| {
                let request = request.clone();
                async move { grpc.get(request).await }
            });
            match answer.map(|answer| answer.value) {
                Ok(Some(value)) => return Ok(value),
                Ok(None) => answered = true,
                Err(StoreError::Unreachable { .. }) if is_last => {}
                Err(error) => return Err(error),
            }
            if deadline.is_over() {
                let (store, missing) = (self.name.clone(), vec![key.to_owned()]);
                return Err(StoreError::Timeout { store, missing, waited: timeout });
            }
            rest(asked_at, wait, deadline);
        }
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<(), StoreError> {
        keys.iter().try_for_each(|key| check_key(key))?;
        let deadline = CallDeadline::new(timeout);
        let mut missing: Vec<String> = keys.iter().map(|key| (*key).to_owned()).collect();
        // With several calls the first that waits can use up the time. The error names what is
        // missing of all.
        if fitting(&missing) < missing.len() {
            missing = self.wait_for_all(missing, deadline, true)?;
        }
        missing = self.wait_for_all(missing, deadline, false)?;
        if missing.is_empty() {
            return Ok(());
        }
        Err(StoreError::Timeout { store: self.name.clone(), missing, waited: timeout })
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64, StoreError> {
        check_key(key)?;
        let request = grpc::AddRequest { key: key.to_owned(), amount };
        let answer = self.change(format!("adding {amount} to {}", quote(key)), key, move |mut grpc| {
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
        let answer = self.change(format!("comparing and setting {}", quote(key)), key, move |mut grpc| {
            let request = request.clone();
            async move { grpc.compare_and_set(request).await }
        })?;
        Ok(answer.value)
    }

    fn delete(&self, key: &str) -> Result<bool, StoreError> {
        check_key(key)?;
        let request = grpc::DeleteRequest { key: key.to_owned() };
        let answer = self.change(format!("deleting {}", quote(key)), key, move |mut grpc| {
            let request = request.clone();
            async move { grpc.delete(request).await }
        })?;
        Ok(answer.existed)
    }

    fn count(&self, prefix: &str) -> Result<u64, StoreError> {
        self.count_within("counting keys".into(), prefix, CallDeadline::new(self.timeout))
    }
}

/// The keys that an answer calls missing. It could name one again and again, at the cost of a copy.
fn missing_of(keys: &[String], missing: &[u32]) -> Result<Vec<String>, String> {
    let why = || "its answer names keys that were not asked for, or one twice".to_owned();
    if !missing.is_sorted_by(|one, next| one < next) {
        return Err(why());
    }
    missing.iter().map(|at| keys.get(*at as usize).cloned().ok_or_else(why)).collect()
}

/// As a request has it. Rounded up, so that an answer does not come before the end.
fn millis(wait: Duration) -> u32 {
    u32::try_from(wait.as_micros().div_ceil(1000)).unwrap_or(u32::MAX)
}

/// The number of keys at the front that one call takes. At least one.
fn fitting(keys: &[String]) -> usize {
    let mut bytes = 0;
    let fits = keys.iter().take(MAX_KEYS_OF_CALL).take_while(|key| {
        // A key of a message has a few bytes in front.
        bytes += key.len() + 8;
        bytes <= MAX_MESSAGE / 2
    });
    fits.count().max(1).min(keys.len())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_names_each_missing_key_once_and_in_order() {
        let keys = ["a", "b", "c"].map(str::to_owned);
        assert_eq!(missing_of(&keys, &[]), Ok(vec![]));
        assert_eq!(missing_of(&keys, &[0, 2]), Ok(vec!["a".into(), "c".into()]));
        for lie in [&[1, 1][..], &[2, 0], &[3]] {
            let why = missing_of(&keys, lie).unwrap_err();
            assert!(why.contains("or one twice"), "{lie:?}: {why}");
        }
    }
}
