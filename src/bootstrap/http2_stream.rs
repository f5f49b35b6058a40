//! A connection of HTTP/2 whose peer does not fill this process's log.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Bytes with which a client begins (RFC 9113, 3.4).
const PREFACE: u32 = 24;
/// Bytes of a frame's header (RFC 9113, 4.1).
const HEADER: usize = 9;
/// The type of a PING, and the flag of its acknowledgement (RFC 9113, 6.7).
const PING: u8 = 6;
const ACK: u8 = 1;
/// The least time before a client's PING. A server sends none.
pub(super) const KEEP_ALIVE: Duration = Duration::from_secs(5);

/// Ends a connection whose peer acknowledges PINGs that this side can't have sent. h2 0.4 writes a
/// warning for each.
pub(super) struct Http2Stream<S> {
    stream: S,
    frames: Frames,
    acknowledged: u32,
    /// When a client's connection began. `None` at a server.
    pings_since: Option<Instant>,
}

impl<S> Http2Stream<S> {
    /// The server's side.
    pub(super) fn serving(stream: S) -> Self {
        Http2Stream { stream, frames: Frames::after(PREFACE), acknowledged: 0, pings_since: None }
    }

    /// The client's side.
    pub(super) fn calling(stream: S) -> Self {
        let pings_since = Some(Instant::now());
        Http2Stream { stream, frames: Frames::after(0), acknowledged: 0, pings_since }
    }

    /// How many PINGs this side may have sent.
    fn pings(&self) -> u32 {
        let most = |since: Instant| since.elapsed().as_secs() / KEEP_ALIVE.as_secs();
        self.pings_since.map_or(0, most).try_into().unwrap_or(u32::MAX)
    }
}

/// Finds the headers of frames in a stream of bytes.
struct Frames {
    /// Bytes up to the next header.
    skip: u32,
    header: [u8; HEADER],
    /// Bytes of the header that have come.
    have: usize,
}

impl Frames {
    /// The first frame begins after so many bytes.
    fn after(skip: u32) -> Self {
        Frames { skip, header: [0; HEADER], have: 0 }
    }

    /// How many PINGs the next bytes acknowledge.
    fn acknowledged(&mut self, mut bytes: &[u8]) -> u32 {
        let mut count = 0;
        while !bytes.is_empty() {
            let skipped = bytes.len().min(self.skip as usize);
            self.skip -= skipped as u32;
            let of_header = (bytes.len() - skipped).min(HEADER - self.have);
            let (header, rest) = bytes[skipped..].split_at(of_header);
            self.header[self.have..][..of_header].copy_from_slice(header);
            self.have += of_header;
            bytes = rest;
            if self.have == HEADER {
                let [high, middle, low, kind, flags, ..] = self.header;
                self.skip = u32::from_be_bytes([0, high, middle, low]);
                self.have = 0;
                count += u32::from(kind == PING && flags & ACK != 0);
            }
        }
        count
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Http2Stream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        let more = self.frames.acknowledged(&buffer.filled()[before..]);
        self.acknowledged = self.acknowledged.saturating_add(more);
        if more > 0 && self.acknowledged > self.pings() {
            buffer.set_filled(before);
            let why = "the peer acknowledges a PING that was not sent";
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, why)));
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Http2Stream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    const PREFACE_BYTES: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

    fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let len = (payload.len() as u32).to_be_bytes();
        [&len[1..], &[kind, flags, 0, 0, 0, 0], payload].concat()
    }

    #[test]
    fn acknowledgements_are_found_wherever_the_bytes_are_cut() {
        let ack = frame(PING, ACK, &[0; 8]);
        // The payload of the second frame looks like another acknowledgement.
        let parts = [PREFACE_BYTES, &frame(4, 0, &[]), &frame(0, 1, &ack), &frame(PING, 0, &[0; 8]), &ack];
        let bytes = parts.concat();
        for at in 0..=bytes.len() {
            let mut frames = Frames::after(PREFACE);
            let (head, tail) = bytes.split_at(at);
            assert_eq!(frames.acknowledged(head) + frames.acknowledged(tail), 1, "cut at {at}");
        }
        let mut frames = Frames::after(PREFACE);
        assert_eq!(bytes.chunks(1).map(|byte| frames.acknowledged(byte)).sum::<u32>(), 1);
    }

    /// Reads all that the peer sends. Returns the error, if that does not go well.
    fn read(
        make: impl FnOnce(tokio::io::DuplexStream) -> Http2Stream<tokio::io::DuplexStream>,
        sent: &[u8],
    ) -> Option<String> {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        runtime.block_on(async {
            let (ours, mut theirs) = tokio::io::duplex(1 << 16);
            let mut stream = make(ours);
            theirs.write_all(sent).await.expect("there is room");
            drop(theirs);
            let mut got = Vec::new();
            let ended = stream.read_to_end(&mut got).await;
            assert!(ended.is_err() || got == sent);
            ended.err().map(|error| error.to_string())
        })
    }

    #[test]
    fn a_server_takes_no_acknowledgement_and_a_client_those_of_its_own_pings() {
        let (ping, ack) = (frame(PING, 0, &[0; 8]), frame(PING, ACK, &[0; 8]));
        assert_eq!(read(Http2Stream::serving, &[PREFACE_BYTES, &ping].concat()), None);
        let why = read(Http2Stream::serving, &[PREFACE_BYTES, &ping, &ack].concat());
        assert!(why.is_some_and(|why| why.contains("a PING that was not sent")));
        assert_eq!(read(Http2Stream::calling, &ping), None);
        assert!(read(Http2Stream::calling, &ack).is_some_and(|why| why.contains("a PING that was not sent")));
        let later = |stream| {
            let mut stream = Http2Stream::calling(stream);
            stream.pings_since = Instant::now().checked_sub(KEEP_ALIVE * TIMES);
            stream
        };
        assert_eq!(read(later, &ack.repeat(TIMES as usize)), None);
    }

    const TIMES: u32 = 60;
}
