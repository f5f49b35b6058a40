//! A hostile peer forges each field of a grant, one at a time and in pairs. A model of the rules
//! says what the peer gets. The bytes of the honest pool are compared as a whole.

use super::tests::{World, pool, tensor, tensor_mut, world_of};
use super::*;
use crate::fabric::forging::{ForgedField, changes, forgeries, image};
use crate::fabric::{Completions, Event, LinkFailure, Port, PostError};
use crate::memory::{Pool, TensorMut};
use crate::wire::{Grant, Immediate, Slot};

/// Bytes of each grant, and of the part of it that an honest operation names.
const GRANTED: u64 = 64;
const PART: u64 = 32;
const HOSTILE: u8 = 0x77;
const EXPOSED: u8 = 0x33;

/// The operations with a grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Posts {
    WriteInline,
    Write,
    Read,
}

/// Process 1 has granted and exposed something to process 0, and to another link.
struct Scene {
    world: World,
    granted: Grant,
    exposed: Grant,
    /// Granted no more. The tensor lies beside the others.
    revoked: (Grant, TensorMut),
    other: Grant,
}

fn scene(pools: &[Pool; 2]) -> Scene {
    let mut world = world_of(pools.clone(), 1, SimOptions::default());
    let (pool, link) = (world.pools[1].clone(), world.links[1]);
    let target = || tensor_mut(&pool, GRANTED as usize);
    let neighbour = world.another_link();
    let port = &mut world.ports[1];
    let other = port.grant(neighbour, target()).expect("room");
    let revoked = port.grant(link, target()).expect("room");
    let back = port.revoke(link, &revoked).expect("granted");
    let granted = port.grant(link, target()).expect("room");
    let exposed = port.expose(link, &tensor(&pool, &[EXPOSED; GRANTED as usize])).expect("room");
    Scene { world, granted, exposed, revoked: (revoked, back), other }
}

impl Scene {
    /// What an honest peer names.
    fn honest(&self, posts: Posts) -> Grant {
        let grant = if posts == Posts::Read { &self.exposed } else { &self.granted };
        grant.part(8, PART).expect("inside")
    }

    fn fields(&self, posts: Posts) -> Vec<ForgedField> {
        let Grant { region, key, offset, len } = self.honest(posts);
        let all = [self.granted, self.exposed, self.revoked.0, self.other];
        let end = if posts == Posts::Read { self.exposed } else { self.granted }.offset + GRANTED;
        let mut offsets: Vec<u64> = all.iter().map(|grant| grant.offset).collect();
        offsets.extend([end - PART, end - PART + 1]);
        let keys = all.iter().map(|grant| grant.key.into()).collect();
        let field = |name, bits, honest, known| ForgedField { name, bits, honest, known };
        vec![
            field("region", 16, region.into(), Vec::new()),
            field("key", 32, key.into(), keys),
            field("offset", 64, offset, offsets),
            field("length", 64, len, vec![GRANTED - 8, GRANTED - 7]),
            field("has immediate", 1, 1, Vec::new()),
        ]
    }

    /// Whether the rules allow an access.
    fn is_allowed(&self, posts: Posts, named: &Grant) -> bool {
        let grant = if posts == Posts::Read { &self.exposed } else { &self.granted };
        let end = named.offset.checked_add(named.len);
        let is_inside = named.offset >= grant.offset && end.is_some_and(|end| end <= grant.offset + GRANTED);
        named.len == 0 || ((named.key, named.region) == (grant.key, grant.region) && is_inside)
    }

    /// Posts an operation of process 0, with a source or a target that is long enough for what the
    /// grant has.
    fn post(&mut self, posts: Posts, named: &Grant, immediate: Option<Immediate>) -> Result<(), PostError> {
        let (link, port) = (self.world.links[0], &mut self.world.ports[0]);
        // More is refused by the peer's own port.
        let len = named.len.min(100);
        let bytes = vec![HOSTILE; len as usize];
        match posts {
            Posts::WriteInline => port.write_inline(link, &bytes, named, immediate),
            Posts::Write => port.write(link, &tensor(&self.world.pools[0], &bytes), len, named, immediate),
            Posts::Read => {
                let target = tensor_mut(&self.world.pools[0], 100);
                port.read(link, target, named).map_err(|(error, _)| error)
            }
        }
    }

