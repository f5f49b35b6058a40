//! Two connected ports in one process, and waits with a deadline.

use std::collections::VecDeque;
use std::time::{Duration, Instant};
use tensorwire::internals::fabric::{
    Completions, Endpoint, Event, Fabric, LinkFailure, LinkId, LinkOptions, Port, Role,
};
use tensorwire::internals::memory::{LentBytes, LockPolicy, PoolOptions, Region, RegionOptions};
use tensorwire::internals::wire::{Grant, Immediate, ShortMessage, Slot};
use tensorwire::{DType, Pool, Shape, Tensor, TensorMeta, TensorMut};

/// Timeout of each wait.
pub const TIMEOUT: Duration = Duration::from_secs(10);

/// A fabric under test.
pub trait Harness {
    type Fabric: Fabric;
    /// Whether the target's side checks each access against the grant. Otherwise it checks region
    /// and key.
    const CHECKS_GRANTS: bool = true;
    /// Whether each grant has a key of its own, for one right and until it is revoked.
    const HAS_OWN_KEYS: bool = Self::CHECKS_GRANTS;
    /// Whether the fabric draws the keys of grants itself, and not a device.
    const DRAWS_KEYS: bool = Self::CHECKS_GRANTS;
    /// Whether operations complete without polls of the target.
    const COMPLETES_ALONE: bool = !Self::CHECKS_GRANTS;

    /// The reason if the fabric cannot be tested here.
    fn skipped() -> Option<String> {
        None
    }

    fn fabric(pool: &Pool) -> Self::Fabric;

    /// Checks for leftovers after all ends of a test are dropped.
    fn verify() {}

    /// Two processes that can reach each other.
    fn fabrics(pools: [&Pool; 2]) -> [Self::Fabric; 2] {
        pools.map(Self::fabric)
    }
}

/// An event of a port, with its data copied.
#[derive(Debug)]
pub enum Got {
    Done,
    ReadDone(TensorMut),
    Failed,
    Message(Vec<u8>),
    Immediate(Immediate, u64),
    /// A loan, with its message.
    Lent(Vec<u8>, LentBytes),
    Repaired,
    Down(LinkFailure),
}

/// One end of a link, with its pool, fabric and port.
pub struct End<F: Fabric> {
    pub pool: Pool,
    pub fabric: F,
    pub port: F::Port,
    pub link: LinkId,
    pub arrivals: VecDeque<(LinkId, Got)>,
    completions: Completions,
}

pub fn pool(bytes: u64) -> Pool {
    let options = RegionOptions { lock: LockPolicy::No, ..RegionOptions::new(bytes) };
    Pool::new(Region::create(3, &options).expect("a region"), PoolOptions::default()).expect("a pool")
}

pub fn tensor_mut(pool: &Pool, len: usize) -> TensorMut {
    let shape = Shape::new(&[len as u64]).expect("a shape");
    pool.zeroed(TensorMeta::new(DType::U8, shape).expect("meta")).expect("room")
}

pub fn tensor(pool: &Pool, bytes: &[u8]) -> Tensor {
    let mut tensor = tensor_mut(pool, bytes.len());
    tensor.bytes_mut().copy_from_slice(bytes);
    tensor.freeze()
}

/// Bytes that depend on the position and the seed.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    (0..len as u64).map(|k| ((k + seed).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8).collect()
}

pub fn immediate(slot: u32) -> Immediate {
    Immediate { generation: 9, slot: Slot::new(slot).expect("20 bits") }
}

/// A message for a loan.
pub fn loan_message(number: u32) -> ShortMessage {
    ShortMessage::from_u32(number)
}

/// Connects two fabrics of this process.
pub fn connect<F: Fabric>(a: &F, b: &F, options: &LinkOptions) -> (F::Link, F::Link) {
    join([a.endpoint(0, options).expect("an endpoint"), b.endpoint(0, options).expect("an endpoint")])
}

/// Connects two endpoints.
pub fn join<H: Endpoint>([a, b]: [H; 2]) -> (H::Link, H::Link) {
    let (to_a, to_b) = (a.address().to_vec(), b.address().to_vec());
    std::thread::scope(|scope| {
        let acceptor = scope.spawn(|| a.connect(Role::Acceptor, &to_b, TIMEOUT).expect("accepted"));
        let b = b.connect(Role::Initiator, &to_a, TIMEOUT).expect("connected");
        (acceptor.join().expect("no panic"), b)
    })
}

pub fn options(depth: u32) -> LinkOptions {
    LinkOptions { depth, receives: 0, generation: 1 }
}

/// Two connected ends without posted receives.
pub fn pair<H: Harness>(depth: u32) -> (End<H::Fabric>, End<H::Fabric>) {
    let pools = (pool(8 << 20), pool(8 << 20));
    let [a, b] = H::fabrics([&pools.0, &pools.1]);
    let links = connect(&a, &b, &options(depth));
    (End::new(pools.0, a, links.0), End::new(pools.1, b, links.1))
}

impl<F: Fabric> End<F> {
    pub fn new(pool: Pool, fabric: F, link: F::Link) -> Self {
        let mut port = fabric.port().expect("a port");
        let link = port.attach(link).expect("room");
        let completions = Completions::with_capacity(64);
        End { pool, fabric, port, link, arrivals: VecDeque::new(), completions }
    }

