//! The table of peers: the life of each, and the state of its link.
//!
//! Plain state: no I/O, no clock, no threads. Times are given; what must be told to the [`Peering`]
//! comes back as [`PeerEvent`]s, so that the caller can run them outside its lock.
//!
//! [`Peering`]: super::Peering

use super::names::Incarnation;
use super::peer_record::{EndpointState, LifeStage, PeerLife, PeerRecord};
use super::peering::{MAX_OFFER, PeerInfo, Prepared};
use crate::wire::Status;
use crate::wire::{LossCause, TaskId};
use std::time::{Duration, Instant};

/// The largest step of a generation. It permits all real cases, and one invalid number cannot use
/// up the others.
const MAX_AHEAD: u64 = 1 << 32;

/// Something that the peering must be told.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum PeerEvent {
    Ready(PeerInfo, u64),
    Lost(PeerInfo, LossCause),
    Abandon(PeerInfo, u64),
    Gone(PeerInfo, LossCause),
}

/// Why the identity of a caller is refused.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum LifeRefusal {
    /// Another life of that name is alive.
    Taken { alive: Incarnation },
    /// That life has ended.
    Over,
    /// That life has not introduced itself.
    Unknown,
}

/// The introduction of a member.
#[derive(Clone, Debug)]
pub(super) struct PeerIdentity {
    pub(super) incarnation: Incarnation,
    pub(super) host_id: String,
    pub(super) spinners: u32,
}

/// The result of a peer's offer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum OfferDecision {
    /// It is new: make this side's endpoint.
    Start(PeerInfo),
    /// This side's endpoint is being made.
    Wait,
    /// This side's offer.
    Answer(Vec<u8>),
    Refused(String),
}

/// How far this side of a generation is.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum HandshakeProgress {
    Connecting,
    Connected,
    Failed(String),
}

/// All peers of this process, by index.
pub(super) struct PeerTable {
    slots: Vec<PeerRecord>,
    silence: Duration,
}

