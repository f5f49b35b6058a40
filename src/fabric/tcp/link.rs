//! One link: its polls, and how it ends. `post` has the operations of its owner.

use super::frame::{Frame, FrameTarget, GoodbyeReason, PayloadCarrier};
use super::grants::{MAX_GRANTS, TcpGrants};
use super::incoming::{IncomingPayload, PayloadPurpose, Progress};
use super::io::{SocketRead, Sockets};
use super::outgoing::Outgoing;
use super::reads::{Answers, TcpPendingReads, TcpReadAnswer};
use super::receive_buffer::ReceiveBuffer;
use super::violation::TcpViolation;
use crate::fabric::{Completions, Event, LinkFailure, LinkId, LinkLimits, LinkOptions, MAX_MESSAGE};
use crate::memory::{Pool, Tensor};
use crate::wire::Immediate;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::net::SocketAddr;

/// Frames that one poll handles at most.
const POLL_FRAMES: usize = 64;
/// Reads of the main connection that one poll makes at most.
const POLL_READS: usize = 4;

/// The limits of a link that does not exist.
pub(super) static NOTHING: LinkLimits =
    LinkLimits { depth: 0, receives: 0, max_inline: 0, max_write: 0, lends: false, grants: 0 };

#[derive(Debug)]
pub(super) enum TcpLinkPhase {
    Up,
    /// The peer sends on a bulk connection no more: what the main one still has is of no use, but
    /// for the reason.
    Cut,
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

/// A write, until its completion is reported.
#[derive(Debug)]
pub(super) struct HeldWrite {
    /// Held until the kernel has all bytes, and the caller knows.
    #[expect(dead_code, reason = "it is only held")]
    pub tensor: Tensor,
    /// Whether the kernel has all bytes.
    pub is_sent: bool,
}

/// What a handshake leaves to make a link of.
pub(super) struct TcpLinkParts {
    pub sockets: Sockets,
    pub pool: Pool,
    /// The peer's process.
    pub pid: u32,
    pub peer: SocketAddr,
    pub main_bytes: u32,
    pub poll_bytes: u64,
}

/// One link, as its port holds it.
pub(super) struct TcpLinkInner {
    pub limits: LinkLimits,
    pub id: LinkId,
    pub pool: Pool,
    pub phase: TcpLinkPhase,
    pid: u32,
    peer: SocketAddr,
    poll_bytes: u64,
    pub out: Outgoing,
    pub received: ReceiveBuffer,
    pub incoming: Option<IncomingPayload>,
    /// Payloads by bulk that were announced so far.
    bulk_number: u64,
    /// Bytes of a payload that is of no use.
    skip: u64,
    pub main_end: Option<MainEnd>,
    /// Whether a read of the main connection may find something, as far as is known.
    pub may_read: bool,
    pub grants: TcpGrants,
    pub reads: TcpPendingReads,
    answers: Answers,
    pub held: VecDeque<HeldWrite>,
    /// Sent operations without a completion, whose places the next poll frees.
    pub sent: usize,
    /// Of those that the kernel has not taken wholly: where each ends in the bytes of the main
    /// connection.
    pub ends: VecDeque<u64>,
    /// Whether a post has found the queue full since there last was room.
    pub wants_room: bool,
    /// Posted receives.
    pub receives: u32,
    pub credits: u32,
    /// Credits that found no room.
    unsent_credits: Option<u32>,
    /// Whether the port's list of polled links has it, and how many of its polls found nothing.
    pub is_active: bool,
    pub quiet_polls: u32,
    pub is_registered: bool,
}

impl TcpLinkInner {
    pub(super) fn new(options: &LinkOptions, parts: TcpLinkParts) -> Self {
        let TcpLinkParts { sockets, pool, pid, peer, main_bytes, poll_bytes } = parts;
        let depth = options.depth;
        TcpLinkInner {
            limits: LinkLimits {
                depth,
                receives: 0, // early messages wait in the connection
                max_inline: MAX_MESSAGE,
                max_write: u64::MAX,
                lends: false,
                grants: MAX_GRANTS as u32,
            },
            id: LinkId(0),
            pool,
            phase: TcpLinkPhase::Up,
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
            is_active: false,
            quiet_polls: 0,
            is_registered: false,
        }
    }

    #[inline]
    pub(super) fn is_up(&self) -> bool {
        matches!(self.phase, TcpLinkPhase::Up | TcpLinkPhase::Cut)
    }

