//! Messages of this process's windows to the peer.

use super::incoming::MAX_RECORD_TEXT;
use super::{AskedOfEdge, WindowRefusal, is_borrowable};
use crate::fabric::{LinkLimits, MAX_LOAN_MESSAGE, MAX_MESSAGE, Port};
use crate::link::links::{Link, LinkContext};
use crate::link::{EdgeKey, Value, placement_of};
use crate::memory::{Tensor, copy};
use crate::mutants::{Mutant, is_on};
use crate::protocol::{Record, StepsOver, Taken, ToReceiver, ToSender};
use crate::telemetry::{Counter, FlightEvent};
use crate::wire::message::{
    EdgeAnnouncement, EdgeCredits, LentRecord, Message, PlainRecord, RecordValue, VersionedMeta,
};
use crate::wire::{Code, EdgeId, Status, checksum_of};
use std::sync::Arc;

/// Bytes of a record before the bytes of its tensor: type, flags, edge, count, step, checksum and
/// meta id.
pub(super) const RECORD_HEAD: usize = 2 + 6 + 2 + 8 + 8 + 2;

/// Bytes of the longest tensor that a record in a control slot carries.
pub(super) const MAX_IN_RECORD: usize = MAX_MESSAGE - RECORD_HEAD;

const _: () = assert!(LentRecord::MAX_LEN <= MAX_LOAN_MESSAGE);

/// What carries the bytes of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Carrier {
    /// The message of its record.
    Record,
    /// A loan, whose message is the record.
    Loan,
    /// A write to its destination. Without a destination the record offers the tensor.
    Write,
}

