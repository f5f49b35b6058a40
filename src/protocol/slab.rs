//! Entries with small numbers.

/// Entries that keep their number until they are removed.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Slab<T> {
    entries: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Slab { entries: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slab<T> {
    /// Adds an entry. Returns its number.
    #[inline(always)] // else the entry is copied
    pub fn add(&mut self, entry: T) -> u32 {
        match self.free.pop() {
            Some(number) => {
                // The place is vacant, so there is nothing to drop.
                std::mem::forget(self.entries[number as usize].replace(entry));
                number
            }
            None => {
                self.entries.push(Some(entry));
                (self.entries.len() - 1) as u32
            }
        }
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
        self.free.push(number);
        Some(entry)
    }

    /// Drops an entry where it is. To move a large one out takes longer.
    pub fn discard(&mut self, number: u32) {
        if let Some(entry) = self.entries.get_mut(number as usize)
            && entry.is_some()
        {
            *entry = None;
            self.free.push(number);
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

    /// How many numbers were ever in use at once.
    pub fn numbers(&self) -> u32 {
        self.entries.len() as u32
    }
}
