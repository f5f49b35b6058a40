//! libibverbs is loaded on demand: programs are built without it, start without it, and report that
//! it is missing.

#[path = "../support/bare_machine.rs"]
mod bare_machine;

use bare_machine::{Machine, is_free_of_verbs};
use std::path::PathBuf;
use tensorwire::internals::fabric::verbs::{VerbsFabric, VerbsOptions};
use tensorwire::internals::memory::{PagePolicy, PoolOptions, Region, RegionOptions};
use tensorwire::{Node, Pool};

fn this_program() -> PathBuf {
    std::env::current_exe().expect("this program has a path")
}

#[test]
fn a_program_with_the_crate_needs_no_verbs_library_to_start() {
    is_free_of_verbs(&this_program());
}

#[test]
#[ignore = "a role, not a test"]
fn role_asks_for_verbs() {
    let plain = RegionOptions { pages: PagePolicy::Plain, ..RegionOptions::new(1 << 20) };
    let region = Region::create(1, &plain).expect("memory");
    let pool = Pool::new(region, PoolOptions::default()).expect("a pool");
    match VerbsFabric::new(&pool, VerbsOptions::default()) {
        Ok(_) => println!("role: there is a fabric"),
        Err(error) => println!("role: {error}"),
    }
}

#[test]
fn without_the_library_a_fabric_is_refused_with_how_to_get_it() {
    let machine = Machine::with(&this_program());
    let role = ["--ignored", "--exact", "--nocapture", "library::role_asks_for_verbs"];
    let Some(said) = machine.says(&role) else { return };
    let line =
        said.lines().find(|line| line.contains("role: ")).unwrap_or_else(|| panic!("no answer: {said}"));
    assert!(line.contains("loading libibverbs.so.1 failed"), "{line}");
    assert!(line.contains("No such file"), "{line}");
    assert!(
        line.contains("install rdma-core's libibverbs (Debian: libibverbs1 and ibverbs-providers"),
        "{line}"
    );
}

#[test]
#[ignore = "a role, not a test"]
fn role_starts_a_node_for_verbs() {
    let builder = Node::builder()
        .without_environment()
        .member("w", 0)
        .set("cluster", "w=127.0.0.1:4000")
        .set("fabric", "verbs");
    let builder = builder.set("pool_size", "1MiB").set("pool_pages", "plain").set("pool_lock", "no");
    match builder.start() {
        Ok(node) => println!("role: there is a node, and its peers are {:?}", node.peers()),
        Err(error) => println!("role: {error}"),
    }
}

#[test]
fn without_the_library_a_node_that_is_asked_for_rdma_does_not_start() {
    let machine = Machine::with(&this_program());
    let role = ["--ignored", "--exact", "--nocapture", "library::role_starts_a_node_for_verbs"];
    let Some(said) = machine.says(&role) else { return };
    assert!(said.contains("role: ") && !said.contains("there is a node"), "{said}");
    assert!(said.contains("loading libibverbs.so.1 failed"), "{said}");
    assert!(said.contains("install rdma-core's libibverbs"), "{said}");
}
