//! Foreign memory: it is registered once for its owner, kept while the limits permit, and never
//! deregistered while it is in use.

use crate::driver::{Fake, ONE_NIC};
use crate::harness::{Got, pattern, tensor_mut};
use crate::setup::*;
use crate::{expect, needs_fake};
use memmap2::MmapMut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use tensorwire::internals::fabric::verbs::{VerbsFabric, VerbsOptions};
use tensorwire::internals::fabric::{Fabric, Port, PostError, Registration};
use tensorwire::{DType, ForeignMemory, Pool, Shape, Tensor, TensorMeta};

/// Ranges are extended to multiples of this.
pub const GRAIN: usize = 2 << 20;
const TENSOR: u64 = 10_000;

/// Memory aligned to a grain at both ends, so that its registered ranges are known. Each clone is
/// another owner.
#[derive(Clone)]
pub struct Grains {
    map: Arc<MmapMut>,
    count: usize,
}

impl AsRef<[u8]> for Grains {
    fn as_ref(&self) -> &[u8] {
        let start = self.map.as_ptr().addr().next_multiple_of(GRAIN) - self.map.as_ptr().addr();
        &self.map[start..start + self.count * GRAIN]
    }
}

pub fn grains(count: usize) -> Grains {
    Grains { map: Arc::new(MmapMut::map_anon((count + 1) * GRAIN).expect("memory")), count }
}

/// All of the memory, with an owner of its own.
pub fn own(grains: &Grains) -> ForeignMemory {
    ForeignMemory::from_owner(grains.clone())
}

pub fn part(memory: &ForeignMemory, pool: &Pool, offset: usize) -> Tensor {
    let meta = TensorMeta::new(DType::U8, Shape::new(&[TENSOR]).expect("shape")).expect("meta");
    memory.tensor(pool, meta, offset as u64).expect("inside")
}

pub fn register(fabric: &VerbsFabric, tensor: &Tensor, pool: &Pool) -> Registration {
    fabric.registrar().expect("it registers").register(pool, tensor)
}

/// A fabric that keeps at most `count` registrations of `bytes` bytes together.
pub fn keeping(fake: &Fake, registrations: u32, registered_bytes: u64) -> VerbsFabric {
    let options = VerbsOptions { registrations, registered_bytes, ..VerbsOptions::default() };
    fabric(fake, options).expect("the script has the device")
}

/// The lengths of the registered ranges, without the pool.
fn made(fake: &Fake) -> Vec<u64> {
    let mut calls = fake.calls("reg_mr");
    calls.retain(|call| call.number("access") == 0);
    calls.iter().map(|call| call.number("len")).collect()
}

pub fn ended(fake: &Fake) -> usize {
    fake.calls("dereg_mr").len()
}

