//! Kinds of pages for a region.

use crate::memory::byte_count::ByteCount;
use std::{fmt, fs};

/// Bytes of a page that one second-level entry maps on x86-64, and on arm64 with 4 KiB pages.
pub(crate) const TWO_MIB: u64 = 2 << 20;
pub(crate) const ONE_GIB: u64 = 1 << 30;

/// The kind of pages that a region has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PageKind {
    /// Reserved pages of 1 GiB (hugetlb).
    OneGiB,
    /// Reserved pages of 2 MiB (hugetlb).
    TwoMiB,
    /// Ordinary memory that the kernel has joined into huge pages of 2 MiB.
    Transparent,
    /// The machine's base pages.
    Plain,
}

impl PageKind {
    /// The multiple that a region's size is rounded up to, in bytes.
    pub(crate) fn granule(self) -> u64 {
        match self {
            PageKind::OneGiB => ONE_GIB,
            PageKind::TwoMiB | PageKind::Transparent => TWO_MIB,
            PageKind::Plain => rustix::param::page_size() as u64,
        }
    }

    /// Whether these pages come from the machine's reserve of huge pages.
    pub(crate) fn is_reserved(self) -> bool {
        matches!(self, PageKind::OneGiB | PageKind::TwoMiB)
    }

    /// Whether enough reserved pages of this kind are free for `size` bytes.
    pub(crate) fn is_free_for(self, size: u64) -> bool {
        let free = Reserve::read(self.granule()).map_or(0, |reserve| reserve.free);
        size.div_ceil(self.granule()) <= free
    }
}

impl fmt::Display for PageKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PageKind::OneGiB => "1 GiB hugetlb",
            PageKind::TwoMiB => "2 MiB hugetlb",
            PageKind::Transparent => "transparent huge",
            PageKind::Plain => "plain",
        })
    }
}

/// The kind of pages to ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum PagePolicy {
    /// The best available kind: 1 GiB (only if the size is a multiple of it), 2 MiB, transparent,
    /// plain.
    #[default]
    Auto,
    /// Reserved pages of 1 GiB.
    OneGiB,
    /// Reserved pages of 2 MiB.
    TwoMiB,
    /// Ordinary memory, joined into huge pages.
    Transparent,
    /// The machine's base pages.
    Plain,
}

impl PagePolicy {
    /// The kinds to try, best first. A named kind is followed by the lesser ones, unless it is
    /// required.
    pub(crate) fn candidates(self, require: bool) -> &'static [PageKind] {
        use PageKind::{OneGiB, Plain, Transparent, TwoMiB};
        const ALL: &[PageKind] = &[OneGiB, TwoMiB, Transparent, Plain];
        let from = match self {
            PagePolicy::Auto => return ALL,
            PagePolicy::OneGiB => 0,
            PagePolicy::TwoMiB => 1,
            PagePolicy::Transparent => 2,
            PagePolicy::Plain => 3,
        };
        if require { &ALL[from..=from] } else { &ALL[from..] }
    }
}

/// Why `Auto` skips a kind for a region of this size, if it does. A named kind is never skipped:
/// the size is rounded up to it.
pub(crate) fn unsuited(kind: PageKind, policy: PagePolicy, size: u64) -> Option<String> {
    if policy != PagePolicy::Auto {
        return None;
    }
    match kind {
        PageKind::OneGiB if !size.is_multiple_of(ONE_GIB) => {
            Some(format!("{} is no multiple of 1 GiB", ByteCount(size)))
        }
        PageKind::TwoMiB | PageKind::Transparent if size < TWO_MIB => {
            Some(format!("{} is less than one page", ByteCount(size)))
        }
        _ => None,
    }
}

/// Whether a region gets reserved pages, as far as can be told before it is made.
pub(crate) fn is_for_reserve(policy: PagePolicy, require: bool, size: u64) -> bool {
    let kinds = policy.candidates(require);
    let is_there = |kind: &PageKind| unsuited(*kind, policy, size).is_none() && kind.is_free_for(size);
    kinds.iter().all(|kind| kind.is_reserved())
        || kinds.iter().any(|kind| kind.is_reserved() && is_there(kind))
}

/// The machine's reserve of huge pages of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reserve {
    pub(crate) total: u64,
    /// Free pages that are not promised to a mapping that has not accessed them yet.
    pub(crate) free: u64,
}

impl Reserve {
    /// Reads the reserve of pages of `size` bytes; `None` if the kernel has no such pages.
    pub(crate) fn read(size: u64) -> Option<Reserve> {
        let read = |name: &str| -> Option<u64> {
            let path = format!("/sys/kernel/mm/hugepages/hugepages-{}kB/{name}", size >> 10);
            fs::read_to_string(path).ok()?.trim().parse().ok()
        };
        let free = read("free_hugepages")?.saturating_sub(read("resv_hugepages")?);
        Some(Reserve { total: read("nr_hugepages")?, free })
    }
}

/// How to reserve enough pages of `kind` for `size` bytes, with the numbers of this machine.
pub(crate) fn reserve_advice(kind: PageKind, size: u64) -> String {
    let page = kind.granule();
    let needed = size.div_ceil(page);
    let Some(reserve) = Reserve::read(page) else {
        return format!("this kernel has no pages of {}", ByteCount(page));
    };
    format!(
        "{needed} pages of {} are needed, {} of {} reserved ones are free: \
         `echo {} > /sys/kernel/mm/hugepages/hugepages-{}kB/nr_hugepages` as root",
        ByteCount(page),
        reserve.free,
        reserve.total,
        reserve.total + needed.saturating_sub(reserve.free),
        page >> 10
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_takes_1_gib_pages_only_for_whole_multiples() {
        assert!(unsuited(PageKind::OneGiB, PagePolicy::Auto, 3 << 29).is_some());
        assert!(unsuited(PageKind::OneGiB, PagePolicy::Auto, 2 << 30).is_none());
        assert!(unsuited(PageKind::OneGiB, PagePolicy::OneGiB, 1).is_none());
    }

    #[test]
    fn a_required_kind_is_the_only_candidate_and_a_named_one_is_followed_by_lesser_ones() {
        assert_eq!(PagePolicy::TwoMiB.candidates(true), [PageKind::TwoMiB]);
        assert_eq!(
            PagePolicy::TwoMiB.candidates(false),
            [PageKind::TwoMiB, PageKind::Transparent, PageKind::Plain]
        );
    }
}
