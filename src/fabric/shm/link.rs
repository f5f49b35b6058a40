//! One link: its polls, and how it ends. `post` has the operations of its owner.

use crate::fabric::shm::bulk::PeerPool;
use crate::fabric::shm::execute::OrderExecutor;
use crate::fabric::shm::liveness::ProcessWatch;
use crate::fabric::shm::loans::borrowed::LoanTable;
use crate::fabric::shm::loans::lent::LentLoans;
use crate::fabric::shm::loans::orphans::{OrphanedLink, OrphanedLoans};
use crate::fabric::shm::memory::layout::SegmentLayout;
use crate::fabric::shm::memory::order::PAYLOAD_BYTES;
use crate::fabric::shm::memory::ring::{Consumer, Producer};
use crate::fabric::shm::memory::segment::{OwnSegment, OwnWords, PeerSegment, PeerWords};
use crate::fabric::shm::memory::state;
use crate::fabric::shm::regions::LazyRegion;
use crate::fabric::shm::rings::Rings;
use crate::fabric::shm::wakeup::doorbells::{OwnDoorbell, PeerDoorbells};
use crate::fabric::shm::wakeup::idle::{self, DoorbellRef};
use crate::fabric::shm::wakeup::ringer::Ringer;
use crate::fabric::{
    Completions, Event, LinkFailure, LinkId, LinkLimits, LinkOptions, LoanPermit, MAX_MESSAGE,
};
use crate::memory::{Pool, Tensor};
use std::sync::Arc;

/// Polls between two checks of the state that no order carries: the peer's lines, its state word,
/// its death.
const CHECK_EVERY: u32 = 32;
/// Outstanding loans that one poll checks.
const LOANS_PER_POLL: usize = 4;

/// A tensor that the peer may be reading in place.
pub(super) struct LinkLoan {
    /// Position of its order in the ring.
    pub position: u64,
    /// Its bytes must not change before the peer gives them back.
    pub tensor: Tensor,
    /// Counts the bytes as lent until the loan ends.
    pub permit: Option<LoanPermit>,
}

/// The outstanding loans of a link.
pub(super) type LinkLoans = LentLoans<PeerWords, LinkLoan>;

enum ShmLinkPhase {
    Up,
    /// The peer has died or left. Its orders before `end` are still executed.
    Draining {
        why: LinkFailure,
        /// A position in its ring. Each order that it posted before it left has a lower one.
        end: u64,
    },
    /// This side has ended the link. The next poll reports it.
    Failing(LinkFailure),
    Down,
}

/// One link, as its port holds it.
pub(super) struct ShmLinkInner {
    pub limits: LinkLimits,
    pub id: LinkId,
    pub pool: Pool,
    phase: ShmLinkPhase,
    polls: u32,
    pub rings: Rings,
    pub executor: OrderExecutor,
    pub loans: LinkLoans,
    /// Loans that came back outside a poll. The next poll reports them.
    returned_early: u32,
    /// The permit of one of them, for the next loan. A poll drops it, and a loan without a permit.
    pub spare_permit: Option<LoanPermit>,
    state: OwnWords,
    watch: ProcessWatch,
    orphans: Arc<OrphanedLoans>,
    /// Whether an order was received or posted since the port last searched for links without
    /// traffic.
    pub had_traffic: bool,
    /// Whether both processes take part in heavy barriers.
    pub has_barriers: bool,
}

/// The results of a handshake that make a link.
pub(super) struct LinkParts {
    pub pool: Pool,
    pub own: OwnSegment,
    pub peer: PeerSegment,
    /// The regions of the peer's pool, by number.
    pub memory: Vec<(u16, Arc<LazyRegion>)>,
    pub watch: ProcessWatch,
    pub orphans: Arc<OrphanedLoans>,
    pub poll_bytes: u64,
    pub doorbells: Arc<PeerDoorbells>,
    pub has_barriers: bool,
}

