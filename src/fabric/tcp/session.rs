//! What outlives the connections of a link: the watcher's part of it, which replaces connections
//! that broke, and the owner's handle.
#![allow(clippy::disallowed_types)] // for connections that broke, and links that begin or end

use super::connect::repair::SessionWatch;
use super::io::Sockets;
use super::watcher::TcpWatcherShared;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// The end of a repair.
pub(super) enum RepairOutcome {
    /// New connections, and their number.
    Connected(Sockets, u32),
    /// The peer's host refuses connections to it: its process has ended.
    Gone,
    /// Nobody has answered in time. The error says what this process lacks for a connection, if it
    /// does.
    GivenUp(Option<Errno>),
    /// The peer has not ended the rest of connections of which one was cut.
    Overdue,
}

/// Carries outcomes from the watcher to the link's owner. The newest one counts.
#[derive(Default)]
pub(super) struct RepairMailbox {
    outcome: Mutex<Option<RepairOutcome>>,
    has_outcome: AtomicBool,
    /// Whether the peer has gone on with the newest connections.
    pub has_resumed: AtomicBool,
    /// Readable when the port's owner is to look: see `PortWatch`.
    port: OnceLock<Arc<OwnedFd>>,
}

impl RepairMailbox {
    #[inline]
    pub(super) fn has_outcome(&self) -> bool {
        self.has_outcome.load(Ordering::Acquire)
    }

    /// Takes the newest outcome, if there is one.
    pub(super) fn take(&self) -> Option<RepairOutcome> {
        let mut outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        self.has_outcome.store(false, Ordering::Relaxed);
        outcome.take()
    }

    pub(super) fn deliver(&self, outcome: RepairOutcome) {
        *self.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
        self.has_outcome.store(true, Ordering::Release);
        if let Some(port) = self.port.get() {
            // It fails only where the count is full, and then the owner looks anyway.
            let _ = rustix::io::write(port, &1u64.to_ne_bytes());
        }
    }
}

/// What the owner of a link, or a new one, wants of the watcher.
pub(super) enum SessionOrder {
    Watch(u64, Box<SessionWatch>),
    /// The connections with this number are broken.
    Repair {
        session: u64,
        broken: u32,
        /// Whether frames have come, or were acknowledged, since they were made.
        has_progress: bool,
        /// Whether they may have been of no use for long before they broke.
        was_silent: bool,
    },
    /// One of the connections with this number was cut: the peer is to end the others.
    Cut {
        session: u64,
        number: u32,
    },
    Forget(u64),
}

/// A link's hold on its session. The drop ends it.
pub(super) struct TcpSession {
    mailbox: Arc<RepairMailbox>,
    watcher: Arc<TcpWatcherShared>,
    id: u64,
    /// Number of the present connections.
    number: u32,
    is_over: bool,
}

impl TcpSession {
    pub(super) fn new(watcher: &Arc<TcpWatcherShared>, watch: SessionWatch) -> Self {
        let (id, mailbox) = (watcher.next_session(), Arc::clone(&watch.mailbox));
        watcher.order(SessionOrder::Watch(id, Box::new(watch)));
        TcpSession { mailbox, watcher: Arc::clone(watcher), id, number: 0, is_over: false }
    }

    /// The mailbox, for tests that end a repair by themselves.
    #[cfg(test)]
    pub(super) fn mailbox(&self) -> &RepairMailbox {
        &self.mailbox
    }

    /// The link has a port now, whose owner looks when this is readable.
    pub(super) fn attached(&self, port: &Arc<OwnedFd>) {
        let _ = self.mailbox.port.set(Arc::clone(port));
    }

    #[inline]
    pub(super) fn has_outcome(&self) -> bool {
        self.mailbox.has_outcome()
    }

    pub(super) fn take_outcome(&mut self) -> Option<RepairOutcome> {
        let outcome = self.mailbox.take();
        if let Some(RepairOutcome::Connected(_, number)) = &outcome {
            self.number = *number;
        }
        outcome
    }

    /// Asks for new connections. An outcome follows.
    pub(super) fn repair(&self, has_progress: bool, was_silent: bool) {
        let (session, broken) = (self.id, self.number);
        self.watcher.order(SessionOrder::Repair { session, broken, has_progress, was_silent });
    }

    /// One of the connections was cut. An outcome follows, unless the peer ends the others in time.
    pub(super) fn cut(&self) {
        self.watcher.order(SessionOrder::Cut { session: self.id, number: self.number });
    }

    /// The peer has gone on with the present connections.
    pub(super) fn resumed(&self) {
        self.mailbox.has_resumed.store(true, Ordering::Relaxed);
    }

    /// Nobody listens any more, and nothing is repaired.
    pub(super) fn end(&mut self) {
        if !std::mem::replace(&mut self.is_over, true) {
            self.watcher.order(SessionOrder::Forget(self.id));
        }
    }
}

impl Drop for TcpSession {
    fn drop(&mut self) {
        self.end();
    }
}
