//! A fake libibverbs: the same symbols and structs, scripted devices, and queue pairs that move
//! bytes within one process. It offers what soft-RoCE cannot: InfiniBand, several devices and
//! ports, narrow limits, failures on demand. It also checks its caller: a call that a real device
//! might not survive is noted as a *misuse*.
//!
//! The tests compile it (`driver.rs`), and each test loads a copy with devices of its own. It
//! depends only on our bindings, which it shares with the fabric; `abi-check` compares these with
//! the header.
//!
//! | file | |
//! |---|---|
//! | `script` | the commands that make devices and faults, and tell what was seen |
//! | `state` | what there is |
//! | `devices`, `objects`, `modify`, `events` | the calls of the slow path |
//! | `windows` | memory windows |
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
#[allow(dead_code, unused_imports)] // the fabric's half: calls through the table of a context
#[path = "../../src/fabric/verbs/sys/mod.rs"]
mod sys;
mod windows;
mod wire;
mod work;

pub use c::*;
