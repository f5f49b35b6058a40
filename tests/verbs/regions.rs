//! The access flags with which memory is registered.

use crate::driver::{Fake, Line, ONE_NIC};
use crate::harness::{Got, tensor, tensor_mut};
use crate::setup::*;
use crate::{expect, needs_fake};
use tensorwire::internals::fabric::Port;
use tensorwire::internals::fabric::verbs::VerbsOptions;

const LOCAL_WRITE: u64 = 1;
const REMOTE_WRITE: u64 = 1 << 1;
const REMOTE_READ: u64 = 1 << 2;
const MW_BIND: u64 = 1 << 4;
const RELAXED_ORDERING: u64 = 1 << 20;
const POOL: u64 = LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ;

/// The registrations of a device with both ends of a link: first the two pools, then the buffers of
/// the link.
fn registered(fake: &Fake, options: VerbsOptions) -> (Vec<Line>, Vec<Line>) {
    let ends = ends(fake, [options.clone(), options], &link(16));
    let mut pools = fake.log();
    pools.retain(|line| line.word.starts_with("reg_mr"));
    drop(ends);
    fake.assert_clean();
    let others = pools.split_off(2);
    assert_eq!(others.len(), 4, "each end registers a place for messages and one for words");
    (pools, others)
}

fn assert_plain_buffers(others: &[Line]) {
    for buffer in others {
        assert_eq!(buffer.word, "reg_mr");
        assert!([LOCAL_WRITE, LOCAL_WRITE | REMOTE_WRITE].contains(&buffer.number("access")), "{buffer:?}");
    }
}

#[test]
fn the_pool_is_registered_once_and_whole() {
    needs_fake!();
    let (pools, others) = registered(&Fake::new(ONE_NIC), VerbsOptions::default());
    for pool in pools {
        assert_eq!(pool.word, "reg_mr");
        assert_eq!([pool.number("len"), pool.number("access")], [8 << 20, POOL]);
    }
    assert_plain_buffers(&others);
}

#[test]
fn memory_windows_may_be_bound_to_the_pool_where_the_device_has_any() {
    needs_fake!();
    for caps in [1 << 17, 1 << 23, 1 << 24] {
        let script = ONE_NIC.replace("name=fake_0", &format!("name=fake_0 caps={caps}"));
        let (pools, others) = registered(&Fake::new(&script), VerbsOptions::default());
        assert!(pools.iter().all(|pool| pool.number("access") == POOL | MW_BIND), "{pools:?}");
        assert_plain_buffers(&others);
    }
}

#[test]
fn relaxed_ordering_is_for_the_pool_alone_and_only_when_asked_for() {
    needs_fake!();
    let relaxed = VerbsOptions { relaxed_ordering: true, ..VerbsOptions::default() };
    let (pools, others) = registered(&Fake::new(ONE_NIC), relaxed.clone());
    for pool in pools {
        assert_eq!(pool.word, "reg_mr_iova2");
        assert_eq!(pool.number("access"), POOL | RELAXED_ORDERING);
    }
    // Flags and messages lie there, so relaxed ordering must be off.
    assert_plain_buffers(&others);

    // A library that is too old registers without it. It does not report GID types either.
    let mut relaxed = relaxed;
    relaxed.device_settings.gid_index = Some(setting("rdma_gid_index", 1));
    let (pools, others) = registered(&Fake::old(ONE_NIC), relaxed);
    assert!(pools.iter().all(|pool| pool.word == "reg_mr" && pool.number("access") == POOL), "{pools:?}");
    assert_plain_buffers(&others);
}

#[test]
fn an_old_library_whose_contexts_have_no_extension_does() {
    needs_fake!();
    let script = ONE_NIC.replace("name=fake_0", "name=fake_0 old_context=1");
    let fake = Fake::old(&script);
    let mut options = VerbsOptions::default();
    options.device_settings.gid_index = Some(setting("rdma_gid_index", 1));
    let (mut a, mut b) = ends(&fake, [options.clone(), options], &link(16));
    let links = (a.link, b.link);
    assert_works(&mut a, &mut b, links);
    drop((a, b));
    fake.assert_clean();
}

#[test]
fn queue_pairs_are_in_a_thread_domain_where_the_driver_has_them() {
    needs_fake!();
    for (has, fault, in_domain) in [
        (0, "", 0),
        (1, "", 1),
        // The fabric works without features that are refused.
        (1, "fault call=alloc_td errno=95", 0),
        (1, "fault call=alloc_parent_domain errno=95", 0),
    ] {
        let script = ONE_NIC.replace("name=fake_0", &format!("name=fake_0 thread_domains={has}"));
        let fake = Fake::new(&format!("{script}\n{fault}"));
        let (mut a, mut b) = ends(&fake, [VerbsOptions::default(), VerbsOptions::default()], &link(16));
        let made = fake.calls("create_qp");
        assert_eq!(made.len(), 4);
        assert!(made.iter().all(|pair| pair.number("thread_domain") == in_domain), "{made:?}");
        // The key of the pool is valid in both domains.
        let target = tensor_mut(&b.pool, 100);
        let grant = b.port.grant(b.link, target).expect("room");
        let source = tensor(&a.pool, &[7; 100]);
        a.port.write(a.link, &source, 100, &grant, None).expect("room");
        expect!(a.next(&mut b), Got::Done => ());
        assert_eq!(b.port.revoke(b.link, &grant).expect("granted").bytes(), [7; 100]);
        drop((a, b));
        fake.assert_clean();
    }
}
