//! Random numbers that are the same on every machine: SplitMix64.

/// A generator. Two with the same seed and stream give the same numbers.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The generator of one `stream` (a purpose, such as a tensor's first values) under `seed`.
    pub fn new(seed: u64, stream: u64) -> Random {
        // One round each, so that neighbouring seeds and streams are independent.
        let mut seeded = Random(seed);
        let mut streamed = Random(seeded.bits() ^ stream);
        Random(streamed.bits())
    }

    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number from -`limit` to `limit`.
    pub fn within(&mut self, limit: f32) -> f32 {
        // 24 bits: the precision of an f32.
        let unit = (self.bits() >> 40) as f32 / (1u32 << 24) as f32;
        (unit * 2.0 - 1.0) * limit
    }

    /// A whole number below `bound`, which must not be 0. The bias is below 2^-50 for the few
    /// thousand we need.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.bits() % bound as u64) as usize
    }

    /// Shuffles the items.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_and_stream_give_the_same_numbers_and_others_do_not() {
        let draw = |seed, stream| Random::new(seed, stream).bits();
        assert_eq!(draw(1, 2), draw(1, 2));
        assert_ne!(draw(1, 2), draw(2, 1));
        assert_ne!(draw(1, 2), draw(1, 3));
    }

    #[test]
    fn a_shuffle_keeps_every_item() {
        let mut items: Vec<usize> = (0..1000).collect();
        Random::new(7, 0).shuffle(&mut items);
        assert_ne!(items, (0..1000).collect::<Vec<_>>());
        items.sort_unstable();
        assert_eq!(items, (0..1000).collect::<Vec<_>>());
    }

    #[test]
    fn numbers_stay_within_the_limit_and_fill_it() {
        let mut random = Random::new(3, 0);
        let drawn: Vec<f32> = (0..10_000).map(|_| random.within(2.0)).collect();
        assert!(drawn.iter().all(|x| (-2.0..=2.0).contains(x)));
        assert!(drawn.iter().any(|x| *x > 1.9) && drawn.iter().any(|x| *x < -1.9));
    }
}
