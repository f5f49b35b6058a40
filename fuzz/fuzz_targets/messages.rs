//! Messages between the two ends of a link, and the immediate. A decoded message encodes to the
//! same bytes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tensorwire::internals::wire::message::{MAX_STATUS_TEXT, Message, RecordValue, VersionedMeta};
use tensorwire::internals::wire::{EdgeName, Grant, Immediate, MAX_DIM, MAX_RANK};
use tensorwire::{DType, TensorMeta};

/// Bytes of an error's text at most: it may quote a shape of 254 dimensions.
const MAX_ERROR: usize = 6 * 1024;

fuzz_target!(|bytes: &[u8]| {
    if let Some((bits, _)) = bytes.split_first_chunk() {
        immediate(u32::from_le_bytes(*bits));
    }
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
    look_at(&message);
});

fn encoded(message: &Message<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    message.encode(&mut bytes);
    bytes
}

fn is_cut_by_its_sender(message: &Message<'_>) -> bool {
    let status = match message {
        Message::Refused { status, .. }
        | Message::StepsOver { status: Some(status), .. }
        | Message::Record { value: RecordValue::Error(status), .. } => status,
        _ => return false,
    };
    status.message.len() > MAX_STATUS_TEXT || status.details.len() > MAX_STATUS_TEXT
}

fn look_at(message: &Message<'_>) {
    match message {
        Message::Announce { name, .. } => {
            if let Ok(edge) = EdgeName::new(name.source, name.destination, name.name) {
                assert_eq!(edge.name(), name.name);
            }
        }
        Message::Grant { target, .. } => parts_of(target),
        Message::Meta(meta) => shape_of(meta),
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
        Err(error) => assert!(error.bits == bits && bits >> 28 != 0),
    }
}
