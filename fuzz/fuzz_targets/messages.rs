//! Messages between the two ends of a link, and the immediate. A decoded message encodes to the
//! same bytes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tensorwire::internals::wire::message::{MAX_STATUS_TEXT, Message, MetaRef, VersionedMeta, WindowMessage};
use tensorwire::internals::wire::{EdgeName, Grant, Immediate, MAX_DIM, MAX_RANK};
use tensorwire::{DType, TensorMeta};

/// Bytes of an error's text at most: it may quote a shape of 254 dimensions.
const MAX_ERROR: usize = 6 * 1024;

fuzz_target!(|bytes: &[u8]| {
    if let Some((bits, _)) = bytes.split_first_chunk() {
        immediate(u32::from_le_bytes(*bits));
    }
    window_message(bytes);
    let message = match Message::decode(bytes) {
        Ok(message) => message,
        Err(error) => return assert!(error.to_string().len() <= MAX_ERROR, "{error}"),
    };
    let again = encoded(&message);
    if is_cut_by_its_sender(&message) {
        // Only this library's sender keeps to the bound. A longer text is read, too.
        let cut = Message::decode(&again).expect("what was encoded");
        assert!(!is_cut_by_its_sender(&cut));
        assert_eq!(encoded(&cut), again);
    } else {
        assert_eq!(again, bytes);
    }
    look_at(&message, bytes.len());
});

/// A text that is longer than the sender's bound is read, and cut when it is encoded again.
fn window_message(bytes: &[u8]) {
    let Ok(message) = WindowMessage::decode(bytes) else { return };
    let mut again = Vec::new();
    message.encode(&mut again);
    assert!(again == bytes || bytes.len() > MAX_STATUS_TEXT);
    WindowMessage::decode(&again).expect("what was encoded");
}

fn encoded(message: &Message<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    message.encode(&mut bytes);
    bytes
}

fn is_cut_by_its_sender(message: &Message<'_>) -> bool {
    let Message::Error { status, .. } = message else { return false };
    status.message.len() > MAX_STATUS_TEXT || status.details.len() > MAX_STATUS_TEXT
}

fn look_at(message: &Message<'_>, len: usize) {
    match message {
        Message::Route { source, destination, edge, .. } => {
            if let Ok(name) = EdgeName::new(source, destination, edge) {
                assert_eq!(name.name(), *edge);
            }
        }
        Message::Request(request) => request.grant.iter().for_each(parts_of),
        Message::ReRequest { grant, .. } => parts_of(grant),
        Message::Meta { meta, .. } => shape_of(meta),
        Message::Response { meta, data, .. } => {
            assert_eq!(meta.response_len(data.len()), len);
            if let MetaRef::New(meta) = meta {
                shape_of(meta);
            }
        }
        _ => {}
    }
}

/// A part lies inside of the whole, in arithmetic that can't overflow.
fn parts_of(grant: &Grant) {
    for (skip, len) in
        [(0, grant.len), (grant.len, 0), (grant.len / 2, u64::MAX), (u64::MAX, 1), (1, grant.len)]
    {
        let Some(part) = grant.part(skip, len) else { continue };
        assert_eq!(u128::from(part.offset), u128::from(grant.offset) + u128::from(skip));
        assert!(u128::from(skip) + u128::from(len) <= u128::from(grant.len) && part.len == len);
    }
}

/// The byte count is the product of the dimensions, in arithmetic that can't overflow, but for a
/// serialised tensor, which says it.
fn shape_of(versioned: &VersionedMeta) {
    let meta: &TensorMeta = &versioned.meta;
    let dims = meta.shape().dims();
    assert!(versioned.version != 0 && dims.len() <= MAX_RANK && dims.iter().all(|dim| *dim <= MAX_DIM));
    match meta.dtype().size() {
        Some(size) => {
            let product =
                dims.iter().fold(size as u128, |product, dim| product.saturating_mul(u128::from(*dim)));
            assert_eq!(u128::from(meta.bytes()), if dims.contains(&0) { 0 } else { product });
        }
        None => assert!(meta.is_serialized() && meta.bytes() <= MAX_DIM),
    }
    assert_eq!(DType::from_code(meta.dtype().code()), Some(meta.dtype()));
}

fn immediate(bits: u32) {
    match Immediate::from_bits(bits) {
        Ok(immediate) => assert_eq!(immediate.to_bits(), bits),
        Err(error) => assert!(error.bits == bits && u32::from(error.kind) == bits >> 28),
    }
}
