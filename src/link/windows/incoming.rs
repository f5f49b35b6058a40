//! Messages of the peer's windows.

use super::{
    ArrivedBytes, ArrivedTensor, AskedOfEdge, MAX_EDGES, OfferedTensor, ReadyValue, WindowArrival,
    WindowEvent, WindowRefusal,
};
use crate::fabric::Port;
use crate::link::EdgeKey;
use crate::link::links::{Link, LinkContext};
use crate::memory::{LentBytes, copy};
use crate::protocol::{Record, StepsOver, ToReceiver, ToSender};
use crate::telemetry::{Counter, FlightEvent};
use crate::wire::message::{EdgeAnnouncement, LentRecord, Message, PlainRecord, RecordValue, VERSION};
use crate::wire::{EdgeId, EdgeName, ShortMessage, Status};
use std::sync::Arc;

/// Bytes of the error of a record at most, which a window holds.
pub(super) const MAX_RECORD_TEXT: usize = 512;
/// Bytes of an error of ended steps or of an edge that are kept always.
const SHORT_TEXT: usize = 4096;
/// Bytes of the longer errors of a link's refusals and ended steps that are kept whole. Later ones
/// are cut: receives that begin later get them too, so they stay.
pub(super) const ERROR_ROOM: usize = 16 << 20;

