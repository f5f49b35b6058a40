//! A link to a hostile peer that writes anything into everything that it shares, while the honest
//! side goes on. For tests and fuzzing.
//!
//! The input is a program of commands for both sides. For any program: no panic, no endless poll,
//! no changed byte outside of grants, each operation completes once, and no memory is lost.

use super::hostile_peer::{HonestPeer, HostilePeer, HostileSetup, OPTIONS, connect_hostile_peer};
use super::record_reader::{EXPECTED, Read, RecordReader, change_messages};
use super::{tensor, tensor_mut};
use crate::fabric::shm::memory::order::{ORDER_WORDS, send_word};
use crate::fabric::shm::memory::ring::{CREDITS, TAIL};
use crate::fabric::shm::memory::slot::{FIRST, RingShape};
use crate::fabric::shm::memory::state;
use crate::fabric::shm::wakeup::doorbell::PLACES;
use crate::fabric::shm::wakeup::idle::{self, DoorbellRef};
use crate::fabric::words::StoreWords;
use crate::fabric::{Completions, Event, LentBytes, LinkFailure, LoanPermit, Port, ShortTake};
use crate::memory::Tensor;
use crate::wire::message::PlainRecord;
use crate::wire::{Grant, Immediate, SHORT_WORDS, ShortMessage, Slot};
use std::sync::atomic::Ordering::Release;

const MAX_COMMANDS: usize = 200;
/// Polls after which the peer's writes so far can cause nothing more.
const POLLS: usize = 64;
/// Bytes beside each grant, which must not change.
const GUARD: [u8; 64] = [0x55; 64];

thread_local! {
    /// Made once: each program leaves its pool empty.
    static SETUP: HostileSetup = HostileSetup::new();
}

/// The bytes of a program, followed by zeros.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (byte, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*byte)
    }

    fn u8(&mut self) -> u8 {
        self.byte().unwrap_or(0)
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|_| self.u8()))
    }

    /// A number that is small, near an end of its range, or arbitrary.
    fn number(&mut self) -> u64 {
        match self.u8() {
            small @ 0..=180 => u64::from(small),
            near @ 181..=200 => u64::MAX - u64::from(near - 181),
            page @ 201..=220 => u64::from(page - 200) << 16,
            _ => self.u64(),
        }
    }
}

/// The honest side and its invariants.
struct HonestOwner {
    honest: HonestPeer,
    /// Operations that have not completed.
    open: usize,
    grants: Vec<Grant>,
    exposed: Vec<Grant>,
    guards: Vec<Tensor>,
    /// Tensors that were lent to this side.
    borrowed: Vec<Event>,
    kept: Vec<LentBytes>,
    /// Tensors that were taken without a poll, each with its bytes then.
    copied: Vec<(Tensor, Vec<u8>)>,
    is_down: bool,
}

/// Runs a program.
pub fn hostile_peer(bytes: &[u8]) {
    SETUP.with(|setup| {
        run(setup, &mut Input(bytes));
        // What the peer is known to have taken stays lent until its process ends.
        setup.forget_peers();
        assert!(setup.pool.is_empty(), "tensors were left behind");
    });
}

fn run(setup: &HostileSetup, input: &mut Input<'_>) {
    let (honest, mut hostile) = connect_hostile_peer(setup);
    let mut owner = HonestOwner {
        honest,
        open: 0,
        grants: Vec::new(),
        exposed: Vec::new(),
        guards: Vec::new(),
        borrowed: Vec::new(),
        kept: Vec::new(),
        copied: Vec::new(),
        is_down: false,
    };
    for _ in 0..MAX_COMMANDS {
        let Some(command) = input.byte() else { break };
        match command % 16 {
            command @ 0..=7 => hostile.act(command, &owner.grants, &owner.exposed, input),
            15 if command >= 128 => owner.take(&hostile, input),
            command => owner.act(command, input),
        }
        if owner.is_down {
            break;
        }
    }
    owner.end(&mut hostile);
}

impl HostilePeer {
    fn act(&mut self, command: u8, grants: &[Grant], exposed: &[Grant], input: &mut Input<'_>) {
        match command {
            0 | 1 => self.order(grants, exposed, input),
            2 => self.record(input),
            3 => {
                let words = RingShape::new(OPTIONS.depth).words();
                self.ring.store(input.number() as usize % words, input.u64(), Release);
            }
            4 => {
                let word = [TAIL, CREDITS][usize::from(input.u8() % 2)];
                let near = self.inc.ack().wrapping_add(input.u8().into()).wrapping_sub(4);
                let value = if input.u8() < 200 { near.into() } else { input.u64() };
                self.line.store(word, value, Release);
            }
            5 => self.loan_table.store(usize::from(input.u8() % 8), input.number(), Release),
            6 => match input.u8() {
                0..=63 => self.state.store(0, input.number(), Release),
                64..=127 => self.state.store(idle::IDLE_MARK, input.u64(), Release),
                _ => {
                    let place = usize::from(input.u8()) % PLACES;
                    self.doorbells.ring(DoorbellRef { doorbell: input.u8().into(), place });
                }
            },
            _ => {
                for _ in 0..input.u8() % 8 {
                    if let Some(first) = self.inc.peek() {
                        self.inc.advance(first);
                    }
                }
                self.inc.tell();
            }
        }
    }

