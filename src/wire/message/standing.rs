//! `STANDING_REQUEST`: requests for the same tensor of several steps that have not begun.

use super::decode::MessageReader;
use super::encode::request_bits;
use super::{FLAG_BORROW, FLAG_GRANT, FLAG_VALIDATE, MessageError, RequestId, STANDING_REQUEST};
use crate::wire::{Grant, Slot};

/// Steps that one message can request. About ten steps with destinations fit a control slot. A
/// longer message travels in fragments.
pub const MAX_STANDING_STEPS: usize = 256;

/// Bytes of a step without a destination, and with one.
const BARE: usize = 4;
const GRANTED: usize = 16;

/// Standing requests: one for each of several consecutive steps. A standing request differs from a
/// `TENSOR_REQUEST` in two points. It has no deadline. The sender may write a tensor that is
/// smaller than the destination there, behind its meta-data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StandingRequest<'a> {
    /// The route, announced by an earlier `ROUTE`.
    pub route: u32,
    /// Id of the first step.
    pub first_step: u64,
    /// Frame of the edge.
    pub frame: u64,
    /// Iteration of the edge.
    pub iteration: u64,
    /// Version of the meta-data that the receiver has cached for the route; 0 for none.
    pub meta_version: u32,
    /// Whether the receiver would borrow the tensors where they lie.
    pub borrow: bool,
    /// Whether the sender is to send the checksum behind the bytes of each answer.
    pub validate: bool,
    /// The region of all destinations and the length of each, if there are any.
    pub room: Option<(u16, u64)>,
    /// The steps, first to last.
    pub steps: StandingSteps<'a>,
}

/// One step of a [`StandingRequest`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StandingStep {
    /// Slot and generation at the receiver.
    pub request: RequestId,
    /// Key and offset of its destination; 0 if there is none.
    pub key: u32,
    /// Where it starts, in bytes from the start of the region.
    pub offset: u64,
}

/// The steps of a [`StandingRequest`], as they travel: neither end makes a list of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StandingSteps<'a> {
    bytes: &'a [u8],
    granted: bool,
}

impl StandingStep {
    /// Appends the step to those in `out`; `granted` says whether it has a destination, which all
    /// or none have.
    pub fn put(&self, out: &mut Vec<u8>, granted: bool) {
        out.extend_from_slice(&request_bits(self.request).to_le_bytes());
        if granted {
            out.extend_from_slice(&self.key.to_le_bytes());
            out.extend_from_slice(&self.offset.to_le_bytes());
        }
    }
}

impl<'a> StandingSteps<'a> {
    /// Steps that [`StandingStep::put`] wrote, all with the same `granted`.
    pub fn new(bytes: &'a [u8], granted: bool) -> Self {
        StandingSteps { bytes, granted }
    }

    fn each(&self) -> usize {
        if self.granted { GRANTED } else { BARE }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.each()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The steps, first to last.
    pub fn iter(&self) -> impl Iterator<Item = StandingStep> + 'a {
        let granted = self.granted;
        self.bytes.chunks_exact(self.each()).filter_map(move |bytes| read(bytes, granted).ok())
    }
}

/// One step of a message. An invalid request is returned as the error.
fn read(bytes: &[u8], granted: bool) -> Result<StandingStep, u32> {
    let number =
        |at: usize| bytes.get(at..at + 4).and_then(|four| four.try_into().ok()).map_or(0, u32::from_le_bytes);
    let bits = number(0);
    let slot = Slot::new(bits & (Slot::COUNT - 1)).filter(|_| bits >> 28 == 0).ok_or(bits)?;
    let request = RequestId { slot, generation: (bits >> 20) as u8 };
    let (key, offset) = match granted {
        true => (number(4), u64::from(number(8)) | u64::from(number(12)) << 32),
        false => (0, 0),
    };
    Ok(StandingStep { request, key, offset })
}

impl StandingRequest<'_> {
    /// The destination of one of its steps.
    pub fn grant(&self, step: &StandingStep) -> Option<Grant> {
        let (region, len) = self.room?;
        Some(Grant { region, key: step.key, offset: step.offset, len })
    }

    pub(super) fn put(&self, out: &mut Vec<u8>) {
        debug_assert!(
            self.steps.granted == self.room.is_some() && (1..=MAX_STANDING_STEPS).contains(&self.steps.len())
        );
        let grant = if self.room.is_some() { FLAG_GRANT } else { 0 };
        let borrow = if self.borrow { FLAG_BORROW } else { 0 };
        let validate = if self.validate { FLAG_VALIDATE } else { 0 };
        out.push(STANDING_REQUEST);
        out.push(grant | borrow | validate);
        out.extend_from_slice(&self.route.to_le_bytes());
        for number in [self.first_step, self.frame, self.iteration] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        out.extend_from_slice(&self.meta_version.to_le_bytes());
        if let Some((region, len)) = self.room {
            out.extend_from_slice(&region.to_le_bytes());
            out.extend_from_slice(&len.to_le_bytes());
        }
        out.extend_from_slice(self.steps.bytes);
    }
}

impl<'a> MessageReader<'a> {
    pub(super) fn standing_request(&mut self) -> Result<StandingRequest<'a>, MessageError> {
        let flags = self.flags(FLAG_GRANT | FLAG_BORROW | FLAG_VALIDATE)?;
        let granted = flags & FLAG_GRANT != 0;
        let (route, first_step) = (self.u32("route")?, self.u64("first step")?);
        let (frame, iteration) = (self.u64("frame")?, self.u64("iteration")?);
        let meta_version = self.u32("meta version")?;
        let room = if granted { Some((self.u16("region")?, self.u64("length")?)) } else { None };
        let steps = StandingSteps::new(std::mem::take(&mut self.rest), granted);
        let count = steps.len();
        if !steps.bytes.len().is_multiple_of(steps.each()) || count == 0 {
            return Err(self.short("steps"));
        }
        if count > MAX_STANDING_STEPS || first_step.checked_add(count as u64 - 1).is_none() {
            return Err(self.bad("number of steps", count as u64));
        }
        for bytes in steps.bytes.chunks_exact(steps.each()) {
            read(bytes, granted).map_err(|bits| self.bad("request", bits.into()))?;
        }
        let (borrow, validate) = (flags & FLAG_BORROW != 0, flags & FLAG_VALIDATE != 0);
        Ok(StandingRequest {
            route,
            first_step,
            frame,
            iteration,
            meta_version,
            borrow,
            validate,
            room,
            steps,
        })
    }
}
