//! Lists that travel to a poller and come back, so that the next batch allocates nothing.

use crossbeam_queue::ArrayQueue;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// A pool of lists.
#[derive(Debug)]
pub(crate) struct Lists<T> {
    free: Arc<ArrayQueue<Vec<T>>>,
}

/// A list that is emptied and goes back to its pool when it is dropped.
#[derive(Debug)]
pub struct Reused<T> {
    list: Vec<T>,
    home: Arc<ArrayQueue<Vec<T>>>,
}

impl<T> Lists<T> {
    /// An empty pool that keeps up to `kept` unused lists. Further lists are freed.
    pub fn new(kept: usize) -> Self {
        Lists { free: Arc::new(ArrayQueue::new(kept)) }
    }

    /// An empty list.
    pub fn take(&self) -> Reused<T> {
        Reused { list: self.free.pop().unwrap_or_default(), home: self.free.clone() }
    }
}

impl<T> Reused<T> {
    /// Another empty list of the same pool.
    pub(crate) fn another(&self) -> Reused<T> {
        Reused { list: self.home.pop().unwrap_or_default(), home: self.home.clone() }
    }
}

impl<T> Drop for Reused<T> {
    fn drop(&mut self) {
        self.list.clear();
        // A full pool frees the list.
        let _ = self.home.push(std::mem::take(&mut self.list));
    }
}

impl<T> Deref for Reused<T> {
    type Target = Vec<T>;

    fn deref(&self) -> &Vec<T> {
        &self.list
    }
}

impl<T> DerefMut for Reused<T> {
    fn deref_mut(&mut self) -> &mut Vec<T> {
        &mut self.list
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_comes_back_empty_and_with_its_room() {
        let lists = Lists::new(2);
        let counted = Arc::new(());
        let mut list = lists.take();
        list.extend((0..100).map(|_| counted.clone()));
        let room = list.capacity();
        drop(list);
        assert_eq!(Arc::strong_count(&counted), 1, "what was in it is gone");
        let again = lists.take();
        assert!(again.is_empty() && again.capacity() == room);
        assert_eq!(again.another().capacity(), 0, "that one is in use");
    }
}
