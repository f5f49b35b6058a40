//! Post lists: several requests that are posted by one call.

use crate::driver::Fake;
use crate::harness::{Got, immediate, pattern, tensor, tensor_mut};
use crate::setup::*;
use crate::{expect, needs_fake};
use tensorwire::internals::fabric::{Port, PostError};

/// Largest number of requests of one call.
const CHAIN: u64 = 32;

/// The number of posts on the data queue pairs of `a`, and of their requests. The first queue pair
/// is the control one.
fn posted(fake: &Fake) -> (u64, u64) {
    let pairs = fake.pairs();
    let queues = pairs.iter().filter(|pair| pair.text("device") == "fake_0").skip(1);
    queues.fold((0, 0), |(calls, sends), pair| {
        (calls + pair.number("send_calls"), sends + pair.number("sends"))
    })
}

fn since((calls, sends): (u64, u64), before: (u64, u64)) -> (u64, u64) {
    (calls - before.0, sends - before.1)
}

#[test]
fn requests_of_a_batch_go_by_one_call_for_each_chain_and_in_their_order() {
    needs_fake!();
    // With inline data and without.
    for inline in [0, 64, 256] {
        let script = TWO_NICS.replace("name=fake_0", &format!("name=fake_0 max_inline={inline}"));
        let fake = Fake::new(&script);
        let (mut a, mut b) = two(&fake, 256);
        b.port.post_receives(b.link, 256);
        for count in [1, 5, CHAIN, CHAIN + 1, 100] {
            let (before, rung) = (posted(&fake), a.port.doorbells());
            a.port.begin_batch();
            for n in 0..count {
                // The caller's bytes are dropped before the batch ends.
                let bytes = pattern(1 + n as usize, n);
                a.port.send(a.link, &bytes).expect("room");
            }
            assert!(since(posted(&fake), before).0 <= (count - 1) / CHAIN, "before its end");
            a.port.end_batch();
            assert_eq!(since(posted(&fake), before), (count.div_ceil(CHAIN), count));
            assert_eq!(a.port.doorbells() - rung, count.div_ceil(CHAIN));
            for n in 0..count {
                let message = expect!(b.next(&mut a), Got::Message(m) => m);
                assert_eq!(message, pattern(1 + n as usize, n), "message {n} of {count}");
            }
            b.port.post_receives(b.link, count as u32);
        }
        let before = posted(&fake);
        a.port.send(a.link, b"alone").expect("room");
        assert_eq!(since(posted(&fake), before), (1, 1), "at once");
        expect!(b.next(&mut a), Got::Message(_) => ());
        drop((a, b));
        fake.assert_clean();
    }
}

#[test]
fn writes_and_messages_of_a_batch_keep_their_order_and_their_sources() {
    needs_fake!();
    let fake = Fake::new(TWO_NICS);
    let (mut a, mut b) = two(&fake, 64);
    b.port.post_receives(b.link, 64);
    let grant = b.port.grant(b.link, tensor_mut(&b.pool, 64)).expect("room");
    let source = tensor(&a.pool, &pattern(64, 3));
    let before = posted(&fake);
    a.port.begin_batch();
    for id in 0..5 {
        a.port.send(a.link, &[id as u8]).expect("room");
        a.port.write(a.link, &source, 64, &grant, Some(immediate(id as u32))).expect("room");
    }
    a.port.end_batch();
    assert_eq!(since(posted(&fake), before), (1, 10));
    let source = source.try_into_mut().expect_err("the port holds it until it is done");
    for id in 0..5 {
        assert_eq!(expect!(b.next(&mut a), Got::Message(m) => m), [id as u8]);
        assert_eq!(expect!(b.next(&mut a), Got::Immediate(imm, 64) => imm), immediate(id));
    }
    for _ in 0..5 {
        expect!(a.next(&mut b), Got::Done => ());
    }
    assert!(source.try_into_mut().is_ok());
    let written = b.port.revoke(b.link, &grant).expect("granted").freeze();
    assert_eq!(written.bytes(), pattern(64, 3));
    drop(written);
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn a_batch_may_be_longer_than_the_queue_and_of_several_links() {
    needs_fake!();
    let fake = Fake::new(TWO_NICS);
    let (mut a, mut b) = two(&fake, 16);
    let other = another(&mut a, &mut b, &link(16));
    for link in [b.link, other.1] {
        b.port.post_receives(link, 100);
    }
    let rung = a.port.doorbells();
    a.port.begin_batch();
    for link in [a.link, other.0] {
        let sent = (0..20u8).take_while(|n| a.port.send(link, &[*n]) == Ok(())).count();
        assert_eq!(sent, 16, "as many as without a batch");
        assert_eq!(a.port.send(link, b"more"), Err(PostError::Full));
    }
    a.port.end_batch();
    // Each link has a signalled request that makes room.
    assert!(a.port.doorbells() - rung <= 4, "{}", a.port.doorbells() - rung);
    for _ in 0..32 {
        expect!(b.next(&mut a), Got::Message(_) => ());
    }
    a.port.send(a.link, b"room again").expect("room");
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn what_the_driver_refuses_of_a_batch_fails_with_the_link() {
    needs_fake!();
    for skip in [0, 2] {
        let fake = Fake::new(TWO_NICS);
        let (mut a, mut b) = two(&fake, 64);
        b.port.post_receives(b.link, 64);
        let grant = b.port.grant(b.link, tensor_mut(&b.pool, 64)).expect("room");
        let source = tensor(&a.pool, &pattern(64, 3));
        fake.run(&format!("fault call=post_send errno=12 skip={skip} times=1"));
        a.port.begin_batch();
        for _ in 0..5 {
            a.port.write(a.link, &source, 64, &grant, Some(immediate(1))).expect("accepted");
        }
        a.port.end_batch();
        assert_eq!(a.port.send(a.link, b"x"), Err(PostError::Down));
        let (failed, done, _) = a.until_down();
        assert_eq!(failed + done, 5, "each once: {failed:?} {done:?}");
        assert!(source.try_into_mut().is_ok(), "nobody reads it any more");
        drop((a, b));
        fake.assert_clean();
    }
}

#[test]
fn a_link_that_is_let_go_in_a_batch_sends_what_was_posted() {
    needs_fake!();
    let fake = Fake::new(TWO_NICS);
    let (mut a, mut b) = two(&fake, 64);
    b.port.post_receives(b.link, 64);
    a.port.begin_batch();
    for n in 0..3 {
        a.port.send(a.link, &[n]).expect("room");
    }
    a.port.detach(a.link);
    a.port.end_batch();
    for n in 0..3 {
        assert_eq!(expect!(b.next(&mut a), Got::Message(m) => m), [n]);
    }
    expect!(b.next(&mut a), Got::Down(_) => ());
    drop((a, b));
    fake.assert_clean();
}
