//! A histogram of receive times that processes can send to each other and merge.

use hdrhistogram::Histogram;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::time::Duration;

/// The longest duration that the histogram distinguishes, in nanoseconds: an hour.
const LONGEST: u64 = 3_600_000_000_000;

/// A histogram of durations, exact to a thousandth. Recording never allocates.
#[derive(Clone, Debug)]
pub struct Latencies(Histogram<u64>);

impl Default for Latencies {
    fn default() -> Self {
        Latencies(Histogram::new_with_max(LONGEST, 3).expect("the bound and 3 digits are allowed"))
    }
}

impl Latencies {
    /// Records a duration.
    pub fn record(&mut self, took: Duration) {
        self.0.saturating_record(took.as_nanos().try_into().unwrap_or(u64::MAX));
    }

    /// Adds the durations of `other`.
    pub fn add(&mut self, other: &Latencies) {
        self.0.add(&other.0).expect("all have the same bounds");
    }

    /// The quantile (0 to 1) in nanoseconds; `None` without durations.
    pub fn quantile_ns(&self, share: f64) -> Option<u64> {
        (!self.0.is_empty()).then(|| self.0.value_at_quantile(share))
    }
}

impl Serialize for Latencies {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter_recorded().map(|at| (at.value_iterated_to(), at.count_at_value())))
    }
}

impl<'de> Deserialize<'de> for Latencies {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let counts: Vec<(u64, u64)> = Deserialize::deserialize(deserializer)?;
        let mut latencies = Latencies::default();
        for (value, count) in counts {
            latencies.0.saturating_record_n(value, count);
        }
        Ok(latencies)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_two_processes_counted_adds_up() {
        let [mut ours, mut theirs] = [Latencies::default(), Latencies::default()];
        (1..=50).for_each(|us| ours.record(Duration::from_micros(us)));
        (51..=100).for_each(|us| theirs.record(Duration::from_micros(us)));
        let sent = serde_json::to_string(&theirs).expect("json");
        ours.add(&serde_json::from_str(&sent).expect("the same"));
        let near =
            |share, ns: u64| ours.quantile_ns(share).is_some_and(|found| found.abs_diff(ns) < ns / 500);
        assert!(near(0.5, 50_000) && near(0.99, 99_000), "{:?}", ours.quantile_ns(0.99));
    }

    #[test]
    fn there_is_no_median_of_nothing() {
        assert_eq!(Latencies::default().quantile_ns(0.5), None);
    }
}
