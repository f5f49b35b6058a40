//! The calls that this process makes to one peer: meeting it, making the link, watching over it.

use super::auth::{Authenticator, ProofError, was_cut};
use super::connector::Connector;
use super::generated as grpc;
use super::generated::bootstrap_client::BootstrapClient;
use super::peer_channel::PeerChannel;
use super::peer_record::{GENERATION_PAUSE, LifeRefusal};
use super::peer_table::{PeerTable, SAW};
use super::peering::{MAX_OFFER, PeerInfo};
use super::server::{REFUSED_FOR_GOOD, who, why_refused};
use super::shared::{BootstrapShared, LossReport, MAX_REASON, connect, incarnation, prepare, task};
use super::thread::MAX_MESSAGE;
use crate::wire::shorten;
use crate::wire::{Incarnation, LACK_REMEDY, LossCause, TaskId, is_lack};
use std::error::Error;
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::time::{sleep, timeout};
use tonic::transport::Endpoint;
use tonic::{Response, Status};

/// Time limit of a call that the peer answers at once.
const CALL_LIMIT: Duration = Duration::from_secs(2);
/// The pause before an attempt that the peer's call begins. So the loop does not spin.
const SHORTEST: Duration = Duration::from_millis(1);
/// Pauses between attempts to reach a peer: the first, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(500));
/// Attempts of a call whose answer may have been lost.
const TRIES: u32 = 3;

/// The client side of one peer.
#[derive(Clone)]
pub(super) struct Client {
    shared: Arc<BootstrapShared>,
    peer: usize,
    address: String,
    grpc: BootstrapClient<PeerChannel>,
}

/// Why a call failed.
enum CallError {
    /// The peer has answered, with an error.
    Refused(String),
    /// No answer.
    Unreachable(String),
    /// The connection ended. What was there may have stopped, so this says nothing of the cause.
    Cut(String),
    /// Nothing listens at the peer's address.
    Unattended(String),
}

impl CallError {
    fn into_text(self) -> String {
        match self {
            CallError::Refused(what)
            | CallError::Unreachable(what)
            | CallError::Cut(what)
            | CallError::Unattended(what) => what,
        }
    }
}

/// The part of a pause that calls of the peer don't cut.
fn least_rest(pause: Duration, has_failed: bool) -> Duration {
    if has_failed { SHORTEST.max(pause / 8) } else { SHORTEST }
}

impl Client {
    /// Must be called on the bootstrap thread. The first call connects.
    pub(super) fn new(
        shared: Arc<BootstrapShared>,
        auth: Arc<Authenticator>,
        peer: usize,
    ) -> Result<Self, tonic::transport::Error> {
        let address = shared.address(peer);
        let name = shared.peers[peer].clone();
        let connector = Connector { auth, peer: name, address: address.clone(), limit: CALL_LIMIT };
        let channel = PeerChannel::new(&Endpoint::from_shared(format!("http://{address}"))?, connector);
        let grpc = BootstrapClient::new(channel)
            .max_decoding_message_size(MAX_MESSAGE)
            .max_encoding_message_size(MAX_MESSAGE);
        Ok(Client { shared, peer, address, grpc })
    }

    /// Meets the peer, links with it, sends heartbeats, and starts again after a loss. Never
    /// returns.
    pub(super) async fn tend(self) {
        let mut pause = PAUSES.0;
        let mut next_start = Instant::now();
        loop {
            let link = self.shared.see(|members| members.link(self.peer));
            // After the look at the link: the peer hears why a link ended before it hears of the
            // next one.
            while let Some(report) = self.shared.take_report(self.peer) {
                self.tell_failed(report).await;
            }
            if let Some((info, heard)) = link {
                if self.watch(&info, heard).await {
                    pause = PAUSES.0;
                }
                continue;
            }
            // Also during an attempt that the peer started: the peer may have died since.
            let has_failed = self.approach(&mut next_start).await;
            if self.shared.see(|members| members.link(self.peer).is_none()) {
                self.rest(pause, has_failed).await;
                pause = PAUSES.1.min(pause * 2);
            }
        }
    }

    /// Sleeps for `pause`, or until the peer calls. The calls of a peer with which no link can be
    /// made cut little of it.
    async fn rest(&self, pause: Duration, has_failed: bool) {
        let least = least_rest(pause, has_failed);
        sleep(least).await;
        // An error means that the time is over.
        drop(timeout(pause.saturating_sub(least), self.shared.nudges[self.peer].notified()).await);
    }