#[test]
fn a_tensor_is_written_from_where_it_lies_and_its_memory_registered_once_for_reading() {
    needs_fake!();
    let fake = Fake::new(TWO_NICS);
    let (mut a, mut b) = two(&fake, 16);
    let source = pattern(3 << 20, 5);
    let memory = ForeignMemory::from_owner(source.clone());
    for offset in [0, 100, 1_000_000, 2_900_000] {
        let tensor = part(&memory, &a.pool, offset);
        let done = register(&a.fabric, &tensor, &a.pool);
        let registered = done.tensor.expect("registered");
        assert_eq!(registered.as_ptr(), tensor.as_ptr());
        let grant = b.port.grant(b.link, tensor_mut(&b.pool, TENSOR as usize)).expect("room");
        a.port.write(a.link, &registered, TENSOR, &grant, None).expect("room");
        drop((registered, tensor));
        expect!(a.next(&mut b), Got::Done => ());
        let target = b.port.revoke(b.link, &grant).expect("granted");
        assert_eq!(target.bytes(), &source[offset..offset + TENSOR as usize]);
    }
    // The vector spans two or three grains. A tensor across a border has a range of its own.
    assert!((2..=4).contains(&made(&fake).len()), "{:?}", made(&fake));
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn tensors_side_by_side_share_a_registration_and_others_have_their_own() {
    needs_fake!();
    let fake = Fake::new(ONE_NIC);
    let (fabric, pool) = (keeping(&fake, 16, 1 << 30), crate::harness::pool(1 << 20));
    let grains = grains(4);
    let memory = own(&grains);
    let known =
        [0, TENSOR as usize, GRAIN - 100, GRAIN - TENSOR as usize, GRAIN + 5, 3 * GRAIN].map(|offset| {
            let done = register(&fabric, &part(&memory, &pool, offset), &pool);
            assert!(done.tensor.is_some());
            done.is_known
        });
    // A tensor across a border registers both grains; later tensors in the second grain find this
    // range.
    assert_eq!(known, [false, true, false, true, true, false]);
    assert_eq!(made(&fake), [GRAIN, 2 * GRAIN, GRAIN].map(|len| len as u64));
    drop((fabric, memory));
    fake.assert_clean();
}

#[test]
fn the_least_recently_used_range_is_evicted_and_none_that_is_in_use() {
    needs_fake!();
    let fake = Fake::new(ONE_NIC);
    let (fabric, pool) = (keeping(&fake, 2, 1 << 30), crate::harness::pool(1 << 20));
    let grains = grains(4);
    let memory = own(&grains);
    let of = |grain: usize| register(&fabric, &part(&memory, &pool, grain * GRAIN), &pool);
    let counts = [0, 1, 0, 2, 0, 2, 1].map(|grain| {
        let done = of(grain);
        (done.tensor.is_some(), done.is_known, done.ended)
    });
    let (made, found, evicting) = ((true, false, 0), (true, true, 0), (true, false, 1));
    assert_eq!(counts, [made, made, found, evicting, found, found, evicting]);
    assert_eq!(ended(&fake), 2);

    // Grains 1 and 2 are registered. A range that is in use stays, although it is the older one.
    let in_use = of(2).tensor.expect("found");
    assert!(of(1).is_known);
    assert_eq!(of(0).ended, 1);
    assert!(of(2).is_known && of(0).is_known);
    let other = of(0).tensor.expect("found");
    // Both are in use, so a third is refused each time.
    for _ in 0..3 {
        let refused = of(3);
        assert!(refused.tensor.is_none() && refused.ended == 0);
    }
    drop((in_use, other));
    assert!(of(3).tensor.is_some());
    drop((fabric, memory));
    fake.assert_clean();
}

#[test]
fn a_range_that_is_used_again_and_again_stays() {
    needs_fake!();
    let fake = Fake::new(ONE_NIC);
    let (fabric, pool) = (keeping(&fake, 3, 1 << 30), crate::harness::pool(1 << 20));
    let grains = grains(8);
    let memory = own(&grains);
    let of = |grain: usize| register(&fabric, &part(&memory, &pool, grain * GRAIN), &pool);
    of(0);
    for turn in 0..20 {
        let other = 1 + turn % 7;
        assert!(!of(other).is_known && of(0).is_known, "turn {turn}");
    }
    assert_eq!(made(&fake).len(), 21);
    // Three grains have room, and are found from the second round on.
    let round = || [1, 2, 3].map(|grain| of(grain).is_known);
    round();
    assert_eq!([round(), round()], [[true; 3]; 2]);
    drop((fabric, memory));
    fake.assert_clean();
}

#[test]
fn what_is_registered_together_has_at_most_so_many_bytes() {
    needs_fake!();
    let fake = Fake::new(ONE_NIC);
    let (fabric, pool) = (keeping(&fake, 100, 2 * GRAIN as u64), crate::harness::pool(1 << 20));
    let grains = grains(4);
    let memory = own(&grains);
    let ends =
        [0, 1, 2, 2, 3, 3].map(|grain| register(&fabric, &part(&memory, &pool, grain * GRAIN), &pool).ended);
    assert_eq!(ends, [0, 0, 1, 0, 1, 0]);
    assert_eq!(fabric.registrar().expect("it registers").registered_bytes(), 2 * GRAIN as u64);
    // A range of two grains evicts all others.
    let border = part(&memory, &pool, GRAIN - 10);
    assert_eq!([(); 2].map(|()| register(&fabric, &border, &pool).ended), [2, 0]);
    let large =
        TensorMeta::new(DType::U8, Shape::new(&[2 * GRAIN as u64 + 1]).expect("shape")).expect("meta");
    let large = memory.tensor(&pool, large, 0).expect("inside");
    assert!(register(&fabric, &large, &pool).tensor.is_none(), "it has more by itself");
    drop((fabric, border, large, memory));
    fake.assert_clean();
}

#[test]
fn pages_that_were_replaced_under_a_living_owner_are_registered_anew() {
    needs_fake!();
    let fake = Fake::new(TWO_NICS);
    let (a, b) = two(&fake, 16);
    let grains = grains(3);
    let memory = own(&grains);
    let other = own(&grains);
    let of = |end: &Verbs, memory: &ForeignMemory, grain: usize| {
        register(&end.fabric, &part(memory, &end.pool, grain * GRAIN), &end.pool)
    };
    for (end, memory) in [(&a, &memory), (&a, &other), (&b, &memory)] {
        assert!((0..3).all(|grain| of(end, memory, grain).tensor.is_some()));
        assert!((0..3).all(|grain| of(end, memory, grain).is_known));
    }
    let before = ended(&fake);
    // Any `ForeignMemory` can report replaced pages, and every fabric is told.
    memory.clone().pages_replaced(GRAIN + 4096..GRAIN + 8192);
    assert_eq!(ended(&fake), before + 3);
    for (end, memory) in [(&a, &memory), (&a, &other), (&b, &memory)] {
        assert_eq!([0, 1, 2].map(|grain| of(end, memory, grain).is_known), [true, false, true]);
        assert!(of(end, memory, 1).is_known);
    }
    // A registration that a tensor holds stays with it; no other tensor finds it.
    let in_use = of(&b, &memory, 2).tensor.expect("found");
    let key = |tensor: &Tensor| tensor.registered().map(|of| of.key);
    memory.pages_replaced(0..usize::MAX);
    let anew = of(&b, &memory, 2);
    assert!(!anew.is_known && anew.tensor.as_ref().and_then(key) != key(&in_use));
    drop((anew, in_use, a, b, memory, other));
    fake.assert_clean();
}

#[test]
fn what_was_made_and_has_not_ended_is_what_is_registered_however_many_ask_at_once() {
    needs_fake!();
    const THREADS: usize = 4;
    let fake = Fake::new(ONE_NIC);
    let (fabric, pool) = (keeping(&fake, 1000, 1 << 30), crate::harness::pool(1 << 20));
    let memories: Vec<ForeignMemory> = (0..100).map(|_| own(&grains(1))).collect();
    let (start, counts) = (Barrier::new(THREADS), [AtomicUsize::new(0), AtomicUsize::new(0)]);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                for memory in &memories {
                    let tensor = part(memory, &pool, 0);
                    start.wait();
                    let done = register(&fabric, &tensor, &pool);
                    assert!(done.tensor.is_some());
                    counts[0].fetch_add(usize::from(!done.is_known), Ordering::Relaxed);
                    counts[1].fetch_add(done.ended as usize, Ordering::Relaxed);
                }
            });
        }
    });
    let [counted_made, counted_ended] = counts.map(AtomicUsize::into_inner);
    println!("{counted_made} were made for 100 owners");
    assert_eq!((counted_made, counted_ended), (made(&fake).len(), ended(&fake)));
    assert_eq!(counted_made - counted_ended, 100);
    drop((fabric, memories));
    fake.assert_clean();
}

