//! The table of peers: the life of each, and the state of its link.
//!
//! Plain state: no I/O, no clock, no threads. The caller passes the time. Events for the
//! [`Peering`] are returned as [`PeerEvent`]s, so that the caller delivers them outside its lock.
//!
//! [`Peering`]: super::Peering

use super::peer_record::{
    EndpointState, HandshakeProgress, LifeRefusal, LifeStage, OfferDecision, PeerIdentity, PeerLife,
    PeerRecord,
};
use super::peering::{MAX_OFFER, PeerInfo, Prepared};
use crate::wire::{Code, Incarnation, LossCause, Status, TaskId};
use std::time::{Duration, Instant};

/// Generations of two lives. Their sum over all lives of a peer can't overflow.
const MAX_GENERATION: u64 = u32::MAX as u64;

/// A peer without a link that has not called for so long does not call any more. While it lives,
/// its pauses are half a second at most.
pub(super) const MUTE: Duration = Duration::from_secs(2);

/// Between the first peer that has ended and the end of the join: the longest pause between two
/// calls to a peer. So those that left because of another one do not hide it.
pub(super) const LOOK_ROUND: Duration = Duration::from_millis(500);

/// Between the cause of a failed attempt, in the words of the peer, and what this side saw.
pub(super) const SAW: &str = "; this side saw: ";

/// An event for the peering.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum PeerEvent {
    Ready(PeerInfo, u64),
    Lost(PeerInfo, LossCause),
    Abandon(PeerInfo, u64),
    Gone(PeerInfo, LossCause),
}

/// All peers of this process, by index.
pub(super) struct PeerTable {
    peers: Vec<PeerRecord>,
    silence: Duration,
    /// The host of this process.
    host_id: String,
    /// Each peer has listened at its address before this process knew it.
    have_met: bool,
}

