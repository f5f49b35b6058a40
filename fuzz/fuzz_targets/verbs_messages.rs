//! What the ends of a link over RDMA tell each other: addresses, and control messages under their window.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tensorwire::internals::fabric::verbs::fuzzing::{address, control};

fuzz_target!(|bytes: &[u8]| {
    address(bytes);
    control(bytes);
});