/// An allocator that unmaps memory and gets the same address again.
#[test]
fn another_owner_at_the_same_address_is_other_memory() {
    needs_fake!();
    let fake = Fake::new(ONE_NIC);
    let (fabric, pool) = (keeping(&fake, 16, 1 << 30), crate::harness::pool(1 << 20));
    let grains = grains(1);
    let first = own(&grains);
    let register = |memory: &ForeignMemory| {
        let done = register(&fabric, &part(memory, &pool, 0), &pool);
        (done.tensor.and_then(|tensor| tensor.registered().map(|of| of.key)), done.is_known, done.ended)
    };
    let (old, is_known, _) = register(&first);
    assert!(!is_known && register(&first) == (old, true, 0));
    // The owner and its mapping are gone. Another owner has mapped other memory at the address.
    drop(first);
    let second = own(&grains);
    let (new, is_known, ended) = register(&second);
    assert!(!is_known && new.is_some() && new != old);
    assert_eq!(ended, 1, "the first one's registration has ended");
    // Two live owners, such as two mappings of one file, have one registration each.
    let third = own(&grains);
    assert!(!register(&third).1 && register(&second).1 && register(&third).1);
    drop((fabric, second, third));
    fake.assert_clean();
}

#[test]
fn a_device_that_lacks_room_is_asked_again_with_as_much_less_as_is_asked_for() {
    needs_fake!();
    // The first registration is the pool's; two grains follow.
    let fake = Fake::new(&format!("{ONE_NIC}\nfault call=reg_mr errno=12 skip=3 times=3"));
    let (fabric, pool) = (keeping(&fake, 16, 1 << 30), crate::harness::pool(1 << 20));
    let grains = grains(4);
    let memory = own(&grains);
    let of = |grain: usize| {
        let done = register(&fabric, &part(&memory, &pool, grain * GRAIN), &pool);
        (done.tensor.is_some(), done.is_known, done.ended)
    };
    let (made, found) = ((true, false, 0), (true, true, 0));
    assert_eq!([of(0), of(1)], [made, made]);
    assert_eq!(of(2), (false, false, 1), "one grain less did not help");
    assert_eq!(of(1), found, "the least recently used one was evicted");
    assert_eq!(of(2), (true, false, 1), "another one less does");
    assert_eq!([of(2), of(0), of(1)], [found, made, made]);
    drop((fabric, memory));
    fake.assert_clean();
}

