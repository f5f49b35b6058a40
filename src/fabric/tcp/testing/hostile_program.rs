//! A program for a hostile peer, read from arbitrary bytes. Property tests and the fuzz target run
//! it.

use super::hostile_peer::{Got, TcpHostilePeer, Victim, meet};
use super::{pool, tensor, tensor_mut};
use crate::fabric::Port;
use crate::fabric::tcp::TcpOptions;
use crate::fabric::tcp::frame::{Frame, FrameTarget, PayloadCarrier};
use crate::wire::{Grant, Immediate, Slot};
use std::io::Write;
use std::net::Shutdown;

/// Bytes of the victim's tensors.
const TENSOR: usize = 4096;
/// Steps that a program has at most.
const STEPS: usize = 64;
/// Value of the bytes that no peer may change.
const CANARY: u8 = 0xC5;

/// Reads values from the front of a program. It ends in zeros.
struct Program<'a>(&'a [u8]);

impl Program<'_> {
    fn byte(&mut self) -> u8 {
        let (first, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        *first
    }

    fn word(&mut self) -> u64 {
        u64::from_le_bytes([(); 8].map(|()| self.byte()))
    }

    fn bytes(&mut self, count: usize) -> Vec<u8> {
        let (bytes, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        bytes.to_vec()
    }

    /// The honest value, or another.
    fn forged(&mut self, honest: u64) -> u64 {
        match self.byte() {
            0..=199 => honest,
            200..=219 => honest.wrapping_add(u64::from(self.byte())),
            220..=239 => honest.wrapping_sub(u64::from(self.byte())),
            240..=249 => self.word(),
            _ => u64::MAX,
        }
    }
}

/// The victim with what it has granted, and the peer.
struct ProgramScene {
    victim: Victim,
    peer: TcpHostilePeer,
    granted: Grant,
    exposed: Grant,
    /// How often the peer has made its connections again.
    dials: u32,
    is_down: bool,
}

impl ProgramScene {
    fn target(&self, program: &mut Program<'_>, to_read: bool) -> FrameTarget {
        let grant = if to_read { &self.exposed } else { &self.granted };
        FrameTarget {
            region: program.forged(grant.region.into()) as u16,
            key: program.forged(grant.key.into()) as u32,
            offset: program.forged(grant.offset),
        }
    }

    fn step(&mut self, program: &mut Program<'_>) {
        let by = if program.byte() & 1 == 0 { PayloadCarrier::Main } else { PayloadCarrier::Bulk };
        match program.byte() % 12 {
            0 => {
                let count = usize::from(program.byte());
                let bytes = program.bytes(count);
                self.peer.send_raw(&bytes);
            }
            1 => {
                let payload = vec![0xAB; usize::from(program.byte())];
                let len = program.forged(payload.len() as u64);
                let immediate = Immediate { generation: 1, slot: Slot::ZERO };
                let immediate = (program.byte() & 1 == 0).then_some(immediate);
                let target = self.target(program, false);
                self.peer.send(Frame::Write { target, len, immediate, by }, &[]);
                match by {
                    PayloadCarrier::Main => self.peer.send_raw(&payload),
                    PayloadCarrier::Bulk => _ = self.peer.bulk[0].write_all(&payload),
                }
            }
            2 => {
                let (source, len) = (self.target(program, true), program.forged(64));
                let ticket = program.byte().into();
                self.peer.send(Frame::Read { source, len, ticket }, &[]);
            }
            3 => {
                let payload = vec![0xCD; 32];
                let (ticket, len) = (program.forged(0) as u32, program.forged(32));
                self.peer.send(Frame::Answer { ticket, len, by }, &[]);
                match by {
                    PayloadCarrier::Main => self.peer.send_raw(&payload),
                    PayloadCarrier::Bulk => _ = self.peer.bulk[0].write_all(&payload),
                }
            }
            4 => {
                let message = vec![0xEF; usize::from(program.byte() % 225)];
                self.peer.send(Frame::Send { len: message.len() }, &message);
            }
            5 => self.peer.send(Frame::Credits { returned: program.word() as u32 }, &[]),
            6 => self.victim.port.post_receives(self.victim.link, 1),
            7 => _ = self.peer.bulk[0].shutdown(Shutdown::Write),
            8 => _ = self.peer.main.shutdown(Shutdown::Write),
            9 => {
                self.dials = self.dials.wrapping_add(1);
                let number = program.forged(self.dials.into());
                drop(self.peer.dial(number as u32));
                // Usually the victim has new connections when it is told what to send again.
                (0..program.byte() % 4).for_each(|_| std::thread::sleep(std::time::Duration::from_millis(1)));
                let frame = if program.byte() < 200 { Frame::Resume } else { Frame::Acknowledge };
                self.peer.send_raw(&frame.header(program.forged(0) as u32));
            }
            10 => self.peer.send_raw(&Frame::Acknowledge.header(program.forged(1) as u32)),
            _ => self.poll(),
        }
    }

    fn poll(&mut self) {
        for got in self.victim.poll() {
            assert!(!self.is_down, "an event of a link that is down: {got:?}");
            if let Got::Down(why) = got {
                assert!(why.to_string().len() < 512, "{why}");
                self.is_down = true;
            }
        }
    }
}

/// Runs a program. Whatever it does, the victim's link ends, and no byte changes that the peer may
/// not write.
pub fn hostile_peer(bytes: &[u8]) {
    let pool = pool();
    let canaries = [(); 2].map(|()| tensor(&pool, &[CANARY; TENSOR]));
    let (victim, peer) = meet(&pool, TcpOptions { main_bytes: 256, ..TcpOptions::default() });
    let link = victim.link;
    let mut scene = ProgramScene {
        victim,
        peer,
        granted: Grant { region: 0, key: 0, offset: 0, len: 0 },
        exposed: Grant { region: 0, key: 0, offset: 0, len: 0 },
        dials: 0,
        is_down: false,
    };
    let port = &mut scene.victim.port;
    scene.granted = port.grant(link, tensor_mut(&pool, TENSOR)).expect("room");
    let readable = tensor(&pool, &[1; TENSOR]);
    scene.exposed = port.expose(link, &readable).expect("room");
    // One read is outstanding.
    let nowhere = Grant { region: 0, key: 0, offset: 0, len: 32 };
    port.read(link, tensor_mut(&pool, 32), &nowhere).expect("posted");
    port.post_receives(link, 4);
    let mut program = Program(bytes);
    for _ in 0..STEPS {
        if program.0.is_empty() {
            break;
        }
        scene.step(&mut program);
    }
    scene.poll();
    let ends = [&scene.peer.main, &scene.peer.bulk[0]];
    ends.into_iter().for_each(|socket| _ = socket.shutdown(Shutdown::Both));
    if !scene.is_down {
        scene.victim.until_down();
    }
    assert!(canaries.iter().all(|canary| canary.bytes() == [CANARY; TENSOR]), "a byte changed");
    assert!(readable.bytes() == [1; TENSOR], "a byte changed that may only be read");
    assert_eq!(scene.victim.poll(), []);
    scene.victim.port.detach(link);
    assert!(readable.is_unique(), "held after the link's end");
}
