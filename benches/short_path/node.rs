//! One side of the prototype: edges with windows of value cells, on one link.
//!
//! The prototype does the work of a send and a receive for which nothing unusual happens. [`Slow`]
//! names the checks that would lead to the general code, which the prototype does not have.

mod receive;

use crate::link::{CREDIT, INLINE, LENT, Link, MAY_BORROW, VALUE, head, order};
use crate::pool::{Pool, Tensor};
use crate::process::{LOAN_PLACES, OwnSegment, PeerSegment, Process, deadline_passed, prefetch_for_write};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering, compiler_fence};

/// Values that an edge may have under way.
pub const WINDOW: u64 = 16;
/// Batches that may be under way.
const BATCH_WINDOW: u64 = 2;
/// Steps whose state words are kept.
const STEPS: usize = 64;
/// Looks between two checks of the deadline.
const LOOKS: u32 = 1024;
/// Edges between the one that a batch works on and the one that is prefetched.
const AHEAD: usize = 8;

/// The number of the meta-data of all values here.
pub const META: u16 = 3;
const GENERATION: u16 = 7;
/// A step word: the step, then one bit that says that the step has begun. The count of cells that
/// hold values of the step follows.
const LIVE: u64 = 1 << 15;
const CELLS: u64 = LIVE - 1;

/// A check that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slow {
    /// Another thread owns the poller, or wants to.
    Owner,
    /// The edge was validated in an older epoch.
    Epoch,
    /// The step has not begun, or has ended.
    Step,
    /// The edge has no credit.
    Credit,
    /// The ring is full.
    Room,
    /// The value has other meta-data than the edge.
    MetaData,
    /// The peer broke a rule.
    Protocol,
    /// The wait took too long.
    Deadline,
}

/// Words that other threads may write.
struct Owner {
    bias: AtomicU64,
    busy: AtomicU64,
    wishes: AtomicU64,
}

#[repr(align(64))]
struct OutEdge {
    epoch: u64,
    /// Values sent.
    sent: u64,
    /// Upper bound of `sent`.
    limit: u64,
    /// Word 1 of the records.
    head: u64,
    generation: u16,
    meta: u16,
}

#[repr(align(64))]
struct InEdge {
    epoch: u64,
    /// Values that came.
    came: u64,
    /// Values that were taken.
    taken: u64,
    /// Values that came and were not taken, and receives that wait.
    held_and_waiters: u32,
    /// Length of the last value.
    len: u32,
    /// Word 1 of the last record.
    head: u64,
    generation: u16,
    meta: u16,
}

/// A value that came and was not taken.
struct Cell {
    step: u64,
    flags: u8,
    len: u32,
    payload: Payload,
}

enum Payload {
    None,
    Inline([u64; 4]),
    Place(u64),
}

/// A source that the peer may still read.
struct Lent {
    source: Tensor,
    /// The record, as counted by [`Link::sent`].
    record: u64,
    /// The loan word of the value cell.
    word: u32,
    /// What gives the loan back.
    number: u64,
}

/// Where a value is to be received.
pub enum Destination {
    /// A new tensor.
    Fresh,
    /// This tensor.
    Into(Tensor),
    /// The sender's memory.
    Borrow,
}

#[derive(Default)]
struct Counters {
    sent: u64,
    sent_bytes: u64,
    received: u64,
    received_bytes: u64,
}

pub struct Node {
    own: OwnSegment,
    peer: PeerSegment,
    pub pool: Pool,
    link: Link,
    out_edges: Vec<OutEdge>,
    in_edges: Vec<InEdge>,
    cells: Vec<Cell>,
    steps: [AtomicU64; STEPS],
    epoch: u64,
    owner: Owner,
    lent: VecDeque<Lent>,
    /// Loans that the peer keeps: the source, the place, and the number that ends the loan.
    kept: Vec<(Tensor, usize, u64)>,
    free_places: Vec<u32>,
    /// Whether loan words wait for the next record or the next empty look. Else they are stored as
    /// soon as a value is taken, and the next record waits for their line.
    lazy_loans: bool,
    /// Loan words that are to be stored, with their values.
    loans_due: Vec<(u32, u64)>,
    /// Edges whose credit is to be sent.
    credit_due: Vec<u32>,
    may_lend: bool,
    batches_sent: u64,
    batch_limit: u64,
    batches_taken: u64,
    counters: Counters,
    /// Records after which the peer slept.
    doorbells: u64,
}

