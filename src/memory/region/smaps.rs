//! Reads `/proc/self/smaps`: the kernel's counters of a mapping.

use std::io::{self, BufRead, BufReader};

/// The counters of an address range, summed over its mappings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MappedPages {
    /// Bytes of the range that are mapped.
    pub(crate) size: u64,
    /// Page size of the file in bytes: that of the huge page for hugetlb.
    pub(crate) page_size: u64,
    /// Bytes on huge pages.
    pub(crate) huge: u64,
    /// Bytes that can't be swapped out.
    pub(crate) locked: u64,
    resident: u64,
}

/// Reads the counters of `start..start + len`.
pub(crate) fn read(start: usize, len: usize) -> io::Result<MappedPages> {
    parse(BufReader::new(std::fs::File::open("/proc/self/smaps")?), start as u64, len as u64)
}

fn parse(smaps: impl BufRead, start: u64, len: u64) -> io::Result<MappedPages> {
    let mut total = MappedPages::default();
    let mut inside = false;
    for line in smaps.lines() {
        let line = line?;
        if let Some((from, to)) = range(&line) {
            // The lines are in order, and the kernel counts the pages of a mapping as it is read.
            if from >= start + len {
                break;
            }
            inside = from >= start && to - start <= len && from < to;
            total.size += if inside { to - from } else { 0 };
            total.resident = 0;
        } else if inside {
            total.count(&line);
        }
    }
    Ok(total)
}

/// Parses the first line of a mapping: `from-to perms offset dev inode path`.
fn range(line: &str) -> Option<(u64, u64)> {
    let (from, to) = line.split_once(' ')?.0.split_once('-')?;
    let (from, to) = (u64::from_str_radix(from, 16).ok()?, u64::from_str_radix(to, 16).ok()?);
    (from < to).then_some((from, to))
}

impl MappedPages {
    fn count(&mut self, line: &str) {
        let Some((name, value)) = line.split_once(':') else { return };
        if name == "VmFlags" {
            let locked = value.split_whitespace().any(|flag| flag == "lo");
            self.locked += if locked { self.resident } else { 0 };
            return;
        }
        let Some(kib) = value.trim().strip_suffix(" kB").and_then(|kib| kib.parse::<u64>().ok()) else {
            return;
        };
        let bytes = kib << 10;
        match name {
            "KernelPageSize" => self.page_size = bytes,
            "Rss" => self.resident = bytes,
            "AnonHugePages" | "ShmemPmdMapped" | "FilePmdMapped" => self.huge += bytes,
            // These pages do not count as Rss, and are never swapped out.
            "Shared_Hugetlb" | "Private_Hugetlb" => {
                self.huge += bytes;
                self.locked += bytes;
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
1000-3000 rw-s 00000000 00:01 1024    /memfd:x (deleted)
Size:                  8 kB
KernelPageSize:        4 kB
Rss:                   8 kB
ShmemPmdMapped:        4 kB
VmFlags: rd wr sh lo
3000-4000 rw-s 00002000 00:01 1024    /memfd:x (deleted)
KernelPageSize:        4 kB
Rss:                   4 kB
ShmemPmdMapped:        0 kB
VmFlags: rd wr sh
4000-9000 rw-p 00000000 00:00 0
Rss:                   4 kB
AnonHugePages:      2048 kB
VmFlags: rd lo
";

    #[test]
    fn a_range_that_is_split_is_summed_and_its_neighbours_are_not() {
        let pages = parse(SMAPS.as_bytes(), 0x1000, 0x3000).expect("parses");
        let expected = MappedPages {
            size: 0x3000,
            page_size: 4096,
            huge: 4096,
            locked: 0x2000,
            resident: pages.resident,
        };
        assert_eq!(pages, expected);
    }

    #[test]
    fn mappings_behind_the_range_are_not_read() {
        let (before, _) = SMAPS.split_once("Rss:                   4 kB\nAnon").expect("the last one");
        // No text, so that reading it fails.
        let smaps = std::io::Read::chain(before.as_bytes(), &[0xff, b'\n'][..]);
        let smaps = BufReader::new(smaps);
        assert_eq!(parse(smaps, 0x1000, 0x3000).expect("parses").size, 0x3000);
    }

    #[test]
    fn reserved_huge_pages_count_as_huge_and_locked() {
        let smaps = "200000-600000 rw-s 0 00:01 1 /memfd:x\nKernelPageSize: 2048 kB\nRss: 0 kB\n\
                     Private_Hugetlb: 4096 kB\nVmFlags: rd ht\n";
        let pages = parse(smaps.as_bytes(), 0x20_0000, 0x40_0000).expect("parses");
        assert_eq!((pages.page_size, pages.huge, pages.locked), (2 << 20, 4 << 20, 4 << 20));
    }
}
