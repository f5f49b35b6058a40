//! Two processes and the memory that they share.
//!
//! Each process has a segment of its own. The owner maps its segment writable, and the other
//! process maps the same segment for reading only. [`OwnWord`] and [`PeerWord`] carry this rule.

use rustix::fd::OwnedFd;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous};
use rustix::process::{Pid, Signal, WaitOptions, set_parent_process_death_signal, waitpid};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Bytes of a segment.
pub const SEGMENT: usize = 128 << 20;
/// Bytes at the start of a segment that [`Words`] may use. Values lie behind them.
pub const WORDS: usize = 2 << 20;
/// Bytes of a large page. Segments begin at multiples of it.
const LARGE_PAGE: usize = 2 << 20;

/// Slots of the longest ring.
pub const RING: usize = 256;
/// Slots of the bare ring.
pub const BARE_RING: usize = 32;
/// Loan words: one for each value cell of 1,024 edges with windows of 16.
pub const LOANS: usize = 16 * 1024;
/// Places of loans that a borrower keeps.
pub const LOAN_PLACES: usize = 64;

/// Set by the signal of a timer. Each wait looks at it once in 1,024 looks.
static DEADLINE: AtomicBool = AtomicBool::new(false);

/// A word of the own segment.
#[repr(transparent)]
pub struct OwnWord(AtomicU64);

impl OwnWord {
    #[inline(always)]
    pub fn store(&self, value: u64, ordering: Ordering) {
        self.0.store(value, ordering);
    }
}

/// A word of the peer's segment.
#[repr(transparent)]
pub struct PeerWord(AtomicU64);

impl PeerWord {
    #[inline(always)]
    pub fn load(&self, ordering: Ordering) -> u64 {
        self.0.load(ordering)
    }
}

/// A word on a pair of cache lines of its own, because prefetchers fetch pairs.
#[repr(C, align(128))]
pub struct Line<W>(pub W);

/// A slot of a ring: one cache line.
#[repr(C, align(64))]
pub struct Slot<W>(pub [W; 8]);

/// What the owner of a segment writes and its peer reads, besides values.
#[repr(C)]
pub struct Words<W> {
    /// Meetings that the owner has reached: [`Process::meet`].
    pub meetings: Line<W>,
    /// The round for which the owner waits.
    pub ready: Line<W>,
    /// Not 0 while the owner sleeps.
    pub idle: Line<W>,
    /// Records that the owner has consumed.
    pub received: Line<W>,
    /// The first step that is not over at the owner.
    pub over: Line<W>,
    /// Times that the scheduler has taken the CPU from the owner.
    pub preemptions: Line<W>,
    /// The ring of the reference.
    pub bare_ring: [Slot<W>; BARE_RING],
    /// The last decision of the measuring process: see [`Process::decide`].
    pub decision: Line<W>,
    /// Records of the owner.
    pub ring: [Slot<W>; RING],
    /// The owner's answers to values that its peer has lent: one word for each value cell.
    pub loans: [W; LOANS],
    /// The ends of loans that the owner kept.
    pub loan_places: [W; LOAN_PLACES],
}

const _: () = assert!(size_of::<Words<OwnWord>>() <= WORDS);

/// The segment of this process.
#[derive(Clone, Copy)]
pub struct OwnSegment {
    pub words: &'static Words<OwnWord>,
    base: *mut u8,
}

impl OwnSegment {
    /// The bytes for values: the first one, and the one behind the last.
    pub fn values(self) -> (*mut u8, *mut u8) {
        (self.base.wrapping_add(WORDS), self.base.wrapping_add(SEGMENT))
    }

    /// Where `data` lies in the segment.
    #[inline(always)]
    pub fn place(self, data: *const u8) -> u64 {
        data as u64 - self.base as u64
    }
}

/// The segment of the other process.
#[derive(Clone, Copy)]
pub struct PeerSegment {
    pub words: &'static Words<PeerWord>,
    base: *const u8,
}

impl PeerSegment {
    /// The value at `place`, if the segment holds all of its bytes.
    #[inline(always)]
    pub fn value(self, place: u64, len: u32) -> Option<*const u8> {
        let end = place.checked_add(u64::from(len))?;
        (end <= SEGMENT as u64).then(|| self.base.wrapping_add(place as usize))
    }
}

