//! The store of a cluster.

use super::error::NodeError;
use super::options::auth_settings;
use super::process::Node;
use crate::bootstrap::{RemoteStore, StoreOptions, StoreServer};
use crate::config::Config;
use crate::store::{Store, StoreError};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// As errors show it.
const STORE: &str = "the store of the cluster";

/// How a node reaches the store of its cluster, and the connection once there is one.
pub(super) struct ClusterStore {
    /// `None` in the first member, which serves it.
    options: Option<StoreOptions>,
    store: Mutex<Option<Arc<dyn Store>>>,
    /// The store at which the members have met. Some may still be there, until this one stops.
    met_at: Mutex<Option<StoreServer>>,
    has_ended: AtomicBool,
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
        let has_ended = AtomicBool::new(false);
        Arc::new(ClusterStore { options, store: Mutex::default(), met_at: Mutex::new(met_at), has_ended })
    }

    /// Ends the store at which the members have met, and the connection with that of the cluster,
    /// unless the program has that one.
    pub fn end(&self) {
        drop(self.met_at.lock().unwrap_or_else(PoisonError::into_inner).take());
        self.has_ended.store(true, Ordering::SeqCst);
        // A thread that connects sees the end afterwards.
        if let Ok(mut store) = self.store.try_lock() {
            store.take();
        }
    }

    fn check(&self) -> Result<(), NodeError> {
        match self.has_ended.load(Ordering::SeqCst) {
            false => Ok(()),
            true => {
                let (store, why) = (STORE.into(), "the node has stopped: start a new one".into());
                Err(StoreError::Local { store, why }.into())
            }
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
    /// [`NodeError::Store`] if the first member can't be reached, or the node has stopped.
    /// [`NodeError::Forked`].
    pub fn store(&self) -> Result<Arc<dyn Store>, NodeError> {
        self.check_home()?;
        let begun = Instant::now();
        let mut kept = self.store.store.lock().unwrap_or_else(PoisonError::into_inner);
        self.store.check()?;
        if let Some(store) = &*kept {
            return Ok(store.clone());
        }
        let store: Arc<dyn Store> = match &self.store.options {
            None => Arc::new(self.bootstrap.store().clone()),
            Some(options) => {
                let left = options.timeout.saturating_sub(begun.elapsed());
                if left.is_zero() {
                    let (store, waited) = (STORE.into(), begun.elapsed());
                    let why = "another thread of this process has tried it in vain meanwhile".into();
                    let tried = "connecting".into();
                    return Err(StoreError::Unreachable { store, tried, why, waited }.into());
                }
                Arc::new(RemoteStore::connect_within(options, left)?)
            }
        };
        self.store.check()?;
        Ok(kept.insert(store).clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn second_of_two(join_timeout: &str) -> Node {
        let settings = Node::builder().without_environment().member("w", 1).set("pool_size", "4MiB");
        // Nobody is at the first address.
        let [first, own] = [(); 2].map(|()| super::super::meeting::tests::free_port());
        let settings = settings.set("cluster", format!("w=127.0.0.1:{first},127.0.0.1:{own}"));
        settings.set("join_timeout", join_timeout).start().expect("it starts")
    }

    #[test]
    fn threads_that_wait_for_the_store_share_one_timeout() {
        const TIMEOUT: Duration = Duration::from_secs(1);
        let node = second_of_two("1s");
        let begun = Instant::now();
        let failed = std::thread::scope(|scope| {
            let threads = [(); 6].map(|()| scope.spawn(|| node.store().map(drop)));
            threads.map(|thread| thread.join().expect("no panic"))
        });
        assert!(failed.iter().all(|failed| matches!(failed, Err(NodeError::Store(_)))), "{failed:?}");
        println!("six threads waited {:?}", begun.elapsed());
        assert!(begun.elapsed() < 5 * TIMEOUT, "{:?}", begun.elapsed());
    }

    #[test]
    fn a_node_that_has_stopped_connects_with_no_store() {
        let node = second_of_two("60s");
        node.stop().expect("stopped");
        let error = node.store().map(drop).expect_err("it has stopped");
        assert!(error.to_string().contains("the node has stopped"), "{error}");
    }
}
