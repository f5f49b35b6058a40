//! The program as a user runs it.

mod auth;
#[path = "../../../tests/support/bare_machine.rs"]
mod bare_machine;
mod cgroups;
mod compare;
mod devices;
mod inherited;
mod launch;
mod perf;
mod perf_server;
mod verbs_library;
