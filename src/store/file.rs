//! A store in a file that several processes have, on one host or on a shared file system.

use super::error::StoreError;
use super::log::{self, HEADER, LogRecord};
use super::table::{StoreTable, check_key, check_value};
use super::{LOOK, Store};
use crate::wire::own_user;
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Pauses between two looks at the file: the first, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));
/// A file that seems unchanged is looked at without its lock for this long. So many processes that
/// wait leave the lock to those that write.
const WITHOUT_LOCK: Duration = Duration::from_secs(2);
/// Bytes of the header and of the number that was drawn for the file.
const START: u64 = HEADER.len() as u64 + 8;
/// Bytes that one read takes: more than the longest record, and no more than memory has room for,
/// however long the file is.
const PIECE: u64 = 1 << 20;
/// A file shorter than this is not written anew.
const SHORT: u64 = 1 << 20;
/// A file is written anew when it has so many times the bytes that its entries need.
const WASTE: u64 = 4;

/// A store in a file. Processes on several hosts meet by it if they share a file system that has
/// locks.
///
/// Each call waits for the lock of the file (`flock`), for `timeout` at most, and no longer than
/// the call itself may take. The kernel frees the lock of a process that dies. If it has forked a
/// child during the call, the kernel does so when that child has ended too. What the process has
/// written in part counts for nothing. Only this user may write the file; whoever else can write it
/// could send members elsewhere. A file outlives the processes that use it: give each run a file of
/// its own, or delete it.
///
/// ```
/// use std::time::Duration;
/// use tensorwire::{FileStore, Store};
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("store");
/// let store = FileStore::open(&path, Duration::from_secs(10))?;
/// store.set("address/0", b"10.0.0.1:4000")?;
/// // In another process:
/// let other = FileStore::open(&path, Duration::from_secs(10))?;
/// assert_eq!(other.get("address/0", Duration::from_secs(10))?, b"10.0.0.1:4000");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct FileStore {
    path: PathBuf,
    timeout: Duration,
    cache: Mutex<Cache>,
}

/// What was read of the file so far.
#[derive(Debug, Default)]
struct Cache {
    table: StoreTable,
    /// The number of the file that was read.
    number: u64,
    /// Where the next record begins; 0 for a file without header.
    end: u64,
    /// The log says that the file could not be written anew.
    is_waste_told: bool,
}

/// A file as it was at some time. Records that are appended change the length, and a file that is
/// written anew is another one.
#[derive(PartialEq)]
struct FileState {
    id: (u64, u64),
    length: u64,
    /// Seconds and nanoseconds.
    written: (i64, i64),
}

/// The open file with its lock, which is freed at the end.
struct LockedFile {
    file: File,
    /// The process that has taken the lock.
    process: u32,
}

impl Drop for LockedFile {
    /// A child that was forked meanwhile has the open file too, and with it the lock. So closing it
    /// here would not free the lock, and the child must not do so.
    fn drop(&mut self) {
        if std::process::id() == self.process {
            let _ = flock(&self.file, FlockOperation::Unlock);
        }
    }
}

impl FileStore {
    /// The store in this file, which is made if it is not there. A call waits for `timeout` at most
    /// for other processes that use the file.
    ///
    /// # Errors
    /// [`StoreError::File`] if the file can't be opened or locked, belongs to another user, can be
    /// read or written by others, or has other content.
    pub fn open(path: impl Into<PathBuf>, timeout: Duration) -> Result<Self, StoreError> {
        let store = FileStore { path: path.into(), timeout, cache: Mutex::default() };
        store.read(timeout, |_| ())?.ok_or_else(|| store.held(timeout))?;
        Ok(store)
    }

    fn failed(&self, tried: &'static str, why: impl ToString) -> StoreError {
        StoreError::File { path: self.path.clone(), tried, why: why.to_string() }
    }

    /// Another process has had the lock for all of this time.
    fn held(&self, within: Duration) -> StoreError {
        let why =
            format!("another process has held the lock for {within:?}: is it stopped? `fuser` names it");
        self.failed("locking", why)
    }

