//! The hot path of the TCP fabric: in steady state a port allocates and frees nothing. It enters
//! the kernel for each connection that it reads or writes, by design.
//!
//! One thread owns both ends, and does each operation once a turn.

use crate::alone_on_the_cpus;
use crate::harness::{
    End, connect, exposed, granted, immediate, options, pool, receives, tensor, tensor_mut,
};
use crate::threads::{Activity, Start};
use std::time::{Duration, Instant};
use tensorwire::TensorMut;
use tensorwire::internals::fabric::tcp::{TcpFabric, TcpOptions};
use tensorwire::internals::fabric::{Completions, Event, Port};

const CALLER: &str = "caller";
const WARM_UP: u32 = 300;
const COUNTED: u32 = 1000;
const TIMEOUT: Duration = Duration::from_secs(10);
/// Payloads that go by the main connection, and by the bulk ones.
const SMALL: usize = 4 << 10;
const LARGE: usize = 300 << 10;

type TcpEnd = End<TcpFabric>;

/// Polls both ends until `wanted` events have come, and returns the target of a read.
fn poll(ends: [&mut TcpEnd; 2], completions: &mut Completions, wanted: usize) -> Option<TensorMut> {
    let (mut came, mut read) = (0, None);
    let start = Instant::now();
    let [a, b] = ends;
    while came < wanted {
        for end in [&mut *a, &mut *b] {
            completions.clear();
            end.port.poll(completions);
            for (completion, _) in completions.drain() {
                came += 1;
                match completion.event {
                    Event::ReadDone { target } => read = Some(target),
                    Event::Done | Event::Message(_) | Event::Immediate { .. } => {}
                    other => panic!("{other:?}"),
                }
            }
        }
        assert!(start.elapsed() < TIMEOUT, "{came} of {wanted} came");
    }
    read
}

fn measure(options_of_tcp: TcpOptions) -> Activity {
    let pools = [pool(8 << 20), pool(8 << 20)];
    let [a, b] =
        [&pools[0], &pools[1]].map(|pool| TcpFabric::new(pool, options_of_tcp.clone()).expect("a fabric"));
    let links = connect(&a, &b, &options(64));
    let [pool_a, pool_b] = pools;
    let (mut a, mut b) = (End::new(pool_a, a, links.0), End::new(pool_b, b, links.1));
    receives(&mut b, u32::MAX);
    let (target, readable) = (granted(&mut b, LARGE), exposed(&mut b, &[3; LARGE]));
    let small = readable.part(0, SMALL as u64).expect("inside");
    let source = tensor(&a.pool, &[1; LARGE]);
    let mut into = Some(tensor_mut(&a.pool, LARGE));
    let mut completions = Completions::with_capacity(64);
    let mut turn = |number: u32| {
        let (port, link) = (&mut a.port, a.link);
        port.begin_batch();
        port.send(link, b"a message").expect("room");
        port.write_inline(link, &[2; 100], &target, Some(immediate(1))).expect("room");
        port.write(link, &source, SMALL as u64, &target, Some(immediate(2))).expect("room");
        port.write(link, &source, LARGE as u64, &target, Some(immediate(3))).expect("room");
        port.publish_credits(link, number);
        port.end_batch();
        let from = if number.is_multiple_of(2) { &readable } else { &small };
        port.read(link, into.take().expect("back"), from).expect("room");
        into = poll([&mut a, &mut b], &mut completions, 7);
        if number.is_multiple_of(10) {
            a.port.arm();
            b.port.arm();
        }
        assert!(into.is_some(), "the read has completed");
    };
    (0..WARM_UP).for_each(&mut turn);
    let start = Start::now();
    (0..COUNTED).for_each(&mut turn);
    let end = Start::now();
    start.until(&end).into_iter().find(|activity| activity.name == CALLER).expect("this thread is known")
}

#[test]
fn a_tcp_port_allocates_nothing_in_steady_state() {
    let _alone = alone_on_the_cpus();
    let thread = std::thread::Builder::new().name(CALLER.into()).spawn(|| {
        // The control: what is allocated is counted.
        let start = Start::now();
        drop(std::hint::black_box(Box::new(1)));
        let control = start.until(&Start::now());
        let own = control.iter().find(|activity| activity.name == CALLER).expect("this thread is known");
        assert_eq!((own.allocations, own.frees), (1, 1));
        for streams in [1, 3] {
            let activity = measure(TcpOptions { streams, ..TcpOptions::default() });
            println!("{COUNTED} turns with {streams} bulk connections: {activity:?}");
            assert_eq!((activity.allocations, activity.frees), (0, 0));
        }
    });
    thread.expect("a thread").join().expect("no panic");
}
