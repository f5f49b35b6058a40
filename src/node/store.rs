//! The store of a cluster.

use super::error::NodeError;
use super::options::auth_settings;
use super::process::Node;
use crate::bootstrap::{RemoteStore, StoreOptions, StoreServer};
use crate::config::Config;
use crate::store::Store;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// How a node reaches the store of its cluster, and the connection once there is one.
pub(super) struct ClusterStore {
    /// `None` in the first member, which serves it.
    options: Option<StoreOptions>,
    store: Mutex<Option<Arc<dyn Store>>>,
    /// The store at which the members have met. Some may still be there, until this one stops.
    met_at: Mutex<Option<StoreServer>>,
}

impl ClusterStore {
    pub fn new(config: &Config, met_at: Option<StoreServer>) -> Arc<Self> {
        let me = config.task_id();
        let first = config.cluster.members().next().filter(|(first, _)| first != me);
        let options = first.map(|(first, address)| {
            let mut options = StoreOptions::new(me.clone(), first, address.clone());
            options.auth = auth_settings(config);
            options.timeout = config.join_timeout;
            options
        });
        Arc::new(ClusterStore { options, store: Mutex::default(), met_at: Mutex::new(met_at) })
    }

    /// Ends the store at which the members have met, and the connection with that of the cluster,
    /// unless the program has that one.
    pub fn end(&self) {
        drop(self.met_at.lock().unwrap_or_else(PoisonError::into_inner).take());
        // A thread that connects does so for `join_timeout` at most.
        if let Ok(mut store) = self.store.try_lock() {
            store.take();
        }
    }
}

impl Node {
    /// The store of the cluster, for what members tell each other beside their tensors. The first
    /// member serves it, in the order of the names, and it ends with that member. Waits for that
    /// member for `join_timeout` at most; nobody need have joined yet.
    ///
    /// ```
    /// # let node = tensorwire::internals::doc_node();
    /// use std::time::Duration;
    /// let store = node.store()?;
    /// store.set("epoch", b"7")?;
    /// assert_eq!(store.get("epoch", Duration::from_secs(10))?, b"7");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`NodeError::Store`] if the first member can't be reached. [`NodeError::Forked`].
    pub fn store(&self) -> Result<Arc<dyn Store>, NodeError> {
        self.check_home()?;
        let begun = Instant::now();
        let mut kept = self.store.store.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(store) = &*kept {
            return Ok(store.clone());
        }
        let store: Arc<dyn Store> = match &self.store.options {
            None => Arc::new(self.bootstrap.store().clone()),
            Some(options) => {
                // Another thread may have tried in vain meanwhile.
                let left = options.timeout.saturating_sub(begun.elapsed());
                Arc::new(RemoteStore::connect_within(options, left)?)
            }
        };
        Ok(kept.insert(store).clone())
    }
}