impl ShmLinkInner {
    /// A link on unused segments.
    pub(super) fn new(options: &LinkOptions, layout: &SegmentLayout, parts: LinkParts) -> Self {
        let LinkParts { pool, own, peer, memory, watch, orphans, poll_bytes, doorbells, has_barriers } =
            parts;
        let ringer = Ringer::new(peer.words(layout.state()), doorbells);
        let shape = layout.ring_shape();
        let out = Producer::new(own.words(layout.ring()), peer.words(layout.line()), shape);
        let inc = Consumer::new(peer.words(layout.ring()), own.words(layout.line()), shape);
        let rings = Rings::new(options.depth, out, inc, ringer.clone());
        let borrowed = Arc::new(LoanTable::new(own.words(layout.loan_table()), ringer));
        let memory = PeerPool::new(memory, Arc::clone(&borrowed));
        ShmLinkInner {
            limits: LinkLimits {
                depth: options.depth,
                receives: 0, // early messages wait in the ring
                max_message: MAX_MESSAGE,
                max_inline: PAYLOAD_BYTES,
                max_write: u64::MAX,
                lends: true,
                registers: false,
                grants: super::grants::MAX_GRANTS as u32,
                max_grant: u64::MAX,
            },
            id: LinkId(0),
            pool,
            phase: ShmLinkPhase::Up,
            polls: 0,
            rings,
            executor: OrderExecutor::new(memory, borrowed, peer.words(layout.state()), poll_bytes),
            loans: LentLoans::new(peer.words(layout.loan_table())),
            returned_early: 0,
            spare_permit: None,
            state: own.words(layout.state()),
            watch,
            orphans,
            had_traffic: true,
            has_barriers,
        }
    }

    /// Sets the link's id, and the place of the port's doorbell that rings when the peer dies.
    pub(super) fn attach(&mut self, id: LinkId, doorbell: &Arc<OwnDoorbell>, place: usize) {
        self.id = id;
        self.rings.link = id;
        self.rings.ringer.count_on(doorbell);
        self.watch.ring(Arc::clone(doorbell), place);
    }

    /// Asks the peer to ring from now on. A heavy barrier must follow, and then a check of
    /// [`ShmLinkInner::has_news`].
    pub(super) fn mark_idle(&mut self, to: DoorbellRef) {
        self.rings.tell();
        idle::mark_idle(&self.state, to);
    }

    /// Tells the peer that it need not ring: the port looks at the link in each poll.
    pub(super) fn mark_active(&mut self) {
        idle::mark_active(&self.state);
        self.had_traffic = true;
    }

    /// Whether a poll would find something.
    pub(super) fn has_news(&self) -> bool {
        match self.phase {
            ShmLinkPhase::Failing(_) | ShmLinkPhase::Draining { .. } => true,
            ShmLinkPhase::Down => false,
            ShmLinkPhase::Up => {
                self.rings.has_news()
                    || self.returned_early > 0
                    || self.loans.has_news()
                    || state::of_peer(&self.executor.peer_state).is_some()
                    || self.watch.is_dead()
            }
        }
    }

    /// Polls the link, as one of many polls in quick succession.
    #[inline]
    pub(super) fn poll(&mut self, out: &mut Completions) {
        if !self.is_up() && !self.poll_when_not_up(out) {
            return;
        }
        let Ok(busy) = self.poll_ring(out) else { return };
        self.had_traffic |= busy;
        if !self.loans.is_empty() || self.returned_early > 0 {
            self.returned(LOANS_PER_POLL, out);
        }
        self.polls = self.polls.wrapping_add(1);
        if !self.polls.is_multiple_of(CHECK_EVERY) && self.is_up() {
            return;
        }
        self.check_peer(busy, out);
    }

    /// Polls an idle link whose peer has rung, completely: the next poll may be long after. Returns
    /// whether the link must be polled again soon.
    pub(super) fn poll_once(&mut self, out: &mut Completions) -> bool {
        let before = out.len();
        if self.is_up() || self.poll_when_not_up(out) {
            let Ok(busy) = self.poll_ring(out) else { return true };
            self.returned(usize::MAX, out);
            self.check_peer(busy, out);
            return busy || out.len() > before || matches!(self.phase, ShmLinkPhase::Draining { .. });
        }
        out.len() > before
    }