/// One of the two processes.
pub struct Process {
    /// 0 for the process that measures, 1 for its child.
    pub side: usize,
    pub own: OwnSegment,
    pub peer: PeerSegment,
    /// A line that both processes write. Only the reference uses it.
    pub line: &'static AtomicU64,
    /// The CPUs of the two processes.
    pub cpus: [usize; 2],
    meetings: u64,
    child: Option<Pid>,
}

impl Process {
    /// Forks. Both processes return, each pinned to a CPU of its own.
    pub fn pair() -> Process {
        let cpus = sched_getaffinity(None).expect("the CPUs of this process");
        let cpus: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| cpus.is_set(*cpu)).take(2).collect();
        assert_eq!(cpus.len(), 2, "two CPUs are needed, and this process may use {cpus:?}");
        let segments = [segment(SEGMENT), segment(SEGMENT)];
        let line = segment(LARGE_PAGE);
        // SAFETY: the handler only stores to an atomic, which a handler may do.
        unsafe { libc::signal(libc::SIGALRM, on_deadline as *const () as libc::sighandler_t) };
        // SAFETY: this process has one thread, so the child may use all that it inherits.
        let child = unsafe { libc::fork() };
        assert!(child >= 0, "fork failed: {}", std::io::Error::last_os_error());
        let side = usize::from(child == 0);
        if side == 1 {
            set_parent_process_death_signal(Some(Signal::KILL)).expect("a signal when the parent ends");
        }
        let mut own_cpu = CpuSet::new();
        own_cpu.set(cpus[side]);
        sched_setaffinity(None, &own_cpu).expect("a CPU of this process");
        let own = map(&segments[side], SEGMENT, ProtFlags::READ | ProtFlags::WRITE);
        let peer: *const u8 = map(&segments[1 - side], SEGMENT, ProtFlags::READ);
        let line = map(&line, LARGE_PAGE, ProtFlags::READ | ProtFlags::WRITE);
        Process {
            side,
            // SAFETY: mapped until this process ends, aligned to a large page, and large enough, as
            // an assertion above checks. Any bytes are valid words.
            own: OwnSegment { words: unsafe { &*own.cast() }, base: own },
            // SAFETY: as above. The mapping is for reading only; a `PeerWord` is only loaded, which
            // is allowed for words of 64 bits in such memory.
            peer: PeerSegment { words: unsafe { &*peer.cast() }, base: peer },
            // SAFETY: as above.
            line: unsafe { &*line.cast() },
            cpus: [cpus[0], cpus[1]],
            meetings: 0,
            child: Pid::from_raw(child),
        }
    }

    /// Sets all words of the own segment to 0, except the count of meetings.
    pub fn clear(&self) {
        let words = self.own.words;
        let lines = [&words.ready, &words.idle, &words.received, &words.over, &words.preemptions];
        let slots = words.bare_ring.iter().chain(&words.ring).flat_map(|slot| &slot.0);
        let loans = words.loans.iter().chain(&words.loan_places);
        lines.into_iter().map(|line| &line.0).chain(slots).chain(loans).for_each(|word| {
            word.store(0, Ordering::Relaxed);
        });
    }

    /// Waits until the other process has come to the same meeting.
    pub fn meet(&mut self) {
        self.meetings += 1;
        self.own.words.meetings.0.store(self.meetings, Ordering::Release);
        let mut looks = 0u32;
        while self.peer.words.meetings.0.load(Ordering::Acquire) < self.meetings {
            looks += 1;
            // A sleeping process leaves its CPU to others while the peer measures alone.
            if looks > 10_000 {
                assert!(!self.child_has_ended(), "the other process has ended");
                std::thread::sleep(Duration::from_micros(500));
            }
        }
    }

    /// Tells the peer that this side is ready for a round.
    #[inline(always)]
    pub fn set_ready(&self, round: u64) {
        self.own.words.ready.0.store(round + 1, Ordering::Release);
    }

    /// Waits until the peer is ready for a round.
    #[inline(always)]
    pub fn wait_for_peer(&self, round: u64) {
        wait_until(|| self.peer.words.ready.0.load(Ordering::Acquire) > round);
    }

    fn child_has_ended(&self) -> bool {
        let ended = |child| waitpid(Some(child), WaitOptions::NOHANG).is_ok_and(|status| status.is_some());
        self.child.is_some_and(ended)
    }

    /// The decision of the measuring process, for both.
    pub fn decide(&mut self, decision: bool) -> bool {
        self.own.words.decision.0.store(u64::from(decision), Ordering::Release);
        self.meet();
        let theirs = self.peer.words.decision.0.load(Ordering::Acquire) == 1;
        self.meet();
        if self.side == 0 { decision } else { theirs }
    }

    /// Ends waits of this process that take longer than this. 0 seconds end the timer.
    pub fn limit(&self, seconds: u32) {
        // SAFETY: a call without memory.
        unsafe { libc::alarm(seconds) };
    }

    /// Ends this process. The measuring process waits for its child.
    pub fn end(self) {
        let Some(child) = self.child else { std::process::exit(0) };
        waitpid(Some(child), WaitOptions::empty()).expect("the child");
    }
}

