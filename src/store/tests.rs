//! What every store does, and what stores in files do besides.

use super::log::HEADER;
use super::*;
use std::fs::File;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(30);

/// Each kind of store, with a second handle of the same entries.
fn each(test: impl Fn(&dyn Store, Arc<dyn Store>)) {
    let memory = MemoryStore::new();
    test(&memory, Arc::new(memory.clone()));
    let whole: Arc<dyn Store> = Arc::new(MemoryStore::new());
    whole.set("elsewhere", b"of another group").unwrap();
    test(&PrefixStore::new("a/", whole.clone()), Arc::new(PrefixStore::new("a/", whole)));
    let folder = tempfile::tempdir().unwrap();
    let open = || FileStore::open(folder.path().join("store"), LONG).unwrap();
    test(&open(), Arc::new(open()));
}

/// Tests of what every store does, from its two handles of the same entries.
macro_rules! suite {
    ($($name:ident)+) => {
        $(#[test]
        fn $name() {
            each(suite::$name);
        })+

        /// All of them, for stores of other modules. Each needs a store without entries.
        pub(crate) const SUITE: &[fn(&dyn Store, Arc<dyn Store>)] = &[$(suite::$name),+];
    };
}

suite! {
    what_one_has_set_another_one_gets
    a_get_waits_until_the_key_is_set
    a_wait_that_ends_names_what_is_missing
    sums_of_several_threads_lose_nothing
    a_value_is_set_only_where_the_expected_one_was
    one_of_several_that_want_a_key_gets_it
    keys_that_no_store_takes_are_refused_by_each_call
}

mod suite {
    use super::*;

    pub fn what_one_has_set_another_one_gets(one: &dyn Store, other: Arc<dyn Store>) {
        other.set("k", b"v").unwrap();
        assert_eq!(one.get("k", LONG).unwrap(), b"v");
        one.set("k", b"").unwrap();
        assert_eq!(other.get("k", LONG).unwrap(), b"");
        assert!(one.delete("k").unwrap() && !other.delete("k").unwrap());
        assert!(matches!(other.get("k", Duration::ZERO), Err(StoreError::Timeout { .. })));
    }

    pub fn a_get_waits_until_the_key_is_set(one: &dyn Store, other: Arc<dyn Store>) {
        let setter = std::thread::spawn(move || {
            std::thread::sleep(SHORT);
            other.set("late", b"v").unwrap();
        });
        assert_eq!(one.get("late", LONG).unwrap(), b"v");
        setter.join().unwrap();
    }

    pub fn a_wait_that_ends_names_what_is_missing(one: &dyn Store, _: Arc<dyn Store>) {
        one.set("b", b"").unwrap();
        let begin = Instant::now();
        // A server must answer within it.
        let timeout = Duration::from_secs(2);
        let error = one.wait(&["a", "b", "c"], timeout).unwrap_err();
        assert!(begin.elapsed() >= timeout);
        let StoreError::Timeout { missing, .. } = &error else { panic!("{error}") };
        assert!(missing[0].ends_with('a') && missing[1].ends_with('c') && missing.len() == 2, "{missing:?}");
        assert!(error.to_string().contains("were not set within 2s"), "{error}");
        one.set("a", b"").unwrap();
        one.set("c", b"").unwrap();
        for timeout in [Duration::ZERO, Duration::MAX] {
            one.wait(&["a", "b", "c"], timeout).unwrap();
            assert_eq!(one.get("b", timeout).unwrap(), b"");
        }
        one.wait(&[], Duration::ZERO).unwrap();
    }