    /// Posts the record that the honest side waits for, or nearly.
    fn record(&mut self, input: &mut Input<'_>) {
        if self.out.has_room() != Ok(true) {
            return;
        }
        let data = vec![input.u8(); usize::from(input.u8()) % 40];
        let plain = PlainRecord { data: &data, ..EXPECTED };
        let Some(mut message) = plain.to_short().map(|message| message.read()) else { return };
        match input.u8() {
            0..=200 => {}
            201..=220 => message.len = usize::from(input.u8()),
            221..=230 => message.first ^= input.u64() as u32,
            other => message.words[usize::from(other) % SHORT_WORDS] ^= input.u64(),
        }
        let ShortMessage { len, first, words: [a, b, c, d, e, f] } = message;
        self.post_words([send_word(len, first), a, b, c, d, e, f, 0]);
    }

    /// Posts an order that may be allowed or not.
    fn order(&mut self, grants: &[Grant], exposed: &[Grant], input: &mut Input<'_>) {
        if self.out.has_room() != Ok(true) {
            return;
        }
        let (op, len) = (input.u8() % 8, input.u8());
        let mut words = [0; ORDER_WORDS];
        let kind = if input.u8() < 200 { input.u8() % 4 } else { input.u8() };
        let immediate = u64::from(kind) << 28 | u64::from(input.u8() % 4);
        let flags = u64::from(input.u8() % 4).min(if len > 250 { 3 } else { 1 });
        words[0] = u64::from(op) | flags << 8 | u64::from(len) << 16 | immediate << 32;
        let known = if op == 5 { exposed } else { grants };
        if let Some(grant) = known.get(usize::from(input.u8()) % known.len().max(1)) {
            words[1] = u64::from(grant.key) | u64::from(grant.region) << 32;
            words[2] = grant.offset.wrapping_add(input.u8().into()).wrapping_sub(u64::from(input.u8() % 3));
        }
        if input.u8() > 220 {
            words[usize::from(input.u8()) % 3] ^= input.u64();
        }
        words[3] = input.number();
        words[4] = if input.u8() < 200 { u64::from(input.u8() % 65) } else { input.number() };
        words[5] = if input.u8() < 220 { u64::from(input.u8() % 9) } else { input.number() };
        words[6] = input.number();
        self.post_words(words);
    }
}

fn immediate(input: &mut Input<'_>) -> Immediate {
    let slot = Slot::new(input.u8().into()).unwrap_or_else(|| unreachable!("8 bits are fewer than 20"));
    Immediate { generation: input.u8(), slot }
}

impl HonestOwner {
    fn act(&mut self, command: u8, input: &mut Input<'_>) {
        let link = self.honest.link;
        match command {
            8 => self.grant(input),
            9 => self.revoke(input),
            10 => self.expose(input),
            11 => self.post(input),
            12 => {
                let bytes = vec![7; usize::from(input.u8()).min(224)];
                let _ = self.honest.port.send(link, &bytes);
            }
            13 => {
                self.honest.port.publish_credits(link, input.number() as u32);
                let _ = self.honest.port.peer_credits(link);
                self.honest.port.arm();
            }
            14 => {
                self.borrowed.truncate(usize::from(input.u8() % 4));
                self.kept.clear();
            }
            _ => self.poll(),
        }
    }

    /// Takes a message without a poll, while the peer changes words of it.
    fn take(&mut self, hostile: &HostilePeer, input: &mut Input<'_>) {
        let (changed, value, shape) = (input.u8(), input.u64(), RingShape::new(OPTIONS.depth));
        let before = |k: usize| {
            if changed >> k & 1 == 1 {
                change_messages(&hostile.ring, shape, k, value);
            }
        };
        let HonestPeer { pool, port, link } = &mut self.honest;
        let reader = RecordReader { pool, before: &before, keeps: changed >> 7 == 1 };
        match port.take_short(*link, reader) {
            ShortTake::Taken(read) => {
                match read {
                    Read::Kept(bytes) => self.kept.push(bytes),
                    Read::Copied(tensor) => {
                        let bytes = tensor.bytes().to_vec();
                        self.copied.push((tensor, bytes));
                    }
                }
                port.post_receives(*link, 1);
            }
            ShortTake::Nothing | ShortTake::Other => {}
        }
    }

