//! Messages between the ends of a verbs link: addresses, and control messages within their window.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tensorwire::internals::fabric::verbs::fuzzing::{address, control};

fuzz_target!(|bytes: &[u8]| {
    address(bytes);
    control(bytes);
});
