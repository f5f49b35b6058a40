//! Tests of the magazines of two threads, without a pool.

/// Tensors in magazines without a pool.
mod testing {
    use super::super::*;
    use crate::memory::pool::central::Central;
    #[cfg(tensorwire_loom)]
    use loom::sync::Mutex;
    #[cfg(not(tensorwire_loom))]
    use std::sync::Mutex;

    const UNITS: u32 = 4;

    /// Magazines with the lock of a pool.
    pub(super) struct Scene {
        magazines: Magazines,
        pausing: Mutex<()>,
    }

    impl std::ops::Deref for Scene {
        type Target = Magazines;

        fn deref(&self) -> &Magazines {
            &self.magazines
        }
    }

    pub(super) fn class() -> SizeClass {
        SizeClass::holding(1)
    }

    pub(super) fn list(magazines: &Magazines) -> Option<MagazineList> {
        magazines.list(Purpose::Source, class())
    }

    /// Magazines of two threads, where the thread with index 0 has made so many tensors of one
    /// unit.
    pub(super) fn magazines_and_tensors<const N: usize>(capacity: u64) -> (Scene, [Box<TensorHeader>; N]) {
        let has_membarrier = crate::sync::register_membarrier();
        let magazines = Magazines::with_threads(2, UNITS, capacity, has_membarrier);
        let scene = Scene { magazines, pausing: Mutex::new(()) };
        let mut central = Central::new(UNITS, 16);
        let mut made = enter(&scene, 0);
        let tensors = [(); N].map(|()| {
            made.count_made();
            let mut header = TensorHeader::empty();
            header.storage = Storage::Block(central.allocate_class(class()).expect("room"));
            header.list = list(&scene);
            header.magazine = 0;
            header
        });
        drop(made);
        (scene, tensors)
    }

    /// As the thread with this index.
    pub(super) fn enter(scene: &Scene, index: usize) -> Entered<'_> {
        loop {
            match scene.enter_at(index) {
                Ok(entered) => return entered,
                Err(NotEntered::Paused) => drop(scene.pausing.lock()),
                Err(NotEntered::NoMagazine) => panic!("the magazines are closed"),
            }
        }
    }

    /// Drops a tensor as the thread with this index. Returns whether it was the last of a closed
    /// pool.
    pub(super) fn drop_tensor(magazines: &Scene, index: usize, tensor: Box<TensorHeader>) -> bool {
        match magazines.enter_at(index) {
            Ok(mut entered) => {
                entered.put(tensor).expect("the budget holds it");
                false
            }
            Err(NotEntered::NoMagazine) => magazines.count_dropped(),
            Err(NotEntered::Paused) => unreachable!("nothing is collected"),
        }
    }

    /// Number of blocks in all magazines, which are taken out.
    pub(super) fn collect(scene: &Scene) -> usize {
        let mut collected = Collected::default();
        {
            let _pausing = scene.pausing.lock();
            scene.pause().expect("open").collect(&mut collected);
        }
        let mut blocks = 0;
        collected.drain(|header| blocks += usize::from(header.list.is_some()));
        blocks
    }
}

#[cfg(not(tensorwire_loom))]
mod one_thread {
    use super::super::*;
    use super::testing::{Scene, class, collect, drop_tensor, enter, list, magazines_and_tensors};

    fn place(header: &TensorHeader) -> u32 {
        let Storage::Block(block) = &header.storage else { panic!("no block") };
        block.offset()
    }

    fn take(magazines: &Scene, index: usize) -> Option<Box<TensorHeader>> {
        enter(magazines, index).take(Purpose::Source, class())
    }

    #[test]
    fn an_owner_gets_what_it_dropped_last_and_then_what_others_did() {
        let (magazines, tensors) = magazines_and_tensors::<4>(64);
        let places: Vec<u32> = tensors.iter().map(|tensor| place(tensor)).collect();
        for (tensor, dropper) in tensors.into_iter().zip([0, 1, 0, 1]) {
            drop_tensor(&magazines, dropper, tensor);
        }
        assert_eq!((magazines.cached(), magazines.live()), (4, 0));
        assert!(take(&magazines, 1).is_none(), "they are the other thread's");
        let taken: Vec<_> = std::iter::from_fn(|| take(&magazines, 0)).collect();
        let order: Vec<u32> = taken.iter().map(|tensor| place(tensor)).collect();
        assert_eq!(order, [2, 0, 3, 1].map(|at| places[at]));
        assert_eq!((magazines.cached(), magazines.live()), (0, 4));
    }

