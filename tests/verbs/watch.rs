//! Tests of the scripted libibverbs itself: it moves bytes, makes the failures of a device, and
//! notes each misuse. The other tests of this program depend on these.
#![allow(unsafe_code)] // direct calls into the library

use crate::driver::{Fake, ONE_NIC};
use crate::needs_fake;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU8, Ordering};
use tensorwire::internals::fabric::verbs::sys::*;

const WRITABLE: i32 = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;

/// Two queue pairs of one device, and registered memory.
struct Raw {
    fake: Fake,
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    channel: *mut ibv_comp_channel,
    cq: *mut ibv_cq,
    pairs: [*mut ibv_qp; 2],
    mr: *mut ibv_mr,
    /// Atomic, as the library writes to it.
    memory: Vec<AtomicU8>,
}

/// Calls a function of the library.
macro_rules! call {
    ($raw:expr, $name:ident($($arg:expr),*)) => {
        // SAFETY: the handles are alive, and the structs have the types of the ABI.
        unsafe { ($raw.fake.library.$name)($($arg),*) }
    };
}

impl Raw {
    fn new(cqe: i32) -> Self {
        let fake = Fake::new(ONE_NIC);
        let mut raw = Raw {
            fake,
            context: null_mut(),
            pd: null_mut(),
            channel: null_mut(),
            cq: null_mut(),
            pairs: [null_mut(); 2],
            mr: null_mut(),
            memory: (0..4096).map(|_| AtomicU8::new(0)).collect(),
        };
        let list = call!(raw, get_device_list(null_mut()));
        // SAFETY: the list has one device.
        let device = unsafe { *list };
        raw.context = call!(raw, open_device(device));
        call!(raw, free_device_list(list));
        raw.pd = call!(raw, alloc_pd(raw.context));
        raw.channel = call!(raw, create_comp_channel(raw.context));
        raw.cq = call!(raw, create_cq(raw.context, cqe, null_mut(), raw.channel, 0));
        raw.mr = call!(raw, reg_mr(raw.pd, raw.memory.as_ptr().cast_mut().cast(), 4096, WRITABLE));
        raw.pairs = [raw.pair(), raw.pair()];
        raw
    }

    fn pair(&self) -> *mut ibv_qp {
        let cap = ibv_qp_cap {
            max_send_wr: 4,
            max_recv_wr: 4,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 16,
        };
        let mut init = ibv_qp_init_attr {
            qp_context: null_mut(),
            send_cq: self.cq,
            recv_cq: self.cq,
            srq: null_mut(),
            cap,
            qp_type: IBV_QPT_RC,
            sq_sig_all: 0,
        };
        let made = call!(self, create_qp(self.pd, &mut init));
        assert!(!made.is_null());
        made
    }

    fn number(&self, at: usize) -> u32 {
        // SAFETY: the queue pair is alive during the call.
        unsafe { (*self.pairs[at]).qp_num }
    }

    fn modify(&self, at: usize, mut attr: ibv_qp_attr, mask: i32) {
        assert_eq!(call!(self, modify_qp(self.pairs[at], &mut attr, mask)), 0);
    }