    /// Operations that take a place of the queue.
    #[inline]
    pub(super) fn outstanding(&self) -> usize {
        self.held.len() + self.reads.len() + self.sent + self.ends.len()
    }

    /// Polls the link. Returns whether anything was done.
    #[inline]
    pub(super) fn poll(&mut self, out: &mut Completions) -> bool {
        if !self.is_up() {
            return self.poll_when_not_up(out);
        }
        let before = out.len();
        self.retire(out);
        let received = match self.receive(out) {
            Ok(received) => received,
            Err(why) => {
                self.go_down(why, out);
                return true;
            }
        };
        if self.has_output() {
            self.send(out);
        }
        received || out.len() > before
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
    }

    /// Completes sent writes, and frees the places of sent operations.
    #[inline]
    fn retire(&mut self, out: &mut Completions) {
        self.sent = 0;
        if !self.ends.is_empty() {
            let (sent, _) = self.out.unsent.progress();
            while self.ends.pop_front_if(|end| *end <= sent).is_some() {}
        }
        while self.held.pop_front_if(|write| write.is_sent).is_some() {
            out.push(self.id, Event::Done);
        }
        self.wants_room = false;
    }

    /// Whether a poll has something to report, or to free for somebody who found the queue full,
    /// without anything new from the peer.
    #[inline]
    pub(super) fn has_completion(&self) -> bool {
        self.held.front().is_some_and(|write| write.is_sent)
            || self.wants_room && self.sent > 0
            || matches!(self.phase, TcpLinkPhase::Failing(_))
    }

