//! One atomic cache line bounced between two processes: a lower bound for any message.

use super::control_channel::ControlChannel;
use super::layout::{Set, line};
use super::peer_watch::{Abort, PeerWatch};
use super::workload::{Facts, Initiator, KeepAlive, Responder};
use crate::error::CliError;
use crate::reference::word_mapping::WordMapping;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// One side of the ping-pong. The initiator writes odd numbers, the responder the even ones after
/// them.
pub struct CacheLine {
    mapping: Arc<WordMapping>,
    offset: usize,
    /// The last number that this side has read or written.
    value: u64,
}

impl CacheLine {
    /// A side of the set's line, which nobody has used before.
    pub fn new(mapping: &Arc<WordMapping>, set: Set) -> Self {
        CacheLine { mapping: Arc::clone(mapping), offset: line(set), value: 0 }
    }

    #[inline(always)]
    fn line(&self) -> &AtomicU64 {
        &self.mapping.words(self.offset, 1)[0]
    }

    #[inline(always)]
    fn wait_for(&self, value: u64, watch: &PeerWatch) -> Result<(), Abort> {
        let line = self.line();
        let mut wait = watch.wait();
        // No pause instruction: on some processors it costs as much as the transfer.
        while line.load(Ordering::Acquire) != value {
            wait.again()?;
        }
        Ok(())
    }
}

impl Initiator for CacheLine {
    fn prepare(&mut self, _bytes: usize, _channel: &mut ControlChannel) -> Result<(), CliError> {
        Ok(())
    }

    fn round_trip(&mut self, watch: &PeerWatch) -> Result<(), Abort> {
        self.line().store(self.value + 1, Ordering::Release);
        self.wait_for(self.value + 2, watch)?;
        self.value += 2;
        Ok(())
    }

    fn facts(&self) -> Facts {
        Facts {
            fabric: "none (one shared cache line)".into(),
            fabric_reason: None,
            device: None,
            pages: "base pages".into(),
            poll_mode: "spin".into(),
            inline_bytes: 8,
            depth: 1,
            mtu: None,
        }
    }
}

impl Responder for CacheLine {
    fn prepare(&mut self, _bytes: usize, _channel: &mut ControlChannel) -> Result<(), CliError> {
        Ok(())
    }

    fn answer(&mut self, watch: &PeerWatch) -> Result<(), Abort> {
        self.wait_for(self.value + 1, watch)?;
        self.line().store(self.value + 2, Ordering::Release);
        self.value += 2;
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
    fn every_ping_is_answered_once() {
        let mapping = Arc::new(WordMapping::create(MAPPING_BYTES).unwrap().0);
        let watch = PeerWatch::without_peer();
        let mut answering = CacheLine::new(&mapping, Set::Reference);
        let mut measuring = CacheLine::new(&mapping, Set::Reference);
        std::thread::scope(|scope| {
            scope.spawn(|| (0..50).for_each(|_| answering.answer(&watch).unwrap()));
            (0..50).for_each(|_| measuring.round_trip(&watch).unwrap());
        });
        assert_eq!(measuring.line().load(Ordering::Relaxed), 100);
        assert_eq!((measuring.value, answering.value), (100, 100));
    }
}
