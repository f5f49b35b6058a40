//! Regions: large pieces of memory that peers on the same host can map for reading.

pub(crate) mod limits;
pub(crate) mod lock;
pub(crate) mod mapping;
pub(crate) mod memfd;
pub(crate) mod pages;
pub(crate) mod peer;
pub(crate) mod report;
pub(crate) mod smaps;

use self::lock::Shortfall;
use self::mapping::RegionMapping;
use self::memfd::grow_memfd;
use self::pages::{PageKind, PagePolicy, reserve_advice, unsuited};
use self::peer::SEALS;
use self::report::RegionReport;
use crate::memory::byte_count::ByteCount;
use crate::memory::fork::SharedMapping;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{MemfdFlags, fcntl_add_seals, memfd_create};
use std::io;
use std::path::Path;
use std::ptr::NonNull;

/// Whether a region's pages are locked in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum LockPolicy {
    /// Lock as much as the process's limit permits. The report says how much.
    #[default]
    BestEffort,
    /// Lock all of it, or fail.
    Require,
    /// Do not lock.
    No,
}

/// The NUMA node of a region's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum NumaPolicy {
    /// The system chooses.
    #[default]
    Any,
    /// This node, as far as it has memory and the system permits. The report says if the pages are
    /// elsewhere. A memory policy of the process (`numactl`) is stronger.
    Prefer(u32),
    /// This node alone; otherwise the region is not made.
    Bind(u32),
}

/// Settings of a region.
#[derive(Clone, Debug)]
pub struct RegionOptions {
    /// Size in bytes, at least 1. Rounded up to whole pages of the kind that the region gets.
    pub size: u64,
    /// The kind of pages to ask for.
    pub pages: PagePolicy,
    /// Whether it is an error if the named kind is not available. If not, lesser kinds are tried,
    /// and the report gives the reasons.
    pub require: bool,
    /// Whether to lock the pages.
    pub lock: LockPolicy,
    /// The NUMA node that the pages come from.
    pub numa: NumaPolicy,
}

impl RegionOptions {
    /// A region of `size` bytes on the best available pages, locked as far as permitted.
    pub fn new(size: u64) -> Self {
        RegionOptions {
            size,
            pages: PagePolicy::Auto,
            require: false,
            lock: LockPolicy::BestEffort,
            numa: NumaPolicy::Any,
        }
    }
}