    fn grant(&mut self, input: &mut Input<'_>) {
        if self.grants.len() >= 8 {
            return;
        }
        let pool = &self.honest.pool;
        let before = tensor(pool, &GUARD);
        let target = tensor_mut(pool, usize::from(input.u8() % 65));
        self.guards.extend([before, tensor(pool, &GUARD)]);
        if let Ok(grant) = self.honest.port.grant(self.honest.link, target) {
            self.grants.push(grant);
        }
    }

    fn revoke(&mut self, input: &mut Input<'_>) {
        if self.grants.is_empty() {
            return;
        }
        let grant = self.grants.swap_remove(usize::from(input.u8()) % self.grants.len());
        let target = self.honest.port.revoke(self.honest.link, &grant);
        let target = target.expect("it was granted");
        assert_eq!(target.bytes().len() as u64, grant.len);
        // The memory belongs to this side now, so the peer may not write to it.
        let bytes = target.bytes().to_vec();
        self.poll();
        assert_eq!(target.bytes(), bytes);
    }

    fn expose(&mut self, input: &mut Input<'_>) {
        if let Some(grant) = self.exposed.pop() {
            self.honest.port.withdraw(self.honest.link, &grant);
        }
        let source = tensor(&self.honest.pool, &vec![3; usize::from(input.u8() % 65)]);
        self.exposed.extend(self.honest.port.expose(self.honest.link, &source));
    }

    /// Posts a write, a read or a loan.
    fn post(&mut self, input: &mut Input<'_>) {
        let link = self.honest.link;
        let len = usize::from(input.u8() % 65);
        let there = Grant { region: 0, key: 1, offset: 0, len: len as u64 };
        let source = tensor(&self.honest.pool, &vec![4; len]);
        let port = &mut self.honest.port;
        let is_posted = match input.u8() % 4 {
            0 => port.write(link, &source, len as u64, &there, Some(immediate(input))).is_ok(),
            1 | 2 => {
                let target = tensor_mut(&self.honest.pool, len);
                port.read(link, target, &there).is_ok()
            }
            _ => port
                .lend(
                    link,
                    &mut Some(source.clone()),
                    &mut Some(LoanPermit::unbounded()),
                    &ShortMessage::from_u32(1),
                )
                .is_ok(),
        };
        self.open += usize::from(is_posted);
    }

    fn poll(&mut self) {
        let mut completions = Completions::default();
        for _ in 0..POLLS {
            self.honest.port.poll(&mut completions);
            for (completion, message) in completions.drain() {
                assert_eq!(completion.link, self.honest.link);
                assert!(!self.is_down, "something came after the end: {:?}", completion.event);
                assert!(message.len() <= crate::fabric::MAX_MESSAGE);
                match completion.event {
                    Event::Done | Event::Failed | Event::ReadDone { .. } => {
                        self.open = self.open.checked_sub(1).expect("no operation completes twice");
                    }
                    Event::Lent { ref bytes, .. } => {
                        assert!(bytes.len() <= 1 << 20);
                        self.borrowed.push(completion.event);
                        self.honest.port.post_receives(self.honest.link, 1);
                    }
                    Event::Message(_) | Event::Immediate { .. } => {
                        self.honest.port.post_receives(self.honest.link, 1);
                    }
                    Event::Repaired => panic!("nothing of it is repaired"),
                    Event::Down(_) => self.is_down = true,
                }
            }
            completions.clear();
        }
        for guard in &self.guards {
            assert_eq!(guard.bytes(), GUARD, "a byte changed beside what was granted");
        }
        for (tensor, bytes) in &self.copied {
            assert_eq!(tensor.bytes(), bytes, "a tensor changed after it was taken");
        }
    }

    fn end(&mut self, hostile: &mut HostilePeer) {
        self.honest.port.fail(self.honest.link, LinkFailure::Closed);
        self.poll();
        assert!(self.is_down, "the link never went down");
        assert_eq!(self.open, 0, "operations that never completed");
        for grant in std::mem::take(&mut self.grants) {
            assert!(self.honest.port.revoke(self.honest.link, &grant).is_some(), "{grant:?} is lost");
        }
        self.borrowed.clear();
        self.kept.clear();
        self.copied.clear();
        self.guards.clear();
        // A peer that leaves without taking an order holds no loan.
        hostile.line.store(TAIL, u64::from(FIRST as u32), Release);
        state::leave(&hostile.state, &LinkFailure::Closed);
        self.honest.port.detach(self.honest.link);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        #[test]
        fn no_program_makes_the_honest_side_panic_or_lose_anything(
            program in proptest::collection::vec(any::<u8>(), 0..300),
        ) {
            hostile_peer(&program);
        }
    }
}
