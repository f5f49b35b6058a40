//! A bare ring of 64-byte slots, sequence word and payload in one line: a lower bound for a queue
//! of messages.

use super::control_channel::ControlChannel;
use super::layout::{MAX_RING_SLOTS, RING_PAYLOAD, Set, ring};
use super::peer_watch::{Abort, PeerWatch};
use super::workload::{Facts, Initiator, KeepAlive, Responder};
use crate::error::CliError;
use crate::reference::word_mapping::WordMapping;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Words of a slot: the sequence word, then the payload.
const WORDS: usize = 8;

/// One side: it produces into one ring and consumes from the other.
///
/// Message n lies in slot n modulo the number of slots. It is complete when the slot's sequence
/// word is n. A ping-pong never has more than one message in a ring, so no slot is overwritten
/// unread.
pub struct Ring64 {
    mapping: Arc<WordMapping>,
    outgoing: usize,
    incoming: usize,
    slots: u64,
    /// Messages sent and received so far, the first being number 1.
    count: u64,
    payload_words: usize,
}

impl Ring64 {
    /// The measuring side, with rings of `slots` slots.
    pub fn initiator(mapping: &Arc<WordMapping>, set: Set, slots: u32) -> Self {
        Self::new(mapping, set, slots, 0)
    }

    /// The answering side.
    pub fn responder(mapping: &Arc<WordMapping>, set: Set, slots: u32) -> Self {
        Self::new(mapping, set, slots, 1)
    }

    fn new(mapping: &Arc<WordMapping>, set: Set, slots: u32, side: usize) -> Self {
        assert!((1..=MAX_RING_SLOTS).contains(&slots), "the options allow no ring of {slots} slots");
        Ring64 {
            mapping: Arc::clone(mapping),
            outgoing: ring(set, side),
            incoming: ring(set, 1 - side),
            slots: u64::from(slots),
            count: 0,
            payload_words: 1,
        }
    }

    #[inline(always)]
    fn slot(&self, ring: usize, number: u64) -> &[AtomicU64] {
        self.mapping.words(ring + (number % self.slots) as usize * WORDS * 8, WORDS)
    }

    #[inline(always)]
    fn send(&self, number: u64) {
        let slot = self.slot(self.outgoing, number);
        for word in &slot[1..=self.payload_words] {
            word.store(number, Ordering::Relaxed);
        }
        slot[0].store(number, Ordering::Release);
    }

    #[inline(always)]
    fn receive(&self, number: u64, watch: &PeerWatch) -> Result<(), Abort> {
        let slot = self.slot(self.incoming, number);
        let mut wait = watch.wait();
        while slot[0].load(Ordering::Acquire) != number {
            wait.again()?;
        }
        for word in &slot[1..=self.payload_words] {
            black_box(word.load(Ordering::Relaxed));
        }
        Ok(())
    }

    fn resize(&mut self, bytes: usize) {
        self.payload_words = bytes.div_ceil(8).clamp(1, RING_PAYLOAD / 8);
    }
}

impl Initiator for Ring64 {
    fn prepare(&mut self, bytes: usize, _channel: &mut ControlChannel) -> Result<(), CliError> {
        self.resize(bytes);
        Ok(())
    }

    fn round_trip(&mut self, watch: &PeerWatch) -> Result<(), Abort> {
        self.count += 1;
        self.send(self.count);
        self.receive(self.count, watch)
    }

    fn facts(&self) -> Facts {
        Facts {
            fabric: "none (a bare shared ring)".into(),
            fabric_reason: None,
            device: None,
            pages: "base pages".into(),
            poll_mode: "spin".into(),
            inline_bytes: RING_PAYLOAD as u64,
            depth: self.slots,
            mtu: None,
        }
    }
}

impl Responder for Ring64 {
    fn prepare(&mut self, bytes: usize, _channel: &mut ControlChannel) -> Result<(), CliError> {
        self.resize(bytes);
        Ok(())
    }

    fn answer(&mut self, watch: &PeerWatch) -> Result<(), Abort> {
        self.count += 1;
        self.receive(self.count, watch)?;
        self.send(self.count);
        Ok(())
    }

    fn keep_alive(&mut self) -> Result<KeepAlive, Abort> {
        Ok(KeepAlive::Poll)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::layout::MAPPING_BYTES;

    #[test]
    fn messages_go_round_a_ring_several_times_with_their_payload() {
        let mapping = Arc::new(WordMapping::create(MAPPING_BYTES).unwrap().0);
        let watch = PeerWatch::without_peer();
        let mut answering = Ring64::responder(&mapping, Set::Reference, 4);
        let mut measuring = Ring64::initiator(&mapping, Set::Reference, 4);
        answering.resize(RING_PAYLOAD);
        measuring.resize(RING_PAYLOAD);
        std::thread::scope(|scope| {
            scope.spawn(|| (0..50).for_each(|_| answering.answer(&watch).unwrap()));
            (0..50).for_each(|_| measuring.round_trip(&watch).unwrap());
        });
        let newest: Vec<u64> =
            measuring.slot(measuring.incoming, 50).iter().map(|word| word.load(Ordering::Relaxed)).collect();
        assert_eq!(newest, [50; WORDS]);
        let oldest = measuring.slot(measuring.incoming, 51)[0].load(Ordering::Relaxed);
        assert_eq!(oldest, 47, "four slots hold the last four messages");
    }
}