    /// The events of a process but those of its other links.
    fn events(&mut self, who: usize) -> Vec<Event> {
        let mut completions = Completions::default();
        while self.world.ports[who].poll(&mut completions) > 0 {}
        completions.drain().map(|(completion, _)| completion.event).collect()
    }

    /// The honest side must give what the rules say, and nothing else. Returns whether that was
    /// something.
    fn forge(mut self, posts: Posts, named: &Grant, has_immediate: bool) -> bool {
        let immediate = Immediate { generation: 3, slot: Slot::ZERO };
        let immediate = has_immediate.then_some(immediate).filter(|_| posts != Posts::Read);
        self.events(1);
        let mut expected = image(&self.world.pools[1]);
        let posted = self.post(posts, named, immediate);
        self.world.rest();
        let (theirs, events) = (self.events(0), self.events(1));
        let after = image(&self.world.pools[1]);
        if posted.is_err() {
            assert!(named.len > 100 && events.is_empty(), "{posted:?}, {events:?}");
            assert!(after == expected, "bytes were written that were not granted");
            return false;
        }
        // A write has as many bytes as it brings.
        let named = Grant { len: named.len.min(100), ..*named };
        let is_allowed = self.is_allowed(posts, &named);
        match &events[..] {
            [] if is_allowed && immediate.is_none() => {}
            [Event::Immediate { bytes, .. }] if is_allowed && immediate.is_some() => {
                assert_eq!(*bytes, named.len);
            }
            [Event::Down(why @ LinkFailure::Protocol(_))] if !is_allowed => {
                self.granted.assert_key_hidden_in(&format!("{why} {why:?}"));
                self.exposed.assert_key_hidden_in(&format!("{why} {why:?}"));
            }
            _ => panic!("{events:?}, allowed: {is_allowed}"),
        }
        match &theirs[..] {
            [] if is_allowed && posts == Posts::WriteInline => {}
            [Event::Done] if is_allowed && posts == Posts::Write => {}
            [Event::ReadDone { target }] if is_allowed && posts == Posts::Read => {
                let (got, rest) = target.bytes().split_at(named.len as usize);
                assert!(got.iter().all(|byte| *byte == EXPOSED) && rest.iter().all(|byte| *byte == 0));
            }
            [.., Event::Down(_)] if !is_allowed => {
                assert!(!theirs.iter().any(|event| matches!(event, Event::ReadDone { .. })));
            }
            _ => panic!("{theirs:?}, allowed: {is_allowed}"),
        }
        if is_allowed && posts != Posts::Read && named.len > 0 {
            expected[named.offset as usize..][..named.len as usize].fill(HOSTILE);
        }
        assert!(after == expected, "bytes were written that were not granted");
        is_allowed
    }
}

#[test]
fn a_peer_that_forges_any_field_of_a_grant_gets_what_it_was_granted_and_nothing_else() {
    let pools = [pool(), pool()];
    for posts in [Posts::WriteInline, Posts::Write, Posts::Read] {
        let all = forgeries(&scene(&pools).fields(posts));
        let mut outcomes = [0, 0];
        for forgery in all {
            let scene = scene(&pools);
            let Some(changes) = changes(&scene.fields(posts), &forgery) else { continue };
            let (mut named, mut has_immediate) = (scene.honest(posts), true);
            for (name, value) in &changes {
                match *name {
                    "region" => named.region = *value as u16,
                    "key" => named.key = *value as u32,
                    "offset" => named.offset = *value,
                    "length" => named.len = *value,
                    _ => has_immediate = *value == 1,
                }
            }
            let run = std::panic::AssertUnwindSafe(|| scene.forge(posts, &named, has_immediate));
            match std::panic::catch_unwind(run) {
                Ok(gets) => outcomes[usize::from(gets)] += 1,
                Err(_) => panic!("{posts:?} with {changes:#x?}"),
            }
        }
        println!("{posts:?}: {} refused, {} obeyed", outcomes[0], outcomes[1]);
        assert!(outcomes.iter().all(|count| *count > 0), "{outcomes:?} of {posts:?}");
    }
}