impl Node {
    /// A node with announced edges in both directions. With `may_lend`, receivers may keep loans.
    pub fn new(process: &Process, edges: u32, slots: usize, may_lend: bool, lazy_loans: bool) -> Node {
        let flags = if may_lend { MAY_BORROW } else { 0 };
        let out_edge = |edge| OutEdge {
            epoch: 1,
            sent: 0,
            limit: WINDOW,
            head: head(VALUE, flags, META, edge),
            generation: GENERATION,
            meta: META,
        };
        let in_edge = |_| InEdge {
            epoch: 1,
            came: 0,
            taken: 0,
            held_and_waiters: 0,
            len: 0,
            head: 0,
            generation: GENERATION,
            meta: META,
        };
        let cell = |_| Cell { step: 0, flags: 0, len: 0, payload: Payload::None };
        Node {
            own: process.own,
            peer: process.peer,
            pool: Pool::new(process.own),
            link: Link::new(process.own, process.peer, slots),
            out_edges: (0..edges).map(out_edge).collect(),
            in_edges: (0..edges).map(in_edge).collect(),
            cells: (0..u64::from(edges) * WINDOW).map(cell).collect(),
            steps: [const { AtomicU64::new(0) }; STEPS],
            epoch: 1,
            owner: Owner { bias: AtomicU64::new(1), busy: AtomicU64::new(0), wishes: AtomicU64::new(0) },
            lent: VecDeque::with_capacity(256),
            kept: Vec::with_capacity(LOAN_PLACES),
            free_places: (0..LOAN_PLACES as u32).collect(),
            lazy_loans,
            loans_due: Vec::with_capacity(WINDOW as usize),
            credit_due: Vec::with_capacity(edges as usize),
            may_lend,
            batches_sent: 0,
            batch_limit: BATCH_WINDOW,
            batches_taken: 0,
            counters: Counters::default(),
            doorbells: 0,
        }
    }

    // The owner of the poller.

