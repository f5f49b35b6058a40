//! Cases of `tests/it` again, over TCP. The nightly checks run all of them there.

mod common;
#[path = "../it/edges.rs"]
mod edges;
#[path = "../it/errors.rs"]
mod errors;
#[path = "../it/flush.rs"]
mod flush;
#[path = "../it/receive.rs"]
mod receive;
#[path = "../it/rendezvous.rs"]
mod rendezvous;
mod streams;
#[path = "../it/validation.rs"]
mod validation;