    pub fn sums_of_several_threads_lose_nothing(one: &dyn Store, other: Arc<dyn Store>) {
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| (0..20).for_each(|_| assert!(other.add("n", 2).is_ok())));
            }
            (0..20).for_each(|_| assert!(one.add("n", -1).is_ok()));
        });
        assert_eq!(one.get("n", LONG).unwrap(), b"100");
        other.set("n", b"many").unwrap();
        assert!(matches!(one.add("n", 1), Err(StoreError::NotANumber { .. } | StoreError::Refused { .. })));
        assert_eq!(one.get("n", LONG).unwrap(), b"many");
    }

    pub fn a_value_is_set_only_where_the_expected_one_was(one: &dyn Store, other: Arc<dyn Store>) {
        let set = |expected: Option<&str>, desired: &str| {
            let value = other.compare_and_set("k", expected.map(str::as_bytes), desired.as_bytes()).unwrap();
            value.map(|value| String::from_utf8(value).unwrap())
        };
        assert_eq!(set(Some("x"), "y"), None);
        assert_eq!(one.count("").unwrap(), 0);
        assert_eq!(set(None, "a").as_deref(), Some("a"));
        assert_eq!(set(None, "b").as_deref(), Some("a"));
        assert_eq!(set(Some("x"), "b").as_deref(), Some("a"));
        assert_eq!(set(Some("a"), "b").as_deref(), Some("b"));
        assert_eq!(one.get("k", LONG).unwrap(), b"b");
    }

    pub fn one_of_several_that_want_a_key_gets_it(_: &dyn Store, other: Arc<dyn Store>) {
        let winners: Vec<Vec<u8>> = std::thread::scope(|scope| {
            let claim = |number: u8| {
                let other = other.clone();
                scope.spawn(move || other.compare_and_set("k", None, &[number]).unwrap().unwrap())
            };
            (0..4).map(claim).collect::<Vec<_>>().into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(winners.iter().all(|winner| *winner == winners[0]), "{winners:?}");
    }

    pub fn keys_that_no_store_takes_are_refused_by_each_call(one: &dyn Store, _: Arc<dyn Store>) {
        let long = "k".repeat(MAX_KEY + 1);
        for key in ["", &long] {
            let refused = [
                one.set(key, b"").unwrap_err(),
                one.get(key, SHORT).unwrap_err(),
                one.wait(&["k", key], SHORT).unwrap_err(),
                one.add(key, 1).unwrap_err(),
                one.compare_and_set(key, Some(b"x"), b"").unwrap_err(),
                one.delete(key).unwrap_err(),
            ];
            for error in refused {
                assert!(matches!(error, StoreError::Key { .. }), "{error}");
            }
        }
        let big = vec![0; MAX_VALUE + 1];
        assert!(matches!(one.set("k", &big), Err(StoreError::Value { .. })));
        assert!(matches!(one.compare_and_set("k", Some(b"x"), &big), Err(StoreError::Value { .. })));
        assert_eq!(one.count("").unwrap(), 0);
    }
}

/// A folder with a store file in it.
fn file() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    (folder, path)
}

fn open(path: &PathBuf) -> FileStore {
    FileStore::open(path, LONG).unwrap()
}

#[test]
fn what_a_writer_that_died_has_begun_is_cut_off_by_the_next_one() {
    let (_folder, path) = file();
    open(&path).set("a", b"1").unwrap();
    let whole = std::fs::read(&path).unwrap();
    open(&path).set("b", &[7; 500]).unwrap();
    let longer = std::fs::read(&path).unwrap();
    for cut in [whole.len() + 1, whole.len() + 12, longer.len() - 1] {
        std::fs::write(&path, &longer[..cut]).unwrap();
        let store = open(&path);
        assert_eq!(store.count("").unwrap(), 1, "cut at {cut}");
        store.set("c", b"3").unwrap();
        assert_eq!(open(&path).get("c", SHORT).unwrap(), b"3");
        assert_eq!(open(&path).count("").unwrap(), 2);
    }
    // A writer that died within the header.
    for cut in 0..HEADER.len() + 8 {
        std::fs::write(&path, &whole[..cut]).unwrap();
        let store = open(&path);
        assert_eq!(store.count("").unwrap(), 0);
        store.set("a", b"2").unwrap();
        assert_eq!(open(&path).get("a", SHORT).unwrap(), b"2");
    }
}

#[test]
fn a_long_file_is_read_in_pieces_and_one_with_many_zeros_is_refused() {
    let (_folder, path) = file();
    let store = open(&path);
    (0..100).for_each(|at: u32| store.set(&format!("key/{at}"), &[7; 60_000]).unwrap());
    let written = std::fs::metadata(&path).unwrap().len();
    let grow = |len| File::options().write(true).open(&path).unwrap().set_len(len).unwrap();
    // A writer that died had made the file longer first.
    grow(written + 70_000);
    assert_eq!(open(&path).count("key/").unwrap(), 100);
    open(&path).set("last", b"1").unwrap();
    assert!(std::fs::metadata(&path).unwrap().len() < written + 100);
    assert_eq!(open(&path).count("").unwrap(), 101);
    // More than memory has room for.
    grow(1 << 40);
    let error = FileStore::open(&path, LONG).unwrap_err().to_string();
    assert!(error.contains("it goes on with zeros: it is no store, or damaged"), "{error}");
}

