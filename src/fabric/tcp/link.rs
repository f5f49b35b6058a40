//! One link: its state and its polls. `post` has the operations of its owner, `receiving` what its
//! peer sends, `ending` how connections and the link end.

use super::ending::LinkEnd;
use super::frame::{Frame, LONG_HEADER, MAX_SEND, SHORT_HEADER};
use super::grants::{MAX_GRANTS, TcpGrants};
use super::incoming::IncomingPayload;
use super::io::{SocketRead, Sockets};
use super::outgoing::Outgoing;
use super::reads::{Answers, TcpPendingReads, TcpReadAnswer};
use super::receive_buffer::{RECEIVE_BYTES, ReceiveBuffer};
use super::send_buffer::KEPT_BYTES;
use super::session::TcpSession;
use crate::fabric::{Completions, Event, LinkFailure, LinkId, LinkLimits, LinkOptions, MAX_MESSAGE};
use crate::memory::{Pool, Tensor};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::fmt;
use std::net::SocketAddr;

#[derive(Debug)]
pub(super) enum TcpLinkPhase {
    Up,
    /// A bulk connection has ended amid a payload. What the main one still has is of no use, but
    /// for a goodbye.
    Cut,
    /// The connections are broken, and others are being made.
    Broken(MainEnd),
    /// There are new connections, and the peer has not yet said what it lacks.
    Resuming,
    /// This side has ended the link. The next poll reports it.
    Failing(LinkFailure),
    Down,
}

/// How the main connection has ended.
#[derive(Clone, Copy, Debug)]
pub(super) enum MainEnd {
    Closed,
    Broken(Errno),
}

impl MainEnd {
    /// Whether the peer's host has ended it. It does so when the process ends, as then its sockets
    /// are closed. A network that fails ends it in other ways.
    pub(super) fn is_of_peer(self) -> bool {
        matches!(self, MainEnd::Closed | MainEnd::Broken(Errno::CONNRESET | Errno::PIPE))
    }

    /// Whether the connection may have been of no use for long before. The kernel waits for signs
    /// of life, and then names what the network has said meanwhile.
    pub(super) fn was_silent(self) -> bool {
        let known = [Errno::CONNRESET, Errno::PIPE, Errno::CONNABORTED, Errno::NOTCONN];
        matches!(self, MainEnd::Broken(error) if !known.contains(&error))
    }
}

impl fmt::Display for MainEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MainEnd::Closed => f.write_str("it ended"),
            MainEnd::Broken(error) => error.fmt(f),
        }
    }
}

/// A write, until its completion is reported.
#[derive(Debug)]
pub(super) struct HeldWrite {
    /// Number of its frame.
    pub number: u64,
    /// Held until the peer has acknowledged the frame, and the caller knows.
    #[expect(dead_code, reason = "it is only held")]
    pub tensor: Tensor,
}

/// What a handshake leaves to make a link of.
pub(super) struct TcpLinkParts {
    pub sockets: Sockets,
    pub session: TcpSession,
    pub pool: Pool,
    /// The peer's process.
    pub pid: u32,
    pub peer: SocketAddr,
    pub main_bytes: u32,
    pub poll_bytes: u64,
}

/// Bytes of this side's buffers of a link, without those of the kernel.
pub(crate) fn link_bytes() -> u64 {
    (KEPT_BYTES + RECEIVE_BYTES) as u64
}

/// One link, as its port holds it.
pub(super) struct TcpLinkInner {
    pub limits: LinkLimits,
    pub id: LinkId,
    pub pool: Pool,
    pub phase: TcpLinkPhase,
    pub session: TcpSession,
    pub pid: u32,
    pub peer: SocketAddr,
    pub poll_bytes: u64,
    pub out: Outgoing,
    pub received: ReceiveBuffer,
    pub incoming: Option<IncomingPayload>,
    /// Payloads by bulk that have come whole.
    pub bulk_number: u64,
    /// Bytes of a payload that is of no use.
    pub skip: u64,
    pub main_end: Option<MainEnd>,
    /// Whether a read of the main connection may find something, as far as is known.
    pub may_read: bool,
    pub grants: TcpGrants,
    pub reads: TcpPendingReads,
    pub answers: Answers,
    pub held: VecDeque<HeldWrite>,
    /// Sent operations without a completion, whose places the next poll frees.
    pub sent: usize,
    /// Of those that the kernel has not taken wholly: where each ends in the send buffer.
    pub ends: VecDeque<u64>,
    /// Whether a post has found the queue full since there last was room.
    pub wants_room: bool,
    /// Posted receives.
    pub receives: u32,
    pub credits: u32,
    /// Credits that found no room.
    pub unsent_credits: Option<u32>,
    /// How many frames had come and were acknowledged when the connections last broke.
    pub progress: Option<(u64, u64)>,
    /// How the network last ended connections, if the peer has not resumed since.
    pub network_end: Option<MainEnd>,
    /// Whether the port's list of polled links has it, and how many of its polls found nothing.
    pub is_active: bool,
    pub quiet_polls: u32,
    pub is_registered: bool,
}

