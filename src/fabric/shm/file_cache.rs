//! A cache of objects made from files that peers send, so that all links to a process share them.
//! A process can send files of another one, so processes share nothing.
#![allow(clippy::disallowed_types)] // used when a link is made

use crate::fabric::{FabricError, FabricKind};
use rustix::fd::OwnedFd;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Device and inode: equal for two descriptors of the same memory.
type File = (u64, u64);

/// Objects made from files, by the id of the process that sent the file, the file and its length,
/// as long as somebody holds them.
pub(super) struct FileCache<T> {
    things: Mutex<HashMap<(u32, File, u64), Weak<T>>>,
}

impl<T> Default for FileCache<T> {
    fn default() -> Self {
        FileCache { things: Mutex::default() }
    }
}

impl<T> FileCache<T> {
    /// Returns the object that was made from the same file and length of this process, or makes it.
    /// For the process id 0, which processes of other PID namespaces have, it always makes one.
    ///
    /// # Errors
    /// Those of `make`.
    pub(super) fn get(
        &self,
        pid: u32,
        file: OwnedFd,
        len: u64,
        make: impl FnOnce(OwnedFd) -> Result<T, FabricError>,
    ) -> Result<Arc<T>, FabricError> {
        if pid == 0 {
            return make(file).map(Arc::new);
        }
        let stat = rustix::fs::fstat(&file).map_err(|error| FabricError::Os {
            fabric: FabricKind::Shm,
            tried: "looking at a file of the peer's".into(),
            remedy: "report this: the descriptor is valid",
            source: error.into(),
        })?;
        let key = (pid, (stat.st_dev, stat.st_ino), len);
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
    fn the_same_file_of_a_process_is_the_same_object_as_long_as_it_is_held() {
        let known = FileCache::default();
        let file = memfd_create("test", MemfdFlags::CLOEXEC).expect("a memfd");
        let other = memfd_create("test", MemfdFlags::CLOEXEC).expect("a memfd");
        let mut made = 0;
        let mut get = |pid, file: &OwnedFd, len| {
            let file = file.try_clone().expect("room");
            let make = |_| {
                made += 1;
                Ok(made)
            };
            known.get(pid, file, len, make).expect("made")
        };
        let first = get(1, &file, 10);
        assert_eq!([*get(1, &file, 10), *get(1, &file, 11), *get(1, &other, 10)], [1, 2, 3]);
        // Another process may have sent the file with another right, or may live for longer.
        assert_eq!([*get(2, &file, 10), *get(0, &file, 10), *get(0, &file, 10)], [4, 5, 6]);
        drop(first);
        assert_eq!(*get(1, &file, 10), 7);
    }
}