    /// Another thread that revokes the bias stores its wish, and calls `membarrier` before it reads
    /// `busy`. The owner therefore needs no locked instruction.
    #[inline(always)]
    fn enter(&self) -> Result<(), Slow> {
        self.owner.busy.store(1, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
        let is_owner = self.owner.bias.load(Ordering::Relaxed) == 1;
        match is_owner && self.owner.wishes.load(Ordering::Relaxed) == 0 {
            true => Ok(()),
            false => Err(Slow::Owner),
        }
    }

    #[inline(always)]
    fn exit(&self) -> Result<(), Slow> {
        self.owner.busy.store(0, Ordering::Release);
        compiler_fence(Ordering::SeqCst);
        match self.owner.wishes.load(Ordering::Relaxed) == 0 {
            true => Ok(()),
            false => Err(Slow::Owner),
        }
    }

    // Steps.

    #[inline(always)]
    fn step_word(&self, step: u64) -> &AtomicU64 {
        &self.steps[step as usize % STEPS]
    }

    #[inline(always)]
    pub fn begin_step(&mut self, step: u64) {
        self.step_word(step).store(step << 16 | LIVE, Ordering::Relaxed);
    }

    /// Ends a step, whose values were all taken.
    #[inline(always)]
    pub fn end_step(&mut self, step: u64) -> Result<(), Slow> {
        let word = self.step_word(step);
        if word.load(Ordering::Relaxed) != step << 16 | LIVE {
            return Err(Slow::Step);
        }
        word.store(step << 16, Ordering::Relaxed);
        self.own.words.over.0.store(step + 1, Ordering::Release);
        Ok(())
    }

    #[inline(always)]
    fn check_step(&self, step: u64) -> Result<(), Slow> {
        match self.step_word(step).load(Ordering::Relaxed) & !CELLS == step << 16 | LIVE {
            true => Ok(()),
            false => Err(Slow::Step),
        }
    }

    // Sending.

    #[inline(never)]
    pub fn send(&mut self, edge: u32, step: u64, value: Tensor) -> Result<(), Slow> {
        self.enter()?;
        self.check_step(step)?;
        let number = edge as usize;
        if self.out_edges[number].sent == self.out_edges[number].limit {
            return Err(Slow::Credit);
        }
        if !self.link.has_room() {
            return Err(Slow::Room);
        }
        self.send_record(number, step, value)?;
        // The record is on its way. What follows overlaps with the work of the peer.
        self.finish_takes();
        self.reclaim()?;
        self.exit()
    }

    /// Sends one value on each edge.
    #[inline(never)]
    pub fn send_batch(&mut self, step: u64, values: &mut Vec<Tensor>) -> Result<(), Slow> {
        self.enter()?;
        self.check_step(step)?;
        if self.batches_sent == self.batch_limit {
            return Err(Slow::Credit);
        }
        self.batches_sent += 1;
        for (edge, value) in values.drain(..).enumerate() {
            if let Some(later) = self.out_edges.get(edge + AHEAD) {
                prefetch_for_write(later);
            }
            let mut looks = 0;
            while !self.link.has_room() && !self.link.look_for_room() {
                self.check_looks(&mut looks)?;
            }
            self.send_record(edge, step, value)?;
        }
        self.exit()
    }

    #[inline(always)]
    fn send_record(&mut self, number: usize, step: u64, value: Tensor) -> Result<(), Slow> {
        let edge = &mut self.out_edges[number];
        if edge.epoch != self.epoch {
            return Err(Slow::Epoch);
        }
        let len = value.len();
        if value.meta() != edge.meta {
            return Err(Slow::MetaData);
        }
        let n = edge.sent;
        edge.sent += 1;
        self.counters.sent += 1;
        self.counters.sent_bytes += u64::from(len);
        let order = order(edge.generation, n, len);
        let sleeps = if len <= INLINE {
            let sleeps = self.link.post([edge.head, step, order], value.first_words());
            self.pool.release(value);
            sleeps
        } else {
            let head = edge.head | u64::from(LENT) << 8;
            let place = self.own.place(value.data());
            let record = self.link.sent;
            let sleeps = self.link.post([head, step, order], [place, 0, 0, 0]);
            let word = loan_word(number, n);
            self.lent.push_back(Lent { source: value, record, word, number: n + 1 });
            sleeps
        };
        self.doorbells += u64::from(sleeps);
        Ok(())
    }

    /// Answers loans and sends credit for values that were taken.
    #[inline(always)]
    fn finish_takes(&mut self) {
        for (word, answer) in self.loans_due.drain(..) {
            self.own.words.loans[word as usize].store(answer, Ordering::Release);
        }
        while !self.credit_due.is_empty() && self.link.has_room() {
            self.send_one_credit();
        }
    }

    #[inline(never)]
    fn send_one_credit(&mut self) {
        let Some(number) = self.credit_due.pop() else { return };
        let limit = self.in_edges[number as usize].taken + WINDOW;
        let head = head(CREDIT, 0, 0, number);
        self.link.post([head, limit, order(GENERATION, 0, 0)], [0; 4]);
    }

    /// Frees the sources that the peer has given back. Loan words are looked at once the peer has
    /// consumed the record: an earlier look would take the line from the peer before it writes.
    #[inline(always)]
    fn reclaim(&mut self) -> Result<(), Slow> {
        while let Some(oldest) = self.lent.front()
            && oldest.record < self.link.acknowledged
        {
            let word = self.peer.words.loans[oldest.word as usize].load(Ordering::Acquire);
            if word & NUMBER != oldest.number {
                break;
            }
            let Some(lent) = self.lent.pop_front() else { break };
            match word >> NUMBER_BITS {
                0 => self.pool.release(lent.source),
                place if place <= LOAN_PLACES as u64 => {
                    self.kept.push((lent.source, place as usize - 1, lent.number));
                }
                _ => return Err(Slow::Protocol),
            }
        }
        let mut at = 0;
        while at < self.kept.len() {
            let (_, place, number) = self.kept[at];
            if self.peer.words.loan_places[place].load(Ordering::Acquire) == number {
                let (source, ..) = self.kept.swap_remove(at);
                self.pool.release(source);
            } else {
                at += 1;
            }
        }
        Ok(())
    }

    // Waiting.

    /// Counts a look that found nothing. Each 1,024th looks at the deadline and at other threads.
    #[inline(always)]
    fn check_looks(&mut self, looks: &mut u32) -> Result<(), Slow> {
        *looks += 1;
        match looks.is_multiple_of(LOOKS) {
            true => self.check_deadline(),
            false => Ok(()),
        }
    }

    #[cold]
    #[inline(never)]
    fn check_deadline(&mut self) -> Result<(), Slow> {
        if deadline_passed() {
            return Err(Slow::Deadline);
        }
        match self.owner.wishes.load(Ordering::Relaxed) == 0 {
            true => Ok(()),
            false => Err(Slow::Owner),
        }
    }
}

/// Bits of a loan word that hold the number. The rest is the place of a kept loan, plus 1.
const NUMBER_BITS: u32 = 48;
const NUMBER: u64 = (1 << NUMBER_BITS) - 1;

/// The loan word of the cell of value `n`.
#[inline(always)]
fn loan_word(edge: usize, n: u64) -> u32 {
    (edge * WINDOW as usize + (n % WINDOW) as usize) as u32
}
