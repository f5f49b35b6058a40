//! The keys of the grants of a link, on the fabrics that are software.

use std::hash::BuildHasher;

/// Rounds of the Feistel network.
const ROUNDS: u8 = 6;

/// The keys of one link: the numbers from 0 on, each encrypted by a secret of the link. So no key
/// tells another one, and none comes twice in 2^32.
pub(super) struct GrantKeys<S> {
    /// A hash function that nobody but this process knows.
    secret: S,
    drawn: u32,
}

impl<S: BuildHasher> GrantKeys<S> {
    pub(super) fn new(secret: S) -> Self {
        GrantKeys { secret, drawn: 0 }
    }

    /// The key of the next grant.
    pub(super) fn draw(&mut self) -> u32 {
        let (mut left, mut right) = ((self.drawn >> 16) as u16, self.drawn as u16);
        self.drawn = self.drawn.wrapping_add(1);
        for round in 0..ROUNDS {
            (left, right) = (right, left ^ self.secret.hash_one((round, right)) as u16);
        }
        u32::from(left) << 16 | u32::from(right)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use foldhash::quality::FixedState;
    use std::collections::HashSet;
    use std::hash::RandomState;

    fn draws(mut keys: GrantKeys<impl BuildHasher>, count: usize) -> Vec<u32> {
        (0..count).map(|_| keys.draw()).collect()
    }

    #[test]
    fn no_key_comes_twice() {
        let keys = draws(GrantKeys::new(RandomState::new()), 1 << 20);
        assert_eq!(keys.iter().collect::<HashSet<_>>().len(), keys.len());
    }

    #[test]
    fn keys_of_a_link_tell_no_other_key_of_it_or_of_another_link() {
        const COUNT: usize = 4096;
        fn check(first: &[u32], second: &[u32]) {
            // Counts, strides and a mask that both links share would repeat a difference.
            for differ in [u32::wrapping_sub as fn(u32, u32) -> u32, |one, other| one ^ other] {
                let among = first.windows(2).map(|keys| differ(keys[1], keys[0]));
                assert!(among.collect::<HashSet<_>>().len() > COUNT - 8);
                let between = first.iter().zip(second).map(|(one, other)| differ(*one, *other));
                assert!(between.collect::<HashSet<_>>().len() > COUNT - 8);
            }
            for bit in 0..32 {
                let ones = first.iter().filter(|key| *key >> bit & 1 == 1).count();
                assert!((COUNT * 2 / 5..COUNT * 3 / 5).contains(&ones), "bit {bit}: {ones} of {COUNT}");
            }
        }
        let random = || draws(GrantKeys::new(RandomState::new()), COUNT);
        check(&random(), &random());
        let seeded = |seed| draws(GrantKeys::new(FixedState::with_seed(seed)), COUNT);
        check(&seeded(1), &seeded(2));
        assert_eq!(seeded(1), seeded(1), "the simulation runs again as it ran");
    }
}