impl PeerTable {
    pub(super) fn new(names: impl IntoIterator<Item = TaskId>, silence: Duration) -> Self {
        PeerTable { slots: names.into_iter().map(PeerRecord::new).collect(), silence }
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &TaskId> {
        self.slots.iter().map(|slot| &slot.name)
    }

    pub(super) fn all_linked(&self) -> bool {
        (0..self.slots.len()).all(|index| self.link(index).is_some())
    }

    /// The link with a peer, if it is up, and when the peer last gave a sign of life.
    pub(super) fn link(&self, index: usize) -> Option<(PeerInfo, Instant)> {
        let slot = &self.slots[index];
        let life = slot.life.as_ref()?;
        match &life.stage {
            LifeStage::Linked(attempt) => Some((slot.info(&life.who, attempt.generation), life.heard)),
            _ => None,
        }
    }

    /// Whether a link with the peer is being made.
    pub(super) fn is_linking(&self, index: usize) -> bool {
        let life = self.slots[index].life.as_ref();
        life.is_some_and(|life| matches!(life.stage, LifeStage::Linking(_)))
    }

    /// Whether the peer is up, as far as we know.
    pub(super) fn is_met(&self, index: usize) -> bool {
        self.slots[index].life.as_ref().is_some_and(|life| !matches!(life.stage, LifeStage::Gone))
    }

    pub(super) fn is_busy(&self, index: usize) -> bool {
        self.slots[index].busy
    }

    pub(super) fn generation(&self, index: usize) -> u64 {
        self.slots[index].generation
    }

    /// Why the peer has no link, in words.
    pub(super) fn why_missing(&self, index: usize) -> String {
        let slot = &self.slots[index];
        let now = match (&slot.reach, &slot.failed) {
            (Some(reach), _) => reach.clone(),
            (None, Some((_, why))) if slot.life.is_some() => format!("its link failed: {why}"),
            _ if slot.life.is_some() => "it is up, and the link with it is still being made".into(),
            _ => "it has not been reached yet".into(),
        };
        match &slot.lost {
            Some(lost) => format!("it was lost ({lost}); since then: {now}"),
            None => now,
        }
    }

    /// Remembers why the peer could not be reached or would not talk; `None` once it does. Returns
    /// whether that is news.
    pub(super) fn note(&mut self, index: usize, why: Option<String>) -> bool {
        let slot = &mut self.slots[index];
        let news = slot.reach != why;
        slot.reach = why;
        news
    }

    /// A life of the peer has introduced itself: by a call or (`dialed`) by an answer at the peer's
    /// address in the cluster, which decides the owner of the name.
    pub(super) fn meet(
        &mut self,
        index: usize,
        who: &PeerIdentity,
        dialed: bool,
        now: Instant,
    ) -> Result<Vec<PeerEvent>, LifeRefusal> {
        let silence = self.silence;
        let slot = &mut self.slots[index];
        if slot.past.contains(&who.incarnation) {
            return Err(LifeRefusal::Over);
        }
        let mut acts = Vec::new();
        match &mut slot.life {
            Some(life) if life.who.incarnation == who.incarnation => {
                life.heard = now;
                life.dialed |= dialed;
                if matches!(life.stage, LifeStage::Gone) {
                    life.stage = LifeStage::Apart;
                }
                return Ok(acts);
            }
            Some(life) => {
                let gone = matches!(life.stage, LifeStage::Gone) || now.duration_since(life.heard) >= silence;
                if !gone && !dialed {
                    return Err(LifeRefusal::Taken { alive: life.who.incarnation });
                }
                acts = slot.retire(&LossCause::replaced(who.incarnation));
            }
            None => {}
        }
        slot.life = Some(PeerLife { who: who.clone(), heard: now, dialed, stage: LifeStage::Apart });
        Ok(acts)
    }

    /// A life that has introduced itself before gives a sign of life.
    pub(super) fn heard(&mut self, index: usize, from: Incarnation, now: Instant) -> Result<(), LifeRefusal> {
        let silence = self.silence;
        let slot = &mut self.slots[index];
        if slot.past.contains(&from) {
            return Err(LifeRefusal::Over);
        }
        match &mut slot.life {
            Some(life) if matches!(life.stage, LifeStage::Gone) => Err(LifeRefusal::Unknown),
            Some(life) if life.who.incarnation == from => {
                life.heard = now;
                Ok(())
            }
            Some(life) if now.duration_since(life.heard) < silence => {
                Err(LifeRefusal::Taken { alive: life.who.incarnation })
            }
            _ => Err(LifeRefusal::Unknown),
        }
    }

    /// Starts a new generation from this side. `None` while an older one is still being given up,
    /// or if the peer is linked, being linked, or not that life any more.
    pub(super) fn start(&mut self, index: usize, with: Incarnation, seen_there: u64) -> Option<PeerInfo> {
        let slot = &mut self.slots[index];
        let apart = matches!(slot.known(with)?.stage, LifeStage::Apart);
        if slot.busy || !apart {
            return None;
        }
        let limit = slot.generation.saturating_add(MAX_AHEAD);
        let generation = slot.generation.max(seen_there.min(limit)).checked_add(1)?;
        slot.begin(generation, Vec::new())
    }

    /// The peer, which has introduced itself, has started a generation and made an offer.
    pub(super) fn offered(
        &mut self,
        index: usize,
        from: Incarnation,
        generation: u64,
        offer: &[u8],
    ) -> (OfferDecision, Vec<PeerEvent>) {
        let slot = &mut self.slots[index];
        let refused = |why: String| (OfferDecision::Refused(why), Vec::new());
        let Some(life) = slot.known(from) else { return refused("say Hello first".into()) };
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
        if generation <= slot.generation {
            return refused(slot.failure_of(generation));
        }
        if generation - slot.generation > MAX_AHEAD {
            return refused(format!("generation {generation} is too far ahead of {}", slot.generation));
        }
        if slot.busy {
            return refused(format!("generation {} is still being given up; try again", slot.generation));
        }
        let cause = LossCause::Closed(format!("it has started generation {generation}"));
        let acts = slot.end(&cause, LifeStage::Apart);
        match slot.begin(generation, offer.to_vec()) {
            Some(info) => (OfferDecision::Start(info), acts),
            None => (OfferDecision::Refused("say Hello first".into()), acts),
        }
    }

    /// This side's endpoint of a generation is made, or could not be made. Gives this side's offer.
    pub(super) fn prepared(
        &mut self,
        index: usize,
        info: &PeerInfo,
        outcome: Result<Prepared, Status>,
    ) -> (Result<Vec<u8>, String>, Vec<PeerEvent>) {
        let slot = &mut self.slots[index];
        let why = match outcome {
            Ok(Prepared { ticket, offer }) => match slot.linking(info) {
                Some(attempt) if offer.len() <= MAX_OFFER => {
                    attempt.endpoint = EndpointState::Prepared(ticket);
                    attempt.ours = Some(offer.clone());
                    return (Ok(offer), Vec::new());
                }
                wanted => {
                    let why = match wanted {
                        Some(_) => format!("the offer has {} bytes, at most {MAX_OFFER} travel", offer.len()),
                        None => slot.failure_of(info.generation),
                    };
                    let acts = vec![PeerEvent::Abandon(info.clone(), ticket)];
                    self.fail(index, info, &why);
                    return (Err(why), acts);
                }
            },
            Err(status) => status.to_string(),
        };
        self.fail(index, info, &why);
        (Err(why), Vec::new())
    }

    /// The endpoint of a generation that is to be connected now; `None` if the generation is over.
    pub(super) fn connecting(&mut self, index: usize, info: &PeerInfo) -> Option<u64> {
        let slot = &mut self.slots[index];
        let attempt = slot.linking(info)?;
        let EndpointState::Prepared(ticket) = attempt.endpoint else { return None };
        attempt.endpoint = EndpointState::Connecting;
        slot.busy = true;
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
        let slot = &mut self.slots[index];
        match (outcome, slot.linking(info)) {
            (Ok(()), Some(attempt)) => {
                attempt.endpoint = EndpointState::Connected(ticket);
                (Ok(()), Vec::new())
            }
            (Ok(()), None) => {
                (Err(slot.failure_of(info.generation)), vec![PeerEvent::Abandon(info.clone(), ticket)])
            }
            (Err(status), _) => {
                let why = status.to_string();
                self.fail(index, info, &why);
                (Err(why), Vec::new())
            }
        }
    }

    /// No thread works for this peer any more.
    pub(super) fn idle(&mut self, index: usize) {
        self.slots[index].busy = false;
    }

    /// Ends an attempt that has left nothing behind.
    fn fail(&mut self, index: usize, info: &PeerInfo, why: &str) {
        let slot = &mut self.slots[index];
        if slot.linking(info).is_none() {
            return;
        }
        if let Some(life) = slot.known(info.incarnation) {
            life.stage = LifeStage::Apart;
        }
        slot.failed = Some((info.generation, why.to_owned()));
    }

    /// The link is up as soon as both sides have said that they are connected.
    pub(super) fn settle(&mut self, index: usize, info: &PeerInfo) -> Vec<PeerEvent> {
        let slot = &mut self.slots[index];
        let Some(attempt) = slot.linking(info) else { return Vec::new() };
        let EndpointState::Connected(ticket) = attempt.endpoint else { return Vec::new() };
        if !attempt.ready_there {
            return Vec::new();
        }
        if let Some(life) = slot.known(info.incarnation) {
            let stage = std::mem::replace(&mut life.stage, LifeStage::Apart);
            if let LifeStage::Linking(attempt) = stage {
                life.stage = LifeStage::Linked(attempt);
            }
        }
        (slot.reach, slot.failed, slot.lost) = (None, None, None);
        vec![PeerEvent::Ready(info.clone(), ticket)]
    }

    /// The peer has said that its side of a generation is connected. Says how far ours is.
    pub(super) fn said_ready(
        &mut self,
        index: usize,
        from: Incarnation,
        generation: u64,
    ) -> (HandshakeProgress, Vec<PeerEvent>) {
        let slot = &mut self.slots[index];
        let info = match slot.known(from).map(|life| (life.who.clone(), &mut life.stage)) {
            Some((_, LifeStage::Linked(attempt))) if attempt.generation == generation => {
                return (HandshakeProgress::Connected, Vec::new());
            }
            Some((who, LifeStage::Linking(attempt))) if attempt.generation == generation => {
                attempt.ready_there = true;
                slot.info(&who, generation)
            }
            _ => return (HandshakeProgress::Failed(slot.failure_of(generation)), Vec::new()),
        };
        let acts = self.settle(index, &info);
        let progress =
            if acts.is_empty() { HandshakeProgress::Connecting } else { HandshakeProgress::Connected };
        (progress, acts)
    }

    /// Whether this side of a generation is up or about to be; if not, why.
    pub(super) fn stands(&mut self, index: usize, from: Incarnation, generation: u64) -> Result<(), String> {
        let slot = &mut self.slots[index];
        match slot.known(from).map(|life| &life.stage) {
            Some(LifeStage::Linked(attempt)) if attempt.generation == generation => Ok(()),
            // The other side can know before us that both are connected.
            Some(LifeStage::Linking(attempt))
                if attempt.generation == generation
                    && matches!(attempt.endpoint, EndpointState::Connected(_)) =>
            {
                Ok(())
            }
            _ => Err(slot.failure_of(generation)),
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
        let slot = &mut self.slots[index];
        let present = match slot.known(from).map(|life| &life.stage) {
            Some(LifeStage::Linking(attempt) | LifeStage::Linked(attempt)) => attempt.generation,
            _ => return Vec::new(),
        };
        if present != generation {
            return Vec::new();
        }
        slot.end(&LossCause::Closed(reason.to_owned()), LifeStage::Apart)
    }

    /// Our own process says that a link that was up is dead. Returns whether it was up.
    pub(super) fn report(&mut self, index: usize, generation: u64, why: &str) -> bool {
        let up = self.link(index).is_some_and(|(info, _)| info.generation == generation);
        if up {
            // The event belongs to the peer that has just called.
            self.slots[index].end(&LossCause::Closed(why.to_owned()), LifeStage::Gone);
            self.slots[index].lost = Some(why.to_owned());
            self.slots[index].failed = Some((generation, why.to_owned()));
        }
        up
    }

    /// Holds the peer for dead if it is linked and nothing has been heard from it for too long.
    pub(super) fn silent(&mut self, index: usize, now: Instant) -> Vec<PeerEvent> {
        let Some((_, heard)) = self.link(index) else { return Vec::new() };
        let after = now.duration_since(heard);
        if after < self.silence {
            return Vec::new();
        }
        self.slots[index].end(&LossCause::Silent { after, bound: self.silence }, LifeStage::Gone)
    }

    /// That life of the peer is over for good: it has left, or another one answers at its address.
    pub(super) fn over(&mut self, index: usize, life: Incarnation, cause: &LossCause) -> Vec<PeerEvent> {
        let slot = &mut self.slots[index];
        if slot.known(life).is_none() {
            return Vec::new();
        }
        slot.retire_and_tell(cause)
    }

    /// Nothing listens at the peer's address. If a life of it has answered there before, its
    /// process has ended.
    pub(super) fn unattended(&mut self, index: usize, why: &str) -> Vec<PeerEvent> {
        let slot = &mut self.slots[index];
        match &slot.life {
            Some(life) if life.dialed => slot.retire_and_tell(&LossCause::Died(why.to_owned())),
            _ => Vec::new(),
        }
    }

    /// The peer did not answer. It counts as dead if it has no link and was silent for too long: a
    /// live peer calls often.
    pub(super) fn unanswered(&mut self, index: usize, now: Instant) -> Vec<PeerEvent> {
        let bound = self.silence;
        let slot = &mut self.slots[index];
        let Some(life) = &slot.life else { return Vec::new() };
        let after = now.duration_since(life.heard);
        if after < bound || !matches!(life.stage, LifeStage::Apart) {
            return Vec::new();
        }
        let cause = LossCause::Silent { after, bound };
        let gone = PeerEvent::Gone(slot.info(&life.who, slot.generation), cause.clone());
        slot.lost = Some(cause.to_string());
        let mut acts = slot.end(&cause, LifeStage::Gone);
        acts.push(gone);
        acts
    }

    /// Gives up every attempt, and forgets every link without a word: this process stops.
    pub(super) fn close(&mut self) -> Vec<PeerEvent> {
        let cause = LossCause::Closed("this process stops".into());
        let acts = self.slots.iter_mut().flat_map(|slot| slot.end(&cause, LifeStage::Gone));
        acts.filter(|act| matches!(act, PeerEvent::Abandon(..))).collect()
    }
}

#[cfg(test)]
#[path = "tests/peer_table.rs"]
mod tests;
