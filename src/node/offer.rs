//! The offers that two members exchange before they link: for each fabric an address, or why it is
//! refused.
//!
//! The side that starts the exchange offers every fabric that it can use. The other side answers
//! with the one that it chooses, and says why each faster one is refused.
//!
//! | bytes | |
//! |---|---|
//! | 4 | `twof` |
//! | 1 | version |
//! | 1 | number of fabrics |
//! | 1, 1, 2 | of each fabric: kind, [state](OfferState), bytes that follow |
//! | 4, 1, rest | offered: depth of the queue, failed attempts, address |
//! | all | refused: the reason, UTF-8 |

use crate::fabric::FabricKind;
use crate::wire::{TaskId, shorten};
use std::fmt;

const MAGIC: [u8; 4] = *b"twof";
const VERSION: u8 = 1;

/// Bytes of the longest reason. A longer one is cut.
const MAX_REASON: usize = 400;

/// One side's offer of one fabric.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FabricOffer {
    pub kind: FabricKind,
    pub state: OfferState,
}

/// Whether a side can use a fabric.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum OfferState {
    /// It has an endpoint there. Depth 0 stands for any. `failures` is how often in a row it could
    /// not make a link with the peer there.
    Offered { depth: u32, failures: u8, address: Vec<u8> },
    /// It does not use the fabric.
    Refused(FabricRefusal),
}

impl fmt::Debug for OfferState {
    /// Without the address, which may hold a token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OfferState::Offered { depth, failures, address } => {
                write!(f, "Offered(depth {depth}, {failures} failures, {} bytes)", address.len())
            }
            OfferState::Refused(refusal) => f.debug_tuple("Refused").field(refusal).finish(),
        }
    }
}

/// Why a fabric is not used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FabricRefusal {
    pub why: String,
    /// Whether no later attempt of the same two processes can differ.
    pub is_final: bool,
}

impl FabricRefusal {
    /// The refusal of this member.
    pub fn of(self, member: &TaskId) -> Self {
        FabricRefusal { why: format!("{member}: {}", self.why), ..self }
    }
}

const OFFERED: u8 = 0;
const REFUSED: u8 = 1;
const REFUSED_NOW: u8 = 2;

fn tag(kind: FabricKind) -> u8 {
    match kind {
        FabricKind::Shm => b's',
        FabricKind::Verbs => b'v',
        FabricKind::Tcp => b't',
        FabricKind::Grpc => b'g',
        #[cfg(any(test, feature = "sim"))]
        FabricKind::Sim => b'm',
    }
}

fn kind_of(tag: u8) -> Option<FabricKind> {
    FabricKind::NAMED.into_iter().find(|kind| self::tag(*kind) == tag)
}

impl FabricOffer {
    pub fn refused(kind: FabricKind, refusal: FabricRefusal) -> Self {
        FabricOffer { kind, state: OfferState::Refused(refusal) }
    }
}

/// The bytes of these offers.
pub(super) fn encode(offers: &[FabricOffer]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(MAGIC);
    // There are fewer kinds than 256.
    bytes.extend([VERSION, offers.len() as u8]);
    for FabricOffer { kind, state } in offers {
        let (state, parts): (u8, [&[u8]; 3]) = match state {
            OfferState::Offered { depth, failures, address } => {
                (OFFERED, [&depth.to_le_bytes(), &[*failures], address])
            }
            OfferState::Refused(FabricRefusal { why, is_final }) => {
                let cut = why.floor_char_boundary(MAX_REASON);
                (if *is_final { REFUSED } else { REFUSED_NOW }, [&[], &[], &why.as_bytes()[..cut]])
            }
        };
        // Addresses are shorter by far: the bootstrap service carries 64 KiB.
        let len = parts.iter().map(|part| part.len()).sum::<usize>() as u16;
        bytes.extend([tag(*kind), state]);
        bytes.extend(len.to_le_bytes());
        parts.iter().for_each(|part| bytes.extend(*part));
    }
    bytes
}

