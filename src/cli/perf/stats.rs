//! Exact mean, deviation and extremes; percentiles from an HDR histogram. No sample is dropped.

use hdrhistogram::Histogram;
use serde_json::{Value, json};

/// Samples of one size, in nanoseconds.
pub struct Samples {
    histogram: Histogram<u64>,
    count: u64,
    mean: f64,
    squares: f64,
    min: f64,
    max: f64,
}

/// An hour in hundredths of a nanosecond: what is longer counts as an hour in the percentiles.
const HOUR: u64 = 3600 * 1_000_000_000 * 100;

/// Hundredths of a nanosecond are kept: a one-way time is half of a round trip.
const SCALE: f64 = 100.0;

impl Samples {
    /// No samples yet.
    pub fn new() -> Self {
        // Up to an hour in hundredths of a nanosecond, to three digits: bounds that are always allowed.
        #[allow(clippy::expect_used)]
        let histogram = Histogram::new_with_bounds(1, HOUR, 3).expect("valid bounds");
        Samples { histogram, count: 0, mean: 0.0, squares: 0.0, min: f64::INFINITY, max: 0.0 }
    }

    /// Adds a sample (Welford's way, which does not lose digits).
    pub fn add(&mut self, ns: f64) {
        self.histogram.saturating_record((ns * SCALE) as u64);
        self.count += 1;
        let delta = ns - self.mean;
        self.mean += delta / self.count as f64;
        self.squares += delta * (ns - self.mean);
        self.min = self.min.min(ns);
        self.max = self.max.max(ns);
    }

    /// The value below which this share of the samples lies, exact to three digits and never beyond the
    /// extremes.
    pub fn quantile(&self, share: f64) -> f64 {
        (self.histogram.value_at_quantile(share) as f64 / SCALE).clamp(self.min, self.max)
    }

    /// The true standard deviation of the samples.
    pub fn stdev(&self) -> f64 {
        if self.count < 2 { 0.0 } else { (self.squares / (self.count - 1) as f64).sqrt() }
    }

    /// A row of perftest's latency table, in microseconds.
    pub fn row(&self, bytes: usize) -> String {
        let us = |ns: f64| ns / 1000.0;
        format!(
            " {:<10} {:<12} {:<14.3} {:<14.3} {:<20.3} {:<14.3} {:<14.3} {:<22.3} {:<22.3}",
            bytes,
            self.count,
            us(self.min),
            us(self.max),
            us(self.quantile(0.5)),
            us(self.mean),
            us(self.stdev()),
            us(self.quantile(0.99)),
            us(self.quantile(0.999)),
        )
    }

    /// The head of perftest's latency table.
    pub fn head() -> String {
        format!(
            " {:<10} {:<12} {:<14} {:<14} {:<20} {:<14} {:<14} {:<22} {:<22}",
            "#bytes",
            "#iterations",
            "t_min[usec]",
            "t_max[usec]",
            "t_typical[usec]",
            "t_avg[usec]",
            "t_stdev[usec]",
            "99% percentile[usec]",
            "99.9% percentile[usec]"
        )
    }

    /// An entry of `results`.
    pub fn json(&self, bytes: usize) -> Value {
        json!({
            "bytes": bytes,
            "iterations": self.count,
            "min_ns": self.min,
            "p50_ns": self.quantile(0.5),
            "p90_ns": self.quantile(0.9),
            "p99_ns": self.quantile(0.99),
            "p999_ns": self.quantile(0.999),
            "p9999_ns": self.quantile(0.9999),
            "max_ns": self.max,
            "mean_ns": self.mean,
            "stdev_ns": self.stdev(),
        })
    }
}

/// The middle of a list, with its extremes.
pub fn median(values: &mut [f64]) -> Option<(f64, f64, f64)> {
    values.sort_by(f64::total_cmp);
    Some((*values.get(values.len() / 2)?, *values.first()?, *values.last()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(values: impl IntoIterator<Item = u32>) -> Samples {
        let mut samples = Samples::new();
        values.into_iter().for_each(|value| samples.add(f64::from(value)));
        samples
    }

    #[test]
    fn mean_deviation_and_extremes_are_exact() {
        let samples = samples([2, 4, 4, 4, 5, 5, 7, 9]);
        assert_eq!((samples.count, samples.mean, samples.min, samples.max), (8, 5.0, 2.0, 9.0));
        assert!((samples.stdev() - (32.0_f64 / 7.0).sqrt()).abs() < 1e-12);
    }

    #[test]
    fn percentiles_are_good_to_three_digits() {
        let samples = samples(1..=10_000);
        for (share, value) in [(0.5, 5000.0), (0.9, 9000.0), (0.99, 9900.0), (0.999, 9990.0), (1.0, 10_000.0)]
        {
            let got = samples.quantile(share);
            assert!((got - value).abs() / value < 0.001, "{share}: {got}");
        }
    }

    #[test]
    fn one_sample_is_all_of_its_figures() {
        let samples = samples([123]);
        let json = samples.json(8);
        for key in ["min_ns", "p50_ns", "p90_ns", "p99_ns", "p999_ns", "max_ns", "mean_ns"] {
            assert_eq!(json[key], 123.0, "{key}");
        }
        assert_eq!(
            (&json["bytes"], &json["iterations"], &json["stdev_ns"]),
            (&json!(8), &json!(1), &json!(0.0))
        );
    }

    #[test]
    fn the_median_comes_with_its_spread() {
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), Some((2.0, 1.0, 3.0)));
        assert_eq!(median(&mut []), None);
    }
}
