//! A TCP link whose peer sends arbitrary frames, payloads and garbage, and cuts its connections.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| tensorwire::internals::fabric::tcp::fuzz::hostile_peer(bytes));
