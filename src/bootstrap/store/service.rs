//! The calls that processes make to a store.
//!
//! A call that waits holds a task and a place among the caller's waiting calls, for
//! [`LONGEST_WAIT`] at most.

use super::super::acceptor::ProvenCaller;
use super::super::refused::RefusedCallers;
use super::generated as grpc;
use super::generated::store_server;
use super::owners::{check_owner, is_free_claim};
use crate::store::{MemoryStore, Store, StoreError, check_key};
use crate::wire::TaskId;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Semaphore, watch};
use tokio::task::yield_now;
use tokio::time::{Instant, timeout_at};
use tonic::{Request, Response, Status};

/// How long one call waits. A caller that waits for longer repeats it.
pub(super) const LONGEST_WAIT: Duration = Duration::from_secs(2);
/// Calls of one caller that wait at a time. Less than those that are served, so that a call which
/// sets what is waited for always comes through. Further ones are answered at once, and their
/// caller asks again after a pause.
pub(super) const MAX_WAITING: usize = 16;
/// How many keys a request may name.
pub(super) const MAX_KEYS_OF_CALL: usize = 4096;

/// The name of the service in the paths of its calls.
pub(in crate::bootstrap) const SERVICE_NAME: &str = store_server::SERVICE_NAME;

/// The HTTP/2 side of the service.
pub(in crate::bootstrap) type StoreGrpc = store_server::StoreServer<StoreService>;

/// Serves `store` to the callers of these names, and notes others.
pub(in crate::bootstrap) fn service(
    store: MemoryStore,
    names: Vec<TaskId>,
    max_message: usize,
    refused: RefusedCallers,
) -> StoreGrpc {
    let changed = watch::Sender::new(());
    let observed = changed.clone();
    store.observe(move || observed.send_replace(()));
    let turns = names.iter().map(|_| Semaphore::new(1)).collect();
    let service = StoreService { store, names, turns, changed, waiting: Mutex::default(), refused };
    store_server::StoreServer::new(service)
        .max_decoding_message_size(max_message)
        .max_encoding_message_size(max_message)
}

/// Serves the calls.
pub(in crate::bootstrap) struct StoreService {
    store: MemoryStore,
    /// Who may call.
    names: Vec<TaskId>,
    /// The turn of each of them to look at many keys.
    turns: Vec<Semaphore>,
    changed: watch::Sender<()>,
    /// The number of waiting calls of each caller.
    waiting: Mutex<HashMap<TaskId, usize>>,
    refused: RefusedCallers,
}

/// A place among the waiting calls of a caller.
struct Waiting<'a> {
    service: &'a StoreService,
    caller: TaskId,
}

impl StoreService {
    /// The request, if its caller may call.
    fn open<M>(&self, request: Request<M>) -> Result<(TaskId, M), Status> {
        let Some(proven) = request.extensions().get::<Arc<ProvenCaller>>().cloned() else {
            return Err(Status::unauthenticated("the connection has proven no name"));
        };
        if !self.names.contains(&proven.name) {
            let why = "it is none of those who meet here";
            self.refused.note(&proven.name, &why);
            return Err(Status::permission_denied(format!("{} is none of those who meet here", proven.name)));
        }
        proven.extend();
        Ok((proven.name.clone(), request.into_inner()))
    }

    /// The request of a caller that may change the key.
    fn open_change<M>(&self, request: Request<M>, key: impl Fn(&M) -> &str) -> Result<M, Status> {
        let (caller, request) = self.open(request)?;
        check_owner(&caller, key(&request))?;
        Ok(request)
    }

    /// Waits for the caller's turn to look at many keys. The thread serves others between two looks
    /// of one caller.
    async fn take_turn(&self, caller: &TaskId) {
        let Some(at) = self.names.iter().position(|name| name == caller) else { return };
        let turn = self.turns[at].acquire().await;
        yield_now().await;
        drop(turn);
    }

