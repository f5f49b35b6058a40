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
            Message::Route { number, incarnation, source, destination, edge } => {
                out.push(ROUTE);
                out.extend_from_slice(&number.to_le_bytes());
                out.extend_from_slice(&incarnation.to_le_bytes());
                for name in [source, destination, edge] {
                    put_bytes(out, name.as_bytes());
                }
            }
            Message::RouteDrop { number } => {
                out.push(ROUTE_DROP);
                out.extend_from_slice(&number.to_le_bytes());
            }
            Message::Request(request) => put_tensor_request(out, request),
            Message::Meta { request, follows, meta } => {
                out.push(META_DATA_RESPONSE);
                out.push(match follows {
                    Follows::ReRequest => 0,
                    Follows::Loan => FLAG_LOAN_FOLLOWS,
                    Follows::Write => FLAG_WRITE_FOLLOWS,
                });
                put_request(out, *request);
                put_meta(out, meta);
            }
            Message::ReRequest { request, grant } => {
                out.push(TENSOR_RE_REQUEST);
                put_request(out, *request);
                put_grant(out, grant);
            }
            Message::Response { request, meta, data } => {
                out.push(TENSOR_RESPONSE);
                out.push(if matches!(meta, MetaRef::Cached(_)) { FLAG_CACHED } else { 0 });
                put_request(out, *request);
                match meta {
                    MetaRef::Cached(version) => out.extend_from_slice(&version.to_le_bytes()),
                    MetaRef::New(meta) => put_meta(out, meta),
                }
                out.extend_from_slice(data);
            }
            Message::Cancel { request } => {
                out.push(CANCEL);
                put_request(out, *request);
            }
            Message::CancelAck { request } => {
                out.push(CANCEL_ACK);
                put_request(out, *request);
            }
            Message::Error { request, status } => {
                out.push(ERROR_STATUS);
                out.push(derived_flag(status));
                put_request(out, *request);
                put_status(out, status);
            }
            Message::Return { request, route, step, frame, iteration, stash_id } => {
                out.push(RETURN);
                put_request(out, *request);
                out.extend_from_slice(&route.to_le_bytes());
                for number in [step, frame, iteration] {
                    out.extend_from_slice(&number.to_le_bytes());
                }
                out.extend_from_slice(&stash_id.to_le_bytes());
            }
            Message::Stashed { request, stash_id } => {
                out.push(STASHED_RESPONSE);
                put_request(out, *request);
                out.extend_from_slice(&stash_id.to_le_bytes());
            }
            Message::StandingRequest(standing) => standing.put(out),
            Message::Checksum { request, checksum } => {
                out.push(CHECKSUM);
                put_request(out, *request);
                out.extend_from_slice(&checksum.to_le_bytes());
            }
        }
    }
}

/// The bytes that a response with this meta-data needs besides its data.
pub(super) fn response_header(meta: &MetaRef) -> usize {
    let meta = match meta {
        MetaRef::Cached(_) => 4,
        MetaRef::New(VersionedMeta { meta, .. }) => {
            7 + 8 * meta.shape().rank() + if meta.is_serialized() { 8 } else { 0 }
        }
    };
    6 + meta
}

impl MetaRef {
    /// Bytes of a whole `TENSOR_RESPONSE` with this meta-data and `data` bytes of data.
    pub fn response_len(&self, data: usize) -> usize {
        response_header(self).saturating_add(data)
    }
}

/// The bits of a request: generation above slot, as in the immediate.
pub(super) fn request_bits(request: RequestId) -> u32 {
    u32::from(request.generation) << 20 | request.slot.index()
}

fn put_request(out: &mut Vec<u8>, request: RequestId) {
    out.extend_from_slice(&request_bits(request).to_le_bytes());
}

fn put_tensor_request(out: &mut Vec<u8>, request: &TensorRequest) {
    let grant = if request.grant.is_some() { FLAG_GRANT } else { 0 };
    let borrow = if request.borrow { FLAG_BORROW } else { 0 };
    let validate = if request.validate { FLAG_VALIDATE } else { 0 };
    out.push(TENSOR_REQUEST);
    out.push(grant | borrow | validate);
    put_request(out, request.request);
    out.extend_from_slice(&request.route.to_le_bytes());
    for number in [request.step, request.frame, request.iteration] {
        out.extend_from_slice(&number.to_le_bytes());
    }
    out.extend_from_slice(&request.meta_version.to_le_bytes());
    out.extend_from_slice(&request.timeout_ms.to_le_bytes());
    if let Some(grant) = &request.grant {
        put_grant(out, grant);
    }
}

pub(super) fn put_grant(out: &mut Vec<u8>, grant: &Grant) {
    out.extend_from_slice(&grant.region.to_le_bytes());
    out.extend_from_slice(&grant.key.to_le_bytes());
    out.extend_from_slice(&grant.offset.to_le_bytes());
    out.extend_from_slice(&grant.len.to_le_bytes());
}

pub(super) fn put_meta(out: &mut Vec<u8>, meta: &VersionedMeta) {
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
pub(super) fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    debug_assert!(bytes.len() <= usize::from(u16::MAX));
    out.extend_from_slice(&(bytes.len() as u16).to_le_bytes());
    out.extend_from_slice(bytes);
}

/// The flag of a status that is only the consequence of another.
pub(super) fn derived_flag(status: &Status) -> u8 {
    if status.derived { FLAG_DERIVED } else { 0 }
}

pub(super) fn put_status(out: &mut Vec<u8>, status: &Status) {
    out.push(status.code as u8);
    let (message, details) = travelling(status);
    put_long(out, message.as_bytes());
    put_long(out, details);
}

fn put_long(out: &mut Vec<u8>, bytes: &[u8]) {
    debug_assert!(bytes.len() <= MAX_STATUS_TEXT);
    out.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
    out.extend_from_slice(bytes);
}

/// The text and the details of an error, or as much of them as travels. The text is cut at a
/// character; details, which mean nothing in part, are left out. The text then ends with a note of
/// that.
fn travelling(status: &Status) -> (std::borrow::Cow<'_, str>, &[u8]) {
    let Status { message, details, .. } = status;
    let cut = message.len() > MAX_STATUS_TEXT;
    let left_out = details.len() > MAX_STATUS_TEXT;
    if !cut && !left_out {
        return (message.into(), details);
    }
    let mut note = String::new();
    if left_out {
        note +=
            &format!(" [{} bytes of details were left out: {MAX_STATUS_TEXT} travel at most]", details.len());
    }
    let mut end = message.len();
    if end + note.len() > MAX_STATUS_TEXT {
        note += &format!(" [cut from {} bytes]", message.len());
        end = MAX_STATUS_TEXT - note.len();
    }
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    (format!("{}{note}", &message[..end]).into(), if left_out { &[] } else { details })
}
