//! The verbs fabric on devices that a script makes up (`tests/fake_verbs`): how it sets queue pairs, what it says when it is
//! refused something, how it sizes and fills queues, and what it makes of failures. What a link must do on any device is tested
//! by `tests/conformance`, also on the fake.

mod batches;
mod choice;
#[path = "../common/mod.rs"]
mod common;
mod domains;
#[path = "../fake_verbs/driver.rs"]
mod driver;
mod early;
mod events;
mod failures;
#[path = "../common/foreign.rs"]
mod foreign;
#[allow(dead_code)] // the rules of the conformance suite use all of it
#[path = "../conformance/harness.rs"]
mod harness;
mod library;
mod moves;
mod nodes;
mod owners;
mod queues;
mod refusals;
mod regions;
mod registrations;
mod removal;
mod settings;
mod setup;
mod stripes;
mod stuck;
mod watch;
