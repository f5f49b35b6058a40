//! The passive side of read_lat and write_bw: it has nothing to answer.

use super::bare_link::{BareLink, PolledCompletions};
use super::control_channel::ControlChannel;
use super::fabrics::MeasuredFabric;
use super::peer_watch::{Abort, PeerWatch};
use super::workload::{KeepAlive, Responder};
use crate::error::CliError;

/// Polls between two checks of the channel.
const POLLS: u32 = 256;

/// The passive side.
pub struct Passive<F: MeasuredFabric> {
    side: BareLink<F>,
    watch: PeerWatch,
    /// Why it has stopped polling.
    failed: Option<String>,
}

impl<F: MeasuredFabric> Passive<F> {
    /// A side whose memory the other side may access.
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

    /// Polls if the fabric needs this side for the other's operations.
    fn keep_alive(&mut self) -> Result<KeepAlive, Abort> {
        if F::IS_ONE_SIDED || self.failed.is_some() {
            return Ok(KeepAlive::Sleep);
        }
        let (mut wait, mut received) = (self.watch.wait(), PolledCompletions::default());
        for _ in 0..POLLS {
            if let Err(halt) = self.side.poll(&mut wait, &mut received) {
                // Perhaps the other side has only ended its run: its next message tells.
                self.failed = Some(halt.to_string());
                break;
            }
        }
        Ok(KeepAlive::Poll)
    }
}
