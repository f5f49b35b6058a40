//! What a poller calls when a link has news.

use super::{LinkEvent, Links};
use crate::fabric::Port;
use crate::wire::Time;

/// The layer above: it receives the events of the links and the commands of its users.
///
/// No method may block.
pub trait Handler<P: Port>: Send + 'static {
    /// What its users submit.
    type Command: Send + 'static;

    /// Runs a command. Returned if it refers to a command of another thread that is still queued.
    /// The caller retries it after it has drained the queue.
    fn command(&mut self, links: &mut Links<P>, command: Self::Command, now: Time) -> Option<Self::Command>;

    /// Handles an event of a link.
    fn event(&mut self, links: &mut Links<P>, event: LinkEvent, now: Time);

    /// Called when no event is left. Resumes work that waited for room.
    fn after_events(&mut self, links: &mut Links<P>, now: Time) {
        let _ = (links, now);
    }

    /// Called before a poll. Sends what was put off.
    fn before_poll(&mut self, links: &mut Links<P>) {
        let _ = links;
    }

    /// The earliest time at which [`Handler::expire`] has something to do, or [`Time::NEVER`].
    fn next_deadline(&self) -> Time;

    /// Ends every wait whose deadline is `now` or earlier.
    fn expire(&mut self, links: &mut Links<P>, now: Time);
}