    /// Executes new orders. Returns whether there were any; an error if the link went down for one.
    #[inline(always)] // the inner loop of a spinning thread
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

    /// Ends the link from this side. The next poll reports it.
    pub(super) fn fail(&mut self, why: LinkFailure) {
        if matches!(self.phase, ShmLinkPhase::Up | ShmLinkPhase::Draining { .. }) {
            self.leave(&why);
            self.phase = ShmLinkPhase::Failing(why);
        }
    }

    /// Handles a link that is not up. Returns whether its orders are still to be executed.
    #[cold]
    fn poll_when_not_up(&mut self, out: &mut Completions) -> bool {
        if let ShmLinkPhase::Failing(why) = &self.phase {
            let why = why.clone();
            self.go_down(why, out);
        }
        matches!(self.phase, ShmLinkPhase::Draining { .. })
    }

    /// Releases tensors that have come back, until one is found that is out. A sender that never
    /// polls then holds few tensors and permits. Returns the permit of the last that came back.
    #[inline]
    pub(super) fn release_returned(&mut self) -> Option<LoanPermit> {
        let (early, mut permit) = (&mut self.returned_early, None);
        self.loans.returned(1, |loan| {
            *early += 1;
            permit = loan.permit;
        });
        permit
    }

    /// Completes the loans that came back before, and the returned ones among the next `count`.
    fn returned(&mut self, count: usize, out: &mut Completions) {
        let link = self.id;
        self.spare_permit = None;
        (0..std::mem::take(&mut self.returned_early)).for_each(|_| out.push(link, Event::Done));
        self.loans.returned(count, |_| out.push(link, Event::Done));
    }

    /// Checks the state that no order carries. `busy`: this poll has executed orders.
    fn check_peer(&mut self, busy: bool, out: &mut Completions) {
        self.rings.inc.keep_line_near();
        if self.rings.waits_for_peer() {
            let checked = self.rings.refresh(out).and_then(|()| self.rings.post_answers());
            if let Err(bad) = checked {
                return self.go_down(bad.into(), out);
            }
        }
        match &self.phase {
            ShmLinkPhase::Draining { why, end } if !busy || self.rings.inc.position() >= *end => {
                let why = why.clone();
                self.go_down(why, out);
            }
            ShmLinkPhase::Up => {
                // The death is read before the state word: a dead peer's state does not change any
                // more.
                let died = self.watch.is_dead();
                let pid = self.watch.process().pid;
                let died = died.then_some(LinkFailure::PeerDied { pid });
                if let Some(why) = state::of_peer(&self.executor.peer_state).or(died) {
                    let end = self.rings.inc.position() + u64::from(self.limits.depth);
                    self.phase = ShmLinkPhase::Draining { why, end };
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
        // The writes that the peer has taken are done, not failed. A wrong number on the line does
        // no harm now.
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
        // The final number of consumed orders, before the peer can see that no more will be
        // consumed.
        self.rings.inc.finish();
        state::leave(&self.state, why);
        self.rings.ringer.ring_if_idle();
    }

    /// Moves the outstanding loans to [`OrphanedLoans`].
    fn orphan_loans(&mut self) {
        if self.loans.is_empty() {
            return;
        }
        let line = self.rings.out.line().clone();
        let peer_state = self.executor.peer_state.clone();
        let (loans, process) = (self.loans.take_out(), self.watch.process().clone());
        let acked = self.rings.out.acked();
        self.orphans.add(OrphanedLink { loans, acked, line, peer_state, process });
    }
}

impl Drop for ShmLinkInner {
    fn drop(&mut self) {
        if !matches!(self.phase, ShmLinkPhase::Down) {
            // Before anything is released, so that the peer can detect it.
            self.leave(&LinkFailure::Closed);
            self.orphan_loans();
        }
    }
}
