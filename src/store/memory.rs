//! A store in the memory of one process.

use super::error::StoreError;
use super::table::{StoreTable, check_key};
use super::{Store, table};
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// A store for the threads of one process. Clones share the entries.
///
/// ```
/// use tensorwire::{MemoryStore, Store};
/// let store = MemoryStore::new();
/// // Only the first one finds the key unset.
/// assert_eq!(store.compare_and_set("leader", None, b"a")?, Some(b"a".to_vec()));
/// assert_eq!(store.compare_and_set("leader", None, b"b")?, Some(b"a".to_vec()));
/// # Ok::<(), tensorwire::StoreError>(())
/// ```
#[derive(Clone, Default)]
pub struct MemoryStore(Arc<Shared>);

#[derive(Default)]
struct Shared {
    table: Mutex<StoreTable>,
    turned: Condvar,
    /// Called after each change.
    observer: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

/// What errors call it.
const NAME: &str = "the store of this process";

impl MemoryStore {
    /// A store without entries.
    pub fn new() -> Self {
        MemoryStore::default()
    }

    /// Calls `observe` after each change. Only the first observer counts.
    pub(crate) fn observe(&self, observe: impl Fn() + Send + Sync + 'static) {
        let _ = self.0.observer.set(Box::new(observe));
    }

    fn table(&self) -> MutexGuard<'_, StoreTable> {
        // A change is done as a whole, or not at all.
        self.0.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change<R>(
        &self,
        change: impl FnOnce(&mut StoreTable) -> Result<R, StoreError>,
    ) -> Result<R, StoreError> {
        let changed = change(&mut self.table())?;
        self.0.turned.notify_all();
        if let Some(observe) = self.0.observer.get() {
            observe();
        }
        Ok(changed)
    }

    /// The value of a key that is set.
    pub(crate) fn look(&self, key: &str) -> Option<Vec<u8>> {
        self.table().get(key).map(<[u8]>::to_vec)
    }

    /// Whether a key is set.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.table().get(key).is_some()
    }

    /// Waits until `found` returns a value.
    fn until<R>(
        &self,
        timeout: Duration,
        mut found: impl FnMut(&StoreTable) -> Result<R, Vec<String>>,
    ) -> Result<R, StoreError> {
        let start = Instant::now();
        let mut table = self.table();
        loop {
            let missing = match found(&table) {
                Ok(found) => return Ok(found),
                Err(missing) => missing,
            };
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Err(StoreError::Timeout { store: NAME.into(), missing, waited: timeout });
            }
            table = self.0.turned.wait_timeout(table, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Store for MemoryStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        self.change(|table| table.set(key, value))
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, StoreError> {
        check_key(key)?;
        self.until(timeout, |table| table.get(key).map(<[u8]>::to_vec).ok_or_else(|| vec![key.to_owned()]))
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<(), StoreError> {
        keys.iter().try_for_each(|key| check_key(key))?;
        self.until(timeout, |table| {
            let missing: Vec<String> = table.missing(keys).into_iter().map(str::to_owned).collect();
            if missing.is_empty() { Ok(()) } else { Err(missing) }
        })
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64, StoreError> {
        self.change(|table| {
            let sum = table.sum(key, amount)?;
            table.set(key, sum.to_string().as_bytes())?;
            Ok(sum)
        })
    }

    fn compare_and_set(
        &self,
        key: &str,
        expected: Option<&[u8]>,
        desired: &[u8],
    ) -> Result<Option<Vec<u8>>, StoreError> {
        check_key(key)?;
        table::check_value(key, desired)?;
        self.change(|table| {
            if table.get(key) == expected {
                table.set(key, desired)?;
            }
            Ok(table.get(key).map(<[u8]>::to_vec))
        })
    }

    fn delete(&self, key: &str) -> Result<bool, StoreError> {
        check_key(key)?;
        self.change(|table| Ok(table.delete(key)))
    }

    fn count(&self, prefix: &str) -> Result<u64, StoreError> {
        Ok(self.table().count(prefix) as u64)
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore").field("keys", &self.table().count("")).finish()
    }
}
