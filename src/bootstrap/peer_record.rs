//! The entry of one peer: its lives, and the link with the present one.

use super::peer_table::{PeerEvent, SAW};
use super::peering::PeerInfo;
use crate::wire::{Incarnation, LossCause, TaskId};
use std::collections::VecDeque;
use std::fmt;
use std::time::{Duration, Instant};

/// Past lives of a peer that are remembered, so that late messages of theirs are refused.
pub(super) const PAST_LIVES: usize = 64;

/// A peer's refusals are logged once in this time, and [`MAX_NEWS`] failures of attempts.
const QUIET: Duration = Duration::from_secs(10);
/// Failed attempts with other causes that are logged in [`QUIET`].
const MAX_NEWS: usize = 4;
/// A generation begins so long after the last one, on whichever side it starts. What a link leaves
/// behind goes within seconds, so a peer must not make and end links without a pause.
pub(super) const GENERATION_PAUSE: Duration = Duration::from_millis(50);

/// Why the identity of a caller is refused.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum LifeRefusal {
    /// Another life of that name is alive.
    Taken { alive: Incarnation },
    /// That life has ended.
    Over,
    /// That life has not introduced itself.
    Unknown,
    /// Its answer came after another life was met.
    Late,
}

/// The introduction of a member.
#[derive(Clone, Debug)]
pub(super) struct PeerIdentity {
    pub(super) incarnation: Incarnation,
    pub(super) host_id: String,
}

/// Another member of the cluster.
pub(super) struct PeerRecord {
    pub(super) name: TaskId,
    /// The highest generation that was used with the present life. No earlier life of the peer has
    /// a part in it, so what that one said does not count any more.
    pub(super) generation: u64,
    /// The generations of all earlier lives.
    pub(super) before: u64,
    pub(super) life: Option<PeerLife>,
    /// Lives that have ended, the latest last.
    pub(super) past: VecDeque<Incarnation>,
    /// A thread is making an endpoint or connecting it.
    pub(super) busy: bool,
    /// When a generation was started last.
    pub(super) started: Option<Instant>,
    /// Why the last attempt to reach the peer failed, or why the peer refused.
    pub(super) reach: Option<String>,
    /// How its address ended a connection since, or that nothing listens there any more. Both
    /// follow from a peer that has stopped, so `reach` keeps the cause.
    pub(super) end: Option<String>,
    /// Why the last call to it got no answer; empty if it got one.
    pub(super) unanswered: String,
    /// The generation that failed last, and why.
    pub(super) failed: Option<(u64, String)>,
    /// Why the one before it failed, until the two sides have compared what they know of the last.
    pub(super) failed_before: Option<String>,
    /// When a further refusal of it is logged.
    pub(super) quiet_until: Option<Instant>,
    /// The failure of an attempt that the log has.
    pub(super) logged: Option<String>,
    /// When the last failures of attempts were logged.
    pub(super) news: Vec<Instant>,
    /// How the last link that was up has ended.
    pub(super) lost: Option<String>,
    /// It outlasts the life: a peer that leaves because of it leaves at once.
    pub(super) disagreement: Option<Disagreement>,
    /// How and when its process was found to have ended, as far as its address tells. Another
    /// `Hello` of the life takes that back.
    pub(super) ended: Option<(String, Instant)>,
}

/// A disagreement with one life of a peer, which no further attempt mends.
pub(super) struct Disagreement {
    /// `None` if what answers at the peer's address has refused this process, and is not known.
    pub(super) with: Option<Incarnation>,
    pub(super) why: String,
}

pub(super) struct PeerLife {
    pub(super) who: PeerIdentity,
    /// Time of the last message from it.
    pub(super) heard: Instant,
    /// It has answered at its address in the cluster, or members have met, so what is there is
    /// about this life. A refusal there ends that, until it answers again.
    pub(super) dialed: bool,
    /// Why calls between it and this process get no answer, in its words. Empty if they get one.
    pub(super) says: String,
    pub(super) stage: LifeStage,
}

pub(super) enum LifeStage {
    /// Alive, without a link.
    Apart,
    Linking(LinkAttempt),
    Linked(LinkAttempt),
    /// Counts as dead. Another life may take the name.
    Gone,
}

pub(super) struct LinkAttempt {
    pub(super) generation: u64,
    pub(super) endpoint: EndpointState,
    /// This side's offer, once it is made.
    pub(super) ours: Option<Vec<u8>>,
    /// The peer's offer; unused on the side that starts.
    pub(super) theirs: Vec<u8>,
    /// The peer has said that it is connected.
    pub(super) ready_there: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum EndpointState {
    Preparing,
    Prepared(u64),
    Connecting,
    Connected(u64),
}

/// The result of a peer's offer.
#[derive(PartialEq, Eq)]
pub(super) enum OfferDecision {
    /// It is new: make this side's endpoint.
    Start(PeerInfo),
    /// This side's endpoint is being made, or that of an older generation is being given up.
    Wait,
    /// This side's offer.
    Answer(Vec<u8>),
    Refused(String),
}

impl fmt::Debug for OfferDecision {
    /// Without the offer, which may hold a token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OfferDecision::Start(info) => f.debug_tuple("Start").field(info).finish(),
            OfferDecision::Wait => f.write_str("Wait"),
            OfferDecision::Answer(offer) => write!(f, "Answer({} bytes)", offer.len()),
            OfferDecision::Refused(why) => f.debug_tuple("Refused").field(why).finish(),
        }
    }
}

