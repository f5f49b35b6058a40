//! Latencies in buckets whose width grows with the value.

use std::time::Duration;

/// Buckets for each power of two: a value is known to 1/32 of itself.
const SUB_BITS: u32 = 5;
const SUB: usize = 1 << SUB_BITS;
/// Values below 2 x `SUB` have a bucket each; then `SUB` buckets for each further power of two up to 2^64.
const BUCKETS: usize = 2 * SUB + (63 - SUB_BITS as usize) * SUB;

/// A histogram of latencies in nanoseconds.
///
/// Below 64 ns each value has a bucket of its own; above, a bucket is at most 1/32 of its values wide. Every
/// 64-bit value has its place, so nothing is clipped. The memory (15 KiB) is fixed when it is made.
///
/// It has one owner; readers on other threads get a clone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LatencyHistogram {
    buckets: Box<[u64; BUCKETS]>,
    count: u64,
    /// 2^64 values of 2^64 fit.
    sum: u128,
    /// `u64::MAX` while empty, so that `record` needs no branch.
    min: u64,
    max: u64,
}

impl LatencyHistogram {
    /// An empty histogram. This allocates; nothing after it does, except `clone`.
    pub fn new() -> Self {
        LatencyHistogram { buckets: Box::new([0; BUCKETS]), count: 0, sum: 0, min: u64::MAX, max: 0 }
    }

    /// Counts one latency of `ns` nanoseconds.
    #[inline]
    pub fn record(&mut self, ns: u64) {
        self.buckets[bucket_of(ns)] += 1;
        self.count += 1;
        self.sum += u128::from(ns);
        self.min = self.min.min(ns);
        self.max = self.max.max(ns);
    }

    /// Counts one latency; one of more than 2^64-1 ns (584 years) counts as that.
    #[inline]
    pub fn record_duration(&mut self, latency: Duration) {
        self.record(u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX));
    }

    /// Adds everything that `other` has counted.
    pub fn merge(&mut self, other: &LatencyHistogram) {
        for (bucket, count) in self.buckets.iter_mut().zip(other.buckets.iter()) {
            *bucket += count;
        }
        self.count += other.count;
        self.sum += other.sum;
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
    }

    /// Forgets everything; the memory stays.
    pub fn clear(&mut self) {
        self.buckets.fill(0);
        (self.count, self.sum, self.min, self.max) = (0, 0, u64::MAX, 0);
    }

    /// How many latencies were counted.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The smallest, in ns, exactly; `None` if there is none.
    pub fn min(&self) -> Option<u64> {
        (self.count > 0).then_some(self.min)
    }

    /// The largest, in ns, exactly; `None` if there is none.
    pub fn max(&self) -> Option<u64> {
        (self.count > 0).then_some(self.max)
    }

    /// The mean in ns, from the exact sum; `None` if there is none.
    pub fn mean(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum as f64 / self.count as f64)
    }

    /// The latency in ns that a share `q` of all stays at or below: 0.5 is the median, 0.999 leaves one in a
    /// thousand above. `None` if there is none.
    ///
    /// The answer is never below the exact one (the value at place ceil(q x count) in order) and at most
    /// 1/32 above it; the smallest and the largest are exact. A `q` below 0 (or not a number) counts as 0,
    /// above 1 as 1.
    pub fn quantile(&self, q: f64) -> Option<u64> {
        if self.count == 0 {
            return None;
        }
        // A float cast saturates and makes 0 of a NaN.
        let rank = ((q * self.count as f64).ceil() as u64).clamp(1, self.count);
        if rank == 1 {
            return Some(self.min);
        }
        let mut at_or_below = 0;
        for (bucket, count) in self.buckets.iter().enumerate() {
            at_or_below += count;
            if at_or_below >= rank {
                return Some(last_of(bucket).min(self.max));
            }
        }
        Some(self.max)
    }
}

impl Default for LatencyHistogram {
    fn default() -> Self {
        LatencyHistogram::new()
    }
}

/// The bucket of a value: its leading 6 bits, and how far they were shifted.
#[inline]
fn bucket_of(ns: u64) -> usize {
    // With bit 5 set, the shift of a value below 32 is 0, as for those up to 63: no branch.
    let shift = 63 - SUB_BITS - (ns | SUB as u64).leading_zeros();
    shift as usize * SUB + (ns >> shift) as usize
}

/// The smallest value of a bucket.
fn first_of(bucket: usize) -> u64 {
    if bucket < 2 * SUB {
        return bucket as u64;
    }
    ((SUB + bucket % SUB) as u64) << (bucket / SUB - 1)
}

