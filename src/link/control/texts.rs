//! Queued long messages. Equal texts are stored once.

use std::sync::Arc;

/// Bytes at the start of a long message that name its edge. The rest often equals that of the
/// message before: edges are refused for the same reason.
const HEAD: usize = 6;

/// A queued long message.
#[derive(Debug)]
pub(in crate::link) struct Long {
    head: [u8; HEAD],
    text: Arc<[u8]>,
}

impl Long {
    /// The message, in two parts.
    pub fn parts(&self) -> [&[u8]; 2] {
        [&self.head, &self.text]
    }
}

/// The texts of a queue's long messages, and the memory that they take.
#[derive(Debug, Default)]
pub(in crate::link) struct Texts {
    last: Option<Arc<[u8]>>,
    bytes: usize,
}

impl Texts {
    /// Bytes of all texts; equal texts count once.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Adds a message. Every long message is longer than `HEAD`.
    pub fn add(&mut self, message: &[u8]) -> Long {
        let (head, text) = message.split_at(HEAD);
        let mut own = [0; HEAD];
        own.copy_from_slice(head);
        let text = match &self.last {
            Some(last) if **last == *text => last.clone(),
            _ => self.another(text),
        };
        Long { head: own, text }
    }

    fn another(&mut self, text: &[u8]) -> Arc<[u8]> {
        let text: Arc<[u8]> = text.into();
        self.bytes += text.len();
        self.last = Some(text.clone());
        text
    }

    /// Removes a message that has left.
    pub fn remove(&mut self, Long { text, .. }: Long) {
        let is_last = self.last.as_ref().is_some_and(|last| Arc::ptr_eq(last, &text));
        // The text stays as long as another message has it.
        if Arc::strong_count(&text) > 1 + usize::from(is_last) {
            return;
        }
        self.bytes -= text.len();
        if is_last {
            self.last = None;
        }
    }

    /// Removes all messages.
    pub fn clear(&mut self) {
        *self = Texts::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(head: u8, text: u8) -> Vec<u8> {
        [[head; HEAD].as_slice(), &[text; 1000]].concat()
    }

    #[test]
    fn a_text_is_kept_once_as_long_as_a_message_has_it() {
        let mut texts = Texts::default();
        let longs: Vec<_> = [(1, 7), (2, 7), (3, 7), (4, 8), (5, 7)]
            .map(|(head, text)| (texts.add(&message(head, text)), message(head, text)))
            .into();
        for (long, message) in &longs {
            assert_eq!(long.parts().concat(), *message);
        }
        assert_eq!(texts.bytes(), 3000, "what is not that of the one before is kept again");
        let left = longs.into_iter().map(|(long, _)| {
            texts.remove(long);
            texts.bytes()
        });
        assert_eq!(left.collect::<Vec<_>>(), [3000, 3000, 2000, 1000, 0]);
        assert!(texts.last.is_none());
    }

    #[test]
    fn a_queue_that_is_cleared_has_none() {
        let mut texts = Texts::default();
        let first = texts.add(&message(1, 7));
        drop(first);
        texts.clear();
        assert_eq!((texts.bytes(), texts.last), (0, None));
    }
}
