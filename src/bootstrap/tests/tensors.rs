//! Tensor calls that are not valid, and those to a process that serves none.

use super::super::generated as grpc;
use super::super::generated::tensors_client::TensorsClient;
use super::super::server::READY_WAIT;
use super::super::thread::MAX_CALLS;
use super::protocol::Raw;
use super::*;
use bytes::Bytes;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Answers each request with its key, and notes what it was told.
#[derive(Default)]
struct Echo(Mutex<Vec<String>>);

impl TensorService for Echo {
    fn recv_tensor(&self, from: &TensorPeer, request: TensorRequest, answer: TensorAnswer) {
        self.0.lock().unwrap().push(format!("{} asks for {}", from.name, request.id));
        match request.is_try {
            true => drop(answer),
            false => answer.send(SentAnswer { head: vec![1], bytes: Bytes::from(request.key) }),
        }
    }

    fn mark_recv_finished(&self, from: &TensorPeer, finished: &[u64], given_up: &[u64]) {
        self.0.lock().unwrap().push(format!("{} has finished {finished:?}, not {given_up:?}", from.name));
    }

    fn cleanup_all(&self, from: &TensorPeer, first_request: u64) {
        self.0.lock().unwrap().push(format!("{} cleans up below {first_request}", from.name));
    }
}

/// Answers each request with as many bytes.
struct Large(Bytes);

impl TensorService for Large {
    fn recv_tensor(&self, _: &TensorPeer, _: TensorRequest, answer: TensorAnswer) {
        answer.send(SentAnswer { head: vec![1], bytes: self.0.clone() });
    }

    fn mark_recv_finished(&self, _: &TensorPeer, _: &[u64], _: &[u64]) {}

    fn cleanup_all(&self, _: &TensorPeer, _: u64) {}
}

/// Has no value for anybody: it keeps the answers, and says which requests there were. A try ends.
#[derive(Default)]
struct Waits(Mutex<(Vec<u64>, Vec<TensorAnswer>)>);

impl TensorService for Waits {
    fn recv_tensor(&self, _: &TensorPeer, request: TensorRequest, answer: TensorAnswer) {
        let mut asked = self.0.lock().unwrap();
        asked.0.push(request.id);
        if !request.is_try {
            asked.1.push(answer);
        }
    }

    fn mark_recv_finished(&self, _: &TensorPeer, _: &[u64], _: &[u64]) {}

    fn cleanup_all(&self, _: &TensorPeer, _: u64) {}
}

/// Worker 1, which serves tensors, and a peer that has introduced itself.
fn introduced() -> (Member, Arc<Echo>, Raw) {
    let echo = Arc::new(Echo::default());
    let (member, raw) = introduced_to(echo.clone());
    (member, echo, raw)
}

fn introduced_to(service: Arc<dyn TensorService>) -> (Member, Raw) {
    let cluster = workers(2);
    let member = Member::new(options(&cluster, 1));
    drop(member.service.serve_tensors(service, 1 << 20));
    member.service.start().unwrap();
    let mut raw = Raw::new(&cluster, 7);
    raw.hello().unwrap();
    raw.caller.to_incarnation = member.incarnation.get();
    (member, raw)
}

impl Raw {
    fn recv_tensor(&self, key: Vec<u8>, is_try: bool) -> Result<Vec<grpc::RecvTensorPart>, tonic::Status> {
        let caller = Some(self.caller.clone());
        let (step_id, request_id, wants_checksum, link) = (1, 3, false, 1);
        let request =
            grpc::RecvTensorRequest { caller, step_id, key, request_id, wants_checksum, is_try, link };
        let mut tensors = TensorsClient::new(self.channel.clone());
        self.runtime.block_on(async {
            let mut parts = tensors.recv_tensor(request).await?.into_inner();
            let mut all = Vec::new();
            while let Some(part) = parts.message().await? {
                all.push(part);
            }
            Ok(all)
        })
    }
}

#[test]
fn a_tensor_call_that_is_not_valid_is_refused_with_the_reason() {
    let (member, echo, mut raw) = introduced();
    let good = raw.caller.clone();
    for (to_incarnation, reason) in [(0, "names no life"), (member.incarnation.get() ^ 1, "incarnation")] {
        raw.caller.to_incarnation = to_incarnation;
        let error = raw.recv_tensor(b"key".to_vec(), false).unwrap_err();
        assert!(error.message().contains(reason), "{reason}: {error}");
    }
    raw.caller = grpc::Caller { incarnation: 8, ..good.clone() };
    let error = raw.recv_tensor(b"key".to_vec(), false).unwrap_err();
    assert!(matches!(error.code(), tonic::Code::Aborted | tonic::Code::AlreadyExists), "{error}");
    raw.caller = good;
    for (key, reason) in [
        (vec![b'x'; 8193], "a key of 8193 bytes; at most 8192 travel"),
        (vec![0xFF], "a key that is not UTF-8"),
        (vec![b'x'; 24 * 1024], "too large"),
    ] {
        let error = raw.recv_tensor(key, false).unwrap_err();
        assert!(error.message().contains(reason), "{reason}: {error}");
    }
    assert!(echo.0.lock().unwrap().is_empty(), "none of them was served");
}