impl Link {
    /// Sends a message about an edge on which this process receives.
    pub(in crate::link) fn window_to_sender<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P>,
        message: ToSender<EdgeKey>,
    ) {
        if let Some(counter) = counter_of(&message) {
            cx.counters.increment(counter);
        }
        let message = match &message {
            ToSender::Announce { edge, key, limit, resume } => {
                self.recorder.record(FlightEvent::Announced { edge: edge.number, limit: *limit });
                let name = EdgeAnnouncement {
                    incarnation: self.identity.peer_incarnation,
                    frame: key.frame,
                    iteration: key.iteration,
                    source: key.name.source(),
                    destination: key.name.destination(),
                    name: key.name.name(),
                    borrow: self.settings.borrow,
                    validate: self.settings.validate,
                };
                Message::Announce { edge: *edge, limit: *limit, resume: *resume, name }
            }
            ToSender::Credit { edge, limit, taken: Taken { came, held } } => {
                let credit = EdgeCredits { first: *edge, limit: *limit, came: *came, held: *held, edges: 1 };
                let is_message = self.out.credit(cx.port, cx.counters, credit, cx.in_batch);
                cx.counters.add(Counter::MessagesSent, is_message.into());
                return;
            }
            ToSender::Need { edge, step } => {
                self.recorder.record(FlightEvent::NeedSent { edge: edge.number, step: (*step).into() });
                Message::Need { edge: *edge, step: *step }
            }
            ToSender::Unneed { edge, step } => Message::Unneed { edge: *edge, step: *step },
            ToSender::Retire { edge, came } => {
                self.recorder.record(FlightEvent::Retired { edge: edge.number });
                Message::Retire { edge: *edge, came: *came }
            }
            ToSender::Resumed => {
                self.recorder.record(FlightEvent::Resumed);
                Message::Resumed
            }
        };
        self.send(cx, &message);
    }

    /// Sends a message about an edge on which this process sends. Returns whether a tensor of it
    /// stays here.
    pub(in crate::link) fn window_to_receiver<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P>,
        message: ToReceiver<Value, WindowRefusal>,
    ) -> bool {
        match message {
            ToReceiver::Record(record) => return self.send_record(cx, record),
            ToReceiver::Refused { edge, error: WindowRefusal::Because(status) } => {
                cx.counters.increment(Counter::ErrorsSent);
                self.recorder.record(FlightEvent::Refused { edge: edge.number });
                self.send(cx, &Message::Refused { edge, status: Arc::unwrap_or_clone(status) });
            }
            // Not reached: a cleanup ends steps, not edges.
            ToReceiver::Refused { error: WindowRefusal::CleanedUp, .. } => {}
            ToReceiver::Retired { edge } => {
                self.release(cx, edge);
                self.send(cx, &Message::Retired { edge });
            }
            ToReceiver::Flush { edge } => self.send(cx, &Message::Flush { edge }),
            ToReceiver::StepsOver(StepsOver { first, last, error }) => {
                cx.counters.increment(Counter::StepsOverSent);
                cx.counters.add(Counter::ErrorsSent, u64::from(error.is_error()));
                if error.is_error() {
                    let event = FlightEvent::Aborted { first: first.into(), last: last.into() };
                    self.recorder.record(event);
                }
                let status = match error {
                    WindowRefusal::CleanedUp => None,
                    WindowRefusal::Because(status) => Some(Arc::unwrap_or_clone(status)),
                };
                self.send(cx, &Message::StepsOver { first, last, status });
            }
        }
        false
    }

    /// Sends a value. Returns whether it stays here.
    fn send_record<P: Port>(&mut self, cx: &mut LinkContext<'_, P>, record: Record<Value>) -> bool {
        let Record { edge, n, step, answers_need, value } = record;
        cx.counters.increment(Counter::TensorsSent);
        let Value::Tensor(tensor) = value else {
            let value = RecordValue::Dead;
            let dead = Message::Record { edge, n, step, answers_need, checksum: None, value };
            self.send(cx, &dead);
            return false;
        };
        let (carrier, tensor) = match self.carried(cx, tensor) {
            Ok(carried) => carried,
            Err(status) => {
                cx.counters.increment(Counter::ErrorsSent);
                let value = RecordValue::Error(status);
                let failed = Message::Record { edge, n, step, answers_need, checksum: None, value };
                self.send(cx, &failed);
                return false;
            }
        };
        let asked = self.asked_of(edge);
        let checksum = (asked.validate && !is_on(Mutant::ChecksumLeftOut)).then(|| checksum(&tensor));
        let meta = self.meta_number(cx, &tensor);
        let bytes = tensor.bytes();
        if carrier != Carrier::Write {
            cx.counters.add(Counter::BytesSent, bytes.len() as u64);
        }
        let value = match carrier {
            Carrier::Record => {
                cx.counters.increment(Counter::SmallTensorsSent);
                self.windows.eager_out.sent(bytes.len());
                if checksum.is_none() && !answers_need {
                    let plain = PlainRecord { edge, n, step, meta, data: bytes };
                    cx.counters.increment(Counter::MessagesSent);
                    self.out.encoded(cx.port, cx.counters, cx.in_batch, |out| plain.encode(out));
                    return false;
                }
                RecordValue::Bytes { meta, data: bytes }
            }
            Carrier::Write => self.write_or_offer(cx, edge, meta, tensor),
            Carrier::Loan => {
                let record =
                    LentRecord { edge, n, step, meta, may_borrow: asked.borrow, answers_need, checksum };
                self.lend(cx, record, tensor);
                return false;
            }
        };
        let record = Message::Record { edge, n, step, answers_need, checksum, value };
        self.send(cx, &record);
        carrier == Carrier::Write
    }

    /// Lends a tensor. The record says whether the receiver wants to keep the loan.
    fn lend<P: Port>(&mut self, cx: &mut LinkContext<'_, P>, mut record: LentRecord, tensor: Tensor) {
        let bytes = tensor.bytes().len() as u64;
        let wants_permit = record.may_borrow && is_borrowable(tensor.dtype());
        let permit = if wants_permit { cx.port.permit_loan(self.id, bytes) } else { None };
        if wants_permit && permit.is_none() {
            cx.counters.increment(Counter::LoansRefused);
        }
        record.may_borrow = permit.is_some() || is_on(Mutant::BorrowedWithoutPermit);
        cx.counters.increment(if permit.is_some() { Counter::LoansPosted } else { Counter::WritesPosted });
        cx.counters.increment(Counter::MessagesSent);
        self.out.lend(cx.port, cx.counters, tensor, permit, record.to_message());
    }

    /// Whether the record of a value offers its tensor.
    pub(super) fn offers<P: Port>(&self, cx: &LinkContext<'_, P>, value: &Value) -> bool {
        matches!(value, Value::Tensor(tensor) if self.carrier_of(cx, tensor) == Some(Carrier::Write))
    }

    /// What carries the bytes of a tensor, and the tensor where that can take them from. A tensor
    /// that was registered for a link over another fabric, which has ended, is copied to the pool.
    ///
    /// # Errors
    /// The error of the tensor's receive.
    fn carried<P: Port>(&self, cx: &LinkContext<'_, P>, tensor: Tensor) -> Result<(Carrier, Tensor), Status> {
        let limits = cx.port.limits(self.id);
        match self.carrier_of(cx, &tensor) {
            None => Err(too_long(&tensor, limits)),
            Some(Carrier::Record) => Ok((Carrier::Record, tensor)),
            Some(carrier) if tensor.is_in_pool() || limits.registers => Ok((carrier, tensor)),
            Some(carrier) => Ok((carrier, staged(cx, &tensor)?)),
        }
    }

    /// What carries the bytes of a tensor, once they lie where it can take them from; `None` if
    /// nothing can.
    fn carrier_of<P: Port>(&self, cx: &LinkContext<'_, P>, tensor: &Tensor) -> Option<Carrier> {
        let (len, limits) = (tensor.bytes().len(), cx.port.limits(self.id));
        let fits = RECORD_HEAD + len <= MAX_MESSAGE;
        match limits.lends {
            _ if fits && len <= self.settings.small_tensor_bytes as usize => Some(Carrier::Record),
            true if tensor.is_in_pool() || !fits => Some(Carrier::Loan),
            false if self.windows.eager_out.has_room(len) => Some(Carrier::Record),
            false if len as u64 <= limits.max_write => Some(Carrier::Write),
            _ => fits.then_some(Carrier::Record),
        }
    }

    /// The number of a tensor's meta-data, which the peer is told first if they are new.
    fn meta_number<P: Port>(&mut self, cx: &mut LinkContext<'_, P>, tensor: &Tensor) -> u16 {
        let placement = placement_of(tensor);
        let (number, is_new) = self.windows.told.number(tensor.meta(), placement);
        if is_new {
            cx.counters.increment(Counter::MetasSent);
            let meta = VersionedMeta { version: number.into(), placement, meta: tensor.meta().clone() };
            self.send(cx, &Message::Meta(meta));
        }
        number
    }

    fn asked_of(&self, edge: EdgeId) -> AskedOfEdge {
        self.windows.asked.get(edge.number as usize).copied().unwrap_or_default()
    }
}