    /// Looks at the present entries. `None` if it gets no lock in time.
    fn read<R>(
        &self,
        within: Duration,
        look: impl FnOnce(&StoreTable) -> R,
    ) -> Result<Option<R>, StoreError> {
        let locked = self.lock(FlockOperation::NonBlockingLockShared, within)?;
        let Some(LockedFile { file, .. }) = &locked else { return Ok(None) };
        // Nobody waits for the lock of the file while it has this one.
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        self.refresh(file, &mut cache)?;
        Ok(Some(look(&cache.table)))
    }

    /// Lets `change` look at the present entries, and appends the record that it returns.
    fn write<R>(
        &self,
        change: impl FnOnce(&StoreTable, &mut Vec<u8>) -> Result<R, StoreError>,
    ) -> Result<R, StoreError> {
        let locked = self.lock(FlockOperation::NonBlockingLockExclusive, self.timeout)?;
        let LockedFile { file, .. } = &locked.ok_or_else(|| self.held(self.timeout))?;
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        self.refresh(file, &mut cache)?;
        let mut bytes = Vec::new();
        let done = change(&cache.table, &mut bytes)?;
        if bytes.is_empty() {
            return Ok(done);
        }
        self.append(file, &mut cache, &bytes).map_err(|error| self.failed("writing", error))?;
        // It was checked that there is room.
        log::apply(&mut cache.table, &bytes).map_err(|why| self.failed("writing", why))?;
        // The change is made, so this is no error of the call.
        if let Err(error) = self.compact(&mut cache)
            && !std::mem::replace(&mut cache.is_waste_told, true)
        {
            let path = self.path.display();
            tracing::warn!(
                "{path} has mostly old values and grows, as it can't be written anew: {error}. Let this user \
                 make files in its folder"
            );
        }
        Ok(done)
    }

    fn append(&self, file: &File, cache: &mut Cache, bytes: &[u8]) -> io::Result<()> {
        if cache.end == 0 {
            file.set_len(0)?;
            cache.number = random()?;
            file.write_all_at(&start(cache.number), 0)?;
            cache.end = START;
        }
        // The unfinished record of a writer that died.
        file.set_len(cache.end)?;
        if let Err(error) = file.write_all_at(bytes, cache.end) {
            // If this fails too, the next writer does it.
            let _ = file.set_len(cache.end);
            return Err(error);
        }
        cache.end += bytes.len() as u64;
        Ok(())
    }

    /// Writes a file anew that has mostly old values. A process that waits for the lock sees that
    /// the file was replaced.
    fn compact(&self, cache: &mut Cache) -> io::Result<()> {
        if cache.end < SHORT {
            return Ok(());
        }
        let mut bytes = Vec::new();
        cache.table.entries().for_each(|(key, value)| LogRecord::Set(key, value).write(&mut bytes));
        if cache.end < WASTE * bytes.len() as u64 {
            return Ok(());
        }
        let number = random()?;
        let mut name = self.path.clone().into_os_string();
        name.push(format!(".{number:016x}"));
        let fresh = PathBuf::from(name);
        let written = (|| {
            let file = options().create_new(true).open(&fresh)?;
            file.write_all_at(&[&start(number)[..], &bytes].concat(), 0)?;
            file.sync_all()?;
            std::fs::rename(&fresh, &self.path)
        })();
        if written.is_err() {
            let _ = std::fs::remove_file(&fresh);
        } else {
            (cache.number, cache.end) = (number, START + bytes.len() as u64);
        }
        written
    }

    /// Opens and locks the file. `None` if another one has the lock all the time.
    fn lock(&self, how: FlockOperation, within: Duration) -> Result<Option<LockedFile>, StoreError> {
        let (begin, mut pause) = (Instant::now(), PAUSES.0);
        loop {
            let file =
                options().create(true).open(&self.path).map_err(|error| self.failed("opening", error))?;
            let facts = file.metadata().map_err(|error| self.failed("opening", error))?;
            check(&facts).map_err(|why| self.failed("opening", why))?;
            match flock(&file, how) {
                // Replaced or deleted since it was opened: the lock of the old one is useless.
                Ok(()) if std::fs::metadata(&self.path).is_ok_and(|now| id(&now) == id(&facts)) => {
                    return Ok(Some(LockedFile { file, process: std::process::id() }));
                }
                Ok(()) | Err(Errno::WOULDBLOCK | Errno::INTR) => {}
                Err(error) => return Err(self.failed("locking", error)),
            }
            let left = within.saturating_sub(begin.elapsed());
            if left.is_zero() {
                return Ok(None);
            }
            std::thread::sleep(pause.min(left));
            pause = PAUSES.1.min(pause * 2);
        }
    }

