//! Which ranges of foreign memory are registered, and which give way to others.
//!
//! **Who finds a range.** Its owner alone, told by the place of its `Arc`, which nobody else can have as long as a `Weak` of it is
//! here. Of one owner's ranges none is inside another, so the last that begins no later than some bytes is the one that can have them.
//!
//! **Who gives way.** Where there is no room, a newcomer is refused and remembered. When it is asked for again, what nobody
//! has asked for in between gives way to it. So of a working set that is too large by a little the rest stays refused, instead of each
//! range ending the one that is needed next; and what is not used any more goes when the new has come round twice.

use crate::memory::{Owner, WeakOwner};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

/// What is kept at most.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    pub count: usize,
    pub bytes: usize,
}

/// A range to be registered.
pub(super) struct Wish<'a> {
    pub owner: &'a Owner,
    /// Those of the tensor.
    pub bytes: &'a Range<usize>,
    /// What would be registered: these bytes at least.
    pub range: &'a Range<usize>,
}

/// What is registered. An `R` that nobody else has is idle.
pub(super) struct Ranges<R> {
    limits: Limits,
    /// By the place of the owner's `Arc`.
    owners: HashMap<usize, Owned<R>>,
    /// Found by nobody any more, and kept until no tensor has it.
    retired: Vec<Known<R>>,
    /// Ranges and bytes of all these.
    count: usize,
    bytes: usize,
    /// Counts look-ups.
    time: u64,
    /// Counts what was taken out or forgotten.
    ends: u64,
    /// Counts the calls of [`Ranges::forget`].
    changes: u64,
    /// When those of owners that are gone were looked for.
    swept: u64,
    /// No range was used before this.
    oldest: u64,
    /// Wishes that are remembered, and since when there have been too many for more.
    refusals: usize,
    full_since: Option<u64>,
}

struct Owned<R> {
    owner: WeakOwner,
    /// By their first byte.
    ranges: BTreeMap<usize, Known<R>>,
    /// By the tensor's first byte and the one behind its last.
    refusals: HashMap<(usize, usize), Refusal>,
}

pub(super) struct Known<R> {
    range: Range<usize>,
    used: u64,
    region: Arc<R>,
}

/// A wish that was not fulfilled.
#[derive(Clone, Copy)]
struct Refusal {
    at: u64,
    /// The device refused, when so much had ended.
    by_device: Option<(u64, Lack)>,
}

/// Why a device has refused.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Lack {
    /// It lacks what others have.
    Room,
    /// It is the range's own fault, whatever others have.
    Other,
}

impl<R> Known<R> {
    /// Whether no tensor has it. It stays so while the ranges are locked, as tensors are given it under the lock.
    fn is_idle(&self) -> bool {
        Arc::strong_count(&self.region) == 1
    }
}

/// What tells owners apart, as long as there is a `Weak` of them.
fn place_of(owner: &Owner) -> usize {
    Arc::as_ptr(owner).cast::<()>().addr()
}

impl<R> Ranges<R> {
    pub fn new(limits: Limits) -> Self {
        Ranges {
            limits,
            owners: HashMap::new(),
            retired: Vec::new(),
            count: 0,
            bytes: 0,
            time: 0,
            ends: 0,
            changes: 0,
            swept: 0,
            oldest: 0,
            refusals: 0,
            full_since: None,
        }
    }

    /// Bytes of all that is registered.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Differs when anything was forgotten in between.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// The registration that has these bytes.
    pub fn find(&mut self, owner: &Owner, bytes: &Range<usize>) -> Option<Arc<R>> {
        self.time += 1;
        let ranges = &mut self.owners.get_mut(&place_of(owner))?.ranges;
        let (_, known) = ranges.range_mut(..=bytes.start).next_back()?;
        if known.range.end < bytes.end {
            return None;
        }
        known.used = self.time;
        Some(Arc::clone(&known.region))
    }

    /// Whether a range that is not known may be registered now. Takes out what gives way to it.
    pub fn admit(&mut self, wish: &Wish<'_>, out: &mut Vec<Known<R>>) -> bool {
        self.sweep(out);
        let is_granted = self.make_room(wish, out) && self.may_ask(wish, out);
        if !is_granted {
            self.refuse(wish, None);
        }
        is_granted
    }

