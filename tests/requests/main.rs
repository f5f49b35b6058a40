//! The tests of `it` again, for the exchange by requests: over the verbs fabric with the scripted
//! libibverbs of `tests/fake_verbs`. Tests of shared memory, and tests with several processes, are
//! skipped here.

#[path = "../it/aborts.rs"]
mod aborts;
#[path = "../it/batches/mod.rs"]
mod batches;
mod common;
#[path = "../fake_verbs/driver.rs"]
mod driver;
#[path = "../it/errors.rs"]
mod errors;
#[path = "../it/flush.rs"]
mod flush;
#[path = "../it/futures.rs"]
mod futures;
#[path = "../it/receive.rs"]
mod receive;
#[path = "../it/rendezvous.rs"]
mod rendezvous;
#[path = "../it/sets.rs"]
mod sets;
#[path = "../it/standing/mod.rs"]
mod standing;
#[path = "../it/strings.rs"]
mod strings;
