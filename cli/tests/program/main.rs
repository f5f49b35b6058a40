//! The program as its users meet it.

#[path = "../../../tests/support/bare_machine.rs"]
mod bare_machine;
mod devices;
mod perf;
mod verbs_library;