    /// Whether the device may be asked, which has to be of use if it refused before.
    fn may_ask(&mut self, wish: &Wish<'_>, out: &mut Vec<Known<R>>) -> bool {
        match self.refusal(wish).and_then(|refusal| refusal.by_device) {
            Some((ends, lack)) if ends == self.ends => lack == Lack::Room && self.free(wish, out),
            _ => true,
        }
    }

    /// Takes out as many bytes as are wished, or as many as give way. Returns whether there were any.
    pub fn free(&mut self, wish: &Wish<'_>, out: &mut Vec<Known<R>>) -> bool {
        let mut left = wish.range.len();
        for (owner, start, len) in self.givers(self.since(wish)) {
            if left == 0 {
                break;
            }
            out.extend(self.remove(owner, start));
            left = left.saturating_sub(len);
        }
        left < wish.range.len()
    }

    /// Remembers a wish that was not fulfilled, by the device if it said why.
    pub fn refuse(&mut self, wish: &Wish<'_>, lack: Option<Lack>) {
        let (at, ends) = (self.time, self.ends);
        let is_new = self.refusal(wish).is_none();
        if is_new && !self.has_memory_for_one() {
            return;
        }
        let owned = self.owned(wish.owner);
        let refusal = owned
            .refusals
            .entry((wish.bytes.start, wish.bytes.end))
            .or_insert(Refusal { at, by_device: None });
        refusal.at = at;
        if let Some(lack) = lack {
            refusal.by_device = Some((ends, lack));
        }
        self.refusals += usize::from(is_new);
    }

    /// Wishes are remembered as long as there are few. When they have been too many for long, others have their turn.
    fn has_memory_for_one(&mut self) -> bool {
        let most = self.limits.count.max(64);
        if self.refusals < most {
            self.full_since = None;
            return true;
        }
        if self.time - *self.full_since.get_or_insert(self.time) < 64 * most as u64 {
            return false;
        }
        self.owners.retain(|_, owned| {
            owned.refusals.clear();
            !owned.ranges.is_empty()
        });
        (self.refusals, self.full_since) = (0, None);
        true
    }

    fn refusal(&self, wish: &Wish<'_>) -> Option<Refusal> {
        let owned = self.owners.get(&place_of(wish.owner))?;
        owned.refusals.get(&(wish.bytes.start, wish.bytes.end)).copied()
    }

    /// What was used before gives way to this wish.
    fn since(&self, wish: &Wish<'_>) -> u64 {
        self.refusal(wish).map_or(0, |refusal| refusal.at)
    }

    fn owned(&mut self, owner: &Owner) -> &mut Owned<R> {
        self.owners.entry(place_of(owner)).or_insert_with(|| Owned {
            owner: Arc::downgrade(owner),
            ranges: BTreeMap::new(),
            refusals: HashMap::new(),
        })
    }

    /// Takes out what is in the way of the wish; nothing if that were not enough.
    pub fn make_room(&mut self, wish: &Wish<'_>, out: &mut Vec<Known<R>>) -> bool {
        let Limits { count: most, bytes: most_bytes } = self.limits;
        let Some(others) = most_bytes.checked_sub(wish.range.len()) else { return false };
        let (mut count, mut bytes) = (self.count, self.bytes);
        let fits = |count: usize, bytes: usize| count < most && bytes <= others;
        if fits(count, bytes) {
            return true;
        }
        let mut givers = self.givers(self.since(wish));
        let enough = givers.iter().position(|(_, _, len)| {
            (count, bytes) = (count - 1, bytes - len);
            fits(count, bytes)
        });
        let Some(last) = enough else { return false };
        givers.truncate(last + 1);
        out.extend(givers.into_iter().filter_map(|(owner, start, _)| self.remove(owner, start)));
        true
    }

