//! A libibverbs of our own: the same symbols and structs, devices that a script makes up, and queue pairs that move bytes
//! within one process. It shows what no soft-RoCE can: InfiniBand, several devices and ports, narrow limits, failures on
//! demand. And it keeps watch: a call that a real device would not survive, or might not, is noted as a *misuse*.
//!
//! The tests compile it by themselves (`driver.rs`), and each loads a copy of its own, so each has its own devices. It depends on
//! nothing but our bindings, which it shares with the fabric: `abi-check` compares those with the header.
//!
//! | file | |
//! |---|---|
//! | `script` | the commands that make devices and faults, and tell what was seen |
//! | `state` | what there is |
//! | `devices`, `objects`, `modify`, `events` | the calls of the slow path |
//! | `work` | posting and polling |
//! | `engine` | when a request is carried out |
//! | `wire` | what it does to the other side |

#![allow(unexpected_cfgs)] // `driver.rs` sets them
#![allow(clippy::missing_safety_doc)] // the manual pages have it
// What the bindings use of the `libc` crate, which is not at hand where `rustc` alone compiles.
extern crate self as libc;

mod c;
mod devices;
mod engine;
mod events;
mod modify;
mod objects;
mod script;
mod state;
#[allow(dead_code, unused_imports)] // the fabric's half of it: jumps through a context's table
#[path = "../../src/fabric/verbs/sys/mod.rs"]
mod sys;
mod wire;
mod work;

pub use c::*;
