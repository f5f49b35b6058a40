//! The port of several parts.

use super::sleeper::MultiSleeper;
use super::turns::PollTurns;
use super::{MultiLink, SHM, VERBS, of_part, part_of, within_part};
use crate::fabric::shm::ShmPort;
use crate::fabric::verbs::VerbsPort;
use crate::fabric::{
    Accept, Completions, FabricError, FabricKind, LinkFailure, LinkId, LinkLimits, LoanPermit, Port,
    PostError, ShortTake,
};
use crate::memory::{Tensor, TensorMut};
use crate::wire::{Grant, Immediate, ShortMessage, Time, UnreadMessage};
use std::sync::Arc;

/// Polls from one of verbs to the next, beside active links on shared memory: a poll of a
/// completion queue costs as much as one of some links.
const VERBS_EVERY: u32 = 4;
/// Turns of a part without links in which it is not polled.
const VACANT_TURNS: u32 = 1024;

/// The limits of a link of no part.
static NOTHING: LinkLimits =
    LinkLimits { depth: 0, receives: 0, max_inline: 0, max_write: 0, lends: false, grants: 0 };

/// The links that one poller owns, on several fabrics. See [`Port`].
///
/// A poll looks at the links on shared memory. While some of them are active, it looks at verbs in
/// each fourth poll, or if 5 us have passed. An armed port looks at all parts in each poll. A part
/// without links is almost never looked at.
pub struct MultiPort {
    shm: Option<ShmPort>,
    verbs: Option<VerbsPort>,
    verbs_turns: PollTurns,
    /// Turns of verbs without links in a row.
    vacant: u32,
    /// The newest time that the port was told.
    now: Time,
    /// Nothing has come since the port was armed.
    is_armed: bool,
}

/// Calls the port of a link's part with the id that the part knows, or returns something else if
/// there is none.
macro_rules! on_part {
    ($this:ident.$borrow:ident, $id:expr, |$port:ident, $link:ident| $call:expr, $absent:expr) => {
        match part_of($id) {
            SHM => match $this.shm.$borrow() {
                Some($port) => {
                    let $link = $id;
                    $call
                }
                None => $absent,
            },
            VERBS => match $this.verbs.$borrow() {
                Some($port) => {
                    let $link = within_part($id);
                    $call
                }
                None => $absent,
            },
            _ => $absent,
        }
    };
}

impl MultiPort {
    /// # Errors
    /// If there is no part.
    pub(super) fn new(shm: Option<ShmPort>, verbs: Option<VerbsPort>) -> Result<Self, FabricError> {
        // The threads of the other parts wake those who sleep on the first one.
        match (&shm, &verbs) {
            (Some(first), Some(verbs)) => verbs.sleep_on(Arc::new(first.sleeper())),
            (Some(_), None) | (None, Some(_)) => {}
            (None, None) => {
                let why = "a port needs an open fabric".into();
                return Err(FabricError::Unavailable { fabric: FabricKind::Shm, why });
            }
        }
        Ok(MultiPort {
            shm,
            verbs,
            verbs_turns: PollTurns::new(VERBS_EVERY),
            vacant: 0,
            now: Time::ZERO,
            is_armed: false,
        })
    }

    /// Polls verbs if it is its turn.
    #[inline]
    fn poll_verbs(&mut self, out: &mut Completions) {
        let Some(verbs) = &mut self.verbs else { return };
        let is_first = !self.is_armed && self.shm.as_ref().is_some_and(ShmPort::has_active_links);
        if is_first && !self.verbs_turns.take(self.now) {
            return;
        }
        // Completions of links that were given up can come without a link.
        if verbs.is_vacant() && !self.is_armed {
            self.vacant += 1;
            if !self.vacant.is_multiple_of(VACANT_TURNS) {
                return;
            }
        }
        let before = out.len();
        verbs.poll(out);
        if out.len() > before {
            out.relabel(before, |link| of_part(VERBS, link));
        }
    }
}

/// Gives the link the id of its part.
///
/// # Errors
/// If the part has numbered too many links.
fn numbered(fabric: FabricKind, part: u32, port: &mut impl Port, id: LinkId) -> Result<LinkId, FabricError> {
    if part_of(id) == 0 {
        return Ok(of_part(part, id));
    }
    port.detach(id);
    Err(FabricError::Option {
        fabric,
        option: "links that a port has had",
        value: u64::from(id.0),
        allowed: "2^30: start the process again",
    })
}

impl Port for MultiPort {
    type Link = MultiLink;
    type Sleeper = MultiSleeper;
    const HAS_SLOTS: bool = true;

    fn sleeper(&self) -> MultiSleeper {
        match (&self.shm, &self.verbs) {
            (Some(shm), _) => MultiSleeper::Shm(shm.sleeper()),
            (None, Some(verbs)) => MultiSleeper::Verbs(verbs.sleeper()),
            (None, None) => unreachable!("`MultiPort::new` makes no port without parts"),
        }
    }

    fn arm(&mut self) -> bool {
        // All of them, also if one has something already.
        let shm = self.shm.as_mut().is_none_or(ShmPort::arm);
        let verbs = self.verbs.as_mut().is_none_or(VerbsPort::arm);
        // The next poll looks at the part that has something.
        self.is_armed = true;
        shm && verbs
    }

    fn attach(&mut self, link: MultiLink) -> Result<LinkId, FabricError> {
        match (link, &mut self.shm, &mut self.verbs) {
            (MultiLink::Shm(link), Some(port), _) => {
                let id = port.attach(link)?;
                numbered(FabricKind::Shm, SHM, port, id)
            }
            (MultiLink::Verbs(link), _, Some(port)) => {
                let id = port.attach(link)?;
                numbered(FabricKind::Verbs, VERBS, port, id)
            }
            (MultiLink::Shm(_), None, _) | (MultiLink::Verbs(_), _, None) => {
                let why = "the link is of another fabric than the port".into();
                Err(FabricError::Unavailable { fabric: FabricKind::Shm, why })
            }
        }
    }

