//! One atomic cache line bounced between two processes: the least that any message can cost.

use super::{LINE_APART, SharedMapping, set};
use crate::CliError;
use crate::perf::{Abort, ControlChannel, Facts, Initiator, KeepAlive, PeerWatch, Responder, Subject};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// One side of the ping-pong. The initiator writes odd numbers into the line, the responder the even ones after them.
pub struct CacheLine {
    shared: Arc<SharedMapping>,
    offset: usize,
    /// The newest number that this side has seen or written.
    value: u64,
}

impl CacheLine {
    /// A side of the line that this subject uses. The line must not have been used before.
    pub fn new(shared: &Arc<SharedMapping>, subject: Subject) -> Self {
        CacheLine { shared: Arc::clone(shared), offset: set(subject) * LINE_APART, value: 0 }
    }

    #[inline(always)]
    fn line(&self) -> &AtomicU64 {
        &self.shared.room(self.offset, 1)[0]
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

    /// What was sent lies in the mapping.
    fn keep_alive(&mut self) -> Result<KeepAlive, Abort> {
        Ok(KeepAlive::Again)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::MAPPING_BYTES;

    #[test]
    fn every_ping_is_answered_once() {
        let shared = Arc::new(SharedMapping::create(MAPPING_BYTES).unwrap().0);
        let watch = PeerWatch::without_other();
        let mut answering = CacheLine::new(&shared, Subject::CacheLine);
        let mut measuring = CacheLine::new(&shared, Subject::CacheLine);
        std::thread::scope(|scope| {
            scope.spawn(|| (0..50).for_each(|_| answering.answer(&watch).unwrap()));
            (0..50).for_each(|_| measuring.round_trip(&watch).unwrap());
        });
        assert_eq!(measuring.line().load(Ordering::Relaxed), 100);
        assert_eq!((measuring.value, answering.value), (100, 100));
    }
}
