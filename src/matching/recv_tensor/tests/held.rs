//! Values that no receive could take: held within a bound, else given back to their sender.

use super::*;

/// Bytes of the pool of a [`World`].
const POOL: u64 = 1 << 20;
const MOST: u64 = POOL / inbound::HELD_PART;

fn meta(len: u64) -> TensorMeta {
    TensorMeta::new(DType::U8, Shape::new(&[len]).unwrap()).unwrap()
}

fn key_of(step: u64, name: &str) -> TensorKey {
    TensorKey { step, ..key(name) }
}

/// The tensors that leave no block of the pool free.
fn fill(pool: &Pool) -> Vec<crate::memory::TensorMut> {
    let mut all = Vec::new();
    let mut len = POOL;
    while len >= 64 {
        match pool.tensor(meta(len)) {
            Ok(tensor) => all.push(tensor),
            Err(_) => len /= 2,
        }
    }
    all
}

impl World {
    fn held_bytes(&self) -> u64 {
        self.receiver.edges(usize::MAX).edges.iter().map(|edge| edge.tensor_bytes).sum()
    }

    fn send_large(&mut self, key: &TensorKey, value: u8, len: u64) {
        let mut tensor = self.pool.tensor(meta(len)).unwrap();
        tensor.bytes_mut().fill(value);
        self.outstanding.fetch_add(1, Ordering::Relaxed);
        self.sender.send(RECEIVER, key, Value::Tensor(tensor.freeze()), Time::from_nanos(0));
    }

    /// Answers the requests that were made with tensors of `len` bytes, which nobody has sent.
    /// Returns the numbers of the requests.
    fn lie(&mut self, len: usize) -> Vec<u64> {
        let placement = crate::wire::message::Placement::HEAP;
        let head = AnswerHead::Tensor { meta: meta(len as u64), placement, checksum: None }.encode();
        let bytes = Bytes::from(vec![7; len]);
        let said = std::mem::take(&mut *self.channel.0.lock().unwrap());
        let asked = said.into_iter().filter_map(|said| match said {
            Said::Ask(request, _) => Some(request.id),
            _ => None,
        });
        let asked: Vec<_> = asked.collect();
        for id in &asked {
            self.receiver.answered((SENDER, *id), Ok((head.clone(), vec![bytes.clone()])));
        }
        self.tell();
        asked
    }

    /// The requests that were given up, of which the peer has not heard.
    fn given_up(&self) -> Vec<u64> {
        let said = self.channel.0.lock().unwrap();
        let given_up = said.iter().filter_map(|said| match said {
            Said::Finish(id, true) => Some(*id),
            _ => None,
        });
        given_up.collect()
    }
}

#[test]
fn values_that_no_receive_can_take_have_bounded_bytes_and_the_others_go_back() {
    const KEYS: usize = 100;
    const LEN: usize = 100 << 10;
    const KEPT: usize = MOST as usize / LEN;
    let mut world = World::new();
    let full = fill(&world.pool);
    for step in STEP..STEP + 3 {
        let of_key = |n| key_of(step, &format!("x{n}"));
        let mut results: Vec<_> = (0..KEYS).map(|n| world.receive(&of_key(n)).1).collect();
        let asked = world.lie(LEN);
        assert_eq!(asked.len(), KEYS);
        for result in &mut results {
            assert!(matches!(value(result), Some(Err(Error::NoRoom { .. }))));
        }
        assert_eq!(world.held_bytes(), (KEPT * LEN) as u64, "of {} bytes", KEYS * LEN);
        assert_eq!(world.given_up(), asked[KEPT..], "the sender has the others again");
        // A receive that can't take its held value either changes nothing.
        let (_, mut again) = world.receive(&of_key(0));
        assert!(matches!(value(&mut again), Some(Err(Error::NoRoom { .. }))));
        assert_eq!(world.held_bytes(), (KEPT * LEN) as u64);
        world.deliver_all();
        world.receiver.step_changed(StepChange::CleanedUp { step });
        assert_eq!(world.held_bytes(), 0, "the bound is free for the next step");
        world.channel.0.lock().unwrap().clear();
    }
    drop(full);
}

#[test]
fn a_value_that_went_back_to_its_sender_is_received_in_its_order() {
    const LEN: u64 = MOST / 2 + 1;
    let mut world = World::new();
    let keys = ["a", "b", "c"].map(key);
    for (key, value) in keys.iter().zip([1, 2, 3]) {
        world.send_large(key, value, LEN);
    }
    [10, 11].into_iter().for_each(|value| world.send(&keys[2], value));
    let full = fill(&world.pool);
    for key in &keys {
        let (_, mut result) = world.receive(key);
        world.deliver_all();
        assert!(matches!(value(&mut result), Some(Err(Error::NoRoom { .. }))));
    }
    assert_eq!(world.held_bytes(), LEN, "a second one is beyond the bound");
    assert_eq!(world.sender.untaken(None).0.waiting(), 4);
    drop(full);
    // A try finds what went back, too.
    for (key, wants) in [(0, 1), (1, 2), (2, 3), (2, 10), (2, 11)] {
        let (_, mut result) = world.attempt(&keys[key]);
        world.deliver_all();
        assert_eq!(value(&mut result).expect("done").expect("received"), wants);
    }
    assert_eq!((world.held_bytes(), world.outstanding.load(Ordering::Relaxed)), (0, 0));
    assert!(world.sender.untaken(None).0.is_empty());
}

#[test]
fn a_large_value_for_a_tensor_of_another_shape_leaves_the_pool_to_others() {
    const LEN: u64 = POOL / 2;
    let mut world = World::new();
    let other = world.pool.zeroed(meta(1)).unwrap();
    let (_, mut result) = world.receive_to(&key("x"), Duration::from_secs(1), Destination::Into(other));
    world.lie(LEN as usize);
    assert!(matches!(value(&mut result), Some(Err(Error::ShapeMismatch { .. }))));
    assert_eq!((world.held_bytes(), world.pool.stats().live_tensors), (0, 0));
    world.pool.zeroed(meta(LEN)).expect("the pool is free");
}

#[test]
fn a_value_that_came_for_nobody_stays_when_its_link_ends_and_counts_until_the_next_life() {
    let mut world = World::new();
    let late = |world: &mut World, name: &str, len: usize| {
        let (id, _result) = world.receive(&key(name));
        world.cancel(id);
        world.lie(len);
        world.held_bytes()
    };
    assert_eq!(late(&mut world, "a", MOST as usize), MOST);
    assert_eq!(late(&mut world, "b", 1), MOST, "it went back");
    let cause = LossCause::Closed("x".into());
    let error = Error::PeerLost { peer: task(SENDER), incarnation: life(SENDER), cause };
    world.receiver.lost(SENDER, &error);
    world.receiver.up(SENDER, linked(SENDER, 2));
    assert_eq!(late(&mut world, "b", 1), MOST, "what is held counts on the next link");
    let (_, mut result) = world.receive(&key("a"));
    assert_eq!(value(&mut result).expect("done").expect("received"), 7, "it had come");
    assert_eq!(late(&mut world, "c", MOST as usize), MOST);
    world.receiver.lost(SENDER, &error);
    let tag = LinkTag { incarnation: Incarnation::new(99).unwrap(), generation: 3.into() };
    world.receiver.up(SENDER, CallLink { tag, generation: 3 });
    assert_eq!(world.held_bytes(), 0);
    assert_eq!(late(&mut world, "d", MOST as usize), MOST, "the bound is free again");
}