/// The counter of a message to a sender.
fn counter_of(message: &ToSender<EdgeKey>) -> Option<Counter> {
    match message {
        ToSender::Announce { .. } => Some(Counter::EdgesAnnounced),
        ToSender::Credit { .. } => Some(Counter::EdgeCreditsSent),
        ToSender::Need { .. } => Some(Counter::NeedsSent),
        ToSender::Retire { .. } => Some(Counter::EdgesRetired),
        ToSender::Unneed { .. } | ToSender::Resumed => None,
    }
}

/// The error of the receive of a tensor that no message carries, of at most
/// [`MAX_RECORD_TEXT`] bytes.
#[cold]
fn too_long(tensor: &Tensor, limits: &LinkLimits) -> Status {
    let message = format!(
        "the tensor has {} bytes, and the queue of the link carries {} in one write: raise queue_depth \
         (rdma_qp_queue_depth on verbs) on both sides, or send it in parts",
        tensor.meta().bytes(),
        limits.max_write
    );
    Status::new(Code::ResourceExhausted, message)
}

/// A copy of a tensor in the pool.
///
/// # Errors
/// The error of the tensor's receive, if the pool has no room.
#[cold]
fn staged<P: Port>(cx: &LinkContext<'_, P>, tensor: &Tensor) -> Result<Tensor, Status> {
    let mut copied = cx.pool.tensor(tensor.meta().clone()).map_err(|error| {
        let message =
            format!("its bytes lie outside the pool of the sender, where the link needs them: {error}");
        Status::new(Code::ResourceExhausted, message).cut(MAX_RECORD_TEXT)
    })?;
    copy(copied.bytes_mut(), tensor.bytes());
    cx.counters.increment(Counter::TensorsStaged);
    cx.counters.add(Counter::BytesStaged, tensor.meta().bytes());
    Ok(copied.freeze())
}

fn checksum(tensor: &Tensor) -> u64 {
    let bytes = tensor.bytes();
    if is_on(Mutant::ChecksumOfHead) { checksum_of(&bytes[..bytes.len().min(8)]) } else { checksum_of(bytes) }
}