impl Link {
    /// Handles a whole message.
    pub(in crate::link) fn on_message<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P>,
        bytes: &[u8],
    ) -> Result<(), String> {
        cx.counters.increment(Counter::MessagesReceived);
        if let Some(plain) = PlainRecord::decode(bytes) {
            return self.on_plain_record(cx, &plain);
        }
        let event = match Message::decode(bytes).map_err(|error| error.to_string())? {
            Message::Ping { version, .. } if version != VERSION => {
                return Err(format!(
                    "it speaks version {version} of the protocol, this side version {VERSION}"
                ));
            }
            Message::Ping { nonce, .. } => {
                self.send(cx, &Message::Pong { nonce });
                return Ok(());
            }
            Message::Pong { nonce } => return self.on_pong(cx, nonce),
            Message::Announce { edge, limit, resume, name } => {
                return self.on_announcement(cx, edge, (limit, resume), &name);
            }
            Message::Meta(meta) => return self.windows.known.learn(meta),
            Message::Record { edge, n, step, answers_need, checksum, value } => {
                let record = Record { edge, n, step, answers_need, value: () };
                return self.on_record(cx, record, checksum, value);
            }
            Message::Grant { offer, immediate, target } => {
                return self.on_grant(cx, offer, immediate, target);
            }
            Message::Decline { offer } => return self.on_decline(cx, offer),
            Message::Ready { edge, immediate, target } => return self.on_ready(cx, edge, immediate, target),
            Message::Withdraw { edge } => {
                self.release(cx, edge);
                return Ok(());
            }
            Message::Release { edge } => return self.on_release(cx, edge),
            Message::EagerCredit { returned } => return self.windows.eager_out.returned(returned),
            Message::Credit(credits) => WindowEvent::Credits(credits),
            Message::Need { edge, step } => {
                self.recorder.record(FlightEvent::NeedCame { edge: edge.number, step: step.into() });
                to_sender(ToSender::Need { edge, step })
            }
            Message::Unneed { edge, step } => to_sender(ToSender::Unneed { edge, step }),
            Message::Retire { edge, came } => {
                self.recorder.record(FlightEvent::RetirementCame { edge: edge.number });
                to_sender(ToSender::Retire { edge, came })
            }
            Message::Flush { edge } => WindowEvent::ToReceiver(ToReceiver::Flush { edge }),
            Message::Resumed => to_sender(ToSender::Resumed),
            Message::Retired { edge } => {
                self.on_retired(edge)?;
                WindowEvent::ToReceiver(ToReceiver::Retired { edge })
            }
            Message::Refused { edge, status } => {
                cx.counters.increment(Counter::ErrorsReceived);
                self.recorder.record(FlightEvent::RefusalCame { edge: edge.number });
                let error = self.kept_error(status).into();
                WindowEvent::ToReceiver(ToReceiver::Refused { edge, error })
            }
            Message::StepsOver { first, last, status } => {
                let error = status.map(|status| self.kept_error(status));
                let error = error.map_or(WindowRefusal::CleanedUp, WindowRefusal::from);
                cx.counters.add(Counter::ErrorsReceived, u64::from(error.is_error()));
                if error.is_error() {
                    let event = FlightEvent::AbortCame { first: first.into(), last: last.into() };
                    self.recorder.record(event);
                }
                let over = StepsOver { first, last, error };
                WindowEvent::ToReceiver(ToReceiver::StepsOver(over))
            }
        };
        self.push_window(cx, event);
        Ok(())
    }

    /// An error of the peer, or what there is room for.
    fn kept_error(&mut self, error: Status) -> Status {
        let len = error.message.len() + error.details.len();
        if len <= SHORT_TEXT {
            return error;
        }
        match self.windows.error_room.checked_sub(len) {
            Some(room) => {
                self.windows.error_room = room;
                error
            }
            None => error.cut(SHORT_TEXT),
        }
    }

    /// Handles a loan, whose message is its record.
    pub(in crate::link) fn on_lent_record<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P>,
        message: &[u8],
        bytes: LentBytes,
    ) -> Result<(), String> {
        let lent = ShortMessage::from_bytes(message).as_ref().and_then(LentRecord::from_message);
        let Some(lent) = lent else { return Err("a loan came without its record".into()) };
        let LentRecord { edge, n, step, meta, may_borrow, answers_need, checksum } = lent;
        cx.counters.increment(Counter::MessagesReceived);
        let record = Record { edge, n, step, answers_need, value: () };
        let told = self.windows.known.get(meta)?.clone();
        if told.meta.bytes() != bytes.len() as u64 {
            return Err(format!("a loan of {} bytes came for {}", bytes.len(), told.meta));
        }
        let bytes = ArrivedBytes::Lent { bytes, may_borrow };
        let checksum = self.wanted(checksum);
        let arrived = WindowArrival::of_tensor(ArrivedTensor { told, checksum, bytes });
        self.push_record(cx, record, arrived);
        Ok(())
    }

    /// A checksum, if this side compares it. A peer that sends one unasked costs no time.
    fn wanted(&self, checksum: Option<u64>) -> Option<u64> {
        checksum.filter(|_| self.settings.validate)
    }

    fn on_announcement<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P>,
        edge: EdgeId,
        (limit, resume): (u64, Option<u64>),
        name: &EdgeAnnouncement<'_>,
    ) -> Result<(), String> {
        let EdgeAnnouncement { incarnation, frame, iteration, validate, .. } = *name;
        let borrow = name.borrow && cx.port.limits(self.id).lends;
        if edge.number >= MAX_EDGES {
            return Err(format!("edge {} was announced, of at most {MAX_EDGES}", edge.number));
        }
        self.recorder.record(FlightEvent::AnnouncementCame { edge: edge.number, limit });
        let place = edge.number as usize;
        if self.windows.asked.len() <= place {
            self.windows.asked.resize(place + 1, AskedOfEdge::default());
        }
        self.windows.asked[place] = AskedOfEdge { borrow, validate };
        let named = EdgeName::new(name.source, name.destination, name.name);
        let named =
            named.map_err(|error| format!("an edge was announced whose name is not valid: {error}"))?;
        let refusal = self.refusal(incarnation, &named);
        let key = EdgeKey { name: Arc::new(named), frame, iteration };
        let announced = ToSender::Announce { edge, key, limit, resume };
        self.push_window(cx, WindowEvent::ToSender(announced, refusal));
        Ok(())
    }

    fn on_record<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P>,
        record: Record<()>,
        checksum: Option<u64>,
        value: RecordValue<'_>,
    ) -> Result<(), String> {
        let checksum = self.wanted(checksum);
        let value = match value {
            RecordValue::Dead => WindowArrival::Ready(ReadyValue::Dead),
            RecordValue::Error(status) => {
                let len = status.message.len() + status.details.len();
                if len > MAX_RECORD_TEXT {
                    return Err(format!(
                        "a record has an error of {len} bytes, of at most {MAX_RECORD_TEXT}"
                    ));
                }
                cx.counters.increment(Counter::ErrorsReceived);
                WindowArrival::Ready(ReadyValue::Failed(status))
            }
            RecordValue::Bytes { meta, data } => {
                self.expect_small(record.edge);
                self.landed(cx, meta, data, checksum)?
            }
            RecordValue::Offer { meta, offer } => {
                let told = self.windows.known.get(meta)?.clone();
                if cx.port.limits(self.id).lends || told.meta.bytes() == 0 {
                    return Err(format!("it offers {}, which it must lend or send", told.meta));
                }
                self.expect_like(record.edge, &told);
                WindowArrival::Offered(OfferedTensor { told, checksum, offer })
            }
            RecordValue::Written { meta } => self.written(record.edge, meta, checksum)?,
        };
        self.push_record(cx, record, value);
        Ok(())
    }

    #[inline]
    fn on_plain_record<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P>,
        plain: &PlainRecord<'_>,
    ) -> Result<(), String> {
        let PlainRecord { edge, n, step, meta, data } = *plain;
        self.expect_small(edge);
        let value = self.landed(cx, meta, data, None)?;
        self.push_record(cx, Record { edge, n, step, answers_need: false, value: () }, value);
        Ok(())
    }

    /// The tensor of a record with bytes, in the pool if it has room.
    #[inline]
    fn landed<P: Port>(
        &mut self,
        cx: &LinkContext<'_, P>,
        meta: u16,
        data: &[u8],
        checksum: Option<u64>,
    ) -> Result<WindowArrival, String> {
        let told = self.windows.known.get(meta)?;
        if told.meta.bytes() != data.len() as u64 {
            return Err(format!("a record of {} bytes came for {}", data.len(), told.meta));
        }
        self.windows.eager_in.add(data.len())?;
        let bytes = match (cx.pool.landing(&told.meta), self.windows.eager_in.share(data.len())) {
            (Ok(mut tensor), share) => {
                copy(tensor.bytes_mut(), data);
                let tensor = tensor.freeze();
                match share {
                    None => ArrivedBytes::Landed(tensor),
                    Some(share) => ArrivedBytes::Eager { tensor, share },
                }
            }
            (Err(_), share) => ArrivedBytes::Kept { bytes: data.into(), share },
        };
        Ok(WindowArrival::of_tensor(ArrivedTensor { told: told.clone(), checksum, bytes }))
    }

    /// Tells the peer how many bytes of its eager tensors were taken, if those are many. Leaves it
    /// to the next eager tensor of this side if there probably is one.
    #[cold]
    pub(in crate::link) fn return_eager<P: Port>(&mut self, cx: &mut LinkContext<'_, P>) {
        if !self.windows.eager_in.goes_alone() {
            return;
        }
        if let Some(returned) = self.windows.eager_in.due() {
            self.windows.eager_in.told(returned);
            self.send(cx, &Message::EagerCredit { returned });
        }
    }

    fn push_record<P: Port>(&self, cx: &mut LinkContext<'_, P>, record: Record<()>, value: WindowArrival) {
        let Record { edge, n, step, answers_need, .. } = record;
        let record = Record { edge, n, step, answers_need, value };
        self.push_window(cx, WindowEvent::ToReceiver(ToReceiver::Record(record)));
    }

    fn push_window<P: Port>(&self, cx: &mut LinkContext<'_, P>, event: WindowEvent) {
        cx.windows.push_back((self.id, event));
    }
}

fn to_sender(message: ToSender<EdgeKey>) -> WindowEvent {
    WindowEvent::ToSender(message, None)
}