    /// Whether a poll would find something. Looks at the main connection if it may have something.
    pub(super) fn has_news(&mut self) -> bool {
        if !self.is_up() {
            return matches!(self.phase, TcpLinkPhase::Failing(_));
        }
        if self.may_read && self.incoming.is_none() {
            self.fill();
        }
        self.has_completion()
            || !self.received.bytes().is_empty() && self.incoming.is_none()
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

    /// Handles what has come. Returns whether anything had.
    #[inline]
    fn receive(&mut self, out: &mut Completions) -> Result<bool, LinkFailure> {
        let mut budget = self.poll_bytes;
        let (mut frames, mut reads, mut any) = (0, 0, false);
        loop {
            if self.incoming.is_some() {
                any = true;
                if !self.pull(&mut budget, out)? {
                    return Ok(any);
                }
            }
            if frames == POLL_FRAMES {
                return Ok(any);
            }
            if self.next_frame(out)? {
                frames += 1;
                any = true;
                continue;
            }
            // Without bytes for another frame.
            if let Some(end) = self.main_end {
                return Err(self.ended(end));
            }
            if reads == POLL_READS
                || reads > 0 && !self.received.is_full() && self.received.bytes().is_empty()
            {
                return Ok(any);
            }
            reads += 1;
            let had = self.received.bytes().len();
            if !self.fill() && self.main_end.is_none() {
                self.check_sending()?;
                return Ok(any);
            }
            any |= self.received.bytes().len() > had;
        }
    }

    /// A connection that can't send any more ends the link, once nothing more is received.
    fn check_sending(&mut self) -> Result<(), LinkFailure> {
        match self.out.error() {
            Some(error) => Err(self.ended(MainEnd::Broken(error))),
            None => Ok(()),
        }
    }

    /// Handles the next frame, if its header is complete.
    #[inline]
    fn next_frame(&mut self, out: &mut Completions) -> Result<bool, LinkFailure> {
        let bytes = self.received.bytes();
        if self.skip > 0 {
            let count = self.skip.min(bytes.len() as u64);
            self.skip -= count;
            self.received.consume(count as usize);
            return Ok(count > 0);
        }
        let Some((frame, header)) = Frame::decode(bytes)? else { return Ok(false) };
        if let Frame::Send { len } = frame {
            let Some(message) = bytes.get(header..header + len) else { return Ok(false) };
            if matches!(self.phase, TcpLinkPhase::Up) {
                self.receives = self.receives.checked_sub(1).ok_or(LinkFailure::NoReceive)?;
                out.push_message(self.id, message);
            }
            self.received.consume(header + len);
            return Ok(true);
        }
        self.received.consume(header);
        self.handle(frame)?;
        Ok(true)
    }

    /// Handles a frame other than a message.
    fn handle(&mut self, frame: Frame) -> Result<(), LinkFailure> {
        if matches!(self.phase, TcpLinkPhase::Cut) {
            return self.handle_when_cut(frame);
        }
        match frame {
            Frame::Send { .. } => {}
            Frame::Credits { returned } => self.credits = returned,
            Frame::Goodbye { reason } => return Err(self.goodbye(reason)),
            Frame::Write { target, len, immediate, by } => {
                // Before anything is written.
                if immediate.is_some() && self.receives == 0 {
                    return Err(LinkFailure::NoReceive);
                }
                self.expect(PayloadPurpose::Write { target, immediate }, len, by)?;
            }
            Frame::Answer { ticket, len, by } => self.expect(PayloadPurpose::Answer { ticket }, len, by)?,
            Frame::Read { source, len, ticket } => self.asked(source, len, ticket)?,
        }
        Ok(())
    }

    fn handle_when_cut(&mut self, frame: Frame) -> Result<(), LinkFailure> {
        match frame {
            Frame::Goodbye { reason } => return Err(self.goodbye(reason)),
            Frame::Write { len, by: PayloadCarrier::Main, .. }
            | Frame::Answer { len, by: PayloadCarrier::Main, .. } => {
                self.skip = len;
            }
            _ => {}
        }
        Ok(())
    }

    fn goodbye(&self, reason: GoodbyeReason) -> LinkFailure {
        if !self.received.bytes().is_empty() {
            return TcpViolation::AfterGoodbye.into();
        }
        match reason {
            GoodbyeReason::Closed => LinkFailure::Closed,
            GoodbyeReason::Resources => LinkFailure::PeerResources,
            GoodbyeReason::Protocol => {
                LinkFailure::Protocol("the peer says so of this side, and its error says how".into())
            }
            GoodbyeReason::NoReceive => LinkFailure::NoReceive,
        }
    }

    /// Begins to receive a payload, if it is allowed.
    fn expect(&mut self, purpose: PayloadPurpose, len: u64, by: PayloadCarrier) -> Result<(), LinkFailure> {
        let number = self.bulk_number;
        self.bulk_number += u64::from(by == PayloadCarrier::Bulk);
        let incoming = IncomingPayload::new(purpose, len, by, number);
        incoming.room(&mut self.grants, &mut self.reads)?;
        self.incoming = Some(incoming);
        Ok(())
    }

    /// The peer reads.
    fn asked(&mut self, source: FrameTarget, len: u64, ticket: u32) -> Result<(), LinkFailure> {
        let source = match len {
            0 => None,
            len => {
                let (tensor, start) = self.grants.readable(source, len)?;
                Some((tensor.clone(), start))
            }
        };
        let queued = self.out.bulk.answers();
        Ok(self.answers.add(TcpReadAnswer { ticket, len, source }, queued)?)
    }

    /// Receives more of the present payload. Returns whether that was the rest.
    #[inline]
    fn pull(&mut self, budget: &mut u64, out: &mut Completions) -> Result<bool, LinkFailure> {
        let Some(incoming) = &mut self.incoming else { return Ok(true) };
        let room = incoming.room(&mut self.grants, &mut self.reads)?;
        let pulled = incoming.pull(room, &mut self.received, &self.out.sockets, budget);
        match pulled {
            Ok(Progress::Complete) => {}
            Ok(Progress::More | Progress::Waiting) => {
                self.may_read = true;
                return Ok(false);
            }
            Ok(Progress::Drained) => {
                self.may_read = false;
                self.check_sending()?;
                return Ok(false);
            }
            Err(error) if !matches!(error, Errno::CONNRESET | Errno::PIPE) => {
                return Err(self.ended(MainEnd::Broken(error)));
            }
            Ok(Progress::Cut) | Err(_) => {
                self.phase = TcpLinkPhase::Cut;
                self.incoming = None;
                self.may_read = true;
                return Ok(true);
            }
        }
        let IncomingPayload { purpose, len, .. } = *incoming;
        self.incoming = None;
        self.landed(purpose, len, out)?;
        Ok(true)
    }

    #[inline]
    fn landed(
        &mut self,
        purpose: PayloadPurpose,
        len: u64,
        out: &mut Completions,
    ) -> Result<(), LinkFailure> {
        match purpose {
            PayloadPurpose::Write { immediate: None, .. } => {}
            PayloadPurpose::Write { immediate: Some(immediate), .. } => self.signal(immediate, len, out)?,
            PayloadPurpose::Answer { .. } => {
                if let Some(target) = self.reads.take() {
                    out.push(self.id, Event::ReadDone { target });
                }
            }
        }
        Ok(())
    }

    fn signal(&mut self, immediate: Immediate, bytes: u64, out: &mut Completions) -> Result<(), LinkFailure> {
        self.receives = self.receives.checked_sub(1).ok_or(LinkFailure::NoReceive)?;
        out.push(self.id, Event::Immediate { immediate, bytes });
        Ok(())
    }

    /// Sends what waits: posted operations, answers to reads, credits.
    fn send(&mut self, out: &mut Completions) {
        self.post_answers();
        if let Some(returned) = self.unsent_credits.take() {
            self.publish_credits(returned);
        }
        if self.out.in_batch {
            return;
        }
        self.pump();
        // Not in the next poll: that one may be long after, if the caller sleeps now.
        self.retire(out);
    }

    /// Sends what is posted.
    pub(super) fn pump(&mut self) {
        let mut sent = self.out.pump(self.poll_bytes);
        for write in self.held.iter_mut().filter(|write| !write.is_sent) {
            if sent == 0 {
                return;
            }
            sent -= 1;
            write.is_sent = true;
        }
    }

    fn post_answers(&mut self) {
        while let Some(answer) = self.answers.front() {
            let &TcpReadAnswer { ticket, len, ref source } = answer;
            if !self.out.has_room(len) {
                return;
            }
            let frame = Frame::Answer { ticket, len, by: self.out.carrier(len) };
            match source {
                Some((tensor, start)) => _ = self.out.post_payload(frame, tensor, (*start, len), false),
                None => self.out.post(frame, &[]),
            }
            self.answers.pop();
        }
    }

    /// Tells the peer of returned receives, now or as soon as there is room.
    pub(super) fn publish_credits(&mut self, returned: u32) {
        if !self.is_up() {
            return;
        }
        if self.out.unsent.has_room_for_last(super::frame::SHORT_HEADER + super::frame::LONG_HEADER) {
            self.out.post(Frame::Credits { returned }, &[]);
        } else {
            self.unsent_credits = Some(returned);
        }
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
        self.out.bulk.clear();
        self.answers.clear();
        self.out.say_goodbye(reason);
        self.out.sockets.bulk.iter().for_each(|socket| _ = socket.shutdown(std::net::Shutdown::Write));
        self.finish_leaving();
    }

    /// Ends the main connection once all is sent.
    fn finish_leaving(&mut self) {
        self.out.unsent.flush(&self.out.sockets.main);
        if self.out.is_done() {
            self.out.sockets.shut_down();
        }
    }

    #[cold]
    fn poll_when_not_up(&mut self, out: &mut Completions) -> bool {
        self.finish_leaving();
        match &self.phase {
            TcpLinkPhase::Failing(why) => {
                let why = why.clone();
                self.report_down(why, out);
                true
            }
            _ => false,
        }
    }

    /// Ends the link: everything outstanding completes, then `Down`.
    #[cold]
    fn go_down(&mut self, why: LinkFailure, out: &mut Completions) {
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

    /// Why the main connection has ended without a goodbye.
    fn ended(&self, end: MainEnd) -> LinkFailure {
        let error = match (end, self.out.error()) {
            // The cause, if a send has met it before.
            (MainEnd::Closed, Some(error)) | (MainEnd::Broken(error), _) => error,
            (MainEnd::Closed, None) => return LinkFailure::PeerDied { pid: self.pid },
        };
        match error {
            Errno::CONNRESET | Errno::PIPE => LinkFailure::PeerDied { pid: self.pid },
            Errno::NOBUFS | Errno::NOMEM => LinkFailure::Resources(format!(
                "the connection to {} was given up: {error}; raise net.ipv4.tcp_mem, or free memory",
                self.peer
            )),
            Errno::TIMEDOUT => LinkFailure::Connection {
                peer: self.peer,
                error: error.to_string(),
                cause: "its host is down or cut off: check the network, and user_timeout",
            },
            error => LinkFailure::Connection {
                peer: self.peer,
                error: error.to_string(),
                cause: "a change of routes, addresses or firewalls: check the network",
            },
        }
    }

    /// Tells the peer of the end of a link that is let go, unless it knows. What was posted before
    /// still leaves.
    pub(super) fn say_last_goodbye(&mut self) {
        if self.is_up() {
            self.post_answers();
            self.out.say_goodbye(GoodbyeReason::Closed);
            self.out.pump(u64::MAX);
        }
    }
}
