//! One side of a link: its operations, grants and arrivals.

use super::SimProcess;
use super::load::SimPayload;
use crate::fabric::grant_keys::GrantKeys;
use crate::fabric::{LinkFailure, LinkOptions};
use crate::memory::{LentBytes, Span, Tensor, TensorMut};
use crate::wire::{Grant, Immediate, ShortMessage, Time};
use foldhash::quality::FixedState;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Largest number of grants of a link.
pub(super) const MAX_GRANTS: usize = 1 << 14;

/// An arrival that waits for a poll.
#[derive(Debug)]
pub(super) enum SimArrival {
    Done,
    ReadDone(TensorMut),
    Failed,
    Message(Vec<u8>),
    Immediate(Immediate, u64),
    /// A loan, with its message.
    Lent(ShortMessage, LentBytes),
    Down(LinkFailure),
}

/// The memory that is held for a posted operation until it is done.
#[derive(Debug)]
pub(super) enum HeldMemory {
    /// None: the bytes were copied, and there is no completion.
    Nothing,
    /// A source, which is only kept alive.
    Source(#[expect(dead_code)] Tensor),
    /// The target of a read.
    Target(TensorMut),
    /// The number of a loan in the network.
    Loan(u32),
}

/// Operations of a batch, until it ends.
pub(super) enum Departure {
    Packet { operation: u64, load: SimPayload },
    Credits { returned: u32 },
}

#[derive(Debug)]
enum SimGranted {
    Write(TensorMut),
    Read(Tensor),
}

#[derive(Debug)]
struct SimGrant {
    region: u16,
    offset: u64,
    granted: SimGranted,
}

pub(super) struct LinkSide {
    pub process: SimProcess,
    pub options: LinkOptions,
    /// The side that this one has connected to.
    pub connected_to: Option<usize>,
    /// The side that has connected to this one.
    pub reached_by: Option<usize>,
    pub is_up: bool,
    /// Nothing passes any more in either direction. The sides are told later.
    pub is_cut: bool,
    /// Whether its port has polled the side.
    pub listens: bool,
    /// Arrivals before the first poll: time, and number of the event.
    pub early: Vec<(Time, u64)>,
    /// Number of posted receives.
    pub receives: u64,
    /// Arrival time of this side's newest packet. The next packet arrives later.
    pub last_arrival: Time,
    /// The peer's newest credits, and the number of its earlier publications.
    pub credits: (u64, u32),
    /// Number of publications of credits by this side.
    pub published: u64,
    pub arrivals: VecDeque<SimArrival>,
    /// Whether credits or room have arrived since the last poll.
    pub has_changed: bool,
    /// Whether a post has found the queue full since there last was room.
    pub wants_room: bool,
    /// Whether its port is in a batch, so that nothing leaves.
    pub in_batch: bool,
    /// Operations of the batch, in the order of posting.
    pub batched: Vec<Departure>,
    ring: Option<Arc<AtomicU32>>,
    /// Outstanding operations, in the order of posting.
    pub operations: BTreeMap<u64, HeldMemory>,
    next_operation: u64,
    grants: BTreeMap<u32, SimGrant>,
    keys: GrantKeys<FixedState>,
}

impl LinkSide {
    /// A side whose keys `seed` decides.
    pub fn new(process: SimProcess, options: LinkOptions, seed: u64) -> Self {
        LinkSide {
            process,
            options,
            connected_to: None,
            reached_by: None,
            is_up: true,
            is_cut: false,
            listens: false,
            early: Vec::new(),
            receives: 0,
            last_arrival: Time::ZERO,
            credits: (0, 0),
            published: 0,
            arrivals: VecDeque::new(),
            has_changed: false,
            wants_room: false,
            in_batch: false,
            batched: Vec::new(),
            ring: None,
            operations: BTreeMap::new(),
            next_operation: 0,
            grants: BTreeMap::new(),
            keys: GrantKeys::new(FixedState::with_seed(seed)),
        }
    }

    /// The rest of a side after its owner has dropped it.
    pub fn closed(&self) -> LinkSide {
        let closed = LinkSide::new(self.process, self.options.clone(), 0);
        let (connected_to, reached_by, is_cut) = (self.connected_to, self.reached_by, self.is_cut);
        LinkSide { is_up: false, connected_to, reached_by, is_cut, ..closed }
    }

    /// Outstanding loans.
    pub fn loans(&self) -> usize {
        self.operations.values().filter(|held| matches!(held, HeldMemory::Loan(_))).count()
    }

    /// Outstanding operations that take a place of the queue. A loan takes none.
    pub fn queued_operations(&self) -> usize {
        self.operations.len() - self.loans()
    }

