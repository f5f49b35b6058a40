//! Cases of foreign memory, each with the settings that choose a fabric.
#![allow(unsafe_code)] // an allocator that maps and unmaps memory

use crate::common::{SOON, over_grpc, over_verbs, run, until, values};
use std::cell::UnsafeCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tensorwire::internals::wire::message::Allocator;
use tensorwire::{
    Counter, DType, Edge, Error, ForeignMemory, Gauge, Node, Shape, Snapshot, Tensor, TensorMeta, TensorMut,
};

const BASE: u64 = 1 << 40;
/// Enough bytes to be registered on a fabric that registers.
const LARGE: u64 = 20_000;

type Settings = [(&'static str, &'static str)];

/// Whether these settings register foreign memory.
fn registers(settings: &Settings) -> bool {
    over_verbs() || settings.contains(&("fabric", "verbs"))
}

fn floats(n: u64) -> TensorMeta {
    TensorMeta::new(DType::F32, Shape::new(&[n]).expect("shape")).expect("meta")
}

fn there(node: &Node) -> Edge {
    node.edge_to("w", 1, "x").expect("edge")
}

fn here(node: &Node) -> Edge {
    node.edge_from("w", 0, "x").expect("edge")
}

fn counted<const N: usize>(node: &Node, before: &Snapshot, which: [Counter; N]) -> [u64; N] {
    let since = node.counters().since(before);
    which.map(|counter| since.get(counter))
}

const HOW: [Counter; 4] =
    [Counter::TensorsStaged, Counter::BytesStaged, Counter::RegistrationsMade, Counter::RegistrationsFound];

/// Reserved addresses, at which nothing else is mapped.
fn reserved(len: usize) -> *mut u8 {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: new memory, where the system has room.
    let base = unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_NONE, flags, -1, 0) };
    assert_ne!(base, libc::MAP_FAILED);
    base.cast()
}

/// Memory of another allocator, at reserved addresses. It counts owners that have ended.
struct Mapping {
    base: *mut u8,
    len: usize,
    gone: Arc<AtomicUsize>,
}

// SAFETY: plain memory, which belongs to no thread.
unsafe impl Send for Mapping {}
// SAFETY: as above; shared, it is only read.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(base: *mut u8, len: usize, value: f32, gone: &Arc<AtomicUsize>) -> Mapping {
        let mapping = Mapping { base, len, gone: gone.clone() };
        mapping.map(libc::PROT_READ | libc::PROT_WRITE);
        // SAFETY: `len` bytes at a page, which nobody else has yet.
        unsafe { std::slice::from_raw_parts_mut(base.cast::<f32>(), len / 4) }.fill(value);
        mapping
    }

    /// Replaces its pages by new ones.
    fn map(&self, protection: i32) {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        // SAFETY: addresses that were reserved for this, and that nobody uses at the time.
        let mapped = unsafe { libc::mmap(self.base.cast(), self.len, protection, flags, -1, 0) };
        assert_eq!(mapped, self.base.cast());
    }
}

impl AsRef<[u8]> for Mapping {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: mapped as long as this lives, and not written any more.
        unsafe { std::slice::from_raw_parts(self.base, self.len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let thread = std::thread::current();
        // A polling thread has a name that says so.
        assert!(!thread.name().is_some_and(|name| name.starts_with("tw-poll")), "unmapped on {thread:?}");
        self.map(libc::PROT_NONE);
        self.gone.fetch_add(1, Ordering::SeqCst);
    }
}

/// A buffer that is written through its tensors.
struct Buffer(Box<[UnsafeCell<u64>]>);

// SAFETY: written through one tensor at a time.
unsafe impl Sync for Buffer {}

impl Buffer {
    fn new(bytes: u64) -> Arc<Buffer> {
        Arc::new(Buffer((0..bytes.div_ceil(8)).map(|_| UnsafeCell::new(0)).collect()))
    }

