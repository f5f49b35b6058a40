//! A shared-memory link whose peer writes arbitrary values into its rings, lines, loan table, state
//! and doorbells.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| tensorwire::internals::fabric::shm::fuzz::hostile_peer(bytes));
