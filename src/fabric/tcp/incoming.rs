//! A payload that is being received: its destination, and how much of it has come.

use super::bulk::stripe;
use super::frame::{FrameTarget, PayloadCarrier};
use super::grants::TcpGrants;
use super::io::{self, SocketRead, Sockets};
use super::options::MAX_STREAMS;
use super::reads::TcpPendingReads;
use super::receive_buffer::ReceiveBuffer;
use super::violation::TcpViolation;
use crate::wire::Immediate;
use rustix::io::Errno;

/// What a payload is for.
#[derive(Clone, Copy, Debug)]
pub(super) enum PayloadPurpose {
    Write { target: FrameTarget, immediate: Option<Immediate> },
    Answer { ticket: u32 },
}

/// How far a payload has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    Complete,
    /// More may be there now.
    More,
    /// Less came than there was room for: probably nothing more is there now.
    Waiting,
    /// Nothing more is there now.
    Drained,
    /// A connection has ended before the payload had come.
    Cut,
}

/// A payload that is being received.
#[derive(Clone, Debug)]
pub(super) struct IncomingPayload {
    pub purpose: PayloadPurpose,
    pub len: u64,
    pub by: PayloadCarrier,
    /// Number of the payload among those by bulk.
    number: u64,
    left: u64,
    /// Bytes that have come of each stripe. Of a payload by the main connection, the first.
    got: [u64; MAX_STREAMS as usize],
}

impl IncomingPayload {
    pub(super) fn new(purpose: PayloadPurpose, len: u64, by: PayloadCarrier, number: u64) -> Self {
        IncomingPayload { purpose, len, by, number, left: len, got: [0; MAX_STREAMS as usize] }
    }

    /// All bytes of the destination.
    ///
    /// # Errors
    /// If the peer may not write there, or not any more.
    #[inline]
    pub(super) fn room<'a>(
        &self,
        grants: &'a mut TcpGrants,
        reads: &'a mut TcpPendingReads,
    ) -> Result<&'a mut [u8], TcpViolation> {
        match self.purpose {
            // No key is checked without bytes.
            PayloadPurpose::Write { .. } if self.len == 0 => Ok(&mut []),
            PayloadPurpose::Write { target, .. } => grants.writable(target, self.len),
            PayloadPurpose::Answer { ticket } => reads.room(ticket, self.len),
        }
    }

    /// Receives more into `room`, which is [`IncomingPayload::room`].
    ///
    /// # Errors
    /// That of the connection.
    #[inline]
    pub(super) fn pull(
        &mut self,
        room: &mut [u8],
        received: &mut ReceiveBuffer,
        sockets: &Sockets,
        budget: &mut u64,
    ) -> Result<Progress, Errno> {
        match self.by {
            PayloadCarrier::Main => self.pull_main(room, received, sockets, budget),
            PayloadCarrier::Bulk => self.pull_bulk(room, sockets, budget),
        }
    }

    #[inline]
    fn pull_main(
        &mut self,
        room: &mut [u8],
        received: &mut ReceiveBuffer,
        sockets: &Sockets,
        budget: &mut u64,
    ) -> Result<Progress, Errno> {
        let count = received.take(&mut room[self.got[0] as usize..]);
        self.add(0, count, budget);
        if self.left == 0 {
            return Ok(Progress::Complete);
        }
        if *budget == 0 {
            return Ok(Progress::More);
        }
        match received.fill_behind(&sockets.main, &mut room[self.got[0] as usize..])? {
            SocketRead::End => Ok(Progress::Cut),
            SocketRead::Nothing => Ok(Progress::Drained),
            SocketRead::Bytes(count) => {
                self.add(0, count, budget);
                Ok(if self.left == 0 { Progress::Complete } else { Progress::Waiting })
            }
        }
    }

    fn pull_bulk(&mut self, room: &mut [u8], sockets: &Sockets, budget: &mut u64) -> Result<Progress, Errno> {
        let (streams, mut drained) = (sockets.bulk.len(), true);
        for (at, socket) in sockets.bulk.iter().enumerate() {
            let range = stripe(self.len, self.number, at, streams);
            loop {
                let rest = &mut room[(range.start + self.got[at]) as usize..range.end as usize];
                if rest.is_empty() {
                    break;
                }
                if *budget == 0 {
                    return Ok(Progress::More);
                }
                let wanted = rest.len();
                match io::receive(socket, rest)? {
                    SocketRead::End => return Ok(Progress::Cut),
                    SocketRead::Nothing => break,
                    SocketRead::Bytes(count) => {
                        self.add(at, count, budget);
                        if count < wanted {
                            drained = false;
                            break;
                        }
                    }
                }
            }
        }
        Ok(match self.left {
            0 => Progress::Complete,
            _ if drained => Progress::Drained,
            _ => Progress::Waiting,
        })
    }

    #[inline]
    fn add(&mut self, stream: usize, count: usize, budget: &mut u64) {
        self.got[stream] += count as u64;
        self.left -= count as u64;
        *budget = budget.saturating_sub(count as u64);
    }
}