/// The offers in a peer's bytes.
///
/// # Errors
/// What is wrong with them.
pub(super) fn decode(bytes: &[u8]) -> Result<Vec<FabricOffer>, String> {
    let mut rest = OfferReader(bytes);
    if rest.take() != Some(MAGIC) {
        return Err(format!("{} bytes that are no offer of fabrics", bytes.len()));
    }
    let [version] = rest.take().ok_or("an offer without a version")?;
    if version != VERSION {
        return Err(format!(
            "an offer of version {version}, and this process speaks {VERSION}: run the same release on all \
             members"
        ));
    }
    let [count] = rest.take().ok_or("an offer that ends early")?;
    let mut offers = Vec::new();
    for _ in 0..count {
        offers.push(rest.offer().ok_or("an offer that ends early, or has a wrong field")?);
    }
    let is_twice = |at: usize| offers[..at].iter().any(|offer: &FabricOffer| offer.kind == offers[at].kind);
    match (0..offers.len()).find(|at| is_twice(*at)) {
        Some(at) => Err(format!("an offer that has {} twice", offers[at].kind)),
        None if rest.0.is_empty() => Ok(offers),
        None => Err(format!("an offer with {} bytes behind it", rest.0.len())),
    }
}

struct OfferReader<'a>(&'a [u8]);

impl OfferReader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*head)
    }

    fn offer(&mut self) -> Option<FabricOffer> {
        let [kind, state] = self.take()?;
        let len = usize::from(u16::from_le_bytes(self.take()?));
        let (body, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        let refused = |is_final| {
            let why = std::str::from_utf8(body).ok().filter(|why| why.len() <= MAX_REASON)?;
            Some(OfferState::Refused(FabricRefusal { why: shorten(why, MAX_REASON), is_final }))
        };
        let state = match state {
            OFFERED => {
                let (depth, rest) = body.split_first_chunk()?;
                let (failures, address) = rest.split_first()?;
                let (depth, failures) = (u32::from_le_bytes(*depth), *failures);
                OfferState::Offered { depth, failures, address: address.into() }
            }
            REFUSED => refused(true)?,
            REFUSED_NOW => refused(false)?,
            _ => return None,
        };
        Some(FabricOffer { kind: kind_of(kind)?, state })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn offers() -> Vec<FabricOffer> {
        let refusal = FabricRefusal { why: "no device".into(), is_final: true };
        let offered = OfferState::Offered { depth: 256, failures: 3, address: vec![7; 40] };
        vec![
            FabricOffer { kind: FabricKind::Shm, state: offered },
            FabricOffer::refused(FabricKind::Verbs, refusal),
        ]
    }

    #[test]
    fn offers_come_back_and_a_long_reason_is_cut_between_letters() {
        assert_eq!(decode(&encode(&offers())), Ok(offers()));
        let refusal = FabricRefusal { why: "ä".repeat(MAX_REASON), is_final: false };
        let cut = decode(&encode(&[FabricOffer::refused(FabricKind::Verbs, refusal)])).expect("valid");
        let OfferState::Refused(FabricRefusal { why, is_final: false }) = &cut[0].state else {
            panic!("{cut:?}")
        };
        assert_eq!(*why, "ä".repeat(MAX_REASON / 2));
    }

    #[test]
    fn a_reason_controls_no_terminal_and_has_one_line() {
        let refusal = FabricRefusal { why: "no\nERROR \x1b[2J".into(), is_final: true };
        let offers = decode(&encode(&[FabricOffer::refused(FabricKind::Verbs, refusal)])).expect("valid");
        let OfferState::Refused(FabricRefusal { why, .. }) = &offers[0].state else { panic!("{offers:?}") };
        assert_eq!(why, "no\\nERROR \\u{1b}[2J");
    }

    #[test]
    fn the_text_of_an_offer_has_no_byte_of_an_address() {
        let text = format!("{:?}", offers());
        assert!(text.contains("Offered(depth 256, 3 failures, 40 bytes)"), "{text}");
    }

    #[test]
    fn what_is_wrong_with_an_offer_is_said() {
        let good = encode(&offers());
        let changed = |at: usize, value: u8| {
            let mut bytes = good.clone();
            bytes[at] = value;
            decode(&bytes).expect_err("refused")
        };
        assert!(changed(0, b'x').contains("no offer"));
        assert!(changed(4, 9).contains("version 9"));
        assert!(changed(5, 3).contains("ends early"));
        assert!(changed(5, 1).contains("bytes behind it"));
        assert!(changed(6, b'?').contains("wrong field"));
        let twice = [offers(), offers()].concat();
        assert!(decode(&encode(&twice)).expect_err("refused").contains("shm twice"));
        for end in 0..good.len() {
            assert!(decode(&good[..end]).is_err(), "cut at {end}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused_or_come_back(tail in proptest::collection::vec(any::<u8>(), 0..60)) {
            let bytes = [&MAGIC[..], &[VERSION], &tail].concat();
            if let Ok(offers) = decode(&bytes) {
                prop_assert_eq!(encode(&offers), bytes);
            }
        }
    }
}