    /// The first floats, to be received into. Each case has one such tensor of a buffer at a time.
    fn target(self: &Arc<Buffer>, node: &Node, meta: TensorMeta) -> TensorMut {
        let base = UnsafeCell::raw_get(self.0.as_ptr()).cast();
        // SAFETY: the buffer is the owner, and its cells may be written.
        let memory = unsafe { ForeignMemory::new_writable(self.clone(), base, self.0.len() * 8) };
        // SAFETY: see above.
        unsafe { memory.tensor_mut(node.pool(), meta, 0) }.expect("inside")
    }
}

/// Foreign memory with `n` floats that count up from `first`.
fn counting(first: f32, n: u64) -> ForeignMemory {
    struct Floats(Vec<u64>);
    impl AsRef<[u8]> for Floats {
        fn as_ref(&self) -> &[u8] {
            // SAFETY: any eight bytes are a number, and any number eight bytes.
            unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len() * 8) }
        }
    }
    let two = |at: u64| {
        let value = |at: u64| u64::from((first + at as f32).to_bits());
        value(2 * at) | value(2 * at + 1) << 32
    };
    ForeignMemory::from_owner(Floats((0..n.div_ceil(2)).map(two).collect()))
}

fn tensor(node: &Node, memory: &ForeignMemory, n: u64, offset: u64) -> Tensor {
    memory.tensor(node.pool(), floats(n), offset).expect("inside")
}

pub fn travel(settings: &'static Settings) {
    run(2, settings, move |node, task| {
        let memory = counting(0.0, 2 * LARGE);
        // The same memory twice, other offsets of it, and too few bytes for a registration.
        let cases = [(LARGE, 0), (LARGE, 0), (LARGE, 4 * LARGE), (1000, 40), (100, 12), (0, 0)];
        let before = node.counters();
        for (id, (n, offset)) in cases.into_iter().enumerate() {
            let step = node.step(id as u64).expect("new");
            if task == 0 {
                step.send(&there(node), tensor(node, &memory, n, offset)).expect("sent");
                continue;
            }
            let got = step.recv(&here(node), SOON).expect("received");
            let staged = n > 0 && (n * 4 < 4096 || !registers(settings));
            assert_eq!(got.sender.allocator, if staged { Allocator::Pool } else { Allocator::Heap });
            let first = offset as f32 / 4.0;
            assert!(values(&got.tensor).iter().zip(0..n).all(|(value, at)| *value == first + at as f32));
            assert_eq!(got.tensor.meta().bytes(), n * 4);
        }
        if task == 0 {
            let [staged, bytes, made, found] = counted(node, &before, HOW);
            match registers(settings) {
                // The offset within a grain decides how many registrations the memory needs.
                true => assert_eq!((staged, bytes, made + found, made < 3), (2, 4400, 3, true)),
                false => assert_eq!((staged, bytes, made, found), (5, 3 * 80_000 + 4400, 0, 0)),
            }
        }
    });
}

pub fn mapped_anew(settings: &'static Settings) {
    run(2, settings, move |node, task| {
        const TURNS: usize = 12;
        let before = node.counters();
        let gone = Arc::new(AtomicUsize::new(0));
        let address = reserved(4 * LARGE as usize);
        for turn in 0..TURNS {
            let step = node.step(turn as u64).expect("new");
            if task == 1 {
                let got = step.recv(&here(node), SOON).expect("received").tensor;
                assert!(values(&got).iter().all(|value| *value == turn as f32), "turn {turn}");
                step.send(&node.edge_to("w", 0, "seen").expect("edge"), got).expect("sent");
                continue;
            }
            let mapping = Mapping::new(address, 4 * LARGE as usize, turn as f32, &gone);
            let memory = ForeignMemory::from_owner(mapping);
            step.send(&there(node), tensor(node, &memory, LARGE, 0)).expect("sent");
            drop(memory);
            step.recv(&node.edge_from("w", 1, "seen").expect("edge"), SOON).expect("received");
            // The sent tensors are dropped, and then the memory is unmapped.
            until(node, "the end of the mapping", || gone.load(Ordering::SeqCst) == turn + 1);
        }
        if task == 0 {
            let [staged, _, made, found] = counted(node, &before, HOW);
            let turns = TURNS as u64;
            let expected = if registers(settings) { [0, turns, 0] } else { [turns, 0, 0] };
            assert_eq!([staged, made, found], expected, "none was found that was another owner's");
            let all = if registers(settings) { turns } else { 0 };
            let ended = || node.counters().since(&before).get(Counter::RegistrationsEnded);
            until(node, "each registration's end with its owner", || ended() == all);
            assert_eq!(node.counters().gauge(Gauge::RegisteredBytes), 0);
        }
    });
}

