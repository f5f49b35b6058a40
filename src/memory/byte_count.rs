//! Byte counts in readable units.

use std::fmt;

/// Shows a number of bytes in the largest unit that is not larger: "64 MiB", or "1.5 GiB" with one
/// decimal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ByteCount(pub(super) u64);

const UNITS: [(&str, u64); 4] = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

impl fmt::Display for ByteCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((name, unit)) = UNITS.into_iter().find(|(_, unit)| self.0 >= *unit) else {
            return write!(f, "{} B", self.0);
        };
        if self.0.is_multiple_of(unit) {
            return write!(f, "{} {name}", self.0 / unit);
        }
        write!(f, "{:.1} {name}", self.0 as f64 / unit as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_units_have_no_decimals_and_others_have_one() {
        assert_eq!(ByteCount(64 << 20).to_string(), "64 MiB");
        assert_eq!(ByteCount(3 << 29).to_string(), "1.5 GiB");
        assert_eq!(ByteCount(0).to_string(), "0 B");
        assert_eq!(ByteCount(1023).to_string(), "1023 B");
    }
}
