//! The end of owners of foreign memory, and of their registrations.
#![allow(unsafe_code)] // foreign memory by pointer

use crate::driver::{Fake, ONE_NIC};
use crate::needs_fake;
use crate::registrations::{GRAIN, Grains, ended, grains, keeping, own, part, register};
use crate::setup::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::channel;
use tensorwire::ForeignMemory;
use tensorwire::internals::fabric::Fabric;
use tensorwire::internals::memory::Owner;

#[test]
fn what_is_registered_for_an_owner_ends_with_it() {
    needs_fake!();
    let fake = Fake::new(ONE_NIC);
    let (fabric, pool) = (keeping(&fake, 16, 1 << 30), crate::harness::pool(1 << 20));
    let registrar = fabric.registrar().expect("it registers");
    let (memory, other) = (own(&grains(2)), own(&grains(1)));
    // A node ends owners in this way.
    let (sender, owners) = channel();
    pool.drop_owners_with(move |owner| sender.send(owner).expect("open"));
    let tensor = register(&fabric, &part(&memory, &pool, 0), &pool).tensor.expect("registered");
    assert!(register(&fabric, &part(&memory, &pool, GRAIN), &pool).tensor.is_some());
    assert!(register(&fabric, &part(&other, &pool, 0), &pool).tensor.is_some());
    drop(memory);
    assert_eq!((ended(&fake), registrar.registered_bytes()), (0, 3 * GRAIN as u64));
    drop(tensor);
    assert_eq!(ended(&fake), 0, "whoever drops a tensor, a poller perhaps, ends nothing");
    drop(owners.try_recv().expect("it was the last"));
    assert_eq!((ended(&fake), registrar.registered_bytes()), (2, GRAIN as u64));
    assert_eq!([registrar.take_ended(), registrar.take_ended()], [2, 0]);
    drop((registrar, fabric, other));
    fake.assert_clean();
}

#[test]
fn what_is_registered_ends_when_the_program_drops_the_last_of_its_owners_memory() {
    needs_fake!();
    let fake = Fake::new(TWO_NICS);
    let (a, b) = two(&fake, 16);
    let owner: Owner = Arc::new(grains(2));
    let gone = Arc::downgrade(&owner);
    let half = |grain: usize| {
        let all = owner.downcast_ref::<Grains>().expect("as it was made").as_ref();
        // SAFETY: the grains are their own owner, and nothing writes to them.
        unsafe { ForeignMemory::new(owner.clone(), all[grain * GRAIN..].as_ptr(), GRAIN) }
    };
    let (first, second) = (half(0), half(1));
    drop(owner);
    let ends = [&a, &b];
    for (end, memory) in [(ends[0], &first), (ends[0], &second), (ends[1], &second)] {
        assert!(register(&end.fabric, &part(memory, &end.pool, 0), &end.pool).tensor.is_some());
    }
    let registered = || ends.map(|end| end.fabric.registrar().expect("it registers").registered_bytes());
    // The owner has more memory, and there is a clone of it.
    let before = ended(&fake);
    let again = second.clone();
    drop((first, second));
    assert_eq!((registered(), ended(&fake)), ([2 * GRAIN as u64, GRAIN as u64], before));
    drop(again);
    assert!(gone.upgrade().is_none());
    assert_eq!((registered(), ended(&fake)), ([0, 0], before + 3), "with every fabric, and at once");
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn an_owner_that_the_program_drops_by_itself_leaves_its_registrations_to_a_later_miss() {
    needs_fake!();
    let fake = Fake::new(ONE_NIC);
    let (fabric, pool) = (keeping(&fake, 16, 1 << 30), crate::harness::pool(1 << 20));
    let grains = Arc::new(grains(1));
    // SAFETY: the grains are their own owner, and nothing writes to them.
    let memory = unsafe { ForeignMemory::new(grains.clone(), (*grains).as_ref().as_ptr(), GRAIN) };
    assert!(register(&fabric, &part(&memory, &pool, 0), &pool).tensor.is_some());
    drop(memory);
    assert_eq!(ended(&fake), 0, "more memory of it may come");
    drop(grains);
    let other = own(&self::grains(1));
    let done = register(&fabric, &part(&other, &pool, 0), &pool);
    assert_eq!((done.tensor.is_some(), done.ended, ended(&fake)), (true, 1, 1));
    drop((done, fabric, other));
    fake.assert_clean();
}

#[test]
fn an_owner_whose_drop_panics_is_gone_all_the_same() {
    struct Bad(Grains);
    impl AsRef<[u8]> for Bad {
        fn as_ref(&self) -> &[u8] {
            self.0.as_ref()
        }
    }
    impl Drop for Bad {
        fn drop(&mut self) {
            panic!("on purpose");
        }
    }
    needs_fake!();
    let fake = Fake::new(ONE_NIC);
    let (fabric, pool) = (keeping(&fake, 16, 1 << 30), crate::harness::pool(1 << 20));
    let memory = ForeignMemory::from_owner(Bad(grains(1)));
    assert!(register(&fabric, &part(&memory, &pool, 0), &pool).tensor.is_some());
    catch_unwind(AssertUnwindSafe(|| drop(memory))).expect_err("it panics");
    assert_eq!(ended(&fake), 1);
    drop(fabric);
    fake.assert_clean();
}