pub fn arena(settings: &'static Settings) {
    run(2, settings, move |node, task| {
        const TURNS: u64 = 20;
        let before = node.counters();
        // The buffer is filled again for each step, after the last step's tensor was dropped.
        let arena = Buffer::new(4 * LARGE);
        for turn in 0..TURNS {
            let step = node.step(turn).expect("new");
            if task == 1 {
                let got = step.recv(&here(node), SOON).expect("received").tensor;
                assert!(values(&got).iter().all(|value| *value == turn as f32), "turn {turn}");
                continue;
            }
            let mut filled = arena.target(node, floats(LARGE));
            filled.as_mut_slice::<f32>().expect("floats").fill(turn as f32);
            step.send(&there(node), filled.freeze()).expect("sent");
            until(node, "the tensor to be let go of", || Arc::strong_count(&arena) == 1);
        }
        if task == 0 {
            let [staged, _, made, found] = counted(node, &before, HOW);
            match registers(settings) {
                true => assert_eq!((staged, made, found), (0, 1, TURNS - 1)),
                false => assert_eq!((staged, made, found), (TURNS, 0, 0)),
            }
        }
    });
}

pub fn received(settings: &'static Settings) {
    run(2, settings, move |node, task| {
        let before = node.counters();
        let sizes = [LARGE, LARGE, 10, 10, 0, LARGE];
        let buffer = Buffer::new(4 * LARGE);
        for (id, n) in sizes.into_iter().enumerate() {
            let step = node.step(id as u64).expect("new");
            if task == 0 {
                let tensor = crate::common::counting(node, id as f32, n as usize);
                step.send(&there(node), tensor).expect("sent");
                continue;
            }
            // A small value lands before its receive begins. A receive that takes a small value out
            // of its message itself copies it straight to the target, and stages nothing.
            if n < LARGE && !over_grpc() {
                let held = || node.edges(1).expect("usable").edges.iter().any(|edge| edge.held > 0);
                until(node, "the small value", held);
            }
            let target = buffer.target(node, floats(n));
            let at = target.as_ptr();
            let got = step
                .receive(&here(node))
                .into(target)
                .begin()
                .expect("begun")
                .wait()
                .expect("received")
                .tensor;
            assert!(got.is_foreign() && got.as_ptr() == at, "step {id}");
            let got = got.freeze();
            assert!(values(&got).iter().zip(0..n).all(|(value, at)| *value == id as f32 + at as f32));
        }
        if task == 0 {
            return;
        }
        // Small values land in the pool. A device writes the others there, too, and so do calls.
        // Else they are copied from their sender's memory.
        let staged = if registers(settings) || over_grpc() { (6, 80 + 3 * 80_000) } else { (3, 80) };
        let [tensors, bytes, ..] = counted(node, &before, HOW);
        assert_eq!((tensors, bytes), staged);
        until(node, "what is granted comes back", || Arc::strong_count(&buffer) == 1);
    });
    shape_mismatch_and_dead(settings);
}

/// A value that does not fit goes to the next receive. A dead value returns the given tensor.
fn shape_mismatch_and_dead(settings: &'static Settings) {
    run(2, settings, move |node, task| {
        let step = node.step(1).expect("new");
        if task == 0 {
            step.send(&there(node), crate::common::counting(node, 3.0, LARGE as usize)).expect("sent");
            let dead = node.step(2).expect("new");
            return dead.send_dead(&there(node)).expect("sent");
        }
        let buffer = Buffer::new(4 * LARGE);
        let small = buffer.target(node, floats(LARGE - 1));
        let mismatch = step.receive(&here(node)).into(small).begin().expect("begun").wait();
        assert!(matches!(&mismatch, Err(Error::ShapeMismatch { .. })), "{mismatch:?}");
        until(node, "the rejected value is let go of", || Arc::strong_count(&buffer) == 1);
        assert_eq!(values(&step.recv(&here(node), SOON).expect("received").tensor)[0], 3.0);
        let dead = node.step(2).expect("new");
        let target = buffer.target(node, floats(5));
        let got = dead.receive(&here(node)).into(target).begin().expect("begun").wait().expect("received");
        assert!(got.is_dead && got.tensor.is_foreign());
    });
}

