//! What the two processes say to each other between turns: length-prefixed JSON over a socket.
//!
//! Every wait has a deadline, and the end of the other process ends it at once. Nothing of it is measured.

use super::options::Test;
use super::plan::{Settings, Terms};
use super::workload::{PeerWatch, Subject};
use crate::CliError;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// How long one side waits for the other's word: as long as opening a large pool may take.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes of a message at most.
const MAX_MESSAGE: usize = 1 << 20;

/// A word between the two processes.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub enum ControlMessage {
    /// To the answering side, first of all: what to open.
    Open {
        /// The test that was asked for.
        test: Test,
        /// The program's version: both must be the same.
        version: String,
        /// What both sides must agree on.
        terms: Terms,
        /// What it is opened with.
        settings: Settings,
        /// The core to run on, where both are of one host's first process.
        core: usize,
    },
    /// From the answering side: it has opened, and runs on this core.
    Opened {
        /// The core.
        core: usize,
    },
    /// To the answering side: prepare, and say [`ControlMessage::Ready`].
    Turn {
        /// Who is measured.
        subject: Subject,
        /// Payload, in bytes.
        bytes: usize,
    },
    /// To the answering side: say [`ControlMessage::Ready`], answer so many round trips, and say [`ControlMessage::Done`].
    Rounds(u64),
    /// From the answering side: what was asked for is prepared.
    Ready,
    /// From the answering side: it has answered.
    Done,
    /// To the answering side: the run is over.
    Quit,
    /// From either side, for the workload: bytes that mean something to it, such as an address.
    Bytes(Vec<u8>),
    /// From the answering side: it gives up, and why.
    Failed(String),
}

/// Why the other side did not say what was expected.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// Its end of the channel is closed: it is gone.
    #[error("the other process has ended")]
    Gone,
    /// It said nothing in time.
    #[error("the other process said nothing within {0:?}")]
    Silent(Duration),
    /// It gave up.
    #[error("the other process failed: {0}")]
    Failed(String),
    /// It said something else.
    #[error("the other process said what was not expected: {0}")]
    Unexpected(String),
    /// The channel itself failed.
    #[error("the channel between the two processes failed: {0}")]
    Io(#[from] std::io::Error),
}

impl From<ChannelError> for CliError {
    fn from(error: ChannelError) -> Self {
        CliError::Failed(error.to_string())
    }
}

/// A connected socket.
trait Stream: Read + Write + AsFd + Send {
    /// How long reading and writing wait at most.
    fn set_patience(&self, patience: Duration) -> std::io::Result<()>;
    /// The address at which this host is known to the other one.
    fn local_ip(&self) -> std::io::Result<IpAddr>;
}

impl Stream for UnixStream {
    fn set_patience(&self, patience: Duration) -> std::io::Result<()> {
        self.set_read_timeout(Some(patience))?;
        self.set_write_timeout(Some(patience))
    }

    fn local_ip(&self) -> std::io::Result<IpAddr> {
        Ok(Ipv4Addr::LOCALHOST.into())
    }
}

impl Stream for TcpStream {
    fn set_patience(&self, patience: Duration) -> std::io::Result<()> {
        self.set_read_timeout(Some(patience))?;
        self.set_write_timeout(Some(patience))
    }

    fn local_ip(&self) -> std::io::Result<IpAddr> {
        Ok(self.local_addr()?.ip().to_canonical())
    }
}

/// One end.
pub struct ControlChannel {
    stream: Box<dyn Stream>,
    patience: Duration,
}

impl ControlChannel {
    /// An end between processes of one host, whose waits last for `patience` at most.
    pub fn new(stream: UnixStream, patience: Duration) -> Result<Self, ChannelError> {
        ControlChannel::over(Box::new(stream), patience)
    }

    /// An end between hosts.
    pub fn tcp(stream: TcpStream, patience: Duration) -> Result<Self, ChannelError> {
        stream.set_nodelay(true)?;
        ControlChannel::over(Box::new(stream), patience)
    }

    fn over(stream: Box<dyn Stream>, patience: Duration) -> Result<Self, ChannelError> {
        let mut channel = ControlChannel { stream, patience };
        channel.set_patience(patience)?;
        Ok(channel)
    }

    /// What guards the waits of a turn: they end when the other side is gone.
    pub fn watch(&self) -> Result<PeerWatch, ChannelError> {
        Ok(PeerWatch::new(self.stream.as_fd().try_clone_to_owned()?))
    }

    /// The address at which this host is known to the other one.
    pub fn local_ip(&self) -> Result<IpAddr, ChannelError> {
        Ok(self.stream.local_ip()?)
    }

    /// Changes how long a wait lasts at most.
    pub fn set_patience(&mut self, patience: Duration) -> Result<(), ChannelError> {
        self.stream.set_patience(patience)?;
        self.patience = patience;
        Ok(())
    }

