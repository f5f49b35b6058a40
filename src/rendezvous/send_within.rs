//! [`Step::send_within`]: a send that waits for room.

use super::context::SLICE;
use super::edge::{Edge, EdgeEnd};
use super::step::{Sendable, Step};
use crate::matching::{Error, PeerIndex};
use crate::wire::Time;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// A send that was not done. It gives the value back.
///
/// One case is not certain: a step that has ended while the call waited for room. The value may
/// have left in between.
///
/// ```
/// # let node = tensorwire::internals::doc_node();
/// # use std::time::Duration;
/// # use tensorwire::{DType, Error};
/// let edge = node.edge_to("worker", 0, "x")?;
/// let step = node.step(1)?;
/// step.cleanup();
/// let tensor = node.tensor(DType::F32, &[4])?.freeze();
/// let failed = step.send_within(&edge, tensor, Duration::from_secs(1)).unwrap_err();
/// assert!(matches!(failed.error, Error::StepGone { .. }));
/// node.step(2)?.send(&edge, failed.value)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, thiserror::Error)]
#[error("the value was not sent: {error}")]
#[non_exhaustive]
pub struct SendError<V> {
    /// The value of the call.
    pub value: V,
    /// The reason. If there was no room in time, it is [`Error::ResourceExhausted`], or
    /// [`Error::NoRoom`] in the pool.
    #[source]
    pub error: Error,
}

impl<V> From<SendError<V>> for Error {
    fn from(failed: SendError<V>) -> Error {
        failed.error
    }
}

impl Step {
    /// Sends as [`Step::send`] does. If `max_outstanding_sends` is reached, or the pool has no room
    /// for a copy that the send needs, the call waits for room. It waits for `timeout` at most, and
    /// makes progress meanwhile. This slows down a producer that is faster than its peers.
    ///
    /// With a timeout of zero the call does not wait. Values of one edge are received in the order
    /// in which their calls return. Only calls of several threads that wait at the same time have
    /// no order.
    ///
    /// ```
    /// # let node = tensorwire::internals::doc_node();
    /// # use std::time::Duration;
    /// # use tensorwire::DType;
    /// let edge = node.edge_to("worker", 0, "x")?;
    /// let step = node.step(1)?;
    /// let tensor = node.tensor(DType::F32, &[4])?.freeze();
    /// if let Err(failed) = step.send_within(&edge, tensor, Duration::from_secs(10)) {
    ///     println!("a tensor of {} bytes is left: {}", failed.value.bytes().len(), failed.error);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Like [`Step::send`], and if there was no room in time. Also if the call has waited, and the
    /// step has ended meanwhile; then the value may have left before the end. The error gives the
    /// value back.
    pub fn send_within<V: Sendable + Clone>(
        &self,
        edge: &Edge,
        value: V,
        timeout: Duration,
    ) -> Result<(), SendError<V>> {
        let deadline = self.context.now() + timeout;
        let mut has_waited = false;
        loop {
            let error = match (self.send(edge, value.clone()), edge.destination) {
                // The end of the step makes room, too, and drops the value.
                (Ok(()), _) if has_waited => match self.check() {
                    Ok(()) => return Ok(()),
                    Err(error) => Some(error),
                },
                (Ok(()), _) => return Ok(()),
                (Err(error), EdgeEnd::Peer(peer))
                    if may_find_room(&error) && self.context.now() < deadline =>
                {
                    // Credit of the edge makes room without an end of the wait.
                    has_waited = true;
                    let next = deadline.min(self.context.now() + SLICE);
                    self.wait_for_room(peer, &error, next).err()
                }
                (Err(error), _) => Some(error),
            };
            if let Some(error) = error {
                return Err(SendError { value, error });
            }
        }
    }

    /// Waits until fewer values are outstanding than may be, or until `deadline`. The pool does not
    /// say when it has room again, so a wait for it lasts until `deadline`.
    fn wait_for_room(&self, peer: PeerIndex, shortage: &Error, deadline: Time) -> Result<(), Error> {
        let context = &*self.context;
        let limit = context.settings.max_outstanding_sends as usize;
        let is_counted = matches!(shortage, Error::ResourceExhausted { .. });
        let has_room = || is_counted && context.outstanding.load(Ordering::Relaxed) < limit;
        context.wait(context.paths.of(peer), deadline, &has_room).map(drop)
    }
}

/// Whether a later send may succeed.
fn may_find_room(error: &Error) -> bool {
    match error {
        Error::ResourceExhausted { .. } => true,
        Error::NoRoom { source, .. } => source.is_shortage(),
        _ => false,
    }
}
