//! One thread's memcpy between two mapped regions: the cost of moving bytes without a transport.

use crate::error::CliError;
use memmap2::{Advice, MmapMut, MmapOptions};
use std::hint::black_box;

/// Two regions of the same size, on huge pages if possible. The source is written once: a clean,
/// warm source gives the strictest reference.
pub struct Memcpy {
    source: MmapMut,
    target: MmapMut,
}

impl Memcpy {
    /// Regions for copies of at most `bytes`, with every page populated.
    pub fn new(bytes: usize) -> Result<Self, CliError> {
        Ok(Memcpy { source: region(bytes, 0x5a)?, target: region(bytes, 0)? })
    }

    /// Copies `bytes` once.
    ///
    /// # Panics
    /// If the regions are smaller.
    #[inline(never)] // a call, as a transport's copy is
    pub fn copy(&mut self, bytes: usize) {
        self.target[..bytes].copy_from_slice(black_box(&self.source[..bytes]));
        black_box(&mut self.target);
    }
}

fn region(bytes: usize, fill: u8) -> Result<MmapMut, CliError> {
    let mut map = MmapOptions::new().len(bytes.max(1)).map_anon().map_err(|error| {
        CliError::failed(format!("mapping {bytes} bytes for the memcpy reference"), error)
    })?;
    // Fails without huge pages in the kernel: base pages do then.
    let _ = map.advise(Advice::HugePage);
    map.fill(fill);
    Ok(map)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exactly_the_bytes_asked_for_are_copied() {
        let mut memcpy = Memcpy::new(4096).unwrap();
        memcpy.copy(100);
        assert!(memcpy.target[..100].iter().all(|&byte| byte == 0x5a));
        assert!(memcpy.target[100..].iter().all(|&byte| byte == 0));
    }
}
