//! The channel of the two processes between turns: length-prefixed JSON on a socket.
//!
//! Every wait has a timeout, and the end of the other process ends it at once. No turn uses it.

use super::channel_message::ChannelMessage;
use super::peer_watch::PeerWatch;
use crate::error::CliError;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use tensorwire::internals::bootstrap::ProvenChannel;
use tensorwire::internals::wire::shorten;

/// How long a process waits for a message: opening a large pool takes some seconds.
pub const CHANNEL_TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes of a message at most.
const MAX_MESSAGE: usize = 1 << 20;
/// Bytes of the other side's words in an error.
pub const MAX_WORDS: usize = 1024;

/// Why the expected message did not come.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// The other process has closed its end.
    #[error("the other process has ended")]
    Gone,
    /// No message came in time.
    #[error("the other process sent no message within {0:.0?}")]
    Silent(Duration),
    /// The other process gave up.
    #[error("the other process failed: {0}")]
    Failed(String),
    /// Another message came.
    #[error("the other process sent an unexpected message: {0}")]
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
    /// Bounds each read and write.
    fn set_timeout(&self, timeout: Duration) -> std::io::Result<()>;
    /// This host's address on the connection.
    fn local_ip(&self) -> std::io::Result<IpAddr>;
}

impl Stream for UnixStream {
    fn set_timeout(&self, timeout: Duration) -> std::io::Result<()> {
        self.set_read_timeout(Some(timeout))?;
        self.set_write_timeout(Some(timeout))
    }

    fn local_ip(&self) -> std::io::Result<IpAddr> {
        Ok(Ipv4Addr::LOCALHOST.into())
    }
}

/// A proven connection between two hosts, or on one.
struct Proven {
    channel: ProvenChannel,
    local_ip: IpAddr,
}

impl Read for Proven {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        self.channel.stream().read(bytes)
    }
}

impl Write for Proven {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.channel.stream().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.channel.stream().flush()
    }
}

impl AsFd for Proven {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.stream().as_fd()
    }
}

impl Stream for Proven {
    fn set_timeout(&self, timeout: Duration) -> std::io::Result<()> {
        Stream::set_timeout(self.channel.stream(), timeout)
    }

    fn local_ip(&self) -> std::io::Result<IpAddr> {
        Ok(self.local_ip)
    }
}

/// One end of the channel.
pub struct ControlChannel {
    stream: Box<dyn Stream>,
    timeout: Duration,
}

impl ControlChannel {
    /// An end of a channel on one host. Each wait lasts at most `timeout`.
    pub fn new(stream: UnixStream, timeout: Duration) -> Result<Self, ChannelError> {
        ControlChannel::over(Box::new(stream), timeout)
    }

    /// An end of a channel whose other end has proven its name. `local_ip` is this host's address
    /// on the connection.
    pub fn proven(channel: ProvenChannel, local_ip: IpAddr, timeout: Duration) -> Result<Self, ChannelError> {
        ControlChannel::over(Box::new(Proven { channel, local_ip: local_ip.to_canonical() }), timeout)
    }

    fn over(stream: Box<dyn Stream>, timeout: Duration) -> Result<Self, ChannelError> {
        let mut channel = ControlChannel { stream, timeout };
        channel.set_timeout(timeout)?;
        Ok(channel)
    }

    /// A watch of the other process, for the waits of a turn.
    pub fn watch(&self) -> Result<PeerWatch, ChannelError> {
        Ok(PeerWatch::new(self.stream.as_fd().try_clone_to_owned()?))
    }

    /// This host's address on the connection.
    pub fn local_ip(&self) -> Result<IpAddr, ChannelError> {
        Ok(self.stream.local_ip()?)
    }

    /// Changes the timeout of each wait.
    pub fn set_timeout(&mut self, timeout: Duration) -> Result<(), ChannelError> {
        self.stream.set_timeout(timeout)?;
        self.timeout = timeout;
        Ok(())
    }

