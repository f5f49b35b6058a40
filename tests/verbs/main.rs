//! The verbs fabric on scripted devices (`tests/fake_verbs`): attributes of queue pairs, refusals,
//! sizes and use of queues, failures. `tests/conformance` tests the rules of a link, on the fake
//! too.

mod batches;
mod choice;
#[path = "../common/mod.rs"]
mod common;
mod domains;
#[path = "../fake_verbs/driver.rs"]
mod driver;
mod early;
mod events;
mod failover;
mod failures;
#[path = "../common/foreign.rs"]
mod foreign;
#[allow(dead_code)] // the conformance suite uses all of it
#[path = "../conformance/harness.rs"]
mod harness;
mod library;
mod limits;
mod moves;
mod nodes;
mod numa;
mod owners;
mod queues;
mod rails;
mod refusals;
mod regions;
mod registrations;
mod removal;
mod settings;
mod setup;
mod several_fabrics;
mod stripes;
mod stuck;
mod watch;
mod windows;