    fn detach(&mut self, id: LinkId) {
        on_part!(self.as_mut, id, |port, link| port.detach(link), {});
    }

    fn fail(&mut self, id: LinkId, why: LinkFailure) {
        on_part!(self.as_mut, id, |port, link| port.fail(link, why), {});
    }

    fn limits(&self, id: LinkId) -> &LinkLimits {
        on_part!(self.as_ref, id, |port, link| port.limits(link), &NOTHING)
    }

    #[inline]
    fn set_time(&mut self, now: Time) {
        self.now = now;
    }

    #[inline]
    fn poll(&mut self, completions: &mut Completions) -> usize {
        let before = completions.len();
        if let Some(shm) = &mut self.shm {
            shm.poll(completions);
        }
        if self.verbs.is_some() {
            self.poll_verbs(completions);
        }
        let count = completions.len() - before;
        self.is_armed &= count == 0;
        count
    }

    fn post_receives(&mut self, id: LinkId, count: u32) {
        on_part!(self.as_mut, id, |port, link| port.post_receives(link, count), {});
    }

    fn publish_credits(&mut self, id: LinkId, returned: u32) {
        on_part!(self.as_mut, id, |port, link| port.publish_credits(link, returned), {});
    }

    fn peer_credits(&mut self, id: LinkId) -> u32 {
        on_part!(self.as_mut, id, |port, link| port.peer_credits(link), 0)
    }

    fn begin_batch(&mut self) {
        if let Some(shm) = &mut self.shm {
            shm.begin_batch();
        }
        if let Some(verbs) = &mut self.verbs {
            verbs.begin_batch();
        }
    }

    fn end_batch(&mut self) {
        if let Some(shm) = &mut self.shm {
            shm.end_batch();
        }
        if let Some(verbs) = &mut self.verbs {
            verbs.end_batch();
        }
    }

    fn doorbells(&self) -> u64 {
        let shm = self.shm.as_ref().map_or(0, ShmPort::doorbells);
        shm + self.verbs.as_ref().map_or(0, VerbsPort::doorbells)
    }

    #[inline]
    fn send(&mut self, id: LinkId, bytes: &[u8]) -> Result<(), PostError> {
        on_part!(self.as_mut, id, |port, link| port.send(link, bytes), Err(PostError::Down))
    }

    #[inline]
    fn send_short(
        &mut self,
        id: LinkId,
        message: &UnreadMessage<impl Fn(usize) -> u64>,
    ) -> Result<(), PostError> {
        on_part!(self.as_mut, id, |port, link| port.send_short(link, message), Err(PostError::Down))
    }

    #[inline(always)] // on the short path
    fn take_short<R>(&mut self, id: LinkId, accept: impl Accept<R>) -> ShortTake<R> {
        on_part!(self.as_mut, id, |port, link| port.take_short(link, accept), ShortTake::Other)
    }

    #[inline]
    fn write_inline(
        &mut self,
        id: LinkId,
        bytes: &[u8],
        target: &Grant,
        immediate: Option<Immediate>,
    ) -> Result<(), PostError> {
        let absent = Err(PostError::Down);
        on_part!(self.as_mut, id, |port, link| port.write_inline(link, bytes, target, immediate), absent)
    }

    fn write(
        &mut self,
        id: LinkId,
        source: &Tensor,
        len: u64,
        target: &Grant,
        immediate: Option<Immediate>,
    ) -> Result<(), PostError> {
        let absent = Err(PostError::Down);
        on_part!(self.as_mut, id, |port, link| port.write(link, source, len, target, immediate), absent)
    }

    fn read(&mut self, id: LinkId, target: TensorMut, source: &Grant) -> Result<(), (PostError, TensorMut)> {
        let absent = |target| Err((PostError::Down, target));
        on_part!(self.as_mut, id, |port, link| port.read(link, target, source), absent(target))
    }

    #[inline]
    fn permit_loan(&mut self, id: LinkId, bytes: u64) -> Option<LoanPermit> {
        on_part!(self.as_mut, id, |port, link| port.permit_loan(link, bytes), None)
    }

    #[inline]
    fn lend(
        &mut self,
        id: LinkId,
        source: &mut Option<Tensor>,
        permit: &mut Option<LoanPermit>,
        message: &ShortMessage,
    ) -> Result<(), PostError> {
        let absent = Err(PostError::Down);
        on_part!(self.as_mut, id, |port, link| port.lend(link, source, permit, message), absent)
    }

    fn reaches(&self, id: LinkId, target: &TensorMut) -> bool {
        on_part!(self.as_ref, id, |port, link| port.reaches(link, target), false)
    }

    fn grant(&mut self, id: LinkId, target: TensorMut) -> Result<Grant, (PostError, TensorMut)> {
        let absent = |target| Err((PostError::Down, target));
        on_part!(self.as_mut, id, |port, link| port.grant(link, target), absent(target))
    }

    fn revoke(&mut self, id: LinkId, grant: &Grant) -> Option<TensorMut> {
        on_part!(self.as_mut, id, |port, link| port.revoke(link, grant), None)
    }

    fn expose(&mut self, id: LinkId, source: &Tensor) -> Result<Grant, PostError> {
        on_part!(self.as_mut, id, |port, link| port.expose(link, source), Err(PostError::Down))
    }

    fn withdraw(&mut self, id: LinkId, grant: &Grant) {
        on_part!(self.as_mut, id, |port, link| port.withdraw(link, grant), {});
    }
}
