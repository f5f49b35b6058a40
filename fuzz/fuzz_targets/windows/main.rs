//! A node that exchanges edge windows with a peer that says, writes and lends what it likes, and
//! with an honest peer.
//!
//! The input is a program of commands of the hostile peer and of the node's user. In all cases
//! nothing panics or hangs. Each receive ends once, and a delivered tensor does not change. A wrong
//! message ends the hostile peer's link alone: the honest peer is served to the end. No memory is
//! left behind.
#![no_main]

#[path = "../input.rs"]
mod input;
mod node;
mod peer;
mod user;

use input::Input;
use libfuzzer_sys::fuzz_target;
use node::{Node, link_honest};
use peer::Peer;
use std::time::Duration;
use tensorwire::Pool;
use tensorwire::internals::fabric::sim::{SimNetwork, SimOptions};
use tensorwire::internals::fabric::{LinkOptions, MAX_MESSAGE};
use tensorwire::internals::memory::{LockPolicy, PagePolicy, PoolOptions, Region, RegionOptions};
use user::User;

/// Receives of each side of a link.
const DEPTH: u32 = 8;
/// Commands of a program at most.
const MAX_COMMANDS: usize = 400;
/// Rounds after which a post has left, of which the network refuses each fifth.
const ROUNDS_TO_POST: u32 = 20;
/// Links with the hostile peer at most, one after the other.
const MAX_LINKS: u64 = 4;

/// Lives of the hostile peer.
const FIRST_LIFE: u64 = 1;
const LAST_LIFE: u64 = 9;

/// The members, in the order of their indices.
const NODE: usize = 0;
const HONEST: usize = 1;
const HOSTILE: usize = 2;
const DEVICES: [&str; 3] = [
    "/job:a/replica:0/task:0/device:CPU:0",
    "/job:b/replica:0/task:0/device:CPU:0",
    "/job:c/replica:0/task:0/device:CPU:0",
];

thread_local! {
    /// Made once: each program leaves them empty.
    static POOLS: [Pool; 3] = [pool(), pool(), pool()];
}

fn pool() -> Pool {
    let options =
        RegionOptions { lock: LockPolicy::No, pages: PagePolicy::Plain, ..RegionOptions::new(64 << 10) };
    Pool::new(Region::create(0, &options).expect("64 KiB"), PoolOptions::default()).expect("a pool")
}

fuzz_target!(|bytes: &[u8]| {
    POOLS.with(|pools| run(pools, &mut Input(bytes)));
});

fn run(pools: &[Pool; 3], input: &mut Input<'_>) {
    let bits = input.u8();
    let options = SimOptions {
        delay: Duration::ZERO..=Duration::ZERO,
        completion_delay: Duration::ZERO..=Duration::ZERO,
        lends: bits & 1 == 0,
        full_per_mille: if bits & 2 != 0 { 200 } else { 0 },
        max_message: if bits & 32 != 0 { 400 } else { MAX_MESSAGE },
        max_lent_bytes: if bits & 4 != 0 { 600 } else { u64::MAX },
        ..SimOptions::default()
    };
    let (borrow, validate) = (bits & 8 == 0, bits & 16 != 0);
    let network = SimNetwork::new(1, options);
    let node = Node::new(NODE, &network, &pools[NODE], (borrow, validate));
    let honest = Node::new(HONEST, &network, &pools[HONEST], (borrow, validate));
    let mut peer = Peer::new(network.process(&pools[HOSTILE]), pools[HOSTILE].clone());
    let idle_rounds = if bits & 2 != 0 { ROUNDS_TO_POST } else { 1 };
    let mut scene = Scene { network, node, honest, links: 0, idle_rounds };
    link_honest(&mut scene);
    scene.link(&mut peer, FIRST_LIFE);
    let mut user = User::default();
    for _ in 0..MAX_COMMANDS {
        let Some(command) = input.byte() else { break };
        match command % 35 {
            0 if scene.links < MAX_LINKS => scene.link(&mut peer, FIRST_LIFE + u64::from(input.u8() % 2)),
            0 => {}
            user_s @ 1..14 => user.act(&scene.node, user_s, input),
            peer_s => peer.act(peer_s - 14, input),
        }
        if command < 128 {
            scene.settle(&mut peer);
        }
        user.take_ended();
    }
    scene.settle(&mut peer);
    scene.serves_the_honest_peer(&mut peer);
    peer.leave();
    scene.settle(&mut peer);
    // Values of steps that never began end with the life that sent them.
    scene.link(&mut peer, LAST_LIFE);
    peer.leave();
    scene.settle(&mut peer);
    user.end(&scene.node);
    scene.honest.context().cleanup(LAST_STEP);
    scene.settle(&mut peer);
    scene.node.check_end();
    scene.honest.check_end();
    drop((user, scene, peer));
    for pool in pools {
        assert!(pool.is_empty(), "{} tensors were left behind", pool.stats().live_tensors);
    }
}

/// The honest processes and the network.
pub struct Scene {
    network: SimNetwork,
    node: Node,
    honest: Node,
    /// Links that the node had with the hostile peer.
    links: u64,
    /// Rounds in which nothing comes, after which nothing more comes.
    idle_rounds: u32,
}

impl Scene {
    /// Links the node with a life of the hostile peer.
    fn link(&mut self, peer: &mut Peer, life: u64) {
        self.links += 1;
        let options = LinkOptions { depth: DEPTH, receives: 0, generation: self.links as u8 };
        let ready = self.node.link(peer, (life, self.links), &options);
        self.settle(peer);
        ready.tell(&self.node);
        self.settle(peer);
    }

    /// Delivers all messages in flight. Each answer uses up a resource, so this ends.
    fn settle(&self, peer: &mut Peer) {
        let mut idle = 0;
        for _ in 0..10_000 {
            while let Some(next) = self.network.next_event() {
                self.network.advance_to(next);
            }
            let polled = self.node.progress() + self.honest.progress() + peer.poll();
            let is_idle = polled == 0 && self.network.next_event().is_none();
            idle = if is_idle { idle + 1 } else { 0 };
            if idle == self.idle_rounds {
                return self.node.check_load();
            }
        }
        panic!("it never comes to rest");
    }

    /// A value goes each way between the node and the honest peer.
    fn serves_the_honest_peer(&self, peer: &mut Peer) {
        for (from, to) in [(&self.node, &self.honest), (&self.honest, &self.node)] {
            let receive = to.begin_receive(from, LAST_STEP);
            self.settle(peer);
            from.send_one(to, LAST_STEP);
            self.settle(peer);
            assert!(receive.is_done(), "the honest peer is not served");
            assert!(receive.wait().expect("the honest peer is served").is_dead);
        }
    }
}

/// The step of the exchange with the honest peer.
const LAST_STEP: u64 = 1 << 32;
