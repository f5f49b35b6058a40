//! Entries with small numbers.

/// Entries that keep their number until they are removed.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Slab<T> {
    /// The last one is not vacant, if there are more than [`FEW`].
    entries: Vec<Option<T>>,
    /// The vacant places, the latest last. Some may be beyond the last entry, but none twice: an
    /// entry is added at the end only once none is left. Unless the slab is a clone, `free` has
    /// room for as many places as `entries`, so that a removal allocates nothing.
    free: Vec<u32>,
}

/// Places that are kept, so that an entry that comes and goes alone changes no length.
const FEW: usize = 64;

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Slab { entries: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slab<T> {
    /// No entries, and memory for so many.
    pub fn with_capacity(capacity: usize) -> Self {
        let entries = Vec::with_capacity(capacity);
        Slab { free: Vec::with_capacity(entries.capacity()), entries }
    }

    /// Adds an entry. Returns its number.
    #[inline(always)] // else the entry is copied
    pub fn add(&mut self, entry: T) -> u32 {
        while let Some(number) = self.free.pop() {
            if let Some(place) = self.entries.get_mut(number as usize) {
                // The place is vacant, so there is nothing to drop.
                std::mem::forget(place.replace(entry));
                return number;
            }
        }
        if self.entries.len() == self.entries.capacity() {
            self.grow();
        }
        self.entries.push(Some(entry));
        (self.entries.len() - 1) as u32
    }

    /// Makes room for more entries. All of them may become vacant without an allocation.
    #[cold]
    fn grow(&mut self) {
        self.entries.reserve(1);
        self.free.reserve(self.entries.capacity());
    }

    /// An entry.
    pub fn get(&self, number: u32) -> Option<&T> {
        self.entries.get(number as usize)?.as_ref()
    }

    /// An entry.
    pub fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        self.entries.get_mut(number as usize)?.as_mut()
    }

    /// Removes an entry.
    pub fn remove(&mut self, number: u32) -> Option<T> {
        let entry = self.entries.get_mut(number as usize)?.take()?;
        self.vacated(number);
        Some(entry)
    }

    /// Drops an entry where it is. To move a large one out takes longer.
    pub fn discard(&mut self, number: u32) {
        if let Some(entry) = self.entries.get_mut(number as usize)
            && entry.is_some()
        {
            *entry = None;
            self.vacated(number);
        }
    }

    /// A place has become vacant.
    #[inline]
    fn vacated(&mut self, number: u32) {
        if self.entries.len() <= FEW || number as usize + 1 < self.entries.len() {
            return self.free.push(number);
        }
        self.cut();
    }

    /// Cuts the vacant places at the end. Else a burst of entries would make each walk over all of
    /// them slow for good.
    #[cold]
    fn cut(&mut self) {
        let last = self.entries.iter().rposition(Option::is_some);
        self.entries.truncate(last.map_or(0, |last| last + 1));
        if self.entries.is_empty() {
            self.free.clear();
        }
    }

    /// The entries with their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        self.entries.iter().enumerate().filter_map(|(number, entry)| Some((number as u32, entry.as_ref()?)))
    }

    /// The entries with their numbers.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (u32, &mut T)> {
        self.entries
            .iter_mut()
            .enumerate()
            .filter_map(|(number, entry)| Some((number as u32, entry.as_mut()?)))
    }

    /// The number behind the largest one in use.
    pub fn numbers(&self) -> u32 {
        self.entries.len() as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[test]
    fn nothing_is_left_of_a_burst_to_walk_over() {
        let mut slab = Slab::default();
        let first = slab.add(0);
        for order in [false, true] {
            let mut burst: Vec<_> = (0..1000).map(|value| slab.add(value)).collect();
            if order {
                burst.reverse();
            }
            burst.iter().for_each(|number| slab.discard(*number));
            assert!(slab.numbers() as usize <= FEW, "{} places", slab.numbers());
            assert_eq!(slab.iter().collect::<Vec<_>>(), [(first, &0)]);
        }
    }

    #[test]
    fn entries_within_the_capacity_and_removals_allocate_nothing() {
        for capacity in [0, 100] {
            let mut slab = Slab::with_capacity(capacity);
            let room = |slab: &Slab<i32>| (slab.entries.capacity(), slab.free.capacity());
            let before = room(&slab);
            let numbers: Vec<_> = (0..100).map(|value| slab.add(value)).collect();
            assert_eq!(room(&slab) == before, capacity == 100);
            let before = room(&slab);
            numbers.iter().for_each(|number| slab.discard(*number));
            assert_eq!(room(&slab), before);
        }
    }

    proptest! {
        #[test]
        fn each_entry_keeps_a_number_of_its_own(
            changes in prop::collection::vec((0..3_u8, 0..12_usize), 0..200),
        ) {
            let mut slab = Slab::default();
            let mut known: BTreeMap<_, _> = (0..FEW).map(|value| (slab.add(value), value)).collect();
            for (value, (change, which)) in (FEW..).zip(changes) {
                let number = known.keys().rev().nth(which).copied();
                match (change, number) {
                    (0, Some(number)) => prop_assert_eq!(slab.remove(number), known.remove(&number)),
                    (1, Some(number)) => {
                        slab.discard(number);
                        known.remove(&number);
                    }
                    _ => prop_assert_eq!(known.insert(slab.add(value), value), None),
                }
                let entries = slab.iter().map(|(number, value)| (number, *value));
                prop_assert!(slab.free.capacity() >= slab.entries.capacity());
                prop_assert!(entries.eq(known.iter().map(|(number, value)| (*number, *value))));
                let needed = known.keys().last().map_or(0, |last| *last as usize + 1);
                let numbers = slab.numbers() as usize;
                prop_assert!(numbers == needed || (needed..=FEW).contains(&numbers), "{numbers} of {needed}");
            }
        }
    }
}