    /// Reads what was written since the last look.
    fn refresh(&self, file: &File, cache: &mut Cache) -> Result<(), StoreError> {
        let failed = |error: io::Error| self.failed("reading", error);
        let length = file.metadata().map_err(failed)?.len();
        let mut head = [0; START as usize];
        let number = match length {
            START.. => {
                file.read_exact_at(&mut head, 0).map_err(failed)?;
                let number = head.strip_prefix(HEADER).and_then(|number| number.try_into().ok());
                u64::from_le_bytes(number.ok_or_else(|| self.foreign("it does not begin like one"))?)
            }
            // Nothing, or the start of a writer that died.
            _ => {
                let head = &mut head[..length as usize];
                file.read_exact_at(head, 0).map_err(failed)?;
                let known = head.len().min(HEADER.len());
                if head[..known] != HEADER[..known] {
                    return Err(self.foreign("it does not begin like one"));
                }
                *cache = Cache::default();
                return Ok(());
            }
        };
        if cache.end == 0 || cache.number != number || length < cache.end {
            *cache = Cache { table: StoreTable::default(), number, end: START, ..*cache };
        }
        loop {
            let mut bytes = vec![0; (length - cache.end).min(PIECE) as usize];
            file.read_exact_at(&mut bytes, cache.end).map_err(failed)?;
            let read = match log::apply(&mut cache.table, &bytes) {
                // A writer that died leaves less.
                Ok(0) if length - cache.end > PIECE => Err("it goes on with zeros"),
                read => read,
            };
            match read {
                Ok(0) => return Ok(()),
                Ok(read) => cache.end += read as u64,
                Err(why) => {
                    *cache = Cache::default();
                    return Err(self.foreign(why));
                }
            }
        }
    }

    fn foreign(&self, why: &str) -> StoreError {
        self.failed("reading", format!("{why}: it is no store, or damaged; delete it, or name another file"))
    }

    /// Looks at the entries again and again until `found` returns a value.
    fn until<R>(
        &self,
        keys: &[&str],
        timeout: Duration,
        mut found: impl FnMut(&StoreTable) -> Result<R, Vec<String>>,
    ) -> Result<R, StoreError> {
        let (begin, mut pause) = (Instant::now(), PAUSES.0);
        let mut missing: Vec<String> = keys.iter().map(|key| (*key).to_owned()).collect();
        let file = format!("the store file {}", self.path.display());
        let mut store = file.clone();
        let mut looked_at: Option<(FileState, Instant)> = None;
        loop {
            let (state, now) = (self.state(), Instant::now());
            let is_unchanged = looked_at
                .as_ref()
                .is_some_and(|(before, at)| state.as_ref() == Some(before) && now - *at < WITHOUT_LOCK);
            if !is_unchanged {
                let left = timeout.saturating_sub(begin.elapsed());
                let limit = self.timeout.min(if timeout.is_zero() { LOOK } else { left });
                store = match self.read(limit, &mut found)? {
                    Some(Ok(found)) => return Ok(found),
                    // It is the time of the store that is over, not that of the call.
                    None if timeout.is_zero() || limit < left => return Err(self.held(limit)),
                    None => format!("{file}, whose lock another process has"),
                    Some(Err(absent)) => {
                        missing = absent;
                        looked_at = state.map(|state| (state, now));
                        file.clone()
                    }
                };
            }
            let left = timeout.saturating_sub(begin.elapsed());
            if left.is_zero() {
                return Err(StoreError::Timeout { store, missing, waited: timeout });
            }
            std::thread::sleep(pause.min(left));
            pause = PAUSES.1.min(pause * 2);
        }
    }

    /// What changes with the file, as it is now. A file system of the network asks its server when
    /// a file is opened.
    fn state(&self) -> Option<FileState> {
        let facts = options().open(&self.path).and_then(|file| file.metadata()).ok()?;
        Some(FileState { id: id(&facts), length: facts.len(), written: (facts.mtime(), facts.mtime_nsec()) })
    }

    /// As given to [`FileStore::open`].
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// A file that only this user reads and writes. No link to elsewhere is followed, and no pipe
/// blocks.
fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
    // The bits of these flags fit.
    options.read(true).write(true).mode(0o600).custom_flags(flags.bits() as i32);
    options
}