/// The progress of this side of a generation.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum HandshakeProgress {
    Connecting,
    Connected,
    Failed(String),
}

impl PeerLife {
    /// Whether it has the name of the peer.
    pub(super) fn is_alive(&self, now: Instant, silence: Duration) -> bool {
        !matches!(self.stage, LifeStage::Gone) && now.duration_since(self.heard) < silence
    }
}

impl PeerRecord {
    pub(super) fn new(name: TaskId) -> Self {
        PeerRecord {
            name,
            generation: 0,
            before: 0,
            life: None,
            past: VecDeque::new(),
            busy: false,
            started: None,
            reach: None,
            end: None,
            unanswered: String::new(),
            quiet_until: None,
            failed: None,
            failed_before: None,
            logged: None,
            news: Vec::new(),
            lost: None,
            disagreement: None,
            ended: None,
        }
    }

    pub(super) fn info(&self, who: &PeerIdentity, generation: u64) -> PeerInfo {
        PeerInfo {
            name: self.name.clone(),
            incarnation: who.incarnation,
            host_id: who.host_id.clone(),
            generation,
            number: self.before + generation,
        }
    }

    /// A new life, whose generations are counted anew.
    pub(super) fn begin_life(&mut self, life: PeerLife) {
        self.before += std::mem::take(&mut self.generation);
        (self.failed, self.failed_before, self.disagreement, self.ended) = (None, None, None, None);
        self.life = Some(life);
    }