    /// Says something.
    pub fn send(&mut self, message: &ControlMessage) -> Result<(), ChannelError> {
        let body = serde_json::to_vec(message).map_err(std::io::Error::from)?;
        let mut bytes = u32::try_from(body.len()).map_err(std::io::Error::other)?.to_le_bytes().to_vec();
        bytes.extend(body);
        self.stream.write_all(&bytes).map_err(|error| self.explain(error))
    }

    /// Hears something. A [`ControlMessage::Failed`] is an error.
    pub fn receive(&mut self) -> Result<ControlMessage, ChannelError> {
        let mut head = [0; 4];
        self.stream.read_exact(&mut head).map_err(|error| self.explain(error))?;
        let length = u32::from_le_bytes(head) as usize;
        if length > MAX_MESSAGE {
            return Err(ChannelError::Unexpected(format!("a message of {length} bytes")));
        }
        let mut body = vec![0; length];
        self.stream.read_exact(&mut body).map_err(|error| self.explain(error))?;
        match serde_json::from_slice(&body).map_err(|error| ChannelError::Unexpected(error.to_string()))? {
            ControlMessage::Failed(why) => Err(ChannelError::Failed(why)),
            message => Ok(message),
        }
    }

    /// Whether there is something to hear, or the other side is gone.
    pub fn is_ready(&self) -> bool {
        self.look(Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))
    }

    /// Blocks until there is something to hear, or the other side is gone.
    pub fn wait(&self) {
        while !self.look(None) {}
    }

    fn look(&self, timeout: Option<&Timespec>) -> bool {
        let fd = self.stream.as_fd();
        // A failed look is left to the next receive to report.
        poll(&mut [PollFd::new(&fd, PollFlags::IN)], timeout) != Ok(0)
    }

    /// Hears one message in particular.
    pub fn expect(&mut self, expected: &ControlMessage) -> Result<(), ChannelError> {
        match self.receive()? {
            message if message == *expected => Ok(()),
            other => Err(ChannelError::Unexpected(format!("{other:?} instead of {expected:?}"))),
        }
    }

    /// Gives the other side bytes and takes its own: both call it.
    pub fn swap(&mut self, bytes: &[u8]) -> Result<Vec<u8>, ChannelError> {
        self.send(&ControlMessage::Bytes(bytes.to_vec()))?;
        match self.receive()? {
            ControlMessage::Bytes(theirs) => Ok(theirs),
            other => Err(ChannelError::Unexpected(format!("{other:?} instead of bytes"))),
        }
    }

    fn explain(&self, error: std::io::Error) -> ChannelError {
        match error.kind() {
            ErrorKind::UnexpectedEof | ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => {
                ChannelError::Gone
            }
            ErrorKind::WouldBlock | ErrorKind::TimedOut => ChannelError::Silent(self.patience),
            _ => ChannelError::Io(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(patience: Duration) -> (ControlChannel, ControlChannel) {
        let (left, right) = UnixStream::pair().unwrap();
        (ControlChannel::new(left, patience).unwrap(), ControlChannel::new(right, patience).unwrap())
    }

    #[test]
    fn words_arrive_in_order() {
        let (mut left, mut right) = pair(PATIENCE);
        assert!(!right.is_ready());
        left.send(&ControlMessage::Ready).unwrap();
        assert!(right.is_ready());
        left.send(&ControlMessage::Rounds(3)).unwrap();
        right.expect(&ControlMessage::Ready).unwrap();
        assert_eq!(right.receive().unwrap(), ControlMessage::Rounds(3));
    }

    #[test]
    fn both_sides_can_swap_bytes() {
        let (mut left, mut right) = pair(PATIENCE);
        let thread = std::thread::spawn(move || right.swap(b"right").unwrap());
        assert_eq!(left.swap(b"left").unwrap(), b"right");
        assert_eq!(thread.join().unwrap(), b"left");
    }

    #[test]
    fn a_side_that_is_gone_silent_or_failed_is_an_error_each() {
        let (mut left, mut right) = pair(Duration::from_millis(20));
        assert!(matches!(left.receive(), Err(ChannelError::Silent(_))));
        right.send(&ControlMessage::Failed("no memory".into())).unwrap();
        assert!(left.receive().unwrap_err().to_string().contains("no memory"));
        drop(right);
        assert!(matches!(left.receive(), Err(ChannelError::Gone)));
    }

    #[test]
    fn a_length_past_the_limit_is_refused_before_it_is_believed() {
        let (mut left, mut right) =
            UnixStream::pair().map(|(l, r)| (ControlChannel::new(l, PATIENCE).unwrap(), r)).unwrap();
        right.write_all(&u32::MAX.to_le_bytes()).unwrap();
        assert!(matches!(left.receive(), Err(ChannelError::Unexpected(_))));
    }
}
