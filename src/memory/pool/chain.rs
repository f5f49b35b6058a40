//! Lists whose links are in their items, so that putting an item into one takes no memory.

use crate::memory::sync::{AtomicPtr, Ordering};
use std::ptr;

/// An item of a list.
///
/// # Safety
/// [`Linked::next`] returns the same field each time. Nothing but the list that the item is in
/// touches the field.
pub(crate) unsafe trait Linked: Sized {
    /// The field that holds the next item.
    fn next(&mut self) -> &mut *mut Self;
}

/// A list with one owner: last in, first out.
#[derive(Debug)]
pub(crate) struct Chain<T: Linked> {
    /// A leaked box, or null. So is each item's link. The list owns them.
    head: *mut T,
}

// SAFETY: the list owns its items, as a `Vec<Box<T>>` does.
unsafe impl<T: Linked + Send> Send for Chain<T> {}

impl<T: Linked> Chain<T> {
    pub(crate) const fn new() -> Self {
        Chain { head: ptr::null_mut() }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.head.is_null()
    }

    #[inline]
    pub(crate) fn push(&mut self, mut item: Box<T>) {
        *item.next() = self.head;
        self.head = Box::into_raw(item);
    }

    /// Takes the item out that was put in last.
    #[inline]
    pub(crate) fn pop(&mut self) -> Option<Box<T>> {
        if self.head.is_null() {
            return None;
        }
        // SAFETY: a box that the list owns (see `head`), and that leaves the list here.
        let mut item = unsafe { Box::from_raw(self.head) };
        self.head = *item.next();
        Some(item)
    }

    /// The same items in the other order.
    pub(crate) fn reversed(mut self) -> Self {
        let mut other = Chain::new();
        while let Some(item) = self.pop() {
            other.push(item);
        }
        other
    }
}

impl<T: Linked> Drop for Chain<T> {
    fn drop(&mut self) {
        while self.pop().is_some() {}
    }
}

/// A list that any thread may put items into. One takes all of them out at once.
///
/// No item is taken out alone, and no item's link is read before the item is taken out. Therefore
/// the head may be replaced by the same item between a thread's load and its exchange (the ABA
/// problem) without harm.
#[derive(Debug)]
pub(crate) struct RemoteList<T: Linked> {
    /// As in [`Chain`].
    head: AtomicPtr<T>,
}

// SAFETY: a shared list only takes items in and gives them out whole, each to one thread.
unsafe impl<T: Linked + Send> Sync for RemoteList<T> {}
// SAFETY: the list owns its items.
unsafe impl<T: Linked + Send> Send for RemoteList<T> {}

impl<T: Linked> RemoteList<T> {
    pub(crate) fn new() -> Self {
        RemoteList { head: AtomicPtr::new(ptr::null_mut()) }
    }

    pub(crate) fn push(&self, item: Box<T>) {
        let item = Box::into_raw(item);
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            // SAFETY: no other thread knows the item before the exchange below succeeds.
            *unsafe { &mut *item }.next() = head;
            // Release: everything that was done to the item happened before it is taken out.
            match self.head.compare_exchange_weak(head, item, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    /// Takes all items out, the latest first.
    pub(crate) fn take(&self) -> Chain<T> {
        // Acquire: pairs with the release of each `push`. Later exchanges continue the release
        // sequence of earlier ones, so this one orders all of them.
        Chain { head: self.head.swap(ptr::null_mut(), Ordering::Acquire) }
    }
}

impl<T: Linked> Drop for RemoteList<T> {
    fn drop(&mut self) {
        drop(self.take());
    }
}

#[cfg(all(test, not(tensorwire_loom)))]
mod tests {
    use super::*;
    use std::sync::Arc;

    struct Item {
        value: Arc<u32>,
        next: *mut Item,
    }

    // SAFETY: always the same field, which nothing else touches.
    unsafe impl Linked for Item {
        fn next(&mut self) -> &mut *mut Self {
            &mut self.next
        }
    }

    // SAFETY: the link belongs to the list, and the rest is Send.
    unsafe impl Send for Item {}

    fn item(value: &Arc<u32>) -> Box<Item> {
        Box::new(Item { value: Arc::clone(value), next: ptr::null_mut() })
    }

    fn values(mut chain: Chain<Item>) -> Vec<u32> {
        std::iter::from_fn(|| chain.pop()).map(|item| *item.value).collect()
    }

    #[test]
    fn a_chain_gives_out_the_latest_first_and_frees_the_rest() {
        let [one, two, three] = [1, 2, 3].map(Arc::new);
        let mut chain = Chain::new();
        assert!(chain.pop().is_none());
        for value in [&one, &two, &three] {
            chain.push(item(value));
        }
        assert_eq!(chain.pop().map(|item| *item.value), Some(3));
        let chain = chain.reversed();
        drop(chain);
        assert_eq!([one, two, three].map(|value| Arc::strong_count(&value)), [1; 3]);
    }

    #[test]
    fn a_remote_list_gives_out_all_and_frees_what_is_left() {
        let [one, two] = [1, 2].map(Arc::new);
        let list = RemoteList::new();
        assert!(values(list.take()).is_empty());
        list.push(item(&one));
        list.push(item(&two));
        assert_eq!(values(list.take()), [2, 1]);
        list.push(item(&one));
        assert_eq!(values(list.take().reversed()), [1]);
        list.push(item(&two));
        drop(list);
        assert_eq!(Arc::strong_count(&two), 1);
    }
}

#[cfg(all(test, tensorwire_loom))]
mod loom_tests {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;

    struct Item {
        value: UnsafeCell<u32>,
        next: *mut Item,
    }

    // SAFETY: always the same field, which nothing else touches.
    unsafe impl Linked for Item {
        fn next(&mut self) -> &mut *mut Self {
            &mut self.next
        }
    }

    // SAFETY: the link belongs to the list, and loom checks the use of the rest.
    unsafe impl Send for Item {}

    /// Puts an item in that loom has seen this thread write.
    fn push(list: &RemoteList<Item>, value: u32) {
        let item = Box::new(Item { value: UnsafeCell::new(0), next: ptr::null_mut() });
        // SAFETY: nothing else knows the item.
        item.value.with_mut(|at| unsafe { *at = value });
        list.push(item);
    }

    /// The sum of all items. Loom fails the test if their writes did not happen before.
    fn take(list: &RemoteList<Item>) -> u32 {
        let mut chain = list.take();
        let taken = std::iter::from_fn(|| chain.pop());
        // SAFETY: the item was taken out, so it is this thread's.
        taken.map(|item| item.value.with_mut(|at| unsafe { *at })).sum()
    }

    #[test]
    fn loom_each_item_is_taken_out_once_and_after_all_that_was_done_to_it() {
        loom::model(|| {
            let list = Arc::new(RemoteList::new());
            let pushers = [&[1, 2][..], &[4]].map(|values| {
                let list = Arc::clone(&list);
                loom::thread::spawn(move || values.iter().for_each(|value| push(&list, *value)))
            });
            let taken = take(&list);
            for pusher in pushers {
                pusher.join().expect("no panic");
            }
            assert_eq!(taken + take(&list), 7);
        });
    }
}