    /// Sends a message.
    pub fn send(&mut self, message: &ChannelMessage) -> Result<(), ChannelError> {
        let body = serde_json::to_vec(message).map_err(std::io::Error::from)?;
        let mut bytes = u32::try_from(body.len()).map_err(std::io::Error::other)?.to_le_bytes().to_vec();
        bytes.extend(body);
        self.stream.write_all(&bytes).map_err(|error| self.explain(error))
    }

    /// Receives a message. The timeout is one for all of its bytes. [`ChannelMessage::Failed`] is
    /// an error.
    pub fn receive(&mut self) -> Result<ChannelMessage, ChannelError> {
        let until = Instant::now() + self.timeout;
        let mut head = [0; 4];
        self.read_exact(&mut head, until)?;
        let length = u32::from_le_bytes(head) as usize;
        if length > MAX_MESSAGE {
            return Err(ChannelError::Unexpected(format!("a message of {length} bytes")));
        }
        let mut body = vec![0; length];
        self.read_exact(&mut body, until)?;
        // The parser quotes what it does not know.
        let unexpected =
            |error: serde_json::Error| ChannelError::Unexpected(shorten(&error.to_string(), MAX_WORDS));
        match serde_json::from_slice(&body).map_err(unexpected)? {
            ChannelMessage::Failed(why) => Err(ChannelError::Failed(shorten(&why, MAX_WORDS))),
            message => Ok(message),
        }
    }

    fn read_exact(&mut self, mut bytes: &mut [u8], until: Instant) -> Result<(), ChannelError> {
        while !bytes.is_empty() {
            let left = until.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).map_err(std::io::Error::other)?;
            if !self.is_readable(Some(&left)) {
                return Err(ChannelError::Silent(self.timeout));
            }
            match self.stream.read(bytes) {
                Ok(0) => return Err(ChannelError::Gone),
                Ok(count) => bytes = &mut bytes[count..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(self.explain(error)),
            }
        }
        Ok(())
    }

