//! Properties that only this fabric has.

use super::*;
use crate::fabric::{Completions, Event, LinkFailure, LinkId, Port};
use crate::memory::{LockPolicy, PagePolicy, Pool, PoolOptions, Region, RegionOptions, Tensor, TensorMut};
use crate::wire::{DType, Shape, TensorMeta, Time};

pub(super) fn pool() -> Pool {
    let options =
        RegionOptions { lock: LockPolicy::No, pages: PagePolicy::Plain, ..RegionOptions::new(1 << 20) };
    Pool::new(Region::create(0, &options).expect("a region"), PoolOptions::default()).expect("a pool")
}

pub(super) fn tensor_mut(pool: &Pool, len: usize) -> TensorMut {
    let shape = Shape::new(&[len as u64]).expect("a shape");
    pool.zeroed(TensorMeta::new(DType::U8, shape).expect("meta")).expect("room")
}

pub(super) fn tensor(pool: &Pool, bytes: &[u8]) -> Tensor {
    let mut tensor = tensor_mut(pool, bytes.len());
    tensor.bytes_mut().copy_from_slice(bytes);
    tensor.freeze()
}

/// Two processes with one link. Process 1 has posted receives.
pub(super) struct World {
    pub network: SimNetwork,
    pub pools: [Pool; 2],
    pub fabrics: [SimFabric; 2],
    pub processes: [SimProcess; 2],
    pub ports: [SimPort; 2],
    pub links: [LinkId; 2],
}

fn linked(fabrics: &[SimFabric; 2], generation: u8) -> [SimLink; 2] {
    let options = LinkOptions { depth: 64, receives: 0, generation };
    let endpoints = [0, 1].map(|k: usize| fabrics[k].endpoint(0, &options).expect("an endpoint"));
    let addresses = [0, 1].map(|k: usize| endpoints[k].address().to_vec());
    let [a, b] = endpoints;
    let a = a.connect(Role::Initiator, &addresses[1], Duration::ZERO).expect("connected");
    [a, b.connect(Role::Acceptor, &addresses[0], Duration::ZERO).expect("connected")]
}

pub(super) fn world(seed: u64, options: SimOptions) -> World {
    world_of([pool(), pool()], seed, options)
}

pub(super) fn world_of(pools: [Pool; 2], seed: u64, options: SimOptions) -> World {
    let network = SimNetwork::new(seed, options);
    let fabrics = [0, 1].map(|k: usize| network.process(&pools[k]));
    let [a, b] = linked(&fabrics, 0);
    let mut ports = [0, 1].map(|k: usize| fabrics[k].port().expect("a port"));
    let links = [ports[0].attach(a).expect("room"), ports[1].attach(b).expect("room")];
    ports[1].post_receives(links[1], 1000);
    let processes = [fabrics[0].process(), fabrics[1].process()];
    World { network, pools, fabrics, processes, ports, links }
}

impl World {
    /// A new life of a process, linked with the other; the other's old link stays attached.
    pub fn come_back(&mut self, who: usize) {
        self.fabrics[who] = self.network.process(&self.pools[who]);
        self.processes[who] = self.fabrics[who].process();
        self.ports[who] = self.fabrics[who].port().expect("a port");
        for (k, link) in linked(&self.fabrics, 1).into_iter().enumerate() {
            self.links[k] = self.ports[k].attach(link).expect("room");
        }
    }

    /// A second link of the two. Returns the side of process 1.
    pub fn another_link(&mut self) -> LinkId {
        let [a, b] = linked(&self.fabrics, 0);
        self.ports[0].attach(a).expect("room");
        self.ports[1].attach(b).expect("room")
    }

    /// The events of one poll: the first bytes of messages, and failures.
    pub fn poll(&mut self, who: usize) -> (Vec<u8>, Vec<LinkFailure>) {
        let mut completions = Completions::default();
        self.ports[who].poll(&mut completions);
        let (mut messages, mut failures) = (Vec::new(), Vec::new());
        for (completion, message) in completions.drain() {
            match completion.event {
                Event::Message(_) => messages.push(message[0]),
                Event::Down(failure) => failures.push(failure),
                _ => {}
            }
        }
        (messages, failures)
    }

    pub fn send_twenty(&mut self) {
        for number in 0..20u8 {
            self.ports[0].send(self.links[0], &[number]).expect("room");
        }
    }

    pub fn rest(&self) {
        self.network.advance_to(self.network.now() + Duration::from_secs(1));
    }
}

/// The order in which twenty messages on two links arrive, and the digest.
fn history(seed: u64) -> (Vec<u8>, u64) {
    let mut world = world(seed, SimOptions { poll_batch: 3, ..SimOptions::default() });
    let [a, b] = linked(&world.fabrics, 0);
    let links = [world.links[0], world.ports[0].attach(a).expect("room")];
    let other = world.ports[1].attach(b).expect("room");
    world.ports[1].post_receives(other, 1000);
    for number in 0..20u8 {
        world.ports[0].send(links[usize::from(number % 2)], &[number]).expect("room");
    }
    let mut arrived = Vec::new();
    while let Some(next) = world.network.next_event() {
        world.network.advance_to(next);
        arrived.extend(world.poll(1).0);
    }
    loop {
        let (more, _) = world.poll(1);
        if more.is_empty() {
            break;
        }
        assert!(more.len() <= 3, "one poll brings at most a batch");
        arrived.extend(more);
    }
    (arrived, world.network.digest())
}