impl TcpLinkInner {
    pub(super) fn new(options: &LinkOptions, parts: TcpLinkParts) -> Self {
        let TcpLinkParts { sockets, session, pool, pid, peer, main_bytes, poll_bytes } = parts;
        let depth = options.depth;
        TcpLinkInner {
            limits: LinkLimits {
                depth,
                receives: 0, // early messages wait in the connection
                max_message: MAX_SEND,
                max_inline: MAX_MESSAGE,
                max_write: u64::MAX,
                lends: false,
                registers: false,
                grants: MAX_GRANTS as u32,
                max_grant: u64::MAX,
            },
            id: LinkId(0),
            pool,
            phase: TcpLinkPhase::Up,
            session,
            pid,
            peer,
            poll_bytes,
            out: Outgoing::new(sockets, depth, main_bytes),
            received: ReceiveBuffer::default(),
            incoming: None,
            bulk_number: 0,
            skip: 0,
            main_end: None,
            may_read: true,
            grants: TcpGrants::default(),
            reads: TcpPendingReads::new(depth),
            answers: Answers::new(depth),
            held: VecDeque::with_capacity(depth as usize),
            sent: 0,
            ends: VecDeque::with_capacity(depth as usize),
            wants_room: false,
            receives: 0,
            credits: 0,
            unsent_credits: None,
            progress: None,
            network_end: None,
            is_active: false,
            quiet_polls: 0,
            is_registered: false,
        }
    }

    #[inline]
    pub(super) fn is_up(&self) -> bool {
        !matches!(self.phase, TcpLinkPhase::Failing(_) | TcpLinkPhase::Down)
    }

    /// Whether there are connections to read.
    #[inline]
    fn is_connected(&self) -> bool {
        matches!(self.phase, TcpLinkPhase::Up | TcpLinkPhase::Resuming | TcpLinkPhase::Cut)
    }

    /// Whether the peer's kernel has everything that was posted, or never will.
    pub(super) fn is_flushed(&self) -> bool {
        let (posted, acknowledged, _) = self.out.kept.counts();
        match self.phase {
            _ if posted == acknowledged => true,
            TcpLinkPhase::Up => self.out.is_with_peers_kernel(),
            // What lacks is sent again.
            TcpLinkPhase::Cut | TcpLinkPhase::Broken(_) | TcpLinkPhase::Resuming => false,
            TcpLinkPhase::Failing(_) | TcpLinkPhase::Down => true,
        }
    }

    /// Operations that take a place of the queue.
    #[inline]
    pub(super) fn outstanding(&self) -> usize {
        self.held.len() + self.reads.len() + self.sent + self.ends.len()
    }

    /// Polls the link. Returns whether anything was done.
    #[inline]
    pub(super) fn poll(&mut self, out: &mut Completions) -> bool {
        if self.session.has_outcome() {
            self.end_repair(out);
        }
        if !self.is_connected() {
            return self.poll_without_connection(out);
        }
        let before = out.len();
        match self.poll_connections(out) {
            Ok(received) => received || out.len() > before,
            Err(LinkEnd::Broken(end)) => {
                self.break_off(end, out);
                true
            }
            Err(LinkEnd::Failed(why)) => {
                self.go_down(why, out);
                true
            }
        }
    }

    #[inline]
    fn poll_connections(&mut self, out: &mut Completions) -> Result<bool, LinkEnd> {
        self.retire(out)?;
        let received = self.receive(out)?;
        if self.has_output() {
            self.send(out)?;
        }
        if self.out.received.is_due(received) {
            self.out.acknowledge();
        }
        Ok(received)
    }

    #[inline]
    pub(super) fn has_output(&self) -> bool {
        !self.out.is_done() || !self.answers.is_empty() || self.unsent_credits.is_some()
    }

