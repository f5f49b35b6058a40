//! Statistics of samples: percentiles from an HDR histogram, everything else exactly.

use hdrhistogram::Histogram;

/// Decimal digits that the histogram keeps of each sample.
const DIGITS: u8 = 3;
/// Longest time of the histogram in nanoseconds (an hour). Recording allocates nothing.
const LONGEST_NS: u64 = 3_600_000_000_000;

/// Collects times in nanoseconds. No sample is dropped.
///
/// Minimum, maximum, mean and standard deviation come from the samples themselves (Welford's
/// method), not from the buckets of the histogram.
#[derive(Clone, Debug)]
pub struct Recorder {
    histogram: Histogram<u64>,
    count: u64,
    min: u64,
    max: u64,
    mean: f64,
    /// Sum of the squared distances from the mean.
    squares: f64,
}

impl Recorder {
    /// An empty one.
    pub fn new() -> Self {
        let histogram = Histogram::new_with_bounds(1, LONGEST_NS, DIGITS)
            .expect("1 ns to an hour with 3 digits is in the range that the histogram documents");
        Recorder { histogram, count: 0, min: u64::MAX, max: 0, mean: 0.0, squares: 0.0 }
    }

    /// Removes all samples, and keeps the memory.
    pub fn clear(&mut self) {
        self.histogram.reset();
        (self.count, self.min, self.max, self.mean, self.squares) = (0, u64::MAX, 0, 0.0, 0.0);
    }

    /// Adds a sample, in nanoseconds.
    #[inline]
    pub fn record(&mut self, nanos: u64) {
        self.record_many(nanos, 1);
    }

    /// Adds `count` equal samples, in nanoseconds each.
    #[inline]
    pub fn record_many(&mut self, nanos: u64, count: u64) {
        // A sample past the histogram's end counts in its last bucket; the exact maximum is kept
        // beside it.
        self.histogram.saturating_record_n(nanos, count);
        self.count += count;
        self.min = self.min.min(nanos);
        self.max = self.max.max(nanos);
        let (from_old_mean, count) = (nanos as f64 - self.mean, count as f64);
        self.mean += from_old_mean * count / self.count as f64;
        self.squares += from_old_mean * (nanos as f64 - self.mean) * count;
    }

    /// Adds all samples of another recorder.
    pub fn merge(&mut self, other: &Recorder) {
        if other.count == 0 {
            return;
        }
        self.histogram.add(&other.histogram).expect("both histograms have the same bounds");
        let (ours, theirs) = (self.count as f64, other.count as f64);
        let distance = other.mean - self.mean;
        let total = ours + theirs;
        self.mean += distance * theirs / total;
        self.squares += other.squares + distance * distance * ours * theirs / total;
        self.count += other.count;
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
    }

    /// The sample below which `quantile` (0 to 1) of all samples lie, in nanoseconds; 0 without
    /// samples.
    pub fn quantile(&self, quantile: f64) -> f64 {
        if self.count == 0 {
            return 0.0;
        }
        // The histogram answers with the upper end of a bucket, which may lie past the largest
        // sample.
        self.histogram.value_at_quantile(quantile).clamp(self.min, self.max) as f64
    }

    /// The figures, each multiplied by `scale`: one half turns round trips into one-way times.
    pub fn summary(&self, scale: f64) -> Summary {
        let variance = if self.count > 1 { self.squares / (self.count - 1) as f64 } else { 0.0 };
        Summary {
            count: self.count,
            min_ns: if self.count == 0 { 0.0 } else { self.min as f64 * scale },
            p50_ns: self.quantile(0.50) * scale,
            p90_ns: self.quantile(0.90) * scale,
            p99_ns: self.quantile(0.99) * scale,
            p999_ns: self.quantile(0.999) * scale,
            p9999_ns: self.quantile(0.9999) * scale,
            max_ns: self.max as f64 * scale,
            mean_ns: self.mean * scale,
            stdev_ns: variance.sqrt() * scale,
        }
    }
}

/// Statistics of the samples; times in nanoseconds.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// Number of samples.
    pub count: u64,
    /// The shortest, exactly.
    pub min_ns: f64,
    /// The median.
    pub p50_ns: f64,
    /// 90th percentile.
    pub p90_ns: f64,
    /// 99th percentile.
    pub p99_ns: f64,
    /// 99.9th percentile.
    pub p999_ns: f64,
    /// 99.99th percentile.
    pub p9999_ns: f64,
    /// The longest, exactly.
    pub max_ns: f64,
    /// The mean, of the samples themselves.
    pub mean_ns: f64,
    /// The sample standard deviation (n - 1), of the samples themselves.
    pub stdev_ns: f64,
}