#[test]
fn the_same_seed_has_the_same_history_and_another_seed_another() {
    assert_eq!(history(1), history(1));
    assert_ne!(history(1).1, history(2).1);
    assert!((0..20).any(|seed| history(seed).0 != (0..20).collect::<Vec<_>>()), "links overtake each other");
}

#[test]
fn the_digest_tells_what_was_sent_and_not_only_how_much() {
    let digest = |byte: u8| {
        let mut world = world(1, SimOptions::default());
        let link = world.links[0];
        world.ports[0].send(link, &[byte]).expect("room");
        world.rest();
        world.network.digest()
    };
    assert_eq!(digest(1), digest(1));
    assert_ne!(digest(1), digest(2));
}

#[test]
#[should_panic(expected = "poll_batch")]
fn polls_that_could_never_bring_anything_are_refused() {
    SimNetwork::new(1, SimOptions { poll_batch: 0, ..SimOptions::default() });
}

#[test]
fn nothing_happens_before_its_time() {
    let delay = Duration::from_micros(10)..=Duration::from_micros(10);
    let mut world = world(1, SimOptions { delay, ..SimOptions::default() });
    world.send_twenty();
    world.network.advance_to(Time::from_nanos(9_999));
    assert!(world.ports[1].arm());
    assert!(world.poll(1).0.is_empty());
    world.network.advance_to(Time::from_nanos(10_000));
    assert!(!world.ports[1].arm());
    assert_eq!(world.poll(1).0.len(), 16);
}

#[test]
fn who_stalls_reads_nothing_and_loses_nothing() {
    let mut world = world(1, SimOptions::default());
    world.send_twenty();
    world.network.stall(world.processes[1], Time::ZERO + Duration::from_secs(2));
    world.rest();
    assert!(world.poll(1).0.is_empty());
    world.rest();
    assert_eq!(world.poll(1).0.len() + world.poll(1).0.len(), 20);
}

#[test]
fn who_is_killed_sends_nothing_more_and_its_peer_hears_of_it() {
    let mut arrived = Vec::new();
    for seed in 0..20 {
        let mut world = world(seed, SimOptions { poll_batch: 100, ..SimOptions::default() });
        world.send_twenty();
        world.network.kill(world.processes[0]);
        assert!(world.ports[0].send(world.links[0], b"x").is_err());
        world.rest();
        let (messages, failures) = world.poll(1);
        assert_eq!(failures, [LinkFailure::PeerDied { pid: 0 }]);
        arrived.push(messages.len());
        assert_eq!(world.poll(0).1, [], "the dead hear nothing");
    }
    arrived.sort_unstable();
    assert!(arrived[0] < 20 && arrived[19] > 0, "some of what was on its way arrives: {arrived:?}");
}

#[test]
fn a_cut_is_heard_of_on_both_sides() {
    let mut world = world(3, SimOptions::default());
    world.network.cut(world.processes[1], world.processes[0]);
    world.rest();
    for who in [0, 1] {
        assert!(matches!(&world.poll(who).1[..], [LinkFailure::Local(why)] if why.contains("cut")));
    }
}

#[test]
fn a_queue_can_be_full_though_it_is_not() {
    let mut world = world(4, SimOptions { full_per_mille: 500, ..SimOptions::default() });
    let sent = (0..40).filter(|_| world.ports[0].send(world.links[0], b"x").is_ok()).count();
    assert!((5..36).contains(&sent), "{sent}");
}

#[test]
fn an_endpoint_can_only_be_connected_to_its_equal_that_lives() {
    let network = SimNetwork::new(1, SimOptions::default());
    let fabrics = [network.process(&pool()), network.process(&pool())];
    let endpoint = |who: usize, depth| {
        fabrics[who].endpoint(0, &LinkOptions { depth, receives: 0, generation: 0 }).expect("an endpoint")
    };
    let refused = |ours: SimEndpoint, address: &[u8]| {
        ours.connect(Role::Initiator, address, Duration::ZERO).expect_err("refused").to_string()
    };
    assert!(refused(endpoint(0, 16), b"nowhere").contains("is no address"));
    assert!(refused(endpoint(0, 16), &99u64.to_le_bytes()).contains("no such endpoint"));
    let other = endpoint(1, 32);
    assert!(refused(endpoint(0, 16), other.address()).contains("the other"));
    let address = other.address().to_vec();
    drop(other);
    assert!(refused(endpoint(0, 32), &address).contains("gone"));
    let other = endpoint(1, 16);
    network.kill(fabrics[1].process());
    assert!(refused(endpoint(0, 16), other.address()).contains("gone"));
    assert!(fabrics[0].endpoint(0, &LinkOptions { depth: 0, receives: 0, generation: 0 }).is_err());
    assert!(fabrics[0].endpoint(0, &LinkOptions { depth: 17, receives: 0, generation: 0 }).is_err());
}
