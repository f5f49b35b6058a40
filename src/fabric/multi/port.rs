//! The port of several parts.

use super::sleeper::MultiSleeper;
use super::turns::PollTurns;
use super::{FabricParts, MultiLink, SHM, TCP, VERBS, of_part, part_of, within_part};
use crate::fabric::shm::{ShmFabric, ShmPort};
use crate::fabric::tcp::TcpPort;
use crate::fabric::verbs::{VerbsFabric, VerbsPort};
use crate::fabric::{
    Accept, Completions, Fabric, FabricError, FabricKind, LinkFailure, LinkId, LinkLimits, LoanPermit, Port,
    PostError, ShortTake, Wakeup,
};
use crate::memory::{Tensor, TensorMut};
use crate::wire::{Grant, Immediate, ShortMessage, Time, UnreadMessage};
use std::sync::Arc;

/// Polls from one of verbs to the next, beside active links on shared memory. A poll of a
/// completion queue costs as much as one of some links.
const VERBS_EVERY: u32 = 4;
/// The same for TCP, of which each poll enters the kernel.
const TCP_EVERY: u32 = 16;

/// The links that one poller owns, on several fabrics. See [`Port`].
///
/// A poll looks at the links on shared memory. While some of them are active, it looks at verbs in
/// each fourth poll and at TCP in each 16th. It looks at both if 5 us have passed. TCP waits for
/// its turn beside links on verbs, too. An armed port looks at all parts in each poll. A part
/// without links is not looked at.
pub struct MultiPort {
    shm: Option<ShmPort>,
    verbs: Option<VerbsPort>,
    tcp: Option<TcpPort>,
    verbs_turns: PollTurns,
    tcp_turns: PollTurns,
    /// The newest time that the port was told.
    now: Time,
    /// Nothing has come since the port was armed.
    is_armed: bool,
    /// Whether another part than shared memory may have links.
    polls_beside: bool,
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
            TCP => match $this.tcp.$borrow() {
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
    /// A port of each part.
    ///
    /// # Errors
    /// If the resources for one can't be had.
    pub(super) fn new(parts: &FabricParts) -> Result<Self, FabricError> {
        let shm = parts.shm.as_ref().map(ShmFabric::port).transpose()?;
        let verbs = parts.verbs.as_ref().map(VerbsFabric::port).transpose()?;
        // The threads of the other parts wake those who sleep on the first one.
        let first: Option<Arc<dyn Wakeup>> = match (&shm, &verbs) {
            (Some(shm), _) => Some(Arc::new(shm.sleeper())),
            (None, Some(verbs)) => Some(Arc::new(verbs.sleeper())),
            (None, None) => None,
        };
        if let (Some(_), Some(verbs), Some(first)) = (&shm, &verbs, &first) {
            verbs.sleep_on(Arc::clone(first));
        }
        let tcp = match (&parts.tcp, first) {
            (Some(tcp), Some(first)) => Some(tcp.port_with_notifier(Arc::new(move || first.notify()))?),
            (Some(tcp), None) => Some(tcp.port()?),
            (None, _) => None,
        };
        Ok(MultiPort {
            shm,
            verbs,
            tcp,
            verbs_turns: PollTurns::new(VERBS_EVERY),
            tcp_turns: PollTurns::new(TCP_EVERY),
            now: Time::ZERO,
            is_armed: false,
            polls_beside: false,
        })
    }

    /// Polls the parts beside shared memory, as far as they have links, and it is their turn. After
    /// [`Port::arm`] they all are polled.
    #[inline(never)] // keeps polls of shared memory alone short
    fn poll_beside(&mut self, out: &mut Completions) {
        let has_verbs = self.verbs.as_ref().is_some_and(|verbs| !verbs.is_vacant());
        let has_tcp = self.tcp.as_ref().is_some_and(|tcp| !tcp.is_vacant());
        self.polls_beside = has_verbs || has_tcp;
        let is_armed = self.is_armed;
        let is_beside = !is_armed && self.shm.as_ref().is_some_and(ShmPort::has_active_links);
        if (is_armed || has_verbs && (!is_beside || self.verbs_turns.take(self.now)))
            && let Some(verbs) = &mut self.verbs
        {
            let before = out.len();
            verbs.poll(out);
            out.relabel(before, |link| of_part(VERBS, link));
        }
        let is_beside = is_beside || !is_armed && has_verbs;
        if (is_armed || has_tcp && (!is_beside || self.tcp_turns.take(self.now)))
            && let Some(tcp) = &mut self.tcp
        {
            let before = out.len();
            tcp.poll(out);
            out.relabel(before, |link| of_part(TCP, link));
        }
    }

    #[inline(never)] // keeps the path of shared memory short
    fn take_short_beside<R>(&mut self, id: LinkId, accept: impl Accept<R>) -> ShortTake<R> {
        match (part_of(id), &mut self.verbs, &mut self.tcp) {
            (VERBS, Some(verbs), _) => verbs.take_short(within_part(id), accept),
            (TCP, _, Some(tcp)) => tcp.take_short(within_part(id), accept),
            _ => ShortTake::Other,
        }
    }
}

#[cold]
fn of_other_fabric(fabric: FabricKind) -> FabricError {
    FabricError::Unavailable { fabric, why: "the port of this link has no such part".into() }
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

    fn sleeper(&self) -> MultiSleeper {
        match (&self.shm, &self.verbs, &self.tcp) {
            (Some(shm), ..) => MultiSleeper::Shm(shm.sleeper()),
            (None, Some(verbs), _) => MultiSleeper::Verbs(verbs.sleeper()),
            (None, None, Some(tcp)) => MultiSleeper::Tcp(tcp.sleeper()),
            (None, None, None) => unreachable!("`MultiFabric::new` makes no fabric without parts"),
        }
    }

    fn arm(&mut self) -> bool {
        // All of them, also if one has something already.
        let shm = self.shm.as_mut().is_none_or(ShmPort::arm);
        let verbs = self.verbs.as_mut().is_none_or(VerbsPort::arm);
        let tcp = self.tcp.as_mut().is_none_or(TcpPort::arm);
        // The next poll looks at the part that has something.
        self.is_armed = true;
        shm && verbs && tcp
    }

    fn attach(&mut self, link: MultiLink) -> Result<LinkId, FabricError> {
        match (link, &mut self.shm, &mut self.verbs, &mut self.tcp) {
            (MultiLink::Shm(link), Some(port), ..) => {
                let id = port.attach(link)?;
                numbered(FabricKind::Shm, SHM, port, id)
            }
            (MultiLink::Verbs(link), _, Some(port), _) => {
                let id = port.attach(link)?;
                self.polls_beside = true;
                numbered(FabricKind::Verbs, VERBS, port, id)
            }
            (MultiLink::Tcp(link), .., Some(port)) => {
                let id = port.attach(link)?;
                self.polls_beside = true;
                numbered(FabricKind::Tcp, TCP, port, id)
            }
            (MultiLink::Shm(_), None, ..) => Err(of_other_fabric(FabricKind::Shm)),
            (MultiLink::Verbs(_), _, None, _) => Err(of_other_fabric(FabricKind::Verbs)),
            (MultiLink::Tcp(_), .., None) => Err(of_other_fabric(FabricKind::Tcp)),
        }
    }

    fn detach(&mut self, id: LinkId) {
        on_part!(self.as_mut, id, |port, link| port.detach(link), {});
    }

    fn fail(&mut self, id: LinkId, why: LinkFailure) {
        on_part!(self.as_mut, id, |port, link| port.fail(link, why), {});
    }

    fn limits(&self, id: LinkId) -> &LinkLimits {
        on_part!(self.as_ref, id, |port, link| port.limits(link), &LinkLimits::NONE)
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
        if self.is_armed || self.polls_beside {
            self.poll_beside(completions);
            self.is_armed &= completions.len() == before;
        }
        completions.len() - before
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
        if let Some(tcp) = &mut self.tcp {
            tcp.begin_batch();
        }
    }

    fn end_batch(&mut self) {
        if let Some(shm) = &mut self.shm {
            shm.end_batch();
        }
        if let Some(verbs) = &mut self.verbs {
            verbs.end_batch();
        }
        if let Some(tcp) = &mut self.tcp {
            tcp.end_batch();
        }
    }

    fn doorbells(&self) -> u64 {
        let shm = self.shm.as_ref().map_or(0, ShmPort::doorbells);
        let verbs = self.verbs.as_ref().map_or(0, VerbsPort::doorbells);
        shm + verbs + self.tcp.as_ref().map_or(0, TcpPort::doorbells)
    }

    fn is_flushed(&mut self, id: LinkId) -> bool {
        on_part!(self.as_mut, id, |port, link| port.is_flushed(link), true)
    }

    #[inline]
    fn send(&mut self, id: LinkId, bytes: &[u8]) -> Result<(), PostError> {
        on_part!(self.as_mut, id, |port, link| port.send(link, bytes), Err(PostError::Down))
    }

    fn send_parts(&mut self, id: LinkId, parts: [&[u8]; 2]) -> Result<(), PostError> {
        on_part!(self.as_mut, id, |port, link| port.send_parts(link, parts), Err(PostError::Down))
    }

    #[inline]
    fn has_slots(&self, id: LinkId) -> bool {
        part_of(id) == SHM
    }

    #[inline(always)] // on the short path
    fn send_short(
        &mut self,
        id: LinkId,
        message: &UnreadMessage<impl Fn(usize) -> u64>,
    ) -> Result<(), PostError> {
        match &mut self.shm {
            Some(shm) if part_of(id) == SHM => shm.send_short(id, message),
            _ => Err(PostError::Down),
        }
    }

    #[inline(always)] // on the short path
    fn take_short<R>(&mut self, id: LinkId, accept: impl Accept<R>) -> ShortTake<R> {
        match &mut self.shm {
            Some(shm) if part_of(id) == SHM => shm.take_short(id, accept),
            _ => self.take_short_beside(id, accept),
        }
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
