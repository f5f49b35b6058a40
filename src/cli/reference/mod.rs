//! What the hardware can do, without tensorwire: the time stamp counter, one cache line, one copy.

mod line;
mod ticks;

pub use line::{CacheLine, Side};
pub use ticks::Ticks;

use std::hint::black_box;
use std::time::Instant;

/// One thread's memcpy between two buffers of its own.
pub struct Copy {
    from: Vec<u8>,
    to: Vec<u8>,
}

impl Copy {
    /// Buffers of `bytes` each, both touched.
    pub fn new(bytes: usize) -> Self {
        Copy { from: vec![1; bytes], to: vec![2; bytes] }
    }

    /// Nanoseconds of one copy, the median of `count`. The source is freshly written before each.
    pub fn median_ns(&mut self, count: usize) -> f64 {
        let mut samples: Vec<f64> = (0..count.max(1))
            .map(|round| {
                black_box(&mut self.from).fill(round as u8);
                let start = Instant::now();
                self.to.copy_from_slice(black_box(&self.from));
                black_box(&mut self.to);
                start.elapsed().as_nanos() as f64
            })
            .collect();
        samples.sort_by(f64::total_cmp);
        samples[samples.len() / 2]
    }
}
