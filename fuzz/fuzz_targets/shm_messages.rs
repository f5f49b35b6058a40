//! Messages between the endpoints of a shared-memory link: addresses, the handshake, the words of
//! orders.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tensorwire::internals::fabric::shm::fuzz::{address, handshake, order};

fuzz_target!(|bytes: &[u8]| {
    address(bytes);
    handshake(bytes);
    let words = bytes.as_chunks::<8>().0;
    order(std::array::from_fn(|at| words.get(at).copied().map_or(0, u64::from_le_bytes)));
});
