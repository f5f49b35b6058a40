//! The names of requests.

use crate::input::Input;
use tensorwire::internals::wire::Slot;
use tensorwire::internals::wire::message::RequestId;

/// One of these, or any request near them.
pub fn request(input: &mut Input<'_>, known: &[RequestId]) -> RequestId {
    match input.u8() {
        at @ 0..=199 if !known.is_empty() => known[usize::from(at) % known.len()],
        200..=202 => any_request(input.number() as u32),
        other => any_request(u32::from(other % 6) | u32::from(other & 0x80) << 13),
    }
}

fn any_request(bits: u32) -> RequestId {
    let slot = Slot::new(bits % Slot::COUNT).expect("20 bits");
    RequestId { slot, generation: (bits >> 20) as u8 }
}
