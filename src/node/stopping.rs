//! The end of a node, and what becomes of the values that it has sent.

use super::error::NodeError;
use super::process::{Node, NodeState, PeerReport, PeerState};
use crate::matching::Untaken;
use crate::rendezvous::Error;
use crate::wire::LossCause;
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

impl Node {
    /// Waits until receives have taken every value that this node has sent, for `timeout` at most,
    /// and makes progress meanwhile. Values that other threads send meanwhile count too. Returns
    /// the values that were not taken, and is [empty](Untaken::is_empty) if there are none. A
    /// timeout of zero only looks.
    ///
    /// A value whose step was cleaned up or aborted here is not waited for. Nor is one that has
    /// left, if its receiver has ended the step. The call also ends when only values for peers
    /// without a link are left. Values that had left for a peer whose life ends meanwhile are
    /// reported as lost.
    ///
    /// Each edge costs one message in each direction, and one for each value that is taken
    /// meanwhile. A look asks the peers, but does not wait for their answers. So it may
    /// report values that were taken of late.
    ///
    /// ```
    /// # let node = tensorwire::internals::doc_node();
    /// # use std::time::Duration;
    /// let (to, from) = (node.edge_to("worker", 0, "x")?, node.edge_from("worker", 0, "x")?);
    /// let step = node.step(1)?;
    /// step.send(&to, node.tensor(tensorwire::DType::F32, &[4])?.freeze())?;
    /// step.recv(&from, Duration::from_secs(1))?;
    /// let untaken = node.flush(Duration::from_secs(10))?;
    /// assert!(untaken.is_empty(), "{untaken}");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the node has stopped, or the loss of a peer has ended every call.
    pub fn flush(&self, timeout: Duration) -> Result<Untaken, Error> {
        self.context.flush(timeout)
    }

    /// Stops the node. Connected peers get the values that were sent, for `stop_timeout` at most.
    /// Then pending calls fail, the peers are told, every thread ends, and every link is closed.
    /// Memory stays as long as tensors in it are held.
    ///
    /// A second call drops nothing, and returns when the first one has ended. The first one waits
    /// for callbacks, and for the drops of owners of foreign memory. So in one of those a second
    /// call returns at once.
    ///
    /// Returns the values that the stop has dropped: those that never left, and those that left and
    /// are not known to be taken. Peers tell late which values they took, and a stop does not ask
    /// them: [`Node::flush`] does. A value that another thread sends during the call may be dropped
    /// without being reported. After a panic of a poller the values are not known: a warning says
    /// so, and none is reported.
    ///
    /// # Errors
    /// If the bootstrap service did not end in time. The values that never left are logged then.
    pub fn stop(&self) -> Result<Untaken, NodeError> {
        self.check_home()?;
        // Tells the peers which steps have ended.
        let _ = self.context.progress();
        self.drain();
        self.stop_because(&self.why_it_stops())
    }

    /// What the peers are told by a stop. A node that stops because of a failure names the cause,
    /// so that nobody takes this node for it.
    fn why_it_stops(&self) -> String {
        if let Some(error) = self.context.failure() {
            let is_lost = |peer: &PeerReport| matches!(peer.state, PeerState::Lost(_));
            let lost = self.peers().into_iter().filter(is_lost).map(|peer| peer.task.to_string());
            return stopped_because_of(&error, &lost.collect::<Vec<_>>());
        }
        let failed = self.failed_join.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match failed {
            Some(why) if self.bootstrap.state() != NodeState::Connected => {
                format!("it gave up its join: {why}")
            }
            _ => LossCause::STOPPED.to_owned(),
        }
    }

    /// Makes progress as long as a peer is connected, and values are left or on their way to it.
    /// While values wait and none leaves, it polls less and less often, and leaves the CPU to
    /// threads that compute. The goodbye goes another way than the values, and must not overtake
    /// them.
    fn drain(&self) {
        const POLL: Duration = Duration::from_micros(50);
        const MAX_SLEEP: Duration = Duration::from_millis(1);
        let left = || self.outstanding.load(Ordering::Relaxed);
        let end = self.context.now() + self.stop_timeout;
        let (mut sleep, mut before) = (POLL, left());
        loop {
            let peers = self.peers();
            if self.context.now() >= end || !peers.iter().any(is_connected) {
                return;
            }
            // To look at all edges costs more than a poll, so it is for when nothing leaves.
            let waits_for_gone = before > 0 && sleep == MAX_SLEEP && !peers.iter().all(is_connected);
            let is_over = before == 0 || waits_for_gone && self.leaving().is_ok_and(|count| count == 0);
            // A poller that is unusable sends nothing more.
            if is_over && self.context.is_flushed().unwrap_or(true) {
                return;
            }
            let next = end.min(self.context.now() + POLL);
            let waited = match before {
                // The peer makes room for more of what was sent.
                0 => self.context.progress().map(|_| false),
                _ => self.context.wait_until(next, &|| left() == 0),
            };
            match waited {
                Ok(false) => std::thread::sleep(sleep.min(end.since(self.context.now()))),
                Ok(true) => {}
                Err(_) => return,
            }
            sleep = if left() < before || left() == 0 { POLL } else { MAX_SLEEP.min(sleep * 2) };
            before = left();
        }
    }

    /// Values that wait here for a peer that is linked, or are on their way out.
    fn leaving(&self) -> Result<u64, Error> {
        let untaken = self.context.untaken(false, &mut Vec::new())?;
        let linked = untaken.edges.iter().filter(|edge| edge.is_linked && edge.peer() != self.task());
        Ok(untaken.moving as u64 + linked.map(|edge| edge.waiting).sum::<u64>())
    }