    fn waiting(&self) -> MutexGuard<'_, HashMap<TaskId, usize>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place among the waiting calls of the caller, if there is one.
    fn enter(&self, caller: TaskId) -> Option<Waiting<'_>> {
        let mut waiting = self.waiting();
        let count = waiting.entry(caller.clone()).or_default();
        if *count >= MAX_WAITING {
            return None;
        }
        *count += 1;
        Some(Waiting { service: self, caller })
    }

    /// Looks at the store after each change until `found` returns a value, or the time is over.
    async fn until<R>(
        &self,
        caller: TaskId,
        wait_ms: u32,
        mut found: impl FnMut(&MemoryStore) -> Option<R>,
    ) -> Option<R> {
        let mut changes = self.changed.subscribe();
        let first = found(&self.store);
        if first.is_some() || wait_ms == 0 {
            return first;
        }
        let place = self.enter(caller)?;
        let end = Instant::now() + LONGEST_WAIT.min(Duration::from_millis(wait_ms.into()));
        loop {
            let is_over = !timeout_at(end, changes.changed()).await.is_ok_and(|changed| changed.is_ok());
            self.take_turn(&place.caller).await;
            let found = found(&self.store);
            if found.is_some() || is_over {
                return found;
            }
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut waiting = self.service.waiting();
        if let Some(count) = waiting.get_mut(&self.caller) {
            *count -= 1;
            if *count == 0 {
                waiting.remove(&self.caller);
            }
        }
    }
}

fn refused(error: StoreError) -> Status {
    let text = error.to_string();
    match error {
        StoreError::Full { .. } => Status::resource_exhausted(text),
        StoreError::NotANumber { .. } => Status::failed_precondition(text),
        _ => Status::invalid_argument(text),
    }
}

type Answer<M> = Result<Response<M>, Status>;

#[tonic::async_trait]
impl store_server::Store for StoreService {
    async fn set(&self, request: Request<grpc::SetRequest>) -> Answer<grpc::SetResponse> {
        let request = self.open_change(request, |request| &request.key)?;
        self.store.set(&request.key, &request.value).map_err(refused)?;
        Ok(Response::new(grpc::SetResponse {}))
    }

    async fn get(&self, request: Request<grpc::GetRequest>) -> Answer<grpc::GetResponse> {
        let (caller, request) = self.open(request)?;
        check_key(&request.key).map_err(refused)?;
        let value = self.until(caller, request.wait_ms, |store| store.look(&request.key)).await;
        Ok(Response::new(grpc::GetResponse { value }))
    }

    async fn wait(&self, request: Request<grpc::WaitRequest>) -> Answer<grpc::WaitResponse> {
        let (caller, request) = self.open(request)?;
        if request.keys.len() > MAX_KEYS_OF_CALL {
            let count = request.keys.len();
            return Err(Status::invalid_argument(format!(
                "{count} keys in one call; at most {MAX_KEYS_OF_CALL} are taken"
            )));
        }
        self.take_turn(&caller).await;
        request.keys.iter().try_for_each(|key| check_key(key)).map_err(refused)?;
        let missing = |store: &MemoryStore| {
            let keys = (0u32..).zip(&request.keys);
            keys.filter(|(_, key)| !store.has(key)).map(|(at, _)| at).collect::<Vec<u32>>()
        };
        // Most changes leave the key missing that was missing before.
        let mut known_missing = 0;
        let all = |store: &MemoryStore| {
            if request.keys.get(known_missing).is_some_and(|key| !store.has(key)) {
                return None;
            }
            match request.keys.iter().position(|key| !store.has(key)) {
                Some(at) => known_missing = at,
                None => return Some(()),
            }
            None
        };
        let found = self.until(caller, request.wait_ms, all).await;
        let missing = if found.is_some() { Vec::new() } else { missing(&self.store) };
        Ok(Response::new(grpc::WaitResponse { missing }))
    }

    async fn add(&self, request: Request<grpc::AddRequest>) -> Answer<grpc::AddResponse> {
        let request = self.open_change(request, |request| &request.key)?;
        let sum = self.store.add(&request.key, request.amount).map_err(refused)?;
        Ok(Response::new(grpc::AddResponse { sum }))
    }

    async fn compare_and_set(
        &self,
        request: Request<grpc::CompareAndSetRequest>,
    ) -> Answer<grpc::CompareAndSetResponse> {
        let (caller, request) = self.open(request)?;
        if !is_free_claim(&request.key, request.expected.as_deref()) {
            check_owner(&caller, &request.key)?;
        }
        let set = self.store.compare_and_set(&request.key, request.expected.as_deref(), &request.desired);
        Ok(Response::new(grpc::CompareAndSetResponse { value: set.map_err(refused)? }))
    }