pub fn given_up(settings: &'static Settings) {
    run(2, settings, move |node, task| {
        if task == 0 {
            return;
        }
        let step = node.step(1).expect("new");
        let buffer = Buffer::new(4 * LARGE);
        let pending =
            step.receive(&here(node)).into(buffer.target(node, floats(LARGE))).begin().expect("begun");
        assert!(Arc::strong_count(&buffer) > 1);
        drop(pending);
        until(node, "the tensor is let go of", || Arc::strong_count(&buffer) == 1);
        let error = step.recv(&here(node), Duration::from_millis(20)).expect_err("nothing was sent");
        assert!(matches!(error, Error::DeadlineExceeded { .. }), "{error}");
    });
}

pub fn standing(settings: &'static Settings) {
    run(2, settings, move |node, task| {
        let sequence = node.sequence(BASE);
        let _standing = (task == 1).then(|| node.standing(&here(node), sequence, 4).expect("new"));
        let buffer = Buffer::new(4 * LARGE);
        for n in 0..30 {
            let step = node.step(sequence.step(n)).expect("usable");
            if task == 0 {
                let memory = counting(n as f32, LARGE);
                step.send(&there(node), tensor(node, &memory, LARGE, 0)).expect("sent");
                continue;
            }
            let target = buffer.target(node, floats(LARGE));
            let got = step
                .receive(&here(node))
                .into(target)
                .begin()
                .expect("begun")
                .wait()
                .expect("received")
                .tensor;
            assert_eq!(got.as_slice::<f32>().expect("floats")[LARGE as usize - 1], (n + LARGE - 1) as f32);
            node.cleanup(step.id());
        }
        if task == 1 {
            // A device writes only into the pool, and so do calls.
            let staged = node.counters().get(Counter::TensorsStaged);
            assert_eq!(staged, if registers(settings) || over_grpc() { 30 } else { 0 });
        }
    });
}

pub fn to_itself(settings: &'static Settings) {
    run(1, settings, move |node, _| {
        let step = node.step(1).expect("new");
        let edge = node.edge_to("w", 0, "x").expect("edge");
        let memory = counting(1.0, LARGE);
        let sent = tensor(node, &memory, LARGE, 0);
        step.send(&edge, sent.clone()).expect("sent");
        let got = step.recv(&edge, SOON).expect("received").tensor;
        assert_eq!(got.as_ptr(), sent.as_ptr());
        let buffer = Buffer::new(4 * LARGE);
        step.send(&edge, got).expect("sent");
        let into = step.receive(&edge).into(buffer.target(node, floats(LARGE))).begin().expect("begun");
        assert_eq!(into.wait().expect("received").tensor.bytes(), sent.bytes());
        assert_eq!(counted(node, &Snapshot::ZERO, HOW), [0; 4]);
    });
}

pub fn no_room(settings: &'static Settings) {
    run(2, settings, move |node, task| {
        let step = node.step(1).expect("new");
        if task == 1 {
            return;
        }
        // More bytes than the pool has.
        let memory = counting(0.0, 3 << 20);
        let sent = step.send(&there(node), tensor(node, &memory, 3 << 20, 0));
        match registers(settings) {
            true => sent.expect("it needs no room"),
            false => assert!(matches!(sent, Err(Error::NoRoom { .. })), "{sent:?}"),
        }
        node.cleanup(1);
    });
}