    /// Stops after an error: peers are told the reason, and their calls fail with it. Returns the
    /// dropped values, as [`Node::stop`] does. Does nothing after another stop, with the waits of a
    /// second [`Node::stop`].
    ///
    /// # Errors
    /// If the bootstrap service did not end in time.
    pub fn fail(&self, reason: &str) -> Result<Untaken, NodeError> {
        self.stop_because(reason)
    }

    fn stop_because(&self, reason: &str) -> Result<Untaken, NodeError> {
        self.check_home()?;
        let Some(mut stopped) = self.lock_stopped() else { return Ok(Untaken::default()) };
        if std::mem::replace(&mut *stopped, true) {
            return Ok(Untaken::default());
        }
        let _ = self.stopping.set(std::thread::current().id());
        let dropped = self.context.untaken(false, &mut Vec::new()).unwrap_or_else(|error| {
            tracing::warn!("which values the stop drops is not known: {error}");
            Untaken::default()
        });
        let lost = match self.context.failure() {
            Some(Error::PeerLost { peer, .. }) => Some(peer),
            _ => None,
        };
        self.context.end(Error::Stopped);
        // Each poller answers after it has ended the calls. The peers hear of the stop only then,
        // so nothing that they do becomes the reason of a call's end.
        let _ = self.context.untaken(false, &mut Vec::new());
        self.events.end();
        // Before the links end: a peer whose link is closed looks whether it was told the reason.
        let ended = self.bootstrap.stop_after_loss(reason, lost, self.stop_timeout);
        self.pollers.close();
        self.store.end();
        // Callbacks first: a callback may wait for the end of an owner.
        self.executor.stop();
        self.owners.stop();
        if ended.is_err() {
            log_dropped(&dropped);
        }
        ended?;
        Ok(dropped)
    }

    /// Waits for a stop by another thread. `None` if that stop waits for this thread, which runs a
    /// callback or drops an owner, or is the thread of that stop.
    fn lock_stopped(&self) -> Option<MutexGuard<'_, bool>> {
        let is_stopping = || self.stopping.get() == Some(&std::thread::current().id());
        let is_awaited = || self.executor.is_current() || self.owners.is_current() || is_stopping();
        match self.stopped.try_lock() {
            Ok(stopped) => Some(stopped),
            Err(TryLockError::Poisoned(error)) => Some(error.into_inner()),
            Err(TryLockError::WouldBlock) if is_awaited() => None,
            Err(TryLockError::WouldBlock) => {
                Some(self.stopped.lock().unwrap_or_else(PoisonError::into_inner))
            }
        }
    }
}

fn is_connected(peer: &PeerReport) -> bool {
    matches!(peer.state, PeerState::Connected)
}

/// What a node tells its peers that stops because of this loss. If the lost peer has stopped for
/// the same reason, its words are passed on, with the name of the first peer that said them. So the
/// first cause is in the words of each member of a chain. A first peer that is not among the `lost`
/// ones may be well: then who says so is named too.
fn stopped_because_of(loss: &Error, lost: &[String]) -> String {
    const AS: &str = "it stopped, as ";
    const SAID: &str = " did, which said: ";
    let is_lost = |name: &str| lost.iter().any(|lost| lost == name);
    let Error::PeerLost { peer, cause, .. } = loss else { return format!("{AS}{loss}") };
    match cause {
        LossCause::Left(reason) => match reason.strip_prefix(AS) {
            Some(why) if why.split_once(SAID).is_some_and(|(first, _)| is_lost(first)) => reason.clone(),
            Some(why) => format!("{AS}{peer}{SAID}{why}"),
            None => format!("{AS}{loss}"),
        },
        LossCause::Local(why) => format!("{AS}it could not keep its link with {peer}: {why}"),
        _ => format!("{AS}{loss}"),
    }
}

/// Logs the values that a stop has dropped, for a caller that does not get them. Values that left
/// are not known to be taken until later, so they are no news.
fn log_dropped(dropped: &Untaken) {
    if dropped.waiting() > 0 {
        let listed = dropped.to_string().replace('\n', "; ");
        tracing::warn!("the node stopped before some values had left: {listed}. Call Node::flush first");
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if self.fork_guard.in_child() {
            // The threads don't exist in the child, their locks may be held for ever, and the
            // parent uses the same descriptors. So nothing is dropped.
            std::mem::forget((self.context.clone(), self.pollers.clone(), self.bootstrap.clone()));
            std::mem::forget((self.executor.clone(), self.owners.clone(), self.store.clone()));
            return;
        }
        let ended = match std::thread::panicking() {
            true => self.fail("a thread of it panicked"),
            false => self.stop(),
        };
        match ended {
            Ok(dropped) => log_dropped(&dropped),
            Err(error) => tracing::warn!(%error, "the node did not stop cleanly"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Incarnation, TaskId};

    #[test]
    fn words_about_a_third_member_are_passed_on_with_the_name_of_who_says_them() {
        let said = |words: &str| Error::PeerLost {
            peer: TaskId::new("w", 1).expect("a job name"),
            incarnation: Incarnation::new(7).expect("not 0"),
            cause: LossCause::Left(words.into()),
        };
        let chain = "it stopped, as w/2 did, which said: the disk is full";
        let told = |lost: &[&str]| {
            let lost: Vec<String> = lost.iter().map(|name| (*name).into()).collect();
            stopped_because_of(&said(chain), &lost)
        };
        assert_eq!(told(&["w/1", "w/2"]), chain);
        let with_speaker = "it stopped, as w/1 did, which said: w/2 did, which said: the disk is full";
        assert_eq!(told(&["w/1"]), with_speaker, "w/2 is well, as far as is known here");
        assert!(stopped_because_of(&said("the disk is full"), &[]).contains("w/1"));
    }
}
