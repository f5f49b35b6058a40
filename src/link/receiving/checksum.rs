//! Data validation (specification 3.8): a checksum follows each answer with bytes, and the value
//! counts only with it.
//!
//! A receiver asks for checksums in its requests. A receiver that does not ask pays nothing, and
//! two peers need not agree.

use crate::fabric::Port;
use crate::link::links::{Link, LinkContext};
use crate::link::receiving::stash::RejectedValue;
use crate::link::{Corruption, Received, RequestError, StashedValue};
use crate::memory::Tensor;
use crate::mutants::{Mutant, is_on};
use crate::protocol::{Arrival, Receiver};
use crate::telemetry::Counter;
use crate::wire::checksum_of;
use crate::wire::message::{Message, Placement, RequestId};

/// A value that has come and whose checksum is still to come.
#[derive(Debug)]
pub(in crate::link) enum Unverified {
    /// The value is at its destination.
    Placed(Received, Placement),
    /// The value does not fit its destination.
    RejectedValue(Box<RejectedValue>),
}

impl Unverified {
    fn bytes(&self) -> &[u8] {
        match self {
            Unverified::Placed(Received::Tensor(tensor), _) => tensor.bytes(),
            Unverified::Placed(Received::Into(given), _) => given.bytes(),
            Unverified::RejectedValue(rejected) => match &rejected.value {
                StashedValue::Tensor { tensor, .. } => tensor.bytes(),
                StashedValue::Bytes { bytes, .. } => bytes,
                StashedValue::Dead | StashedValue::Corrupted(_) => &[],
            },
            Unverified::Placed(Received::Dead(_), _) => &[],
        }
    }
}

fn checksum(bytes: &[u8]) -> u64 {
    if is_on(Mutant::ChecksumOfHead) { checksum_of(&bytes[..bytes.len().min(8)]) } else { checksum_of(bytes) }
}

impl<C> Link<C> {
    /// The machine of a plain request that is not sent yet.
    pub(in crate::link) fn unsent_machine(&self) -> Receiver {
        Receiver::unsent().validated(self.settings.validate)
    }

    /// The checksum of a value that is about to leave, if the peer asked for it.
    #[inline]
    pub(in crate::link) fn checksum(&self, validate: bool, value: &Tensor) -> Option<u64> {
        validate.then(|| checksum(value.bytes()))
    }

    /// Sends the checksum, directly behind its value.
    #[inline]
    pub(in crate::link) fn send_checksum<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        request: RequestId,
        checksum: Option<u64>,
    ) {
        if let Some(checksum) = checksum {
            self.send(cx, &Message::Checksum { request, checksum });
        }
    }

    /// Keeps a value until its checksum has come.
    pub(in crate::link) fn await_checksum(&mut self, id: RequestId, unverified: Unverified) {
        if let Some(request) = self.requests.get(id) {
            request.unverified = Some(unverified);
        }
    }

    /// `CHECKSUM`.
    pub(in crate::link) fn on_checksum<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        id: RequestId,
        sent: u64,
    ) -> Result<(), String> {
        let Some(request) = self.current(cx, id) else { return Ok(()) };
        let action = request.machine.arrive(Arrival::Checksum).map_err(|v| v.to_string())?;
        // The machine accepts a checksum only behind a value.
        let Some(unverified) = request.unverified.take() else { return Ok(()) };
        let is_late = request.waiter.is_none();
        cx.counters.increment(Counter::ChecksumsVerified);
        let actual = checksum(unverified.bytes());
        let is_right = actual == sent || is_on(Mutant::ChecksumNotCompared);
        if is_right || is_on(Mutant::CorruptedHandedOn) && is_late {
            match unverified {
                Unverified::Placed(received, sender) => self.deliver(cx, id, action, received, sender),
                Unverified::RejectedValue(rejected) => self.unwanted(cx, id, action, *rejected),
            }
            return Ok(());
        }
        cx.counters.increment(Counter::ChecksumMismatches);
        let corruption = Corruption { bytes: unverified.bytes().len() as u64, sent, actual };
        // The received memory goes back to its pool or its lender.
        drop(unverified);
        let (value, error) = (StashedValue::Corrupted(corruption), RequestError::Corrupted(corruption));
        self.unwanted(cx, id, action, RejectedValue { value, error });
        Ok(())
    }
}
