//! The side that read_lat and write_bw read from and write to: it has nothing to answer.

use super::bare_link::{BareLink, Received};
use super::control_channel::ControlChannel;
use super::fabrics::MeasuredFabric;
use super::workload::{Abort, KeepAlive, PeerWatch, Responder};
use crate::CliError;

/// Polls in a row, before it is looked whether the other side is done.
const POLLS: u32 = 256;

/// The passive side.
pub struct Passive<F: MeasuredFabric> {
    side: BareLink<F>,
    watch: PeerWatch,
    /// Why it looks at the link no more.
    failed: Option<String>,
}

impl<F: MeasuredFabric> Passive<F> {
    /// One whose memory the other side has leave to use.
    pub fn new(side: BareLink<F>, channel: &ControlChannel) -> Result<Self, CliError> {
        Ok(Passive { side, watch: channel.watch()?, failed: None })
    }
}

impl<F: MeasuredFabric> Responder for Passive<F> {
    fn prepare(&mut self, _bytes: usize, _channel: &mut ControlChannel) -> Result<(), CliError> {
        Ok(())
    }

    fn answer(&mut self, _watch: &PeerWatch) -> Result<(), Abort> {
        self.failed.take().map_or(Ok(()), |why| Err(Abort::Failed(why)))
    }

    /// Where the fabric needs this side for what the other one does, it polls.
    fn keep_alive(&mut self) -> Result<KeepAlive, Abort> {
        if F::IS_ONE_SIDED || self.failed.is_some() {
            return Ok(KeepAlive::Sleep);
        }
        let (mut wait, mut received) = (self.watch.wait(), Received::default());
        for _ in 0..POLLS {
            if let Err(halt) = self.side.poll(&mut wait, &mut received) {
                // It may be no more than that the other side is done: its next word tells.
                self.failed = Some(halt.to_string());
                break;
            }
        }
        Ok(KeepAlive::Again)
    }
}
