//! How connections break and are replaced, and how a link ends.

use super::frame::FrameError;
use super::frame::GoodbyeReason;
use super::io::Sockets;
use super::link::{MainEnd, TcpLinkInner, TcpLinkPhase};
use super::session::RepairOutcome;
use super::violation::TcpViolation;
use crate::fabric::{Completions, Event, LinkFailure};
use rustix::io::Errno;
use std::net::Shutdown;

/// Why a poll can't go on.
pub(super) enum LinkEnd {
    /// The connections are broken, and can be replaced.
    Broken(MainEnd),
    /// Nothing can be repaired, or the peer has said goodbye.
    Failed(LinkFailure),
}

impl From<LinkFailure> for LinkEnd {
    fn from(why: LinkFailure) -> Self {
        LinkEnd::Failed(why)
    }
}

impl From<TcpViolation> for LinkEnd {
    fn from(violation: TcpViolation) -> Self {
        LinkEnd::Failed(violation.into())
    }
}

impl From<FrameError> for LinkEnd {
    fn from(error: FrameError) -> Self {
        LinkEnd::Failed(error.into())
    }
}

impl TcpLinkInner {
    /// The connections are of no use any more. The link waits for others.
    #[cold]
    pub(super) fn break_off(&mut self, end: MainEnd, out: &mut Completions) {
        if let Err(LinkEnd::Failed(why)) = self.retire(out) {
            return self.go_down(why, out);
        }
        tracing::debug!(peer = %self.peer, %end, "the connections to a peer broke");
        self.out.abandon();
        self.forget_incoming();
        let (_, acknowledged, _) = self.out.kept.counts();
        let progress = Some((self.out.received.count(), acknowledged));
        let has_progress = std::mem::replace(&mut self.progress, progress) != progress;
        if !end.is_of_peer() {
            self.network_end = Some(end);
        }
        self.phase = TcpLinkPhase::Broken(end);
        self.session.repair(has_progress, end.was_silent());
    }

    /// What has come of a frame that is not complete comes again.
    fn forget_incoming(&mut self) {
        self.received.clear();
        (self.incoming, self.skip, self.main_end) = (None, 0, None);
    }

    /// Takes the outcome of a repair.
    #[cold]
    pub(super) fn end_repair(&mut self, out: &mut Completions) {
        let Some(outcome) = self.session.take_outcome().filter(|_| self.is_up()) else { return };
        match (outcome, &self.phase) {
            (RepairOutcome::Connected(sockets, _), _) => self.replace_connections(sockets, out),
            (RepairOutcome::Gone, TcpLinkPhase::Broken(_)) => self.go_down(self.refused(), out),
            (RepairOutcome::GivenUp(lack), &TcpLinkPhase::Broken(end)) => {
                self.go_down(self.given_up(end, lack), out);
            }
            (RepairOutcome::Overdue, TcpLinkPhase::Cut) => {
                self.break_off(MainEnd::Broken(Errno::TIMEDOUT), out);
            }
            // The connections will say so themselves, behind what they still have.
            (RepairOutcome::Gone | RepairOutcome::GivenUp(_) | RepairOutcome::Overdue, _) => {}
        }
    }

    /// Goes on with connections that the peer has proven to be its own.
    fn replace_connections(&mut self, sockets: Sockets, out: &mut Completions) {
        self.forget_incoming();
        self.may_read = true;
        self.is_registered = false;
        self.phase = TcpLinkPhase::Resuming;
        if !self.out.replace(sockets) {
            let end = self.out.error().map_or(MainEnd::Closed, MainEnd::Broken);
            self.break_off(end, out);
        }
    }

    /// The peer has said what it lacks.
    pub(super) fn resume(&mut self, out: &mut Completions) -> Result<(), LinkEnd> {
        self.out.release()?;
        self.out.resume();
        self.phase = TcpLinkPhase::Up;
        self.network_end = None;
        self.session.resumed();
        out.push(self.id, Event::Repaired);
        Ok(())
    }

    /// Ends the link from this side. The next poll reports it.
    #[cold]
    pub(super) fn fail(&mut self, why: LinkFailure) {
        if self.is_up() {
            self.leave(&why);
            self.phase = TcpLinkPhase::Failing(why);
        }
    }

