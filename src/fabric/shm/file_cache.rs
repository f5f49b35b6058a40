//! What is mapped once for all links to a process: its doorbells and the regions of its pool.
#![allow(clippy::disallowed_types)] // making a link

use crate::fabric::{FabricError, FabricKind};
use rustix::fd::OwnedFd;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Which file: two descriptors of the same memory have the same.
type File = (u64, u64);

/// Things made of files that peers have sent, as long as somebody has them.
pub(super) struct FileCache<T> {
    things: Mutex<HashMap<(File, u64), Weak<T>>>,
}

impl<T> Default for FileCache<T> {
    fn default() -> Self {
        FileCache { things: Mutex::default() }
    }
}

impl<T> FileCache<T> {
    /// What was made of the same file and length before, or now by `make`.
    ///
    /// # Errors
    /// Those of `make`.
    pub(super) fn get(
        &self,
        file: OwnedFd,
        len: u64,
        make: impl FnOnce(OwnedFd) -> Result<T, FabricError>,
    ) -> Result<Arc<T>, FabricError> {
        let stat = rustix::fs::fstat(&file).map_err(|error| FabricError::Os {
            fabric: FabricKind::Shm,
            tried: "looking at a file of the peer's".into(),
            remedy: "report this: the descriptor is valid",
            source: error.into(),
        })?;
        let key = ((stat.st_dev, stat.st_ino), len);
        let mut things = self.things.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thing) = things.get(&key).and_then(Weak::upgrade) {
            return Ok(thing);
        }
        things.retain(|_, thing| thing.strong_count() > 0);
        let thing = Arc::new(make(file)?);
        things.insert(key, Arc::downgrade(&thing));
        Ok(thing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, memfd_create};

    #[test]
    fn the_same_file_is_the_same_thing_as_long_as_somebody_has_it() {
        let known = FileCache::default();
        let file = memfd_create("test", MemfdFlags::CLOEXEC).expect("a memfd");
        let other = memfd_create("test", MemfdFlags::CLOEXEC).expect("a memfd");
        let mut made = 0;
        let mut get = |file: &OwnedFd, len| {
            let file = file.try_clone().expect("room");
            let make = |_| {
                made += 1;
                Ok(made)
            };
            known.get(file, len, make).expect("made")
        };
        let first = get(&file, 10);
        assert_eq!([*get(&file, 10), *get(&file, 11), *get(&other, 10)], [1, 2, 3]);
        drop(first);
        assert_eq!(*get(&file, 10), 4);
    }
}
