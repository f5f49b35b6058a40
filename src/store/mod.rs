//! A key-value store through which processes meet before they know each other.
//!
//! [`Store`] has the calls; their meaning is that of c10d's stores. [`MemoryStore`] serves the
//! threads of one process, [`FileStore`] the processes that share a file system. [`PrefixStore`]
//! gives a part of another store. The bootstrap service serves a [`MemoryStore`] to other processes
//! (`bootstrap::store`).
//!
//! Rules of this module: it opens no socket and knows no member. All is bounded: keys, values,
//! their number and their sum. Every wait has an end.
//!
//! | file | content |
//! |---|---|
//! | `table` | the entries and their limits: no I/O, no clock |
//! | `memory`, `file`, `prefix` | the stores |
//! | `log` | the records of the file |
//! | `error` | errors |
#![allow(clippy::disallowed_types, clippy::disallowed_methods)] // never on the data path

mod error;
mod file;
mod log;
mod memory;
mod prefix;
mod table;

pub use error::StoreError;
pub use file::FileStore;
pub use memory::MemoryStore;
pub use prefix::PrefixStore;
pub(crate) use table::{MAX_BYTES, MAX_KEY, MAX_KEYS, MAX_VALUE, check_key, check_value};

use std::fmt;
use std::time::Duration;

/// How long a look may take that waits for no key, since its timeout is zero.
pub(crate) const LOOK: Duration = Duration::from_secs(2);

/// Keys with values, which several processes set and wait for.
///
/// A key has 1 to 1,024 bytes, a value 64 KiB at most. A store holds up to 65,536 keys and 64 MiB.
/// Calls that don't say how long they may wait are bounded by the store itself. A timeout of zero
/// waits for no key: the store looks once, which takes 2 seconds at most.
///
/// ```
/// use std::time::Duration;
/// use tensorwire::{MemoryStore, Store};
///
/// let store = MemoryStore::new();
/// let of_another_thread = store.clone();
/// std::thread::spawn(move || of_another_thread.set("address/0", b"10.0.0.1:4000"));
/// assert_eq!(store.get("address/0", Duration::from_secs(10))?, b"10.0.0.1:4000");
/// assert_eq!(store.add("arrived", 1)?, 1);
/// # Ok::<(), tensorwire::StoreError>(())
/// ```
pub trait Store: fmt::Debug + Send + Sync {
    /// Sets a key, whether it is set already or not.
    ///
    /// # Errors
    /// If the key or value is too long, the store is full, or it can't be reached.
    fn set(&self, key: &str, value: &[u8]) -> Result<(), StoreError>;

    /// The value of a key. Waits until the key is set, for `timeout` at most.
    ///
    /// # Errors
    /// [`StoreError::Timeout`] if it is not set in time; or if the store can't be reached.
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, StoreError>;

    /// Waits until all keys are set, for `timeout` at most.
    ///
    /// # Errors
    /// [`StoreError::Timeout`] names the keys that are missing then; or if the store can't be
    /// reached.
    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<(), StoreError>;

    /// Adds to the number that a key holds, in decimal digits, and returns the sum. A key that is
    /// not set counts as 0.
    ///
    /// # Errors
    /// [`StoreError::NotANumber`] if the value is none, or the sum is beyond an `i64`. Otherwise
    /// like [`Store::set`]. If the store is lost during the call, the sum may have been stored.
    fn add(&self, key: &str, amount: i64) -> Result<i64, StoreError>;

    /// Sets a key to `desired` if its value is `expected`, or with `None` if it is not set. Returns
    /// the value that the key has then: `desired` if it was set. `None` if the key is still not
    /// set.
    ///
    /// # Errors
    /// Like [`Store::set`]. If the store is lost during the call, the value may have been stored.
    fn compare_and_set(
        &self,
        key: &str,
        expected: Option<&[u8]>,
        desired: &[u8],
    ) -> Result<Option<Vec<u8>>, StoreError>;

    /// Removes a key. Returns whether it was set.
    ///
    /// # Errors
    /// If the store can't be reached; the key may be gone then.
    fn delete(&self, key: &str) -> Result<bool, StoreError>;

    /// The number of keys that begin with `prefix`: of all keys if it is empty.
    ///
    /// # Errors
    /// If the store can't be reached.
    fn count(&self, prefix: &str) -> Result<u64, StoreError>;
}

#[cfg(test)]
pub(crate) mod tests;
