//! What the thread that has stopped all owners does with their magazines.

use super::{ClassLists, Magazine, MagazineList, Magazines, Owned};
use crate::memory::pool::header::TensorHeader;
use crate::memory::sync::Ordering;

/// All owners are stopped until this is dropped.
pub(crate) struct Paused<'a>(pub(super) &'a Magazines);

/// Blocks that were taken out of the magazines, to be freed.
#[derive(Debug, Default)]
pub(crate) struct Collected {
    /// The lists of magazines, which got the empty ones from here in return.
    lists: Vec<ClassLists>,
}

impl Collected {
    /// Takes all headers out.
    pub(crate) fn drain(&mut self, mut give: impl FnMut(Box<TensorHeader>)) {
        for list in self.lists.iter_mut().flatten() {
            while let Some(header) = list.pop() {
                give(header);
            }
        }
    }
}

impl Paused<'_> {
    /// Makes room for one more block of a list. Takes all blocks out, unless it is enough to give
    /// back what owners have of the budget and do not use.
    pub(crate) fn make_room(&self, list: MagazineList, to: &mut Collected) {
        let magazines = self.0;
        let cached: i64 = magazines.iter().map(|magazine| magazine.cached.load(Ordering::Relaxed)).sum();
        if cached + i64::from(list.units.get()) > magazines.capacity {
            return self.collect(to);
        }
        let mut budget = magazines.capacity;
        for magazine in magazines.iter() {
            let used = magazine.cached.load(Ordering::Relaxed);
            self.owned(magazine, |owned| owned.limit = used);
            budget -= used;
        }
        magazines.shared.budget.store(budget, Ordering::Relaxed);
    }

    /// Takes all blocks out of all magazines.
    pub(crate) fn collect(&self, to: &mut Collected) {
        let magazines = self.0;
        for (at, magazine) in magazines.iter().enumerate() {
            if to.lists.len() == at {
                to.lists.push(magazines.lists());
            }
            self.owned(magazine, |owned| {
                std::mem::swap(&mut owned.lists, &mut to.lists[at]);
                owned.limit = 0;
            });
            // The last list of a magazine is empty (`ClassLists`).
            if let Some(list) = to.lists[at].last_mut() {
                *list = magazine.remote.take();
            }
            magazine.cached.store(0, Ordering::Relaxed);
        }
        magazines.shared.budget.store(magazines.capacity, Ordering::Relaxed);
    }

    fn owned<R>(&self, magazine: &Magazine, body: impl FnOnce(&mut Owned) -> R) -> R {
        // SAFETY: all owners are stopped, and one thread at a time stops them: see `Sync for
        // Magazine`.
        magazine.owned.with_mut(|owned| body(unsafe { &mut *owned }))
    }
}

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        self.0.gate.resume();
    }
}