    /// The other side, once one of the two has connected.
    pub fn peer(&self) -> Option<usize> {
        self.connected_to.or(self.reached_by)
    }

    /// Changes with each arrival.
    pub fn rung_by(&mut self, ring: Arc<AtomicU32>) {
        self.ring = Some(ring);
        self.ring();
    }

    pub fn ring(&self) {
        if let Some(ring) = &self.ring {
            ring.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Queues an arrival for the port.
    pub fn bring(&mut self, arrived: SimArrival) {
        self.arrivals.push_back(arrived);
        self.ring();
    }

    /// Notes that credits or room have arrived.
    pub fn change(&mut self) {
        self.has_changed = true;
        self.ring();
    }

    /// Whether a poll would change anything.
    pub fn has_news(&self) -> bool {
        self.has_changed || !self.arrivals.is_empty() || !self.early.is_empty()
    }

    /// Queues an operation. Returns its number.
    pub fn post(&mut self, held: HeldMemory) -> u64 {
        let number = self.next_operation;
        self.next_operation += 1;
        self.operations.insert(number, held);
        number
    }

    /// Removes a completed operation from the queue.
    pub fn end(&mut self, number: u64) -> Option<HeldMemory> {
        let held = self.operations.remove(&number)?;
        if std::mem::take(&mut self.wants_room) {
            self.change();
        }
        Some(held)
    }

    pub fn grant(&mut self, target: TensorMut) -> Result<Grant, TensorMut> {
        if self.grants.len() >= MAX_GRANTS {
            return Err(target);
        }
        // Foreign memory has a region of its own.
        let own = || Span { region: 0, offset: 0, len: target.bytes().len() as u64 };
        let span = target.span().unwrap_or_else(own);
        Ok(self.add(Some(span), SimGranted::Write(target)))
    }

    pub fn expose(&mut self, source: &Tensor) -> Option<Grant> {
        (self.grants.len() < MAX_GRANTS).then(|| self.add(source.span(), SimGranted::Read(source.clone())))
    }

    fn add(&mut self, span: Option<Span>, granted: SimGranted) -> Grant {
        let (region, offset, len) = span.map_or((0, 0, 0), |span| (span.region, span.offset, span.len));
        let key = self.keys.draw();
        self.grants.insert(key, SimGrant { region, offset, granted });
        Grant { region, key, offset, len }
    }

    pub fn revoke(&mut self, grant: &Grant) -> Option<TensorMut> {
        if !matches!(self.grants.get(&grant.key)?.granted, SimGranted::Write(_)) {
            return None;
        }
        match self.grants.remove(&grant.key)?.granted {
            SimGranted::Write(target) => Some(target),
            SimGranted::Read(_) => None,
        }
    }

    pub fn withdraw(&mut self, grant: &Grant) {
        if self.grants.get(&grant.key).is_some_and(|entry| matches!(entry.granted, SimGranted::Read(_))) {
            self.grants.remove(&grant.key);
        }
    }

    /// The bytes that this grant lets the peer write.
    ///
    /// # Errors
    /// If the grant is not valid.
    pub fn writable(&mut self, grant: &Grant) -> Result<&mut [u8], String> {
        let entry = self.grants.get_mut(&grant.key).ok_or("it wrote with a key that is not granted")?;
        let SimGranted::Write(target) = &mut entry.granted else {
            return Err("it wrote with a key that was granted for reading".into());
        };
        let bytes = target.bytes_mut();
        let range = inside(entry.region, entry.offset, bytes.len(), grant)?;
        Ok(&mut bytes[range])
    }

    /// The bytes that this grant lets the peer read.
    ///
    /// # Errors
    /// If the grant is not valid.
    pub fn readable(&self, grant: &Grant) -> Result<&[u8], String> {
        let entry = self.grants.get(&grant.key).ok_or("it read with a key that is not granted")?;
        let SimGranted::Read(source) = &entry.granted else {
            return Err("it read with a key that was granted for writing".into());
        };
        let bytes = source.bytes();
        let range = inside(entry.region, entry.offset, bytes.len(), grant)?;
        Ok(&bytes[range])
    }
}

/// The range of a grant's bytes in a block.
fn inside(region: u16, start: u64, len: usize, grant: &Grant) -> Result<std::ops::Range<usize>, String> {
    let skip = grant.offset.checked_sub(start);
    let end = skip.and_then(|skip| skip.checked_add(grant.len));
    match (skip, end) {
        (Some(skip), Some(end)) if region == grant.region && end <= len as u64 => {
            Ok(skip as usize..end as usize)
        }
        _ => Err(format!("{grant:?} is not inside what was granted")),
    }
}
