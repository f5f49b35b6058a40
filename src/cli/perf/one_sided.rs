//! The side that read_lat and write_bw read from and write to: it has nothing to answer.

use super::channel::Channel;
use super::fabrics::Measured;
use super::side::{Came, Side};
use super::workload::{Halt, Linger, Responder, Watch};
use crate::cli::CliError;

/// Polls in a row, before it is looked whether the other side is done.
const POLLS: u32 = 256;

/// The passive side.
pub struct Passive<F: Measured> {
    side: Side<F>,
    watch: Watch,
}

impl<F: Measured> Passive<F> {
    /// One whose memory the other side has leave to use.
    pub fn new(side: Side<F>, channel: &Channel) -> Result<Self, CliError> {
        Ok(Passive { side, watch: channel.watch()? })
    }
}

impl<F: Measured> Responder for Passive<F> {
    fn prepare(&mut self, _bytes: usize, _channel: &mut Channel) -> Result<(), CliError> {
        Ok(())
    }

    fn answer(&mut self, _watch: &Watch) -> Result<(), Halt> {
        Ok(())
    }

    /// Where the fabric needs this side for what the other one does, it polls.
    fn linger(&mut self) -> Result<Linger, Halt> {
        if F::IS_ONE_SIDED {
            return Ok(Linger::Sleep);
        }
        let (mut wait, mut came) = (self.watch.wait(), Came::default());
        for _ in 0..POLLS {
            self.side.poll(&mut wait, &mut came)?;
        }
        Ok(Linger::Again)
    }
}