impl PeerTable {
    pub(super) fn new(
        names: impl IntoIterator<Item = TaskId>,
        silence: Duration,
        host_id: String,
        have_met: bool,
    ) -> Self {
        PeerTable { peers: names.into_iter().map(PeerRecord::new).collect(), silence, host_id, have_met }
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &TaskId> {
        self.peers.iter().map(|peer| &peer.name)
    }

    pub(super) fn all_linked(&self) -> bool {
        self.peers
            .iter()
            .all(|peer| peer.life.as_ref().is_some_and(|life| matches!(life.stage, LifeStage::Linked(_))))
    }

    /// The link with a peer, if it is up, and when the peer last gave a sign of life.
    pub(super) fn link(&self, index: usize) -> Option<(PeerInfo, Instant)> {
        let peer = &self.peers[index];
        let life = peer.life.as_ref()?;
        let LifeStage::Linked(attempt) = &life.stage else { return None };
        Some((peer.info(&life.who, attempt.generation), life.heard))
    }

    /// Whether this link with the peer is being made.
    pub(super) fn is_linking(&self, index: usize, info: &PeerInfo) -> bool {
        let life = self.peers[index].life.as_ref();
        let life = life.filter(|life| life.who.incarnation == info.incarnation);
        match life.map(|life| &life.stage) {
            Some(LifeStage::Linking(attempt)) => attempt.generation == info.generation,
            _ => false,
        }
    }

    /// Whether the peer is up, as far as this process knows.
    pub(super) fn is_met(&self, index: usize) -> bool {
        self.peers[index].life.as_ref().is_some_and(|life| !matches!(life.stage, LifeStage::Gone))
    }

    /// The life of that peer that is known.
    pub(super) fn present(&self, index: usize) -> Option<Incarnation> {
        self.peers[index].life.as_ref().map(|life| life.who.incarnation)
    }

    pub(super) fn is_busy(&self, index: usize) -> bool {
        self.peers[index].busy
    }

    /// Why the peer has no link, in words.
    pub(super) fn why_missing(&self, index: usize) -> String {
        self.peers[index].why_missing()
    }

    /// Remembers why a call failed; `None` if it did not. `is_answer`: the peer has answered it.
    pub(super) fn note(&mut self, index: usize, why: Option<String>, is_answer: bool) {
        self.peers[index].unanswered = why.clone().filter(|_| !is_answer).unwrap_or_default();
        self.peers[index].note(why);
    }

    /// Remembers that the peer's address has ended a connection, or that nothing listens there.
    pub(super) fn note_end(&mut self, index: usize, why: String) {
        self.peers[index].unanswered.clone_from(&why);
        self.peers[index].end = Some(why);
    }

    /// Why the last call to the peer got no answer; empty if it got one.
    pub(super) fn why_unanswered(&self, index: usize) -> String {
        self.peers[index].unanswered.clone()
    }

    /// Remembers what that life of the peer says of calls between it and this process.
    pub(super) fn note_says(&mut self, index: usize, life: Incarnation, why: String) {
        if let Some(life) = self.peers[index].known(life) {
            life.says = why;
        }
    }

    /// Remembers why this process has refused the peer. Returns whether to log it.
    pub(super) fn note_refusal(&mut self, index: usize, why: String, is_final: bool, now: Instant) -> bool {
        self.peers[index].note_refusal(why, is_final, now)
    }

    /// Whether to log this failure of an attempt. Attempts follow each other quickly.
    pub(super) fn is_news(&mut self, index: usize, why: &str, now: Instant) -> bool {
        self.peers[index].is_news(why, now)
    }

    /// Whether to log that the two disagree for good, whichever side has found it.
    pub(super) fn is_new_disagreement(&mut self, index: usize, now: Instant) -> bool {
        self.peers[index].is_new_disagreement(now)
    }

    /// A life of the peer has introduced itself, by a call or (`dialed`) by an answer. An answer at
    /// the peer's address in the cluster decides the owner of the name.
    pub(super) fn meet(
        &mut self,
        index: usize,
        who: &PeerIdentity,
        dialed: bool,
        now: Instant,
    ) -> Result<Vec<PeerEvent>, LifeRefusal> {
        let (silence, have_met, peer) = (self.silence, self.have_met, &mut self.peers[index]);
        if peer.past.contains(&who.incarnation) {
            return Err(LifeRefusal::Over);
        }
        let mut events = Vec::new();
        match &mut peer.life {
            Some(life) if life.who.incarnation == who.incarnation => {
                life.heard = now;
                life.dialed |= dialed;
                if matches!(life.stage, LifeStage::Gone) {
                    (life.stage, peer.ended) = (LifeStage::Apart, None);
                }
                // That of another process, which had the name meanwhile.
                peer.disagreement.take_if(|found| found.with != Some(who.incarnation));
                return Ok(events);
            }
            Some(life) => {
                if life.is_alive(now, silence) && !dialed {
                    return Err(LifeRefusal::Taken { alive: life.who.incarnation });
                }
                events = peer.retire(&LossCause::replaced(who.incarnation));
            }
            None => {}
        }
        let (who, dialed, stage) = (who.clone(), dialed || have_met, LifeStage::Apart);
        peer.begin_life(PeerLife { who, heard: now, dialed, says: String::new(), stage });
        Ok(events)
    }

    /// A life has answered a call that began when `known` was the present life. Its process may
    /// have ended since, so the answer does not count against a life that was met meanwhile.
    pub(super) fn meet_by_answer(
        &mut self,
        index: usize,
        who: &PeerIdentity,
        known: Option<Incarnation>,
        now: Instant,
    ) -> Result<Vec<PeerEvent>, LifeRefusal> {
        let present = self.present(index);
        if present != known && present.is_some_and(|life| life != who.incarnation) {
            return Err(LifeRefusal::Late);
        }
        self.meet(index, who, true, now)
    }

    /// A life that has introduced itself is alive.
    pub(super) fn heard(&mut self, index: usize, from: Incarnation, now: Instant) -> Result<(), LifeRefusal> {
        self.peers[index].heard(from, now, self.silence)
    }

    /// A life that has introduced itself has answered at its address: it is alive.
    pub(super) fn answered(
        &mut self,
        index: usize,
        by: Incarnation,
        now: Instant,
    ) -> Result<(), LifeRefusal> {
        let heard = self.heard(index, by, now);
        heard.inspect(|()| self.peers[index].life.iter_mut().for_each(|life| life.dialed = true))
    }

    /// The last link with the present life of a peer, up or not.
    pub(super) fn last_link(&self, index: usize) -> Option<PeerInfo> {
        let peer = &self.peers[index];
        Some(peer.info(&peer.life.as_ref()?.who, peer.generation))
    }

    /// The first peer that disagrees with this process for good, and how.
    pub(super) fn disagreement(&self) -> Option<(usize, &str)> {
        (0..self.peers.len()).find_map(|index| Some((index, self.disagreement_with(index)?)))
    }

    /// How the last known life of a peer disagrees with this process for good.
    pub(super) fn disagreement_with(&self, index: usize) -> Option<&str> {
        self.peers[index].disagreement.as_ref().map(|found| found.why.as_str())
    }

    /// Remembers a disagreement with a life that no further attempt mends. The first one is kept.
    pub(super) fn disagree(&mut self, index: usize, with: Incarnation, why: &str) {
        let peer = &mut self.peers[index];
        if peer.known(with).is_some() {
            peer.disagree(Some(with), why);
        }
    }

    /// Remembers a disagreement because of which the peer can't be met. It is with a life that
    /// calls, or with whatever answers at the peer's address (`None`). Another life that is alive
    /// comes first.
    pub(super) fn disagree_unmet(
        &mut self,
        index: usize,
        with: Option<Incarnation>,
        why: &str,
        now: Instant,
    ) {
        let silence = self.silence;
        let peer = &mut self.peers[index];
        let is_other = |life: &&PeerLife| with.is_some_and(|with| with != life.who.incarnation);
        let other_lives = peer.life.as_ref().filter(is_other).is_some_and(|life| life.is_alive(now, silence));
        if !other_lives && self.link(index).is_none() {
            self.peers[index].disagree(with, why);
        }
    }

    /// Starts a new generation from this side. `None` if an older one has just begun or is still
    /// given up, and if the peer is linked or being linked. `None` too if that life is over, or
    /// disagrees with this process for good.
    pub(super) fn start(&mut self, index: usize, with: Incarnation, now: Instant) -> Option<PeerInfo> {
        let peer = &mut self.peers[index];
        let may_start = matches!(peer.known(with)?.stage, LifeStage::Apart) && peer.disagreement.is_none();
        let generation = peer.generation + 1;
        if peer.busy || !may_start || generation > MAX_GENERATION || peer.starts_too_soon(now) {
            return None;
        }
        peer.begin(generation, Vec::new())
    }

    /// The peer, which has introduced itself, has started a generation and made an offer.
    pub(super) fn offered(
        &mut self,
        index: usize,
        from: Incarnation,
        generation: u64,
        offer: &[u8],
        now: Instant,
    ) -> (OfferDecision, Vec<PeerEvent>) {
        let peer = &mut self.peers[index];
        let refused = |why: String| (OfferDecision::Refused(why), Vec::new());
        let disagreement = peer.disagreement.as_ref().map(|found| found.why.clone());
        let Some(life) = peer.known(from) else { return refused("say Hello first".into()) };
        if let Some(why) = disagreement {
            return refused(why);
        }
        if let LifeStage::Linking(attempt) | LifeStage::Linked(attempt) = &life.stage
            && attempt.generation == generation
        {
            return match &attempt.ours {
                _ if attempt.theirs != offer => {
                    refused(format!("generation {generation} was offered before, with another offer"))
                }
                Some(ours) => (OfferDecision::Answer(ours.clone()), Vec::new()),
                None => (OfferDecision::Wait, Vec::new()),
            };
        }
        if generation <= peer.generation {
            return refused(peer.failure_of(generation));
        }
        if generation > MAX_GENERATION {
            return refused(format!("generation {generation} is too high: {MAX_GENERATION} is the last"));
        }
        if peer.busy || peer.starts_too_soon(now) {
            // An older one is given up, or has just begun. A refusal would hide why it fails.
            return (OfferDecision::Wait, Vec::new());
        }
        let cause = LossCause::Closed(format!("it has started generation {generation}"));
        let events = peer.end(&cause, LifeStage::Apart);
        match peer.begin(generation, offer.to_vec()) {
            Some(info) => (OfferDecision::Start(info), events),
            None => (OfferDecision::Refused("say Hello first".into()), events),
        }
    }

    /// This side's endpoint of a generation is made, or could not be made. Returns this side's
    /// offer.
    pub(super) fn prepared(
        &mut self,
        index: usize,
        info: &PeerInfo,
        outcome: Result<Prepared, Status>,
    ) -> (Result<Vec<u8>, String>, Vec<PeerEvent>) {
        let peer = &mut self.peers[index];
        let why = match outcome {
            Ok(Prepared { ticket, offer }) => match peer.linking(info) {
                Some(attempt) if offer.len() <= MAX_OFFER => {
                    attempt.endpoint = EndpointState::Prepared(ticket);
                    attempt.ours = Some(offer.clone());
                    return (Ok(offer), Vec::new());
                }
                wanted => {
                    let why = match wanted {
                        Some(_) => format!("the offer has {} bytes, at most {MAX_OFFER} travel", offer.len()),
                        None => peer.failure_of(info.generation),
                    };
                    let events = vec![PeerEvent::Abandon(info.clone(), ticket)];
                    self.fail(index, info, &why);
                    return (Err(why), events);
                }
            },
            Err(status) => {
                self.note_disagreement(index, info, &status);
                status.to_string()
            }
        };
        self.fail(index, info, &why);
        (Err(why), Vec::new())
    }

    /// The endpoint of a generation that is to be connected now; `None` if the generation is over.
    pub(super) fn connecting(&mut self, index: usize, info: &PeerInfo) -> Option<u64> {
        let peer = &mut self.peers[index];
        let attempt = peer.linking(info)?;
        let EndpointState::Prepared(ticket) = attempt.endpoint else { return None };
        attempt.endpoint = EndpointState::Connecting;
        peer.busy = true;
        Some(ticket)
    }

    /// This side's endpoint of a generation is connected, or could not be.
    pub(super) fn connected(
        &mut self,
        index: usize,
        info: &PeerInfo,
        ticket: u64,
        outcome: Result<(), Status>,
    ) -> (Result<(), String>, Vec<PeerEvent>) {
        let peer = &mut self.peers[index];
        match (outcome, peer.linking(info)) {
            (Ok(()), Some(attempt)) => {
                attempt.endpoint = EndpointState::Connected(ticket);
                (Ok(()), Vec::new())
            }
            (Ok(()), None) => {
                (Err(peer.failure_of(info.generation)), vec![PeerEvent::Abandon(info.clone(), ticket)])
            }
            (Err(status), _) => {
                self.note_disagreement(index, info, &status);
                let why = status.to_string();
                self.fail(index, info, &why);
                (Err(why), Vec::new())
            }
        }
    }

    /// No thread works for this peer any more.
    pub(super) fn idle(&mut self, index: usize) {
        self.peers[index].busy = false;
    }

    /// Remembers a failure that no further attempt with that life mends.
    fn note_disagreement(&mut self, index: usize, info: &PeerInfo, status: &Status) {
        if status.code == Code::FailedPrecondition {
            self.disagree(index, info.incarnation, &status.message);
        }
    }

    /// Ends an attempt that has left nothing behind.
    fn fail(&mut self, index: usize, info: &PeerInfo, why: &str) {
        let peer = &mut self.peers[index];
        if peer.linking(info).is_none() {
            return;
        }
        if let Some(life) = peer.known(info.incarnation) {
            life.stage = LifeStage::Apart;
        }
        let before = peer.failed.replace((info.generation, why.to_owned()));
        peer.failed_before = peer.failed_before.take().or(before.map(|(_, why)| why));
    }

    /// The link is up as soon as both sides have said that they are connected.
    pub(super) fn link_if_both_ready(&mut self, index: usize, info: &PeerInfo) -> Vec<PeerEvent> {
        let peer = &mut self.peers[index];
        let Some(attempt) = peer.linking(info) else { return Vec::new() };
        let EndpointState::Connected(ticket) = attempt.endpoint else { return Vec::new() };
        if !attempt.ready_there {
            return Vec::new();
        }
        if let Some(life) = peer.known(info.incarnation) {
            let stage = std::mem::replace(&mut life.stage, LifeStage::Apart);
            if let LifeStage::Linking(attempt) = stage {
                life.stage = LifeStage::Linked(attempt);
            }
        }
        (peer.reach, peer.end, peer.lost, peer.logged) = (None, None, None, None);
        (peer.failed, peer.failed_before) = (None, None);
        vec![PeerEvent::Ready(info.clone(), ticket)]
    }

    /// The peer's side of a generation is connected. Returns the progress of this side.
    pub(super) fn said_ready(
        &mut self,
        index: usize,
        from: Incarnation,
        generation: u64,
    ) -> (HandshakeProgress, Vec<PeerEvent>) {
        let peer = &mut self.peers[index];
        let info = match peer.known(from).map(|life| (life.who.clone(), &mut life.stage)) {
            Some((_, LifeStage::Linked(attempt))) if attempt.generation == generation => {
                return (HandshakeProgress::Connected, Vec::new());
            }
            Some((who, LifeStage::Linking(attempt))) if attempt.generation == generation => {
                attempt.ready_there = true;
                peer.info(&who, generation)
            }
            _ => return (HandshakeProgress::Failed(peer.failure_of(generation)), Vec::new()),
        };
        let events = self.link_if_both_ready(index, &info);
        let progress =
            if events.is_empty() { HandshakeProgress::Connecting } else { HandshakeProgress::Connected };
        (progress, events)
    }

    /// Whether this side of a generation is up or about to be; if not, why.
    pub(super) fn stands(&mut self, index: usize, from: Incarnation, generation: u64) -> Result<(), String> {
        let peer = &mut self.peers[index];
        match peer.known(from).map(|life| &life.stage) {
            Some(LifeStage::Linked(attempt)) if attempt.generation == generation => Ok(()),
            // The peer can learn first that both sides are connected.
            Some(LifeStage::Linking(attempt))
                if attempt.generation == generation
                    && matches!(attempt.endpoint, EndpointState::Connected(_)) =>
            {
                Ok(())
            }
            _ => Err(peer.failure_of(generation)),
        }
    }

    /// Ends one generation, up or not; any other is left alone.
    pub(super) fn give_up(
        &mut self,
        index: usize,
        from: Incarnation,
        generation: u64,
        reason: &str,
    ) -> Vec<PeerEvent> {
        let peer = &mut self.peers[index];
        let present = match peer.known(from).map(|life| &life.stage) {
            Some(LifeStage::Linking(attempt) | LifeStage::Linked(attempt)) => attempt.generation,
            // The attempt has failed before this side heard of it, or has failed here: the first
            // cause counts.
            Some(LifeStage::Apart) => {
                peer.failed_before = None;
                if peer.failed.as_ref().is_none_or(|(failed, _)| *failed < generation) {
                    peer.failed = Some((generation, reason.to_owned()));
                }
                return Vec::new();
            }
            _ => return Vec::new(),
        };
        if present != generation {
            return Vec::new();
        }
        peer.end(&LossCause::Closed(reason.to_owned()), LifeStage::Apart)
    }

    /// Why this side of a generation has failed, as far as it has.
    pub(super) fn failure(&self, index: usize, generation: u64) -> Option<String> {
        let failed = self.peers[index].failed.as_ref()?;
        (failed.0 == generation).then(|| failed.1.clone())
    }

    /// Notes why a generation has failed, after both sides have said what they know.
    pub(super) fn explain(&mut self, index: usize, generation: u64, why: &str) {
        let peer = &mut self.peers[index];
        if let Some(failed) = peer.failed.as_mut().filter(|failed| failed.0 == generation) {
            failed.1 = why.to_owned();
            peer.failed_before = None;
        }
    }

    /// This process reports that the link with that number is dead. Returns it if it was up.
    pub(super) fn report(&mut self, index: usize, number: u64, why: &str) -> Option<PeerInfo> {
        let (info, _) = self.link(index).filter(|(info, _)| info.number == number)?;
        // The event belongs to the peer that has just called.
        self.peers[index].end(&LossCause::Closed(why.to_owned()), LifeStage::Gone);
        self.peers[index].lost = Some(why.to_owned());
        self.peers[index].failed = Some((info.generation, why.to_owned()));
        Some(info)
    }

    /// Declares a linked peer dead after `silence` without a sign of life.
    pub(super) fn silent(&mut self, index: usize, now: Instant) -> Vec<PeerEvent> {
        let Some((_, heard)) = self.link(index) else { return Vec::new() };
        let after = now.duration_since(heard);
        if after < self.silence {
            return Vec::new();
        }
        self.peers[index].end(&LossCause::Silent { after, bound: self.silence }, LifeStage::Gone)
    }

    /// That life of the peer is over: it has left, or another life answers at its address.
    pub(super) fn over(&mut self, index: usize, life: Incarnation, cause: &LossCause) -> Vec<PeerEvent> {
        let peer = &mut self.peers[index];
        if peer.known(life).is_none() {
            return Vec::new();
        }
        peer.retire_and_tell(cause)
    }

    /// Whether a process was found to have ended, so long ago that all such were found.
    pub(super) fn has_ended(&self, now: Instant) -> bool {
        let ended = self.peers.iter().filter_map(|peer| peer.ended.as_ref());
        ended.map(|(_, since)| *since).min().is_some_and(|since| now.duration_since(since) >= LOOK_ROUND)
    }

    /// The peers whose processes were found to have ended, and why.
    pub(super) fn ended(&self) -> impl Iterator<Item = (usize, &str)> {
        self.peers.iter().enumerate().filter_map(|(index, peer)| Some((index, peer.why_ended()?)))
    }

    /// Nothing listens at the peer's address. A life that has answered there, or has met others,
    /// has ended. One that has only called may listen elsewhere, and has ended once it calls no
    /// more. One on another host may come back, as a firewall may refuse in its name.
    pub(super) fn unattended(&mut self, index: usize, why: &str, now: Instant) -> Vec<PeerEvent> {
        let peer = &mut self.peers[index];
        let is_here = |life: &PeerLife| life.who.host_id == self.host_id;
        let is_told = |life: &PeerLife| matches!(life.stage, LifeStage::Gone) && !is_here(life);
        let Some(life) = peer.life.as_mut().filter(|life| !is_told(life)) else {
            if self.have_met && peer.ended.is_none() {
                peer.ended = Some((why.to_owned(), now));
            }
            return Vec::new();
        };
        let is_linked = matches!(life.stage, LifeStage::Linked(_));
        let is_mute = !is_linked && now.duration_since(life.heard) >= MUTE;
        if !life.dialed && !is_mute {
            return Vec::new();
        }
        let (cause, is_here) = (LossCause::Died(why.to_owned()), is_here(life));
        life.dialed = false;
        if is_here { peer.retire_and_tell(&cause) } else { peer.end_and_tell(&cause) }
    }

    /// The peer did not answer. It counts as dead if it has no link and was silent for too long: a
    /// live peer calls often.
    pub(super) fn unanswered(&mut self, index: usize, now: Instant) -> Vec<PeerEvent> {
        let bound = self.silence;
        let peer = &mut self.peers[index];
        let Some(life) = &peer.life else { return Vec::new() };
        let after = now.duration_since(life.heard);
        if after < bound || !matches!(life.stage, LifeStage::Apart) {
            return Vec::new();
        }
        peer.end_and_tell(&LossCause::Silent { after, bound })
    }

    /// Gives up every attempt and forgets every link, because this process stops.
    pub(super) fn close(&mut self) -> Vec<PeerEvent> {
        let cause = LossCause::Closed("this process stops".into());
        let events = self.peers.iter_mut().flat_map(|peer| peer.end(&cause, LifeStage::Gone));
        events.filter(|act| matches!(act, PeerEvent::Abandon(..))).collect()
    }
}

#[cfg(test)]
#[path = "tests/peer_table.rs"]
mod tests;
