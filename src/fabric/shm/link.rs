//! One link: what its owner posts, what one poll does, and how it ends.

use crate::fabric::shm::bulk::PeerPool;
use crate::fabric::shm::execute::OrderExecutor;
use crate::fabric::shm::grants::MAX_GRANTS;
use crate::fabric::shm::liveness::ProcessWatch;
use crate::fabric::shm::loans::borrowed::LoanTable;
use crate::fabric::shm::loans::lent::LentLoans;
use crate::fabric::shm::loans::orphans::{OrphanedLink, OrphanedLoans};
use crate::fabric::shm::memory::layout::SegmentLayout;
use crate::fabric::shm::memory::ring::{Consumer, PAYLOAD_BYTES, Producer};
use crate::fabric::shm::memory::segment::{OwnSegment, OwnWords, PeerSegment, PeerWords};
use crate::fabric::shm::memory::state;
use crate::fabric::shm::rings::Rings;
use crate::fabric::shm::wakeup::doorbells::{OwnDoorbell, PeerDoorbells};
use crate::fabric::shm::wakeup::idle::{self, DoorbellRef};
use crate::fabric::shm::wakeup::ringer::Ringer;
use crate::fabric::{Completions, Event, LinkFailure, LinkId, LinkLimits, LinkOptions, LoanPermit};
use crate::memory::{Pool, Tensor};
use std::sync::Arc;

/// Polls between two looks at what a slot does not tell: the peer's lines, its state, its death.
const LOOK_EVERY: u32 = 32;
/// Loans that one poll looks at.
const LOANS_PER_POLL: usize = 4;

/// A tensor that the peer may be reading where it lies.
pub(super) struct LinkLoan {
    /// Position of its slot in the ring.
    pub position: u64,
    /// Its bytes must not change before the peer gives them back.
    pub tensor: Tensor,
    /// Counts it as lent for as long.
    pub _permit: LoanPermit,
}

/// The loans of a link.
pub(super) type LinkLoans = LentLoans<PeerWords, LinkLoan>;

enum ShmLinkPhase {
    Up,
    /// The peer is gone or has left: what it had put in its rings is still taken.
    Draining(LinkFailure),
    /// This side has ended it; the next poll tells.
    Failing(LinkFailure),
    Down,
}

/// One link.
pub(super) struct ShmLinkInner {
    pub limits: LinkLimits,
    pub id: LinkId,
    pub pool: Pool,
    phase: ShmLinkPhase,
    polls: u32,
    pub rings: Rings,
    pub executor: OrderExecutor,
    pub loans: LinkLoans,
    state: OwnWords,
    watch: Option<ProcessWatch>,
    pid: u32,
    orphans: Arc<OrphanedLoans>,
    /// Something came or was posted since its port last looked for links to let go cold.
    pub had_traffic: bool,
    /// Both processes take part in heavy barriers.
    pub fenced: bool,
}

/// What a handshake has brought, for a link to be made of.
pub(super) struct LinkParts {
    pub pool: Pool,
    pub own: OwnSegment,
    pub peer: PeerSegment,
    pub memory: PeerPool,
    pub watch: ProcessWatch,
    pub pid: u32,
    pub orphans: Arc<OrphanedLoans>,
    pub poll_bytes: u64,
    pub doorbells: Arc<PeerDoorbells>,
    pub fenced: bool,
}

