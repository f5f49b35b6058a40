//! Cases of `tests/it` again, over gRPC calls. The nightly checks run all of them there.

#[path = "../it/aborts.rs"]
mod aborts;
mod common;
#[path = "../it/edges.rs"]
mod edges;
#[path = "../it/errors.rs"]
mod errors;
#[path = "../it/flush.rs"]
mod flush;
#[path = "../it/log.rs"]
mod log;
#[path = "../it/receive.rs"]
mod receive;
#[path = "../it/rendezvous.rs"]
mod rendezvous;
#[path = "../it/validation.rs"]
mod validation;
#[path = "../it/watching.rs"]
mod watching;
