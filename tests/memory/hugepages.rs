//! Regions on reserved huge pages. The test reserves a few while it runs, which needs root.
#![allow(unsafe_code)] // tries forbidden mappings, and reads a peer's view

use std::fs;
use std::path::PathBuf;
use tensorwire::internals::memory::{
    NumaPolicy, PagePolicy, PeerRegion, PoolOptions, Region, RegionOptions, verify_seals,
};
use tensorwire::{DType, PageKind, Pool, Shape, TensorMeta};

/// Reserves more huge pages of one size. Its drop restores the previous number.
struct Reserved {
    file: PathBuf,
    before: String,
}

impl Reserved {
    fn new(page: u64, count: u64) -> Result<Reserved, String> {
        let dir = PathBuf::from(format!("/sys/kernel/mm/hugepages/hugepages-{}kB", page >> 10));
        let file = dir.join("nr_hugepages");
        let read = || fs::read_to_string(&file).map(|text| text.trim().to_owned());
        let before = read().map_err(|error| format!("{}: {error}", file.display()))?;
        let wanted = before.parse::<u64>().map_err(|error| error.to_string())? + count;
        let reserved = Reserved { file: file.clone(), before };
        fs::write(&file, wanted.to_string()).map_err(|error| format!("{}: {error}", file.display()))?;
        match read() {
            Ok(got) if got == wanted.to_string() => Ok(reserved),
            got => Err(format!("{wanted} pages of {page} bytes were asked for, the kernel reserved {got:?}")),
        }
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        if let Err(error) = fs::write(&self.file, &self.before) {
            println!("{} stays changed: {error}", self.file.display());
        }
    }
}

fn use_region(page: u64, pages: PagePolicy, kind: PageKind, size: u64) {
    let reserved = match Reserved::new(page, size / page) {
        Ok(reserved) => reserved,
        Err(why) => return println!("skipped: {why}"),
    };
    let numa = NumaPolicy::Prefer(0);
    let options = RegionOptions { pages, require: true, numa, ..RegionOptions::new(size - 5) };
    let region = Region::create(0, &options).expect("the pages are reserved");
    let report = region.report();
    println!("{report}");
    assert_eq!((report.pages, report.page_size, report.size), (kind, page, size));
    assert_eq!((report.huge_bytes, report.locked_bytes), (size, size));
    assert!(report.attempts.is_empty());
    match &report.numa_shortfall {
        None => assert_eq!(report.numa_node, Some(0)),
        // The kernel may have reserved the pages on another node.
        Some(why) => println!("skipped: {why}"),
    }

    assert_eq!(verify_seals(region.fd(), size).expect("these memfds can be sealed too"), size);
    // SAFETY: a mapping that must not come about.
    let writable = unsafe { memmap2::MmapOptions::new().len(size as usize).map_mut(&region.fd()) };
    assert_eq!(writable.expect_err("sealed").kind(), std::io::ErrorKind::PermissionDenied);
    let peer = PeerRegion::map(region.fd().try_clone_to_owned().expect("dup"), size).expect("readable");

    // Without poisoning, as a killed process leaves its memory.
    let pool = Pool::new(region, PoolOptions { poison: false, ..PoolOptions::default() }).expect("pool");
    let meta = TensorMeta::new(DType::U8, Shape::new(&[100_000]).expect("shape")).expect("meta");
    let mut tensor = pool.tensor(meta).expect("room");
    tensor.bytes_mut().fill(17);
    let span = tensor.span().expect("bytes");
    let seen = peer.bytes_at(span.offset + span.len - 1, 1).expect("inside");
    // SAFETY: inside the peer's mapping, which is alive; nobody writes now.
    let seen = unsafe { seen.read() };
    assert_eq!(seen, 17);

    // The process of the pool is dead. Only the borrowed bytes are kept, relocated.
    drop((tensor, pool));
    let free = || fs::read_to_string(reserved.file.with_file_name("free_hugepages")).expect("sysfs");
    let before: u64 = free().trim().parse().expect("a number");
    // SAFETY: nobody writes any more, and nothing but this part is read.
    unsafe { peer.relocate(&[(span.offset, span.len)]) }.expect("room");
    assert_eq!(free().trim().parse::<u64>().expect("a number"), before + size / page);
    // SAFETY: as above.
    let seen =
        unsafe { std::slice::from_raw_parts(peer.bytes_at(span.offset, span.len).expect("inside"), 100_000) };
    assert!(seen.iter().all(|byte| *byte == 17));
}

#[test]
fn a_region_lies_on_reserved_pages_where_there_are_some() {
    use_region(2 << 20, PagePolicy::TwoMiB, PageKind::TwoMiB, 8 << 20);
    use_region(1 << 30, PagePolicy::OneGiB, PageKind::OneGiB, 1 << 30);
}