    #[test]
    fn the_next_thread_at_an_index_takes_over_the_magazine() {
        let (magazines, [mine, remote]) = magazines_and_tensors(64);
        std::thread::scope(|scope| {
            scope.spawn(|| drop_tensor(&magazines, 0, mine));
        });
        drop_tensor(&magazines, 1, remote);
        std::thread::scope(|scope| {
            let next = scope.spawn(|| (take(&magazines, 0).is_some(), take(&magazines, 0).is_some()));
            assert_eq!(next.join().expect("no panic"), (true, true));
        });
        assert_eq!(magazines.live(), 2);
    }

    #[test]
    fn the_budget_moves_from_the_thread_that_makes_to_the_thread_that_drops() {
        let (magazines, [mut tensor, other]) = magazines_and_tensors(10);
        drop_tensor(&magazines, 0, other);
        for round in 0..1000 {
            drop_tensor(&magazines, 1, tensor);
            assert_eq!(magazines.cached(), 2, "round {round}");
            tensor = take(&magazines, 0).expect("two are cached");
        }
        drop_tensor(&magazines, 0, tensor);
        assert_eq!(collect(&magazines), 2);
    }

    #[test]
    fn a_full_budget_refuses_a_block_until_there_is_room() {
        let (magazines, [one, two, three]) = magazines_and_tensors(2);
        drop_tensor(&magazines, 0, one);
        drop_tensor(&magazines, 1, two);
        let refused = enter(&magazines, 1).put(three).expect_err("full");
        assert_eq!(magazines.live(), 1, "it was not dropped");
        assert_eq!(collect(&magazines), 2);
        drop_tensor(&magazines, 1, refused);
        assert_eq!((magazines.cached(), magazines.live()), (1, 0));
    }

    #[test]
    fn budget_that_an_owner_does_not_use_is_given_to_others_before_blocks_are_taken_out() {
        let (magazines, [one, two]) = magazines_and_tensors(1);
        drop_tensor(&magazines, 1, one);
        let one = take(&magazines, 0).expect("it was dropped");
        // The other thread has all of the budget, and the owner has too little to give back.
        let refused = enter(&magazines, 1).put(two).expect_err("full");
        let mut collected = Collected::default();
        let list = list(&magazines).expect("blocks of one unit are cached");
        magazines.pause().expect("open").make_room(list, &mut collected);
        collected.drain(|_| panic!("there was room"));
        drop_tensor(&magazines, 1, refused);
        assert!(enter(&magazines, 0).put(one).is_err(), "full again");
    }
}

#[cfg(tensorwire_loom)]
mod loom_tests {
    use super::super::*;
    use super::testing::{class, collect, drop_tensor, enter, magazines_and_tensors};
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    fn model(preemptions: usize, body: impl Fn() + Send + Sync + 'static) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(preemptions);
        model.max_branches = 20_000;
        model.check(body);
    }

    /// The owner drops a tensor and makes another one, while a second thread collects.
    #[test]
    fn loom_each_block_is_made_a_tensor_or_collected_once() {
        model(3, || {
            let (magazines, [tensor]) = magazines_and_tensors(8);
            let magazines = Arc::new(magazines);
            let owner = Arc::clone(&magazines);
            let owner = thread::spawn(move || {
                enter(&owner, 0).put(tensor).expect("the budget holds it");
                enter(&owner, 0).take(Purpose::Source, class()).is_some()
            });
            let collected = collect(&magazines);
            let taken = usize::from(owner.join().expect("no panic"));
            assert_eq!(magazines.live(), taken as i64);
            assert_eq!(magazines.cached() as usize, 1 - taken - collected);
            assert_eq!(taken + collected + collect(&magazines), 1);
        });
    }

