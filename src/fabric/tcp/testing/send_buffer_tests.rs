//! The send buffer against a receiver that acknowledges some frames, and loses its connection amid
//! others.

use super::{pool, tensor};
use crate::fabric::tcp::bulk::BulkQueue;
use crate::fabric::tcp::frame::{DecodedFrame, Frame, FrameTarget, MAX_SEND, PayloadCarrier};
use crate::fabric::tcp::send_buffer::{COPIED_PAYLOAD, SendBuffer};
use crate::memory::Tensor;
use proptest::prelude::*;
use std::io::Read;
use std::net::{TcpListener, TcpStream};

#[derive(Clone, Debug)]
enum Step {
    Message(usize),
    Write(u64),
    Credits,
    Flush,
    Receive(usize),
    Acknowledge,
    Break,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => prop_oneof![0..=224usize, 0..=MAX_SEND].prop_map(Step::Message),
        4 => prop_oneof![0..3000u64, 30_000..60_000u64].prop_map(Step::Write),
        1 => Just(Step::Credits),
        1 => Just(Step::Flush),
        4 => prop_oneof![0..2000usize, 50_000..150_000usize].prop_map(Step::Receive),
        3 => Just(Step::Acknowledge),
        1 => Just(Step::Break),
    ];
    proptest::collection::vec(step, 0..300)
}

/// Two ends of a connection whose buffers are small.
fn connection() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let sender = TcpStream::connect(listener.local_addr().expect("bound")).expect("it listens");
    let receiver = listener.accept().expect("it comes").0;
    socket2::SockRef::from(&sender).set_send_buffer_size(16 << 10).expect("set");
    for socket in [&sender, &receiver] {
        socket.set_nonblocking(true).expect("set");
    }
    (sender, receiver)
}

/// What is to come: the header without its acknowledgement, and the length of what follows it.
type Expected = (Frame, usize);

struct Exchange {
    buffer: SendBuffer,
    bulk: BulkQueue,
    sender: TcpStream,
    receiver: TcpStream,
    source: Tensor,
    posted: Vec<Expected>,
    /// Frames that have come whole, and bytes behind them.
    received: usize,
    partial: Vec<u8>,
    acknowledged: usize,
}

impl Exchange {
    fn post(&mut self, frame: Frame, len: usize) {
        let payload = &self.source.bytes()[..len];
        let is_copied = matches!(frame, Frame::Send { .. }) || len as u64 <= COPIED_PAYLOAD;
        let has_room = if is_copied { (32 + len, 0) } else { (32, len) };
        if !self.buffer.has_room(has_room.0, has_room.1) {
            return;
        }
        // What it acknowledges of the other side's says which connection it was posted for.
        let header = frame.header(7);
        let in_batch = len.is_multiple_of(3);
        if is_copied {
            let parts = payload.split_at(len.min(20));
            match len % 2 {
                0 => self.buffer.post(&self.sender, &header, payload, in_batch),
                _ => self.buffer.post_parts(&self.sender, &header, parts.into(), in_batch),
            }
        } else {
            self.buffer.post_tensor(&self.sender, &header, (&self.source, 0, len), in_batch);
        }
        self.posted.push((frame, len));
    }

    /// Reads about so many bytes, and compares the frames in them.
    fn receive(&mut self, count: usize) {
        let start = self.partial.len();
        self.partial.resize(start + count, 0);
        let read = self.receiver.read(&mut self.partial[start..]).unwrap_or(0);
        self.partial.truncate(start + read);
        let mut at = 0;
        while let Some(DecodedFrame { frame, header, .. }) =
            Frame::decode(&self.partial[at..]).expect("frames")
        {
            let (expected, len) = self.posted[self.received];
            let end = at + header + len;
            if self.partial.len() < end {
                break;
            }
            assert_eq!(frame, expected);
            assert!(self.partial[at + header..end] == self.source.bytes()[..len], "other bytes");
            self.received += 1;
            at = end;
        }
        self.partial.drain(..at);
    }

    fn acknowledge(&mut self) {
        self.acknowledged = self.received;
        self.buffer.acknowledge(self.received as u32).expect("they were sent");
        self.buffer.release(&mut self.bulk).expect("they were sent");
    }

