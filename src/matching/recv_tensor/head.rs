//! What an answer says before its bytes.
//!
//! | bytes | |
//! |---|---|
//! | 1 | [flags](DEAD) |
//! | 8 | checksum, if it has one |
//! | rest | the message `META` of [`crate::wire::message`], unless the value is dead |

use crate::wire::TensorMeta;
use crate::wire::message::{Message, Placement, VersionedMeta};

/// The value is dead.
const DEAD: u8 = 1;
/// A checksum follows.
const CHECKSUM: u8 = 2;

/// A value without its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerHead {
    /// That of a branch not taken.
    Dead,
    /// A tensor.
    Tensor {
        /// Element type and shape.
        meta: TensorMeta,
        /// Where the tensor lies at the sender.
        placement: Placement,
        /// The sender's checksum of the bytes.
        checksum: Option<u64>,
    },
}

impl AnswerHead {
    /// The bytes that travel.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            AnswerHead::Dead => out.push(DEAD),
            AnswerHead::Tensor { meta, placement, checksum } => {
                out.push(if checksum.is_some() { CHECKSUM } else { 0 });
                checksum.iter().for_each(|sum| out.extend(sum.to_le_bytes()));
                let meta = VersionedMeta { version: 1, placement: *placement, meta: meta.clone() };
                Message::Meta(meta).encode(&mut out);
            }
        }
        out
    }

    /// Reads the bytes of a peer.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let (flags, mut rest) = bytes.split_first().ok_or("an empty head")?;
        let checksum = match flags & CHECKSUM {
            0 => None,
            _ => {
                let (sum, behind) = rest.split_first_chunk().ok_or("a head that ends early")?;
                rest = behind;
                Some(u64::from_le_bytes(*sum))
            }
        };
        match *flags {
            DEAD if rest.is_empty() => Ok(AnswerHead::Dead),
            0 | CHECKSUM => match Message::decode(rest).map_err(|error| error.to_string())? {
                Message::Meta(VersionedMeta { placement, meta, .. }) => {
                    Ok(AnswerHead::Tensor { meta, placement, checksum })
                }
                _ => Err("a head with another message than META".into()),
            },
            _ => Err(format!("a head with flags {flags:#x} and {} bytes behind them", rest.len())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{DType, Shape};
    use proptest::prelude::*;

    #[test]
    fn heads_come_back() {
        let meta = TensorMeta::new(DType::F32, Shape::new(&[3, 0, 7]).expect("valid")).expect("valid");
        for checksum in [None, Some(u64::MAX)] {
            let head = AnswerHead::Tensor { meta: meta.clone(), placement: Placement::HEAP, checksum };
            let bytes = head.encode();
            assert_eq!(AnswerHead::decode(&bytes), Ok(head));
            (0..bytes.len()).for_each(|end| assert!(AnswerHead::decode(&bytes[..end]).is_err(), "{end}"));
        }
        assert_eq!(AnswerHead::decode(&AnswerHead::Dead.encode()), Ok(AnswerHead::Dead));
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused_or_come_back(bytes in proptest::collection::vec(any::<u8>(), 0..60)) {
            if let Ok(head) = AnswerHead::decode(&bytes) {
                prop_assert_eq!(AnswerHead::decode(&head.encode()), Ok(head));
            }
        }
    }
}
