//! Drivers that fail to destroy objects: memory that the device may still touch is not used again.

use crate::driver::Fake;
use crate::harness::{Got, tensor, tensor_mut};
use crate::setup::*;
use crate::{expect, needs_fake};
use tensorwire::internals::fabric::Port;

#[test]
fn a_queue_pair_that_can_t_be_destroyed_but_stopped_gives_everything_back() {
    needs_fake!();
    let fake = Fake::new(TWO_NICS);
    let (mut a, mut b) = two(&fake, 16);
    let target = tensor_mut(&a.pool, 64);
    let grant = a.port.grant(a.link, target).expect("room");
    fake.run("fault call=destroy_qp errno=16");
    a.port.fail(a.link, tensorwire::internals::fabric::LinkFailure::Closed);
    a.until_down();
    assert!(a.port.revoke(a.link, &grant).is_some());
    assert!(a.pool.is_empty());
    expect!(b.next(&mut a), Got::Down(_) => ());
    drop((a, b));
    fake.assert_no_misuse();
}

#[test]
fn what_a_queue_pair_may_touch_that_can_t_even_be_stopped_is_never_used_again() {
    needs_fake!();
    let fake = Fake::new(TWO_NICS);
    let (mut a, mut b) = two(&fake, 16);
    let exposed = b.port.expose(b.link, &tensor(&b.pool, &[1; 64])).expect("room");
    let target = tensor_mut(&a.pool, 64);
    let grant = a.port.grant(a.link, target).expect("room");
    fake.run("cut");
    let source = tensor(&a.pool, &[1; 64]);
    a.port.write(a.link, &source, 64, &exposed, None).expect("room");
    a.port.read(a.link, tensor_mut(&a.pool, 64), &exposed).expect("room");
    fake.run("fault call=destroy_qp errno=16\nfault call=modify_qp:ERR errno=5");
    a.port.fail(a.link, tensorwire::internals::fabric::LinkFailure::Closed);
    let (failed, done, _) = a.until_down();
    assert_eq!((failed, done), (2, 0), "whoever waits is told");
    assert!(a.port.revoke(a.link, &grant).is_none(), "the peer may still write there");
    let source = source.try_into_mut().expect_err("the device may still read it");
    let pool = a.pool.clone();
    drop((source, a, b));
    assert!(!pool.is_empty(), "the three tensors are nobody's");
    fake.assert_no_misuse();
}

#[test]
fn memory_whose_registration_can_t_be_ended_stays_mapped() {
    needs_fake!();
    let fake = Fake::new(TWO_NICS);
    let (a, b) = two(&fake, 16);
    let buffers = fake.calls("reg_mr");
    fake.run("fault call=dereg_mr errno=16");
    drop((a, b));
    let maps = std::fs::read_to_string("/proc/self/maps").expect("Linux");
    let is_mapped = |addr: u64| {
        maps.lines().any(|line| {
            let (from, to) = line.split(' ').next().and_then(|range| range.split_once('-')).expect("a range");
            let [from, to] = [from, to].map(|text| u64::from_str_radix(text, 16).expect("hexadecimal"));
            (from..to).contains(&addr)
        })
    };
    assert_eq!(buffers.len(), 6, "two pools, and two pieces for each end");
    assert!(buffers.iter().all(|line| is_mapped(line.number("start"))), "{buffers:?}");
    fake.assert_no_misuse();
}
