//! What an answer says before its bytes.
//!
//! | bytes | |
//! |---|---|
//! | 1 | [flags](DEAD) |
//! | 8 | checksum, if it has one |
//! | rest | the message `META` of [`crate::wire::message`], unless the value is dead |

use crate::wire::message::{Message, Placement, VersionedMeta};
use crate::wire::{Status, TensorMeta};

/// The value is dead.
const DEAD: u8 = 1;
/// A checksum follows.
const CHECKSUM: u8 = 2;
/// There is no value, and the bytes say why.
const FAILED: u8 = 4;

/// A value without its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerHead {
    /// That of a branch not taken.
    Dead,
    /// None. The bytes are those of [`encode_failure`].
    Failed,
    /// Its elements, or the serialised form.
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
            AnswerHead::Failed => out.push(FAILED),
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
            FAILED if rest.is_empty() => Ok(AnswerHead::Failed),
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

/// The bytes of a failure: the message `STEPS_OVER`, whose texts are bounded.
pub(super) fn encode_failure(status: Status) -> Vec<u8> {
    let mut bytes = Vec::new();
    Message::StepsOver { first: 0, last: 0, status: Some(status) }.encode(&mut bytes);
    bytes
}

/// Reads the failure of a peer.
///
/// # Errors
/// What is wrong with it.
pub(super) fn decode_failure(bytes: &[u8]) -> Result<Status, String> {
    match Message::decode(bytes).map_err(|error| error.to_string())? {
        Message::StepsOver { status: Some(status), .. } => Ok(status),
        _ => Err("a failure with another message than STEPS_OVER".into()),
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
        for head in [AnswerHead::Dead, AnswerHead::Failed] {
            assert_eq!(AnswerHead::decode(&head.encode()), Ok(head));
        }
        let status = Status::new(crate::wire::Code::Aborted, "no").with_details(vec![7]).into_derived();
        assert_eq!(decode_failure(&encode_failure(status.clone())), Ok(status));
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
