//! Who is told that pages of foreign memory were replaced while their owner lives, or that the owner is gone.
//!
//! All fabrics of the process are told, as each may have registered the memory, by whichever `ForeignMemory` of the owner's.

use std::any::Any;
use std::ops::Range;
use std::sync::{OnceLock, Weak};

/// What is left of an owner that is gone: its place, which no other has as long as this is there.
pub type WeakOwner = Weak<dyn Any + Send + Sync>;

/// Keeps something with the pages of foreign memory.
pub trait ForeignMemoryObserver: Send + Sync {
    /// Other pages may be at these addresses now: what is kept is good for whoever has it, and for nobody else.
    fn pages_replaced(&self, addresses: Range<usize>);
    /// The owner of some memory is gone: nobody has what is kept for it any more. May be told more than once.
    fn owner_dropped(&self, owner: &WeakOwner);
}

/// A list that only grows, so that it needs no lock: by one for each fabric of the process.
struct ObserverEntry {
    keeper: Weak<dyn ForeignMemoryObserver>,
    next: OnceLock<Box<ObserverEntry>>,
}

static KEEPERS: OnceLock<Box<ObserverEntry>> = OnceLock::new();

/// Has a keeper told from now on, as long as it lives.
pub fn observe_foreign_memory(keeper: Weak<dyn ForeignMemoryObserver>) {
    let mut entry = Box::new(ObserverEntry { keeper, next: OnceLock::new() });
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

/// Tells them all something.
pub(crate) fn tell(what: impl Fn(&dyn ForeignMemoryObserver)) {
    let mut next = KEEPERS.get();
    while let Some(entry) = next {
        if let Some(keeper) = entry.keeper.upgrade() {
            what(&*keeper);
        }
        next = entry.next.get();
    }
}