extern "C" fn on_deadline(_signal: libc::c_int) {
    DEADLINE.store(true, Ordering::Relaxed);
}

/// Whether waits should end.
#[inline(always)]
pub fn deadline_passed() -> bool {
    DEADLINE.load(Ordering::Relaxed)
}

/// Spins until the condition holds.
#[inline(always)]
pub fn wait_until(holds: impl Fn() -> bool) {
    let mut looks = 0u32;
    while !holds() {
        looks += 1;
        assert!(!looks.is_multiple_of(1024) || !deadline_passed(), "the other process stands still");
    }
}

/// Times that the scheduler took the CPU from this process.
pub fn preemptions() -> u64 {
    // SAFETY: all bytes 0 are a valid `rusage`, and the kernel writes to nothing else.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage.ru_nivcsw as u64
    }
}

/// Shared memory that is populated, with large pages if the kernel has them.
fn segment(bytes: usize) -> OwnedFd {
    let file = memfd_create("short_path", MemfdFlags::CLOEXEC).expect("a memfd");
    ftruncate(&file, bytes as u64).expect("memory");
    let mapping = map(&file, bytes, ProtFlags::READ | ProtFlags::WRITE);
    // SAFETY: mapped above, and nothing points there.
    unsafe { rustix::mm::munmap(mapping.cast(), bytes) }.expect("the mapping ends");
    file
}

/// Maps a file at a multiple of a large page, and populates the mapping.
fn map(file: &OwnedFd, bytes: usize, access: ProtFlags) -> *mut u8 {
    let populate = match access.contains(ProtFlags::WRITE) {
        true => Advice::LinuxPopulateWrite,
        false => Advice::LinuxPopulateRead,
    };
    // SAFETY: the fixed mapping replaces a part of the reservation, which nothing else uses.
    unsafe {
        let reserved = mmap_anonymous(
            ptr::null_mut(),
            bytes + LARGE_PAGE,
            ProtFlags::empty(),
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        );
        let reserved = reserved.expect("address space");
        let start = reserved.map_addr(|address| address.next_multiple_of(LARGE_PAGE));
        let mapping = mmap(start, bytes, access, MapFlags::SHARED | MapFlags::FIXED, file, 0);
        let mapping = mapping.expect("a mapping");
        madvise(mapping, bytes, populate).expect("memory");
        // A kernel without large pages for shared memory refuses, and base pages remain.
        libc::madvise(mapping.cast(), bytes, libc::MADV_COLLAPSE);
        mapping.cast()
    }
}

/// Bytes of shared memory that large pages map in this process.
pub fn large_pages() -> usize {
    let maps = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
    let line = maps.lines().find_map(|line| line.strip_prefix("ShmemPmdMapped:"));
    let kilobytes = line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<usize>().ok());
    kilobytes.unwrap_or(0) << 10
}

/// Fetches a line that will be written.
#[inline(always)]
pub fn prefetch_for_write<T>(place: &T) {
    // Not the intrinsic, which without a target feature fetches the line for reading only.
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads and writes nothing and does not fault, whatever the address.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) place, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}