    /// Says goodbye. What was not sent of large writes never will be.
    fn leave(&mut self, why: &LinkFailure) {
        let reason = match why {
            LinkFailure::Resources(_) => GoodbyeReason::Resources,
            LinkFailure::Protocol(_) => GoodbyeReason::Protocol,
            LinkFailure::NoReceive => GoodbyeReason::NoReceive,
            _ => GoodbyeReason::Closed,
        };
        self.session.end();
        self.out.bulk.clear();
        self.out.kept.release_tensors();
        self.answers.clear();
        self.out.say_goodbye(reason);
        self.out.sockets.bulk.iter().for_each(|socket| _ = socket.shutdown(Shutdown::Write));
        self.finish_leaving();
    }

    /// Ends the main connection once all is sent.
    fn finish_leaving(&mut self) {
        self.out.kept.flush(&self.out.sockets.main);
        if self.out.is_done() {
            self.out.sockets.shut_down();
        }
    }

    #[cold]
    pub(super) fn poll_without_connection(&mut self, out: &mut Completions) -> bool {
        match &self.phase {
            TcpLinkPhase::Failing(why) => {
                let why = why.clone();
                self.finish_leaving();
                self.report_down(why, out);
                true
            }
            TcpLinkPhase::Down => {
                self.finish_leaving();
                false
            }
            _ => false,
        }
    }

    /// Ends the link: everything outstanding completes, then `Down`.
    #[cold]
    pub(super) fn go_down(&mut self, why: LinkFailure, out: &mut Completions) {
        // What is wrong with an acknowledgement matters no more.
        let _ = self.retire(out);
        self.leave(&why);
        self.report_down(why, out);
    }

    fn report_down(&mut self, why: LinkFailure, out: &mut Completions) {
        let failed = self.held.len() + self.reads.fail_all();
        self.held.clear();
        self.sent = 0;
        self.ends.clear();
        self.incoming = None;
        self.phase = TcpLinkPhase::Down;
        (0..failed).for_each(|_| out.push(self.id, Event::Failed));
        out.push(self.id, Event::Down(why));
    }

    /// What follows from the end of the main connection without a goodbye.
    pub(super) fn ended(&self, end: MainEnd) -> LinkEnd {
        // The cause, if a send has met it before.
        let end = match (end, self.out.error()) {
            (MainEnd::Closed, Some(error)) => MainEnd::Broken(error),
            _ => end,
        };
        match end {
            MainEnd::Broken(error @ (Errno::NOBUFS | Errno::NOMEM)) => {
                LinkEnd::Failed(LinkFailure::Resources(format!(
                    "the connection to {} was given up: {error}; raise net.ipv4.tcp_mem, or free memory",
                    self.peer
                )))
            }
            end => LinkEnd::Broken(end),
        }
    }

    /// The failure of connections that broke, where the peer's host refuses others.
    fn refused(&self) -> LinkFailure {
        // A peer that gives the link up ends new connections too, if it has not resumed with them.
        let Some(end) = self.network_end else {
            return LinkFailure::PeerDied { pid: self.pid };
        };
        LinkFailure::Connection {
            peer: self.peer,
            error: format!("{end}, and its host refuses new connections"),
            cause: "its process has ended, or has given the link up: see its log",
        }
    }

    /// The failure of connections that nothing replaces.
    fn given_up(&self, end: MainEnd, lack: Option<Errno>) -> LinkFailure {
        if let Some(lack) = lack {
            let remedy = match lack {
                Errno::MFILE => "raise the limit of open files (ulimit -n)",
                Errno::NFILE => "raise fs.file-max",
                _ => "raise net.ipv4.tcp_mem, or free memory",
            };
            return LinkFailure::Resources(format!(
                "the connection to {} broke: {end}, and this process could make no new one: {lack}; {remedy}",
                self.peer
            ));
        }
        LinkFailure::Connection {
            peer: self.peer,
            error: format!("{end}, and no new connection could be made"),
            cause: "its host is down or cut off: check the network, and tcp_user_timeout",
        }
    }

    /// Tells the peer of the end of a link that is let go, unless it knows. What was posted before
    /// still leaves.
    pub(super) fn say_last_goodbye(&mut self) {
        if !self.is_up() {
            return;
        }
        if !self.out.kept.is_open() {
            return self.leave(&LinkFailure::Closed);
        }
        self.post_answers();
        self.out.forget_sent();
        self.out.say_goodbye(GoodbyeReason::Closed);
        self.out.pump(u64::MAX);
    }
}
