//! The results of write_bw for one size: perftest's bandwidth table, and the same as JSON.

use super::measure::Elapsed;
use super::recorder::median;
use serde::Serialize;

/// One size.
#[derive(Debug, Serialize)]
pub struct Bandwidth {
    bytes: usize,
    /// Writes of all turns.
    iterations: u64,
    /// Of the median turn, in 10^9 bytes a second.
    gb_s: f64,
    /// Of the slowest and the fastest turn.
    gb_s_min: f64,
    gb_s_max: f64,
    /// Of the median turn, in 2^20 bytes a second, as perftest's `MB/sec`.
    mib_s: f64,
    /// Of the median turn, in million writes a second.
    mpps: f64,
    /// Time of a write in the median turn.
    ns_each: f64,
}

impl Bandwidth {
    /// The results of the turns of one size.
    pub fn of(bytes: usize, turns: &[Elapsed]) -> Self {
        let each: Vec<f64> = turns.iter().map(Elapsed::each).collect();
        let rate = |nanos: f64| if nanos > 0.0 { bytes as f64 / nanos } else { 0.0 };
        let ns_each = median(&each).unwrap_or_default();
        let (fastest, slowest) =
            each.iter().fold((f64::INFINITY, 0f64), |(low, high), &each| (low.min(each), high.max(each)));
        Bandwidth {
            bytes,
            iterations: turns.iter().map(|turn| turn.count).sum(),
            gb_s: rate(ns_each),
            gb_s_min: rate(slowest),
            gb_s_max: rate(fastest),
            mib_s: rate(ns_each) * 1e9 / f64::from(1 << 20),
            mpps: if ns_each > 0.0 { 1e3 / ns_each } else { 0.0 },
            ns_each,
        }
    }

    /// The table's head.
    pub fn head() -> String {
        format!(
            " {:<10} {:<12} {:<18} {:<18} {:<20} {:<10} {:<13}\n",
            "#bytes",
            "#iterations",
            "BW min[MiB/sec]",
            "BW max[MiB/sec]",
            "BW typical[MiB/sec]",
            "BW[GB/s]",
            "MsgRate[Mpps]"
        )
    }

    /// One line of text under the columns of `head`.
    pub fn row(&self) -> String {
        let mib = |gb_s: f64| gb_s * 1e9 / f64::from(1 << 20);
        format!(
            " {:<10} {:<12} {:<18.2} {:<18.2} {:<20.2} {:<10.3} {:<13.6}\n",
            self.bytes,
            self.iterations,
            mib(self.gb_s_min),
            mib(self.gb_s_max),
            self.mib_s,
            self.gb_s,
            self.mpps
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_of_the_median_turn_and_a_gigabyte_is_decimal() {
        let turns = [2_000, 1_000, 500].map(|nanos| Elapsed { count: 10, nanos: nanos * 10 });
        let of = Bandwidth::of(1 << 20, &turns);
        assert_eq!((of.iterations, of.ns_each, of.mpps), (30, 1000.0, 1.0));
        assert_eq!((of.gb_s, of.gb_s_min, of.gb_s_max), (1048.576, 524.288, 2097.152));
        assert_eq!(of.mib_s, 1e6);
        let row = of.row();
        let row: Vec<&str> = row.split_whitespace().collect();
        assert_eq!(row, ["1048576", "30", "500000.00", "2000000.00", "1000000.00", "1048.576", "1.000000"]);
        assert_eq!(Bandwidth::head().split_whitespace().next(), Some("#bytes"));
    }
}
