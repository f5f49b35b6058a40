//! Observers of foreign memory: they learn that pages were replaced, or that an owner is gone.
//!
//! Every fabric of the process is told, since each may have registered the memory, whichever
//! `ForeignMemory` of the owner reports the change.

use std::any::Any;
use std::ops::Range;
use std::sync::{OnceLock, Weak};

/// A weak reference to an owner. As long as it exists, no other owner has the same address.
pub type WeakOwner = Weak<dyn Any + Send + Sync>;

/// Keeps something, such as a registration, for pages of foreign memory.
pub trait ForeignMemoryObserver: Send + Sync {
    /// Other pages may be mapped at `addresses` now. Tensors that already use a registration of the
    /// old pages may go on; new tensors may not.
    fn pages_replaced(&self, addresses: Range<usize>);
    /// The owner of some memory is gone, so no tensor uses its registrations any more. May be
    /// called more than once.
    fn owner_dropped(&self, owner: &WeakOwner);
}

/// A list that only grows, so that it needs no lock: one entry for each fabric of the process.
struct ObserverEntry {
    observer: Weak<dyn ForeignMemoryObserver>,
    next: OnceLock<Box<ObserverEntry>>,
}

static OBSERVERS: OnceLock<Box<ObserverEntry>> = OnceLock::new();

/// Adds an observer. It is told as long as it lives.
pub fn observe_foreign_memory(observer: Weak<dyn ForeignMemoryObserver>) {
    let mut entry = Box::new(ObserverEntry { observer, next: OnceLock::new() });
    let mut end = &OBSERVERS;
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

/// Calls each observer that still lives.
pub(crate) fn notify(event: impl Fn(&dyn ForeignMemoryObserver)) {
    let mut next = OBSERVERS.get();
    while let Some(entry) = next {
        if let Some(observer) = entry.observer.upgrade() {
            event(&*observer);
        }
        next = entry.next.get();
    }
}
