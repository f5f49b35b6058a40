//! The pages that a region got, as the kernel reports them.

use super::lock::Shortfall;
use super::mapping::RegionMapping;
use super::pages::{ONE_GIB, PageKind, TWO_MIB};
use super::smaps;
use crate::memory::byte_count::ByteCount;
use std::{fmt, io};

/// The pages that a region got. Every figure is read from the kernel after the region was made.
///
/// ```
/// # let node = tensorwire::internals::doc_node();
/// let report = node.pool_report();
/// assert_eq!(report.size, 16 << 20);
/// for (pages, why) in &report.attempts {
///     println!("not on {pages} pages: {why}");
/// }
/// println!("{report}"); // all in one line
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RegionReport {
    /// Size in bytes.
    pub size: u64,
    /// Kind of the pages. Transparent if at least a part is on huge pages: see `huge_bytes`.
    pub pages: PageKind,
    /// Page size in bytes: that of the reserved pages on hugetlb, else that of base pages.
    pub page_size: u64,
    /// Bytes on huge pages.
    pub huge_bytes: u64,
    /// Bytes that can't be swapped out.
    pub locked_bytes: u64,
    /// The process's limit on locked memory in bytes, if the limit left a part of the region
    /// unlocked.
    pub lock_limit: Option<u64>,
    /// The NUMA node of the pages; `None` if they lie on several or the kernel does not tell.
    pub numa_node: Option<u32>,
    /// The NUMA node of the RDMA device, and why the pages are not there. `None` if they are, or
    /// the node of the pages does not follow the device's.
    pub numa_shortfall: Option<String>,
    /// The kinds of pages that were tried before, and why each was not available.
    pub attempts: Vec<(PageKind, String)>,
}

impl RegionReport {
    /// Reads the figures from the kernel.
    pub(crate) fn read(
        mapping: &RegionMapping,
        shortfall: Option<Shortfall>,
        attempts: Vec<(PageKind, String)>,
    ) -> io::Result<RegionReport> {
        let pages = smaps::read(mapping.base().as_ptr() as usize, mapping.len())?;
        let kind = match pages.page_size {
            ONE_GIB => PageKind::OneGiB,
            TWO_MIB => PageKind::TwoMiB,
            _ if pages.huge > 0 => PageKind::Transparent,
            _ => PageKind::Plain,
        };
        Ok(RegionReport {
            size: pages.size,
            pages: kind,
            page_size: pages.page_size,
            huge_bytes: pages.huge,
            locked_bytes: pages.locked,
            lock_limit: shortfall.map(|shortfall| shortfall.limit),
            numa_node: mapping.node(),
            numa_shortfall: None,
            attempts,
        })
    }

    /// Compares the pages with the NUMA node that was preferred. `refused`: why the system did not
    /// take the preference.
    pub(crate) fn note_preferred(&mut self, node: u32, refused: Option<String>) {
        if self.numa_node == Some(node) {
            return;
        }
        let why = refused.unwrap_or_else(|| {
            let unknown = if self.numa_node.is_none() { ", or the kernel does not tell" } else { "" };
            format!("it has too little free memory of this kind{unknown}")
        });
        self.numa_shortfall = Some(format!("NUMA node {node}: {why}"));
    }
}

impl fmt::Display for RegionReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {} pages", ByteCount(self.size), self.pages)?;
        write!(f, ", {} huge, {} locked", ByteCount(self.huge_bytes), ByteCount(self.locked_bytes))?;
        if let Some(limit) = self.lock_limit {
            write!(f, " (`ulimit -l` is {})", ByteCount(limit))?;
        }
        match self.numa_node {
            Some(node) => write!(f, ", NUMA node {node}")?,
            None => f.write_str(", no single NUMA node known")?,
        }
        if let Some(shortfall) = &self.numa_shortfall {
            write!(f, "; not on {shortfall}")?;
        }
        for (kind, why) in &self.attempts {
            write!(f, "; not on {kind} pages: {why}")?;
        }
        Ok(())
    }
}