impl ShmLinkInner {
    /// A link on fresh segments.
    pub(super) fn new(options: &LinkOptions, layout: &SegmentLayout, parts: LinkParts) -> Self {
        let LinkParts { pool, own, peer, memory, watch, pid, orphans, poll_bytes, doorbells, fenced } = parts;
        let ringer = Ringer::new(peer.words(layout.state()), doorbells);
        let out = Producer::new(own.words(layout.ring()), peer.words(layout.line()));
        let inc = Consumer::new(peer.words(layout.ring()), own.words(layout.line()));
        let rings = Rings::new(options.depth, out, inc, ringer.clone());
        let borrowed = LoanTable::new(own.words(layout.leases()), ringer);
        ShmLinkInner {
            limits: LinkLimits {
                depth: options.depth,
                receives: 0, // what comes early waits in the ring
                max_inline: PAYLOAD_BYTES,
                max_write: u64::MAX,
                lends: true,
                grants: MAX_GRANTS as u32,
            },
            id: LinkId(0),
            pool,
            phase: ShmLinkPhase::Up,
            polls: 0,
            rings,
            executor: OrderExecutor::new(memory, borrowed, peer.words(layout.state()), poll_bytes),
            loans: LentLoans::new(peer.words(layout.leases())),
            state: own.words(layout.state()),
            watch: Some(watch),
            pid,
            orphans,
            had_traffic: true,
            fenced,
        }
    }

    /// Names the link, when a port takes it, and the place of the port's doorbell that rings when
    /// the peer dies.
    pub(super) fn attach(&mut self, id: LinkId, bell: &Arc<OwnDoorbell>, place: usize) {
        self.id = id;
        self.rings.link = id;
        self.rings.ringer.count_on(bell);
        if let Some(watch) = &mut self.watch {
            watch.ring(Arc::clone(bell), place);
        }
    }

    /// Asks the peer to ring from now on. A heavy barrier has to follow, and then a look at
    /// [`ShmLinkInner::has_news`].
    pub(super) fn mark_idle(&mut self, to: DoorbellRef) {
        self.rings.tell();
        idle::mark_idle(&self.state, to);
    }

    /// The peer need not ring any more: the port looks at the link in each poll.
    pub(super) fn mark_active(&mut self) {
        idle::mark_active(&self.state);
        self.had_traffic = true;
    }

    /// Whether a poll would find something.
    pub(super) fn has_news(&self) -> bool {
        match self.phase {
            ShmLinkPhase::Failing(_) | ShmLinkPhase::Draining(_) => true,
            ShmLinkPhase::Down => false,
            ShmLinkPhase::Up => {
                self.rings.has_news()
                    || self.loans.has_news()
                    || state::of_peer(&self.executor.peer_state).is_some()
                    || self.watch.as_ref().is_some_and(ProcessWatch::is_dead)
            }
        }
    }

    /// One look at everything that may have come or be done, of many that follow each other
    /// closely.
    #[inline]
    pub(super) fn poll(&mut self, out: &mut Completions) {
        if !self.is_up() && !self.poll_unless_over(out) {
            return;
        }
        let Ok(busy) = self.poll_ring(out) else { return };
        self.had_traffic |= busy;
        if !self.loans.is_empty() {
            self.returned(LOANS_PER_POLL, out);
        }
        self.polls = self.polls.wrapping_add(1);
        if !self.polls.is_multiple_of(LOOK_EVERY) && self.is_up() {
            return;
        }
        self.look_around(busy, out);
    }

    /// One look at everything, of which the next may be long after: for a link for which the
    /// doorbell was rung. Returns whether the link has to be looked at again soon.
    pub(super) fn poll_once(&mut self, out: &mut Completions) -> bool {
        let before = out.len();
        if self.is_up() || self.poll_unless_over(out) {
            let Ok(busy) = self.poll_ring(out) else { return true };
            self.returned(usize::MAX, out);
            self.look_around(busy, out);
            return busy || out.len() > before || matches!(self.phase, ShmLinkPhase::Draining(_));
        }
        out.len() > before
    }

    /// Looks at the peer's ring. Returns whether anything had come; an error if the link went down
    /// for it.
    #[inline(always)] // who spins does nothing else
    fn poll_ring(&mut self, out: &mut Completions) -> Result<bool, ()> {
        match self.executor.poll(&mut self.rings, out) {
            Ok(busy) => Ok(busy),
            Err(why) => {
                self.go_down(why, out);
                Err(())
            }
        }
    }

