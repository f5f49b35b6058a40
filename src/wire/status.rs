//! How a call ended: the canonical codes of gRPC, with a message for people.

use std::borrow::Cow;
use std::fmt::{self, Write};

/// The canonical status codes (`google.rpc.Code`), which trainers and gRPC share.
///
/// ```
/// use tensorwire::{Code, Error};
///
/// /// Whether the same call may succeed later.
/// fn is_passing(error: &Error) -> bool {
///     matches!(error.code(), Code::Unavailable | Code::DeadlineExceeded | Code::ResourceExhausted)
/// }
/// assert_eq!(Code::from_number(4), Some(Code::DeadlineExceeded));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[allow(missing_docs)] // the meaning of each is the standard's
#[non_exhaustive]
pub enum Code {
    Ok = 0,
    Cancelled = 1,
    Unknown = 2,
    InvalidArgument = 3,
    DeadlineExceeded = 4,
    NotFound = 5,
    AlreadyExists = 6,
    PermissionDenied = 7,
    ResourceExhausted = 8,
    FailedPrecondition = 9,
    Aborted = 10,
    OutOfRange = 11,
    Unimplemented = 12,
    Internal = 13,
    Unavailable = 14,
    DataLoss = 15,
    Unauthenticated = 16,
}

impl Code {
    /// The code with this number, if there is one.
    pub const fn from_number(number: u8) -> Option<Code> {
        Some(match number {
            0 => Code::Ok,
            1 => Code::Cancelled,
            2 => Code::Unknown,
            3 => Code::InvalidArgument,
            4 => Code::DeadlineExceeded,
            5 => Code::NotFound,
            6 => Code::AlreadyExists,
            7 => Code::PermissionDenied,
            8 => Code::ResourceExhausted,
            9 => Code::FailedPrecondition,
            10 => Code::Aborted,
            11 => Code::OutOfRange,
            12 => Code::Unimplemented,
            13 => Code::Internal,
            14 => Code::Unavailable,
            15 => Code::DataLoss,
            16 => Code::Unauthenticated,
            _ => return None,
        })
    }
}

/// An error with a canonical code. Waiters get it, and `ERROR_STATUS` carries it to a peer.
///
/// `Display` escapes the control characters of the message, but not line feeds and tabs. A message
/// may come from a peer, which must not control a terminal.
///
/// In its process it is whole, whatever its size. Its message and its details travel to a peer
/// whole up to 256 KiB each. A longer message is cut and ends with a note. Longer details are left
/// out, and the message ends with a note.
///
/// ```
/// use tensorwire::{Code, Status};
/// let status = Status::new(Code::Aborted, "the loss is not a number").with_details(vec![1]);
/// assert_eq!(status.to_string(), "Aborted: the loss is not a number");
/// assert!(status.into_derived().derived);
/// ```
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Status {
    /// The canonical code.
    pub code: Code,
    /// The message: the attempt, the value, the reason, the remedy.
    pub message: String,
    /// Details for programs: any bytes; opaque here.
    pub details: Vec<u8>,
    /// Only the consequence of another error (a cancellation that an abort caused).
    pub derived: bool,
}

impl Status {
    /// An error of its own, with a message and no details.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Status { code, message: message.into(), details: Vec::new(), derived: false }
    }

    /// The same error, marked as only the consequence of another.
    #[must_use]
    pub fn into_derived(mut self) -> Self {
        self.derived = true;
        self
    }

    /// The same error with details for programs.
    #[must_use]
    pub fn with_details(mut self, details: Vec<u8>) -> Self {
        self.details = details;
        self
    }

    /// The same error with at most so many bytes of its text, and of its details.
    pub(crate) fn cut(&self, most: usize) -> Status {
        let (message, details) = self.shortened(most);
        Status { message: message.into(), details: details.into(), ..*self }
    }

    /// The text and the details, or as much of them as `most` bytes of each can hold. The text is
    /// cut at a character; details, which mean nothing in part, are left out. The text then ends
    /// with a note of that.
    pub(crate) fn shortened(&self, most: usize) -> (Cow<'_, str>, &[u8]) {
        let Status { message, details, .. } = self;
        let cut = message.len() > most;
        let left_out = details.len() > most;
        if !cut && !left_out {
            return (message.into(), details);
        }
        let mut note = String::new();
        if left_out {
            note += &format!(" [{} bytes of details were left out: {most} travel at most]", details.len());
        }
        let mut end = message.len();
        if end + note.len() > most {
            note += &format!(" [cut from {} bytes]", message.len());
            end = most - note.len();
        }
        while !message.is_char_boundary(end) {
            end -= 1;
        }
        (format!("{}{note}", &message[..end]).into(), if left_out { &[] } else { details })
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: ", self.code)?;
        for character in self.message.chars() {
            match character {
                '\n' | '\t' => f.write_char(character)?,
                _ if character.is_control() => write!(f, "{}", character.escape_default())?,
                _ => f.write_char(character)?,
            }
        }
        if self.derived { f.write_str(" (derived from another error)") } else { Ok(()) }
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Status {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_come_back_by_number() {
        for number in 0..=16 {
            assert_eq!(Code::from_number(number).expect("known") as u8, number);
        }
        assert_eq!(Code::from_number(17), None);
    }

    #[test]
    fn a_derived_error_says_so() {
        let status = Status::new(Code::Cancelled, "step 7 was aborted").into_derived();
        assert_eq!(status.to_string(), "Cancelled: step 7 was aborted (derived from another error)");
    }

    #[test]
    fn a_message_controls_no_terminal_and_keeps_its_lines() {
        let status = Status::new(Code::Unknown, "\x1b[2Jone\r\u{9b}\n\ttwo");
        assert_eq!(status.to_string(), "Unknown: \\u{1b}[2Jone\\r\\u{9b}\n\ttwo");
        assert_eq!(format!("{status:?}"), status.to_string());
    }
}
