//! Writing messages.

use super::*;

impl Message<'_> {
    /// Appends the message to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Message::Ping { version, nonce } => {
                out.push(PING);
                out.extend_from_slice(&version.to_le_bytes());
                out.extend_from_slice(&nonce.to_le_bytes());
            }
            Message::Pong { nonce } => {
                out.push(PONG);
                out.extend_from_slice(&nonce.to_le_bytes());
            }
            Message::Announce { edge, limit, resume, name } => {
                put_announce(out, *edge, (*limit, *resume), name);
            }
            Message::Credit(EdgeCredits { first, limit, came, held, edges }) => {
                put_edge_number(out, CREDIT, *first, *limit);
                out.extend(came.to_le_bytes());
                out.extend(held.to_le_bytes());
                // At the end, where a pack finds it to add another edge.
                out.push(*edges);
            }
            Message::Need { edge, step } => put_edge_number(out, NEED, *edge, *step),
            Message::Unneed { edge, step } => put_edge_number(out, UNNEED, *edge, *step),
            Message::Retire { edge, came } => put_edge_number(out, RETIRE, *edge, *came),
            Message::Retired { edge } => put_of_edge(out, RETIRED, *edge),
            Message::Flush { edge } => put_of_edge(out, FLUSH, *edge),
            Message::Resumed => out.push(RESUMED),
            Message::Meta(meta) => {
                out.push(META);
                put_meta(out, meta);
            }
            Message::Record { edge, n, step, answers_need, checksum, value } => {
                put_record(out, *edge, (*n, *step, *answers_need), *checksum, value);
            }
            Message::Refused { edge, status } => {
                out.extend([REFUSED, derived_flag(status)]);
                put_edge(out, *edge);
                put_status(out, status);
            }
            Message::StepsOver { first, last, status } => {
                out.extend([STEPS_OVER, status.as_ref().map_or(FLAG_CLEANED_UP, derived_flag)]);
                out.extend(first.to_le_bytes());
                out.extend(last.to_le_bytes());
                status.iter().for_each(|status| put_status(out, status));
            }
            Message::Grant { offer, immediate, target } => {
                out.push(GRANT);
                out.extend(offer.to_le_bytes());
                out.extend(immediate.to_bits().to_le_bytes());
                put_grant(out, target);
            }
            Message::Decline { offer } => {
                out.push(DECLINE);
                out.extend(offer.to_le_bytes());
            }
            Message::Ready { edge, immediate, target } => {
                put_of_edge(out, READY, *edge);
                out.extend(immediate.to_bits().to_le_bytes());
                put_grant(out, target);
            }
            Message::Withdraw { edge } => put_of_edge(out, WITHDRAW, *edge),
            Message::Release { edge } => put_of_edge(out, RELEASE, *edge),
            Message::EagerCredit { returned } => {
                out.push(EAGER_CREDIT);
                out.extend(returned.to_le_bytes());
            }
        }
    }
}

fn put_edge(out: &mut Vec<u8>, edge: EdgeId) {
    out.extend(edge.number.to_le_bytes());
    out.extend(edge.generation.to_le_bytes());
}

fn put_of_edge(out: &mut Vec<u8>, kind: u8, edge: EdgeId) {
    out.push(kind);
    put_edge(out, edge);
}

fn put_edge_number(out: &mut Vec<u8>, kind: u8, edge: EdgeId, number: u64) {
    put_of_edge(out, kind, edge);
    out.extend(number.to_le_bytes());
}