#[test]
fn what_a_device_can_not_register_ends_nothing() {
    needs_fake!();
    let fake = Fake::new(&format!("{ONE_NIC}\nfault call=reg_mr errno=14 skip=2 times=5"));
    let (fabric, pool) = (keeping(&fake, 16, 1 << 30), crate::harness::pool(1 << 20));
    let grains = grains(2);
    let memory = own(&grains);
    let of = |grain: usize| register(&fabric, &part(&memory, &pool, grain * GRAIN), &pool);
    assert!(of(0).tensor.is_some());
    for _ in 0..5 {
        let refused = of(1);
        assert!(refused.tensor.is_none() && refused.ended == 0 && of(0).is_known);
    }
    assert!(of(1).tensor.is_some() && of(0).is_known);
    drop((fabric, memory));
    fake.assert_clean();
}

#[test]
fn nothing_is_registered_where_a_fork_takes_pages_from_under_the_device() {
    needs_fake!();
    for fake in [
        Fake::new(&format!("{ONE_NIC}\nfault call=is_fork_initialized errno=0")),
        Fake::new(&format!("{ONE_NIC}\nfault call=is_fork_initialized errno=1")),
    ] {
        let (fabric, pool) = (keeping(&fake, 16, 1 << 30), crate::harness::pool(1 << 20));
        let memory = ForeignMemory::from_owner(vec![0; 20_000]);
        let done = register(&fabric, &part(&memory, &pool, 0), &pool);
        assert!(done.tensor.is_none() && made(&fake).is_empty());
    }
}

#[test]
fn with_no_room_for_any_nothing_registers() {
    needs_fake!();
    let fake = Fake::new(ONE_NIC);
    assert!(keeping(&fake, 0, 1 << 30).registrar().is_none());
    assert!(keeping(&fake, 16, 0).registrar().is_none());
}

#[test]
fn a_port_refuses_memory_that_its_fabric_has_not_registered() {
    needs_fake!();
    let fake = Fake::new(TWO_NICS);
    let (mut a, b) = two(&fake, 16);
    let memory = ForeignMemory::from_owner(vec![1; 20_000]);
    let tensor = part(&memory, &a.pool, 0);
    let others = register(&b.fabric, &tensor, &b.pool).tensor.expect("registered");
    let grant = tensorwire::internals::wire::Grant { region: 0, key: 0, offset: 0, len: TENSOR };
    for tensor in [&tensor, &others] {
        let refused = a.port.write(a.link, tensor, TENSOR, &grant, None);
        assert!(matches!(refused, Err(PostError::Refused(_))), "{refused:?}");
        assert!(matches!(a.port.expose(a.link, tensor), Err(PostError::Refused(_))));
    }
    drop((a, b, others));
    fake.assert_clean();
}

#[test]
fn what_is_outstanding_keeps_its_registration() {
    needs_fake!();
    let fake = Fake::new(TWO_NICS);
    let options = |device| VerbsOptions { registrations: 1, min_rnr_timer: 28, ..on(device) };
    let (mut a, mut b) = ends(&fake, [options("fake_0"), options("fake_1")], &link(16));
    let grains = grains(2);
    let memory = own(&grains);
    let grant = b.port.grant(b.link, tensor_mut(&b.pool, TENSOR as usize)).expect("room");
    let registered = register(&a.fabric, &part(&memory, &a.pool, 0), &a.pool).tensor.expect("registered");
    a.port.write(a.link, &registered, TENSOR, &grant, None).expect("room");
    drop(registered);
    // The write is outstanding until its completion is polled, even if the sender's handle is gone.
    let refused = register(&a.fabric, &part(&memory, &a.pool, GRAIN), &a.pool);
    assert!(refused.tensor.is_none() && refused.ended == 0);
    expect!(a.next(&mut b), Got::Done => ());
    let now = register(&a.fabric, &part(&memory, &a.pool, GRAIN), &a.pool);
    assert!(now.tensor.is_some() && now.ended == 1);
    drop((now, a, b, memory));
    fake.assert_clean();
}

#[test]
fn many_threads_register_and_let_go_at_once() {
    needs_fake!();
    let fake = Fake::new(ONE_NIC);
    let (fabric, pool) = (keeping(&fake, 3, 1 << 30), crate::harness::pool(1 << 20));
    let grains = grains(6);
    let memory = own(&grains);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (fabric, memory, pool) = (&fabric, &memory, &pool);
            scope.spawn(move || {
                for turn in 0..500 {
                    let grain = (turn * 7 + thread * turn / 3) % 6;
                    let tensor = part(memory, pool, grain * GRAIN);
                    if let Some(registered) = register(fabric, &tensor, pool).tensor {
                        assert_eq!(registered.as_ptr(), tensor.as_ptr());
                    }
                }
            });
        }
    });
    fake.assert_no_misuse();
    let kept = made(&fake).len() - ended(&fake);
    assert!((1..=3).contains(&kept), "{kept} are kept");
    drop((fabric, memory));
    fake.assert_clean();
}
