//! Thread domains: one thread at a time may use the queue pairs of a domain, because the driver
//! takes no lock.
#![allow(unsafe_code)] // direct calls into the library

use crate::driver::{Fake, ONE_NIC};
use crate::needs_fake;
use crate::setup::*;
use std::ptr::null_mut;
use std::time::{Duration, Instant};
use tensorwire::internals::fabric::Port;
use tensorwire::internals::fabric::verbs::sys::*;

/// Ends the hold on each path: the threads must end before they are joined.
struct Held<'a>(&'a Fake);

impl<'a> Held<'a> {
    fn new(fake: &'a Fake) -> Self {
        fake.run("hold");
        Held(fake)
    }

    /// Waits until `count` threads are held in the middle of posting.
    fn until(&self, threads: u32) {
        let start = Instant::now();
        while self.0.run("held") != threads.to_string() {
            assert!(start.elapsed() < Duration::from_secs(10), "only {} threads post", self.0.run("held"));
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.run("hold on=0");
    }
}

/// Calls a function of the library.
macro_rules! call {
    ($fake:expr, $name:ident($($arg:expr),*)) => {
        // SAFETY: the handles are alive, and the structs have the types of the ABI.
        unsafe { ($fake.library.$name)($($arg),*) }
    };
}

/// Posts on two queue pairs at the same time. Equal numbers in `domains` mean the same thread
/// domain. Returns the misuse that the fake has noted.
fn misuses_of(domains: [Option<u8>; 2]) -> String {
    let fake = Fake::new(&ONE_NIC.replace("name=fake_0", "name=fake_0 thread_domains=1"));
    let list = call!(fake, get_device_list(null_mut()));
    // SAFETY: the list has one device.
    let device = unsafe { *list };
    let context = call!(fake, open_device(device));
    call!(fake, free_device_list(list));
    let root = call!(fake, alloc_pd(context));
    let cq = call!(fake, create_cq(context, 100, null_mut(), null_mut(), 0));
    let mut made: Vec<(u8, *mut ibv_td, *mut ibv_pd)> = Vec::new();
    for domain in domains.into_iter().flatten() {
        if made.iter().all(|(known, ..)| *known != domain) {
            // SAFETY: the device is open, and the domain is its own.
            let (td, pd) = unsafe {
                let td = ibv_alloc_td(context).expect("the device has them");
                (td, ibv_alloc_parent_domain(context, root, td).expect("the device has them"))
            };
            made.push((domain, td, pd));
        }
    }
    let pd_of = |domain: Option<u8>| match domain {
        Some(domain) => made.iter().find(|(known, ..)| *known == domain).expect("made above").2,
        None => root,
    };
    let pairs = domains.map(|domain| {
        let cap = ibv_qp_cap {
            max_send_wr: 4,
            max_recv_wr: 4,
            max_send_sge: 1,
            max_recv_sge: 1,
            ..Default::default()
        };
        let (qp_context, srq) = (null_mut(), null_mut());
        let mut init = ibv_qp_init_attr {
            qp_context,
            send_cq: cq,
            recv_cq: cq,
            srq,
            cap,
            qp_type: IBV_QPT_RC,
            sq_sig_all: 0,
        };
        let pair = call!(fake, create_qp(pd_of(domain), &mut init));
        let mut attr = ibv_qp_attr { qp_state: IBV_QPS_INIT, port_num: 1, ..ibv_qp_attr::default() };
        let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        assert_eq!(call!(fake, modify_qp(pair, &mut attr, mask)), 0);
        pair
    });
    std::thread::scope(|scope| {
        let held = Held::new(&fake);
        for pair in pairs.map(|pair| pair as usize) {
            scope.spawn(move || {
                let mut receive = ibv_recv_wr { wr_id: 0, next: null_mut(), sg_list: null_mut(), num_sge: 0 };
                // SAFETY: the queue pair is alive, and no other thread uses it.
                assert_eq!(unsafe { ibv_post_recv(pair as *mut ibv_qp, &mut receive, &mut null_mut()) }, 0);
            });
        }
        held.until(2);
    });
    let said = fake.run("misuses");
    pairs.iter().for_each(|pair| assert_eq!(call!(fake, destroy_qp(*pair)), 0));
    for (_, td, pd) in made {
        assert_eq!(call!(fake, dealloc_pd(pd)), 0);
        // SAFETY: the parent domain is already destroyed.
        assert_eq!(unsafe { ibv_dealloc_td(td) }, 0);
    }
    assert_eq!(call!(fake, destroy_cq(cq)), 0);
    assert_eq!(call!(fake, dealloc_pd(root)), 0);
    assert_eq!(call!(fake, close_device(context)), 0);
    assert_eq!(fake.run("left"), "");
    said
}

#[test]
fn two_threads_at_once_in_one_thread_domain_are_seen() {
    needs_fake!();
    let said = misuses_of([Some(1), Some(1)]);
    assert_eq!(said, "two threads post at once on queue pairs of one thread domain\n");
    assert_eq!(misuses_of([Some(1), Some(2)]), "", "each has its own");
    assert_eq!(misuses_of([Some(1), None]), "", "one has none");
    assert_eq!(misuses_of([None, None]), "", "the driver's locks");
}

#[test]
fn a_link_is_made_beside_one_that_posts_without_sharing_its_thread_domain() {
    needs_fake!();
    let fake = Fake::new(&TWO_NICS.replace("name=fake_0", "name=fake_0 thread_domains=1"));
    let (mut a, mut b) = two(&fake, 16);
    b.port.post_receives(b.link, 1);
    let links = std::thread::scope(|scope| {
        let held = Held::new(&fake);
        let made = {
            let (a, b) = (&a.fabric, &b.fabric);
            scope.spawn(|| crate::harness::connect(a, b, &link(16)))
        };
        // Both ends of the new link ping each other.
        held.until(2);
        let posted = {
            let (port, link) = (&mut a.port, a.link);
            scope.spawn(move || port.send(link, b"meanwhile"))
        };
        held.until(3);
        drop(held);
        assert_eq!(posted.join().expect("no panic"), Ok(()));
        made.join().expect("no panic")
    });
    fake.assert_no_misuse();
    let links = (a.port.attach(links.0).expect("room"), b.port.attach(links.1).expect("room"));
    assert_works(&mut a, &mut b, links);
    drop((a, b));
    fake.assert_clean();
}
