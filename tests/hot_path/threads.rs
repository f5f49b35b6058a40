//! Counts of heap and system calls per thread, readable from every other thread.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicI32, AtomicI64, AtomicU64, Ordering::Relaxed};

/// One thread's counts.
struct Row {
    tid: AtomicI32,
    allocations: AtomicU64,
    frees: AtomicU64,
    calls: AtomicU64,
    last_call: AtomicI64,
}

impl Row {
    const fn free() -> Row {
        Row {
            tid: AtomicI32::new(0),
            allocations: AtomicU64::new(0),
            frees: AtomicU64::new(0),
            calls: AtomicU64::new(0),
            last_call: AtomicI64::new(-1),
        }
    }
}

/// A fixed table, so that counting neither allocates nor enters the kernel.
static ROWS: [Row; 256] = [const { Row::free() }; 256];

thread_local! {
    static MINE: Cell<Option<&'static Row>> = const { Cell::new(None) };
    /// The depth of calls into a library that is not counted, and the number of such calls.
    static ELSEWHERE: Cell<(u32, u64)> = const { Cell::new((0, 0)) };
}

/// Stops counting the calling thread until it returns from the library. Safe in a signal handler,
/// like the functions below.
#[allow(dead_code)] // used with the scripted library only
pub extern "C" fn gone_elsewhere() {
    ELSEWHERE.with(|elsewhere| elsewhere.set((elsewhere.get().0 + 1, elsewhere.get().1 + 1)));
}

/// The end of what [`gone_elsewhere`] has begun.
#[allow(dead_code)] // as above
pub extern "C" fn came_back() {
    ELSEWHERE.with(|elsewhere| elsewhere.set((elsewhere.get().0 - 1, elsewhere.get().1)));
}

/// How often the calling thread was in the library.
#[allow(dead_code)] // as above
pub fn times_elsewhere() -> u64 {
    ELSEWHERE.with(Cell::get).1
}

fn is_ours() -> bool {
    ELSEWHERE.with(Cell::get).0 == 0
}

fn mine() -> &'static Row {
    MINE.with(|mine| match mine.get() {
        Some(row) => row,
        None => {
            let tid = super::trap::thread_id();
            let free = |row: &&Row| row.tid.compare_exchange(0, tid, Relaxed, Relaxed).is_ok();
            let row = ROWS.iter().find(free).unwrap_or_else(|| std::process::abort());
            mine.set(Some(row));
            row
        }
    })
}

/// Counts a system call of the calling thread. Safe in a signal handler.
pub fn count_call(number: i64) {
    if !is_ours() {
        return;
    }
    let row = mine();
    row.calls.fetch_add(1, Relaxed);
    row.last_call.store(number, Relaxed);
}

/// The ids of the threads with one of these names.
pub fn ids_of(names: &[&str]) -> Vec<i32> {
    let ids = ROWS.iter().map(|row| row.tid.load(Relaxed)).filter(|tid| *tid != 0);
    ids.filter(|tid| names.contains(&&*name_of(*tid))).collect()
}

fn name_of(tid: i32) -> String {
    let comm = std::fs::read_to_string(format!("/proc/self/task/{tid}/comm"));
    comm.map_or_else(|_| "(ended)".into(), |comm| comm.trim().to_owned())
}

/// The counts of a thread between two snapshots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Activity {
    /// The kernel's name of the thread.
    pub name: String,
    pub allocations: u64,
    pub frees: u64,
    pub calls: u64,
    /// The number of its last system call, even before the first snapshot; -1 if there was none.
    pub last_call: i64,
}

/// A snapshot of all counts.
pub struct Start([Counts; 256]);

#[derive(Clone, Copy)]
struct Counts {
    allocations: u64,
    frees: u64,
    calls: u64,
    last_call: i64,
}

impl Start {
    /// Takes a snapshot.
    pub fn now() -> Start {
        Start(std::array::from_fn(|at| counts(&ROWS[at])))
    }

    /// The counts of every thread since, including those at 0.
    pub fn until(&self, end: &Start) -> Vec<Activity> {
        let rows = ROWS.iter().zip(self.0.iter().zip(&end.0));
        let known = rows.filter(|(row, _)| row.tid.load(Relaxed) != 0);
        known.map(|(row, (from, to))| activity(row, *from, *to)).collect()
    }
}

fn counts(row: &Row) -> Counts {
    Counts {
        allocations: row.allocations.load(Relaxed),
        frees: row.frees.load(Relaxed),
        calls: row.calls.load(Relaxed),
        last_call: row.last_call.load(Relaxed),
    }
}

fn activity(row: &Row, from: Counts, to: Counts) -> Activity {
    Activity {
        name: name_of(row.tid.load(Relaxed)),
        allocations: to.allocations - from.allocations,
        frees: to.frees - from.frees,
        calls: to.calls - from.calls,
        last_call: to.last_call,
    }
}

fn count_heap(allocations: u64, frees: u64) {
    let row = mine();
    if is_ours() {
        row.allocations.fetch_add(allocations, Relaxed);
        row.frees.fetch_add(frees, Relaxed);
    }
}

/// The system's allocator, with calls counted per thread.
struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: each call goes to the system's allocator as it came; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count_heap(1, 0);
        // SAFETY: the caller's promises are those of the system's allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count_heap(1, 0);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count_heap(0, 1);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count_heap(1, 1);
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }
}