/// The middle one of some figures, or the mean of the two in the middle; `None` of nothing.
pub fn median(figures: &[f64]) -> Option<f64> {
    let mut sorted = figures.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    let upper = *sorted.get(middle)?;
    if sorted.len() % 2 == 1 { Some(upper) } else { Some((sorted[middle - 1] + upper) / 2.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recorder(samples: &[u64]) -> Recorder {
        let mut recorder = Recorder::new();
        samples.iter().for_each(|&nanos| recorder.record(nanos));
        recorder
    }

    #[test]
    fn known_samples_give_exact_figures() {
        let summary = recorder(&[2, 4, 4, 4, 5, 5, 7, 9]).summary(1.0);
        assert_eq!(summary.count, 8);
        assert_eq!((summary.min_ns, summary.max_ns, summary.mean_ns), (2.0, 9.0, 5.0));
        assert!((summary.stdev_ns - (32.0f64 / 7.0).sqrt()).abs() < 1e-12, "{}", summary.stdev_ns);
        assert_eq!((summary.p50_ns, summary.p90_ns), (4.0, 9.0));
    }

    #[test]
    fn many_equal_samples_are_as_if_recorded_one_by_one() {
        let mut many = recorder(&[2]);
        many.record_many(4, 3);
        many.record_many(5, 2);
        many.record_many(7, 1);
        many.record_many(9, 1);
        assert_eq!(many.summary(1.0), recorder(&[2, 4, 4, 4, 5, 5, 7, 9]).summary(1.0));
    }

    #[test]
    fn percentiles_of_one_to_ten_thousand_are_within_three_digits() {
        let summary = recorder(&(1..=10_000).collect::<Vec<_>>()).summary(1.0);
        let near = |figure: f64, exact: f64| (figure - exact).abs() <= exact * 1e-3;
        assert!(near(summary.p50_ns, 5_000.0), "{summary:?}");
        assert!(near(summary.p90_ns, 9_000.0), "{summary:?}");
        assert!(near(summary.p99_ns, 9_900.0), "{summary:?}");
        assert!(near(summary.p999_ns, 9_990.0), "{summary:?}");
        assert!(near(summary.p9999_ns, 9_999.0), "{summary:?}");
        assert_eq!(summary.mean_ns, 5_000.5);
        let exact = (10_000.0f64 * 10_001.0 / 12.0).sqrt(); // of 1..=n with n - 1 below
        assert!((summary.stdev_ns - exact).abs() < 1e-6, "{} {exact}", summary.stdev_ns);
    }

    #[test]
    fn half_of_each_round_trip_is_the_one_way_time() {
        let summary = recorder(&[100, 300, 301]).summary(0.5);
        assert_eq!((summary.min_ns, summary.p50_ns, summary.max_ns), (50.0, 150.0, 150.5));
    }

    #[test]
    fn an_outlier_past_the_histogram_is_kept() {
        let summary = recorder(&[100, 100, 100, 2 * LONGEST_NS]).summary(1.0);
        assert_eq!((summary.count, summary.max_ns), (4, 2.0 * LONGEST_NS as f64));
    }

    #[test]
    fn merged_turns_are_as_if_recorded_in_one() {
        let (first, second) = ([5, 9, 1_000, 12], [7, 100_000, 3]);
        let mut merged = recorder(&first);
        merged.merge(&recorder(&second));
        merged.merge(&Recorder::new());
        let both = recorder(&[5, 9, 1_000, 12, 7, 100_000, 3]).summary(1.0);
        let merged = merged.summary(1.0);
        assert!((merged.stdev_ns - both.stdev_ns).abs() < 1e-6);
        assert!((merged.mean_ns - both.mean_ns).abs() < 1e-9);
        assert_eq!((merged.count, merged.p50_ns, merged.max_ns), (7, both.p50_ns, both.max_ns));
    }

    #[test]
    fn nothing_recorded_is_all_zeros() {
        let summary = Recorder::new().summary(1.0);
        assert_eq!((summary.count, summary.min_ns, summary.p50_ns, summary.stdev_ns), (0, 0.0, 0.0, 0.0));
    }

    #[test]
    fn the_median_ignores_order() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }
}
