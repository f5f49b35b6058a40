//! Waking the task that waits for a result.

use super::catch_panic;
use std::cell::Cell;
use std::task::Waker;

thread_local! {
    static IS_WAKING: Cell<bool> = const { Cell::new(false) };
}

/// Wakes a task. The waker is code of the program: its panic ends here.
pub(super) fn wake(waker: Waker) {
    let outer = IS_WAKING.replace(true);
    let woken = catch_panic(|| waker.wake());
    IS_WAKING.set(outer);
    if woken.is_none() {
        tracing::error!("the waker of a task panicked; the receive that the task awaits has ended");
    }
}

/// Whether this thread runs a waker. Then it may hold a poller, and must not wait for one.
#[inline]
pub(crate) fn is_waking() -> bool {
    IS_WAKING.get()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::PanickingPayload;
    use std::panic::panic_any;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::task::Wake;

    struct Panics(AtomicU32);

    impl Wake for Panics {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(u32::from(is_waking()), Ordering::Relaxed);
            panic_any(PanickingPayload);
        }
    }

    #[test]
    fn a_panic_of_a_waker_harms_nobody() {
        let task = Arc::new(Panics(AtomicU32::new(0)));
        wake(task.clone().into());
        wake(task.clone().into());
        assert_eq!((task.0.load(Ordering::Relaxed), is_waking()), (2, false));
    }
}