/// The largest value of a bucket.
fn last_of(bucket: usize) -> u64 {
    if bucket + 1 == BUCKETS { u64::MAX } else { first_of(bucket + 1) - 1 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(values: &[u64]) -> LatencyHistogram {
        let mut histogram = LatencyHistogram::new();
        values.iter().for_each(|ns| histogram.record(*ns));
        histogram
    }

    #[test]
    fn the_buckets_cover_every_value_once() {
        assert_eq!((BUCKETS, first_of(0), last_of(BUCKETS - 1)), (1920, 0, u64::MAX));
        for bucket in 0..BUCKETS {
            let (first, last) = (first_of(bucket), last_of(bucket));
            assert!(first <= last);
            assert_eq!((bucket_of(first), bucket_of(last)), (bucket, bucket), "{first} to {last}");
        }
    }

    #[test]
    fn a_bucket_is_at_most_a_32nd_of_its_values_wide() {
        for bucket in 0..BUCKETS {
            let (first, last) = (first_of(bucket), last_of(bucket));
            assert!(last - first <= first / 32, "{first} to {last}");
            assert!(first >= 64 || first == last, "below 64 a value has a bucket of its own");
        }
    }

    #[test]
    fn nothing_recorded_has_no_figures() {
        let empty = LatencyHistogram::new();
        assert_eq!((empty.count(), empty.min(), empty.max()), (0, None, None));
        assert_eq!((empty.mean(), empty.quantile(0.5)), (None, None));
    }

    #[test]
    fn small_values_are_exact() {
        let histogram = of(&[10, 20, 30, 40]);
        let quantiles = [0.0, 0.25, 0.26, 0.5, 0.75, 0.76, 1.0].map(|q| histogram.quantile(q).expect("some"));
        assert_eq!(quantiles, [10, 10, 20, 20, 30, 40, 40]);
        assert_eq!((histogram.count(), histogram.min(), histogram.max()), (4, Some(10), Some(40)));
        assert_eq!(histogram.mean(), Some(25.0));
    }

    #[test]
    fn the_extremes_of_the_range_are_counted_and_exact() {
        let histogram = of(&[0, u64::MAX, u64::MAX]);
        assert_eq!((histogram.min(), histogram.max()), (Some(0), Some(u64::MAX)));
        assert_eq!((histogram.quantile(0.0), histogram.quantile(0.5)), (Some(0), Some(u64::MAX)));
        assert_eq!(histogram.mean(), Some((2.0 * u64::MAX as f64) / 3.0), "the sum does not overflow");
    }

    #[test]
    fn a_share_out_of_range_counts_as_the_nearest() {
        let histogram = of(&[1, 2, 3]);
        assert_eq!([-1.0, f64::NEG_INFINITY, f64::NAN].map(|q| histogram.quantile(q)), [Some(1); 3]);
        assert_eq!([1.5, f64::INFINITY].map(|q| histogram.quantile(q)), [Some(3); 2]);
    }

    #[test]
    fn a_duration_longer_than_64_bits_counts_as_the_largest() {
        let mut histogram = LatencyHistogram::new();
        histogram.record_duration(Duration::from_micros(3));
        histogram.record_duration(Duration::MAX);
        assert_eq!((histogram.min(), histogram.max()), (Some(3000), Some(u64::MAX)));
    }

    #[test]
    fn clearing_leaves_an_empty_histogram() {
        let mut histogram = of(&[1, 1000, 1_000_000]);
        histogram.clear();
        assert_eq!(histogram, LatencyHistogram::new());
    }

    /// Values of all sizes, not only huge ones.
    fn latency() -> impl Strategy<Value = u64> {
        (any::<u64>(), 0u32..64).prop_map(|(value, shift)| value >> shift)
    }

    proptest! {
        #[test]
        fn a_quantile_is_the_exact_one_or_at_most_a_32nd_above(
            mut values in prop::collection::vec(latency(), 1..200), q in 0.0..=1.0,
        ) {
            let got = of(&values).quantile(q).expect("some");
            values.sort_unstable();
            let rank = ((q * values.len() as f64).ceil() as usize).max(1);
            let exact = values[rank - 1];
            prop_assert!(got >= exact && got - exact <= exact / 32, "{got} for {exact}");
        }

        #[test]
        fn merging_is_the_same_as_recording_both(
            a in prop::collection::vec(latency(), 0..50), b in prop::collection::vec(latency(), 0..50),
        ) {
            let mut merged = of(&a);
            merged.merge(&of(&b));
            prop_assert_eq!(merged, of(&[a, b].concat()));
        }
    }
}
