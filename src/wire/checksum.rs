//! The checksum of a tensor's bytes in data validation mode.

/// XXH3 with 64 bits and seed 0, the checksum of `CHECKSUM` (specification 3.8). It detects errors
/// of memory, buses and NICs. It does not protect against a malicious peer.
pub fn checksum_of(bytes: &[u8]) -> u64 {
    twox_hash::XxHash3_64::oneshot(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_the_published_one() {
        assert_eq!(checksum_of(b""), 0x2d06_8005_38d3_94c2, "of the specification's reference");
    }

    #[test]
    fn every_bit_counts_wherever_it_is() {
        for len in [1, 16, 17, 128, 240, 241, 1000, 5000] {
            let mut bytes: Vec<u8> = (0..len).map(|n| n as u8).collect();
            let whole = checksum_of(&bytes);
            for at in [0, len / 2, len - 1] {
                for bit in 0..8 {
                    bytes[at] ^= 1 << bit;
                    assert_ne!(checksum_of(&bytes), whole, "bit {bit} of byte {at} of {len}");
                    bytes[at] ^= 1 << bit;
                }
            }
        }
    }
}