    /// One attempt to meet the peer and, on the side that starts, to make the link: not before
    /// `next_start`. Returns whether the link could not be made.
    async fn approach(&self, next_start: &mut Instant) -> bool {
        if self.shared.starts(self.peer) {
            sleep(next_start.saturating_duration_since(Instant::now())).await;
        }
        let asked = Instant::now();
        let life = match self.hello().await {
            Ok(life) => life,
            Err(error) => {
                self.not_met(error, asked.elapsed());
                return false;
            }
        };
        self.shared.step(|members| (members.note(self.peer, None, true), Vec::new()));
        if !self.shared.starts(self.peer) {
            return false;
        }
        let now = Instant::now();
        let started = self.shared.step(|members| (members.start(self.peer, life, now), Vec::new()));
        let Some(info) = started else { return false };
        *next_start = now + GENERATION_PAUSE;
        let Err(why) = self.link_up(&info).await else { return false };
        self.shared.log_attempt(self.peer, &why);
        self.shared
            .change(|members| ((), members.give_up(self.peer, info.incarnation, info.generation, &why)));
        true
    }

    /// Handles a call without an answer, or without a listener: it tells about the earlier life.
    fn not_met(&self, error: CallError, took: Duration) {
        // If the call took this long, this process itself was stopped or starved.
        let was_stopped = took > CALL_LIMIT + self.shared.options.silence / 2;
        let note = |members: &mut PeerTable| {
            let events = match &error {
                CallError::Unattended(why) => members.unattended(self.peer, why, Instant::now()),
                CallError::Unreachable(_) | CallError::Cut(_) if !was_stopped => {
                    members.unanswered(self.peer, Instant::now())
                }
                CallError::Unreachable(_) | CallError::Cut(_) | CallError::Refused(_) => Vec::new(),
            };
            ((), events)
        };
        match self.shared.options.have_met {
            // A peer that has ended ends the join.
            true => self.shared.change(note),
            false => self.shared.step(note),
        }
        let is_end = matches!(error, CallError::Unattended(_) | CallError::Cut(_));
        // The peer is not told of it: the text may name a life that is not the peer's to know.
        let is_answer = matches!(error, CallError::Refused(_));
        let why = error.into_text();
        self.shared.step(|members| match is_end {
            true => (members.note_end(self.peer, why), Vec::new()),
            false => (members.note(self.peer, Some(why), is_answer), Vec::new()),
        });
    }

    /// Asks for the identity at the peer's address.
    async fn hello(&self) -> Result<Incarnation, CallError> {
        let request = grpc::HelloRequest {
            caller: self.shared.caller(self.peer, None),
            member: self.shared.member(),
            cluster: self.shared.cluster_text.clone(),
            lack: shorten(&self.shared.refused.lack().unwrap_or_default(), MAX_REASON),
        };
        let known = self.shared.see(|members| members.present(self.peer));
        let (mut grpc, mut refusal) = (self.grpc.clone(), None);
        let asked = async { grpc.hello(request).await.inspect_err(|status| refusal = final_refusal(status)) };
        let answer = self.call(CALL_LIMIT, asked).await;
        if let Some(why) = refusal {
            let now = Instant::now();
            self.shared.change(|members| (members.disagree_unmet(self.peer, None, &why, now), Vec::new()));
            self.shared.log_attempt(self.peer, &why);
        }
        let answer = answer?;
        let name = &self.shared.peers[self.peer];
        let who = who(answer.member)
            .map_err(|why| CallError::Refused(format!("{name} gave an answer that is refused: {why}")))?;
        let life = who.incarnation;
        let unanswered = shorten(&answer.unanswered, MAX_REASON);
        // After a late answer the next call reaches whoever listens then.
        let met = self.shared.step(|members| {
            match members.meet_by_answer(self.peer, &who, known, Instant::now()) {
                Ok(events) => {
                    members.note_says(self.peer, life, unanswered);
                    (Ok(()), events)
                }
                Err(refusal) => (Err(refusal), Vec::new()),
            }
        });
        met.map_err(|refusal: LifeRefusal| {
            let why = why_refused(&refusal, name, life, self.shared.options.silence);
            CallError::Refused(format!("the answer of {name} is refused: {why}"))
        })?;
        Ok(life)
    }