#[test]
fn an_answer_comes_in_parts_and_that_of_a_try_may_have_none() {
    let (_member, echo, raw) = introduced();
    let parts = raw.recv_tensor(vec![b'k'; 8000], false).unwrap();
    assert_eq!((parts.len(), &*parts[0].head, parts[0].length), (1, &[1][..], 8000));
    assert_eq!(parts[0].data, vec![b'k'; 8000]);
    let parts = raw.recv_tensor(b"key".to_vec(), true).unwrap();
    assert!(parts.len() == 1 && parts[0].is_pending && parts[0].head.is_empty());
    let mut tensors = TensorsClient::new(raw.channel.clone());
    let caller = Some(raw.caller.clone());
    let finished = |request_ids: &[u64], given_up_ids: &[u64]| grpc::MarkRecvFinishedRequest {
        caller: caller.clone(),
        request_ids: request_ids.to_vec(),
        given_up_ids: given_up_ids.to_vec(),
    };
    raw.runtime.block_on(tensors.mark_recv_finished(finished(&[5, 4], &[3]))).unwrap();
    let too_many = tensors.mark_recv_finished(finished(&[0; 2000], &[0; 49]));
    let error = raw.runtime.block_on(too_many).unwrap_err();
    assert!(error.message().contains("the ends of 2049 requests; a call tells at most 2048"), "{error}");
    let clean_up = grpc::CleanupAllRequest { caller: caller.clone(), first_request_id: 4 };
    raw.runtime.block_on(tensors.cleanup_all(clean_up)).unwrap();
    let told = ["asks for 3", "asks for 3", "has finished [5, 4], not [3]", "cleans up below 4"];
    let told: Vec<_> = told.iter().map(|what| format!("worker/0 {what}")).collect();
    assert_eq!(*echo.0.lock().unwrap(), told);
    let longest = tensors.mark_recv_finished(finished(&[u64::MAX; 1024], &[u64::MAX; 1024]));
    raw.runtime.block_on(longest).expect("the longest request");
}

#[test]
fn a_try_does_not_wait_behind_calls_that_wait_for_values() {
    const WAITING: u64 = 3000;
    const TRY: u64 = WAITING;
    let cluster = workers(2);
    let members = [0, 1].map(|task| Member::new(options(&cluster, task)));
    let waits = Arc::new(Waits::default());
    let [caller, _other] =
        members.each_ref().map(|member| member.service.serve_tensors(waits.clone(), 1 << 20));
    members.iter().for_each(|member| member.service.start().unwrap());
    members.iter().for_each(Member::join);
    let to = || TensorPeer { name: name("worker", 1), incarnation: members[1].incarnation };
    let (told, hears) = std::sync::mpsc::channel();
    let ask = |id, is_try| {
        let request =
            TensorRequest { step: 1, key: "key".into(), id, wants_checksum: false, is_try, link: 1 };
        let told = told.clone();
        caller.recv_tensor(to(), request, move |answer| drop(told.send(answer.map(|value| value.is_none()))))
    };
    let _waiting: Vec<_> = (0..WAITING).map(|id| ask(id, false)).collect();
    let _tried = ask(TRY, true);
    let answer = hears.recv_timeout(LONG).expect("the answer to the try");
    assert!(matches!(answer, Ok(true)), "it has no value: {answer:?}");
    let asked = waits.0.lock().unwrap().0.clone();
    let distinct: std::collections::HashSet<u64> = asked.iter().copied().collect();
    println!("{} requests were asked before the try ended", distinct.len());
    assert!(distinct.contains(&TRY) && distinct.len() < WAITING as usize, "the try came last");
}

#[test]
fn other_calls_of_a_connection_keep_their_bound_beside_those_for_tensors() {
    let (member, _, mut raw) = introduced();
    *member.peering.delay.lock().unwrap() = Duration::from_secs(6);
    raw.offer(1, "generation 1").unwrap();
    let took = raw.await_readies(2 * MAX_CALLS);
    assert!(took >= 2 * READY_WAIT, "all at a time: {took:?}");
}

#[test]
fn a_process_that_serves_no_tensors_says_so() {
    let cluster = workers(2);
    let member = Member::start(options(&cluster, 1));
    let mut raw = Raw::new(&cluster, 7);
    raw.hello().unwrap();
    raw.caller.to_incarnation = member.incarnation.get();
    let error = raw.recv_tensor(b"key".to_vec(), false).unwrap_err();
    assert_eq!(error.code(), tonic::Code::Unimplemented, "{error}");
}

#[test]
fn a_peer_that_reads_nothing_has_a_bounded_number_of_answers_under_way() {
    const CALLS: usize = 600;
    let (_member, raw) = introduced_to(Arc::new(Large(vec![0; 1 << 20].into())));
    let (open, answered) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicUsize::new(0)));
    raw.runtime.block_on(async {
        let mut calls = tokio::task::JoinSet::new();
        for request_id in 0..CALLS as u64 {
            let (caller, key) = (Some(raw.caller.clone()), b"key".to_vec());
            let request = grpc::RecvTensorRequest { caller, key, request_id, ..Default::default() };
            let (mut tensors, open) = (TensorsClient::new(raw.channel.clone()), open.clone());
            let answered = answered.clone();
            calls.spawn(async move {
                let parts = tensors.recv_tensor(request).await.expect("served").into_inner();
                answered.fetch_add(1, Ordering::Relaxed);
                open.lock().unwrap().push(parts);
            });
        }
        while answered.load(Ordering::Relaxed) < 256 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
        // Some have left: the connection takes 5 MiB that nobody reads.
        let under_way = answered.load(Ordering::Relaxed);
        assert!((256..=256 + 16).contains(&under_way), "{under_way} answers are under way");
        // The others are served once these are gone.
        while calls.try_join_next().is_some() || !calls.is_empty() {
            open.lock().unwrap().clear();
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    });
    assert_eq!(answered.load(Ordering::Relaxed), CALLS);
}