    /// See `PeerTable::heard`.
    pub(super) fn heard(
        &mut self,
        from: Incarnation,
        now: Instant,
        silence: Duration,
    ) -> Result<(), LifeRefusal> {
        if self.past.contains(&from) {
            return Err(LifeRefusal::Over);
        }
        match &mut self.life {
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

    pub(super) fn known(&mut self, incarnation: Incarnation) -> Option<&mut PeerLife> {
        self.life.as_mut().filter(|life| life.who.incarnation == incarnation)
    }

    /// What its process said when it left, or how its address refuses calls, if it has ended.
    pub(super) fn why_ended(&self) -> Option<&str> {
        let (why, _) = self.ended.as_ref()?;
        Some(self.lost.as_deref().unwrap_or(why))
    }

    /// Remembers a disagreement. The first one with a life is kept.
    pub(super) fn disagree(&mut self, with: Option<Incarnation>, why: &str) {
        let is_known = |found: &Disagreement| with.is_none() || found.with == with;
        if !self.disagreement.as_ref().is_some_and(is_known) {
            self.disagreement = Some(Disagreement { with, why: why.to_owned() });
        }
    }

    /// The attempt that is under way, if it is this one.
    pub(super) fn linking(&mut self, info: &PeerInfo) -> Option<&mut LinkAttempt> {
        match &mut self.known(info.incarnation)?.stage {
            LifeStage::Linking(attempt) if attempt.generation == info.generation => Some(attempt),
            _ => None,
        }
    }

    /// Whether a generation has to wait before it is started. Otherwise it is started now.
    pub(super) fn starts_too_soon(&mut self, now: Instant) -> bool {
        let too_soon = self.started.is_some_and(|last| now < last + GENERATION_PAUSE);
        if !too_soon {
            self.started = Some(now);
        }
        too_soon
    }

    /// Starts a generation. The caller has ended the previous one.
    pub(super) fn begin(&mut self, generation: u64, theirs: Vec<u8>) -> Option<PeerInfo> {
        let life = self.life.as_mut()?;
        life.stage = LifeStage::Linking(LinkAttempt {
            generation,
            endpoint: EndpointState::Preparing,
            ours: None,
            theirs,
            ready_there: false,
        });
        self.busy = true;
        self.generation = generation;
        let life = self.life.as_ref()?;
        Some(self.info(&life.who, generation))
    }

    /// Ends the link or the attempt that there is, and leaves the life at `next`.
    pub(super) fn end(&mut self, cause: &LossCause, next: LifeStage) -> Vec<PeerEvent> {
        let Some(life) = self.life.as_mut() else { return Vec::new() };
        let stage = std::mem::replace(&mut life.stage, next);
        let who = life.who.clone();
        match stage {
            LifeStage::Linked(attempt) => {
                self.lost = Some(cause.to_string());
                self.failed = Some((attempt.generation, cause.to_string()));
                vec![PeerEvent::Lost(self.info(&who, attempt.generation), cause.clone())]
            }
            LifeStage::Linking(attempt) => {
                self.failed = Some((attempt.generation, cause.to_string()));
                match attempt.endpoint {
                    EndpointState::Prepared(ticket) | EndpointState::Connected(ticket) => {
                        vec![PeerEvent::Abandon(self.info(&who, attempt.generation), ticket)]
                    }
                    // The thread that makes the endpoint abandons it.
                    EndpointState::Preparing | EndpointState::Connecting => Vec::new(),
                }
            }
            LifeStage::Apart | LifeStage::Gone => Vec::new(),
        }
    }

    /// Counts the present life as dead, which may come back. There is no next life yet, so the end
    /// is reported even without a link.
    pub(super) fn end_and_tell(&mut self, cause: &LossCause) -> Vec<PeerEvent> {
        let Some(life) = &self.life else { return Vec::new() };
        let gone = PeerEvent::Gone(self.info(&life.who, self.generation), cause.clone());
        // The end of the link reports it; the link of a life that counts as dead has ended.
        let is_news = matches!(life.stage, LifeStage::Apart | LifeStage::Linking(_));
        self.lost = Some(cause.to_string());
        let mut events = self.end(cause, LifeStage::Gone);
        if is_news {
            events.push(gone);
        }
        events
    }

    /// As [`PeerRecord::end_and_tell`], for a life that is over for good.
    pub(super) fn retire_and_tell(&mut self, cause: &LossCause) -> Vec<PeerEvent> {
        let events = self.end_and_tell(cause);
        self.move_to_past();
        events
    }

    /// Ends the present life.
    pub(super) fn retire(&mut self, cause: &LossCause) -> Vec<PeerEvent> {
        let events = self.end(cause, LifeStage::Gone);
        self.move_to_past();
        events
    }

    /// The present life, which has ended, is one of the past.
    fn move_to_past(&mut self) {
        if let Some(life) = self.life.take() {
            if self.past.len() == PAST_LIVES {
                self.past.pop_front();
            }
            self.past.push_back(life.who.incarnation);
        }
    }

    /// Why the peer has no link, in words.
    pub(super) fn why_missing(&self) -> String {
        let said = self.life.as_ref().map(|life| life.says.as_str()).filter(|says| !says.is_empty());
        let said = said.map(|says| format!("; {} says: {says}", self.name));
        let and_said = |why: &str| format!("{why}{}", said.as_deref().unwrap_or_default());
        let now = match (&self.reach, &self.end, &self.failed) {
            (Some(reach), Some(end), _) => and_said(&format!("{reach}; since then: {end}")),
            (Some(why), None, _) | (None, Some(why), _) => and_said(why),
            (None, None, Some((_, why))) if self.life.is_some() => {
                format!("its link failed: {}", self.failed_before.as_ref().unwrap_or(why))
            }
            _ if said.is_some() => and_said("it is up, and calls between it and this process get no answer"),
            _ if self.life.is_some() => "it is up, and the link with it is still being made".into(),
            _ => "it has not been reached yet".into(),
        };
        match &self.lost {
            Some(lost) => format!("it was lost ({lost}); since then: {now}"),
            None => now,
        }
    }

    /// Remembers why the peer could not be reached, or refused. Returns whether that is new.
    pub(super) fn note(&mut self, why: Option<String>) -> bool {
        let is_new = self.reach != why;
        (self.reach, self.end) = (why, None);
        is_new
    }

    /// Remembers why this process has refused the peer. Returns whether to log it: peers try again
    /// and again, and one that lies has a new reason each time.
    pub(super) fn note_refusal(&mut self, why: String, is_final: bool, now: Instant) -> bool {
        let is_new = self.note(Some(why));
        if is_final {
            return self.is_new_disagreement(now);
        }
        let is_news = is_new && self.quiet_until.is_none_or(|until| now >= until);
        if is_news {
            self.quiet_until = Some(now + QUIET);
        }
        is_news
    }

    /// Whether to log that the two disagree for good.
    pub(super) fn is_new_disagreement(&mut self, now: Instant) -> bool {
        // It ends the attempts, so those before must not hide it.
        self.is_new_line("a disagreement", 1 + MAX_NEWS, now)
    }

    /// Whether to log this failure of an attempt: the log lacks it, and has few others of late.
    pub(super) fn is_news(&mut self, why: &str, now: Instant) -> bool {
        self.is_new_line(why.split(SAW).next().unwrap_or_default(), MAX_NEWS, now)
    }

    /// Whether the log lacks this cause, and has fewer than `most` causes of late.
    fn is_new_line(&mut self, cause: &str, most: usize, now: Instant) -> bool {
        self.news.retain(|at| now < *at + QUIET);
        let is_news = self.logged.as_deref() != Some(cause) && self.news.len() < most;
        if is_news {
            self.logged = Some(cause.to_owned());
            self.news.push(now);
        }
        is_news
    }

    pub(super) fn failure_of(&self, generation: u64) -> String {
        match &self.failed {
            Some((failed, why)) if *failed == generation => why.clone(),
            _ => format!("generation {generation} is not the present one, which is {}", self.generation),
        }
    }
}