    /// Makes one generation of the link. After a failure the peer knows, and nothing is connected.
    async fn link_up(&self, info: &PeerInfo) -> Result<(), String> {
        let Err(why) = self.try_link(info).await else { return Ok(()) };
        let (peer, generation) = (self.peer, info.generation);
        let (theirs, is_final) = self.tell_failed(LossReport { link: info.clone(), why: why.clone() }).await;
        if is_final {
            let theirs = format!("{} says: {theirs}", info.name);
            self.shared.step(|members| (members.disagree(peer, info.incarnation, &theirs), Vec::new()));
        }
        let why = match theirs.is_empty() || why.contains(&theirs) {
            true => why,
            false => format!("{} says: {theirs}{SAW}{why}", info.name),
        };
        self.shared.step(|members| (members.explain(peer, generation, &why), Vec::new()));
        Err(why)
    }

    async fn try_link(&self, info: &PeerInfo) -> Result<(), String> {
        let offer = prepare(&self.shared, self.peer, info, None).await?;
        let theirs = self.exchange(info, offer).await?;
        let mut made = std::pin::pin!(connect(&self.shared, self.peer, info, theirs));
        loop {
            match timeout(PAUSES.1, made.as_mut()).await {
                Ok(made) => break made?,
                // A fabric that learns of deaths only from the network waits for a dead peer, too.
                Err(_) => self.look_for_death(info).await?,
            }
        }
        self.confirm(info).await
    }

    /// Fails if that life of the peer's process has ended.
    async fn look_for_death(&self, info: &PeerInfo) -> Result<(), String> {
        match self.hello().await {
            Err(CallError::Unattended(why)) => Err(self.died(why)),
            Ok(life) if life != info.incarnation => {
                Err(format!("{} has been started anew, as incarnation {life}", info.name))
            }
            Ok(_) | Err(CallError::Refused(_) | CallError::Unreachable(_) | CallError::Cut(_)) => Ok(()),
        }
    }

    /// Nothing listens any more at the address of a peer that was met.
    fn died(&self, why: String) -> String {
        self.not_met(CallError::Unattended(why.clone()), Duration::ZERO);
        why
    }

    /// Exchanges offers. Repeats the call if its answer may be lost.
    async fn exchange(&self, info: &PeerInfo, offer: Vec<u8>) -> Result<Vec<u8>, String> {
        let request = grpc::GetRemoteAddressRequest {
            caller: self.shared.caller(self.peer, Some(info.incarnation)),
            generation: info.generation,
            offer,
        };
        let mut left = TRIES;
        loop {
            left -= 1;
            let mut grpc = self.grpc.clone();
            let limit = self.shared.options.link_timeout;
            match self.call(limit, grpc.get_remote_address(request.clone())).await {
                Ok(answer) if answer.offer.len() > MAX_OFFER => {
                    return Err(format!(
                        "an offer of {} bytes; at most {MAX_OFFER} travel",
                        answer.offer.len()
                    ));
                }
                Ok(answer) => return Ok(answer.offer),
                Err(CallError::Unreachable(_) | CallError::Cut(_) | CallError::Unattended(_)) if left > 0 => {
                    sleep(PAUSES.0).await
                }
                Err(error) => return Err(error.into_text()),
            }
        }
    }

    /// Reports this side as connected until the peer reports the same.
    async fn confirm(&self, info: &PeerInfo) -> Result<(), String> {
        let end = Instant::now() + self.shared.options.link_timeout + CALL_LIMIT;
        loop {
            let error = match self.say_ready(info, grpc::Progress::Connected, "", false).await {
                Ok((grpc::Progress::Connected, _)) => break,
                Ok((grpc::Progress::Connecting, _)) => format!("{} is still connecting", info.name),
                Ok((_, answer)) => return Err(format!("{} says: {}", info.name, answer.reason)),
                Err(CallError::Refused(why)) => return Err(why),
                Err(CallError::Unattended(why)) => return Err(self.died(why)),
                Err(CallError::Unreachable(why) | CallError::Cut(why)) => why,
            };
            if Instant::now() >= end {
                return Err(error);
            }
            // The peer may say at once that it is still connecting.
            sleep(PAUSES.0).await;
        }
        self.shared.change(|members| {
            let (_, events) = members.said_ready(self.peer, info.incarnation, info.generation);
            let up = members.link(self.peer).is_some_and(|(up, _)| up == *info);
            (if up { Ok(()) } else { Err("it was given up on the way".into()) }, events)
        })
    }