    fn replace_connection(&mut self) {
        self.buffer.pause();
        self.buffer.flush(&self.sender);
        (self.sender, self.receiver) = connection();
        self.partial.clear();
        self.acknowledge();
        self.buffer.resume(9);
        let (posted, acknowledged, released) = self.buffer.counts();
        assert_eq!((posted as usize, acknowledged), (self.posted.len(), released));
        assert_eq!(released as usize, self.received);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn every_frame_comes_once_and_in_order(steps in steps()) {
        let pool = pool();
        let bytes: Vec<u8> = (0..60_000u32).map(|k| (k.wrapping_mul(0x9E37_79B9) >> 24) as u8).collect();
        let (sender, receiver) = connection();
        let mut exchange = Exchange {
            buffer: SendBuffer::new(64 << 10, 16),
            bulk: BulkQueue::new(1, 1),
            sender,
            receiver,
            source: tensor(&pool, &bytes),
            posted: Vec::new(),
            received: 0,
            partial: Vec::new(),
            acknowledged: 0,
        };
        let target = FrameTarget { region: 1, key: 2, offset: 3 };
        for step in steps {
            match step {
                Step::Message(len) => exchange.post(Frame::Send { len }, len),
                Step::Write(len) => {
                    let by = PayloadCarrier::Main;
                    exchange.post(Frame::Write { target, len, immediate: None, by }, len as usize);
                }
                Step::Credits => exchange.post(Frame::Credits { returned: 5 }, 0),
                Step::Flush => exchange.buffer.flush(&exchange.sender),
                Step::Receive(count) => exchange.receive(count),
                Step::Acknowledge => exchange.acknowledge(),
                Step::Break => exchange.replace_connection(),
            }
        }
        for _ in 0..10_000 {
            if exchange.received == exchange.posted.len() {
                break;
            }
            exchange.buffer.flush(&exchange.sender);
            exchange.receive(200_000);
        }
        prop_assert_eq!(exchange.received, exchange.posted.len());
        exchange.acknowledge();
        let (posted, _, released) = exchange.buffer.counts();
        prop_assert_eq!(posted, released);
        prop_assert!(exchange.buffer.is_empty());
        let wrong = exchange.buffer.acknowledge(posted as u32 + 1);
        prop_assert!(wrong.is_err());
        // Nothing of the tensor is held.
        drop(exchange.buffer);
        prop_assert!(exchange.source.is_unique());
    }
}

#[test]
fn a_frame_that_is_posted_and_not_sent_can_t_be_acknowledged() {
    let (sender, _receiver) = connection();
    let mut buffer = SendBuffer::new(64 << 10, 1);
    buffer.post(&sender, &Frame::Send { len: 0 }.header(0), &[], true);
    buffer.acknowledge(1).expect("it was posted");
    assert!(buffer.release(&mut BulkQueue::new(1, 1)).is_err());
}

#[test]
fn a_goodbye_follows_what_is_under_way_when_the_tensors_are_released() {
    let pool = pool();
    let (sender, mut receiver) = connection();
    let source = tensor(&pool, &[7; 60_000]);
    let mut buffer = SendBuffer::new(64 << 10, 4);
    let target = FrameTarget { region: 1, key: 2, offset: 3 };
    let write = Frame::Write { target, len: 60_000, immediate: None, by: PayloadCarrier::Main };
    // Until one is sent in part, and one not at all.
    let mut posted = 0;
    while buffer.has_room(32, 60_000) {
        buffer.post_tensor(&sender, &write.header(0), (&source, 0, 60_000), true);
        posted += 1;
    }
    buffer.release_tensors();
    assert!(source.is_unique());
    let goodbye = Frame::Acknowledge.header(0);
    buffer.post_goodbye(&sender, &goodbye);
    let mut all = Vec::new();
    let expected = posted * (32 + 60_000) + goodbye.len();
    let mut room = vec![0; 1 << 20];
    while all.len() < expected {
        buffer.flush(&sender);
        if let Ok(count) = receiver.read(&mut room) {
            all.extend_from_slice(&room[..count]);
        }
    }
    assert_eq!(all[expected - goodbye.len()..], goodbye[..]);
    assert!(all[32..60_032].iter().all(|byte| *byte == 7));
}
