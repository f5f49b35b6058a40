//! The tests of `it` again, over verbs with the scripted libibverbs of `tests/fake_verbs`. Tests of
//! loans, and tests with several processes, are skipped here.

#[path = "../it/aborts.rs"]
mod aborts;
#[path = "../it/batches/mod.rs"]
mod batches;
mod common;
#[path = "../it/defaults.rs"]
mod defaults;
#[path = "../fake_verbs/driver.rs"]
mod driver;
#[path = "../it/edges.rs"]
mod edges;
#[path = "../it/errors.rs"]
mod errors;
#[path = "../it/flush.rs"]
mod flush;
#[path = "../it/futures.rs"]
mod futures;
#[path = "../it/known_faults/mod.rs"]
mod known_faults;
#[path = "../it/log.rs"]
mod log;
#[path = "../it/receive.rs"]
mod receive;
#[path = "../it/rendezvous.rs"]
mod rendezvous;
#[path = "../it/sets.rs"]
mod sets;
#[path = "../it/soak.rs"]
mod soak;
#[path = "../it/standing/mod.rs"]
mod standing;
#[path = "../it/strings.rs"]
mod strings;
#[path = "../it/validation.rs"]
mod validation;
