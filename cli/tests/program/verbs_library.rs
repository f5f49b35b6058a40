//! The program needs no libibverbs to start. `devices` tells how to get it.

use crate::bare_machine::{Machine, is_free_of_verbs};
use std::path::Path;

#[test]
fn the_program_needs_no_verbs_library_to_start() {
    is_free_of_verbs(Path::new(env!("CARGO_BIN_EXE_tensorwire")));
}

#[test]
fn without_the_library_devices_says_how_to_get_it() {
    let machine = Machine::with(Path::new(env!("CARGO_BIN_EXE_tensorwire")));
    let Some(said) = machine.says(&["devices"]) else { return };
    assert!(said.contains("libibverbs.so.1 was not found: install it (Debian: libibverbs1"), "{said}");
}