    async fn say_ready(
        &self,
        link: &PeerInfo,
        progress: grpc::Progress,
        reason: &str,
        is_final: bool,
    ) -> Result<(grpc::Progress, grpc::ReadyResponse), CallError> {
        let request = grpc::ReadyRequest {
            caller: self.shared.caller(self.peer, Some(link.incarnation)),
            generation: link.generation,
            progress: progress as i32,
            reason: shorten(reason, MAX_REASON),
            is_final,
        };
        let mut grpc = self.grpc.clone();
        let mut answer = self.call(CALL_LIMIT, grpc.ready(request)).await?;
        let progress = grpc::Progress::try_from(answer.progress).unwrap_or(grpc::Progress::Failed);
        answer.reason = shorten(&answer.reason, MAX_REASON);
        Ok((progress, answer))
    }

    /// Tells the peer that a generation is over, and of a disagreement. If this call fails, a
    /// heartbeat tells it later. Returns why the generation has failed at the peer, if it has, and
    /// whether that is final.
    async fn tell_failed(&self, report: LossReport) -> (String, bool) {
        let disagreement = self.shared.disagreement_with(self.peer);
        let (why, is_final) = (disagreement.as_ref().unwrap_or(&report.why), disagreement.is_some());
        match self.say_ready(&report.link, grpc::Progress::Failed, why, is_final).await {
            Ok((_, answer)) => (answer.reason, answer.is_final),
            Err(error) => {
                tracing::debug!("{}: {}", self.shared.options.me, error.into_text());
                (String::new(), false)
            }
        }
    }

    /// One round for a linked peer: a pause, a heartbeat, a check of the silence. Returns whether
    /// the peer has confirmed that the link is up.
    async fn watch(&self, info: &PeerInfo, heard: Instant) -> bool {
        let options = &self.shared.options;
        let left = options.silence.saturating_sub(heard.elapsed());
        let (pause, began) = (options.heartbeat.min(left), Instant::now());
        drop(timeout(pause, self.shared.nudges[self.peer].notified()).await);
        let mut heard = heard;
        if began.elapsed() > pause + options.silence / 2 {
            heard = self.excuse(info);
        }
        let still = self.shared.see(|members| members.link(self.peer));
        if still.is_none_or(|(present, _)| present != *info) {
            return false;
        }
        let left = options.silence.saturating_sub(heard.elapsed()).min(CALL_LIMIT);
        let request = grpc::HeartbeatRequest {
            caller: self.shared.caller(self.peer, None),
            generation: info.generation,
        };
        let mut grpc = self.grpc.clone();
        let asked = Instant::now();
        let answer = self.call(left, grpc.heartbeat(request)).await;
        if asked.elapsed() > left + options.silence / 2 {
            self.excuse(info);
        }
        let confirmed = match answer {
            Ok(answer) => self.digest_heartbeat(info, &answer),
            Err(error) => {
                if let CallError::Unattended(why) = &error {
                    self.shared.step(|members| ((), members.unattended(self.peer, why, Instant::now())));
                }
                tracing::debug!("{}: heartbeat: {}", options.me, error.into_text());
                false
            }
        };
        self.shared.step(|members| ((), members.silent(self.peer, Instant::now())));
        confirmed
    }

    /// This process was paused or starved. Messages of the peer may still be unread, so its silence
    /// counts from now.
    fn excuse(&self, info: &PeerInfo) -> Instant {
        let now = Instant::now();
        // Fails only for a life that is over.
        self.shared.step(|members| (drop(members.heard(self.peer, info.incarnation, now)), Vec::new()));
        now
    }

    /// Handles the peer's report about the link. Returns whether the link is up at the peer.
    pub(super) fn digest_heartbeat(&self, info: &PeerInfo, answer: &grpc::HeartbeatResponse) -> bool {
        let Ok(by) = incarnation(answer.incarnation) else { return false };
        self.shared.step(|members| {
            if by != info.incarnation {
                return (false, members.over(self.peer, info.incarnation, &LossCause::replaced(by)));
            }
            if answer.linked {
                return (members.answered(self.peer, by, Instant::now()).is_ok(), Vec::new());
            }
            let why = shorten(&format!("{} says: {}", info.name, answer.reason), MAX_REASON);
            (false, members.give_up(self.peer, by, info.generation, &why))
        })
    }