/// Why a region could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegionError {
    /// The size is 0 or too large.
    #[error("a region of {size} bytes was asked for: it must have at least 1 and at most 2^46")]
    Size {
        /// The size in bytes.
        size: u64,
    },
    /// The required kind of pages is not available.
    #[error("a region of {} could not be made on the required {wanted} pages: {why}", ByteCount(*.size))]
    Pages {
        /// Size in bytes.
        size: u64,
        /// The required kind.
        wanted: PageKind,
        /// Reason and remedy.
        why: String,
    },
    /// No kind of pages is available.
    #[error("a region of {} could not be made on any pages: {why}", ByteCount(*.size))]
    NoPages {
        /// Size in bytes.
        size: u64,
        /// The reason for each kind.
        why: String,
    },
    /// The kernel would kill this process for taking so much memory.
    #[error(
        "a region of {} needs more than the {} that are left: {limit}; make the pool smaller or raise the \
         limit",
        ByteCount(*.size), ByteCount(*.available)
    )]
    Memory {
        /// Size in bytes.
        size: u64,
        /// Bytes that the limit leaves.
        available: u64,
        /// The limit, with its numbers.
        limit: String,
    },
    /// The pages must be locked, and the limit does not permit it.
    #[error(
        "memlock limit is {}, of which {} are in use, and the region needs {} ({source}): raise `ulimit -l`",
        ByteCount(*.limit), ByteCount(*.locked), ByteCount(*.size)
    )]
    Lock {
        /// Size in bytes.
        size: u64,
        /// The limit in bytes.
        limit: u64,
        /// Bytes that the process has locked so far.
        locked: u64,
        /// The system's error.
        source: io::Error,
    },
    /// The NUMA node can't supply the pages.
    #[error(
        "binding a region to NUMA node {node} failed: {source}; `cat /sys/devices/system/node/has_memory` \
         lists the nodes, and a container may need CAP_SYS_NICE"
    )]
    Numa {
        /// Number of the node.
        node: u32,
        /// The system's error.
        source: io::Error,
    },
    /// Another call to the operating system failed.
    #[error(
        "making a region of {}: {tried} failed: {source}; free memory, use a smaller pool, or raise the \
         limit of address space (ulimit -v) or of open files (ulimit -n)",
        ByteCount(*.size)
    )]
    Os {
        /// Size in bytes.
        size: u64,
        /// The step that failed.
        tried: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

/// The largest size: half of the address space of x86-64 with four levels.
const MAX_SIZE: u64 = 1 << 46;

/// A large piece of zero-filled memory that peers on the same host can map for reading.
///
/// It is a memfd, mapped and prefaulted here. Its seals keep all other processes from writing to
/// it, and everyone from changing its size.
#[derive(Debug)]
pub struct Region {
    // First: forked children are kept from the memory for as long as the file and the mapping
    // exist.
    _unforked: SharedMapping,
    id: u16,
    file: OwnedFd,
    mapping: RegionMapping,
    report: RegionReport,
}

impl Region {
    /// Makes a region. Spans and grants refer to it by `id`.
    ///
    /// Blocks until every page is allocated, which can take seconds per GiB on a busy machine.
    ///
    /// # Errors
    /// [`RegionError`]; nothing is left behind then.
    pub fn create(id: u16, options: &RegionOptions) -> Result<Region, RegionError> {
        Self::create_with(id, options, &|path| std::fs::read_to_string(path).ok())
    }

    /// As [`Region::create`]; `read` reads the files with the limits.
    pub(crate) fn create_with(
        id: u16,
        options: &RegionOptions,
        read: &dyn Fn(&Path) -> Option<String>,
    ) -> Result<Region, RegionError> {
        if options.size == 0 || options.size > MAX_SIZE {
            return Err(RegionError::Size { size: options.size });
        }
        let mut candidates = PageSearch { options, read, attempts: Vec::new(), spare: None };
        let (kind, pages) = candidates.find_pages()?;
        let os = |tried| move |source| RegionError::Os { size: options.size, tried, source };
        fcntl_add_seals(&pages.file, SEALS).map_err(|error| os("sealing the memfd")(error.into()))?;
        let shortfall = lock_pages(&pages.mapping, kind, options.lock)?;
        let mut report = RegionReport::read(&pages.mapping, shortfall, candidates.attempts)
            .map_err(os("reading /proc/self/smaps"))?;
        if let NumaPolicy::Prefer(node) = options.numa {
            report.note_preferred(node, pages.not_preferred);
        }
        let Pages { file, mapping, .. } = pages;
        let _unforked = SharedMapping::register(mapping.base(), mapping.len(), Some(file.as_fd()));
        Ok(Region { _unforked, id, file, mapping, report })
    }

    /// Number of the region.
    pub fn id(&self) -> u16 {
        self.id
    }

    /// Size in bytes.
    #[allow(clippy::len_without_is_empty)] // a region is never empty
    pub fn len(&self) -> u64 {
        self.mapping.len() as u64
    }

    /// The memfd, for a peer to map.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The pages that the region got.
    pub fn report(&self) -> &RegionReport {
        &self.report
    }

    /// Address of the first byte, for registration. Valid as long as the region. An access through
    /// it requires the tensor that lies there.
    pub fn base(&self) -> NonNull<u8> {
        self.mapping.base()
    }
}

/// Locks the pages as `policy` says. Reserved pages are never swapped out, so they need no lock.
fn lock_pages(
    mapping: &RegionMapping,
    kind: PageKind,
    policy: LockPolicy,
) -> Result<Option<Shortfall>, RegionError> {
    if kind.is_reserved() { Ok(None) } else { lock::lock(mapping, policy, kind.granule()) }
}

/// A memfd with all its pages, before it is sealed.
struct Pages {
    file: OwnedFd,
    mapping: RegionMapping,
    /// Why the node of [`NumaPolicy::Prefer`] is not preferred.
    not_preferred: Option<String>,
}

/// Why a kind of pages is not available.
enum PageFailure {
    /// The next kind may be available.
    Step(String),
    /// No other kind can help, or an option can't be met.
    Fatal(RegionError),
}

/// The search for the best kind of pages.
struct PageSearch<'a> {
    options: &'a RegionOptions,
    read: &'a dyn Fn(&Path) -> Option<String>,
    attempts: Vec<(PageKind, String)>,
    /// Ordinary pages that could not be joined into huge ones, for the kind `Plain`.
    spare: Option<Pages>,
}