fn check(facts: &std::fs::Metadata) -> Result<(), String> {
    if !facts.is_file() {
        return Err("it is no regular file".into());
    }
    let me = own_user().map_err(|shared| shared.to_string())?;
    if facts.uid() != me {
        return Err(format!("it belongs to user {}, and this process runs as user {me}", facts.uid()));
    }
    // Who may read it can lock it.
    match facts.mode() & 0o066 {
        0 => Ok(()),
        _ => Err(format!("others may read or write it (mode {:04o}): chmod go-rw", facts.mode() & 0o7777)),
    }
}

fn id(facts: &std::fs::Metadata) -> (u64, u64) {
    (facts.dev(), facts.ino())
}

fn random() -> io::Result<u64> {
    getrandom::u64().map_err(|error| io::Error::other(error.to_string()))
}

fn start(number: u64) -> [u8; START as usize] {
    let mut start = [0; START as usize];
    let (header, rest) = start.split_at_mut(HEADER.len());
    header.copy_from_slice(HEADER);
    rest.copy_from_slice(&number.to_le_bytes());
    start
}

impl Store for FileStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        self.write(|table, out| put(table, key, value, out))
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, StoreError> {
        check_key(key)?;
        self.until(&[key], timeout, |table| {
            table.get(key).map(<[u8]>::to_vec).ok_or_else(|| vec![key.to_owned()])
        })
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<(), StoreError> {
        keys.iter().try_for_each(|key| check_key(key))?;
        self.until(keys, timeout, |table| {
            let missing: Vec<String> = table.missing(keys).into_iter().map(str::to_owned).collect();
            if missing.is_empty() { Ok(()) } else { Err(missing) }
        })
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64, StoreError> {
        self.write(|table, out| {
            let sum = table.sum(key, amount)?;
            put(table, key, sum.to_string().as_bytes(), out)?;
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
        check_value(key, desired)?;
        self.write(|table, out| {
            if table.get(key) != expected {
                return Ok(table.get(key).map(<[u8]>::to_vec));
            }
            put(table, key, desired, out)?;
            Ok(Some(desired.to_vec()))
        })
    }

    fn delete(&self, key: &str) -> Result<bool, StoreError> {
        check_key(key)?;
        self.write(|table, out| {
            let is_set = table.get(key).is_some();
            if is_set {
                LogRecord::Delete(key).write(out);
            }
            Ok(is_set)
        })
    }

    fn count(&self, prefix: &str) -> Result<u64, StoreError> {
        let count = self.read(self.timeout, |table| table.count(prefix) as u64)?;
        count.ok_or_else(|| self.held(self.timeout))
    }
}

/// The record that sets a key for which the table has room.
fn put(table: &StoreTable, key: &str, value: &[u8], out: &mut Vec<u8>) -> Result<(), StoreError> {
    table.check_room(key, value)?;
    LogRecord::Set(key, value).write(out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use FlockOperation::NonBlockingLockExclusive as EXCLUSIVE;

    const SHORT: Duration = Duration::from_millis(30);

    /// A store, its file with the lock, and what a child has of that which is forked now.
    fn forked_in_a_call(folder: &tempfile::TempDir) -> (FileStore, LockedFile, LockedFile) {
        let store = FileStore::open(folder.path().join("store"), SHORT).unwrap();
        let locked = store.lock(EXCLUSIVE, SHORT).unwrap().unwrap();
        // The duplicate of a descriptor is the same open file, as that of a child is.
        let of_child = LockedFile { file: locked.file.try_clone().unwrap(), process: locked.process + 1 };
        (store, locked, of_child)
    }

    #[test]
    fn a_child_that_was_forked_during_a_call_keeps_no_lock() {
        let folder = tempfile::tempdir().unwrap();
        let (store, locked, of_child) = forked_in_a_call(&folder);
        drop(locked);
        store.set("k", b"v").unwrap();
        drop(of_child);
    }

    #[test]
    fn a_child_does_not_free_the_lock_of_its_parent() {
        let folder = tempfile::tempdir().unwrap();
        let (store, locked, of_child) = forked_in_a_call(&folder);
        drop(of_child);
        assert!(store.set("k", b"v").is_err(), "the parent has the lock");
        drop(locked);
        store.set("k", b"v").unwrap();
    }
}
