//! The side that read_lat and write_bw read from and write to: it has nothing to answer.

use super::channel::Channel;
use super::fabrics::Measured;
use super::side::{Came, Side};
use super::workload::{Halt, Linger, Responder, Watch};
use crate::CliError;

/// Polls in a row, before it is looked whether the other side is done.
const POLLS: u32 = 256;

/// The passive side.
pub struct Passive<F: Measured> {
    side: Side<F>,
    watch: Watch,
    /// Why it looks at the link no more.
    failed: Option<String>,
}

impl<F: Measured> Passive<F> {
    /// One whose memory the other side has leave to use.
    pub fn new(side: Side<F>, channel: &Channel) -> Result<Self, CliError> {
        Ok(Passive { side, watch: channel.watch()?, failed: None })
    }
}

impl<F: Measured> Responder for Passive<F> {
    fn prepare(&mut self, _bytes: usize, _channel: &mut Channel) -> Result<(), CliError> {
        Ok(())
    }

    fn answer(&mut self, _watch: &Watch) -> Result<(), Halt> {
        self.failed.take().map_or(Ok(()), |why| Err(Halt::Failed(why)))
    }

    /// Where the fabric needs this side for what the other one does, it polls.
    fn linger(&mut self) -> Result<Linger, Halt> {
        if F::IS_ONE_SIDED || self.failed.is_some() {
            return Ok(Linger::Sleep);
        }
        let (mut wait, mut came) = (self.watch.wait(), Came::default());
        for _ in 0..POLLS {
            if let Err(halt) = self.side.poll(&mut wait, &mut came) {
                // It may be no more than that the other side is done: its next word tells.
                self.failed = Some(halt.to_string());
                break;
            }
        }
        Ok(Linger::Again)
    }
}