    /// Whether operations can be posted.
    #[inline]
    pub(super) fn is_up(&self) -> bool {
        matches!(self.phase, ShmLinkPhase::Up)
    }

    /// Ends the link from this side; the next poll tells.
    pub(super) fn fail(&mut self, why: LinkFailure) {
        if matches!(self.phase, ShmLinkPhase::Up | ShmLinkPhase::Draining(_)) {
            self.leave(&why);
            self.phase = ShmLinkPhase::Failing(why);
        }
    }

    /// In a phase other than up: whether there is still something to poll.
    #[cold]
    fn poll_unless_over(&mut self, out: &mut Completions) -> bool {
        if let ShmLinkPhase::Failing(why) = &self.phase {
            let why = why.clone();
            self.go_down(why, out);
        }
        matches!(self.phase, ShmLinkPhase::Draining(_))
    }

    /// Completes loans that are back, of the next `count`.
    fn returned(&mut self, count: usize, out: &mut Completions) {
        let link = self.id;
        self.loans.returned(count, |_| out.push(link, Event::Done));
    }

    /// Looks at what no slot tells. `busy`: something came in this poll.
    fn look_around(&mut self, busy: bool, out: &mut Completions) {
        if self.rings.waits_for_peer() {
            let looked = self.rings.refresh(out).and_then(|()| self.rings.post_answers());
            if let Err(bad) = looked {
                return self.go_down(bad.into(), out);
            }
        }
        match &self.phase {
            ShmLinkPhase::Draining(why) if !busy => {
                let why = why.clone();
                self.go_down(why, out);
            }
            ShmLinkPhase::Up => {
                // Death first: a peer that died left its state as it was.
                let died = self.watch.as_ref().is_some_and(ProcessWatch::is_dead);
                if let Some(why) = state::of_peer(&self.executor.peer_state) {
                    self.phase = ShmLinkPhase::Draining(why);
                } else if died {
                    self.phase = ShmLinkPhase::Draining(LinkFailure::PeerDied { pid: self.pid });
                }
            }
            _ => {}
        }
    }

    /// Ends the link: everything outstanding completes, then `Down`.
    #[cold]
    fn go_down(&mut self, why: LinkFailure, out: &mut Completions) {
        if !matches!(self.phase, ShmLinkPhase::Failing(_)) {
            self.leave(&why); // else the peer knows already
        }
        // What the peer has taken is done, not failed. A wrong number on its line changes nothing
        // now.
        let _ = self.rings.refresh(out);
        self.returned(usize::MAX, out);
        self.rings.fail_all(out);
        for _ in self.loans.held() {
            out.push(self.id, Event::Failed);
        }
        self.phase = ShmLinkPhase::Down;
        self.orphan_loans();
        out.push(self.id, Event::Down(why));
    }

    /// Tells the peer that this side no longer takes part.
    fn leave(&mut self, why: &LinkFailure) {
        // The last word on what was taken, before the peer can see that nothing more will be.
        self.rings.inc.finish();
        state::leave(&self.state, why);
        self.rings.ringer.ring_if_idle();
    }

    /// Leaves the loans that are still out to those who wait for them.
    fn orphan_loans(&mut self) {
        let watch = self.watch.take();
        if self.loans.is_empty() {
            return;
        }
        let line = self.rings.out.line().clone();
        let peer_state = self.executor.peer_state.clone();
        if let Some(watch) = watch {
            self.orphans.add(OrphanedLink { loans: self.loans.take_out(), line, peer_state, watch });
        }
    }
}

impl Drop for ShmLinkInner {
    fn drop(&mut self) {
        if !matches!(self.phase, ShmLinkPhase::Down) {
            // Before anything is released, so that the peer can tell.
            self.leave(&LinkFailure::Closed);
            self.orphan_loans();
        }
    }
}