#[test]
fn a_file_that_is_no_store_is_refused_and_left_alone() {
    let (_folder, path) = file();
    for content in ["#!/bin/sh\necho important", "short"] {
        std::fs::write(&path, content).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        let error = FileStore::open(&path, LONG).unwrap_err().to_string();
        assert!(error.contains("it is no store, or damaged; delete it"), "{error}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), content);
    }
}

#[test]
fn a_file_that_others_may_open_a_link_and_a_folder_are_refused() {
    let (folder, path) = file();
    open(&path).set("a", b"1").unwrap();
    for mode in [0o620, 0o604] {
        std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        let error = FileStore::open(&path, LONG).unwrap_err().to_string();
        let why = format!("others may read or write it (mode {mode:04o}): chmod go-rw");
        assert!(error.contains(&why), "{error}");
    }
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
    let link = folder.path().join("link");
    symlink(&path, &link).unwrap();
    for path in [link, folder.path().to_owned(), folder.path().join("no/where")] {
        assert!(matches!(FileStore::open(&path, LONG), Err(StoreError::File { .. })), "{path:?}");
    }
}

#[test]
fn a_lock_that_another_process_keeps_is_an_error_after_the_time() {
    let (_folder, path) = file();
    let store = FileStore::open(&path, SHORT).unwrap();
    let held = std::fs::File::open(&path).unwrap();
    rustix::fs::flock(&held, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let begin = Instant::now();
    let error = store.set("a", b"").unwrap_err().to_string();
    assert!(
        error.contains("another process has held the lock for 30ms") && begin.elapsed() < LONG,
        "{error}"
    );
    drop(held);
    store.set("a", b"").unwrap();
}

#[test]
fn a_call_waits_for_the_lock_no_longer_than_it_may_take() {
    let (_folder, path) = file();
    let store = open(&path);
    let held = std::fs::File::open(&path).unwrap();
    rustix::fs::flock(&held, rustix::fs::FlockOperation::LockExclusive).unwrap();
    std::thread::scope(|scope| {
        // Another thread of the process waits for longer, and stands in nobody's way.
        let sets = scope.spawn(|| store.set("late", b"v"));
        std::thread::sleep(SHORT);
        let begin = Instant::now();
        for error in [store.get("k", SHORT).unwrap_err(), store.wait(&["k"], SHORT).unwrap_err()] {
            assert!(matches!(error, StoreError::Timeout { .. }), "{error}");
            let error = error.to_string();
            assert!(
                error.contains("whose lock another process has: \"k\" was not set within 30ms"),
                "{error}"
            );
        }
        // A look has a limit of its own.
        let error = store.get("k", Duration::ZERO).unwrap_err().to_string();
        assert!(error.contains("another process has held the lock for 2s"), "{error}");
        assert!(begin.elapsed() < LONG / 2, "{:?}", begin.elapsed());
        drop(held);
        sets.join().unwrap().unwrap();
    });
    assert_eq!(store.get("late", Duration::ZERO).unwrap(), b"v");
}

#[test]
fn a_wait_leaves_the_lock_to_others_while_the_file_is_unchanged() {
    let (_folder, path) = file();
    // The first look of the wait has time for the lock. Later ones that take it have not enough.
    let (store, other) = (FileStore::open(&path, 15 * SHORT).unwrap(), open(&path));
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| store.get("k", LONG));
        std::thread::sleep(15 * SHORT);
        let held = std::fs::File::open(&path).unwrap();
        rustix::fs::flock(&held, rustix::fs::FlockOperation::LockExclusive).unwrap();
        std::thread::sleep(20 * SHORT);
        drop(held);
        other.set("k", b"v").unwrap();
        assert_eq!(waits.join().unwrap().unwrap(), b"v");
    });
}

#[test]
fn a_file_that_was_deleted_or_replaced_is_read_anew() {
    let (folder, path) = file();
    let store = open(&path);
    store.set("a", b"1").unwrap();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(store.count("").unwrap(), 0);
    store.set("b", b"2").unwrap();
    let other = folder.path().join("other");
    open(&other).set("c", b"3").unwrap();
    std::fs::rename(&other, &path).unwrap();
    assert_eq!((store.count("").unwrap(), store.get("c", SHORT).unwrap()), (1, b"3".to_vec()));
}

#[test]
fn a_file_with_mostly_old_values_is_written_anew() {
    let (folder, path) = file();
    let (one, other) = (open(&path), open(&path));
    one.set("kept", b"v").unwrap();
    for number in 0..100 {
        one.set("k", &vec![number; MAX_VALUE]).unwrap();
        assert_eq!(other.get("k", SHORT).unwrap()[0], number);
    }
    assert!(std::fs::metadata(&path).unwrap().len() < 2 << 20);
    assert_eq!(other.get("kept", SHORT).unwrap(), b"v");
    assert_eq!(open(&path).count("").unwrap(), 2);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left of the writing");
}

#[test]
fn a_change_is_made_although_its_file_can_t_be_written_anew() {
    let (folder, _) = file();
    // The name of the new file would be too long.
    let path = folder.path().join("s".repeat(250));
    let (one, other) = (open(&path), open(&path));
    for number in 0..100 {
        one.set("k", &vec![number; MAX_VALUE]).unwrap();
        assert_eq!(other.get("k", SHORT).unwrap()[0], number);
    }
    assert!(std::fs::metadata(&path).unwrap().len() > 6 << 20, "nothing was written anew");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left of the writing");
}
