//! A link whose peer sends, writes and lends arbitrary data, while the owner of the link sends and
//! receives.
//!
//! The input is a program of commands of the peer and of the owner. In all cases the link does not
//! panic or hang. Every waiter is told exactly once, and delivered tensors do not change. Every
//! value is returned or released, and no memory is leaked.
#![no_main]

#[path = "../input.rs"]
mod input;
mod owner;
mod peer;
mod requests;

use input::Input;
use libfuzzer_sys::fuzz_target;
use owner::Owner;
use peer::Peer;
use std::time::Duration;
use tensorwire::Pool;
use tensorwire::internals::fabric::sim::{SimNetwork, SimOptions};
use tensorwire::internals::fabric::{Endpoint, Fabric, LinkOptions, Role};
use tensorwire::internals::memory::{LockPolicy, PagePolicy, PoolOptions, Region, RegionOptions};

/// Receives of each side.
const DEPTH: u32 = 8;
/// Commands of a program at most.
const MAX_COMMANDS: usize = 400;

const OWNER: &str = "/job:a/replica:0/task:0/device:CPU:0";
const PEER: &str = "/job:b/replica:0/task:0/device:CPU:0";

thread_local! {
    /// Made once: each program leaves them empty.
    static POOLS: [Pool; 2] = [pool(), pool()];
}

fn pool() -> Pool {
    let options =
        RegionOptions { lock: LockPolicy::No, pages: PagePolicy::Plain, ..RegionOptions::new(64 << 10) };
    Pool::new(Region::create(0, &options).expect("64 KiB"), PoolOptions::default()).expect("a pool")
}

fuzz_target!(|bytes: &[u8]| {
    POOLS.with(|pools| run(pools, &mut Input(bytes)));
});

fn run(pools: &[Pool; 2], input: &mut Input<'_>) {
    let (lends, bits) = (input.flag(), input.u8());
    let validate = bits & 2 != 0;
    let options = SimOptions {
        delay: Duration::ZERO..=Duration::ZERO,
        completion_delay: Duration::ZERO..=Duration::ZERO,
        lends,
        full_per_mille: if bits & 1 != 0 { 200 } else { 0 },
        ..SimOptions::default()
    };
    let network = SimNetwork::new(1, options);
    let fabrics = [0, 1].map(|side: usize| network.process(&pools[side]));
    let options = LinkOptions { depth: DEPTH, receives: 0, generation: 0 };
    let [ours, theirs] = [0, 1].map(|side: usize| fabrics[side].endpoint(0, &options).expect("an endpoint"));
    let addresses = [ours.address().to_vec(), theirs.address().to_vec()];
    let ours = ours.connect(Role::Initiator, &addresses[1], Duration::ZERO).expect("connected");
    let theirs = theirs.connect(Role::Acceptor, &addresses[0], Duration::ZERO).expect("connected");
    let [our_port, their_port] = [0, 1].map(|side: usize| fabrics[side].port().expect("a port"));
    let mut owner = Owner::new(our_port, ours, pools[0].clone(), validate);
    let mut peer = Peer::new(their_port, theirs, pools[1].clone());

    for _ in 0..MAX_COMMANDS {
        let Some(command) = input.byte() else { break };
        match command % 26 {
            own @ 0..10 => owner.act(own, input),
            other => peer.act(other - 10, input),
        }
        if command < 128 {
            settle(&network, &mut owner, &mut peer);
        }
        if owner.is_down() {
            break;
        }
    }
    owner.stop();
    settle(&network, &mut owner, &mut peer);
    owner.check_end();
    drop(owner);
    drop(peer);
    drop(fabrics);
    drop(network);
    for pool in pools {
        assert!(pool.is_empty(), "{} tensors were left behind", pool.stats().live_tensors);
    }
}

/// Delivers all messages in flight. The two sides answer each other, but each answer uses up a
/// resource.
fn settle(network: &SimNetwork, owner: &mut Owner, peer: &mut Peer) {
    for _ in 0..10_000 {
        while let Some(next) = network.next_event() {
            network.advance_to(next);
        }
        if owner.poll() + peer.poll() == 0 && network.next_event().is_none() {
            return;
        }
    }
    panic!("it never comes to rest");
}