impl PageSearch<'_> {
    fn find_pages(&mut self) -> Result<(PageKind, Pages), RegionError> {
        let RegionOptions { size, pages: policy, require, .. } = *self.options;
        let kinds = policy.candidates(require);
        for kind in kinds.iter().copied() {
            let why = match unsuited(kind, policy, size) {
                Some(why) => why,
                None => match self.try_kind(kind) {
                    Ok(pages) => return Ok((kind, pages)),
                    Err(PageFailure::Fatal(error)) => return Err(error),
                    Err(PageFailure::Step(why)) => why,
                },
            };
            self.attempts.push((kind, why));
        }
        match (kinds, self.attempts.pop()) {
            ([wanted], Some((_, why))) => Err(RegionError::Pages { size, wanted: *wanted, why }),
            (_, last) => {
                let all = self.attempts.drain(..).chain(last);
                let why = all.map(|(kind, why)| format!("{kind}: {why}")).collect::<Vec<_>>().join("; ");
                Err(RegionError::NoPages { size, why })
            }
        }
    }

    fn try_kind(&mut self, kind: PageKind) -> Result<Pages, PageFailure> {
        match kind {
            PageKind::OneGiB => self.reserved(kind, MemfdFlags::HUGE_1GB),
            PageKind::TwoMiB => self.reserved(kind, MemfdFlags::HUGE_2MB),
            PageKind::Transparent => self.transparent(),
            PageKind::Plain => match self.spare.take() {
                Some(pages) => Ok(pages),
                None => self.ordinary(kind),
            },
        }
    }

    /// Allocates pages from the machine's reserve.
    fn reserved(&self, kind: PageKind, flag: MemfdFlags) -> Result<Pages, PageFailure> {
        let size = self.options.size.next_multiple_of(kind.granule());
        let advice = || reserve_advice(kind, size);
        if !kind.is_free_for(size) {
            return Err(PageFailure::Step(advice()));
        }
        let miss = |error: io::Error| PageFailure::Step(format!("{error}; {}", advice()));
        let mut pages = map(kind, size, MemfdFlags::HUGETLB | flag).map_err(miss)?;
        self.place(&mut pages)?;
        pages.mapping.populate().map_err(|error| {
            PageFailure::Step(format!(
                "{error} while bringing them in (another process, the hugetlb limit of a cgroup or \
                                the NUMA node took them); {}",
                advice()
            ))
        })?;
        Ok(pages)
    }

    /// Allocates ordinary pages and joins them into huge ones.
    fn transparent(&mut self) -> Result<Pages, PageFailure> {
        let pages = self.ordinary(PageKind::Transparent)?;
        let collapsed = pages.mapping.collapse();
        let report = RegionReport::read(&pages.mapping, None, Vec::new()).map_err(|source| {
            let tried = "reading /proc/self/smaps";
            PageFailure::Fatal(RegionError::Os { size: self.options.size, tried, source })
        })?;
        let enough = if self.options.require { report.size } else { 1 };
        if report.huge_bytes >= enough {
            return Ok(pages);
        }
        let why = match collapsed {
            Ok(()) => "the kernel joined none or not all".to_owned(),
            Err(error) => format!("MADV_COLLAPSE: {error}"),
        };
        self.spare = Some(pages);
        Err(PageFailure::Step(format!(
            "{why} ({} of {} are huge); Linux 6.1 or later is needed, \
             /sys/kernel/mm/transparent_hugepage/shmem_enabled must not be \"deny\", and \
             `echo 1 > /proc/sys/vm/compact_memory` makes room",
            ByteCount(report.huge_bytes),
            ByteCount(report.size)
        )))
    }

    /// Allocates ordinary pages.
    fn ordinary(&self, kind: PageKind) -> Result<Pages, PageFailure> {
        let size = self.options.size.next_multiple_of(kind.granule());
        let room = limits::tightest(self.read);
        if let Some(room) = room.filter(|room| room.available < size) {
            let error = RegionError::Memory { size, available: room.available, limit: room.limit };
            return Err(PageFailure::Fatal(error));
        }
        let os = |tried| move |source| PageFailure::Fatal(RegionError::Os { size, tried, source });
        let mut pages = map(kind, size, MemfdFlags::empty()).map_err(os("mapping a memfd"))?;
        self.place(&mut pages)?;
        pages.mapping.populate().map_err(os("bringing its pages in (MADV_POPULATE_WRITE, Linux 5.14)"))?;
        Ok(pages)
    }

    /// Tells the system the NUMA node of the options. Must come before pages are allocated.
    fn place(&self, pages: &mut Pages) -> Result<(), PageFailure> {
        match self.options.numa {
            NumaPolicy::Any => {}
            NumaPolicy::Prefer(_) if mapping::has_memory_policy() => {
                let why = "the memory policy of this process (numactl, set_mempolicy) is kept";
                pages.not_preferred = Some(why.to_owned());
            }
            NumaPolicy::Prefer(node) => {
                pages.not_preferred = pages.mapping.prefer(node).err().map(|error| {
                    let why = match error.raw_os_error() {
                        Some(libc::EINVAL) => ": it has no memory, or the cpuset excludes it",
                        Some(libc::EPERM) => ": a container needs CAP_SYS_NICE",
                        _ => "",
                    };
                    format!("mbind failed: {error}{why}")
                });
            }
            NumaPolicy::Bind(node) => {
                let failed = |source| PageFailure::Fatal(RegionError::Numa { node, source });
                pages.mapping.bind(node).map_err(failed)?;
            }
        }
        Ok(())
    }
}

/// Makes a memfd of `size` bytes, a multiple of the kind's granule, and maps it for writing.
fn map(kind: PageKind, size: u64, flags: MemfdFlags) -> io::Result<Pages> {
    let flags = flags | MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = memfd_create("tensorwire", flags)?;
    grow_memfd(&file, size)?;
    let mapping = RegionMapping::shared(file.as_fd(), size as usize, kind.granule() as usize)?;
    Ok(Pages { file, mapping, not_preferred: None })
}