    /// Tells the peer that this process leaves, if the peer is up, and which loss is the cause.
    pub(super) async fn leave(self, reason: String, because_of: Option<TaskId>, limit: Duration) {
        if !self.shared.see(|members| members.is_met(self.peer)) {
            return;
        }
        let began = Instant::now();
        let link = self.shared.see(|members| members.last_link(self.peer));
        if let (Some(why), Some(link)) = (self.shared.disagreement_with(self.peer), link) {
            // A join that ends because of it can stop this process before the peer was told.
            drop(timeout(limit, self.tell_failed(LossReport { link, why })).await);
        }
        let limit = limit.saturating_sub(began.elapsed());
        let request = grpc::LeaveRequest {
            caller: self.shared.caller(self.peer, None),
            reason,
            because_of: because_of.as_ref().map(task),
        };
        let mut grpc = self.grpc.clone();
        if let Err(error) = self.call(limit, grpc.leave(request)).await {
            tracing::debug!("{}: leaving: {}", self.shared.options.me, error.into_text());
        }
    }

    /// Makes a call with a time limit. The error has the reason in words.
    async fn call<T>(
        &self,
        limit: Duration,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, CallError> {
        let name = &self.shared.peers[self.peer];
        match timeout(limit, call).await {
            Ok(Ok(answer)) => Ok(answer.into_inner()),
            Ok(Err(status)) if status.source().is_some() => Err(unanswered(name, &status, &self.address)),
            Ok(Err(status)) => {
                let what = shorten(status.message(), 2 * MAX_REASON);
                Err(CallError::Refused(format!("{name} refused this process: {what}")))
            }
            Err(_) => {
                Err(CallError::Unreachable(format!("{} never answered within {limit:?}", self.address)))
            }
        }
    }
}

/// Why a peer refuses this process for good, if it does.
fn final_refusal(status: &Status) -> Option<String> {
    let is_final = status.code() == REFUSED_FOR_GOOD && status.source().is_none();
    is_final.then(|| shorten(status.message(), 2 * MAX_REASON))
}

/// Why a peer could not be reached, in words.
fn unanswered(name: &TaskId, status: &Status, address: &str) -> CallError {
    let mut innermost: &dyn Error = status;
    while let Some(source) = innermost.source() {
        innermost = source;
        let proof = innermost.downcast_ref::<ProofError>();
        let system = match proof {
            Some(ProofError::Io(error) | ProofError::Unknown(error)) => Some(error),
            Some(_) => None,
            None => innermost.downcast_ref::<std::io::Error>(),
        };
        if system.is_some_and(is_lack) {
            let why = format!("this process can't call {address}: {innermost}; {LACK_REMEDY}");
            return CallError::Unreachable(why);
        }
        // It counts as silent: what answers there is not the peer.
        if let Some(why) = proof.filter(|why| !matches!(why, ProofError::Io(_))) {
            let is_cut = matches!(why, ProofError::Cut(_));
            let why = format!("{address} is not proven to be {name}: {why}");
            return if is_cut { CallError::Cut(why) } else { CallError::Unreachable(why) };
        }
        if system.map(std::io::Error::kind) == Some(ErrorKind::AddrNotAvailable) {
            let why = format!(
                "this host has no free port for a connection with {address}, or no address of its kind: \
                 other processes hold the ports (`ss -tanp`), net.ipv4.ip_local_port_range is small, or \
                 IPv6 is switched off"
            );
            return CallError::Unreachable(why);
        }
        if system.map(std::io::Error::kind) == Some(ErrorKind::ConnectionRefused) {
            let why = format!(
                "nobody listens at {address} (connection refused): is the process running, or does a \
                 firewall refuse?"
            );
            return CallError::Unattended(why);
        }
        if system.is_some_and(was_cut) {
            return CallError::Cut(format!("{address} has ended the connection: {innermost}"));
        }
    }
    CallError::Unreachable(format!("{address} could not be reached: {innermost}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_of_a_peer_cut_no_more_than_seven_eighths_of_a_pause_after_a_failed_attempt() {
        assert_eq!(least_rest(PAUSES.1, false), SHORTEST);
        assert_eq!(least_rest(PAUSES.0, true), PAUSES.0 / 8);
        assert_eq!(least_rest(PAUSES.1, true) * 16, Duration::from_secs(1));
    }
}
