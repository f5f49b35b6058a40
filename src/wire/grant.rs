//! The memory that a peer may write or read.

use std::fmt;

/// Leave to access `len` bytes at `offset` of a region of the granting process.
///
/// No raw address is in it: a region is known by number since the link was made. The side that
/// resolves a grant checks region, key and bounds one by one (specification 3.1a).
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Grant {
    /// Which of the granter's regions.
    pub region: u16,
    /// Proof of the leave: an rkey on verbs, a random number on software fabrics.
    pub key: u32,
    /// Where it starts, in bytes from the start of the region.
    pub offset: u64,
    /// How many bytes.
    pub len: u64,
}

impl fmt::Debug for Grant {
    /// Without the key, which is for the peer alone.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Grant { region, key: _, offset, len } = self;
        let mut text = f.debug_struct("Grant");
        text.field("region", region).field("offset", offset).field("len", len).finish_non_exhaustive()
    }
}

impl Grant {
    /// `len` bytes of this grant, `skip` bytes after its start; `None` if they are not inside it.
    pub fn part(&self, skip: u64, len: u64) -> Option<Grant> {
        let end = skip.checked_add(len)?;
        if end > self.len {
            return None;
        }
        let offset = self.offset.checked_add(skip)?;
        Some(Grant { offset, len, ..*self })
    }
}

#[cfg(test)]
impl Grant {
    /// Checks that a text does not have the key. A small one may be there by chance.
    pub(crate) fn assert_key_hidden_in(&self, text: &str) {
        let key = self.key;
        if key < 1 << 24 {
            return;
        }
        let text = text.to_lowercase();
        assert!(!text.contains(&key.to_string()) && !text.contains(&format!("{key:x}")), "{text}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::message::Message;
    use crate::wire::{EdgeId, Immediate, Slot};

    #[test]
    fn the_key_is_in_no_text() {
        let target = Grant { key: 0xDEAD_BEEF, ..WHOLE };
        let immediate = Immediate { generation: 1, slot: Slot::ZERO };
        let edge = EdgeId { number: 1, generation: 2 };
        for text in [
            format!("{target:?} {target:#?} {:?}", target.part(1, 2)),
            format!("{:?}", Message::Grant { offer: 5, immediate, target }),
            format!("{:#?}", Message::Ready { edge, immediate, target }),
        ] {
            assert!(text.contains("Grant {") && text.contains("offset"), "{text}");
            target.assert_key_hidden_in(&text);
        }
    }

    const WHOLE: Grant = Grant { region: 1, key: 7, offset: 100, len: 50 };

    #[test]
    fn a_part_lies_inside_the_whole() {
        assert_eq!(WHOLE.part(10, 40), Some(Grant { offset: 110, len: 40, ..WHOLE }));
        assert_eq!(WHOLE.part(50, 0), Some(Grant { offset: 150, len: 0, ..WHOLE }));
        assert_eq!(WHOLE.part(10, 41), None);
    }

    #[test]
    fn a_part_whose_end_overflows_is_refused() {
        assert_eq!(WHOLE.part(u64::MAX, 2), None);
        let high = Grant { offset: u64::MAX - 1, len: 50, ..WHOLE };
        assert_eq!(high.part(10, 1), None);
    }
}