    /// A thread drops the owner's tensors, while the owner makes one and a third thread collects.
    #[test]
    fn loom_each_block_that_another_thread_drops_is_made_a_tensor_or_collected_once() {
        for (preemptions, collects) in [(3, false), (1, true)] {
            model(preemptions, move || {
                let (magazines, [tensor]) = magazines_and_tensors(8);
                let magazines = Arc::new(magazines);
                let (owner, other) = (Arc::clone(&magazines), Arc::clone(&magazines));
                let other = thread::spawn(move || {
                    enter(&other, 1).put(tensor).expect("the budget holds it");
                });
                let collector = collects.then(|| {
                    let magazines = Arc::clone(&magazines);
                    thread::spawn(move || collect(&magazines))
                });
                let taken = enter(&owner, 0).take(Purpose::Source, class());
                let taken = usize::from(taken.is_some());
                other.join().expect("no panic");
                let collected = collector.map_or(0, |collector| collector.join().expect("no panic"));
                assert_eq!(magazines.live(), taken as i64);
                assert_eq!(magazines.cached() as usize, 1 - taken - collected);
                assert_eq!(taken + collected + collect(&magazines), 1);
            });
        }
    }

    /// A thread makes its magazine while another collects from all of them: the collector finds a
    /// whole magazine or none.
    #[test]
    fn loom_a_new_magazine_is_collected_from_whole_or_not_at_all() {
        model(3, || {
            let (magazines, [tensor]) = magazines_and_tensors(8);
            let magazines = Arc::new(magazines);
            let newcomer = Arc::clone(&magazines);
            let newcomer = thread::spawn(move || {
                enter(&newcomer, 1).put_bare(TensorHeader::empty());
            });
            let _ = magazines.cached();
            let collected = collect(&magazines);
            newcomer.join().expect("no panic");
            assert_eq!((collected, magazines.live()), (0, 1));
            drop_tensor(&magazines, 1, tensor);
            assert_eq!(collect(&magazines), 1, "the new magazine is known");
        });
    }

    /// A thread makes its magazine and a tensor there. Another drops the tensor, and a third
    /// counts. A drop is not counted without its tensor.
    #[test]
    fn loom_a_tensor_of_a_new_magazine_is_counted_before_its_drop() {
        model(2, || {
            let (magazines, [mut tensor]) = magazines_and_tensors(8);
            let magazines = Arc::new(magazines);
            let (maker, counter) = (Arc::clone(&magazines), Arc::clone(&magazines));
            let counter = thread::spawn(move || counter.live());
            let maker = thread::spawn(move || enter(&maker, 1).count_made());
            maker.join().expect("no panic");
            tensor.magazine = 1;
            drop_tensor(&magazines, 0, tensor);
            let live = counter.join().expect("no panic");
            assert!((0..=2).contains(&live), "{live} tensors are counted");
        });
    }

    /// The thread that ends the pool writes a cell that the others have read before their drops.
    #[test]
    fn loom_one_thread_ends_a_closed_pool_after_all_others_are_done() {
        model(2, || {
            let (magazines, [first, second]) = magazines_and_tensors(8);
            let pool = Arc::new((magazines, UnsafeCell::new(0u32)));
            // SAFETY: the pool has not ended; loom checks that no thread writes.
            let read = |cell: &UnsafeCell<u32>| cell.with(|value| assert_eq!(unsafe { *value }, 0));
            let end = |cell: &UnsafeCell<u32>, ends: bool| {
                if ends {
                    // SAFETY: the pool has ended; loom checks that no thread reads.
                    cell.with_mut(|value| unsafe { *value = 1 });
                }
                usize::from(ends)
            };
            let droppers = [(0, first), (1, second)].map(|(index, tensor)| {
                let pool = Arc::clone(&pool);
                thread::spawn(move || {
                    read(&pool.1);
                    end(&pool.1, drop_tensor(&pool.0, index, tensor))
                })
            });
            let live = pool.0.close().expect("loom's barrier works");
            read(&pool.1);
            let mut ends = end(&pool.1, pool.0.end(live));
            for dropper in droppers {
                ends += dropper.join().expect("no panic");
            }
            assert_eq!(ends, 1);
        });
    }
}
