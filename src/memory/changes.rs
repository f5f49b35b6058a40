//! Who is told that pages of foreign memory were replaced while their owner lives.
//!
//! All fabrics of the process are told, as each may have registered the memory, by whichever `ForeignMemory` of the owner's.

use std::ops::Range;
use std::sync::{OnceLock, Weak};

/// Keeps something with the pages of foreign memory.
pub trait PageKeeper: Send + Sync {
    /// Other pages may be at these addresses now: what is kept is good for whoever has it, and for nobody else.
    fn changed(&self, addresses: Range<usize>);
}

/// A list that only grows, so that it needs no lock: by one for each fabric of the process.
struct Entry {
    keeper: Weak<dyn PageKeeper>,
    next: OnceLock<Box<Entry>>,
}

static KEEPERS: OnceLock<Box<Entry>> = OnceLock::new();

/// Has a keeper told from now on, as long as it lives.
pub fn tell_of_changes(keeper: Weak<dyn PageKeeper>) {
    let mut entry = Box::new(Entry { keeper, next: OnceLock::new() });
    let mut end = &KEEPERS;
    loop {
        match end.get() {
            Some(other) => end = &other.next,
            None => match end.set(entry) {
                Ok(()) => return,
                Err(again) => entry = again,
            },
        }
    }
}

/// Tells them all.
pub(super) fn tell(addresses: &Range<usize>) {
    let mut next = KEEPERS.get();
    while let Some(entry) = next {
        if let Some(keeper) = entry.keeper.upgrade() {
            keeper.changed(addresses.clone());
        }
        next = entry.next.get();
    }
}
