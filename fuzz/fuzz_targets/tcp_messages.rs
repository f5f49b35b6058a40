//! Messages between the ends of a TCP link: addresses, hellos, and the headers of frames.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tensorwire::internals::fabric::tcp::fuzz::{address, frames, hello};

fuzz_target!(|bytes: &[u8]| {
    address(bytes);
    hello(bytes);
    frames(bytes);
});