    /// Polls once.
    pub fn poll(&mut self) {
        self.completions.clear();
        let added = self.port.poll(&mut self.completions);
        assert_eq!(added, self.completions.len());
        for (completion, message) in self.completions.drain() {
            let got = match completion.event {
                Event::Done => Got::Done,
                Event::ReadDone { target } => Got::ReadDone(target),
                Event::Failed => Got::Failed,
                Event::Message(_) => Got::Message(message.to_vec()),
                Event::Immediate { immediate, bytes } => Got::Immediate(immediate, bytes),
                Event::Lent { bytes, .. } => Got::Lent(message.to_vec(), bytes),
                Event::Repaired => Got::Repaired,
                Event::Down(why) => Got::Down(why),
            };
            self.arrivals.push_back((completion.link, got));
        }
    }

    /// The next event of this end. The other end is polled too.
    pub fn next(&mut self, other: &mut End<F>) -> Got {
        let start = Instant::now();
        loop {
            if let Some((_, got)) = self.arrivals.pop_front() {
                return got;
            }
            assert!(start.elapsed() < TIMEOUT, "nothing came within {TIMEOUT:?}");
            self.poll();
            other.poll();
        }
    }

    /// The next event of this end. Only this end is polled.
    pub fn next_alone(&mut self) -> Got {
        let start = Instant::now();
        loop {
            if let Some((_, got)) = self.arrivals.pop_front() {
                return got;
            }
            assert!(start.elapsed() < TIMEOUT, "nothing came within {TIMEOUT:?}");
            self.poll();
        }
    }

    /// All events up to `Down`: the numbers of failed and of completed operations, and the cause.
    pub fn until_down(&mut self) -> (usize, usize, LinkFailure) {
        let (mut failed, mut done) = (0, 0);
        loop {
            match self.next_alone() {
                Got::Failed => failed += 1,
                Got::Done | Got::ReadDone(_) => done += 1,
                Got::Down(why) => return (failed, done, why),
                _ => {}
            }
        }
    }

    /// Polls both ends for a while, and asserts that this end has no event.
    pub fn assert_quiet(&mut self, other: &mut End<F>) {
        for _ in 0..3000 {
            self.poll();
            other.poll();
        }
        assert!(self.arrivals.is_empty(), "{:?}", self.arrivals);
    }
}

/// A tensor of this end with a grant for writes of its peer.
pub fn granted<F: Fabric>(end: &mut End<F>, len: usize) -> Grant {
    let grant = begin_grant(end, len);
    await_grants(end);
    grant
}

/// As [`granted`]. The grant may not be in force yet.
pub fn begin_grant<F: Fabric>(end: &mut End<F>, len: usize) -> Grant {
    let target = tensor_mut(&end.pool, len);
    end.port.grant(end.link, target).expect("room")
}

/// Waits until the grants of this end are in force. A test tells its peer of them without a
/// message, which would come behind them. A revocation waits for all that was posted before it.
fn await_grants<F: Fabric>(end: &mut End<F>) {
    let last = begin_grant(end, 1);
    drop(revoked(end, &last));
}

pub fn revoked<F: Fabric>(end: &mut End<F>, grant: &Grant) -> TensorMut {
    end.port.revoke(end.link, grant).expect("granted")
}

/// A tensor of this end with a grant for reads of its peer. The port holds its only handle.
pub fn exposed<F: Fabric>(end: &mut End<F>, bytes: &[u8]) -> Grant {
    let source = tensor(&end.pool, bytes);
    let grant = end.port.expose(end.link, &source).expect("room");
    await_grants(end);
    grant
}

pub fn receives<F: Fabric>(end: &mut End<F>, count: u32) {
    end.port.post_receives(end.link, count);
}

/// A borrowed tensor of the lent bytes.
pub fn bytes_of<F: Fabric>(end: &End<F>, lent: LentBytes) -> Tensor {
    let shape = Shape::new(&[lent.len() as u64]).expect("a shape");
    let meta = TensorMeta::new(DType::U8, shape).expect("meta");
    Tensor::from_lent(&end.pool, &meta, lent).map_err(|(error, _)| error).expect("as long")
}

/// Posts a write and a read of 64 bytes each, and fails the link: exactly these two fail. Returns
/// the source of the write.
pub fn fail_a_write_and_a_read<F: Fabric>(a: &mut End<F>, b: &mut End<F>) -> Tensor {
    let (target, readable) = (granted(b, 64), exposed(b, &[1; 64]));
    let source = tensor(&a.pool, &[1; 64]);
    let into = tensor_mut(&a.pool, 64);
    a.port.write(a.link, &source, 64, &target, None).expect("posted");
    a.port.read(a.link, into, &readable).expect("posted");
    a.port.fail(a.link, LinkFailure::Local("enough".into()));
    let (failed, done, _) = a.until_down();
    assert_eq!((failed, done), (2, 0));
    source
}

/// Asserts the kind of an event, and returns its fields.
#[macro_export]
macro_rules! expect {
    ($got:expr, $pattern:pat => $value:expr) => {
        match $got {
            $pattern => $value,
            other => panic!("expected {}, got {other:?}", stringify!($pattern)),
        }
    };
}
