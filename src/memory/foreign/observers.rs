//! Who is told that pages of foreign memory were replaced while their owner lives, or that the owner is gone.
//!
//! All fabrics of the process are told, as each may have registered the memory, by whichever `ForeignMemory` of the owner's.

use std::any::Any;
use std::ops::Range;
use std::sync::{OnceLock, Weak};

/// What is left of an owner that is gone: its place, which no other has as long as this is there.
pub type GoneOwner = Weak<dyn Any + Send + Sync>;

/// Keeps something with the pages of foreign memory.
pub trait PageKeeper: Send + Sync {
    /// Other pages may be at these addresses now: what is kept is good for whoever has it, and for nobody else.
    fn changed(&self, addresses: Range<usize>);
    /// The owner of some memory is gone: nobody has what is kept for it any more. May be told more than once.
    fn gone(&self, owner: &GoneOwner);
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

/// Tells them all something.
pub(crate) fn tell(what: impl Fn(&dyn PageKeeper)) {
    let mut next = KEEPERS.get();
    while let Some(entry) = next {
        if let Some(keeper) = entry.keeper.upgrade() {
            what(&*keeper);
        }
        next = entry.next.get();
    }
}
