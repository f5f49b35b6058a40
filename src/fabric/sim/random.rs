//! The seeded generator behind every choice of the network.

use std::ops::RangeInclusive;
use std::time::Duration;

/// SplitMix64 (Steele, Lea and Flood 2014): one addition and a mix for each number; any seed is
/// good.
#[derive(Clone, Debug)]
pub(super) struct SimRandom(u64);

impl SimRandom {
    pub fn new(seed: u64) -> Self {
        SimRandom(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A random duration of this range.
    pub fn within(&mut self, range: &RangeInclusive<Duration>) -> Duration {
        let (start, end) = (range.start().as_nanos() as u64, range.end().as_nanos() as u64);
        let width = end.saturating_sub(start).saturating_add(1);
        Duration::from_nanos(start + self.next() % width)
    }

    /// True with a probability of `per_mille` in a thousand.
    pub fn chance(&mut self, per_mille: u32) -> bool {
        per_mille > 0 && self.next() % 1000 < u64::from(per_mille)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_stay_in_their_range_and_chances_are_about_right() {
        let mut random = SimRandom::new(7);
        let range = Duration::from_nanos(5)..=Duration::from_nanos(8);
        let mut seen = [0; 4];
        for _ in 0..1000 {
            seen[random.within(&range).as_nanos() as usize - 5] += 1;
        }
        assert!(seen.iter().all(|count| *count > 150), "{seen:?}");
        let hits = (0..10_000).filter(|_| random.chance(100)).count();
        assert!((700..1300).contains(&hits), "{hits}");
        assert!((0..100).all(|_| !random.chance(0)));
    }
}