    /// Whether a message has come, or the other process has ended.
    pub fn is_ready(&self) -> bool {
        self.is_readable(Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))
    }

    /// Blocks until a message comes or the other process ends.
    pub fn wait(&self) {
        while !self.is_readable(None) {}
    }

    fn is_readable(&self, timeout: Option<&Timespec>) -> bool {
        let fd = self.stream.as_fd();
        // The next receive reports a failed poll.
        poll(&mut [PollFd::new(&fd, PollFlags::IN)], timeout) != Ok(0)
    }

    /// Receives this message.
    pub fn expect(&mut self, expected: &ChannelMessage) -> Result<(), ChannelError> {
        match self.receive()? {
            message if message == *expected => Ok(()),
            other => Err(ChannelError::Unexpected(format!("{other:?} instead of {expected:?}"))),
        }
    }

    /// Exchanges bytes with the other process, which calls this too.
    pub fn swap(&mut self, bytes: &[u8]) -> Result<Vec<u8>, ChannelError> {
        self.send(&ChannelMessage::Bytes(bytes.to_vec()))?;
        match self.receive()? {
            ChannelMessage::Bytes(theirs) => Ok(theirs),
            other => Err(ChannelError::Unexpected(format!("{other:?} instead of bytes"))),
        }
    }

    fn explain(&self, error: std::io::Error) -> ChannelError {
        match error.kind() {
            ErrorKind::UnexpectedEof | ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => {
                ChannelError::Gone
            }
            ErrorKind::WouldBlock | ErrorKind::TimedOut => ChannelError::Silent(self.timeout),
            _ => ChannelError::Io(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(timeout: Duration) -> (ControlChannel, ControlChannel) {
        let (left, right) = UnixStream::pair().unwrap();
        (ControlChannel::new(left, timeout).unwrap(), ControlChannel::new(right, timeout).unwrap())
    }

    #[test]
    fn messages_arrive_in_order() {
        let (mut left, mut right) = pair(CHANNEL_TIMEOUT);
        assert!(!right.is_ready());
        left.send(&ChannelMessage::Ready).unwrap();
        assert!(right.is_ready());
        left.send(&ChannelMessage::Rounds(3)).unwrap();
        right.expect(&ChannelMessage::Ready).unwrap();
        assert_eq!(right.receive().unwrap(), ChannelMessage::Rounds(3));
    }

    #[test]
    fn the_words_of_the_other_side_are_cut_and_control_no_terminal() {
        let (mut left, mut right) = pair(CHANNEL_TIMEOUT);
        left.send(&ChannelMessage::Failed(format!("\x1b[2J{}", "no".repeat(MAX_WORDS)))).unwrap();
        let error = right.receive().unwrap_err().to_string();
        assert!(
            error.contains("\\u{1b}[2Jno") && error.contains("...") && !error.contains('\x1b'),
            "{error}"
        );
        assert!(error.len() < 2 * MAX_WORDS, "{} bytes", error.len());
        let forged = format!(r#"{{"\u001b[31mfake\nline{}":1}}"#, "x".repeat(MAX_MESSAGE / 2));
        left.stream.write_all(&(forged.len() as u32).to_le_bytes()).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| left.stream.write_all(forged.as_bytes()).unwrap());
            let error = right.receive().unwrap_err().to_string();
            assert!(error.contains("unknown variant") && !error.contains(['\x1b', '\n']), "{error:?}");
            assert!(error.len() < 2 * MAX_WORDS, "{} bytes", error.len());
        });
    }

    #[test]
    fn both_sides_can_swap_bytes() {
        let (mut left, mut right) = pair(CHANNEL_TIMEOUT);
        let thread = std::thread::spawn(move || right.swap(b"right").unwrap());
        assert_eq!(left.swap(b"left").unwrap(), b"right");
        assert_eq!(thread.join().unwrap(), b"left");
    }

    #[test]
    fn a_side_that_has_ended_is_silent_or_failed_is_an_error_each() {
        let (mut left, mut right) = pair(Duration::from_millis(20));
        assert!(matches!(left.receive(), Err(ChannelError::Silent(_))));
        right.send(&ChannelMessage::Failed("no memory".into())).unwrap();
        assert!(left.receive().unwrap_err().to_string().contains("no memory"));
        drop(right);
        assert!(matches!(left.receive(), Err(ChannelError::Gone)));
    }

    #[test]
    fn a_length_past_the_limit_is_refused_before_memory_is_allocated() {
        let (mut left, mut right) =
            UnixStream::pair().map(|(l, r)| (ControlChannel::new(l, CHANNEL_TIMEOUT).unwrap(), r)).unwrap();
        right.write_all(&u32::MAX.to_le_bytes()).unwrap();
        assert!(matches!(left.receive(), Err(ChannelError::Unexpected(_))));
    }

    #[test]
    fn bytes_that_trickle_do_not_extend_the_timeout_of_a_message() {
        const TIMEOUT: Duration = Duration::from_millis(200);
        let (left, mut right) = UnixStream::pair().unwrap();
        let mut left = ControlChannel::new(left, TIMEOUT).unwrap();
        let trickle = std::thread::spawn(move || {
            let bytes = 1000_u32.to_le_bytes().into_iter().chain([b' '; 1000]);
            // A write fails once the other end is closed.
            bytes.take_while(|byte| right.write_all(&[*byte]).is_ok()).for_each(|_| {
                std::thread::sleep(TIMEOUT / 10);
            });
        });
        let since = Instant::now();
        assert!(matches!(left.receive(), Err(ChannelError::Silent(TIMEOUT))));
        assert!((TIMEOUT..TIMEOUT * 5).contains(&since.elapsed()), "{:?}", since.elapsed());
        drop(left);
        trickle.join().unwrap();
    }
}
