//! Incarnations of members, and text from peers.

use super::BootstrapError;
use std::fmt;
use std::num::NonZeroU64;

/// The random number of one life of a process, drawn at start, so that messages for an earlier life
/// are recognised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Incarnation(NonZeroU64);

impl Incarnation {
    /// The life with this number; `None` for 0, which is not used.
    pub fn new(number: u64) -> Option<Self> {
        NonZeroU64::new(number).map(Incarnation)
    }

    /// Draws the number of a new life.
    ///
    /// # Errors
    /// [`BootstrapError::Random`] if the system gives no random numbers.
    pub fn random() -> Result<Self, BootstrapError> {
        loop {
            let number =
                getrandom::u64().map_err(|error| BootstrapError::Random { why: error.to_string() })?;
            if let Some(incarnation) = Self::new(number) {
                return Ok(incarnation);
            }
        }
    }

    /// The number; never 0.
    pub fn get(self) -> u64 {
        self.0.get()
    }
}

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Text from a peer, for an error message: at most `max` bytes, control characters escaped.
pub(super) fn shorten(text: &str, max: usize) -> String {
    let mut short = String::new();
    for character in text.chars() {
        let start = short.len();
        if character.is_control() {
            short.extend(character.escape_default());
        } else {
            short.push(character);
        }
        if short.len() > max {
            short.truncate(start);
            short.push_str("...");
            break;
        }
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn incarnations_are_not_zero_and_not_the_same() {
        assert_eq!(Incarnation::new(0), None);
        assert_ne!(Incarnation::random().unwrap(), Incarnation::random().unwrap());
        assert_eq!(Incarnation::new(0xb5c).unwrap().to_string(), "0000000000000b5c");
    }

    #[test]
    fn text_from_outside_is_cut_and_escaped() {
        assert_eq!(shorten("a\nb", 10), "a\\nb");
        assert_eq!(shorten("äääää", 5), "ää...");
        assert_eq!(shorten("abc", 3), "abc");
    }
}