pub fn waits_for_room(settings: &'static Settings) {
    // Fewer bytes than are registered.
    const N: u64 = 1000;
    run(2, settings, move |node, task| {
        let step = node.step(1).expect("new");
        if task == 1 {
            let got = step.recv(&here(node), SOON).expect("received").tensor;
            assert_eq!(values(&got)[..2], [0.0, 1.0]);
            return;
        }
        let fill = |bytes| std::iter::from_fn(move || node.tensor(DType::U8, &[bytes]).ok());
        let held: Vec<_> = [1 << 20, 4 * N].into_iter().flat_map(fill).collect();
        let memory = counting(0.0, N);
        let (brief, since) = (Duration::from_millis(20), Instant::now());
        let failed = step.send_within(&there(node), tensor(node, &memory, N, 0), brief).expect_err("no room");
        assert!(matches!(failed.error, Error::NoRoom { .. }) && since.elapsed() >= brief, "{failed}");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(brief);
                drop(held);
            });
            step.send_within(&there(node), failed.value, SOON).expect("there is room soon");
        });
        let large = counting(0.0, 3 << 20);
        let sent = step.send_within(&there(node), tensor(node, &large, 3 << 20, 0), SOON);
        assert!(sent.is_ok() == registers(settings), "a tensor that is too large never finds room: {sent:?}");
        assert!(since.elapsed() < SOON, "the call must not wait for it");
        node.cleanup(1);
    });
}

pub fn refused(settings: &'static Settings) {
    let settings: &'static Settings = [&[("max_outstanding_sends", "2")], settings].concat().leak();
    run(2, settings, move |node, task| {
        if task == 1 {
            return;
        }
        let step = node.step(1).expect("new");
        let before = node.counters();
        let memory = counting(0.0, 2 * LARGE);
        let one = || tensor(node, &memory, LARGE, 0);
        let batch = |count| step.send_all(vec![there(node); count].iter().map(|edge| (edge, one())));
        assert!(matches!(batch(3), Err(Error::BatchTooLarge { .. })));
        assert_eq!(counted(node, &before, HOW), [0; 4], "nothing of it was copied or registered");
        batch(2).expect("as many as may wait");
        let after_two = node.counters();
        let refused = [step.send(&there(node), one()), batch(1)];
        assert!(matches!(&refused[0], Err(Error::ResourceExhausted { .. })), "{refused:?}");
        assert!(refused[1].is_err());
        assert_eq!(counted(node, &after_two, HOW), [0; 4]);
        node.cleanup(1);
        // A send that is too large for the pool takes no place of other sends.
        let step = node.step(2).expect("new");
        until(node, "the end of the step", || step.send_all([(&there(node), one())]).is_ok());
        if !registers(settings) {
            let large = counting(0.0, 3 << 20);
            let large = || tensor(node, &large, 3 << 20, 0);
            for _ in 0..5 {
                let sent = step.send(&there(node), large());
                assert!(matches!(sent, Err(Error::NoRoom { .. })), "{sent:?}");
                let sent = step.send_all([(&there(node), large())]);
                assert!(matches!(sent, Err(Error::NoRoom { .. })), "{sent:?}");
            }
        }
        step.send(&there(node), one()).expect("the second place is free");
        node.cleanup(2);
    });
}

/// A program with few buffers: its callback waits until one of them is free again.
pub fn ends_beside_callbacks(settings: &'static Settings) {
    run(1, settings, move |node, _| {
        let step = node.step(1).expect("new");
        let gone = Arc::new(AtomicUsize::new(0));
        let (edge, went) = (node.edge_to("w", 0, "x").expect("edge"), gone.clone());
        let (said, hears) = std::sync::mpsc::channel();
        let waits = move |_| {
            let end = std::time::Instant::now() + SOON;
            while went.load(Ordering::SeqCst) == 0 && std::time::Instant::now() < end {
                std::thread::sleep(Duration::from_millis(1));
            }
            let _ = said.send(went.load(Ordering::SeqCst));
        };
        step.receive(&edge).within(SOON).then(waits).expect("begun");
        let len = 4 * LARGE as usize;
        let memory = ForeignMemory::from_owner(Mapping::new(reserved(len), len, 1.0, &gone));
        let held = tensor(node, &memory, LARGE, 0);
        drop(memory);
        step.send(&edge, crate::common::counting(node, 0.0, 2)).expect("sent");
        // The callback waits, now or later, for the buffer that this drops.
        drop(held);
        assert_eq!(hears.recv_timeout(2 * SOON), Ok(1), "its buffer was not released while it waited");
    });
}
