//! The messages of the bootstrap service, as its server and its client take them in.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| tensorwire::internals::bootstrap::fuzzing::calls(bytes));