    fn init(&self) {
        for at in [0, 1] {
            let attr = ibv_qp_attr {
                qp_state: IBV_QPS_INIT,
                port_num: 1,
                qp_access_flags: WRITABLE as u32,
                ..ibv_qp_attr::default()
            };
            self.modify(at, attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
        }
    }

    /// Connects the two to each other.
    fn connect(self) -> Self {
        self.init();
        let gid = 0xFFFF_0A00_0001u128.to_be_bytes();
        for at in [0, 1] {
            let mut attr = ibv_qp_attr {
                qp_state: IBV_QPS_RTR,
                path_mtu: IBV_MTU_1024,
                dest_qp_num: self.number(1 - at),
                min_rnr_timer: 1,
                max_dest_rd_atomic: 1,
                ..ibv_qp_attr::default()
            };
            attr.ah_attr.is_global = 1;
            attr.ah_attr.port_num = 1;
            attr.ah_attr.grh.sgid_index = 1;
            attr.ah_attr.grh.dgid = ibv_gid { raw: gid };
            let mask = IBV_QP_STATE
                | IBV_QP_AV
                | IBV_QP_PATH_MTU
                | IBV_QP_DEST_QPN
                | IBV_QP_RQ_PSN
                | IBV_QP_MAX_DEST_RD_ATOMIC
                | IBV_QP_MIN_RNR_TIMER;
            self.modify(at, attr, mask);
            let attr = ibv_qp_attr {
                qp_state: IBV_QPS_RTS,
                timeout: 1,
                rnr_retry: 1,
                max_rd_atomic: 1,
                ..ibv_qp_attr::default()
            };
            let mask = IBV_QP_STATE
                | IBV_QP_SQ_PSN
                | IBV_QP_TIMEOUT
                | IBV_QP_RETRY_CNT
                | IBV_QP_RNR_RETRY
                | IBV_QP_MAX_QP_RD_ATOMIC;
            self.modify(at, attr, mask);
        }
        self
    }

    /// Eight bytes of the memory.
    fn bytes(&self, at: usize) -> [u8; 8] {
        std::array::from_fn(|k| self.memory[at + k].load(Ordering::Relaxed))
    }

    /// A scatter-gather entry of the memory.
    fn piece(&self, at: u64, length: u32) -> ibv_sge {
        // SAFETY: the region is alive during the call.
        let lkey = unsafe { (*self.mr).lkey };
        ibv_sge { addr: self.memory.as_ptr() as u64 + at, length, lkey }
    }

    fn rkey(&self) -> u32 {
        // SAFETY: the region is alive during the call.
        unsafe { (*self.mr).rkey }
    }

    /// Posts a write of `pieces` to the memory at offset 2048.
    fn write(&self, flags: u32, mut pieces: Vec<ibv_sge>, rkey: u32) -> i32 {
        let mut request = ibv_send_wr::zeroed();
        request.wr_id = 7;
        request.opcode = IBV_WR_RDMA_WRITE;
        request.send_flags = flags;
        (request.sg_list, request.num_sge) = (pieces.as_mut_ptr(), pieces.len() as i32);
        request.wr.rdma = ibv_wr_rdma { remote_addr: self.memory.as_ptr() as u64 + 2048, rkey };
        // SAFETY: the queue pair is alive, and the memory outlives the request.
        unsafe { ibv_post_send(self.pairs[0], &mut request, &mut null_mut()) }
    }

    fn send(&self, length: u32) {
        let mut piece = self.piece(0, length);
        let mut request = ibv_send_wr::zeroed();
        request.opcode = IBV_WR_SEND;
        (request.sg_list, request.num_sge) = (&mut piece, 1);
        // SAFETY: as above.
        assert_eq!(unsafe { ibv_post_send(self.pairs[0], &mut request, &mut null_mut()) }, 0);
    }

    fn receive(&self, length: u32) -> i32 {
        let mut piece = self.piece(1024, length);
        let mut request = ibv_recv_wr { wr_id: 9, next: null_mut(), sg_list: &mut piece, num_sge: 1 };
        // SAFETY: as above.
        unsafe { ibv_post_recv(self.pairs[1], &mut request, &mut null_mut()) }
    }

    /// Names and statuses of the next completions.
    fn completions(&self, count: usize) -> Vec<(u64, u32)> {
        let start = std::time::Instant::now();
        let mut came = Vec::new();
        while came.len() < count {
            let mut room = [ibv_wc::default(); 4];
            // SAFETY: the queue is alive during the call.
            let got = unsafe { ibv_poll_cq(self.cq, &mut room) };
            came.extend(room[..got.max(0) as usize].iter().map(|wc| (wc.wr_id, wc.status)));
            assert!(start.elapsed().as_secs() < 10, "only {came:?}");
        }
        came
    }

    /// Asserts that the fake has noted exactly this misuse.
    fn assert_misuse(&self, said: &str) {
        let misuses = self.fake.run("misuses");
        assert!(misuses.lines().count() == 1 && misuses.contains(said), "{said:?} is not: {misuses}");
    }

    fn close(self) {
        for pair in self.pairs {
            assert_eq!(call!(self, destroy_qp(pair)), 0);
        }
        assert_eq!(call!(self, dereg_mr(self.mr)), 0);
        assert_eq!(call!(self, destroy_cq(self.cq)), 0);
        assert_eq!(call!(self, destroy_comp_channel(self.channel)), 0);
        assert_eq!(call!(self, dealloc_pd(self.pd)), 0);
        assert_eq!(call!(self, close_device(self.context)), 0);
        self.fake.assert_clean();
    }
}

const ROOM: i32 = 100;

#[test]
fn bytes_move_and_completions_come() {
    needs_fake!();
    let raw = Raw::new(ROOM).connect();
    raw.memory.iter().zip(b"moved by").for_each(|(to, from)| to.store(*from, Ordering::Relaxed));
    assert_eq!(raw.write(IBV_SEND_SIGNALED, vec![raw.piece(0, 8)], raw.rkey()), 0);
    assert_eq!(raw.completions(1), [(7, IBV_WC_SUCCESS)]);
    assert_eq!(raw.bytes(2048), *b"moved by");
    assert_eq!(raw.receive(64), 0);
    raw.send(8);
    assert_eq!(raw.completions(1), [(9, IBV_WC_SUCCESS)]);
    assert_eq!(raw.bytes(1024), *b"moved by");
    raw.close();
}

#[test]
fn requests_fail_as_on_a_device() {
    needs_fake!();
    type Act = fn(&Raw);
    let cases: [(Act, &[(u64, u32)]); 6] = [
        (
            |raw| assert_eq!(raw.write(0, vec![raw.piece(0, 8)], raw.rkey() ^ 1), 0),
            &[(7, IBV_WC_REM_ACCESS_ERR)],
        ),
        (
            |raw| assert_eq!(raw.write(0, vec![raw.piece(0, 2049)], raw.rkey()), 0),
            &[(7, IBV_WC_REM_ACCESS_ERR)],
        ),
        (
            |raw| assert_eq!(raw.write(0, vec![raw.piece(4090, 8)], raw.rkey()), 0),
            &[(7, IBV_WC_LOC_PROT_ERR)],
        ),
        (|raw| raw.send(8), &[(0, IBV_WC_RNR_RETRY_EXC_ERR)]),
        (
            |raw| {
                assert_eq!(raw.receive(4), 0);
                raw.send(8);
            },
            &[(9, IBV_WC_LOC_LEN_ERR), (0, IBV_WC_REM_INV_REQ_ERR)],
        ),
        (
            |raw| {
                raw.fake.run("cut");
                raw.send(8);
                raw.send(8);
            },
            &[(0, IBV_WC_RETRY_EXC_ERR), (0, IBV_WC_WR_FLUSH_ERR)],
        ),
    ];
    for (act, expected) in cases {
        let raw = Raw::new(ROOM).connect();
        act(&raw);
        assert_eq!(raw.completions(expected.len()), expected);
        raw.close();
    }
}

#[test]
fn every_misuse_is_seen() {
    needs_fake!();
    type Act = fn(&mut Raw);
    let cases: [(Act, &str); 9] = [
        (
            |raw| {
                // A completion frees its place only when it is polled.
                let posted: Vec<i32> = (0..5).map(|_| raw.write(0, Vec::new(), 0)).collect();
                assert_eq!(posted, [0, 0, 0, 0, libc::ENOMEM]);
            },
            "more than the 4 requests that the send queue holds",
        ),
        (
            |raw| {
                assert_ne!(raw.write(IBV_SEND_INLINE, vec![raw.piece(0, 17)], raw.rkey()), 0);
            },
            "17 bytes inline, where 16 were granted",
        ),
        (
            |raw| {
                assert_ne!(raw.write(0, vec![raw.piece(0, 1), raw.piece(0, 1)], raw.rkey()), 0);
            },
            "2 pieces of memory",
        ),
        (
            |raw| {
                let posted: Vec<i32> = (0..5).map(|_| raw.receive(8)).collect();
                assert_eq!(posted, [0, 0, 0, 0, libc::ENOMEM]);
            },
            "more than the 4 receives",
        ),
        (
            |raw| {
                raw.receive(8);
                call!(raw, dereg_mr(raw.mr));
                raw.mr = call!(raw, reg_mr(raw.pd, raw.memory.as_ptr().cast_mut().cast(), 4096, WRITABLE));
            },
            "a region was ended that outstanding requests name",
        ),
        (
            |raw| {
                let relaxed = WRITABLE | IBV_ACCESS_RELAXED_ORDERING;
                assert!(
                    call!(raw, reg_mr(raw.pd, raw.memory.as_ptr().cast_mut().cast(), 64, relaxed)).is_null()
                );
            },
            "optional access flags without ibv_reg_mr_iova2",
        ),
        (
            |raw| {
                let windows = WRITABLE | IBV_ACCESS_MW_BIND;
                assert!(
                    call!(raw, reg_mr(raw.pd, raw.memory.as_ptr().cast_mut().cast(), 64, windows)).is_null()
                );
            },
            "a region with MW_BIND on a device without memory windows",
        ),
        (
            |raw| assert_ne!(call!(raw, close_device(raw.context)), 0),
            "a device was closed of which something is left",
        ),
        (|raw| assert_ne!(call!(raw, destroy_cq(raw.cq)), 0), "a completion queue was ended that is in use"),
    ];
    for (act, said) in cases {
        let mut raw = Raw::new(ROOM).connect();
        act(&mut raw);
        raw.assert_misuse(said);
        let left = raw.fake.run("left");
        assert_eq!(left, "contexts=1 domains=1 regions=1 channels=1 queues=1 pairs=2");
    }
}

#[test]
fn posting_in_the_wrong_state_is_seen() {
    needs_fake!();
    let raw = Raw::new(ROOM);
    assert_ne!(raw.receive(8), 0);
    raw.assert_misuse("a receive was posted in RESET");
    let raw = Raw::new(ROOM);
    raw.init();
    assert_eq!(raw.receive(8), 0, "in INIT receives may be posted");
    assert_ne!(raw.write(0, Vec::new(), 0), 0);
    raw.assert_misuse("a request was posted in state 1");
}

#[test]
fn completion_queues_that_are_too_small_are_seen_before_and_when_they_overrun() {
    needs_fake!();
    let raw = Raw::new(15);
    raw.assert_misuse("a completion queue of 15 can get 16 completions");
    let raw = Raw::new(2).connect();
    for _ in 0..3 {
        assert_eq!(raw.write(IBV_SEND_SIGNALED, Vec::new(), 0), 0);
    }
    let misuses = raw.fake.run("misuses");
    assert!(misuses.contains("a completion queue of 2 overran"), "{misuses}");
    let mut room = [ibv_wc::default(); 4];
    // SAFETY: the queue is alive during the call.
    assert!(unsafe { ibv_poll_cq(raw.cq, &mut room) } < 0, "it is broken");
}

#[test]
fn an_event_that_is_not_acknowledged_is_seen() {
    needs_fake!();
    let raw = Raw::new(ROOM).connect();
    // SAFETY: the queue is alive during the call.
    assert_eq!(unsafe { ibv_req_notify_cq(raw.cq, false) }, 0);
    assert_eq!(raw.write(IBV_SEND_SIGNALED, Vec::new(), 0), 0);
    let (mut cq, mut context) = (null_mut(), null_mut());
    assert_eq!(call!(raw, get_cq_event(raw.channel, &mut cq, &mut context)), 0);
    assert_eq!(cq, raw.cq);
    for pair in raw.pairs {
        assert_eq!(call!(raw, destroy_qp(pair)), 0);
    }
    assert_eq!(call!(raw, destroy_cq(raw.cq)), 0);
    raw.assert_misuse("a completion queue was ended whose events are not acknowledged");
}

#[test]
fn steps_that_are_not_allowed_are_refused() {
    needs_fake!();
    let raw = Raw::new(ROOM);
    let step = |qp_state, mask| {
        let mut attr = ibv_qp_attr { qp_state, port_num: 1, ..ibv_qp_attr::default() };
        call!(raw, modify_qp(raw.pairs[0], &mut attr, mask))
    };
    assert_eq!(step(IBV_QPS_RTS, IBV_QP_STATE), libc::EINVAL, "not from RESET");
    assert_eq!(step(IBV_QPS_INIT, IBV_QP_STATE | IBV_QP_PORT), libc::EINVAL, "without all that it needs");
    let all = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
    assert_eq!(step(IBV_QPS_INIT, all | IBV_QP_AV), libc::EINVAL, "with more than it may have");
    assert_eq!(step(IBV_QPS_INIT, all), 0);
    raw.fake.assert_no_misuse();
}
