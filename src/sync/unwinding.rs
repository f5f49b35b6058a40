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

    /// The payload of a panic that panics again when it is dropped. The second payload is not
    /// dropped, and takes no memory that would leak.
    pub(crate) struct PanickingPayload;

    impl Drop for PanickingPayload {
        fn drop(&mut self) {
            panic_any(SecondPayload);
        }
    }

    struct SecondPayload;

    impl Drop for SecondPayload {
        fn drop(&mut self) {
            panic!("the second payload is dropped");
        }
    }

    #[test]
    fn a_payload_that_panics_when_it_is_dropped_ends_there() {
        assert_eq!(catch_panic(|| panic_any(PanickingPayload)), None::<()>);
        assert_eq!(catch_panic(|| 7), Some(7));
    }
}
