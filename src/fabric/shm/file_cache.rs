//! A cache of objects made from files that peers send, so that all links to a process share them.
#![allow(clippy::disallowed_types)] // used when a link is made

use crate::fabric::{FabricError, FabricKind};
use rustix::fd::OwnedFd;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Device and inode: equal for two descriptors of the same memory.
type File = (u64, u64);

/// Objects made from files, as long as somebody holds them.
pub(super) struct FileCache<T> {
    things: Mutex<HashMap<(File, u64), Weak<T>>>,
}

impl<T> Default for FileCache<T> {
    fn default() -> Self {
        FileCache { things: Mutex::default() }
    }
}

impl<T> FileCache<T> {
    /// Returns the object that was made from the same file and length, or makes it.
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
    fn the_same_file_is_the_same_object_as_long_as_it_is_held() {
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