fn put_announce(
    out: &mut Vec<u8>,
    edge: EdgeId,
    (limit, resume): (u64, Option<u64>),
    name: &EdgeAnnouncement<'_>,
) {
    let flag = |is_set, flag| if is_set { flag } else { 0 };
    let resumes = flag(resume.is_some(), FLAG_RESUME);
    out.extend([ANNOUNCE, resumes | flag(name.borrow, FLAG_BORROW) | flag(name.validate, FLAG_VALIDATE)]);
    put_edge(out, edge);
    let numbers = [Some(limit), resume, Some(name.incarnation), Some(name.frame), Some(name.iteration)];
    numbers.into_iter().flatten().for_each(|number| out.extend(number.to_le_bytes()));
    for part in [name.source, name.destination, name.name] {
        put_bytes(out, part.as_bytes());
    }
}

fn put_record(
    out: &mut Vec<u8>,
    edge: EdgeId,
    (n, step, answers_need): (u16, u64, bool),
    checksum: Option<u64>,
    value: &RecordValue<'_>,
) {
    let kind = match value {
        RecordValue::Bytes { .. } => KIND_BYTES,
        RecordValue::Dead => KIND_DEAD,
        RecordValue::Offer { .. } => KIND_OFFER,
        RecordValue::Written { .. } => KIND_WRITTEN,
        RecordValue::Error(status) => KIND_ERROR | derived_flag(status),
    };
    let needed = if answers_need { FLAG_ANSWERS_NEED } else { 0 };
    let checked = if checksum.is_some() { FLAG_CHECKSUM } else { 0 };
    let meta = match value {
        RecordValue::Bytes { meta, .. } | RecordValue::Offer { meta, .. } | RecordValue::Written { meta } => {
            *meta
        }
        RecordValue::Dead | RecordValue::Error(_) => 0,
    };
    out.extend([RECORD, kind | needed | checked]);
    out.extend(n.to_le_bytes());
    put_edge(out, edge);
    out.extend(meta.to_le_bytes());
    out.extend(step.to_le_bytes());
    checksum.into_iter().for_each(|checksum| out.extend(checksum.to_le_bytes()));
    match value {
        RecordValue::Bytes { data, .. } => out.extend_from_slice(data),
        RecordValue::Dead | RecordValue::Written { .. } => {}
        RecordValue::Offer { offer, .. } => out.extend(offer.to_le_bytes()),
        RecordValue::Error(status) => put_status(out, status),
    }
}

fn put_grant(out: &mut Vec<u8>, grant: &Grant) {
    out.extend_from_slice(&grant.region.to_le_bytes());
    out.extend_from_slice(&grant.key.to_le_bytes());
    out.extend_from_slice(&grant.offset.to_le_bytes());
    out.extend_from_slice(&grant.len.to_le_bytes());
}

fn put_meta(out: &mut Vec<u8>, meta: &VersionedMeta) {
    out.extend_from_slice(&meta.version.to_le_bytes());
    out.push(u8::from(meta.placement.on_host) | (meta.placement.allocator as u8) << 1);
    out.push(meta.meta.dtype().code());
    out.push(meta.meta.shape().rank() as u8);
    for dim in meta.meta.shape().dims() {
        out.extend_from_slice(&dim.to_le_bytes());
    }
    if meta.meta.is_serialized() {
        out.extend_from_slice(&meta.meta.bytes().to_le_bytes());
    }
}

/// Names are at most 2 KiB, so their length fits in 16 bits.
fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    debug_assert!(bytes.len() <= usize::from(u16::MAX));
    out.extend_from_slice(&(bytes.len() as u16).to_le_bytes());
    out.extend_from_slice(bytes);
}

/// The flag of a status that is only the consequence of another.
fn derived_flag(status: &Status) -> u8 {
    if status.derived { FLAG_DERIVED } else { 0 }
}

fn put_status(out: &mut Vec<u8>, status: &Status) {
    out.push(status.code as u8);
    let (message, details) = status.shortened(MAX_STATUS_TEXT);
    put_long(out, message.as_bytes());
    put_long(out, details);
}

fn put_long(out: &mut Vec<u8>, bytes: &[u8]) {
    debug_assert!(bytes.len() <= MAX_STATUS_TEXT);
    out.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
    out.extend_from_slice(bytes);
}