    /// The idle ranges that were used before `since`, the one that was used longest ago first: by owner, first byte and length.
    fn givers(&mut self, since: u64) -> Vec<(usize, usize, usize)> {
        if since <= self.oldest {
            return Vec::new();
        }
        let mut givers = Vec::new();
        self.oldest = self.time;
        for (owner, owned) in &self.owners {
            for (start, known) in &owned.ranges {
                self.oldest = self.oldest.min(known.used);
                if known.used < since && known.is_idle() {
                    givers.push((known.used, (*owner, *start, known.range.len())));
                }
            }
        }
        givers.sort_unstable();
        givers.into_iter().map(|(_, giver)| giver).collect()
    }

    /// Adds a registration, in the place of those that it includes. What was made before `changes` is not to be found by anybody.
    pub fn add(&mut self, wish: &Wish<'_>, region: Arc<R>, changes: u64, out: &mut Vec<Known<R>>) {
        self.bytes += wish.range.len();
        self.count += 1;
        let known = Known { range: wish.range.clone(), used: self.time, region };
        if changes != self.changes {
            return self.retired.push(known);
        }
        let owned = self.owned(wish.owner);
        let is_forgiven = owned.refusals.remove(&(wish.bytes.start, wish.bytes.end)).is_some();
        let inside = owned.ranges.range(wish.range.clone());
        let inside = inside.filter(|(_, known)| known.range.end <= wish.range.end);
        let inside: Vec<usize> = inside.map(|(start, _)| *start).collect();
        let included: Vec<_> = inside.iter().filter_map(|start| owned.ranges.remove(start)).collect();
        owned.ranges.insert(wish.range.start, known);
        self.refusals -= usize::from(is_forgiven);
        self.retire(included, out);
    }

    fn remove(&mut self, owner: usize, start: usize) -> Option<Known<R>> {
        let owned = self.owners.get_mut(&owner)?;
        let known = owned.ranges.remove(&start)?;
        if owned.ranges.is_empty() && owned.refusals.is_empty() {
            self.owners.remove(&owner);
        }
        self.leave(&known);
        Some(known)
    }

    fn leave(&mut self, known: &Known<R>) {
        self.count -= 1;
        self.bytes -= known.range.len();
        self.ends += 1;
    }

    /// Takes out what is idle, and the rest when it is; it is found no more.
    fn retire(&mut self, known: impl IntoIterator<Item = Known<R>>, out: &mut Vec<Known<R>>) {
        for known in known {
            if known.is_idle() {
                self.leave(&known);
                out.push(known);
            } else {
                self.retired.push(known);
            }
        }
    }

    /// Looks for ranges of owners that are gone, once for as many look-ups as there are owners.
    fn sweep(&mut self, out: &mut Vec<Known<R>>) {
        let all = std::mem::take(&mut self.retired);
        self.retire(all, out);
        if self.time - self.swept < self.owners.len() as u64 {
            return;
        }
        self.swept = self.time;
        let gone = self.owners.iter().filter(|(_, owned)| owned.owner.strong_count() == 0);
        let gone: Vec<usize> = gone.map(|(place, _)| *place).collect();
        gone.into_iter().for_each(|place| self.take_owner(place, out));
    }

    /// Takes out what is registered for an owner that is gone.
    pub fn end_owner(&mut self, owner: &WeakOwner, out: &mut Vec<Known<R>>) {
        let all = std::mem::take(&mut self.retired);
        self.retire(all, out);
        self.take_owner(owner.as_ptr().cast::<()>().addr(), out);
    }

    fn take_owner(&mut self, place: usize, out: &mut Vec<Known<R>>) {
        let Some(owned) = self.owners.remove(&place) else { return };
        self.refusals -= owned.refusals.len();
        self.retire(owned.ranges.into_values(), out);
    }

    /// Has nobody find a range with any of these addresses again, whoever is its owner.
    pub fn forget(&mut self, addresses: &Range<usize>, out: &mut Vec<Known<R>>) {
        self.changes += 1;
        self.ends += 1;
        let mut forgotten = Vec::new();
        for owned in self.owners.values_mut() {
            let is_hit = |_: &usize, known: &mut Known<R>| {
                known.range.start < addresses.end && addresses.start < known.range.end
            };
            forgotten.extend(owned.ranges.extract_if(.., is_hit).map(|(_, known)| known));
        }
        self.owners.retain(|_, owned| !owned.ranges.is_empty() || !owned.refusals.is_empty());
        self.retire(forgotten, out);
    }
}
