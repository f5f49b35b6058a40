//! Where the panics of other code end.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Calls `body`. `None` if it panics. Whatever it has changed in part is for the caller to end.
#[inline]
pub(crate) fn catch_panic<R>(body: impl FnOnce() -> R) -> Option<R> {
    catch_unwind(AssertUnwindSafe(body)).map_err(drop_payload).ok()
}

/// The payload of a panic can be a value of the program, whose drop may panic too.
#[cold]
fn drop_payload(payload: Box<dyn Any + Send>) {
    // The payload of the second panic is not dropped: it could panic like the first.
    let _ = catch_unwind(AssertUnwindSafe(|| drop(payload))).map_err(std::mem::forget);
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::panic::panic_any;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    /// The payload of a panic that panics again when it is dropped. Counts its own drop and that of
    /// the second payload.
    #[derive(Default)]
    pub(crate) struct PanickingPayload(Arc<AtomicU32>);

    impl Drop for PanickingPayload {
        fn drop(&mut self) {
            if self.0.fetch_add(1, Ordering::Relaxed) == 0 {
                panic_any(PanickingPayload(self.0.clone()));
            }
        }
    }

    #[test]
    fn a_payload_that_panics_when_it_is_dropped_ends_there() {
        let drops = Arc::new(AtomicU32::new(0));
        let payload = PanickingPayload(drops.clone());
        assert_eq!(catch_panic(move || panic_any(payload)), None::<()>);
        assert_eq!(drops.load(Ordering::Relaxed), 1, "the second one is not dropped");
        assert_eq!(catch_panic(|| 7), Some(7));
    }
}
