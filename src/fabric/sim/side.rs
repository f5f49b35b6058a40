//! One side of a link: what it has posted, granted and been brought.

use super::SimProcess;
use super::load::Load;
use crate::fabric::{LinkFailure, LinkOptions};
use crate::memory::{LentBytes, Span, Tensor, TensorMut};
use crate::wire::{Grant, Immediate, Time};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Grants that a link can have at a time.
pub(super) const MAX_GRANTS: usize = 1 << 14;

/// What waits for the port's poll.
#[derive(Debug)]
pub(super) enum Arrived {
    Done,
    ReadDone(TensorMut),
    Failed,
    Message(Vec<u8>),
    Immediate(Immediate, u64),
    Lent(Immediate, LentBytes),
    Down(LinkFailure),
}

/// What is held for an operation that was posted, until it is done.
#[derive(Debug)]
pub(super) enum Held {
    /// Its bytes were copied, and it makes no completion.
    Nothing,
    /// A source: kept, not looked at.
    Source(#[expect(dead_code)] Tensor),
    /// Where a read goes.
    Target(TensorMut),
    /// A loan, by its number in the network.
    Loan(u32),
}

/// What was posted in a batch, until that ends.
pub(super) enum Departure {
    Packet { operation: u64, load: Load },
    Credits { returned: u32 },
}

#[derive(Debug)]
enum Granted {
    Write(TensorMut),
    Read(Tensor),
}

#[derive(Debug)]
struct GrantEntry {
    region: u16,
    offset: u64,
    granted: Granted,
}

/// One side of a link.
pub(super) struct Side {
    pub process: SimProcess,
    pub options: LinkOptions,
    /// The side that this one has connected to.
    pub connected_to: Option<usize>,
    /// The side that has connected to this one.
    pub reached_by: Option<usize>,
    pub is_up: bool,
    /// Nothing passes any more, in either direction; the sides hear of it later.
    pub is_cut: bool,
    /// Whether its port has polled it.
    pub listens: bool,
    /// What came before that: when, and its number in the network.
    pub early: Vec<(Time, u64)>,
    /// Receives that are posted.
    pub receives: u64,
    /// When the last packet of this side arrives at the other: the next one comes later.
    pub last_arrival: Time,
    /// The peer's newest credits, and how many it had published before.
    pub credits: (u64, u32),
    /// How often this side has published credits.
    pub published: u64,
    pub inbox: VecDeque<Arrived>,
    /// Whether credits or room have come since the last poll.
    pub has_changed: bool,
    /// A post found the queue full since there last was room.
    pub wants_room: bool,
    /// Its port is in a batch: nothing leaves.
    pub is_corked: bool,
    /// What leaves when that ends, in the order of posting.
    pub corked: Vec<Departure>,
    ring: Option<Arc<AtomicU32>>,
    /// Operations that are not done, in the order of posting.
    pub operations: BTreeMap<u64, Held>,
    next_operation: u64,
    grants: BTreeMap<u32, GrantEntry>,
    next_key: u32,
}

impl Side {
    pub fn new(process: SimProcess, options: LinkOptions, first_key: u32) -> Self {
        Side {
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
            inbox: VecDeque::new(),
            has_changed: false,
            wants_room: false,
            is_corked: false,
            corked: Vec::new(),
            ring: None,
            operations: BTreeMap::new(),
            next_operation: 0,
            grants: BTreeMap::new(),
            next_key: first_key,
        }
    }

    /// What stays of it when its owner has given it up.
    pub fn closed(&self) -> Side {
        let closed = Side::new(self.process, self.options.clone(), 0);
        let (connected_to, reached_by, is_cut) = (self.connected_to, self.reached_by, self.is_cut);
        Side { is_up: false, connected_to, reached_by, is_cut, ..closed }
    }

    /// The other side, as soon as one of the two has connected to the other.
    pub fn peer(&self) -> Option<usize> {
        self.connected_to.or(self.reached_by)
    }

    /// What comes from now on moves this number.
    pub fn rung_by(&mut self, ring: Arc<AtomicU32>) {
        self.ring = Some(ring);
        self.ring();
    }

    pub fn ring(&self) {
        if let Some(ring) = &self.ring {
            ring.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Brings the port something.
    pub fn bring(&mut self, arrived: Arrived) {
        self.inbox.push_back(arrived);
        self.ring();
    }

    /// Credits or room have come.
    pub fn change(&mut self) {
        self.has_changed = true;
        self.ring();
    }

    /// Whether a poll would change anything.
    pub fn has_news(&self) -> bool {
        self.has_changed || !self.inbox.is_empty() || !self.early.is_empty()
    }

    /// Puts an operation into the queue. Returns its number.
    pub fn post(&mut self, held: Held) -> u64 {
        let number = self.next_operation;
        self.next_operation += 1;
        self.operations.insert(number, held);
        number
    }

    /// Takes an operation out of the queue: it is done.
    pub fn end(&mut self, number: u64) -> Option<Held> {
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
        // Memory outside the pool has a region to itself.
        let own = || Span { region: 0, offset: 0, len: target.bytes().len() as u64 };
        let span = target.span().unwrap_or_else(own);
        Ok(self.add(Some(span), Granted::Write(target)))
    }

    pub fn expose(&mut self, source: &Tensor) -> Option<Grant> {
        (self.grants.len() < MAX_GRANTS).then(|| self.add(source.span(), Granted::Read(source.clone())))
    }

    fn add(&mut self, span: Option<Span>, granted: Granted) -> Grant {
        let (region, offset, len) = span.map_or((0, 0, 0), |span| (span.region, span.offset, span.len));
        let key = self.next_key;
        // A key is not used again before 2^32 others were.
        self.next_key = key.wrapping_add(1);
        self.grants.insert(key, GrantEntry { region, offset, granted });
        Grant { region, key, offset, len }
    }

    pub fn revoke(&mut self, grant: &Grant) -> Option<TensorMut> {
        if !matches!(self.grants.get(&grant.key)?.granted, Granted::Write(_)) {
            return None;
        }
        match self.grants.remove(&grant.key)?.granted {
            Granted::Write(target) => Some(target),
            Granted::Read(_) => None,
        }
    }

    pub fn withdraw(&mut self, grant: &Grant) {
        if self.grants.get(&grant.key).is_some_and(|entry| matches!(entry.granted, Granted::Read(_))) {
            self.grants.remove(&grant.key);
        }
    }

    /// The bytes that the peer may write with this grant.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn writable(&mut self, grant: &Grant) -> Result<&mut [u8], String> {
        let entry = self.grants.get_mut(&grant.key).ok_or("it wrote with a key that is not granted")?;
        let Granted::Write(target) = &mut entry.granted else {
            return Err("it wrote with a key that was granted for reading".into());
        };
        let bytes = target.bytes_mut();
        let range = inside(entry.region, entry.offset, bytes.len(), grant)?;
        Ok(&mut bytes[range])
    }

    /// The bytes that the peer may read with this grant.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn readable(&self, grant: &Grant) -> Result<&[u8], String> {
        let entry = self.grants.get(&grant.key).ok_or("it read with a key that is not granted")?;
        let Granted::Read(source) = &entry.granted else {
            return Err("it read with a key that was granted for writing".into());
        };
        let bytes = source.bytes();
        let range = inside(entry.region, entry.offset, bytes.len(), grant)?;
        Ok(&bytes[range])
    }
}

/// Where in a block the bytes of a grant lie.
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
