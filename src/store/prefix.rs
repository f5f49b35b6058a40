//! A part of another store.

use super::Store;
use super::error::StoreError;
use std::sync::Arc;
use std::time::Duration;

/// A store whose keys are those of another one that begin with a prefix. Several groups can so
/// share one store.
///
/// ```
/// use std::{sync::Arc, time::Duration};
/// use tensorwire::{MemoryStore, PrefixStore, Store};
/// let whole = Arc::new(MemoryStore::new());
/// let part = PrefixStore::new("group-1/", whole.clone());
/// part.set("leader", b"worker/0")?;
/// assert_eq!(whole.get("group-1/leader", Duration::ZERO)?, b"worker/0");
/// # Ok::<(), tensorwire::StoreError>(())
/// ```
#[derive(Clone, Debug)]
pub struct PrefixStore {
    prefix: String,
    whole: Arc<dyn Store>,
}

impl PrefixStore {
    /// The part of `whole` whose keys begin with `prefix`. Prefixes of prefixes add up.
    pub fn new(prefix: impl Into<String>, whole: Arc<dyn Store>) -> Self {
        PrefixStore { prefix: prefix.into(), whole }
    }

    fn key(&self, key: &str) -> Result<String, StoreError> {
        // An empty key is refused, also behind a prefix.
        if key.is_empty() {
            super::check_key(key)?;
        }
        Ok(format!("{}{key}", self.prefix))
    }
}

impl Store for PrefixStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        self.whole.set(&self.key(key)?, value)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, StoreError> {
        self.whole.get(&self.key(key)?, timeout)
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<(), StoreError> {
        let keys = keys.iter().map(|key| self.key(key)).collect::<Result<Vec<_>, _>>()?;
        self.whole.wait(&keys.iter().map(String::as_str).collect::<Vec<_>>(), timeout)
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64, StoreError> {
        self.whole.add(&self.key(key)?, amount)
    }

    fn compare_and_set(
        &self,
        key: &str,
        expected: Option<&[u8]>,
        desired: &[u8],
    ) -> Result<Option<Vec<u8>>, StoreError> {
        self.whole.compare_and_set(&self.key(key)?, expected, desired)
    }

    fn delete(&self, key: &str) -> Result<bool, StoreError> {
        self.whole.delete(&self.key(key)?)
    }

    fn count(&self, prefix: &str) -> Result<u64, StoreError> {
        self.whole.count(&format!("{}{prefix}", self.prefix))
    }
}
