//! A receive that reads the messages of its peer as a link does, while the peer changes them.

use super::{tensor, tensor_mut};
use crate::fabric::shm::memory::slot::RingShape;
use crate::fabric::words::StoreWords;
use crate::fabric::{Accept, LentBytes, NextMessage};
use crate::memory::{Pool, Tensor};
use crate::wire::message::{LentRecord, PlainRecord};
use crate::wire::{EdgeId, SHORT_WORDS, ShortMessage, UnreadMessage};
use std::cell::Cell;
use std::sync::atomic::Ordering::Release;

/// The record that the receive waits for, without its bytes.
pub(crate) const EXPECTED: PlainRecord<'static> =
    PlainRecord { edge: EdgeId { number: 3, generation: 1 }, n: 2, step: 5, meta: 1, data: &[] };

/// Takes the next message if it is [`EXPECTED`] with any bytes.
pub(crate) struct RecordReader<'a> {
    pub pool: &'a Pool,
    /// Called before each word of a short message is read, with its number.
    pub before: &'a dyn Fn(usize),
    /// Whether a loan is kept.
    pub keeps: bool,
}

/// What a [`RecordReader`] has taken.
#[derive(Debug)]
pub(crate) enum Read {
    Copied(Tensor),
    Kept(LentBytes),
}

/// Writes word `k` of a short message in every slot of a ring.
pub(crate) fn change_messages(ring: &impl StoreWords, shape: RingShape, k: usize, value: u64) {
    (0..shape.slots()).for_each(|slot| ring.store(shape.word(slot, 1 + k), value, Release));
}

impl Accept<Read> for RecordReader<'_> {
    fn accept(self, next: NextMessage<'_>) -> Option<Read> {
        let PlainRecord { edge, n, step, .. } = EXPECTED;
        let bytes = match next {
            NextMessage::Short(message) => return self.accept_short(message.unread()),
            NextMessage::Bytes(bytes) => {
                let plain = PlainRecord::decode(bytes)?;
                ((plain.edge, plain.n, plain.step) == (edge, n, step)).then_some(plain.data)?
            }
            NextMessage::Lent(message, loan) => {
                let lent = LentRecord::from_message(message)?;
                if (lent.edge, lent.n, lent.step) != (edge, n, step) {
                    return None;
                }
                if self.keeps {
                    return loan.keep().map(Read::Kept);
                }
                loan.bytes
            }
        };
        Some(Read::Copied(tensor(self.pool, bytes)))
    }

    /// As a link does, with a note of each word.
    fn accept_short(self, message: UnreadMessage<impl Fn(usize) -> u64>) -> Option<Read> {
        let PlainRecord { edge, n, step, .. } = EXPECTED;
        let UnreadMessage { len, first, word } = message;
        let read = [const { Cell::new(None) }; SHORT_WORDS];
        let word = |k: usize| {
            (self.before)(k);
            let value = word(k);
            assert_eq!(read[k].replace(Some(value)), None, "word {k} was read twice");
            value
        };
        let message = UnreadMessage { len, first, word };
        let meta = PlainRecord::meta_of_short(&message, edge, n, step)?;
        let mut target = tensor_mut(self.pool, PlainRecord::data_len(len));
        PlainRecord::copy_of_short(&message, target.bytes_mut());
        let words = read.map(|word| word.get().unwrap_or(0));
        let bytes = ShortMessage { len, first, words }.to_bytes();
        let target = target.freeze();
        let taken = PlainRecord { meta, data: target.bytes(), ..EXPECTED };
        assert_eq!(PlainRecord::decode(&bytes[..len]), Some(taken), "not what was read");
        Some(Read::Copied(target))
    }
}