    async fn delete(&self, request: Request<grpc::DeleteRequest>) -> Answer<grpc::DeleteResponse> {
        let request = self.open_change(request, |request| &request.key)?;
        let existed = self.store.delete(&request.key).map_err(refused)?;
        Ok(Response::new(grpc::DeleteResponse { existed }))
    }

    async fn count(&self, request: Request<grpc::CountRequest>) -> Answer<grpc::CountResponse> {
        let (caller, request) = self.open(request)?;
        self.take_turn(&caller).await;
        let keys = self.store.count(&request.prefix).map_err(refused)?;
        Ok(Response::new(grpc::CountResponse { keys }))
    }
}

#[cfg(test)]
mod tests {
    use super::store_server::Store as _;
    use super::*;

    /// The calls of both callers together: as many as may wait.
    const CALLS: usize = 2 * MAX_WAITING;

    /// A call that looks at keys.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Look {
        Count,
        /// For a key that is there.
        Wait,
        /// For a key that is set later.
        LongWait,
    }

    impl Look {
        async fn call(self, service: &StoreService, caller: &TaskId) {
            let proven = Arc::new(ProvenCaller::new(caller.clone(), Duration::from_secs(60)));
            if self == Look::Count {
                let mut request = Request::new(grpc::CountRequest { prefix: String::new() });
                request.extensions_mut().insert(proven);
                service.count(request).await.expect("counted");
                return;
            }
            let (key, wait_ms) = if self == Look::Wait { ("there", 0) } else { ("later", 60_000) };
            let mut request = Request::new(grpc::WaitRequest { keys: vec![key.into()], wait_ms });
            request.extensions_mut().insert(proven);
            let missing = service.wait(request).await.expect("waited").into_inner().missing;
            assert_eq!(missing, [0; 0]);
        }
    }

    /// Who has run, one after the other: 0 and 1 are calls that have ended, 2 is another task.
    async fn turns_of(look: Look) -> Vec<usize> {
        let names: Vec<TaskId> = (0..2).map(|task| TaskId::new("w", task).expect("a job name")).collect();
        let changed = watch::Sender::new(());
        let service = Arc::new(StoreService {
            store: MemoryStore::new(),
            turns: names.iter().map(|_| Semaphore::new(1)).collect(),
            names: names.clone(),
            changed: changed.clone(),
            waiting: Mutex::default(),
            refused: RefusedCallers::default(),
        });
        service.store.set("there", b"").expect("room");
        service.store.observe(move || changed.send_replace(()));
        let turns = Arc::new(Mutex::new(Vec::new()));
        let note = |turns: &Mutex<Vec<usize>>, who| turns.lock().expect("no panic").push(who);
        let mut tasks = tokio::task::JoinSet::new();
        for call in 0..CALLS {
            let (service, turns, caller) = (service.clone(), turns.clone(), names[call % 2].clone());
            tasks.spawn(async move {
                look.call(&service, &caller).await;
                note(&turns, call % 2);
            });
        }
        if look == Look::LongWait {
            while service.waiting().values().sum::<usize>() < CALLS {
                yield_now().await;
            }
            service.store.set("later", b"").expect("room");
        }
        while !tasks.is_empty() {
            note(&turns, 2);
            yield_now().await;
            while let Some(ended) = tasks.try_join_next() {
                ended.expect("no panic");
            }
        }
        Arc::into_inner(turns).expect("all have ended").into_inner().expect("no panic")
    }

    #[test]
    fn the_thread_serves_others_between_two_looks_of_one_caller() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
        for look in [Look::Count, Look::Wait, Look::LongWait] {
            let turns = runtime.block_on(turns_of(look));
            // Each time that the other task runs, it does so before or after a look of each caller.
            for looks in turns.split(|who| *who == 2) {
                let of = |caller| looks.iter().filter(|who| **who == caller).count();
                assert!(of(0) <= 2 && of(1) <= 2, "{look:?}: {turns:?}");
            }
        }
    }
}