    /// Whether there is nothing that polls would go on with, as far as is known.
    pub(super) fn is_idle(&self) -> bool {
        !self.may_read
            && !self.has_output()
            && self.incoming.is_none()
            && self.held.is_empty()
            && self.main_end.is_none()
            && !self.out.received.is_awaited()
            && !matches!(self.phase, TcpLinkPhase::Broken(_))
    }

    /// Completes the writes that have arrived, and frees the places of sent operations.
    ///
    /// # Errors
    /// If the peer has acknowledged what was not sent.
    #[inline]
    pub(super) fn retire(&mut self, out: &mut Completions) -> Result<(), LinkEnd> {
        self.sent = 0;
        if !self.ends.is_empty() {
            let (sent, _) = self.out.kept.progress();
            while self.ends.pop_front_if(|end| *end <= sent).is_some() {}
        }
        self.out.release()?;
        let (_, _, released) = self.out.kept.counts();
        while self.held.pop_front_if(|write| write.number <= released).is_some() {
            out.push(self.id, Event::Done);
        }
        self.wants_room = false;
        Ok(())
    }

    /// Whether a poll has something to report, or to free for somebody who found the queue full,
    /// without anything new from the peer.
    #[inline]
    pub(super) fn has_completion(&self) -> bool {
        let (_, acknowledged, released) = self.out.kept.counts();
        self.held.front().is_some_and(|write| write.number <= acknowledged)
            || self.wants_room && (self.sent > 0 || acknowledged > released)
            || matches!(self.phase, TcpLinkPhase::Failing(_))
    }

    /// Whether a poll would find something. Looks at the main connection if it may have something.
    pub(super) fn has_news(&mut self) -> bool {
        if self.session.has_outcome() {
            return true;
        }
        if !self.is_connected() {
            return matches!(self.phase, TcpLinkPhase::Failing(_));
        }
        // Before a sleep.
        if self.out.received.is_awaited() {
            self.out.acknowledge();
        }
        if self.may_read && self.incoming.is_none() {
            self.fill();
        }
        // Room that comes later ends the sleep only if a send has found none.
        if self.has_output() && !self.out.in_batch {
            self.pump();
        }
        self.has_completion()
            || self.out.may_send_more()
            || self.has_frame()
            || self.main_end.is_some()
            || self.may_read
            || self.out.error().is_some()
    }

    /// Reads what is there on the main connection, once.
    pub(super) fn fill(&mut self) -> bool {
        if self.main_end.is_some() {
            return false;
        }
        match self.received.fill(&self.out.sockets.main) {
            Ok(SocketRead::Bytes(_)) => return true,
            Ok(SocketRead::Nothing) => self.may_read = self.received.is_full(),
            Ok(SocketRead::End) => self.main_end = Some(MainEnd::Closed),
            Err(error) => self.main_end = Some(MainEnd::Broken(error)),
        }
        false
    }

    /// Sends what waits: posted operations, answers to reads, credits.
    fn send(&mut self, out: &mut Completions) -> Result<(), LinkEnd> {
        self.post_answers();
        if let Some(returned) = self.unsent_credits.take() {
            self.publish_credits(returned);
        }
        if self.out.in_batch {
            return Ok(());
        }
        self.pump();
        // Not in the next poll: that one may be long after, if the caller sleeps now.
        self.retire(out)
    }

    /// Sends what is posted.
    pub(super) fn pump(&mut self) {
        self.out.pump(self.poll_bytes);
    }

    pub(super) fn post_answers(&mut self) {
        while let Some(answer) = self.answers.front() {
            let &TcpReadAnswer { ticket, len, ref source } = answer;
            let (copied, payload) = self.out.parts_of(len);
            if !self.out.has_room(copied, payload) {
                return;
            }
            self.out.post_answer(ticket, len, source.as_ref());
            self.answers.pop();
        }
    }

    /// Tells the peer of returned receives, now or as soon as there is room.
    pub(super) fn publish_credits(&mut self, returned: u32) {
        if !self.is_up() {
            return;
        }
        if self.out.kept.has_room_for_last(SHORT_HEADER + LONG_HEADER) {
            // An older number must not follow.
            self.unsent_credits = None;
            self.out.post(Frame::Credits { returned }, &[]);
        } else {
            self.unsent_credits = Some(returned);
        }
    }
}
